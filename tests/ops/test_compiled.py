"""Compiled and traced calls: graphs that the compiler owns, graphs handed in from outside, and sizes at run time."""

import functorch.compile
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import gattn
from gattn import SparseGraph, Typed, attend
from gattn.nn import GATConv, GATv2Conv, TransformerConv
from gattn.ops.backends.cpu import layout as layout_module
from gattn.ops.backends.cpu import native
from gattn.testing import random_edge_index
from tests.cases import IS_OLDEST, mostly_slow
from tests.layers import LAYERS, Draw, made, tensors

NODES, EDGES, HEADS, CHANNELS = 12, 60, 2, 4


@pytest.fixture(autouse=True)
def reset():
    torch._dynamo.reset()


@pytest.fixture
def layouts(monkeypatch):
    """The layouts that are made."""
    made = []
    original = layout_module.Layout

    def make(*arguments):
        made.append(original(*arguments))
        return made[-1]

    monkeypatch.setattr(layout_module, "Layout", make)
    return made


def following(edge_index, out):
    """Another graph that only the first one's attention decides, so that the compiler reuses the first one's memory."""
    shift = (out.detach().sum() * 100).long().abs()
    return (edge_index * 11 + shift) % NODES


def chain(x, base, *layers):
    """Attends over three graphs that are computed inside."""
    edge_index = (base * 7 + 3) % NODES
    for layer in layers:
        x = layer(x, edge_index)
        edge_index = following(edge_index, x)
    return x


def attention(x, edge_index):
    return attend(x, x, x, SparseGraph(edge_index, num_sources=NODES, num_targets=NODES, self_loops=True))


def inputs(seed, edges=EDGES):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(NODES, HEADS, CHANNELS, generator=generator)
    return x, torch.randint(NODES, (2, edges), generator=generator)


def without_loops(edges):
    source = torch.randint(NODES, (edges,))
    return torch.stack([source, (source + torch.randint(1, NODES, (edges,))) % NODES])


def with_gradient(function):
    def differentiated(x, base):
        x = x.requires_grad_()
        out = function(x, base)
        return out.detach(), *torch.autograd.grad(out.square().sum(), x)

    return differentiated


class TestAGraphComputedInside:
    """Inductor writes a graph to the memory of another, under the same name and the same version."""

    def function(self, x, base):
        return chain(x, base, attention, attention, attention)

    @pytest.mark.parametrize(
        "options", [{}, {"dynamic": True}, {"mode": "reduce-overhead"}], ids=["static", "dynamic", "reduce-overhead"]
    )
    def test_without_gradients(self, options):
        compiled = torch.compile(self.function, fullgraph=True, **options)
        with torch.no_grad():
            for seed in range(3):
                given = inputs(seed, EDGES + seed * bool(options.get("dynamic")))
                torch.testing.assert_close(compiled(*given), self.function(*given))

    @pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
    def test_with_gradients(self, backend):
        compiled = with_gradient(torch.compile(self.function, fullgraph=True, backend=backend))
        for seed in range(3):
            torch.testing.assert_close(compiled(*inputs(seed)), with_gradient(self.function)(*inputs(seed)))

    def test_in_layers(self):
        layers = torch.nn.ModuleList([GATConv(CHANNELS, CHANNELS), GATv2Conv(CHANNELS, CHANNELS)])

        def function(x, base):
            return chain(x[:, 0], base, *layers)

        compiled = torch.compile(function, fullgraph=True)
        for seed in range(2):
            torch.testing.assert_close(
                with_gradient(compiled)(*inputs(seed)), with_gradient(function)(*inputs(seed)), atol=1e-4, rtol=1e-4
            )

    @pytest.mark.parametrize("how", ["aot_function", "make_fx"])
    def test_traced_without_dynamo(self, how):
        x, base = inputs(0)
        if how == "make_fx":
            traced = make_fx(lambda x, base: self.function(x, base), tracing_mode="fake")(x, base)
        else:
            traced = functorch.compile.aot_function(self.function, fw_compiler=functorch.compile.nop)
        for seed in range(3):
            torch.testing.assert_close(traced(*inputs(seed)), self.function(*inputs(seed)))

    def test_handed_out(self):
        """What was attended over inside, and written to since, is a graph like any other outside."""

        def function(x, base):
            first = (base * 7 + 3) % NODES
            out = attention(x, first)
            return out, following(first, out)

        x, base = inputs(0)
        with torch.no_grad():
            _, edge_index = torch.compile(function, fullgraph=True)(x, base)
            torch.testing.assert_close(attention(x, edge_index), attention(x, edge_index.clone()))


