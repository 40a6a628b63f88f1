"""Transformers on gattn's layers, side by side with PyTorch's: `python -m benchmarks.sequence`.

Three parts. *lm*: a language model on the characters of tiny Shakespeare, in nanoGPT's setting for a CPU, trained with
gattn's layers and with PyTorch's, from the same weights on the same batches, in turns. *speed*: `MultiheadAttention` of
both and the bare `scaled_dot_product_attention`, on sequences that see everything, the past, a window, and on a ragged
batch. *graphs*: one layer on complete, causal, windowed and sparse graphs, so that cost against size shows.

Every measurement of speed has a process of its own, and nothing is timed before its output and its gradients were
compared with a float64 reference. Every finished measurement is appended to a results file at once, and is not made
again; training goes on from its last checkpoint, to the same numbers.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import gattn
from benchmarks.command_line import MOST, folder, seconds, session, whole
from benchmarks.measuring import (
    FINAL,
    MIN_REPEATS,
    VERSIONS,
    Measured,
    Times,
    check,
    median,
    outcome,
    peak_above,
    quartiles,
    ratio,
    run_apart,
    spread,
    timed,
)
from benchmarks.reports import print_table, save_figure, write_table
from benchmarks.results import Machine, ResultsFile, machine, replace_file

PARTS = ("lm", "speed", "graphs")
LAYERS = ("gattn", "torch")
SEED = 0

TEXT = "tinyshakespeare"
PUBLISHED_LOSS = 1.88
"""NanoGPT's validation loss in this setting, a mean over random batches: its README, "i only have a macbook"."""
CHUNK = 50
"""Iterations that one kind of layers trains before it is the other's turn, so that a busy machine hits both alike."""
SAMPLE = 300
"""Characters that are sampled at the end."""
TEMPERATURE = 0.8

CHANNELS = 256
HEADS = 8
BATCH = 4
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
WINDOW = (127, 0)
RAGGED = (64, 512)
"""Sequences in the ragged batch, and the longest; the shortest has a sixteenth of that."""
NODES = (256, 512, 1024, 2048, 4096, 8192)
EDGES_PER_NODE = 16

CHECKED_LENGTH = 1024
"""Up to here gradients are compared, too."""
CHUNK_LOGITS = 2**23
"""The reference takes so many logits at a time, and all those of a target."""

#: Results with one row a token.
TOKEN_RESULTS = (
    "output without autograd",
    "output",
    *(f"gradient of {name}" for name in ("x", "query", "key", "value")),
)

MODES = {"forward": "forward", "forward_backward": "forward + backward"}

#: From Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = {"gattn": "#0072B2", "torch": "#D55E00", "sdpa": "#009E73", "gattn-padded": "#56B4E9"}
GRAPH_COLOURS = {"full": "#D55E00", "causal": "#E69F00", "window": "#0072B2", "sparse": "#009E73"}


# The language model --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """The model and its training: what nanoGPT publishes for a CPU, but for the learning rate (there 1e-3)."""

    num_layers: int = 4
    heads: int = 4
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


@dataclass(frozen=True)
class Run:
    """One training run; equal runs have equal results."""

    text: str
    layers: str
    seed: int
    iterations: int
    threads: int
    setting: Setting

    def key(self) -> str:
        """What another row must have in common with the run for not being trained again."""
        return run_key({**asdict(self), **machine()})


class Point(TypedDict):
    """An evaluation."""

    iteration: int
    val_loss: float
    val_loss_random: float
    train_loss: NotRequired[float]


class RunResult(TypedDict):
    """What a row of results must have beside its `Run` and the machine to be read."""

    parameters: int
    curve: list[Point]
    val_loss: float
    val_loss_random: float
    iteration: Times
    total_seconds: float
    sample: str


def run_key(row: dict[str, Any]) -> str:
    """What makes two rows the same run."""
    return repr([row.get(name) for name in (*Run.__dataclass_fields__, *VERSIONS)])


