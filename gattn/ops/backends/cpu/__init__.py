"""Fused attention on the CPU: the C++ kernels in csrc/ as PyTorch operators."""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gattn.distributions import LAWS, Law
from gattn.edges import Projected, Typed
from gattn.graphs.edge_lists import check_types
from gattn.ops.backends.base import Missing
from gattn.ops.backends.cpu import native
from gattn.ops.backends.cpu.dropping import dropout_arguments
from gattn.ops.backends.cpu.layout import Layout, layout_of
from gattn.ops.backends.kernels import DTYPES, KernelBackend, dense_rows, flat
from gattn.ops.call import Call, compute_dtype
from gattn.ops.operator import AttentionOperator
from gattn.ops.terms import PLACES, TERMS, Inputs
from gattn.scores import Family, Score, family_of
from gattn.torch_private import resolved

__all__ = ["Cpu"]

# Below this many channels to read, threads cost more than they gain.
_SERIAL_WORK = 1 << 16
_HUGE_BYTES = 1 << 22
_CPU = torch.device("cpu")
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

    def prepared(self, inputs: Inputs) -> _Plan:
        """See `KernelBackend.prepared`."""
        return _Plan(inputs, _layout(inputs).num_edges)

    def on_graph(self, prepared: _Plan, edges: tuple[Tensor, int, int, bool, str]) -> tuple[tuple[_Plan, Layout], int]:
        """See `KernelBackend.on_graph`."""
        layout = layout_of(*edges)
        return (prepared, layout), layout.num_edges


class _Plan:
    """Everything that follows from types, strides, heads and channels: the arguments except addresses, nodes and edges.

    It is kept, so inputs like earlier ones are not checked again.
    """

    def __init__(self, inputs: Inputs, num_edges: int):
        inputs.check(num_edges)
        values = inputs.values
        self.front, self.heads = inputs.front, inputs.heads
        self.batch = math.prod(self.front)
        self.channels = inputs.key.size(-1)
        key_heads, self.value_channels = values.shape[-2:]
        self.dtype, self.compute = values.dtype, compute_dtype(values.dtype)
        family, names = native.family(inputs.family)
        assert len(names) == len(inputs.constants)
        #: The work of one edge.
        self.work = self.batch * self.heads * (self.value_channels + self.channels)
        #: The kernels' arguments, except addresses, sizes of the graph and dropout.
        self.arguments = arguments = native.Arguments(
            heads=self.heads,
            key_heads=key_heads,
            channels=self.channels,
            value_channels=self.value_channels,
            batch=self.batch,
            family=family,
            distribution=native.distribution(inputs.distribution),
            type=DTYPES.index(self.dtype),
            value_is_key=inputs.value is None,
            threads=1,
        )
        if inputs.edge is not None and (inputs.edge_projection is not None or inputs.edge_type is not None):
            arguments.edge_channels = inputs.edge.size(0 if inputs.edge_projection is None else -1)
        #: The tensors that the kernels read, except for a projection: names, places, and whether they need copies.
        self.read: list[tuple[str, int, bool]] = []
        #: How the gradient of each input is computed.
        self.gradients: dict[str, _Gradient] = {}
        for name, tensor, term in inputs.terms():
            if term.differentiable:
                self.gradients[name] = _GRADIENTS.get(name) or _GRADIENTS[term.letters[0]]
            if term.read not in _STRIDES:
                continue
            rows = (dense_rows if term.read == "rows" else flat)(tensor, len(term.letters) - 1)
            if term.read in ("edges", "whole"):
                rows = rows.contiguous()
            # The stride between rows counts even if there is only one row now: plans are for any number of rows.
            strides = [stride if size > 1 else 0 for size, stride in zip(rows.shape, rows.stride(), strict=True)]
            strides[1] = math.prod(rows.shape[2:]) if rows.is_contiguous() else rows.stride(1)
            for of, stride in zip(_STRIDES[term.read].split(), strides, strict=False):
                setattr(arguments, f"{name}_{of}", stride)
            self.read.append((name, PLACES[name], rows.data_ptr() != tensor.data_ptr()))
        if inputs.edge_is_value:
            arguments.edge_value_batch = arguments.edge_batch
        arguments.constants[: len(inputs.constants)] = inputs.constants
        arguments.distribution_constants[: len(inputs.distribution_constants)] = inputs.distribution_constants
        self.record_bytes = _record_bytes(inputs)
        self.kept = _kept_by(inputs)
        #: What the forward pass needs itself.
        needed = ("stats", "logits") if native.is_of_rows(inputs.distribution) else ("stats",)
        self.needed = [each for each in self.kept if each.name in needed]


