"""Complete graphs without their edges: against the reference on the same graph's own edge list, in float64."""

import functools
import itertools
import math
from copy import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import gattn
from gattn import CompleteGraph, DotScore, SparseGraph, attend, weigh
from gattn.attention import Attention
from gattn.graphs import complete
from gattn.ops import plans
from gattn.ops.backends import dense
from gattn.ops.backends.cpu import pairs as cpu_pairs
from gattn.ops.backends.dense import matrices
from gattn.testing import assert_as_exact_as
from tests.cases import DTYPES, HALF, SCORES, in_turn, make_score, mostly_slow, pairs, threads

pytestmark = pytest.mark.usefixtures("without_tiles")

NOT_DOT = [score for score in SCORES if score != "dot"]
SLOPE = 0.3
H, C, CV = 2, 3, 4


def lengths(*numbers):
    return torch.tensor(numbers)


#: Graph and batch; a window of (3, 2) is computed in turns from 2 · (128 + 6) sources on.
GRAPHS = {
    "full": (CompleteGraph(7), ()),
    "fewer targets": (CompleteGraph(3, 7), ()),
    "fewer sources": (CompleteGraph(7, 3), ()),
    "one node": (CompleteGraph(1), ()),
    "one target": (CompleteGraph(1, 5, causal=True), ()),
    "causal": (CompleteGraph(7, causal=True), ()),
    "causal, fewer targets": (CompleteGraph(3, 7, causal=True), ()),
    "causal, fewer sources": (CompleteGraph(7, 3, causal=True), ()),
    "window": (CompleteGraph(9, window=(2, 1)), ()),
    "window to the left": (CompleteGraph(9, window=(2, 0)), ()),
    "window to the right": (CompleteGraph(9, window=(0, 2)), ()),
    "window of one": (CompleteGraph(9, window=(0, 0)), ()),
    "window, fewer targets": (CompleteGraph(4, 11, window=(2, 1)), ()),
    "window, fewer sources": (CompleteGraph(11, 4, window=(2, 1)), ()),
    "window wider than the sequence": (CompleteGraph(5, window=(20, 30)), ()),
    "window wider to the left": (CompleteGraph(6, window=(20, 1)), ()),
    "window wider to the right": (CompleteGraph(6, window=(1, 20)), ()),
    "window as wide as the sequence": (CompleteGraph(6, window=(5, 5)), ()),
    "window just narrower": (CompleteGraph(6, window=(4, 4)), ()),
    "causal window": (CompleteGraph(9, causal=True, window=(2, 3)), ()),
    "causal window wider to the left": (CompleteGraph(6, causal=True, window=9), ()),
    "causal window, fewer targets": (CompleteGraph(4, 11, causal=True, window=(2, 0)), ()),
    "causal window, fewer sources": (CompleteGraph(11, 4, causal=True, window=(2, 0)), ()),
    "band": (CompleteGraph(101, window=(3, 2)), ()),
    "band of whole blocks": (CompleteGraph(96, window=(3, 2)), ()),
    "shortest band": (CompleteGraph(74, window=(3, 2)), ()),
    "too short for a band": (CompleteGraph(73, window=(3, 2)), ()),
    "causal band": (CompleteGraph(100, causal=True, window=(5, 2)), ()),
    "band of one": (CompleteGraph(70, window=(0, 0)), ()),
    "band, fewer targets": (CompleteGraph(80, 131, window=(3, 2)), ()),
    "band, fewer sources": (CompleteGraph(150, 90, window=(3, 2)), ()),
    "band of wide blocks": (CompleteGraph(230, window=(40, 10)), ()),
    "source lengths": (CompleteGraph(4, 6, source_lengths=lengths(5, 0, 6)), (3,)),
    "target lengths": (CompleteGraph(6, 4, target_lengths=lengths(5, 0, 6)), (3,)),
    "both lengths": (CompleteGraph(5, 6, source_lengths=lengths(5, 0, 6), target_lengths=lengths(1, 5, 0)), (3,)),
    "equal lengths": (CompleteGraph(5, source_lengths=lengths(3, 3), target_lengths=lengths(3, 3)), (2,)),
    "full lengths": (CompleteGraph(5, source_lengths=lengths(5, 5), target_lengths=lengths(5, 5)), (2,)),
    "zero lengths": (CompleteGraph(5, source_lengths=lengths(0, 0)), (2,)),
    "lengths of many": (CompleteGraph(4, source_lengths=lengths(*[3, 4, 2] * 4)), (12,)),
    "lengths of two batches": (CompleteGraph(4, source_lengths=lengths(*[3, 4, 2] * 2).view(2, 3)), (2, 3)),
    "lengths of integers": (CompleteGraph(4, source_lengths=lengths(3, 1).to(torch.uint8)), (2,)),
    "lengths, causal": (
        CompleteGraph(6, causal=True, source_lengths=lengths(4, 6), target_lengths=lengths(6, 3)),
        (2,),
    ),
    "lengths, causal, fewer targets": (CompleteGraph(3, 6, causal=True, source_lengths=lengths(4, 6)), (2,)),
    "lengths, causal, fewer sources": (CompleteGraph(6, 3, causal=True, source_lengths=lengths(2, 3)), (2,)),
    "lengths, window": (CompleteGraph(8, window=(2, 1), source_lengths=lengths(4, 8, 1)), (3,)),
    "lengths, band": (
        CompleteGraph(90, window=(3, 2), source_lengths=lengths(80, 90), target_lengths=lengths(90, 77)),
        (2,),
    ),
    "packed": (CompleteGraph.packed([3, 5, 2]), ()),
    "packed, equal": (CompleteGraph.packed([4, 4, 4]), ()),
    "packed, one block": (CompleteGraph.packed([6]), ()),
    "packed, empty blocks": (CompleteGraph.packed([0, 3, 0, 2, 0]), ()),
    "packed, all empty": (CompleteGraph.packed([0, 0]), ()),
    "packed, many": (CompleteGraph.packed([2, 3, 1] * 6), ()),
    "packed, in turn": (CompleteGraph.packed([2, 3] * 2), ()),
    "packed, two sources": (CompleteGraph.packed([3, 2, 4], [5, 1, 4]), ()),
    "packed, many of two sources": (CompleteGraph.packed([2, 3, 2, 2] * 3, [4, 1, 4, 3] * 3), ()),
    "packed, no sources": (CompleteGraph.packed([3, 2, 1], [0, 4, 0]), ()),
    "packed, no targets": (CompleteGraph.packed([0, 2], [3, 4]), ()),
    "packed, causal": (CompleteGraph.packed([3, 5, 2, 3, 5, 2, 3], causal=True), ()),
    "packed, causal, two sources": (CompleteGraph.packed([3, 5, 2], [5, 3, 2], causal=True), ()),
    "packed, window": (CompleteGraph.packed([8, 3, 5], window=(2, 1)), ()),
    "packed, band": (CompleteGraph.packed([90, 4, 77], causal=True, window=(5, 2)), ()),
    "packed, batch": (CompleteGraph.packed([3, 5, 2]), (2,)),
    "packed, batch of many": (CompleteGraph.packed([2, 3, 1] * 3), (2, 3)),
}
each_graph = pytest.mark.parametrize("name", GRAPHS)
each_score = pytest.mark.parametrize("score", SCORES)


def some_graphs(*names):
    return pytest.mark.parametrize("name", names)


def make_tensors(score, graph, batch=(), *, heads=H, channels=C, value_channels=CV, key_heads=None, dtype=torch.double):
    n, m = graph.num_targets, graph.num_sources
    shapes = SCORES[score].shapes(n, m, heads, channels, key_heads) | {"value": (m, key_heads or heads, value_channels)}
    shapes = {name: shape if name == "vector" else (*batch, *shape) for name, shape in shapes.items()}
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def call(score, tensors, graph, backend="dense", **options):
    terms = {"query": None, **tensors}
    score = make_score(score, terms.pop("vector", None), options.pop("scale", None), SLOPE)
    return attend(graph=graph, score=score, backend=backend, **terms, **options)


def incoming(outs, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randint(-32, 33, out.shape, generator=generator) / 32).to(out.dtype) for out in outs]


