"""A graph as the GPU kernels read it: the edges of each target are contiguous, and so are those of each source.

PyTorch builds it on the graph's own device, once for each version of the tensor, and it is kept as long as the tensor
lives. Only the check of the indices and the sizes of the result wait for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gattn.graphs import FLOWS
from gattn.graphs.edge_lists import OnStream, already_derived, check_range, derived, is_capturing, making
from gattn.torch_private import assert_later

__all__ = ["LONG_ROW", "Layout", "Rows", "layout_of"]

LONG_ROW = 128
"""Longer rows are split, so that no program has to go through more edges than this."""


class Rows:
    """The edges of each row, cut into tasks of at most `LONG_ROW`, the longest first.

    While a CUDA graph is captured, numbers that only the device knows are replaced by upper bounds. In the room that is
    left over, tasks and rows of several tasks are -1, and edges come last.

    Args:
        row: The row of each edge, int32; edges of row `num_rows` are left out.
        node: The node at each edge's other end, int32.
        number: The number of each edge, int32.
        num_rows: Number of rows.
        is_captured: Whether nothing may wait for the device.
    """

    def __init__(self, row: Tensor, node: Tensor, number: Tensor, num_rows: int, is_captured: bool):
        row, order = row.sort(stable=True)
        length, most_edges = LONG_ROW, row.numel()
        bounds = torch.arange(num_rows + 1, device=row.device, dtype=torch.int32)
        #: `[rows + 1]`: the first edge of each row, and the number of edges.
        self.start = start = torch.searchsorted(row, bounds, out_int32=True)
        parts = ((start.diff() + length - 1) // length).clamp(min=1)  # an empty row also has a task, which writes zeros
        is_long = parts > 1
        last_task, last_slot = parts.cumsum(0), (parts * is_long).cumsum(0)
        if is_captured:
            num_edges, num_tasks = most_edges, num_rows + most_edges // length if num_rows else 0
            num_slots, num_split = 2 * most_edges // length, most_edges // (length + 1)
        else:
            sizes = start[-1], parts.sum(), (parts * is_long).sum(), is_long.sum()
            num_edges, num_tasks, num_slots, num_split = torch.stack(sizes).tolist()
        order = order[:num_edges]
        self.node, self.number = node[order], number[order]
        #: The number of partial sums of rows of several tasks.
        self.num_slots = num_slots

        task = torch.arange(num_tasks, device=row.device)
        row = torch.searchsorted(last_task, task, right=True)
        is_task = row < num_rows
        row = row.clamp(max=num_rows - 1)
        part = task - last_task[row] + parts[row]
        first = start[row] + part * length
        last = torch.minimum(first + length, start[row + 1])
        slot = torch.where(is_long[row], last_slot[row] - parts[row] + part, -1)
        tasks = torch.stack([torch.where(is_task, row, -1), first, last, slot]).int()
        longest_first = torch.where(is_task, last - first, -1).argsort(descending=True, stable=True)
        #: `[4, tasks]`: row, first and last edge, and the slot of the partial sum (-1 if the row has a single task).
        self.tasks = tasks[:, longest_first].contiguous()

        row = is_long.byte().argsort(descending=True, stable=True)[:num_split]
        first = torch.where(is_long[row], last_slot[row] - parts[row], last_slot[row])
        split = torch.stack([torch.where(is_long[row], row, -1), first, last_slot[row]])
        #: `[3, rows of several tasks]`: row, first and last slot.
        self.split = split.int()

    def row_of_edges(self) -> Tensor:
        """The row of each edge, in the order of `node`; the number of rows for room that is left over."""
        place = torch.arange(self.node.numel(), device=self.node.device, dtype=torch.int32)
        return torch.searchsorted(self.start, place, right=True, out_int32=True) - 1

    def tensors(self) -> Iterator[Tensor]:
        """All of its memory."""
        return (value for value in vars(self).values() if isinstance(value, Tensor))


class Layout:
    """Rows by target, and by source for the backward pass: 16 bytes per edge.

    Args:
        edge_index: `[2, E]`.
        num_sources: M.
        num_targets: N.
        self_loops: Whether to replace existing loops by one for each of the first min(N, M) nodes.
        flow: Which row of `edge_index` holds the targets.
        known_edges: E, if it is known from before, for a CUDA graph that is captured and adds self-loops.

    Raises:
        IndexError: If an index is out of range (a CUDA graph that is being captured reports it when it runs).
        ValueError: If there are too many nodes or edges.
    """

    def __init__(
        self,
        edge_index: Tensor,
        num_sources: int,
        num_targets: int,
        self_loops: bool,
        flow: str,
        known_edges: int | None = None,
    ):
        source, target = edge_index if flow == FLOWS[0] else edge_index.flip(0)
        loops = min(num_sources, num_targets) if self_loops else 0
        #: An upper bound of the number of edges.
        self.most_edges = edge_index.size(1) + loops
        if max(num_sources, num_targets, self.most_edges) >= 2**31:
            raise ValueError("the graph has too many nodes or edges for 32-bit numbers.")
        self._is_captured = is_capturing(edge_index)
        if self._is_captured:
            for end, limit in ((source, num_sources), (target, num_targets)):
                assert_later(((end >= 0) & (end < limit)).all(), "edge_index holds an index out of range.")
        else:
            check_range(edge_index, num_sources, num_targets, flow)
        self._num_sources, self._num_targets = num_sources, num_targets
        # Copies, because the value cached for a tensor must not hold a view of it.
        source, target = source.to(torch.int32, copy=True), target.to(torch.int32, copy=True)
        number = torch.arange(self.most_edges, device=edge_index.device, dtype=torch.int32)
        if self_loops:
            node = number[:loops]
            is_edge = torch.cat([source != target, torch.ones_like(node, dtype=torch.bool)])
            number = is_edge.cumsum(0, dtype=torch.int32) - 1
            source, target = torch.cat([source, node]), torch.cat([target, node])
            target = target.where(is_edge, num_targets)
        self.by_target = Rows(target, source, number, num_targets, self._is_captured)
        #: E on the device, if edges may be fewer than before; a copy, whose address is aligned.
        self.edge_count = self.by_target.start[-1:].clone() if self_loops else None
        self._is_counted = self.edge_count is not None and self._is_captured
        self._num_edges = known_edges if self._is_counted else self.by_target.node.numel()
        self._by_source: OnStream[Rows] | None = None
        #: What was prepared for calls on this graph, by what they have in common. It does not hold this layout.
        self.prepared: dict[Any, Any] = {}

    @property
    def by_source(self) -> Rows:
        """Rows by source, made once; the edges of each are ordered by target."""
        with making():
            if self._by_source is None:
                target = self.by_target.row_of_edges()
                source = self.by_target.node
                if self._is_counted:
                    source = source.where(target < self._num_targets, self._num_sources)
                rows = Rows(source, target, self.by_target.number, self._num_sources, self._is_captured)
                self._by_source = OnStream(rows, rows.node)
            return self._by_source.get()

    @property
    def known_edges(self) -> int | None:
        """E, if it costs nothing, and no CUDA graph has to check it."""
        return None if self._is_counted else self._num_edges

    @property
    def num_edges(self) -> int:
        """E.

        Raises:
            RuntimeError: If a CUDA graph is captured that adds self-loops, and E is not known from before.
        """
        if self._num_edges is None:
            raise RuntimeError(
                "a CUDA graph that is being captured cannot wait for the number of edges after replacing self-loops: "
                "make the same call with this edge_index once before, or add the self-loops before."
            )
        return self.expect(self._num_edges)

    def expect(self, num_edges: int) -> int:
        """E, assumed to be `num_edges`: a CUDA graph that is being captured checks it when it runs."""
        if not self._is_counted:
            return self.by_target.node.numel()
        assert self.edge_count is not None
        assert_later((self.edge_count == num_edges).all(), "the number of the graph's edges has changed.")
        return num_edges

    def target(self) -> Tensor:
        """The target of each edge, `[E]`."""
        rows, num_edges = self.by_target, self.num_edges
        target = torch.empty(num_edges, dtype=torch.int64, device=rows.node.device)
        return target.scatter_(0, rows.number[:num_edges].long(), rows.row_of_edges()[:num_edges].long())

    def tensors(self) -> Iterator[Tensor]:
        """All of its memory, except for `by_source`, which is made when it is needed."""
        yield from self.by_target.tensors()
        if self.edge_count is not None:
            yield self.edge_count


def layout_of(
    edge_index: Tensor, num_sources: int, num_targets: int, self_loops: bool, flow: str, traced: bool = False
) -> Layout:
    """The layout of a graph, made once for each version of its `edge_index`.

    A compiled or traced program writes to memory repeatedly without increasing versions. A call from one (`traced`)
    compares the edges themselves, by their hash, which waits for the device. A CUDA graph that is being captured makes
    its own layout, so that it can be replayed with other edges in the same memory.
    """
    graph = num_sources, num_targets, self_loops, flow
    key = ("rows", *graph)
    if is_capturing(edge_index):
        before = already_derived(edge_index, key)
        return Layout(edge_index, *graph, known_edges=None if before is None else before.num_edges)
    contents = (edge_index.size(1), _hash(edge_index)) if traced else None
    return derived(edge_index, key, lambda: Layout(edge_index, *graph), contents)


def _hash(edge_index: Tensor) -> int:
    """A hash of the edges in their order; products and sums wrap around."""
    source, target = edge_index.long()
    hashed = _mix(source * 0x1E3779B97F4A7C15 + target)
    return int(_mix(hashed + torch.arange(hashed.numel(), device=hashed.device)).sum())


def _mix(x: Tensor) -> Tensor:
    for factor in (0x7F51AFD7ED558CCD, 0x44CEB9FE1A85EC53):
        x = (x ^ (x >> 33)) * factor
    return x ^ (x >> 33)
