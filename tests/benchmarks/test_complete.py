"""The benchmark of attention among all nodes."""

import itertools
import json

import pytest
import torch

import gattn
from benchmarks import complete
from benchmarks.framework import measuring
from benchmarks.framework.measuring import MODES, check

QUICK = ["--quick", "--threads", "1", "--repeats", "2", "--seconds", "0.01"]


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def cases_of(*arguments):
    return complete.Complete(complete.Complete.parse(list(arguments)), None, None).cases()


def case(part, nodes=64, peer="gattn", graphs=1):
    nodes = sum(complete.sizes_of(graphs)) if graphs > 1 else nodes
    return complete.Case(part, nodes, graphs, peer, 1, 2, 0.01, "kept")


def is_right(case):
    """Whether its results agree with the reference."""
    computation = case.computation()
    results = computation.compared(computation.forward_backward())
    if not case.has_gradients:
        results = {name: result for name, result in results.items() if not name.startswith("gradient")}
    return {
        name: entry["error"] <= entry["budget"] for name, entry in check(results, case.references()[case.kind]).items()
    }


@pytest.fixture
def small(monkeypatch, one_process):
    """Few nodes, and no garbage collection."""
    monkeypatch.setattr(measuring.gc, "collect", lambda: None)
    monkeypatch.setattr(measuring, "peak_above", lambda function, device: (function(), 10**6))
    sizes = {"linear": (16, 32), "ragged": (2,), "softmax": (40,), "window": (50,), "decoding": (60,), "rows": (12,)}
    monkeypatch.setattr(complete, "QUICK", sizes)


@pytest.mark.parametrize("checked", [complete.CHECKED, 10])
def test_everything_is_measured_and_agrees_with_the_reference(checked, small, tmp_path, monkeypatch):
    monkeypatch.setattr(complete, "CHECKED", checked)
    complete.Complete.main([*QUICK, "--out", str(tmp_path)])
    rows = read_rows(tmp_path / "runs.jsonl")
    expected = {(part, peer) for part, peers in complete.PEERS.items() for peer in peers if peer != "flex"}
    assert {(row["part"], row["peer"]) for row in rows} == expected
    assert {row["outcome"] for row in rows} == {"ok"}
    for row in rows:
        has_gradients = row["part"].startswith("ragged") or (checked > 10 and "decoding" not in row["part"])
        assert has_gradients == any(name.startswith("gradient") for name in row["errors"])
        assert row["allocator"] == "default"
    table = (tmp_path / "table.md").read_text()
    assert all(f"| {part} |" in table for part in complete.PEERS)
    assert (tmp_path / "complete.png").exists()


@pytest.mark.parametrize("part", complete.PEERS)
def test_a_wrong_result_is_found(part, monkeypatch):
    tested = case(part, graphs=3 if part.startswith("ragged") else 1)
    assert all(is_right(tested).values())
    wrong = (gattn.nn.MultiheadAttention, "forward") if part.startswith("window") else (gattn, "attend")
    if part in complete.RAGGED_LAYERS:
        assert all(is_right(case(part, graphs=3, peer="pyg")).values())
        wrong = getattr(gattn.nn, complete.RAGGED_LAYERS[part]), "forward"
    original = getattr(*wrong)

    def lose_a_thousandth(*args, **kwargs):
        result = original(*args, **kwargs)
        return result * 0.999 if isinstance(result, torch.Tensor) else (result[0] * 0.999, result[1])

    monkeypatch.setattr(*wrong, lose_a_thousandth)
    found = is_right(tested)
    assert not found["output"]
    # Near the kink of Performer's ReLU, rounding decides about the input's gradient.
    decisive = "gradient of attn_out.weight" if part.endswith("Performer") else "gradient of x"
    assert not any(found[name] for name in (decisive, "gradient of value") if name in found)


@pytest.mark.parametrize("part", ["sparse bias", "bucket bias", "distance", "window, ALiBi", "window, learnt"])
def test_a_missing_bias_is_found(part, monkeypatch):
    """The reference has the bias of each pair."""
    tested = case(part)
    monkeypatch.setattr(complete, "CHECKED", 10)  # a missing gradient would be an error of its own
    expected = tested.references()[part]
    without = case("window" if part.startswith("window") else "none").computation()
    results = {name: without.forward() for name in ("output", "output without autograd")}
    errors = check(results, expected)
    assert all(entry["error"] > 100 * entry["budget"] for entry in errors.values())


@pytest.mark.slow
@pytest.mark.parametrize("checked", [complete.CHECKED, 10])
def test_flex_attention(checked, monkeypatch):
    monkeypatch.setattr(complete, "CHECKED", checked)
    tested = case("bucket bias", peer="flex")
    assert is_right(tested) == {"output": True, "output without autograd": True}
    assert set(tested.times(tested.computation())) == {"forward"}
    assert all(is_right(case("softcap", peer="flex")).values())


