"""Speed and memory of graph attention, side by side with PyG and DGL: `python -m benchmarks.kernels [--device cuda]`.

Two parts: *attention* alone (projected features in, output out; autograd, allocation and graph look-up included), and
the whole *layer* as a network's first (128 input channels that need no gradient, projections included, the same weights
on all sides), with and without edge features. Two modes: forward, and forward + backward to all inputs that need it.

The peer *gattn-custom* is gattn with the same score written as a user's own, whose logits alone the kernels get.

On the CPU, everything is measured twice: under glibc's allocator as it comes (`default`), and told to keep freed memory
(`kept`).

The results are compared with gattn's reference in float64. The unit of a *gather* is the time that `embedding_bag`
takes to sum one row of features per edge, over the same edges.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import itertools
import math
import os
import platform
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NotRequired

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
import torch_geometric.typing
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor
from torch_geometric.utils import add_self_loops, remove_self_loops

import gattn
from benchmarks.framework import measuring, reports
from benchmarks.framework.benchmark import Benchmark
from benchmarks.framework.measuring import MODES, Computation, Expected, Measured, Measurement, Times, budgets, measured
from benchmarks.framework.options import MOST, fill, folder, seconds, unique, whole
from benchmarks.framework.processes import BenchmarkError, Message
from benchmarks.framework.reports import BLACK, BLUE, GREEN, ORANGE, RED, Line, machines, markdown, median, ratio
from benchmarks.framework.results import VERSIONS, Row

CONVS = {
    "gat": (gattn.nn.GATConv, pyg.GATConv),
    "gatv2": (gattn.nn.GATv2Conv, pyg.GATv2Conv),
    "transformer": (gattn.nn.TransformerConv, pyg.TransformerConv),
}
PEERS = ("gattn", "pyg", "pyg-scatter", "pyg-compile", "dgl", "gattn-custom")
ATTENTION_ONLY = ("gattn-custom", "dgl")
"""The peers that have no layers."""
DTYPES = ("float32", "bfloat16")
BACKENDS = {"cpu": "cpu", "cuda": "triton"}
ALLOCATORS = {
    "default": {},
    "kept": {
        "MALLOC_MMAP_THRESHOLD_": str(2**32),
        "MALLOC_TRIM_THRESHOLD_": str(2**34),
        "MALLOC_TOP_PAD_": str(2**28),
    },
}
"""What tells glibc at the start of a process how to deal with freed memory: nothing, or to keep all of it."""
EDGE_FEATURES = {"both": (False, True), "with": (True,), "without": (False,)}
COLOURS = {"gattn": BLUE, "pyg-scatter": ORANGE, "pyg-compile": RED, "dgl": GREEN}
LAYER_COLOURS = {"gat": BLUE, "gatv2": ORANGE, "transformer": GREEN}

EDGE_CHANNELS = 16
NEGATIVE_SLOPE = 0.2
SEED = 0

CHUNK_EDGES = 2**17
"""The reference takes about this many edges at a time, always with all edges of a target."""

CHECKED_ROWS = 4096
"""This many random rows of results with one row per node are compared; gradients of parameters are compared whole."""

SAMPLED_NODES = 1_000_000
"""For graphs with more nodes, the reference keeps only the rows that are compared, so that memory suffices."""

#: How many rows of features a kernel must at least fetch per edge, forward and backward.
GATHERED_ROWS = {"gat": (1, 1), "gatv2": (1, 1), "transformer": (2, 3)}

#: How many it must at least read or write per node besides: forward, the targets' queries and the output; backward, all
#: inputs, the output, its gradient and the inputs' gradients.
STREAMED_ROWS = {"gat": (1, 4), "gatv2": (2, 6), "transformer": (2, 8)}

#: Floating-point operations on each channel of an edge, forward and backward. Forward, values are multiplied and summed
#: (2); logits take none, a sum, a LeakyReLU and a dot product (5), or a dot product (2). Backward, each gradient, the
#: weights' included, takes a product and a sum, and hidden layers and logits are computed again.
OPERATIONS = {"gat": (2, 4), "gatv2": (7, 13), "transformer": (4, 10)}


# The cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A graph, random or of a data set, and the widths of the features. Self-loops come on top of the edges."""

    name: str
    nodes: int
    edges: int
    heads: int
    channels: int
    hub: int | None = None
    """The node that a third of the edges point to."""
    dataset: str | None = None
    graphs: int = 1
    """The nodes form this many graphs of one size, side by side."""
    power_law: bool = False
    """Whether the numbers of neighbours follow a power law with exponent 3."""
    in_channels: int = 128
    """Of a layer's input."""
    targets: int | None = None
    """The first this many nodes alone are targets, as in a batch of sampled neighbours. (default: all)"""
    fresh: bool = False
    """Whether each call gets a new tensor of edges, so that nothing that was kept about another helps it."""

    @property
    def num_targets(self) -> int:
        """The number of targets."""
        return self.nodes if self.targets is None else self.targets


