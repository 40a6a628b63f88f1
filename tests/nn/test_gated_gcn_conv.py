"""GatedGCNConv against its formula, and against DGL's layer where that can be imported."""

import copy
import importlib.util
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as nnf
from allpairspy import AllPairs
from torch_geometric.utils import coalesce, to_torch_csr_tensor

import gattn
from gattn.nn.graph.gated_gcn_conv import GatedGCNConv
from gattn.testing import assert_as_exact_as, random_edge_index
from tests.nn.against_pyg import FORMS, name_of, results

M, N, F = 9, 7, 5
OPTIONS = {
    "channels": ((F, F, F), (F, 3, F), (F, F, 4), (-1, -1, F)),
    "batch_norm": (True, False),
    "residual": (True, False),
    "activation": (nnf.relu, torch.nn.PReLU(), None),
    "training": (True, False),
}


def inputs(channels=(F, F, F), num_targets=M):
    """Features of sources, edges sorted and without duplicates, and their features."""
    edges = coalesce(random_edge_index(M, num_targets, 40, seed=1))
    wide, deep = (F if size == -1 else size for size in channels[:2])
    return torch.randn(M, wide).double(), edges, torch.randn(edges.size(1), deep).double()


def formula(conv, x, edges, edge_attr):
    """What the layer computes, with a loop over targets, and batch normalisation by statistics of its own."""
    sources, targets = x if isinstance(x, tuple) else (x, x)
    logits = conv.D(sources)[edges[0]] + conv.E(targets)[edges[1]] + conv.C(edge_attr)
    gates, rows = logits.sigmoid(), []
    for i in range(targets.size(0)):
        mine = (edges[1] == i).nonzero().flatten()
        sums = (gates[mine] * conv.B(sources)[edges[0, mine]]).sum(0), gates[mine].sum(0)
        rows.append(conv.A(targets[i]) + sums[0] / (sums[1] + 1e-6))
    found = []
    for new, old, norm in ((torch.stack(rows), targets, conv.bn_node), (logits, edge_attr, conv.bn_edge)):
        if conv.batch_norm:
            mean, var = norm.running_mean, norm.running_var
            if conv.training:
                mean, var = new.mean(0), (new - new.mean(0)).square().mean(0)
            new = (new - mean) / (var + 1e-5).sqrt() * norm.weight + norm.bias
        new = new if conv.activation is None else conv.activation(new)
        found.append(
            old + new if conv.residual and F == targets.size(-1) == edge_attr.size(-1) == new.size(-1) else new
        )
    return tuple(found)


