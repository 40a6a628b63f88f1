"""The GPU kernels against the reference in float64: in Triton's interpreter, or on a GPU with `--device cuda`."""

import contextlib
import itertools
import math
from pathlib import Path

import pytest
import torch
from torch_geometric.utils import add_self_loops, remove_self_loops

import gattn
from gattn import AdditiveScore, CompleteGraph, DotScore, SparseGraph, attend
from gattn.graphs import FLOWS, edge_lists
from gattn.nn import GATConv, GATv2Conv, TransformerConv
from gattn.ops import dropout, plans
from gattn.ops.backends import triton
from gattn.ops.backends.cpu import native
from gattn.ops.backends.triton import forms as kernels
from gattn.ops.backends.triton import layout as layout_module
from gattn.ops.backends.triton import passes
from gattn.ops.backends.triton.layout import Layout, layout_of
from tests import cases
from tests.cases import (
    DIFFERENTIABLE,
    DISTRIBUTIONS,
    DTYPES,
    KERNEL_SCORES,
    SCORES,
    SPARSE,
    TERMS,
    changed,
    compare,
    equal,
    make_score,
    off_the_grid,
    on_device,
    pairs,
)
from tests.ops import fuzz
from tests.ops.bounds import check_bounds
from tests.ops.laws_shared import LAWS, check_a_nan, check_missing_and_infinite_logits, check_ties

pytest.importorskip("triton", cases.OLDEST_INTERPRETER if torch.get_default_device().type == "cpu" else None)

LAYERS = [GATConv, GATv2Conv, TransformerConv]

random_edge_index, make_call = on_device(gattn.testing.random_edge_index), on_device(cases.make_call)

