"""Node classification with the recipes of "Classic GNNs are Strong Baselines": `python -m benchmarks.nodes`.

Each data set has one network of attention layers, with the normalisation, residuals and hyper-parameters that
Luo, Shi and Wu 2024 (https://arxiv.org/abs/2406.08993) found for GAT. For some data sets there are also graph
Transformers, with recipes of their own. All are trained on the full batch with Adam. The test score is that of the
evaluation with the best validation score; tables show mean and standard deviation over splits or seeds.

Duration: 10 hours; with `--quick`: 2 minutes.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import math
import statistics
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, TypedDict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import NormalizeFeatures
from torch_geometric.utils import add_self_loops, remove_self_loops, to_undirected

import gattn
from benchmarks.framework import parallel, reports
from benchmarks.framework.benchmark import Benchmark, Case
from benchmarks.framework.measuring import peak_above
from benchmarks.framework.node_data import densities, hush, storage
from benchmarks.framework.options import MOST, add_device, add_saving, folder, unique, whole
from benchmarks.framework.processes import Message, Show, in_processes
from benchmarks.framework.reports import Line
from benchmarks.framework.results import VERSIONS, Row
from benchmarks.framework.training import Training, computing_time, num_parameters, seed_iteration
from benchmarks.nodes_models import BORROWED, CONVS, GLOBAL_RECIPES, RECIPES, GlobalRecipe, Polynormer, Recipe, network
from gattn.datasets.registry import families
from gattn.distributed import shard

DEFAULT_DATASETS = ("cora", "citeseer", "photo", "minesweeper")
LAYERS, MODELS = tuple(CONVS), tuple(CONVS["gattn"])
COLOURS = {
    "gat": reports.BLUE,
    "gatv2": reports.RED,
    "transformer": reports.GREEN,
    "sgformer": reports.ORANGE,
    "sgformer-frobenius": reports.YELLOW,
    "gps": reports.SKY,
    "polynormer": reports.PINK,
}


# What is trained, and how it is scored --------------------------------------------------------------------------------


#: Binary tasks with unbalanced classes are scored by the area under the ROC curve, all others by accuracy.
BY_ROC_AUC = ("minesweeper", "tolokers", "questions")

SPLITS = {
    **dict.fromkeys(("cora", "citeseer", "pubmed"), ("public", "random")),
    **dict.fromkeys(("computers", "photo", "cs", "physics"), ("60-20-20", "random", "luo")),
}
"""The splits of `gattn.datasets.load` that are used if not only the public one is."""

RUNS = {"wikics": 20, "cora": 5, "citeseer": 5, "pubmed": 5, "ogbn-arxiv": 5, "ogbn-products": 5}
"""The number of splits or seeds, if it is not ten; see `runs_of`."""

#: Test scores of GAT by Luo et al. in percent, from the README of their repository's folder medium_graph.
LUO = {
    ("cora", "random"): "84.46 ± 0.55",
    ("citeseer", "random"): "72.22 ± 0.84",
    ("pubmed", "random"): "80.28 ± 0.64",
    ("computers", "luo"): "94.09 ± 0.37",
    ("photo", "luo"): "96.60 ± 0.33",
    ("cs", "luo"): "96.21 ± 0.14",
    ("physics", "luo"): "97.25 ± 0.06",
    ("wikics", "public"): "81.07 ± 0.54",
    ("roman-empire", "public"): "90.63 ± 0.14",
    ("amazon-ratings", "public"): "55.54 ± 0.51",
    ("minesweeper", "public"): "97.73 ± 0.73",
    ("questions", "public"): "77.95 ± 0.51",
}
#: Test scores of Polynormer by its authors in percent, from Tables 1 and 2 of https://arxiv.org/abs/2403.01232. The
#: latter is that of Polynormer-r, the variant with ReLU in their program.
POLYNORMER = {("photo", "luo"): "96.46 ± 0.26", ("minesweeper", "public"): "97.46 ± 0.36"}
PUBLISHED = {"gat": LUO, "polynormer": POLYNORMER}
"""By model, then by data set and split."""

#: GAT by Veličković et al., Table 2 of https://arxiv.org/abs/1710.10903, and GAT and GAT-sep by Platonov et al.,
#: https://arxiv.org/abs/2302.11640.
OTHERS = {
    ("cora", "public"): "83.0 ± 0.7",
    ("citeseer", "public"): "72.5 ± 0.7",
    ("pubmed", "public"): "79.0 ± 0.3",
    ("roman-empire", "public"): "80.87 ± 0.30, sep 88.75 ± 0.41",
    ("amazon-ratings", "public"): "49.09 ± 0.63, sep 52.70 ± 0.62",
    ("minesweeper", "public"): "92.01 ± 0.68, sep 93.91 ± 0.35",
    ("tolokers", "public"): "83.70 ± 0.47, sep 83.78 ± 0.43",
    ("questions", "public"): "77.43 ± 1.20, sep 76.79 ± 0.71",
}


# The runs ------------------------------------------------------------------------------------------------------------


class Curve(TypedDict):
    """Scores at each evaluation."""

    val: list[float]
    test: list[float]


class Result(TypedDict):
    """The columns that a run adds. Scores are accuracies or areas under the ROC curve, between 0 and 1."""

    parameters: int
    val_score: float
    test_score: float
    best_epoch: int
    epochs: int
    """The number of trained epochs."""
    seconds_per_epoch: float
    peak_bytes: int
    curve: Curve


@dataclass(frozen=True)
class Run(Case):
    """One training run; equal runs have equal scores."""

    result = Result

    dataset: str
    split: str
    model: str
    layers: str
    seed: int
    """Selects or draws the split, and seeds weights and dropout."""
    evaluate_every: int
    patience: int | None
    """Training ends at the first evaluation at least this many epochs after the best one; `None` disables this."""
    device: str
    threads: int
    features: str
    recipe: Recipe  # of graph Transformers, a `GlobalRecipe`
    processes: int = field(default=1, kw_only=True)
    """The number of processes that train it together; each draws its own dropout."""

    def __str__(self) -> str:
        return f"{self.dataset} {self.split} {self.model} {self.layers} {self.seed}"


def metric_of(dataset: str) -> str:
    """What the score is."""
    return "ROC AUC" if dataset in BY_ROC_AUC else "accuracy"


def splits_of(dataset: str) -> tuple[str, ...]:
    """The splits that `gattn.datasets.load` takes."""
    return next(
        family.splits for family in families() if dataset in family.names or dataset.startswith(family.prefixes)
    )


def has_recipe(dataset: str, model: str) -> bool:
    """Whether there are hyper-parameters of a model for a data set."""
    return dataset in GLOBAL_RECIPES.get(model, RECIPES)


def recipe_of(dataset: str, model: str) -> Recipe:
    """The hyper-parameters of a model for a data set."""
    return GLOBAL_RECIPES.get(model, RECIPES)[dataset]


def with_epochs(recipe: Recipe, epochs: int | None) -> Recipe:
    """The recipe with another number of epochs, if there is one; the local phase keeps its share of them."""
    epochs = epochs or recipe.epochs
    if isinstance(recipe, GlobalRecipe):
        return replace(recipe, epochs=epochs, local_epochs=recipe.local_epochs * epochs // recipe.epochs)
    return replace(recipe, epochs=epochs)


def default_splits(dataset: str, model: str) -> tuple[str, ...]:
    """The splits that are used by default; for graph Transformers, only that of their publications."""
    splits = SPLITS.get(dataset, ("public",))
    return tuple(split for split in splits if split in ("public", "luo")) if model in GLOBAL_RECIPES else splits


def runs_of(dataset: str, split: str) -> int:
    """The number of splits or seeds."""
    return 5 if split == "luo" else RUNS.get(dataset, 10)


def prepare(run: Run) -> Data:
    """Loads the data; the graph becomes undirected, with one self-loop per node."""
    data = gattn.datasets.load(run.dataset, split=run.split, seed=run.seed)
    if run.recipe.normalise:
        data = NormalizeFeatures()(data)
    edge_index = remove_self_loops(to_undirected(data.edge_index, num_nodes=data.num_nodes))[0]
    data.edge_index = add_self_loops(edge_index, num_nodes=data.num_nodes)[0]
    if run.features == "sparse":
        data.x = data.x.to_sparse_csr()
    return data.to(run.device)


def roc_auc(scores: Tensor, labels: Tensor) -> float:
    """The area under the ROC curve of scores `[N]` for labels `[N]` of 0 and 1; ties count half."""
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2).double()[place]  # the mean rank of equal scores, starting at 1
    positive = labels == 1
    count = int(positive.sum())
    area = (ranks[positive].sum() - count * (count + 1) / 2) / (count * (len(labels) - count))
    return area.item()


class Classifier(Training[Run]):
    """The network under training; an iteration is an epoch.

    Args:
        run: What to train.
        checkpoints: The folder of checkpoints.
        save_every: The least number of seconds between checkpoints.
    """

    watched = "val_score"

    def __init__(self, run: Run, checkpoints: Path, save_every: float):
        data = prepare(run)
        self.y = data.y
        self.parts = {name: data[f"{name}_mask"].nonzero().squeeze(1) for name in ("train", "val", "test")}
        self.x, self.graph, self.own_labels, self.own_train = data.x, data.edge_index, data.y, self.parts["train"]
        if parallel.size() > 1:
            self._shard(data)
        torch.manual_seed(run.seed)
        recipe = run.recipe
        model = network(recipe, data.num_features, int(data.y.max()) + 1, run.model, run.layers)
        model = model.to(run.device)
        optimizer = torch.optim.Adam(
            model.parameters(), recipe.learning_rate, weight_decay=recipe.weight_decay, fused=True
        )
        clock = functools.partial(computing_time, run.device)
        super().__init__(run, checkpoints, model, optimizer, recipe.epochs, run.evaluate_every, None, clock, save_every)
        if isinstance(model, Polynormer) and self.iteration > model.local_epochs:
            model.net.use_global()  # no checkpoint holds the phase
        # Transformer layers have weights for their targets' own features even if they do not add these.
        self.trained = parallel.data_parallel(model, has_unused=run.model == "transformer")

    def _shard(self, data: Data) -> None:
        """Keeps this process's nodes and the edges that point to them."""
        mesh = dist.init_device_mesh(data.y.device.type, (parallel.size(),))
        self.graph = shard(gattn.SparseGraph(data.edge_index, data.num_nodes, data.num_nodes), mesh)
        is_sparse = data.x.layout == torch.sparse_csr  # sparse tensors cannot be indexed by rows
        x = self.graph.scatter(data.x.to_sparse_coo() if is_sparse else data.x)
        self.x = x.to_sparse_csr() if is_sparse else x
        self.own_labels = self.graph.scatter(data.y)
        self.own_train = self.graph.scatter(data.train_mask).nonzero().squeeze(1)

    def loss_of(self, model: torch.nn.Module) -> Tensor:
        """The mean cross-entropy of a model on the training nodes, which are divided among the processes."""
        logits = model(self.x, self.graph)[self.own_train]
        return parallel.weighted(F.cross_entropy, logits, self.own_labels[self.own_train], len(self.parts["train"]))

    def loss(self) -> Tensor:
        """The loss of this epoch."""
        seed_iteration(self.case.seed, self.iteration)
        return self.loss_of(self.trained)

    def step(self) -> None:
        """Trains for one epoch; Polynormer's global phase starts from the best evaluation of its local phase."""
        if isinstance(self.model, Polynormer) and self.iteration == self.model.local_epochs:
            self.model.start_global(self.optimizer)
        super().step()

    def add_point(self) -> None:
        """Evaluates the model."""
        super().add_point()
        is_local = isinstance(self.model, Polynormer) and self.iteration <= self.model.local_epochs
        if is_local and self.best() is self.curve[-1]:
            self.model.keep(self.optimizer)

    def evaluate(self) -> dict[str, float]:
        """The scores on validation and test nodes."""
        logits = self.model(self.x, self.graph)
        if parallel.size() > 1:
            logits = self.graph.gather(logits)
        return {
            "epoch": self.iteration,
            "val_score": self.score(logits, "val"),
            "test_score": self.score(logits, "test"),
        }

    def score(self, logits: Tensor, part: str) -> float:
        """The accuracy or the area under the ROC curve on some nodes."""
        nodes = self.parts[part]
        logits, labels = logits[nodes], self.y[nodes]
        if not logits.isfinite().all():
            return float("nan")  # this ends the training
        if self.case.dataset in BY_ROC_AUC:
            return roc_auc(logits[:, 1] - logits[:, 0], labels)
        return (logits.argmax(-1) == labels).double().mean().item()

    def stops_early(self) -> bool:
        """Whether patience has run out, which is checked at evaluations only."""
        patience = self.case.patience
        if patience is None or not self.curve:
            return False
        return self.curve[-1]["epoch"] - self.best()["epoch"] >= patience

    def best(self) -> dict[str, float]:
        """The first point with the best validation score."""
        return max(self.curve, key=lambda point: point["val_score"])

    def peak_bytes(self) -> int:
        """The memory of a training step above data, parameters and gradients."""
        model = copy.deepcopy(self.model)  # its running means are not needed
        if isinstance(model, Polynormer):
            model.net.use_global()  # the phase that needs more
        self.loss_of(model).backward()  # loads the code and prepares the graph
        return peak_above(lambda: self.loss_of(model).backward(), self.case.device)[1]

    def result(self) -> Row:
        """The columns of the finished training."""
        best = self.best()
        return {
            "parameters": num_parameters(self.model),
            "val_score": best["val_score"],
            "test_score": best["test_score"],
            "best_epoch": best["epoch"],
            "epochs": self.iteration,
            "seconds_per_epoch": statistics.median(self.seconds),
            "curve": {part: [round(point[f"{part}_score"], 4) for point in self.curve] for part in ("val", "test")},
        }


