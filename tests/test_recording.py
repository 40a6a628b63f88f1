"""Recording changes nothing, and gathers the very weights that layers return."""

import copy
import multiprocessing
import os
import threading
from contextlib import nullcontext

import pytest
import torch
import torch_geometric.nn as pyg
from torch.nn import Module, Sequential
from torch_geometric.nn import Sequential as GraphSequential
from torch_geometric.utils import to_torch_coo_tensor, to_torch_csr_tensor

import gattn
from gattn import recording
from gattn.edges import vectors_of
from gattn.ops import plans
from gattn.ops.call import NO_SCORE
from gattn.recording import record_attention
from gattn.testing import random_edge_index
from tests import layers
from tests.layers import Draw, made

CALL = Module.__call__
NODES, EDGES = 9, 30
TOKENS = torch.tensor([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]])


class Functional(Module):
    """Calls gattn.attend itself."""

    def forward(self, x, edge_index):
        x = x.unflatten(-1, (2, -1))
        return gattn.attend(x, x, x, edge_index, dropout=0.5, training=self.training).flatten(-2)


class Stack(Module):
    """Layers that are called in many ways: by name, from a list, twice, functionally."""

    def __init__(self):
        super().__init__()
        self.conv = gattn.nn.GATConv(8, 4, heads=2, dropout=0.5)
        self.more = torch.nn.ModuleList([Functional(), gattn.nn.GATv2Conv(8, 8)])
        self.block = gattn.nn.GPSConv(8, gattn.nn.TransformerConv(8, 8), heads=2, attn_kwargs={"dropout": 0.5})
        self.same = self.conv

    def forward(self, x, edge_index):
        x = self.conv(x, edge_index)
        for layer in self.more:
            x = layer(x, edge_index)
        return self.same(self.block(x, edge_index), edge_index)


def graph_inputs():
    return torch.randn(NODES, 8), random_edge_index(NODES, num_edges=EDGES)


MODELS = {
    "stack": (Stack, graph_inputs),
    "gat": (lambda: gattn.models.GAT(8, 8, 3, 5, heads=4, dropout=0.5), graph_inputs),
    "lm": (lambda: gattn.models.TransformerLM(6, 16, 2, dropout=0.5), lambda: (TOKENS,)),
    "transformer": (lambda: gattn.models.TransformerSeq2Seq(6, 6, 16, 1, 4), lambda: (TOKENS, TOKENS[:, :3])),
    "recurrent": (lambda: gattn.models.Seq2Seq(6, 6, 4, 8, dropout=0.5), lambda: (TOKENS, TOKENS[:, :3])),
    "hard": (lambda: gattn.models.Seq2Seq(6, 6, 4, 8, attention="hard"), lambda: (TOKENS, TOKENS[:, :3])),
}


@pytest.fixture(params=MODELS)
def model_and_inputs(request):
    make, inputs = MODELS[request.param]
    return make(), inputs()


@pytest.fixture(autouse=True)
def nothing_is_left():
    forwards = [cls.forward for cls in (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer, pyg.GATConv)]
    yield
    assert recording._recorders == ()
    assert recording._patches == {}
    assert Module.__call__ is CALL
    assert forwards == [
        cls.forward for cls in (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer, pyg.GATConv)
    ]


def run(model, inputs):
    """Output, gradients, and where the random numbers are afterwards."""
    torch.manual_seed(1)
    model.zero_grad()
    out = model(*inputs)
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    return out, [p.grad for p in model.parameters()], torch.get_rng_state()


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("training", [False, True])
def test_changes_nothing(model_and_inputs, training, backend):
    model, inputs = model_and_inputs
    model.train(training)
    with gattn.backend(backend):
        out, gradients, state = run(model, inputs)
        with record_attention(model) as records:
            recorded, recorded_gradients, recorded_state = run(model, inputs)
    assert records
    assert torch.equal(recorded, out)
    assert torch.equal(recorded_state, state)
    for actual, expected in zip(recorded_gradients, gradients, strict=True):
        assert (actual is None and expected is None) or torch.equal(actual, expected)
    assert all(module.training == training for module in model.modules())