class Formula(torch.nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv = copy.deepcopy(conv)

    def forward(self, *args):
        return formula(self.conv, *args)


def randomized(conv):
    """The layer with nothing that is zero or one."""
    for tensor in (*conv.bn_node.buffers(), *conv.bn_edge.buffers(), *conv.parameters()):
        if tensor.is_floating_point():
            tensor.data.uniform_(0.2, 1.0).mul_(1 - 2 * (torch.rand_like(tensor) < 0.3) * (tensor.dim() > 1))
    return conv


def assert_as_formula(conv, *args):
    found, expected = results(copy.deepcopy(conv), *args), results(Formula(conv), *args)
    expected = {name.removeprefix("conv."): value for name, value in expected.items()}
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("options", list(AllPairs(list(OPTIONS.values()))), ids=name_of)
def test_as_formula(options):
    channels, batch_norm, residual, activation, training = options
    conv = GatedGCNConv(*channels, 0.0, batch_norm, residual, copy.deepcopy(activation)).double().train(training)
    x, edges, edge_attr = inputs(channels)
    conv(x, edges, edge_attr)
    assert_as_formula(randomized(conv), x, edges, edge_attr)


def test_by_hand():
    conv = GatedGCNConv(1, 1, 1, batch_norm=False).double()
    for name, weight in (("A", 1.0), ("B", 2.0), ("C", 1.0), ("D", 1.0), ("E", -1.0)):
        torch.nn.init.constant_(getattr(conv, name).weight, weight)
        torch.nn.init.zeros_(getattr(conv, name).bias)
    x, edges, edge_attr = (
        torch.tensor([[1.0], [2.0], [3.0]]),
        torch.tensor([[0, 1], [2, 2]]),
        torch.tensor([[2.0], [1.0]]),
    )
    x, edge_attr = conv(x.double(), edges, edge_attr.double())
    # Both logits are 0 = 1 - 3 + 2 = 2 - 3 + 1, both gates 1/2: 3 + (3 + (1 * 2 + 2 * 2) / 2).
    torch.testing.assert_close(x, torch.tensor([[2.0], [4.0], [9.0]]).double(), rtol=1e-5, atol=0)
    torch.testing.assert_close(edge_attr, torch.tensor([[2.0], [1.0]]).double())


@pytest.mark.parametrize("batch_norm", [True, False])
@pytest.mark.parametrize("channels", [(F, F, F), (F, 3, 4)])
def test_as_dgl(channels, batch_norm):
    if importlib.util.find_spec("dgl") is None:
        pytest.skip("DGL is not installed")
    try:
        from benchmarks.kernel_cases import import_dgl

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dgl = import_dgl()
            from dgl.nn.pytorch import GatedGCNConv as TheirConv
    except Exception as error:
        pytest.skip(f"DGL cannot be imported: {error}")
    layers = []
    for layer in (GatedGCNConv, TheirConv):
        torch.manual_seed(0)
        layers.append(layer(*channels, batch_norm=batch_norm))
    ours, theirs = layers
    assert list(ours.state_dict()) == list(theirs.state_dict())
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    randomized(ours)
    theirs.load_state_dict(ours.state_dict())
    x, edges, edge_attr = (tensor.float() if tensor.is_floating_point() else tensor for tensor in inputs(channels))
    graph = dgl.graph(tuple(edges), num_nodes=M)
    for training in (True, False):
        found = ours.train(training)(x, edges, edge_attr)
        torch.testing.assert_close(found, theirs.train(training)(graph, x, edge_attr))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())  # the running statistics


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form):
    x, edges, edge_attr = inputs()
    conv = randomized(GatedGCNConv(F, F, F).double())
    order = (edges[1] * M + edges[0]).argsort() if form in ("csr", "coo", "SparseTensor") else slice(None)
    found = conv(x, FORMS[form](edges, (M, M)), edge_attr[order])
    torch.testing.assert_close(found, formula(conv, x, edges[:, order], edge_attr[order]))


def test_other_graphs():
    x, edges, edge_attr = inputs()
    conv = randomized(GatedGCNConv(F, F, F).double())
    expected = formula(conv, x, edges, edge_attr)
    backwards = copy.deepcopy(conv)
    backwards.flow = "target_to_source"
    torch.testing.assert_close(backwards(x, edges.flip(0), edge_attr), expected)
    order = (edges[1] * M + edges[0]).argsort()
    held = conv(x, to_torch_csr_tensor(edges.flip(0), edge_attr, size=(M, M)))
    torch.testing.assert_close(held, (expected[0], expected[1][order]))
    graph = gattn.CompleteGraph(M, causal=True)
    attrs = torch.randn(graph.num_edges, F).double()
    torch.testing.assert_close(conv(x, graph, attrs), formula(conv, x, graph.edge_index, attrs))
    pair, edges, edge_attr = (x, torch.randn(N, F).double()), *inputs(num_targets=N)[1:]
    torch.testing.assert_close(conv(pair, edges, edge_attr), formula(conv, pair, edges, edge_attr))


def test_gradients_and_backends():
    x, edges, edge_attr = inputs()
    conv = randomized(GatedGCNConv(F, F, F, activation=torch.tanh).double())
    conv.bn_node.track_running_stats = conv.bn_edge.track_running_stats = False  # a function of its inputs alone
    leaves = [x.requires_grad_(), edge_attr.requires_grad_()]
    assert torch.autograd.gradcheck(lambda x, edge_attr: conv(x, edges, edge_attr), leaves)
    found = []
    for backend in ("reference", "cpu"):
        with gattn.backend(backend):
            found.append(results(copy.deepcopy(conv), x, edges, edge_attr))
    torch.testing.assert_close(*found)


