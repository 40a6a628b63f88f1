"""What holds for every benchmark, shown with one that takes a few lines."""

import errno
import importlib
import io
import json
import math
import os
import pkgutil
import re
import signal
import subprocess
import sys
import time
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar, get_type_hints

import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console

import benchmarks
from benchmarks import translation
from benchmarks.framework import measuring, options, processes, reports, results
from benchmarks.framework.benchmark import Benchmark, Case
from benchmarks.framework.measuring import Computation, Measured, Measurement, budgets, measured
from benchmarks.framework.processes import BenchmarkError, in_processes
from benchmarks.framework.reports import machines, quartiles
from benchmarks.framework.results import ResultsFile, lock, machine
from benchmarks.framework.training import Training

COMMITTED = Path(__file__).parents[2] / "benchmarks" / "results"


def defined_in(module, kind):
    """What a benchmark's module defines of some kind, or takes from the files beside it."""
    mine = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, kind)]
    return [value for value in mine if not value.__module__.startswith("benchmarks.framework")]


MODULES = [
    importlib.import_module(f"benchmarks.{module.name}")
    for module in pkgutil.iter_modules(benchmarks.__path__)
    if not module.ispkg
]
BENCHMARKS = {benchmark.name: benchmark for module in MODULES for benchmark in defined_in(module, Benchmark)}


