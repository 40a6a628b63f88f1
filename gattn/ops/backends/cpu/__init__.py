"""Fused attention on the CPU: the C++ kernels in csrc/ as PyTorch operators."""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gattn.distributions import LAWS, Law
from gattn.edges import Typed
from gattn.graphs.edge_lists import check_types
from gattn.ops.backends.base import Missing, needs_plain_pytorch
from gattn.ops.backends.cpu import native
from gattn.ops.backends.cpu.layout import Layout, layout_of
from gattn.ops.backends.kernels import DTYPES, KernelBackend, dense_rows, flat
from gattn.ops.call import Call, compute_dtype
from gattn.ops.dropout import drop as plain_drop
from gattn.ops.operator import AttentionOperator, Differentiated, Inputs, library
from gattn.scores import Family, Score, family_of
from gattn.torch_private import is_batched

__all__ = ["Cpu", "can_drop", "drop"]

# Below this many channels to read, threads cost more than they gain.
_SERIAL_WORK = 1 << 16
_HUGE_BYTES = 1 << 22
# Each task, of some thousand edges, sums the gradients of all types. With more types than this, a vector per edge takes
# less memory.
_MOST_TYPES = 512

_load_error = native.load_error()  # read once, because compiled code cannot
_families = frozenset() if _load_error else frozenset(filter(native.knows_family, Score.known_families()))
# Without kernels, the error is that they are missing, not that they do not know a distribution.
_laws = frozenset(name for name in LAWS if _load_error or native.distribution(name) >= 0)

library.define("drop(Tensor x, float p, Tensor seed) -> Tensor")


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
        if isinstance(edge, Typed) and not 0 <= edge.table.size(0) <= min(_MOST_TYPES, edge.types.size(0)):
            return False
        if call.edge_value is not None:
            return not isinstance(edge, tuple) and not isinstance(call.edge_value, tuple)
        return not call.edge_is_value or not isinstance(edge, tuple) or (family is not None and family.vector is None)

    def missing(self) -> Missing | None:
        """See `Backend.missing`."""
        return None if _load_error is None else Missing("gattn's CPU kernels", _load_error)


class _Plan:
    """Everything that follows from sizes, strides and types: that inputs fit, and the arguments except addresses.

    A layout keeps its plans, so a call like an earlier one is not checked again.
    """

    def __init__(self, inputs: Inputs, layout: Layout, threads: int):
        inputs.check(layout.num_edges)
        values = inputs.values
        self.front, self.heads = inputs.front, inputs.heads
        self.batch = math.prod(self.front)
        self.channels = inputs.key.size(-1)
        key_heads, self.value_channels = values.shape[-2:]
        self.dtype, self.compute = values.dtype, compute_dtype(values.dtype)
        family, names = native.family(inputs.family)
        assert len(names) == len(inputs.constants)
        work = layout.num_edges * self.batch * self.heads * (self.value_channels + self.channels)
        #: The names of the tensors that the kernels need as copies.
        self.copied: set[str] = set()
        #: The kernels' arguments, except addresses, constants and dropout.
        self.arguments = arguments = native.Arguments(
            targets=inputs.num_targets,
            sources=inputs.num_sources,
            edges=layout.num_edges,
            heads=self.heads,
            key_heads=key_heads,
            channels=self.channels,
            value_channels=self.value_channels,
            batch=self.batch,
            family=family,
            distribution=native.distribution(inputs.distribution),
            type=DTYPES.index(self.dtype),
            threads=threads if work > _SERIAL_WORK else 1,
            by_target=layout.by_target.rows,
            edge_of_target_position=None if layout.edge is None else layout.edge.data_ptr(),
            value_is_key=inputs.value is None,
        )
        for name in ("query", "key", "value"):
            if (tensor := getattr(inputs, name)) is not None:
                rows = self._readable(name, tensor, dense_rows(tensor, 2))
                setattr(arguments, f"{name}_row", rows.stride(1))
                setattr(arguments, f"{name}_batch", rows.stride(0))
        projection = inputs.edge_projection
        if projection is not None:
            assert inputs.edge is not None
            arguments.edge_channels = inputs.edge.size(-1)
            self._readable("edge", inputs.edge, inputs.edge.contiguous())
        if inputs.edge_type is not None:
            assert inputs.edge is not None
            arguments.edge_channels = inputs.edge.size(0)
            self._readable("edge", inputs.edge, inputs.edge.contiguous())
            self._readable("edge_type", inputs.edge_type, inputs.edge_type.contiguous())
        for name, inner in (("edge", 2), ("bias", 1), ("edge_value", 2)):
            if (tensor := getattr(inputs, name)) is not None and (name != "edge" or not arguments.edge_channels):
                rows = self._readable(name, tensor, flat(tensor, inner).contiguous())
                setattr(arguments, f"{name}_batch", 0 if rows.size(0) == 1 else rows.stride(0))
        if inputs.edge_is_value:
            arguments.edge_value_batch = arguments.edge_batch
        for name in ("vector", "sink", "out_bias"):
            if (tensor := getattr(inputs, name)) is not None:
                self._readable(name, tensor, tensor.contiguous())
        if inputs.mask is not None:
            mask = self._readable("mask", inputs.mask, flat(inputs.mask, 1))
            arguments.mask_batch, arguments.mask_edge, arguments.mask_head = (
                stride if size > 1 else 0 for stride, size in zip(mask.stride(), mask.shape, strict=True)
            )
        self.record_bytes = _record_bytes(inputs)
        self.kept = _kept(inputs, True)
        self.names = [name for name in _READ if getattr(inputs, name) is not None]

    def _readable(self, name: str, tensor: Tensor, rows: Tensor) -> Tensor:
        """Notes whether the kernels read a copy, `rows`, of a tensor, which is then a copy of the whole tensor."""
        if rows.data_ptr() == tensor.data_ptr():
            return rows
        self.copied.add(name)
        return rows


