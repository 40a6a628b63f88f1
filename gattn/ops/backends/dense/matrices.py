"""Attention on complete graphs whose score or distribution no kernel for tiles knows.

Weights are matrices for a few targets at a time, with the sources that these see, and are computed again in the
backward pass if there are many; on CPUs, additive scores are computed by the kernels for lists, with a short list of
pairs each time. Elements of a ragged batch are computed one after another, without their padding.

Here, calls have one batch dimension, scores that are folded, and biases and masks broadcastable to `[B, H, N, M]`.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple, TypeGuard, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from gattn.bias import Bias
from gattn.distributions import is_plain_softmax
from gattn.graphs import CompleteGraph
from gattn.ops import reference
from gattn.ops.backends.cpu import matrix, pairs
from gattn.ops.backends.dense.elements import elements_of
from gattn.ops.backends.dense.flash import by_pytorch, is_packed_flash, packed_flash
from gattn.ops.call import Call, Result
from gattn.ops.chunks import chunk_sizes, recomputed
from gattn.scores import DotScore, Score, says
from gattn.torch_private import is_exporting, statically_known_true

__all__ = ["attention", "both", "has_fused", "has_products", "is_for_lists", "length_mask"]

#: The logits, or channels of a score's hidden layer, that are computed at a time.
_CHUNK = 2**20

#: With more channels of all pairs than this, what kernels keep for the backward pass (2 bits or more for each) is not
#: kept either; nor an eighth as many logits.
_MOST_KEPT = 2**28

#: As many targets of a window are computed together as one of them sees sources, within these bounds.
_TOGETHER = (32, 128)


class _Part(NamedTuple):
    """What of a graph or block is computed, beside tensors."""

    front: torch.Size
    """The batch dimensions that users gave"""
    is_fused: bool
    """Whether PyTorch's fused attention may compute it"""
    num_targets: int
    offset: int
    """The position of the graph's or block's target 0 among its sources"""
    first_target: int = 0
    """The first target's place in its graph or block, in whose places a `Bias` is given; and the first source's"""
    first_source: int = 0

    @property
    def position(self) -> int:
        """The position of the first target among the sources of this part."""
        return self.offset + self.first_target - self.first_source


def has_products(score: Score) -> TypeGuard[DotScore]:
    """Whether a score is computed from dot products; a subclass with another formula is not."""
    return isinstance(score, DotScore) and says(score, "family", "logits") is not None


def attention(call: Call, front: torch.Size, may_fuse: bool = True) -> Result:
    """Output `[B, N, H, V]`, weights `[B, H, N, M]` (for a packed graph, of each block), and the log-sum-exp.

    Args:
        call: The call.
        front: The batch dimensions that users gave, which may be none or two.
        may_fuse: Whether PyTorch's fused attention may be called. (default: `True`)
    """
    graph, batch = call.graph, call.value.size(0)
    assert isinstance(graph, CompleteGraph)
    n, m = graph.num_targets, graph.num_sources
    is_softmax = is_plain_softmax(call.distribution)
    is_fused = may_fuse and is_softmax and has_fused(call)
    if is_fused and is_packed_flash(call):
        return Result(packed_flash(call))
    bias: Any = call.bias.of_graph(graph) if isinstance(call.bias, Bias) else call.bias
    elements = elements_of(graph, batch)
    if elements is None or (graph.blocks is None and (call.weights or not is_softmax)):  # what weights may depend on
        offset = graph.offset(n, m)
        bias = bias.of_group(None, n, m, offset) if isinstance(bias, Bias) else bias
        mask = both(call.mask, length_mask(graph, call.value.device))
        return _element(call._replace(bias=bias, mask=mask), _Part(front, is_fused, n, offset))
    results: list[Result] = []  # and with what lies between elements
    outs: list[Result] = []
    end = 0
    targets, sources = [x[:2] for x in elements], [x[2:4] for x in elements]
    queries = [None] * len(elements) if call.query is None else _pieces(call.query, targets)
    pieces = zip(elements, queries, _pieces(call.key, sources), _pieces(call.value, sources), strict=True)
    for place, ((first, count, _, size, offset), query, key, value) in enumerate(pieces):
        if isinstance(bias, Bias):
            of_pairs: Any = bias.of_group((place,), count, size, offset)
        else:
            of_pairs = _of_element(bias, place, count, size)
        mask = _of_element(call.mask, place, count, size)
        of_element = call._replace(query=query, key=key, value=value, bias=of_pairs, mask=mask)
        results.append(_element(of_element, _Part(front, is_fused, count, offset)))
        if first > end:  # not a product with that, which PyTorch 2.11 cannot compile with open sizes
            outs.append(_nothing(call, 1, first - end))
        outs.append(results[-1])
        end = first + count
    outs.append(_nothing(call, 1, batch * n - end))
    out, log_sum = (
        torch.cat(x, 1).unflatten(1, (batch, n)).squeeze(0) if x else None
        for x in ([result.out for result in outs], [x.log_sum for x in outs if x.log_sum is not None])
    )
    assert out is not None
    if not call.weights:
        return Result(out, None, log_sum)
    assert graph.blocks is not None
    weights_of_all = [result.weights for result in results]
    nothing = [call.value.new_zeros(0, call.heads, *size) for size in graph.blocks]
    weights = [torch.cat([x, *weights_of_all[place :: len(nothing)]]) for place, x in enumerate(nothing)]
    return Result(out, weights, log_sum)


