"""Transforms that add the structure of graphs as features.

Dimensions: n nodes of a graph, N nodes of all graphs of a batch, B graphs, K steps of a walk, k eigenvectors.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from scipy.sparse.csgraph import connected_components, dijkstra
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.data.hypergraph_data import HyperGraphData
from torch_geometric.transforms import BaseTransform
from torch_geometric.utils import remove_self_loops, scatter, to_scipy_sparse_matrix

from gattn.errors import InputError, InputTypeError, check_at_least, check_flag
from gattn.graphs import CompleteGraph, SparseGraph
from gattn.graphs.edge_lists import plain
from gattn.structure import graph_numbers, laplacian_eigenvectors, threads_for

__all__ = ["PAIRS", "Degrees", "LaplacianEigenvectors", "RandomWalkPairs", "ShortestPathBuckets"]

#: SciPy returns distances as 64-bit floats, at most this many at a time.
_AT_ONCE = 2**22
#: Entries whose magnitudes differ by less than this fraction count as equal, whatever their last bits are.
_TIE = 1e-3

#: What the transforms add for each pair of nodes.
PAIRS = ("pair_buckets", "pair_paths", "pair_index", "pair_walks")

_Level = Literal["node", "pair", "graph"]


class _Graphs(NamedTuple):
    """The graphs of a `Data` or of a batch, on the CPU: all their edges `[2, E]`, and the number of nodes of each."""

    edge_index: Tensor
    sizes: list[int]

    def numbers(self) -> Tensor:
        """The graph of each node, `[N]`."""
        sizes = torch.tensor(self.sizes, dtype=torch.int64, device="cpu")
        return torch.arange(len(sizes), device="cpu").repeat_interleave(sizes)

    def each(self) -> Iterator[tuple[Tensor, int]]:
        """The edges of each graph, between numbers that begin at 0, and its number of nodes."""
        graph = self.numbers()[self.edge_index[0]]
        edges = self.edge_index[:, graph.argsort(stable=True)]
        counts, start = graph.bincount(minlength=len(self.sizes)).tolist(), 0
        for part, size in zip(torch.split(edges, counts, 1), self.sizes, strict=True):
            yield part - start, size
            start += size

    def rows(self, level: _Level) -> list[int]:
        """How many rows each graph has in an attribute of this level."""
        return [{"node": size, "pair": size**2, "graph": 1}[level] for size in self.sizes]


class _Structure(BaseTransform):
    """Adds attributes that follow from the edges of each graph."""

    @abstractmethod
    def _attributes(self, graphs: _Graphs) -> dict[str, tuple[_Level, Tensor]]:
        """The attributes by name, with what their rows belong to."""

    def forward(self, data: Data) -> Data:
        """Adds the attributes in place; calling the transform adds them to a shallow copy."""
        graphs = _graphs(data, type(self).__name__)
        device = data.edge_index.device
        with torch.device("cpu"), threads_for(max(graphs.sizes, default=0)):
            attributes = self._attributes(graphs)
        for name, (level, value) in attributes.items():
            data[name] = value.to(device)
            if isinstance(data, Batch) and hasattr(data, "_slice_dict"):  # or the batch could not be taken apart again
                sizes = [0, *graphs.sizes[:-1]], [0, *graphs.rows(level)]
                starts, slices = (torch.tensor(part, device="cpu").cumsum(0) for part in sizes)
                data._slice_dict = {**data._slice_dict, name: slices}
                data._inc_dict = {**data._inc_dict, name: starts if "index" in name else None}
        return data


class ShortestPathBuckets(_Structure):
    r"""Adds the length of the shortest path between every two nodes, in buckets, from which Graphormer learns a bias.

    It is the spatial encoding of `Do Transformers Really Perform Bad for Graph Representation?
    <https://arxiv.org/abs/2106.05234>`_. With the number of edges :math:`d_{ij}` on the shortest path from the source j
    to the target i,

    .. math::
        b_{ij} = \begin{cases}
            d_{ij} & \text{if } d_{ij} \le \text{cutoff (0 is the node itself)} \\
            \text{cutoff} + 1 & \text{if there is a longer path} \\
            \text{cutoff} + 2 & \text{if there is no path}
        \end{cases}

    The data get `pair_buckets`, `[n * n]`, flat so that graphs of different sizes can be batched. `matrices` makes
    matrices of it, with targets as rows and sources as columns, which `gattn.BucketBias` takes. The attribute
    `num_buckets` of the transform, `cutoff + 3`, is the number of rows of the table of biases. Self-loops and repeated
    edges change nothing.

    Args:
        cutoff: The largest length with a bucket of its own.
        directed: Whether paths follow the direction of edges. With `False`, each edge leads both ways, which makes no
            difference to an undirected graph. (default: `True`)
        paths: Whether to add the edges along one of the shortest paths as well, from which `gattn.nn.PathEncoder` makes
            a bias. All paths are then followed to their end, however long they are. (default: `False`)

    Shapes:
        - **pair_paths:** `[n * n, cutoff]`, `torch.int32`: the numbers of the graph's own edges, from the target on,
          and -1 beyond the end of the path; of longer paths, the `cutoff` edges closest to the target.
        - **pair_buckets:** `[n * n]`, `torch.uint8` if the buckets fit, which they do for cut-offs up to 253, and
          otherwise `torch.int16`. As PyTorch takes an index of type `torch.uint8` for a mask, convert it first.

    Raises:
        TypeError: If an option has the wrong type, or, when called, if the data are not a `Data`.
        ValueError: If `cutoff` is not between 1 and 32765, or, when called, if the data have no `edge_index`, are a
            hypergraph, or have a `batch` that is unsorted or does not match the edges.
        IndexError: When called, if an edge holds a number that no node has.

    Example:
        >>> import torch, gattn
        >>> from torch_geometric.data import Data
        >>> path = Data(edge_index=torch.tensor([[0, 1, 2], [1, 2, 3]]), num_nodes=4)  # 0 → 1 → 2 → 3
        >>> transform = gattn.transforms.ShortestPathBuckets(cutoff=2)
        >>> transform.matrices(transform(path))[0]  # 3 is farther, 4 is unreachable
        tensor([[0, 4, 4, 4],
                [1, 0, 4, 4],
                [2, 1, 0, 4],
                [3, 2, 1, 0]], dtype=torch.uint8)
        >>> transform.num_buckets
        5
    """

    def __init__(self, cutoff: int, *, directed: bool = True, paths: bool = False):
        check_at_least(1, cutoff=cutoff)
        check_flag("directed", directed)
        check_flag("paths", paths)
        self.cutoff = int(cutoff)
        self.directed = bool(directed)
        self.paths = bool(paths)
        self.num_buckets = self.cutoff + 3
        if self.num_buckets > 2**15:
            raise InputError(f"cutoff must be at most {2**15 - 3}, so that buckets fit into 16 bits; got {cutoff}.")

    def _attributes(self, graphs: _Graphs) -> dict[str, tuple[_Level, Tensor]]:
        dtype = torch.uint8 if self.num_buckets <= 2**8 else torch.int16
        buckets, paths = [torch.zeros(0, dtype=dtype)], [torch.zeros(0, self.cutoff, dtype=torch.int32)]
        for edge_index, size in graphs.each():
            found = self._search(edge_index, size, dtype)
            buckets.append(found[0])
            paths.append(found[1])
        attributes: dict[str, tuple[_Level, Tensor]] = {"pair_buckets": ("pair", torch.cat(buckets))}
        if self.paths:
            attributes["pair_paths"] = ("pair", torch.cat(paths))
        return attributes

    def _search(self, edge_index: Tensor, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The buckets of one graph, `[n * n]`, and its paths, `[n * n, cutoff]`, if they are wanted."""
        buckets = torch.empty(size, size, dtype=dtype)
        paths = torch.full((size if self.paths else 0, size, self.cutoff), -1, dtype=torch.int32)
        if size == 0:  # SciPy refuses such matrices
            return buckets.flatten(), paths.flatten(0, 1)
        adjacency = to_scipy_sparse_matrix(edge_index.flip(0), num_nodes=size).tocsr()  # from targets back to sources
        num_parts, part = connected_components(adjacency, directed=False)
        # Where every path has a way back, components say what is reachable, and the search may stop at the cut-off.
        has_ways_back = not self.directed or connected_components(adjacency, connection="strong")[0] == num_parts
        limit = self.cutoff if has_ways_back and not self.paths else np.inf
        count = max(_AT_ONCE // size, 1)
        for first in range(0, size, count):
            rows = np.arange(first, min(first + count, size))
            options: dict[str, Any] = {"directed": self.directed, "indices": rows, "unweighted": True, "limit": limit}
            hops = dijkstra(adjacency, return_predecessors=self.paths, **options)
            if self.paths:
                hops, after = hops
                self._follow(paths[first : first + count], hops, after, edge_index)
            is_reachable = part[rows, None] == part if has_ways_back else np.isfinite(hops)
            beyond = np.where(is_reachable, self.cutoff + 1, self.cutoff + 2)
            buckets[first : first + count] = torch.from_numpy(np.where(hops <= self.cutoff, hops, beyond))
        return buckets.flatten(), paths.flatten(0, 1)

    def _follow(self, paths: Tensor, hops: Any, after: Any, edge_index: Tensor) -> None:
        """Writes the paths to some targets, `[targets, n, cutoff]`.

        Args:
            paths: Where they are written.
            hops: The lengths of the paths, `[targets, n]`, infinite where there is none.
            after: The node after each source on its path, `[targets, n]`.
            edge_index: The edges of the graph.
        """
        size = paths.size(1)
        keys = edge_index[0] * size + edge_index[1]
        if not self.directed:
            keys = torch.cat([keys, edge_index[1] * size + edge_index[0]])
        keys, numbers = keys.sort(stable=True)
        numbers %= edge_index.size(1)
        lengths = torch.from_numpy(np.where(np.isfinite(hops), hops, 0)).long()
        following = torch.from_numpy(after).long()
        for length in range(1, int(lengths.max()) + 1):
            target, source = (lengths == length).nonzero().unbind(1)
            step = following[target, source]
            paths[target, source] = paths[target, step]
            if length <= self.cutoff:
                edge = torch.searchsorted(keys, source * size + step)
                paths[target, source, length - 1] = numbers[edge].int()

    @staticmethod
    def matrices(data: Data) -> list[Tensor]:
        """The buckets of each graph as a matrix `[n, n]`, with targets as rows and sources as columns.

        They share the memory of `pair_buckets`.

        Args:
            data: What the transform returned, or a batch of it.

        Raises:
            TypeError: If it is not a `Data`.
            ValueError: If it has no `pair_buckets`, or its nodes have changed since.
        """
        _check_data(data, "ShortestPathBuckets.matrices")
        buckets = data.get("pair_buckets")
        if buckets is None:
            raise InputError("these data have no pair_buckets: apply ShortestPathBuckets to them first.")
        sizes = _sizes(data)
        if buckets.numel() != sum(size**2 for size in sizes):
            raise InputError(
                f"pair_buckets has {buckets.numel()} entries, but graphs of {sizes} nodes have "
                f"{sum(size**2 for size in sizes)} pairs: apply ShortestPathBuckets after all transforms that add or "
                "remove nodes."
            )
        parts = buckets.split([size**2 for size in sizes])
        return [part.view(size, size) for part, size in zip(parts, sizes, strict=True)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.cutoff}, directed={self.directed}{', paths=True' if self.paths else ''})"


