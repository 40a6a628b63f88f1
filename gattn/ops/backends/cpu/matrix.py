"""Weights on complete graphs by distributions that look at all logits of a row, with the CPU kernels."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from gattn.distributions import LAWS, Law
from gattn.ops.backends.base import needs_plain_pytorch
from gattn.ops.backends.cpu import native
from gattn.ops.backends.kernels import DTYPES
from gattn.ops.differentiated import Differentiated, library
from gattn.torch_private import is_batched, is_exporting

__all__ = ["can_weigh", "weights"]

# Read once, because compiled code cannot.
_laws = frozenset() if native.load_error() else frozenset(filter(native.is_of_rows, LAWS))

# Below this many logits, threads cost more than they gain.
_SERIAL = 1 << 14

library.define("matrix_weights(Tensor logits, str law, float[] constants) -> Tensor")
library.define("matrix_weights_backward(Tensor weights, Tensor grad, str law) -> Tensor")


def can_weigh(logits: Tensor, law: Law) -> bool:
    """Whether `weights` can be called now."""
    if logits.device.type != "cpu" or is_exporting():
        return False
    is_known = law.name in _laws and logits.dtype in (torch.float32, torch.float64)
    return is_known and needs_plain_pytorch() is None


def weights(logits: Tensor, law: Law) -> Tensor:
    """The weights of logits `[..., M]`, whose last dimension is that of the sources.

    Args:
        logits: In float32 or float64; those of minus infinity get no weight.
        law: A distribution that looks at whole rows.
    """
    found: Tensor = _operator(logits, law.name, list(law.constants))
    return found


def _call(rows: Tensor, weights: Tensor | None, law: str, constants: list[float]) -> Tensor:
    """Replaces logits by weights, or gradients of these weights by gradients of logits."""
    arguments = native.Arguments(
        heads=1,
        type=DTYPES.index(rows.dtype),
        threads=torch.get_num_threads() if rows.numel() > _SERIAL else 1,
        distribution=native.distribution(law),
    )
    arguments.distribution_constants[: len(constants)] = constants
    columns = rows.size(-1)
    if rows.numel() > 0:
        of = None if weights is None else weights.data_ptr()
        native.library().gattn_matrix_rows(
            ctypes.byref(arguments), of, rows.data_ptr(), rows.numel() // columns, columns
        )
    return rows


def _weigh(logits: Tensor, law: str, constants: list[float]) -> Tensor:
    return _call(logits.clone(memory_format=torch.contiguous_format), None, law, constants)


def _gradient(weights: Tensor, grad: Tensor, law: str) -> Tensor:
    return _call(grad.clone(memory_format=torch.contiguous_format), native.readable(weights), law, [])


def _plain_gradient(weights: Tensor, grad: Tensor, law: str) -> Tensor:
    """What `_gradient` computes, in PyTorch."""
    derivative = weights
    if law == "sparsemax":
        derivative = (weights > 0).to(weights.dtype)
    elif law == "entmax15":
        derivative = weights.where(weights > 0, 1.0).sqrt().where(weights > 0, 0.0)
    total = derivative.sum(-1, keepdim=True)
    return derivative * (grad - (derivative * grad).sum(-1, keepdim=True) / total.where(total != 0, 1.0))


def _save(ctx: Any, inputs: tuple[Tensor, str, list[float]], output: Tensor) -> None:
    ctx.law = inputs[1]
    ctx.save_for_backward(output)


def _differentiate(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
    if grad is None:
        return None, None, None
    (weights,) = ctx.saved_tensors
    return (_plain_gradient if is_batched(grad) else _backward)(weights, grad, ctx.law), None, None


def _save_backward(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    weights, grad, ctx.law = inputs
    ctx.save_for_backward(weights, grad)


def _differentiate_twice(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs = [x if x.requires_grad else x.detach().requires_grad_() for x in ctx.saved_tensors]
        output = _plain_gradient(inputs[0], inputs[1], ctx.law)
    # Sparsemax's derivative does not depend on its weights.
    return *torch.autograd.grad(output, inputs, grad, create_graph=create_graph, allow_unused=True), None


for _name, _function in (("matrix_weights", _weigh), ("matrix_weights_backward", _gradient)):
    library.impl(_name, _function, "CPU")
torch.library.register_fake(
    "gattn::matrix_weights", lambda logits, *_: torch.empty_like(logits).contiguous(), lib=library
)
torch.library.register_fake(
    "gattn::matrix_weights_backward", lambda weights, grad, law: torch.empty_like(grad).contiguous(), lib=library
)
_operator = Differentiated("matrix_weights", _weigh, _save, _differentiate)
_backward = Differentiated("matrix_weights_backward", _gradient, _save_backward, _differentiate_twice)
