"""Random regular graphs, on which messages between all nodes need few steps."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from torch_geometric.utils import coalesce

from gattn.errors import InputError, check_at_least
from gattn.graphs.base import checked_size
from gattn.graphs.builders import checked_batch
from gattn.graphs.sparse import SparseGraph

__all__ = ["expander"]

_Array: TypeAlias = np.ndarray[Any, Any]

#: Repairs of a random regular graph before it is drawn again. A few are enough for almost every graph.
_MOST_REPAIRS = 100


def expander(num_nodes: int, degree: int, batch: Tensor | None = None, *, seed: int = 0) -> SparseGraph:
    r"""Draws a random regular graph, in which every node has `degree` neighbours and any two nodes are close.

    Random regular graphs are expanders with high probability (`Friedman, 2004 <https://arxiv.org/abs/cs/0405020>`_):
    apart from :math:`\lambda_1 = d`, the eigenvalues of their adjacency matrix are at most about

    .. math::
        |\lambda| \le 2 \sqrt{d - 1}

    so that messages between all N nodes need only about log N steps. `Exphormer <https://arxiv.org/abs/2303.06147>`_
    attends along them, beside the edges of the graph and those of virtual nodes.

    The graph is undirected (each edge is listed in both directions), without self-loops or parallel edges, and
    connected for degrees of 3 or more. It is drawn with a generator of its own, and depends only on `seed`, the degree
    and the number of nodes: in a batch, graphs with the same number of nodes have the same edges, whichever graphs are
    beside them. A graph with no more than `degree` nodes becomes complete, without self-loops.

    Args:
        num_nodes: N, of all graphs together.
        degree: The number of neighbours, d, at least 1. If it is odd, graphs must have an even number of nodes.
        batch: The graph of each node, `[N]`, in any order. (default: `None`, a single graph)
        seed: The seed of the generator. (default: `0`)

    Shapes:
        - **edge_index** of the graph: `[2, N * d]`, if every graph has more than d nodes.

    Returns:
        The graph, on the device of `batch`.

    Raises:
        TypeError: If a number is not an integer, or `batch` is not a tensor.
        ValueError: If `degree` is not positive, `batch` does not hold the graph of each node, or the degree is odd and
            a graph with more nodes has an odd number of them.

    Example:
        >>> import gattn
        >>> graph = gattn.graphs.expander(num_nodes=100, degree=6)
        >>> graph.num_edges
        600
        >>> graph.edge_index[1].bincount().unique()  # every node has 6 neighbours
        tensor([6])
        >>> gattn.graphs.expander(num_nodes=3, degree=6).edge_index  # complete
        tensor([[1, 2, 0, 2, 0, 1],
                [0, 0, 1, 1, 2, 2]])
    """
    num_nodes = checked_size("num_nodes", num_nodes)
    check_at_least(1, degree=degree)
    check_at_least(0, seed=seed)
    graphs = checked_batch(batch, num_nodes)
    sizes = graphs.bincount()
    impossible = sizes[(sizes > degree) & (sizes * degree % 2 == 1)]
    if impossible.numel():
        raise InputError(
            f"no graph of {int(impossible[0])} nodes has {degree} neighbours at each of them, because the sum of the "
            f"degrees is even in every graph: choose an even degree, such as {degree + 1}."
        )
    by_graph = graphs.argsort(stable=True)
    size_of_graph = sizes[graphs[by_graph]]
    edges = [torch.zeros(2, 0, dtype=torch.int64, device=graphs.device)]
    for size in torch.unique(size_of_graph).tolist():
        nodes = by_graph[size_of_graph == size].view(-1, size)
        pairs = torch.from_numpy(_regular(size, min(int(degree), size - 1), int(seed))).to(nodes.device)
        edges.append(nodes[:, pairs].permute(2, 0, 1).reshape(2, -1))
    joined = torch.cat(edges, 1)
    joined = coalesce(torch.cat([joined, joined.flip(0)], 1), num_nodes=num_nodes, sort_by_row=False)
    return SparseGraph(joined, num_nodes, num_nodes)


def _regular(num_nodes: int, degree: int, seed: int) -> _Array:
    """The edges of a random regular graph, once each: `[N * degree / 2, 2]`."""
    if 2 * degree >= num_nodes:  # almost all pairs, of which the few others are easier to draw
        is_edge = np.triu(np.ones((num_nodes, num_nodes), dtype=bool), 1)
        is_edge[tuple(np.sort(_drawn(num_nodes, num_nodes - 1 - degree, seed), 1).T)] = False
        return np.argwhere(is_edge)
    return _drawn(num_nodes, degree, seed)


def _drawn(num_nodes: int, degree: int, seed: int) -> _Array:
    """As `_regular`, for few edges: pairs of ends at random, of which self-loops and duplicates are then repaired."""
    generator = np.random.default_rng(seed)
    ends = np.repeat(np.arange(num_nodes), degree)
    while True:
        edges = generator.permutation(ends).reshape(-1, 2)
        if not _repair(edges, num_nodes, generator):
            continue
        adjacency = coo_array((np.ones(len(edges), dtype=bool), tuple(edges.T)), shape=(num_nodes, num_nodes))
        if degree < 3 or connected_components(adjacency, directed=False)[0] == 1:
            return edges


def _repair(edges: _Array, num_nodes: int, generator: np.random.Generator) -> bool:
    """Lets wrong edges exchange ends with others, in place; returns whether none is left."""
    pairs = _pairs(edges, num_nodes)
    is_wrong = np.ones(len(edges), dtype=bool)
    is_wrong[np.unique(pairs, return_index=True)[1]] = False
    is_wrong |= edges[:, 0] == edges[:, 1]
    for _ in range(_MOST_REPAIRS):
        wrong, right = np.flatnonzero(is_wrong), np.flatnonzero(~is_wrong)
        if not len(wrong):
            return True
        others = generator.choice(right, min(len(wrong), len(right)), replace=False)
        wrong = generator.permutation(wrong)[: len(others)]
        turned = generator.permuted(edges[others], axis=1)
        first = np.stack([edges[wrong, 0], turned[:, 1]], 1)  # (a, b), (c, d) become (a, d), (c, b)
        second = np.stack([turned[:, 0], edges[wrong, 1]], 1)
        new = np.concatenate([first, second])
        new_pairs = _pairs(new, num_nodes)
        _, place, count = np.unique(new_pairs, return_inverse=True, return_counts=True)
        is_fine = (new[:, 0] != new[:, 1]) & (count[place] == 1) & ~np.isin(new_pairs, pairs)
        is_fine = is_fine[: len(wrong)] & is_fine[len(wrong) :]
        for chosen, changed in ((wrong, first), (others, second)):
            edges[chosen[is_fine]] = changed[is_fine]
            pairs[chosen[is_fine]] = _pairs(changed[is_fine], num_nodes)
        is_wrong[wrong[is_fine]] = False
    return False


def _pairs(edges: _Array, num_nodes: int) -> _Array:
    """A number for each edge, `[E]`, that is the same for both directions."""
    pairs: _Array = edges.min(1) * num_nodes + edges.max(1)
    return pairs