def _pieces(x: Tensor, places: list[Any]) -> list[Tensor]:
    """The nodes of each element, `[1, N, ...]`, given its first one and their number."""
    ends = [first + count for first, count in places]
    gaps = [first - end for (first, _), end in zip(places, [0, *ends], strict=False)]
    sizes = [size for gap, (_, count) in zip(gaps, places, strict=True) for size in (gap, count)]
    x = x.flatten(0, 1).unsqueeze(0)
    return _split(x, [*sizes, x.size(1) - (ends[-1] if ends else 0)], 1)[1::2]


def _of_element(x: Tensor | None, place: int, num_targets: int, num_sources: int) -> Tensor | None:
    """The part of a bias or mask that belongs to an element, without padding."""
    return None if x is None else x[place % x.size(0)][None, :, :num_targets, :num_sources]


def _nothing(call: Call, batch: int, num_targets: int) -> Result:
    """The result of so many targets that see nothing; its gradients are zeros."""
    of_bias = call.bias.tensors() if isinstance(call.bias, Bias) else (call.bias,)
    nothing = sum(x[:0].sum() for x in (call.query, call.key, call.value, *of_bias) if x is not None)
    out = call.value.new_zeros(batch, num_targets, call.heads, call.value.size(-1)) + nothing
    return Result(out, None, out.new_full(out.shape[:-1], -torch.inf) if call.log_sum else None)


def is_for_lists(call: Call) -> bool:
    """Whether kernels for lists compute a plain softmax, some targets at a time."""
    is_softmax = is_plain_softmax(call.distribution) and not (call.weights or call.log_sum)
    return is_softmax and not has_products(call.score) and pairs.can_attend(call)


def has_fused(call: Call) -> bool:
    """Whether PyTorch's fused attention computes this if it is a plain softmax: of scaled dot products."""
    if call.log_sum or call.weights or isinstance(call.bias, Bias) or not has_products(call.score):
        return False
    return call.score.is_product and call.key.size(-1) > 0


