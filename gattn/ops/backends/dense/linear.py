"""Linear attention: weights that are products are never made, because their sums can be taken in another order.

    out_i = Σ_j (q_i · k_j) v_j = q_i · Σ_j k_j v_jᵀ

The inner sum, a *state* `[C, V]` for each head, is the same for all targets of a complete graph, and a running sum if
the graph is causal, so time and memory grow with N + M. Each block of a packed graph, and each element of a batch, has
states of its own.

Some rows are read at a time, while they are in the cache. In a causal graph, a target sees the chunk that it is in by a
small matrix of products, and everything earlier by the state before that chunk. The backward pass computes states
again: gradients of queries need those of earlier rows, and gradients of keys and values need those of later rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gattn.graphs import CompleteGraph
from gattn.ops.backends.dense.elements import elements_of
from gattn.ops.call import compute_dtype
from gattn.ops.reference import repeat_heads
from gattn.torch_private import is_batched, statically_known_true

__all__ = ["attend", "is_faster"]

#: The number of rows that are read at a time.
_ROWS = 512
#: The number of rows of a causal graph that see each other by a matrix of products.
_CHUNK = 32


class _Block(NamedTuple):
    """Rows that attend to each other; its other rows see nothing, or are seen by nobody.

    Numbers and not slices, with which a compiler would make a program for each size.
    """

    source: int
    """The first source"""
    middle: int
    """The first source after those that all of these targets see"""
    target: int
    """The first target that sees a source"""
    beside: int
    """The number of targets of a causal graph that also see the sources up to their own position"""
    end: int
    """The first target after these"""

    @property
    def first(self) -> slice:
        """The sources that all of these targets see."""
        return slice(self.source, self.middle)

    @property
    def targets(self) -> slice:
        """Targets of a causal graph, which also see the sources up to their own position."""
        return slice(self.target, self.target + self.beside)

    @property
    def sources(self) -> slice:
        """The sources at these positions."""
        return slice(self.middle, self.middle + self.beside)

    @property
    def last(self) -> slice:
        """The targets that see all sources."""
        return slice(self.target + self.beside, self.end)


class _Rule(NamedTuple):
    """How weights follow from products."""

    scale: float
    normalize: bool
    eps: float
    blocks: tuple[_Block, ...]


def is_faster(graph: CompleteGraph, channels: int) -> bool:
    """Whether states take fewer operations than the products of all pairs.

    Args:
        graph: The graph.
        channels: C or V, whichever is larger.
    """
    if torch.compiler.is_compiling():  # where open sizes do not tell, and it is better for large ones
        return not statically_known_true(graph.num_pairs <= (graph.num_targets + graph.num_sources) * channels)
    return graph.num_pairs > (graph.num_targets + graph.num_sources) * channels


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, normalize: bool, eps: float, graph: CompleteGraph
) -> Tensor:
    """The output of `Identity(normalize, eps)`, `[B, N, H, V]`.

    Args:
        query: `[B, N, H, C]`.
        key: `[B, M, H, C]`, possibly with fewer heads.
        value: `[B, M, H, V]`, likewise.
        scale: What products are multiplied by.
        normalize: Whether weights are divided by their sum plus `eps`.
        eps: See `normalize`.
        graph: A graph without a window, whose lengths can be read.
    """
    dtype = compute_dtype(value.dtype)
    query, key, value = (x.to(dtype) for x in (query, key, value))
    batch, num_targets, num_sources = value.size(0), graph.num_targets, graph.num_sources
    elements, offset = elements_of(graph, batch), graph.offset(num_targets, num_sources)
    is_compiling = torch.compiler.is_compiling()
    if elements is None and is_compiling:  # one block for all, since the size of the batch may be open
        block = _block(0, num_targets, 0, num_sources, offset, graph.causal)
        return _plain(query, key, value, _Rule(scale, normalize, eps, (block,)))
    if elements is None:
        elements = tuple((b * num_targets, num_targets, b * num_sources, num_sources, offset) for b in range(batch))
    rule = _Rule(scale, normalize, eps, tuple(_block(*element, graph.causal) for element in elements))
    query, key, value = (x.flatten(0, 1) for x in (query, key, value))
    out: Tensor = (_plain if is_compiling else _Linear.apply)(query, key, value, rule)
    return torch.unflatten(out, 0, (batch, num_targets))


def _block(target: int, num_targets: int, source: int, num_sources: int, offset: int, causal: bool) -> _Block:
    """The block of these targets and sources, whose target 0 has the position of source `offset`."""
    seen, unseen, beside = num_sources, 0, 0
    if causal:
        seen, unseen = min(max(offset, 0), num_sources), min(max(-offset, 0), num_targets)
        beside = min(num_targets - unseen, num_sources - seen)
    return _Block(source, source + seen, target + unseen, beside, target + num_targets)


# ---------------------------------------------------------------------------------------------------- by few operations


def _plain(query: Tensor, key: Tensor, value: Tensor, rule: _Rule) -> Tensor:
    """The output `[..., N, H, V]` for rows `[..., N, H, C]`, by operations that PyTorch can differentiate further."""
    key, value = (repeat_heads(x, query.size(-2)) for x in (key, value))
    query, key, value = (x.transpose(-3, -2) for x in (query * rule.scale, key, value))
    if rule.normalize:
        value = F.pad(value, (0, 1), value=1.0)  # whose sum is that of the weights
    nothing = query[..., :0, :] @ (key[..., :0, :].mT @ value[..., :0, :])
    parts, done = [nothing], 0  # or an empty batch would have no gradients
    for block in rule.blocks:
        first, targets, sources, last = block.first, block.targets, block.sources, block.last
        state = key[..., first, :].mT @ value[..., first, :]
        parts.append(value.new_zeros(*value.shape[:-2], targets.start - done, value.size(-1)))
        if targets.stop > targets.start:
            q, k, v = (_chunks(x) for x in (query[..., targets, :], key[..., sources, :], value[..., sources, :]))
            before, state = _running(state, k.mT @ v)
            parts.append(_causal(q, k, v, before)[..., : targets.stop - targets.start, :])
        parts.append(query[..., last, :] @ state)
        done = last.stop
    parts.append(value.new_zeros(*value.shape[:-2], query.size(-2) - done, value.size(-1)))
    sums = torch.cat(parts, -2).transpose(-3, -2)
    return sums[..., :-1] / _divisor(sums[..., -1:], rule.eps) if rule.normalize else sums


def _chunks(x: Tensor) -> Tensor:
    """Rows `[..., N, C]` in chunks, `[..., chunks, rows, C]`, the last one with zeros at its end."""
    chunks = -(-x.size(-2) // _CHUNK)
    return torch.unflatten(F.pad(x, (0, 0, 0, chunks * _CHUNK - x.size(-2))), -2, (chunks, _CHUNK))


def _running(state: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """The state `[..., chunks, C, V]` before each chunk and that after the last, given the first and each chunk's."""
    states = torch.cat([state.unsqueeze(-3), states], -3).cumsum(-3)
    return states[..., :-1, :, :], states[..., -1, :, :]


