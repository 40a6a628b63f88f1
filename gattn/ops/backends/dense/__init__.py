"""Attention on complete graphs without their edges: there is not a list of N·M edges, and no `[N, M, C]` tensor.

Dot products use PyTorch's `scaled_dot_product_attention`, with its own flag for causal graphs, so that its fused
kernels are used. Other scores, clamped products among them, are computed for a few targets at a time, and again in the
backward pass; on CPUs, additive ones by the kernels for lists, with a short list of pairs each time. A window is
computed as blocks of targets, each with the sources that its targets see. In a ragged batch, elements of the same
lengths are computed together, and padding is never computed.

Inside, tensors have one batch dimension and nodes come before heads: query `[B, N, H, C]`, key `[B, M, H, C]` (`[B, N,
H]`, `[B, M, H]` for a scalar score), value `[B, M, H, C]`, bias and mask broadcastable to `[B, H, N, M]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from gattn.autocast import is_autocast, without_autocast
from gattn.bias import Bias, Term
from gattn.distributions import Distribution, is_plain_softmax, law_of
from gattn.errors import InputError
from gattn.graphs import CompleteGraph
from gattn.ops.backends.base import Backend, Result
from gattn.ops.backends.cpu import matrix, pairs
from gattn.ops.backends.dense import linear, tile_operator, tiles
from gattn.ops.backends.dense.dot_products import dot_product_attention, is_packed_flash, packed_flash
from gattn.ops.backends.dense.ragged import Group, crop, elements_of, grouped, of_group
from gattn.ops.call import Call, compute_dtype
from gattn.ops.chunks import chunk_sizes, recomputed
from gattn.ops.custom_parts import as_logits
from gattn.ops.operator import sink_of
from gattn.ops.plans import Given, Plan
from gattn.ops.reference import broadcast_logits, repeat_heads, weights_of
from gattn.ops.sharded import complete_by_heads, is_distributed
from gattn.scores import DotScore, Score, family_of, says
from gattn.torch_private import is_context_parallel, is_exporting, statically_known_true

__all__ = ["Dense", "attention"]

#: Scores that no fused kernel computes have this many logits, or channels of their hidden layer, at a time.
_CHUNK = 2**20

#: With more channels of all pairs than this, what kernels keep for the backward pass (2 bits or more for each) is not
#: kept either.
_MOST_KEPT = 2**28

#: With this many logits or fewer, a tensor of them all costs less than to avoid it.
_SMALL = 2**16

#: The number of targets in a block of a window: about as many as the sources that one of them sees, within these
#: bounds.
_BLOCK = (32, 128)


class Dense(Backend):
    """Complete graphs, without a list of their edges."""

    name = "dense"
    devices = None

    def refuses(self, call: Call) -> str | None:
        """See `Backend.refuses`."""
        graph, score, distribution = call.graph, call.score, call.distribution
        if not isinstance(graph, CompleteGraph):  # this backend serves only this kind of graph
            return "it serves complete graphs, not lists of edges"
        if call.edge is not None or call.edge_value is not None:
            return "edge and edge_value have one entry per edge"
        if not says(score, "broadcasts", "logits"):
            return f"it needs a score whose logits broadcast, and {type(score).__name__} does not declare it"
        if graph.blocks is not None and (graph.source_lengths is not None or graph.target_lengths is not None):
            return "packed graphs with lengths are computed edge by edge"
        if graph.blocks is not None and not is_plain_softmax(distribution) and not _is_linear(call):
            return f"on packed graphs it supports the plain softmax and linear attention, not {distribution}"
        if not says(distribution, "respects_infinity", "weights"):
            return f"it supports gattn's own distributions, not {distribution}"
        return None

    def yields(self, call: Call) -> bool:
        """See `Backend.yields`: small blocks of different sizes cost more calls than kernels for lists need in all."""
        graph = call.graph
        assert isinstance(graph, CompleteGraph)
        if graph.blocks is not None and not is_plain_softmax(call.distribution):
            return graph.has_small_blocks or not linear.is_faster(graph, max(call.channels, call.value.size(-1)))
        has_more = call.bias is not None or call.mask is not None or call.log_sum
        is_simple = graph.has_small_blocks and not has_more and not torch.compiler.is_compiling()
        return is_simple and call.value.device.type == "cpu"

    def logits(self, call: Call) -> Any:
        """See `Backend.logits`."""
        graph = call.graph
        assert isinstance(graph, CompleteGraph)
        if graph.blocks is not None:
            return super().logits(call)
        logits = self._result(as_logits(call)).weights
        n, m, device = call.num_targets, call.key.size(-3), call.key.device
        visible = _both(_length_mask(graph, device), graph.visible(n, m, graph.offset(n, m), device)[None, None])
        assert visible is not None
        visible = visible.view(*(call.batch if visible.size(0) != 1 else ()), *visible.shape[1:])
        logits = logits.masked_fill(~visible, -torch.inf)
        return logits if call.mask is None else logits.masked_fill(~call.mask, -torch.inf)

    def log_sum(self, call: Call) -> Tensor:
        """See `Backend.log_sum`."""
        if call.graph.blocks is not None:
            return super().log_sum(call)
        logits = self.logits(call)
        log_sum = _log_sum(logits.reshape(math.prod(call.batch), *logits.shape[-3:]))
        return log_sum.view(*call.batch, call.num_targets, call.heads)

    def attend(self, call: Call) -> Result:
        """See `Backend.attend`."""
        if type(call.value) is not Tensor and is_distributed(call.value):
            return complete_by_heads(self._result, call)
        return self._result(call)

    def plan(self, call: Call, given: Given) -> Plan | None:
        """See `Backend.plan`: there is one for scaled dot products with a softmax and nothing else."""
        graph, score, dropout = call.graph, call.score, call.dropout
        more = [tensor for tensor in given.tensors[3:] if isinstance(tensor, Tensor)]
        if not isinstance(graph, CompleteGraph) or graph.window is not None or graph._offset is not None:
            return None
        if (
            given.edge_index is not None
            or not _is_dot(score)
            or score.folds
            or not is_plain_softmax(call.distribution)
            or len(call.batch) > 1
        ):
            return None
        if more or call.key.size(-1) == 0 or call.cast(call.dtype) is not call or is_distributed(call.value):
            return None
        causal = graph.causal
        scale = score.factor(call.channels)  # not the score, which may be changed

        def plan(given: Given) -> Tensor | None:
            query, key, value = given.tensors[:3]
            num_targets, num_sources = query.size(-3), key.size(-3)
            is_causal = causal and num_targets > 1  # the last target sees every source
            if (given.num_targets, given.num_sources, value.size(-3)) != (num_targets, num_sources, num_sources):
                return None
            if num_targets * num_sources == 0 or (is_causal and num_targets != num_sources):
                return None
            if is_autocast(value) or is_context_parallel():
                return None
            return dot_product_attention(query, key, value, scale, None, None, dropout, is_causal)

        return plan

    def _result(self, call: Call) -> Result:
        if not torch.compiler.is_compiling() and is_context_parallel():
            raise InputError(
                "PyTorch's context_parallel splits sequences without the knowledge of graphs, masks and positions, so "
                "gattn's layers would give wrong results inside it. Shard the graph instead: "
                "gattn.distributed.shard(gattn.CompleteGraph(...), mesh)."
            )
        graph = call.graph
        assert isinstance(graph, CompleteGraph)
        if call.weights in ("dropped", "only"):  # for which logits exist as a matrix
            call = call._replace(log_sum=False)
        for name, term in (("bias", call.bias), ("mask", call.mask)):
            if isinstance(term, Tensor):
                graph.expand(term, name, call.batch, call.heads)
        if (
            _is_dot(call.score) and not call.score.folds and not call.log_sum
        ):  # fused kernels compute half precision in float32 themselves
            call = call.cast(call.dtype)
        else:
            call = call.cast(call.compute)._replace(score=call.score.to(call.compute))
        out, weights = attention(call, graph)
        log_sum = None
        if call.log_sum:
            out, log_sum = _parted(out)
        if isinstance(weights, list):
            weights = [x.to(call.dtype) for x in weights]
        elif weights is not None:
            weights = weights.to(call.dtype)
        return Result(out.to(call.dtype), weights, log_sum)


def _is_dot(score: Score) -> TypeGuard[DotScore]:
    """Whether fused kernels can compute a score: the plain dot product."""
    return _has_products(score) and score.is_product


def _has_products(score: Score) -> TypeGuard[DotScore]:
    """Whether a score is computed from dot products; a subclass with another formula is not."""
    if type(score) is DotScore:  # by far the most frequent, and checked several times per call
        return "logits" not in vars(score)
    return isinstance(score, DotScore) and family_of(score, 1) is not None


def _is_linear(call: Call) -> bool:
    """Whether weights are products, so that sums over sources may come first, and nothing else is asked of them."""
    graph, law, score = call.graph, call.law, call.score
    if law is None or law.name != "identity" or not _has_products(score) or not score.is_product:
        return False
    if call.bias is not None or call.mask is not None or call.dropout > 0.0 or call.weights:
        return False
    assert isinstance(graph, CompleteGraph)
    if is_exporting() and (graph.causal or graph.blocks is not None):  # chunks depend on sizes
        return False
    return graph.window is None and (graph.is_uniform or elements_of(graph, math.prod(call.batch)) is not None)


class _Part(NamedTuple):
    """Targets and sources of one size, each of which sees what bias and mask leave."""

    query: Tensor | None
    """`[B, N, H, C]`; without C for a scalar score"""
    key: Tensor
    value: Tensor
    score: Score
    bias: Tensor | Bias | None
    """Broadcastable to `[B, H, N, M]`, like the mask; or that of the elements of this batch"""
    mask: Tensor | None
    num_targets: int
    dropout: float = 0.0
    log_sum: bool = False
    """Whether the log-sum-exp is requested; see `_joined`"""
    first_target: int = 0
    """The first target's place among those of the bias, if that is a `Bias`"""


