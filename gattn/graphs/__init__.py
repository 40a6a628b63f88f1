"""Who attends to whom: the graphs.

`SparseGraph` is a list of edges in any of PyG's forms, and `TypedGraph` one whose edges have types. `CompleteGraph` is
symbolic: every target sees every source, or only earlier ones, or those within a window. All are subclasses of `Graph`,
the only interface that the core and the layers use. `reorder` renumbers nodes so that neighbours are close together.
Functions such as `knn`, `expander` and `union` build graphs.
"""

from typing import TypeAlias

from torch_geometric.typing import Adj

from gattn.graphs.base import FLOWS, EdgeList, Graph
from gattn.graphs.block_lists import BlockGraph, top_blocks
from gattn.graphs.builders import k_hop, line_graph, union, with_virtual_nodes, within_blocks
from gattn.graphs.complete import CompleteGraph
from gattn.graphs.expanders import expander
from gattn.graphs.proximity import earlier_than, grid, knn, radius
from gattn.graphs.reordering import Reordered, reorder
from gattn.graphs.sparse import Edges, SparseGraph, as_graph
from gattn.graphs.tables import TableGraphs, from_tables
from gattn.graphs.typed import TypedGraph

__all__ = [
    "FLOWS",
    "BlockGraph",
    "CompleteGraph",
    "EdgeList",
    "Edges",
    "Graph",
    "GraphLike",
    "Reordered",
    "SparseGraph",
    "TableGraphs",
    "TypedGraph",
    "as_graph",
    "earlier_than",
    "expander",
    "from_tables",
    "grid",
    "k_hop",
    "knn",
    "line_graph",
    "radius",
    "reorder",
    "top_blocks",
    "union",
    "with_virtual_nodes",
    "within_blocks",
]

#: Whatever `gattn.attend` and the layers take as a graph.
GraphLike: TypeAlias = Adj | Graph
