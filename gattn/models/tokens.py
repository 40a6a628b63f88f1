"""What models do with token ids."""

from __future__ import annotations

import torch
from torch import Tensor


def check_tokens(name: str, tokens: Tensor, num_tokens: int, shape: str = "[B, T]") -> None:
    """Raises where tokens are no integers of that shape, or not in the vocabulary."""
    is_integer = not (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool)
    if tokens.dim() != shape.count(",") + 1 or not is_integer:
        raise ValueError(f"{name} are integers, {shape}; got {tokens.dtype} of shape {list(tokens.shape)}.")
    if torch.compiler.is_compiling() or tokens.numel() == 0:
        return
    lowest, highest = (int(bound) for bound in tokens.aminmax())
    if lowest < 0 or highest >= num_tokens:
        raise IndexError(f"{name} lie between 0 and {num_tokens - 1}; got {lowest if lowest < 0 else highest}.")


def shift(target: Tensor, start: int) -> Tensor:
    """What a decoder reads while it writes `target`, `[B, T]`: the same, one later, after the start token."""
    return torch.cat([target.new_full((target.size(0), 1), start), target], 1)[:, :-1]