def test_names_and_shapes():
    model, inputs = Stack().eval(), graph_inputs()
    with record_attention(model) as records:
        model(*inputs)
    edges = int((inputs[1][0] != inputs[1][1]).sum()) + NODES  # with self-loops
    assert {name: [tuple(call.weights.shape) for call in calls] for name, calls in records.items()} == {
        "conv": [(edges, 2), (edges, 2)],  # the layer has two names and counts under the first
        "more.0": [(EDGES, 2)],
        "more.1": [(edges, 1)],
        "block.attn": [(2, NODES, NODES)],
        "block.conv": [(EDGES, 1)],
    }
    assert list(records) == ["conv", "more.0", "more.1", "block.conv", "block.attn"]


def test_names_of_an_encoder_and_decoder():
    model = gattn.models.TransformerSeq2Seq(6, 6, 16, 1, 4).eval()
    with record_attention(model) as records:
        model(TOKENS, TOKENS[:, :3])
    shapes = {name.split("layers.")[1]: calls[0].weights.shape for name, calls in records.items()}
    assert set(shapes) == {"0.self_attn", "0.multihead_attn"}
    assert shapes["0.multihead_attn"] == (2, 4, 3, 5)
    assert len(records) == 3


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("conv", [gattn.nn.GATConv, gattn.nn.GATv2Conv, gattn.nn.TransformerConv])
def test_weights_are_those_that_layers_return(conv, flow):
    x, edge_index = graph_inputs()
    layer = conv(8, 4, heads=3, flow=flow).eval()
    with record_attention(layer) as records:
        layer(x, edge_index)
    (call,) = records[""]
    _, (edges, weights) = layer(x, edge_index, return_attention_weights=True)
    assert torch.equal(call.weights, weights)
    source, target = edges if flow == "source_to_target" else edges.flip(0)
    assert torch.equal(call.edge_index, torch.stack([source, target]))
    total = torch.zeros(NODES, 3).index_add(0, call.edge_index[1], call.weights)
    torch.testing.assert_close(total[call.edge_index[1]], torch.ones(len(target), 3))


def test_weights_of_complete_and_packed_graphs():
    x = torch.randn(2, 5, 8)
    layer = gattn.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    with record_attention(layer) as records:
        layer(x, x, x, need_weights=False, is_causal=True)
        layer(x[0], x[0], x[0], need_weights=False, graph=gattn.CompleteGraph.packed([2, 3]))
    causal, packed = records[""]
    expected = layer(x, x, x, average_attn_weights=False, is_causal=True)[1]
    assert torch.equal(causal.weights, expected)
    assert (causal.weights.triu(1) == 0).all()
    assert causal.graph.causal
    assert causal.edge_index is None
    assert [tuple(block.shape) for block in packed.weights] == [(2, 2, 2), (2, 3, 3)]
    alone = layer(x[:1, :2], x[:1, :2], x[:1, :2], average_attn_weights=False)[1]
    torch.testing.assert_close(packed.weights[0], alone[0])


@pytest.mark.parametrize("form", ["csr", "graph"])
def test_other_forms_of_a_graph(form):
    x, edge_index = graph_inputs()
    edge_index = torch.unique(edge_index, dim=1)
    values = torch.ones(edge_index.size(1))
    adjacency = torch.sparse_coo_tensor(edge_index.flip(0), values, (NODES, NODES)).to_sparse_csr()
    graph = adjacency if form == "csr" else gattn.SparseGraph(edge_index)
    layer = gattn.nn.TransformerConv(8, 4).eval()
    with record_attention(layer) as records:
        layer(x, graph)
        gattn.attend(x.unsqueeze(1), x.unsqueeze(1), x.unsqueeze(1), graph)  # no layer of this model
    (call,) = records[""]
    target = call.edge_index[1]
    assert call.weights.shape == (target.numel(), 1)
    torch.testing.assert_close(
        torch.zeros(NODES).index_add(0, target, call.weights[:, 0])[target], torch.ones(len(target))
    )


