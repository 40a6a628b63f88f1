"""A graph as the GPU kernels read it: the edges of each target side by side, and those of each source.

Built by PyTorch on the graph's own device, once for each version of the tensor, and kept as long as that lives. Nothing
waits for the device but the check of the indices.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from gattn.graphs import FLOWS
from gattn.graphs.edge_lists import check_range, derived
from gattn.torch_private import assert_later

LONG_ROW = 128
"""Longer rows are split, so that no program has more edges than that to go through."""


class Rows:
    """The edges of each row, cut into tasks of at most `LONG_ROW`, the longest first.

    Numbers of tasks that only the device knows are replaced by upper bounds; what is left over has the row -1.

    Args:
        row: The row of each edge, int32; edges of row `num_rows` are left out.
        node: What is at each edge's other end, int32.
        number: The number of each edge, int32.
        num_rows: Number of rows.
    """

    def __init__(self, row: Tensor, node: Tensor, number: Tensor, num_rows: int):
        row, order = row.sort(stable=True)
        self.node, self.number = node[order], number[order]
        start = torch.searchsorted(row, torch.arange(num_rows + 1, device=row.device, dtype=torch.int32))
        length, num_edges = LONG_ROW, row.numel()
        parts = ((start.diff() + length - 1) // length).clamp(min=1)  # an empty row has a task, too: zeros are written
        is_long = parts > 1
        last_task, last_slot = parts.cumsum(0), (parts * is_long).cumsum(0)

        task = torch.arange(num_rows + num_edges // length if num_rows else 0, device=row.device)
        row = torch.searchsorted(last_task, task, right=True)
        is_task = row < num_rows
        row = row.clamp(max=num_rows - 1)
        part = task - last_task[row] + parts[row]
        first = start[row] + part * length
        last = torch.minimum(first + length, start[row + 1])
        slot = torch.where(is_long[row], last_slot[row] - parts[row] + part, -1)
        tasks = torch.stack([torch.where(is_task, row, -1), first, last, slot]).int()
        longest_first = torch.where(is_task, last - first, -1).argsort(descending=True, stable=True)
        #: `[4, tasks]`: row, first and last edge, and where the partial sum goes (-1: the row has a single task).
        self.tasks = tasks[:, longest_first].contiguous()
        self.num_slots = 2 * num_edges // length

        row = is_long.byte().argsort(descending=True, stable=True)[: num_edges // (length + 1)]
        first = torch.where(is_long[row], last_slot[row] - parts[row], last_slot[row])
        split = torch.stack([torch.where(is_long[row], row, -1), first, last_slot[row]])
        #: `[3, rows of several tasks]`: row, first and last slot.
        self.split = split.int()


class Layout:
    """Rows by target, and by source for the backward pass.

    Args:
        edge_index: `[2, E]`.
        num_sources: M.
        num_targets: N.
        self_loops: Whether existing loops go out and one for each of the first min(N, M) nodes comes in.
        flow: Which row of `edge_index` holds the targets.

    Raises:
        IndexError: If an index is out of range (a CUDA graph that is being captured reports it when it runs).
        ValueError: If there are too many nodes or edges.
    """

    def __init__(self, edge_index: Tensor, num_sources: int, num_targets: int, self_loops: bool, flow: str):
        source, target = edge_index if flow == FLOWS[0] else edge_index.flip(0)
        loops = min(num_sources, num_targets) if self_loops else 0
        #: An upper bound of the number of edges.
        self.most_edges = edge_index.size(1) + loops
        if max(num_sources, num_targets, self.most_edges) >= 2**31:
            raise ValueError("the graph has too many nodes or edges for 32-bit numbers.")
        if _is_capturing(edge_index):
            for end, limit in ((source, num_sources), (target, num_targets)):
                assert_later(((end >= 0) & (end < limit)).all(), "edge_index holds an index out of range.")
        else:
            check_range(edge_index, num_sources, num_targets, flow)
        self.num_sources, self.num_targets = num_sources, num_targets
        # Copies: what is cached for a tensor must hold no view of it.
        source, target = source.to(torch.int32, copy=True), target.to(torch.int32, copy=True)
        self._number = torch.arange(self.most_edges, device=edge_index.device, dtype=torch.int32)
        self._is_edge: Tensor | None = None
        if self_loops:
            node = self._number[:loops]
            self._is_edge = torch.cat([source != target, torch.ones_like(node, dtype=torch.bool)])
            self._number = self._is_edge.cumsum(0, dtype=torch.int32) - 1
            source, target = torch.cat([source, node]), torch.cat([target, node])
        self._source, self._target = source, target
        self.by_target = self._rows(target, source, num_targets)

    def _rows(self, row: Tensor, node: Tensor, num_rows: int) -> Rows:
        return Rows(row if self._is_edge is None else row.where(self._is_edge, num_rows), node, self._number, num_rows)

    @cached_property
    def by_source(self) -> Rows:
        """Rows by source."""
        return self._rows(self._source, self._target, self.num_sources)

    @cached_property
    def num_edges(self) -> int:
        """E; where self-loops went out, this waits for the device."""
        return self.most_edges if self._is_edge is None else int(self._is_edge.sum())

    def expect(self, num_edges: int) -> int:
        """E, which inputs take to be `num_edges`: a CUDA graph that is being captured checks that when it runs."""
        if self._is_edge is None or not _is_capturing(self._is_edge):
            return self.num_edges
        assert_later(self._is_edge.sum() == num_edges, "a per-edge input does not fit the graph's edges.")
        return num_edges

    @cached_property
    def target(self) -> Tensor:
        """The target of each edge."""
        return self._target if self._is_edge is None else self._target[self._is_edge]


def layout_of(
    edge_index: Tensor, num_sources: int, num_targets: int, self_loops: bool, flow: str, traced: bool = False
) -> Layout:
    """The layout of a graph, made once for each version of its `edge_index`.

    A compiled or traced program writes to memory again and again without counting versions: called from one
    (`traced`), it is the edges themselves that are compared, by their hash, which waits for the device. A CUDA graph
    that is being captured makes its own, so that it can be replayed with other edges in the same memory.
    """

    def derive() -> Layout:
        return Layout(edge_index, num_sources, num_targets, self_loops, flow)

    if _is_capturing(edge_index):
        return derive()
    contents = (edge_index.size(1), _hash(edge_index)) if traced else None
    return derived(edge_index, ("rows", num_sources, num_targets, self_loops, flow), derive, contents)


def _hash(edge_index: Tensor) -> int:
    """Of the edges in their order; products and sums wrap around."""
    source, target = edge_index.long()
    hashed = _mix(source * 0x1E3779B97F4A7C15 + target)
    return int(_mix(hashed + torch.arange(hashed.numel(), device=hashed.device)).sum())


def _mix(x: Tensor) -> Tensor:
    for factor in (0x7F51AFD7ED558CCD, 0x44CEB9FE1A85EC53):
        x = (x ^ (x >> 33)) * factor
    return x ^ (x >> 33)


def _is_capturing(edge_index: Tensor) -> bool:
    """Whether work on this tensor's device is recorded to a CUDA graph, so that nothing may wait for it."""
    return edge_index.is_cuda and torch.cuda.is_current_stream_capturing()
