"""The graphs of a batch as one complete graph within each, without padding."""

from __future__ import annotations

import torch
from torch import Tensor

from gattn.graphs import CompleteGraph
from gattn.graphs.builders import checked_batch
from gattn.graphs.edge_lists import derived

__all__ = ["packed", "packed_batch"]


def packed(batch: Tensor) -> CompleteGraph:
    """The packed graph of an ascending `batch`, the same one for all layers."""
    graph: CompleteGraph = derived(batch, "packed graph", lambda: CompleteGraph.packed(batch.bincount()))
    return graph


def packed_batch(x: Tensor, batch: Tensor | None) -> tuple[Tensor | None, CompleteGraph]:
    """The order in which nodes lie graph by graph (`None` if they do already), and the packed graph of that order.

    Raises:
        TypeError: If `batch` is not a tensor.
        ValueError: If it does not hold the graph of each node.
    """
    if batch is None:
        return None, CompleteGraph(x.size(0))
    checked_batch(batch, x.size(0))
    order: Tensor | None = derived(batch, "order of graphs", lambda: _order(batch))
    return order, packed(batch)


def _order(batch: Tensor) -> Tensor | None:
    return torch.argsort(batch, stable=True) if bool((batch.diff() < 0).any()) else None
