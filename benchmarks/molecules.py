"""Properties of molecules, with attention over bonds, all pairs of atoms, or both: `python -m benchmarks.molecules`.

ogbg-molbace and ogbg-molhiv use OGB's encoders, scaffold split and evaluator. ZINC-12k and the peptides of LRGB can be
added if their files are available. The tested weights are an exponential moving average, at the epoch with the best
validation score; tables show mean and standard deviation over seeds. Times are compared with those of the same networks
on PyG's layers. `--parts speed` measures time and memory on a few batches only, for data sets with long epochs.

Duration: 3 hours; with `--quick`: 2 minutes.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import statistics
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import ClassVar

from matplotlib.figure import Figure

import gattn
from benchmarks.framework import parallel, reports
from benchmarks.framework.benchmark import Benchmark
from benchmarks.framework.measuring import measured
from benchmarks.framework.options import MOST, add_runs, folder, unique, whole
from benchmarks.framework.processes import BenchmarkError, Message, in_processes
from benchmarks.framework.reports import Line
from benchmarks.framework.results import ALLOCATORS, VERSIONS, Row
from benchmarks.molecules_models import LAYERS, LINEAR, MODELS, PARTS, TASKS, TOLERANCE, USUAL, Run, agree, train
from benchmarks.molecules_speed import LINEAR_NOTE, SEED, SPEED_NOTES, Speed, speed_line

COLOURS = dict(
    zip(
        MODELS,
        (reports.BLUE, reports.RED, reports.GREEN, reports.ORANGE, reports.PINK, reports.SKY),
        strict=True,
    )
)

# The report ----------------------------------------------------------------------------------------------------------


NOTES = (
    "Scores are in percent, except for MAE. They are those of exponentially averaged weights at the epoch with the "
    "best validation score, as mean ± standard deviation over seeds.",
    "Seconds/epoch are the processor time of training steps on one thread, including batches, in the median epoch of a "
    "separate run. × PyG compares with the same network on PyG's layers, with the same weights and batches; loss and "
    f"gradient of the untrained networks agree within a relative difference of {TOLERANCE:g}.",
)


def groups_of(rows: Sequence[Row], purpose: str) -> dict[tuple[str, str, str], list[Row]]:
    """The rows with a purpose, by data set, model and kind of layers."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row["purpose"] == purpose:
            groups.setdefault((row["dataset"], row["model"], row["layers"]), []).append(row)
    return groups


def summarise(rows: Sequence[Row]) -> list[Line]:
    """One line per data set, model and kind of layers, below the published results."""
    timed = {key: row for key, (row,) in groups_of(rows, "times").items()}
    lines: list[Line] = []
    scored = groups_of(rows, "scores")
    if not scored:
        return [
            {
                "data set": TASKS[dataset].title or dataset,
                "model": model,
                "layers": layers,
                "parameters": str(row["parameters"]),
                "seconds/epoch": f"{row['seconds_per_epoch']:.2f}",
                "× PyG": times_pyg(row, timed.get((dataset, model, "pyg"))),
            }
            for (dataset, model, layers), row in timed.items()
        ]
    for (dataset, model, layers), group in scored.items():
        task, own, other = TASKS[dataset], timed.get((dataset, model, layers)), timed.get((dataset, model, "pyg"))
        mean = functools.partial(reports.mean_and_deviation, digits=3 if task.metric == "MAE" else 2)
        minutes = statistics.mean(row["training_seconds"] + row["evaluation_seconds"] for row in group) / 60
        line = {
            "data set": task.title or dataset,
            "model": model,
            "metric": task.metric,
            "test": mean([row["test"] for row in group]),
            "layers": layers,
            "parameters": str(group[0]["parameters"]),
            "seeds": str(len(group)),
            "epochs": str(group[0]["epochs"]),
            "validation": mean([row["validation"] for row in group]),
            "minutes/seed": f"{minutes:.1f}",
            "seconds/epoch": f"{own['seconds_per_epoch']:.2f}" if own else "–",
            "× PyG": times_pyg(own, other),
        }
        if not any(other["data set"] == line["data set"] for other in lines):
            unknown = {**dict.fromkeys(line, "–"), "data set": line["data set"], "metric": task.metric}
            lines += [{**unknown, "model": f"{x}, published", "test": test} for x, test in task.published.items()]
        lines.append(line)
    return lines


