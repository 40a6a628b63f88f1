"""The benchmarks of drop-in layers, of steps and of their training, and of all scores and distributions."""

import json
import os

import pytest
import torch

import gattn
from benchmarks import families, layers, lists, steps
from benchmarks.framework import measuring
from benchmarks.framework.measuring import check
from benchmarks.framework.processes import BenchmarkError
from benchmarks.kernel_cases import SHAPES, Shape
from benchmarks.training import Train


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


QUICK = ["--allocator", "default", "--threads", "1", "--repeats", "2", "--seconds", "0.02"]


@pytest.fixture
def small(monkeypatch, one_process):
    """Short turns without garbage collection, and a complete graph of ten nodes."""
    monkeypatch.setattr(measuring, "WARM_UP", 0.001)
    monkeypatch.setattr(measuring.gc, "collect", lambda: None)
    monkeypatch.setattr(measuring, "peak_above", lambda function, device: (function(), 10**6))
    monkeypatch.setitem(families.SHAPES, "complete", Shape("complete", 10, 100, 8, 8))


def test_every_layer_is_measured_and_agrees_with_pygs(tmp_path, small, capsys):
    peers = ["gattn", "pyg", "pyg-sorted"]
    layers.Layers.main([*QUICK, "--shape", "tiny", "--peers", *peers, "--out", str(tmp_path)])
    rows = read_rows(tmp_path / "runs.jsonl")
    measured = {(layer, peer) for layer in layers.LAYERS for peer in peers}
    measured -= {("HGTConv, 5 and 10 types", "pyg-sorted")}
    assert {(row["layer"], row["peer"]) for row in rows} == measured | {("gather", "embedding_bag")}
    assert {row["outcome"] for row in rows} == {"ok"}
    assert "…" not in capsys.readouterr().out  # which would be cut
    for name in ("table.md", "forward.md", "memory.md"):
        table = (tmp_path / name).read_text()
        assert all(name in table for name in layers.LAYERS)
    assert "× PyG's best, default allocator" in (tmp_path / "table.md").read_text()


def test_what_takes_long_is_measured_with_memory_kept():
    def peers(allocator):
        options = layers.Layers.parse(["--layers", "AGNNConv", "--allocator", allocator])
        return [case.peer for case in layers.Layers(options, None, None).cases()]

    assert peers("default") == ["embedding_bag", "gattn", "pyg", "pyg-compile"]
    assert {"pyg-sorted", "pyg-sorted-compile"} < set(peers("kept"))


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


def test_every_family_is_measured_and_agrees_with_the_reference(small, tmp_path):
    families.Families.main([*QUICK, "--shapes", "tiny", "complete", "--out", str(tmp_path)])
    rows = read_rows(tmp_path / "runs.jsonl")
    assert [row["family"] for row in rows] == [*families.FAMILIES, *families.USUAL["complete"]]
    assert {row["outcome"] for row in rows} == {"ok"}
    for row in rows:
        is_base = families.FAMILIES[row["family"]].base == row["family"]
        for mode in measuring.MODES:
            assert is_base == ("of_base" not in row[mode])
            assert row[mode]["gathers"]["median"] > 0
    table = (tmp_path / "table.md").read_text()
    assert "| complete | GATv2, ELU | GATv2 |" in table


def test_ratios_are_of_the_same_rounds_and_bytes(monkeypatch):
    """A machine that slows down between rounds changes no ratio."""
    monkeypatch.setattr(families, "turns", lambda *args: [[2.0, 4.0, 6.0], [1.0, 2.0, 3.0], [0.5, 1.0, 1.5]])
    case = families.Case(SHAPES["tiny"][0], "gates of ResGatedGraphConv", 1, 3, 0.1, "kept")
    times = case.times(case.computation())
    line = families.line_of(case, {"outcome": "ok", "peak_bytes": 1, **times})
    assert line["forward, × base"] == line["forward + backward, × base"] == "2.00× (2.00–2.00)"
    assert line["forward, gathers"] == "4.0"
    # Ten nodes and 30 edges; rows of 256 bytes, and an index of 8 bytes per edge and pass.
    of_gat, of_gates = (30 * (gathered * 256 + 8) + 10 * streamed * 256 for gathered, streamed in ((1, 1), (2, 2)))
    assert line["forward, per byte"] == f"{2 * of_gat / of_gates:.2f}×"


