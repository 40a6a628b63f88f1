"""Speed and memory of graph attention, side by side with PyG and DGL: `python -m benchmarks.kernels [--device cuda]`.

Two parts: *attention* alone (projected features in, output out; autograd, allocation and graph look-up included), and
the whole *layer* as a network's first (128 input channels that need no gradient, projections included, the same weights
on all sides), with and without edge features. Two modes: forward, and forward + backward to all inputs that need it.

Every measurement has a process of its own: running out of memory is a result. Nothing is timed before its output and
its gradients were compared with a float64 reference. Units of a *gather*: the time that `embedding_bag` takes to sum,
over the same edges, one row of features for each.

Every finished measurement is appended to a results file at once, and is not made again.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NotRequired

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
import torch_geometric.typing
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor
from torch_geometric.utils import add_self_loops, remove_self_loops

import gattn
from benchmarks.command_line import MOST, folder, seconds, session, whole
from benchmarks.measuring import (
    FINAL,
    MIN_REPEATS,
    VERSIONS,
    Measured,
    Times,
    check,
    copy_rate,
    median,
    outcome,
    peak_above,
    quartiles,
    ratio,
    run_apart,
    timed,
)
from benchmarks.reports import print_table, save_figure, write_table
from benchmarks.results import Machine, ResultsFile, machine

LAYERS = ("gat", "gatv2", "transformer")
PEERS = ("gattn", "pyg", "pyg-scatter", "pyg-compile", "dgl")
DTYPES = ("float32", "bfloat16")
BACKENDS = {"cpu": "cpu", "cuda": "triton"}
EDGE_FEATURES = {"both": (False, True), "with": (True,), "without": (False,)}

IN_CHANNELS = 128
EDGE_CHANNELS = 16
NEGATIVE_SLOPE = 0.2
SEED = 0

CHUNK_EDGES = 2**17
"""The reference takes so many edges at a time, and all those of a target."""

CHECKED_ROWS = 4096
"""Of a result with one row a node, so many are compared, drawn at random; parameters' gradients are compared whole."""

SAMPLED_NODES = 1_000_000
"""Of graphs with more nodes, the reference keeps the compared rows only, so that memory suffices."""

#: How many rows of features a kernel must at least fetch for each edge, forward and backward.
GATHERED_ROWS = {"gat": (1, 1), "gatv2": (1, 1), "transformer": (2, 3)}

#: How many it must at least read or write for each node besides: forward targets' queries and the output, backward all
#: inputs, the output, its gradient and the inputs' gradients.
STREAMED_ROWS = {"gat": (1, 4), "gatv2": (2, 6), "transformer": (2, 8)}

#: Results with one row a node.
NODE_RESULTS = ("output without autograd", "output", "gradient of query", "gradient of key", "gradient of value")

#: From Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = {"gattn": "#0072B2", "pyg-scatter": "#E69F00", "pyg-compile": "#D55E00", "dgl": "#009E73"}


@dataclass(frozen=True)
class Shape:
    """A graph, random or of a data set, and the width of the features. Self-loops come on top of the edges."""

    name: str
    nodes: int
    edges: int
    heads: int
    channels: int
    hub: int | None = None
    """The node that a third of the edges point to."""
    dataset: str | None = None
    graphs: int = 1
    """The nodes form so many graphs of one size, side by side."""
    power_law: bool = False
    """Whether numbers of neighbours follow a power law with exponent 3."""


#: What `--shape` names; a hub graph has two variants.
SHAPES = {
    "cora": (Shape("cora", 2_708, 10_556, 8, 8),),
    "mid": (Shape("mid", 42_000, 580_000, 8, 32),),
    "arxiv": (Shape("arxiv", 169_343, 2_330_000, 4, 64),),
    "hub": (
        Shape("hub first", 169_343, 2_330_000, 4, 64, hub=0),
        Shape("hub last", 169_343, 2_330_000, 4, 64, hub=169_342),
    ),
    "photo": (Shape("photo", 7_650, 238_162, 8, 32, dataset="photo"),),
    "molecules": (Shape("molecules", 250_000, 560_000, 8, 16, graphs=10_000),),
    "products": (Shape("products", 2_400_000, 30_000_000, 4, 32, power_law=True),),
}
LARGE = ("products",)
"""Shapes that a CPU is spared unless they are named."""

SMALL = Shape("small", 5_000, 50_000, 4, 16)


