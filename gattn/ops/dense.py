"""Attention on complete graphs, without their edges: no list of N·M edges, no `[N, M, C]` tensor.

Dot products go through PyTorch's `scaled_dot_product_attention`, with its own flag where causal, so that its fused
kernels are hit. The other scores are computed for a few targets at a time, and once more in the backward pass. A window
becomes blocks of targets, each with the sources that its targets see. Of a ragged batch, elements of the same lengths
are computed together, and padding never.

Inside, tensors have one batch dimension and nodes come before heads: query `[B, N, H, C]`, key `[B, M, H, C]` (`[B, N,
H]`, `[B, M, H]` for a scalar score), value `[B, M, H, C]`, bias and mask broadcastable to `[B, H, N, M]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

from gattn.distributions import Distribution, Softmax
from gattn.graphs import CompleteGraph
from gattn.ops.reference import repeat_heads
from gattn.scores import DotScore, Score

#: Scores that are no dot product make so many channels of their hidden layer at a time.
_CHUNK = 2**20

#: Where PyTorch has attention of variable length.
_PACKED = ("cuda",)

#: Targets in a block of a window: about as many as one of them sees sources, within these bounds.
_BLOCK = (32, 128)


def attention(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    graph: CompleteGraph,
    score: Score,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    distribution: Distribution,
    dropout: float = 0.0,
    with_weights: bool | str = False,
) -> tuple[Tensor, Any]:
    """Output `[..., N, H, C]`, and weights `[..., H, N, M]` if asked for (of a packed graph a list, one a block).

    Args:
        query: As in `gattn.attend`, like everything that is not described here; all of one type.
        key: See `query`.
        value: See `query`.
        graph: See `query`.
        score: One of gattn's own.
        bias: Broadcastable to `[..., H, N, M]`; of a packed graph to `[B, H, N, M]`, where B counts blocks, and N and M
            are those of the largest.
        mask: Likewise.
        distribution: One of gattn's own; of a packed graph the softmax.
        dropout: Probability that a weight is dropped, here and now.
        with_weights: `True` for the weights before dropout, `"dropped"` for those that make the output.
    """
    front = value.shape[:-3]
    batch = math.prod(front)
    bias, mask = (_with_one_batch(x, front if graph.blocks is None else torch.Size()) for x in (bias, mask))
    query = None if query is None else query.reshape(batch, *query.shape[len(front) :])
    key, value = (x.reshape(batch, *x.shape[len(front) :]) for x in (key, value))
    if isinstance(score, DotScore) and query is not None:
        query, score = score.folded(query)
    weights: list[Tensor] = []
    kind = value.device.type
    with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
        is_softmax = type(distribution) is Softmax
        if not is_softmax or (with_weights == "dropped" and dropout > 0.0):
            # The fused kernels know the softmax only, and do not say which weights they dropped.
            weights = list(_matrices(_alpha if is_softmax else _logits, query, key, graph, score, bias, mask))
            if not is_softmax:
                weights = [_distribute(distribution, weights[0], front)]
            dropped = [F.dropout(x, dropout) for x in weights] if dropout > 0.0 else weights
            out = torch.cat([_weighted(x, v) for x, v in zip(dropped, _blocks(value, graph, 1), strict=True)], 1)
            weights = dropped if with_weights == "dropped" else weights
        else:
            out = _output(query, key, value, graph, score, bias, mask, dropout)
            if with_weights:
                weights = list(_matrices(_alpha, query, key, graph, score, bias, mask))
    out = out.reshape(*front, *out.shape[1:])
    if not with_weights:
        return out, None
    weights = [x.reshape(*front, *x.shape[1:]) for x in weights]
    return out, weights[0] if graph.blocks is None else weights


def _with_one_batch(x: Tensor | None, front: torch.Size) -> Tensor | None:
    if x is None:
        return None
    if len(front) > 1 and x.dim() > 3:
        x = x.expand(*front, *x.shape[-3:]).flatten(0, 1)
    return x.reshape((1,) * (4 - x.dim()) + tuple(x.shape))


def _output(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    graph: CompleteGraph,
    score: Score,
    bias: Tensor | None,
    mask: Tensor | None,
    dropout: float,
) -> Tensor:
    """The output, `[B, N, H, C]`."""
    batch, num_targets = value.size(0), graph.num_targets
    if isinstance(score, DotScore) and _is_packed_flash(query, key, value, graph, bias, mask, dropout):
        return _packed(query, key, value, graph, score.factor(key.size(-1)))
    elements = _elements(graph, batch)
    if elements is None:
        mask = _both(mask, _length_mask(graph, value.device))
        offset = graph.num_sources - num_targets
        return _uniform(query, key, value, num_targets, offset, graph, score, bias, mask, dropout)
    if not elements:
        return _zeros(query, key, value, num_targets)
    ragged = _ragged.__wrapped__ if torch.compiler.is_compiling() else _ragged
    targets, sources, groups = ragged(elements, batch * num_targets, batch * graph.num_sources)
    queries = [None] * len(groups) if query is None else targets.take(query.flatten(0, 1))
    outputs = []
    for group, q, k, v in zip(
        groups, queries, sources.take(key.flatten(0, 1)), sources.take(value.flatten(0, 1)), strict=True
    ):
        count = len(group.elements)
        q = None if q is None else q.unflatten(0, (count, group.num_targets))
        k, v = (x.unflatten(0, (count, group.num_sources)) for x in (k, v))
        b, m = (_of_group(x, group) for x in (bias, mask))
        out = _uniform(q, k, v, group.num_targets, group.offset, graph, score, b, m, dropout)
        outputs.append(out.flatten(0, 1))
    return targets.put(outputs).unflatten(0, (batch, num_targets))


def _is_packed_flash(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    graph: CompleteGraph,
    bias: Tensor | None,
    mask: Tensor | None,
    dropout: float,
) -> bool:
    """Whether PyTorch's attention of variable length serves the dot product: a flash kernel, for what that knows."""
    if graph.blocks is None or query is None or value.device.type not in _PACKED:
        return False
    if bias is not None or mask is not None or dropout or value.dtype not in (torch.float16, torch.bfloat16):
        return False
    if query.shape[2:] != value.shape[2:] or key.shape[2:] != value.shape[2:] or value.numel() * query.numel() == 0:
        return False
    if value.is_cuda and torch.cuda.get_device_capability(value.device) < (8, 0):
        return False
    # Every target sees a source: flash kernels leave open what others get.
    is_seen = all(m > 0 and (n <= m or graph.reach == (None, None)) for n, m in graph.blocks)
    return is_seen and value.size(-1) % 8 == 0 and value.size(-1) <= 256


