import secrets
import time

import pytest
import torch

from gattn.graphs import edge_lists
from tests.ops import fuzz, fuzz_compiled, fuzz_edits, fuzz_threads

#: How many cases of each kind are always the same ones, and how many have a fresh seed.
CASES = {
    "call": (120, 40),
    "variant": (60, 20),
    "formula": (100, 40),
    "layer": (20, 12),
    "conv": (36, 12),
    "sequence": (80, 30),
    "blocks": (30, 10),
    "edits": (30, 10),
    "sharded": (60, 20),
    "threads": (12, 6),
    "compiled": (2, 0),
}

each_kind = pytest.mark.parametrize("kind", fuzz.KINDS)


def run_cases(kind, count, first=0):
    for seed in range(first, first + count):
        fuzz.case(seed, kind)


@each_kind
def test_cases(kind):
    run_cases(kind, CASES[kind][0])


def test_cases_of_a_fresh_seed(capsys):
    first = secrets.randbelow(10**9)
    with capsys.disabled():
        print(f"\nfuzzing from seed {first} on")
    for kind, (_, count) in CASES.items():
        run_cases(kind, count, first)


def halved(name, altered):
    """Halves the largest element of a result, where there is one that is not tiny."""

    def alter(results):
        result = results.get(name)
        if not altered and result is not None and result.numel() and 0.1 < result.abs().max() < torch.inf:
            flat = result.flatten()
            flat[flat.abs().argmax()] *= 0.5
            results[name] = flat.view(result.shape)
            altered.append(name)

    return alter


def message_of_a_planted_error(kind, name):
    """What is said of the first case in which there is something to alter, and its seed."""
    altered = []
    for seed in range(200):
        message = None
        try:
            fuzz.case(seed, kind, halved(name, altered))
        except AssertionError as error:
            message = str(error)
        assert (message is None) == (not altered)
        if altered:
            return message, seed
    raise AssertionError(f"no case has {name}")


@pytest.mark.parametrize("name", ["out", "weights", *(f"grad of {name}" for name in fuzz.DIFFERENTIABLE)])
def test_a_wrong_result_of_a_call_is_found_and_named(name):
    message, seed = message_of_a_planted_error("call", name)
    assert f"{name} is off by" in message
    assert f"--kinds call --seed {seed}" in message


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("formula", "out"),
        ("formula", "weights"),
        ("formula", "grad of sink"),
        ("formula", "second grad of query"),
        ("layer", "out"),
        ("layer", "weights"),
        ("layer", "grad of x"),
        ("layer", "grad of targets"),
        ("layer", "grad of edge_attr"),
        ("layer", "grad of lin_edge.weight"),
        ("layer", "grad of in_proj_weight"),
        ("sequence", "out"),
        ("sequence", "weights"),
        ("sequence", "weights of block 1"),
        ("sequence", "grad of query"),
        ("sequence", "grad of vector"),
        ("sequence", "grad of bias"),
        ("sequence", "grad of centres"),
        ("edits", "out"),
        ("edits", "edges"),
        ("edits", "grad of value"),
        ("sharded", "out"),
        ("sharded", "grad of key"),
        ("sharded", "grad of edge"),
        ("sharded", "grad of k.weight"),
        ("threads", "out"),
        ("threads", "grad of key"),
        ("compiled", "out"),
        ("compiled", "grad of x"),
    ],
)
def test_a_wrong_result_is_found_and_named(kind, name):
    message, seed = message_of_a_planted_error(kind, name)
    assert f"{name} is off by" in message
    assert f"--kinds {kind} --seed {seed}" in message


def test_results_in_float64_are_held_to_it():
    """An error as large as float32 makes is found."""

    def run(dtype, reference):
        return {"out": (torch.arange(1.0, 9.0, dtype=dtype) / 3).exp()}

    def alter(results):
        results["out"] *= 1 + 1e-10

    fuzz.compare_types(run, torch.float64, 8)
    with pytest.raises(AssertionError, match="out is off by"):
        fuzz.compare_types(run, torch.float64, 8, alter)


def test_an_output_of_a_wider_type_does_not_narrow_the_tolerance():
    """An `out_bias` in float64 is added to what was computed in float32; gradients are as exact as float32."""
    fuzz.case(552393952, "call")


