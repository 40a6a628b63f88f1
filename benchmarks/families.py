"""Speed and memory of attention with most scores and distributions: `python -m benchmarks.families`.

Attention alone, from projected features to the output: all families on *mid* of `benchmarks.kernels`, those that sort
also on *arxiv*, and additive scores also on a complete graph. Each family takes turns with its base (the scores of GAT
and GATv2 and the dot product, each with a softmax) and with one `embedding_bag` over the same edges, so their ratios
are of the same rounds. Nothing is timed before outputs and gradients agree with gattn's reference in float64.

Duration: 10 minutes; with `--quick`: 1 minute.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, NotRequired

import torch
from torch import Tensor

import gattn
from benchmarks.framework.benchmark import Benchmark
from benchmarks.framework.measuring import (
    MODES,
    Computation,
    Expected,
    Measured,
    Measurement,
    Quartiles,
    budgets,
    measured,
    quartiles,
    turns,
    with_gradients,
)
from benchmarks.framework.options import add_allocator, add_measuring, allocators, unique
from benchmarks.framework.processes import Message
from benchmarks.framework.reports import Line, machines, megabytes
from benchmarks.framework.reports import quartiles as shown
from benchmarks.framework.results import VERSIONS, Row
from benchmarks.kernel_cases import SHAPES as ALL_SHAPES
from benchmarks.kernel_cases import Shape, draw_edges, gather
from benchmarks.kernel_reports import least_bytes

SEED = 0
TYPES = 100
REFERENCE_CHANNELS = 128
"""The reference computes heads with about this many channels in total at a time, so that memory suffices."""

SHAPES = {
    **{name: found[0] for name, found in ALL_SHAPES.items() if len(found) == 1 and found[0].targets is None},
    "complete": Shape("complete", 512, 512**2, 8, 32),
}


class Bytes(NamedTuple):
    """The least that must move: rows of all heads and channels, forward alone and forward + backward.

    A row per edge is gathered from a node, or is the edge's own (its gradient is written). A row per node is read or
    written once. Scalars per head are not counted.
    """

    per_edge: tuple[int, int]
    per_node: tuple[int, int]

    def of(self, shape: Shape, mode: str) -> int:
        """In bytes, in float32."""
        number = list(MODES).index(mode)
        row = 4 * shape.heads * shape.channels
        return least_bytes(shape.edges, shape.nodes, row, number + 1, self.per_edge[number], self.per_node[number])


class Family(NamedTuple):
    """A score and a distribution."""

    base: str
    """The family with which it is compared; each of the three bases is its own."""
    score: Callable[[Tensor], gattn.Score]
    """Creates the score from one vector per head."""
    distribution: str | gattn.Distribution = "softmax"
    is_scalar: bool = False
    terms: str = ""
    """What edges have: `"types"` for one of `TYPES` vectors each, `"logits"` for the logits themselves, `"both"` for
    logits and a term of the value."""
    has_channel_heads: bool = False
    """Whether each channel is a head."""
    moves: Bytes | None = None
    """The bytes for which times are compared."""


def gat(vector: Tensor) -> gattn.Score:
    """GAT's score."""
    return gattn.GATScore()


def linear(vector: Tensor) -> gattn.Score:
    """The sum of both ends, without an activation."""
    return gattn.GATScore(1.0)


def dot(vector: Tensor) -> gattn.Score:
    """The scaled dot product."""
    return gattn.DotScore()


FAMILIES = {
    "GAT": Family("GAT", gat, is_scalar=True, moves=Bytes((1, 2), (1, 5))),
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
    "gates of ResGatedGraphConv": Family(
        "GAT", linear, "sigmoid", is_scalar=True, has_channel_heads=True, moves=Bytes((2, 6), (2, 9))
    ),
    "gates of GatedGCNConv": Family(
        "GAT",
        linear,
        gattn.Sigmoid(normalize=True, eps=1e-6),
        is_scalar=True,
        terms="logits",
        has_channel_heads=True,
        moves=Bytes((2, 7), (1, 5)),
    ),
    "weights of PointTransformerConv": Family(
        "GAT", linear, is_scalar=True, terms="both", has_channel_heads=True, moves=Bytes((3, 10), (1, 5))
    ),
    "GATv2, tanh": Family("GATv2", lambda vector: gattn.AdditiveScore(vector, "tanh")),
    "GATv2, GELU": Family("GATv2", lambda vector: gattn.AdditiveScore(vector, "gelu")),
    "GATv2, SiLU": Family("GATv2", lambda vector: gattn.AdditiveScore(vector, "silu")),
    "GATv2, ELU": Family("GATv2", lambda vector: gattn.AdditiveScore(vector, "elu")),
    "GATv2, vectors of 100 types": Family("GATv2", gattn.AdditiveScore, terms="types"),
    "dot, LeakyReLU": Family("dot", lambda vector: gattn.DotScore(negative_slope=0.2)),
    "dot, clamped": Family("dot", lambda vector: gattn.DotScore(clamp=1.0)),
    "cosine": Family("dot", lambda vector: gattn.CosineScore(vector[:, 0])),
    "dot, vectors of 100 types": Family("dot", dot, terms="types"),
    "dot, times vectors of 100 types": Family("dot", lambda vector: gattn.DotScore(edge="multiply"), terms="types"),
}
NEAR = 1e-5
"""Logits this close to sparsemax's threshold may be on its other side after rounding."""
USUAL = {
    "mid": tuple(FAMILIES),
    "arxiv": ("GAT", "sparsemax", "entmax15", "top 8"),
    "complete": ("GATv2", "GATv2, tanh", "GATv2, GELU", "GATv2, SiLU", "GATv2, ELU"),
}
"""The families that are measured on each shape unless they are named."""