def _packed(query: Tensor | None, key: Tensor, value: Tensor, graph: CompleteGraph, scale: float) -> Tensor:
    """The output of a packed graph, all blocks at once."""
    assert graph.blocks is not None
    assert query is not None
    targets, sources = zip(*graph.blocks, strict=True)
    left, right = (-1 if side is None else side for side in graph.reach)
    out = varlen_attn(
        query.flatten(0, 1),
        key.flatten(0, 1),
        value.flatten(0, 1),
        _starts(targets, query.size(0), query.device),
        _starts(sources, query.size(0), query.device),
        max(targets),
        max(sources),
        scale=scale,
        window_size=(left, right),
    )
    assert isinstance(out, Tensor)
    return out.unflatten(0, query.shape[:2])


@lru_cache(maxsize=64)
def _starts(sizes: tuple[int, ...], batch: int, device: torch.device) -> Tensor:
    """Where each block begins, and the last one ends; of a batch, one element after another."""
    with torch.inference_mode(False):  # what is kept must serve training too
        return torch.tensor([0, *accumulate(sizes * batch)], dtype=torch.int32, device=device)


def _matrices(
    function: Callable[..., Tensor],
    query: Tensor | None,
    key: Tensor,
    graph: CompleteGraph,
    score: Score,
    bias: Tensor | None,
    mask: Tensor | None,
) -> Iterator[Tensor]:
    """What the function makes for some targets, weights before dropout or logits, for all: `[B, H, N, M]` by block."""
    lengths = _length_mask(graph, key.device)
    blocks = ((graph.num_targets, graph.num_sources),) if graph.blocks is None else graph.blocks
    queries = [None] * len(blocks) if query is None else _blocks(query, graph, 0)
    for place, (q, k, (n, m)) in enumerate(zip(queries, _blocks(key, graph, 1), blocks, strict=True)):
        group = _Group((place,), n, m, m - n)
        b, allowed = (x if graph.blocks is None else _of_group(x, group) for x in (bias, mask))
        allowed = _both(allowed, lengths)
        if graph.reach != (None, None):
            allowed = _both(allowed, graph.visible(n, m, m - n, key.device)[None, None])
        parts = _by_targets(function, n, q, k, score, b, allowed)
        yield torch.cat(parts, 2)


