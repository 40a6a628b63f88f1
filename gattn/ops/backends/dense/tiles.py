"""Attention on complete graphs by the CPU kernels for tiles of pairs: no tensor has a number for each pair.

They compute every score made of dot products and every distribution that looks at one logit at a time, or is a softmax,
with a bias and a mask of any broadcast shape, or a bias by distance, bucket or listed pair, a window, lengths, packed
blocks, a sink and dropout; and, once the output is known, the weights. With both passes:

    P_ij = w(z_ij) r_i,    dz_ij = w'(z_ij) r_i (dP_ij - D_i),    D_i = <dout_i, out_i> - dL_i

where z_ij is a logit, r_i one over the row's sum (of a gate that is not normalised: 1, and D_i = 0), dP_ij = <dout_i,
v_j> and dL_i the gradient of the log-sum-exp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import compress, repeat
from operator import is_not
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gattn.bias import Term
from gattn.distributions import Law, from_law
from gattn.ops import reference
from gattn.ops.backends.base import needs_plain_pytorch, new_seed
from gattn.ops.backends.cpu import native
from gattn.ops.backends.dense.cpu_tiles import CPUCall
from gattn.ops.backends.dense.gpu_tiles import GPUCall
from gattn.ops.backends.dense.tile_rules import DIMS, Element, Inputs, Rule, check_fit
from gattn.ops.backends.kernels import DTYPES
from gattn.ops.backends.triton.forms import is_installed
from gattn.ops.call import compute_dtype
from gattn.ops.differentiated import are_plain, has_gradient, saved_tensors
from gattn.ops.dropout import keep_mask_of_pairs
from gattn.ops.flops import count_tiles, of_pairs
from gattn.processor import instructions
from gattn.torch_private import apply_of, is_batched, is_counted, is_exporting, is_traced, num_modes, resolved

__all__ = [
    "LAWS",
    "Inputs",
    "Rule",
    "attend",
    "backward",
    "flops",
    "forward",
    "is_served",
    "outruns_pytorch",
    "read",
    "refuses",
]

#: The distributions that the kernels know.
LAWS = ("softmax", "sigmoid", "tanh", "identity")

#: Read once, because compiled code cannot.
_IS_ON_CPU = native.load_error() is None

#: With fewer multiplications, a plain softmax is PyTorch's, whose calls cost less than those of the kernels.
_FEWEST = {torch.float32: 2**16, torch.float64: 2**17, torch.bfloat16: 2**15, torch.float16: 2**15}

#: The same for one target, as in decoding, whose kernel wins by reading keys once: with heads that share keys, and
#: without, where PyTorch is faster with gradients.
_FEWEST_SHARED, _FEWEST_OF_ONE = 2**18, 2**20

#: With any of these, PyTorch may be faster in half precision. With "avx512_bf16" alone (an EPYC), kernels took half its
#: time forward and two thirds with gradients.
_OF_HALF = frozenset(("avx512_fp16", "amx_bf16", "amx_fp16"))


def refuses(tensors: Sequence[Tensor | None], law: Law) -> str | None:
    """Why neither `attend` can be called now nor, in compiled code, `gattn.ops.backends.dense.tile_operator.attend`.

    Args:
        tensors: Query, key, value, bias, mask and sink.
        law: The distribution.
    """
    query, key, value = tensors[:3]
    assert query is not None
    assert key is not None
    assert value is not None
    if law.name not in LAWS:
        return f"they know {', '.join(LAWS)}, not {law.name}"
    if not is_served(value):
        return f"there are none for {value.dtype} on {value.device.type}, or they are not installed"
    if (reason := needs_plain_pytorch()) is not None:
        return reason
    if not query.dtype == key.dtype == value.dtype:
        return "query, key and value are of several types"
    if is_traced() and not is_counted():
        is_compiled = torch.compiler.is_compiling() and not is_exporting()
        return None if is_compiled else "the program that is recorded runs without gattn"
    if query.numel() * key.numel() == 0 or (value.numel() == 0 and value.size(-1) > 0):
        return "there is nothing to attend to"
    return None if are_plain([x for x in tensors if x is not None]) else "a tensor is of a subclass, or lazy"


def is_served(x: Tensor) -> bool:
    """Whether there are kernels for a tensor's device and type."""
    if x.dtype not in DTYPES or x.device.type == "cpu":
        return x.dtype in DTYPES and _IS_ON_CPU
    # Triton's compiler fails on products in float64, and on older GPUs on those in bfloat16.
    return (
        x.is_cuda and x.dtype != torch.float64 and is_installed and torch.cuda.get_device_capability(x.device)[0] >= 8
    )


