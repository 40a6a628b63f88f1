"""Ragged batches: elements of the same sizes are computed together, and padding is never computed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gattn.graphs import CompleteGraph

__all__ = ["Group", "crop", "elements_of", "elements_of_blocks", "grouped", "of_group"]


class Group(NamedTuple):
    """Elements of a ragged batch that have the same sizes."""

    elements: tuple[int, ...]
    num_targets: int
    num_sources: int
    offset: int


class _Rows(NamedTuple):
    """The positions of the groups' nodes among all nodes."""

    order: Tensor | None
    """The position of each node, group by group; `None` if this is their order already."""
    inverse: Tensor | None
    """The index in `order` of the node at each position; the length of `order` if it is not there."""
    sizes: list[int]
    """The number of nodes in each group."""

    def take(self, x: Tensor) -> tuple[Tensor, ...]:
        """The nodes of each group."""
        if self.order is not None and self.inverse is not None:
            x = _apply(_Take, x, self.order.to(x.device), self.inverse.to(x.device))
        return x.split(self.sizes)

    def put(self, parts: list[Tensor]) -> Tensor:
        """All nodes in their order, with zeros for those in no group."""
        x = torch.cat(parts)
        if self.order is not None and self.inverse is not None:
            x = _apply(_Put, x, self.order.to(x.device), self.inverse.to(x.device))
        return x


def _apply(function: Any, *arguments: Any) -> Tensor:
    # The compiler derives gradients itself, and does not support such functions.
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
    """The inverse of `_Take`, with zeros in the positions that it left out."""

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


def elements_of(graph: CompleteGraph, batch: int) -> tuple[tuple[int, int, int, int, int], ...] | None:
    """First target, number of targets, first source, number of sources and offset of each element of a ragged batch.

    `None` if the graph has no lengths, or reading them would wait for a device.
    """
    n, m = graph.num_targets, graph.num_sources
    if graph.blocks is not None:
        return elements_of_blocks(graph.blocks, batch, n, m)
    lengths = (graph.target_lengths, graph.source_lengths)
    known = [x for x in lengths if x is not None]
    if not known or torch.compiler.is_compiling() or any(x.device.type != "cpu" for x in known):
        return None
    targets, sources = (
        [full] * batch if x is None else x.flatten().tolist() for x, full in zip(lengths, (n, m), strict=True)
    )
    return tuple((b * n, targets[b], b * m, sources[b], m - n) for b in range(batch))


def elements_of_blocks(
    blocks: Sequence[tuple[int, int]], batch: int, num_targets: int, num_sources: int
) -> tuple[tuple[int, int, int, int, int], ...]:
    """The same for the blocks of a packed graph, of which a batch has several."""
    first = list(accumulate(blocks, lambda a, b: (a[0] + b[0], a[1] + b[1]), initial=(0, 0)))
    return tuple(
        (b * num_targets + t, size[0], b * num_sources + s, size[1], size[1] - size[0])
        for b in range(batch)
        for (t, s), size in zip(first, blocks, strict=False)
    )


@lru_cache(maxsize=32)
def grouped(
    elements: tuple[tuple[int, int, int, int, int], ...], num_targets: int, num_sources: int
) -> tuple[_Rows, _Rows, list[Group]]:
    """The elements in groups of one size, and the positions of each group's nodes."""

    def sizes(place: int) -> tuple[int, int, int]:
        _, n, _, m, offset = elements[place]
        return n, m, offset

    order = list(range(len(elements)))
    # In their own order, nothing has to be copied, so the order is changed only if that saves many calls.
    runs = sum(1 for _ in groupby(order, key=sizes))
    if runs > 1.5 * len({sizes(place) for place in order}):
        order.sort(key=sizes)
    groups = [Group(tuple(places), *key) for key, places in groupby(order, key=sizes)]
    order = [place for group in groups for place in group.elements]
    targets = _rows([elements[place][:2] for place in order], num_targets)
    sources = _rows([elements[place][2:4] for place in order], num_sources)
    return (
        targets._replace(sizes=[len(group.elements) * group.num_targets for group in groups]),
        sources._replace(sizes=[len(group.elements) * group.num_sources for group in groups]),
        groups,
    )


def _rows(pieces: list[tuple[int, int]], total: int) -> _Rows:
    with torch.inference_mode(False):  # they are kept, and must also serve training
        ranges = [torch.arange(start, start + size, device="cpu") for start, size in pieces or [(0, 0)]]
        order = torch.cat(ranges)
        ends = [0, *accumulate(size for _, size in pieces)]
        if ends[-1] == total and all(
            size == 0 or start == end for (start, size), end in zip(pieces, ends, strict=False)
        ):
            return _Rows(None, None, [])
        inverse = order.new_full((total,), order.numel())
        inverse[order] = torch.arange(order.numel(), device="cpu")
        return _Rows(order, inverse, [])


def of_group(x: Tensor | None, group: Group) -> Tensor | None:
    """The part of a bias or mask that belongs to a group's elements."""
    if x is None:
        return None
    if x.size(0) > 1:
        x = x[[place % x.size(0) for place in group.elements]]
    return crop(crop(x, 2, 0, group.num_targets), 3, 0, group.num_sources)


def crop(x: Tensor, dim: int, first: int, last: int) -> Tensor:
    """Part of a dimension, unless it has size 1 for broadcasting."""
    return x if x.size(dim) == 1 else x.narrow(dim, first, last - first)
