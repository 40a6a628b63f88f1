"""Properties of molecules, with attention over bonds, all pairs of atoms, or both: `python -m benchmarks.molecules`.

ogbg-molbace and ogbg-molhiv use OGB's encoders, scaffold split and evaluator. ZINC-12k and the peptides of LRGB can be
added if their files are available. The tested weights are an exponential moving average, at the epoch with the best
validation score; tables show mean and standard deviation over seeds. Times are compared with those of the same networks
on PyG's layers. `--parts speed` measures time and memory on a few batches only, for data sets with long epochs.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, TypedDict

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from matplotlib.figure import Figure
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gattn
from benchmarks.framework import parallel, reports
from benchmarks.framework.benchmark import Benchmark, Case
from benchmarks.framework.measuring import Measurement, Quartiles, duration, measured, peak_above, quartiles, spread
from benchmarks.framework.options import MOST, folder, unique, whole
from benchmarks.framework.processes import BenchmarkError, Message, Show, in_processes
from benchmarks.framework.reports import Line
from benchmarks.framework.results import ALLOCATORS, VERSIONS, Row
from benchmarks.framework.training import Training, num_parameters
from benchmarks.pyg_layers import PyGGatedGCNConv
from gattn.datasets.ogb_package import import_ogb

USUAL = ("gatv2", "transformer", "gatedgcn", "complete", "gps")
LINEAR = "gps-linear"
MODELS = (*USUAL, LINEAR)
GLOBAL = ("complete", "gps", LINEAR)
"""Models of `GPSConv`, in which all atoms of a molecule attend to each other."""
LAYERS = ("gattn", "pyg")
SIDES = {"ours": "gattn", "theirs": "pyg"}
"""Columns of measurements of speed."""
PARTS = ("scores", "times", "speed")
"""What is run: training; a few epochs of it on both libraries' layers; or a few batches of it."""

TOLERANCE = 1e-3
"""The relative difference that is allowed between both libraries' losses and gradients, before training."""

SEED = 0
"""The seed of measurements of speed, which determines weights and batches."""

CHUNK = 64
"""The number of molecules whose random walks are computed together."""

COLOURS = dict(
    zip(
        MODELS,
        (reports.BLUE, reports.RED, reports.GREEN, reports.ORANGE, reports.PINK, reports.SKY),
        strict=True,
    )
)

LIBRARIES: dict[str, Any] = {
    "gattn": gattn.nn,
    "pyg": SimpleNamespace(**{**vars(pyg), "GatedGCNConv": PyGGatedGCNConv}),
}


