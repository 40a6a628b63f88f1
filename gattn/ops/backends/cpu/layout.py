"""A graph as the CPU kernels read it: the edges of each target are contiguous, and so are those of each source.

It is built by counting sort from an edge list, once for each version of the tensor, and kept as long as the tensor
lives.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from gattn.graphs import FLOWS
from gattn.graphs.edge_lists import check_range, derived, making
from gattn.ops.backends.cpu import native

__all__ = ["Layout", "layout_of"]


class RowTable:
    """The edges of each row, and how they are shared among threads."""

    def __init__(self, start: Tensor, node: Tensor):
        lib = native.library()
        rows = start.numel() - 1
        sizes = (ctypes.c_int64 * 3)()
        lib.gattn_tasks(start.data_ptr(), rows, None, None, None, sizes)
        tasks, split, slots = sizes
        self.start, self.node = start, node
        self._tasks = torch.empty(tasks, 5, dtype=torch.int32, device="cpu")
        self._split = torch.empty(split + 1, dtype=torch.int32, device="cpu")
        self._split_row = torch.empty(split, dtype=torch.int32, device="cpu")
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
        self_loops: Whether to replace existing loops by one for each of the first min(N, M) nodes.
        flow: Which row of `edge_index` holds the targets.

    Raises:
        IndexError: If an index is out of range.
        ValueError: If there are too many nodes or edges.
    """

    def __init__(self, edge_index: Tensor, num_sources: int, num_targets: int, self_loops: bool, flow: str):
        index = native.readable(edge_index if edge_index.dtype == torch.int32 else edge_index.long(), strided=True)
        source, target = index.unbind() if flow == FLOWS[0] else reversed(index.unbind())
        #: An upper bound of the number of edges; see `Inputs.most_edges`.
        self.most_edges = index.size(1) + (min(num_sources, num_targets) if self_loops else 0)
        room = self.most_edges + native.PADDING
        start = torch.empty(num_targets + 1, dtype=torch.int32, device="cpu")
        node = torch.empty(room, dtype=torch.int32, device="cpu")
        edge = torch.empty(room, dtype=torch.int32, device="cpu")
        is_sorted = ctypes.c_int64()
        num_edges = native.library().gattn_rows_by_target(
            source.data_ptr(),
            target.data_ptr(),
            index.element_size() * 8,
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
        self.by_target = RowTable(start, node)
        self._by_source: SourceRows | None = None

    @property
    def by_source(self) -> SourceRows:
        """Rows by source, made when they are first needed."""
        with making():
            if self._by_source is None:
                self._by_source = SourceRows(self)
            return self._by_source


class SourceRows(RowTable):
    """The edges of each source, and the position of each edge in both orders."""

    def __init__(self, layout: Layout):
        start = torch.empty(layout.num_sources + 1, dtype=torch.int32, device="cpu")
        node, target_position, source_position = torch.empty(
            3, layout.num_edges + native.PADDING, dtype=torch.int32, device="cpu"
        )
        native.raise_for(
            native.library().gattn_rows_by_source(
                layout.by_target.start.data_ptr(),
                layout.by_target.node.data_ptr(),
                layout.num_sources,
                layout.num_targets,
                torch.get_num_threads(),
                start.data_ptr(),
                node.data_ptr(),
                target_position.data_ptr(),
                source_position.data_ptr(),
            )
        )
        super().__init__(start, node)
        #: The position by target of the edge at each position by source, and the reverse.
        self.target_position, self.source_position = target_position, source_position


def layout_of(
    edge_index: Tensor, num_sources: int, num_targets: int, self_loops: bool, flow: str, traced: bool = False
) -> Layout:
    """The layout of a graph, made once for each version of its `edge_index`.

    A compiled or traced program writes to memory repeatedly without increasing versions. A call from one (`traced`)
    compares the edges themselves, by their hash.
    """
    key = ("layout", num_sources, num_targets, self_loops, flow)
    contents = _hash(edge_index) if traced else None
    return derived(edge_index, key, lambda: Layout(edge_index, num_sources, num_targets, self_loops, flow), contents)


def _hash(edge_index: Tensor) -> tuple[int, int]:
    """The number of edges, and a hash of them in their order."""
    index = native.readable(edge_index.long(), strided=True)
    first, second = index.unbind()
    stride = index.stride(1)
    return index.size(1), native.library().gattn_hash_edges(
        first.data_ptr(), second.data_ptr(), stride, index.size(1), torch.get_num_threads()
    )