def results(score, tensors, graph, backend="dense", *, function=call, return_weights=True, **options):
    """Output, weights and all gradients, by name."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    out = function(score, leaves, graph, backend, return_weights=return_weights, **options)
    out, weights = out if return_weights else (out, [])
    outs = [out, *(weights if isinstance(weights, list) else [weights])]
    found = {"out": out.detach(), **{f"weights {i}": x.detach() for i, x in enumerate(outs[1:])}}
    asked = [pair for pair in zip(outs, incoming(outs), strict=True) if pair[0].requires_grad]
    grads = [torch.zeros_like(leaf) for leaf in leaves.values()]
    if asked:
        outs, incoming_grads = zip(*asked, strict=True)
        grads = torch.autograd.grad(outs, list(leaves.values()), incoming_grads, materialize_grads=True)
    return found | {f"grad of {name}": grad for name, grad in zip(leaves, grads, strict=True)}


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, result in actual.items():
        torch.testing.assert_close(
            result, expected[name], rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}"
        )


def compare(score, tensors, graph, **options):
    """Asserts that everything equals the reference's, with weights and without, and returns it."""
    expected = results(score, tensors, graph, "reference", **options)
    actual = results(score, tensors, graph, **options)
    assert_same(actual, expected)
    assert_same(
        results(score, tensors, graph, return_weights=False, **options),
        results(score, tensors, graph, "reference", return_weights=False, **options),
    )
    return actual


def allowed(graph, batch):
    """Who sees whom, entry by entry, by the words of `CompleteGraph`'s documentation: `[*batch, N, M]`."""

    def sees(i, j, n, m):
        place = i + m - n  # of the target among the sources: the last ones are beside each other
        left, right = graph.window or (math.inf, math.inf)
        return not (graph.causal and j > place) and place - left <= j <= place + right

    seen = torch.zeros(*batch, graph.num_targets, graph.num_sources, dtype=torch.bool)
    first = [0, 0]
    for n, m in graph.blocks or ((graph.num_targets, graph.num_sources),):
        for i, j in itertools.product(range(n), range(m)):
            seen[..., first[0] + i, first[1] + j] = sees(i, j, n, m)
        first = [first[0] + n, first[1] + m]
    for element in itertools.product(*map(range, batch)):
        if graph.source_lengths is not None:
            seen[(*element, slice(None), slice(int(graph.source_lengths[element]), None))] = False
        if graph.target_lengths is not None:
            seen[(*element, slice(int(graph.target_lengths[element]), None))] = False
    return seen


def make_chunks(monkeypatch, size):
    """Computes few targets at a time, and all again in the backward pass."""
    monkeypatch.setattr(matrices, "_CHUNK", size)
    monkeypatch.setattr(matrices, "_MOST_KEPT", 0)
    monkeypatch.setattr(cpu_pairs, "MOST_LISTED", size)
    monkeypatch.setattr(cpu_pairs, "_LEAST_TARGETS", 1)


@pytest.fixture(autouse=True)
def one_thread():
    """On tiny tensors more would only wait for each other."""
    with threads(1):
        yield


class TestAgainstTheReference:
    @each_graph
    @each_score
    def test_every_graph(self, name, score):
        graph, batch = GRAPHS[name]
        compare(score, make_tensors(score, graph, batch), graph)

    @each_graph
    def test_every_graph_against_its_definition(self, name):
        """What the reference shares with it is wrong in neither."""
        graph, batch = GRAPHS[name]
        tensors = make_tensors("dot", graph, batch)
        query, key, value = (tensors[name].transpose(-3, -2) for name in ("query", "key", "value"))
        seen = allowed(graph, batch).unsqueeze(-3)
        logits = (query @ key.transpose(-1, -2) / math.sqrt(C)).masked_fill(~seen, -math.inf)
        expected = logits.softmax(-1).nan_to_num(0.0)
        out, weights = call("dot", tensors, graph, return_weights=True)
        torch.testing.assert_close(out, (expected @ value).transpose(-3, -2))
        if graph.blocks is None:
            torch.testing.assert_close(weights, expected)
        else:
            first = [0, 0]
            for (n, m), block in zip(graph.blocks, weights, strict=True):
                rows, columns = slice(first[0], first[0] + n), slice(first[1], first[1] + m)
                torch.testing.assert_close(block, expected[..., rows, columns])
                first = [first[0] + n, first[1] + m]

    @pytest.mark.parametrize(
        ("batch", "name", "score"),
        pairs(
            [(1,), (2,), (2, 3), (0,)],
            ("full", "causal", "causal, fewer targets", "window", "band", "packed", "packed, many"),
            SCORES,
        ),
    )
    def test_batches(self, batch, name, score):
        graph, _ = GRAPHS[name]
        compare(score, make_tensors(score, graph, batch), graph)

    @pytest.mark.parametrize(
        ("name", "key_heads", "scale"),
        pairs(
            (
                "full",
                "causal",
                "causal, fewer targets",
                "causal, fewer sources",
                "window",
                "band",
                "both lengths",
                "packed",
            ),
            (1, 2, 4),
            (None, 0.3),
        ),
    )
    def test_grouped_queries_and_scale(self, key_heads, scale, name):
        graph, batch = GRAPHS[name]
        tensors = make_tensors("dot", graph, batch, heads=4, key_heads=key_heads)
        compare("dot", tensors, graph, scale=scale)
        compare("dot", make_tensors("dot", graph, batch, heads=4, key_heads=key_heads, value_channels=C), graph)
        if scale is not None:
            assert not torch.allclose(call("dot", tensors, graph, scale=scale), call("dot", tensors, graph))

    @pytest.mark.parametrize("window", [(63, 0), 150])
    def test_wide_windows(self, window):
        graph = CompleteGraph(900, window=window)
        compare("dot", make_tensors("dot", graph, heads=1, channels=2, value_channels=2), graph)

    @pytest.mark.parametrize(
        ("name", "score", "chunk"),
        pairs(
            ("full", "causal", "fewer sources", "window", "band", "both lengths", "packed", "packed, batch"),
            NOT_DOT,
            (1, 20, 60),
        ),
    )
    def test_some_targets_at_a_time(self, chunk, name, score, monkeypatch):
        """So that what is made on the way is made again in the backward pass."""
        make_chunks(monkeypatch, chunk)
        graph, batch = GRAPHS[name]
        n, m = graph.num_targets, graph.num_sources
        tensors = make_tensors(score, graph, batch)
        if graph.blocks is None:
            tensors["bias"] = torch.randn(H, n, 1, dtype=torch.double)
            compare(score, tensors, graph, mask=torch.rand(n, m) < 0.7)
        else:
            compare(score, tensors, graph)

    @pytest.mark.parametrize(
        ("score", "sizes", "options"),
        pairs(SCORES, [(0, 0), (0, 4), (4, 0)], [{}, {"causal": True}, {"window": (1, 2)}]),
    )
    def test_no_nodes(self, sizes, options, score):
        graph = CompleteGraph(*sizes, **options)
        for batch in ((), (2,)):
            tensors = make_tensors(score, graph, batch)
            found = compare(score, tensors, graph)
            assert all((result == 0).all() for result in found.values())
            leaf = tensors["value"].requires_grad_()
            call(score, tensors, graph).sum().backward()  # nothing, but no mistake
            assert (leaf.grad == 0).all()

    @each_score
    def test_no_blocks(self, score):
        graph = CompleteGraph.packed([])
        tensors = make_tensors(score, graph)
        assert call(score, tensors, graph).shape == (0, H, CV)
        out, weights = call(score, tensors, graph, return_weights=True)
        assert out.shape == (0, H, CV)
        assert weights == []

    @pytest.mark.parametrize(
        ("name", "score", "channels"),
        pairs(("full", "causal", "window", "band", "both lengths", "packed"), SCORES, [(0, CV), (C, 0), (1, 1)]),
    )
    def test_few_channels(self, channels, name, score):
        graph, batch = GRAPHS[name]
        compare(score, make_tensors(score, graph, batch, channels=channels[0], value_channels=channels[1]), graph)

    @some_graphs("full", "causal", "window", "band", "both lengths", "packed", "packed, many")
    @each_score
    def test_non_contiguous_inputs(self, name, score):
        graph, batch = GRAPHS[name]
        tensors = make_tensors(score, graph, batch)
        for change in (
            lambda t: torch.cat([t, t, t], -1)[..., t.size(-1) : 2 * t.size(-1)],
            lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
            lambda t: t[:1].expand_as(t),
        ):
            compare(score, {name: change(t) for name, t in tensors.items()}, graph)

    def test_slices_of_one_projection(self):
        graph = CompleteGraph(9, causal=True)
        fused = torch.randn(2, 9, 3, H, C, dtype=torch.double)
        compare("dot", dict(zip(("query", "key", "value"), fused.unbind(2), strict=True)), graph)

    @pytest.mark.parametrize(
        ("score", "wanted", "name"),
        pairs(SCORES, ("query", "key", "value", "vector", "bias"), ("causal", "band", "both lengths", "packed")),
    )
    def test_one_gradient_alone(self, wanted, name, score):
        graph, batch = GRAPHS[name]
        tensors = make_tensors(score, graph, batch)
        tensors["bias"] = torch.randn(H, 1, 1, dtype=torch.double)
        if wanted not in tensors:
            return
        everything = results(score, tensors, graph, return_weights=False)
        leaf = tensors[wanted].requires_grad_()
        out = call(score, tensors, graph)
        (grad,) = torch.autograd.grad(out, leaf, incoming([out]))
        torch.testing.assert_close(grad, everything[f"grad of {wanted}"])

    @some_graphs("causal", "window", "both lengths", "lengths, causal", "packed", "packed, causal")
    @each_score
    def test_gradcheck(self, name, score):
        graph, batch = GRAPHS[name]
        tensors = make_tensors(score, graph, batch, heads=1, channels=2, value_channels=2)
        tensors["bias"] = torch.randn(1, 1, 1, dtype=torch.double)
        leaves = [tensor.requires_grad_() for tensor in tensors.values()]

        def function(*leaves):
            out, weights = call(score, dict(zip(tensors, leaves, strict=True)), graph, return_weights=True)
            return out, *(weights if isinstance(weights, list) else [weights])

        assert torch.autograd.gradcheck(function, leaves, fast_mode=True)

    @pytest.mark.parametrize(
        ("name", "score", "backend"),
        pairs(
            ("full", "causal", "window", "band", "both lengths", "packed", "packed, many"), SCORES, ("dense", "auto")
        ),
    )
    def test_second_derivatives(self, name, backend, score):
        graph, batch = GRAPHS[name]
        found = []
        tensors = make_tensors(score, graph, batch, value_channels=C)
        for which in (backend, "reference"):
            leaf = tensors["key"].detach().requires_grad_()
            out = call(score, {**tensors, "key": leaf}, graph, which).square().sum()
            (grad,) = torch.autograd.grad(out, leaf, create_graph=True)
            found.append(torch.autograd.grad(grad.square().sum(), leaf)[0])
        torch.testing.assert_close(*found)


