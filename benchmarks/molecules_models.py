"""The data, networks and training of `benchmarks.molecules`."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypedDict

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gattn
from benchmarks.framework import parallel
from benchmarks.framework.benchmark import Case
from benchmarks.framework.processes import Show
from benchmarks.framework.results import Row
from benchmarks.framework.training import Training, num_parameters
from benchmarks.pyg_layers import PyGGatedGCNConv
from gattn.datasets.ogb_package import import_ogb

USUAL = ("gatv2", "transformer", "gatedgcn", "complete", "gps")
LINEAR = "gps-linear"
MODELS = (*USUAL, LINEAR)
GLOBAL = ("complete", "gps", LINEAR)
"""Models of `GPSConv`, in which all atoms of a molecule attend to each other."""
LAYERS = ("gattn", "pyg")
PARTS = ("scores", "times", "speed")
"""What is run: training; a few epochs of it on both libraries' layers; or a few batches of it."""


TOLERANCE = 1e-3
"""The relative difference that is allowed between both libraries' losses and gradients, before training."""

CHUNK = 64
"""The number of molecules whose random walks are computed together."""

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


OGB = {"GCN": "76.06 ± 0.97", "GIN": "75.58 ± 1.40", "GPS": "78.80 ± 1.01"}
OF_OGB = (
    "GCN and GIN are from https://arxiv.org/abs/2005.00687; GPS (https://arxiv.org/abs/2205.12454) is as "
    "https://arxiv.org/abs/2511.13010 quotes it. All of them use OGB's features of atoms and bonds."
)
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
    "ogbg-molhiv": Task("ROC-AUC", 1, 12, Setting(), OGB, OF_OGB, "rebuilt molhiv"),
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
        self.kind, self.dropout = model, getattr(library, "Dropout", torch.nn.Dropout)(setting.dropout)
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


def agree(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether losses and gradients of both libraries are the same up to `TOLERANCE`."""
    return all(math.isclose(x, y, rel_tol=TOLERANCE) for x, y in zip(first, second, strict=True))
