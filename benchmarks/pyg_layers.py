"""Layers that PyG lacks, written in PyG's way: gattn's are compared with them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch_geometric.utils import scatter

import gattn


class PyGGatedGCNConv(gattn.nn.GatedGCNConv):
    """The same layer in PyG's way: the messages of all edges, which are then summed."""

    def forward(self, x: Any, edge_index: Any, edge_attr: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Updates nodes and edges."""
        source, target = edge_index
        logits = self.D(x)[source] + self.E(x)[target] + self.C(edge_attr)
        gates = logits.sigmoid()
        sums = scatter(gates * self.B(x)[source], target, dim=0, dim_size=x.size(0))
        out = self.A(x) + sums / (scatter(gates, target, dim=0, dim_size=x.size(0)) + 1e-6)
        return x + self.bn_node(out).relu(), edge_attr + self.bn_edge(logits).relu()