def test_families_of_each_shape():
    cases = families.Families(families.Families.parse([]), None, None).cases()
    found = {shape: [case.family for case in cases if case.shape.name == shape] for shape in families.USUAL}
    assert found == {shape: list(names) for shape, names in families.USUAL.items()}
    assert {case.allocator for case in cases} == {"kept"}


def test_lists_beside_their_bound(monkeypatch, tmp_path):
    monkeypatch.setattr(lists, "FLUSHED", 64)
    monkeypatch.setattr(lists, "SHAPES", {"small": Shape("small", 60, 300, 4, 16)})
    monkeypatch.setenv("GATTN_KERNELS_BEFORE", os.environ.get("GATTN_KERNELS", ""))
    lists.ListsOfEdges.main([*QUICK, "--shapes", "small", "--before", "--out", str(tmp_path)])
    rows = read_rows(tmp_path / "runs.jsonl")
    assert {row["outcome"] for row in rows} == {"ok"}
    assert [row["before"] for row in rows].count(True) == len(lists.PASSES)
    for row in rows:
        others = {"bfloat16": {"float32"}, "float32": {"bound", "cold"}}[row["dtype"]]
        others = others | ({"pyg", "pyg_sorted"} if others != {"float32"} and not row["before"] else set())
        for mode in measuring.MODES:
            assert others == row[mode].keys() - {"median", "q1", "q3"}


@pytest.mark.parametrize("kind", ["two", "same", "sums"])
def test_a_bound_that_computes_something_else_is_found(kind):
    edges = torch.randint(40, (2, 300), generator=torch.Generator().manual_seed(0))
    own, first, second = torch.randn(3, 40, 128).unbind()
    given = {"two": first, "same": second, "sums": None}[kind]
    call, out = lists.bound_of(edges, own, given, second, 2)
    call()
    lists.check(out, edges, own, given, second)
    out[3, 5] += 0.01
    with pytest.raises(BenchmarkError, match="something else"):
        lists.check(out, edges, own, given, second)


@pytest.fixture
def small_steps(monkeypatch, small):
    tiny = Shape("tiny", 12, 40, 8, 8, graphs=3, fresh=True)
    monkeypatch.setattr(steps, "STEPS", {name: step._replace(shape=tiny) for name, step in steps.STEPS.items()})


def test_steps_are_measured_and_agrees_with_float64(tmp_path, small_steps):
    tasks, peers = list(steps.STEPS)[4:7], ["gattn", "pyg-sorted"]
    steps.Steps.main([*QUICK, "--tasks", *tasks, "--peers", *peers, "--out", str(tmp_path)])
    rows = read_rows(tmp_path / "runs.jsonl")
    assert [(row["task"], row["peer"]) for row in rows] == [(task, peer) for task in tasks for peer in peers]
    assert {row["outcome"] for row in rows} == {"ok"}
    for row in rows:
        spent = row["parts"]
        assert min(spent.values()) > 0
    assert "× PyG's best" in (tmp_path / "table.md").read_text()


def errors_of_step(case, change=lambda: None):
    references = case.references()[""]
    change()
    computation = case.computation()
    errors = check(computation.compared(computation.forward_backward()), references)
    return [name for name, entry in errors.items() if entry["error"] > entry["budget"]]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("aten::addmm", "products"),
        ("mkldnn::_linear_pointwise", "products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("gattn_attentionBackward", "attention"),
        ("gattn::drop", "dropout"),
        ("gattn_dropBackward", "dropout"),
        ("aten::bernoulli_", "dropout"),
        ("Optimizer.step#Adam.step", "Adam"),
        ("aten::elu", "other"),
    ],
)
def test_parts_of_a_step(name, part):
    assert steps.part_of(name) == part


@pytest.mark.parametrize("task", steps.STEPS)
def test_steps_agree_with_float64(task, small_steps):
    for peer in ("gattn", "pyg"):
        assert errors_of_step(steps.Case(task, peer, 1, 2, 0.1, "default")) == []


def test_a_wrong_step_is_found(small_steps, monkeypatch):
    case = steps.Case("GAT, 3 layers of 4 × 64", "gattn", 1, 2, 0.1, "default")
    assert errors_of_step(case, lambda: monkeypatch.setattr(steps.F, "elu", lambda x: x))


@pytest.mark.parametrize("task", ["typed"])
def test_both_libraries_train_alike(tmp_path, task):
    Train.main(["--tasks", task, "--epochs", "1", "--threads", "1", "--out", str(tmp_path)])
    first, second = read_rows(tmp_path / "runs.jsonl")
    assert first["losses"] == pytest.approx(second["losses"], rel=1e-4)
