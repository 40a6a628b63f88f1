"""Attention on complete graphs without their edges: there is not a list of N·M edges, and no `[N, M, C]` tensor.

Dot products are computed by kernels for tiles of pairs, or by PyTorch's fused attention, with its own flag for causal
graphs. Other scores are computed for a few targets at a time, with the sources that these see, and again in the
backward pass if there are many; on CPUs, additive ones by the kernels for lists, with a short list of pairs each time.
Elements of a ragged batch that no kernel takes at once are computed one after another, without their padding.

Inside, tensors have one batch dimension and nodes come before heads: query `[B, N, H, C]`, key `[B, M, H, C]` (`[B, N,
H]`, `[B, M, H]` for a scalar score), value `[B, M, H, C]`, bias and mask broadcastable to `[B, H, N, M]`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from gattn.autocast import is_autocast, without_autocast
from gattn.bias import Bias, Term
from gattn.distributions import Distribution, Law, is_plain_softmax, law_of
from gattn.errors import InputError
from gattn.graphs import CompleteGraph
from gattn.ops.backends.base import Backend, Result
from gattn.ops.backends.cpu import matrix, pairs
from gattn.ops.backends.dense import linear, tile_operator, tiles
from gattn.ops.backends.dense.dot_products import by_pytorch, is_packed_flash, packed_flash
from gattn.ops.backends.dense.ragged import elements_of, elements_of_blocks
from gattn.ops.call import Call, compute_dtype
from gattn.ops.chunks import chunk_sizes, recomputed
from gattn.ops.custom_parts import as_logits
from gattn.ops.operator import sink_of
from gattn.ops.plans import Given, Plan, Planned
from gattn.ops.reference import broadcast_logits, repeat_heads, weights_of
from gattn.ops.sharded import complete_by_heads, is_distributed
from gattn.ops.terms import GIVEN, PLACES
from gattn.scores import DotScore, Score, family_of, says
from gattn.torch_private import is_context_parallel, is_exporting, statically_known_true

__all__ = ["Dense", "attention"]

#: Scores that no fused kernel computes have this many logits, or channels of their hidden layer, at a time.
_CHUNK = 2**20

#: With more channels of all pairs than this, what kernels keep for the backward pass (2 bits or more for each) is not
#: kept either; nor an eighth as many logits.
_MOST_KEPT = 2**28

#: As many targets of a window are computed together as one of them sees sources, within these bounds.
_TOGETHER = (32, 128)


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
        if graph.blocks is not None and graph.has_lengths:
            return "packed graphs with lengths are computed edge by edge"
        has_way = is_plain_softmax(distribution) or _is_linear(call) or _is_for_tiles(call)
        if graph.blocks is not None and not has_way:
            return (
                "on packed graphs it supports the plain softmax, linear attention, and other softmaxes and gates of "
                f"dot products, not {distribution}"
            )
        if not says(distribution, "respects_infinity", "weights"):
            return f"it supports gattn's own distributions, not {distribution}"
        return None

    def yields(self, call: Call) -> bool:
        """See `Backend.yields`: blocks may be so small that kernels for lists take less time."""
        graph = call.graph
        assert isinstance(graph, CompleteGraph)
        if graph.blocks is not None and not is_plain_softmax(call.distribution):
            is_slower = _is_linear(call) and not linear.is_faster(graph, max(call.channels, call.value.size(-1)))
            return graph.has_small_blocks or is_slower
        has_more = call.bias is not None or call.mask is not None
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
        """See `Backend.plan`: there is one for dot products, with all that tiles of pairs serve."""
        graph, score, law = call.graph, call.score, call.law
        has_more = any(isinstance(x, Tensor) for x in _MORE(given.tensors))
        if not isinstance(graph, CompleteGraph) or given.complete is None or has_more or len(call.batch) > 1:
            return None
        if not _has_products(score) or law is None or law.name not in tiles.LAWS:
            return None
        if 0 in (*call.batch, call.heads, call.key.size(-1), call.value.size(-1)):
            return None
        if call.cast(call.dtype) is not call or is_distributed(call.value):
            return None
        return _Plan(call, score, law, graph)

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


class _Plan:
    """Calls on complete graphs that differ in nothing but numbers and nodes."""

    def __init__(self, call: Call, score: DotScore, law: Law, graph: CompleteGraph):
        with torch.inference_mode(False):  # what is kept must also serve training
            self.sink = sink_of(law.sink, call)
        self.law, self.rule, self.log_sum = law, _rule_of(call, score, graph), call.log_sum
        self.score = DotScore(self.rule.scale)  # not that of the call, which may be changed
        self.is_plain = _is_plain(call, score, graph) and graph._offset is None
        self.has_tiles: bool | None = None  # found out with the first call that has nodes
        self.is_linear, self.channels = _is_linear(call), max(call.channels, call.value.size(-1))

    def __call__(self, given: Given) -> Planned | None:
        """See `Plan`."""
        query, key, value, bias, mask = _USED(given.tensors)
        graph, dropout, (num_targets, num_sources) = given.complete, self.rule.dropout, (query.size(-3), key.size(-3))
        assert graph is not None
        if (graph.num_targets, graph.num_sources, value.size(-3)) != (num_targets, num_sources, num_sources):
            return None
        if num_targets * num_sources == 0 or is_autocast(value) or is_context_parallel():
            return None
        if self.has_tiles is None:
            self.has_tiles = tiles.can_attend((query, key, value), self.law)
        is_causal = graph.causal and num_targets > 1  # the last target sees every source
        is_pytorch = self.is_plain and not (is_causal and num_targets != num_sources)
        if is_pytorch and not isinstance(bias, Bias):
            is_alone = bias is None and mask is None
            if not (self.has_tiles and tiles.outruns_pytorch(query, key, value, is_alone, dropout)):
                if not is_alone:
                    return None
                if self.rule.weights:
                    return self._by_pytorch(query, key, value, graph, is_causal)
                return by_pytorch(query, key, value, self.rule.scale, None, None, dropout, is_causal)
        front = value.shape[:-3]
        lengths = graph.target_lengths, graph.source_lengths
        if graph.has_lengths and any(x is not None and x.shape != front for x in lengths):
            return None
        if self.is_linear and (graph.blocks is not None or linear.is_faster(graph, self.channels)):
            return self._by_states(query, key, value, graph)
        term: Tensor | Term | None
        if isinstance(bias, Bias):
            bias.check(graph, front, query.size(-2))
            if (term := bias.term(graph)) is None:
                return None
        elif _fits(bias, num_targets, num_sources):
            term = _with_one_batch(bias, front)
        else:
            return None
        if not self.has_tiles or not _fits(mask, num_targets, num_sources):
            return None
        found = _by_tiles(query, key, value, term, _with_one_batch(mask, front), self.sink, self.rule, graph)
        if found is None:
            return None
        out, log_sum, in_a_row = found
        weights = None
        if in_a_row is not None:
            weights = in_a_row.view(*front, query.size(-2), num_targets, num_sources).to(value.dtype)
        if self.log_sum:
            return out, weights, log_sum
        return out if weights is None else (out, weights)

    def _by_states(self, query: Tensor, key: Tensor, value: Tensor, graph: CompleteGraph) -> Tensor | None:
        """Linear attention, unless lists of edges take less time, or lengths cannot be read."""
        is_one = query.dim() < _DIMS
        query, key, value = (x.unsqueeze(0) if is_one else x for x in (query, key, value))
        if not linear.is_faster(graph, self.channels) or not (graph.is_uniform or elements_of(graph, key.size(0))):
            return None
        normalize, eps = self.law.constants
        out = linear.attend(query, key, value, self.rule.scale, bool(normalize), eps, graph).to(value.dtype)
        return out.squeeze(0) if is_one else out

    def _by_pytorch(
        self, query: Tensor, key: Tensor, value: Tensor, graph: CompleteGraph, is_causal: bool
    ) -> tuple[Tensor, Tensor] | None:
        """The output by PyTorch's fused attention, so that weights change no bit of it, and a few weights beside."""
        n, m = query.size(-3), key.size(-3)
        if query.numel() // query.size(-1) * m > _CHUNK:
            return None
        out = by_pytorch(query, key, value, self.rule.scale, None, None, self.rule.dropout, is_causal)
        is_one = query.dim() < _DIMS
        query, key, value = (x.unsqueeze(0) if is_one else x for x in (query, key, value))
        part = _Part(query, key, value, self.score, None, None, n, 0.0, False)
        weights = _softmax(_logits(part, graph, graph.offset(n, m))).to(value.dtype)
        return out, weights.squeeze(0) if is_one else weights


