"""Attention on complete graphs by the CPU kernels for tiles of pairs: no tensor has a number for each pair.

They compute every score made of dot products and every distribution that looks at one logit at a time, or is a softmax,
with a bias and a mask of any broadcast shape, a window, lengths, packed blocks, a sink and dropout. With both passes:

    P_ij = w(z_ij) r_i,    dz_ij = w'(z_ij) r_i (dP_ij - D_i),    D_i = <dout_i, out_i> - dL_i

where z_ij is a logit, r_i one over the row's sum (of a gate that is not normalised: 1, and D_i = 0), dP_ij = <dout_i,
v_j> and dL_i the gradient of the log-sum-exp.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gattn.distributions import Law, Softmax, from_law
from gattn.errors import InputError
from gattn.ops.backends.base import needs_plain_pytorch, new_seed
from gattn.ops.backends.cpu import native
from gattn.ops.backends.kernels import DTYPES
from gattn.ops.call import compute_dtype
from gattn.ops.dropout import keep_mask_of_pairs
from gattn.ops.operator import are_plain
from gattn.ops.reference import repeat_heads
from gattn.torch_private import is_batched, is_traced, resolved

__all__ = ["Element", "Rule", "attend", "attend_whole", "can_attend", "elements_of", "is_faster"]

#: The distributions that the kernels know.
LAWS = ("softmax", "sigmoid", "tanh", "identity")

#: Below this many multiplications, threads cost more than they gain.
_SERIAL = 2**17

#: The backward pass cuts sources into parts, each with a gradient of the queries, from these numbers on: two, and four.
_IN_PARTS = (1024, 4096)

#: How far a target sees that sees all: more than there are nodes, and far from where integers end.
_FAR = 2**40

_SOFTMAX = Softmax().law()

#: A plain softmax is PyTorch's with fewer targets or pairs, where a call costs more than it computes.
_FEWEST_TARGETS, _FEWEST_PAIRS = 32, 2**14


class Element(NamedTuple):
    """Targets and sources that see each other, as positions in an entry of the batch."""

    batch: int
    first_target: int
    num_targets: int
    first_source: int
    num_sources: int
    offset: int
    """The position of target 0 among the sources"""
    term: int
    """The entry of bias and mask"""


class Rule(NamedTuple):
    """What is computed, beside tensors."""

    scale: float
    slope: float
    """Of a LeakyReLU of the products; 1: none"""
    clamp: float
    """The bound of the products"""
    law: Law
    left: int | None
    """How far before its own position a target sees; `None` means no limit"""
    right: int | None
    elements: tuple[Element, ...]
    dropout: float


def can_attend(tensors: Sequence[Tensor | None], law: Law | None) -> bool:
    """Whether `attend` can be called now.

    Args:
        tensors: Query, key, value, bias, mask and sink.
        law: The distribution.
    """
    query, key, value = tensors[:3]
    if law is None or law.name not in LAWS or query is None or key is None or value is None:
        return False
    if value.device.type != "cpu" or value.dtype not in DTYPES or is_traced() or needs_plain_pytorch() is not None:
        return False
    if not query.dtype == key.dtype == value.dtype:
        return False
    is_empty = query.numel() * key.numel() * value.numel() == 0
    return not is_empty and native.load_error() is None and are_plain([x for x in tensors if x is not None])


def is_faster(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None, dropout: float
) -> bool:
    """Whether `attend_whole` can be called now, and is faster than PyTorch's fused attention."""
    if query.device.type != "cpu" or is_traced():  # before sizes are compared, which export leaves open
        return False
    if dropout == 0.0:  # with it, PyTorch makes a matrix
        if value.dtype != torch.float32 or not _has_wide_vectors():
            return False
        targets, sources = query.size(-3), key.size(-3)
        if bias is None and mask is None and (targets < _FEWEST_TARGETS or targets * sources < _FEWEST_PAIRS):
            return False
    return can_attend((query, key, value, bias, mask, None), _SOFTMAX)