def outruns_pytorch(query: Tensor, key: Tensor, value: Tensor, is_plain: bool, dropout: float) -> bool:
    """Whether tensors are on a CPU, and so large that `attend`, if it can be called, is faster than PyTorch's."""
    if query.device.type != "cpu":
        return False
    if dropout > 0.0:  # with which PyTorch makes a matrix
        return True
    if value.dtype not in _FEWEST or not _is_compared(value.dtype):
        return False
    work = query.numel() * key.size(-3)
    if not is_plain or work < _FEWEST[value.dtype]:
        return not is_plain
    if query.size(-3) > 1 or value.dtype.itemsize == 2:  # which PyTorch converts for one target, too
        return True
    if key.size(-2) < query.size(-2):
        return work >= _FEWEST_SHARED
    return work >= _FEWEST_OF_ONE and not has_gradient((query, key, value))


@cache
def _is_compared(dtype: torch.dtype) -> bool:
    """Whether the kernels were found to be faster than PyTorch's with this processor's instructions."""
    if native.load_error() is not None or native.library().gattn_instruction_set() == b"baseline":
        return False
    return dtype.itemsize > 2 or not _OF_HALF & instructions()


def read(bias: Tensor | Term | None, heads: int) -> tuple[str, int, Tensor | None, Tensor | None, Tensor | None]:
    """What has a bias, the smallest distance, and `Inputs.bias`, `of_pairs` and `starts`, for so many heads."""
    if not isinstance(bias, Term):
        return "all", 0, bias, None, None
    values = bias.values.expand(-1, heads) if bias.kind == "listed" else bias.values
    return bias.kind, bias.first, values, bias.of_pairs, bias.starts


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | Term | None,
    mask: Tensor | None,
    sink: Tensor | None,
    rule: Rule,
    num_weights: int = 0,
    holes: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The output, `[B, N, H, V]`, the log-sum-exp of each target, `[B, N, H]`, of a softmax, and all weights in a row.

    Args:
        query: `[B, N, H, C]`; like the next two, without B if there is one entry.
        key: `[B, M, G, C]`, whose heads divide those of the query.
        value: `[B, M, G, V]`.
        bias: Broadcastable to `[B, H, N, M]`, or a term of the graph.
        mask: True = may attend, broadcastable likewise.
        sink: `[H]`.
        rule: What is computed.
        num_weights: How many weights are returned; see `elements_for_tiles`. (default: `0`)
        holes: Of a graph of blocks, whose tiles are the mask, which pairs of each attend. (default: `None`, all)
    """
    compute = compute_dtype(value.dtype)
    index, starts = holes, None
    if isinstance(bias, Term):
        kind, first, bias, index, starts = read(bias, query.size(-2))
        rule = rule._replace(bias=kind, first=first)
    bias, sink = None if bias is None else bias.to(compute), None if sink is None else sink.to(compute)
    inputs = Inputs(query, key, value, bias, sink, mask, index, starts, new_seed(rule.dropout, value.device))
    if not has_gradient(inputs):
        out, _, log_sum, weights = forward(inputs, rule, num_weights, keeps=False)
        return out, log_sum, weights
    is_read = mask is not None or index is not None
    if is_read and not torch.is_inference_mode_enabled():  # autograd saves no tensor of that mode
        kept = [x.clone() if x is not None and x.is_inference() else x for x in (mask, index, starts)]
        inputs = inputs._replace(mask=kept[0], of_pairs=kept[1], starts=kept[2])
    found: tuple[Tensor, Tensor | None, Tensor | None] = _apply(rule, num_weights, *inputs)
    return found


#: By the type of device.
CALLS: dict[str, type[CPUCall | GPUCall]] = {"cpu": CPUCall, "cuda": GPUCall}


def _form(x: Tensor | None) -> Any:
    return None if x is None else (tuple(x.shape), x.stride())


def _call_of(inputs: Inputs, rule: Rule, grad_bias: Tensor | None = None) -> CPUCall | GPUCall:
    """A call of the kernels for the device of these tensors."""
    kind, (query, key, value, bias, _, mask, index, starts, _) = CALLS[inputs.value.device.type], inputs
    if kind is not CPUCall:  # which does so where it prepares its arguments
        check_fit(rule, *map(_form, (query, key, value, bias, mask, index, starts)))
    return kind(inputs, rule, grad_bias)


def forward(inputs: Inputs, rule: Rule, num_weights: int, keeps: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The output, the same before it is rounded if it `keeps` that, the statistics of each row, and the weights."""
    call, (query, _, value), heads = _call_of(inputs, rule), inputs[:3], inputs.query.size(-2)
    compute, shape = compute_dtype(value.dtype), query.shape[:-1]
    out, stats = value.new_empty((*shape, value.size(-1))), value.new_empty(shape, dtype=compute)
    if sum([e.num_targets for e in rule.elements]) * heads < stats.numel():  # targets of no element see nothing
        out.zero_()
        stats.fill_(-torch.inf if rule.law.name == "softmax" else 0.0)
    wide = torch.zeros_like(out, dtype=compute) if value.dtype != compute and keeps else None
    call.forward(out, wide, stats)
    if num_modes():
        count_tiles(out, lambda: flops(inputs, rule))
    weights = None
    if rule.weights:
        whole = sum(e.num_targets * e.num_sources for e in rule.elements) * heads == num_weights
        weights = (stats.new_empty if whole else stats.new_zeros)(num_weights)
        call.weights(weights, stats)
    return out, out if wide is None else wide, stats, weights


