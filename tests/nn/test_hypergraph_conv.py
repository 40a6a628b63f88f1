"""HypergraphConv against PyG's, its formula, and what it has beyond."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
import torch_geometric
import torch_geometric.nn as pyg
from allpairspy import AllPairs
from torch_geometric.utils import to_torch_csr_tensor

import gattn
from gattn.nn.graph.hypergraph_conv import HypergraphConv
from gattn.testing import random_edge_index
from tests.nn.against_pyg import assert_as_pyg, name_of

N, M, IN, OUT = 9, 5, 6, 4
MODES = (None, "node", "edge")
OPTIONS = {
    "mode": MODES,
    "heads": (1, 3),
    "concat": (True, False),
    "negative_slope": (0.2, 0.5),
    "bias": (True, False),
    "weight": (False, True),
    "num_edges": (None, M),
    "in_channels": (IN, -1),
    "aggr": ("add", "mean", "max", "var"),
    "dtype": (torch.float32, torch.float64),
}


def with_attention(mode):
    return {} if mode is None else {"use_attention": True, "attention_mode": mode}


def possible(row):  # PyG's makes a bias that does not fit, and a mean over heads that there are not
    get = dict(zip(OPTIONS, row, strict=False)).get
    return get("mode") is not None or (get("heads", 1) == 1 and get("concat", True))


@pytest.fixture
def x():
    return torch.randn(N, IN)


@pytest.fixture
def attr():
    return torch.randn(M, IN)


@pytest.fixture
def index():
    """Each node is somewhere, one twice in one place."""
    return torch.cat([torch.stack([torch.arange(N), torch.arange(N) % M]), random_edge_index(N, M, 12, seed=1)], 1)


@pytest.mark.parametrize("row", list(AllPairs(list(OPTIONS.values()), filter_func=possible)), ids=name_of)
def test_as_pyg(row, x, attr, index):
    mode, heads, concat, negative_slope, bias, weight, num_edges, in_channels, aggr, dtype = row
    options = {"heads": heads, "concat": concat, "negative_slope": negative_slope, "bias": bias, "aggr": aggr}
    ours, theirs = (
        layer(in_channels, OUT, **options, **with_attention(mode)) for layer in (HypergraphConv, pyg.HypergraphConv)
    )
    args = [x, index, torch.rand(M) + 0.5 if weight else None, None if mode is None else attr, num_edges]
    ours(*args), theirs(*args)  # which finds lazy channels
    assert_as_pyg(ours, theirs, *args, dtype=dtype)


@pytest.mark.parametrize("mode", MODES)
def test_fresh_layers_are_pygs(mode):
    states = []
    for layer in (HypergraphConv, pyg.HypergraphConv):
        torch.manual_seed(3)
        conv = layer(IN, OUT, **with_attention(mode))
        states.append(conv.state_dict())
        assert str(conv) == "HypergraphConv(6, 4)"
    assert list(states[0]) == list(states[1])
    torch.testing.assert_close(*states, rtol=0, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_formula(mode, x, attr, index):
    """By the paper's matrices, over an index without duplicates."""
    conv, index = HypergraphConv(IN, OUT, **with_attention(mode)).double(), index.unique(dim=1)
    x, attr, weight = x.double(), attr.double(), torch.rand(M).double() + 0.5
    conv.bias.data.uniform_()
    incidence = torch.zeros(N, M).double()
    incidence[index[0], index[1]] = 1
    attended = incidence
    if mode is not None:
        ends = torch.cat([conv.lin(x).unsqueeze(1).expand(N, M, OUT), conv.lin(attr).expand(N, M, OUT)], -1)
        logits = F.leaky_relu((ends * conv.att).sum(-1), 0.2).masked_fill(incidence == 0, -torch.inf)
        attended = logits.softmax(0 if mode == "node" else 1)
    gathered = (attended.t() @ conv.lin(x)) / incidence.sum(0).unsqueeze(1)
    expected = (attended @ gathered) / (incidence @ weight).unsqueeze(1) + conv.bias
    torch.testing.assert_close(conv(x, index, weight, attr), expected)


@pytest.mark.parametrize("mode", MODES)
def test_everywhere_the_same(mode, x, attr, index):
    conv = HypergraphConv(IN, OUT, heads=2, **with_attention(mode))
    out = conv(x, index, None, attr)
    for backend in ("cpu", "reference"):
        with gattn.backend(backend):
            torch.testing.assert_close(conv(x, index, None, attr), out)
    batch = conv(torch.stack([x, 2 * x]), index, None, torch.stack([attr, attr]))
    torch.testing.assert_close(batch, torch.stack([out, conv(2 * x, index, None, attr)]))
    unique = index.unique(dim=1)
    for graph in (gattn.SparseGraph(unique, M, N), to_torch_csr_tensor(unique.flip(0), size=(M, N))):
        torch.testing.assert_close(conv(x, graph, None, attr), conv(x, unique, None, attr))
    complete = gattn.CompleteGraph(M, N)
    torch.testing.assert_close(conv(x, complete, None, attr), conv(x, complete.edge_index, None, attr))
    for clone in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
        torch.testing.assert_close(clone(x, index, None, attr), out)
    torch._dynamo.reset()
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, index, None, attr, M), out)
    nodes, edges = torch.randperm(N), torch.randperm(M)
    permuted = torch.stack([nodes.argsort()[index[0]], edges.argsort()[index[1]]])
    torch.testing.assert_close(conv(x[nodes], permuted, None, attr[edges]), out[nodes])


@pytest.mark.parametrize("mode", MODES)
def test_gradients(mode, x, attr, index):
    conv = HypergraphConv(IN, 2, heads=2, **with_attention(mode)).double()
    inputs = [tensor.double().requires_grad_() for tensor in (x, torch.rand(M) + 0.5, attr)]
    assert torch.autograd.gradcheck(lambda x, weight, attr: conv(x, index, weight, attr), inputs)