class TestBiasAndMask:
    SHAPES = [
        (),
        (5,),
        (4, 1),
        (4, 5),
        (1, 4, 5),
        (H, 1, 1),
        *((b, h, n, m) for b in (1, 3) for h in (1, H) for n in (1, 4) for m in (1, 5)),
    ]

    @pytest.mark.parametrize(
        ("shape", "options", "score"),
        pairs(
            SHAPES,
            [
                {},
                {"causal": True},
                {"window": (1, 0)},
                {"source_lengths": lengths(5, 0, 2), "target_lengths": lengths(4, 3, 1)},
            ],
            ("dot", "gat without query"),
        ),
    )
    def test_broadcast(self, shape, options, score):
        graph = CompleteGraph(4, 5, **options)
        tensors = make_tensors(score, graph, (3,))
        bias, mask = torch.randn(shape, dtype=torch.double), torch.rand(shape) < 0.6
        self.check(score, tensors, graph, bias, mask)

    @pytest.mark.parametrize(
        ("shape", "options", "score"),
        pairs(
            [(), (95,), (90, 1), (90, 95), (H, 1, 95), (2, 1, 90, 95), (2, H, 1, 1), (1, H, 90, 95)],
            [
                {"window": (3, 2)},
                {"window": (5, 1), "causal": True},
                {"window": (3, 2), "source_lengths": lengths(95, 77), "target_lengths": lengths(80, 90)},
            ],
            ("dot", "leaky_relu"),
        ),
    )
    def test_narrow_windows(self, shape, options, score, monkeypatch):
        widths, cropped = [], matrices._cropped

        def recorded(*args):
            call, part = cropped(*args)
            widths.append(call.key.size(1))
            return call, part

        monkeypatch.setattr(matrices, "_cropped", recorded)
        monkeypatch.setattr(matrices, "_TOGETHER", (8, 16))
        graph = CompleteGraph(90, 95, **options)
        tensors = make_tensors(score, graph, (2,), channels=2, value_channels=2)
        self.check(score, tensors, graph, torch.randn(shape, dtype=torch.double), torch.rand(shape) < 0.6)
        if score == "dot":  # kernels for lists see pairs
            assert max(widths) < 8 + 6 + 1
            assert len(widths) >= 5 * 10

    def check(self, score, tensors, graph, bias, mask):
        plain = call(score, tensors, graph)
        with_bias = {**tensors, "bias": bias}
        found = {}
        for given, options in ((with_bias, {}), (tensors, {"mask": mask}), (with_bias, {"mask": mask})):
            found = found or results(score, given, graph, **options)
            assert_same(results(score, given, graph, **options), results(score, given, graph, "reference", **options))
        assert found["grad of bias"].shape == bias.shape
        if bias.dim() and bias.size(-1) > 1:
            assert not torch.allclose(found["out"], plain)
        batch, n, m = plain.shape[:-3], graph.num_targets, graph.num_sources
        if graph.blocks is None and (~mask.expand(*batch, H, n, m) & allowed(graph, batch).unsqueeze(-3)).any():
            assert not torch.allclose(call(score, tensors, graph, mask=mask), plain)

    @pytest.mark.parametrize(
        ("shape", "with_lengths", "score"),
        pairs(
            [(), (5,), (H, 4, 1), (3, 1, 4, 5), (2, 1, 1, 4, 1), (2, 3, H, 4, 5)], (False, True), ("dot", "leaky_relu")
        ),
    )
    def test_two_batch_dimensions(self, shape, with_lengths, score):
        source_lengths = lengths(5, 0, 2, 1, 5, 3).view(2, 3) if with_lengths else None
        graph = CompleteGraph(4, 5, causal=True, source_lengths=source_lengths)
        bias, mask = torch.randn(shape, dtype=torch.double), torch.rand(shape) < 0.6
        self.check(score, make_tensors(score, graph, (2, 3)), graph, bias, mask)

    @pytest.mark.parametrize(
        ("shape", "batch", "options", "score"),
        pairs(
            [(), (5,), (4, 5), (H, 4, 1), (1, H, 4, 5), (7, 1, 1, 5), (7, H, 4, 5)],
            [(), (2,), (2, 3)],
            [{}, {"causal": True}, {"window": (1, 1)}],
            ("dot", "tanh"),
        ),
    )
    def test_packed(self, shape, batch, options, score):
        """One matrix for each block, as large as the largest."""
        graph = CompleteGraph.packed([2, 4, 0, 2, 4, 2, 1], [3, 5, 1, 3, 5, 3, 0], **options)
        bias, mask = torch.randn(shape, dtype=torch.double), torch.rand(shape) < 0.6
        self.check(score, make_tensors(score, graph, batch), graph, bias, mask)

    def test_a_bias_of_packed_blocks_belongs_to_its_block(self):
        graph = CompleteGraph.packed([2, 3, 2])
        tensors = make_tensors("dot", graph)
        bias = torch.randn(3, H, 3, 3, dtype=torch.double)
        out = call("dot", tensors, graph, bias=bias)
        start = 0
        for block, size in enumerate((2, 3, 2)):
            alone = {name: tensor[start : start + size] for name, tensor in tensors.items()}
            expected = call("dot", alone, CompleteGraph(size), "reference", bias=bias[block, :, :size, :size])
            torch.testing.assert_close(out[start : start + size], expected)
            start += size

    @pytest.mark.parametrize(
        ("name", "score", "dtype", "how"),
        pairs(
            (
                "full",
                "causal",
                "causal, fewer targets",
                "window",
                "band",
                "both lengths",
                "packed",
                "packed, empty blocks",
            ),
            SCORES,
            DTYPES,
            ("mask", "bias", "both"),
        ),
    )
    def test_fully_masked_targets_get_zeros_and_finite_gradients(self, name, how, dtype, score):
        graph, batch = GRAPHS[name]
        n, m = graph.num_targets, graph.num_sources
        if graph.blocks is not None:
            n, m = (max(sizes) for sizes in zip(*graph.blocks, strict=True))
        tensors = make_tensors(score, graph, batch, dtype=dtype)
        mask = torch.ones(H, n, m, dtype=torch.bool)
        mask[:, 1] = False
        mask[0, 2] = False
        options = {"mask": mask} if how != "bias" else {}
        if how != "mask":
            bias = torch.randn(H, n, m).to(dtype)
            tensors["bias"] = bias.masked_fill(~mask, -math.inf) if how == "bias" else bias
        found = results(score, tensors, graph, **options)
        for what, result in found.items():
            assert result.isfinite().all(), what
        assert (found["out"] != 0).any()
        if graph.blocks is None:
            assert (found["out"][..., 1, :, :] == 0).all()
            assert (found["out"][..., 2, 0, :] == 0).all()
            assert (found["weights 0"][..., 1, :] == 0).all()
        if dtype == torch.double:
            compare(score, tensors, graph, **options)

    @each_score
    def test_minus_infinity_and_the_window_together_leave_nothing(self, score):
        """Each alone leaves something in every row."""
        graph = CompleteGraph(5, causal=True)
        bias = torch.zeros(5, 5, dtype=torch.double)
        bias[:, :2] = -math.inf
        found = compare(score, {**make_tensors(score, graph), "bias": bias}, graph)
        assert (found["out"][:2] == 0).all()
        assert (found["out"][2:] != 0).all()
        assert all(result.isfinite().all() for result in found.values())

    def test_wrong_ones(self):
        graph = CompleteGraph(4)
        tensors = make_tensors("dot", graph)
        for backend in ("dense", "auto", "reference"):
            with pytest.raises(
                ValueError, match="mask must be a tensor of booleans, True = may attend; got torch.float32"
            ):
                call("dot", tensors, graph, backend, mask=torch.ones(4, 4))
            with pytest.raises(ValueError, match=r"bias on this complete graph must be broadcastable to \[2, 4, 4\]"):
                call("dot", tensors, graph, backend, bias=torch.ones(3, 4))
            with pytest.raises(ValueError, match=r"broadcastable to \[2, 2, 3, 3\] \(blocks, heads, most targets"):
                call("dot", tensors, CompleteGraph.packed([1, 3]), backend, bias=torch.ones(4, 4))
            with pytest.raises(ValueError, match="mask on this complete graph must be broadcastable to"):
                call("dot", tensors, graph, backend, mask=torch.ones(2, 1, 4, 4, dtype=torch.bool))


