"""Attention with relations of listed pairs, beside a matrix of all pairs."""

import math
import subprocess
import sys

import pytest
import torch
from torch_geometric.data import HeteroData

import gattn
from gattn.nn import RelationalAttention
from gattn.recording import record_attention

N, E, C, H, R, T = 9, 14, 8, 2, 3, 4
SIZES = [4, 5]
BATCH = torch.tensor([0] * 4 + [1] * 5)


pytestmark = pytest.mark.usefixtures("in_double")


def randomized(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.7, 0.7)
    return module


def listed(batched):
    """Some pairs, one of them twice with two relations, within the graphs of a batch."""
    first, second = torch.randint(4, (2, 6)), torch.randint(4, 9, (2, 6))
    pairs = torch.cat([first, second] if batched else [torch.randint(N, (2, 12))], 1)
    return torch.cat([pairs, pairs[:, :2]], 1), torch.randint(R, (E,))


def formula(layer, x, pairs, relation, batch, time, moments=None):
    logits, values = layer.relation_logit[relation], layer.relation_value[relation]
    if time is not None:
        angle = time.unsqueeze(1) * layer.frequency + layer.phase
        encoding = torch.cat([angle[:, :1], angle[:, 1:].sin()], 1)
        logits, values = logits + layer.time_logit(encoding), values + layer.time_value(encoding)
    q, k, v = (lin(x).view(N, H, -1) for lin in (layer.lin_query, layer.lin_key, layer.lin_value))
    scores = torch.einsum("ihc,jhc->ijh", q, k) / math.sqrt(C // H)
    scores = scores.index_put((pairs[1], pairs[0]), logits, accumulate=True)
    if batch is not None:
        scores = scores.masked_fill((batch.unsqueeze(1) != batch).unsqueeze(-1), -torch.inf)
    if moments is not None:
        is_hidden = (moments >= moments.unsqueeze(1)) & ~torch.eye(N, dtype=torch.bool)
        scores = scores.masked_fill(is_hidden.unsqueeze(-1), -torch.inf)
    weights = scores.softmax(1)
    out = torch.einsum("ijh,jhc->ihc", weights, v)
    more = weights[pairs[1], pairs[0]].unsqueeze(-1) * values.view(E, H, -1)
    return layer.lin_out(out.index_add(0, pairs[1], more).flatten(1))


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("form", ["edge_index", "SparseGraph", "TypedGraph"])
def test_formula(batched, timed, form):
    layer = randomized(RelationalAttention(C, H, R, T if timed else None))
    x = torch.randn(N, C, requires_grad=True)
    pairs, relation = listed(batched)
    time = torch.rand(E, requires_grad=True) * 9 if timed else None
    batch = BATCH if batched else None
    given, types = pairs, relation
    if form == "SparseGraph":
        given = gattn.SparseGraph(pairs.flip(0), N, N, flow="target_to_source")
    elif form == "TypedGraph":
        given, types = gattn.TypedGraph(pairs, relation, R, num_targets=N, num_sources=N), None
    found, expected = layer(x, given, types, batch, time), formula(layer, x, pairs, relation, batch, time)
    leaves = [x, *layer.parameters()]
    grads = [torch.autograd.grad(out.sin().sum(), leaves, retain_graph=True) for out in (found, expected)]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-11)


MOMENTS = {
    "different": torch.tensor([3.5, 1.0, 9.0, -2.0, 0.5, 7.0, 8.0, 2.0, 5.0]),
    "some the same": torch.tensor([2, 1, 2, 2, 1, 1, 3, 1, 3]),
    "all the same": torch.zeros(N),
    "without times": torch.tensor([-torch.inf, -torch.inf, 3, 1, 2, -torch.inf, 2, 2, torch.inf]),
}


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("kind", MOMENTS)
def test_earlier_nodes_alone(kind, batched, timed):
    """Pairs that are later, at the same time, listed twice, or of a node with itself are among those listed."""
    layer, moments = randomized(RelationalAttention(C, H, R, T if timed else None)), MOMENTS[kind]
    x, (pairs, relation) = torch.randn(N, C, requires_grad=True), listed(batched)
    pairs[:, 3:5] = pairs[1:, 3:5]
    time, batch = torch.rand(E) * 9 if timed else None, BATCH if batched else None
    found = layer(x, pairs, relation, batch, time, earlier_than=moments)
    expected = formula(layer, x, pairs, relation, batch, time, moments)
    leaves = [x, *layer.parameters()]
    grads = [torch.autograd.grad(out.sin().sum(), leaves) for out in (found, expected)]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-11)


def test_what_is_later_changes_nothing():
    layer, moments = randomized(RelationalAttention(C, H, R)), MOMENTS["some the same"]
    x, (pairs, relation) = torch.randn(N, C), listed(False)
    moved = torch.where((moments >= 2).unsqueeze(1), torch.randn(N, C) * 1e6, x)
    found, expected = (layer(rows, pairs, relation, earlier_than=moments) for rows in (moved, x))
    assert found[moments == 1].equal(expected[moments == 1])
    assert not torch.isclose(found, expected)[moments > 1].all(-1).any()


@pytest.mark.parametrize("batched", [False, True])
def test_recorded_weights_are_those_of_nodes(batched):
    layer, moments = randomized(RelationalAttention(C, H, R)), MOMENTS["some the same"]
    x, (pairs, relation) = torch.randn(N, C), listed(batched)
    with torch.no_grad(), record_attention(layer) as records:
        layer.relation_value.zero_()
        found = layer(x, pairs, relation, BATCH if batched else None, earlier_than=moments)
    weights, graph = records[""][0]
    value = layer.lin_value(x).view(N, H, -1)
    torch.testing.assert_close(layer.lin_out(gattn.aggregate(weights, value, graph).flatten(1)), found)
    assert graph.num_edges < N * N // 2


