"""Dropout by the CPU kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gattn.ops.backends.base import needs_plain_pytorch
from gattn.ops.backends.cpu import native
from gattn.ops.backends.kernels import DTYPES
from gattn.ops.differentiated import Differentiated, library
from gattn.ops.dropout import drop as plain_drop
from gattn.torch_private import is_batched, is_exporting

__all__ = ["can_drop", "drop", "dropout_arguments"]

#: Below this many numbers, threads cost more than they gain.
_SERIAL = 1 << 16

_is_there = native.load_error() is None  # read once, because compiled code cannot

library.define("drop(Tensor x, float p, Tensor seed) -> Tensor")


def dropout_arguments(p: float, seed: Tensor) -> tuple[int, int, float]:
    """Seed, threshold and scale in the form that the kernels take; with p = 1, a scale of zero drops everything."""
    return int(seed), min(int(p * 2**32), 2**32 - 1), 1 / (1 - p) if p < 1 else 0.0


def _dropped(x: Tensor, p: float, seed: Tensor) -> Tensor:
    x = native.readable(x)
    result = torch.empty_like(x)
    seed_value, threshold, scale = dropout_arguments(p, seed)
    threads = torch.get_num_threads() if x.numel() > _SERIAL else 1
    addresses = x.data_ptr(), result.data_ptr()
    kind = DTYPES.index(x.dtype)
    native.library().gattn_drop(*addresses, x.numel(), kind, seed_value, threshold, scale, threads)
    return result


def can_drop(x: Tensor) -> bool:
    """Whether `drop` can be called on a tensor now."""
    if is_exporting() or needs_plain_pytorch() is not None:
        return False
    return x.device.type == "cpu" and x.dtype in DTYPES and _is_there


def drop(x: Tensor, p: float, seed: Tensor) -> Tensor:
    """Zeroes each element of `x` with probability `p`, as `seed` decides, and scales the others by `1 / (1 - p)`."""
    return _operator(x, p, seed)


def _save_drop(ctx: Any, inputs: tuple[Tensor, float, Tensor], output: Tensor) -> None:
    _, ctx.p, seed = inputs
    ctx.save_for_backward(seed)


def _differentiate_drop(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
    if grad is None:
        return None, None, None
    dropped = (plain_drop if is_batched(grad) else drop)(grad, ctx.p, *ctx.saved_tensors)
    return dropped, None, None


library.impl("drop", _dropped, "CPU")
torch.library.register_fake("gattn::drop", lambda x, p, seed: torch.empty_like(x).contiguous(), lib=library)
_operator = Differentiated("drop", _dropped, _save_drop, _differentiate_drop)
