"""Scores and distributions of users' own on lists of edges: the kernels compute the rest."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from gattn import (
    CompleteGraph,
    Distribution,
    DotScore,
    GATScore,
    Hard,
    LocalGaussian,
    Projected,
    Score,
    Softmax,
    SparseGraph,
    Sparsemax,
    TopK,
    WithinTypes,
    attend,
)
from gattn.ops import custom_parts
from gattn.ops.backends import triton
from gattn.ops.chunks import chunk_sizes
from gattn.scores import Family, family_of
from gattn.testing import random_edge_index
from gattn.torch_private import backward_pass
from tests.cases import pairs

N, M, E, H, C = 9, 7, 60, 2, 3


class Distance(Score):
    """It holds a tensor, and uses another one that it does not tell of."""

    def __init__(self, scale, hidden):
        self.scale, self.hidden = scale, hidden

    def logits(self, query, key, edge):
        difference = (query - key) * self.hidden
        if edge is not None:
            difference = difference + edge
        return -difference.square().sum(-1) * self.scale

    def tensors(self):
        return (self.scale,)


class Grouped(DotScore):
    def logits(self, query, key, edge):
        return super().logits(query, key, edge).tanh()


class Scalar(GATScore):
    def logits(self, query, key, edge):
        return super().logits(query, key, edge).sin()


@pytest.fixture(params=[1, 10_000], ids=["chunks", "at once"])
def chunks(request, monkeypatch):
    monkeypatch.setattr(custom_parts, "_FEWEST", request.param)


def leaves(batch=(), key_heads=H, channels=(C,), dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "query": (*batch, N, H, *channels),
        "key": (*batch, M, key_heads, *channels),
        "value": (*batch, M, key_heads, C),
        "edge": (E, H, *channels),
        "bias": (E, H),
        "edge_value": (E, H, C),
    }
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for name, shape in shapes.items()
    }


GRAPH = SparseGraph(random_edge_index(M, N, E), num_sources=M, num_targets=N)


def results(backend, score, tensors, more=(), graph=GRAPH, **options):
    """Output, weights, and all gradients."""
    torch.manual_seed(5)
    out = attend(**tensors, graph=graph, score=score, backend=backend, return_weights=True, **options)
    asked = [*tensors.values(), *more]
    return [*out, *torch.autograd.grad(sum((x * x.detach().cos()).sum() for x in out), asked)]


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("options", [{}, {"dropout": 0.4, "training": True}, {"mask": torch.arange(E) % 3 > 0}])
def test_agrees_with_the_reference(chunks, batch, options):
    scale, hidden = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.7, 1.3))
    tensors = leaves(batch)
    found, expected = (
        results(backend, Distance(scale, hidden), tensors, (scale, hidden), **options)
        for backend in ("cpu", "reference")
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("score", "shapes"), [(Grouped(), {"key_heads": 1}), (Scalar(), {"channels": ()})])
def test_grouped_and_scalar_scores(chunks, score, shapes):
    tensors = leaves(**shapes)
    torch.testing.assert_close(results("cpu", score, tensors), results("reference", score, tensors))


def test_the_other_flow(chunks):
    tensors = leaves()
    turned = SparseGraph(GRAPH.adjacency.flip(0), num_sources=M, num_targets=N, flow="target_to_source")
    found, expected = (results("cpu", Grouped(), tensors, graph=graph) for graph in (turned, GRAPH))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_is_computed_in_single(chunks, dtype):
    score = Grouped()
    exact = results("reference", score, leaves())
    found, peer = (results(backend, score, leaves(dtype=dtype)) for backend in ("cpu", "reference"))
    for x, y, z in zip(found, peer, exact, strict=True):
        assert x.dtype == dtype
        assert (x - z).abs().max() <= 4 * (y - z).abs().max() + torch.finfo(dtype).eps


def test_second_derivatives(chunks):
    scale, hidden = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.7, 1.3))
    tensors = leaves()
    found = []
    for backend in ("cpu", "reference"):
        out = attend(**tensors, graph=GRAPH, score=Distance(scale, hidden), backend=backend)
        asked = [*tensors.values(), scale, hidden]
        first = torch.autograd.grad(out.square().sum(), asked, create_graph=True)
        found.append(torch.autograd.grad(sum(grad.square().sum() for grad in first), asked))
    torch.testing.assert_close(*found)


def test_backward_twice(chunks):
    """Sums of gradients begin anew."""
    tensors = leaves()
    out = attend(**tensors, graph=GRAPH, score=Grouped(), backend="cpu").sum()
    first, second = (torch.autograd.grad(out, list(tensors.values()), retain_graph=True) for _ in range(2))
    torch.testing.assert_close(first, second)


def test_backward_again_after_it_failed(monkeypatch):
    monkeypatch.setattr(custom_parts, "_FEWEST", 1)
    tensors, calls = leaves(), []

    class Failing(Grouped):
        def logits(self, query, key, edge):
            if backward_pass() >= 0:
                calls.append(1)
                if len(calls) == 3:
                    raise KeyError("in the third chunk of the backward pass")
            return super().logits(query, key, edge)

    out = attend(**tensors, graph=GRAPH, score=Failing(), backend="cpu").sum()
    with pytest.raises(KeyError):
        torch.autograd.grad(out, list(tensors.values()), retain_graph=True)
    found = torch.autograd.grad(out, list(tensors.values()))
    expected = attend(**tensors, graph=GRAPH, score=Grouped(), backend="reference").sum()
    torch.testing.assert_close(found, torch.autograd.grad(expected, list(tensors.values())))


def test_a_part_of_the_gradients(chunks):
    tensors = leaves()
    for name in ("query", "key", "edge"):
        given = {n: t if n == name else t.detach() for n, t in tensors.items()}
        found, expected = (
            torch.autograd.grad(attend(**given, graph=GRAPH, score=Grouped(), backend=b).sum(), given[name])
            for b in ("cpu", "reference")
        )
        torch.testing.assert_close(found, expected)


def test_no_edge_has_its_channels_at_once(monkeypatch):
    """The largest tensor that is saved for the backward pass has as many rows as nodes, not as edges."""
    monkeypatch.setattr(custom_parts, "_FEWEST", 1)
    tensors = {name: leaves()[name] for name in ("query", "key", "value")}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x.numel()), x)[1], lambda x: x):
        attend(**tensors, graph=GRAPH, score=Grouped(), backend="cpu")
    assert max(saved) < E * H * C


@pytest.mark.parametrize(
    ("total", "largest"), [(0, 5), (1, 1), (10, 1), (10, 3), (100, 7), (622_000, 10_500), (10**6, 64)]
)
def test_parts_of_falling_size(total, largest):
    sizes = chunk_sizes(total, largest)
    assert sum(sizes) == total
    assert all(largest / 2 < size <= largest for size in sizes[:-1])
    assert all(0 < size <= largest for size in sizes)
    if largest >= 64:
        rises = sum(after >= before for before, after in pairwise(sizes))
        assert rises <= len(sizes) / (largest // 8)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures resident memory as Linux counts it")
def test_no_memory_of_a_row_per_edge():
    """200 000 edges of 256 channels would be 205 MB; the nodes' are 4 MB, and chunks' about as much."""
    code = (
        "import torch, gattn\n"
        "from benchmarks.framework.measuring import peak_above\n"
        "class Mine(gattn.Score):\n"
        "    def logits(self, query, key, edge):\n"
        "        return (query * key).sum(-1).tanh()\n"
        "edges, grad = torch.randint(4000, (2, 200_000)), torch.randn(4000, 8, 32)\n"
        "query, key, value = (torch.randn(4000, 8, 32, requires_grad=True) for _ in range(3))\n"
        "step = lambda edges: gattn.attend(query, key, value, edges, score=Mine()).backward(grad)\n"
        "step(edges[:, :10_000])\n"
        "print(peak_above(lambda: step(edges))[1])"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert int(run.stdout) < 130e6


def test_it_is_what_auto_chooses(monkeypatch):
    calls = []
    original = custom_parts.finished_logits
    monkeypatch.setattr(
        "gattn.ops.backends.kernels.finished_logits", lambda *given: calls.append(1) or original(*given)
    )
    x = torch.randn(4, H, C)
    attend(x, x, x, torch.tensor([[0, 1], [1, 2]]), score=Grouped())
    attend(x, x, x, CompleteGraph(4, causal=True), score=Grouped())  # it does not say that it broadcasts
    assert len(calls) == 2


class Mixin:
    def logits(self, query, key, edge):
        return (query * key).sum(-1) * 7


class Mixed(Mixin, DotScore):
    """Its formula comes from a class beside the one that kernels know."""


def changed():
    score = DotScore()
    score.logits = lambda query, key, edge: (query * key).sum(-1) * 7
    return score


@pytest.mark.parametrize("graph", [GRAPH, CompleteGraph(N, M), CompleteGraph.packed([N], [M])])
@pytest.mark.parametrize("make", [Mixed, changed])
def test_another_formula_is_not_its_parents(make, graph):
    query, key, value = (leaves()[name].detach() for name in ("query", "key", "value"))
    found, expected = (
        attend(query, key, value, graph, score=make(), backend=backend) for backend in ("auto", "reference")
    )
    torch.testing.assert_close(found, expected)
    assert family_of(make(), C) is None


class Returns(Score):
    def __init__(self, function):
        self.function = function

    def logits(self, query, key, edge):
        return self.function((query * key).sum(-1))


class Broadcasting(Returns):
    broadcasts = True

    def logits(self, query, key, edge):
        return self.function((query * key).sum(-1))


WRONG = {
    "a channel too many": lambda x: x.unsqueeze(-1),
    "one head": lambda x: x[..., :1],
    "twice the heads": lambda x: torch.cat([x, x], -1),
    "integers": lambda x: x.long(),
    "booleans": lambda x: x > 0,
    "complex numbers": lambda x: x + 1j,
    "nothing": lambda x: None,
    "a list": lambda x: x.tolist(),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(
    ("graph", "backend", "score"),
    [
        (GRAPH, "cpu", Returns),
        (GRAPH, "reference", Returns),
        (CompleteGraph(N, M), "auto", Broadcasting),
        (CompleteGraph(N, M), "reference", Broadcasting),
        (CompleteGraph.packed([4, 5], [3, 4]), "auto", Broadcasting),
    ],
)
def test_logits_that_are_wrong(wrong, graph, backend, score):
    query, key, value = (leaves()[name].detach() for name in ("query", "key", "value"))
    with pytest.raises(ValueError, match=rf"{score.__name__}\.logits\(\) must return one logit per .*; got"):
        attend(query, key, value, graph, score=score(WRONG[wrong]), backend=backend)


@pytest.mark.parametrize("graph", [CompleteGraph(N, M), CompleteGraph.packed([4, 5], [3, 4])])
@pytest.mark.parametrize("end", ["query", "key"])
def test_logits_of_one_end(graph, end):
    class Own(Score):
        broadcasts = True

        def logits(self, query, key, edge):
            return (query if end == "query" else key).sum(-1)

    query, key, value = (leaves()[name].detach() for name in ("query", "key", "value"))
    found, expected = (
        attend(query, key, value, graph, score=Own(), backend=backend) for backend in ("dense", "reference")
    )
    torch.testing.assert_close(found, expected)


def test_weights_that_are_wrong():
    class Few(Distribution):
        def weights(self, logits, index, num_targets, dim):
            return logits.narrow(dim, 0, 1)

    query, key, value = (leaves()[name].detach() for name in ("query", "key", "value"))
    for graph in (GRAPH, CompleteGraph(N, M)):
        with pytest.raises(ValueError, match=r"Few\.weights\(\) must return one weight per logit"):
            attend(query, key, value, graph, distribution=Few())


def test_another_distribution_is_not_the_softmax():
    class Sigmoid:
        def weights(self, logits, index, num_targets, dim):
            return logits.sigmoid()

    class Mine(Sigmoid, Softmax):
        pass

    query, key, value = (leaves()[name].detach() for name in ("query", "key", "value"))
    for graph in (GRAPH, CompleteGraph(N, M)):
        found, expected = (
            attend(query, key, value, graph, distribution=Mine(), backend=backend) for backend in ("auto", "reference")
        )
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_a_family_that_a_backend_does_not_know(backend, monkeypatch):
    monkeypatch.setattr(Score, "_class_of_family", dict(Score._class_of_family))

    class New(DotScore):
        families = ("new",)

        def family(self, channels):
            return Family("new")

        def logits(self, query, key, edge):
            return (query * (key if edge is None else key + edge)).sum(-1).tanh()

    if not triton.Triton().serves(torch.device("cpu")):
        pytest.skip("Triton's interpreter is off")
    tensors = leaves()
    torch.testing.assert_close(results(backend, New(), tensors), results("reference", New(), tensors))


class Ranks(Distribution):
    """It looks at all logits of a target, and at nothing else."""

    def weights(self, logits, index, num_targets, dim):
        exponentials = Softmax().weights(2 * logits, index, num_targets, dim)
        return exponentials.square() + exponentials


FOREIGN = {
    "own": Ranks(),
    "sparsemax": Sparsemax(),
    "top 2": TopK(2),
    "drawn": Hard(estimator="straight_through"),
    "local": LocalGaussian(torch.linspace(0, M, N, dtype=torch.float64), 3.0),
    "within": WithinTypes(torch.arange(E) % 3),
}
KNOWN = {"dot": DotScore(), "gat": GATScore(), "own": Grouped()}


@pytest.mark.parametrize(
    ("distribution", "score", "terms", "options", "batch"),
    pairs(
        FOREIGN,
        KNOWN,
        ((), ("edge",), ("bias", "edge_value"), ("edge", "bias", "edge_value")),
        ("", "dropout", "mask", "backward alone"),
        ((), (2,)),
    ),
)
def test_kernels_leave_other_distributions_their_weights(distribution, score, terms, options, batch):
    tensors = leaves(batch, channels=() if score == "gat" else (C,))
    tensors = {name: tensor for name, tensor in tensors.items() if name in ("query", "key", "value", *terms)}
    more = {
        "dropout": {"dropout": 0.4, "training": True},
        "mask": {"mask": torch.arange(E) % 3 > 0},
    }.get(options, {})
    found, expected = (
        results(backend, KNOWN[score], tensors, distribution=FOREIGN[distribution], **more)
        for backend in ("cpu", "reference")
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("distribution", FOREIGN)
@pytest.mark.parametrize("where", ["bias", "key"])
def test_logits_of_minus_infinity_are_no_edges(distribution, where):
    tensors = leaves(channels=())
    with torch.no_grad():
        tensors["bias"][::4] = -torch.inf if where == "bias" else 0.0
        tensors["key"][:2] = -torch.inf if where == "key" else 0.0
    found, expected = (
        results(backend, GATScore(), tensors, distribution=FOREIGN[distribution]) for backend in ("cpu", "reference")
    )
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_hard_attention():
    tensors = leaves()
    found, expected = (
        attend(**tensors, graph=GRAPH, distribution=Hard(sample=False), backend=backend)
        for backend in ("cpu", "reference")
    )
    torch.testing.assert_close(found, expected)


def test_other_distributions_make_no_vector_for_each_edge():
    edges = torch.randint(1000, (2, 100_000))
    x = torch.randn(1000, 8, 32, requires_grad=True)
    with torch.profiler.profile(profile_memory=True) as profile:
        attend(x, x, x, edges, distribution=TopK(3)).sum().backward()
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest < 100_000 * 8 * 32 * 4 / 2


def test_features_that_are_values_too():
    """With a distribution that kernels do not know, edges' vectors are made for their values."""
    tensors = leaves()
    features = torch.randn(E, 4, dtype=torch.float64)
    weight = torch.randn(H, C, 4, dtype=torch.float64)
    query, key, value = (tensors[name] for name in ("query", "key", "value"))
    options = {"edge": Projected(features, weight), "edge_value": True, "distribution": "sparsemax"}
    found, expected = (attend(query, key, value, GRAPH, **options, backend=backend) for backend in ("cpu", "reference"))
    torch.testing.assert_close(found, expected)
