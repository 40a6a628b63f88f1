"""The pairs of `benchmarks.translation`: split, as tokens, and in batches."""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sentencepiece
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.framework.results import replace_file

PAIRS = "tatoeba"

LONG = 15
"""The smallest number of words in a long sentence."""
HELD_OUT = 0.0125
"""This share of the components validates, and this share tests; of those with a long sentence, a third tests."""
HELD_OUT_LONG = 1 / 3

#: Test sentences whose alignments are drawn, each with a reference: a short one, one whose words change places, and a
#: long one.
EXAMPLES = {
    "Wo hast du deine Ferien verbracht?": "Where did you spend your vacation?",
    "Ich habe vor sechs Monaten aufgehört zu rauchen.": "I quit smoking six months ago.",
    "Als Tom einen Blick auf seine Armbanduhr warf, war er überrascht, wie spät es war.": (
        "When Tom looked at his watch, he was surprised to see how late it was."
    ),
}

PAD, START, END, UNKNOWN = range(4)
POOL = 100
"""The pairs of this many batches are sorted by length together, so that there is little padding."""


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
