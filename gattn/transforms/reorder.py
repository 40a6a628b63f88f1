"""Transforms that renumber nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.hypergraph_data import HyperGraphData
from torch_geometric.data.storage import EdgeStorage, NodeStorage
from torch_geometric.transforms import BaseTransform
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import select

from gattn.errors import InputError, InputTypeError
from gattn.graphs import CompleteGraph, TypedGraph
from gattn.graphs.edge_lists import INTEGER_DTYPES, plain
from gattn.graphs.reordering import node_order, renumber
from gattn.transforms.structure import PAIRS

__all__ = ["Reorder"]


class Reorder(BaseTransform):
    """Renumbers the nodes of a graph so that neighbours are close together in memory; see `gattn.graphs.reorder`.

    It reorders whatever has one entry per node or edge (features, labels, masks, positions, lists of names). Numbers of
    nodes change where PyG's batches would increase them, too: in integer tensors whose names contain `index`, such as
    `edge_label_index`, and in `face`. Labels of an index, such as `edge_label`, keep its order. What gattn's transforms
    add for each pair of nodes, such as `pair_buckets`, is reordered by both nodes. Other lists of nodes, such as a
    `train_idx`, are not recognised: make them masks, or look them up in `node_permutation.argsort()`.

    The nodes of a heterogeneous graph are ordered jointly, across all types of edges.

    `node_permutation` and `edge_permutation`, which are added to the data, say which node and edge comes where, so
    `out[data.node_permutation.argsort()]` are outputs in the old order. `Reorder.inverse` takes everything back.

    Reorder a graph before a loader samples from it. Batches are refused, because their nodes must stay with their
    graphs, and graphs that are small enough to be batched fit into the cache.

    Args:
        method: `"rcm"`, `"metis"` or `"degree"`. (default: `"rcm"`)
        num_parts: The number of parts for `"metis"`. (default: `None`, parts of 1000 nodes)

    Raises:
        TypeError: When called, if the data are neither a `Data` nor a `HeteroData`.
        ValueError: When called, if they are a batch or a hypergraph, have no `edge_index`, have a sparse adjacency
            (apply `ToSparseTensor` afterwards), or have something for each pair of other nodes.
        IndexError: When called, if they hold a number that no node has.

    Example:
        >>> import gattn
        >>> data = gattn.datasets.load("karate")
        >>> reordered = gattn.transforms.Reorder()(data)
        >>> bool((reordered.x == data.x[reordered.node_permutation]).all())
        True
        >>> reordered.out = gattn.nn.GATConv(34, 4)(reordered.x, reordered.edge_index)
        >>> gattn.transforms.Reorder.inverse(reordered).out.shape  # in the order of data
        torch.Size([34, 4])
    """

    def __init__(self, method: str = "rcm", *, num_parts: int | None = None):
        self.method = method
        self.num_parts = num_parts

    def forward(self, data: Data | HeteroData) -> Data | HeteroData:
        """Reorders data in place; calling the transform reorders a shallow copy."""
        _check(data)
        if isinstance(data, HeteroData):
            graph = TypedGraph.from_hetero(data)
            edge_index, num_nodes = graph.edge_index, graph.num_targets
        else:
            edge_index, num_nodes = data.edge_index, data.num_nodes
        order = node_order(edge_index, num_nodes, self.method, self.num_parts)
        nodes, first = {}, 0
        for store in data.node_stores:
            last = first + store.num_nodes
            nodes[store._key] = order[(order >= first) & (order < last)] - first
            first = last
        edges = _permute(data, nodes, {})
        for name, stores, orders in (
            ("node_permutation", data.node_stores, nodes),
            ("edge_permutation", data.edge_stores, edges),
        ):
            for store in stores:
                if name not in store:  # otherwise, what an earlier transform added has been permuted, too
                    store[name] = orders[store._key]
        return data

    @staticmethod
    def inverse(data: Data | HeteroData) -> Data | HeteroData:
        """The data in the order that they had before, including what has been added since, without the permutations.

        Args:
            data: What the transform returned, possibly with further attributes, such as outputs.

        Raises:
            TypeError: If it is neither a `Data` nor a `HeteroData`.
            ValueError: If it has not been reordered.
        """
        _check(data)
        data = data.__copy__()
        nodes, edges = (
            {store._key: store.get(name) for store in stores}
            for name, stores in (("node_permutation", data.node_stores), ("edge_permutation", data.edge_stores))
        )
        if any(order is None for order in (*nodes.values(), *edges.values())):
            raise InputError("these data have not been reordered: they lack node_permutation or edge_permutation.")
        _permute(data, *({key: order.argsort() for key, order in orders.items()} for orders in (nodes, edges)))
        for store in data.stores:
            for name in ("node_permutation", "edge_permutation"):
                store.pop(name, None)
        return data

    def __repr__(self) -> str:
        return f"{type(self).__name__}(method={self.method!r})"


def _check(data: Any) -> None:
    """Raises an error for what cannot be reordered."""
    if not isinstance(data, (Data, HeteroData)):
        raise InputTypeError(f"Reorder takes a Data or a HeteroData; got {type(data).__name__}.")
    if isinstance(data, HyperGraphData):
        raise InputError("Reorder takes graphs, but the second row of a hypergraph's edge_index has no nodes.")
    for store in data.stores:
        for name in ("batch", "batch_size"):
            if name in store:
                raise InputError(
                    f"these data are a batch, because they have {name!r}: reorder each graph before it is batched, or "
                    "the graph that a loader samples from."
                )
        for key, value in store.items():
            if isinstance(value, SparseTensor) or isinstance(data.__cat_dim__(key, value, store), tuple):
                raise InputError(f"{key} is a sparse matrix: apply Reorder first, and ToSparseTensor afterwards.")


def _permute(data: Data | HeteroData, nodes: dict[Any, Tensor], edges: dict[Any, Tensor]) -> dict[Any, Tensor]:
    """Gives data these orders of nodes, and of edges if there are any; returns the orders of edges."""
    numbers = {key: order.argsort() for key, order in nodes.items()}
    orders = {}
    for store in data.stores if isinstance(data, Data) else (*data.node_stores, *data.edge_stores):
        key, index, changed = store._key, set(), {}
        if isinstance(store, EdgeStorage):
            ends = (numbers[None],) if key is None else (numbers[key[0]], numbers[key[-1]])
            changed["edge_index"], orders[key] = renumber(store.edge_index, ends[0], ends[-1], edges.get(key))
            index = {name for name, value in store.items() if _is_index(name, value, len(ends))}
            if key is None:
                changed |= _permuted_pairs(store, nodes[key], orders[key])
        for name, value in store.items():
            if name in changed or f"{name}_index" in index:
                continue
            dim = data.__cat_dim__(name, value, store)
            is_list = name in index and value.dim() > 1  # of edges or faces, even if there are as many as nodes
            if isinstance(store, NodeStorage) and not is_list and store.is_node_attr(name):
                value = _select(value, nodes[key], dim)
            elif isinstance(store, EdgeStorage) and name not in index and store.is_edge_attr(name):
                value = _select(value, orders[key], dim)
            changed[name] = _renumbered(name, value, ends) if name in index else value
        store.update(changed)  # at the end, because PyG may infer the number of nodes from edge_index
    return orders


def _permuted_pairs(store: Any, nodes: Tensor, edges: Tensor) -> dict[str, Any]:
    """What gattn's transforms have added for each pair of nodes, `[n * n, ...]` target by target, in a new order."""
    size, listed = len(nodes), store.get("pair_index")
    has_all = listed is None or torch.equal(listed, CompleteGraph(size).edge_index.to(listed))
    found = {name: store[name] for name in PAIRS if name in store and (has_all or name != "pair_index")}
    for name in found.keys() - ({"pair_index"} if has_all else {"pair_walks"}):  # which stay where they are
        value = found[name]
        if len(value) != size**2:
            raise InputError(
                f"{name} has {len(value)} rows, but {size} nodes have {size**2} pairs: reorder the graph before the "
                "transform that adds them."
            )
        found[name] = value.index_select(0, (nodes.unsqueeze(1) * size + nodes).flatten())
    if "pair_paths" in found:
        numbers = F.pad(edges.argsort(), (0, 1), value=-1).to(found["pair_paths"])  # -1, beyond the end, stays
        found["pair_paths"] = numbers[found["pair_paths"].long()]
    return found


