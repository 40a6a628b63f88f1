"""Graphs as lists of pairs of blocks, and the choice of blocks by scores.

Dimensions: N targets, M sources, S nodes of a block, n and m blocks of targets and sources, T tiles, H heads,
C channels.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch_geometric.typing import Adj

from gattn.errors import InputError, InputTypeError, check_at_least, check_flag
from gattn.graphs.base import EdgeList, Graph, checked_size
from gattn.graphs.sparse import as_graph

__all__ = ["BlockGraph", "top_blocks"]


class BlockGraph(Graph):
    r"""A graph in which blocks of targets attend to blocks of sources: block-sparse attention.

    .. math::
        \mathcal{N}(i) = \{j : B_{\lfloor i / S \rfloor \lfloor j / S \rfloor}\}

    On CPUs, dot products with a softmax or a gate visit the listed pairs of blocks alone, forward and backward, tile by
    tile, without a list of edges. Other calls (other scores, terms of edges, returned weights, GPUs, compiled code) are
    computed on the list of all edges, :attr:`edge_index`; with blocks for each head, list them once before compiling.

    `BigBird <https://arxiv.org/abs/2007.14062>`_ and `Longformer <https://arxiv.org/abs/2004.05150>`_ choose blocks by
    a rule, and `gattn.graphs.top_blocks` chooses them by scores.

    Args:
        listed: Which blocks attend to which, True = may attend: `[n, m]`, or, if heads or elements of a batch have
            others, broadcastable to `[..., H, n, m]`. The last blocks may have fewer nodes.
        block: S.
        num_targets: N.
        num_sources: M. (default: N)
        causal: Whether targets see only the sources up to their own position. With N ≠ M, the last target sees every
            source of its blocks. (default: `False`)

    Raises:
        TypeError: If `listed` is not a tensor of booleans, or a number is not an integer.
        ValueError: If `listed` does not have an entry for each pair of blocks, or a number is out of range.

    Example:
        >>> import torch, gattn
        >>> graph = gattn.graphs.BlockGraph(torch.tensor([[True, False], [True, True]]), 2, 3)
        >>> graph.edge_index  # nodes 0 and 1 are a block, node 2 is another
        tensor([[0, 1, 0, 1, 0, 1, 2],
                [0, 0, 1, 1, 2, 2, 2]])
    """

    num_targets: int
    num_sources: int
    _attributes: ClassVar[tuple[str, ...]] = (
        *("num_targets", "num_sources", "block", "causal", "tiles", "holes", "_listed_edges"),
    )

    def __init__(
        self, listed: Tensor, block: int, num_targets: int, num_sources: int | None = None, *, causal: bool = False
    ):
        if not isinstance(listed, Tensor) or listed.dtype != torch.bool:
            got = listed.dtype if isinstance(listed, Tensor) else type(listed).__name__
            raise InputTypeError(f"listed must be a tensor of booleans; got {got}.")
        check_at_least(1, block=block)
        check_flag("causal", causal)
        self.num_targets = checked_size("num_targets", num_targets)
        self.num_sources = self.num_targets if num_sources is None else checked_size("num_sources", num_sources)
        size = [-(-nodes // block) for nodes in (self.num_targets, self.num_sources)]
        if listed.dim() < 2 or list(listed.shape[-2:]) != size:
            raise InputError(
                f"listed must be [..., {size[0]}, {size[1]}], for {self.num_targets} targets and {self.num_sources} "
                f"sources in blocks of {block}; got {list(listed.shape)}."
            )
        self.block, self.causal = int(block), causal
        #: The number of each listed tile, or -1, `[..., n, m]`.
        self.tiles = listed.to(torch.int32) - 1
        #: Which pairs of each tile attend, `[T, S, S]`; `None` for all of them.
        self.holes: Tensor | None = None
        self._listed_edges: Tensor | None = None

    @classmethod
    def from_edges(
        cls, edges: Adj | Graph, num_targets: int | None = None, num_sources: int | None = None, *, block: int = 64
    ) -> BlockGraph:
        """The graph of these edges and no others, whose blocks have holes.

        Tiles take less time than a list of the same edges if these fill a good part of them, as after
        `gattn.graphs.reorder` in a mesh: from about half of their pairs on, see `filled`.

        Args:
            edges: The edges, in any form that `gattn.attend` takes, none of them twice.
            num_targets: N, unless the edges tell. (default: `None`)
            num_sources: M, unless the edges tell. (default: `None`, N)
            block: S. (default: `64`)

        Raises:
            ValueError: If the sizes are not known, an edge is listed twice, or `block` is not positive.
            IndexError: If there is no such node.

        Example:
            >>> import torch, gattn
            >>> graph = gattn.graphs.BlockGraph.from_edges(torch.tensor([[0, 1, 2], [1, 2, 2]]), 3, block=2)
            >>> graph.edge_index, round(graph.filled, 2)  # 3 of the 7 pairs of 3 tiles
            (tensor([[0, 1, 2],
                    [1, 2, 2]]), 0.43)
        """
        check_at_least(1, block=block)
        given = as_graph(edges)
        n = given.num_targets if num_targets is None else checked_size("num_targets", num_targets)
        m = given.num_sources if num_sources is None else checked_size("num_sources", num_sources)
        if n is None:
            raise InputError("the number of nodes is not known: pass num_targets.")
        resolved = given.resolve(n if m is None else m, n)
        whole = resolved.edge_list(resolved.edge_index.device)
        source, target = (end.long() for end in whole.sources_and_targets())
        size = [-(-nodes // block) for nodes in (whole.num_targets, whole.num_sources)]
        of_edges = target // block * size[1] + source // block
        listed = torch.zeros(math.prod(size), dtype=torch.bool, device=target.device)
        listed[of_edges] = True
        graph = cls(listed.view(*size), block, whole.num_targets, whole.num_sources)
        numbers = listed.cumsum(0, dtype=torch.int32) - 1
        graph.tiles = numbers.masked_fill(~listed, -1).view(*size)
        count = int(listed.sum())
        holes = torch.zeros(count * block * block, dtype=torch.bool, device=target.device)
        pairs = (numbers[of_edges].long() * block + target % block) * block + source % block
        holes[pairs] = True
        if int(holes.sum()) < pairs.numel():
            raise InputError("an edge is listed twice, which a BlockGraph cannot have: use a SparseGraph.")
        graph.holes = holes.view(count, block, block) if count else None
        return graph

    @property
    def has_heads(self) -> bool:
        """Whether heads or elements of a batch may have edges of their own."""
        return self.tiles.dim() > 2

    @property
    def filled(self) -> float:
        """The share of the listed tiles' pairs that are edges, of any head or element of a batch."""
        sizes = [_sizes(nodes, self.block, self.tiles.device) for nodes in (self.num_targets, self.num_sources)]
        pairs = self._are_listed() * sizes[0].unsqueeze(1) * sizes[1]
        return float(self.num_edges / pairs.sum().clamp_min(1))

    @property
    def edge_index(self) -> Tensor:
        """All edges of any head or element of a batch, `[2, E]`, sources above targets, target by target."""
        if self._listed_edges is None:
            rows, columns = self._are_listed().nonzero().unbind(1)
            place = torch.arange(self.block, device=self.tiles.device)
            target = (rows.view(-1, 1, 1) * self.block + place.unsqueeze(1)).expand(-1, -1, self.block)
            source = (columns.view(-1, 1, 1) * self.block + place).expand(-1, self.block, -1)
            seen = (target < self.num_targets) & (source < self.num_sources)
            tile = self.tiles[rows, columns].view(-1, 1, 1) if not self.has_heads else torch.zeros_like(target)
            seen &= self._sees(tile, target, source)
            target, source = target[seen], source[seen]
            order = (target * max(self.num_sources, 1) + source).argsort()
            self._listed_edges = torch.stack([source[order], target[order]])
        return self._listed_edges

    def _are_listed(self) -> Tensor:
        """Which blocks any head or element of a batch attends to, `[n, m]`."""
        tiles = self.tiles if self.has_heads else self.tiles.unsqueeze(0)
        return (tiles >= 0).flatten(0, -3).any(0)

    def _sees(self, tile: Tensor, target: Tensor, source: Tensor) -> Tensor:
        """Which of these pairs are edges, given their tiles."""
        seen = tile >= 0
        if self.holes is not None:
            seen = seen & self.holes[tile.clamp_min(0).long(), target % self.block, source % self.block]
        return seen & (source - target <= self.offset) if self.causal else seen

    @property
    def offset(self) -> int:
        """The source at the position of target 0."""
        return self.num_sources - self.num_targets

    def listed(self, device: torch.device | None = None) -> Any:
        """See `Graph.listed`."""
        if self.has_heads:
            raise InputError(
                f"attention edge by edge needs edges that all heads and elements of a batch share; got {self!r}."
            )
        return super().listed(device)

    def resolve(
        self,
        num_sources: int,
        num_targets: int | None,
        batch: torch.Size | None = None,
        device: torch.device | None = None,
    ) -> BlockGraph:
        """See `Graph.resolve`."""
        self._check_sizes("BlockGraph", num_sources, num_targets)
        front = self.tiles.shape[:-3]
        if batch is not None and (
            len(front) > len(batch)
            or any(size not in (1, whole) for size, whole in zip(reversed(front), reversed(batch), strict=False))
        ):
            raise InputError(f"the BlockGraph is for a batch {list(front)}; the features have {list(batch)} in front.")
        if device is not None and device != self.tiles.device:
            raise InputError(f"the BlockGraph is on {self.tiles.device}, but the features are on {device}.")
        return self

    def edge_list(self, device: torch.device, *, raw: bool = False) -> EdgeList:
        """See `Graph.edge_list`."""
        return EdgeList(self.edge_index, self.num_sources, self.num_targets)

    def real_edges(self, edges: EdgeList) -> Tensor | None:
        """See `Graph.real_edges`: here, which edges each head and element has, `[..., E, H or 1]`."""
        if not self.has_heads:
            return None
        source, target = edges.edge_index.long()
        seen = self._sees(self.tiles[..., target // self.block, source // self.block], target, source)
        return seen.transpose(-1, -2)

    def to(self, device: torch.device | str) -> BlockGraph:
        """The same graph on another device."""
        names = "tiles", "holes", "_listed_edges"
        tensors = {name: getattr(self, name) for name in names}
        return self._changed(**{name: None if x is None else x.to(device) for name, x in tensors.items()})

    def __repr__(self) -> str:
        parts = [f"{list(self.tiles.shape)} blocks of {self.block}, {self.num_targets}, {self.num_sources}"]
        parts += ["causal=True"] if self.causal else []
        return f"BlockGraph({', '.join(parts)})"


@torch.no_grad()
def top_blocks(
    query: Tensor, key: Tensor, block: int = 64, k: int = 16, *, causal: bool = True, shared: bool = False
) -> BlockGraph:
    r"""For each block of targets, the k blocks of sources whose pooled keys score best, and always its own.

    .. math::
        s_{ab} = \big\langle \operatorname{mean}_{i \in a} q_i, \operatorname{mean}_{j \in b} k_j \big\rangle

    It is the rule of `MoBA <https://arxiv.org/abs/2502.13189>`_ with blocks of targets instead of single ones. The
    choice has no gradient; attention along the graph has.

    Args:
        query: `[..., N, H, C]`.
        key: `[..., N, G, C]`, whose heads divide those of the query.
        block: The nodes of a block, S. (default: `64`)
        k: How many blocks each block of targets attends to, its own included. (default: `16`)
        causal: Whether targets see only the sources up to their own position. (default: `True`)
        shared: Whether all heads have the same blocks, those with the highest sum of scores. (default: `False`)

    Shapes:
        query `[..., N, H, C]`, key `[..., N, G, C]`.

    Raises:
        TypeError: If a number is not an integer, or an option not a boolean.
        ValueError: If a number is not positive, or shapes do not fit.

    Example:
        >>> import torch, gattn
        >>> q, k, v = torch.randn(3, 1024, 2, 16)
        >>> graph = gattn.graphs.top_blocks(q, k, block=64, k=4)
        >>> gattn.attend(q, k, v, graph).shape
        torch.Size([1024, 2, 16])
    """
    check_at_least(1, block=block, k=k)
    check_flag("causal", causal)
    check_flag("shared", shared)
    for name, x in (("query", query), ("key", key)):
        if not isinstance(x, Tensor) or x.dim() < 3:
            raise InputError(f"{name} must be [..., N, H, C]; got {getattr(x, 'shape', type(x).__name__)}.")
    heads, of_keys = query.size(-2), key.size(-2)
    fits = query.shape[:-2] == key.shape[:-2] and query.size(-1) == key.size(-1)
    if not fits or of_keys == 0 or heads % of_keys:
        raise InputError(
            f"query and key must have the same nodes and channels, and heads of keys must divide those of queries; "
            f"got {list(query.shape)} and {list(key.shape)}."
        )
    n = query.size(-3)
    of_targets, of_sources = _pooled(query, block), _pooled(key, block).repeat_interleave(heads // of_keys, -2)
    scores = torch.einsum("...ahc,...bhc->...hab", of_targets, of_sources)
    scores = scores.sum(-3, keepdim=True) if shared else scores
    count = scores.size(-1)
    number = torch.arange(count, device=scores.device)
    scores = scores.masked_fill(number.unsqueeze(1) == number, torch.inf)
    if causal:
        scores = scores.masked_fill(number > number.unsqueeze(1), -torch.inf)
    best = scores.topk(min(k, count), -1)
    listed = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best.indices, best.values > -torch.inf)
    return BlockGraph(listed, block, n, causal=causal)


def _pooled(x: Tensor, block: int) -> Tensor:
    """The means of blocks of rows, `[..., n, H, C]`; those of NaN are zero, so that they can be compared."""
    counts = _sizes(x.size(-3), block, x.device)
    padded = torch.nn.functional.pad(x.float().nan_to_num(), (0, 0, 0, 0, 0, -x.size(-3) % block))
    return torch.unflatten(padded, -3, (len(counts), block)).sum(-3) / counts.view(-1, 1, 1)


def _sizes(nodes: int, block: int, device: torch.device) -> Tensor:
    """How many nodes each block has."""
    starts = torch.arange(0, nodes, block, device=device)
    return (nodes - starts).clamp_max(block)
