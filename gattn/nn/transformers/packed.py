"""The graphs of a batch as one complete graph within each, without padding."""

from __future__ import annotations

import torch
from torch import Tensor

from gattn.graphs import CompleteGraph
from gattn.graphs.builders import checked_batch
from gattn.graphs.edge_lists import derived

__all__ = ["packed_batch"]


def packed_batch(x: Tensor, batch: Tensor | None) -> tuple[Tensor | None, CompleteGraph]:
    """The order in which nodes lie graph by graph (`None` if they do already), and the packed graph of that order.

    Raises:
        TypeError: If `batch` is not a tensor.
        ValueError: If it does not hold the graph of each node.
    """
    if batch is None:
        return None, CompleteGraph(x.size(0))
    batch = checked_batch(batch, x.size(0))
    found: tuple[Tensor | None, CompleteGraph] = derived(batch, "graphs in order", lambda: _in_order(batch))
    return found


def _in_order(batch: Tensor) -> tuple[Tensor | None, CompleteGraph]:
    order = None
    if torch.compiler.is_compiling() or bool((batch.diff() < 0).any()):
        order = torch.argsort(batch, stable=True)
        batch = batch.index_select(0, order)
    return order, CompleteGraph.packed(batch=batch)
