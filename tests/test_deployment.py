"""Exported programs, with gattn's kernels and without: eager mode's values, for sizes other than those traced.

Each way of deployment runs a graph model and a sequence model.
"""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.export import Dim

import gattn
from gattn import CompleteGraph
from gattn.nn import GATConv, GATv2Conv, TransformerConv
from tests.cases import mostly_slow
from tests.layers import LAYERS, SIZES, Called, Draw, on_edges, row, tensors
from tests.layers import MODELS as NETWORKS

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec:FutureWarning",  # of PyTorch's export
    "ignore:.*should not be instantiated:DeprecationWarning",
    "ignore:The tensor attributes .* were assigned during export:UserWarning",  # of its LSTM
)

NODES, EDGES, BATCH, LENGTH = Dim("nodes"), Dim("edges"), Dim("batch"), Dim("length", max=64)


class Kind(NamedTuple):
    """Models that take the same inputs."""

    draw: object
    """Inputs of some sizes."""
    shapes: tuple
    sizes: tuple
    """The first one is traced."""


def draw_graph(nodes, edges):
    """A graph with an isolated node, which layers without self-loops meet."""
    return torch.randn(nodes, 6), torch.randint(0, nodes - 1, (2, edges))


GRAPH = Kind(draw_graph, ({0: NODES}, {1: EDGES}), ((10, 30), (25, 7), (40, 300)))
TEXT = Kind(
    lambda batch, length: (torch.randint(0, 11, (batch, length)),),
    ({0: BATCH, 1: LENGTH},),
    ((2, 12), (1, 5), (3, 64), (1, 1)),
)
MODELS = {
    "GATConv": (GRAPH, lambda: GATConv(6, 4, heads=2, residual=True)),
    "GATv2Conv": (GRAPH, lambda: GATv2Conv(6, 4, heads=2, add_self_loops=False)),
    "TransformerConv": (GRAPH, lambda: TransformerConv(6, 4, heads=2, beta=True)),
    "GAT": (GRAPH, lambda: gattn.models.GAT(6, 8, 2, 3, heads=2)),
    "TransformerLM": (TEXT, lambda: gattn.models.TransformerLM(11, 16, 2, 2, position="rotary")),
}
WHOLE = ("GAT", "TransformerLM")

each_whole_model = pytest.mark.parametrize("name", WHOLE)


def make(name):
    """A model, the shapes it is exported with, and inputs of several sizes with its outputs."""
    kind, model = MODELS[name]
    model = model().eval()
    inputs = [kind.draw(*sizes) for sizes in kind.sizes]
    with torch.no_grad():
        return model, kind.shapes, [(given, model(*given)) for given in inputs]


def export(model, inputs, shapes, backend="auto"):
    with gattn.backend(backend), torch.no_grad():
        return torch.export.export(model, inputs, dynamic_shapes=shapes)


def operators(program):
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


def run(code, folder, *arguments):
    """Runs code in a fresh process."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


CHECK = """
import sys
for name in sys.argv[1:]:
    program = LOAD
    for inputs, expected in torch.load(name + ".cases", weights_only=True):
        torch.testing.assert_close(program(*inputs), expected)
"""
WITHOUT = "import torch" + CHECK + "assert 'gattn' not in sys.modules\n"
WITH = "import torch, gattn" + CHECK
LOAD_PROGRAM = "torch.export.load(name + '.pt2').module()"
LOAD_PACKAGE = "torch._inductor.aoti_load_package(name + '.pt2')"


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Folders of saved programs by backend, each program with inputs and eager outputs beside it."""
    folders = {backend: tmp_path_factory.getbasetemp() / "programs" / backend for backend in ("auto", "cpu")}
    for backend, folder in folders.items():
        folder.mkdir(parents=True)
        for name in MODELS:
            model, shapes, cases = make(name)
            program = export(model, cases[0][0], shapes, backend)
            found = {operator for operator in operators(program) if "gattn" in operator}
            assert found == (set() if backend == "auto" else {"gattn.attention.default"})
            torch.export.save(program, folder / f"{name}.pt2")
            torch.save(cases, folder / f"{name}.cases")
    return folders


class TestExport:
    @pytest.mark.slow
    def test_without_gattn_a_fresh_process_runs_plain_programs_alone(self, programs):
        """Of the others, PyTorch says which operator is missing, and that its module must be imported."""
        forgets = "\ntry:\n    torch.export.load('../cpu/GAT.pt2')\nexcept RuntimeError:\n    print('refused')\n"
        ended = run(WITHOUT.replace("LOAD", LOAD_PROGRAM, 1) + forgets, programs["auto"], *MODELS)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout == "refused\n"
        assert "torch.ops.gattn.attention" in ended.stderr
        assert "import the custom op" in ended.stderr

    @pytest.mark.slow
    def test_programs_with_kernels_run_in_a_fresh_process_that_imports_gattn(self, programs):
        ended = run(WITH.replace("LOAD", LOAD_PROGRAM, 1), programs["cpu"], *MODELS)
        assert ended.returncode == 0, ended.stderr

    @pytest.mark.parametrize("strict", [False, True])
    @pytest.mark.parametrize("backend", ["auto", "cpu"])
    def test_a_program_can_be_trained(self, backend, strict):
        """It drops what eager mode drops, too."""
        conv = GATv2Conv(6, 4, heads=2, dropout=0.5)
        with gattn.backend(backend):
            program = torch.export.export(conv, draw_graph(10, 30), dynamic_shapes=GRAPH.shapes, strict=strict)
        inputs, found = draw_graph(20, 90), []
        for module in (program.module(), conv):
            torch.manual_seed(1)
            out = module(*inputs)
            grads = torch.autograd.grad(out.square().sum(), list(module.parameters()))
            found.append((out.detach(), dict(zip(dict(module.named_parameters()), grads, strict=True))))
        torch.testing.assert_close(*found)

    def test_a_backend_that_cannot_serve_a_call_is_refused_as_in_eager_mode(self):
        with pytest.raises(ValueError, match="backend='dense' cannot serve this call"):
            export(GATConv(6, 4), draw_graph(10, 30), GRAPH.shapes, "dense")


#: What reads numbers that decide shapes, and why; docs/deployment.md says the same.
COUNTED = "counts the nodes of each graph of a batch"
NOT_OPEN = {
    **dict.fromkeys(("Graphormer", "PatchTransformerAggregation"), COUNTED),
    "HAN": "reads the lengths of sentences",
    "LPFormer": "reads a sparse matrix",
    "LSTMN": "has a loop over tokens",
    "Seq2Seq": "has a loop over tokens",
}
#: These also take one graph without a batch.
ALONE = ("GPSConv", "Polynormer", "SGFormer")
#: Sizes of positions.
LONGEST = {"LearnedPositionalEncoding": 62, "TransformerLM": 64}
MORE = (
    {"nodes": 9, "others": 7, "edges": 12, "edges2": 10, "edges3": 6, "batch": 4, "length": 8, "memory": 5, "words": 6},
    {"nodes": 70, "others": 90, "edges": 300, "edges2": 200, "edges3": 100, "batch": 3, "length": 40, "memory": 50},
)


def export_open(name, draw):
    module, axes = Called(name), Draw()
    dims = {size: Dim(size, max=LONGEST.get(name) if size == "length" else None) for size in SIZES}
    inputs = draw(axes)

    def shape(leaf):
        return None if leaf is None else {place: dims[size] for place, size in leaf.items()}

    def is_leaf(leaf):
        return leaf is None or (isinstance(leaf, dict) and all(isinstance(place, int) for place in leaf))

    shapes = torch.utils._pytree.tree_map(shape, axes.open(inputs), is_leaf=is_leaf)
    return module, export(module, inputs, (shapes,)), axes.constants


class TestEveryLayerWithOpenSizes:
    """What the table of layers calls open may be of any size in the program."""

    @pytest.mark.parametrize(
        ("name", "is_alone"),
        mostly_slow(
            [("GATConv", False), *((name, True) for name in ALONE)]
            + [(name, False) for name in (*LAYERS, *NETWORKS) if name not in (*NOT_OPEN, "GATConv")],
            every=20,
        ),
    )
    def test_gives_the_values_of_eager_mode(self, name, is_alone):
        draw = on_edges if is_alone else row(name).inputs
        module, program, constants = export_open(name, draw)
        for sizes in MORE:
            inputs = draw(Draw(**{size: n for size, n in sizes.items() if size not in constants}))
            torch.testing.assert_close(tensors(program.module()(*inputs)), tensors(module(*inputs)))

    @pytest.mark.slow
    @pytest.mark.parametrize("name", NOT_OPEN)
    def test_others_are_refused_and_listed(self, name):
        with pytest.raises((RuntimeError, ValueError, torch._dynamo.exc.UserError)):
            export_open(name, row(name).inputs)
        page = (Path(__file__).parents[1] / "docs/deployment.md").read_text()
        assert f"`{name}`" in page

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["sparse", "buckets", "buckets of each"])
    def test_biases(self, kind):
        nodes, pairs = Dim("nodes"), Dim("pairs")

        class Biased(nn.Module):
            def forward(self, x, listed, values):
                bias = gattn.SparseBias(listed, values) if kind == "sparse" else gattn.BucketBias(listed, values)
                return gattn.attend(x, x, x, CompleteGraph(x.size(1)), bias=bias)

        def draw(batch, nodes, pairs):
            x = torch.randn(batch, nodes, 2, 4)
            if kind == "sparse":
                return x, torch.randint(nodes, (2, pairs)), torch.randn(pairs, 2)
            return x, torch.randint(3, (batch, nodes, nodes)[kind == "buckets" :]), torch.randn(3, 2)

        of_bias = {
            "sparse": ({1: pairs}, {0: pairs}),
            "buckets": ({0: nodes, 1: nodes}, None),
            "buckets of each": ({0: BATCH, 1: nodes, 2: nodes}, None),
        }
        program = export(Biased(), draw(2, 6, 9), ({0: BATCH, 1: nodes}, *of_bias[kind]))
        for sizes in ((3, 9, 5), (1, 30, 100)):
            inputs = draw(*sizes)
            torch.testing.assert_close(program.module()(*inputs), Biased()(*inputs))


class Attend(nn.Module):
    """Attention on a complete graph of whatever sizes come."""

    def __init__(self, score=None, **options):
        super().__init__()
        self.score, self.options = score, options

    def forward(self, query, key, lengths):
        lengths = {"source_lengths": lengths} if self.options.get("has_lengths") else {}
        options = {name: option for name, option in self.options.items() if name != "has_lengths"}
        graph = CompleteGraph(query.size(1), key.size(1), **options, **lengths)
        return gattn.attend(query, key, key, graph, score=self.score)


class TestCompleteGraphs:
    """Exported by blocks of the matrix, and not edge by edge, with sizes left open."""

    @pytest.mark.parametrize("score", [None, "additive"])
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"causal": True},
            {"window": (2, 1)},
            {"window": 3, "causal": True},
            {"has_lengths": True},
            {"has_lengths": True, "causal": True},
        ],
        ids=str,
    )
    def test_dynamic_sizes(self, score, options):
        heads = 2 if score is None else 1
        module = Attend(None if score is None else gattn.AdditiveScore(torch.randn(2, 4)), **options)
        targets, sources = Dim("targets"), Dim("sources")
        shapes = ({0: BATCH, 1: targets}, {0: BATCH, 1: sources}, {0: BATCH})

        def draw(batch, num_targets, num_sources):
            lengths = torch.randint(1, num_sources + 1, (batch,))
            key = torch.randn(batch, num_sources, 2 // heads if score is None else 2, 4)
            return torch.randn(batch, num_targets, 2, 4), key, lengths

        program = export(module, draw(2, 5, 9), shapes)
        assert not any("nonzero" in operator or "scatter" in operator for operator in operators(program))
        for sizes in ((3, 6, 6), (2, 100, 130), (4, 9, 5)):
            inputs = draw(*sizes)
            torch.testing.assert_close(program.module()(*inputs), module(*inputs))


class Readout(nn.Module):
    """A network with a readout of one graph, or of four."""

    def __init__(self, num_graphs):
        super().__init__()
        self.num_graphs = num_graphs
        self.conv = TransformerConv(6, 4, heads=2)
        self.pool = gattn.nn.AttentionalAggregation(nn.Linear(8, 1), nn.Linear(8, 5))

    def forward(self, x, edge_index, batch):
        x = self.conv(x, edge_index).relu()
        return self.pool(x) if self.num_graphs == 1 else self.pool(x, batch, dim_size=self.num_graphs)


@pytest.mark.slow
class TestOnnx:
    @pytest.mark.parametrize("num_graphs", [1, 4])
    @pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of the exporter's packages
    @pytest.mark.filterwarnings("ignore:.*shares the same shape constraints:UserWarning")
    def test_readouts(self, num_graphs):
        pytest.importorskip("onnxscript")
        onnxruntime = pytest.importorskip("onnxruntime")

        def draw(nodes, edges):
            return *draw_graph(nodes, edges), torch.arange(nodes) * num_graphs // nodes

        model, shapes = Readout(num_graphs).eval(), (*GRAPH.shapes, {0: NODES})
        program = torch.onnx.export(model, draw(10, 30), dynamic_shapes=shapes, dynamo=True, verbose=False)
        content = program.model_proto.SerializeToString()
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        names = [given.name for given in session.get_inputs()]
        for sizes in ((25, 7), (40, 300)):
            inputs = dict(zip(("x", "edge_index", "batch"), draw(*sizes), strict=True))
            (out,) = session.run(None, {name: inputs[name].numpy() for name in names})
            expected = model(*inputs.values()).detach()
            torch.testing.assert_close(torch.from_numpy(out), expected, rtol=1e-4, atol=1e-5)

    @each_whole_model
    @pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of the exporter's packages
    def test_values(self, name):
        pytest.importorskip("onnx")
        pytest.importorskip("onnxscript")
        onnxruntime = pytest.importorskip("onnxruntime")
        model, shapes, cases = make(name)
        program = torch.onnx.export(model, cases[0][0], dynamic_shapes=shapes, dynamo=True, verbose=False)
        content = program.model_proto.SerializeToString()
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        names = [given.name for given in session.get_inputs()]
        for inputs, expected in cases:
            (out,) = session.run(None, {key: x.numpy() for key, x in zip(names, inputs, strict=True)})
            torch.testing.assert_close(torch.from_numpy(out), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
class TestAotInductor:
    @each_whole_model
    @pytest.mark.parametrize("backend", ["auto", "cpu"])
    def test_values_in_a_fresh_process(self, name, backend, tmp_path):
        model, shapes, cases = make(name)
        program = export(model, cases[0][0], shapes, backend)
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / f"{name}.pt2"))
        torch.save(cases, tmp_path / f"{name}.cases")
        code = WITHOUT if backend == "auto" else WITH
        ended = run(code.replace("LOAD", LOAD_PACKAGE, 1), tmp_path, name)
        assert ended.returncode == 0, ended.stderr
        if backend == "cpu":
            ended = run(WITHOUT.replace("LOAD", LOAD_PACKAGE, 1), tmp_path, name)
            assert "Could not find schema for gattn::attention" in ended.stderr
