"""Attention on complete graphs without their edges: there is not a list of N·M edges, and no `[N, M, C]` tensor.

Dot products are computed by sums over sources that come first, by kernels for tiles of pairs, or by PyTorch's fused
attention (`dot_products`); other scores and distributions by matrices of some targets at a time (`matrices`).

Inside, tensors have one batch dimension and nodes come before heads: query `[B, N, H, C]`, key `[B, M, G, C]`, value
`[B, M, G, V]`, bias and mask broadcastable to `[B, H, N, M]`.
"""

from __future__ import annotations

import math
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor

from gattn.autocast import without_autocast
from gattn.bias import Bias
from gattn.distributions import is_plain_softmax
from gattn.errors import InputError
from gattn.graphs import BlockGraph, CompleteGraph
from gattn.graphs.complete import OpenBlocks
from gattn.ops import reference
from gattn.ops.backends.base import Backend
from gattn.ops.backends.dense import blocks, linear, matrices
from gattn.ops.backends.dense.dot_products import (
    FLASH,
    STATES,
    TILES,
    DotProducts,
    is_for_tiles,
    is_known,
    is_linear,
    refuses_linear,
    with_one_batch,
)
from gattn.ops.backends.dense.elements import elements_of
from gattn.ops.call import Call, Result, Way
from gattn.ops.chunks import chunk_sizes, recomputed
from gattn.ops.custom_parts import as_logits
from gattn.ops.operator import sink_of
from gattn.ops.plans import Given, Plan, is_short_list
from gattn.ops.sharded import complete_by_heads, is_distributed
from gattn.ops.terms import GIVEN, PLACES
from gattn.scores import says
from gattn.torch_private import is_context_parallel, is_exporting, is_traced

__all__ = ["Dense"]

#: The ways of other scores and distributions.
_LISTS, _MATRICES = "lists of pairs, some targets at a time", "matrices, some targets at a time"