class RandomWalkPairs(_Structure):
    r"""Adds the probabilities of random walks between every two nodes, the relative encoding of GRIT.

    In `Graph Inductive Biases in Transformers without Message Passing <https://arxiv.org/abs/2305.17589>`_, the pair of
    the target i and the source j has the features

    .. math::
        P_{ij} = [I, M, M^2, \ldots, M^{K-1}]_{ij}, \qquad M = D^{-1} A

    where :math:`A_{ij}` is the number of edges from i to j and D holds the out-degrees. A walk therefore *starts at the
    target* i, follows edges in their direction, and ends at the source j. For each target and step, the probabilities
    of all sources sum to one, or to less if walks end early at nodes without outgoing edges. An isolated node has a one
    for the pair with itself at step 0, and zeros everywhere else. Self-loops and repeated edges count; weights do not.

    The data get `pair_index`, the list of all pairs as edges from sources to targets, `pair_walks`, their features, and
    `node_walks`, the features of the pairs of a node with itself, which GRIT adds to the nodes.

    Args:
        num_steps: The number of features, K, one for each walk of 0, ..., K - 1 steps.

    Shapes:
        - **pair_index:** `[2, n * n]`, source above target, target by target.
        - **pair_walks:** `[n * n, K]`, `torch.float32`; computed in float64.
        - **node_walks:** `[n, K]`.

    Raises:
        TypeError: If `num_steps` is not an integer, or, when called, if the data are not a `Data`.
        ValueError: If `num_steps` is not positive, or, when called, if the data have no `edge_index`, are a hypergraph,
            or have a `batch` that is unsorted or does not match the edges.
        IndexError: When called, if an edge holds a number that no node has.

    Example:
        >>> import torch, gattn
        >>> from torch_geometric.data import Data
        >>> star = Data(edge_index=torch.tensor([[0, 0, 1, 2], [1, 2, 0, 0]]), num_nodes=3)
        >>> data = gattn.transforms.RandomWalkPairs(num_steps=3)(star)
        >>> data.pair_walks[:, 1].view(3, 3)  # one step from each target (row) to each source (column)
        tensor([[0.0000, 0.5000, 0.5000],
                [1.0000, 0.0000, 0.0000],
                [1.0000, 0.0000, 0.0000]])
        >>> data.node_walks[1]
        tensor([1.0000, 0.0000, 0.5000])
        >>> bool((data.pair_index == gattn.CompleteGraph(3).edge_index).all())
        True
    """

    def __init__(self, num_steps: int):
        check_at_least(1, num_steps=num_steps)
        self.num_steps = int(num_steps)

    def _attributes(self, graphs: _Graphs) -> dict[str, tuple[_Level, Tensor]]:
        walks = [torch.zeros(0, 0, self.num_steps)]
        walks += [self._walks(edge_index, size) for edge_index, size in graphs.each()]
        return {
            "pair_index": ("pair", CompleteGraph.packed(graphs.sizes).edge_index),
            "pair_walks": ("pair", torch.cat([part.flatten(0, 1) for part in walks])),
            "node_walks": ("node", torch.cat([part.diagonal().t() for part in walks])),
        }

    def _walks(self, edge_index: Tensor, size: int) -> Tensor:
        """The features of one graph, `[n, n, K]`."""
        share = edge_index[0].bincount(minlength=size).double().reciprocal()[edge_index[0]]
        step = to_scipy_sparse_matrix(edge_index, share, num_nodes=size).tocsr()
        walks, power = torch.empty(size, size, self.num_steps), np.eye(size)
        for k in range(self.num_steps):
            walks[..., k] = torch.from_numpy(power)
            power = step @ power
        return walks

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_steps})"


