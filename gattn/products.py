"""Matrix products with weights, by oneDNN and by a kernel where these are faster than the library that PyTorch takes.

On CPUs, `torch.nn.functional.linear` multiplies float32 matrices by MKL, which does not use AVX-512 on processors of
AMD. oneDNN, which PyTorch contains as well, does: 457 instead of 187 GFLOP/s for 20 000 × 128 × 256 on two cores of an
EPYC, 208 instead of 164 for 738 × 64 × 64. The gradient of a weight is a sum over rows, in which oneDNN gains little:
there, a kernel reaches 397 instead of 195 GFLOP/s for 7 650 × 256 × 256, 290 instead of 170 for 738 × 64 × 64. With
AVX2 alone, neither is faster throughout, as MKL reaches 80 GFLOP/s on a core, and on Intel's processors MKL uses
AVX-512, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.nn import Parameter

from gattn.autocast import is_autocast
from gattn.blocks import left_to_torch
from gattn.ops.backends.cpu import native
from gattn.ops.differentiated import Differentiated, library
from gattn.ops.flops import register
from gattn.processor import processor
from gattn.torch_private import (
    is_batched,
    is_exporting,
    is_functorch_tensor,
    is_intercepted,
    is_lazy,
    needs_dispatcher,
    uses_forward_mode,
)

__all__ = ["linear", "rule", "several", "uses_onednn"]

_LEAST = 1 << 22
"""The multiplications from which they are used: with half as many, preparing calls takes as long as they save."""
_LEAST_COMPILED = 1 << 12
"""The numbers in a weight from which compiled code calls them."""
_PLAIN = (Tensor, Parameter)


def _prefers_onednn(name: str, capability: str) -> bool:
    """Whether oneDNN is faster on a processor with these vector instructions."""
    return "AMD" in name and capability == "AVX512" and torch.backends.mkldnn.is_available()


_USES_ONEDNN = "products" not in left_to_torch() and _prefers_onednn(
    processor(), torch.backends.cpu.get_cpu_capability()
)


_SUMS_ROWS = native.load_error() is None and native.library().gattn_instruction_set() == b"avx512"
"""Whether the kernel for gradients of weights is used, where oneDNN is"""


def uses_onednn() -> bool:
    """Whether oneDNN computes any products."""
    return _USES_ONEDNN


def rule() -> str:
    """Which products oneDNN computes, for a report."""
    if not _USES_ONEDNN:
        return "PyTorch's"
    sums = ", and gattn's for gradients of weights" if _SUMS_ROWS else ""
    return f"oneDNN's in float32 from {_LEAST} multiplications{sums}, otherwise PyTorch's"


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The products x Wᵀ + b, as `torch.nn.functional.linear` computes them, up to rounding.

    They are the same on every run and with any number of threads, as far as those of both libraries are.

    Args:
        x: The features, `[..., F_in]`.
        weight: The weight W, `[F_out, F_in]`.
        bias: The bias b, `[F_out]`. (default: `None`)
    """
    if not _USES_ONEDNN:
        return F.linear(x, weight, bias)
    if torch.compiler.is_compiling():
        return several(x, (weight,), (bias,))[0] if _compiles(x, (weight,), (bias,)) else F.linear(x, weight, bias)
    # A tracer's sizes are no numbers; small products take about as long as this question.
    if type(x.numel()) is not int:
        return F.linear(x, weight, bias)
    if x.numel() * weight.size(0) < _LEAST or not _takes_over(x, weight, bias):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        out: Tensor = _Linear.apply(x, weight, bias)
        return out
    return _product(x, weight, bias)


