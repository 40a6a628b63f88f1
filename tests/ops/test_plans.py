"""Calls like earlier ones: that they skip the checks, that nothing else does, and that results are the same."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.utils.checkpoint

import gattn
from gattn import (
    AdditiveScore,
    CompleteGraph,
    CosineScore,
    DotScore,
    GATScore,
    Projected,
    SparseGraph,
    Typed,
    aggregate,
    attend,
    weigh,
)
from gattn.ops import checks, plans
from gattn.testing import random_edge_index
from tests.cases import HALF

N, M, E, H, C, D, R = 5, 7, 20, 2, 3, 4, 3


@pytest.fixture
def looked_at(monkeypatch):
    """Counts the calls that are checked."""
    counted, original = [], checks.checked_call

    def checked_call(*args, **kwargs):
        counted.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr("gattn.attention.checked_call", checked_call)
    return counted


def tensors(n=N, m=M, e=E, score="dot", dtype=torch.float32, batch=()):
    """Arguments of a call on a list of edges, with every term."""
    nodes = (H,) if score == "gat" else (H, C)
    shapes = {"query": (*batch, n, *nodes), "key": (*batch, m, *nodes), "value": (*batch, m, H, C)}
    shapes |= {"edge": (e, *nodes), "bias": (e, H), "edge_value": (e, H, C), "out_bias": (H, C)}
    return {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()} | {"mask": torch.rand(e) < 0.8}


def scores(kind, dtype=torch.float32):
    if kind == "gat":
        return GATScore()
    return DotScore() if kind == "dot" else AdditiveScore(torch.randn(H, C, dtype=dtype, requires_grad=True))


def both(leaves, **options):
    """Output and gradients."""
    out = attend(**options)
    return [out, *torch.autograd.grad((out * out).sum(), leaves)]


@pytest.mark.parametrize("kind", ["dot", "gat", "additive"])
@pytest.mark.parametrize(("batch", "dtype"), [((), torch.float32), ((2,), torch.float32), ((), torch.bfloat16)])
def test_results_are_the_same(kind, batch, dtype, looked_at):
    """Also on other numbers of nodes and edges."""
    for round_, (n, m, e) in enumerate([(N, M, E), (N, M, E), (9, 4, 31), (1, 1, 1)]):
        if batch and round_ > 1:  # their sizes are part of the signature
            break
        given, score = tensors(n, m, e, kind, dtype, batch), scores(kind, dtype)
        leaves = [x.requires_grad_() for x in given.values() if x.is_floating_point()] + list(score.tensors())
        options = {**given, "graph": random_edge_index(m, n, e), "score": score}
        results = both(leaves, **options)
        assert len(looked_at) == 1
        plans.forget()
        torch.testing.assert_close(results, both(leaves, **options))
        looked_at.pop()


@pytest.mark.parametrize("graph", ["bare", "sparse", "sized", "loops", "complete", "causal"])
def test_graphs_are_looked_at_once(graph, looked_at):
    x = torch.randn(4, H, C, requires_grad=True)
    make = {
        "bare": lambda: random_edge_index(4, 4, 10),
        "sparse": lambda: SparseGraph(random_edge_index(4, 4, 10)),
        "sized": lambda: SparseGraph(random_edge_index(4, 4, 10), 4, 4),
        "loops": lambda: SparseGraph(random_edge_index(4, 4, 10), self_loops=True),
        "complete": lambda: CompleteGraph(4),
        "causal": lambda: CompleteGraph(4, causal=True),
    }[graph]
    for _ in range(3):
        value = make()
        out = attend(x, x, x, value)
        torch.testing.assert_close(out, attend(x, x, x, value, backend="reference"))
        torch.autograd.grad(out.sum(), x)
    assert len(looked_at) == 1 + 3  # the reference is never planned


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize(
    ("graph", "options"),
    [
        ({}, {"distribution": gattn.Softmax(softcap=2.0)}),
        ({"causal": True}, {"distribution": gattn.Softmax(sink=0.5, softcap=2.0)}),
        ({}, {"distribution": "sigmoid"}),
        ({"window": (1, 2)}, {"distribution": gattn.Sigmoid(normalize=True)}),
        ({"window": (2, 1)}, {}),
        ({"causal": True}, {"mask": torch.tensor([True, False, True, True])}),
        ({}, {"bias": torch.randn(H, 1, 1), "distribution": "tanh"}),
        ({"causal": True, "window": 1}, {"bias": torch.randn(4), "mask": torch.rand(H, 1, 4) < 0.8}),
    ],
)
def test_calls_on_complete_graphs_are_looked_at_once(graph, options, batch, looked_at):
    """Also with another number of targets, if terms fit them."""
    for n in (4, 4, 7, 1):
        query = torch.randn(*batch, n, H, C, requires_grad=True)
        key, value = (torch.randn(*batch, 4, H, C, requires_grad=True) for _ in range(2))
        call = {"query": query, "key": key, "value": value, "graph": CompleteGraph(n, 4, **graph), **options}
        found = both([query, key, value], **call)
        torch.testing.assert_close(found, both([query, key, value], **call, backend="reference"), rtol=1e-4, atol=1e-5)
    assert len(looked_at) == 1 + 4  # the reference is never planned


@pytest.mark.parametrize("weights", [True, "dropped"])
@pytest.mark.parametrize("options", [{}, {"distribution": gattn.Softmax(softcap=2.0)}, {"bias": torch.randn(H, 1, 1)}])
@pytest.mark.parametrize("n", [4, 70])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_returned_weights_are_looked_at_once(batch, n, options, weights, looked_at):
    """They change no bit of the output."""
    for causal in (False, True):
        looked_at.clear()
        for _ in range(3):
            leaves = [torch.randn(*batch, n, H, C, requires_grad=True) for _ in range(3)]
            call = {**dict(zip(("query", "key", "value"), leaves, strict=True)), **options}
            call["graph"] = CompleteGraph(n, causal=causal)
            out, found = attend(**call, return_weights=weights)
            expected, expected_weights = attend(**call, return_weights=weights, backend="reference")
            torch.testing.assert_close(found, expected_weights, rtol=1e-4, atol=1e-5)
            grads = [
                torch.autograd.grad((out * out).sum() + (x * x).sum(), leaves)
                for out, x in ((out, found), (expected, expected_weights))
            ]
            torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)
            if weights is True:
                assert torch.equal(out, attend(**call))
        assert len(looked_at) <= 1 + 3 + 1


@pytest.mark.parametrize(("weights", "dropout"), [(True, 0.0), (True, 0.5), ("dropped", 0.0), ("dropped", 0.5)])
@pytest.mark.parametrize("kind", ["dot", "gat"])
@pytest.mark.parametrize("self_loops", [False, True])
def test_returned_weights_of_lists_are_looked_at_once(self_loops, kind, weights, dropout, looked_at):
    """With their gradients, on other numbers of edges, and dropped as by the reference."""
    options = {"return_weights": weights, "dropout": dropout, "training": True}
    for n, e in ((N, E), (7, 31), (N, E)):
        given, score = tensors(n, n, e, kind), scores(kind)
        given = {name: given[name].requires_grad_() for name in ("query", "key", "value")}
        given |= {"graph": SparseGraph(random_edge_index(n, n, e), self_loops=self_loops), "score": score, **options}
        found = []
        for backend in ("auto", "reference"):
            torch.manual_seed(0)
            out, alpha = attend(**given, backend=backend)
            leaves = [given[name] for name in ("query", "key", "value")]
            found.append([out, alpha, *torch.autograd.grad((out * out).sum() + (alpha * alpha).sum(), leaves)])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert len(looked_at) == 1 + 3  # the reference is never planned


@pytest.mark.parametrize("graph", [random_edge_index(4, 4, 10), CompleteGraph(4)])
def test_which_weights_are_returned_is_part_of_the_signature(graph):
    x = torch.randn(4, H, C)
    for weights in (False, True, "dropped", True, False, "dropped"):
        torch.manual_seed(0)
        result = attend(x, x, x, graph, return_weights=weights, dropout=0.5, training=True)
        assert isinstance(result, tuple) == bool(weights)
        if weights:
            assert bool((result[1] == 0).any()) == (weights == "dropped")


@pytest.mark.parametrize("graph", [random_edge_index(4, 4, 10), CompleteGraph(4), CompleteGraph.packed([3, 1])])
def test_log_sums_are_part_of_the_signature(graph):
    x = torch.randn(4, H, C)
    for _ in range(2):
        expected = attend(x, x, x, graph)
        out, log_sum = attend(x, x, x, graph, return_lse=True)
        assert log_sum.shape == (4, H)
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("name", ["bias", "mask"])
def test_terms_of_complete_graphs_that_do_not_fit(name):
    term = torch.ones(4, 4, dtype=torch.float32 if name == "bias" else torch.bool)
    for n, m in ((4, 4), (5, 4), (4, 5)):
        x = torch.randn(n, H, C), *[torch.randn(m, H, C)] * 2
        call = {"distribution": "sigmoid", name: term}
        if (n, m) == (4, 4):
            attend(*x, CompleteGraph(n, m), **call)
            continue
        with pytest.raises(ValueError, match=f"{name} on this complete graph must be broadcastable"):
            attend(*x, CompleteGraph(n, m), **call)


@pytest.mark.parametrize("law", [gattn.Softmax(sink=0.5), gattn.Softmax(sink=-1.0, softcap=2.0)])
def test_sinks_are_looked_at_once(law, looked_at):
    """Inside of inference mode first, where nothing may be kept that serves training."""
    x, edge_index = torch.randn(4, H, C, requires_grad=True), random_edge_index(4, 4, 10)
    options = {"query": x, "key": x, "value": x, "distribution": law}
    for graph in (edge_index, CompleteGraph(4)):
        plans.forget()
        with torch.inference_mode():
            attend(**options, graph=graph)
        looked_at.clear()
        for _ in range(3):
            torch.testing.assert_close(
                both([x], **options, graph=graph), both([x], **options, graph=graph, backend="reference")
            )
        assert len(looked_at) <= 1 + 3


def test_options_of_graphs_are_part_of_the_signature():
    x, edge_index = torch.randn(4, H, C), random_edge_index(4, 4, 10)
    for options in ({}, {"self_loops": True}, {"flow": "target_to_source"}, {}):
        graph = SparseGraph(edge_index, **options)
        torch.testing.assert_close(attend(x, x, x, graph), attend(x, x, x, graph, backend="reference"))


def test_decoding_is_looked_at_once(looked_at):
    keys = torch.randn(1, 8, H, C)
    with torch.inference_mode():
        for length in range(2, 9):
            query, key = torch.randn(1, 1, H, C), keys[:, :length]
            out = attend(query, key, key, CompleteGraph(1, length, causal=True))
            torch.testing.assert_close(out, attend(query, key, key, CompleteGraph(1, length), backend="reference"))
    assert len(looked_at) - 7 <= 2  # outside of inference mode, keys are other tensors


@pytest.mark.parametrize(
    "change",
    [
        {"value": torch.randn(M - 1, H, C)},
        {"key": torch.randn(M - 1, H, C)},
        {"edge": torch.randn(E - 1, H, C)},
        {"bias": torch.randn(E + 1, H)},
        {"mask": torch.ones(E - 1, dtype=torch.bool)},
        {"query": torch.randn(N, H, C + 1)},
        {"query": torch.zeros(N, H, C, dtype=torch.int64)},
        {"out_bias": torch.randn(H, C + 1)},
        {"dropout": True},
        {"dropout": 2.0},
        {"training": "yes"},
        {"backend": "none"},
        {"graph": SparseGraph(random_edge_index(M, N, E), N + 1, M)},
        {"graph": SparseGraph(random_edge_index(M, N, E), N, M + 1)},
        {"graph": random_edge_index(M, N, E).double()},
        {"graph": random_edge_index(M, N, E)[0]},
        {"graph": random_edge_index(M, N, E) + 5},
        {"distribution": "none"},
        {"distribution": 5},
        {"score": "dot"},
        {"edge_value": torch.randn(E, H, C + 1)},
    ],
)
def test_mistakes_are_found_after_calls_without(change):
    edges = random_edge_index(M, N, E)
    given = tensors() | {"graph": SparseGraph(edges, N, M) if isinstance(change.get("graph"), SparseGraph) else edges}
    attend(**given)
    attend(**given)
    with pytest.raises((ValueError, TypeError, IndexError)):
        attend(**given | change)
    attend(**given)


def test_edits_of_the_graph_are_noticed():
    x, edge_index = torch.randn(4, H, C), random_edge_index(4, 4, 10)
    attend(x, x, x, edge_index)
    edge_index[0] = edge_index[0].roll(1)
    torch.testing.assert_close(attend(x, x, x, edge_index), attend(x, x, x, edge_index, backend="reference"))
    edge_index[0, 0] = 4
    with pytest.raises(IndexError):
        attend(x, x, x, edge_index)


def test_types_are_checked_each_time():
    x, edge_index = torch.randn(4, H, C), random_edge_index(4, 4, 10)
    table, types = torch.randn(R, H, C), torch.randint(R, (10,))
    for _ in range(2):
        attend(x, x, x, edge_index, edge=Typed(table, types))
    with pytest.raises(IndexError):
        attend(x, x, x, edge_index, edge=Typed(table, types + R))


@pytest.mark.parametrize("form", ["projected", "typed"])
def test_terms_of_scalars_that_kernels_make(form, looked_at):
    x, logit = torch.randn(4, H, C, requires_grad=True), torch.randn(4, H, requires_grad=True)
    for edges in (10, 10, 12):
        table, types = torch.randn(R, H, requires_grad=True), torch.randint(R, (edges,))
        features, weight = torch.randn(edges, D, requires_grad=True), torch.randn(H, D, requires_grad=True)
        term = Projected(features, weight) if form == "projected" else Typed(table, types)
        leaves = [x, logit, *(part for part in term if part.requires_grad)]
        options = {"query": logit, "key": logit, "value": x, "graph": random_edge_index(4, 4, edges), "edge": term}
        options |= {"score": GATScore()}
        torch.testing.assert_close(both(leaves, **options), both(leaves, **options, backend="reference"))
    assert len(looked_at) == 1 + 3


def test_one_wide_tensor(looked_at):
    """What makes the rest of a call wide as well is looked at each time."""
    given, score = tensors(dtype=torch.bfloat16), DotScore()
    for name in ("query", "bias"):
        mixed = {**given, name: given[name].float()}
        leaves = [x.requires_grad_() for x in mixed.values() if x.is_floating_point()]
        for _ in range(2):
            options = {**mixed, "graph": random_edge_index(M, N, E), "score": score}
            found = both(leaves, **options)
            plans.forget()
            torch.testing.assert_close(found, both(leaves, **options))
            assert found[0].dtype == both(leaves, **options, backend="reference")[0].dtype


def test_small_blocks_are_planned(looked_at):
    for sizes in ([3, 1, 4], [3, 1, 4], [2, 5]):
        x, graph = torch.randn(sum(sizes), H, C, requires_grad=True), CompleteGraph.packed(sizes, causal=True)
        options = {"query": x, "key": x, "value": x, "graph": graph}
        for backend in ("reference", "dense", "cpu"):
            torch.testing.assert_close(both([x], **options), both([x], **options, backend=backend))
    assert len(looked_at) == 1 + 3 * 3 - 2  # the explicit "cpu" is planned, too


@pytest.mark.parametrize("distribution", ["softmax", gattn.Softmax(softcap=2.0), gattn.Sigmoid()])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (3, 9)}])
def test_blocks_are_planned(options, distribution, looked_at):
    for sizes in ([20, 17, 30], [20, 17, 30], [1, 40], [0, 25, 64, 70]):
        x = torch.randn(sum(sizes), H, C, dtype=torch.float64, requires_grad=True)
        graph = CompleteGraph.packed(sizes, **options)
        call = {"query": x, "key": x, "value": x, "graph": graph, "distribution": distribution}
        torch.testing.assert_close(both([x], **call), both([x], **call, backend="reference"))
    assert len(looked_at) == 1 + 4


def test_blocks_are_those_of_the_call(looked_at):
    """A plan is for all blocks, also those of a batch and of as many nodes."""
    for sizes in ([20, 30], [30, 20], [50]):
        x, graph = torch.randn(2, 50, H, C, dtype=torch.float64, requires_grad=True), CompleteGraph.packed(sizes)
        call = {"query": x, "key": x, "value": x, "graph": graph}
        torch.testing.assert_close(both([x], **call), both([x], **call, backend="reference"))
    assert len(looked_at) == 1 + 3


def bias_of(kind, n, m):
    """A bias of some kind, and its numbers."""
    if kind == "pairs":  # some of them twice
        values = torch.randn(12, H, dtype=torch.float64, requires_grad=True)
        return gattn.SparseBias(torch.stack([torch.randint(m, (12,)), torch.randint(n, (12,))]), values), values
    values = torch.randn(4, H, dtype=torch.float64, requires_grad=True)
    if kind == "function":
        return gattn.BucketBias(lambda i, j: (i - j).abs().clamp(max=3), values), values
    return gattn.BucketBias(torch.randint(4, (n, m), dtype=torch.uint8), values), values


@pytest.mark.parametrize("kind", ["pairs", "buckets", "function"])
@pytest.mark.parametrize("causal", [False, True])
def test_biases_are_looked_at_once(causal, kind, looked_at):
    for n, m in ((N, M), (N, M), (30, 40)):
        x, y = (torch.randn(size, H, C, dtype=torch.float64, requires_grad=True) for size in (n, m))
        bias, values = bias_of(kind, n, m)
        call = {"query": x, "key": y, "value": y, "graph": CompleteGraph(n, m, causal=causal), "bias": bias}
        torch.testing.assert_close(both([x, y, values], **call), both([x, y, values], **call, backend="reference"))
    assert len(looked_at) == 1 + 3


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("pairs", lambda bias: bias.source.fill_(M)),
        ("pairs", lambda bias: bias.target.fill_(-1)),
        ("buckets", lambda bias: bias.buckets.fill_(4)),
        ("buckets", lambda bias: setattr(bias, "buckets", bias.buckets[:-1])),
        ("function", lambda bias: setattr(bias, "buckets", lambda i, j: i + j)),
    ],
)
def test_biases_are_checked_in_each_call(kind, change):
    x, y = torch.randn(N, H, C, dtype=torch.float64), torch.randn(M, H, C, dtype=torch.float64)
    bias, _ = bias_of(kind, N, M)
    for _ in range(2):
        attend(x, y, y, CompleteGraph(N, M), bias=bias)
    change(bias)
    with pytest.raises((ValueError, IndexError)):
        attend(x, y, y, CompleteGraph(N, M), bias=bias)


@pytest.mark.parametrize("options", [{}, {"return_weights": True}, {"distribution": gattn.Sigmoid()}])
def test_lengths_are_looked_at_once(options, looked_at):
    for lengths in ([3, 5], [5, 1], [0, 4]):
        x = torch.randn(2, N, H, C, dtype=torch.float64, requires_grad=True)
        graph = CompleteGraph(N, source_lengths=torch.tensor(lengths), target_lengths=torch.tensor(lengths))
        found = [attend(x, x, x, graph, **options, backend=name) for name in ("auto", "reference")]
        torch.testing.assert_close(*found)
    assert len(looked_at) == 1 + 3
    with pytest.raises(ValueError, match="lengths"):
        attend(x, x, x, CompleteGraph(N, source_lengths=torch.tensor([1, 2, 3])), **options)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"source_lengths": torch.tensor([3, 4])}])
def test_linear_attention_is_looked_at_once(options, normalize, looked_at):
    """By states or, where these would take longer, by pairs."""
    for n in (N, N, 40):
        x = torch.rand(2, n, H, C, dtype=torch.float64, requires_grad=True)
        call = {"query": x, "key": x, "value": x, "graph": CompleteGraph(n, **options)}
        call["distribution"] = gattn.Identity(normalize=normalize)
        torch.testing.assert_close(both([x], **call), both([x], **call, backend="reference"))
    assert len(looked_at) == 1 + 3


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 2}])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_log_sums_are_looked_at_once(batch, options, looked_at):
    graph = CompleteGraph(N, N + 1, **options)
    for _ in range(2):
        x, y = (torch.randn(*batch, n, H, C, dtype=torch.float64, requires_grad=True) for n in (N, N + 1))
        found = []
        for name in ("auto", "reference"):
            out, log_sum = attend(x, y, y, graph, return_lse=True, backend=name)
            found.append([out, log_sum, *torch.autograd.grad((out * out).sum() + log_sum.cos().sum(), [x, y])])
        torch.testing.assert_close(*found)
    assert len(looked_at) == 1 + 2


@pytest.mark.parametrize("kind", ["dot", "gat", "additive"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_log_sums_of_lists_are_looked_at_once(batch, dropout, kind, looked_at):
    """They are what the kernels know of a row: not a second pass over its edges."""
    for _ in range(2):
        call = tensors(score=kind, dtype=torch.float64, batch=batch)
        leaves = [x.requires_grad_() for name, x in call.items() if name != "mask"]
        call |= {"graph": SparseGraph(random_edge_index(M, N - 1, E), N, M), "score": scores(kind, torch.float64)}
        found = []
        for name in ("auto", "reference"):
            torch.manual_seed(0)
            out, log_sum = attend(**call, dropout=dropout, return_lse=True, backend=name)
            seen = log_sum.masked_fill(log_sum == -torch.inf, 0.0)
            loss = (out * out).sum() + seen.cos().sum() - log_sum.exp().sum()
            by_kernels = torch.autograd.grad(loss, leaves, retain_graph=True)
            first = torch.autograd.grad(loss, leaves, create_graph=True)
            second = torch.autograd.grad(sum((x * x).sum() for x in first), leaves, allow_unused=True)
            found.append([out, log_sum, *by_kernels, *first, *(x for x in second if x is not None)])
        torch.testing.assert_close(*found)
    assert len(looked_at) == 1 + 2


def test_gradients_of_log_sums_that_are_not_finite():
    """Those of targets that see nothing go nowhere: here, that of cos(-inf) is NaN."""
    x, edge_index = torch.randn(N, H, C, requires_grad=True), random_edge_index(N, N, E)
    _, log_sum = attend(x, x, x, edge_index, mask=edge_index[1] != 1, return_lse=True)
    assert torch.autograd.grad(log_sum.cos().sum(), x)[0].isfinite().all()


def test_log_sums_of_lists_for_a_batch_of_gradients():
    x = torch.randn(N, H, C, dtype=torch.float64, requires_grad=True)
    edge_index, grads = random_edge_index(N, N, E), torch.randn(3, N, H, dtype=torch.float64)
    found = []
    for name in ("auto", "reference"):
        _, log_sum = attend(x, x, x, edge_index, return_lse=True, backend=name)
        grads = grads.masked_fill(log_sum == -torch.inf, 0.0)
        found.append(torch.autograd.grad(log_sum, x, grads, is_grads_batched=True))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("is_value", [False, True])
@pytest.mark.parametrize("form", ["projected", "typed"])
def test_terms_that_kernels_make(form, is_value, looked_at):
    x, edge_index = torch.randn(4, H, C, requires_grad=True), random_edge_index(4, 4, 10)
    for _ in range(3):
        numbers = torch.randn(10, D), torch.randn(R, H, C)
        term = Projected(numbers[0], torch.randn(H, C, D)) if form == "projected" else None
        term = Typed(numbers[1], torch.randint(R, (10,))) if term is None else term
        options = {"query": x, "key": x, "value": x, "graph": edge_index, "edge": term, "edge_value": is_value}
        expected = both([x], **options, backend="reference")
        torch.testing.assert_close(both([x], **options), expected, rtol=1e-5, atol=1e-4)
    assert len(looked_at) == 1 + 3


def test_one_row_with_any_stride():
    """Of a single row, PyTorch calls any stride contiguous; the next tensor may have more of them."""
    storage = torch.randn(3, H, C)
    one, more = storage[:1].as_strided((1, H, C), (0, C, 1)), storage[:1].expand(3, H, C)
    for value in (one, more, storage, storage[:1], storage.transpose(1, 2).contiguous().transpose(1, 2)):
        n = value.size(0)
        query, edge_index = torch.randn(2, H, C), torch.stack([torch.arange(n), torch.zeros(n, dtype=torch.int64)])
        bias = torch.randn(n, H)
        out = attend(query, value, value, edge_index, bias=bias)
        torch.testing.assert_close(out, attend(query, value, value, edge_index, bias=bias, backend="reference"))


def test_other_scores_and_distributions_are_other_plans():
    given = tensors(n=M) | {"graph": random_edge_index(M, M, E)}
    options = [{"score": DotScore(scale)} for scale in (None, 1.0, 0.5)] + [{"score": DotScore(clamp=1.0)}]
    options += [{"distribution": name} for name in ("softmax", "sigmoid", gattn.Softmax(softcap=2.0))]
    options += [{"distribution": gattn.Softmax(sink=0.3)}, {"score": AdditiveScore(torch.randn(H, C), "tanh")}]
    for _ in range(2):
        for option in options:
            out = attend(**given | option)
            torch.testing.assert_close(out, attend(**given | option, backend="reference"), rtol=1e-5, atol=1e-5)


def test_any_number_of_types():
    """The rows of a table are types, not edges, so a plan is for as many."""
    given = tensors(n=M) | {"graph": random_edge_index(M, M, E), "edge_value": None}
    for count in (2, 9, 2):
        edge = Typed(torch.randn(count, H, C, requires_grad=True), torch.randint(count, (E,)))
        found = [both([edge.table], **given | {"edge": edge, "backend": name}) for name in ("auto", "reference")]
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


FOLDED = {
    "cosine": lambda scale: CosineScore(),
    "scaled cosine": lambda scale: CosineScore(scale),
    "scale": lambda scale: DotScore(scale[0]),
    "scales": DotScore,
    "negative scale": lambda scale: DotScore(-0.5),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("graph", [random_edge_index(4, 4, 10), CompleteGraph(4)])
@pytest.mark.parametrize("name", FOLDED)
def test_scores_that_are_folded(name, graph, dtype, looked_at):
    """Each call has a scale of its own; half precision is folded in float32."""
    for _ in range(3):
        scale = torch.randn(H, dtype=dtype, requires_grad=True)
        leaves = [torch.randn(4, H, C, dtype=dtype, requires_grad=True) for _ in range(3)]
        of_both = []
        for backend in ("auto", "reference"):
            score = FOLDED[name](scale)
            out, alpha = attend(*leaves, graph, score=score, return_weights=True, backend=backend)
            parts = [x for x in [*leaves, *score.tensors()] if x.requires_grad and x.is_leaf]
            of_both.append([out, alpha, *torch.autograd.grad(out.square().sum() + alpha.square().sum(), parts)])
        near = 1e-4 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(*of_both, rtol=near, atol=near)
    assert len(looked_at) == 3 + (1 if dtype == torch.float32 else 3)


@pytest.mark.parametrize("graph", [random_edge_index(64, 64, 300), CompleteGraph(3), CompleteGraph(64)])
def test_a_scale_that_is_not_a_number(graph):
    """PyTorch's fused attention makes zeros of it."""
    x = torch.randn(getattr(graph, "num_targets", 64), H, C)
    for _ in range(2):
        out = attend(x, x, x, graph, score=DotScore(torch.tensor([1.0, torch.nan])))
        assert not out[:, 0].isnan().any()
        assert out[:, 1].isnan().any()


