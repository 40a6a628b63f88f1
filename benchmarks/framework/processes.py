"""Child processes: each case runs in its own process, whose end harms neither the others nor the benchmark."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from benchmarks.framework import parallel

#: Imported once for all processes; none of these may start CUDA, which forked processes could not use.
PRELOADED = ("gattn", "benchmarks.framework.benchmark", "torch_geometric.nn")

#: The least number of seconds between progress reports, so that reporting takes no time from the work.
INTERVAL = 0.1

LONGEST = 300
"""The number of characters of an error that are kept."""

C = TypeVar("C")

#: Reports progress: how much is done, the total, and a text to show beside the case's name.
Show = Callable[[int, int, str], None]

#: A case, the kind of the message, and its content.
Message = tuple[C, str, Any]


class BenchmarkError(Exception):
    """A problem that the user can solve: the benchmark ends with this message, without a traceback."""


def in_processes(
    cases: Sequence[C],
    work: Callable[[C, Show], Any],
    workers: int = 1,
    timeout: float = math.inf,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Generator[Message[C], None, None]:
    """Calls `work(case, show)` for each case, each in its own process. Closing the generator ends them all.

    With torchrun, no processes are started: those of torchrun work together on one case after the other.

    Args:
        cases: What to work on.
        work: The work; it is pickled.
        workers: The number of processes that run at once. (default: 1)
        timeout: The seconds after which a process is ended. (default: never)
        environment: Additional environment variables, set before the processes start, when the C library reads them.
            (default: none)

    Yields:
        For each call of `show`, except those that closely follow another: `(case, "progress", its arguments)`. At the
        end of each case, `(case, "ok", what the work returned)`, or the case with `"out of memory"`, `"timed out"` or
        `"failed"` and the reason.
    """
    if parallel.size() > 1:
        yield from _together(cases, work)
        return
    # Windows has no fork server, and its children would keep its environment. Otherwise, each process imports anew.
    is_forked = sys.platform != "win32" and not environment and not torch.cuda.is_available()
    context = multiprocessing.get_context("forkserver") if is_forked else multiprocessing.get_context("spawn")
    context.set_forkserver_preload(list(PRELOADED))
    if is_forked:
        with _interrupts_wait():
            forkserver.ensure_running()
    waiting = list(reversed(cases))
    running: dict[Connection, tuple[C, BaseProcess, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                case = waiting.pop()
                receiver, sender = context.Pipe(duplex=False)
                child = context.Process(target=_call, args=(sender, work, case, {**os.environ, **environment}))
                with _in_environment(environment), _interrupts_wait():
                    child.start()
                sender.close()
                running[receiver] = case, child, time.monotonic() + timeout
            left = min(deadline for *_, deadline in running.values()) - time.monotonic()
            ready = wait(list(running), None if math.isinf(left) else max(left, 0))
            for receiver, (case, process, deadline) in list(running.items()):
                if receiver in ready:
                    kind, content = _receive(receiver, process)
                elif deadline <= time.monotonic():
                    kind, content = "timed out", f"after {timeout:g} s"
                else:
                    continue
                if kind != "progress":
                    del running[receiver]
                    _end(receiver, process, 10 if kind == "ok" else 0)  # some have helpers to clean up
                yield case, kind, content
    finally:
        for receiver, (_, process, _) in running.items():
            _end(receiver, process, 0)


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C waits for the end of the block, and never reaches processes that are started in it.

    The parent ends these; their imports would otherwise be interrupted with a traceback.
    """
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _in_environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Changes the environment, which processes started in the block inherit."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def _receive(receiver: Connection, process: BaseProcess) -> tuple[str, Any]:
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        # Only the system's kernel sends a signal that cannot be caught, if memory is short.
        if process.exitcode == -9:
            return "out of memory", "killed"
        return "failed", f"the process ended with exit code {process.exitcode}"


def _end(receiver: Connection, process: BaseProcess, patience: float) -> None:
    process.join(patience)
    process.kill()
    process.join()
    receiver.close()


def _call(sender: Connection, work: Callable[[C, Show], Any], case: C, environment: dict[str, str]) -> None:
    """What a child process runs."""
    os.environ.update(environment)  # they may have changed since the fork server was started
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # the process to be killed if memory is short
    end_with_parent()
    _work(sender.send, work, case)


def end_with_parent() -> None:
    """Makes this process end when the one that started it has ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()


def _together(cases: Sequence[C], work: Callable[[C, Show], Any]) -> Generator[Message[C], None, None]:
    """Works on one case after the other in a thread of this process, so that progress can be reported meanwhile.

    Raises:
        BenchmarkError: If a case failed: the other processes cannot go on without this one.
    """
    for case in cases:
        answers: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

        def run(case: C = case, send: Callable[[tuple[str, Any]], None] = answers.put) -> None:
            with contextlib.suppress(SystemExit):
                _work(send, work, case)
            send(("failed", "it has ended"))  # only read if nothing else was sent

        threading.Thread(target=run, daemon=True).start()
        kind, content = "", None
        while kind != "ok":
            kind, content = answers.get()
            if kind not in ("ok", "progress"):
                raise BenchmarkError(f"{case}, process {parallel.rank()}: {content}")
            yield case, kind, content


def _work(send: Callable[[tuple[str, Any]], None], work: Callable[[C, Show], Any], case: C) -> None:
    """Sends what `in_processes` yields for a case."""
    shown = -math.inf

    def show(done: int, total: int, text: str) -> None:
        nonlocal shown
        if time.monotonic() - shown >= INTERVAL:
            shown = time.monotonic()
            send(("progress", (done, total, text)))

    try:
        parallel.choose_gpu()
        answer = "ok", work(case, show)
    except BenchmarkError as error:
        answer = "failed", str(error)
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0][:LONGEST]
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"({Path(frame.filename).name}:{frame.lineno})"
        reason = " ".join(filter(None, (f"{type(error).__name__}:", text, place)))
        is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        answer = ("out of memory" if is_memory else "failed"), reason
    send(answer)