class TestOtherDistributions:
    """A matrix of logits, and the distribution's own weights for its entries."""

    NAMES = [name for name in GRAPHS if not name.startswith("packed")]
    KINDS = ["local", "local of each element", "hard"]
    each_kind = pytest.mark.parametrize("kind", KINDS)

    @staticmethod
    def make(kind, graph, batch):
        if kind == "hard":
            return gattn.Hard(sample=False)
        shape = (graph.num_targets,) if kind == "local" else (*batch, graph.num_targets)
        return gattn.LocalGaussian(torch.rand(shape, dtype=torch.double) * graph.num_sources, 3)

    @pytest.mark.parametrize(("name", "kind", "score"), pairs(NAMES, KINDS, ("dot", "tanh", "gat without query")))
    def test_every_graph(self, name, kind, score):
        graph, batch = GRAPHS[name]
        distribution = self.make(kind, graph, batch)
        compare(score, make_tensors(score, graph, batch), graph, distribution=distribution)

    @pytest.mark.parametrize(
        ("name", "kind", "score"),
        pairs(
            ("full", "causal, fewer targets", "window", "both lengths", "lengths of two batches"),
            KINDS,
            ("dot", "leaky_relu"),
        ),
    )
    def test_with_bias_and_mask(self, name, kind, score):
        graph, batch = GRAPHS[name]
        tensors = make_tensors(score, graph, batch)
        tensors["bias"] = torch.randn(H, graph.num_targets, 1, dtype=torch.double)
        mask = torch.rand(*batch, H, graph.num_targets, graph.num_sources) < 0.6
        compare(score, tensors, graph, mask=mask, distribution=self.make(kind, graph, batch))

    @pytest.mark.parametrize(
        ("batch", "sizes", "kind"), pairs([(), (1,), (0,), (2, 3), (2, 0)], [(4, 5), (0, 5), (4, 0), (0, 0)], KINDS)
    )
    def test_nothing_and_batches(self, kind, sizes, batch):
        graph = CompleteGraph(*sizes)
        compare("dot", make_tensors("dot", graph, batch), graph, distribution=self.make(kind, graph, batch))

    @pytest.mark.parametrize("key_heads", [1, 2])
    @each_kind
    def test_grouped_queries_and_some_targets_at_a_time(self, kind, key_heads, monkeypatch):
        monkeypatch.setattr(matrices, "_CHUNK", 20)
        graph = CompleteGraph(7, causal=True)
        tensors = make_tensors("dot", graph, (2,), heads=4, key_heads=key_heads)
        compare("dot", tensors, graph, distribution=self.make(kind, graph, (2,)))

    @some_graphs("full", "causal", "both lengths")
    def test_what_it_leaves_and_takes_gradients_of(self, name):
        """Log-probabilities and entropies of choices, and centres."""
        graph, batch = GRAPHS[name]
        tensors = make_tensors("dot", graph, batch)
        found = []
        for backend in ("dense", "reference"):
            leaf = tensors["query"].clone().requires_grad_()
            hard = gattn.Hard(sample=False)
            call("dot", {**tensors, "query": leaf}, graph, backend, distribution=hard)
            grads = [torch.autograd.grad(x.sum(), leaf, retain_graph=True)[0] for x in (hard.log_prob, hard.entropy)]
            centres = torch.linspace(-1, graph.num_sources, graph.num_targets, dtype=torch.double, requires_grad=True)
            out = call("dot", tensors, graph, backend, distribution=gattn.LocalGaussian(centres, 2))
            grads += torch.autograd.grad(out, centres, incoming([out])[0])
            assert hard.log_prob.shape == hard.entropy.shape == (*batch, graph.num_targets, H)
            assert all((grad != 0).any() for grad in grads)
            found.append([hard.log_prob.detach(), hard.entropy.detach(), *grads])
        torch.testing.assert_close(*found)

    def test_it_draws_with_the_probabilities_of_the_softmax(self):
        graph, count = CompleteGraph(3, 4, causal=True), 5_000
        tensors = make_tensors("dot", graph)
        many = {name: tensor.expand(count, *tensor.shape) for name, tensor in tensors.items()}
        hard = gattn.Hard(generator=torch.Generator().manual_seed(1))
        _, drawn = call("dot", many, graph, return_weights=True, distribution=hard)
        _, expected = call("dot", tensors, graph, return_weights=True)
        assert (drawn.sum(-1) == 1).all()
        assert ((drawn.mean(0) - expected).abs() <= 4 * (expected * (1 - expected) / count).sqrt()).all()
        chosen = (drawn * expected).sum(-1).transpose(-1, -2)
        torch.testing.assert_close(hard.log_prob, chosen.log())


class TestWeights:
    @pytest.mark.parametrize(
        ("name", "score", "dtype"),
        pairs(
            ("full", "causal", "causal, fewer targets", "window", "band", "both lengths", "packed, many"),
            SCORES,
            (torch.double, torch.float32, torch.bfloat16),
        ),
    )
    def test_they_change_no_bit_of_the_output(self, name, dtype, score):
        graph, batch = GRAPHS[name]
        tensors = make_tensors(score, graph, batch, dtype=dtype)
        plain = call(score, tensors, graph)
        assert torch.equal(call(score, tensors, graph, return_weights=True)[0], plain)

    def test_one_matrix_for_each_block(self):
        graph = CompleteGraph.packed([2, 0, 3], [4, 1, 2])
        _, weights = call("dot", make_tensors("dot", graph, (5,)), graph, return_weights=True)
        assert isinstance(weights, list)
        assert [list(block.shape) for block in weights] == [[5, H, 2, 4], [5, H, 0, 1], [5, H, 3, 2]]
        torch.testing.assert_close(weights[0].sum(-1), torch.ones(5, H, 2, dtype=torch.double))