@cache
def _has_wide_vectors() -> bool:
    """Whether the kernels use AVX2 or AVX-512; others were not compared with PyTorch's."""
    return native.load_error() is None and native.library().gattn_instruction_set() != b"baseline"


def attend_whole(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    bias: Tensor | None,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
) -> Tensor:
    """The softmax of dot products on a complete graph, or a causal one of as many targets as sources.

    Args:
        query: `[B, N, H, C]` or `[N, H, C]`, like key and value.
        key: See there.
        value: See there.
        scale: What products are multiplied by.
        bias: Broadcastable to `[B, H, N, M]`.
        mask: True = may attend, broadcastable likewise.
        dropout: The probability that a weight is dropped.
        causal: Whether targets see no later sources.
    """
    one = query.dim() == 3
    if one:
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
    elements = elements_of(None, query.size(0), query.size(1), key.size(1), 0)
    rule = Rule(scale, 1.0, math.inf, _SOFTMAX, None, 0 if causal else None, elements, dropout)
    out = attend(query, key, value, bias, mask, None, rule)[0]
    return out.squeeze(0) if one else out


@lru_cache(maxsize=64)
def elements_of(
    known: tuple[tuple[int, ...], ...] | None, batch: int, num_targets: int, num_sources: int, offset: int
) -> tuple[Element, ...]:
    """The elements of a batch or, `known`, of a ragged one, whose places are counted over all of the batch.

    Raises:
        ValueError: If an element has more nodes than there are.
    """
    if known is None:
        return tuple(Element(place, 0, num_targets, 0, num_sources, offset, place) for place in range(batch))
    found = []
    for place, (first, n, first_source, m, offset) in enumerate(known):
        entry = place * batch // len(known)
        first, first_source = first - entry * num_targets, first_source - entry * num_sources
        # Lengths may have been edited after they were checked.
        if not (0 <= n <= num_targets - first and 0 <= m <= num_sources - first_source):
            raise InputError(f"the graph's lengths must lie between 0 and its sizes; got {n} targets and {m} sources.")
        found.append(Element(entry, first, n, first_source, m, offset, place))
    return tuple(found)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    sink: Tensor | None,
    rule: Rule,
) -> tuple[Tensor, Tensor]:
    """The output, `[B, N, H, V]`, and the log-sum-exp of each target, `[B, N, H]`, of a softmax.

    Args:
        query: `[B, N, H, C]`.
        key: `[B, M, G, C]`, whose heads divide those of the query.
        value: `[B, M, G, V]`.
        bias: Broadcastable to `[B, H, N, M]`.
        mask: True = may attend, broadcastable likewise.
        sink: `[H]`.
        rule: What is computed.
    """
    compute = compute_dtype(value.dtype)
    bias, sink = (None if x is None else x.to(compute) for x in (bias, sink))
    if mask is not None and mask.is_inference() and not torch.is_inference_mode_enabled():
        mask = mask.clone()  # autograd saves no tensor of inference mode
    seed = new_seed(rule.dropout, value.device)
    out, log_sum = _Attention.apply(query, key, value, bias, sink, mask, seed, rule)
    return out, log_sum


