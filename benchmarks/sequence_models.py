"""The language models that `benchmarks.sequence` trains, on the characters of tiny Shakespeare."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import gattn
from benchmarks.framework import measuring
from benchmarks.framework.benchmark import Case
from benchmarks.framework.measuring import Times
from benchmarks.framework.processes import Message
from benchmarks.framework.results import Row
from benchmarks.framework.training import Training, nearest_width, num_parameters
from gattn.models.decoding import sample

LAYERS = ("gattn", "torch")
"""The libraries whose layers Transformers have."""
RECURRENT = ("lstm", "lstmn")
"""Models without Transformer layers."""
MODELS = ("transformer", *RECURRENT)
RECURRENT_LAYERS = 2
CHUNK = 50
"""The number of iterations in a turn; models take turns so that a busy machine affects all of them alike."""
SAMPLE = 300
"""The number of characters that are sampled at the end."""
TEMPERATURE = 0.8


@dataclass(frozen=True)
class Setting:
    """The model and its training: nanoGPT's setting for a CPU, except for the learning rate (there 1e-3)."""

    num_layers: int = 4
    heads: int = 4
    """Zero for recurrent models."""
    channels: int = 128
    context: int = 64
    batch: int = 12
    learning_rate: float = 4e-3
    last_learning_rate: float = 1e-4
    warm_up: int = 100
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.1
    clip: float = 1.0
    evaluate_every: int = 250
    random_batches: int = 20


SETTING = Setting()


class Point(TypedDict):
    """An evaluation."""

    iteration: int
    val_loss: float
    val_loss_random: float
    train_loss: NotRequired[float]


class RunResult(TypedDict):
    """The columns that a training run adds."""

    parameters: int
    curve: list[Point]
    val_loss: float
    val_loss_random: float
    iteration: Times
    total_seconds: float
    sample: str


@dataclass(frozen=True)
class Run(Case):
    """One training run; equal runs have equal results."""

    result = RunResult
    noun = "training runs"

    part: str = field(default="lm", init=False)
    text: str
    layers: str
    """The library of a Transformer's layers, `"gattn"` or `"torch"`; or a recurrent model, `"lstm"` or `"lstmn"`."""
    seed: int
    iterations: int
    threads: int
    setting: Setting

    def __str__(self) -> str:
        return f"language model, {self.layers}"


class Corpus:
    """A text as tokens, one per character; the last tenth is for validation.

    Args:
        text: The text.
    """

    def __init__(self, text: str):
        self.symbols = sorted(set(text))
        place = {symbol: token for token, symbol in enumerate(self.symbols)}
        tokens = torch.tensor([place[symbol] for symbol in text])
        cut = int(0.9 * len(text))
        self.train, self.validation = tokens[:cut], tokens[cut:]
        self.name = hashlib.sha256(text.encode()).hexdigest()[:12]


def draw_batch(tokens: Tensor, setting: Setting, *key: int) -> Tensor:
    """Random pieces of a text, `[B, context + 1]`; the same for the same key."""
    # PyTorch's generator uses only the lower half of a seed, so one of two numbers would be lost.
    starts = np.random.default_rng(key).integers(tokens.numel() - setting.context, size=setting.batch)
    return tokens[torch.from_numpy(starts).unsqueeze(1) + torch.arange(setting.context + 1)]


def loss_of(model: torch.nn.Module, pieces: Tensor, reduction: str = "mean") -> Tensor:
    """The cross entropy of predicting each next token of `[B, T + 1]`."""
    return F.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten(), reduction=reduction)


def whole_loss(model: torch.nn.Module, tokens: Tensor, context: int) -> float:
    """The mean loss over a whole text, in blocks that do not overlap."""
    blocks = (tokens.numel() - 1) // context
    pieces = tokens.unfold(0, context + 1, context)[:blocks]
    total = sum(loss_of(model, some, "sum").item() for some in pieces.split(128))
    rest = tokens[blocks * context :]
    if rest.numel() > 1:
        total += loss_of(model, rest.unsqueeze(0), "sum").item()
    return total / (tokens.numel() - 1)


