"""The graph convolution against PyG's, wherever its sums are the kernels' and wherever they are not."""

import copy
import inspect

import pytest
import torch
import torch_geometric.nn as pyg
from allpairspy import AllPairs
from torch_geometric import EdgeIndex
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import to_torch_csr_tensor

import gattn
from gattn.nn import GCNConv
from gattn.testing import random_edge_index
from tests.shards import on_processes

N, F, C, E = 9, 5, 4, 30
ONES = torch.ones(E, dtype=torch.double)


@pytest.fixture
def edge_index():
    """With self-loops, an edge twice, and a node without neighbours."""
    edges = random_edge_index(N - 1, num_edges=E - 4)
    return torch.cat([edges, edges[:, :2], torch.tensor([[2, 3], [2, 3]])], 1)


@pytest.fixture
def kernels(monkeypatch):
    """How often sums are those of the kernels."""
    calls, attend_for = [], gattn.attention.attend_for
    monkeypatch.setattr("gattn.nn.graph.gcn_conv.attend_for", lambda *a, **k: calls.append(1) or attend_for(*a, **k))
    return calls


def pair(**options):
    theirs, ours = pyg.GCNConv(F, C, **options), GCNConv(F, C, **options)
    if theirs.bias is not None:
        torch.nn.init.normal_(theirs.bias)
    ours.load_state_dict(theirs.state_dict())
    return ours.double(), theirs.double()


def results(conv, x, graph, weight=None):
    out = conv(x, graph, weight)
    leaves = [x, *conv.parameters(), *([] if weight is None else [weight])]
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


OPTIONS = [
    [True, False],
    [False, True],
    [None, True, False],
    [True, False],
    ["source_to_target", "target_to_source"],
    [False, True],
    [(), (3,)],
]


@pytest.mark.parametrize(
    ("normalize", "improved", "add_self_loops", "bias", "flow", "has_weight", "batch"),
    list(AllPairs(OPTIONS, filter_func=lambda case: len(case) < 3 or case[0] or not case[2])),
)
def test_equals_pyg(normalize, improved, add_self_loops, bias, flow, has_weight, batch, edge_index, kernels):
    ours, theirs = pair(normalize=normalize, improved=improved, add_self_loops=add_self_loops, bias=bias, flow=flow)
    x = torch.randn(*batch, N, F, dtype=torch.double, requires_grad=True)
    weight = torch.rand(E, dtype=torch.double, requires_grad=True) if has_weight else None
    torch.testing.assert_close(results(ours, x, edge_index, weight), results(theirs, x, edge_index, weight))
    assert len(kernels) == 1


FORMS = {
    "EdgeIndex": lambda edges: EdgeIndex(edges.contiguous(), sparse_size=(N, N)),
    "SparseTensor": lambda edges: SparseTensor.from_edge_index(edges, sparse_sizes=(N, N)).t(),
    "torch.sparse": lambda edges: to_torch_csr_tensor(
        edges.flip(0).unique(dim=1), torch.ones(edges.size(1)).double(), (N, N)
    ),
    "int32": lambda edges: edges.int(),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_graphs(form, edge_index):
    if form == "SparseTensor":
        pytest.importorskip("torch_sparse")
    graph, (ours, theirs) = FORMS[form](edge_index.unique(dim=1)), pair()
    x = torch.randn(N, F, dtype=torch.double, requires_grad=True)
    theirs_takes = graph.long() if form == "int32" else graph
    torch.testing.assert_close(results(ours, x, graph), results(theirs, x, theirs_takes))


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_graphs_of_gattn(flow, edge_index):
    ours, theirs = pair()
    x = torch.randn(N, F, dtype=torch.double)
    edges = edge_index if flow == "source_to_target" else edge_index.flip(0)
    torch.testing.assert_close(ours(x, gattn.SparseGraph(edges, N, N, flow=flow)), theirs(x, edge_index))
    whole = gattn.CompleteGraph(N)
    torch.testing.assert_close(ours(x, whole), theirs(x, whole.edge_index))


def test_a_cached_graph_is_that_of_the_first_call(edge_index):
    ours, theirs = pair(cached=True)
    x = torch.randn(N, F, dtype=torch.double)
    for edges in (edge_index, edge_index[:, :3]):
        torch.testing.assert_close(ours(x, edges), theirs(x, edges))
    assert ours._cached_edge_index is not None
    ours.reset_parameters()
    assert ours._cached_edge_index is None


def test_edges_that_are_edited_are_counted_again(edge_index):
    ours, theirs = pair()
    x = torch.randn(N, F, dtype=torch.double)
    ours(x, edge_index)
    edge_index[0, :5] = 0
    torch.testing.assert_close(ours(x, edge_index), theirs(x, edge_index))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_counts_neighbours_exactly(dtype):
    edge_index = torch.stack([torch.arange(1, 1000), torch.zeros(999, dtype=torch.int64)])
    conv, x = GCNConv(F, C), torch.randn(1000, F)
    exact = conv.double()(x.double(), edge_index)
    found = conv.to(dtype)(x.to(dtype), edge_index)
    torch.testing.assert_close(found.double(), exact, rtol=0.02, atol=0.02)


def watched(conv):
    conv.register_message_forward_hook(lambda module, inputs, out: 2 * out)


def averaged(conv):
    conv.aggr_module = pyg.aggr.MeanAggregation()


@pytest.mark.parametrize("change", [watched, averaged])
def test_who_looks_at_messages_gets_pygs_way(change, edge_index, kernels):
    ours, theirs = pair()
    for conv in (ours, theirs):
        change(conv)
    x = torch.randn(N, F, dtype=torch.double, requires_grad=True)
    torch.testing.assert_close(results(ours, x, edge_index), results(theirs, x, edge_index))
    assert kernels == []


def test_arguments_are_pygs():
    for name in ("__init__", "forward"):
        ours, theirs = (inspect.signature(getattr(cls, name)).parameters for cls in (GCNConv, pyg.GCNConv))
        assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]


