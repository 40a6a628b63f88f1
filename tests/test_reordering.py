"""Orders of nodes."""

import sys
import time
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.utils import grid

import gattn
from gattn.graphs import reorder, reordering

METIS = pytest.param("metis", marks=pytest.mark.skipif(find_spec("pymetis") is None, reason="needs pymetis"))
METHODS = ["rcm", METIS, "degree"]
PATH = torch.tensor([[0, 3, 1], [3, 1, 2]])


def shuffled_mesh(side=12):
    return torch.randperm(side**2)[grid(side, side)[0]]


def bandwidth(edge_index):
    return int((edge_index[0] - edge_index[1]).abs().max())


def graphs():
    """Directed, with self-loops, duplicates, isolated nodes and a hub."""
    hub = torch.stack([torch.zeros(30, dtype=torch.int64), torch.arange(30)])
    yield "random", torch.cat([torch.randint(40, (2, 120)), hub, hub[:, :9].flip(0)], 1), 45
    yield "path", PATH, 4
    yield "self-loops", torch.tensor([[1, 1], [1, 1]]), 3
    yield "no edges", torch.zeros(2, 0, dtype=torch.int64), 3
    yield "one node", torch.zeros(2, 1, dtype=torch.int64), 1
    yield "empty", torch.zeros(2, 0, dtype=torch.int64), 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", [name for name, *_ in graphs()])
def test_nodes_and_edges_are_permuted(method, name):
    edge_index, num_nodes = next(rest for known, *rest in graphs() if known == name)
    out = reorder(edge_index, num_nodes, method)
    for permutation, size in ((out.permutation, num_nodes), (out.edge_permutation, edge_index.size(1))):
        assert torch.equal(permutation.sort().values, torch.arange(size))
    assert torch.equal(out.inverse[out.permutation], torch.arange(num_nodes))
    assert torch.equal(out.edge_index, out.inverse[edge_index[:, out.edge_permutation]])
    source, target = out.edge_index.tolist()
    assert sorted(zip(target, source, strict=True)) == list(zip(target, source, strict=True))
    again = reorder(edge_index.clone(), num_nodes, method)
    assert all(torch.equal(*pair) for pair in zip(out, again, strict=True))


def test_a_path_by_hand():
    """0 → 3 → 1 → 2. Both ends have one neighbour; Cuthill and McKee start at the first, and the order is reversed."""
    permutation, edge_index, edge_permutation, inverse = reorder(PATH, 4)
    assert permutation.tolist() == [2, 1, 3, 0]
    assert inverse.tolist() == [3, 1, 0, 2]
    assert edge_index.tolist() == [[1, 2, 3], [0, 1, 2]]
    assert edge_permutation.tolist() == [2, 1, 0]
    assert reorder(PATH, 4, "degree").permutation.tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize("method", METHODS)
def test_attention_is_the_same(method):
    edge_index, edge_attr = shuffled_mesh(), torch.randn(34**2, 3, dtype=torch.float64)
    x = torch.randn(144, 6, dtype=torch.float64)
    conv = gattn.nn.TransformerConv(6, 4, heads=2, edge_dim=3).double()
    out = reorder(edge_index, method=method)
    result = conv(x[out.permutation], out.edge_index, edge_attr[out.edge_permutation])
    torch.testing.assert_close(result[out.inverse], conv(x, edge_index, edge_attr), rtol=0, atol=1e-13)
    assert not torch.equal(out.permutation, torch.arange(144))


def test_rcm_narrows_a_mesh():
    edge_index = shuffled_mesh()
    assert bandwidth(edge_index) > 100
    assert bandwidth(reorder(edge_index).edge_index) <= 25  # twice the side and one, for eight neighbours


def test_rcm_takes_linear_time_at_a_hub():
    """SciPy alone needs the square of its number of neighbours: 14 s for 200 000."""
    hub = torch.stack([torch.zeros(99_999, dtype=torch.int64), torch.arange(1, 100_000)])
    edge_index = torch.cat([hub, torch.randint(100_000, (2, 200_000))], 1)
    start = time.perf_counter()
    reorder(edge_index)
    assert time.perf_counter() - start < 2


