"""Checks and shifts of token ids."""

from __future__ import annotations

import reprlib

import torch
from torch import Tensor

__all__ = ["check_tokens", "shift"]


def check_tokens(name: str, tokens: Tensor, num_tokens: int, shape: str = "[B, T]") -> None:
    """Checks that tokens are integers of this shape and in the vocabulary.

    Raises:
        TypeError: If the tokens are not a tensor.
        ValueError: If they are not integers of this shape.
        IndexError: If a token is not in the vocabulary.
    """
    if not isinstance(tokens, Tensor):
        raise TypeError(f"{name} must be a tensor of integers, {shape}; got {reprlib.repr(tokens)}.")
    is_integer = not (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool)
    if tokens.dim() != shape.count(",") + 1 or not is_integer:
        raise ValueError(f"{name} must be integers, {shape}; got {tokens.dtype} of shape {list(tokens.shape)}.")
    if torch.compiler.is_compiling() or tokens.numel() == 0 or tokens.is_meta:
        return
    lowest, highest = (int(bound) for bound in tokens.aminmax())
    if lowest < 0 or highest >= num_tokens:
        raise IndexError(f"{name} must lie between 0 and {num_tokens - 1}; got {lowest if lowest < 0 else highest}.")


def shift(target: Tensor, start: int) -> Tensor:
    """Returns what a decoder of `target`, `[B, T]`, reads: the start token, and all targets but the last."""
    return torch.cat([target.new_full((target.size(0), 1), start), target], 1)[:, :-1]
