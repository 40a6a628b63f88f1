"""German to English with and without attention: `python -m benchmarks.translation`.

Tatoeba's pairs, split so that no sentence of a test pair was seen in training, on either side; a second test set has
sentences of 15 words and more. The rows are a recurrent encoder and decoder without attention, with each kind of it,
and a Transformer, all with a similar number of parameters, on the same batches.

Every run, one row and one seed, is trained on one thread. Training time is processor time, of training steps only, so
that it means the same when other things run on the machine. (On a GPU, it is the clock's.)
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import io
import itertools
import math
import os
import re
import statistics
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
import sacrebleu
import sentencepiece
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import gattn
from benchmarks.framework import reports
from benchmarks.framework.benchmark import Benchmark, Case
from benchmarks.framework.options import MOST, device, folder, whole
from benchmarks.framework.processes import BenchmarkError, Message, Show, in_processes
from benchmarks.framework.reports import Line
from benchmarks.framework.results import VERSIONS, Machine, Row, replace_file
from benchmarks.framework.training import (
    Training,
    computing_time,
    nearest_width,
    num_parameters,
    seed_iteration,
)
from gattn.visualize import attention_matrix

PAIRS = "tatoeba"

#: The rows of the table: the attention of `gattn.models.Seq2Seq`, except in the last, which is another model.
ROWS = ("none", "dot", "general", "additive", "local-m", "local-p", "hard", "hard-st", "transformer")

LONG = 15
"""The smallest number of words in a long sentence."""
HELD_OUT = 0.0125
"""This share of the components validates, and this share tests; of those with a long sentence, a third tests."""
HELD_OUT_LONG = 1 / 3

BINS = ((1, 4), (5, 8), (9, 12), (13, 16), (17, 20), (21, 25), (26, None))
"""The smallest and the largest number of words of the source; BLEU is shown for each of these bins."""

#: Test sentences whose alignments are drawn, each with a reference: a short one, one whose words change places, and a
#: long one.
EXAMPLES = {
    "Wo hast du deine Ferien verbracht?": "Where did you spend your vacation?",
    "Ich habe vor sechs Monaten aufgehört zu rauchen.": "I quit smoking six months ago.",
    "Als Tom einen Blick auf seine Armbanduhr warf, war er überrascht, wie spät es war.": (
        "When Tom looked at his watch, he was surprised to see how late it was."
    ),
}
LONGEST_EXAMPLE = 50
"""The largest number of tokens in the translation of an example."""

PAD, START, END, UNKNOWN = range(4)
POOL = 100
"""The pairs of this many batches are sorted by length together, so that there is little padding."""

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


@dataclass(frozen=True)
class Setting:
    """Sizes and training, the same for all rows; each has the width that gives it this number of parameters."""

    vocabulary: int = 4000
    parameters: int = 1_800_000
    transformer_channels: int = 160
    transformer_layers: int = 2
    heads: int = 4
    window: int = 10
    dropout: float = 0.1
    batch: int = 96
    longest: int = 64
    """Pairs with a longer side are left out of training."""
    iterations: int = 2800
    learning_rate: float = 3e-3
    transformer_learning_rate: float = 2e-3
    warm_up: int = 400
    clip: float = 1.0
    evaluate_every: int = 400
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
        batch=64,
        iterations=150,
        warm_up=30,
        evaluate_every=50,
        curve_sentences=50,
        test_sentences=100,
        beams=2,
    ),
    "large": Setting(
        vocabulary=8000,
        parameters=20_000_000,
        transformer_channels=384,
        transformer_layers=4,
        heads=6,
        dropout=0.3,
        batch=256,
        iterations=20_000,
        learning_rate=1e-3,
        transformer_learning_rate=1e-3,
        warm_up=2000,
        evaluate_every=2500,
    ),
}


# The data ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """A sentence and all translations of it that there are."""

    source: str
    references: tuple[str, ...]

    @property
    def is_long(self) -> bool:
        """Whether it or a translation is long."""
        return any(len(text.split()) >= LONG for text in (self.source, *self.references))


@dataclass(frozen=True)
class Split:
    """Pairs to train on, and sentences to be translated."""

    train: list[tuple[str, str]]
    validation: list[Item]
    test: list[Item]
    long: list[Item]


def form(sentence: str) -> str:
    """What sentences have in common that differ only in case and punctuation."""
    return " ".join(re.findall(r"\w+", sentence.casefold())) or sentence


def fraction(key: str) -> float:
    """A number in [0, 1) that looks random and depends on the key only."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:7]) / 2**56