pytestmark = [
    pytest.mark.skipif(
        not triton.Triton().serves(torch.get_default_device()),
        reason="kernels run on the CPU with TRITON_INTERPRET=1 only",
    ),
    # NumPy, of which the interpreter is made, warns where a GPU's arithmetic goes on.
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


def slow(cases, first):
    """Marks the cases from number `first` on."""
    marked = (case if isinstance(case, tuple) else (case,) for case in cases[first:])
    return [*cases[:first], *(pytest.param(*case, marks=pytest.mark.slow) for case in marked)]


@pytest.fixture(autouse=True)
def long_row(monkeypatch):
    """Rows are split from a few edges on: tiny graphs take every path, and the interpreter few steps."""
    monkeypatch.setattr(layout_module, "LONG_ROW", 4)


@pytest.fixture(autouse=True)
def bounds(monkeypatch):
    """Every kernel of every test stays inside its tensors."""
    if kernels.INTERPRETED:
        check_bounds(monkeypatch)


@pytest.fixture
def fresh_forms(monkeypatch):
    """Nothing that was prepared for calls before or after this test is used in it, and the other way round."""
    plans.forget()
    monkeypatch.setattr(kernels, "_forms", {})
    yield
    plans.forget()


@pytest.mark.skipif(not kernels.INTERPRETED, reason="a GPU has compute-sanitizer for this")
@pytest.mark.parametrize("name", ["split", "partial", "out"])
def test_an_access_outside_a_tensor_is_noticed(name):
    arguments = {
        "split": torch.tensor([[0], [0], [2]]).int(),
        "partial": torch.ones(1, 2, 3),
        "out": torch.ones(1, 1, 3),
    }
    sizes = {"num_split": 1, "num_slots": 2, "num_rows": 1, "WIDTH": 3, "BLOCK_P": 16, "BLOCK_C": 4}
    compute = kernels._triton_type(torch.float32)

    def launch():
        kernels.run(kernels.jitted().add_partial, (1, 1), 4, {**arguments, **sizes, "COMPUTE": compute})

    launch()
    assert arguments["out"].tolist() == [[[2, 2, 2]]]
    arguments[name] = arguments[name].flatten()[:-1]
    with pytest.raises(Exception, match="outside its tensors"):
        launch()


class TestFamilies:
    @pytest.mark.parametrize("score", KERNEL_SCORES)
    def test_every_one_has_the_constants_of_the_cpu_kernels(self, score):
        """Without its family, the kernels would take logits as a bias, and be right."""
        family = make_score(score, torch.zeros(1, 1)).family(1)
        names = kernels.jitted().FAMILIES[family.name][1]
        assert len(names) == len(family.constants)
        if native.load_error() is None:
            assert names == native.family(family.name)[1]


class TestAgainstTheReference:
    @pytest.mark.parametrize("score", SCORES)
    def test_every_score(self, score):
        options = {"heads": 2, "channels": 3, "value_channels": 2, "dropout": 0.4, "weights": "dropped"}
        compare(make_call(score, random_edge_index(9, 7, 30, hub=0.6), 9, 7, **options), "triton")

    @pytest.mark.parametrize("terms", [(), ("edge",)])
    def test_gats_score_without_a_bias(self, terms):
        """The query's gradient is a sum of what the pass by source has stored."""
        options = {"heads": 2, "channels": 3, "value_channels": 2, "terms": terms, "batch": (2,)}
        compare(make_call("gat", random_edge_index(9, 7, 30, hub=0.6), 9, 7, **options), "triton")

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("score", "dtype", "heads", "channels", "value_channels", "terms", "p"),
        pairs(
            SCORES,
            DTYPES,
            (1, 3, 4),
            (1, 3, 8, 17),
            (1, 3, 8, 17),
            ((), TERMS, ("edge",), ("bias",), ("edge_value",)),
            (0.0, 0.4),
        ),
    )
    def test_widths_types_and_terms(self, score, dtype, heads, channels, value_channels, terms, p):
        edge_index = random_edge_index(9, 7, 30, hub=0.6)
        sizes = {"heads": heads, "channels": channels, "value_channels": value_channels}
        weights = "dropped" if p else False
        call = make_call(score, edge_index, 9, 7, dtype=dtype, terms=terms, dropout=p, weights=weights, **sizes)
        compare(call, "triton")

    @pytest.mark.parametrize(
        ("score", "batch", "batched", "mask", "weights", "p"),
        slow(
            pairs(
                SCORES,
                ((2,), (2, 1)),
                (False, True),
                ("EH", "BE", "BEH", "E", None),
                (True, False, "dropped"),
                (0.4, 0.0),
            ),
            2,
        ),
    )
    def test_batches_and_masks(self, score, batch, batched, mask, weights, p):
        edge_index = random_edge_index(6, 8, 20)
        shapes = {"E": (20,), "EH": (20, 3), "BE": (*batch, 20), "BEH": (*batch, 20, 3)}
        mask = None if mask is None else torch.rand(shapes[mask]) < 0.7
        options = {"batched": batched, "mask": mask, "weights": weights, "dropout": p}
        compare(make_call(score, edge_index, 6, 8, batch=batch, channels=3, value_channels=2, **options), "triton")

    @pytest.mark.parametrize(
        ("distribution", "score", "dtype", "sink", "weights", "p"),
        slow(
            pairs(
                DISTRIBUTIONS,
                ("gat", "dot"),
                (torch.float32, torch.bfloat16, torch.float64),
                (True, False),
                (True, False, "dropped"),
                (0.0, 0.4),
            ),
            6,
        ),
    )
    def test_distributions(self, distribution, score, dtype, sink, weights, p):
        """Rows of more than four edges are split."""
        edge_index = random_edge_index(6, 8, 30, hub=0.4)
        options = {"dtype": dtype, "weights": weights, "dropout": p, "mask": torch.rand(30) < 0.8, "heads": 2}
        sink = sink and distribution.startswith("soft")
        call = make_call(score, edge_index, 6, 8, channels=3, value_channels=2, terms=("bias",), sink=sink, **options)
        compare(changed(call, distribution=distribution), "triton")

    def test_gates_of_tiny_and_huge_logits(self):
        """A small tanh keeps its digits, and a sum that overflows does not matter where nothing is divided by it."""
        edge_index = torch.tensor([[0, 1], [0, 0]])
        graph = SparseGraph(edge_index, num_sources=2, num_targets=1)
        for distribution, size in ((gattn.Tanh(normalize=True), 1e-9), (gattn.Identity(), 3e38)):
            key, value = torch.full((2, 1), size), torch.tensor([[[0.0]], [[1.0]]])
            score = gattn.GATScore(1.0)
            options = {"score": score, "distribution": distribution, "return_weights": True, "backend": "triton"}
            found = attend(None, key, value, graph, **options)
            torch.testing.assert_close(found, attend(None, key, value, graph, **(options | {"backend": "reference"})))

    @pytest.mark.parametrize("wanted", slow(["query", "vector", "edge_value", "key", "value", "edge", "bias"], 3))
    def test_one_gradient_alone(self, wanted):
        options = {"channels": 3, "value_channels": 2, "heads": 2}
        score = "leaky_relu" if wanted == "vector" else "dot"
        compare(
            make_call(score, random_edge_index(6, 8, 20), 6, 8, wanted=(wanted,), weights=False, **options), "triton"
        )

    @pytest.mark.parametrize(("score", "dtype"), slow([("dot", torch.float16), ("tanh", torch.float32)], 1))
    @pytest.mark.parametrize("shared", [("key", "value"), ("edge", "edge_value")])
    def test_one_tensor_in_two_places(self, score, dtype, shared):
        call = make_call(score, random_edge_index(6, 8, 30), 6, 8, channels=5, value_channels=5, dtype=dtype)
        call.tensors[shared[1]] = call.tensors[shared[0]]
        compare(changed(call, mask=torch.rand(30) < 0.5, dropout=0.3), "triton")

    @pytest.mark.parametrize(
        ("key_heads", "dtype"), slow([(2, torch.float16), (1, torch.float32), (2, torch.bfloat16)], 1)
    )
    def test_grouped_queries(self, key_heads, dtype):
        edge_index = random_edge_index(6, 8, 30, hub=0.5)
        options = {"channels": 3, "value_channels": 5, "dropout": 0.3}
        compare(make_call("dot", edge_index, 6, 8, heads=4, key_heads=key_heads, dtype=dtype, **options), "triton")
        call = make_call("dot", edge_index, 6, 8, heads=4, key_heads=key_heads, channels=5, terms=(), dtype=dtype)
        call.tensors["value"] = call.tensors["key"]
        compare(call, "triton")

    @pytest.mark.parametrize(
        ("score", "end", "degree", "length"),
        slow([("gat", 1, 8, 8), ("tanh", 0, 9, 8), ("dot", 1, 9, 8), ("leaky_relu", 1, 40, 1), ("dot", 0, 40, 128)], 2),
    )
    def test_long_rows(self, score, end, degree, length, monkeypatch):
        monkeypatch.setattr(layout_module, "LONG_ROW", length)
        edge_index = torch.randint(5, (2, degree + 5))
        edge_index[end, :degree] = 4
        edge_index[end, degree:] = torch.randint(4, (5,))
        edge_index = edge_index[:, torch.randperm(degree + 5)]
        options = {"heads": 2, "channels": 3, "value_channels": 2, "terms": ("bias",), "dropout": 0.3}
        compare(make_call(score, edge_index, 5, 5, mask=torch.rand(degree + 5) < 0.9, **options), "triton")

    def test_wide_rows(self):
        """More heads × channels than one program takes."""
        options = {"heads": 9, "channels": 40, "value_channels": 70, "terms": ()}
        compare(make_call("leaky_relu", random_edge_index(4, 4, 12), 4, 4, **options), "triton")

    @pytest.mark.parametrize("score", slow(["leaky_relu", "dot"], 1))
    def test_logits_far_from_zero(self, score):
        call = make_call(score, random_edge_index(6, 8, 30, hub=0.6), 6, 8, terms=("bias",), heads=2)
        for shift in (-1e4, 1e4):
            call.tensors["bias"] = call.tensors["bias"] * 32 + shift
            compare(call, "triton")

    @pytest.mark.parametrize(
        ("score", "dtype"), [("gat", torch.float16), ("dot", torch.float16), ("tanh", torch.bfloat16)]
    )
    def test_half_precision_is_rounded_once(self, score, dtype):
        sizes = {"heads": 2, "channels": 17, "value_channels": 17, "dtype": dtype}
        call = make_call(score, random_edge_index(6, 8, 30, hub=0.5), 6, 8, **sizes)
        actual, exact = call.results("triton"), call.results("reference", exact=True)
        for name, result in actual.items():
            error = (result.double() - exact[name]).abs()
            bound = 0.51 * torch.finfo(dtype).eps * exact[name].abs() + 1e-5 * exact[name].abs().max() + 6e-8
            assert (error <= bound).all(), f"{name}: {(error / bound).max():.2f}"

    @pytest.mark.slow
    @pytest.mark.parametrize("first", range(0, 200, 20))
    def test_random_calls(self, first):
        for seed in range(first, first + 20):
            fuzz.case(seed, "triton")