def test_metis_puts_communities_together():
    pytest.importorskip("pymetis")
    community = torch.randperm(2400) % 4
    members = torch.stack([(community == number).nonzero().flatten() for number in range(4)])
    inside = members.gather(1, torch.randint(600, (4, 12_000))).view(4, 2, -1).transpose(0, 1).reshape(2, -1)
    order = reorder(inside, 2400, "metis", num_parts=4).permutation
    assert (community[order].diff() != 0).sum() == 3
    parts = reordering.partition(reordering.undirected(inside, 2400), 4)
    assert [len(set(community[parts == part].tolist())) for part in range(4)] == [1] * 4


def test_metis_has_parts_of_a_thousand_nodes_each_in_rcm_order(monkeypatch):
    pytest.importorskip("pymetis")
    asked = []

    def partition(adjacency, num_parts):
        asked.append(num_parts)
        return np.arange(adjacency.shape[0]) % 2

    monkeypatch.setattr(reordering, "partition", partition)
    edge_index = shuffled_mesh(45)
    rcm, metis = (reorder(edge_index, method=method).permutation for method in ("rcm", "metis"))
    assert asked == [3]
    assert torch.equal(metis, torch.cat([rcm[rcm % 2 == part] for part in (0, 1)]))


def test_degrees_fall():
    edge_index = torch.randint(50, (2, 300))
    order = reorder(edge_index, 60, "degree")
    degree = edge_index.flatten().bincount(minlength=60)[order.permutation]
    assert (degree.diff() <= 0).all()
    assert degree[0] > degree[49]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.int64, torch.int64), (torch.int32, torch.int32), (torch.uint8, torch.int32)],
)
def test_types_of_indices(dtype, expected):
    """Node 3 may get a number that does not fit into eight bits."""
    out = reorder(PATH.to(dtype), 300, "degree")
    assert out.edge_index.dtype == expected
    assert torch.equal(out.edge_index.long(), reorder(PATH, 300, "degree").edge_index)
    assert reorder(PATH.to(dtype), 300).edge_index.max() == reorder(PATH, 300).edge_index.max()


def test_an_edge_index_stays_one():
    edges = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    out = reorder(EdgeIndex(edges, sparse_size=(5, 5), sort_order="row", is_undirected=True)).edge_index
    assert isinstance(out, EdgeIndex)
    assert (out.sparse_size(), out.sort_order, out.is_undirected) == ((5, 5), "col", True)
    out.validate()
    assert type(reorder(edges).edge_index) is torch.Tensor
    assert reorder(EdgeIndex(edges)).edge_index.sparse_size() == (3, 3)


def test_a_sparse_adjacency_gives_a_list_of_edges():
    adjacency = torch.sparse_coo_tensor(PATH.flip(0), torch.ones(3), (5, 5)).coalesce().to_sparse_csr()
    out, edges = reorder(adjacency), gattn.SparseGraph(adjacency).edge_index
    assert len(out.permutation) == 5
    assert torch.equal(out.edge_index, out.inverse[edges[:, out.edge_permutation]])


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((PATH.float(),), {}, ValueError, "must be an integer type"),
        ((PATH.t(),), {}, ValueError, r"shape \[2, E\]"),
        (("edges",), {}, TypeError, "a graph must be"),
        ((gattn.CompleteGraph(3),), {}, TypeError, "a graph already"),
        ((PATH, 3), {}, IndexError, "index 3, but there are 3"),
        ((PATH - 1,), {}, IndexError, "negative"),
        ((PATH - 9,), {}, IndexError, "negative"),
        ((PATH, 4.0), {}, TypeError, "num_nodes must be"),
        ((PATH, -1), {}, ValueError, "num_nodes=-1"),
        ((torch.zeros(2, 3).to_sparse(),), {}, ValueError, "2 targets, but 3"),
        ((PATH, 4, "RCM"), {}, ValueError, "method must be 'rcm', 'metis' or 'degree'; got 'RCM'"),
        ((PATH, 4), {"num_parts": 2}, ValueError, "num_parts is for method='metis'"),
        ((PATH, 4, "metis"), {"num_parts": 0}, ValueError, "at least 1"),
        ((PATH, 4, "metis"), {"num_parts": 5}, ValueError, "must not exceed the 4 nodes"),
        ((PATH, 4, "metis"), {"num_parts": 2.0}, TypeError, "num_parts must be an integer"),
    ],
)
def test_mistakes(arguments, options, error, message):
    with pytest.raises(error, match=message):
        reorder(*arguments, **options)


def test_without_pymetis(monkeypatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    assert reorder(PATH, 4).permutation.tolist() == [2, 1, 3, 0]
    with pytest.raises(ImportError, match="pip install pymetis"):
        reorder(PATH, 4, "metis")
