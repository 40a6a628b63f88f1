"""HEATConv against PyG's, and what it has beyond."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
import torch_geometric.typing
from allpairspy import AllPairs
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import coalesce, to_torch_csr_tensor

import gattn
from gattn.nn.hetero.heat_conv import HEATConv
from gattn.testing import random_edge_index
from tests.nn.against_pyg import FORMS, assert_as_pyg, name_of

N, E, F_IN, C, D = 9, 40, 6, 5, 3
#: How many types of nodes and of edges there are; channels of embedded edge types, edge features, and these projected.
SIZES = (3, 4, 2, D, 7)
OPTIONS = {
    "form": FORMS,
    "in_channels": (F_IN, -1),
    "heads": (1, 3),
    "concat": (True, False),
    "negative_slope": (0.2, 0.7),
    "root_weight": (True, False),
    "bias": (True, False),
    "aggr": ("add", "mean", "max"),
    "flow": ("source_to_target", "target_to_source"),
}


@pytest.fixture
def x():
    return torch.randn(N, F_IN)


@pytest.fixture
def edge_index():
    return coalesce(random_edge_index(N, num_edges=E, seed=1))


@pytest.fixture
def node_type():
    return torch.tensor([2, 0, 1, 0, 0, 2, 1, 0, 1])


@pytest.fixture
def edge_type(edge_index):
    return torch.randint(4, edge_index[0].shape)


@pytest.fixture
def edge_attr(edge_index):
    return torch.randn(edge_index.size(1), D)


@pytest.fixture
def inputs(x, edge_index, node_type, edge_type, edge_attr):
    return x, edge_index, node_type, edge_type, edge_attr


def possible(row):
    return len(row) < 9 or row[8] == "source_to_target" or row[0] in ("edge_index", "EdgeIndex")


@pytest.mark.parametrize("options", list(AllPairs(list(OPTIONS.values()), filter_func=possible)), ids=name_of)
def test_as_pyg(options, inputs):
    form, in_channels, heads, concat, negative_slope, root_weight, bias, aggr, flow = options
    x, edge_index, node_type, edge_type, edge_attr = inputs
    ours, theirs = (
        layer(in_channels, C, *SIZES, heads, concat, negative_slope, 0.0, root_weight, bias, aggr=aggr, flow=flow)
        for layer in (HEATConv, pyg.HEATConv)
    )
    if in_channels == -1:
        for conv in (ours, theirs):
            with torch.no_grad():
                conv(*inputs)
    graph = FORMS[form](edge_index, (N, N))
    if form in ("csr", "SparseTensor"):  # whose edges are sorted by their targets
        order = (edge_index[1] * N + edge_index[0]).argsort()
        edge_type, edge_attr = edge_type[order], edge_attr[order]
    assert_as_pyg(ours, theirs, x, graph, node_type, edge_type, edge_attr)


def test_fresh_layers_and_their_words():
    made = []
    for layer in (HEATConv, pyg.HEATConv):
        torch.manual_seed(3)
        made.append(layer(F_IN, C, *SIZES, heads=2))
    ours, theirs = made
    assert str(ours) == str(theirs) == "HEATConv(6, 5, heads=2)"
    for (name, parameter), (expected_name, expected) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert name == expected_name
        torch.testing.assert_close(parameter, expected, rtol=0, atol=0)


def test_features_in_the_adjacency(inputs):
    x, edge_index, node_type, edge_type, edge_attr = inputs
    conv = HEATConv(F_IN, C, *SIZES, heads=2)
    expected = conv(*inputs)
    order = (edge_index[1] * N + edge_index[0]).argsort()
    source, target = edge_index[:, order]
    adjacencies = [to_torch_csr_tensor(torch.stack([target, source]), edge_attr[order], size=(N, N))]
    if torch_geometric.typing.WITH_TORCH_SPARSE:
        adjacencies.append(SparseTensor(row=target, col=source, value=edge_attr[order], sparse_sizes=(N, N)))
    for adjacency in adjacencies:
        torch.testing.assert_close(conv(x, adjacency, node_type, edge_type[order]), expected)


def test_formula(inputs):
    conv = HEATConv(F_IN, C, *SIZES, heads=2).double()
    x, edge_index, node_type, edge_type, edge_attr = inputs
    x, edge_attr = x.double(), edge_attr.double()
    out = conv(x, edge_index, node_type, edge_type, edge_attr)
    lin = conv.hetero_lin
    hidden = torch.stack([x[i] @ lin.weight[kind] + lin.bias[kind] for i, kind in enumerate(node_type)])
    for i in range(N):
        found, logits = [torch.zeros(1, C, dtype=torch.double)[:0]], [torch.zeros(1, 2, dtype=torch.double)[:0]]
        for number in (edge_index[1] == i).nonzero().flatten():
            source = hidden[edge_index[0, number]]
            kind = F.leaky_relu(conv.edge_type_emb.weight[edge_type[number]], 0.2)
            features = F.leaky_relu(conv.edge_attr_emb.weight @ edge_attr[number], 0.2)
            logits.append(F.leaky_relu(conv.att(torch.cat([hidden[i], source, kind, features])), 0.2).view(1, 2))
            found.append(conv.lin(torch.cat([source, features])).view(1, C))
        alpha = torch.cat(logits).softmax(0)
        torch.testing.assert_close(out[i], (alpha.t() @ torch.cat(found) + hidden[i]).flatten())


def test_every_backend_and_graph(inputs):
    conv = HEATConv(F_IN, C, *SIZES, heads=2)
    x, edge_index, node_type, edge_type, edge_attr = inputs
    expected = conv(*inputs)
    for backend in ("cpu", "reference"):
        with gattn.backend(backend):
            torch.testing.assert_close(conv(*inputs), expected)
    pairs = gattn.CompleteGraph(N)
    types, features = torch.randint(4, (N * N,)), torch.randn(N * N, D)
    complete = conv(x, pairs, node_type, types, features)
    torch.testing.assert_close(complete, conv(x, pairs.edge_index, node_type, types, features))
    reverse = gattn.SparseGraph(edge_index.flip(0), flow="target_to_source")
    torch.testing.assert_close(conv(x, reverse, node_type, edge_type, edge_attr), expected)
    nodes, edges = torch.randperm(N), torch.randperm(edge_index.size(1))
    place = nodes.argsort()[edge_index[:, edges]]
    permuted = conv(x[nodes], place, node_type[nodes], edge_type[edges], edge_attr[edges])
    torch.testing.assert_close(permuted, expected[nodes])


def test_gradients(inputs):
    conv = HEATConv(F_IN, C, *SIZES, heads=2).double()
    x, edge_index, node_type, edge_type, edge_attr = inputs
    leaves = [x.double().requires_grad_(), edge_attr.double().requires_grad_(), *conv.parameters()]
    names = [name for name, _ in conv.named_parameters()]

    def function(x, edge_attr, *parameters):
        given = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(conv, given, (x, edge_index, node_type, edge_type, edge_attr))

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


def test_zero_sizes(inputs):
    conv = HEATConv(F_IN, C, *SIZES, heads=2)
    x, _, node_type, edge_type, edge_attr = inputs
    nothing = torch.zeros(2, 0, dtype=torch.int64)
    out = conv(x, nothing, node_type, edge_type[:0], edge_attr[:0])
    torch.testing.assert_close(out, conv.hetero_lin(x, node_type).repeat(1, 2))
    assert conv(x[:0], nothing, node_type[:0], edge_type[:0], edge_attr[:0]).shape == (0, 2 * C)


def test_dropout_drops_whole_edges(x, edge_type, edge_attr):
    conv = HEATConv(F_IN, C, *SIZES, heads=2, dropout=0.5, root_weight=False)
    one = torch.tensor([[0, 0, 0, 0], [1, 2, 3, 4]])  # a single edge to each target, whose weight is 1
    inputs = x, one, torch.zeros(N, dtype=torch.int64), edge_type[:4], edge_attr[:4]
    for _ in range(5):
        out = conv(*inputs)[1:5].view(4, 2, C)
        kept = conv.eval()(*inputs)[1:5].view(4, 2, C)
        is_dropped = out.eq(0).all(-1, keepdim=True)
        torch.testing.assert_close(out, (2 * kept).masked_fill(is_dropped, 0))
        conv.train()
    assert is_dropped.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, inputs):
    conv = HEATConv(F_IN, C, *SIZES, heads=2)
    expected = conv(*inputs)
    with torch.autocast("cpu"):
        cast = conv(*inputs)
    out = conv.to(dtype)(*(value.to(dtype) if value.is_floating_point() else value for value in inputs))
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, atol=0.05, rtol=0.05)
    torch.testing.assert_close(cast.float(), expected, atol=0.05, rtol=0.05)


def test_around_it(inputs):
    conv = HEATConv(F_IN, C, *SIZES, heads=2)
    expected = conv(*inputs)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(conv, fullgraph=True, backend="aot_eager")(*inputs), expected)
    for other in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
        torch.testing.assert_close(other(*inputs), expected)
    with gattn.record_attention(conv) as records:
        torch.testing.assert_close(conv(*inputs), expected)
    ((weights, graph),) = records[""]
    totals = torch.zeros(N, 2).index_add(0, graph.edge_index[1], weights)
    torch.testing.assert_close(totals, totals.round())
    assert totals.sum() > 0


def test_an_explainer_masks_whole_messages(inputs):
    conv = HEATConv(F_IN, C, *SIZES, heads=2)
    x, edge_index, node_type, *_ = inputs
    conv.explain = True
    outs = []
    for mask in (50.0, -50.0):
        conv._edge_mask = torch.full((edge_index.size(1),), mask)
        outs.append(conv(*inputs))
    conv.explain = False
    torch.testing.assert_close(outs[0], conv(*inputs))
    torch.testing.assert_close(outs[1], conv.hetero_lin(x, node_type).repeat(1, 2))


def test_wrong_inputs(inputs):
    conv = HEATConv(F_IN, C, *SIZES, heads=2)
    x, edge_index, node_type, edge_type, edge_attr = inputs
    with pytest.raises(TypeError, match=r"x must be a tensor \[N, F\].*; got tuple"):
        conv((x, x), *inputs[1:])
    with pytest.raises(ValueError, match="x has 5 channels, but this layer was made for in_channels=6"):
        conv(x[:, :5], *inputs[1:])
    with pytest.raises(ValueError, match="so it needs edge_attr"):
        conv(*inputs[:4])
    with pytest.raises(ValueError, match="edge_attr has 2 channels"):
        conv(*inputs[:4], edge_attr[:, :2])
    with pytest.raises(ValueError, match=r"node_type must hold 9 types, as integers.*got torch.int64 of shape \[8\]"):
        conv(x, edge_index, node_type[1:], edge_type, edge_attr)
    with pytest.raises(ValueError, match="edge_type must hold .* got torch.float32"):
        conv(x, edge_index, node_type, edge_type.float(), edge_attr)
    with pytest.raises(TypeError, match="node_type must be a tensor; got list"):
        conv(x, edge_index, node_type.tolist(), edge_type, edge_attr)
    with pytest.raises(IndexError, match="node_type holds 3, but the 3 types are counted from 0"):
        conv(x, edge_index, node_type + 1, edge_type, edge_attr)
    with pytest.raises(IndexError, match="edge_type holds -1"):
        conv(x, edge_index, node_type, edge_type - 1 - edge_type.min(), edge_attr)
    with pytest.raises(ValueError, match="heads must be at least 1; got 0"):
        HEATConv(F_IN, C, *SIZES, heads=0)
