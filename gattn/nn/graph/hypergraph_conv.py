"""The layer for hypergraphs, whose edges join any number of nodes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.experimental import is_experimental_mode_enabled
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.nn.inits import glorot, zeros

from gattn.errors import InputError, InputTypeError, check_at_least
from gattn.graphs import FLOWS, Graph, GraphLike, SparseGraph, as_graph
from gattn.graphs.base import checked_size
from gattn.graphs.edge_lists import derived
from gattn.nn.shared.attention_conv import BaseConv
from gattn.nn.shared.linear import Linear
from gattn.ops.dropout import check_probability, draw_seed, drop
from gattn.scores import GATScore

__all__ = ["HypergraphConv"]


class HypergraphConv(BaseConv):
    r"""The layer of `Hypergraph Convolution and Hypergraph Attention <https://arxiv.org/abs/1901.08150>`_.

    .. math::
        x'_i = D_i^{-1} \sum_{e \ni i} \alpha_{ie} y_e, \qquad
        y_e = B_e^{-1} \sum_{j \in e} \alpha_{je} W x_j, \qquad
        D_i = \sum_{e \ni i} w_e, \quad B_e = |e|

    Without attention, :math:`\alpha = 1`. With it,

    .. math::
        \alpha_{ie} = \mathrm{softmax} \, \mathrm{LeakyReLU}(\langle a_1, W x_i \rangle + \langle a_2, W z_e \rangle)

    where :math:`z_e` are the features of a hyperedge, and the softmax runs over the nodes of each hyperedge or over the
    hyperedges of each node. A hypergraph is a bipartite graph of nodes and hyperedges: what a hyperedge gathers from
    its nodes goes back to them along the same edges, with the same weights.

    A drop-in replacement for `torch_geometric.nn.HypergraphConv`, with the same arguments, parameter names and results.
    It also supports features `[B, N, F]` over one hypergraph, hypergraphs in any form that `gattn.attend` takes, and
    float32 accumulation in half precision. Differences: `heads` has no effect without `use_attention`, where PyG's
    layer makes a bias that does not fit; the gradient of the hyperedges' weights is finite if a node is in no
    hyperedge; the number of hyperedges is the number of rows of their weights or features, if they are given.

    Args:
        in_channels: Channels of the input, and of the hyperedges' features; `-1` infers them from the first call.
        out_channels: Channels of the output, per head.
        use_attention: Whether nodes and hyperedges attend to each other. (default: `False`)
        attention_mode: `"node"` if the weights of all nodes of a hyperedge sum to one, or `"edge"` if those of all
            hyperedges of a node do. (default: `"node"`)
        heads: Number of heads. (default: `1`)
        concat: Whether heads are concatenated rather than averaged. (default: `True`)
        negative_slope: Slope of the LeakyReLU. (default: `0.2`)
        dropout: Probability that an attention weight is dropped, in training, in each of its two uses.
            (default: `0.0`)
        bias: Whether a bias is learnt. (default: `True`)
        **kwargs: Arguments of `torch_geometric.nn.conv.MessagePassing`, except `flow`.

    Shapes:
        - **input:** features `[N, F_in]`, hyperedge indices `[2, E]`, hyperedge weights `[M]`, hyperedge features
          `[M, F_in]`.
        - **output:** `[N, H * F_out]`, or `[N, F_out]` with `concat=False`.

    Raises:
        ValueError: If an option is unknown or out of range, or (in `forward`) an input does not fit.

    Example:
        >>> import torch, gattn
        >>> hyperedge_index = torch.tensor([[0, 1, 2, 1, 2, 3], [0, 0, 0, 1, 1, 1]])  # {0, 1, 2} and {1, 2, 3}
        >>> gattn.nn.HypergraphConv(16, 8)(torch.randn(4, 16), hyperedge_index).shape
        torch.Size([4, 8])
        >>> conv = gattn.nn.HypergraphConv(16, 8, use_attention=True, heads=2)
        >>> conv(torch.randn(4, 16), hyperedge_index, hyperedge_attr=torch.randn(2, 16)).shape
        torch.Size([4, 16])
    """

    _starts = (("att", glorot), ("bias", zeros))

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        use_attention: bool = False,
        attention_mode: str = "node",
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0,
        bias: bool = True,
        **kwargs: Any,
    ):
        super().__init__(flow=FLOWS[0], **kwargs)
        if attention_mode not in ("node", "edge"):
            raise InputError(f"attention_mode must be 'node' or 'edge'; got {attention_mode!r}.")
        check_at_least(1, heads=heads, out_channels=out_channels)
        check_probability("dropout", dropout)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.use_attention = use_attention
        self.attention_mode = attention_mode
        self.heads = heads if use_attention else 1
        self.concat = concat or not use_attention
        self.negative_slope = negative_slope
        self.dropout = dropout

        self.lin = Linear(in_channels, self.heads * out_channels, bias=False, weight_initializer="glorot")
        if use_attention:
            self.att = Parameter(torch.empty(1, heads, 2 * out_channels))
        if bias:
            self.bias = Parameter(torch.empty(self.heads * out_channels if self.concat else out_channels))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def forward(
        self,
        x: Tensor,
        hyperedge_index: GraphLike,
        hyperedge_weight: Tensor | None = None,
        hyperedge_attr: Tensor | None = None,
        num_edges: int | None = None,
    ) -> Tensor:
        """Gathers nodes in hyperedges, and hyperedges in nodes.

        Args:
            x: Features `[..., N, F]`.
            hyperedge_index: Which node is in which hyperedge, `[2, E]`, nodes above hyperedges; or a graph in any
                other form that `gattn.attend` takes, whose sources are nodes and whose targets are hyperedges.
            hyperedge_weight: Weights of the hyperedges, `[M]`. (default: `None`, one each)
            hyperedge_attr: Features of the hyperedges, `[..., M, F]`, for `use_attention`; otherwise they are ignored.
                (default: `None`)
            num_edges: M. (default: `None`, the number of weights or features, or else the largest index plus one, which
                `torch.compile(fullgraph=True)` cannot read)

        Raises:
            TypeError: If an input is not a tensor.
            ValueError: If an input does not fit; the message says which.
            IndexError: If an index is out of range (in compiled code, when the kernels run).
        """
        for name, tensor in (("x", x), ("hyperedge_weight", hyperedge_weight), ("hyperedge_attr", hyperedge_attr)):
            if not isinstance(tensor, Tensor) and (tensor is not None or name == "x"):
                raise InputTypeError(f"{name} must be a tensor; got {type(tensor).__name__}.")
        if self.use_attention and hyperedge_attr is None:
            raise InputError("this layer was made with use_attention=True, so it needs hyperedge_attr, [M, F].")
        attr = hyperedge_attr if self.use_attention else None
        self._inputs((x, attr))
        num_nodes = x.size(-2)
        given = as_graph(hyperedge_index)
        num_edges = _num_edges(given, hyperedge_weight, attr, num_edges)
        listed = given.resolve(num_nodes, num_edges, device=x.device).listed(x.device)
        index = listed.edge_index if listed.flow == FLOWS[0] else listed.edge_index.flip(0)
        nodes, edges = index
        gather = SparseGraph(index, num_edges, num_nodes)
        spread = SparseGraph(index, num_nodes, num_edges, flow=FLOWS[1])

        x = self._heads(self.lin(x))
        alpha = None
        if attr is not None:
            of_node, of_edge = self.att.chunk(2, -1)
            ends = (x * of_node).sum(-1), (self._heads(self.lin(attr)) * of_edge).sum(-1)
            query, key, graph = (*ends[::-1], gather) if self.attention_mode == "node" else (*ends, spread)
            alpha = self.weigh(query, key, graph, score=GATScore(self.negative_slope))
            if self.training and self.dropout > 0.0:
                alpha = drop(alpha, self.dropout, draw_seed(alpha.device))

        weight = x.new_ones(num_edges) if hyperedge_weight is None else hyperedge_weight
        wide = torch.promote_types(x.dtype, torch.float32)  # bfloat16 cannot count to 300
        size = x.new_zeros(num_edges, dtype=wide).index_add(0, edges, x.new_ones(edges.shape, dtype=wide))
        degree = x.new_zeros(num_nodes, dtype=wide).index_add(0, nodes, weight.to(wide).index_select(0, edges))
        out = self._sum(x, gather, _inverse(size).to(x.dtype), alpha)
        out = self._sum(out, spread, _inverse(degree).to(torch.promote_types(x.dtype, weight.dtype)), alpha)
        out = out.flatten(-2) if self.concat else out.mean(-2)
        return out if self.bias is None else out + self.bias

    def _sum(self, value: Tensor, graph: SparseGraph, scale: Tensor, alpha: Tensor | None) -> Tensor:
        """The sum of values, with weights `[..., E, H]` or without, times a number per target."""
        is_sum = isinstance(self.aggr_module, SumAggregation)
        if not is_sum:  # the number has to be part of each message
            of_edge = scale.index_select(0, graph.sources_and_targets()[1]).unsqueeze(-1)
            alpha = of_edge.expand(-1, self.heads) if alpha is None else alpha * of_edge
        key = value.new_ones(value.shape[:-1]) if alpha is None else None
        out = self.attend(None, key, value, graph, score=GATScore(), bias=alpha, distribution="identity")
        assert isinstance(out, Tensor)
        return out * scale.view(-1, 1, 1) if is_sum else out


def _num_edges(graph: Graph, weight: Tensor | None, attr: Tensor | None, num_edges: int | None) -> int:
    """M, on which all arguments that imply it must agree."""
    if num_edges is not None:
        num_edges = checked_size("num_edges", num_edges)
    elif is_experimental_mode_enabled("disable_dynamic_shapes"):
        raise InputError("with PyG's experimental mode 'disable_dynamic_shapes', num_edges must be given.")
    if weight is not None and weight.dim() != 1:
        raise InputError(f"hyperedge_weight must have shape [M]; got {list(weight.shape)}.")
    counts = {
        "num_edges": num_edges,
        "rows of hyperedge_weight": None if weight is None else weight.size(0),
        "rows of hyperedge_attr": None if attr is None else attr.size(-2),
    }
    known = {name: count for name, count in counts.items() if count is not None}
    if any(count != other for count, other in pairwise(known.values())):  # symbolic sizes cannot be in a set
        given = ", ".join(f"{count} {name}" for name, count in known.items())
        raise InputError(f"the arguments must agree on the number of hyperedges; got {given}.")
    if known:
        return next(iter(known.values()))
    if graph.num_targets is not None:
        return graph.num_targets
    adjacency = graph.listed().adjacency
    if adjacency.numel() == 0:
        return 0
    row = int(graph.flow == FLOWS[0])
    found: int = derived(adjacency, f"largest of row {row}", lambda: int(adjacency[row].max())) + 1
    return found


def _inverse(x: Tensor) -> Tensor:
    """1 / x, or zero where x is zero."""
    return x.masked_fill(x == 0, 1.0).reciprocal().masked_fill(x == 0, 0.0)
