"""Fused attention on the CPU: the C++ kernels of csrc/ as PyTorch operators.

`gattn::attention` and `gattn::attention_backward` are registered with shape-only versions (so that `torch.compile` can
trace them) and with gradients; a second derivative goes through `gattn.ops.reference`.
"""

from __future__ import annotations

import ctypes
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gattn.distributions import Softmax
from gattn.ops import native, reference
from gattn.ops.edge_lists import FLOWS, looped, plain, transforming
from gattn.ops.layout import layout_of
from gattn.scores import AdditiveScore, DotScore, GATScore, Score

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # in the order of StorageType
_FAMILIES = ("gat", "leaky_relu", "tanh", "dot")  # in the order of Family

# Below this many channels read, threads cost more than they give.
_SERIAL_WORK = 1 << 16
_HUGE_BYTES = 1 << 22

_load_error = native.load_error()  # asked once: compiled code cannot ask
_warned = False

_library = torch.library.Library("gattn", "DEF")
_INPUTS = (
    "Tensor? query, Tensor key, Tensor? value, Tensor? vector, Tensor? edge, Tensor? bias, Tensor? mask, "
    "Tensor? edge_value, Tensor edge_index, SymInt num_sources, SymInt num_targets, bool self_loops, str flow, "
    "str family, float negative_slope, float scale, bool edge_is_value, float dropout, Tensor? seed"
)
_library.define(f"attention({_INPUTS}, bool keep, bool with_weights) -> Tensor[]")
_library.define(
    "attention_backward(Tensor grad_out, Tensor? grad_weights, Tensor out, Tensor weights, Tensor stats, "
    f"Tensor record, Tensor wide, {_INPUTS}, bool[] wanted) -> Tensor[]"
)

_library.define("drop(Tensor x, float p, Tensor seed) -> Tensor")

#: Inputs that have gradients, by their place among the operators' inputs.
_DIFFERENTIABLE = {"query": 0, "key": 1, "value": 2, "vector": 3, "edge": 4, "bias": 5, "edge_value": 7}
_NUM_INPUTS = 19