#: What `--shape` names; a hub graph has two variants.
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
LARGE = ("products",)
"""Shapes that are not measured on a CPU unless they are named."""

SMALL = Shape("small", 5_000, 50_000, 4, 16)


class Result(Measured):
    """The columns of a measurement."""

    forward_backward: NotRequired[Times]
    """Of all but the yardstick."""
    copy_rate: NotRequired[float]
    """Of the yardstick, like the next one."""
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
        """The key of a row; older rows lack what has a default."""
        plain = asdict(Shape("", 0, 0, 0, 0))
        return super().key_of({"device": "cpu", "allocator": "default", **row, "shape": {**plain, **row["shape"]}})

    @property
    def environment(self) -> Mapping[str, str]:
        """Its allocator's."""
        return ALLOCATORS[self.allocator]

    @property
    def has_reference(self) -> bool:
        """Whether this is not the yardstick."""
        return self.part != "gather"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The number type."""
        return getattr(torch, self.dtype)

    def problem(self) -> tuple[object, ...]:
        """What cases have in common that must have the same result."""
        return self.shape, self.part, self.layer, self.edge_features, self.dtype

    def prepare_process(self) -> None:
        """Also silences what PyG and PyTorch's compiler say about themselves."""
        super().prepare_process()
        torch_geometric.typing.WITH_TORCH_SCATTER = self.peer == "pyg-scatter"
        warnings.filterwarnings("ignore")

    def references(self) -> dict[str, dict[str, Expected]]:
        """The results of gattn's reference, at random rows, the hub's row and, of large graphs, the busiest nodes'."""
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
        """The peer's; a compiled one is compiled by its first call, which must see the real graph."""
        if self.peer != "pyg-compile":
            # A GPU's kernels are tuned on what they see first.
            plain = Shape("", 16, 64, self.shape.heads, self.shape.channels)
            build(replace(self, shape=plain) if self.device == "cpu" else self).forward_backward()
        computation = build(self)
        if self.peer == "pyg-compile":
            computation.forward_backward()
        return computation

    def measure(self, reference: Path | None) -> Row:
        """Also measures what the machine copies and computes per second."""
        row = super().measure(reference)
        if self.has_reference:
            return row
        rates = {name: getattr(measuring, name)(self.device) for name in ("copy_rate", "operation_rate")}
        return {**row, **rates}


@dataclass
class Inputs:
    """What all peers compute from: the same numbers for each."""

    edge_index: Tensor
    """`[2, E]`, as it is passed; GAT's and GATv2's layers add the self-loops themselves."""
    edge_attr: Tensor | None
    all_edges: Tensor
    """`[2, E]`, with self-loops."""
    all_attr: Tensor | None
    tensors: dict[str, Tensor]
    """The layer's `x`; or what attention takes: query, key, value (GATv2's key is its value) and vector."""
    layer: Any
    """gattn's layer, whose weights all peers share; `None` for attention alone."""
    grad: Tensor
    """Gradient of the output."""
    fresh: bool

    def graphs(self, make: Callable[[Tensor], Any] = lambda edge_index: edge_index) -> Callable[[], Any]:
        """Returns what each call gets: a graph that is made of the edges once, or of new ones each time."""
        if self.fresh:
            return lambda: make(self.edge_index.clone())
        graph = make(self.edge_index)
        return lambda: graph

    def to(self, device: str) -> Inputs:
        """Moves what peers take to their device; the rest is for the reference, and stays."""
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
    """`[2, E]`, both ends independent, so that the k-th busiest node of N has about E / (2 sqrt(k N)) edges."""
    ends = torch.rand(2, shape.edges, generator=generator, dtype=torch.float64).square_().mul_(shape.nodes).long()
    source, target = torch.randperm(shape.nodes, generator=generator)[ends]
    return torch.stack([torch.where(source == target, (source + 1) % shape.nodes, source), target])


