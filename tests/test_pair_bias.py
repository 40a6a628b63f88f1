"""Biases of pairs by a function or a matrix, beside tensors of all pairs, in float64."""

import copy
import math

import pytest
import torch
from torch import nn

import gattn
from gattn import CompleteGraph, LinearPairBias, PairBias, SparseGraph
from gattn.nn import GPSConv, MLPBias, MultiheadAttention, RadialBias

N, M, H, C, S = 9, 7, 2, 4, 3
MODULES = {
    "gaussian": lambda: RadialBias(H, 5, 3.0),
    "bessel": lambda: RadialBias(H, 5, 3.0, basis="bessel"),
    "log-spaced": lambda: MLPBias(H, S, 8),
    "plain": lambda: MLPBias(H, S, 8, log_spaced=False),
}


pytestmark = pytest.mark.usefixtures("in_double")


def values(name, module, x, y):
    """The biases of all pairs, `[..., H, N, M]`, by the modules' equations."""
    kernel, difference = module.kernel, x.unsqueeze(-2) - y.unsqueeze(-3)
    if name in ("log-spaced", "plain"):
        given = difference.sign() * difference.abs().log1p() if name == "log-spaced" else difference
        return (torch.relu(given @ kernel.lin1.weight.t() + kernel.lin1.bias) @ kernel.lin2.weight.t()).movedim(-1, -3)
    distance = torch.where(difference.eq(0).all(-1), 0.0, (difference.square().sum(-1) + 1e-300).sqrt()).unsqueeze(-1)
    if name == "gaussian":
        functions = torch.exp(
            -((distance - kernel.factor) ** 2) / (2 * 0.75**2)
        )  # three between five centres' four gaps
    else:
        functions = math.sqrt(2 / 3.0) * torch.where(
            distance == 0, kernel.factor, (kernel.factor * distance).sin() / distance.clamp(min=1e-12)
        )
    return (functions @ kernel.weight).movedim(-1, -3)


def dense(query, key, value, bias, seen):
    logits = torch.einsum("...nhc,...mhc->...hnm", query, key) / math.sqrt(query.size(-1)) + bias
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("...hnm,...mhc->...nhc", weights, value)


def seen_by(graph, n, m):
    seen = torch.zeros(n, m, dtype=torch.bool)
    source, target = graph.edge_index
    seen[target, source] = True
    return seen


GRAPHS = {
    "complete": CompleteGraph(N),
    "causal": CompleteGraph(N, causal=True),
    "window": CompleteGraph(N, window=2),
    "packed": CompleteGraph.packed([4, 0, 5]),
    "list": SparseGraph(torch.tensor([[0, 1, 2, 2, 8], [1, 1, 0, 5, 3]]), N, N),
    "one": CompleteGraph(1),
    "nothing": CompleteGraph(0),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("kind", GRAPHS)
def test_on_every_graph(name, kind):
    graph, module = GRAPHS[kind], MODULES[name]()
    size = graph.num_targets
    tensors = [torch.randn(size, H, C, requires_grad=True) for _ in range(3)]
    position = torch.randn(size, S, requires_grad=True)
    if size > 3:
        with torch.no_grad():
            position[1] = position[0]  # a distance of zero
    expected = dense(*tensors, values(name, module, position, position), seen_by(graph, size, size))
    found = gattn.attend(*tensors, graph, bias=module(position))
    leaves = [*tensors, position, *module.parameters()]
    grads = [
        torch.autograd.grad(out.sin().sum(), leaves, materialize_grads=True, allow_unused=True)
        for out in (found, expected)
    ]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("causal", [False, True])
def test_other_sources_and_many_parts(causal, monkeypatch):
    """Some targets at a time, of which the first see nothing in a causal graph with fewer sources."""
    monkeypatch.setattr("gattn.ops.backends.dense._HELD", 1)
    monkeypatch.setattr("gattn.ops.backends.dense._LEAST_HELD", 1)
    n, m, module = 80, 70, MODULES["gaussian"]()
    query, key, value = (torch.randn(size, H, C, requires_grad=True) for size in (n, m, m))
    x, y = torch.randn(n, S, requires_grad=True), torch.randn(m, S, requires_grad=True)
    graph, mask = CompleteGraph(n, m, causal=causal), torch.rand(n, m) < 0.8
    expected = dense(query, key, value, values("gaussian", module, x, y), seen_by(graph, n, m) & mask)
    found = gattn.attend(query, key, value, graph, bias=module(x, y), mask=mask)
    leaves = [query, key, value, x, y, *module.parameters()]
    grads = [torch.autograd.grad(out.sin().sum(), leaves) for out in (found, expected)]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*grads)
    assert str(gattn.explain_call(query, key, value, graph, bias=module(x, y))).startswith("dense: tiles")