@pytest.mark.parametrize("kind", ["dot", "gat", "cosine"])
def test_weights_alone_are_looked_at_once(kind, looked_at):
    for n, e in ((N, E), (7, 31), (N, E)):
        given, score = tensors(n, n, e, kind), CosineScore() if kind == "cosine" else scores(kind)
        query, key, graph = given["query"].requires_grad_(), given["key"], random_edge_index(n, n, e)
        of_both = []
        for backend in ("auto", "reference"):
            alpha = weigh(query, key, graph, score=score, backend=backend)
            of_both.append([alpha, *torch.autograd.grad(alpha.square().sum(), query)])
        torch.testing.assert_close(*of_both)
    assert len(looked_at) == 3 + 1


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_sums_with_given_weights_are_looked_at_once(batch, dropout, looked_at):
    options = {"dropout": dropout, "training": True}
    for n, e in ((N, E), (7, 31), (N, E)):
        weights, value = torch.rand(*batch, e, H).requires_grad_(), torch.randn(*batch, n, H, C).requires_grad_()
        graph, of_both = random_edge_index(n, n, e), []
        for backend in ("auto", "reference"):
            torch.manual_seed(0)
            out = aggregate(weights, value, graph, out_bias=torch.ones(H, C), backend=backend, **options)
            of_both.append([out, *torch.autograd.grad(out.square().sum(), (weights, value))])
        torch.testing.assert_close(*of_both)
    assert len(looked_at) == 3 + (2 if batch else 1)  # in a batch, sizes are part of the signature