def learning_rate(setting: Setting, iteration: int, iterations: int) -> float:
    """Rises linearly, then falls with half a cosine that ends at the last iteration."""
    warm_up = min(setting.warm_up, iterations // 2)
    if iteration < warm_up:
        return setting.learning_rate * (iteration + 1) / (warm_up + 1)
    progress = (iteration - warm_up) / max(iterations - warm_up, 1)
    height = 0.5 * (1.0 + math.cos(math.pi * progress))
    return setting.last_learning_rate + height * (setting.learning_rate - setting.last_learning_rate)


class LSTM(torch.nn.Module):
    """A language model with PyTorch's LSTM: `gattn.models.LSTMN` without attention, with the same initial weights.

    Args:
        num_tokens: The size of the vocabulary.
        channels: The number of channels of embeddings, hidden states and memories.
        num_layers: The number of layers.
    """

    def __init__(self, num_tokens: int, channels: int, num_layers: int):
        super().__init__()
        self.embedding = torch.nn.Embedding(num_tokens, channels)
        self.lstm = torch.nn.LSTM(channels, channels, num_layers, batch_first=True)
        self.output = torch.nn.Linear(channels, num_tokens)
        self.output.weight = self.embedding.weight
        torch.nn.init.normal_(self.embedding.weight, std=0.1)
        torch.nn.init.zeros_(self.output.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of each next token, `[B, T, V]`."""
        return self.output(self.lstm(self.embedding(tokens))[0])

    @torch.no_grad()
    def generate(
        self, tokens: Tensor, num_new_tokens: int, temperature: float = 1.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """Continues texts `[B, T]` token by token; returns `[B, T + num_new_tokens]`."""
        new, state = tokens, None
        for _ in range(num_new_tokens):
            hidden, state = self.lstm(self.embedding(new), state)
            new = sample(self.output(hidden[:, -1]), temperature, generator=generator).unsqueeze(1)
            tokens = torch.cat([tokens, new], 1)
        return tokens


def make_model(layers: str, setting: Setting, num_tokens: int) -> torch.nn.Module:
    """The model of a row, with random weights."""
    if layers == "lstm":
        return LSTM(num_tokens, setting.channels, setting.num_layers)
    if layers == "lstmn":
        return gattn.models.LSTMN(num_tokens, setting.channels, setting.num_layers)
    layer = {"gattn": gattn.nn.TransformerEncoderLayer, "torch": torch.nn.TransformerEncoderLayer}[layers]
    sizes = (setting.channels, setting.num_layers, setting.heads, setting.context)
    return gattn.models.TransformerLM(num_tokens, *sizes, layer=layer)


def setting_of(layers: str, setting: Setting, num_tokens: int) -> Setting:
    """The setting of a row: recurrent models get about as many parameters as the setting's Transformer."""
    if layers not in RECURRENT:
        return setting

    def sized(width: int) -> Setting:
        return replace(setting, num_layers=RECURRENT_LAYERS, heads=0, channels=width)

    with torch.device("meta"):
        parameters = num_parameters(make_model("gattn", setting, num_tokens))
    return sized(nearest_width(parameters, lambda width: make_model(layers, sized(width), num_tokens)))


def build_model(run: Run, num_tokens: int) -> torch.nn.Module:
    """The model; a Transformer's weights depend only on the seed, not on the kind of layers."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(run.seed)
        model = make_model("gattn" if run.layers in LAYERS else run.layers, run.setting, num_tokens)
        if run.layers != "torch":
            return model
        other = make_model("torch", run.setting, num_tokens)
    other.load_state_dict(model.state_dict())
    return other


class LanguageModel(Training[Run]):
    """The model under training.

    Args:
        run: What to train.
        corpus: The text.
        folder: The folder of checkpoints.
    """

    def __init__(self, run: Run, corpus: Corpus, folder: Path):
        self.corpus, self.setting = corpus, run.setting
        model = build_model(run, len(corpus.symbols))
        parameters = list(model.parameters())
        groups = [
            {"params": [x for x in parameters if x.dim() >= 2], "weight_decay": self.setting.weight_decay},
            {"params": [x for x in parameters if x.dim() < 2], "weight_decay": 0.0},
        ]
        betas = self.setting.beta1, self.setting.beta2
        optimizer = torch.optim.AdamW(groups, self.setting.learning_rate, betas, fused=True)
        super().__init__(run, folder, model, optimizer, run.iterations, self.setting.evaluate_every, self.setting.clip)

    def learning_rate(self) -> float:
        """The learning rate of this iteration."""
        return learning_rate(self.setting, self.iteration, self.iterations)

    def loss(self) -> Tensor:
        """The loss on this iteration's pieces of the text."""
        return loss_of(self.model, draw_batch(self.corpus.train, self.setting, self.case.seed, self.iteration))

    def step(self) -> None:
        """Trains for one iteration; the first is preceded by an evaluation."""
        if not self.curve:
            self.add_point()
        super().step()

    def evaluate(self) -> dict[str, float]:
        """The loss over the whole validation text, and nanoGPT's mean over random batches."""
        tokens, numbers = self.corpus.validation, range(1, self.setting.random_batches + 1)
        pieces = [draw_batch(tokens, self.setting, self.case.seed, self.iteration, number) for number in numbers]
        losses = [loss_of(self.model, some).item() for some in pieces]
        point = {
            "iteration": self.iteration,
            "val_loss": whole_loss(self.model, tokens, self.setting.context),
            "val_loss_random": sum(losses) / len(losses),
        }
        return {**point, "train_loss": sum(self.losses) / len(self.losses)} if self.losses else point

    def sample(self, length: int) -> str:
        """A text written by the model, which starts after a line break."""
        symbols = self.corpus.symbols
        start = torch.tensor([[symbols.index("\n") if "\n" in symbols else 0]])
        self.model.eval()
        generator = torch.Generator().manual_seed(self.case.seed)
        tokens = self.model.generate(start, length, temperature=TEMPERATURE, generator=generator)
        self.model.train()
        return "".join(symbols[token] for token in tokens[0, 1:].tolist())

    def result(self) -> Row:
        """The columns of the finished run."""
        last = self.curve[-1]
        return {
            "parameters": num_parameters(self.model),
            "curve": self.curve,
            "val_loss": last["val_loss"],
            "val_loss_random": last["val_loss_random"],
            "iteration": measuring.spread(self.seconds),
            "total_seconds": sum(self.seconds),
            "sample": self.sample(SAMPLE),
        }


def train(runs: Sequence[Run], corpus: Corpus, folder: Path) -> Generator[Message[Run], None, None]:
    """Trains models in turns, all in this process. A model fails if its loss becomes infinite or does not fall."""
    trainings = [LanguageModel(run, corpus, folder) for run in runs]
    for training in turns(trainings):
        torch.set_num_threads(training.case.threads)
        try:
            training.advance(CHUNK - training.iteration % CHUNK)
        except FloatingPointError as error:
            trainings.remove(training)
            yield training.case, "failed", str(error)
            continue
        text = f": val {training.curve[-1]['val_loss']:.3f}" if training.curve else ""
        yield training.case, "progress", (training.iteration, training.iterations, text)
        if not training.is_finished:
            continue
        first, last = (training.curve[place]["val_loss"] for place in (0, -1))
        if last < first:
            yield training.case, "ok", {**training.result(), "in_turns_with": [run.layers for run in runs]}
        else:
            reason = f"the validation loss did not fall: {first:.4f} before training, {last:.4f} after it"
            yield training.case, "failed", reason


def turns(trainings: Sequence[LanguageModel]) -> Iterator[LanguageModel]:
    """The next turns: those of the models that are behind, in an order that changes each time.

    If a training is removed meanwhile, it gets no more turns.
    """
    waiting, turn = list(trainings), 0
    while waiting:
        behind = min(training.iteration // CHUNK for training in waiting)
        group = [training for training in waiting if training.iteration // CHUNK == behind]
        yield from group if turn % 2 == 0 else reversed(group)
        waiting = [training for training in trainings if training in waiting and not training.is_finished]
        turn += 1
