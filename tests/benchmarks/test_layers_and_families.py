"""The benchmarks of drop-in layers, of their training, and of all scores and distributions."""

import json

import pytest

import gattn
from benchmarks import families, layers
from benchmarks.framework.measuring import check
from benchmarks.kernel_cases import SHAPES
from benchmarks.training import Train


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


QUICK = ["--shape", "tiny", "--allocator", "default", "--threads", "1", "--repeats", "2", "--seconds", "0.1"]


def test_every_layer_is_measured_and_agrees_with_pygs(tmp_path):
    layers.Layers.main([*QUICK, "--out", str(tmp_path)])
    rows = read_rows(tmp_path / "runs.jsonl")
    assert {(row["layer"], row["peer"]) for row in rows} == {(x, y) for x in layers.LAYERS for y in ("gattn", "pyg")}
    assert {row["outcome"] for row in rows} == {"ok"}
    table = (tmp_path / "table.md").read_text()
    assert all(name in table for name in layers.LAYERS)


class Wrong(gattn.nn.AGNNConv):
    """It loses a thousandth of its output."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs) * 0.999


@pytest.mark.parametrize(("layer", "is_right"), [(gattn.nn.AGNNConv, True), (Wrong, False)])
def test_a_wrong_layer_is_found(layer, is_right, monkeypatch):
    monkeypatch.setitem(layers.LAYERS, "AGNNConv", layers.LAYERS["AGNNConv"]._replace(ours=layer))
    case = layers.Case(SHAPES["tiny"][0], "AGNNConv", "gattn", 1, 2, 0.1, "default")
    computation = case.computation()
    errors = check(computation.compared(computation.forward_backward()), case.references()[""])
    assert all(entry["error"] <= entry["budget"] for entry in errors.values()) == is_right


@pytest.mark.slow  # a process for each of some thirty families
def test_every_family_is_measured_and_agrees_with_the_reference(tmp_path):
    quick = [option for option in QUICK if option not in ("--allocator", "default")]
    families.Families.main([*quick, "--out", str(tmp_path)])
    rows = read_rows(tmp_path / "runs.jsonl")
    assert {row["family"] for row in rows} == {"gather", *families.FAMILIES}
    assert {row["outcome"] for row in rows} == {"ok"}
    assert "× nearest" in (tmp_path / "table.md").read_text()


@pytest.mark.parametrize("task", ["typed"])
def test_both_libraries_train_alike(tmp_path, task):
    Train.main(["--tasks", task, "--epochs", "1", "--threads", "1", "--out", str(tmp_path)])
    first, second = read_rows(tmp_path / "runs.jsonl")
    assert first["losses"] == pytest.approx(second["losses"], rel=1e-4)
