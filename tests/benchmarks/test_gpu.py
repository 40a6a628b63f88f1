"""The steps of a GPU's first hour; CI runs them with `--dry-run`."""

import argparse
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.framework import options
from benchmarks.framework.benchmark import Benchmark
from benchmarks.gpu import Command, main, run_step, steps
from gattn.ops.backends.triton import forms as launcher
from gattn.ops.backends.triton import layout


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


@pytest.mark.parametrize("name", ["right", "fast", "long"])
def test_options_of_the_commands(name, tmp_path, monkeypatch):
    """A dry run has others than those that a GPU gets."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(options, "device", str)
    monkeypatch.setattr(argparse.ArgumentParser, "exit", lambda self, status=0, message="": pytest.fail(message))
    for command in steps(tmp_path, False)[name]:
        module, *arguments = command.arguments[2:]
        if module == "pytest":
            assert all(Path(file).exists() for file in arguments if file.endswith(".py"))
        elif module.startswith("benchmarks.") and module != "benchmarks.gpu":
            (kind,) = (x for x in vars(importlib.import_module(module)).values() if is_benchmark(x, module))
            assert kind.parse(arguments).device == "cuda"


def is_benchmark(value, module):
    return isinstance(value, type) and issubclass(value, Benchmark) and value.__module__ == module


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """`measure` in Triton's interpreter, for GAT and two choices; returns its rows and whether all were right."""
    monkeypatch.setattr(gpu, "CONVS", ("gat",))
    monkeypatch.setattr(gpu, "DTYPES", ("float32",))
    monkeypatch.setitem(gpu.BACKENDS, "cpu", "triton")

    def run():
        is_right = gpu.measure(tmp_path, "cpu")
        return [json.loads(line) for line in (tmp_path / "tuned.jsonl").read_text().splitlines()], is_right

    return run


def test_choices_are_measured_once(measured, monkeypatch, tmp_path, capsys):
    used, build = [], gpu.build

    def spy(case, inputs=None):
        used.append((launcher._LOADED, launcher._blocks(1, 8, 8, torch.float32)["num_warps"], layout.LONG_ROW))
        return build(case, inputs)

    monkeypatch.setattr(gpu, "build", spy)
    rows, is_right = measured()
    assert is_right
    assert [row["outcome"] for row in rows] == ["ok"] * 5
    assert [row["own_thread"] for row in rows if "host_us" in row] == [True, False]
    assert used == [(512, 1, 128)] * 3 + [(1024, 2, 128), (512, 1, 8)]
    assert (launcher._LOADED, layout.LONG_ROW) == (512, 128)
    assert measured() == (rows, True)
    assert main(["best", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[2].startswith("| gat | 2 × 4 | float32 | ")


def test_a_wrong_choice_and_one_that_fails_have_no_time(measured, monkeypatch):
    build = gpu.build

    def altered(case, inputs=None):
        computation = build(case, inputs)
        if layout.LONG_ROW == 8:
            raise RuntimeError("out of registers")
        if launcher._LOADED == 1024:
            call = computation.call
            computation.call = lambda: call() + 0.01
        return computation

    monkeypatch.setattr(gpu, "build", altered)
    rows, is_right = measured()
    assert not is_right
    assert [row["outcome"] for row in rows[2:]] == ["ok", "WRONG", "failed"]
    assert [row["us"] is not None for row in rows[2:]] == [True, False, False]
    assert "is off by" in rows[3]["reason"]
    assert rows[4]["reason"] == "RuntimeError: out of registers"


def test_the_best_choice_of_each_kernel():
    names = {"layer": "gat", "heads": 8, "channels": 32, "dtype": "float32", "machine": "card", "shape": "mid"}
    times = {gpu.DEFAULT: (3.0, 1.0), gpu.Choice(256): (1.0, 2.0), gpu.Choice(256, 2): (9.0, 9.0)}
    rows = [
        {**names, **choice._asdict(), "outcome": "ok", "us": {"forward": forward, "backward": backward}}
        for choice, (forward, backward) in times.items()
    ]
    wrong = {**rows[0], "outcome": "WRONG", **gpu.Choice(1024)._asdict()}
    assert [tuple(line.values())[5:] for line in gpu.best([*rows, wrong])] == [
        ("all", "4.0", "3.0", "3", "bytes_loaded=256"),
        ("forward", "3.0", "1.0", "3", "bytes_loaded=256"),
        ("backward", "1.0", "1.0", "3", "default"),
    ]
