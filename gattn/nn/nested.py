"""PyTorch's nested tensors: ragged batches, which become sequences laid end to end on a packed graph, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gattn.errors import InputError
from gattn.graphs import CompleteGraph


def is_nested(*tensors: Any) -> bool:
    """Whether one of these is a nested tensor."""
    return any(isinstance(x, Tensor) and x.is_nested for x in tensors)


def flatten(x: Tensor) -> Tensor:
    """The sequences of a nested tensor `[B, T, E]`, T being ragged, one after another."""
    if x.layout != torch.jagged:
        return torch.cat(x.unbind())
    places = _places(x)
    return x.values() if places is None else x.values()[places]


def restore(flat: Tensor, like: Any) -> Tensor:
    """The inverse of `flatten`: a nested tensor of the layout and lengths of another."""
    if like.layout != torch.jagged:
        return torch.nested.as_nested_tensor(list(flat.split(_lengths(like))), layout=torch.strided)
    places = _places(like)
    if places is not None:
        flat = flat.new_zeros(like.values().size(0), *flat.shape[1:]).index_copy(0, places, flat)
    # With the very same offsets PyTorch knows that the two have the same lengths.
    return torch.nested.nested_tensor_from_jagged(flat, like.offsets(), like.lengths())


def apply(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """What a function makes of each place, of which some know no nested tensors."""
    return restore(function(flatten(x)), x) if is_nested(x) else function(x)


def pad_weights(weights: list[Tensor], like: Tensor) -> Tensor:
    """The weights of each sequence, `[..., N, M]`, in one tensor `[B, ..., N, M]`; zeros beyond the lengths.

    Args:
        weights: One tensor for each sequence.
        like: Without sequences there are weights of this shape, `[0, ..., 0, 0]`.
    """
    if not weights:
        return like
    num_targets, num_sources = (max(x.size(dim) for x in weights) for dim in (-2, -1))
    return torch.stack([F.pad(x, (0, num_sources - x.size(-1), 0, num_targets - x.size(-2))) for x in weights])


def packed_graph(
    attention: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: Any,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    cache: Any,
) -> CompleteGraph:
    """Who attends to whom in nested tensors laid end to end.

    Raises:
        InputError: If only one of them is nested, their shapes don't fit, or a mask, a graph or a cache contradicts.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not is_nested(x) or x.dim() != 3 or not _is_ragged_in_places(x):
            kind = f"one of {x.dim()} dimensions" if is_nested(x) else type(x).__name__
            raise InputError(
                "nested tensors are [B, T, E] with sequences of different lengths T, and query, key and value are all "
                f"nested or all not; got {kind} as {name}."
            )
    if not attention.batch_first:
        raise InputError("nested tensors have the batch first: make this layer with batch_first=True.")
    if cache is not None:
        raise InputError("a cache holds batches of one length, not nested tensors: pad the batch instead.")
    targets, sources = _lengths(query), _lengths(key)
    if value is not key and _lengths(value) != sources:
        raise InputError(f"each key has one value, but their lengths are {sources} and {_lengths(value)}.")
    if len(targets) != len(sources):
        raise InputError(f"query and key have the same batch; got {len(targets)} and {len(sources)} sequences.")
    if key_padding_mask is not None or (attn_mask is not None and not (is_causal and targets == sources)):
        raise InputError(
            "the lengths of nested tensors say which keys are real, and differ across the batch: leave out "
            "key_padding_mask and attn_mask (is_causal=True is possible), or pad the batch and pass masks."
        )
    packed = CompleteGraph.packed(targets, sources)
    if graph is None:
        return packed
    if not isinstance(graph, CompleteGraph) or graph.blocks != packed.blocks:
        raise InputError(
            "nested tensors say themselves who attends to whom: leave out graph, or pass CompleteGraph.packed with "
            f"their lengths; got {graph!r}."
        )
    return graph


def _is_ragged_in_places(x: Tensor) -> bool:
    """Whether the second dimension alone is ragged."""
    if x.layout == torch.jagged:
        return isinstance(x.size(0), int) and isinstance(x.size(2), int)
    return len({part.size(-1) for part in x.unbind()}) == 1


def _lengths(x: Any) -> list[int]:
    if x.layout != torch.jagged:
        return [len(part) for part in x.unbind()]
    lengths = x.offsets().diff() if x.lengths() is None else x.lengths()
    return lengths.tolist()


def _places(x: Any) -> Tensor | None:
    """Where the sequences of a jagged tensor lie in its values; `None` if those are nothing else."""
    if x.lengths() is None:
        return None
    starts = x.offsets()[:-1].tolist()
    pieces = [torch.arange(a, a + n) for a, n in zip(starts, _lengths(x), strict=True)]
    return torch.cat(pieces).to(x.device)