def split_pairs(pairs: Iterable[tuple[str, str]]) -> Split:
    """Splits pairs by connected components, so that no sentence is on both sides of a split.

    Two pairs are connected if they share a German or an English sentence, case and punctuation aside. What becomes of a
    component depends on nothing but its first sentence by the alphabet, not on the order of the pairs.

    Args:
        pairs: (German, English).
    """
    pairs = sorted(set(pairs))
    nodes: dict[tuple[int, str], int] = {}
    german, english = ([nodes.setdefault((side, form(pair[side])), len(nodes)) for pair in pairs] for side in range(2))
    graph = coo_matrix((np.ones(len(pairs)), (german, english)), shape=(len(nodes), len(nodes)))
    _, labels = connected_components(graph, directed=False)
    components: dict[int, dict[str, list[str]]] = {}
    for label, (source, reference) in zip(labels[german].tolist(), pairs, strict=True):
        components.setdefault(label, {}).setdefault(source, []).append(reference)
    split = Split([], [], [], [])
    for sources in components.values():
        items = [Item(source, tuple(references)) for source, references in sources.items()]
        place = fraction(min(sources))
        tested = HELD_OUT_LONG if any(item.is_long for item in items) else HELD_OUT
        for item in items:
            if place < tested:
                (split.long if item.is_long else split.test).append(item)
            elif place < tested + HELD_OUT:
                split.validation.append(item)
            else:
                split.train.extend((item.source, reference) for reference in item.references)
    for part in (split.validation, split.test, split.long):
        part.sort(key=lambda item: fraction(item.source))  # so that the first of them are a random sample
    return split


