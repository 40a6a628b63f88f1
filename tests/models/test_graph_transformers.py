"""SGFormer and Polynormer, beside PyG's networks."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch.nn.utils import prune
from torch_geometric.data import Data
from torch_geometric.explain.algorithm.utils import set_masks

import gattn
from gattn.models import Polynormer, SGFormer
from gattn.testing import assert_alone_equals_in_batch, random_edge_index

F, C = 6, 4
EDGES = random_edge_index(9, num_edges=30)
OPTIONS = {
    "sgformer": (SGFormer, pyg.SGFormer, {}),
    "sgformer, cat": (SGFormer, pyg.SGFormer, {"trans_num_heads": 2, "aggregate": "cat", "graph_weight": 0.2}),
    "polynormer": (Polynormer, pyg.Polynormer, {"local_layers": 2}),
    "polynormer, attention": (
        Polynormer,
        pyg.Polynormer,
        {"local_layers": 2, "local_attn": True, "pre_ln": True, "post_bn": False, "qk_shared": True, "beta": 0.5},
    ),
    "polynormer, heads": (Polynormer, pyg.Polynormer, {"local_layers": 2, "heads": 2, "local_attn": True}),
}


@pytest.fixture(autouse=True)
def in_double():
    """PyG's SGFormer makes tensors of the default type."""
    torch.set_default_dtype(torch.double)
    yield
    torch.set_default_dtype(torch.float)


def pair_of(name):
    ours, theirs, options = OPTIONS[name]
    made = []
    for cls in (ours, theirs):
        torch.manual_seed(1)
        made.append(cls(F, 8, C, **options).double().eval())
    return made