class Degrees(_Structure):
    r"""Adds the number of edges that enter and leave each node, clamped, for Graphormer's centrality encoding.

    `Do Transformers Really Perform Bad for Graph Representation? <https://arxiv.org/abs/2106.05234>`_ adds a learnt
    vector for each degree to the features of a node:

    .. math::
        h_i = x_i + z^-_{\min(\deg^-(i), \, D)} + z^+_{\min(\deg^+(i), \, D)}

    The data get `in_degree`, the number of edges with the node as target, and `out_degree`, the number with the node as
    source; in an undirected graph they are the same. A self-loop counts once in each, and repeated edges all count. The
    attribute `num_degrees` of the transform, `max_degree + 1`, is the number of rows that each table of vectors needs.

    Args:
        max_degree: The largest degree that is told apart, D. Larger ones become D.

    Shapes:
        - **in_degree, out_degree:** `[n]`, `torch.int64`.

    Raises:
        TypeError: If `max_degree` is not an integer, or, when called, if the data are not a `Data`.
        ValueError: If `max_degree` is not positive, or, when called, if the data have no `edge_index`, are a
            hypergraph, or have a `batch` that is unsorted or does not match the edges.
        IndexError: When called, if an edge holds a number that no node has.

    Example:
        >>> import torch, gattn
        >>> from torch_geometric.data import Data
        >>> star = Data(edge_index=torch.tensor([[1, 2, 3, 0], [0, 0, 0, 1]]), num_nodes=4)
        >>> data = gattn.transforms.Degrees(max_degree=2)(star)
        >>> data.in_degree, data.out_degree
        (tensor([2, 1, 0, 0]), tensor([1, 1, 1, 1]))
    """

    def __init__(self, max_degree: int):
        check_at_least(1, max_degree=max_degree)
        self.max_degree = int(max_degree)
        self.num_degrees = self.max_degree + 1

    def _attributes(self, graphs: _Graphs) -> dict[str, tuple[_Level, Tensor]]:
        source, target = graphs.edge_index
        return {
            name: ("node", ends.bincount(minlength=sum(graphs.sizes)).clamp(max=self.max_degree))
            for name, ends in (("in_degree", target), ("out_degree", source))
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.max_degree})"