@pytest.mark.parametrize("layer", ["DNAConv", "HGTConv", "GATConv", "FAConv"])
def test_edits_of_a_record_do_not_change_later_calls(layer):
    edges, x = random_edge_index(6, num_edges=20), torch.randn(6, 4)
    kind = ("a", "to", "a")
    conv, inputs = {
        "DNAConv": lambda: (gattn.nn.DNAConv(4), (x.unsqueeze(1), edges)),
        "HGTConv": lambda: (gattn.nn.HGTConv(4, 4, (["a"], [kind])), ({"a": x}, {kind: edges})),
        "GATConv": lambda: (gattn.nn.GATConv(4, 4), (x, edges)),
        "FAConv": lambda: (gattn.nn.FAConv(4), (x, x, edges)),
    }[layer]()
    with gattn.record_attention(conv) as records:
        expected = conv(*inputs)
    records[""][0].graph.edge_index.zero_()
    torch.testing.assert_close(conv(*inputs), expected)


def test_dropout_comes_after():
    x, edge_index = graph_inputs()
    layer = gattn.nn.GATConv(8, 4, dropout=0.5)
    with record_attention(layer) as records:
        layer(x, edge_index)
        _, (_, dropped) = layer(x, edge_index, return_attention_weights=True)
    layer.eval()
    _, (_, weights) = layer(x, edge_index, return_attention_weights=True)
    plain, asked = records[""]
    assert torch.equal(plain.weights, weights)
    assert torch.equal(asked.weights, dropped)
    assert (dropped == 0).any()


def test_detaches_unless_told_otherwise():
    x, edge_index = graph_inputs()
    layer = gattn.nn.GATConv(8, 4)
    with record_attention(layer) as records, record_attention(layer, detach=False) as attached:
        layer(x, edge_index)
    assert not records[""][0].weights.requires_grad
    attached[""][0].weights.square().sum().backward()
    assert layer.att_src.grad.abs().sum() > 0


def test_calls_blocks_and_models_side_by_side():
    x, edge_index = graph_inputs()
    layer, other = gattn.nn.GATConv(8, 4), gattn.nn.GATConv(8, 4)
    model = GraphSequential("x, edge_index", [(layer, "x, edge_index -> x")])
    with record_attention(model) as outer:
        model(x, edge_index)
        with record_attention(layer) as inner:
            model(x, edge_index)
            other(x, edge_index)
        model(x, edge_index)
    model(x, edge_index)
    assert {name: len(calls) for name, calls in outer.items()} == {"module_0": 3}
    assert {name: len(calls) for name, calls in inner.items()} == {"": 1}


def test_each_step_of_decoding_is_recorded():
    model = gattn.models.TransformerLM(6, 16, 1, context=8)
    with record_attention(model.eval()) as records:
        model.generate(TOKENS[:1, :2], 3)
    assert [tuple(call.weights.shape) for call in records["layers.0.self_attn"]] == [
        (1, 4, 2, 2),
        (1, 4, 1, 3),
        (1, 4, 1, 4),
    ]


class Failing(Module):
    def forward(self, x, edge_index):
        raise RuntimeError("as expected")


def test_exceptions_restore_everything():
    x, edge_index = graph_inputs()
    steps = [(Functional().eval(), "x, edge_index -> x"), (Failing(), "x, edge_index -> x")]
    model = GraphSequential("x, edge_index", steps)
    with pytest.raises(RuntimeError, match="as expected"), record_attention(model) as records:
        model(x, edge_index)
    assert recording._recorders == ()
    model[0](x, edge_index)
    assert {name: len(calls) for name, calls in records.items()} == {"module_0": 1}


