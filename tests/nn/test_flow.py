"""Edges whose first row holds the targets: every layer and option against the same edges the usual way round."""

import pytest
import torch
import torch_geometric.nn as pyg

from gattn import SparseGraph, attend, record_attention
from gattn.nn import (
    ALiBi,
    GATConv,
    GATv2Conv,
    GPSConv,
    MultiheadAttention,
    RelativePositionBias,
    RotaryPositionalEncoding,
    Transformer,
    TransformerConv,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from gattn.testing import random_edge_index
from tests.cases import pairs

B, E, H, D, NUM_EDGES = 2, 8, 2, 3, 24
C = E // H
SIZES = [(6, 6), (6, 9), (9, 6)]
POSITIONS = {
    "none": lambda: None,
    "rotary": lambda: RotaryPositionalEncoding(E // H),
    "alibi": lambda: ALiBi(H),
    "relative": lambda: RelativePositionBias(H, 3),
}

each_size = pytest.mark.parametrize(("num_targets", "num_sources"), SIZES)


def features(num_nodes, *batch):
    return torch.randn(*batch, num_nodes, E, dtype=torch.double)


def both_ways(num_sources, num_targets, *, bare=False):
    """The same graph twice: sources above targets, and targets above sources."""
    edges = random_edge_index(num_sources, num_targets, NUM_EDGES, seed=3)
    sizes = () if bare else (num_sources, num_targets)
    return SparseGraph(edges, *sizes[::-1]), SparseGraph(edges.flip(0), *sizes[::-1], flow="target_to_source")


def assert_alike(function, graphs, module):
    """Outputs and gradients of the parameters are the same on both graphs."""
    results = []
    for graph in graphs:
        out = function(graph)
        outs = [x for x in (out if isinstance(out, tuple) else (out,)) if x is not None]
        loss = sum((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape).cos()).sum() for x in outs)
        leaves = list(module.parameters())
        results.append([*outs, *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-10)


def masks(name, num_targets, num_sources):
    terms = {
        "none": {},
        "is_causal": {"is_causal": True},
        "attn_mask": {"attn_mask": torch.rand(num_targets, num_sources) < 0.3},
        "attn_mask per head": {"attn_mask": torch.randn(B * H, num_targets, num_sources, dtype=torch.double)},
        "key_padding_mask": {"key_padding_mask": torch.arange(num_sources) >= torch.tensor([[num_sources], [3]])},
        "float key_padding_mask": {"key_padding_mask": torch.randn(B, num_sources, dtype=torch.double)},
    }
    return terms[name]


@pytest.mark.parametrize(
    ("mask", "position", "sizes"),
    pairs(
        ("none", "is_causal", "attn_mask", "attn_mask per head", "key_padding_mask", "float key_padding_mask"),
        POSITIONS,
        SIZES,
    ),
)
def test_multihead_attention(mask, position, sizes):
    num_targets, num_sources = sizes
    attention = MultiheadAttention(E, H, batch_first=True, position=POSITIONS[position]()).double()
    query, memory = features(num_targets, B), features(num_sources, B)
    terms = masks(mask, num_targets, num_sources)
    for options in ({"need_weights": False}, {"average_attn_weights": False}):
        assert_alike(
            lambda graph, options=options: attention(query, memory, memory, graph=graph, **terms, **options),
            both_ways(num_sources, num_targets, bare=True),
            attention,
        )


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_transformer_layers(is_causal, position):
    x, memory, (num_targets, num_sources) = features(6, B), features(9, B), (6, 9)
    options = {"dim_feedforward": 16, "dropout": 0.0, "batch_first": True, "position": POSITIONS[position]()}
    encoder = TransformerEncoderLayer(E, H, **options).double()
    decoder = TransformerDecoderLayer(E, H, **options).double()
    model = Transformer(E, H, 1, 1, **options).double()
    square, bipartite = both_ways(6, 6), both_ways(num_sources, num_targets)
    sources = both_ways(9, 9)
    calls = {
        "encoder layer": lambda i: encoder(x, is_causal=is_causal, graph=square[i]),
        "encoder": lambda i: TransformerEncoder(encoder, 2)(x, is_causal=is_causal, graph=square[i]),
        "decoder layer": lambda i: decoder(
            x,
            memory,
            tgt_is_causal=is_causal,
            memory_is_causal=is_causal,
            graph=square[i],
            memory_graph=bipartite[i],
        ),
        "decoder": lambda i: TransformerDecoder(decoder, 2)(
            x, memory, tgt_is_causal=is_causal, graph=square[i], memory_graph=bipartite[i]
        ),
        "transformer": lambda i: model(
            memory, x, tgt_is_causal=is_causal, src_graph=sources[i], tgt_graph=square[i], memory_graph=bipartite[i]
        ),
    }
    for name, function in calls.items():
        torch.testing.assert_close(function(1), function(0), rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("layer", "fill_value", "sizes", "edge_dim", "self_loops"),
    pairs([GATConv, GATv2Conv, TransformerConv], ["mean", "add", "max", 0.5], SIZES, [None, D], [True, False]),
)
def test_graph_layers(layer, fill_value, sizes, edge_dim, self_loops):
    num_targets, num_sources = sizes
    options = {} if layer is TransformerConv else {"add_self_loops": self_loops, "fill_value": fill_value}
    conv = layer(E, 4, heads=H, edge_dim=edge_dim, **options).double()
    x = features(num_sources) if num_sources == num_targets else (features(num_sources), features(num_targets))
    edge_attr = None if edge_dim is None else torch.randn(NUM_EDGES, D, dtype=torch.double)

    def function(graph):
        out, (edges, weights) = conv(x, graph, edge_attr, return_attention_weights=True)
        return out, weights, edges if graph.flow == "source_to_target" else edges.flip(0)

    graphs = both_ways(num_sources, num_targets)
    results = [function(graph) for graph in graphs]
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("conv", [None, GATConv, TransformerConv])
def test_gps(conv):
    layer = None if conv is None else conv(E, E // H, heads=H)
    block = GPSConv(E, layer, heads=H, norm="layer_norm").double().eval()
    x, batch = features(6), torch.tensor([0, 0, 0, 1, 1, 1])
    assert_alike(lambda graph: block(x, graph, batch), both_ways(6, 6), block)


@each_size
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_attend(backend, num_targets, num_sources):
    query, key = (features(count).unflatten(-1, (H, C)) for count in (num_targets, num_sources))
    terms = {
        "bias": torch.randn(NUM_EDGES, H, dtype=torch.double),
        "mask": torch.rand(NUM_EDGES, H) < 0.8,
        "edge": torch.randn(NUM_EDGES, H, C, dtype=torch.double),
    }
    results = [
        attend(query, key, key, graph, return_weights=True, backend=backend, **terms)
        for graph in both_ways(num_sources, num_targets)
    ]
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-10)


def test_recorded_edges_lie_the_usual_way_round():
    attention = MultiheadAttention(E, H)
    found = []
    for graph in both_ways(6, 6):
        with record_attention(attention) as records:
            attention(*[features(6).float()] * 3, graph=graph)
        found.append(records[""][0].edge_index)
    assert torch.equal(*found)


@pytest.mark.parametrize("self_loops", [False, True])
def test_sources_and_targets(self_loops):
    edges = torch.tensor([[0, 1, 4], [1, 2, 0]])
    loops = [0, 1, 2] if self_loops else []
    for graph in (
        SparseGraph(edges, num_sources=5, num_targets=3, self_loops=self_loops),
        SparseGraph(edges.flip(0), num_sources=5, num_targets=3, self_loops=self_loops, flow="target_to_source"),
    ):
        sources, targets = graph.sources_and_targets()
        assert sources.tolist() == [0, 1, 4, *loops]
        assert targets.tolist() == [1, 2, 0, *loops]


@pytest.mark.parametrize("layer", [GATConv, GATv2Conv])
def test_a_layers_own_flow_aggregates_edge_attrof_loops_as_pyg_does(layer):
    theirs = getattr(pyg, layer.__name__)(E, 4, edge_dim=D, flow="target_to_source").double()
    ours = layer(E, 4, edge_dim=D, flow="target_to_source").double()
    ours.load_state_dict(theirs.state_dict())
    x, edges = features(6), random_edge_index(6, num_edges=NUM_EDGES)
    edge_attr = torch.randn(NUM_EDGES, D, dtype=torch.double)
    torch.testing.assert_close(ours(x, edges, edge_attr), theirs(x, edges, edge_attr), rtol=1e-10, atol=1e-10)


def test_edge_attrof_loops_where_more_nodes_have_edges_than_loops():
    """With the usual flow, too: PyG's function counts as many nodes as get a loop."""
    edges, edge_attr = torch.tensor([[0, 1, 1], [3, 0, 0]]), torch.tensor([[1.0], [2.0], [4.0]])
    for graph in (
        SparseGraph(edges, num_sources=2, num_targets=4),
        SparseGraph(edges.flip(0), num_sources=2, num_targets=4, flow="target_to_source"),
    ):
        _, found = graph.with_self_loops().with_features(edge_attr, "mean")
        assert found.squeeze(1).tolist() == [1.0, 2.0, 4.0, 3.0, 0.0]
