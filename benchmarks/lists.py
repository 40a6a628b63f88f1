"""Attention alone over lists of edges, beside the least that it must do: `python -m benchmarks.lists`.

The bound, `benchmarks/bound.cpp`, only loads and multiplies the rows of neighbours: a dot product reads two of them
per edge forward and three backward, GAT one and one, GATv2 one and one. It is compiled for this machine, and takes
turns with gattn, so that ratios are of the same rounds, first as it is and then with each call after the caches were
flushed. PyG's layers take turns with gattn apart from that, as they empty the caches, and bfloat16 with float32.
Nothing is timed before outputs and gradients agree with gattn's reference in float64, and the bound's sums with
PyTorch's.

With `--before`, gattn is also measured with kernels that were built from another commit: GATTN_KERNELS_BEFORE names
the library.

Duration: 15 minutes; with `--quick`: 1 minute.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, NotRequired

import torch
from torch import Tensor

from benchmarks import kernel_cases
from benchmarks.framework.benchmark import Benchmark
from benchmarks.framework.measuring import (
    MIN_REPEATS,
    MODES,
    Computation,
    Measured,
    Quartiles,
    duration,
    measured,
    quartiles,
    turns,
    with_gradients,
)
from benchmarks.framework.options import add_allocator, add_measuring, allocators, unique
from benchmarks.framework.processes import BenchmarkError, Message
from benchmarks.framework.reports import Line, machines
from benchmarks.framework.results import VERSIONS, Row
from benchmarks.kernel_cases import Shape

SHAPES = {
    f"{nodes} × {degree}, {heads} × {channels}": Shape(
        f"{nodes} × {degree}", nodes, nodes * (degree - 1), heads, channels
    )
    for nodes, degree, widths in (
        (2_000, 50, ((4, 32), (8, 32), (8, 8), (1, 64))),
        (5_000, 4, ((4, 32), (8, 8), (1, 64))),
        (42_000, 14, ((4, 32), (8, 8))),
    )
    for heads, channels in widths
}
"""Self-loops are added, and make up each degree."""

PASSES = {
    "transformer": {"forward": [("two", 1)], "forward_backward": [("two", 1), ("same", 0), ("sums", 0), ("sums", 1)]},
    "gat": {"forward": [("sums", 1)], "forward_backward": [("sums", 1), ("same", 0)]},
    "gatv2": {"forward": [("same", 1)], "forward_backward": [("same", 1), ("same", 0)]},
}
"""What the rows of neighbours are for, and whose neighbours they are, those of sources (0) or targets (1): products and
sums of two rows, or of the same, or sums alone."""

PEERS = ("pyg", "pyg-sorted")
FLUSHED = 2**26
"""The bytes that are written to flush the caches."""
AHEAD = 16


class Ratios(Quartiles):
    """Seconds per call, and times as multiples of gattn's in the same rounds; of the bound, gattn's as one of its."""

    bound: NotRequired[Quartiles]
    cold: NotRequired[Quartiles]
    """The multiple of the bound with flushed caches."""
    pyg: NotRequired[Quartiles]
    pyg_sorted: NotRequired[Quartiles]
    float32: NotRequired[Quartiles]


class Result(Measured):
    """The columns of a measurement."""

    forward: Ratios  # type: ignore[misc] # in place of single times
    forward_backward: Ratios


@dataclass(frozen=True)
class Case(kernel_cases.Case):
    """One measurement."""

    result = Result  # type: ignore[assignment] # ratios in place of single times

    before: bool = field(default=False, kw_only=True)

    def __str__(self) -> str:
        shape, words = self.shape, [self.layer, self.dtype, f"{self.threads} thread(s)", self.allocator]
        return ", ".join([shape.name, f"{shape.heads} × {shape.channels}", *words, *["before"] * self.before])

    @property
    def environment(self) -> Mapping[str, str]:
        """Also names the kernels."""
        earlier = os.environ.get("GATTN_KERNELS_BEFORE") if self.before else None
        return {**super().environment, **({"GATTN_KERNELS": earlier} if earlier else {})}

    def times(self, computation: Computation) -> Row:
        """The times in turns."""
        row: Row = {}
        if self.dtype != "float32":
            others = {"float32": replace(self, dtype="float32").computation()}
        else:
            others = {
                peer.replace("-", "_"): replace(self, peer=peer).computation() for peer in PEERS if not self.before
            }
        for mode in MODES:
            run = _forward if mode == "forward" else with_gradients
            own, peers = run(computation), {name: run(found) for name, found in others.items()}
            row[mode] = {}
            if peers:
                row[mode] = ratios(["gattn", *peers], turns([own, *peers.values()], self.repeats, self.seconds))
            if self.dtype == "float32":  # alone, as PyG's layers empty the caches
                pair, names = [own, self.bound(mode)], ["gattn", "bound"]
                row[mode] |= ratios(names, turns(pair, self.repeats, self.seconds))
                row[mode]["cold"] = ratios(names, cold(pair, self.repeats, self.seconds))["bound"]
        return row

    def bound(self, mode: str) -> Callable[[], object]:
        """The passes of the bound, after a look at what they compute."""
        shape, edges = self.shape, kernel_cases.draw(self).all_edges
        width = shape.heads * shape.channels
        own, first, second = torch.randn(3, shape.nodes, width, generator=torch.Generator().manual_seed(1)).unbind()
        calls = []
        for kind, end in PASSES[self.layer][mode]:
            ends, of_products = edges if end else edges.flip(0), {"two": first, "same": second, "sums": None}[kind]
            call, out = bound_of(ends, own, of_products, second, self.threads)
            call()
            check(out, ends, own, of_products, second)
            calls.append(call)
        return lambda: [call() for call in calls]


def _forward(computation: Computation) -> Callable[[], object]:
    return computation.forward


def ratios(names: Sequence[str], times: Sequence[Sequence[float]]) -> Ratios:
    """Gattn's times, and the ratios of the rounds."""
    found: Ratios = {**quartiles(times[0])}
    for name, others in zip(names[1:], times[1:], strict=True):
        pairs = zip(times[0], others, strict=True)
        found[name] = quartiles([ours / theirs if name == "bound" else theirs / ours for ours, theirs in pairs])  # type: ignore[literal-required]
    return found


