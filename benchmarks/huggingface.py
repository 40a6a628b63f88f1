"""Whole models of `transformers` on gattn's attention and on its own: `python -m benchmarks.huggingface`.

Random models of four layers, 256 channels and 8 heads: training steps and forward passes with `gattn`, `sdpa`, `eager`
and, forward only, compiled `flex_attention`, each where the model and a CPU allow it. Nothing is timed before outputs
and gradients agree with a float64 model.

Duration: 15 minutes; with `--quick`: 1 minute.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, NotRequired

import torch
from torch import Tensor

from benchmarks.framework.benchmark import Benchmark
from benchmarks.framework.measuring import (
    Computation,
    Expected,
    Measured,
    Measurement,
    Times,
    budgets,
    measured,
    timed,
)
from benchmarks.framework.options import add_allocator, add_measuring, allocators, unique
from benchmarks.framework.processes import BenchmarkError, Message
from benchmarks.framework.reports import Line, factor, machines, megabytes, quartiles
from benchmarks.framework.results import VERSIONS, Row

SEED = 0
PEERS = {"gattn": "gattn", "sdpa": "sdpa", "eager": "eager", "flex": "flex_attention"}
"""Attention implementations, under the names of `transformers`."""
FORWARD = "forward"
"""The kind of reference for what cannot be trained."""

WIDTH: dict[str, Any] = {"vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8}
WIDTH |= {"intermediate_size": 1024, "max_position_embeddings": 20_000, "initializer_range": 0.1}
GROUPED = {**WIDTH, "num_key_value_heads": 4, "head_dim": 32}
BERT = {**WIDTH, "max_position_embeddings": 512, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
T5: dict[str, Any] = {"vocab_size": 1000, "d_model": 256, "d_kv": 32, "d_ff": 1024, "num_layers": 4, "num_heads": 8}
T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu"}  # smooth, for gradients
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}  # both are used: rounding must not choose one


class Task(NamedTuple):
    """A model, and what it reads."""

    model_type: str
    config: dict[str, Any]
    texts: tuple[int, ...]
    """The number of tokens of each text; shorter ones are padded."""
    peers: tuple[str, ...] = tuple(PEERS)
    """The implementations that the model has, and that run on CPUs."""
    exact: str = "eager"
    """The implementation that is computed in float64."""
    weights: bool = False
    """Whether it returns the attention weights."""
    new_tokens: int = 0
    """How many it reads one by one, with a cache, after the text."""
    allocators: tuple[str, ...] = ("default", "kept")


MISTRAL = {**GROUPED, "sliding_window": 256}
TASKS = {
    # Eager attention has gigabytes in float64, and sdpa takes a minute.
    "Mistral, window of 256, 4 096 tokens": Task("mistral", MISTRAL, (4096,), exact="sdpa"),
    "Mistral, window of 256, 16 384 tokens": Task(
        "mistral", MISTRAL, (16_384,), ("gattn", "sdpa", "flex"), exact="gattn", allocators=("kept",)
    ),
    "BERT, 16 texts of 32 to 512 tokens": Task("bert", BERT, tuple(range(32, 513, 32))),
    "Gemma 2, soft caps, 2 048 tokens": Task(
        "gemma2", {**GROUPED, "query_pre_attn_scalar": 32}, (2048,), ("gattn", "eager", "flex")
    ),
    "GPT-OSS, sinks, 2 048 tokens": Task("gpt_oss", {**GROUPED, **EXPERTS}, (2048,), ("gattn", "eager")),
    "BERT, dropout of 0.1, 8 texts of 512 tokens": Task("bert", {**BERT, **DROPOUT}, (512,) * 8),
    # With flex, transformers reads the bias of a text that it does not have.
    "T5, relative buckets, 4 texts of 512 tokens": Task("t5", T5, (512,) * 4, ("gattn", "sdpa", "eager")),
    "BERT, with weights, 4 texts of 512 tokens": Task("bert", BERT, (512,) * 4, ("gattn", "eager"), weights=True),
    "Llama, 64 new tokens after 1 024": Task("llama", GROUPED, (1024,), new_tokens=64),
}
CLASSES = {"bert": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM"}


class Result(Measured):
    """The columns of a measurement."""

    forward_peak_bytes: int
    step: NotRequired[Times]
    """Loss, gradients and AdamW's update, with dropout; what cannot be trained lacks it."""