#: The inputs whose memory the kernels read.
_READ = ("query", "key", "value", "vector", "edge", "edge_type", "bias", "mask", "edge_value", "sink", "out_bias")
_PLANNED = operator.itemgetter(*(Inputs._fields.index(name) for name in (*_READ, "edge_projection")))
_MOST_PLANS = 16


class _Arguments:
    """What forward and backward pass share: a plan, and those of the kernels' arguments that are inputs.

    Tensors whose addresses are passed are kept alive here until the kernel is done.
    """

    def __init__(self, inputs: Inputs):
        edges = inputs.edge_index, inputs.num_sources, inputs.num_targets, inputs.self_loops, inputs.flow
        self.layout = layout = layout_of(*edges, traced=inputs.traced)
        threads = torch.get_num_threads()
        key = (
            inputs.family,
            len(inputs.constants),
            inputs.distribution,
            len(inputs.distribution_constants),
            inputs.edge_is_value,
            threads,
            *[None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in _PLANNED(inputs)],
        )
        plan = layout.plans.get(key)
        if plan is None:
            plan = _Plan(inputs, layout, threads)
            if len(layout.plans) >= _MOST_PLANS:
                layout.plans.clear()
            layout.plans[key] = plan
        self.plan: _Plan = plan
        if inputs.edge_type is not None and inputs.edge is not None:
            check_types(inputs.edge_type, inputs.edge.size(0))
        self.held: list[Tensor] = []
        self.arguments = arguments = native.Arguments.from_buffer_copy(plan.arguments)
        for name in plan.names:
            tensor = getattr(inputs, name)
            setattr(arguments, name, self.hold(tensor.contiguous() if name in plan.copied else tensor))
        if inputs.edge_projection is not None:
            rows = inputs.edge_projection.contiguous().flatten(0, 1)
            arguments.edge_projection_rows, arguments.edge_projection = (
                self.hold(rows),
                self.hold(rows.t().contiguous()),
            )
        if inputs.edge_is_value:
            arguments.edge_value = arguments.edge
        arguments.constants[: len(inputs.constants)] = inputs.constants
        if any(inputs.distribution_constants):
            arguments.distribution_constants[: len(inputs.distribution_constants)] = inputs.distribution_constants
        if inputs.seed is not None:
            arguments.dropout = 1
            dropout = _dropout_arguments(inputs.dropout, inputs.seed)
            arguments.seed, arguments.threshold, arguments.keep_scale = dropout

    def hold(self, tensor: Tensor) -> int:
        """The address of a tensor, which is kept alive until the kernel is done."""
        self.held.append(tensor)
        return tensor.data_ptr()

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Uninitialised memory, without the cost of touching its pages for the first time."""
        tensor = torch.empty(shape, dtype=self.plan.compute if dtype is None else dtype, device="cpu")
        if tensor.nbytes >= _HUGE_BYTES:
            native.library().gattn_use_huge_pages(tensor.data_ptr(), tensor.nbytes)
        return tensor

    def scratch(self, *shape: int) -> int | None:
        """The address of memory that is only needed until the kernel is done."""
        return self.hold(self.empty(*shape)) if all(shape) else None


def _dropout_arguments(p: float, seed: Tensor) -> tuple[int, int, float]:
    """Seed, threshold and scale in the form that the kernels take; with p = 1, a scale of zero drops everything."""
    return int(seed), min(int(p * 2**32), 2**32 - 1), 1 / (1 - p) if p < 1 else 0.0


def _drop(x: Tensor, p: float, seed: Tensor) -> Tensor:
    x = x.contiguous()
    result = torch.empty_like(x)
    seed_value, threshold, scale = _dropout_arguments(p, seed)
    threads = torch.get_num_threads() if x.numel() > _SERIAL_WORK else 1
    addresses = x.data_ptr(), result.data_ptr()
    kind = DTYPES.index(x.dtype)
    native.library().gattn_drop(*addresses, x.numel(), kind, seed_value, threshold, scale, threads)
    return result


def _kept(inputs: Inputs, keep: bool) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Statistics of the softmax, a record of the logits, and the output before it was rounded."""
    compute, batch = compute_dtype(inputs.values.dtype), math.prod(inputs.front)
    kept: list[tuple[tuple[int, ...], torch.dtype]] = [((batch, inputs.num_targets, 2, inputs.heads), compute)]
    if keep:
        kept.append(((batch * inputs.most_edges * _record_bytes(inputs),), torch.uint8))
        if inputs.values.dtype != compute:  # an output in half precision is too coarse for the backward pass
            kept.append((inputs.out_shape, compute))
    return kept


