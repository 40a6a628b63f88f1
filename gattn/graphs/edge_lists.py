"""Edge lists: their checks, their self-loops, and what is derived from them once per version of a tensor."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from torch_geometric import EdgeIndex
from torch_geometric.utils import add_self_loops, remove_self_loops

from gattn.errors import InputError, InputTypeError
from gattn.graphs.base import FLOWS, EdgeList
from gattn.torch_private import (
    assert_later,
    is_functorch_tensor,
    is_intercepted,
    is_traced,
    is_transformed,
    stream_address,
)

__all__ = [
    "INTEGER_DTYPES",
    "OnStream",
    "add_loops",
    "already_derived",
    "check_later",
    "check_range",
    "check_types",
    "checked",
    "checked_types",
    "derived",
    "derived_tensors",
    "is_capturing",
    "joining",
    "looped",
    "making",
    "plain",
    "with_loops",
]

INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

# For a tensor that is used with many numbers of nodes, only what was derived for the last few is kept, of each kind.
_MOST_KEPT = 8


_Value = TypeVar("_Value")


class OnStream(Generic[_Value]):
    """A value that one stream computes and others may read: they wait for it, and its memory waits for them.

    Args:
        value: The value, just computed: a tensor, a tuple of values, or an object whose `tensors()` lists what it
            holds.
        tensor: A tensor on the device of the computation.
    """

    def __init__(self, value: _Value, tensor: Tensor):
        self.value = value
        self.stream: Any = None
        if _is_on_gpu(tensor) and not is_capturing(tensor):
            self.stream = torch.cuda.current_stream(tensor.device)
            self._made = self.stream.record_event()

    def get(self) -> _Value:
        """The value, ready for the current stream."""
        if self.stream is not None:
            device = self.stream.device
            # A CUDA graph is captured after the device was synchronised, and may not wait for what came before.
            is_other = stream_address(device) != self.stream.cuda_stream
            if is_other and not torch.cuda.is_current_stream_capturing():
                stream = torch.cuda.current_stream(device)
                stream.wait_event(self._made)
                for tensor in _tensors(self.value):
                    tensor.record_stream(stream)
        return self.value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif hasattr(value, "tensors"):
        yield from value.tensors()


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def is_capturing(tensor: Tensor) -> bool:
    """Whether work on a tensor's device is being recorded to a CUDA graph, so that nothing may wait for it."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class _Kept:
    """What was derived from one tensor: `{key: (its state, its memory, value)}`, the most recently used last.

    Values must never hold the tensor or a view of it, or no entry would ever be freed. Its memory may be held, which
    prevents other memory from getting that address.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.captured: list[Any] = []  # CUDA graphs read it whenever they run
        self.entries: dict[Hashable, tuple[Hashable, Any, OnStream[Any]]] = {}

    def get(self, tensor: Tensor, key: Hashable, state: Hashable, derive: Callable[[], Any]) -> Any:
        with self.lock:  # so that threads that share a graph derive only once
            entry = self.entries.pop(key, None)
            if entry is None or entry[0] != state:
                with torch.inference_mode(False):  # what is kept must also serve training
                    entry = state, _memory(tensor), OnStream(derive(), tensor)
                same = [other for other in self.entries if _kind(other) == _kind(key)]
                if len(same) >= _MOST_KEPT:
                    del self.entries[same[0]]
            self.entries[key] = entry
            if tensor.is_cuda and is_capturing(tensor):
                self.captured.append(entry)
        found = entry[2]
        return found.value if found.stream is None else found.get()

    def find(self, key: Hashable, state: Hashable) -> Any:
        with self.lock:
            entry = self.entries.get(key)
        return None if entry is None or entry[0] != state else entry[2].get()


def _kind(key: Hashable) -> Hashable:
    """What a key says about the kind of value; all that follows are options."""
    while isinstance(key, tuple):
        key = key[0]
    return key


_lock: Any = threading.RLock()  # reentrant, because the garbage collector may run anything at any time
_cache = WeakTensorKeyDictionary()  # {tensor: _Kept}
_making: Any = threading.RLock()
_inherited: list[Any] = []


def _forget() -> None:
    """Starts with an empty cache: a forked process may inherit locks that none of its threads will ever release.

    What the cache held is never freed there: a forked process that frees a GPU's memory or events is ended by CUDA.
    """
    global _lock, _making, _cache
    _inherited.extend(list(_cache.data.values()))
    _lock, _making, _cache = threading.RLock(), threading.RLock(), WeakTensorKeyDictionary()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def making() -> Any:
    """The lock with which parts of what was derived are made when they are first needed: one at a time."""
    return _making


def derived(edge_index: Tensor, key: Hashable, derive: Callable[[], Any], contents: Hashable = None) -> Any:
    """What `derive()` returns, kept for as long as `edge_index` lives and is not edited in place.

    Args:
        edge_index: The tensor.
        key: What is derived from it.
        derive: Derives it.
        contents: What distinguishes the tensor's present contents from others, for a caller that cannot rely on the
            tensor's version. (default: `None`, the version, shape, strides and address)
    """
    if is_intercepted() or edge_index.is_inference():  # as `_is_ours_to_keep` asks
        return derive()
    if contents is None:
        state = _state(edge_index)
    else:
        key, state = (key, "by contents"), contents
    with _lock:
        kept = _cache.get(edge_index)  # type: ignore[no-untyped-call]
        if kept is None:
            kept = _cache[edge_index] = _Kept()
    return kept.get(edge_index, key, state, derive)


def already_derived(edge_index: Tensor, key: Hashable) -> Any:
    """What `derived` keeps for the tensor as it is now; `None` if it keeps nothing."""
    if not _is_ours_to_keep(edge_index):
        return None
    with _lock:
        kept = _cache.get(edge_index)  # type: ignore[no-untyped-call]
    return None if kept is None else kept.find(key, _state(edge_index))


def derived_tensors(
    edge_index: Tensor, key: Hashable, derive: Callable[[], tuple[Tensor, ...]], contents: Hashable = None
) -> tuple[Tensor, ...]:
    """`derived` for tensors that are handed out together with attention weights: they are derived again if edited."""

    def with_states() -> tuple[tuple[Tensor, ...], list[Hashable]]:
        tensors = derive()
        return tensors, [_state(tensor) if _is_ours_to_keep(tensor) else None for tensor in tensors]

    tensors, states = derived(edge_index, key, with_states, contents)
    is_edited = any(
        state is not None and _state(tensor) != state for tensor, state in zip(tensors, states, strict=True)
    )
    return derive() if is_edited else tensors


def _is_ours_to_keep(tensor: Tensor) -> bool:
    """Whether a tensor persists and its edits are counted."""
    return not (is_intercepted() or tensor.is_inference())


def _state(tensor: Tensor) -> Hashable:
    """Changes with every in-place edit of a tensor, and if `.data` is set to another tensor."""
    if isinstance(tensor, EdgeIndex):
        tensor = plain(tensor)
    if tensor.layout != torch.strided:
        return tensor._version, tensor.shape, tensor._nnz()
    return tensor._version, tensor.shape, tensor.stride(), tensor.data_ptr()


def _memory(tensor: Tensor) -> Any:
    tensor = plain(tensor)
    return tensor.untyped_storage() if tensor.layout == torch.strided else None


def plain(edge_index: Tensor) -> Tensor:
    """`edge_index` as a plain tensor; for an `EdgeIndex`, the one inside it, which lives as long."""
    return edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index


def looped(edge_index: Tensor, num_sources: int, num_targets: int, flow: str) -> Tensor:
    """`edge_index`, checked, with self-loops."""

    def derive() -> tuple[Tensor]:
        _check_range_or_later(edge_index, num_sources, num_targets, flow)
        return (add_loops(edge_index, min(num_sources, num_targets))[0],)

    return derived_tensors(edge_index, ("looped", num_sources, num_targets, flow), derive)[0]


def with_loops(edges: EdgeList) -> EdgeList:
    """The same edges, including their self-loops."""
    if not edges.self_loops:
        return edges
    edge_index = looped(edges.edge_index, edges.num_sources, edges.num_targets, edges.flow)
    return edges._replace(edge_index=edge_index, self_loops=False)


def add_loops(
    edge_index: Tensor, num_nodes: int, features: Tensor | None = None, fill_value: float | Tensor | str = 1.0
) -> tuple[Tensor, Tensor | None]:
    """Self-loops by PyG's own functions, so that edges come in PyG's order."""
    if edge_index.dtype not in (torch.int64, torch.int32):
        edge_index = edge_index.long()
    edge_index, features = remove_self_loops(edge_index, features)
    looped, features = add_self_loops(edge_index, features, fill_value=fill_value, num_nodes=num_nodes)
    return looped, features


class Joining(NamedTuple):
    """The edges that join two nodes."""

    places: Tensor | None
    """Their places among all edges; `None` if there are no others"""
    ends: Tensor | None
    """Their nodes, `[2, E]`; `None` if these are all edges, which would be kept alive"""
    degrees: Tensor
    """How many of them each node has in either row, `[2, max(N, M)]`, but at least 1"""


def joining(edge_index: Tensor, num_sources: int, num_targets: int, flow: str) -> Joining:
    """The edges that join two nodes, after a check of all indices."""

    def derive() -> Joining:
        check_range(edge_index, num_sources, num_targets, flow)
        index, count = plain(edge_index).long(), max(num_sources, num_targets)
        places = (index[0] != index[1]).nonzero().squeeze(1)
        if has_loops := len(places) < index.size(1):
            index = index.index_select(1, places)
        ones = torch.ones_like(index)  # no trace knows the size of bincount()
        degrees = index.new_zeros(2, count).scatter_add(1, index, ones).clamp(min=1)
        return Joining(places if has_loops else None, index if has_loops else None, degrees)

    found: Joining = derived(edge_index, ("joining", num_sources, num_targets, flow), derive)
    return found


def checked(edge_index: Tensor, num_sources: int, num_targets: int, flow: str) -> Tensor:
    """`edge_index` after a check of its indices (in compiled code, the check runs with the program)."""
    key = ("checked", num_sources, num_targets, flow)
    derived(edge_index, key, lambda: _check_range_or_later(edge_index, num_sources, num_targets, flow))
    return edge_index


def _check_range_or_later(edge_index: Tensor, num_sources: int, num_targets: int, flow: str) -> None:
    """`check_range`; compiled code checks when it runs, as an index computed from these may still be in range."""
    if not torch.compiler.is_compiling():
        check_range(edge_index, num_sources, num_targets, flow)
        return
    first, second = plain(edge_index)
    source, target = (first, second) if flow == FLOWS[0] else (second, first)
    check_later(source, num_sources, "edge_index holds a source index")
    check_later(target, num_targets, "edge_index holds a target index")


def check_later(index: Tensor, limit: int, what: str) -> None:
    """Makes a traced program check an index when it runs (`RuntimeError`); elsewhere, other code has to check."""
    if is_traced() and not is_transformed():  # vmap cannot run the check
        index = index.long()  # a small type may be unable to hold the limit
        assert_later(((index >= 0) & (index < limit)).all(), f"{what} out of range.")  # printing the limit would fix it


def check_types(edge_type: Tensor, num_types: int) -> None:
    """Raises `IndexError` if the type of an edge is out of range, where its numbers can be read.

    Traced programs check when they run. Nothing is cached: kernels read the types directly, and an edit that was not
    counted must not make them read elsewhere.
    """
    if is_traced():
        check_later(edge_type, num_types, "edge_type holds a type")
        return
    if is_functorch_tensor(edge_type) or edge_type.device.type == "meta" or edge_type.numel() == 0:
        return
    lowest, highest = (int(bound) for bound in edge_type.aminmax())
    if lowest < 0 or highest >= num_types:
        raise IndexError(
            f"edge_type holds type {lowest if lowest < 0 else highest}, but there are rows for {num_types} types "
            f"(0 to {num_types - 1})."
        )


def checked_types(edge_type: Any) -> Tensor:
    """The types of edges, `[E]`, as 64-bit integers that training can save; does not look at their range.

    Raises:
        TypeError: If they are not a tensor.
        ValueError: If they are not integers `[E]`.
    """
    if not isinstance(edge_type, Tensor):
        raise InputTypeError(f"edge_type must be a tensor, the type of each edge; got {type(edge_type).__name__}.")
    if edge_type.dim() != 1 or edge_type.dtype not in INTEGER_DTYPES:
        raise InputError(
            f"edge_type must hold the type of each edge, [E], as integers from 0; got {list(edge_type.shape)} of "
            f"{edge_type.dtype}."
        )
    # Autograd refuses to save tensors made in inference mode.
    is_unsavable = not is_traced() and edge_type.is_inference() and not torch.is_inference_mode_enabled()
    return (edge_type.clone() if is_unsavable else edge_type).long()


def check_range(edge_index: Tensor, num_sources: int, num_targets: int, flow: str) -> None:
    """Raises `IndexError` if an index is out of range, where its numbers can be read."""
    edge_index = plain(edge_index)
    if edge_index.device.type == "meta" or is_functorch_tensor(edge_index):
        return
    rows = edge_index if flow == FLOWS[0] else edge_index.flip(0)
    for row, what, limit in ((rows[0], "source", num_sources), (rows[1], "target", num_targets)):
        if row.numel() == 0:
            continue
        lowest, highest = (int(bound) for bound in row.aminmax())
        if lowest < 0:
            raise IndexError(f"edge_index holds the negative {what} index {lowest}: nodes are numbered from 0.")
        if highest >= limit:
            nodes = f"{limit} {what} nodes (0 to {limit - 1})" if limit else f"no {what} nodes"
            raise IndexError(
                f"edge_index holds {what} index {highest}, but there are {nodes}: the features have too few rows for "
                f"this graph or belong to another one, or num_{what}s is too small."
            )
