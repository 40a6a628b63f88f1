"""Transforms of PyG's data objects."""

import numpy as np
import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.data.hypergraph_data import HyperGraphData
from torch_geometric.transforms import RandomLinkSplit, ToSparseTensor
from torch_geometric.typing import WITH_TORCH_SPARSE, SparseTensor

import gattn
from gattn.transforms import Degrees, RandomWalkPairs, Reorder, ShortestPathBuckets, structure

NODES, EDGES = 9, 16
EDGE = torch.tensor([[0], [1]])


def homogeneous(seed=0):
    """A graph in which each attribute tells which node or edge its row belongs to."""
    torch.manual_seed(seed)
    edge_index, nodes = torch.randint(NODES, (2, EDGES)), torch.arange(NODES)
    sparse = torch.eye(NODES).to_sparse_csr()
    data = Data(x=nodes.view(-1, 1).double(), edge_index=edge_index, y=nodes, train_mask=nodes < 3, bags=sparse)
    data.names, data.array, data.coo = [f"node {node}" for node in range(NODES)], nodes.numpy(), sparse.to_sparse_coo()
    data.edge_attr = edge_index.t().clone()
    data.edge_names = [f"{source} to {target}" for source, target in edge_index.t().tolist()]
    data.parent_index = (nodes + 1) % NODES  # per node
    data.edge_label_index, data.edge_label = torch.randint(NODES, (2, NODES)), nodes  # as many as nodes, by chance
    data.neg_label_index, data.neg_label = torch.randint(NODES, (2, EDGES)), torch.arange(EDGES)
    data.face, data.root_index, data.graph_y = torch.tensor([[0], [4], [8]]), torch.tensor([5]), torch.ones(1)
    data.refractive_index, data.time = torch.tensor([1.5]), 3.5
    return data


def heterogeneous():
    data = HeteroData()
    for name, size in (("paper", 8), ("author", 5)):
        data[name].x, data[name].y = torch.randn(size, 2), torch.arange(size)
        data[name].names = [f"{name} {node}" for node in range(size)]
    data["venue"].num_nodes = 3
    for source, target, sizes in (("author", "paper", (5, 8)), ("paper", "paper", (8, 8)), ("paper", "venue", (8, 3))):
        edge_index = torch.stack([torch.randint(size, (12,)) for size in sizes])
        store = data[source, "to", target]
        store.edge_index, store.edge_attr = edge_index, edge_index.t().clone()
        store.edge_label_index, store.edge_label = edge_index[:, :4].clone(), torch.arange(4)
    data.title = "a graph"
    return data


def assert_same(first, second):
    """Whether two data objects hold the same."""
    assert first.to_dict().keys() == second.to_dict().keys()
    for ours, theirs in zip(first.stores, second.stores, strict=True):
        assert list(ours) == list(theirs)
        for name, value in ours.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == theirs[name].dtype
                assert value.layout == theirs[name].layout
                value, other = (x.to_dense() for x in (value, theirs[name]))
                assert torch.equal(value, other), name
            elif isinstance(value, np.ndarray):
                assert np.array_equal(value, theirs[name])
            else:
                assert value == theirs[name], name


@pytest.mark.parametrize("method", ["rcm", "degree"])
def test_everything_is_carried(method):
    data = homogeneous()
    out = Reorder(method)(data)
    assert_same(data, homogeneous())
    old = out.node_permutation
    assert old.sort().values.tolist() == list(range(NODES)) != old.tolist()
    for name in ("x", "y", "train_mask", "array"):
        assert out[name].tolist() == data[name][old.numpy() if name == "array" else old].tolist()
    assert out.names == [f"node {node}" for node in old.tolist()]
    for name in ("bags", "coo"):
        assert out[name].layout == data[name].layout
        assert torch.equal(out[name].to_dense(), torch.eye(NODES)[old])
    assert torch.equal(old[out.edge_index].t(), out.edge_attr)
    assert out.edge_names == [f"{source} to {target}" for source, target in out.edge_attr.tolist()]
    assert torch.equal(out.edge_attr, data.edge_attr[out.edge_permutation])
    assert torch.equal(old[out.parent_index], data.parent_index[old])
    for name in ("edge_label_index", "neg_label_index", "face", "root_index"):
        assert torch.equal(old[out[name]], data[name]), name
    for name in ("edge_label", "neg_label", "graph_y", "refractive_index", "time"):
        assert out[name] is data[name]