def train(run: Run, show: Show, checkpoints: Path, save_every: float) -> Row:
    """Measures a step's memory, then trains."""
    hush()
    torch.set_num_threads(run.threads)
    training = Classifier(run, checkpoints, save_every)
    peak = training.peak_bytes()
    return {**training.run(show), "peak_bytes": peak}


# The report ----------------------------------------------------------------------------------------------------------


GLOBAL_NOTES = {
    "sgformer": "SGFormer's recipe is one point of the grid in which Luo et al. tuned it, chosen without tuning: 64 "
    "channels, three layers of each kind, dropout 0.5, and a weight of 0.8 for the layers on the edges.",
    "sgformer-frobenius": "Of all queries, and of all keys, SGFormer's paper divides by one norm, and projections have "
    "a bias: these rows do so. PyG's network, and the rows of `sgformer`, divide each row by its own.",
    "gps": "GPS's recipe is close to one point of the grid in which Luo et al. tuned it, also chosen without tuning: "
    "64 channels, two blocks, two heads, and dropout 0.7 on Photo and 0.5 on Minesweeper. Its blocks combine GAT with "
    "Performer's linear attention, where theirs have softmax attention.",
    "polynormer": "Polynormer's recipe and published scores are those of its authors, https://arxiv.org/abs/2403.01232 "
    "and https://github.com/cornell-zhang/Polynormer; here, β is 0.5 instead of learnt. Its epochs are those of both "
    "phases.",
}
"""What a reader must know about the recipes of graph Transformers."""


