"""Transformers on gattn's layers, side by side with PyTorch's: `python -m benchmarks.sequence`.

Three parts. *lm*: a language model on the characters of tiny Shakespeare, in nanoGPT's setting for a CPU, trained with
gattn's layers and with PyTorch's, from the same weights on the same batches, in turns. *speed*: `MultiheadAttention` of
both and the bare `scaled_dot_product_attention`, on sequences that see everything, the past, a window, on a ragged
batch, and token by token: gattn's layer with a `KeyValueCache`, PyTorch in a loop written for that. *graphs*: one layer
on complete, causal, windowed and sparse graphs, which shows how cost grows with size.

The results of *speed* and *graphs* are compared with a float64 reference.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import gattn
from benchmarks.framework import measuring, reports
from benchmarks.framework.benchmark import Benchmark, Case
from benchmarks.framework.measuring import MODES, Computation, Expected, Measured, Measurement, Times, budgets, measured
from benchmarks.framework.options import MOST, fill, folder, seconds, whole
from benchmarks.framework.processes import BenchmarkError, Message
from benchmarks.framework.reports import Line, machines, median, megabytes, quartiles, ratio
from benchmarks.framework.results import VERSIONS, Row
from benchmarks.framework.training import Training

PARTS = ("lm", "speed", "graphs")
LAYERS = ("gattn", "torch")
SEED = 0

TEXT = "tinyshakespeare"
PUBLISHED_LOSS = 1.88
"""NanoGPT's validation loss in this setting, a mean over random batches: its README, "i only have a macbook"."""
CHUNK = 50
"""One kind of layers trains for this many iterations before it is the other's turn; a busy machine hits both alike."""
SAMPLE = 300
"""This many characters are sampled at the end."""
TEMPERATURE = 0.8

CHANNELS = 256
HEADS = 8
BATCH = 4
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
SHORT = 16
"""The length of a single short sequence, where a call costs more than what it computes."""
DECODED = 256
"""The number of tokens that are decoded one by one."""
WINDOW = (127, 0)
RAGGED = (64, 512)
"""The number of sequences in the ragged batch, and the longest; the shortest has a sixteenth of that."""
NODES = (256, 512, 1024, 2048, 4096, 8192)
EDGES_PER_NODE = 16

CHECKED_LENGTH = 1024
"""Up to this length, gradients are compared, too."""
CHUNK_LOGITS = 2**23
"""The reference takes about this many logits at a time, always with all those of a target."""

COLOURS = {"gattn": reports.BLUE, "torch": reports.RED, "sdpa": reports.GREEN, "gattn-padded": reports.SKY}
GRAPH_COLOURS = {"full": reports.RED, "causal": reports.ORANGE, "window": reports.BLUE, "sparse": reports.GREEN}


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
    seed: int
    iterations: int
    threads: int
    setting: Setting

    def __str__(self) -> str:
        return f"language model, {self.layers}"


class Corpus:
    """A text as tokens, one per character; the last tenth validates.

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
    # PyTorch's generator uses only the lower half of a seed, and would forget one of two numbers.
    starts = np.random.default_rng(key).integers(tokens.numel() - setting.context, size=setting.batch)
    return tokens[torch.from_numpy(starts).unsqueeze(1) + torch.arange(setting.context + 1)]


def loss_of(model: torch.nn.Module, pieces: Tensor, reduction: str = "mean") -> Tensor:
    """The cross entropy of each next token of `[B, T + 1]`."""
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
    """Rises in a line, then falls in half a cosine, which ends with the last iteration."""
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
        path = folder / f"lm-{run.layers}-seed{run.seed}-{run.iterations}.pt"
        super().__init__(run, path, model, optimizer, run.iterations, self.setting.evaluate_every, self.setting.clip)

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
        """The loss over the whole text for validation, and nanoGPT's mean over random batches."""
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
        """A text by the model, which begins after a line break."""
        symbols = self.corpus.symbols
        start = torch.tensor([[symbols.index("\n") if "\n" in symbols else 0]])
        self.model.eval()
        tokens = self.model.generate(
            start,
            length,
            temperature=TEMPERATURE,
            use_cache=self.case.layers == "gattn",  # PyTorch's layers take no cache
            generator=torch.Generator().manual_seed(self.case.seed),
        )
        self.model.train()
        return "".join(symbols[token] for token in tokens[0, 1:].tolist())

    def result(self) -> Row:
        """The columns of the finished run."""
        last = self.curve[-1]
        return {
            "parameters": sum(x.numel() for x in self.model.parameters()),
            "curve": self.curve,
            "val_loss": last["val_loss"],
            "val_loss_random": last["val_loss_random"],
            "iteration": measuring.spread(self.seconds),
            "total_seconds": sum(self.seconds),
            "sample": self.sample(SAMPLE),
        }


