"""Speed and memory of drop-in layers, compared with the originals in PyG: `python -m benchmarks.layers`.

Each layer runs on one graph (by default *mid* of `benchmarks.kernels`: 42 000 nodes, 580 000 edges and self-loops),
with the same weights on both sides, forward and forward + backward to inputs and parameters. Nothing is timed before
outputs and gradients agree with PyG's layer in float64.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.nn.models.attentive_fp import GATEConv

import gattn
from benchmarks.framework.benchmark import Benchmark
from benchmarks.framework.measuring import (
    MODES,
    Computation,
    Expected,
    Measured,
    Measurement,
    Times,
    budgets,
    measured,
)
from benchmarks.framework.options import add_measuring, unique
from benchmarks.framework.processes import Message
from benchmarks.framework.reports import machines, median, megabytes, quartiles, ratio
from benchmarks.framework.results import VERSIONS, Row
from benchmarks.kernel_cases import ALLOCATORS, SHAPES, Shape, draw_edges

EDGE_CHANNELS = 16
SEED = 0

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

    forward_backward: Times


@dataclass(frozen=True)
class Case(Measurement):
    """One measurement."""

    result = Result

    shape: Shape
    layer: str
    peer: str
    threads: int
    repeats: int
    seconds: float
    allocator: str

    def __str__(self) -> str:
        return f"{self.shape.name} {self.layer} {self.peer}" + ", kept memory" * (self.allocator == "kept")

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment of its allocator."""
        return ALLOCATORS[self.allocator]

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
        return self._build(self.peer, torch.float32)

    def _build(self, peer: str, dtype: torch.dtype) -> Computation:
        shape, layer = self.shape, LAYERS[self.layer]
        generator = torch.Generator().manual_seed(SEED)
        in_channels = width(shape) if layer.in_channels is None else layer.in_channels
        x = torch.randn(shape.nodes, in_channels, generator=generator).to(dtype).requires_grad_()
        edge_index = draw_edges(shape)
        given = {"first": x, "edge_attr": torch.randn(edge_index.size(1), EDGE_CHANNELS, generator=generator).to(dtype)}
        torch.manual_seed(SEED)
        make = {"gattn": layer.ours, "pyg": layer.theirs}[peer]
        conv = make(*layer.arguments(shape), **layer.options)
        state = layer.theirs(*layer.arguments(shape), **layer.options).state_dict()
        conv.load_state_dict(state)
        conv.to(dtype).eval()

        if "types" in layer.takes:
            return self._typed(conv, x, generator)
        edge_type = torch.randint(RELATIONS, (edge_index.size(1),), generator=generator)

        def call() -> Tensor:
            args = {"first": (x, x), "edge_attr": (x,)}.get(layer.takes[0], (x,)) if layer.takes else (x,)
            more = (given["edge_attr"],) if "edge_attr" in layer.takes else ()
            more = (edge_type,) if "edge_type" in layer.takes else more
            out: Tensor = conv(*args, edge_index, *more)
            return out

        return self._computation(call, conv, x, generator)

    def _typed(self, conv: torch.nn.Module, x: Tensor, generator: torch.Generator) -> Computation:
        """A layer on typed nodes and edges, with equally many of each type."""
        shape, (node_types, edge_types) = self.shape, METADATA
        nodes, edges = shape.nodes // len(node_types), shape.edges // len(edge_types)
        edge_index_dict = {name: torch.randint(nodes, (2, edges), generator=generator) for name in edge_types}

        def call() -> Tensor:
            parts = x[: nodes * len(node_types)].split(nodes)
            found = conv(dict(zip(node_types, parts, strict=True)), edge_index_dict)
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
        add(
            "--allocator",
            default="both",
            choices=("both", *ALLOCATORS),
            help="how glibc treats freed memory (default: both)",
        )
        add_measuring(parser, cls.name, duration=20.0)

    def cases(self) -> list[Case]:
        """Both peers, under each allocator."""
        options = self.options
        allocators = ALLOCATORS if options.allocator == "both" else (options.allocator,)
        fixed = (options.threads, options.repeats, options.seconds)
        return [
            Case(SHAPES[SMALLER.get((layer, options.shape), options.shape)][0], layer, peer, *fixed, allocator)
            for layer in unique(options.layers)
            for allocator in allocators
            for peer in ("gattn", "pyg")
        ]

    def run(self, cases: Sequence[Case]) -> Generator[Message[Case], None, None]:
        """Measures."""
        return measured(cases, self.options.timeout)

    def report(self, rows: dict[Case, Row]) -> None:
        """One line per layer and allocator."""
        lines = []
        for case, row in rows.items():
            if case.peer != "gattn":
                continue
            other = rows.get(replace(case, peer="pyg"), {"outcome": "–"})
            line = {"shape": case.shape.name, "layer": case.layer, "memory": case.allocator}
            for mode, title in MODES.items():
                line[f"{title}, ms"] = quartiles(row, mode)
                line[f"PyG's {title}, ms"] = quartiles(other, mode)
                line[f"{title}, × PyG"] = ratio(median(other, mode), median(row, mode))
            line["peak, MB"] = megabytes(row)
            line["PyG's peak, MB"] = megabytes(other)
            lines.append(line)
        remarks = machines(rows.values(), (*VERSIONS, "python"), ", {threads} thread(s)")
        self.publish("Drop-in layers and PyG's", lines, [*remarks, "Times are medians with quartiles."], {})


if __name__ == "__main__":
    Layers.main()
