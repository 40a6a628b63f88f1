"""The benchmark of exported models."""

import json

import pytest

from benchmarks import deployment
from benchmarks.deployment import MODELS, WAYS, Case, Deployment
from benchmarks.framework.measuring import check

QUICK = ["--ways", "eager", "exported", "--threads", "1", "--repeats", "2", "--seconds", "0.1"]


def test_a_model_is_measured(tmp_path, one_process):
    Deployment.main([*QUICK, "--models", "TransformerLM", "--out", str(tmp_path)])
    rows = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [(row["way"], row["outcome"]) for row in rows] == [("eager", "ok"), ("exported", "ok")]
    assert "× eager" in (tmp_path / "table.md").read_text()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("way", ["exported with kernels", "wrong"])
def test_a_wrong_result_is_found(model, way, monkeypatch):
    monkeypatch.setitem(WAYS, "wrong", lambda model, of: lambda *inputs: model(*inputs) * 0.999)
    case = Case(model, way, 1, 2, 0.1)
    computation = case.computation()
    errors = check(computation.compared(computation.forward_backward()), case.references()[""])
    assert all(entry["error"] <= entry["budget"] for entry in errors.values()) == (way != "wrong")


def test_kernels_are_in_the_program_where_they_are_asked_for():
    of = MODELS["GAT"]
    for backend, expected in (("auto", False), ("cpu", True)):
        program = deployment.exported(of.make().eval(), of, backend)
        assert any("gattn" in str(node.target) for node in program.graph.nodes) == expected