@dataclass(frozen=True)
class Case:
    """One measurement, made in a process of its own."""

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

    def __str__(self) -> str:
        words = [self.shape.name, self.part, self.layer, "edge features" * self.edge_features, self.dtype, self.peer]
        return " ".join(filter(None, words))

    def problem(self) -> tuple[Any, ...]:
        """What cases have in common that must have the same result."""
        return self.shape, self.part, self.layer, self.edge_features, self.dtype


@dataclass
class Inputs:
    """What all peers compute from, the same numbers for each."""

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

    def to(self, device: str) -> Inputs:
        """What peers take, on their device; the rest is for the reference, and stays."""
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
    target = torch.randint(shape.nodes, (shape.edges,), generator=generator)
    if shape.hub is not None:
        target[torch.rand(shape.edges, generator=generator) < 1 / 3] = shape.hub
    size = shape.nodes // shape.graphs
    first = target // size * size
    source = first + (target - first + torch.randint(1, size, (shape.edges,), generator=generator)) % size
    return torch.stack([source, target])


def draw_power_law(shape: Shape, generator: torch.Generator) -> Tensor:
    """`[2, E]`: both ends by themselves, so that the k-th busiest node of N has about E / (2 sqrt(k N)) edges."""
    ends = torch.rand(2, shape.edges, generator=generator, dtype=torch.float64).square_().mul_(shape.nodes).long()
    source, target = torch.randperm(shape.nodes, generator=generator)[ends]
    return torch.stack([torch.where(source == target, (source + 1) % shape.nodes, source), target])


def draw(case: Case) -> Inputs:
    """Draws the inputs; the same for every peer."""
    shape, dtype = case.shape, getattr(torch, case.dtype)
    generator = torch.Generator().manual_seed(SEED)

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    edges = draw_edges(shape)
    nodes, heads, channels = shape.nodes, shape.heads, shape.channels
    all_edges, _ = add_self_loops(edges, num_nodes=nodes)
    if case.part != "layer":
        tensors = {"value": randn(nodes, heads, channels)}
        if case.layer == "gat":
            tensors |= {"query": randn(nodes, heads), "key": randn(nodes, heads)}
        elif case.layer == "gatv2":
            tensors = {"query": randn(nodes, heads, channels), "key": tensors["value"]}
            tensors["vector"] = (torch.randn(heads, channels, generator=generator) / math.sqrt(channels)).to(dtype)
        elif case.layer == "transformer":
            tensors |= {"query": randn(nodes, heads, channels), "key": randn(nodes, heads, channels)}
        return Inputs(all_edges, None, all_edges, None, tensors, None, randn(nodes, heads, channels))

    adds_loops = case.layer != "transformer"
    edge_index, edge_attr, all_attr = (edges if adds_loops else all_edges), None, None
    if case.edge_features:
        edge_attr = all_attr = randn(edge_index.size(1), EDGE_CHANNELS)
        if adds_loops:
            _, all_attr = add_self_loops(edges, edge_attr.double(), fill_value="mean", num_nodes=nodes)
    conv = {"gat": gattn.nn.GATConv, "gatv2": gattn.nn.GATv2Conv, "transformer": gattn.nn.TransformerConv}[case.layer]
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(SEED)
        layer = conv(IN_CHANNELS, channels, heads=heads, edge_dim=EDGE_CHANNELS if case.edge_features else None)
    x, grad = randn(nodes, IN_CHANNELS), randn(nodes, heads * channels)
    return Inputs(edge_index, edge_attr, all_edges, all_attr, {"x": x}, layer.to(dtype), grad)


def score_of(case: Case, vector: Tensor | None) -> gattn.Score:
    """The layer's score, by gattn's name."""
    if case.layer == "gat":
        return gattn.GATScore(NEGATIVE_SLOPE)
    if vector is not None:
        return gattn.AdditiveScore(vector, negative_slope=NEGATIVE_SLOPE)
    return gattn.DotScore()


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
    kept = torch.arange(case.shape.nodes) if kept is None else kept
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
        graph = gattn.SparseGraph(torch.stack([source, target]), sources.numel(), targets.numel())
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
    """Edges by target, about `size` at a time; all edges of a target come together."""
    degree = torch.bincount(target)
    chunk = (degree.cumsum(0) - degree) // size
    order = target.argsort(stable=True)
    counts = chunk[target[order]].unique_consecutive(return_counts=True)[1]
    yield from order.split(counts.tolist())


