"""EGATConv against its formula, and against DGL's layer where that can be imported."""

import copy
import importlib.util
import warnings

import pytest
import torch
import torch.nn.functional as nnf
from torch_geometric.utils import coalesce

import gattn
from gattn.nn import EGATConv
from gattn.testing import random_edge_index
from tests.nn.against_pyg import results

M, N, F, D = 9, 7, 5, 3
EDGES = coalesce(random_edge_index(M, M, 40, seed=1))


def inputs(sources=M, targets=None):
    edges = EDGES if targets is None else coalesce(random_edge_index(sources, targets, 40, seed=2))
    x = torch.randn(sources, F, dtype=torch.float64)
    x = x if targets is None else (x, torch.randn(targets, F + 1, dtype=torch.float64))
    return x, edges, torch.randn(edges.size(1), D, dtype=torch.float64)


class Formula(torch.nn.Module):
    """What the layer computes, with a loop over targets."""

    def __init__(self, conv):
        super().__init__()
        self.conv = copy.deepcopy(conv)

    def forward(self, x, edges, edge_attr, edge_weight=None):
        conv, (sources, targets) = self.conv, x if isinstance(x, tuple) else (x, x)
        shape = (-1, conv.heads, conv.out_edge_channels)
        hidden = conv.fc_ni(sources)[edges[0]] + conv.fc_nj(targets)[edges[1]] + conv.fc_fij(edge_attr)
        hidden = nnf.leaky_relu(hidden if conv.bias is None else hidden + conv.bias).view(shape)
        logits = (hidden * conv.attn).sum(-1)
        value = conv.fc_node_src(sources).view(-1, conv.heads, conv.out_channels)
        rows = []
        for i in range(targets.size(0)):
            mine = (edges[1] == i).nonzero().flatten()
            weights = logits[mine].softmax(0)
            weights = weights if edge_weight is None else weights * edge_weight[mine, None]
            rows.append((weights.unsqueeze(-1) * value[edges[0, mine]]).sum(0))
        return torch.stack(rows), hidden


def conv_of(bias=True, in_channels=F, heads=2):
    conv = EGATConv(in_channels, D, 4, 6, heads, bias).double()
    for parameter in conv.parameters():
        parameter.data.uniform_(-1, 1)
    return conv


def assert_as_formula(conv, *args):
    found, expected = results(copy.deepcopy(conv), *args), results(Formula(conv), *args)
    torch.testing.assert_close(found, {name.removeprefix("conv."): value for name, value in expected.items()})


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("heads", [1, 3])
def test_it_computes_the_formula(bias, heads):
    assert_as_formula(conv_of(bias, heads=heads), *inputs())


def test_bipartite_graphs():
    assert_as_formula(conv_of(in_channels=(F, F + 1)), *inputs(M, N))


def test_edge_weights_are_factors():
    x, edges, edge_attr = inputs()
    assert_as_formula(conv_of(), x, edges, edge_attr, torch.rand(edges.size(1), dtype=torch.float64))


def test_attention_is_returned():
    x, edges, edge_attr = inputs()
    conv = conv_of()
    out, _, alpha = conv(x, edges, edge_attr, get_attention=True)
    assert alpha.shape == (edges.size(1), 2, 1)
    value = conv.fc_node_src(x).view(-1, 2, 4)
    again = torch.zeros_like(out).index_add(0, edges[1], alpha * value[edges[0]])
    torch.testing.assert_close(again, out)
    weight = torch.rand(edges.size(1), dtype=torch.float64)
    scaled = conv(x, edges, edge_attr, weight, get_attention=True)[2]
    torch.testing.assert_close(scaled, alpha * weight.view(-1, 1, 1))


def test_it_compiles_and_is_recorded():
    x, edges, edge_attr = inputs()
    conv = conv_of()
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, edges, edge_attr), conv(x, edges, edge_attr))
    with gattn.record_attention(conv) as records:
        alpha = conv(x, edges, edge_attr, get_attention=True)[2]
    torch.testing.assert_close(records[""][0].weights, alpha.squeeze(-1))


def test_wrong_inputs_are_refused():
    x, edges, edge_attr = inputs()
    conv = conv_of()
    with pytest.raises(ValueError, match="edge features of 3"):
        conv(x, edges)
    with pytest.raises(ValueError, match="4 channels"):
        conv(x, edges, torch.randn(edges.size(1), 4).double())
    with pytest.raises(TypeError, match="edge_weight must be a tensor"):
        conv(x, edges, edge_attr, [1.0] * edges.size(1))
    halves = conv.float()(x.float(), edges, edge_attr.float(), torch.ones(edges.size(1)).double())
    assert {out.dtype for out in halves} == {torch.float32}
    conv.double()
    with pytest.raises(ValueError, match="one factor per edge"):
        conv(x, edges, edge_attr, torch.ones(3).double())
    with pytest.raises(ValueError, match="out_channels must be at least 1"):
        EGATConv(5, 3, 0, 6, 2)


@pytest.mark.skipif(importlib.util.find_spec("dgl") is None, reason="DGL is not installed")
@pytest.mark.parametrize("bias", [True, False])
def test_dgl_gives_the_same_numbers(bias):
    from benchmarks.kernel_cases import import_dgl

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dgl = import_dgl()
        from dgl.nn.pytorch import EGATConv as Peer
    if not bias:
        pytest.skip("DGL's layer cannot be made without a bias")
    x, edges, edge_attr = inputs()
    edges = torch.cat([edges, torch.arange(M).repeat(2, 1)], 1)  # DGL refuses nodes without neighbours
    edge_attr = torch.randn(edges.size(1), D, dtype=torch.float64)
    conv = conv_of()
    peer = Peer(F, D, 4, 6, 2).double()
    peer.load_state_dict(conv.state_dict())
    torch.testing.assert_close(conv(x, edges, edge_attr), peer(dgl.graph(tuple(edges), num_nodes=M), x, edge_attr))
