"""Graphs whose edges and nodes have types."""

import copy

import pytest
import torch
from torch_geometric.data import HeteroData

import gattn
from gattn import Typed, TypedGraph, WithinTypes, attend
from gattn.testing import random_edge_index

N, E, R, H, C = 9, 50, 4, 2, 3
EDGES = random_edge_index(N, N, E, seed=1)
TYPES = torch.randint(R, (E,), generator=torch.Generator().manual_seed(0))
SIZES = {"author": 3, "paper": 5, "venue": 0}
RELATIONS = {
    ("author", "writes", "paper"): torch.tensor([[0, 1, 2, 2], [0, 4, 1, 2]]),
    ("paper", "cites", "paper"): torch.tensor([[0, 1], [1, 2]]),
    ("paper", "written by", "author"): torch.tensor([[3], [1]]),
    ("paper", "in", "venue"): torch.zeros(2, 0, dtype=torch.int64),
}


def test_terms_by_type_are_those_of_each_edge():
    graph, x, table = TypedGraph(EDGES, TYPES), torch.randn(N, H, C), torch.randn(R, H, C)
    found = attend(x, x, x, graph, edge=Typed(table, graph.edge_type))
    torch.testing.assert_close(found, attend(x, x, x, EDGES, edge=table[TYPES]))
    assert graph.edge_types == (0, 1, 2, 3)
    assert repr(graph) == "TypedGraph(num_sources=None, num_targets=None, edge_types=4)"


def test_a_softmax_within_each_relation_is_one_for_each():
    graph, x = TypedGraph(EDGES, TYPES, R), torch.randn(N, H, C)
    found = attend(x, x, x, graph, distribution=WithinTypes(graph.edge_type))
    alone = sum(attend(x, x, x, EDGES[:, number == TYPES]) for number in range(R))
    torch.testing.assert_close(found, alone)


def hetero():
    data = HeteroData()
    for name, size in SIZES.items():
        data[name].num_nodes = size
    for relation, edges in RELATIONS.items():
        data[relation].edge_index = edges
    return data


@pytest.mark.parametrize(
    "make", [lambda: TypedGraph.from_hetero(hetero()), lambda: TypedGraph.from_hetero(RELATIONS, SIZES)]
)
def test_heterogeneous_graphs(make):
    graph = make()
    assert graph.edge_types == tuple(RELATIONS)
    assert graph.num_nodes == SIZES
    assert (graph.num_sources, graph.num_targets, graph.num_edges) == (8, 8, 7)
    assert graph.edge_index.tolist() == [[0, 1, 2, 2, 3, 4, 6], [3, 7, 4, 5, 4, 5, 1]]
    assert graph.edge_type.tolist() == [0, 0, 0, 0, 1, 1, 2]
    features = {name: torch.randn(size, H, C) for name, size in SIZES.items()}
    x = graph.join(features)
    assert x.shape == (8, H, C)
    parts = graph.split(x)
    assert parts.keys() == features.keys()
    for name, part in parts.items():
        assert torch.equal(part, features[name])
    out = graph.split(attend(x, x, x, graph))
    assert out["venue"].shape == (0, H, C)
    # The first author is written to by nobody; the second by the paper number 3.
    assert (out["author"][0] == 0).all()
    torch.testing.assert_close(out["author"][1], features["paper"][3])


def test_relations_may_be_sparse_adjacencies():
    data = hetero()
    writes = ("author", "writes", "paper")
    edges = data[writes].edge_index
    del data[writes].edge_index
    data[writes].adj_t = torch.sparse_coo_tensor(edges.flip(0), torch.ones(4), (5, 3)).to_sparse_csr()
    graph = TypedGraph.from_hetero(data)
    assert graph.edge_types == tuple(RELATIONS)
    pairs = {tuple(pair) for pair in TypedGraph.from_hetero(RELATIONS, SIZES).edge_index.t().tolist()}
    assert {tuple(pair) for pair in graph.edge_index.t().tolist()} == pairs
    data[writes].clear()
    with pytest.raises(ValueError, match="neither edge_index nor adj_t"):
        TypedGraph.from_hetero(data)


