"""What kernels of any backend must do with distributions that look at whole rows."""

import math

import torch

import gattn
from gattn import SparseGraph, attend
from tests import cases
from tests.cases import compare, off_the_grid, on_device

make_call = on_device(cases.make_call)

LAWS = [gattn.Sparsemax(), gattn.Entmax15(), *map(gattn.TopK, (1, 7, 38, 39, 40, 10**30))]


def check_ties(backend, distribution, dtype, heads):
    """Of equal logits, 0 and -0 among them, top-k keeps the first, within a block and across blocks."""
    logits = torch.randint(-2, 3, (39 + 5, heads)).to(dtype) / 8 * torch.randint(-1, 2, (39 + 5, 1))
    edges = torch.stack([torch.arange(44), torch.tensor([1] * 39 + [0] * 5)])
    options = {"score": gattn.GATScore(1.0), "distribution": distribution, "return_weights": True}
    value, graph = torch.zeros(44, heads, 1, dtype=dtype), SparseGraph(edges, num_targets=2)
    found, expected = (attend(None, logits, value, graph, backend=x, **options)[1] for x in (backend, "reference"))
    # On a grid, rounding decides whether sparsemax's smallest weight is zero.
    assert torch.equal(found > 1e-6, expected > 1e-6)
    torch.testing.assert_close(found, expected)


def check_missing_and_infinite_logits(backend, distribution):
    """No edge, none with a finite logit, one with a finite logit, and a row that is far from zero."""
    target = torch.tensor([1] * 6 + [2] * 6 + [3] * 6)
    call = make_call("gat", torch.stack([torch.arange(18) % 5, target]), 5, 4, heads=2, distribution=distribution)
    call = off_the_grid(call)
    bias = call.tensors["bias"]
    bias[target == 1], bias[6:11], bias[target == 3] = -math.inf, -math.inf, bias[target == 3] - 1e4
    results = call.results(backend)
    total = torch.zeros(4, 2).index_add(0, target, results["weights"])
    torch.testing.assert_close(total, torch.tensor([0.0, 0.0, 1.0, 1.0]).unsqueeze(1).expand(4, 2))
    assert (results["out"][:2] == 0).all()
    assert (results["weights"][11] == 1).all()
    assert all(result.isfinite().all() for result in results.values())
    compare(call, backend)


def check_a_nan(backend, distribution, count):
    """It shows in the whole row of its head, and nowhere else."""
    target = torch.tensor([0] * count + [1] * count)
    edges = torch.stack([torch.arange(2 * count) % 5, target])
    call = make_call("gat", edges, 5, 2, heads=2, distribution=distribution)
    call.tensors["bias"][3, 1] = math.nan
    results = call.results(backend)
    assert torch.equal(results["weights"].isnan(), torch.stack([target < 0, target == 0], 1))
    assert torch.equal(results["out"].isnan().any(-1), torch.tensor([[False, True], [False, False]]))