def _record_bytes(inputs: Inputs) -> int:
    """The number of bytes per edge that the forward pass keeps for the backward pass."""
    (family, _), dtype = native.family(inputs.family), DTYPES.index(inputs.key.dtype)
    channels, made = inputs.key.size(-1), (inputs.edge_projection, inputs.edge_type)
    has_edge = inputs.edge is not None and made == (None, None)
    num_bytes: int = native.library().gattn_record_bytes(family, dtype, inputs.heads, channels, has_edge)
    return num_bytes


def _forward(inputs: Inputs, keep: bool, with_weights: bool) -> list[Tensor]:
    call = _Arguments(inputs)
    arguments, layout, plan = call.arguments, call.layout, call.plan
    out = call.empty(*inputs.out_shape, dtype=plan.dtype)
    weights = call.empty(*plan.front, layout.num_edges if with_weights else 0, plan.heads)
    kept = [call.empty(*shape, dtype=dtype) for shape, dtype in (plan.kept if keep else plan.kept[:1])]
    arguments.out = out.data_ptr()
    arguments.weights = weights.data_ptr() if with_weights else None
    _hand_over(arguments, kept)
    arguments.record_bytes = plan.record_bytes if keep else 0
    arguments.partial = call.scratch(
        plan.batch * layout.by_target.num_slots, 2 * plan.heads + plan.heads * plan.value_channels
    )
    native.raise_for(native.library().gattn_forward(ctypes.byref(arguments)))
    return [out, weights, *kept]


def _hand_over(arguments: native.Arguments, kept: Sequence[Tensor]) -> None:
    for name, tensor in zip(("stats", "record", "out_wide"), kept, strict=False):
        setattr(arguments, name, tensor.data_ptr())


