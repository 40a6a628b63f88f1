"""HGTConv against PyG's, and what it has beyond."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from allpairspy import AllPairs

import gattn
from gattn.nn.hetero.hgt_conv import HGTConv
from tests.cases import mostly_slow
from tests.nn.against_pyg import FORMS, assert_as_pyg, name_of
from tests.nn.hetero import CHANNELS, EDGE_TYPES, METADATA, SIZES, Called, edges, features

OUT = 8
OPTIONS = {
    # PyG's layer cannot shift an EdgeIndex, and gives a SparseTensor wrong sizes.
    "form": [form for form in FORMS if form not in ("EdgeIndex", "SparseTensor")],
    "in_channels": (CHANNELS, -1),
    "heads": (1, 4),
    "edge_types": ("all", "some", "without edges"),
    "node_types": ("all", "some"),
}


def call(conv, x, graphs):
    return list(conv(x, graphs).values())


def possible(row):
    return len(row) < 5 or row[4] == "all" or row[3] == "some"


@pytest.mark.parametrize("options", list(AllPairs(list(OPTIONS.values()), filter_func=possible)), ids=name_of)
def test_as_pyg(options):
    form, in_channels, heads, edge_types, node_types = options
    graphs = edges(EDGE_TYPES[:3] if edge_types == "some" else EDGE_TYPES)
    if edge_types == "without edges":
        graphs[EDGE_TYPES[1]] = torch.zeros(2, 0, dtype=torch.int64)
    graphs = {name: FORMS[form](index, (SIZES[name[0]], SIZES[name[-1]])) for name, index in graphs.items()}
    x = features()[: 3 if node_types == "all" else 2]
    ours, theirs = (layer(in_channels, OUT, METADATA, heads=heads) for layer in (HGTConv, pyg.HGTConv))
    for conv in (ours, theirs):
        with torch.no_grad():
            conv(dict(zip(SIZES, features(), strict=True)), edges())  # which gives lazy parameters their sizes
        assert list(conv(dict(zip(SIZES, x, strict=False)), graphs)) == ["author", "paper"]
    for parameter in ours.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)  # so that skips and priors differ from one
    ours, theirs = (Called(conv, lambda conv, x: call(conv, x, graphs)) for conv in (ours, theirs))
    assert_as_pyg(ours, theirs, *x)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_graph_is_the_same_graph(form):
    conv = HGTConv(CHANNELS, OUT, METADATA, heads=2)
    x = dict(zip(SIZES, features(), strict=True))
    graphs = {name: FORMS[form](index, (SIZES[name[0]], SIZES[name[-1]])) for name, index in edges().items()}
    torch.testing.assert_close(call(conv, x, graphs), call(conv, x, edges()))


def test_fresh_layers_and_their_words():
    made = []
    for layer in (HGTConv, pyg.HGTConv):
        torch.manual_seed(3)
        made.append(layer(CHANNELS, OUT, METADATA, heads=2))
    ours, theirs = made
    assert str(ours) == str(theirs) == "HGTConv(-1, 8, heads=2)"
    for (name, parameter), (expected_name, expected) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert name == expected_name
        torch.testing.assert_close(parameter, expected, rtol=0, atol=0)
    assert ours.dst_node_types == theirs.dst_node_types
    ours.p_rel["author__reads__paper"].data.fill_(3)
    ours.reset_parameters()
    assert ours.p_rel["author__reads__paper"].eq(1).all()


def test_formula():
    conv = HGTConv(CHANNELS, OUT, METADATA, heads=2).double()
    conv.p_rel["paper__cites__paper"].data = torch.tensor([[0.5, 2.0]], dtype=torch.double)
    conv.skip["author"].data.fill_(0.3)
    x, graphs = dict(zip(SIZES, features(), strict=True)), edges()
    x = {name: value.double() for name, value in x.items()}
    out = conv(x, graphs)
    kqv = {name: conv.kqv_lin.lins[name](value).view(-1, 3, 2, 4) for name, value in x.items()}
    for name in ("author", "paper"):
        for i in range(SIZES[name]):
            sent = []
            for head in range(2):
                logits, values = [torch.zeros(0)], [torch.zeros(1, 4)[:0]]
                for number, (source, relation, target) in enumerate(EDGE_TYPES):
                    if target != name:
                        continue
                    matrix = head * len(EDGE_TYPES) + number
                    prior = conv.p_rel[f"{source}__{relation}__{target}"][0, head]
                    index = graphs[source, relation, target]
                    neighbours = kqv[source][index[0, index[1] == i], :, head]
                    logits.append(neighbours[:, 0] @ conv.k_rel.weight[matrix] @ kqv[name][i, 1, head] * prior / 2)
                    values.append(neighbours[:, 2] @ conv.v_rel.weight[matrix])
                sent.append(torch.cat(logits).softmax(0) @ torch.cat(values).double())
            expected = conv.out_lin.lins[name](F.gelu(torch.cat(sent)))
            if name == "author":  # whose features have as many channels as the output
                gate = conv.skip[name].sigmoid()
                expected = gate * expected + (1 - gate) * x[name][i]
            torch.testing.assert_close(out[name][i], expected)


def test_every_backend_and_graph():
    conv = HGTConv(CHANNELS, OUT, METADATA, heads=2)
    x, graphs = dict(zip(SIZES, features(), strict=True)), edges()
    expected = conv(x, graphs)
    cites = EDGE_TYPES[1]
    sizes = SIZES["paper"], SIZES["paper"]
    reverse = {name: index.flip(0) for name, index in graphs.items()}
    for other in (
        {**graphs, cites: gattn.SparseGraph(graphs[cites], *sizes)},
        {**graphs, cites: FORMS["csr"](graphs[cites], sizes)},
        {**graphs, cites: FORMS["EdgeIndex"](graphs[cites], sizes)},
        {**graphs, cites: gattn.SparseGraph(reverse[cites], *sizes, flow="target_to_source")},
        dict(reversed(graphs.items())),
    ):
        torch.testing.assert_close(conv(x, other), expected)
    complete = conv(x, {cites: gattn.CompleteGraph(SIZES["paper"])})
    pairs = torch.cartesian_prod(torch.arange(9), torch.arange(9)).t()
    torch.testing.assert_close(complete, conv(x, {cites: pairs}))
    with gattn.backend("reference"):
        torch.testing.assert_close(conv(x, graphs), expected)
    with gattn.backend("cpu"):
        batch = conv({name: torch.stack([torch.zeros_like(value), value]) for name, value in x.items()}, graphs)
    torch.testing.assert_close({name: value[1] for name, value in batch.items()}, expected)

    flowing = HGTConv(CHANNELS, OUT, METADATA, heads=2, flow="target_to_source")
    flowing.load_state_dict(conv.state_dict())
    torch.testing.assert_close(flowing(x, reverse), expected)


def test_edits_of_edges_are_noticed():
    conv = HGTConv(CHANNELS, OUT, METADATA)
    x, graphs = dict(zip(SIZES, features(), strict=True)), edges()
    with gattn.record_attention(conv) as records:
        conv(x, graphs)
        conv(x, dict(graphs))
        for edge_type in EDGE_TYPES[:2]:  # the first is what the joined graph is kept with
            graphs[edge_type][0, 0] += 1
            conv(x, graphs)
        graphs[EDGE_TYPES[2]] = graphs[EDGE_TYPES[2]].clone()
        conv(x, graphs)
    first, again, *others = [record.graph.adjacency for record in records[""]]
    assert again is first
    assert [int((other != first).sum()) for other in others] == [1, 2, 2]
    assert others[2] is not others[1]


def test_gradients():
    conv = HGTConv(CHANNELS, OUT, METADATA, heads=2).double()
    graphs, x = edges(), [value.double().requires_grad_() for value in features()]
    parameters = {name: value for name, value in conv.named_parameters() if "rel" in name or "skip" in name}

    def function(*leaves):
        x, given = dict(zip(SIZES, leaves, strict=False)), dict(zip(parameters, leaves[3:], strict=True))
        return tuple(torch.func.functional_call(conv, given, (x, graphs)).values())

    assert torch.autograd.gradcheck(function, (*x, *parameters.values()), fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (*x, *parameters.values()), fast_mode=True)


def test_zero_sizes():
    conv = HGTConv(CHANNELS, OUT, METADATA, heads=2)
    x = dict(zip(SIZES, features(), strict=True))
    nothing = {name: torch.zeros(2, 0, dtype=torch.int64) for name in EDGE_TYPES}
    out = conv(x, nothing)
    torch.testing.assert_close(out["paper"], conv.out_lin.lins["paper"].bias.expand(9, -1))
    torch.testing.assert_close(conv(x, {}), out)
    assert conv({"venue": x["venue"]}, {}) == {}
    empty = conv({name: value[:0] for name, value in x.items()}, nothing)
    assert {name: list(value.shape) for name, value in empty.items()} == {"author": [0, OUT], "paper": [0, OUT]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    conv = HGTConv(CHANNELS, OUT, METADATA, heads=2)
    x, graphs = dict(zip(SIZES, features(), strict=True)), edges()
    expected = conv(x, graphs)
    with torch.autocast("cpu", dtype=dtype):
        cast = conv(x, graphs)
    out = conv.to(dtype)({name: value.to(dtype) for name, value in x.items()}, graphs)
    for name in expected:
        assert out[name].dtype == dtype
        torch.testing.assert_close(out[name].float(), expected[name], atol=0.05, rtol=0.05)
        torch.testing.assert_close(cast[name].float(), expected[name], atol=0.05, rtol=0.05)


def test_around_it():
    conv = HGTConv(CHANNELS, OUT, METADATA, heads=2)
    x, graphs = dict(zip(SIZES, features(), strict=True)), edges()
    expected = conv(x, graphs)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(conv, fullgraph=True, backend="aot_eager")(x, graphs), expected)
    for other in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
        torch.testing.assert_close(other(x, graphs), expected)
    with gattn.record_attention(conv) as records:
        conv(x, graphs)
    ((weights, graph),) = records[""]
    totals = torch.zeros(16, 2).index_add(0, graph.edge_index[1], weights)  # authors, then papers
    assert graph.num_sources == 7 + 9 + 7 + 4
    torch.testing.assert_close(totals, totals.round())
    assert totals.sum() > 0


@pytest.mark.parametrize(("end", "bad"), mostly_slow([(0, -1), (0, 7), (1, -1)]))
def test_compiled_code_takes_no_node_for_one_of_another_type(end, bad):
    conv = HGTConv(CHANNELS, OUT, METADATA, heads=2)
    x, graphs = dict(zip(SIZES, features(), strict=True)), edges()
    torch._dynamo.reset()
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    compiled(x, graphs)
    graphs[EDGE_TYPES[0]][end, 1] = bad
    with pytest.raises(RuntimeError, match="edge_index holds a"):
        compiled(x, graphs)


def test_wrong_inputs():
    conv = HGTConv(CHANNELS, OUT, METADATA, heads=2)
    x, graphs = dict(zip(SIZES, features(), strict=True)), edges()
    with pytest.raises(ValueError, match="divided among the heads.*got out_channels=8 and heads=3"):
        HGTConv(CHANNELS, OUT, METADATA, heads=3)
    with pytest.raises(TypeError, match="metadata must be a pair"):
        HGTConv(CHANNELS, OUT, EDGE_TYPES)
    with pytest.raises(
        ValueError, match=r"made for nodes of the types \['author', 'paper', 'venue'\]; x_dict has none"
    ):
        conv({"editor": x["paper"]}, {})
    with pytest.raises(TypeError, match="x_dict must be a dictionary of features by node type; got Tensor"):
        conv(x["paper"], graphs)
    with pytest.raises(TypeError, match="edge_index_dict must be a dictionary of graphs by edge type; got Tensor"):
        conv(x, graphs[EDGE_TYPES[0]])
    with pytest.raises(TypeError, match=r"x_dict\['paper'\] must be a tensor; got NoneType"):
        conv({**x, "paper": None}, graphs)
    with pytest.raises(ValueError, match=r"x_dict\['paper'\] must be of a floating-point type"):
        conv({**x, "paper": x["paper"].long()}, graphs)
    with pytest.raises(ValueError, match=r"x_dict\['paper'\] must have shape \[N, 6\]; got \[9, 5\]"):
        conv({**x, "paper": x["paper"][:, :5]}, graphs)
    with pytest.raises(ValueError, match="made for edges of the types .* got some of type .*'buys'"):
        conv(x, {("author", "buys", "paper"): graphs[EDGE_TYPES[0]]})
    with pytest.raises(ValueError, match="join nodes of type 'author', but x_dict has features of .*'paper'"):
        conv({"paper": x["paper"]}, graphs)
    with pytest.raises(IndexError, match="source index 7, but there are 7 source nodes"):
        conv(x, {EDGE_TYPES[0]: torch.tensor([[7], [0]])})


class TestTime:
    """`use_rte`: the paper's relative temporal encoding."""

    WRITES, CITES = ("author", "writes", "paper"), ("venue", "has", "paper")
    METADATA = (["author", "venue", "paper"], [WRITES, CITES])
    INDEX = {WRITES: torch.tensor([[0, 1, 1, 2], [0, 0, 2, 1]]), CITES: torch.tensor([[0, 1, 0], [2, 2, 1]])}

    def made(self, **options):
        conv = HGTConv(6, OUT, self.METADATA, heads=2, **options).double()
        for parameter in conv.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
        return conv

    def inputs(self):
        sizes = {"author": 3, "venue": 2, "paper": 4}
        x = {name: torch.randn(size, 6, dtype=torch.double, requires_grad=True) for name, size in sizes.items()}
        # Unix times, of which single precision keeps minutes only.
        return x, {name: 1e9 * torch.rand(index.size(1)).double() for name, index in self.INDEX.items()}

    def test_by_hand(self):
        """Every edge gets a source of its own, to whose features the encoding is added."""
        conv, plain = self.made(use_rte=True), self.made()
        plain.load_state_dict(conv.state_dict(), strict=False)
        x, times = self.inputs()
        sources = {}
        for edge_type, (source, _) in self.INDEX.items():
            angle = torch.outer(times[edge_type], 10000.0 ** (-torch.tensor([0, 0, 2, 2, 4, 4]).double() / 6))
            encoding = torch.where(torch.arange(6) % 2 == 0, angle.sin(), angle.cos()) / 6**0.5
            sources[edge_type[0]] = x[edge_type[0]][source] + conv.lin_time(encoding)
        index = {name: torch.stack([torch.arange(e.size(1)), e[1]]) for name, e in self.INDEX.items()}
        results = []
        for out in (conv(x, self.INDEX, times), plain(x | sources, index)):
            weights = torch.linspace(-1, 2, out["paper"].numel()).view_as(out["paper"])
            leaves = [*x.values(), conv.lin_time.weight, conv.lin_time.bias]
            results.append([out["paper"], *torch.autograd.grad((out["paper"] * weights).sum(), leaves)])
        torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)

    def test_batches_and_compiled(self):
        conv, (x, times) = self.made(use_rte=True), self.inputs()
        expected = conv(x, self.INDEX, times)["paper"]
        twice = {name: torch.stack([features, features]) for name, features in x.items()}
        torch.testing.assert_close(conv(twice, self.INDEX, times)["paper"][1], expected)
        compiled = torch.compile(conv, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, self.INDEX, times)["paper"], expected)
        assert not torch.allclose(conv(x, self.INDEX, {k: 2 * t for k, t in times.items()})["paper"], expected)

    def test_wrong_inputs(self):
        conv, (x, times) = self.made(use_rte=True), self.inputs()
        with pytest.raises(TypeError, match="needs edge_time_dict"):
            conv(x, self.INDEX)
        with pytest.raises(ValueError, match="made without use_rte=True"):
            self.made()(x, self.INDEX, times)
        with pytest.raises(TypeError, match=r"'has'.* must be a tensor; got NoneType"):
            conv(x, self.INDEX, {self.WRITES: times[self.WRITES]})
        with pytest.raises(ValueError, match=r"'has'.* must have one time per edge, \[3\]"):
            conv(x, self.INDEX, times | {self.CITES: torch.zeros(5)})
        with pytest.raises(ValueError, match="same number of channels"):
            HGTConv({"author": 3, "venue": 4, "paper": 3}, OUT, self.METADATA, use_rte=True)