class TestAGraphFromOutside:
    def test_is_laid_out_once(self, layouts):
        conv = GATConv(CHANNELS, CHANNELS)
        compiled = torch.compile(conv, fullgraph=True)
        edge_index = random_edge_index(NODES, num_edges=EDGES)
        for _ in range(3):
            compiled(torch.randn(NODES, CHANNELS), edge_index).sum().backward()
        assert len(layouts) == 1

    @pytest.mark.parametrize("edge_dim", [None, 3])
    @pytest.mark.parametrize("layer", [GATConv, GATv2Conv, TransformerConv])
    def test_is_laid_out_once_for_all_layers(self, layer, edge_dim, layouts):
        """Self-loops, which the first two put in, included: with edge features, the program itself does."""
        convs = torch.nn.ModuleList([layer(CHANNELS, CHANNELS, edge_dim=edge_dim) for _ in range(3)])

        @torch.compile(fullgraph=True, dynamic=True)
        def model(x, edge_index, *features):
            for conv in convs:
                x = conv(x, edge_index, *features)
            return x

        for number in range(1, 4):
            edge_index = random_edge_index(NODES, num_edges=EDGES + number)
            features = () if edge_dim is None else (torch.randn(edge_index.size(1), edge_dim),)
            model(torch.randn(NODES, CHANNELS), edge_index, *features).sum().backward()
            assert len(layouts) == number

    def test_is_laid_out_again_when_it_was_edited(self, layouts):
        compiled = torch.compile(attention, fullgraph=True)
        x, edge_index = inputs(0)
        edits = (
            lambda: edge_index.fill_(1),
            lambda: edge_index.data.random_(NODES),  # changes no version
            lambda: torch.compile(lambda index: index.copy_((index + 1) % NODES))(edge_index),
        )
        for number, edit in enumerate(edits, start=1):
            torch.testing.assert_close(compiled(x, edge_index), attention(x, edge_index.clone()))
            before = len(layouts)
            compiled(x, edge_index)
            assert len(layouts) == before
            edit()
            compiled(x, edge_index)
            assert len(layouts) == before + 1, number

    def test_written_to_inside(self):
        def function(x, edge_index):
            first = attention(x, edge_index)
            edge_index.copy_(following(edge_index, first))
            return attention(first, edge_index), edge_index + 0

        x, edge_index = inputs(0)
        compiled, eager = edge_index.clone(), edge_index.clone()
        with torch.no_grad():
            for _ in range(2):
                found = torch.compile(function, fullgraph=True)(x, compiled)
                torch.testing.assert_close(found, function(x, eager))
                torch.testing.assert_close(attention(x, compiled), attention(x, eager))


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")  # 2.11's, where it gives up
class TestSizesAtRunTime:
    """Where the compiler cannot know a number of edges, the kernels count."""

    terms = {
        "edge": (HEADS, CHANNELS),
        "bias": (HEADS,),
        "edge_value": (HEADS, CHANNELS),
    }

    @pytest.mark.parametrize(
        ("backend", "name"), mostly_slow([*(("cpu", name) for name in terms), ("triton", "bias")], every=3)
    )
    def test_too_few_rows(self, name, backend):
        """How many loops go out is only known when the edges are."""
        loops = torch.stack([torch.arange(NODES)] * 2)

        @torch.compile(fullgraph=True, backend="aot_eager")
        def function(x, edge_index, term):
            graph = SparseGraph(edge_index, num_sources=NODES, num_targets=NODES, self_loops=True)
            return attend(x, x, x, graph, backend=backend, **{name: term})

        x = inputs(0)[0]
        edge_index = torch.cat([without_loops(40), loops], 1)
        right = torch.randn(40 + NODES, *self.terms[name])
        function(x, edge_index, right)
        for wrong in (1, 10, 39 + NODES, 41 + NODES):
            with pytest.raises(ValueError, match=rf"{name} has shape \[{wrong}, .*\[{40 + NODES}, "):
                function(x, edge_index, torch.randn(wrong, *self.terms[name]))

    @pytest.mark.parametrize(
        ("backend", "name"), mostly_slow([("cpu", "edge_value"), ("cpu", "bias"), ("reference", "bias")], every=3)
    )
    def test_too_few_rows_where_it_shows(self, name, backend):
        @torch.compile(backend="aot_eager")
        def function(x, edge_index, term):
            return attend(x, x, x, edge_index, backend=backend, **{name: term})

        x, edge_index = inputs(0)
        for wrong in (1, EDGES - 1):
            with pytest.raises(ValueError, match=rf"{name} must have one entry per edge.*\[{EDGES}, .*got \[{wrong}, "):
                function(x, edge_index, torch.randn(wrong, *self.terms[name]))

    @pytest.mark.parametrize("backend", ["cpu", "triton"])
    def test_a_mask_of_one_per_edge(self, backend):
        """Told from one per head though the number of edges is not known."""

        @torch.compile(fullgraph=True, backend="aot_eager")
        def function(x, edge_index, mask):
            return attend(
                x,
                x,
                x,
                SparseGraph(edge_index, num_sources=NODES, num_targets=NODES, self_loops=True),
                mask=mask,
                backend=backend,
            )

        x, edge_index = inputs(0)[0], without_loops(40)
        mask = torch.rand(40 + NODES) < 0.5
        graph = SparseGraph(edge_index, num_sources=NODES, num_targets=NODES, self_loops=True)
        torch.testing.assert_close(
            function(x, edge_index, mask), attend(x, x, x, graph, mask=mask, backend="reference")
        )


