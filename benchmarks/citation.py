"""Node classification on citation networks by the protocol of the GAT paper: `python -m benchmarks.citation`.

Two attention layers, row-normalised features, Adam; a checkpoint whenever validation loss and accuracy are both at
their best so far; stop when neither improved for 100 epochs, or after 10 000; the test accuracy is the checkpoint's.
Mean and standard deviation over seeds.

Every finished run is appended to a results file at once. A benchmark that was interrupted goes on where it stopped and
ends with the same numbers, on one process or several.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import signal
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypedDict

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch_geometric.data import Data
from torch_geometric.transforms import NormalizeFeatures

import gattn
from benchmarks.command_line import MOST, device, folder, session, whole
from benchmarks.reports import print_table, save_figure, write_table
from benchmarks.results import Machine, ResultsFile, machine

DEFAULT_DATASETS = ("karate", "cora")
MODELS = ("gat", "gatv2", "transformer")
LAYERS = ("gattn", "pyg")

#: Test accuracy in percent, mean and standard deviation of 100 runs: Table 2 of https://arxiv.org/abs/1710.10903.
PUBLISHED = {("cora", "gat"): (83.0, 0.7), ("citeseer", "gat"): (72.5, 0.7), ("pubmed", "gat"): (79.0, 0.3)}

#: Where at most this share of the features is not zero, they are kept sparse.
SPARSE_DENSITY = 0.1

CURVE_EVERY = 5
"""Learning curves keep one epoch in so many."""


@dataclass(frozen=True)
class Protocol:
    """Hyper-parameters. The paper's for GAT on citation networks; the other models and data sets use the same."""

    hidden_channels: int = 64
    heads: int = 8
    out_heads: int = 1
    dropout: float = 0.6
    value_dropout: float = 0.6
    learning_rate: float = 0.005
    weight_decay: float = 0.0005
    patience: int = 100
    max_epochs: int = 10_000


@dataclass(frozen=True)
class Run:
    """One training run; equal runs have equal results."""

    dataset: str
    model: str
    layers: str
    seed: int
    device: str
    threads: int
    features: str
    protocol: Protocol


class PyGGAT(gattn.models.GAT):
    """The same network on PyG's layers and PyTorch's dropout."""

    conv_types = {"gat": pyg.GATConv, "gatv2": pyg.GATv2Conv, "transformer": pyg.TransformerConv}  # noqa: RUF012

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for name in ("input_dropout", "dropout"):
            setattr(self, name, torch.nn.Dropout(getattr(self, name).p))


class Curve(TypedDict):
    """Values of every `CURVE_EVERY`-th epoch."""

    train_loss: list[float]
    val_loss: list[float]
    val_accuracy: list[float]


class Result(TypedDict):
    """What a row of results must have beside its `Run` and the machine to be read."""

    epochs: int
    test_accuracy: float
    seconds_per_epoch: float
    curve: Curve
    workers: int


def protocol_for(dataset: str, layers: str, max_epochs: int) -> Protocol:
    """The paper's hyper-parameters; PyG's layers cannot drop values."""
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
    """Loads the data, row-normalises the features and makes them sparse where that is asked for."""
    data = gattn.datasets.load(run.dataset, seed=run.seed)
    if data.x.min() >= 0:
        data = NormalizeFeatures()(data)
    if run.features == "sparse":
        data.x = data.x.to_sparse_csr()
    return data.to(run.device)