def train_vocabulary(texts: Iterable[str], size: int) -> bytes:
    """Learns a byte-pair encoding of this many pieces: a model of SentencePiece."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        model_type="bpe",
        vocab_size=size,
        character_coverage=1.0,
        normalization_rule_name="identity",
        pad_id=PAD,
        bos_id=START,
        eos_id=END,
        unk_id=UNKNOWN,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def visible(piece: str) -> str:
    """A piece as one reads it: SentencePiece marks pieces that begin a word; here, a dash marks those that do not."""
    if piece.startswith("▁"):
        return piece[1:] or piece
    return f"-{piece}" if piece.isalnum() else piece


class Corpus:
    """The split, and its sentences as tokens: pieces of words, and an end.

    Args:
        pairs: (German, English).
        size: Of the vocabulary, which both languages share and which is learnt from the training pairs.
        folder: Where the vocabulary is kept. (default: `None`, it is not kept)
    """

    def __init__(self, pairs: Sequence[tuple[str, str]], size: int, folder: Path | None = None):
        self.split = split_pairs(pairs)
        texts = [text for pair in self.split.train for text in pair]
        self.name = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]
        path = None if folder is None else folder / f"vocabulary-{self.name}-{size}.model"
        if path is not None and path.exists():
            model = path.read_bytes()
        else:
            model = train_vocabulary(texts, size)
            if path is not None:
                replace_file(path, model)
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.size = self.processor.get_piece_size()

    def encode(self, texts: Sequence[str]) -> list[Tensor]:
        """The tokens of each text."""
        return [torch.tensor([*tokens, END]) for tokens in self.processor.encode(list(texts), num_threads=1)]

    def decode(self, tokens: Tensor) -> list[str]:
        """The texts of `[B, T]`, each up to its end."""
        kept = [list(itertools.takewhile(lambda token: token != END, row)) for row in tokens.tolist()]
        return list(self.processor.decode(kept, num_threads=1))

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """The labels of a matrix of weights."""
        return ["end" if token == END else visible(self.processor.id_to_piece(token)) for token in tokens]

    @functools.cached_property
    def train(self) -> list[tuple[Tensor, Tensor]]:
        """The training pairs, as tokens."""
        sides = [self.encode(texts) for texts in zip(*self.split.train, strict=True)]
        return list(zip(*sides, strict=True))


@dataclass(frozen=True)
class Batch:
    """Padded pairs."""

    source: Tensor
    """`[B, S]`"""
    source_lengths: Tensor
    """`[B]`"""
    target: Tensor
    """`[B, T]`"""
    target_lengths: Tensor
    """`[B]`"""


def padded(sequences: Sequence[Tensor], device: str) -> tuple[Tensor, Tensor]:
    """Sequences as `[B, T]`, and their lengths."""
    lengths = torch.tensor([sequence.numel() for sequence in sequences])
    return pad_sequence(list(sequences), batch_first=True, padding_value=PAD).to(device), lengths.to(device)


def make_batch(pairs: Sequence[tuple[Tensor, Tensor]], device: str) -> Batch:
    """Pairs of sequences as one batch."""
    return Batch(*padded([source for source, _ in pairs], device), *padded([target for _, target in pairs], device))


def by_length(pairs: Sequence[tuple[Tensor, Tensor]], size: int, device: str) -> Iterator[Batch]:
    """All pairs, in batches of similar length."""
    ordered = sorted(pairs, key=lambda pair: (pair[0].numel(), pair[1].numel()))
    for first in range(0, len(ordered), size):
        yield make_batch(ordered[first : first + size], device)


class Batches:
    """The pairs of each iteration: in every epoch all of them, in another order.

    Args:
        lengths: Of the sources and of the targets, `[n, 2]`.
        size: Pairs per batch.
        seed: Orders depend on it.
    """

    def __init__(self, lengths: np.ndarray, size: int, seed: int):
        self.lengths = lengths
        self.size = size
        self.seed = seed
        self.per_epoch = math.ceil(len(lengths) / size)
        self._epoch = -1
        self._order: list[np.ndarray] = []

    def __getitem__(self, iteration: int) -> np.ndarray:
        """The places of the pairs."""
        epoch, number = divmod(iteration, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._draw(epoch)
        return self._order[number]

    def _draw(self, epoch: int) -> list[np.ndarray]:
        generator = np.random.default_rng((self.seed, epoch))
        order = generator.permutation(len(self.lengths))
        pools = [order[first : first + POOL * self.size] for first in range(0, len(order), POOL * self.size)]
        batches = []
        for pool in pools:
            source, target = self.lengths[pool].T
            pool = pool[np.lexsort((source, target))]
            batches += [pool[first : first + self.size] for first in range(0, len(pool), self.size)]
        return [batches[number] for number in generator.permutation(len(batches))]


# Models and training -------------------------------------------------------------------------------------------------

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


@dataclass(frozen=True)
class Run(Case):
    """One training run; equal runs have equal results."""

    result = Result

    row: str
    seed: int
    corpus: str
    device: str
    setting: Setting

    def __str__(self) -> str:
        return f"{self.row} seed {self.seed}"


def make_model(row: str, width: int, setting: Setting, num_tokens: int) -> Model:
    """The model of a row; the width is that of states and embeddings, in the Transformer of feed-forward layers."""
    options: dict[str, Any] = {
        "dropout": setting.dropout,
        "start": START,
        "end": END,
        "share_embeddings": True,
        "tie_weights": True,
    }
    if row == "transformer":
        sizes = (setting.transformer_channels, setting.transformer_layers, setting.heads)
        return gattn.models.TransformerSeq2Seq(num_tokens, num_tokens, *sizes, feedforward=width, **options)
    options |= {"attention": None if row == "none" else row, "window": setting.window}
    return gattn.models.Seq2Seq(num_tokens, num_tokens, width, width, **options)


def find_width(row: str, setting: Setting, num_tokens: int) -> int:
    """The multiple of four whose model's number of parameters is nearest to the setting's."""
    return nearest_width(setting.parameters, lambda width: make_model(row, width, setting, num_tokens))


def build_model(run: Run, num_tokens: int) -> Model:
    """The model; its weights depend on row, setting and seed."""
    width = find_width(run.row, run.setting, num_tokens)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(run.seed)
        return make_model(run.row, width, run.setting, num_tokens).to(run.device)


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


class Translator(Training[Run]):
    """The model under training.

    Args:
        run: What to train.
        corpus: The pairs.
        folder: The folder of checkpoints.
    """

    def __init__(self, run: Run, corpus: Corpus, folder: Path):
        self.corpus = corpus
        self.setting = setting = run.setting
        self.largest_rate = setting.transformer_learning_rate if run.row == "transformer" else setting.learning_rate
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
        super().__init__(run, folder, model, optimizer, setting.iterations, setting.evaluate_every, setting.clip, clock)

    def learning_rate(self) -> float:
        """The learning rate of this iteration."""
        return learning_rate(self.largest_rate, self.setting, self.iteration)

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


def train(run: Run, show: Show, folder: Path) -> Row:
    """Trains and tests; the folder has the vocabulary and the checkpoints."""
    torch.set_num_threads(1)
    corpus = Corpus(gattn.datasets.load_pairs(PAIRS), run.setting.vocabulary, folder)
    return Translator(run, corpus, folder).run(show)


# The report ----------------------------------------------------------------------------------------------------------


NOTES = (
    "BLEU and chrF (SacreBLEU's defaults) by beam search, against all references. Greedy: without beam search. Long: "
    f"sentences of {LONG} words and more, or with such a reference. Mean ± standard deviation over seeds.",
    "Every row is the model after its last iteration; nothing is chosen on the validation set. Training: processor "
    "time of training steps only, one thread (on a GPU, the clock's time).",
)


def groups_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The runs of each row of the table."""
    return {name: group for name in ROWS if (group := [row for row in rows if row["row"] == name])}


