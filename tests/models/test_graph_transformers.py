"""SGFormer and Polynormer, beside PyG's networks."""

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.data import Data

from gattn.models import Polynormer, SGFormer
from gattn.testing import assert_alone_equals_in_batch, random_edge_index

F, C = 6, 4
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
