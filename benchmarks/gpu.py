"""A GPU's first hour: what to run on one that nothing has run on, most important first, in steps of nine minutes.

    python -m benchmarks.gpu right     # is it right? the doctor, tests, and compute-sanitizer
    python -m benchmarks.gpu fast      # attention, layers and minibatches, beside PyG
    python -m benchmarks.gpu tuned     # the choices of the kernels, and what Python costs per call
    python -m benchmarks.gpu best      # what `tuned` found, as a table
    python -m benchmarks.gpu long      # training, and attention among all nodes

Each step writes what it finds to --out at once: the output of each command as a text, measurements as rows. A step that
is killed, or started again, goes on where it ended. With --dry-run, it does the same on tiny graphs and on the CPU, in
Triton's interpreter, which shows that the commands work.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import gattn
from benchmarks.framework.measuring import check, wrong
from benchmarks.framework.reports import markdown
from benchmarks.framework.results import machine
from benchmarks.kernel_cases import BACKENDS, CONVS, DTYPES, GPU_PEERS, SHAPES, Case, Shape, build, draw
from benchmarks.steps import GPU_TASKS
from gattn.ops import plans
from gattn.ops.backends.triton import forms as launcher
from gattn.ops.backends.triton import layout

LIMIT = 540
"""Seconds after which a step starts nothing more, and ends what runs."""

TINY = Shape("tiny", 10, 30, 2, 4, in_channels=8, hub=0)


class Choice(NamedTuple):
    """What the kernels choose by rules. The number of stages would be none: it does not change their compiled code."""

    bytes_loaded: int = launcher._LOADED
    """Bytes that a warp loads at a time."""
    warps: int | None = None
    """The warps of a program. (default: by its number of channels)"""
    long_row: int = layout.LONG_ROW
    """Rows with more edges are split."""


DEFAULT = Choice()
LOADS = Choice(1024), Choice(256), Choice(1024, 2), Choice(2048, 4)
SPLITS = tuple(Choice(long_row=edges) for edges in (512, 64, 256))
GRID = (
    ("mid", DTYPES[:2], LOADS),
    ("hub", DTYPES[:2], SPLITS),
    ("arxiv", DTYPES[:2], LOADS[:2]),
    ("mid", DTYPES[2:], LOADS),
)
"""What `tuned` tries beside the default, the most telling first: shapes, types and choices."""


class Command(NamedTuple):
    """A command of a step."""

    name: str
    arguments: list[str]
    alone: bool = True
    """Whether nothing else may run, as it measures."""


def steps(out: Path, dry_run: bool) -> dict[str, list[Command]]:
    """The commands of each step."""
    python = [sys.executable, "-m"]
    device = "cpu" if dry_run else "cuda"
    workers = str(max((os.cpu_count() or 2) // 3, 1))

    def tests(name: str, *arguments: str) -> Command:
        how = ["--collect-only"] if dry_run else ["-n", workers, "-p", "no:benchmark"]
        return Command(name, [*python, "pytest", "-q", "--device", device, *how, *arguments], alone=False)

    right = [
        Command("doctor", [*python, "gattn"], alone=False),
        tests("test_gpu", "tests/test_gpu.py", "-m", "slow or not slow"),
        tests("test_tiles", "tests/ops/test_tiles.py", "-m", "slow or not slow", "-k", "on_a_gpu"),
        tests("test_triton", "tests/ops/test_triton.py", "--share", "0.4", "1"),
    ]
    sanitizer = shutil.which("compute-sanitizer")
    for kind, peer in itertools.product(CONVS, ("gattn", "pyg")):
        program = [*python, "benchmarks.gpu", "program", kind, peer, *["--dry-run"] * dry_run]
        for tool in ("memcheck", "racecheck") if sanitizer is not None else ("without",):
            if peer == "gattn" or tool == "memcheck":  # what PyTorch's own kernels do is seen beside
                watched = [] if sanitizer is None else [sanitizer, "--tool", tool, "--print-limit", "1000"]
                right.append(Command(f"{tool}_{kind}_{peer}", [*watched, *program], alone=False))

    def benchmark(command: str, name: str, *arguments: str) -> Command:
        where = "--out", str(out / name), "--device", device
        return Command(command, [*python, f"benchmarks.{name}", *where, *arguments])

    measured = [Command("tuned", [*python, "benchmarks.gpu", "measure", "--out", str(out), *["--dry-run"] * dry_run])]
    brief = "--seconds", "0.4", "--allocator", "default"
    if dry_run:
        # Rows that contradict each other, as they may beside other programs, would be an error.
        tiny = "--shapes", "tiny", "--parts", "attention", "--layers", "gat", "--peers", "gattn", "--threads", "1"
        fast = [benchmark("kernels", "kernels", *brief, *tiny)]
        parts = "--parts", "linear", "softcap"
        long = [
            benchmark("steps", "steps", "--quick", "--tasks", "GPS, 4 blocks of 64", "--peers", "gattn"),
            benchmark("complete", "complete", "--quick", *parts, "--only", "gattn"),
            benchmark("nodes", "nodes", "--quick", "--models", "gat"),
        ]
        return {"right": right, "fast": fast, "tuned": measured, "long": long}
    peers, halves = ("--peers", "gattn", "pyg", "pyg-compile"), ("--dtypes", *DTYPES[:2])
    others = "--peers", "gattn", "dgl", *GPU_PEERS  # in the end: what fails is tried again
    alone, layers = ("--parts", "attention"), ("--parts", "layer")
    fast = [
        benchmark(command, "kernels", *brief, "--shapes", *arguments)
        for command, *arguments in (
            ("mid", "mid", *alone, *halves, *peers),
            ("batch", "batch", *layers, *peers),
            ("layers", "mid", *layers, *halves, *peers),
            ("arxiv", "arxiv", *alone, *halves, *peers),
            ("others", "molecules", "sampled", "hub", "products", *peers),
            ("float16", "mid", "arxiv", *alone, "--dtypes", "float16", *peers),
            ("peers", "mid", "molecules", *alone, *halves, *others),
            ("peers_batch", "batch", *others),
        )
    ]
    biases = "linear", "sparse bias", "bucket bias"
    training = "--models", "gps", "sgformer", "--datasets", "minesweeper", "--runs", "3"
    long = [
        benchmark("steps", "steps", *brief, "--peers", "gattn", "pyg", "--tasks", *GPU_TASKS),
        benchmark("complete", "complete", *brief, "--parts", "none", "softcap", "causal window", "sigmoid", *biases),
        benchmark("products_half", "kernels", *brief, "--shapes", "products", *alone, "--dtypes", "bfloat16", *peers),
        benchmark("nodes", "nodes", *training),
    ]
    return {"right": right, "fast": fast, "tuned": measured, "long": long}


def run_step(commands: list[Command], out: Path, environment: dict[str, str]) -> bool:
    """Runs the commands that have not ended yet in an earlier run; whether all ended well."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / "commands.jsonl"
    done = {row["name"]: row for row in _rows(file)}
    end = time.monotonic() + LIMIT
    beside = [command for command in commands if not command.alone]
    for group in [beside, *([command] for command in commands if command.alone)]:
        running = []
        for command in group:
            if done.get(command.name, {}).get("status") != 0 and time.monotonic() < end:
                with (out / f"{command.name}.txt").open("w") as text:
                    options: Any = {"stdout": text, "stderr": subprocess.STDOUT, "env": environment}
                    process = subprocess.Popen(command.arguments, start_new_session=True, **options)
                running.append((command, process, time.monotonic()))
        for command, process, start in running:
            try:
                status: int | str = process.wait(max(end - time.monotonic(), 1))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
                process.wait()
                status = "out of time"
            row = {"name": command.name, "status": status, "seconds": round(time.monotonic() - start, 1)}
            done[command.name] = row
            _append(file, row)
            print(f"{command.name}: {status if status else 'ok'}, {row['seconds']} s", flush=True)
    return all(done.get(command.name, {}).get("status") == 0 for command in commands)