class TestSparseDistributions:
    @pytest.mark.parametrize("distribution", SPARSE)
    def test_the_kernels_know_it(self, distribution):
        """Otherwise PyTorch would compute the weights, and be right."""
        assert triton.Triton().knows_law(SPARSE[distribution](None).law())

    @pytest.mark.parametrize(
        ("distribution", "score", "dtype", "terms", "batch", "weights", "p"),
        slow(
            pairs(
                SPARSE,
                SCORES,
                DTYPES,
                (TERMS, ("bias",), ("edge", "bias"), ("bias", "edge_value")),
                ((), (2,)),
                ("dropped", True, False),
                (0.4, 0.0),
            ),
            6,
        ),
    )
    def test_against_the_reference(self, distribution, score, dtype, terms, batch, weights, p):
        """Rows of more than four edges are split, but rewritten as a whole."""
        options = {"dtype": dtype, "terms": terms, "batch": batch, "weights": weights, "dropout": p}
        call = make_call(
            score, random_edge_index(6, 8, 30, hub=0.4), 6, 8, heads=2, channels=3, value_channels=2, **options
        )
        compare(off_the_grid(changed(call, distribution=distribution, mask=torch.rand(30, 2) < 0.8)), "triton")

    @pytest.mark.parametrize("distribution", slow(["entmax15", "sparsemax", "top_k"], 1))
    def test_one_tensor_in_two_places_and_grouped_heads(self, distribution):
        options = {"heads": 4, "key_heads": 2, "channels": 3, "value_channels": 3, "dropout": 0.3}
        call = make_call("dot", random_edge_index(6, 8, 30, hub=0.4), 6, 8, **options)
        call = off_the_grid(changed(call, distribution=distribution))
        call.tensors["value"], call.tensors["edge_value"] = call.tensors["key"], call.tensors["edge"]
        compare(call, "triton")

    @pytest.mark.parametrize("distribution", slow(["sparsemax", "entmax15", "top_k"], 1))
    def test_added_loops_in_the_other_flow(self, distribution):
        edges = random_edge_index(5, 6, 20)
        graph = SparseGraph(edges.flip(0), num_sources=5, num_targets=6, self_loops=True, flow="target_to_source")
        edges = add_self_loops(remove_self_loops(edges)[0], num_nodes=5)[0]
        options = {"heads": 2, "channels": 2, "value_channels": 2, "dropout": 0.3, "batch": (2,)}
        call = make_call("gat", edges, 5, 6, graph=graph, distribution=distribution, **options)
        compare(off_the_grid(call), "triton")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("distribution", LAWS, ids=repr)
    def test_ties_in_rows_of_several_blocks(self, distribution, dtype):
        """A block has sixteen edges here."""
        check_ties("triton", distribution, dtype, heads=16)

    @pytest.mark.parametrize("distribution", SPARSE)
    def test_missing_and_infinite_logits(self, distribution):
        check_missing_and_infinite_logits("triton", distribution)

    @pytest.mark.parametrize("distribution", SPARSE)
    def test_a_nan_shows_in_its_row_and_head(self, distribution):
        check_a_nan("triton", distribution, 6)


class TestBlocks:
    """How many tasks a program takes: a rule, so that no graph is tried out and none decides for others."""

    @pytest.fixture
    def real(self, fresh_forms, monkeypatch):
        """The interpreter computes what a GPU would, with a GPU's blocks."""
        monkeypatch.setattr(kernels, "INTERPRETED", False)
        monkeypatch.setattr(triton.Triton, "serves", lambda self, device: True)

    @pytest.mark.parametrize(
        ("heads", "channels", "dtype", "tasks", "warps"),
        [
            (8, 8, torch.float32, 2, 1),
            (8, 8, torch.bfloat16, 4, 1),
            (8, 8, torch.float64, 1, 1),
            (4, 64, torch.float32, 1, 1),
            (1, 8, torch.float32, 16, 1),
            (1, 7, torch.float32, 4, 1),  # rows of 28 bytes
            (1, 40, torch.bfloat16, 2, 1),  # 24 of 64 channels are padding
            (1, 512, torch.float32, 1, 1),
            (1, 1024, torch.float32, 1, 2),
            (1, 0, torch.float32, 32, 1),
        ],
    )
    def test_the_rule(self, real, heads, channels, dtype, tasks, warps):
        found = kernels._blocks(heads, channels, channels, dtype)
        assert (found["BLOCK_R"], found["num_warps"]) == (tasks, warps)

    @pytest.mark.parametrize(
        ("score", "heads", "channels"),
        slow([("leaky_relu", 8, 8), ("gat", 1, 7), ("dot", 3, 40), ("leaky_relu", 9, 70)], 2),
    )
    def test_with_a_gpus_blocks(self, real, score, heads, channels):
        sizes = {"heads": heads, "channels": channels, "value_channels": channels}
        compare(make_call(score, random_edge_index(9, 7, 30, hub=0.5), 9, 7, **sizes), "triton")

    def test_fewer_programs_than_blocks(self, real, monkeypatch):
        """The vector's gradient is made of parts that each go through several blocks."""
        monkeypatch.setattr(passes, "_MOST_PROGRAMS", 3)
        options = {"heads": 2, "channels": 16, "value_channels": 16, "batch": (2,)}
        compare(make_call("leaky_relu", random_edge_index(9, 7, 30, hub=0.5), 9, 7, **options), "triton")


class _Code:
    """Stands for what Triton compiles: takes all arguments in order, and runs the interpreter."""

    function = packed_metadata = None

    def __init__(self, kernel, warps, run):
        self.kernel, self.warps, self.interpret, self.runs = kernel, warps, run, 0

    def run(self, x, y, z, stream, function, metadata, of_launch, before, after, *values):
        self.runs += 1
        self.interpret(self.kernel, (x, y), self.warps, dict(zip(self.kernel.arg_names, values, strict=True)))


@pytest.mark.skipif(not kernels.INTERPRETED, reason="looks at launches, which are as they are on a GPU")
class TestLaunches:
    """A launch like an earlier one does not go through Triton's search for its code."""

    @pytest.fixture
    def codes(self, fresh_forms, monkeypatch):
        """The codes that were "compiled", by kernel."""
        found, run = [], kernels.run

        def compiled(kernel, grid, warps, arguments):
            run(kernel, grid, warps, arguments)
            found.append(_Code(kernel, warps, run))
            return found[-1]

        monkeypatch.setattr(kernels, "run", compiled)
        monkeypatch.setattr(kernels, "stream_address", lambda device: 0)
        return found

    def call(self, nodes=9, edges=30, dtype=torch.float32, score="leaky_relu", start=0):
        torch.manual_seed(nodes)
        query, key, grad = (torch.randn(nodes * 6 + 1)[start:][: nodes * 6].view(nodes, 2, 3) for _ in range(3))
        query, key, grad = (x.to(dtype).requires_grad_(x is not grad) for x in (query, key, grad))
        graph, score = (
            random_edge_index(nodes, num_edges=edges, hub=0.5),
            make_score(score, torch.randn(2, 3, dtype=dtype)),
        )
        results = []
        for backend in ("triton", "reference"):
            out = attend(query, key, key, graph, score=score, backend=backend)
            results.append([out, *torch.autograd.grad(out, [query, key], grad)])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)

    def test_other_numbers_nodes_and_edges(self, codes):
        self.call()
        first = len(codes)
        assert first >= 4
        for nodes, edges in ((9, 30), (5, 12), (40, 90)):
            self.call(nodes, edges)
        assert len(codes) == first
        runs = {code.kernel.__name__: code.runs for code in codes}
        assert [runs[name] for name in ("forward", "dot_rows", "backward_by_source", "backward_by_target")] == [3] * 4

    @pytest.mark.parametrize("change", [{"dtype": torch.float64}, {"score": "dot"}, {"start": 1}])
    def test_what_needs_other_code(self, codes, change):
        self.call()
        first = {id(code) for code in codes}
        self.call(**change)
        kinds = [code.kernel.__name__ for code in codes if id(code) not in first]
        assert {"forward", "backward_by_source", "backward_by_target"} <= set(kinds)
        self.call()
        assert len(codes) == len(first) + len(kinds)