def draw(case: Case) -> Inputs:
    """Draws the inputs; the same for every peer."""
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
    """The layer's score, by gattn's name or, for `gattn-custom`, as if a user had written it."""
    score: gattn.Score = gattn.DotScore()
    if case.layer == "gat":
        score = gattn.GATScore(NEGATIVE_SLOPE)
    elif vector is not None:
        score = gattn.AdditiveScore(vector, negative_slope=NEGATIVE_SLOPE)
    return CustomScore(score) if case.peer == "gattn-custom" else score


class CustomScore(gattn.Score):
    """A score of which the kernels know nothing but its logits."""

    def __init__(self, score: gattn.Score):
        self.score = score
        self.scalar = score.scalar  # type: ignore[misc] # an object's own

    def logits(self, query: Tensor | None, key: Tensor, edge: Tensor | None) -> Tensor:
        """See `gattn.Score.logits`."""
        return self.score.logits(query, key, edge)

    def tensors(self) -> tuple[Tensor, ...]:
        """See `gattn.Score.tensors`."""
        return self.score.tensors()


# The reference -------------------------------------------------------------------------------------------------------


def reference(case: Case, inputs: Inputs, dtype: torch.dtype, kept: Tensor | None = None) -> dict[str, Tensor]:
    """Output and gradients by gattn's reference path in `dtype`, some targets at a time, summed in float64.

    Args:
        case: The problem.
        inputs: What `draw` drew.
        dtype: What is computed in.
        kept: The nodes whose rows the results have. (default: all)
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
    """Edges sorted by target, about `size` at a time; all edges of a target come together."""
    degree = torch.bincount(target)
    chunk = (degree.cumsum(0) - degree) // size
    order = target.argsort(stable=True)
    counts = chunk[target[order]].unique_consecutive(return_counts=True)[1]
    yield from order.split(counts.tolist())


# The peers -----------------------------------------------------------------------------------------------------------


def build(case: Case) -> Computation:
    """A peer's computation."""
    inputs = draw(case).to(case.device)
    if case.part == "gather":
        return build_gather(case, inputs)
    if case.part == "layer":
        return build_layer(case, inputs)
    for tensor in inputs.tensors.values():
        tensor.requires_grad_()
    builders = {"gattn": build_gattn, "gattn-custom": build_gattn, "dgl": build_dgl}
    return builders.get(case.peer, build_pyg)(case, inputs)


def build_gather(case: Case, inputs: Inputs) -> Computation:
    """The yardstick: the sum of each target's neighbours, without attention."""
    source, target = inputs.edge_index
    source = source[target.argsort(stable=True)]
    degree = target.bincount(minlength=case.shape.nodes)
    offsets = degree.cumsum(0) - degree
    value = inputs.tensors["value"].flatten(1)
    return Computation(lambda: F.embedding_bag(source, value, offsets, mode="sum"), {}, inputs.grad)


def build_gattn(case: Case, inputs: Inputs) -> Computation:
    """Attention by gattn's kernels."""
    leaves = inputs.tensors
    query, key, value = leaves["query"], leaves["key"], leaves.get("value", leaves["key"])
    score, backend, nodes = score_of(case, leaves.get("vector")), BACKENDS[case.device], case.shape.nodes
    graph = inputs.graphs(lambda edges: gattn.SparseGraph(edges, num_sources=nodes, num_targets=nodes))
    return Computation(
        lambda: gattn.attend(query, key, value, graph(), score=score, backend=backend), leaves, inputs.grad
    )


def compiled(case: Case, function: Any) -> Any:
    """The function, compiled if the peer is."""
    return torch.compile(function, dynamic=False) if case.peer == "pyg-compile" else function


def build_pyg(case: Case, inputs: Inputs) -> Computation:
    """What PyG's layers do after their projections."""
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

    call, edges = compiled(case, forward), inputs.graphs()
    return Computation(lambda: call(edges()), leaves, inputs.grad)


