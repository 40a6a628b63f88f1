"""German to English with and without attention: `python -m benchmarks.translation`.

Tatoeba's pairs, split so that no sentence of a test pair was seen in training, on either side; a second test set has
sentences of 15 words and more. The rows are a recurrent encoder and decoder without attention, with each kind of it,
and a Transformer, all with a similar number of parameters, on the same batches.

Each row's learning rate and dropout (also local-p's window, and whether dot products are scaled) are chosen from the
same small grid by the loss on the validation set, in trials: the first thirds of runs with another seed.

Every run, one row and one seed, is trained on one thread. Training time is processor time, of training steps only, so
that it means the same when other things run on the machine. (On a GPU, it is the clock's.)

Duration: 2 hours; with `--quick`: 2 minutes.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import statistics
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import sacrebleu
import sentencepiece
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import gattn
from benchmarks.framework import reports
from benchmarks.framework.benchmark import Benchmark
from benchmarks.framework.options import MOST, add_device, fill, folder, whole
from benchmarks.framework.processes import BenchmarkError, Message, in_processes
from benchmarks.framework.reports import Line
from benchmarks.framework.results import VERSIONS, Machine, Row
from benchmarks.translation_data import EXAMPLES, LONG, PAIRS, Corpus
from benchmarks.translation_models import GRIDS, ROWS, SETTINGS, Choice, Result, Run, Trial, TrialResult, train
from gattn.visualize import attention_matrix

#: Colours, and markers for those who cannot tell the colours apart.
STYLES: dict[str, dict[str, Any]] = {
    "none": {"color": reports.BLACK, "marker": "x", "linestyle": "--"},
    "dot": {"color": reports.SKY, "marker": "o"},
    "general": {"color": reports.BLUE, "marker": "s"},
    "additive": {"color": reports.GREEN, "marker": "^"},
    "local-m": {"color": reports.ORANGE, "marker": "v"},
    "local-p": {"color": reports.YELLOW, "marker": "D"},
    "hard": {"color": reports.PINK, "marker": "<", "linestyle": ":"},
    "hard-st": {"color": reports.PINK, "marker": ">"},
    "transformer": {"color": reports.RED, "marker": "*"},
}


# The report ----------------------------------------------------------------------------------------------------------


NOTES = (
    "BLEU and chrF (SacreBLEU's defaults) by beam search, against all references. Greedy: without beam search. Long: "
    f"sentences of {LONG} words and more, or with such a reference. Mean ± standard deviation over seeds.",
    "Every row is the model after its last iteration. Learning rate and dropout, the window of local-p, and whether "
    "dot products are scaled by 1/√C are those of the trial with the lowest loss on the validation set (grid.md). "
    "Training: processor time of training steps only, one thread (on a GPU, the clock's time).",
)

TRIAL_NOTES = (
    "Loss on the validation set (cross entropy for each token, in nats) after the first third of a run with another "
    "seed; bold: chosen; inf: the loss became infinite or NaN.",
)


def groups_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The runs of each row of the table."""
    return {name: group for name in ROWS if (group := [row for row in rows if row["row"] == name])}


def summarise(rows: Sequence[Row]) -> list[Line]:
    """The table's lines."""
    lines = []
    for name, group in groups_of(rows).items():
        choice = Choice(**group[0]["choice"])
        line = {"attention": name + choice.variant}
        line |= {"rate": f"{choice.learning_rate:g}", "dropout": f"{choice.dropout:g}"}
        line |= {"parameters": str(group[0]["parameters"]), "seeds": str(len(group))}
        for part in ("test", "long"):
            for metric, title in (("bleu", "BLEU"), ("chrf", "chrF")):
                line[f"{part} {title}"] = reports.mean_and_deviation([row[part]["beam"][metric] for row in group])
            line[f"{part} BLEU, greedy"] = reports.mean_and_deviation([row[part]["greedy"]["bleu"] for row in group])
        line["training, min"] = reports.mean_and_deviation([row["seconds"] / 60 for row in group])
        lines.append(line)
    return lines


def summarise_grid(trials: Mapping[str, Mapping[Choice, Row]]) -> list[Line]:
    """The validation loss of each choice; the lowest of a row is marked."""
    columns = sorted({(x.learning_rate, x.dropout) for some in trials.values() for x in some}, key=lambda x: x[::-1])
    lines = []
    for name, some in trials.items():
        losses = {x: math.inf if row["val_loss"] is None else row["val_loss"] for x, row in some.items()}
        for variant in dict.fromkeys(choice.variant for choice in some):
            found = {(x.learning_rate, x.dropout): loss for x, loss in losses.items() if x.variant == variant}
            line = {"attention": name + variant}
            for rate, dropout in columns:
                loss = found.get((rate, dropout), math.nan)
                mark = "**" if loss == min(losses.values()) else ""
                text = "" if math.isnan(loss) else f"{mark}{loss:.3f}{mark}"
                line[f"rate {rate:g}, dropout {dropout:g}"] = text
            lines.append(line)
    return lines