def summarise(rows: Sequence[Row]) -> list[Line]:
    """One line per data set, split, model and kind of layers."""
    groups: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["dataset"], row["split"], row["model"], row["layers"]), []).append(row)
    lines = []
    for (dataset, split, model, layers), group in groups.items():
        epochs = recipe_of(dataset, model).epochs
        is_published = all(row["recipe"]["epochs"] == epochs for row in group)
        lines.append(
            {
                "data set": dataset,
                "split": split,
                "model": model,
                "layers": layers,
                "runs": str(len(group)),
                "score": metric_of(dataset),
                "test, %": reports.mean_and_deviation([100 * row["test_score"] for row in group], digits=2),
                "published": PUBLISHED.get(model, {}).get((dataset, split), "–") if is_published else "–",
                "other GATs": OTHERS.get((dataset, split), "–") if is_published and model == "gat" else "–",
                "best epoch": f"{statistics.mean(row['best_epoch'] for row in group):.0f}",
                "epochs": f"{statistics.mean(row['epochs'] for row in group):.0f} of {epochs}",
                "seconds/epoch (quartiles)": reports.median_and_quartiles([row["seconds_per_epoch"] for row in group]),
                "MB per step": reports.megabytes({"peak_bytes": statistics.median(row["peak_bytes"] for row in group)}),
            }
        )
    return lines