def test_threads_keep_to_themselves():
    x, edge_index = graph_inputs()
    models = [Sequential() for _ in range(3)]
    for number, model in enumerate(models):
        model.add_module(f"functional{number}", Functional().eval())
    results, barrier = {}, threading.Barrier(len(models))

    def work(number):
        with record_attention(models[number]) as records:
            for _ in range(20):
                barrier.wait()
                models[number][0](x, edge_index)
            barrier.wait()
        results[number] = {name: len(calls) for name, calls in records.items()}

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: {f"functional{number}": 20} for number in range(len(models))}


def test_a_functional_call_in_another_thread_is_not_taken_for_a_layers():
    x, edge_index = graph_inputs()
    q = x.unsqueeze(1)

    class Waiting(Module):
        def forward(self):
            thread = threading.Thread(target=gattn.attend, args=(q, q, q, edge_index))
            thread.start()
            thread.join()

    model = Waiting()
    with pytest.raises(ValueError, match="no attention layer"), record_attention(model) as records:
        model()
    assert not records


@pytest.mark.parametrize(("cls", "name"), [(Module, "__call__"), (torch.nn.MultiheadAttention, "forward")])
@pytest.mark.parametrize("leaves_first", ["recording", "other"])
def test_another_tool_replaces_the_same_method(cls, name, leaves_first):
    """Whoever leaves first, the other goes on, nothing is recorded twice, and everything is restored in the end."""
    layer, x, seen = torch.nn.MultiheadAttention(8, 2), torch.randn(5, 8), []
    original, recorder = getattr(cls, name), record_attention(layer)
    records = recorder.__enter__()
    inner = getattr(cls, name)

    def other(self, *args, **kwargs):
        seen.append(self)
        return inner(self, *args, **kwargs)

    setattr(cls, name, other)
    try:
        layer(x, x, x)
        assert seen[0] is layer
        assert len(records[""]) == 1
        if leaves_first == "recording":
            recorder.__exit__(None, None, None)
            seen.clear()
            with record_attention(layer) as more:
                layer(x, x, x)
            assert seen[0] is layer
            assert len(more[""]) == len(records[""]) == 1
    finally:
        setattr(cls, name, inner)
    if leaves_first == "other":
        recorder.__exit__(None, None, None)
    layer(x, x, x)
    assert getattr(cls, name) is original


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_process_that_is_forked_while_another_thread_starts_to_record():
    with recording._lock:
        process = multiprocessing.get_context("fork").Process(target=record_in_a_fork)
        thread = threading.Thread(target=process.start)
        thread.start()
        thread.join()
    process.join(10)
    process.kill()
    assert process.exitcode == 0


def record_in_a_fork():
    with record_attention(gattn.nn.GATConv(8, 4)):
        pass


def test_needs_a_module_that_is_not_compiled():
    with pytest.raises(TypeError, match="got function"), record_attention(lambda x: x):
        pass
    layer = gattn.nn.GATConv(8, 4)
    with pytest.raises(ValueError, match="before|given to torch.compile"), record_attention(torch.compile(layer)):
        pass
    model = Sequential(layer)
    layer.compile()
    with pytest.raises(ValueError, match="given to torch.compile"), record_attention(model):
        pass


def test_compiles_without_a_break_beside_it():
    x, edge_index = graph_inputs()
    layer = gattn.nn.GATConv(8, 4).eval()
    expected = layer(x, edge_index)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, edge_index), expected)
    with record_attention(gattn.nn.GATConv(8, 4)) as records:
        torch.testing.assert_close(compiled(x, edge_index), expected)
    assert not records


