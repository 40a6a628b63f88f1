"""Biases by distance: radial functions of the distances of all pairs of positions, times a matrix.

Dimensions: B elements of a batch, N targets, M sources, S dimensions of space, K radial functions, H heads.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import Tensor

from gattn.ops.backends.base import needs_plain_pytorch
from gattn.ops.backends.cpu import native
from gattn.ops.backends.kernels import DTYPES
from gattn.ops.choose import requested
from gattn.ops.differentiated import are_plain
from gattn.torch_private import is_batched, is_traced

__all__ = ["radial", "uses_kernels"]

_load_error = native.load_error()

# Below this many functions of pairs, threads cost more than they gain.
_SERIAL = 1 << 15

#: The backward pass cuts sources into parts of about this many.
_SOURCES_OF_PART = 512

#: Exponents of Gaussian functions are not less: numbers close to the smallest ones take many times as long.
_LEAST = -50.0


def radial(x: Tensor, y: Tensor, factor: Tensor, weight: Tensor, cutoff: float, is_bessel: bool) -> Tensor:
    r"""The bias :math:`b_{ij} = \sum_k w_k \phi_k(\lVert x_i - y_j \rVert)`; see `gattn.nn.RadialBias`.

    The CPU kernels compute functions of a strip of pairs in the first-level cache, where PyTorch writes and reads all
    of them a dozen times.

    Args:
        x: The positions of the targets, `[..., N, S]`.
        y: Those of the sources, `[..., M, S]`.
        factor: The centres of Gaussian functions, or the factors in the sines of Bessel functions, `[K]`.
        weight: The matrix, `[K, H]`.
        cutoff: The cut-off.
        is_bessel: Whether the functions are Bessel's.

    Returns:
        The biases, `[..., H, N, M]`.
    """
    if uses_kernels((x, y, factor, weight)) and x.dim() == y.dim() and x.shape[:-2] == y.shape[:-2]:
        found: Tensor = _Kernel.apply(x, y, factor, weight, cutoff, is_bessel)
        return found
    return _plain(x, y, factor, weight, cutoff, is_bessel)


def uses_kernels(tensors: tuple[Tensor, ...]) -> bool:
    """Whether the CPU kernels compute biases of these tensors now."""
    if _load_error is not None or is_traced() or requested("auto") not in ("auto", "cpu", "dense"):
        return False
    first = tensors[0]
    is_known = first.device.type == "cpu" and first.dtype in (torch.float32, torch.float64)
    is_one = all(x.dtype == first.dtype and x.device == first.device for x in tensors)
    return is_known and is_one and are_plain(tensors) and needs_plain_pytorch() is None


def _plain(x: Tensor, y: Tensor, factor: Tensor, weight: Tensor, cutoff: float, is_bessel: bool) -> Tensor:
    axes = zip(x.unbind(-1), y.unbind(-1), strict=True)
    squares = sum(((a.unsqueeze(-1) - b.unsqueeze(-2)).square() for a, b in axes), x.new_zeros(()))
    is_same = squares == 0  # where a root has no derivative
    distance = squares.masked_fill(is_same, 1.0).sqrt()
    factor = factor.view(-1, *(1,) * distance.dim())  # functions come first, so that loops run over pairs
    if is_bessel:
        sines = (factor * distance).sin() / distance
        found = _scale(len(factor), cutoff, is_bessel) * torch.where(is_same, factor, sines)
    else:
        steps = (distance.masked_fill(is_same, 0.0) - factor) * _scale(len(factor), cutoff, is_bessel)
        found = (steps * -steps).clamp_min(_LEAST).exp()
    biases = weight.t() @ found.flatten(1)
    return torch.unflatten(biases, 1, distance.shape).movedim(0, -3)


def _scale(count: int, cutoff: float, is_bessel: bool) -> float:
    """What a Bessel function is multiplied by; or a difference from a Gaussian function's centre."""
    return math.sqrt(2 / cutoff) if is_bessel else math.sqrt(0.5) * max(count - 1, 1) / cutoff


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, factor: Tensor, weight: Tensor, cutoff: float, is_bessel: bool
    ) -> Tensor:
        bias = x.new_empty(*x.shape[:-2], weight.size(1), x.size(-2), y.size(-2))
        ctx.arguments = cutoff, is_bessel
        _run("gattn_radial", (x, y, factor, weight), cutoff, is_bessel, bias=bias)
        ctx.save_for_backward(x, y, factor, weight)
        return bias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        tensors, (cutoff, is_bessel), (grad,) = ctx.saved_tensors, ctx.arguments, grads
        if torch.is_grad_enabled() or is_batched(grad):  # as second derivatives and batches of gradients need it
            with torch.enable_grad():
                leaves: Any = [t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in tensors]
                a, b, c, d = leaves
                found = torch.autograd.grad(_plain(a, b, c, d, cutoff, is_bessel), leaves, grad, create_graph=True)
            return *found, None, None
        x, y, factor, weight = tensors
        front, parts = x.shape[:-2], max(y.size(-2) // _SOURCES_OF_PART, 1)
        grad_x = x.new_empty(*front, parts, *x.shape[-2:])
        grad_y = y.new_empty(y.shape)
        sums = x.new_empty(*front, parts, factor.numel() + weight.numel(), dtype=torch.float64)
        given = {"grad": native.readable(grad), "grad_x": grad_x, "grad_y": grad_y, "grad_parameters": sums}
        _run("gattn_radial_backward", tensors, cutoff, is_bessel, parts, **given)
        of_parameters = sums.flatten(0, -2).sum(0).to(x.dtype)
        of_weight, of_factor = of_parameters.split([weight.numel(), factor.numel()])
        return grad_x.sum(-3), grad_y, of_factor, of_weight.view_as(weight), None, None


def _run(
    name: str, tensors: tuple[Tensor, ...], cutoff: float, is_bessel: bool, parts: int = 1, **more: Tensor
) -> None:
    """Calls a function of the library."""
    x, y, factor, weight = tensors = tuple(map(native.readable, tensors))  # saved ones, too, may be what hooks return
    batch, count = math.prod(x.shape[:-2]), x[..., 0].numel() * y.size(-2) * factor.numel()
    more |= dict(zip(("x", "y", "factor", "weight"), tensors, strict=True))
    arguments = native.Radial(
        type=DTYPES.index(x.dtype),
        threads=torch.get_num_threads() if count > _SERIAL else 1,
        batch=batch,
        targets=x.size(-2),
        sources=y.size(-2),
        space=x.size(-1),
        functions=factor.numel(),
        heads=weight.size(1),
        parts=parts,
        is_bessel=is_bessel,
        scale=_scale(factor.numel(), cutoff, is_bessel),
        **{term: tensor.data_ptr() for term, tensor in more.items()},
    )
    native.raise_for(getattr(native.library(), name)(ctypes.byref(arguments)))
