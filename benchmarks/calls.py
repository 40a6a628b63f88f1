"""What one small call costs, timed in turns with its peer: `python -m benchmarks.calls`.

Where a fixed cost dominates: attention and layers on ten nodes or sixteen tokens, one decoded token, a batch of
molecules, sampled minibatches; and training steps of small networks on minibatches. Each row has one process, in which
gattn and its peer take turns: PyTorch's attention, PyG's layers with the same weights, a bare decoding loop, or, where
gattn is compiled, PyG's layers compiled as well, or gattn as it is. Nothing is timed before the results of both sides
agree with those of the peer in float64.

Duration: 20 minutes; with `--quick`: 2 minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal, NotRequired, TypedDict

import torch

from benchmarks.call_cases import CALLS, Draw, apart
from benchmarks.framework.benchmark import Benchmark
from benchmarks.framework.measuring import (
    MODES,
    Expected,
    Function,
    Measurement,
    Quartiles,
    budgets,
    check,
    measured,
    quartiles,
    turns,
    with_gradients,
)
from benchmarks.framework.options import add_allocator, add_measuring, allocators, unique
from benchmarks.framework.processes import Message
from benchmarks.framework.reports import Line, machines
from benchmarks.framework.results import VERSIONS, Row
from benchmarks.pyg_peers import settle


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


def in_turns(ours: Function, theirs: Function, rounds: int, seconds: float, units: int = 1) -> Compared:
    """Times both sides in each round; times are divided by `units`."""
    times = turns((ours, theirs), rounds, seconds)
    mine, others = (quartiles([time / units for time in side]) for side in times)
    ratio = quartiles([theirs / ours for ours, theirs in zip(*times, strict=True)])
    return {"ours": mine, "theirs": others, "ratio": ratio, "rounds": len(times[0])}


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

    def problem(self) -> tuple[object, ...]:
        """What is the same for all cases that must have the same result."""
        return (self.call,)

    @property
    def whole(self) -> Case | None:
        """`GPSConv`, for both of its parts."""
        is_part = self.call in ("molecules, GPSConv's attention", "molecules, TransformerConv")
        return replace(self, call="molecules, GPSConv") if is_part else None

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
        ours, theirs = (build(is_ours, Draw(torch.float32)) for is_ours in (True, CALLS[self.call].is_own_peer))
        for side, is_compiled in zip((ours, theirs), CALLS[self.call].compiled, strict=True):
            if is_compiled:  # for batches of all sizes, as in training
                side.computation.call = torch.compile(apart(side.computation.call), dynamic=True)
                settle(side.computation)
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
    quick: ClassVar = {
        "calls": [name for name, call in CALLS.items() if not any(call.compiled)],
        "allocator": "default",
        "repeats": 3,
        "seconds": 0.1,
    }

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the options."""
        add = parser.add_argument
        add("--calls", nargs="+", default=list(CALLS), choices=CALLS, help="calls that are measured (default: all)")
        add_allocator(parser)
        add_measuring(parser, cls.name, repeats=100, duration=8.0)
        parser.set_defaults(threads=1)

    def cases(self) -> list[Case]:
        """Each call, under each allocator."""
        options = self.options
        fixed = (options.threads, options.repeats, options.seconds)
        return [Case(call, *fixed, allocator) for call in unique(options.calls) for allocator in allocators(options)]

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
