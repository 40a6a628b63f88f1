"""ResGatedGraphConv against PyG's, and what it has beyond."""

import copy
import pickle

import pytest
import torch
import torch_geometric.nn as pyg
from allpairspy import AllPairs
from torch import nn
from torch_geometric.utils import coalesce, to_torch_csr_tensor

import gattn
from gattn.nn.graph.res_gated_graph_conv import ResGatedGraphConv
from gattn.testing import assert_as_exact_as, assert_permutation_equivariant, random_edge_index
from tests.nn.against_pyg import FORMS, assert_as_pyg, name_of, results

M, N, F, G, C, D = 9, 7, 6, 4, 5, 3  # sources, targets, channels of both, of the output, of edges
OPTIONS = {
    "form": FORMS,
    "act": (nn.Sigmoid(), nn.Tanh(), nn.Identity(), torch.sigmoid, nn.ReLU(), nn.PReLU(C), nn.Softmax(dim=-1)),
    "edge_dim": (None, D),
    "bipartite": (False, True),
    "root_weight": (True, False),
    "bias": (True, False),
    "aggr": ("add", "mean", "max"),
    "flow": ("source_to_target", "target_to_source"),
    "dtype": (torch.float32, torch.float64),
}


@pytest.fixture
def x():
    return torch.randn(M, F)


@pytest.fixture
def edge_index():
    return coalesce(random_edge_index(M, num_edges=40, seed=1))


@pytest.fixture
def edge_attr(edge_index):
    return torch.randn(edge_index.size(1), D)


def possible(row):
    return len(row) < 8 or row[7] == "source_to_target" or row[0] in ("edge_index", "EdgeIndex")


@pytest.mark.parametrize("options", list(AllPairs(list(OPTIONS.values()), filter_func=possible)), ids=name_of)
def test_as_pyg(options, x):
    form, act, edge_dim, bipartite, root_weight, bias, aggr, flow, dtype = options
    size = (M, N) if bipartite else (M, M)
    edges = coalesce(random_edge_index(*size, num_edges=40, seed=1))
    edge_attr = None if edge_dim is None else torch.randn(edges.size(1), D)
    if bipartite:
        x = (x, torch.randn(N, G))
    if flow == "target_to_source":
        edges, size = edges.flip(0), size[::-1]
    chosen = {"edge_dim": edge_dim, "root_weight": root_weight, "bias": bias, "aggr": aggr, "flow": flow}
    ours, theirs = (
        layer((F, G) if bipartite else F, C, copy.deepcopy(act), **chosen)
        for layer in (ResGatedGraphConv, pyg.ResGatedGraphConv)
    )
    if bias:
        nn.init.normal_(ours.bias)
    assert_as_pyg(ours, theirs, x, FORMS[form](edges, size), edge_attr, dtype=dtype)


def test_fresh_layers():
    for edge_dim in (None, D):
        states = []
        for layer in (ResGatedGraphConv, pyg.ResGatedGraphConv):
            torch.manual_seed(3)
            states.append(layer((F, G), C, edge_dim=edge_dim).state_dict())
        assert list(states[0]) == list(states[1])
        torch.testing.assert_close(*states, rtol=0, atol=0)


def test_several_aggregations(x, edge_index):
    chosen = {"aggr": ["mean", "max"], "root_weight": False, "bias": False}
    assert_as_pyg(ResGatedGraphConv(F, C, **chosen), pyg.ResGatedGraphConv(F, C, **chosen), x, edge_index)


def test_features_that_an_adjacency_holds(x, edge_index, edge_attr):
    adjacency = to_torch_csr_tensor(edge_index.flip(0), edge_attr, size=(M, M))
    ours, theirs = ResGatedGraphConv(F, C, edge_dim=D), pyg.ResGatedGraphConv(F, C, edge_dim=D)
    assert_as_pyg(ours, theirs, x, adjacency)
    torch.testing.assert_close(ours(x, adjacency), ours(x, edge_index, edge_attr))


