"""HANConv against PyG's, and what it has beyond."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from allpairspy import AllPairs

import gattn
from gattn.nn.hetero.han_conv import HANConv
from tests.nn.against_pyg import FORMS, assert_as_pyg, name_of
from tests.nn.hetero import CHANNELS, EDGE_TYPES, METADATA, SIZES, Called, edges, features

OUT = 8
OPTIONS = {
    "form": FORMS,
    "in_channels": (CHANNELS, -1),
    "heads": (1, 4),
    "negative_slope": (0.2, 0.7),
    "edge_types": ("all", "some", "without edges"),
    "node_types": ("all", "some"),
}


def call(conv, x, graphs):
    """The outputs, and the weights of the edge types, of each type of nodes."""
    out, weights = conv(x, graphs, return_semantic_attention_weights=True)
    assert (out["author"] is None) == (EDGE_TYPES[3] not in graphs)
    return [*out.values(), *weights.values()]


def possible(row):
    return len(row) < 6 or row[5] == "all" or row[4] == "some"


@pytest.mark.parametrize("options", list(AllPairs(list(OPTIONS.values()), filter_func=possible)), ids=name_of)
def test_as_pyg(options):
    form, in_channels, heads, negative_slope, edge_types, node_types = options
    graphs = edges(EDGE_TYPES[:3] if edge_types == "some" else EDGE_TYPES)
    if edge_types == "without edges":
        graphs[EDGE_TYPES[1]] = torch.zeros(2, 0, dtype=torch.int64)
    graphs = {name: FORMS[form](index, (SIZES[name[0]], SIZES[name[-1]])) for name, index in graphs.items()}
    x = features()[: 3 if node_types == "all" else 2]
    ours, theirs = (
        layer(in_channels, OUT, METADATA, heads=heads, negative_slope=negative_slope)
        for layer in (HANConv, pyg.HANConv)
    )
    for conv in (ours, theirs):
        with torch.no_grad():
            conv(dict(zip(SIZES, features(), strict=True)), edges())  # which gives lazy parameters their sizes
    ours, theirs = (Called(conv, lambda conv, x: call(conv, x, graphs)) for conv in (ours, theirs))
    assert_as_pyg(ours, theirs, *x)


def test_fresh_layers_and_their_words():
    made = []
    for layer in (HANConv, pyg.HANConv):
        torch.manual_seed(3)
        made.append(layer(CHANNELS, OUT, METADATA, heads=2))
    ours, theirs = made
    assert str(ours) == str(theirs) == "HANConv(8, heads=2)"
    for (name, parameter), (expected_name, expected) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert name == expected_name
        torch.testing.assert_close(parameter, expected, rtol=0, atol=0)


def test_formula():
    conv = HANConv(CHANNELS, OUT, METADATA, heads=2).double()
    x = {name: value.double() for name, value in zip(SIZES, features(), strict=True)}
    graphs = edges()
    out, weights = conv(x, graphs, return_semantic_attention_weights=True)
    assert out["venue"] is weights["venue"] is None
    hidden = {name: conv.proj[name](value).view(-1, 2, 4) for name, value in x.items()}
    found = []
    for edge_type in EDGE_TYPES[:3]:
        of_source, of_target = (vectors["__".join(edge_type)][0] for vectors in (conv.lin_src, conv.lin_dst))
        rows = []
        for i in range(SIZES["paper"]):
            sources = hidden[edge_type[0]][graphs[edge_type][0, graphs[edge_type][1] == i]]
            logits = (sources * of_source).sum(-1) + (hidden["paper"][i] * of_target).sum(-1)
            alpha = F.leaky_relu(logits, 0.2).softmax(0)
            rows.append((alpha.unsqueeze(-1) * sources).sum(0).flatten().relu())
        found.append(torch.stack(rows))
    scores = torch.stack([(torch.tanh(conv.k_lin(rows)) @ conv.q[0]).mean() for rows in found])
    torch.testing.assert_close(weights["paper"], scores.softmax(0))
    torch.testing.assert_close(out["paper"], sum(b * rows for b, rows in zip(weights["paper"], found, strict=True)))


def test_every_backend_and_graph():
    conv = HANConv(CHANNELS, OUT, METADATA, heads=2)
    x, graphs = dict(zip(SIZES, features(), strict=True)), edges()
    expected = conv(x, graphs)
    cites = EDGE_TYPES[1]
    pairs = torch.cartesian_prod(torch.arange(9), torch.arange(9)).t()
    torch.testing.assert_close(conv(x, {cites: gattn.CompleteGraph(9)}), conv(x, {cites: pairs}))
    with gattn.backend("reference"):
        torch.testing.assert_close(conv(x, graphs), expected)
    with gattn.backend("cpu"):
        batch = {name: torch.stack([torch.zeros_like(value), value]) for name, value in x.items()}
        out, weights = conv(batch, graphs, return_semantic_attention_weights=True)
    torch.testing.assert_close(out["paper"][1], expected["paper"])
    assert weights["paper"].shape == (3, 2)
    torch.testing.assert_close(conv({**x, "paper": x["paper"].to_sparse_csr()}, graphs), expected)


def test_flow():
    x, graphs = dict(zip(SIZES, features(), strict=True)), edges()
    conv = HANConv(CHANNELS, OUT, METADATA, heads=2)
    flowing = HANConv(CHANNELS, OUT, METADATA, heads=2, flow="target_to_source")
    flowing.load_state_dict(conv.state_dict())
    reverse = {name: index.flip(0) for name, index in graphs.items()}
    torch.testing.assert_close(flowing(x, reverse), conv(x, graphs))

    cites, metadata = EDGE_TYPES[1], (["paper"], EDGE_TYPES[1:2])  # where PyG's layer knows the flow, too
    ours, theirs = (
        Called(
            layer(6, OUT, metadata, heads=2, flow="target_to_source"),
            lambda conv, x: conv({"paper": x["author"]}, {cites: graphs[cites]})["paper"],
        )
        for layer in (HANConv, pyg.HANConv)
    )
    assert_as_pyg(ours, theirs, x["paper"])


def test_gradients():
    conv = HANConv(CHANNELS, OUT, METADATA, heads=2).double()
    graphs, x = edges(), [value.double().requires_grad_() for value in features()]
    parameters = {name: value for name, value in conv.named_parameters() if name == "q" or name.startswith("lin_")}

    def function(*leaves):
        x, given = dict(zip(SIZES, leaves, strict=False)), dict(zip(parameters, leaves[3:], strict=True))
        out = torch.func.functional_call(conv, given, (x, graphs))
        return out["author"], out["paper"]

    assert torch.autograd.gradcheck(function, (*x, *parameters.values()), fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (*x, *parameters.values()), fast_mode=True)


def test_zero_sizes():
    conv = HANConv(CHANNELS, OUT, METADATA, heads=2)
    x = dict(zip(SIZES, features(), strict=True))
    nothing = {name: torch.zeros(2, 0, dtype=torch.int64) for name in EDGE_TYPES}
    out, weights = conv({**x, "paper": x["paper"][:0]}, nothing, return_semantic_attention_weights=True)
    assert out["author"].eq(0).all()
    assert out["paper"].shape == (0, OUT)
    assert weights["paper"] is None
    torch.testing.assert_close(weights["author"], torch.ones(1))
    assert conv(x, {}) == dict.fromkeys(SIZES)


def test_dropout_is_for_training():
    conv = HANConv(CHANNELS, OUT, METADATA, heads=2, dropout=0.5)
    x, graphs = dict(zip(SIZES, features(), strict=True)), edges()
    first, second = conv(x, graphs), conv(x, graphs)
    assert not torch.equal(first["paper"], second["paper"])
    kept = HANConv(CHANNELS, OUT, METADATA, heads=2)
    kept.load_state_dict(conv.state_dict())
    torch.testing.assert_close(conv.eval()(x, graphs), kept(x, graphs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    conv = HANConv(CHANNELS, OUT, METADATA, heads=2)
    x, graphs = dict(zip(SIZES, features(), strict=True)), edges()
    expected = conv(x, graphs)
    with torch.autocast("cpu", dtype=dtype):
        cast = conv(x, graphs)
    out = conv.to(dtype)({name: value.to(dtype) for name, value in x.items()}, graphs)
    for name in ("author", "paper"):
        assert out[name].dtype == dtype
        torch.testing.assert_close(out[name].float(), expected[name], atol=0.05, rtol=0.05)
        torch.testing.assert_close(cast[name].float(), expected[name], atol=0.05, rtol=0.05)


def test_around_it():
    conv = HANConv(CHANNELS, OUT, METADATA, heads=2)
    x, graphs = dict(zip(SIZES, features(), strict=True)), edges()
    expected = conv(x, graphs)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(conv, fullgraph=True, backend="aot_eager")(x, graphs), expected)
    for other in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
        torch.testing.assert_close(other(x, graphs), expected)
    with gattn.record_attention(conv) as records:
        conv(x, graphs)
    assert [record.graph.adjacency is graphs[name] for record, name in zip(records[""], graphs, strict=True)] == [
        True
    ] * 4


def test_wrong_inputs():
    conv = HANConv(CHANNELS, OUT, METADATA, heads=2)
    x, graphs = dict(zip(SIZES, features(), strict=True)), edges()
    with pytest.raises(ValueError, match="divided among the heads.*got out_channels=8 and heads=3"):
        HANConv(CHANNELS, OUT, METADATA, heads=3)
    with pytest.raises(ValueError, match="dropout"):
        HANConv(CHANNELS, OUT, METADATA, dropout=1.5)
    with pytest.raises(ValueError, match="made for nodes of the types .*'author', 'paper', 'venue'.*got .*'editor'"):
        conv({**x, "editor": x["paper"]}, graphs)
    with pytest.raises(ValueError, match=r"x_dict\['paper'\] must have shape \[N, 6\]; got \[9, 5\]"):
        conv({**x, "paper": x["paper"][:, :5]}, graphs)
    with pytest.raises(ValueError, match="made for edges of the types .* got some of type .*'buys'"):
        conv(x, {("author", "buys", "paper"): graphs[EDGE_TYPES[0]]})
    with pytest.raises(IndexError, match="source index 7, but there are 7 source nodes"):
        conv(x, {EDGE_TYPES[0]: torch.tensor([[7], [0]])})
