"""A graph as the CPU kernels read it: the edges of each target side by side, and those of each source.

Built by counting sort from an edge list, once for each version of the tensor, and kept as long as that lives.
"""

from __future__ import annotations

import ctypes
from functools import cached_property

import torch
from torch import Tensor

from gattn.ops import native
from gattn.ops.edge_lists import FLOWS, check_range, derived


class _RowTable:
    """The edges of each row, and how they are shared among threads."""

    def __init__(self, start: Tensor, node: Tensor):
        lib = native.library()
        rows = start.numel() - 1
        sizes = (ctypes.c_int64 * 3)()
        lib.gattn_tasks(start.data_ptr(), rows, None, None, None, sizes)
        tasks, split, slots = sizes
        self.start, self.node = start, node
        self._tasks = torch.empty(tasks, 5, dtype=torch.int32)
        self._split = torch.empty(split + 1, dtype=torch.int32)
        self._split_row = torch.empty(split, dtype=torch.int32)
        lib.gattn_tasks(
            start.data_ptr(),
            rows,
            self._tasks.data_ptr(),
            self._split.data_ptr(),
            self._split_row.data_ptr(),
            sizes,
        )
        self.num_slots = slots
        self.num_tasks = tasks
        self.rows = native.Rows(
            start.data_ptr(),
            node.data_ptr(),
            self._tasks.data_ptr(),
            tasks,
            self._split.data_ptr(),
            self._split_row.data_ptr(),
            split,
            slots,
        )


class Layout:
    """Rows by target, and by source for the backward pass.

    Args:
        edge_index: `[2, E]`.
        num_sources: M.
        num_targets: N.
        self_loops: Whether existing loops go out and one for each of the first min(N, M) nodes comes in.
        flow: Which row of `edge_index` holds the targets.

    Raises:
        IndexError: If an index is out of range.
        ValueError: If there are too many nodes or edges.
    """

    def __init__(self, edge_index: Tensor, num_sources: int, num_targets: int, self_loops: bool, flow: str):
        index = edge_index.long()
        source, target = index.unbind() if flow == FLOWS[0] else index.flip(0).unbind()
        room = index.size(1) + (min(num_sources, num_targets) if self_loops else 0) + native.PADDING
        start = torch.empty(num_targets + 1, dtype=torch.int32)
        node = torch.empty(room, dtype=torch.int32)
        edge = torch.empty(room, dtype=torch.int32)
        is_sorted = ctypes.c_int64()
        num_edges = native.library().gattn_rows_by_target(
            source.data_ptr(),
            target.data_ptr(),
            source.stride(0),
            target.stride(0),
            index.size(1),
            num_sources,
            num_targets,
            self_loops,
            torch.get_num_threads(),
            start.data_ptr(),
            node.data_ptr(),
            edge.data_ptr(),
            ctypes.byref(is_sorted),
        )
        if num_edges == -1:
            check_range(edge_index, num_sources, num_targets, flow)
        native.raise_for(num_edges)
        self.num_edges: int = num_edges
        self.num_sources, self.num_targets = num_sources, num_targets
        #: The number of the edge at each position by target; `None` where that is the position.
        self.edge = None if is_sorted.value else edge
        self.by_target = _RowTable(start, node)

    @cached_property
    def by_source(self) -> _RowTable:
        """Rows by source; `target_position` and `source_position` come with them."""
        start = torch.empty(self.num_sources + 1, dtype=torch.int32)
        node, target_position, source_position = torch.empty(3, self.num_edges + native.PADDING, dtype=torch.int32)
        native.raise_for(
            native.library().gattn_rows_by_source(
                self.by_target.start.data_ptr(),
                self.by_target.node.data_ptr(),
                self.num_sources,
                self.num_targets,
                torch.get_num_threads(),
                start.data_ptr(),
                node.data_ptr(),
                target_position.data_ptr(),
                source_position.data_ptr(),
            )
        )
        self.target_position, self.source_position = target_position, source_position
        return _RowTable(start, node)


def layout_of(edge_index: Tensor, num_sources: int, num_targets: int, self_loops: bool, flow: str) -> Layout:
    """The layout of a graph, made once for each version of its `edge_index`."""
    key = ("layout", num_sources, num_targets, self_loops, flow)
    return derived(edge_index, key, lambda: Layout(edge_index, num_sources, num_targets, self_loops, flow))
