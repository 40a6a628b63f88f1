"""The graph attention layer."""

from __future__ import annotations

from typing import Any, ClassVar, Optional

import torch
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn.inits import glorot, zeros
from torch_geometric.typing import OptPairTensor  # noqa: F401 - PyG looks it up here

from gattn.attention import fused
from gattn.autocast import is_autocast
from gattn.edges import EdgeTerm, Projected
from gattn.errors import is_integer
from gattn.graphs import GraphLike
from gattn.nn.shared.attention_conv import AttentionConv, AttentionWeights, projects
from gattn.nn.shared.linear import Linear, is_plain
from gattn.ops import reference
from gattn.products import linear
from gattn.scores import GATScore
from gattn.torch_private import is_traced

__all__ = ["GATConv"]


class GATConv(AttentionConv):
    r"""The graph attention layer of `Graph Attention Networks <https://arxiv.org/abs/1710.10903>`_.

    .. math::
        x'_i = \sum_{j \in \mathcal{N}(i) \cup \{i\}} \alpha_{ij} W x_j, \qquad
        \alpha_{i\cdot} = \mathrm{softmax}_j \, \mathrm{LeakyReLU}
        (\langle a_{dst}, W x_i \rangle + \langle a_{src}, W x_j \rangle + \langle a_{edge}, W_e e_{ij} \rangle)

    A drop-in replacement for `torch_geometric.nn.GATConv`, with the same arguments, parameter names and results. It
    also supports features `[B, N, F]` over one graph, sparse features, `SparseGraph` and `CompleteGraph`,
    `value_dropout`, and float32 accumulation in half precision. Differences: with `flow="target_to_source"` a pair `x`
    gives as many rows as there are targets; `edge_attr` without `edge_dim`, or the reverse, is an error instead of
    being ignored.

    Args:
        in_channels: Channels of the input; `-1` infers them from the first call; a pair for a bipartite graph
            (sources, targets).
        out_channels: Channels of the output, per head.
        heads: Number of heads. (default: `1`)
        concat: Whether heads are concatenated rather than averaged. (default: `True`)
        negative_slope: Slope of the LeakyReLU. (default: `0.2`)
        dropout: Probability that an attention weight is dropped, in training. (default: `0.0`)
        add_self_loops: Whether every node attends to itself. (default: `True`)
        edge_dim: Channels of the edge features; `-1` infers them from the first call. (default: `None`, no edge
            features)
        fill_value: Edge features of the self-loops: a number, a tensor, or how to aggregate those of the edges that
            point to the node: `"add"`, `"mean"`, `"min"`, `"max"`, `"mul"`. (default: `"mean"`)
        bias: Whether a bias is learnt. (default: `True`)
        residual: Whether a learnt linear skip connection is added. (default: `False`)
        value_dropout: Probability that a projected feature is dropped where it is summed (not where it is compared), in
            training, as in the code of the paper's authors. (default: `0.0`)
        **kwargs: Arguments of `torch_geometric.nn.conv.MessagePassing`, such as `flow` and `aggr`.

    Shapes:
        - **input:** features `[N, F_in]` or `([M, F_src], [N, F_dst])`, edge indices `[2, E]`, edge features `[E, D]`.
        - **output:** `[N, H * F_out]`, or `[N, F_out]` with `concat=False`.

    Raises:
        ValueError: If an option is out of range, or (in `forward`) features and graph do not fit.

    Example:
        >>> import torch, gattn
        >>> conv = gattn.nn.GATConv(16, 8, heads=4)
        >>> conv(torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]])).shape
        torch.Size([3, 32])
    """

    propagate_type: ClassVar[dict[str, Any]] = {"x": "OptPairTensor", "alpha": Tensor}
    edge_updater_type_of_pyg: ClassVar[dict[str, Any]] = {"alpha": "OptPairTensor", "edge_attr": Optional[Tensor]}  # noqa: UP045

    takes_shards = True

    _starts = (("att_src", glorot), ("att_dst", glorot), ("att_edge", glorot), ("bias", zeros))

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        edge_dim: int | None = None,
        fill_value: float | Tensor | str = "mean",
        bias: bool = True,
        residual: bool = False,
        *,
        value_dropout: float = 0.0,
        **kwargs: Any,
    ):
        super().__init__(
            in_channels,
            out_channels,
            heads=heads,
            concat=concat,
            dropout=dropout,
            value_dropout=value_dropout,
            edge_dim=edge_dim,
            **kwargs,
        )
        self.negative_slope = negative_slope
        self.add_self_loops = add_self_loops
        self.fill_value = fill_value
        self.residual = residual

        channels = heads * out_channels
        self.lin: Linear | None = None
        self.lin_src: Any = None
        self.lin_dst: Any = None
        if is_integer(in_channels):
            self.lin = Linear(in_channels, channels, bias=False, weight_initializer="glorot")
        else:
            self.lin_src = Linear(in_channels[0], channels, bias=False, weight_initializer="glorot")
            self.lin_dst = Linear(in_channels[1], channels, bias=False, weight_initializer="glorot")
        self.att_src = Parameter(torch.empty(1, heads, out_channels))
        self.att_dst = Parameter(torch.empty(1, heads, out_channels))
        if edge_dim is not None:
            self.lin_edge = Linear(edge_dim, channels, bias=False, weight_initializer="glorot")
            self.att_edge = Parameter(torch.empty(1, heads, out_channels))
        else:
            self.lin_edge = None
            self.register_parameter("att_edge", None)
        total = channels if concat else out_channels
        if residual:
            target_channels = in_channels if is_integer(in_channels) else in_channels[1]
            self.res = Linear(target_channels, total, bias=False, weight_initializer="glorot")
        else:
            self.register_parameter("res", None)
        if bias:
            self.bias = Parameter(torch.empty(total))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor | None],
        edge_index: GraphLike,
        edge_attr: Tensor | None = None,
        size: tuple[int, int] | None = None,
        return_attention_weights: bool | None = None,
        *,
        edge_weight: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, AttentionWeights]:
        """Attends over each node's neighbours.

        Args:
            x: Features `[..., N, F]` (dense, or `[N, F]` sparse), or a pair (sources, targets), the second possibly
                `None`.
            edge_index: The graph, in any form that `gattn.attend` takes.
            edge_attr: Edge features `[E, D]`, with `edge_dim`. (default: `None`)
            size: The number of nodes that each row of `edge_index` refers to, if the features do not say.
                (default: `None`)
            return_attention_weights: Whether to return the weights, after dropout, as well. (default: `None`)
            edge_weight: A factor for each edge's weight after the softmax, `[E]`; self-loops that the layer adds
                get 1. It also multiplies returned weights, but not recorded ones. (default: `None`)

        Returns:
            `[..., N, H * F_out]`; with `return_attention_weights`, a pair of that and the result of
            `SparseGraph.with_weights`, which is `(graph, weights)` for a `CompleteGraph`.

        Raises:
            ValueError: If features, graph and options do not fit; the message says which.
            IndexError: If an index of the graph is out of range (in compiled code, when the kernels run).
        """
        sources, targets = self._inputs(x)
        graph = self._graph(edge_index, sources, targets, self.add_self_loops, size)
        lin_src, lin_dst = (self.lin_src, self.lin_dst) if self.lin is None else (self.lin, self.lin)

        value = self._heads(lin_src(sources))
        if targets is sources and lin_dst is lin_src:
            key, query = self._terms(sources, lin_src, (self.att_src, self.att_dst), value)
        else:
            (key,), query = self._terms(sources, lin_src, (self.att_src,), value), None
            if targets is not None:
                (query,) = self._terms(targets, lin_dst, (self.att_dst,))

        score = GATScore(self.negative_slope)
        found = self._attend_with_loops(
            query, key, value, graph, edge_attr, score, return_attention_weights, edge_weight
        )
        out, alpha, graph = found
        if self.res is not None and targets is not None:
            out = out + self.res(targets)
        return out if alpha is None else (out, graph.with_weights(alpha))

    @fused
    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:  # type: ignore[override]
        """Weighted values of the sources, `[..., E, H, C]`; edges add nothing to them."""
        return reference.messages(x_j, alpha, None)

    def _terms(
        self, x: Tensor, lin: Any, vectors: tuple[Tensor, ...], projected: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """The score's terms of each node, `[..., N, H]`: products of vectors and W x, which may be given."""
        if projected is not None and self._multiplies(x, projected, vectors):
            return tuple([(projected * vector).sum(-1) for vector in vectors])
        # a⊤(W x) costs less as (a⊤W) x, unless W x is given and has fewer channels than x.
        is_cheaper = projected is None or x.size(-1) <= self.heads * self.out_channels
        is_dense = x.layout == torch.strided and x.dtype == vectors[0].dtype and not is_autocast(x)
        folds = is_cheaper and is_dense and is_plain(lin) and lin.weight.dtype == x.dtype
        if projected is None and not folds:
            projected = self._heads(lin(x))
            if self._multiplies(x, projected, vectors):
                return tuple((projected * vector).sum(-1) for vector in vectors)
        stacked = vectors[0] if len(vectors) == 1 else torch.cat(vectors)
        if folds:
            weight = lin.weight.view(self.heads, self.out_channels, -1)
            combined = torch.bmm(stacked.transpose(0, 1), weight).transpose(0, 1).flatten(0, 1)
        else:  # one product with a block-diagonal matrix is several times as fast as H small ones
            assert projected is not None
            diagonal = torch.eye(self.heads, dtype=stacked.dtype, device=stacked.device).unsqueeze(-1)
            combined, x = (stacked.unsqueeze(1) * diagonal).flatten(2).flatten(0, 1), projected.flatten(-2)
        terms = linear(x, combined)
        return terms.view(*terms.shape[:-1], len(vectors), self.heads).unbind(-2)

    @staticmethod
    def _multiplies(x: Tensor, projected: Tensor, vectors: tuple[Tensor, ...]) -> bool:
        """Whether W x is multiplied by the vectors: types are mixed, as under autocast, or it is small."""
        if projected.dtype != vectors[0].dtype or x.dtype != projected.dtype:
            return True
        return not is_traced() and projected.numel() < _SMALL  # traced programs must not depend on sizes

    def _project_edges(self, lin_edge: Linear, edge_attr: Tensor) -> EdgeTerm:
        """W_e and a_edge folded into one projection, `[H, D]`, without an `[E, H, C]` tensor."""
        if projects(lin_edge, edge_attr):
            weight = lin_edge.weight.view(self.heads, self.out_channels, -1)
            return Projected(edge_attr, (weight * self.att_edge.squeeze(0).unsqueeze(-1)).sum(1))
        return (self._heads(lin_edge(edge_attr)) * self.att_edge).sum(-1)


#: Projections with fewer elements are multiplied by the vectors directly, as calling operators would dominate the cost.
_SMALL = 1 << 15
