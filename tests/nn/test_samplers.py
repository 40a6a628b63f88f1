"""Layers on what PyG's samplers give: what they compute on the whole graph, or what PyG's layers make of a sample."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
import torch_geometric.typing
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import (
    ClusterData,
    ClusterLoader,
    GraphSAINTEdgeSampler,
    GraphSAINTNodeSampler,
    GraphSAINTRandomWalkSampler,
    HGTLoader,
    LinkNeighborLoader,
    NeighborLoader,
    ShaDowKHopSampler,
)
from torch_geometric.utils import trim_to_layer

from gattn import nn
from gattn.testing import random_edge_index

NODES, CHANNELS, EDGE_CHANNELS, CLASSES = 40, 6, 3, 4
LAYERS = ["GATConv", "GATv2Conv", "TransformerConv"]

pytestmark = [
    pytest.mark.skipif(
        not (torch_geometric.typing.WITH_TORCH_SPARSE or torch_geometric.typing.WITH_PYG_LIB),
        reason="PyG's samplers need torch-sparse",
    ),
    pytest.mark.filterwarnings("ignore:Using '.*' without a 'pyg-lib' installation:UserWarning"),
]


class Net(torch.nn.Module):
    """Two layers, with edge features."""

    def __init__(self, library, layer):
        super().__init__()
        torch.manual_seed(1)
        self.convs = torch.nn.ModuleList(
            [
                getattr(library, layer)(CHANNELS, 8, heads=2, edge_dim=EDGE_CHANNELS),
                getattr(library, layer)(16, CLASSES, heads=1, edge_dim=EDGE_CHANNELS),
            ]
        )

    def forward(self, x, edge_index, edge_attr, nodes=None, edges=None):
        for depth, conv in enumerate(self.convs):
            if nodes is not None:
                x, edge_index, edge_attr = trim_to_layer(depth, nodes, edges, x, edge_index, edge_attr)
            x = conv(x, edge_index, edge_attr)
            x = F.elu(x) if depth == 0 else x
        return x


@pytest.fixture(params=LAYERS)
def layer(request):
    return request.param


@pytest.fixture
def data():
    edge_index = random_edge_index(NODES, num_edges=120)
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    return Data(
        x=torch.randn(NODES, CHANNELS),
        edge_index=edge_index,
        edge_attr=torch.randn(edge_index.size(1), EDGE_CHANNELS),
        y=torch.arange(NODES) % CLASSES,
        num_nodes=NODES,
    )


def agree(layer, batch):
    """On a sample, outputs and gradients are those of PyG's layers."""
    ours, theirs = Net(nn, layer), Net(pyg, layer)
    theirs.load_state_dict(ours.state_dict())
    results = []
    for model in (ours, theirs):
        out = model(batch.x, batch.edge_index, batch.edge_attr)
        loss = F.cross_entropy(out, batch.y)
        results.append([out, *torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "is_trimmed",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                not torch_geometric.typing.WITH_PYG_LIB, reason="only pyg-lib says how many it sampled in each step"
            ),
        ),
    ],
)
def test_all_neighbours_of_seeds(layer, data, is_trimmed):
    model = Net(nn, layer).eval()
    expected = model(data.x, data.edge_index, data.edge_attr)
    for batch in NeighborLoader(data, num_neighbors=[-1, -1], batch_size=15):
        sampled = (batch.num_sampled_nodes, batch.num_sampled_edges) if is_trimmed else ()
        out = model(batch.x, batch.edge_index, batch.edge_attr, *sampled)
        torch.testing.assert_close(out[: batch.batch_size], expected[batch.n_id[: batch.batch_size]])


def test_some_neighbours_of_seeds(layer, data):
    for batch in NeighborLoader(data, num_neighbors=[3, 2], batch_size=15):
        agree(layer, batch)


def test_layer_by_layer(layer, data):
    """Inference on the whole graph, a layer at a time, each for one batch of nodes after the other."""
    model = Net(nn, layer).eval()
    expected = model(data.x, data.edge_index, data.edge_attr)
    loader = NeighborLoader(copy.copy(data), num_neighbors=[-1], batch_size=7)
    x = data.x
    for depth, conv in enumerate(model.convs):
        parts = []
        for batch in loader:
            out = conv(x[batch.n_id], batch.edge_index, batch.edge_attr)[: batch.batch_size]
            parts.append(F.elu(out) if depth == 0 else out)
        x = torch.cat(parts)
    torch.testing.assert_close(x, expected)


