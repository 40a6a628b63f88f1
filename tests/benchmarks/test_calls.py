"""The benchmark of single calls."""

import gc
import json

import pytest
import torch

from benchmarks import calls
from benchmarks.call_cases import CALLS, Draw, neighbourhood
from benchmarks.calls import Calls, Case, in_turns
from benchmarks.framework import measuring
from benchmarks.framework.measuring import with_gradients
from benchmarks.framework.results import ALLOCATORS

QUICK = ["--allocator", "default", "--repeats", "4", "--seconds", "0.1"]


@pytest.fixture
def run(tmp_path, one_process, monkeypatch):
    """Runs the benchmark for a short time; returns its rows."""
    monkeypatch.setattr(measuring, "WARM_UP", 0.01)

    def run(*arguments):
        Calls.main([*QUICK, *arguments, "--out", str(tmp_path)])
        return [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]

    return run


@pytest.fixture
def compiled(monkeypatch):
    """Nothing is compiled; returns the options of what would have been."""
    made = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: made.append(options) or function)
    return made


FEW = ["10 nodes, attend, CompleteGraph", "one decoded token, KeyValueCache"]


@pytest.mark.parametrize("names", [FEW, pytest.param(list(CALLS), marks=pytest.mark.slow)], ids=["few", "all"])
def test_every_call_is_measured_and_agrees_with_its_peer(names, run, compiled, tmp_path):
    rows = run("--calls", *names)
    assert compiled == [{"dynamic": True}] * sum(sum(CALLS[name].compiled) for name in names)
    assert [(row["call"], row["outcome"], row["threads"]) for row in rows] == [(name, "ok", 1) for name in names]
    assert all(row["forward"]["rounds"] >= 3 for row in rows)
    assert [row["call"] for row in rows if "forward_backward" not in row] == FEW[1:]
    table = (tmp_path / "table.md").read_text()
    assert all(f"| {name} | {CALLS[name].peer} | default |" in table for name in names)


@pytest.mark.parametrize("is_ours", [True, False])
@pytest.mark.parametrize("name", FEW)
def test_a_wrong_result_of_either_side_is_not_timed(name, is_ours, run, tmp_path, monkeypatch):
    right = CALLS[name]
    made = []

    def build(is_mine, draw):
        built = right.build(is_mine, draw)
        made.append(is_mine)
        is_reference = len(made) <= 2  # in float64 and in float32
        if is_mine == is_ours and not is_reference:
            call = built.computation.call
            built.computation.call = lambda: call() * 0.999
        return built

    monkeypatch.setitem(CALLS, name, right._replace(build=build))
    monkeypatch.setattr(calls, "in_turns", lambda *args, **options: pytest.fail("something was timed"))
    with pytest.raises(SystemExit, match=f"WRONG: output.* of {'gattn' if is_ours else 'the peer'} is off by"):
        run("--calls", name)
    assert "WRONG" in (tmp_path / "table.md").read_text()


def test_both_sides_take_turns_without_garbage_collection(monkeypatch):
    monkeypatch.setattr(measuring, "calls_per_batch", lambda function: 2)
    called = []
    found = in_turns(lambda: called.append(("ours", gc.isenabled())), lambda: called.append(("theirs", False)), 4, 9.0)
    assert [name for name, _ in called[::2]] == ["ours", "theirs", "theirs", "ours"] * 2
    assert called[::2] == called[1::2]
    assert not any(is_collecting for _, is_collecting in called)
    assert gc.isenabled()
    assert found["rounds"] == 4


@pytest.mark.parametrize(("units", "seconds", "rounds"), [(1, 9.0, 4), (5, 9.0, 4), (1, 0.0, 3)])
def test_times_and_their_ratio(units, seconds, rounds, monkeypatch):
    monkeypatch.setattr(measuring, "calls_per_batch", lambda function: 2)
    clock = [0]
    monkeypatch.setattr(measuring.time, "perf_counter_ns", lambda: clock[0])

    def work(duration):
        clock[0] += duration

    found = in_turns(lambda: work(1000), lambda: work(3000), 4, seconds, units)
    assert found["rounds"] == rounds
    for name, expected in (("ours", 1e-6 / units), ("theirs", 3e-6 / units), ("ratio", 3)):
        assert found[name] == pytest.approx(dict.fromkeys(("median", "q1", "q3"), expected))


@pytest.mark.parametrize(
    "name",
    [
        "molecules, GPSConv",
        "sampled, GATConv",
        "training step, molecules, TransformerConv",
        pytest.param("training step, two hops, GATv2Conv", marks=pytest.mark.slow),
    ],
)
def test_both_sides_compute_with_the_same_numbers(name):
    ours, theirs = (CALLS[name].build(is_ours, Draw(torch.float64)).computation for is_ours in (True, False))
    assert ours.leaves.keys() == theirs.leaves.keys()
    assert all(torch.equal(leaf, theirs.leaves[key]) for key, leaf in ours.leaves.items())
    for mine, other in zip(with_gradients(ours)(), with_gradients(theirs)(), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize(("name", "count"), [("compiled", 2), ("compiled or not", 1)])
def test_what_is_compiled_is_compiled_before_it_is_timed(name, count, run, monkeypatch):
    name, compiled, settled, sides = f"training step, molecules, GATv2Conv, {name}", [], [], []

    def compile(function, **options):
        compiled.append(lambda: function())
        return compiled[-1]

    def in_turns(ours, theirs, **options):
        assert settled == compiled
        assert len(compiled) == count
        sides.append((ours in compiled, theirs in compiled))
        return found

    found = calls.in_turns(lambda: None, lambda: None, 3, 0.1)
    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(calls, "settle", lambda computation: settled.append(computation.call))
    monkeypatch.setattr(calls, "in_turns", in_turns)
    (row,) = run("--calls", name)
    assert row["outcome"] == "ok"
    assert sides[0] == (True, count == 2)


def test_two_hops_from_the_seeds():
    graph = neighbourhood(Draw(torch.float32))
    source, target = graph.edge_index
    assert graph.targets == 1024
    assert 50_000 < target.numel() < 52_000
    degrees = target.bincount()
    assert (degrees.min(), degrees.max()) == (3, 10)
    assert source.max() < graph.nodes == 30_000
    assert source[target < 1024].max() < target.max() + 1 == 7800  # each source of a seed has sources of its own


def test_memory_is_kept_where_it_is_asked_for():
    assert Case("", 1, 1, 1.0, "kept").environment == ALLOCATORS["kept"]
    assert str(Case("one", 1, 1, 1.0, "kept")) == "one, kept memory"


def test_the_parts_of_a_block():
    """Both sides of `GPSConv` call the layer and the attention, which are measured alone, too."""
    wholes = {call: whole.call for call in CALLS if (whole := Case(call, 1, 1, 1.0, "kept").whole)}
    assert wholes == dict.fromkeys(
        ("molecules, TransformerConv", "molecules, GPSConv's attention"), "molecules, GPSConv"
    )
    assert "molecules, GPSConv" in CALLS