def write_reference(case: Case, path: Path) -> None:
    """Writes what `check` needs: rows of the exact results, and how far from them a result may be.

    The budget is derived, not tuned: four times what the reference itself loses in the case's dtype, a few units in the
    last place of the scale, and what a float32 sum of so many terms loses that are added one after another, a unit for
    the root of their number: a target's edges, and for a parameter's gradient all edges. The scale is the largest
    element; for gradients of parameters the largest of them all, as some vanish (a bias of keys shifts all logits of a
    target), and what is left of them is rounding. Of large graphs, scale and loss are those of the compared rows.
    """
    prepare_process(case)
    inputs = draw(case)
    nodes, hub = case.shape.nodes, case.shape.hub
    rows = torch.randperm(nodes, generator=torch.Generator().manual_seed(SEED))[:CHECKED_ROWS]
    if hub is not None:
        rows = torch.cat([rows, torch.tensor([hub])])
    is_sampled = nodes > SAMPLED_NODES
    if is_sampled:
        busiest = [int(ends.bincount().argmax()) for ends in inputs.all_edges]
        rows = torch.cat([rows, torch.tensor(busiest)]).unique()
    exact, rounded = (
        reference(case, inputs, dtype, rows if is_sampled else None)
        for dtype in (torch.float64, getattr(torch, case.dtype))
    )
    places = torch.arange(rows.numel()) if is_sampled else rows
    of_parameters = [value.abs().max().item() for name, value in exact.items() if name not in NODE_RESULTS]
    last_place = torch.finfo(getattr(torch, case.dtype)).eps
    results = {}
    for name, value in exact.items():
        if name in NODE_RESULTS:
            scale, terms = value.abs().max().item(), int(inputs.all_edges[1].bincount().max())
        else:
            scale, terms = max(of_parameters), inputs.all_edges.size(1)
        loss = (rounded[name] - value).abs().max().item()
        budget = 4 * loss + (8 * last_place + math.sqrt(terms) * torch.finfo(torch.float32).eps) * scale
        results[name] = {
            "exact": value[places] if name in NODE_RESULTS else value,
            "rows": rows if name in NODE_RESULTS else None,
            "scale": scale,
            "budget": budget,
        }
    torch.save(results, path)


# The peers -----------------------------------------------------------------------------------------------------------


class Computation:
    """A peer's forward pass, and its gradients.

    Args:
        case: Which peer, on what.
    """

    def __init__(self, case: Case):
        inputs = draw(case).to(case.device)
        build = build_layer if case.part == "layer" else BUILDERS.get(case.peer, build_pyg)
        self.call, self.leaves = build(case, inputs)
        self.grad = inputs.grad

    def forward(self) -> Tensor:
        """The output, computed without autograd."""
        with torch.no_grad():
            return self.call()

    def forward_backward(self) -> dict[str, Tensor]:
        """The output, and the gradients of all inputs that need one."""
        out = self.call()
        grads = torch.autograd.grad(out, list(self.leaves.values()), self.grad)
        named = {f"gradient of {name}": grad for name, grad in zip(self.leaves, grads, strict=True)}
        return {"output": out.detach(), **named}


Built = tuple[Callable[[], Tensor], dict[str, Tensor]]
"""A forward pass, and the tensors that it is differentiated for."""


def build_gather(case: Case, inputs: Inputs) -> Built:
    """The yardstick: the sum of each target's neighbours, no attention."""
    source, target = inputs.edge_index
    source = source[target.argsort(stable=True)]
    degree = target.bincount(minlength=case.shape.nodes)
    offsets = degree.cumsum(0) - degree
    value = inputs.tensors["value"].flatten(1)
    return (lambda: F.embedding_bag(source, value, offsets, mode="sum")), {}


def differentiable(inputs: Inputs) -> dict[str, Tensor]:
    """The inputs of attention, with gradients asked for."""
    return {name: tensor.requires_grad_() for name, tensor in inputs.tensors.items()}


def build_gattn(case: Case, inputs: Inputs) -> Built:
    """Attention by gattn's kernels."""
    leaves = differentiable(inputs)
    query, key, value = leaves["query"], leaves["key"], leaves.get("value", leaves["key"])
    graph = gattn.SparseGraph(inputs.edge_index, case.shape.nodes, case.shape.nodes)
    score = score_of(case, leaves.get("vector"))
    backend = BACKENDS[case.device]
    return (lambda: gattn.attend(query, key, value, graph, score=score, backend=backend)), leaves


def pyg_conv(layer: str) -> Any:
    """PyG's layer of that name."""
    return {"gat": pyg.GATConv, "gatv2": pyg.GATv2Conv, "transformer": pyg.TransformerConv}[layer]


def compiled(case: Case, function: Any) -> Any:
    """The function, compiled if the peer is."""
    return torch.compile(function, dynamic=False) if case.peer == "pyg-compile" else function