@lru_cache(maxsize=64)
def _elements_of_blocks(
    blocks: tuple[tuple[int, int], ...],
    batch: int,
    num_targets: int,
    num_sources: int,
    places: tuple[tuple[int, int], ...],
) -> tuple[tiles.Element, ...]:
    known = elements_of_blocks(blocks, batch, num_targets, num_sources)
    return tiles.elements_of(known, batch, num_targets, num_sources, 0, places)


#: The tensors of calls that have plans, and those of other calls.
_NAMES = ("query", "key", "value", "bias", "mask")
_USED = itemgetter(*(PLACES[name] for name in _NAMES))
_MORE = itemgetter(*(PLACES[name] for name in GIVEN if name not in _NAMES))

#: The dimensions of tensors of nodes, batch included.
_DIMS = 4


def _fits(term: Tensor | None, num_targets: int, num_sources: int) -> bool:
    """Whether a bias or mask can be broadcast to so many targets and sources."""
    if term is None:
        return True
    shape = (1, 1, *term.shape)
    return shape[-1] in (1, num_sources) and shape[-2] in (1, num_targets)


def _is_dot(score: Score) -> TypeGuard[DotScore]:
    """Whether fused kernels can compute a score: the plain dot product."""
    return _has_products(score) and score.is_product


def _has_products(score: Score) -> TypeGuard[DotScore]:
    """Whether a score is computed from dot products; a subclass with another formula is not."""
    if type(score) is DotScore:  # by far the most frequent, and checked several times per call
        return "logits" not in vars(score)
    return isinstance(score, DotScore) and family_of(score, 1) is not None