def attention(call: Call, graph: CompleteGraph) -> tuple[Tensor, Any]:
    """Output `[..., N, H, C]`, and weights `[..., H, N, M]` if requested (a list with one per block of a packed graph).

    Args:
        call: A call whose tensors all have one type.
        graph: The call's graph.
    """
    query, key, value = call.query, call.key, call.value
    score, distribution, bias, mask = call.score, call.distribution, call.bias, call.mask
    dropout, with_weights = call.dropout, call.weights
    if score.scalar:
        query, key = None if query is None else query.squeeze(-1), key.squeeze(-1)
    front = value.shape[:-3]
    if bias is not None or mask is not None:
        one = front if graph.blocks is None else torch.Size()
        bias = bias.of_graph(graph) if isinstance(bias, Bias) else _with_one_batch(bias, one)
        mask = _with_one_batch(mask, one)
    if len(front) != 1:
        query = None if query is None else _nodes_in_one_batch(query, front)
        key, value = _nodes_in_one_batch(key, front), _nodes_in_one_batch(value, front)
    scale = getattr(score, "scale", None)
    if query is not None:
        query, key, score = score.folded(query, key)
    part = _Part(query, key, value, score, bias, mask, graph.num_targets, dropout, call.log_sum)
    weights: list[Tensor] = []
    with without_autocast(value):
        is_softmax = is_plain_softmax(distribution)
        if _is_linear(call) and (
            graph.blocks is not None
            or is_exporting()  # which must not compare sizes
            or linear.is_faster(graph, max(key.size(-1), value.size(-1)))
        ):
            assert query is not None
            assert isinstance(score, DotScore)
            assert call.law is not None
            normalize, eps = call.law.constants
            out = linear.attend(query, key, value, score.factor(key.size(-1)), bool(normalize), eps, graph)
        elif (found := _tiled(part, graph, call)) is not None:
            out, weights = found
        elif not is_softmax or with_weights in ("dropped", "only"):
            # The fused kernels support only the softmax, and do not return their weights.
            weights = _matrices(_alpha if is_softmax else _logits, part, graph)
            if not is_softmax:
                weights = [_distribute(distribution, weights[0], front)]
            dropped = [F.dropout(x, dropout) for x in weights] if dropout > 0.0 else weights
            outputs = [_weighted(x, v) for x, v in zip(dropped, _blocks(value, graph, 1), strict=True)]
            out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1) if outputs else _zeros(part)
            weights = dropped if with_weights == "dropped" else weights
        else:
            out = _output(part, graph)
            if isinstance(scale, Tensor):  # PyTorch's fused kernel on CPUs loses its NaN
                lost = scale.detach().to(out.dtype).unsqueeze(-1)
                if graph.target_lengths is not None:
                    places = torch.arange(out.size(1), device=out.device).view(-1, 1, 1)
                    lengths = graph.target_lengths.to(out.device).view(-1, 1, 1, 1)
                    lost = lost.masked_fill(places >= lengths, 0.0)
                out = torch.add(out, lost, alpha=0)
            if with_weights:
                weights = _matrices(_alpha, part, graph)
    if len(front) != 1:
        out, *weights = [x.reshape(*front, *x.shape[1:]) for x in (out, *weights)]
    if not with_weights:
        return out, None
    return out, weights[0] if graph.blocks is None else list(weights)  # PyTorch 2.11's compiler makes a tuple of it


