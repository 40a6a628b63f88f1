"""Attention by dot products on complete graphs: sums over sources first, tiles of pairs, or PyTorch's own kernel."""

from __future__ import annotations

import math
from operator import itemgetter
from typing import cast

import torch
from torch import Tensor

from gattn.autocast import is_autocast
from gattn.bias import Bias, Term
from gattn.distributions import is_plain_softmax
from gattn.graphs import CompleteGraph
from gattn.graphs.complete import OpenBlocks
from gattn.ops import reference
from gattn.ops.backends.dense import linear, linear_operator, matrices, tile_operator, tiles
from gattn.ops.backends.dense.elements import elements_of
from gattn.ops.backends.dense.flash import by_pytorch
from gattn.ops.backends.dense.tile_rules import DIMS, elements_for_tiles
from gattn.ops.call import Call, Result
from gattn.ops.plans import Given
from gattn.ops.terms import PLACES
from gattn.scores import DotScore
from gattn.torch_private import is_counted, is_exporting

__all__ = [
    "FLASH",
    "STATES",
    "TILES",
    "DotProducts",
    "is_for_tiles",
    "is_known",
    "is_linear",
    "refuses_linear",
    "rule_of",
    "with_one_batch",
]


def is_for_tiles(call: Call) -> bool:
    """Whether kernels for tiles of pairs know score and distribution, and serve the device and type."""
    return is_known(call) and tiles.is_served(call.value)


def refuses_linear(call: Call) -> str | None:
    """Why sums over sources may not come first; `None` if weights are products, and nothing else is asked of them."""
    graph, law, score = cast(CompleteGraph, call.graph), call.law, call.score
    if law is None or law.name != "identity" or not matrices.has_products(score) or not score.is_product:
        return "weights are no products of query and key, as with Identity()"
    if call.bias is not None or call.mask is not None or call.dropout > 0.0 or call.weights:
        return "it has no bias, mask, dropout or weights to return"
    if is_exporting() and (graph.causal or graph.blocks is not None):
        return "the program that is exported would depend on sizes"
    if graph.window is not None:
        return "the graph has a window"
    if isinstance(graph.blocks, OpenBlocks):
        return None
    if not graph.is_uniform and elements_of(graph, math.prod(call.batch)) is None:
        return "lengths on a GPU, or in compiled code, are not read"
    return None


def is_linear(call: Call) -> bool:
    """Whether weights are products, so that sums over sources may come first, and nothing else is asked of them."""
    return refuses_linear(call) is None


#: The ways of dot products.
STATES, TILES, FLASH = "sums over sources that targets share", "tiles of pairs", "PyTorch's fused attention"


def rule_of(call: Call, left: int | None, right: int | None) -> tiles.Rule:
    """What tiles compute for a call of dot products, given how far a target sees; the elements are still to be said."""
    score, law = cast(DotScore, call.score), call.law
    assert law is not None
    return tiles.Rule(
        scale=score.factor(call.channels),
        slope=score.negative_slope,
        clamp=math.inf if score.clamp is None else score.clamp,
        law=law._replace(sink=None),
        left=left,
        right=right,
        elements=(),
        dropout=call.dropout,
        weights=call.weights,
        log_sum=call.log_sum,
    )


