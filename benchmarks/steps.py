"""Whole training steps, and what their time goes into: `python -m benchmarks.steps`.

A step is what a user waits for: dropout, forward, loss, backward and Adam. Both sides have the same network and
the same weights, with gattn's layers and dropout or with PyG's layers and PyTorch's dropout, these in the forms of
`benchmarks/pyg_peers.py`. Nothing is timed before outputs and gradients, without dropout, agree with float64.

Duration: 30 to 60 minutes; with `--quick`: 2 minutes.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, NotRequired, TypedDict

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import gattn
from benchmarks import pyg_peers
from benchmarks.framework.benchmark import Benchmark
from benchmarks.framework.measuring import (
    Computation,
    Expected,
    Measurement,
    Quartiles,
    Times,
    budgets,
    measured,
    timed,
    turns,
)
from benchmarks.framework.measuring import quartiles as quartiles_of
from benchmarks.framework.options import add_allocator, add_device, add_measuring, allocators, unique
from benchmarks.framework.processes import Message
from benchmarks.framework.reports import Line, factor, machines, megabytes, quartiles
from benchmarks.framework.results import VERSIONS, Row
from benchmarks.kernel_cases import SHAPES, Shape, draw_edges
from benchmarks.nodes_models import GLOBAL_RECIPES, RECIPES, network
from benchmarks.pyg_peers import PYG

SEED = 0
USUAL = {"default": ("gattn", "pyg"), "kept": ("gattn", "pyg", "pyg-sorted", "pyg-compile")}
"""Those that are measured unless they are named."""
LIBRARIES: dict[str, Any] = {"gattn": gattn.nn, "pyg": pyg}
MODELS: dict[str, Any] = {"gattn": gattn.models, "pyg": pyg.models}

CORA = SHAPES["cora"][0]
PHOTO = SHAPES["photo"][0]
MID = SHAPES["mid"][0]
MOLECULES = Shape("32 molecules", 736, 1600, 4, 16, graphs=32, in_channels=64, fresh=True)

ARXIV = SHAPES["arxiv"][0]
PEPTIDES = Shape("128 peptides", 19_328, 39_296, 4, 16, graphs=128, in_channels=64, fresh=True)

PARTS = {
    "products": ("mm", "mkldnn", "products"),
    "attention": ("attention", "softmax", "scatter", "index", "gather", "expand", "leaky", "einsum"),
    "dropout": ("drop", "bernoulli"),
    "Adam": ("optimizer", "sqrt", "addcdiv", "addcmul", "lerp"),
}
"""What an operator belongs to, by a part of its name in lower case; the first that fits."""


class Stack(torch.nn.Module):
    """Convolutions, each after dropout, with ELU between them."""

    def __init__(self, library: str, conv: str, widths: Sequence[int], heads: int, dropout: float, **options: Any):
        super().__init__()
        make = functools.partial(getattr(LIBRARIES[library], conv), **options)
        self.dropout = getattr(LIBRARIES[library], "Dropout", torch.nn.Dropout)(dropout)
        self.convs = torch.nn.ModuleList(
            make(first, last // heads, heads=heads) for first, last in itertools.pairwise(widths)
        )

    def forward(self, x: Tensor, edge_index: Any, *more: Tensor) -> Tensor:
        """Updates nodes `[N, F]`."""
        for number, conv in enumerate(self.convs):
            x = conv(self.dropout(F.elu(x) if number else x), edge_index, *more)
        return x


class Blocks(torch.nn.Module):
    """GPS blocks of GAT and attention."""

    def __init__(self, library: str, number: int, channels: int, heads: int, dropout: float):
        super().__init__()
        layers = LIBRARIES[library]
        self.blocks = torch.nn.ModuleList(
            layers.GPSConv(channels, layers.GATConv(channels, channels // heads, heads), heads, dropout)
            for _ in range(number)
        )

    def forward(self, x: Tensor, edge_index: Any, batch: Tensor) -> Tensor:
        """Updates nodes `[N, F]`."""
        for block in self.blocks:
            x = block(x, edge_index, batch)
        return x


def polynormer(library: str) -> torch.nn.Module:
    """Polynormer with both kinds of layers; PyG's global ones fail with several heads."""
    model = MODELS[library].Polynormer(PHOTO_FEATURES, 64, PHOTO_CLASSES, local_layers=3, global_layers=2)
    model._global = True
    return model


