"""What one small call costs, timed in turns with its peer: `python -m benchmarks.calls`.

Where a fixed cost dominates: attention and layers on ten nodes or sixteen tokens, one decoded token, a batch of
molecules, sampled minibatches. Each row has one process, in which gattn and its peer take turns: PyTorch's attention,
PyG's layers with the same weights, or a bare decoding loop. Nothing is timed before the results of both sides agree
with those of the peer in float64.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

import torch

from benchmarks.call_cases import CALLS, Draw
from benchmarks.framework.benchmark import Benchmark
from benchmarks.framework.measuring import (
    MIN_REPEATS,
    MODES,
    Computation,
    Expected,
    Measurement,
    budgets,
    check,
    duration,
    measured,
)
from benchmarks.framework.options import add_measuring, unique
from benchmarks.framework.processes import Message
from benchmarks.framework.reports import Line, machines
from benchmarks.framework.results import VERSIONS, Row
from benchmarks.kernel_cases import ALLOCATORS

BATCH = 0.002
"""Shorter calls are timed in batches that take about this many seconds."""
WARM_UP = 0.1
"""Each side is first called for this many seconds."""

Function = Callable[[], object]


# Times in turns ------------------------------------------------------------------------------------------------------


class Quartiles(TypedDict):
    """Median and quartiles."""

    median: float
    q1: float
    q3: float


class Compared(TypedDict):
    """Seconds per call of both sides, and the peer's time over gattn's in each round."""

    ours: Quartiles
    theirs: Quartiles
    ratio: Quartiles
    rounds: int


class Result(TypedDict):
    """The columns of a measurement."""

    outcome: Literal["ok"]
    reason: str
    forward: Compared
    forward_backward: NotRequired[Compared]
    """Only decoding lacks it."""


def quartiles(values: Sequence[float]) -> Quartiles:
    """Median and quartiles of two or more numbers."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "q1": low, "q3": high}


def calls_per_batch(function: Function) -> int:
    """The number of calls that take about `BATCH` seconds, after a warm-up."""
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < MIN_REPEATS or time.perf_counter() - start < WARM_UP:
        times.append(duration(function))
    return math.ceil(BATCH / max(statistics.median(times), 1e-9))


def in_turns(ours: Function, theirs: Function, rounds: int, seconds: float, units: int = 1) -> Compared:
    """Times both sides in each round, without garbage collection; they take turns in going first.

    No further round begins after this many seconds, once `MIN_REPEATS` are done. Times are divided by `units`.
    """
    sides = [(function, calls_per_batch(function)) for function in (ours, theirs)]
    times: tuple[list[float], list[float]] = ([], [])
    was_collecting, start = gc.isenabled(), time.perf_counter()
    gc.collect()
    gc.disable()
    try:
        for number in range(max(rounds, MIN_REPEATS)):
            if number >= MIN_REPEATS and time.perf_counter() - start >= seconds:
                break
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                function, calls = sides[side]
                before = time.perf_counter_ns()
                for _ in range(calls):
                    function()
                times[side].append((time.perf_counter_ns() - before) / (1e9 * calls * units))
    finally:
        if was_collecting:
            gc.enable()
    ratios = [theirs / ours for ours, theirs in zip(*times, strict=True)]
    mine, others, ratio = map(quartiles, (*times, ratios))
    return {"ours": mine, "theirs": others, "ratio": ratio, "rounds": len(ratios)}


def with_gradients(computation: Computation) -> Function:
    """The forward and the backward pass, without the names of the results, which take time."""
    leaves = list(computation.leaves.values())
    return lambda: torch.autograd.grad(computation.call(), leaves, computation.grad)