def _takes_over(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether these products are large and plain enough not to be left to PyTorch."""
    if is_intercepted() or weight.dim() != 2 or x.numel() * weight.size(0) < _LEAST:
        return False
    if uses_forward_mode() or is_autocast(x):
        return False
    for tensor in (x, weight) if bias is None else (x, weight, bias):
        if type(tensor) not in _PLAIN or tensor.is_nested or is_functorch_tensor(tensor) or is_lazy(tensor):
            return False
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return False
    if x.dim() < 2 or x.size(-1) != weight.size(1):
        return False
    return bias is None or bias.shape == weight.shape[:1]


def several(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """What `linear` returns for each of these weights; in compiled code by one operator, as each call takes time.

    Args:
        x: See `linear`.
        weights: Up to four weights.
        biases: Their biases.
    """
    pairs = zip(weights, biases, strict=True)
    if torch.compiler.is_compiling() and _USES_ONEDNN and _compiles(x, weights, biases):
        given = [each for pair in pairs for each in pair]
        found: list[Tensor] = _operator(x, *given, *[None] * (2 * _MOST - len(given)))
        return found
    return [linear(x, weight, bias) for weight, bias in pairs]


def _compiles(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> bool:
    """Whether the operator computes products in compiled code, where the number of rows may be open: it looks at it."""
    if is_exporting() or x.is_nested or x.dim() < 2 or sum(weight.numel() for weight in weights) < _LEAST_COMPILED:
        return False
    for weight, bias in zip(weights, biases, strict=True):  # else, PyTorch's own product says what is wrong
        if weight.dim() != 2 or weight.size(1) != x.size(-1) or (bias is not None and bias.shape != weight.shape[:1]):
            return False
    tensors = [x, *weights, *(bias for bias in biases if bias is not None)]
    return not is_autocast(x) and all(each.dtype == torch.float32 and each.device.type == "cpu" for each in tensors)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def _sum_over_rows(a: Tensor, b: Tensor) -> Tensor:
    """The product aᵀ b of matrices with many rows, by the kernel."""
    a, b = (x if x.stride(1) == 1 else x.contiguous() for x in (native.readable(x, strided=True) for x in (a, b)))
    out = a.new_empty(a.size(1), b.size(1))
    addresses = a.data_ptr(), b.data_ptr(), out.data_ptr()
    with record_function("gattn::products") if needs_dispatcher() else nullcontext():  # for profiles
        native.raise_for(
            native.library().gattn_column_products(
                *addresses, len(a), *out.shape, a.stride(0), b.stride(0), torch.get_num_threads()
            )
        )
    return out


class _Linear(torch.autograd.Function):
    """The gradient of x is such a product; that of the weight is a sum over rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if grad is None:
            return None, None, None
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        is_plain = not torch.is_grad_enabled() and not is_batched(grad) and _takes_over(grad, weight.t(), None)
        rows, of_rows = (each.reshape(-1, each.size(-1)) for each in (grad, x))  # flatten has no batches of gradients
        of_x = of_weight = None
        if needs_x:
            of_x = _product(grad, weight.t(), None) if is_plain else linear(grad, weight.t())
        if needs_weight:
            of_weight = _sum_over_rows(rows, of_rows) if is_plain and _SUMS_ROWS else rows.t() @ of_rows
        return of_x, of_weight, rows.sum(0) if needs_bias else None


# In compiled code -----------------------------------------------------------------------------------------------------

_MOST = 4
_PAIRS = ", ".join(f"Tensor{'?' * (place > 0)} weight{place}, Tensor? bias{place}" for place in range(_MOST))
library.define(f"linear(Tensor x, {_PAIRS}) -> Tensor[]")
library.define("linear_backward(Tensor?[] grads, Tensor x, Tensor[] weights, bool[] wanted) -> Tensor[]")


def _is_large(x: Tensor, weight: Tensor) -> bool:
    return 2 * x.numel() * weight.size(0) >= _LEAST  # there are no other preparations


def _weights(given: Sequence[Tensor | None]) -> list[Tensor]:
    return [weight for weight in given[::2] if weight is not None]


def _compute(x: Tensor, *given: Tensor | None) -> list[Tensor]:
    return [
        _product(x, weight, bias) if _is_large(x, weight) else F.linear(x, weight, bias)
        for weight, bias in zip(_weights(given), given[1::2], strict=False)
    ]


def _compute_backward(grads: list[Tensor | None], x: Tensor, weights: list[Tensor], wanted: list[bool]) -> list[Tensor]:
    """The gradient of x, if it is wanted, and those of the wanted weights."""
    of_x, of_weights, of_rows = None, [], x.reshape(-1, x.size(-1))
    for grad, weight, is_wanted in zip(grads, weights, wanted[1:], strict=True):
        is_large = _is_large(x, weight)
        if wanted[0] and grad is not None:
            part = _product(grad, weight.t(), None) if is_large else grad @ weight
            of_x = part if of_x is None else of_x.add_(part)
        if is_wanted and grad is not None:
            rows = grad.reshape(-1, grad.size(-1))
            of_weights.append(_sum_over_rows(rows, of_rows) if is_large and _SUMS_ROWS else rows.t() @ of_rows)
        elif is_wanted:
            of_weights.append(weight.new_zeros(weight.shape))
    return ([] if not wanted[0] else [x.new_zeros(x.shape) if of_x is None else of_x]) + of_weights


def _save(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    x, *given = inputs
    weights = _weights(given)
    ctx.save_for_backward(x, *weights)
    ctx.wanted = [each.requires_grad for each in (x, *weights)]
    ctx.wants_bias = [bias is not None and bias.requires_grad for bias in given[1::2]]


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    x, *weights = ctx.saved_tensors
    found: Iterator[Tensor] = iter(())
    if any(ctx.wanted) and any(grad is not None for grad in grads):
        found = iter(torch.ops.gattn.linear_backward(list(grads), x, weights, ctx.wanted))
    of_x, *of_weights = (next(found, None) if is_wanted else None for is_wanted in ctx.wanted)
    of_weights += [None] * (_MOST - len(weights))
    pairs = []
    for place, (of_weight, wants_bias) in enumerate(zip(of_weights, ctx.wants_bias, strict=True)):
        grad = grads[place] if place < len(grads) else None
        pairs += [of_weight, grad.flatten(0, -2).sum(0) if wants_bias and grad is not None else None]
    return of_x, *pairs


library.impl("linear", _compute, "CPU")
library.impl("linear_backward", _compute_backward, "CPU")


@torch.library.register_fake("gattn::linear", lib=library)
def _fake(x: Tensor, *given: Tensor | None) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], weight.size(0)) for weight in _weights(given)]


@torch.library.register_fake("gattn::linear_backward", lib=library)
def _fake_backward(grads: list[Tensor | None], x: Tensor, weights: list[Tensor], wanted: list[bool]) -> list[Tensor]:
    return [each.new_empty(each.shape) for each, is_wanted in zip((x, *weights), wanted, strict=True) if is_wanted]


register("linear", lambda x, *given: sum(2 * x.numel() * weight.size(0) for weight in _weights(given)))
register(
    "linear_backward",
    lambda grads, x, weights, wanted: sum(
        2 * x.numel() * weight.size(0) * (wanted[0] + is_wanted)
        for grad, weight, is_wanted in zip(grads, weights, wanted[1:], strict=True)
        if grad is not None
    ),
)
_operator = Differentiated("linear", _compute, _save, _differentiate)