class Step(NamedTuple):
    """A network, its inputs, and what it is trained on."""

    network: Callable[[str], torch.nn.Module]
    """Makes it of the layers of a library."""
    shape: Shape
    in_channels: int
    more: Literal["", "batch", "edge_attr"] = ""
    """What it takes besides features and edges."""
    exact: str = "pyg"
    """The library that has it in float64."""
    threads: int | None = None
    """Its threads, if the option has no say."""


CORA_FEATURES, PHOTO_FEATURES, PHOTO_CLASSES, EDGE_CHANNELS = 1433, 745, 8, 16


def stack(name: str, *options: Any) -> Callable[[str], torch.nn.Module]:
    """Makes a stack of one kind of layer."""
    return lambda library: Stack(library, name, *options)


def recipe(model: str, recipe: Any) -> Callable[[str], torch.nn.Module]:
    """Makes a network of `benchmarks.nodes` for Photo."""
    return lambda library: network(recipe, PHOTO_FEATURES, PHOTO_CLASSES, model, library)


STEPS = {
    "GAT, 2 layers of 8 × 8": Step(stack("GATConv", (CORA_FEATURES, 64, 64), 8, 0.6), CORA, CORA_FEATURES),
    "GAT, 3 layers of 4 × 64": Step(stack("GATConv", (PHOTO_FEATURES, 256, 256, 256), 4, 0.5), PHOTO, PHOTO_FEATURES),
    "GATv2, 3 layers of 4 × 64": Step(
        stack("GATv2Conv", (PHOTO_FEATURES, 256, 256, 256), 4, 0.5), PHOTO, PHOTO_FEATURES
    ),
    "GAT, 3 layers of 4 × 64, larger": Step(stack("GATConv", (128, 256, 256, 256), 4, 0.5), MID, 128),
    "GAT, tunedGNN's": Step(recipe("gat", RECIPES["photo"]), PHOTO, PHOTO_FEATURES),
    "GPS, 4 blocks of 64": Step(lambda library: Blocks(library, 4, 64, 4, 0.1), MOLECULES, 64, "batch", threads=1),
    "Transformer, 4 layers of 4 × 16": Step(
        lambda library: Stack(library, "TransformerConv", [64] * 5, 4, 0.1, edge_dim=EDGE_CHANNELS),
        MOLECULES,
        64,
        "edge_attr",
        threads=1,
    ),
    "SGFormer": Step(recipe("sgformer", GLOBAL_RECIPES["sgformer"]["photo"]), PHOTO, PHOTO_FEATURES, exact="gattn"),
    "Polynormer": Step(polynormer, PHOTO, PHOTO_FEATURES, "batch"),
}
USUAL_TASKS = list(STEPS)
"""Those that are measured unless others are named."""
STEPS |= {  # in float64, PyG's layers would take tens of gigabytes on the largest graph
    "GAT, 3 layers of 4 × 64, largest": Step(stack("GATConv", (128, 256, 256, 256), 4, 0.5), ARXIV, 128, exact="gattn"),
    "GATv2, 3 layers of 4 × 64, largest": Step(
        stack("GATv2Conv", (128, 256, 256, 256), 4, 0.5), ARXIV, 128, exact="gattn"
    ),
    "GPS, 4 blocks of 64, larger": Step(lambda library: Blocks(library, 4, 64, 4, 0.1), PEPTIDES, 64, "batch"),
}
GPU_TASKS = (*list(STEPS)[len(USUAL_TASKS) :], "GPS, 4 blocks of 64", "Transformer, 4 layers of 4 × 16")
"""What `benchmarks.gpu` measures."""


class Parts(TypedDict):
    """The milliseconds of a step in each of `PARTS`, and in the rest."""

    products: float
    attention: float
    dropout: float
    Adam: float
    other: float


class Result(TypedDict):
    """The columns of a measurement."""

    outcome: Literal["ok"]
    reason: str
    peak_bytes: int
    step: Times
    without_dropout: Times
    """The same step of the network in evaluation."""
    parts: NotRequired[Parts]
    """What the profiler says of it, on CPUs, like the next one."""
    in_turns: NotRequired[Quartiles]
    """Of a batch of molecules: the peer's time over gattn's in the same process, in rounds in which both are timed."""


