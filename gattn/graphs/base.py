"""What every graph can do: the interface that the core, the backends and the layers use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

from gattn.errors import InputError, InputTypeError
from gattn.torch_private import uses_jit_trace

__all__ = ["FLOWS", "EdgeList", "Graph", "check_size"]

#: The directions of messages: which row of an `edge_index` holds the sources. PyG calls them `flow`.
FLOWS = ("source_to_target", "target_to_source")


def check_size(name: str, size: Any) -> None:
    """Raises `TypeError` or `ValueError` if `size` is not a number of nodes."""
    if uses_jit_trace():  # where sizes are tensors
        return
    if isinstance(size, bool) or not isinstance(size, (int, torch.SymInt)):
        raise InputTypeError(f"{name} must be a number of nodes, an integer; got {size!r}.")
    if size < 0:
        raise InputError(f"a graph's number of nodes must not be negative; got {name}={size}.")


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


class Graph(ABC):
    """Base class of `SparseGraph`, `TypedGraph` and `CompleteGraph`.

    To add a kind of graph, implement the abstract methods. The reference can then attend on it, and so can the kernels
    for lists of edges.

    Example:
        >>> import torch, gattn
        >>> graphs = [gattn.SparseGraph(torch.tensor([[0, 1], [1, 2]])), gattn.CompleteGraph(3, causal=True)]
        >>> [isinstance(graph, gattn.graphs.Graph) for graph in graphs]
        [True, True]
    """

    num_sources: int | None
    """M; `None` where it is taken from the features."""
    num_targets: int | None
    """N; `None` where it is taken from the features."""
    is_sharded: ClassVar[bool] = False
    """Whether other processes hold further nodes; see `gattn.distributed`."""
    blocks: tuple[tuple[int, int], ...] | None = None
    """For a packed graph, the numbers of targets and sources of each block."""
    heads_dim: ClassVar[int] = -1
    """The dimension of heads in the weights that users of this graph get."""
    _attributes: ClassVar[tuple[str, ...]]
    """The attributes that a changed copy takes over."""
    flow: str = FLOWS[0]
    """`"source_to_target"`, or `"target_to_source"` where the first row of `edge_index` holds the targets."""

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

    @abstractmethod
    def resolve(
        self,
        num_sources: int,
        num_targets: int | None,
        batch: torch.Size | None = None,
        device: torch.device | None = None,
    ) -> Self:
        """The same graph, with the sizes that the features have.

        Args:
            num_sources: Rows of the sources' features.
            num_targets: Rows of the targets' features; `None` if the targets have none.
            batch: The batch dimensions of the features. (default: `None`, not compared)
            device: The device of the features. (default: `None`, not compared)

        Raises:
            ValueError: If the graph's own sizes, batch or device differ.
        """

    def fetch(
        self, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None
    ) -> tuple[Graph, Tensor, Tensor, Tensor | None, Tensor | None]:
        """The same graph, key, value, bias and mask, after other processes have sent what a sharded graph lacks."""
        return self, key, value, bias, mask

    @abstractmethod
    def edge_list(self, device: torch.device, *, raw: bool = False) -> EdgeList:
        """The edges of a resolved graph.

        Args:
            device: Where to make the edges, if the graph does not hold any.
            raw: Whether the caller adds self-loops and checks indices itself. (default: `False`)

        Raises:
            IndexError: If an index is out of range, unless `raw`.
        """

    @abstractmethod
    def with_self_loops(self) -> Graph:
        """The same graph, in which each node attends to itself."""

    @abstractmethod
    def with_features(
        self, features: Tensor | None, fill_value: float | Tensor | str = "mean"
    ) -> tuple[Graph, Tensor | None]:
        """The graph with its self-loops among its edges, and the features of all of these edges, `[E, ...]`."""

    @abstractmethod
    def with_weights(self, weights: Any, *, as_values: bool = True) -> Any:
        """Attention weights together with the edges that they belong to, as PyG's layers return them.

        Args:
            weights: The weights, as users of this graph get them.
            as_values: Whether they become the values of a `torch.sparse` adjacency. (default: `True`)
        """

    def _changed(self, **attributes: Any) -> Self:
        """A copy with other attributes, which are not checked again."""
        graph = object.__new__(type(self))  # not copy.copy(), which torch.compile does not support
        for name in self._attributes:
            setattr(graph, name, attributes.get(name, getattr(self, name)))
        return graph

    @abstractmethod
    def from_pairs(self, pairs: Tensor, heads: int) -> Tensor:
        """A bias or mask for all pairs of nodes, `[..., H, N, M]`, in the form that `attend` takes on this graph."""

    @abstractmethod
    def distances(self, device: torch.device) -> Tensor:
        """The position of each source in its sequence minus that of its target, in the shape of a bias without heads.

        That is `[E]` for a list of edges, `[N, M]` for a complete graph and `[B, N, M]` for a packed one.
        """

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
