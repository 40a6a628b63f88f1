import copy
import re

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.data import Batch, Data
from torch_geometric.nn.attention import PerformerAttention, PolynormerAttention, SGFormerAttention
from torch_geometric.utils import to_dense_batch

import gattn
from gattn import features
from gattn.testing import assert_alone_equals_in_batch, random_edge_index

FEATURES = 16
LINEAR = {"score": gattn.DotScore(scale=1.0), "distribution": gattn.Identity(normalize=True)}


def make_graphs(*sizes):
    return [
        Data(torch.randn(size, FEATURES), random_edge_index(size, num_edges=3 * size, seed=number))
        for number, size in enumerate(sizes)
    ]


@pytest.fixture
def graphs():
    return make_graphs(5, 1, 12, 3)


def padded(module, data):
    """As PyG's models call their attention."""
    x, is_real = to_dense_batch(data.x, data.batch)
    return module(x, is_real)[is_real]


def pooled(module, data):
    return module(data.x, data.batch)


class LinearAttention(torch.nn.Module):
    """Linear attention among the nodes of each graph, on packed or padded batches."""

    def __init__(self, feature_map, heads=2, is_padded=False):
        super().__init__()
        self.project = torch.nn.Linear(FEATURES, 3 * FEATURES)
        self.feature_map, self.heads, self.is_padded = feature_map, heads, is_padded

    def forward(self, x, edge_index, batch):
        lengths = batch.bincount()
        if self.is_padded:
            x, is_real = to_dense_batch(x, batch)
            graph = gattn.CompleteGraph(x.size(1), source_lengths=lengths, target_lengths=lengths)
        else:
            graph = gattn.CompleteGraph.packed(lengths)
        query, key, value = self.project(x).unflatten(-1, (3 * self.heads, -1)).chunk(3, dim=-2)
        if isinstance(self.feature_map, features.Favor):
            query, key = self.feature_map(query, key, graph)
        else:
            query, key = self.feature_map(query), self.feature_map(key)
        out = gattn.attend(query, key, value, graph, **LINEAR).flatten(-2)
        return out[is_real] if self.is_padded else out


MAPS = {name: getattr(features, name) for name in ("elu1", "relu", "softplus", "sigmoid", "cosine")}


