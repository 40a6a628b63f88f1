"""What `benchmarks.kernels` measures: shapes, inputs, the reference and the peers.

The peer *gattn-custom* is gattn with the same score, written as a custom score of which the kernels only get the
logits. `benchmarks/pyg_peers.py` has those of PyG. *flex* is PyTorch's FlexAttention: dot products only.

The results are compared with gattn's reference in float64. The unit *gather* is the time that `embedding_bag` takes to
sum one row of features per edge, over the same edges.
"""

from __future__ import annotations

import copy
import functools
import importlib
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NotRequired

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch_geometric.utils import add_self_loops, remove_self_loops

import gattn
from benchmarks import pyg_peers
from benchmarks.framework import measuring
from benchmarks.framework.measuring import Computation, Expected, Measured, Measurement, Times, budgets
from benchmarks.framework.results import Row
from benchmarks.pyg_peers import PYG, PYG_REPLAYED

CONVS = {
    "gat": (gattn.nn.GATConv, pyg.GATConv),
    "gatv2": (gattn.nn.GATv2Conv, pyg.GATv2Conv),
    "transformer": (gattn.nn.TransformerConv, pyg.TransformerConv),
}
PEERS = ("gattn", *PYG, "dgl", "gattn-custom")
GPU_PEERS = (PYG_REPLAYED, "gattn-compile-replayed", "flex-compile")
"""Those that a CPU has no use for: a CUDA graph has the calls that `torch.compile` made, and repeats them."""
ATTENTION_ONLY = ("gattn-custom", "dgl", "flex-compile")
"""Peers without whole layers."""
DTYPES = ("float32", "bfloat16", "float16")
USUAL_DTYPES = {"cpu": DTYPES[:2], "cuda": DTYPES}
"""Those of attention on *mid*, unless others are named."""
PARTS = ("attention", "layer")
BACKENDS = {"cpu": "cpu", "cuda": "triton"}
EDGE_FEATURES = {"both": (False, True), "with": (True,), "without": (False,)}

EDGE_CHANNELS = 16
NEGATIVE_SLOPE = 0.2
SEED = 0

CHUNK_EDGES = 2**17
"""The reference processes about this many edges at a time, but never splits the edges of a target."""

CHECKED_ROWS = 4096
"""The number of random rows that are compared if results have one row per node; other results are compared whole."""

FLEX_BLOCK, FLEX_PAIRS = 128, 2**32
"""FlexAttention computes blocks of this many targets and sources. More pairs in them are not tried."""

SAMPLED_NODES = 1_000_000
"""For graphs with more nodes, the reference keeps only the compared rows, so that memory suffices."""


# The cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A graph, random or from a data set, and the widths of the features. Self-loops are not counted in `edges`."""

    name: str
    nodes: int
    edges: int
    heads: int
    channels: int
    hub: int | None = None
    """The node that a third of the edges point to."""
    dataset: str | None = None
    graphs: int = 1
    """The nodes form this many graphs of equal size, side by side."""
    power_law: bool = False
    """Whether degrees follow a power law with exponent 3."""
    in_channels: int = 128
    """The number of channels of a layer's input."""
    targets: int | None = None
    """Only the first this many nodes are targets, as in a batch of sampled neighbours. (default: all)"""
    fresh: bool = False
    """Whether each call gets a new `edge_index`, so that nothing that was cached helps it."""

    @property
    def num_targets(self) -> int:
        """The number of targets."""
        return self.nodes if self.targets is None else self.targets