# What is trained -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Hyper-parameters.

    `walks` is the number of steps of random walks, `warm_up` a share of all iterations, `decay` the decay of the
    averaged weights, and `clip` the largest norm of all gradients together. GatedGCN's bonds also have `channels`
    features.
    """

    channels: int = 64
    bond_channels: int = 16
    num_layers: int = 3
    heads: int = 4
    walks: int = 16
    dropout: float = 0.2
    batch: int = 256
    learning_rate: float = 0.001
    weight_decay: float = 0.01
    warm_up: float = 0.05
    decay: float = 0.99
    clip: float = 1.0


@dataclass(frozen=True)
class Task:
    """A data set: how it is scored, and what was published about it."""

    metric: str
    outputs: int
    epochs: int
    setting: Setting
    published: dict[str, str]
    """Test scores by model."""
    source: str = ""
    """Where these were published, and what they are if their names do not say it."""
    title: str = ""
    """The name of the data set in reports, if it differs."""


OGB = {"GCN": "76.06 ± 0.97", "GIN": "75.58 ± 1.40"}
PEPTIDES = Setting(channels=96, num_layers=4, batch=128)  # the size and the batches of the published GPS
FUNCTIONS = {
    "GCN+ of Luo et al.": "72.6",
    "GRIT": "69.88 ± 0.82",
    "GCN of Tönshoff et al.": "68.60 ± 0.50",
    "GPS": "65.35 ± 0.41",
    "GPS of Tönshoff et al.": "65.34 ± 0.91",
    "Exphormer": "65.27 ± 0.43",
}
OF_FUNCTIONS = (
    "GCN+ is the tuned GCN of https://arxiv.org/abs/2502.09263; both rows of Tönshoff et al. are from "
    "https://arxiv.org/abs/2309.00367 and tuned as well; GRIT is from https://arxiv.org/abs/2305.17589, GPS from "
    "https://arxiv.org/abs/2205.12454, and Exphormer from https://arxiv.org/abs/2303.06147. All of them use the "
    "published features of atoms and bonds, while ours were recomputed."
)
TASKS = {
    "ogbg-molbace": Task("ROC-AUC", 1, 30, Setting(batch=64), {}),
    "ogbg-molhiv": Task("ROC-AUC", 1, 12, Setting(), OGB, "https://arxiv.org/abs/2005.00687", "rebuilt molhiv"),
    "zinc-12k": Task(
        "MAE", 1, 400, Setting(num_layers=10), {"GAT": "0.384 ± 0.007"}, "https://arxiv.org/abs/2003.00982"
    ),
    "peptides-func": Task("AP", 10, 200, PEPTIDES, FUNCTIONS, OF_FUNCTIONS, "rebuilt Peptides-func"),
    "peptides-struct": Task("MAE", 11, 200, PEPTIDES, {}),
}


class Point(TypedDict):
    """A point of the learning curve; scores are in percent, except for MAE."""

    epoch: int
    train_loss: float
    val_loss: float
    validation: float
    test: float


class Result(TypedDict):
    """The columns that a run adds."""

    parameters: int
    first: list[float]
    """Loss and norm of the gradient of the untrained network on validation molecules, without dropout."""
    epoch: int
    """The epoch with the best validation score."""
    validation: float
    test: float
    seconds_per_epoch: float
    training_seconds: float
    evaluation_seconds: float
    curve: list[Point]


@dataclass(frozen=True)
class Run(Case):
    """One training run; equal runs have equal scores."""

    result = Result

    dataset: str
    model: str
    layers: str
    seed: int
    epochs: int
    purpose: str
    """A name in `PARTS`; `"times"` are the few epochs in which both libraries are compared."""
    setting: Setting
    processes: int = field(default=1, kw_only=True)
    """The number of processes that train it together; each draws its own dropout."""

    def __str__(self) -> str:
        return f"{self.dataset} {self.model} {self.layers} seed {self.seed} ({self.purpose})"


# Molecules -----------------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Molecules side by side: N atoms, E directed bonds, B molecules."""

    x: Tensor
    edge_index: Tensor
    edge_attr: Tensor
    walks: Tensor
    batch: Tensor
    y: Tensor


class Molecules:
    """All molecules of a data set in a few tensors, from which batches are cut; this is faster than joining objects.

    Each atom has the probabilities that a random walk returns to it after 1, 2, ..., `walks` steps.
    """

    def __init__(self, name: str, walks: int):
        dataset: Any = gattn.datasets.load(name)
        data = dataset._data
        self.split = {part: torch.as_tensor(index) for part, index in dataset.get_idx_split().items()}
        self.x, self.edge_index, self.edge_attr = data.x, data.edge_index, data.edge_attr
        self.y = data.y.view(len(dataset), -1).float()
        self.first_atom, self.first_bond = dataset.slices["x"], dataset.slices["edge_index"]
        self.walks = data.x.new_zeros(data.x.size(0), walks, dtype=torch.float)
        by_size = self.first_atom.diff().argsort(stable=True)  # molecules of one chunk are of about the same size
        for chunk in by_size.split(CHUNK):
            atoms, molecules = ranges(self.first_atom, chunk)
            self.walks[atoms] = self.return_probabilities(self[chunk].edge_index, molecules, walks)

    @staticmethod
    def return_probabilities(edge_index: Tensor, molecules: Tensor, steps: int) -> Tensor:
        """The probabilities that a random walk is back at its atom after 1, 2, ... steps, `[N, steps]`."""
        size, source = len(molecules), edge_index[0]
        atoms = torch.arange(size)
        place = atoms - torch.searchsorted(molecules, molecules)
        weights = 1 / source.bincount(minlength=size)[source]
        step = torch.sparse_coo_tensor(edge_index, weights, (size, size), check_invariants=True).coalesce()
        walk, back = F.one_hot(place).to(weights), []  # from each atom to each place in its molecule
        for _ in range(steps):
            walk = step @ walk
            back.append(walk[atoms, place])
        return torch.stack(back, dim=1)

    def __getitem__(self, index: Tensor) -> Batch:
        """The molecules with these numbers, `[B]`, as one batch."""
        atoms, molecules = ranges(self.first_atom, index)
        bonds, molecules_of_bonds = ranges(self.first_bond, index)
        sizes = self.first_atom.diff()[index]
        edge_index = self.edge_index[:, bonds] + (sizes.cumsum(0) - sizes)[molecules_of_bonds]
        return Batch(self.x[atoms], edge_index, self.edge_attr[bonds], self.walks[atoms], molecules, self.y[index])