def test_default_cases():
    cases = cases_of()
    assert {case.allocator for case in cases} == {"kept"}
    largest = {}
    for found in cases:
        largest[found.part, found.peer] = max(found.nodes, largest.get((found.part, found.peer), 0))
    assert largest["linear", "gattn"] == largest["linear", "einsum"] == 1_000_000
    assert largest["linear causal", "gattn"] == 262_144
    assert largest["bucket bias", "gattn"] == largest["bucket bias", "flex"] == largest["none", "sdpa"] == 16_384
    assert largest["bucket bias", "dense"] == largest["sparse bias", "dense"] == largest["distance", "gattn"] == 4096
    assert largest["window, learnt", "gattn"] == 32_000
    ragged = next(case for case in cases if case.part == "ragged")
    assert len(ragged.sizes()) == 64
    assert sum(ragged.sizes()) == ragged.nodes
    assert min(ragged.sizes()) >= 10
    assert max(ragged.sizes()) <= 500
    assert {found.part for found in cases_of("--parts", "linear")} == {"linear"}


def test_cases_with_the_same_references_are_adjacent():
    problems = [case.problem() for case in cases_of("--allocator", "both")]
    changes = sum(first != second for first, second in itertools.pairwise(problems))
    assert changes + 1 == len(set(problems))


def test_options_of_quick_runs():
    (found,) = {(case.repeats, case.seconds, case.allocator) for case in cases_of("--quick")}
    assert found == (3, 0.1, "default")
    (found,) = {(case.repeats, case.seconds, case.allocator) for case in cases_of(*QUICK, "--allocator", "kept")}
    assert found == (2, 0.01, "kept")


@pytest.mark.parametrize(("seconds", "calls"), [(0.001, None), (1.0, 3), (7.0, 2), (20.0, 1)])
def test_long_calls_are_timed_less_often(seconds, calls, monkeypatch):
    monkeypatch.setattr(complete, "duration", lambda function, device: seconds)
    monkeypatch.setattr(complete, "timed", lambda *args: {"times": None})
    tested = case("none")
    times = tested.times(tested.computation())
    assert list(times) == list(MODES)
    for found in times.values():
        assert found["times"] == (calls and [seconds] * calls)


def row(forward, backward, peak):
    times = {
        mode: dict.fromkeys(("q1", "median", "q3"), seconds)
        for mode, seconds in zip(MODES, (forward, backward), strict=True)
    }
    return {"outcome": "ok", "reason": "", "peak_bytes": peak, **times}


def test_ratios_and_exponents():
    rows = {
        case("none"): row(1.0, 4.0, 10**6),
        case("none", peer="sdpa"): row(2.0, 2.0, 3 * 10**6),
        case("sparse bias"): row(3.0, 5.0, 10**6),
        case("sparse bias", peer="dense"): row(6.0, 20.0, 5 * 10**6),
        case("none", 128): row(4.0, 32.0, 10**6),
        case("linear"): row(1.0, 2.0, 10**6),
        case("linear causal"): row(1.5, 5.0, 10**6),
    }
    lines = {(found.part, found.nodes, found.peer): complete.line_of(found, rows) for found in rows}
    mode = "forward + backward"
    assert lines["none", 64, "gattn"][f"{mode}, × base"] == "2.00×"
    assert lines["none", 64, "sdpa"][f"{mode}, × base"] == "–"
    assert lines["none", 64, "sdpa"][f"{mode}, × gattn"] == "0.50×"
    assert lines["none", 64, "sdpa"]["forward, × gattn"] == "2.00×"
    assert lines["none", 64, "sdpa"]["peak, × gattn"] == "3.0×"
    assert lines["none", 64, "gattn"]["peak, × gattn"] == "–"
    assert lines["sparse bias", 64, "gattn"][f"{mode}, × base"] == "2.50×"
    assert lines["sparse bias", 64, "dense"][f"{mode}, × base"] == "10.00×"
    assert lines["sparse bias", 64, "dense"][f"{mode}, × gattn"] == "4.00×"
    assert lines["linear causal", 64, "gattn"][f"{mode}, × base"] == "2.50×"
    assert lines["none", 64, "gattn"]["exponent"] == "–"
    assert lines["none", 128, "gattn"]["exponent"] == "3.00"
    assert lines["none", 128, "gattn"][f"{mode}, × base"] == "–"


def test_a_report_without_results(small, tmp_path, monkeypatch):
    monkeypatch.setattr(complete.Case, "computation", lambda case: 1 / 0)
    with pytest.raises(SystemExit) as exit_info:
        complete.Complete.main([*QUICK, "--out", str(tmp_path)])
    assert "the report could not be made" not in exit_info.value.code
    table = (tmp_path / "table.md").read_text()
    assert table.count("| failed |") >= len(complete.PEERS)
    assert "- linear, 16 nodes, gattn, default memory: failed: ZeroDivisionError" in table