def _is_for_tiles(call: Call) -> bool:
    """Whether kernels for tiles of pairs know score and distribution, and serve the device and type."""
    is_known = call.law is not None and call.law.name in tiles.LAWS and _has_products(call.score)
    return is_known and tiles.is_served(call.value)


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
    """Targets and sources of a graph, or of one of its blocks."""

    query: Tensor | None
    """`[B, N, H, C]`; without C for a scalar score"""
    key: Tensor
    value: Tensor
    score: Score
    bias: Tensor | Bias | None
    """Broadcastable to `[B, H, N, M]`, like the mask; or that of the elements of this batch"""
    mask: Tensor | None
    num_targets: int
    dropout: float
    log_sum: bool
    """Whether the log-sum-exp is requested; see `_joined`"""
    first_target: int = 0
    """The first target's place among those of its graph or block, in whose places a `Bias` is given; and source's"""
    first_source: int = 0


def attention(call: Call, graph: CompleteGraph) -> tuple[Tensor, Any]:
    """Output `[..., N, H, C]`, and weights `[..., H, N, M]` if requested (a list with one per block of a packed graph).

    Args:
        call: A call whose tensors all have one type.
        graph: The call's graph.
    """
    query, key, value = call.query, call.key, call.value
    score, bias, mask = call.score, call.bias, call.mask
    if score.scalar:
        query, key = None if query is None else query.squeeze(-1), key.squeeze(-1)
    front = value.shape[:-3]
    if bias is not None or mask is not None:
        one = front if graph.blocks is None else torch.Size()
        bias = bias if isinstance(bias, Bias) else _with_one_batch(bias, one)
        mask = _with_one_batch(mask, one)
    if len(front) != 1:
        query = None if query is None else _nodes_in_one_batch(query, front)
        key, value = _nodes_in_one_batch(key, front), _nodes_in_one_batch(value, front)
    if query is not None:
        query, key, score = score.folded(query, key)
    part = _Part(query, key, value, score, bias, mask, graph.num_targets, call.dropout, call.log_sum)
    with without_autocast(value):
        out, weights = _computed(part, graph, call)
    if len(front) != 1:
        out, *weights = [x.reshape(*front, *x.shape[1:]) for x in (out, *weights)]
    if not call.weights:
        return out, None
    return out, weights[0] if graph.blocks is None else list(weights)  # PyTorch 2.11's compiler makes a tuple of it