#: The shapes by their names for `--shapes`; the hub graph has two variants.
SHAPES = {
    "tiny": (Shape("tiny", 10, 30, 8, 8, in_channels=64),),
    "thousand": (Shape("thousand", 1_000, 4_000, 8, 8),),
    "cora": (Shape("cora", 2_708, 10_556, 8, 8),),
    "mid": (Shape("mid", 42_000, 580_000, 8, 32),),
    "arxiv": (Shape("arxiv", 169_343, 2_330_000, 4, 64),),
    "hub": (
        Shape("hub first", 169_343, 2_330_000, 4, 64, hub=0),
        Shape("hub last", 169_343, 2_330_000, 4, 64, hub=169_342),
    ),
    "photo": (Shape("photo", 7_650, 238_162, 8, 32, dataset="photo"),),
    "molecules": (Shape("molecules", 250_000, 560_000, 8, 16, graphs=10_000),),
    "batch": (Shape("batch", 6_400, 13_824, 8, 16, graphs=256, fresh=True),),
    "sampled": (Shape("sampled", 51_000, 90_000, 8, 8, targets=9_000, fresh=True),),
    "products": (Shape("products", 2_400_000, 30_000_000, 4, 32, power_law=True),),
}
USUAL_SHAPES = ("mid", "arxiv")
"""The shapes that are measured on a CPU unless others are named."""

SMALL = Shape("small", 5_000, 50_000, 4, 16)


class Result(Measured):
    """The columns of a measurement."""

    forward_backward: NotRequired[Times]
    """Only the yardstick lacks it."""
    copy_rate: NotRequired[float]
    """Only the yardstick has this and the next one."""
    operation_rate: NotRequired[float]


@dataclass(frozen=True)
class Case(Measurement):
    """One measurement."""

    result = Result

    shape: Shape
    part: str
    """`"attention"`, `"layer"`, or `"gather"` for the yardstick."""
    layer: str
    edge_features: bool
    dtype: str
    peer: str
    threads: int
    repeats: int
    seconds: float
    device: str = "cpu"
    allocator: str = "default"

    def __str__(self) -> str:
        words = [self.shape.name, self.part, self.layer, "edge features" * self.edge_features, self.dtype, self.peer]
        return " ".join(filter(None, words)) + ", kept memory" * (self.allocator == "kept")

    @classmethod
    def key_of(cls, row: Row) -> str:
        """The key of a row; older rows lack fields with defaults."""
        plain = asdict(Shape("", 0, 0, 0, 0))
        return super().key_of({"device": "cpu", "allocator": "default", **row, "shape": {**plain, **row["shape"]}})

    @property
    def has_reference(self) -> bool:
        """Whether this is anything but the yardstick."""
        return self.part != "gather"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The number type."""
        return getattr(torch, self.dtype)

    def problem(self) -> tuple[object, ...]:
        """What is the same for all cases that must have the same result."""
        return self.shape, self.part, self.layer, self.edge_features, self.dtype

    def gather(self) -> Case:
        """The yardstick."""
        return replace(self, part="gather", layer="", edge_features=False, peer="embedding_bag")

    @property
    def whole(self) -> Case | None:
        """The layer whose attention this is."""
        return replace(self, part="layer") if self.part == "attention" else None

    def prepare_process(self) -> None:
        """Also silences warnings of PyG and PyTorch's compiler about themselves."""
        super().prepare_process()
        pyg_peers.prepare(self.peer)
        warnings.filterwarnings("ignore")

    def references(self) -> dict[str, dict[str, Expected]]:
        """The results of gattn's reference at random rows, at the hub and, for large graphs, at the busiest nodes."""
        inputs = draw(self)
        nodes, hub = self.shape.num_targets, self.shape.hub
        rows = torch.randperm(nodes, generator=torch.Generator().manual_seed(SEED))[:CHECKED_ROWS]
        if hub is not None:
            rows = torch.cat([rows, torch.tensor([hub])])
        is_sampled = nodes > SAMPLED_NODES
        if is_sampled:
            busiest = [int(ends.bincount().argmax()) for ends in inputs.all_edges]
            rows = torch.cat([rows, torch.tensor(busiest)]).unique()
        kept = rows if is_sampled else None
        exact, rounded = (reference(self, inputs, dtype, kept) for dtype in (torch.float64, self.torch_dtype))
        terms = int(inputs.all_edges[1].bincount().max()), inputs.all_edges.size(1)
        return {"": budgets(exact, rounded, self.torch_dtype, *terms, compared=rows, is_sampled=is_sampled)}

    def computation(self) -> Computation:
        """The computation of the peer; a compiled one compiles in its first calls, which must see the real graph."""
        if "compile" not in self.peer:
            # GPU kernels are compiled for the real graph.
            plain = Shape("", 16, 64, self.shape.heads, self.shape.channels)
            build(replace(self, shape=plain) if self.device == "cpu" else self).forward_backward()
        computation = build(self)
        if "compile" in self.peer:
            pyg_peers.settle(computation)
        return Replayed(**vars(computation)) if "replayed" in self.peer else computation

    def measure(self, reference: Path | None) -> Row:
        """Also measures how much the machine copies and computes per second."""
        row = super().measure(reference)
        if self.has_reference:
            return row
        rates = {name: getattr(measuring, name)(self.device) for name in ("copy_rate", "operation_rate")}
        return {**row, **rates}


