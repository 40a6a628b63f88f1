"""Autocast: whether it is on where a tensor is, and computing without it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["is_autocast", "without_autocast"]


def is_autocast(x: Tensor) -> bool:
    """Whether autocast chooses the types of matrix products on the device of `x`."""
    kind = x.device.type
    return (kind == "cpu" or _exists(kind)) and torch.is_autocast_enabled(kind)


def without_autocast(x: Tensor) -> AbstractContextManager[None]:
    """A context in which products on the device of `x` have the types of their factors."""
    return torch.autocast(x.device.type, enabled=False) if is_autocast(x) else nullcontext()


@torch.compiler.assume_constant_result  # PyTorch 2.11 cannot compile the call
def _exists(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)
