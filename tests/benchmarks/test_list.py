from benchmarks import __main__, summary
from tests.benchmarks.test_framework import BENCHMARKS, MODULES


def test_every_benchmark_is_listed_with_its_summary(capsys):
    documented = {module.__name__.rpartition(".")[2]: summary(module.__doc__) for module in MODULES}
    __main__.main()
    *lines, blank, last = capsys.readouterr().out.splitlines()
    assert blank == ""
    assert "--help" in last
    assert [line.split(maxsplit=3)[2:] for line in lines] == [
        [f"benchmarks.{name}", documented[name]] for name in sorted(BENCHMARKS)
    ]
    assert all(len(line) <= 120 for line in lines)
