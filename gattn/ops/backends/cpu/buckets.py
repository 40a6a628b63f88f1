"""Biases by bucket on complete graphs, with the CPU kernels: table look-ups, and sums of gradients."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from gattn.bias import Buckets
from gattn.ops.backends.base import needs_plain_pytorch
from gattn.ops.backends.cpu import native
from gattn.ops.backends.kernels import DTYPES
from gattn.torch_private import is_lazy, is_traced

__all__ = ["add", "add_gradient", "can_add"]

_load_error = native.load_error()

# Below this many pairs, threads cost more than they gain.
_SERIAL = 1 << 14


def can_add(bias: Buckets, numbers: Tensor) -> bool:
    """Whether the kernels can compute with this bias, and logits or their gradients `[B, H, n, m]`, now."""
    if _load_error is not None or numbers.device.type != "cpu":
        return False
    is_dense = numbers.is_contiguous() and numbers.dtype in (torch.float32, torch.float64)
    is_dense = is_dense and not is_lazy(numbers)
    is_same = bias.table.dtype == numbers.dtype and len(bias.table) > 0
    return is_dense and is_same and not is_traced() and needs_plain_pytorch() is None


def add(bias: Buckets, targets: slice, sources: slice, logits: Tensor) -> Tensor:
    """Adds the biases of these pairs to their logits, `[B, H, n, m]`, in place."""
    table = native.readable(bias.table.t().expand(logits.size(1), -1))
    pairs = _pairs(bias, targets, sources, logits)
    kind = DTYPES.index(logits.dtype)
    native.library().gattn_add_buckets(ctypes.byref(pairs[0]), kind, table.data_ptr(), logits.data_ptr())
    return logits


def add_gradient(bias: Buckets, to: Tensor, targets: slice, sources: slice, grad: Tensor) -> None:
    """Adds the sums of the gradients `[B, H, n, m]` of each bucket's pairs to those of the table, `[K, H]`."""
    sums = torch.zeros(grad.size(1), native.BUCKET_PARTS, len(to), dtype=torch.float64, device="cpu")
    pairs = _pairs(bias, targets, sources, grad)
    kind = DTYPES.index(grad.dtype)
    native.library().gattn_sum_buckets(ctypes.byref(pairs[0]), kind, sums.data_ptr(), grad.data_ptr())
    to += sums.sum(1).t().sum_to_size(to.shape)


def _pairs(bias: Buckets, targets: slice, sources: slice, numbers: Tensor) -> tuple[native.Buckets, Tensor]:
    """The buckets of these pairs as the kernels take them, and what has to be kept alive meanwhile."""
    buckets = bias.part_of(targets, sources)
    buckets = native.readable(buckets, strided=buckets.stride(2) == 1)
    elements, heads, rows, columns = numbers.shape
    pairs = native.Buckets(
        buckets=buckets.data_ptr(),
        bytes=buckets.element_size(),
        element_stride=buckets.stride(0) if len(buckets) > 1 else 0,
        row_stride=buckets.stride(1),
        count=len(bias.table),
        elements=elements,
        heads=heads,
        rows=rows,
        columns=columns,
        threads=torch.get_num_threads() if numbers.numel() > _SERIAL else 1,
    )
    return pairs, buckets
