"""Types of command-line options: each converts a text, or reports which texts it accepts."""

from __future__ import annotations

import argparse
import contextlib
import reprlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.framework.results import ALLOCATORS

MOST = 1024
"""The largest number of threads and of processes."""

LONGEST = 10**6
"""The largest number of seconds: the longest possible wait for a process."""


def whole(low: int, high: int) -> Callable[[str], int]:
    """A whole number between two others, both included."""

    def convert(text: str) -> int:
        with contextlib.suppress(ValueError):
            if low <= (value := int(text)) <= high:
                return value
        raise argparse.ArgumentTypeError(f"{reprlib.repr(text)} is not a whole number from {low} to {high}")

    return convert


def seconds(text: str) -> float:
    """A positive duration."""
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) <= LONGEST:
            return value
    raise argparse.ArgumentTypeError(f"{reprlib.repr(text)} is not a positive number of seconds up to {LONGEST}")


def folder(text: str) -> Path:
    """A folder, which may not exist yet."""
    if not text:
        raise argparse.ArgumentTypeError("the name of the folder is empty")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def device(text: str) -> str:
    """A device that PyTorch can compute on."""
    try:
        torch.zeros(1, device=text).item()
    except Exception as error:  # each kind of device raises errors of its own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used: {reason}") from None
    return text


def add_device(parser: argparse.ArgumentParser) -> None:
    """Adds `--device`."""
    parser.add_argument("--device", type=device, default="cpu", help="PyTorch device (default: %(default)s)")


def add_measuring(parser: argparse.ArgumentParser, name: str, repeats: int = 7, duration: float = 10.0) -> None:
    """Adds the options of a benchmark that measures: `--threads --repeats --seconds --timeout --only --out`.

    Args:
        parser: The parser.
        name: The benchmark's.
        repeats: The default of `--repeats`. (default: 7)
        duration: The default of `--seconds`. (default: 10)
    """
    add = parser.add_argument
    add(
        "--threads",
        type=whole(1, MOST),
        default=torch.get_num_threads(),
        help="number of threads (default: %(default)s)",
    )
    add("--repeats", type=whole(1, 10**9), default=repeats, help="largest number of timed calls (default: %(default)s)")
    text = "seconds after which no further calls are timed (default: %(default)g)"
    add("--seconds", type=seconds, default=duration, help=text)
    text = "seconds after which a process is ended (default: %(default)g)"
    add("--timeout", type=seconds, default=1200.0, help=text)
    add_only(parser)
    add("--out", type=folder, default=Path("runs") / name, help="folder of results (default: %(default)s)")


def add_allocator(parser: argparse.ArgumentParser, default: str | None = "both", text: str = "both") -> None:
    """Adds `--allocator`, of which `allocators` makes names; the text says what the default is."""
    help_text = f"how glibc treats freed memory (default: {text})"
    parser.add_argument("--allocator", default=default, choices=("both", *ALLOCATORS), help=help_text)


def allocators(options: argparse.Namespace) -> tuple[str, ...]:
    """The allocators that `--allocator` chooses."""
    return tuple(ALLOCATORS) if options.allocator == "both" else (options.allocator,)


def add_only(parser: argparse.ArgumentParser) -> None:
    """Adds `--only`, which `Benchmark.execute` reads."""
    text = "measure only what contains one of these texts in its name, and measure it again if it has a row already"
    parser.add_argument("--only", nargs="+", metavar="TEXT", help=f"{text} (default: what has no row)")


def add_runs(parser: argparse.ArgumentParser, default: int) -> None:
    """Adds the option of a benchmark that trains each model with several seeds: `--runs`."""
    text = "number of runs of each model, with the seeds from 0 on (default: %(default)s)"
    parser.add_argument("--runs", type=whole(1, 10**6), default=default, help=text)


def add_saving(parser: argparse.ArgumentParser) -> None:
    """Adds the option of a benchmark with long trainings: `--save-every`."""
    text = "least number of seconds between checkpoints (default: %(default)g)"
    parser.add_argument("--save-every", type=seconds, default=10.0, help=text)


T = TypeVar("T")


def unique(values: Iterable[T]) -> list[T]:
    """The values in their order, each once."""
    return list(dict.fromkeys(values))


def fill(options: argparse.Namespace, defaults: dict[str, object]) -> None:
    """Fills in defaults that depend on other options."""
    for name, default in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