class Dense(Backend):
    """Complete graphs, without a list of their edges."""

    name = "dense"
    devices = None

    def refuses(self, call: Call) -> str | None:
        """See `Backend.refuses`."""
        graph, score, distribution = call.graph, call.score, call.distribution
        if isinstance(graph, BlockGraph):
            return blocks.refuses(call)
        if not isinstance(graph, CompleteGraph):  # this backend serves only this kind of graph
            return "it serves complete graphs, not lists of edges"
        if call.edge is not None or call.edge_value is not None:
            return "edge and edge_value have one entry per edge"
        if not says(score, "broadcasts", "logits"):
            return f"it needs a score whose logits broadcast, and {type(score).__name__} does not declare it"
        if graph.blocks is not None and graph.has_lengths:
            return "packed graphs with lengths are computed edge by edge"
        has_way = is_plain_softmax(distribution) or is_linear(call) or is_for_tiles(call)
        has_way |= isinstance(graph.blocks, OpenBlocks)
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
        if isinstance(graph, BlockGraph):
            return False
        assert isinstance(graph, CompleteGraph)
        if isinstance(graph.blocks, OpenBlocks):
            return False
        if graph.blocks is not None and not is_plain_softmax(call.distribution):
            is_slower = is_linear(call) and not linear.is_faster(graph, max(call.channels, call.value.size(-1)))
            return graph.has_small_blocks or is_slower
        return call.bias is None and call.mask is None and is_short_list(graph, call.score, call.key, call.value)

    def logits(self, call: Call) -> Any:
        """See `Backend.logits`."""
        graph = call.graph
        assert isinstance(graph, CompleteGraph)
        if graph.blocks is not None:
            return super().logits(call)
        logits = self._result(as_logits(call)).weights
        n, m, device = call.num_targets, call.key.size(-3), call.key.device
        visible = matrices.both(
            matrices.length_mask(graph, device), graph.visible(n, m, graph.offset(n, m), device)[None, None]
        )
        assert visible is not None
        visible = visible.view(*(call.batch if visible.size(0) != 1 else ()), *visible.shape[1:])
        logits = logits.masked_fill(~visible, -torch.inf)
        return logits if call.mask is None else logits.masked_fill(~call.mask, -torch.inf)

    def log_sum(self, call: Call) -> Tensor:
        """See `Backend.log_sum`."""
        if call.graph.blocks is not None:
            return super().log_sum(call)
        logits = self.logits(call)
        log_sum = reference.log_sum_of_rows(logits.reshape(math.prod(call.batch), *logits.shape[-3:]))
        return log_sum.reshape(*call.batch, call.num_targets, call.heads)

    def attend(self, call: Call) -> Result:
        """See `Backend.attend`."""
        if type(call.value) is not Tensor and is_distributed(call.value):
            return complete_by_heads(self._result, call)
        return self._result(call)

    def plan(self, call: Call, given: Given) -> Plan | None:
        """See `Backend.plan`: there is one for dot products, with all that tiles of pairs serve."""
        has_more = any(isinstance(x, Tensor) for x in _MORE(given.tensors))
        if given.complete is None or has_more or len(call.batch) > 1 or not is_known(call):
            return None
        if 0 in (*call.batch, call.heads, call.key.size(-1)) or (call.value.size(-1) == 0 and call.weights != "only"):
            return None
        if call.cast(call.dtype) is not call or is_distributed(call.value):
            return None
        with torch.inference_mode(False):  # what is kept must also serve training
            sink = None if call.law is None else sink_of(call.law.sink, call)
            return DotProducts(call, sink, _may_fuse(call.value, given.is_scaled))

    def ways(self, call: Call) -> list[Way]:
        """See `Backend.ways`."""
        if isinstance(call.graph, BlockGraph):
            return [Way(TILES, None)]
        call, may_fuse = _in_one_batch(_in_one_type(call))
        graph, query, key, value, bias = cast(CompleteGraph, call.graph), call.query, call.key, call.value, call.bias
        chosen, no_tiles, no_flash = None, "they compute dot products with a softmax or a gate", "another way is faster"
        if is_known(call) and query is not None and call.law is not None:
            products = DotProducts(call, sink_of(call.law.sink, call), may_fuse)
            chosen = products.way(query, key, value, bias, call.mask, graph)
            no_tiles = products.no_tiles or "another way is faster"
            is_unread = isinstance(bias, Bias) and bias.term(graph) is None
            if chosen is TILES and is_unread and not _is_for_parts(call):
                chosen, no_tiles = None, f"they cannot read a {type(bias).__name__}"
            elif chosen is TILES and products.is_ragged and elements_of(graph, key.size(0)) is None:
                chosen, no_tiles = None, "lengths on a GPU are not read"
        if chosen is None and may_fuse and is_plain_softmax(call.distribution) and matrices.has_fused(call):
            chosen = FLASH
        if not (is_plain_softmax(call.distribution) and matrices.has_products(call.score) and call.score.is_product):
            no_flash = "it computes the plain softmax of scaled dot products"
        elif isinstance(bias, Bias) or call.log_sum or not may_fuse:
            no_flash = "it takes no gattn.Bias and no scale that is a tensor, and returns no log-sum-exp"
        if chosen is None:
            chosen = _LISTS if matrices.is_for_lists(call) else _MATRICES
        reasons = {
            STATES: refuses_linear(call) or "the products of all pairs take fewer operations",
            TILES: no_tiles,
            FLASH: no_flash,
            _LISTS: "they compute the plain softmax of additive scores and GAT's, on CPUs, without weights",
            _MATRICES: "another way is faster",
        }
        return [Way(way, None if way == chosen else reason) for way, reason in reasons.items()]

    def _result(self, call: Call) -> Result:
        if not torch.compiler.is_compiling() and is_context_parallel():
            raise InputError(
                "PyTorch's context_parallel splits sequences without the knowledge of graphs, masks and positions, so "
                "gattn's layers would give wrong results inside it. Shard the graph instead: "
                "gattn.distributed.shard(gattn.CompleteGraph(...), mesh)."
            )
        graph = cast(CompleteGraph, call.graph)
        if call.weights in ("dropped", "only"):  # for which logits exist as a matrix
            call = call._replace(log_sum=False)
        for name, term in (("bias", call.bias), ("mask", call.mask)):
            if isinstance(term, Tensor):
                graph.expand(term, name, call.batch, call.heads)
        call = _in_one_type(call)
        with without_autocast(call.value):
            out, weights, log_sum = _attend(call)
        if isinstance(weights, list):
            weights = [x.to(call.dtype) for x in weights]
        elif weights is not None:
            weights = weights.to(call.dtype)
        return Result(out.to(call.dtype), weights, log_sum)