def _tiled(part: _Part, graph: CompleteGraph, call: Call) -> tuple[Tensor, list[Tensor]] | None:
    """Output and weights, computed by tiles of pairs; `None` if these kernels cannot, or others are as fast."""
    query, key, value, score, bias, mask, num_targets, dropout, log_sum, _ = part
    law = call.law
    if not _has_products(score) or query is None or law is None:
        return None
    sink = None if law.sink is None else sink_of(law.sink, call)
    of_bias = bias.tensors() if isinstance(bias, Bias) else (bias,)
    is_compiled = torch.compiler.is_compiling() and not is_exporting()
    can_attend = tile_operator.can_attend if is_compiled else tiles.can_attend
    if not can_attend((query, key, value, mask, sink, *of_bias), law):
        return None
    term: Tensor | Term | None
    if isinstance(bias, Bias):
        assert isinstance(call.bias, Bias)
        term = call.bias.term(graph)
        if term is None:
            return None
    else:
        is_plain = is_plain_softmax(call.distribution) and _is_dot(score) and graph.is_uniform and graph.window is None
        is_plain = is_plain and not (log_sum or call.weights) and (not graph.causal or num_targets == graph.num_sources)
        is_dropped = is_compiled and dropout > 0.0
        if is_plain and not (is_dropped or tiles.is_faster(query, key, value, bias, mask, dropout)):
            return None
        term = bias
    batch, num_sources = key.shape[:2]
    known = elements_of(graph, batch)
    if known is None and not graph.is_uniform:
        return None
    offset, left, right = graph.offset(num_targets, num_sources), *graph.reach
    sizes = graph.blocks if graph.blocks is not None else ((num_targets, num_sources),)
    count = batch * len(sizes)
    term = _of_elements(term, count) if isinstance(term, Tensor) else term
    mask = None if mask is None else _of_elements(mask, count)
    rule = tiles.Rule(
        scale=score.factor(key.size(-1)),
        slope=score.negative_slope,
        clamp=math.inf if score.clamp is None else score.clamp,
        law=law._replace(sink=None),
        left=left,
        right=right,
        elements=(),
        dropout=dropout,
        weights=call.weights,
    )
    if is_compiled:
        found = tile_operator.attend(query, key, value, term, mask, sink, rule, offset, graph.blocks)
    else:
        places = term.places if isinstance(term, Term) else ((0, 0),)
        elements, num_weights = tiles.elements_of(known, batch, num_targets, num_sources, offset, places), 0
        if call.weights:
            of_all = sizes[0] if graph.blocks is None else None
            elements, num_weights = tiles.with_matrices(elements, query.size(2), of_all, len(sizes))
        rule = rule._replace(elements=elements)
        found = tiles.attend(query, key, value, term, mask, sink, rule, num_weights)
    out, log_sums, in_a_row = found
    out = _joined(out, log_sums) if log_sum else out
    if in_a_row is None:
        return out, []
    front = batch, query.size(2)
    if len(sizes) == 1:
        return out, [in_a_row.view(*front, *sizes[0])]
    of_blocks = in_a_row.split([math.prod(front) * n * m for n, m in sizes])
    return out, [x.view(*front, *size) for x, size in zip(of_blocks, sizes, strict=True)]


