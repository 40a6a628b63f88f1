"""The graph layer of a design space: sums or attention, with directed or undirected messages."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.nn.inits import glorot

from gattn.autocast import is_autocast
from gattn.edges import EdgeTerm, Projected
from gattn.errors import InputError, check_at_least, is_integer
from gattn.graphs import Graph, GraphLike
from gattn.nn.shared.attention_conv import BaseConv
from gattn.nn.shared.declared import Declared
from gattn.nn.shared.edge_features import checked_features
from gattn.nn.shared.linear import Linear, is_affine
from gattn.scores import GATScore, Score

__all__ = ["GeneralConv"]

_SLOPE = 0.2


class GeneralConv(BaseConv):
    r"""The layer of `Design Space for Graph Neural Networks <https://arxiv.org/abs/2011.08843>`_.

    .. math::
        x'_i = W_{self} x_i + \frac{1}{H} \sum_h \sum_{j \in \mathcal{N}(i)} \alpha^h_{ij} m^h_{ij}, \qquad
        m_{ij} = W x_j + W_i x_i + W_e e_{ij}

    :math:`W_i` is used only with `directed_msg=False`. Without attention, :math:`\alpha = 1`. With it,

    .. math::
        \alpha_{i\cdot} = \mathrm{softmax}_j \, \mathrm{LeakyReLU}(s_{ij}), \qquad
        s_{ij} = a^{\top} m_{ij} \;\text{(additive)} \quad\text{or}\quad
        s_{ij} = m_{ji}^{\top} m_{ij} / \sqrt{F_{out}} \;\text{(dot product)}

    where :math:`m_{ji}` is the message that the target would send back along the same edge. Each node is projected
    once, not once per edge.

    A drop-in replacement for `torch_geometric.nn.GeneralConv`, with the same arguments, parameter names and results. It
    also supports features `[B, N, F]` over one graph, `SparseGraph` and `CompleteGraph`, and float32 accumulation in
    half precision. Differences: with `flow="target_to_source"` a pair `x` gives as many rows as there are targets;
    `edge_attr` without `in_edge_channels`, or the reverse, is an error; `reset_parameters()` also resets :math:`W_i`.

    Args:
        in_channels: Channels of the input; `-1` infers them from the first call; a pair for a bipartite graph
            (sources, targets).
        out_channels: Channels of the output, which is the mean of the heads.
        in_edge_channels: Channels of the edge features; `-1` infers them from the first call. (default: `None`, no edge
            features)
        aggr: How messages are aggregated: `"add"`, `"mean"`, `"max"` or another of PyG's aggregations.
            (default: `"add"`)
        skip_linear: Whether the skip connection always has a matrix. Otherwise, it has one only if `in_channels`
            differs from `out_channels`. (default: `False`)
        directed_msg: Whether messages depend only on their source, and not on the target. (default: `True`)
        heads: Number of heads. (default: `1`)
        attention: Whether messages are weighted. (default: `False`)
        attention_type: `"additive"` or `"dot_product"`; it has no effect without `attention`. (default: `"additive"`)
        l2_normalize: Whether each row of the output is divided by its length. (default: `False`)
        bias: Whether the linear layers have biases. (default: `True`)
        **kwargs: Arguments of `torch_geometric.nn.conv.MessagePassing`, such as `flow`.

    Shapes:
        - **input:** features `[N, F_in]` or `([M, F_src], [N, F_dst])`, edge indices `[2, E]`, edge features `[E, D]`.
        - **output:** `[N, F_out]`.

    Raises:
        ValueError: If an option is unknown or out of range, or sources and targets share a matrix but have different
            numbers of channels; or (in `forward`) features and graph do not fit.

    Example:
        >>> import torch, gattn
        >>> conv = gattn.nn.GeneralConv(16, 8, heads=4, attention=True)
        >>> conv(torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]])).shape
        torch.Size([3, 8])
    """

    scaler: Tensor

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        in_edge_channels: int | None = None,
        aggr: Any = "add",
        skip_linear: bool = False,
        directed_msg: bool = True,
        heads: int = 1,
        attention: bool = False,
        attention_type: str = "additive",
        l2_normalize: bool = False,
        bias: bool = True,
        **kwargs: Any,
    ):
        super().__init__(aggr, **kwargs)
        check_at_least(1, heads=heads, out_channels=out_channels)
        if attention and attention_type not in ("additive", "dot_product"):
            raise InputError(f"attention_type must be 'additive' or 'dot_product'; got {attention_type!r}.")
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.in_edge_channels = in_edge_channels
        self.skip_linear = skip_linear
        self.directed_msg = directed_msg
        self.heads = heads
        self.attention = attention
        self.attention_type = attention_type
        self.normalize_l2 = l2_normalize

        source_channels, target_channels = (in_channels,) * 2 if is_integer(in_channels) else in_channels
        self._is_product = attention and attention_type == "dot_product"
        is_shared = self._is_product or not directed_msg
        if is_shared and source_channels != target_channels and min(source_channels, target_channels) > 0:
            raise InputError(
                "with directed_msg=False or attention_type='dot_product', sources and targets share a matrix, so they "
                f"must have the same number of channels; got in_channels={in_channels}."
            )
        channels = heads * out_channels
        self.lin_msg = Linear(source_channels, channels, bias=bias)
        self.lin_msg_i = None if directed_msg else Linear(source_channels, channels, bias=bias)
        self.lin_self: Any = torch.nn.Identity()
        if skip_linear or in_channels != out_channels:
            self.lin_self = Linear(target_channels, out_channels, bias=bias)
        self.lin_edge = None if in_edge_channels is None else Linear(in_edge_channels, channels, bias=bias)
        if self._is_product:
            self.register_buffer("scaler", torch.tensor(out_channels, dtype=torch.float).sqrt())
        elif attention:
            self.att_msg = Parameter(torch.empty(1, heads, out_channels))
        self._reset_most_parameters()  # the same random numbers as in PyG, which does not reset W_i here

    def reset_parameters(self) -> None:
        """Resets all parameters."""
        self._reset_most_parameters()
        if self.lin_msg_i is not None:
            self.lin_msg_i.reset_parameters()

    def _reset_most_parameters(self) -> None:
        super(Declared, self).reset_parameters()  # modules draw their numbers below
        for module in (self.lin_msg, self.lin_self, self.lin_edge):
            if isinstance(module, Linear):
                module.reset_parameters()
        if self.attention and not self._is_product:
            glorot(self.att_msg)

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: GraphLike,
        edge_attr: Tensor | None = None,
        size: tuple[int, int] | None = None,
    ) -> Tensor:
        """Sums the messages of each node's neighbours, or attends over them.

        Args:
            x: Features `[..., N, F]`, or a pair (sources, targets).
            edge_index: The graph, in any form that `gattn.attend` takes.
            edge_attr: Edge features `[..., E, D]`, with `in_edge_channels`. (default: `None`)
            size: The number of nodes that each row of `edge_index` refers to. (default: `None`, given by the features)

        Raises:
            TypeError: If an input is not a tensor.
            ValueError: If features, graph and options do not fit; the message says which.
            IndexError: If an index of the graph is out of range (in compiled code, when the kernels run).
        """
        sources, targets = self._inputs(x)
        if targets is None:
            raise InputError("GeneralConv adds the messages to the targets' own features: x[1] may not be None.")
        graph = self._graph(edge_index, sources, targets, False, size)
        value = self._heads(self.lin_msg(sources))
        own = None if self.lin_msg_i is None else self._heads(self.lin_msg_i(targets))  # the target's part of messages
        is_sum = isinstance(self.aggr_module, SumAggregation)

        edge: Tensor | None = None
        projection: Tensor | None = None
        if self.lin_edge is not None:
            assert self.in_edge_channels is not None
            graph, features = checked_features(self, graph, edge_attr, self.in_edge_channels, sources.shape[:-2])
            if is_sum and self._can_project(self.lin_edge, graph, features, value):
                edge, projection = features, self.lin_edge.weight.view(self.heads, self.out_channels, -1)
                if self.lin_edge.bias is not None:
                    value = value + self.lin_edge.bias.view(self.heads, self.out_channels)
            else:
                edge = self._heads(self.lin_edge(features))
        elif edge_attr is not None:
            raise InputError(
                "got edge_attr, but this layer was made without edge features: make GeneralConv with in_edge_channels."
            )

        score: Score
        query: Tensor | None
        if self._is_product:
            score, query, key, term = self._product(sources, targets, value, own, edge)
        else:
            score, query, key, term = self._sum_of_scalars(value, own, edge, projection)

        if own is not None and is_sum:  # added below, times the sum of the weights, which a channel of ones gives
            value = F.pad(value, (0, 1), value=1.0)
            if projection is not None:
                projection = F.pad(projection, (0, 0, 0, 1))
            elif edge is not None:
                edge = F.pad(edge, (0, 1))
        elif own is not None:
            part = own.index_select(-3, graph.listed(own.device).sources_and_targets()[1])
            edge = part if edge is None else edge + part

        bias: Tensor | None = None
        edge_value: EdgeTerm | None = edge
        if projection is not None:  # the kernels project edge features for the values, but not for two terms at once
            assert edge is not None
            source, target = graph.sources_and_targets()
            query = None if query is None else query.index_select(-2, target)
            bias = score.logits(query, key.index_select(-2, source), term)
            query, term, edge_value = None, None, Projected(edge, projection)
        out = self.attend(
            query,
            key if bias is None else None,
            value,
            graph,
            score=score,
            edge=term,
            bias=bias,
            edge_value=edge_value,
            distribution="softmax" if self.attention else "identity",
        )
        assert isinstance(out, Tensor)
        if own is not None and is_sum:
            out = out[..., :-1] + out[..., -1:] * own
        out = out.mean(-2) + self.lin_self(targets)
        return F.normalize(out, dim=-1) if self.normalize_l2 else out

    def _can_project(self, lin: Linear, graph: Graph, edge_attr: Tensor, value: Tensor) -> bool:
        """Whether the kernels can project the edge features: by a matrix, and not for a product."""
        if not is_affine(lin):
            return False
        is_uniform = edge_attr.dtype == lin.weight.dtype == value.dtype and not is_autocast(edge_attr)
        return is_uniform and edge_attr.dim() == 2 and not graph.is_dense and not self._is_product

    def _sum_of_scalars(
        self, value: Tensor, own: Tensor | None, edge: Tensor | None, projection: Tensor | None
    ) -> tuple[Score, Tensor | None, Tensor, Tensor | None]:
        """The score of additive attention and its terms, `[..., H]` each; without attention, one per source."""
        if not self.attention:
            return GATScore(1.0), None, torch.ones_like(value[..., 0]), None
        query, key = (None if part is None else (part * self.att_msg).sum(-1) for part in (own, value))
        assert key is not None
        if edge is None:
            return GATScore(_SLOPE), query, key, None
        if projection is None:
            return GATScore(_SLOPE), query, key, (edge * self.att_msg).sum(-1)
        weight = (projection * self.att_msg.squeeze(0).unsqueeze(-1)).sum(1)
        return GATScore(_SLOPE), query, key, F.linear(edge, weight)

    def _product(
        self, sources: Tensor, targets: Tensor, value: Tensor, own: Tensor | None, edge: Tensor | None
    ) -> tuple[Score, Tensor, Tensor, Tensor | None]:
        """The score of dot-product attention and its terms."""
        score, is_same = _MessageProduct(self.scaler, self.directed_msg), targets is sources
        query, key = value if is_same else self._heads(self.lin_msg(targets)), value
        if own is None:
            return score, query, key, edge
        assert self.lin_msg_i is not None
        other = own if is_same else self._heads(self.lin_msg_i(sources))
        term = None if edge is None else torch.cat([edge, edge], -1)
        return score, torch.cat([query, own], -1), torch.cat([other, key], -1), term


class _MessageProduct(Score):
    r"""The LeakyReLU of the scaled product of two messages, in both directions along one edge.

    Args:
        scale: The divisor of the product.
        is_directed: Whether a message depends only on its source. If not, query and key hold two vectors per head,
            the contributions of that end to the two messages; the edge term is in both.
    """

    broadcasts = True

    def __init__(self, scale: Tensor, is_directed: bool):
        self.scale = scale
        self.is_directed = is_directed

    def logits(self, query: Tensor | None, key: Tensor, edge: Tensor | None) -> Tensor:
        """See `Score.logits`."""
        assert query is not None
        if not self.is_directed:
            both = query + key if edge is None else query + key + edge
            query, key = both.chunk(2, -1)
        elif edge is not None:
            query, key = query + edge, key + edge
        return F.leaky_relu((query * key).sum(-1) / self.scale, _SLOPE)
