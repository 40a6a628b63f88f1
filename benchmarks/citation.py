"""Node classification on citation networks with the protocol of the GAT paper: `python -m benchmarks.citation`.

Two attention layers, row-normalised features, Adam. A checkpoint is taken whenever validation loss and accuracy are
both at their best so far. Training stops when neither has improved for 100 epochs, or after 10 000 epochs. The test
accuracy is that of the checkpoint; tables show mean and standard deviation over seeds.

Duration: 3 minutes; with `--quick`: half a minute.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypedDict

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from matplotlib.figure import Figure
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import NormalizeFeatures

import gattn
from benchmarks.framework import reports
from benchmarks.framework.benchmark import Benchmark, Case
from benchmarks.framework.node_data import densities, hush, storage
from benchmarks.framework.options import MOST, add_device, add_runs, add_saving, folder, unique, whole
from benchmarks.framework.processes import Message, Show, in_processes
from benchmarks.framework.reports import Line
from benchmarks.framework.results import Row
from benchmarks.framework.training import Training

DEFAULT_DATASETS = ("karate", "cora")
MODELS = ("gat", "gatv2", "transformer")
LAYERS = ("gattn", "pyg")

#: Test accuracy in percent, mean and standard deviation of 100 runs: Table 2 of https://arxiv.org/abs/1710.10903.
PUBLISHED = {("cora", "gat"): (83.0, 0.7), ("citeseer", "gat"): (72.5, 0.7), ("pubmed", "gat"): (79.0, 0.3)}

CURVE_EVERY = 5
"""Learning curves keep every n-th epoch."""

COLOURS = {"gat": reports.BLUE, "gatv2": reports.RED, "transformer": reports.GREEN}


# The runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Protocol:
    """Hyper-parameters. They are the paper's for GAT on citation networks; other models and data sets use the same."""

    hidden_channels: int = 64
    heads: int = 8
    out_heads: int = 1
    dropout: float = 0.6
    value_dropout: float = 0.6
    learning_rate: float = 0.005
    weight_decay: float = 0.0005
    patience: int = 100
    max_epochs: int = 10_000


class Curve(TypedDict):
    """Values of every `CURVE_EVERY`-th epoch."""

    train_loss: list[float]
    val_loss: list[float]
    val_accuracy: list[float]


class Result(TypedDict):
    """The columns that a run adds."""

    epochs: int
    test_accuracy: float
    seconds_per_epoch: float
    curve: Curve
    workers: int


@dataclass(frozen=True)
class Run(Case):
    """One training run; equal runs have equal results."""

    result = Result
    versions = ("gattn", "torch")

    dataset: str
    model: str
    layers: str
    seed: int
    device: str
    threads: int
    features: str
    protocol: Protocol

    def __str__(self) -> str:
        return f"{self.dataset} {self.model} {self.layers} seed {self.seed}"


class PyGGAT(gattn.models.GAT):
    """The same network on PyG's layers and PyTorch's dropout."""

    conv_types = {"gat": pyg.GATConv, "gatv2": pyg.GATv2Conv, "transformer": pyg.TransformerConv}  # noqa: RUF012

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for name in ("input_dropout", "dropout"):
            setattr(self, name, torch.nn.Dropout(getattr(self, name).p))


def protocol_for(dataset: str, layers: str, max_epochs: int) -> Protocol:
    """The paper's hyper-parameters; PyG's layers cannot drop projected features."""
    kwargs: dict[str, Any] = {"max_epochs": max_epochs}
    if layers == "pyg":
        kwargs["value_dropout"] = 0.0
    if dataset == "pubmed":
        kwargs.update(out_heads=8, learning_rate=0.01, weight_decay=0.001)
    return Protocol(**kwargs)