def test_a_sum_with_given_weights_is_no_score_of_nothing():
    """Mistakes are reported as before, and a bias beside a score is another call."""
    value, graph = torch.randn(4, H, C), random_edge_index(4, 4, 10)
    for _ in range(2):
        aggregate(torch.rand(10, H), value, graph)
        with pytest.raises(ValueError, match="weights must have one entry per edge"):
            aggregate(torch.rand(9, H), value, graph)
        with pytest.raises(TypeError, match="the logits are bias"):
            attend(None, None, value, graph)
        zeros = torch.zeros(4, H)
        found = attend(None, zeros, value, graph, bias=torch.zeros(10, H), score=GATScore())
        torch.testing.assert_close(found, attend(None, zeros, value, graph, score=GATScore(), backend="reference"))


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("dtype", HALF)
def test_nodes_of_two_types_are_looked_at_once(name, dtype, looked_at):
    for n, e in ((N, E), (7, 31), (N, E)):
        given = {x: torch.randn(n, H, C) for x in ("query", "key", "value")}
        given[name] = given[name].to(dtype).requires_grad_()
        graph, of_both = random_edge_index(n, n, e), []
        for backend in ("auto", "reference"):
            out = attend(**given, graph=graph, backend=backend)
            assert out.dtype == torch.float32
            of_both.append([out, *torch.autograd.grad(out.square().sum(), given[name])])
        torch.testing.assert_close(*of_both, rtol=1e-2, atol=1e-2)
    assert len(looked_at) == 3 + 1


