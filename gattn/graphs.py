"""Who attends to whom: the graphs.

`SparseGraph` is an edge list in any of PyG's forms; `CompleteGraph` is symbolic, every target sees every source (or
every earlier one, or those within a window).
"""

from __future__ import annotations

from typing import Any, NamedTuple

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

from gattn.errors import InputError, InputTypeError
from gattn.ops.edge_lists import FLOWS, add_loops, check_range, checked, looped, plain

_INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Edges(NamedTuple):
    """The edges of a graph, checked and ready to compute with."""

    adjacency: Any
    """The graph in the form that it was given in, self-loops included."""
    edge_index: Tensor
    """`[2, E]`, a plain int64 tensor, rows in the order that the graph was given in."""
    num_sources: int
    num_targets: int


class SparseGraph:
    r"""A graph given by its edges.

    Hold one if you use a graph again and again, or pass the same `edge_index` tensor: what is derived from that (the
    index check, the self-loops) is cached per tensor, by identity and version. An in-place edit is noticed; one that
    goes through `.data` or `.numpy()` is not. What is derived from a sparse adjacency is kept by the `SparseGraph` that
    holds it, and no edit is noticed.

    Args:
        edge_index: `[2, E]`, sources above targets (for `flow="source_to_target"`): an integer tensor or a PyG
            `EdgeIndex`. Or a sparse adjacency of shape `[N, M]` (rows are targets, what PyG calls `adj_t`): a
            `torch.sparse` CSR, CSC or COO tensor, or a `torch_sparse.SparseTensor`.
        num_sources: M; taken from the features, or the adjacency, where it is not given. (default: `None`)
        num_targets: N; likewise. (default: `None`)
        self_loops: What PyG's layers call `add_self_loops`: existing loops out, then one for each of the first
            min(N, M) nodes. (default: `False`)
        flow: `"source_to_target"`, or `"target_to_source"` where the first row of `edge_index` holds the targets. It
            describes the graph, and holds in every layer, whatever the layer's own. (default: `"source_to_target"`)

    Raises:
        TypeError: If `edge_index` is none of the forms above.
        ValueError: If its shape or dtype is wrong, the sizes contradict it, or a sparse adjacency comes with
            `flow="target_to_source"`.
        IndexError: On first use, if an index is negative or too large (in compiled code, when the kernels run).

    Example:
        >>> import torch, gattn
        >>> graph = gattn.SparseGraph(torch.tensor([[0, 1], [1, 2]]), num_targets=3, num_sources=3, self_loops=True)
        >>> graph.edge_index
        tensor([[0, 1, 0, 1, 2],
                [1, 2, 0, 1, 2]])
    """

    def __init__(
        self,
        edge_index: Any,
        num_sources: int | None = None,
        num_targets: int | None = None,
        *,
        self_loops: bool = False,
        flow: str = "source_to_target",
    ):
        if flow not in FLOWS:
            raise ValueError(f"flow is 'source_to_target' or 'target_to_source', not {flow!r}.")
        _check_form(edge_index)
        if is_sparse(edge_index):
            if flow != FLOWS[0]:
                raise ValueError(
                    "flow='target_to_source' cannot be combined with a sparse adjacency, whose rows are the targets by "
                    "definition: pass its transpose and leave flow alone."
                )
            rows, columns = edge_index.size(0), edge_index.size(1)
            num_sources = _agree("sources", num_sources, columns, "the adjacency's second dimension")
            num_targets = _agree("targets", num_targets, rows, "the adjacency's first dimension")
        elif isinstance(edge_index, EdgeIndex):
            first, second = edge_index.sparse_size()
            if flow != FLOWS[0]:
                first, second = second, first
            # PyG infers sizes from the largest index, so there may be more nodes than it says, but not fewer.
            num_sources = first if num_sources is None else num_sources
            num_targets = second if num_targets is None else num_targets
        for what, count in (("sources", num_sources), ("targets", num_targets)):
            if count is not None and count < 0:
                raise ValueError(f"a graph has no negative number of nodes; got {count} {what}.")
        self.adjacency = edge_index.clone() if _is_unsavable(edge_index) else edge_index
        self.num_sources = num_sources
        self.num_targets = num_targets
        self.self_loops = self_loops
        self.flow = flow
        self._sparse_edges: tuple[Any, Tensor] | None = None
        self._looped: SparseGraph | None = None
        # PyG's layers aggregate the features of self-loops by the second row of edge_index, whatever their flow.
        self._loops_as_pyg = False

    @property
    def edge_index(self) -> Tensor:
        """All edges, `[2, E]`, self-loops included, in the order that attention weights have."""
        return self.edges().edge_index

    def sources_and_targets(self) -> tuple[Tensor, Tensor]:
        """The source and the target of each edge, `[E]` each, whichever row of `edge_index` holds them."""
        first, second = self.edge_index
        return (first, second) if self.flow == FLOWS[0] else (second, first)

    def with_self_loops(self) -> SparseGraph:
        """The same graph with `self_loops=True`."""
        if self.self_loops:
            return self
        if self._looped is None:
            self._looped = self._copy(self_loops=True)
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
        if (num_sources, num_targets) == (self.num_sources, self.num_targets):
            return self
        return self._copy(num_sources=num_sources, num_targets=num_targets)

    def to(self, device: torch.device | str) -> SparseGraph:
        """The same graph on another device."""
        return self._copy(edge_index=self.adjacency.to(device))

    def _copy(self, **changes: Any) -> SparseGraph:
        names = ("num_sources", "num_targets", "self_loops", "flow")
        graph = SparseGraph(
            **({"edge_index": self.adjacency} | {name: getattr(self, name) for name in names} | changes)
        )
        graph._loops_as_pyg = self._loops_as_pyg
        return graph

    def edges(self) -> Edges:
        """Checks the indices and adds the self-loops, or looks up that this was done.

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
        self, features: Tensor | None, fill_value: float | Tensor | str = "mean"
    ) -> tuple[SparseGraph, Tensor | None]:
        """The graph with its self-loops among its edges, and the features of all those edges.

        Args:
            features: `[E, ...]`, one row for each edge as given. `None` takes a sparse adjacency's own values, if they
                are vectors (single values are edge weights, which attention has no use for).
            fill_value: Features of the new self-loops: a number, a tensor, or how to aggregate those of the edges that
                point to the node (`"add"`, `"mean"`, `"min"`, `"max"`, `"mul"`). A layer made with
                `flow="target_to_source"` and called with a bare `edge_index` aggregates those of the edges that leave
                it, as PyG does. (default: `"mean"`)

        Returns:
            A graph with the same edges as `edges()`, in the same order, and features `[E, ...]`, or `None` where there
            are none.

        Raises:
            ValueError: If there is not one row of features an edge.
            NotImplementedError: If self-loops are to be added to a `SparseTensor` with features, or features come
                beside a sparse adjacency.
        """
        remedy = "pass an edge_index and edge_attr, or add the loops first and set add_self_loops=False."
        if features is None:
            features = _sparse_features(self.adjacency)
            if features is None or not self.self_loops:
                return self, features
            if isinstance(self.adjacency, SparseTensor):
                raise NotImplementedError(f"self-loops are not added to a SparseTensor with edge features: {remedy}")
            return self, _sparse_features(_loop_sparse(self.adjacency, fill_value))
        num_edges = self.adjacency.nnz() if isinstance(self.adjacency, SparseTensor) else None
        if isinstance(self.adjacency, Tensor):
            num_edges = self.adjacency._nnz() if is_sparse(self.adjacency) else self.adjacency.size(1)
        if features.size(0) != num_edges:
            raise InputError(f"edge_attr has {features.size(0)} rows for {num_edges} edges: it needs one an edge.")
        if not self.self_loops:
            return self, features
        if is_sparse(self.adjacency):
            raise NotImplementedError(
                f"self-loops are not added where edge features come beside a sparse adjacency: {remedy}"
            )
        num_sources, num_targets = self._known_sizes()
        checked(self.adjacency, num_sources, num_targets, self.flow)  # features are aggregated by these indices
        if isinstance(fill_value, str):
            fill_value = self._loop_features(features, fill_value, num_sources, num_targets)
        edge_index, features = add_loops(self.adjacency, min(num_sources, num_targets), features, fill_value)
        if torch.compiler.is_compiling():  # there, only features and edges made together are known to be as many
            return SparseGraph(edge_index, num_sources, num_targets, flow=self.flow), features
        return self, features

    def _loop_features(self, features: Tensor, reduce: str, num_sources: int, num_targets: int) -> Tensor:
        """The features of each node's self-loop, by aggregating those of its other edges."""
        first, second = plain(self.adjacency).long()
        ends = second if self.flow == FLOWS[0] or self._loops_as_pyg else first
        # More nodes may have edges than get a self-loop. Those that are loops already go to a row of their own, as in
        # compiled code a selection of the others would have a size that nothing else is known to have.
        count = max(num_sources, num_targets)
        features = scatter(features, ends.where(first != second, count), 0, count + 1, reduce)
        return features[: min(num_sources, num_targets)]

    def _known_sizes(self) -> tuple[int, int]:
        if self.num_sources is None or self.num_targets is None:
            raise ValueError("how many nodes does this graph have? Give the SparseGraph num_sources and num_targets.")
        return self.num_sources, self.num_targets

    def with_weights(self, weights: Tensor) -> Any:
        """Attention weights beside the edges they belong to, as PyG's layers return them.

        Args:
            weights: `[E, H]`, in the order of `edges()`.

        Returns:
            `(edge_index, weights)`; for a `torch.sparse` adjacency `(adjacency with the weights as values, weights)`;
            for a `SparseTensor` the `SparseTensor` that holds them.

        Raises:
            ValueError: If the weights of a batch, `[B, E, H]`, were to become values of one sparse matrix.
        """
        adjacency = self.edges().adjacency
        if weights.dim() > 2 and is_sparse(adjacency):
            raise ValueError(
                f"the weights of a batch, {list(weights.shape)}, are no values of one sparse matrix: pass an "
                "edge_index instead of a sparse adjacency to get weights [B, E, H]."
            )
        if isinstance(adjacency, SparseTensor):
            return adjacency.set_value(weights, layout="coo")
        if is_torch_sparse_tensor(adjacency):
            return _with_values(adjacency, weights), weights
        return adjacency, weights

    def __repr__(self) -> str:
        sizes = f"num_sources={self.num_sources}, num_targets={self.num_targets}"
        loops = ", self_loops=True" if self.self_loops else ""
        flow = f", flow={self.flow!r}" if self.flow != FLOWS[0] else ""
        return f"SparseGraph({sizes}{loops}{flow})"