def _in_one_type(call: Call) -> Call:
    """The call in its own type, in which kernels compute half precision in float32 themselves, or a wider one."""
    score = call.score
    if matrices.has_products(score) and score.is_product and not score.folds and not call.log_sum:
        return call.cast(call.dtype)
    return call.cast(call.compute)._replace(score=score.to(call.compute))


def _attend(call: Call) -> Result:
    """Output `[..., N, H, V]`, weights `[..., H, N, M]` (a list with one per block of a packed graph), and log-sum-exp.

    Args:
        call: A call whose tensors all have one type.
    """
    front, (call, may_fuse) = call.batch, _in_one_batch(call)
    result = _computed(call, front, may_fuse)
    if len(front) == 1:
        return result
    out, weights, log_sum = result
    if isinstance(weights, list):
        weights = [x.reshape(*front, *x.shape[1:]) for x in weights]
    weights, log_sum = (x.reshape(*front, *x.shape[1:]) if isinstance(x, Tensor) else x for x in (weights, log_sum))
    return Result(out.reshape(*front, *out.shape[1:]), weights, log_sum)


def _may_fuse(value: Tensor, is_scaled: bool) -> bool:
    """Whether PyTorch's fused attention keeps NaN: on CPUs, it loses a scale that is a tensor and not a number."""
    return is_exporting() or value.device.type != "cpu" or not is_scaled


def _in_one_batch(call: Call) -> tuple[Call, bool]:
    """The call with one batch dimension, a folded score, and whether PyTorch's fused attention may be called."""
    query, key, value, bias, mask, score = call.query, call.key, call.value, call.bias, call.mask, call.score
    front, graph = call.batch, cast(CompleteGraph, call.graph)
    one = front if graph.blocks is None else torch.Size()
    bias = bias if bias is None or isinstance(bias, Bias) else with_one_batch(bias, one)
    mask = None if mask is None else with_one_batch(mask, one)
    if len(front) != 1:
        query = None if query is None else _with_one_batch(query, front)
        key, value = _with_one_batch(key, front), _with_one_batch(value, front)
    may_fuse = _may_fuse(value, isinstance(getattr(score, "scale", None), Tensor))
    if query is not None:
        query, key, score = score.folded(query, key)
    return call._replace(query=query, key=key, value=value, bias=bias, mask=mask, score=score), may_fuse


def _computed(call: Call, front: torch.Size, may_fuse: bool) -> Result:
    """The result, by the fastest way; see `matrices.attention`."""
    query, key, value = call.query, call.key, call.value
    if isinstance(call.graph, BlockGraph):
        return blocks.attend(call, front)
    if is_known(call) and query is not None and call.law is not None:
        products = DotProducts(call, sink_of(call.law.sink, call), may_fuse)
        is_empty = not torch.compiler.is_compiling() and 0 in (*query.shape, *key.shape, *value.shape[:-1])
        if products.is_linear or not is_empty:
            found = products.compute(query, key, value, call.bias, call.mask, cast(CompleteGraph, call.graph))
            if found is not None:
                return found
            if products.no_tiles is None and not is_empty and _is_for_parts(call):
                return _in_parts(call, front, may_fuse)
    if isinstance(call.graph.blocks, OpenBlocks):
        return _computed(_masked(call), front, may_fuse)
    if call.weights is True and is_plain_softmax(call.distribution):  # they change no bit of the output
        weights = matrices.attention(call._replace(dropout=0.0, log_sum=False), front).weights
        return _computed(call._replace(weights=False), front, may_fuse)._replace(weights=weights)
    return matrices.attention(call, front, may_fuse)