def epochs(run: Run, data: Data, model: torch.nn.Module) -> Iterator[dict[str, float]]:
    """Trains; yields after each epoch (a training step and a validation) losses and accuracies."""
    protocol = run.protocol
    optimizer = torch.optim.Adam(
        model.parameters(), lr=protocol.learning_rate, weight_decay=protocol.weight_decay, fused=True
    )
    while True:
        model.train()
        optimizer.zero_grad()
        logits = model(data.x, data.edge_index)
        loss = F.cross_entropy(logits[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            logits = model(data.x, data.edge_index)
            correct = logits.argmax(-1) == data.y
            yield {
                "train_loss": loss.item(),
                "val_loss": F.cross_entropy(logits[data.val_mask], data.y[data.val_mask]).item(),
                "val_accuracy": correct[data.val_mask].double().mean().item(),
                "test_accuracy": correct[data.test_mask].double().mean().item(),
            }


def train(run: Run, on_epoch: Any = None) -> dict[str, Any]:
    """Trains one network by the protocol, early stopping included, and returns its results."""
    torch.set_num_threads(run.threads)
    data = prepare(run)
    torch.manual_seed(run.seed)
    model = build_model(run, data).to(run.device)
    best_loss, best_accuracy, waited = float("inf"), 0.0, 0
    checkpoint: dict[str, Any] = {}
    curve: dict[str, list[float]] = {"train_loss": [], "val_loss": [], "val_accuracy": []}
    durations = []
    start = time.perf_counter()
    for epoch, metrics in enumerate(epochs(run, data, model), 1):
        durations.append(time.perf_counter() - start)
        if not metrics["val_loss"] < float("inf"):
            raise FloatingPointError(f"the validation loss became {metrics['val_loss']} in epoch {epoch} of {run}")
        if (epoch - 1) % CURVE_EVERY == 0:
            for name, values in curve.items():
                values.append(round(metrics[name], 4))
        if metrics["val_accuracy"] >= best_accuracy or metrics["val_loss"] <= best_loss:
            if metrics["val_accuracy"] >= best_accuracy and metrics["val_loss"] <= best_loss:
                checkpoint = {"checkpoint_epoch": epoch, **metrics}
            best_accuracy = max(best_accuracy, metrics["val_accuracy"])
            best_loss = min(best_loss, metrics["val_loss"])
            waited = 0
        else:
            waited += 1
        if on_epoch is not None:
            on_epoch(epoch, metrics)
        if waited == run.protocol.patience or epoch == run.protocol.max_epochs:
            break
        start = time.perf_counter()
    return {
        **checkpoint,
        "epochs": epoch,
        "seconds_per_epoch": statistics.median(durations),
        "curve": curve,
    }


def key(row: dict[str, Any]) -> str:
    """What makes two rows the same run."""
    return repr([row[name] for name in (*Run.__dataclass_fields__, "gattn", "torch")])


def planned(run: Run) -> str:
    """The key that the run's row will have."""
    return key({**asdict(run), **machine(run.device)})


def finished(results: ResultsFile) -> dict[str, dict[str, Any]]:
    """The rows that there are, by key."""
    return {key(row): row for row in results.rows(Run, Result, Machine)}


def execute(runs: Sequence[Run], results: ResultsFile, workers: int, console: Console) -> None:
    """Runs what is not yet in the results file."""
    done = finished(results)
    pending = [run for run in runs if planned(run) not in done]
    if len(pending) < len(runs):
        console.print(f"{len(runs) - len(pending)} of {len(runs)} runs are in {results.path} already.", soft_wrap=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("runs", total=len(runs), completed=len(runs) - len(pending))

        def finish(run: Run, result: dict[str, Any]) -> None:
            results.append({**asdict(run), **result, "workers": workers, **machine(run.device)})
            accuracy = f"{100 * result['test_accuracy']:.1f}"
            progress.update(task, advance=1, description=f"{run.dataset} {run.model} seed {run.seed}: {accuracy} %")

        if workers == 1:
            epoch_task = progress.add_task("epochs", total=None)
            for run in pending:
                progress.reset(epoch_task, total=run.protocol.max_epochs)

                def show(epoch: int, metrics: dict[str, float], run: Run = run) -> None:
                    text = f"{run.dataset} {run.model} {run.layers} seed {run.seed}: val {metrics['val_accuracy']:.3f}"
                    progress.update(epoch_task, completed=epoch, description=text)

                finish(run, train(run, show))
            progress.remove_task(epoch_task)
        else:
            share(pending, workers, finish)


def share(pending: Sequence[Run], workers: int, finish: Any) -> None:
    """Trains on several processes, and calls `finish(run, result)` here as results come."""
    queue = list(reversed(pending))
    running: dict[concurrent.futures.Future[dict[str, Any]], Run] = {}
    errors: list[BaseException] = []
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, initializer=_prepare_worker)
    try:
        # No run is handed out before its turn, so that an interruption or an error ends all but those under way.
        while running or (queue and not errors):
            while queue and len(running) < workers and not errors:
                run = queue.pop()
                running[pool.submit(train, run)] = run
            done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                run = running.pop(future)
                error = future.exception()
                if error is None:
                    finish(run, future.result())
                else:
                    errors.append(error)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()
    if errors:
        raise errors[0]


def _prepare_worker() -> None:
    """Leaves Ctrl-C to the parent, and ends with it when that is killed, instead of waiting for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    hush()
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line for each data set, model and kind of layers."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
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
                "test, %": _spread(accuracies),
                "published, %": f"{published[0]:.1f} ± {published[1]:.1f}" if published else "–",
                "epochs": f"{statistics.mean(row['epochs'] for row in group):.0f}",
                "seconds/epoch (quartiles)": _quartiles(seconds),
            }
        )
    return lines


def _spread(values: Sequence[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.1f} ± {deviation:.1f}"


def _quartiles(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.4f}"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.4f} ({low:.4f}–{high:.4f})"


def notes(rows: Sequence[dict[str, Any]], unavailable: dict[str, str]) -> list[str]:
    """What a reader of the table must know."""
    described = {
        ", ".join(f"{name} {row[name]}" for name in ("machine", "python", "torch", "torch-geometric", "gattn"))
        + f", {row['device']}, {row['threads']} thread(s) a process, {row['workers']} process(es)"
        for row in rows
    }
    lines = [*sorted(described)]
    lines.append("Published: Table 2 of the GAT paper, https://arxiv.org/abs/1710.10903, 100 runs.")
    if any(row["model"] != "gat" for row in rows):
        lines.append("GATv2 and Transformer rows use GAT's hyper-parameters, untuned.")
    if any(row["layers"] == "pyg" for row in rows):
        lines.append("PyG's layers take dense features and have no dropout on projected features.")
    limits = {row["protocol"]["max_epochs"] for row in rows} - {Protocol.max_epochs}
    lines += [f"Cut off after {limit} epochs, which is not the paper's protocol." for limit in sorted(limits)]
    lines += [f"Not run: {reason}" for reason in unavailable.values()]
    return lines


def compact(lines: Sequence[dict[str, str]]) -> Table:
    """The table for a terminal of 80 columns; table.md has the rest."""
    table = Table(title="Node classification, GAT paper's protocol", box=box.SIMPLE_HEAD, padding=(0, 1))
    short = {"published, %": "paper, %", "seconds/epoch (quartiles)": "s/epoch"}
    for name in lines[0]:
        justify: Any = "left" if name in ("data set", "model", "layers") else "right"
        table.add_column(short.get(name, name), justify=justify, no_wrap=True)
    for line in lines:
        seconds = line["seconds/epoch (quartiles)"].split()[0]
        layers = line["layers"].split(",")[0]
        table.add_row(*{**line, "layers": layers, "seconds/epoch (quartiles)": seconds}.values())
    return table


def report(rows: Sequence[dict[str, Any]], unavailable: dict[str, str], out: Path, console: Console) -> None:
    """Prints the table and writes it, with the learning curves, to `out`."""
    lines, remarks = summarise(rows), notes(rows, unavailable)
    if lines:
        print_table(compact(lines), console)
    for remark in remarks:
        console.print(remark, highlight=False, soft_wrap=True)
    if lines:
        write_table(out / "table.md", lines, remarks)
        draw(rows, out / "curves.png")
        console.print(f"Written: {out / 'table.md'}, {out / 'curves.png'}", highlight=False, soft_wrap=True)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Learning curves: validation loss and accuracy, median over runs with the range of the middle half."""
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    figure, axes = plt.subplots(len(datasets), 2, figsize=(9, 2.8 * len(datasets)), squeeze=False, layout="constrained")
    colours = {"gat": "#0072B2", "gatv2": "#D55E00", "transformer": "#009E73"}
    for dataset, (loss_axis, accuracy_axis) in zip(datasets, axes, strict=True):
        for axis, metric, label in (
            (loss_axis, "val_loss", "validation loss"),
            (accuracy_axis, "val_accuracy", "validation accuracy, %"),
        ):
            groups = dict.fromkeys((row["model"], row["layers"]) for row in rows if row["dataset"] == dataset)
            for model, layers in groups:
                curves = [
                    row["curve"][metric]
                    for row in rows
                    if (row["dataset"], row["model"], row["layers"]) == (dataset, model, layers)
                ]
                length = min(len(curve) for curve in curves)
                values = torch.tensor([curve[:length] for curve in curves], dtype=torch.float64)
                values = values * (100 if metric == "val_accuracy" else 1)
                low, middle, high = values.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64), dim=0)
                steps = torch.arange(length) * CURVE_EVERY + 1
                style = "-" if layers == "gattn" else "--"
                axis.plot(steps, middle, style, color=colours[model], label=f"{model} ({layers})", linewidth=1.4)
                axis.fill_between(steps, low, high, color=colours[model], alpha=0.15, linewidth=0)
            axis.set(xlabel="epoch", ylabel=label, title=dataset)
            axis.grid(alpha=0.25)
        accuracy_axis.legend(loc="lower right", fontsize=8)
    figure.suptitle("Median over runs and their middle half, as long as all of them last", fontsize=10)
    save_figure(figure, path, dpi=110)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.citation",
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--dataset", nargs="+", metavar="NAME", help="data sets by gattn's names; karate and cora if none"
    )
    parser.add_argument("--model", nargs="+", default=["gat"], choices=MODELS, help="kinds of attention layer")
    parser.add_argument("--layers", nargs="+", default=["gattn"], choices=LAYERS, help="whose layers")
    parser.add_argument("--runs", type=whole(1, 10**6), default=10, help="runs for each, with seeds from --seed on")
    parser.add_argument("--seed", type=whole(0, 2**62 - 1), default=0, help="first seed")
    parser.add_argument("--device", type=device, default="cpu", help="PyTorch device")
    parser.add_argument(
        "--workers",
        type=whole(1, MOST),
        default=1,
        help="processes that share the runs; the numbers stay the same",
    )
    parser.add_argument(
        "--threads", type=whole(1, MOST), default=1, help="threads per process; another number rounds differently"
    )
    parser.add_argument(
        "--features",
        default="auto",
        choices=("auto", "dense", "sparse"),
        help="how features are stored; auto keeps bags of words sparse for gattn's layers",
    )
    parser.add_argument("--max-epochs", type=whole(1, 10**9), default=10_000, help="epochs at most")
    parser.add_argument(
        "--out", type=folder, default=Path("runs/citation"), help="folder of results, table and picture"
    )
    options = parser.parse_args(arguments)
    if options.features == "sparse" and "pyg" in options.layers:
        parser.error("--features sparse is not for --layers pyg, whose layers take dense features")
    try:
        options.dataset = options.dataset and unique(map(gattn.datasets.canonical_name, options.dataset))
    except ValueError as error:
        parser.error(str(error))
    options.model, options.layers = unique(options.model), unique(options.layers)
    return options


