"""Edge lists: their checks, their self-loops, and what is derived from them, once for each version of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from torch_geometric import EdgeIndex
from torch_geometric.utils import add_self_loops, remove_self_loops

FLOWS = ("source_to_target", "target_to_source")

# {edge_index: {key: (its version, what was derived)}}.
# Values must never hold the key or a view of it, or no entry would ever be freed.
_cache: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def derived(edge_index: Tensor, key: Hashable, derive: Callable[[], Any]) -> Any:
    """What `derive()` returns, kept for as long as `edge_index` lives and is not edited in place."""
    if torch.compiler.is_compiling() or transforming() or edge_index.is_inference():
        return derive()
    version = _version(edge_index)
    entries = _cache.setdefault(edge_index, {})
    entry = entries.get(key)
    if entry is None or entry[0] != version:
        with torch.inference_mode(False):  # what is kept must serve training too
            entry = entries[key] = (version, derive())
    return entry[1]


def _version(edge_index: Tensor) -> int:
    """Counts the in-place edits of a tensor."""
    return plain(edge_index)._version


def plain(edge_index: Tensor) -> Tensor:
    """`edge_index` as a plain tensor: the one inside an `EdgeIndex`, which lives as long."""
    return edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index


def looped(edge_index: Tensor, num_sources: int, num_targets: int, flow: str) -> Tensor:
    """`edge_index`, checked, with self-loops."""
    key = ("looped", num_sources, num_targets, flow)

    def derive() -> tuple[Tensor, int]:
        if not torch.compiler.is_compiling():
            check_range(edge_index, num_sources, num_targets, flow)
        result = add_loops(edge_index, min(num_sources, num_targets))[0]
        return result, 0 if torch.compiler.is_compiling() or result.is_inference() else _version(result)

    result, version = derived(edge_index, key, derive)
    # It is handed out beside attention weights, so it may have been edited, too.
    if not torch.compiler.is_compiling() and not result.is_inference() and _version(result) != version:
        del _cache[edge_index][key]
        result, _ = derived(edge_index, key, derive)
    return result


def add_loops(
    edge_index: Tensor, num_nodes: int, features: Tensor | None = None, fill_value: float | Tensor | str = 1.0
) -> tuple[Tensor, Tensor | None]:
    """Self-loops by PyG's own functions, so that edges come in PyG's order."""
    if edge_index.dtype not in (torch.int64, torch.int32):
        edge_index = edge_index.long()
    edge_index, features = remove_self_loops(edge_index, features)
    return add_self_loops(edge_index, features, fill_value=fill_value, num_nodes=num_nodes)


def checked(edge_index: Tensor, num_sources: int, num_targets: int, flow: str) -> Tensor:
    """`edge_index`, once its indices were checked (compiled code cannot look at them)."""
    if not torch.compiler.is_compiling():
        key = ("checked", num_sources, num_targets, flow)
        derived(edge_index, key, lambda: check_range(edge_index, num_sources, num_targets, flow))
    return edge_index


def check_range(edge_index: Tensor, num_sources: int, num_targets: int, flow: str) -> None:
    """Raises `IndexError` if an index is out of range, where there are numbers to look at."""
    edge_index = plain(edge_index)
    if edge_index.device.type == "meta" or transforming():
        return
    rows = edge_index if flow == FLOWS[0] else edge_index.flip(0)
    for row, what, limit in ((rows[0], "source", num_sources), (rows[1], "target", num_targets)):
        if row.numel() == 0:
            continue
        lowest, highest = (int(bound) for bound in row.aminmax())
        if lowest < 0:
            raise IndexError(f"edge_index holds the negative {what} index {lowest}: indices count nodes from 0.")
        if highest >= limit:
            nodes = f"{limit} {what} nodes (0 to {limit - 1})" if limit else f"no {what} nodes"
            raise IndexError(
                f"edge_index holds {what} index {highest}, but there are {nodes}: the features have too few rows for "
                "this graph, or belong to another one."
            )


def transforming() -> bool:
    """Whether this runs inside one of `torch.func`'s transforms, whose tensors must not outlive it."""
    return torch._C._functorch.maybe_current_level() is not None