@pytest.mark.parametrize("bad", [-1, NODES, 10**12])
def test_indices_out_of_range(bad):
    """The compiler cannot look at them; the kernels do."""
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    x, edge_index = inputs(0)
    compiled(x, edge_index)
    edge_index[1, 3] = bad
    with pytest.raises(IndexError, match="edge_index holds"):
        compiled(x, edge_index)


@pytest.mark.parametrize("row", [0, 2])
def test_negative_numbers_do_not_count_from_the_end(row):
    """As they would for the compiler's own gathers."""
    table, (x, edge_index) = torch.randn(3, HEADS, CHANNELS), inputs(0)

    def function(edge_index, types):
        return attend(x, x, x, edge_index, edge_value=Typed(table, types), backend="reference")

    types = torch.randint(3, (EDGES,))
    compiled = torch.compile(function, fullgraph=True)
    torch.testing.assert_close(compiled(edge_index, types), function(edge_index, types))
    [*edge_index, types][row][3] = -1
    with pytest.raises(RuntimeError, match="edge_index holds a source" if row == 0 else "types of edges hold a type"):
        compiled(edge_index, types)


@pytest.mark.skipif(IS_OLDEST, reason="its compiler loses fake tensors in edge_index[:, mask] inside a transform")
def test_transforms_inside():
    x, edge_index = inputs(0)
    square = torch.func.grad(lambda x: attention(x, edge_index).square().sum())
    torch.testing.assert_close(torch.compile(square, fullgraph=True, backend="aot_eager")(x), square(x))
    graphs = torch.stack([edge_index, edge_index.flip(0)])
    batch = torch.vmap(lambda edges: attend(x, x, x, edges, backend="reference"))
    torch.testing.assert_close(torch.compile(batch, fullgraph=True, backend="aot_eager")(graphs), batch(graphs))


class TestDropout:
    def test_is_drawn_anew_in_every_call(self):
        compiled = torch.compile(
            lambda x, edge_index: attend(x, x, x, edge_index, dropout=0.5, training=True, return_weights="dropped"),
            fullgraph=True,
        )
        x, edge_index = inputs(0)
        source, target = edge_index
        kept = []
        for _ in range(3):
            out, weights = compiled(x, edge_index)
            expected = torch.zeros_like(out).index_add(0, target, weights.unsqueeze(-1) * x[source])
            torch.testing.assert_close(out, expected)
            kept.append(weights != 0)
        assert not torch.equal(kept[0], kept[1])
        assert 0.3 < torch.stack(kept).float().mean() < 0.7


def test_a_state_dict_in_functional_calls():
    conv = GATConv(CHANNELS, CHANNELS)
    x, edge_index = inputs(0)
    doubled = {name: parameter * 2 for name, parameter in conv.state_dict().items()}
    other = GATConv(CHANNELS, CHANNELS)
    other.load_state_dict(doubled)
    out = torch.func.functional_call(conv, doubled, (x[:, 0], edge_index))
    torch.testing.assert_close(out, other(x[:, 0], edge_index))
    with gattn.backend("cpu"):
        torch.testing.assert_close(torch.func.functional_call(conv, doubled, (x[:, 0], edge_index)), out)


@pytest.mark.skipif(native.load_error() is not None, reason="needs the CPU kernels")
def test_compiling_is_not_exporting(monkeypatch):
    """PyTorch 2.11 answers its public question with yes in any compiled code; the kernels are used all the same."""
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    monkeypatch.setattr(gattn.attention.Attention, "_by_messages", lambda self, call: pytest.fail("the reference"))
    attention(*inputs(0))


@pytest.mark.parametrize("name", ["EGTLayer", "HANConv", "HGTConv", "SGFormerAttention"])
def test_beside_a_default_device(name):
    """With a default device, tensors' methods that are written in Python cannot be compiled, but functions can."""
    layer, arguments = made(name), LAYERS[name].inputs(Draw())
    expected = tensors(layer(*arguments))
    with torch.device("cpu"):
        found = tensors(torch.compile(layer, fullgraph=True, backend="eager")(*arguments))
    torch.testing.assert_close(found, expected)