def _of_elements(x: Tensor, count: int) -> Tensor:
    """A bias or mask with an entry for each element, or one for all."""
    if x.size(0) in (1, count):
        return x
    return x[[place % x.size(0) for place in range(count)]]


def _nodes_in_one_batch(x: Tensor, front: torch.Size) -> Tensor:
    """The nodes' `[..., N, ...]` as `[B, N, ...]`."""
    return x.reshape(math.prod(front), *x.shape[len(front) :])


def _with_one_batch(x: Tensor | None, front: torch.Size) -> Tensor | None:
    if x is None:
        return None
    if len(front) > 1 and x.dim() > 3:
        x = x.expand(*front, *x.shape[-3:]).flatten(0, 1)
    return x.reshape((1,) * (4 - x.dim()) + tuple(x.shape))


def _output(part: _Part, graph: CompleteGraph) -> Tensor:
    """The output, `[B, N, H, C]`."""
    query, key, value, score, bias, mask, num_targets, dropout, log_sum, _ = part
    batch, offset = value.size(0), graph.offset(num_targets, graph.num_sources)
    if graph.is_uniform:
        return _uniform(part._replace(bias=_of_all(part, graph)), offset, graph)
    if (
        not (log_sum or isinstance(bias, Bias))
        and _is_dot(score)
        and is_packed_flash(query, key, value, graph, bias, mask, dropout)
    ):
        return packed_flash(query, key, value, graph, score.factor(key.size(-1)))
    elements = elements_of(graph, batch)
    if elements is None:
        mask = _both(mask, _length_mask(graph, value.device))
        return _uniform(part._replace(bias=_of_all(part, graph), mask=mask), offset, graph)
    if not elements:
        return _zeros(part)
    targets, parts = _by_groups(part, graph, elements)
    outputs = [_uniform(some, group.offset, graph).flatten(0, 1) for group, some in parts]
    return torch.unflatten(targets.put(outputs), 0, (batch, num_targets))