def build_model(run: Run, data: Data) -> gattn.models.GAT:
    """The network of the paper."""
    protocol = run.protocol
    kwargs: dict[str, Any] = {"value_dropout": protocol.value_dropout} if run.layers == "gattn" else {}
    return (gattn.models.GAT if run.layers == "gattn" else PyGGAT)(
        data.num_features,
        protocol.hidden_channels,
        num_layers=2,
        out_channels=int(data.y.max()) + 1,
        conv=run.model,
        heads=protocol.heads,
        out_heads=protocol.out_heads,
        dropout=protocol.dropout,
        **kwargs,
    )


def prepare(run: Run) -> Data:
    """Loads the data, row-normalises the features and makes them sparse if requested."""
    data = gattn.datasets.load(run.dataset, seed=run.seed)
    if data.x.min() >= 0:
        data = NormalizeFeatures()(data)
    if run.features == "sparse":
        data.x = data.x.to_sparse_csr()
    return data.to(run.device)


class EarlyStopping:
    """Follows the protocol: decides when to take a checkpoint and when to stop."""

    def __init__(self) -> None:
        self.best_loss, self.best_accuracy, self.waited = float("inf"), 0.0, 0
        self.checkpoint: dict[str, float] = {}

    def see(self, epoch: int, point: dict[str, float]) -> None:
        """Records the losses and accuracies of an epoch."""
        is_accurate, is_low = point["val_accuracy"] >= self.best_accuracy, point["val_loss"] <= self.best_loss
        if is_accurate and is_low:
            self.checkpoint = {"checkpoint_epoch": epoch, **point}
        self.best_accuracy = max(self.best_accuracy, point["val_accuracy"])
        self.best_loss = min(self.best_loss, point["val_loss"])
        self.waited = 0 if is_accurate or is_low else self.waited + 1


class Classifier(Training[Run]):
    """The network under training; an iteration is an epoch, which is a training step and an evaluation.

    Args:
        run: What to train.
        checkpoints: The folder of checkpoints.
        save_every: The least number of seconds between checkpoints.
    """

    keeps_random_state = True

    def __init__(self, run: Run, checkpoints: Path, save_every: float):
        protocol = run.protocol
        self.data = prepare(run)
        torch.manual_seed(run.seed)
        model = build_model(run, self.data).to(run.device)
        optimizer = torch.optim.Adam(
            model.parameters(), lr=protocol.learning_rate, weight_decay=protocol.weight_decay, fused=True
        )
        super().__init__(run, checkpoints, model, optimizer, protocol.max_epochs, 1, None, save_every=save_every)
        self.stopping = EarlyStopping()
        for epoch, point in enumerate(self.curve, 1):
            self.stopping.see(epoch, point)

    def loss(self) -> Tensor:
        """The loss on the training nodes."""
        data = self.data
        return F.cross_entropy(self.model(data.x, data.edge_index)[data.train_mask], data.y[data.train_mask])

    def evaluate(self) -> dict[str, float]:
        """Losses and accuracies."""
        data = self.data
        logits = self.model(data.x, data.edge_index)
        correct = logits.argmax(-1) == data.y
        return {
            "train_loss": self.losses[-1],
            "val_loss": F.cross_entropy(logits[data.val_mask], data.y[data.val_mask]).item(),
            "val_accuracy": correct[data.val_mask].double().mean().item(),
            "test_accuracy": correct[data.test_mask].double().mean().item(),
        }

    def add_point(self) -> None:
        """Evaluates the model; this is part of the epoch's time."""
        start = self.clock()
        super().add_point()
        self.stopping.see(self.iteration, self.curve[-1])
        self.seconds[-1] += self.clock() - start

    def stops_early(self) -> bool:
        """Whether neither loss nor accuracy has improved for too long."""
        return self.stopping.waited >= self.case.protocol.patience

    def result(self) -> Row:
        """The columns of the finished training."""
        return {
            **self.stopping.checkpoint,
            "epochs": self.iteration,
            "seconds_per_epoch": statistics.median(self.seconds),
            "curve": {
                name: [round(point[name], 4) for point in self.curve[::CURVE_EVERY]] for name in Curve.__annotations__
            },
        }