# A benchmark ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Square(Measurement):
    result: ClassVar[type] = Measured
    factors: ClassVar[dict[str, float]] = {"right": 1.0, "wrong": 1.01}

    size: int
    peer: str
    threads: int = 1
    repeats: int = 3
    seconds: float = 0.001

    def __str__(self):
        return f"{self.size} {self.peer}"

    def problem(self):
        return (self.size,)

    def draw(self):
        return torch.randn(self.size, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def references(self):
        exact = self.draw().detach().double()
        results = {"output": exact**2, "output without autograd": exact**2, "gradient of x": 2 * exact}
        return {"": budgets(results, {name: x.float() for name, x in results.items()}, torch.float32, 1, 1)}

    def computation(self):
        x, factor = self.draw(), self.factors[self.peer]
        return Computation(lambda: factor * x * x, {"x": x}, torch.ones(self.size))


class Squares(Benchmark[Square]):
    name = "squares"
    quick: ClassVar = {"peers": ["wrong"]}

    @classmethod
    def add_options(cls, parser):
        parser.add_argument("--peers", nargs="+", default=["right"], choices=Square.factors)
        options.add_measuring(parser, cls.name)

    def cases(self):
        return [Square(size, peer) for size in (3, 5) for peer in self.options.peers]

    def run(self, cases):
        return measured(cases, self.options.timeout)

    def report(self, rows):
        lines = [
            {"size": str(case.size), "peer": case.peer, "ms": quartiles(row, "forward")} for case, row in rows.items()
        ]
        self.publish("Squares", lines, ["of random numbers"], {"squares.png": Figure(), "note.txt": "none\n"})


# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def squares(tmp_path, one_process):
    """Runs the benchmark; returns what it exits with."""

    def run(*arguments):
        try:
            Squares.main([*map(str, arguments), "--out", str(tmp_path)])
        except SystemExit as error:
            return error.code

    return run


def rows_in(path):
    return [(row["size"], row["peer"], row["outcome"]) for row in ResultsFile(path / "runs.jsonl").rows()]


class TestBenchmark:
    def test_what_is_written(self, squares, tmp_path, capsys):
        assert squares() is None
        assert rows_in(tmp_path) == [(3, "right", "ok"), (5, "right", "ok")]
        row = ResultsFile(tmp_path / "runs.jsonl").rows()[0]
        columns = ["size", "peer", "threads", "repeats", "seconds", "outcome", "reason", "peak_bytes", "errors"]
        assert list(row) == [*columns, "forward", "forward_backward", *machine(), "started"]
        assert (
            (tmp_path / "table.md").read_text().startswith("| size | peer | ms |\n| --- | --- | --- |\n| 3 | right |")
        )
        assert (tmp_path / "table.md").read_text().endswith("\n\n- of random numbers\n")
        assert {path.name for path in tmp_path.iterdir()} == {"runs.jsonl", "table.md", "squares.png", "note.txt"}
        printed = capsys.readouterr().out
        assert "Squares" in printed
        assert f"Written: {tmp_path / 'table.md'}, {tmp_path / 'squares.png'}, {tmp_path / 'note.txt'}" in printed

    def test_a_quick_table_says_so(self, squares, tmp_path, monkeypatch):
        monkeypatch.setitem(Square.factors, "wrong", 1.0)
        assert squares() is None
        assert "--quick" not in (tmp_path / "table.md").read_text()
        assert squares("--quick") is None
        assert rows_in(tmp_path)[-1][1] == "wrong"
        assert "- **Made with `--quick`**" in (tmp_path / "table.md").read_text()

    def test_all_rows_of_a_run_have_its_start(self, squares, tmp_path, monkeypatch):
        for number, size in enumerate((2, 3)):
            monkeypatch.setattr(time, "strftime", lambda *args, number=number: f"start {number}")
            squares(*["--only", "5"] * number)
            assert [row["started"] for row in ResultsFile(tmp_path / "runs.jsonl").rows()] == [
                *["start 0"] * 2,
                *["start 1"] * (size - 2),
            ]

    def test_nothing_runs_twice(self, squares, tmp_path, capsys, monkeypatch):
        squares()
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        monkeypatch.setattr(Square, "measure", lambda *args: pytest.fail("measured again"))
        assert squares() is None
        assert "2 of 2 measurements are in" in capsys.readouterr().out
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

    @pytest.mark.parametrize("cut", [0, 1, 30])
    def test_it_goes_on_between_rows_and_inside_them(self, cut, squares, tmp_path, capsys):
        squares()
        first, second = (tmp_path / "runs.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / "runs.jsonl").write_text(first + second[:cut])
        assert squares() is None
        assert "1 of 2 measurements are in" in capsys.readouterr().out
        assert rows_in(tmp_path)[-1] == (5, "right", "ok")
        assert (tmp_path / "table.md").read_text().count("right") == 2

    def test_an_interruption_keeps_what_has_finished(self, squares, tmp_path, capsys, monkeypatch):
        with monkeypatch.context() as patch:
            draw = Square.draw
            patch.setattr(Square, "draw", lambda case: draw(case) if case.size == 3 else signal.raise_signal(2))
            before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
            assert squares() == 130
            signal.signal(signal.SIGINT, before)
        assert "the same command resumes from there" in capsys.readouterr().out
        assert rows_in(tmp_path) == [(3, "right", "ok")]
        assert squares() is None
        assert "1 of 2 measurements are in" in capsys.readouterr().out

    def test_a_wrong_result_has_no_time_and_is_an_error(self, squares, tmp_path, capsys, monkeypatch):
        error = squares("--peers", "right", "wrong")
        assert error.startswith("error: 3 wrong: WRONG: output is off by 1.0e-02 of its largest")
        assert error.count("\n") == 1
        assert "| 3 | wrong | WRONG |" in (tmp_path / "table.md").read_text()
        assert "forward" not in ResultsFile(tmp_path / "runs.jsonl").rows()[1]
        capsys.readouterr()
        monkeypatch.setitem(Square.factors, "wrong", 1.0)
        assert squares("--peers", "right", "wrong") is None
        assert "2 of 4 measurements are in" in capsys.readouterr().out
        assert "WRONG" not in (tmp_path / "table.md").read_text()

    def test_nan_is_wrong(self, squares, monkeypatch):
        monkeypatch.setitem(Square.factors, "right", math.nan)
        assert "is off by nan" in squares()

    def test_a_failure_does_not_stop_the_others(self, squares, tmp_path, monkeypatch):
        compute = Square.computation
        monkeypatch.setattr(Square, "computation", lambda case: compute(case) if case.size == 5 else 1 / 0)
        assert squares() == "error: 3 right: ZeroDivisionError: division by zero"
        assert rows_in(tmp_path) == [(3, "right", "failed"), (5, "right", "ok")]

    @pytest.mark.parametrize(
        ("columns", "problem"),
        [
            ({"peak_bytes": None}, "peak_bytes is None where a whole number is expected"),
            ({"peak_bytes": 1.5}, "peak_bytes is 1.5 where a whole number is expected"),
            (
                {"forward": {"median": math.nan}},
                "forward is {'median': nan} where an object with median, q1",
            ),
            ({"size": 4}, "size is 3 in the case and 4 in its row"),
            ({"peers": {1, 2}}, "Object of type set is not JSON serializable"),
            ({"peak_bytes": torch.tensor(1)}, "Object of type Tensor is not JSON serializable"),
            ({"peak_bytes": ...}, "there is no peak_bytes"),
        ],
    )
    def test_a_row_that_could_not_be_read_again_is_a_failure(self, columns, problem, squares, tmp_path, monkeypatch):
        measure = Square.measure

        def changed(case, reference):
            row = {**measure(case, reference), **(columns if case.size == 3 else {})}
            return {name: value for name, value in row.items() if value is not ...}

        monkeypatch.setattr(Square, "measure", changed)
        assert squares().startswith(f"error: 3 right: its row could not be read back: {problem}")
        assert rows_in(tmp_path) == [(5, "right", "ok")]

    def test_what_timed_out_is_tried_again_with_more_time(self, squares, tmp_path, monkeypatch):
        def timed_out(cases, work, timeout, **others):
            is_reference = work.func is measuring._write_references
            yield (cases[0], "ok", {"outcome": "ok"}) if is_reference else (cases[0], "timed out", f"after {timeout} s")

        tried = []
        monkeypatch.setattr(Square, "measure", lambda case, reference: tried.append(case.size) or 1 / 0)
        with monkeypatch.context() as patch:
            patch.setattr(processes, "in_processes", timed_out)
            assert squares("--timeout", 60) is None
        assert rows_in(tmp_path) == [(3, "right", "timed out"), (5, "right", "timed out")]
        for timeout in (30, 60):
            assert squares("--timeout", timeout) is None
        assert not tried
        squares("--timeout", 61)
        assert tried == [3, 5]

    def test_without_a_reference_nothing_is_measured(self, squares, monkeypatch):
        monkeypatch.setattr(Square, "references", lambda case: 1 / 0)
        assert "error: 5 right: no reference: failed ZeroDivisionError" in squares()

    @pytest.mark.parametrize(
        ("field", "value"),
        [("size", "3"), ("forward", {"median": "fast"}), ("outcome", "great"), ("peak_bytes", None), ("torch", 2)],
    )
    def test_a_row_of_wrong_types_is_made_again(self, field, value, squares, tmp_path, capsys):
        squares()
        path = tmp_path / "runs.jsonl"
        rows = ResultsFile(path).rows()
        rows[1][field] = value
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        capsys.readouterr()
        assert squares() is None
        printed = capsys.readouterr()
        assert "1 of 2 measurements are in" in printed.out
        assert printed.err.startswith(f"warning: {path}, line 2: {field}")
        assert len(printed.err.splitlines()) == 1

    def test_another_version_is_measured_anew(self, squares, tmp_path, monkeypatch):
        squares()
        monkeypatch.setattr("gattn.__version__", "9.9")
        squares()
        assert len(rows_in(tmp_path)) == 4

    def test_what_has_finished_stays_on_a_full_disk(self, squares, tmp_path, monkeypatch, capsys):
        sync, synced = os.fsync, []

        def full(descriptor):
            synced.append(descriptor)
            if len(synced) == 2:
                os.ftruncate(descriptor, os.fstat(descriptor).st_size - 50)
                raise OSError(errno.ENOSPC, "No space left on device")
            sync(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(results.os, "fsync", full)
            error = squares()
        assert error == (
            "error: [Errno 28] No space left on device. "
            f"Finished runs are in {tmp_path / 'runs.jsonl'}; the same command resumes from there."
        )
        assert squares() is None
        assert "1 of 2 measurements are in" in capsys.readouterr().out

    @pytest.mark.parametrize("columns", ["40", "80"])
    def test_a_narrow_terminal_cuts_nothing(self, columns, squares, capsys, monkeypatch):
        monkeypatch.setenv("COLUMNS", columns)
        squares("--peers", "wrong", "right")
        printed = capsys.readouterr().out
        assert "…" not in printed
        assert printed.count("WRONG") == 2
        assert " (" not in printed  # quartiles are for the file

    def test_only_some_are_measured_again(self, squares, tmp_path, capsys):
        """The table still shows all; a text that no name contains is an error."""
        squares()
        assert squares("--only", "5 r", "nothing") is None
        assert rows_in(tmp_path) == [(3, "right", "ok"), (5, "right", "ok"), (5, "right", "ok")]
        assert (tmp_path / "table.md").read_text().count("right") == 2
        assert squares("--only", "7") == "error: --only 7: no name contains that, such as 3 right"

    def test_other_kernels_are_said_to_be_older(self, squares, tmp_path, monkeypatch):
        digest = results.kernels("cpu")
        squares()
        rows = ResultsFile(tmp_path / "runs.jsonl").rows()
        (line,) = machines(rows, ["torch"], "")
        assert line.endswith(f", kernels {digest}")
        del rows[0]["kernels"]
        assert machines(rows, [], "")[0].startswith("**Older than the code**: 1 of 2 rows ")

    def test_an_allocator_of_the_environment_is_no_default(self, squares, monkeypatch):
        monkeypatch.setattr(Square, "allocator", "default", raising=False)
        assert squares() is None
        monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
        monkeypatch.setattr("gattn.__version__", "9.9")
        assert "would be measured with MALLOC_ARENA_MAX=1: unset" in squares()

    def test_any_name_of_a_folder(self, one_process, tmp_path, capsys):
        out = tmp_path / "a b [/c] ü \udcff"
        Squares.main(["--out", str(out)])
        assert (out / "table.md").exists()
        assert "a b [/c] ü \\udcff" in capsys.readouterr().out.replace("\n", "")

    @pytest.mark.slow
    def test_in_processes(self, tmp_path, capsys):
        Squares.main(["--out", str(tmp_path)])
        assert rows_in(tmp_path) == [(3, "right", "ok"), (5, "right", "ok")]


# Every benchmark -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=BENCHMARKS)
def benchmark(request, monkeypatch):
    """A benchmark that fails the test if it gets as far as to look for its cases."""
    benchmark = BENCHMARKS[request.param]
    monkeypatch.setattr(benchmark, "cases", lambda self: pytest.fail("something ran"))
    return benchmark


def error_of(benchmark, capsys, *arguments):
    """What the benchmark says when it ends with an error."""
    with pytest.raises(SystemExit) as exit_info:
        benchmark.main([*map(str, arguments)])
    if isinstance(exit_info.value.code, str):
        return exit_info.value.code
    assert exit_info.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


class TestEveryBenchmark:
    def test_its_name_is_its_module(self, benchmark):
        assert benchmark.__module__ == f"benchmarks.{benchmark.name}"

    @pytest.mark.parametrize("arguments", [["--nonsense"], ["nonsense"], ["--out", ""], ["--out", "~nobody-there/out"]])
    def test_wrong_arguments(self, arguments, benchmark, capsys):
        assert f"benchmarks.{benchmark.name}: error: " in error_of(benchmark, capsys, *arguments)

    def test_help(self, benchmark, capsys):
        with pytest.raises(SystemExit):
            benchmark.main(["--help"])
        printed = capsys.readouterr().out
        assert f"usage: python -m benchmarks.{benchmark.name} " in printed
        assert "--out" in printed

    def test_another_process_uses_the_folder(self, benchmark, tmp_path, capsys):
        with lock(tmp_path):
            error = error_of(benchmark, capsys, "--out", tmp_path)
        assert error.startswith(f"error: {tmp_path} is in use by process {os.getpid()} on ")
        assert error.endswith("; wait until it has ended, or choose another --out")


class TestFolder:
    @pytest.mark.parametrize("name", ["file", "file/below", "x" * 300])
    def test_none_can_be_made(self, name, tmp_path, capsys):
        (tmp_path / "file").touch()
        error = error_of(Squares, capsys, "--out", tmp_path / name)
        assert error.startswith(f"error: results cannot be written to {tmp_path / name}: ")
        assert "\n" not in error

    @pytest.mark.parametrize("name", ["runs.jsonl", ".lock"])
    def test_a_folder_in_place_of_a_file(self, name, tmp_path, capsys):
        (tmp_path / name).mkdir()
        error = error_of(Squares, capsys, "--out", tmp_path)
        assert error.startswith(f"error: results cannot be written to {tmp_path}: ")

    @pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
    def test_nothing_can_be_written(self, number, tmp_path, capsys, monkeypatch):
        def refuse(*args):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(results.os, "write", refuse)
        error = error_of(Squares, capsys, "--out", tmp_path)
        assert error.startswith(f"error: results cannot be written to {tmp_path}: ")
        assert os.strerror(number) in error

    def test_results_that_cannot_be_read(self, tmp_path, capsys):
        (tmp_path / "runs.jsonl").mkdir()
        error = error_of(translation.Translation, capsys, "--report", "--out", tmp_path)
        assert error.startswith("error: [Errno 21] Is a directory: ")

    def test_a_report_needs_no_lock(self, tmp_path, capsys):
        with lock(tmp_path):
            error = error_of(translation.Translation, capsys, "--report", "--out", tmp_path)
        assert "has no runs of the setting" in error
        error_of(translation.Translation, capsys, "--report", "--out", tmp_path / "nothing")
        assert not (tmp_path / "nothing").exists()


class TestSession:
    def session(self, path):
        return Squares.session(Squares.parse(["--out", str(path)]), Console(markup=False))

    def test_what_the_terminal_lacks_is_no_reason_to_stop(self, tmp_path, monkeypatch):
        printed = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
        with self.session(tmp_path):
            print("1.0 ± 0.5")
            sys.stdout.flush()
        assert printed.getvalue() == b"1.0 \\xb1 0.5\n"

    def test_errors_of_programs_are_not_hidden(self, tmp_path):
        with pytest.raises(ZeroDivisionError), self.session(tmp_path):
            _ = 1 / 0
        with lock(tmp_path):
            pass

    def test_ctrl_c_raises_inside_only(self, tmp_path):
        """So that before and after a session, the package's handler ends the process without a traceback."""
        before = signal.signal(signal.SIGINT, benchmarks.interrupted)
        try:
            with self.session(tmp_path):
                assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            assert signal.getsignal(signal.SIGINT) is benchmarks.interrupted
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for background jobs
            with self.session(tmp_path):
                assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        finally:
            signal.signal(signal.SIGINT, before)

    def test_errors_of_users_are_one_line(self, tmp_path):
        with pytest.raises(SystemExit, match="^error: the data are missing$"), self.session(tmp_path):
            raise BenchmarkError("the data are missing")


def has(process, text):
    """Whether a process has loaded a library of this name."""
    return text in Path(f"/proc/{process.pid}/maps").read_text()


def has_child(process, text):
    """Whether a process has a child whose command contains a text."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return any(text in Path(f"/proc/{child}/cmdline").read_text() for child in children)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
@pytest.mark.parametrize(
    ("is_time", "said"),
    [(lambda process: has(process, "libtorch"), ""), (lambda x: has_child(x, "spawn_main"), " Fin")],
)
def test_ctrl_c_during_imports(is_time, said, tmp_path, start):
    """In the benchmark itself, or in the process of a case."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = start("-m", "benchmarks.families", "--shapes", "tiny", "--out", tmp_path, **options)
    deadline = time.monotonic() + 300
    while not is_time(process) and time.monotonic() < deadline:
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGINT)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 130
    assert printed.splitlines()[-1].startswith(f"Interrupted.{said}")
    assert "Traceback" not in printed


class TestOptionTypes:
    @pytest.mark.parametrize("text", ["1", " 7 ", "10", "1_0"])
    def test_whole(self, text):
        assert options.whole(1, 10)(text) == int(text)

    @pytest.mark.parametrize("text", ["0", "11", "-1", "1.0", "1e1", "nan", "", "ten", "9" * 5000])
    def test_not_whole(self, text):
        with pytest.raises(options.argparse.ArgumentTypeError, match="is not a whole number from 1 to 10"):
            options.whole(1, 10)(text)

    @pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e7", "", "soon"])
    def test_no_seconds(self, text):
        assert options.seconds("0.5") == 0.5
        with pytest.raises(options.argparse.ArgumentTypeError, match="is not a positive number of seconds"):
            options.seconds(text)

    @pytest.mark.parametrize("text", ["", "meta", "cuda:99", "cpu:x", "nothing"])
    def test_no_device(self, text):
        assert options.device("cpu") == "cpu"
        with pytest.raises(options.argparse.ArgumentTypeError, match="cannot be used: "):
            options.device(text)

    def test_of_measurements(self):
        parser = options.argparse.ArgumentParser()
        options.add_measuring(parser, "squares", repeats=3)
        expected = {"threads": torch.get_num_threads(), "repeats": 3, "seconds": 10.0, "timeout": 1200.0, "only": None}
        assert vars(parser.parse_args([])) == {**expected, "out": Path("runs/squares")}
        assert "(default: 1200)" in parser.format_help()

    def test_the_home_folder(self):
        assert options.folder("~/x") == Path.home() / "x"


# Committed results ---------------------------------------------------------------------------------------------------


def case_of(row, kinds):
    """The case that a row is of."""
    fitting = [
        kind for kind in kinds if {x.name for x in fields(kind) if x.init and x.default is MISSING} <= row.keys()
    ]
    return built(max(fitting, key=lambda kind: len(fields(kind))), row)  # a subclass has more


def built(kind, row):
    """A dataclass from the fields of a row; of one with subclasses, the subclass whose fields are there."""
    fitting = [one for one in (kind, *kind.__subclasses__()) if {x.name for x in fields(one)} <= row.keys()]
    kind = max(fitting, key=lambda one: len(fields(one)), default=kind)
    hints = get_type_hints(kind)
    values = {x.name: row[x.name] for x in fields(kind) if x.init and x.name in row}
    return kind(**{name: built(hints[name], x) if is_dataclass(hints[name]) else x for name, x in values.items()})


def benchmark_of(folder, names=BENCHMARKS):
    """The name of the benchmark whose results a folder `<name>` or `<name>_<variant>` has."""
    return max((name for name in names if f"{folder.name}_".startswith(f"{name}_")), key=len)


RATIO = re.compile("×|÷|gathers|exponent|speed|pays off|processor")
"""Columns with ratios of times; *processor* has them in brackets."""


def has_ratios(name):
    """Whether a benchmark compares rows; the others have no ratios, or those of sides that took turns."""
    return name not in ("calls", "citation", "families", "lists", "nodes", "temporal", "translation")


def nothing_to_run(self, pending):
    """Instead of `Benchmark.run`: committed rows are read, and nothing is measured."""
    assert not pending, f"these have no row of this table's versions and machine: {[str(case) for case in pending]}"
    yield from ()


class TestCommittedResults:
    @pytest.mark.parametrize(
        ("folder", "name"), [("a", "a"), ("a_x", "a"), ("a_b", "a_b"), ("a_b_x", "a_b"), ("a_bx", "a")]
    )
    def test_the_name_of_a_folder(self, folder, name):
        assert benchmark_of(Path(folder), ["a", "a_b"]) == name

    @pytest.mark.parametrize("path", sorted(COMMITTED.glob("*/runs.jsonl")), ids=lambda path: path.parent.name)
    def test_they_give_the_committed_tables(self, path, tmp_path, monkeypatch, capsys):
        name = benchmark_of(path.parent)
        benchmark, kinds = BENCHMARKS[name], defined_in(sys.modules[f"benchmarks.{name}"], Case)
        (tmp_path / "runs.jsonl").write_bytes(path.read_bytes())
        rows = [row for row in ResultsFile(path).rows() if path.parent.name != "citation_100" or "curve" in row]
        cases = sorted({case_of(row, kinds): None for row in rows}, key=lambda case: kinds.index(type(case)))
        recorded = {key for kind in kinds for key in kind.recorded(ResultsFile(path))}
        unread = [row for row in rows if type(case_of(row, kinds)).key_of(row) not in recorded]
        assert not unread, f"remove these rows, which are of other columns, from {path}: {unread}"
        assert cases, f"{path} has no rows: commit those of a run"
        said = {column: rows[0][column] for column in (*machine(), "torch-scatter") if column in rows[0]}
        monkeypatch.setattr("benchmarks.framework.benchmark.machine", lambda *args: said)

        def blank(figure, file, **options):
            Image.new("RGB", (1, 1)).save(file, **options)

        monkeypatch.setattr(Figure, "savefig", blank)  # drawing takes most of the time
        arguments = ["--report"] if name == "translation" else []
        if not arguments:
            monkeypatch.setattr(benchmark, "cases", lambda self: cases)
        monkeypatch.setattr(benchmark, "run", nothing_to_run)
        benchmark.main([*arguments, "--out", str(tmp_path)])
        warnings = capsys.readouterr().err
        assert not warnings, f"remove the lines that are no rows from {path}: {warnings}"
        for table in path.parent.glob("*.md"):
            # Those that were made with peers that are not installed here say so below; rows may be in another order.
            ours, theirs = (
                {line for line in file.read_text().splitlines() if line.startswith("|")}
                for file in (tmp_path / table.name, table)
            )
            assert ours == theirs or path.parent.name == "citation_100", f"run it with --out {path.parent} once more"

    @pytest.mark.parametrize("name", [name for name in BENCHMARKS if (COMMITTED / name).exists() and has_ratios(name)])
    def test_ratios_of_rows_of_different_runs_are_marked(self, name, tmp_path, monkeypatch):
        benchmark, module = BENCHMARKS[name], sys.modules[f"benchmarks.{name}"]
        kinds = defined_in(module, Case)
        folder = COMMITTED / ("molecules_times" if name == "molecules" else name)
        rows = {case_of(row, kinds): row for row in ResultsFile(folder / "runs.jsonl").rows()}
        for number, row in enumerate(rows.values()):
            row["started"] = str(number)
        for function in [function for function in vars(module) if function.startswith("draw")]:
            monkeypatch.setattr(module, function, lambda *args: None)
        tables = []
        monkeypatch.setattr(
            benchmark,
            "publish",
            lambda self, title, lines, remarks, files, *args, **named: tables.extend([lines, *files.values()]),
        )
        some = benchmark(
            benchmark.parse(["--out", str(tmp_path)]), ResultsFile(tmp_path / "runs.jsonl"), Console(quiet=True)
        )
        for kind in kinds:
            if of_kind := {case: row for case, row in rows.items() if type(case) is kind}:
                some.report(of_kind)
        cells = [
            cell
            for lines in tables
            if isinstance(lines, list)
            for line in lines
            for column, cell in line.items()
            if RATIO.search(column)
            and not re.search("peak|memory, PyG", column)
            and not re.match(r"–|1\.0+(×|$)", cell)
        ]
        assert cells
        assert {cell for cell in cells if not re.search(r"†\)?$|^\d+$", cell)} == set()

    @pytest.mark.parametrize("name", BENCHMARKS)
    def test_every_field_that_is_read_is_checked(self, name, tmp_path, capsys):
        """Nothing but texts can be replaced by a text, and no text by a number."""
        kinds, checked = defined_in(sys.modules[f"benchmarks.{name}"], Case), 0
        rows = ResultsFile(COMMITTED / name / "runs.jsonl").rows()
        if not rows:
            pytest.skip(f"no results are committed in {COMMITTED / name}")
        for row in (rows[0], rows[-1]):
            kind = type(case_of(row, kinds))
            for part in (kind, kind.result_of(row), results.Machine):
                for field in results._fields(part).keys() & row.keys():
                    file = ResultsFile(tmp_path / f"{checked}.jsonl")
                    file.append({**row, field: 5 if isinstance(row[field], str) else "5"})
                    assert kind.recorded(file) == {}
                    assert f"line 1: {field} is " in capsys.readouterr().err
                    checked += 1
        assert checked > 0


# Training ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line(Case):
    result: ClassVar[type] = Measured

    seed: int


class Fit(Training[Line]):
    """A line through random points."""

    def __init__(self, case, path, save_every=0.0):
        torch.manual_seed(case.seed)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters())
        super().__init__(case, path, model, optimizer, 12, 5, 1.0, save_every=save_every)

    def learning_rate(self):
        return 0.1 / (1 + self.iteration)

    def loss(self):
        x = torch.randn(8, 2, generator=torch.Generator().manual_seed(self.iteration))
        return (self.model(x) - x.sum(1, keepdim=True)).square().mean()

    def evaluate(self):
        return {"iteration": self.iteration, "val_loss": self.loss().item(), "count": len(self.losses)}

    def result(self):
        return {"curve": self.curve}


class Unseeded(Fit):
    """Whose random numbers no iteration seeds."""

    keeps_random_state = True

    def loss(self):
        return super().loss() * torch.rand(())


class TestTraining:
    def test_cases_train_side_by_side(self, tmp_path):
        """Each in the same folder, with what it shows."""
        shown = []
        runs = [Fit(Line(seed), tmp_path).run(lambda *progress: shown.append(progress)) for seed in (0, 1)]
        assert runs[0] != runs[1]
        assert [progress[0] for progress in shown] == [*range(13), *range(13)]
        assert shown[0][1:] == (12, "")
        assert shown[12][2].startswith(": validation loss ")
        assert len(list(tmp_path.glob("*.pt"))) == 2
        assert Fit(Line(0), tmp_path).is_finished

    @pytest.mark.parametrize("kind", [Fit, Unseeded])
    def test_an_interrupted_run_ends_with_the_same_numbers(self, kind, tmp_path):
        (tmp_path / "whole").mkdir()
        whole = kind(Line(0), tmp_path / "whole")
        whole.advance(100)
        kind(Line(0), tmp_path).advance(8)
        second = kind(Line(0), tmp_path)
        assert (second.iteration, len(second.seconds), second.is_finished) == (5, 5, False)
        second.advance(100)
        assert second.is_finished
        assert second.curve == whole.curve
        assert [(point["iteration"], point["count"]) for point in whole.curve] == [(5, 5), (10, 5), (12, 2)]
        assert torch.equal(second.model.weight, whole.model.weight)

    def test_checkpoints_are_no_more_frequent_than_asked_for(self, tmp_path, monkeypatch):
        """But the last one is always saved."""
        now = [0.0]
        monkeypatch.setattr("benchmarks.framework.training.time.monotonic", lambda: now[-1])
        fit, saved = Fit(Line(0), tmp_path, save_every=3.0), []
        for seconds in (2.0, 4.0, 5.0):  # at iterations 5, 10 and 12
            now.append(seconds)
            fit.advance(5)
            saved.append([torch.load(path)["iteration"] for path in tmp_path.iterdir()])
        assert saved == [[], [10], [12]]

    def test_an_early_end_is_saved(self, tmp_path, monkeypatch):
        monkeypatch.setattr(Fit, "stops_early", lambda self: len(self.curve) == 2)
        shown = []
        Fit(Line(0), tmp_path, save_every=1e6).run(lambda *progress: shown.append(progress[0]))
        again = Fit(Line(0), tmp_path)
        again.advance(5)
        assert (again.iteration, again.is_finished, shown) == (10, True, list(range(11)))

    def test_a_checkpoint_of_another_case_or_version_is_not_used(self, tmp_path, monkeypatch):
        Fit(Line(0), tmp_path).advance(5)
        assert Fit(Line(1), tmp_path).iteration == 0
        monkeypatch.setattr("gattn.__version__", "9.9")
        assert Fit(Line(0), tmp_path).iteration == 0

    @pytest.mark.parametrize("damage", [b"", b"junk", slice(0, 500), slice(0, -100), {}, "model"])
    def test_a_damaged_checkpoint_is_named(self, damage, tmp_path):
        Fit(Line(0), tmp_path).advance(5)
        (path,) = tmp_path.iterdir()
        if isinstance(damage, bytes | slice):
            path.write_bytes(damage if isinstance(damage, bytes) else path.read_bytes()[damage])
        else:
            torch.save(damage if damage == {} else {**torch.load(path), damage: None}, path)
        with pytest.raises(BenchmarkError, match=r"^the checkpoint \S+\.pt is damaged \(\w+\); delete it, and the"):
            Fit(Line(0), tmp_path)

    def test_nan_ends_it(self, tmp_path):
        fit = Fit(Line(0), tmp_path)
        with torch.no_grad():
            fit.model.weight.fill_(math.nan)
        with pytest.raises(FloatingPointError, match="became nan in iteration 5 of "):
            fit.advance(5)


# Processes -----------------------------------------------------------------------------------------------------------


def answer(case, show):
    """Does what the case says."""
    function, *arguments = case
    show(1, 2, "half")
    show(2, 2, "at once")
    return function(*arguments)


def fail(error):
    raise error


def place_in(function, line):
    """How errors name a line of a function here."""
    return f"(test_framework.py:{function.__code__.co_firstlineno + line})"


def ends(*cases, **options):
    """How cases ended."""
    messages = list(in_processes(cases, answer, **options))
    assert all(content == (1, 2, "half") for _, kind, content in messages if kind == "progress")
    return {case: (kind, content) for case, kind, content in messages if kind != "progress"}


@pytest.mark.slow
class TestProcesses:
    def test_how_they_end(self):
        full_gpu = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nMore.")
        expected = {
            (pow, 2, 3): ("ok", 8),
            (signal.raise_signal, signal.SIGKILL): ("out of memory", "killed"),
            (fail, full_gpu): (
                "out of memory",
                f"OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB. {place_in(fail, 1)}",
            ),
            (sys.exit, 3): ("failed", "the process ended with exit code 3"),
            (int, "x"): ("failed", f"ValueError: invalid literal for int() with base 10: 'x' {place_in(answer, 5)}"),
            (fail, AssertionError()): ("failed", f"AssertionError: {place_in(fail, 1)}"),
            (fail, BenchmarkError("delete it")): ("failed", "delete it"),
        }
        assert ends(*expected, workers=2) == expected
        ((outcome, reason),) = ends((torch.ones, 2**50)).values()
        assert outcome == "out of memory"
        assert "can't allocate memory" in reason

    def test_a_limit_of_time(self):
        assert ends((time.sleep, 1000), (pow, 2, 3), timeout=3) == {
            (time.sleep, 1000): ("timed out", "after 3 s"),
            (pow, 2, 3): ("ok", 8),
        }

    def test_ctrl_c_does_not_reach_the_server(self, monkeypatch):
        """Whose imports would end with a traceback."""

        def blocked():
            return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())

        started = []
        monkeypatch.setattr(processes.forkserver, "ensure_running", lambda: started.append(blocked()))
        assert ends() == {}
        assert started == [True]
        assert not blocked()

    def test_closing_ends_them(self):
        started = time.monotonic()
        messages = in_processes([(time.sleep, 1000)] * 2, answer, workers=2)
        assert next(messages)[1] == "progress"
        messages.close()
        assert time.monotonic() - started < 100
        assert not processes.multiprocessing.active_children()

    @pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
    def test_an_environment_is_there_from_the_start(self, monkeypatch):
        """Where the C library finds it; and here it is as it was."""
        monkeypatch.setenv("GATTN_OLD", "old")
        case, changes = (Path.read_text, Path("/proc/self/environ")), {"GATTN_OLD": "new", "GATTN_NEW": "new"}
        outcome, environment = ends(case, environment=changes)[case]
        assert outcome == "ok"
        assert {"GATTN_OLD=new", "GATTN_NEW=new"} < set(environment.split("\0"))
        assert ends((os.getenv, "GATTN_OLD"), environment=changes) == {(os.getenv, "GATTN_OLD"): ("ok", "new")}
        assert os.environ["GATTN_OLD"] == "old"
        assert "GATTN_NEW" not in os.environ

    def test_what_is_imported_once_leaves_the_gpu_alone(self, start):
        code = (
            "import importlib, sys, torch\n"
            "for name in ('is_available', 'device_count', 'init', '_lazy_init'):\n"
            "    setattr(torch.cuda, name, lambda *args: sys.exit('CUDA is asked'))\n"
            "from benchmarks.framework.processes import PRELOADED\n"
            "for name in PRELOADED:\n"
            "    importlib.import_module(name)\n"
        )
        process = start("-c", code, stderr=subprocess.PIPE, text=True)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors


# Measuring -----------------------------------------------------------------------------------------------------------


class TestCheck:
    results: ClassVar = {name: torch.tensor([[1.0, 2.0], [3.0, 4.0]]) for name in ("output", "gradient of weight")}

    def expected(self, **options):
        exact = {name: x.double() for name, x in self.results.items()}
        return budgets(exact, exact, torch.float32, 4, 9, **options)

    def test_budgets(self):
        """Nothing is lost here: eight units in the last place and the root of the number of terms, of the scale."""
        unit = torch.finfo(torch.float32).eps
        expected = self.expected()
        assert expected["output"]["budget"] == pytest.approx((8 + 2) * unit * 4)
        assert expected["gradient of weight"]["budget"] == pytest.approx((8 + 3) * unit * 4)

    @pytest.mark.parametrize(
        ("dtype", "limit"), [(torch.float32, 0.05), (torch.float16, 0.05), (torch.bfloat16, 0.125)]
    )
    def test_references_of_other_inputs_are_refused(self, dtype, limit):
        """With a budget as large as the result, nothing would be wrong."""
        exact = {"output": self.results["output"].double()}
        budgets(exact, {"output": exact["output"] * (1 + 0.99 * limit)}, dtype, 4, 9)
        with pytest.raises(ValueError, match="the reference's output in .* both must be of the same inputs"):
            budgets(exact, {"output": exact["output"] * (1 + 1.01 * limit)}, dtype, 4, 9)

    def test_each_result_is_compared(self):
        expected = self.expected()
        assert measuring.check(self.results, expected)["output"]["error"] == 0
        for name in self.results:
            errors = measuring.check({**self.results, name: self.results[name] * 1.01}, expected)
            assert [other for other, entry in errors.items() if entry["error"] > entry["budget"]] == [name]
            assert errors[name]["error"] == pytest.approx(0.01, rel=0.01)

    def test_some_rows(self):
        expected = self.expected(compared=torch.tensor([1]))
        wrong = self.results["output"] + torch.tensor([[1.0], [0.0]])
        assert measuring.check({**self.results, "output": wrong}, expected)["output"]["error"] == 0
        assert expected["gradient of weight"]["rows"] is None

    def test_a_missing_result_is_an_error(self):
        with pytest.raises(ValueError, match="^missing: gradient of weight; unexpected: gradient of x$"):
            measuring.check({"output": self.results["output"], "gradient of x": torch.ones(1)}, self.expected())