def _is_index(name: str, value: Any, num_ends: int) -> bool:
    """Whether an attribute of edges holds numbers of nodes, by PyG's convention, besides edge_index itself."""
    if not isinstance(value, Tensor) or value.dtype not in INTEGER_DTYPES or name == "edge_index":
        return False
    if num_ends == 2:
        return "index" in name and value.dim() > 1 and value.size(0) == 2
    return "index" in name or name == "face"


def _renumbered(name: str, index: Tensor, ends: tuple[Tensor, ...]) -> Tensor:
    """New numbers of nodes: of any, or of sources above targets."""
    rows = []
    for row, numbers in zip(index if len(ends) == 2 else [index], ends, strict=True):
        if row.numel() and not (row.min() >= 0 and row.max() < len(numbers)):
            raise IndexError(
                f"{name} holds numbers from {int(row.min())} to {int(row.max())}, but there are {len(numbers)} nodes. "
                "By PyG's convention, integers whose name contains 'index' are numbers of nodes: rename them if they "
                "are not."
            )
        rows.append(numbers[plain(row).long()])
    renumbered = torch.stack(rows) if len(ends) == 2 else rows[0]
    return renumbered.to(torch.promote_types(index.dtype, torch.int32))


def _select(value: Any, order: Tensor, dim: int) -> Any:
    """A tensor, array or list in another order."""
    if isinstance(value, np.ndarray):
        return value.take(order.cpu().numpy(), dim)
    if isinstance(value, Tensor) and value.layout in (torch.sparse_csr, torch.sparse_csc):  # no index_select
        return value.to_sparse().index_select(dim, order).to_sparse(layout=value.layout)
    return select(value, order, dim)
