"""Checks of numbers that would otherwise be trusted: the indices in a graph or a sparse matrix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import scipy.sparse
import torch
from numpy.typing import NDArray
from torch_geometric.data import Data, InMemoryDataset

__all__ = ["check_edges", "check_edges_of_graphs", "csr_matrix"]


def check_edges(data: Data) -> Data:
    """Returns `data` after checking that all of its edges connect nodes of its own.

    Raises:
        ValueError: If `edge_index` has another type or shape, or a node is out of range.
    """
    edges, num_nodes = data.edge_index, data.num_nodes
    if edges.dtype != torch.long or edges.dim() != 2 or edges.size(0) != 2:
        raise ValueError(
            f"edge_index must hold 64-bit integers of shape [2, E]; got {edges.dtype} of shape {list(edges.shape)}"
        )
    if edges.numel() and not 0 <= int(edges.min()) <= int(edges.max()) < num_nodes:
        raise ValueError(
            f"edges connect nodes {int(edges.min())} to {int(edges.max())}, but the graph has only {num_nodes} nodes"
        )
    return data


def check_edges_of_graphs(dataset: InMemoryDataset) -> None:
    """Checks the edges of all graphs of a data set, without making each of them.

    Raises:
        ValueError: If a node is out of range.
    """
    if dataset.slices is None:  # a single graph
        check_edges(dataset[0])
        return
    data: Any = dataset._data
    sizes = torch.as_tensor(data._num_nodes)
    counts = torch.as_tensor(dataset.slices["edge_index"]).diff()
    if bool(((data.edge_index < 0) | (data.edge_index >= sizes.repeat_interleave(counts))).any()):
        raise ValueError("edges connect nodes that a graph does not have")


def csr_matrix(
    data: NDArray[Any], indices: NDArray[Any], indptr: NDArray[Any], shape: Iterable[Any]
) -> scipy.sparse.csr_matrix:
    """Makes a sparse matrix after checking its indices: SciPy would write to whatever memory they point at.

    Raises:
        ValueError: If the indices are not integers or do not fit the shape.
    """
    if any(part.dtype.kind not in "iu" for part in (indices, indptr)):
        raise ValueError(
            f"the indices of a sparse matrix must be integers; got indices of type {indices.dtype} and index pointers "
            f"of type {indptr.dtype}"
        )
    matrix = scipy.sparse.csr_matrix((data, indices, indptr), shape=tuple(int(size) for size in shape))
    matrix.check_format(full_check=True)
    return matrix