_Found = tuple[Tensor, list[Tensor]] | None
"""Output and weights; `None` if another way has to be taken"""


def _computed(part: _Part, graph: CompleteGraph, call: Call) -> tuple[Tensor, list[Tensor]]:
    """Output and weights, by the fastest way."""
    found = _linear(part, graph, call) or _tiled(part, graph, call)
    if found is None and call.weights is True and is_plain_softmax(call.distribution):
        # They change no bit of the output.
        out, _ = _computed(part, graph, call._replace(weights=False))
        return out, _by_elements(part._replace(dropout=0.0, log_sum=False), graph, call)[1]
    return found or _by_elements(part, graph, call)


def _linear(part: _Part, graph: CompleteGraph, call: Call) -> _Found:
    """Weights that are products: sums over sources come first."""
    query, key, value, score = part[:4]
    if not _is_linear(call) or call.law is None or query is None or not isinstance(score, DotScore):
        return None
    is_linear = graph.blocks is not None or is_exporting()  # which must not compare sizes
    if not is_linear and not linear.is_faster(graph, max(key.size(-1), value.size(-1))):
        return None
    normalize, eps = call.law.constants
    return linear.attend(query, key, value, score.factor(key.size(-1)), bool(normalize), eps, graph), []


def _tiled(part: _Part, graph: CompleteGraph, call: Call) -> _Found:
    """Tiles of pairs, unless PyTorch's fused attention is as fast."""
    query, key, value, score, bias, mask, num_targets, dropout, log_sum = part[:9]
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
        term = bias.term(graph)
        if term is None:
            return None
    else:
        is_plain = _is_plain(call, score, graph) and (not graph.causal or num_targets == graph.num_sources)
        is_dropped = is_compiled and dropout > 0.0
        if is_plain and not (is_dropped or tiles.is_faster(query, key, value, bias, mask, dropout)):
            return None
        term = bias
    made = _by_tiles(query, key, value, term, mask, sink, _rule_of(call, score, graph), graph)
    if made is None:
        return None
    out, log_sums, in_a_row = made
    out = _joined(out, log_sums) if log_sum and log_sums is not None else out
    if in_a_row is None:
        return out, []
    front = key.size(0), query.size(2)
    if graph.blocks is None:
        return out, [in_a_row.view(*front, num_targets, key.size(1))]
    of_blocks = in_a_row.split([math.prod(front) * n * m for n, m in graph.blocks])
    return out, [x.view(*front, *size) for x, size in zip(of_blocks, graph.blocks, strict=True)]


def _rule_of(call: Call, score: DotScore, graph: CompleteGraph) -> tiles.Rule:
    """What tiles compute, but for their elements."""
    assert call.law is not None
    return tiles.Rule(
        scale=score.factor(call.channels),
        slope=score.negative_slope,
        clamp=math.inf if score.clamp is None else score.clamp,
        law=call.law._replace(sink=None),
        left=graph.reach[0],
        right=graph.reach[1],
        elements=(),
        dropout=call.dropout,
        weights=call.weights,
        log_sum=call.log_sum,
    )


