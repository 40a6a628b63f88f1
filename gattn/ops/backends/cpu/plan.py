"""The kernels' arguments, and what is kept of them for calls like earlier ones."""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gattn.graphs.edge_lists import check_types
from gattn.ops.backends.cpu import native
from gattn.ops.backends.cpu.dropping import dropout_arguments
from gattn.ops.backends.cpu.layout import Layout, layout_of
from gattn.ops.backends.kernels import DTYPES, dense_rows, flat
from gattn.ops.call import compute_dtype
from gattn.ops.terms import PLACES, TERMS, Inputs
from gattn.torch_private import resolved

__all__ = ["HUGE_BYTES", "Arguments", "Plan", "empty", "kept_by_forward", "layout_of_inputs", "use_huge_pages"]

# Below this many channels to read, threads cost more than they gain.
_SERIAL_WORK = 1 << 16
HUGE_BYTES = 1 << 22
_CPU = torch.device("cpu")


class Plan:
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
        #: The first axis of each input, which is that of its gradient.
        self.axes: dict[str, str] = {}
        for name, tensor, term in inputs.terms():
            self.axes[name] = term.letters[:1]
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
#: The tensors with a row for each target, source or edge, if there is no batch: places and letters.
_OF_ROWS = {PLACES[name]: term.letters[0] for name, term in TERMS.items() if term.read and term.letters[0] in "NME"}
_ROWS, _OTHERS = (
    operator.itemgetter(*(place for name, place in PLACES.items() if TERMS[name].read and (place in _OF_ROWS) is is_of))
    for is_of in (True, False)
)
_MOST_PLANS = 256
_plans: dict[Hashable, Plan] = {}


def _plan_for(inputs: Inputs, layout: Layout) -> Plan:
    """The plan of inputs, made if there is none for such inputs."""
    is_for_all = inputs.values.dim() == 3 and inputs.edge_type is None  # without a batch, for any number of rows
    key = (
        inputs.family,
        *inputs.constants,
        inputs.distribution,
        *inputs.distribution_constants,
        inputs.edge_is_value,
        None if is_for_all else (inputs.num_targets, layout.num_edges),
        *[None if x is None else _form(x, is_for_all) for x in _ROWS(inputs)],
        *[None if x is None else _form(x, False) for x in _OTHERS(inputs)],
    )
    plan = _plans.get(key)
    if plan is None:
        plan = Plan(inputs, layout.num_edges)
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        _plans[key] = plan
    elif is_for_all:
        counts = {"N": inputs.num_targets, "M": inputs.num_sources, "E": layout.num_edges}
        for place, letter in _OF_ROWS.items():
            tensor: Any = inputs[place]
            if tensor is not None and tensor.size(0) != counts[letter]:
                inputs.check(layout.num_edges)  # which says so
    return plan


def _form(x: Tensor, for_all: bool) -> tuple[Hashable, ...]:
    """What a plan depends on: shape, strides and type, in plans for any number of rows without this number."""
    if for_all:
        return x.shape[1:], x.is_contiguous() or x.stride(), x.dtype, x.device
    return x.shape, x.stride(), x.dtype, x.device


class Arguments:
    """What forward and backward pass share: a plan on a graph, and those of the kernels' arguments that are inputs.

    Tensors whose addresses are passed are kept alive here until the kernel is done.
    """

    def __init__(self, inputs: Inputs):
        if inputs.plan is None:
            layout = layout_of_inputs(inputs)
            plan = _plan_for(inputs, layout)
        else:
            plan, layout = inputs.plan
        self.plan: Plan = plan
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
            arguments.edge_of_target_position = layout.edge
        self.held: list[Tensor] = []
        for name, place, is_copied in plan.read:
            tensor: Any = inputs[place]
            setattr(arguments, name, self.hold(tensor) if is_copied else tensor.data_ptr())
        if inputs.edge_projection is not None:
            arguments.edge_projection_rows = self.hold(inputs.edge_projection)
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


def layout_of_inputs(inputs: Inputs) -> Layout:
    """The layout of the inputs' graph."""
    edges = inputs.edge_index, inputs.num_sources, inputs.num_targets, inputs.self_loops, inputs.flow
    return layout_of(*edges, traced=inputs.traced)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uninitialised memory."""
    tensor = torch.empty(shape, dtype=dtype, device=_CPU)
    if tensor.nbytes >= HUGE_BYTES:
        use_huge_pages(tensor)
    return tensor


def use_huge_pages(tensor: Tensor) -> None:
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
    """The statistics, logits or weights, with the signs in a record, and the unrounded output."""
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


def kept_by_forward(inputs: Inputs, keep: bool) -> list[tuple[tuple[int, ...], torch.dtype]]:
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
