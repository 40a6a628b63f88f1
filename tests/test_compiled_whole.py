"""Layers that `torch.compile` makes one graph of, and how that is found out."""

import pytest
import torch

import gattn
from gattn.nn import GATConv, GATv2Conv, TransformerConv
from gattn.testing import assert_compiles_whole, random_edge_index

N, E, D = 9, 40, 3


class Broken(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * float(x.sum().item() > 0)


class Untrue(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * (2 if torch.compiler.is_compiling() else 1)


def edges():
    """With self-loops, two of one node among them, and a node that only has its own."""
    return torch.cat([random_edge_index(N, N, E - 3), torch.tensor([[2, 2, 8], [2, 2, 8]])], 1)


@pytest.mark.parametrize("layer", [GATConv, GATv2Conv, TransformerConv])
@pytest.mark.parametrize("edge_dim", [None, D])
def test_layers_with_self_loops_and_edge_features(layer, edge_dim):
    conv = layer(4, 8, heads=2, edge_dim=edge_dim)
    features = () if edge_dim is None else (torch.randn(E, D),)
    assert_compiles_whole(conv, torch.randn(N, 4), edges(), *features)


@pytest.mark.parametrize("layer", [GATConv, GATv2Conv])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("fill_value", ["mean", "max", "add", 0.5, torch.tensor([0.5, 1.0, 2.0])], ids=str)
def test_self_loops_among_the_edges_do_not_count(layer, flow, fill_value):
    """Compiled, they stay among the edges, hidden; sizes are open, and gradients are those of the program as it is."""
    conv = layer(4, 8, heads=2, edge_dim=D, fill_value=fill_value, flow=flow)
    torch.compiler.reset()
    compiled = torch.compile(conv, dynamic=True, fullgraph=True, backend="aot_eager")
    for more in (0, 5):
        x, edge_index = torch.randn(N + more, 4), torch.cat([edges(), random_edge_index(N, N, more)], 1)
        features = torch.randn(E + more, D, requires_grad=True)
        found = []
        for call in (conv, compiled):
            out = call(x, edge_index, features)
            found.append((out, *torch.autograd.grad(out.square().sum(), [features, *conv.parameters()])))
        torch.testing.assert_close(found[1], found[0])
        assert (found[1][1][edge_index[0] == edge_index[1]] == 0).all()


@pytest.mark.parametrize("sizes", [(9, 6), (6, 9)])
def test_two_kinds_of_nodes(sizes):
    conv = GATv2Conv((4, 5), 8, edge_dim=D)
    edge_index = torch.cat([random_edge_index(*sizes, 20), torch.tensor([[1, 3], [1, 3]])], 1)
    assert_compiles_whole(conv, (torch.randn(sizes[0], 4), torch.randn(sizes[1], 5)), edge_index, torch.randn(22, D))


@pytest.mark.parametrize("layer", [GATConv, GATv2Conv])
def test_returned_weights_are_those_of_pygs_edges(layer):
    conv, x, edge_index, features = layer(4, 8, edge_dim=D), torch.randn(N, 4), edges(), torch.randn(E, D)
    expected = conv(x, edge_index, features, return_attention_weights=True)
    torch.compiler.reset()
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    found = compiled(x, edge_index, features, return_attention_weights=True)
    torch.testing.assert_close(found, expected)


def test_breaks_and_differences_are_found():
    x = torch.randn(3, 4)
    assert_compiles_whole(torch.nn.Linear(4, 4), x)
    with pytest.raises(AssertionError, match=r"Broken is compiled with 1 breaks: .*item"):
        assert_compiles_whole(Broken(4, 4), x)
    with pytest.raises(AssertionError, match="not close"):
        assert_compiles_whole(Untrue(4, 4), x)


def test_a_graph_with_hidden_edges_is_only_made_by_a_compiler():
    graph = gattn.SparseGraph(edges(), N, N, self_loops=True)
    looped, features = graph.with_features(torch.randn(E, D), hides=True)
    assert looped.kept is None
    assert len(features) == looped.edge_index.size(1) < E + N
