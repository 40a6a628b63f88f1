"""AGNNConv against PyG's, and what it has beyond."""

import pytest
import torch
import torch_geometric.nn as pyg
from allpairspy import AllPairs
from torch_geometric.utils import coalesce

import gattn
from gattn.nn import AGNNConv
from gattn.testing import assert_permutation_equivariant, random_edge_index
from tests.nn.against_pyg import FORMS, assert_as_pyg, name_of

N, F = 9, 6
OPTIONS = {
    "form": FORMS,
    "requires_grad": (True, False),
    "add_self_loops": (True, False),
    "aggr": ("add", "mean", "max"),
    "flow": ("source_to_target", "target_to_source"),
    "dtype": (torch.float32, torch.float64),
}


@pytest.fixture
def x():
    return torch.randn(N, F)


@pytest.fixture
def edge_index():
    return coalesce(random_edge_index(N, num_edges=40, seed=1))


def possible(row):
    return len(row) < 5 or row[4] == "source_to_target" or row[0] in ("edge_index", "EdgeIndex")


@pytest.mark.parametrize("options", list(AllPairs(list(OPTIONS.values()), filter_func=possible)), ids=name_of)
def test_as_pyg(options, x, edge_index):
    form, requires_grad, add_self_loops, aggr, flow, dtype = options
    chosen = {"aggr": aggr, "flow": flow}
    ours, theirs = (layer(requires_grad, add_self_loops, **chosen) for layer in (AGNNConv, pyg.AGNNConv))
    ours.beta.data.fill_(1.7)
    assert_as_pyg(ours, theirs, x, FORMS[form](edge_index, (N, N)), dtype=dtype)


def test_fresh_layers_and_their_words():
    for requires_grad in (True, False):
        ours, theirs = AGNNConv(requires_grad), pyg.AGNNConv(requires_grad)
        assert str(ours) == str(theirs) == "AGNNConv()"
        assert ours.requires_grad == requires_grad
        assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
        ours.beta.data.fill_(3)
        ours.reset_parameters()
        assert ours.beta.item() == (1 if requires_grad else 3)  # as PyG's


def test_formula(x, edge_index):
    conv = AGNNConv().double()
    conv.beta.data.fill_(2.5)
    x = x.double()
    out = conv(x, edge_index)
    edges = gattn.SparseGraph(edge_index, N, N).with_self_loops().edge_index
    for i in range(N):
        sources = edges[0, edges[1] == i]
        logits = torch.stack([2.5 * x[i] @ x[j] / (x[i].norm() * x[j].norm()) for j in sources])
        torch.testing.assert_close(out[i], logits.softmax(0) @ x[sources])


def test_every_backend_and_graph(x, edge_index):
    conv = AGNNConv()
    for graph in (edge_index, gattn.CompleteGraph(N), gattn.CompleteGraph(N, causal=True)):
        out = conv(x, graph)
        with gattn.backend("reference"):
            torch.testing.assert_close(conv(x, graph), out)
    with gattn.backend("cpu"):
        torch.testing.assert_close(conv(torch.stack([x, 2 * x]), edge_index)[1], 2 * conv(x, edge_index))


def test_gradients(x, edge_index):
    conv = AGNNConv().double()
    x = x.double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, beta: torch.func.functional_call(conv, {"beta": beta}, (x, edge_index)), (x, conv.beta)
    )
    assert torch.autograd.gradgradcheck(lambda x: conv(x, edge_index), (x,))


def test_zeros_and_nodes_without_edges(x):
    x[0] = 0
    x.requires_grad_()
    out = AGNNConv(add_self_loops=False)(x, torch.tensor([[0, 1], [1, 1]]))
    assert out[2:].eq(0).all()
    torch.testing.assert_close(out[1], x[1] * (1 / (1 + torch.tensor(-1.0).exp())))
    out.sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, x, edge_index):
    conv = AGNNConv()
    out = conv.to(dtype)(x.to(dtype), edge_index)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), AGNNConv()(x, edge_index), atol=0.05, rtol=0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(AGNNConv()(x, edge_index).float(), AGNNConv()(x, edge_index), atol=0.05, rtol=0.05)


def test_around_it(x, edge_index):
    conv = AGNNConv()
    assert_permutation_equivariant(conv, x, edge_index)
    expected = conv(x, edge_index)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(conv, fullgraph=True)(x, edge_index), expected)
    with gattn.record_attention(conv) as records:
        conv(x, edge_index)
    weights, graph = records[""][0]
    totals = torch.zeros(N, 1).index_add(0, graph.edge_index[1], weights)
    torch.testing.assert_close(totals, torch.ones(N, 1))
    model = pyg.Sequential("x, edge_index", [(conv, "x, edge_index -> x"), (AGNNConv(False), "x, edge_index -> x")])
    assert model(x, edge_index).shape == (N, F)


def test_wrong_inputs(x, edge_index):
    conv = AGNNConv()
    with pytest.raises(TypeError, match="x must be a tensor, the features of all nodes; got tuple"):
        conv((x, x), edge_index)
    with pytest.raises(ValueError, match="floating-point"):
        conv(x.long(), edge_index)
    with pytest.raises(ValueError, match="got source features of"):
        conv(x[0], edge_index)
    with pytest.raises(IndexError):
        conv(x, edge_index + N)
    with pytest.raises(TypeError, match="AGNNConv has no argument heads"):
        AGNNConv(heads=2)