def remarks(rows: Sequence[Row]) -> list[str]:
    """What a reader of the table must know."""
    names = (*VERSIONS, "python", "sentencepiece", "sacrebleu")
    described = reports.machines(rows, names, ", {device}, {workers} run(s) at once")
    settings = {", ".join(f"{name} {value}" for name, value in row["setting"].items()) for row in rows}
    sizes = {f"{row['test']['sentences']} test sentences, {row['long']['sentences']} long ones" for row in rows}
    return [*NOTES, *sorted(sizes), *(f"Setting: {setting}" for setting in sorted(settings)), *described]


def title_of(low: int, high: int | None) -> str:
    """The name of a bin."""
    return f"{low}+" if high is None else f"{low}–{high}"


def finish(axis: Axes) -> None:
    """What both pictures of lines have."""
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def draw_lengths(rows: Sequence[Row]) -> Figure:
    """BLEU against length, the mean over seeds."""
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axis = figure.subplots()
    ticks: dict[float, str] = {}
    for name, group in groups_of(rows).items():
        points: dict[float, list[float]] = {}
        for row in group:
            for part in row["bins"]:
                points.setdefault(part["words"], []).append(part["bleu"])
                ticks[part["words"]] = f"{title_of(part['low'], part['high'])}\n({part['count']})"
        axis.plot(list(points), [statistics.mean(values) for values in points.values()], label=name, **STYLES[name])
    axis.set_xticks(list(ticks), list(ticks.values()), fontsize=8)
    axis.set(xlabel="words of the German sentence (test sentences)", ylabel="BLEU", title="Short and long sentences")
    finish(axis)
    return figure


def draw_times(rows: Sequence[Row]) -> Figure:
    """BLEU on validation sentences against training time, the mean over seeds."""
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axis = figure.subplots()
    for name, group in groups_of(rows).items():
        curves = list(zip(*(row["curve"] for row in group), strict=True))
        minutes = [statistics.mean(point["seconds"] for point in points) / 60 for points in curves]
        axis.plot(
            minutes, [statistics.mean(x["bleu"] for x in points) for points in curves], label=name, **STYLES[name]
        )
    axis.set(xlabel="training, minutes of processor time", ylabel="BLEU (validation, greedy)", title="Learning")
    axis.set_xlim(left=0)
    finish(axis)
    return figure


def draw_alignments(rows: Sequence[Row], number: int) -> Figure:
    """What each kind of attention looked at when it translated an example."""
    examples = [row["examples"][number] for row in rows]
    columns = len(rows) if len(rows) < 4 else math.ceil(len(rows) / 2)
    lines = math.ceil(len(rows) / columns)
    width = 1.2 + 0.16 * max(len(example["source"]) for example in examples)
    height = 1.8 + 0.16 * max(len(example["translation"]) for example in examples)
    size = (max(width, 2.6) * columns, max(height, 2.4) * lines)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False)
    for axis in axes.flat[len(rows) :]:
        axis.set_axis_off()
    for place, (row, example, axis) in enumerate(zip(rows, examples, axes.flat, strict=False)):
        weights = torch.tensor(example["weights"])
        attention_matrix(weights, example["translation"], example["source"], ax=axis, title=row["row"], maximum=1.0)
        is_lowest, is_leftmost = place + columns >= len(rows), place % columns == 0
        axis.set(xlabel="German, read" * is_lowest, ylabel="English, written" * is_leftmost)
    german, english = list(EXAMPLES.items())[number]
    figure.suptitle(f"{german}\nreference: {english}", fontsize=10)
    return figure


# The benchmark -------------------------------------------------------------------------------------------------------