def import_dgl() -> Any:
    """DGL, with a stand-in for a part that does not load beside recent versions of PyTorch, and is not used here."""
    part = ModuleType("dgl.distributed")
    vars(part).update(DistGraph=object, DistDataLoader=object)
    os.environ.setdefault("DGLBACKEND", "pytorch")  # otherwise, it writes a file to the home folder
    sys.modules.setdefault(part.__name__, part)
    return importlib.import_module("dgl")


def build_dgl(case: Case, inputs: Inputs) -> Computation:
    """What DGL's layers do after their projections, by its fused operators."""
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


def build_layer(case: Case, inputs: Inputs) -> Computation:
    """A whole layer, gattn's or PyG's, with the same weights."""
    layer, graph, shape = inputs.layer, inputs.graphs(), case.shape
    every, edge_attr = inputs.tensors["x"], inputs.edge_attr
    x = every if shape.targets is None else (every, every[: shape.targets])
    if case.peer == "gattn":

        def forward() -> Tensor:
            with gattn.backend(BACKENDS[case.device]):
                return layer(x, graph(), edge_attr)

        return Computation(forward, dict(layer.named_parameters()), inputs.grad)
    edge_dim = EDGE_CHANNELS if case.edge_features else None
    conv = CONVS[case.layer][1](shape.in_channels, shape.channels, heads=shape.heads, edge_dim=edge_dim)
    conv.to(case.device).load_state_dict(layer.state_dict())
    call = compiled(case, conv)
    return Computation(lambda: call(x, graph(), edge_attr), dict(conv.named_parameters()), inputs.grad)


# The report ----------------------------------------------------------------------------------------------------------


def bytes_moved(case: Case, mode: str) -> int:
    """The least that must move: rows and an index for each edge, and each node's rows, read or written once."""
    shape = case.shape
    if case.part == "gather":
        gathered, streamed, passes = 1, 1, 1
    else:
        passes = 1 if mode == "forward" else 2
        gathered, streamed = sum(GATHERED_ROWS[case.layer][:passes]), sum(STREAMED_ROWS[case.layer][:passes])
    row = shape.heads * shape.channels * case.torch_dtype.itemsize
    num_edges = shape.edges + shape.nodes
    return num_edges * (gathered * row + passes * torch.int64.itemsize) + shape.nodes * streamed * row


def operations(case: Case, mode: str) -> int:
    """The least that must be computed: floating-point operations on the channels of each edge."""
    passes = 1 if mode == "forward" else 2
    per_channel = 1 if case.part == "gather" else sum(OPERATIONS[case.layer][:passes])
    return (case.shape.edges + case.shape.nodes) * case.shape.heads * case.shape.channels * per_channel


