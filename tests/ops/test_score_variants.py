"""Variants of scores, and terms of edges by type: by the kernels against formulas of their own, and the reference."""

import math

import pytest
import torch
import torch.nn.functional as nnf

import gattn
from gattn import AdditiveScore, DotScore, GATScore, SparseGraph, Typed, attend
from gattn.ops.backends import cpu, triton
from gattn.testing import random_edge_index
from tests.cases import OLDEST_INTERPRETER, mostly_slow, pairs, with_terms

N, M, E, R, D = 9, 7, 60, 3, 4
EDGES = random_edge_index(M, N, E, seed=2)
TYPES = torch.randint(R, (E,), generator=torch.Generator().manual_seed(1))


def applied(activation):
    """An additive score's formula."""
    return lambda q, k, e, vector: (activation(q + k + e) * vector).sum(-1)


#: The score of a vector, and its formula.
SCORES = {
    "elu": (lambda vector: AdditiveScore(vector, "elu"), applied(nnf.elu)),
    "gelu": (lambda vector: AdditiveScore(vector, "gelu"), applied(nnf.gelu)),
    "silu": (lambda vector: AdditiveScore(vector, "silu"), applied(nnf.silu)),
    "tanh": (lambda vector: AdditiveScore(vector, "tanh"), applied(torch.tanh)),
    "leaky_relu": (AdditiveScore, applied(lambda x: nnf.leaky_relu(x, 0.2))),
    "dot": (lambda vector: DotScore(), lambda q, k, e, vector: (q * (k + e)).sum(-1) / math.sqrt(q.size(-1))),
    "multiplied": (lambda vector: DotScore(0.7, edge="multiply"), lambda q, k, e, vector: 0.7 * (q * k * e).sum(-1)),
    "clamped": (
        lambda vector: DotScore(0.5, clamp=0.75),
        lambda q, k, e, vector: (0.5 * (q * (k + e)).sum(-1)).clamp(-0.75, 0.75),
    ),
    "all at once": (
        lambda vector: DotScore(vector[:, 0], 0.3, edge="multiply", clamp=0.4),
        lambda q, k, e, vector: nnf.leaky_relu(vector[:, 0] * (q * k * e).sum(-1), 0.3).clamp(-0.4, 0.4),
    ),
    "gat": (
        lambda vector: GATScore(0.2),
        lambda q, k, e, vector: nnf.leaky_relu(q + k + e, 0.2),
    ),
}
pytestmark = [
    # NumPy, of which Triton's interpreter is made, warns where a GPU's arithmetic goes on.
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
FORMS = ("vectors", "features", "types", "types, values too")


@pytest.fixture(params=["cpu", "triton"])
def backend(request):
    if request.param == "triton":
        pytest.importorskip("triton", OLDEST_INTERPRETER)
        if not triton.Triton().serves(torch.device("cpu")):
            pytest.skip("kernels run on the CPU with TRITON_INTERPRET=1 only")
    elif cpu.Cpu().missing():
        pytest.skip("there are no kernels")
    return request.param


def leaves(score, form, heads, channels, dtype, batch=()):
    """What a call takes that has gradients."""
    generator = torch.Generator().manual_seed(5)
    wide = () if score == "gat" else (channels,)
    edge = {"vectors": (E, heads, *wide), "features": (E, D)}.get(form, (R, heads, *wide))
    shapes = {
        "query": (*batch, N, heads, *wide),
        "key": (*batch, M, heads, *wide),
        "value": (*batch, M, heads, channels),
        "vector": (heads, max(channels, 1)),
        "edge": edge,
    }
    if form == "features":
        shapes["edge_projection"] = (heads, *wide, D)
    return {
        name: torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for name, size in shapes.items()
    }


def options_of(score, form, tensors):
    """The other arguments of `attend`."""
    options = {name: tensors[name] for name in ("edge", "edge_projection") if name in tensors}
    if form.endswith("too") and score != "gat":
        options["edge_value"] = tensors["edge"]
    options = with_terms(options, TYPES if form.startswith("types") else None)
    return {"score": SCORES[score][0](tensors["vector"]), **options}


def formula(score, form, tensors):
    """Attention with a softmax, edge by edge."""
    edge = tensors["edge"]
    if form == "features":
        edge = torch.einsum("ed,h...d->eh...", edge, tensors["edge_projection"])
    elif form.startswith("types"):
        edge = edge[TYPES]
    source, target = EDGES
    node = -2 if score == "gat" else -3
    query, key = tensors["query"].index_select(node, target), tensors["key"].index_select(node, source)
    value = tensors["value"]
    logits = SCORES[score][1](query, key, edge, tensors["vector"])
    alpha = gattn.softmax(logits, target, N, dim=logits.dim() - 2)
    sent = value[..., source, :, :] + (edge if form.endswith("too") and score != "gat" else 0)
    sent = alpha.unsqueeze(-1) * sent
    return sent.new_zeros(*sent.shape[:-3], N, *sent.shape[-2:]).index_add(sent.dim() - 3, target, sent)


def with_gradients(out, tensors):
    wanted = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    generator = torch.Generator().manual_seed(7)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    found = torch.autograd.grad(out, list(wanted.values()), grad, allow_unused=True)
    return {"out": out.detach()} | {name: grad for name, grad in zip(wanted, found, strict=True) if grad is not None}


@pytest.mark.parametrize(
    ("score", "form", "heads", "channels", "dtype", "batch"),
    mostly_slow(pairs(SCORES, FORMS, (1, 3, 4, 20), (1, 5, 8, 32), (torch.float64, torch.float32), ((), (2,))), 5),
)
def test_kernels_compute_the_formula(backend, score, form, heads, channels, dtype, batch):
    if backend == "triton" and heads * channels > 64:
        pytest.skip("the interpreter is slow")
    tensors = leaves(score, form, heads, channels, dtype, batch)
    graph = SparseGraph(EDGES, N, M)
    arguments = [tensors[name] for name in ("query", "key", "value")]
    found = with_gradients(attend(*arguments, graph, **options_of(score, form, tensors), backend=backend), tensors)
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}
    expected = with_gradients(formula(score, form, exact), exact)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        # Beside a LeakyReLU's bend or a clamp, rounding may choose the other side: results are relative to the largest.
        scale = expected[name].abs().max().clamp_min(1.0)
        bound = 1e-10 if dtype == torch.float64 else 2e-5
        assert (tensor.double() - expected[name]).abs().max() / scale < bound, name


