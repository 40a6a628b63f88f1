"""PyG's aggregations by attention: each is message passing from elements to the set that they belong to.

Dimensions: N elements, B sets, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor
from torch.nn import Module

from gattn.attention import attend
from gattn.graphs import CompleteGraph
from gattn.nn.pooling.sets import ExportedAggregation, sets_of
from gattn.nn.transformers.multihead_attention import MultiheadAttention
from gattn.scores import DotScore, GATScore
from gattn.tracing import Leaf

__all__ = ["AttentionalAggregation", "JumpingKnowledge", "MultiAggregation", "Set2Set", "SoftmaxAggregation"]


class AttentionalAggregation(ExportedAggregation, torch_geometric.nn.AttentionalAggregation):
    r"""The sum of a set's elements with weights that a network gives to each.

    The readout of `Gated Graph Sequence Neural Networks <https://arxiv.org/abs/1511.05493>`_ and of `Graph Matching
    Networks <https://arxiv.org/abs/1904.12787>`_, with networks :math:`g` and :math:`f`:

    .. math::
        \mathrm{out} = \sum_j \alpha_j f(x_j), \qquad \alpha_j = \frac{\exp g(x_j)}{\sum_k \exp g(x_k)}

    This is a drop-in replacement for `torch_geometric.nn.AttentionalAggregation`: arguments, parameter names and
    results are the same.

    Args:
        gate_nn: The network of the logits, with one output, or with one for each channel.
        nn: The network of the elements. (default: `None`, the elements themselves)

    Shapes:
        - **input:** elements `[..., N, C]` and the set of each, `[N]`.
        - **output:** `[..., B, C]`, or as many channels as `nn` has. An empty set becomes zero.

    Raises:
        IndexError: If an index is negative.

    Example:
        >>> import torch, gattn
        >>> pool = gattn.nn.AttentionalAggregation(torch.nn.Linear(16, 1))
        >>> pool(torch.randn(5, 16), torch.tensor([0, 0, 0, 1, 1])).shape
        torch.Size([2, 16])
    """

    def forward(
        self,
        x: Tensor,
        index: Tensor | None = None,
        ptr: Tensor | None = None,
        dim_size: int | None = None,
        dim: int = -2,
    ) -> Tensor:
        """Aggregates the elements of each set.

        Args:
            x: The elements, `[..., N, C]`.
            index: The set of each element, `[N]`, in any order. (default: `None`, one set)
            ptr: The first element of each set and the number of elements, `[B + 1]`. It is not read if there is an
                `index`, as PyG passes both. (default: `None`)
            dim_size: The number of sets, B. (default: `None`, the number in `index`)
            dim: The dimension of the elements. (default: `-2`)

        Returns:
            The sets, `[..., B, C]`.

        Raises:
            IndexError: If an index is negative.
        """
        batch = {"batch": index, "batch_size": dim_size}
        gate = self.gate_nn(x) if self.gate_mlp is None else self.gate_mlp(x, **batch)
        if self.mlp is not None:
            x = self.mlp(x, **batch)
        elif self.nn is not None:
            x = self.nn(x)
        return _sums(gate, x, index, ptr, dim_size, dim)


class SoftmaxAggregation(ExportedAggregation, torch_geometric.nn.SoftmaxAggregation):
    r"""The sum of a set's elements with weights that are the softmax of the elements themselves, for each channel.

    The aggregation of `DeeperGCN: All You Need to Train Deeper GCNs <https://arxiv.org/abs/2006.07739>`_, with an
    inverse temperature :math:`t`:

    .. math::
        \mathrm{out} = \sum_j \frac{\exp(t x_j)}{\sum_k \exp(t x_k)} \odot x_j

    This is a drop-in replacement for `torch_geometric.nn.SoftmaxAggregation`: arguments, parameter names and results
    are the same.

    Args:
        t: The inverse temperature, or what it is at first. (default: `1.0`)
        learn: Whether it is learnt. (default: `False`)
        semi_grad: Whether the weights are constants in the backward pass. (default: `False`)
        channels: The number of temperatures that are learnt: one, or one for each channel. (default: `1`)

    Shapes:
        - **input:** elements `[..., N, C]` and the set of each, `[N]`.
        - **output:** `[..., B, C]`. An empty set becomes zero.

    Raises:
        ValueError: If `semi_grad` is combined with `learn`, or `channels` is given without `learn`.

    Example:
        >>> import torch, gattn
        >>> pool = gattn.nn.SoftmaxAggregation(learn=True)
        >>> pool(torch.randn(5, 16), torch.tensor([0, 0, 0, 1, 1])).shape
        torch.Size([2, 16])
    """

    def forward(
        self,
        x: Tensor,
        index: Tensor | None = None,
        ptr: Tensor | None = None,
        dim_size: int | None = None,
        dim: int = -2,
    ) -> Tensor:
        """Aggregates the elements of each set.

        Args:
            x: The elements, `[..., N, C]`.
            index: The set of each element, `[N]`, in any order. (default: `None`, one set)
            ptr: The first element of each set and the number of elements, `[B + 1]`. It is not read if there is an
                `index`, as PyG passes both. (default: `None`)
            dim_size: The number of sets, B. (default: `None`, the number in `index`)
            dim: The dimension of the elements. (default: `-2`)

        Returns:
            The sets, `[..., B, C]`.

        Raises:
            ValueError: If there are several temperatures and `x` has more than two dimensions.
            IndexError: If an index is negative.
        """
        t: Any = self.t
        if self.channels != 1:
            self.assert_two_dimensional_input(x, dim)
            t = t.view(-1, self.channels)
        logits = x.detach() * t if self.semi_grad else x * t
        return _sums(logits, x, index, ptr, dim_size, dim)


class Set2Set(ExportedAggregation, torch_geometric.nn.Set2Set):
    r"""Reads a set several times, by attention from the state of an LSTM.

    The readout of `Order Matters: Sequence to sequence for sets <https://arxiv.org/abs/1511.06391>`_:

    .. math::
        q_t = \mathrm{LSTM}(q^*_{t-1}), \qquad
        r_t = \sum_j \frac{\exp(x_j^\top q_t)}{\sum_k \exp(x_k^\top q_t)}\, x_j, \qquad
        q^*_t = [q_t \,\Vert\, r_t]

    This is a drop-in replacement for `torch_geometric.nn.Set2Set`: arguments, parameter names and results are the same.

    Args:
        in_channels: The number of channels of the elements, C.
        processing_steps: How often the set is read.
        **kwargs: Further arguments of `torch.nn.LSTM`.

    Shapes:
        - **input:** elements `[N, C]` and the set of each, `[N]`.
        - **output:** `[B, 2 * C]`.

    Raises:
        ValueError: If `x` has more than two dimensions.

    Example:
        >>> import torch, gattn
        >>> pool = gattn.nn.Set2Set(16, processing_steps=3)
        >>> pool(torch.randn(5, 16), torch.tensor([0, 0, 0, 1, 1])).shape
        torch.Size([2, 32])
    """

    def __init__(self, in_channels: int, processing_steps: int, **kwargs: Any):
        super().__init__(in_channels, processing_steps, **kwargs)

    def forward(
        self,
        x: Tensor,
        index: Tensor | None = None,
        ptr: Tensor | None = None,
        dim_size: int | None = None,
        dim: int = -2,
    ) -> Tensor:
        """Reads each set.

        Args:
            x: The elements, `[N, C]`.
            index: The set of each element, `[N]`, in any order. (default: `None`, one set)
            ptr: The first element of each set and the number of elements, `[B + 1]`. It is not read if there is an
                `index`, as PyG passes both. (default: `None`)
            dim_size: The number of sets, B. (default: `None`, the number in `index`)
            dim: The dimension of the elements. (default: `-2`)

        Returns:
            The sets, `[B, 2 * C]`.

        Raises:
            ValueError: If `x` has more than two dimensions.
            IndexError: If an index is negative.
        """
        self.assert_two_dimensional_input(x, dim)
        num_sets, graph = sets_of(x.movedim(dim, -2), index, ptr, dim_size)
        elements = x.movedim(dim, -2).unsqueeze(-2)
        state = tuple(x.new_zeros(self.lstm.num_layers, num_sets, x.size(-1)) for _ in range(2))
        out = x.new_zeros(num_sets, self.out_channels)
        for _ in range(self.processing_steps):
            query, state = self.lstm(out.unsqueeze(0), state)
            query = query.view(num_sets, 1, self.in_channels)
            read = attend(query, elements, elements, graph, score=DotScore(1.0))
            out = torch.cat([query, read], -1).squeeze(1)
        return out


class MultiAggregation(Leaf, torch_geometric.nn.MultiAggregation):
    r"""Several aggregations, combined in one of several ways, among which is attention.

    The combination of `Principal Neighbourhood Aggregation <https://arxiv.org/abs/2004.05718>`_ and of `Adaptive
    Filters and Aggregator Fusion <https://arxiv.org/abs/2104.01481>`_. With `mode="attn"`, the results :math:`x_a` of
    a set's aggregations, projected to the same width, attend to each other:

    .. math::
        \mathrm{out} = \frac{1}{A} \sum_a \mathrm{attention}(W_a x_a)

    This is a drop-in replacement for `torch_geometric.nn.MultiAggregation`: arguments, parameter names and results are
    the same. Modes other than `"attn"` are PyG's.

    Args:
        aggrs: The aggregations, by name or as modules.
        aggrs_kwargs: The arguments of each aggregation that is given by name. (default: `None`)
        mode: How they are combined: `"cat"`, `"proj"`, `"attn"`, or one of PyG's reductions. (default: `"cat"`)
        mode_kwargs: The arguments of the combination. `"attn"` needs `in_channels` and `out_channels`, and takes
            `num_heads` and the arguments of `MultiheadAttention`. (default: `None`)

    Shapes:
        - **input:** elements `[N, C]` and the set of each, `[N]`.
        - **output:** `[B, C']`, where C' depends on the mode.

    Raises:
        ValueError: If there are no aggregations, or an argument of the combination is missing.

    Example:
        >>> import torch, gattn
        >>> options = {"in_channels": 16, "out_channels": 8, "num_heads": 2}
        >>> pool = gattn.nn.MultiAggregation(["mean", "max"], mode="attn", mode_kwargs=options)
        >>> pool(torch.randn(5, 16), torch.tensor([0, 0, 0, 1, 1])).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        aggrs: list[Module | str],
        aggrs_kwargs: list[dict[str, Any]] | None = None,
        mode: str | None = "cat",
        mode_kwargs: dict[str, Any] | None = None,
    ):
        self.multihead_attn: Any
        super().__init__(aggrs, aggrs_kwargs, mode, mode_kwargs)
        if mode == "attn":
            theirs: Any = self.multihead_attn
            given = {name: value for name, value in (mode_kwargs or {}).items() if name not in _OF_SIZES}
            with torch.random.fork_rng(devices=[]):  # the numbers are those that PyG has drawn
                self.multihead_attn = MultiheadAttention(theirs.embed_dim, theirs.num_heads, **given)
            self.multihead_attn.load_state_dict(theirs.state_dict())