@pytest.mark.parametrize("graph", [random_edge_index(4, 4, 10), CompleteGraph(4)])
def test_a_score_is_looked_at_for_what_it_is_now(graph):
    x, score = torch.randn(4, H, C), DotScore(1.0)

    def check(score, scale):
        expected = attend(x, x, x, graph, score=DotScore(scale), backend="reference")
        torch.testing.assert_close(attend(x, x, x, graph, score=score), expected)

    check(score, 1.0)
    score.scale = 0.1
    check(score, 0.1)
    check(DotScore(1.0), 1.0)  # as the first one was
    score.broadcasts, score.logits = False, lambda query, key, edge: (query * key).sum(-1) * 3
    check(score, 3.0)


def test_lazy_tensors_and_subclasses_have_no_plan(looked_at):
    class Loud(torch.Tensor):
        pass

    x, edge_index = torch.randn(4, H, C), random_edge_index(4, 4, 10)
    attend(x, x, x, edge_index)
    complex_ = torch.randn(4, H, C, dtype=torch.complex64)
    negative = complex_.conj().imag
    assert negative.is_neg()
    expected = attend(negative.clone(), x, x, edge_index)
    torch.testing.assert_close(attend(negative, x, x, edge_index), expected)
    attend(x.as_subclass(Loud), x, x, edge_index)
    with torch.device("meta"):
        attend(*[torch.empty(4, H, C)] * 3, torch.zeros(2, 10, dtype=torch.int64))
    assert len(looked_at) == 4