@pytest.mark.parametrize("mode", MODES)
def test_nodes_in_no_hyperedge(mode, x, attr):
    conv = HypergraphConv(IN, OUT, bias=False, **with_attention(mode))
    weight = torch.rand(M).requires_grad_()
    out = conv(x.requires_grad_(), torch.tensor([[0, 1], [1, 1]]), weight, attr)
    assert out[2:].eq(0).all()
    out.sum().backward()
    assert x.grad.isfinite().all()
    assert weight.grad.isfinite().all()
    none = torch.empty(2, 0, dtype=torch.long)
    assert conv(x, none, None, attr).eq(0).all()
    assert conv(x[:0], none, None, attr[:0]).shape == (0, OUT)
    assert HypergraphConv(IN, OUT, bias=False)(x, none).eq(0).all()


@pytest.mark.parametrize("mode", MODES[1:])
def test_dropout_takes_the_same_weights_there_and_back(mode, attr):
    """Each node is in one hyperedge of its own, so that both weights are one, and an output four times the features."""
    conv = HypergraphConv(IN, OUT, dropout=0.5, bias=False, **with_attention(mode))
    x, index = torch.randn(1000, IN), torch.arange(1000).expand(2, -1)
    factors = (conv(x, index, None, torch.randn(1000, IN)) / conv.lin(x)).mean(1)
    torch.testing.assert_close(factors, torch.where(factors > 2, 4.0, 0.0))
    assert 400 < factors.count_nonzero() < 600
    torch.testing.assert_close(conv.eval()(x, index, None, torch.randn(1000, IN)), conv.lin(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", MODES)
def test_half_precision(dtype, mode, x, attr, index):
    conv = HypergraphConv(IN, OUT, heads=2, **with_attention(mode))
    expected = conv(x, index, None, attr)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(conv(x, index, None, attr).float(), expected, atol=0.05, rtol=0.05)
    out = conv.to(dtype)(x.to(dtype), index, None, attr.to(dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, atol=0.05, rtol=0.05)


def test_recorded_weights(x, attr, index):
    for mode, rows, count in (("node", 1, M), ("edge", 0, N)):
        conv = HypergraphConv(IN, OUT, heads=2, **with_attention(mode))
        with gattn.record_attention(conv) as records:
            conv(x, index, None, attr)
        there, back = records[""]
        torch.testing.assert_close(there.weights, back.weights)
        assert there.edge_index.equal(index)
        assert back.edge_index.equal(index.flip(0))
        totals = torch.zeros(count, 2).index_add(0, index[rows], there.weights)
        torch.testing.assert_close(totals, torch.ones(count, 2))


def test_number_of_hyperedges(x, attr, index):
    conv, weight = HypergraphConv(IN, OUT), torch.rand(M)
    few = index[:, index[1] < 3]
    torch.testing.assert_close(conv(x, few, weight), conv(x, few, weight[:3]))
    with torch_geometric.experimental.experimental_mode("disable_dynamic_shapes"):
        with pytest.raises(ValueError, match="num_edges must be given"):
            conv(x, index)
        assert conv(x, index, num_edges=M).shape == (N, OUT)


class OneEach(torch.nn.Module):
    """As many hyperedges as nodes."""

    def __init__(self, weighted):
        super().__init__()
        self.conv = HypergraphConv(IN, OUT)
        self.weighted = weighted

    def forward(self, x, index):
        return self.conv(x, index, x[:, 0] if self.weighted else None, num_edges=x.size(0))


@pytest.mark.parametrize("weighted", [False, True])
def test_exported(weighted, x, index):
    module = OneEach(weighted)
    auto = torch.export.Dim.AUTO
    program = torch.export.export(module, (x, index), dynamic_shapes=({0: auto}, {1: auto}))
    for nodes, members in ((N + 3, 40), (3, 2)):
        given = torch.randn(nodes, IN), random_edge_index(nodes, nodes, members, seed=1)
        torch.testing.assert_close(program.module()(*given), module(*given))


def test_wrong_inputs(x, attr, index):
    conv, attending = HypergraphConv(IN, OUT), HypergraphConv(IN, OUT, use_attention=True)
    with pytest.raises(ValueError, match="so it needs hyperedge_attr"):
        attending(x, index)
    with pytest.raises(ValueError, match="got 4 num_edges, 5 rows of hyperedge_attr"):
        attending(x, index, None, attr, 4)
    with pytest.raises(TypeError, match="hyperedge_weight must be a tensor; got list"):
        conv(x, index, [1.0] * M)
    with pytest.raises(ValueError, match=r"hyperedge_weight must have shape \[M\]; got \[5, 1\]"):
        conv(x, index, torch.ones(M, 1))
    with pytest.raises(TypeError, match="x must be a tensor; got tuple"):
        conv((x, x), index)
    with pytest.raises(ValueError, match="in_channels=6"):
        conv(x[:, :5], index)
    with pytest.raises(ValueError, match="target x has 5 channels"):
        attending(x, index, None, attr[:, :5])
    for wrong in (index + N, index - 1):
        with pytest.raises(IndexError):
            conv(x, wrong)
    with pytest.raises(ValueError, match="must be 'node' or 'edge'; got 'both'"):
        HypergraphConv(IN, OUT, attention_mode="both")
    with pytest.raises(ValueError, match="heads must be at least 1; got 0"):
        HypergraphConv(IN, OUT, heads=0)
    with pytest.raises(TypeError, match="flow"):
        HypergraphConv(IN, OUT, flow="target_to_source")