class TestDropout:
    @pytest.mark.parametrize(("name", "score"), in_turn(GRAPHS, SCORES))
    def test_the_dropped_weights_made_the_output(self, name, score):
        graph, batch = GRAPHS[name]
        tensors = make_tensors(score, graph, batch)
        out, weights = call(score, tensors, graph, dropout=0.4, training=True, return_weights="dropped")
        blocks = weights if graph.blocks is not None else [weights]
        sizes = graph.blocks or ((graph.num_targets, graph.num_sources),)
        values = tensors["value"].split([m for _, m in sizes], -3)
        expected = [(w @ v.transpose(-3, -2)).transpose(-3, -2) for w, v in zip(blocks, values, strict=True)]
        torch.testing.assert_close(out, torch.cat(expected, -3))
        undropped = call(score, tensors, graph, return_weights=True)[1]
        for block, whole in zip(blocks, undropped if graph.blocks is not None else [undropped], strict=True):
            kept = block != 0
            torch.testing.assert_close(block[kept], whole[kept] / 0.6)
            if (whole != 0).sum() > 100:
                assert 0.4 < kept[whole != 0].double().mean() < 0.8
        _, before = call(score, tensors, graph, dropout=0.4, training=True, return_weights=True)
        torch.testing.assert_close(before, undropped)

    @pytest.mark.parametrize(
        "graph",
        [
            CompleteGraph(64),
            CompleteGraph(32, 64),
            CompleteGraph(256, 287, window=(31, 0)),  # a band in which each target sees 32
            CompleteGraph.packed([64, 64, 64]),
            CompleteGraph(64, source_lengths=lengths(64, 32, 64, 64)),
        ],
        ids=["full", "fewer targets", "band", "packed", "lengths"],
    )
    @each_score
    def test_how_much_is_dropped(self, graph, score):
        """Of M equal weights a binomial number is left: mean 1 and variance p / (1 - p) / M."""
        batch = (4,)
        tensors = make_tensors(score, graph, batch, heads=4, value_channels=2, dtype=torch.float32)
        tensors = {name: tensor * 0 for name, tensor in tensors.items() if name != "value"}
        tensors["value"] = torch.ones(*batch, graph.num_sources, 4, 2)
        out = call(score, tensors, graph, dropout=0.3, training=True)
        assert torch.equal(out[..., 0], out[..., 1]), "all channels of a weight"
        seen = allowed(graph, batch).sum(-1)
        for count in seen.unique().tolist():
            sums = out[..., 0][seen == count].double()
            assert sums.mean().sub(1).abs() < 0.05
            assert 0.75 < sums.var() / (0.3 / 0.7 / count) < 1.25

    @pytest.mark.parametrize(
        ("name", "score", "chunk"),
        pairs(
            ("full", "causal", "window", "band", "both lengths", "packed", "packed, many"),
            SCORES,
            (matrices._CHUNK, 60),
        ),
    )
    def test_the_backward_pass_drops_the_same(self, name, chunk, score, monkeypatch):
        """A one at each source for its value makes the output the weights that were used."""
        make_chunks(monkeypatch, chunk)
        graph, batch = GRAPHS[name]
        m = graph.num_sources
        tensors = make_tensors(score, graph, batch, channels=m, value_channels=m)
        tensors["value"] = torch.eye(m, dtype=torch.double).unsqueeze(1).expand(*batch, m, H, m).clone()
        leaf = tensors["value"].requires_grad_()
        out = call(score, tensors, graph, dropout=0.5, training=True)
        assert not torch.allclose(out, call(score, tensors, graph))
        (grad,) = incoming([out])
        (actual,) = torch.autograd.grad(out, leaf, grad)
        torch.testing.assert_close(actual, torch.einsum("...nhm,...nhc->...mhc", out, grad))

    @some_graphs("full", "causal", "window", "band", "both lengths", "packed")
    @each_score
    def test_everything_nothing_and_the_seed(self, name, score):
        graph, batch = GRAPHS[name]
        tensors = make_tensors(score, graph, batch)
        plain = call(score, tensors, graph)
        assert torch.equal(call(score, tensors, graph, dropout=0.9), plain)
        found = results(score, tensors, graph, dropout=1.0, training=True, return_weights=False)
        assert all((result == 0).all() for result in found.values())
        outs = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            outs.append(call(score, tensors, graph, dropout=0.5, training=True))
        assert torch.equal(outs[0], outs[1])
        assert not torch.equal(outs[0], outs[2])


class TestTypes:
    NAMES = (
        "full",
        "causal",
        "causal, fewer targets",
        "window",
        "band",
        "both lengths",
        "lengths, causal",
        "packed",
        "packed, causal",
    )

    def three(self, score, tensors, graph, **options):
        """What is tested, its peer in the same type, and what is exact."""
        exact = {name: tensor.double() for name, tensor in tensors.items()}
        return (
            results(score, tensors, graph, **options),
            results(score, tensors, graph, "reference", **options),
            results(score, exact, graph, "reference", **options),
        )

    @pytest.mark.parametrize(
        ("name", "score", "dtype", "bias"), pairs(NAMES, SCORES, (torch.float32, *HALF), (False, True))
    )
    def test_as_exact_as_the_reference(self, name, dtype, bias, score):
        graph, batch = GRAPHS[name]
        tensors = make_tensors(score, graph, batch, channels=16, value_channels=16, dtype=dtype)
        if bias:
            tensors["bias"] = torch.randn(H, 1, 1).to(dtype)
        actual, peer, exact = self.three(score, tensors, graph)
        for what, result in actual.items():
            assert_as_exact_as(result, peer[what], exact[what], name=what, scale=self.scale(what, exact))

    def scale(self, what, exact):
        """A gradient through the softmax is a difference of terms that are larger than itself."""
        size = exact[what].abs().max().item() if exact[what].numel() else 0.0
        return max(size, 1.0) if what.startswith("grad") else size

    @pytest.mark.parametrize(("name", "score", "dtype"), pairs(NAMES, NOT_DOT, HALF))
    def test_half_precision_is_rounded_once(self, name, dtype, score):
        graph, batch = GRAPHS[name]
        tensors = make_tensors(score, graph, batch, channels=16, value_channels=16, dtype=dtype)
        actual, _, exact = self.three(score, tensors, graph)
        for what, result in actual.items():
            if result.numel():
                error = (result.double() - exact[what]).abs()
                bound = 0.51 * torch.finfo(dtype).eps * exact[what].abs() + 1e-5 * exact[what].abs().max() + 6e-8
                assert (error <= bound).all(), f"{what}: {(error / bound).max():.2f}"

    @pytest.mark.parametrize("dtype", HALF)
    @pytest.mark.parametrize("name", ["full", "causal", "window"])
    def test_long_rows_of_half_precision(self, dtype, name):
        """A sum of a thousand terms must not be one in half precision."""
        options = {"full": {}, "causal": {"causal": True}, "window": {"window": 300}}[name]
        graph = CompleteGraph(24, 1200, **options)
        tensors = make_tensors("dot", graph, heads=1, channels=32, value_channels=32, dtype=dtype)
        tensors["value"] += 1
        actual, peer, exact = self.three("dot", tensors, graph)
        for what, result in actual.items():
            assert_as_exact_as(result, peer[what], exact[what], name=what, scale=self.scale(what, exact))

    @pytest.mark.parametrize(
        ("name", "score", "dtype"),
        pairs(("full", "causal", "window", "band", "both lengths", "packed"), SCORES, (torch.float32, *HALF)),
    )
    def test_logits_far_from_zero(self, dtype, name, score):
        graph, batch = GRAPHS[name]
        tensors = make_tensors(score, graph, batch, channels=16, value_channels=16, dtype=dtype)
        tensors["key"] = (tensors["key"] * 8).sign() * 64
        found = results(score, tensors, graph)
        assert all(result.isfinite().all() for result in found.values())
        rows = found["out"].flatten(-2).abs().sum(-1)
        blind = allowed(graph, batch).sum(-1) == 0
        assert torch.equal(rows == 0, blind)

    def test_mixed_types_promote(self):
        graph = CompleteGraph(5, causal=True)
        for score, types, expected in (
            ("dot", {"query": torch.bfloat16, "key": torch.float16, "value": torch.bfloat16}, torch.float32),
            ("dot", {"bias": torch.double}, torch.double),
            ("gat", {"value": torch.bfloat16}, torch.float32),
            ("tanh", {"query": torch.bfloat16, "key": torch.bfloat16, "value": torch.bfloat16}, torch.float32),
            ("gat without query", {"key": torch.float16, "value": torch.double}, torch.double),
        ):
            tensors = make_tensors(score, graph, dtype=torch.float32)
            tensors |= {"bias": torch.randn(5, 5)} if "bias" in types else {}
            tensors = {name: tensor.to(types.get(name, tensor.dtype)) for name, tensor in tensors.items()}
            actual, peer, exact = self.three(score, tensors, graph)
            assert actual["out"].dtype == actual["weights 0"].dtype == expected
            for what, result in actual.items():
                if what.startswith("grad"):
                    assert result.dtype == tensors[what.removeprefix("grad of ")].dtype
                assert_as_exact_as(result, peer[what], exact[what], name=what, scale=self.scale(what, exact))

    @some_graphs("full", "causal", "window", "band", "both lengths", "packed")
    @each_score
    def test_autocast_changes_nothing(self, name, score):
        graph, batch = GRAPHS[name]
        for dtype in (torch.float32, torch.bfloat16):
            tensors = make_tensors(score, graph, batch, dtype=dtype)
            expected = results(score, tensors, graph)

            def function(*args, **options):
                with torch.autocast("cpu", torch.bfloat16):
                    return call(*args, **options)

            actual = results(score, tensors, graph, function=function)
            for what, result in actual.items():
                assert result.dtype == dtype
                assert torch.equal(result, expected[what]), what