class Translation(Benchmark[Run | Trial]):
    """Trains each row with each seed."""

    name = "translation"
    quick: ClassVar = {"setting": "quick"}

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the options."""
        add = parser.add_argument
        add("--rows", nargs="+", choices=ROWS, help="rows of the table (default: all)")
        add("--runs", type=whole(1, 10**6), help="number of seeds of each, from 0 (default: 3; with --quick, 1)")
        text = "sizes and training: the usual ones, those of --quick, or some for a GPU (default: %(default)s)"
        add("--setting", default="default", choices=SETTINGS, help=text)
        add_device(parser)
        text = "runs at once, each on one thread; the numbers stay the same (default: one a core, one on a GPU)"
        add("--workers", type=whole(1, MOST), help=text)
        add("--report", action="store_true", help="no training: table and pictures of what there is")
        text = "folder of results, checkpoints, table and pictures (default: runs/translation; of a setting other than "
        add("--out", type=folder, help=text + "the default one, with its name)")

    @classmethod
    def check_options(cls, options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        """Fills in defaults, and refuses options that `--report` would ignore."""
        if options.quick and options.setting != "quick":
            parser.error(f"--quick is the setting quick; leave it out, or --setting {options.setting}")
        options.quick = options.setting == "quick"
        for name in ("rows", "runs", "workers"):
            if options.report and getattr(options, name) is not None:
                parser.error(f"--report shows every finished run of the setting; leave --{name} out")
        if options.workers is None:
            options.workers = 1 if options.device.startswith("cuda") else os.cpu_count() or 1
        options.rows = [row for row in ROWS if row in (options.rows or ROWS)]
        fill(options, {"runs": 1 if options.quick else 3})
        if options.out is None:
            suffix = "" if options.setting == "default" else f"-{options.setting}"
            options.out = Path(f"runs/translation{suffix}")

    def cases(self) -> list[Trial]:
        """The trials, row by row.

        Raises:
            BenchmarkError: If the data are missing.
        """
        options, setting = self.options, SETTINGS[self.options.setting]
        try:
            pairs = gattn.datasets.load_pairs(PAIRS)
        except gattn.datasets.DatasetUnavailableError as error:
            raise BenchmarkError(str(error)) from error
        corpus = Corpus(pairs, setting.vocabulary, options.out)  # so that processes find the vocabulary
        choices = [(row, choice) for row in options.rows for choice in GRIDS[options.setting].choices(row)]
        return [Trial(row, corpus.name, options.device, setting, choice) for row, choice in choices]

    def phases(self) -> Iterator[Sequence[Run | Trial]]:
        """The trials, then the runs of what they chose, seed by seed; neither for `--report`."""
        if self.options.report:
            yield []
            return
        trials = self.cases()
        yield trials
        corpus, device, setting = trials[0].corpus, self.options.device, SETTINGS[self.options.setting]
        chosen = self.chosen()
        rows = [row for row in self.options.rows if row in chosen]
        yield [
            Run(row, seed, corpus, device, setting, chosen[row]) for seed in range(self.options.runs) for row in rows
        ]

    def recorded(self, kind: type[Run | Trial], result: type) -> list[Row]:
        """The rows of the setting on the device."""
        setting, device = asdict(SETTINGS[self.options.setting]), self.options.device
        rows = self.results.rows(kind, result, Machine)
        return [row for row in rows if row["setting"] == setting and row["device"] == device and row["row"] in ROWS]

    def trials(self) -> dict[str, dict[Choice, Row]]:
        """The newest trial of each choice of the grid, by row."""
        newest = {(row["row"], Choice(**row["choice"])): row for row in self.recorded(Trial, TrialResult)}
        choices = {name: GRIDS[self.options.setting].choices(name) for name in ROWS}
        return {name: {x: newest[name, x] for x in some if (name, x) in newest} for name, some in choices.items()}

    def chosen(self) -> dict[str, Choice]:
        """The choice with the lowest validation loss, for each row whose trials are complete."""
        grid = GRIDS[self.options.setting]
        losses = {
            name: {choice: row["val_loss"] for choice, row in trials.items() if row["val_loss"] is not None}
            for name, trials in self.trials().items()
            if len(trials) == len(grid.choices(name))
        }
        return {name: min(some, key=some.__getitem__) for name, some in losses.items() if some}

    def run(self, cases: Sequence[Run | Trial]) -> Generator[Message[Run | Trial], None, None]:
        """Trains."""
        return in_processes(cases, functools.partial(train, folder=self.options.out), self.options.workers)

    def extra_columns(self) -> Row:
        """The number of runs at once, and the versions of what makes tokens and scores."""
        libraries = {"sentencepiece": sentencepiece.__version__, "sacrebleu": sacrebleu.__version__}
        return {"workers": self.options.workers, **libraries}

    def rows(self, cases: Sequence[Run | Trial]) -> dict[Run | Trial, Row]:
        """The trials; or the newest row of each run with its row's choice, whether it was asked for now or earlier.

        Raises:
            BenchmarkError: If there is none for `--report`.
        """
        if cases and isinstance(cases[0], Trial):
            return super().rows(cases)
        setting, device = SETTINGS[self.options.setting], self.options.device
        chosen = {name: asdict(choice) for name, choice in self.chosen().items()}
        newest = {
            Run(row["row"], row["seed"], "", device, setting, Choice(**row["choice"])): row
            for row in self.recorded(Run, Result)
            if row["choice"] == chosen.get(row["row"])
        }
        if self.options.report and not newest:
            text = f"{self.results.path} has no runs of the setting {self.options.setting} on {device}"
            raise BenchmarkError(text)
        return {run: newest[run] for run in sorted(newest, key=lambda run: (ROWS.index(run.row), run.seed))}

    def report(self, rows: dict[Run | Trial, Row]) -> None:
        """The table of the grid; or the table, BLEU against length and time, and the alignments of the examples."""
        self.publish("Trials", summarise_grid(self.trials()), TRIAL_NOTES, {}, name="grid.md")
        if isinstance(next(iter(rows)), Trial):
            return
        everything = list(rows.values())
        pictures = {"lengths.png": draw_lengths(everything), "times.png": draw_times(everything)}
        attentive = [group[0] for group in groups_of(everything).values() if "weights" in group[0]["examples"][0]]
        for number in range(len(EXAMPLES) if attentive else 0):
            pictures[f"alignment-{number + 1}.png"] = draw_alignments(attentive, number)
        self.publish("German to English", summarise(everything), remarks(everything), pictures)


if __name__ == "__main__":
    Translation.main()
