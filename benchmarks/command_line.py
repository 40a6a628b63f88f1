"""What the command lines of all benchmarks share: checked arguments, and how a benchmark ends when it cannot go on."""

from __future__ import annotations

import argparse
import contextlib
import io
import reprlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.results import ResultsFile, lock

MOST = 1024
"""Threads and processes, at most."""

LONGEST = 10**6
"""Seconds, at most: what waits for a process takes no more."""


def whole(low: int, high: int) -> Callable[[str], int]:
    """A type for `argparse`: a whole number between two others, both included."""

    def convert(text: str) -> int:
        with contextlib.suppress(ValueError):
            if low <= (value := int(text)) <= high:
                return value
        raise argparse.ArgumentTypeError(f"{reprlib.repr(text)} is not a whole number from {low} to {high}")

    return convert


def seconds(text: str) -> float:
    """A type for `argparse`: a positive duration."""
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) <= LONGEST:
            return value
    raise argparse.ArgumentTypeError(f"{reprlib.repr(text)} is not a number of seconds above 0, {LONGEST} at most")


def folder(text: str) -> Path:
    """A type for `argparse`: a folder, which need not be there."""
    if not text:
        raise argparse.ArgumentTypeError("the name of the folder is empty")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def device(text: str) -> str:
    """A type for `argparse`: a device that PyTorch can compute on."""
    try:
        torch.zeros(1, device=text).item()
    except Exception as error:  # of many kinds, one for each device
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used: {reason}") from None
    return text


@contextlib.contextmanager
def session(out: Path, console: Console, is_reading: bool = False) -> Iterator[ResultsFile]:
    """The results in a folder; Ctrl-C, and a file that cannot be read or written, end the benchmark with one line.

    Args:
        out: The folder, which no other process uses meanwhile.
        console: Where an interruption is told.
        is_reading: Whether no results are added: the folder is not made, and others may use it. (default: `False`)
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what the terminal lacks is no reason to stop
    results = ResultsFile(out / "runs.jsonl")
    try:
        with contextlib.ExitStack() as stack:
            if not is_reading:
                try:
                    out.mkdir(parents=True, exist_ok=True)
                    stack.enter_context(lock(out))
                    results.open()
                except BlockingIOError as error:
                    sys.exit(f"error: {error}; wait until it has ended, or choose another --out")
                except OSError as error:
                    sys.exit(f"error: results cannot be written to {out}: {error}")
            yield results
    except KeyboardInterrupt:
        text = f"Interrupted. What has finished is in {results.path}; the same command goes on from there."
        console.print(text, soft_wrap=True)
        sys.exit(130)
    except OSError as error:
        kept = f". What has finished is in {results.path}; the same command goes on from there."
        sys.exit(f"error: {error}{'' if is_reading else kept}")
