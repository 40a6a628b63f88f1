"""Fused attention on the CPU: the C++ kernels of csrc/ as PyTorch operators.

What they share with other backends' operators is in `gattn.ops.operators`.
"""

from __future__ import annotations

import ctypes
import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gattn.ops import native
from gattn.ops.layout import Layout, layout_of
from gattn.ops.operators import (
    DIFFERENTIABLE,
    DTYPES,
    AttentionOperator,
    check_inputs,
    compute_dtype,
    dense_rows,
    flat,
    library,
    most_edges,
    register_gradient,
    transformed,
)

DEVICES = ("cpu",)
"""The types of devices whose tensors the kernels take."""

_FAMILIES = ("gat", "leaky_relu", "tanh", "dot")  # in the order of Family

# Below this many channels read, threads cost more than they give.
_SERIAL_WORK = 1 << 16
_HUGE_BYTES = 1 << 22

_load_error = native.load_error()  # asked once: compiled code cannot ask
_warned = False

library.define("drop(Tensor x, float p, Tensor seed) -> Tensor")


def drop(x: Tensor, p: float, seed: Tensor) -> Tensor:
    """Zeroes each element of `x` with probability `p`, as `seed` decides, and scales the others by `1 / (1 - p)`."""
    return torch.ops.gattn.drop.default(x, p, seed)


def usable() -> bool:
    """Whether operators can be used here: the kernels are there, and nobody asks for more than operators give."""
    return transformed() is None and unavailable("auto") is None


def unavailable(backend: str) -> str | None:
    """Why the kernels cannot be used on this machine; `None` if they can.

    Warns, the first time, where `backend` is `"auto"` and the reference is about to step in.

    Raises:
        RuntimeError: If they cannot be used, and `backend` is not `"auto"`.
    """
    if _load_error is not None:
        if backend != "auto":
            raise RuntimeError(f"backend='cpu' needs gattn's CPU kernels, but {_load_error}.")
        _warn_once()
    return _load_error


def _warn_once() -> None:
    global _warned
    if not _warned and not torch.compiler.is_compiling():
        _warned = True
        warnings.warn(
            f"gattn computes attention without its CPU kernels, many times slower: {_load_error}.", stacklevel=6
        )


