"""Attention for some of a graph's targets: what it computes for all of them, chosen afterwards."""

import pytest
import torch
from torch_geometric import EdgeIndex

import gattn
from gattn import CompleteGraph, SparseGraph, TypedGraph
from gattn.distributed import shard
from gattn.nn import GATv2Conv, MultiheadAttention, TransformerConv
from tests.shards import on_processes

N, M, H, C = 9, 7, 2, 4


def edges(sources=N, targets=N, count=25):
    torch.manual_seed(1)
    return torch.stack([torch.randint(sources, (count,)), torch.randint(targets, (count,))])


def adjacency():
    return torch.sparse_coo_tensor(edges(M, N).flip(0), torch.ones(25), (N, M)).coalesce().to_sparse_csr()


GRAPHS = {
    "list": lambda: SparseGraph(edges(M, N), N, M),
    "with self-loops": lambda: SparseGraph(edges(), N, N, self_loops=True),
    "target to source": lambda: SparseGraph(edges(M, N).flip(0), N, M, flow="target_to_source"),
    "adjacency": lambda: SparseGraph(adjacency()),
    "EdgeIndex": lambda: SparseGraph(EdgeIndex(edges(), sparse_size=(N, N)), N, N),
    "typed": lambda: TypedGraph(edges(M, N), torch.arange(25) % 3, num_targets=N, num_sources=M),
    "no edges": lambda: SparseGraph(torch.zeros(2, 0, dtype=torch.long), N, M),
    "complete": lambda: CompleteGraph(N, M),
    "causal": lambda: CompleteGraph(N, causal=True),
    "causal, fewer sources": lambda: CompleteGraph(N, M, causal=True),
    "causal, fewer targets": lambda: CompleteGraph(M, N, causal=True),
    "window": lambda: CompleteGraph(N, window=(2, 1)),
    "causal window": lambda: CompleteGraph(N, causal=True, window=2),
    "packed": lambda: CompleteGraph.packed([4, 0, 5]),
    "packed, other sources": lambda: CompleteGraph.packed([4, 5], [3, 4]),
    "packed, causal": lambda: CompleteGraph.packed([4, 0, 5], causal=True),
    "packed, window": lambda: CompleteGraph.packed([4, 5], window=1),
}


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("chosen", [[0, 3, 3, 5, 6], [], [6]], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_rows_are_those_of_all(kind, chosen, dtype):
    graph, index = GRAPHS[kind](), torch.tensor(chosen, dtype=dtype)
    query = torch.randn(graph.num_targets, H, C, dtype=torch.double, requires_grad=True)
    key, value = torch.randn(2, graph.num_sources, H, C, dtype=torch.double, requires_grad=True).unbind()
    some = graph.for_targets(index)
    assert (some.num_targets, some.num_sources) == (len(chosen), graph.num_sources)
    found = gattn.attend(query[index], key, value, some)
    expected = gattn.attend(query, key, value, graph)[index]
    torch.testing.assert_close(found, expected)
    grads = [
        torch.autograd.grad(out.sin().sum(), [query, key, value], materialize_grads=True) for out in (found, expected)
    ]
    torch.testing.assert_close(*grads)


def test_in_any_order_and_a_packed_graph_in_its_own():
    query, index = torch.randn(N, H, C), torch.tensor([7, 1, 1, 4])
    for kind in ("list", "causal", "packed, causal", "complete"):
        graph = GRAPHS[kind]()
        key = torch.randn(graph.num_sources, H, C)
        found = gattn.attend(query[index], key, key, graph.for_targets(index))
        torch.testing.assert_close(found, gattn.attend(query, key, key, graph)[index])
    with pytest.raises(ValueError, match="order of its blocks"):
        GRAPHS["packed"]().for_targets(index)


def test_what_edges_have():
    """Features of edges, terms by type, and weights."""
    graph, index = GRAPHS["typed"](), torch.tensor([8, 0, 3])
    query, key, edge, table = torch.randn(N, H, C), torch.randn(M, H, C), torch.randn(25, H, C), torch.randn(3, H)
    some = graph.for_targets(index)
    assert isinstance(some, TypedGraph)
    assert some.edge_types == graph.edge_types
    found, weights = gattn.attend(
        query[index], key, key, some, edge=edge[some.edge_ids], bias=table[some.edge_type], return_weights=True
    )
    expected, of_all = gattn.attend(query, key, key, graph, edge=edge, bias=table[graph.edge_type], return_weights=True)
    torch.testing.assert_close(found, expected[index])
    torch.testing.assert_close(weights, of_all[some.edge_ids])
    assert (edges(M, N)[0, some.edge_ids] == some.edge_index[0]).all()


def test_lengths_of_a_batch():
    graph = CompleteGraph(N, M, source_lengths=torch.tensor([3, 7]))
    query, key, index = torch.randn(2, N, H, C), torch.randn(2, M, H, C), torch.tensor([2, 5])
    found = gattn.attend(query[:, index], key, key, graph.for_targets(index))
    torch.testing.assert_close(found, gattn.attend(query, key, key, graph)[:, index])


@pytest.mark.parametrize("layer", [GATv2Conv, TransformerConv])
def test_layers_on_edges(layer):
    """With edge features."""
    graph, index, x = SparseGraph(edges(), N, N), torch.tensor([4, 0, 7]), torch.randn(N, 8)
    options = {"add_self_loops": False} if layer is GATv2Conv else {}
    conv, features = layer(8, C, H, edge_dim=3, **options), torch.randn(25, 3)
    some = graph.for_targets(index)
    expected = conv(x, graph, features)[index]
    torch.testing.assert_close(conv((x, x[index]), some, features[some.edge_ids]), expected)


def test_self_loops_are_those_of_the_chosen():
    graph, index, x = SparseGraph(edges(), N, N), torch.tensor([4, 0, 7]), torch.randn(N, 8)
    conv = GATv2Conv(8, C, H)
    some = graph.with_self_loops().for_targets(index)
    assert some.edge_ids is None  # features of edges have no rows for self-loops
    torch.testing.assert_close(conv((x, x[index]), some), conv(x, graph)[index])
    with pytest.raises(ValueError, match=r"with_self_loops\(\)\.for_targets"):
        conv((x, x[index]), graph.for_targets(index))
    causal = GRAPHS["causal"]()
    torch.testing.assert_close(conv((x, x[index]), causal.for_targets(index)), conv(x, causal)[index])


def test_multihead_attention():
    attention, x, index = MultiheadAttention(8, H), torch.randn(N, 8), torch.tensor([3, 8])
    for kind in ("complete", "causal", "window"):
        graph = CompleteGraph(N) if kind == "complete" else GRAPHS[kind]()
        found = attention(x[index], x, x, graph=graph.for_targets(index), need_weights=False)[0]
        torch.testing.assert_close(found, attention(x, x, x, graph=graph, need_weights=False)[0][index])


def test_wrong_uses():
    graph = GRAPHS["list"]()
    for index, error, text in (
        ([0], TypeError, "tensor of integers"),
        (torch.tensor([0.0]), TypeError, "tensor of integers"),
        (torch.tensor([True]), TypeError, "tensor of integers"),
        (torch.tensor([[0]]), ValueError, "numbers of targets"),
        (torch.tensor([N]), IndexError, "9 targets"),
        (torch.tensor([-1]), IndexError, "9 targets, from 0; got numbers from -1 to -1"),
    ):
        for some in (graph, GRAPHS["causal"]()):
            with pytest.raises(error, match=text):
                some.for_targets(index)
    with pytest.raises(ValueError, match="num_targets and num_sources"):
        SparseGraph(edges()).for_targets(torch.tensor([0]))
    with pytest.raises(ValueError, match="padding"):
        CompleteGraph(N, target_lengths=torch.tensor([3, 2])).for_targets(torch.tensor([0]))

    def of_process(mesh):
        with pytest.raises(ValueError, match="before sharding"):
            shard(graph, mesh).for_targets(torch.tensor([0]))

    on_processes(2, of_process)