def test_batches_and_zero_sizes():
    x, edges, edge_attr = inputs()
    conv = randomized(GatedGCNConv(F, F, F).double()).eval()
    batch, attrs = torch.stack([x, 2 * x]), torch.stack([edge_attr, -edge_attr])
    for found, expected in (
        (conv(batch, edges, attrs), conv(2 * x, edges, -edge_attr)),
        (conv(batch, edges, edge_attr), conv(2 * x, edges, edge_attr)),
    ):
        torch.testing.assert_close(tuple(part[1] for part in found), expected)
    empty = torch.empty(2, 0, dtype=torch.long), torch.empty(0, F).double()
    for training in (False, True):
        conv.train(training)
        torch.testing.assert_close(conv(x, *empty)[0], formula(conv, x, *empty)[0])
        assert [out.shape for out in conv(x[:0], *empty)] == [(0, F), (0, F)]
    assert all(value.isfinite().all() for value in conv.state_dict().values())


def test_dropout():
    x, edges, edge_attr = inputs()
    conv = GatedGCNConv(F, F, F, dropout=0.5, activation=None).double()
    for out in conv(x, edges, edge_attr):
        assert 0.2 < out.eq(0).double().mean() < 0.8
    conv.eval()
    torch.testing.assert_close(conv(x, edges, edge_attr), formula(conv, x, edges, edge_attr))


def test_around_it():
    x, edges, edge_attr = inputs()
    conv = randomized(GatedGCNConv(F, F, F).double()).eval()
    assert str(conv) == "GatedGCNConv(5, 5, 5)"
    expected = conv(x, edges, edge_attr)
    for other in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
        torch.testing.assert_close(other(x, edges, edge_attr), expected)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(conv, fullgraph=True)(x, edges, edge_attr), expected)
    with gattn.record_attention(conv) as records:
        conv(x, edges, edge_attr)
    totals = torch.zeros(M, F).double().index_add(0, edges[1], records[""][0].weights)
    torch.testing.assert_close(
        totals[edges[1].unique()], torch.ones(edges[1].unique().numel(), F).double(), rtol=1e-3, atol=0
    )
    before = conv.state_dict()["A.weight"].clone()
    conv.reset_parameters()
    assert not torch.equal(conv.A.weight, before)
    assert conv.bn_node.running_var.eq(1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    x, edges, edge_attr = inputs()
    conv = randomized(GatedGCNConv(F, F, F).double())
    exact, half = formula(conv, x, edges, edge_attr), copy.deepcopy(conv).to(dtype)
    given = x.to(dtype), edges, edge_attr.to(dtype)
    for parts in zip(half(*given), formula(half, *given), exact, strict=True):
        assert_as_exact_as(*parts)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        single, given = conv.float(), (x.float(), edges, edge_attr.float())
        found, peer = single(*given), formula(single, *given)
    for out, other, right in zip(found, peer, exact, strict=True):
        assert_as_exact_as(out.float(), other.float(), right)


def test_wrong_inputs():
    x, edges, edge_attr = inputs()
    conv = GatedGCNConv(F, F, F).double()
    for given, message in (
        ((x, edges), r"needs edge_attr, \[E, 5\]"),
        ((x, edges, edge_attr[:, 1:]), "edge_attr has 4 channels, but this layer was made for edge features of 5"),
        ((x, edges, edge_attr[1:]), r"edge_attr needs one row per edge; got \d+ rows for \d+"),
        ((x[:, 1:], edges, edge_attr), "x has 4 channels, but this layer was made for in_channels=5"),
        (((x, None), edges, edge_attr), r"x\[1\] may not be None"),
        ((x, gattn.CompleteGraph(M, source_lengths=torch.tensor([3])), torch.randn(M * M, F)), "needs a list of edges"),
    ):
        with pytest.raises(ValueError, match=message):
            conv(*given)
    with pytest.raises(TypeError, match="edge_attr must be a tensor; got list"):
        conv(x, edges, [1.0])
    with pytest.raises(IndexError):
        conv(x, edges + M, edge_attr)
    with pytest.raises(ValueError, match="dropout probability"):
        GatedGCNConv(F, F, F, dropout=2.0)
    with pytest.raises(TypeError, match="GatedGCNConv has no argument heads"):
        GatedGCNConv(F, F, F, heads=2)