def build_pyg(case: Case, inputs: Inputs) -> Built:
    """What PyG's layers do after their projections."""
    edge_index, leaves = inputs.edge_index, differentiable(inputs)
    query, key, value = leaves["query"], leaves["key"], leaves.get("value", leaves["key"])
    conv = pyg_conv(case.layer)(1, case.shape.channels, heads=case.shape.heads).to(case.device)
    if "vector" in leaves:
        leaves["vector"] = conv.att = torch.nn.Parameter(leaves["vector"].detach().unsqueeze(0))

    def forward() -> Tensor:
        if case.layer == "gat":
            alpha = conv.edge_updater(edge_index, alpha=(key, query), edge_attr=None, size=None)
            return conv.propagate(edge_index, x=(value, value), alpha=alpha, size=None)
        if case.layer == "gatv2":
            alpha = conv.edge_updater(edge_index, x=(key, query), edge_attr=None)
            return conv.propagate(edge_index, x=(key, query), alpha=alpha)
        out = conv.propagate(edge_index, query=query, key=key, value=value, edge_attr=None)
        conv._alpha = None
        return out

    return compiled(case, forward), leaves


def build_dgl(case: Case, inputs: Inputs) -> Built:
    """What DGL's layers do after their projections, by its fused operators."""
    dgl = importlib.import_module("dgl")
    leaves = differentiable(inputs)
    query, key, value = leaves["query"], leaves["key"], leaves.get("value", leaves["key"])
    graph = dgl.graph(tuple(inputs.edge_index), num_nodes=case.shape.nodes)

    def forward() -> Tensor:
        if case.layer == "gat":
            logits = F.leaky_relu(dgl.ops.u_add_v(graph, key.unsqueeze(-1), query.unsqueeze(-1)), NEGATIVE_SLOPE)
        elif case.layer == "gatv2":
            hidden = F.leaky_relu(dgl.ops.u_add_v(graph, key, query), NEGATIVE_SLOPE)
            logits = (hidden * leaves["vector"]).sum(-1, keepdim=True)
        else:
            logits = dgl.ops.u_dot_v(graph, key, query) / math.sqrt(case.shape.channels)
        return dgl.ops.u_mul_e_sum(graph, value, dgl.ops.edge_softmax(graph, logits))

    return forward, leaves


def build_layer(case: Case, inputs: Inputs) -> Built:
    """A whole layer, gattn's or PyG's, with the same weights."""
    layer, graph = inputs.layer, inputs.edge_index
    x, edge_attr = inputs.tensors["x"], inputs.edge_attr
    if case.peer == "gattn":

        def forward() -> Tensor:
            with gattn.backend(BACKENDS[case.device]):
                return layer(x, graph, edge_attr)

        return forward, dict(layer.named_parameters())
    edge_dim = EDGE_CHANNELS if case.edge_features else None
    conv = pyg_conv(case.layer)(IN_CHANNELS, case.shape.channels, heads=case.shape.heads, edge_dim=edge_dim)
    conv.to(case.device).load_state_dict(layer.state_dict())
    call = compiled(case, conv)
    return (lambda: call(x, graph, edge_attr)), dict(conv.named_parameters())


#: Who computes attention alone, apart from PyG.
BUILDERS = {"gattn": build_gattn, "dgl": build_dgl, "embedding_bag": build_gather}


# One measurement -----------------------------------------------------------------------------------------------------


def prepare_process(case: Case) -> None:
    """Settings that hold for a whole process."""
    torch.set_num_threads(case.threads)
    torch_geometric.typing.WITH_TORCH_SCATTER = case.peer == "pyg-scatter"
    warnings.filterwarnings("ignore")  # what PyG and PyTorch's compiler say about themselves


