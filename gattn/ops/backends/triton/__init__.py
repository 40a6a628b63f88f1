"""Fused attention on the GPU: Triton's kernels as PyTorch operators. Triton is imported when the first one runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gattn.distributions import Law
from gattn.ops.backends.base import Missing
from gattn.ops.backends.kernels import KernelBackend, flat
from gattn.ops.backends.triton import forms
from gattn.ops.backends.triton.forms import Form, jitted, stored, unaligned
from gattn.ops.backends.triton.layout import layout_of
from gattn.ops.backends.triton.passes import Pass
from gattn.ops.call import compute_dtype
from gattn.ops.operator import AttentionOperator
from gattn.ops.terms import Inputs
from gattn.scores import Family

__all__ = ["Triton"]


class Triton(KernelBackend):
    """The Triton kernels."""

    name = "triton"
    devices = ("cuda",)
    layout_of = staticmethod(layout_of)

    def serves(self, device: torch.device) -> bool:
        """See `KernelBackend.serves`; the interpreter computes on the CPU."""
        return super().serves(device) or (forms.INTERPRETED and device.type == "cpu")

    def knows(self, family: Family | None) -> bool:
        """See `KernelBackend.knows`."""
        return family is not None and _knows(family.name)

    def knows_law(self, law: Law | None) -> bool:
        """See `KernelBackend.knows_law`."""
        return law is not None and _knows_law(law.name)

    def prepared(self, inputs: Inputs) -> Any:
        """See `KernelBackend.prepared`."""
        return Form(inputs)

    def on_graph(self, prepared: Any, edges: tuple[Tensor, int, int, bool, str]) -> tuple[Any, int | None]:
        """See `KernelBackend.on_graph`."""
        layout = layout_of(*edges)
        return (prepared, layout), layout.known_edges

    def missing(self) -> Missing | None:
        """See `Backend.missing`."""
        return None if forms.is_installed else Missing("Triton", "it is not installed: pip install triton")


@torch.compiler.assume_constant_result  # compiled code cannot import
def _knows(family: str) -> bool:
    return family in jitted().FAMILIES


@torch.compiler.assume_constant_result
def _knows_law(law: str) -> bool:
    return law in jitted().LAWS


def _kept(inputs: Inputs, keep: bool) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Statistics of the softmax, rewritten logits, and the output before it was rounded."""
    compute, batch, heads = compute_dtype(inputs.values.dtype), math.prod(inputs.front), inputs.heads
    kept: list[tuple[tuple[int, ...], torch.dtype]] = [((batch, inputs.num_targets, 2, heads), compute)]
    if keep and inputs.distribution in jitted().ROW_LAWS:
        kept.append(((batch, inputs.most_edges, heads), compute))
    if keep and inputs.values.dtype != compute:
        kept.append((inputs.out_shape, compute))
    return kept


def _forward(inputs: Inputs, keep: bool, with_weights: bool) -> list[Any]:
    with torch.cuda.device_of(inputs.key):
        call = Pass(inputs)
        form, shape = call.form, inputs.out_shape
        out = call.empty(*shape, dtype=stored(form.dtype))
        unrounded = call.empty(*shape) if keep and out.dtype != form.compute else None
        kept = []
        if form.is_of_rows:
            kept.append(call.rewrite_logits())
            call.read_rewritten(kept[0])
        stats, weights = call.sum_values(form.law, form.divides, out, unrounded, with_weights)
        if form.dtype != form.compute:
            kept.append(out if unrounded is None else unrounded)
        if weights is not None:
            weights = weights.view(*inputs.front, *weights.shape[1:])
        return [out.to(form.dtype), weights, stats, *(kept if keep else ())]


def _backward(
    inputs: Inputs,
    grad_out: Tensor,
    grad_weights: Tensor | None,
    out: Tensor,
    weights: Tensor | None,
    kept: Sequence[Tensor],
    wanted: Sequence[str],
) -> list[Tensor]:
    stats, *others = (x.contiguous() for x in kept)  # as kernels read them
    with torch.cuda.device_of(grad_out):
        call = Pass(inputs)
        form = call.form
        if form.is_of_rows:
            call.read_rewritten(others.pop(0))
        unrounded = others[0] if others else out.contiguous()
        if form.derivatives is not None:
            # A threshold takes the mean of its row's gradients, weighted by the derivatives instead of the weights.
            unrounded = call.empty(*unrounded.shape)
            _, weights = call.sum_values(form.derivatives, True, unrounded, None, grad_weights is not None)
        tensors = {name: getattr(inputs, name) for name in wanted}
        given: dict[str, Any] = {"stats": stats, "grad_out": grad_out.contiguous()}
        is_normalized = form.divides or form.derivatives is not None
        if is_normalized:
            delta = call.delta(given["grad_out"], unrounded)
        else:
            delta = call.empty(call.batch, call.at.num_targets, form.heads).zero_()
        if grad_weights is not None:
            given |= {"grad_weights": grad_weights.contiguous(), "num_edges": call.layout.num_edges}
            if is_normalized:
                assert weights is not None
                of_weights = torch.empty_like(delta)
                call.sum_by_target(flat(weights, 1) * flat(grad_weights, 1), of_weights.unsqueeze(-1))
                delta += of_weights
        given["delta"] = delta
        call.unaligned += unaligned(given)
        grads = call.backward_by_source(tensors, given)
        if "query" in tensors:
            grads["query"] = call.backward_by_target(grads["logits"], tensors)
        if "bias" in tensors:
            grads["bias"] = grads["logits"]
        if inputs.sink is not None and "sink" in tensors:
            maximum, scale = stats.unbind(2)
            grads["sink"] = -((inputs.sink - maximum).exp() * scale * delta).sum((0, 1))
        return [call.as_gradient(grads[name], name, tensor) for name, tensor in tensors.items()]


Triton.operator = AttentionOperator("triton_attention", ("CUDA", "CPU"), _forward, _backward, _kept)