def train(runs: Sequence[Run], corpus: Corpus, folder: Path) -> Generator[Message[Run], None, None]:
    """Trains models in turns, all in this process."""
    trainings = [LanguageModel(run, corpus, folder) for run in runs]
    for training in turns(trainings):
        torch.set_num_threads(training.case.threads)
        training.advance(CHUNK - training.iteration % CHUNK)
        text = f": val {training.curve[-1]['val_loss']:.3f}" if training.curve else ""
        yield training.case, "progress", (training.iteration, training.iterations, text)
        if training.is_finished:
            yield training.case, "ok", {**training.result(), "in_turns_with": [run.layers for run in runs]}


def turns(trainings: Sequence[LanguageModel]) -> Iterator[LanguageModel]:
    """Whose turn it is: that of those that are behind, in an order that changes each time."""
    waiting, turn = list(trainings), 0
    while waiting:
        behind = min(training.iteration // CHUNK for training in waiting)
        group = [training for training in waiting if training.iteration // CHUNK == behind]
        yield from group if turn % 2 == 0 else reversed(group)
        waiting = [training for training in waiting if not training.is_finished]
        turn += 1


# Speed: the cases ----------------------------------------------------------------------------------------------------


class Result(Measured):
    """The columns of a measurement."""

    forward_peak_bytes: int
    forward_backward: NotRequired[Times]
    """Of all but decoding."""


@dataclass(frozen=True)
class Speed(Measurement):
    """One measurement."""

    result = Result
    has_forward_peak = True

    part: str
    """`"speed"` or `"graphs"`."""
    graph: str
    """`"full"`, `"causal"`, `"window"`, `"ragged"`, `"decode"` or `"sparse"`."""
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

    @property
    def has_gradients(self) -> bool:
        """Whether there are any, and sequences are not too long for the reference's."""
        return self.length <= CHECKED_LENGTH and self.graph != "decode"

    def problem(self) -> tuple[object, ...]:
        """What cases have in common that share a reference."""
        return self.part, self.graph, self.length, self.batch, self.channels, self.heads

    def lengths(self) -> list[int]:
        """The length of each sequence."""
        if self.graph != "ragged":
            return [self.length] * self.batch
        generator = torch.Generator().manual_seed(SEED)
        shortest = max(self.length // 16, 1)
        return torch.randint(shortest, self.length + 1, (self.batch,), generator=generator).tolist()

    def num_edges(self) -> int:
        """Number of pairs (target, source) that attend, over the whole batch."""
        if self.graph == "sparse":
            return EDGES_PER_NODE * self.length
        return sum(
            int(neighbours(self.graph, torch.arange(first, min(first + 1024, length)), length).sum())
            for length in self.lengths()
            for first in range(0, length, 1024)
        )

    def references(self) -> dict[str, dict[str, Expected]]:
        """The results of the plain formula, which sums over sources or channels, and for parameters over tokens."""
        expected = {}
        for kind in ("layer", "bare") if self.part == "speed" else ("layer",):
            inputs = draw(self, kind)
            exact, rounded = (reference(self, inputs, dtype) for dtype in (torch.float64, torch.float32))
            terms = max(self.length, self.channels), sum(inputs.lengths)
            expected[kind] = budgets(exact, rounded, torch.float32, *terms)
        return expected

    def computation(self) -> Computation:
        """The peer's."""
        build(replace(self, length=16, batch=min(self.batch, 2))).forward_backward()
        return build(self)


@dataclass
class Inputs:
    """What all peers compute from: the same numbers for each. Sequences lie end to end, without padding."""

    lengths: list[int]
    tokens: dict[str, Tensor]
    """A layer's `x`; or bare attention's query, key and value; `[sum of lengths, channels]`."""
    parameters: dict[str, Tensor]
    """The layer's."""
    grad: Tensor
    """Gradient of the output, `[sum of lengths, channels]`."""
    edge_index: Tensor | None
    """Of the sparse graph, `[2, E]`."""


def draw(case: Speed, kind: str) -> Inputs:
    """Draws the inputs."""
    generator = torch.Generator().manual_seed(SEED)
    lengths = case.lengths()
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
    """The number of edges that join each of these targets with each source of its sequence, `[n, length]`."""
    if edge_index is not None:
        source, target = edge_index
        place = torch.full((length,), -1)
        place[targets] = torch.arange(targets.numel())
        mine = place[target] >= 0
        counts = torch.zeros(targets.numel(), length, dtype=torch.int64)
        one = torch.ones((), dtype=torch.int64)
        return counts.index_put_((place[target[mine]], source[mine]), one, accumulate=True)
    distance = torch.arange(length) - targets.unsqueeze(1)
    if graph in ("causal", "decode"):
        return (distance <= 0).long()
    if graph == "window":
        return ((distance >= -WINDOW[0]) & (distance <= WINDOW[1])).long()
    return torch.ones_like(distance)


def plain(case: Speed, tokens: dict[str, Tensor], parameters: dict[str, Tensor], edge_index: Tensor | None) -> Tensor:
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
        # A duplicate edge counts twice; a missing one has the weight exp(log 0) = 0.
        outputs.append((logits + counts.to(logits.dtype).log()).softmax(-1) @ value)
    out = torch.cat(outputs, 1).transpose(0, 1).flatten(1)
    return F.linear(out, parameters["out_proj.weight"], parameters["out_proj.bias"]) if parameters else out


def reference(case: Speed, inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and, where sequences are not too long for it, gradients by the plain formula, summed in float64."""
    has_gradients = case.has_gradients
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


# Speed: the peers ----------------------------------------------------------------------------------------------------


def build(case: Speed) -> Computation:
    """A peer on its inputs, which are padded unless it takes sequences end to end."""
    inputs = draw(case, case.kind)
    lengths = torch.tensor(inputs.lengths)
    real = torch.arange(max(inputs.lengths)) < lengths.unsqueeze(1)

    def pad(x: Tensor) -> Tensor:
        return pad_sequence(x.split(inputs.lengths), batch_first=True)

    if case.peer == "sdpa":
        return build_bare(case, inputs, real, pad)
    if case.graph == "decode":
        decode = decode_with_gattn if case.peer == "gattn" else decode_with_torch
        return Computation(decode(case, inputs.parameters, pad(inputs.tokens["x"])), {}, inputs.grad)
    module = torch.nn if case.peer == "torch" else gattn.nn
    layer = module.MultiheadAttention(case.channels, case.heads, batch_first=True)
    layer.load_state_dict(inputs.parameters)
    is_packed = case.part == "graphs" or (case.graph == "ragged" and case.peer == "gattn")
    x = (inputs.tokens["x"] if is_packed else pad(inputs.tokens["x"])).requires_grad_()
    options = torch_options(case, real) if case.peer == "torch" else gattn_options(case, inputs, real)
    return Computation(
        lambda: layer(x, x, x, need_weights=False, **options)[0],
        {"x": x, **dict(layer.named_parameters())},
        inputs.grad if is_packed else pad(inputs.grad),
        (lambda result: result) if is_packed else (lambda result: result[real]),
    )


def decode_with_gattn(case: Speed, parameters: dict[str, Tensor], x: Tensor) -> Callable[[], Tensor]:
    """Token by token, `[B, T, channels]`, by gattn's layer and its cache."""
    layer = gattn.nn.MultiheadAttention(case.channels, case.heads, batch_first=True).eval().requires_grad_(False)
    layer.load_state_dict(parameters)

    def call() -> Tensor:
        cache = gattn.nn.KeyValueCache()
        steps = [layer(t, t, t, need_weights=False, is_causal=True, cache=cache)[0] for t in x.split(1, 1)]
        return torch.cat(steps, 1)

    return call


def decode_with_torch(case: Speed, parameters: dict[str, Tensor], x: Tensor) -> Callable[[], Tensor]:
    """The same in a loop that is as short as PyTorch allows; it knows beforehand how many tokens there will be."""
    in_weight, in_bias = parameters["in_proj_weight"], parameters["in_proj_bias"]
    out_weight, out_bias = parameters["out_proj.weight"], parameters["out_proj.bias"]

    def call() -> Tensor:
        keys, values = x.new_empty(2, x.size(0), case.heads, x.size(1), case.channels // case.heads)
        steps = []
        for place, token in enumerate(x.split(1, 1)):
            projected = F.linear(token, in_weight, in_bias).unflatten(-1, (3, case.heads, -1))
            query, key, value = projected.permute(2, 0, 3, 1, 4)
            keys[:, :, place : place + 1], values[:, :, place : place + 1] = key, value
            out = F.scaled_dot_product_attention(query, keys[:, :, : place + 1], values[:, :, : place + 1])
            steps.append(F.linear(out.transpose(1, 2).flatten(2), out_weight, out_bias))
        return torch.cat(steps, 1)

    return call


def gattn_options(case: Speed, inputs: Inputs, real: Tensor) -> dict[str, Any]:
    """How gattn's layer is told who attends to whom."""
    if case.graph == "causal":
        return {"is_causal": True}
    if case.graph == "window":
        return {"graph": gattn.CompleteGraph(case.length, window=WINDOW)}
    if case.graph == "sparse":
        return {"graph": gattn.SparseGraph(inputs.edge_index, num_sources=case.length, num_targets=case.length)}
    if case.graph == "ragged":
        padded = {"key_padding_mask": ~real}
        return padded if case.peer == "gattn-padded" else {"graph": gattn.CompleteGraph.packed(inputs.lengths)}
    return {}


def torch_options(case: Speed, real: Tensor) -> dict[str, Any]:
    """How PyTorch's layer is told."""
    if case.graph == "ragged":
        return {"key_padding_mask": ~real}
    if case.graph == "full":
        return {}
    seen = neighbours(case.graph, torch.arange(case.length), case.length).bool()
    return {"attn_mask": ~seen, "is_causal": case.graph == "causal"}


def build_bare(case: Speed, inputs: Inputs, real: Tensor, pad: Callable[[Tensor], Tensor]) -> Computation:
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
    return Computation(
        lambda: F.scaled_dot_product_attention(leaves["query"], leaves["key"], leaves["value"], **options),
        leaves,
        heads_first(inputs.grad),
        lambda result: result.transpose(1, 2).flatten(2)[real],
    )


# The reports ---------------------------------------------------------------------------------------------------------


def merge(rows: Sequence[Row]) -> Row:
    """One row for all rounds of a measurement: all times together, and the largest memory."""
    for row in rows:
        if row["outcome"] != "ok":
            return row
    modes = [mode for mode in MODES if mode in rows[0]]
    times = {mode: measuring.spread([seconds for row in rows for seconds in row[mode]["times"]]) for mode in modes}
    peaks = {name: max(row[name] for row in rows) for name in ("forward_peak_bytes", "peak_bytes")}
    return {**rows[0], **times, **peaks}


class Report:
    """Rows beside each other.

    Args:
        rows: The rows by case, in the order of the tables.
    """

    def __init__(self, rows: dict[Speed, Row]):
        rounds: dict[Speed, list[Row]] = {}
        for case, row in rows.items():
            rounds.setdefault(replace(case, round=0), []).append(row)
        self.rows = {case: merge(group) for case, group in rounds.items()}

    def peer(self, case: Speed, **changes: Any) -> Row | None:
        """The row of a case that differs in this; `None` if there is none."""
        return self.rows.get(replace(case, **changes))

    def of(self, part: str) -> dict[Speed, Row]:
        """The rows of a part."""
        return {case: row for case, row in self.rows.items() if case.part == part}

    def failures(self, part: str) -> list[str]:
        """What happened where no time is given."""
        return [
            f"{case}: {row['outcome']}{': ' * bool(row['reason'])}{row['reason']}"
            for case, row in self.of(part).items()
            if row["outcome"] != "ok"
        ]


def times_of(row: Row) -> Line:
    """The columns of times and memory."""
    line = {f"{title}, ms": quartiles(row, mode) for mode, title in MODES.items()}
    peaks = {"forward_peak_bytes": "forward peak, MB", "peak_bytes": "peak, MB"}
    return line | {title: megabytes(row, column) for column, title in peaks.items()}


def speed_lines(report: Report) -> list[Line]:
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


def graph_lines(report: Report) -> list[Line]:
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


def lm_lines(rows: Sequence[Row]) -> list[Line]:
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


def draw_curves(rows: Sequence[Row]) -> Figure:
    """Validation loss against iterations."""
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axis = figure.subplots()
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
    return figure


def draw_speed(report: Report) -> Figure:
    """Forward + backward against length, with a panel for each graph; the ragged batch as bars."""
    cases = {case: row for case, row in report.of("speed").items() if case.graph != "decode"}
    graphs = list(dict.fromkeys(case.graph for case in cases))
    figure = Figure(figsize=(2.9 * len(graphs) + 0.4, 3.1), layout="constrained")
    axes = figure.subplots(1, len(graphs), squeeze=False)
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
    handles = [Rectangle((0, 0), 1, 1, color=COLOURS[peer]) for peer in shown]
    figure.legend(handles, shown, loc="outside lower center", ncols=len(shown), fontsize=8)
    return figure


def draw_graphs(report: Report) -> Figure:
    """Forward + backward and memory against the number of nodes, with the slope of the last piece of each line."""
    cases = report.of("graphs")
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.subplots(1, 2)
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
    return figure


# The benchmark -------------------------------------------------------------------------------------------------------


class Sequences(Benchmark[Run | Speed]):
    """Trains the language models, then measures each peer on each graph."""

    name = "sequence"

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the options."""
        add = parser.add_argument
        add("--parts", nargs="+", choices=PARTS, help="what is run (default: all)")
        add("--layers", nargs="+", default=LAYERS, choices=LAYERS, help="whose layers (default: both)")
        add("--iterations", type=whole(1, 10**9), help="of training (default: 2000)")
        add("--seed", type=whole(0, 2**32 - 1), help="of training (default: 0)")
        text = "threads (default: PyTorch's, here %(default)s)"
        add("--threads", type=whole(1, MOST), default=torch.get_num_threads(), help=text)
        add("--rounds", type=whole(1, 1000), help="how often each peer is measured, in turns (default: 2)")
        add("--repeats", type=whole(1, 10**9), help="calls that are timed in a round, at most (default: 20)")
        text = f"or until this much time has passed, after {measuring.MIN_REPEATS} calls (default: 5)"
        add("--seconds", type=seconds, help=text)
        add("--timeout", type=seconds, help="seconds after which a process is ended (default: 1200)")
        text = "folder of results, checkpoints, tables and pictures (%(default)s)"
        add("--out", type=folder, default=Path("runs/sequence"), help=text)
        text = "about a minute: where nothing else is said, few iterations, small sizes, few repeats, one round"
        add("--quick", action="store_true", help=text)

    @classmethod
    def check_options(cls, options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        """Fills in the defaults of `--quick`, and refuses options of parts that are left out."""
        options.is_asked = options.parts is not None
        options.layers = [name for name in LAYERS if name in options.layers]
        if "graphs" in (options.parts or ()) and "gattn" not in options.layers:
            parser.error("--parts graphs is for gattn's layers")
        options.parts = [part for part in PARTS if part in (options.parts or PARTS)]
        of_training: dict[str, object] = {"iterations": 2000, "seed": 0}
        of_speed: dict[str, object] = {"rounds": 2, "repeats": 20, "seconds": 5.0, "timeout": 1200.0}
        for defaults, parts in ((of_training, ("lm",)), (of_speed, ("speed", "graphs"))):
            given = [name for name in defaults if getattr(options, name) is not None]
            if given and not set(parts) & set(options.parts):
                parser.error(f"--{given[0]} is for {' and '.join(parts)}, which --parts leaves out")
        if options.quick:
            fill(options, {"iterations": 100, "rounds": 1, "repeats": 10, "seconds": 0.3})
        fill(options, of_training | of_speed)

    def cases(self) -> list[Run | Speed]:
        """All training runs, then all measurements."""
        return [*self.runs(), *self.measurements()]

    def runs(self) -> list[Run]:
        """All training runs; none if the text is missing.

        Raises:
            BenchmarkError: If it is, and the language model was asked for by name.
        """
        options = self.options
        if "lm" not in options.parts:
            return []
        try:
            self.corpus = Corpus(gattn.datasets.load_text(TEXT))
        except gattn.datasets.DatasetUnavailableError as error:
            if options.is_asked:
                raise BenchmarkError(str(error)) from error
            self.skip("lm", str(error))
            return []
        fixed = (options.seed, options.iterations, options.threads, SETTING)
        return [Run(self.corpus.name, layers, *fixed) for layers in options.layers]

    def measurements(self) -> list[Speed]:
        """All measurements; those that share a reference follow each other, and peers take turns."""
        options = self.options
        problems: list[tuple[str, str, int, int, list[str]]] = []
        if "speed" in options.parts:
            peers = [*options.layers, "sdpa"]
            lengths = LENGTHS[:3:2] if options.quick else LENGTHS
            problems += [("speed", graph, n, BATCH, peers) for graph in ("full", "causal", "window") for n in lengths]
            batch, longest = RAGGED
            batch = max(batch // 4, 1) if options.quick else batch
            padded = [name for peer in peers for name in ((peer, "gattn-padded") if peer == "gattn" else (peer,))]
            problems.append(("speed", "ragged", longest, batch, padded))
            problems.append(("speed", "full", SHORT, 1, peers))
            problems.append(("speed", "decode", DECODED, 1, options.layers))
        if "graphs" in options.parts and "gattn" in options.layers:
            sizes = NODES[:3] if options.quick else NODES
            problems += [("graphs", graph, n, 1, ["gattn"]) for graph in GRAPH_COLOURS for n in sizes]
        fixed = (options.threads, options.repeats, options.seconds)
        return [
            Speed(part, graph, length, peer, batch, CHANNELS, HEADS, number, *fixed)
            for part, graph, length, batch, peers in problems
            for number in range(options.rounds)
            for peer in peers
        ]

    def run(self, cases: Sequence[Run | Speed]) -> Generator[Message[Run | Speed], None, None]:
        """Trains or measures."""
        runs = [case for case in cases if isinstance(case, Run)]
        if runs:
            yield from train(runs, self.corpus, self.options.out)
        yield from measured([case for case in cases if isinstance(case, Speed)], self.options.timeout)

    def report(self, rows: dict[Run | Speed, Row]) -> None:
        """A table and a picture for each part; of the language models, also texts that they wrote."""
        everything = list(rows.values())
        if everything[0].get("part") == "lm":
            texts = {f"lm-{row['layers']}.txt": row["sample"].strip("\n") + "\n" for row in everything}
            files = {"lm.png": draw_curves(everything), **texts}
            title = "Language model on tiny Shakespeare"
            self.table("lm", title, everything, lm_lines(everything), LM_NOTES, files)
            return
        report = Report({case: row for case, row in rows.items() if isinstance(case, Speed)})
        if some := report.of("speed").values():
            remarks = [*speed_remarks(report), *report.failures("speed"), *SPEED_NOTES]
            title = "Multi-head attention on this machine's CPU"
            self.table("speed", title, some, speed_lines(report), remarks, {"speed.png": draw_speed(report)})
        if some := report.of("graphs").values():
            remarks = [*report.failures("graphs"), *GRAPH_NOTES]
            title = "One layer on four graphs"
            self.table("graphs", title, some, graph_lines(report), remarks, {"graphs.png": draw_graphs(report)})

    def table(
        self,
        name: str,
        title: str,
        rows: Collection[Row],
        lines: Sequence[Line],
        remarks: Sequence[str],
        files: Mapping[str, Figure | str],
    ) -> None:
        """Publishes a part."""
        remarks = [*remarks, *machines(rows, (*VERSIONS, "python"), ", {threads} thread(s)")]
        headings = {column: column.replace("forward + backward", "fwd+bwd") for column in lines[0]}
        self.publish(title, lines, remarks, files, f"{name}.md", headings)


if __name__ == "__main__":
    Sequences.main()