class TestTimes:
    @pytest.fixture
    def work(self, monkeypatch):
        """What takes a millisecond and three page faults, by clocks of its own."""
        used = {"ru_minflt": 100, "ru_stime": 10.0, "calls": 0}

        def work():
            for name, step in (("ru_minflt", 3), ("ru_stime", 0.0005), ("calls", 1)):
                used[name] += step

        usage = SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda who: SimpleNamespace(**used))
        monkeypatch.setattr(measuring, "resource", usage)
        monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: used["calls"] / 1000))
        return work

    def test_short_calls_are_timed_together(self, work, monkeypatch):
        batches, duration = [], measuring.duration
        monkeypatch.setattr(measuring, "duration", lambda *args: batches.append(args[2:]) or duration(*args))
        times = measuring.timed(work, 30, 20.0)
        assert len(times["times"]) == 30
        assert set(batches[-30:]) <= {(20,), (21,)}  # as 20 milliseconds take, whichever way that is rounded
        assert times["q1"] == pytest.approx(0.001)
        assert times["q3"] == pytest.approx(0.001)

    def test_others_are_timed_one_by_one(self, work):
        times = measuring.timed(lambda: [work() for _ in range(50)], 5, 0.1)
        assert times["times"] == pytest.approx([0.05] * len(times["times"]))

    def test_what_the_system_does(self, work, monkeypatch):
        times = measuring.timed(work, 3, 0.1)
        assert times["page_faults"] == times["usual_page_faults"] == 3
        assert times["system"] == pytest.approx(0.0005)
        pages = iter([3, 3, 1000, 3, 3])
        batches = [{"page_faults": next(pages)} for _ in range(5)]
        assert measuring.per_call(batches) == {"page_faults": 202.4, "usual_page_faults": 3}
        monkeypatch.setattr(measuring, "resource", None)
        assert not {"page_faults", "system"} & set(measuring.timed(work, 3, 0.1))