def test_transforms_and_forward_mode():
    x, edge_index = torch.randn(4, H, C), random_edge_index(4, 4, 10)

    def f(x):
        return attend(x, x, x, edge_index)

    f(x)
    _, tangent = torch.func.jvp(f, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(torch.func.vmap(f)(x.expand(2, 4, H, C)), f(x).expand(2, 4, H, C))
    assert tangent.abs().sum() > 0
    assert torch.func.grad(lambda x: f(x).square().sum())(x).shape == x.shape


def test_dropout_draws_anew():
    x, edge_index = torch.randn(30, H, C), random_edge_index(30, 30, 300)
    outs = [attend(x, x, x, edge_index, dropout=0.5, training=True) for _ in range(3)]
    assert not torch.equal(outs[1], outs[2])
    torch.manual_seed(1)
    first = attend(x, x, x, edge_index, dropout=0.5, training=True)
    torch.manual_seed(1)
    plans.forget()
    assert torch.equal(first, attend(x, x, x, edge_index, dropout=0.5, training=True))


def test_hooks_that_copy_saved_tensors():
    """Copies have other strides, so the backward pass may not use those of the forward pass."""
    x, edge_index = torch.randn(4, 3 * H, C, requires_grad=True), random_edge_index(4, 4, 10)
    query, key, value = x.split(H, 1)
    expected = [both([x], query=query, key=key, value=value, graph=edge_index) for _ in range(2)][1]
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: x.clone(memory_format=torch.contiguous_format), lambda x: x
    ):
        found = both([x], query=query, key=key, value=value, graph=edge_index)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("graph", [random_edge_index(4, 4, 10), CompleteGraph(4), CompleteGraph.packed([3, 1])])
