"""Graphs made from other graphs.

Like those of `gattn.graphs.proximity` and `gattn.graphs.expanders`, each function returns a graph, and features of its
edges if it has any. Edges never join two graphs of a batch. Unless a function says otherwise, edges are sorted by
target and then by source. The same input always gives the same graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_array, eye_array
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.typing import Adj
from torch_geometric.utils import coalesce, is_undirected, lexsort
from torch_geometric.utils.num_nodes import maybe_num_nodes

from gattn.errors import InputError, InputTypeError, check_at_least, check_flag
from gattn.graphs.base import Graph, checked_size
from gattn.graphs.edge_lists import INTEGER_DTYPES
from gattn.graphs.sparse import SparseGraph, as_graph
from gattn.graphs.typed import TypedGraph

__all__ = [
    "checked_batch",
    "k_hop",
    "line_graph",
    "runs",
    "union",
    "with_virtual_nodes",
    "within_blocks",
]


def k_hop(
    edge_index: Adj | Graph, num_hops: int, num_nodes: int | None = None, *, loop: bool = False
) -> tuple[SparseGraph, Tensor]:
    r"""Joins every node to all nodes from which it can be reached in at most `num_hops` steps.

    With the length :math:`d_{ij}` of the shortest path from j to i along the directions of edges, the sources of the
    target i are

    .. math::
        \mathcal{N}(i) = \{ j : 1 \le d_{ij} \le \text{num\_hops} \}

    `MixHop <https://arxiv.org/abs/1905.00067>`_ and `MAGNA <https://arxiv.org/abs/2009.14332>`_ look beyond the nearest
    neighbours in this way, and a table with one row per number of hops is Graphormer's spatial bias on a sparse graph.

    Args:
        edge_index: The graph, `[2, E]` or in another form that `gattn.attend` takes. A batch of graphs needs nothing
            else, since no path leads from one graph to another.
        num_hops: The largest number of steps, at least 1.
        num_nodes: N. (default: `None`, the size that the graph has, or one more than the largest index)
        loop: Whether every node is also joined to itself, by zero hops. (default: `False`)

    Shapes:
        - **hops:** `[E']`, int64.

    Returns:
        The graph, and the number of hops of each of its edges.

    Raises:
        TypeError: If `edge_index` is not a graph, `num_hops` is not an integer, or `loop` is neither true nor false.
        ValueError: If `num_hops` is not positive, or the graph's sources and targets are different nodes.
        IndexError: If an index is negative or too large.

    Example:
        >>> import torch, gattn
        >>> path = torch.tensor([[0, 1, 2], [1, 2, 3]])  # 0 → 1 → 2 → 3
        >>> graph, hops = gattn.graphs.k_hop(path, num_hops=2)
        >>> graph.edge_index
        tensor([[0, 0, 1, 1, 2],
                [1, 2, 2, 3, 3]])
        >>> hops
        tensor([1, 2, 1, 2, 1])
    """
    check_at_least(1, num_hops=num_hops)
    check_flag("loop", loop)
    given = _same_nodes(_listed(edge_index, num_nodes))
    (source, target), size = given.sources_and_targets(), int(given.num_targets or 0)
    nodes = torch.arange(size if loop else 0, device="cpu")
    edges, hops = [torch.stack([nodes, nodes])], [torch.zeros_like(nodes)]
    if source.numel():  # SciPy has no matrices without rows
        ends = target.cpu().numpy(), source.cpu().numpy()
        step = coo_array((np.ones(len(ends[0]), dtype=bool), ends), shape=(size, size)).tocsr()
        newest = reached = eye_array(size, dtype=bool, format="csr")
        for hop in range(1, min(int(num_hops), size) + 1):
            newest = (newest @ step) > reached
            if not newest.nnz:
                break
            reached = reached + newest
            found = newest.tocoo()
            edges.append(torch.from_numpy(np.stack([found.col, found.row])).long())
            hops.append(torch.full_like(edges[-1][0], hop))
    joined, hop_counts = torch.cat(edges, 1), torch.cat(hops)
    order = lexsort([joined[0], joined[1]])
    return SparseGraph(joined[:, order].to(source.device), size, size), hop_counts[order].to(source.device)


def line_graph(
    edge_index: Adj | Graph, num_nodes: int | None = None, *, directed: bool = True, backtracking: bool = True
) -> tuple[SparseGraph, Tensor]:
    r"""Makes edges attend to the edges with which they share a node: the nodes of the new graph are the given edges.

    - Directed: :math:`u \to v` is a source of every :math:`v \to w`, as in `torch_geometric.transforms.LineGraph` with
      `force_directed=True`. Node e of the new graph is the e-th edge *as given*, so that features of edges `[E, ...]`
      become features of nodes as they are. A self-loop is a source of itself.
    - Undirected: edges are sources of all other edges that share one of their nodes, as in `LineGraph` for undirected
      graphs. Every edge has to be given in both directions, which become one node. The nodes of the new graph are
      `edge_index[:, edge_index[0] < edge_index[1]]`, in this order; self-loops are left out.

    Parallel edges stay apart; to merge them first, as `LineGraph` does, use `torch_geometric.utils.coalesce`. A node
    with many neighbours gives the square of this number of edges.

    `DimeNet <https://arxiv.org/abs/2003.03123>`_ passes messages between directed edges, with the angle at the shared
    node as their feature, and the `D-MPNN <https://arxiv.org/abs/1904.01561>`_ does so without turning back.

    Args:
        edge_index: The graph, `[2, E]` or in another form that `gattn.attend` takes. A batch of graphs needs nothing
            else, since edges of different graphs share no node.
        num_nodes: N. (default: `None`, the size that the graph has, or one more than the largest index)
        directed: Whether to follow the directions of edges. (default: `True`)
        backtracking: Whether :math:`u \to v` is a source of :math:`v \to u`. (default: `True`)

    Shapes:
        - **shared:** `[E']`, int64.

    Returns:
        The graph, and for each of its edges the node that the two given edges share, the smaller one if they share
        both.

    Raises:
        TypeError: If `edge_index` is not a graph, or an option is neither true nor false.
        ValueError: If the graph's sources and targets are different nodes, if `directed=False` and an edge lacks its
            opposite, or if both options are false.
        IndexError: If an index is negative or too large.

    Example:
        >>> import torch, gattn
        >>> edge_index = torch.tensor([[0, 1, 1], [1, 2, 3]])
        >>> graph, shared = gattn.graphs.line_graph(edge_index)
        >>> graph.edge_index  # edge 0 → 1 is a source of both edges that leave node 1
        tensor([[0, 0],
                [1, 2]])
        >>> shared
        tensor([1, 1])
        >>> features = torch.randn(3, 8)  # of the three given edges
        >>> gattn.nn.GATConv(8, 4)(features, graph).shape
        torch.Size([3, 4])
    """
    check_flag("directed", directed)
    check_flag("backtracking", backtracking)
    given = _same_nodes(_listed(edge_index, num_nodes))
    (source, target), size = given.sources_and_targets(), int(given.num_targets or 0)
    if directed:
        after, before, shared = _meetings(source, torch.arange(source.numel(), device=source.device), target, size)
        if not backtracking:
            ahead = source[before] != target[after]
            after, before, shared = after[ahead], before[ahead], shared[ahead]
        return SparseGraph(torch.stack([before, after]), source.numel(), source.numel()), shared
    if not backtracking:
        raise InputError("backtracking=False is for directed edges: an undirected edge has no way back. Leave it out.")
    if not is_undirected(torch.stack([source, target]), num_nodes=size):
        raise InputError(
            "directed=False needs every edge in both directions, but an edge lacks its opposite: use "
            "torch_geometric.utils.to_undirected first, or directed=True."
        )
    low, high = (ends[source < target] for ends in (source, target))
    count = low.numel()
    numbers = torch.arange(count, device=source.device).repeat(2)
    after, before, shared = _meetings(torch.cat([low, high]), numbers, torch.cat([low, high]), size)
    before = numbers[before]
    is_other = before != after
    edges = torch.stack([before[is_other], after[is_other]])
    edges, shared = coalesce(edges, shared[is_other], num_nodes=count, reduce="min", sort_by_row=False)
    return SparseGraph(edges, count, count), shared


def _meetings(begin: Tensor, numbers: Tensor, end: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """All pairs of a beginning and an end at one node, by beginning: its number, the place of the end, and the node."""
    by_end = end.argsort(stable=True)
    counts = end.bincount(minlength=num_nodes)
    owner, place = runs((counts.cumsum(0) - counts)[begin], counts[begin])
    return numbers[owner], by_end[place], begin[owner]


def with_virtual_nodes(
    edge_index: Adj | Graph,
    num_nodes: int | None = None,
    batch: Tensor | None = None,
    *,
    count: int = 1,
    batch_size: int | None = None,
) -> TypedGraph:
    """Adds virtual nodes to each graph, which are joined to all of its nodes in both directions.

    They collect from the whole graph and send it to every node, so that any two nodes are two steps apart. They are the
    master node of `Neural Message Passing for Quantum Chemistry <https://arxiv.org/abs/1704.01212>`_ and the global
    nodes of `Exphormer <https://arxiv.org/abs/2303.06147>`_, which has edge embeddings of their own for them:
    `edge=gattn.Typed(table, graph.edge_type)`.

    Virtual nodes come after the N others: that with number c of graph b is N + b * count + c. The given edges come
    first, in their order, then those from nodes to virtual nodes, and then those back, both graph by graph.

    Args:
        edge_index: The graph, `[2, E]` or in another form that `gattn.attend` takes. The types of a `TypedGraph` are
            kept.
        num_nodes: N. (default: `None`, the size that `batch` or the graph has, or one more than the largest index)
        batch: The graph of each node, `[N]`, in any order. (default: `None`, a single graph)
        count: The number of virtual nodes of each graph, at least 1. (default: `1`)
        batch_size: The number of graphs, B, if the last ones may have no nodes. (default: `None`, one more than the
            largest number in `batch`)

    Shapes:
        - **edge_index** of the graph: `[2, E + 2 * N * count]`.
        - **edge_type** of the graph: `[E + 2 * N * count]`.

    Returns:
        A graph of N + B * count nodes. Its `edge_types` are those of the given edges (`"edge"`, unless they have
        types), `"node_to_virtual"` and `"virtual_to_node"`. If the given nodes have types, that of the new ones is
        `"virtual"`.

    Raises:
        TypeError: If `edge_index` is not a graph, `batch` is not a tensor, or a number is not an integer.
        ValueError: If the graph's sources and targets are different nodes, `batch` does not hold the graph of each
            node, an edge joins two graphs, or a number is too small.
        IndexError: If an index is negative or too large.

    Example:
        >>> import torch, gattn
        >>> edge_index, batch = torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 0, 1])
        >>> graph = gattn.graphs.with_virtual_nodes(edge_index, batch=batch)
        >>> graph.edge_index  # nodes 3 and 4 are virtual
        tensor([[0, 1, 0, 1, 2, 3, 3, 4],
                [1, 0, 3, 3, 4, 0, 1, 2]])
        >>> graph.edge_types, graph.edge_type
        (('edge', 'node_to_virtual', 'virtual_to_node'), tensor([0, 0, 1, 1, 1, 2, 2, 2]))
    """
    check_at_least(1, count=count)
    batch_size = None if batch_size is None else checked_size("batch_size", batch_size)
    if num_nodes is None and isinstance(batch, Tensor) and batch.dim() == 1:
        given = _sized(as_graph(edge_index).listed(), batch.numel(), batch.numel(), "batch")
    else:
        given = _listed(edge_index, num_nodes)
    (source, target), size = _same_nodes(given).sources_and_targets(), int(given.num_targets or 0)
    graphs = checked_batch(batch, size, source.device)
    if bool((graphs[source] != graphs[target]).any()):
        raise InputError(
            "an edge joins nodes of two graphs of the batch: pass the batch of these edges, or drop such edges with "
            "gattn.graphs.within_blocks."
        )
    least = 1 if batch is None else int(graphs.max()) + 1 if graphs.numel() else 0
    num_graphs = least if batch_size is None else batch_size
    if num_graphs < least:
        raise InputError(f"batch holds {least} graphs or more, but batch_size is {num_graphs}.")
    types = given.edge_type if isinstance(given, TypedGraph) else torch.zeros_like(source)
    names = given.edge_types if isinstance(given, TypedGraph) else ("edge",)
    node = graphs.argsort(stable=True).repeat_interleave(int(count))
    virtual = size + graphs[node] * count + torch.arange(int(count), device=node.device).repeat(size)
    edges = [torch.stack([source, target]), torch.stack([node, virtual]), torch.stack([virtual, node])]
    new = torch.tensor([len(names), len(names) + 1], device=types.device).repeat_interleave(node.numel())
    num_virtual = num_graphs * int(count)
    total, num_nodes_by_type = size + num_virtual, None
    if isinstance(given, TypedGraph) and given.num_nodes is not None:
        num_nodes_by_type = {**given.num_nodes, "virtual": num_virtual}
    return TypedGraph(
        torch.cat(edges, 1),
        torch.cat([types.long(), new]),
        (*names, "node_to_virtual", "virtual_to_node"),
        num_nodes_by_type,
        num_targets=total,
        num_sources=total,
    )


def union(*graphs: Adj | Graph, num_nodes: int | None = None, typed: bool = False) -> SparseGraph:
    """Joins the edges of several graphs over the same nodes.

    Sparse Transformers are unions: `BigBird <https://arxiv.org/abs/2007.14062>`_ of windows, global and random edges,
    and `Exphormer <https://arxiv.org/abs/2303.06147>`_ of the graph's own edges, those of an `expander`, and those of
    virtual nodes.

    Args:
        *graphs: The graphs, `[2, E]` or in another form that `gattn.attend` takes. A `CompleteGraph` gives a list of
            all its edges.
        num_nodes: N. (default: `None`, the size that one of the graphs has, or one more than the largest index)
        typed: Whether edges have types, which say from which graph they come (and replace types that they have). Edges
            then keep their order, graph by graph, so that the features of all edges are `torch.cat` of those of each
            graph, and an edge that several graphs have is listed for each of them. Otherwise, every edge is listed
            once. (default: `False`)

    Shapes:
        - **edge_index** of the graph: `[2, E']`; with `typed`, E' is the sum of the numbers of edges.
        - **edge_type** of the graph, with `typed`: `[E']`.

    Returns:
        The graph, which is a `TypedGraph` with one type per given graph if `typed`.

    Raises:
        TypeError: If an argument is not a graph, or `typed` is neither true nor false.
        ValueError: If there is no graph, or the graphs have different numbers of nodes or are on different devices.
        IndexError: If an index is negative or too large.

    Example:
        >>> import torch, gattn
        >>> ring = torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> window = gattn.CompleteGraph(3, window=(1, 0))
        >>> gattn.graphs.union(ring, window).edge_index
        tensor([[0, 2, 0, 1, 1, 2],
                [0, 0, 1, 1, 2, 2]])
        >>> gattn.graphs.union(ring, window, typed=True).edge_type
        tensor([0, 0, 0, 1, 1, 1, 1, 1])
    """
    check_flag("typed", typed)
    if not graphs:
        raise InputError("union needs at least one graph.")
    known = [as_graph(graph) for graph in graphs]
    num_targets = _common("targets", [graph.num_targets for graph in known], num_nodes)
    num_sources = _common("sources", [graph.num_sources for graph in known], num_nodes)
    if num_targets is None or num_sources is None:
        largest = max(_guessed_size(graph) for graph in known)
        num_targets, num_sources = (largest if size is None else size for size in (num_targets, num_sources))
    device = next((graph.adjacency.device for graph in known if isinstance(graph.adjacency, Tensor)), None)
    parts = []
    for graph in known:
        ends = graph.listed(device).with_sizes(num_sources, num_targets).sources_and_targets()
        parts.append(torch.stack(ends))
    if len(devices := {str(part.device) for part in parts}) > 1:
        raise InputError(f"the graphs are on {' and '.join(sorted(devices))}: move them to one device.")
    edges = torch.cat(parts, 1)
    if not typed:
        edges = coalesce(edges, num_nodes=max(num_sources, num_targets), sort_by_row=False)
        return SparseGraph(edges, num_targets, num_sources)
    counts = torch.tensor([part.size(1) for part in parts], device=edges.device)
    types = torch.arange(len(parts), device=edges.device).repeat_interleave(counts)
    return TypedGraph(edges, types, len(parts), num_targets=num_targets, num_sources=num_sources)


def within_blocks(
    edge_index: Adj | Graph, batch: Tensor, features: Tensor | None = None, *, batch_y: Tensor | None = None
) -> tuple[SparseGraph, Tensor | None]:
    """Drops the edges that join different blocks: graphs of a batch, communities, documents or windows.

    The other edges keep their order. Attention within the parts of a partition is that of `Cluster-GCN
    <https://arxiv.org/abs/1905.07953>`_. For all pairs of nodes within blocks, use `CompleteGraph.packed`, which lists
    none of them.

    Args:
        edge_index: The graph, `[2, E]` or in another form that `gattn.attend` takes. The types of a `TypedGraph` are
            kept.
        batch: The block of each node, `[N]`, in any order; if targets are other nodes than sources, that of each
            source, `[M]`.
        features: Features of the edges, `[E, ...]`. (default: `None`)
        batch_y: The block of each target, `[N]`, if targets are other nodes than sources. (default: `None`)

    Shapes:
        - **features:** `[E', ...]`, for the E' edges that are left.

    Returns:
        The graph of the edges that are left, and their features, or `None` if none were given.

    Raises:
        TypeError: If `edge_index` is not a graph, or `batch` or `features` is not a tensor.
        ValueError: If `batch` does not hold the block of each node, or there is not one row of features per edge.
        IndexError: If an index is negative or too large.

    Example:
        >>> import torch, gattn
        >>> edge_index = torch.tensor([[0, 1, 2], [1, 2, 3]])
        >>> graph, lengths = gattn.graphs.within_blocks(
        ...     edge_index, batch=torch.tensor([0, 0, 1, 1]), features=torch.tensor([5.0, 6.0, 7.0])
        ... )
        >>> graph.edge_index, lengths
        (tensor([[0, 2],
                [1, 3]]), tensor([5., 7.]))
    """
    sizes = [x.numel() if isinstance(x, Tensor) and x.dim() == 1 else None for x in (batch, batch_y)]
    graph = as_graph(edge_index).listed()
    if batch is None:
        raise InputTypeError("within_blocks needs batch, the block of each node, [N]; got None.")
    graph = _sized(graph, sizes[0], sizes[0] if batch_y is None else sizes[1], "batch")
    source, target = graph.sources_and_targets()
    blocks = checked_batch(batch, int(graph.num_sources or 0), source.device)
    blocks_y = blocks
    if batch_y is not None:
        blocks_y = checked_batch(batch_y, int(graph.num_targets or 0), source.device, "batch_y")
    if features is not None and not isinstance(features, Tensor):
        raise InputTypeError(f"features must be a tensor, [E, ...]; got {type(features).__name__}.")
    if features is not None and (features.dim() == 0 or features.size(0) != source.numel()):
        raise InputError(f"features need one row for each of the {source.numel()} edges; got {list(features.shape)}.")
    is_inside = blocks[source] == blocks_y[target]
    edges = torch.stack([source[is_inside], target[is_inside]])
    if features is not None:
        features = features[is_inside.to(features.device)]
    num_targets, num_sources = graph.num_targets, graph.num_sources
    if not isinstance(graph, TypedGraph):
        return SparseGraph(edges, num_targets, num_sources), features
    types = graph.edge_type[is_inside.to(graph.edge_type.device)]
    names, num_nodes = graph.edge_types, graph.num_nodes
    kept = TypedGraph(edges, types, names, num_nodes, num_targets=num_targets, num_sources=num_sources)
    return kept, features


def checked_batch(
    batch: Any, num_nodes: int, device: torch.device | None = None, name: str = "batch", rows: str = "node"
) -> Tensor:
    """The graph of each node, `[N]`, int64 from 0; zeros without `batch`.

    Args:
        batch: What the caller was given.
        num_nodes: N.
        device: Where it is needed. (default: `None`, where it is)
        name: The argument's name. (default: `"batch"`)
        rows: What has one entry each. (default: `"node"`)

    Raises:
        TypeError: If it is not a tensor.
        ValueError: If it does not hold one integer from 0 per node.
    """
    if batch is None:
        return torch.zeros(num_nodes, dtype=torch.int64, device=device)
    is_open = torch.compiler.is_compiling()  # where a size that is printed would be a constant
    wanted = f"{name} must hold the graph of each {rows}, integers [{'N' if is_open else num_nodes}] from 0"
    if not isinstance(batch, Tensor):
        raise InputTypeError(f"{wanted}; got {type(batch).__name__}.")
    if batch.dtype not in INTEGER_DTYPES or batch.dim() != 1 or batch.size(0) != num_nodes:
        raise InputError(f"{wanted}; got {list(batch.shape)} of {batch.dtype}.")
    if not is_open and batch.numel() and int(batch.min()) < 0:
        raise InputError(f"{wanted}; got {int(batch.min())}.")
    return batch.long() if device is None else batch.long().to(device)


def runs(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Whose it is, and the place, for each place of runs of consecutive places, which lie end to end.

    Args:
        starts: The first place of each run, `[N]`.
        lengths: The number of places of each run, `[N]`.
    """
    owner = torch.arange(lengths.numel(), device=lengths.device).repeat_interleave(lengths)
    offsets = starts - (lengths.cumsum(0) - lengths)
    return owner, offsets[owner] + torch.arange(owner.numel(), device=lengths.device)


