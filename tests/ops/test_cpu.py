"""The fused kernels against the reference in float64, and what they promise beyond."""

import functools
import itertools
import math
import subprocess
import sys
import threading

import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.explain import AttentionExplainer, Explainer
from torch_geometric.utils import add_self_loops, remove_self_loops

import gattn
from gattn import CompleteGraph, DotScore, SparseGraph, attend
from gattn.attention import Attention
from gattn.nn import GATConv, GATv2Conv, TransformerConv
from gattn.ops import dropout, plans
from gattn.ops.backends import cpu
from gattn.ops.backends.cpu import dropping
from gattn.ops.backends.cpu import layout as layout_module
from gattn.testing import assert_as_exact_as, random_edge_index
from tests.cases import (
    DIFFERENTIABLE,
    DISTRIBUTIONS,
    DTYPES,
    HALF,
    KERNEL_SCORES,
    LONG_ROW,
    SCORES,
    TERMS,
    changed,
    compare,
    equal,
    grid,
    in_turn,
    make_call,
    make_score,
    mostly_slow,
    pairs,
    threads,
    with_terms,
)

LAYERS = [GATConv, GATv2Conv, TransformerConv]
WIDE = [name for name, score in SCORES.items() if score.wide]


@pytest.fixture
def calls(monkeypatch):
    """Counts the calls of the kernels."""
    counted = []
    original = cpu.Cpu.operator

    def operator(*args):
        counted.append(1)
        return original(*args)

    monkeypatch.setattr(cpu.Cpu, "operator", staticmethod(operator))
    monkeypatch.setattr(plans, "given", lambda *args, **terms: None)  # each call is looked at
    return counted