class TestComparisons:
    """Which times are compared."""

    @staticmethod
    def row(seconds, started="now", allocator="default", peak_bytes=10**8, **times):
        forward = {"median": seconds, "q1": seconds, "q3": seconds, "times": [seconds] * 4, **times}
        return {
            "outcome": "ok",
            "allocator": allocator,
            "started": started,
            "peak_bytes": peak_bytes,
            "forward": forward,
        }

    def test_times_of_different_runs_are_marked(self):
        row, other, older = self.row(1.0), self.row(2.0, "later"), self.row(2.0)
        del older["started"]
        assert reports.factor(self.row(2.0), row, "forward") == "2.0×"
        assert reports.factor(other, row, "forward") == reports.factor(older, row, "forward") == "2.0×†"
        assert reports.factor(older, older, "forward") == "1.0×"
        assert reports.factor(None, row, "forward") == "–"
        (remark,) = reports.remarks_on([[{"×": "2.0×†"}]], [])
        assert remark.startswith("† Both times are of different runs")
        assert reports.remarks_on([[{"×": "2.0×"}]], []) == []

    @pytest.mark.parametrize("allocator", ["kept", "huge", "default"])
    @pytest.mark.parametrize(
        ("times", "is_kept"),
        [
            ({}, True),
            ({"page_faults": 6103.0}, True),  # less than the peak in all four calls
            ({"page_faults": 6104.0}, False),
            ({"page_faults": 99999.0, "usual_page_faults": 2441.0}, True),  # less than a tenth of it in the usual call
            ({"page_faults": 0.0, "usual_page_faults": 2442.0}, False),
        ],
    )
    def test_memory_that_was_to_be_kept(self, times, is_kept, allocator):
        """Without the default allocator, which keeps none, no ratio is derived from a time that paid for pages."""
        row, other = self.row(1.0, allocator=allocator, **times), self.row(2.0, allocator=allocator)
        is_compared = is_kept or allocator == "default"
        assert (reports.factor(other, row, "forward") == "2.0×") == is_compared
        assert (reports.factor(row, other, "forward") == "0.5×") == is_compared
        assert quartiles(row, "forward").endswith(", not kept") != is_compared
        assert bool(reports.remarks_on([[{"ms": quartiles(row, "forward")}]], [])) != is_compared

    def test_small_memory(self):
        """Fewer pages than any block that glibc returns to the system."""
        assert reports.is_kept(self.row(1.0, allocator="kept", peak_bytes=0, page_faults=31.0), "forward")
        assert not reports.is_kept(self.row(1.0, allocator="kept", peak_bytes=0, page_faults=32.0), "forward")