def attention(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    edge_index: Tensor,
    num_targets: int,
    score: Score,
    *,
    self_loops: bool = False,
    flow: str = FLOWS[0],
    edge: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    edge_value: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    with_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Output `[..., N, H, C]`, and weights `[..., E, H]` before dropout if asked for.

    Node tensors and vector edge terms are of one type; scalar terms (for GAT's score also query, key and edge), the
    additive score's vector and the weights are of the type that is computed in.

    Args:
        query: As in `gattn.ops.reference.attention`, like everything that is not described here.
        key: See `query`.
        value: See `query`; the very tensor `key` if they are the same.
        edge_index: `[2, E]`, without the self-loops that `self_loops` asks for.
        num_targets: See `query`.
        score: One of gattn's own.
        self_loops: Whether existing loops go out and one for each of the first min(N, M) nodes comes in.
        flow: Which row of `edge_index` holds the targets.
        edge: See `query`.
        bias: See `query`.
        mask: See `query`.
        edge_value: See `query`; the very tensor `edge` if they are the same.
        dropout: See `query`.
        seed: See `query`.
        with_weights: Whether weights are wanted.
    """
    family, vector, slope, scale = "dot", None, 0.0, 1.0
    if isinstance(score, GATScore):
        family, slope = "gat", score.negative_slope
    elif isinstance(score, AdditiveScore):
        family, vector, slope = score.activation, score.vector, score.negative_slope
        vector = vector.to(torch.promote_types(vector.dtype, compute_dtype(value.dtype)))
    elif isinstance(score, DotScore):
        scale = score.factor(key.size(-1))
    edge_is_value = edge is not None and edge is edge_value
    keep = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (query, key, value, vector, edge, bias, edge_value)
    )
    out, weights, *_ = torch.ops.gattn.attention.default(
        query,
        key,
        None if value is key else value,
        vector,
        edge,
        bias,
        mask,
        None if edge_is_value else edge_value,
        plain(edge_index),
        value.size(-3),
        num_targets,
        self_loops,
        flow,
        family,
        slope,
        scale,
        edge_is_value,
        dropout,
        seed,
        keep,
        with_weights,
    )
    return out, weights if with_weights else None


def drop(x: Tensor, p: float, seed: Tensor) -> Tensor:
    """Zeroes each element of `x` with probability `p`, as `seed` decides, and scales the others by `1 / (1 - p)`."""
    return torch.ops.gattn.drop.default(x, p, seed)


def usable() -> bool:
    """Whether operators can be used here: the kernels are there, and nobody asks for more than operators give."""
    return transformed() is None and unavailable("auto") is None


def transformed() -> str | None:
    """What asks for more than operators give."""
    if transforming():
        return "torch.func transforms need plain PyTorch"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation needs plain PyTorch"
    if torch.compiler.is_exporting():
        return "an exported program is to run without gattn"
    return None


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


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that tensors of `dtype` are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Call:
    """What forward and backward share: sizes, and the kernels' arguments as far as they are inputs.

    Tensors whose addresses are handed over are held here until the kernel is done.
    """

    def __init__(
        self,
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
    ):
        self.layout = layout = layout_of(edge_index, num_sources, num_targets, self_loops, flow)
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
            mask = self._flat(mask, 1)
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

    @staticmethod
    def _flat(tensor: Tensor, inner: int) -> Tensor:
        """`[..., R, inner dimensions]` with one batch dimension in front."""
        batch = tensor.dim() - inner - 1
        return tensor.unsqueeze(0) if batch == 0 else tensor if batch == 1 else tensor.flatten(0, batch - 1)

    def _rows(self, tensor: Tensor, inner: int) -> tuple[int, int, int]:
        """Address, and how many elements rows and batch elements are apart; a copy if a row is not dense."""
        tensor = self._flat(tensor, inner)
        width = 1
        for size, stride in zip(reversed(tensor.shape[2:]), reversed(tensor.stride()[2:]), strict=True):
            if size != 1 and stride != width:
                tensor = tensor.contiguous()
                break
            width *= size
        return self._hold(tensor), tensor.stride(1), tensor.stride(0)

    def _edges(self, tensor: Tensor, inner: int) -> tuple[int, int]:
        """Address, and how many elements batch elements are apart: zero where all share one."""
        tensor = self._flat(tensor, inner).contiguous()
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


def _forward(*inputs: Any) -> list[Tensor]:
    inputs, (keep, with_weights) = inputs[:-2], inputs[-2:]
    call = _Call(*inputs)
    arguments, layout = call.arguments, call.layout
    nodes = (*call.front, layout.num_targets, call.heads, call.value_channels)
    out = call.empty(*nodes, dtype=call.dtype)
    weights = call.empty(*call.front, layout.num_edges if with_weights else 0, call.heads)
    stats = call.empty(call.batch, layout.num_targets, 2, call.heads)
    record_bytes = _record_bytes(inputs, call.heads, call.channels) if keep else 0
    record = call.empty(call.batch * _most_edges(*inputs[8:12]) * record_bytes, dtype=torch.uint8)
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
    call = _Call(*inputs)
    arguments, layout = call.arguments, call.layout
    arguments.by_source = layout.by_source.rows
    arguments.target_position = layout.target_position.data_ptr()
    arguments.source_position = layout.source_position.data_ptr()
    arguments.grad_out = call._hold(grad_out.contiguous())
    if grad_weights is not None:
        arguments.grad_weights = call._hold(grad_weights.contiguous())
    arguments.out, arguments.weights = out.data_ptr(), weights.data_ptr()
    arguments.stats, arguments.out_wide = stats.data_ptr(), wide.data_ptr() if wide.numel() else None
    arguments.record = record.data_ptr()
    arguments.record_bytes = _record_bytes(inputs, call.heads, call.channels) if record.numel() else 0
    arguments.node_terms = call.scratch(call.batch, layout.num_targets, 4, call.heads)
    width = call.heads * max(call.channels, call.value_channels)
    slots = max(layout.by_source.num_slots, layout.by_target.num_slots)
    arguments.partial = call.scratch(call.batch * slots, 2 * width)

    wants = dict(zip(_DIFFERENTIABLE, wanted, strict=True))
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
        tasks = layout.by_target.num_tasks + layout.by_source.num_tasks
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


def _most_edges(edge_index: Tensor, num_sources: int, num_targets: int, self_loops: bool) -> int:
    """An upper bound of the number of edges that is known without looking at them."""
    return edge_index.size(1) + (min(num_sources, num_targets) if self_loops else 0)


def _fake_forward(*inputs: Any) -> list[Tensor]:
    inputs, (keep, with_weights) = inputs[:-2], inputs[-2:]
    query, key, value = inputs[:3]
    edge_index, num_sources, num_targets, self_loops = inputs[8:12]
    values = key if value is None else value
    heads = (key if query is None else query).size(-1 if inputs[13] == "gat" else -2)
    compute = compute_dtype(values.dtype)
    front = values.shape[:-3]
    nodes = (*front, num_targets, heads, values.size(-1))
    edges = torch.library.get_ctx().new_dynamic_size() if self_loops and with_weights else edge_index.size(1)
    record_bytes = _record_bytes(inputs, int(heads), int(key.size(-1))) if keep else 0
    batch = math.prod(front)
    return [
        values.new_empty(nodes),
        values.new_empty((*front, edges if with_weights else 0, heads), dtype=compute),
        values.new_empty((batch, num_targets, 2, heads), dtype=compute),
        values.new_empty(
            (batch * _most_edges(edge_index, num_sources, num_targets, self_loops) * record_bytes,), dtype=torch.uint8
        ),
        values.new_empty(nodes if keep and values.dtype != compute else (0,), dtype=compute),
    ]


def _fake_backward(*arguments: Any) -> list[Tensor]:
    inputs, wanted = arguments[7:-1], arguments[-1]
    tensors = (inputs[place] for place in _DIFFERENTIABLE.values())
    return [
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for tensor, wants in zip(tensors, wanted, strict=True)
        if wants
    ]


def _register_gradient(name: str, save: Callable[..., None], differentiate: Callable[..., Any]) -> None:
    """Does what `torch.library.register_autograd` does, at a fraction of its cost for each call.

    `save(ctx, inputs, output)` keeps what `differentiate(ctx, *grads)` needs.
    """
    op = getattr(torch.ops.gattn, name).default

    def forward(ctx: Any, keys: Any, *inputs: Any) -> Any:
        output = without_gradient(keys, *inputs)
        ctx.set_materialize_grads(False)
        save(ctx, inputs, output)
        return tuple(output) if isinstance(output, list) else output

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *differentiate(ctx, *grads)

    function: Any = type(f"gattn_{name}", (torch.autograd.Function,), {"forward": forward, "backward": backward})

    def without_gradient(keys: Any, *inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keys & torch._C._after_autograd_keyset, *inputs)

    def with_gradient(keys: Any, *inputs: Any) -> Any:
        if not (torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)):
            return without_gradient(keys, *inputs)
        output = function.apply(keys, *inputs)
        return list(output) if isinstance(output, tuple) else output

    _library.impl(name, with_gradient, "Autograd", with_keyset=True)


def _save_forward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.wanted = [bool(ctx.needs_input_grad[1 + place]) for place in _DIFFERENTIABLE.values()]
    ctx.mark_non_differentiable(*output[2:])
    _save(ctx, (*output, *inputs[:_NUM_INPUTS]))
    ctx.with_weights = inputs[-1]


def _save(ctx: Any, values: tuple[Any, ...]) -> None:
    """Keeps tensors as autograd wants them kept, and the rest beside them."""
    ctx.is_tensor = [isinstance(value, Tensor) for value in values]
    ctx.save_for_backward(*(value for value in values if isinstance(value, Tensor)))
    ctx.others = [value for value in values if not isinstance(value, Tensor)]


def _saved(ctx: Any) -> list[Any]:
    tensors, others = iter(ctx.saved_tensors), iter(ctx.others)
    return [next(tensors) if is_tensor else next(others) for is_tensor in ctx.is_tensor]


def _differentiate(
    ctx: Any, grad_out: Tensor | None, grad_weights: Tensor | None, *others: None
) -> tuple[Tensor | None, ...]:
    out, *saved = _saved(ctx)
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    wanted = iter(
        torch.ops.gattn.attention_backward.default(
            grad_out, grad_weights if ctx.with_weights else None, out, *saved, ctx.wanted
        )
    )
    result: list[Tensor | None] = [None] * (_NUM_INPUTS + 2)
    for place, wants in zip(_DIFFERENTIABLE.values(), ctx.wanted, strict=True):
        if wants:
            result[place] = next(wanted)
    return tuple(result)


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.wanted = inputs[-1]
    _save(ctx, (*inputs[:2], *inputs[7:-1]))


def _differentiate_twice(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """The derivative of the backward pass: that of the reference's backward pass."""
    grad_out, grad_weights, *inputs = _saved(ctx)
    with torch.enable_grad():
        # Views, so that what is differentiated begins here.
        leaves = {
            name: inputs[place].view_as(inputs[place])
            for name, place in _DIFFERENTIABLE.items()
            if isinstance(inputs[place], Tensor)
        }
        for name, leaf in leaves.items():
            inputs[_DIFFERENTIABLE[name]] = leaf if leaf.requires_grad else leaf.requires_grad_()
        outer = [None if grad is None else grad.view_as(grad) for grad in (grad_out, grad_weights)]
        for grad in outer:
            if grad is not None and not grad.requires_grad:
                grad.requires_grad_()
        pairs = [(result, grad) for result, grad in zip(_reference(*inputs), outer, strict=True) if grad is not None]
        names = [name for name, wants in zip(_DIFFERENTIABLE, ctx.wanted, strict=True) if wants]
        first = torch.autograd.grad(
            [result for result, _ in pairs],
            [leaves[name] for name in names],
            [grad for _, grad in pairs],
            create_graph=True,
            materialize_grads=True,
        )
        given = [(gradient, grad) for gradient, grad in zip(first, grads, strict=True) if grad is not None]
        variables = [*leaves.values(), *(grad for grad in outer if grad is not None)]
    second = iter(
        torch.autograd.grad(
            [gradient for gradient, _ in given],
            variables,
            [grad for _, grad in given],
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
    )
    result: list[Tensor | None] = [None] * (7 + _NUM_INPUTS + 1)
    for name in leaves:
        result[7 + _DIFFERENTIABLE[name]] = next(second)
    for place, grad in enumerate(outer):
        if grad is not None:
            result[place] = next(second)
    return tuple(result)


def _reference(
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
) -> tuple[Tensor, Tensor]:
    """What the operator computes, by the reference."""
    if self_loops:
        edge_index = looped(edge_index, num_sources, num_targets, flow)
    score: Score
    if family == "gat":
        score = GATScore(negative_slope)
    elif family == "dot":
        score = DotScore(scale)
    else:
        assert vector is not None
        score = AdditiveScore(vector, family, negative_slope)
    return reference.attention(
        query,
        key,
        key if value is None else value,
        edge_index.long() if flow == FLOWS[0] else edge_index.long().flip(0),
        num_targets,
        score,
        Softmax(),
        edge=edge,
        bias=bias,
        mask=mask,
        edge_value=edge if edge_is_value else edge_value,
        dropout=dropout,
        seed=seed,
    )


_library.impl("attention", _forward, "CPU")
_library.impl("attention_backward", _backward, "CPU")
torch.library.register_fake("gattn::attention", _fake_forward, lib=_library)
torch.library.register_fake("gattn::attention_backward", _fake_backward, lib=_library)
_register_gradient("attention", _save_forward, _differentiate)
_register_gradient("attention_backward", _save_backward, _differentiate_twice)
_library.impl("drop", _drop, "CPU")
torch.library.register_fake("gattn::drop", lambda x, p, seed: torch.empty_like(x).contiguous(), lib=_library)
_register_gradient("drop", _save_drop, _differentiate_drop)
