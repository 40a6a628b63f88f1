"""Matrix products with weights, by oneDNN and by a kernel where these are faster than the library that PyTorch takes.

On CPUs, `torch.nn.functional.linear` multiplies float32 matrices by MKL, which does not use AVX-512 on processors of
AMD. oneDNN, which PyTorch contains as well, does: 457 instead of 187 GFLOP/s for 20 000 × 128 × 256 on two cores of an
EPYC, 208 instead of 164 for 738 × 64 × 64. The gradient of a weight is a sum over rows, in which oneDNN gains little:
there, a kernel reaches 397 instead of 195 GFLOP/s for 7 650 × 256 × 256, 290 instead of 170 for 738 × 64 × 64. With
AVX2 alone, neither is faster throughout, as MKL reaches 80 GFLOP/s on a core, and on Intel's processors MKL uses
AVX-512, too.
"""

from __future__ import annotations

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

__all__ = ["linear", "rule", "uses_onednn"]

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
        return _compiled(x, weight, bias)
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


def _compiled(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same in compiled code, where the number of rows may be open: the operator looks at it."""
    tensors = (x, weight) if bias is None else (x, weight, bias)
    is_plain = all(tensor.dtype == torch.float32 and tensor.device.type == "cpu" for tensor in tensors)
    if is_exporting() or not is_plain or x.dim() < 2 or weight.numel() < _LEAST_COMPILED or is_autocast(x):
        return F.linear(x, weight, bias)
    out: Tensor = _operator(x, weight, bias)
    return out


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

library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
library.define("linear_backward(Tensor grad, Tensor x, Tensor weight, bool[] wanted) -> Tensor[]")


def _is_large(x: Tensor, weight: Tensor) -> bool:
    return 2 * x.numel() * weight.size(0) >= _LEAST  # there are no other preparations


def _compute(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _product(x, weight, bias) if _is_large(x, weight) else F.linear(x, weight, bias)


def _compute_backward(grad: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]) -> list[Tensor]:
    """The gradients of x and of the weight, or of one of them."""
    is_large, found = _is_large(x, weight), []
    if wanted[0]:
        found.append(_product(grad, weight.t(), None) if is_large else grad @ weight)
    if wanted[1]:
        rows, of_rows = (each.reshape(-1, each.size(-1)) for each in (grad, x))
        found.append(_sum_over_rows(rows, of_rows) if is_large and _SUMS_ROWS else rows.t() @ of_rows)
    return found


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.wanted = [x.requires_grad, weight.requires_grad]
    ctx.wants_bias = bias is not None and bias.requires_grad


def _differentiate(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None
    x, weight = ctx.saved_tensors
    found = iter(torch.ops.gattn.linear_backward(grad, x, weight, ctx.wanted) if any(ctx.wanted) else [])
    of_x, of_weight = (next(found) if is_wanted else None for is_wanted in ctx.wanted)
    return of_x, of_weight, grad.flatten(0, -2).sum(0) if ctx.wants_bias else None


library.impl("linear", _compute, "CPU")
library.impl("linear_backward", _compute_backward, "CPU")


@torch.library.register_fake("gattn::linear", lib=library)
def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.size(0))


@torch.library.register_fake("gattn::linear_backward", lib=library)
def _fake_backward(grad: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]) -> list[Tensor]:
    return [each.new_empty(each.shape) for each, is_wanted in zip((x, weight), wanted, strict=True) if is_wanted]


_operator = Differentiated("linear", _compute, _save, _differentiate)
