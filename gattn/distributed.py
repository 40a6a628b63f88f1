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
>>> out = conv(graph.scatter(x), graph)  # of this process's nodes
>>> graph.gather(out).shape  # of all nodes
torch.Size([3, 8])
>>> dist.destroy_process_group()

Any layer that computes its edges by :func:`gattn.attend` takes such a graph, and outputs and gradients are those of one
process, up to rounding. What is random, such as dropout, is drawn by each process for its own edges: seed processes
differently.

Parameters belong to all processes, and their gradients are the sum of those of each process. `DistributedDataParallel`
takes the mean instead, so the loss to use with it is `losses.sum() * num_processes / num_losses_of_all`. All processes
must make the same calls in the same order, those that own no nodes included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, overload

import torch
import torch.distributed as dist
from scipy.sparse import coo_array
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gattn.errors import InputError, InputTypeError
from gattn.graphs import CompleteGraph, Graph, GraphLike, SparseGraph, as_graph

__all__ = ["ShardedCompleteGraph", "ShardedGraph", "ShardedSparseGraph", "shard"]

#: Which rows a tensor has: one per target, per source, or per edge.
Rows: TypeAlias = Literal["targets", "sources", "edges"]


@overload
def shard(
    graph: CompleteGraph, mesh: DeviceMesh, partition: Tensor | Sequence[Tensor] | str | None = None
) -> ShardedCompleteGraph: ...
@overload
def shard(
    graph: GraphLike, mesh: DeviceMesh, partition: Tensor | Sequence[Tensor] | str | None = None
) -> ShardedGraph: ...
@torch.inference_mode(False)  # the graph may be trained on later
def shard(graph: GraphLike, mesh: DeviceMesh, partition: Tensor | Sequence[Tensor] | str | None = None) -> ShardedGraph:
    """The part of a graph that belongs to this process; all processes of the mesh call it.

    A process owns its targets with all their edges, and the features of its sources. In attention, an edge list's
    sources of other processes (its *halo*) are fetched in one all-to-all of the rows that are needed; a complete
    graph's are gathered, and of a causal or windowed one only those that are seen. Gradients go back the same way.

    Args:
        graph: The graph, its sizes known, on the mesh's device. Of a list of edges a process needs those of its own
            targets only, and ignores the others.
        mesh: The processes, one-dimensional, such as `init_device_mesh("cpu", (4,))` or `mesh["nodes"]`.
        partition: Which process owns which node: its place in the mesh for each node, `[N]`; for different targets and
            sources a pair of such tensors, `[N]` and `[M]`; `"metis"` to find parts of about the same size with few
            edges between them, among the edges that the first process gives (needs `pymetis`). Sequences are always
            split into contiguous blocks.
            (default: `None`, contiguous blocks)

    Returns:
        A graph whose features are this process's rows.

    Raises:
        ValueError: If the mesh has several dimensions, sizes are unknown or differ between processes, or the
            partition does not fit or differs.
        ImportError: If `partition="metis"` and there is no `pymetis`.
    """
    if not isinstance(mesh, DeviceMesh):
        raise InputTypeError(f"mesh is a torch.distributed DeviceMesh; got {type(mesh).__name__}.")
    if mesh.ndim != 1:
        names = "" if mesh.mesh_dim_names is None else f", such as mesh[{mesh.mesh_dim_names[0]!r}]"
        raise InputError(
            f"a graph is sharded along one dimension, but the mesh has {mesh.ndim}: pass one of them{names}."
        )
    whole = as_graph(graph, sharded=True)
    if whole.is_sharded:
        raise InputError("this graph is sharded already.")
    if whole.num_targets is None or whole.num_sources is None:
        raise InputError(
            "which nodes a process owns follows from their number: give the graph num_targets and num_sources."
        )
    group, sizes = mesh.get_group(), (whole.num_targets, whole.num_sources)
    device = torch.device(mesh.device_type)
    everybodys = _all_gather(torch.tensor(sizes, device=device), group)
    if (everybodys != everybodys[0]).any():
        raise InputError(f"processes have graphs of different sizes, (targets, sources): {everybodys.tolist()}.")
    if isinstance(whole, CompleteGraph):
        if partition is not None:
            raise InputError("a sequence is split into contiguous blocks: leave partition alone.")
        return ShardedCompleteGraph(whole, *_blocks(sizes, group), device)
    assert isinstance(whole, SparseGraph)
    if isinstance(partition, str):
        if partition != "metis" or sizes[0] != sizes[1]:
            raise InputError(
                f"partition is a tensor, a pair of them, or 'metis' for a graph whose targets are its sources; got "
                f"{partition!r} for {sizes[0]} targets and {sizes[1]} sources."
            )
        partition = _metis(whole, group, device)
    if partition is None:
        return ShardedSparseGraph(whole, *_blocks(sizes, group))
    parts = (partition, partition) if isinstance(partition, Tensor) else tuple(partition)
    if len(parts) != 2:
        raise InputError(f"a partition is one tensor, or one for targets and one for sources; got {len(parts)}.")
    targets = _Parts("targets", parts[0], sizes[0], group)
    sources = targets if parts[1] is parts[0] and sizes[0] == sizes[1] else _Parts("sources", parts[1], sizes[1], group)
    digests = _all_gather(torch.stack([targets.digest(), sources.digest()]).to(device), group)
    if (digests != digests[0]).any():
        raise InputError("processes have different partitions: make one with the same seed, or broadcast it.")
    return ShardedSparseGraph(whole, targets, sources)