class LaplacianEigenvectors(_Structure):
    r"""Adds the first non-trivial eigenvectors of each graph's normalised Laplacian, with well-defined signs.

    They are the positions of `A Generalization of Transformer Networks to Graphs <https://arxiv.org/abs/2012.09699>`_;
    with their eigenvalues, SAN (`Rethinking Graph Transformers with Spectral Attention
    <https://arxiv.org/abs/2106.03893>`_) and GPS (https://arxiv.org/abs/2205.12454) learn positions from them:

    .. math::
        L = I - D^{-1/2} A D^{-1/2}, \qquad L u_m = \lambda_m u_m, \qquad 0 \le \lambda_0 \le \lambda_1 \le \ldots

    The data get `eigenvectors`, :math:`u_1` to :math:`u_k`, which have length one. A graph of n nodes has n - 1 of
    them; if these are fewer than k, the remaining columns are zeros. Edges count in both directions, self-loops do not
    count, and repeated edges weigh more. A graph that is not connected has several eigenvalues of zero, whose vectors
    tell its components apart; each isolated node contributes an eigenvalue of one.

    If u is an eigenvector, so is -u. With `sign="largest"`, the entry with the largest magnitude is positive. If the
    magnitudes of several entries are within a thousandth of the largest, the first of these nodes decides, so the sign
    then depends on the numbering of nodes. With `sign="random"`, each sign is drawn from PyTorch's global generator
    when the transform is called. (`GraphPositionalEncoding` flips the signs of stored eigenvectors at random in each
    training step.) Where several eigenvectors have the same eigenvalue, signs are not enough: any rotation of them is
    as good, and the transform returns the one that the solver finds.

    Graphs of up to 300 nodes are solved as dense matrices in float64, and larger ones by PyG's transform in float32,
    which cannot separate eigenvalues that are closer than its rounding errors. To transform a whole data set faster, do
    it as one batch: `transform(Batch.from_data_list(graphs)).to_data_list()`.

    Args:
        k: The number of eigenvectors.
        sign: `"largest"` or `"random"`. (default: `"largest"`)
        eigenvalues: Whether to add `eigenvalues`, too. (default: `False`)

    Shapes:
        - **eigenvectors:** `[n, k]`, `torch.float32`.
        - **eigenvalues:** `[1, k]`, so `[B, k]` in a batch, with zeros where there are no eigenvectors.

    Raises:
        TypeError: If an option has the wrong type, or, when called, if the data are not a `Data`.
        ValueError: If `k` is not positive or `sign` is unknown, or, when called, if the data have no `edge_index`, are
            a hypergraph, or have a `batch` that is unsorted or does not match the edges.
        IndexError: When called, if an edge holds a number that no node has.

    Example:
        >>> import torch, gattn
        >>> from torch_geometric.data import Data
        >>> path = Data(edge_index=torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), num_nodes=3)
        >>> data = gattn.transforms.LaplacianEigenvectors(k=3, eigenvalues=True)(path)
        >>> data.eigenvectors[0]
        tensor([ 0.7071, -0.5000,  0.0000])
        >>> data.eigenvalues
        tensor([[1., 2., 0.]])
    """

    def __init__(self, k: int, *, sign: str = "largest", eigenvalues: bool = False):
        check_at_least(1, k=k)
        if sign not in ("largest", "random"):
            raise InputError(f"sign must be 'largest' or 'random'; got {sign!r}.")
        check_flag("eigenvalues", eigenvalues)
        self.k = int(k)
        self.sign = sign
        self.eigenvalues = bool(eigenvalues)

    def _attributes(self, graphs: _Graphs) -> dict[str, tuple[_Level, Tensor]]:
        edge_index = remove_self_loops(graphs.edge_index)[0]
        edge_index = torch.cat([edge_index, edge_index.flip(0)], 1)
        graph, num_graphs = graphs.numbers(), len(graphs.sizes)
        vectors = laplacian_eigenvectors(edge_index, graph, self.k, random_signs=self.sign == "random")
        if self.sign == "largest":
            vectors = _with_largest_positive(vectors, graph, num_graphs)
        attributes: dict[str, tuple[_Level, Tensor]] = {"eigenvectors": ("node", vectors)}
        if self.eigenvalues:
            attributes["eigenvalues"] = "graph", _eigenvalues(vectors, edge_index, graph, num_graphs)
        return attributes

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.k}, sign={self.sign!r}, eigenvalues={self.eigenvalues})"