def ranges(first: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers `first[i]`, ..., `first[i + 1] - 1` for each i in the index, and the position of each number's i."""
    sizes = first.diff()[index]
    places = torch.arange(len(index)).repeat_interleave(sizes)
    return torch.arange(len(places)) + (first[index] - sizes.cumsum(0) + sizes)[places], places


def score(name: str, logits: Tensor, labels: Tensor) -> float:
    """The score in percent, or the mean absolute error."""
    metric = TASKS[name].metric
    if metric == "MAE":
        return F.l1_loss(logits, labels).item()
    if metric == "AP":
        from sklearn.metrics import average_precision_score

        return 100 * float(average_precision_score(labels.numpy(), logits.numpy(), average="macro"))
    evaluator = import_ogb("ogb.graphproppred").Evaluator(name)
    return 100 * float(evaluator.eval({"y_true": labels.numpy(), "y_pred": logits.numpy()})["rocauc"])


# The network ---------------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """Attention and a feed-forward block, each with batch norm, dropout and a residual connection."""

    def __init__(self, model: str, layers: str, setting: Setting):
        super().__init__()
        library, channels, heads = LIBRARIES[layers], setting.channels, setting.heads
        options = {"in_channels": channels, "out_channels": channels // heads, "heads": heads}
        options["edge_dim"] = setting.bond_channels
        self.kind, self.dropout = model, torch.nn.Dropout(setting.dropout)
        if model in GLOBAL:
            conv = None if model == "complete" else library.TransformerConv(**options)
            kind: dict[str, Any] = {}
            if model == LINEAR:  # with as many channels as the other kind has
                kind = {"attn_type": "performer", "attn_kwargs": {"head_channels": None}}
            self.conv = library.GPSConv(channels, conv, heads, setting.dropout, **kind)
            return
        if model == "gatedgcn":
            self.conv = library.GatedGCNConv(channels, channels, channels)
        elif model == "gatv2":
            self.conv, self.norm = library.GATv2Conv(**options, add_self_loops=False), torch.nn.BatchNorm1d(channels)
        else:
            self.conv, self.norm = library.TransformerConv(**options), torch.nn.BatchNorm1d(channels)
        self.out_norm = torch.nn.BatchNorm1d(channels)
        wide, narrow = torch.nn.Linear(channels, 2 * channels), torch.nn.Linear(2 * channels, channels)
        self.mlp = torch.nn.Sequential(wide, torch.nn.ReLU(), self.dropout, narrow, self.dropout)

    def forward(self, x: Tensor, edge_attr: Tensor, edge_index: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Features of atoms and bonds."""
        if self.kind in GLOBAL:
            return self.conv(x, edge_index, batch, edge_attr=edge_attr), edge_attr
        if self.kind == "gatedgcn":
            out, edge_attr = self.conv(x, edge_index, edge_attr)  # it has its own norms and residual connections
            x = x + self.dropout(out - x)
        else:
            x = x + self.dropout(self.norm(self.conv(x, edge_index, edge_attr)).relu())
        return self.out_norm(x + self.mlp(x)), edge_attr


class Network(torch.nn.Module):
    """Encoders of atoms, bonds and random walks, blocks of attention, the mean per molecule, and a linear layer."""

    def __init__(self, dataset: str, model: str, layers: str, setting: Setting):
        super().__init__()
        bond_channels = setting.channels if model == "gatedgcn" else setting.bond_channels
        if dataset == "zinc-12k":
            self.atoms, self.bonds = (
                torch.nn.Sequential(torch.nn.Flatten(0), torch.nn.Embedding(kinds, channels))
                for kinds, channels in ((28, setting.channels), (4, bond_channels))
            )
        else:
            encoders = import_ogb("ogb.graphproppred.mol_encoder")
            self.atoms, self.bonds = encoders.AtomEncoder(setting.channels), encoders.BondEncoder(bond_channels)
        self.walks = torch.nn.Sequential(
            torch.nn.BatchNorm1d(setting.walks), torch.nn.Linear(setting.walks, setting.channels)
        )
        self.blocks = torch.nn.ModuleList([Block(model, layers, setting) for _ in range(setting.num_layers)])
        self.out = torch.nn.Linear(setting.channels, TASKS[dataset].outputs)

    def forward(self, batch: Batch) -> Tensor:
        """The logits or values of each molecule, `[B, outputs]`."""
        x, edge_attr = self.atoms(batch.x) + self.walks(batch.walks), self.bonds(batch.edge_attr)
        for block in self.blocks:
            x, edge_attr = block(x, edge_attr, batch.edge_index, batch.batch)
        out: Tensor = self.out(pyg.global_mean_pool(x, batch.batch, len(batch.y)))
        return out


def build_network(run: Run) -> Network:
    """The network of a run, with the same weights for both libraries."""
    torch.manual_seed(run.seed)
    network = Network(run.dataset, run.model, "gattn", run.setting)
    if run.layers == "gattn":
        return network
    other = Network(run.dataset, run.model, run.layers, run.setting)
    other.load_state_dict(network.state_dict())
    return other


# Training ------------------------------------------------------------------------------------------------------------


class Trainer(Training[Run]):
    """Trains the network of a run and averages its weights."""

    def __init__(self, run: Run, molecules: Molecules, checkpoints: Path):
        self.molecules, self.setting, self.task = molecules, run.setting, TASKS[run.dataset]
        self.per_epoch = math.ceil(len(molecules.split["train"]) / run.setting.batch)
        network = build_network(run)
        self.first = self.first_of(network, run.model)
        average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(run.setting.decay), use_buffers=True)
        model = torch.nn.ModuleDict({"trained": network, "averaged": average})
        optimizer = torch.optim.AdamW(network.parameters(), weight_decay=run.setting.weight_decay, fused=True)
        optimizer.register_step_post_hook(lambda *_: average.update_parameters(network))
        counts = run.epochs * self.per_epoch, self.per_epoch
        super().__init__(run, checkpoints, model, optimizer, *counts, run.setting.clip, time.process_time)
        self.trained = parallel.data_parallel(network, self.has_unused)

    def first_of(self, network: Network, model: str) -> list[float]:
        """Loss and gradient norm without dropout, which must be the same for both libraries' layers."""
        index = self.molecules.split["valid"]
        if model == LINEAR:  # PyG's depends on the padding, of which molecules of one size have none
            sizes = self.molecules.first_atom.diff()[index]
            index = index[sizes == sizes.mode().values]
        batch = self.molecules[index[: self.setting.batch]]
        loss = self.loss_of(network.eval()(batch), batch.y)
        gradients = torch.autograd.grad(loss, list(network.train().parameters()), allow_unused=True)
        used = [x for x in gradients if x is not None]
        self.has_unused = len(used) < len(gradients)  # such as the encoder of bonds if all pairs of atoms attend
        return [loss.item(), torch.nn.utils.get_total_norm(used).item()]

    def learning_rate(self) -> float:
        """Linear warm-up, then cosine decay."""
        progress, rise = (self.iteration + 1) / self.iterations, self.setting.warm_up
        if progress < rise:
            return self.setting.learning_rate * progress / rise
        return self.setting.learning_rate * (1 + math.cos(math.pi * (progress - rise) / (1 - rise))) / 2

    def loss(self) -> Tensor:
        """The loss on this iteration's molecules, which are divided among the processes."""
        parallel.seed(self.case.seed * 1_000_003 + self.iteration)  # of dropout
        epoch, place = divmod(self.iteration, self.per_epoch)
        index = self.batches(epoch)[place]
        batch = self.molecules[parallel.part(index)]
        return parallel.weighted(self.loss_of, self.trained(batch), batch.y, len(index))

    @functools.lru_cache(maxsize=1)  # noqa: B019 -- the trainer lives as long as its process
    def batches(self, epoch: int) -> Sequence[Tensor]:
        """The numbers of the molecules of each batch."""
        index = self.molecules.split["train"]
        order = torch.Generator().manual_seed(self.case.seed * 1_000_003 + epoch)
        return index[torch.randperm(len(index), generator=order)].tensor_split(self.per_epoch)

    def loss_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of a network's output."""
        return (F.l1_loss if self.task.metric == "MAE" else F.binary_cross_entropy_with_logits)(logits, labels)

    def evaluate(self) -> dict[str, float]:
        """Losses and the scores of the averaged weights."""
        point = {"epoch": self.iteration // self.per_epoch, "train_loss": statistics.mean(self.losses)}
        for part, name in (("valid", "validation"), ("test", "test")):
            index = self.molecules.split[part]
            batches = map(self.molecules.__getitem__, parallel.part(index).split(self.setting.batch))
            logits = parallel.gathered(torch.cat([*map(self.model["averaged"], batches)]))
            labels = self.molecules.y[index]
            if part == "valid":
                point["val_loss"] = self.loss_of(logits, labels).item()
            point[name] = score(self.case.dataset, logits, labels)
        return point

    def result(self) -> Row:
        """The columns of the epoch with the best validation score."""
        sign = -1 if self.task.metric == "MAE" else 1
        best = max(self.curve, key=lambda point: sign * point["validation"])
        starts = range(0, self.iterations, self.per_epoch)
        return {
            "parameters": num_parameters(self.model["trained"]),
            "first": self.first,
            **{name: best[name] for name in ("epoch", "validation", "test")},
            "seconds_per_epoch": statistics.median(sum(self.seconds[i : i + self.per_epoch]) for i in starts),
            "training_seconds": sum(self.seconds),
            "evaluation_seconds": self.evaluation_seconds,
            "curve": self.curve,
        }


def train(run: Run, show: Show, checkpoints: Path) -> Row:
    """Trains and tests."""
    torch.set_num_threads(1)
    return Trainer(run, Molecules(run.dataset, run.setting.walks), checkpoints).run(show)


# Speed ---------------------------------------------------------------------------------------------------------------


class Side(Quartiles):
    """Seconds per training step on one library's layers."""

    times: list[float]
    peak_bytes: int
    """By how much memory rises in one step."""
    first: list[float]
    """As in `Result`."""


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
        for number in range(self.batches):
            for layers in LAYERS if number % 2 == 0 else reversed(LAYERS):
                times[layers].append(duration(trainers[layers].step))
        row: Row = {"outcome": "ok", "reason": "", "per_epoch": trainers["gattn"].per_epoch}
        for side, layers in SIDES.items():
            first = trainers[layers].first
            row[side] = {**spread(times[layers]), "peak_bytes": peaks[layers], "first": first}
        ratio = [theirs / ours for ours, theirs in zip(times["gattn"], times["pyg"], strict=True)]
        return {**row, "ratio": quartiles(ratio)}

    def trainer(self, layers: str, molecules: Molecules, folder: Path) -> Trainer:
        """The network under training, with one library's layers."""
        run = Run(self.dataset, self.model, layers, SEED, TASKS[self.dataset].epochs, "speed", self.setting)
        return Trainer(run, molecules, folder)


# The report ----------------------------------------------------------------------------------------------------------


NOTES = (
    "Scores are in percent, except for MAE. They are those of exponentially averaged weights at the epoch with the "
    "best validation score, as mean ± standard deviation over seeds.",
    "Seconds/epoch are the processor time of training steps on one thread, including batches, in the median epoch of a "
    "separate run. × PyG compares with the same network on PyG's layers, with the same weights and batches; loss and "
    f"gradient of the untrained networks agree within a relative difference of {TOLERANCE:g}.",
)

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


def groups_of(rows: Sequence[Row], purpose: str) -> dict[tuple[str, str, str], list[Row]]:
    """The rows with a purpose, by data set, model and kind of layers."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row["purpose"] == purpose:
            groups.setdefault((row["dataset"], row["model"], row["layers"]), []).append(row)
    return groups


def summarise(rows: Sequence[Row]) -> list[Line]:
    """One line per data set, model and kind of layers, below the published results."""
    times = {key: row["seconds_per_epoch"] for key, (row,) in groups_of(rows, "times").items()}
    lines: list[Line] = []
    for (dataset, model, layers), group in groups_of(rows, "scores").items():
        task, seconds = TASKS[dataset], times.get((dataset, model, layers))
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
            "seconds/epoch": f"{seconds:.2f}" if seconds else "–",
            "× PyG": reports.ratio(times.get((dataset, model, "pyg")), seconds),
        }
        if not any(other["data set"] == line["data set"] for other in lines):
            unknown = {**dict.fromkeys(line, "–"), "data set": line["data set"], "metric": task.metric}
            lines += [{**unknown, "model": f"{x}, published", "test": test} for x, test in task.published.items()]
        lines.append(line)
    return lines


def budgets(rows: Sequence[Row]) -> list[str]:
    """Which data sets were trained for fewer epochs than `TASKS` has."""
    found = {(row["dataset"], row["epochs"]) for row in rows if row["purpose"] == "scores"}
    return [
        f"The budget on {TASKS[dataset].title or dataset} was {epochs} epoch(s) per run instead of "
        f"{TASKS[dataset].epochs}; the learning rate falls to zero within it."
        for dataset, epochs in sorted(found)
        if epochs < TASKS[dataset].epochs
    ]


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
    line["× PyG"] = shown("ratio", 1, ".2f")
    for side, name in names.items():
        seconds = reports.median(row, side)
        line[f"{name}, seconds/epoch"] = f"{seconds * row['per_epoch']:.0f}" if seconds else "–"
    for side, name in names.items():
        line[f"{name}, peak MB"] = f"{row[side]['peak_bytes'] / 1e6:.0f}" if side in row else "–"
    return line


def agree(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether losses and gradients of both libraries are the same up to `TOLERANCE`."""
    return all(math.isclose(x, y, rel_tol=TOLERANCE) for x, y in zip(first, second, strict=True))


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
        add(
            "--seeds",
            nargs="+",
            type=whole(0, 2**31 - 1),
            default=range(5),
            help="seeds of each model (default: 0 to 4)",
        )
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
        datasets, models, seeds = unique(options.datasets), unique(options.models), unique(options.seeds)
        for dataset in datasets:
            try:
                gattn.datasets.load(dataset)
            except (gattn.datasets.DatasetUnavailableError, ImportError) as error:
                raise BenchmarkError(f"{error} (use --datasets to leave it out)") from error
        runs, timed, speeds = [], [], []
        for dataset, model in itertools.product(datasets, models):
            task = TASKS[dataset]
            run = functools.partial(Run, dataset, model, setting=task.setting, processes=parallel.size())
            for layers, seed in itertools.product(unique(options.layers), seeds):
                runs.append(run(layers, seed, options.epochs or task.epochs, "scores"))
            for layers in LAYERS if options.timed_epochs else ():
                timed.append(run(layers, seeds[0], options.timed_epochs, "times"))
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
        remarks = [
            *NOTES,
            *budgets(found),
            *sorted(
                {
                    f"Published results: {TASKS[row['dataset']].source}"
                    for row in found
                    if TASKS[row["dataset"]].published
                }
            ),
            *described(found),
            *reports.machines(found, (*VERSIONS, "python"), ", one thread, {workers} run(s) at once"),
            *parallel.notes(found),
        ]
        self.publish("Molecules", summarise(found), remarks, {"curves.png": draw(found)})

    def report_speed(self, rows: dict[Speed, Row]) -> None:
        """The table of speed and memory."""
        found = list(rows.values())
        kept = ", ".join(f"{name}={value}" for name, value in ALLOCATORS["kept"].items())
        remarks = [
            *SPEED_NOTES,
            *[LINEAR_NOTE] * any(case.model == LINEAR for case in rows),
            f"glibc keeps freed memory instead of returning it to the system ({kept}).",
            *described(found),
            *reports.machines(found, (*VERSIONS, "python"), ", {batches} batches after two others, {allocator} memory"),
            *(f"{case}: {row['outcome']}: {row['reason']}" for case, row in rows.items() if row["outcome"] != "ok"),
        ]
        lines = [speed_line(case, row) for case, row in rows.items()]
        self.publish("Training steps on both libraries' layers", lines, remarks, {}, "speed.md")


if __name__ == "__main__":
    MoleculeProperties.main()
