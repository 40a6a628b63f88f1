"""Scores that others are made of: cosines, and additive ones with the activations that a LeakyReLU can do."""

from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import gattn
from gattn import AdditiveScore, CompleteGraph, CosineScore, DotScore, GATScore, SparseGraph, attend
from gattn.nn import AGNNConv
from gattn.scores import family_of
from gattn.testing import assert_as_exact_as, random_edge_index
from tests.cases import mostly_slow, with_terms

N, M, H, C, D = 6, 9, 4, 5, 3
EDGES = random_edge_index(M, N, 30)


def tensors(dtype=torch.double, key_heads=H):
    generator = torch.Generator().manual_seed(1)
    shapes = {
        "query": (N, H, C),
        "key": (M, key_heads, C),
        "value": (M, key_heads, C),
        "edge": (30, H, C),
        "features": (30, D),
        "projection": (H, C, D),
        "scale": (H,),
        "vector": (H, C),
    }
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.double).to(dtype) for name, shape in shapes.items()
    }


def results(score, given, graph, names, backend, **terms):
    """Output and gradients by name."""
    leaves = {name: given[name].clone().requires_grad_() for name in {"query", "key", "value", *names}}
    terms = with_terms({argument: leaves[name] for argument, name in terms.items()})
    out = attend(leaves["query"], leaves["key"], leaves["value"], graph, score=score(leaves), backend=backend, **terms)
    grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape).cos()
    return {
        "out": out.detach(),
        **dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), grad), strict=True)),
    }


def cosine(query, key, edge, scale):
    """The formula, edge by edge."""
    source, target = EDGES
    lengths = (x.norm(dim=-1, keepdim=True) for x in (query, key))
    query, key = (x / length for x, length in zip((query, key), lengths, strict=True))
    return (query[target] * (key[source] + (0 if edge is None else edge))).sum(-1) * scale


SCALES = {
    "one": (lambda given: CosineScore(), lambda given: 1.0, ()),
    "number": (lambda given: CosineScore(2.5), lambda given: 2.5, ()),
    "per head": (lambda given: CosineScore(given["scale"]), lambda given: given["scale"], ("scale",)),
}
TERMS = {
    "none": ({}, lambda given: None),
    "edge": ({"edge": "edge"}, lambda given: given["edge"]),
    "projection": (
        {"edge": "features", "edge_projection": "projection"},
        lambda given: torch.einsum("ed,hcd->ehc", given["features"], given["projection"]),
    ),
}


