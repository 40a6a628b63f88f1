import copy
import math

import pytest
import torch

import gattn
from gattn.features import Favor, cosine, elu1, favor, orthogonal_features, relu, sigmoid, softplus
from gattn.testing import assert_as_exact_as

LINEAR = {"score": gattn.DotScore(scale=1.0), "distribution": gattn.Identity(normalize=True)}
MAPS = {
    elu1: lambda x: x + 1 if x > 0 else math.exp(x),
    relu: lambda x: max(x, 0.0),
    softplus: lambda x: max(x, 0.0) + math.log1p(math.exp(-abs(x))),
    sigmoid: lambda x: 1 / (1 + math.exp(-x)),
}
EVERY = [*MAPS, cosine]
BY_NAME = pytest.mark.parametrize("feature_map", EVERY, ids=lambda feature_map: feature_map.__name__)


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def attention(query, key, value, graph, projection, **options):
    return gattn.attend(*favor(query, key, projection, graph, **options), value, graph, **LINEAR)


def plain_favor(x, projection, scale):
    """The definition, for one vector."""
    exponents = [math.sqrt(scale) * (row @ x).item() - scale * (x @ x).item() / 2 for row in projection]
    return [math.exp(exponent) / math.sqrt(len(projection)) for exponent in exponents]