class Turns(Quartiles):
    """Seconds per call."""

    of_base: NotRequired[Quartiles]
    """The time as a multiple of the base's, round by round; a base lacks it."""
    gathers: Quartiles
    """The time as a multiple of the yardstick's, round by round."""
    rounds: int


class Result(Measured):
    """The columns of a measurement."""

    forward: Turns  # type: ignore[misc] # in place of single times
    forward_backward: Turns


@dataclass(frozen=True)
class Case(Measurement):
    """One measurement."""

    result = Result

    shape: Shape
    family: str
    threads: int
    repeats: int
    seconds: float
    allocator: str

    def __str__(self) -> str:
        return f"{self.shape.name} {self.family}" + ", kept memory" * (self.allocator == "kept")

    def problem(self) -> tuple[object, ...]:
        """What is the same for all cases that must have the same result."""
        return self.shape, self.family

    def references(self) -> dict[str, dict[str, Expected]]:
        """The results of the reference in float64."""
        smooth = self._smooth_nodes()  # first, as references take much memory
        exact, rounded = (self._reference(dtype) for dtype in (torch.float64, torch.float32))
        degree = int(self._edges()[1].bincount().max())
        return {"": budgets(exact, rounded, torch.float32, degree, self.shape.edges, smooth)}

    def _smooth_nodes(self) -> Tensor | None:
        """The nodes whose results do not hang on the rounding of a weight of nearly zero; `None` for all.

        At zero, the derivative of sparsemax jumps.
        """
        if self.family != "sparsemax":
            return None
        leaves, (source, target) = self._build("reference", torch.float64).leaves, self._edges()
        logits = (
            FAMILIES[self.family]
            .score(torch.empty(0))
            .logits(leaves["query"].detach()[target], leaves["key"].detach()[source], None)
        )
        weights = gattn.Sparsemax().weights(logits, target, self.shape.nodes, 0)
        index = target.unsqueeze(1).expand_as(logits)
        thresholds = logits.new_full((self.shape.nodes, logits.size(1)), -torch.inf)
        thresholds.scatter_reduce_(0, index, (logits - weights).where(weights > 0, -torch.inf), "amax")
        is_near = ((logits - thresholds[target]).abs() < NEAR).any(1)
        is_smooth = torch.ones(self.shape.nodes, dtype=torch.bool)
        is_smooth[target[is_near]] = False
        is_smooth[source[~is_smooth[target]]] = False
        return is_smooth.nonzero().flatten()

    def _reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Its results, a few heads at a time."""
        heads, channels = self._heads()
        size = max(REFERENCE_CHANNELS // channels, 1)
        builds = (self._build("reference", dtype, slice(first, first + size)) for first in range(0, heads, size))
        parts = [computed.compared(computed.forward_backward()) for computed in builds]
        return {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}

    def computation(self) -> Computation:
        """Gattn's."""
        return self._build("auto" if self.shape.name == "complete" else "cpu", torch.float32)

    def times(self, computation: Computation) -> Row:
        """Its times, in turns with its base and the yardstick."""
        base = FAMILIES[self.family].base
        computations = [computation]
        if base != self.family:
            computations.append(replace(self, family=base).computation())
        shape = self.shape
        unit = gather(self._edges(), torch.randn(shape.nodes, shape.heads * shape.channels), shape.nodes)
        row: Row = {}
        with torch.no_grad():
            row["forward"] = self._compared([*(found.call for found in computations), unit])
        row["forward_backward"] = self._compared([*map(with_gradients, computations), unit])
        return row

    def _compared(self, functions: Sequence[Callable[[], object]]) -> Turns:
        own, *bases, unit = turns(functions, self.repeats, self.seconds)
        of_others = [quartiles([x / y for x, y in zip(own, times, strict=True)]) for times in (*bases, unit)]
        of_base: Any = {"of_base": of_others[0]} if bases else {}
        return {**quartiles(own), **of_base, "gathers": of_others[-1], "rounds": len(own)}

    def _edges(self) -> Tensor:
        if self.shape.name == "complete":
            nodes = torch.arange(self.shape.nodes)
            return torch.cartesian_prod(nodes, nodes).T.contiguous()
        return draw_edges(self.shape)

    def _heads(self) -> tuple[int, int]:
        """The number of heads, and that of channels of each."""
        heads, channels = self.shape.heads, self.shape.channels
        return (heads * channels, 1) if FAMILIES[self.family].has_channel_heads else (heads, channels)

    def _build(self, backend: str, dtype: torch.dtype, part: slice = slice(None)) -> Computation:
        """The computation of some heads."""
        shape, family, generator = self.shape, FAMILIES[self.family], torch.Generator().manual_seed(SEED)
        heads, channels = self._heads()
        wide = () if family.is_scalar else (channels,)

        def randn(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(dtype)

        edges, nodes = self._edges(), shape.nodes
        grad, vector = randn(nodes, heads, channels)[:, part], randn(heads, channels)[part]
        leaves = {"value": randn(nodes, heads, channels)}
        has_logits = family.terms in ("logits", "both")
        if not has_logits:
            leaves |= {"query": randn(nodes, heads, *wide), "key": randn(nodes, heads, *wide)}
        if family.terms:
            leaves["edge"] = randn(edges.size(1) if has_logits else TYPES, heads, *wide)
        if family.terms == "both":
            leaves["edge_value"] = randn(edges.size(1), heads, channels)
        leaves = {name: leaf[:, part].requires_grad_() for name, leaf in leaves.items()}
        given: dict[str, Any] = {"query": None, "key": None, **leaves}
        if family.terms == "types":
            types = torch.randint(TYPES, (edges.size(1),), generator=generator)
            given["edge"] = gattn.Typed(leaves["edge"], types)
        elif family.terms == "logits":
            given["bias"] = given.pop("edge")
        graph: Any = gattn.SparseGraph(edges, nodes, nodes)
        if shape.name == "complete" and backend != "reference":
            graph = gattn.CompleteGraph(nodes)
        attend: Any = gattn.attend
        options = {"score": family.score(vector), "distribution": family.distribution, "backend": backend}
        return Computation(lambda: attend(**given, graph=graph, **options), leaves, grad)


class Families(Benchmark[Case]):
    """Measures each family."""

    name = "families"
    quick: ClassVar = {"shapes": ["tiny"], "allocator": "default", "repeats": 3, "seconds": 0.1, "threads": 1}

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the options."""
        add = parser.add_argument
        text = f"graphs and widths (default: {', '.join(USUAL)})"
        add("--shapes", nargs="+", default=list(USUAL), choices=SHAPES, help=text)
        text = "families that are measured (default: those that tell most on each shape)"
        add("--families", nargs="+", choices=FAMILIES, help=text)
        add_allocator(parser, "kept", "kept")
        add_measuring(parser, cls.name, repeats=30, duration=2.0)

    def cases(self) -> list[Case]:
        """The families on each shape."""
        options = self.options
        fixed = (options.threads, options.repeats, options.seconds)
        return [
            Case(SHAPES[shape], family, *fixed, allocator)
            for shape in unique(options.shapes)
            for family in unique(options.families or USUAL.get(shape, FAMILIES))
            for allocator in allocators(options)
            if shape != "complete" or family in USUAL["complete"]
        ]

    def run(self, cases: Sequence[Case]) -> Generator[Message[Case], None, None]:
        """Measures."""
        return measured(cases, self.options.timeout)

    def report(self, rows: dict[Case, Row]) -> None:
        """One line per family."""
        lines = [line_of(case, row) for case, row in rows.items()]
        remarks = machines(rows.values(), (*VERSIONS, "python"), ", {threads} thread(s)")
        remarks.append(
            "Medians with quartiles. × base is the time as a multiple of the base's and gathers that of one "
            "embedding_bag over the same edges, both within the same rounds. Per byte divides × base by the least "
            "bytes that must move, as multiples of the base's. The peak is the resident memory above the inputs in the "
            "first forward + backward."
        )
        self.publish("Attention with every score and distribution", lines, remarks, {})


def line_of(case: Case, row: Row) -> Line:
    """The table's line."""
    family = FAMILIES[case.family]
    base = FAMILIES[family.base]
    line = {"shape": case.shape.name, "family": case.family, "base": family.base}
    for mode, title in MODES.items():
        found = row.get(mode, {})
        line[f"{title}, ms"] = shown(row, mode)
        line[f"{title}, gathers"] = f"{found['gathers']['median']:.1f}" if found else "–"
        of_base = found.get("of_base", {"median": 1.0, "q1": 1.0, "q3": 1.0} if found else None)
        line[f"{title}, × base"] = (
            f"{of_base['median']:.2f}× ({of_base['q1']:.2f}–{of_base['q3']:.2f})" if of_base else "–"
        )
        per_byte = "–"
        if of_base and family.moves and base.moves:
            share = base.moves.of(case.shape, mode) / family.moves.of(case.shape, mode)
            per_byte = f"{of_base['median'] * share:.2f}×"
        line[f"{title}, per byte"] = per_byte
    return {**line, "peak, MB": megabytes(row)}


if __name__ == "__main__":
    Families.main()