class DotProducts:
    """Calls of dot products on complete graphs, which differ in nothing but numbers and nodes.

    Args:
        call: One of these calls, whose score is folded, with a distribution that tiles know.
        sink: The logits of the softmax's sink, `[H]`.
        may_fuse: Whether PyTorch's fused attention may be called. (default: `True`)
    """

    def __init__(self, call: Call, sink: Tensor | None, may_fuse: bool = True):
        graph, score = cast(CompleteGraph, call.graph), cast(DotScore, call.score)
        self.rule = rule_of(call, *graph.reach)
        self.is_ragged = graph.has_lengths
        self.sink, self.is_linear, self.channels = sink, is_linear(call), max(call.channels, call.value.size(-1))
        #: Whether PyTorch's fused attention might compute this, if targets and sources fit.
        has_more = call.log_sum or call.weights not in (False, True) or graph.window is not None
        is_softmax = is_plain_softmax(call.distribution) and score.is_product and call.value.size(-1) > 0
        self.is_plain = may_fuse and is_softmax and graph.is_uniform and not has_more
        self.is_compiled, self.is_counted = torch.compiler.is_compiling(), is_counted()
        #: Why there are no tiles, and whether that was found out, with the first call that has nodes.
        self.no_tiles: str | None = None
        self.has_asked = False

    def __call__(self, given: Given) -> Result | None:
        """See `Plan`."""
        query, key, value, bias, mask = _USED(given.tensors)
        graph, num_targets, num_sources, front = given.complete, query.size(-3), key.size(-3), value.shape[:-3]
        assert graph is not None
        if (graph.num_targets, graph.num_sources, value.size(-3)) != (num_targets, num_sources, num_sources):
            return None
        if num_targets * num_sources == 0 or is_autocast(value):
            return None
        lengths = graph.target_lengths, graph.source_lengths
        if self.is_ragged and any(x is not None and x.shape != front for x in lengths):
            return None
        if self.is_linear and graph.blocks is not None and not linear.is_faster(graph, self.channels):
            return None
        if isinstance(bias, Bias):
            bias.check(graph, front, query.size(-2))
        elif bias is not None:
            if not _fits(bias, graph, front, query.size(-2)):
                return None
            bias = with_one_batch(bias, front)
        if mask is not None:
            if not _fits(mask, graph, front, query.size(-2)):
                return None
            mask = with_one_batch(mask, front)
        found = self.compute(query, key, value, bias, mask, graph)
        if found is None or found.weights is None:
            return found
        weights = found.weights.to(value.dtype)
        return found._replace(weights=weights if weights.dim() == query.dim() else weights.squeeze(0))

    def compute(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | Bias | None,
        mask: Tensor | None,
        graph: CompleteGraph,
    ) -> Result | None:
        """The result; `None` unless one of these ways is the fastest.

        Args:
            query: `[B, N, H, C]`; like the next two, without B if there is one entry.
            key: `[B, M, G, C]`, whose heads divide those of the query.
            value: `[B, M, G, V]`.
            bias: Broadcastable to `[B, H, N, M]`, or of the graph.
            mask: Likewise, True = may attend.
            graph: The graph.
        """
        way = self.way(query, key, value, bias, mask, graph)
        if way is FLASH:
            is_causal = graph.causal and query.size(-3) > 1
            out = by_pytorch(query, key, value, self.rule.scale, None, None, self.rule.dropout, is_causal)
            return Result(out, self._weights(query, key, graph, is_causal) if self.rule.weights else None)
        if way is TILES:
            term = bias.term(graph) if isinstance(bias, Bias) else bias
            return None if term is None and bias is not None else self._by_tiles(query, key, value, term, mask, graph)
        return self._by_states(query, key, value, graph) if way is STATES else None

    def way(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | Bias | None,
        mask: Tensor | None,
        graph: CompleteGraph,
    ) -> str | None:
        """The fastest of these ways, if one is; see `compute`, which may still find that kernels cannot read a bias."""
        if self.is_linear:
            is_decided = graph.blocks is not None or is_exporting()  # which must not compare sizes
            if is_decided or linear.is_faster(graph, self.channels):
                batch = key.size(0) if key.dim() == DIMS else 1
                if not self.is_ragged or elements_of(graph, batch) is not None:
                    return STATES
        if not self.has_asked:
            of_bias = bias.tensors() if isinstance(bias, Bias) else (bias,)
            self.no_tiles = tiles.refuses((query, key, value, mask, self.sink, *of_bias), self.rule.law)
            self.has_asked = True
        has_tiles, of_graph = self.no_tiles is None, isinstance(bias, Bias)
        if isinstance(graph.blocks, OpenBlocks) and not (bias is mask is None and not self.rule.weights):
            return None  # what belongs to blocks cannot be found
        if not has_tiles and (self.is_compiled or of_graph):
            return None
        if self.is_plain and not of_graph:
            is_causal = graph.causal and (query.size(-3) > 1 or graph._offset is not None)  # the last target sees all
            if not is_causal or query.size(-3) == key.size(-3):
                if self.is_compiled:
                    return TILES if self.rule.dropout > 0.0 else None
                is_alone = bias is None and mask is None
                wins = self.is_counted or tiles.outruns_pytorch(query, key, value, is_alone, self.rule.dropout)
                if not (has_tiles and wins):
                    return FLASH if is_alone and not (is_causal and graph._offset) else None
        return TILES if has_tiles else None

    def _by_states(self, query: Tensor, key: Tensor, value: Tensor, graph: CompleteGraph) -> Result:
        is_one = query.dim() < DIMS
        query, key, value = (x.unsqueeze(0) if is_one else x for x in (query, key, value))
        normalize, eps = self.rule.law.constants
        attend = linear_operator.attend if isinstance(graph.blocks, OpenBlocks) else linear.attend
        out = attend(query, key, value, self.rule.scale, bool(normalize), eps, graph).to(value.dtype)
        return Result(out.squeeze(0) if is_one else out)

    def _weights(self, query: Tensor, key: Tensor, graph: CompleteGraph, is_causal: bool) -> Tensor:
        """Weights beside PyTorch's fused attention, so that they change no bit of its output."""
        logits = reference.products(query, key, self.rule.scale)
        if is_causal:
            n, m = logits.shape[-2:]
            logits = logits.masked_fill(~graph.visible(n, m, graph.offset(n, m), logits.device), -torch.inf)
        return reference.softmax_of_rows(logits)

    def _by_tiles(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        term: Tensor | Term | None,
        mask: Tensor | None,
        graph: CompleteGraph,
    ) -> Result | None:
        """`None` if the sizes of elements are not known."""
        batch, num_targets, num_sources = key.size(0) if key.dim() == DIMS else 1, query.size(-3), key.size(-3)
        heads, rule = query.size(-2), self.rule
        if isinstance(graph.blocks, OpenBlocks):
            out, log_sum, _ = tile_operator.attend(query, key, value, None, None, self.sink, rule, 0, graph.blocks)
            return Result(out, None, log_sum if rule.log_sum else None)
        sizes = graph.blocks if graph.blocks is not None else ((num_targets, num_sources),)
        count = batch * len(sizes)
        term = _of_elements(term, count) if isinstance(term, Tensor) else term
        mask = None if mask is None else _of_elements(mask, count)
        offset = graph.offset(num_targets, num_sources)
        if torch.compiler.is_compiling():
            if self.is_ragged:
                return None
            found: tuple[Tensor, Tensor | None, Tensor | None]
            found = tile_operator.attend(query, key, value, term, mask, self.sink, rule, offset, graph.blocks)
        else:
            places = term.places if isinstance(term, Term) else ((0, 0),)
            known = elements_of(graph, batch) if self.is_ragged else None
            if known is None and self.is_ragged:
                return None
            of_all = batch, num_targets, num_sources, heads
            elements, num_weights = elements_for_tiles(known, graph.blocks, of_all, offset, places, bool(rule.weights))
            rule = rule._replace(elements=elements)
            found = tiles.attend(query, key, value, term, mask, self.sink, rule, num_weights)
        out, log_sum, in_a_row = found[0], found[1] if rule.log_sum else None, found[2]
        if in_a_row is None:
            return Result(out, None, log_sum)
        of_blocks = in_a_row.split([batch * heads * n * m for n, m in sizes])
        weights = [x.view(batch, heads, *size) for x, size in zip(of_blocks, sizes, strict=True)]
        return Result(out, weights[0] if graph.blocks is None else weights, log_sum)