def _check_form(edge_index: Any) -> None:
    if isinstance(edge_index, SparseTensor):
        return
    if not isinstance(edge_index, Tensor):
        raise InputTypeError(
            "a graph is an edge_index tensor of shape [2, E], an EdgeIndex, a torch.sparse adjacency, a SparseTensor, "
            f"a SparseGraph or a CompleteGraph; got {type(edge_index).__name__}."
        )
    if edge_index.layout != torch.strided:
        if not is_torch_sparse_tensor(edge_index) or edge_index.sparse_dim() != 2:
            raise InputError(
                f"a sparse adjacency is one [N, M] matrix in CSR, CSC or COO layout; got {edge_index.layout} of shape "
                f"{list(edge_index.shape)}."
            )
        return
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        hint = (
            " (it looks transposed: pass edge_index.t())" if edge_index.dim() == 2 and edge_index.size(1) == 2 else ""
        )
        raise InputError(
            f"edge_index has shape [2, E], sources above targets; got shape {list(edge_index.shape)}{hint}."
        )
    if edge_index.dtype not in _INTEGER_DTYPES:
        raise InputError(
            f"edge_index holds node indices, so its dtype is an integer one; got {edge_index.dtype}. "
            "Convert it with edge_index.long()."
        )


def _is_unsavable(adjacency: Any) -> bool:
    """Whether autograd, which is at work, refuses to save a graph because it was made in inference mode."""
    if torch.compiler.is_compiling() or not isinstance(adjacency, Tensor):
        return False
    return adjacency.is_inference() and not torch.is_inference_mode_enabled()