def test_a_number_for_a_term_of_a_wrong_size_is_found(monkeypatch):
    """The function leaves its term out, which must show both where that is right and where it is wrong."""
    function = fuzz_compiled.attention(1)

    def lenient(x, base, vector, per_edge):
        return function(x, base, vector, None)

    monkeypatch.setattr(fuzz_compiled, "CALLS", fuzz_compiled.CALLS[1:2])
    monkeypatch.setattr(fuzz_compiled, "LAYERS", ())
    monkeypatch.setattr(fuzz_compiled, "functions", lambda number, backend: (function, lenient))
    messages = []
    for seed in range(20):
        try:
            fuzz.case(seed, "compiled")
        except AssertionError as error:  # of all cases but those where the term changes nothing
            messages.append(str(error))
    for message in ("there was no error", "out is off by"):
        assert any(message in found for found in messages)


def test_threads_that_disturb_each_other_are_found(monkeypatch):
    """What one thread keeps for itself is in one place for all of them."""
    attend, place = fuzz_threads.attend, []

    def careless(query, key, value, graph, **options):
        place[:] = [float(value.detach().sum())]
        time.sleep(1e-4)
        return attend(query, key, value * place[0], graph, **options)

    monkeypatch.setattr(fuzz_threads, "attend", careless)
    with pytest.raises(AssertionError, match=r"job \d in thread \d"):
        run_cases("threads", 10)


@pytest.mark.parametrize(
    "state", [lambda tensor: 0, lambda tensor: tensor._version, lambda tensor: (tensor.shape, tensor.data_ptr())]
)
def test_edits_that_go_unnoticed_are_found(state, monkeypatch):
    monkeypatch.setattr(edge_lists, "_state", state)
    monkeypatch.delitem(fuzz_edits.EDITS, fuzz_edits.compiled_mutation)
    with pytest.raises(AssertionError, match=r"step \d"):
        run_cases("edits", 100)


class TestTheCommand:
    def run(self, monkeypatch, *arguments):
        monkeypatch.setattr("sys.argv", ["fuzz", *arguments])
        return fuzz.main()

    def test_says_what_ran(self, monkeypatch, capsys):
        assert self.run(monkeypatch, "--cases", "3", "--seed", "5", "--kinds", "call,sequence") == 0
        out, err = capsys.readouterr()
        assert "The first case has seed 5." in out
        assert "3 cases are as they should be" in out
        assert f"--kinds {fuzz.kind_of(7, ['call', 'sequence'])} --seed 7" in err  # to be seen after a crash

    @pytest.mark.parametrize("seed", [(), ("--seed",)])
    def test_fresh_seeds(self, seed, monkeypatch, capsys):
        monkeypatch.setattr(fuzz, "case", lambda seed, kind: None)
        monkeypatch.setattr(secrets, "randbelow", lambda limit: 1234567)
        assert self.run(monkeypatch, "--cases", "3", *seed) == 0
        assert "The first case has seed 1234567." in capsys.readouterr().out

    def test_stops_in_time(self, monkeypatch, capsys):
        monkeypatch.setattr(fuzz, "case", lambda seed, kind: time.sleep(0.02))
        assert self.run(monkeypatch, "--cases", "1000", "--seed", "5", "--seconds", "0.1") == 0
        assert 1 <= int(capsys.readouterr().out.split("\n")[1].split()[0]) <= 6

    def test_fails_with_how_to_repeat(self, monkeypatch, capsys):
        def wrong(draw, alter):
            raise ValueError("wrong")

        monkeypatch.setitem(fuzz.KINDS, "edits", fuzz.KINDS["edits"]._replace(run=wrong))
        assert self.run(monkeypatch, "--kinds", "edits", "--seed", "7") == 1
        assert "Again: python -m tests.ops.fuzz --cases 1 --kinds edits --seed 7" in capsys.readouterr().err

    def test_an_unknown_kind(self, monkeypatch, capsys):
        with pytest.raises(SystemExit):
            self.run(monkeypatch, "--kinds", "calls")
        assert "there is no kind calls" in capsys.readouterr().err


def test_a_case_is_decided_by_its_seed():
    for seed in range(20):
        first, second = (fuzz.random_call(seed)[0] for _ in range(2))
        assert str(first) == str(second)
        assert torch.equal(first.edges, second.edges)
        assert all(torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors)


@each_kind
def test_a_case_is_decided_by_its_kind_and_seed(kind):
    notes = []
    for _ in range(2):
        draws = [fuzz.Draw(seed) for seed in range(1 if kind == "compiled" else 3)]
        for draw in draws:
            fuzz.KINDS[kind].run(draw, None)
        notes.append(str([draw.notes for draw in draws]))
    assert notes[0] == notes[1]


def test_the_kind_is_one_of_those_asked_for():
    assert {fuzz.kind_of(seed) for seed in range(2000)} == set(fuzz.KINDS)
    assert {fuzz.kind_of(seed, ["layer", "edits"]) for seed in range(100)} == {"layer", "edits"}
