"""The speed of `benchmarks.molecules`: training steps on both libraries' layers, in turns."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

from benchmarks.framework import reports
from benchmarks.framework.measuring import (
    Measurement,
    Quartiles,
    duration,
    peak_above,
    per_call,
    quartiles,
    spread,
    usage,
    used_since,
)
from benchmarks.framework.reports import Line
from benchmarks.framework.results import Row
from benchmarks.molecules_models import LAYERS, LINEAR, TASKS, TOLERANCE, Molecules, Run, Setting, Trainer, agree

SIDES = {"ours": "gattn", "theirs": "pyg"}
"""Columns of measurements of speed."""

SEED = 0
"""The seed of timed runs and of measurements of speed, which determines weights and batches."""


class Side(Quartiles):
    """Seconds per training step on one library's layers."""

    times: list[float]
    peak_bytes: int
    """By how much memory rises in one step."""
    first: list[float]
    """As in `Result`."""
    page_faults: NotRequired[float]
    system: NotRequired[float]
    usual_page_faults: NotRequired[float]
    """These three are as in `Times`; older rows lack them."""


class Compared(TypedDict):
    """The columns of a measurement of speed."""

    outcome: Literal["ok"]
    reason: str
    ours: Side
    theirs: Side
    ratio: Quartiles
    """PyG's time over gattn's, batch by batch."""
    per_epoch: int
    """The number of batches of an epoch."""


@dataclass(frozen=True)
class Speed(Measurement):
    """Training steps of one network on both libraries' layers, in turns, in one process."""

    result = Compared

    dataset: str
    model: str
    batches: int
    """The number of batches that are timed."""
    threads: int
    setting: Setting
    allocator: str

    def __str__(self) -> str:
        return f"{self.dataset} {self.model}, {self.threads} thread(s) (speed)"

    @property
    def has_reference(self) -> bool:
        """No: each library's network is the other's reference."""
        return False

    def measure(self, reference: Path | None) -> Row:
        """Compares both networks; then trains them on the same batches, of which the first two are not timed."""
        self.prepare_process()
        molecules = Molecules(self.dataset, self.setting.walks)
        with tempfile.TemporaryDirectory() as empty:
            trainers = {layers: self.trainer(layers, molecules, Path(empty)) for layers in LAYERS}
        own, other = (trainers[layers].first for layers in LAYERS)
        if not agree(own, other):
            return {"outcome": "WRONG", "reason": f"loss and gradient are {other} on PyG's layers, {own} on gattn's"}
        for trainer in trainers.values():  # so that loading code is not measured
            trainer.step()
        peaks = {layers: peak_above(trainer.step)[1] for layers, trainer in trainers.items()}
        times: dict[str, list[float]] = {layers: [] for layers in LAYERS}
        work: dict[str, list[dict[str, float]]] = {layers: [] for layers in LAYERS}
        for number in range(self.batches):
            for layers in LAYERS if number % 2 == 0 else reversed(LAYERS):
                before = usage(self.place)
                times[layers].append(duration(trainers[layers].step))
                work[layers].append(used_since(before, self.place))
        row: Row = {"outcome": "ok", "reason": "", "per_epoch": trainers["gattn"].per_epoch}
        for side, layers in SIDES.items():
            first = trainers[layers].first
            found = {**spread(times[layers]), **per_call(work[layers])}
            row[side] = {**found, "peak_bytes": peaks[layers], "first": first}
        ratio = [theirs / ours for ours, theirs in zip(times["gattn"], times["pyg"], strict=True)]
        return {**row, "ratio": quartiles(ratio)}

    def trainer(self, layers: str, molecules: Molecules, folder: Path) -> Trainer:
        """The network under training, with one library's layers."""
        run = Run(self.dataset, self.model, layers, SEED, TASKS[self.dataset].epochs, "speed", self.setting)
        return Trainer(run, molecules, folder)


# The report -----------------------------------------------------------------------------------------------------------


SPEED_NOTES = (
    "Times are medians with quartiles of whole training steps: the batch, forward, backward, clipping, the optimizer "
    "and the averaged weights. The networks on gattn's and PyG's layers start with the same weights and take turns in "
    "one process on the same random batches. × PyG is PyG's time over gattn's, batch by batch.",
    "Seconds/epoch are extrapolated: the number of batches of an epoch times the median. No epoch was trained to its "
    "end, and evaluation is not included.",
    "The peak is the resident memory of one training step above data and networks, on the same batch on both sides.",
    "Before anything is timed, loss and gradient of both untrained networks must agree within a relative difference of "
    f"{TOLERANCE:g}, without dropout, on a batch of the validation set.",
)
LINEAR_NOTE = (
    f"For {LINEAR}, loss and gradient are compared on molecules of one size, because PyG's linear attention depends on "
    "the padding. gattn's does not; on other batches, the two compute something slightly different."
)


def speed_line(case: Speed, row: Row) -> Line:
    """The line of a measurement of speed."""
    line = {"data set": TASKS[case.dataset].title or case.dataset, "model": case.model, "threads": str(case.threads)}
    names = {"ours": "gattn", "theirs": "PyG"}

    def shown(column: str, factor: float, digits: str) -> str:
        """Median and quartiles, or the outcome if there are none."""
        if row["outcome"] != "ok":
            return str(row["outcome"])
        low, middle, high = (f"{factor * row[column][x]:{digits}}" for x in ("q1", "median", "q3"))
        return f"{middle} ({low}–{high})"

    for side, name in names.items():
        line[f"{name}, ms/batch"] = shown(side, 1000, ".0f")
    kept = {side: row["outcome"] != "ok" or reports.is_kept({**row, **row[side]}, side) for side in names}
    for side, name in names.items():
        line[f"{name}, ms/batch"] += f", {reports.NOT_KEPT}" * (not kept[side])
    line["× PyG"] = shown("ratio", 1, ".2f") if all(kept.values()) else "–"
    for side, name in names.items():
        seconds = reports.median(row, side)
        line[f"{name}, seconds/epoch"] = f"{seconds * row['per_epoch']:.0f}" if seconds else "–"
    for side, name in names.items():
        line[f"{name}, peak MB"] = f"{row[side]['peak_bytes'] / 1e6:.0f}" if side in row else "–"
    return line