class _Call:
    """What forward and backward share: sizes, and the kernels' arguments as far as they are inputs.

    Tensors whose addresses are handed over are held here until the kernel is done.
    """

    def __init__(
        self,
        layout: Layout,
        query: Tensor | None,
        key: Tensor,
        value: Tensor | None,
        vector: Tensor | None,
        edge: Tensor | None,
        bias: Tensor | None,
        mask: Tensor | None,
        edge_value: Tensor | None,
        edge_index: Tensor,
        num_sources: int,
        num_targets: int,
        self_loops: bool,
        flow: str,
        family: str,
        negative_slope: float,
        scale: float,
        edge_is_value: bool,
        dropout: float,
        seed: Tensor | None,
        traced: bool,
    ):
        self.layout = layout
        values = key if value is None else value
        scalar = family == "gat"
        self.front = values.shape[:-3]
        self.batch = math.prod(self.front)
        self.heads = (key if query is None else query).size(-1 if scalar else -2)
        self.key_heads, self.value_channels = values.shape[-2:]
        self.channels = 1 if scalar else key.size(-1)
        self.dtype = values.dtype
        self.compute = compute_dtype(self.dtype)
        self.held: list[Tensor] = []
        work = layout.num_edges * self.batch * self.heads * (self.value_channels + self.channels)
        self.arguments = arguments = native.Arguments(
            targets=num_targets,
            sources=num_sources,
            edges=layout.num_edges,
            heads=self.heads,
            key_heads=self.key_heads,
            channels=self.channels,
            value_channels=self.value_channels,
            batch=self.batch,
            family=_FAMILIES.index(family),
            type=DTYPES.index(self.dtype),
            threads=torch.get_num_threads() if work > _SERIAL_WORK else 1,
            negative_slope=negative_slope,
            scale=scale,
            by_target=layout.by_target.rows,
            edge_of_target_position=None if layout.edge is None else layout.edge.data_ptr(),
        )
        node_dims = 1 if scalar else 2
        if query is not None:
            arguments.query, arguments.query_row, arguments.query_batch = self._rows(query, node_dims)
        arguments.key, arguments.key_row, arguments.key_batch = self._rows(key, node_dims)
        if value is None:
            arguments.value_is_key = 1
        else:
            arguments.value, arguments.value_row, arguments.value_batch = self._rows(value, 2)
        if vector is not None:
            arguments.vector = self._hold(vector.contiguous())
        if edge is not None:
            arguments.edge, arguments.edge_batch = self._edges(edge, node_dims)
        if bias is not None:
            arguments.bias, arguments.bias_batch = self._edges(bias, 1)
        if edge_is_value:
            arguments.edge_value, arguments.edge_value_batch = arguments.edge, arguments.edge_batch
        elif edge_value is not None:
            arguments.edge_value, arguments.edge_value_batch = self._edges(edge_value, 2)
        if mask is not None:
            mask = flat(mask, 1)
            arguments.mask = self._hold(mask)
            arguments.mask_batch, arguments.mask_edge, arguments.mask_head = (
                stride if size > 1 else 0 for stride, size in zip(mask.stride(), mask.shape, strict=True)
            )
        if seed is not None:
            arguments.dropout = 1
            arguments.seed, arguments.threshold, arguments.keep_scale = _dropout_arguments(dropout, seed)

    def _hold(self, tensor: Tensor) -> int:
        self.held.append(tensor)
        return tensor.data_ptr()

    def _rows(self, tensor: Tensor, inner: int) -> tuple[int, int, int]:
        """Address, and how many elements rows and batch elements are apart; a copy if a row is not dense."""
        tensor = dense_rows(tensor, inner)
        return self._hold(tensor), tensor.stride(1), tensor.stride(0)

    def _edges(self, tensor: Tensor, inner: int) -> tuple[int, int]:
        """Address, and how many elements batch elements are apart: zero where all share one."""
        tensor = flat(tensor, inner).contiguous()
        return self._hold(tensor), 0 if tensor.size(0) == 1 else tensor.stride(0)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Fresh memory, without the price of touching it for the first time page by page."""
        tensor = torch.empty(shape, dtype=self.compute if dtype is None else dtype)
        if tensor.nbytes >= _HUGE_BYTES:
            native.library().gattn_use_huge_pages(tensor.data_ptr(), tensor.nbytes)
        return tensor

    def scratch(self, *shape: int) -> int:
        """The address of memory that is needed until the kernel is done."""
        return self._hold(self.empty(*shape))


def _dropout_arguments(p: float, seed: Tensor) -> tuple[int, int, float]:
    """Seed, threshold and scale, as the kernels take them; with p = 1, a scale of zero drops everything."""
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


def _save_drop(ctx: Any, inputs: tuple[Tensor, float, Tensor], output: Tensor) -> None:
    _, ctx.p, seed = inputs
    ctx.save_for_backward(seed)


def _differentiate_drop(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return drop(grad, ctx.p, *ctx.saved_tensors), None, None


def _checked_call(inputs: Sequence[Any]) -> _Call:
    edge_index, num_sources, num_targets, self_loops, flow = inputs[8:13]
    layout = layout_of(edge_index, num_sources, num_targets, self_loops, flow, traced=inputs[-1])
    check_inputs(inputs, layout.num_edges)
    return _Call(layout, *inputs)


def _forward(*inputs: Any) -> list[Tensor]:
    inputs, (keep, with_weights) = inputs[:-2], inputs[-2:]
    call = _checked_call(inputs)
    arguments, layout = call.arguments, call.layout
    nodes = (*call.front, layout.num_targets, call.heads, call.value_channels)
    out = call.empty(*nodes, dtype=call.dtype)
    weights = call.empty(*call.front, layout.num_edges if with_weights else 0, call.heads)
    stats = call.empty(call.batch, layout.num_targets, 2, call.heads)
    record_bytes = _record_bytes(inputs, call.heads, call.channels) if keep else 0
    record = call.empty(call.batch * most_edges(*inputs[8:12]) * record_bytes, dtype=torch.uint8)
    # Rounded to half precision, an output is too coarse for the backward pass.
    wide = call.empty(*(nodes if keep and call.dtype != call.compute else (0,)))
    arguments.out = out.data_ptr()
    arguments.weights = weights.data_ptr() if with_weights else None
    arguments.stats = stats.data_ptr()
    arguments.record = record.data_ptr()
    arguments.record_bytes = record_bytes
    arguments.out_wide = wide.data_ptr() if wide.numel() else None
    arguments.partial = call.scratch(
        call.batch * layout.by_target.num_slots, 2 * call.heads + call.heads * call.value_channels
    )
    native.raise_for(native.library().gattn_forward(ctypes.byref(arguments)))
    return [out, weights, stats, record, wide]


def _backward(
    grad_out: Tensor,
    grad_weights: Tensor | None,
    out: Tensor,
    weights: Tensor,
    stats: Tensor,
    record: Tensor,
    wide: Tensor,
    *inputs: Any,
) -> list[Tensor]:
    inputs, wanted = inputs[:-1], inputs[-1]
    query, key, value, vector, edge, bias, _, edge_value = inputs[:8]
    call = _checked_call(inputs)
    arguments, layout, by_source = call.arguments, call.layout, call.layout.by_source
    record_bytes = _record_bytes(inputs, call.heads, call.channels) if record.numel() else 0
    nodes = (*call.front, layout.num_targets, call.heads, call.value_channels)
    edges = (*call.front, layout.num_edges, call.heads)
    for tensor, size, dtype in (
        (grad_out, nodes, call.dtype),
        (out, nodes, call.dtype),
        (stats, (call.batch, layout.num_targets, 2, call.heads), call.compute),
        (record, (call.batch * most_edges(*inputs[8:12]) * record_bytes,), torch.uint8),
        (wide, (0,) if wide.dim() == 1 else nodes, call.compute),
        *(() if grad_weights is None else ((grad_weights, edges, call.compute), (weights, edges, call.compute))),
    ):
        if tensor.shape != size or tensor.dtype != dtype:
            raise ValueError("the graph or an input has changed between the forward and the backward pass.")
    arguments.by_source = by_source.rows
    arguments.target_position = by_source.target_position.data_ptr()
    arguments.source_position = by_source.source_position.data_ptr()
    arguments.grad_out = call._hold(grad_out.contiguous())
    if grad_weights is not None:
        arguments.grad_weights = call._hold(grad_weights.contiguous())
    arguments.out, arguments.weights = out.data_ptr(), weights.data_ptr()
    arguments.stats, arguments.out_wide = stats.data_ptr(), wide.data_ptr() if wide.numel() else None
    arguments.record = record.data_ptr()
    arguments.record_bytes = record_bytes
    arguments.node_terms = call.scratch(call.batch, layout.num_targets, 4, call.heads)
    width = call.heads * max(call.channels, call.value_channels)
    slots = max(by_source.num_slots, layout.by_target.num_slots)
    arguments.partial = call.scratch(call.batch * slots, 2 * width)

    wants = dict(zip(DIFFERENTIABLE, wanted, strict=True))
    grads: dict[str, Tensor] = {}
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if wants[name]:
            grads[name] = call.empty(*tensor.shape, dtype=tensor.dtype)
            setattr(arguments, f"grad_{name}", grads[name].data_ptr())
    # Per-edge terms that a batch shares get a gradient for each element first.
    inner = 1 if inputs[13] == "gat" else 2
    for name, tensor, dims in (("edge", edge, inner), ("bias", bias, 1), ("edge_value", edge_value, 2)):
        if wants[name]:
            grads[name] = call.empty(call.batch, *tensor.shape[-1 - dims :], dtype=tensor.dtype)
            setattr(arguments, f"grad_{name}", grads[name].data_ptr())
    if inputs[16] and wants["edge"]:
        arguments.grad_edge_value = arguments.grad_edge
    if wants["query"] or wants["vector"]:
        arguments.target_pass = 1
        arguments.edge_terms = call.scratch(call.batch, layout.num_edges, call.heads)
    if wants["vector"]:
        tasks = layout.by_target.num_tasks + by_source.num_tasks
        partial = torch.zeros(tasks * call.batch, call.heads, call.channels, dtype=call.compute)
        arguments.grad_vector = partial.data_ptr()
    native.raise_for(native.library().gattn_backward(ctypes.byref(arguments)))
    if wants["vector"]:
        grads["vector"] = partial.sum(0).to(vector.dtype)
    for name, tensor in (("edge", edge), ("bias", bias), ("edge_value", edge_value)):
        if wants[name]:
            grads[name] = grads[name].view(*call.front, *grads[name].shape[1:]).sum_to_size(tensor.shape)
    return [grads[name] for name, wants_it in wants.items() if wants_it]


def _record_bytes(inputs: Sequence[Any], heads: int, channels: int) -> int:
    key, edge, family = inputs[1], inputs[4], inputs[13]
    kind = DTYPES.index(key.dtype)
    return native.library().gattn_record_bytes(_FAMILIES.index(family), kind, heads, channels, edge is not None)


attention = AttentionOperator("attention", ("CPU",), _forward, _backward, _record_bytes)
library.impl("drop", _drop, "CPU")
torch.library.register_fake("gattn::drop", lambda x, p, seed: torch.empty_like(x).contiguous(), lib=library)
register_gradient("drop", _save_drop, _differentiate_drop)