#: The strides that the kernels are told, by how they read a tensor.
_STRIDES: dict[str | None, str] = {"rows": "batch row", "edges": "batch", "strides": "batch edge head", "whole": ""}
_PLANNED = operator.itemgetter(*(PLACES[name] for name, term in TERMS.items() if term.read))
_MOST_PLANS = 256
_plans: dict[Hashable, _Plan] = {}


def _plan_for(inputs: Inputs, layout: Layout) -> _Plan:
    """The plan of inputs, made if there is none for such inputs."""
    key = (
        inputs.family,
        *inputs.constants,
        inputs.distribution,
        *inputs.distribution_constants,
        inputs.edge_is_value,
        inputs.num_targets,
        layout.num_edges,
        *[None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in _PLANNED(inputs)],
    )
    plan = _plans.get(key)
    if plan is None:
        plan = _Plan(inputs, layout.num_edges)
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        _plans[key] = plan
    return plan


class _Arguments:
    """What forward and backward pass share: a plan on a graph, and those of the kernels' arguments that are inputs.

    Tensors whose addresses are passed are kept alive here until the kernel is done.
    """

    def __init__(self, inputs: Inputs):
        if inputs.plan is None:
            layout = _layout(inputs)
            plan = _plan_for(inputs, layout)
        else:
            plan, layout = inputs.plan
        self.plan: _Plan = plan
        self.layout: Layout = layout
        self.out_shape = (*plan.front, layout.num_targets, plan.heads, plan.value_channels)
        if inputs.edge_type is not None and inputs.edge is not None:
            check_types(inputs.edge_type, inputs.edge.size(0))
        self.arguments = arguments = native.Arguments.from_buffer_copy(plan.arguments)
        arguments.targets, arguments.sources = layout.num_targets, layout.num_sources
        arguments.edges = num_edges = layout.num_edges
        if num_edges * plan.work > _SERIAL_WORK:
            arguments.threads = torch.get_num_threads()
        arguments.by_target = layout.by_target.rows
        if layout.edge is not None:
            arguments.edge_of_target_position = layout.edge.data_ptr()
        self.held: list[Tensor] = []
        for name, place, is_copied in plan.read:
            tensor: Any = inputs[place]
            setattr(arguments, name, self.hold(tensor) if is_copied else tensor.data_ptr())
        if inputs.edge_projection is not None:
            rows = native.readable(inputs.edge_projection).flatten(0, 1)
            arguments.edge_projection_rows = self.hold(rows)
            arguments.edge_projection = self.hold(rows.t())
        if inputs.edge_is_value:
            arguments.edge_value = arguments.edge
        if inputs.seed is not None:
            arguments.dropout = 1
            dropout = dropout_arguments(inputs.dropout, inputs.seed)
            arguments.seed, arguments.threshold, arguments.keep_scale = dropout

    def hold(self, tensor: Tensor) -> int:
        """The address of a tensor to be read, which is kept alive until the kernel is done."""
        if tensor.is_neg() or tensor._is_zerotensor():  # native.readable(), without its calls
            tensor = resolved(tensor)
        tensor = tensor.contiguous()
        self.held.append(tensor)
        return tensor.data_ptr()


def _layout(inputs: Inputs) -> Layout:
    edges = inputs.edge_index, inputs.num_sources, inputs.num_targets, inputs.self_loops, inputs.flow
    return layout_of(*edges, traced=inputs.traced)


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uninitialised memory."""
    tensor = torch.empty(shape, dtype=dtype, device=_CPU)
    if tensor.nbytes >= _HUGE_BYTES:
        _use_huge_pages(tensor)
    return tensor


def _use_huge_pages(tensor: Tensor) -> None:
    """Spares most of the cost of touching a tensor's pages for the first time."""
    native.library().gattn_use_huge_pages(tensor.data_ptr(), tensor.nbytes)