@dataclass(frozen=True)
class Case(Measurement):
    """One measurement."""

    result = Result
    has_forward_peak = True

    task: str
    peer: str
    threads: int
    repeats: int
    seconds: float
    allocator: str
    transformers: str

    def __str__(self) -> str:
        return f"{self.task}, {self.peer}" + ", kept memory" * (self.allocator == "kept")

    @property
    def kind(self) -> str:
        """Those that are not trained have no gradients."""
        return FORWARD if self.peer == "flex" else ""

    def prepare_process(self) -> None:
        """Also silences warnings of `transformers` and PyTorch's compiler about themselves."""
        super().prepare_process()
        import transformers

        transformers.logging.set_verbosity_error()
        warnings.filterwarnings("ignore")

    def problem(self) -> tuple[object, ...]:
        """What is the same for all cases that must have the same result."""
        return (self.task,)

    def references(self) -> dict[str, dict[str, Expected]]:
        """The results in float64."""
        task = TASKS[self.task]
        exact, rounded = (
            computed.compared(computed.forward_backward())
            for computed in (self._build(task.exact, dtype)[0] for dtype in (torch.float64, torch.float32))
        )
        longest = max(task.texts) + task.new_tokens
        expected = budgets(exact, rounded, torch.float32, longest, sum(task.texts))
        return {"": expected, FORWARD: {name: x for name, x in expected.items() if name.startswith("output")}}

    def computation(self) -> Computation:
        """The model in evaluation, with the gradients of all parameters."""
        computation, self.__dict__["step"] = self._build(self.peer, torch.float32)
        computation.forward()  # in which it is compiled
        return computation

    def times(self, computation: Computation) -> Row:
        """The times of a forward pass and, if there are gradients, of a step."""
        row: Row = {"forward": timed(computation.forward, self.repeats, self.seconds)}
        if computation.leaves:
            row["step"] = timed(self.__dict__["step"], self.repeats, self.seconds)
        return row

    def _build(self, peer: str, dtype: torch.dtype) -> tuple[Computation, Callable[[], None]]:
        """The computation, and a training step of the same model."""
        task, generator = TASKS[self.task], torch.Generator().manual_seed(SEED)
        model = model_of(task, peer).to(dtype)
        tokens = torch.randint(1, task.config["vocab_size"], (len(task.texts), max(task.texts)), generator=generator)
        is_token = torch.arange(tokens.size(1)) < torch.tensor(task.texts)[:, None]
        given: dict[str, Any] = {"input_ids": tokens.masked_fill(~is_token, 0)}
        if not is_token.all():
            given["attention_mask"] = is_token.long()
        if task.new_tokens:
            new = torch.randint(1, task.config["vocab_size"], (len(tokens), task.new_tokens), generator=generator)
            return Computation(decoding(model.requires_grad_(False), given, new), {}, torch.empty(0)), lambda: None
        labels = tokens.masked_fill(~is_token, -100)
        if task.model_type == "t5":
            given["decoder_input_ids"] = tokens.roll(1, 1)
        else:
            given |= {"output_attentions": True} if task.weights else {}
        if task.model_type not in CLASSES:
            given["use_cache"] = False
        weights: list[Tensor] = []

        def call() -> Tensor:
            out = model(**given)
            weights[:] = [x.detach() for x in out.attentions] if task.weights else []
            logits: Tensor = out.logits
            return logits

        def unpack(result: Tensor) -> Tensor:
            """The results of tokens, and the weights of the last call."""
            return torch.cat([result[is_token].flatten(), *(x.flatten().to(result.dtype) for x in weights)])

        if peer == "flex":
            return Computation(call, {}, torch.empty(0), unpack), lambda: None
        grad = torch.randn(*tokens.shape, task.config["vocab_size"], generator=generator).to(dtype)
        leaves: dict[str, Tensor] = {name: x for name, x in model.named_parameters() if x.requires_grad}
        computation = Computation(call, leaves, grad * is_token.unsqueeze(-1), unpack)
        return computation, step_of(model, given, labels)