def _listed(edge_index: Any, num_nodes: int | None) -> SparseGraph:
    """The edges of a graph in any form, with known sizes."""
    num_nodes = None if num_nodes is None else checked_size("num_nodes", num_nodes)
    return _sized(as_graph(edge_index).listed(), num_nodes, num_nodes, "num_nodes")


def _sized(graph: SparseGraph, num_sources: int | None, num_targets: int | None, name: str) -> SparseGraph:
    """The graph with these sizes, or with those that its largest index implies if nobody knows better."""
    for what, known, size in (("sources", graph.num_sources, num_sources), ("targets", graph.num_targets, num_targets)):
        may_grow = isinstance(graph.adjacency, EdgeIndex) and (size or 0) > (known or 0)
        if known is not None and size is not None and known != size and not may_grow:
            raise InputError(f"the graph has {known} {what}, but {size} according to {name}: the numbers must agree.")
    graph = graph.with_sizes(num_sources, num_targets)
    if graph.num_sources is None or graph.num_targets is None:
        size = _guessed_size(graph)
        num_sources, num_targets = (size if x is None else x for x in (graph.num_sources, graph.num_targets))
        graph = graph.with_sizes(num_sources, num_targets)
    return graph


def _guessed_size(graph: Graph) -> int:
    """One more than the largest index, or the larger size that a graph has."""
    if isinstance(graph, SparseGraph) and (graph.num_sources is None or graph.num_targets is None):
        return max(int(maybe_num_nodes(graph.adjacency)), 0)  # negative ones are reported with the edges
    return max(graph.num_sources or 0, graph.num_targets or 0)


def _same_nodes(graph: SparseGraph) -> SparseGraph:
    """The graph, if its sources and targets are the same nodes."""
    if graph.num_sources != graph.num_targets:
        raise InputError(
            f"sources and targets must be the same nodes; this graph has {graph.num_sources} sources and "
            f"{graph.num_targets} targets."
        )
    return graph


def _common(what: str, sizes: Sequence[int | None], given: int | None) -> int | None:
    """The number of nodes on which all graphs agree that know it."""
    known = {int(size) for size in (*sizes, given) if size is not None}
    if len(known) > 1:
        numbers = " and ".join(str(size) for size in sorted(known))
        raise InputError(f"all graphs must be over the same nodes; they have {numbers} {what}.")
    return known.pop() if known else None
