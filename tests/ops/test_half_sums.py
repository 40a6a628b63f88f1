"""Gradients in half precision are sums of thousands of terms, rounded once: for every tensor and way of computing.

Summed in half precision, they stop growing at 256 (bfloat16) or 2048 (float16) times a term.
"""

from itertools import product

import pytest
import torch

import gattn
from tests.cases import mostly_slow
from tests.ops.calls_by_term import C, H, N, attend, cases, draw

HALF = (torch.bfloat16, torch.float16)


CASES = [(*case, *more) for case, *more in product(cases(), [(), (2,)], ["auto", "reference"], HALF)]


def gradients(case, batch, backend, given, grad):
    leaves = {leaf: x.to(grad.dtype).requires_grad_() for leaf, x in given.items()}
    with gattn.backend(backend):
        out = attend(*case, leaves, batch)
    out.backward(grad.expand_as(out))
    return {leaf: x.grad for leaf, x in leaves.items()}


@pytest.mark.parametrize(("name", "graph", "law", "batch", "backend", "dtype"), mostly_slow(CASES, 61), ids=str)
def test_sums_of_gradients(name, graph, law, batch, backend, dtype):
    given = {leaf: x.to(dtype) for leaf, x in draw(name).items()}
    grad = (torch.rand(N, H, C) / 2 + 0.5).to(dtype) / 64
    case = name, graph, law
    exact, found = (gradients(case, batch, backend, given, x) for x in (grad.double(), grad))
    for leaf, wanted in exact.items():
        error = (found[leaf].double() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-3)
        assert error < 6 * torch.finfo(dtype).eps, (leaf, error / torch.finfo(dtype).eps)