def times_pyg(own: Row | None, other: Row | None) -> str:
    """How many times as fast epochs are as on PyG's layers."""
    seconds, theirs = (row["seconds_per_epoch"] if row else None for row in (own, other))
    return reports.mark(reports.ratio(theirs, seconds), own, other)


def budgets(rows: Sequence[Row]) -> list[str]:
    """Which data sets were trained for fewer epochs than `TASKS` has."""
    found = {(row["dataset"], row["epochs"]) for row in rows if row["purpose"] == "scores"}
    return [
        f"The budget on {TASKS[dataset].title or dataset} was {epochs} epoch(s) per run instead of "
        f"{TASKS[dataset].epochs}; the learning rate falls to zero within it."
        for dataset, epochs in sorted(found)
        if epochs < TASKS[dataset].epochs
    ]


def described(rows: Sequence[Row]) -> list[str]:
    """The settings of each data set."""
    return sorted({f"{row['dataset']}: " + ", ".join(f"{k} {v}" for k, v in row["setting"].items()) for row in rows})


def check(rows: Sequence[Row]) -> None:
    """Compares the untrained networks on both libraries' layers.

    Raises:
        BenchmarkError: If they differ by more than rounding explains, so that their times cannot be compared.
    """
    firsts = {key: row["first"] for key, (row,) in groups_of(rows, "times").items()}
    for (dataset, model, layers), first in firsts.items():
        own = firsts.get((dataset, model, "gattn"), first)
        if not agree(first, own):
            raise BenchmarkError(
                f"{model} on {dataset} has loss and gradient {first} on {layers}'s layers, and {own} on gattn's"
            )


def draw(rows: Sequence[Row]) -> Figure:
    """Validation scores by epoch: mean over seeds."""
    groups = groups_of(rows, "scores")
    datasets = unique(dataset for dataset, *_ in groups)
    figure = Figure(figsize=(5.5 * len(datasets), 3.6), layout="constrained")
    axes = dict(zip(datasets, figure.subplots(1, len(datasets), squeeze=False)[0], strict=True))
    for (dataset, model, layers), group in groups.items():
        points = zip(*(row["curve"] for row in group), strict=True)
        values = [statistics.mean(point["validation"] for point in of_seeds) for of_seeds in points]
        style = {"color": COLOURS[model], "linestyle": "-" if layers == "gattn" else "--"}
        axes[dataset].plot(range(1, len(values) + 1), values, label=f"{model}, {layers}", **style)
    for dataset, axis in axes.items():
        axis.set(title=TASKS[dataset].title or dataset, xlabel="epoch", ylabel=f"validation {TASKS[dataset].metric}")
        axis.grid(alpha=0.25)
        axis.legend(fontsize=8)
    figure.suptitle("Mean over seeds", fontsize=10)
    return figure


# The benchmark -------------------------------------------------------------------------------------------------------