class TestWhatIsNotSeen:
    @some_graphs(
        "causal",
        "causal, fewer targets",
        "causal, fewer sources",
        "causal window",
        "causal band",
        "lengths, causal",
        "packed, causal",
        "packed, band",
    )
    @each_score
    def test_a_future_token_changes_nothing_before_it(self, name, score):
        graph, batch = GRAPHS[name]
        tensors = make_tensors(score, graph, batch)
        n, m = graph.num_targets, graph.num_sources
        before = call(score, tensors, graph)
        for place in (m - 1, m // 2, 1):
            changed = {name: tensor.clone() for name, tensor in tensors.items()}
            for what in ("key", "value"):
                changed[what].select(-2 if what == "key" and not SCORES[score].wide else -3, place).add_(100.0)
            sees = allowed(graph, batch)[..., place]
            after = call(score, changed, graph)
            assert torch.equal(after[~sees], before[~sees])
            if sees.any():
                assert not torch.equal(after[sees], before[sees])
            leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items() if name != "vector"}
            out = call(score, {**tensors, **leaves}, graph)
            (grad_key, grad_value) = torch.autograd.grad(
                out, (leaves["key"], leaves["value"]), torch.where(sees[..., None, None], 0.0, 1.0).expand_as(out)
            )
            assert (grad_key.select(-3 if SCORES[score].wide else -2, place) == 0).all()
            assert (grad_value.select(-3, place) == 0).all()
        assert n == out.size(-3)

    @some_graphs("source lengths", "target lengths", "both lengths", "lengths of many", "lengths, causal")
    @each_score
    def test_padding_is_not_computed(self, name, score):
        """Not even NaN there is noticed."""
        graph, batch = GRAPHS[name]
        tensors = make_tensors(score, graph, batch)
        before = results(score, tensors, graph, return_weights=False)
        padded = {name: tensor.clone() for name, tensor in tensors.items()}
        places = {"query": graph.target_lengths, "key": graph.source_lengths, "value": graph.source_lengths}
        for what, count in places.items():
            if what in padded and count is not None:
                for element, length in enumerate(count.tolist()):
                    padded[what][element, length:] = math.nan
        assert any(tensor.isnan().any() for tensor in padded.values()) or graph.source_lengths is None
        after = results(score, padded, graph, return_weights=False)
        for what, result in after.items():
            assert torch.equal(result, before[what]), what

    @each_score
    def test_padding_equals_each_sequence_alone(self, score):
        counts = lengths(3, 5, 1)
        graph = CompleteGraph(5, source_lengths=counts, target_lengths=counts)
        tensors = make_tensors(score, graph, (3,))
        out = call(score, tensors, graph)
        packed = {
            name: tensor if name == "vector" else torch.cat([x[:n] for x, n in zip(tensor, counts, strict=True)])
            for name, tensor in tensors.items()
        }
        ends = call(score, packed, CompleteGraph.packed(counts)).split(counts.tolist())
        for element, (count, expected) in enumerate(zip(counts.tolist(), ends, strict=True)):
            alone = {name: tensor if name == "vector" else tensor[element, :count] for name, tensor in tensors.items()}
            torch.testing.assert_close(out[element, :count], call(score, alone, CompleteGraph(count)))
            torch.testing.assert_close(out[element, :count], expected)
            assert (out[element, count:] == 0).all()

    @each_score
    def test_a_block_sees_no_other(self, score):
        graph = CompleteGraph.packed([3, 4, 3, 4, 3, 4])
        tensors = make_tensors(score, graph)
        before = call(score, tensors, graph)
        tensors["key"][7:10], tensors["value"][7:10] = math.nan, math.nan
        after = call(score, tensors, graph)
        assert after[7:10].isnan().all()
        assert torch.equal(after[:7], before[:7])
        assert torch.equal(after[10:], before[10:])


