"""Attention in two halves: `weigh` and `aggregate`."""

import pytest
import torch

import gattn
from gattn import (
    AdditiveScore,
    CompleteGraph,
    DotScore,
    GATScore,
    Projected,
    Score,
    SparseGraph,
    Typed,
    aggregate,
    attend,
    weigh,
)
from gattn.testing import random_edge_index

N, M, E, H, C = 9, 7, 40, 2, 3
EDGES = random_edge_index(M, N, E, seed=5)


class Own(Score):
    def logits(self, query, key, edge):
        return (query - key + edge).square().sum(-1)


def tensors(batch=(), channels=(C,)):
    generator = torch.Generator().manual_seed(2)
    shapes = {
        "query": (*batch, N, H, *channels),
        "key": (*batch, M, H, *channels),
        "value": (*batch, M, H, C),
        "edge": (E, H, *channels),
        "bias": (E, H),
    }
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for name, shape in shapes.items()
    }


VECTOR = torch.randn(H, C, dtype=torch.float64)
#: The score, whether it is of scalars, and its formula.
SCORES = {
    "dot": (DotScore(0.5), (C,), lambda q, k, e: 0.5 * (q * (k + e)).sum(-1)),
    "gat": (GATScore(0.1), (), lambda q, k, e: torch.nn.functional.leaky_relu(q + k + e, 0.1)),
    "additive": (
        AdditiveScore(VECTOR, "gelu"),
        (C,),
        lambda q, k, e: (torch.nn.functional.gelu(q + k + e) * VECTOR).sum(-1),
    ),
    "own": (Own(), (C,), lambda q, k, e: (q - k + e).square().sum(-1)),
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("backend", ["cpu", "reference", "auto"])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_logits(name, batch, backend, flow):
    score, channels, formula = SCORES[name]
    given = tensors(batch, channels)
    del given["value"]
    graph = SparseGraph(EDGES if flow == "source_to_target" else EDGES.flip(0), N, M, flow=flow)
    mask = torch.arange(E) % 4 > 0
    logits = weigh(**given, graph=graph, mask=mask, score=score, distribution=None, backend=backend)
    node = -2 - len(channels)
    ends = given["query"].index_select(node, EDGES[1]), given["key"].index_select(node, EDGES[0])
    expected = formula(*ends, given["edge"]) + given["bias"]
    torch.testing.assert_close(logits, expected.masked_fill(~mask[:, None], -torch.inf))
    found, wanted = (torch.autograd.grad(x[..., mask, :].sin().sum(), list(given.values())) for x in (logits, expected))
    torch.testing.assert_close(found, wanted)


GRAPHS = {
    "list": lambda: SparseGraph(EDGES, N, M),
    "bare": lambda: EDGES,
    "flow": lambda: SparseGraph(EDGES.flip(0), N, M, flow="target_to_source"),
    "typed": lambda: gattn.TypedGraph(EDGES, torch.arange(E) % 3, num_targets=N, num_sources=M),
    "complete": lambda: CompleteGraph(N, M),
    "causal": lambda: CompleteGraph(N, M, causal=True, window=(3, 0)),
    "packed": lambda: CompleteGraph.packed([4, 0, 5], [2, 2, 3]),
}
DISTRIBUTIONS = ["softmax", "sigmoid", "sparsemax", gattn.Softmax(sink=0.3), gattn.Identity(normalize=True)]


@pytest.mark.parametrize("backend", ["auto", "reference", "cpu"])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=str)
@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("name", SCORES)
def test_attend_is_both_halves(name, kind, distribution, backend):
    score, channels, _ = SCORES[name]
    is_list, batch = not kind.startswith(("c", "p")), () if kind == "packed" else (2,)
    given = tensors(batch, channels)
    if not is_list:
        del given["edge"], given["bias"]
        if name == "own":
            pytest.skip("needs an edge term")
    value, graph = given.pop("value"), GRAPHS[kind]()
    if kind == "bare":
        given["query"].data[:, EDGES.max() + 1 :] = 0.0
    edge_value = torch.randn(E, H, C, dtype=torch.float64) if is_list else None
    out_bias = torch.randn(H, C, dtype=torch.float64)
    options = {"distribution": distribution, "score": score, "backend": backend}
    terms = {"edge_value": edge_value, "out_bias": out_bias}
    expected, alpha = attend(**given, value=value, graph=graph, **options, **terms, return_weights=True)
    weights = weigh(**given, graph=graph, **options)
    if kind == "bare":  # the graph takes its sizes from the features of both ends
        graph = SparseGraph(EDGES, N)
    out = aggregate(weights, value, graph, **terms, backend=backend)
    torch.testing.assert_close(weights, alpha)
    torch.testing.assert_close(out, expected)
    leaves = [*given.values(), value]
    found, wanted = (torch.autograd.grad(x.sin().sum(), leaves) for x in (out, expected))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("kind", ["list", "complete"])
