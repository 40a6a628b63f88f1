"""The elements of ragged batches, and blocks of packed graphs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from gattn.graphs import CompleteGraph

__all__ = ["elements_of", "elements_of_blocks"]


def elements_of(graph: CompleteGraph, batch: int) -> tuple[tuple[int, int, int, int, int], ...] | None:
    """First target, number of targets, first source, number of sources and offset of each element of a ragged batch.

    `None` if the graph has no lengths, or reading them would wait for a device.
    """
    n, m = graph.num_targets, graph.num_sources
    if graph.blocks is not None:
        return elements_of_blocks(graph.blocks, batch, n, m)
    lengths = (graph.target_lengths, graph.source_lengths)
    known = [x for x in lengths if x is not None]
    if not known or torch.compiler.is_compiling() or any(x.device.type != "cpu" for x in known):
        return None
    targets, sources = (
        [full] * batch if x is None else x.flatten().tolist() for x, full in zip(lengths, (n, m), strict=True)
    )
    return tuple((b * n, targets[b], b * m, sources[b], m - n) for b in range(batch))


def elements_of_blocks(
    blocks: Sequence[tuple[int, int]], batch: int, num_targets: int, num_sources: int
) -> tuple[tuple[int, int, int, int, int], ...]:
    """The same for the blocks of a packed graph, of which a batch has several."""
    first = list(accumulate(blocks, lambda a, b: (a[0] + b[0], a[1] + b[1]), initial=(0, 0)))
    return tuple(
        (b * num_targets + t, size[0], b * num_sources + s, size[1], size[1] - size[0])
        for b in range(batch)
        for (t, s), size in zip(first, blocks, strict=False)
    )