def test_errors(edge_index):
    conv, x = GCNConv(F, C), torch.randn(N, F)
    with pytest.raises(ValueError, match="normalization"):
        GCNConv(F, C, normalize=False, add_self_loops=True)
    with pytest.raises(IndexError, match="out of range|source|target"):
        conv(x, edge_index + N)


def test_the_network_of_the_paper_learns(edge_index):
    torch.manual_seed(0)
    x, edges = torch.randn(60, F), random_edge_index(60, num_edges=200)
    y = (x[:, 0] > 0).long()
    convs = torch.nn.ModuleList([GCNConv(F, 16), GCNConv(16, 2)])
    optimizer, losses = torch.optim.Adam(convs.parameters(), 0.02), []
    for _ in range(80):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(convs[1](convs[0](x, edges).relu(), edges), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.75 * losses[0]


@pytest.mark.parametrize("options", [{}, {"improved": True}, {"add_self_loops": False}, {"normalize": False}], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_sharded_graphs_with_self_loops(options, weighted):
    """Of two self-loops of a node, the last one's weight counts, as without shards; gradients are those of all."""
    torch.manual_seed(0)
    loops = torch.tensor([[2, 2, 5], [2, 2, 5]])
    edges = torch.cat([torch.randint(8, (2, 30)), loops], 1)
    x, weight = torch.randn(8, 4, dtype=torch.double), torch.rand(33, dtype=torch.double)
    conv = gattn.nn.GCNConv(4, 3, **options).double()
    given = (weight,) if weighted else ()
    expected = conv(x, edges, *given)
    expected = [expected, *torch.autograd.grad(expected.sin().sum(), conv.parameters())]

    def run(mesh):
        graph, own = gattn.distributed.shard(gattn.SparseGraph(edges, 8, 8), mesh), copy.deepcopy(conv)
        out = own(graph.scatter(x), graph, *(graph.scatter(term, "edges") for term in given))
        grads = torch.autograd.grad(out.sin().sum(), own.parameters())
        return [graph.gather(out.detach()), *grads]

    first, second = on_processes(2, run)
    torch.testing.assert_close(first[0], expected[0])
    torch.testing.assert_close([a + b for a, b in zip(first[1:], second[1:], strict=True)], expected[1:])


@pytest.mark.parametrize("options", [{}, {"improved": True}, {"add_self_loops": False}], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_compiled(options, weighted, edge_index):
    """With self-loops among the edges; without weights, `improved` has no effect in PyG."""
    conv, given = GCNConv(F, C, **options), (torch.rand(edge_index.size(1)),) if weighted else ()
    gattn.testing.assert_compiles_whole(conv, torch.randn(N, F), edge_index, *given)