def test_tensors_that_are_the_same_and_others(graph):
    """Also where one is computed from another, whose gradients must not be counted twice."""
    x = torch.randn(4, H, C, dtype=torch.float64, requires_grad=True)
    for make in (lambda x: (x, x, x), lambda x: (x, x, x + 1), lambda x: (x, 2 * x, 3 * x), lambda x: (x + 0, x, x)):
        for batched in (False, True):
            grads = []
            for backend, create_graph in [("reference", False), ("auto", False), ("auto", True), ("auto", True)]:
                tensors = [y.unsqueeze(0) if batched else y for y in make(x)]
                out = attend(*tensors, graph, backend=backend)
                grads += torch.autograd.grad(out.square().sum(), x, create_graph=create_graph)
            for grad in grads[1:]:
                torch.testing.assert_close(grad, grads[0])


@pytest.mark.parametrize("graph", [random_edge_index(4, 4, 10), CompleteGraph(4), CompleteGraph.packed([3, 1])])
def test_every_term_counts(graph):
    """Also those that a backend leaves to others."""
    x, out_bias = torch.randn(4, H, C), torch.randn(H, C, requires_grad=True)
    options = {"query": x, "key": x, "value": x, "graph": graph, "out_bias": out_bias}
    for dtype in (torch.float32, torch.float64):
        options["out_bias"] = out_bias.to(dtype)
        for _ in range(2):
            expected = both([out_bias], **options, backend="reference")
            torch.testing.assert_close(both([out_bias], **options), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "edit",
    [
        lambda tensors: setattr(tensors["vector"], "data", torch.empty(0)),
        lambda tensors: setattr(tensors["key"], "data", tensors["key"].data.half()),
        lambda tensors: setattr(tensors["query"], "data", tensors["query"].data[:1].clone()),
    ],
)
def test_data_that_are_replaced_before_the_backward_pass(edit):
    tensors = {name: torch.randn(300, H, C, requires_grad=True) for name in ("query", "key", "value")}
    tensors["vector"] = torch.randn(H, C, requires_grad=True)
    edge_index = random_edge_index(300, 300, 2000)
    for _ in range(2):
        out = attend(*list(tensors.values())[:3], edge_index, score=AdditiveScore(tensors["vector"]))
    edit(tensors)
    with pytest.raises((ValueError, RuntimeError)):
        out.sum().backward()