class Halves(gattn.attention.Attention):
    """A user's layer that weighs and sums by itself, by functions or by its own methods."""

    def __init__(self, change, functional):
        super().__init__()
        self.change, self.functional = change, functional

    def forward(self, x, graph):
        q = x.unflatten(-1, (2, -1))
        weigh, aggregate = (gattn.weigh, gattn.aggregate) if self.functional else (self.weigh, self.weighted_sum)
        gattn.weigh(q, q, graph, distribution=None)  # logits are no weights
        applied = self.change(weigh(q, q, graph))
        self.applied = [] if applied is None else [applied, aggregate(applied, q, graph), aggregate(applied, q, graph)]
        return x


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("change", "count"),
    [
        (lambda alpha: alpha, 2),
        (lambda alpha: [block * 2 for block in alpha] if isinstance(alpha, list) else alpha * 2, 3),
        (lambda alpha: None, 1),
    ],
    ids=["as they are", "changed", "not applied"],
)
def test_weights_and_sums_of_a_users_layer(change, count, packed, functional):
    """Each sum has a record, and so have weights, except that the first sum with them shares theirs."""
    x, edge_index = graph_inputs()
    graph = gattn.CompleteGraph.packed([4, 5]) if packed else gattn.SparseGraph(edge_index, NODES, NODES)
    model = Halves(change, functional)
    with record_attention(model) as records, record_attention(model, detach=False) as attached:
        model(x.requires_grad_(), graph)
    q = x.unflatten(-1, (2, -1))
    alpha = gattn.weigh(q, q, graph)
    assert [len(records[""]), len(attached[""])] == [count, count]
    for number, record in enumerate(records[""]):
        expected = alpha if number == 0 else model.applied[0]
        for pair in zip(record.weights, expected, strict=True):
            assert torch.equal(*pair)
        if number > 0:
            torch.testing.assert_close(weighted(record, q), model.applied[number - count])


# Every layer ---------------------------------------------------------------------------------------------------------


def weighted(record, value, edge_value=None):
    """The sums of values, `[..., M, H, C]`, with recorded weights, `[..., N, H, C]`, in plain PyTorch."""
    weights, graph = record
    if isinstance(weights, list):
        sizes = [matrix.shape[-2:] for matrix in weights]
        pieces = value.split([m for _, m in sizes], -3)
        return torch.cat([torch.einsum("hnm,mhc->nhc", *pair) for pair in zip(weights, pieces, strict=True)])
    if graph.is_dense:
        return torch.einsum("...hnm,...mhc->...nhc", weights, value)
    source, target = record.edge_index.long()
    vectors = value.index_select(-3, source) + (0 if edge_value is None else edge_value)
    messages = weights.unsqueeze(-1) * vectors
    return messages.new_zeros(*messages.shape[:-3], graph.num_targets, *messages.shape[-2:]).index_add(
        -3, target, messages
    )


