"""Orders of nodes in which neighbours are close together, so that kernels find their rows in the cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import reverse_cuthill_mckee
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.typing import Adj
from torch_geometric.utils import lexsort
from torch_geometric.utils.num_nodes import maybe_num_nodes

from gattn.errors import InputError, check_at_least
from gattn.graphs.base import checked_size
from gattn.graphs.edge_lists import plain
from gattn.graphs.sparse import SparseGraph

__all__ = ["Reordered", "import_metis", "node_order", "partition", "renumber", "reorder", "undirected"]

METHODS = ("rcm", "metis", "degree")

# Their rows of 128 channels in float32 fill half of an L2 cache of 1 MiB.
NODES_PER_PART = 1000


class Reordered(NamedTuple):
    """A graph with its nodes in another order, as `reorder` returns it."""

    permutation: Tensor
    """`[N]`, which node comes where: `x[permutation]` are the features in the new order."""
    edge_index: Tensor
    """`[2, E]`, the same edges between the new numbers, sorted by target and then by source."""
    edge_permutation: Tensor
    """`[E]`, which edge comes where: `edge_attr[edge_permutation]` are the edge features in the new order."""
    inverse: Tensor
    """`[N]`, the new number of each node: `out[inverse]` are outputs in the old order, and `inverse[index]` is a tensor
    of old numbers, such as those of a split, in new ones."""


def reorder(
    edge_index: Adj, num_nodes: int | None = None, method: str = "rcm", *, num_parts: int | None = None
) -> Reordered:
    """Renumbers the nodes of a graph so that neighbours are close together in memory.

    On graphs whose features do not fit into the cache, attention is faster in such an order. All methods look at the
    undirected graph, run on the CPU, and always give the same order for the same graph:

    - `"rcm"`: the `reverse Cuthill-McKee order <https://doi.org/10.1145/800195.805928>`_ (Cuthill and McKee, 1969,
      reversed as George proposed in 1971), which keeps edges close to the diagonal of the adjacency matrix;
    - `"metis"`: `METIS <https://doi.org/10.1137/S1064827595287997>`_ (Karypis and Kumar, 1998) finds parts with few
      edges between them. Nodes are ordered by part, and by `"rcm"` within each part. Needs `pymetis`;
    - `"degree"`: nodes with many edges come first. It takes the least time, and gained at most 5 % in our benchmark.

    Edges are sorted, too, so that kernels read features of edges in the order in which they are stored.

    Args:
        edge_index: `[2, E]`, or another form of a graph that `SparseGraph` takes.
        num_nodes: N; nodes without edges count. (default: `None`, one more than the largest index, or the size that an
            `EdgeIndex` or a sparse adjacency has)
        method: `"rcm"`, `"metis"` or `"degree"`. (default: `"rcm"`)
        num_parts: The number of parts for `"metis"`. (default: `None`, parts of 1000 nodes, whose features fit into a
            core's cache)

    Returns:
        The order and the renumbered edges, as an `EdgeIndex` if `edge_index` is one.

    Raises:
        TypeError: If `edge_index` is no graph, or a number is not an integer.
        ValueError: If the shape or dtype of `edge_index` is wrong, the method is unknown, there are more parts than
            nodes, or `num_parts` is given for another method.
        IndexError: If an index is negative or too large.
        ImportError: If `method="metis"` and `pymetis` is not installed.

    Example:
        >>> import torch, gattn
        >>> path = torch.tensor([[0, 3, 1], [3, 1, 2]])  # 0 → 3 → 1 → 2
        >>> permutation, edge_index, edge_permutation, inverse = gattn.graphs.reorder(path, num_nodes=4)
        >>> permutation
        tensor([2, 1, 3, 0])
        >>> edge_index
        tensor([[1, 2, 3],
                [0, 1, 2]])
        >>> conv, x = gattn.nn.GATConv(8, 4), torch.randn(4, 8)
        >>> out = conv(x[permutation], edge_index)[inverse]
        >>> torch.allclose(out, conv(x, path), atol=1e-6)
        True
    """
    permutation = node_order(edge_index, num_nodes, method, num_parts)
    inverse = permutation.argsort()
    if not (isinstance(edge_index, Tensor) and edge_index.layout == torch.strided):
        edge_index = SparseGraph(edge_index).edge_index
    return Reordered(permutation, *renumber(edge_index, inverse, inverse), inverse)


def node_order(edge_index: Adj, num_nodes: int | None, method: str, num_parts: int | None) -> Tensor:
    """The permutation of `reorder`, which documents the arguments and errors."""
    graph = SparseGraph(edge_index)
    if method not in METHODS:
        raise InputError(f"method must be 'rcm', 'metis' or 'degree'; got {method!r}.")
    if num_nodes is None:
        num_nodes = max(maybe_num_nodes(edge_index), 0)  # negative indices are reported below
    num_nodes = checked_size("num_nodes", num_nodes)
    edges = graph.with_sizes(num_nodes, num_nodes).edges().edge_index
    if num_parts is not None:
        if method != "metis":
            raise InputError(f"num_parts is for method='metis'; got {num_parts} for {method!r}.")
        check_at_least(1, num_parts=num_parts)
        if num_parts > num_nodes:
            raise InputError(f"num_parts must not exceed the {num_nodes} nodes; got {num_parts}.")
    return _order(edges.cpu(), num_nodes, method, num_parts).to(edges.device)


def renumber(
    edge_index: Tensor, sources: Tensor, targets: Tensor, order: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The edges between new numbers of nodes, and their order.

    Args:
        edge_index: `[2, E]`, the edges between the old numbers.
        sources: `[M]`, the new number of each source.
        targets: `[N]`, the new number of each target.
        order: `[E]`, which edge comes where. (default: `None`, by target and then by source)
    """
    source, target = plain(edge_index).long()
    source, target = sources[source], targets[target]
    sort_order = "col" if order is None else None
    order = lexsort([source, target]) if order is None else order
    dtype = torch.promote_types(edge_index.dtype, torch.int32)  # smaller types may be unable to hold the new numbers
    renumbered = torch.stack([source[order], target[order]]).to(dtype)
    if isinstance(edge_index, EdgeIndex):
        size, is_undirected = (len(sources), len(targets)), edge_index.is_undirected
        renumbered = EdgeIndex(renumbered, sparse_size=size, sort_order=sort_order, is_undirected=is_undirected)
    return renumbered, order


def _order(edge_index: Tensor, num_nodes: int, method: str, num_parts: int | None) -> Tensor:
    """Which node comes where."""
    if method == "degree":
        return edge_index.flatten().bincount(minlength=num_nodes).argsort(descending=True, stable=True)
    if method == "metis":
        import_metis()
    adjacency = undirected(edge_index, num_nodes)
    if not adjacency.nnz:
        return torch.arange(num_nodes, device="cpu")
    # SciPy sorts the neighbours of each node by degree, which takes quadratic time unless they are sorted already.
    order = np.diff(adjacency.indptr).argsort(kind="stable")
    by_degree = adjacency[order][:, order]
    by_degree.sort_indices()
    order = order[reverse_cuthill_mckee(by_degree, symmetric_mode=True)]
    if method == "metis":
        parts = partition(adjacency, num_parts or -(-num_nodes // NODES_PER_PART))
        order = order[parts[order].argsort(kind="stable")]
    return torch.from_numpy(order)


def undirected(edge_index: Tensor, num_nodes: int) -> csr_array:
    """The symmetric adjacency matrix of the graph, without self-loops."""
    source, target = edge_index.cpu().numpy()
    is_edge = (source != target).astype("int32")
    adjacency = coo_array((is_edge, (source, target)), shape=(num_nodes, num_nodes)).tocsr()
    adjacency = (adjacency + adjacency.T).tocsr()
    adjacency.eliminate_zeros()
    return adjacency


def partition(adjacency: csr_array, num_parts: int) -> np.ndarray[Any, Any]:
    """The part of each node, of about the same sizes and with few edges between them, as METIS finds them."""
    graph = import_metis().CSRAdjacency(adjacency.indptr, adjacency.indices)
    return np.asarray(import_metis().part_graph(num_parts, graph)[1])


def import_metis() -> Any:
    """The package `pymetis`.

    Raises:
        ImportError: If it is not installed.
    """
    try:
        import pymetis
    except ImportError as error:
        raise ImportError("METIS needs its package: pip install pymetis") from error
    return pymetis
