"""Layers of pairs beside AlphaFold's algorithms, written pair by pair in float64."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import gattn
from gattn.nn import AttentionPairBias, TriangleAttention, TriangleMultiplication
from gattn.ops.backends.cpu import native

N, C, D, H, E = 6, 8, 10, 2, 3


pytestmark = pytest.mark.usefixtures("in_double")


def randomized(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.7, 0.7)
    return module


def assert_same(found, expected, leaves):
    results = [[out, *torch.autograd.grad(out.sin().sum(), leaves, retain_graph=True)] for out in (found, expected)]
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-12)


def triangles(layer, pairs, mask, starting):
    """One matrix of pairs."""
    x = layer.layer_norm(pairs)
    q, k, v = (layer.mha[f"linear_{name}"](x).unflatten(-1, (H, E)) for name in "qkv")
    gate, bias = layer.mha["linear_g"](x).sigmoid(), layer.linear(x)
    rows = []
    for i, j in itertools.product(range(N), repeat=2):
        logits, values = [], []
        for n in range(N):
            key, value, third = (k[i, n], v[i, n], bias[j, n]) if starting else (k[n, j], v[n, j], bias[n, i])
            if mask is None or mask[(i, n) if starting else (n, j)]:
                logits.append((q[i, j] * key).sum(-1) / math.sqrt(E) + third)
                values.append(value)
        if not values:
            rows.append(layer.mha["linear_o"](torch.zeros(H * E)))
            continue
        weights = torch.stack(logits).softmax(0)
        out = (weights.unsqueeze(-1) * torch.stack(values)).sum(0).flatten()
        rows.append(layer.mha["linear_o"](gate[i, j] * out))
    return torch.stack(rows).view(N, N, -1)


@pytest.mark.parametrize("starting", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_triangle_attention(starting, masked, batch):
    layer = randomized(TriangleAttention(C, H, E, starting))
    pairs = torch.randn(*batch, N, N, C, requires_grad=True)
    mask = torch.rand(*batch, N, N) < 0.6 if masked else None
    matrices = pairs.flatten(0, -4) if batch else pairs.unsqueeze(0)
    masks = [None] * len(matrices) if mask is None else mask.reshape(-1, N, N)
    expected = torch.stack([triangles(layer, x, m, starting) for x, m in zip(matrices, masks, strict=True)])
    assert_same(layer(pairs, mask), expected.view(*batch, N, N, C), [pairs, *layer.parameters()])


def test_padding_changes_nothing():
    """What a pair gets does not depend on residues that are not there, whatever these hold."""
    for layer in (TriangleAttention(C, H, E), TriangleAttention(C, H, E, False), TriangleMultiplication(C, 5)):
        pairs = torch.randn(N, N, C)
        padded = torch.full((N + 2, N + 2, C), 7.0)
        padded[:N, :N] = pairs
        there = torch.arange(N + 2) < N
        found = randomized(layer)(padded, there & there.unsqueeze(1))[:N, :N]
        torch.testing.assert_close(found, layer(pairs))


@pytest.mark.parametrize("outgoing", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_triangle_multiplication(outgoing, masked):
    layer = randomized(TriangleMultiplication(C, 5, outgoing))
    pairs = torch.randn(N, N, C, requires_grad=True)
    mask = torch.rand(N, N) < 0.6 if masked else torch.ones(N, N, dtype=torch.bool)
    x = layer.layer_norm_in(pairs)
    a, b = (
        getattr(layer, f"linear_{side}_g")(x).sigmoid() * getattr(layer, f"linear_{side}_p")(x) * mask.unsqueeze(-1)
        for side in "ab"
    )
    sums = [
        sum(a[i, n] * b[j, n] if outgoing else a[n, i] * b[n, j] for n in range(N))
        for i, j in itertools.product(range(N), repeat=2)
    ]
    products = layer.linear_z(layer.layer_norm_out(torch.stack(sums).view(N, N, 5)))
    expected = layer.linear_g(x).sigmoid() * products
    found = layer(pairs, mask if masked else None)
    assert_same(found, expected, [pairs, *layer.parameters()])


@pytest.mark.parametrize("conditioned", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("samples", [(), (3,)], ids=str)
def test_attention_with_a_bias_of_pairs(conditioned, masked, samples):
    layer = randomized(AttentionPairBias(D, C, H, 4 if conditioned else None))
    a, pairs = torch.randn(*samples, N, D, requires_grad=True), torch.randn(N, N, C, requires_grad=True)
    condition = torch.randn(*samples, N, 4, requires_grad=True) if conditioned else None
    mask = torch.arange(N) < 4
    mask = mask.expand(*samples, N) if masked else None
    x = F.layer_norm(a, (D,), *(() if conditioned else (layer.layer_norm_a.weight, layer.layer_norm_a.bias)))
    if conditioned:
        s = F.layer_norm(condition, (4,), layer.layer_norm_s.weight)
        x = layer.linear_scale(s).sigmoid() * x + layer.linear_shift(s)
    q, k, v = (lin(x).unflatten(-1, (H, -1)) for lin in (layer.linear_q, layer.linear_k, layer.linear_v))
    logits = torch.einsum("...ihe,...jhe->...ijh", q, k) / math.sqrt(D // H)
    logits = logits + layer.linear_z(layer.layer_norm_z(pairs))
    if masked:
        logits = logits.masked_fill(~mask[..., None, :, None], -torch.inf)
    out = torch.einsum("...ijh,...jhe->...ihe", logits.softmax(-2), v).flatten(-2)
    expected = layer.linear_o(layer.linear_g(x).sigmoid() * out)
    expected = layer.linear_gate(condition).sigmoid() * expected if conditioned else expected
    leaves = [a, pairs, *([condition] if conditioned else []), *layer.parameters()]
    assert_same(layer(a, pairs, condition, mask), expected, leaves)


@pytest.mark.skipif(native.load_error() is not None, reason="needs the CPU kernels")
def test_no_tensor_of_all_triangles_is_made():
    """The kernels take one bias for all rows, and sum its gradient."""
    query, key, value = torch.randn(3, 72, 72, H, E, dtype=torch.float, requires_grad=True).unbind()
    bias = torch.randn(1, H, 72, 72, dtype=torch.float, requires_grad=True)
    found = str(gattn.explain_call(query, key, value, gattn.CompleteGraph(72), bias=bias))
    assert found.startswith("dense: tiles of pairs")


def test_gates_of_conditions_start_nearly_closed():
    layer = AttentionPairBias(D, C, H, 4)
    assert (layer.linear_gate.bias == -2).all()
    assert not layer.linear_gate.weight.any()


def test_wrong_inputs():
    layer, pairs = TriangleAttention(C, H, E), torch.randn(N, N, C)
    for given, mask, error, text in (
        (pairs[:-1], None, ValueError, r"must be \[..., N, N, 8\]"),
        (pairs[..., :-1], None, ValueError, r"must be \[..., N, N, 8\]"),
        (pairs.expand(2, 2, N, N, C), None, ValueError, r"or \[B, N, N, C\]"),
        (pairs.long(), None, TypeError, "floating-point"),
        (pairs, torch.ones(N, N), TypeError, "booleans"),
        (pairs, torch.ones(N, dtype=torch.bool), ValueError, "mask must be"),
    ):
        with pytest.raises(error, match=text):
            layer(given, mask)
    nodes = AttentionPairBias(D, C, H)
    with pytest.raises(ValueError, match=r"a must be \[..., 6, 10\]"):
        nodes(torch.randn(5, D), pairs)
    with pytest.raises(ValueError, match="condition"):
        nodes(torch.randn(N, D), pairs, torch.randn(N, 4))
    with pytest.raises(ValueError, match="broadcastable"):
        nodes(torch.randn(3, N, D), pairs.expand(2, N, N, C))
    adapted = AttentionPairBias(D, C, H, 4)
    for a, condition, error, text in (
        (torch.randn(N, D), torch.randn(N, 3), ValueError, "condition must be"),
        (torch.randn(N, D), torch.randn(3, N, 4), ValueError, "condition must be"),
        (torch.randn(N, D), [1.0], TypeError, "condition must be a tensor"),
        (torch.randn(N, D), torch.randn(N, 4, dtype=torch.half), ValueError, "condition is float16"),
        (torch.randn(N, D, dtype=torch.half), torch.randn(N, 4), ValueError, "a is float16"),
    ):
        with pytest.raises(error, match=text):
            adapted(a, pairs, condition)
    with pytest.raises(ValueError, match="multiple of heads"):
        AttentionPairBias(D, C, 3)