def _by_groups(part: _Part, graph: CompleteGraph, elements: Any) -> tuple[Any, Iterator[tuple[Group, _Part]]]:
    """The places of targets, and groups of elements of one size with their part of the call."""
    query, key, value, batch = part.query, part.key, part.value, part.value.size(0)
    ragged = grouped.__wrapped__ if torch.compiler.is_compiling() else grouped
    targets, sources, groups = ragged(elements, batch * part.num_targets, batch * graph.num_sources)
    queries = [None] * len(groups) if query is None else targets.take(query.flatten(0, 1))
    keys, values = (sources.take(x.flatten(0, 1)) for x in (key, value))

    def parts() -> Iterator[tuple[Group, _Part]]:
        for group, q, k, v in zip(groups, queries, keys, values, strict=True):
            count = len(group.elements)
            q = None if q is None else torch.unflatten(q, 0, (count, group.num_targets))
            k, v = (torch.unflatten(x, 0, (count, group.num_sources)) for x in (k, v))
            b, m = _of_group(part.bias, group), of_group(part.mask, group)
            yield group, part._replace(query=q, key=k, value=v, bias=b, mask=m, num_targets=group.num_targets)

    return targets, parts()


def _matrices(function: Callable[[_Part], Tensor], part: _Part, graph: CompleteGraph) -> list[Tensor]:
    """What a function computes per target, weights before dropout or logits, for all: `[B, H, N, M]` by block."""

    def matrix(part: _Part) -> Tensor:
        n, m, device = part.num_targets, part.key.size(1), part.key.device
        if graph.reach != (None, None):
            visible = graph.visible(n, m, graph.offset(n, m), device)[None, None]
            part = part._replace(mask=_both(part.mask, visible))
        if _has_products(part.score):  # which needs nothing larger than these matrices
            return function(part)
        return torch.cat(_by_targets(function, part), 2)

    if graph.blocks is None:
        mask = _both(part.mask, _length_mask(graph, part.key.device))
        return [matrix(part._replace(bias=_of_all(part, graph), mask=mask))]
    batch = part.key.size(0)
    if batch == 0:
        nothing = _zeros(part).sum()
        return [part.value.new_zeros(0, _num_heads(part), *sizes) + nothing for sizes in graph.blocks]
    found: dict[int, Tensor] = {}
    elements = elements_of(graph, batch)
    for group, some in _by_groups(part, graph, elements)[1] if elements else ():
        found.update(zip(group.elements, matrix(some).split(1), strict=True))
    count = len(graph.blocks)
    if batch == 1:
        return [found[block] for block in range(count)]
    return [torch.cat([found[block + element * count] for element in range(batch)]) for block in range(count)]


def _of_all(part: _Part, graph: CompleteGraph) -> Tensor | Bias | None:
    """The bias of all elements of a batch."""
    if not isinstance(part.bias, Bias):
        return part.bias
    sizes = part.num_targets, graph.num_sources
    return part.bias.of_group(None, *sizes, graph.offset(*sizes))


def _of_group(bias: Tensor | Bias | None, group: Group) -> Tensor | Bias | None:
    """The part of a bias that belongs to a group's elements."""
    return bias.of_group(*group) if isinstance(bias, Bias) else of_group(bias, group)


def _blocks(x: Tensor, graph: CompleteGraph, side: int) -> tuple[Tensor, ...]:
    """The nodes of each block of a packed graph; for other graphs, all nodes."""
    return (x,) if graph.blocks is None else x.split([sizes[side] for sizes in graph.blocks], 1)