class TestMemory:
    def test_what_is_freed_again_counts(self):
        _, some = measuring.peak_above(lambda: torch.ones(20_000_000).sum())
        assert 70e6 < some < 120e6
        _, none = measuring.peak_above(lambda: None)
        assert none < 5e6


class FakeGpu:
    """What is measured on a GPU, by a clock of its own; it computes on the CPU."""

    def __init__(self, monkeypatch):
        self.now, self.calls = 0.0, []
        for name, answer in (("memory_allocated", 100), ("max_memory_allocated", 350)):
            monkeypatch.setattr(torch.cuda, name, lambda device, name=name, answer=answer: self.note(name, answer))
        for name in ("synchronize", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda device, name=name: self.note(name))
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: SimpleNamespace(**self.event()))

    def note(self, name, answer=None):
        self.calls.append(name)
        return answer

    def event(self):
        """An event's methods; `end` is another such."""
        at = []
        return {
            "record": lambda: at.append(self.now),
            "synchronize": lambda: self.note("event"),
            "at": at,
            "elapsed_time": lambda end: 1000 * (end.at[0] - at[0]),
        }

    def work(self):
        self.calls.append("work")
        self.now += 0.25


@pytest.fixture
def gpu(monkeypatch):
    return FakeGpu(monkeypatch)