def measure(case: Case, expected: Path | None) -> dict[str, Any]:
    """Checks a peer, then takes its memory and its times.

    Args:
        case: What to measure.
        expected: What `write_reference` wrote; `None` for the yardstick, which is forward only and has no reference.
    """
    prepare_process(case)
    if case.peer != "pyg-compile":
        # Loads code and starts threads, which are no memory of the computation's.
        first = case
        if case.device == "cpu":  # a GPU's kernels are tuned on what they see first
            plain = Shape("", 16, 64, case.shape.heads, case.shape.channels)
            first = replace(case, shape=plain)
        warm_up = Computation(first)
        warm_up.forward() if expected is None else warm_up.forward_backward()
        del warm_up
    computation = Computation(case)
    if expected is None:
        _, peak_bytes = peak_above(computation.forward, case.device)
        forward = timed(computation.forward, case.repeats, case.seconds, case.device)
        row = {"outcome": "ok", "reason": "", "peak_bytes": peak_bytes, "forward": forward}
        return row if case.device == "cpu" else {**row, "copy_rate": copy_rate(case.device)}
    if case.peer == "pyg-compile":
        computation.forward_backward()
    results, peak_bytes = peak_above(computation.forward_backward, case.device)
    results["output without autograd"] = computation.forward()
    errors = check(results, torch.load(expected, weights_only=True))
    # Written so that NaN fails.
    wrong = [name for name, (error, budget) in errors.items() if not error <= budget]
    if wrong:
        error, budget = errors[wrong[0]]
        reason = f"{wrong[0]} is off by {error:.1e} of its largest element, where {budget:.1e} is allowed"
        return {"outcome": "WRONG", "reason": reason}
    del results
    return {
        "outcome": "ok",
        "reason": "",
        "peak_bytes": peak_bytes,
        "errors": {name: {"error": error, "budget": budget} for name, (error, budget) in errors.items()},
        "forward": timed(computation.forward, case.repeats, case.seconds, case.device),
        "forward_backward": timed(computation.forward_backward, case.repeats, case.seconds, case.device),
    }


# Results -------------------------------------------------------------------------------------------------------------


class Result(Measured):
    """What a measurement has beside its case and the machine."""

    forward_backward: NotRequired[Times]
    """Of all but the yardstick."""
    copy_rate: NotRequired[float]
    """Of the yardstick on a GPU."""


def key(row: dict[str, Any]) -> str:
    """What makes two rows the same measurement; older rows lack what has a default."""
    row = {"device": "cpu", **row, "shape": {**asdict(Shape("", 0, 0, 0, 0)), **row["shape"]}}
    return repr([row.get(name) for name in (*Case.__dataclass_fields__, *VERSIONS)])


def planned(case: Case) -> str:
    """The key that the case's row will have."""
    return key({**asdict(case), **machine(case.device)})


def recorded(results: ResultsFile) -> dict[str, dict[str, Any]]:
    """The newest row of each measurement, by key."""
    return {key(row): row for row in results.rows(Case, outcome(Result), Machine)}