class Report:
    """Rows beside each other.

    Args:
        rows: The rows by case, in the order of the table.
    """

    def __init__(self, rows: dict[Case, Row]):
        self.rows = rows
        self.allocators = [name for name in ALLOCATORS if any(case.allocator == name for case in rows)]

    def peer(self, case: Case, **changes: Any) -> Row | None:
        """The row of a case that differs in this; `None` if there is none."""
        return self.rows.get(replace(case, **changes))

    def gather(self, case: Case) -> Row | None:
        """The yardstick of a case; `None` where there is none for its type."""
        return self.peer(case, part="gather", layer="", edge_features=False, peer="embedding_bag")

    def copy_rate(self, case: Case) -> float | None:
        """Bytes that the case's device copies in a second, if they were measured."""
        return (self.gather(replace(case, dtype="float32")) or {}).get("copy_rate")

    def rooflines(self) -> list[Case]:
        """The yardsticks of one allocator that say what the machine can do."""
        last = self.allocators[-1]
        return [case for case, row in self.rows.items() if case.allocator == last and "operation_rate" in row]

    def lines(self) -> list[Line]:
        """The table of times, with the allocators side by side."""
        lines = []
        for case in unique(replace(case, allocator=self.allocators[0]) for case in self.rows):
            times = {name: self.times(replace(case, allocator=name)) for name in self.allocators}
            sides = {
                title + f", {name}" * (name != "default"): times[name][title]
                for title in times[case.allocator]
                for name in self.allocators
            }
            lines.append({**self.names(case), **sides})
        return lines

    def names(self, case: Case) -> Line:
        """What is measured."""
        layer = case.layer + " + edge features" * case.edge_features
        return {
            "shape": case.shape.name,
            "part": case.part,
            "layer": layer or "–",
            "dtype": case.dtype,
            "peer": case.peer,
        }

    def times(self, case: Case) -> Line:
        """Its times, and how they compare with its peers' under the same allocator."""
        row = self.rows.get(case, {"outcome": "–"})
        eager, fused = self.peer(case, peer="pyg"), self.peer(case, peer="pyg-compile")
        return {
            **{f"{title}, ms": reports.quartiles(row, mode) for mode, title in MODES.items()},
            "forward, × PyG": ratio(median(eager, "forward"), median(row, "forward")),
            "× PyG": ratio(median(eager, "forward_backward"), median(row, "forward_backward")),
            "× compiled": ratio(median(fused, "forward_backward"), median(row, "forward_backward")),
        }

    def memory(self, case: Case, row: Row) -> Line:
        """A line of the table of memory: how much there is, what the system does about it, how fast it is used."""
        eager = self.peer(case, peer="pyg") or {}
        line = {
            **self.names(case),
            "allocator": case.allocator,
            "peak, MB": reports.megabytes(row),
            "memory, PyG's ÷": ratio(eager.get("peak_bytes"), row.get("peak_bytes")),
        }
        for mode, title in MODES.items():
            line[f"{title}, page faults"] = reports.per_call(row, mode, "page_faults", ".1f")
            line[f"{title}, system, ms"] = reports.per_call(row, mode, "system", ".3f", 1000)
        is_counted = case.part == "attention" and case.peer == "gattn"
        for mode, title in MODES.items():
            time, unit = median(row, mode), median(self.gather(case), "forward")
            line[f"{title}, gathers"] = f"{time / unit:.1f}" if is_counted and time and unit else "–"
            rate = bytes_moved(case, mode) / time if time and (is_counted or case.part == "gather") else None
            line[f"{title}, GB/s"] = f"{rate / 1e9:.1f}" if rate else "–"
            if case.device != "cpu":
                copied = self.copy_rate(case)
                line[f"{title}, of a copy's"] = f"{rate / copied:.0%}" if rate and copied else "–"
        return line

    def remarks(self) -> list[str]:
        """Ratios between lines, then what happened where no time is given."""
        remarks = []
        for case, row in self.rows.items():
            if row["outcome"] != "ok":
                remarks.append(f"{case}: {row['outcome']}{': ' * bool(row['reason'])}{row['reason']}")
            plain = self.peer(case, shape=SHAPES["arxiv"][0])
            if case.shape.hub is not None and plain is not None and case.part != "gather":
                share = ratio(median(row, "forward_backward"), median(plain, "forward_backward"), ".2f")
                remarks.append(f"{case}: {share} the time of the plain graph, forward + backward.")
            if case.dtype != "float32":
                single = self.peer(case, dtype="float32")
                share = ratio(median(single, "forward"), median(row, "forward"), ".2f")
                remarks.append(f"{case}: forward {share} as fast as float32.")
        return remarks


def notes(rows: Sequence[Row], missing: dict[str, str]) -> list[str]:
    """What a reader of the table must know."""
    names = (*VERSIONS, "torch-scatter", "dgl", "triton", "cuda", "driver", "python")
    is_gpu = any(row.get("device", "cpu") != "cpu" for row in rows)
    memory = "memory that PyTorch has handed out" if is_gpu else "resident memory"
    limits = [[f"{row[name] / 1e9:.0f}" for row in rows if name in row] for name in ("copy_rate", "operation_rate")]
    copies, products = map(", ".join, limits)
    return [
        *machines(rows, names, ", {threads} thread(s)"),
        f"Medians with quartiles. Peak: {memory} above the inputs in the first forward + backward, the graph's "
        "preparation included (compiled: after compilation).",
        *[
            "Times are between events of the GPU, with warm caches. Of a copy's: the GB/s, which count each gathered "
            f"row once for every edge, over what the card moves in a large copy of its own ({copies} GB/s)."
        ]
        * is_gpu,
        "× PyG, × compiled: how many times faster than PyG eager and compiled, forward + backward. Gathers: in units "
        "of one embedding_bag over the same edges. GB/s: the least that must move, over the time.",
        *[
            f"The machine copied {copies} GB/s, and multiplied large matrices with {products} billion floating-point "
            "operations per second."
        ]
        * bool(copies and products),
        "Page faults and the system's time (of all threads): means per call.",
        *[
            "Kept: glibc keeps freed memory instead of handing it back to the system "
            f"({', '.join(f'{name}={value}' for name, value in ALLOCATORS['kept'].items())}). Ratios are between "
            "measurements under the same allocator."
        ]
        * any(row.get("allocator") == "kept" for row in rows),
        *(f"{peer}: {reason}" for peer, reason in missing.items()),
    ]