def hush() -> None:
    """Silences what PyTorch says once a process about its own sparse matrices."""
    warnings.filterwarnings("ignore", "Sparse .* is in beta|Sparse invariant checks")


def unique(names: Iterable[str]) -> list[str]:
    """The names, each once, in their order."""
    return list(dict.fromkeys(names))


def find(options: argparse.Namespace) -> tuple[dict[str, float], dict[str, str]]:
    """The density of each data set's features, and why others cannot be had.

    Raises:
        SystemExit: If a data set that was asked for by name is missing.
    """
    densities, unavailable = {}, {}
    for dataset in options.dataset or DEFAULT_DATASETS:
        try:
            data = gattn.datasets.load(dataset)
            check_task(dataset, data)
            densities[dataset] = data.x.count_nonzero().item() / max(data.x.numel(), 1)
        except (gattn.datasets.DatasetUnavailableError, ValueError, ImportError) as error:
            if options.dataset:
                sys.exit(f"error: {error}")
            unavailable[dataset] = str(error)
    return densities, unavailable


def check_task(dataset: str, data: Any) -> None:
    """Raises `ValueError` if the data are not a graph whose nodes have features and one class each."""
    if not isinstance(data, Data):
        raise ValueError(f"{dataset} has many graphs, and this benchmark classifies the nodes of one.")
    if data.x is None:
        raise ValueError(f"{dataset} has no node features, which this benchmark needs.")
    if data.y.dim() != 1 or data.y.is_floating_point():
        raise ValueError(f"{dataset} has not one class a node, which this benchmark needs.")


def plan(options: argparse.Namespace, densities: dict[str, float]) -> list[Run]:
    """All runs, seed by seed, so that an interrupted benchmark has some of each."""
    runs = []
    for seed in range(options.seed, options.seed + options.runs):
        for dataset, density in densities.items():
            for model in options.model:
                for layers in options.layers:
                    features = options.features
                    if features == "auto":
                        features = "sparse" if layers == "gattn" and density <= SPARSE_DENSITY else "dense"
                    protocol = protocol_for(dataset, layers, options.max_epochs)
                    run = Run(dataset, model, layers, seed, options.device, options.threads, features, protocol)
                    runs.append(run)
    return runs


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    hush()
    options = parse(arguments)
    console = Console(markup=False)
    with session(options.out, console) as results:
        densities, unavailable = find(options)
        for reason in unavailable.values():
            console.print(f"Skipped: {reason}", style="yellow", highlight=False, soft_wrap=True)
        runs = plan(options, densities)
        execute(runs, results, options.workers, console)
        # In the order of the plan, so that the table does not depend on the order in which processes finished.
        rows = finished(results)
        report([rows[planned(run)] for run in runs], unavailable, options.out, console)


if __name__ == "__main__":
    main()