def execute(cases: Sequence[Case], results: ResultsFile, timeout: float, console: Console) -> None:
    """Makes the measurements that are not yet in the results file."""
    done = {name for name, row in recorded(results).items() if row["outcome"] in FINAL}
    pending = [case for case in cases if planned(case) not in done]
    if len(pending) < len(cases):
        text = f"{len(cases) - len(pending)} of {len(cases)} measurements are in {results.path} already."
        console.print(text, soft_wrap=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, tempfile.TemporaryDirectory() as folder:
        task = progress.add_task("", total=len(cases), completed=len(cases) - len(pending))
        problem, expected, outcome, reason = None, Path(folder) / "reference.pt", "ok", ""
        for case in pending:
            is_yardstick = case.part == "gather"
            if not is_yardstick and case.problem() != problem:
                progress.update(task, description=f"{case}: reference")
                problem = case.problem()
                outcome, reason = run_apart(write_reference, case, expected, timeout=timeout)
            progress.update(task, description=str(case))
            if is_yardstick or outcome == "ok":
                row = measure_apart(case, None if is_yardstick else expected, timeout)
            else:
                row = {"outcome": "failed", "reason": f"no reference: {outcome} {reason}"}
            results.append({**asdict(case), **row, **machine(case.device)})
            progress.advance(task)


def measure_apart(case: Case, expected: Path | None, timeout: float) -> dict[str, Any]:
    """The row of a case, measured in a process of its own."""
    outcome, result = run_apart(measure, case, expected, timeout=timeout)
    return result if outcome == "ok" else {"outcome": outcome, "reason": result}


# The report ----------------------------------------------------------------------------------------------------------


def bytes_moved(case: Case, mode: str) -> int:
    """The least that must move: rows fetched for each edge and its index, and each node's rows read or written once."""
    shape = case.shape
    if case.part == "gather":
        gathered, streamed, passes = 1, 1, 1
    else:
        passes = 1 if mode == "forward" else 2
        gathered, streamed = sum(GATHERED_ROWS[case.layer][:passes]), sum(STREAMED_ROWS[case.layer][:passes])
    row = shape.heads * shape.channels * getattr(torch, case.dtype).itemsize
    num_edges = shape.edges + shape.nodes
    return num_edges * (gathered * row + passes * torch.int64.itemsize) + shape.nodes * streamed * row


class Report:
    """Rows beside each other.

    Args:
        cases: The plan, in the order of the table.
        rows: Their rows.
    """

    def __init__(self, cases: Sequence[Case], rows: Sequence[dict[str, Any]]):
        self.rows = dict(zip(cases, rows, strict=True))

    def peer(self, case: Case, **changes: Any) -> dict[str, Any] | None:
        """The row of a case that differs in this; `None` if there is none."""
        return self.rows.get(replace(case, **changes))

    def gather(self, case: Case) -> dict[str, Any] | None:
        """The yardstick of a case; `None` where there is none for its type."""
        return self.peer(case, part="gather", layer="", edge_features=False, peer="embedding_bag")

    def copy_rate(self, case: Case) -> float | None:
        """Bytes that the case's GPU copies in a second; `None` on a CPU."""
        return (self.gather(replace(case, dtype="float32")) or {}).get("copy_rate")

    def lines(self) -> list[dict[str, str]]:
        """The table."""
        return [self.line(case, row) for case, row in self.rows.items()]

    def line(self, case: Case, row: dict[str, Any]) -> dict[str, str]:
        """One line of the table."""
        eager, fused = self.peer(case, peer="pyg"), self.peer(case, peer="pyg-compile")
        layer = case.layer + " + edge features" * case.edge_features
        line = {
            "shape": case.shape.name,
            "part": case.part,
            "layer": layer or "–",
            "dtype": case.dtype,
            "peer": case.peer,
            "forward, ms": quartiles(row, "forward"),
            "forward + backward, ms": quartiles(row, "forward_backward"),
            "peak, MB": f"{row['peak_bytes'] / 1e6:.1f}" if "peak_bytes" in row else "–",
            "forward, × PyG": ratio(median(eager, "forward"), median(row, "forward")),
            "× PyG": ratio(median(eager, "forward_backward"), median(row, "forward_backward")),
            "× compiled": ratio(median(fused, "forward_backward"), median(row, "forward_backward")),
            "memory, PyG's ÷": ratio((eager or {}).get("peak_bytes"), row.get("peak_bytes")),
        }
        is_counted = case.part == "attention" and case.peer == "gattn"
        for mode, name in (("forward", "forward"), ("forward_backward", "forward + backward")):
            seconds, unit = median(row, mode), median(self.gather(case), "forward")
            line[f"{name}, gathers"] = f"{seconds / unit:.1f}" if is_counted and seconds and unit else "–"
            is_moved = seconds and (is_counted or (case.part == "gather"))
            rate = bytes_moved(case, mode) / seconds if is_moved and seconds else None
            line[f"{name}, GB/s"] = f"{rate / 1e9:.1f}" if rate else "–"
            if case.device != "cpu":
                copied = self.copy_rate(case)
                line[f"{name}, of a copy's"] = f"{rate / copied:.0%}" if rate and copied else "–"
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


def notes(rows: Sequence[dict[str, Any]], missing: dict[str, str]) -> list[str]:
    """What a reader of the table must know."""
    names = (*VERSIONS, "torch-scatter", "triton", "cuda", "driver", "python")
    is_gpu = any(row.get("device", "cpu") != "cpu" for row in rows)
    memory = "memory that PyTorch has handed out" if is_gpu else "resident memory"
    copies = [f"{row['copy_rate'] / 1e9:.0f}" for row in rows if "copy_rate" in row]
    described = {
        ", ".join(f"{name} {row[name]}" for name in names if name in row) + f", {row['threads']} thread(s)"
        for row in rows
    }
    return [
        *sorted(described),
        f"Medians with quartiles. Peak: {memory} above the inputs in the first forward + backward, the graph's "
        "preparation included (compiled: after compilation).",
        *[
            "Times are between events of the GPU, with warm caches. Of a copy's: the GB/s, which count each gathered "
            f"row once for every edge, over what the card moves in a large copy of its own ({', '.join(copies)} GB/s)."
        ]
        * is_gpu,
        "× PyG, × compiled: how many times faster than PyG eager and compiled, forward + backward. Gathers: in units "
        "of one embedding_bag over the same edges. GB/s: the least that must move, over the time.",
        *(f"{peer}: {reason}" for peer, reason in missing.items()),
    ]


def write(report: Report, missing: dict[str, str], out: Path, console: Console) -> None:
    """Prints the table, and writes it and the picture to `out`."""
    lines = report.lines()
    remarks = [*report.remarks(), *notes(list(report.rows.values()), missing)]
    print_table(compact(lines), console)
    for remark in remarks:
        console.print(remark, highlight=False, soft_wrap=True)
    write_table(out / "table.md", lines, remarks)
    draw_speedup(report, out / "speedup.png")
    console.print(f"Written: {out / 'table.md'}, {out / 'speedup.png'}", highlight=False, soft_wrap=True)


def compact(lines: Sequence[dict[str, str]]) -> Table:
    """The table for a terminal; table.md has the rest."""
    device = "GPU" if any("of a copy's" in name for name in lines[0]) else "CPU"
    table = Table(title=f"Graph attention on this machine's {device}", box=box.SIMPLE_HEAD, padding=(0, 1))
    names = {
        "shape": "shape",
        "part": "part",
        "layer": "layer",
        "peer": "peer",
        "forward, ms": "fwd, ms",
        "forward + backward, ms": "fwd+bwd, ms",
        "× PyG": "× PyG",
        "× compiled": "× comp.",
        "forward + backward, gathers": "gathers",
        "peak, MB": "MB",
    }
    for name, title in names.items():
        justify: Any = "left" if name in ("shape", "part", "layer", "peer") else "right"
        table.add_column(title, justify=justify, no_wrap=True)
    for line in lines:
        short = {
            **line,
            "peer": line["peer"] if line["dtype"] == "float32" else f"{line['peer']}, {line['dtype']}",
            "layer": line["layer"].replace("edge features", "edges"),
            "forward, ms": line["forward, ms"].split(" (")[0],
            "forward + backward, ms": line["forward + backward, ms"].split(" (")[0],
        }
        table.add_row(*(short[name] for name in names))
    return table


def draw_speedup(report: Report, path: Path) -> None:
    """Bars: how many times faster than PyG eager, forward + backward."""
    parts = [("attention", False), ("layer", False), ("layer", True)]
    present = {(case.part, case.edge_features) for case in report.rows}
    parts = [part for part in parts if part in present] or parts[:1]
    cases = [case for case in report.rows if case.part != "gather"]
    compared = [case for case in cases if report.peer(case, peer="pyg", dtype="float32") is not None]
    groups = list(dict.fromkeys((case.shape, case.layer) for case in compared or cases))
    figure, axes = plt.subplots(
        len(parts),
        1,
        figsize=(max(6.0, 1.1 * len(groups) + 1.5), 2.7 * len(parts) + 0.4),
        squeeze=False,
        sharex=True,
        layout="constrained",
    )
    shown = [peer for peer in COLOURS if any(case.peer == peer for case in report.rows)]
    for (part, has_features), axis in zip(parts, axes[:, 0], strict=True):
        for case, row in report.rows.items():
            is_shown = (case.part, case.edge_features, case.dtype) == (part, has_features, "float32")
            if not is_shown or (case.shape, case.layer) not in groups:
                continue
            group = groups.index((case.shape, case.layer))
            eager, own = report.peer(case, peer="pyg"), median(row, "forward_backward")
            reference_time = median(eager, "forward_backward")
            if case.peer == "pyg" and row["outcome"] != "ok":
                axis.text(group, 1.1, f"PyG:\n{row['outcome']}", ha="center", va="bottom", fontsize=7)
            elif case.peer in shown and reference_time and own:
                place = group + (shown.index(case.peer) - (len(shown) - 1) / 2) * 0.8 / len(shown)
                factor = reference_time / own
                axis.bar(place, factor - 1, 0.8 / len(shown), bottom=1, color=COLOURS[case.peer])
                above = factor >= 1
                axis.annotate(
                    f"{factor:.3g}×",
                    (place, factor),
                    xytext=(0, 2 if above else -2),
                    textcoords="offset points",
                    ha="center",
                    va="bottom" if above else "top",
                    fontsize=8,
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
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[peer]) for peer in shown]
    figure.legend(handles, shown, loc="outside lower center", ncols=max(len(shown), 1), fontsize=8)
    figure.suptitle("Forward + backward, compared with PyG eager", fontsize=10)
    save_figure(figure, path, dpi=100)


