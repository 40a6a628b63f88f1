"""The models of `benchmarks.translation`, their training and their scores."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NotRequired, TypedDict

import numpy as np
import sacrebleu
import torch
import torch.nn.functional as F
from torch import Tensor

import gattn
from benchmarks.framework.benchmark import Case
from benchmarks.framework.processes import Show
from benchmarks.framework.results import Row
from benchmarks.framework.training import Training, computing_time, nearest_width, num_parameters, seed_iteration
from benchmarks.translation_data import (
    END,
    EXAMPLES,
    PAIRS,
    START,
    Batch,
    Batches,
    Corpus,
    Item,
    by_length,
    make_batch,
    padded,
)

#: The rows of the table: the attention of `gattn.models.Seq2Seq`, except in the last, which is another model.
ROWS = ("none", "dot", "general", "additive", "local-m", "local-p", "hard", "hard-st", "transformer")

#: The rows whose scores are dot products that Luong et al. do not scale.
PRODUCTS = ("dot", "general", "local-m", "local-p", "hard", "hard-st")

BINS = ((1, 4), (5, 8), (9, 12), (13, 16), (17, 20), (21, 25), (26, None))
"""The smallest and the largest number of words of the source; BLEU is shown for each of these bins."""

LONGEST_EXAMPLE = 50
"""The largest number of tokens in the translation of an example."""

WINDOW = 10
"""Where it is not chosen: local attention sees this many tokens before and after its centre."""


@dataclass(frozen=True)
class Setting:
    """Sizes and training, the same for all rows; each has the width that gives it this number of parameters."""

    vocabulary: int = 4000
    parameters: int = 1_800_000
    transformer_channels: int = 160
    transformer_layers: int = 2
    heads: int = 4
    batch: int = 64
    longest: int = 64
    """Pairs with a longer side are left out of training."""
    iterations: int = 1500
    warm_up: int = 210
    clip: float = 1.0
    evaluate_every: int = 250
    curve_sentences: int = 500
    """This many validation sentences are translated at every evaluation."""
    test_sentences: int | None = None
    """At most this many sentences of each test set are translated."""
    beams: int = 5


SETTINGS = {
    "default": Setting(),
    "quick": Setting(
        vocabulary=1000,
        parameters=400_000,
        transformer_channels=64,
        iterations=30,
        warm_up=10,
        evaluate_every=15,
        curve_sentences=10,
        test_sentences=20,
        beams=2,
    ),
    "large": Setting(
        vocabulary=8000,
        parameters=20_000_000,
        transformer_channels=384,
        transformer_layers=4,
        heads=6,
        batch=256,
        iterations=20_000,
        warm_up=2000,
        evaluate_every=2500,
    ),
}


@dataclass(frozen=True)
class Choice:
    """What is chosen for each row, on the validation set."""

    learning_rate: float
    dropout: float
    window: int | None
    """The window D of local-p, whose Gaussian has the standard deviation D / 2; `None` in all other rows."""
    scaled: bool | None
    """Whether dot products are divided by the square root of their number of channels; `None` in rows without them."""

    @property
    def variant(self) -> str:
        """What only some rows choose, as a suffix of their names."""
        return ("" if self.window is None else f", window {self.window}") + (", scaled" if self.scaled else "")


@dataclass(frozen=True)
class Grid:
    """The values to choose from, the same for all rows."""

    rates: tuple[float, ...]
    dropouts: tuple[float, ...]
    windows: tuple[int, ...]
    scaled: tuple[bool, ...] = (False, True)

    def choices(self, row: str) -> list[Choice]:
        """All choices of a row."""
        windows = self.windows if row == "local-p" else (None,)
        scaled = self.scaled if row in PRODUCTS else (None,)
        return [Choice(*values) for values in itertools.product(self.rates, self.dropouts, windows, scaled)]


#: The grid of each setting.
GRIDS = {
    "default": Grid((1.5e-3, 3e-3, 6e-3, 1.2e-2), (0.0, 0.1), (10, 20)),
    "quick": Grid((3e-3,), (0.1,), (10,)),
    "large": Grid((5e-4, 1e-3, 2e-3), (0.1, 0.3), (10, 20)),
}

Model = gattn.models.Seq2Seq | gattn.models.TransformerSeq2Seq


class Point(TypedDict):
    """An evaluation during training."""

    seconds: float
    bleu: float


class Scores(TypedDict):
    """Of a set of translations."""

    bleu: float
    chrf: float


class Tested(TypedDict):
    """Scores on a test set."""

    sentences: int
    greedy: Scores
    beam: Scores


class Bin(TypedDict):
    """BLEU of the sentences of some lengths."""

    low: int
    high: int | None
    count: int
    words: float
    bleu: float


class Example(TypedDict):
    """A sentence and its translation, in pieces."""

    source: list[str]
    translation: list[str]
    weights: NotRequired[list[list[float]]]


class Result(TypedDict):
    """The columns that a run adds."""

    parameters: int
    curve: list[Point]
    seconds: float
    test: Tested
    long: Tested
    bins: list[Bin]
    examples: list[Example]
    workers: int


class TrialResult(TypedDict):
    """The columns that a trial adds."""

    val_loss: float | None
    """`None` if the loss was not finite."""
    seconds: float
    workers: int


@dataclass(frozen=True)
class Run(Case):
    """One training run; equal runs have equal results."""

    result = Result

    row: str
    seed: int
    corpus: str
    device: str
    setting: Setting
    choice: Choice

    def __str__(self) -> str:
        return f"{self.row} seed {self.seed}"


@dataclass(frozen=True)
class Trial(Case):
    """The first third of a run, with a seed of its own: it shows what to choose."""

    result = TrialResult
    noun = "trials"
    seed: ClassVar[int] = 100

    row: str
    corpus: str
    device: str
    setting: Setting
    choice: Choice

    def __str__(self) -> str:
        return f"{self.row}{self.choice.variant}: rate {self.choice.learning_rate:g}, dropout {self.choice.dropout:g}"


def make_model(run: Run | Trial, width: int, num_tokens: int) -> Model:
    """The model of a row; the width is that of states and embeddings, in the Transformer of feed-forward layers."""
    row, setting = run.row, run.setting
    options: dict[str, Any] = {
        "dropout": run.choice.dropout,
        "start": START,
        "end": END,
        "share_embeddings": True,
        "tie_weights": True,
    }
    if row == "transformer":
        sizes = (setting.transformer_channels, setting.transformer_layers, setting.heads)
        return gattn.models.TransformerSeq2Seq(num_tokens, num_tokens, *sizes, feedforward=width, **options)
    options |= {"attention": None if row == "none" else row, "window": run.choice.window or WINDOW}
    options["scale"] = None if run.choice.scaled else 1.0
    return gattn.models.Seq2Seq(num_tokens, num_tokens, width, width, **options)


def find_width(run: Run | Trial, num_tokens: int) -> int:
    """The multiple of four whose model's number of parameters is nearest to the setting's."""
    return nearest_width(run.setting.parameters, lambda width: make_model(run, width, num_tokens))


def build_model(run: Run | Trial, num_tokens: int) -> Model:
    """The model; its weights depend on row, setting and seed."""
    width = find_width(run, num_tokens)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(run.seed)
        return make_model(run, width, num_tokens).to(run.device)


def cross_entropy(model: Model, batch: Batch, reduction: str = "mean") -> Tensor:
    """Of each target token given those before it; padding does not count."""
    logits = model(batch.source, batch.target, batch.source_lengths)
    real = torch.arange(batch.target.size(1), device=batch.target.device) < batch.target_lengths.unsqueeze(1)
    return F.cross_entropy(logits[real], batch.target[real], reduction=reduction)


def loss_of(model: Model, batch: Batch) -> Tensor:
    """What is minimised: the cross entropy; for hard attention, also what teaches it where to look."""
    if isinstance(model, gattn.models.TransformerSeq2Seq):
        return cross_entropy(model, batch)
    return model.loss(batch.source, batch.target, batch.source_lengths, batch.target_lengths)


@torch.no_grad()
def translate(model: Model, corpus: Corpus, texts: Sequence[str], beams: int, device: str, size: int = 64) -> list[str]:
    """Translations of texts, in their order."""
    sequences = corpus.encode(texts)
    order = sorted(range(len(texts)), key=lambda number: sequences[number].numel())
    translations = [""] * len(texts)
    for first in range(0, len(order), size):
        numbers = order[first : first + size]
        source, lengths = padded([sequences[number] for number in numbers], device)
        found = model.generate(source, lengths, max_length=2 * source.size(1) + 10, beams=beams)
        for number, text in zip(numbers, corpus.decode(found), strict=True):
            translations[number] = text
    return translations


def scores(translations: Sequence[str], items: Sequence[Item]) -> dict[str, float]:
    """BLEU and chrF of translations, against all references."""
    most = max((len(item.references) for item in items), default=0)
    # SacreBLEU passes over references that are None.
    streams: list[Any] = [
        [item.references[i] if i < len(item.references) else None for item in items] for i in range(most)
    ]
    metrics = {"bleu": sacrebleu.BLEU(), "chrf": sacrebleu.CHRF()}
    return {name: round(metric.corpus_score(translations, streams).score, 3) for name, metric in metrics.items()}


def bins_of(translations: Sequence[str], items: Sequence[Item]) -> list[Row]:
    """BLEU by words of the source; bins without sentences are left out."""
    rows = []
    for low, high in BINS:
        lengths = [len(item.source.split()) for item in items]
        inside = [i for i, length in enumerate(lengths) if low <= length <= (high or length)]
        if inside:
            result = scores([translations[i] for i in inside], [items[i] for i in inside])
            words = sum(lengths[i] for i in inside) / len(inside)
            rows.append({"low": low, "high": high, "count": len(inside), "words": round(words, 2), **result})
    return rows


def learning_rate(largest: float, setting: Setting, iteration: int) -> float:
    """Rises in a line, then falls in a line, to zero after the last iteration."""
    warm_up = min(setting.warm_up, setting.iterations // 2)
    if iteration < warm_up:
        return largest * (iteration + 1) / (warm_up + 1)
    return largest * (setting.iterations - iteration) / (setting.iterations - warm_up)


class Translator(Training[Run | Trial]):
    """The model under training.

    Args:
        run: What to train; a trial ends after a third of the iterations, on a whole run's schedule.
        corpus: The pairs.
        folder: The folder of checkpoints.
    """

    def __init__(self, run: Run | Trial, corpus: Corpus, folder: Path):
        self.corpus = corpus
        self.setting = setting = run.setting
        self.pairs = [pair for pair in corpus.train if max(map(len, pair)) <= setting.longest]
        lengths = np.array([[len(source), len(target)] for source, target in self.pairs])
        self.batches = Batches(lengths, setting.batch, run.seed)
        items = corpus.split.validation
        sources = [item.source for item in items for _ in item.references]
        references = [reference for item in items for reference in item.references]
        self.validation = list(zip(corpus.encode(sources), corpus.encode(references), strict=True))
        model = build_model(run, corpus.size)
        optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9, fused=True)
        clock = functools.partial(computing_time, run.device)
        iterations, evaluate_every = setting.iterations, setting.evaluate_every
        if isinstance(run, Trial):
            iterations = evaluate_every = iterations // 3
        super().__init__(run, folder, model, optimizer, iterations, evaluate_every, setting.clip, clock)

    def learning_rate(self) -> float:
        """The learning rate of this iteration."""
        return learning_rate(self.case.choice.learning_rate, self.setting, self.iteration)

    def loss(self) -> Tensor:
        """The loss on this iteration's pairs."""
        seed_iteration(self.case.seed, self.iteration)
        return loss_of(self.model, make_batch([self.pairs[i] for i in self.batches[self.iteration]], self.case.device))

    def evaluate(self) -> dict[str, float]:
        """The loss on all validation pairs, and BLEU of some greedy translations."""
        batches = by_length(self.validation, self.setting.batch, self.case.device)
        loss = sum(cross_entropy(self.model, batch, "sum").item() for batch in batches)
        items = self.corpus.split.validation[: self.setting.curve_sentences]
        return {
            "iteration": self.iteration,
            "seconds": round(sum(self.seconds), 2),
            "train_loss": sum(self.losses) / len(self.losses),
            "val_loss": loss / sum(len(target) for _, target in self.validation),
            "bleu": scores(self.translate(items, 1), items)["bleu"],
        }

    def translate(self, items: Sequence[Item], beams: int) -> list[str]:
        """Translations of sentences."""
        return translate(self.model, self.corpus, [item.source for item in items], beams, self.case.device)

    def result(self) -> Row:
        """The columns of the model after the last iteration."""
        if isinstance(self.case, Trial):
            return {"val_loss": self.curve[-1]["val_loss"], "seconds": round(sum(self.seconds), 1)}
        start = self.clock()
        self.model.eval()
        row: Row = {}
        translations: list[str] = []
        tested: list[Item] = []
        for name, items in (("test", self.corpus.split.test), ("long", self.corpus.split.long)):
            items = items[: self.setting.test_sentences]
            greedy, beam = (self.translate(items, beams) for beams in (1, self.setting.beams))
            row[name] = {"sentences": len(items), "greedy": scores(greedy, items), "beam": scores(beam, items)}
            translations += beam
            tested += items
        row["bins"] = bins_of(translations, tested)
        row["examples"] = [self.example(source) for source in EXAMPLES]
        self.model.train()
        return {
            "parameters": num_parameters(self.model),
            "curve": self.curve,
            "seconds": round(sum(self.seconds), 1),
            "evaluation_seconds": round(self.evaluation_seconds + self.clock() - start, 1),
            **row,
        }

    @torch.no_grad()
    def example(self, text: str) -> Row:
        """A translation, token by token, and the weights that it was made with, if the model has any."""
        source, _ = padded(self.corpus.encode([text]), self.case.device)
        target = self.model.generate(source, max_length=LONGEST_EXAMPLE)
        row: Row = {
            "source": self.corpus.pieces(source[0].tolist()),
            "translation": self.corpus.pieces(target[0].tolist()),
        }
        if self.case.row not in ("none", "transformer"):
            _, weights = self.model(source, target, return_weights=True)
            row["weights"] = [[round(weight, 3) for weight in line] for line in weights[0].tolist()]
        return row


def train(run: Run | Trial, show: Show, folder: Path) -> Row:
    """Trains, and tests unless it is a trial; the folder has the vocabulary and the checkpoints."""
    torch.set_num_threads(1)
    corpus = Corpus(gattn.datasets.load_pairs(PAIRS), run.setting.vocabulary, folder)
    translator = Translator(run, corpus, folder)
    try:
        return translator.run(show)
    except FloatingPointError:
        if isinstance(run, Run):
            raise
        return {"val_loss": None, "seconds": round(sum(translator.seconds), 1)}