@dataclass
class Inputs:
    """The inputs, with the same numbers for all peers."""

    edge_index: Tensor
    """`[2, E]`, as passed to layers; those of GAT and GATv2 add the self-loops themselves."""
    edge_attr: Tensor | None
    all_edges: Tensor
    """`[2, E]`, with self-loops."""
    all_attr: Tensor | None
    tensors: dict[str, Tensor]
    """The layer's `x`, or the inputs of attention: query, key, value (GATv2's key is its value) and vector."""
    layer: Any
    """gattn's layer, whose weights all peers share; `None` for attention only."""
    grad: Tensor
    """The gradient of the output."""
    fresh: bool

    def graphs(self, make: Callable[[Tensor], Any] = lambda edge_index: edge_index) -> Callable[[], Any]:
        """Returns the graph of each call, made from the edges once, or from a new copy of them each time."""
        if self.fresh:
            return lambda: make(self.edge_index.clone())
        graph = make(self.edge_index)
        return lambda: graph

    def to(self, device: str) -> Inputs:
        """Moves the inputs of the peers to their device; the rest is for the reference and stays."""
        return replace(
            self,
            edge_index=self.edge_index.to(device),
            edge_attr=None if self.edge_attr is None else self.edge_attr.to(device),
            tensors={name: tensor.to(device) for name, tensor in self.tensors.items()},
            layer=None if self.layer is None else self.layer.to(device),
            grad=self.grad.to(device),
        )


def draw_edges(shape: Shape) -> Tensor:
    """`[2, E]`, without self-loops."""
    if shape.dataset is not None:
        return remove_self_loops(gattn.datasets.load(shape.dataset).edge_index)[0]
    generator = torch.Generator().manual_seed(SEED)
    if shape.power_law:
        return draw_power_law(shape, generator)
    target = torch.randint(shape.num_targets, (shape.edges,), generator=generator)
    if shape.hub is not None:
        target[torch.rand(shape.edges, generator=generator) < 1 / 3] = shape.hub
    size = shape.nodes // shape.graphs
    first = target // size * size
    source = first + (target - first + torch.randint(1, size, (shape.edges,), generator=generator)) % size
    return torch.stack([source, target])


def draw_power_law(shape: Shape, generator: torch.Generator) -> Tensor:
    """`[2, E]` with independent ends, so that the k-th busiest node of N has about E / (2 sqrt(k N)) edges."""
    ends = torch.rand(2, shape.edges, generator=generator, dtype=torch.float64).square_().mul_(shape.nodes).long()
    source, target = torch.randperm(shape.nodes, generator=generator)[ends]
    return torch.stack([torch.where(source == target, (source + 1) % shape.nodes, source), target])


