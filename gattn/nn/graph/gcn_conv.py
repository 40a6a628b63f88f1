"""The graph convolution: not attention, but fixed weights, summed by the kernels."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.nn.conv import MessagePassing

from gattn.attention import attend_for
from gattn.autocast import is_autocast
from gattn.graphs import Graph, GraphLike, SparseGraph
from gattn.graphs.edge_lists import checked, derived_tensors, plain
from gattn.nn.shared.degrees import over_root_degrees
from gattn.nn.shared.linear import Linear, through
from gattn.torch_private import has_hooks, is_exporting, is_traced
from gattn.tracing import Leaf

__all__ = ["GCNConv"]

_STEPS = ("message", "aggregate", "update", "message_and_aggregate")
_ORIGINALS = [getattr(torch_geometric.nn.GCNConv, step) for step in _STEPS]
_PROPAGATE = getattr(MessagePassing, "_orig_propagate", MessagePassing.propagate)
_HOOKS = [
    f"_{step}_forward_{when}hooks"
    for step in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    for when in ("pre_", "")
]


class GCNConv(Leaf, torch_geometric.nn.GCNConv):
    r"""The sum of a node's neighbours, with weights by their degrees.

    The layer of `Semi-Supervised Classification with Graph Convolutional Networks <https://arxiv.org/abs/1609.02907>`_:

    .. math::
        x'_i = b + \sum_{j \in \mathcal{N}(i) \cup \{i\}} \frac{w_{ij}}{\sqrt{d_i d_j}} W x_j, \qquad
        d_i = \sum_{j \in \mathcal{N}(i) \cup \{i\}} w_{ij}

    This is a drop-in replacement for `torch_geometric.nn.GCNConv`: arguments, parameter names and results are the same.
    The sums are those of attention with given weights, by the same kernels. Weights without `edge_weight` are kept
    with the tensor of the edges, as everything is that gattn derives from it. What looks at single messages (a hook, an
    explainer, another aggregation or `message`) gets PyG's way, and so do sparse adjacencies.

    Args:
        in_channels: Channels of the input; `-1` infers them from the first call.
        out_channels: Channels of the output.
        improved: Whether self-loops weigh 2 and not 1; on lists of edges only beside an `edge_weight`, as in PyG.
            (default: `False`)
        cached: Whether the graph of the first call is that of all. (default: `False`)
        add_self_loops: Whether every node has an edge to itself; existing ones keep their weight.
            (default: `None`, as `normalize`)
        normalize: Whether weights are divided by the roots of degrees. (default: `True`)
        bias: Whether a bias is learnt. (default: `True`)
        **kwargs: Arguments of `torch_geometric.nn.conv.MessagePassing`, such as `flow` and `aggr`.

    Shapes:
        - **input:** features `[..., N, F_in]`, edge indices `[2, E]`, weights `[E]`.
        - **output:** `[..., N, F_out]`.

    Raises:
        ValueError: If self-loops are to be added without `normalize`, as in PyG.

    Example:
        >>> import torch, gattn
        >>> conv = gattn.nn.GCNConv(16, 8)
        >>> conv(torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]]), torch.rand(2)).shape  # 3 nodes, 2 weighted edges
        torch.Size([3, 8])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        improved: bool = False,
        cached: bool = False,
        add_self_loops: bool | None = None,
        normalize: bool = True,
        bias: bool = True,
        **kwargs: Any,
    ):
        super().__init__(in_channels, out_channels, improved, cached, add_self_loops, normalize, bias, **kwargs)
        self.lin.__class__ = Linear  # which also takes sparse features

    def forward(self, x: Tensor, edge_index: GraphLike, edge_weight: Tensor | None = None) -> Tensor:
        """Sums each node's neighbours.

        Args:
            x: Features `[..., N, F_in]`.
            edge_index: The graph: edges `[2, E]`, a sparse adjacency, or one of `gattn.graphs`.
            edge_weight: The weight of each edge, `[E]`. (default: `None`, 1)

        Raises:
            ValueError: If features and graph do not fit, or a sharded graph has targets and sources that are divided
                differently.
            IndexError: If an index of the graph is out of range (in compiled code, when the kernels run).
        """
        flow = self.flow
        if isinstance(edge_index, Graph):
            if edge_index.is_sharded:
                return self._on_shard(x, edge_index, edge_weight)
            listed = edge_index.listed(x.device).resolve(x.size(-2), x.size(-2))
            edge_index, flow = listed.edge_index, listed.flow
        is_list = type(edge_index) in (Tensor, EdgeIndex) and edge_index.layout == torch.strided
        if not is_list or not self._is_plain(x) or not _is_weight(edge_weight):
            if flow != self.flow:
                edge_index = edge_index.flip(0)
            out: Tensor = super().forward(x, edge_index, edge_weight)
            return out
        value = through(self.lin, x).unsqueeze(-2)  # one head
        edges, weight = self._weighted(plain(edge_index), edge_weight, x, flow)
        graph = SparseGraph(edges, x.size(-2), x.size(-2), flow=flow)
        # Not aggregate(): degrees are no attention that could be recorded.
        of_edges = weight.to(value.dtype).unsqueeze(-1)
        out = attend_for(None, None, value, graph, bias=of_edges, distribution="identity").out.squeeze(-2)
        return out if self.bias is None else out + self.bias

    def _on_shard(self, x: Tensor, graph: Graph, edge_weight: Tensor | None) -> Tensor:
        """The same for the nodes of one process: sources bring the roots of their own degrees, so none are fetched."""
        if self.normalize:
            graph.with_self_loops()  # checks that targets and sources are the same nodes, and so numbered alike
        (source, target), value = graph.sources_and_targets(), through(self.lin, x)
        own, dtype = x.size(-2), torch.promote_types(x.dtype, torch.float32)
        weight = torch.ones_like(source, dtype=dtype) if edge_weight is None else edge_weight.to(dtype)
        of_loops = weight.new_zeros(own)
        if self.add_self_loops:
            is_loop = source == target
            fill = 2.0 if self.improved and edge_weight is not None else 1.0
            of_loops = weight.new_full((own + 1,), fill)  # the last takes what is no self-loop
            of_loops = of_loops.scatter(0, target.where(is_loop, own).long(), weight)[:own]
            weight = weight.masked_fill(is_loop, 0.0)
        root = None
        if self.normalize:
            root = of_loops.index_add(0, target, weight).pow(-0.5)
            root = root.masked_fill(root == torch.inf, 0.0).to(value.dtype).unsqueeze(-1)
            value = value * root
        term = weight.to(value.dtype).unsqueeze(-1)
        found = attend_for(None, None, value.unsqueeze(-2), graph, bias=term, distribution="identity").out
        out = found.squeeze(-2) + of_loops.to(value.dtype).unsqueeze(-1) * value
        out = out if root is None else out * root
        return out if self.bias is None else out + self.bias

    def _weighted(self, edge_index: Tensor, edge_weight: Tensor | None, x: Tensor, flow: str) -> tuple[Tensor, Tensor]:
        """The edges, with self-loops where they are added, and the weight of each."""
        if not self.normalize:
            weight = x.new_ones(edge_index.size(1)) if edge_weight is None else edge_weight
            return edge_index, weight
        kept: tuple[Tensor, Tensor] | None = getattr(self, "_cached_edge_index", None)
        if self.cached and kept is not None:
            return kept
        # Degrees are counted in float32 at least: bfloat16 cannot count to 300.
        dtype = torch.promote_types(x.dtype, torch.float32)
        options = x.size(-2), self.improved, self.add_self_loops, flow, dtype

        def derive() -> tuple[Tensor, Tensor]:
            checked(edge_index, x.size(-2), x.size(-2), flow)
            found: tuple[Tensor, Tensor] = over_root_degrees(edge_index, None, *options)
            return found

        edges, weight = derived_tensors(edge_index, ("gcn", *options), derive)
        if edge_weight is not None:  # with the same edges in the same order, for which more is kept
            weight = over_root_degrees(edge_index, edge_weight.to(dtype), *options)[1]
        if self.cached:
            self._cached_edge_index = (edges, weight)
        return edges, weight

    def _is_plain(self, x: Any) -> bool:
        """Whether only the sums matter, in the usual form."""
        is_recorded = is_traced() and (not torch.compiler.is_compiling() or is_exporting())
        if not isinstance(x, Tensor) or x.dim() < 2 or x.layout != torch.strided or is_recorded or is_autocast(x):
            return False
        if self.node_dim != -2 or self.decomposed_layers > 1:  # an explainer replaces propagate
            return False
        aggr = self.aggr_module
        if type(aggr) is not SumAggregation or has_hooks(aggr) or type(self) is not GCNConv:
            return False
        if any(getattr(self, hooks) for hooks in _HOOKS):
            return False
        own = vars(self)
        if any(name in own for name in (*_STEPS, "propagate")):
            return False
        return [getattr(GCNConv, step) for step in _STEPS] == _ORIGINALS

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        """PyG's own: what it would generate in its place knows the arguments of PyG's class alone."""
        out: Tensor = _PROPAGATE(self, edge_index, size, **kwargs)
        return out


def _is_weight(edge_weight: Any) -> bool:
    """Whether it is the usual form of weights, or none."""
    return edge_weight is None or (
        isinstance(edge_weight, Tensor) and edge_weight.dim() == 1 and edge_weight.is_floating_point()
    )
