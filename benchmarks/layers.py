"""Speed and memory of drop-in layers, compared with the originals in PyG: `python -m benchmarks.layers`.

Each layer runs on one graph (by default *mid* of `benchmarks.kernels`: 42 000 nodes, 580 000 edges and self-loops),
with the same weights on both sides, forward and forward + backward to inputs and parameters, beside PyG's in the forms
of `benchmarks/pyg_peers.py`. Nothing is timed before outputs and gradients agree with PyG's layer in float64.

Duration: 15 to 40 minutes; with `--quick`: 2 minutes.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, NotRequired

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.nn.models.attentive_fp import GATEConv
from torch_geometric.utils import add_self_loops

import gattn
from benchmarks import pyg_peers
from benchmarks.framework.benchmark import Benchmark
from benchmarks.framework.measuring import (
    Computation,
    Expected,
    Measured,
    Measurement,
    Times,
    budgets,
    measured,
)
from benchmarks.framework.options import add_allocator, add_measuring, allocators, unique
from benchmarks.framework.processes import Message
from benchmarks.framework.reports import Line, machines, megabytes
from benchmarks.framework.results import VERSIONS, Row
from benchmarks.kernel_cases import SHAPES, Shape, draw_edges, gather
from benchmarks.pyg_peers import PYG

EDGE_CHANNELS = 16
SEED = 0
PEERS = ("gattn", *PYG)

RELATIONS = 100
NODE_TYPES = [f"node {number}" for number in range(5)]
METADATA = (
    NODE_TYPES,
    [(NODE_TYPES[number % 5], f"edge {number}", NODE_TYPES[(number + number // 5 + 1) % 5]) for number in range(10)],
)


class Layer(NamedTuple):
    """A layer, and the PyG layer that it replaces."""

    ours: Callable[..., torch.nn.Module]
    theirs: Callable[..., torch.nn.Module]
    arguments: Callable[[Shape], tuple[Any, ...]]
    """The arguments of both constructors."""
    options: Mapping[str, Any] = MappingProxyType({})
    takes: tuple[str, ...] = ()
    """Its arguments besides features and edges: `"first"` (the features again), `"edge_attr"` or `"edge_type"`.
    `"types"` means that nodes and edges are passed by type."""
    in_channels: int | None = 128
    """The number of features; `None` stands for heads times channels, if there is no projection."""


def width(shape: Shape) -> int:
    """Heads times channels."""
    return shape.heads * shape.channels


LAYERS = {
    "AGNNConv": Layer(gattn.nn.AGNNConv, pyg.AGNNConv, lambda shape: (), in_channels=None),
    "FAConv": Layer(gattn.nn.FAConv, pyg.FAConv, lambda shape: (width(shape),), takes=("first",), in_channels=None),
    "ResGatedGraphConv": Layer(gattn.nn.ResGatedGraphConv, pyg.ResGatedGraphConv, lambda shape: (128, width(shape))),
    "SuperGATConv, MX": Layer(
        gattn.nn.SuperGATConv, pyg.SuperGATConv, lambda shape: (128, shape.channels, shape.heads)
    ),
    "SuperGATConv, SD": Layer(
        gattn.nn.SuperGATConv,
        pyg.SuperGATConv,
        lambda shape: (128, shape.channels, shape.heads),
        {"attention_type": "SD"},
    ),
    "GATEConv": Layer(
        gattn.nn.GATEConv,
        GATEConv,
        lambda shape: (width(shape), width(shape), EDGE_CHANNELS),
        takes=("edge_attr",),
        in_channels=None,
    ),
    "GeneralConv, additive": Layer(
        gattn.nn.GeneralConv,
        pyg.GeneralConv,
        lambda shape: (128, shape.channels),
        {"attention": True, "heads": 8, "skip_linear": True},
    ),
    "RGATConv, 100 relations": Layer(
        gattn.nn.RGATConv,
        pyg.RGATConv,
        lambda shape: (128, shape.channels, RELATIONS),
        {"heads": 8},
        takes=("edge_type",),
    ),
    "HGTConv, 5 and 10 types": Layer(
        gattn.nn.HGTConv, pyg.HGTConv, lambda shape: (128, width(shape), METADATA, shape.heads), takes=("types",)
    ),
}
SMALLER = {("RGATConv, 100 relations", "mid"): "cora"}
"""Layers that run on a smaller graph, because PyG's create one matrix per edge."""


