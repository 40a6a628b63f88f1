import copy

import pytest
import torch
import torch_geometric.nn as pyg
import torch_geometric.typing
from allpairspy import AllPairs
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import to_hetero

import gattn
from gattn.models import GAT
from gattn.nn import Dropout, GATConv, GATv2Conv, TransformerConv
from gattn.testing import random_edge_index

CONVS = {"gat": GATConv, "gatv2": GATv2Conv, "transformer": TransformerConv}
N, F = 12, 10


@pytest.fixture
def x():
    return torch.relu(torch.randn(N, F))


@pytest.fixture
def edge_index():
    return random_edge_index(N, num_edges=40)


@pytest.mark.parametrize("conv", CONVS)
@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize("out_channels", [None, 3])
def test_layers_heads_channels(conv, num_layers, out_channels, x, edge_index):
    model = GAT(F, 16, num_layers, out_channels, conv=conv, heads=4, out_heads=2, dropout=0.5)
    assert [type(layer) for layer in model.convs] == [CONVS[conv]] * num_layers
    last = model.convs[-1]
    assert (last.heads, last.concat) == ((4, True) if out_channels is None else (2, False))
    assert all((layer.heads, layer.out_channels, layer.dropout) == (4, 4, 0.5) for layer in model.convs[:-1])
    assert model(x, edge_index).shape == (N, out_channels or 16)


@pytest.mark.parametrize(
    ("conv", "residual", "norm", "jk"),
    list(
        AllPairs(
            [list(CONVS), [None, False, True], [None, "batch_norm", "graph_norm"], [None, "last", "cat", "max", "lstm"]]
        )
    ),
)
def test_equals_pygs_gat_with_the_same_weights(conv, residual, norm, jk, x, edge_index):
    if conv == "transformer":
        model = GAT(F, 16, 3, 3, conv=conv, heads=4, residual=residual, norm=norm, jk=jk)
        assert all(layer.root_weight is (residual is not False) for layer in model.convs)
        assert model(x, edge_index).shape == (N, 3)
        return
    kwargs = {"heads": 4, "norm": norm, "jk": jk, "act": "elu"}
    theirs = pyg.GAT(F, 16, 3, 3, v2=conv == "gatv2", residual=bool(residual), **kwargs).eval()
    # PyG's model gives its last layer as many heads as the others.
    ours = GAT(F, 16, 3, 3, conv=conv, residual=residual, out_heads=4, **kwargs).eval()
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(x, edge_index), theirs(x, edge_index))


@pytest.mark.parametrize("conv", CONVS)
def test_sparse_features_equal_dense_ones(conv, x, edge_index):
    model = GAT(F, 16, 2, 3, conv=conv, heads=4).eval()
    torch.testing.assert_close(model(x.to_sparse_csr(), edge_index), model(x, edge_index))
    model.train()
    model(x.to_sparse_csr(), edge_index).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_input_dropout_of_sparse_features_drops_stored_values():
    x = torch.eye(1000).to_sparse_csr()
    dropout = Dropout(0.4)
    values = dropout(x).values()
    assert set(values.tolist()) == {0.0, torch.tensor(1 / 0.6).item()}
    assert 0.5 < (values != 0).double().mean() < 0.7
    assert dropout.eval()(x) is x
    sources, targets = dropout.train()((torch.ones(3, 3), None))
    assert targets is None
    assert sources.shape == (3, 3)


def test_dropouts_are_separate(x, edge_index):
    model = GAT(F, 16, 2, 3, dropout=0.1, input_dropout=0.2, attention_dropout=0.3, value_dropout=0.4)
    assert (model.dropout.p, model.input_dropout.p) == (0.1, 0.2)
    assert all((layer.dropout, layer.value_dropout) == (0.3, 0.4) for layer in model.convs)


def test_edge_features(x, edge_index):
    model = GAT(F, 16, 2, 3, edge_dim=5)
    assert model(x, edge_index, edge_attr=torch.randn(40, 5)).shape == (N, 3)