@pytest.mark.parametrize("score", ["gelu", "multiplied", "leaky_relu", "dot", "gat"])
def test_types_have_second_derivatives(score):
    tensors = leaves(score, "types", 2, 3, torch.float64)

    def call(*given):
        named = dict(zip(tensors, given, strict=True))
        arguments = [named[name] for name in ("query", "key", "value")]
        return attend(*arguments, SparseGraph(EDGES, N, M), **options_of(score, "types", named))

    assert torch.autograd.gradgradcheck(call, tuple(tensors.values()), fast_mode=True)


@pytest.mark.parametrize("activation", ["elu", "gelu", "silu", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_activations_are_exact_at_all_sizes(backend, activation, dtype):
    """One edge per node: the logit is the activation itself."""
    x = torch.cat([torch.linspace(-30, 30, 201), torch.tensor([0.0, -1e-4, 1e-4, -100.0, 100.0, -1e30, 1e30])])
    x = x.to(dtype).view(-1, 1, 1).requires_grad_()
    edges = torch.arange(x.size(0)).repeat(2, 1)
    ones = torch.ones(1, 1, dtype=dtype)
    score = AdditiveScore(ones, activation)
    value = torch.ones_like(x)
    out = attend(x, torch.zeros_like(x), value, edges, score=score, distribution="identity", backend=backend)
    (slope,) = torch.autograd.grad(out.sum(), x)
    exact = x.detach().double().requires_grad_()
    expected = getattr(nnf, activation)(exact)
    (expected_slope,) = torch.autograd.grad(expected.sum(), exact)
    if activation == "elu":  # near zero, too, relative to itself
        tiny = -torch.logspace(-7, -1, 50, dtype=dtype).view(-1, 1, 1)
        edges, zeros = torch.arange(50).repeat(2, 1), torch.zeros_like(tiny)
        near = attend(tiny, zeros, zeros + 1, edges, score=score, distribution="identity", backend=backend)
        torch.testing.assert_close(near, tiny.expm1())
    rounding = 4e-7 if dtype == torch.float32 else 1e-14
    assert ((out - expected).abs() <= rounding * expected.abs().clamp_min(1.0)).all()
    assert ((slope - expected_slope).abs() <= 4 * rounding).all()


class TestTypes:
    def call(self, types=TYPES, rows=R, **options):
        x = torch.randn(N, 2, 4)
        edge = Typed(torch.randn(rows, 2, 4), types)
        return attend(x, x, x, torch.randint(N, (2, E)), edge=edge, **options)

    @pytest.mark.parametrize("number", [-1, R])
    @pytest.mark.parametrize("backend", ["cpu", "reference", "auto"])
    def test_types_out_of_range_are_refused(self, number, backend):
        types = TYPES.clone()
        types[3] = number
        with pytest.raises(IndexError, match=f"holds type {number}, but there are rows for {R} types"):
            self.call(types, backend=backend)

    def test_an_edit_in_place_is_noticed(self):
        types = TYPES.clone()
        self.call(types)
        types[0] = R
        with pytest.raises(IndexError, match="holds type"):
            self.call(types)

    @pytest.mark.parametrize(
        ("types", "message"),
        [
            (TYPES.float(), "integers from 0"),
            (TYPES[None], "integers from 0"),
            (TYPES[1:], "one type per edge"),
        ],
    )
    def test_other_types_are_refused(self, types, message):
        with pytest.raises(ValueError, match=message):
            self.call(types)

    def test_tables_of_another_shape_are_refused(self):
        x = torch.randn(N, 2, 4)
        edges = torch.randint(N, (2, E))
        with pytest.raises(ValueError, match=r"one row for each of R types, \[R, H, C\] for .*, here \[R, 2, 4\]"):
            attend(x, x, x, edges, edge=Typed(torch.randn(R, 2, 5), TYPES))
        with pytest.raises(TypeError, match="the table of edge must be a tensor; got NoneType"):
            attend(x, x, x, edges, edge=Typed(None, TYPES))

    def test_an_edit_that_nobody_counted_is_noticed(self):
        types = TYPES.clone()
        self.call(types)
        types.numpy()[0] = 300_000
        with pytest.raises(IndexError, match="holds type 300000"):
            self.call(types)

    def test_types_of_inference_mode_serve_training(self):
        with torch.inference_mode():
            types = torch.zeros(1, dtype=torch.long)
        x, table = torch.randn(2, 1, 4, requires_grad=True), torch.randn(1, 1, 4)
        attend(x, x, x, torch.tensor([[0], [1]]), edge=Typed(table, types)).sum().backward()
        assert gattn.TypedGraph(torch.tensor([[0], [1]]), types).edge_type.is_inference() is False

    def test_values_of_another_width_are_refused(self):
        query, value, table = torch.randn(N, 2, 1), torch.randn(N, 2, 4), torch.randn(R, 2, 1)
        edges = torch.randint(N, (2, E))
        with pytest.raises(ValueError, match=r"has one shape for both: \[2, 1\] per edge .*, but value has \[2, 4\]"):
            attend(query, query, value, edges, edge=Typed(table, TYPES), edge_value=True, backend="reference")

    def test_many_types_are_expanded(self, monkeypatch):
        monkeypatch.setattr(cpu, "_MOST_TYPES", R - 1)
        torch.manual_seed(0)
        many = self.call()
        monkeypatch.undo()
        torch.manual_seed(0)
        torch.testing.assert_close(many, self.call())

    def test_compiled_code_checks_types_when_it_runs(self):
        x, table = torch.randn(N, 2, 4), torch.randn(R, 2, 4)
        edges = torch.randint(N, (2, E))
        compiled = torch.compile(
            lambda types: attend(x, x, x, edges, edge=Typed(table, types)), fullgraph=True, backend="aot_eager"
        )
        torch.testing.assert_close(compiled(TYPES), attend(x, x, x, edges, edge=Typed(table, TYPES)))
        with pytest.raises(IndexError, match="holds type"):
            compiled(TYPES + 1)

    def test_no_vector_for_each_edge_is_made(self):
        """The output of 200 000 edges takes far less memory than a vector of each."""
        edges, types = torch.randint(1000, (2, 200_000)), torch.randint(R, (200_000,))
        x = torch.randn(1000, 8, 16, requires_grad=True)
        table = torch.randn(R, 8, 16, requires_grad=True)
        with torch.profiler.profile(profile_memory=True) as profile:
            attend(x, x, x, edges, edge=Typed(table, types)).sum().backward()
        largest = max(event.self_cpu_memory_usage for event in profile.events())
        assert largest < 200_000 * 8 * 16 * 4 / 2
