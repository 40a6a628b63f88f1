"""Dropout on attention weights, by a counter-based generator.

All backends share one definition: whether a weight is kept depends only on the seed and on the weight's position. So a
kernel can recompute it in the backward pass, in any order and on any number of threads, and tests can compare kernels
under dropout.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gattn.errors import InputError, InputTypeError

__all__ = ["check_probability", "draw_seed", "drop", "keep_mask", "keep_mask_of_pairs"]

_LOW32 = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """A bijection on 32-bit integers in which every input bit counts; in int64, where its products cannot overflow."""
    for _ in range(2):
        x = (x ^ (x >> 16)).mul_(0x45D9F3B).bitwise_and_(_LOW32)
    return x ^ (x >> 16)


def keep_mask(seed: Tensor, shape: torch.Size, p: float) -> Tensor:
    """Which weights dropout keeps.

    Weight number *n* (counted row by row over `shape`) is kept where `mix(mix(low(n) ^ low(seed)) ^ high(n) ^
    high(seed))`, a uniform 32-bit integer, is at least `p * 2**32`.

    Args:
        seed: A scalar int64 tensor in `[0, 2**63)`, on the device of the mask.
        shape: Shape of the weights, `[..., E, H]`.
        p: Probability that a weight is dropped.
    """
    number = torch.arange(math.prod(shape), device=seed.device)  # numel() needs the sizes, which export leaves open
    random = _mix(_mix((number & _LOW32) ^ (seed & _LOW32)) ^ (number >> 32) ^ (seed >> 32))
    return (random >= int(p * 2**32)).view(shape)


def keep_mask_of_pairs(seed: Tensor, shape: torch.Size, p: float) -> Tensor:
    """Which weights dropout keeps of all pairs of nodes, `[B, H, N, M]`.

    Row number *r*, counted over `[B, H, N]`, has the keys `k = mix(mix(low(r) ^ low(seed)) ^ high(r) ^ high(seed))`
    and `mix(k ^ 0x9e3779b9)`: source *j* is kept where a uniform 32-bit integer, made of `j + k` like `mix` but with
    the second key in between, is at least `p * 2**32`.

    Args:
        seed: A scalar int64 tensor in `[0, 2**63)`, on the device of the mask.
        shape: Shape of the weights.
        p: Probability that a weight is dropped.
    """
    row = torch.arange(math.prod(shape[:-1]), device=seed.device).unsqueeze(-1)
    first = _mix(_mix((row & _LOW32) ^ (seed & _LOW32)) ^ (row >> 32) ^ (seed >> 32))
    x = (torch.arange(shape[-1], device=seed.device) + first) & _LOW32
    x = ((x ^ (x >> 16)) * 0x45D9F3B & _LOW32) ^ _mix(first ^ 0x9E3779B9)
    x = (x ^ (x >> 16)) * 0x45D9F3B & _LOW32
    return ((x ^ (x >> 16)) >= int(p * 2**32)).view(shape)


def check_probability(name: str, p: float) -> None:
    """Raises `TypeError` or `ValueError` if `p` is not a probability."""
    try:
        valid = None if p is True else bool(0.0 <= p <= 1.0)  # as a number, True would drop everything
    except (TypeError, ValueError, RuntimeError):
        valid = None
    if valid is None:
        raise InputTypeError(f"{name} must be a probability, a number between 0 and 1; got {p!r}.")
    if not valid:
        raise InputError(f"{name} must be a probability between 0 and 1; got {p}.")


def draw_seed(device: torch.device) -> Tensor:
    """A fresh seed from PyTorch's default generator of `device`."""
    return torch.randint(2**63 - 1, (), device=device)


def drop(weights: Tensor, p: float, seed: Tensor) -> Tensor:
    """Zeroes each weight with probability `p`, as `seed` decides, and scales the others by `1 / (1 - p)`."""
    if p == 1.0:
        return weights * 0.0
    return weights * keep_mask(seed, weights.shape, p).to(weights.dtype).div_(1 - p)
