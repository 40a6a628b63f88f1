"""What benchmarks of speed share: a process for each measurement, the check that comes first, memory, and times."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import multiprocessing
import os
import resource
import signal
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

MIN_REPEATS = 3
"""Repeats that even a slow peer makes."""

SHORT = 0.5
"""Seconds for which short calls are repeated, and warmed up at most."""

KEPT_TIMES = 100
"""So many times are kept beside their quartiles."""

#: Outcomes that are results. What was wrong or failed is tried again.
FINAL = ("ok", "out of memory", "timed out")

#: What another row must have in common with a run for not being made again.
VERSIONS = ("gattn", "torch", "torch-geometric", "machine")


class Times(TypedDict):
    """Seconds of a call: what `spread` returns."""

    median: float
    q1: float
    q3: float
    times: list[float]


class Measured(TypedDict):
    """What the row of a measurement has."""

    outcome: Literal["ok"]
    reason: str
    peak_bytes: int
    forward: Times


class Failed(TypedDict):
    """What it has if there is nothing to report but why."""

    outcome: Literal["WRONG", "failed", "out of memory", "timed out"]
    reason: str


def outcome(measured: type) -> Callable[[dict[str, Any]], type]:
    """What a row of results must have beside its case and the machine to be read: this, or what failures have."""
    return lambda row: measured if row.get("outcome") == "ok" else Failed


def check(results: dict[str, Tensor], expected: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Error and budget of each result, relative to its scale, the largest element.

    Raises:
        ValueError: If a result is missing, or there is one that nobody expects.
    """
    if set(results) != set(expected):
        raise ValueError(f"the results are {sorted(results)}, expected were {sorted(expected)}")
    errors = {}
    for name, truth in expected.items():
        actual = results[name].detach()
        if truth["rows"] is not None:
            actual = actual[truth["rows"]]
        error = (actual.cpu().double().reshape(truth["exact"].shape) - truth["exact"]).abs().max().item()
        scale = truth["scale"] or 1.0
        errors[name] = (error / scale, truth["budget"] / scale)
    return errors


def peak_above(function: Callable[[], Any], device: str = "cpu") -> tuple[Any, int]:
    """Calls the function; its result, and how far the memory in use rose meanwhile, in bytes.

    On the CPU the process's resident memory (where Linux does not count anew, what rose above the largest that there
    ever was), on a GPU what PyTorch has handed out.
    """
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = function()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # freed memory that the process still holds would be used again, uncounted
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = function()
        return result, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    before = _memory("VmRSS")
    result = function()
    return result, max(_memory("VmHWM") - before, 0) * 1024


def _memory(name: str) -> int:
    """An entry of the process's status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def duration(function: Callable[[], Any], device: str = "cpu") -> float:
    """Seconds that a call takes: by the clock, or between two events of the GPU, before the call and after its work."""
    if device == "cpu":
        before = time.perf_counter()
        function()
        return time.perf_counter() - before
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000  # from milliseconds


def copy_rate(device: str, size: int = 2**30) -> float:
    """Bytes that the device reads and writes in a second when it copies `size` bytes, at the median."""
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / timed(lambda: target.copy_(source), 20, 1.0, device)["median"]


def timed(function: Callable[[], Any], repeats: int, seconds: float, device: str = "cpu") -> dict[str, Any]:
    """Seconds that calls take, after a warm-up of a tenth of the time.

    Short calls are made more often: for half a second, or a quarter of the time.

    Args:
        function: What is timed.
        repeats: Calls at most, if they are not short.
        seconds: Or until so much time has passed, after `MIN_REPEATS` calls.
        device: Where it computes. (default: `"cpu"`)
    """
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < min(seconds / 10, SHORT if calls >= MIN_REPEATS else math.inf):
        duration(function, device)
        calls += 1
    times: list[float] = []
    start = time.perf_counter()
    while True:
        elapsed = time.perf_counter() - start
        enough = len(times) >= repeats and elapsed >= min(seconds / 4, SHORT)
        if enough or (len(times) >= MIN_REPEATS and elapsed >= seconds):
            return spread(times)
        times.append(duration(function, device))


def spread(times: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles, and the first of the times themselves."""
    low, middle, high = statistics.quantiles(times if len(times) > 1 else [*times, *times], n=4, method="inclusive")
    return {
        "median": middle,
        "q1": low,
        "q3": high,
        "times": [float(f"{seconds:.4g}") for seconds in times[:KEPT_TIMES]],
    }


# Processes -----------------------------------------------------------------------------------------------------------


#: Imported once, for all processes; nothing of it may start CUDA, which a process's children cannot use.
PRELOADED = ("gattn", "matplotlib.pyplot", "rich.progress", "torch_geometric.nn")


def run_apart(function: Callable[..., Any], *arguments: Any, timeout: float) -> tuple[str, Any]:
    """Calls the function in a process of its own.

    Returns:
        `("ok", what it returned)`; or what happened instead, `"out of memory"`, `"timed out"` or `"failed"`, and why.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout):
            return "timed out", f"after {timeout:g} s"
        answer = receiver.recv()
        process.join(10)  # so that the compiler's helpers are put away
        return answer
    except EOFError:
        process.join()
        # Nobody but the kernel, short of memory, sends a signal that cannot be caught.
        if process.exitcode == -signal.SIGKILL:
            return "out of memory", "killed"
        return "failed", f"the process ended with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()
        receiver.close()


def _call(sender: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """What a child process runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's, which ends its child
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # the one to be killed if memory runs out
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
    try:
        answer = "ok", function(*arguments)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        reason = f"{type(error).__name__}: {lines[0]}"[:120]
        is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        answer = ("out of memory" if is_memory else "failed"), reason
    sender.send(answer)


# Reports -------------------------------------------------------------------------------------------------------------


def median(row: dict[str, Any] | None, mode: str) -> float | None:
    """The row's median time, if it has one."""
    return row[mode]["median"] if row is not None and mode in row else None


def ratio(other: float | None, own: float | None, digits: str = ".1f") -> str:
    """How many times as much the other is."""
    return f"{other / own:{digits}}×" if other and own else "–"


def quartiles(row: dict[str, Any], mode: str) -> str:
    """Median and quartiles in milliseconds, or what happened instead."""
    if row["outcome"] != "ok":
        return row["outcome"]
    if mode not in row:
        return "–"
    low, middle, high = (f"{1000 * row[mode][name]:.4g}" for name in ("q1", "median", "q3"))
    return f"{middle} ({low}–{high})"
