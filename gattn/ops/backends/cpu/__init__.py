"""Fused attention on the CPU: the C++ kernels in csrc/ as PyTorch operators."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gattn.distributions import LAWS, Law
from gattn.edges import Projected, Typed
from gattn.ops.backends.base import Missing
from gattn.ops.backends.cpu import native
from gattn.ops.backends.cpu.layout import Layout, layout_of
from gattn.ops.backends.cpu.plan import (
    HUGE_BYTES,
    Arguments,
    Plan,
    empty,
    kept_by_forward,
    layout_of_inputs,
    use_huge_pages,
)
from gattn.ops.backends.kernels import DTYPES, KernelBackend
from gattn.ops.call import Call
from gattn.ops.operator import AttentionOperator
from gattn.ops.terms import TERMS, Inputs
from gattn.scores import Family, Score, family_of

__all__ = ["Cpu"]

# Each task, of some thousand edges, sums the gradients of all types. With more types than this, a vector per edge takes
# less memory.
_MOST_TYPES = 512

_load_error = native.load_error()  # read once, because compiled code cannot
_families = frozenset() if _load_error else frozenset(filter(native.knows_family, Score.known_families()))
# Without kernels, the error is that they are missing, not that they do not know a distribution.
_laws = frozenset(name for name in LAWS if _load_error or native.distribution(name) >= 0)


class Cpu(KernelBackend):
    """The C++ kernels."""

    name = "cpu"
    devices = ("cpu",)
    widens_edges = True
    adds_out_bias = True
    layout_of = staticmethod(layout_of)

    def knows(self, family: Family | None) -> bool:
        """See `KernelBackend.knows`."""
        return family is not None and family.name in _families

    def knows_law(self, law: Law | None) -> bool:
        """See `KernelBackend.knows_law`."""
        return law is not None and law.name in _laws

    def projects_edges(self, call: Call) -> bool:
        """See `KernelBackend.projects_edges`."""
        edge, family = call.edge, family_of(call.score, call.channels)
        if any(isinstance(term, Projected) and term.features.size(-1) == 0 for term in (edge, call.edge_value)):
            return False  # to kernels, zero features say that there is no projection
        if isinstance(edge, Typed) and not 0 <= edge.table.size(0) <= min(_MOST_TYPES, edge.types.size(0)):
            return False
        if call.edge_value is not None:
            return not isinstance(edge, tuple) and not isinstance(call.edge_value, tuple)
        return not call.edge_is_value or not isinstance(edge, tuple) or (family is not None and family.vector is None)

    def missing(self) -> Missing | None:
        """See `Backend.missing`."""
        return None if _load_error is None else Missing("gattn's CPU kernels", _load_error)

    def prepared(self, inputs: Inputs) -> Plan:
        """See `KernelBackend.prepared`."""
        return Plan(inputs, layout_of_inputs(inputs).num_edges)

    def on_graph(self, prepared: Plan, edges: tuple[Tensor, int, int, bool, str]) -> tuple[tuple[Plan, Layout], int]:
        """See `KernelBackend.on_graph`."""
        layout = layout_of(*edges)
        return (prepared, layout), layout.num_edges


def _forward(inputs: Inputs, keep: bool, with_weights: bool) -> list[Any]:
    call = Arguments(inputs)
    arguments, layout, plan = call.arguments, call.layout, call.plan
    out = empty(call.out_shape, plan.dtype)
    arguments.out = out.data_ptr()
    weights = None
    if with_weights:
        weights = empty((*plan.front, layout.num_edges, plan.heads), plan.compute)
        arguments.weights = weights.data_ptr()
    kept = []
    for each in plan.kept if keep else plan.needed:
        tensor = empty(each.shape(layout.num_targets, layout.most_edges), each.dtype)
        setattr(arguments, each.name, tensor.data_ptr())
        kept.append(tensor)
    if keep:
        arguments.record_bytes = plan.record_bytes
    if layout.by_target.rows.num_slots:
        state = (2 + plan.value_channels) * plan.heads + 1
        arguments.partial = call.hold(empty((plan.batch * layout.by_target.rows.num_slots * state,), plan.compute))
    native.raise_for(native.library().gattn_forward(ctypes.byref(arguments)))
    return [out, weights, *(kept if keep else kept[:1])]


class _Backward(Arguments):
    """The arguments of a backward pass, with a method for each kind of gradient.

    It gives the kernels memory, and returns that of the gradient, or a function that computes it from what they write.
    """

    def __init__(self, inputs: Inputs, grad_out: Tensor):
        super().__init__(inputs)
        self.inputs, self.grad_out = inputs, grad_out
        plan, layout = self.plan, self.layout
        self.num_node_terms = 4 * plan.batch * layout.num_targets * plan.heads
        self.terms = empty((self.num_node_terms + plan.batch * layout.num_edges * plan.heads,), plan.compute)

    def of_nodes(self, name: str, tensor: Tensor) -> Tensor:
        """Of query, key or value."""
        grad = torch.empty_like(tensor, memory_format=torch.contiguous_format)  # at half the cost of empty()
        if grad.nbytes >= HUGE_BYTES:
            use_huge_pages(grad)
        setattr(self.arguments, f"grad_{name}", grad.data_ptr())
        return grad

    def of_edges(self, name: str, tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        """Of an input with one entry per edge, which gets one gradient per element of a batch first."""
        inner = 2 if name == "edge" and self.inputs.edge_projection is not None else len(TERMS[name].letters)
        is_whole = self.plan.batch == 1 and tensor.dim() == inner
        grad = empty(tensor.shape if is_whole else (self.plan.batch, *tensor.shape[-inner:]), tensor.dtype)
        setattr(self.arguments, f"grad_{name}", grad.data_ptr())
        if name == "edge" and self.inputs.edge_is_value:
            self.arguments.grad_edge_value = grad.data_ptr()
        if is_whole:
            return grad
        return lambda: grad.view(*self.plan.front, *grad.shape[1:]).sum_to_size(tensor.shape)

    @cached_property
    def parts(self) -> Tensor:
        """The gradient of a projection or of a table of types, without the vector: a part from each task."""
        plan, tasks = self.plan, self.layout.by_source.rows.num_tasks
        parts = empty((tasks * plan.batch, plan.arguments.edge_channels, plan.heads, plan.channels), plan.compute)
        self.arguments.grad_edge_projection = parts.data_ptr()
        return parts

    @cached_property
    def of_made(self) -> Tensor:
        """The sum of these parts: `[H, C, D]` or `[R, H, C]`."""
        parts, projection = self.parts, self.inputs.edge_projection
        if projection is None:
            return parts.sum(0)
        if not parts.numel():  # of a batch without elements, there is none
            return parts.new_zeros(projection.shape)
        total = torch.empty(projection.shape, dtype=parts.dtype)
        sizes = parts.size(0), parts.size(1), self.plan.heads * self.plan.channels
        is_double = DTYPES.index(parts.dtype)
        native.library().gattn_sum_parts(parts.data_ptr(), *sizes, total.data_ptr(), is_double)
        return total

    def of_maker(self, name: str, tensor: Tensor) -> Callable[[], Tensor]:
        """Of a projection or of a table of types."""
        _, vector, axis = self.parts, self.inputs.vector, 0 if name == "edge" else -1
        return lambda: (self.of_made if vector is None else self.of_made * vector.unsqueeze(axis)).to(tensor.dtype)

    def of_vector(self, name: str, tensor: Tensor) -> Callable[[], Tensor]:
        """Of the vector, for which each task has its own sum."""
        plan, tasks = self.plan, self.layout.by_target.rows.num_tasks + self.layout.by_source.rows.num_tasks
        grad = tensor.new_zeros(tasks * plan.batch, plan.heads, plan.channels, dtype=plan.compute)
        self.arguments.grad_vector = grad.data_ptr()
        maker, axis = self.inputs.edge_projection, -1
        if self.inputs.edge_type is not None:
            maker, axis = self.inputs.edge, 0
        if maker is None or not plan.record_bytes:
            return lambda: grad.sum(0).to(tensor.dtype)
        _ = self.parts  # with a record, the edges' part follows from these
        return lambda: grad.sum(0).to(tensor.dtype).add_((self.of_made * maker).sum(axis))

    def of_sink(self, name: str, tensor: Tensor) -> Callable[[], Tensor]:
        """Of the sink."""
        terms = self.terms[: self.num_node_terms].view(self.plan.batch, self.layout.num_targets, 4, self.plan.heads)
        maximum, scale, delta, _ = terms.unbind(2)
        return lambda: -((tensor - maximum).exp() * scale * delta).sum((0, 1))

    def of_out_bias(self, name: str, tensor: Tensor) -> Callable[[], Tensor]:
        """Of the bias of the output, without kernels."""
        return lambda: self.grad_out.flatten(0, -3).sum(0, dtype=self.plan.compute)


#: The kinds of gradients, by an input's name or else its first axis.
_GRADIENTS: dict[str, Callable[[_Backward, str, Tensor], Tensor | Callable[[], Tensor]]] = {
    "N": _Backward.of_nodes,
    "M": _Backward.of_nodes,
    "E": _Backward.of_edges,
    "R": _Backward.of_maker,
    "edge_projection": _Backward.of_maker,
    "vector": _Backward.of_vector,
    "sink": _Backward.of_sink,
    "out_bias": _Backward.of_out_bias,
}


def _backward(
    inputs: Inputs,
    grad_out: Tensor,
    grad_weights: Tensor | None,
    out: Tensor,
    weights: Tensor | None,
    kept: Sequence[Tensor],
    wanted: Sequence[str],
    grad_log_sum: Tensor | None = None,
) -> list[Tensor]:
    call = _Backward(inputs, grad_out)
    arguments, layout, plan, by_source = call.arguments, call.layout, call.plan, call.layout.by_source
    if inputs.plan is None:  # the caller may pass anything
        given = [(grad_out, call.out_shape, plan.dtype), (out, call.out_shape, plan.dtype)]
        expected = [(each.shape(layout.num_targets, layout.most_edges), each.dtype) for each in plan.kept]
        given += [(tensor, *of) for tensor, of in zip(kept, expected, strict=False)]
        if grad_weights is not None and weights is not None:
            edges = (*plan.front, layout.num_edges, plan.heads)
            given += [(grad_weights, edges, plan.compute), (weights, edges, plan.compute)]
        is_as_kept = all(tensor.shape == size and tensor.dtype == dtype for tensor, size, dtype in given)
        if len(kept) != len(plan.kept) or not is_as_kept:
            raise ValueError("the graph or an input has changed between the forward and the backward pass.")
    arguments.by_source = by_source.rows
    arguments.target_position = by_source.target_position
    arguments.source_position = by_source.source_position
    arguments.grad_out = call.hold(grad_out)
    if grad_weights is not None and weights is not None:
        arguments.grad_weights, arguments.weights = call.hold(grad_weights), call.hold(weights)
    if grad_log_sum is not None:
        arguments.grad_log_sum = call.hold(grad_log_sum)
    arguments.out = call.hold(out)
    for each, tensor in zip(plan.kept, kept, strict=True):
        setattr(arguments, each.name, tensor.data_ptr() if tensor.is_contiguous() else call.hold(tensor))
    arguments.record_bytes = plan.record_bytes
    arguments.node_terms = call.terms.data_ptr()
    width = plan.heads * max(plan.channels, plan.value_channels, 1)
    slots = max(by_source.rows.num_slots, layout.by_target.rows.num_slots)
    if slots:
        arguments.partial = call.hold(empty((plan.batch * slots * 2 * width,), plan.compute))
    kinds = [_GRADIENTS.get(name) or _GRADIENTS[plan.axes[name]] for name in wanted]
    gradients = [of(call, name, getattr(inputs, name)) for of, name in zip(kinds, wanted, strict=True)]
    if "query" in wanted or "vector" in wanted:
        arguments.target_pass = 1
        arguments.edge_terms = call.terms.data_ptr() + call.num_node_terms * call.terms.element_size()
    native.raise_for(native.library().gattn_backward(ctypes.byref(arguments)))
    return [gradient if isinstance(gradient, Tensor) else gradient() for gradient in gradients]


def _log_sum(stats: Tensor) -> Tensor:
    """The log-sum-exp of each row, `[B, N, H]`, given `stats`; minus infinity if it has no edges."""
    most, scale = stats.unbind(2)
    return (most - scale.log()).masked_fill_(scale == 0.0, -torch.inf)


Cpu.operator = AttentionOperator("attention", ("CPU",), _forward, _backward, kept_by_forward, _log_sum)