def _backward(
    inputs: Inputs,
    grad_out: Tensor,
    grad_weights: Tensor | None,
    out: Tensor,
    weights: Tensor,
    kept: Sequence[Tensor],
    wanted: Sequence[str],
) -> list[Tensor]:
    call = _Arguments(inputs)
    arguments, layout, plan, by_source = call.arguments, call.layout, call.plan, call.layout.by_source
    given = [(grad_out, inputs.out_shape, plan.dtype), (out, inputs.out_shape, plan.dtype)]
    given += [(tensor, *expected) for tensor, expected in zip(kept, plan.kept, strict=False)]
    if grad_weights is not None:
        edges = (*plan.front, layout.num_edges, plan.heads)
        given += [(grad_weights, edges, plan.compute), (weights, edges, plan.compute)]
    if len(kept) != len(plan.kept) or any(
        tensor.shape != size or tensor.dtype != dtype for tensor, size, dtype in given
    ):
        raise ValueError("the graph or an input has changed between the forward and the backward pass.")
    arguments.by_source = by_source.rows
    arguments.target_position = by_source.target_position.data_ptr()
    arguments.source_position = by_source.source_position.data_ptr()
    arguments.grad_out = call.hold(grad_out.contiguous())
    if grad_weights is not None:
        arguments.grad_weights = call.hold(grad_weights.contiguous())
    arguments.out, arguments.weights = out.data_ptr(), weights.data_ptr()
    _hand_over(arguments, kept)
    arguments.record_bytes = plan.record_bytes
    node_terms = call.empty(plan.batch, layout.num_targets, 4, plan.heads)
    arguments.node_terms = call.hold(node_terms)
    width = plan.heads * max(plan.channels, plan.value_channels)
    slots = max(by_source.num_slots, layout.by_target.num_slots)
    arguments.partial = call.scratch(plan.batch * slots, 2 * width)

    projection, grads = inputs.edge_projection, dict[str, Tensor]()
    # With a record, the edges' part of the vector's gradient follows from that of their projection.
    if projection is not None and ("edge_projection" in wanted or ("vector" in wanted and plan.record_bytes)):
        sums = call.empty(by_source.num_tasks * plan.batch, projection.size(-1), plan.heads * plan.channels)
        grads["edge_projection"] = sums
        arguments.grad_edge_projection = sums.data_ptr()
    table = None if inputs.edge_type is None else inputs.edge
    if table is not None and ("edge" in wanted or ("vector" in wanted and plan.record_bytes)):
        grads["edge"] = call.empty(by_source.num_tasks * plan.batch, *table.shape)
        arguments.grad_edge_projection = grads["edge"].data_ptr()
    for name in wanted:
        tensor: Tensor = getattr(inputs, name)
        if name in ("edge_projection", "sink", "out_bias") or (name == "edge" and table is not None):
            continue
        if name == "vector":  # each task has its own sum
            tasks = layout.by_target.num_tasks + by_source.num_tasks
            grads[name] = tensor.new_zeros(tasks * plan.batch, plan.heads, plan.channels, dtype=plan.compute)
        elif name in _PER_EDGE:  # an input that a batch shares gets one gradient per element first
            grads[name] = call.empty(plan.batch, *tensor.shape[-_edge_dims(inputs, name) :], dtype=tensor.dtype)
        else:
            grads[name] = call.empty(*tensor.shape, dtype=tensor.dtype)
        setattr(arguments, f"grad_{name}", grads[name].data_ptr())
    if inputs.edge_is_value and "edge" in wanted and table is None:
        arguments.grad_edge_value = arguments.grad_edge
    if "query" in wanted or "vector" in wanted:
        arguments.target_pass = 1
        arguments.edge_terms = call.scratch(plan.batch, layout.num_edges, plan.heads)
    native.raise_for(native.library().gattn_backward(ctypes.byref(arguments)))
    vector = inputs.vector
    if projection is not None and "edge_projection" in grads:
        grads["edge_projection"] = grads["edge_projection"].sum(0).t().reshape(projection.shape).contiguous()
    if table is not None and "edge" in grads:
        grads["edge"] = grads["edge"].sum(0)
    for name in wanted:
        tensor = getattr(inputs, name)
        if name == "sink":
            maximum, scale, delta, _ = node_terms.unbind(2)
            grads[name] = -((tensor - maximum).exp() * scale * delta).sum((0, 1))
        elif name == "out_bias":
            grads[name] = grad_out.flatten(0, -3).sum(0, dtype=plan.compute)
        elif name == "vector":
            grads[name] = grads[name].sum(0).to(tensor.dtype)
            if projection is not None and plan.record_bytes:
                grads[name] += (grads["edge_projection"] * projection).sum(-1)
            if table is not None and plan.record_bytes:
                grads[name] += (grads["edge"] * table).sum(0)
        elif name in _PER_EDGE and not (name == "edge" and table is not None):
            grads[name] = grads[name].view(*plan.front, *grads[name].shape[1:]).sum_to_size(tensor.shape)
    if vector is not None and "edge_projection" in grads:
        grads["edge_projection"] = grads["edge_projection"] * vector.unsqueeze(-1)
    if table is not None and "edge" in grads:
        grads["edge"] = (grads["edge"] if vector is None else grads["edge"] * vector).to(table.dtype)
    return [grads[name] for name in wanted]


#: Inputs with one entry per edge, and how many dimensions they have without those of the batch.
_PER_EDGE = {"edge": 3, "bias": 2, "edge_value": 3}


def _edge_dims(inputs: Inputs, name: str) -> int:
    return 2 if name == "edge" and inputs.edge_projection is not None else _PER_EDGE[name]


Cpu.operator = AttentionOperator("attention", ("CPU",), _forward, _backward, _kept)


def can_drop(x: Tensor) -> bool:
    """Whether `drop` can be called on a tensor now."""
    if torch.compiler.is_exporting() or needs_plain_pytorch() is not None:
        return False
    return x.device.type == "cpu" and x.dtype in DTYPES and _load_error is None


def drop(x: Tensor, p: float, seed: Tensor) -> Tensor:
    """Zeroes each element of `x` with probability `p`, as `seed` decides, and scales the others by `1 / (1 - p)`."""
    return _drop_operator(x, p, seed)


def _save_drop(ctx: Any, inputs: tuple[Tensor, float, Tensor], output: Tensor) -> None:
    _, ctx.p, seed = inputs
    ctx.save_for_backward(seed)


def _differentiate_drop(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    dropped = (plain_drop if is_batched(grad) else drop)(grad, ctx.p, *ctx.saved_tensors)
    return dropped, None, None


library.impl("drop", _drop, "CPU")
torch.library.register_fake("gattn::drop", lambda x, p, seed: torch.empty_like(x).contiguous(), lib=library)
_drop_operator = Differentiated("drop", _drop, _save_drop, _differentiate_drop)
