"""A graph in which every target attends to every source, or to those that a rule selects."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from operator import mul
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from gattn.errors import InputError, InputTypeError, check_flag, is_integer
from gattn.graphs.base import EdgeList, Graph, checked_size, rows_of
from gattn.graphs.edge_lists import INTEGER_DTYPES, derived
from gattn.torch_private import is_intercepted

__all__ = ["MOST_LISTED", "CompleteGraph", "OpenBlocks", "packed_by"]

#: If targets see fewer sources than this on average, a list of edges, once it was made, takes less time than tiles of
#: pairs on CPUs: two thirds with blocks of 10 nodes, as much with 23.
_SMALL_BLOCK = 16

#: Lists of so many edges of complete graphs are kept; a layout takes 32 bytes for each.
MOST_LISTED = 2**16


class CompleteGraph(Graph):
    r"""A graph in which every target attends to every source, as in the self-attention of a Transformer.

    It is symbolic: no edges are stored. The options give the usual variants with fewer edges, and `packed` lays several
    such graphs end to end.

    Args:
        num_targets: N.
        num_sources: M. (default: N)
        causal: Whether targets see only the sources up to their own position. With N ≠ M, the *last* target sees every
            source (bottom-right alignment, as a cached decoding step needs). (default: `False`)
        window: A sliding window, `(left, right)`: how far before and after its own position a target sees, inclusive; a
            positive integer means both. (default: `None`, no limit)
        source_lengths: For a padded batch, the number of real sources of each element, `[B]`. (default: `None`)
        target_lengths: Likewise for targets; the output of the others is zero. (default: `None`)

    Raises:
        TypeError: If a size is not an integer, `causal` is neither true nor false, the window holds no integers, or
            lengths are not a tensor.
        ValueError: If a size is negative, the window is neither a pair of numbers from 0 nor one positive integer, or a
            length is larger than its size.

    Example:
        >>> import gattn
        >>> gattn.CompleteGraph(3, causal=True).edge_index
        tensor([[0, 0, 1, 0, 1, 2],
                [0, 1, 1, 2, 2, 2]])
    """

    _attributes: ClassVar[tuple[str, ...]] = (
        *("num_targets", "num_sources", "causal", "window", "source_lengths", "target_lengths", "blocks", "_offset"),
    )
    _offset: int | None = None
    is_dense = True
    heads_dim = -3
    num_sources: int
    num_targets: int

    def __init__(
        self,
        num_targets: int,
        num_sources: int | None = None,
        *,
        causal: bool = False,
        window: int | tuple[int, int] | None = None,
        source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
    ):
        num_sources = num_targets if num_sources is None else num_sources
        # Layers make their graph in each call.
        is_usual = type(num_targets) is int and type(num_sources) is int and num_targets >= 0 <= num_sources
        self.num_targets = num_targets if is_usual else checked_size("num_targets", num_targets)
        self.num_sources = num_sources if is_usual else checked_size("num_sources", num_sources)
        if causal is not True and causal is not False:
            check_flag("causal", causal)
        self.causal = causal
        self.window = None if window is None else _checked_window(window)
        self.source_lengths = source_lengths
        self.target_lengths = target_lengths
        if not (source_lengths is None and target_lengths is None):
            self._check_lengths()

    def _check_lengths(self) -> None:
        for name, lengths, limit in (
            ("source_lengths", self.source_lengths, self.num_sources),
            ("target_lengths", self.target_lengths, self.num_targets),
        ):
            if lengths is None:
                continue
            _check_counts(name, lengths)
            if _is_known(lengths) and int(lengths.max()) > limit:
                raise ValueError(f"{name} must lie between 0 and {limit}; got {lengths.tolist()}.")
        source_lengths, target_lengths = self.source_lengths, self.target_lengths
        if source_lengths is not None and target_lengths is not None and source_lengths.shape != target_lengths.shape:
            raise ValueError(
                f"source_lengths and target_lengths must be for the same batch; got {list(source_lengths.shape)} and "
                f"{list(target_lengths.shape)}."
            )

    @classmethod
    def packed(
        cls,
        lengths: Any = None,
        source_lengths: Any = None,
        *,
        ptr: Tensor | None = None,
        source_ptr: Tensor | None = None,
        batch: Tensor | None = None,
        source_batch: Tensor | None = None,
        causal: bool = False,
        window: int | tuple[int, int] | None = None,
    ) -> CompleteGraph:
        """Complete graphs laid end to end: each block attends within itself, without padding.

        Of the three forms, only `batch` lets a compiled program leave the blocks' sizes open.

        Args:
            lengths: The number of targets in each block: a tensor `[B]`, or a sequence of integers.
                (default: `None`, given by `ptr`)
            source_lengths: Likewise for sources. (default: `None`, as many as targets)
            ptr: Instead of `lengths`: where each block begins and the last one ends, `[B + 1]`, as in PyG's batches.
                (default: `None`)
            source_ptr: Likewise for sources. (default: `None`)
            batch: Instead of both: the block of each node, `[N]`, in ascending order, as in PyG's batches. The graph is
                kept for as long as this tensor lives. (default: `None`)
            source_batch: Likewise for sources, `[M]`. (default: `None`, as for targets)
            causal: As for a single graph, within each block. (default: `False`)
            window: Likewise. (default: `None`)

        Raises:
            TypeError: If `lengths` or `ptr` is neither a tensor nor a sequence of integers, or as for a single graph.
            ValueError: If not exactly one of `lengths`, `ptr` and `batch` is given, or their numbers are not valid.

        Example:
            >>> import gattn
            >>> gattn.CompleteGraph.packed([1, 2]).edge_index
            tensor([[0, 1, 2, 1, 2],
                    [0, 1, 1, 2, 2]])
        """
        if batch is not None:
            if not (lengths is source_lengths is ptr is source_ptr is None):
                raise InputError("batch says which nodes each block has: give no lengths and no ptr besides.")
            return _of_batch(batch, source_batch, causal, window)
        if source_batch is not None:
            raise InputError("source_batch needs batch, the block of each target.")
        targets = _block_sizes("lengths", lengths, "ptr", ptr)
        if targets is None:
            raise ValueError(
                "a packed graph needs the lengths of its blocks, or ptr, where they begin, or batch, the block of each "
                "node."
            )
        sources = _block_sizes("source_lengths", source_lengths, "source_ptr", source_ptr)
        sources = targets if sources is None else sources
        if len(sources) != len(targets):
            raise ValueError(
                f"targets and sources must have the same number of blocks; got {len(targets)} and {len(sources)}."
            )
        return _PackedGraph(tuple(zip(targets, sources, strict=True)), causal, window)

    @property
    def has_small_blocks(self) -> bool:
        """Whether it is packed in blocks so small that a list of their edges is faster on the CPU."""
        return False

    def block_of_each(self, side: Literal["target", "source"], device: torch.device) -> tuple[Tensor, int]:
        """The block of each target or source of a packed graph, `[N]`, and a number that all of these are less than."""
        raise NotImplementedError

    @property
    def has_lengths(self) -> bool:
        """Whether some of the nodes do not exist."""
        return self.source_lengths is not None or self.target_lengths is not None

    @property
    def num_pairs(self) -> int:
        """The number of pairs of a target and a source in one block, whether an edge joins them or not."""
        return self.num_targets * self.num_sources

    def for_targets(self, index: Tensor) -> Graph:
        """See `Graph.for_targets`."""
        self._check_some(index)
        if self.target_lengths is not None or (self.has_lengths and self.reach != (None, None)):
            raise InputError("targets of padding, or a causal graph or window with lengths, cannot be chosen from.")
        n, m, (left, right) = self.num_targets, self.num_sources, self.reach
        if self.blocks is None:
            if left is None and right is None:
                return CompleteGraph(index.numel(), m, source_lengths=self.source_lengths)
            sizes, position = torch.tensor([[n, m]], device=index.device), index.long()
            block = torch.zeros_like(position)
            first, offset = block, torch.full_like(position, self.offset(n, m))
        else:
            sizes = torch.tensor(self.blocks, dtype=torch.int64, device=index.device).view(-1, 2)
            block = self.block_of_each("target", index.device)[0][index]
            if left is None and right is None:
                if bool((block.diff() < 0).any()):
                    raise InputError("targets of a packed graph must be chosen in the order of its blocks.")
                counts = block.bincount(minlength=len(sizes))
                return CompleteGraph.packed(counts, sizes[:, 1])
            starts = sizes.cumsum(0) - sizes
            position, first = index - starts[block, 0], starts[block, 1]
            offset = (sizes[:, 1] - sizes[:, 0])[block]
        size = sizes[block, 1]
        begin = torch.zeros_like(position) if left is None else (position + offset - left).clamp(min=0)
        end = size if right is None else torch.minimum(position + offset + right + 1, size)
        some = torch.arange(index.numel(), device=index.device)
        source, place = rows_of(some, first + torch.minimum(begin, size), (end - begin).clamp(min=0))
        found = cast(Graph, Graph._list(torch.stack([source, place]), index.numel(), m))
        found.has_own_loops = n == m
        return found

    def with_causal(self) -> CompleteGraph:
        """The same graph with `causal=True`."""
        return self if self.causal else self._changed(causal=True)

    def hide_later(self) -> tuple[CompleteGraph, None]:
        """See `Graph.hide_later`: no edge is left to be masked."""
        return self.with_causal(), None

    def hide_padding(self, padding: Tensor, batch: torch.Size) -> tuple[CompleteGraph, Tensor | None]:
        """See `Graph.hide_padding`; if only the ends of sequences are padded, the mask becomes lengths."""
        has_room = self.blocks is None and self.source_lengths is None and not self.is_sharded
        if torch.compiler.is_compiling() or padding.device.type != "cpu" or not has_room:
            return self, padding
        if padding.dtype != torch.bool or padding.dim() != 2 or padding.shape != (*batch, self.num_sources):
            return self, padding
        lengths = padding.size(1) - padding.sum(1)
        if bool((padding != (torch.arange(padding.size(1), device=padding.device) >= lengths.unsqueeze(1))).any()):
            return self, padding
        return self.with_source_lengths(lengths), None

    def with_more_sources(self, count: int, device: torch.device) -> tuple[Graph, Tensor]:
        """See `Graph.with_more_sources`; only one graph as a whole can have more."""
        if self.blocks is not None or self.is_sharded:
            return super().with_more_sources(count, device)
        seen = self.visible(self.num_targets, self.num_sources, self.num_sources - self.num_targets, device)
        if self.source_lengths is not None:
            real = torch.arange(self.num_sources, device=device) < self.source_lengths.to(device).unsqueeze(-1)
            seen = seen & real.unsqueeze(-2).unsqueeze(-2)
        graph = CompleteGraph(self.num_targets, self.num_sources + count, target_lengths=self.target_lengths)
        return graph, F.pad(seen, (0, count), value=True)

    def with_source_lengths(self, lengths: Tensor) -> CompleteGraph:
        """The same graph for a batch whose elements have these numbers of real sources."""
        graph = self._changed(source_lengths=lengths)
        graph._check_lengths()
        return graph

    def to(self, device: torch.device | str) -> CompleteGraph:
        """The same graph, with its lengths on another device."""
        lengths = {name: getattr(self, name) for name in ("source_lengths", "target_lengths")}
        return self._changed(**{name: x if x is None else x.to(device) for name, x in lengths.items()})

    @property
    def edge_index(self) -> Tensor:
        """All edges as `[2, E]`, sources above targets, target by target; for the reference and for drawing.

        It disregards lengths, which differ across the batch: `length_mask` says which edges remain.
        """
        return self._edges(None)

    def _edges(self, device: torch.device | str | None) -> Tensor:
        return self._block_edges(self.num_targets, self.num_sources, device)

    def _block_edges(self, num_targets: int, num_sources: int, device: torch.device | str | None) -> Tensor:
        seen = self.visible(num_targets, num_sources, self.offset(num_targets, num_sources), device)
        target, source = seen.nonzero().unbind(1)
        return torch.stack([source, target])

    def resolve(
        self,
        num_sources: int,
        num_targets: int | None,
        batch: torch.Size | None = None,
        device: torch.device | None = None,
    ) -> CompleteGraph:
        """See `Graph.resolve`."""
        self._check_sizes("CompleteGraph", num_sources, num_targets)
        for lengths in (self.source_lengths, self.target_lengths):
            if batch is not None and lengths is not None and lengths.shape != batch:
                raise InputError(
                    f"the graph has lengths for a batch of shape {list(lengths.shape)}, but the features have "
                    f"{list(batch)} in front."
                )
        return self

    def edge_list(self, device: torch.device, *, raw: bool = False) -> EdgeList:
        """See `Graph.edge_list`: short lists are kept, with what is derived from them."""
        if type(self) is not CompleteGraph or device.type != "cpu" or self.num_pairs > MOST_LISTED or is_intercepted():
            return EdgeList(self._edges(device), self.num_sources, self.num_targets)
        edge_index = _kept_edges(self.num_targets, self.num_sources, self.causal, self.window, self._offset, device)
        return EdgeList(edge_index, self.num_sources, self.num_targets)

    def with_self_loops(self) -> CompleteGraph:
        """The graph itself, since each node already attends to itself.

        Raises:
            ValueError: If targets and sources are different nodes.
        """
        if self.num_targets != self.num_sources:
            raise InputError(
                f"add_self_loops=True is not possible here: the {self.num_targets} targets and {self.num_sources} "
                "sources of this CompleteGraph are different nodes. Make the layer with add_self_loops=False."
            )
        return self

    def with_features(
        self, features: Tensor | None, fill_value: float | Tensor | str = "mean", hides: bool = False
    ) -> tuple[CompleteGraph, Tensor | None]:
        """See `Graph.with_features`; nothing is filled in, because no self-loop is added."""
        if features is not None and features.size(0) != self.num_edges:
            raise InputError(
                f"edge_attr needs one row per edge; got {features.size(0)} rows for the {self.num_edges} edges of "
                f"{self}."
            )
        return self, features

    def with_weights(self, weights: Any, *, as_values: bool = True) -> Any:
        """`(graph, weights)`, as PyG's layers have no such graphs."""
        return self, weights

    def from_pairs(self, pairs: Tensor, heads: int) -> Tensor:
        """See `Graph.from_pairs`: this graph's users give pairs, so they are returned as they are."""
        return pairs

    def distances(self, device: torch.device) -> Tensor:
        """See `Graph.distances`: `[N, M]`; the last target has the position of the last source."""
        sizes = self.num_targets, self.num_sources
        return _distances(*sizes, self.offset(*sizes), device)

    def per_edge(self, term: Tensor, name: str, batch: torch.Size, heads: int, edges: EdgeList) -> Tensor:
        """See `Graph.per_edge`; here, terms are broadcastable to `[..., H, N, M]`."""
        return self.pick(self.expand(term, name, batch, heads), edges.edge_index)

    def expand(self, term: Tensor, name: str, batch: torch.Size, heads: int) -> Tensor:
        """A bias or mask in its full shape, `[..., H, N, M]`.

        Raises:
            ValueError: If it is not broadcastable to this shape.
        """
        shape, dimensions = self._dense_shape(batch, heads)
        try:
            return term.expand(shape)
        except RuntimeError as error:
            raise InputError(
                f"{name} on this complete graph must be broadcastable to {list(shape)} ({dimensions}); got "
                f"{list(term.shape)}."
            ) from error

    def _dense_shape(self, batch: torch.Size, heads: int) -> tuple[tuple[int, ...], str]:
        return (*batch, heads, self.num_targets, self.num_sources), "batch, heads, targets, sources"

    def real_edges(self, edges: EdgeList) -> Tensor | None:
        """See `Graph.real_edges`."""
        mask = self.length_mask(edges.edge_index)
        return None if mask is None else mask.unsqueeze(-1)

    def dress(self, weights: Tensor, edges: EdgeList) -> Any:
        """See `Graph.dress`; here, weights are matrices."""
        return self.to_dense(weights, edges.edge_index)

    def visible(
        self, num_targets: int, num_sources: int, offset: int, device: torch.device | str | None = None
    ) -> Tensor:
        """Which sources `causal` and `window` leave visible to which targets, `[N, M]`, True = visible.

        Args:
            num_targets: N.
            num_sources: M.
            offset: The source at the position of target 0.
            device: Where to make it. (default: `None`)
        """
        distance = _distances(num_targets, num_sources, offset, device)
        seen = torch.ones_like(distance, dtype=torch.bool)
        left, right = self.reach
        if left is not None:
            seen &= distance >= -left
        if right is not None:
            seen &= distance <= right
        return seen

    def offset(self, num_targets: int, num_sources: int) -> int:
        """The source at the position of target 0; the last target and source are aligned, except in a part."""
        return num_sources - num_targets if self._offset is None else self._offset

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """How far before and after its own position a target sees; `None` means no limit."""
        left, right = (None, None) if self.window is None else self.window
        return left, 0 if self.causal else right

    def length_mask(self, edge_index: Tensor) -> Tensor | None:
        """Which edges connect real nodes, `[B, E]`, True = real; `None` if the graph has no lengths."""
        mask = None
        for row, lengths in ((0, self.source_lengths), (1, self.target_lengths)):
            if lengths is not None:
                real = edge_index[row] < lengths.to(edge_index.device).unsqueeze(-1)
                mask = real if mask is None else mask & real
        return mask

    def to_dense(self, weights: Tensor, edge_index: Tensor) -> Any:
        """Attention weights `[..., E, H]` as matrices `[..., H, N, M]`, zero where there is no edge.

        A packed graph gives a list with one matrix per block.
        """
        source, target = edge_index
        return _to_matrix(weights, source, target, self.num_targets, self.num_sources)

    def pick(self, dense: Tensor, edge_index: Tensor) -> Tensor:
        """The entries of `[..., H, N, M]` that belong to edges, as `[..., E, H]`.

        For a packed graph, `dense` is `[B, H, N, M]`, one element per block, with N and M of the largest blocks.
        """
        source, target = edge_index
        return dense[..., target, source].transpose(-1, -2)

    def __repr__(self) -> str:
        parts = [f"{self.num_targets}, {self.num_sources}"]
        parts += ["causal=True"] if self.causal else []
        parts += [f"window={self.window}"] if self.window is not None else []
        parts += ["source_lengths=..."] if self.source_lengths is not None else []
        parts += ["target_lengths=..."] if self.target_lengths is not None else []
        parts += [f"{len(self.blocks)} blocks"] if self.blocks is not None else []
        return f"CompleteGraph({', '.join(parts)})"


