"""GATEConv against PyG's, and what it has beyond."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from allpairspy import AllPairs
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.nn.models.attentive_fp import GATEConv as PyGGATEConv
from torch_geometric.utils import coalesce

import gattn
from gattn.nn.graph.gate_conv import GATEConv
from gattn.testing import random_edge_index
from tests.nn.against_pyg import FORMS, assert_as_pyg, name_of

N, M, C, D = 7, 9, 6, 3
OPTIONS = {"form": FORMS, "bipartite": (False, True), "dtype": (torch.float32, torch.float64, torch.bfloat16)}


@pytest.fixture
def x():
    return torch.randn(M, C)


@pytest.fixture
def edge_index():
    return coalesce(random_edge_index(M, N, num_edges=40, seed=1))


@pytest.fixture
def edge_attr(edge_index):
    return torch.randn(edge_index.size(1), D)


@pytest.mark.parametrize("options", list(AllPairs(list(OPTIONS.values()))), ids=name_of)
def test_as_pyg(options, x, edge_index, edge_attr):
    form, bipartite, dtype = options
    given = (x, torch.randn(N, C)) if bipartite else x
    graph = FORMS[form](edge_index, (M, N) if bipartite else (M, M))
    conv = GATEConv(C, C, D)
    conv.att_l.data.mul_(5)  # where logits of a target all have one sign, the gradient of att_r is zero
    assert_as_pyg(conv, PyGGATEConv(C, C, D), given, graph, edge_attr, dtype=dtype)


def test_fresh_parameters_are_those_of_pyg():
    layers = []
    for layer in (GATEConv, PyGGATEConv):
        torch.manual_seed(5)
        layers.append(layer(C, C, D, 0.5))
    ours, theirs = (list(layer.named_parameters()) for layer in layers)
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(ours, theirs, strict=True))
    assert str(layers[0]) == str(layers[1]) == "GATEConv()"


def formula(conv, x, edge_index, edge_attr, num_targets):
    rows = []
    for i in range(num_targets):
        edges = (edge_index[1] == i).nonzero().flatten().tolist()
        logits, values = [], []
        for e in edges:
            j = edge_index[0, e]
            hidden = F.leaky_relu(conv.lin1.weight @ torch.cat([x[j], edge_attr[e]]), 0.01)
            logits.append(F.leaky_relu(conv.att_r[0] @ x[i] + conv.att_l[0] @ hidden, 0.01))
            values.append(conv.lin2.weight @ x[j])
        total = torch.stack(logits).softmax(0) @ torch.stack(values) if edges else torch.zeros(C).double()
        rows.append(total + conv.bias)
    return torch.stack(rows)


def test_formula_on_every_graph_and_backend(x, edge_index, edge_attr):
    conv = GATEConv(C, C, D).double()
    torch.nn.init.normal_(conv.bias)
    x, edge_attr = x.double(), edge_attr.double()
    complete = gattn.CompleteGraph(M, causal=True)
    pairs = torch.randn(complete.num_edges, D).double()
    cases = (
        (edge_index, edge_attr, edge_index),
        (gattn.SparseGraph(edge_index.flip(0), flow="target_to_source"), edge_attr, edge_index),
        (complete, pairs, complete.edge_index),
    )
    for graph, features, edges in cases:
        expected = formula(conv, x, edges, features, M)
        for backend in ("cpu", "reference"):
            with gattn.backend(backend):
                torch.testing.assert_close(conv(x, graph, features), expected)
                batch = conv(torch.stack([x.flip(0), x]), graph, features)
                torch.testing.assert_close(batch[1], expected)
    swapped = GATEConv(C, C, D, flow="target_to_source").double()
    swapped.load_state_dict(conv.state_dict())
    torch.testing.assert_close(swapped(x, edge_index.flip(0), edge_attr), conv(x, edge_index, edge_attr))
    lengths = torch.tensor([4, M])
    out = conv(torch.stack([x, x]), gattn.CompleteGraph(M, source_lengths=lengths, causal=True), pairs)
    torch.testing.assert_close(out[1], conv(x, complete, pairs))
    torch.testing.assert_close(out[0, :4], conv(x, complete, pairs)[:4])  # causal: they see no padding


def test_gradients(x, edge_index, edge_attr):
    conv = GATEConv(C, C, D).double()
    names = [name for name, _ in conv.named_parameters()]

    def call(x, edge_attr, *parameters):
        return torch.func.functional_call(conv, dict(zip(names, parameters, strict=True)), (x, edge_index, edge_attr))

    inputs = (x.double().requires_grad_(), edge_attr.double().requires_grad_(), *conv.parameters())
    with gattn.backend("cpu"):
        assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(lambda x: call(x, *inputs[1:]), inputs[:1])


class Largest(TorchDispatchMode):
    """The size of the largest tensor that an operator makes, in bytes."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.bytes = max([self.bytes, *[x.untyped_storage().nbytes() for x in tensors]])
        return out