@pytest.mark.parametrize("edge_dim", [None, D])
def test_lazy_channels(edge_dim, x, edge_index, edge_attr):
    given = (x, edge_index) if edge_dim is None else (x, edge_index, edge_attr)
    conv = ResGatedGraphConv(-1, C, edge_dim=None if edge_dim is None else -1)
    out = conv(*given)
    other = pyg.ResGatedGraphConv(F, C, edge_dim=edge_dim)
    other.load_state_dict(conv.state_dict())
    torch.testing.assert_close(other(*given), out)
    fresh = ResGatedGraphConv(F, C, edge_dim=None if edge_dim is None else -1)
    fresh.load_state_dict(other.state_dict())
    torch.testing.assert_close(fresh(*given), out)


@pytest.mark.parametrize("act", [nn.Sigmoid(), nn.Tanh(), nn.Identity()])
def test_formula(act, x, edge_index, edge_attr):
    conv = ResGatedGraphConv(F, C, act, edge_dim=D).double()
    x, edge_attr = x.double(), edge_attr.double()
    out = conv(x, edge_index, edge_attr)
    for i in range(M):
        expected = conv.lin_skip.weight @ x[i] + conv.bias
        for edge in (edge_index[1] == i).nonzero().flatten():
            target, source = (torch.cat([x[j], edge_attr[edge]]) for j in (i, edge_index[0, edge]))
            expected = expected + act(conv.lin_key(target) + conv.lin_query(source)) * conv.lin_value(source)
        torch.testing.assert_close(out[i], expected)


def test_gradients(x, edge_index, edge_attr):
    conv = ResGatedGraphConv(F, C, edge_dim=D).double()
    inputs = [tensor.double().requires_grad_() for tensor in (x, edge_attr)]
    assert torch.autograd.gradcheck(lambda x, edge_attr: conv(x, edge_index, edge_attr), inputs)
    assert torch.autograd.gradgradcheck(lambda x: conv(x, edge_index, inputs[1]), inputs[:1], atol=1e-4)


@pytest.mark.parametrize("act", [nn.Sigmoid(), torch.tanh, nn.Identity(), nn.SiLU()])
@pytest.mark.parametrize("edge_dim", [None, D])
def test_every_backend_and_graph(act, edge_dim, x, edge_index):
    conv = ResGatedGraphConv(F, C, act, edge_dim=edge_dim)
    for graph in (edge_index, gattn.CompleteGraph(M), gattn.CompleteGraph(M, causal=True)):
        num_edges = graph.size(1) if graph is edge_index else graph.num_edges
        edge_attr = None if edge_dim is None else torch.randn(num_edges, D)
        given = (x, graph) if edge_attr is None else (x, graph, edge_attr)
        with gattn.backend("reference"):
            expected = results(conv, *given)
        torch.testing.assert_close(results(conv, *given), expected)
        if not isinstance(act, nn.SiLU):  # which the kernels do not know
            with gattn.backend("cpu"):
                torch.testing.assert_close(results(conv, *given), expected)


@pytest.mark.parametrize("act", [nn.Sigmoid(), nn.SiLU()])
def test_batches(act, x, edge_index, edge_attr):
    conv, batch = ResGatedGraphConv(F, C, act, edge_dim=D), torch.stack([x, 2 * x])
    for second, attrs in ((edge_attr, edge_attr), (-edge_attr, torch.stack([edge_attr, -edge_attr]))):
        torch.testing.assert_close(conv(batch, edge_index, attrs)[1], conv(2 * x, edge_index, second))


def test_nodes_without_edges_and_no_nodes(x):
    conv = ResGatedGraphConv(F, C, edge_dim=D)
    out = conv(x, torch.tensor([[0], [1]]), torch.randn(1, D))
    torch.testing.assert_close(out[2:], conv.lin_skip(x[2:]) + conv.bias)
    empty = torch.empty(2, 0, dtype=torch.long), torch.empty(0, D)
    torch.testing.assert_close(conv(x, *empty), conv.lin_skip(x) + conv.bias)
    assert conv(x[:0], *empty).shape == (0, C)


