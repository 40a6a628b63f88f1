"""Sparsemax, entmax and top-k in the CPU kernels, which rewrite the logits of whole rows."""

import math

import pytest
import torch

from gattn import CompleteGraph, attend
from gattn.ops.backends.cpu import Cpu, matrix
from gattn.testing import random_edge_index
from tests.cases import (
    DTYPES,
    LONG_ROW,
    SCORES,
    SPARSE,
    TERMS,
    changed,
    compare,
    make_call,
    off_the_grid,
    pairs,
    threads,
)
from tests.ops.laws_shared import LAWS, check_a_nan, check_missing_and_infinite_logits, check_ties

pytestmark = pytest.mark.skipif(Cpu().missing() is not None, reason="needs the CPU kernels")


@pytest.mark.parametrize("distribution", SPARSE)
def test_the_kernels_know_it(distribution):
    """Otherwise PyTorch would compute the weights, and be right."""
    law = SPARSE[distribution](None).law()
    assert Cpu().knows_law(law)
    assert matrix.can_weigh(torch.zeros(2, 3), law)


@pytest.mark.parametrize(
    ("distribution", "score", "dtype", "heads", "channels", "terms", "batch", "weights", "p"),
    pairs(
        SPARSE,
        SCORES,
        DTYPES,
        (1, 3, 8, 17, 24),
        (1, 4, 33),
        (TERMS, ("bias",), ("edge", "bias"), ("bias", "edge_value")),
        ((), (2,)),
        ("dropped", True, False),
        (0.4, 0.0),
    ),
)
def test_against_the_reference(distribution, score, dtype, heads, channels, terms, batch, weights, p):
    """Blocks of several rows, rows of several blocks, and one without edges."""
    options = {"dtype": dtype, "terms": terms, "batch": batch, "weights": weights, "dropout": p}
    options |= {"heads": heads, "channels": channels, "value_channels": channels}
    call = make_call(score, random_edge_index(9, 7, 90, hub=0.5), 9, 8, **options)
    compare(off_the_grid(changed(call, distribution=distribution, mask=torch.rand(90, heads) < 0.8)))


@pytest.mark.parametrize("distribution", SPARSE)
def test_keys_that_are_values_and_grouped_heads(distribution):
    call = make_call(
        "dot", random_edge_index(6, 8, 90, hub=0.5), 6, 8, heads=4, key_heads=2, channels=3, value_channels=3
    )
    call = off_the_grid(changed(call, distribution=distribution))
    call.tensors["value"], call.tensors["edge_value"] = call.tensors["key"], call.tensors["edge"]
    compare(call)


@pytest.mark.parametrize("distribution", SPARSE)
def test_no_channels(distribution):
    """Weights alone have gradients."""
    call = make_call("dot", random_edge_index(6, 8, 90), 6, 8, channels=0, value_channels=0, terms=("bias",))
    compare(off_the_grid(changed(call, distribution=distribution)))


@pytest.mark.parametrize("distribution", SPARSE)
@pytest.mark.parametrize("score", ["gat", "leaky_relu", "dot"])
def test_hubs_wait_for_all_their_parts(distribution, score):
    """Their row is rewritten once all logits are there, whichever thread computed them, with the same bits."""
    edges = random_edge_index(50, 4, 3 * LONG_ROW, hub=0.8)
    call = make_call(score, edges, 50, 4, heads=2, channels=2, value_channels=2, batch=(2,), dropout=0.3)
    call = off_the_grid(changed(call, distribution=distribution))
    results = []
    for number in (1, 3):
        with threads(number):
            results.append(call.results("cpu"))
    assert all(torch.equal(x, results[1][name]) for name, x in results[0].items())
    compare(call)


@pytest.mark.parametrize("heads", [1, 3, 8, 16, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("distribution", LAWS, ids=repr)
def test_ties(distribution, dtype, heads):
    check_ties("cpu", distribution, dtype, heads)


@pytest.mark.parametrize("distribution", SPARSE)
def test_missing_and_infinite_logits(distribution):
    check_missing_and_infinite_logits("cpu", distribution)


@pytest.mark.parametrize("distribution", SPARSE)
@pytest.mark.parametrize("count", [6, 40])
def test_a_nan_shows_in_its_row_and_head(distribution, count):
    check_a_nan("cpu", distribution, count)


class TestOnMatrices:
    @pytest.mark.parametrize("columns", [0, 1, 15, 16, 39, 1200])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("distribution", LAWS, ids=repr)
    def test_weights_and_gradients(self, distribution, dtype, columns):
        logits = torch.randn(2, 3, 5, columns, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        logits[0, 0, 0], logits[:, :, 3, 1:] = -math.inf, -math.inf
        grad = torch.randn(logits.shape, dtype=torch.float64)
        exact, found = (logits.to(kind).requires_grad_() for kind in (torch.float64, dtype))
        expected = distribution.of_matrix(exact)
        weights = matrix.weights(found, distribution.law())
        tolerance = 1e-12 if dtype == torch.float64 else 5e-6
        torch.testing.assert_close(weights.double(), expected, rtol=0, atol=tolerance)
        (expected,) = torch.autograd.grad(expected, exact, grad)
        (result,) = torch.autograd.grad(weights, found, grad.to(dtype))
        torch.testing.assert_close(result.double(), expected.nan_to_num(0.0), rtol=0, atol=10 * tolerance)

    @pytest.mark.parametrize("distribution", LAWS[:4], ids=repr)
    def test_second_derivatives(self, distribution):
        logits = torch.randn(2, 9, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradgradcheck(lambda logits: matrix.weights(logits, distribution.law()), logits)

    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck itself, in 2.14
    @pytest.mark.parametrize("distribution", LAWS[:3], ids=repr)
    def test_opcheck(self, distribution):
        law, logits = distribution.law(), torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
        torch.library.opcheck(torch.ops.gattn.matrix_weights, (logits, law.name, list(law.constants)))

    @pytest.mark.parametrize("distribution", LAWS[:3], ids=repr)
    def test_complete_graphs(self, distribution):
        """Windows, lengths and a bias, compared with the plain formula."""
        query, key, value = (torch.randn(2, 12, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
        graph = CompleteGraph(12, causal=True, source_lengths=torch.tensor([12, 7]))
        results = []
        for name in ("dense", "reference"):
            out = attend(query, key, value, graph, distribution=distribution, bias=torch.zeros(12, 12), backend=name)
            results.append((out, *torch.autograd.grad(out.sin().sum(), (query, key, value))))
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected)
