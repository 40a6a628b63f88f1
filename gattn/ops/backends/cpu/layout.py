"""A graph as the CPU kernels read it: the edges of each target are contiguous, and so are those of each source.

It is built by counting sort from an edge list, once for each version of the tensor, and kept as long as the tensor
lives.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Hashable

import torch
from torch import Tensor

from gattn.graphs import FLOWS
from gattn.graphs.edge_lists import check_range, derived, making
from gattn.ops.backends.cpu import native

__all__ = ["Layout", "layout_of"]


class RowTable:
    """The edges of each row, and how they are shared among threads; `rows` says where each part lies in its memory.

    Args:
        num_edges: At most how many there are.
        num_rows: The number of rows.
        lists: How many lists of edges the table has: their other ends, and others.
    """

    def __init__(self, num_edges: int, num_rows: int, lists: int):
        room = native.library().gattn_table_room(num_edges, num_rows, lists)
        self._memory = torch.empty(room, dtype=torch.int32, device="cpu")
        self.address: int = self._memory.data_ptr()
        self.rows = native.Rows()
        self.num_rows, self._room = num_rows, num_edges + native.PADDING

    def list_of_edges(self, number: int) -> int:
        """Where a list of edges begins."""
        return self.address + 4 * (self.num_rows + 1 + number * self._room)

    def part(self, address: int, count: int) -> Tensor:
        """Numbers of the table, as a tensor."""
        first = (address - self.address) // 4
        return self._memory[first : first + count]


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
        self.by_target = RowTable(self.most_edges, num_targets, 2)
        edge = ctypes.c_void_p()
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
            self.by_target.address,
            ctypes.addressof(self.by_target.rows),
            ctypes.addressof(edge),
        )
        if num_edges == -1:
            check_range(edge_index, num_sources, num_targets, flow)
        native.raise_for(num_edges)
        self.num_edges: int = num_edges
        self.num_sources, self.num_targets = num_sources, num_targets
        #: Where the number of the edge at each position by target is; `None` if that is the position.
        self.edge: int | None = edge.value
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
        super().__init__(layout.num_edges, layout.num_sources, 3)
        native.raise_for(
            native.library().gattn_rows_by_source(
                ctypes.addressof(layout.by_target.rows),
                layout.num_sources,
                layout.num_targets,
                torch.get_num_threads(),
                self.address,
                ctypes.addressof(self.rows),
            )
        )
        #: Where the position by target of the edge at each position by source is, and the reverse.
        self.target_position, self.source_position = self.list_of_edges(1), self.list_of_edges(2)


def layout_of(
    edge_index: Tensor, num_sources: int, num_targets: int, self_loops: bool, flow: str, traced: bool = False
) -> Layout:
    """The layout of a graph, made once for each version of its `edge_index`.

    A compiled or traced program writes to memory repeatedly without increasing versions. A call from one (`traced`)
    compares the edges themselves, by their hash.
    """
    key = ("layout", num_sources, num_targets, self_loops, flow)
    contents = _hash(edge_index) if traced else None
    if contents is not None:
        known = _by_contents.get((contents, key))  # without the locks of what is kept with a tensor
        layout = None if known is None else known()
        if layout is not None:
            return layout
    layout = derived(edge_index, key, lambda: Layout(edge_index, num_sources, num_targets, self_loops, flow), contents)
    if contents is not None:
        if len(_by_contents) >= _MOST_KNOWN:
            _by_contents.clear()
        _by_contents[contents, key] = weakref.ref(layout)
    return layout


#: Layouts that live, by what they are of.
_by_contents: dict[Hashable, weakref.ref[Layout]] = {}
_MOST_KNOWN = 64


def _hash(edge_index: Tensor) -> tuple[int, int]:
    """The number of edges, and a hash of them in their order."""
    count = edge_index.size(1)
    if edge_index.dtype == torch.int64 and edge_index.is_contiguous() and not edge_index.is_neg():
        address = edge_index.data_ptr()
        hashed = native.library().gattn_hash_edges(address, address + 8 * count, 1, count, torch.get_num_threads())
        return count, hashed
    index = native.readable(edge_index.long(), strided=True)
    first, second = index.unbind()
    stride = index.stride(1)
    return index.size(1), native.library().gattn_hash_edges(
        first.data_ptr(), second.data_ptr(), stride, index.size(1), torch.get_num_threads()
    )