def notes(rows: Sequence[Row]) -> list[str]:
    """Notes for readers of the table."""
    described = reports.machines(
        rows,
        (*VERSIONS, "python"),
        ", {device}, {threads} thread(s) per process, evaluated every {evaluate_every} epochs",
    )
    patience = sorted({str(row["patience"]) for row in rows if row["patience"]})
    others = sorted(
        {n for row in rows if (n := row["recipe"]["epochs"]) != recipe_of(row["dataset"], row["model"]).epochs}
    )
    is_sparse = any(row["features"] == "sparse" for row in rows)
    shared = max((row.get("workers", 1) for row in rows if row["device"] != "cpu"), default=1)
    return [
        *described,
        "The test score is that of the evaluation with the best validation score; mean ± standard deviation.",
        "The recipes are those of Luo et al. for GAT, https://arxiv.org/abs/2406.08993; GATv2 and Transformer use the "
        "same ones, untuned. GAT's published scores are theirs.",
        *(text for model, text in GLOBAL_NOTES.items() if any(row["model"] == model for row in rows)),
        *(f"Training ended after {epochs} epochs without a better validation score." for epochs in patience),
        *(f"Some runs had {n} epochs, not the recipe's: compare their times, not their scores." for n in others),
        *([f"Up to {shared} runs shared a GPU: their seconds are not those of one run alone."] if shared > 1 else []),
        *(["gattn's layers take sparse features where at most a tenth of them are nonzero."] if is_sparse else []),
        *parallel.notes(rows),
        *(text for dataset, text in BORROWED.items() if any(row["dataset"] == dataset for row in rows)),
        "The other GATs are those of Veličković et al., https://arxiv.org/abs/1710.10903 (Planetoid), and of Platonov "
        "et al., https://arxiv.org/abs/2302.11640 (GAT, and GAT-sep, which separates a node from its neighbours).",
        "Seconds are the processor time of a training step without evaluations (on a GPU, the clock's time): median "
        "and quartiles over runs of each run's median. MB is the peak in a training step above data, parameters and "
        "gradients, the median over runs.",
    ]