def summarise(rows: Sequence[Row]) -> list[Line]:
    """The table's lines."""
    lines = []
    for name, group in groups_of(rows).items():
        line = {"attention": name, "parameters": str(group[0]["parameters"]), "seeds": str(len(group))}
        for part in ("test", "long"):
            for metric, title in (("bleu", "BLEU"), ("chrf", "chrF")):
                line[f"{part} {title}"] = reports.mean_and_deviation([row[part]["beam"][metric] for row in group])
            line[f"{part} BLEU, greedy"] = reports.mean_and_deviation([row[part]["greedy"]["bleu"] for row in group])
        line["training, min"] = reports.mean_and_deviation([row["seconds"] / 60 for row in group])
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
    height = 1.4 + 0.16 * max(len(example["translation"]) for example in examples)
    size = (max(width, 2.6) * columns, max(height, 2.4) * lines)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False)
    for axis in axes.flat[len(rows) :]:
        axis.set_axis_off()
    for row, example, axis in zip(rows, examples, axes.flat, strict=False):
        weights = torch.tensor(example["weights"])
        attention_matrix(weights, example["translation"], example["source"], ax=axis, title=row["row"], maximum=1.0)
        axis.set(xlabel="German, read", ylabel="English, written")
    german, english = list(EXAMPLES.items())[number]
    figure.suptitle(f"{german}\nreference: {english}", fontsize=10)
    return figure


# The benchmark -------------------------------------------------------------------------------------------------------