class TestCosine:
    @pytest.mark.parametrize("backend", ["reference", "cpu", "triton", "auto"])
    @pytest.mark.parametrize("term", TERMS)
    @pytest.mark.parametrize("scale", SCALES)
    def test_formula_and_gradients(self, scale, term, backend):
        given, (score, factor, of_scale), (terms, edge) = tensors(), SCALES[scale], TERMS[term]
        found = results(score, given, EDGES, (*of_scale, *terms.values()), backend, **terms)
        leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
        logits = cosine(leaves["query"], leaves["key"], edge(leaves), factor(leaves))
        source, target = EDGES
        weights = torch.zeros(30, H, dtype=torch.double)
        for i in range(N):
            weights = torch.where(
                (target == i).unsqueeze(-1),
                logits.where((target == i).unsqueeze(-1), -torch.inf).softmax(0).nan_to_num(),
                weights,
            )
        out = torch.zeros(N, H, C, dtype=torch.double).index_add(
            0, target, weights.unsqueeze(-1) * leaves["value"][source]
        )
        torch.testing.assert_close(found["out"], out.detach())
        grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape).cos()
        names = [name for name in found if name != "out"]
        for name, expected in zip(names, torch.autograd.grad(out, [leaves[name] for name in names], grad), strict=True):
            torch.testing.assert_close(found[name], expected, msg=name)

    @pytest.mark.parametrize(
        "graph", [CompleteGraph(N, M), CompleteGraph(N, M, causal=True), CompleteGraph.packed([2, 4], [5, 4])]
    )
    @pytest.mark.parametrize("backend", ["dense", "cpu"])
    def test_complete_graphs_and_grouped_heads(self, graph, backend):
        given = tensors(key_heads=2)
        found, expected = (
            results(lambda given: CosineScore(given["scale"]), given, graph, ("scale",), name)
            for name in (backend, "reference")
        )
        for name, result in found.items():
            torch.testing.assert_close(result, expected[name], msg=name)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("backend", ["cpu", "auto"])
    @pytest.mark.parametrize("graph", [EDGES, CompleteGraph(N, M)], ids=["edges", "complete"])
    def test_other_types(self, graph, backend, dtype):
        score, given = (lambda given: CosineScore(3.0)), tensors(dtype)
        wide = {name: x.double() for name, x in given.items()}
        found, peer = (results(score, given, graph, (), name) for name in (backend, "reference"))
        exact = results(score, wide, graph, (), "reference")
        for name, result in found.items():
            assert_as_exact_as(result, peer[name], exact[name], name=name)

    def test_key_is_value(self):
        given = tensors()
        x = given["key"].requires_grad_()
        grads = []
        for backend in ("cpu", "reference"):
            out = attend(given["query"], x, x, EDGES, score=CosineScore(), backend=backend)
            grads.append(torch.autograd.grad(out.square().sum(), x)[0])
        torch.testing.assert_close(*grads)

    def test_zero_vectors_have_finite_gradients(self):
        query, key = torch.zeros(N, H, C, requires_grad=True), torch.zeros(M, H, C, requires_grad=True)
        for backend in ("cpu", "reference"):
            out = attend(query, key, torch.randn(M, H, C), EDGES, score=CosineScore(), backend=backend)
            for grad in torch.autograd.grad(out.sum(), (query, key)):
                assert grad.isfinite().all()

    def test_second_derivatives(self):
        given = tensors()
        leaves = tuple(given[name].requires_grad_() for name in ("query", "key", "value"))
        assert torch.autograd.gradgradcheck(lambda *x: attend(*x, EDGES, score=CosineScore(1.5)), leaves)

    @pytest.mark.parametrize(
        ("backend", "graph"), [("reference", EDGES), ("cpu", EDGES), ("dense", CompleteGraph(N, M))]
    )
    def test_second_derivatives_at_zero_vectors(self, backend, graph):
        given = {name: x for name, x in tensors().items() if name in ("query", "key", "value")}
        given["query"][:2], given["key"][3] = 0, 0

        def unit(x):
            zero = (x == 0).all(-1, keepdim=True)
            return torch.where(zero, x * 1e12, x / x.masked_fill(zero, 1.0).square().sum(-1, keepdim=True).sqrt())

        def waves(x):
            return (x * torch.arange(x.numel(), dtype=x.dtype).view(x.shape).cos()).sum()

        def second(attention):
            leaves = [x.clone().requires_grad_() for x in given.values()]
            out = attention(*leaves)
            first = torch.autograd.grad(waves(out), leaves, create_graph=True)
            return torch.autograd.grad(sum(map(waves, first)), leaves)

        found = second(lambda q, k, v: attend(q, k, v, graph, score=CosineScore(1.5), backend=backend))
        score = DotScore(1.5)
        expected = second(lambda q, k, v: attend(unit(q), unit(k), v, graph, score=score, backend="reference"))
        for x, y in zip(found, expected, strict=True):
            assert y.isfinite().all()
            torch.testing.assert_close(x, y)

    def test_second_derivatives_of_a_layer_at_zero_vectors(self):
        x = tensors()["query"][:, 0].index_fill(0, torch.tensor(1), 0.0).requires_grad_()
        out = AGNNConv().double()(x, EDGES.clamp_max(N - 1))
        first = torch.autograd.grad(out.square().sum(), x, create_graph=True)[0]
        assert torch.autograd.grad(first.square().sum(), x)[0].isfinite().all()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("edge", ["add", "multiply", "cosine"])
    def test_what_a_score_does_to_its_query_is_not_rounded(self, edge, dtype):
        """Nor are the terms of both signs that the gradient of a scale sums up, before they are summed."""
        given = tensors(dtype)
        make = {"cosine": CosineScore}.get(edge, lambda scale: DotScore(scale, edge=edge))
        found, once = (
            results(lambda given: make(given["scale"]), given, EDGES, ("scale", "edge"), backend, edge="edge")
            for backend in ("cpu", "reference")
        )
        for name, result in found.items():
            torch.testing.assert_close(result, once[name], rtol=torch.finfo(dtype).eps, atol=1e-5, msg=name)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("make", [DotScore, CosineScore])
    def test_nor_is_it_on_complete_graphs(self, make, dtype):
        given = {name: torch.randn(40, H, C).to(dtype) for name in ("query", "key", "value")}
        found = []
        for backend in ("dense", "reference"):
            scale = torch.full((H,), 1.7, dtype=dtype, requires_grad=True)
            out = attend(*given.values(), CompleteGraph(40), score=make(scale), backend=backend)
            found.append((out, torch.autograd.grad(out, scale, given["query"])[0]))
        for result, once in zip(*found, strict=True):
            torch.testing.assert_close(result, once, rtol=torch.finfo(dtype).eps, atol=1e-5)

    def test_words(self):
        assert repr(CosineScore(2.0)) == "CosineScore(scale=2.0)"
        x = torch.randn(3, H, C)
        with pytest.raises(ValueError, match=rf"CosineScore's scale must be a number, or one per head, \[{H}\]"):
            attend(x, x, x, CompleteGraph(3), score=CosineScore(torch.ones(H + 1)))

    def test_another_formula_is_not_known(self):
        class Mine(CosineScore):
            def logits(self, query, key, edge):
                return super().logits(query, key, edge).square()

        assert family_of(CosineScore(), C) is not None
        assert family_of(Mine(), C) is None
        given = tensors()
        found, expected, other = (
            results(lambda given, score=score: score(), given, EDGES, (), backend)["out"]
            for score, backend in ((Mine, "auto"), (Mine, "reference"), (CosineScore, "auto"))
        )
        torch.testing.assert_close(found, expected)
        assert not torch.allclose(found, other)