def test_elements_of_a_batch_have_positions_of_their_own():
    module, lengths = MODULES["bessel"](), torch.tensor([5, 9])
    tensors = [torch.randn(2, N, H, C, requires_grad=True) for _ in range(3)]
    position = torch.randn(2, N, S)
    for graph in (CompleteGraph(N), CompleteGraph(N, source_lengths=lengths)):
        found = gattn.attend(*tensors, graph, bias=module(position))
        for place, length in enumerate(lengths.tolist() if graph.has_lengths else (N, N)):
            seen = torch.arange(N) < length
            parts = (tensor[place] for tensor in tensors)
            expected = dense(*parts, values("bessel", module, position[place], position[place]), seen)
            torch.testing.assert_close(found[place], expected)


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
def test_blocks_of_other_sizes_and_targets_that_were_chosen(backend):
    module, x, y = MODULES["log-spaced"](), torch.randn(N, S), torch.randn(M, S)
    query, key = torch.randn(N, H, C), torch.randn(M, H, C)
    graph = CompleteGraph.packed([6, 3], [2, 5])
    found = gattn.attend(query, key, key, graph, bias=module(x, y), backend=backend)
    for of, seen in ((slice(0, 6), slice(0, 2)), (slice(6, 9), slice(2, 7))):
        bias = values("log-spaced", module, x[of], y[seen])
        torch.testing.assert_close(found[of], dense(query[of], key[seen], key[seen], bias, torch.ones(1, 1) > 0))
    index, graph = torch.tensor([1, 1, 3, 8]), CompleteGraph.packed([4, 5])
    expected = gattn.attend(query, query, query, graph, bias=module(x))[index]
    found = gattn.attend(query[index], query, query, graph.for_targets(index), bias=module(x[index], x))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("side", [0, 1])
def test_a_batch_of_sources_or_targets_only(side):
    x, index = torch.randn(2, N, H, C), torch.randint(N, (2, 20))
    features = [torch.randn(N, S), torch.randn(2, N, S)]
    bias = PairBias(lambda a, b: (a @ b.mT).unsqueeze(-1), features[side], features[1 - side])
    mask = torch.zeros(N, N, dtype=torch.bool).index_put((index[1], index[0]), torch.tensor(True))
    graph = SparseGraph(mask.nonzero().T.flip(0), N, N)
    expected = gattn.attend(x, x, x, CompleteGraph(N), bias=bias, mask=mask)
    torch.testing.assert_close(gattn.attend(x, x, x, graph, bias=bias), expected)


def test_forces():
    """Second derivatives: energies of positions, whose gradients are trained."""
    module, x = MODULES["gaussian"](), torch.randn(5, H, C)

    def energy(position):
        return gattn.attend(x, x, x, CompleteGraph(5), bias=module(position)).square().sum()

    position = torch.randn(5, S, requires_grad=True)
    assert torch.autograd.gradcheck(energy, position)
    assert torch.autograd.gradgradcheck(energy, position)


def test_half_precision_and_dropout():
    module = MODULES["gaussian"]().float()
    x, position = torch.randn(N, H, C, dtype=torch.bfloat16), torch.randn(N, S, dtype=torch.float)
    bias = module(position)
    found = gattn.attend(x, x, x, CompleteGraph(N), bias=bias)
    wide = gattn.attend(x.float(), x.float(), x.float(), CompleteGraph(N), bias=bias)
    torch.testing.assert_close(found.float(), wide, rtol=2e-2, atol=2e-2)
    dropped = gattn.attend(x, x, x, CompleteGraph(N), bias=bias, dropout=0.5, training=True)
    assert (dropped != found).any()


def test_weights_and_layers():
    module, position, x = MODULES["plain"](), torch.randn(N, S), torch.randn(N, 8)
    attention = MultiheadAttention(8, H)
    bias = values("plain", module, position, position)
    expected = attention(x, x, x, attn_mask=bias, average_attn_weights=False)
    found = attention(x, x, x, attn_bias=module(position), average_attn_weights=False)
    torch.testing.assert_close(found, expected)
    block = GPSConv(8, None, H, norm=None).eval()
    batch = torch.tensor([0] * 4 + [1] * 5)
    out = block(x, torch.zeros(2, 0, dtype=torch.long), batch, attn_bias=module(position))
    first = block(x[:4], torch.zeros(2, 0, dtype=torch.long), attn_bias=module(position[:4]))
    torch.testing.assert_close(out[:4], first)


