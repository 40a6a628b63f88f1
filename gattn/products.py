"""Matrix products with weights, by oneDNN where that is faster than the library that PyTorch takes.

On CPUs, `torch.nn.functional.linear` multiplies float32 matrices by MKL, which does not use AVX-512 on processors of
AMD. oneDNN, which PyTorch contains as well, does: 457 instead of 187 GFLOP/s for 20 000 × 128 × 256 on two cores of an
EPYC, 208 instead of 164 for 738 × 64 × 64. With AVX2 alone, neither is faster throughout, as MKL reaches 80 GFLOP/s on
a core, and on Intel's processors MKL uses AVX-512, too.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from gattn.autocast import is_autocast
from gattn.blocks import left_to_torch
from gattn.torch_private import is_functorch_tensor, is_lazy, is_traced, uses_forward_mode, uses_jit_trace

__all__ = ["instructions", "linear", "processor", "rule", "uses_onednn"]

_LEAST = 1 << 23
"""The multiplications from which it is used: each call is prepared for some 25 µs, and autograd takes as many."""
_PLAIN = (Tensor, Parameter)


def _of_processor(field: str) -> str:
    """What the system tells about the processor; nothing where that is not Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def processor() -> str:
    """The processor's name, as far as the system tells."""
    return _of_processor("model name") or platform.processor() or platform.machine()


def instructions() -> frozenset[str]:
    """The processor's sets of instructions, by Linux's names, as far as the system tells."""
    return frozenset(_of_processor("flags").split())


def _prefers_onednn(name: str, capability: str) -> bool:
    """Whether oneDNN is faster on a processor with these vector instructions."""
    return "AMD" in name and capability == "AVX512" and torch.backends.mkldnn.is_available()


_USES_ONEDNN = "products" not in left_to_torch() and _prefers_onednn(
    processor(), torch.backends.cpu.get_cpu_capability()
)


def uses_onednn() -> bool:
    """Whether oneDNN computes any products."""
    return _USES_ONEDNN


def rule() -> str:
    """Which products oneDNN computes, for a report."""
    if not _USES_ONEDNN:
        return "PyTorch's"
    return f"oneDNN's in float32 from {_LEAST} multiplications, otherwise PyTorch's"


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The products x Wᵀ + b, as `torch.nn.functional.linear` computes them, up to rounding.

    They are the same on every run and with any number of threads, as far as those of both libraries are.

    Args:
        x: The features, `[..., F_in]`.
        weight: The weight W, `[F_out, F_in]`.
        bias: The bias b, `[F_out]`. (default: `None`)
    """
    if not _USES_ONEDNN or not _is_for_onednn(x, weight, bias):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        out: Tensor = _Linear.apply(x, weight, bias)
        return out
    return _product(x, weight, bias)


def _is_for_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if torch.compiler.is_compiling() or is_traced() or uses_forward_mode() or uses_jit_trace() or is_autocast(x):
        return False
    for tensor in (x, weight) if bias is None else (x, weight, bias):
        if type(tensor) not in _PLAIN or tensor.is_nested or is_functorch_tensor(tensor) or is_lazy(tensor):
            return False
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return False
    if weight.dim() != 2 or x.dim() < 2 or x.size(-1) != weight.size(1):
        return False
    return x.numel() * weight.size(0) >= _LEAST and (bias is None or bias.shape == weight.shape[:1])


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


class _Linear(torch.autograd.Function):
    """The gradient of x is such a product; that of the weight, a sum over rows, is faster by PyTorch's library."""

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
        rows = grad.reshape(-1, grad.size(-1))  # flatten has no batches of gradients
        return (
            linear(grad, weight.t()) if needs_x else None,
            rows.t() @ x.reshape(-1, x.size(-1)) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )
