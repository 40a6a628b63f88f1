import errno
import json
import math
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

import pytest
from matplotlib.figure import Figure
from PIL import Image

from benchmarks.framework import results
from benchmarks.framework.reports import write_file
from benchmarks.framework.results import Machine, ResultsFile, lock, problem_of, replace_file


@dataclass
class Inner:
    size: int
    hub: int | None = None


class Outer(TypedDict):
    inner: Inner
    times: list[float]
    outcome: Literal["ok", "wrong"]
    note: NotRequired[str]


RIGHT = {"inner": {"size": 3}, "times": [1, 2.5], "outcome": "ok"}


class TestTypes:
    @pytest.mark.parametrize(
        "change", [{}, {"note": "x"}, {"unknown": []}, {"inner": {"size": 1, "hub": 2, "more": 1}}]
    )
    def test_right(self, change):
        assert problem_of({**RIGHT, **change}, Outer) is None

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            ({"inner": {"size": "3"}}, ".inner.size is '3' where a whole number is expected"),
            ({"inner": {"size": True}}, ".inner.size is True where a whole number is expected"),
            ({"inner": {"size": 3.0}}, ".inner.size is 3.0 where a whole number is expected"),
            ({"inner": {"size": 3, "hub": "x"}}, ".inner.hub is 'x' where a whole number or null is expected"),
            ({"inner": {}}, ".inner is {} where an object with size is expected"),
            ({"inner": None}, ".inner is None where an object with size is expected"),
            ({"times": [1, math.nan]}, ".times[1] is nan where a number is expected"),
            ({"times": [math.inf]}, ".times[0] is inf where a number is expected"),
            ({"times": [10**400]}, ".times[0] is 100000000000000000...0000000000000000000 where a number is expected"),
            ({"times": []}, ".times is [] where a list that is not empty is expected"),
            ({"times": 5}, ".times is 5 where a list that is not empty is expected"),
            ({"outcome": ["ok"]}, ".outcome is ['ok'] where 'ok' or 'wrong' is expected"),
            ({"note": None}, ".note is None where a string is expected"),
        ],
    )
    def test_wrong(self, change, problem):
        assert problem_of({**RIGHT, **change}, Outer) == problem

    @pytest.mark.parametrize("kind", [tuple[int, int], dict[str, float], set[int], Path])
    def test_a_type_that_is_not_known_is_named(self, kind):
        name = kind.__name__ if kind is Path else kind
        assert problem_of([1, 2], kind) == f" is [1, 2] where {name}, which no row can have, is expected"


class TestRows:
    def test_what_is_no_row_is_named_once(self, tmp_path, capsys):
        file = ResultsFile(tmp_path / "runs.jsonl")
        good = json.dumps(RIGHT).encode()
        junk = [b"5", b"[]", b"null", b"\xff\x00\x1b", b"[" * 100_000, b"1" * 5000, b'{"inner": {"si']
        file.path.write_bytes(b"\r\n".join([b"\xef\xbb\xbf" + good, b"", *junk, good[:-9], good]))
        assert file.rows(Outer) == file.rows(Outer) == [RIGHT, RIGHT]
        expected = f"warning: {file.path}, line 3: this is not a complete JSON object; the line is ignored."
        assert capsys.readouterr().err == f"{expected} 7 more of its lines are ignored.\n"

    @pytest.mark.parametrize("content", [b"", b"\n\n", b"\x00" * 4096, bytes(range(256)) * 50])
    def test_no_row_at_all(self, content, tmp_path):
        file = ResultsFile(tmp_path / "runs.jsonl")
        assert file.rows() == []
        file.path.write_bytes(content)
        assert file.rows(Outer) == []
        file.append(RIGHT)
        assert file.rows(Outer) == [RIGHT]

    def test_rows_without_the_fields_are_of_another_kind(self, tmp_path, capsys):
        file = ResultsFile(tmp_path / "runs.jsonl")
        file.append({**RIGHT, "times": "x"})
        file.append({"times": "x"})
        assert file.rows(Outer, Machine) == []
        assert capsys.readouterr().err == ""