def test_complete_graph(x):
    assert GAT(F, 16, 2, 3)(x, gattn.CompleteGraph(N)).shape == (N, 3)


def test_to_hetero(x, edge_index):
    metadata = (["a", "b"], [("a", "to", "b"), ("b", "to", "a")])
    model = to_hetero(GAT((-1, -1), 16, 2, 3, add_self_loops=False, dropout=0.5), metadata)
    out = model(
        {"a": x, "b": torch.randn(N, 5)},
        {("a", "to", "b"): edge_index, ("b", "to", "a"): edge_index.flip(0)},
    )
    assert out["a"].shape == out["b"].shape == (N, 3)


@pytest.mark.skipif(
    not (torch_geometric.typing.WITH_TORCH_SPARSE or torch_geometric.typing.WITH_PYG_LIB), reason="needs torch-sparse"
)
@pytest.mark.filterwarnings("ignore:Using 'NeighborSampler' without a 'pyg-lib' installation:UserWarning")
@pytest.mark.parametrize("conv", CONVS)
def test_mini_batches(conv, x, edge_index):
    """Sampling all neighbours changes nothing, with PyG's trimming and without."""
    model = GAT(F, 16, 2, 3, conv=conv).eval()
    expected = model(x, edge_index)
    for batch in NeighborLoader(Data(x=x, edge_index=edge_index), num_neighbors=[-1, -1], batch_size=5):
        seeds = batch.n_id[: batch.batch_size]
        torch.testing.assert_close(model(batch.x, batch.edge_index)[: batch.batch_size], expected[seeds])


@pytest.mark.parametrize("conv", CONVS)
def test_trimming_to_what_was_sampled(conv):
    """Two seeds, three nodes sampled for them, five more for those: PyG's trimming leaves the seeds' output alone."""
    model = GAT(F, 16, 2, 3, conv=conv).eval()
    x = torch.randn(10, F)
    edge_index = torch.tensor([[2, 3, 4, 5, 6, 7, 8, 9], [0, 0, 1, 2, 2, 3, 4, 4]])
    trimmed = model(x, edge_index, num_sampled_nodes_per_hop=[2, 3, 5], num_sampled_edges_per_hop=[3, 5])
    assert trimmed.size(0) < 10
    torch.testing.assert_close(trimmed[:2], model(x, edge_index)[:2])


def test_copies(x, edge_index):
    model = GAT(F, 16, 2, 3).eval()
    torch.testing.assert_close(copy.deepcopy(model)(x, edge_index), model(x, edge_index))
    assert str(model) == "GAT(10, 3, num_layers=2)"


def test_compile(x, edge_index):
    torch._dynamo.reset()
    model = GAT(F, 16, 2, 3, heads=4).eval()
    torch.testing.assert_close(torch.compile(model, fullgraph=True)(x, edge_index), model(x, edge_index))


def test_it_learns():
    data = gattn.datasets.load("karate")
    assert isinstance(data, Data)
    model = GAT(data.num_features, 32, 2, 4, heads=4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(
            model(data.x, data.edge_index)[data.train_mask], data.y[data.train_mask]
        )
        loss.backward()
        optimizer.step()
    accuracy = (model.eval()(data.x, data.edge_index).argmax(-1) == data.y)[data.test_mask].double().mean()
    assert accuracy > 0.8


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"conv": "gcn"}, "conv must be 'gat', 'gatv2' or 'transformer'; got 'gcn'"),
        ({"heads": 5}, "16 is not one of 5"),
        ({"num_layers": 0}, "num_layers must be at least 1; got 0"),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        GAT(**{"in_channels": F, "hidden_channels": 16, "num_layers": 2, **kwargs})


def test_edge_weights_are_refused(x, edge_index):
    with pytest.raises(ValueError, match="attention layers compute their own weights"):
        GAT(F, 16, 2)(x, edge_index, edge_weight=torch.ones(40))