@pytest.mark.parametrize("is_padded", [False, True], ids=["packed", "padded"])
@pytest.mark.parametrize("name", [*MAPS, "favor"])
def test_linear_attention_passes(name, is_padded, graphs):
    feature_map = features.Favor(FEATURES // 2) if name == "favor" else MAPS[name]
    assert_alone_equals_in_batch(LinearAttention(feature_map, is_padded=is_padded), graphs)


@pytest.mark.parametrize(
    "make",
    [
        lambda: gattn.nn.GATConv(FEATURES, 8, heads=2),
        lambda: gattn.nn.TransformerConv(FEATURES, 8, heads=2),
        lambda: gattn.nn.GPSConv(FEATURES, gattn.nn.GATConv(FEATURES, FEATURES), heads=4),
        lambda: gattn.nn.GPSConv(FEATURES, None, heads=4),
        lambda: pyg.GATConv(FEATURES, 8, heads=2),
        lambda: pyg.GPSConv(FEATURES, None, heads=4),
    ],
)
def test_correct_layers_pass(make, graphs):
    assert_alone_equals_in_batch(make(), graphs)


@pytest.mark.parametrize("aggr", [gattn.nn.AttentionPooling(FEATURES), pyg.MeanAggregation(), pyg.MedianAggregation()])
def test_correct_pooling_passes(aggr, graphs):
    assert_alone_equals_in_batch(aggr, graphs, pooled)


def test_outputs_per_edge_pass(graphs):
    assert_alone_equals_in_batch(lambda x, edge_index: (x[edge_index[0]] * x[edge_index[1]]).sum(-1), graphs)


def global_polynormer():
    model = pyg.Polynormer(FEATURES, 8, 4, local_layers=1)
    model._global = True  # as in the second half of its training
    return model


#: Layers of PyG 2.8 that read padded nodes or the padded size. If one is repaired, it belongs among the correct ones.
BROKEN = {
    "SGFormerAttention": (lambda: SGFormerAttention(FEATURES, heads=2, head_channels=8), padded),
    "SGFormer": (lambda: pyg.SGFormer(FEATURES, 8, 4), None),
    "PolynormerAttention": (lambda: PolynormerAttention(FEATURES, heads=2, head_channels=8), padded),
    "Polynormer": (global_polynormer, None),
    "PerformerAttention": (lambda: PerformerAttention(FEATURES, heads=2, head_channels=8), padded),
    "GPSConv": (lambda: pyg.GPSConv(FEATURES, None, heads=2, attn_type="performer"), None),
    "PatchTransformerAggregation": (lambda: pyg.aggr.PatchTransformerAggregation(FEATURES, 8, 2, 8), pooled),
}


@pytest.mark.parametrize("name", BROKEN)
def test_layers_of_pyg_that_depend_on_the_batch_fail(name, graphs):
    make, call = BROKEN[name]
    with pytest.raises(AssertionError, match=r"depends on the other graphs of its batch.*differs by up to") as error:
        assert_alone_equals_in_batch(make(), graphs, call)
    found = re.search(r"differs by up to (\S+) from .* largest element is (\S+)\.", str(error.value))
    difference, size = map(float, found.groups())
    assert difference > 1e-4 * size  # far from rounding


def test_the_message_names_the_graph_the_difference_and_the_size():
    def one_leaks(x, edge_index, batch):
        """Adds the number of graphs to graphs of three nodes."""
        of_three = (batch.bincount() == 3).index_select(0, batch)
        return x + of_three.unsqueeze(-1) * (batch.max() + 1)

    graphs = [Data(torch.full((size, 2), 4.0), torch.empty(2, 0, dtype=torch.int64)) for size in (2, 1, 3)]
    message = (
        "graph 2 (3 nodes) depends on the other graphs of its batch: with all graphs with graphs 1 and 2 repeated, its "
        "output of shape [3, 2] differs by up to 6 from the one alone, whose largest element is 5."
    )
    with pytest.raises(AssertionError, match=re.escape(message)):
        assert_alone_equals_in_batch(one_leaks, graphs)


@pytest.mark.parametrize(
    "leak",
    [
        lambda x, edge_index, batch: x - x.mean(0),
        lambda x, edge_index, batch: x * (1 + 1e-9 * (batch.max() + 1)),
        lambda x, edge_index, batch: pyg.global_mean_pool(x, batch) / len(batch),
        lambda x, edge_index, batch: torch.where(batch.max() > 0, torch.nan, x),
    ],
    ids=["mean", "slightly", "per graph", "NaN"],
)
def test_functions_that_depend_on_the_batch_fail(leak, graphs):
    with pytest.raises(AssertionError, match="depends on the other graphs"):
        assert_alone_equals_in_batch(leak, graphs)


def test_what_only_another_order_shows_fails(graphs):
    def leak(x, edge_index, batch):
        """Adds to the first graph of a batch if it has three nodes."""
        is_first = (batch == 0) & (batch.max() > 0) & ((batch == 0).sum() == 3)
        return x + is_first.unsqueeze(-1)

    with pytest.raises(AssertionError, match=r"graph 3 .3 nodes. depends .* with all graphs in the reverse order"):
        assert_alone_equals_in_batch(leak, graphs)


def test_a_module_is_neither_changed_nor_trained(graphs):
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.dropout, self.norm = torch.nn.Linear(FEATURES, 4), torch.nn.Dropout(), pyg.BatchNorm(4)

        def forward(self, x, edge_index):
            assert not self.training
            assert not torch.is_grad_enabled()
            assert x.dtype == torch.get_default_dtype()
            return self.dropout(self.norm(self.lin(x)))

    module = Module()
    module.norm.eval()
    before, x = copy.deepcopy(module.state_dict()), [graph.x.clone() for graph in graphs]
    assert_alone_equals_in_batch(module, graphs)
    module.forward = module.forward  # a function that deepcopy would leave bound to the original
    assert_alone_equals_in_batch(module, graphs, tolerance=1e-5)
    assert module.training
    assert module.dropout.training
    assert not module.norm.training
    assert torch.get_default_dtype() == torch.float32
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(torch.equal(graph.x, old) for graph, old in zip(graphs, x, strict=True))


def test_the_mode_is_restored_after_a_failure(graphs):
    module = PolynormerAttention(FEATURES, heads=2, head_channels=8)
    with pytest.raises(AssertionError, match="depends on the other graphs"):
        assert_alone_equals_in_batch(module, graphs, padded, tolerance=1e-5)
    assert all(part.training for part in module.modules())


def test_a_tolerance_that_is_given_counts(graphs):
    def leak(x, edge_index, batch):
        return x * (1 + 1e-3 * (batch.max() > 0))

    assert_alone_equals_in_batch(leak, graphs, tolerance=2e-3)
    with pytest.raises(AssertionError, match="depends on the other graphs"):
        assert_alone_equals_in_batch(leak, graphs, tolerance=5e-4)


def test_modules_may_write_into_their_input(graphs):
    assert_alone_equals_in_batch(lambda x, edge_index: x.add_(1.0), graphs)


def test_random_results_are_reported_as_such(graphs):
    with pytest.raises(AssertionError, match="two runs for graph 0 .5 nodes. alone differ"):
        assert_alone_equals_in_batch(lambda x, edge_index: torch.rand_like(x), graphs)


def test_results_that_are_not_finite_are_reported_as_such(graphs):
    with pytest.raises(AssertionError, match="the output for graph 1 .1 node. alone is not finite"):
        assert_alone_equals_in_batch(lambda x, edge_index: x / (len(x) - 1), graphs)


def test_wrong_numbers_of_rows_are_reported(graphs):
    with pytest.raises(AssertionError, match=r"in the given order has shape \[1, 16\]; it must have the rows"):
        assert_alone_equals_in_batch(lambda x, edge_index: x.mean(0, keepdim=True), graphs)


def test_wrong_inputs():
    def same(x, edge_index):
        return x

    with pytest.raises(ValueError, match=r"a single node and one with more.*got graphs with \[2, 3\] nodes"):
        assert_alone_equals_in_batch(same, make_graphs(2, 3))
    with pytest.raises(ValueError, match=r"got graphs with \[1, 1\] nodes"):
        assert_alone_equals_in_batch(same, make_graphs(1, 1))
    with pytest.raises(TypeError, match=r"must be torch_geometric.data.Data.*got tuple"):
        assert_alone_equals_in_batch(same, [(torch.ones(1), None)])
    with pytest.raises(TypeError, match="one per graph; got DataBatch"):
        assert_alone_equals_in_batch(same, [Batch.from_data_list(make_graphs(1, 2))])
    with pytest.raises(TypeError, match="the output must be a tensor, got tuple"):
        assert_alone_equals_in_batch(lambda x, edge_index: (x, x), make_graphs(1, 2))
    with pytest.raises(ValueError, match="got a tensor without dimensions"):
        assert_alone_equals_in_batch(lambda x, edge_index: x.sum(), make_graphs(1, 2))
    with pytest.raises(ValueError, match="tolerance must be finite and not negative"):
        assert_alone_equals_in_batch(same, make_graphs(1, 2), tolerance=-1.0)
    with pytest.raises(TypeError, match="tolerance must be a number"):
        assert_alone_equals_in_batch(same, make_graphs(1, 2), tolerance="small")