class Corpus:
    """A text as tokens, one a character; the last tenth validates.

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
    # PyTorch's generator looks at the lower half of a seed only, and so would forget one of two.
    starts = np.random.default_rng(key).integers(tokens.numel() - setting.context, size=setting.batch)
    return tokens[torch.from_numpy(starts).unsqueeze(1) + torch.arange(setting.context + 1)]


def loss_of(model: torch.nn.Module, pieces: Tensor, reduction: str = "mean") -> Tensor:
    """The cross entropy of each next token of `[B, T + 1]`."""
    return F.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten(), reduction=reduction)


def whole_loss(model: torch.nn.Module, tokens: Tensor, context: int) -> float:
    """The mean over a whole text, in blocks that do not overlap."""
    blocks = (tokens.numel() - 1) // context
    pieces = tokens.unfold(0, context + 1, context)[:blocks]
    total = sum(loss_of(model, some, "sum").item() for some in pieces.split(128))
    rest = tokens[blocks * context :]
    if rest.numel() > 1:
        total += loss_of(model, rest.unsqueeze(0), "sum").item()
    return total / (tokens.numel() - 1)


def learning_rate(setting: Setting, iteration: int, iterations: int) -> float:
    """A line upwards, then half a cosine downwards, ending with the last iteration."""
    warm_up = min(setting.warm_up, iterations // 2)
    if iteration < warm_up:
        return setting.learning_rate * (iteration + 1) / (warm_up + 1)
    progress = (iteration - warm_up) / max(iterations - warm_up, 1)
    height = 0.5 * (1.0 + math.cos(math.pi * progress))
    return setting.last_learning_rate + height * (setting.learning_rate - setting.last_learning_rate)


def build_model(run: Run, num_tokens: int) -> gattn.models.TransformerLM:
    """The model; its weights depend on the seed alone, not on the kind of layers."""
    setting = run.setting
    sizes = (num_tokens, setting.channels, setting.num_layers, setting.heads, setting.context)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(run.seed)
        model = gattn.models.TransformerLM(*sizes)
        if run.layers == "gattn":
            return model
        other = gattn.models.TransformerLM(*sizes, layer=torch.nn.TransformerEncoderLayer)
    other.load_state_dict(model.state_dict())
    return other


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
        self.path = folder / f"lm-{run.layers}-seed{run.seed}-{run.iterations}.pt"
        self.model = build_model(run, len(corpus.symbols))
        self.iteration = 0
        self.curve: list[dict[str, float]] = []
        self.seconds: list[float] = []
        self._losses: list[float] = []
        setting = run.setting
        parameters = list(self.model.parameters())
        groups = [
            {"params": [x for x in parameters if x.dim() >= 2], "weight_decay": setting.weight_decay},
            {"params": [x for x in parameters if x.dim() < 2], "weight_decay": 0.0},
        ]
        betas = (setting.beta1, setting.beta2)
        self.optimizer = torch.optim.AdamW(groups, setting.learning_rate, betas, fused=True)
        if self.path.exists():
            self._resume()

    @property
    def is_finished(self) -> bool:
        """Whether all iterations are done."""
        return self.iteration == self.run.iterations

    def advance(self, count: int) -> None:
        """Trains so many iterations, fewer at the end; evaluates and saves where that is due."""
        for _ in range(min(count, self.run.iterations - self.iteration)):
            if not self.curve:
                self._evaluate()
            self._step()
            if self.iteration % self.run.setting.evaluate_every == 0 or self.is_finished:
                self._evaluate()
                self._save()

    def _step(self) -> None:
        setting = self.run.setting
        start = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(setting, self.iteration, self.run.iterations)
        loss = loss_of(self.model, draw_batch(self.corpus.train, setting, self.run.seed, self.iteration))
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), setting.clip)
        self.optimizer.step()
        self._losses.append(loss.item())
        self.seconds.append(time.perf_counter() - start)
        self.iteration += 1

    @torch.no_grad()
    def _evaluate(self) -> None:
        setting, tokens = self.run.setting, self.corpus.validation
        self.model.eval()
        pieces = [
            draw_batch(tokens, setting, self.run.seed, self.iteration, number)
            for number in range(1, setting.random_batches + 1)
        ]
        losses = [loss_of(self.model, some).item() for some in pieces]
        point = {
            "iteration": self.iteration,
            "val_loss": whole_loss(self.model, tokens, setting.context),
            "val_loss_random": sum(losses) / len(losses),
        }
        if self._losses:
            point["train_loss"] = sum(self._losses) / len(self._losses)
        self.model.train()
        if not math.isfinite(point["val_loss"]):
            text = f"the validation loss became {point['val_loss']} in iteration {self.iteration} of {self.run}"
            raise FloatingPointError(text)
        self._losses = []
        self.curve.append(point)

    def _save(self) -> None:
        state = {
            "key": self.run.key(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "iteration": self.iteration,
            "curve": self.curve,
            "seconds": self.seconds,
        }
        content = io.BytesIO()
        torch.save(state, content)
        replace_file(self.path, content.getvalue())

    def _resume(self) -> None:
        state = torch.load(self.path, weights_only=True)
        if state["key"] != self.run.key():  # another version's, or another machine's
            return
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.iteration, self.curve, self.seconds = state["iteration"], state["curve"], state["seconds"]

    def sample(self, length: int) -> str:
        """A text of the model's own, which begins after a line break."""
        symbols = self.corpus.symbols
        start = torch.tensor([[symbols.index("\n") if "\n" in symbols else 0]])
        self.model.eval()
        tokens = self.model.generate(
            start,
            length,
            temperature=TEMPERATURE,
            use_cache=self.run.layers == "gattn",  # PyTorch's layers take no cache
            generator=torch.Generator().manual_seed(self.run.seed),
        )
        self.model.train()
        return "".join(symbols[token] for token in tokens[0, 1:].tolist())

    def result(self) -> dict[str, Any]:
        """What is reported."""
        last = self.curve[-1]
        return {
            "parameters": sum(x.numel() for x in self.model.parameters()),
            "curve": self.curve,
            "val_loss": last["val_loss"],
            "val_loss_random": last["val_loss_random"],
            "iteration": spread(self.seconds),
            "total_seconds": sum(self.seconds),
            "sample": self.sample(SAMPLE),
        }


def finished(results: ResultsFile) -> dict[str, dict[str, Any]]:
    """The training runs that there are, by key."""
    return {run_key(row): row for row in results.rows(Run, RunResult, Machine)}


def train(runs: Sequence[Run], corpus: Corpus, results: ResultsFile, console: Console) -> None:
    """Trains what is not yet in the results file, in turns."""
    done = finished(results)
    pending = [run for run in runs if run.key() not in done]
    if len(pending) < len(runs):
        text = f"{len(runs) - len(pending)} of {len(runs)} training runs are in {results.path} already."
        console.print(text, soft_wrap=True)
    if not pending:
        return
    torch.set_num_threads(pending[0].threads)
    trainings = [Training(run, corpus, results.path.parent) for run in pending]
    names = [run.layers for run in pending]
    with Progress(*progress_columns(), console=console) as progress:
        tasks = {
            training.run: progress.add_task(
                f"language model, {training.run.layers}", total=training.run.iterations, completed=training.iteration
            )
            for training in trainings
        }
        for training in turns(trainings):
            training.advance(CHUNK - training.iteration % CHUNK)
            text = f"language model, {training.run.layers}"
            if training.curve:
                text += f": val {training.curve[-1]['val_loss']:.3f}"
            progress.update(tasks[training.run], completed=training.iteration, description=text)
            if training.is_finished:
                row = {"part": "lm", **asdict(training.run), **training.result(), "in_turns_with": names}
                results.append({**row, **machine()})


