"""Converts masks of `torch.nn`'s layers, where True means "may not attend", to gattn's biases and masks.

Dimensions: N targets, M sources, E edges, H heads, B batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gattn.errors import InputError
from gattn.graphs import Graph
from gattn.graphs.edge_lists import derived
from gattn.torch_private import is_readable

__all__ = ["add", "as_numbers", "check_mask", "is_causal_mask", "mask_terms"]


def check_mask(name: str, mask: Any) -> None:
    """Checks the type of a mask, and of its elements.

    Raises:
        TypeError: If the mask is not a tensor.
        InputError: If its elements are neither booleans nor floating-point numbers.
    """
    if mask is not None and not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(mask).__name__}.")
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        raise InputError(
            f"{name} must hold booleans (True = may not attend), or floating-point numbers that are added to the "
            "logits; "
            f"got {mask.dtype}."
        )


def is_causal_mask(mask: Tensor | None) -> bool:
    """Whether a mask hides exactly the later positions; `False` in traced code, which cannot read elements."""
    if mask is None or mask.dim() != 2 or mask.size(0) != mask.size(1) or not is_readable(mask):
        return False

    def compare() -> bool:
        later = torch.ones_like(mask, dtype=torch.bool).triu(1)
        return torch.equal(mask, later if mask.dtype == torch.bool else as_numbers(later, mask.dtype))

    is_causal: bool = derived(mask, "is causal", compare)
    return is_causal


def as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask (True = may not attend) as numbers that are added to the logits; numbers stay as they are."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else mask


def mask_terms(
    graph: Graph,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    batch: torch.Size,
    heads: int,
    size: tuple[int, int],
) -> tuple[Graph, Tensor | None, Tensor | None]:
    """Turns masks into what `gattn.attend` takes: a bias and a mask (True = may attend) in the shape of the graph.

    Args:
        graph: The graph, whose sizes are known.
        attn_mask: As in `MultiheadAttention.forward`.
        key_padding_mask: As in `MultiheadAttention.forward`.
        is_causal: Whether targets see only sources up to their position, and `attn_mask` says the same or is `None`.
        batch: The batch dimensions of the features.
        heads: H.
        size: N and M.

    Returns:
        The graph, which may have become causal or have lengths in place of masks, the bias and the mask.

    Raises:
        ValueError: If a mask has the wrong shape.
    """
    attn_mask = pair_mask(attn_mask, batch, heads, size)
    attn_mask = None if is_causal else attn_mask
    graph, past = graph.hide_later() if is_causal else (graph, None)
    if key_padding_mask is not None:
        graph, key_padding_mask = graph.hide_padding(key_padding_mask, batch)
    if attn_mask is None and key_padding_mask is None:
        return graph, None, past
    bias, mask = bias_and_mask(attn_mask, key_padding_mask, batch, size[1])
    bias, mask = (None if term is None else graph.from_pairs(term, heads) for term in (bias, mask))
    if past is not None:
        mask = past if mask is None else mask & past
    return graph, bias, mask


def pair_mask(attn_mask: Tensor | None, batch: torch.Size, heads: int, size: tuple[int, int]) -> Tensor | None:
    """Returns a mask of pairs as `[N, M]` or `[..., H, N, M]`.

    Raises:
        InputError: If its shape is neither `[N, M]` nor `[B * H, N, M]`.
    """
    if attn_mask is None:
        return None
    per_head = (*(count * heads for count in batch or (1,)), *size)
    if attn_mask.shape not in (size, per_head):
        raise InputError(
            f"attn_mask must have shape {list(size)} or {list(per_head)} (batch times heads, targets, sources); got "
            f"{list(attn_mask.shape)}. Numbers for single edges are attn_bias=gattn.SparseBias(edge_index, numbers)."
        )
    return attn_mask.view(*batch, heads, *size) if attn_mask.dim() == 3 else attn_mask


def bias_and_mask(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, batch: torch.Size, num_sources: int
) -> tuple[Tensor | None, Tensor | None]:
    """Returns a bias and a mask (True = may attend) that are broadcastable to `[..., H, N, M]`.

    Raises:
        InputError: If the shape of `key_padding_mask` is not `[B, M]`.
    """
    bias: Tensor | None = None
    mask: Tensor | None = None
    if key_padding_mask is not None:
        shape = (*batch, num_sources)
        if key_padding_mask.shape != shape:
            raise InputError(f"key_padding_mask must have shape {list(shape)}; got {list(key_padding_mask.shape)}.")
        key_padding_mask = key_padding_mask.unsqueeze(-2).unsqueeze(-2)
    for term in (key_padding_mask, attn_mask):
        if term is None:
            continue
        if term.dtype == torch.bool:
            mask = ~term if mask is None else mask & ~term
        else:
            bias = add(bias, term)
    return bias, mask


def add(first: Tensor | None, second: Tensor) -> Tensor:
    """The sum of two tensors, the first of which may be missing."""
    return second if first is None else first + second