def _is_for_parts(call: Call) -> bool:
    """Whether a bias that kernels cannot read is evaluated for some targets at a time, in calls of their own."""
    graph, bias = cast(CompleteGraph, call.graph), call.bias
    is_one = graph.is_uniform and graph.blocks is None and graph.window is None
    has_more = call.weights or call.log_sum or call.dropout
    return isinstance(bias, Bias) and is_one and not has_more and not is_traced() and bias.term(graph) is None


def _in_parts(call: Call, front: torch.Size, may_fuse: bool) -> Result:
    """The result for some targets at a time, whose bias is a tensor."""
    graph, query, key = cast(CompleteGraph, call.graph), call.query, call.key
    assert isinstance(call.bias, Bias)
    assert query is not None
    n, m = query.size(1), key.size(1)
    offset = graph.offset(n, m)
    bias = call.bias.of_graph(graph).of_group(None, n, m, offset)

    def compute(start: int, stop: int) -> Tensor:
        seen = min(offset + stop, m) if graph.causal else m
        if seen <= 0:
            return query.new_zeros(call.value.size(0), stop - start, call.heads, call.value.size(-1))
        mask = call.mask
        if mask is not None:
            mask = mask[..., start:stop, :] if mask.size(-2) == n else mask
            mask = mask[..., :seen] if mask.size(-1) == m else mask
        part = call._replace(
            query=query[:, start:stop],
            key=key[:, :seen],
            value=call.value[:, :seen],
            bias=bias.whole_part(slice(start, stop), slice(0, seen)),
            mask=mask,
            graph=CompleteGraph(stop - start, seen, causal=graph.causal),
        )
        return _computed(part, front, may_fuse).out

    held = call.value.size(0) * m * call.heads * bias.cost
    largest = max(_HELD // max(held, 1), _LEAST_HELD // bias.cost, 1)
    counts, stop, outs = chunk_sizes(n, largest, step=1), 0, []
    keeps = not torch.is_grad_enabled() or len(counts) == 1
    reads = [query, key, call.value, call.mask, *call.bias.tensors()]
    for count in counts:
        start, stop = stop, stop + count
        outs.append(compute(start, stop) if keeps else recomputed(compute, start, stop, reads=reads))
    return Result(torch.cat(outs, 1))


def _masked(call: Call) -> Call:
    """A call on a packed graph with open blocks as one on a whole graph with a mask."""
    graph = cast(CompleteGraph, call.graph)
    if call.weights:
        raise InputError(
            "the weights of a packed graph are one matrix per block, which a compiled program cannot return."
        )
    blocks = cast(OpenBlocks, graph.blocks)
    if graph.reach != (None, None) and blocks.of_target is not blocks.of_source:
        raise InputError("in compiled code, a causal graph or window needs blocks with as many targets as sources.")
    whole = CompleteGraph(graph.num_targets, graph.num_sources, causal=graph.causal, window=graph.window)
    together = blocks.together()
    return call._replace(graph=whole, mask=matrices.both(call.mask, together))


#: So many numbers of a bias are evaluated at a time, but those of at least so many targets: to read all keys for fewer
#: takes longer than the attention.
_HELD, _LEAST_HELD = 2**23, 256

#: What calls that have plans do not have.
_MORE = itemgetter(*(PLACES[x] for x in GIVEN if x not in ("query", "key", "value", "bias", "mask")))


def _with_one_batch(x: Tensor, front: torch.Size) -> Tensor:
    """The nodes' `[..., N, ...]` as `[B, N, ...]`."""
    return x.reshape(math.prod(front), *x.shape[len(front) :])