@pytest.mark.parametrize("change", [torch.Tensor.half, torch.Tensor.double, lambda x: x[:1]])
def test_hooks_that_change_saved_tensors(change):
    """What used to be an error still is one."""
    x, edge_index = torch.randn(40, H, C, requires_grad=True), random_edge_index(40, 40, 200)
    attend(x, x, x, edge_index)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: change(x) if x.is_floating_point() else x, lambda x: x):
        out = attend(x, x, x, edge_index)
    with pytest.raises((ValueError, IndexError), match=r"must have|has changed|too few rows"):
        out.sum().backward()


@pytest.mark.parametrize("term", ["none", "typed", "two"])
@pytest.mark.parametrize("graph", [random_edge_index(4, 4, 5), CompleteGraph(4)])
def test_checkpoints(term, graph):
    """The first call and its recomputation save the same."""
    x = torch.randn(4, H, C, requires_grad=True)
    options = {"query": x, "key": x, "value": x, "graph": graph}
    if term != "none" and not isinstance(graph, CompleteGraph):
        options["edge"] = Typed(torch.randn(9, H, C, requires_grad=True), torch.randint(9, (5,)))
        if term == "two":
            features = torch.randn(5, D)
            options["edge"], options["edge_value"] = (
                Projected(features, torch.randn(H, C, D, requires_grad=True)) for _ in range(2)
            )
    expected = both([x], **options)
    for _ in range(2):
        plans.forget()
        out = torch.utils.checkpoint.checkpoint(lambda: attend(**options), use_reentrant=False)
        torch.testing.assert_close([out, *torch.autograd.grad((out * out).sum(), x)], expected)