# The benchmark -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case(Measurement):
    """One comparison."""

    result = Result

    call: str
    threads: int
    repeats: int
    seconds: float
    allocator: str

    def __str__(self) -> str:
        return self.call + ", kept memory" * (self.allocator == "kept")

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment of its allocator."""
        return ALLOCATORS[self.allocator]

    def problem(self) -> tuple[object, ...]:
        """What is the same for all cases that must have the same result."""
        return (self.call,)

    def references(self) -> dict[str, dict[str, Expected]]:
        """The results of the peer in float64."""
        build = CALLS[self.call].build
        built = [build(False, Draw(dtype)) for dtype in (torch.float64, torch.float32)]
        exact, rounded = (x.computation.compared(x.computation.forward_backward()) for x in built)
        return {"": budgets(exact, rounded, torch.float32, built[0].terms, built[0].parameter_terms)}

    def measure(self, reference: Path | None) -> Row:
        """Checks both sides, then times them in turns."""
        self.prepare_process()
        build = CALLS[self.call].build
        ours, theirs = (build(is_ours, Draw(torch.float32)) for is_ours in (True, False))
        expected = torch.load(reference, weights_only=True)[""]  # type: ignore[arg-type] # each case has one
        for name, computation in (("gattn", ours.computation), ("the peer", theirs.computation)):
            for result, entry in check(computation.compared(computation.forward_backward()), expected).items():
                if not entry["error"] <= entry["budget"]:  # in this form, NaN fails
                    sizes = f"{entry['error']:.1e} of its largest element, where {entry['budget']:.1e} is allowed"
                    return {"outcome": "WRONG", "reason": f"{result} of {name} is off by {sizes}"}
        row: Row = {"outcome": "ok", "reason": ""}
        timed = partial(in_turns, rounds=self.repeats, seconds=self.seconds, units=ours.units)
        with torch.no_grad():
            row["forward"] = timed(ours.computation.call, theirs.computation.call)
        if ours.computation.leaves:
            row["forward_backward"] = timed(with_gradients(ours.computation), with_gradients(theirs.computation))
        return row


class Calls(Benchmark[Case]):
    """Compares each call with its peer."""

    name = "calls"

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the options."""
        add = parser.add_argument
        add("--calls", nargs="+", default=list(CALLS), choices=CALLS, help="calls that are measured (default: all)")
        text = "how glibc treats freed memory (default: both)"
        add("--allocator", default="both", choices=("both", *ALLOCATORS), help=text)
        add_measuring(parser, cls.name, repeats=100, duration=20.0)
        parser.set_defaults(threads=1)

    def cases(self) -> list[Case]:
        """Each call, under each allocator."""
        options = self.options
        allocators = ALLOCATORS if options.allocator == "both" else (options.allocator,)
        fixed = (options.threads, options.repeats, options.seconds)
        return [Case(call, *fixed, allocator) for call in unique(options.calls) for allocator in allocators]

    def run(self, cases: Sequence[Case]) -> Generator[Message[Case], None, None]:
        """Measures."""
        return measured(cases, self.options.timeout)

    def report(self, rows: dict[Case, Row]) -> None:
        """One line per call and allocator."""
        lines = [self._line(case, row) for case, row in rows.items()]
        remarks = machines(rows.values(), (*VERSIONS, "python"), ", {threads} thread(s)")
        remarks.append("Medians with quartiles. × peer is the peer's time over gattn's, round by round.")
        self.publish("One call of gattn and of its peer", lines, remarks, {})

    @staticmethod
    def _line(case: Case, row: Row) -> Line:
        line = {"call": case.call, "peer": CALLS[case.call].peer, "memory": case.allocator}
        for mode, title in MODES.items():
            found: Compared | None = row.get(mode)
            outcome = "–" if row["outcome"] == "ok" else row["outcome"]
            line[f"{title}, µs"] = shown(found["ours"], 1e6, ".1f") if found else outcome
            line[f"peer's {title}, µs"] = shown(found["theirs"], 1e6, ".1f") if found else "–"
            line[f"{title}, × peer"] = shown(found["ratio"], 1, ".2f") if found else "–"
        return line


def shown(found: Quartiles, factor: float, digits: str) -> str:
    """Median and quartiles, for a table."""
    low, middle, high = (f"{factor * value:{digits}}" for value in (found["q1"], found["median"], found["q3"]))
    return f"{middle} ({low}–{high})"


if __name__ == "__main__":
    Calls.main()