def cold(functions: Sequence[Callable[[], object]], rounds: int, seconds: float) -> list[list[float]]:
    """Like `turns`, but each call alone, after the caches were flushed."""
    buffer, times = torch.zeros(FLUSHED, dtype=torch.uint8), [list[float]() for _ in functions]
    start = time.perf_counter()
    while len(times[0]) < MIN_REPEATS or (len(times[0]) < rounds and time.perf_counter() - start < seconds):
        for function, own in zip(functions, times, strict=True):
            buffer.add_(1)
            own.append(duration(function))
    return times


@functools.cache
def library() -> ctypes.CDLL:
    """The bound, compiled.

    Raises:
        BenchmarkError: If there is no compiler, or it fails.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise BenchmarkError("the bound needs a C++ compiler: g++, or the one that CXX names")
    source = Path(__file__).with_name("bound.cpp")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bound.so"
        flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi"]
        run = subprocess.run([compiler, *flags, str(source), "-o", str(path)], capture_output=True, text=True)
        if run.returncode != 0:
            raise BenchmarkError(f"{compiler} could not compile {source.name}: {run.stderr.strip()[:500]}")
        return ctypes.CDLL(str(path))


def bound_of(
    edges: Tensor, own: Tensor, first: Tensor | None, second: Tensor, threads: int
) -> tuple[Callable[[], object], Tensor]:
    """A pass of the bound over edges by their second end, and where its result will be."""
    order = edges[1].argsort(stable=True)
    node = torch.cat([edges[0][order], torch.zeros(AHEAD, dtype=torch.long)]).int()
    start = torch.zeros(len(own) + 1, dtype=torch.int32)
    start[1:] = edges[1].bincount(minlength=len(own)).cumsum(0)
    out = torch.empty_like(own)
    kept = (start, node, own, first, second, out)
    pointers = [ctypes.c_void_p(None if x is None else x.data_ptr()) for x in kept]
    sizes = [ctypes.c_int64(x) for x in (own.size(1), AHEAD, threads)]
    run = library().bound

    def call(kept: object = kept) -> None:
        run(ctypes.c_int64(len(own)), *pointers, *sizes)

    return call, out


def check(out: Tensor, edges: Tensor, own: Tensor, first: Tensor | None, second: Tensor) -> None:
    """Compares a pass of the bound with PyTorch in float64.

    Raises:
        BenchmarkError: If they differ.
    """
    source, target = edges
    rows = 0.5 * second.double()[source]
    if first is not None:
        rows += own.double()[target] * first.double()[source]
    exact = torch.zeros_like(own, dtype=torch.double).index_add_(0, target, rows)
    if not torch.allclose(out.double(), exact, rtol=1e-4, atol=1e-4):
        raise BenchmarkError("the bound computes something else")


class ListsOfEdges(Benchmark[Case]):
    """Measures attention over lists of edges."""

    name = "lists"
    quick: ClassVar = {"shapes": [next(iter(SHAPES))], "layers": ["gat"], "repeats": 3, "seconds": 0.1}

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the options."""
        add = parser.add_argument
        text = "nodes × degree, heads × channels (default: all)"
        add("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES, help=text)
        add("--layers", nargs="+", default=list(PASSES), choices=PASSES, help="layers (default: all)")
        add("--before", action="store_true", help="also measure the kernels of GATTN_KERNELS_BEFORE")
        add_allocator(parser, "both", "both")
        add_measuring(parser, cls.name, repeats=21, duration=1.0)

    def cases(self) -> list[Case]:
        """Each layer on each shape: dot products with both allocators and one and two threads, and in bfloat16."""
        options = self.options
        if options.before and "GATTN_KERNELS_BEFORE" not in os.environ:
            raise BenchmarkError("--before needs GATTN_KERNELS_BEFORE, the library of other kernels")
        return [
            replace(
                Case(
                    SHAPES[shape], "attention", layer, False, dtype, "gattn", threads, options.repeats, options.seconds
                ),
                allocator=allocator,
                before=before,
            )
            for shape in unique(options.shapes)
            for layer in unique(options.layers)
            for threads, allocator, dtype, before in variants(layer, options)
        ]

    def run(self, cases: Sequence[Case]) -> Generator[Message[Case], None, None]:
        """Measures."""
        return measured(cases, self.options.timeout)

    def report(self, rows: dict[Case, Row]) -> None:
        """One line per case."""
        lines = [
            line_of(case, row, rows.get(replace(case, before=True))) for case, row in rows.items() if not case.before
        ]
        remarks = machines(rows.values(), (*VERSIONS, "python"), "")
        remarks.append(
            "Gattn's time per edge; it as a multiple of the bound's, before and now, hot and with flushed caches; and "
            "as multiples of gattn's the times of PyG, eager, with edges as they come and sorted, or that of float32. "
            "Medians, some with quartiles, of the rounds in which two or three take turns."
        )
        self.publish("Attention over lists of edges, and its bound", lines, remarks, {})


def variants(layer: str, options: argparse.Namespace) -> list[tuple[int, str, str, bool]]:
    """Threads, allocators, types and whether kernels are earlier ones: the usual ones, and others of dot products."""
    known = allocators(options)
    found = [(1, known[-1], "float32", False)]
    if options.before:
        found.append((1, known[-1], "float32", True))
    if layer == "transformer":
        found += [(1, one, "float32", False) for one in known]
        found += [(options.threads, known[-1], "float32", False), (1, known[-1], "bfloat16", False)]
    return unique(found)


def line_of(case: Case, row: Row, before: Row | None) -> Line:
    """The table's line."""
    shape = case.shape
    line: Line = {
        "nodes × degree": shape.name,
        "heads × channels": f"{shape.heads} × {shape.channels}",
        "layer": case.layer,
        "type": case.dtype,
        "threads": str(case.threads),
        "memory": case.allocator,
    }
    for mode, title in (("forward", "forward"), ("forward_backward", "both")):
        found, edges = row.get(mode, {}), shape.edges + shape.nodes
        line[f"{title}, ns"] = f"{found['median'] * 1e9 / edges:.1f}" if found else row.get("outcome", "–")
        line[f"{title}, × bound before"] = ratio((before or {}).get(mode), "bound")
        line[f"{title}, × bound"] = ratio(found, "bound", True)
        line[f"{title}, flushed"] = ratio(found, "cold", True)
        for name, column in (("pyg", "PyG"), ("pyg_sorted", "PyG, sorted"), ("float32", "float32")):
            line[f"{title}, {column}"] = ratio(found, name)
    return line


def ratio(found: Row | None, name: str, has_quartiles: bool = False) -> str:
    """The median of a ratio."""
    values = (found or {}).get(name)
    if not values:
        return "–"
    return f"{values['median']:.2f}" + f" ({values['q1']:.2f}–{values['q3']:.2f})" * has_quartiles


if __name__ == "__main__":
    ListsOfEdges.main()