class TestAgainstTheReference:
    @pytest.mark.parametrize(
        ("score", "dtype", "heads", "channels", "value_channels", "terms", "p"),
        pairs(
            SCORES,
            DTYPES,
            (1, 3, 4, 8, 17),
            (1, 3, 8, 16, 33, 64, 70, 130),
            (1, 3, 8, 16, 33, 64, 70, 130),
            ((), ("edge",), ("bias",), ("edge_value",), TERMS),
            (0.0, 0.4),
        ),
    )
    def test_widths_types_and_terms(self, score, dtype, heads, channels, value_channels, terms, p):
        edge_index = random_edge_index(9, 7, 60, hub=0.6)
        compare(
            make_call(
                score,
                edge_index,
                9,
                7,
                heads=heads,
                channels=channels,
                value_channels=value_channels,
                dtype=dtype,
                terms=terms,
                dropout=p,
                weights="dropped" if p else True,
            )
        )

    @pytest.mark.parametrize(
        ("score", "batch", "batched", "mask", "weights", "p"),
        pairs(
            SCORES, ((2,), (2, 3)), (False, True), ("E", "EH", "BE", "BEH", None), (False, True, "dropped"), (0.0, 0.4)
        ),
    )
    def test_batches_and_masks(self, score, batch, batched, mask, weights, p):
        edge_index = random_edge_index(6, 8, 40)
        shapes = {"E": (40,), "EH": (40, 3), "BE": (*batch, 40), "BEH": (*batch, 40, 3)}
        mask = None if mask is None else torch.rand(shapes[mask]) < 0.7
        compare(make_call(score, edge_index, 6, 8, batch=batch, batched=batched, mask=mask, weights=weights, dropout=p))

    @pytest.mark.parametrize(
        ("score", "dtype", "heads", "channels", "features", "batch", "p"),
        pairs(SCORES, DTYPES, (1, 3, 8, 17), (1, 3, 8, 33, 70), (1, 5, 16, 35), ((), (2,), (2, 3)), (0.0, 0.4)),
    )
    def test_projected_edges(self, score, dtype, heads, channels, features, batch, p):
        options = {"heads": heads, "channels": channels, "dtype": dtype, "batch": batch, "dropout": p}
        edge_index = random_edge_index(9, 7, 60, hub=0.6)
        compare(make_call(score, edge_index, 9, 7, terms=("edge", "bias"), projected=features, **options))

    @pytest.mark.parametrize("score", WIDE)
    def test_projected_edges_that_are_values(self, score):
        call = make_call(score, random_edge_index(9, 7, 200), 9, 7, value_channels=8, terms=("edge",), projected=5)
        compare(changed(call, tensors=call.tensors | {"edge_value": call.tensors["edge"]}))

    @pytest.mark.parametrize("score", ["dot", "leaky_relu"])
    @pytest.mark.parametrize("terms", [("edge_value",), ("edge", "edge_value")])
    def test_vectors_of_edges_that_are_there_keep_their_type(self, score, terms, monkeypatch):
        types, operator = [], cpu.Cpu.operator

        class Recorded:
            def __call__(self, call, *rest):
                types.append(call.value.dtype)
                return operator(call, *rest)

            def run_plain(self, inputs, *rest):
                types.append(inputs.values.dtype)
                return operator.run_plain(inputs, *rest)

        monkeypatch.setattr(cpu.Cpu, "operator", Recorded())
        make_call(score, random_edge_index(6, 8, 40), 6, 8, dtype=torch.bfloat16, terms=terms).results("cpu")
        assert set(types) == {torch.bfloat16}

    def test_gradients_that_cancel_are_rounded_once(self):
        """Of features that all edges of a target share, the softmax knows nothing; the edges' own gradients do not add
        up to zero once they are rounded."""
        edge_index = torch.stack([torch.arange(60), torch.zeros(60, dtype=torch.long)])
        call = make_call("dot", edge_index, 60, 1, dtype=torch.bfloat16, terms=("edge", "edge_value"), projected=2)
        call.tensors["edge"] = call.tensors["edge"][:1].repeat(60, 1)
        compare(call)
        tensors = {**call.tensors, "edge": torch.ones(70, *call.tensors["key"].shape[1:], dtype=torch.bfloat16)}
        del tensors["edge_projection"], tensors["edge_value"]
        leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}  # more types than edges
        out = attend(graph=call.graph, **with_terms(leaves, torch.arange(60) % 2))
        (grad,) = torch.autograd.grad(out.float().square().sum(), leaves["edge"])
        assert grad.sum(0).abs().max() < 1e-4

    @pytest.mark.parametrize("score", SCORES)
    @pytest.mark.parametrize("wanted", ["vector", "edge", "edge_projection"])
    def test_one_gradient_of_projected_edges_alone(self, score, wanted):
        call = make_call(score, random_edge_index(6, 8, 40), 6, 8, projected=5)
        if wanted in call.tensors:
            alone = changed(call, wanted=(wanted,)).results("cpu")[f"grad of {wanted}"]
            torch.testing.assert_close(alone, call.results("cpu")[f"grad of {wanted}"])

    @pytest.mark.parametrize("score", SCORES)
    def test_projected_edges_of_long_rows_on_several_threads(self, score):
        edge_index = random_edge_index(20, 30, 3 * LONG_ROW, hub=0.9)
        call = make_call(score, edge_index, 20, 30, terms=("edge",), projected=5, heads=2)
        compare(changed(call, threads=3))
        with threads(1):
            first = call.results("cpu")
        with threads(2):
            equal(first, call.results("cpu"))

    @pytest.mark.parametrize("score", SCORES)
    @pytest.mark.parametrize("wanted", ["query", "key", "value", "vector", *TERMS])
    def test_one_gradient_alone(self, score, wanted):
        call = make_call(score, random_edge_index(6, 8, 40), 6, 8, wanted=(wanted,))
        compare(call)
        if wanted in call.tensors:
            everything = make_call(score, call.edges, 6, 8).results("cpu")
            torch.testing.assert_close(call.results("cpu")[f"grad of {wanted}"], everything[f"grad of {wanted}"])

    @pytest.mark.parametrize(
        ("score", "dtype", "shared"), pairs(WIDE, DTYPES, [("key", "value"), ("edge", "edge_value")])
    )
    def test_one_tensor_in_two_places(self, score, dtype, shared):
        call = make_call(score, random_edge_index(6, 8, 40), 6, 8, channels=9, value_channels=9, dtype=dtype)
        call.tensors[shared[1]] = call.tensors[shared[0]]
        compare(call)
        compare(changed(call, mask=torch.rand(40) < 0.5, dropout=0.3))

    @pytest.mark.parametrize(("key_heads", "dtype", "batch"), pairs((1, 2, 4), DTYPES, ((), (2,))))
    def test_grouped_queries(self, key_heads, dtype, batch):
        edge_index = random_edge_index(6, 8, 80, hub=0.7)
        call = make_call("dot", edge_index, 6, 8, heads=8, key_heads=key_heads, dtype=dtype, batch=batch, dropout=0.3)
        compare(call)

    @pytest.mark.parametrize(
        ("score", "degree", "end_and_batch", "hub", "heads_and_rise", "weights"),
        pairs(
            SCORES,
            (2 * LONG_ROW + 3, 32, 33, 100),
            [(1, (2,)), (0, (2,)), (1, ()), (0, ())],
            (0, 4),
            [(3, 9), (4, -9), (4, 150), (1, 150), (8, -150), (3, 150)],
            (False, True),
        ),
    )
    def test_long_rows(self, score, degree, end_and_batch, hub, heads_and_rise, weights):
        """Their first exponentials may need no maximum, and later ones need one."""
        (end, batch), (heads, rise) = end_and_batch, heads_and_rise
        edge_index = torch.randint(5, (2, degree + 20))
        edge_index[end, :degree] = hub
        edge_index = edge_index[:, torch.randperm(degree + 20)]
        mask = torch.rand(degree + 20) < 0.9
        terms = TERMS if degree < 40 else ("bias",)
        options = {"channels": 5, "value_channels": 3, "terms": terms, "mask": mask, "dropout": 0.3, "batch": batch}
        call = make_call(score, edge_index, 5, 5, heads=heads, weights=weights, **options)
        # Each part of the row has a maximum of its own.
        call.tensors["bias"] += torch.linspace(0, rise, degree + 20).unsqueeze(1)
        compare(call)

    @pytest.mark.parametrize("hub", [0, 1])
    def test_a_hubs_share_of_the_vectors_gradient(self, hub):
        """Without the tolerance that sums of so many terms of any sign would need, which is more than that share."""
        edge_index = random_edge_index(4, num_edges=3 * LONG_ROW, hub=0.8)
        edge_index = edge_index if hub == 1 else edge_index.flip(0)
        call = make_call("leaky_relu", edge_index, 4, 4, terms=(), wanted=("vector",), weights=False)
        actual, peer, exact = (
            call.results(*how)["grad of vector"] for how in (["cpu"], ["reference"], ["reference", True])
        )
        assert_as_exact_as(actual, peer, exact)

    @pytest.mark.parametrize("heads", [3, 4])
    @pytest.mark.parametrize("score", SCORES)
    def test_logits_far_from_zero(self, score, heads):
        call = make_call(score, random_edge_index(6, 8, 80, hub=0.6), 6, 8, heads=heads, terms=("bias",))
        for shift in (-1e4, 1e4):
            call.tensors["bias"] = call.tensors["bias"] * 32 + shift
            compare(call)

    @pytest.mark.parametrize(("score", "dtype", "batch"), pairs(KERNEL_SCORES, HALF, ((), (5,))))
    def test_half_precision_is_rounded_once(self, score, dtype, batch):
        """Results, and the gradients of terms that a batch shares, too."""
        call = make_call(
            score, random_edge_index(6, 8, 80, hub=0.5), 6, 8, channels=33, value_channels=33, dtype=dtype, batch=batch
        )
        actual, exact = call.results("cpu"), call.results("reference", exact=True)
        for name, result in actual.items():
            error = (result.double() - exact[name]).abs()
            bound = 0.51 * torch.finfo(dtype).eps * exact[name].abs() + 1e-5 * exact[name].abs().max() + 6e-8
            assert (error <= bound).all(), f"{name}: {(error / bound).max():.2f}"