def _blocks(x: Tensor, graph: CompleteGraph, side: int) -> tuple[Tensor, ...]:
    """The nodes of each block of a packed graph; all of them of another."""
    return (x,) if graph.blocks is None else x.split([sizes[side] for sizes in graph.blocks], 1)


def _uniform(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    num_targets: int,
    offset: int,
    graph: CompleteGraph,
    score: Score,
    bias: Tensor | None,
    mask: Tensor | None,
    dropout: float,
) -> Tensor:
    """The output of elements of one size, where target i is at the place of source i + offset."""
    left, right = graph.reach
    plain = bias is None and mask is None
    # Sources that no target sees are left out.
    first = 0 if left is None else min(max(offset - left, 0), key.size(1))
    last = key.size(1) if right is None else min(max(num_targets + offset + right, first), key.size(1))
    if (first, last) != (0, key.size(1)):
        key, value, offset = key[:, first:last], value[:, first:last], offset - first
        bias, mask = (None if x is None else _crop(x, 3, first, last) for x in (bias, mask))
    num_sources = last - first
    if num_targets == 0 or num_sources == 0:
        return _zeros(query, key, value, num_targets)
    if left is not None and left >= num_targets - 1 + offset:
        left = None
    if right is not None and right >= num_sources - 1 - offset:
        right = None

    is_square = left is None and right == 0 and offset <= 0 and num_sources == num_targets + offset
    if plain and is_square and isinstance(score, DotScore) and key.size(-1) > 0:
        assert query is not None
        out = _dot(query[:, -offset:], key, value, score, None, None, dropout, causal=True)
        return out if offset == 0 else F.pad(out, (0, 0, 0, 0, -offset, 0))
    if plain and left is not None and right is not None:
        span = _block_targets(left, right) + left + right
        if 2 * span <= num_sources:
            return _banded(query, key, value, num_targets, offset, left, right, score, dropout)
    if left is not None or right is not None:
        mask = _both(mask, graph.visible(num_targets, num_sources, offset, key.device)[None, None])
    return _rectangle(query, key, value, num_targets, score, bias, mask, dropout)


def _rectangle(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    num_targets: int,
    score: Score,
    bias: Tensor | None,
    mask: Tensor | None,
    dropout: float,
) -> Tensor:
    """The output where every target sees every source that the mask leaves."""
    if isinstance(score, DotScore) and key.size(-1) > 0:
        assert query is not None
        return _dot(query, key, value, score, bias, mask, dropout)

    def output(
        query: Tensor | None, key: Tensor, score: Score, bias: Tensor | None, mask: Tensor | None, count: int
    ) -> Tensor:
        weights = _alpha(query, key, score, bias, mask, count)
        return _weighted(F.dropout(weights, dropout) if dropout else weights, value)

    return torch.cat(_by_targets(output, num_targets, query, key, score, bias, mask), 1)


def _zeros(query: Tensor | None, key: Tensor, value: Tensor, num_targets: int) -> Tensor:
    """The output where there is nothing to attend to; it has gradients, of zeros."""
    heads = key.size(2) if query is None else query.size(2)
    nothing = sum(x[:0].sum() for x in (query, key, value) if x is not None)
    return value.new_zeros(value.size(0), num_targets, heads, value.size(-1)) + nothing


def _dot(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: DotScore,
    bias: Tensor | None,
    mask: Tensor | None,
    dropout: float,
    causal: bool = False,
) -> Tensor:
    heads, shape = query.size(2), (query.size(1), key.size(1))
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    terms, blind = None, None
    if bias is not None or mask is not None:
        terms, blind = _mask_blind(bias, mask)
        terms = terms.expand(*terms.shape[:2], *shape)
    scale = score.factor(query.size(-1))
    grouped = {"enable_gqa": True} if key.size(1) != heads else {}
    if _is_flash_on_cpu(query, key, value, terms, dropout, causal, scale, grouped):
        if terms is not None and terms.dtype == torch.bool:
            terms = torch.zeros_like(terms, dtype=query.dtype).masked_fill(~terms, -torch.inf)
        out = _Flash.apply(query, key, value, terms, causal, scale)
    else:
        out = F.scaled_dot_product_attention(query, key, value, terms, dropout, causal, scale=scale, **grouped)
    if blind is not None:
        out = out.masked_fill(blind, 0.0)
    return out.transpose(1, 2)


