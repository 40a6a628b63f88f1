"""`python -m gattn`: the report, and that it finds what is wrong."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from gattn import doctor
from gattn.ops.backends import BACKENDS, cpu
from gattn.ops.backends.cpu import native


@pytest.fixture
def few_cases(monkeypatch):
    """Some of the checks, which take as long as they are many."""
    names = ("dot products, edges", "GAT, packed", "linear attention, all pairs", "masks, edges")
    cases = [case for case in doctor._cases() if case.name in names]
    assert len(cases) == len(names)
    monkeypatch.setattr(doctor, "_cases", lambda: iter(cases))


def test_the_report(few_cases, capsys, monkeypatch):
    monkeypatch.setenv("MALLOC_TOP_PAD_", "123")
    doctor.main([])
    printed = capsys.readouterr().out
    for name, tested in doctor.TESTED.items():
        assert re.search(rf"^{name} .*\(tested: {', '.join(tested)}\)$", printed, re.M)
    for text in (f"PyTorch          {torch.__version__}", "MALLOC_TOP_PAD_  123", "triton  ", "pyg-lib  ", "data  "):
        assert text in printed
    assert "cpu              on cpu: 8 of 8 results are right" in printed
    assert "WRONG" not in printed


def test_what_is_wrong_is_named(few_cases, capsys, monkeypatch):
    plain = cpu.Cpu.attend

    def broken(self, call):
        result = plain(self, call)
        return result._replace(out=result.out * 1.001)

    def without_plans(self, call, given):
        return None

    monkeypatch.setattr(cpu.Cpu, "attend", broken)
    monkeypatch.setattr(cpu.Cpu, "plan", without_plans)
    with pytest.raises(SystemExit, match="1"):
        doctor.main([])
    printed = capsys.readouterr().out
    assert "cpu              on cpu: 0 of 8 results are right" in printed
    assert "WRONG: cpu on cpu, dot products, edges, torch.float64: the output is off by" in printed
    assert "Please report this" in printed


@pytest.mark.parametrize(
    "error", [RuntimeError("no such luck"), ValueError("one cannot serve this call"), AssertionError("not equal")]
)
def test_errors_are_wrong_results(few_cases, monkeypatch, error):
    """Only the refusal of a backend is none, whatever an error says."""

    def fails(self, call):
        raise error

    monkeypatch.setattr(cpu.Cpu, "attend", fails)
    monkeypatch.setattr(cpu.Cpu, "plan", lambda self, call, given: None)
    found = [check.error for check in doctor.checks(["cpu"]) if check.backend == "cpu"]
    assert found == [str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"] * 8


def test_kernels_that_are_missing(monkeypatch):
    monkeypatch.setattr(native, "load_error", lambda: "nobody built them")
    assert ("CPU kernels", "none: nobody built them") in doctor.environment()


def test_all_backends_are_looked_at(few_cases, monkeypatch):
    for backend in BACKENDS:
        monkeypatch.setattr(type(backend), "missing", lambda self: None)
    assert {check.backend for check in doctor.checks(["cpu"])} == {"dense", "cpu"}


def test_the_tested_versions_are_those_of_the_project():
    """The oldest that it allows, the pinned ones and the newest; `.ci/run` reads PyTorch's from the same table."""
    root = Path(__file__).parents[1]
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    project, tools = settings["project"], settings["tool"]
    oldest = dict(text.split(">=") for text in project["dependencies"] if ">=" in text)
    named = [text.split()[-1] for text in project["classifiers"] if re.search(r"Python :: \d", text)]
    least_triton = re.match(r"triton>=([\d.]+);", *project["optional-dependencies"]["triton"])[1]
    python, pytorch, pyg, triton = (doctor.TESTED[x] for x in ("Python", "PyTorch", "torch-geometric", "triton"))
    assert project["requires-python"] == f">={python[0]}"
    assert (python[0], python[-1]) == (named[0], named[-1])
    assert [f"cp{version.replace('.', '')}-*" for version in python] == tools["cibuildwheel"]["build"]
    assert (pytorch[0], pyg[0], triton[0]) == (oldest["torch"] + ".0", oldest["torch-geometric"], least_triton + ".0")
    if (root / "constraints.txt").exists():  # not beside an installed wheel
        pinned = dict(re.findall(r"^(\S+)==(\S+)$", (root / "constraints.txt").read_text(), re.M))
        assert pinned["torch"] in pytorch
        assert pinned["torch-geometric"] == pyg[-1]
        assert pinned["triton"] == triton[pytorch.index(pinned["torch"])]
        assert "import TESTED" in (root / ".ci" / "run").read_text()
    readme = (root / "README.md").read_text()
    assert f"Python {python[0]} or newer, PyTorch {oldest['torch']} or newer, and PyTorch Geometric {pyg[0]}" in readme


@pytest.mark.slow
def test_as_a_command():
    command = [sys.executable, "-m", "gattn", "--speed"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count(" results are right") == 2
    assert "TransformerConv  on cpu: " in ended.stdout