def draw_speedup(report: Report) -> Figure:
    """Bars: how many times faster than PyG eager under the same allocator, forward + backward."""
    parts = [("attention", False), ("layer", False), ("layer", True)]
    present = {(case.part, case.edge_features) for case in report.rows}
    parts = [part for part in parts if part in present] or parts[:1]
    cases = [case for case in report.rows if case.part != "gather"]
    compared = [case for case in cases if report.peer(case, peer="pyg", dtype="float32") is not None]
    groups = list(dict.fromkeys((case.shape, case.layer) for case in compared or cases))
    measured_peers = {(case.peer, case.allocator) for case in report.rows}
    shown = [pair for pair in itertools.product(COLOURS, ALLOCATORS) if pair in measured_peers]
    size = max(6.0, max(1.1, 0.2 * len(shown)) * len(groups) + 1.5), 2.7 * len(parts) + 0.4
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(parts), 1, squeeze=False, sharex=True)
    colours = [to_rgba(COLOURS[peer], 0.5 if name == "kept" else 1.0) for peer, name in shown]
    for (part, has_features), axis in zip(parts, axes[:, 0], strict=True):
        for case, row in report.rows.items():
            is_shown = (case.part, case.edge_features, case.dtype) == (part, has_features, "float32")
            if not is_shown or (case.shape, case.layer) not in groups:
                continue
            group = groups.index((case.shape, case.layer))
            eager, own = report.peer(case, peer="pyg"), median(row, "forward_backward")
            reference_time = median(eager, "forward_backward")
            if case.peer == "pyg" and row["outcome"] != "ok":
                middle = group + 0.4 * (report.allocators.index(case.allocator) - (len(report.allocators) - 1) / 2)
                axis.text(middle, 1.1, f"PyG:\n{row['outcome']}", ha="center", va="bottom", fontsize=7)
            elif (case.peer, case.allocator) in shown and reference_time and own:
                number = shown.index((case.peer, case.allocator))
                place = group + (number - (len(shown) - 1) / 2) * 0.8 / len(shown)
                factor = reference_time / own
                axis.bar(place, factor - 1, 0.8 / len(shown), bottom=1, color=colours[number])
                above = factor >= 1
                axis.annotate(
                    f"{factor:.3g}×",
                    (place, factor),
                    xytext=(0, 2 if above else -2),
                    textcoords="offset points",
                    ha="center",
                    va="bottom" if above else "top",
                    fontsize=8 if len(shown) < 4 else 7,
                    rotation=0 if len(shown) < 4 else 90,
                )
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_yscale("log", subs=[])
        axis.margins(y=0.2)
        low, high = axis.get_ylim()
        axis.set_ylim(min(low, 0.9), max(high, 12))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
        title = {"attention": "attention alone", "layer": "whole layer"}[part]
        axis.set(title=title + ", with edge features" * has_features, ylabel="times faster")
        axis.grid(axis="y", alpha=0.25)
        axis.set_xticks(range(len(groups)), [f"{shape.name}\n{layer}" for shape, layer in groups], fontsize=8)
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in colours]
    labels = [peer + ", kept memory" * (name == "kept") for peer, name in shown]
    figure.legend(handles, labels, loc="outside lower center", ncols=max(len(shown), 1), fontsize=8)
    figure.suptitle("Forward + backward, compared with PyG eager", fontsize=10)
    return figure


