"""German to English with and without attention: `python -m benchmarks.translation`.

Tatoeba's pairs, split so that no sentence of a test pair was seen in training, on either side; a second test set has
sentences of 15 words and more. The rows are a recurrent encoder and decoder without attention, with each kind of it,
and a Transformer, all with a like number of parameters, on the same batches.

Every run, one row and one seed, is trained in a process of its own on one thread. Training time is processor time, of
training steps only, so that it means the same when other things run on the machine. (On a GPU, it is the clock's.)
Every finished run is appended to a results file at once, and is not made again; training goes on from its last
checkpoint, to the same numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import io
import itertools
import math
import multiprocessing
import os
import re
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import sacrebleu
import sentencepiece
import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import gattn
from benchmarks.command_line import MOST, device, folder, session, whole
from benchmarks.measuring import VERSIONS
from benchmarks.reports import print_table, save_figure, write_table
from benchmarks.results import Machine, ResultsFile, machine, replace_file
from gattn.visualize import attention_matrix

PAIRS = "tatoeba"

#: Rows of the table: the attention of `gattn.models.Seq2Seq`; but for the last, which is another model.
ATTENTION: dict[str, str | None] = {
    "none": None,
    "dot": "dot",
    "general": "general",
    "additive": "additive",
    "local-m": "local-m",
    "local-p": "local-p",
    "hard": "hard",
    "hard-st": "hard-st",
}
ROWS = (*ATTENTION, "transformer")

LONG = 15
"""Words of a long sentence, at least."""
HELD_OUT = 0.0125
"""Share of the components that validates, and that tests; but of those with a long sentence, a third tests."""
HELD_OUT_LONG = 1 / 3

BINS = ((1, 4), (5, 8), (9, 12), (13, 16), (17, 20), (21, 25), (26, None))
"""Words of the source, first and last; by these, BLEU is shown against length."""

#: Test sentences whose alignments are drawn: a short one, one whose words change places, and a long one.
EXAMPLES = (
    "Wo hast du deine Ferien verbracht?",
    "Ich habe vor sechs Monaten aufgehört zu rauchen.",
    "Als Tom einen Blick auf seine Armbanduhr warf, war er überrascht, wie spät es war.",
)
LONGEST_EXAMPLE = 50
"""Tokens of an example's translation, at most."""

PAD, START, END, UNKNOWN = range(4)
POOL = 100
"""Batches' worth of pairs that are sorted by length together, so that there is little padding."""
CHUNK = 10
"""Iterations after which a process says how far it is."""

