"""FAConv against PyG's, and what it has beyond."""

import copy
import pickle

import pytest
import torch
import torch_geometric.nn as pyg
from allpairspy import AllPairs
from torch_geometric.utils import coalesce, to_torch_coo_tensor, to_torch_csr_tensor

import gattn
from gattn.nn.graph.fa_conv import FAConv
from gattn.testing import assert_permutation_equivariant, random_edge_index
from tests.cases import mostly_slow
from tests.nn.against_pyg import FORMS, assert_as_pyg, name_of

N, F = 9, 6
OPTIONS = {
    "form": FORMS,
    "normalize": (True, False),
    "add_self_loops": (True, False),
    "eps": (0.3, 0.0),
    "returns": (None, True, False),
    "aggr": ("add", "mean", "max", "mul"),
    "flow": ("source_to_target", "target_to_source"),
    "dtype": (torch.float32, torch.float64),
}


@pytest.fixture
def x():
    return torch.randn(N, F)


@pytest.fixture
def x_0():
    return torch.randn(N, F)


@pytest.fixture
def edge_index():
    return coalesce(random_edge_index(N, num_edges=40, seed=1))


def possible(row):
    is_list = row[0] in ("edge_index", "EdgeIndex")
    return (is_list or row[0] != "SparseTensor" or row[1:2] != [False]) and (
        is_list or row[6:7] != ["target_to_source"]
    )


@pytest.mark.parametrize("options", list(AllPairs(list(OPTIONS.values()), filter_func=possible)), ids=name_of)
def test_as_pyg(options, x, x_0, edge_index):
    form, normalize, add_self_loops, eps, returns, aggr, flow, dtype = options
    chosen = {"add_self_loops": add_self_loops, "normalize": normalize, "aggr": aggr, "flow": flow}
    ours, theirs = (layer(F, eps, **chosen) for layer in (FAConv, pyg.FAConv))
    weights = {} if normalize else {"edge_weight": torch.randn(edge_index.size(1))}
    graph = FORMS[form](edge_index, (N, N))
    assert_as_pyg(ours, theirs, x, x_0, graph, dtype=dtype, return_attention_weights=returns, **weights)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("make", [to_torch_csr_tensor, to_torch_coo_tensor])
def test_values_of_an_adjacency_are_weights_as_in_pyg(make, normalize, x, x_0, edge_index):
    adjacency = make(edge_index.flip(0), torch.rand(edge_index.size(1)), size=(N, N))
    layers = [layer(F, normalize=normalize) for layer in (FAConv, pyg.FAConv)]
    assert_as_pyg(*layers, x, x_0, adjacency)
    by_column = adjacency.to_sparse_csc()
    torch.testing.assert_close(layers[0](x, x_0, by_column), layers[0](x, x_0, adjacency))
    (returned, alpha), (expected, _) = (layer(x, x_0, adjacency, None, True)[1] for layer in layers)
    torch.testing.assert_close(returned.to_dense(), expected.to_dense())
    assert alpha.shape == (returned._nnz(),)


def test_fresh_layers_and_lazy_ones(x, x_0, edge_index):
    for channels in (F, -1):
        torch.manual_seed(1)
        ours = FAConv(channels, 0.5)
        ours(x, x_0, edge_index)
        torch.manual_seed(1)
        theirs = pyg.FAConv(channels, 0.5)
        theirs(x, x_0, edge_index)
        torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()))
        assert str(ours) == str(theirs) == f"FAConv({channels}, eps=0.5)"
        assert ours._alpha is None


def test_formula(x, x_0, edge_index):
    conv = FAConv(F, eps=0.3).double()
    x, x_0 = x.double(), x_0.double()
    out, (edges, alpha) = conv(x, x_0, edge_index, return_attention_weights=True)
    source, target = edges.tolist()
    degrees = [target.count(i) for i in range(N)]
    left, right = conv.att_l.weight[0], conv.att_r.weight[0]
    expected = 0.3 * x_0
    for j, i, weight in zip(source, target, alpha, strict=True):
        torch.testing.assert_close(weight, (right @ x[i] + left @ x[j]).tanh())
        expected[i] = expected[i] + weight * x[j] / (degrees[i] * degrees[j]) ** 0.5
    torch.testing.assert_close(out, expected)