def test_second_derivatives(kind):
    query, key, value = (tensors()[name].detach().requires_grad_() for name in ("query", "key", "value"))
    graph = GRAPHS[kind]()
    assert torch.autograd.gradgradcheck(
        lambda *ends: aggregate(weigh(*ends[:2], graph).square(), ends[2], graph), (query, key, value)
    )


@pytest.mark.parametrize("kind", GRAPHS)
def test_dropout_drops_the_same_weights(kind):
    given = tensors(() if kind == "packed" else (2,))
    query, key, value = (given[name] for name in ("query", "key", "value"))
    graph = GRAPHS[kind]() if kind != "bare" else SparseGraph(EDGES, N)
    made = {"dropout": 0.5, "training": True, "backend": "reference"}
    torch.manual_seed(0)
    expected = attend(query, key, value, graph, **made)
    torch.manual_seed(0)
    torch.testing.assert_close(aggregate(weigh(query, key, graph), value, graph, **made), expected)


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types(kind, dtype):
    given = tensors(() if kind == "packed" else (2,))
    query, key, value = (given[name].to(dtype) for name in ("query", "key", "value"))
    graph = GRAPHS[kind]() if kind != "bare" else SparseGraph(EDGES, N)
    weights = weigh(query, key, graph)
    assert {x.dtype for x in (weights if isinstance(weights, list) else [weights])} == {dtype}
    out = aggregate(weights, value, graph)
    assert out.dtype == dtype
    torch.testing.assert_close(
        out.double(), attend(query.double(), key.double(), value.double(), graph), atol=2e-2, rtol=0
    )


class TestFinishedLogits:
    @pytest.mark.parametrize("kind", ["list", "complete", "packed"])
    def test_bias_alone(self, kind):
        given, graph = tensors(), GRAPHS[kind]()
        query, key, value = (given[name] for name in ("query", "key", "value"))
        logits = weigh(query, key, graph, distribution=None)
        bias = graph.as_bias(logits).nan_to_num(neginf=0.0)
        torch.testing.assert_close(weigh(None, None, graph, bias=bias), weigh(query, key, graph))
        torch.testing.assert_close(attend(None, None, value, graph, bias=bias), attend(query, key, value, graph))

    def test_one_end_alone(self):
        given, graph = tensors(channels=()), SparseGraph(EDGES, N, M)
        query, value, edge = (given[name] for name in ("query", "value", "edge"))
        nothing = torch.zeros_like(given["key"])
        made = Projected(torch.randn(E, 3).double(), torch.randn(H, 3).double()), Typed(edge[:5], torch.arange(E) % 5)
        edges = [{"query": end, "edge": term} for end in (query, None) for term in (edge, *made)]
        for terms in ({"query": query}, *edges):
            found = attend(key=None, value=value, graph=graph, score=GATScore(), **terms)
            torch.testing.assert_close(found, attend(key=nothing, value=value, graph=graph, score=GATScore(), **terms))
            alpha = weigh(key=None, graph=graph, score=GATScore(), **terms)
            torch.testing.assert_close(alpha, weigh(key=nothing, graph=graph, score=GATScore(), **terms))

    def test_what_is_missing_is_named(self):
        bias = torch.randn(E, H)
        with pytest.raises(ValueError, match="the graph has to say how many nodes there are"):
            weigh(None, None, EDGES, bias=bias)
        with pytest.raises(TypeError, match="the logits are a tensor with one entry per edge and head; got NoneType"):
            weigh(None, None, SparseGraph(EDGES, N, M))
        with pytest.raises(ValueError, match="bias must have one entry per edge"):
            weigh(None, None, SparseGraph(EDGES, N, M), bias=bias[1:])
        with pytest.raises(ValueError, match="weights must have one entry per edge"):
            aggregate(bias[1:], torch.randn(M, H, C), SparseGraph(EDGES, N, M))
        with pytest.raises(TypeError, match="weights must be a tensor, or a list of tensors; got float"):
            aggregate(1.0, torch.randn(M, H, C), SparseGraph(EDGES, N, M))
        with pytest.raises(ValueError, match="weights must be of a floating-point type; got torch.bool"):
            aggregate(bias > 0, torch.randn(M, H, C), SparseGraph(EDGES, N, M))
        with pytest.raises(TypeError, match="are one tensor; got a list of 1"):
            aggregate([bias], torch.randn(M, H, C), SparseGraph(EDGES, N, M))
        with pytest.raises(ValueError, match="a list with one matrix"):
            aggregate(torch.randn(H, 5, 5), torch.randn(5, H, C), CompleteGraph.packed([2, 3]))