def is_applied_by(record, call, result):
    """Whether a call of the core is the sum with these weights."""
    ends = "num_targets", "num_sources"
    if call.graph.is_dense != record.graph.is_dense or call.value.size(-1) == 0:
        return False
    if any(getattr(call.graph, end) != getattr(record.graph, end) for end in ends):
        return False
    terms = call.vectors_of_values
    try:
        value = call.value.repeat_interleave(call.heads // call.value.size(-2), -2)
        expected = weighted(record, value, None if terms is None else vectors_of(terms))
    except RuntimeError:  # of other sizes
        return False
    expected = expected if call.out_bias is None else expected + call.out_bias
    return expected.shape == result.out.shape and torch.allclose(result.out, expected, rtol=1e-9, atol=1e-9)


@pytest.fixture
def core(monkeypatch):
    """All calls that the core computes, with their results."""
    calls, compute = [], gattn.attention.Attention._compute

    def kept(self, call, *args, **options):
        result = compute(self, call, *args, **options)
        calls.append((call, result))
        return result

    monkeypatch.setattr(gattn.attention.Attention, "_compute", kept)
    monkeypatch.setattr(plans, "given", lambda *args, **options: None)
    return calls


@pytest.mark.parametrize("name", [*layers.LAYERS, *layers.MODELS])
def test_recorded_weights_are_those_that_every_layer_applies(name, core):
    """Each record times the values of a call of the core is its output, and each such call has its record."""
    layer, inputs = made(name), layers.row(name).inputs(Draw())
    with record_attention(layer) as found:
        layers.row(name).call(layer, *inputs)
    records = [record for calls in found.values() for record in calls]
    if name == "RGATConv":  # whose calls number sources by relation
        records = [record._replace(graph=call.graph) for record in records for call, _ in core[:1]]
    if name.startswith("SGFormer") or "earlier" in name:  # whose weights are made of those of the core
        assert records
        return
    applied = [[is_applied_by(record, *call) for call in core] for record in records]
    assert all(map(any, applied))
    for number, (call, _) in enumerate(core):
        is_attention = call.score is not NO_SCORE and call.weights != "only" and call.value.size(-1) > 0
        assert not is_attention or any(calls[number] for calls in applied)


@pytest.mark.parametrize("name", [*layers.LAYERS, *layers.MODELS])
def test_recording_changes_no_bit_of_any_layer(name):
    layer, inputs = made(name, torch.float), layers.row(name).inputs(Draw(torch.float))
    found = []
    for block in (nullcontext, lambda: record_attention(layer)):
        torch.manual_seed(0)
        with block():
            outs = layers.tensors(layers.row(name).call(layer, *inputs))
        ends, leaves = [out.sum() for out in outs if out.requires_grad], list(layer.parameters())
        gradients = torch.autograd.grad(sum(ends), leaves, allow_unused=True) if ends and leaves else ()
        found.append(outs + [gradient for gradient in gradients if gradient is not None])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("graph", ["whole", "masked", "packed"])
@pytest.mark.parametrize("norm", ["row", "frobenius"])
def test_sgformers_weights_are_those_of_its_equation(norm, graph):
    layer = gattn.nn.SGFormerAttention(8, 2, 4, norm=norm).double()
    x = torch.randn(*[2] * (graph != "packed"), 6, 8, dtype=torch.double)
    mask = torch.arange(6) < torch.tensor([[6], [4]]) if graph == "masked" else None
    with record_attention(layer) as records:
        out = layer(x, mask, graph=gattn.CompleteGraph.packed([2, 4]) if graph == "packed" else None)
    (record,) = records[""]
    found = weighted(record, layer.v(x).unflatten(-1, (2, 4))).mean(-2)
    torch.testing.assert_close(found[mask] if graph == "masked" else found, out[mask] if graph == "masked" else out)
    for matrix in record.weights:
        torch.testing.assert_close(matrix.sum(-1), torch.ones_like(matrix[..., 0]))


# Layers of PyG and PyTorch -------------------------------------------------------------------------------------------


class PyGStack(Module):
    """PyG's layers, called in each of their ways, and PyTorch's inside of one."""

    def __init__(self):
        super().__init__()
        self.gat = pyg.GATConv(8, 4, heads=2, dropout=0.5)
        self.gatv2 = pyg.GATv2Conv(8, 8, dropout=0.5)
        self.transformer = pyg.TransformerConv(8, 4, heads=2, dropout=0.5)
        self.fa = pyg.FAConv(8, dropout=0.5)
        self.gps = pyg.GPSConv(8, pyg.GATConv(8, 8), heads=2, attn_kwargs={"dropout": 0.5})

    def forward(self, x, edge_index):
        start = x
        x, _ = self.gat(x, edge_index, return_attention_weights=True)
        x = self.gatv2(x, edge_index)
        x = self.fa(self.transformer((x, x), edge_index=edge_index), start, edge_index)
        return self.gps(x, edge_index)


def encoder(**options):
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=not options)


def sequences():
    return (torch.randn(3, 5, 8),)