def test_a_heterogeneous_graph_without_edges():
    data = HeteroData()
    data["a"].num_nodes = 2
    graph = TypedGraph.from_hetero(data)
    assert (graph.num_edges, graph.num_targets) == (0, 2)


def test_a_batch_of_features():
    graph = TypedGraph.from_hetero(RELATIONS, SIZES)
    features = {name: torch.randn(2, size, C) for name, size in SIZES.items()}
    parts = graph.split(graph.join(features, dim=-2), dim=-2)
    assert all(torch.equal(parts[name], x) for name, x in features.items())


def test_layers_take_them():
    graph, x = TypedGraph(EDGES, TYPES), torch.randn(N, 5)
    conv = gattn.nn.GATv2Conv(5, 4, heads=2, add_self_loops=False)
    assert torch.equal(conv(x, graph), conv(x, EDGES))
    with pytest.raises(ValueError, match="self-loops would have no type"):
        gattn.nn.GATConv(5, 4)(x, graph)


def test_copies_keep_the_types():
    graph = TypedGraph(EDGES, TYPES.int(), ["a", "b", "c", "d"])
    for other in (graph.to("cpu"), graph.with_sizes(N, N), copy.deepcopy(graph)):
        assert torch.equal(other.edge_type, TYPES)
        assert other.edge_types == ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((EDGES, TYPES.tolist()), TypeError, "must be a tensor"),
        ((EDGES, TYPES.float()), ValueError, "integers from 0"),
        ((EDGES, TYPES[1:]), ValueError, "there are 50 edges, but edge_type has 49"),
        ((EDGES, TYPES, 3), IndexError, "holds type 3"),
        ((EDGES, TYPES, True), TypeError, "names of types, or their number"),
        ((torch.eye(N).to_sparse_csr(), TYPES), ValueError, "there are 9 edges, but edge_type has 50"),
        ((EDGES, TYPES - 1), IndexError, "holds type -1"),
        ((EDGES, TYPES, R, {"a": 3, "b": 5}), IndexError, "index 8"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        TypedGraph(*arguments).edges()


@pytest.mark.parametrize("bad", [-1, 3])
def test_compiled_code_takes_no_node_for_one_of_another_type(bad):
    torch._dynamo.reset()
    name = ("author", "writes", "paper")
    join = lambda edges: TypedGraph.from_hetero({**RELATIONS, name: edges}, SIZES).edge_index + 0  # noqa: E731
    compiled, edges = torch.compile(join, fullgraph=True, backend="aot_eager"), RELATIONS[name].clone()
    torch.testing.assert_close(compiled(edges), join(edges))
    edges[0, 1] = bad
    with pytest.raises(RuntimeError, match="edge_index holds a source"):
        compiled(edges)


@pytest.mark.parametrize("bad", [-1, R])
def test_compiled_code_takes_no_type_for_another_node(bad):
    torch._dynamo.reset()
    x, types = torch.randn(N, H, C), TYPES.clone()
    within = lambda types: attend(x, x, x, EDGES, distribution=WithinTypes(types, num_types=R))  # noqa: E731
    compiled = torch.compile(within, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(types), within(types))
    types[1] = bad
    with pytest.raises(RuntimeError, match="edge_type holds a type"):
        compiled(types)


def test_hetero_graphs_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="give num_nodes"):
        TypedGraph.from_hetero(RELATIONS)
    with pytest.raises(ValueError, match="nodes of type 'paper'; num_nodes has"):
        TypedGraph.from_hetero(RELATIONS, {"author": 3})
    with pytest.raises(IndexError, match="target index 4"):
        TypedGraph.from_hetero(RELATIONS, {**SIZES, "paper": 4})
    with pytest.raises(TypeError, match="got Tensor"):
        TypedGraph.from_hetero(EDGES)
    graph = TypedGraph.from_hetero(RELATIONS, SIZES)
    with pytest.raises(ValueError, match="5 nodes of type 'paper'"):
        graph.join({"author": torch.zeros(3, 2)})
    with pytest.raises(ValueError, match="8 nodes, but there are 7 rows of features"):
        graph.split(torch.zeros(7, 2))
    with pytest.raises(ValueError, match="have no types"):
        TypedGraph(EDGES, TYPES).split(torch.zeros(N, 2))
