"""Attention among all nodes, in which listed pairs have relations and times.

Dimensions: N nodes, E listed pairs, C channels, R relations, H heads, T channels of times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gattn.attention import Attention
from gattn.bias import SparseBias
from gattn.errors import InputError, InputTypeError, check_at_least
from gattn.graphs import CompleteGraph, GraphLike, as_graph
from gattn.graphs.builders import checked_batch
from gattn.graphs.typed import TypedGraph
from gattn.nn.shared.declared import Declared
from gattn.nn.shared.dtypes import check_dtype
from gattn.nn.shared.linear import Linear, through
from gattn.nn.transformers.all_pairs import check_heads, check_whole

__all__ = ["RelationalAttention"]


class RelationalAttention(Declared, Attention):
    r"""Every node attends to all nodes of its graph; a listed pair also has a logit and a value by its relation.

    The attention of graph Transformers on relational data, such as `Relational Graph Transformer
    <https://arxiv.org/abs/2505.10960>`_: with relation :math:`r_e` of each listed pair :math:`e = (j \to i)`,

    .. math::
        s_{ij} = \frac{q_i^\top k_j}{\sqrt{C / H}} + \sum_{e = (j \to i)} b_{r_e}, \qquad
        x'_i = W_O\, \Big\Vert_h\, \sum_j \alpha_{ij} \Big(v_j + \sum_{e = (j \to i)} u_{r_e}\Big)

    With `time_channels`, a pair's logit and value also depend on how long ago its event was, by `Time2Vec
    <https://arxiv.org/abs/1907.05321>`_: :math:`b_{r_e} + w^\top \Phi(t_e)` and :math:`u_{r_e} + W \Phi(t_e)` with
    :math:`\Phi_0(t) = \omega_0 t + \varphi_0` and :math:`\Phi_k(t) = \sin(\omega_k t + \varphi_k)`.

    No tensor of all pairs is made: biases are a `gattn.SparseBias`, and the weights of listed pairs follow from the
    log-sum-exp of each row. `gattn.TypedGraph.from_hetero` numbers the nodes of a `HeteroData` and types its edges.

    Args:
        channels: The number of channels, C.
        heads: The number of heads, a divisor of C.
        num_relations: The number of relations, R.
        time_channels: The number of channels of times, T. (default: `None`, pairs have no times)

    Shapes:
        - **input:** features `[N, C]`, pairs `[2, E]`, their relations `[E]` and times `[E]`.
        - **output:** `[N, C]`.

    Raises:
        ValueError: If a number is not positive, or `channels` is not a multiple of `heads`.

    Example:
        >>> import torch, gattn
        >>> layer = gattn.nn.RelationalAttention(16, heads=4, num_relations=3)
        >>> edge_index, relation = torch.tensor([[0, 1, 1], [1, 0, 2]]), torch.tensor([0, 1, 2])
        >>> layer(torch.randn(5, 16), edge_index, relation, batch=torch.tensor([0, 0, 0, 1, 1])).shape
        torch.Size([5, 16])
    """

    _shown = "channels heads= num_relations="

    def __init__(self, channels: int, heads: int, num_relations: int, time_channels: int | None = None):
        super().__init__()
        check_heads(channels, heads, None)
        check_at_least(1, num_relations=num_relations)
        if time_channels is not None:
            check_at_least(1, time_channels=time_channels)
        self.channels, self.heads, self.num_relations, self.time_channels = (
            channels,
            heads,
            num_relations,
            time_channels,
        )
        self.lin_query, self.lin_key, self.lin_value, self.lin_out = (Linear(channels, channels) for _ in range(4))
        self.relation_logit = Parameter(torch.empty(num_relations, heads))
        self.relation_value = Parameter(torch.empty(num_relations, channels))
        if time_channels is not None:
            self.frequency, self.phase = (Parameter(torch.empty(time_channels)) for _ in range(2))
            self.time_logit = Linear(time_channels, heads, bias=False)
            self.time_value = Linear(time_channels, channels, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Resets all parameters; relations start without a logit."""
        super().reset_parameters()
        with torch.no_grad():
            self.relation_logit.zero_()
            self.relation_value.normal_(std=0.02)
            if self.time_channels is not None:
                self.frequency.copy_(10.0 ** -torch.linspace(0, 6, self.time_channels))
                self.phase.zero_()

    def forward(
        self,
        x: Tensor,
        edge_index: GraphLike,
        edge_type: Tensor | None = None,
        batch: Tensor | None = None,
        time: Tensor | None = None,
    ) -> Tensor:
        """Attends among all nodes of each graph.

        Args:
            x: The features, `[N, C]`.
            edge_index: The listed pairs, sources above targets, in any form that `gattn.attend` takes.
            edge_type: The relation of each, `[E]`. (default: `None`, those of a `gattn.TypedGraph`)
            batch: The graph of each node, `[N]`, in ascending order; pairs may not join two graphs. (default: `None`, a
                single graph)
            time: How long ago each pair's event was, `[E]`, in any unit. (default: `None`)

        Returns:
            The output, `[N, C]`.

        Raises:
            TypeError: If an argument is not a tensor of a kind that fits.
            ValueError: If shapes do not fit, a pair joins two graphs, or times are missing or unknown.
            IndexError: If there is no such node or relation.
        """
        check_whole(self, edge_index)
        if not isinstance(x, Tensor):
            raise InputTypeError(f"x must be a tensor; got {type(x).__name__}.")
        if x.dim() != 2 or x.size(1) != self.channels:
            raise InputError(f"x must be [N, {self.channels}]; got {list(x.shape)}.")
        check_dtype(self, x=x)
        if edge_type is None and isinstance(edge_index, TypedGraph):
            edge_type = edge_index.edge_type
        if (time is None) != (self.time_channels is None):
            raise InputError("times are for a layer with time_channels, which needs them.")
        pairs = self._graph(edge_index, x)
        _, target = pairs.sources_and_targets()
        logit, value = self._of_pairs(edge_type, time, target.numel())
        graph = (
            CompleteGraph(x.size(0)) if batch is None else CompleteGraph.packed(batch=checked_batch(batch, x.size(0)))
        )
        bias = SparseBias(pairs, logit)
        rows = through(self.lin_query, x), through(self.lin_key, x), through(self.lin_value, x)
        query, keys, values = (torch.unflatten(part, -1, (self.heads, -1)) for part in rows)
        out, log_sum = self.attend(query, keys, values, graph, bias=bias, return_lse=True)
        wide = log_sum.dtype  # half precision would round logits before their exponentials
        bias = SparseBias(pairs, logit.to(wide))
        logits = self.weigh(query.to(wide), keys.to(wide), pairs, bias=bias, distribution=None)
        weights = (logits - log_sum.index_select(0, target.long())).exp().to(values.dtype)  # of listed pairs among all
        out = out + self.weighted_sum(weights, torch.zeros_like(values), pairs, edge_value=value)
        return self.lin_out(out.flatten(1))  # type: ignore[no-any-return]

    def _graph(self, edge_index: GraphLike, x: Tensor) -> Any:
        return as_graph(edge_index).resolve(x.size(0), x.size(0)).listed(x.device)

    def _of_pairs(self, edge_type: Tensor | None, time: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
        """The logit of each pair, `[E, H]`, and its value, `[E, H, C / H]`."""
        for name, tensor in (("edge_type", edge_type), *([("time", time)] if time is not None else [])):
            if not isinstance(tensor, Tensor):
                raise InputTypeError(f"{name} must be a tensor; got {type(tensor).__name__}.")
            if tensor.shape != (count,):
                raise InputError(f"{name} must have one entry per pair, [{count}]; got {list(tensor.shape)}.")
        assert edge_type is not None
        if edge_type.is_floating_point() or edge_type.is_complex() or edge_type.dtype == torch.bool:
            raise InputTypeError(f"edge_type must hold integers; got {edge_type.dtype}.")
        if not torch.compiler.is_compiling() and count and not edge_type.is_meta:
            low, high = int(edge_type.min()), int(edge_type.max())
            if low < 0 or high >= self.num_relations:
                raise IndexError(f"there are {self.num_relations} relations, from 0; got {low} to {high}.")
        if time is not None and time.is_complex():
            raise InputTypeError(f"time must hold numbers; got {time.dtype}.")
        index = edge_type.long()
        logit, value = self.relation_logit[index], self.relation_value[index]
        if time is not None:
            angle = time.double().unsqueeze(-1) * self.frequency.double() + self.phase.double()
            encoding = torch.cat([angle[:, :1], angle[:, 1:].sin()], -1).to(logit.dtype)
            logit, value = logit + self.time_logit(encoding), value + self.time_value(encoding)
        return logit, torch.unflatten(value, -1, (self.heads, -1))