class _PackedGraph(CompleteGraph):
    """What `CompleteGraph.packed` makes: several complete graphs laid end to end."""

    _attributes = (*CompleteGraph._attributes, "num_pairs")
    blocks: tuple[tuple[int, int], ...]
    num_pairs: int = 0
    _lists: Mapping[torch.device, Tensor] = {}

    def __init__(
        self, blocks: tuple[tuple[int, int], ...], causal: bool = False, window: int | tuple[int, int] | None = None
    ):
        targets, sources = zip(*blocks, strict=True) if blocks else ((), ())
        super().__init__(sum(targets), sum(sources), causal=causal, window=window)
        self.blocks = blocks
        self.num_pairs = sum(map(mul, targets, sources))

    @property
    def has_small_blocks(self) -> bool:
        """See `CompleteGraph.has_small_blocks`."""
        return not self.has_lengths and self.num_pairs < _SMALL_BLOCK * self.num_targets

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lists": {}}

    def block_of_each(self, side: Literal["target", "source"], device: torch.device) -> tuple[Tensor, int]:
        """See `CompleteGraph.block_of_each`."""
        place, count = (1, self.num_sources) if side == "source" else (0, self.num_targets)
        sizes = torch.tensor([block[place] for block in self.blocks], dtype=torch.int64, device=device)
        blocks = torch.arange(len(self.blocks), device=device)
        return blocks.repeat_interleave(sizes, output_size=count), len(self.blocks)

    def edge_list(self, device: torch.device, *, raw: bool = False) -> EdgeList:
        """See `Graph.edge_list`: one tensor for all layers, with which what is derived from it is kept."""
        if is_intercepted():
            return super().edge_list(device, raw=raw)
        if device not in self._lists:
            with torch.inference_mode(False):
                self._lists = {**self._lists, device: self._edges(device)}
        return EdgeList(self._lists[device], self.num_sources, self.num_targets)

    def _edges(self, device: torch.device | str | None) -> Tensor:
        """All edges; those of the blocks as whole matrices first, from which a reach then selects."""
        num_targets, num_sources = torch.tensor(self.blocks, dtype=torch.int64, device=device).view(-1, 2).unbind(1)
        nodes, edges = torch.arange(self.num_targets, device=device), self.num_pairs
        block = torch.arange(len(self.blocks), device=device)
        block = block.repeat_interleave(num_targets, output_size=self.num_targets)
        per_target = num_sources.index_select(0, block)
        target = nodes.repeat_interleave(per_target, output_size=edges)
        first_source = (num_sources.cumsum(0) - num_sources).index_select(0, block)
        first_edge = per_target.cumsum(0) - per_target
        source = torch.arange(edges, device=device) + (first_source - first_edge).index_select(0, target)
        left, right = self.reach
        if left is not None or right is not None:
            ends = num_targets.cumsum(0) - num_sources.cumsum(0)  # the last target sees from the last source
            distance = source - target + ends.index_select(0, block).index_select(0, target)
            seen = torch.ones_like(distance, dtype=torch.bool)
            seen &= seen if left is None else distance >= -left
            seen &= seen if right is None else distance <= right
            source, target = source[seen], target[seen]
        return torch.stack([source, target])

    def from_pairs(self, pairs: Tensor, heads: int) -> Tensor:
        """See `Graph.from_pairs`: the part of each block, `[B, ..., N, M]`, padded to the size of the largest.

        Raises:
            ValueError: If there is a batch in front.
        """
        if not self.blocks:
            return pairs
        if pairs.dim() > 3:
            raise ValueError("a packed graph's masks must be [N, M] or [H, N, M], for its nodes laid end to end.")
        pairs = pairs.expand(*pairs.shape[:-2], self.num_targets, self.num_sources)
        most_targets, most_sources = self._largest()
        parts, first_target, first_source = [], 0, 0
        for num_targets, num_sources in self.blocks:
            part = pairs.narrow(-2, first_target, num_targets).narrow(-1, first_source, num_sources)
            parts.append(F.pad(part, (0, most_sources - num_sources, 0, most_targets - num_targets)))
            first_target, first_source = first_target + num_targets, first_source + num_sources
        blocks = torch.stack(parts)
        return blocks.unsqueeze(1) if blocks.dim() == 3 else blocks

    def distances(self, device: torch.device) -> Tensor:
        """See `Graph.distances`: `[B, N, M]`, or one matrix for all blocks if it is the same."""
        offsets = torch.tensor(self.blocks, dtype=torch.int64, device=device).view(-1, 2).diff()
        if len({num_sources - num_targets for num_targets, num_sources in self.blocks}) == 1:
            offsets = offsets[:1]
        return _distances(*self._largest(), 0, device) - offsets.unsqueeze(-1)

    def positions(self, side: Literal["target", "source"], first: int, count: int, device: torch.device) -> Tensor:
        """See `Graph.positions`; each block is a sequence, whose last target has the position of its last source."""
        rows = [
            range(num_sources - num_targets, num_sources) if side == "target" else range(num_sources)
            for num_targets, num_sources in self.blocks
        ]
        parts = (torch.arange(row.start, row.stop, device=device) for row in rows)
        return torch.cat([torch.arange(0, device=device), *parts])

    def _largest(self) -> tuple[int, int]:
        """The number of targets and sources of the largest blocks."""
        targets, sources = (max(sizes) for sizes in zip(*self.blocks, strict=True)) if self.blocks else (0, 0)
        return targets, sources

    def _dense_shape(self, batch: torch.Size, heads: int) -> tuple[tuple[int, ...], str]:
        targets, sources = self._largest()
        return (len(self.blocks), heads, targets, sources), "blocks, heads, most targets, most sources"

    def as_bias(self, weights: Any) -> Tensor:
        """See `Graph.as_bias`: matrices of all blocks, `[..., B, H, N, M]`, with zeros beyond their sizes."""
        shapes = [tuple(matrix.shape[-2:]) if isinstance(matrix, Tensor) else None for matrix in weights]
        if isinstance(weights, Tensor) or shapes != list(self.blocks):
            raise InputError(f"the weights of a packed graph are a list with one matrix [H, N, M] per block, {self}.")
        targets, sources = self._largest()
        padded = [F.pad(matrix, (0, sources - matrix.size(-1), 0, targets - matrix.size(-2))) for matrix in weights]
        return torch.stack(padded, -4) if padded else torch.zeros(0, 1, 0, 0)

    def expand(self, term: Tensor, name: str, batch: torch.Size, heads: int) -> Tensor:
        """See `CompleteGraph.expand`; weights, unlike biases and masks, may have a batch in front of the blocks."""
        if name == "weights" and term.dim() > 4 and term.shape[:-4] == batch:
            return term.expand(*batch, *self._dense_shape(batch, heads)[0])
        return super().expand(term, name, batch, heads)

    def to_dense(self, weights: Tensor, edge_index: Tensor) -> list[Tensor]:
        if self.reach != (None, None):  # else, edges are whole matrices already
            source, target = edge_index
            counts = torch.tensor(self.blocks, dtype=torch.int64, device=source.device).view(-1, 2)
            block = torch.arange(len(self.blocks), device=source.device).repeat_interleave(counts[:, 0])[target]
            row, column = (
                nodes - (counts.cumsum(0) - counts)[block, side] for side, nodes in enumerate((target, source))
            )
            pairs = counts.prod(1)
            place = (pairs.cumsum(0) - pairs)[block] + row * counts[block, 1] + column
            whole = weights.new_zeros(*weights.shape[:-2], self.num_pairs, weights.size(-1))
            weights = whole.index_copy(-2, place, weights)
        sizes = [num_targets * num_sources for num_targets, num_sources in self.blocks]
        return [
            torch.unflatten(part, -2, block).movedim(-1, -3).contiguous()
            for part, block in zip(torch.split(weights, sizes, -2), self.blocks, strict=True)
        ]

    def pick(self, dense: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        counts = torch.tensor(self.blocks, dtype=torch.int64, device=source.device).view(-1, 2)
        block = torch.arange(len(self.blocks), device=source.device).repeat_interleave(counts[:, 0])[target]
        first = counts.cumsum(0) - counts
        picked = dense[..., block, :, target - first[block, 0], source - first[block, 1]]
        return picked if dense.dim() == 4 else picked.movedim(0, -2)


class OpenBlocks:
    """The blocks of a packed graph in a compiled program, which does not know their sizes.

    Args:
        of_target: The block of each target, `[N]`, in ascending order.
        of_source: The block of each source, `[M]`, likewise.
    """

    def __init__(self, of_target: Tensor, of_source: Tensor):
        self.of_target, self.of_source = of_target, of_source

    def together(self) -> Tensor:
        """Which targets and sources are in the same block, `[1, 1, N, M]`."""
        return (self.of_target.unsqueeze(1) == self.of_source)[None, None]


class _OpenPackedGraph(CompleteGraph):
    """What `CompleteGraph.packed` makes of a batch in a compiled program."""

    blocks: Any

    def __init__(self, batch: Tensor, source_batch: Tensor, causal: bool, window: int | tuple[int, int] | None):
        super().__init__(batch.size(0), source_batch.size(0), causal=causal, window=window)
        self.blocks = OpenBlocks(batch, source_batch)

    def block_of_each(self, side: Literal["target", "source"], device: torch.device) -> tuple[Tensor, int]:
        """See `CompleteGraph.block_of_each`: a block has the number of its first source."""
        sources = self.blocks.of_source
        return torch.searchsorted(sources, getattr(self.blocks, f"of_{side}")), self.num_sources + 1

    def __repr__(self) -> str:
        return f"CompleteGraph({self.num_targets}, blocks of a compiled program)"


def _of_batch(
    batch: Tensor, source_batch: Tensor | None, causal: bool, window: int | tuple[int, int] | None
) -> CompleteGraph:
    """The packed graph of the nodes of a batch, the same one for all who ask."""
    for name, block in (("batch", batch), ("source_batch", source_batch)):
        if not isinstance(block, Tensor | None):
            raise InputTypeError(f"{name} must be a tensor; got {type(block).__name__}.")
        if block is not None and (block.dtype not in INTEGER_DTYPES or block.dim() != 1):
            raise InputError(
                f"{name} must hold the block of each node, integers [N]; got {list(block.shape)} of {block.dtype}."
            )
    if torch.compiler.is_compiling():
        return _OpenPackedGraph(batch, batch if source_batch is None else source_batch, causal, window)
    if source_batch is not None:
        counts = [_counts("batch", batch), _counts("source_batch", source_batch)]
        most = max(map(len, counts))
        targets, sources = (F.pad(count, (0, most - len(count))) for count in counts)
        return CompleteGraph.packed(targets, sources, causal=causal, window=window)
    key = "packed graph", causal, window
    graph: CompleteGraph
    graph = derived(batch, key, lambda: CompleteGraph.packed(_counts("batch", batch), causal=causal, window=window))
    return graph


def packed_by(of_target: Tensor, of_source: Tensor, causal: bool = False) -> CompleteGraph:
    """The packed graph of the tensors in `OpenBlocks`, of which one may be both."""
    is_one = of_target is of_source or of_target.data_ptr() == of_source.data_ptr()
    return CompleteGraph.packed(batch=of_target, source_batch=None if is_one else of_source, causal=causal)


def _counts(name: str, batch: Tensor) -> Tensor:
    """The number of nodes in each block."""
    if batch.numel() and (bool((batch.diff() < 0).any()) or int(batch[0]) < 0):
        raise InputError(f"{name} must give the graph of each node in ascending order, as PyG's batches do.")
    return batch.bincount()


def _distances(num_targets: int, num_sources: int, offset: int, device: torch.device | str | None) -> Tensor:
    target = torch.arange(num_targets, device=device).unsqueeze(1)
    return torch.arange(num_sources, device=device) - target - offset


def _to_matrix(weights: Tensor, source: Tensor, target: Tensor, num_targets: int, num_sources: int) -> Tensor:
    matrix = weights.new_zeros((*weights.shape[:-2], weights.size(-1), num_targets, num_sources))
    matrix[..., target, source] = weights.transpose(-1, -2)
    return matrix


@lru_cache(maxsize=16)
def _kept_edges(
    num_targets: int,
    num_sources: int,
    causal: bool,
    window: tuple[int, int] | None,
    offset: int | None,
    device: torch.device,
) -> Tensor:
    graph = CompleteGraph(num_targets, num_sources, causal=causal, window=window)
    graph._offset = offset
    with torch.inference_mode(False):  # what is kept must also serve training
        return graph._edges(device)


def _checked_window(window: Any) -> tuple[int, int]:
    """How far a target sees to both sides."""
    sides: Any = window if isinstance(window, (tuple, list)) else (window,)
    is_one = len(sides) == 1 and is_integer(window) and window > 0
    if not is_one and not (len(sides) == 2 and all(is_integer(side) and side >= 0 for side in sides)):
        error = InputError if all(map(is_integer, sides)) else InputTypeError
        raise error(f"window must be (left, right), both at least 0, or one positive integer; got {window!r}.")
    return sides[0], sides[-1]


def _check_counts(name: str, lengths: Any) -> None:
    if not isinstance(lengths, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(lengths).__name__}.")
    if lengths.is_floating_point() or lengths.dtype == torch.bool or lengths.dim() == 0:
        raise ValueError(f"{name} must hold one integer per element of the batch, [B]; got {lengths}.")
    if _is_known(lengths) and int(lengths.min()) < 0:
        raise ValueError(f"{name} must not be negative; got {lengths.tolist()}.")


def _is_known(lengths: Tensor) -> bool:
    """Whether there are numbers to check."""
    return bool(lengths.numel()) and not torch.compiler.is_compiling() and not lengths.is_meta


def _as_tensor(name: str, numbers: Any) -> Tensor:
    """Numbers of blocks as a tensor, on the CPU unless it is one already; no numbers are integers."""
    try:
        device = numbers.device if isinstance(numbers, Tensor) else "cpu"
        return torch.as_tensor(numbers, dtype=None if len(numbers) else torch.int64, device=device)
    except (TypeError, ValueError) as error:
        raise InputTypeError(f"{name} must be a tensor or a sequence of integers; got {numbers!r}.") from error


def _block_sizes(name: str, lengths: Any, ptr_name: str, ptr: Any) -> list[int] | None:
    """The sizes of blocks, from their lengths or from where they begin."""
    if ptr is not None:
        if lengths is not None:
            raise ValueError(f"{name} and {ptr_name} say the same thing: give only one of them.")
        starts = _as_tensor(ptr_name, ptr)
        _check_counts(ptr_name, starts)
        if starts.dim() != 1 or starts.numel() == 0 or int(starts[0]) != 0 or bool((starts.diff() < 0).any()):
            raise ValueError(
                f"{ptr_name} must hold where each block begins and the end, from 0 on and never decreasing; got "
                f"{starts.tolist()}."
            )
        counts: list[int] = starts.diff().tolist()
        return counts
    if lengths is None:
        return None
    lengths = _as_tensor(name, lengths)
    _check_counts(name, lengths)
    if lengths.dim() != 1:
        raise ValueError(f"{name} must hold one integer per block, [B]; got {list(lengths.shape)}.")
    sizes: list[int] = lengths.tolist()
    return sizes
