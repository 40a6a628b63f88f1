"""Link prediction on a temporal graph, from each user's newest earlier messages: `python -m benchmarks.temporal`.

The messages of CollegeMsg are divided by time: 70 % for training, 15 % for validation and 15 % for the test. For each
message, a network scores its sender and receiver at its time, and the same sender with a random user. The network has
layers of attention from users at a time to their K newest messages before it, which `gattn.graphs.earlier_than` finds.
The test scores are those of the epoch with the best average precision on the validation messages.

Duration: 1.5 hours; with `--quick`: 1 minute.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import math
import statistics
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, TypedDict

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from torch_geometric.data import TemporalData

import gattn
from benchmarks.framework import reports
from benchmarks.framework.benchmark import Benchmark, Case
from benchmarks.framework.measuring import peak_above
from benchmarks.framework.options import MOST, add_runs, add_saving, folder, unique, whole
from benchmarks.framework.processes import BenchmarkError, Message, Show, in_processes
from benchmarks.framework.reports import Line
from benchmarks.framework.results import VERSIONS, Row
from benchmarks.framework.training import Training, computing_time, num_parameters, seed_iteration
from benchmarks.temporal_models import LAYERS, Network, Recipe
from gattn.graphs.builders import runs

PARTS = ("train", "val", "test")
EVALUATED = 2400
"""The number of messages that are scored at a time."""
COLOURS = {"tgat": reports.BLUE, "transformer": reports.RED, "mean": reports.GREEN}


# The runs ------------------------------------------------------------------------------------------------------------


class Curve(TypedDict):
    """The average precision after each epoch."""

    val: list[float]
    test: list[float]


class Result(TypedDict):
    """The columns that a run adds. Scores are average precisions, between 0 and 1."""

    parameters: int
    val_score: float
    test_score: float
    seen_score: float
    """That of the test messages both of whose users have sent or received one in training."""
    unseen_score: float
    """That of the other test messages."""
    seen: int
    """The number of test messages of the first kind."""
    unseen: int
    """The number of test messages of the second kind."""
    best_epoch: int
    seconds_per_epoch: float
    peak_bytes: int
    curve: Curve


@dataclass(frozen=True)
class Run(Case):
    """One training run, or a baseline that is not trained; equal runs have equal scores."""

    result = Result

    model: str
    seed: int
    threads: int
    recipe: Recipe

    def __str__(self) -> str:
        return f"{self.model} {self.seed}"


# The messages --------------------------------------------------------------------------------------------------------


@dataclass
class Neighbours:
    """The newest earlier messages of some users at some times, one after the other and each from new to old."""

    counts: Tensor
    """Their number for each user and time, `[N]`."""
    source: Tensor
    """The other end of each message, as a number of `History.users`, `[E]`."""
    age: Tensor
    """By how much each message is earlier, `[E]`."""

    def __post_init__(self) -> None:
        self._start = self.counts.cumsum(0) - self.counts

    def rows(self, index: Tensor) -> Neighbours:
        """Those of some of the users and times."""
        _, place = runs(self._start[index], self.counts[index])
        return Neighbours(self.counts[index], self.source[place], self.age[place])

    def target(self) -> Tensor:
        """The user and time to which each message belongs, `[E]`."""
        return torch.arange(len(self.counts)).repeat_interleave(self.counts)


class History:
    """All messages in the order of time.

    A user at the time of one of its messages is a node: number e is the sender of message e of M, and number M + e its
    receiver.

    Args:
        data: The messages.
        num_neighbours: The largest number of earlier messages that a user attends to.
    """

    def __init__(self, data: TemporalData, num_neighbours: int):
        self.ends, self.times = torch.stack([data.src, data.dst]), data.t
        self.num_neighbours = num_neighbours
        self.users = self.ends.flatten()
        self.neighbours = self.before(self.users, self.times.repeat(2))

    def before(self, users: Tensor, times: Tensor) -> Neighbours:
        """The newest messages of users `[N]` that are strictly earlier than times `[N]`."""
        graph, age = gattn.graphs.earlier_than(
            self.times, self.num_neighbours, groups=self.ends, query_times=times, query_groups=users
        )
        message, query = graph.edge_index
        other_is_receiver = self.ends[0, message] == users[query]
        return Neighbours(query.bincount(minlength=len(users)), message + len(self.times) * other_is_receiver, age)


class Pairs:
    """Messages, and for each of them one pair of the same sender and a random user, at the same time.

    Args:
        history: All messages.
        part: The numbers of the messages, `[M]`.
        num_users: Random users are drawn from this many, without the true receiver.
        seed: For drawing them.
    """

    def __init__(self, history: History, part: Tensor, num_users: int, seed: Sequence[int]):
        sender, receiver = history.ends[:, part]
        generator = torch.Generator().manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
        random = torch.randint(num_users - 1, (len(part),), generator=generator)
        self.random = random + (random >= receiver)
        self.users = torch.cat([sender, receiver, self.random])
        self.neighbours = history.before(self.users, history.times[part].repeat(3))
        self.history, self.size = history, len(part)

    def logits(self, model: Network, first: int, last: int) -> Tensor:
        """The logits of some messages and of their random pairs, `[2, last - first]`."""
        last = min(last, self.size)
        rows = (torch.arange(first, last) + self.size * torch.arange(3).unsqueeze(1)).flatten()
        sender, *others = model(self.history, self.users[rows], self.neighbours.rows(rows)).chunk(3)
        return torch.stack([model.score(torch.cat([sender, other], -1)).squeeze(-1) for other in others])


def split(data: TemporalData) -> dict[str, Tensor]:
    """The numbers of the messages of each part; messages of the same time are in the same part."""
    sizes = [part.num_events for part in data.train_val_test_split(val_ratio=0.15, test_ratio=0.15)]
    return dict(zip(PARTS, torch.arange(data.num_events).split(sizes), strict=True))


def is_seen(history: History, parts: dict[str, Tensor], part: str) -> Tensor:
    """Which messages of a part have two users who have sent or received one in training."""
    known = history.ends[:, parts["train"]].unique()
    return torch.isin(history.ends[:, parts[part]], known).all(0)


def average_precision(logits: Tensor) -> float:
    """The average precision of logits of positive and negative pairs, `[2, N]`; equal ones have the same rank."""
    _, place = logits.unique(return_inverse=True)
    counts = torch.stack([side.bincount(minlength=int(place.max()) + 1) for side in place]).flip(1).double()
    positive, negative = counts.cumsum(1)  # of this rank or a better one
    return (counts[0] * positive / (positive + negative)).sum().item() / logits.size(1)


# Training ------------------------------------------------------------------------------------------------------------


class Predictor(Training[Run]):
    """A network under training; an iteration is a batch of messages, in the order of time.

    Args:
        run: What to train.
        checkpoints: The folder of checkpoints.
        save_every: The least number of seconds between checkpoints.
    """

    watched = "val_score"

    def __init__(self, run: Run, checkpoints: Path, save_every: float):
        data, recipe = gattn.datasets.load("collegemsg"), run.recipe
        self.history, self.parts = History(data, recipe.neighbours), split(data)
        self.num_users = data.num_nodes
        self.held_out = held_out(self.history, self.parts, self.num_users)
        self.steps = math.ceil(len(self.parts["train"]) / recipe.batch)
        self.epoch = -1
        torch.manual_seed(run.seed)
        model = Network(recipe, run.model)
        learnt = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.Adam(learnt, recipe.learning_rate)
        clock = functools.partial(computing_time, "cpu")
        iterations = recipe.epochs * self.steps
        super().__init__(run, checkpoints, model, optimizer, iterations, self.steps, None, clock, save_every)

    def pairs(self, epoch: int) -> Pairs:
        """The training messages with the random users of an epoch."""
        if epoch != self.epoch:
            seed = (self.case.seed, epoch)
            self.epoch, self.drawn = epoch, Pairs(self.history, self.parts["train"], self.num_users, seed)
        return self.drawn

    def loss_of(self, model: Network, pairs: Pairs, first: int) -> Tensor:
        """The mean loss on the batch that begins with this message."""
        logits = pairs.logits(model, first, first + self.case.recipe.batch)
        labels = torch.tensor([[1.0], [0.0]]).expand_as(logits)
        return F.binary_cross_entropy_with_logits(logits, labels)

    def loss(self) -> Tensor:
        """The loss on the next batch."""
        epoch, step = divmod(self.iteration, self.steps)
        pairs = self.pairs(epoch)
        seed_iteration(self.case.seed, self.iteration)
        return self.loss_of(self.model, pairs, step * self.case.recipe.batch)

    def evaluate(self) -> dict[str, float]:
        """The scores on validation and test messages."""
        logits = {
            part: torch.cat(
                [pairs.logits(self.model, first, first + EVALUATED) for first in range(0, pairs.size, EVALUATED)], 1
            )
            for part, pairs in self.held_out.items()
        }
        return {"epoch": self.iteration // self.steps, **scores(logits, is_seen(self.history, self.parts, "test"))}

    def best(self) -> dict[str, float]:
        """The first point with the best validation score."""
        return max(self.curve, key=lambda point: point["val_score"])

    def peak_bytes(self) -> int:
        """The memory of a training step on the last messages, above data, parameters and gradients."""
        model, pairs = copy.deepcopy(self.model), self.pairs(0)
        first = max(pairs.size - self.case.recipe.batch, 0)
        self.loss_of(model, pairs, first).backward()  # loads the code
        return peak_above(lambda: self.loss_of(model, pairs, first).backward())[1]

    def result(self) -> Row:
        """The columns of the finished training."""
        best = self.best()
        seen = is_seen(self.history, self.parts, "test")
        epochs = [sum(self.seconds[first : first + self.steps]) for first in range(0, self.iteration, self.steps)]
        return {
            "parameters": num_parameters(self.model),
            **{name: best[name] for name in ("val_score", "test_score", "seen_score", "unseen_score")},
            "seen": int(seen.sum()),
            "unseen": int((~seen).sum()),
            "best_epoch": int(best["epoch"]),
            "seconds_per_epoch": statistics.median(epochs),
            "curve": {part: [round(point[f"{part}_score"], 4) for point in self.curve] for part in ("val", "test")},
        }


def held_out(history: History, parts: dict[str, Tensor], num_users: int) -> dict[str, Pairs]:
    """The messages for validation and test, whose random users are the same for all runs."""
    return {part: Pairs(history, parts[part], num_users, (0, number)) for number, part in enumerate(PARTS) if number}


def scores(logits: dict[str, Tensor], seen: Tensor) -> dict[str, float]:
    """The average precisions on the validation messages, on the test messages, and on both kinds of these."""
    kinds = {"val": logits["val"], "test": logits["test"]}
    kinds |= {"seen": logits["test"][:, seen], "unseen": logits["test"][:, ~seen]}
    if not all(part.isfinite().all() for part in kinds.values()):
        return dict.fromkeys((f"{name}_score" for name in kinds), math.nan)  # this ends the training
    return {f"{name}_score": average_precision(part) for name, part in kinds.items()}


# Without training ----------------------------------------------------------------------------------------------------


def edgebank(history: History, pairs: Pairs, part: Tensor) -> Tensor:
    """1 for each pair with an earlier message between them, in either direction, and 0 for others, `[2, M]`."""

    def number(first: Tensor, second: Tensor) -> Tensor:
        return torch.minimum(first, second) * len(history.users) + torch.maximum(first, second)

    sender, receiver = history.ends[:, part]
    asked = torch.cat([number(sender, receiver), number(sender, pairs.random)])
    graph, _ = gattn.graphs.earlier_than(
        history.times,
        k=1,
        groups=number(*history.ends),
        query_times=history.times[part].repeat(2),
        query_groups=asked,
    )
    return graph.edge_index[1].bincount(minlength=len(asked)).view(2, -1).double()


def recency(history: History, pairs: Pairs, part: Tensor) -> Tensor:
    """Minus the time since the newest message of the receiver or random user, whoever else was in it, `[2, M]`."""
    others = torch.stack([history.ends[1, part], pairs.random]).flatten()
    newest = History(TemporalData(src=history.ends[0], dst=history.ends[1], t=history.times), 1)
    found = newest.before(others, history.times[part].repeat(2))
    never = int(history.times[-1] - history.times[0]) + 1
    return -torch.full((len(others),), never).index_copy(0, found.target(), found.age).view(2, -1).double()


BASELINES = {"edgebank": edgebank, "recency": recency}
MODELS = (*LAYERS, *BASELINES)


def compare(run: Run) -> Row:
    """Scores a baseline that is not trained."""
    data = gattn.datasets.load("collegemsg")
    history, parts = History(data, run.recipe.neighbours), split(data)
    held = held_out(history, parts, data.num_nodes)
    seen = is_seen(history, parts, "test")
    found = scores({part: BASELINES[run.model](history, held[part], parts[part]) for part in held}, seen)
    return {
        "parameters": 0,
        **found,
        "seen": int(seen.sum()),
        "unseen": int((~seen).sum()),
        "best_epoch": 0,
        "seconds_per_epoch": 0.0,
        "peak_bytes": 0,
        "curve": {part: [round(found[f"{part}_score"], 4)] for part in ("val", "test")},
    }


# The work ------------------------------------------------------------------------------------------------------------


def train(run: Run, show: Show, checkpoints: Path, save_every: float) -> Row:
    """Measures a step's memory, then trains."""
    torch.set_num_threads(run.threads)
    if run.model in BASELINES:
        return compare(run)
    training = Predictor(run, checkpoints, save_every)
    peak = training.peak_bytes()
    return {**training.run(show), "peak_bytes": peak}


