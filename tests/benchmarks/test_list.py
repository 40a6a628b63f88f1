import sys

import pytest

from benchmarks import __main__, durations, summary
from tests.benchmarks.test_framework import BENCHMARKS, MODULES


def test_every_benchmark_is_listed_with_its_summary_and_durations(capsys):
    documented = {module.__name__.rpartition(".")[2]: module.__doc__ for module in MODULES}
    __main__.main()
    *lines, blank, last = capsys.readouterr().out.splitlines()
    assert blank == ""
    assert "--help" in last
    assert [line.split(maxsplit=3)[2:] for line in lines[::2]] == [
        [f"benchmarks.{name}", summary(documented[name])] for name in sorted(BENCHMARKS)
    ]
    found = [durations(documented[name]) for name in sorted(BENCHMARKS)]
    assert [line.strip() for line in lines[1::2]] == [f"{usual}; with --quick {quick}" for usual, quick in found]
    assert "unknown" not in {duration for pair in found for duration in pair}
    assert all(len(line) <= 120 for line in lines)


@pytest.mark.parametrize("benchmark", BENCHMARKS.values(), ids=BENCHMARKS)
def test_quick_changes_defaults_only(benchmark, capsys):
    """And results are not mixed with others; `--help` gives the duration."""
    usual, quick = benchmark.parse([]), benchmark.parse(["--quick"])
    assert quick.quick
    assert not usual.quick
    assert str(quick.out) == f"runs/{benchmark.name}-quick"
    assert {name: vars(quick)[name] for name in benchmark.quick} == benchmark.quick
    assert str(benchmark.parse(["--quick", "--out", "x"]).out) == "x"
    with pytest.raises(SystemExit):
        benchmark.parse(["--help"])
    assert durations(sys.modules[benchmark.__module__].__doc__)[1] in " ".join(capsys.readouterr().out.split())
