"""Edge weights over the square roots of both ends' degrees, as graph convolutions use them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import scatter

from gattn.graphs import FLOWS

__all__ = ["over_root_degrees"]


def over_root_degrees(
    edge_index: Any,
    edge_weight: Tensor | None,
    num_nodes: Any,
    improved: bool,
    add_self_loops: bool,
    flow: str,
    dtype: torch.dtype,
) -> Any:
    """What PyG's `gcn_norm` returns, in compiled code perhaps with more edges, whose weights are zero.

    There, the number of existing self-loops is unknown, and taking them out would give edges of unknown size. They stay
    where they are without a weight, and the new self-loops get theirs.
    """
    is_list = isinstance(edge_index, Tensor) and edge_index.layout == torch.strided
    if not (add_self_loops and is_list and torch.compiler.is_compiling()):
        return gcn_norm(edge_index, edge_weight, num_nodes, improved, add_self_loops, flow, dtype)
    weight = (
        torch.ones(edge_index.size(1), dtype=dtype, device=edge_index.device) if edge_weight is None else edge_weight
    )
    is_loop, nodes = edge_index[0] == edge_index[1], torch.arange(num_nodes, device=edge_index.device)
    fill = 2.0 if improved and edge_weight is not None else 1.0  # PyG's, which fills no weights where none are given
    of_loops = weight.new_full((num_nodes + 1,), fill)  # the last one takes what is no self-loop
    of_loops = of_loops.scatter(0, edge_index[0].where(is_loop, num_nodes), weight)[:num_nodes]
    index = torch.cat([edge_index, nodes.to(edge_index.dtype).expand(2, -1)], 1)
    weight = torch.cat([weight.masked_fill(is_loop, 0.0), of_loops])
    row, column = index
    degree = scatter(weight, column if flow == FLOWS[0] else row, 0, num_nodes, "sum")
    root = degree.pow(-0.5)
    root = root.masked_fill(root == torch.inf, 0.0)
    return index, root.index_select(0, row) * weight * root.index_select(0, column)