def _agree(what: str, known: int | None, given: int | None, where: str) -> int | None:
    if known is None or given is None:
        return given if known is None else known
    if known != given:
        raise ValueError(f"the graph has {known} {what}, but {where} give {given}: they must be the same nodes.")
    return known


def _loop_sparse(adjacency: Any, fill_value: float | Tensor | str = 1.0) -> Any:
    if isinstance(adjacency, SparseTensor):
        return torch_sparse.set_diag(adjacency)
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


def _sparse_features(adjacency: Any) -> Tensor | None:
    if isinstance(adjacency, SparseTensor):
        values = adjacency.coo()[2]
    elif is_torch_sparse_tensor(adjacency):
        values = to_edge_index(adjacency)[1]
    else:
        return None
    return values if values is not None and values.dim() > 1 else None


def _with_values(adjacency: Tensor, values: Tensor) -> Tensor:
    """A `torch.sparse` adjacency with other values, whatever the shape of its own."""
    size = (*adjacency.shape[:2], *values.shape[1:])
    if adjacency.layout == torch.sparse_coo:
        return torch.sparse_coo_tensor(adjacency.coalesce().indices(), values, size, is_coalesced=True)
    if adjacency.layout == torch.sparse_csr:
        return torch.sparse_csr_tensor(adjacency.crow_indices(), adjacency.col_indices(), values, size)
    return torch.sparse_csc_tensor(adjacency.ccol_indices(), adjacency.row_indices(), values, size)