_OF_SIZES = ("in_channels", "out_channels", "num_heads")


class JumpingKnowledge(Leaf, torch_geometric.nn.JumpingKnowledge):
    r"""Combines what all layers of a network say about a node.

    `Representation Learning on Graphs with Jumping Knowledge Networks <https://arxiv.org/abs/1806.03536>`_. With
    `mode="lstm"`, each node attends to its own representations :math:`x^{(t)}`:

    .. math::
        \mathrm{out} = \sum_t \alpha^{(t)} x^{(t)}, \qquad
        \alpha = \mathrm{softmax}\big(w^\top \mathrm{BiLSTM}(x^{(1)}, \dots, x^{(T)}) + b\big)

    This is a drop-in replacement for `torch_geometric.nn.JumpingKnowledge`: arguments, parameter names and results are
    the same. The modes `"cat"` and `"max"` are PyG's.

    Args:
        mode: `"cat"`, `"max"` or `"lstm"`.
        channels: The number of channels of each representation, C, for `"lstm"`. (default: `None`)
        num_layers: The number of representations, T, for `"lstm"`. (default: `None`)

    Shapes:
        - **input:** T representations `[N, C]`.
        - **output:** `[N, C]`, or `[N, T * C]` for `"cat"`.

    Raises:
        AssertionError: If `mode` is unknown, or `"lstm"` lacks a size, as in PyG.

    Example:
        >>> import torch, gattn
        >>> jump = gattn.nn.JumpingKnowledge("lstm", channels=16, num_layers=3)
        >>> jump([torch.randn(5, 16) for _ in range(3)]).shape
        torch.Size([5, 16])
    """

    def forward(self, xs: list[Tensor]) -> Tensor:
        """Combines the representations.

        Args:
            xs: The representation of each layer, `[N, C]`.

        Returns:
            The nodes, `[N, C]`, or `[N, T * C]` for `"cat"`.

        Raises:
            RuntimeError: If their sizes differ.
        """
        if self.mode != "lstm":
            return super().forward(xs)  # type: ignore[no-any-return]
        x = torch.stack(xs, 1)
        logits = self.att(self.lstm(x)[0])
        graph = CompleteGraph(1, x.size(1))  # each node is an element of the batch
        return attend(None, logits, x.unsqueeze(2), graph, score=GATScore(1.0)).flatten(1)


def _sums(
    logits: Tensor, x: Tensor, index: Tensor | None, ptr: Tensor | None, dim_size: int | None, dim: int
) -> Tensor:
    """The elements `[..., N, C]` of each set, weighted by the softmax of their logits, one each or one per channel."""
    if logits.size(-1) not in (1, x.size(-1)) and x.size(-1) == 1:
        x = x.expand(*x.shape[:-1], logits.size(-1))
    dim = dim if dim < 0 else dim - x.dim()
    logits, x = logits.movedim(dim, -2), x.movedim(dim, -2)
    num_sets, graph = sets_of(x, index, ptr, dim_size)
    value = x.unsqueeze(-2) if logits.size(-1) == 1 else x.unsqueeze(-1)  # one head, or one for each channel
    front = value.shape[:-3]
    if len(front) > 2:
        logits, value = logits.flatten(0, -3), value.flatten(0, -4)
    out: Tensor = attend(None, logits, value, graph, score=GATScore(1.0))
    return out.reshape(*front, num_sets, x.size(-1)).movedim(-2, dim)