def _causal(query: Tensor, key: Tensor, value: Tensor, before: Tensor) -> Tensor:
    """The sums of chunks, `[..., N, V]`, given the states before them."""
    return (query @ before + (query @ key.mT).tril() @ value).flatten(-3, -2)


def _divisor(total: Tensor, eps: float) -> Tensor:
    """The sums of weights; infinity for zero, divided by which everything is zero and has no gradient."""
    total = total + eps if eps else total
    return total.masked_fill(total == 0.0, torch.inf)


# ---------------------------------------------------------------------------------------------------------- by few rows


class _Linear(torch.autograd.Function):
    """The same as `_plain`, some rows at a time."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, rule: _Rule) -> Tensor:
        out = _written(query, rule, "targets", "last", channels=value.size(-1))
        divisor = query.new_empty(*query.shape[:2], 1) if rule.normalize else None
        read = _Rows(query, key, value, query.new_ones(query.size(1), _ROWS, 1), rule)

        def write(rows: slice, sums: Tensor) -> None:
            sums = sums.transpose(0, 1)
            if divisor is None:
                out[rows] = sums
            else:
                divisor[rows] = _divisor(sums[..., -1:], rule.eps)
                torch.div(sums[..., :-1], divisor[rows], out=out[rows])

        for block in rule.blocks:
            state = read.state_of(block.first)
            for targets, sources in zip(_pieces(block.targets), _pieces(block.sources), strict=True):
                q, k, v = (_chunks(x) for x in (read.query(targets), read.key(sources), read.value(sources)))
                before, state = _running(state, k.mT @ v)
                write(targets, _causal(q, k, v, before.to(out.dtype))[:, : targets.stop - targets.start])
            state = state.to(out.dtype)
            for rows in _pieces(block.last):
                write(rows, read.query(rows) @ state)
        ctx.save_for_backward(query, key, value, out, *([] if divisor is None else [divisor]))
        ctx.rule = rule
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, *others = ctx.saved_tensors
        divisor: Tensor | None = others[0] if others else None
        rule: _Rule = ctx.rule
        if torch.is_grad_enabled() or is_batched(grad):
            with torch.enable_grad():
                leaves = [x.view_as(x) for x in (query, key, value)]  # views, so that differentiation stops here
                leaves = [x if x.requires_grad else x.requires_grad_() for x in leaves]
                found = torch.autograd.grad(
                    _plain(leaves[0], leaves[1], leaves[2], rule), leaves, grad, create_graph=True
                )
            return *found, None
        grad_query = _written(query, rule, "targets", "last")
        grad_key, grad_value = (_written(x, rule, "sources", "first") for x in (key, value))
        read = _Rows(query, key, value, query.new_ones(query.size(1), _ROWS, 1), rule)

        def of_sums(rows: slice) -> Tensor:
            """The gradient of the sums, `[H, N, V]`, among them those of the weights."""
            part = grad[rows]
            if divisor is not None:
                part = part / divisor[rows]
                part = torch.cat([part, -(part * out[rows]).sum(-1, keepdim=True)], -1)
            return part.transpose(0, 1)

        def write(to: Tensor, rows: slice, part: Tensor) -> None:
            part = part[:, : rows.stop - rows.start, : to.size(-1)]
            if to.size(1) != part.size(0):  # heads that share a key
                part = torch.unflatten(part, 0, (to.size(1), -1)).sum(1)
            to[rows] = part.transpose(0, 1)

        for block in rule.blocks:
            state = read.state_of(block.first)
            pieces = list(zip(_pieces(block.targets), _pieces(block.sources), strict=True))
            for targets, sources in pieces:
                g, k, v = (_chunks(x) for x in (of_sums(targets), read.key(sources), read.value(sources)))
                before, state = _running(state, k.mT @ v)
                of_query = g @ before.to(grad.dtype).mT + (g @ v.mT).tril() @ k
                write(grad_query, targets, of_query.flatten(1, 2))
            state, of_state = state.to(grad.dtype), torch.zeros_like(state)
            for rows in _pieces(block.last):
                g = of_sums(rows)
                write(grad_query, rows, g @ state.mT)
                of_state += read.query(rows).mT @ g
            for targets, sources in reversed(pieces):
                q, k, v = (_chunks(x) for x in (read.query(targets), read.key(sources), read.value(sources)))
                g = _chunks(of_sums(targets))
                after, of_state = _running(of_state, (q.mT @ g).flip(1))
                after = after.flip(1).to(grad.dtype)
                write(grad_key, sources, (v @ after.mT + (g @ v.mT).tril().mT @ q).flatten(1, 2))
                write(grad_value, sources, (k @ after + (q @ k.mT).tril().mT @ g).flatten(1, 2))
            of_state = of_state.to(grad.dtype)
            for rows in _pieces(block.first):
                write(grad_key, rows, read.value(rows) @ of_state.mT)
                write(grad_value, rows, read.key(rows) @ of_state)
        return grad_query if rule.scale == 1.0 else grad_query.mul_(rule.scale), grad_key, grad_value, None


def _written(like: Tensor, rule: _Rule, *parts: str, channels: int | None = None) -> Tensor:
    """Memory for one row per row of a tensor, with zeros if some are in none of these parts of the blocks."""
    rows = [getattr(block, part) for block in rule.blocks for part in parts]
    make = like.new_empty if sum(part.stop - part.start for part in rows) == len(like) else like.new_zeros
    return make(*like.shape[:2], like.size(-1) if channels is None else channels)


class _Rows(NamedTuple):
    """Some rows at a time, as `[H, N, C]`."""

    of_query: Tensor
    of_key: Tensor
    of_value: Tensor
    ones: Tensor
    rule: _Rule

    def query(self, rows: slice) -> Tensor:
        """Queries, multiplied by the scale."""
        query = self.of_query[rows].transpose(0, 1)
        return query if self.rule.scale == 1.0 else query * self.rule.scale

    def key(self, rows: slice) -> Tensor:
        """Keys."""
        return repeat_heads(self.of_key[rows], self.of_query.size(1)).transpose(0, 1)

    def value(self, rows: slice) -> Tensor:
        """Values, with a one beside each if weights are normalised."""
        value = repeat_heads(self.of_value[rows], self.of_query.size(1)).transpose(0, 1)
        return torch.cat([value, self.ones[:, : value.size(1)]], -1) if self.rule.normalize else value

    def state_of(self, sources: slice) -> Tensor:
        """The state of these rows, `[H, C, V]`: a sum of many, and on CPUs in a wider type, which costs nothing."""
        channels = self.of_value.size(-1) + self.rule.normalize
        is_wide = self.of_key.device.type == "cpu"
        dtype = torch.float64 if is_wide else self.of_key.dtype
        state = self.of_key.new_zeros(self.of_query.size(1), self.of_key.size(-1), channels, dtype=dtype)
        for rows in _pieces(sources):
            state += self.key(rows).mT @ self.value(rows)
        return state


def _pieces(rows: slice) -> Iterator[slice]:
    """These rows, some at a time."""
    for start in range(rows.start, rows.stop, _ROWS):
        yield slice(start, min(start + _ROWS, rows.stop))