class MoleculeProperties(Benchmark[Run | Speed]):
    """Trains each model with each seed, and times it beside the same model on PyG's layers."""

    name = "molecules"
    quick: ClassVar = {"datasets": ["ogbg-molbace"], "runs": 1, "epochs": 1, "timed_epochs": 1}
    is_parallel = True

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the options."""
        add = parser.add_argument
        add(
            "--datasets",
            nargs="+",
            default=["ogbg-molbace", "ogbg-molhiv"],
            choices=TASKS,
            help="data sets (default: OGB's)",
        )
        text = f"kinds of attention (default: all but {LINEAR})"
        add("--models", nargs="+", default=USUAL, choices=MODELS, help=text)
        text = "scores, times of whole epochs, or speed and memory on a few batches (default: scores times)"
        add("--parts", nargs="+", default=PARTS[:2], choices=PARTS, help=text)
        add(
            "--layers",
            nargs="+",
            default=["gattn"],
            choices=LAYERS,
            help="libraries whose layers are scored (default: gattn)",
        )
        add_runs(parser, 5)
        add("--epochs", type=whole(1, 10**6), help="epochs per run (default: that of the data set)")
        text = "epochs for timing one seed on both libraries' layers; 0 disables timing (default: %(default)s)"
        add("--timed-epochs", type=whole(0, 10**6), default=3, help=text)
        text = "batches that --parts speed times, after two others (default: %(default)s)"
        add("--batches", type=whole(2, 10**6), default=10, help=text)
        add("--threads", type=whole(1, MOST), default=1, help="threads of --parts speed (default: %(default)s)")
        text = "runs at once, each on one thread; timed runs always run alone (default: %(default)s)"
        add("--workers", type=whole(1, MOST), default=1, help=text)
        add("--out", type=folder, default=Path("runs/molecules"), help="folder of results (default: %(default)s)")

    @classmethod
    def check_options(cls, options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        """Refuses options that torchrun excludes."""
        if parallel.size() > 1 and options.workers > 1:
            parser.error("the processes of torchrun share each run: leave --workers at 1")
        if parallel.size() > 1 and "speed" in options.parts:
            parser.error("--parts speed measures one process: start it without torchrun")

    def cases(self) -> list[Run | Speed]:
        """All runs, then the timed ones, then the measurements of speed.

        Raises:
            BenchmarkError: If data, or the package that reads them, are missing.
        """
        options = self.options
        datasets, models = unique(options.datasets), unique(options.models)
        for dataset in datasets:
            try:
                gattn.datasets.load(dataset)
            except (gattn.datasets.DatasetUnavailableError, ImportError) as error:
                raise BenchmarkError(f"{error} (use --datasets to leave it out)") from error
        runs, timed, speeds = [], [], []
        for dataset, model in itertools.product(datasets, models):
            task = TASKS[dataset]
            run = functools.partial(Run, dataset, model, setting=task.setting, processes=parallel.size())
            for layers, seed in itertools.product(unique(options.layers), range(options.runs)):
                runs.append(run(layers, seed, options.epochs or task.epochs, "scores"))
            for layers in LAYERS if options.timed_epochs else ():
                timed.append(run(layers, SEED, options.timed_epochs, "times"))
            speeds.append(Speed(dataset, model, options.batches, options.threads, task.setting, "kept"))
        parts: dict[str, Sequence[Run | Speed]] = {"scores": runs, "times": timed, "speed": speeds}
        return [case for part, cases in parts.items() if part in options.parts for case in cases]

    def run(self, cases: Sequence[Run | Speed]) -> Generator[Message[Run | Speed], None, None]:
        """Trains or measures."""
        work = functools.partial(train, checkpoints=self.options.out)
        runs = [case for case in cases if isinstance(case, Run)]
        for purpose, workers in (("scores", self.options.workers), ("times", 1)):
            yield from in_processes([case for case in runs if case.purpose == purpose], work, workers)
        yield from measured([case for case in cases if isinstance(case, Speed)], math.inf)

    def extra_columns(self) -> Row:
        """The number of runs at once."""
        return {"workers": self.options.workers}

    def report(self, rows: dict[Run | Speed, Row]) -> None:
        """The table and the learning curves, or the table of speed."""
        speeds = {case: row for case, row in rows.items() if isinstance(case, Speed)}
        if speeds:
            self.report_speed(speeds)
            return
        found = list(rows.values())
        check(found)
        scored = groups_of(found, "scores")
        sources = {TASKS[dataset].source for dataset, *_ in scored if TASKS[dataset].published}
        remarks = [
            *(NOTES if scored else NOTES[1:]),
            *budgets(found),
            *sorted(f"Published results: {source}" for source in sources),
            *described(found),
            *reports.machines(found, (*VERSIONS, "python"), ", one thread, {workers} run(s) at once"),
            *parallel.notes(found),
        ]
        self.publish("Molecules", summarise(found), remarks, {"curves.png": draw(found)} if scored else {})

    def report_speed(self, rows: dict[Speed, Row]) -> None:
        """The table of speed and memory."""
        found = list(rows.values())
        kept = ", ".join(f"{name}={value}" for name, value in ALLOCATORS["kept"].items())
        remarks = [
            *SPEED_NOTES,
            *[LINEAR_NOTE] * any(case.model == LINEAR for case in rows),
            f"glibc keeps freed memory instead of returning it to the system ({kept}).",
            *described(found),
            *reports.machines(found, (*VERSIONS, "python"), ", {batches} batches after two others"),
            *(f"{case}: {row['outcome']}: {row['reason']}" for case, row in rows.items() if row["outcome"] != "ok"),
        ]
        lines = [speed_line(case, row) for case, row in rows.items()]
        self.publish("Training steps on both libraries' layers", lines, remarks, {}, "speed.md")


if __name__ == "__main__":
    MoleculeProperties.main()