class CompleteGraph:
    r"""A graph in which every target attends to every source: what a Transformer's self-attention runs on.

    Symbolic: it stores no edges. Fewer edges make the usual variants; `packed` lays several such graphs end to end.

    Args:
        num_targets: N.
        num_sources: M. (default: N)
        causal: Whether targets see only the sources up to their own place. With N ≠ M the *last* target sees every
            source (bottom-right alignment, what a cached decoding step needs). (default: `False`)
        window: `(left, right)`: how far before and after its own place, inclusive, a target sees; a positive
            integer means both. (default: `None`, no limit)
        source_lengths: Of a padded batch: how many sources are real, one number for each element of the batch, `[B]`.
            (default: `None`)
        target_lengths: Likewise for targets; the others get zeros. (default: `None`)

    Raises:
        ValueError: If a size is negative, the window is negative, or a length is larger than its size.

    Example:
        >>> import gattn
        >>> gattn.CompleteGraph(3, causal=True).edge_index()
        tensor([[0, 0, 1, 0, 1, 2],
                [0, 1, 1, 2, 2, 2]])
    """

    def __init__(
        self,
        num_targets: int,
        num_sources: int | None = None,
        *,
        causal: bool = False,
        window: int | tuple[int, int] | None = None,
        source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
    ):
        num_sources = num_targets if num_sources is None else num_sources
        if num_targets < 0 or num_sources < 0:
            raise ValueError(
                f"a graph has no negative number of nodes: got {num_targets} targets, {num_sources} sources."
            )
        if isinstance(window, int) and not isinstance(window, bool) and window > 0:
            window = (window, window)
        if window is not None and not (
            isinstance(window, (tuple, list))
            and len(window) == 2
            and all(isinstance(side, int) and not isinstance(side, bool) and side >= 0 for side in window)
        ):
            raise ValueError(f"window is (left, right), both at least 0, or one positive integer; got {window}.")
        for name, lengths, limit in (
            ("source_lengths", source_lengths, num_sources),
            ("target_lengths", target_lengths, num_targets),
        ):
            if lengths is None:
                continue
            _check_counts(name, lengths)
            if lengths.numel() and not torch.compiler.is_compiling() and int(lengths.max()) > limit:
                raise ValueError(f"{name} must lie between 0 and {limit}; got {lengths.tolist()}.")
        if source_lengths is not None and target_lengths is not None and source_lengths.shape != target_lengths.shape:
            raise ValueError(
                f"source_lengths and target_lengths are for the same batch; got {list(source_lengths.shape)} and "
                f"{list(target_lengths.shape)}."
            )
        self.num_targets = num_targets
        self.num_sources = num_sources
        self.causal = causal
        self.window = None if window is None else tuple(window)
        self.source_lengths = source_lengths
        self.target_lengths = target_lengths
        self.blocks: tuple[tuple[int, int], ...] | None = None
        """Of a packed graph: the number of targets and sources of each block."""

    @classmethod
    def packed(
        cls,
        lengths: Any = None,
        source_lengths: Any = None,
        *,
        ptr: Tensor | None = None,
        source_ptr: Tensor | None = None,
        causal: bool = False,
        window: int | tuple[int, int] | None = None,
    ) -> CompleteGraph:
        """Complete graphs laid end to end: each block attends within itself, and nothing is padded.

        Args:
            lengths: Number of targets in each block: a tensor `[B]`, or a sequence of integers.
            source_lengths: Likewise for sources. (default: `None`, the same)
            ptr: Instead of `lengths`: where each block begins, and the end, `[B + 1]`, as PyG's batches have it.
                (default: `None`)
            source_ptr: Likewise for sources. (default: `None`)
            causal: As for a single graph, within each block. (default: `False`)
            window: Likewise. (default: `None`)

        Raises:
            ValueError: If neither or both of `lengths` and `ptr` are given, or they are no lengths and no starts.

        Example:
            >>> import gattn
            >>> gattn.CompleteGraph.packed([1, 2]).edge_index()
            tensor([[0, 1, 2, 1, 2],
                    [0, 1, 1, 2, 2]])
        """
        targets = _block_sizes("lengths", lengths, "ptr", ptr)
        if targets is None:
            raise ValueError("a packed graph needs the lengths of its blocks, or the ptr at which they begin.")
        sources = _block_sizes("source_lengths", source_lengths, "source_ptr", source_ptr)
        sources = targets if sources is None else sources
        if len(sources) != len(targets):
            raise ValueError(f"targets have {len(targets)} blocks and sources {len(sources)}: they must be the same.")
        graph = cls(sum(targets), sum(sources), causal=causal, window=window)
        graph.blocks = tuple(zip(targets, sources, strict=True))
        return graph

    def with_causal(self) -> CompleteGraph:
        """The same graph with `causal=True`."""
        return self if self.causal else self._copy(causal=True)

    def with_source_lengths(self, lengths: Tensor) -> CompleteGraph:
        """The same graph, for a batch whose elements have so many real sources."""
        return self._copy(source_lengths=lengths)

    def _copy(self, **changes: Any) -> CompleteGraph:
        options = {
            name: getattr(self, name)
            for name in ("num_targets", "num_sources", "causal", "window", "source_lengths", "target_lengths")
        }
        graph = CompleteGraph(**(options | changes))
        graph.blocks = self.blocks
        return graph

    def edge_index(self, device: torch.device | str | None = None) -> Tensor:
        """All edges as `[2, E]`, sources above targets, target by target: for the reference, and for drawing.

        Lengths are no part of it, since they differ across the batch: `length_mask` says which edges they leave.
        """
        if self.blocks is None:
            return self._block_edges(self.num_targets, self.num_sources, device)
        edges, start = [torch.empty(2, 0, dtype=torch.int64, device=device)], [0, 0]
        for num_targets, num_sources in self.blocks:
            offset = torch.tensor(start, device=device).unsqueeze(1)
            edges.append(self._block_edges(num_targets, num_sources, device) + offset)
            start = [start[0] + num_sources, start[1] + num_targets]
        return torch.cat(edges, dim=1)

    def _block_edges(self, num_targets: int, num_sources: int, device: torch.device | str | None) -> Tensor:
        seen = self.visible(num_targets, num_sources, num_sources - num_targets, device)
        target, source = seen.nonzero().unbind(1)
        return torch.stack([source, target])

    def visible(
        self, num_targets: int, num_sources: int, offset: int, device: torch.device | str | None = None
    ) -> Tensor:
        """Which sources `causal` and `window` leave to which targets, `[N, M]`, True = seen.

        Args:
            num_targets: N.
            num_sources: M.
            offset: The source at the place of target 0.
            device: Where to make it. (default: `None`)
        """
        target = torch.arange(num_targets, device=device).unsqueeze(1)
        distance = torch.arange(num_sources, device=device) - target - offset
        seen = torch.ones_like(distance, dtype=torch.bool)
        left, right = self.reach
        if left is not None:
            seen &= distance >= -left
        if right is not None:
            seen &= distance <= right
        return seen

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """How far before and after its own place a target sees; `None` means without limit."""
        left, right = (None, None) if self.window is None else self.window
        return left, 0 if self.causal else right

    def length_mask(self, edge_index: Tensor) -> Tensor | None:
        """Which edges join real nodes, `[B, E]`, True = real; `None` if the graph has no lengths."""
        mask = None
        for row, lengths in ((0, self.source_lengths), (1, self.target_lengths)):
            if lengths is not None:
                real = edge_index[row] < lengths.to(edge_index.device).unsqueeze(-1)
                mask = real if mask is None else mask & real
        return mask

    def to_dense(self, weights: Tensor, edge_index: Tensor) -> Any:
        """Attention weights `[..., E, H]` as matrices `[..., H, N, M]`, zero where there is no edge.

        A packed graph gives a list, one matrix for each block.
        """
        source, target = edge_index
        if self.blocks is None:
            return _to_matrix(weights, source, target, self.num_targets, self.num_sources)
        matrices, first_target, first_source, first_edge = [], 0, 0, 0
        for num_targets, num_sources in self.blocks:
            last = first_edge + self._block_edges(num_targets, num_sources, source.device).size(1)
            edges = slice(first_edge, last)
            rows, columns = target[edges] - first_target, source[edges] - first_source
            matrices.append(_to_matrix(weights[..., edges, :], columns, rows, num_targets, num_sources))
            first_target, first_source, first_edge = first_target + num_targets, first_source + num_sources, last
        return matrices

    def pick(self, dense: Tensor, edge_index: Tensor) -> Tensor:
        """The entries of `[..., H, N, M]` that belong to edges, as `[..., E, H]`.

        A packed graph's are `[B, H, N, M]`, with as many elements as there are blocks, N and M those of the largest.
        """
        source, target = edge_index
        if self.blocks is None:
            return dense[..., target, source].transpose(-1, -2)
        counts = torch.tensor(self.blocks, dtype=torch.int64, device=source.device).view(-1, 2)
        block = torch.arange(len(self.blocks), device=source.device).repeat_interleave(counts[:, 0])[target]
        first = counts.cumsum(0) - counts
        return dense[block, :, target - first[block, 0], source - first[block, 1]]

    def __repr__(self) -> str:
        parts = [f"{self.num_targets}, {self.num_sources}"]
        parts += ["causal=True"] if self.causal else []
        parts += [f"window={self.window}"] if self.window is not None else []
        parts += ["source_lengths=..."] if self.source_lengths is not None else []
        parts += ["target_lengths=..."] if self.target_lengths is not None else []
        parts += [f"{len(self.blocks)} blocks"] if self.blocks is not None else []
        return f"CompleteGraph({', '.join(parts)})"


