"""Attention as PyTorch operators: what they take, their shape-only versions and their gradients, whoever computes them.

An operator's backward pass is an operator, too; a second derivative goes through `gattn.ops.reference`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gattn.distributions import Softmax
from gattn.ops import reference
from gattn.ops.edge_lists import FLOWS, looped, plain, traced, transforming
from gattn.scores import AdditiveScore, DotScore, GATScore, Score

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # in the order of the CPU kernels' StorageType

library = torch.library.Library("gattn", "DEF")
_INPUTS = (
    "Tensor? query, Tensor key, Tensor? value, Tensor? vector, Tensor? edge, Tensor? bias, Tensor? mask, "
    "Tensor? edge_value, Tensor edge_index, SymInt num_sources, SymInt num_targets, bool self_loops, str flow, "
    "str family, float negative_slope, float scale, bool edge_is_value, float dropout, Tensor? seed, bool traced"
)

#: Inputs that have gradients, by their place among the operators' inputs.
DIFFERENTIABLE = {"query": 0, "key": 1, "value": 2, "vector": 3, "edge": 4, "bias": 5, "edge_value": 7}
_EDGE_INDEX = 8
_NUM_INPUTS = 20


class AttentionOperator:
    """Attention by one backend's kernels: `gattn::<name>` and `gattn::<name>_backward`.

    Args:
        name: What it is called.
        devices: The devices whose tensors it takes.
        forward: Takes the inputs, whether to keep what the backward pass needs, and whether weights are wanted; returns
            output, weights, `[B, N, 2, H]` statistics of the softmax, a record (bytes), and the output in the type that
            is computed in (empty where that is the output's own, or is not to be kept).
        backward: Takes the gradients of output and weights, all that `forward` returned, its inputs, and which of the
            differentiable ones' gradients are wanted; returns those.
        record_bytes: From the inputs, heads and channels, how many bytes an edge the record has.
    """

    def __init__(
        self,
        name: str,
        devices: Sequence[str],
        forward: Callable[..., list[Tensor]],
        backward: Callable[..., list[Tensor]],
        record_bytes: Callable[[Sequence[Any], int, int], int],
    ):
        self._record_bytes = record_bytes
        library.define(f"{name}({_INPUTS}, bool keep, bool with_weights) -> Tensor[]")
        library.define(
            f"{name}_backward(Tensor grad_out, Tensor? grad_weights, Tensor out, Tensor weights, Tensor stats, "
            f"Tensor record, Tensor wide, {_INPUTS}, bool[] wanted) -> Tensor[]"
        )
        for device in devices:
            library.impl(name, forward, device)
            library.impl(f"{name}_backward", backward, device)
        torch.library.register_fake(f"gattn::{name}", self._fake_forward, lib=library)
        torch.library.register_fake(f"gattn::{name}_backward", _fake_backward, lib=library)
        register_gradient(name, _save_forward, self._differentiate)
        register_gradient(f"{name}_backward", _save_backward, _differentiate_twice)
        self._forward = getattr(torch.ops.gattn, name).default
        self._backward = getattr(torch.ops.gattn, f"{name}_backward").default

    def __call__(
        self,
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
        elif isinstance(score, DotScore) and query is not None:
            query, score = score.folded(query)
            scale = score.factor(key.size(-1))
        edge_is_value = edge is not None and edge is edge_value
        keep = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (query, key, value, vector, edge, bias, edge_value)
        )
        out, weights, *_ = self._forward(
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
            traced(),
            keep,
            with_weights,
        )
        return out, weights if with_weights else None

    def _fake_forward(self, *inputs: Any) -> list[Tensor]:
        inputs, (keep, with_weights) = inputs[:-2], inputs[-2:]
        query, key, value = inputs[:3]
        edge_index, num_sources, num_targets, self_loops = inputs[8:12]
        values = key if value is None else value
        _check_devices(inputs)
        heads = (key if query is None else query).size(-1 if inputs[13] == "gat" else -2)
        compute = compute_dtype(values.dtype)
        front = values.shape[:-3]
        nodes = (*front, num_targets, heads, values.size(-1))
        edges = torch.library.get_ctx().new_dynamic_size() if self_loops and with_weights else edge_index.size(1)
        record_bytes = self._record_bytes(inputs, int(heads), int(key.size(-1))) if keep else 0
        batch = math.prod(front)
        record = batch * most_edges(edge_index, num_sources, num_targets, self_loops) * record_bytes
        return [
            values.new_empty(nodes),
            values.new_empty((*front, edges if with_weights else 0, heads), dtype=compute),
            values.new_empty((batch, num_targets, 2, heads), dtype=compute),
            values.new_empty((record,), dtype=torch.uint8),
            values.new_empty(nodes if keep and values.dtype != compute else (0,), dtype=compute),
        ]

    def _differentiate(
        self, ctx: Any, grad_out: Tensor | None, grad_weights: Tensor | None, *others: None
    ) -> tuple[Tensor | None, ...]:
        out, *saved = _saved(ctx)
        # Autograd itself notices other edits, but not `edge_index.data = ...`.
        if saved[4 + _EDGE_INDEX].shape != ctx.edge_index_shape:
            raise RuntimeError("edge_index was given other data between the forward and the backward pass.")
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        wanted = iter(self._backward(grad_out, grad_weights if ctx.with_weights else None, out, *saved, ctx.wanted))
        result: list[Tensor | None] = [None] * (_NUM_INPUTS + 2)
        for place, wants in zip(DIFFERENTIABLE.values(), ctx.wanted, strict=True):
            if wants:
                result[place] = next(wanted)
        return tuple(result)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that tensors of `dtype` are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def transformed() -> str | None:
    """What asks for more than operators give."""
    if transforming():
        return "torch.func transforms need plain PyTorch"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation needs plain PyTorch"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace records plain PyTorch"
    if torch.compiler.is_exporting():
        return "an exported program is to run without gattn"
    return None


def most_edges(edge_index: Tensor, num_sources: int, num_targets: int, self_loops: bool) -> int:
    """An upper bound of the number of edges that is known without looking at them."""
    return edge_index.size(1) + (min(num_sources, num_targets) if self_loops else 0)


def check_inputs(inputs: Sequence[Any], num_edges: int) -> None:
    """Checks what kernels rely on: sizes, types and devices. Compiled code calls operators without any other check.

    Raises:
        ValueError: If an input does not fit the graph and the other inputs.
    """
    query, key, value, vector, edge, bias, mask, edge_value = inputs[:8]
    num_sources, num_targets = inputs[9:11]
    scalar = inputs[13] == "gat"
    values = key if value is None else value
    front, (key_heads, value_channels) = values.shape[:-3], values.shape[-2:]
    heads = (key if query is None else query).size(-1 if scalar else -2)
    channels = () if scalar else (key.size(-1),)
    dtype, compute = values.dtype, compute_dtype(values.dtype)
    score_dtype = compute if scalar else dtype
    _check_devices(inputs)
    if heads != key_heads and (key_heads == 0 or heads % key_heads != 0):
        raise ValueError(f"{key_heads} heads of key and value do not divide the {heads} heads of query.")
    for name, tensor, size, kind in (
        ("query", query, (*front, num_targets, heads, *channels), score_dtype),
        ("key", key, (*front, num_sources, key_heads, *channels), score_dtype),
        ("value", value, (*front, num_sources, key_heads, value_channels), dtype),
        ("vector", vector, (heads, *channels), compute),
    ):
        if tensor is not None and (tensor.shape != size or tensor.dtype != kind):
            raise ValueError(_UNFIT.format(name, list(tensor.shape), tensor.dtype, list(size), kind))
    for name, tensor, size, kind in (
        ("edge", edge, (num_edges, heads, *channels), score_dtype),
        ("bias", bias, (num_edges, heads), compute),
        ("mask", mask, (num_edges, 1 if mask is not None and mask.size(-1) == 1 else heads), torch.bool),
        ("edge_value", edge_value, (num_edges, heads, value_channels), dtype),
    ):
        if tensor is not None and (tensor.shape not in (size, (*front, *size)) or tensor.dtype != kind):
            raise ValueError(_UNFIT.format(name, list(tensor.shape), tensor.dtype, list(size), kind))


_UNFIT = "{} has shape {} and type {}, but the graph and the other inputs ask for {} and {}."


def _check_devices(inputs: Sequence[Any]) -> None:
    device = inputs[1].device
    for tensor in inputs:
        if isinstance(tensor, Tensor) and tensor.device != device:
            raise ValueError(f"all tensors must be on the same device; got {device} and {tensor.device}.")


def flat(tensor: Tensor, inner: int) -> Tensor:
    """`[..., R, inner dimensions]` with one batch dimension in front."""
    batch = tensor.dim() - inner - 1
    return tensor.unsqueeze(0) if batch == 0 else tensor if batch == 1 else tensor.flatten(0, batch - 1)


def dense_rows(tensor: Tensor, inner: int) -> Tensor:
    """`flat`, copied if a row is not dense."""
    tensor = flat(tensor, inner)
    width = 1
    for size, stride in zip(reversed(tensor.shape[2:]), reversed(tensor.stride()[2:]), strict=True):
        if size != 1 and stride != width:
            return tensor.contiguous()
        width *= size
    return tensor


def register_gradient(name: str, save: Callable[..., None], differentiate: Callable[..., Any]) -> None:
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

    library.impl(name, with_gradient, "Autograd", with_keyset=True)


def _save_forward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.wanted = [bool(ctx.needs_input_grad[1 + place]) for place in DIFFERENTIABLE.values()]
    ctx.mark_non_differentiable(*output[2:])
    _save(ctx, (*output, *inputs[:_NUM_INPUTS]))
    ctx.with_weights = inputs[-1]
    ctx.edge_index_shape = inputs[_EDGE_INDEX].shape


def _save(ctx: Any, values: tuple[Any, ...]) -> None:
    """Keeps tensors as autograd wants them kept, and the rest beside them."""
    ctx.is_tensor = [isinstance(value, Tensor) for value in values]
    ctx.save_for_backward(*(value for value in values if isinstance(value, Tensor)))
    ctx.others = [value for value in values if not isinstance(value, Tensor)]


def _saved(ctx: Any) -> list[Any]:
    tensors, others = iter(ctx.saved_tensors), iter(ctx.others)
    return [next(tensors) if is_tensor else next(others) for is_tensor in ctx.is_tensor]


def _fake_backward(*arguments: Any) -> list[Tensor]:
    inputs, wanted = arguments[7:-1], arguments[-1]
    tensors = (inputs[place] for place in DIFFERENTIABLE.values())
    return [
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for tensor, wants in zip(tensors, wanted, strict=True)
        if wants
    ]


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
            for name, place in DIFFERENTIABLE.items()
            if isinstance(inputs[place], Tensor)
        }
        for name, leaf in leaves.items():
            inputs[DIFFERENTIABLE[name]] = leaf if leaf.requires_grad else leaf.requires_grad_()
        outer = [None if grad is None else grad.view_as(grad) for grad in (grad_out, grad_weights)]
        for grad in outer:
            if grad is not None and not grad.requires_grad:
                grad.requires_grad_()
        pairs = [(result, grad) for result, grad in zip(_reference(*inputs), outer, strict=True) if grad is not None]
        names = [name for name, wants in zip(DIFFERENTIABLE, ctx.wanted, strict=True) if wants]
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
        result[7 + DIFFERENTIABLE[name]] = next(second)
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
    traced: bool,
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