_Form = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides of a tensor"""


def _strides(strides: tuple[int, ...]) -> native.TileStrides:
    """Those of `[B, N, H, C]`."""
    batch, row, head, channel = strides
    return native.TileStrides(batch, head, row, channel)


def _term_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> native.TileStrides:
    """Those of `[B, H, N, M]`, of which some dimensions are broadcast."""
    return native.TileStrides(*(0 if size == 1 else step for size, step in zip(shape, strides, strict=True)))


@lru_cache(maxsize=256)
def _prepared(rule: Rule, dtype: torch.dtype, in_parts: bool, *forms: _Form) -> tuple[bytes, Any, int]:
    """The kernels' arguments but for addresses, seed and threads, the elements that they point to, and the work."""
    (query, strides), (key, key_strides), (value, value_strides), bias, mask = forms
    heads, channels = query[2:]
    fits = query[0] == key[0] and channels == key[3] and key[:3] == value[:3] and heads % key[2] == 0
    ends = ((e.first_target + e.num_targets, e.first_source + e.num_sources) for e in rule.elements)
    fits = fits and all(end <= query[1] and end_of_sources <= key[1] for end, end_of_sources in ends)
    sizes = ((e.term + 1, heads, e.num_targets, e.num_sources) for e in rule.elements)
    least = [max(x) for x in zip(*sizes, strict=True)]
    for term in (bias, mask):
        fits &= term is None or all(size == 1 or size >= x for size, x in zip(term[0], least, strict=False))
    if not fits:  # what kernels read is checked where they are called
        shapes = [list(form[0]) for form in forms if form is not None]
        raise InputError(f"query, key, value, bias and mask do not fit each other: {shapes}.")
    parts = [1 << sum(e.num_sources >= least for least in _IN_PARTS) if in_parts else 1 for e in rule.elements]
    elements = [native.TileElement(*element, count) for element, count in zip(rule.elements, parts, strict=True)]
    held = (native.TileElement * len(elements))(*elements)
    arguments = native.Tiles(
        type=DTYPES.index(dtype),
        batch=query[0],
        heads=heads,
        key_heads=key[2],
        channels=channels,
        value_channels=value[3],
        targets=query[1],
        sources=key[1],
        elements=ctypes.addressof(held),
        num_elements=len(elements),
        scale=rule.scale,
        slope=rule.slope,
        clamp=rule.clamp,
        distribution=native.distribution(rule.law.name),
        left=_FAR if rule.left is None else max(-_FAR, min(rule.left, _FAR)),
        right=_FAR if rule.right is None else max(-_FAR, min(rule.right, _FAR)),
        query_strides=_strides(strides),
        key_strides=_strides(key_strides),
        value_strides=_strides(value_strides),
        dropout=rule.dropout > 0.0,
        threshold=min(int(rule.dropout * 2**32), 2**32 - 1),
        keep_scale=0.0 if rule.dropout == 1.0 else 1 / (1 - rule.dropout),
        parts=max(parts, default=1),
    )
    arguments.distribution_constants[: len(rule.law.constants)] = rule.law.constants
    for name, term in (("bias", bias), ("mask", mask)):
        if term is not None:
            setattr(arguments, f"{name}_strides", _term_strides(*term))
    if bias is not None:
        terms = [element.term for element in rule.elements]
        arguments.shared_elements = bias[0][0] == 1 or len(set(terms)) < len(terms)
        arguments.shared_heads = bias[0][1] == 1
    work = heads * (channels + value[3]) * sum(e.num_targets * e.num_sources for e in rule.elements)
    return bytes(arguments), held, work