def draw(case: Case) -> Inputs:
    """Draws the inputs, which are the same for every peer."""
    shape, dtype = case.shape, case.torch_dtype
    generator = torch.Generator().manual_seed(SEED)

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    edges = draw_edges(shape)
    nodes, targets, heads, channels = shape.nodes, shape.num_targets, shape.heads, shape.channels
    all_edges, _ = add_self_loops(edges, num_nodes=targets)
    if case.part != "layer":
        tensors = {"value": randn(nodes, heads, channels)}
        if case.layer == "gat":
            tensors |= {"query": randn(nodes, heads), "key": randn(nodes, heads)}
        elif case.layer == "gatv2":
            tensors = {"query": randn(nodes, heads, channels), "key": tensors["value"]}
            tensors["vector"] = (torch.randn(heads, channels, generator=generator) / math.sqrt(channels)).to(dtype)
        elif case.layer == "transformer":
            tensors |= {"query": randn(nodes, heads, channels), "key": randn(nodes, heads, channels)}
        grad = randn(nodes, heads, channels)
        return Inputs(all_edges, None, all_edges, None, tensors, None, grad, shape.fresh)

    adds_loops = case.layer != "transformer"
    edge_index, edge_attr, all_attr = (edges if adds_loops else all_edges), None, None
    if case.edge_features:
        edge_attr = all_attr = randn(edge_index.size(1), EDGE_CHANNELS)
        if adds_loops:
            _, all_attr = add_self_loops(edges, edge_attr.double(), fill_value="mean", num_nodes=targets)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(SEED)
        layer = CONVS[case.layer][0](
            shape.in_channels, channels, heads=heads, edge_dim=EDGE_CHANNELS if case.edge_features else None
        )
    x, grad = randn(nodes, shape.in_channels), randn(targets, heads * channels)
    return Inputs(edge_index, edge_attr, all_edges, all_attr, {"x": x}, layer.to(dtype), grad, shape.fresh)


def score_of(case: Case, vector: Tensor | None) -> gattn.Score:
    """The layer's score: gattn's own or, for `gattn-custom`, as a user would write it."""
    score: gattn.Score = gattn.DotScore()
    if case.layer == "gat":
        score = gattn.GATScore(NEGATIVE_SLOPE)
    elif vector is not None:
        score = gattn.AdditiveScore(vector, negative_slope=NEGATIVE_SLOPE)
    return CustomScore(score) if case.peer == "gattn-custom" else score


class CustomScore(gattn.Score):
    """A score of which the kernels only know the logits."""

    def __init__(self, score: gattn.Score):
        self.score = score
        self.scalar = score.scalar  # type: ignore[misc] # set on this object only

    def logits(self, query: Tensor | None, key: Tensor, edge: Tensor | None) -> Tensor:
        """See `gattn.Score.logits`."""
        return self.score.logits(query, key, edge)

    def tensors(self) -> tuple[Tensor, ...]:
        """See `gattn.Score.tensors`."""
        return self.score.tensors()


