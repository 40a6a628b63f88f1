import torch

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


def test_the_share_that_is_kept():
    for p in (0.1, 0.5, 0.6, 0.9):
        kept = keep_mask(torch.tensor(7), torch.Size([200_000]), p).double().mean().item()
        assert abs(kept - (1 - p)) < 0.005


def test_seeds_and_neighbours_are_independent():
    shape = torch.Size([100_000])
    first, second = keep_mask(torch.tensor(1), shape, 0.5), keep_mask(torch.tensor(2), shape, 0.5)
    assert abs((first == second).double().mean().item() - 0.5) < 0.01
    for lag in (1, 2, 8, 64):
        assert abs((first[lag:] == first[:-lag]).double().mean().item() - 0.5) < 0.01


def test_expectation_is_kept():
    weights = torch.rand(100_000)
    torch.testing.assert_close(drop(weights, 0.4, draw_seed(weights.device)).mean(), weights.mean(), rtol=0.02, atol=0)


def test_the_seed_comes_from_torchs_generator():
    torch.manual_seed(3)
    seed = draw_seed(torch.device("cpu"))
    torch.manual_seed(3)
    assert draw_seed(torch.device("cpu")) == seed
    assert draw_seed(torch.device("cpu")) != seed