#: From Okabe and Ito's palette, which colour-blind readers can tell apart; and markers for those who see none.
STYLES: dict[str, dict[str, str]] = {
    "none": {"color": "#000000", "marker": "x", "linestyle": "--"},
    "dot": {"color": "#56B4E9", "marker": "o"},
    "general": {"color": "#0072B2", "marker": "s"},
    "additive": {"color": "#009E73", "marker": "^"},
    "local-m": {"color": "#E69F00", "marker": "v"},
    "local-p": {"color": "#F0E442", "marker": "D"},
    "hard": {"color": "#CC79A7", "marker": "<", "linestyle": ":"},
    "hard-st": {"color": "#CC79A7", "marker": ">"},
    "transformer": {"color": "#D55E00", "marker": "*"},
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
    """Pairs of more tokens than this are left out of training."""
    iterations: int = 2800
    learning_rate: float = 3e-3
    transformer_learning_rate: float = 2e-3
    warm_up: int = 400
    clip: float = 1.0
    evaluate_every: int = 400
    curve_sentences: int = 500
    """Validation sentences that are translated at every evaluation."""
    test_sentences: int | None = None
    """Of each test set, at most."""
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
    """What two sentences have in common that are the same but for case and punctuation."""
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
        part.sort(key=lambda item: fraction(item.source))  # so that the first of them are any
    return split


def train_vocabulary(texts: Iterable[str], size: int) -> bytes:
    """Byte-pair encoding of so many pieces, a model of SentencePiece's."""
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
    """A piece as one reads it: SentencePiece marks those that begin a word, a dash those that go on with one."""
    if piece.startswith("▁"):
        return piece[1:] or piece
    return f"-{piece}" if piece.isalnum() else piece


class Corpus:
    """The split, and its sentences as tokens: pieces of words, and an end.

    Args:
        pairs: (German, English).
        size: Of the vocabulary, which both languages share and which is learnt from the training pairs.
        folder: Where the vocabulary lies, or will. (default: `None`, it is not kept)
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
        """What is written beside a matrix of weights."""
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
    """All pairs in batches of like length."""
    ordered = sorted(pairs, key=lambda pair: (pair[0].numel(), pair[1].numel()))
    for first in range(0, len(ordered), size):
        yield make_batch(ordered[first : first + size], device)


class Batches:
    """Which pairs are trained on in which iteration: every epoch all of them, in another order.

    Args:
        lengths: Of the sources and of the targets, `[n, 2]`.
        size: Pairs a batch.
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


@dataclass(frozen=True)
class Run:
    """One training run; equal runs have equal results."""

    row: str
    seed: int
    corpus: str
    device: str
    setting: Setting

    def __str__(self) -> str:
        return f"{self.row} seed {self.seed}"

    def key(self) -> str:
        """What another row of results must have in common with the run for not being trained again."""
        return run_key({**asdict(self), **machine(self.device)})


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
    """What a row of results must have beside its `Run` and the machine to be read."""

    parameters: int
    curve: list[Point]
    seconds: float
    test: Tested
    long: Tested
    bins: list[Bin]
    examples: list[Example]
    jobs: int


def run_key(row: dict[str, Any]) -> str:
    """What makes two rows the same run."""
    return repr([row.get(name) for name in (*Run.__dataclass_fields__, *VERSIONS)])


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
    options |= {"attention": ATTENTION[row], "window": setting.window}
    return gattn.models.Seq2Seq(num_tokens, num_tokens, width, width, **options)


def num_parameters(model: torch.nn.Module) -> int:
    """How many numbers are learnt."""
    return sum(parameter.numel() for parameter in model.parameters())


def find_width(row: str, setting: Setting, num_tokens: int) -> int:
    """The multiple of four whose model's number of parameters is nearest to the setting's."""

    def excess(width: int) -> int:
        with torch.device("meta"):
            return num_parameters(make_model(row, width, setting, num_tokens)) - setting.parameters

    low, high = 4, 8
    while excess(high) < 0:
        low, high = high, 2 * high
    while high - low > 4:
        middle = (low + high) // 8 * 4
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    return min(low, high, key=lambda width: abs(excess(width)))


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
    """What is minimised: the cross entropy, and for hard attention what teaches it where to look."""
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


def bins_of(translations: Sequence[str], items: Sequence[Item]) -> list[dict[str, Any]]:
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
    """A line upwards, then a line downwards, to zero after the last iteration."""
    warm_up = min(setting.warm_up, setting.iterations // 2)
    if iteration < warm_up:
        return largest * (iteration + 1) / (warm_up + 1)
    return largest * (setting.iterations - iteration) / (setting.iterations - warm_up)


def now(device: str) -> float:
    """Seconds that a process computed; on a GPU, the clock's."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


class Training:
    """A model under training, which goes on from its checkpoint if there is one.

    Args:
        run: What to train.
        corpus: On what.
        folder: Where the checkpoint lies, or will.
    """

    def __init__(self, run: Run, corpus: Corpus, folder: Path):
        self.run = run
        self.corpus = corpus
        setting = run.setting
        name = hashlib.sha256(run.key().encode()).hexdigest()[:8]
        self.path = folder / f"{run.row}-seed{run.seed}-{name}.pt"
        self.model = build_model(run, corpus.size)
        self.iteration = 0
        self.curve: list[dict[str, float]] = []
        self.seconds = 0.0
        self.evaluation_seconds = 0.0
        self._losses: list[float] = []
        self.largest_rate = setting.transformer_learning_rate if run.row == "transformer" else setting.learning_rate
        self.optimizer = torch.optim.Adam(self.model.parameters(), betas=(0.9, 0.98), eps=1e-9, fused=True)
        self.pairs = [pair for pair in corpus.train if max(map(len, pair)) <= setting.longest]
        lengths = np.array([[len(source), len(target)] for source, target in self.pairs])
        self.batches = Batches(lengths, setting.batch, run.seed)
        items = corpus.split.validation
        sources = [item.source for item in items for _ in item.references]
        references = [reference for item in items for reference in item.references]
        self.validation = list(zip(corpus.encode(sources), corpus.encode(references), strict=True))
        if self.path.exists():
            self._resume()

    @property
    def is_finished(self) -> bool:
        """Whether all iterations are done."""
        return self.iteration == self.run.setting.iterations

    def advance(self, count: int) -> None:
        """Trains so many iterations, fewer at the end; evaluates and saves where that is due."""
        for _ in range(min(count, self.run.setting.iterations - self.iteration)):
            self._step()
            if self.iteration % self.run.setting.evaluate_every == 0 or self.is_finished:
                self._evaluate()
                self._save()

    def _step(self) -> None:
        start = now(self.run.device)
        # What is random in a step depends on seed and iteration only, so that no state of generators need be kept.
        torch.manual_seed(int(np.random.SeedSequence((self.run.seed, self.iteration)).generate_state(1)[0]))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.largest_rate, self.run.setting, self.iteration)
        batch = make_batch([self.pairs[i] for i in self.batches[self.iteration]], self.run.device)
        loss = loss_of(self.model, batch)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.run.setting.clip)
        self.optimizer.step()
        self._losses.append(loss.item())
        self.seconds += now(self.run.device) - start
        self.iteration += 1

    @torch.no_grad()
    def _evaluate(self) -> None:
        start = now(self.run.device)
        self.model.eval()
        batches = by_length(self.validation, self.run.setting.batch, self.run.device)
        loss = sum(cross_entropy(self.model, batch, "sum").item() for batch in batches)
        loss /= sum(len(target) for _, target in self.validation)
        items = self.corpus.split.validation[: self.run.setting.curve_sentences]
        translations = translate(self.model, self.corpus, [item.source for item in items], 1, self.run.device)
        self.model.train()
        if not math.isfinite(loss):
            text = f"the validation loss became {loss} in iteration {self.iteration} of {self.run}"
            raise FloatingPointError(text)
        point = {
            "iteration": self.iteration,
            "seconds": round(self.seconds, 2),
            "train_loss": sum(self._losses) / len(self._losses),
            "val_loss": loss,
            "bleu": scores(translations, items)["bleu"],
        }
        self._losses = []
        self.curve.append(point)
        self.evaluation_seconds += now(self.run.device) - start

    def _save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "iteration": self.iteration,
            "curve": self.curve,
            "seconds": self.seconds,
            "evaluation_seconds": self.evaluation_seconds,
        }
        content = io.BytesIO()
        torch.save(state, content)
        replace_file(self.path, content.getvalue())

    def _resume(self) -> None:
        state = torch.load(self.path, map_location=self.run.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.iteration, self.curve = state["iteration"], state["curve"]
        self.seconds, self.evaluation_seconds = state["seconds"], state["evaluation_seconds"]

    def result(self) -> dict[str, Any]:
        """What is reported of the model after the last iteration."""
        start = now(self.run.device)
        setting, split = self.run.setting, self.corpus.split
        self.model.eval()
        row: dict[str, Any] = {}
        everything: tuple[list[str], list[Item]] = [], []
        for name, items in (("test", split.test), ("long", split.long)):
            items = items[: setting.test_sentences]
            sources = [item.source for item in items]
            greedy, beam = (
                translate(self.model, self.corpus, sources, beams, self.run.device) for beams in (1, setting.beams)
            )
            row[name] = {"sentences": len(items), "greedy": scores(greedy, items), "beam": scores(beam, items)}
            everything[0].extend(beam)
            everything[1].extend(items)
        row["bins"] = bins_of(*everything)
        row["examples"] = [self._example(source) for source in EXAMPLES]
        self.model.train()
        return {
            "parameters": num_parameters(self.model),
            "curve": self.curve,
            "seconds": round(self.seconds, 1),
            "evaluation_seconds": round(self.evaluation_seconds + now(self.run.device) - start, 1),
            **row,
        }

    @torch.no_grad()
    def _example(self, text: str) -> dict[str, Any]:
        """A translation, token by token, and the weights that it was made with, if there are any to be had."""
        source, _ = padded(self.corpus.encode([text]), self.run.device)
        target = self.model.generate(source, max_length=LONGEST_EXAMPLE)
        row: dict[str, Any] = {
            "source": self.corpus.pieces(source[0].tolist()),
            "translation": self.corpus.pieces(target[0].tolist()),
        }
        if ATTENTION.get(self.run.row) is not None:
            _, weights = self.model(source, target, return_weights=True)
            row["weights"] = [[round(weight, 3) for weight in line] for line in weights[0].tolist()]
        return row


# Processes -----------------------------------------------------------------------------------------------------------


def work(sender: Connection, run: Run, folder: Path) -> None:
    """What the process of a run does: trains, says how far it is, and sends the result.

    Args:
        sender: Takes `("progress", iteration, text)`; at the end `("done", result)` or `("failed", why)`.
        run: What to train.
        folder: Of checkpoints and the vocabulary.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's, which ends its children
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
    torch.set_num_threads(1)
    try:
        answer: tuple[Any, ...] = "done", train(run, folder, lambda *progress: sender.send(("progress", *progress)))
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        answer = "failed", f"{type(error).__name__}: {lines[0]}"
    sender.send(answer)


def train(run: Run, folder: Path, show: Callable[[int, str], Any]) -> dict[str, Any]:
    """Trains and tests; calls `show(iteration, text)` meanwhile."""
    corpus = Corpus(gattn.datasets.load_pairs(PAIRS), run.setting.vocabulary, folder)
    training = Training(run, corpus, folder)
    while True:
        text = f": BLEU {training.curve[-1]['bleu']:.1f}" if training.curve else ""
        show(training.iteration, f"{text}, testing" if training.is_finished else text)
        if training.is_finished:
            return training.result()
        training.advance(CHUNK - training.iteration % CHUNK)


def finished(results: ResultsFile) -> dict[str, dict[str, Any]]:
    """The rows that there are, by key."""
    return {run_key(row): row for row in results.rows(Run, Result, Machine)}


def execute(runs: Sequence[Run], results: ResultsFile, folder: Path, jobs: int, console: Console) -> list[str]:
    """Trains what is not yet in the results file, so many runs at once; what failed, and why."""
    done = finished(results)
    pending = [run for run in runs if run.key() not in done]
    if len(pending) < len(runs):
        console.print(f"{len(runs) - len(pending)} of {len(runs)} runs are in {results.path} already.", soft_wrap=True)
    failures = []
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        total = progress.add_task("runs", total=len(runs), completed=len(runs) - len(pending))
        tasks = {run: progress.add_task(str(run), total=run.setting.iterations, visible=False) for run in pending}
        with contextlib.closing(share(pending, folder, jobs)) as messages:
            for run, kind, *content in messages:
                if kind == "progress":
                    iteration, text = content
                    progress.update(tasks[run], completed=iteration, description=f"{run}{text}", visible=True)
                    continue
                if kind == "done":
                    results.append({**asdict(run), **content[0], "jobs": jobs, **libraries(), **machine(run.device)})
                else:
                    failures.append(f"{run}: {content[0]}")
                progress.remove_task(tasks[run])
                progress.advance(total)
    return failures


def share(pending: Sequence[Run], folder: Path, jobs: int) -> Generator[tuple[Any, ...], None, None]:
    """Runs so many processes at once; yields what they send, after their run. Whoever closes this ends them."""
    context = multiprocessing.get_context("spawn")
    queue = list(reversed(pending))
    running: dict[Any, tuple[Run, Any]] = {}
    try:
        while queue or running:
            while queue and len(running) < jobs:
                run = queue.pop()
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=work, args=(sender, run, folder))
                process.start()
                sender.close()
                running[receiver] = run, process
            ready: list[Any] = wait(list(running))
            for receiver in ready:
                run, process = running[receiver]
                try:
                    message = receiver.recv()
                except EOFError:
                    process.join()
                    message = "failed", f"the process ended with exit code {process.exitcode}"
                if message[0] != "progress":
                    del running[receiver]
                    process.join()
                yield run, *message
    finally:
        for _, process in running.values():
            process.terminate()
            process.join()


def libraries() -> dict[str, str]:
    """Versions of what makes tokens and scores."""
    return {name: module.__version__ for name, module in (("sentencepiece", sentencepiece), ("sacrebleu", sacrebleu))}


# The report ----------------------------------------------------------------------------------------------------------


NOTES = (
    "BLEU and chrF (SacreBLEU's defaults) by beam search, against all references. Greedy: without beam search. Long: "
    f"sentences of {LONG} words and more, or with such a reference. Mean ± standard deviation over seeds.",
    "Every row is the model after its last iteration; nothing is chosen on the validation set. Training: processor "
    "time of training steps only, one thread (on a GPU, the clock's time).",
)


def select(results: ResultsFile, setting: Setting, device: str) -> list[dict[str, Any]]:
    """The newest row of each run in a setting, in the order of the table."""
    newest = {
        (row["row"], row["seed"]): row
        for row in results.rows(Run, Result, Machine)
        if row["setting"] == asdict(setting) and row["device"] == device and row["row"] in ROWS
    }
    return [newest[key] for key in sorted(newest, key=lambda key: (ROWS.index(key[0]), key[1]))]


def groups_of(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The runs of each row of the table."""
    return {name: group for name in ROWS if (group := [row for row in rows if row["row"] == name])}


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation."""
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{deviation}"


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """The table's lines."""
    lines = []
    for name, group in groups_of(rows).items():
        line = {"attention": name, "parameters": str(group[0]["parameters"]), "seeds": str(len(group))}
        for part in ("test", "long"):
            for metric, title in (("bleu", "BLEU"), ("chrf", "chrF")):
                line[f"{part} {title}"] = spread([row[part]["beam"][metric] for row in group])
            line[f"{part} BLEU, greedy"] = spread([row[part]["greedy"]["bleu"] for row in group])
        line["training, min"] = spread([row["seconds"] / 60 for row in group])
        lines.append(line)
    return lines


def remarks(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What a reader of the table must know."""
    names = (*VERSIONS, "python", "sentencepiece", "sacrebleu")
    described = {
        ", ".join(f"{name} {row[name]}" for name in names if name in row)
        + f", {row['device']}, {row['jobs']} run(s) at once"
        for row in rows
    }
    settings = {", ".join(f"{name} {value}" for name, value in row["setting"].items()) for row in rows}
    sizes = {f"{row['test']['sentences']} test sentences, {row['long']['sentences']} long ones" for row in rows}
    return [*NOTES, *sorted(sizes), *(f"Setting: {setting}" for setting in sorted(settings)), *sorted(described)]


def report(rows: Sequence[dict[str, Any]], out: Path, console: Console) -> None:
    """Prints the table, and writes it and the pictures to `out`."""
    lines, notes = summarise(rows), remarks(rows)
    table = Table(title="German to English", box=box.SIMPLE_HEAD, padding=(0, 1))
    for column in lines[0]:
        table.add_column(column, justify="left" if column == "attention" else "right", no_wrap=True)
    for line in lines:
        table.add_row(*line.values())
    print_table(table, console)
    paths = [out / "table.md", out / "lengths.png", out / "times.png"]
    write_table(paths[0], lines, notes)
    draw_lengths(rows, paths[1])
    draw_times(rows, paths[2])
    attentive = [group[0] for name, group in groups_of(rows).items() if "weights" in group[0]["examples"][0]]
    for number in range(len(EXAMPLES) if attentive else 0):
        paths.append(out / f"alignment-{number + 1}.png")
        draw_alignments(attentive, number, paths[-1])
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True)
    console.print(f"Written: {', '.join(map(str, paths))}", highlight=False, soft_wrap=True)


def save(figure: Any, path: Path) -> None:
    """Writes a picture, small."""
    save_figure(figure, path, dpi=100, pil_kwargs={"optimize": True})


def title_of(low: int, high: int | None) -> str:
    """The name of a bin."""
    return f"{low}+" if high is None else f"{low}–{high}"


def draw_lengths(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """BLEU against length, the mean over seeds."""
    figure, axis = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
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
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, path)


def draw_times(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """BLEU on validation sentences against training time, the mean over seeds."""
    figure, axis = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    for name, group in groups_of(rows).items():
        curves = list(zip(*(row["curve"] for row in group), strict=True))
        minutes = [statistics.mean(point["seconds"] for point in points) / 60 for points in curves]
        axis.plot(
            minutes, [statistics.mean(x["bleu"] for x in points) for points in curves], label=name, **STYLES[name]
        )
    axis.set(xlabel="training, minutes of processor time", ylabel="BLEU (validation, greedy)", title="Learning")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, path)


def draw_alignments(rows: Sequence[dict[str, Any]], number: int, path: Path) -> None:
    """What each kind of attention looked at when it translated an example."""
    examples = [row["examples"][number] for row in rows]
    columns = len(rows) if len(rows) < 4 else math.ceil(len(rows) / 2)
    lines = math.ceil(len(rows) / columns)
    width = 1.2 + 0.16 * max(len(example["source"]) for example in examples)
    height = 1.4 + 0.16 * max(len(example["translation"]) for example in examples)
    size = (max(width, 2.6) * columns, max(height, 2.4) * lines)
    figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(rows) :]:
        axis.set_axis_off()
    for row, example, axis in zip(rows, examples, axes.flat, strict=False):
        weights = torch.tensor(example["weights"])
        attention_matrix(weights, example["translation"], example["source"], ax=axis, title=row["row"], maximum=1.0)
        axis.set(xlabel="", ylabel="")
    save(figure, path)


# The command line ----------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.translation", description=(__doc__ or "").split("\n\n")[0].split(":")[0] + "."
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, help="rows of the table (default: all)")
    parser.add_argument("--seeds", nargs="+", type=whole(0, 2**32 - 1), help="seeds of each (default: 0 1)")
    parser.add_argument(
        "--setting",
        default="default",
        choices=SETTINGS,
        help="sizes and training: an hour a seed on two cores; a few minutes; or for a GPU (default: %(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="the same as --setting quick")
    parser.add_argument("--device", type=device, default="cpu", help="PyTorch device (default: %(default)s)")
    parser.add_argument(
        "--jobs",
        type=whole(1, MOST),
        help="runs at once, each on one thread; the numbers stay the same (default: one a core, one on a GPU)",
    )
    parser.add_argument("--report", action="store_true", help="no training: table and pictures of what there is")
    parser.add_argument(
        "--out",
        type=folder,
        help="folder of results, checkpoints, table and pictures (default: runs/translation; of a setting other than "
        "the default one, with its name)",
    )
    options = parser.parse_args(arguments)
    if options.quick:
        if options.setting not in ("default", "quick"):
            parser.error(f"--quick is the setting quick; leave it out, or --setting {options.setting}")
        options.setting = "quick"
    for name in ("rows", "seeds", "jobs"):
        if options.report and getattr(options, name) is not None:
            parser.error(f"--report shows every finished run of the setting; leave --{name} out")
    if options.jobs is None:
        options.jobs = 1 if options.device.startswith("cuda") else os.cpu_count() or 1
    options.rows = [row for row in ROWS if row in (options.rows or ROWS)]
    options.seeds = list(dict.fromkeys(options.seeds or (0, 1)))
    if options.out is None:
        suffix = "" if options.setting == "default" else f"-{options.setting}"
        options.out = Path(f"runs/translation{suffix}")
    return options


def plan(options: argparse.Namespace) -> list[Run]:
    """All runs, seed by seed.

    Raises:
        SystemExit: If the data are missing.
    """
    setting = SETTINGS[options.setting]
    try:
        pairs = gattn.datasets.load_pairs(PAIRS)
    except gattn.datasets.DatasetUnavailableError as error:
        sys.exit(f"error: {error}")
    corpus = Corpus(pairs, setting.vocabulary, options.out)  # so that processes find the vocabulary
    return [Run(row, seed, corpus.name, options.device, setting) for seed in options.seeds for row in options.rows]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    options = parse(arguments)
    console = Console(markup=False)
    failures = []
    with session(options.out, console, is_reading=options.report) as results:
        if not options.report:
            failures = execute(plan(options), results, options.out, options.jobs, console)
        rows = select(results, SETTINGS[options.setting], options.device)
        if rows:
            report(rows, options.out, console)
        elif options.report:
            sys.exit(f"error: {results.path} has no runs of the setting {options.setting} on {options.device}")
    if failures:
        sys.exit("\n".join(f"error: {failure}" for failure in failures))


if __name__ == "__main__":
    main()