#: Where the tensors are that these calls have.
_USED = itemgetter(*(PLACES[name] for name in ("query", "key", "value", "bias", "mask")))


def is_known(call: Call) -> bool:
    """Whether a score is made of dot products, and kernels for tiles of pairs know the distribution."""
    return call.law is not None and call.law.name in tiles.LAWS and matrices.has_products(call.score)


def _fits(term: Tensor, graph: CompleteGraph, front: torch.Size, heads: int) -> bool:
    """Whether a bias or mask is broadcastable to all pairs; for blocks of a packed graph, this is found out later."""
    whole = (*front, heads, graph.num_targets, graph.num_sources)
    if graph.blocks is not None or term.dim() > len(whole):
        return False
    fits = True
    for size, full in zip(reversed(term.shape), reversed(whole), strict=False):  # without the frames of all()
        fits = fits and size in (1, full)
    return fits


def _of_elements(x: Tensor, count: int) -> Tensor:
    """A bias or mask with an entry for each element, or one for all."""
    if x.size(0) in (1, count):
        return x
    return x[[place % x.size(0) for place in range(count)]]


def with_one_batch(x: Tensor, front: torch.Size) -> Tensor:
    """A bias or mask, broadcastable to `[*front, H, N, M]`, as one that is broadcastable to `[B, H, N, M]`."""
    if len(front) > 1 and x.dim() > 3:
        x = x.expand(*front, *x.shape[-3:]).flatten(0, 1)
    return x.reshape((1,) * (4 - x.dim()) + tuple(x.shape))