@pytest.mark.parametrize("make", [homogeneous, heterogeneous])
@pytest.mark.parametrize("method", ["rcm", "degree"])
def test_there_is_a_way_back(make, method):
    data = make()
    assert_same(Reorder.inverse(Reorder(method)(data)), data)
    twice = Reorder("degree")(Reorder(method)(data))
    assert_same(Reorder.inverse(twice), data)


def directed(size=11, edges=24):
    return Data(x=torch.randn(size, 6), edge_index=torch.randint(size, (2, edges)), edge_attr=torch.randn(edges, 3))


@pytest.mark.parametrize("make", [directed, lambda: directed(3, 9), lambda: directed(1, 1), lambda: directed(2, 0)])
@pytest.mark.parametrize("method", ["rcm", "degree"])
def test_pairs_are_those_of_the_new_nodes(method, make):
    """Also where there are as many edges as pairs. Paths of the same length may be others: edges are compared."""
    transforms = (ShortestPathBuckets(2, paths=True), RandomWalkPairs(3), Degrees(4))
    data = make()
    for transform in transforms:
        data = transform(data)
    assert {name for name in data.to_dict() if name.startswith("pair_")} == set(structure.PAIRS)
    out = Reorder(method)(data)
    fresh = out.clone()
    for transform in transforms:
        fresh = transform(fresh)
    for name in ("pair_buckets", "pair_index", "pair_walks", "node_walks", "in_degree"):
        torch.testing.assert_close(out[name], fresh[name], msg=name)

    def ends(data, nodes):
        edges = torch.nn.functional.pad(nodes[data.edge_index], (0, 1), value=-1)
        return edges.t()[data.pair_paths.long()].view(data.num_nodes, data.num_nodes, 2, 2)

    order = out.node_permutation
    assert torch.equal(ends(out, order), ends(data, torch.arange(data.num_nodes))[order][:, order])
    assert out.pair_paths.dtype == torch.int32
    assert_same(Reorder.inverse(out), data)


def test_graphormer_does_not_depend_on_the_order_of_nodes():
    data = ShortestPathBuckets(3, paths=True)(directed())
    model = gattn.models.Graphormer(6, 8, 2, cutoff=3, edge_dim=3, heads=2, num_layers=2).double().eval()
    data.x, data.edge_attr = data.x.double(), data.edge_attr.double()
    torch.nn.init.normal_(model.distances.weight)
    for method in ("rcm", "degree"):
        torch.testing.assert_close(model(Reorder(method)(data)), model(data), rtol=0, atol=1e-12)


def test_pairs_that_are_not_all_pairs_stay_together():
    data = RandomWalkPairs(2)(directed(4, 7))
    data.pair_index, data.pair_walks = data.pair_index[:, 3:10], data.pair_walks[3:10]  # as many as edges
    out = Reorder("degree")(data)
    assert torch.equal(out.node_permutation[out.pair_index], data.pair_index)
    assert out.pair_walks is data.pair_walks
    data.pair_buckets = torch.zeros(9)
    with pytest.raises(ValueError, match="pair_buckets has 9 rows, but 4 nodes have 16 pairs"):
        Reorder()(data)


def test_an_edge_index_stays_one():
    data = homogeneous()
    data.edge_index = EdgeIndex(data.edge_index, sparse_size=(NODES, NODES))
    out = Reorder()(data)
    back = Reorder.inverse(out)
    assert isinstance(out.edge_index, EdgeIndex)
    assert isinstance(back.edge_index, EdgeIndex)
    assert (out.edge_index.sort_order, back.edge_index.sort_order) == ("col", None)
    assert torch.equal(back.edge_index.as_tensor(), data.edge_index.as_tensor())