class Largest(TorchDispatchMode):
    """Remembers the largest memory behind any tensor that an operator made, in elements."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return made


class TestMemory:
    def largest(self, score, tensors, graph, backend="dense", **options):
        with Largest() as seen:
            results(score, tensors, graph, backend, return_weights=False, **options)
        return seen.elements

    @pytest.mark.parametrize("score", ["leaky_relu", "tanh"])
    def test_no_hidden_layer_of_all_pairs(self, score):
        graph = CompleteGraph(300)
        tensors = make_tensors(score, graph, heads=1, channels=64, value_channels=64, dtype=torch.float32)
        everything = 300 * 300 * 64
        assert self.largest(score, tensors, graph, "reference") >= everything, "it would be seen"
        assert self.largest(score, tensors, graph) < everything / 4
        assert self.largest(score, tensors, graph, mask=torch.rand(300, 300) < 0.5) < everything / 4

    @pytest.mark.parametrize("options", [{"clamp": 0.5}, {"scale": 2.0, "negative_slope": 0.2, "clamp": 0.4}])
    @pytest.mark.parametrize("window", [None, (5, 2)])
    def test_what_follows_a_product_is_no_hidden_layer(self, window, options):
        n, m, heads, channels = 90, 100, 2, 64
        score = DotScore(**options)
        leaves = [torch.randn(size, heads, channels, dtype=torch.double, requires_grad=True) for size in (n, m, m)]
        results = {}
        for backend in ("reference", "dense"):
            with Largest() as seen:
                given = {"graph": CompleteGraph(n, m, window=window), "score": score, "backend": backend}
                out, logits = attend(*leaves, **given), weigh(*leaves[:2], **given, distribution=None)
                logits = logits.masked_fill(logits == -torch.inf, 0.0)
                results[backend] = out, *torch.autograd.grad((out.cos() * logits.sum()).sum(), leaves)
        assert seen.elements <= heads * n * m
        torch.testing.assert_close(results["dense"], results["reference"], rtol=1e-10, atol=1e-10)
        is_clamped = logits.abs()[logits != 0] == options["clamp"]
        assert is_clamped.any()
        assert not is_clamped.all()

    @pytest.mark.parametrize(
        "options", [{"window": (3, 2)}, {"causal": True, "window": (127, 0)}, {"causal": True, "window": 1000}]
    )
    @each_score
    def test_windows_cost_their_width(self, options, score):
        n = 4096
        tensors = make_tensors(score, CompleteGraph(n), heads=1, channels=2, value_channels=2, dtype=torch.float32)
        if options["window"] == 1000 and score != "dot":
            return
        for terms in ({}, {"mask": torch.rand(n) < 0.9}, {"bias": torch.randn(n, 1)}):
            assert self.largest(score, tensors, CompleteGraph(n, **options), **terms) < n * n / 2

    @pytest.mark.parametrize("options", [{}, {"causal": True}])
    def test_dot_products_make_no_matrix_of_all_pairs(self, options):
        n = 512
        for graph, batch in (
            (CompleteGraph(n, **options), ()),
            (CompleteGraph.packed([n, n - 1, n], **options), ()),
            (CompleteGraph(n, source_lengths=lengths(n, n - 1), target_lengths=lengths(n, n - 1), **options), (2,)),
            (CompleteGraph(n, source_lengths=lengths(n, n), target_lengths=lengths(n, n), **options), (2,)),
        ):
            tensors = make_tensors("dot", graph, batch, channels=8, value_channels=8, dtype=torch.float32)
            assert self.largest("dot", tensors, graph) < n * n / 4, graph

    @pytest.mark.parametrize(("name", "score"), in_turn(GRAPHS, SCORES))
    def test_no_list_of_edges(self, name, score, monkeypatch):
        def fail(*args, **kwargs):
            raise AssertionError("a list of edges was made")

        given, batch = GRAPHS[name]
        graph = copy(given)  # which has no list yet
        tensors = make_tensors(score, graph, batch)
        for method in ("edge_index", "_edges"):
            monkeypatch.setattr(type(graph), method, fail)
        for module in (complete, plans):  # short ones are made, and kept
            monkeypatch.setattr(module, "MOST_LISTED", 0)
        for backend in ("dense",) if graph.has_small_blocks else ("dense", "auto"):
            results(score, tensors, graph, backend)
        with pytest.raises(AssertionError, match="a list of edges"):
            results(score, tensors, graph, "reference")


@pytest.fixture
def lists(monkeypatch):
    """The lengths of the lists of pairs that the CPU kernels were given, in turn."""
    lengths, run = [], cpu_pairs.Cpu.operator.run

    def counted(inputs, *options):
        lengths.append(inputs.edge_index.size(1))
        return run(inputs, *options)

    monkeypatch.setattr(cpu_pairs.Cpu.operator, "run", counted)
    return lengths


class TestKernelsForLists:
    ACTIVATIONS = ("leaky_relu", "tanh", "relu", "elu", "gelu", "silu", "identity")

    @pytest.mark.parametrize("backend", ["auto", "dense"])
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_they_compute_additive_scores(self, activation, backend, lists):
        x = torch.randn(2, 6, H, C, dtype=torch.double, requires_grad=True)
        score = gattn.AdditiveScore(torch.randn(H, C, dtype=torch.double), activation)
        graph = CompleteGraph(6, source_lengths=lengths(4, 6))
        out = attend(x, x, x, graph, score=score, backend=backend)
        assert lists == [6 * 4, 6 * 6]
        expected = attend(x, x, x, graph, score=score, backend="reference")
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
        grads = [torch.autograd.grad(result.cos().sum(), x)[0] for result in (out, expected)]
        torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)

    @pytest.mark.parametrize("chunk", [2**16, 20])
    @each_graph
    def test_scalar_scores_of_many_heads(self, name, chunk, lists, monkeypatch):
        make_chunks(monkeypatch, chunk)
        graph, batch = GRAPHS[name]
        tensors = make_tensors("gat", graph, batch, heads=4)
        if graph.blocks is None:
            n, m = graph.num_targets, graph.num_sources
            bias = torch.randn(4, 1, m, dtype=torch.double)
            compare("gat", tensors | {"bias": bias}, graph, mask=torch.rand(*batch, 1, n, m) < 0.7)
        compare("gat", tensors, graph)
        assert bool(lists) == (name != "zero lengths" and bool(graph.num_targets))

    @pytest.mark.parametrize(
        ("score", "heads", "channels"), [("dot", 4, 3), ("gat", 3, 3), ("gat", 4, 65)], ids=["dot", "heads", "channels"]
    )
    def test_matrices_are_faster(self, score, heads, channels, lists):
        graph = CompleteGraph(5)
        call(score, make_tensors(score, graph, heads=heads, value_channels=channels), graph)
        assert not lists

    def test_transforms_and_compiled_code_use_plain_pytorch(self, lists, monkeypatch):
        monkeypatch.setattr(plans, "MOST_LISTED", 0)
        x, score, graph = torch.randn(3, 5, H, C), gattn.AdditiveScore(torch.randn(H, C), "tanh"), CompleteGraph(5)

        def function(x):
            return attend(x, x, x, graph, score=score)

        mapped = torch.func.vmap(function)(x)
        compiled = torch.compile(function, fullgraph=True, backend="eager")(x)
        exported = torch.export.export(Module(function), (x,)).module()(x)
        assert not lists
        for result in (mapped, compiled, exported):
            torch.testing.assert_close(result, function(x))
        assert lists

    @pytest.mark.parametrize("score", ["gat", "tanh"])
    def test_short_lists_are_kept_for_graphs_like_theirs(self, score, lists):
        """They do not go through this backend, whose calls are not prepared."""
        options = ({}, {"causal": True}, {"window": (1, 2)}, {"causal": True, "window": (2, 2)}, {}, {"causal": True})
        for shape, option in itertools.product(((5, 5), (5, 7), (7, 5)), options):
            graph = CompleteGraph(*shape, **option)
            tensors = make_tensors(score, graph, heads=4)
            assert_same(*(results(score, tensors, graph, x, return_weights=False) for x in ("auto", "reference")))
        assert not lists

    @pytest.mark.parametrize("score", ["gat", "leaky_relu", "tanh"])
    @each_graph
    def test_without_them(self, name, score, monkeypatch):
        """As on machines where they are missing."""
        monkeypatch.setattr(cpu_pairs, "can_attend", lambda *args: False)
        graph, batch = GRAPHS[name]
        tensors = make_tensors(score, graph, batch)
        options = {"return_weights": False}
        assert_same(results(score, tensors, graph, **options), results(score, tensors, graph, "reference", **options))

    @pytest.mark.parametrize("score", ["leaky_relu", "tanh"])
    def test_short_lists_that_are_made_again_in_the_backward_pass(self, score, lists, monkeypatch):
        graph = CompleteGraph(40, 30)
        tensors = make_tensors(score, graph, (2,))
        compare(score, tensors, graph)
        assert set(lists) == {40 * 30}
        lists.clear()
        monkeypatch.setattr(cpu_pairs, "MOST_LISTED", 16 * 30)
        monkeypatch.setattr(cpu_pairs, "_LEAST_TARGETS", 1)
        results(score, tensors, graph, return_weights=False)
        kept = list(lists)
        assert max(kept) == 16 * 30
        assert sum(kept) == 40 * 30
        lists.clear()
        monkeypatch.setattr(matrices, "_MOST_KEPT", 0)
        compare(score, tensors, graph)
        results(score, tensors, graph, return_weights=False)
        assert sorted(lists) == sorted(6 * kept)  # three times, forward and backward
        lists.clear()
        with torch.no_grad():
            call(score, tensors, graph)
        assert lists == kept

    def test_the_elements_of_a_batch_count(self, lists, monkeypatch):
        monkeypatch.setattr(cpu_pairs, "_MOST_OF_BATCH", 600)
        monkeypatch.setattr(cpu_pairs, "_LEAST_TARGETS", 1)
        graph = CompleteGraph(20)
        call("tanh", make_tensors("tanh", graph, (3,)), graph)
        assert max(lists) == 600 // 3
        lists.clear()
        monkeypatch.setattr(cpu_pairs, "_LEAST_TARGETS", 15)
        call("tanh", make_tensors("tanh", graph, (3,)), graph)
        assert max(lists) == 15 * 20

    def test_long_lists_are_not_kept(self, monkeypatch):
        assert cpu_pairs._pairs(3, 5, None) is cpu_pairs._pairs(3, 5, None)
        monkeypatch.setattr(cpu_pairs, "MOST_LISTED", 7)
        assert cpu_pairs._pairs(3, 5, None) is not cpu_pairs._pairs(3, 5, None)
        assert torch.equal(cpu_pairs._pairs(3, 5, None), CompleteGraph(3, 5).edge_index)
        assert torch.equal(cpu_pairs._pairs(6, 5, (-2, 1)), CompleteGraph(6, 5, window=(1, 2)).edge_index)

    def test_second_derivatives_of_chunks(self, monkeypatch):
        make_chunks(monkeypatch, 10)
        graph = CompleteGraph(4)
        vector = torch.randn(1, 2, dtype=torch.double)
        leaves = [torch.randn(4, 1, 2, dtype=torch.double, requires_grad=True) for _ in range(3)]
        score = gattn.AdditiveScore(vector, "tanh")
        torch.autograd.gradgradcheck(lambda q, k, v: attend(q, k, v, graph, score=score), leaves)


class Module(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.forward = function


@pytest.fixture
def calls(monkeypatch):
    """Counts the calls of the dense backend."""
    counted = []
    original = dense._attend

    def attention(*args, **kwargs):
        counted.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(dense, "_attend", attention)
    monkeypatch.setattr(plans, "given", lambda *args, **terms: None)  # each call is looked at
    return counted


class TestChoice:
    x = torch.randn(4, 2, 3)
    graph = CompleteGraph(4, causal=True)

    def test_auto_and_dense_use_it_and_the_others_do_not(self, calls):
        for backend, expected in (("auto", 1), ("dense", 2), ("reference", 2), ("cpu", 2)):
            attend(self.x, self.x, self.x, self.graph, backend=backend)
            assert len(calls) == expected
        for name, expected in (("reference", 2), ("dense", 3), ("auto", 4)):
            with gattn.backend(name):
                attend(self.x, self.x, self.x, self.graph)
            assert len(calls) == expected

    def refused(self, function, reason, calls):
        """Explicit requests say why not; automatic ones use something else."""
        before = len(calls)
        match = f"backend='dense' cannot serve this call: .*{reason}.*'auto' can"
        with gattn.backend("dense"), pytest.raises(ValueError, match=match):
            function()
        result = function()
        with gattn.backend("reference"):
            expected = function()
        torch.testing.assert_close(result, expected)
        assert len(calls) == before

    @pytest.mark.parametrize(
        "graph",
        [torch.tensor([[0, 1], [1, 2]]), SparseGraph(torch.tensor([[0, 1], [1, 2]]), num_sources=4, num_targets=4)],
    )
    def test_lists_of_edges(self, graph, calls):
        reason = "it serves complete graphs, not lists of edges"
        self.refused(lambda: attend(self.x, self.x, self.x, graph), reason, calls)

    @pytest.mark.parametrize("term", ["edge", "edge_value"])
    def test_edge_terms(self, term, calls):
        terms = {term: torch.randn(10, 2, 3)}
        reason = "edge and edge_value have one entry per edge"
        self.refused(lambda: attend(self.x, self.x, self.x, self.graph, **terms), reason, calls)

    def test_own_scores(self, calls):
        class Mine(DotScore):
            def logits(self, query, key, edge):
                return super().logits(query, key, edge) * 2

        self.refused(
            lambda: attend(self.x, self.x, self.x, self.graph, score=Mine()), "Mine does not declare it", calls
        )

    @pytest.mark.parametrize("grouped", [False, True])
    def test_own_scores_that_broadcast(self, grouped, calls):
        class Mine(DotScore):
            broadcasts = True

            def logits(self, query, key, edge):
                return -(query - key).square().sum(-1)

        key = self.x[:, :1] if grouped else self.x
        found = [
            attend(self.x, key, key, self.graph, score=Mine(), backend=backend)
            for backend in ("dense", "auto", "reference")
        ]
        assert len(calls) == 2
        torch.testing.assert_close(found[0], found[2])
        torch.testing.assert_close(found[1], found[2])

    def test_own_distributions(self, calls):
        class Mine(gattn.Distribution):
            def weights(self, logits, index, num_targets, dim):
                return logits.sigmoid()

        self.refused(lambda: attend(self.x, self.x, self.x, self.graph, distribution=Mine()), "not Mine", calls)

    def test_hooks_and_aggregations(self, calls):
        core = Attention()
        core.register_message_forward_hook(lambda module, inputs, out: out * 2)
        self.refused(lambda: core(self.x, self.x, self.x, self.graph), "a hook is registered", calls)
        self.refused(lambda: Attention("max")(self.x, self.x, self.x, self.graph), "not summed", calls)

    @pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "hessian"])
    def test_transforms(self, transform, calls):
        def function(x):
            return attend(x, x, x, self.graph).square().sum((-1, -2, -3))

        transformed = {
            "vmap": lambda x: torch.func.vmap(function)(torch.stack([x, 2 * x])),
            "grad": torch.func.grad(function),
            "jvp": lambda x: torch.func.jvp(function, (x,), (torch.ones_like(x),)),
            "hessian": torch.func.hessian(function),
        }[transform]
        self.refused(lambda: transformed(self.x), "needs? plain PyTorch", calls)

    def test_meta_tensors(self):
        x = self.x.to("meta")
        for graph in (self.graph, CompleteGraph(4, window=1), CompleteGraph.packed([1, 3])):
            assert attend(x, x, x, graph).shape == (4, 2, 3)

    def test_scaled_dot_product_attention_gets_flags_instead_of_masks(self, monkeypatch):
        """Or its fused kernels would not be used."""
        seen = []
        original = F.scaled_dot_product_attention

        def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
            seen.append((attn_mask is None, is_causal))
            return original(query, key, value, attn_mask, dropout_p, is_causal, **options)

        monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
        for name, is_causal in (
            ("full", False),
            ("fewer targets", False),
            ("causal", True),
            ("one target", False),
            ("lengths of many", False),
            ("packed, equal", False),
            ("packed, causal", True),
            ("packed, many", False),
        ):
            graph, batch = GRAPHS[name]
            seen.clear()
            call("dot", make_tensors("dot", graph, batch), graph)
            assert set(seen) == {(True, is_causal)}, name


class TestCompiled:
    @pytest.fixture(autouse=True)
    def reset(self, tmp_path, monkeypatch):
        torch._dynamo.reset()
        monkeypatch.chdir(tmp_path)  # where it fails, the compiler leaves files

    def check(self, score, graph, batch, backend, **options):
        tensors = make_tensors(score, graph, batch)
        tensors["bias"] = torch.randn(H, 1, 1, dtype=torch.double)
        compiled = torch.compile(
            functools.partial(call, score, graph=graph, **options), fullgraph=True, backend=backend
        )

        def function(score, tensors, graph, which, **given):
            return compiled(tensors=tensors, return_weights=given["return_weights"])

        for return_weights in (False, True):
            actual = results(score, tensors, graph, function=function, return_weights=return_weights)
            expected = results(score, tensors, graph, "reference", return_weights=return_weights, **options)
            assert_same(actual, expected)

    @pytest.mark.parametrize(
        ("name", "score"),
        mostly_slow(
            in_turn(
                ("full", "causal, fewer targets", "window", "packed", "lengths, causal", "lengths of many"),
                ("dot", "gat without query", "tanh"),
            ),
            every=3,
        ),
    )
    def test_without_graph_breaks(self, name, score):
        self.check(score, *GRAPHS[name], "eager")

    @pytest.mark.parametrize(
        ("name", "score"),
        mostly_slow([("causal", "dot"), ("band", "tanh"), ("both lengths", "dot"), ("packed, in turn", "tanh")]),
    )
    def test_differentiated_ahead_of_time(self, name, score):
        self.check(score, *GRAPHS[name], "aot_eager")

    def test_some_targets_at_a_time(self, monkeypatch):
        monkeypatch.setattr(matrices, "_CHUNK", 60)
        self.check("gat", *GRAPHS["causal"], "aot_eager")

    def test_without_a_bias(self):
        """Flags, not masks: other branches."""
        for name in ("full", "causal", "causal, fewer sources", "band"):
            graph, _ = GRAPHS[name]
            tensors = make_tensors("dot", graph)
            torch._dynamo.reset()
            compiled = torch.compile(
                lambda q, k, v, graph=graph: attend(q, k, v, graph), fullgraph=True, backend="aot_eager"
            )
            out = compiled(tensors["query"], tensors["key"], tensors["value"])
            torch.testing.assert_close(out, call("dot", tensors, graph, "reference"))

    @pytest.mark.slow
    def test_the_graph_is_made_inside(self):
        def function(x):
            return attend(x, x, x, CompleteGraph(x.size(0), causal=True, window=(2, 0)))

        compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
        for n in (5, 9, 90):
            x = torch.randn(n, H, C, dtype=torch.double)
            torch.testing.assert_close(compiled(x), function(x))

    def test_other_lengths(self):
        """Lengths of a batch are data: they need no compilation of their own."""

        def function(x, counts):
            return attend(x, x, x, CompleteGraph(6).with_source_lengths(counts))

        x = torch.randn(3, 6, H, C, dtype=torch.double)
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        for counts in (lengths(6, 2, 0), lengths(1, 3, 5)):
            torch.testing.assert_close(compiled(x, counts), function(x, counts))

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("score", "name"), [("dot", "causal"), ("dot", "both lengths"), ("tanh", "band"), ("gat", "both lengths")]
    )
    def test_by_inductor(self, score, name):
        self.check(score, *GRAPHS[name], "inductor")


@some_graphs("full", "causal", "window", "band", "packed, two sources", "source lengths")
@pytest.mark.parametrize("shape", [(), (1,), (H,)])
def test_a_learnt_scale(shape, name):
    """It has a gradient, and may be one number for all heads or one per head."""
    graph, batch = GRAPHS[name]
    tensors = make_tensors("dot", graph, batch)
    found = []
    for backend in ("dense", "reference"):
        scale = torch.full(shape, 0.7, dtype=torch.double, requires_grad=True)
        out, weights = attend(graph=graph, score=DotScore(scale), backend=backend, return_weights=True, **tensors)
        outs = [out, *(weights if isinstance(weights, list) else [weights])]
        found.append([*outs, *torch.autograd.grad(outs, scale, incoming(outs))])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


class Copies(TorchDispatchMode):
    """Counts the copies that are made."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.name in ("aten::clone", "aten::copy_", "aten::_to_copy", "aten::contiguous", "aten::cat"):
            self.made.append(function._schema.name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_heads_before_places_are_one_transposition_away(training, causal):
    """What `scaled_dot_product_attention` takes, `[B, H, T, C]`: nothing is copied, neither way."""
    query, key, value = torch.randn(3, 2, 4, 6, 8).requires_grad_(training).unbind()
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    with Copies() as copies:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = attend(q, k, v, CompleteGraph(6, causal=causal)).transpose(1, 2)
    assert not copies.made
    torch.testing.assert_close(out, expected)
    # d2l's code lays heads among the batch, [B * H, T, C]: as many batches with one head.
    flat = [x.flatten(0, 1).unsqueeze(2) for x in (query, key, value)]
    with Copies() as copies:
        out = attend(*flat, CompleteGraph(6, causal=causal)).squeeze(2)
    assert not copies.made
    torch.testing.assert_close(out, expected.flatten(0, 1))


def test_second_derivatives_with_heads_that_share_keys():
    found = []
    for backend in ("dense", "reference"):
        torch.manual_seed(0)
        query, key = (torch.randn(5, heads, 3, dtype=torch.double, requires_grad=True) for heads in (4, 2))
        out = attend(query, key, key, CompleteGraph(5), backend=backend)
        first = torch.autograd.grad(out.square().sum(), [query, key], create_graph=True)
        found.append(torch.autograd.grad(sum(grad.square().sum() for grad in first), [query, key]))
    torch.testing.assert_close(*found)