@pytest.mark.parametrize("feature_map", MAPS, ids=lambda feature_map: feature_map.__name__)
def test_values_are_those_of_the_formula(feature_map):
    x = torch.tensor([-700.0, -40.0, -3.5, -1e-9, 0.0, 1e-9, 0.25, 3.0, 21.0, 700.0], dtype=torch.float64)
    expected = torch.tensor([MAPS[feature_map](value) for value in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(feature_map(x), expected, rtol=1e-14, atol=0)


def test_values_by_hand():
    assert elu1(torch.tensor([-math.log(2.0), 3.0])).tolist() == pytest.approx([0.5, 4.0])
    assert relu(torch.tensor([-2.0, 3.0]), eps=0.25).tolist() == [0.25, 3.25]
    assert cosine(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).flatten().tolist() == pytest.approx([0.6, 0.8, 0.0, 0.0])


def test_small_features_of_elu1_are_not_rounded_to_zero():
    x = torch.tensor(-30.0)
    assert elu1(x).item() == pytest.approx(math.exp(-30), rel=1e-6)
    assert torch.nn.functional.elu(x).item() + 1 == 0


@BY_NAME
def test_first_and_second_derivatives(feature_map):
    x = (double(3, 2, 4) * 3).requires_grad_()
    assert torch.autograd.gradcheck(feature_map, x)
    assert torch.autograd.gradgradcheck(feature_map, x)


@BY_NAME
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_derivatives_are_finite_everywhere(feature_map, dtype):
    x = torch.tensor([-1e30, -200.0, -0.0, 0.0, 200.0, 1e30], dtype=dtype).view(-1, 1, 1).repeat(1, 1, 2)
    x.requires_grad_()
    (first,) = torch.autograd.grad(feature_map(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, allow_unused=True)
    assert first.isfinite().all()
    assert second is None or second.isfinite().all()


@BY_NAME
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_as_good_as_its_type(feature_map, dtype):
    x = (torch.randn(7, 2, 16) * 3).to(dtype)
    exact = feature_map(x.double())
    assert_as_exact_as(feature_map(x), exact.to(dtype), exact)


@BY_NAME
@pytest.mark.parametrize("shape", [(0, 2, 4), (3, 0, 4), (3, 2, 0), (2, 0, 3, 4)])
def test_empty_tensors(feature_map, shape):
    x = torch.zeros(shape, requires_grad=True)
    out = feature_map(x)
    out.sum().backward()
    assert out.shape == x.grad.shape == shape


@BY_NAME
def test_wrong_tensors(feature_map):
    with pytest.raises(TypeError, match="x must be a tensor; got list"):
        feature_map([1.0])
    with pytest.raises(ValueError, match="x must hold floating-point numbers; got a tensor of torch.int64"):
        feature_map(torch.ones(2, 2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="floating-point numbers; got a tensor of torch.complex64"):
        feature_map(torch.ones(2, 2, 2, dtype=torch.complex64))


def test_wrong_options():
    with pytest.raises(ValueError, match="eps must be finite and not negative"):
        relu(torch.ones(2), eps=-1.0)
    with pytest.raises(TypeError, match="eps must be a number"):
        relu(torch.ones(2), eps="1")
    with pytest.raises(ValueError, match="a tensor without dimensions"):
        cosine(torch.tensor(1.0))


@BY_NAME
def test_attention_with_products_of_features_as_weights(feature_map):
    query, key, value = double(5, 2, 4), double(5, 2, 4), double(5, 2, 3)
    graph = gattn.CompleteGraph.packed([3, 2])
    out = gattn.attend(feature_map(query), feature_map(key), value, graph, **LINEAR)
    for target in range(5):
        sources = range(3) if target < 3 else range(3, 5)
        for head in range(2):
            products = [feature_map(query)[target, head] @ feature_map(key)[source, head] for source in sources]
            weights = torch.stack(products) / (sum(products) or 1.0)  # of a sum of zero, all weights are
            torch.testing.assert_close(out[target, head], weights @ value[list(sources), head])


# --------------------------------------------------------------------------------------------------- random features


@pytest.mark.parametrize(("num_features", "channels"), [(4, 4), (3, 7), (11, 4), (5, 1), (1, 1)])
def test_blocks_of_random_vectors_are_orthogonal(num_features, channels):
    omega = orthogonal_features(num_features, channels, dtype=torch.float64)
    assert omega.shape == (num_features, channels)
    for block in omega.split(channels):
        products = block @ block.T
        torch.testing.assert_close(products, products.diagonal().diag(), rtol=0, atol=1e-13 * products.max().item())


def test_each_random_vector_has_the_standard_normal_distribution():
    """Moments of the entries in each place, within 5 standard errors; signs that are not random give a mean of -0.8."""
    count = 4000
    generator = torch.Generator().manual_seed(1)
    omega = orthogonal_features(count * 3, 3, generator=generator, dtype=torch.float64).view(count, 3, 3)
    assert (omega.mean(0).abs() < 5 / math.sqrt(count)).all()
    assert ((omega.square().mean(0) - 1).abs() < 5 * math.sqrt(2 / count)).all()
    lengths = omega.square().sum(-1)  # chi-squared with 3 degrees: mean 3, variance 6
    assert ((lengths.mean(0) - 3).abs() < 5 * math.sqrt(6 / count)).all()
    assert ((lengths.var(0) - 6).abs() < 5 * math.sqrt((3 * 3 * 24 - 36) / count)).all()


def test_random_vectors_follow_their_generator_and_options():
    first, second = (orthogonal_features(5, 3, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, orthogonal_features(5, 3))
    state = torch.get_rng_state()
    orthogonal_features(5, 3, generator=torch.Generator())
    assert torch.equal(torch.get_rng_state(), state)
    assert orthogonal_features(5, 3, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert orthogonal_features(5, 3, device="cpu").device.type == "cpu"


def test_wrong_numbers_of_random_vectors():
    with pytest.raises(ValueError, match="num_features must be at least 1; got 0"):
        orthogonal_features(0, 3)
    with pytest.raises(TypeError, match="channels must be an integer; got 2.5"):
        orthogonal_features(3, 2.5)
    with pytest.raises(ValueError, match="dtype must be a floating-point type; got torch.int64"):
        orthogonal_features(3, 3, dtype=torch.int64)


# ------------------------------------------------------------------------------------------------------------- favor


@pytest.mark.parametrize("scale", [None, 0.7])
def test_features_are_those_of_the_formula(scale):
    query, key, projection = double(3, 2, 4), double(5, 2, 4), orthogonal_features(6, 4, dtype=torch.float64)
    factor = 0.5 if scale is None else scale
    for x, features in zip((query, key), favor(query, key, projection, scale=scale, stabilize=False), strict=True):
        expected = [[plain_favor(vector, projection, factor) for vector in node] for node in x]
        torch.testing.assert_close(features, torch.tensor(expected, dtype=torch.float64))


def test_products_are_unbiased_estimates_of_the_softmax_kernel():
    """The mean over many draws is within 5 standard errors, for vectors so short that these are small."""
    query, key = double(4, 1, 3) / 2, double(5, 1, 3) / 2
    generator = torch.Generator().manual_seed(1)
    exact = (torch.einsum("nhc,mhc->nm", query, key) * 0.6).exp()
    draws = []
    for _ in range(200):
        projection = orthogonal_features(6, 3, generator=generator, dtype=torch.float64)
        q, k = favor(query, key, projection, scale=0.6, stabilize=False)
        draws.append(torch.einsum("nhr,mhr->nm", q, k))
    draws = torch.stack(draws)
    error = draws.std(0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - exact).abs() < 5 * error).all()
    assert (error < 0.2 * exact).all()


def test_attention_approaches_the_softmax_as_features_increase():
    """A hundred times as many features divide the error by ten; at least half of that must be seen in 40 draws."""
    query, key, value = double(6, 2, 4) / 2, double(7, 2, 4) / 2, double(7, 2, 3)
    graph = gattn.CompleteGraph(6, 7)
    exact = gattn.attend(query, key, value, graph, score=gattn.DotScore())
    generator = torch.Generator().manual_seed(1)

    def error(num_features):
        draws = [orthogonal_features(num_features, 4, generator=generator, dtype=torch.float64) for _ in range(40)]
        outs = torch.stack([attention(query, key, value, graph, projection) for projection in draws])
        return (outs - exact).square().mean().sqrt()

    few, many = error(16), error(1600)
    assert many < few / 5
    assert many < 0.02 * value.std()


GRAPHS = {
    "one": (gattn.CompleteGraph(5), ()),
    "bipartite": (gattn.CompleteGraph(3, 5), ()),
    "packed": (gattn.CompleteGraph.packed([3, 0, 2]), ()),
    "packed, bipartite": (gattn.CompleteGraph.packed([3, 1, 0], [2, 0, 4]), ()),
    "causal": (gattn.CompleteGraph(5, causal=True), ()),
    "packed and causal": (gattn.CompleteGraph.packed([1, 4], causal=True), ()),
    "window": (gattn.CompleteGraph(6, window=1), ()),
    "batch": (gattn.CompleteGraph(4), (2,)),
    "padded": (gattn.CompleteGraph(4, source_lengths=torch.tensor([4, 0, 1])), (3,)),
    "padded on both sides": (
        gattn.CompleteGraph(4, 5, source_lengths=torch.tensor([2, 5]), target_lengths=torch.tensor([3, 4])),
        (2,),
    ),
}


def tensors_of(name, heads=2, shared=2):
    graph, batch = GRAPHS[name]
    query = double(*batch, graph.num_targets, heads, 3)
    return graph, query, double(*batch, graph.num_sources, shared, 3), double(*batch, graph.num_sources, shared, 2)


@pytest.mark.parametrize("shared", [4, 2, 1])
@pytest.mark.parametrize("name", GRAPHS)
def test_maxima_cancel(name, shared):
    """Also for grouped queries, whose heads have the maxima of their keys."""
    graph, query, key, value = tensors_of(name, heads=4, shared=shared)
    projection = orthogonal_features(5, 3, dtype=torch.float64)
    plain = attention(query, key, value, graph, projection, stabilize=False)
    torch.testing.assert_close(attention(query, key, value, graph, projection), plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", GRAPHS)
def test_derivatives_of_attention_with_maxima_are_those_without(name):
    """Although maxima carry no gradient: they cancel."""
    graph, query, key, value = tensors_of(name)
    projection = orthogonal_features(5, 3, dtype=torch.float64)
    weights = torch.randn_like(query[..., :2])
    found = []
    for stabilize in (True, False):
        inputs = [x.clone().requires_grad_() for x in (query, key, value)]
        out = attention(*inputs, graph, projection, stabilize=stabilize)
        first = torch.autograd.grad((out * weights).sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in first), inputs)
        found.append((*first, *second))
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_gradcheck_through_attention():
    graph = gattn.CompleteGraph.packed([2, 1])
    inputs = [double(3, 1, 3).requires_grad_() for _ in range(3)]
    projection = orthogonal_features(5, 3, dtype=torch.float64)

    def of(query, key, value):
        return attention(query, key, value, graph, projection)

    assert torch.autograd.gradcheck(of, inputs)
    assert torch.autograd.gradgradcheck(of, inputs)


def test_no_exponent_overflows_and_no_sum_is_zero():
    """Lengths of a thousand give exponents of half a million."""
    query, key, value = torch.randn(3, 4, 1, 4).unbind()
    key = key * 1000
    inputs = [x.requires_grad_() for x in (query * 1000, key, value)]
    graph, projection = gattn.CompleteGraph(4), orthogonal_features(8, 4)
    features = favor(*inputs[:2], projection, graph)
    assert all((x >= 0).all() and x.max() <= 1.001 * math.exp(33) / math.sqrt(8) for x in features)
    sums = torch.einsum("nhr,mhr->nh", *features)
    assert (sums >= 0.999 * math.exp(66) / 8).all()
    out = gattn.attend(*features, value, graph, **LINEAR)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(x.grad is None or x.grad.isfinite().all() for x in inputs)
    assert not favor(query, query * 1000, projection, stabilize=False)[1].any()  # without maxima, all are zero


@pytest.mark.parametrize("backend", ["auto", "reference", "cpu"])
@pytest.mark.parametrize(
    ("dtype", "lengths"),
    [(torch.float32, range(34, 60)), (torch.bfloat16, range(34, 60)), (torch.float16, range(4, 40))],
)
def test_gradients_are_finite_however_small_the_weights_of_early_targets_are(dtype, lengths, backend):
    """Later keys are short, so a long first key has features that are smaller by up to exp(200)."""
    graph, projection = gattn.CompleteGraph(8, causal=True), orthogonal_features(64, 64)
    for length in lengths:
        query, key, value = torch.randn(3, 8, 1, 64).unbind()
        key = torch.nn.functional.normalize(key, dim=-1)
        key[0] *= length
        inputs = [x.to(dtype).requires_grad_() for x in (query, key, value)]
        features = favor(*inputs[:2], projection, graph)
        out = gattn.attend(*features, inputs[2], graph, backend=backend, **LINEAR)
        for x in (out, *torch.autograd.grad(out.sum(), inputs)):
            assert x.isfinite().all()
        assert not out[0].any() or out[0].allclose(value[0].to(dtype), rtol=1e-2)  # all that it sees, or nothing


def test_huge_keys_of_one_graph_leave_the_bits_of_another():
    query, key, value = torch.randn(3, 6, 2, 4).unbind()
    huge = torch.cat([key[:3], key[3:] * 1000])
    graph, projection = gattn.CompleteGraph.packed([3, 3]), orthogonal_features(8, 4)
    out, expected = (attention(query, x, value, graph, projection) for x in (huge, key))
    assert torch.equal(out[:3], expected[:3])
    assert expected[:3].any()
    query, key, value, huge = (x.unflatten(0, (2, 3)) for x in (query, key, value, huge))
    graph = gattn.CompleteGraph(3)
    out, expected = (attention(query, x, value, graph, projection) for x in (huge, key))
    assert torch.equal(out[0], expected[0])


@pytest.mark.parametrize("filling", [1e4, torch.nan, torch.inf])
def test_padding_does_not_matter(filling):
    lengths = torch.tensor([2, 4, 0])
    query, key = torch.randn(3, 4, 2, 4), torch.randn(3, 4, 2, 4)
    graph, projection = gattn.CompleteGraph(4, source_lengths=lengths), orthogonal_features(8, 4)
    is_padding = (torch.arange(4) >= lengths.unsqueeze(1)).unsqueeze(-1).unsqueeze(-1)
    found = []
    for padding in (0.0, filling):
        inputs = [x.clone().requires_grad_() for x in (query, key.masked_fill(is_padding, padding))]
        features = favor(*inputs, projection, graph)
        assert not features[1].masked_select(is_padding).any()
        sum(x.square().sum() for x in features).backward()
        found.append((*features, *(x.grad for x in inputs)))
    for actual, expected in zip(*found, strict=True):
        assert torch.equal(actual, expected)


def test_a_causal_graph_looks_ahead_only_through_rounding():
    query, key, value = (double(6, 1, 4) for _ in range(3))
    graph, projection = gattn.CompleteGraph(6, causal=True), orthogonal_features(8, 4, dtype=torch.float64)
    later = torch.cat([key[:3], double(3, 1, 4)])
    for stabilize in (True, False):
        out, expected = (attention(query, x, value, graph, projection, stabilize=stabilize)[:3] for x in (later, key))
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_exponents_of_half_precision_are_computed_in_float32(dtype):
    query, key = (torch.randn(7, 2, 16) * 2).to(dtype), (torch.randn(7, 2, 16) * 2).to(dtype)
    projection = orthogonal_features(8, 16)
    actual = favor(query, key, projection)
    exact = favor(query.double(), key.double(), projection.double())
    for x, y in zip(actual, exact, strict=True):
        assert_as_exact_as(x, y.to(dtype), y)


def test_autocast_does_not_lower_the_precision_of_exponents():
    query, key = torch.randn(7, 2, 16) * 3, torch.randn(7, 2, 16) * 3
    projection = orthogonal_features(8, 16)
    expected = favor(query, key, projection)
    with torch.autocast("cpu", torch.bfloat16):
        actual = favor(query, key, projection)
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


@pytest.mark.parametrize(
    ("graph", "shape", "key_shape"),
    [
        (gattn.CompleteGraph(0, 3), (0, 2, 4), (3, 2, 4)),
        (gattn.CompleteGraph(3, 0), (3, 2, 4), (0, 2, 4)),
        (gattn.CompleteGraph.packed([]), (0, 2, 4), (0, 2, 4)),
        (gattn.CompleteGraph.packed([0, 2], [0, 0]), (2, 2, 4), (0, 2, 4)),
        (None, (3, 0, 4), (3, 0, 4)),
        (None, (0, 3, 2, 4), (0, 5, 2, 4)),
    ],
)
def test_empty_queries_and_keys(graph, shape, key_shape):
    query, key = torch.zeros(shape, requires_grad=True), torch.zeros(key_shape, requires_grad=True)
    features = favor(query, key, orthogonal_features(6, 4), graph)
    sum(x.sum() for x in features).backward()
    assert [x.shape for x in features] == [(*shape[:-1], 6), (*key_shape[:-1], 6)]


def test_wrong_inputs_of_favor():
    x, projection = torch.randn(3, 2, 4), torch.randn(6, 4)
    with pytest.raises(TypeError, match="query must be a tensor; got NoneType"):
        favor(None, x, projection)
    with pytest.raises(ValueError, match="key must hold floating-point numbers; got a tensor of torch.int64"):
        favor(x, x.long(), projection)
    with pytest.raises(ValueError, match=r"query must be \[..., nodes, H, 4\].*got \[3, 2, 5\]"):
        favor(torch.randn(3, 2, 5), x, projection)
    with pytest.raises(ValueError, match=r"key must be \[..., nodes, H, 4\].*got \[3, 4\]"):
        favor(x, x[:, 0], projection)
    for wrong in (torch.randn(4), torch.randn(0, 4)):
        with pytest.raises(ValueError, match=r"projection must have one row per random feature, \[R, C\]"):
            favor(x, x, wrong)
    with pytest.raises(ValueError, match="the same batch dimensions in front"):
        favor(x, x.unsqueeze(0), projection)
    with pytest.raises(ValueError, match="the heads of key must divide those of query; got 3 and 2"):
        favor(x, torch.randn(3, 3, 4), projection)
    with pytest.raises(TypeError, match="graph must be a CompleteGraph.*got SparseGraph.*leave it out"):
        favor(x, x, projection, gattn.SparseGraph(torch.tensor([[0], [1]]), 3))
    with pytest.raises(ValueError, match="4 targets and 4 sources, but query has 3 rows"):
        favor(x, x, projection, gattn.CompleteGraph(4))
    with pytest.raises(ValueError, match=r"lengths for a batch of shape \[2\]"):
        favor(x, x, projection, gattn.CompleteGraph(3, source_lengths=torch.tensor([1, 2])))
    with pytest.raises(ValueError, match="scale must be positive and finite; got 0"):
        favor(x, x, projection, scale=0.0)
    with pytest.raises(TypeError, match="stabilize must be True or False"):
        favor(x, x, projection, stabilize="yes")


# ------------------------------------------------------------------------------------------------------- its module


def test_the_module_computes_what_the_function_does():
    module = Favor(4, num_features=6, scale=0.3)
    query, key = torch.randn(5, 2, 4), torch.randn(5, 2, 4)
    graph = gattn.CompleteGraph.packed([2, 3])
    expected = favor(query, key, module.projection, graph, scale=0.3)
    assert all(torch.equal(x, y) for x, y in zip(module(query, key, graph), expected, strict=True))
    assert repr(module) == "Favor(4, num_features=6, scale=0.3)"
    assert repr(Favor(4, 6, stabilize=False)) == "Favor(4, num_features=6, stabilize=False)"


def test_the_default_number_of_features():
    assert [Favor(channels).projection.size(0) for channels in (1, 2, 8, 64)] == [1, 1, 16, 266]


def test_random_vectors_are_saved_and_redrawn():
    module = Favor(4, generator=torch.Generator().manual_seed(1))
    other = Favor(4)
    other.load_state_dict(copy.deepcopy(module.state_dict()))
    assert torch.equal(module.projection, other.projection)
    assert not list(module.parameters())
    old, buffer = module.projection.clone(), module.projection
    for redraw in (module.redraw, module.reset_parameters):
        redraw()
        assert not torch.equal(module.projection, old)
        assert module.projection is buffer
    module.redraw(torch.Generator().manual_seed(1))
    assert torch.equal(module.projection, old)
    module.to(torch.bfloat16).redraw()
    assert module.projection.dtype == torch.bfloat16


def test_wrong_options_of_the_module():
    with pytest.raises(ValueError, match="channels must be at least 1; got 0"):
        Favor(0)
    with pytest.raises(TypeError, match="num_features must be an integer"):
        Favor(4, 2.0)
    with pytest.raises(ValueError, match="scale must be positive and finite"):
        Favor(4, scale=-1.0)
    with pytest.raises(TypeError, match="stabilize must be True or False"):
        Favor(4, stabilize=None)


def test_compiled_attention():
    module, graph = Favor(4), gattn.CompleteGraph.packed([3, 2])

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(query, key, value):
        query, key = module(query, key, graph)
        return gattn.attend(elu1(query), softplus(key), value, graph, **LINEAR)

    inputs = [torch.randn(5, 2, 4, requires_grad=True) for _ in range(3)]
    features = module(*inputs[:2], graph)
    expected = gattn.attend(elu1(features[0]), softplus(features[1]), inputs[2], graph, **LINEAR)
    out = compiled(*inputs)
    torch.testing.assert_close(out, expected)
    for actual, gradient in zip(*(torch.autograd.grad(x.sum(), inputs) for x in (out, expected)), strict=True):
        torch.testing.assert_close(actual, gradient)
