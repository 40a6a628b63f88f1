import math
import os
import pkgutil
import signal
import subprocess
import time

import pytest
import torch

# Nothing here imports gattn: this file is read before ../conftest.py has set how Triton is imported.
WITH_PROCESSES = ("framework.processes", "citation", "molecules", "nodes", "training", "translation")


def run_here(cases, work, workers=1, timeout=math.inf, environment=None):
    """In place of `in_processes`: one case after the other, here."""
    for case in cases:
        shown = []
        try:
            message = case, "ok", work(case, lambda *progress: shown.append(progress))  # noqa: B023
        except Exception as error:
            message = case, "failed", f"{type(error).__name__}: {error}"
        yield from ((case, "progress", progress) for progress in shown)
        yield message


@pytest.fixture
def in_this_process():
    return run_here


@pytest.fixture
def one_process(monkeypatch):
    """Benchmarks start no processes."""
    for module in WITH_PROCESSES:
        monkeypatch.setattr(f"benchmarks.{module}.in_processes", run_here)


@pytest.fixture
def kill(start):
    """Starts a benchmark and kills it in its first run, when that has left a checkpoint."""

    def kill(name, arguments, out, environment=None):
        options = {"stdout": subprocess.DEVNULL, "env": {**os.environ, **(environment or {})}}
        process = start("-m", f"benchmarks.{name}", *arguments, "--save-every", "0.001", "--out", out, **options)
        deadline = time.monotonic() + 120
        while not list(out.glob("*.pt")) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert not (out / "runs.jsonl").exists() or not (out / "runs.jsonl").read_text()
        (checkpoint,) = out.glob("*.pt")
        return torch.load(checkpoint, weights_only=True)["iteration"]

    return kill


@pytest.fixture(autouse=True)
def contradictions(monkeypatch):
    """The check that tests go without, because they measure for milliseconds, on busy machines."""
    name = "benchmarks.framework.measuring.Measurement.contradictions"
    original = pkgutil.resolve_name(name)
    monkeypatch.setattr(name, staticmethod(lambda rows: []))
    return original


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