def backward(
    inputs: Inputs,
    rule: Rule,
    results: tuple[Tensor, Tensor, Tensor | None],
    grads_of: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of the first five inputs; those of bias and sink if they are wanted.

    Args:
        inputs: The inputs.
        rule: What was computed.
        results: The output before rounding, the statistics and the weights.
        grads_of: The gradients of the output, the log-sum-exp and the weights.
        wanted: Whether the gradient of each input is wanted.
    """
    bias, sink = inputs.bias, inputs.sink
    (out, stats, weights), (grad, grad_log_sum, grad_weights) = results, grads_of
    grad = torch.zeros_like(out, dtype=inputs.value.dtype) if grad is None else resolved(grad)
    grad_weights = None if grad_weights is None else native.readable(grad_weights)
    if rule.law.name != "softmax" and not rule.law.constants[0]:
        delta = torch.zeros_like(stats)
    else:
        delta = (grad.to(out.dtype) * out).sum(-1)
        if grad_weights is not None and weights is not None:
            _add_inner(delta, native.readable(weights), grad_weights, rule.elements)
    if grad_log_sum is not None:
        delta -= grad_log_sum.masked_fill(stats == -torch.inf, 0.0)
    grad_bias = None
    if bias is not None and wanted[3]:
        is_listed = rule.bias == "listed"  # whose numbers come one head after another
        grad_bias = bias.new_zeros(bias.shape[::-1]).t() if is_listed else bias.new_zeros(bias.shape)
    of_nodes, grad_bias = _call_of(inputs, rule, grad_bias).backward(grad, delta, stats, grad_weights)
    if num_modes():
        count_tiles(grad, lambda: flops(inputs, rule, is_backward=True))
    of_sink = None
    if sink is not None and wanted[4]:
        shares_of_sink = (sink - stats).exp().masked_fill(stats == -torch.inf, 0.0)
        of_sink = -(shares_of_sink * delta).flatten(0, -2).sum(0)
    return [*[g.to(inputs.value.dtype) for g in of_nodes], grad_bias, of_sink]


def flops(inputs: Inputs, rule: Rule, is_backward: bool = False) -> int:
    """How many operations a pass takes; see `gattn.ops.flops`."""
    heads = inputs.query.size(-2)
    if rule.block and inputs.mask is not None:
        of_heads = heads // inputs.mask.size(1) * len(rule.elements) // inputs.mask.size(0)
        pairs = int((inputs.mask >= 0).sum()) * rule.block**2 * of_heads
    else:
        pairs = heads * sum(_num_visible(element, rule) for element in rule.elements)
    return of_pairs(pairs, inputs.query.size(-1), inputs.value.size(-1), is_backward)


def _num_visible(element: Element, rule: Rule) -> int:
    """How many pairs of an element the window leaves."""
    n, m = element.num_targets, element.num_sources
    if rule.left is None and rule.right is None:
        return n * m
    place = np.arange(n) + element.offset
    first = 0 if rule.left is None else np.maximum(place - rule.left, 0)
    last = m - 1 if rule.right is None else np.minimum(place + rule.right, m - 1)
    return int(np.maximum(last - first + 1, 0).sum())


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: Rule, num_weights: int, *tensors: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        out, wide, stats, weights = forward(Inputs(*tensors), rule, num_weights, any(ctx.needs_input_grad))
        saved = *tensors, wide, stats, weights
        ctx.are_there = tuple(map(is_not, saved, repeat(None)))  # save_tensors(), without its frame
        ctx.save_for_backward(*compress(saved, ctx.are_there))
        ctx.rule = rule
        ctx.set_materialize_grads(False)
        if rule.log_sum and rule.law.name != "softmax":
            ctx.mark_non_differentiable(stats)
        return out, stats if rule.log_sum else None, weights  # each tensor that is returned takes time

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, wide, stats, weights = saved_tensors(ctx)
        inputs, wanted = Inputs(*tensors), ctx.needs_input_grad[2:]
        is_plain = not torch.is_grad_enabled()
        for x in grads:  # without the frames of any()
            is_plain = is_plain and (x is None or not is_batched(x))
        if not is_plain:
            found = _differentiate_twice(inputs, ctx.rule, grads, wanted)
        else:
            found = backward(inputs, ctx.rule, (wide, stats, weights), grads, wanted)
        return None, None, *found, None, None, None, None


_apply = apply_of(_Attention)  # of plain tensors


def _add_inner(delta: Tensor, weights: Tensor, grads: Tensor, elements: Sequence[Element]) -> None:
    """Adds each row's inner product of weights and their gradients to `delta`, `[B, N, H]`."""
    heads = delta.size(-1)
    delta = delta if delta.dim() == DIMS - 1 else delta.unsqueeze(0)
    for e in elements:
        form = (heads, e.num_targets, e.num_sources), (e.weights_head, e.weights_row, 1)
        first, second = (x.as_strided(*form, x.storage_offset() + e.weights_at) for x in (weights, grads))
        found = first.unsqueeze(-2) @ second.unsqueeze(-1)  # einsum would copy both
        delta[e.batch, e.first_target : e.first_target + e.num_targets] += found.view(heads, -1).t()


def _plain(inputs: Inputs, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernels compute, by operations of PyTorch on a matrix of all pairs."""
    query, key, value, bias, sink, mask, index, starts, seed = inputs
    is_one = query.dim() < DIMS
    query, key, value = (x.unsqueeze(0) if is_one else x for x in (query, key, value))
    compute, heads = compute_dtype(value.dtype), query.size(2)
    clamp = rule.clamp if math.isfinite(rule.clamp) else None
    logits = reference.products(query, key, rule.scale, rule.slope, clamp)
    seen = logits.new_zeros(logits.size(0), 1, *logits.shape[2:], dtype=torch.bool)
    terms = logits.new_zeros(logits.shape) if bias is not None else None
    for element in rule.elements:
        batch, first, n, first_source, m, offset, term = element[:7]
        place = batch, slice(None), slice(first, first + n), slice(first_source, first_source + m)
        distance = _range(m) - _range(n).unsqueeze(1) - offset
        is_seen = torch.ones_like(distance, dtype=torch.bool)
        if rule.left is not None:
            is_seen &= distance >= -rule.left
        if rule.right is not None:
            is_seen &= distance <= rule.right
        seen[place] = is_seen
        if terms is not None and bias is not None:
            of_pairs = _bias_of(bias, index, starts, rule, element, distance)
            terms = terms.index_put(tuple(_grid(place, logits.shape)), of_pairs.expand(heads, n, m))
        if mask is not None:
            seen = seen if seen.size(1) == heads else seen.expand(-1, heads, -1, -1).clone()
            allowed = _in_blocks(mask, index, rule.block, term, n, m) if rule.block else _term_of(mask, term, n, m)
            seen[place] = is_seen & allowed
    if terms is not None:
        logits = logits + terms
    logits = logits.masked_fill(~seen, -torch.inf)
    weights = from_law(rule.law._replace(sink=sink)).of_matrix(logits)
    assert weights is not None
    applied = weights
    if seed is not None:
        kept = keep_mask_of_pairs(seed, weights.shape, rule.dropout).to(compute)
        applied = weights * (kept / (1 - rule.dropout) if rule.dropout < 1.0 else kept * 0.0)
    out, log_sum = reference.weighted(applied, value).to(value.dtype), reference.log_sum_of_rows(logits)
    out, log_sum = (x.squeeze(0) if is_one else x for x in (out, log_sum))
    return out, log_sum, _in_a_row(applied if rule.weights == "dropped" else weights, rule)


def _in_a_row(weights: Tensor, rule: Rule) -> Tensor:
    """Weights, `[B, H, N, M]`, as the kernels return them; nothing if they do not."""
    if not rule.weights:
        return weights.new_empty(0)
    parts = []
    for e in sorted(rule.elements, key=lambda e: e.weights_at):
        part = weights[e.batch, :, e.first_target :, e.first_source :]
        n, m = e.weights_head // max(e.weights_row, 1), e.weights_row
        parts.append(part[:, :n, :m].flatten())
    return torch.cat(parts)


def _bias_of(
    bias: Tensor, index: Tensor | None, starts: Tensor | None, rule: Rule, element: Element, distance: Tensor
) -> Tensor:
    """The bias of an element's pairs, `[H or 1, n, m]`."""
    n, m = distance.shape
    if rule.bias == "all":
        return _term_of(bias, element.term, n, m)
    if rule.bias == "distances":
        return bias[(distance - rule.first).clamp(0, len(bias) - 1)].movedim(-1, 0)
    assert index is not None
    if starts is None:
        index = index.contiguous()
        buckets = index.as_strided((n, m), (element.bias_step, 1), index.storage_offset() + element.bias_at)
        return bias[buckets.long()].movedim(-1, 0)
    counts = starts[element.bias_at : element.bias_at + n + 1].diff()
    pairs = _range(int(counts.sum())) + starts[element.bias_at]
    target, source = _range(n).repeat_interleave(counts), index[pairs] - element.bias_step
    is_there = (source >= 0) & (source < m)
    places = target[is_there], source[is_there].long()
    return bias.new_zeros(n, m, bias.size(1)).index_put(places, bias[pairs[is_there]], accumulate=True).movedim(-1, 0)


def _term_of(x: Tensor, term: int, n: int, m: int) -> Tensor:
    x = x[term if x.size(0) > 1 else 0]
    return x[:, : n if x.size(1) > 1 else 1, : m if x.size(2) > 1 else 1]


def _in_blocks(tiles: Tensor, holes: Tensor | None, block: int, term: int, n: int, m: int) -> Tensor:
    """Which pairs attend on a graph of blocks, `[H or 1, n, m]`."""
    target, source = _range(n).unsqueeze(1), _range(m)
    tile = tiles[term if tiles.size(0) > 1 else 0][:, target // block, source // block]
    return tile >= 0 if holes is None else (tile >= 0) & holes[tile.clamp_min(0).long(), target % block, source % block]


def _grid(place: tuple[Any, ...], shape: torch.Size) -> list[Tensor]:
    ranges = [_range(size)[at] for at, size in zip(place[1:], shape[1:], strict=True)]
    return [ranges[0].new_tensor(place[0]), *torch.meshgrid(*ranges, indexing="ij")]


def _range(size: int) -> Tensor:
    return torch.arange(size, device="cpu")  # whatever the default device is


def _differentiate_twice(
    inputs: Inputs, rule: Rule, grads: Sequence[Tensor | None], wanted: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of the first five inputs, by operations that have gradients themselves."""
    with torch.enable_grad():
        # Views, so that differentiation stops here.
        leaves: list[Any] = [None if x is None else x.view_as(x) for x in inputs[:5]]
        leaves = [x if x is None or x.requires_grad else x.requires_grad_() for x in leaves]
        of_leaves = inputs._replace(**dict(zip(Inputs._fields, leaves, strict=False)))
        pairs = [x for x in zip(_plain(of_leaves, rule), grads, strict=True) if x[1] is not None]
        asked = [x for x, is_wanted in zip(leaves, wanted, strict=False) if x is not None and is_wanted]
        outs, given = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outs, asked, given, create_graph=True, allow_unused=True))
    return [next(found) if x is not None and w else None for x, w in zip(leaves, wanted, strict=False)]
