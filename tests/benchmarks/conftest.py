import math

import pytest
import torch

from benchmarks import citation, translation
from benchmarks.framework import processes


def run_here(cases, work, jobs=1, timeout=math.inf, environment=None):
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
    for module in (processes, citation, translation):
        monkeypatch.setattr(module, "in_processes", run_here)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