_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _is_flash_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float,
    grouped: dict[str, bool],
) -> bool:
    """Whether PyTorch would call the kernel that `_Flash` wraps, and gradients are wanted."""
    if torch.compiler.is_compiling() or query.device.type != "cpu" or not torch.is_grad_enabled():
        return False
    if not (query.requires_grad or key.requires_grad or value.requires_grad):
        return False
    choice = torch._fused_sdp_choice(query, key, value, terms, dropout, causal, scale=scale, **grouped)
    return choice == SDPBackend.FLASH_ATTENTION.value


class _Flash(torch.autograd.Function):
    """PyTorch's fused attention on the CPU. Its gradient has none of its own, so there plain PyTorch steps in."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, terms: Tensor | None, causal: bool, scale: float
    ) -> Tensor:
        out, log_sum = _FLASH(query, key, value, 0.0, causal, attn_mask=terms, scale=scale)
        ctx.save_for_backward(query, key, value, terms, out, log_sum)
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, terms, out, log_sum = ctx.saved_tensors
        if not torch.is_grad_enabled():
            grads = _FLASH_BACKWARD(
                grad, query, key, value, out, log_sum, 0.0, ctx.causal, attn_mask=terms, scale=ctx.scale
            )
            return *grads, None, None, None
        leaves = [x if x.requires_grad else x.detach().requires_grad_() for x in (query, key, value)]
        logits = leaves[0] @ leaves[1].transpose(-1, -2) * ctx.scale
        if ctx.causal:
            later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
            logits = logits.masked_fill(later, -torch.inf)
        if terms is not None:
            logits = logits + terms
        out = logits.softmax(-1) @ leaves[2]
        return *torch.autograd.grad(out, leaves, grad, create_graph=True), None, None, None


def _mask_blind(bias: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """One tensor for both, and which targets see nothing; as no kernel likes such rows, they see everything."""
    if bias is None:
        assert mask is not None
        blind = ~mask.any(-1, keepdim=True)
        return mask | blind, blind
    if mask is not None:
        bias = bias.masked_fill(~mask, -torch.inf)
    blind = (bias == -torch.inf).all(-1, keepdim=True)
    return bias.masked_fill(blind, 0.0), blind


def _by_targets(
    function: Any,
    num_targets: int,
    query: Tensor | None,
    key: Tensor,
    score: Score,
    bias: Tensor | None,
    mask: Tensor | None,
) -> list[Tensor]:
    """Calls `function(query, key, score, bias, mask, count)` for some targets at a time.

    Nothing that is made on the way is kept for the backward pass, which makes it anew.
    """
    count = max(_CHUNK // max(key.numel(), 1), 1)
    counts = [min(count, num_targets - start) for start in range(0, num_targets, count)] or [0]
    queries = [None] * len(counts) if query is None else _split(query, counts, 1)
    biases, masks = ([x] * len(counts) if x is None or x.size(2) == 1 else _split(x, counts, 2) for x in (bias, mask))
    results = []
    for q, b, m, n in zip(queries, biases, masks, counts, strict=True):
        if len(counts) > 1 and torch.is_grad_enabled():
            results.append(checkpoint(function, q, key, score, b, m, n, use_reentrant=False))
        else:
            results.append(function(q, key, score, b, m, n))
    return results


def _split(x: Tensor, sizes: list[int], dim: int) -> list[Tensor]:
    if torch.compiler.is_compiling():  # which cannot make a split again in the backward pass
        return [x.narrow(dim, start, size) for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False)]
    return list(x.split(sizes, dim))


def _logits(
    query: Tensor | None, key: Tensor, score: Score, bias: Tensor | None, mask: Tensor | None, count: int
) -> Tensor:
    """The logits of so many targets, `[B, H, count, M]`, minus infinity where masked."""
    if isinstance(score, DotScore):
        assert query is not None
        keys = repeat_heads(key, query.size(2)).to(_compute_dtype(key.dtype))
        logits = query.to(keys.dtype).transpose(1, 2) @ keys.permute(0, 2, 3, 1) * score.factor(key.size(-1))
    else:
        logits = score.logits(None if query is None else query.unsqueeze(2), key.unsqueeze(1), None)
        logits = logits.permute(0, 3, 1, 2).expand(-1, -1, count, -1)
    if bias is not None:
        logits = logits + bias
    return logits if mask is None else logits.masked_fill(~mask, -torch.inf)


def _alpha(
    query: Tensor | None, key: Tensor, score: Score, bias: Tensor | None, mask: Tensor | None, count: int
) -> Tensor:
    """The softmax of `_logits`, zeros where a target sees nothing."""
    logits = _logits(query, key, score, bias, mask, count)
    if bias is None and mask is None:
        return logits.softmax(-1)
    blind = (logits == -torch.inf).all(-1, keepdim=True)
    return logits.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)


def _distribute(distribution: Distribution, logits: Tensor, front: torch.Size) -> Tensor:
    """Weights of another distribution than the softmax, of the shape of the logits, `[B, H, N, M]`."""
    num_targets, num_sources = logits.shape[2:]
    target = torch.arange(num_targets, device=logits.device).repeat_interleave(num_sources)
    source = torch.arange(num_sources, device=logits.device).repeat(num_targets)
    edges = logits.flatten(2).transpose(1, 2).reshape(*front, target.numel(), logits.size(1))
    weights = distribution.with_sources(source).weights(edges, target, num_targets, edges.dim() - 2)
    return weights.reshape(logits.size(0), target.numel(), logits.size(1)).transpose(1, 2).reshape(logits.shape)


def _weighted(weights: Tensor, value: Tensor) -> Tensor:
    """The sums of values `[B, M, H, C]` by weights `[B, H, N, M]`: `[B, N, H, C]`."""
    value = repeat_heads(value, weights.size(1)).to(weights.dtype)
    return (weights @ value.transpose(1, 2)).transpose(1, 2)


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _banded(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    num_targets: int,
    offset: int,
    left: int,
    right: int,
    score: Score,
    dropout: float,
) -> Tensor:
    """A window: blocks of targets as further elements of the batch, each with the sources that it sees."""
    batch, num_sources = value.shape[:2]
    size = _block_targets(left, right)
    span = size + left + right
    blocks = -(-num_targets // size)
    rest = blocks * size - num_targets
    before, after = left - offset, offset + blocks * size + right - num_sources  # negative: fewer than there are
    if query is not None:
        query = _pad_nodes(query, 0, rest).unflatten(1, (blocks, size)).flatten(0, 1)
    key, value = (_pad_nodes(x, before, after).unfold(1, span, size).movedim(-1, 2).flatten(0, 1) for x in (key, value))
    place = torch.arange(span, device=value.device)
    distance = place - torch.arange(size, device=value.device).unsqueeze(1)
    source = torch.arange(blocks, device=value.device).unsqueeze(1) * size - before + place
    mask = (distance >= 0) & (distance <= left + right)
    mask = mask & ((source >= 0) & (source < num_sources)).unsqueeze(1)
    mask = mask.repeat(batch, 1, 1).unsqueeze(1)
    out = _rectangle(query, key, value, size, score, None, mask, dropout)
    return out.unflatten(0, (batch, blocks)).flatten(1, 2)[:, :num_targets]


def _block_targets(left: int, right: int) -> int:
    return min(max(left + right + 1, _BLOCK[0]), _BLOCK[1])


def _pad_nodes(x: Tensor, before: int, after: int) -> Tensor:
    return F.pad(x, (0, 0) * (x.dim() - 2) + (before, after))


class _Group(NamedTuple):
    """Elements of a ragged batch that have the same sizes."""

    elements: tuple[int, ...]
    num_targets: int
    num_sources: int
    offset: int


class _Rows(NamedTuple):
    """Where the nodes of the groups lie among all nodes."""

    order: Tensor | None
    """The place of each node, group by group; `None` if that is their order already."""
    inverse: Tensor | None
    """Where each place's node is in `order`; its length, if nowhere."""
    sizes: list[int]
    """Number of nodes in each group."""

    def take(self, x: Tensor) -> tuple[Tensor, ...]:
        """The nodes of each group."""
        if self.order is not None and self.inverse is not None:
            x = _apply(_Take, x, self.order.to(x.device), self.inverse.to(x.device))
        return x.split(self.sizes)

    def put(self, parts: list[Tensor]) -> Tensor:
        """All nodes again, zeros for those in no group."""
        x = torch.cat(parts)
        if self.order is not None and self.inverse is not None:
            x = _apply(_Put, x, self.order.to(x.device), self.inverse.to(x.device))
        return x