class TestTerms:
    features = torch.randn(E, 4, dtype=torch.float64)
    weight = torch.randn(H, C, 4, dtype=torch.float64)
    table, types = torch.randn(5, H, C, dtype=torch.float64), torch.arange(E) % 5

    @pytest.mark.parametrize("backend", ["auto", "reference"])
    @pytest.mark.parametrize("name", ["dot", "additive"])
    def test_values_of_their_own(self, name, backend):
        score, graph = SCORES[name][0], SparseGraph(EDGES, N, M)
        query, key, value = (tensors()[name] for name in ("query", "key", "value"))
        terms = Projected(self.features, self.weight), Typed(self.table, self.types)
        vectors = torch.einsum("ed,hcd->ehc", self.features, self.weight), self.table[self.types]
        for edge, edge_value in ((0, 1), (1, 0), (None, 0), (None, 1), (0, 0)):
            made, plain = (
                {
                    "edge": None if edge is None else given[edge],
                    "edge_value": True if edge == edge_value else given[edge_value],
                }
                for given in (terms, vectors)
            )
            found = attend(query, key, value, graph, score=score, backend=backend, **made)
            torch.testing.assert_close(found, attend(query, key, value, graph, score=score, **plain))

    def test_sums_of_given_weights(self):
        graph, alpha, value = SparseGraph(EDGES, N, M), torch.randn(E, H).double(), torch.randn(2, M, H, C).double()
        vectors = torch.einsum("ed,hcd->ehc", self.features, self.weight)
        found = aggregate(alpha, value, graph, edge_value=Projected(self.features, self.weight))
        torch.testing.assert_close(found, aggregate(alpha, value, graph, edge_value=vectors))
        found = aggregate(alpha, value, graph, edge_value=Typed(self.table, self.types))
        torch.testing.assert_close(found, aggregate(alpha, value, graph, edge_value=self.table[self.types]))

    def test_no_vector_of_each_edge_is_made_for_values_alone(self):
        edges, x = torch.randint(1000, (2, 100_000)), torch.randn(1000, 8, 16, requires_grad=True)
        term = Projected(torch.randn(100_000, 2), torch.randn(8, 16, 2, requires_grad=True))
        alpha = torch.rand(100_000, 8, requires_grad=True)
        with torch.profiler.profile(profile_memory=True) as profile:
            aggregate(alpha, x, edges, edge_value=term).sum().backward()
        assert max(event.self_cpu_memory_usage for event in profile.events()) < 100_000 * 8 * 16 * 4 / 2


def test_self_loops_come_in_the_order_of_the_graph():
    x = torch.randn(N, H, C)
    graph = SparseGraph(random_edge_index(N, N, E), N, N, self_loops=True)
    source, target = graph.edge_index
    logits = weigh(x, x, graph, distribution=None)
    torch.testing.assert_close(logits, (x[source] * x[target]).sum(-1) / C**0.5)