def _with_largest_positive(vectors: Tensor, graph: Tensor, num_graphs: int) -> Tensor:
    """The vectors `[N, k]` of graphs with signs such that the entry of the largest magnitude is positive."""
    if len(vectors) == 0:
        return vectors
    magnitudes = vectors.abs()
    largest = scatter(magnitudes, graph, 0, num_graphs, reduce="max")[graph]
    nodes = torch.arange(len(vectors)).unsqueeze(1)
    nodes = torch.where(magnitudes >= (1 - _TIE) * largest, nodes, len(vectors))
    first = scatter(nodes, graph, 0, num_graphs, reduce="min")
    is_negative = vectors.gather(0, first) < 0
    return torch.where(is_negative[graph], -vectors, vectors)


def _eigenvalues(vectors: Tensor, edge_index: Tensor, graph: Tensor, num_graphs: int) -> Tensor:
    """The Rayleigh quotients of the vectors `[N, k]` of graphs, `[B, k]`, and zeros for vectors of zeros."""
    row, col = edge_index
    degree = row.bincount(minlength=len(vectors)).double()
    scale = torch.where(degree > 0, degree.rsqrt(), 0.0).unsqueeze(1)
    vectors = vectors.double()
    product = vectors - scale * scatter((scale * vectors)[col], row, 0, len(vectors))
    products, squares = (scatter(vectors * other, graph, 0, num_graphs) for other in (product, vectors))
    return torch.where(squares > 0, products / squares, 0.0).float()