def _is_plain(call: Call, score: Score, graph: CompleteGraph) -> bool:
    """Whether PyTorch's fused attention might compute this, if targets and sources fit."""
    is_usual = is_plain_softmax(call.distribution) and call.weights in (False, True) and not call.log_sum
    return is_usual and _is_dot(score) and graph.is_uniform and graph.window is None


def _by_tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    term: Tensor | Term | None,
    mask: Tensor | None,
    sink: Tensor | None,
    rule: tiles.Rule,
    graph: CompleteGraph,
) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
    """What `tiles.attend` returns; `None` if the sizes of elements are not known."""
    batch, num_targets, num_sources = key.size(0) if key.dim() == _DIMS else 1, query.size(-3), key.size(-3)
    sizes = graph.blocks if graph.blocks is not None else ((num_targets, num_sources),)
    count = batch * len(sizes)
    term = _of_elements(term, count) if isinstance(term, Tensor) else term
    mask = None if mask is None else _of_elements(mask, count)
    offset = graph.offset(num_targets, num_sources)
    if torch.compiler.is_compiling():
        if not graph.is_uniform and graph.blocks is None:
            return None
        return tile_operator.attend(query, key, value, term, mask, sink, rule, offset, graph.blocks)
    places, num_weights = term.places if isinstance(term, Term) else ((0, 0),), 0
    if graph.blocks is not None:
        elements = _elements_of_blocks(graph.blocks, batch, num_targets, num_sources, places)
    else:
        known = elements_of(graph, batch)
        if known is None and not graph.is_uniform:
            return None
        elements = tiles.elements_of(known, batch, num_targets, num_sources, offset, places)
    if rule.weights:
        of_all = sizes[0] if graph.blocks is None else None
        elements, num_weights = tiles.with_matrices(elements, query.size(-2), of_all, len(sizes))
    return tiles.attend(query, key, value, term, mask, sink, rule._replace(elements=elements), num_weights)


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


def _by_elements(part: _Part, graph: CompleteGraph, call: Call) -> tuple[Tensor, list[Tensor]]:
    """Each element of a ragged batch, or block of a packed graph, on its own: padding is not computed."""
    query, key, value, score, bias, mask, n, dropout, log_sum = part[:9]
    m, batch = graph.num_sources, value.size(0)
    if _is_fused(part, call) and is_packed_flash(query, key, value, graph, bias, mask, dropout):
        assert _is_dot(score)
        return packed_flash(query, key, value, graph, score.factor(key.size(-1))), []
    bias = bias.of_graph(graph) if isinstance(bias, Bias) else bias
    elements = elements_of(graph, batch)
    is_one = bool(call.weights) or not is_plain_softmax(call.distribution)  # weights, and what they may depend on
    if elements is None or (is_one and graph.blocks is None):
        offset = graph.offset(n, m)
        bias = bias.of_group(None, n, m, offset) if isinstance(bias, Bias) else bias
        part = part._replace(bias=bias, mask=_both(mask, _length_mask(graph, key.device)))
        out, weights = _element(part, graph, call, offset)
        return out, [weights] if call.weights else []
    results: list[tuple[Tensor, Tensor]] = []
    outs: list[Tensor] = []
    end = 0
    queries = [None] * len(elements) if query is None else _pieces(query, [x[:2] for x in elements])
    keys, values = (_pieces(x, [element[2:4] for element in elements]) for x in (key, value))
    for place, ((first, count, _, *size, offset), q, k, v) in enumerate(
        zip(elements, queries, keys, values, strict=True)
    ):
        sizes = count, size[0]
        b = bias.of_group((place,), *sizes, offset) if isinstance(bias, Bias) else _of_element(bias, place, sizes)
        some = _Part(q, k, v, score, b, _of_element(mask, place, sizes), count, dropout, log_sum)
        results.append(_element(some, graph, call, offset))
        if first > end:  # not a product with that, which PyTorch 2.11 cannot compile with open sizes
            outs.append(_zeros(part, first - end))
        outs.append(results[-1][0])
        end = first + count
    out = torch.cat([*outs, _zeros(part, batch * n - end)], 1).unflatten(1, (batch, n)).squeeze(0)
    if not call.weights:
        return out, []
    assert graph.blocks is not None
    weights_of_all = [weights for _, weights in results]
    nothing = [value.new_zeros(0, _num_heads(part), *size) for size in graph.blocks]
    return out, [torch.cat([x, *weights_of_all[place :: len(nothing)]]) for place, x in enumerate(nothing)]