def test_outputs_go_back():
    data = homogeneous()
    conv = gattn.nn.GATConv(1, 3, edge_dim=2).double()
    expected = conv(data.x, data.edge_index, data.edge_attr.double())
    out = Reorder()(data)
    out.out = conv(out.x, out.edge_index, out.edge_attr.double())
    assert not torch.allclose(out.out, expected)
    torch.testing.assert_close(out.out[out.node_permutation.argsort()], expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(Reorder.inverse(out).out, expected, rtol=0, atol=1e-14)


def test_types_are_ordered_jointly():
    data = heterogeneous()
    out = Reorder()(data)
    graph = gattn.TypedGraph.from_hetero(data)
    joint = gattn.graphs.reorder(graph.edge_index, 16).permutation
    assert out["author"].node_permutation.tolist() == [node - 8 for node in joint.tolist() if 8 <= node < 13]
    for name in ("paper", "author"):
        assert torch.equal(out[name].y, out[name].node_permutation)
        assert out[name].names == [f"{name} {node}" for node in out[name].y.tolist()]
    assert out["venue"].num_nodes == len(out["venue"].node_permutation) == 3
    for source, way, target in data.edge_types:
        store = out[source, way, target]
        old = [out[name].node_permutation for name in (source, target)]
        for index, pairs in (
            (store.edge_index, store.edge_attr.t()),
            (store.edge_label_index, data[source, way, target].edge_label_index),
        ):
            assert torch.equal(torch.stack([old[0][index[0]], old[1][index[1]]]), pairs)
        assert (store.edge_index[1].diff() >= 0).all()
    assert out.title == "a graph"


def test_links_are_split_before_or_after():
    data = Data(x=torch.arange(NODES).view(-1, 1), edge_index=torch.randint(NODES, (2, 40)))
    train, _, test = RandomLinkSplit(num_val=0.1, num_test=0.2)(data)
    for part in (train, test):
        out = Reorder()(part)
        assert torch.equal(out.x.flatten()[out.edge_label_index], part.edge_label_index)
        assert torch.equal(out.edge_label, part.edge_label)


def test_nodes_without_features_are_counted_once():
    """The number of nodes is that of the largest index, which an isolated node may get in the new order."""
    data = Data(edge_index=torch.tensor([[1, 3], [3, 1]]), num_nodes=None, y=torch.arange(4))
    with pytest.warns(UserWarning, match="Unable to accurately infer 'num_nodes'"):
        out = Reorder("degree")(data)
    assert out.y.tolist() == out.node_permutation.tolist() == [1, 3, 0, 2]
    assert Reorder.inverse(out).y.tolist() == [0, 1, 2, 3]


def test_metis_and_its_parts():
    pytest.importorskip("pymetis")
    data = homogeneous()
    out = Reorder("metis", num_parts=3)(data)
    expected = gattn.graphs.reorder(data.edge_index, NODES, "metis", num_parts=3)
    assert torch.equal(out.node_permutation, expected.permutation)
    assert torch.equal(out.edge_index, expected.edge_index)


def test_it_is_a_dataset_s_transform():
    graphs = [homogeneous(seed) for seed in range(2)]
    for graph in graphs:
        del graph.bags, graph.time  # which PyG does not give back as they were
    batch = Batch.from_data_list([Reorder()(graph) for graph in graphs])
    assert_same(Reorder.inverse(batch.to_data_list()[1]), graphs[1])
    assert repr(Reorder("metis")) == "Reorder(method='metis')"


def wrong(**attributes):
    data = homogeneous()
    for name, value in attributes.items():
        data[name] = value
    return data


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (lambda: torch.zeros(2, 3), TypeError, "a Data or a HeteroData; got Tensor"),
        (lambda: Batch.from_data_list([homogeneous()]), ValueError, "'batch': reorder each graph before"),
        (lambda: wrong(batch_size=2), ValueError, "'batch_size'"),
        (lambda: HyperGraphData(x=torch.ones(3, 1), edge_index=torch.tensor([[0], [0]])), ValueError, "hypergraph"),
        (
            lambda: ToSparseTensor(layout=torch.sparse_csr)(Data(edge_index=EDGE, num_nodes=2)),
            ValueError,
            "adj_t is a sparse matrix",
        ),
        (lambda: Data(x=torch.ones(3, 1)), TypeError, "got NoneType"),
        (lambda: wrong(tree_index=torch.tensor([0, -1])), IndexError, "tree_index holds numbers from -1 to 0"),
        (lambda: wrong(tree_index=torch.tensor([NODES])), IndexError, "there are 9 nodes"),
        (lambda: wrong(edge_index=torch.tensor([[NODES], [0]])), IndexError, "source index 9"),
    ],
)
def test_mistakes(data, error, message):
    with pytest.raises(error, match=message):
        Reorder()(data())


@pytest.mark.skipif(not WITH_TORCH_SPARSE, reason="needs torch-sparse")
def test_sparse_tensors_are_refused():
    with pytest.raises(ValueError, match="x is a sparse matrix"):
        Reorder()(wrong(x=SparseTensor.eye(NODES)))


def test_only_reordered_data_can_go_back():
    with pytest.raises(ValueError, match="have not been reordered"):
        Reorder.inverse(homogeneous())
    with pytest.raises(ValueError, match="method must be"):
        Reorder("cuthill")(homogeneous())
