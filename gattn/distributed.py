r"""Sharded attention: each process owns some of the targets, and fetches the sources that their edges need.

Graphs and sequences that are too large for one process are split by their nodes across a `DeviceMesh` of
`torch.distributed`:

>>> import torch, gattn
>>> import torch.distributed as dist
>>> from gattn.distributed import shard
>>> store = dist.HashStore()  # torchrun sets up several processes; this example is one
>>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
>>> mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
>>> edge_index, x = torch.tensor([[0, 1, 2], [1, 2, 0]]), torch.randn(3, 8)
>>> graph = shard(gattn.SparseGraph(edge_index, 3, 3), mesh)
>>> conv = gattn.nn.GATConv(8, 4, heads=2)  # parameters are the same on all processes
>>> out = conv(graph.scatter(x), graph)  # the rows of this process's nodes
>>> graph.gather(out).shape  # those of all nodes
torch.Size([3, 8])
>>> dist.destroy_process_group()

Any layer that computes its edges by :func:`gattn.attend` takes such a graph. Outputs and gradients are those of a
single process, up to rounding. Random numbers, such as those of dropout, are drawn by each process for its own edges,
so seed the processes differently.

Parameters belong to all processes, and their gradients are the sum of those of each process. `DistributedDataParallel`
takes the mean instead, so the loss to use with it is `losses.sum() * num_processes / num_losses_of_all`. All processes
must make the same calls in the same order, including those that own no nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, overload

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gattn.errors import InputError, InputTypeError
from gattn.graphs import CompleteGraph, Graph, GraphLike, SparseGraph, as_graph
from gattn.graphs.reordering import import_metis, partition, undirected

__all__ = ["ShardedCompleteGraph", "ShardedGraph", "ShardedSparseGraph", "shard"]

#: What the rows of a tensor belong to: targets, sources or edges.
Rows: TypeAlias = Literal["targets", "sources", "edges"]


@overload
def shard(
    graph: CompleteGraph, mesh: DeviceMesh, partition: Tensor | Sequence[Tensor] | str | None = None
) -> ShardedCompleteGraph: ...
@overload
def shard(
    graph: GraphLike, mesh: DeviceMesh, partition: Tensor | Sequence[Tensor] | str | None = None
) -> ShardedGraph: ...
@torch.inference_mode(False)  # so that the graph can be used in training later
def shard(graph: GraphLike, mesh: DeviceMesh, partition: Tensor | Sequence[Tensor] | str | None = None) -> ShardedGraph:
    """The part of a graph that belongs to this process; all processes of the mesh must call it.

    A process owns its targets with all their edges, and the features of its sources. In attention, an edge list's
    sources of other processes (its *halo*) are fetched in one all-to-all of the rows that are needed. The sources of a
    complete graph are gathered; if it is causal or windowed, only those that are seen. Gradients go back the same way.

    Args:
        graph: The graph, with known sizes, on the mesh's device. For a list of edges, a process needs only those of its
            own targets, and ignores the others.
        mesh: The processes, one-dimensional, such as `init_device_mesh("cpu", (4,))` or `mesh["nodes"]`.
        partition: Which process owns which node: the owner's position in the mesh for each node, `[N]`, or, if targets
            and sources differ, a pair of such tensors, `[N]` and `[M]`. `"metis"` finds parts of about the same size
            with few edges between them, among the edges that the first process passes (needs `pymetis`). Sequences are
            always split into contiguous blocks. (default: `None`, contiguous blocks)

    Returns:
        A graph whose features are this process's rows.

    Raises:
        TypeError: If `mesh` is not a `DeviceMesh`.
        ValueError: If the mesh has several dimensions, sizes are unknown or differ between processes, or the
            partition does not fit or differs between processes.
        ImportError: If `partition="metis"` and `pymetis` is not installed.

    Example:
        >>> import torch, gattn
        >>> import torch.distributed as dist
        >>> from gattn.distributed import shard
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.init_device_mesh("cpu", (1,))
        >>> shard(gattn.CompleteGraph(4), mesh)
        ShardedCompleteGraph(process 0 of 1: 4 of 4 targets, 4 of 4 sources, 0 more fetched)
        >>> dist.destroy_process_group()
    """
    if not isinstance(mesh, DeviceMesh):
        raise InputTypeError(f"mesh must be a torch.distributed DeviceMesh; got {type(mesh).__name__}.")
    if mesh.ndim != 1:
        names = "" if mesh.mesh_dim_names is None else f", such as mesh[{mesh.mesh_dim_names[0]!r}]"
        raise InputError(
            f"a graph is sharded along one dimension, but the mesh has {mesh.ndim}: pass a submesh of one{names}."
        )
    whole = as_graph(graph, sharded=True)
    if whole.is_sharded:
        raise InputError("this graph is sharded already.")
    if whole.num_targets is None or whole.num_sources is None:
        raise InputError(
            "the number of nodes decides which of them a process owns: make the graph with num_targets and num_sources."
        )
    group, sizes = mesh.get_group(), (whole.num_targets, whole.num_sources)
    device = torch.device(mesh.device_type)
    everybodys = _all_gather(torch.tensor(sizes, device=device), group)
    if (everybodys != everybodys[0]).any():
        raise InputError(
            f"all processes must have graphs of the same size; got (targets, sources): {everybodys.tolist()}."
        )
    if isinstance(whole, CompleteGraph):
        if partition is not None:
            raise InputError("a sequence is split into contiguous blocks: leave partition alone.")
        return ShardedCompleteGraph(whole, *_blocks(sizes, group), device)
    whole = whole.listed(device)
    if isinstance(partition, str):
        if partition != "metis" or sizes[0] != sizes[1]:
            raise InputError(
                "partition must be a tensor, a pair of them, or 'metis' for a graph whose targets are its sources; "
                "got "
                f"{partition!r} for {sizes[0]} targets and {sizes[1]} sources."
            )
        partition = _metis(whole, group, device)
    if partition is None:
        return ShardedSparseGraph(whole, *_blocks(sizes, group))
    parts = (partition, partition) if isinstance(partition, Tensor) else tuple(partition)
    if len(parts) != 2:
        raise InputError(f"a partition must be one tensor, or one for targets and one for sources; got {len(parts)}.")
    targets = _Parts("targets", parts[0], sizes[0], group)
    sources = targets if parts[1] is parts[0] and sizes[0] == sizes[1] else _Parts("sources", parts[1], sizes[1], group)
    digests = _all_gather(torch.stack([targets.digest(), sources.digest()]).to(device), group)
    if (digests != digests[0]).any():
        raise InputError("all processes must have the same partition: use the same seed, or broadcast it.")
    return ShardedSparseGraph(whole, targets, sources)


# Who owns which node --------------------------------------------------------------------------------------------------


class _Blocks:
    """Nodes in contiguous blocks, of sizes that differ by at most one."""

    def __init__(self, size: int, group: dist.ProcessGroup):
        self.size, self.group = size, group
        ranks = group.size()
        self._starts = torch.tensor([size * rank // ranks for rank in range(ranks + 1)], device="cpu")
        self.first, self.last = self._starts[group.rank() :][:2].tolist()

    def own(self, device: torch.device) -> Tensor:
        """This process's nodes."""
        return torch.arange(self.first, self.last, device=device)

    def locate(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """The owner of each node, and the node's position among the owner's nodes."""
        starts = self._starts.to(nodes.device)
        owner = torch.searchsorted(starts, nodes, right=True) - 1
        return owner, nodes - starts[owner]


def _blocks(sizes: tuple[int, int], group: dist.ProcessGroup) -> tuple[_Blocks, _Blocks]:
    """The blocks of targets and of sources, which are the same if there are as many of each."""
    targets = _Blocks(sizes[0], group)
    return targets, targets if sizes[0] == sizes[1] else _Blocks(sizes[1], group)


class _Parts:
    """Nodes split as a tensor of their owners says."""

    def __init__(self, name: str, owner: Tensor, size: int, group: dist.ProcessGroup):
        if owner.shape != (size,) or owner.is_floating_point() or owner.is_complex() or owner.dtype == torch.bool:
            raise InputError(
                f"a partition must hold the position in the mesh of each node's owner, integers [{size}] for the "
                f"{name}; got {owner.dtype} of shape {list(owner.shape)}."
            )
        if size and not (int(owner.min()) >= 0 and int(owner.max()) < group.size()):
            raise InputError(
                f"a partition of {group.size()} processes must hold numbers from 0 to {group.size() - 1}; got numbers "
                f"from {int(owner.min())} to {int(owner.max())}."
            )
        self.size, self.group = size, group
        self._owner = owner.long()
        order = self._owner.argsort(stable=True)
        starts = torch.cumsum(self._owner.bincount(minlength=group.size()), 0)
        first = torch.cat([starts.new_zeros(1), starts])
        self._place = torch.empty_like(order)
        self._place[order] = torch.arange(size, device=order.device) - first[self._owner[order]]
        self._own = order[first[group.rank()] : first[group.rank() + 1]]

    def own(self, device: torch.device) -> Tensor:
        """This process's nodes."""
        return self._own.to(device)

    def locate(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """The owner of each node, and the node's position among the owner's nodes."""
        return self._owner[nodes], self._place[nodes]

    def digest(self) -> Tensor:
        """A number that is unlikely to be that of another partition."""
        factors = torch.randint(1 << 62, (self.size,), generator=torch.Generator().manual_seed(0))
        return (self._owner * factors.to(self._owner.device)).sum()


def _metis(graph: SparseGraph, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Parts of about the same size with few edges between them, the same on all processes."""
    import_metis()
    part, problem = torch.zeros(graph.num_targets or 0, dtype=torch.int64, device=device), [""]
    if group.rank() == 0:
        try:
            part.copy_(torch.as_tensor(partition(undirected(graph.edge_index, len(part)), group.size())))
        except Exception as error:  # the other processes must not wait for ever
            problem = [f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(problem, group_src=0, group=group)
    if problem[0]:
        raise InputError(f"METIS found no partition ({problem[0]}): leave partition alone, or give a tensor.")
    dist.broadcast(part, group_src=0, group=group)
    return part


# What goes from process to process ------------------------------------------------------------------------------------


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensors of all processes, `[processes, ...]`."""
    gathered = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(gathered, x, group=group)
    return torch.stack(gathered)


class _AllToAll(torch.autograd.Function):
    """Sends some rows to each process, and receives some from each; gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way_back = received, sent, group
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        # Activation checkpointing recomputes only what was saved. Saving something here makes all processes repeat the
        # exchange, including those that save nothing else.
        ctx.save_for_backward(out.new_empty(0))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _ = ctx.saved_tensors
        return _all_to_all(*grads, *ctx.way_back), None, None, None


#: `(rows, number sent to each process, number received from each, group) -> rows`, with gradients.
_all_to_all: Callable[..., Tensor] = _AllToAll.apply


class Traffic(NamedTuple):
    """How many rows this process sends and receives each time that attention fetches a tensor.

    The backward pass sends as many gradients back.
    """

    sent: int
    received: int


class _Fetch:
    """Fetches the rows of nodes that other processes own.

    Args:
        nodes: The nodes, ordered by their owners.
        owners: Who owns which node.
    """

    def __init__(self, nodes: Tensor, owners: _Blocks | _Parts):
        self._group = owners.group
        owner, place = owners.locate(nodes)
        counts = owner.bincount(minlength=self._group.size())
        asked = torch.empty_like(counts)
        dist.all_to_all_single(asked, counts, group=self._group)
        self._received, self._sent = counts.tolist(), asked.tolist()
        self._rows = _all_to_all(place, self._received, self._sent, self._group)
        self.traffic = Traffic(len(self._rows), len(nodes))

    def __call__(self, x: Tensor) -> Tensor:
        """The rows of these nodes, along dimension 0, given a tensor of this process's own rows."""
        return _all_to_all(x.index_select(0, self._rows), self._sent, self._received, self._group)


# The graphs -----------------------------------------------------------------------------------------------------------


class _Sharded:
    """What sharded graphs have in common."""

    is_sharded: ClassVar[bool] = True
    _targets: _Blocks | _Parts
    _sources: _Blocks | _Parts
    _fetch: _Fetch
    _num_all_edges: int = 0  # a complete graph has no list of edges
    target_ids: Tensor
    """The number, in the whole graph, of each of this process's targets."""
    source_ids: Tensor
    """The number, in the whole graph, of each of this process's sources."""

    def _own(self, rows: Rows) -> Tensor:
        """The number, in the whole graph, of each of this process's rows."""
        if rows not in ("targets", "sources", "edges"):
            raise InputError(f"rows must be 'targets', 'sources' or 'edges'; got {rows!r}.")
        ids: Tensor | None = getattr(
            self, {"targets": "target_ids", "sources": "source_ids"}.get(rows, "edge_ids"), None
        )
        if ids is None:
            raise InputError("a complete graph has no list of edges to scatter or gather.")
        return ids

    def scatter(self, x: Tensor, rows: Rows = "targets", dim: int = 0) -> Tensor:
        """This process's rows of a tensor that each process has as a whole; there is no communication.

        Args:
            x: One row per node, or per edge in the order of the whole graph's `edge_index`.
            rows: What the rows belong to; targets are the sources in most graphs. (default: `"targets"`)
            dim: The dimension of rows. (default: `0`)

        Raises:
            ValueError: If the tensor does not have as many rows as the whole graph.
        """
        ids = self._own(rows)
        whole = {"targets": self._targets.size, "sources": self._sources.size}.get(rows, self._num_all_edges)
        if x.size(dim) != whole:
            raise InputError(f"the whole graph has {whole} {rows}; got {x.size(dim)} rows along dim={dim}.")
        return x.index_select(dim, ids.to(x.device))

    def gather(self, x: Tensor, rows: Rows = "targets", dim: int = 0) -> Tensor:
        """The rows of all processes, in the order of the whole graph, on each of them.

        If each process computes a loss from these, gradients are multiplied by the number of processes: gather results,
        but compute losses from each process's own rows.

        Args:
            x: This process's rows.
            rows: What the rows belong to. (default: `"targets"`)
            dim: The dimension of rows. (default: `0`)

        Raises:
            ValueError: If the tensor does not have as many rows as this process.
        """
        group, ids = self._targets.group, self._own(rows)
        if x.size(dim) != len(ids):
            raise InputError(f"this process has {len(ids)} {rows}; got {x.size(dim)} rows.")
        counts = _all_gather(torch.tensor(len(ids), device=ids.device), group).tolist()
        copies, sent = group.size(), [len(ids)] * group.size()
        numbers, order = _all_to_all(ids.repeat(copies), sent, counts, group).sort()
        if (numbers.diff() == 0).any():
            raise InputError(f"processes that loaded their own {rows} have no common order of them.")
        moved = x.movedim(dim, 0)
        received = _all_to_all(moved.repeat(copies, *[1] * (x.dim() - 1)), sent, counts, group)
        return received.index_select(0, order).movedim(0, dim)

    @property
    def seen_ids(self) -> Tensor:
        """The number, in the whole graph, of each source that this process uses in attention, fetched ones included.

        This is the order of the sources in its `edge_index`, and of the columns of a complete graph's weights.
        """
        raise NotImplementedError

    @property
    def num_all_sources(self) -> int:
        """M of the whole graph; see `Graph.num_all_sources`."""
        return self._sources.size

    @property
    def traffic(self) -> Traffic:
        """How many rows of sources this process sends and receives for each tensor."""
        return self._fetch.traffic

    def positions(self, side: Literal["target", "source"], first: int, count: int, device: torch.device) -> Tensor:
        """See `Graph.positions`: positions in the whole graph, whose last target has that of the last source."""
        if side == "source":
            return self.source_ids.to(device)
        return self.target_ids.to(device) + (self._sources.size - self._targets.size)

    def of_all_processes(self, x: Tensor) -> Tensor:
        """See `Graph.of_all_processes`."""
        group = self._targets.group
        ones = [1] * group.size()
        return _all_to_all(x.expand(group.size(), *x.shape), ones, ones, group)

    def _all_rows(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Key and value of all sources that this process needs."""
        dim = value.dim() - 3
        keys = self._with_fetched(key.movedim(dim, 0)).movedim(0, dim)
        return keys, keys if value is key else self._with_fetched(value.movedim(dim, 0)).movedim(0, dim)

    def _with_fetched(self, own: Tensor) -> Tensor:
        raise NotImplementedError


class ShardedSparseGraph(_Sharded, SparseGraph):
    """One process's part of a list of edges, as returned by `shard`.

    Its `edge_index` numbers this process's targets from 0, and its sources likewise, followed by those of other
    processes that the edges need. Weights and all other values per edge belong to the edges of this process's targets:
    `scatter(..., "edges")` selects them.

    Args:
        whole: The graph of all processes, with edges `[2, E]`.
        targets: Which process owns which target.
        sources: Which process owns which source.

    Raises:
        ValueError: If the number of nodes in `whole` is not known.

    Example:
        >>> import torch, gattn
        >>> import torch.distributed as dist
        >>> from gattn.distributed import shard
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> whole = gattn.SparseGraph(torch.tensor([[0, 1, 2], [1, 2, 0]]), 3, 3)
        >>> graph = shard(whole, dist.init_device_mesh("cpu", (1,)))
        >>> graph
        ShardedSparseGraph(process 0 of 1: 3 of 3 targets, 3 of 3 sources, 0 more fetched)
        >>> graph.traffic
        Traffic(sent=0, received=0)
        >>> dist.destroy_process_group()
    """

    _attributes: ClassVar[tuple[str, ...]] = (
        *SparseGraph._attributes,
        *("_targets", "_sources", "_fetch", "_halo", "_num_all_edges", "target_ids", "source_ids"),
    )
    edge_ids: Tensor
    """The number, in the whole graph, of each of this process's edges."""

    def __init__(self, whole: SparseGraph, targets: _Blocks | _Parts, sources: _Blocks | _Parts):
        source, target = whole.sources_and_targets()
        rank, device = targets.group.rank(), source.device
        owner, place = targets.locate(target)
        self._num_all_edges = len(owner)
        self.edge_ids = (owner == rank).nonzero().squeeze(1)
        source, target = source[self.edge_ids], place[self.edge_ids]
        owner, place = sources.locate(source)
        is_far = owner != rank
        # Ordered by owner first, as they are received.
        halo, where = torch.unique(owner[is_far] * sources.size + source[is_far], return_inverse=True)
        self._halo = halo % max(sources.size, 1)
        self._fetch = _Fetch(self._halo, sources)
        self._targets, self._sources = targets, sources
        self.target_ids, self.source_ids = targets.own(device), sources.own(device)
        place[is_far] = where + len(self.source_ids)
        super().__init__(torch.stack([place, target]), len(self.target_ids), len(self.source_ids))

    def _known_sizes(self) -> tuple[int, int]:
        return len(self.source_ids) + len(self._halo), len(self.target_ids)

    def with_self_loops(self) -> SparseGraph:
        """The same graph with `self_loops=True`.

        Raises:
            ValueError: If targets and sources are split differently.
        """
        if self._targets is not self._sources:
            raise InputError(
                "self-loops cannot be added to a sharded graph whose targets and sources are different nodes: add them "
                "before, gattn.SparseGraph(..., self_loops=True), and make the layer with add_self_loops=False."
            )
        return super().with_self_loops()

    def fetch(
        self, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None
    ) -> tuple[Graph, Tensor, Tensor, Tensor | None, Tensor | None]:
        """See `Graph.fetch`."""
        num_sources, num_targets = self._known_sizes()
        local = SparseGraph(self.adjacency, num_targets, num_sources, self_loops=self.self_loops)
        return local, *self._all_rows(key, value), bias, mask

    def _with_fetched(self, own: Tensor) -> Tensor:
        return torch.cat([own, self._fetch(own)])

    @property
    def seen_ids(self) -> Tensor:
        """This process's sources, followed by those of others."""
        return torch.cat([self.source_ids, self._halo])

    def from_pairs(self, pairs: Tensor, heads: int) -> Tensor:
        """Raises `ValueError`, because no process has all pairs."""
        raise InputError("masks and biases for all pairs of nodes cannot be sharded: pass gattn.attend those of edges.")

    def distances(self, device: torch.device) -> Tensor:
        """See `Graph.distances`; positions are those in the whole graph."""
        source, target = self.sources_and_targets()
        return self.seen_ids[source] - self.target_ids[target] - (self._sources.size - self._targets.size)

    def __repr__(self) -> str:
        return f"ShardedSparseGraph({_described(self)})"


class ShardedCompleteGraph(_Sharded, CompleteGraph):
    """One process's part of a complete graph: a contiguous block of its targets and one of its sources; see `shard`.

    A bias or mask has rows for this process's targets and columns for all sources. Weights have columns for the sources
    that these targets see, `seen_ids`.

    Args:
        whole: The graph of all processes.
        targets: Which process owns which target.
        sources: Which process owns which source.
        device: The device of the nodes' numbers.

    Raises:
        ValueError: If the graph is packed, or it is causal or windowed and has lengths.

    Example:
        >>> import gattn
        >>> import torch.distributed as dist
        >>> from gattn.distributed import shard
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> graph = shard(gattn.CompleteGraph(4, causal=True), dist.init_device_mesh("cpu", (1,)))
        >>> graph.seen_ids
        tensor([0, 1, 2, 3])
        >>> dist.destroy_process_group()
    """

    _attributes = (
        *CompleteGraph._attributes,
        *("_targets", "_sources", "_fetch", "_seen", "target_ids", "source_ids"),
    )
    _targets: _Blocks
    _sources: _Blocks

    def __init__(self, whole: CompleteGraph, targets: _Blocks, sources: _Blocks, device: torch.device):
        if whole.blocks is not None:
            raise InputError("a packed graph cannot be sharded: give each process its own sequences.")
        left, right = whole.reach
        if not whole.is_uniform and (left, right) != (None, None):
            raise InputError(
                "a causal or windowed graph with lengths cannot be sharded: use a mask instead of lengths."
            )
        own = (targets.last - targets.first, sources.last - sources.first)
        lengths = None if whole.target_lengths is None else (whole.target_lengths - targets.first).clamp(0, own[0])
        super().__init__(*own, causal=whole.causal, window=whole.window, target_lengths=lengths)
        # This process's targets see the sources from first to last.
        shift = sources.size - targets.size
        first = 0 if left is None else targets.first + shift - left
        last = sources.size if right is None else targets.last + shift + right
        first = min(max(first, 0), sources.size)
        last = max(min(last, sources.size), first) if own[0] else first
        self._seen = (first, last)
        self.source_lengths = whole.source_lengths
        self._targets, self._sources = targets, sources
        self.target_ids, self.source_ids = targets.own(device), sources.own(device)
        seen = torch.arange(first, last, device=device)
        is_own = (sources.first <= seen) & (seen < sources.last)
        self._fetch = _Fetch(seen[~is_own], sources)

    @property
    def seen_ids(self) -> Tensor:
        """Contiguous ones."""
        return torch.arange(*self._seen, device=self.source_ids.device)

    def with_self_loops(self) -> CompleteGraph:
        """See `CompleteGraph.with_self_loops`."""
        if self._targets is not self._sources:  # though their numbers may be equal in this process
            raise InputError("this graph's targets and sources are different nodes: set add_self_loops=False.")
        return self

    def with_causal(self) -> CompleteGraph:
        """See `CompleteGraph.with_causal`; what to fetch has been decided before."""
        if not self.causal:
            raise InputError(
                "a graph has to be causal before it is sharded: shard(CompleteGraph(..., causal=True), mesh)."
            )
        return self

    def with_source_lengths(self, lengths: Tensor) -> CompleteGraph:
        """Raises `ValueError`, because this process knows only the padding of its own sources."""
        raise InputError(
            "lengths have to be given before sharding: shard(CompleteGraph(..., source_lengths=...), mesh)."
        )

    def _edges(self, device: torch.device | str | None) -> Tensor:
        raise InputError(
            "a sharded complete graph has no list of edges, which edge features need: shard a SparseGraph with these "
            "edges."
        )

    def fetch(
        self, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None
    ) -> tuple[Graph, Tensor, Tensor, Tensor | None, Tensor | None]:
        """See `Graph.fetch`."""
        first, last = self._seen
        # Lengths count all sources, unless there are no targets to see them.
        real = None if self.source_lengths is None else self.source_lengths.clamp(max=last - first)
        lengths = {"source_lengths": real, "target_lengths": self.target_lengths}
        local = CompleteGraph(self.num_targets, last - first, causal=self.causal, window=self.window, **lengths)
        local._offset = self._targets.first + self._sources.size - self._targets.size - first
        bias, mask = (self._columns(term, name) for term, name in ((bias, "bias"), (mask, "mask")))
        return local, *self._all_rows(key, value), bias, mask

    def as_bias(self, weights: Any) -> Tensor:
        """See `Graph.as_bias`; weights have columns only for the sources that this process's targets see."""
        first, last = self._seen
        return F.pad(super().as_bias(weights), (first, self._sources.size - last))

    def _columns(self, term: Tensor | None, name: str) -> Tensor | None:
        """A bias or mask for the sources that this process's targets see."""
        first, last = self._seen
        if term is None or term.dim() == 0 or term.size(-1) == 1:
            return term
        if term.size(-1) != self._sources.size:
            raise InputError(
                f"{name} on a sharded complete graph must have rows for this process's targets and columns for all "
                f"{self._sources.size} sources; got {list(term.shape)}."
            )
        return term[..., first:last]

    def _with_fetched(self, own: Tensor) -> Tensor:
        first, last = self._seen
        before = max(min(self._sources.first, last) - first, 0)
        fetched = self._fetch(own)
        kept = own[max(first - self._sources.first, 0) : max(last - self._sources.first, 0)]
        return torch.cat([fetched[:before], kept, fetched[before:]])

    def distances(self, device: torch.device) -> Tensor:
        """See `Graph.distances`: `[N, M]`, for this process's targets and all sources."""
        target, source = self.target_ids.to(device), torch.arange(self._sources.size, device=device)
        return source - target.unsqueeze(1) - (self._sources.size - self._targets.size)

    def __repr__(self) -> str:
        return f"ShardedCompleteGraph({_described(self)})"


#: What `shard` returns.
ShardedGraph: TypeAlias = ShardedSparseGraph | ShardedCompleteGraph


def _described(graph: ShardedGraph) -> str:
    """The text of `repr` for both kinds of graphs."""
    group = graph._targets.group
    return (
        f"process {group.rank()} of {group.size()}: {len(graph.target_ids)} of {graph._targets.size} targets, "
        f"{len(graph.source_ids)} of {graph._sources.size} sources, {graph.traffic.received} more fetched"
    )