class Replayed(Computation):
    """One whose results are in memory that its next call overwrites."""

    def compared(self, results: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `Computation.compared`."""
        return super().compared({name: result.clone() for name, result in results.items()})


# The reference -------------------------------------------------------------------------------------------------------


def reference(case: Case, inputs: Inputs, dtype: torch.dtype, kept: Tensor | None = None) -> dict[str, Tensor]:
    """Output and gradients of gattn's reference in `dtype`, some targets at a time, summed in float64.

    Args:
        case: The problem.
        inputs: The result of `draw`.
        dtype: The dtype of the computation.
        kept: The nodes whose rows the results contain. (default: all)
    """
    tensors = dict(inputs.tensors)
    kept = torch.arange(case.shape.num_targets) if kept is None else kept
    row_of = torch.full((case.shape.nodes,), -1).index_copy_(0, kept, torch.arange(kept.numel()))
    layer, parameters = None, {}
    if inputs.layer is not None:
        layer = copy.deepcopy(inputs.layer).to(dtype)
        layer.add_self_loops = False
        parameters = dict(layer.named_parameters())
    elif "vector" in tensors:
        parameters = {"vector": tensors.pop("vector").to(dtype).requires_grad_()}
    totals = {name: torch.zeros(parameter.shape, dtype=torch.float64) for name, parameter in parameters.items()}
    if layer is None:
        rows_of = {name: (kept.numel(), *tensor.shape[1:]) for name, tensor in tensors.items()}
        totals = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in rows_of.items()} | totals
    output = torch.zeros(kept.numel(), *inputs.grad.shape[1:], dtype=torch.float64)
    for edges in chunks(inputs.all_edges[1]):
        (sources, source), (targets, target) = (row[edges].unique(return_inverse=True) for row in inputs.all_edges)
        graph = gattn.SparseGraph(
            torch.stack([source, target]), num_sources=sources.numel(), num_targets=targets.numel()
        )
        places = {name: targets if name == "query" else sources for name in tensors}
        with gattn.backend("reference"):
            if layer is not None:
                attr = None if inputs.all_attr is None else inputs.all_attr[edges].to(dtype)
                leaves = parameters
                x = tensors["x"]
                out = layer((x[sources].to(dtype), x[targets].to(dtype)), graph, attr)
            else:
                rows = {name: tensor[places[name]].to(dtype).requires_grad_() for name, tensor in tensors.items()}
                leaves = rows | parameters
                score = score_of(case, parameters.get("vector"))
                out = gattn.attend(rows["query"], rows["key"], rows.get("value", rows["key"]), graph, score=score)
        grads = torch.autograd.grad(out, list(leaves.values()), inputs.grad[targets].to(dtype))
        is_kept = row_of[targets] >= 0
        output[row_of[targets[is_kept]]] = out.detach()[is_kept].double()
        for name, grad in zip(leaves, grads, strict=True):
            if name in places:
                is_kept = row_of[places[name]] >= 0
                totals[name].index_add_(0, row_of[places[name][is_kept]], grad[is_kept].double())
            else:
                totals[name] += grad
    gradients = {f"gradient of {name}": total for name, total in totals.items()}
    return {"output without autograd": output, "output": output, **gradients}


def chunks(target: Tensor, size: int = CHUNK_EDGES) -> Iterator[Tensor]:
    """Edges sorted by target, about `size` at a time, but with all edges of a target together."""
    degree = torch.bincount(target)
    chunk = (degree.cumsum(0) - degree) // size
    order = target.argsort(stable=True)
    counts = chunk[target[order]].unique_consecutive(return_counts=True)[1]
    yield from order.split(counts.tolist())


# The peers -----------------------------------------------------------------------------------------------------------


def build(case: Case, inputs: Inputs | None = None) -> Computation:
    """A peer's computation, with the inputs that `draw` returns."""
    inputs = (draw(case) if inputs is None else inputs).to(case.device)
    if case.part == "gather":
        return build_gather(case, inputs)
    if case.part == "layer":
        return build_layer(case, inputs)
    for tensor in inputs.tensors.values():
        tensor.requires_grad_()
    builders = {"gattn": build_gattn, "dgl": build_dgl, "flex": build_flex}
    return builders.get(case.peer.split("-")[0], build_pyg)(case, inputs)


def build_gather(case: Case, inputs: Inputs) -> Computation:
    """The yardstick: the sum of each target's neighbours, without attention."""
    call = gather(inputs.edge_index, inputs.tensors["value"].flatten(1), case.shape.num_targets)
    return Computation(call, {}, inputs.grad)


def gather(edge_index: Tensor, value: Tensor, num_targets: int) -> Callable[[], Tensor]:
    """The sum of one row of values per edge, for each target."""
    source, target = edge_index
    source = source[target.argsort(stable=True)]
    degree = target.bincount(minlength=num_targets)
    offsets = degree.cumsum(0) - degree
    return lambda: F.embedding_bag(source, value, offsets, mode="sum")


def build_gattn(case: Case, inputs: Inputs) -> Computation:
    """Attention with gattn's kernels."""
    leaves = inputs.tensors
    query, key, value = leaves["query"], leaves["key"], leaves.get("value", leaves["key"])
    score, backend, nodes = score_of(case, leaves.get("vector")), BACKENDS[case.device], case.shape.nodes

    def forward(edge_index: Any) -> Tensor:
        return gattn.attend(query, key, value, edge_index, score=score, backend=backend)

    call = pyg_peers.compiled(case.peer, forward)
    graph = (
        inputs.graphs()
        if call is not forward
        else inputs.graphs(lambda edges: gattn.SparseGraph(edges, num_sources=nodes, num_targets=nodes))
    )
    return Computation(lambda: call(graph()), leaves, inputs.grad)


def build_pyg(case: Case, inputs: Inputs) -> Computation:
    """The computation of PyG's layers after their projections."""
    leaves = inputs.tensors
    query, key, value = leaves["query"], leaves["key"], leaves.get("value", leaves["key"])
    conv = CONVS[case.layer][1](1, case.shape.channels, heads=case.shape.heads).to(case.device)
    if "vector" in leaves:
        leaves["vector"] = conv.att = torch.nn.Parameter(leaves["vector"].detach().unsqueeze(0))

    def forward(edge_index: Tensor) -> Tensor:
        if case.layer == "gat":
            alpha = conv.edge_updater(edge_index, alpha=(key, query), edge_attr=None, size=None)
            return conv.propagate(edge_index, x=(value, value), alpha=alpha, size=None)
        if case.layer == "gatv2":
            alpha = conv.edge_updater(edge_index, x=(key, query), edge_attr=None)
            return conv.propagate(edge_index, x=(key, query), alpha=alpha)
        out = conv.propagate(edge_index, query=query, key=key, value=value, edge_attr=None)
        conv._alpha = None
        return out

    call, edges = pyg_peers.compiled(case.peer, forward), pyg_graphs(case, inputs)
    return Computation(lambda: call(edges()), leaves, inputs.grad)


def pyg_graphs(case: Case, inputs: Inputs) -> Callable[[], Any]:
    """The edges of each call in the peer's form; for `sorted`, inputs get them, with self-loops, in order."""
    if "sorted" in case.peer:
        # A layer that adds self-loops to sorted edges would lose their order.
        edges, attr = pyg_peers.by_target(inputs.all_edges, inputs.all_attr)
        inputs.edge_index = edges.to(case.device)
        inputs.edge_attr = None if attr is None else attr.to(case.device, case.torch_dtype)
    return inputs.graphs(pyg_peers.wrap(case.peer, case.shape.nodes, case.shape.num_targets))


def import_dgl() -> Any:
    """DGL, with an empty module in place of an unused one that cannot be loaded beside recent versions of PyTorch."""
    part = ModuleType("dgl.distributed")
    vars(part).update(DistGraph=object, DistDataLoader=object)
    os.environ.setdefault("DGLBACKEND", "pytorch")  # otherwise, DGL writes a file to the home folder
    sys.modules.setdefault(part.__name__, part)
    return importlib.import_module("dgl")


def build_dgl(case: Case, inputs: Inputs) -> Computation:
    """The computation of DGL's layers after their projections, with its fused operators."""
    dgl, leaves = import_dgl(), inputs.tensors
    dgl.utils.set_num_threads(case.threads)
    query, key, value = leaves["query"], leaves["key"], leaves.get("value", leaves["key"])
    graphs = inputs.graphs(lambda edges: dgl.graph(tuple(edges), num_nodes=case.shape.nodes))

    def forward() -> Tensor:
        graph = graphs()
        if case.layer == "gat":
            logits = F.leaky_relu(dgl.ops.u_add_v(graph, key.unsqueeze(-1), query.unsqueeze(-1)), NEGATIVE_SLOPE)
        elif case.layer == "gatv2":
            hidden = F.leaky_relu(dgl.ops.u_add_v(graph, key, query), NEGATIVE_SLOPE)
            logits = (hidden * leaves["vector"]).sum(-1, keepdim=True)
        else:
            logits = dgl.ops.u_dot_v(graph, key, query) / math.sqrt(case.shape.channels)
        return dgl.ops.u_mul_e_sum(graph, value, dgl.ops.edge_softmax(graph, logits))

    return Computation(forward, leaves, inputs.grad)


def build_flex(case: Case, inputs: Inputs) -> Computation:
    """Dot products by FlexAttention, which takes `[1, H, N, C]`, and has no gradients on CPUs."""
    call = pyg_peers.compiled(case.peer, flex_attention)
    graphs = inputs.graphs(functools.partial(flex_graph, nodes=case.shape.nodes))

    def forward() -> Tensor:
        pairs, score = graphs()
        heads_first = (inputs.tensors[name].transpose(0, 1).unsqueeze(0) for name in ("query", "key", "value"))
        out: Tensor = call(*heads_first, score_mod=score, block_mask=pairs)
        return out.squeeze(0).transpose(0, 1)

    return Computation(forward, inputs.tensors, inputs.grad)


def flex_graph(edge_index: Tensor, nodes: int) -> tuple[BlockMask, Callable[..., Tensor]]:
    """The blocks of pairs with edges, and a score that counts a pair as often as there are edges between its ends."""
    (source, target), size = edge_index, FLEX_BLOCK
    blocks = -(-nodes // size)
    used, block = (target // size * blocks + source // size).unique(return_inverse=True)
    if (used.numel() + 1) * size**2 > FLEX_PAIRS:
        raise ValueError(f"edges are in {used.numel()} blocks of {size} × {size} pairs, which are too many to store")
    pair, number = ((block * size + target % size) * size + source % size).unique(return_counts=True)
    counts = torch.zeros(used.numel() + 1, size, size, dtype=torch.uint8, device=source.device)
    counts.view(-1)[pair] = number.to(torch.uint8)
    place = torch.full((blocks * blocks,), used.numel(), device=source.device)  # the last block, which has no edges
    place[used] = torch.arange(used.numel(), device=source.device)
    place = place.view(blocks, blocks)

    def count(target: Tensor, source: Tensor) -> Tensor:
        return counts[place[target // size, source // size], target % size, source % size]

    def has_edge(batch: Tensor, head: Tensor, target: Tensor, source: Tensor) -> Tensor:
        return count(target, source) > 0

    def counted(score: Tensor, batch: Tensor, head: Tensor, target: Tensor, source: Tensor) -> Tensor:
        return score + count(target, source).float().log()

    is_used = place < used.numel()
    order = is_used.int().argsort(dim=1, descending=True, stable=True).int()
    numbers = is_used.sum(1, dtype=torch.int32)
    pairs = BlockMask.from_kv_blocks(
        numbers[None, None], order[None, None], BLOCK_SIZE=size, mask_mod=has_edge, seq_lengths=(nodes, nodes)
    )
    return pairs, counted


def build_layer(case: Case, inputs: Inputs) -> Computation:
    """A whole layer, gattn's or PyG's, with the same weights."""
    layer, shape, every = inputs.layer, case.shape, inputs.tensors["x"]
    is_ours = case.peer.startswith("gattn")
    graph = inputs.graphs() if is_ours else pyg_graphs(case, inputs)
    edge_attr = inputs.edge_attr
    x = every if shape.targets is None else (every, every[: shape.targets])
    if is_ours:
        ours = pyg_peers.compiled(case.peer, layer)

        def forward() -> Tensor:
            with gattn.backend(BACKENDS[case.device]):
                return ours(x, graph(), edge_attr)

        return Computation(forward, dict(layer.named_parameters()), inputs.grad)
    edge_dim = EDGE_CHANNELS if case.edge_features else None
    conv = CONVS[case.layer][1](shape.in_channels, shape.channels, heads=shape.heads, edge_dim=edge_dim)
    conv.to(case.device).load_state_dict(layer.state_dict())
    conv.add_self_loops = "sorted" not in case.peer  # TransformerConv ignores it
    call = pyg_peers.compiled(case.peer, conv)
    return Computation(lambda: call(x, graph(), edge_attr), dict(conv.named_parameters()), inputs.grad)
