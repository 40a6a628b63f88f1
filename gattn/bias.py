"""Biases as values: what is added to the logits of all pairs of nodes, without a tensor of all pairs.

Dimensions: N targets, M sources, E listed pairs, H heads, K buckets, B elements of a batch or blocks of a packed graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gattn.errors import InputError, InputTypeError
from gattn.graphs import FLOWS, CompleteGraph, EdgeList, Graph, GraphLike, as_graph
from gattn.graphs.complete import OpenBlocks
from gattn.graphs.edge_lists import INTEGER_DTYPES, check_later, check_range, derived, plain
from gattn.torch_private import is_readable, is_traced

__all__ = ["Bias", "BucketBias", "Buckets", "DistanceBias", "Pairs", "SparseBias", "Term"]

#: More than the number of nodes of any graph.
_FAR = 2**31

#: Buckets that a function returns are kept, for all pairs of up to so many bytes.
_MOST_BUCKETS = 2**26


class Term(NamedTuple):
    """A bias as kernels read it: numbers of something of which there is less than of pairs."""

    kind: str
    """What has a number: `distances` (source minus target), `buckets` of pairs, or `listed` pairs"""
    values: Tensor
    """The numbers, `[K, H or 1]`"""
    of_pairs: Tensor | None = None
    """The bucket of each pair, in contiguous memory; or each listed pair's source, in int32, ascending for a target"""
    starts: Tensor | None = None
    """Where each target's listed pairs start, and the last one's end"""
    places: tuple[tuple[int, int], ...] = ((0, 0),)
    """For each element or block: where its buckets start, and from one target to the next; or the first target, and
    source, of its listed pairs"""
    first: int = 0
    """The smallest distance"""