# The command line ----------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description=(__doc__ or "").split("\n\n")[0].split(":")[0] + "."
    )
    parser.add_argument(
        "--shape", nargs="+", choices=SHAPES, help=f"graphs and widths (default: all; on a CPU not {', '.join(LARGE)})"
    )
    parser.add_argument("--device", default="cpu", choices=BACKENDS, help="where to compute (default: cpu)")
    parser.add_argument("--layers", nargs="+", default=LAYERS, choices=LAYERS, help="kinds of layer (default: all)")
    parser.add_argument("--peers", nargs="+", choices=PEERS, help="who is measured (default: all)")
    parser.add_argument(
        "--edge-features", choices=EDGE_FEATURES, help="of whole layers, which hub graphs do without (default: both)"
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        default=["float32"],
        choices=DTYPES,
        help="number types; others than float32 are for gattn alone (default: float32)",
    )
    parser.add_argument(
        "--threads",
        type=whole(1, MOST),
        default=torch.get_num_threads(),
        help="threads (default: PyTorch's, here %(default)s)",
    )
    parser.add_argument("--repeats", type=whole(1, 10**9), help="calls that are timed, at most (default: 30)")
    parser.add_argument(
        "--seconds", type=seconds, help=f"or until so much time has passed, after {MIN_REPEATS} calls (default: 20)"
    )
    parser.add_argument(
        "--timeout", type=seconds, default=1200.0, help="seconds after which a process is ended (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=folder, default=Path("runs/kernels"), help="folder of results, table and picture (%(default)s)"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="under a minute: where nothing else is said, Cora's shape, a small graph, few repeats, no compiled PyG",
    )
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.exit(2, "error: --device cuda needs a GPU that PyTorch can use, and finds none\n")
    quick_peers = [peer for peer in PEERS if peer != "pyg-compile"]
    defaults: dict[str, Any] = {"peers": PEERS, "repeats": 30, "seconds": 20.0}
    if options.quick:
        defaults = {"peers": quick_peers, "repeats": 10, "seconds": 0.3}
    for name, default in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    if options.shape is None and options.quick:
        options.shapes = [*SHAPES["cora"], SMALL]
    else:
        usual = [name for name in SHAPES if options.device != "cpu" or name not in LARGE]
        options.shapes = [shape for name in dict.fromkeys(options.shape or usual) for shape in SHAPES[name]]
    if options.edge_features is not None and all(shape.hub is not None for shape in options.shapes):
        parser.error("--edge-features is for whole layers, which hub graphs do without")
    return options