def program(kind: str, peer: str, device: str) -> None:
    """Two training steps of a layer with every kind of row: long, short, and empty."""
    torch.manual_seed(0)
    nodes, edges = (300, 2000) if device == "cuda" else (20, 60)
    dtype = torch.bfloat16 if kind == "gatv2" else torch.float32
    edge_dim = None if kind == "gat" else 5
    layer = CONVS[kind][peer == "pyg"](24, 8, heads=4, edge_dim=edge_dim, dropout=0.3).to(device, dtype)
    x = torch.randn(nodes, 24, device=device, dtype=dtype, requires_grad=True)
    edge_index = torch.randint(nodes // 2, (2, edges), device=device)
    edge_index[1, : edges // 5] = 7
    edge_attr = None if edge_dim is None else torch.randn(edges, edge_dim, device=device, dtype=dtype)
    with gattn.backend("triton"):
        for _ in range(2):
            layer(x, edge_index, edge_attr).square().mean().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    print(kind, peer, "ended")


def measure(out: Path, device: str) -> bool:
    """Times of each kernel for each choice, and of Python for calls on ten nodes, as rows; whether all were right."""
    BACKENDS[device] = "triton"  # also in the interpreter
    file, place, is_right = out / "tuned.jsonl", machine(device), True
    known = [row for row in _rows(file) if row["outcome"] == "ok"]

    def case_of(shape: Shape, layer: str, dtype: str) -> Case:
        return Case(shape, "attention", layer, False, dtype, "gattn", torch.get_num_threads(), 30, 0.5, device)

    def missing(case: Case, choices: Iterable[Any]) -> list[tuple[Any, dict[str, Any]]]:
        """Choices without a row, and the first columns of theirs."""
        names = {"layer": case.layer, "heads": case.shape.heads, "channels": case.shape.channels, "dtype": case.dtype}
        found = [(choice, {**place, "shape": case.shape.name, **names, **choice._asdict()}) for choice in choices]
        return [(choice, key) for choice, key in found if not any(key.items() <= row.items() for row in known)]

    for layer in CONVS:
        case = case_of(TINY if device == "cpu" else SHAPES["tiny"][0], layer, "float32")
        for choice, key in missing(case, map(Autograd, (True, False))):
            computation = build(case)
            with torch.autograd.set_multithreading_enabled(choice.own_thread):
                both = {name: wall(getattr(computation, name), device) for name in ("forward", "forward_backward")}
            _append(file, {**key, "outcome": "ok", "host_us": both})

    grid: Any = (("tiny", DTYPES[:1], (Choice(1024, 2), Choice(long_row=8))), ("tiny", DTYPES[1:2], ()))
    shapes = {**SHAPES, "tiny": (TINY,)}
    for (name, dtypes, others), layer in itertools.product(grid if device == "cpu" else GRID, CONVS):
        for dtype in dtypes:
            case = case_of(shapes[name][0], layer, dtype)
            left = missing(case, (DEFAULT, *others))
            if left:
                inputs, expected = draw(case), case.references()[""]
            for choice, key in left:
                try:
                    with chosen(choice):
                        # Another tensor, as the layout of this one was made with other choices.
                        computation = build(case, replace(inputs, edge_index=inputs.edge_index.clone()))
                        reason = wrong(check(computation.compared(computation.forward_backward()), expected))
                        outcome = "WRONG" if reason else "ok"
                        us = None if reason else times(computation.forward_backward, device)
                except Exception as error:  # a choice may need more than a card has
                    outcome, reason, us = "failed", f"{type(error).__name__}: {error}", None
                _append(file, {**key, "outcome": outcome, "reason": reason, "us": us})
                is_right &= outcome == "ok"
    return is_right


class Autograd(NamedTuple):
    """Where PyTorch runs backward passes."""

    own_thread: bool


@contextmanager
def chosen(choice: Choice) -> Iterator[None]:
    """Kernels with these choices."""
    before, rule = (launcher._LOADED, layout.LONG_ROW), launcher._blocks

    def blocks(heads: int, channels: int, value_channels: int, dtype: torch.dtype) -> dict[str, int]:
        found = rule(heads, channels, value_channels, dtype)
        return found if choice.warps is None else {**found, "num_warps": choice.warps}

    def choose(bytes_loaded: int, long_row: int, rule: Callable[..., dict[str, int]]) -> None:
        launcher._LOADED, layout.LONG_ROW, launcher._blocks = bytes_loaded, long_row, rule
        plans.forget()
        launcher._forms.clear()

    choose(choice.bytes_loaded, choice.long_row, blocks)
    try:
        yield
    finally:
        choose(*before, rule)


def best(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The table of the fastest choice for all kernels, and for each, beside the default."""
    found: dict[tuple[str, ...], dict[str, dict[Choice, float]]] = {}
    for row in rows:
        if row["outcome"] == "ok" and row.get("us"):
            width = f"{row['heads']} × {row['channels']}"
            kernels = found.setdefault((row["layer"], width, row["dtype"], row["machine"], row["shape"]), {})
            for kernel, time in {"all": sum(row["us"].values()), **row["us"]}.items():
                kernels.setdefault(kernel, {})[Choice(*(row[name] for name in Choice._fields))] = time
    lines = []
    for names, kernels in sorted(found.items()):
        for kernel, of_choices in kernels.items():
            fastest, default = min(of_choices, key=lambda choice: of_choices[choice]), of_choices.get(DEFAULT)
            differing = {name: value for name, value in fastest._asdict().items() if value != getattr(DEFAULT, name)}
            line = dict(zip(("score", "heads × channels", "type", "card", "shape"), names, strict=True))
            line |= {"kernel": kernel, "default, µs": "–" if default is None else f"{default:.1f}"}
            line |= {"best, µs": f"{of_choices[fastest]:.1f}", "choices": str(len(of_choices))}
            lines.append(line | {"best": ", ".join(f"{name}={x}" for name, x in differing.items()) or "default"})
    return lines


def times(call: Callable[[], Any], device: str) -> dict[str, float]:
    """Microseconds of each kernel per call; on a CPU, of the call."""
    if device == "cpu":
        return {"call": wall(call, device)}
    from torch.profiler import ProfilerActivity, profile

    repeats = 10
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    found = {event.key[:40]: event.self_device_time_total / repeats for event in watched.key_averages()}
    return {name: round(time, 1) for name, time in found.items() if time > 0}


def wall(call: Callable[[], Any], device: str) -> float:
    """Microseconds per call until all work is done: on a GPU, the median of five rounds."""
    repeats, rounds = (1, 1) if device == "cpu" else (200, 5)
    found, wait = [], torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(rounds):
        wait()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        wait()
        found.append((time.perf_counter() - start) / repeats)
    return round(statistics.median(found) * 1e6, 1)


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _append(file: Path, row: dict[str, Any]) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(row) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Runs one step; the exit status is 1 if a command of it failed or did not end."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=("right", "fast", "tuned", "best", "long", "program", "measure"))
    parser.add_argument("layer", nargs="?", choices=CONVS, help="of program, which is a part of right")
    parser.add_argument("peer", nargs="?", choices=("gattn", "pyg"), help="of program")
    parser.add_argument("--out", type=Path, help="folder of results (default: runs/gpu, or runs/gpu-dry)")
    parser.add_argument("--dry-run", action="store_true", help="tiny graphs on the CPU, in Triton's interpreter")
    options = parser.parse_args(arguments)
    if not options.dry_run and options.step != "best" and not torch.cuda.is_available():
        parser.exit(2, "error: there is no GPU that PyTorch can use; --dry-run does without\n")
    device = "cpu" if options.dry_run else "cuda"
    out = options.out or Path("runs/gpu-dry" if options.dry_run else "runs/gpu")
    if options.step == "program":
        program(options.layer, options.peer, device)
    elif options.step == "measure":
        return 0 if measure(out, device) else 1
    elif options.step == "best":
        found = best(_rows(out / "tuned.jsonl"))
        if not found:
            parser.exit(2, f"error: tuned has measured nothing in {out}\n")
        print(markdown(found, []), end="")
    else:
        environment = {**os.environ, "TRITON_INTERPRET": "1" if options.dry_run else "0", "PYTHONUNBUFFERED": "1"}
        return 0 if run_step(steps(out, options.dry_run)[options.step], out, environment) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