class Result(Measured):
    """The columns of a measurement."""

    forward_backward: NotRequired[Times]
    """Only the yardstick lacks it."""


@dataclass(frozen=True)
class Case(Measurement):
    """One measurement."""

    result = Result

    shape: Shape
    layer: str
    """A name in `LAYERS`, or `"gather"` for the yardstick of `benchmarks.kernels`."""
    peer: str
    threads: int
    repeats: int
    seconds: float
    allocator: str

    def __str__(self) -> str:
        return f"{self.shape.name} {self.layer} {self.peer}" + ", kept memory" * (self.allocator == "kept")

    def gather(self) -> Case:
        """The yardstick."""
        return replace(self, layer="gather", peer="embedding_bag")

    @property
    def has_reference(self) -> bool:
        """Whether this is anything but the yardstick."""
        return self.layer != "gather"

    def prepare_process(self) -> None:
        """Also silences warnings of PyG and PyTorch's compiler about themselves."""
        super().prepare_process()
        pyg_peers.prepare(self.peer)
        warnings.filterwarnings("ignore")

    def problem(self) -> tuple[object, ...]:
        """What is the same for all cases that must have the same result."""
        return self.shape, self.layer

    def references(self) -> dict[str, dict[str, Expected]]:
        """The results of PyG's layer in float64."""
        exact, rounded = (
            computed.compared(computed.forward_backward())
            for computed in (self._build("pyg", dtype) for dtype in (torch.float64, torch.float32))
        )
        degree = int(draw_edges(self.shape)[1].bincount().max()) + 1
        return {"": budgets(exact, rounded, torch.float32, degree, self.shape.edges + self.shape.nodes)}

    def computation(self) -> Computation:
        """The computation of the peer."""
        if not self.has_reference:
            shape, edges = self.shape, draw_edges(self.shape)
            value = torch.randn(shape.nodes, width(shape))
            return Computation(gather(edges, value, shape.nodes), {}, value)
        computation = self._build(self.peer, torch.float32)
        if "compile" in self.peer:
            pyg_peers.settle(computation)
        return computation

    def _build(self, peer: str, dtype: torch.dtype) -> Computation:
        shape, layer = self.shape, LAYERS[self.layer]
        generator = torch.Generator().manual_seed(SEED)
        in_channels = width(shape) if layer.in_channels is None else layer.in_channels
        x = torch.randn(shape.nodes, in_channels, generator=generator).to(dtype).requires_grad_()
        edge_index = draw_edges(shape)
        edge_attr = torch.randn(edge_index.size(1), EDGE_CHANNELS, generator=generator).to(dtype)
        torch.manual_seed(SEED)
        make = layer.ours if peer == "gattn" else layer.theirs
        conv = make(*layer.arguments(shape), **layer.options)
        state = layer.theirs(*layer.arguments(shape), **layer.options).state_dict()
        conv.load_state_dict(state)
        conv.to(dtype).eval()

        run = pyg_peers.compiled(peer, conv)
        if "types" in layer.takes:
            return self._typed(run, conv, x, generator)
        edge_type = torch.randint(RELATIONS, (edge_index.size(1),), generator=generator)
        more = [edge_attr] * ("edge_attr" in layer.takes) + [edge_type] * ("edge_type" in layer.takes)
        if "sorted" in peer:
            if getattr(conv, "add_self_loops", False):  # the layer would lose the edges' order
                vars(conv)["add_self_loops"] = False
                edge_index, _ = add_self_loops(edge_index, num_nodes=shape.nodes)
            edge_index, *more = pyg_peers.by_target(edge_index, *more)
        edges = pyg_peers.wrap(peer, shape.nodes, shape.nodes)(edge_index)
        features = [x, x] if "first" in layer.takes else [x]
        return self._computation(lambda: run(*features, edges, *more), conv, x, generator)

    def _typed(self, run: Any, conv: torch.nn.Module, x: Tensor, generator: torch.Generator) -> Computation:
        """A layer on typed nodes and edges, with equally many of each type."""
        shape, (node_types, edge_types) = self.shape, METADATA
        nodes, edges = shape.nodes // len(node_types), shape.edges // len(edge_types)
        edge_index_dict = {name: torch.randint(nodes, (2, edges), generator=generator) for name in edge_types}

        def call() -> Tensor:
            parts = x[: nodes * len(node_types)].split(nodes)
            found = run(dict(zip(node_types, parts, strict=True)), edge_index_dict)
            return torch.cat([found[name] for name in node_types])

        return self._computation(call, conv, x, generator)

    @staticmethod
    def _computation(
        call: Callable[[], Tensor], conv: torch.nn.Module, x: Tensor, generator: torch.Generator
    ) -> Computation:
        out, leaves = call(), {"x": x, **dict(conv.named_parameters())}
        used = torch.autograd.grad(out.sum(), list(leaves.values()), allow_unused=True)
        leaves = {name: leaf for (name, leaf), grad in zip(leaves.items(), used, strict=True) if grad is not None}
        return Computation(call, leaves, torch.randn(out.shape, generator=generator).to(x.dtype))