def find_peers(names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The peers that are installed, and what is the matter with the others."""
    modules = {"pyg-scatter": "torch_scatter", "dgl": "dgl"}
    missing = {}
    for name in names:
        try:
            importlib.import_module(modules.get(name, "gattn"))
        except ModuleNotFoundError as error:
            missing[name] = "not installed" if error.name == modules[name] else f"cannot be imported: {error}"
        except Exception as error:  # a build for another PyTorch ends in errors of many kinds
            missing[name] = f"cannot be imported: {str(error).splitlines()[0]}"
    return [name for name in dict.fromkeys(names) if name not in missing], missing


def find_shapes(shapes: Sequence[Shape]) -> tuple[list[Shape], dict[str, str]]:
    """The shapes that can be had, those of data sets in their real size, and why others cannot."""
    found, missing = [], {}
    for shape in shapes:
        if shape.dataset is not None:
            try:
                data = gattn.datasets.load(shape.dataset)
            except gattn.datasets.DatasetUnavailableError as error:
                missing[shape.name] = str(error)
                continue
            num_edges = remove_self_loops(data.edge_index)[0].size(1)
            shape = replace(shape, nodes=data.num_nodes, edges=num_edges)
        found.append(shape)
    return found, missing


def plan(options: argparse.Namespace, shapes: Sequence[Shape], peers: Sequence[str]) -> list[Case]:
    """All measurements; those that share a reference follow each other."""
    cases = []
    fixed = (options.threads, options.repeats, options.seconds, options.device)
    for shape in shapes:
        cases.append(Case(shape, "gather", "", False, "float32", "embedding_bag", *fixed))
        parts = [("attention", False)]
        if shape.hub is None:
            parts += [("layer", has_features) for has_features in EDGE_FEATURES[options.edge_features or "both"]]
        for part, has_features in parts:
            for layer in dict.fromkeys(options.layers):
                for dtype in dict.fromkeys(options.dtypes):
                    for peer in peers:
                        is_only_ours = shape.hub is not None or dtype != "float32"
                        if (is_only_ours and peer != "gattn") or (peer == "dgl" and part == "layer"):
                            continue
                        cases.append(Case(shape, part, layer, has_features, dtype, peer, *fixed))
    return cases


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    options = parse(arguments)
    console = Console(markup=False)
    with session(options.out, console) as results:
        peers, missing = find_peers(options.peers)
        shapes, missing_shapes = find_shapes(options.shapes)
        missing |= missing_shapes
        cases = plan(options, shapes, peers)
        if not any(case.part != "gather" for case in cases):
            reasons = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
            sys.exit(f"error: nothing can be measured: {reasons or 'these peers take no part in these shapes'}")
        execute(cases, results, options.timeout, console)
        rows = recorded(results)
        write(Report(cases, [rows[planned(case)] for case in cases]), missing, options.out, console)


if __name__ == "__main__":
    main()
