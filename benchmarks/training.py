"""Networks with edge features and on typed graphs, with gattn's and PyG's layers: `python -m benchmarks.training`.

- *molbace*: GatedGCN with edge updates on ogbg-molbace (1 513 molecules, one binary label), in batches of 128.
- *typed*: HGT on a random graph of three node types and six edge types (`torch_geometric.datasets.FakeHeteroDataset`).

Both sides start with the same weights and see the same batches, so their losses agree up to rounding.

Duration: 1 minute; with `--quick`: half a minute.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypedDict

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric import seed_everything
from torch_geometric.datasets import FakeHeteroDataset
from torch_geometric.loader import DataLoader

import gattn
from benchmarks.framework.benchmark import Benchmark, Case
from benchmarks.framework.options import MOST, add_saving, folder, unique, whole
from benchmarks.framework.processes import BenchmarkError, Message, Show, in_processes
from benchmarks.framework.reports import machines, mark, ratio
from benchmarks.framework.results import VERSIONS, Row
from benchmarks.framework.training import Training
from benchmarks.pyg_layers import PyGGatedGCNConv

LAYERS = ("gattn", "pyg")
CHANNELS = 64


class Result(TypedDict):
    """The columns that a run adds."""

    losses: list[float]
    """The mean loss of each epoch."""
    seconds_per_epoch: float


@dataclass(frozen=True)
class Run(Case):
    """One training run."""

    result = Result

    task: str
    layers: str
    seed: int
    epochs: int
    threads: int

    def __str__(self) -> str:
        return f"{self.task} {self.layers} seed {self.seed}"


# The networks --------------------------------------------------------------------------------------------------------


class Molecules(torch.nn.Module):
    """Four layers of GatedGCN between embeddings of atoms and bonds and the mean over each molecule.

    Args:
        conv: The kind of layer.
    """

    def __init__(self, conv: type[gattn.nn.GatedGCNConv]):
        super().__init__()
        # Atoms have nine features and bonds three, all of which are integers below 128.
        self.atoms, self.bonds = (torch.nn.EmbeddingBag(n * 128, CHANNELS, mode="sum") for n in (9, 3))
        self.convs = torch.nn.ModuleList([conv(CHANNELS, CHANNELS, CHANNELS) for _ in range(4)])
        self.out = torch.nn.Linear(CHANNELS, 1)

    def forward(self, data: Any) -> Tensor:
        """The logit of each molecule."""
        x, edge_attr = (
            bag(numbers + 128 * torch.arange(numbers.size(1)))
            for bag, numbers in ((self.atoms, data.x), (self.bonds, data.edge_attr))
        )
        for conv in self.convs:
            x, edge_attr = conv(x, data.edge_index, edge_attr)
        out: Tensor = self.out(pyg.global_mean_pool(x, data.batch, data.num_graphs)).squeeze(-1)
        return out


class Typed(torch.nn.Module):
    """Two layers of HGT, and a classifier of the nodes of one type.

    Args:
        conv: The kind of layer.
        data: The graph.
        node_type: The type whose nodes have labels.
    """

    def __init__(self, conv: Callable[..., torch.nn.Module], data: Any, node_type: str):
        super().__init__()
        channels = {name: data[name].num_features for name in data.node_types}
        self.convs = torch.nn.ModuleList(
            [conv(channels, CHANNELS, data.metadata(), heads=4), conv(CHANNELS, CHANNELS, data.metadata(), heads=4)]
        )
        self.out = torch.nn.Linear(CHANNELS, int(data[node_type].y.max()) + 1)
        self.node_type = node_type

    def forward(self, data: Any) -> Tensor:
        """The logits of each class."""
        x = data.x_dict
        for conv in self.convs:
            x = conv(x, data.edge_index_dict)
        out: Tensor = self.out(x[self.node_type])
        return out


# Training ------------------------------------------------------------------------------------------------------------


@dataclass
class Task:
    """What is trained."""

    make: Callable[[str], torch.nn.Module]
    """Creates the network with the layers of `"gattn"` or `"pyg"`."""
    losses: Callable[[torch.nn.Module], Iterator[Tensor]]
    """The losses of one epoch."""
    steps: int
    """The number of these losses."""


def molbace() -> Task:
    """Graph properties: one binary label per molecule."""
    graphs = gattn.datasets.load("ogbg-molbace")
    loader = DataLoader(graphs[graphs.get_idx_split()["train"]], 128, shuffle=True)
    convs = {"gattn": gattn.nn.GatedGCNConv, "pyg": PyGGatedGCNConv}

    def losses(model: torch.nn.Module) -> Iterator[Tensor]:
        for batch in loader:
            yield F.binary_cross_entropy_with_logits(model(batch), batch.y.flatten().float())

    return Task(lambda layers: Molecules(convs[layers]), losses, len(loader))


def typed() -> Task:
    """Node classes: an epoch is a single step."""
    data = FakeHeteroDataset(num_node_types=3, num_edge_types=6, avg_num_nodes=5000, avg_degree=10)[0]
    (node_type,) = (name for name in data.node_types if "y" in data[name])
    convs = {"gattn": gattn.nn.HGTConv, "pyg": pyg.HGTConv}

    def losses(model: torch.nn.Module) -> Iterator[Tensor]:
        yield F.cross_entropy(model(data), data[node_type].y)

    return Task(lambda layers: Typed(convs[layers], data, node_type), losses, 1)


TASKS = {"molbace": molbace, "typed": typed}


class Trainer(Training[Run]):
    """A network under training; an evaluation is the mean loss of an epoch.

    Args:
        run: What to train.
        checkpoints: The folder of checkpoints.
        save_every: The least number of seconds between checkpoints.
    """

    watched = "train_loss"
    keeps_random_state = True

    def __init__(self, run: Run, checkpoints: Path, save_every: float):
        seed_everything(run.seed)
        self.task = task = TASKS[run.task]()
        state = task.make("gattn").state_dict()
        model = task.make(run.layers)
        model.load_state_dict(state)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
        torch.manual_seed(run.seed)  # for drawing the batches
        steps = task.steps
        super().__init__(run, checkpoints, model, optimizer, run.epochs * steps, steps, None, save_every=save_every)

    def loss(self) -> Tensor:
        """The loss on the next batch."""
        if self.iteration % self.task.steps == 0:
            self.batches = self.task.losses(self.model)
        return next(self.batches)

    def evaluate(self) -> dict[str, float]:
        """The mean loss of the epoch."""
        return {"train_loss": statistics.mean(self.losses)}

    def result(self) -> Row:
        """The columns of the finished training."""
        steps = self.task.steps
        epochs = [sum(self.seconds[first : first + steps]) for first in range(0, self.iterations, steps)]
        losses = [point["train_loss"] for point in self.curve]
        return {"losses": losses, "seconds_per_epoch": statistics.median(epochs)}


def train(run: Run, show: Show, checkpoints: Path, save_every: float) -> Row:
    """Trains one network."""
    torch.set_num_threads(run.threads)
    return Trainer(run, checkpoints, save_every).run(show)


# The benchmark -------------------------------------------------------------------------------------------------------


class Train(Benchmark[Run]):
    """Trains each network with both libraries' layers."""

    name = "training"
    quick: ClassVar = {"epochs": 1}

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the options."""
        add = parser.add_argument
        add("--tasks", nargs="+", default=list(TASKS), choices=TASKS, help="networks that are trained (default: all)")
        add(
            "--layers",
            nargs="+",
            default=LAYERS,
            choices=LAYERS,
            help="libraries whose layers are used (default: both)",
        )
        add("--seed", type=whole(0, 2**32 - 1), default=0, help="seed of weights and batches (default: 0)")
        add("--epochs", type=whole(1, 10**6), default=20, help="number of epochs (default: 20)")
        add("--threads", type=whole(1, MOST), default=1, help="number of threads (default: 1)")
        add_saving(parser)
        add(
            "--out",
            type=folder,
            default=Path("runs/training"),
            help="folder of results and table (default: %(default)s)",
        )

    def cases(self) -> list[Run]:
        """Both libraries' layers, task by task.

        Raises:
            BenchmarkError: If the molecules are requested but missing.
        """
        options = self.options
        if "molbace" in options.tasks:
            try:
                gattn.datasets.load("ogbg-molbace")
            except (gattn.datasets.DatasetUnavailableError, ImportError) as error:
                raise BenchmarkError(f"{error} (--tasks typed does not need it)") from error
        fixed = (options.seed, options.epochs, options.threads)
        return [Run(task, layers, *fixed) for task in unique(options.tasks) for layers in unique(options.layers)]

    def run(self, cases: Sequence[Run]) -> Generator[Message[Run], None, None]:
        """Trains."""
        work = functools.partial(train, checkpoints=self.options.out, save_every=self.options.save_every)
        return in_processes(cases, work)

    def report(self, rows: dict[Run, Row]) -> None:
        """One line per run."""
        lines = []
        for run, row in rows.items():
            other = rows.get(replace(run, layers="pyg"))
            theirs = other["seconds_per_epoch"] if other else None
            lines.append(
                {
                    "task": run.task,
                    "layers": run.layers,
                    "first loss": f"{row['losses'][0]:.4f}",
                    "last loss": f"{row['losses'][-1]:.4f}",
                    "seconds/epoch": f"{row['seconds_per_epoch']:.3f}",
                    "× PyG": mark(ratio(theirs, row["seconds_per_epoch"]), row, other),
                }
            )
        remarks = machines(rows.values(), (*VERSIONS, "python"), ", {threads} thread(s), {epochs} epochs")
        self.publish(
            "Training", lines, [*remarks, "Losses are means over an epoch, and times are medians over epochs."], {}
        )


if __name__ == "__main__":
    Train.main()
