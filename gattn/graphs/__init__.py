"""Who attends to whom: the graphs.

`SparseGraph` is a list of edges in any of PyG's forms, and `TypedGraph` one whose edges have types. `CompleteGraph` is
symbolic: every target sees every source, or only earlier ones, or those within a window. All are subclasses of `Graph`,
the only interface that the core and the layers use. `reorder` renumbers nodes so that neighbours are close together.
"""

from typing import TypeAlias

from torch_geometric.typing import Adj

from gattn.graphs.base import FLOWS, EdgeList, Graph
from gattn.graphs.complete import CompleteGraph
from gattn.graphs.reordering import Reordered, reorder
from gattn.graphs.sparse import Edges, SparseGraph, as_graph
from gattn.graphs.typed import TypedGraph

__all__ = [
    "FLOWS",
    "CompleteGraph",
    "EdgeList",
    "Edges",
    "Graph",
    "GraphLike",
    "Reordered",
    "SparseGraph",
    "TypedGraph",
    "as_graph",
    "reorder",
]

#: Whatever `gattn.attend` and the layers take as a graph.
GraphLike: TypeAlias = Adj | Graph