class TestFiles:
    def test_a_full_disk_leaves_the_last_file(self, tmp_path, monkeypatch):
        path = tmp_path / "table.md"
        replace_file(path, b"first")

        def full(self, content):
            with self.open("wb") as file:
                file.write(content[:3])
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space left"):
            replace_file(path, b"second")
        assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("table.md", b"first")]


HOLD = """
import sys, time
from pathlib import Path
from benchmarks.framework.results import lock
with lock(Path(sys.argv[1])):
    {inside}
    print("held", flush=True)
    time.sleep(600)
"""


class TestLock:
    def test_one_at_a_time(self, tmp_path):
        for _ in range(2):
            holder = r"is in use by process \d+ on \S+, started \d{4}-"
            with lock(tmp_path), pytest.raises(BlockingIOError, match=holder), lock(tmp_path):
                pass
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("content", [b"process 1 on nowhere, started never", b"\xff" * 5000])
    def test_a_file_that_is_left_is_no_obstacle(self, content, tmp_path):
        (tmp_path / ".lock").write_bytes(content)
        with lock(tmp_path):
            assert (tmp_path / ".lock").read_text().startswith("process ")

    def test_a_file_that_is_removed_meanwhile_locks_nothing(self, tmp_path, monkeypatch):
        """What another process holds that made the file anew."""
        flock, opened = results.fcntl.flock, []

        def remove(descriptor, operation):
            if not opened:
                (tmp_path / ".lock").unlink()
            opened.append(descriptor)
            flock(descriptor, operation)

        monkeypatch.setattr(results.fcntl, "flock", remove)
        with lock(tmp_path):
            assert len(opened) == 2
            with pytest.raises(BlockingIOError), lock(tmp_path):
                pass

    def test_one_folder_by_two_names(self, tmp_path):
        (tmp_path / "folder").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "folder")
        with lock(tmp_path / "folder"), pytest.raises(BlockingIOError), lock(tmp_path / "link"):
            pass

    @pytest.mark.parametrize("failure", [None, errno.ENOLCK, errno.EOPNOTSUPP])
    def test_without_locks_a_warning_says_so(self, failure, tmp_path, monkeypatch, capsys):
        def refuse(descriptor, operation):
            raise OSError(failure, "No locks")

        if failure is None:
            monkeypatch.setattr(results, "fcntl", None)
        else:
            monkeypatch.setattr(results.fcntl, "flock", refuse)
        with lock(tmp_path), lock(tmp_path):
            pass
        assert f"warning: {tmp_path} cannot be locked" in capsys.readouterr().err

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "inside",
        [
            "pass",
            "import os; os.fork() or time.sleep(600)",
            "import subprocess; subprocess.Popen(['sleep', '600'], close_fds=False)",
        ],
        ids=["alone", "forked", "child"],
    )
    def test_it_ends_with_its_process(self, inside, tmp_path, start):
        """Even if that is killed, and children of it live on."""
        process = start("-c", HOLD.format(inside=inside), tmp_path, stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(BlockingIOError, match=f"is in use by process {process.pid} on "), lock(tmp_path):
            pass
        process.kill()
        time.sleep(0.2)
        with lock(tmp_path):
            pass


def test_a_picture_keeps_the_colours_of_its_curves(tmp_path):
    colours = ["#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#FFFFFF"]
    figure = Figure(figsize=(6, 3))
    axis = figure.subplots()
    for height, colour in enumerate(colours):
        axis.plot([0, 1], [height, height + 1], color=colour, linewidth=3)
    write_file(tmp_path / "picture.png", figure)
    picture = Image.open(tmp_path / "picture.png")
    assert picture.mode == "P"
    drawn = {f"#{red:02X}{green:02X}{blue:02X}" for _, (red, green, blue) in picture.convert("RGB").getcolors()}
    assert set(colours) <= drawn


COMMITTED = sorted((Path(results.__file__).parents[1] / "results").glob("*/runs.jsonl"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.parent.name)
def test_a_table_of_rows_without_a_digest_says_that_it_is_old(path):
    """It may have been written before tables named their sources."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    tables = [table.read_text() for table in path.parent.glob("*.md")]
    assert all("kernels" in row for row in rows) or any("**Older than the code**" in table for table in tables)
