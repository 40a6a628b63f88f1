"""The benchmark of large graphs."""

import json
import os
import signal
import subprocess
import time

import pytest
import torch
from rich.console import Console

import gattn
from benchmarks import scale
from benchmarks.framework.measuring import check

QUICK = ["--graphs", "1e4", "--allocators", "default", "--threads", "1", "--repeats", "2", "--seconds", "0.1"]


def read_rows(path):
    return [json.loads(line) for line in (path / "runs.jsonl").read_text().splitlines()]


def case(part, peer="gattn", name="1e4"):
    return scale.Case(scale.GRAPHS[name], part, peer, 1, 2, 0.1, "default", 8)


def test_parts_and_their_wholes():
    wholes = {"gather": None, "layer": case("step"), "step": case("recomputed"), "recomputed": None}
    assert {part: case(part).whole for part in wholes} == wholes


@pytest.mark.slow
def test_peers_agree_with_float64(tmp_path):
    scale.Scale.main([*QUICK, "--peers", "gattn", "pyg", "--out", str(tmp_path)])
    rows = read_rows(tmp_path)
    assert [(row["part"], row["peer"]) for row in rows] == [
        ("gather", "embedding_bag"),
        *((part, peer) for part in ("layer", "step", "recomputed") for peer in ("gattn", "pyg")),
    ]
    assert {row["outcome"] for row in rows} == {"ok"}
    assert all(row["process_bytes"] > row["peak_bytes"] > 0 for row in rows)
    assert (tmp_path / "scale.png").exists()


@pytest.mark.parametrize(("name", "factor", "is_right"), [("", 1.0, True), ("0.att_src", 1.01, False)])
def test_a_wrong_step_is_found(name, factor, is_right):
    """A layer's parameter that is off changes the logits of the nodes that are compared."""
    step = case("step")
    computation = step.computation()
    if name:
        computation.leaves[name].data.mul_(factor)
    errors = check(computation.compared(computation.forward_backward()), step.references()[""])
    assert all(entry["error"] <= entry["budget"] for entry in errors.values()) == is_right


@pytest.mark.slow
def test_a_killed_benchmark_keeps_its_rows_and_measures_the_rest(tmp_path, start):
    options = [*QUICK, "--peers", "gattn", "--out", str(tmp_path)]
    process = start("-m", "benchmarks.scale", *options, stdout=subprocess.DEVNULL)
    rows, deadline = tmp_path / "runs.jsonl", time.monotonic() + 120
    while not (rows.exists() and rows.read_text()) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = rows.read_text()
    assert 0 < before.count("\n") < 4
    scale.Scale.main(options)
    assert rows.read_text().startswith(before)
    parts = ["gather", "layer", "step", "recomputed"]
    assert [row["part"] for row in read_rows(tmp_path)] == parts
    table = (tmp_path / "table.md").read_text()
    assert all(f"| {part} |" in table for part in parts)


def test_the_neighbourhood_decides_all_that_is_compared():
    """In float64, the part of the graph that labelled nodes see gives what the whole graph gives."""
    step = case("step")
    edge_index, labelled = step._draw()
    whole = step._build("pyg", step._features().double(), edge_index, labelled)
    results, expected = whole.compared(whole.forward_backward()), step.references()[""]
    assert results.keys() == expected.keys()
    for name, result in results.items():
        torch.testing.assert_close(result.detach(), expected[name]["exact"], rtol=1e-9, atol=1e-9)


def test_recomputing_gives_the_same():
    step, recomputed = (case(part).computation().forward_backward() for part in ("step", "recomputed"))
    assert step.keys() == recomputed.keys()
    for name, result in step.items():
        torch.testing.assert_close(recomputed[name], result)


@pytest.mark.slow
def test_what_does_not_fit_is_a_result(tmp_path):
    """The allocation fails where the limit says so, and not the benchmark."""
    options = [*QUICK, "--peers", "pyg", "--parts", "step", "--memory", "1", "--out", str(tmp_path)]
    options[1] = "1e6"
    scale.Scale.main(options)
    (row,) = read_rows(tmp_path)
    assert row["outcome"] == "out of memory"
    assert "out of memory" in (tmp_path / "table.md").read_text()