def test_cached_graph(x, x_0, edge_index):
    conv = FAConv(F, cached=True)
    out = conv(x, x_0, edge_index)
    assert conv._cached_edge_index is not None
    torch.testing.assert_close(conv(x, x_0, edge_index[:, :3]), out)  # as in PyG, the first graph stays
    torch.testing.assert_close(pickle.loads(pickle.dumps(conv))(x, x_0, edge_index[:, :3]), out)
    with pytest.raises(ValueError, match="the graph has 9 sources, but 8 according to the features"):
        conv(x[:8], x_0[:8], edge_index)
    conv.reset_parameters()
    assert conv._cached_edge_index is None
    assert conv._cached_adj_t is None
    conv.cached = False
    conv(x, x_0, edge_index)
    assert conv._cached_edge_index is None


def test_every_backend_and_graph(x, x_0, edge_index):
    conv = FAConv(F)
    lengths = torch.tensor([N, 4])
    pair, pair_0 = torch.stack([x, 2 * x]), torch.stack([x_0, x_0])
    padded = gattn.CompleteGraph(N, source_lengths=lengths, target_lengths=lengths)
    for graph in (edge_index, gattn.SparseGraph(edge_index), gattn.CompleteGraph(N, causal=True), padded):
        out = conv(pair, pair_0, graph)
        with gattn.backend("reference"):
            torch.testing.assert_close(conv(pair, pair_0, graph), out)
    with gattn.backend("cpu"):
        torch.testing.assert_close(conv(pair, pair_0, edge_index)[1], conv(2 * x, x_0, edge_index))
    causal, (_, weights) = conv(x, x_0, gattn.CompleteGraph(N, causal=True), return_attention_weights=True)
    listed = FAConv(F, add_self_loops=False)
    listed.load_state_dict(conv.state_dict())
    torch.testing.assert_close(causal, listed(x, x_0, gattn.CompleteGraph(N, causal=True).edge_index))
    assert weights.shape == (1, N, N)
    short = gattn.CompleteGraph(4).edge_index
    torch.testing.assert_close(conv(pair, pair_0, padded)[1, :4], conv(2 * x[:4], x_0[:4], short))


@pytest.mark.parametrize("normalize", [True, False])
def test_gradients(normalize, x, x_0, edge_index):
    conv = FAConv(F, normalize=normalize).double()
    weight = None if normalize else torch.randn(edge_index.size(1)).double().requires_grad_()
    inputs = (x.double().requires_grad_(), x_0.double().requires_grad_(), weight, conv.att_l.weight, conv.att_r.weight)

    def call(x, x_0, weight, left, right):
        parameters = {"att_l.weight": left, "att_r.weight": right}
        return torch.func.functional_call(conv, parameters, (x, x_0, edge_index, weight))

    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(lambda x: conv(x, inputs[1], edge_index, weight), inputs[:1])


@pytest.mark.parametrize("normalize", [True, False])
def test_dropout_is_for_training_and_scales_what_it_keeps(normalize):
    nodes = torch.arange(200)
    x, weight = torch.ones(200, 1), None if normalize else torch.ones(200)
    conv = FAConv(1, dropout=0.5, eps=0.0, add_self_loops=False, normalize=normalize)
    plain = copy.deepcopy(conv).eval()(x, x, torch.stack([nodes, nodes]), weight)
    out, (_, alpha) = conv(x, x, torch.stack([nodes, nodes]), weight, return_attention_weights=True)
    torch.testing.assert_close(alpha, plain.squeeze(-1))  # before dropout
    kept = out != 0
    assert 60 < kept.sum() < 140
    torch.testing.assert_close(out[kept], 2 * plain[kept])


