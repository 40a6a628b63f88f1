"""What `attend(return_edges=...)` gives beside the output."""

import pytest
import torch

import gattn
from gattn import AdditiveScore, CompleteGraph, DotScore, GATScore, Score, SparseGraph, attend
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
    "additive": (AdditiveScore(VECTOR, "gelu"), (C,), lambda q, k, e: torch.nn.functional.gelu(q + k + e) @ VECTOR[0]),
    "own": (Own(), (C,), lambda q, k, e: (q - k + e).square().sum(-1)),
}


@pytest.mark.parametrize("name", ["dot", "gat", "own"])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("backend", ["cpu", "reference", "auto"])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_logits(name, batch, backend, flow):
    score, channels, formula = SCORES[name]
    given = tensors(batch, channels)
    graph = SparseGraph(EDGES if flow == "source_to_target" else EDGES.flip(0), N, M, flow=flow)
    mask = torch.arange(E) % 4 > 0
    out, weights, logits = attend(
        **given, graph=graph, mask=mask, score=score, return_weights=True, return_edges=True, backend=backend
    )
    node = -2 - len(channels)
    ends = given["query"].index_select(node, EDGES[1]), given["key"].index_select(node, EDGES[0])
    expected = formula(*ends, given["edge"]) + given["bias"]  # masked edges have logits, too
    torch.testing.assert_close(logits, expected)
    found, wanted = (
        torch.autograd.grad(
            x.sin().sum(), [given[name] for name in ("query", "key", "edge", "bias")], retain_graph=True
        )
        for x in (logits, expected)
    )
    torch.testing.assert_close(found, wanted)
    plain = attend(**given, graph=graph, mask=mask, score=score, return_weights=True, backend=backend)
    torch.testing.assert_close((out, weights), plain)


@pytest.mark.parametrize("kind", [True, "vectors", "logits"])
def test_additive_scores_have_vectors(kind):
    given, score = tensors(), AdditiveScore(VECTOR, "silu")
    _, found = attend(**given, graph=SparseGraph(EDGES, N, M), score=score, return_edges=kind)
    hidden = given["query"][EDGES[1]] + given["key"][EDGES[0]] + given["edge"]
    if kind == "logits":
        hidden = (torch.nn.functional.silu(hidden) * VECTOR).sum(-1) + given["bias"]
    torch.testing.assert_close(found, hidden)
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), given["key"]) for x in (found, hidden)))


def test_projected_features_and_types():
    given, score, graph = tensors(), AdditiveScore(VECTOR), SparseGraph(EDGES, N, M)
    features, weight = torch.randn(E, 4, dtype=torch.float64), torch.randn(H, C, 4, dtype=torch.float64)
    table, types = torch.randn(5, H, C, dtype=torch.float64), torch.randint(5, (E,))
    ends = given["query"][EDGES[1]] + given["key"][EDGES[0]]
    arguments = [given[name] for name in ("query", "key", "value")]
    projected = attend(*arguments, graph, score=score, edge=features, edge_projection=weight, return_edges=True)[1]
    torch.testing.assert_close(projected, ends + torch.einsum("ed,hcd->ehc", features, weight))
    typed = attend(*arguments, graph, score=score, edge=table, edge_type=types, return_edges=True)[1]
    torch.testing.assert_close(typed, ends + table[types])


def test_self_loops_come_in_the_order_of_the_graph():
    x = torch.randn(N, H, C)
    graph = SparseGraph(random_edge_index(N, N, E), N, N, self_loops=True)
    source, target = graph.edge_index
    _, logits = attend(x, x, x, graph, return_edges=True)
    torch.testing.assert_close(logits, (x[source] * x[target]).sum(-1) / C**0.5)


def test_logits_of_a_complete_graph_have_the_shape_of_its_weights():
    x = torch.randn(N, H, C)
    _, weights, logits = attend(x, x, x, CompleteGraph(N, causal=True), return_weights=True, return_edges="logits")
    expected = torch.einsum("nhc,mhc->hnm", x, x) / C**0.5
    assert logits.shape == weights.shape == (H, N, N)
    torch.testing.assert_close(logits, expected.tril())


@pytest.mark.parametrize("backend", ["cpu", "reference", "auto"])
def test_logits_of_minus_infinity_stay(backend):
    given = tensors(channels=())
    with torch.no_grad():
        given["bias"][::3] = -torch.inf
    _, logits = attend(**given, graph=SparseGraph(EDGES, N, M), score=GATScore(), return_edges=1, backend=backend)
    assert ((logits == -torch.inf) == (given["bias"] == -torch.inf)).all()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (2, 1)}, {"lengths": torch.tensor([5, 9])}])
@pytest.mark.parametrize("bias", [False, True])
def test_logits_of_complete_graphs_by_all_backends(options, bias):
    batch = (2,) if "lengths" in options else ()
    if "lengths" in options:
        options = {"source_lengths": options["lengths"], "target_lengths": options["lengths"]}
    x = torch.randn(*batch, N, H, C, dtype=torch.float64)
    bias = torch.randn(*batch, H, N, N, dtype=torch.float64) if bias else None
    found = [
        attend(x, x, x, CompleteGraph(N, **options), bias=bias, return_edges=True, backend=backend)[1]
        for backend in ("reference", "cpu", "dense", "auto")
    ]
    assert found[0].shape == (*batch, H, N, N)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_logits_of_packed_graphs_are_a_list():
    x, graph = torch.randn(5, H, C), CompleteGraph.packed([2, 3])
    _, logits = attend(x, x, x, graph, return_edges=True)
    assert [part.shape for part in logits] == [(H, 2, 2), (H, 3, 3)]


def test_vectors_are_rounded_once():
    x = torch.full((2, 1, 4), 6e4).half()
    score = AdditiveScore(torch.ones(1, 4).half())
    _, found = attend(x, x, x, torch.tensor([[0], [1]]), edge=-x[:1], score=score, return_edges=True)
    assert (found == 6e4).all()


def test_they_are_recorded_and_returned():
    layer = gattn.Attention()
    x = torch.randn(N, H, C)
    with gattn.record_attention(layer) as records:
        _, logits = layer(x, x, x, EDGES, return_edges=True)
    assert logits.shape == (E, H)
    assert records[""][0].weights.shape == (E, H)


@pytest.mark.parametrize("kind", ["vectors", "logits"])
def test_compiled_code(kind):
    given, score, graph = tensors(), AdditiveScore(VECTOR), SparseGraph(EDGES, N, M)
    compiled = torch.compile(
        lambda **given: attend(**given, graph=graph, score=score, return_edges=kind),
        fullgraph=True,
        backend="aot_eager",
    )
    torch.testing.assert_close(compiled(**given), attend(**given, graph=graph, score=score, return_edges=kind))


def test_what_is_not_there_is_refused():
    x = torch.randn(N, H, C)
    with pytest.raises(ValueError, match="return_edges must be False, True, 'logits' or 'vectors'; got 'edges'"):
        attend(x, x, x, EDGES, return_edges="edges")
    with pytest.raises(ValueError, match="'vectors' is for AdditiveScore on a list of edges"):
        attend(x, x, x, EDGES, return_edges="vectors")
    with pytest.raises(ValueError, match="'vectors' is for AdditiveScore on a list of edges"):
        attend(x, x, x, CompleteGraph(N), score=AdditiveScore(torch.ones(H, C)), return_edges="vectors")
