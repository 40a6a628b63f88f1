"""The graph layer with signed weights, which raises and lowers the frequencies of a signal on the graph."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import is_torch_sparse_tensor

from gattn.errors import InputError, InputTypeError, check_flag
from gattn.graphs import FLOWS, Graph, GraphLike, SparseGraph
from gattn.graphs.edge_lists import check_range, derived
from gattn.nn.shared.attention_conv import AttentionWeights, BaseConv
from gattn.nn.shared.linear import Linear
from gattn.ops.call import compute_dtype
from gattn.ops.dropout import check_probability
from gattn.recording import record
from gattn.scores import GATScore

__all__ = ["FAConv"]


class _Normalized(NamedTuple):
    """A graph, and the factors of its messages besides the attention weights."""

    graph: Graph
    edge_weight: Tensor | None
    """`[E]`; `None` where each weight is the product of two factors."""
    factor: Tensor | None = None
    """The factor of each node, `[..., N, 1, 1]`."""


class FAConv(BaseConv):
    r"""The frequency-adaptive layer of `FAGCN <https://arxiv.org/abs/2101.00797>`_.

    .. math::
        x'_i = \epsilon x^{(0)}_i
        + \sum_{j \in \mathcal{N}(i) \cup \{i\}} \frac{\alpha_{ij}}{\sqrt{d_i d_j}} x_j, \qquad
        \alpha_{ij} = \tanh(a_r^{\top} x_i + a_l^{\top} x_j + b)

    Here :math:`d_i` is the number of edges that point to node *i*. A positive weight makes neighbours more alike, and a
    negative one makes them differ. The layer has no projections: a network adds linear layers before and after it. The
    paper is *Beyond Low-frequency Information in Graph Convolutional Networks*.

    A drop-in replacement for `torch_geometric.nn.FAConv`, with the same arguments, parameter names and results. It also
    supports features `[B, N, F]` over one graph, CSC adjacencies, `SparseGraph` and `CompleteGraph`, and float32
    accumulation in half precision. Differences: `x_0` must have the shape of `x` and is not broadcast to it.

    The authors' program has no self-loops, a bias, and another factor of :math:`x^{(0)}_i`:
    `FAConv(channels, eps=0.3, add_self_loops=False, bias=True)`.

    Args:
        channels: Channels of the input and the output; `-1` infers them from the first call.
        eps: The factor :math:`\epsilon` of the initial features. (default: `0.1`)
        dropout: Probability that an attention weight is dropped, in training. (default: `0.0`)
        cached: Whether the graph of the first call, with its degrees, is used in all later calls, whatever their graph.
            (default: `False`)
        add_self_loops: Whether every node attends to itself; has no effect with `normalize=False`. (default: `True`)
        normalize: Whether messages are divided by :math:`\sqrt{d_i d_j}`. Otherwise, they are multiplied by the
            `edge_weight` of the call. (default: `True`)
        bias: Whether there is a bias b in the weights, as in the authors' program. (default: `False`)
        **kwargs: Arguments of `torch_geometric.nn.conv.MessagePassing`, such as `flow` and `aggr`.

    Shapes:
        - **input:** features `[N, F]`, initial features `[N, F]`, edge indices `[2, E]`, edge weights `[E]`.
        - **output:** `[N, F]`.

    Raises:
        ValueError: If an option is out of range.

    Example:
        >>> import torch, gattn
        >>> x = torch.randn(3, 16)
        >>> gattn.nn.FAConv(16)(x, x, torch.tensor([[0, 1], [1, 2]])).shape
        torch.Size([3, 16])
    """

    _cached_edge_index: _Normalized | None
    _cached_adj_t: _Normalized | None

    flat_messages = True

    _shown = "channels eps="

    def __init__(
        self,
        channels: int,
        eps: float = 0.1,
        dropout: float = 0.0,
        cached: bool = False,
        add_self_loops: bool = True,
        normalize: bool = True,
        bias: bool = False,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        check_probability("dropout", dropout)
        check_flag("bias", bias)
        self.channels = self.in_channels = channels
        self.eps = eps
        self.dropout = dropout
        self.cached = cached
        self.add_self_loops = add_self_loops
        self.normalize = normalize
        self.att_l = Linear(channels, 1, bias=False)
        self.att_r = Linear(channels, 1, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Resets all parameters, as PyG does, and forgets the cached graph."""
        super().reset_parameters()
        self._cached_edge_index = None
        self._cached_adj_t = None

    def forward(
        self,
        x: Tensor,
        x_0: Tensor,
        edge_index: GraphLike,
        edge_weight: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Tensor | tuple[Tensor, AttentionWeights]:
        r"""Attends over each node's neighbours.

        Args:
            x: Features `[..., N, F]`.
            x_0: The features that the network started with, of the same shape.
            edge_index: The graph, in any form that `gattn.attend` takes. The values of a `torch.sparse` adjacency are
                its edge weights; with `normalize=True`, degrees are sums of them.
            edge_weight: A factor for each edge, `[E]`, with `normalize=False`. (default: `None`, the values of a sparse
                adjacency)
            return_attention_weights: If it is `True` or, as in PyG, `False`, the weights :math:`\alpha` before dropout
                are returned as well. (default: `None`)

        Returns:
            `[..., N, F]`; with `return_attention_weights`, a pair of that and the result of `SparseGraph.with_weights`
            for weights `[E]`, which is `(graph, weights)` for a `CompleteGraph`.

        Raises:
            TypeError: If `x` or `x_0` is not a tensor.
            ValueError: If features, graph and options do not fit; the message says which.
            IndexError: If an index of the graph is out of range (in compiled code, when the kernels run).
        """
        self._check(x, x_0)
        graph, edge_weight, factor = self._cached_or_normalized(edge_index, edge_weight, x)
        key, query = self.att_l(x), self.att_r(x)
        value = x.unsqueeze(-2)  # one head
        is_wanted = isinstance(return_attention_weights, bool)
        alpha: Any = None
        if factor is not None:
            options: dict[str, Any] = {"distribution": "tanh", "dropout": self.dropout, "return_weights": is_wanted}
            result: Any = self.attend(query, key, value * factor, graph, score=GATScore(negative_slope=1.0), **options)
            result, alpha = result if is_wanted else (result, None)
            result = result * factor
        else:
            source, target = graph.sources_and_targets()
            alpha = (key.index_select(-2, source) + query.index_select(-2, target)).tanh()
            factors = _checked_weight(edge_weight, source).unsqueeze(-1)
            if self._shows_messages(FAConv):  # with the weights that PyG exposes
                more = value.index_select(-3, source) * (factors - 1).unsqueeze(-1)
                weights = alpha
            else:
                weights, more = alpha * factors, None
            record(self, graph, weights)
            result = self.weighted_sum(weights, value, graph, edge_value=more, dropout=self.dropout)
        out: Tensor = result.squeeze(-2)
        if self.eps != 0.0:
            out = out + self.eps * x_0
        if not is_wanted:
            return out
        # On a list, PyG's weights are [E]; matrices keep the dimension of heads.
        return out, graph.with_weights(alpha if graph.is_dense else alpha.squeeze(-1))

    def _check(self, x: Tensor, x_0: Tensor) -> None:
        """Raises `TypeError` or `ValueError` if features do not fit the layer or each other."""
        if not isinstance(x, Tensor):
            raise InputTypeError(f"x must be a tensor, the features of all nodes; got {type(x).__name__}.")
        self._inputs(x)
        if self.eps == 0.0:
            return
        if not isinstance(x_0, Tensor):
            raise InputTypeError(f"x_0 must be a tensor, the initial features of all nodes; got {type(x_0).__name__}.")
        if x_0.shape != x.shape:
            raise InputError(f"x_0 must have the shape of x, {list(x.shape)}; got {list(x_0.shape)}.")

    def _cached_or_normalized(self, edge_index: GraphLike, edge_weight: Tensor | None, x: Tensor) -> _Normalized:
        """The graph with its weights; with `cached=True`, those of the first call."""
        adjacency = getattr(edge_index, "adjacency", edge_index)
        name = "_cached_adj_t" if isinstance(adjacency, SparseTensor) else "_cached_edge_index"
        found: _Normalized | None = getattr(self, name)
        if not self.normalize or found is None:
            found = self._normalized(edge_index, edge_weight, x)
            if self.normalize and self.cached:
                if not found.graph.is_dense and found.factor is not None:  # later edits have no effect
                    copied = SparseGraph(found.graph.edge_index.clone(), x.size(-2), x.size(-2), flow=found.graph.flow)
                    found = found._replace(graph=copied)
                setattr(self, name, found)
            return found
        return found._replace(graph=found.graph.resolve(x.size(-2), x.size(-2), device=x.device))

    def _normalized(self, edge_index: GraphLike, edge_weight: Tensor | None, x: Tensor) -> _Normalized:
        graph = self._graph(edge_index, x, x, self_loops=False)
        adjacency = graph.adjacency
        if not self.normalize:
            if graph.is_dense:
                raise InputError(f"with normalize=False, FAConv needs a list of edges, [2, E]; got {graph!r}.")
            return _Normalized(graph, graph.values if edge_weight is None else edge_weight)
        if edge_weight is not None or (isinstance(adjacency, SparseTensor) and adjacency.has_value()):
            raise InputError(
                "with normalize=True, FAConv computes the weights of edges itself: to pass edge_weight, make the layer "
                "with normalize=False."
            )
        if is_torch_sparse_tensor(adjacency):  # whose degrees are sums of its values, as in PyG
            return _normalized_values(graph.listed(), self.add_self_loops and not graph.self_loops, x.dtype)
        graph = graph.with_self_loops() if self.add_self_loops else graph
        factor = _inverse_roots(graph, x)
        if isinstance(self.aggr_module, SumAggregation):
            return _Normalized(graph, None, factor)
        if graph.is_dense:
            raise InputError(f"on {graph!r}, FAConv can only sum its messages; got aggr={self.aggr!r}.")
        edges = graph.listed().edges()  # self-loops are added only once, since compiled code cannot compare lengths
        graph = SparseGraph(edges.adjacency, edges.num_targets, edges.num_sources, flow=graph.flow)
        source, target = graph.sources_and_targets()  # other aggregations may not commute with a factor
        return _Normalized(graph, (factor[source] * factor[target]).flatten())


def _inverse_roots(graph: Graph, x: Tensor) -> Tensor:
    r"""The factor :math:`d_i^{-1/2}` of each node, `[..., N, 1, 1]`; zero where no edge points to it."""
    dtype = compute_dtype(x.dtype)
    edges = graph.edge_list(x.device, raw=True)
    index = edges.edge_index

    def derive() -> Tensor:
        if not torch.compiler.is_compiling():
            check_range(index, edges.num_sources, edges.num_targets, edges.flow)
        counted = index[0] != index[1] if edges.self_loops else torch.ones_like(index[0])
        real = graph.real_edges(edges)
        counted = (counted if real is None else real.squeeze(-1)).to(dtype)
        target = index[1 if edges.flow == FLOWS[0] else 0].long()
        degree = counted.new_zeros(*counted.shape[:-1], edges.num_targets).index_add(-1, target, counted)
        degree = degree + int(edges.self_loops)
        return degree.pow(-0.5).masked_fill(degree == 0, 0.0)[..., None, None]

    factor: Tensor = derived(index, ("inverse roots", dtype, edges.num_targets, edges.self_loops, edges.flow), derive)
    return factor.to(x.dtype)


def _normalized_values(graph: SparseGraph, add_self_loops: bool, dtype: torch.dtype) -> _Normalized:
    """A graph given as a `torch.sparse` adjacency, with its values normalized."""
    adjacency = graph.edges().adjacency
    if adjacency.layout == torch.sparse_csc:  # which PyG cannot normalize
        adjacency = adjacency.to_sparse_csr()
    if adjacency.layout == torch.sparse_coo:
        adjacency = adjacency.coalesce()
    adjacency, _ = gcn_norm(adjacency, None, graph.num_targets, False, add_self_loops, dtype=dtype)
    graph = SparseGraph(adjacency, graph.num_targets, graph.num_sources)
    return _Normalized(graph, graph.values)


def _checked_weight(edge_weight: Tensor | None, source: Tensor) -> Tensor:
    """Raises `TypeError` or `ValueError` if there is not one weight per edge."""
    if edge_weight is None:
        raise InputError(
            "with normalize=False, FAConv needs edge_weight, [E], or a sparse adjacency that holds the weights."
        )
    if not isinstance(edge_weight, Tensor):
        raise InputTypeError(f"edge_weight must be a tensor; got {type(edge_weight).__name__}.")
    if edge_weight.shape != source.shape:
        raise InputError(
            f"edge_weight must have one entry per edge, [{source.size(0)}], in the order of edge_index; got "
            f"{list(edge_weight.shape)}."
        )
    return edge_weight
