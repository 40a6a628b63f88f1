"""Transforms of PyG's data objects.

`Reorder` renumbers nodes for the cache. The others add what graph Transformers know about the structure of a graph as
features, which can be computed once (as a data set's `pre_transform`) and batched. They take a `Data`, or a `Batch`
graph by graph, which gives the same as a batch of the transformed graphs. Apply them after all transforms that add,
remove or renumber nodes or edges.

Features of pairs of nodes have one row per pair, target by target, in the order of the edges of a `CompleteGraph`:
those of a graph with n nodes have n² rows, and those of a batch are those of `CompleteGraph.packed(ptr=batch.ptr)`.
"""

from gattn.transforms.reorder import Reorder
from gattn.transforms.structure import Degrees, LaplacianEigenvectors, RandomWalkPairs, ShortestPathBuckets

__all__ = ["Degrees", "LaplacianEigenvectors", "RandomWalkPairs", "Reorder", "ShortestPathBuckets"]