def _to_matrix(weights: Tensor, source: Tensor, target: Tensor, num_targets: int, num_sources: int) -> Tensor:
    matrix = weights.new_zeros((*weights.shape[:-2], weights.size(-1), num_targets, num_sources))
    matrix[..., target, source] = weights.transpose(-1, -2)
    return matrix


def _check_counts(name: str, lengths: Any) -> None:
    if not isinstance(lengths, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(lengths).__name__}.")
    if lengths.is_floating_point() or lengths.dtype == torch.bool or lengths.dim() == 0:
        raise ValueError(f"{name} holds one integer for each element of the batch, [B]; got {lengths}.")
    if lengths.numel() and not torch.compiler.is_compiling() and int(lengths.min()) < 0:
        raise ValueError(f"{name} must not be negative; got {lengths.tolist()}.")


def _block_sizes(name: str, lengths: Any, ptr_name: str, ptr: Any) -> list[int] | None:
    """Sizes of blocks, from lengths or from where they begin."""
    if ptr is not None:
        if lengths is not None:
            raise ValueError(f"{name} and {ptr_name} say the same thing: give one of them.")
        starts = torch.as_tensor(ptr)
        _check_counts(ptr_name, starts)
        if starts.dim() != 1 or starts.numel() == 0 or int(starts[0]) != 0 or bool((starts.diff() < 0).any()):
            raise ValueError(
                f"{ptr_name} holds where each block begins, and the end: it starts at 0 and never falls; got "
                f"{starts.tolist()}."
            )
        return starts.diff().tolist()
    if lengths is None:
        return None
    lengths = torch.as_tensor(lengths, dtype=None if len(lengths) else torch.int64)
    _check_counts(name, lengths)
    if lengths.dim() != 1:
        raise ValueError(f"{name} holds one integer for each block, [B]; got {list(lengths.shape)}.")
    return lengths.tolist()


#: Everything that `attend` takes as a graph, beside the raw forms of an edge list.
Graph = SparseGraph | CompleteGraph


def as_graph(graph: Any, flow: str = FLOWS[0]) -> Graph:
    """Wraps an edge list in any form; graphs are returned as they are."""
    if isinstance(graph, SparseGraph) and _is_unsavable(graph.adjacency):
        return graph._copy()
    if isinstance(graph, (SparseGraph, CompleteGraph)):
        return graph
    graph = SparseGraph(graph, flow=flow)
    graph._loops_as_pyg = True
    return graph