# Who owns which node --------------------------------------------------------------------------------------------------


class _Blocks:
    """Nodes in contiguous blocks, of sizes that differ by at most one."""

    def __init__(self, size: int, group: dist.ProcessGroup):
        self.size, self.group = size, group
        ranks = group.size()
        self._starts = torch.tensor([size * rank // ranks for rank in range(ranks + 1)])
        self.first, self.last = self._starts[group.rank() :][:2].tolist()

    def own(self, device: torch.device) -> Tensor:
        """This process's nodes."""
        return torch.arange(self.first, self.last, device=device)

    def locate(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """The owner of each node, and the node's place among the owner's."""
        starts = self._starts.to(nodes.device)
        owner = torch.searchsorted(starts, nodes, right=True) - 1
        return owner, nodes - starts[owner]


def _blocks(sizes: tuple[int, int], group: dist.ProcessGroup) -> tuple[_Blocks, _Blocks]:
    """Of targets and of sources, which are the same where there are as many."""
    targets = _Blocks(sizes[0], group)
    return targets, targets if sizes[0] == sizes[1] else _Blocks(sizes[1], group)


class _Parts:
    """Nodes as a tensor of their owners says."""

    def __init__(self, name: str, owner: Tensor, size: int, group: dist.ProcessGroup):
        if owner.shape != (size,) or owner.is_floating_point() or owner.is_complex() or owner.dtype == torch.bool:
            raise InputError(
                f"a partition has the place in the mesh of each node's owner, integers [{size}] for the {name}; got "
                f"{owner.dtype} of shape {list(owner.shape)}."
            )
        if size and not (int(owner.min()) >= 0 and int(owner.max()) < group.size()):
            raise InputError(
                f"a partition holds numbers from 0 to {group.size() - 1}, as there are {group.size()} processes; got "
                f"some from {int(owner.min())} to {int(owner.max())}."
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
        """The owner of each node, and the node's place among the owner's."""
        return self._owner[nodes], self._place[nodes]

    def digest(self) -> Tensor:
        """A number that other partitions hardly have."""
        factors = torch.randint(1 << 62, (self.size,), generator=torch.Generator().manual_seed(0))
        return (self._owner * factors.to(self._owner.device)).sum()


def _metis(graph: SparseGraph, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Parts of about the same size with few edges between them, the same on all processes."""
    try:
        import pymetis
    except ImportError as error:
        raise ImportError("partition='metis' needs METIS: pip install pymetis") from error
    part, problem = torch.zeros(graph.num_targets or 0, dtype=torch.int64, device=device), [""]
    if group.rank() == 0:
        pairs = graph.edge_index.cpu().numpy()
        is_edge = (pairs[0] != pairs[1]).astype("int32")
        adjacency = coo_array((is_edge, (pairs[0], pairs[1])), shape=(len(part), len(part))).tocsr()
        adjacency = (adjacency + adjacency.T).tocsr()  # METIS takes undirected graphs
        adjacency.eliminate_zeros()
        try:
            found = pymetis.part_graph(group.size(), xadj=adjacency.indptr, adjncy=adjacency.indices)[1]
            part.copy_(torch.as_tensor(found))
        except Exception as error:  # the others must not wait for ever
            problem = [f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(problem, group_src=0, group=group)
    if problem[0]:
        raise InputError(f"METIS finds no partition ({problem[0]}): leave partition alone, or give a tensor.")
    dist.broadcast(part, group_src=0, group=group)
    return part


# What goes from process to process ------------------------------------------------------------------------------------


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A tensor of each process, `[processes, ...]`."""
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
        # Activation checkpointing recomputes as far as what was saved: this makes all processes repeat the exchange,
        # those that save nothing else included.
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
    """Fetches the rows of some nodes that others own.

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
        """The rows of these nodes, along dimension 0, of a tensor that holds this process's own."""
        return _all_to_all(x.index_select(0, self._rows), self._sent, self._received, self._group)


# The graphs -----------------------------------------------------------------------------------------------------------


class _Sharded:
    """What sharded graphs have in common."""

    is_sharded: ClassVar[bool] = True
    _targets: _Blocks | _Parts
    _sources: _Blocks | _Parts
    _fetch: _Fetch
    _num_all_edges: int = 0  # a complete graph lists none
    target_ids: Tensor
    """The number, in the whole graph, of each of this process's targets."""
    source_ids: Tensor
    """The number, in the whole graph, of each of this process's sources."""

    def _own(self, rows: Rows) -> Tensor:
        """The number, in the whole graph, of each of this process's rows."""
        if rows not in ("targets", "sources", "edges"):
            raise InputError(f"rows is 'targets', 'sources' or 'edges', not {rows!r}.")
        ids: Tensor | None = getattr(
            self, {"targets": "target_ids", "sources": "source_ids"}.get(rows, "edge_ids"), None
        )
        if ids is None:
            raise InputError("a complete graph has no list of edges to scatter or gather.")
        return ids

    def scatter(self, x: Tensor, rows: Rows = "targets", dim: int = 0) -> Tensor:
        """This process's rows of a tensor that each process has as a whole. It copies and communicates nothing else.

        Args:
            x: One row per node, or per edge in the order of the whole graph's `edge_index`.
            rows: What a row belongs to; targets are the sources in most graphs. (default: `"targets"`)
            dim: The dimension of rows. (default: `0`)

        Raises:
            ValueError: If the tensor has another number of rows than the whole graph.
        """
        ids = self._own(rows)
        whole = {"targets": self._targets.size, "sources": self._sources.size}.get(rows, self._num_all_edges)
        if x.size(dim) != whole:
            raise InputError(f"the whole graph has {whole} {rows}; got {x.size(dim)} rows along dim={dim}.")
        return x.index_select(dim, ids.to(x.device))

    def gather(self, x: Tensor, rows: Rows = "targets", dim: int = 0) -> Tensor:
        """The rows of all processes, in the order of the whole graph, on each of them.

        A loss that each process computes of these has as many times the gradient: gather results, and compute losses of
        each process's own rows.

        Args:
            x: This process's rows.
            rows: What a row belongs to. (default: `"targets"`)
            dim: The dimension of rows. (default: `0`)
        """
        group, ids = self._targets.group, self._own(rows)
        if x.size(dim) != len(ids):
            raise InputError(f"this process has {len(ids)} {rows}; got {x.size(dim)} rows.")
        counts = _all_gather(torch.tensor(len(ids), device=ids.device), group).tolist()
        copies, sent = group.size(), [len(ids)] * group.size()
        numbers, order = _all_to_all(ids.repeat(copies), sent, counts, group).sort()
        if (numbers.diff() == 0).any():
            raise InputError(f"the {rows} of processes that loaded their own ones have no common order.")
        moved = x.movedim(dim, 0)
        received = _all_to_all(moved.repeat(copies, *[1] * (x.dim() - 1)), sent, counts, group)
        return received.index_select(0, order).movedim(0, dim)

    @property
    def seen_ids(self) -> Tensor:
        """The number, in the whole graph, of each source that this process has in attention, the fetched ones included.

        So are the sources in its `edge_index` numbered, and the columns of a complete graph's weights.
        """
        raise NotImplementedError

    @property
    def num_all_sources(self) -> int:
        """M of the whole graph: see `Graph.num_all_sources`."""
        return self._sources.size

    @property
    def traffic(self) -> Traffic:
        """How many rows of sources this process sends to others and receives from them for each tensor."""
        return self._fetch.traffic

    def positions(self, side: Literal["target", "source"], first: int, count: int, device: torch.device) -> Tensor:
        """See `Graph.positions`: those in the whole graph, whose last target stands where its last source does."""
        if side == "source":
            return self.source_ids.to(device)
        return self.target_ids.to(device) + (self._sources.size - self._targets.size)

    def _all_rows(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Key and value of all sources that this process needs."""
        dim = value.dim() - 3
        keys = self._with_fetched(key.movedim(dim, 0)).movedim(0, dim)
        return keys, keys if value is key else self._with_fetched(value.movedim(dim, 0)).movedim(0, dim)

    def _with_fetched(self, own: Tensor) -> Tensor:
        raise NotImplementedError


class ShardedSparseGraph(_Sharded, SparseGraph):
    """One process's part of a list of edges; `shard` makes it.

    Its `edge_index` numbers this process's targets from 0, and its sources likewise, followed by those of others that
    the edges need. Weights and whatever comes per edge belong to the edges of this process's targets: `scatter(...,
    "edges")` picks them.
    """

    _attributes: ClassVar[tuple[str, ...]] = (
        *SparseGraph._attributes,
        *("_targets", "_sources", "_fetch", "_halo", "_num_all_edges", "target_ids", "source_ids", "edge_ids"),
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
        # Ordered by owner first, as they arrive.
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
                "self-loops are not added to a sharded graph whose targets and sources are different nodes: add them "
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
        """Own sources, and then those of others."""
        return torch.cat([self.source_ids, self._halo])

    def from_pairs(self, pairs: Tensor, heads: int) -> Tensor:
        """Raises `ValueError`: no process has all pairs."""
        raise InputError("masks and biases of all pairs of nodes are not sharded: give gattn.attend those of edges.")

    def distances(self, device: torch.device) -> Tensor:
        """See `Graph.distances`; nodes have their places in the whole graph."""
        source, target = self.sources_and_targets()
        return self.seen_ids[source] - self.target_ids[target] - (self._sources.size - self._targets.size)

    def __repr__(self) -> str:
        return f"ShardedSparseGraph({_described(self)})"


class ShardedCompleteGraph(_Sharded, CompleteGraph):
    """One process's part of a complete graph, a contiguous block of its targets and one of its sources; see `shard`.

    A bias or a mask has rows for this process's targets, and columns for all sources; weights have columns for the
    sources that these targets see, `seen_ids`.
    """

    _attributes = (
        *CompleteGraph._attributes,
        *("_targets", "_sources", "_fetch", "_seen", "target_ids", "source_ids"),
    )
    _targets: _Blocks
    _sources: _Blocks

    def __init__(self, whole: CompleteGraph, targets: _Blocks, sources: _Blocks, device: torch.device):
        if whole.blocks is not None:
            raise InputError("a packed graph is not sharded: give each process sequences of its own.")
        left, right = whole.reach
        if not whole.is_uniform and (left, right) != (None, None):
            raise InputError("a causal or windowed graph is not sharded together with lengths: use a mask.")
        own = (targets.last - targets.first, sources.last - sources.first)
        lengths = None if whole.target_lengths is None else (whole.target_lengths - targets.first).clamp(0, own[0])
        super().__init__(*own, causal=whole.causal, window=whole.window, target_lengths=lengths)
        # Sources from first to last are seen by this process's targets.
        shift = sources.size - targets.size
        first = 0 if left is None else targets.first + shift - left
        last = sources.size if right is None else targets.last + shift + right
        first = min(max(first, 0), sources.size)
        last = max(min(last, sources.size), first) if own[0] else first
        self._seen = (first, last)
        # Of all sources, unless there are no targets to see them.
        self.source_lengths = None if whole.source_lengths is None else whole.source_lengths.clamp(max=last - first)
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
        if self._targets is not self._sources:  # of which this process may have as many
            raise InputError("this graph's targets and sources are different nodes: set add_self_loops=False.")
        return self

    def with_causal(self) -> CompleteGraph:
        """See `CompleteGraph.with_causal`; what is fetched was decided before."""
        if not self.causal:
            raise InputError("a sharded graph is causal from the start: shard(CompleteGraph(..., causal=True), mesh).")
        return self

    def with_source_lengths(self, lengths: Tensor) -> CompleteGraph:
        """Raises `ValueError`: this process knows the padding of its own sources only."""
        raise InputError("give lengths to the whole graph: shard(CompleteGraph(..., source_lengths=...), mesh).")

    def _edges(self, device: torch.device | str | None) -> Tensor:
        raise InputError(
            "a sharded complete graph is not listed edge by edge, as edge features need it: shard a SparseGraph with "
            "these edges."
        )

    def fetch(
        self, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None
    ) -> tuple[Graph, Tensor, Tensor, Tensor | None, Tensor | None]:
        """See `Graph.fetch`."""
        first, last = self._seen
        lengths = {"source_lengths": self.source_lengths, "target_lengths": self.target_lengths}
        local = CompleteGraph(self.num_targets, last - first, causal=self.causal, window=self.window, **lengths)
        local._offset = self._targets.first + self._sources.size - self._targets.size - first
        bias, mask = (self._columns(term, name) for term, name in ((bias, "bias"), (mask, "mask")))
        return local, *self._all_rows(key, value), bias, mask

    def _columns(self, term: Tensor | None, name: str) -> Tensor | None:
        """A bias or mask for the sources that this process's targets see."""
        first, last = self._seen
        if term is None or term.dim() == 0 or term.size(-1) == 1:
            return term
        if term.size(-1) != self._sources.size:
            raise InputError(
                f"{name} on a sharded complete graph has rows for this process's targets and columns for all "
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
        """See `Graph.distances`: `[N, M]`, of this process's targets and all sources."""
        target, source = self.target_ids.to(device), torch.arange(self._sources.size, device=device)
        return source - target.unsqueeze(1) - (self._sources.size - self._targets.size)

    def __repr__(self) -> str:
        return f"ShardedCompleteGraph({_described(self)})"


#: What `shard` returns.
ShardedGraph: TypeAlias = ShardedSparseGraph | ShardedCompleteGraph


def _described(graph: ShardedGraph) -> str:
    """What `repr` says of both kinds."""
    group = graph._targets.group
    return (
        f"process {group.rank()} of {group.size()}: {len(graph.target_ids)} of {graph._targets.size} targets, "
        f"{len(graph.source_ids)} of {graph._sources.size} sources, {graph.traffic.received} more fetched"
    )