def train(run: Run, show: Show, checkpoints: Path, save_every: float) -> Row:
    """Trains one network with the protocol, including early stopping, and returns its results."""
    hush()
    torch.set_num_threads(run.threads)
    return Classifier(run, checkpoints, save_every).run(show)


# The report ----------------------------------------------------------------------------------------------------------


def summarise(rows: Iterable[Row]) -> list[Line]:
    """One line per data set, model and kind of layers."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["dataset"], row["model"], row["layers"]), []).append(row)
    lines = []
    for (dataset, model, layers), group in groups.items():
        accuracies = [100 * row["test_accuracy"] for row in group]
        seconds = [row["seconds_per_epoch"] for row in group]
        is_papers = group[0]["protocol"]["max_epochs"] == Protocol.max_epochs
        published = PUBLISHED.get((dataset, model)) if is_papers else None
        lines.append(
            {
                "data set": dataset,
                "model": model,
                "layers": f"{layers}, {group[0]['features']} features",
                "runs": str(len(group)),
                "test, %": reports.mean_and_deviation(accuracies, alone=" ± 0.0"),
                "published, %": f"{published[0]:.1f} ± {published[1]:.1f}" if published else "–",
                "epochs": f"{statistics.mean(row['epochs'] for row in group):.0f}",
                "seconds/epoch (quartiles)": reports.median_and_quartiles(seconds),
            }
        )
    return lines


def notes(rows: Sequence[Row], skipped: Iterable[str]) -> list[str]:
    """Notes for readers of the table."""
    names = ("machine", "python", "torch", "torch-geometric", "gattn")
    lines = reports.machines(rows, names, ", {device}, {threads} thread(s) per process, {workers} process(es)")
    lines.append(
        "Published results are from Table 2 of the GAT paper, https://arxiv.org/abs/1710.10903, over 100 runs."
    )
    if any(row["model"] != "gat" for row in rows):
        lines.append("GATv2 and Transformer use GAT's hyper-parameters, untuned.")
    if any(row["layers"] == "pyg" for row in rows):
        lines.append("PyG's layers take dense features and have no dropout on projected features.")
    limits = {row["protocol"]["max_epochs"] for row in rows} - {Protocol.max_epochs}
    lines += [
        f"Some runs were limited to {limit} epochs, which is not the paper's protocol." for limit in sorted(limits)
    ]
    return [*lines, *(f"Not run: {reason}" for reason in skipped)]


def draw(rows: Sequence[Row]) -> Figure:
    """Learning curves of validation loss and accuracy: median over runs and range between quartiles."""
    datasets = unique(row["dataset"] for row in rows)
    figure = Figure(figsize=(9, 2.8 * len(datasets)), dpi=110, layout="constrained")
    axes = figure.subplots(len(datasets), 2, squeeze=False)
    metrics = (("val_loss", "validation loss", 1), ("val_accuracy", "validation accuracy, %", 100))
    for dataset, line in zip(datasets, axes, strict=True):
        for axis, (metric, label, factor) in zip(line, metrics, strict=True):
            groups: dict[tuple[str, str], list[list[float]]] = {}
            for row in rows:
                if row["dataset"] == dataset:
                    curve = [factor * value for value in row["curve"][metric]]
                    groups.setdefault((row["model"], row["layers"]), []).append(curve)
            for (model, layers), curves in groups.items():
                epochs = range(1, CURVE_EVERY * len(curves[0]) + 1, CURVE_EVERY)
                style = "-" if layers == "gattn" else "--"
                reports.draw_quartiles(axis, epochs, curves, COLOURS[model], style, f"{model} ({layers})")
            axis.set(xlabel="epoch", ylabel=label, title=dataset)
            axis.grid(alpha=0.25)
        line[1].legend(loc="lower right", fontsize=8)
    figure.suptitle("Median over runs and their middle half, as long as all of them last", fontsize=10)
    return figure


# The benchmark -------------------------------------------------------------------------------------------------------


class Citation(Benchmark[Run]):
    """Trains each model on each data set with each seed."""

    name = "citation"
    quick: ClassVar = {"runs": 1, "epochs": 30}

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the options."""
        add = parser.add_argument
        add("--datasets", nargs="+", metavar="NAME", help="data sets by gattn's names (default: karate and cora)")
        add("--models", nargs="+", default=["gat"], choices=MODELS, help="kinds of attention layer (default: gat)")
        add(
            "--layers",
            nargs="+",
            default=["gattn"],
            choices=LAYERS,
            help="libraries whose layers are used (default: gattn)",
        )
        add_runs(parser, 10)
        add_device(parser)
        text = "processes that share the runs; this does not change the results (default: %(default)s)"
        add("--workers", type=whole(1, MOST), default=1, help=text)
        text = "threads per process, whose number affects rounding (default: %(default)s)"
        add("--threads", type=whole(1, MOST), default=1, help=text)
        text = "how features are stored; auto keeps bags of words sparse for gattn's layers (default: %(default)s)"
        add("--features", default="auto", choices=("auto", "dense", "sparse"), help=text)
        add("--epochs", type=whole(1, 10**9), default=10_000, help="largest number of epochs (default: %(default)s)")
        add_saving(parser)
        text = "folder of results, checkpoints, table and picture (default: %(default)s)"
        add("--out", type=folder, default=Path("runs/citation"), help=text)

    @classmethod
    def check_options(cls, options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        """Replaces aliases of data sets, and removes duplicates."""
        if options.features == "sparse" and "pyg" in options.layers:
            parser.error("--features sparse does not work with --layers pyg, because PyG's layers take dense features")
        try:
            options.datasets = options.datasets and unique(map(gattn.datasets.canonical_name, options.datasets))
        except ValueError as error:
            parser.error(str(error))
        options.models, options.layers = unique(options.models), unique(options.layers)

    def densities(self) -> dict[str, float]:
        """The density of each data set's features; data sets that cannot be loaded are skipped.

        Raises:
            BenchmarkError: If one of them was requested by name.
        """
        return densities(self.options.datasets or DEFAULT_DATASETS, None if self.options.datasets else self.skip)

    def cases(self) -> list[Run]:
        """All runs, seed by seed, so that an interrupted benchmark has some runs of each kind."""
        options, densities = self.options, self.densities()
        runs = []
        for seed in range(options.runs):
            for dataset, density in densities.items():
                for model in options.models:
                    for layers in options.layers:
                        features = options.features if options.features != "auto" else storage(layers, density)
                        protocol = protocol_for(dataset, layers, options.epochs)
                        run = Run(dataset, model, layers, seed, options.device, options.threads, features, protocol)
                        runs.append(run)
        return runs

    def run(self, cases: Sequence[Run]) -> Generator[Message[Run], None, None]:
        """Trains."""
        work = functools.partial(train, checkpoints=self.options.out, save_every=self.options.save_every)
        return in_processes(cases, work, self.options.workers)

    def extra_columns(self) -> Row:
        """The number of processes, on which the times depend."""
        return {"workers": self.options.workers}

    def report(self, rows: dict[Run, Row]) -> None:
        """The table and the learning curves."""
        lines, remarks = summarise(rows.values()), notes(list(rows.values()), self.skipped.values())
        short = {"published, %": "paper, %", "seconds/epoch (quartiles)": "s/epoch"}
        self.publish(
            "Node classification with the GAT paper's protocol",
            lines,
            remarks,
            {"curves.png": draw(list(rows.values()))},
            headings={column: short.get(column, column) for column in lines[0]},
            shorten=lambda line: {**line, "layers": line["layers"].split(",")[0]},
        )


if __name__ == "__main__":
    Citation.main()