class Bias:
    r"""Base class of biases :math:`b_{ij}` whose rows can be computed at any time, so that no matrix of them is kept.

    .. math::
        \alpha_{i\cdot} = p\big(s(q_i, k_j) + b_{ij} \text{ for } j \in \mathcal{N}(i)\big)

    `gattn.attend(..., bias=...)` and `gattn.weigh` take one wherever they take a tensor. On complete graphs, it is
    evaluated for some targets at a time, and again in the backward pass; on lists of edges, for the edges.

    `SparseBias` is a bias of some pairs of nodes. `BucketBias` looks up the bucket of each pair in a table, as `T5
    <https://arxiv.org/abs/1910.10683>`_ does with distances between tokens, and `Graphormer
    <https://arxiv.org/abs/2106.05234>`_ with shortest paths between nodes. To add another, override :meth:`rows`,
    :meth:`tensors` and :meth:`with_tensors`.

    Shapes:
        rows `[H, n, M]`, where H may be 1.

    Raises:
        NotImplementedError: In use, if the subclass does not define :meth:`rows`.

    Example:
        >>> import torch, gattn
        >>> class Outer(gattn.Bias):  # u_i v_j in all heads
        ...     def __init__(self, u, v):
        ...         self.u, self.v = u, v
        ...     def tensors(self):
        ...         return self.u, self.v
        ...     def with_tensors(self, tensors):
        ...         return Outer(*tensors)
        ...     def rows(self, start, stop):
        ...         return (self.u[start:stop, None] * self.v).unsqueeze(0)
        >>> x = torch.randn(5, 2, 4)  # 5 nodes, 2 heads, 4 channels
        >>> gattn.attend(x, x, x, gattn.CompleteGraph(5), bias=Outer(torch.randn(5), torch.randn(5))).shape
        torch.Size([5, 2, 4])
    """

    #: Whether all elements of a batch, or all blocks of a packed graph, have the same bias; smaller blocks have its
    #: first rows and columns.
    shared: bool = True

    #: How many numbers are in memory for each pair and head while the bias is computed.
    cost: int = 1

    def rows(self, start: int, stop: int) -> Tensor:
        """The bias of the targets from `start` to `stop`, `[H, stop - start, M]`."""
        raise NotImplementedError(f"{type(self).__name__} does not define rows().")

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of floating-point numbers that the bias holds, which may need gradients."""
        return ()

    def with_tensors(self, tensors: Sequence[Tensor]) -> Bias:
        """The same bias with other tensors in place of these, in their order."""
        return self

    # What backends ask. A bias that is shared by everything, and has rows, needs none of it.

    def check(self, graph: Graph, batch: torch.Size, heads: int) -> None:
        """Raises `ValueError` or `IndexError` if the bias does not fit a graph, a batch and heads."""

    def term(self, graph: CompleteGraph) -> Term | None:
        """The bias as kernels read it, after `check`; `None` if they cannot."""
        return None

    def of_graph(self, graph: CompleteGraph) -> Bias:
        """The same bias, prepared for the elements of a graph."""
        return self

    def of_group(self, elements: Sequence[int] | None, num_targets: int, num_sources: int, offset: int) -> Bias:
        """The bias of elements of a batch, or blocks of a packed graph, of one size.

        Args:
            elements: Their numbers, counted as in a batch of all blocks; `None` for a whole batch of one graph, whose
                size may be open.
            num_targets: N, of each.
            num_sources: M, of each.
            offset: The position of target 0.
        """
        return self

    def part(self, targets: slice, sources: slice) -> Tensor:
        """A part of a group's bias, `[B or 1, H or 1, n, m]`."""
        rows = self.rows(targets.start, targets.stop)
        if not isinstance(rows, Tensor) or rows.dim() not in (3, 4):
            got = list(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
            raise InputError(f"{type(self).__name__}.rows() must return a tensor [H, n, M]; got {got}.")
        rows = rows[..., sources]
        return rows if rows.dim() == 4 else rows.unsqueeze(0)

    def whole_part(self, targets: slice, sources: slice) -> Tensor:
        """`part`, `[B or 1, H or 1, n, m]`, of nodes that are all there, unlike those of a window's blocks.

        Raises:
            ValueError: If :meth:`rows` returned other rows or columns than these, which might broadcast.
        """
        part, size = self.part(targets, sources), (targets.stop - targets.start, sources.stop - sources.start)
        if type(self).part is Bias.part and not is_traced() and part.shape[-2:] != size:
            raise InputError(
                f"{type(self).__name__}.rows({targets.start}, {targets.stop}) must have one row per target and one "
                f"column per source, here {size[0]} rows and at least {sources.stop} columns; columns "
                f"{sources.start} to {sources.stop - 1} are {list(part.shape[-2:])}."
            )
        return part

    def of_pairs(self, targets: Tensor, sources: Tensor) -> Tensor:
        """The bias of pairs of a group's nodes, `[B or 1, E, H or 1]`, given the two nodes of each, `[E]`."""
        if targets.numel() == 0:
            return self.part(slice(0, 0), slice(0, 0)).flatten(2).transpose(1, 2)
        whole = self.whole_part(slice(0, int(targets.max()) + 1), slice(0, int(sources.max()) + 1))
        return whole[:, :, targets, sources].transpose(1, 2)

    def of_edges(self, graph: Graph, edges: EdgeList, batch: torch.Size) -> Tensor:
        """The bias of a graph's edges, `[..., E, H or 1]`."""
        source, target = edges.sources_and_targets()
        if graph.blocks is None:
            sizes = edges.num_targets, edges.num_sources
            found = self.of_group(None, *sizes, sizes[1] - sizes[0]).of_pairs(target, source)
            is_shared = self.shared or found.size(0) == 1
            return found.squeeze(0) if is_shared else found.reshape(*batch, *found.shape[1:])
        assert isinstance(graph, CompleteGraph)
        prepared, parts, first_target, first_source = self.of_graph(graph), [], 0, 0
        ends = torch.tensor([n for n, _ in graph.blocks], device=target.device).cumsum(0)
        counts = torch.bucketize(target, ends, right=True).bincount(minlength=len(graph.blocks)).tolist()
        for block, (rows, columns) in enumerate(
            zip(torch.split(target, counts), torch.split(source, counts), strict=True)
        ):
            n, m = graph.blocks[block]
            group = prepared.of_group((block,), n, m, m - n)
            parts.append(group.of_pairs(rows - first_target, columns - first_source).squeeze(0))
            first_target, first_source = first_target + n, first_source + m
        return torch.cat(parts) if parts else self.of_group((), 0, 0, 0).of_pairs(target, source).flatten(0, 1)


class SparseBias(Bias):
    r"""A bias of some pairs of nodes, while all pairs attend.

    .. math::
        \alpha_{ij} \propto \exp(s_{ij} + b_{ij}), \qquad b_{ij} = 0 \text{ for pairs that are not listed}

    In graph Transformers such as `Graphormer <https://arxiv.org/abs/2106.05234>`_, every node attends to all nodes, and
    such a bias tells them about the edges. Minus infinity excludes a pair. A pair that is listed twice has the sum of
    its biases.

    With dot products, kernels add the biases to the tiles of pairs in which they are, so that there is no matrix of
    them, and its cost follows the number of listed pairs.

    Args:
        pairs: The pairs, sources above targets: an `edge_index` `[2, E]` in any of PyG's forms, or a `SparseGraph`. In
            a packed graph, nodes are numbered from end to end.
        values: Their biases, `[E, H]`, or `[E]` for all heads.

    Shapes:
        pairs `[2, E]`, values `[E, H]`; the elements of a batch share them.

    Raises:
        TypeError: If `values` is not a tensor.
        ValueError: If there is not one value per pair, or (in use) a pair joins two blocks or heads do not fit.
        IndexError: In use, if there is no such node.

    Example:
        >>> import torch, gattn
        >>> x = torch.randn(4, 2, 8)  # 4 nodes, 2 heads, 8 channels
        >>> bonds = gattn.SparseBias(torch.tensor([[0, 1], [1, 2]]), torch.randn(2, 2, requires_grad=True))
        >>> gattn.attend(x, x, x, gattn.CompleteGraph(4), bias=bonds).shape
        torch.Size([4, 2, 8])
    """

    def __init__(self, pairs: GraphLike, values: Tensor):
        if not isinstance(values, Tensor):
            raise InputTypeError(f"values must be a tensor; got {type(values).__name__}.")
        graph = as_graph(pairs)
        if isinstance(pairs, Tensor) and pairs.layout == torch.strided:  # whose sizes are not known
            edge_index = plain(pairs)
            self.source, self.target = edge_index
            self._index = edge_index
        else:
            self.source, self.target = graph.sources_and_targets()
            self._index = self.target
        self.num_sources = graph.num_sources
        self.values = values
        if graph.is_dense or values.dim() not in (1, 2) or values.size(0) != self.source.size(0):
            raise InputError(
                f"values must have one bias per listed pair, [E, H] or [E]; got {list(values.shape)} for "
                f"{self.source.size(0)} pairs."
            )
        _check_real("values", values)

    def tensors(self) -> tuple[Tensor, ...]:
        """See `Bias.tensors`."""
        return (self.values,)

    def with_tensors(self, tensors: Sequence[Tensor]) -> SparseBias:
        """See `Bias.with_tensors`."""
        bias = copy(self)
        (bias.values,) = tensors
        return bias

    def check(self, graph: Graph, batch: torch.Size, heads: int) -> None:
        """See `Bias.check`."""
        _check_heads("values", self.values if self.values.dim() == 2 else self.values.unsqueeze(1), heads)
        assert graph.num_sources is not None
        assert graph.num_targets is not None
        if is_readable(self.target):
            sizes = graph.num_sources, graph.num_targets, graph.blocks
            self._derived(("fits", *sizes), lambda: self._check_pairs(*sizes))
            return
        check_later(self.source, graph.num_sources, "the pairs of a SparseBias name a source")
        check_later(self.target, graph.num_targets, "the pairs of a SparseBias name a target")
        if graph.blocks is not None:
            joins = _block_of(self.target, graph.blocks, 0) != _block_of(self.source, graph.blocks, 1)
            check_later(joins.long(), 1, "the blocks of a pair of a SparseBias differ: a node is")

    def _check_pairs(self, num_sources: int, num_targets: int, blocks: Sequence[tuple[int, int]] | None) -> None:
        check_range(torch.stack([self.source, self.target]), num_sources, num_targets, FLOWS[0])
        if blocks is None:
            return
        if bool((_block_of(self.target, blocks, 0) != _block_of(self.source, blocks, 1)).any()):
            raise InputError("a SparseBias lists a pair whose nodes are in different blocks of the packed graph.")

    def rows(self, start: int, stop: int) -> Tensor:
        """See `Bias.rows`; M is that of the pairs' own graph, or else the last source that they name plus one."""
        num_sources = self.num_sources
        if num_sources is None:
            num_sources = int(self.source.max()) + 1 if self.source.numel() else 0
        return self._pairs().part(slice(start, stop), slice(0, num_sources)).squeeze(0)

    def _pairs(self) -> Pairs:
        return self._order().with_tensors([self.values])

    def _order(self) -> Pairs:
        """The pairs in order, which is found once, without values."""

        def order() -> Pairs:
            return Pairs.ordered(None, self.target.long(), self.source.long(), self.values.new_empty(0, 1))

        found: Pairs = self._derived(("pairs in order",), order)
        return found

    def _derived(self, key: tuple[Any, ...], derive: Callable[[], Any]) -> Any:
        """What is kept with the pairs; an edit of their other row counts, too, where both are not of one tensor."""
        token = derived(self.source, "token", object) if self._index is self.target else None
        return derived(self._index, (*key, token), derive)

    def term(self, graph: CompleteGraph) -> Term | None:
        """See `Bias.term`."""
        if not is_readable(self.target):
            return None

        def form() -> tuple[Tensor, Tensor, Tensor | None]:
            """Where each target's pairs start, the source of each, and the places of values that are in no order."""
            starts = F.pad(self.target.bincount(minlength=graph.num_targets).cumsum(0), (1, 0))
            order = self._order().place
            if order is None or bool((order[1:] > order[:-1]).all()):
                return starts, self.source.int(), None
            return starts, self.source[order].int(), order.long().argsort()

        starts, source, place = self._derived(("term", graph.num_targets), form)
        values = self.values if self.values.dim() == 2 else self.values.unsqueeze(1)
        if place is not None:  # gradients of what is copied are selected, those of what is selected added one by one
            rows = values.t()
            values = rows.new_empty(rows.shape).index_copy(1, place, rows).t()
        places = _first_nodes(graph.blocks)[:-1] if graph.blocks else ((0, 0),)
        return Term("listed", values, source, starts, places)

    def of_graph(self, graph: CompleteGraph) -> Bias:
        """See `Bias.of_graph`."""
        if not is_readable(self.target):
            blocks = graph.blocks or ((graph.num_targets, graph.num_sources),)
            return _TracedPairs(self.target.long(), self.source.long(), self.values, blocks)
        return self._pairs() if graph.blocks is None else _BlockPairs(self._order(), self.values, graph.blocks)

    def of_pairs(self, targets: Tensor, sources: Tensor) -> Tensor:
        """See `Bias.of_pairs`."""
        if not is_readable(self.target):
            return _TracedPairs(self.target.long(), self.source.long(), self.values, ()).of_pairs(targets, sources)
        return self._pairs().of_pairs(targets, sources)

    def of_edges(self, graph: Graph, edges: EdgeList, batch: torch.Size) -> Tensor:
        """See `Bias.of_edges`; nodes of all blocks have the numbers that the pairs name."""
        source, target = edges.sources_and_targets()
        return self.of_pairs(target, source).squeeze(0)

    def __repr__(self) -> str:
        return f"SparseBias({len(self.values)} pairs)"


class Pairs(Bias):
    """A `SparseBias` for the elements of a group: each pair once, ordered by target.

    Args:
        element: The element of each pair, `[E]`; `None` if all elements share the pairs.
        target: Its target, `[E]`.
        source: Its source, `[E]`.
        values: The biases, `[L, H or 1]` or `[L]`; the bias of a pair that was listed twice is a sum of two.
        place: The rows of `values`, `[L]`, in the order of the pairs. (default: `None`, they are in that order)
        starts: Where the rows of each pair start in `place`, `[E + 1]`. (default: `None`, each pair has one)
        count: The number of elements. (default: `1`)
    """

    def __init__(
        self,
        element: Tensor | None,
        target: Tensor,
        source: Tensor,
        values: Tensor,
        place: Tensor | None = None,
        starts: Tensor | None = None,
        count: int = 1,
    ):
        self.element, self.target, self.source, self.count = element, target, source, count
        self.values = values if values.dim() == 2 else values.unsqueeze(1)
        self.place, self.starts = place, starts
        self.shared = element is None

    @staticmethod
    def ordered(element: Tensor | None, target: Tensor, source: Tensor, values: Tensor, count: int = 1) -> Pairs:
        """The same for pairs in any order, of which some may be listed twice."""
        if target.numel() == 0:
            return Pairs(element, target.clone(), source.clone(), values, count=count)
        width = int(source.max()) + 1
        keys = target if element is None else target * count + element
        keys, order = (keys * width + source).sort(stable=True)
        starts = F.pad((keys[1:] != keys[:-1]).nonzero().squeeze(1) + 1, (1, 0))
        is_each_new = len(starts) == len(keys)
        if not is_each_new:
            keys = keys[starts]
            starts = F.pad(starts, (0, 1), value=len(order))
        small = torch.int32 if max(width, int(target.max()), len(order)) < 2**31 else torch.int64
        source, keys = (keys % width).to(small), keys.div_(width, rounding_mode="floor")
        if element is not None:
            element, keys = keys % count, keys.div_(count, rounding_mode="floor")
        several = None if is_each_new else starts
        return Pairs(element, keys.to(small), source, values, order.to(small), several, count)

    def tensors(self) -> tuple[Tensor, ...]:
        """See `Bias.tensors`."""
        return (self.values,)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Pairs:
        """See `Bias.with_tensors`."""
        return Pairs(self.element, self.target, self.source, tensors[0], self.place, self.starts, self.count)

    def chosen(self, pairs: Tensor) -> Pairs:
        """The same with some of the pairs, given their numbers in ascending order."""
        element = None if self.element is None else self.element[pairs]
        place, number = self.rows_of(pairs)
        starts = None if number is None else F.pad(number.bincount(minlength=len(pairs)).cumsum(0), (1, 0))
        return Pairs(element, self.target[pairs], self.source[pairs], self.values, place, starts, self.count)

    def of_group(self, elements: Sequence[int] | None, num_targets: int, num_sources: int, offset: int) -> Pairs:
        """See `Bias.of_group`: padding has no pairs."""
        is_there = (self.target < num_targets) & (self.source < num_sources)
        return self if bool(is_there.all()) else self.chosen(is_there.nonzero().squeeze(1))

    def rows_of(self, pairs: Tensor) -> tuple[Tensor, Tensor | None]:
        """The rows of `values` of some pairs, and the place of each row's pair among these if some have several."""
        if self.starts is None:
            return pairs if self.place is None else self.place[pairs], None
        assert self.place is not None
        first = self.starts[pairs]
        counts = self.starts[pairs + 1] - first
        number = torch.arange(len(pairs), device=pairs.device).repeat_interleave(counts)
        offset = first - counts.cumsum(0) + counts
        return self.place[torch.arange(len(number), device=pairs.device) + offset[number]], number

    def values_of(self, pairs: Tensor) -> Tensor:
        """The biases of some pairs, `[E, H or 1]`."""
        return self.summed(*self.rows_of(pairs), len(pairs))

    def summed(self, rows: Tensor, number: Tensor | None, count: int) -> Tensor:
        """Rows of `values`; those of the same one of `count` pairs are added up."""
        values = self.values.index_select(0, rows)
        if number is None:
            return values
        # Along the last dimension, this takes a sixth of the time.
        return values.new_zeros(values.size(1), count).index_add(1, number, values.t()).t()

    def _within(self, targets: slice, sources: slice) -> tuple[Tensor, tuple[Any, ...]]:
        """Which pairs are in a part, and where: element, head, row and column."""
        bounds = torch.tensor([targets.start, targets.stop], dtype=self.target.dtype, device=self.target.device)
        first, last = torch.searchsorted(self.target, bounds).tolist()
        pairs = torch.arange(first, last, device=self.target.device)
        column = self.source[first:last] - sources.start
        is_there = (column >= 0) & (column < sources.stop - sources.start)
        if not bool(is_there.all()):
            pairs, column = pairs[is_there], column[is_there]
        element = torch.zeros_like(pairs) if self.element is None else self.element[pairs]
        return pairs, (element, slice(None), self.target[pairs] - targets.start, column)

    def part(self, targets: slice, sources: slice) -> Tensor:
        """See `Bias.part`."""
        pairs, places = self._within(targets, sources)
        count = 1 if self.element is None else self.count
        size = count, self.values.size(1), targets.stop - targets.start, sources.stop - sources.start
        part = self.values.new_zeros(size)
        part[places] = self.values_of(pairs)
        return part

    def of_pairs(self, targets: Tensor, sources: Tensor) -> Tensor:
        """See `Bias.of_pairs`."""
        if self.target.numel() == 0 or targets.numel() == 0:
            return self.values.new_zeros(1, len(targets), self.values.size(1)) + self.values[:0].sum()
        width = int(max(self.source.max(), sources.max())) + 1
        listed, asked = self.target.long() * width + self.source, targets * width + sources
        pairs = torch.searchsorted(listed, asked).clamp_max(len(listed) - 1)
        return self.values_of(pairs).masked_fill((listed[pairs] != asked).unsqueeze(1), 0.0).unsqueeze(0)


class _BlockPairs(Bias):
    """A `SparseBias` on a packed graph, divided into its blocks.

    Args:
        pairs: All pairs, ordered by target, and therefore by block, without values.
        values: Their biases.
        blocks: The numbers of targets and sources of each block.
    """

    def __init__(self, pairs: Pairs, values: Tensor, blocks: Sequence[tuple[int, int]]):
        self.pairs, self.values, self.blocks = pairs, values, tuple(blocks)

    def of_group(self, elements: Sequence[int] | None, num_targets: int, num_sources: int, offset: int) -> Pairs:
        """See `Bias.of_group`."""
        assert elements is not None  # blocks are always named
        groups: dict[tuple[int, ...], Pairs] = derived(self.pairs.target, ("pairs of blocks", self.blocks), dict)
        elements = tuple(elements)
        if elements not in groups:
            groups[elements] = self._of(elements)
        return groups[elements].with_tensors([self.values])

    def _of(self, elements: tuple[int, ...]) -> Pairs:
        """The pairs of elements, without values."""
        pairs, device = self.pairs, self.pairs.target.device
        sizes = torch.tensor(self.blocks, dtype=torch.int64, device=device).view(-1, 2)
        first = sizes.cumsum(0) - sizes
        starts = F.pad(_block_of(pairs.target, self.blocks, 0).bincount(minlength=len(sizes)).cumsum(0), (1, 0))
        block = torch.tensor(elements, dtype=torch.int64, device=device) % max(len(sizes), 1)
        counts = starts[block + 1] - starts[block]
        element = torch.arange(len(elements), device=device).repeat_interleave(counts)
        number = torch.arange(len(element), device=device) + (starts[block] - counts.cumsum(0) + counts)[element]
        target = pairs.target[number] - first[block, 0][element]
        source = pairs.source[number] - first[block, 1][element]
        several = len(elements) > 1
        order = Pairs.ordered(element if several else None, target.long(), source.long(), pairs.values, len(elements))
        chosen = pairs.chosen(number if order.place is None else number[order.place])
        return Pairs(
            order.element, order.target, order.source, pairs.values, chosen.place, chosen.starts, len(elements)
        )


class _TracedPairs(Bias):
    """A `SparseBias` in a program that is being made, which cannot know how many of its pairs are where.

    Args:
        target: The target of each pair, `[E]`, in any order.
        source: Its source, `[E]`.
        values: Its bias, `[E, H or 1]` or `[E]`.
        blocks: The numbers of targets and sources of each block.
        starts: The first target and source of each element of a group. (default: none)
        size: The numbers of targets and sources of each of these. (default: none)
    """

    def __init__(
        self,
        target: Tensor,
        source: Tensor,
        values: Tensor,
        blocks: Sequence[tuple[int, int]],
        starts: Sequence[tuple[int, int]] = (),
        size: tuple[int, int] = (0, 0),
    ):
        self.target, self.source, self.blocks, self.starts, self.size = target, source, blocks, starts, size
        self.values = values if values.dim() == 2 else values.unsqueeze(1)
        self.shared = len(starts) == 1

    def tensors(self) -> tuple[Tensor, ...]:
        """See `Bias.tensors`."""
        return (self.values,)

    def with_tensors(self, tensors: Sequence[Tensor]) -> _TracedPairs:
        """See `Bias.with_tensors`."""
        return _TracedPairs(self.target, self.source, tensors[0], self.blocks, self.starts, self.size)

    def of_group(self, elements: Sequence[int] | None, num_targets: int, num_sources: int, offset: int) -> _TracedPairs:
        """See `Bias.of_group`."""
        if elements is None or len(self.blocks) == 1:
            elements = (0,)
        firsts = _first_nodes(self.blocks)
        starts = [firsts[element % len(self.blocks)] for element in elements]
        return _TracedPairs(self.target, self.source, self.values, self.blocks, starts, (num_targets, num_sources))

    def _put(self, target: Tensor, source: Tensor, size: tuple[int, ...], places: Sequence[Tensor]) -> Tensor:
        """Biases at these places of a tensor `[*size, H]`, without those that are outside of it or of the element."""
        if 0 in size:  # where nothing can be put, not even zeros
            return self.values.new_zeros(*size, self.values.size(1)) + self.values[:0].sum()
        limits = ((target, self.size[0]), (source, self.size[1]), *zip(places, size, strict=True))
        is_there = torch.ones_like(target, dtype=torch.bool)
        for place, limit in limits:
            is_there = is_there & (place >= 0) & (place < limit)
        values = self.values.masked_fill(~is_there.unsqueeze(1), 0.0)
        index: list[Tensor | None] = [place.masked_fill(~is_there, 0) for place in places]
        return values.new_zeros(*size, values.size(1)).index_put(index, values, accumulate=True)

    def part(self, targets: slice, sources: slice) -> Tensor:
        """See `Bias.part`."""
        size, parts = (targets.stop - targets.start, sources.stop - sources.start), []
        for first, second in self.starts:
            target, source = self.target - first, self.source - second
            parts.append(self._put(target, source, size, (target - targets.start, source - sources.start)))
        return torch.stack(parts).movedim(-1, 1)

    def of_pairs(self, targets: Tensor, sources: Tensor) -> Tensor:
        """See `Bias.of_pairs`."""
        if self.target.size(0) == 0:
            return self.values.new_zeros(1, targets.size(0), self.values.size(1)) + self.values[:0].sum()
        keys, order = (self.target * _FAR + self.source).sort()
        number = (keys != keys.roll(1)).long().cumsum(0)  # the same for pairs that are listed twice
        number = number - number[:1]  # so, the first is 0; without slices, which demand more pairs of a compiled graph
        sums = torch.zeros_like(self.values).index_add(0, number, self.values.index_select(0, order))
        asked = targets * _FAR + sources
        place = torch.searchsorted(keys, asked).clamp_max(self.target.size(0) - 1)
        found = sums.index_select(0, number.index_select(0, place))
        return found.masked_fill((keys.index_select(0, place) != asked).unsqueeze(1), 0.0).unsqueeze(0)


class BucketBias(Bias):
    r"""A bias for each bucket into which pairs of nodes fall, such as distances.

    .. math::
        b_{ij} = t_{B(i, j)}

    `Graphormer <https://arxiv.org/abs/2106.05234>`_ has a bucket for each length of the shortest path between two
    nodes, and `T5 <https://arxiv.org/abs/1910.10683>`_ has buckets of distances between tokens.

    Args:
        buckets: The bucket of each pair, integers from 0 (8 bits are enough, and are kept as they are): `[N, M]`, the
            same for all elements of a batch; `[B, N, M]`; or a list with one `[n, m]` for each block of a packed graph.
            Or a function of the positions of targets, `[n, 1]`, and sources, `[1, m]`, that returns buckets `[n, m]`,
            and is called for some targets at a time.
        table: The bias of each bucket, `[K, H]`, or `[K]` for all heads. Minus infinity excludes pairs.

    Shapes:
        buckets `[N, M]`, table `[K, H]`.

    Raises:
        TypeError: If `table` or the buckets are not tensors, or buckets are not integers.
        ValueError: If shapes do not fit each other or (in use) the graph.
        IndexError: In use, if a bucket has no row.

    Example:
        >>> import torch, gattn
        >>> x, table = torch.randn(4, 2, 8), torch.randn(3, 2, requires_grad=True)  # 4 nodes, 2 heads; 3 buckets
        >>> hops = torch.tensor([[0, 1, 2, 2], [1, 0, 1, 2], [2, 1, 0, 1], [2, 2, 1, 0]], dtype=torch.uint8)
        >>> gattn.attend(x, x, x, gattn.CompleteGraph(4), bias=gattn.BucketBias(hops, table)).shape
        torch.Size([4, 2, 8])
        >>> near = gattn.BucketBias(lambda target, source: (target - source).abs().clamp(max=2), table)
        >>> gattn.attend(x, x, x, gattn.CompleteGraph(4, causal=True), bias=near).shape
        torch.Size([4, 2, 8])
    """

    def __init__(self, buckets: Tensor | Sequence[Tensor] | Callable[[Tensor, Tensor], Tensor], table: Tensor):
        if not isinstance(table, Tensor):
            raise InputTypeError(f"table must be a tensor; got {type(table).__name__}.")
        if table.dim() not in (1, 2):
            raise InputError(f"table must have one row per bucket, [K, H] or [K]; got {list(table.shape)}.")
        _check_real("table", table)
        if not callable(buckets):
            buckets = buckets if isinstance(buckets, Tensor) else list(buckets)
            for tensor in [buckets] if isinstance(buckets, Tensor) else buckets:
                _check_buckets(tensor)
                if tensor.dim() not in ((2, 3) if isinstance(buckets, Tensor) else (2,)):
                    raise InputError(
                        "buckets must be [N, M], [B, N, M], or a list with one [n, m] per block; got "
                        f"{list(tensor.shape)}."
                    )
        self.buckets: Any = buckets
        self.table = table
        self.shared = callable(buckets) or (isinstance(buckets, Tensor) and buckets.dim() == 2)

    def tensors(self) -> tuple[Tensor, ...]:
        """See `Bias.tensors`."""
        return (self.table,)

    def with_tensors(self, tensors: Sequence[Tensor]) -> BucketBias:
        """See `Bias.with_tensors`."""
        return BucketBias(self.buckets, *tensors)

    def check(self, graph: Graph, batch: torch.Size, heads: int) -> None:
        """See `Bias.check`."""
        _check_heads("table", self.table if self.table.dim() == 2 else self.table.unsqueeze(1), heads)
        if callable(self.buckets):
            return
        sizes = graph.num_targets, graph.num_sources
        if isinstance(graph.blocks, OpenBlocks):
            raise InputError("buckets are for blocks of known sizes, which a compiled program's batch does not have.")
        if graph.blocks is not None:
            targets, sources = zip(*graph.blocks, strict=True) if graph.blocks else ((0,), (0,))
            sizes = max(targets), max(sources)
        if isinstance(self.buckets, Tensor):
            count = len(graph.blocks) if graph.blocks is not None else math.prod(batch)
            wanted = [*sizes] if self.shared else [count, *sizes]
            if list(self.buckets.shape) != wanted:
                raise InputError(f"buckets must be {wanted} for {graph}; got {list(self.buckets.shape)}.")
        elif graph.blocks is None or [tuple(x.shape) for x in self.buckets] != list(graph.blocks):
            raise InputError(f"a list of buckets has one [n, m] for each block of a packed graph; got one for {graph}.")
        for tensor in [self.buckets] if isinstance(self.buckets, Tensor) else self.buckets:
            _check_bounds(tensor, len(self.table))

    def term(self, graph: CompleteGraph) -> Term | None:
        """See `Bias.term`."""
        buckets = self._called(graph) if callable(self.buckets) else self.buckets
        if buckets is None or len(self.table) == 0:
            return None
        table = self.table if self.table.dim() == 2 else self.table.unsqueeze(1)
        if isinstance(buckets, Tensor):
            n, m = buckets.shape[-2:]
            count = buckets.size(0) if buckets.dim() == 3 else 1
            return Term("buckets", table, buckets.contiguous(), None, tuple((k * n * m, m) for k in range(count)))
        firsts = accumulate((x.numel() for x in buckets), initial=0)
        places = tuple((first, x.size(1)) for first, x in zip(firsts, buckets, strict=False))
        return Term("buckets", table, torch.cat([x.flatten() for x in buckets]), None, places or ((0, 0),))

    def _called(self, graph: CompleteGraph) -> list[Tensor] | None:
        """The buckets of a function, of each block; `None` if they would take much memory."""
        if is_traced():  # sizes may be open
            return None
        sizes = graph.blocks or ((graph.num_targets, graph.num_sources),)
        dtype = torch.uint8 if len(self.table) <= 2**8 else torch.int32
        if sum(n * m for n, m in sizes) * dtype.itemsize > _MOST_BUCKETS:
            return None
        found: dict[tuple[int, int], Tensor] = {}
        for n, m in sizes:
            if (n, m) not in found:
                group = Buckets(self.buckets, self.table, m - n if graph.blocks else graph.offset(n, m))
                steps = range(0, n, max(2**18 // max(m, 1), 1))
                rows = [group.part_of(slice(i, min(i + steps.step, n)), slice(0, m)) for i in steps]
                found[n, m] = (
                    torch.cat([x[0].to(dtype) for x in rows]) if rows else self.table.new_zeros(0, m).to(dtype)
                )
        return [found[size] for size in sizes]

    def rows(self, start: int, stop: int) -> Tensor:
        """See `Bias.rows`; where buckets are not shared, of all elements, `[B, H, stop - start, M]`.

        Raises:
            ValueError: If buckets are given by a function or by a list, since M is that of a graph.
        """
        if not isinstance(self.buckets, Tensor):
            raise InputError("rows() of buckets by a function or a list depend on the graph, which gattn.attend knows.")
        buckets = self.buckets if self.buckets.dim() == 3 else self.buckets.unsqueeze(0)
        part = Buckets(buckets, self.table).part(slice(start, stop), slice(0, buckets.size(2)))
        return part.squeeze(0) if self.shared else part

    def of_group(self, elements: Sequence[int] | None, num_targets: int, num_sources: int, offset: int) -> Buckets:
        """See `Bias.of_group`."""
        buckets = self.buckets
        if callable(buckets):
            return Buckets(buckets, self.table, offset)
        if not isinstance(buckets, Tensor):
            found = [buckets[element % len(buckets)] for element in elements or ()]
            found = found or [torch.zeros(0, 0, dtype=torch.uint8, device=self.table.device)]
            buckets = torch.stack(found) if len(found) > 1 else found[0].unsqueeze(0)
        elif buckets.dim() == 2:
            buckets = buckets.unsqueeze(0)
        elif elements is not None and tuple(elements) != tuple(range(buckets.size(0))):
            buckets = buckets[[element % buckets.size(0) for element in elements]]
        return Buckets(buckets[:, :num_targets, :num_sources], self.table)

    def __repr__(self) -> str:
        shape = "a function" if callable(self.buckets) else getattr(self.buckets, "shape", "a list")
        return f"BucketBias({shape if isinstance(shape, str) else list(shape)}, {len(self.table)} buckets)"


class Buckets(Bias):
    """A `BucketBias` for the elements of a group.

    Args:
        buckets: `[B or 1, N, M]`, or a function of positions.
        table: `[K, H or 1]` or `[K]`.
        offset: The position of target 0, for a function. (default: `0`)
    """

    def __init__(self, buckets: Any, table: Tensor, offset: int = 0):
        self.buckets, self.offset = buckets, offset
        self.table = table if table.dim() == 2 else table.unsqueeze(1)
        self.shared = callable(buckets) or buckets.size(0) == 1

    def tensors(self) -> tuple[Tensor, ...]:
        """See `Bias.tensors`."""
        return (self.table,)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Buckets:
        """See `Bias.with_tensors`."""
        return Buckets(self.buckets, tensors[0], self.offset)

    def part_of(self, targets: slice, sources: slice) -> Tensor:
        """The buckets of a part, `[B or 1, n, m]`."""
        if not callable(self.buckets):
            part: Tensor = self.buckets[:, targets, sources]
            return part
        places = (torch.arange(x.start, x.stop, device=self.table.device) for x in (targets, sources))
        target, source = places
        return self._called(target.unsqueeze(1) + self.offset, source.unsqueeze(0)).unsqueeze(0)

    def _called(self, target: Tensor, source: Tensor) -> Tensor:
        """The buckets at these positions, which are broadcast."""
        buckets: Tensor = self.buckets(target, source)
        _check_buckets(buckets)
        try:
            buckets = buckets.expand((target + source).shape)
        except RuntimeError as error:
            raise InputError(
                f"the function of a BucketBias must return one bucket per pair, [n, m]; got {list(buckets.shape)} for "
                f"{list(target.shape)} and {list(source.shape)}."
            ) from error
        _check_bounds(buckets, len(self.table))
        return buckets

    def _of(self, buckets: Tensor) -> Tensor:
        """Biases with heads in front, `[H, ...]`."""
        found = self.table.t().contiguous().index_select(1, buckets.reshape(-1).int())
        return found.view(self.table.size(1), *buckets.shape)

    def part(self, targets: slice, sources: slice) -> Tensor:
        """See `Bias.part`."""
        return self._of(self.part_of(targets, sources)).transpose(0, 1)

    def of_pairs(self, targets: Tensor, sources: Tensor) -> Tensor:
        """See `Bias.of_pairs`."""
        if callable(self.buckets):
            buckets = self._called(targets + self.offset, sources).unsqueeze(0)
        else:
            buckets = self.buckets[:, targets, sources]
        return self._of(buckets).permute(1, 2, 0)


class DistanceBias(Bias):
    """A bias for each distance between positions, source minus target, within each sequence.

    Args:
        table: The bias of each distance from `first` on, `[K, H]`.
        first: The smallest distance.
        offset: The position of target 0. (default: `0`)
    """

    def __init__(self, table: Tensor, first: int, offset: int = 0):
        self.table, self.first, self.offset = table, first, offset

    def tensors(self) -> tuple[Tensor, ...]:
        """See `Bias.tensors`."""
        return (self.table,)

    def with_tensors(self, tensors: Sequence[Tensor]) -> DistanceBias:
        """See `Bias.with_tensors`."""
        return DistanceBias(tensors[0], self.first, self.offset)

    def check(self, graph: Graph, batch: torch.Size, heads: int) -> None:
        """See `Bias.check`."""
        _check_heads("table", self.table, heads)

    def term(self, graph: CompleteGraph) -> Term | None:
        """See `Bias.term`."""
        return Term("distances", self.table, first=self.first) if len(self.table) else None

    def of_group(self, elements: Sequence[int] | None, num_targets: int, num_sources: int, offset: int) -> DistanceBias:
        """See `Bias.of_group`."""
        return DistanceBias(self.table, self.first, offset)

    def part(self, targets: slice, sources: slice) -> Tensor:
        """See `Bias.part`: each row is that of the next target, moved by one."""
        size, span = targets.stop - targets.start, sources.stop - sources.start
        if size == 0 or span == 0:
            return self.table.new_zeros(1, self.table.size(1), size, span)
        start = sources.start - (targets.stop - 1 + self.offset) - self.first
        return self.table[start : start + size + span - 1].unfold(0, span, 1).flip(0).transpose(0, 1).unsqueeze(0)

    def of_pairs(self, targets: Tensor, sources: Tensor) -> Tensor:
        """See `Bias.of_pairs`."""
        return self.table[sources - (targets + self.offset) - self.first].unsqueeze(0)


def _first_nodes(blocks: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The first target and source of each block of a packed graph, and the numbers of them all."""
    return tuple(accumulate(blocks, lambda a, b: (a[0] + b[0], a[1] + b[1]), initial=(0, 0)))


def _block_of(nodes: Tensor, blocks: Sequence[tuple[int, int]] | OpenBlocks, side: int) -> Tensor:
    """The block of each node of a packed graph, a target (side 0) or a source."""
    if isinstance(blocks, OpenBlocks):
        return (blocks.of_source if side else blocks.of_target).index_select(0, nodes)
    sizes = torch.tensor([sizes[side] for sizes in blocks], dtype=nodes.dtype, device=nodes.device)
    return torch.bucketize(nodes.contiguous(), sizes.cumsum(0, dtype=nodes.dtype), right=True)


def _check_real(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        raise InputError(f"{name} must be of a floating-point type; got {tensor.dtype}.")


def _check_heads(name: str, tensor: Tensor, heads: int) -> None:
    if tensor.size(1) not in (1, heads):
        raise InputError(f"{name} must have a bias for each of the {heads} heads; got {list(tensor.shape)}.")


def _check_buckets(buckets: Any) -> None:
    if not isinstance(buckets, Tensor):
        raise InputTypeError(f"buckets must be a tensor; got {type(buckets).__name__}.")
    if buckets.dtype not in INTEGER_DTYPES:
        raise InputTypeError(f"buckets must be integers; got {buckets.dtype}.")


def _check_bounds(buckets: Tensor, count: int) -> None:
    """Raises `IndexError` if a bucket has no row; tensors that stay the same are looked at once."""
    if buckets.numel() == 0 or not is_readable(buckets):
        return
    low, high = derived(buckets, "bounds", lambda: [int(bound) for bound in buckets.aminmax()])
    if low < 0 or high >= count:
        raise IndexError(f"buckets hold {low if low < 0 else high}, but the table has {count} rows (0 to {count - 1}).")
