"""LPFormer and its layer, beside PyG's."""

import inspect

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.nn.models.lpformer import LPAttLayer
from torch_geometric.utils import to_undirected

import gattn
from gattn import nn
from gattn.models import LPFormer
from gattn.testing import random_edge_index

L, N, F, E = 3, 7, 4, 11


def inputs():
    torch.manual_seed(0)
    edges = torch.stack([torch.randint(L, (E,)), torch.randint(N, (E,))])
    edges[0, :L] = torch.arange(L)
    sizes = (L, 2 * F), (N, F), (E, F)
    return edges, *(torch.randn(size, dtype=torch.double, requires_grad=True) for size in sizes)


@pytest.mark.parametrize(("heads", "concat"), [(1, True), (1, False), (3, False)])
def test_the_layer_as_pyg(heads, concat):
    ours, theirs = (cls(F, 5, None, heads, 0.1, concat).double().eval() for cls in (nn.LPAttLayer, LPAttLayer))
    ours.load_state_dict(theirs.state_dict())
    assert str(ours) == str(theirs)
    args, results = inputs(), []
    for layer in (ours, theirs):
        with torch.no_grad():
            layer.bias.copy_(torch.linspace(-1, 1, layer.bias.numel()))
        out = layer(*args)
        results.append([out, *torch.autograd.grad(out.sin().sum(), [*args[1:], *layer.parameters()])])
    torch.testing.assert_close(*results)


def test_the_layer_compiled_and_recorded():
    layer, args = nn.LPAttLayer(F, 5).double(), inputs()
    with gattn.record_attention(layer) as records:
        expected = layer(*args)
    assert len(records) == 1
    torch.testing.assert_close(torch.compile(layer, backend="aot_eager", fullgraph=True)(*args), expected)
    assert torch.autograd.gradgradcheck(lambda *x: layer(args[0], *x), args[1:])


@pytest.mark.parametrize("untouched", [True, False])
def test_batches(untouched):
    layer, (edges, links, nodes, encodings) = nn.LPAttLayer(F, 5).double(), inputs()
    if not untouched:
        layer.lin_r.register_forward_hook(lambda module, args, out: None)
    expected = layer(edges, links, nodes, encodings)
    twice = layer(edges, links.expand(2, L, -1), nodes.expand(2, N, -1), encodings)
    torch.testing.assert_close(twice[1], expected)


def test_wrong_inputs():
    layer, (edges, links, nodes, encodings) = nn.LPAttLayer(F, 5).double(), inputs()
    with pytest.raises(ValueError, match=r"ppr_rpes must be \[11, 4\]"):
        layer(edges, links, nodes, encodings[1:])
    with pytest.raises(ValueError, match="made for in_channels=8"):
        layer(edges, nodes, nodes, encodings)
    with pytest.raises(ValueError, match="edge_feats may not be None"):
        layer(edges, None, nodes, encodings)
    with pytest.raises(ValueError, match="ppr_rpes is float32"):
        layer(edges, links, nodes, encodings.float())
    with pytest.raises(IndexError):
        layer(edges + N, links, nodes, encodings)
    for option in ("num_transformer_layers", "num_heads"):
        with pytest.raises(ValueError, match=f"{option} must be at least 1"):
            LPFormer(F, 8, **{option: 0})


def test_heads_side_by_side_are_normed_together():
    """PyG's norm has the channels of one head, so its layer fails."""
    args, parts = inputs(), []
    layer, single = (nn.LPAttLayer(F, 5, num_heads=heads).double() for heads in (3, 1))
    assert layer.post_att_norm.normalized_shape == (15,)
    layer.post_att_norm = single.post_att_norm = torch.nn.Identity()
    for head in range(3):
        own = {name: value[5 * head : 5 * head + 5] for name, value in layer.state_dict().items()}
        single.load_state_dict(own | {"att": layer.att[:, [head]]})
        parts.append(single(*args))
    torch.testing.assert_close(layer(*args), torch.cat(parts, -1))


def link_inputs():
    edges = to_undirected(random_edge_index(N, num_edges=12), num_nodes=N)
    matrix = torch.rand(N, N).to_sparse()
    pairs, x = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 0]]), torch.randn(N, F, requires_grad=True)
    return pairs, x, edges, matrix


def test_the_network_as_pyg():
    networks = []
    for cls in (LPFormer, pyg.LPFormer):
        torch.manual_seed(1)
        networks.append(cls(F, 8).eval())
    ours, theirs = networks
    assert list(ours.state_dict()) == list(theirs.state_dict())
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    pairs, x, edges, matrix = link_inputs()
    results = []
    for network in networks:
        out = network(pairs, x, edges, matrix)
        results.append([out, *torch.autograd.grad(out.sum(), [x, *network.parameters()], allow_unused=True)])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(("layers", "heads"), [(1, 2), (2, 1), (3, 2)])
def test_several_layers_and_heads(layers, heads):
    """PyG's network fails (https://github.com/pyg-team/pytorch_geometric/pull/10680)."""
    network = LPFormer(F, 8, num_transformer_layers=layers, num_heads=heads).eval()
    pairs, x, edges, matrix = link_inputs()
    out = network(pairs, x, edges, matrix)
    assert out.shape == (4,)
    used = torch.autograd.grad(out.sin().sum(), [*network.att_layers.parameters()])
    assert all(grad.any() for grad in used)
    assert f"num_transformer_layers={layers}" in str(network)


def test_the_signature_is_that_of_pyg():
    ours, theirs = (list(inspect.signature(cls).parameters.values()) for cls in (LPFormer, pyg.LPFormer))
    assert [(x.name, x.default) for x in ours[: len(theirs)]] == [(x.name, x.default) for x in theirs]