class TestActivations:
    @pytest.mark.parametrize("backend", ["cpu", "triton", "auto"])
    @pytest.mark.parametrize(("activation", "slope"), [("relu", 0.0), ("identity", 1.0)])
    @pytest.mark.parametrize("graph", [EDGES, CompleteGraph(N, M)], ids=["edges", "complete"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.double, torch.bfloat16])
    def test_as_the_reference(self, activation, slope, backend, graph, dtype):
        given = tensors(dtype)
        make = lambda given: AdditiveScore(given["vector"], activation)  # noqa: E731
        wide = {name: x.double() for name, x in given.items()}
        found, peer = (results(make, given, graph, ("vector",), name) for name in (backend, "reference"))
        exact = results(make, wide, graph, ("vector",), "reference")
        for name, result in found.items():
            # The identity shifts all logits of a target alike: there, the query's gradient is what terms leave.
            scale = max(8.0, exact[name].abs().max().item())
            assert_as_exact_as(result, peer[name], exact[name], scale=scale, name=name)
        same = results(
            lambda given: AdditiveScore(given["vector"], negative_slope=slope), wide, graph, ("vector",), "auto"
        )
        for name, result in exact.items():
            torch.testing.assert_close(result, same[name], msg=name)

    def test_formulas(self):
        given = tensors()
        query, key, vector = given["query"], given["key"][:N], given["vector"]
        functions = {"relu": F.relu, "identity": lambda x: x, "elu": F.elu, "gelu": F.gelu, "silu": F.silu}
        for activation, function in functions.items():
            found = AdditiveScore(vector, activation).logits(query, key, None)
            torch.testing.assert_close(found, (function(query + key) * vector).sum(-1))
        with pytest.raises(ValueError, match="one of 'leaky_relu', 'tanh', 'relu', .*; got 'mish'"):
            AdditiveScore(vector, "mish")

    @pytest.mark.parametrize("activation", ["tanh", "relu", "identity", "elu", "gelu", "silu"])
    def test_a_slope_that_would_be_ignored(self, activation):
        with pytest.raises(ValueError, match="negative_slope is that of activation='leaky_relu'; leave it out"):
            AdditiveScore(torch.ones(H, C), activation, 0.3)
        assert AdditiveScore(torch.ones(H, C), activation).to(torch.double).activation == activation

    def test_the_slope_is_shown(self):
        score = AdditiveScore(torch.ones(2, 3), negative_slope=0.3).to(torch.double)
        assert repr(score) == "AdditiveScore(vector=[2, 3], activation='leaky_relu', negative_slope=0.3)"
        assert repr(AdditiveScore(torch.ones(2, 3), "tanh")) == "AdditiveScore(vector=[2, 3], activation='tanh')"

    def test_options_of_dot_products(self):
        with pytest.raises(ValueError, match="must be 'add' or 'multiply'; got 'subtract'"):
            DotScore(edge="subtract")
        assert repr(DotScore(0.5, edge="multiply", clamp=5)) == "DotScore(scale=0.5, edge='multiply', clamp=5)"
        assert repr(DotScore()) == "DotScore(scale=None)"


def test_a_learnt_scale_of_a_dot_product_has_no_tensor_left_in_the_kernels():
    query, key, score = DotScore(torch.full((H,), 2.0)).folded(torch.ones(N, H, C), torch.ones(M, H, C))
    assert query.eq(2).all()
    assert key.eq(1).all()
    assert score.scale == 1.0