@pytest.mark.parametrize("act", [nn.Sigmoid(), nn.PReLU()])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, act, x, edge_index, edge_attr):
    ours, theirs = (layer(F, C, act, edge_dim=D) for layer in (ResGatedGraphConv, pyg.ResGatedGraphConv))
    assert_as_pyg(ours, theirs, x, edge_index, edge_attr, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pair = ours(x, edge_index, edge_attr), theirs(x, edge_index, edge_attr)
    assert_as_exact_as(*pair, theirs(x, edge_index, edge_attr))


def test_gates(x, edge_index):
    conv = ResGatedGraphConv(F, C)
    expected = (conv.lin_key(x)[edge_index[1]] + conv.lin_query(x)[edge_index[0]]).sigmoid()
    out = conv(x, edge_index)
    with gattn.record_attention(conv) as records:
        conv(x, edge_index)
    torch.testing.assert_close(records[""][0].weights, expected.detach())
    seen = []
    conv.act.register_forward_hook(lambda module, inputs, gates: seen.append(gates))
    torch.testing.assert_close(conv(x, edge_index), out)
    torch.testing.assert_close(seen, [expected])


@pytest.mark.parametrize("act", [nn.Sigmoid(), nn.SiLU()])
def test_around_it(act, x, edge_index, edge_attr):
    conv = ResGatedGraphConv(F, C, act)
    assert_permutation_equivariant(conv, x, edge_index)
    conv = ResGatedGraphConv(F, C, act, edge_dim=D)
    expected = conv(x, edge_index, edge_attr)
    for other in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
        torch.testing.assert_close(other(x, edge_index, edge_attr), expected)
    torch._dynamo.reset()
    backend = "inductor" if isinstance(act, nn.Sigmoid) else "aot_eager"  # which is faster
    compiled = torch.compile(conv, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x, edge_index, edge_attr), expected)


def test_wrong_inputs(x, edge_index, edge_attr):
    conv, plain, num_edges = ResGatedGraphConv(F, C, edge_dim=D), ResGatedGraphConv(F, C), edge_index.size(1)
    for given, message in (
        ((x, edge_index), r"needs edge_attr, \[E, 3\]"),
        ((x, edge_index, edge_attr[:, 1:]), "edge_attr has 2 channels, but this layer was made for edge features of 3"),
        ((x, edge_index, edge_attr[1:]), f"got {num_edges - 1} rows for {num_edges} edges"),
        ((x, edge_index, edge_attr.long()), "edge_attr must be of a floating-point type; got torch.int64"),
        (
            (x, edge_index, edge_attr.expand(2, -1, -1)),
            r"edge_attr must have shape \[E, D\], or \[E\] for a single feature; got",
        ),
        (((x, None), edge_index, edge_attr), r"x\[1\] may not be None"),
        ((x[:, 1:], edge_index, edge_attr), "x has 5 channels, but this layer was made for in_channels=6"),
    ):
        with pytest.raises(ValueError, match=message):
            conv(*given)
    with pytest.raises(ValueError, match="made without edge features: make ResGatedGraphConv with edge_dim"):
        plain(x, edge_index, edge_attr)
    with pytest.raises(TypeError, match="edge_attr must be a tensor; got list"):
        conv(x, edge_index, [1.0])
    with pytest.raises(IndexError):
        plain(x, edge_index + M)
    with pytest.raises(TypeError, match=r"act must be a callable such as torch.nn.Sigmoid\(\); got None"):
        ResGatedGraphConv(F, C, None)
    with pytest.raises(TypeError, match="ResGatedGraphConv has no argument heads"):
        ResGatedGraphConv(F, C, heads=2)