class TestDistributions:
    @pytest.mark.parametrize(
        ("distribution", "score", "dtype", "heads", "terms", "weights", "p"),
        pairs(DISTRIBUTIONS, SCORES, DTYPES, (1, 3, 8, 17), ((), TERMS), (False, True, "dropped"), (0.0, 0.4)),
    )
    def test_all(self, distribution, score, dtype, heads, terms, weights, p):
        options = {"heads": heads, "dtype": dtype, "terms": terms, "weights": weights, "dropout": p}
        edge_index = random_edge_index(9, 7, 60, hub=0.6)
        mask = torch.rand(60, heads) < 0.8
        compare(make_call(score, edge_index, 9, 7, distribution=distribution, mask=mask, **options))

    @pytest.mark.parametrize(
        ("distribution", "score", "dtype", "heads", "weights", "batch"),
        pairs(("softmax", "softcap"), SCORES, DTYPES, (1, 3, 8, 17), (False, True), ((), (2,))),
    )
    def test_sinks(self, distribution, score, dtype, heads, weights, batch):
        options = {"heads": heads, "dtype": dtype, "weights": weights, "batch": batch}
        edge_index = random_edge_index(9, 7, 60, hub=0.6)
        compare(make_call(score, edge_index, 9, 7, distribution=distribution, sink=True, dropout=0.3, **options))

    @pytest.mark.parametrize(
        ("distribution", "score", "dtype", "heads", "value_channels", "degree", "batch"),
        pairs(DISTRIBUTIONS, SCORES, DTYPES, (1, 3, 8), (1, 5, 16), (1, 40, 2 * LONG_ROW), ((), (2,))),
    )
    def test_a_bias_of_the_output(self, distribution, score, dtype, heads, value_channels, degree, batch):
        """Of targets without edges, too, and of rows in several parts."""
        edge_index = torch.randint(4, (2, degree + 9))
        edge_index[1, :degree] = 3
        options = {"heads": heads, "dtype": dtype, "value_channels": value_channels, "batch": batch, "terms": ()}
        compare(make_call(score, edge_index, 4, 5, distribution=distribution, out_bias=True, dropout=0.3, **options))

    @pytest.mark.parametrize("heads", [3, 8])
    @pytest.mark.parametrize("degree", [3, LONG_ROW * 2])
    def test_a_sink_alone_and_none_at_all(self, heads, degree):
        """Of targets whose edges are all masked, a sink that takes nothing, and one that takes nearly everything."""
        edge_index = torch.randint(4, (2, degree + 9))
        edge_index[1, :degree] = 3
        call = make_call("gat", edge_index, 4, 4, heads=heads, channels=2, value_channels=2, terms=(), sink=True)
        call.tensors["sink"][:2] = torch.tensor([-torch.inf, 12.0])
        for mask in (torch.zeros(degree + 9, dtype=torch.bool), None):
            found = [changed(call, mask=mask).results(backend) for backend in ("cpu", "reference")]
            for name in found[0]:
                torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("sink", [0.0, 3.5, -torch.inf, torch.tensor(0.5), torch.tensor([2.0])])
    def test_one_sink_for_all_heads(self, sink):
        x = torch.randn(5, 3, 4)
        found = [
            attend(x, x, x, random_edge_index(5), distribution=gattn.Softmax(sink), backend=backend)
            for backend in ("cpu", "reference")
        ]
        torch.testing.assert_close(*found)

    @pytest.mark.parametrize(
        ("distribution", "degree", "heads", "sink"),
        pairs(DISTRIBUTIONS, (2 * LONG_ROW + 3, 33), (2, 3), (False, True)),
    )
    def test_long_rows(self, distribution, degree, heads, sink):
        """Of several blocks, and of several tasks; the same bits from any number of threads."""
        edge_index = torch.randint(5, (2, degree + 20))
        edge_index[1, :degree] = 4
        options = {"heads": heads, "channels": 3, "value_channels": 2, "terms": ("bias",), "threads": 3}
        options["mask"] = torch.rand(degree + 20, heads) < 0.8
        sink = sink and distribution.startswith("soft")
        call = make_call("gat", edge_index, 5, 5, distribution=distribution, sink=sink, **options)
        compare(call)
        with threads(1):
            first = call.results("cpu")
        with threads(2):
            equal(first, call.results("cpu"))

    @pytest.mark.parametrize(
        ("distribution", "dtype", "heads", "terms", "degree", "batch", "options"),
        pairs(
            DISTRIBUTIONS,
            DTYPES,
            (16, 17, 40),
            ((), ("bias",), ("edge",), ("bias", "edge")),
            (3, 2 * LONG_ROW + 3),
            ((), (2,)),
            (
                {},
                {"wanted": ("key", "value", "bias")},
                {"query": False},
                {"dropout": 0.4},
                {"sink": True},
                {"out_bias": True},
            ),
        ),
    )
    def test_a_head_for_each_channel(self, distribution, dtype, heads, terms, degree, batch, options):
        """Whose passes are of their own, unless something else is asked for."""
        sizes = {"heads": heads, "channels": 1, "value_channels": 1, "batch": batch, "dtype": dtype, "terms": terms}
        edge_index = torch.randint(5, (2, degree + 20))
        edge_index[0, :degree], edge_index[1, : 3 * degree // 4] = 4, 3
        with_query = options.get("query", True)
        options = {name: value for name, value in options.items() if name != "query"}
        options["sink"] = options.get("sink", False) and distribution.startswith("soft")
        if "wanted" in options:
            options["wanted"] = tuple(name for name in options["wanted"] if name in ("key", "value", *terms))
        call = make_call(
            "gat", edge_index, 5, 5, distribution=distribution, weights=False, threads=2, **sizes, **options
        )
        if not with_query:
            del call.tensors["query"]
        compare(call)

    @pytest.mark.parametrize("distribution", [gattn.Tanh(normalize=True), gattn.Identity(normalize=True, eps=0.5)])
    def test_signed_weights_divided_by_their_sum(self, distribution):
        x, key = torch.randn(6, 2, 3), torch.rand(6, 2) + 0.1
        results = []
        for backend in ("cpu", "reference"):
            leaf = key.clone().requires_grad_()
            score, edge_index = gattn.GATScore(), random_edge_index(6, 5, 30)
            graph = SparseGraph(edge_index, num_sources=6, num_targets=5)
            out, weights = attend(
                None,
                leaf,
                x,
                graph,
                score=score,
                distribution=distribution,
                return_weights=True,
                backend=backend,
            )
            (grad,) = torch.autograd.grad((out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum(), leaf)
            results.append((out, weights, grad))
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize("distribution", DISTRIBUTIONS)
    def test_no_edges(self, distribution, poison):
        sink = distribution.startswith("soft")
        edges = torch.empty(2, 0, dtype=torch.long)
        compare(make_call("dot", edges, 3, 4, terms=(), distribution=distribution, sink=sink))

    @pytest.mark.parametrize("distribution", DISTRIBUTIONS)
    @pytest.mark.parametrize("p", [0.0, 0.4])
    def test_derivatives(self, distribution, p):
        sizes = {"heads": 2, "channels": 2, "value_channels": 2, "dtype": torch.double}
        sink = distribution.startswith("soft")
        call = make_call("dot", random_edge_index(4, 3, 9), 4, 3, sink=sink, dropout=p, **sizes)
        call = changed(call, distribution=distribution, mask=torch.rand(9, 2) < 0.8)
        leaves = {name: torch.randn_like(t).requires_grad_() for name, t in call.tensors.items()}

        def function(*tensors):
            return call.attend(dict(zip(leaves, tensors, strict=True)), "cpu")

        assert torch.autograd.gradcheck(function, tuple(leaves.values()))
        assert torch.autograd.gradgradcheck(function, tuple(leaves.values()), fast_mode=True)

    @pytest.mark.parametrize("distribution", DISTRIBUTIONS)
    def test_compiled(self, distribution):
        sink = distribution.startswith("soft")
        call = make_call("gat", random_edge_index(5, 4, 12), 5, 4, sink=sink, distribution=distribution)
        query, key, value, sinks = (call.tensors.get(name) for name in ("query", "key", "value", "sink"))

        def function(query, key, value, sinks):
            made = DISTRIBUTIONS[distribution](sinks)
            return attend(query, key, value, call.graph, score=gattn.GATScore(), distribution=made)

        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        leaves = [None if x is None else x.clone().requires_grad_() for x in (query, key, value, sinks)]
        asked = [x for x in leaves if x is not None]
        found, expected = (f(*leaves) for f in (compiled, function))
        torch.testing.assert_close(found, expected)
        grads = [torch.autograd.grad(out.square().sum(), asked) for out in (found, expected)]
        for one, other in zip(*grads, strict=True):
            torch.testing.assert_close(one, other)

    @pytest.mark.parametrize("distribution", ["softmax", "sigmoid"])
    def test_opcheck(self, distribution):
        sizes = {"heads": 2, "channels": 4, "value_channels": 3}
        call = make_call("dot", random_edge_index(4, 3, 9), 4, 3, sink=distribution == "softmax", **sizes)
        inputs = changed(call, distribution=distribution).operator_inputs(torch.float32, requires_grad=True)
        utils = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(torch.ops.gattn.attention.default, (*inputs.arguments, True, True), test_utils=utils)


class TestGraphs:
    @pytest.mark.parametrize(("score", "sizes", "terms"), pairs(SCORES, [(0, 0), (4, 4), (4, 0), (0, 4)], [(), TERMS]))
    def test_no_edges(self, score, sizes, terms, poison):
        call = make_call(score, torch.empty(2, 0, dtype=torch.long), *sizes, terms=terms)
        compare(call)
        for name, result in call.results("cpu").items():
            assert (result == 0).all(), name

    @pytest.mark.parametrize("score", SCORES)
    @pytest.mark.parametrize("nothing", ["channels", "value_channels"])
    def test_no_channels(self, score, nothing, poison):
        widths = {"channels": 4, "value_channels": 3, nothing: 0}
        generator = {"terms": ("bias",)}
        if SCORES[score].has_vector and nothing == "channels":
            call = make_call(score, random_edge_index(4, 4, 9), 4, 4, channels=1, value_channels=3, **generator)
            call.tensors.update({name: call.tensors[name][..., :0] for name in ("query", "key", "vector")})
        else:
            call = make_call(score, random_edge_index(4, 4, 9), 4, 4, **widths, **generator)
        compare(call)

    def test_no_heads(self):
        """In a process of its own, which a division by zero would end."""
        code = (
            "import torch; from gattn import *; x = torch.zeros(3, 0, 4); edge_index = torch.tensor([[0, 1], [1, 2]])\n"
            "for *inputs, score in ((torch.zeros(3, 0), torch.zeros(3, 0), torch.zeros(3, 0, 2), GATScore()),\n"
            "    (x, x, x, AdditiveScore(torch.zeros(0, 4))), (x, torch.zeros(3, 2, 4), torch.zeros(3, 2, 4), None)):\n"
            "    assert attend(*inputs, edge_index, score=score).shape[:2] == (3, 0)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, f"{done.returncode}: {done.stderr}"

    @pytest.mark.parametrize("score", SCORES)
    def test_an_empty_batch(self, score):
        compare(make_call(score, random_edge_index(4, 4, 9), 4, 4, batch=(0,)))

    @pytest.mark.parametrize("score", SCORES)
    def test_isolated_nodes(self, score):
        call = make_call(score, torch.tensor([[3, 3], [1, 1]]), 6, 8)
        compare(call)
        results = call.results("cpu")
        assert (results["out"][[0, *range(2, 8)]] == 0).all()
        assert (results["grad of value"][[0, 1, 2, 4, 5]] == 0).all()

    @pytest.mark.parametrize(
        ("flow", "self_loops", "sizes", "form", "score"),
        pairs(
            ("source_to_target", "target_to_source"),
            (False, True),
            ((6, 8), (8, 6), (7, 7)),
            ("int64", "int32", "EdgeIndex", "sorted EdgeIndex", "transposed"),
            SCORES,
        ),
    )
    def test_forms_of_a_graph(self, flow, self_loops, sizes, form, score):
        sources, targets = sizes
        edge_index = random_edge_index(sources, targets, 40)
        rows = edge_index if flow == "source_to_target" else edge_index.flip(0)
        if form.endswith("EdgeIndex"):
            sizes = (sources, targets) if flow == "source_to_target" else (targets, sources)
            given = EdgeIndex(rows, sparse_size=sizes)
            if form.startswith("sorted"):
                given = given.sort_by("col").values
                rows = given.as_tensor()
        else:
            given = rows.t().contiguous().t() if form == "transposed" else rows.to(getattr(torch, form))
        edges = rows if flow == "source_to_target" else rows.flip(0)
        if self_loops:
            edges = add_self_loops(remove_self_loops(edges)[0], num_nodes=min(sources, targets))[0]
        graph = SparseGraph(given, num_sources=sources, num_targets=targets, self_loops=self_loops, flow=flow)
        compare(make_call(score, edges, sources, targets, graph=graph, mask=torch.rand(edges.size(1)) < 0.8))

    @pytest.mark.parametrize("self_loops", [False, True])
    def test_sparse_matrices(self, self_loops):
        adjacency = (torch.rand(7, 7) < 0.4).float().to_sparse_csr()
        graph = SparseGraph(adjacency, self_loops=self_loops)
        compare(make_call("leaky_relu", graph.edge_index, 7, 7, graph=graph))

    @pytest.mark.parametrize("score", SCORES)
    def test_duplicates_and_order(self, score):
        edge_index = random_edge_index(4, 4, 60)
        compare(make_call(score, edge_index, 4, 4))
        compare(make_call(score, edge_index[:, edge_index[1].argsort(stable=True)], 4, 4))
        compare(make_call(score, edge_index[:, edge_index[0].argsort()], 4, 4))

    @pytest.mark.parametrize("score", WIDE)
    @pytest.mark.parametrize("batch", [(), (2,)])
    def test_complete_graphs(self, score, batch):
        query, key, value = torch.randn(3, *batch, 9, 3, 4, dtype=torch.double)
        score = make_score(score, torch.randn(3, 4, dtype=torch.double))
        graph, bias = CompleteGraph(9, causal=True, window=(4, 0)), torch.randn(3, 9, 9, dtype=torch.double)
        results = [
            attend(query, key, value, graph, score=score, bias=bias, return_weights=True, backend=backend)
            for backend in ("cpu", "reference")
        ]
        torch.testing.assert_close(*results)

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
    @pytest.mark.parametrize(("row", "index"), [(0, 4), (0, -1), (1, 5), (1, -7)])
    @pytest.mark.parametrize("self_loops", [False, True])
    def test_bad_indices_in_the_same_words(self, dtype, row, index, self_loops):
        edge_index = torch.tensor([[0, 1, 2], [1, 2, 3]], dtype=dtype)
        edge_index[row, 1] = index
        words = []
        for backend in ("cpu", "auto", "reference"):
            call = make_call(
                "dot",
                edge_index,
                4,
                5,
                terms=(),
                graph=SparseGraph(edge_index, num_sources=4, num_targets=5, self_loops=self_loops),
            )
            with pytest.raises(IndexError, match=f"{('source', 'target')[row]} index {index}") as caught:
                call.results(backend)
            words.append(str(caught.value))
        assert len(set(words)) == 1

    def test_an_edit_in_place_is_noticed(self):
        edge_index = random_edge_index(6, 8, 40)
        call = make_call("dot", edge_index, 6, 8)
        before = call.results("cpu")
        edge_index[0] = edge_index[0].flip(0)
        compare(call)
        assert not torch.equal(call.results("cpu")["out"], before["out"])
        edge_index[0, 3] = 6
        with pytest.raises(IndexError, match="source index 6"):
            call.results("cpu")


class TestMemory:
    @pytest.mark.parametrize("score", SCORES)
    def test_non_contiguous_inputs(self, score):
        edge_index = random_edge_index(8, 8, 40)
        call = make_call(score, edge_index, 8, 8, channels=6, value_channels=6)
        changes = {
            "a slice of something wider": lambda t: torch.cat([t, t, t], -1)[..., t.size(-1) : 2 * t.size(-1)],
            "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
            "every other row": lambda t: t.repeat_interleave(2, 0)[::2],
            "not aligned": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
            "expanded": lambda t: t[:1].expand_as(t),
        }
        for change in changes.values():
            compare(changed(call, tensors={name: change(t) for name, t in call.tensors.items()}))

    def test_slices_of_one_projection(self):
        fused = grid((8, 3, 3, 6), torch.Generator().manual_seed(0), torch.float32)
        call = make_call("dot", random_edge_index(8, 8, 40), 8, 8, terms=())
        call.tensors = dict(zip(("query", "key", "value"), fused.unbind(1), strict=True))
        compare(call)

    @pytest.mark.parametrize("score", SCORES)
    def test_mixed_types(self, score):
        call = make_call(score, random_edge_index(6, 8, 40), 6, 8)
        for types in (
            {"query": torch.float32, "value": torch.bfloat16},
            {"key": torch.float16, "value": torch.bfloat16},
            {"bias": torch.float64},
            {"edge": torch.float64, "vector": torch.float16},
        ):
            compare(changed(call, tensors={name: t.to(types.get(name, t.dtype)) for name, t in call.tensors.items()}))

    @pytest.mark.parametrize(("score", "dtype", "terms"), pairs(SCORES, DTYPES, [(), TERMS]))
    def test_nothing_unwritten_is_read(self, score, dtype, terms, poison):
        """The graph is new each time, so that its layout is, too."""
        edge_index = random_edge_index(9, 7, 90, hub=0.6)
        found = []
        for byte in (0xFF, 0x7B, 0x00):
            poison(byte)
            call = make_call(score, edge_index.clone(), 9, 7, dtype=dtype, terms=terms, dropout=0.3, batch=(2,))
            found.append(call.results("cpu"))
        equal(found[0], found[1])
        equal(found[0], found[2])
        assert all(result.isfinite().all() for result in found[0].values())

    def test_split_rows_read_nothing_unwritten(self, poison):
        edge_index = random_edge_index(9, 9, 3 * LONG_ROW, hub=0.9)
        for score, edges in itertools.product(("gat", "leaky_relu", "dot"), (edge_index, edge_index.flip(0))):
            compare(make_call(score, edges.clone(), 9, 9, heads=2, channels=3, value_channels=3, terms=(), batch=(2,)))

    @pytest.mark.parametrize("features", [0, 2])
    @pytest.mark.parametrize(("score", "weights"), in_turn(KERNEL_SCORES, [False, True]))
    def test_no_tensor_of_all_edges_heads_and_channels(self, score, weights, features):
        nodes, edges, heads, channels = 50, 20_000, 4, 64
        call = make_call(
            score,
            random_edge_index(nodes, num_edges=edges),
            nodes,
            nodes,
            heads=heads,
            channels=channels,
            value_channels=channels,
            terms=("edge",) if features else (),
            projected=features,
            weights=weights,
        )
        peaks = {}
        for backend in ("cpu", "reference"):
            with torch.profiler.profile(profile_memory=True) as profile:
                call.results(backend)
            current = peak = 0
            for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
                if event.name() == "[memory]":
                    current += event.nbytes()
                    peak = max(peak, current)
            peaks[backend] = peak
        assert peaks["reference"] >= edges * heads * channels * 4, "the profiler sees it"
        assert peaks["cpu"] < edges * heads * channels, "a quarter of one such tensor"


@pytest.fixture
def poison(monkeypatch):
    """Fills fresh memory with a byte: first such that floats are NaN."""
    state = {"byte": 0xFF}

    def poisoned(function):
        def make(*args, **kwargs):
            tensor = function(*args, **kwargs)
            if tensor.device.type == "cpu" and tensor.layout == torch.strided:
                tensor.untyped_storage().fill_(state["byte"])
            return tensor

        return make

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
    assert layout_module.torch.empty(3).isnan().all()
    assert cpu.torch.empty(3, dtype=torch.int32).tolist() == [-1] * 3
    return functools.partial(state.__setitem__, "byte")


class TestSameBits:
    @pytest.mark.parametrize(
        ("score", "shape", "dtype"),
        pairs(SCORES, ("plain", "target hub", "source hub"), (torch.float32, torch.bfloat16)),
    )
    def test_for_any_number_of_threads(self, score, shape, dtype):
        edge_index = random_edge_index(500, num_edges=30_000, hub=0 if shape == "plain" else 0.5)
        edge_index = edge_index.flip(0) if shape == "source hub" else edge_index
        found = []
        for number in (1, 2, 3, 2, 3):
            call = make_call(
                score,
                edge_index.clone(),
                500,
                500,
                heads=2,
                terms=("bias",),
                dropout=0.2,
                weights="dropped",
                dtype=dtype,
            )
            with threads(number):
                found.append(call.results("cpu"))
        for other in found[1:]:
            equal(found[0], other)

    def test_in_concurrent_calls(self):
        calls = [
            make_call(score, random_edge_index(99, num_edges=9000, seed=i), 99, 99) for i, score in enumerate(SCORES)
        ]
        for call in calls:
            call.dropout = 0.0
        expected = [call.results("cpu") for call in calls]
        failures = []

        def work(offset):
            try:
                for i in range(3 * len(calls)):
                    at = (i + offset) % len(calls)
                    equal(calls[at].results("cpu"), expected[at])
            except BaseException as error:
                failures.append(error)

        workers = [threading.Thread(target=work, args=(offset,)) for offset in (0, 2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not failures

    def test_one_layout_made_by_two_threads(self):
        for _ in range(10):
            edge_index = random_edge_index(99, num_edges=5000)
            call = make_call("dot", edge_index, 99, 99, terms=(), dropout=0.0)
            outs = []
            workers = [
                threading.Thread(target=lambda call=call, outs=outs: outs.append(call.results("cpu"))) for _ in "ab"
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            equal(*outs)


class TestSpecialValues:
    @pytest.mark.parametrize(("score", "dtype", "heads"), pairs(SCORES, DTYPES, (1, 3, 8)))
    def test_a_nan_shows_in_its_rows_and_nowhere_else(self, score, dtype, heads):
        edge_index = random_edge_index(9, 7, 60, hub=0.5)
        for name in ("key", "value"):
            call = make_call(score, edge_index, 9, 7, heads=heads, dtype=dtype, terms=(), weights=False)
            call.tensors[name][2] = math.nan
            out = call.results("cpu")["out"]
            reached = torch.zeros(7, dtype=torch.bool).index_fill(0, edge_index[1][edge_index[0] == 2], True)
            assert reached.any()
            assert not reached.all()
            assert out[reached].isnan().all()
            assert out[~reached].isfinite().all()

    @pytest.mark.parametrize(
        ("score", "dtype", "degree", "how", "heads"),
        pairs(SCORES, DTYPES, (3, 50, LONG_ROW + 1), ("mask", "bias"), (2, 3)),
    )
    def test_a_fully_masked_target(self, score, dtype, degree, how, heads):
        edge_index = torch.randint(4, (2, degree + 9))
        edge_index[1, :degree], edge_index[1, degree:] = 0, 1
        call = make_call(score, edge_index, 4, 4, heads=heads, channels=3, dtype=dtype, terms=("bias",))
        if how == "mask":
            call.mask = edge_index[1] != 0
        else:
            call.tensors["bias"][edge_index[1] == 0] = -math.inf
        results = call.results("cpu")
        assert (results["out"][0] == 0).all()
        assert (results["weights"][edge_index[1] == 0] == 0).all()
        assert (results["out"][1] != 0).any()
        assert all(result.isfinite().all() for result in results.values())
        compare(call)

    def test_minus_infinity_masks(self):
        edge_index = random_edge_index(9, 7, 60)
        mask = torch.rand(60, 3) < 0.5
        call = make_call("dot", edge_index, 9, 7, terms=("bias",))
        masked = changed(call, mask=mask)
        call.tensors = {**call.tensors, "bias": call.tensors["bias"].masked_fill(~mask, -math.inf)}
        equal(call.results("cpu"), masked.results("cpu"))

    def test_subnormal_numbers_are_kept(self):
        x = torch.full((1, 1, 3), 1e-40)
        out = attend(x, x, x, torch.zeros(2, 1, dtype=torch.long), backend="cpu")
        assert torch.equal(out, x)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
    def test_dropout_of_any_tensor(self, dtype, p):
        x = torch.randn(3, 50_001).to(dtype)
        x[:, :9] = torch.tensor([math.inf, -math.inf, math.nan]).unsqueeze(1)
        x.requires_grad_()
        seed = dropout.draw_seed(x.device)
        out, expected = (function(x, p, seed) for function in (dropping.drop, dropout.drop))
        torch.testing.assert_close(out, expected, equal_nan=True)
        exact = dropout.drop(x.double(), p, seed)
        error = torch.where(exact.isfinite(), out - exact, 0.0).abs()
        relative = 0.51 * torch.finfo(dtype).eps + torch.finfo(torch.float32).eps  # the scale is rounded, too
        assert (error <= relative * exact.abs().nan_to_num(0.0) + 6e-8).all()
        assert torch.equal(out == 0, expected == 0)
        for number in (1, 2, 3):
            with threads(number):
                torch.testing.assert_close(dropping.drop(x, p, seed), out, rtol=0, atol=0, equal_nan=True)
        actual, wanted = (torch.autograd.grad(y.sum(), x)[0] for y in (out, expected))
        torch.testing.assert_close(actual, wanted)


class TestDerivatives:
    @pytest.mark.parametrize(
        ("score", "weights", "p", "projected"), pairs(SCORES, (False, True, "dropped"), (0.0, 0.4), (0, 3))
    )
    def test_first_and_second(self, score, p, weights, projected):
        """Inputs off the grid: finite differences must not step across a kink."""
        call = make_call(
            score,
            random_edge_index(4, 3, 9),
            4,
            3,
            heads=2,
            channels=2,
            value_channels=2,
            dtype=torch.double,
            dropout=p,
            weights=weights,
            projected=projected,
            mask=torch.rand(9, 2) < 0.8,
        )
        leaves = {name: torch.randn_like(t).requires_grad_() for name, t in call.tensors.items()}

        def function(*tensors):
            out, alpha = call.attend(dict(zip(leaves, tensors, strict=True)), "cpu")
            return out if alpha is None else (out, alpha)

        assert torch.autograd.gradcheck(function, tuple(leaves.values()))
        assert torch.autograd.gradgradcheck(function, tuple(leaves.values()), fast_mode=True)

    @pytest.mark.parametrize("score", ["leaky_relu", "dot"])
    def test_second_of_shared_tensors_loops_and_flow(self, score):
        edge_index = random_edge_index(4, num_edges=6)
        x, edge = torch.randn(4, 2, 3, dtype=torch.double), torch.randn(10, 2, 3, dtype=torch.double)
        graph = SparseGraph(
            remove_self_loops(edge_index)[0].flip(0),
            num_sources=4,
            num_targets=4,
            self_loops=True,
            flow="target_to_source",
        )
        edge = edge[: graph.edge_index.size(1)]
        vector = torch.randn(2, 3, dtype=torch.double)

        def function(x, edge, vector):
            return (
                attend(x, x, x, graph, score=make_score(score, vector), edge=edge, edge_value=edge, backend="cpu")
                + 0 * vector.sum()
            )

        leaves = [tensor.requires_grad_() for tensor in (x, edge, vector)]
        assert torch.autograd.gradcheck(function, leaves)
        assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)

    @pytest.mark.parametrize("score", SCORES)
    def test_third(self, score):
        call = make_call(score, random_edge_index(4, 3, 9), 4, 3, heads=1, channels=2, terms=(), dtype=torch.double)
        found = []
        for backend in ("cpu", "reference"):
            key = call.tensors["key"].clone().requires_grad_()
            value = call.attend({**call.tensors, "key": key}, backend)[0].square().sum()
            for _ in range(3):
                (grad,) = torch.autograd.grad(value, key, create_graph=True)
                value = (grad * torch.linspace(-1, 2, grad.numel(), dtype=torch.double).view_as(grad)).sum()
            found.append(value.detach())
        torch.testing.assert_close(*found)

    @pytest.mark.parametrize("family", KERNEL_SCORES)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    @pytest.mark.parametrize(("keep", "projected"), [(False, 0), (True, 0), (True, 5)])
    def test_opcheck(self, family, dtype, keep, projected):
        options = {"heads": 2, "channels": 4, "value_channels": 3, "dtype": dtype, "projected": projected}
        call = make_call(family, random_edge_index(4, 3, 9), 4, 3, **options)
        call.tensors = {name: x for name, x in call.tensors.items() if not projected or name != "edge_value"}
        inputs = call.operator_inputs(dtype, requires_grad=keep)
        utils = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(torch.ops.gattn.attention.default, (*inputs.arguments, keep, True), test_utils=utils)
        detached = [value.detach() if isinstance(value, torch.Tensor) else value for value in inputs.arguments]
        out = torch.ops.gattn.attention.default(*detached, True, True)
        grads = torch.randn_like(out[0]), torch.randn_like(out[1])
        wanted = [getattr(inputs, name) is not None for name in DIFFERENTIABLE]
        arguments = (*grads, *out[:2], list(out[2:]), *detached, wanted)
        torch.library.opcheck(torch.ops.gattn.attention_backward.default, arguments, test_utils=utils)
        torch.library.opcheck(torch.ops.gattn.drop.default, (grads[0], 0.3, torch.tensor(7)), test_utils=utils)


class TestChoice:
    x = torch.randn(4, 2, 3)
    edge_index = torch.tensor([[0, 1], [1, 2]])

    def test_auto_and_cpu_use_the_kernel_and_reference_does_not(self, calls):
        for backend, expected in (("auto", 1), ("cpu", 2), ("reference", 2)):
            attend(self.x, self.x, self.x, self.edge_index, backend=backend)
            assert len(calls) == expected
        for name, expected in (("reference", 2), ("cpu", 3), ("auto", 4)):
            with gattn.backend(name):
                attend(self.x, self.x, self.x, self.edge_index)
            assert len(calls) == expected

    @pytest.mark.parametrize("layer", LAYERS)
    def test_layers_use_it(self, layer, calls):
        conv, x = layer(3, 4, heads=2, edge_dim=2), torch.randn(4, 3)
        out = conv(x, self.edge_index, torch.randn(2, 2))
        assert len(calls) == 1
        out.sum().backward()
        with gattn.backend("reference"):
            conv(x, self.edge_index, torch.randn(2, 2))
        assert len(calls) == 1

    def refused(self, function, reason, calls):
        """Explicit requests say why not; automatic ones use the reference."""
        before = len(calls)
        with gattn.backend("cpu"), pytest.raises(ValueError, match=f"cannot serve this call: .*{reason}.*'auto' can"):
            function()
        result = function()
        with gattn.backend("reference"):
            expected = function()
        torch.testing.assert_close(result, expected)
        assert len(calls) == before

    def test_own_scores(self, calls):
        class Mine(DotScore):
            def logits(self, query, key, edge):
                return super().logits(query, key, edge) * 2

        self.served(
            lambda backend: attend(self.x, self.x, self.x, self.edge_index, score=Mine(), backend=backend), calls
        )

    def served(self, function, calls):
        """By the kernels, asked for or not, and as the reference does it."""
        for backend in ("auto", "cpu"):
            before = len(calls)
            torch.testing.assert_close(function(backend), function("reference"))
            assert len(calls) == before + 1

    def test_own_distributions(self, calls):
        class Mine(gattn.Distribution):
            def weights(self, logits, index, num_targets, dim):
                return logits.sigmoid()

        attend(self.x, self.x, self.x, self.edge_index, distribution=Mine())
        assert len(calls) == 2  # one for the logits, and one for the sum

    def test_other_aggregations(self, calls):
        self.refused(lambda: Attention("max")(self.x, self.x, self.x, self.edge_index), "not summed", calls)
        conv = GATConv(3, 4, aggr="mean")
        self.refused(lambda: conv(torch.ones(4, 3), self.edge_index), "not summed", calls)

    @pytest.mark.parametrize("hook", ["message", "edge_update", "aggregate", "update"])
    def test_overridden_hooks(self, hook, calls):
        def message(self, x_j, alpha, edge_value):
            return 2 * Attention.message(self, x_j, alpha, edge_value)

        def edge_update(self, query_i, key_j, edge, bias, mask, score, distribution, index, num_targets):
            return key_j.sum(-1)

        def aggregate(self, inputs, index, ptr=None, dim_size=None):
            return 3 * Attention.aggregate(self, inputs, index, ptr, dim_size)

        def update(self, inputs):
            return inputs + 1

        core = type("Mine", (Attention,), {hook: locals()[hook]})()
        self.refused(lambda: core(self.x, self.x, self.x, self.edge_index), rf"overrides {hook}\(\)", calls)

    @pytest.mark.parametrize(
        "hook",
        [
            "register_message_forward_hook",
            "register_message_forward_pre_hook",
            "register_propagate_forward_hook",
            "register_aggregate_forward_hook",
            "register_edge_update_forward_hook",
        ],
    )
    def test_registered_hooks(self, hook, calls):
        core = Attention()
        handle = getattr(core, hook)(lambda *args: None)
        self.refused(lambda: core(self.x, self.x, self.x, self.edge_index), "a hook is registered", calls)
        handle.remove()
        core(self.x, self.x, self.x, self.edge_index, backend="cpu")
        assert len(calls) == 1

    def test_explainers(self):
        class Model(torch.nn.Module):
            def __init__(self, backend):
                super().__init__()
                self.conv, self.backend = GATConv(3, 4), backend

            def forward(self, x, edge_index):
                with gattn.backend(self.backend):
                    return self.conv(x, edge_index)

        for backend in ("auto", "cpu"):
            explainer = Explainer(
                Model(backend),
                AttentionExplainer(),
                explanation_type="model",
                edge_mask_type="object",
                model_config={"mode": "regression", "task_level": "node", "return_type": "raw"},
            )
            if backend == "auto":
                assert explainer(torch.randn(4, 3), self.edge_index).edge_mask.shape == (2,)
            else:
                with pytest.raises(ValueError, match="(hook is registered|explainer)"):
                    explainer(torch.randn(4, 3), self.edge_index)

    def test_meta_tensors(self):
        x = self.x.to("meta")
        assert attend(x, x, x, self.edge_index.to("meta")).shape == (4, 2, 3)
        with pytest.raises(ValueError, match="the tensors are on meta"):
            attend(x, x, x, self.edge_index.to("meta"), backend="cpu")

    @pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "forward mode", "jacrev", "hessian"])
    def test_transforms(self, transform, calls):
        def function(x):
            return attend(x, x, x, self.edge_index).square().sum((-1, -2, -3))

        def dual(x):
            with torch.autograd.forward_ad.dual_level():
                out = function(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
                return torch.autograd.forward_ad.unpack_dual(out).tangent

        transformed = {
            "vmap": lambda x: torch.func.vmap(function)(torch.stack([x, 2 * x])),
            "grad": torch.func.grad(function),
            "jvp": lambda x: torch.func.jvp(function, (x,), (torch.ones_like(x),)),
            "forward mode": dual,
            "jacrev": torch.func.jacrev(function),
            "hessian": torch.func.hessian(function),
        }[transform]
        self.refused(lambda: transformed(self.x), "needs? plain PyTorch", calls)

    @pytest.mark.parametrize("layer", LAYERS)
    def test_export(self, layer, calls):
        conv, x = layer(3, 4).eval(), torch.randn(4, 3)
        exported = torch.export.export(conv, (x, self.edge_index), strict=False)
        assert not any("gattn" in str(node.target) for node in exported.graph.nodes)
        assert not calls
        torch.testing.assert_close(exported.module()(x, self.edge_index), conv(x, self.edge_index))
        with gattn.backend("cpu"):
            exported = torch.export.export(conv, (x, self.edge_index), strict=False)
        assert "gattn.attention.default" in {str(node.target) for node in exported.graph.nodes}


class TestCompiled:
    @pytest.fixture(autouse=True)
    def reset(self):
        torch._dynamo.reset()

    @pytest.mark.parametrize(("score", "dtype"), in_turn(SCORES, [torch.float32, torch.bfloat16]))
    def test_attend(self, score, dtype):
        """Traced and differentiated ahead of time, by the operators' shape-only versions."""
        call = make_call(score, random_edge_index(6, 8, 40), 6, 8, dtype=dtype, mask=torch.rand(40) < 0.8)
        kind = functools.partial(call.make_score)
        graph = call.edges

        @torch.compile(fullgraph=True, backend="aot_eager")
        def function(tensors):
            terms = {name: tensor for name, tensor in tensors.items() if name != "vector"}
            terms.setdefault("query", None)
            sized = SparseGraph(graph, num_targets=8)
            score = kind(tensors.get("vector"))
            return attend(graph=sized, score=score, mask=call.mask, return_weights=True, backend="cpu", **terms)

        leaves = {name: tensor.requires_grad_() for name, tensor in call.tensors.items()}
        expected = call.results("cpu")
        out, weights = function(leaves)
        grads = torch.autograd.grad([out, weights], list(leaves.values()), [call.grad(out, 1), call.grad(weights, 2)])
        equal(
            {"out": out, "weights": weights, **{f"grad of {n}": g for n, g in zip(leaves, grads, strict=True)}},
            {name: expected[name] for name in ("out", "weights", *(f"grad of {n}" for n in leaves))},
        )

    @pytest.mark.parametrize("layer", mostly_slow(LAYERS))
    def test_layers_with_dynamic_sizes(self, layer):
        conv = layer(5, 4, heads=2, edge_dim=3)
        compiled = torch.compile(conv, fullgraph=True, dynamic=True, backend="aot_eager")
        self.check(conv, compiled, ((10, 30), (13, 41), (4, 9)), 3)

    @pytest.mark.slow
    @pytest.mark.parametrize("layer", LAYERS)
    @pytest.mark.parametrize("edge_dim", [None, 3])
    def test_layers_by_inductor(self, layer, edge_dim):
        conv = layer(5, 4, heads=2, edge_dim=edge_dim)
        self.check(conv, torch.compile(conv, fullgraph=True), ((10, 30), (13, 41)), edge_dim)

    def check(self, conv, compiled, sizes, edge_dim):
        for nodes, edges in sizes:
            x, edge_index = torch.randn(nodes, 5), random_edge_index(nodes, num_edges=edges)
            inputs = (x, edge_index) if edge_dim is None else (x, edge_index, torch.randn(edges, edge_dim))
            found = []
            for function in (compiled, conv):
                conv.zero_grad()
                out = function(*inputs)
                out.square().sum().backward()
                found.append((out.detach(), [parameter.grad for parameter in conv.parameters()]))
            torch.testing.assert_close(*found)

    def test_the_same_edges_in_another_order(self):
        """A program sees no tensor's version: it tells edges by their hash, and bias follows their order."""
        edge_index, x, bias = random_edge_index(6, num_edges=20), torch.randn(6, 2, 4), torch.randn(20, 2)
        function = torch.compile(
            lambda: attend(x, x, x, edge_index, bias=bias, backend="cpu"), fullgraph=True, backend="aot_eager"
        )
        for order in (torch.arange(20), torch.randperm(20)):
            edge_index.copy_(edge_index[:, order])
            torch.testing.assert_close(function(), attend(x, x, x, edge_index, bias=bias, backend="reference"))

    def test_dropout(self):
        call = make_call("dot", random_edge_index(6, 8, 40), 6, 8, terms=(), dropout=0.5, weights="dropped")
        function = torch.compile(
            lambda q, k, v: attend(
                q, k, v, call.edges, dropout=0.5, training=True, return_weights="dropped", backend="cpu"
            ),
            fullgraph=True,
            backend="aot_eager",
        )
        for _ in range(3):
            out, weights = function(*(call.tensors[name] for name in ("query", "key", "value")))
            messages = weights.unsqueeze(-1) * call.tensors["value"][call.edges[0]]
            torch.testing.assert_close(out, torch.zeros_like(out).index_add(0, call.edges[1], messages))
