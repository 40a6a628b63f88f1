import pytest
import torch

from tests.ops import fuzz

CHUNK = 125


@pytest.mark.parametrize("first", range(0, 2000, CHUNK))
def test_cases(first):
    for seed in range(first, first + CHUNK):
        fuzz.case(seed)


@pytest.mark.parametrize("name", ["out", "weights", *(f"grad of {name}" for name in fuzz.DIFFERENTIABLE)])
def test_a_wrong_result_is_found_and_named(name):
    """Halves the largest element, to see the seed in the message."""
    altered = []

    def alter(results):
        if results.get(name) is not None and results[name].numel() and results[name].abs().max() > 0.1:
            flat = results[name].flatten()
            flat[flat.abs().argmax()] *= 0.5
            results[name] = flat.view(results[name].shape)
            altered.append(name)

    message = None
    for seed in range(200):
        try:
            fuzz.case(seed, alter)
        except AssertionError as error:
            message = str(error)
        assert (message is None) == (not altered)
        if altered:
            break
    assert f"{name} is off by" in message
    assert f"--seed {seed}" in message


def test_the_command(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["fuzz", "--cases", "3", "--seed", "5"])
    assert fuzz.main() == 0
    assert "3 cases agree" in capsys.readouterr().out

    def wrong(seed):
        raise AssertionError(f"case {seed}")

    monkeypatch.setattr(fuzz, "case", wrong)
    assert fuzz.main() == 1
    assert "case 5" in capsys.readouterr().err


def test_a_case_is_decided_by_its_seed():
    for seed in range(20):
        first, second = (fuzz.random_call(seed)[0] for _ in range(2))
        assert str(first) == str(second)
        assert torch.equal(first.edges, second.edges)
        assert all(torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors)