def test_links(layer, data):
    """Scores of pairs of nodes are those of the whole graph; pairs that are no edges come in, too."""
    model = Net(nn, layer).eval()
    expected = model(data.x, data.edge_index, data.edge_attr)
    loader = LinkNeighborLoader(
        data, num_neighbors=[-1, -1], edge_label_index=data.edge_index, neg_sampling_ratio=1.0, batch_size=25
    )
    for batch in loader:
        assert {*batch.edge_label.tolist()} == {0.0, 1.0}
        out = model(batch.x, batch.edge_index, batch.edge_attr)
        score = (out[batch.edge_label_index[0]] * out[batch.edge_label_index[1]]).sum(-1)
        first, second = batch.n_id[batch.edge_label_index]
        torch.testing.assert_close(score, (expected[first] * expected[second]).sum(-1))


def test_neighbourhoods_of_roots(layer, data):
    """All that is within two steps of a root decides about it."""
    model = Net(nn, layer).eval()
    expected = model(data.x, data.edge_index, data.edge_attr)
    for batch in ShaDowKHopSampler(data, depth=2, num_neighbors=NODES, batch_size=9):
        out = model(batch.x, batch.edge_index, batch.edge_attr)[batch.root_n_id]
        roots = (batch.x[batch.root_n_id].unsqueeze(1) == data.x).all(-1).long().argmax(1)
        torch.testing.assert_close(out, expected[roots])


@pytest.mark.parametrize(
    ("sampler", "options"),
    [
        (GraphSAINTNodeSampler, {}),
        (GraphSAINTEdgeSampler, {}),
        (GraphSAINTRandomWalkSampler, {"walk_length": 2}),
    ],
)
def test_graph_saint(layer, data, sampler, options):
    for batch in sampler(data, batch_size=12, num_steps=2, sample_coverage=2, log=False, **options):
        agree(layer, batch)


def test_clusters(layer, data):
    try:
        clusters = ClusterData(data, num_parts=4, log=False)
    except (ImportError, RuntimeError) as error:  # torch-sparse may be built without METIS
        pytest.skip(str(error).splitlines()[0])
    for batch in ClusterLoader(clusters, batch_size=2):
        agree(layer, batch)


def test_types_of_nodes():
    """HGTLoader samples as many nodes of each type; the layer of the same paper sees what PyG's sees."""
    data = HeteroData()
    sizes = {"author": 20, "paper": 30}
    for name, size in sizes.items():
        data[name].x = torch.randn(size, CHANNELS)
    for seed, (source, relation, target) in enumerate(
        [("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "has", "author")]
    ):
        data[source, relation, target].edge_index = random_edge_index(sizes[source], sizes[target], 80, seed=seed)
    ours = nn.HGTConv(CHANNELS, 8, data.metadata(), heads=2)
    theirs = pyg.HGTConv(CHANNELS, 8, data.metadata(), heads=2)
    theirs.load_state_dict(ours.state_dict())
    seeds = ("paper", torch.arange(30))
    for batch in HGTLoader(data, num_samples=[5, 5], batch_size=10, input_nodes=seeds):
        found, expected = (conv(batch.x_dict, batch.edge_index_dict) for conv in (ours, theirs))
        assert found.keys() == expected.keys()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_training_on_samples_learns(data):
    """Whether links are there, from batches of sampled neighbours: better than chance after a few of them."""
    group = torch.arange(NODES) % 2
    source, target = torch.cartesian_prod(torch.arange(NODES), torch.arange(NODES)).t()
    is_edge = (group[source] == group[target]) & (torch.rand(source.shape) < 0.2)
    data = Data(x=F.one_hot(group, 2) + torch.randn(NODES, 2), edge_index=torch.stack([source, target])[:, is_edge])
    convs = torch.nn.ModuleList([nn.GATv2Conv(2, 8, heads=2), nn.GATv2Conv(16, 8)])
    optimizer = torch.optim.Adam(convs.parameters(), lr=0.02)
    losses = []
    for _ in range(10):
        loader = LinkNeighborLoader(
            data, num_neighbors=[5, 5], edge_label_index=data.edge_index, neg_sampling_ratio=1.0, batch_size=64
        )
        for batch in loader:
            x = convs[1](F.elu(convs[0](batch.x, batch.edge_index)), batch.edge_index)
            score = (x[batch.edge_label_index[0]] * x[batch.edge_label_index[1]]).sum(-1)
            loss = F.binary_cross_entropy_with_logits(score, batch.edge_label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < 0.65 < losses[0]