class _Kept(NamedTuple):
    """A tensor that the forward pass keeps for the backward pass, on any graph."""

    name: str
    front: tuple[int, ...]
    of_edges: bool
    """Whether its rows are edges rather than targets"""
    back: tuple[int, ...]
    dtype: torch.dtype

    def shape(self, num_targets: int, most_edges: int) -> tuple[int, ...]:
        """Its shape on a graph with so many targets and, at most, edges."""
        return *self.front, most_edges if self.of_edges else num_targets, *self.back


def _kept_by(inputs: Inputs) -> list[_Kept]:
    """Statistics of the softmax, a record of the logits, or these rewritten, and the output before it was rounded."""
    front, heads, dtype, batch = inputs.front, inputs.heads, inputs.values.dtype, (math.prod(inputs.front),)
    compute, record_bytes = compute_dtype(dtype), _record_bytes(inputs)
    kept = [_Kept("stats", batch, False, (2, heads), compute)]
    if record_bytes:
        kept.append(_Kept("record", batch, True, (record_bytes,), torch.uint8))
    if native.keeps_logits(native.family(inputs.family)[0], inputs.distribution):
        kept.append(_Kept("logits", batch, True, (heads,), compute))
    if dtype != compute:  # an output in half precision is too coarse for the backward pass
        kept.append(_Kept("out_wide", front, False, (heads, inputs.values.size(-1)), compute))
    return kept


def _kept(inputs: Inputs, keep: bool) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """The shapes and types of what `_forward` returns after output and weights."""
    kept = _kept_by(inputs)
    return [(each.shape(inputs.num_targets, inputs.most_edges), each.dtype) for each in (kept if keep else kept[:1])]


def _record_bytes(inputs: Inputs) -> int:
    """The number of bytes per edge that the forward pass records for the backward pass."""
    (family, _), dtype = native.family(inputs.family), DTYPES.index(inputs.key.dtype)
    channels, made = inputs.key.size(-1), (inputs.edge_projection, inputs.edge_type)
    has_edge = inputs.edge is not None and made == (None, None)
    num_bytes: int = native.library().gattn_record_bytes(family, dtype, inputs.heads, channels, has_edge)
    return num_bytes


def _forward(inputs: Inputs, keep: bool, with_weights: bool) -> list[Any]:
    call = _Arguments(inputs)
    arguments, layout, plan = call.arguments, call.layout, call.plan
    out = _empty(call.out_shape, plan.dtype)
    arguments.out = out.data_ptr()
    weights = None
    if with_weights:
        weights = _empty((*plan.front, layout.num_edges, plan.heads), plan.compute)
        arguments.weights = weights.data_ptr()
    kept = []
    for each in plan.kept if keep else plan.needed:
        tensor = _empty(each.shape(layout.num_targets, layout.most_edges), each.dtype)
        setattr(arguments, each.name, tensor.data_ptr())
        kept.append(tensor)
    if keep:
        arguments.record_bytes = plan.record_bytes
    if layout.by_target.num_slots:
        state = (2 + plan.value_channels) * plan.heads
        arguments.partial = call.hold(_empty((plan.batch * layout.by_target.num_slots * state,), plan.compute))
    native.raise_for(native.library().gattn_forward(ctypes.byref(arguments)))
    return [out, weights, *(kept if keep else kept[:1])]