def _uniform(part: _Part, offset: int, graph: CompleteGraph) -> Tensor:
    """The output for elements of one size, where target i has the position of source i + offset."""
    query, key, value, score, bias, mask, num_targets, dropout, log_sum, _ = part
    left, right = graph.reach
    plain = bias is None and mask is None and not log_sum
    if isinstance(bias, Bias) and (
        is_exporting() or (not log_sum and value.size(0) * num_targets * key.size(1) * _num_heads(part) <= _SMALL)
    ):
        bias = bias.whole_part(slice(0, num_targets), slice(0, key.size(1)))
        part = part._replace(bias=bias)
    if is_exporting():  # decisions must not depend on dynamic sizes
        if plain and left is None and right == 0 and statically_known_true(offset == 0) and _is_dot(score):
            assert query is not None
            scale = score.factor(key.size(-1))
            return dot_product_attention(query, key, value, scale, None, None, dropout, causal=True)
        if (left, right) != (None, None):
            mask = _both(mask, graph.visible(num_targets, key.size(1), offset, key.device)[None, None])
        return _rectangle(part._replace(mask=mask))
    # Sources that no target sees are left out.
    first = 0 if left is None else min(max(offset - left, 0), key.size(1))
    last = key.size(1) if right is None else min(max(num_targets + offset + right, first), key.size(1))
    if (first, last) != (0, key.size(1)) and not isinstance(bias, Bias):
        key, value, offset = key[:, first:last], value[:, first:last], offset - first
        bias, mask = (None if x is None else crop(x, 3, first, last) for x in (bias, mask))
    num_sources = key.size(1)
    if num_targets == 0 or last == first:
        return _zeros(part)
    if left is not None and left >= num_targets - 1 + offset:
        left = None
    if right is not None and right >= num_sources - 1 - offset:
        right = None

    is_square = left is None and right == 0 and offset <= 0 and num_sources == num_targets + offset
    if plain and is_square and _is_dot(score) and key.size(-1) > 0:
        assert query is not None
        query, scale = query[:, -offset:], score.factor(key.size(-1))
        out = dot_product_attention(query, key, value, scale, None, None, dropout, causal=True)
        return out if offset == 0 else F.pad(out, (0, 0, 0, 0, -offset, 0))
    if left is not None and right is not None:
        span = _block_targets(left, right) + left + right
        if 2 * span <= num_sources:
            return _banded(part._replace(key=key, value=value, bias=bias, mask=mask), offset, left, right)
    part = part._replace(key=key, value=value, bias=bias, mask=mask)
    if left is not None or right is not None:
        mask = _both(mask, graph.visible(num_targets, num_sources, offset, key.device)[None, None])
    return _rectangle(part._replace(mask=mask))


def _joined(out: Tensor, log_sum: Tensor) -> Tensor:
    """Output and log-sum-exp as channels of one tensor; in the last one, zero means that a target sees nothing."""
    seen = log_sum != -torch.inf
    return torch.cat([out, log_sum.masked_fill(~seen, 0.0).unsqueeze(-1), seen.to(out.dtype).unsqueeze(-1)], -1)


