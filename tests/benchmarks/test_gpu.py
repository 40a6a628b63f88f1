"""The steps of a GPU's first hour; CI runs them with `--dry-run`."""

import sys

import pytest

from benchmarks import gpu
from benchmarks.gpu import Command, main, run_step, steps


def command(name, code, **options):
    return Command(name, [sys.executable, "-c", code], **options)


def test_a_step_goes_on_where_it_ended(tmp_path, capfd):
    mark = tmp_path / "mark"
    good = command("good", f"open({str(mark)!r}, 'a').write('x'); print('found')", alone=False)
    bad = command("bad", f"import os, sys; sys.exit(not os.path.exists({str(tmp_path / 'mended')!r}))")
    assert not run_step([good, bad], tmp_path, {})
    assert (tmp_path / "good.txt").read_text() == "found\n"
    (tmp_path / "mended").touch()
    assert run_step([good, bad], tmp_path, {})
    assert mark.read_text() == "x"
    assert [line.split(",")[0] for line in capfd.readouterr().out.splitlines()] == ["good: ok", "bad: 1", "bad: ok"]


def test_a_step_ends_in_time_and_keeps_what_was_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "LIMIT", 2)
    slow = command("slow", "import time; print('a row', flush=True); time.sleep(60)")
    assert not run_step([slow, command("after", "")], tmp_path, {})
    assert (tmp_path / "slow.txt").read_text() == "a row\n"
    assert not (tmp_path / "after.txt").exists()
    assert "slow: out of time" in capsys.readouterr().out


@pytest.mark.parametrize("dry_run", [False, True])
def test_commands_have_names_of_their_own(dry_run, tmp_path):
    names = [command.name for commands in steps(tmp_path, dry_run).values() for command in commands]
    assert len(set(names)) == len(names)


def test_without_a_gpu(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["right"])
    assert ended.value.code == 2
    assert "no GPU" in capsys.readouterr().err
