"""What every graph can do: the interface that the core, the backends and the layers use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

from gattn.errors import InputError, InputTypeError, is_integer
from gattn.torch_private import uses_jit_trace

__all__ = ["FLOWS", "EdgeList", "Graph", "checked_size", "rows_of"]

#: The directions of messages: which row of an `edge_index` holds the sources. PyG calls them `flow`.
FLOWS = ("source_to_target", "target_to_source")


def checked_size(name: str, size: Any) -> int:
    """The number of nodes, an integer of Python or of the compiler; raises `TypeError` or `ValueError` for others."""
    if uses_jit_trace():  # where sizes are tensors
        return size  # type: ignore[no-any-return]
    if not is_integer(size):
        raise InputTypeError(f"{name} must be a number of nodes, an integer; got {size!r}.")
    if size < 0:
        raise InputError(f"a graph's number of nodes must not be negative; got {name}={size}.")
    return size if isinstance(size, torch.SymInt) else int(size)


class EdgeList(NamedTuple):
    """A graph's edges in the form that backends take."""

    edge_index: Tensor
    """`[2, E]`, a plain tensor, with or without its self-loops."""
    num_sources: int
    num_targets: int
    self_loops: bool = False
    """Whether existing self-loops are still to be replaced by one for each of the first min(N, M) nodes."""
    flow: str = FLOWS[0]
    """Which row of `edge_index` holds the targets."""

    @property
    def num_edges(self) -> int | None:
        """E, including self-loops; `None` if it is not known without looking at the edges."""
        return None if self.self_loops else self.edge_index.size(1)

    def sources_and_targets(self) -> tuple[Tensor, Tensor]:
        """The source and the target of each edge, `[E]` each; the edges must include their self-loops."""
        first, second = self.edge_index.long()
        return (first, second) if self.flow == FLOWS[0] else (second, first)