def _parted(joined: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `_joined`."""
    return joined[..., :-2], joined[..., -2].masked_fill(joined[..., -1].detach() == 0, -torch.inf)


def _rectangle(part: _Part) -> Tensor:
    """The output if every target sees every source that the mask allows."""
    query, key, value, score, bias, mask, _, dropout, log_sum, _ = part
    if _is_dot(score) and key.size(-1) > 0 and not log_sum and not isinstance(bias, Bias):
        assert query is not None
        return dot_product_attention(query, key, value, score.factor(key.size(-1)), bias, mask, dropout)

    if not _has_products(score) and not log_sum and pairs.can_attend(query, key, value, score):
        keeps = part.num_targets * key.numel() <= _MOST_KEPT
        counts = pairs.counts(part.num_targets, key.size(1), key.size(0))
        return torch.cat(_by_targets(_by_pairs, part, counts, keeps), 1)

    def output(part: _Part) -> Tensor:
        logits = _logits(part)
        weights = _softmax(logits, part)
        out = _weighted(F.dropout(weights, dropout) if dropout else weights, value)
        return _joined(out, _log_sum(logits)) if log_sum else out

    return torch.cat(_by_targets(output, part), 1)


def _by_pairs(part: _Part) -> Tensor:
    return pairs.attend(*part[:4], _bias_of(part), *part[5:8])


def _bias_of(part: _Part) -> Tensor | None:
    """The bias of all targets of a part, broadcastable to `[B, H, N, M]`."""
    if not isinstance(part.bias, Bias):
        return part.bias
    targets = slice(part.first_target, part.first_target + part.num_targets)
    return part.bias.whole_part(targets, slice(0, part.key.size(1)))


def _num_heads(part: _Part) -> int:
    return (part.key if part.query is None else part.query).size(2)


def _zeros(part: _Part) -> Tensor:
    """The output if there is nothing to attend to; its gradients are zeros."""
    query, key, value = part[:3]
    heads = _num_heads(part)
    of_bias = part.bias.tensors() if isinstance(part.bias, Bias) else (part.bias,)
    nothing = sum(x[:0].sum() for x in (query, key, value, *of_bias) if x is not None)
    return value.new_zeros(value.size(0), part.num_targets, heads, value.size(-1) + 2 * part.log_sum) + nothing


def _by_targets(
    function: Callable[[_Part], Tensor], part: _Part, counts: list[int] | None = None, keeps: bool = False
) -> list[Tensor]:
    """Calls a function for some targets at a time.

    Unless it `keeps` them, intermediate results are not kept for the backward pass, which computes them again.
    """
    if is_exporting():  # decisions must not depend on dynamic sizes
        return [function(part)]
    query, key = part.query, part.key
    if counts is None:
        held = key.numel()
        if query is not None and _has_products(part.score):
            held = math.prod(key.shape[:2]) * query.size(2)
        counts = chunk_sizes(part.num_targets, max(_CHUNK // max(held, 1), 1)) or [0]
    queries = [None] * len(counts) if query is None else _split(query, counts, 1)

    def parts(x: Any) -> list[Any]:
        return _split(x, counts, 2) if isinstance(x, Tensor) and x.size(2) != 1 else [x] * len(counts)

    results = []
    reads: list[Any] = []
    recomputes = len(counts) > 1 and torch.is_grad_enabled() and not keeps
    if recomputes and not torch.compiler.is_compiling():  # edits between the passes are the compiler's to notice
        of_bias = vars(part.bias).values() if isinstance(part.bias, Bias) else (part.bias,)
        reads = [*part[:3], part.mask, *part.score.tensors(), *(x for x in of_bias if isinstance(x, Tensor))]
    firsts = accumulate(counts, initial=0)
    for q, b, m, n, first in zip(queries, parts(part.bias), parts(part.mask), counts, firsts, strict=False):
        some = part._replace(query=q, bias=b, mask=m, num_targets=n, first_target=first)
        if recomputes:
            results.append(recomputed(function, some, reads=reads))
        else:
            results.append(function(some))
    return results


def _split(x: Tensor, sizes: list[int], dim: int) -> list[Tensor]:
    if torch.compiler.is_compiling():  # which cannot recompute a split in the backward pass
        return [x.narrow(dim, start, size) for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False)]
    return list(x.split(sizes, dim))


def _logits(part: _Part) -> Tensor:
    """The logits of all targets, `[B, H, N, M]`, with masked ones at minus infinity."""
    query, key, _, score, _, mask, count, *_ = part
    if _has_products(score):
        assert query is not None
        keys = repeat_heads(key, query.size(2)).to(compute_dtype(key.dtype))
        logits = query.to(keys.dtype).transpose(1, 2) @ keys.permute(0, 2, 3, 1) * score.factor(key.size(-1))
        if score.negative_slope != 1.0:
            logits = F.leaky_relu(logits, score.negative_slope)
        if score.clamp is not None:
            logits = logits.clamp(-score.clamp, score.clamp)
    else:
        if score.grouped and query is not None:
            key = repeat_heads(key, query.size(2))
        heads = (key if query is None else query).size(2)
        shape = (key.size(0), count, key.size(1), heads)
        query = None if query is None else query.unsqueeze(2)
        logits = broadcast_logits(query, key.unsqueeze(1), score, shape).permute(0, 3, 1, 2)
    if (bias := _bias_of(part)) is not None:
        logits = logits + bias
    return logits if mask is None else logits.masked_fill(~mask, -torch.inf)


def _log_sum(logits: Tensor) -> Tensor:
    """The log-sum-exp of each target, `[B, N, H]`; minus infinity, without gradients, if it sees nothing."""
    empty = (logits == -torch.inf).all(-1, keepdim=True)
    log_sum = logits.masked_fill(empty, 0.0).logsumexp(-1, keepdim=True).masked_fill(empty, -torch.inf)
    return log_sum.squeeze(-1).transpose(1, 2)


def _alpha(part: _Part) -> Tensor:
    """The softmax of `_logits`."""
    return _softmax(_logits(part), part)


def _softmax(logits: Tensor, part: _Part) -> Tensor:
    """The softmax of a part's logits; zeros for targets that see nothing."""
    if part.bias is None and part.mask is None:
        return logits.softmax(-1)
    empty = (logits == -torch.inf).all(-1, keepdim=True)
    return logits.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)