def waits(monkeypatch, call):
    """What `call` does that would wait for a GPU: operators whose results or sizes depend on numbers, and copies.

    Kernels do not run, as the interpreter reads numbers; what a call does must not depend on theirs.
    """
    found = []

    def watched(name, original):
        return lambda tensor, *arguments, **options: found.append(name) or original(tensor, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "run", lambda *arguments: None)
        for name in ("tolist", "cpu", "numpy"):
            patch.setattr(torch.Tensor, name, watched(name, getattr(torch.Tensor, name)))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            call()
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    for name in {event.name.removeprefix("aten::") for event in profiler.events()} - {"index"}:  # which calls nonzero
        operator = getattr(torch.ops.aten, name, None)
        if operator is not None and any(tags & {*getattr(operator, kind).tags} for kind in operator.overloads()):
            found.append(name)
    return found


@pytest.mark.skipif(not kernels.INTERPRETED, reason="records what the CPU does")
class TestWaiting:
    """Once a graph's layout is made, a call waits for nothing."""

    @pytest.mark.parametrize(
        "waiting",
        [
            lambda x: x.sum().item(),
            lambda x: bool(x.sum() > 0),
            lambda x: int(x.sum()),
            lambda x: x.tolist(),
            lambda x: x.cpu(),
            lambda x: x[x > 0],
            lambda x: x.nonzero(),
            lambda x: x.unique(),
        ],
    )
    def test_what_waits_is_found(self, waiting, monkeypatch):
        assert waits(monkeypatch, lambda: waiting(torch.ones(3)))
        assert not waits(monkeypatch, lambda: torch.ones(3)[torch.tensor([0])].add(1).sum())

    @pytest.mark.parametrize(("weights", "p"), [(False, 0.0), (True, 0.4)])
    @pytest.mark.parametrize("layer", LAYERS)
    def test_layers(self, layer, weights, p, monkeypatch):
        """With self-loops, edge features, and rows that are split."""
        edge_index, edge_attr = random_edge_index(9, num_edges=30, hub=0.6), torch.randn(30, 3)
        conv = layer(4, 2, heads=2, edge_dim=3, dropout=p)

        def call():
            x = torch.randn(9, 4, requires_grad=True)
            with gattn.backend("triton"):
                out = conv(x, edge_index, edge_attr, return_attention_weights=True if weights else None)
            (out[0] if weights else out).sum().backward()

        call()
        assert not waits(monkeypatch, call)

    @pytest.mark.parametrize(
        ("score", "terms", "options"),
        [
            *itertools.product(("gat", "leaky_relu", "dot"), ((), TERMS), ({}, {"sink": True, "dropout": 0.4})),
            ("dot", ("edge",), {"weights": "dropped", "dropout": 0.4, "batch": (2,), "dtype": torch.bfloat16}),
            ("leaky_relu", (), {"distribution": "sparsemax", "dtype": torch.bfloat16}),
        ],
    )
    def test_calls(self, score, terms, options, monkeypatch):
        edge_index = random_edge_index(9, 7, 30, hub=0.6)
        call = make_call(score, edge_index, 9, 7, heads=2, channels=3, terms=terms, **options)
        call.results("triton")
        assert not waits(monkeypatch, lambda: call.results("triton"))


class TestGraphs:
    @pytest.mark.parametrize(
        ("score", "sources", "targets"), [("gat", 0, 0), ("gat", 3, 3), ("leaky_relu", 3, 0), ("dot", 0, 3)]
    )
    def test_no_edges(self, score, sources, targets):
        call = make_call(score, torch.empty(2, 0, dtype=torch.long), sources, targets, channels=2)
        compare(call, "triton")
        assert all((result == 0).all() for result in call.results("triton").values())

    @pytest.mark.parametrize("nothing", ["channels", "value_channels", "batch"])
    def test_nothing_of_something(self, nothing):
        sizes = {"channels": 2, "value_channels": 3, nothing: (0,) if nothing == "batch" else 0}
        compare(make_call("dot", random_edge_index(4, 4, 9), 4, 4, terms=("bias",), **sizes), "triton")

    def test_no_heads(self):
        x = torch.zeros(3, 0, 4)
        assert (
            attend(x, x, x, torch.tensor([[0, 1], [1, 2]]), score=AdditiveScore(x[0]), backend="triton").shape
            == x.shape
        )

    @pytest.mark.parametrize(
        ("flow", "self_loops", "sources", "targets", "dtype"),
        slow(
            [
                ("source_to_target", True, 6, 4, torch.int32),
                ("target_to_source", False, 4, 6, torch.int32),
                ("source_to_target", True, 4, 6, torch.int64),
                ("target_to_source", True, 6, 4, torch.int64),
            ],
            2,
        ),
    )
    def test_forms_of_a_graph(self, flow, self_loops, sources, targets, dtype):
        edges = random_edge_index(sources, targets, 20)
        given = edges if flow == "source_to_target" else edges.flip(0)
        if self_loops:
            edges = add_self_loops(remove_self_loops(edges)[0], num_nodes=min(sources, targets))[0]
        graph = SparseGraph(given.to(dtype), num_sources=sources, num_targets=targets, self_loops=self_loops, flow=flow)
        options = {"heads": 2, "channels": 2, "value_channels": 2, "dropout": 0.3, "batch": (2,)}
        compare(make_call("dot", edges, sources, targets, graph=graph, **options), "triton")

    def test_complete_graphs(self):
        query, key, value = torch.randn(3, 5, 2, 4, dtype=torch.double)
        graph, bias = CompleteGraph(5, causal=True), torch.randn(2, 5, 5, dtype=torch.double)
        results = [
            attend(query, key, value, graph, bias=bias, return_weights=True, backend=backend)
            for backend in ("triton", "reference")
        ]
        torch.testing.assert_close(*results)

    @pytest.mark.parametrize(("row", "index"), [(0, 4), (0, -1), (1, 5), (1, -(2**33)), (0, 2**32)])
    def test_bad_indices_in_the_same_words(self, row, index):
        edge_index = torch.tensor([[0, 1, 2], [1, 2, 3]])
        edge_index[row, 1] = index
        words = []
        for backend in ("triton", "reference"):
            with pytest.raises(IndexError, match=f"{('source', 'target')[row]} index {index}") as caught:
                make_call("dot", edge_index, 4, 5, terms=()).results(backend)
            words.append(str(caught.value))
        assert len(set(words)) == 1

    def test_an_edit_in_place_is_noticed(self):
        edge_index = random_edge_index(6, 8, 20)
        call = make_call("dot", edge_index, 6, 8, terms=(), heads=1)
        before = call.results("triton")
        edge_index[0] = edge_index[0].flip(0)
        compare(call, "triton")
        assert not torch.equal(call.results("triton")["out"], before["out"])