def draw_roofline(report: Report) -> Figure:
    """Operations per second against operations per byte, and the machine's limits; one panel for each shape."""
    yardsticks = report.rooflines()
    figure = Figure(figsize=(3.1 * max(len(yardsticks), 1) + 0.6, 3.4), layout="constrained")
    axes = figure.subplots(1, max(len(yardsticks), 1), squeeze=False, sharey=True)[0]
    markers = {"forward": "o", "forward_backward": "s"}
    for yardstick, axis in zip(yardsticks, axes, strict=False):
        limits = report.rows[yardstick]
        points = [("gather", BLACK, "x", yardstick, "forward")]
        for (layer, colour), (mode, marker) in itertools.product(LAYER_COLOURS.items(), markers.items()):
            case = replace(yardstick, part="attention", layer=layer, peer="gattn")
            points.append((layer, colour, marker, case, mode))
        for name, colour, marker, case, mode in points:
            time = median(report.rows.get(case), mode)
            if time:
                amount = operations(case, mode)
                place = amount / bytes_moved(case, mode), amount / time / 1e9
                label = name if mode == "forward" else None
                axis.plot(*place, marker, color=colour, label=label, markersize=5)
        low, high = axis.get_xlim()
        places = [low / 2, limits["operation_rate"] / limits["copy_rate"], high * 2]
        roof = [min(x * limits["copy_rate"], limits["operation_rate"]) / 1e9 for x in sorted(places)]
        axis.plot(sorted(places), roof, color=BLACK, linewidth=0.8)
        axis.set(xscale="log", yscale="log", title=yardstick.shape.name, xlabel="operations per byte")
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("10⁹ operations per second")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle("○ forward, □ forward + backward; line: what copies and matrix products reach", fontsize=9)
    return figure


# The benchmark -------------------------------------------------------------------------------------------------------