class Translation(Benchmark[Run]):
    """Trains each row with each seed."""

    name = "translation"

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the options."""
        add = parser.add_argument
        add("--rows", nargs="+", choices=ROWS, help="rows of the table (default: all)")
        add("--seeds", nargs="+", type=whole(0, 2**32 - 1), help="seeds of each (default: 0 1)")
        text = "sizes and training: an hour a seed on two cores; a few minutes; or for a GPU (default: %(default)s)"
        add("--setting", default="default", choices=SETTINGS, help=text)
        add("--quick", action="store_true", help="the same as --setting quick")
        add("--device", type=device, default="cpu", help="PyTorch device (default: %(default)s)")
        text = "runs at once, each on one thread; the numbers stay the same (default: one a core, one on a GPU)"
        add("--workers", type=whole(1, MOST), help=text)
        add("--report", action="store_true", help="no training: table and pictures of what there is")
        text = "folder of results, checkpoints, table and pictures (default: runs/translation; of a setting other than "
        add("--out", type=folder, help=text + "the default one, with its name)")

    @classmethod
    def check_options(cls, options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        """Fills in defaults, and refuses options that `--report` would ignore."""
        if options.quick:
            if options.setting not in ("default", "quick"):
                parser.error(f"--quick is the setting quick; leave it out, or --setting {options.setting}")
            options.setting = "quick"
        for name in ("rows", "seeds", "workers"):
            if options.report and getattr(options, name) is not None:
                parser.error(f"--report shows every finished run of the setting; leave --{name} out")
        if options.workers is None:
            options.workers = 1 if options.device.startswith("cuda") else os.cpu_count() or 1
        options.rows = [row for row in ROWS if row in (options.rows or ROWS)]
        options.seeds = list(dict.fromkeys(options.seeds or (0, 1)))
        if options.out is None:
            suffix = "" if options.setting == "default" else f"-{options.setting}"
            options.out = Path(f"runs/translation{suffix}")

    def cases(self) -> list[Run]:
        """All runs, seed by seed; none for `--report`.

        Raises:
            BenchmarkError: If the data are missing.
        """
        options, setting = self.options, SETTINGS[self.options.setting]
        if options.report:
            return []
        try:
            pairs = gattn.datasets.load_pairs(PAIRS)
        except gattn.datasets.DatasetUnavailableError as error:
            raise BenchmarkError(str(error)) from error
        corpus = Corpus(pairs, setting.vocabulary, options.out)  # so that processes find the vocabulary
        return [Run(row, seed, corpus.name, options.device, setting) for seed in options.seeds for row in options.rows]

    def run(self, cases: Sequence[Run]) -> Generator[Message[Run], None, None]:
        """Trains."""
        return in_processes(cases, functools.partial(train, folder=self.options.out), self.options.workers)

    def extra_columns(self) -> Row:
        """The number of runs at once, and the versions of what makes tokens and scores."""
        libraries = {"sentencepiece": sentencepiece.__version__, "sacrebleu": sacrebleu.__version__}
        return {"workers": self.options.workers, **libraries}

    def rows(self, cases: Sequence[Run]) -> dict[Run, Row]:
        """The newest row of each run in the setting, whether it was asked for now or earlier, in the table's order.

        Raises:
            BenchmarkError: If there is none for `--report`.
        """
        setting, device = SETTINGS[self.options.setting], self.options.device
        newest = {
            Run(row["row"], row["seed"], "", device, setting): row
            for row in self.results.rows(Run, Result, Machine)
            if row["setting"] == asdict(setting) and row["device"] == device and row["row"] in ROWS
        }
        if self.options.report and not newest:
            text = f"{self.results.path} has no runs of the setting {self.options.setting} on {device}"
            raise BenchmarkError(text)
        return {run: newest[run] for run in sorted(newest, key=lambda run: (ROWS.index(run.row), run.seed))}

    def report(self, rows: dict[Run, Row]) -> None:
        """The table, BLEU against length and time, and the alignments of the examples."""
        everything = list(rows.values())
        pictures = {"lengths.png": draw_lengths(everything), "times.png": draw_times(everything)}
        attentive = [group[0] for group in groups_of(everything).values() if "weights" in group[0]["examples"][0]]
        for number in range(len(EXAMPLES) if attentive else 0):
            pictures[f"alignment-{number + 1}.png"] = draw_alignments(attentive, number)
        self.publish("German to English", summarise(everything), remarks(everything), pictures)


if __name__ == "__main__":
    Translation.main()
