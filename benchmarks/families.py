"""Speed and memory of attention with most scores and distributions: `python -m benchmarks.families`.

Attention alone (from projected features to the output) runs on one graph, by default *mid* of `benchmarks.kernels`.
Each family is compared with the nearest of the three that `benchmarks.kernels` measures: the scores of GAT and GATv2
and the dot product, each with a softmax. Nothing is timed before outputs and gradients agree with gattn's reference in
float64.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import gattn
from benchmarks.framework.benchmark import Benchmark
from benchmarks.framework.measuring import MODES, Computation, Expected, Measured, Measurement, Times, budgets, measured
from benchmarks.framework.options import add_measuring, unique
from benchmarks.framework.processes import Message
from benchmarks.framework.reports import machines, median, megabytes, quartiles, ratio
from benchmarks.framework.results import VERSIONS, Row
from benchmarks.kernel_cases import ALLOCATORS, SHAPES, Shape, draw_edges

SEED = 0
TYPES = 100


class Family(NamedTuple):
    """A score and a distribution."""

    nearest: str
    """The one of the three with which it is compared; each of the three is compared with itself."""
    score: Callable[[Tensor], gattn.Score]
    """Creates the score from one vector per head."""
    distribution: str | gattn.Distribution = "softmax"
    is_scalar: bool = False
    has_types: bool = False
    """Whether each edge has one of `TYPES` vectors."""
    has_channel_heads: bool = False
    """Whether each channel is a head."""


def gat(vector: Tensor) -> gattn.Score:
    """GAT's score."""
    return gattn.GATScore()


def dot(vector: Tensor) -> gattn.Score:
    """The scaled dot product."""
    return gattn.DotScore()


FAMILIES = {
    "GAT": Family("GAT", gat, is_scalar=True),
    "GATv2": Family("GATv2", gattn.AdditiveScore),
    "dot": Family("dot", dot),
    "sigmoid": Family("GAT", gat, "sigmoid", is_scalar=True),
    "sigmoid, normalized": Family("GAT", gat, gattn.Sigmoid(normalize=True, eps=1e-6), is_scalar=True),
    "tanh": Family("GAT", gat, "tanh", is_scalar=True),
    "identity": Family("GAT", gat, "identity", is_scalar=True),
    "sink": Family("GAT", gat, gattn.Softmax(sink=0.0), is_scalar=True),
    "softcap": Family("GAT", gat, gattn.Softmax(softcap=5.0), is_scalar=True),
    "sparsemax": Family("GAT", gat, "sparsemax", is_scalar=True),
    "entmax15": Family("GAT", gat, "entmax15", is_scalar=True),
    "top 8": Family("GAT", gat, gattn.TopK(8), is_scalar=True),
    "gates per channel": Family("GAT", gat, "sigmoid", is_scalar=True, has_channel_heads=True),
    "GATv2, tanh": Family("GATv2", lambda vector: gattn.AdditiveScore(vector, "tanh")),
    "GATv2, GELU": Family("GATv2", lambda vector: gattn.AdditiveScore(vector, "gelu")),
    "GATv2, SiLU": Family("GATv2", lambda vector: gattn.AdditiveScore(vector, "silu")),
    "GATv2, vectors of 100 types": Family("GATv2", gattn.AdditiveScore, has_types=True),
    "dot, LeakyReLU": Family("dot", lambda vector: gattn.DotScore(negative_slope=0.2)),
    "dot, clamped": Family("dot", lambda vector: gattn.DotScore(clamp=1.0)),
    "cosine": Family("dot", lambda vector: gattn.CosineScore(vector[:, 0])),
    "dot, vectors of 100 types": Family("dot", dot, has_types=True),
    "dot, times vectors of 100 types": Family("dot", lambda vector: gattn.DotScore(edge="multiply"), has_types=True),
}


class Result(Measured):
    """The columns of a measurement."""

    forward_backward: Times


