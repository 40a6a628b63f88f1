"""Several types of edges, and of nodes, as one graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from gattn.errors import InputError, InputTypeError, is_integer
from gattn.graphs.base import Graph, checked_size
from gattn.graphs.edge_lists import check_types, checked_types
from gattn.graphs.sparse import SparseGraph, as_graph

__all__ = ["TypedGraph"]


class TypedGraph(SparseGraph):
    r"""A graph whose edges, and possibly nodes, have types: several relations as one list of edges.

    Attention on it is the same as on any list of edges, so a softmax runs across all types of a target's edges; with
    `distribution=gattn.WithinTypes(graph.edge_type)`, it runs within each type. The terms of the R types are tables:
    `attend(..., edge=gattn.Typed(table, graph.edge_type))` adds `table[r]`, `[H, C]`, to the keys of edges of type r,
    and `bias=table[graph.edge_type]` adds a number per head to their logits. There is no loop over types.

    Args:
        edge_index: `[2, E]`, or another form that `SparseGraph` takes.
        edge_type: The type of each edge, `[E]`, integers from 0.
        edge_types: The names of the types, or their number R. (default: `None`, one more than the largest type)
        num_nodes: The number of nodes of each type, by name, in the order in which nodes are numbered.
            (default: `None`, nodes have no types)
        num_targets: N; taken from the features if it is not given. (default: `None`)
        num_sources: M; likewise. (default: `None`)
        flow: See `SparseGraph`. (default: `"source_to_target"`)

    Raises:
        TypeError: If an argument is not of a type above.
        ValueError: If the types do not fit the edges, or the numbers of nodes contradict each other.
        IndexError: If there are fewer types than `edge_type` holds.

    Example:
        >>> import torch, gattn
        >>> graph = gattn.TypedGraph(torch.tensor([[0, 1, 0], [2, 2, 1]]), torch.tensor([0, 1, 1]))
        >>> x, table = torch.randn(3, 2, 4), torch.randn(2, 2, 4)  # 3 nodes, 2 heads, 4 channels; 2 types of edges
        >>> gattn.attend(x, x, x, graph, edge=gattn.Typed(table, graph.edge_type)).shape
        torch.Size([3, 2, 4])
    """

    _attributes = (*SparseGraph._attributes, "edge_type", "edge_types", "num_nodes")

    def __init__(
        self,
        edge_index: Any,
        edge_type: Tensor,
        edge_types: int | Sequence[Any] | None = None,
        num_nodes: Mapping[str, int] | None = None,
        *,
        num_targets: int | None = None,
        num_sources: int | None = None,
        flow: str = "source_to_target",
    ):
        if num_nodes is not None:
            if not isinstance(num_nodes, Mapping):
                raise InputTypeError(f"num_nodes must be a dictionary of numbers by node type; got {num_nodes!r}.")
            num_nodes = {name: checked_size(f"num_nodes[{name!r}]", size) for name, size in num_nodes.items()}
            total = sum(num_nodes.values())
            num_targets, num_sources = (total if size is None else size for size in (num_targets, num_sources))
            if {num_targets, num_sources} != {total}:
                raise InputError(
                    f"num_nodes adds up to {total} nodes, but there are {num_sources} sources and {num_targets} "
                    "targets."
                )
        super().__init__(edge_index, num_targets, num_sources, flow=flow)
        edge_type = checked_types(edge_type)
        is_list = isinstance(self.adjacency, Tensor) and self.adjacency.layout == torch.strided
        num_edges = self.adjacency.size(1) if is_list else self.num_edges
        if edge_type.size(0) != num_edges:
            raise InputError(f"there are {num_edges} edges, but edge_type has {edge_type.size(0)} entries.")
        is_number = is_integer(edge_types)
        if isinstance(edge_types, str) or not (is_number or isinstance(edge_types, (Iterable, NoneType))):
            raise InputTypeError(f"edge_types must be names of types, or their number; got {edge_types!r}.")
        if edge_types is None:
            edge_types = range(int(edge_type.max()) + 1 if edge_type.numel() else 0)
        #: The types' names, or their numbers.
        self.edge_types = tuple(range(int(edge_types)) if is_number else edge_types)  # type: ignore[arg-type]
        check_types(edge_type, len(self.edge_types))
        self.edge_type = edge_type
        #: The number of nodes of each type; `None` if nodes have no types.
        self.num_nodes = None if num_nodes is None else dict(num_nodes)

    def for_targets(self, index: Tensor) -> TypedGraph:
        """See `Graph.for_targets`; nodes have no types in what it returns."""
        some = super().for_targets(index)
        assert some.edge_ids is not None
        sizes: Any = {"num_targets": some.num_targets, "num_sources": some.num_sources}
        found = TypedGraph(some.edge_index, self.edge_type[some.edge_ids], self.edge_types, **sizes)
        found.edge_ids, found.has_own_loops = some.edge_ids, False
        return found

    @classmethod
    def from_hetero(
        cls, edges: HeteroData | Mapping[tuple[str, ...], Any], num_nodes: Mapping[str, int] | None = None
    ) -> TypedGraph:
        """The graph of all nodes and edges of a heterogeneous graph; nodes are numbered type by type.

        Args:
            edges: A `HeteroData`, or the edges of each type (source type, ..., target type), in any form that
                `gattn.attend` takes.
            num_nodes: The number of nodes of each type. (default: `None`, those of the `HeteroData`)

        Raises:
            TypeError: If `edges` is neither.
            ValueError: If the number of nodes of a type is unknown, or edges do not fit it.
            IndexError: If an index of an edge is out of range (in compiled code RuntimeError, when it runs).
        """
        if isinstance(edges, HeteroData):
            if num_nodes is None:
                num_nodes = {name: edges[name].num_nodes for name in edges.node_types}
            edges = {name: _edges_of(edges, name) for name in edges.edge_types}
        if not isinstance(edges, Mapping):
            raise InputTypeError(
                f"edges must be a HeteroData or a dictionary by edge type; got {type(edges).__name__}."
            )
        if num_nodes is None:
            raise InputError("a dictionary of edges does not say how many nodes there are: give num_nodes.")
        first = dict(zip(num_nodes, accumulate(num_nodes.values(), initial=0), strict=False))
        ends, types = [], []
        for number, (edge_type, given) in enumerate(edges.items()):
            for name in (edge_type[0], edge_type[-1]):
                if name not in first:
                    raise InputError(
                        f"edges of type {edge_type} join nodes of type {name!r}; num_nodes has {list(first)}."
                    )
            graph: Graph = as_graph(given).resolve(num_nodes[edge_type[0]], num_nodes[edge_type[-1]])
            source, target = graph.sources_and_targets()
            ends.append(torch.stack([source.long() + first[edge_type[0]], target.long() + first[edge_type[-1]]]))
            types.append(torch.full_like(ends[-1][0], number))
        nothing = torch.zeros(2, 0, dtype=torch.int64)
        edge_index, edge_type = torch.cat(ends or [nothing], 1), torch.cat(types or [nothing[0]])
        return cls(edge_index, edge_type, list(edges), num_nodes)

    def join(self, features: Mapping[str, Tensor], dim: int = 0) -> Tensor:
        """The features of all nodes, given those of each type.

        Args:
            features: By node type, each with one row per node along `dim`.
            dim: The dimension of nodes. (default: `0`)

        Raises:
            ValueError: If a type is missing, or has a different number of nodes.
        """
        sizes = self._sizes()
        for name, size in sizes.items():
            if name not in features or features[name].size(dim) != size:
                given = list(features[name].shape) if name in features else "none"
                raise InputError(f"the {size} nodes of type {name!r} need one row of features each; got {given}.")
        return torch.cat([features[name] for name in sizes], dim)

    def split(self, features: Tensor, dim: int = 0) -> dict[str, Tensor]:
        """The features of each type's nodes, given those of all nodes: the inverse of `join`.

        Args:
            features: With one row per node along `dim`.
            dim: The dimension of nodes. (default: `0`)

        Raises:
            ValueError: If the number of rows is not that of the nodes.
        """
        sizes = self._sizes()
        if features.size(dim) != sum(sizes.values()):
            raise InputError(
                f"the graph has {sum(sizes.values())} nodes, but there are {features.size(dim)} rows of features."
            )
        return dict(zip(sizes, features.split_with_sizes(list(sizes.values()), dim), strict=True))

    def _sizes(self) -> dict[str, int]:
        if self.num_nodes is None:
            raise InputError("the nodes of this graph have no types: make it with num_nodes.")
        return self.num_nodes

    def with_self_loops(self) -> SparseGraph:
        """Not possible, because a self-loop would have no type.

        Raises:
            ValueError: Always.
        """
        raise InputError("self-loops would have no type: add them to the edges yourself, with a type of their own.")

    def to(self, device: torch.device | str) -> TypedGraph:
        """See `SparseGraph.to`."""
        return super().to(device)._changed(edge_type=self.edge_type.to(device))  # type: ignore[return-value]

    def __repr__(self) -> str:
        return f"{super().__repr__().removesuffix(')')}, edge_types={len(self.edge_types)})".replace("Sparse", "Typed")


def _edges_of(data: HeteroData, edge_type: tuple[str, ...]) -> Any:
    """The edges of a type, in whichever form PyG keeps them."""
    store = data[edge_type]
    for name in ("edge_index", "adj_t"):
        if name in store:
            return store[name]
    raise InputError(f"edges of type {edge_type} have neither edge_index nor adj_t.")
