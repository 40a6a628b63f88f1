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


#: PyG's SGFormer makes tensors of the default type.
pytestmark = pytest.mark.usefixtures("in_double")


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
    monkeypatch.setattr("gattn.nn.graph.gcn_conv.attend_for", lambda *a, **k: sums.append(1) or attend_for(*a, **k))
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


@pytest.mark.parametrize(("use_act", "alpha"), [(False, 0.5), (True, 0.8)])
def test_sgformer_as_in_its_paper(use_act, alpha):
    """Equations 1 to 5, written anew: all nodes share Frobenius norms, and projections have biases."""
    options = {"norm": "frobenius", "qkv_bias": True, "use_act": use_act, "alpha": alpha}
    model = SGFormer(F, 8, C, trans_num_layers=2, gnn_num_layers=1, **options).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1, 1)
    x, edges = torch.randn(9, F, dtype=torch.double, requires_grad=True), EDGES
    net = model.trans_conv
    z = net.bns[0](net.fcs[0](x)).relu()
    for attn, norm in zip(net.attns, net.bns[1:], strict=True):
        q, k, v = (lin(z) for lin in (attn.q, attn.k, attn.v))
        weights = (q / q.norm()) @ (k / k.norm()).T
        attended = (weights @ v / 9 + v) / (weights.sum(1, keepdim=True) / 9 + 1)
        z = norm(alpha * attended + (1 - alpha) * z)
        z = z.relu() if use_act else z
    net = model.graph_conv
    h = first = net.bns[0](net.fcs[0](x)).relu()
    adjacency = torch.zeros(9, 9, dtype=torch.double).index_put((edges[1], edges[0]), torch.ones(30).double(), True)
    adjacency = adjacency.fill_diagonal_(0.0) + torch.eye(9)
    root = adjacency.sum(1).rsqrt()
    conv = net.convs[0]
    h = net.bns[1](root[:, None] * adjacency * root @ conv.lin(h) + conv.bias).relu() + first
    expected = model.fc(0.5 * h + 0.5 * z).log_softmax(-1)
    found = model(x, edges)
    leaves = [x, *model.parameters()]
    weight = torch.randn_like(found)
    grads = [torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True) for out in (found, expected)]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("is_global", [False, True])
def test_polynormer_as_in_its_paper(is_global):
    """Equations 3 to 8, written anew, with what is learnt there."""
    heads, hidden = 2, 3
    width, options = heads * hidden, {"learn_beta": True, "lin_in": True, "qkv_bias": True, "post_bn": False}
    model = Polynormer(F, hidden, C, 2, 1, heads=heads, beta=0.5, local_attn=True, **options).double().eval()
    assert (model.betas.sigmoid() == 0.5).all()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1, 1)
    model.use_global(is_global)
    x, (source, target) = torch.randn(9, F, dtype=torch.double, requires_grad=True), EDGES
    h, total = model.lin_in(x), 0.0
    for i, conv in enumerate(model.local_convs):
        value = conv.lin(h).view(9, heads, hidden)
        logits = ((value * conv.att_src).sum(-1)[source] + (value * conv.att_dst).sum(-1)[target]).exp()
        logits = torch.nn.functional.leaky_relu(logits.log(), conv.negative_slope).exp()
        sums = torch.zeros(9, heads, dtype=torch.double).index_add(0, target, logits)
        attended = torch.zeros_like(value).index_add(0, target, (logits / sums[target]).unsqueeze(-1) * value[source])
        a, beta = (attended.flatten(1) + model.lins[i](h)).relu(), model.betas[i].sigmoid()
        h = (1 - beta) * model.lns[i](model.h_lins[i](h).relu() * a) + beta * a
        total = total + h
    expected = model.pred_local(total)
    if is_global:
        (attn,) = model.global_attn
        h = model.ln(total)
        k, v = attn.k(h).sigmoid().view(9, hidden, heads), attn.v(h).view(9, hidden, heads)
        q = k if attn.qk_shared else attn.q(h).sigmoid().view(9, hidden, heads)
        products = torch.einsum("ich,jch->ijh", q, k)
        a = torch.einsum("ijh,jch->ich", products, v) / (products.sum(1).unsqueeze(1) + 1e-6)
        a = attn.lns(a.reshape(9, width)) * (attn.h_lins(h) + attn.betas.sigmoid())
        expected = model.pred_global(attn.lin_out(a).relu())
    found, expected = model(x, EDGES), expected.log_softmax(-1)
    weight = torch.randn_like(found)
    leaves = [x, *model.parameters()]
    grads = [torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True) for out in (found, expected)]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-9, atol=1e-9)


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
