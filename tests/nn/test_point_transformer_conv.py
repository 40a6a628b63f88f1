"""PointTransformerConv against PyG's, and what it has beyond."""

import copy
import pickle

import pytest
import torch
import torch_geometric.nn as pyg
from allpairspy import AllPairs
from torch.nn import Linear, ReLU, Sequential
from torch_geometric.utils import coalesce

import gattn
from gattn.nn.graph.point_transformer_conv import PointTransformerConv
from gattn.testing import random_edge_index
from tests.nn.against_pyg import FORMS, assert_as_pyg, name_of

M, N, F, C = 9, 7, 5, 8
#: Networks on edges. What is added to all logits of a target has no gradient, so `attn_nn` ends without a bias.
POS_NN = {
    "linear": lambda: None,
    "mlp": lambda: Sequential(Linear(3, 4), ReLU(), Linear(4, C)),
    "one": lambda: Linear(3, 1),
}
ATTN_NN = {
    "none": lambda: None,
    "mlp": lambda: Sequential(Linear(C, C), ReLU(), Linear(C, C, bias=False)),
    "one": lambda: Sequential(Linear(C, C), ReLU(), Linear(C, 1, bias=False)),
}
OPTIONS = {
    "form": FORMS,
    "pos_nn": POS_NN,
    "attn_nn": ATTN_NN,
    "bipartite": (False, True),
    "add_self_loops": (True, False),
    "aggr": ("add", "mean", "max"),
    "dtype": (torch.float32, torch.float64),
}


@pytest.fixture
def x():
    return torch.randn(M, F)


@pytest.fixture
def pos():
    return torch.randn(M, 3)


@pytest.fixture
def edge_index():
    return coalesce(random_edge_index(M, N, num_edges=40, seed=1))


def possible(row):
    # Without attn_nn, what a target alone adds to its logits has no gradient: a target's own features have none.
    return len(row) < 4 or not row[3] or row[2] != "none"


def without_gradient(lin):
    """Makes a weight a buffer."""
    weight = lin.weight.detach()
    del lin.weight
    lin.register_buffer("weight", weight)


@pytest.mark.parametrize("options", list(AllPairs(list(OPTIONS.values()), filter_func=possible)), ids=name_of)
def test_as_pyg(options, x, pos, edge_index):
    form, pos_nn, attn_nn, bipartite, add_self_loops, aggr, dtype = options
    channels = (F, 4) if bipartite else F
    ours, theirs = (
        layer(channels, C, POS_NN[pos_nn](), ATTN_NN[attn_nn](), add_self_loops, aggr=aggr)
        for layer in (PointTransformerConv, pyg.PointTransformerConv)
    )
    if attn_nn == "none":  # its gradient is nothing but rounding errors, which are not compared
        for conv in (ours, theirs):
            without_gradient(conv.lin_dst)
    given = ((x, torch.randn(N, 4)), (pos, torch.randn(N, 3))) if bipartite else (x, pos)
    graph = FORMS[form](edge_index, (M, N) if bipartite else (M, M))
    assert_as_pyg(ours, theirs, *given, graph, dtype=dtype)


@pytest.mark.parametrize("channels", [F, -1, (F, 4), (-1, -1)])
def test_fresh_and_lazy_layers(channels, x, pos, edge_index):
    given = ((x, torch.ones(N, 4)), (pos, pos[:N])) if isinstance(channels, tuple) else (x, pos)
    made = []
    for layer in (PointTransformerConv, pyg.PointTransformerConv):
        torch.manual_seed(5)
        conv = layer(channels, C, attn_nn=Linear(C, C))
        assert str(conv) == f"PointTransformerConv({channels}, {C})"
        made.append((conv(*given, edge_index), conv.state_dict()))
    (ours, state), (theirs, peer) = made
    torch.testing.assert_close(ours, theirs)
    assert list(state) == list(peer)
    assert all(torch.equal(state[name], peer[name]) for name in state)


def formula(conv, x, pos, edges):
    out = torch.zeros(M, C, dtype=x.dtype)
    for i in range(M):
        sources = edges[0, edges[1] == i]
        delta = torch.stack([conv.pos_nn(pos[i] - pos[j]) for j in sources])
        logits = x[i] @ conv.lin_dst.weight.t() - x[sources] @ conv.lin_src.weight.t() + delta
        weights = (logits if conv.attn_nn is None else conv.attn_nn(logits)).softmax(0)
        out[i] = (weights * (x[sources] @ conv.lin.weight.t() + delta)).sum(0)
    return out


