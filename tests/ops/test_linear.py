"""Linear attention: products summed in another order, with the results of the quadratic reference."""

import pytest
import torch
from torch import Tensor

import gattn
from gattn import CompleteGraph, DotScore, Identity
from gattn.ops.backends.dense import linear
from gattn.testing import assert_as_exact_as

PLAIN = DotScore(scale=1.0)
WAYS = [Identity(), Identity(normalize=True), Identity(normalize=True, eps=0.3)]
SHAPES = {
    "square": (CompleteGraph, (35,), (35, 35)),
    "more sources": (CompleteGraph, (50, 65), (50, 65)),
    "more targets": (CompleteGraph, (65, 50), (65, 50)),
    "few targets": (CompleteGraph, (7, 100), (7, 100)),
    "packed": (CompleteGraph.packed, ([12, 1, 0, 100, 9],), (122, 122)),
    "packed and bipartite": (CompleteGraph.packed, ([25, 50, 0, 60, 9], [30, 0, 3, 200, 150]), (144, 383)),
}


@pytest.fixture
def calls(monkeypatch):
    """The calls of `linear.attend`, which reads so few rows at a time that there are several parts of everything."""
    made, original = [], linear.attend

    def attend(*arguments):
        made.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(linear, "attend", attend)
    monkeypatch.setattr(linear, "_ROWS", 24)
    monkeypatch.setattr(linear, "_CHUNK", 8)
    return made


def inputs(n, m, batch=(), heads=4, key_heads=4, dtype=torch.float64):
    torch.manual_seed(n + m)
    query = torch.rand(*batch, n, heads, 3, dtype=dtype)
    key, value = torch.rand(*batch, m, key_heads, 3, dtype=dtype), torch.randn(*batch, m, key_heads, 5, dtype=dtype)
    return [x.requires_grad_() for x in (query, key, value)]


def attend(query, key, value, graph, distribution=WAYS[1], score=PLAIN, **options):
    return gattn.attend(query, key, value, graph, score=score, distribution=distribution, **options)


def derivatives(leaves, graph, distribution, second, **options) -> list[Tensor]:
    """The output, its gradients, and on request the gradients of those."""
    out = attend(*leaves, graph, distribution, **options)
    torch.manual_seed(1)
    grads = torch.autograd.grad(out, leaves, torch.randn(out.shape, dtype=out.dtype), create_graph=second)
    results = [out, *grads]
    if second:
        results += torch.autograd.grad(sum((x * torch.randn(x.shape, dtype=x.dtype)).sum() for x in grads), leaves)
    return results


def assert_as_reference(leaves, graph, distribution=WAYS[1], second=False):
    found, expected = (derivatives(leaves, graph, distribution, second, backend=name) for name in ("auto", "reference"))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference(shape, causal, calls):
    make, sizes, (n, m) = SHAPES[shape]
    graph, leaves, second = make(*sizes, causal=causal), inputs(n, m), shape == "packed"
    for way in WAYS:
        assert_as_reference(leaves, graph, way, second)
    assert len(calls) == len(WAYS)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("batch", "key_heads"), [((3,), 2), ((2, 2), 4), ((2,), 1)])
def test_batches_and_grouped_heads(batch, key_heads, causal, calls):
    leaves, graph = inputs(70, 90, batch, key_heads=key_heads), CompleteGraph(70, 90, causal=causal)
    for x, y in zip(
        *(derivatives(leaves, graph, WAYS[1], False, backend=name) for name in ("auto", "reference")), strict=True
    ):
        torch.testing.assert_close(x, y)
    assert len(calls) == 1


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("n", "m"), [(60, 60), (50, 65), (65, 50)])
def test_padding_is_seen_by_nobody(n, m, causal, calls):
    lengths = {"source_lengths": torch.tensor([m, 20, 0, m - 1]), "target_lengths": torch.tensor([n, n - 1, 30, 0])}
    for names in (["source_lengths"], ["target_lengths"], list(lengths)):
        graph = CompleteGraph(n, m, causal=causal, **{name: lengths[name] for name in names})
        leaves = inputs(n, m, (4,))
        for x, y in zip(
            *(derivatives(leaves, graph, WAYS[1], False, backend=name) for name in ("auto", "reference")), strict=True
        ):
            torch.testing.assert_close(x, y)
        with torch.no_grad():  # padding may hold anything
            if "source_lengths" in names:
                for leaf in leaves[1:]:
                    leaf[1, 20:] = torch.nan
                assert attend(*leaves, graph).isfinite().all()
    assert len(calls) == 5