def test_shuffled_communities_are_the_same_graph():
    ordered, shuffled = (
        scale.Case(scale.Graph("", 3000, 9000, kind), "layer", "gattn", 1, 2, 0.1, "default", 8)._draw()[0]
        for kind in ("communities", "shuffled")
    )
    assert torch.equal(*(ordered // scale.COMMUNITY))
    assert not torch.equal(*(shuffled // scale.COMMUNITY))
    degrees = [[row.bincount(minlength=3000).sort().values for row in edges] for edges in (ordered, shuffled)]
    torch.testing.assert_close(*degrees)


@pytest.mark.slow
def test_reordered_steps_agree_with_float64(tmp_path, monkeypatch):
    monkeypatch.setattr(scale.Scale, "unordered", lambda self: scale.unordered(1500)[1:2])
    options = ["--parts", "reordered", "--methods", "none", "rcm", "--quick", "--threads", "1", "--out", str(tmp_path)]
    scale.Scale.main(options)
    rows = read_rows(tmp_path)
    assert {row["outcome"] for row in rows} == {"ok"}
    assert all(("ordering" in row) == (row["method"] == "rcm") for row in rows)
    assert not (tmp_path / "table.md").exists()
    scale.Scale.main(options)
    assert read_rows(tmp_path) == rows


def reordered(graph, method):
    return scale.Reordered(graph, "reordered", "gattn", 1, 2, 0.1, "default", 8, method)


@pytest.mark.parametrize("graph", scale.unordered(500)[:3], ids=lambda graph: graph.name)
@pytest.mark.parametrize("method", ["rcm", "degree"])
def test_an_order_changes_no_result(graph, method):
    before, after = reordered(graph, "none"), reordered(graph, method)
    assert before.problem() == after.problem()
    assert before._draw()[0].shape == (2, graph.edges)
    results, expected = (case._drawn().forward_backward() for case in (after, before))
    for name, result in results.items():
        torch.testing.assert_close(result, expected[name], rtol=1e-4, atol=1e-4)
    permutation = after._reorder(after._draw()[0]).permutation
    assert not torch.equal(permutation, torch.arange(graph.nodes))


def test_photo_is_the_data_set(load):
    data, graph = load("photo"), scale.unordered(500)[3]
    assert torch.equal(reordered(graph, "none")._draw()[0], data.edge_index)
    assert (graph.nodes, graph.edges) == (data.num_nodes, data.num_edges)


def test_the_table_of_orders(tmp_path):
    graph = scale.unordered(1500)[1]
    times = {
        name: {"q1": seconds, "median": seconds, "q3": seconds}
        for name, seconds in (("before", 0.3), ("after", 0.2), ("ordering", 0.35))
    }
    versions = dict.fromkeys(("gattn", "torch", "torch-geometric", "machine", "python"), "1")
    row = {"outcome": "ok", "threads": 1, "memory": 8, **versions}
    arguments = ["--parts", "reordered", "--out", str(tmp_path)]
    with scale.Scale.session(scale.Scale.parse(arguments), Console(quiet=True)) as benchmark:
        benchmark.report(
            {
                reordered(graph, "none"): {**row, "forward_backward": times["before"]},
                reordered(graph, "rcm"): {**row, "forward_backward": times["after"], "ordering": times["ordering"]},
            }
        )
    table = (tmp_path / "reordered.md").read_text()
    assert "| mesh | 1,444 | 12,544 | default | none | – | 300 (300–300) | 1.00× | – |" in table
    assert "| mesh | 1,444 | 12,544 | default | rcm | 350 (350–350) | 200 (200–200) | 1.50× | 4 |" in table


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ((3.0, 2.0, 1.0), "3"),
        ((2.5, 2.0, 1.0), "3"),
        ((0.1, 2.0, 1.0), "1"),
        ((1.0, 1.0, 1.0), "never"),
        ((None, 2.0, 1.0), "–"),
        ((1.0, None, 1.0), "–"),
        ((1.0, 2.0, None), "–"),
    ],
)
def test_when_an_order_pays_off(times, expected):
    assert scale.pays_off(*times) == expected


def test_what_cannot_be_reordered_is_left_out(tmp_path, monkeypatch):
    def unavailable(name):
        raise gattn.datasets.DatasetUnavailableError(f"{name} is missing")

    monkeypatch.setattr(scale.gattn.datasets, "load", unavailable)
    monkeypatch.setattr(scale.importlib.util, "find_spec", lambda name: None)
    arguments = ["--parts", "reordered", "--quick", "--out", str(tmp_path)]
    with scale.Scale.session(scale.Scale.parse(arguments), Console(quiet=True)) as benchmark:
        cases = benchmark.cases()
        assert benchmark.skipped.keys() == {"metis", "photo"}
    assert {case.method for case in cases} == {"none", "rcm", "degree"}
    assert {case.graph.name for case in cases} == {"power law", "mesh", "communities"}
    with pytest.raises(SystemExit, match="pip install pymetis"):
        scale.Scale.main([*arguments, "--methods", "metis"])


def test_exponents_compare_with_a_tenth():
    rows = {
        case("step", name=name): {"forward_backward": {"median": seconds}}
        for name, seconds in (("1e4", 0.1), ("1e5", 1.0), ("1e6", 20.0))
    }
    assert scale.exponent(case("step", name="1e5"), rows) == "1.00"
    assert scale.exponent(case("step", name="1e6"), rows) == "1.30"
    assert scale.exponent(case("step", name="1e4"), rows) == "–"
    assert scale.exponent(case("step", name="products"), rows) == "–"