def _apply(function: Any, *arguments: Any) -> Tensor:
    # The compiler finds gradients by itself, and stumbles over such functions.
    return function.forward(*arguments) if torch.compiler.is_compiling() else function.apply(*arguments)


class _Take(torch.autograd.Function):
    """`x[order]` for an order without repetitions, whose gradient needs no sum."""

    @staticmethod
    def forward(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        return x.index_select(0, order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Put.apply(grad, *ctx.saved_tensors), None, None


class _Put(torch.autograd.Function):
    """The inverse of `_Take`, with zeros in the places that it left out."""

    @staticmethod
    def forward(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        if order.numel() < inverse.numel():
            x = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        return x.index_select(0, inverse)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Take.apply(grad, *ctx.saved_tensors), None, None


def _elements(graph: CompleteGraph, batch: int) -> tuple[tuple[int, int, int, int, int], ...] | None:
    """First target, number of targets, first source, number of sources and offset of each element of a ragged batch.

    `None` if it has no lengths, or they cannot be looked at cheaply.
    """
    n, m = graph.num_targets, graph.num_sources
    if graph.blocks is not None:
        first = list(accumulate(graph.blocks, lambda a, b: (a[0] + b[0], a[1] + b[1]), initial=(0, 0)))
        return tuple(
            (b * n + t, size[0], b * m + s, size[1], size[1] - size[0])
            for b in range(batch)
            for (t, s), size in zip(first, graph.blocks, strict=False)
        )
    lengths = (graph.target_lengths, graph.source_lengths)
    known = [x for x in lengths if x is not None]
    if not known or torch.compiler.is_compiling() or any(x.device.type != "cpu" for x in known):
        return None
    targets, sources = (
        [full] * batch if x is None else x.flatten().tolist() for x, full in zip(lengths, (n, m), strict=True)
    )
    return tuple((b * n, targets[b], b * m, sources[b], m - n) for b in range(batch))


@lru_cache(maxsize=32)
def _ragged(
    elements: tuple[tuple[int, int, int, int, int], ...], num_targets: int, num_sources: int
) -> tuple[_Rows, _Rows, list[_Group]]:
    """Elements in groups of one size, and where the nodes of each group lie."""

    def sizes(place: int) -> tuple[int, int, int]:
        _, n, _, m, offset = elements[place]
        return n, m, offset

    order = list(range(len(elements)))
    # In their own order nothing need be copied, so that is left only where it saves many calls.
    runs = sum(1 for _ in groupby(order, key=sizes))
    if runs > 1.5 * len({sizes(place) for place in order}):
        order.sort(key=sizes)
    groups = [_Group(tuple(places), *key) for key, places in groupby(order, key=sizes)]
    order = [place for group in groups for place in group.elements]
    targets = _rows([elements[place][:2] for place in order], num_targets)
    sources = _rows([elements[place][2:4] for place in order], num_sources)
    return (
        targets._replace(sizes=[len(group.elements) * group.num_targets for group in groups]),
        sources._replace(sizes=[len(group.elements) * group.num_sources for group in groups]),
        groups,
    )


def _rows(pieces: list[tuple[int, int]], total: int) -> _Rows:
    with torch.inference_mode(False):  # they are kept, and must serve training too
        order = torch.cat([torch.arange(start, start + size) for start, size in pieces] or [torch.arange(0)])
        ends = [0, *accumulate(size for _, size in pieces)]
        if ends[-1] == total and all(
            size == 0 or start == end for (start, size), end in zip(pieces, ends, strict=False)
        ):
            return _Rows(None, None, [])
        inverse = torch.full((total,), order.numel())
        inverse[order] = torch.arange(order.numel())
        return _Rows(order, inverse, [])


def _of_group(x: Tensor | None, group: _Group) -> Tensor | None:
    """The part of a bias or mask that belongs to a group's elements."""
    if x is None:
        return None
    if x.size(0) > 1:
        x = x[[place % x.size(0) for place in group.elements]]
    return _crop(_crop(x, 2, 0, group.num_targets), 3, 0, group.num_sources)


def _crop(x: Tensor, dim: int, first: int, last: int) -> Tensor:
    """Some places of a dimension, unless it is there to be broadcast."""
    return x if x.size(dim) == 1 else x.narrow(dim, first, last - first)


def _both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first & second


def _length_mask(graph: CompleteGraph, device: torch.device) -> Tensor | None:
    """Which targets and sources are real, broadcastable to `[B, 1, N, M]`."""
    mask = None
    for lengths, places in (
        (graph.source_lengths, torch.arange(graph.num_sources, device=device)),
        (graph.target_lengths, torch.arange(graph.num_targets, device=device).unsqueeze(1)),
    ):
        if lengths is not None:
            mask = _both(mask, places < lengths.to(device).reshape(-1, 1, 1, 1))
    return mask