def _graphs(data: Any, name: str) -> _Graphs:
    """The graphs of data after all checks."""
    _check_data(data, name)
    if data.edge_index is None:
        raise InputError(
            f"{name} needs edge_index; these data have {', '.join(data.keys()) or 'nothing'}. A graph without edges "
            "has an empty one, [2, 0], and ToSparseTensor comes afterwards."
        )
    num_nodes = data.num_nodes
    edges = SparseGraph(data.edge_index).with_sizes(num_nodes, num_nodes).edges().edge_index
    graphs = _Graphs(plain(edges).cpu().long(), _sizes(data))
    graph_numbers(graphs.edge_index, num_nodes, graphs.numbers())
    return graphs


def _check_data(data: Any, name: str) -> None:
    """Raises an error for what is no graph of one type, or a batch of them."""
    if not isinstance(data, Data):
        raise InputTypeError(
            f"{name} takes a Data or a batch of them; got {type(data).__name__}. Make a HeteroData one graph by "
            "to_homogeneous()."
        )
    if isinstance(data, HyperGraphData):
        raise InputError(f"{name} takes graphs, but the second row of a hypergraph's edge_index has no nodes.")


def _sizes(data: Data) -> list[int]:
    """The number of nodes of each graph."""
    batch = data.get("batch")
    if batch is None:
        return [data.num_nodes]
    graph_numbers(batch.new_zeros(2, 0), data.num_nodes, batch)
    if bool((batch.diff() < 0).any()):
        raise InputError("batch must be sorted, so that the nodes of each graph are side by side: sort the nodes.")
    num_graphs = data.num_graphs if isinstance(data, Batch) else 0  # the last ones may have no nodes
    sizes: list[int] = batch.bincount(minlength=num_graphs).tolist()
    return sizes