OTHERS = {
    "pyg": (PyGStack, graph_inputs),
    "encoder": (encoder, sequences),
    "norm first": (lambda: encoder(norm_first=True), sequences),
    "transformer": (
        lambda: torch.nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
        lambda: (torch.randn(3, 5, 8),) * 2,
    ),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("training", [False, True])
def test_others_layers_change_nothing(name, training):
    make, inputs = OTHERS[name]
    model, inputs = make().train(training), inputs()
    out, gradients, state = run(model, inputs)
    with record_attention(model) as records:
        recorded, recorded_gradients, recorded_state = run(model, inputs)
    assert all(calls for calls in records.values())
    assert torch.equal(recorded, out)
    assert torch.equal(recorded_state, state)
    assert all(torch.equal(*pair) for pair in zip(recorded_gradients, gradients, strict=True))


def test_pyg_layers_by_name():
    model, inputs = PyGStack().eval(), graph_inputs()
    with record_attention(model) as records:
        model(*inputs)
    assert list(records) == ["gat", "gatv2", "transformer", "fa", "gps.conv", "gps.attn"]
    for name in ("gat", "gatv2", "transformer", "gps.conv"):
        (call,) = records[name]
        assert (call.graph.num_sources, call.graph.num_targets) == (NODES, NODES)
        target = call.edge_index[1]
        total = torch.zeros(NODES, call.weights.size(1)).index_add(0, target, call.weights)
        torch.testing.assert_close(total[target], torch.ones(len(target), call.weights.size(1)))
    assert records["fa"][0].weights.shape == (records["fa"][0].edge_index.size(1), 1)
    assert records["gps.attn"][0].weights.shape == (1, 2, NODES, NODES)


@pytest.mark.parametrize("form", ["edge_index", "csr", "coo", "flow"])
def test_pyg_weights_are_those_of_the_same_edges(form):
    x = torch.randn(NODES, 8)
    edge_index = torch.unique(random_edge_index(NODES, num_edges=EDGES), dim=1)
    ours = gattn.nn.GATConv(8, 4, heads=3, add_self_loops=False).eval()
    theirs = pyg.GATConv(8, 4, heads=3, add_self_loops=False).eval()
    graph = edge_index
    if form in ("csr", "coo"):
        transposed = {"csr": to_torch_csr_tensor, "coo": to_torch_coo_tensor}[form]
        graph = transposed(edge_index.flip(0), size=(NODES, NODES))
    if form == "flow":
        theirs.flow, graph = "target_to_source", edge_index.flip(0)
    theirs.load_state_dict(ours.state_dict())
    with record_attention(ours) as expected, record_attention(theirs) as actual:
        torch.testing.assert_close(ours(x, edge_index), theirs(x, graph))

    def matrix(record):
        source, target = record.edge_index
        return torch.zeros(NODES, NODES, 3).index_put((target, source), record.weights, accumulate=True)

    torch.testing.assert_close(matrix(actual[""][0]), matrix(expected[""][0]))


def test_a_bipartite_graph_of_pyg_has_its_sizes():
    layer = pyg.GATv2Conv((8, 4), 4, add_self_loops=False)
    with record_attention(layer) as records:
        layer((torch.randn(5, 8), torch.randn(7, 4)), torch.tensor([[0, 1], [1, 0]]))
    graph = records[""][0].graph
    assert (graph.num_sources, graph.num_targets) == (5, 7)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_torch_multihead_weights(training, need_weights):
    layer = torch.nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True).train(training)
    query, key = torch.randn(3, 4, 8), torch.randn(3, 6, 8)
    padding = torch.arange(6) >= torch.tensor([[6], [4], [1]])
    with record_attention(layer) as records, record_attention(layer, detach=False) as attached:
        layer(query, key, key, padding, need_weights=need_weights)
    weights = layer.eval()(query, key, key, padding, average_attn_weights=False)[1]
    (call,) = records[""]
    torch.testing.assert_close(call.weights, weights)
    assert (call.graph.num_targets, call.graph.num_sources, call.edge_index) == (4, 6, None)
    assert not call.weights.requires_grad
    attached[""][0].weights.square().sum().backward()
    assert layer.in_proj_weight.grad.abs().sum() > 0


