import math
import os
import signal
import subprocess
import time

import pytest
import torch

from benchmarks import citation, molecules, nodes, training, translation
from benchmarks.framework import measuring, processes

CONTRADICTIONS = measuring.Measurement.contradictions


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
    for module in (processes, citation, molecules, nodes, training, translation):
        monkeypatch.setattr(module, "in_processes", run_here)


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
def noisy_times_do_not_matter(monkeypatch):
    """Tests measure for milliseconds, on busy machines."""
    monkeypatch.setattr(measuring.Measurement, "contradictions", staticmethod(lambda rows: []))


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