class Layers(Benchmark[Case]):
    """Measures each layer in both libraries."""

    name = "layers"
    quick: ClassVar = {
        "shape": "cora",
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
        add(
            "--shape",
            default="mid",
            choices=[name for name, found in SHAPES.items() if len(found) == 1],
            help="graph and widths (default: mid)",
        )
        add("--layers", nargs="+", default=list(LAYERS), choices=LAYERS, help="layers that are measured (default: all)")
        text = "implementations (default: gattn and PyG, eager and compiled; with memory kept also with sorted edges)"
        add("--peers", nargs="+", choices=PEERS, help=text)
        add_allocator(parser)
        add_measuring(parser, cls.name, duration=1.5)

    def cases(self) -> list[Case]:
        """The yardstick of each shape, followed by each layer's peers under each allocator."""
        options = self.options
        fixed = (options.threads, options.repeats, options.seconds)
        cases = []
        for layer in unique(options.layers):
            (shape,) = SHAPES[SMALLER.get((layer, options.shape), options.shape)]
            for allocator in allocators(options):
                cases.append(Case(shape, layer, "", *fixed, allocator).gather())
                for peer in unique(options.peers or ("gattn", *pyg_peers.USUAL[allocator])):
                    has_no_order = "sorted" in peer and "types" in LAYERS[layer].takes  # PyG joins the types' edges
                    if pyg_peers.is_installed(peer) and not has_no_order:
                        cases.append(Case(shape, layer, peer, *fixed, allocator))
        return unique(cases)

    def run(self, cases: Sequence[Case]) -> Generator[Message[Case], None, None]:
        """Measures."""
        return measured(cases, self.options.timeout)

    def report(self, rows: dict[Case, Row]) -> None:
        """One line per layer and peer."""
        first = pyg_peers.sides(rows)[0]
        cases = [case for case in rows if case.allocator == first]

        def line(case: Case, mode: str) -> Line:
            names = {"shape": case.shape.name, "layer": case.layer, "peer": case.peer}
            return names | pyg_peers.compared(rows, case, mode, lambda x: rows.get(x.gather()))

        memory = [
            {"layer": case.layer, "peer": case.peer, "allocator": case.allocator, "peak, MB": megabytes(row)}
            for case, row in rows.items()
        ]
        remarks = [
            *machines(rows.values(), (*VERSIONS, "python"), ", {threads} thread(s)"),
            *pyg_peers.remarks(rows),
        ]
        files = {
            "forward.md": [line(case, "forward") for case in cases],
            "memory.md": memory,
        }
        lines = [line(case, "forward_backward") for case in cases]
        self.publish("Drop-in layers and PyG's", lines, remarks, files, headings=pyg_peers.headings(lines))


if __name__ == "__main__":
    Layers.main()