def test_torch_causal_attention():
    layer, x = torch.nn.MultiheadAttention(8, 2), torch.randn(5, 8)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(5)
    with record_attention(layer) as records:
        layer(x, x, x, attn_mask=mask, need_weights=False, is_causal=True)
    (call,) = records[""]
    assert call.graph.causal
    assert call.weights.shape == (2, 5, 5)
    assert (call.weights.triu(1) == 0).all()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("options", [{}, {"norm_first": True}])
@pytest.mark.parametrize("is_padded", [False, True])
def test_torch_fast_path_is_recorded(options, is_padded):
    model, (x,) = encoder(**options).eval(), sequences()
    padding = torch.arange(5) >= torch.tensor([[5], [3], [1]]) if is_padded else None
    with torch.no_grad():
        out = model(x, src_key_padding_mask=padding)
        with record_attention(model) as records:
            torch.testing.assert_close(model(x, src_key_padding_mask=padding), out, rtol=0, atol=0)
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with record_attention(model) as slow:
                model(x, src_key_padding_mask=padding)
        finally:
            torch.backends.mha.set_fastpath_enabled(before)
    assert list(records) == list(slow) == ["layers.0.self_attn", "layers.1.self_attn"]
    real = torch.ones(3, 5, dtype=torch.bool) if padding is None else ~padding
    for name, (call,) in records.items():
        assert len(slow[name]) == 1
        for row, weights, expected in zip(real, call.weights, slow[name][0].weights, strict=True):
            torch.testing.assert_close(weights[:, row][:, :, row], expected[:, row][:, :, row])


def test_a_copy_that_is_made_while_recording_is_a_layer_of_its_own():
    x, edge_index = graph_inputs()
    layer = pyg.GATConv(8, 4)
    with record_attention(layer) as records:
        other = copy.deepcopy(layer)
        torch.nn.init.zeros_(other.lin.weight)
        assert (other(x, edge_index) == 0).all()
        assert not records
        layer(x, edge_index)
    assert len(records[""]) == 1


def test_subclasses_of_others_layers():
    class Scaled(pyg.GATConv):
        def forward(self, x, edge_index, scale=2.0):
            return super().forward(x, edge_index) * scale

    x, edge_index = graph_inputs()
    layer = Scaled(8, 4).eval()
    expected = layer(x, edge_index)
    with record_attention(layer) as records:
        torch.testing.assert_close(layer(x, edge_index), expected)
    assert len(records[""]) == 1


def test_errors_restore_others_layers():
    x, edge_index = graph_inputs()
    layer = pyg.GATConv(8, 4)
    with pytest.raises(ValueError, match="as expected"), record_attention(Sequential(layer)):
        raise ValueError("as expected")
    with pytest.raises(IndexError), record_attention(layer):
        layer(x, edge_index + NODES)
    assert not isinstance(layer(x, edge_index), tuple)


@pytest.mark.parametrize("model", [torch.nn.Linear(8, 8), pyg.SuperGATConv(8, 8), pyg.GCNConv(8, 8)])
def test_a_model_without_attention_is_an_error(model):
    x, edge_index = graph_inputs()
    inputs = (x,) if isinstance(model, torch.nn.Linear) else (x, edge_index)
    with (
        pytest.raises(ValueError, match="did not run .* or it has no attention .* drop-in"),
        record_attention(model),
    ):
        model(*inputs)
    with pytest.raises(RuntimeError, match="its own"), record_attention(model):
        raise RuntimeError("its own")


@pytest.mark.parametrize("make", [lambda: gattn.nn.GATConv(8, 8), lambda: pyg.GATConv(8, 8)])
def test_a_model_that_did_not_run_has_no_records(make):
    with record_attention(make()) as records:
        pass
    assert records == {}