@pytest.mark.parametrize("normalize", [True, False])
def test_no_edges_and_no_nodes(normalize, x, x_0):
    conv = FAConv(F, eps=0.3, add_self_loops=False, normalize=normalize)
    none, weight = torch.empty(2, 0, dtype=torch.int64), None if normalize else torch.empty(0)
    torch.testing.assert_close(conv(x, x_0, none, weight), 0.3 * x_0)
    assert conv(x[:0], x_0[:0], none, weight).shape == (0, F)
    if normalize:  # the source has no degree, and so no influence
        torch.testing.assert_close(conv(x, x_0, torch.tensor([[0], [1]])), 0.3 * x_0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, x, x_0, edge_index):
    conv = FAConv(F)
    expected = conv(x, x_0, edge_index)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(conv(x, x_0, edge_index), expected, atol=0.05, rtol=0.05)
    out = conv.to(dtype)(x.to(dtype), x_0.to(dtype), edge_index)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, atol=0.05, rtol=0.05)


def test_around_it(x, x_0, edge_index):
    conv = FAConv(F)
    assert_permutation_equivariant(lambda x, edges: conv(x, x, edges), x, edge_index)
    with gattn.record_attention(conv) as records:
        _, (edges, alpha) = conv(x, x_0, edge_index, return_attention_weights=True)
    assert len(records[""]) == 1
    torch.testing.assert_close(records[""][0].weights.squeeze(-1), alpha)
    assert torch.equal(records[""][0].edge_index, edges)


@pytest.mark.parametrize("options", mostly_slow([{}, {"cached": True}, {"normalize": False}, {"aggr": "max"}]), ids=str)
def test_compiled(options, x, x_0, edge_index):
    backend = "aot_eager" if options else "inductor"  # the first takes less time
    conv = FAConv(F, **options)
    args = (x, x_0, edge_index, *([torch.rand(edge_index.size(1))] if options.get("normalize") is False else []))
    expected = copy.deepcopy(conv)(*args)
    torch._dynamo.reset()
    compiled = torch.compile(conv, fullgraph=True, backend=backend)
    for _ in range(2):
        torch.testing.assert_close(compiled(*args), expected)


def test_wrong_inputs(x, x_0, edge_index):
    conv, weighted = FAConv(F), FAConv(F, normalize=False)
    weight = torch.ones(edge_index.size(1))
    with pytest.raises(TypeError, match="x must be a tensor, the features of all nodes; got tuple"):
        conv((x, x), x_0, edge_index)
    with pytest.raises(TypeError, match="x_0 must be a tensor, the initial features of all nodes; got NoneType"):
        conv(x, None, edge_index)
    with pytest.raises(ValueError, match=r"x_0 must have the shape of x, \[9, 6\]; got \[1, 6\]"):
        conv(x, x_0[:1], edge_index)
    with pytest.raises(ValueError, match="made for in_channels=6"):
        conv(x[:, :5], x_0[:, :5], edge_index)
    with pytest.raises(ValueError, match="to pass edge_weight, make the layer with normalize=False"):
        conv(x, x_0, edge_index, weight)
    with pytest.raises(ValueError, match="with normalize=False, FAConv needs edge_weight"):
        weighted(x, x_0, edge_index)
    with pytest.raises(TypeError, match="edge_weight must be a tensor; got float"):
        weighted(x, x_0, edge_index, 1.0)
    with pytest.raises(ValueError, match=r"edge_weight must have one entry per edge, \[\d+\], .* got \[3\]"):
        weighted(x, x_0, edge_index, weight[:3])
    with pytest.raises(ValueError, match="needs a list of edges"):
        weighted(x, x_0, gattn.CompleteGraph(N), weight)
    with pytest.raises(ValueError, match="can only sum its messages; got aggr='mean'"):
        FAConv(F, aggr="mean")(x, x_0, gattn.CompleteGraph(N))
    for layer, weights in ((conv, None), (weighted, weight)):
        with pytest.raises(IndexError, match="edge_index holds"):
            layer(x, x_0, edge_index + N, weights)
    with pytest.raises(ValueError, match="dropout must be a probability"):
        FAConv(F, dropout=1.5)
