"""Scores and distributions that the kernels do not know, on lists of edges: their part is passed as a finished bias.

The logits of a score are computed for some of the edges at a time, and computed again in the backward pass, so no
`[E, H, C]` tensor of the whole graph is kept. A distribution's weights take `[E, H]`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from gattn.distributions import Identity, Logits
from gattn.graphs import EdgeList
from gattn.ops.call import Call
from gattn.ops.chunks import chunk_sizes, recomputed
from gattn.ops.reference import logits, repeat_heads, weights_of
from gattn.scores import GATScore
from gattn.torch_private import backward_pass

__all__ = ["as_logits", "finished_logits", "with_finished", "with_finished_weights"]

#: An eighth as many edges at a time as nodes, but not fewer than this: so gathered rows take less memory than the
#: nodes.
_FEWEST = 1 << 12

_IDENTITY, _LOGITS = Identity(), Logits()


def with_finished(call: Call, edges: EdgeList, bias: Tensor) -> Call:
    """The same call with a bias `[..., E, H]` instead of its score, its edge terms and its own bias.

    Values of edges have to be vectors already.
    """
    return call._replace(
        query=None,
        key=call.value.new_zeros(call.heads, 1).expand(*call.batch, edges.num_sources, call.heads, 1),
        value=repeat_heads(call.value, call.heads),
        edge=None,
        edge_value=call.vectors_of_values,
        edge_is_value=False,
        bias=bias,
        score=GATScore(),
    )


def with_finished_weights(call: Call, edges: EdgeList, logits: Tensor) -> Call:
    """The same call with the weights of its distribution, computed from finished logits `[..., E, H]`."""
    source, target = edges.sources_and_targets()
    if call.mask is not None:
        logits = logits.masked_fill(~call.mask, -torch.inf)
    alpha = weights_of(call.distribution.with_sources(source), logits, target, edges.num_targets)
    finished = with_finished(call, edges, alpha.to(call.compute))
    return finished._replace(mask=None, distribution=_IDENTITY, law=_IDENTITY.law())


def as_logits(call: Call) -> Call:
    """A call on the same edges whose weights are the logits, unmasked, and which computes no sums."""
    nothing = call.value.new_zeros(*call.value.shape[:-1], 0)
    asked = call._replace(value=nothing, mask=None, out_bias=None, dropout=0.0, weights=True, log_sum=False)
    asked = asked._replace(edge_value=None, edge_is_value=False)
    return asked._replace(distribution=_LOGITS, law=_LOGITS.law())


def finished_logits(call: Call, edges: EdgeList) -> Tensor:
    """The logits of a call, including its bias, `[..., E, H]`, in the type of the computation.

    Args:
        call: A call on these edges, with bias and mask per edge, and with vectors of edges.
        edges: The edges, including self-loops.
    """
    call = call.cast(call.compute).with_edges()  # first, so that sums of gradients are made in this type
    logits = _logits(call._replace(score=call.score.to(call.compute)), *edges.sources_and_targets())
    return logits if call.bias_of_edges is None else logits + call.bias_of_edges.to(call.compute)


def _logits(call: Call, source: Tensor, target: Tensor) -> Tensor:
    """The logits of all edges, `[..., E, H]`, in the type of the computation."""
    edge = cast(Tensor | None, call.edge)

    def of_edges(query: Tensor | None, key: Tensor, edge: Tensor | None) -> Tensor:
        return logits(query, repeat_heads(key, call.heads), edge, call.score).to(call.compute)

    count = max((call.key.size(-3) + call.num_targets) // 8, _FEWEST)
    if torch.compiler.is_compiling() or source.size(0) <= count:
        query = None if call.query is None else call.query.index_select(-3, target)
        return of_edges(query, call.key.index_select(-3, source), edge)
    sizes = chunk_sizes(source.size(0), count)
    gather_query = None if call.query is None else _Gathers(len(sizes))
    gather_key = _Gathers(len(sizes))

    def chunk(query: Tensor | None, key: Tensor, edge: Tensor | None, source: Tensor, target: Tensor) -> Tensor:
        query = None if query is None or gather_query is None else gather_query(query, target)
        return of_edges(query, gather_key(key, source), edge)

    # Not narrow(), whose gradient would have the size of all edges for each chunk.
    edges = [None] * len(sizes) if edge is None else edge.split(sizes, -3)
    reads = call.query, call.key, edge, source, target, *call.score.tensors()
    found = [
        recomputed(chunk, call.query, call.key, *parts, reads=reads)
        for parts in zip(edges, source.split(sizes), target.split(sizes), strict=True)
    ]
    return torch.cat(found, -2)


class _Gathers:
    """Gathers rows chunk by chunk, and sums the gradients of all chunks in one tensor.

    Args:
        num_chunks: The number of gathers, all from the same tensor.
    """

    def __init__(self, num_chunks: int):
        self.num_chunks = num_chunks
        self.sum: Tensor | None = None
        self.num_summed = 0
        self.backward_pass: int | None = None

    def __call__(self, rows: Tensor, index: Tensor) -> Tensor:
        """The rows with these indices."""
        gathered: Tensor = _Gather.apply(rows, index, self)
        return gathered


class _Gather(torch.autograd.Function):
    """`index_select`, whose gradients are summed by its `_Gathers` and returned by the last of them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, gathers: _Gathers) -> Tensor:
        ctx.save_for_backward(index)
        ctx.gathers, ctx.shape = gathers, rows.shape
        return rows.index_select(-3, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        gathers, (index,) = ctx.gathers, ctx.saved_tensors
        if torch.is_grad_enabled():  # a derivative of this gradient is also needed
            return grad.new_zeros(ctx.shape).index_add(grad.dim() - 3, index, grad), None, None
        if gathers.sum is None or gathers.backward_pass != backward_pass():  # an earlier pass may have failed midway
            gathers.sum, gathers.num_summed = grad.new_zeros(ctx.shape), 0
            gathers.backward_pass = backward_pass()
        gathers.sum.index_add_(grad.dim() - 3, index, grad)
        gathers.num_summed += 1
        if gathers.num_summed < gathers.num_chunks:
            return None, None, None
        result, gathers.sum, gathers.num_summed = gathers.sum, None, 0
        return result, None, None