@pytest.mark.parametrize("backend", ["cpu", "reference", "auto"])
def test_logits_of_minus_infinity_stay(backend):
    given = tensors(channels=())
    del given["value"]
    with torch.no_grad():
        given["bias"][::3] = -torch.inf
    logits = weigh(**given, graph=SparseGraph(EDGES, N, M), score=GATScore(), distribution=None, backend=backend)
    assert ((logits == -torch.inf) == (given["bias"] == -torch.inf)).all()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (2, 1)}, {"lengths": torch.tensor([5, 9])}])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_logits_of_complete_graphs_by_all_backends(options, bias, masked):
    batch = (2,) if "lengths" in options else ()
    if "lengths" in options:
        options = {"source_lengths": options["lengths"], "target_lengths": options["lengths"]}
    x = torch.randn(*batch, N, H, C, dtype=torch.float64)
    bias = torch.randn(*batch, H, N, N, dtype=torch.float64) if bias else None
    mask = torch.rand(N, N) < 0.5 if masked else None
    graph = CompleteGraph(N, **options)
    found = [
        weigh(x, x, graph, bias=bias, mask=mask, distribution=None, backend=backend)
        for backend in ("reference", "cpu", "dense", "auto")
    ]
    expected = torch.einsum("...nhc,...mhc->...hnm", x, x) / C**0.5 + (0 if bias is None else bias)
    seen = weigh(x, x, graph, mask=mask, distribution="sigmoid") > 0  # where there is an edge, at all
    for other in found:
        torch.testing.assert_close(other, expected.masked_fill(~seen, -torch.inf))


def test_logits_of_packed_graphs_are_a_list():
    x, graph = torch.randn(5, H, C), CompleteGraph.packed([2, 3], causal=True)
    logits = weigh(x, x, graph, distribution=None)
    assert [part.shape for part in logits] == [(H, 2, 2), (H, 3, 3)]
    assert logits[1][0, 0, 2] == -torch.inf


def test_both_halves_are_recorded_as_the_whole_is():
    layer, x = gattn.Attention(), torch.randn(N, H, C)
    with gattn.record_attention(layer) as records:
        layer.weighted_sum(layer.weigh(x, x, EDGES), x, EDGES)
        layer(x, x, x, EDGES)
    halves, whole = records[""]
    torch.testing.assert_close(halves.weights, whole.weights)
    assert torch.equal(halves.edge_index, whole.edge_index)


@pytest.mark.parametrize("distribution", [None, "softmax"])
def test_compiled_code(distribution):
    given, score, graph = tensors(), AdditiveScore(VECTOR), SparseGraph(EDGES, N, M)

    def halves(query, key, value):
        alpha = weigh(query, key, graph, score=score, distribution=distribution)
        return aggregate(alpha, value, graph, edge_value=Typed(TestTerms.table, TestTerms.types))

    given = [given[name] for name in ("query", "key", "value")]
    compiled = torch.compile(halves, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), halves(*given))


def test_exported_code():
    class Halves(torch.nn.Module):
        def forward(self, x, edge_index):
            return aggregate(weigh(x, x, edge_index), x, edge_index)

    x, edges = torch.randn(N, H, C), random_edge_index(N, N, E)
    program = torch.export.export(Halves(), (x, edges))
    torch.testing.assert_close(program.module()(x, edges), Halves()(x, edges))


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("graph", [CompleteGraph.packed([4, 3, 0, 2], [2, 3, 1, 1]), CompleteGraph(N, M)])
def test_weights_are_taken_in_the_form_in_which_they_are_given(graph, batch):
    given = tensors(batch)
    leaves = [given[name].requires_grad_() for name in ("query", "key", "value")]
    expected = attend(*leaves, graph)
    found = aggregate(weigh(*leaves[:2], graph), leaves[2], graph)
    torch.testing.assert_close(found, expected)
    grads = (torch.autograd.grad(out.square().sum(), leaves) for out in (found, expected))
    for ours, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(ours, wanted)