@dataclass(frozen=True)
class Case(Measurement):
    """One measurement."""

    result = Result

    shape: Shape
    family: str
    """A name in `FAMILIES`, or `"gather"` for the unit: the sum of one row per edge by `embedding_bag`."""
    threads: int
    repeats: int
    seconds: float
    allocator: str

    def __str__(self) -> str:
        return f"{self.shape.name} {self.family}" + ", kept memory" * (self.allocator == "kept")

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment of its allocator."""
        return ALLOCATORS[self.allocator]

    def problem(self) -> tuple[object, ...]:
        """What is the same for all cases that must have the same result."""
        return self.shape, self.family

    def references(self) -> dict[str, dict[str, Expected]]:
        """The results of the reference in float64."""
        exact, rounded = (
            computed.compared(computed.forward_backward())
            for computed in (self._build("reference", dtype) for dtype in (torch.float64, torch.float32))
        )
        degree = int(draw_edges(self.shape)[1].bincount().max())
        return {"": budgets(exact, rounded, torch.float32, degree, self.shape.edges)}

    def computation(self) -> Computation:
        """The kernels'."""
        return self._build("cpu", torch.float32)

    def _build(self, backend: str, dtype: torch.dtype) -> Computation:
        shape, generator = self.shape, torch.Generator().manual_seed(SEED)

        def randn(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(dtype)

        edges, nodes, heads, channels = draw_edges(shape), shape.nodes, shape.heads, shape.channels
        grad = randn(nodes, heads, channels)
        if self.family == "gather":
            return self._gather(edges, randn(nodes, heads * channels).requires_grad_(), grad.flatten(1))
        family = FAMILIES[self.family]
        if family.has_channel_heads:
            heads, channels, grad = heads * channels, 1, grad.view(nodes, -1, 1)
        wide = () if family.is_scalar else (channels,)
        leaves = {
            "query": randn(nodes, heads, *wide),
            "key": randn(nodes, heads, *wide),
            "value": randn(nodes, heads, channels),
        }
        vector, options = randn(heads, channels), dict[str, Any]()
        if family.has_types:
            leaves["edge"] = randn(TYPES, heads, *wide)
        leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
        given: dict[str, Any] = dict(leaves)
        if family.has_types:
            types = torch.randint(TYPES, (edges.size(1),), generator=generator)
            given["edge"] = gattn.Typed(leaves["edge"], types)
        attend: Any = gattn.attend
        graph, score = gattn.SparseGraph(edges, nodes, nodes), family.score(vector)
        options |= {"graph": graph, "score": score, "distribution": family.distribution, "backend": backend}
        return Computation(lambda: attend(**given, **options), leaves, grad)

    @staticmethod
    def _gather(edges: Tensor, value: Tensor, grad: Tensor) -> Computation:
        source, target = edges[:, edges[1].argsort(stable=True)]
        degree = target.bincount(minlength=value.size(0))
        offsets = degree.cumsum(0) - degree
        return Computation(lambda: F.embedding_bag(source, value, offsets, mode="sum"), {"value": value}, grad)


class Families(Benchmark[Case]):
    """Measures each family."""

    name = "families"

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the options."""
        add = parser.add_argument
        shapes = [name for name, found in SHAPES.items() if len(found) == 1 and found[0].targets is None]
        add("--shape", default="mid", choices=shapes, help="graph and widths (default: mid)")
        add(
            "--families",
            nargs="+",
            default=list(FAMILIES),
            choices=FAMILIES,
            help="families that are measured (default: all)",
        )
        add("--allocator", default="kept", choices=ALLOCATORS, help="how glibc treats freed memory (default: kept)")
        add_measuring(parser, cls.name)

    def cases(self) -> list[Case]:
        """The unit, followed by each family."""
        options = self.options
        (shape,) = SHAPES[options.shape]
        fixed = (options.threads, options.repeats, options.seconds, options.allocator)
        return [Case(shape, family, *fixed) for family in ("gather", *unique(options.families))]

    def run(self, cases: Sequence[Case]) -> Generator[Message[Case], None, None]:
        """Measures."""
        return measured(cases, self.options.timeout)

    def report(self, rows: dict[Case, Row]) -> None:
        """One line per family."""
        lines = []
        for case, row in rows.items():
            unit, family = rows.get(replace(case, family="gather"), {}), FAMILIES.get(case.family)
            line = {
                "shape": case.shape.name,
                "family": case.family,
                "nearest": "–" if family is None else family.nearest,
            }
            nearest = {} if family is None else rows.get(replace(case, family=family.nearest), {})
            for mode, title in MODES.items():
                line[f"{title}, ms"] = quartiles(row, mode)
                line[f"{title}, gathers"] = ratio(median(row, mode), median(unit, "forward")).rstrip("×")
                line[f"{title}, × nearest"] = ratio(median(row, mode), median(nearest, mode), ".2f")
            line["peak, MB"] = megabytes(row)
            lines.append(line)
        remarks = machines(rows.values(), (*VERSIONS, "python"), ", {threads} thread(s), {allocator} memory")
        remarks.append(
            "Times are medians with quartiles. × nearest is the time relative to the nearest of GAT, GATv2 and dot."
        )
        self.publish("Attention with every score and distribution", lines, remarks, {})


if __name__ == "__main__":
    Families.main()