def _element(call: Call, part: _Part) -> Result:
    """The result for targets and sources that see each other."""
    graph, n, m, batch = cast(CompleteGraph, call.graph), part.num_targets, call.key.size(1), call.value.size(0)
    is_softmax = is_plain_softmax(call.distribution)
    # Other distributions may have something of their own for each target.
    knows_rows = is_softmax or call.law is not None
    if knows_rows and not is_exporting() and batch * n * m == 0:
        nothing = _nothing(call, batch, n)
        return nothing._replace(weights=call.value.new_zeros(batch, call.heads, n, m) + nothing.out.sum())
    by_lists, left, right = is_for_lists(call), *graph.reach
    seen = m if left is None or right is None else left + right + 1
    is_narrow = not is_exporting() and 2 * (seen + _TOGETHER[1] * (not by_lists)) <= m
    if part.is_fused and not is_narrow:
        return Result(_fused(call, part))

    def compute(call: Call, part: _Part) -> Result:
        if knows_rows and call.key.size(1) == 0:
            return _nothing(call, batch, part.num_targets)
        return Result(_by_lists(call, part, is_narrow)) if by_lists else _by_matrix(call, part)

    if is_exporting() or not knows_rows:  # decisions must not depend on dynamic sizes
        return compute(call, part)
    held = batch * min(seen, m) * (call.heads if has_products(call.score) else call.key[0, 0].numel())
    if is_narrow:  # lists of pairs of one size are kept
        size = pairs.counts(n, seen, batch)[0] if by_lists else min(max(seen, _TOGETHER[0]), _TOGETHER[1])
        counts = [size] * (n // size) + ([n % size] if n % size else [])
    else:
        counts = pairs.counts(n, m, batch) if by_lists else chunk_sizes(n, max(_CHUNK // max(held, 1), 1))
    some = _by_targets(call, part, counts)
    if not call.weights:
        some = [_cropped(*x) for x in some]
    is_kept = n * held <= (_MOST_KEPT if by_lists else _MOST_KEPT // 8)
    recomputes = len(counts) > 1 and torch.is_grad_enabled() and not (call.weights or is_kept)
    reads = _read_by(call) if recomputes else []
    results = [recomputed(compute, *x, reads=reads) if recomputes else compute(*x) for x in some]
    outs, weights, log_sums = zip(*results, strict=True)
    return Result(
        torch.cat(outs, 1),
        torch.cat(weights, 2) if call.weights else None,
        torch.cat(log_sums, 1) if call.log_sum else None,
    )


def _by_lists(call: Call, part: _Part, is_narrow: bool) -> Tensor:
    """The output of a softmax by the kernels for lists of edges."""
    left, right = cast(CompleteGraph, call.graph).reach
    reach = None
    if is_narrow and left is not None and right is not None:
        reach = part.position - left, part.position + right
    mask = call.mask if reach else _seen(call, part)
    return pairs.attend(call._replace(bias=_bias_of(call, part), mask=mask), part.num_targets, reach)


def _by_matrix(call: Call, part: _Part) -> Result:
    """The result by a matrix of all logits."""
    logits = _logits(call, part)
    weights = _weights(call, logits, part.front)
    dropped = F.dropout(weights, call.dropout) if call.dropout else weights
    found = (dropped if call.weights == "dropped" else weights) if call.weights else None
    log_sum = reference.log_sum_of_rows(logits) if call.log_sum else None
    return Result(reference.weighted(dropped, call.value), found, log_sum)


def _read_by(call: Call) -> list[Tensor | None]:
    """The tensors that may not be edited before they are read again; in compiled code, the compiler notices."""
    if torch.compiler.is_compiling():
        return []
    of_bias = vars(call.bias).values() if isinstance(call.bias, Bias) else (call.bias,)
    tensors = (x for x in of_bias if isinstance(x, Tensor))
    return [call.query, call.key, call.value, call.mask, *call.score.tensors(), *tensors]


def _fused(call: Call, part: _Part) -> Tensor:
    """PyTorch's fused attention."""
    query, score, bias, mask, graph, offset = call.query, call.score, call.bias, call.mask, call.graph, part.offset
    assert query is not None
    assert isinstance(score, DotScore)
    assert isinstance(graph, CompleteGraph)
    assert not isinstance(bias, Bias)
    is_causal = graph.causal and graph.window is None and bias is None and mask is None
    if is_causal and is_exporting():
        is_causal = statically_known_true(offset == 0)
    elif is_causal and (offset != 0 or part.num_targets != call.key.size(1)):
        is_causal = False  # and not what a comparison of open sizes is in compiled code
    if not is_causal:
        mask = _seen(call, part)
    if query.device.type == "cpu" and not torch.compiler.is_compiling() and query.numel() * call.value.numel() == 0:
        # PyTorch's kernels divide by the sizes, and in 2.11 end the process.
        return _nothing(call, *query.shape[:2]).out
    return by_pytorch(query, call.key, call.value, score.factor(call.channels), bias, mask, call.dropout, is_causal)


def _by_targets(call: Call, part: _Part, counts: list[int]) -> list[tuple[Call, _Part]]:
    """A part, divided into so many targets."""
    queries = [None] * len(counts) if call.query is None else _split(call.query, counts, 1)

    def parts(x: Any) -> list[Any]:
        return _split(x, counts, 2) if isinstance(x, Tensor) and x.size(2) != 1 else [x] * len(counts)

    rows = zip(queries, parts(call.bias), parts(call.mask), counts, accumulate(counts, initial=0), strict=False)
    return [
        (call._replace(query=q, bias=b, mask=m), part._replace(num_targets=n, first_target=first))
        for q, b, m, n, first in rows
    ]


def _cropped(call: Call, part: _Part) -> tuple[Call, _Part]:
    """A part without the sources that none of its targets sees."""
    (left, right), m = cast(CompleteGraph, call.graph).reach, call.key.size(1)
    position = part.offset + part.first_target
    first = 0 if left is None else min(max(position - left, 0), m)
    last = m if right is None else min(max(position + part.num_targets + right, first), m)
    if (first, last) == (0, m):
        return call, part
    bias, mask = (
        x[..., first:last] if isinstance(x, Tensor) and x.size(3) != 1 else cast(Any, x) for x in (call.bias, call.mask)
    )
    key, value = call.key[:, first:last], call.value[:, first:last]
    return call._replace(key=key, value=value, bias=bias, mask=mask), part._replace(first_source=first)


def _seen(call: Call, part: _Part) -> Tensor | None:
    """Which sources the targets see, broadcastable to `[B, H, N, M]`; `None` if all."""
    graph = cast(CompleteGraph, call.graph)
    if graph.reach == (None, None):
        return call.mask
    visible = graph.visible(part.num_targets, call.key.size(1), part.position, call.key.device)
    return both(call.mask, visible[None, None])


def _bias_of(call: Call, part: _Part) -> Tensor | None:
    """The bias of all targets of a part, broadcastable to `[B, H, N, M]`."""
    if not isinstance(call.bias, Bias):
        return call.bias
    targets = slice(part.first_target, part.first_target + part.num_targets)
    return call.bias.whole_part(targets, slice(part.first_source, part.first_source + call.key.size(1)))


def _split(x: Tensor, sizes: list[int], dim: int) -> list[Tensor]:
    if torch.compiler.is_compiling():  # which cannot recompute a split in the backward pass
        return [x.narrow(dim, start, size) for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False)]
    return list(x.split(sizes, dim))


def _logits(call: Call, part: _Part) -> Tensor:
    """The logits of all targets, `[B, H, N, M]`: minus infinity where they do not see a source."""
    query, key, score, heads = call.query, call.key, call.score, call.heads
    if has_products(score):
        assert query is not None
        logits = reference.products(query, key, score.factor(call.channels), score.negative_slope, score.clamp)
    else:
        if score.grouped and query is not None:
            key = reference.repeat_heads(key, heads)
        if score.scalar:
            query, key = None if query is None else query.squeeze(-1), key.squeeze(-1)
        shape = (key.size(0), part.num_targets, key.size(1), heads)
        query = None if query is None else query.unsqueeze(2)
        logits = reference.broadcast_logits(query, key.unsqueeze(1), score, shape).permute(0, 3, 1, 2)
    if (bias := _bias_of(call, part)) is not None:
        logits = logits + bias
    mask = _seen(call, part)
    return logits if mask is None else logits.masked_fill(~mask, -torch.inf)


def _weights(call: Call, logits: Tensor, front: torch.Size) -> Tensor:
    """The weights of a call's distribution, in the shape of the logits, `[B, H, N, M]`."""
    distribution, law = call.distribution, call.law
    if is_plain_softmax(distribution):
        return reference.softmax_of_rows(logits)
    if law is not None and matrix.can_weigh(logits, law):
        return matrix.weights(logits, law)
    if says(distribution, "of_matrix", "weights") is not None:
        weights = distribution.of_matrix(logits)
        if weights is not None:
            return weights
    num_targets, num_sources = logits.shape[2:]
    target = torch.arange(num_targets, device=logits.device).repeat_interleave(num_sources)
    source = torch.arange(num_sources, device=logits.device).repeat(num_targets)
    edges = logits.flatten(2).transpose(1, 2).reshape(*front, target.numel(), logits.size(1))
    weights = reference.weights_of(distribution.with_sources(source), edges, target, num_targets)
    return weights.reshape(logits.size(0), target.numel(), logits.size(1)).transpose(1, 2).reshape(logits.shape)


def both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """What two masks have in common, if there are two."""
    if first is None or second is None:
        return second if first is None else first
    return first & second


def length_mask(graph: CompleteGraph, device: torch.device) -> Tensor | None:
    """Which targets and sources are real, broadcastable to `[B, 1, N, M]`."""
    mask = None
    for lengths, size, shape in (
        (graph.source_lengths, graph.num_sources, (1, -1)),
        (graph.target_lengths, graph.num_targets, (-1, 1)),
    ):
        if lengths is not None:
            places = torch.arange(size, device=device).reshape(shape)
            mask = both(mask, places < lengths.to(device).reshape(-1, 1, 1, 1))
    return mask