@pytest.mark.parametrize("is_global", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_pygs_numbers_on_one_graph(name, is_global):
    ours, theirs = pair_of(name)
    same = name != "polynormer, heads"  # PyG's global layers have another width there
    if same:
        states = ours.state_dict(), theirs.state_dict()
        assert list(states[0]) == list(states[1])
        torch.testing.assert_close(*states, rtol=0, atol=0)
    if is_global and name.startswith("polynormer"):
        ours.use_global()
        theirs._global = True
    x, edges = torch.randn(9, F, dtype=torch.double, requires_grad=True), random_edge_index(9, num_edges=30)
    batch = torch.zeros(9, dtype=torch.long)
    out = ours(x, edges, batch)
    torch.testing.assert_close(ours(x, edges), out)
    if is_global and not same:
        assert out.shape == (9, C)
        return
    expected = theirs(x, edges, batch)
    torch.testing.assert_close(out, expected)
    (found,), (right,) = (torch.autograd.grad(y.square().sum(), x) for y in (out, expected))
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("name", OPTIONS)
def test_alone_equals_in_batch_in_any_order(name):
    model, _ = pair_of(name)
    if name.startswith("polynormer"):
        model.use_global()
    graphs = [Data(torch.randn(n, F), random_edge_index(n, num_edges=2 * n)) for n in (5, 1, 7)]
    assert_alone_equals_in_batch(model, graphs, lambda model, data: model(data.x, data.edge_index, data.batch))
    batch = torch.tensor([0, 1, 1, 0, 1, 0])
    x, order = torch.randn(6, F, dtype=torch.double), batch.argsort(stable=True)
    inverse = order.argsort()
    edges = torch.tensor([[0, 1, 2], [3, 2, 4]])
    torch.testing.assert_close(model(x, edges, batch), model(x[order], inverse[edges], batch[order])[inverse])


def with_message(conv):
    conv.message = lambda x_j, edge_weight: 2 * x_j


def with_propagation(conv):
    original = conv.propagate
    conv.propagate = lambda *args, **kwargs: 2 * original(*args, **kwargs)


def with_hook(conv):
    conv.register_message_forward_hook(lambda module, inputs, out: 2 * out)


def with_hook_of_aggregation(conv):
    conv.aggr_module.register_forward_hook(lambda module, inputs, out: 2 * out)


def with_mean(conv):
    conv.aggr_module = pyg.aggr.MeanAggregation()


def with_other_norm(conv):
    conv.improved = True


def with_other_weights(conv):
    prune.l1_unstructured(conv.lin, "weight", 0.5)


def with_explanation(conv):
    set_masks(conv, torch.linspace(-1, 1, 30), EDGES, apply_sigmoid=True)


@pytest.mark.parametrize(
    ("change", "is_fused"),
    [
        (lambda conv: None, True),
        (with_other_norm, True),
        (with_other_weights, True),
        (with_message, False),
        (with_propagation, False),
        (with_hook, False),
        (with_hook_of_aggregation, False),
        (with_mean, False),
        (with_explanation, False),
    ],
)
@pytest.mark.parametrize("name", ["sgformer", "polynormer"])
def test_graph_convolutions(name, change, is_fused, monkeypatch):
    """They run on the kernels unless somebody reaches for messages; either way, numbers are PyG's."""
    ours, theirs = map(copy.deepcopy, pair_of(name))  # for a copy, PyG makes code of its own
    sums = []
    attend_for = gattn.attention.attend_for
    monkeypatch.setattr("gattn.models.gcn_conv.attend_for", lambda *a, **k: sums.append(1) or attend_for(*a, **k))
    convs = [model.graph_conv.convs if name == "sgformer" else model.local_convs for model in (ours, theirs)]
    for parts in convs:
        change(parts[1])
    x, found = torch.randn(9, F, requires_grad=True), []
    for model in (ours, theirs):
        out = model(x, EDGES, torch.zeros(9, dtype=torch.long))
        found.append([out, *torch.autograd.grad(out.square().sum(), [x, *model.parameters()], allow_unused=True)])
    torch.testing.assert_close(*found)
    assert len(sums) == len(convs[0]) - (not is_fused)


def test_edges_that_are_edited():
    """What is kept with the edges is derived again."""
    ours, theirs = pair_of("sgformer")
    x, edges, batch = torch.randn(9, F), EDGES.clone(), torch.zeros(9, dtype=torch.long)
    ours(x, edges, batch)
    edges[0, :5] = edges[1, :5]
    torch.testing.assert_close(ours(x, edges, batch), theirs(x, edges, batch))
    sparse = torch.sparse_coo_tensor(edges, torch.ones(30), (9, 9)).to_sparse_csr()
    torch.testing.assert_close(ours(x, sparse, batch), theirs(x, sparse, batch))


def test_paper_norms_and_wrong_options():
    model = SGFormer(F, 8, C, norm="frobenius").eval()
    assert model.trans_conv.attns[0].norm == "frobenius"
    assert len(model.params1) + len(model.params2) == len(list(model.parameters()))
    assert all(any(p is q for q in model.parameters()) for p in model.params1)
    for make, message in (
        (lambda: SGFormer(F, 8, C, aggregate="mean"), "'add' or 'cat'"),
        (lambda: SGFormer(F, 8, C, gnn_dropout=1.5), "gnn_dropout"),
        (lambda: Polynormer(F, 8, C, local_layers=0), "local_layers"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    with pytest.raises(TypeError, match="on must be"):
        Polynormer(F, 8, C).use_global("yes")


@pytest.mark.parametrize("name", ["sgformer", "polynormer, heads"])
def test_training(name):
    model, _ = pair_of(name)
    torch.set_default_dtype(torch.float)
    model.train().float()
    x, edges = torch.randn(20, F), random_edge_index(20, num_edges=60)
    y = (x[:, 0] > 0).long()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    first = None
    for step in range(60):
        if name.startswith("polynormer"):
            model.use_global(step >= 30)
            first = None if step == 30 else first
        optimizer.zero_grad()
        loss = torch.nn.functional.nll_loss(model(x, edges), y)
        first = loss.item() if first is None else first
        loss.backward()
        optimizer.step()
    assert loss.item() < first