def test_nothing_has_a_vector_per_edge():
    x, edge_attr = torch.randn(50, 64, requires_grad=True), torch.randn(4000, 2)
    conv, edge_index = GATEConv(64, 64, 2), random_edge_index(50, num_edges=4000)
    with Largest() as largest:
        conv(x, edge_index, edge_attr).sum().backward()
    assert largest.bytes < 4000 * 64 * 4 / 2
    with gattn.backend("reference"), Largest() as largest:
        conv(x, edge_index, edge_attr).sum().backward()
    assert largest.bytes >= 4000 * 64 * 4


def test_dropout(x, edge_index, edge_attr):
    conv = GATEConv(C, C, D, dropout=0.5)
    outs = []
    for backend in ("cpu", "reference"):
        torch.manual_seed(3)
        with gattn.backend(backend):
            outs.append(conv(x, edge_index, edge_attr))
    torch.testing.assert_close(*outs)
    assert not torch.allclose(outs[0], conv.eval()(x, edge_index, edge_attr))
    dropped = GATEConv(C, C, D, dropout=1.0)
    torch.testing.assert_close(dropped(x, edge_index, edge_attr), dropped.bias.expand(M, C))


def test_around_it(x, edge_index, edge_attr):
    conv = GATEConv(C, C, D)
    expected = conv(x, edge_index, edge_attr)
    for other in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
        assert torch.equal(other(x, edge_index, edge_attr), expected)
    torch._dynamo.reset()
    torch.testing.assert_close(
        torch.compile(conv, fullgraph=True, backend="aot_eager")(x, edge_index, edge_attr), expected
    )
    with gattn.record_attention(conv) as records:
        conv(x, edge_index, edge_attr)
    ((weights, graph),) = records[""]  # of the attention alone, not of its logits
    totals = torch.zeros(M, 1).index_add(0, graph.edge_index[1], weights)
    torch.testing.assert_close(totals[:, 0], torch.isin(torch.arange(M), edge_index[1]).float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = conv(x, edge_index, edge_attr)
    torch.testing.assert_close(out, expected, atol=0.05, rtol=0.05)
    none = torch.empty(2, 0, dtype=torch.long)
    torch.testing.assert_close(conv(x, none, edge_attr[:0]), conv.bias.expand(M, C))
    assert conv(x[:0], none, edge_attr[:0]).shape == (0, C)


def test_other_forms_of_edge_features(x, edge_index, edge_attr):
    conv = GATEConv(C, C, 1)
    torch.testing.assert_close(conv(x, edge_index, edge_attr[:, 0]), conv(x, edge_index, edge_attr[:, :1]))
    conv = GATEConv(C, C, D)
    adjacency = torch.sparse_coo_tensor(edge_index.flip(0), edge_attr, (M, M, D)).coalesce()
    torch.testing.assert_close(conv(x, adjacency), conv(x, edge_index, edge_attr))


def test_wrong_inputs(x, edge_index, edge_attr):
    conv = GATEConv(C, C, D)
    with pytest.raises(ValueError, match="must be the same; got 6 and 5"):
        GATEConv(C, 5, D)
    with pytest.raises(TypeError, match=r"in_channels must be an integer; got 2\.5"):
        GATEConv(2.5, 2.5, D)
    with pytest.raises(ValueError, match="edge_dim must be at least 0; got -1"):
        GATEConv(C, C, -1)
    with pytest.raises(ValueError, match=r"dropout must be a probability between 0 and 1; got 1\.5"):
        GATEConv(C, C, D, dropout=1.5)
    with pytest.raises(ValueError, match=r"so it needs edge_attr, \[E, 3\]"):
        conv(x, edge_index)
    with pytest.raises(TypeError, match="edge_attr must be a tensor; got list"):
        conv(x, edge_index, edge_attr.tolist())
    with pytest.raises(ValueError, match="edge_attr has 2 channels, but this layer was made for edge features of 3"):
        conv(x, edge_index, edge_attr[:, :2])
    with pytest.raises(ValueError, match="edge_attr must be of a floating-point type; got torch.int64"):
        conv(x, edge_index, edge_attr.long())
    with pytest.raises(ValueError, match=r"edge_attr needs one row per edge; got 4 rows for \d+"):
        conv(x, edge_index, edge_attr[:4])
    with pytest.raises(ValueError, match="x has 5 channels, but this layer was made for in_channels=6"):
        conv(x[:, :5], edge_index, edge_attr)
    with pytest.raises(ValueError, match=r"x\[1\] may not be None"):
        conv((x, None), edge_index, edge_attr)
    with pytest.raises(IndexError, match="source index"):
        conv(x, edge_index + M, edge_attr)
