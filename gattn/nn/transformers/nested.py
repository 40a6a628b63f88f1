"""PyTorch's nested tensors: conversion between ragged batches and sequences laid end to end on a packed graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gattn.errors import InputError
from gattn.graphs import CompleteGraph, Graph

__all__ = ["apply", "flatten", "is_nested", "packed_graph", "pad_weights", "restore"]


def is_nested(*tensors: Any) -> bool:
    """Whether one of the arguments is a nested tensor."""
    for x in tensors:  # noqa: SIM110 - twice as fast as any()
        if isinstance(x, Tensor) and x.is_nested:
            return True
    return False


def flatten(x: Tensor) -> Tensor:
    """Returns the sequences of a nested tensor `[B, T, E]` with ragged T, one after another."""
    if x.layout != torch.jagged:
        return torch.cat(x.unbind())
    rows = _rows(x)
    values: Tensor = x.values()
    return values if rows is None else values[rows]


def restore(flat: Tensor, like: Any) -> Tensor:
    """Inverts `flatten`: returns a nested tensor with the layout and lengths of another one."""
    if like.layout != torch.jagged:
        return torch.nested.as_nested_tensor(list(torch.split(flat, _lengths(like))), layout=torch.strided)
    rows = _rows(like)
    if rows is not None:
        flat = flat.new_zeros(like.values().size(0), *flat.shape[1:]).index_copy(0, rows, flat)
    # The same offsets tell PyTorch that the two have the same lengths.
    return torch.nested.nested_tensor_from_jagged(flat, like.offsets(), like.lengths())


def apply(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies a function to each token; the function need not support nested tensors."""
    return restore(function(flatten(x)), x) if is_nested(x) else function(x)


def pad_weights(weights: list[Tensor], like: Tensor) -> Tensor:
    """Stacks the weights of each sequence, `[..., N, M]`, in one tensor `[B, ..., N, M]` with zeros beyond the lengths.

    Args:
        weights: One tensor for each sequence.
        like: The result if there are no sequences, of shape `[0, ..., 0, 0]`.
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
) -> Graph:
    """Returns the graph of nested tensors that are laid end to end.

    Raises:
        InputError: If not all of them are nested, their shapes do not fit each other, or a mask, a graph or a cache
            contradicts them.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not is_nested(x) or x.dim() != 3 or not _has_ragged_tokens(x):
            found = f"one of {x.dim()} dimensions" if is_nested(x) else type(x).__name__
            raise InputError(
                "nested tensors must be [B, T, E] with sequences of different lengths T, and query, key and value "
                f"must all be nested or none of them; got {found} as {name}."
            )
    if not attention.batch_first:
        raise InputError("the first dimension of nested tensors is the batch: make this layer with batch_first=True.")
    if cache is not None:
        raise InputError("a cache cannot hold nested tensors, only batches of one length: pad the batch instead.")
    targets, sources = _lengths(query), _lengths(key)
    if value is not key and _lengths(value) != sources:
        raise InputError(f"each key must have one value, but their lengths are {sources} and {_lengths(value)}.")
    if len(targets) != len(sources):
        raise InputError(
            f"query and key must have the same batch size; got {len(targets)} and {len(sources)} sequences."
        )
    if key_padding_mask is not None or (attn_mask is not None and not (is_causal and targets == sources)):
        raise InputError(
            "nested tensors have no padding, and their lengths differ: leave out key_padding_mask and attn_mask "
            "(is_causal=True is possible), or pad the batch and pass masks."
        )
    packed = CompleteGraph.packed(targets, sources)
    if graph is None:
        return packed
    if not isinstance(graph, Graph) or graph.blocks != packed.blocks:
        raise InputError(
            "in nested tensors each sequence attends to itself: leave out graph, or pass CompleteGraph.packed with "
            f"their lengths; got {graph!r}."
        )
    return graph


def _has_ragged_tokens(x: Tensor) -> bool:
    """Whether the second dimension alone is ragged."""
    if x.layout == torch.jagged:
        return isinstance(x.size(0), int) and isinstance(x.size(2), int)
    return len({part.size(-1) for part in x.unbind()}) == 1


def _lengths(x: Any) -> list[int]:
    if x.layout != torch.jagged:
        return [len(part) for part in x.unbind()]
    lengths = x.offsets().diff() if x.lengths() is None else x.lengths()
    counts: list[int] = lengths.tolist()
    return counts


def _rows(x: Any) -> Tensor | None:
    """The rows of a jagged tensor's values that belong to its sequences; `None` if all of them do."""
    if x.lengths() is None:
        return None
    starts = x.offsets()[:-1].tolist()
    pieces = [torch.arange(a, a + n, device=x.device) for a, n in zip(starts, _lengths(x), strict=True)]
    return torch.cat(pieces)
