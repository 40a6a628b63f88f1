"""A GPU's first hour: what to run on one that nothing has run on, most important first, in steps of nine minutes.

    python -m benchmarks.gpu right     # is it right? the doctor, tests, and compute-sanitizer
    python -m benchmarks.gpu fast      # attention, layers and minibatches, beside PyG
    python -m benchmarks.gpu tuned     # the choices of the kernels, and what Python costs per call
    python -m benchmarks.gpu long      # training

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

import gattn
import gattn.ops.backends.triton as launcher
from benchmarks.kernel_cases import BACKENDS, CONVS, DTYPES, SHAPES, Case, Shape, build
from gattn.ops import plans

LIMIT = 540
"""Seconds after which a step starts nothing more, and ends what runs."""

TINY = Shape("tiny", 10, 30, 2, 4, in_channels=8)
LOADED = (256, 512, 1024, 2048)
"""Bytes that a warp loads at a time: what `tuned` tries."""


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
        tests("test_triton", "tests/ops/test_triton.py", "--share", "0.4", "1"),
    ]
    sanitizer = shutil.which("compute-sanitizer")
    for kind, peer in itertools.product(CONVS, ("gattn", "pyg")):
        program = [*python, "benchmarks.gpu", "program", kind, peer, *["--dry-run"] * dry_run]
        for tool in ("memcheck", "racecheck") if sanitizer is not None else ("without",):
            if peer == "gattn" or tool == "memcheck":  # what PyTorch's own kernels do is seen beside
                watched = [] if sanitizer is None else [sanitizer, "--tool", tool, "--print-limit", "1000"]
                right.append(Command(f"{tool}_{kind}_{peer}", [*watched, *program], alone=False))

    kernels = [*python, "benchmarks.kernels", "--seconds", "0.4", "--out", str(out / "kernels")]
    if dry_run:
        # Rows that contradict each other, as they may beside other programs, would be an error.
        tiny = ["--shapes", "tiny", "--parts", "attention", "--layers", "gat", "--peers", "gattn", "--threads", "1"]
        fast = [Command("kernels", [*kernels, *tiny, "--allocator", "default"])]
    else:
        kernels += ["--device", "cuda", "--peers", "gattn", "pyg", "pyg-compile"]
        halves = ["--dtypes", *DTYPES]
        fast = [
            Command("mid", [*kernels, "--shapes", "mid", "--parts", "attention", *halves]),
            Command("batch", [*kernels, "--shapes", "batch", "--parts", "layer"]),
            Command("layers", [*kernels, "--shapes", "mid", "--parts", "layer", *halves]),
            Command("arxiv", [*kernels, "--shapes", "arxiv", "--parts", "attention", *halves]),
            Command("others", [*kernels, "--shapes", "molecules", "sampled", "hub", "products"]),
        ]

    tuned = [Command("tuned", [*python, "benchmarks.gpu", "measure", "--out", str(out), *["--dry-run"] * dry_run])]
    nodes = [*python, "benchmarks.nodes", "--out", str(out / "nodes"), "--device", device]
    nodes += (
        ["--quick", "--models", "gat"]
        if dry_run
        else ["--models", "gps", "sgformer", "--datasets", "minesweeper", "--runs", "3"]
    )
    long = [Command("nodes", nodes)]
    return {"right": right, "fast": fast, "tuned": tuned, "long": long}


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


def measure(out: Path, device: str) -> None:
    """Times of each kernel for each choice, and of Python for calls on ten nodes, as rows."""
    BACKENDS[device] = "triton"  # also in the interpreter
    file = out / "tuned.jsonl"
    known = {tuple(row[name] for name in ("shape", "layer", "dtype", "loaded")) for row in _rows(file)}
    shapes = (TINY,) if device == "cpu" else (SHAPES["mid"][0], SHAPES["arxiv"][0])
    card = "CPU, interpreted" if device == "cpu" else torch.cuda.get_device_name()
    for shape, layer, dtype in itertools.product(shapes, CONVS, DTYPES):
        case = Case(shape, "attention", layer, False, dtype, "gattn", torch.get_num_threads(), 30, 0.5, device)
        loaded = LOADED[:1] if device == "cpu" else LOADED
        if all((shape.name, layer, dtype, bytes_) in known for bytes_ in loaded):
            continue
        computation = build(case)
        for bytes_ in loaded:
            with choices(bytes_):
                found = times(computation.forward_backward, device)
            row = {"shape": shape.name, "layer": layer, "dtype": dtype, "loaded": bytes_, "card": card, **found}
            _append(file, row)
    for layer, threads in itertools.product(CONVS, (True, False)):
        shape = TINY if device == "cpu" else SHAPES["tiny"][0]
        computation = build(Case(shape, "attention", layer, False, "float32", "gattn", 1, 30, 0.5, device))
        with torch.autograd.set_multithreading_enabled(threads):
            both = {name: wall(getattr(computation, name), device) for name in ("forward", "forward_backward")}
        _append(file, {"shape": "host", "layer": layer, "dtype": "float32", "loaded": threads, "card": card, **both})


@contextmanager
def choices(loaded: int) -> Iterator[None]:
    """Kernels that load so many bytes at a time."""
    before, launcher._LOADED = launcher._LOADED, loaded
    forget()
    try:
        yield
    finally:
        launcher._LOADED = before
        forget()


def forget() -> None:
    """Forgets what was prepared for earlier calls."""
    plans.forget()
    launcher._forms.clear()


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
    """Microseconds per call until all work is done; the median of five."""
    repeats, found = (1, []) if device == "cpu" else (200, [])
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(5):
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
    parser.add_argument("step", choices=("right", "fast", "tuned", "long", "program", "measure"))
    parser.add_argument("layer", nargs="?", choices=CONVS, help="of program, which is a part of right")
    parser.add_argument("peer", nargs="?", choices=("gattn", "pyg"), help="of program")
    parser.add_argument("--out", type=Path, help="folder of results (default: runs/gpu, or runs/gpu-dry)")
    parser.add_argument("--dry-run", action="store_true", help="tiny graphs on the CPU, in Triton's interpreter")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        parser.exit(2, "error: there is no GPU that PyTorch can use; --dry-run does without\n")
    device = "cpu" if options.dry_run else "cuda"
    out = options.out or Path("runs/gpu-dry" if options.dry_run else "runs/gpu")
    if options.step == "program":
        program(options.layer, options.peer, device)
    elif options.step == "measure":
        measure(out, device)
    else:
        environment = {**os.environ, "TRITON_INTERPRET": "1" if options.dry_run else "0", "PYTHONUNBUFFERED": "1"}
        return 0 if run_step(steps(out, options.dry_run)[options.step], out, environment) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