def test_a_denominator_of_zero_gives_zeros(calls):
    leaves = inputs(70, 70)
    with torch.no_grad():
        leaves[0][3] = 0.0
    graph = CompleteGraph.packed([70, 60], [70, 0])
    query = torch.cat([leaves[0], torch.rand(60, 4, 3, dtype=torch.float64)]).detach().requires_grad_()
    results = derivatives([query, *leaves[1:]], graph, WAYS[1], True)
    out, grad = results[:2]
    assert (out[3] == 0).all()
    assert (out[70:] == 0).all()
    assert (grad[3] == 0).all()
    assert all(x.isfinite().all() for x in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_is_as_exact_as_the_reference(dtype, causal):
    leaves, graph = inputs(600, 600, dtype=dtype), CompleteGraph(600, causal=causal)
    exact = derivatives([x.detach().double().requires_grad_() for x in leaves], graph, WAYS[1], False)
    found, peer = (derivatives(leaves, graph, WAYS[1], False, backend=name) for name in ("auto", "reference"))
    for x, y, z in zip(found, peer, exact, strict=True):
        assert_as_exact_as(x, peer=y, exact=z)


def test_many_rows_lose_no_digits():
    torch.manual_seed(0)
    query, key, value = torch.rand(3, 100_000, 1, 4).unbind()
    for causal in (False, True):
        out = attend(query, key, value, CompleteGraph(100_000, causal=causal))[-1, 0].double()
        weights = key[:, 0].double() @ query[-1, 0].double()
        exact = weights @ value[:, 0].double() / weights.sum()
        assert ((out - exact) / exact).abs().max() < 4 * torch.finfo(torch.float32).eps


def test_small_graphs_stay_quadratic(calls):
    attend(*inputs(6, 6), CompleteGraph(6))
    attend(*inputs(6, 6), CompleteGraph.packed([3, 3]))
    attend(*inputs(3, 40), CompleteGraph(3, 40))
    assert not calls
    attend(*inputs(140, 140), CompleteGraph.packed([70, 70]))
    assert calls


def test_what_needs_weights_stays_quadratic(calls):
    leaves, graph = inputs(70, 70), CompleteGraph(70)
    for options in (
        {"return_weights": True},
        {"bias": torch.zeros(70, 70, dtype=torch.float64)},
        {"mask": torch.ones(70, 70, dtype=torch.bool)},
        {"dropout": 0.5, "training": True},
        {"score": DotScore(clamp=5.0)},
        {"distribution": gattn.Sigmoid()},
    ):
        attend(*leaves, graph, **options)
    attend(*leaves, CompleteGraph(70, window=5))
    assert not calls


def test_scales_and_cosines(calls):
    leaves, graph = inputs(70, 70), CompleteGraph(70, causal=True)
    learnt = torch.rand(4, dtype=torch.float64, requires_grad=True)
    for score in (DotScore(), DotScore(scale=0.0), DotScore(scale=learnt), gattn.CosineScore()):
        found, expected = (attend(*leaves, graph, score=score, backend=name) for name in ("auto", "reference"))
        torch.testing.assert_close(found, expected)
        more = [learnt] if score.scale is learnt else []
        for x, y in zip(
            *(torch.autograd.grad(out.square().sum(), leaves + more) for out in (found, expected)), strict=True
        ):
            torch.testing.assert_close(x, y)
    assert len(calls) == 4


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_graph_is_alone_in_its_batch(causal):
    torch.manual_seed(0)
    query, key, value = torch.rand(3, 300, 2, 8).unbind()
    with torch.no_grad():
        together = attend(query, key, value, CompleteGraph.packed([100, 200], causal=causal))
        alone = attend(query[:100], key[:100], value[:100], CompleteGraph(100, causal=causal))
    assert torch.equal(together[:100], alone)


def test_compiles_as_a_whole():
    for graph in (CompleteGraph(150), CompleteGraph.packed([70, 80], causal=True)):
        leaves = inputs(150, 150, dtype=torch.float32)
        compiled = torch.compile(lambda *x, graph=graph: attend(*x, graph), fullgraph=True)
        found, expected = compiled(*leaves), attend(*leaves, graph)
        for x, y in zip(*(torch.autograd.grad(out.square().sum(), leaves) for out in (found, expected)), strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["full", "causal"])
def test_one_compiled_program_serves_all_sizes(causal):
    programs = []

    def count(module, inputs):
        programs.append(module)
        return module

    def function(query, key, value):
        return attend(query, key, value, CompleteGraph(query.size(1), key.size(1), causal=causal))

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=count)
    for size in (70, 80, 96, 170, 75, 110):
        leaves = inputs(size, size, (size // 20,))
        torch.testing.assert_close(compiled(*leaves), function(*leaves))
    assert len(programs) == 2  # the first one is for one size


def test_gradients_in_batches(calls):
    leaves = inputs(70, 70)
    out = attend(*leaves, CompleteGraph(70))
    grads = torch.randn(3, *out.shape, dtype=out.dtype)
    found = torch.autograd.grad(out, leaves, grads, is_grads_batched=True, retain_graph=True)
    for place, grad in enumerate(grads):
        for x, y in zip(found, torch.autograd.grad(out, leaves, grad, retain_graph=True), strict=True):
            torch.testing.assert_close(x[place], y)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_an_empty_batch_has_gradients(is_compiled):
    def attended(x):
        return gattn.attend(x, x, x, gattn.CompleteGraph(40), score=gattn.DotScore(1.0), distribution=gattn.Identity())

    x = torch.randn(0, 40, 2, 3, requires_grad=True)
    out = (torch.compile(attended, backend="aot_eager", fullgraph=True) if is_compiled else attended)(x)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=not is_compiled)
    assert grad.shape == x.shape
    if not is_compiled:
        assert torch.autograd.grad(grad.square().sum(), x)[0].shape == x.shape