def turns(trainings: Sequence[Training]) -> Iterator[Training]:
    """Who is to go on: those that are behind, in an order that changes each time."""
    waiting, turn = list(trainings), 0
    while waiting:
        behind = min(training.iteration // CHUNK for training in waiting)
        group = [training for training in waiting if training.iteration // CHUNK == behind]
        yield from group if turn % 2 == 0 else reversed(group)
        waiting = [training for training in waiting if not training.is_finished]
        turn += 1


# Speed: what is measured ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One measurement, made in a process of its own."""

    part: str
    """`"speed"` or `"graphs"`."""
    graph: str
    """`"full"`, `"causal"`, `"window"`, `"ragged"` or `"sparse"`."""
    length: int
    """Of the longest sequence."""
    peer: str
    """`"gattn"`, `"gattn-padded"`, `"torch"` or `"sdpa"`."""
    batch: int
    channels: int
    heads: int
    round: int
    threads: int
    repeats: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.part} {self.graph} {self.length} {self.peer}"

    @property
    def kind(self) -> str:
        """What is computed: a whole `"layer"`, or `"bare"` attention."""
        return "bare" if self.peer == "sdpa" else "layer"

    def problem(self) -> tuple[Any, ...]:
        """What cases have in common that share a reference."""
        return self.part, self.graph, self.length, self.batch, self.channels, self.heads

    def num_edges(self) -> int:
        """Number of pairs (target, source) that attend, over the whole batch."""
        if self.graph == "sparse":
            return EDGES_PER_NODE * self.length
        return sum(
            int(neighbours(self.graph, torch.arange(first, min(first + 1024, length)), length).sum())
            for length in lengths_of(self)
            for first in range(0, length, 1024)
        )


@dataclass
class Inputs:
    """What all peers compute from, the same numbers for each; sequences lie end to end, without padding."""

    lengths: list[int]
    tokens: dict[str, Tensor]
    """A layer's `x`; or bare attention's query, key and value; `[sum of lengths, channels]`."""
    parameters: dict[str, Tensor]
    """The layer's."""
    grad: Tensor
    """Gradient of the output, `[sum of lengths, channels]`."""
    edge_index: Tensor | None
    """Of the sparse graph, `[2, E]`."""


def lengths_of(case: Case) -> list[int]:
    """The length of each sequence."""
    if case.graph != "ragged":
        return [case.length] * case.batch
    generator = torch.Generator().manual_seed(SEED)
    shortest = max(case.length // 16, 1)
    return torch.randint(shortest, case.length + 1, (case.batch,), generator=generator).tolist()


def draw(case: Case, kind: str) -> Inputs:
    """Draws the inputs."""
    generator = torch.Generator().manual_seed(SEED)
    lengths = lengths_of(case)
    size = (sum(lengths), case.channels)

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    edge_index = None
    if case.graph == "sparse":
        sources = torch.randint(case.length, (EDGES_PER_NODE * case.length,), generator=generator)
        edge_index = torch.stack([sources, torch.arange(case.length).repeat(EDGES_PER_NODE)])
    if kind == "bare":
        return Inputs(lengths, {name: randn(*size) for name in ("query", "key", "value")}, {}, randn(*size), edge_index)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(SEED)
        parameters = gattn.nn.MultiheadAttention(case.channels, case.heads).state_dict()
    for name, parameter in parameters.items():
        if name.endswith("bias"):  # zeros would hide what becomes of them
            parameters[name] = 0.1 * randn(*parameter.shape)
    return Inputs(lengths, {"x": randn(*size)}, parameters, randn(*size), edge_index)


# Speed: the reference ------------------------------------------------------------------------------------------------


def neighbours(graph: str, targets: Tensor, length: int, edge_index: Tensor | None = None) -> Tensor:
    """How many edges join each of some targets with each source of its sequence, `[n, length]`."""
    if edge_index is not None:
        source, target = edge_index
        place = torch.full((length,), -1)
        place[targets] = torch.arange(targets.numel())
        mine = place[target] >= 0
        counts = torch.zeros(targets.numel(), length, dtype=torch.int64)
        one = torch.ones((), dtype=torch.int64)
        return counts.index_put_((place[target[mine]], source[mine]), one, accumulate=True)
    distance = torch.arange(length) - targets.unsqueeze(1)
    if graph == "causal":
        return (distance <= 0).long()
    if graph == "window":
        return ((distance >= -WINDOW[0]) & (distance <= WINDOW[1])).long()
    return torch.ones_like(distance)


def plain(case: Case, tokens: dict[str, Tensor], parameters: dict[str, Tensor], edge_index: Tensor | None) -> Tensor:
    """Attention of one sequence as the formula has it, `[T, channels]`: softmax(Q Kᵀ / √d) V, in chunks."""
    if parameters:
        projected = F.linear(tokens["x"], parameters["in_proj_weight"], parameters["in_proj_bias"]).chunk(3, -1)
    else:
        projected = tokens["query"], tokens["key"], tokens["value"]
    query, key, value = (x.unflatten(-1, (case.heads, -1)).transpose(0, 1) for x in projected)
    length = query.size(1)
    outputs = []
    for targets in torch.arange(length).split(max(CHUNK_LOGITS // (case.heads * length), 1)):
        logits = query[:, targets] @ key.transpose(1, 2) / math.sqrt(query.size(-1))
        counts = neighbours(case.graph, targets, length, edge_index)
        # An edge that is there twice counts twice; one that is not there has weight exp(log 0) = 0.
        outputs.append((logits + counts.to(logits.dtype).log()).softmax(-1) @ value)
    out = torch.cat(outputs, 1).transpose(0, 1).flatten(1)
    return F.linear(out, parameters["out_proj.weight"], parameters["out_proj.bias"]) if parameters else out


def reference(case: Case, inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and, where sequences are not too long for it, gradients by the plain formula, summed in float64."""
    has_gradients = case.length <= CHECKED_LENGTH
    parameters = {name: x.to(dtype).requires_grad_(has_gradients) for name, x in inputs.parameters.items()}
    totals = {name: torch.zeros(x.shape, dtype=torch.float64) for name, x in parameters.items()}
    outputs: list[Tensor] = []
    gradients: dict[str, list[Tensor]] = {name: [] for name in inputs.tokens}
    split = {name: x.split(inputs.lengths) for name, x in inputs.tokens.items()}
    for number, grad in enumerate(inputs.grad.split(inputs.lengths)):
        tokens = {name: x[number].to(dtype).requires_grad_(has_gradients) for name, x in split.items()}
        out = plain(case, tokens, parameters, inputs.edge_index)
        outputs.append(out.detach().double())
        if not has_gradients:
            continue
        leaves = tokens | parameters
        for name, result in zip(leaves, torch.autograd.grad(out, list(leaves.values()), grad.to(dtype)), strict=True):
            if name in tokens:
                gradients[name].append(result.double())
            else:
                totals[name] += result
    output = torch.cat(outputs)
    results = {"output without autograd": output, "output": output}
    if has_gradients:
        results |= {f"gradient of {name}": torch.cat(parts) for name, parts in gradients.items()}
        results |= {f"gradient of {name}": total for name, total in totals.items()}
    return results


def expected_of(case: Case, kind: str) -> dict[str, Any]:
    """The exact results, and how far from them a result may be.

    The budget is derived, not tuned: four times what the plain formula itself loses in float32, a few units in the last
    place of the scale, and what a float32 sum of so many terms loses that are added one after another, a unit for the
    root of their number: a target's sources or a projection's channels, and for a parameter's gradient all tokens. The
    scale is the largest element; for gradients of parameters the largest of them all.
    """
    inputs = draw(case, kind)
    exact = reference(case, inputs, torch.float64)
    rounded = reference(case, inputs, torch.float32)
    of_parameters = [value.abs().max().item() for name, value in exact.items() if name not in TOKEN_RESULTS]
    last_place = torch.finfo(torch.float32).eps
    results = {}
    for name, value in exact.items():
        if name in TOKEN_RESULTS:
            scale, terms = value.abs().max().item(), max(case.length, case.channels)
        else:
            scale, terms = max(of_parameters), sum(inputs.lengths)
        loss = (rounded[name] - value).abs().max().item()
        budget = 4 * loss + (8 + math.sqrt(terms)) * last_place * scale
        results[name] = {"exact": value, "rows": None, "scale": scale, "budget": budget}
    return results


def write_reference(case: Case, path: Path) -> None:
    """Writes what results are compared with, of each kind."""
    prepare_process(case)
    kinds = ("layer", "bare") if case.part == "speed" else ("layer",)
    torch.save({kind: expected_of(case, kind) for kind in kinds}, path)


# Speed: the peers ----------------------------------------------------------------------------------------------------


@dataclass
class Built:
    """A peer, ready to be called."""

    call: Callable[[], Tensor]
    leaves: dict[str, Tensor]
    """What it is differentiated for."""
    grad: Tensor
    """Gradient of the output, zero for padding."""
    unpack: Callable[[Tensor], Tensor]
    """Takes the rows of real tokens out of a result that has a row a token."""


def build(case: Case, inputs: Inputs) -> Built:
    """A peer on its inputs, padded unless it takes sequences end to end."""
    lengths = torch.tensor(inputs.lengths)
    real = torch.arange(max(inputs.lengths)) < lengths.unsqueeze(1)

    def pad(x: Tensor) -> Tensor:
        return pad_sequence(x.split(inputs.lengths), batch_first=True)

    if case.peer == "sdpa":
        return build_bare(case, inputs, real, pad)
    module = torch.nn if case.peer == "torch" else gattn.nn
    layer = module.MultiheadAttention(case.channels, case.heads, batch_first=True)
    layer.load_state_dict(inputs.parameters)
    is_packed = case.part == "graphs" or (case.graph == "ragged" and case.peer == "gattn")
    x = (inputs.tokens["x"] if is_packed else pad(inputs.tokens["x"])).requires_grad_()
    options = torch_options(case, real) if case.peer == "torch" else gattn_options(case, inputs, real)
    return Built(
        lambda: layer(x, x, x, need_weights=False, **options)[0],
        {"x": x, **dict(layer.named_parameters())},
        inputs.grad if is_packed else pad(inputs.grad),
        (lambda result: result) if is_packed else (lambda result: result[real]),
    )


def gattn_options(case: Case, inputs: Inputs, real: Tensor) -> dict[str, Any]:
    """How gattn's layer is told who attends to whom."""
    if case.graph == "causal":
        return {"is_causal": True}
    if case.graph == "window":
        return {"graph": gattn.CompleteGraph(case.length, window=WINDOW)}
    if case.graph == "sparse":
        return {"graph": gattn.SparseGraph(inputs.edge_index, case.length, case.length)}
    if case.graph == "ragged":
        padded = {"key_padding_mask": ~real}
        return padded if case.peer == "gattn-padded" else {"graph": gattn.CompleteGraph.packed(inputs.lengths)}
    return {}


def torch_options(case: Case, real: Tensor) -> dict[str, Any]:
    """How PyTorch's layer is told."""
    if case.graph == "ragged":
        return {"key_padding_mask": ~real}
    if case.graph == "full":
        return {}
    seen = neighbours(case.graph, torch.arange(case.length), case.length).bool()
    return {"attn_mask": ~seen, "is_causal": case.graph == "causal"}


def build_bare(case: Case, inputs: Inputs, real: Tensor, pad: Callable[[Tensor], Tensor]) -> Built:
    """PyTorch's function, without projections."""

    def heads_first(x: Tensor) -> Tensor:
        return pad(x).unflatten(-1, (case.heads, -1)).transpose(1, 2).contiguous()

    options: dict[str, Any] = {}
    if case.graph == "causal":
        options = {"is_causal": True}
    elif case.graph == "window":
        options = {"attn_mask": neighbours("window", torch.arange(case.length), case.length).bool()}
    elif case.graph == "ragged":
        options = {"attn_mask": real.view(case.batch, 1, 1, -1)}
    leaves = {name: heads_first(x).requires_grad_() for name, x in inputs.tokens.items()}
    return Built(
        lambda: F.scaled_dot_product_attention(leaves["query"], leaves["key"], leaves["value"], **options),
        leaves,
        heads_first(inputs.grad),
        lambda result: result.transpose(1, 2).flatten(2)[real],
    )


class Computation:
    """A peer's forward pass, and its gradients.

    Args:
        case: Which peer, on what.
    """

    def __init__(self, case: Case):
        self.built = build(case, draw(case, case.kind))

    def forward(self) -> Tensor:
        """The output, computed without autograd."""
        with torch.no_grad():
            return self.built.call()

    def forward_backward(self) -> tuple[Tensor, ...]:
        """The output, and the gradients of all inputs and parameters."""
        out = self.built.call()
        return out.detach(), *torch.autograd.grad(out, list(self.built.leaves.values()), self.built.grad)

    def results(self) -> dict[str, Tensor]:
        """All results by name, without padding."""
        output, *gradients = self.forward_backward()
        named = {"output without autograd": self.forward(), "output": output}
        named |= {f"gradient of {name}": grad for name, grad in zip(self.built.leaves, gradients, strict=True)}
        return {name: self.built.unpack(x) if name in TOKEN_RESULTS else x for name, x in named.items()}


# Speed: one measurement ----------------------------------------------------------------------------------------------


def prepare_process(case: Case) -> None:
    """Settings that hold for a whole process."""
    torch.set_num_threads(case.threads)


def measure(case: Case, expected: Path) -> dict[str, Any]:
    """Checks a peer, then takes its memory and its times.

    Args:
        case: What to measure.
        expected: What `write_reference` wrote.
    """
    prepare_process(case)
    # Loads code and starts threads, which are no memory of the computation's.
    Computation(replace(case, length=16, batch=min(case.batch, 2))).forward_backward()
    computation = Computation(case)
    _, forward_peak = peak_above(computation.forward)
    _, peak = peak_above(computation.forward_backward)
    truth = torch.load(expected, weights_only=True)[case.kind]
    results = computation.results()
    errors = check({name: result for name, result in results.items() if name in truth}, truth)
    # Written so that NaN fails.
    wrong = [name for name, (error, budget) in errors.items() if not error <= budget]
    if wrong:
        error, budget = errors[wrong[0]]
        reason = f"{wrong[0]} is off by {error:.1e} of its largest element, where {budget:.1e} is allowed"
        return {"outcome": "WRONG", "reason": reason}
    del truth, results
    return {
        "outcome": "ok",
        "reason": "",
        "forward_peak_bytes": forward_peak,
        "peak_bytes": peak,
        "errors": {name: {"error": error, "budget": budget} for name, (error, budget) in errors.items()},
        "forward": timed(computation.forward, case.repeats, case.seconds),
        "forward_backward": timed(computation.forward_backward, case.repeats, case.seconds),
    }


class Result(Measured):
    """What a measurement has beside its case and the machine."""

    forward_peak_bytes: int
    forward_backward: Times


def key(row: dict[str, Any]) -> str:
    """What makes two rows the same measurement."""
    return repr([row.get(name) for name in (*Case.__dataclass_fields__, *VERSIONS)])


def planned(case: Case) -> str:
    """The key that the case's row will have."""
    return key({**asdict(case), **machine()})


def recorded(results: ResultsFile) -> dict[str, dict[str, Any]]:
    """The newest row of each measurement, by key."""
    return {key(row): row for row in results.rows(Case, outcome(Result), Machine)}


def execute(cases: Sequence[Case], results: ResultsFile, timeout: float, console: Console) -> None:
    """Makes the measurements that are not yet in the results file."""
    done = {name for name, row in recorded(results).items() if row["outcome"] in FINAL}
    pending = [case for case in cases if planned(case) not in done]
    if len(pending) < len(cases):
        text = f"{len(cases) - len(pending)} of {len(cases)} measurements are in {results.path} already."
        console.print(text, soft_wrap=True)
    with Progress(*progress_columns(), console=console) as progress, tempfile.TemporaryDirectory() as folder:
        task = progress.add_task("", total=len(cases), completed=len(cases) - len(pending))
        problem, expected, outcome, reason = None, Path(folder) / "reference.pt", "ok", ""
        for case in pending:
            if case.problem() != problem:
                progress.update(task, description=f"{case}: reference")
                problem = case.problem()
                outcome, reason = run_apart(write_reference, case, expected, timeout=timeout)
            progress.update(task, description=str(case))
            if outcome == "ok":
                row = measure_apart(case, expected, timeout)
            else:
                row = {"outcome": "failed", "reason": f"no reference: {outcome} {reason}"}
            results.append({**asdict(case), **row, **machine()})
            progress.advance(task)


def measure_apart(case: Case, expected: Path, timeout: float) -> dict[str, Any]:
    """The row of a case, measured in a process of its own."""
    outcome, result = run_apart(measure, case, expected, timeout=timeout)
    return result if outcome == "ok" else {"outcome": outcome, "reason": result}


# The reports ---------------------------------------------------------------------------------------------------------


def progress_columns() -> tuple[Any, ...]:
    """What a progress bar shows."""
    return TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()


def merge(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row for all rounds of a measurement: all times together, and the largest memory."""
    for row in rows:
        if row["outcome"] != "ok":
            return row
    times = {mode: spread([seconds for row in rows for seconds in row[mode]["times"]]) for mode in MODES}
    peaks = {name: max(row[name] for row in rows) for name in ("forward_peak_bytes", "peak_bytes")}
    return {**rows[0], **times, **peaks}


class Report:
    """Rows beside each other.

    Args:
        cases: The plan, in the order of the table.
        rows: Their rows.
    """

    def __init__(self, cases: Sequence[Case], rows: Sequence[dict[str, Any]]):
        rounds: dict[Case, list[dict[str, Any]]] = {}
        for case, row in zip(cases, rows, strict=True):
            rounds.setdefault(replace(case, round=0), []).append(row)
        self.rows = {case: merge(group) for case, group in rounds.items()}

    def peer(self, case: Case, **changes: Any) -> dict[str, Any] | None:
        """The row of a case that differs in this; `None` if there is none."""
        return self.rows.get(replace(case, **changes))

    def of(self, part: str) -> dict[Case, dict[str, Any]]:
        """The rows of a part."""
        return {case: row for case, row in self.rows.items() if case.part == part}

    def failures(self, part: str) -> list[str]:
        """What happened where no time is given."""
        return [
            f"{case}: {row['outcome']}{': ' * bool(row['reason'])}{row['reason']}"
            for case, row in self.of(part).items()
            if row["outcome"] != "ok"
        ]


def times_of(row: dict[str, Any]) -> dict[str, str]:
    """The columns of times and memory."""
    line = {f"{title}, ms": quartiles(row, mode) for mode, title in MODES.items()}
    for name, title in (("forward_peak_bytes", "forward peak, MB"), ("peak_bytes", "peak, MB")):
        line[title] = f"{row[name] / 1e6:.1f}" if name in row else "–"
    return line


def speed_lines(report: Report) -> list[dict[str, str]]:
    """The table of the part *speed*."""
    lines = []
    for case, row in report.of("speed").items():
        other = report.peer(case, peer="torch")
        line = {"graph": case.graph, "T": str(case.length), "peer": case.peer, **times_of(row)}
        for mode, title in MODES.items():
            line[f"{title}, torch's ÷"] = ratio(median(other, mode), median(row, mode), ".2f")
        line["peak, torch's ÷"] = ratio((other or {}).get("peak_bytes"), row.get("peak_bytes"))
        lines.append(line)
    return lines


def speed_remarks(report: Report) -> list[str]:
    """Ratios between lines of the part *speed*."""
    remarks = []
    for case, row in report.of("speed").items():
        if case.peer != "gattn":
            continue
        own = median(row, "forward_backward")
        for graph, peer, text in (
            ("ragged", "gattn-padded", "padding it with gattn"),
            ("ragged", "torch", "padding it with torch"),
            ("window", "gattn", "full attention"),
        ):
            other = report.peer(case, peer=peer, graph="full" if graph == "window" else graph)
            factor = ratio(median(other, "forward_backward"), own)
            if case.graph == graph and factor != "–":
                remarks.append(f"{case.graph} {case.length}: {factor} as fast as {text}, forward + backward.")
    return remarks


def graph_lines(report: Report) -> list[dict[str, str]]:
    """The table of the part *graphs*."""
    lines = []
    for case, row in report.of("graphs").items():
        edges, seconds = case.num_edges(), median(row, "forward_backward")
        before = report.peer(case, length=case.length // 2)
        lines.append(
            {
                "graph": case.graph,
                "N": str(case.length),
                "edges": f"{edges:,}".replace(",", " "),
                **times_of(row),
                "forward + backward, ns an edge": f"{seconds / edges * 1e9:.1f}" if seconds else "–",
                "time, half as many nodes' ×": ratio(seconds, median(before, "forward_backward")),
                "peak, half as many nodes' ×": ratio(row.get("peak_bytes"), (before or {}).get("peak_bytes")),
            }
        )
    return lines


def lm_lines(rows: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """The table of the part *lm*."""
    other = next((row for row in rows if row["layers"] == "torch"), None)
    lines = []
    for row in rows:
        times = row["iteration"]
        low, middle, high = (f"{1000 * times[name]:.2f}" for name in ("q1", "median", "q3"))
        lines.append(
            {
                "layers": row["layers"],
                "parameters": str(row["parameters"]),
                "iterations": str(row["iterations"]),
                "validation loss": f"{row['val_loss']:.4f}",
                "over random batches": f"{row['val_loss_random']:.4f}",
                "an iteration, ms": f"{middle} ({low}–{high})",
                "all iterations, s": f"{row['total_seconds']:.1f}",
                "an iteration, × torch's": ratio(times["median"], median(other, "iteration"), ".3f"),
                "all, × torch's": ratio(row["total_seconds"], (other or {}).get("total_seconds"), ".3f"),
            }
        )
    return lines


LM_NOTES = (
    "Validation loss: mean over the whole last tenth of the text, in blocks that do not overlap. Over random batches: "
    f"nanoGPT's way, which reports {PUBLISHED_LOSS} after 2000 iterations (https://github.com/karpathy/nanoGPT). "
    "Its setting, but for the largest learning rate: there 0.001, here 0.004.",
    "An iteration: batch, forward, backward, clipping and optimizer; without validation. Both kinds of layers start "
    f"from the same weights, take the same batches, and train in turns of {CHUNK} iterations in one process.",
)
SPEED_NOTES = (
    "Medians with quartiles over all rounds. Forward: without autograd. Forward + backward: to the inputs and all "
    "parameters. Peak: resident memory above the inputs. Torch's ÷: how many times as much torch takes.",
    "gattn and torch: MultiheadAttention with need_weights=False, in training mode (in eval mode PyTorch's takes "
    "another path, which is slower on a CPU); sdpa: scaled_dot_product_attention alone, without projections. Ragged: "
    "gattn takes the sequences end to end, the others take them padded.",
)
GRAPH_NOTES = (
    "One MultiheadAttention layer, one sequence; projections, which cost the same on every graph, are included.",
    "Medians with quartiles over all rounds. Peak: resident memory above the inputs, the graph's preparation included.",
)


def descriptions(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Machines and versions."""
    return sorted(
        {
            ", ".join(f"{name} {row[name]}" for name in (*VERSIONS, "python") if name in row)
            + f", {row['threads']} thread(s)"
            for row in rows
        }
    )


def write(
    name: str, title: str, lines: Sequence[dict[str, str]], remarks: Sequence[str], out: Path, console: Console
) -> None:
    """Prints a table, and writes it to `out`."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1))
    for column in lines[0]:
        justify: Any = "left" if column in ("graph", "peer", "layers") else "right"
        table.add_column(column.replace("forward + backward", "fwd+bwd"), justify=justify, no_wrap=True)
    for line in lines:
        table.add_row(*(text.split(" (")[0] for text in line.values()))
    print_table(table, console)
    for remark in remarks:
        console.print(remark, highlight=False, soft_wrap=True)
    path = out / f"{name}.md"
    write_table(path, lines, remarks)
    console.print(f"Written: {path}, {out / f'{name}.png'}", highlight=False, soft_wrap=True)


def write_lm(rows: Sequence[dict[str, Any]], out: Path, console: Console) -> None:
    """The table, the learning curves and the sampled texts."""
    write("lm", "Language model on tiny Shakespeare", lm_lines(rows), [*LM_NOTES, *descriptions(rows)], out, console)
    draw_curves(rows, out / "lm.png")
    for row in rows:
        path = out / f"lm-{row['layers']}.txt"
        text = row["sample"].strip("\n") + "\n"
        replace_file(path, text.encode(errors="backslashreplace"))
        console.print(f"Written: {path}", highlight=False, soft_wrap=True)


def write_speed(report: Report, out: Path, console: Console) -> None:
    """The table and the picture of the part *speed*."""
    rows = list(report.of("speed").values())
    remarks = [*speed_remarks(report), *report.failures("speed"), *SPEED_NOTES, *descriptions(rows)]
    write("speed", "Multi-head attention on this machine's CPU", speed_lines(report), remarks, out, console)
    draw_speed(report, out / "speed.png")


def write_graphs(report: Report, out: Path, console: Console) -> None:
    """The table and the picture of the part *graphs*."""
    rows = list(report.of("graphs").values())
    remarks = [*report.failures("graphs"), *GRAPH_NOTES, *descriptions(rows)]
    write("graphs", "One layer on four graphs", graph_lines(report), remarks, out, console)
    draw_graphs(report, out / "graphs.png")


def draw_curves(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Validation loss against iterations."""
    figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for row in rows:
        style = "-" if row["layers"] == "gattn" else "--"
        steps = [point["iteration"] for point in row["curve"]]
        losses = [point["val_loss"] for point in row["curve"]]
        axis.plot(steps, losses, style, color=COLOURS[row["layers"]], label=f"{row['layers']}, validation")
        trained = [point for point in row["curve"] if "train_loss" in point]
        steps, losses = [point["iteration"] for point in trained], [point["train_loss"] for point in trained]
        axis.plot(steps, losses, ":", color=COLOURS[row["layers"]], linewidth=1, label=f"{row['layers']}, training")
    axis.axhline(PUBLISHED_LOSS, color="black", linewidth=0.8)
    axis.annotate(
        f"nanoGPT's {PUBLISHED_LOSS}",
        (0, PUBLISHED_LOSS),
        xytext=(2, -3),
        textcoords="offset points",
        va="top",
        fontsize=8,
    )
    axis.set(xlabel="iteration", ylabel="cross entropy a character", title="Tiny Shakespeare")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
    save_figure(figure, path, dpi=100)


def draw_speed(report: Report, path: Path) -> None:
    """Forward + backward against length, a panel for each graph; the ragged batch as bars."""
    cases = report.of("speed")
    graphs = list(dict.fromkeys(case.graph for case in cases))
    figure, axes = plt.subplots(
        1, len(graphs), figsize=(2.9 * len(graphs) + 0.4, 3.1), squeeze=False, layout="constrained"
    )
    for graph, axis in zip(graphs, axes[0], strict=True):
        for place, peer in enumerate(COLOURS):
            points = [
                (case.length, seconds)
                for case, row in cases.items()
                if (case.graph, case.peer) == (graph, peer) and (seconds := median(row, "forward_backward"))
            ]
            if not points:
                continue
            milliseconds = [1000 * seconds for _, seconds in points]
            if graph == "ragged":
                axis.bar(place, milliseconds[0], color=COLOURS[peer])
            else:
                axis.plot([length for length, _ in points], milliseconds, "o-", markersize=3, color=COLOURS[peer])
        axis.set(title=graph)
        axis.grid(axis="y" if graph == "ragged" else "both", alpha=0.25)
        if graph == "ragged":
            axis.set_xticks([])
        else:
            axis.set(xlabel="T", xscale="log", yscale="log")
            lengths = sorted({case.length for case in cases if case.graph == graph})
            axis.set_xticks(lengths, [str(length) for length in lengths], fontsize=7)
            axis.minorticks_off()
    axes[0, 0].set_ylabel("forward + backward, ms")
    shown = [peer for peer in COLOURS if any(case.peer == peer for case in cases)]
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[peer]) for peer in shown]
    figure.legend(handles, shown, loc="outside lower center", ncols=len(shown), fontsize=8)
    save_figure(figure, path, dpi=100)


def draw_graphs(report: Report, path: Path) -> None:
    """Forward + backward and memory against the number of nodes, with the slope of each line's last piece."""
    cases = report.of("graphs")
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
    for axis, label in zip(axes, ("forward + backward, ms", "peak memory, MB"), strict=True):
        for graph, colour in GRAPH_COLOURS.items():
            rows = [(case.length, row) for case, row in cases.items() if case.graph == graph and row["outcome"] == "ok"]
            if label.startswith("peak"):
                points = [(length, row["peak_bytes"] / 1e6) for length, row in rows if row["peak_bytes"]]
            else:
                points = [(length, 1000 * row["forward_backward"]["median"]) for length, row in rows]
            if not points:
                continue
            text = graph
            if len(points) > 1:
                (size, value), (last_size, last_value) = points[-2:]
                text += f", slope {math.log(last_value / value) / math.log(last_size / size):.1f}"
            axis.plot(*zip(*points, strict=True), "o-", markersize=3, color=colour, label=text)
        axis.set(xlabel="N", ylabel=label, xscale="log", yscale="log")
        sizes = sorted({case.length for case in cases})
        axis.set_xticks(sizes, [str(size) for size in sizes], fontsize=8)
        axis.minorticks_off()
        axis.grid(alpha=0.25)
        if axis.lines:
            axis.legend(fontsize=8)
    figure.suptitle("The same layer on four graphs; slope 1 is linear in N, 2 is quadratic", fontsize=10)
    save_figure(figure, path, dpi=100)


# The command line ----------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sequence", description=(__doc__ or "").split("\n\n")[0].split(":")[0] + "."
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="what is run (default: all)")
    parser.add_argument("--layers", nargs="+", default=LAYERS, choices=LAYERS, help="whose layers (default: both)")
    parser.add_argument("--iterations", type=whole(1, 10**9), help="of training (default: 2000)")
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), help="of training (default: 0)")
    parser.add_argument(
        "--threads",
        type=whole(1, MOST),
        default=torch.get_num_threads(),
        help="threads (default: PyTorch's, here %(default)s)",
    )
    parser.add_argument("--rounds", type=whole(1, 1000), help="how often each peer is measured, in turns (default: 2)")
    parser.add_argument(
        "--repeats", type=whole(1, 10**9), help="calls that are timed in a round, at most (default: 20)"
    )
    parser.add_argument(
        "--seconds", type=seconds, help=f"or until so much time has passed, after {MIN_REPEATS} calls (default: 5)"
    )
    parser.add_argument("--timeout", type=seconds, help="seconds after which a process is ended (default: 1200)")
    parser.add_argument(
        "--out",
        type=folder,
        default=Path("runs/sequence"),
        help="folder of results, checkpoints, tables and pictures (%(default)s)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="about a minute: where nothing else is said, few iterations, small sizes, few repeats, one round",
    )
    options = parser.parse_args(arguments)
    options.is_asked = options.parts is not None
    options.layers = [name for name in LAYERS if name in options.layers]
    if "graphs" in (options.parts or ()) and "gattn" not in options.layers:
        parser.error("--parts graphs is for gattn's layers")
    options.parts = [part for part in PARTS if part in (options.parts or PARTS)]
    of_training: dict[str, Any] = {"iterations": 2000, "seed": 0}
    of_speed: dict[str, Any] = {"rounds": 2, "repeats": 20, "seconds": 5.0, "timeout": 1200.0}
    if options.quick:
        of_training["iterations"] = 100
        of_speed |= {"rounds": 1, "repeats": 10, "seconds": 0.3}
    for defaults, parts in ((of_training, ("lm",)), (of_speed, ("speed", "graphs"))):
        for name, default in defaults.items():
            if getattr(options, name) is None:
                setattr(options, name, default)
            elif not set(parts) & set(options.parts):
                parser.error(f"--{name} is for {' and '.join(parts)}, which --parts leaves out")
    return options


def plan(options: argparse.Namespace) -> list[Case]:
    """All measurements of speed; those that share a reference follow each other, and peers take turns."""
    problems: list[tuple[str, str, int, int, list[str]]] = []
    if "speed" in options.parts:
        peers = [*options.layers, "sdpa"]
        lengths = LENGTHS[:3:2] if options.quick else LENGTHS
        problems += [("speed", graph, n, BATCH, peers) for graph in ("full", "causal", "window") for n in lengths]
        batch, longest = RAGGED
        batch = max(batch // 4, 1) if options.quick else batch
        padded = [name for peer in peers for name in ((peer, "gattn-padded") if peer == "gattn" else (peer,))]
        problems.append(("speed", "ragged", longest, batch, padded))
    if "graphs" in options.parts and "gattn" in options.layers:
        sizes = NODES[:3] if options.quick else NODES
        problems += [("graphs", graph, n, 1, ["gattn"]) for graph in GRAPH_COLOURS for n in sizes]
    return [
        Case(
            part,
            graph,
            length,
            peer,
            batch,
            CHANNELS,
            HEADS,
            number,
            options.threads,
            options.repeats,
            options.seconds,
        )
        for part, graph, length, batch, peers in problems
        for number in range(options.rounds)
        for peer in peers
    ]


def plan_runs(options: argparse.Namespace, corpus: Corpus) -> list[Run]:
    """All training runs."""
    return [
        Run(corpus.name, layers, options.seed, options.iterations, options.threads, SETTING)
        for layers in options.layers
    ]


def find_corpus(options: argparse.Namespace, console: Console) -> Corpus | None:
    """The text, if the language model is asked for and it is there.

    Raises:
        SystemExit: If the language model was asked for by name, and the text is missing.
    """
    if "lm" not in options.parts:
        return None
    try:
        return Corpus(gattn.datasets.load_text(TEXT))
    except gattn.datasets.DatasetUnavailableError as error:
        if options.is_asked:
            sys.exit(f"error: {error}")
        console.print(f"Skipped: {error}", style="yellow", highlight=False, soft_wrap=True)
        return None


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    options = parse(arguments)
    console = Console(markup=False)
    with session(options.out, console) as results:
        corpus, cases = find_corpus(options, console), plan(options)
        if corpus is not None:
            runs = plan_runs(options, corpus)
            train(runs, corpus, results, console)
            rows = finished(results)
            write_lm([rows[run.key()] for run in runs], options.out, console)
        if cases:
            execute(cases, results, options.timeout, console)
            measured = recorded(results)
            report = Report(cases, [measured[planned(case)] for case in cases])
            if report.of("speed"):
                write_speed(report, options.out, console)
            if report.of("graphs"):
                write_graphs(report, options.out, console)


if __name__ == "__main__":
    main()
