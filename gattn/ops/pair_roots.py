"""The features of pairs of nodes that GRIT's attention makes.

Dimensions: N targets, M sources, E pairs, H heads, C channels.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from gattn.ops.backends.base import needs_plain_pytorch
from gattn.ops.backends.cpu import native
from gattn.ops.backends.kernels import DTYPES
from gattn.ops.choose import requested
from gattn.torch_private import is_batched, is_traced

__all__ = ["pair_roots", "signed_root"]

_load_error = native.load_error()

# Below this many numbers, threads cost more than they gain.
_SERIAL = 1 << 15


def signed_root(x: Tensor) -> Tensor:
    r"""The function :math:`\mathrm{sign}(x) \sqrt{|x|}`, whose derivative is taken to be zero at zero."""
    size = x.abs()
    return x.sign() * size.masked_fill(size == 0, 1.0).sqrt()


def pair_roots(query: Tensor, key: Tensor, weight: Tensor, shift: Tensor, target: Tensor, source: Tensor) -> Tensor:
    r"""The features of pairs from those of their ends.

    .. math::
        \hat e_{ij} = \mathrm{ReLU}\big(\rho((q_i + k_j) \odot w_{ij}) + b_{ij}\big), \qquad
        \rho(z) = \mathrm{sign}(z) \sqrt{|z|}

    The CPU kernels read and write everything once, which PyTorch's operators do a dozen times.

    Args:
        query: :math:`q`, `[..., N, H, C]`.
        key: :math:`k`, `[..., M, H, C]`.
        weight: :math:`w`, `[..., E, H, C]`.
        shift: :math:`b`, `[..., E, H, C]`.
        target: The target of each pair, `[E]`, int64.
        source: Its source, `[E]`, int64.

    Returns:
        The features, `[..., E, H, C]`.
    """
    given = query, key, weight, shift
    if _can_use_kernels(given):
        features: Tensor = _Kernel.apply(*given, target, source)
        return features
    ends = query.index_select(-3, target) + key.index_select(-3, source)
    return (signed_root(ends * weight) + shift).relu()


def _can_use_kernels(given: tuple[Tensor, ...]) -> bool:
    first = given[0]
    if _load_error is not None or is_traced() or requested("auto") not in ("auto", "cpu"):
        return False
    if first.device.type != "cpu" or first.dtype not in (torch.float32, torch.float64):
        return False
    is_one = all(x.dim() == 3 and x.dtype == first.dtype for x in given) and given[2].shape == given[3].shape
    return is_one and needs_plain_pytorch() is None


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        query, key, weight, shift, target, source = map(native.readable, given)
        out = torch.empty_like(weight)
        _run("gattn_pair_roots", query, key, weight, target, source, shift=shift, out=out)
        ctx.save_for_backward(query, key, weight, target, source, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, weight, target, source, out = ctx.saved_tensors
        (grad,) = grads
        if torch.is_grad_enabled() or is_batched(grad):  # as second derivatives and batches of gradients need it
            ends = query.index_select(0, target) + key.index_select(0, source)
            size = (ends * weight).abs()
            is_zero = size == 0
            grad_shift = grad * (out > 0)
            of_product = grad_shift * (0.5 / size.masked_fill(is_zero, 1.0).sqrt()).masked_fill(is_zero, 0.0)
            grad_ends, grad_weight = of_product * weight, of_product * ends
        else:
            grad_ends, grad_weight, grad_shift = (
                torch.empty_like(weight, memory_format=torch.contiguous_format) for _ in range(3)
            )
            terms = {"grad_ends": grad_ends, "grad_weight": grad_weight, "grad_shift": grad_shift}
            _run("gattn_pair_roots_backward", query, key, weight, target, source, out=out, grad=grad, **terms)
        of_nodes = (
            torch.zeros_like(nodes).index_add(0, index, grad_ends) for nodes, index in ((query, target), (key, source))
        )
        return *of_nodes, grad_weight, grad_shift, None, None


def _run(
    name: str, query: Tensor, key: Tensor, weight: Tensor, target: Tensor, source: Tensor, **terms: Tensor
) -> None:
    """Calls a function of the library."""
    terms |= {"query": query, "key": key, "weight": weight, "target": target, "source": source}
    terms = {term: native.readable(tensor) for term, tensor in terms.items()}
    rows = native.PairRoots(
        targets=len(query),
        sources=len(key),
        pairs=len(weight),
        width=weight[0].numel() if len(weight) else 0,
        threads=torch.get_num_threads() if weight.numel() > _SERIAL else 1,
        **{term: tensor.data_ptr() for term, tensor in terms.items()},
    )
    native.raise_for(getattr(native.library(), name)(ctypes.byref(rows), DTYPES.index(weight.dtype)))