def draw(rows: Sequence[Row]) -> Figure:
    """Validation scores by epoch: median over runs and range between quartiles."""
    panels: dict[tuple[str, str], dict[tuple[str, str], list[Row]]] = {}
    for row in rows:
        panel = panels.setdefault((row["dataset"], row["split"]), {})
        panel.setdefault((row["model"], row["layers"]), []).append(row)
    columns = min(len(panels), 2)
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(5 * columns, 2.8 * lines), dpi=110, layout="constrained")
    for place, ((dataset, split), groups) in enumerate(panels.items(), 1):
        axis = figure.add_subplot(lines, columns, place)
        lowest = 100.0
        for (model, layers), group in groups.items():
            curves = [[100 * score for score in row["curve"]["val"]] for row in group]
            lowest = min(lowest, *(min(curve[len(curve) // 10 :]) for curve in curves))
            every, last = group[0]["evaluate_every"], group[0]["recipe"]["epochs"]
            epochs = [min(every * number, last) for number in range(1, len(curves[0]) + 1)]
            style = "-" if layers == "gattn" else "--"
            reports.draw_quartiles(axis, epochs, curves, COLOURS[model], style, f"{model} ({layers})")
        axis.set(xlabel="epoch", ylabel=f"validation {metric_of(dataset)}, %", title=f"{dataset}, {split} split")
        axis.set_ylim(bottom=lowest - 1)  # the steep first tenth would flatten the rest
        axis.grid(alpha=0.25)
        axis.legend(loc="lower right", fontsize=8)
    figure.suptitle("Median over runs and their middle half, as long as all of them last", fontsize=10)
    return figure


# The benchmark -------------------------------------------------------------------------------------------------------


class Nodes(Benchmark[Run]):
    """Trains each model on each data set and split."""

    name = "nodes"
    quick: ClassVar = {
        "datasets": ["photo", "minesweeper"],
        "models": [*MODELS, *GLOBAL_RECIPES],
        "runs": 1,
        "epochs": 2,
        "evaluate_every": 1,
        "workers": 2,
    }
    is_parallel = True

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the options."""
        add = parser.add_argument
        text = f"data sets by gattn's names (default: {', '.join(DEFAULT_DATASETS)}; others: "
        others = ", ".join(name for name in RECIPES if name not in DEFAULT_DATASETS)
        add("--datasets", nargs="+", metavar="NAME", help=f"{text}{others})")
        text = (
            "splits, which every data set must have (default: public; for Planetoid also random; for Amazon and "
            "Coauthor 60-20-20, random and luo, of which graph Transformers use the last only)"
        )
        add("--splits", nargs="+", choices=("public", "60-20-20", "random", "luo"), help=text)
        text = (
            f"kinds of attention layer (default: {', '.join(MODELS)}), and graph Transformers: "
            f"{', '.join(GLOBAL_RECIPES)}, for {' and '.join(GLOBAL_RECIPES['gps'])} only"
        )
        add("--models", nargs="+", default=MODELS, choices=(*MODELS, *GLOBAL_RECIPES), metavar="MODEL", help=text)
        add(
            "--layers",
            nargs="+",
            default=["gattn"],
            choices=LAYERS,
            help="libraries whose layers are used (default: gattn)",
        )
        text = (
            "number of splits or seeds, from 0 (default: 5 for Planetoid, OGB and the split luo, 20 for WikiCS, 10 for "
            "others)"
        )
        add("--runs", type=whole(1, 10**6), help=text)
        text = "number of epochs, in proportion for Polynormer's two phases (default: that of the recipe)"
        add("--epochs", type=whole(1, 10**6), help=text)
        text = "epochs between evaluations (default: %(default)s)"
        add("--evaluate-every", type=whole(1, 10**6), default=10, help=text)
        text = "epochs without a better validation score after which training stops (default: it never stops early)"
        add("--patience", type=whole(1, 10**6), help=text)
        add_device(parser)
        text = "processes that share the runs; this does not change the scores (default: %(default)s)"
        add("--workers", type=whole(1, MOST), default=1, help=text)
        text = "threads per process, whose number affects rounding (default: %(default)s)"
        add("--threads", type=whole(1, MOST), default=1, help=text)
        add_saving(parser)
        text = "folder of results, checkpoints, table and picture (default: %(default)s)"
        add("--out", type=folder, default=Path("runs/nodes"), help=text)

    @classmethod
    def check_options(cls, options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        """Replaces aliases of data sets, and refuses those without a recipe or without the requested splits."""
        try:
            options.datasets = options.datasets and unique(map(gattn.datasets.canonical_name, options.datasets))
        except ValueError as error:
            parser.error(str(error))
        for dataset in options.datasets or DEFAULT_DATASETS:
            if dataset not in RECIPES:
                parser.error(f"there is no recipe for {dataset}: choose from {', '.join(RECIPES)}")
            for split in options.splits or ():
                if split not in splits_of(dataset):
                    parser.error(f"{dataset} has no split {split}: it has {', '.join(splits_of(dataset))}")
        options.models, options.layers = unique(options.models), unique(options.layers)
        chosen = [model for model in options.models if model in GLOBAL_RECIPES]
        for model, dataset in itertools.product(chosen, options.datasets or ()):
            if dataset not in GLOBAL_RECIPES[model]:
                parser.error(
                    f"there is no recipe of {model} for {dataset}: choose from {', '.join(GLOBAL_RECIPES[model])}"
                )
        if "polynormer" in chosen and "pyg" in options.layers:
            parser.error("PyG's Polynormer fails in its global phase with several heads: leave it out of --layers pyg")
        if parallel.size() > 1 and chosen:
            parser.error(f"{chosen[0]} attends to all nodes, so it needs the whole graph: start it without torchrun")
        if parallel.size() > 1 and options.workers > 1:
            parser.error("the processes of torchrun share each run: leave --workers at 1")
        if parallel.size() > 1 and "pyg" in options.layers:
            parser.error("PyG's layers cannot compute on a part of a graph: start --layers pyg without torchrun")

    def cases(self) -> list[Run]:
        """All runs, seed by seed, so that an interrupted benchmark has some runs of each kind."""
        options = self.options
        found = densities(options.datasets or DEFAULT_DATASETS, None if options.datasets else self.skip)
        kinds = [
            (dataset, split, model)
            for dataset in found
            for split in unique(options.splits or SPLITS.get(dataset, ("public",)))
            for model in options.models
            if has_recipe(dataset, model) and (options.splits or split in default_splits(dataset, model))
        ]
        most = options.runs or max((runs_of(dataset, split) for dataset, split, _ in kinds), default=0)
        runs = []
        for seed, (dataset, split, model) in itertools.product(range(most), kinds):
            if seed >= (options.runs or runs_of(dataset, split)):
                continue
            recipe = with_epochs(recipe_of(dataset, model), options.epochs)
            for layers in options.layers:
                fixed = (options.evaluate_every, options.patience, options.device, options.threads)
                features = "dense" if model in GLOBAL_RECIPES else storage(layers, found[dataset])
                more = (*fixed, features, recipe)
                runs.append(Run(dataset, split, model, layers, seed, *more, processes=parallel.size()))
        return runs

    def run(self, cases: Sequence[Run]) -> Generator[Message[Run], None, None]:
        """Trains."""
        work = functools.partial(train, checkpoints=self.options.out, save_every=self.options.save_every)
        return in_processes(cases, work, self.options.workers)

    def extra_columns(self) -> Row:
        """The number of processes."""
        return {"workers": self.options.workers}

    def report(self, rows: dict[Run, Row]) -> None:
        """The table and the learning curves."""
        everything = sorted(rows.values(), key=lambda row: list(RECIPES).index(row["dataset"]))
        remarks = [*notes(everything), *(f"Not run: {reason}" for reason in self.skipped.values())]
        lines = summarise(everything)
        files = {"curves.png": draw(everything)}
        short = {"seconds/epoch (quartiles)": "s/epoch"}
        headings = {column: short.get(column, column) for column in lines[0] if column != "other GATs"}
        self.publish("Node classification with the recipes of Luo et al.", lines, remarks, files, headings=headings)


if __name__ == "__main__":
    Nodes.main()