@pytest.mark.slow
def test_memory_of_earlier_nodes():
    """Bytes above the start of the process, forward and backward, with a few nodes at each time."""
    program = """
import resource, torch, gattn
def step(size):
    layer, x = gattn.nn.RelationalAttention(32, 4, 3), torch.randn(size, 32, requires_grad=True)
    pairs, relation = torch.randint(size, (2, 4 * size)), torch.randint(3, (4 * size,))
    layer(x, pairs, relation, earlier_than=torch.randint(size // 4 + 1, (size,))).sum().backward()
step(8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
step(8192)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 2**10)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 0 < int(found.stdout) < 4 * 8192 * 8192  # one matrix of all pairs in float32


def test_of_no_nodes_or_one():
    layer, nothing = randomized(RelationalAttention(C, H, R)), torch.zeros(2, 0, dtype=torch.long)
    for batch in (None, nothing[0]):
        assert layer(torch.zeros(0, C), nothing, nothing[0], batch, earlier_than=nothing[0]).shape == (0, C)
    x = torch.randn(1, C)
    found = layer(x, nothing, nothing[0], torch.tensor([3]), earlier_than=torch.zeros(1))
    torch.testing.assert_close(found, layer.lin_out(layer.lin_value(x)))


def test_alone_as_in_a_batch():
    layer, x = randomized(RelationalAttention(C, H, R)), torch.randn(N, C)
    pairs, relation = listed(True)
    found = layer(x, pairs, relation, BATCH)
    is_first = pairs[1] < 4
    alone = layer(x[:4], pairs[:, is_first], relation[is_first])
    torch.testing.assert_close(found[:4], alone)


def test_a_heterogeneous_graph():
    data = HeteroData()
    data["a"].x, data["b"].x = torch.randn(4, C), torch.randn(5, C)
    data["a", "to", "b"].edge_index = torch.tensor([[0, 1, 3], [2, 2, 4]])
    data["b", "back", "a"].edge_index = torch.tensor([[2, 4], [0, 3]])
    graph = gattn.TypedGraph.from_hetero(data)
    layer = randomized(RelationalAttention(C, H, 2))
    x = torch.cat([data["a"].x, data["b"].x])
    found = layer(x, graph)
    pairs = torch.tensor([[0, 1, 3, 6, 8], [6, 6, 8, 0, 3]])
    torch.testing.assert_close(found, layer(x, pairs, torch.tensor([0, 0, 0, 1, 1])))


def test_no_pairs_and_float32_far_from_each_other():
    """Weights of listed pairs come from log-sums: large logits lose no more digits than a softmax."""
    layer = randomized(RelationalAttention(C, H, R))
    x = torch.randn(N, C)
    nothing = torch.zeros(2, 0, dtype=torch.long)
    out = layer(x, nothing, torch.zeros(0, dtype=torch.long))
    expected = gattn.attend(
        *(lin(x).view(N, H, -1) for lin in (layer.lin_query, layer.lin_key, layer.lin_value)), gattn.CompleteGraph(N)
    )
    torch.testing.assert_close(out, layer.lin_out(expected.flatten(1)))
    pairs, relation = listed(False)
    with torch.no_grad():
        layer.lin_query.weight.mul_(30)
    exact = layer(x, pairs, relation)
    torch.testing.assert_close(layer.float()(x.float(), pairs, relation).double(), exact, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    layer, x = randomized(RelationalAttention(C, H, R)), torch.randn(N, C)
    pairs, relation = listed(True)
    exact = layer(x, pairs, relation, BATCH)
    found = layer.to(dtype)(x.to(dtype), pairs, relation, BATCH)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=0.05, atol=0.05)


def test_wrong_inputs():
    layer, x = RelationalAttention(C, H, R), torch.randn(N, C)
    pairs, relation = listed(True)
    for arguments, error, text in (
        ((x[:, 1:], pairs, relation), ValueError, r"x must be \[N, 8\]"),
        ((x, pairs, relation[1:]), ValueError, "one entry per pair"),
        ((x, pairs), TypeError, "edge_type must be a tensor"),
        ((x, pairs, relation.double()), TypeError, "integers"),
        ((x, pairs, relation.cfloat()), TypeError, "integers"),
        ((x.float(), pairs, relation), ValueError, "float32"),
        ((x, pairs, relation + 2), IndexError, "3 relations"),
        ((x, pairs, relation, None, torch.rand(E)), ValueError, "time_channels"),
        ((x, torch.tensor([[0], [8]]), relation[:1], BATCH), ValueError, "block"),
    ):
        with pytest.raises(error, match=text):
            layer(*arguments)
    for times, error, text in (
        (1.0, TypeError, "earlier_than must be a tensor"),
        (torch.zeros(N - 1), ValueError, r"one time per node, \[9\]; got \[8\]"),
        (torch.zeros(N, 1), ValueError, "one time per row"),
        (torch.full((N,), torch.nan), ValueError, "NaN"),
        (torch.zeros(N).cdouble(), (TypeError, ValueError), "earlier_than"),
    ):
        with pytest.raises(error, match=text):
            layer(x, pairs, relation, earlier_than=times)
    with pytest.raises(TypeError, match="time must hold numbers"):
        RelationalAttention(C, H, R, T)(x, pairs, relation, None, torch.rand(E).cdouble())
    with pytest.raises(ValueError, match="time_channels"):
        RelationalAttention(C, H, R, T)(x, pairs, relation)