def rows_of(index: Tensor, first: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers from `first[i]` on, `counts[i]` of them, for each i in `index`, and the place of this i there."""
    some, chosen = first[index], counts[index]
    place = torch.arange(index.numel(), device=index.device).repeat_interleave(chosen)
    within = torch.arange(place.numel(), device=index.device) - (chosen.cumsum(0) - chosen)[place]
    return some[place] + within, place


class Graph(ABC):
    """Base class of `SparseGraph`, `TypedGraph` and `CompleteGraph`.

    To add a kind of graph, implement `edge_index` and set the numbers of nodes. Every layer, option and backend then
    takes it, as the list of its edges; return the same tensor each time, so that what is derived from it is kept. A
    graph that can do better than a list overrides `resolve`, and whichever of the other methods have better answers.

    Example:
        >>> import torch, gattn
        >>> class Ring(gattn.graphs.Graph):
        ...     def __init__(self, num_nodes):
        ...         self.num_sources = self.num_targets = num_nodes
        ...         nodes = torch.arange(num_nodes)
        ...         self._edge_index = torch.stack([nodes, nodes.roll(-1)])
        ...
        ...     @property
        ...     def edge_index(self):
        ...         return self._edge_index
        >>> x = torch.randn(3, 2, 4)  # 3 nodes, 2 heads, 4 channels
        >>> torch.equal(gattn.attend(x, x, x, Ring(3)), x.roll(1, 0))  # each node has a single source
        True
    """

    num_sources: int | None = None
    """M; `None` where it is taken from the features."""
    num_targets: int | None = None
    """N; `None` where it is taken from the features."""
    is_dense: ClassVar[bool] = False
    """Whether weights, biases and masks have an entry for every pair of nodes, and not one per edge."""
    is_sharded: ClassVar[bool] = False
    """Whether other processes hold further nodes; see `gattn.distributed`."""
    blocks: tuple[tuple[int, int], ...] | None = None
    """For a packed graph, the numbers of targets and sources of each block."""
    source_lengths: Tensor | None = None
    """For a padded batch, the number of real sources of each element, `[B]`."""
    target_lengths: Tensor | None = None
    """Likewise for targets."""
    adjacency: Any = None
    """What a list of edges was given as, which may be a sparse matrix with values."""
    self_loops: bool = False
    """Whether self-loops are still to be added to the `adjacency`."""
    heads_dim: ClassVar[int] = -1
    """The dimension of heads in the weights that users of this graph get."""
    _list: ClassVar[type[Any]]
    """`SparseGraph`, which sets this."""
    _attributes: ClassVar[tuple[str, ...]]
    """The attributes that a changed copy takes over."""
    flow: str = FLOWS[0]
    """`"source_to_target"`, or `"target_to_source"` where the first row of `edge_index` holds the targets."""
    edge_ids: Tensor | None = None
    """Of a list of edges that `for_targets` or `shard` made, the number of each edge in the whole graph."""
    has_own_loops: bool | None = None
    """Of a list that `for_targets` made, whether each target's edge to itself is in it."""
    kept: Tensor | None = None
    """Which of the edges count, `[E]`; `None` for all of them. See `SparseGraph.with_features`."""

    @property
    @abstractmethod
    def edge_index(self) -> Tensor:
        """All edges, `[2, E]`, including self-loops, in the order that weights and per-edge inputs have."""

    @property
    def num_edges(self) -> int:
        """E, including self-loops."""
        return self.edge_index.size(1)

    @property
    def num_all_sources(self) -> int | None:
        """M, over all processes if the graph is sharded: the columns of a bias or mask for all pairs of nodes."""
        return self.num_sources

    def sources_and_targets(self) -> tuple[Tensor, Tensor]:
        """The source and the target of each edge, `[E]` each, whichever row of `edge_index` holds them."""
        first, second = self.edge_index
        return (first, second) if self.flow == FLOWS[0] else (second, first)

    @property
    def values(self) -> Tensor | None:
        """The values of a sparse `adjacency`, `[E, ...]`, in the order of the edges; `None` if there are none."""
        return None

    @property
    def is_uniform(self) -> bool:
        """Whether all elements of a batch have all of the graph's nodes, in one block."""
        return self.blocks is None and self.source_lengths is None and self.target_lengths is None

    def _edges(self, device: torch.device | str | None) -> Tensor:
        """The `edge_index`, on this device if the graph does not hold any."""
        return self.edge_index

    def listed(self, device: torch.device | None = None) -> Any:
        """The same graph as a `SparseGraph`, from which other methods get their answers unless a graph knows better.

        Args:
            device: Where to make the edges, if the graph does not hold any. (default: `None`, the CPU)

        Raises:
            ValueError: If the elements of a batch have different edges.
        """
        if not self.is_uniform and self.blocks is None:
            raise InputError(
                "attention edge by edge needs a list of edges, so a graph has to be the same for the whole batch; got "
                f"{self!r}."
            )
        return Graph._list(self._edges(device), self.num_targets, self.num_sources, flow=self.flow)

    def _as_list(self, device: torch.device | None = None) -> Graph:
        graph: Graph = self.listed(device)
        return graph

    def for_targets(self, index: Tensor) -> Graph:
        """The same graph for some of its targets: attention for these alone, such as the anchors of a batch.

        Queries are then `query[index]`, while keys and values stay as they are; layers on the edges take the pair
        `(x, x[index])`. Layers that add self-loops need a graph that was made with them, `graph.with_self_loops()`,
        since sources and targets no longer have the same numbers. What edges have is chosen by `edge_ids`,
        `edge_attr[graph.edge_ids]`, which is `None` if self-loops were added, since these have no features: then, list
        them among your edges, and set `add_self_loops=False`.

        Args:
            index: The numbers of the targets, `[n]`, in any order, with repetitions if you like; for a packed graph, in
                the order of its blocks.

        Returns:
            The graph, with n targets: a list of edges with `edge_ids`, or a complete graph where it has no causal order
            and no window.

        Raises:
            TypeError: If `index` is not a tensor of integers.
            ValueError: If it has another shape, the graph's number of nodes is not known, or a graph is sharded or has
                targets of padding.
            IndexError: If there is no such target.

        Example:
            >>> import torch, gattn
            >>> graph = gattn.SparseGraph(torch.tensor([[0, 1, 2, 0], [1, 2, 2, 0]]), 3, 3)
            >>> some = graph.for_targets(torch.tensor([2, 0]))
            >>> some.edge_index, some.edge_ids
            (tensor([[1, 2, 0],
                    [0, 0, 1]]), tensor([1, 2, 3]))
        """
        self._check_some(index)
        graph: Any = self.listed(index.device).with_listed_loops()
        source, target = (end.long() for end in graph.sources_and_targets())
        order, counts = target.argsort(stable=True), target.bincount(minlength=graph.num_targets)
        numbers, place = rows_of(index, counts.cumsum(0) - counts, counts)
        ids = order[numbers]
        found: Graph = Graph._list(torch.stack([source[ids], place]), index.numel(), graph.num_sources)
        found.edge_ids, found.has_own_loops = None if self.self_loops else ids, self.self_loops
        return found

    def _check_some(self, index: Any) -> None:
        """Raises unless these are numbers of targets."""
        if self.is_sharded:
            raise InputError("a sharded graph has the targets of its process: choose targets before sharding.")
        if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32):
            raise InputTypeError(f"index must be a tensor of integers; got {getattr(index, 'dtype', type(index))}.")
        if index.dim() != 1:
            raise InputError(f"index must be the numbers of targets, [n]; got {list(index.shape)}.")
        if self.num_targets is None or self.num_sources is None:
            raise InputError("the number of nodes is not known: make the graph with num_targets and num_sources.")
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < self.num_targets:
            low, high = int(index.min()), int(index.max())
            raise IndexError(f"there are {self.num_targets} targets, from 0; got numbers from {low} to {high}.")

    def resolve(
        self,
        num_sources: int,
        num_targets: int | None,
        batch: torch.Size | None = None,
        device: torch.device | None = None,
    ) -> Graph:
        """The same graph, with the sizes that the features have.

        Args:
            num_sources: Rows of the sources' features.
            num_targets: Rows of the targets' features; `None` if the targets have none.
            batch: The batch dimensions of the features. (default: `None`, not compared)
            device: The device of the features. (default: `None`, not compared)

        Raises:
            ValueError: If the graph's own sizes, batch or device differ.
        """
        return self._as_list(device).resolve(num_sources, num_targets, batch, device)

    def _check_sizes(self, name: str, num_sources: int, num_targets: int | None) -> None:
        """Raises `ValueError` unless a graph of known sizes has those of the features."""
        given = self.num_targets if num_targets is None else num_targets
        if (self.num_targets, self.num_sources) != (given, num_sources):
            raise InputError(
                f"the {name} has {self.num_targets} targets and {self.num_sources} sources, but query has {given} rows "
                f"and key and value have {num_sources}."
            )

    def fetch(
        self, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None
    ) -> tuple[Graph, Tensor, Tensor, Tensor | None, Tensor | None]:
        """The same graph, key, value, bias and mask, after other processes have sent what a sharded graph lacks."""
        return self, key, value, bias, mask

    def of_all_processes(self, x: Tensor) -> Tensor:
        """What each process of a sharded graph passes, of one shape, `[processes, ...]`; with gradients."""
        return x.unsqueeze(0)

    def edge_list(self, device: torch.device, *, raw: bool = False) -> EdgeList:
        """The edges of a resolved graph.

        Args:
            device: Where to make the edges, if the graph does not hold any.
            raw: Whether the caller adds self-loops and checks indices itself. (default: `False`)

        Raises:
            IndexError: If an index is out of range, unless `raw`.
        """
        return self._as_list(device).edge_list(device, raw=raw)

    def with_self_loops(self) -> Graph:
        """The same graph, in which each node attends to itself."""
        return self._as_list().with_self_loops()

    def with_features(
        self, features: Tensor | None, fill_value: float | Tensor | str = "mean", hides: bool = False
    ) -> tuple[Graph, Tensor | None]:
        """The graph with its self-loops among its edges, and the features of all of these edges, `[E, ...]`.

        For `hides`, see `SparseGraph.with_features`.
        """
        return self._as_list().with_features(features, fill_value, hides)

    def with_weights(self, weights: Any, *, as_values: bool = True) -> Any:
        """Attention weights together with the edges that they belong to, as PyG's layers return them.

        Args:
            weights: The weights, as users of this graph get them.
            as_values: Whether they become the values of a `torch.sparse` adjacency. (default: `True`)
        """
        return self._as_list().with_weights(weights, as_values=as_values)

    def _changed(self, **attributes: Any) -> Self:
        """A copy with other attributes, which are not checked again."""
        graph = object.__new__(type(self))  # not copy.copy(), which torch.compile does not support
        for name in self._attributes:
            setattr(graph, name, attributes.get(name, getattr(self, name)))
        return graph

    def hide_later(self) -> tuple[Graph, Tensor | None]:
        """The graph without edges from later positions; if it cannot leave them out, with a mask, True = may attend."""
        return self, (self.distances(self.edge_index.device) <= 0).unsqueeze(-1)

    def hide_padding(self, padding: Tensor, batch: torch.Size) -> tuple[Graph, Tensor | None]:
        """The graph without padded sources, and what is left of the mask of padding.

        Args:
            padding: Which sources to ignore, `[B, M]`: booleans, or numbers that are added to the logits.
            batch: The batch dimensions of the features.
        """
        return self, padding

    def with_more_sources(self, count: int, device: torch.device) -> tuple[Graph, Tensor]:
        """The graph with sources that are no nodes at its end, and a mask of all pairs, `[..., N, M + count]`.

        Args:
            count: The number of new sources, to which every target attends.
            device: Where to make the mask.

        Raises:
            ValueError: If more would have to be said about the new sources.
        """
        raise InputError(
            "add_bias_kv and add_zero_attn append keys that are no nodes, so they cannot be combined with a graph of "
            "edges, or a packed or sharded graph: use masks."
        )

    def from_pairs(self, pairs: Tensor, heads: int) -> Tensor:
        """A bias or mask for all pairs of nodes, `[..., H, N, M]`, in the form that `attend` takes on this graph."""
        return self._as_list().from_pairs(pairs, heads)

    def distances(self, device: torch.device) -> Tensor:
        """The position of each source in its sequence minus that of its target, in the shape of a bias without heads.

        That is `[E]` for a list of edges, `[N, M]` for a complete graph and `[B, N, M]` for a packed one.
        """
        return self._as_list(device).distances(device)

    def positions(self, side: Literal["target", "source"], first: int, count: int, device: torch.device) -> Tensor:
        """The position of each row of features in its sequence, `[count]`.

        Args:
            side: Whose features.
            first: The position of row 0, in a graph that is one sequence.
            count: The number of rows.
            device: Where to make them.
        """
        return torch.arange(first, first + count, device=device)

    def per_edge(self, term: Tensor, name: str, batch: torch.Size, heads: int, edges: EdgeList) -> Tensor:
        """A bias or mask, given as users of this graph do, with one entry per edge: `[..., E, H or 1]`."""
        return term

    def as_bias(self, weights: Any) -> Tensor:
        """Weights in the form in which users get them, as a bias in the form in which they give it."""
        if not isinstance(weights, Tensor):
            raise InputTypeError(
                f"the weights of {self!r} are one tensor; got a {type(weights).__name__} of {len(weights)}."
            )
        return weights

    def real_edges(self, edges: EdgeList) -> Tensor | None:
        """Which edges join real nodes of a padded batch, `[B, E, 1]`; `None` if all do."""
        return None

    def dress(self, weights: Tensor, edges: EdgeList) -> Any:
        """Weights `[..., E, H]` in the form that users of this graph get."""
        return weights
