"""Layers that compute edge by edge on graphs that are no plain lists of edges."""

import pytest
import torch

from gattn import CompleteGraph, SparseGraph
from gattn.nn import FAConv, GatedGCNConv, HEATConv, HGTConv, HypergraphConv

N, F = 5, 4
PADDED = CompleteGraph(N, source_lengths=torch.tensor([4, N]), target_lengths=torch.tensor([4, N]))
TO = ("node", "to", "node")


def heat():
    return HEATConv(F, 2, num_node_types=2, num_edge_types=3, edge_type_emb_dim=2, edge_dim=3, edge_attr_emb_dim=2)


CALLS = {
    "GatedGCN": lambda x: GatedGCNConv(F, 3, F)(x, PADDED, torch.randn(2, N * N, 3)),
    "HGT": lambda x: HGTConv(F, F, (["node"], [TO]))({"node": x}, {TO: PADDED}),
    "Hypergraph": lambda x: HypergraphConv(F, F)(x[0], PADDED),
}


@pytest.mark.parametrize("name", CALLS)
def test_padding_is_not_attended_to(name):
    with pytest.raises(ValueError, match="needs a list of edges"):
        CALLS[name](torch.randn(2, N, F))


def test_hypergraphs_in_both_flows():
    index = torch.tensor([[0, 1, 2, 1, 4], [0, 0, 0, 1, 1]])
    conv, x = HypergraphConv(F, 3), torch.randn(N, F)
    expected = conv(x, index)
    for sizes in ((2, N), (None, N)):
        torch.testing.assert_close(conv(x, SparseGraph(index.flip(0), *sizes, flow="target_to_source")), expected)


def test_a_cached_graph_is_a_copy():
    conv, x = FAConv(F, cached=True), torch.randn(N, F)
    edge_index = torch.tensor([[0, 1, 2], [1, 2, 3]])
    expected = conv(x, x, edge_index)
    edge_index.zero_()
    torch.testing.assert_close(conv(x, x, edge_index), expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
def test_types_in_few_bits(dtype):
    edge_index, edge_type = torch.tensor([[0, 1], [1, 2]]), torch.tensor([2, 0])
    conv, x, node_type, edge_attr = heat(), torch.randn(N, F), torch.zeros(N, dtype=torch.long), torch.randn(2, 3)
    expected = conv(x, edge_index, node_type, edge_type, edge_attr)
    torch.testing.assert_close(conv(x, edge_index, node_type.to(dtype), edge_type.to(dtype), edge_attr), expected)