def model_of(task: Task, peer: str) -> torch.nn.Module:
    """A random model, the same for all implementations."""
    import transformers

    import gattn.huggingface  # noqa: F401 # which registers "gattn"

    config = transformers.AutoConfig.for_model(task.model_type, **task.config, pad_token_id=0)
    auto = getattr(transformers, CLASSES.get(task.model_type, "AutoModelForCausalLM"))
    torch.manual_seed(SEED)
    options = {"attn_implementation": PEERS[peer]}
    if task.model_type == "gpt_oss":
        options["experts_implementation"] = "eager"  # the only one for float64, too
    model: torch.nn.Module = auto.from_config(config, **options).eval()
    return model.requires_grad_(peer != "flex")  # which refuses gradients on CPUs


def decoding(model: torch.nn.Module, given: dict[str, Tensor], new: Tensor) -> Callable[[], Tensor]:
    """A function that reads tokens one by one after a text, and returns their logits `[T, B, vocabulary]`."""
    with torch.no_grad():
        cache = model(**given, use_cache=True).past_key_values

    def call() -> Tensor:
        logits = [model(token, past_key_values=cache, use_cache=True).logits[:, -1] for token in new.split(1, 1)]
        cache.crop(-new.size(1))
        return torch.stack(logits)

    return call


def step_of(model: torch.nn.Module, given: dict[str, Any], labels: Tensor) -> Callable[[], None]:
    """A step of training, with dropout."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step() -> None:
        model.train()
        optimizer.zero_grad()
        model(**given, labels=labels).loss.backward()
        optimizer.step()

    return step


class HuggingFace(Benchmark[Case]):
    """Measures each model."""

    name = "huggingface"
    quick: ClassVar = {
        "tasks": ["BERT, with weights, 4 texts of 512 tokens", "Llama, 64 new tokens after 1 024"],
        "peers": ["gattn", "sdpa", "eager"],
        "allocator": "default",
        "repeats": 3,
        "seconds": 0.1,
    }

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the options."""
        add = parser.add_argument
        add("--tasks", nargs="+", default=list(TASKS), choices=TASKS, help="models and texts (default: all)")
        text = "implementations (default: all that a model has; flex only with memory kept)"
        add("--peers", nargs="+", choices=PEERS, help=text)
        add_allocator(parser)
        add_measuring(parser, cls.name, repeats=5, duration=1.5)

    def cases(self) -> list[Case]:
        """Each task's peers under each allocator."""
        if importlib.util.find_spec("transformers") is None:
            raise BenchmarkError("transformers is not installed: pip install -c constraints.txt 'gattn[huggingface]'")
        options, version = self.options, importlib.metadata.version("transformers")
        fixed = options.threads, options.repeats, options.seconds
        chosen = allocators(options)
        return unique(
            Case(task, peer, *fixed, allocator, version)
            for task in options.tasks
            for allocator in (chosen if len(chosen) == 1 else TASKS[task].allocators)
            for peer in options.peers or PEERS
            if peer in TASKS[task].peers and (options.peers or peer != "flex" or allocator == "kept")
        )

    def run(self, cases: Sequence[Case]) -> Generator[Message[Case], None, None]:
        """Measures."""
        return measured(cases, self.options.timeout)

    def report(self, rows: dict[Case, Row]) -> None:
        """One line per task and implementation."""

        def line(case: Case, row: Row) -> Line:
            ours = rows.get(replace(case, peer="gattn"))
            times = {
                f"{mode}, {column}": text
                for mode in ("step", "forward")
                for column, text in (("× gattn", factor(row, ours, mode, ".2f")), ("ms", quartiles(row, mode)))
            }
            return {
                "model": case.task,
                "attention": case.peer,
                "allocator": case.allocator,
                **times,
                "peak, MB": megabytes(row),
                "peak of forward, MB": megabytes(row, "forward_peak_bytes"),
            }

        remarks = [
            *machines(rows.values(), (*VERSIONS, "transformers", "python"), ", {threads} thread(s)"),
            "Medians with quartiles. A step is the loss, all gradients and AdamW's update. × gattn is the time as a "
            "multiple of gattn's. Peaks are the resident memory above the model in the first forward pass and in the "
            "first forward + backward, gradients included; of what only runs forward, both are forward passes.",
        ]
        self.publish("Models of transformers", [line(case, row) for case, row in rows.items()], remarks, {})


if __name__ == "__main__":
    HuggingFace.main()
