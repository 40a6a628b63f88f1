"""A graph given by its edges, in any of PyG's forms."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.typing import SparseTensor, torch_sparse
from torch_geometric.utils import (
    add_self_loops,
    is_sparse,
    is_torch_sparse_tensor,
    remove_self_loops,
    scatter,
    to_edge_index,
    to_torch_csr_tensor,
)

from gattn.errors import InputError, InputTypeError, check_flag
from gattn.graphs.base import FLOWS, EdgeList, Graph, checked_size
from gattn.graphs.edge_lists import (
    INTEGER_DTYPES,
    add_loops,
    check_range,
    checked,
    joining,
    looped,
    plain,
)

__all__ = ["Edges", "SparseGraph", "as_graph"]


class Edges(NamedTuple):
    """The edges of a graph, checked and ready to compute with."""

    adjacency: Any
    """The graph in the form in which it was given, including self-loops."""
    edge_index: Tensor
    """`[2, E]`, a plain int64 tensor, with its rows in the order in which the graph was given."""
    num_sources: int
    num_targets: int


class SparseGraph(Graph):
    r"""A graph given by its edges.

    To use a graph repeatedly, keep one of these, or pass the same `edge_index` tensor: what is derived from it (checks,
    self-loops, the kernels' layout) is cached per tensor, by identity and version. In-place edits are noticed, except
    those through `.data` or `.numpy()`. What is derived from a sparse adjacency is kept by the `SparseGraph` that holds
    it, which does not notice edits.

    Args:
        edge_index: `[2, E]`, sources above targets (for `flow="source_to_target"`): an integer tensor or a PyG
            `EdgeIndex`. Or a sparse adjacency of shape `[N, M]`, whose rows are targets (PyG's `adj_t`): a
            `torch.sparse` CSR, CSC or COO tensor, or a `torch_sparse.SparseTensor`.
        num_targets: N; taken from the features or the adjacency if it is not given. (default: `None`)
        num_sources: M; likewise. (default: `None`)
        self_loops: Whether to do what PyG's layers call `add_self_loops`: remove existing self-loops, then add one to
            each of the first min(N, M) nodes. (default: `False`)
        flow: `"source_to_target"`, or `"target_to_source"` if the first row of `edge_index` holds the targets. It
            describes the graph, and takes precedence over the `flow` of a layer. (default: `"source_to_target"`)

    Raises:
        TypeError: If `edge_index` has none of the forms above, or `self_loops` is neither true nor false.
        ValueError: If its shape or dtype is wrong, the sizes contradict it, or a sparse adjacency comes with
            `flow="target_to_source"`.
        IndexError: On first use, if an index is negative or too large (in compiled code when it runs, and as
            RuntimeError outside the kernels).

    Example:
        >>> import torch, gattn
        >>> graph = gattn.SparseGraph(torch.tensor([[0, 1], [1, 2]]), num_targets=3, num_sources=3, self_loops=True)
        >>> graph.edge_index
        tensor([[0, 1, 0, 1, 2],
                [1, 2, 0, 1, 2]])
    """

    _attributes: ClassVar[tuple[str, ...]] = (
        "adjacency",
        "num_targets",
        "num_sources",
        "self_loops",
        "flow",
        "_loops_as_pyg",
        "kept",
        "edge_ids",
        "has_own_loops",
    )
    _sparse_edges: tuple[Any, Tensor] | None = None
    _looped: SparseGraph | None = None

    def __init__(
        self,
        edge_index: Any,
        num_targets: int | None = None,
        num_sources: int | None = None,
        *,
        self_loops: bool = False,
        flow: str = "source_to_target",
    ):
        if flow not in FLOWS:
            raise ValueError(f"flow must be 'source_to_target' or 'target_to_source'; got {flow!r}.")
        _check_form(edge_index)
        if self_loops is not True and self_loops is not False:
            check_flag("self_loops", self_loops)
        num_targets = None if num_targets is None else checked_size("num_targets", num_targets)
        num_sources = None if num_sources is None else checked_size("num_sources", num_sources)
        if is_sparse(edge_index):
            if flow != FLOWS[0]:
                raise ValueError(
                    "flow='target_to_source' cannot be combined with a sparse adjacency, whose rows are always the "
                    "targets: pass its transpose and leave flow at its default."
                )
            rows, columns = edge_index.size(0), edge_index.size(1)
            num_sources = _agree("sources", num_sources, columns, "the adjacency's second dimension")
            num_targets = _agree("targets", num_targets, rows, "the adjacency's first dimension")
        elif isinstance(edge_index, EdgeIndex):
            first, second = edge_index.sparse_size()
            if flow != FLOWS[0]:
                first, second = second, first
            # PyG infers sizes from the largest index, so the true number of nodes may be larger, but not smaller.
            num_sources = first if num_sources is None else num_sources
            num_targets = second if num_targets is None else num_targets
        self.adjacency = edge_index.clone() if _is_unsavable(edge_index) else edge_index
        self.num_sources = num_sources
        self.num_targets = num_targets
        self.self_loops = self_loops
        self.flow = flow
        # PyG's layers aggregate the features of self-loops by the second row of edge_index, whatever their flow.
        self._loops_as_pyg = False

    @property
    def edge_index(self) -> Tensor:
        """All edges, `[2, E]`, including self-loops, in the order of attention weights."""
        return self.edges().edge_index

    @property
    def values(self) -> Tensor | None:
        """See `Graph.values`."""
        return _sparse_values(self.edges().adjacency)

    def listed(self, device: torch.device | None = None) -> SparseGraph:
        """The graph itself."""
        return self

    def with_self_loops(self) -> SparseGraph:
        """The same graph with `self_loops=True`.

        Raises:
            ValueError: If its targets were chosen from a graph without self-loops.
        """
        if self.has_own_loops is False:
            raise InputError("add self-loops before choosing targets: graph.with_self_loops().for_targets(index).")
        if self.self_loops or self.has_own_loops:
            return self
        if self._looped is None:
            self._looped = self._changed(self_loops=True)
        return self._looped

    def with_sizes(self, num_sources: int | None, num_targets: int | None) -> SparseGraph:
        """The same graph, with the sizes that the features have.

        Raises:
            ValueError: If the graph's own sizes differ.
        """
        known_sources, known_targets = self.num_sources, self.num_targets
        if isinstance(self.adjacency, EdgeIndex):
            known_sources = None if (num_sources or 0) > (known_sources or 0) else known_sources
            known_targets = None if (num_targets or 0) > (known_targets or 0) else known_targets
        num_sources = _agree("sources", known_sources, num_sources, "the features")
        num_targets = _agree("targets", known_targets, num_targets, "the features")
        if num_sources == self.num_sources and num_targets == self.num_targets:
            return self
        return self._changed(num_sources=num_sources, num_targets=num_targets)

    def resolve(
        self,
        num_sources: int,
        num_targets: int | None,
        batch: torch.Size | None = None,
        device: torch.device | None = None,
    ) -> SparseGraph:
        """See `Graph.resolve`; targets without features are as many as the graph says, or else as the sources."""
        if num_targets is None:
            num_targets = num_sources if self.num_targets is None else self.num_targets
        graph = self.with_sizes(num_sources, num_targets)
        if device is not None:
            own = self.adjacency.device() if isinstance(self.adjacency, SparseTensor) else self.adjacency.device
            if own != device:
                raise InputError(f"the graph is on {own}, the features are on {device}: move one of them.")
        return graph

    def to(self, device: torch.device | str) -> SparseGraph:
        """The same graph on another device."""
        adjacency = self.adjacency
        if isinstance(adjacency, EdgeIndex) and not adjacency.size(1):
            adjacency = plain(adjacency)  # PyG leaves an EdgeIndex without edges where it is
        edge_ids = None if self.edge_ids is None else self.edge_ids.to(device)
        return self._changed(adjacency=adjacency.to(device), edge_ids=edge_ids)

    def edge_list(self, device: torch.device, *, raw: bool = False) -> EdgeList:
        """See `Graph.edge_list`."""
        num_sources, num_targets = self._known_sizes()
        if raw and not is_sparse(self.adjacency):
            return EdgeList(plain(self.adjacency), num_sources, num_targets, self.self_loops, self.flow)
        return EdgeList(self.edges().edge_index, num_sources, num_targets, flow=self.flow)

    def edges(self) -> Edges:
        """Checks the indices and adds the self-loops, unless that was done before.

        Raises:
            ValueError: If the number of sources or targets is not known yet.
            IndexError: If an index is negative or too large.
        """
        num_sources, num_targets = self._known_sizes()
        if is_sparse(self.adjacency):
            if self._sparse_edges is None:
                adjacency = _loop_sparse(self.adjacency) if self.self_loops else self.adjacency
                self._sparse_edges = adjacency, _sparse_index(adjacency)
                check_range(self._sparse_edges[1], num_sources, num_targets, FLOWS[0])
            return Edges(*self._sparse_edges, num_sources, num_targets)
        derive = looped if self.self_loops else checked
        edge_index = derive(self.adjacency, num_sources, num_targets, self.flow)
        return Edges(edge_index, plain(edge_index).long(), num_sources, num_targets)

    def with_features(
        self, features: Tensor | None, fill_value: float | Tensor | str = "mean", hides: bool = False
    ) -> tuple[SparseGraph, Tensor | None]:
        """The graph with its self-loops among its edges, and the features of all of these edges.

        Args:
            features: `[E, ...]`, one row per edge as given. `None` takes a sparse adjacency's own values if they are
                vectors (single values are edge weights, which attention does not use).
            fill_value: Features of the new self-loops: a number, a tensor, or how to aggregate the features of the
                edges that point to the node (`"add"`, `"mean"`, `"min"`, `"max"`, `"mul"`). A layer with
                `flow="target_to_source"` that is called with a bare `edge_index` aggregates those of the edges that
                leave the node, as PyG does. (default: `"mean"`)
            hides: Whether the graph of a compiled program may have existing self-loops among its edges, which do not
                count: see `kept`. Their number is unknown there, and the program is one graph without it.
                (default: `False`)

        Returns:
            A graph with the same edges as `edges()`, in the same order, and features `[E, ...]`, or `None` where there
            are none.

        Raises:
            ValueError: If there is not one row of features per edge.
            NotImplementedError: If self-loops are to be added to a `SparseTensor` with features, or features are given
                besides a sparse adjacency.
        """
        remedy = "pass edge_index and edge_attr, or add the self-loops yourself and set add_self_loops=False."
        if features is None:
            features = _sparse_features(self.adjacency)
            if self.self_loops and isinstance(self.adjacency, SparseTensor) and self.adjacency.has_value():
                raise NotImplementedError(f"self-loops cannot be added to a SparseTensor with edge features: {remedy}")
            if features is None or not self.self_loops:
                return self, features
            return self, _sparse_features(_loop_sparse(self.adjacency, fill_value))
        num_edges = self.adjacency.nnz() if isinstance(self.adjacency, SparseTensor) else None
        if isinstance(self.adjacency, Tensor):
            num_edges = self.adjacency._nnz() if is_sparse(self.adjacency) else self.adjacency.size(1)
        if features.size(0) != num_edges:
            raise InputError(f"edge_attr needs one row per edge; got {features.size(0)} rows for {num_edges} edges.")
        if not self.self_loops:
            return self, features
        if is_sparse(self.adjacency):
            raise NotImplementedError(
                f"self-loops cannot be added to a sparse adjacency whose edge features are given separately: {remedy}"
            )
        num_sources, num_targets = self._known_sizes()
        num_loops = min(num_sources, num_targets)
        row = 1 if self.flow == FLOWS[0] or self._loops_as_pyg else 0
        if not isinstance(fill_value, (str, Tensor)):
            fill_value = features.new_full((num_loops, *features.shape[1:]), fill_value)
        if torch.compiler.is_compiling():  # which only knows that there are as many if both are made together
            checked(self.adjacency, num_sources, num_targets, self.flow)  # features are aggregated by these indices
            if isinstance(fill_value, str):
                index, count = plain(self.adjacency).long(), max(num_sources, num_targets)
                # Existing self-loops go to a row of their own: a selection of the other edges would have a size that
                # nothing else is known to have.
                ends = index[row].where(index[0] != index[1], count)
                fill_value = scatter(features, ends, 0, count + 1, fill_value)[:num_loops]
            if hides:
                return self._with_hidden_loops(num_loops), torch.cat([features, _rows(fill_value, features, num_loops)])
            edge_index, features = add_loops(self.adjacency, num_loops, features, fill_value)
            return self._changed(adjacency=edge_index, self_loops=False), features
        edges = joining(self.adjacency, num_sources, num_targets, self.flow)
        if isinstance(fill_value, Tensor) and fill_value.shape != (num_loops, *features.shape[1:]):
            return self, add_loops(self.adjacency, num_loops, features, fill_value)[1]
        if edges.places is not None:
            features = features.index_select(0, edges.places)
        if isinstance(fill_value, str):
            ends, degrees = plain(self.adjacency) if edges.ends is None else edges.ends, edges.degrees[row]
            is_mean = fill_value == "mean"
            loops = scatter(features, ends[row].long(), 0, degrees.size(0), "sum" if is_mean else fill_value)
            if is_mean:
                loops = loops / degrees.to(loops.dtype).view(-1, *[1] * (loops.dim() - 1))
            fill_value = loops if num_sources == num_targets else loops[:num_loops]
        assert isinstance(fill_value, Tensor)
        return self, torch.cat([features, fill_value])  # as above, without copying edges

    def with_listed_loops(self) -> SparseGraph:
        """The graph with its self-loops among its edges; in a compiled program, some of these may be hidden.

        Those are the self-loops that were there before: see `kept`.
        """
        num_sources, num_targets = self._known_sizes()
        if not self.self_loops:
            return self
        if torch.compiler.is_compiling() and not is_sparse(self.adjacency):
            checked(self.adjacency, num_sources, num_targets, self.flow)
            return self._with_hidden_loops(min(num_sources, num_targets))
        return SparseGraph(self.edge_index, num_targets, num_sources, flow=self.flow)

    def _with_hidden_loops(self, num_loops: int) -> SparseGraph:
        """All edges, and after them a self-loop of each node, for which those that were there do not count."""
        index = plain(self.adjacency)
        loops = torch.arange(num_loops, dtype=index.dtype, device=index.device)
        kept = torch.cat([index[0] != index[1], torch.ones_like(loops, dtype=torch.bool)])
        return self._changed(adjacency=torch.cat([index, loops.expand(2, -1)], 1), self_loops=False, kept=kept)

    def _known_sizes(self) -> tuple[int, int]:
        if self.num_sources is None or self.num_targets is None:
            raise ValueError(
                "the number of nodes of this graph is not known: make the SparseGraph with num_sources and num_targets."
            )
        return self.num_sources, self.num_targets

    def with_weights(self, weights: Tensor, *, as_values: bool = True) -> Any:
        """Attention weights together with the edges that they belong to, as PyG's layers return them.

        Args:
            weights: `[E, H]`, in the order of `edges()`.
            as_values: Whether they become the values of a `torch.sparse` adjacency. (default: `True`)

        Returns:
            `(edge_index, weights)`; for a `torch.sparse` adjacency `(adjacency with the weights as values, weights)`;
            for a `SparseTensor` the `SparseTensor` that holds them.

        Raises:
            ValueError: If the weights of a batch, `[B, E, H]`, were to become values of one sparse matrix.
        """
        adjacency = self.edges().adjacency
        if weights.dim() > 2 and is_sparse(adjacency) and (as_values or isinstance(adjacency, SparseTensor)):
            raise ValueError(
                f"the weights of a batch, {list(weights.shape)}, cannot be the values of one sparse matrix: pass an "
                "edge_index instead of a sparse adjacency to get weights [B, E, H]."
            )
        if isinstance(adjacency, SparseTensor):
            return adjacency.set_value(weights, layout="coo")
        if as_values and is_torch_sparse_tensor(adjacency):
            return _with_values(adjacency, weights), weights
        return adjacency, weights

    def from_pairs(self, pairs: Tensor, heads: int) -> Tensor:
        """See `Graph.from_pairs`: returns the entries that belong to edges, `[..., E, H]`."""
        source, target = self.sources_and_targets()
        num_sources, num_targets = self._known_sizes()
        return pairs.expand(*pairs.shape[:-3], heads, num_targets, num_sources)[..., target, source].transpose(-1, -2)

    def distances(self, device: torch.device) -> Tensor:
        """See `Graph.distances`: `[E]`; the last target has the position of the last source."""
        source, target = self.sources_and_targets()
        num_sources, num_targets = self._known_sizes()
        return source - target - (num_sources - num_targets)

    def __repr__(self) -> str:
        sizes = f"num_sources={self.num_sources}, num_targets={self.num_targets}"
        loops = ", self_loops=True" if self.self_loops else ""
        flow = f", flow={self.flow!r}" if self.flow != FLOWS[0] else ""
        return f"SparseGraph({sizes}{loops}{flow})"


Graph._list = SparseGraph


def _check_form(edge_index: Any) -> None:
    if isinstance(edge_index, SparseTensor):
        return
    if isinstance(edge_index, Graph):
        raise InputTypeError(f"this is a graph already: {edge_index!r}. Use it as it is, or its with_self_loops().")
    if not isinstance(edge_index, Tensor):
        raise InputTypeError(
            "a graph must be an edge_index tensor of shape [2, E], an EdgeIndex, a torch.sparse adjacency, a "
            "SparseTensor, "
            f"a SparseGraph or a CompleteGraph; got {type(edge_index).__name__}."
        )
    if edge_index.layout != torch.strided:
        if not is_torch_sparse_tensor(edge_index) or edge_index.sparse_dim() != 2:
            raise InputError(
                f"a sparse adjacency must be one [N, M] matrix in CSR, CSC or COO layout; got {edge_index.layout} of "
                "shape "
                f"{list(edge_index.shape)}."
            )
        return
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        hint = (
            " (it looks transposed: pass edge_index.t())" if edge_index.dim() == 2 and edge_index.size(1) == 2 else ""
        )
        raise InputError(
            f"edge_index must have shape [2, E], sources above targets; got shape {list(edge_index.shape)}{hint}."
        )
    if edge_index.dtype not in INTEGER_DTYPES:
        raise InputError(
            f"edge_index holds node indices, so its dtype must be an integer type; got {edge_index.dtype}. "
            "Convert it with edge_index.long()."
        )


def _is_unsavable(adjacency: Any) -> bool:
    """Whether a graph was made in inference mode, so that autograd, which is on now, refuses to save it."""
    if torch.compiler.is_compiling() or not isinstance(adjacency, Tensor):
        return False
    return adjacency.is_inference() and not torch.is_inference_mode_enabled()


def _agree(what: str, known: int | None, given: int | None, where: str) -> int | None:
    if known is None or given is None:
        return given if known is None else known
    if known != given:
        raise ValueError(f"the graph has {known} {what}, but {given} according to {where}: the numbers must agree.")
    return known


def _loop_sparse(adjacency: Any, fill_value: float | Tensor | str = 1.0) -> Any:
    if isinstance(adjacency, SparseTensor):
        has_vectors = _sparse_features(adjacency) is not None  # to which set_diag() cannot add one
        return torch_sparse.set_diag(adjacency.set_value(None) if has_vectors else adjacency)
    if adjacency.layout == torch.sparse_csc:
        index, values = to_edge_index(adjacency)
        adjacency = to_torch_csr_tensor(index, values, tuple(adjacency.shape[:2]))
    adjacency, _ = remove_self_loops(adjacency)
    return add_self_loops(adjacency, fill_value=fill_value)[0]


def _sparse_index(adjacency: Any) -> Tensor:
    """The edge list of an adjacency whose rows are targets: sources above targets."""
    if isinstance(adjacency, SparseTensor):
        row, column, _ = adjacency.coo()
    else:
        (row, column), _ = to_edge_index(adjacency)
    return torch.stack([column, row]).long()


def _sparse_values(adjacency: Any) -> Tensor | None:
    values: Tensor | None = None
    if isinstance(adjacency, SparseTensor):
        values = adjacency.coo()[2]
    elif is_torch_sparse_tensor(adjacency):
        values = to_edge_index(adjacency)[1]
    return values


def _rows(fill_value: Any, features: Tensor, count: int) -> Tensor:
    """The features of so many self-loops, of which a tensor may hold those of one."""
    fill: Tensor = fill_value.to(features)
    return fill if fill.dim() == features.dim() and fill.size(0) == count else fill.expand(count, *features.shape[1:])


def _sparse_features(adjacency: Any) -> Tensor | None:
    values = _sparse_values(adjacency)
    return values if values is not None and values.dim() > 1 else None


def _with_values(adjacency: Tensor, values: Tensor) -> Tensor:
    """A `torch.sparse` adjacency with other values, whatever the shape of its own."""
    size = (*adjacency.shape[:2], *values.shape[1:])
    if adjacency.layout == torch.sparse_coo:
        return torch.sparse_coo_tensor(adjacency.coalesce().indices(), values, size, is_coalesced=True)
    if adjacency.layout == torch.sparse_csr:
        return torch.sparse_csr_tensor(adjacency.crow_indices(), adjacency.col_indices(), values, size)
    return torch.sparse_csc_tensor(adjacency.ccol_indices(), adjacency.row_indices(), values, size)


def as_graph(graph: Any, flow: str = FLOWS[0], *, sharded: bool = False) -> Graph:
    """Wraps a list of edges in any form; graphs are returned as they are.

    Args:
        graph: The graph as a user gives it: a `Graph`, an `edge_index` `[2, E]`, or a sparse adjacency `[N, M]`.
        flow: Which row of a list of edges holds the targets. (default: `"source_to_target"`)
        sharded: Whether the caller leaves the features at the ends of edges to `attend`, which fetches those that other
            processes hold. (default: `False`)

    Raises:
        TypeError: If `graph` has none of these forms.
        ValueError: If the graph is sharded and `sharded` is not set, or its shape or dtype is wrong.

    Example:
        >>> import torch, gattn
        >>> gattn.graphs.as_graph(torch.tensor([[0, 1], [1, 2]]))
        SparseGraph(num_sources=None, num_targets=None)
    """
    if isinstance(graph, SparseGraph) and _is_unsavable(graph.adjacency):
        return graph._changed(adjacency=graph.adjacency.clone())
    if isinstance(graph, Graph):
        if graph.is_sharded and not sharded:
            raise InputError(
                "sharded graphs are for gattn.attend and for layers that leave the features at both ends of an edge to "
                "it, such as GATConv, GATv2Conv, TransformerConv and MultiheadAttention; this layer does not."
            )
        return graph
    wrapped = SparseGraph(graph, flow=flow)
    wrapped._loops_as_pyg = True
    return wrapped