def test_a_function_and_a_module_in_training():
    """A function needs no parameters, and a module's are trained through many steps, and copied with it."""
    position, x = torch.randn(N, S), torch.randn(N, H, C)
    found = gattn.attend(x, x, x, CompleteGraph(N), bias=PairBias(lambda a, b: -torch.cdist(a, b)[..., None], position))
    expected = dense(x, x, x, -torch.cdist(position, position), torch.ones(N, N, dtype=torch.bool))
    torch.testing.assert_close(found, expected)
    module = MODULES["gaussian"]()
    model, optimizer = copy.deepcopy(module), None
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    losses = []
    for _ in range(20):
        loss = (gattn.attend(x, x, x, CompleteGraph(N), bias=model(position)) - expected).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "graph", [CompleteGraph(N, M), SparseGraph(torch.tensor([[0, 1, 6], [8, 3, 3]]), N, M)], ids=str
)
@pytest.mark.parametrize("heads", [1, H])
def test_features_of_pairs(graph, heads):
    pairs, weight = torch.randn(N, M, 5, requires_grad=True), torch.randn(5, heads, requires_grad=True)
    query, key, value = (torch.randn(2, size, H, C, requires_grad=True) for size in (N, M, M))
    expected = dense(query, key, value, (pairs @ weight).movedim(-1, 0), seen_by(graph, N, M))
    found = gattn.attend(query, key, value, graph, bias=LinearPairBias(pairs, weight))
    leaves = [query, key, value, pairs, weight]
    grads = [torch.autograd.grad(out.sin().sum(), leaves) for out in (found, expected)]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*grads)


def test_compiled():
    module, x = MODULES["gaussian"]().float(), torch.randn(N, H, C, dtype=torch.float)
    position = torch.randn(N, S, dtype=torch.float)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = module

        def forward(self, x, position):
            return gattn.attend(x, x, x, CompleteGraph(N), bias=self.bias(position))

    gattn.testing.assert_compiles_whole(Model(), x, position, dynamic=False)


def test_wrong_inputs():
    position, x = torch.randn(N, S), torch.randn(N, H, C)
    for make, error, text in (
        (lambda: PairBias(3, position), TypeError, "function"),
        (lambda: PairBias(torch.cdist, position.long()), TypeError, "x must be a tensor of floating"),
        (lambda: PairBias(torch.cdist, position[0]), ValueError, "features"),
        (lambda: PairBias(torch.cdist, position, position[None, None]), ValueError, "y must be features"),
        (lambda: LinearPairBias(position, position), ValueError, r"\[N, M, P\]"),
        (lambda: LinearPairBias(torch.randn(N, N, 4), torch.randn(3, H)), ValueError, r"\[4, H\]"),
        (lambda: RadialBias(H, 0), ValueError, "num_radial"),
        (lambda: RadialBias(H, basis="cosine"), ValueError, "basis"),
        (lambda: RadialBias(H, cutoff=0.0), ValueError, "cutoff"),
        (lambda: MLPBias(H, hidden_channels=0), ValueError, "hidden_channels"),
        (lambda: MLPBias(H, log_spaced="no"), TypeError, "log_spaced"),
        (lambda: MLPBias(H, 2)(position), ValueError, "2 coordinates"),
        (lambda: RadialBias(H)(position, position[:, :2]), ValueError, "3 coordinates"),
        (lambda: MLPBias(H, S).float()(position), ValueError, "float64"),
    ):
        with pytest.raises(error, match=text):
            make()
    for bias, graph, text in (
        (PairBias(torch.cdist, position), CompleteGraph(N), "must return biases"),
        (RadialBias(H)(position[:-1]), CompleteGraph(N), "one row for each of 9 nodes"),
        (RadialBias(H)(position.expand(3, N, S)), CompleteGraph(N), "3 elements"),
        (LinearPairBias(torch.randn(N, M, 4), torch.randn(4, H)), CompleteGraph(N), r"\[9, 9, P\]"),
        (LinearPairBias(torch.randn(N, N, 4), torch.randn(4, 3)), CompleteGraph(N), r"\[P, 2\]"),
        (LinearPairBias(torch.randn(N, N, 4), torch.randn(4, H)), CompleteGraph.packed([4, 5]), "packed"),
        (RadialBias(3)(position), CompleteGraph(N), "heads|3"),
    ):
        with pytest.raises(ValueError, match=text):
            gattn.attend(x, x, x, graph, bias=bias)


def test_far_pairs_do_not_underflow():
    """Numbers below the smallest normal ones are many times as slow as others."""
    bias = RadialBias(16, 16)
    torch.nn.init.eye_(bias.kernel.weight)
    position = torch.tensor([[0.0], [1.0], [9.0], [1e4]])
    found = bias.kernel(position, position)
    assert found.min() > 1e-30
    exact = (-0.5 * ((position - position.T).abs().unsqueeze(-1) - torch.linspace(0, 10, 16)).mul(1.5).square()).exp()
    torch.testing.assert_close(found, exact)
