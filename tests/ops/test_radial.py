"""Biases of distances, by the CPU kernels and by plain PyTorch."""

import pytest
import torch

import gattn
from gattn.nn import RadialBias
from gattn.ops.radial import radial

#: Batch, targets, sources, dimensions of space, functions and heads.
SIZES = {
    "one pair": ((), 1, 1, 1, 1, 1),
    "parts of a strip": ((2,), 37, 70, 2, 5, 3),
    "several parts of sources": ((), 35, 1100, 3, 16, 8),
    "many functions": ((3,), 4, 64, 3, 21, 1),
    "no targets": ((), 0, 3, 3, 4, 2),
    "no sources": ((), 3, 0, 3, 4, 2),
}
BASES = {"gaussian": False, "bessel": True}


def inputs(front, n, m, space, functions, heads, basis, dtype=torch.double):
    torch.manual_seed(n + m)
    x, y = (3 * torch.randn(*front, size, space, dtype=dtype) for size in (n, m))
    if n and m:
        y[..., m // 2, :] = x[..., 0, :]
    factor = RadialBias(heads, functions, basis=basis).kernel.factor.detach().to(dtype)
    weight = torch.randn(functions, heads, dtype=dtype)
    return [t.requires_grad_() for t in (x, y, factor, weight)]


def results(tensors, basis, plain=False):
    with gattn.backend("reference" if plain else "auto"):
        bias = radial(*tensors, 10.0, BASES[basis])
    assert ("_Kernel" in str(bias.grad_fn)) != plain
    of_bias = torch.linspace(-1, 1, bias.numel(), dtype=bias.dtype).view(bias.shape).cos()
    return bias.detach(), *torch.autograd.grad(bias, tensors, of_bias)


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float, torch.double])
def test_kernels_compute_the_formula(sizes, basis, dtype):
    tensors = inputs(*SIZES[sizes], basis, dtype)
    exact = results([t.detach().double().requires_grad_() for t in tensors], basis, plain=True)
    for found, expected in zip(results(tensors, basis), exact, strict=True):
        size = expected.abs().max() if expected.numel() else 0.0
        allowed = float(size) * (2e-5 if dtype == torch.float else 1e-11)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=allowed)


def test_tensors_with_strides_of_their_own():
    x, y, factor, weight = inputs((2,), 5, 7, 3, 4, 2, "gaussian")
    strided = [t.detach().mT.contiguous().mT.requires_grad_() for t in (x, y)]
    expected = results((x, y, factor, weight), "gaussian")
    torch.testing.assert_close(results((*strided, factor, weight), "gaussian"), expected)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.mT.contiguous().mT if t.dim() > 1 else t):
        torch.testing.assert_close(results((x, y, factor, weight), "gaussian"), expected)


@pytest.mark.parametrize("basis", BASES)
def test_same_bits_with_any_number_of_threads(basis, monkeypatch):
    tensors, found = inputs((2,), 70, 1100, 3, 16, 4, basis, torch.float), []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(results(tensors, basis))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("basis", BASES)
def test_far_positions_and_what_is_not_finite(basis):
    """Far pairs have no gradient in Gaussian functions, and no rounding of sines in float32 beyond their argument's."""
    x, y, factor, weight = inputs((), 4, 70, 3, 5, 2, basis, torch.float)
    with torch.no_grad():
        x[1] += 3e4
        x[2, 0], x[3, 1] = torch.nan, torch.inf
    found, expected = (results((x, y, factor, weight), basis, plain) for plain in (False, True))
    for a, b in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(a[..., :2, :], b[..., :2, :], rtol=1e-3, atol=1e-5)
    assert bool(found[0][:, 2].isnan().all()) == bool(expected[0][:, 2].isnan().all()) is True
    assert torch.equal(found[0][:, 3].isnan(), expected[0][:, 3].isnan())


@pytest.mark.parametrize("basis", BASES)
def test_second_derivatives(basis):
    tensors = inputs((), 3, 5, 2, 4, 2, basis)
    with torch.no_grad():
        tensors[1][2] += 0.5  # two positions that are equal have no second derivative
    assert torch.autograd.gradgradcheck(lambda *t: radial(*t, 10.0, BASES[basis]), tensors)


def test_attention_calls_them_for_some_targets_at_a_time(monkeypatch):
    monkeypatch.setattr("gattn.ops.backends.dense._HELD", 4 * 4 * 40 * 2)
    monkeypatch.setattr("gattn.ops.backends.dense._LEAST_HELD", 4)
    bias, position, x = RadialBias(2), torch.randn(40, 3), torch.randn(40, 2, 8)
    graph, calls = gattn.CompleteGraph(40), []
    expected = gattn.attend(x, x, x, graph, bias=bias(position).rows(0, 40))
    monkeypatch.setattr("gattn.ops.radial._run", _counted(calls))
    torch.testing.assert_close(gattn.attend(x, x, x, graph, bias=bias(position)), expected)
    assert len(calls) > 2


def _counted(calls):
    from gattn.ops.radial import _run

    def run(name, *args, **more):
        calls.append(name)
        _run(name, *args, **more)

    return run