class Kernels(Benchmark[Case]):
    """Measures each peer on each shape."""

    name = "kernels"

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the options."""
        add = parser.add_argument
        text = f"graphs and widths (default: all; on a CPU not {', '.join(LARGE)})"
        add("--shape", nargs="+", choices=SHAPES, help=text)
        add("--device", default="cpu", choices=BACKENDS, help="where to compute (default: cpu)")
        add("--layers", nargs="+", default=CONVS, choices=CONVS, help="kinds of layer (default: all)")
        add("--peers", nargs="+", choices=PEERS, help="who is measured (default: all)")
        text = "of whole layers, which hub graphs do without (default: both)"
        add("--edge-features", choices=EDGE_FEATURES, help=text)
        text = "number types; others than float32 are for gattn alone (default: float32)"
        add("--dtypes", nargs="+", default=["float32"], choices=DTYPES, help=text)
        text = "how glibc deals with freed memory (default: both; with --quick or on a GPU, as it comes)"
        add("--allocator", choices=("both", *ALLOCATORS), help=text)
        text = "threads (default: PyTorch's, here %(default)s)"
        add("--threads", type=whole(1, MOST), default=torch.get_num_threads(), help=text)
        add("--repeats", type=whole(1, 10**9), help="calls that are timed, at most (default: 30)")
        text = f"or until this much time has passed, after {measuring.MIN_REPEATS} calls (default: 20)"
        add("--seconds", type=seconds, help=text)
        text = "seconds after which a process is ended (default: %(default)s)"
        add("--timeout", type=seconds, default=1200.0, help=text)
        text = "folder of results, table and picture (%(default)s)"
        add("--out", type=folder, default=Path("runs/kernels"), help=text)
        text = "under a minute: where nothing else is said, Cora's shape, a small graph, few repeats, no compiled PyG"
        add("--quick", action="store_true", help=text)

    @classmethod
    def check_options(cls, options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        """Fills in the defaults of `--quick`, and finds the shapes."""
        if options.device == "cuda" and not torch.cuda.is_available():
            parser.exit(2, "error: --device cuda needs a GPU that PyTorch can use, and finds none\n")
        if options.device != "cpu" or platform.libc_ver()[0] != "glibc":
            if options.allocator in ("both", "kept"):
                parser.error(f"--allocator {options.allocator} is for the CPU, where the C library is glibc")
            options.allocator = "default"
        if options.quick:
            peers = [peer for peer in PEERS if peer != "pyg-compile"]
            fill(options, {"peers": peers, "allocator": "default", "repeats": 10, "seconds": 0.3})
        fill(options, {"peers": PEERS, "allocator": "both", "repeats": 30, "seconds": 20.0})
        if options.shape is None and options.quick:
            options.shapes = [*SHAPES["cora"], SMALL]
        else:
            usual = [name for name in SHAPES if options.device != "cpu" or name not in LARGE]
            options.shapes = [shape for name in unique(options.shape or usual) for shape in SHAPES[name]]
        if options.edge_features is not None and all(shape.hub is not None for shape in options.shapes):
            parser.error("--edge-features is for whole layers, which hub graphs do without")

    def find_peers(self) -> list[str]:
        """The peers that can be imported."""
        modules = {"pyg-scatter": "torch_scatter", "dgl": "dgl"}
        for name in self.options.peers:
            try:
                import_dgl() if name == "dgl" else importlib.import_module(modules.get(name, "gattn"))
            except ModuleNotFoundError as error:
                is_there = error.name != modules[name]
                self.skipped[name] = f"cannot be imported: {error}" if is_there else "not installed"
            except Exception as error:  # a build for another PyTorch raises errors of many kinds
                self.skipped[name] = f"cannot be imported: {str(error).splitlines()[0]}"
        return [name for name in unique(self.options.peers) if name not in self.skipped]

    def find_shapes(self) -> list[Shape]:
        """The shapes that can be had; those of data sets get their real size."""
        found = []
        for shape in self.options.shapes:
            if shape.dataset is not None:
                try:
                    data = gattn.datasets.load(shape.dataset)
                except gattn.datasets.DatasetUnavailableError as error:
                    self.skipped[shape.name] = str(error)
                    continue
                num_edges = remove_self_loops(data.edge_index)[0].size(1)
                shape = replace(shape, nodes=data.num_nodes, edges=num_edges)
            found.append(shape)
        return found

    def cases(self) -> list[Case]:
        """All measurements; those that share a reference follow each other, and of these, those with one allocator."""
        options, peers, cases = self.options, self.find_peers(), []
        fixed = (options.threads, options.repeats, options.seconds, options.device)
        allocators = ALLOCATORS if options.allocator == "both" else (options.allocator,)
        for shape in self.find_shapes():
            parts = []
            if shape.targets is None:
                parts.append(("attention", False))
                cases += [Case(shape, "gather", "", False, "float32", "embedding_bag", *fixed, a) for a in allocators]
            if shape.hub is None:
                parts += [("layer", has_features) for has_features in EDGE_FEATURES[options.edge_features or "both"]]
            kinds = itertools.product(parts, unique(options.layers), unique(options.dtypes), allocators, peers)
            for (part, has_features), layer, dtype, allocator, peer in kinds:
                is_only_ours = shape.hub is not None or dtype != "float32"
                if (is_only_ours and peer != "gattn") or (part == "layer" and peer in ATTENTION_ONLY):
                    continue
                cases.append(Case(shape, part, layer, has_features, dtype, peer, *fixed, allocator))
        if not any(case.has_reference for case in cases):
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.skipped.items())
            raise BenchmarkError(f"nothing can be measured: {reasons or 'these peers take no part in these shapes'}")
        return cases

    def run(self, cases: Sequence[Case]) -> Generator[Message[Case], None, None]:
        """Measures."""
        return measured(cases, self.options.timeout)

    def report(self, rows: dict[Case, Row]) -> None:
        """The tables, of which a terminal shows a part, and the picture."""
        report = Report(rows)
        device = "GPU" if any(case.device != "cpu" for case in rows) else "CPU"
        lines, remarks = report.lines(), notes(list(rows.values()), self.skipped)
        memory = [report.memory(case, row) for case, row in rows.items()]
        pictures = {"speedup.png": draw_speedup(report)}
        if report.rooflines():
            pictures["roofline.png"] = draw_roofline(report)
        self.publish(
            f"Graph attention on this machine's {device}",
            lines,
            [*report.remarks(), *remarks],
            {"memory.md": markdown(memory, remarks), **pictures},
            headings={
                column: column.replace("forward + backward", "fwd+bwd").replace("forward", "fwd")
                for column in lines[0]
                if column != "dtype" and not column.startswith("forward, ×") and any(x[column] != "–" for x in lines)
            },
            shorten=lambda line: {
                **line,
                "peer": line["peer"] + f", {line['dtype']}" * (line["dtype"] != "float32"),
                "layer": line["layer"].replace("edge features", "edges"),
            },
        )


if __name__ == "__main__":
    Kernels.main()
