"""DenseGATConv against PyG's, and against GATConv on the same graph."""

import pytest
import torch
import torch_geometric.nn as pyg
from allpairspy import AllPairs
from torch_geometric.utils import to_dense_adj

import gattn
from gattn.nn import DenseGATConv, GATConv
from gattn.testing import random_edge_index

B, N, F, C = 3, 7, 6, 5
OPTIONS = {
    "heads": (1, 4),
    "concat": (True, False),
    "negative_slope": (0.2, 0.7),
    "bias": (True, False),
    "in_channels": (F, -1),
    "batch": ("both", "features", "none"),
    "mask": (True, False),
    "add_loop": (True, False),
    "dtype": (torch.float32, torch.float64, torch.bool),
}


def adjacency(*size):
    """Of which each row has an edge, so that PyG's has no NaN."""
    adj = (torch.rand(*size, N, N) < 0.4).float()
    adj[..., 0] = 2.0
    return adj


@pytest.mark.parametrize("options", list(AllPairs(list(OPTIONS.values()))), ids=str)
def test_as_pyg(options):
    heads, concat, slope, bias, in_channels, batch, has_mask, add_loop, dtype = options
    of_features = torch.double if dtype == torch.float64 else torch.float32
    ours, theirs = (
        layer(in_channels, C, heads, concat, slope, bias=bias).to(of_features)
        for layer in (DenseGATConv, pyg.DenseGATConv)
    )
    x = torch.randn(*([N, F] if batch == "none" else [B, N, F]), dtype=of_features)
    adj = adjacency(*([B] if batch == "both" else [])).to(dtype)
    mask = torch.rand(1 if batch == "none" else B, N) < 0.7 if has_mask else None
    for conv in (ours, theirs):
        conv(x, adj, mask, add_loop)  # finds the number of channels
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    found = []
    for conv in (ours, theirs):
        leaves = [x.clone().requires_grad_(), *conv.parameters()]
        out = conv(leaves[0], adj, mask, add_loop)
        grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape).cos()
        found.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other)


def test_fresh_layers_are_pygs():
    layers = []
    for layer in (DenseGATConv, pyg.DenseGATConv):
        torch.manual_seed(5)
        layers.append(layer(F, C, heads=3))
    ours, theirs = layers
    assert str(ours) == str(theirs)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter), name


def test_as_on_edges():
    edge_index = torch.unique(random_edge_index(N, num_edges=20), dim=1)
    adj = to_dense_adj(edge_index, max_num_nodes=N)[0].t()  # rows are targets
    sparse, dense = GATConv(F, C, heads=2), DenseGATConv(F, C, heads=2)
    dense.lin.weight.data = sparse.lin.weight.data
    dense.att_src.data, dense.att_dst.data = sparse.att_src.data[None], sparse.att_dst.data[None]
    x = torch.randn(N, F)
    torch.testing.assert_close(dense(x, adj)[0], sparse(x, edge_index))


def test_a_node_without_neighbours_gets_zeros():
    conv, x = DenseGATConv(F, C, heads=2), torch.randn(1, N, F, requires_grad=True)
    adj = torch.zeros(1, N, N)
    adj[0, 0, 1] = 1
    out = conv(x, adj, add_loop=False)
    assert out[0, 1:].eq(0).all()
    assert out[0, 0].ne(0).all()
    out.sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad[0, 2:].eq(0).all()


def test_dropout_in_training_only():
    conv, x, adj = DenseGATConv(F, C, dropout=0.5), torch.randn(B, N, F), adjacency(B)
    assert not torch.equal(conv(x, adj), conv(x, adj))
    conv.eval()
    assert torch.equal(conv(x, adj), conv(x, adj))


def test_the_adjacency_stays_as_it_was():
    conv, adj = DenseGATConv(F, C), torch.zeros(1, N, N)
    conv(torch.randn(1, N, F), adj)
    assert adj.eq(0).all()


def test_compiled_and_recorded():
    conv, x, adj = DenseGATConv(F, C, heads=2), torch.randn(B, N, F), adjacency(B)
    expected = conv(x, adj)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(conv, fullgraph=True)(x, adj), expected)
    with gattn.record_attention(conv) as records:
        conv(x, adj)
    weights = records[""][0].weights
    assert weights.shape == (B, 2, N, N)
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, 2, N))


def test_wrong_inputs():
    conv, x = DenseGATConv(F, C), torch.randn(B, N, F)
    with pytest.raises(ValueError, match=r"adj must have shape \[3, 7, 7\]"):
        conv(x, torch.ones(B, N, N + 1))
    with pytest.raises(ValueError, match="features must have shape"):
        conv(x[0, 0], torch.ones(N, N))
    with pytest.raises(ValueError, match="x must have shape"):
        conv(x[None], torch.ones(N, N))
    with pytest.raises(TypeError, match="x and adj must be tensors; got Tensor and NoneType"):
        conv(x, None)
    with pytest.raises(ValueError, match="floating-point"):
        conv(x.long(), torch.ones(N, N))
    with pytest.raises(ValueError, match="was made for in_channels=6"):
        conv(x[..., 1:], torch.ones(N, N))
    with pytest.raises(ValueError, match=r"mask must have shape \[3, 7\]"):
        conv(x, torch.ones(N, N), torch.ones(B, N + 1))
    with pytest.raises(ValueError, match="at least 1"):
        DenseGATConv(F, C, heads=0)
    with pytest.raises(ValueError, match="dropout"):
        DenseGATConv(F, C, dropout=1.5)