@dataclass(frozen=True)
class Case(Measurement):
    """One measurement."""

    result = Result

    task: str
    peer: str
    threads: int
    repeats: int
    seconds: float
    allocator: str
    device: str = field(default="cpu", kw_only=True)

    def __str__(self) -> str:
        return f"{self.task}, {self.peer}" + ", kept memory" * (self.allocator == "kept")

    def prepare_process(self) -> None:
        """Also silences warnings of PyG and PyTorch's compiler about themselves."""
        super().prepare_process()
        pyg_peers.prepare(self.peer)
        warnings.filterwarnings("ignore")

    def problem(self) -> tuple[object, ...]:
        """What is the same for all cases that must have the same result."""
        return (self.task,)

    def references(self) -> dict[str, dict[str, Expected]]:
        """The results in float64."""
        task = STEPS[self.task]
        exact, rounded = (
            computed.compared(computed.forward_backward())
            for computed in (self._build(task.exact, dtype, "cpu")[0] for dtype in (torch.float64, torch.float32))
        )
        shape = task.shape
        degree = int(draw_edges(shape)[1].bincount().max()) + 1
        return {"": budgets(exact, rounded, torch.float32, degree, shape.edges + shape.nodes)}

    def computation(self) -> Computation:
        """The network in evaluation, with the gradients of all parameters."""
        computation, self.__dict__["net"] = self._build(self.peer, torch.float32, self.device)
        if "compile" in self.peer:
            pyg_peers.settle(computation)
        return computation

    def _build(self, peer: str, dtype: torch.dtype, device: str) -> tuple[Computation, torch.nn.Module]:
        task = STEPS[self.task]
        shape, generator = task.shape, torch.Generator().manual_seed(SEED)
        torch.manual_seed(SEED)
        net = task.network("pyg")
        if peer == "gattn":
            state, net = net.state_dict(), task.network("gattn")
            net.load_state_dict(state)
        net.to(device, dtype).eval()
        x = torch.randn(shape.nodes, task.in_channels, generator=generator).to(device, dtype)
        edge_index, more = draw_edges(shape).to(device), list[Tensor]()
        if task.more == "batch":
            more = [torch.arange(shape.nodes, device=device) // (shape.nodes // shape.graphs)]
        elif task.more == "edge_attr":
            more = [torch.randn(shape.edges, EDGE_CHANNELS, generator=generator).to(device, dtype)]
        if "sorted" in peer:
            edge_index, *in_order = pyg_peers.by_target(edge_index, *more * (task.more == "edge_attr"))
            more = in_order or more
        wrap = pyg_peers.wrap(peer, shape.nodes, shape.nodes)
        edges, run = wrap(edge_index), pyg_peers.compiled(peer, net)

        def call() -> Tensor:
            fresh = wrap(edge_index.clone()) if shape.fresh else edges
            out: Tensor = run(x, fresh, *more)
            return out

        out = call()
        used = torch.autograd.grad(out.sum(), list(net.parameters()), allow_unused=True)
        named = zip(net.named_parameters(), used, strict=True)
        leaves: dict[str, Tensor] = {name: leaf for (name, leaf), grad in named if grad is not None}
        return Computation(call, leaves, torch.randn(out.shape, generator=generator).to(device, dtype)), net

    def times(self, computation: Computation) -> Row:
        """The times of a step with dropout and without, and its parts."""
        net = self.__dict__["net"]
        step = step_of(computation, net)

        def times() -> Times:
            for _ in range(3):  # in which a compiled network is compiled
                step()
            return timed(step, self.repeats, self.seconds, self.device)

        row: Row = {"without_dropout": times()}
        net.train()
        row["step"] = times()
        if self.device != "cpu":
            return row
        row["parts"] = parts(step)
        if STEPS[self.task].shape.fresh and self.peer != "gattn":
            ours, own = self._build("gattn", torch.float32, self.device)
            rounds = turns((step, step_of(ours, own.train())), 30 * self.repeats, 5 * self.seconds)
            row["in_turns"] = quartiles_of([theirs / ours for theirs, ours in zip(*rounds, strict=True)])
        return row


def step_of(computation: Computation, net: torch.nn.Module) -> Callable[[], None]:
    """A step of a network's training."""
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    labels = torch.randint(computation.grad.size(1), (len(computation.grad),), device=computation.grad.device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(computation.call(), labels).backward()
        optimizer.step()

    return step


def in_quartiles(values: Quartiles) -> str:
    """Median and quartiles."""
    return f"{values['median']:.2f} ({values['q1']:.2f}–{values['q3']:.2f})"


def part_of(name: str) -> str:
    """What an operator of this name is a part of."""
    name = name.lower()
    return next((part for part, texts in PARTS.items() if any(text in name for text in texts)), "other")


def parts(step: Callable[[], None], number: int = 3) -> Parts:
    """The milliseconds of a step's parts, by the profiler."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(number):
            step()
    found = Counter(dict.fromkeys((*PARTS, "other"), 0.0))
    for event in profiler.key_averages():
        found[part_of(event.key)] += event.self_cpu_time_total / (1000 * number)
    return {name: round(spent, 3) for name, spent in found.items()}  # type: ignore[return-value]


class Steps(Benchmark[Case]):
    """Measures each step."""

    name = "steps"
    quick: ClassVar = {
        "tasks": ["GAT, 2 layers of 8 × 8", "GPS, 4 blocks of 64", "Transformer, 4 layers of 4 × 16"],
        "peers": ["gattn", "pyg", "pyg-sorted"],
        "allocator": "default",
        "repeats": 3,
        "seconds": 0.1,
        "threads": 1,
    }

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the options."""
        add = parser.add_argument
        text = "what is trained (default: all but the largest)"
        add("--tasks", nargs="+", default=USUAL_TASKS, choices=STEPS, help=text)
        text = "implementations (default: gattn and eager PyG; with memory kept also compiled, and with sorted edges)"
        add("--peers", nargs="+", choices=("gattn", *PYG), help=text)
        add_device(parser)
        add_allocator(parser)
        add_measuring(parser, cls.name, duration=3.0)

    def cases(self) -> list[Case]:
        """Each task's peers under each allocator."""
        options = self.options
        fixed = options.repeats, options.seconds
        return unique(
            Case(task, peer, STEPS[task].threads or options.threads, *fixed, allocator, device=options.device)
            for task in options.tasks
            for allocator in allocators(options)
            for peer in options.peers or USUAL[allocator]
            if pyg_peers.is_installed(peer)
        )

    def run(self, cases: Sequence[Case]) -> Generator[Message[Case], None, None]:
        """Measures."""
        return measured(cases, self.options.timeout)

    def report(self, rows: dict[Case, Row]) -> None:
        """One line per task and peer."""

        def line(case: Case, row: Row) -> Line:
            found = [other for peer in PYG if (other := rows.get(replace(case, peer=peer))) and "step" in other]
            best = min(found, key=lambda other: other["step"]["median"], default=None)
            took_turns = any("in_turns" in other for other in found)
            return {
                "task": f"{case.task}, {STEPS[case.task].shape.name}",
                "threads": str(case.threads),
                "layers": case.peer,
                "allocator": case.allocator,
                "× PyG": "–" if took_turns else factor(rows.get(replace(case, peer="pyg")), row, "step"),
                "× PyG's best": "–" if took_turns else factor(best, row, "step"),
                "time over gattn's, in turns": "–" if "in_turns" not in row else in_quartiles(row["in_turns"]),
                "step, ms": quartiles(row, "step"),
                "without dropout, ms": quartiles(row, "without_dropout"),
                **{f"{part}, ms": f"{row['parts'][part]:.1f}" if "parts" in row else "–" for part in (*PARTS, "other")},
                "peak, MB": megabytes(row),
            }

        lines = [line(case, row) for case, row in rows.items()]
        remarks = [
            *machines(rows.values(), (*VERSIONS, "python"), ""),
            *pyg_peers.remarks(rows)[:-1],
            "Parts are the profiler's, which lengthens steps of many small operators. Molecules are compared in one "
            "process, in rounds in which gattn and its peer take turns.",
        ]
        self.publish("Training steps", lines, remarks, {}, headings=pyg_peers.headings(lines))


if __name__ == "__main__":
    Steps.main()