def _distribute(distribution: Distribution, logits: Tensor, front: torch.Size) -> Tensor:
    """The weights of a distribution other than the plain softmax, in the shape of the logits, `[B, H, N, M]`."""
    law = law_of(distribution)
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
    weights = weights_of(distribution.with_sources(source), edges, target, num_targets)
    return weights.reshape(logits.size(0), target.numel(), logits.size(1)).transpose(1, 2).reshape(logits.shape)


def _weighted(weights: Tensor, value: Tensor) -> Tensor:
    """The sums of values `[B, M, H, C]` with weights `[B, H, N, M]`: `[B, N, H, C]`."""
    value = repeat_heads(value, weights.size(1)).to(weights.dtype)
    return (weights @ value.transpose(1, 2)).transpose(1, 2)


def _banded(part: _Part, offset: int, left: int, right: int) -> Tensor:
    """Computes a window: blocks of targets become elements of the batch, each with the sources that it sees."""
    query, key, value, _, bias, mask, num_targets, *_ = part
    batch, num_sources = value.shape[:2]
    size = _block_targets(left, right)
    span = size + left + right
    blocks = -(-num_targets // size)
    rest = blocks * size - num_targets
    before, after = left - offset, offset + blocks * size + right - num_sources  # negative: remove nodes
    if query is not None:
        query = torch.unflatten(_pad_nodes(query, 0, rest), 1, (blocks, size)).flatten(0, 1)
    key, value = (_pad_nodes(x, before, after).unfold(1, span, size).movedim(-1, 2).flatten(0, 1) for x in (key, value))
    place = torch.arange(span, device=value.device)
    source = torch.arange(blocks, device=value.device).unsqueeze(1) * size - before + place
    target = torch.arange(blocks * size, device=value.device).view(blocks, size)
    if isinstance(bias, Bias):
        bands = bias.bands(target, source)
        bias = bands.expand(batch, blocks, *bands.shape[2:]).flatten(0, 1)
    else:
        bias = _of_blocks(bias, batch, target, source)
    allowed = _of_blocks(mask, batch, target, source)
    distance = place - torch.arange(size, device=value.device).unsqueeze(1)
    mask = (distance >= 0) & (distance <= left + right)
    mask = mask & ((source >= 0) & (source < num_sources)).unsqueeze(1)
    mask = mask.repeat(batch, 1, 1).unsqueeze(1)
    mask = _both(allowed, mask)
    out = _rectangle(part._replace(query=query, key=key, value=value, bias=bias, mask=mask, num_targets=size))
    return torch.unflatten(out, 0, (batch, blocks)).flatten(1, 2)[:, :num_targets]


def _of_blocks(x: Tensor | None, batch: int, target: Tensor, source: Tensor) -> Tensor | None:
    """A bias or mask for blocks of targets, with anything at padding; sizes of 1 are kept for broadcasting."""
    if x is None:
        return None
    targets, sources = (
        places[:1, :1] * 0 if size == 1 else places.clamp(0, size - 1)
        for places, size in ((target, x.size(2)), (source, x.size(3)))
    )
    x = x[:, :, targets.unsqueeze(2), sources.unsqueeze(1)].transpose(1, 2)
    return x.expand(batch, len(target), *x.shape[2:]).flatten(0, 1)


def _block_targets(left: int, right: int) -> int:
    return min(max(left + right + 1, _BLOCK[0]), _BLOCK[1])


def _pad_nodes(x: Tensor, before: int, after: int) -> Tensor:
    return F.pad(x, (0, 0) * (x.dim() - 2) + (before, after))


def _both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first & second


def _length_mask(graph: CompleteGraph, device: torch.device) -> Tensor | None:
    """Which targets and sources are real, broadcastable to `[B, 1, N, M]`."""
    mask = None
    for lengths, size, shape in (
        (graph.source_lengths, graph.num_sources, (1, -1)),
        (graph.target_lengths, graph.num_targets, (-1, 1)),
    ):
        if lengths is not None:
            places = torch.arange(size, device=device).reshape(shape)
            mask = _both(mask, places < lengths.to(device).reshape(-1, 1, 1, 1))
    return mask