def test_packed_graphs_are_not_their_lists():
    x, graph = torch.randn(2, 5, H, C), CompleteGraph.packed([3, 2])
    expected, size = attend(x, x, x, graph), len(pickle.dumps(graph))
    edge_index = graph.edge_index
    edge_index[0] = 0
    assert torch.equal(attend(x, x, x, graph), expected)
    assert len(pickle.dumps(graph)) == size
    padded = graph.with_source_lengths(torch.tensor([5, 1]))
    torch.testing.assert_close(attend(x, x, x, padded), attend(x, x, x, padded, backend="reference"))


def test_missing_dimensions_are_named():
    x, edge_index, types = torch.randn(4, H, C), random_edge_index(4, 4, 10), torch.randint(R, (10,))
    for graph in (edge_index, CompleteGraph(4)):
        attend(x, x, x, graph)
        with pytest.raises(ValueError, match="must have shape"):
            attend(x[0], x[0], x[0], graph)
    attend(x, x, x, edge_index, edge=Typed(torch.randn(R, H, C), types))
    with pytest.raises(ValueError, match="type of each edge"):
        attend(x, x, x, edge_index, edge=Typed(torch.randn(R, H, C), torch.tensor(1)))


def test_outputs_may_be_changed_in_place():
    x = torch.randn(2, 4, H, C, requires_grad=True)
    for graph in (CompleteGraph(4), random_edge_index(4, 4, 10)):
        for _ in range(2):
            out = attend(x, x, x, graph)
            out += 1
            with pytest.raises(RuntimeError, match="modified by an inplace"):
                torch.autograd.grad(out.sum(), x)


def test_second_derivatives():
    x = torch.randn(4, 1, 2, dtype=torch.float64, requires_grad=True)
    for graph in (random_edge_index(4, 4, 6), CompleteGraph(4)):
        for _ in range(2):
            assert torch.autograd.gradgradcheck(lambda x: attend(x, x, x, graph), (x,))  # noqa: B023


def test_layers_and_hooks(looked_at):
    layer, x, edge_index = gattn.nn.GATConv(3, 4, heads=H), torch.randn(4, 3), random_edge_index(4, 4, 10)
    expected = [layer(x, edge_index) for _ in range(2)][1]
    assert len(looked_at) == 1
    torch.testing.assert_close(copy.deepcopy(layer)(x, edge_index), expected)
    seen = []
    handle = layer.register_message_forward_hook(lambda module, inputs, output: seen.append(1))
    layer(x, edge_index)
    handle.remove()
    with gattn.record_attention(layer) as records:
        layer(x, edge_index)
    assert (len(seen), len(records), len(looked_at)) == (1, 1, 3)
    with gattn.check_finite(), pytest.raises(ValueError, match="NaN"):
        layer(torch.full_like(x, torch.nan), edge_index)


def test_nothing_is_kept_alive():
    x, edge_index = torch.randn(4, H, C, requires_grad=True), random_edge_index(4, 4, 10)
    for _ in range(2):
        out = attend(x, x, x, edge_index)
    out.sum().backward()
    references = [weakref.ref(tensor) for tensor in (x, edge_index, out)]
    del x, edge_index, out
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_only_the_last_are_kept():
    for channels in range(1, 2 * plans._MOST_PLANS):
        x = torch.randn(2, 1, channels)
        attend(x, x, x, torch.tensor([[0], [1]]))
    assert len(plans._plans) <= plans._MOST_PLANS
