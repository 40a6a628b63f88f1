"""Sets of elements as graphs: an edge leads from each element to its set.

Dimensions: N elements, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gattn.graphs import CompleteGraph, SparseGraph
from gattn.torch_private import is_exporting
from gattn.tracing import Leaf

__all__ = ["ExportedAggregation", "counts_of", "graphs_of_sets", "sets_of"]


class ExportedAggregation(Leaf):
    """What aggregations of gattn do before those of PyG, from which they also inherit."""

    def __call__(
        self,
        x: Tensor,
        index: Tensor | None = None,
        ptr: Tensor | None = None,
        dim_size: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Calls the aggregation; in a program that is exported, PyG could not read the number of sets from zeros."""
        if index is None and ptr is None and dim_size is None and is_exporting():
            dim_size = 1
        return super().__call__(x, index, ptr, dim_size, *args, **kwargs)  # type: ignore[misc]


def sets_of(x: Tensor, index: Tensor | None, ptr: Tensor | None, dim_size: int | None) -> tuple[int, SparseGraph]:
    """The number of sets of the elements `[..., N, C]`, and the edges from these to their sets."""
    num_elements = x.size(-2)
    if index is None:
        ptr = torch.tensor([0, num_elements], device=x.device) if ptr is None else ptr
        index = _index_of(ptr, num_elements)
        dim_size = ptr.numel() - 1 if dim_size is None else dim_size
    assert dim_size is not None  # PyG's __call__ computes it
    return dim_size, _membership(index, num_elements, dim_size)


def counts_of(x: Tensor, index: Tensor | None, ptr: Tensor | None, dim_size: int | None) -> tuple[Tensor, Tensor]:
    """The set of each of the elements `[..., N, C]`, `[N]`, and how many elements each set has, `[B]`."""
    num_elements = x.size(-2)
    if index is None:
        index = _index_of(torch.tensor([0, num_elements], device=x.device) if ptr is None else ptr, num_elements)
        counts = x.new_tensor([num_elements], dtype=torch.int64) if ptr is None else ptr.diff()
    else:
        _check_index(index, num_elements)
        if torch.compiler.is_compiling() and dim_size is not None:  # without what would have to be read
            return index, index.new_zeros(dim_size).index_add(0, index, torch.ones_like(index))
        counts = index.bincount()
    missing = 0 if dim_size is None else dim_size - len(counts)
    if missing < 0:
        raise IndexError(f"there are elements of {len(counts)} sets, but dim_size={dim_size}.")
    return index, F.pad(counts, (0, missing))


def graphs_of_sets(index: Tensor, counts: Tensor, seeds: int) -> tuple[CompleteGraph, CompleteGraph]:
    """The graphs among the elements of each set, which lie end to end, and from them to so many seeds of each set."""
    if not torch.compiler.is_compiling():
        sizes = counts.tolist()
        return CompleteGraph.packed(sizes), CompleteGraph.packed([seeds] * len(sizes), sizes)
    of_seed = torch.arange(counts.size(0), device=index.device).unsqueeze(1).expand(-1, seeds).flatten()
    return CompleteGraph.packed(batch=index), CompleteGraph.packed(batch=of_seed, source_batch=index)


def _index_of(ptr: Tensor, num_elements: int) -> Tensor:
    """Returns the set of each element, given the first element of each set."""
    fits = ptr.dim() == 1 and ptr.numel() > 0
    if fits and not torch.compiler.is_compiling():
        fits = int(ptr[0]) == 0 and int(ptr[-1]) == num_elements and bool((ptr.diff() >= 0).all())
    if not fits:
        raise ValueError(
            f"ptr must hold the first element of each set and, at its end, the number of elements: it starts at 0, "
            f"never decreases, and ends at {num_elements} here; got {ptr.tolist()}."
        )
    sets = torch.arange(ptr.numel() - 1, device=ptr.device)
    return sets.repeat_interleave(ptr.diff(), output_size=num_elements)


def _membership(index: Tensor, num_elements: int, num_sets: int) -> SparseGraph:
    """Returns the edges from elements to their sets."""
    _check_index(index, num_elements)
    edge_index = torch.stack([torch.arange(num_elements, device=index.device), index])
    return SparseGraph(edge_index, num_sources=num_elements, num_targets=num_sets)


def _check_index(index: Tensor, num_elements: int) -> None:
    """Raises `ValueError` or `IndexError` if it does not hold the set of each element."""
    if index.dim() != 1 or index.numel() != num_elements or index.is_floating_point() or index.dtype == torch.bool:
        raise ValueError(
            f"index must hold the set of each element, {num_elements} integers; got {index.dtype} of shape "
            f"{list(index.shape)}."
        )
    if not torch.compiler.is_compiling() and num_elements and int(index.min()) < 0:
        raise IndexError(f"index must not be negative, since sets are counted from 0; got {int(index.min())}.")
