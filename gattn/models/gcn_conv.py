"""The graph convolution beside attention in graph Transformers: fixed weights, summed by the kernels."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.nn.conv import MessagePassing

from gattn.attention import attend_for
from gattn.autocast import is_autocast
from gattn.graphs import FLOWS, SparseGraph
from gattn.graphs.edge_lists import derived_tensors
from gattn.nn.shared.degrees import over_root_degrees
from gattn.nn.shared.linear import through
from gattn.torch_private import has_hooks, is_exporting, is_traced

__all__ = ["GCNConv"]

_STEPS = ("message", "aggregate", "update", "message_and_aggregate")
_ORIGINALS = [getattr(torch_geometric.nn.GCNConv, step) for step in _STEPS]
_HOOKS = [
    f"_{step}_forward_{when}hooks"
    for step in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    for when in ("pre_", "")
]


class GCNConv(torch_geometric.nn.GCNConv):
    """PyG's layer, whose sums over edges are `gattn.aggregate` where nobody looks at single messages.

    The weights of the edges are kept with the tensor of the edges, as everything is that gattn derives from it.
    """

    #: The parent's is generated code as soon as it has been used, which ignores explainers.
    propagate = getattr(MessagePassing, "_orig_propagate", MessagePassing.propagate)

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
        """`[N, out_channels]` from features `[N, in_channels]`, edges `[2, E]` and perhaps weights `[E]`, as in PyG."""
        is_list = type(edge_index) is Tensor and edge_index.layout == torch.strided
        if not is_list or edge_weight is not None or not self._is_plain(x):
            out: Tensor = super().forward(x, edge_index, edge_weight)
            return out
        size = x.size(0)
        options = (size, self.improved, self.add_self_loops, FLOWS[0], x.dtype)
        edges, weight = derived_tensors(
            edge_index, ("gcn", *options), lambda: over_root_degrees(edge_index, None, *options)
        )
        value = through(self.lin, x).unsqueeze(-2)  # one head
        graph = SparseGraph(edges, size, size)
        # Not aggregate(): degrees are no attention that could be recorded.
        out = attend_for(None, None, value, graph, bias=weight.unsqueeze(-1), distribution="identity").out.squeeze(-2)
        return out if self.bias is None else out + self.bias

    def _is_plain(self, x: Any) -> bool:
        """Whether only the sums matter, in the usual form, for features `[N, F]`."""
        is_recorded = is_traced() and (not torch.compiler.is_compiling() or is_exporting())
        if not isinstance(x, Tensor) or x.dim() != 2 or is_recorded or is_autocast(x):
            return False
        if not self.normalize or self.cached or self.flow != FLOWS[0] or self.decomposed_layers > 1 or self.explain:
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
