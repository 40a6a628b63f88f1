"""What holds for the command line of every benchmark."""

import errno
import io
import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import citation, command_line, kernels, results, sequence, translation
from benchmarks.results import lock

BENCHMARKS = {module.__name__.split(".")[1]: module for module in (citation, kernels, sequence, translation)}


@pytest.fixture(params=BENCHMARKS)
def benchmark(request, monkeypatch):
    """A benchmark that fails the test if it gets as far as to run something."""
    module = BENCHMARKS[request.param]
    for name in ("find", "find_peers", "find_corpus", "plan"):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, lambda *args: pytest.fail("something ran"))
    return module


def error_of(benchmark, capsys, *arguments):
    """What the benchmark says when it ends with an error."""
    with pytest.raises(SystemExit) as exit_info:
        benchmark.main([*map(str, arguments)])
    if isinstance(exit_info.value.code, str):
        return exit_info.value.code
    assert exit_info.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


class TestFolder:
    def test_another_process_uses_it(self, benchmark, tmp_path, capsys):
        with lock(tmp_path):
            error = error_of(benchmark, capsys, "--out", tmp_path)
        assert error.startswith(f"error: {tmp_path} is in use by process {os.getpid()} on ")
        assert error.endswith("; wait until it has ended, or choose another --out")

    @pytest.mark.parametrize("name", ["", "~nobody-of-this-name/out"])
    def test_no_folder(self, name, benchmark, capsys):
        assert "error: argument --out: " in error_of(benchmark, capsys, "--out", name)

    @pytest.mark.parametrize("name", ["file", "file/below", "x" * 300])
    def test_none_can_be_made(self, name, benchmark, tmp_path, capsys):
        (tmp_path / "file").touch()
        error = error_of(benchmark, capsys, "--out", tmp_path / name)
        assert error.startswith(f"error: results cannot be written to {tmp_path / name}: ")
        assert "\n" not in error

    @pytest.mark.parametrize("name", ["runs.jsonl", ".lock"])
    def test_a_folder_in_place_of_a_file(self, name, benchmark, tmp_path, capsys):
        (tmp_path / name).mkdir()
        error = error_of(benchmark, capsys, "--out", tmp_path)
        assert error.startswith(f"error: results cannot be written to {tmp_path}: ")

    @pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
    def test_nothing_can_be_written(self, number, benchmark, tmp_path, capsys, monkeypatch):
        def refuse(*args):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(results.os, "write", refuse)
        error = error_of(benchmark, capsys, "--out", tmp_path)
        assert error.startswith(f"error: results cannot be written to {tmp_path}: ")
        assert os.strerror(number) in error

    def test_results_that_cannot_be_read(self, tmp_path, capsys):
        (tmp_path / "runs.jsonl").mkdir()
        error = error_of(translation, capsys, "--report", "--out", tmp_path)
        assert error.startswith("error: [Errno 21] Is a directory: ")

    def test_a_report_needs_no_lock(self, tmp_path, capsys):
        with lock(tmp_path):
            error = error_of(translation, capsys, "--report", "--out", tmp_path)
        assert "has no runs of the setting" in error
        error_of(translation, capsys, "--report", "--out", tmp_path / "nothing")
        assert not (tmp_path / "nothing").exists()

    def test_any_name(self, tmp_path, capsys):
        out = tmp_path / "a b [/c] ü \udcff"
        citation.main(["--dataset", "karate", "--runs", "1", "--max-epochs", "2", "--out", str(out)])
        assert {path.name for path in out.iterdir()} == {"runs.jsonl", "table.md", "curves.png"}
        printed = capsys.readouterr().out.replace("\n", "")
        assert "a b [/c] ü \\udcff" in printed


class TestFullDisk:
    def test_what_has_finished_stays(self, tmp_path, monkeypatch, capsys):
        arguments = ["--dataset", "karate", "--runs", "3", "--max-epochs", "2", "--out", str(tmp_path)]
        sync, synced = os.fsync, []

        def full(descriptor):
            synced.append(descriptor)
            if len(synced) == 2:
                os.ftruncate(descriptor, os.fstat(descriptor).st_size - 50)
                raise OSError(errno.ENOSPC, "No space left on device")
            sync(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(results.os, "fsync", full)
            error = error_of(citation, capsys, *arguments)
        path = tmp_path / "runs.jsonl"
        assert error == (
            "error: [Errno 28] No space left on device. "
            f"What has finished is in {path}; the same command goes on from there."
        )
        citation.main(arguments)
        assert "1 of 3 runs are in" in capsys.readouterr().out
        assert len(citation.finished(results.ResultsFile(path))) == 3


class TestSession:
    def test_what_the_terminal_lacks_is_no_reason_to_stop(self, tmp_path, monkeypatch):
        printed = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
        with command_line.session(tmp_path, Console(markup=False)):
            print("1.0 ± 0.5")
            sys.stdout.flush()
        assert printed.getvalue() == b"1.0 \\xb1 0.5\n"

    def test_errors_of_programs_are_not_hidden(self, tmp_path):
        with pytest.raises(ZeroDivisionError), command_line.session(tmp_path, Console()):
            _ = 1 / 0
        with lock(tmp_path):
            pass


class TestTypes:
    @pytest.mark.parametrize("text", ["1", " 7 ", "10", "1_0"])
    def test_whole(self, text):
        assert command_line.whole(1, 10)(text) == int(text)

    @pytest.mark.parametrize("text", ["0", "11", "-1", "1.0", "1e1", "nan", "", "ten", "9" * 5000])
    def test_not_whole(self, text):
        with pytest.raises(command_line.argparse.ArgumentTypeError, match="is not a whole number from 1 to 10"):
            command_line.whole(1, 10)(text)

    @pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e7", "", "soon"])
    def test_no_seconds(self, text):
        assert command_line.seconds("0.5") == 0.5
        with pytest.raises(command_line.argparse.ArgumentTypeError, match="is not a number of seconds"):
            command_line.seconds(text)

    @pytest.mark.parametrize("text", ["", "meta", "cuda:99", "cpu:x", "nothing"])
    def test_no_device(self, text):
        assert command_line.device("cpu") == "cpu"
        with pytest.raises(command_line.argparse.ArgumentTypeError, match="cannot be used: "):
            command_line.device(text)

    def test_the_home_folder(self):
        assert command_line.folder("~/x") == Path.home() / "x"
