import sys

import pytest

from benchmarks.citation import Citation
from benchmarks.framework import parallel
from benchmarks.framework.processes import BenchmarkError, in_processes


@pytest.fixture
def of_two(monkeypatch):
    """This process is the first of two, which it does not reach."""
    monkeypatch.setattr(parallel, "size", lambda: 2)
    monkeypatch.setattr(parallel, "rank", lambda: 0)


def work(case, show):
    show(1, 2, "half")
    return case()


class TestCases:
    def test_they_run_here_one_after_the_other(self, of_two):
        here = sys.modules[__name__]
        (first, second) = (lambda: here, lambda: 5)
        messages = list(in_processes([first, second], work))
        assert messages == [
            message
            for case, result in ((first, here), (second, 5))
            for message in ((case, "progress", (1, 2, "half")), (case, "ok", result))
        ]

    @pytest.mark.parametrize(
        ("case", "reason"), [(lambda: 1 // 0, "process 0: ZeroDivisionError"), (sys.exit, "process 0: it has ended")]
    )
    def test_what_fails_ends_the_job(self, case, reason, of_two):
        with pytest.raises(BenchmarkError, match=reason):
            list(in_processes([case, lambda: pytest.fail("goes on")], work))


def test_other_benchmarks_refuse(of_two, tmp_path):
    with pytest.raises(SystemExit, match="^error: benchmarks.citation runs on one process only: start it "):
        Citation.main(["--out", str(tmp_path)])


def test_the_first_process_draws_what_one_process_would(monkeypatch):
    draws = {}
    for rank in (None, 0, 1, 2):
        with monkeypatch.context() as patch:
            if rank is not None:
                patch.setattr(parallel, "rank", lambda rank=rank: rank)
            parallel.seed(7)
        draws[rank] = parallel.torch.rand(3).tolist()
    assert draws[None] == draws[0]
    assert len({str(draw) for draw in draws.values()}) == 3