def _pieces(x: Tensor, places: list[Any]) -> list[Tensor]:
    """The nodes of each element, `[1, N, ...]`, given its first one and their number."""
    ends = [first + count for first, count in places]
    gaps = [first - end for (first, _), end in zip(places, [0, *ends], strict=False)]
    sizes = [size for gap, (_, count) in zip(gaps, places, strict=True) for size in (gap, count)]
    x = x.flatten(0, 1).unsqueeze(0)
    return _split(x, [*sizes, x.size(1) - (ends[-1] if ends else 0)], 1)[1::2]


def _of_element(x: Tensor | None, place: int, size: tuple[int, int]) -> Tensor | None:
    """The part of a bias or mask that belongs to an element, without padding."""
    return None if x is None else x[place % x.size(0)][None, :, : size[0], : size[1]]


def _is_fused(part: _Part, call: Call) -> bool:
    """Whether PyTorch's fused attention computes this: scaled dot products with a softmax."""
    if part.log_sum or call.weights or isinstance(part.bias, Bias) or not _is_dot(part.score):
        return False
    return is_plain_softmax(call.distribution) and part.key.size(-1) > 0


def _element(part: _Part, graph: CompleteGraph, call: Call, offset: int) -> tuple[Tensor, Tensor]:
    """Output and weights of targets and sources that see each other, where target 0 has the source `offset`'s place."""
    n, m, batch, heads = part.num_targets, part.key.size(1), part.value.size(0), _num_heads(part)
    knows_rows = _knows_rows(call)
    if knows_rows and not is_exporting() and batch * n * m == 0:
        nothing = _zeros(part)
        return nothing, part.value.new_zeros(batch, heads, n, m) + nothing.sum()
    by_lists = is_plain_softmax(call.distribution) and not (call.weights or part.log_sum)
    by_lists = by_lists and not _has_products(part.score) and pairs.can_attend(*part[:4])
    left, right = graph.reach
    seen = m if left is None or right is None else left + right + 1
    is_narrow = not is_exporting() and 2 * (seen + _TOGETHER[1] * (not by_lists)) <= m
    if _is_fused(part, call) and not is_narrow:
        out = _fused(part, graph, offset, getattr(call.score, "scale", None))
        return out, out.new_empty(0)

    def compute(part: _Part) -> tuple[Tensor, Tensor]:
        if knows_rows and part.key.size(1) == 0:
            nothing = _zeros(part)
            return nothing, nothing
        return _by_lists(part, graph, offset, is_narrow) if by_lists else _by_matrix(part, graph, offset, call)

    if is_exporting() or not knows_rows:  # decisions must not depend on dynamic sizes
        return compute(part)
    held = batch * min(seen, m) * (heads if _has_products(part.score) else part.key[0, 0].numel())
    if is_narrow:  # lists of pairs of one size are kept
        size = pairs.counts(n, seen, batch)[0] if by_lists else min(max(seen, _TOGETHER[0]), _TOGETHER[1])
        counts = [size] * (n // size) + ([n % size] if n % size else [])
    else:
        counts = pairs.counts(n, m, batch) if by_lists else chunk_sizes(n, max(_CHUNK // max(held, 1), 1))
    some = _by_targets(part, counts)
    if not call.weights:
        some = [_cropped(x, graph, offset) for x in some]
    is_kept = n * held <= (_MOST_KEPT if by_lists else _MOST_KEPT // 8)
    recomputes = len(counts) > 1 and torch.is_grad_enabled() and not (call.weights or is_kept)
    reads = _read_by(part) if recomputes else []
    results = [recomputed(compute, x, reads=reads) if recomputes else compute(x) for x in some]
    outs, weights = zip(*results, strict=True)
    return torch.cat(outs, 1), torch.cat(weights, 2) if call.weights else outs[0]


def _knows_rows(call: Call) -> bool:
    """Whether weights depend on logits alone; other distributions may have something of their own for each target."""
    return is_plain_softmax(call.distribution) or call.law is not None


def _by_lists(part: _Part, graph: CompleteGraph, offset: int, is_narrow: bool) -> tuple[Tensor, Tensor]:
    """The output of a softmax by the kernels for lists of edges, twice."""
    (left, right), at = graph.reach, offset + part.first_target - part.first_source
    reach = (at - left, at + right) if is_narrow and left is not None and right is not None else None
    mask = part.mask if reach else _seen(part, graph, offset)
    out = pairs.attend(*part[:4], _bias_of(part), mask, part.num_targets, part.dropout, reach)
    return out, out


def _by_matrix(part: _Part, graph: CompleteGraph, offset: int, call: Call) -> tuple[Tensor, Tensor]:
    """The output and, if they are wanted, the weights by a matrix of all logits."""
    logits = _logits(part, graph, offset)
    is_softmax = is_plain_softmax(call.distribution)
    weights = _softmax(logits) if is_softmax else _distribute(call.distribution, logits, call.batch)
    dropped = F.dropout(weights, part.dropout) if part.dropout else weights
    out = _weighted(dropped, part.value)
    out = _joined(out, _log_sum(logits)) if part.log_sum else out
    return out, (dropped if call.weights == "dropped" else weights) if call.weights else out


def _read_by(part: _Part) -> list[Tensor | None]:
    """The tensors that may not be edited before they are read again; in compiled code, the compiler notices."""
    if torch.compiler.is_compiling():
        return []
    of_bias = vars(part.bias).values() if isinstance(part.bias, Bias) else (part.bias,)
    return [*part[:3], part.mask, *part.score.tensors(), *(x for x in of_bias if isinstance(x, Tensor))]


def _fused(part: _Part, graph: CompleteGraph, offset: int, of_score: Any) -> Tensor:
    """PyTorch's fused attention; `of_score` is the scale that the score was given."""
    query, key, value, score, bias, mask, n, dropout = part[:8]
    assert query is not None
    assert isinstance(score, DotScore)
    assert not isinstance(bias, Bias)
    is_causal = graph.causal and graph.window is None and bias is None and mask is None
    if is_causal:
        is_causal = statically_known_true(offset == 0) if is_exporting() else offset == 0 and n == key.size(1)
    if not is_causal:
        mask = _seen(part, graph, offset)
    if query.device.type == "cpu" and not torch.compiler.is_compiling() and query.numel() * value.numel() == 0:
        # PyTorch's kernels divide by the sizes, and in 2.11 end the process.
        return _zeros(part)
    out = by_pytorch(query, key, value, score.factor(key.size(-1)), bias, mask, dropout, is_causal)
    if isinstance(of_score, Tensor):  # PyTorch's fused kernel on CPUs loses its NaN
        lost = of_score.detach().to(out.dtype).unsqueeze(-1)
        if mask is not None:
            lost = lost.masked_fill(~mask.any(-1).transpose(1, 2).unsqueeze(-1), 0.0)
        out = torch.add(out, lost, alpha=0)
    return out


def _by_targets(part: _Part, counts: list[int]) -> list[_Part]:
    """A part, divided into so many targets."""
    queries = [None] * len(counts) if part.query is None else _split(part.query, counts, 1)

    def parts(x: Any) -> list[Any]:
        return _split(x, counts, 2) if isinstance(x, Tensor) and x.size(2) != 1 else [x] * len(counts)

    rows = zip(queries, parts(part.bias), parts(part.mask), counts, accumulate(counts, initial=0), strict=False)
    return [part._replace(query=q, bias=b, mask=m, num_targets=n, first_target=first) for q, b, m, n, first in rows]


def _cropped(part: _Part, graph: CompleteGraph, offset: int) -> _Part:
    """A part without the sources that none of its targets sees."""
    (left, right), m, position = graph.reach, part.key.size(1), offset + part.first_target
    first = 0 if left is None else min(max(position - left, 0), m)
    last = m if right is None else min(max(position + part.num_targets + right, first), m)
    if (first, last) == (0, m):
        return part
    if isinstance(part.bias, Tensor) and part.bias.size(3) != 1:
        part = part._replace(bias=part.bias[..., first:last])
    if part.mask is not None and part.mask.size(3) != 1:
        part = part._replace(mask=part.mask[..., first:last])
    return part._replace(key=part.key[:, first:last], value=part.value[:, first:last], first_source=first)


def _seen(part: _Part, graph: CompleteGraph, offset: int) -> Tensor | None:
    """Which sources the targets see, broadcastable to `[B, H, N, M]`; `None` if all."""
    n, m, device = part.num_targets, part.key.size(1), part.key.device
    if graph.reach == (None, None):
        return part.mask
    return _both(part.mask, graph.visible(n, m, offset + part.first_target - part.first_source, device)[None, None])


def _joined(out: Tensor, log_sum: Tensor) -> Tensor:
    """Output and log-sum-exp as channels of one tensor; in the last one, zero means that a target sees nothing."""
    seen = log_sum != -torch.inf
    return torch.cat([out, log_sum.masked_fill(~seen, 0.0).unsqueeze(-1), seen.to(out.dtype).unsqueeze(-1)], -1)


def _parted(joined: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `_joined`."""
    return joined[..., :-2], joined[..., -2].masked_fill(joined[..., -1].detach() == 0, -torch.inf)


def _bias_of(part: _Part) -> Tensor | None:
    """The bias of all targets of a part, broadcastable to `[B, H, N, M]`."""
    if not isinstance(part.bias, Bias):
        return part.bias
    targets = slice(part.first_target, part.first_target + part.num_targets)
    return part.bias.whole_part(targets, slice(part.first_source, part.first_source + part.key.size(1)))


def _num_heads(part: _Part) -> int:
    return (part.key if part.query is None else part.query).size(2)


def _zeros(part: _Part, num_targets: int | None = None) -> Tensor:
    """The output if there is nothing to attend to; its gradients are zeros.

    Args:
        part: The part.
        num_targets: So many targets of one element. (default: all of the part's)
    """
    query, key, value = part[:3]
    of_bias = part.bias.tensors() if isinstance(part.bias, Bias) else (part.bias,)
    nothing = sum(x[:0].sum() for x in (query, key, value, *of_bias) if x is not None)
    size = (value.size(0), part.num_targets) if num_targets is None else (1, num_targets)
    return value.new_zeros(*size, _num_heads(part), value.size(-1) + 2 * part.log_sum) + nothing


def _split(x: Tensor, sizes: list[int], dim: int) -> list[Tensor]:
    if torch.compiler.is_compiling():  # which cannot recompute a split in the backward pass
        return [x.narrow(dim, start, size) for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False)]
    return list(x.split(sizes, dim))


def _logits(part: _Part, graph: CompleteGraph, offset: int) -> Tensor:
    """The logits of all targets, `[B, H, N, M]`: minus infinity where they do not see a source."""
    query, key, _, score, _, _, count, *_ = part
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
    mask = _seen(part, graph, offset)
    return logits if mask is None else logits.masked_fill(~mask, -torch.inf)


def _log_sum(logits: Tensor) -> Tensor:
    """The log-sum-exp of each target, `[B, N, H]`; minus infinity, without gradients, if it sees nothing."""
    empty = (logits == -torch.inf).all(-1, keepdim=True)
    log_sum = logits.masked_fill(empty, 0.0).logsumexp(-1, keepdim=True).masked_fill(empty, -torch.inf)
    return log_sum.squeeze(-1).transpose(1, 2)


def _softmax(logits: Tensor) -> Tensor:
    """The softmax of logits; zeros for targets that see nothing."""
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