class _Backward(_Arguments):
    """The arguments of a backward pass, with a method for each kind of gradient.

    It gives the kernels memory, and returns that of the gradient, or a function that computes it from what they write.
    """

    def __init__(self, inputs: Inputs, grad_out: Tensor):
        super().__init__(inputs)
        self.inputs, self.grad_out = inputs, grad_out
        plan, layout = self.plan, self.layout
        self.num_node_terms = 4 * plan.batch * layout.num_targets * plan.heads
        self.terms = _empty((self.num_node_terms + plan.batch * layout.num_edges * plan.heads,), plan.compute)

    def of_nodes(self, name: str, tensor: Tensor) -> Tensor:
        """Of query, key or value."""
        grad = torch.empty_like(tensor, memory_format=torch.contiguous_format)  # at half the cost of empty()
        if grad.nbytes >= _HUGE_BYTES:
            _use_huge_pages(grad)
        setattr(self.arguments, f"grad_{name}", grad.data_ptr())
        return grad

    def of_edges(self, name: str, tensor: Tensor) -> Callable[[], Tensor]:
        """Of an input with one entry per edge, which gets one gradient per element of a batch first."""
        inner = 2 if name == "edge" and self.inputs.edge_projection is not None else len(TERMS[name].letters)
        grad = _empty((self.plan.batch, *tensor.shape[-inner:]), tensor.dtype)
        setattr(self.arguments, f"grad_{name}", grad.data_ptr())
        if name == "edge" and self.inputs.edge_is_value:
            self.arguments.grad_edge_value = grad.data_ptr()
        return lambda: grad.view(*self.plan.front, *grad.shape[1:]).sum_to_size(tensor.shape)

    @cached_property
    def parts(self) -> Tensor:
        """The gradient of a projection or of a table of types, without the vector: a part from each task."""
        plan, tasks = self.plan, self.layout.by_source.num_tasks
        parts = _empty((tasks * plan.batch, plan.arguments.edge_channels, plan.heads, plan.channels), plan.compute)
        self.arguments.grad_edge_projection = parts.data_ptr()
        return parts

    @cached_property
    def of_made(self) -> Tensor:
        """The sum of these parts: `[H, C, D]` or `[R, H, C]`."""
        total = self.parts.sum(0)
        return total if self.inputs.edge_projection is None else total.permute(1, 2, 0).contiguous()

    def of_maker(self, name: str, tensor: Tensor) -> Callable[[], Tensor]:
        """Of a projection or of a table of types."""
        _, vector, axis = self.parts, self.inputs.vector, 0 if name == "edge" else -1
        return lambda: (self.of_made if vector is None else self.of_made * vector.unsqueeze(axis)).to(tensor.dtype)

    def of_vector(self, name: str, tensor: Tensor) -> Callable[[], Tensor]:
        """Of the vector, for which each task has its own sum."""
        plan, tasks = self.plan, self.layout.by_target.num_tasks + self.layout.by_source.num_tasks
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


_Gradient = Callable[[_Backward, str, Tensor], Tensor | Callable[[], Tensor]]

#: The kinds of gradients, by an input's name or else its first axis.
_GRADIENTS: dict[str, _Gradient] = {
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
    arguments.target_position = by_source.target_position.data_ptr()
    arguments.source_position = by_source.source_position.data_ptr()
    arguments.grad_out = call.hold(grad_out)
    if grad_weights is not None and weights is not None:
        arguments.grad_weights, arguments.weights = call.hold(grad_weights), call.hold(weights)
    if grad_log_sum is not None:
        arguments.grad_log_sum = call.hold(grad_log_sum)
    arguments.out = call.hold(out)
    for each, tensor in zip(plan.kept, kept, strict=True):
        setattr(arguments, each.name, call.hold(tensor))
    arguments.record_bytes = plan.record_bytes
    arguments.node_terms = call.terms.data_ptr()
    width = plan.heads * max(plan.channels, plan.value_channels, 1)
    slots = max(by_source.num_slots, layout.by_target.num_slots)
    if slots:
        arguments.partial = call.hold(_empty((plan.batch * slots * 2 * width,), plan.compute))
    gradients = [plan.gradients[name](call, name, getattr(inputs, name)) for name in wanted]
    if "query" in wanted or "vector" in wanted:
        arguments.target_pass = 1
        arguments.edge_terms = call.terms.data_ptr() + call.num_node_terms * call.terms.element_size()
    native.raise_for(native.library().gattn_backward(ctypes.byref(arguments)))
    return [gradient if isinstance(gradient, Tensor) else gradient() for gradient in gradients]


def _log_sum(stats: Tensor) -> Tensor:
    """The log-sum-exp of each row, `[B, N, H]`, given `stats`; minus infinity if it has no edges."""
    most, scale = stats.unbind(2)
    return (most - scale.log()).masked_fill_(scale == 0.0, -torch.inf)


Cpu.operator = AttentionOperator("attention", ("CPU",), _forward, _backward, _kept, _log_sum)