class TestLayout:
    @pytest.mark.parametrize("length", [1, 3, 7, 1000])
    @pytest.mark.parametrize("self_loops", [False, True])
    @pytest.mark.parametrize(("sources", "targets", "edges"), [(9, 7, 60), (7, 9, 5), (3, 3, 0), (0, 0, 0), (1, 1, 40)])
    def test_every_edge_is_in_one_task(self, length, self_loops, sources, targets, edges, monkeypatch):
        monkeypatch.setattr(layout_module, "LONG_ROW", length)
        index = random_edge_index(max(sources, 1), max(targets, 1), edges, hub=0.5)
        layout = Layout(index, sources, targets, self_loops, "source_to_target")
        if self_loops:
            index = add_self_loops(remove_self_loops(index)[0], num_nodes=min(sources, targets))[0]
        assert layout.num_edges == index.size(1)
        assert torch.equal(layout.target(), index[1])
        for rows, end, count in ((layout.by_target, 1, targets), (layout.by_source, 0, sources)):
            seen, slots, lengths = [], {}, []
            for row, first, last, slot in rows.tasks.t().tolist():
                if row < 0:
                    continue
                lengths.append(last - first)
                for place in range(first, last):
                    number = rows.number[place].item()
                    seen.append(number)
                    assert index[end, number] == row
                    assert index[1 - end, number] == rows.node[place]
                if slot >= 0:
                    slots.setdefault(row, []).append(slot)
            assert sorted(seen) == list(range(index.size(1)))
            assert lengths == sorted(lengths, reverse=True)
            assert max(lengths, default=0) <= length
            degree = torch.bincount(index[end], minlength=count)
            assert {row for row in range(count) if degree[row] > length} == slots.keys()
            split = {row: list(range(first, last)) for row, first, last in rows.split.t().tolist() if row >= 0}
            assert split == {row: sorted(found) for row, found in slots.items()}
            assert all(first == last for row, first, last in rows.split.t().tolist() if row < 0)
            used = list(itertools.chain.from_iterable(slots.values()))
            assert sorted(used) == list(range(len(used)))
            assert len(used) == rows.num_slots
            assert len(lengths) == rows.tasks.size(1)
            assert len(slots) == rows.split.size(1)

    def test_it_is_made_once(self):
        index = random_edge_index(5, 5, 9)
        first = layout_of(index, 5, 5, False, "source_to_target")
        assert layout_of(index, 5, 5, False, "source_to_target") is first
        assert layout_of(index, 5, 5, True, "source_to_target") is not first
        index[0, 0] = 1
        assert layout_of(index, 5, 5, False, "source_to_target") is not first

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
    def test_it_holds_no_view_of_the_graph(self, dtype):
        index = random_edge_index(5, 5, 9).to(dtype)
        layout = Layout(index, 5, 5, False, "source_to_target")
        tensors = [*layout.tensors(), *layout.by_source.tensors()]
        assert len(tensors) > 6
        assert all(t.untyped_storage().data_ptr() != index.untyped_storage().data_ptr() for t in tensors)

    def test_too_many_nodes(self):
        with pytest.raises(ValueError, match="too many nodes"):
            Layout(torch.empty(2, 0, dtype=torch.long), 2**31, 1, False, "source_to_target")

    @pytest.mark.parametrize("self_loops", [False, True])
    def test_sixteen_bytes_an_edge(self, self_loops):
        """And 20 a row; a long row adds 16 for each of its tasks."""
        nodes, edges = 100, 4000
        index = torch.stack([torch.arange(edges) % nodes, torch.arange(edges) // 40])
        layout = Layout(index, nodes, nodes, self_loops, "source_to_target")
        used = [sum(t.nbytes for t in rows.tensors()) for rows in (layout.by_target, layout.by_source)]
        tasks = layout.by_target.tasks.size(1) + layout.by_source.tasks.size(1)
        split = layout.by_target.split.size(1) + layout.by_source.split.size(1)
        assert sum(used) <= 16 * layout.num_edges + 8 * (nodes + 1) + 16 * tasks + 12 * split
        held = [value for value in vars(layout).values() if isinstance(value, torch.Tensor)]
        assert sum(tensor.nbytes for tensor in held) == 4 * self_loops

    def test_no_sums_are_kept_for_long_rows_that_are_not_there(self, monkeypatch):
        monkeypatch.setattr(layout_module, "LONG_ROW", 128)
        index = random_edge_index(50, 50, 2000)
        for layout in (Layout(index, 50, 50, False, FLOWS[0]), Layout(index, 50, 50, True, FLOWS[1])):
            rows = layout.by_source
            assert layout.by_target.num_slots == 0
            assert rows.num_slots == rows.split.size(1) == 0
            assert rows.tasks.size(1) == 50


class Stream:
    """A stand-in for a GPU's stream, which writes down who waits for what."""

    device = "cuda:0"

    def __init__(self, name, log):
        self.name, self.log, self.cuda_stream = name, log, name

    def record_event(self):
        self.log.append(("made on", self.name))
        return self.name

    def wait_event(self, event):
        self.log.append((self.name, "waits for", event))


class TestStreams:
    @pytest.fixture
    def log(self):
        return []

    @pytest.fixture
    def switch(self, log, monkeypatch):
        """Switches to another stream."""
        current = [None]
        monkeypatch.setattr(edge_lists, "_is_on_gpu", lambda tensor: True)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
        monkeypatch.setattr(edge_lists, "stream_address", lambda device: current[0].cuda_stream)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        record = lambda tensor, stream: log.append((stream.name, "uses", tensor.data_ptr()))  # noqa: E731
        monkeypatch.setattr(torch.Tensor, "record_stream", record)

        def switch(stream):
            current[0] = stream

        return switch

    def test_a_layout_is_waited_for(self, log, switch):
        first, second = Stream("first", log), Stream("second", log)
        index = random_edge_index(5, 5, 9)

        def layout():
            return layout_of(index, 5, 5, False, "source_to_target")

        switch(first)
        made = layout()
        assert log == [("made on", "first")]
        layout()
        assert len(log) == 1
        switch(second)
        assert layout() is made
        used = {("second", "uses", tensor.data_ptr()) for tensor in made.by_target.tensors()}
        assert log[1] == ("second", "waits for", "first")
        assert set(log[2:]) == used
        log.clear()
        rows = made.by_source
        assert log == [("made on", "second")]
        switch(first)
        assert made.by_source is rows
        assert log[1] == ("first", "waits for", "second")
        assert set(log[2:]) == {("first", "uses", tensor.data_ptr()) for tensor in rows.tensors()}

    def test_self_loops_are_waited_for(self, log, switch):
        first, second = Stream("first", log), Stream("second", log)
        index = random_edge_index(5, 5, 9)
        for stream in (first, second):
            switch(stream)
            looped = edge_lists.looped(index, 5, 5, "source_to_target")
        assert log == [("made on", "first"), ("second", "waits for", "first"), ("second", "uses", looped.data_ptr())]

    def test_kernels_run_on_the_device_of_their_tensors(self, monkeypatch):
        inside, runs = [], []

        @contextlib.contextmanager
        def device_of(tensor):
            inside.append(tensor.shape)
            yield
            inside.pop()

        run = kernels.run
        monkeypatch.setattr(torch.cuda, "device_of", device_of)
        monkeypatch.setattr(kernels, "run", lambda *arguments: runs.append(list(inside)) or run(*arguments))
        make_call("dot", random_edge_index(5, 5, 20, hub=0.6), 5, 5, channels=2, value_channels=2).results("triton")
        assert len(runs) >= 5
        assert all(len(tensors) == 1 for tensors in runs)


class TestCapture:
    """CUDA graphs, by a stand-in: nothing may wait for the device, so no number may be read."""

    @pytest.fixture
    def capture(self, monkeypatch):
        def refuse(tensor, *args):
            raise AssertionError("a number was read")

        @contextlib.contextmanager
        def capture():
            with monkeypatch.context() as patch:
                patch.setattr(layout_module, "is_capturing", lambda tensor: True)
                for name in ("item", "tolist", "__int__", "__bool__", "__float__", "nonzero"):
                    patch.setattr(torch.Tensor, name, refuse)
                yield

        return capture

    @staticmethod
    def call(self_loops, edges=None, distribution="softmax", **options):
        edges = random_edge_index(6, 6, 30, hub=0.5) if edges is None else edges
        graph = SparseGraph(edges, num_sources=6, num_targets=6, self_loops=self_loops)
        options = {"heads": 2, "channels": 3, "value_channels": 2, "terms": (), **options}
        call = make_call("leaky_relu", edges, 6, 6, graph=graph, **options)
        leaves = {name: tensor.requires_grad_() for name, tensor in call.tensors.items()}

        def run(weights=False):
            score = AdditiveScore(leaves["vector"])
            tensors = {name: tensor for name, tensor in leaves.items() if name != "vector"}
            out = attend(
                graph=graph,
                score=score,
                distribution=distribution,
                dropout=0.4,
                training=True,
                return_weights=weights,
                backend="triton",
                **tensors,
            )
            out, alpha = out if weights else (out, torch.zeros(()))
            loss = (out * out).sum() + (alpha * alpha).sum()
            return [out, alpha, *torch.autograd.grad(loss, list(leaves.values()))]

        return run

    @pytest.mark.parametrize(
        ("self_loops", "batch", "distribution"),
        [
            *itertools.product([False, True], [(), (2,)], ["softmax"]),
            (True, (2,), "sparsemax"),
            (True, (2,), gattn.TopK(2)),
        ],
    )
    def test_forward_and_backward(self, self_loops, batch, distribution, capture, monkeypatch):
        """Of a batch, edges are told apart by their number, which the device alone knows."""
        monkeypatch.setattr("gattn.ops.backends.base.draw_seed", lambda device: torch.tensor(12345))
        run = self.call(self_loops, batch=batch, distribution=distribution)
        expected = run()
        with capture():
            found = run()
        torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize(("self_loops", "batch"), [(False, ()), (True, (2,))])
    def test_it_runs_what_was_compiled_before(self, self_loops, batch, capture, fresh_forms, monkeypatch):
        """A capture cannot load kernels; what it takes for long rows may be none."""
        monkeypatch.setattr(layout_module, "LONG_ROW", 16)
        monkeypatch.setattr("gattn.ops.backends.base.draw_seed", lambda device: torch.tensor(12345))
        edges = torch.stack([torch.arange(60) % 6, torch.arange(60) // 10])
        run, launched = self.call(self_loops, batch=batch, edges=edges), []
        run_kernel = kernels.run

        def record(kernel, grid, warps, arguments):
            if min(grid) > 0:
                constants = {name: x for name, x in arguments.items() if x is None or name.isupper()}
                launched.append((kernel.__name__, warps, str(constants)))
            run_kernel(kernel, grid, warps, arguments)

        monkeypatch.setattr(kernels, "run", record)
        run()
        before = set(launched)
        assert {name for name, *_ in before} >= {"combine", "add_partial"}
        launched.clear()
        run()
        passes = {"forward", "dot_rows", "backward_by_source", "backward_by_target"}
        assert {name for name, *_ in launched} == passes
        launched.clear()
        with capture():
            run()
        assert {name for name, *_ in launched} >= {"combine", "add_partial"}
        assert set(launched) <= before

    def test_weights_of_a_graph_with_self_loops(self, capture, monkeypatch):
        monkeypatch.setattr("gattn.ops.backends.base.draw_seed", lambda device: torch.tensor(12345))
        run = self.call(True)
        with capture(), pytest.raises(RuntimeError, match="make the same call with this edge_index once before"):
            run(weights=True)
        expected = run(weights=True)
        with capture():
            found = run(weights=True)
        torch.testing.assert_close(found, expected)


class TestMemory:
    @pytest.mark.parametrize(
        ("score", "change"),
        [
            ("leaky_relu", lambda t: torch.cat([t, t, t], -1)[..., t.size(-1) : 2 * t.size(-1)]),
            ("dot", lambda t: t.transpose(0, -1).contiguous().transpose(0, -1)),
            ("gat", lambda t: t[:1].expand_as(t)),
        ],
    )
    def test_non_contiguous_inputs(self, score, change):
        call = make_call(score, random_edge_index(8, 8, 20), 8, 8, heads=2, channels=4, value_channels=4)
        tensors = {name: change(t) for name, t in call.tensors.items()}
        compare(changed(call, tensors=tensors, weights=False), "triton")

    def test_slices_of_one_projection(self):
        call = make_call("dot", random_edge_index(8, 8, 20), 8, 8, terms=(), channels=6, value_channels=6)
        fused = torch.stack([call.tensors[name] for name in ("query", "key", "value")], 1)
        call.tensors = dict(zip(("query", "key", "value"), fused.unbind(1), strict=True))
        compare(call, "triton")

    @pytest.mark.parametrize(
        ("score", "distribution"),
        slow([("leaky_relu", "softmax"), ("gat", "entmax15"), ("dot", "softmax"), ("dot", "top_k")], 2),
    )
    def test_nothing_unwritten_is_read(self, score, distribution, monkeypatch):
        found = []
        for byte in (0xFF, 0x00):

            def empty(*args, byte=byte, **kwargs):
                tensor = torch.zeros(*args, **kwargs)
                tensor.untyped_storage().fill_(byte)
                return tensor

            with monkeypatch.context() as patch:
                patch.setattr(kernels.torch, "empty", empty)
                edge_index = random_edge_index(9, 7, 30, hub=0.6)
                options = {"dropout": 0.3, "heads": 2, "channels": 3, "distribution": distribution}
                call = make_call(score, edge_index, 9, 7, **options)
                found.append(call.results("triton"))
        equal(*found)
        assert all(result.isfinite().all() for result in found[0].values())

    @pytest.mark.parametrize("distribution", ["softmax", "sparsemax"])
    def test_no_tensor_of_all_edges_heads_and_channels(self, distribution, monkeypatch):
        edges, channels = 60, 16
        sizes = []

        def empty(*args, **kwargs):
            tensor = torch.zeros(*args, **kwargs)
            sizes.append(tensor.numel())
            return tensor

        monkeypatch.setattr(layout_module, "LONG_ROW", 16)
        options = {"heads": 2, "channels": channels, "value_channels": channels, "terms": ()}
        call = make_call("leaky_relu", random_edge_index(9, 7, edges), 9, 7, distribution=distribution, **options)
        call.results("triton")  # what is derived from the graph is there afterwards
        monkeypatch.setattr(kernels.torch, "empty", empty)
        call.results("triton")
        assert len(sizes) > 9
        assert max(sizes) < edges * 2 * channels / 2

    @pytest.mark.parametrize("degree", [4, 20])
    def test_buffers_do_not_grow_with_edges(self, degree, monkeypatch):
        """But for the gradients of logits, if there are no long rows: so of GATv2's vector, too."""
        sizes = []
        monkeypatch.setattr(layout_module, "LONG_ROW", 128)
        monkeypatch.setattr(passes, "_MOST_PROGRAMS", 3)
        nodes, heads, channels = 40, 2, 8
        edge_index = torch.stack([torch.arange(nodes * degree) % nodes, torch.arange(nodes * degree) // degree])
        options = {"heads": heads, "channels": channels, "value_channels": channels, "terms": (), "weights": False}
        call = make_call("leaky_relu", edge_index, nodes, nodes, **options)
        empty = passes.Pass.empty
        monkeypatch.setattr(passes.Pass, "empty", lambda *args, **kw: sizes.append(args[1:]) or empty(*args, **kw))
        compare(call, "triton")
        edges = edge_index.size(1)
        assert [size for size in sizes if math.prod(size) > nodes * heads * channels] == [(1, edges, heads)] * (
            degree > 8
        )
        assert (3, heads, channels) in sizes

    def test_no_atomics(self):
        source = Path(layout_module.__file__).with_name("kernels.py").read_text()
        assert "tl.load" in source
        assert "atomic_" not in source


class TestSpecialValues:
    @pytest.mark.parametrize(("score", "name"), slow([("dot", "value"), *((s, "key") for s in SCORES)], 3))
    def test_a_nan_shows_in_its_rows_and_nowhere_else(self, score, name):
        edge_index = random_edge_index(9, 7, 30, hub=0.5)
        call = make_call(score, edge_index, 9, 7, heads=2, channels=3, terms=(), weights=False)
        call.tensors[name][2] = math.nan
        out = call.results("triton")["out"]
        reached = torch.zeros(7, dtype=torch.bool).index_fill(0, edge_index[1][edge_index[0] == 2], True)
        assert reached.any()
        assert not reached.all()
        assert out[reached].isnan().all()
        assert out[~reached].isfinite().all()

    @pytest.mark.parametrize(
        ("score", "how", "degree"), slow([("gat", "bias", 3), ("dot", "mask", 13), ("tanh", "mask", 3)], 2)
    )
    def test_a_fully_masked_target(self, score, how, degree):
        edge_index = torch.randint(4, (2, degree + 9))
        edge_index[1, :degree], edge_index[1, degree:] = 0, 1
        call = make_call(score, edge_index, 4, 4, heads=2, channels=3, terms=("bias",))
        if how == "mask":
            call.mask = edge_index[1] != 0
        else:
            call.tensors["bias"][edge_index[1] == 0] = -math.inf
        results = call.results("triton")
        assert (results["out"][0] == 0).all()
        assert (results["weights"][edge_index[1] == 0] == 0).all()
        assert (results["out"][1] != 0).any()
        assert all(result.isfinite().all() for result in results.values())
        compare(call, "triton")

    def test_dropout_of_everything(self):
        call = make_call("dot", random_edge_index(6, 8, 20), 6, 8, dropout=1.0, heads=2)
        compare(call, "triton")
        assert (call.results("triton")["out"] == 0).all()

    def test_dropout_keeps_the_same_bits_as_the_reference(self, monkeypatch):
        """With a seed of more than 32 bits."""
        seed = torch.tensor(2**62 + 12345678901)
        monkeypatch.setattr("gattn.ops.backends.base.draw_seed", lambda device: seed)
        call = make_call("dot", random_edge_index(6, 8, 20), 6, 8, dropout=0.5, weights="dropped", batch=(2,))
        expected = call.results("reference")["weights"]
        assert torch.equal(call.results("triton")["weights"] == 0, expected == 0)
        value = torch.ones(2, 6, 3, 1)
        out = attend(
            call.tensors["query"], call.tensors["key"], value, call.graph, dropout=0.5, training=True, backend="triton"
        )
        kept = dropout.keep_mask(seed, torch.Size((2, 20, 3)), 0.5)
        plain = attend(call.tensors["query"], call.tensors["key"], value, call.graph, return_weights=True)[1]
        expected = torch.zeros(2, 8, 3).index_add(1, call.edges[1], plain * kept * 2)
        torch.testing.assert_close(out.squeeze(-1), expected)


class TestDerivatives:
    @pytest.mark.parametrize("score", slow(["leaky_relu", "gat", "dot"], 1))
    def test_second(self, score):
        """Inputs off the grid: finite differences must not step across a kink."""
        sizes = {"heads": 1, "channels": 2, "value_channels": 1, "dtype": torch.double}
        call = make_call(score, random_edge_index(3, 3, 6), 3, 3, terms=("bias",), dropout=0.4, **sizes)
        leaves = {name: torch.randn_like(t).requires_grad_() for name, t in call.tensors.items()}

        def function(backend):
            out, alpha = call.attend(leaves, backend)
            first = torch.autograd.grad(
                (out.square().sum() + alpha.pow(3).sum()), list(leaves.values()), create_graph=True
            )
            return torch.autograd.grad(sum(grad.square().sum() for grad in first), list(leaves.values()))

        torch.testing.assert_close(function("triton"), function("reference"))

    @pytest.mark.parametrize(
        ("family", "distribution"),
        slow([("leaky_relu", "softmax"), ("gat", "entmax15"), ("gat", "softmax"), ("dot", "softmax")], 2),
    )
    @pytest.mark.parametrize("dtype", slow([torch.float16, torch.float64], 1))
    def test_opcheck(self, family, distribution, dtype):
        sizes = {"heads": 2, "channels": 3, "value_channels": 2, "dtype": dtype}
        call = make_call(family, random_edge_index(4, 3, 9), 4, 3, distribution=distribution, **sizes)
        inputs = call.operator_inputs(dtype, requires_grad=True)
        utils = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(
            torch.ops.gattn.triton_attention.default, (*inputs.arguments, True, True), test_utils=utils
        )
        detached = [value.detach() if isinstance(value, torch.Tensor) else value for value in inputs.arguments]
        out = torch.ops.gattn.triton_attention.default(*detached, True, True)
        grads = torch.randn_like(out[0]), torch.randn_like(out[1])
        wanted = [getattr(inputs, name) is not None for name in DIFFERENTIABLE]
        arguments = (*grads, *out[:2], list(out[2:]), *detached, wanted)
        torch.library.opcheck(torch.ops.gattn.triton_attention_backward.default, arguments, test_utils=utils)


class TestChoice:
    x = torch.randn(4, 2, 3)
    edge_index = torch.tensor([[0, 1], [1, 2]])

    def test_layers(self):
        """GATConv, GATv2Conv and TransformerConv give what they give with other backends."""
        for layer in LAYERS:
            conv, x = layer(3, 4, heads=2, edge_dim=2), torch.randn(4, 3)
            found = []
            for backend in ("triton", "reference"):
                conv.zero_grad()
                with gattn.backend(backend):
                    out = conv(x, self.edge_index, torch.ones(2, 2))
                out.square().sum().backward()
                found.append((out.detach(), [parameter.grad for parameter in conv.parameters()]))
            torch.testing.assert_close(*found)

    def test_automatic_mixed_precision(self):
        """Under autocast it gives what the other backends give, and float32 gradients to float32 parameters."""
        conv, x = GATv2Conv(3, 4, heads=2), torch.randn(4, 3)
        found = []
        for backend in ("triton", "reference"):
            conv.zero_grad()
            with torch.autocast(torch.get_default_device().type, torch.bfloat16), gattn.backend(backend):
                out = conv(x, self.edge_index)
            out.float().square().sum().backward()
            assert all(parameter.grad.dtype == torch.float32 for parameter in conv.parameters())
            found.append((out.detach(), [parameter.grad for parameter in conv.parameters()]))
        torch.testing.assert_close(*found, rtol=0.02, atol=0.02)

    @pytest.mark.skipif(not kernels.INTERPRETED, reason="needs the interpreter")
    def test_it_is_asked_for_on_the_cpu(self, monkeypatch):
        def refuse(*args, **kwargs):
            raise AssertionError

        monkeypatch.setattr(triton.Triton.operator, "_compute", refuse)
        x, edge_index = self.x.cpu(), self.edge_index.cpu()
        attend(x, x, x, edge_index)
        with pytest.raises(AssertionError):
            attend(x, x, x, edge_index, backend="triton")

    def test_it_needs_a_gpu(self, monkeypatch):
        monkeypatch.setattr(kernels, "INTERPRETED", False)
        x, edge_index = self.x.cpu(), self.edge_index.cpu()
        with pytest.raises(ValueError, match="'triton' cannot serve this call: the tensors are on cpu. .*'auto' can"):
            attend(x, x, x, edge_index, backend="triton")

    def test_without_triton(self, monkeypatch):
        monkeypatch.setattr(kernels, "is_installed", False)
        with pytest.raises(RuntimeError, match=r"needs Triton, but it is not installed: pip install triton"):
            attend(self.x, self.x, self.x, self.edge_index, backend="triton")

    def test_other_scores_and_distributions(self):
        class Mine(DotScore):
            def logits(self, query, key, edge):
                return 2 * super().logits(query, key, edge)

        found = [
            attend(self.x, self.x, self.x, self.edge_index, score=Mine(), backend=backend)
            for backend in ("triton", "reference")
        ]
        torch.testing.assert_close(*found)

        class Sharp(gattn.Distribution):
            def weights(self, logits, index, num_targets, dim):
                return gattn.softmax(2 * logits, index, num_targets, dim)

        found = [
            attend(self.x, self.x, self.x, self.edge_index, distribution=Sharp(), backend=backend)
            for backend in ("triton", "reference")
        ]
        torch.testing.assert_close(*found)

    @pytest.mark.parametrize("score", slow(["leaky_relu", "gat", "dot"], 1))
    def test_compiled(self, score):
        torch._dynamo.reset()
        call = make_call(score, random_edge_index(5, 5, 12), 5, 5, heads=2, channels=3, mask=torch.rand(12) < 0.8)
        make_score, graph = call.make_score, call.edges

        @torch.compile(fullgraph=True, backend="aot_eager")
        def function(tensors):
            terms = {name: tensor for name, tensor in tensors.items() if name != "vector"}
            terms.setdefault("query", None)
            score = make_score(tensors.get("vector"))
            return attend(graph=graph, score=score, mask=call.mask, return_weights=True, backend="triton", **terms)

        leaves = {name: tensor.requires_grad_() for name, tensor in call.tensors.items()}
        expected = call.results("triton")
        out, weights = function(leaves)
        grads = torch.autograd.grad([out, weights], list(leaves.values()), [call.grad(out, 1), call.grad(weights, 2)])
        equal(
            {"out": out, "weights": weights, **{f"grad of {n}": g for n, g in zip(leaves, grads, strict=True)}},
            {name: expected[name] for name in ("out", "weights", *(f"grad of {n}" for n in leaves))},
        )