class TestOnAGpu:
    def test_times_are_the_events(self, gpu):
        assert measuring.duration(gpu.work, "cuda") == 0.25
        assert gpu.calls == ["synchronize", "work", "event"]
        times = measuring.timed(gpu.work, 3, 0.001, "cuda")
        assert times["q1"] == times["median"] == times["q3"] == 0.25
        assert gpu.calls.count("work") == gpu.calls.count("event")  # the warm-up's calls are waited for, too

    def test_memory_is_above_what_was_there(self, gpu):
        assert measuring.peak_above(lambda: gpu.work() or "done", "cuda") == ("done", 250)
        order = ["reset_peak_memory_stats", "memory_allocated", "work", "synchronize", "max_memory_allocated"]
        assert gpu.calls == ["synchronize", *order]

    def test_a_copy_reads_and_writes(self, monkeypatch):
        monkeypatch.setattr(measuring, "timed", lambda *args: measuring.spread([0.5]))
        assert measuring.copy_rate("cpu", 1000) == 4000
        assert measuring.operation_rate("cpu", 10) == 4000

    @pytest.mark.parametrize(
        ("environment", "name"),
        [
            ({}, "default"),
            ({"PATH": "/bin"}, "default"),
            (results.ALLOCATORS["kept"], "kept"),
            (results.MEMORY["huge"], "huge"),
            ({"LD_PRELOAD": "/a/b/libjemalloc.so", "MALLOC_CONF": "x"}, "LD_PRELOAD=libjemalloc.so, MALLOC_CONF=x"),
        ],
    )
    def test_allocator(self, environment, name, monkeypatch):
        assert results.allocator(environment) == name
        monkeypatch.setenv("MALLOC_TOP_PAD_", "1")
        assert machine()["allocator"] == "MALLOC_TOP_PAD_=1"
        assert machine("cpu", results.ALLOCATORS["kept"])["allocator"] == "kept"

    def test_kernels(self, tmp_path, monkeypatch):
        """The digest is of those of the device, whatever else is in the folders."""
        monkeypatch.setattr("gattn.__file__", str(tmp_path / "__init__.py"))
        for name in ("cpu/csrc/forward.h", "triton/kernel.py", "kernels.py", "cpu/_kernels.so"):
            path = tmp_path / "ops" / "backends" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("a")
        digest = results.kernels.__wrapped__
        found = {}
        for name in (None, "cpu/csrc/forward.h", "triton/kernel.py", "kernels.py", "cpu/_kernels.so"):
            if name is not None:
                (tmp_path / "ops" / "backends" / name).write_text("b")
            found[name] = digest("cpu"), digest("cuda:1")
        (cpu, gpu), (cpu_changed, gpu_same), (cpu_same, gpu_changed), both, last = found.values()
        assert cpu != gpu
        assert gpu_same == gpu
        assert cpu_same == cpu_changed != cpu
        assert gpu_changed != gpu
        assert not {*both} & {cpu_changed, gpu_changed}
        assert last == both

    def test_machine(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Abacus")
        monkeypatch.setattr(results.subprocess, "run", lambda *args, **kwargs: SimpleNamespace(stdout="12.3\n12.3\n"))
        results._driver.cache_clear()
        found = machine("cuda")
        assert found["machine"].startswith("NVIDIA Abacus, ")
        assert found["driver"] == "12.3"
        assert "cuda" in found
        monkeypatch.setattr(results.subprocess, "run", lambda *args, **kwargs: (_ for _ in ()).throw(OSError))
        results._driver.cache_clear()
        assert machine("cuda")["driver"] == "unknown"
        results._driver.cache_clear()
        here = machine()
        assert not {"cuda", "driver"} & set(here)
        assert f" with {torch.backends.cpu.get_cpu_capability()}, " in here["machine"]
