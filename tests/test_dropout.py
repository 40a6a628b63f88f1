"""What dropout drops, by gattn's own generator."""

import pytest
import torch

from gattn import dropout
from gattn.ops.dropout import draw_seed, drop, keep_mask


def mix(x):
    """The definition in plain Python integers."""
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) % 2**32
    return x ^ (x >> 16)


def test_keep_mask_is_what_its_docstring_says():
    seed = 0x0123456789ABCDEF
    mask = keep_mask(torch.tensor(seed), torch.Size([5, 3]), 0.3)
    for n, keep in enumerate(mask.flatten().tolist()):
        random = mix(mix((n % 2**32) ^ (seed % 2**32)) ^ (n >> 32) ^ (seed >> 32))
        assert keep == (random >= int(0.3 * 2**32))


LAGS = (1, 2, 3, 4, 7, 8, 16, 64, 100, 256, 1000, 4096, 65_536)


def deviations(p, size, rounds):
    """Statistics of masks, of seeds from PyTorch's generator; each is about normal(0, 1) if draws are independent."""
    q = 1 - int(p * 2**32) / 2**32
    variance, found, columns, before = q * (1 - q), {}, torch.zeros(1000, dtype=torch.double), None
    number = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
    usual = (q**number * (1 - q) ** (1 - number)).prod(1).double() * (size // 8)

    def note(name, value):
        found[name] = max(found.get(name, 0.0), abs(float(value)))

    def note_chi(name, counts, expected):
        squares = (counts - expected) ** 2 / (expected * (1 - q) if counts.numel() != 256 else expected)
        note(name, (squares.sum() - squares.numel()) / (2 * squares.numel()) ** 0.5)

    def note_pairs(name, one, other):
        together = (one & other).sum() - q * (one.sum() + other.sum()) + one.numel() * q * q
        note(name, together / (one.numel() ** 0.5 * variance))

    for seed in range(rounds):
        torch.manual_seed(seed)
        kept = dropout(torch.ones(size), p).bool()
        note("all", (kept.sum() - size * q) / (size * variance) ** 0.5)
        rows = kept[: size // 1000 * 1000].view(-1, 1000)
        note_chi("rows", rows.sum(1), 1000 * q)
        columns += rows.sum(0)
        note_chi("columns", columns, (seed + 1) * len(rows) * q)
        for lag in LAGS:
            note_pairs(f"lag {lag}", kept[lag:], kept[:-lag])
        note_chi("patterns of eight", (kept.view(-1, 8) * 2 ** torch.arange(8)).sum(1).bincount(minlength=256), usual)
        if before is not None:
            note_pairs("seeds one apart", kept, before)
            note_pairs("neighbours of seeds one apart", kept[1:], before[:-1])
        before = kept
    return found


@pytest.mark.parametrize("p", [0.1, 0.5, 0.6])
@pytest.mark.parametrize(
    ("size", "rounds"), [(1 << 20, 3), pytest.param(1 << 24, 20, marks=pytest.mark.slow)], ids=["3e6", "3e8"]
)
def test_what_is_dropped_looks_independent(p, size, rounds):
    """Frequencies, rows, columns, pairs at many distances, patterns, and seeds that follow each other."""
    found = deviations(p, size, rounds)
    assert max(found.values()) < 5, found


def test_dependent_draws_are_found(monkeypatch):
    monkeypatch.setattr("tests.test_dropout.dropout", lambda x, p: torch.rand(len(x) // 2).gt(p).repeat_interleave(2))
    assert deviations(0.5, 1 << 20, 1)["lag 1"] > 5
    monkeypatch.setattr("tests.test_dropout.dropout", lambda x, p: torch.arange(len(x)) % 1000 >= 1000 * p)
    assert deviations(0.5, 1 << 20, 1)["columns"] > 5
    monkeypatch.setattr("tests.test_dropout.dropout", lambda x, p: (torch.manual_seed(0), torch.rand(len(x)).gt(p))[1])
    assert deviations(0.5, 1 << 20, 2)["seeds one apart"] > 5


def test_expectation_is_kept():
    weights = torch.rand(100_000)
    torch.testing.assert_close(drop(weights, 0.4, draw_seed(weights.device)).mean(), weights.mean(), rtol=0.02, atol=0)


def test_the_seed_comes_from_torchs_generator():
    torch.manual_seed(3)
    seed = draw_seed(torch.device("cpu"))
    torch.manual_seed(3)
    assert draw_seed(torch.device("cpu")) == seed
    assert draw_seed(torch.device("cpu")) != seed