# The report ----------------------------------------------------------------------------------------------------------


def by_model(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """The rows of each model."""
    for model in MODELS:
        if group := [row for row in rows if row["model"] == model]:
            yield model, group


def summarise(rows: Sequence[Row]) -> list[Line]:
    """One line per model."""
    lines = []
    for model, group in by_model(rows):
        is_trained = model in LAYERS
        percent = {
            name: reports.mean_and_deviation([100 * row[f"{name}_score"] for row in group], digits=2)
            for name in ("val", "test", "seen", "unseen")
        }
        lines.append(
            {
                "model": model,
                "runs": str(len(group)),
                "validation AP, %": percent["val"],
                "test AP, %": percent["test"],
                "both users seen": percent["seen"],
                "a user unseen": percent["unseen"],
                "parameters": f"{group[0]['parameters']:,}".replace(",", " ") if is_trained else "–",
                "best epoch": f"{statistics.mean(row['best_epoch'] for row in group):.0f}" if is_trained else "–",
                "seconds/epoch": f"{statistics.median(row['seconds_per_epoch'] for row in group):.1f}"
                if is_trained
                else "–",
                "MB per step": reports.megabytes({"peak_bytes": statistics.median(row["peak_bytes"] for row in group)})
                if is_trained
                else "–",
            }
        )
    return lines


def notes(rows: Sequence[Row]) -> list[str]:
    """Notes for readers of the table."""
    recipes = {", ".join(f"{name} {value}" for name, value in row["recipe"].items()) for row in rows}
    sizes = {(row["seen"], row["unseen"]) for row in rows}
    return [
        *reports.machines(rows, (*VERSIONS, "python"), ", {threads} thread(s) per process"),
        "AP is the average precision of the messages among as many pairs of the same senders with random users (of all "
        "but the receiver), which are the same for all runs. The test score is that of the epoch with the best "
        "validation score; mean ± standard deviation.",
        *(
            f"Of {seen + unseen} test messages, {seen} have two users who have sent or received a message in training."
            for seen, unseen in sorted(sizes)
        ),
        *sorted(recipes),
        "edgebank gives 1 to pairs with an earlier message between them, in either direction, and 0 to others. recency "
        "ranks the receivers and random users by the time since their newest message. Neither is trained.",
        "Seconds are the processor time of training steps without evaluations: the median over runs of each run's "
        "median. MB is the peak in a training step above data, parameters and gradients, the median over runs.",
    ]


def draw(rows: Sequence[Row]) -> Figure:
    """Validation scores by epoch: median over runs and range between quartiles."""
    figure = Figure(figsize=(6, 3.4), dpi=110, layout="constrained")
    axis = figure.add_subplot()
    for model, group in by_model(rows):
        curves = [[100 * score for score in row["curve"]["val"]] for row in group]
        if model in BASELINES:
            style = ":" if model == "edgebank" else "--"
            axis.axhline(curves[0][0], color=reports.BLACK, linestyle=style, label=model, linewidth=1.4)
        else:
            epochs = range(1, max(map(len, curves)) + 1)
            reports.draw_quartiles(axis, epochs, curves, COLOURS[model], "-", model)
    axis.set(xlabel="epoch", ylabel="validation AP, %", title="CollegeMsg: median over runs and their middle half")
    axis.grid(alpha=0.25)
    axis.legend(loc="center right", fontsize=8)
    return figure


# The benchmark -------------------------------------------------------------------------------------------------------


class Temporal(Benchmark[Run]):
    """Trains each model with each seed."""

    name = "temporal"
    quick: ClassVar = {"runs": 1, "epochs": 1, "neighbours": 2}

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the options."""
        add = parser.add_argument
        add("--models", nargs="+", default=MODELS, choices=MODELS, help="kinds of layer, and baselines (default: all)")
        add_runs(parser, 5)
        add("--epochs", type=whole(1, 10**6), default=Recipe.epochs, help="epochs per run (default: %(default)s)")
        text = "earlier messages that a user attends to (default: %(default)s)"
        add("--neighbours", type=whole(1, 10**6), default=Recipe.neighbours, help=text)
        text = "processes that share the runs; this does not change the scores (default: %(default)s)"
        add("--workers", type=whole(1, MOST), default=1, help=text)
        text = "threads per process, whose number affects rounding (default: %(default)s)"
        add("--threads", type=whole(1, MOST), default=1, help=text)
        add_saving(parser)
        text = "folder of results, checkpoints, table and picture (default: %(default)s)"
        add("--out", type=folder, default=Path("runs/temporal"), help=text)

    @classmethod
    def check_options(cls, options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        """Makes the recipe."""
        options.recipe = replace(Recipe(), neighbours=options.neighbours, epochs=options.epochs)

    def cases(self) -> list[Run]:
        """All runs, seed by seed, so that an interrupted benchmark has some runs of each kind.

        Raises:
            BenchmarkError: If the data are missing.
        """
        try:
            gattn.datasets.load("collegemsg")
        except gattn.datasets.DatasetUnavailableError as error:
            raise BenchmarkError(str(error)) from error
        options, models = self.options, unique(self.options.models)
        return [
            Run(model, seed, options.threads, options.recipe)
            for seed, model in itertools.product(range(options.runs), models)
            if model in LAYERS or seed == 0  # baselines draw nothing
        ]

    def run(self, cases: Sequence[Run]) -> Generator[Message[Run], None, None]:
        """Trains."""
        work = functools.partial(train, checkpoints=self.options.out, save_every=self.options.save_every)
        return in_processes(cases, work, self.options.workers)

    def extra_columns(self) -> Row:
        """The number of runs at once."""
        return {"workers": self.options.workers}

    def report(self, rows: dict[Run, Row]) -> None:
        """The table and the learning curves."""
        found = list(rows.values())
        headings = {"model": "model", "test AP, %": "test AP", "both users seen": "seen", "a user unseen": "unseen"}
        headings |= {"best epoch": "best epoch", "seconds/epoch": "s/epoch"}
        self.publish(
            "Link prediction on CollegeMsg",
            summarise(found),
            notes(found),
            {"curves.png": draw(found)},
            headings=headings,
        )


if __name__ == "__main__":
    Temporal.main()
