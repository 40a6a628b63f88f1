"""What the structure of graphs says about their nodes: components, and eigenvectors of Laplacians."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import eigsh
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import AddLaplacianEigenvectorPE
from torch_geometric.utils import is_undirected, to_scipy_sparse_matrix

from gattn.errors import InputError
from gattn.graphs.edge_lists import INTEGER_DTYPES

__all__ = ["LARGEST_DENSE", "graph_numbers", "laplacian_eigenvectors", "num_components", "returns", "threads_for"]

#: Graphs of up to this many nodes are solved as dense matrices, and larger ones as sparse matrices.
LARGEST_DENSE = 300
#: Random walks on larger graphs are products of sparse matrices.
_LARGEST_DENSE_WALK = 2000
#: Dense matrices of the same size are made together, up to this many numbers at a time.
_AT_ONCE = 2**22
#: Newer versions of SciPy draw the vectors with which a solver starts again from a generator.
_HAS_RNG = "rng" in inspect.signature(eigsh).parameters


def graph_numbers(edge_index: Tensor, num_nodes: int, batch: Tensor | None) -> Tensor:
    """The graph of each node, `[N]`, numbered from 0 without gaps.

    Args:
        edge_index: The edges, `[2, E]`.
        num_nodes: The number of nodes, N.
        batch: The graph of each node, `[N]`, or `None` for a single graph.

    Raises:
        ValueError: If `batch` does not hold the graph of each node, or an edge joins nodes of two graphs.
    """
    if batch is None:
        return edge_index.new_zeros(num_nodes)
    is_integers = isinstance(batch, Tensor) and batch.dtype in INTEGER_DTYPES
    if not is_integers or batch.shape != (num_nodes,) or bool((batch < 0).any()):
        raise InputError(f"batch must hold the graph of each node, integers [{num_nodes}] from 0; got {batch!r}.")
    graphs: Tensor = torch.unique(batch, return_inverse=True)[1]
    if bool((graphs[edge_index[0]] != graphs[edge_index[1]]).any()):
        raise InputError("an edge joins nodes of two graphs: batch must hold the graph of each node of edge_index.")
    return graphs


def num_components(edge_index: Tensor, num_nodes: int) -> int:
    """The number of connected components with edges; nodes without edges do not add an eigenvalue of zero."""
    labels = connected_components(to_scipy_sparse_matrix(edge_index, num_nodes=num_nodes), directed=False)[1]
    return int(np.unique(labels[edge_index[0].cpu().numpy()]).size)


def returns(edge_index: Tensor, num_nodes: int, k: int) -> Tensor:
    """The probabilities that a random walk is back at each node after 1, ..., k steps, `[N, k]`.

    Args:
        edge_index: The edges, `[2, E]`, int64.
        num_nodes: The number of nodes, N.
        k: The number of steps.
    """
    share = edge_index[0].bincount(minlength=num_nodes).float().reciprocal()[edge_index[0]]
    step: Any
    if num_nodes <= _LARGEST_DENSE_WALK:
        step = share.new_zeros(num_nodes, num_nodes).index_put_(tuple(edge_index), share, accumulate=True)
    else:
        step = to_scipy_sparse_matrix(edge_index, share, num_nodes).tocsr()
    walks = itertools.accumulate([step] * k, lambda walk, step: walk @ step)
    return torch.stack([torch.as_tensor(walk.diagonal(), device=edge_index.device) for walk in walks], 1)


def laplacian_eigenvectors(
    edge_index: Tensor, graphs: Tensor, k: int, *, random_signs: bool, largest_dense: int = LARGEST_DENSE
) -> Tensor:
    """The first k non-trivial eigenvectors of each graph's Laplacian, `[N, k]`, and zeros where there are fewer.

    Args:
        edge_index: The edges, `[2, E]`, without self-loops, on the CPU.
        graphs: The graph of each node, `[N]`, from 0, on the CPU.
        k: The number of eigenvectors.
        random_signs: Whether to choose signs at random. Otherwise, they are what the solver returns, which is the same
            each time.
        largest_dense: The number of nodes up to which matrices are dense. (default: `LARGEST_DENSE`)
    """
    with torch.device("cpu"):
        return _eigenvectors(edge_index, graphs, k, random_signs, largest_dense)


def _eigenvectors(edge_index: Tensor, graphs: Tensor, k: int, random_signs: bool, largest_dense: int) -> Tensor:
    """See `laplacian_eigenvectors`, where the default device is the CPU."""
    sizes = graphs.bincount()[graphs]
    order = graphs.argsort(stable=True)
    order = order[sizes[order].argsort(stable=True)]  # graphs of the same size side by side
    sizes, places = sizes[order], order.argsort()
    edge_index = places[edge_index]
    edge_index = edge_index[:, edge_index[0].argsort(stable=True)]
    parts, first = [torch.zeros(0, k)], 0
    while first < sizes.numel():
        size = int(sizes[first])
        is_dense = size <= max(largest_dense, k + 2)  # sparse matrices never give all of their eigenvectors
        count = max(_AT_ONCE // size**2, 1) if is_dense else 1
        last = min(first + count * size, int(torch.searchsorted(sizes, size, right=True)))
        start, end = torch.searchsorted(edge_index[0], torch.tensor([first, last])).tolist()
        edges = edge_index[:, start:end] - first
        vectors = _dense(edges, (last - first) // size, size) if is_dense else _sparse(edges, size, k, random_signs)
        vectors = vectors[..., 1 : k + 1]
        if random_signs:
            vectors = vectors * (2 * torch.randint(0, 2, (len(vectors), 1, vectors.size(-1))) - 1)
        parts.append(F.pad(vectors, (0, k - vectors.size(-1))).flatten(0, 1).float())
        first = last
    return torch.cat(parts)[places]


def _dense(edge_index: Tensor, count: int, size: int) -> Tensor:
    """All eigenvectors of some graphs of the same size, which lie end to end: `[count, size, size]`."""
    row, col = edge_index
    degree = row.bincount(minlength=count * size).double()
    scale = torch.where(degree > 0, degree.rsqrt(), 0.0)
    laplacian = torch.eye(size, dtype=torch.double).repeat(count, 1, 1)
    laplacian.view(-1, size).index_put_((row, col % size), -scale[row] * scale[col], accumulate=True)
    with threads_for(size):  # one by one, as LAPACK rounds differently where a matrix begins elsewhere in memory
        return torch.stack([_solved(matrix) for matrix in laplacian])


def _solved(laplacian: Tensor) -> Tensor:
    """The eigenvectors of one matrix, `[size, size]`."""
    if torch.equal(laplacian, laplacian.mT):
        vectors: Tensor = torch.linalg.eigh(laplacian)[1]
        return vectors
    values, vectors = torch.linalg.eig(laplacian)  # some edges have one direction only
    return vectors.real[:, values.real.argsort(stable=True)]


@contextmanager
def threads_for(size: int) -> Iterator[None]:
    """One thread for graphs of a small size, whose threads would wait for each other, for long on a busy machine."""
    threads = torch.get_num_threads()
    if size <= LARGEST_DENSE:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _sparse(edge_index: Tensor, size: int, k: int, random_signs: bool) -> Tensor:
    """The first k + 1 eigenvectors of one large graph by PyG, `[1, size, k + 1]`; the trivial one is left as zeros."""
    generator = np.random.default_rng(0)  # the solver begins with the same vector each time
    options = {"v0": generator.standard_normal(size), **({"rng": generator} if _HAS_RNG else {})}
    is_symmetric = is_undirected(edge_index)
    transform = AddLaplacianEigenvectorPE(k, attr_name="structure", is_undirected=is_symmetric, **options)
    with torch.random.fork_rng(devices=[], enabled=not random_signs):  # PyG draws signs even if nobody wants them
        structure: Tensor = transform(Data(edge_index=edge_index, num_nodes=size)).structure
    return F.pad(structure, (1, 0)).unsqueeze(0)