class _Call:
    """The kernels' arguments, and what they point to."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
        mask: Tensor | None,
        seed: Tensor | None,
        rule: Rule,
        in_parts: bool = True,
    ):
        tensors = [None if x is None else resolved(x) for x in (query, key, value, bias, mask)]
        forms = [None if x is None else (tuple(x.shape), x.stride()) for x in tensors]
        template, elements, work = _prepared(rule, value.dtype, in_parts, *forms)
        self.held: list[Any] = [elements]
        self.arguments = native.Tiles.from_buffer_copy(template)
        self.arguments.threads = torch.get_num_threads() if work > _SERIAL else 1
        for name, x in zip(("query", "key", "value", "bias", "mask"), tensors, strict=True):
            if x is not None:
                self.point(name, x)
        if sink is not None:
            self.point("sink", native.readable(sink))
        if seed is not None:
            self.arguments.seed = int(seed)

    def point(self, name: str, x: Tensor) -> Tensor:
        """Passes a tensor's address."""
        self.held.append(x)
        setattr(self.arguments, name, x.data_ptr())
        return x

    def run(self, name: str) -> None:
        """Calls a kernel."""
        native.raise_for(getattr(native.library(), name)(ctypes.byref(self.arguments)))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
        mask: Tensor | None,
        seed: Tensor | None,
        rule: Rule,
    ) -> tuple[Tensor, Tensor]:
        call = _Call(query, key, value, bias, sink, mask, seed, rule)
        compute, shape = compute_dtype(value.dtype), query.shape[:3]
        is_whole = sum(e.num_targets for e in rule.elements) == shape[0] * shape[1]
        out, stats = value.new_empty(*shape, value.size(-1)), value.new_empty(shape, dtype=compute)
        if not is_whole:  # targets of no element see nothing
            out.zero_()
            stats.fill_(-torch.inf if rule.law.name == "softmax" else 0.0)
        call.point("out", out)
        call.point("stats", stats)
        wide = out
        if value.dtype != compute and any(ctx.needs_input_grad):
            wide = call.point("wide", torch.zeros_like(out, dtype=compute))
        call.run("gattn_tiles_forward")
        ctx.save_for_backward(query, key, value, bias, sink, mask, seed, wide, stats)
        ctx.rule = rule
        if rule.law.name != "softmax":
            ctx.mark_non_differentiable(stats)
        return out, stats

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_log_sum: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, sink, mask, seed, out, stats = ctx.saved_tensors
        rule: Rule = ctx.rule
        if torch.is_grad_enabled() or is_batched(grad):
            inputs = [query, key, value, bias, sink]
            found = _differentiate_twice(inputs, mask, seed, rule, [grad, grad_log_sum], ctx.needs_input_grad)
            return *found, None, None, None
        is_softmax = rule.law.name == "softmax"
        grad_bias = None
        if bias is not None and ctx.needs_input_grad[3]:
            grad_bias = bias.new_zeros(bias.shape)
        # Parts would add to the same numbers.
        in_parts = grad_bias is None or grad_bias.size(3) != 1
        call = _Call(query, key, value, bias, sink, mask, seed, rule, in_parts)
        arguments = call.arguments
        grad = call.point("grad_out", native.readable(grad))
        delta = torch.zeros_like(stats)
        if is_softmax or rule.law.constants[0]:
            delta = (grad.to(out.dtype) * out).sum(-1)
        if is_softmax:
            delta -= grad_log_sum.masked_fill(stats == -torch.inf, 0.0)
        call.point("delta", delta)
        call.point("stats", native.readable(stats))
        lanes = native.library().gattn_tile_lanes(arguments.type)
        width, value_width = (-(-x.size(-1) // lanes) * lanes for x in (query, value))
        grads = [
            stats.new_zeros((arguments.parts, *query.shape[:3], width)),
            stats.new_zeros((*key.shape[:3], width)),
            stats.new_zeros((*value.shape[:3], value_width)),
        ]
        for name, x in zip(("grad_query", "grad_key", "grad_value"), grads, strict=True):
            call.point(name, x)
        if grad_bias is None:
            arguments.shared_elements = arguments.shared_heads = 0
        else:
            arguments.grad_bias_strides = _term_strides(tuple(grad_bias.shape), grad_bias.stride())
            call.point("grad_bias", grad_bias)
        call.run("gattn_tiles_backward")
        of_query = grads[0][0]
        for part in grads[0][1:]:
            of_query += part
        of_sink = None
        if sink is not None and ctx.needs_input_grad[4]:
            shares_of_sink = (sink - stats).exp().masked_fill(stats == -torch.inf, 0.0)
            of_sink = -(shares_of_sink * delta).sum((0, 1))
        of_nodes = (
            g[..., : x.size(-1)].to(x.dtype) for g, x in zip((of_query, *grads[1:]), (query, key, value), strict=True)
        )
        return *of_nodes, grad_bias, of_sink, None, None, None


def _plain(inputs: Sequence[Any], mask: Tensor | None, seed: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
    """What the kernels compute, by operations of PyTorch on a matrix of all pairs."""
    query, key, value, bias, sink = inputs
    compute, heads = compute_dtype(value.dtype), query.size(2)
    queries = query.to(compute).transpose(1, 2) * rule.scale
    keys, values = (repeat_heads(x, heads).to(compute).transpose(1, 2) for x in (key, value))
    logits = queries @ keys.mT
    if rule.slope != 1.0:
        logits = F.leaky_relu(logits, rule.slope)
    if math.isfinite(rule.clamp):
        logits = logits.clamp(-rule.clamp, rule.clamp)
    seen = torch.zeros(logits.size(0), 1, *logits.shape[2:], dtype=torch.bool)
    terms = logits.new_zeros(logits.shape) if bias is not None else None
    for batch, first, n, first_source, m, offset, term in rule.elements:
        place = batch, slice(None), slice(first, first + n), slice(first_source, first_source + m)
        distance = torch.arange(m) - torch.arange(n).unsqueeze(1) - offset
        is_seen = torch.ones(n, m, dtype=torch.bool)
        if rule.left is not None:
            is_seen &= distance >= -rule.left
        if rule.right is not None:
            is_seen &= distance <= rule.right
        seen[place] = is_seen
        if terms is not None and bias is not None:
            terms = terms.index_put(tuple(_grid(place, logits.shape)), _term_of(bias, term, n, m).expand(heads, n, m))
        if mask is not None:
            seen = seen if seen.size(1) == heads else seen.expand(-1, heads, -1, -1).clone()
            seen[place] = is_seen & _term_of(mask, term, n, m)
    if terms is not None:
        logits = logits + terms
    logits = logits.masked_fill(~seen, -torch.inf)
    weights = from_law(rule.law._replace(sink=sink)).of_matrix(logits)
    assert weights is not None
    if seed is not None:
        kept = keep_mask_of_pairs(seed, weights.shape, rule.dropout).to(compute)
        weights = weights * (kept / (1 - rule.dropout) if rule.dropout < 1.0 else kept * 0.0)
    out = (weights @ values).transpose(1, 2).to(value.dtype)
    empty = (logits == -torch.inf).all(-1)
    log_sum = logits.masked_fill(empty.unsqueeze(-1), 0.0).logsumexp(-1).masked_fill(empty, 0.0).transpose(1, 2)
    return out, log_sum


def _term_of(x: Tensor, term: int, n: int, m: int) -> Tensor:
    x = x[term if x.size(0) > 1 else 0]
    return x[:, : n if x.size(1) > 1 else 1, : m if x.size(2) > 1 else 1]


def _grid(place: tuple[Any, ...], shape: torch.Size) -> list[Tensor]:
    ranges = [torch.arange(size)[at] for at, size in zip(place[1:], shape[1:], strict=True)]
    return [torch.tensor(place[0]), *torch.meshgrid(*ranges, indexing="ij")]


def _differentiate_twice(
    inputs: list[Tensor | None],
    mask: Tensor | None,
    seed: Tensor | None,
    rule: Rule,
    grads: list[Tensor],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of the inputs, by operations that have gradients themselves."""
    with torch.enable_grad():
        # Views, so that differentiation stops here.
        leaves = [None if x is None else x.view_as(x) for x in inputs]
        leaves = [x if x is None or x.requires_grad else x.requires_grad_() for x in leaves]
        outs = list(_plain(leaves, mask, seed, rule))
        count = 2 if rule.law.name == "softmax" else 1
        asked = [x for x, is_wanted in zip(leaves, wanted, strict=False) if x is not None and is_wanted]
        found = iter(torch.autograd.grad(outs[:count], asked, grads[:count], create_graph=True, allow_unused=True))
    return [next(found) if x is not None and w else None for x, w in zip(leaves, wanted, strict=False)]