@pytest.mark.parametrize("attn_nn", ["none", "mlp"])
def test_formula_on_every_graph_and_backend(attn_nn, x, pos, edge_index):
    conv = PointTransformerConv(F, C, POS_NN["mlp"](), ATTN_NN[attn_nn]()).double()
    x, pos = x.double(), 2 * pos.double()
    loops = gattn.SparseGraph(edge_index, M, M, self_loops=True)
    causal = gattn.CompleteGraph(M, causal=True)
    swapped = gattn.SparseGraph(edge_index.flip(0), flow="target_to_source")
    cases = ((edge_index, loops), (loops, loops), (swapped, loops), (causal, causal))
    for graph, edges in cases:
        expected = formula(conv, x, pos, edges.edge_index)
        for backend in ("cpu", "reference"):
            with gattn.backend(backend):
                torch.testing.assert_close(conv(x, pos, graph), expected)
                batch = conv(torch.stack([x, x.flip(0)]), torch.stack([pos, pos.flip(0)]), graph)
                torch.testing.assert_close(batch[0], expected)
                torch.testing.assert_close(conv(torch.stack([x.flip(0), x]), pos, graph)[1], expected)
    other = PointTransformerConv(F, C, POS_NN["mlp"](), ATTN_NN[attn_nn](), flow="target_to_source").double()
    other.load_state_dict(conv.state_dict())
    torch.testing.assert_close(other(x, pos, edge_index.flip(0)), conv(x, pos, edge_index))
    padded = gattn.CompleteGraph(M, source_lengths=torch.tensor([4, M]))
    out = conv(torch.stack([x, x]), torch.stack([pos, pos]), padded)
    torch.testing.assert_close(out[0, :4], conv(x[:4], pos[:4], gattn.CompleteGraph(4)))
    torch.testing.assert_close(out[1], conv(x, pos, gattn.CompleteGraph(M)))


@pytest.mark.parametrize("attn_nn", ["none", "mlp"])
def test_gradients(attn_nn, x, pos, edge_index):
    conv = PointTransformerConv(F, C, attn_nn=ATTN_NN[attn_nn]()).double()
    names = [name for name, _ in conv.named_parameters()]

    def call(x, pos, *parameters):
        return torch.func.functional_call(conv, dict(zip(names, parameters, strict=True)), (x, pos, edge_index))

    inputs = (x.double().requires_grad_(), pos.double().requires_grad_(), *conv.parameters())
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(lambda x: call(x, *inputs[1:]), inputs[:1])


@pytest.mark.parametrize(("attn_nn", "add_self_loops"), [("none", False), ("mlp", True)])
def test_compiled(attn_nn, add_self_loops, x, pos, edge_index):
    conv = PointTransformerConv(F, C, attn_nn=ATTN_NN[attn_nn](), add_self_loops=add_self_loops)
    torch._dynamo.reset()
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")(x, pos, edge_index)
    torch.testing.assert_close(compiled, conv(x, pos, edge_index))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, x, pos, edge_index):
    conv = PointTransformerConv(F, C, attn_nn=ATTN_NN["mlp"]())
    expected = conv(x, pos, edge_index)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(conv(x, pos, edge_index).float(), expected, atol=0.05, rtol=0.05)
    out = conv.to(dtype)(x.to(dtype), pos.to(dtype), edge_index)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, atol=0.05, rtol=0.05)


def test_around_it(x, pos, edge_index):
    conv = PointTransformerConv(F, C)
    expected = conv(x, pos, edge_index)
    for other in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
        assert torch.equal(other(x, pos, edge_index), expected)
    torch.testing.assert_close(conv(x, pos + 5, edge_index), expected)  # only differences count
    torch.testing.assert_close(conv(x.to_sparse_csr(), pos, edge_index), expected)
    with gattn.record_attention(conv) as records:
        conv(x, pos, edge_index)
    weights, graph = records[""][0]
    totals = torch.zeros(M, C).index_add(0, graph.edge_index[1], weights)
    torch.testing.assert_close(totals, torch.ones(M, C))  # one distribution per channel
    function = PointTransformerConv(F, 3, pos_nn=torch.tanh)  # no module, without parameters
    assert function(x, pos, edge_index).shape == (M, 3)
    none = torch.empty(2, 0, dtype=torch.long)
    assert PointTransformerConv(F, C, add_self_loops=False)(x, pos, none).eq(0).all()
    assert conv(x[:0], pos[:0], none).shape == (0, C)


def test_wrong_inputs(x, pos, edge_index):
    conv = PointTransformerConv(F, C)
    with pytest.raises(ValueError, match=r"x\[1\] may not be None"):
        conv((x, None), pos, edge_index)
    with pytest.raises(ValueError, match="x has 4 channels, but this layer was made for in_channels=5"):
        conv(x[:, :4], pos, edge_index)
    with pytest.raises(TypeError, match="the positions of the sources must be a tensor; got NoneType"):
        conv(x, None, edge_index)
    with pytest.raises(TypeError, match=r"a pair of tensors \(sources, targets\); got 3 of them"):
        conv(x, (pos, pos, pos), edge_index)
    with pytest.raises(ValueError, match="positions of the targets must be of a floating-point type; got torch.int64"):
        conv(x, (pos, pos.long()), edge_index)
    with pytest.raises(
        ValueError, match=r"positions of the sources must have one row per point, \[9, D\]; got \[4, 3\]"
    ):
        conv(x, pos[:4], edge_index)
    with pytest.raises(ValueError, match="points must have 3 coordinates; got 2"):
        conv(x, pos[:, :2], edge_index)
    with pytest.raises(ValueError, match=r"pos_nn must give \[E, 8\], here \[\d+, 8\]; got \[\d+, 7\]"):
        PointTransformerConv(F, C, Linear(3, 7))(x, pos, edge_index)
    with pytest.raises(ValueError, match=r"attn_nn must give \[E, 8\], here \[\d+, 8\]; got \[\d+, 7\]"):
        PointTransformerConv(F, C, attn_nn=Linear(C, 7))(x, pos, edge_index)
    with pytest.raises(IndexError, match="source index"):
        conv(x, pos, edge_index + M)