VECTOR = torch.ones(H, C)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: GATScore("0.2"), TypeError, "negative_slope must be a number; got '0.2'"),
        (lambda: GATScore(None), TypeError, "negative_slope must be a number; got None"),
        (lambda: GATScore(True), TypeError, "negative_slope must be a number; got True"),
        (lambda: GATScore(np.True_), TypeError, "negative_slope must be a number; got np.True_"),
        (lambda: GATScore(torch.nan), ValueError, "negative_slope must be finite; got nan"),
        (lambda: AdditiveScore(VECTOR, negative_slope=torch.inf), ValueError, "negative_slope must be finite; got inf"),
        (lambda: AdditiveScore(VECTOR, ["tanh"]), ValueError, r"one of 'leaky_relu', .*; got \['tanh'\]"),
        (lambda: AdditiveScore(VECTOR * 1j), ValueError, "vector must hold real numbers; got .* torch.complex64"),
        (lambda: DotScore("auto"), TypeError, "scale must be a number or a tensor; got 'auto'"),
        (lambda: DotScore(True), TypeError, "scale must be a number or a tensor; got True"),
        (lambda: DotScore([1.0, 2.0]), TypeError, r"scale must be a number or a tensor; got \[1.0, 2.0\]"),
        (lambda: DotScore(torch.nan), ValueError, "scale must be finite; got nan"),
        (
            lambda: DotScore(torch.ones(H, dtype=torch.bool)),
            ValueError,
            "scale must hold real numbers; got .* torch.bool",
        ),
        (lambda: DotScore(negative_slope="1"), TypeError, "negative_slope must be a number; got '1'"),
        (lambda: DotScore(clamp="5"), TypeError, "clamp must be a number; got '5'"),
        (lambda: DotScore(clamp=torch.ones(())), TypeError, "clamp must be a number, as it gets no gradient"),
        (lambda: DotScore(clamp=0), ValueError, "clamp must be positive; got 0"),
        (lambda: CosineScore("1"), TypeError, "scale must be a number or a tensor; got '1'"),
    ],
)
def test_wrong_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("number", [1, np.float32(0.5), np.float64(0.5), np.int64(2)])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_numbers_of_every_kind(number, backend):
    given = tensors()
    for score in (DotScore(number, number, clamp=number), AdditiveScore(given["vector"], negative_slope=number)):
        assert (
            attend(given["query"], given["key"], given["value"], EDGES, score=score, backend=backend).isfinite().all()
        )
    assert DotScore(clamp=torch.inf).clamp == torch.inf  # no bound


SCALED = {
    "complete": CompleteGraph(6),
    "causal": CompleteGraph(6, causal=True),
    "window": CompleteGraph(6, window=(2, 1)),
    "padded": CompleteGraph(6, causal=True, source_lengths=torch.tensor([6, 4]), target_lengths=torch.tensor([6, 4])),
    "packed": CompleteGraph.packed([4, 2]),
    "causal, packed": CompleteGraph.packed([4, 2], causal=True),
    "list": SparseGraph(torch.tensor([[0, 1, 2, 3, 4, 5, 5, 1], [1, 2, 3, 4, 5, 0, 1, 0]])),
}
MORE = {
    "plain": lambda: {},
    "weights": lambda: {"return_weights": True},
    "lse": lambda: {"return_lse": True},
    "pairs": lambda: {
        "bias": gattn.SparseBias(torch.tensor([[0, 1, 4], [1, 1, 5]]), torch.tensor([[0.5, 1], [-2, 3], [1, 0]]))
    },
}


NOT_POSITIVE = (0.0, -0.7, 1e-60, (0.0,), (-2.0,), (0.0, -1.5), (float("nan"), 1.0))


@pytest.mark.parametrize(
    ("score", "scale", "graph", "more"),
    mostly_slow(product((DotScore, CosineScore), NOT_POSITIVE, SCALED, MORE), 3),
    ids=str,
)
def test_scales_that_are_not_positive(score, scale, graph, more):
    """PyTorch's fused kernel multiplies its mask by the scale, too, and loses a NaN of all logits."""

    def attend(backend, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        made = score(torch.tensor(scale, dtype=dtype) if isinstance(scale, tuple) else scale)
        with gattn.backend(backend):
            found = gattn.attend(*leaves, SCALED[graph], score=made, **MORE[more]())
        out, *others = found if isinstance(found, tuple) else (found,)
        out.square().sum().backward()
        others = [x for other in others for x in (other if isinstance(other, list) else [other])]
        return [out, *others, *(x.grad for x in leaves)]

    inputs = torch.randn(3, *((2,) if graph == "padded" else ()), 6, 2, 4)
    found, exact = attend("auto", torch.float32), attend("reference", torch.float64)
    if "nan" in str(scale):
        assert torch.equal(found[0].isnan(), exact[0].isnan())
        return
    for ours, wanted in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), wanted.double(), rtol=1e-5, atol=1e-5)
