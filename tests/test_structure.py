"""Structure as features: shortest paths, random walks, degrees and eigenvectors, graph by graph."""

import copy

import numpy as np
import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData, InMemoryDataset
from torch_geometric.data.hypergraph_data import HyperGraphData
from torch_geometric.loader import DataLoader
from torch_geometric.transforms import Compose, ToSparseTensor
from torch_geometric.utils import to_undirected

import gattn
from gattn import structure
from gattn.errors import InputError, InputTypeError
from gattn.transforms import Degrees, LaplacianEigenvectors, RandomWalkPairs, ShortestPathBuckets
from gattn.transforms import structure as transforms


def graph(edges, num_nodes):
    edge_index = torch.tensor(edges, dtype=torch.int64).view(-1, 2).t().contiguous()
    return Data(edge_index=edge_index, num_nodes=num_nodes)


def undirected(edges, num_nodes):
    return graph(edges + [edge[::-1] for edge in edges], num_nodes)


def random_graph(num_nodes, num_edges, seed):
    """A directed graph with self-loops and repeated edges."""
    generator = torch.Generator().manual_seed(seed)
    return Data(edge_index=torch.randint(num_nodes, (2, num_edges), generator=generator), num_nodes=num_nodes)


PATH = [(0, 1), (1, 2), (2, 3), (3, 4)]
GRAPHS = {
    "no nodes": graph([], 0),
    "one node": graph([], 1),
    "one node and a self-loop": graph([(0, 0)], 1),
    "no edges": graph([], 3),
    "one edge": undirected([(0, 1)], 2),
    "path": undirected(PATH, 5),
    "directed path": graph(PATH, 5),
    "directed cycle": graph([*PATH, (4, 0)], 5),
    "disconnected": undirected([(0, 2), (2, 4), (1, 3)], 6),
    "self-loops": undirected([(0, 1), (1, 2), (1, 1)], 3),
    "repeated edges": graph([(0, 1), (0, 1), (1, 0), (1, 2), (0, 2), (2, 1)], 3),
    "one way into a component": graph([(0, 1), (1, 0), (1, 2), (2, 3), (3, 2)], 4),
    "random": random_graph(9, 20, seed=0),
    "denser": random_graph(9, 40, seed=1),
    "undirected": Data(edge_index=to_undirected(random_graph(12, 20, seed=2).edge_index), num_nodes=12),
}
TRANSFORMS = {
    "buckets": ShortestPathBuckets(3),
    "undirected buckets": ShortestPathBuckets(2, directed=False),
    "walks": RandomWalkPairs(4),
    "degrees": Degrees(2),
    "eigenvectors": LaplacianEigenvectors(4, eigenvalues=True),
}

every_graph = pytest.mark.parametrize("data", GRAPHS.values(), ids=GRAPHS)
every_transform = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)


def adjacency(data):
    """The number of edges from each node (row) to each other (column)."""
    counts = np.zeros((data.num_nodes, data.num_nodes))
    np.add.at(counts, tuple(data.edge_index.numpy()), 1)
    return counts


def assert_same(actual, expected):
    """Two data objects with the same attributes; those that are computed by sums may differ in the last bits."""
    assert set(actual.keys()) == set(expected.keys())
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert actual[name].dtype == value.dtype, name
            torch.testing.assert_close(actual[name], value, rtol=0, atol=1e-6 if name == "eigenvalues" else 0)
        else:
            assert actual[name] == value, name


class TestShortestPathBuckets:
    @every_graph
    @pytest.mark.parametrize("directed", [True, False])
    @pytest.mark.parametrize("at_once", [2**22, 7])
    def test_paths_are_those_of_powers_of_the_adjacency(self, data, directed, at_once, monkeypatch):
        monkeypatch.setattr(transforms, "_AT_ONCE", at_once)
        size, cutoff = data.num_nodes, 2
        steps = adjacency(data).T  # from each target back to its sources
        steps = steps if directed else steps + steps.T
        expected, reached = np.full((size, size), cutoff + 2), np.eye(size)
        for hops in range(size):
            is_new = (reached > 0) & (expected == cutoff + 2)
            expected[is_new] = min(hops, cutoff + 1)
            reached = np.minimum(reached @ steps, 1)
        transform = ShortestPathBuckets(cutoff, directed=directed)
        out = transform(data)
        assert out.pair_buckets.dtype == torch.uint8
        assert out.pair_buckets.shape == (size**2,)
        (matrix,) = transform.matrices(out)
        assert matrix.tolist() == expected.tolist()
        assert transform.num_buckets == 5 > max([0, *out.pair_buckets.tolist()])

    @every_graph
    @pytest.mark.parametrize("directed", [True, False])
    def test_paths_lead_from_sources_to_targets(self, data, directed):
        size, cutoff, ends = data.num_nodes, 2, data.edge_index.t().tolist()
        out = ShortestPathBuckets(cutoff, directed=directed, paths=True)(data)
        buckets = ShortestPathBuckets(cutoff, directed=directed)(data).pair_buckets
        assert torch.equal(out.pair_buckets, buckets)
        hops = ShortestPathBuckets(size + 1, directed=directed)(data).pair_buckets.view(size, size).tolist()
        assert out.pair_paths.shape == (size**2, cutoff)
        assert out.pair_paths.dtype == torch.int32
        for pair, path in enumerate(out.pair_paths.tolist()):
            target, source = divmod(pair, size)
            length = hops[target][source] if hops[target][source] <= size else 0
            edges = [edge for edge in path if edge >= 0]
            assert path == edges + [-1] * (cutoff - len(edges))
            assert len(edges) == min(length, cutoff)
            node = target
            for edge in edges:  # from the target on
                start, end = ends[edge] if directed or ends[edge][1] == node else ends[edge][::-1]
                assert end == node
                node = start
            assert hops[node][source] == length - len(edges) or not length  # what remains is as short as it can be

    def test_paths_of_a_batch(self):
        transform = ShortestPathBuckets(3, paths=True)
        graphs = [GRAPHS[name] for name in ("path", "no edges", "random", "no nodes", "directed cycle")]
        singles = [transform(data) for data in graphs]
        for batch in (Batch.from_data_list(singles), transform(Batch.from_data_list(graphs))):
            assert torch.equal(batch.pair_paths, torch.cat([single.pair_paths for single in singles]))
            alone = zip(batch.to_data_list(), singles, strict=True)
            assert all(torch.equal(x.pair_paths, y.pair_paths) for x, y in alone)
        assert repr(transform) == "ShortestPathBuckets(3, directed=True, paths=True)"

    def test_rows_are_targets(self):
        (matrix,) = ShortestPathBuckets.matrices(ShortestPathBuckets(9)(graph([(0, 1), (1, 2)], 3)))
        assert matrix[2].tolist() == [2, 1, 0]
        assert matrix[0].tolist() == [0, 11, 11]

    @pytest.mark.parametrize(("cutoff", "dtype"), [(253, torch.uint8), (254, torch.int16), (32765, torch.int16)])
    def test_the_smallest_type_that_fits(self, cutoff, dtype):
        size = 258
        data = undirected([(node, node + 1) for node in range(size - 2)], size)  # and an isolated node
        transform = ShortestPathBuckets(cutoff)
        (matrix,) = transform.matrices(transform(data))
        assert matrix.dtype == dtype
        assert matrix[0].tolist() == [min(node, cutoff + 1) for node in range(size - 1)] + [cutoff + 2]

    def test_matrices_of_a_batch(self):
        transform = ShortestPathBuckets(3)
        singles = [transform(data) for data in GRAPHS.values()]
        for batch in (Batch.from_data_list(singles), transform(Batch.from_data_list(list(GRAPHS.values())))):
            matrices = transform.matrices(batch)
            assert [matrix.size(0) for matrix in matrices] == [data.num_nodes for data in GRAPHS.values()]
            for matrix, single in zip(matrices, singles, strict=True):
                assert torch.equal(matrix, transform.matrices(single)[0])
                assert matrix.numel() == 0 or matrix.untyped_storage().data_ptr() == batch.pair_buckets.data_ptr()

    def test_matrices_are_in_the_order_of_a_complete_graph(self):
        data = ShortestPathBuckets(3)(Batch.from_data_list([GRAPHS["directed path"], GRAPHS["random"]]))
        source, target = gattn.CompleteGraph.packed(ptr=data.ptr).edge_index
        dense = torch.block_diag(*ShortestPathBuckets.matrices(data))
        assert torch.equal(dense[target, source], data.pair_buckets)

    def test_only_what_has_buckets_has_matrices(self):
        with pytest.raises(InputError, match="no pair_buckets: apply ShortestPathBuckets"):
            ShortestPathBuckets.matrices(GRAPHS["path"])
        data = ShortestPathBuckets(3)(GRAPHS["path"])
        data.num_nodes = 6
        with pytest.raises(InputError, match=r"25 entries, but graphs of \[6\] nodes have 36 pairs"):
            ShortestPathBuckets.matrices(data)
        with pytest.raises(InputTypeError, match=r"ShortestPathBuckets.matrices takes a Data .* got list"):
            ShortestPathBuckets.matrices([data])


class TestRandomWalkPairs:
    @every_graph
    def test_probabilities_are_powers_of_the_walk(self, data):
        size, num_steps = data.num_nodes, 5
        step = adjacency(data)
        step = step / np.maximum(step.sum(1, keepdims=True), 1)
        expected = [np.linalg.matrix_power(step, k) for k in range(num_steps)]
        out = RandomWalkPairs(num_steps)(data)
        assert out.pair_walks.shape == (size**2, num_steps)
        assert out.pair_walks.dtype == out.node_walks.dtype == torch.float32
        walks = out.pair_walks.view(size, size, num_steps)
        for k in range(num_steps):  # float32 keeps numbers up to 1 with an error of at most 2⁻²⁵
            torch.testing.assert_close(walks[..., k], torch.tensor(expected[k]).float(), rtol=0, atol=2**-24)
        assert torch.equal(out.node_walks, walks.diagonal().t())
        assert torch.equal(out.pair_index, gattn.CompleteGraph.packed([size]).edge_index)

    def test_walks_start_at_the_target_of_a_pair(self):
        data = RandomWalkPairs(3)(graph([(0, 1), (0, 2), (1, 2)], 3))
        features = dict(zip(map(tuple, data.pair_index.t().tolist()), data.pair_walks.tolist(), strict=True))
        assert features[2, 0] == [0.0, 0.5, 0.5]  # source 2, target 0: from 0 to 2, at once or through 1
        assert features[0, 2] == [0.0, 0.0, 0.0]

    def test_an_isolated_node_stays_where_it_is(self):
        data = RandomWalkPairs(3)(undirected([(0, 1)], 3))
        assert data.node_walks.tolist() == [[1, 0, 1], [1, 0, 1], [1, 0, 0]]
        assert data.pair_walks.view(3, 3, 3)[2, :, 1:].abs().sum() == 0

    def test_probabilities_of_closed_walks_are_gattn_s(self):
        data = GRAPHS["undirected"]
        expected = gattn.nn.GraphPositionalEncoding("random_walk", 4, 8).compute(data.edge_index, 12)
        torch.testing.assert_close(RandomWalkPairs(5)(data).node_walks[:, 1:], expected)

    def test_a_batch_has_the_pairs_of_a_packed_graph(self):
        batch = Batch.from_data_list([RandomWalkPairs(2)(data) for data in GRAPHS.values()])
        assert torch.equal(batch.pair_index, gattn.CompleteGraph.packed(ptr=batch.ptr).edge_index)
        bias = torch.randn(batch.pair_index.size(1), 2)
        query, key, value = torch.randn(3, batch.num_nodes, 2, 4)
        out = gattn.attend(query, key, value, batch.pair_index, bias=bias)
        assert out.shape == value.shape


class TestDegrees:
    @every_graph
    def test_they_are_counted(self, data):
        counts = adjacency(data)
        out = Degrees(2)(data)
        assert out.in_degree.dtype == out.out_degree.dtype == torch.int64
        assert out.in_degree.tolist() == np.minimum(counts.sum(0), 2).tolist()
        assert out.out_degree.tolist() == np.minimum(counts.sum(1), 2).tolist()
        assert Degrees(2).num_degrees == 3

    def test_ends_by_hand(self):
        out = Degrees(5)(graph([(1, 0), (2, 0), (0, 0)], 3))
        assert out.in_degree.tolist() == [3, 0, 0]
        assert out.out_degree.tolist() == [1, 1, 1]


def laplacian(data):
    """In float64, of the graph in which each edge has both directions."""
    counts = adjacency(data)
    counts = counts + counts.T
    np.fill_diagonal(counts, 0)
    degrees = counts.sum(1)
    scale = np.where(degrees > 0, 1 / np.sqrt(np.maximum(degrees, 1)), 0)
    return np.eye(len(counts)) - scale[:, None] * counts * scale


class TestLaplacianEigenvectors:
    @every_graph
    @pytest.mark.parametrize("largest", [300, 4])
    def test_they_are_eigenvectors(self, data, largest, monkeypatch):
        solve = structure.laplacian_eigenvectors
        monkeypatch.setattr(
            transforms, "laplacian_eigenvectors", lambda *args, **kwargs: solve(*args, **kwargs, largest_dense=largest)
        )
        k, count = 4, min(max(data.num_nodes - 1, 0), 4)
        out = LaplacianEigenvectors(k, eigenvalues=True)(data)
        assert out.eigenvectors.shape == (data.num_nodes, k)
        assert out.eigenvalues.shape == (1, k)
        assert out.eigenvectors.dtype == out.eigenvalues.dtype == torch.float32
        assert not out.eigenvectors[:, count:].any()
        assert not out.eigenvalues[:, count:].any()
        vectors, matrix = out.eigenvectors[:, :count].double().numpy(), laplacian(data)
        values = np.linalg.eigvalsh(matrix)[1 : count + 1]
        np.testing.assert_allclose(out.eigenvalues[0, :count], values, rtol=0, atol=1e-5)
        np.testing.assert_allclose(matrix @ vectors, vectors * values, rtol=0, atol=1e-5)
        np.testing.assert_allclose(vectors.T @ vectors, np.eye(count), rtol=0, atol=1e-5)
        for vector in vectors.T:
            assert vector[np.abs(vector) >= 0.999 * np.abs(vector).max()][0] > 0

    def test_they_are_those_of_the_layer(self):
        data, encoding = GRAPHS["undirected"], gattn.nn.GraphPositionalEncoding("laplacian", 3, 8)
        expected = encoding.compute(data.edge_index, 12, torch.zeros(12, dtype=torch.int64))
        actual = LaplacianEigenvectors(3)(data).eigenvectors
        signs = (expected * actual).sum(0).sign()
        torch.testing.assert_close(actual, expected * signs, rtol=0, atol=1e-6)

    def test_ties_go_to_the_first_node(self):
        """Both ends of a path of four are the largest, and differ in sign at most in their last bits."""
        data = undirected([(0, 1), (1, 2), (2, 3)], 4)
        vector = LaplacianEigenvectors(1)(data).eigenvectors[:, 0]
        torch.testing.assert_close(vector, torch.tensor([1, 0.5**0.5, -(0.5**0.5), -1]) / 3**0.5)
        swapped = vector * torch.tensor([-1 + 1e-6, -1, -1, -1])
        again = transforms._with_largest_positive(swapped.unsqueeze(1), torch.zeros(4, dtype=torch.int64), 1)
        assert again[0, 0] > 0 > again[3, 0]

    @pytest.mark.parametrize("num_nodes", [12, 400])
    def test_only_random_signs_are_random(self, num_nodes):
        """400 nodes are solved as a sparse matrix, by iteration from a random vector."""
        data = random_graph(num_nodes, 4 * num_nodes, seed=3)
        before = torch.get_rng_state()
        first, second = (LaplacianEigenvectors(2)(data).eigenvectors for _ in range(2))
        assert torch.equal(first, second)
        assert torch.equal(torch.get_rng_state(), before)
        assert np.isclose(first.norm(dim=0), 1, atol=1e-5).all()

        transform, seen = LaplacianEigenvectors(2, sign="random"), set()
        for _ in range(40):
            vectors = transform(data).eigenvectors
            signs = (vectors * first).sum(0).sign()
            assert torch.equal(vectors, first * signs)
            seen.add(tuple(signs.tolist()))
        assert seen == {(1, 1), (1, -1), (-1, 1), (-1, -1)}

    @pytest.mark.parametrize("num_leaves", [3, 8, 13])
    def test_shared_eigenvalues_have_the_same_vectors_everywhere(self, num_leaves):
        """A solver may choose any basis for them, and would, by where a matrix of odd size begins in memory."""
        middle = list(range(1, num_leaves + 1))
        spider = undirected(
            [(0, node) for node in middle] + [(node, node + num_leaves) for node in middle], 2 * num_leaves + 1
        )
        transform = LaplacianEigenvectors(6)
        for data in transform(Batch.from_data_list([spider] * 4)).to_data_list():
            assert torch.equal(data.eigenvectors, transform(spider).eigenvectors)

    def test_a_directed_graph_leaves_others_as_they_are(self):
        """`compute` takes directed graphs as PyG does, and those of the same size beside them as undirected."""
        encoding, path = gattn.nn.GraphPositionalEncoding("laplacian", 3, 8), GRAPHS["path"]
        batch = Batch.from_data_list([path, GRAPHS["directed path"]])
        both = encoding.compute(batch.edge_index, 10, batch.batch)[:5]
        single = LaplacianEigenvectors(3)(path).eigenvectors
        torch.testing.assert_close(both * (both * single).sum(0).sign(), single, rtol=0, atol=1e-6)

    def test_threads_are_as_before(self):
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(3)
            LaplacianEigenvectors(2)(GRAPHS["random"])
            assert torch.get_num_threads() == 3
        finally:
            torch.set_num_threads(threads)


class TestBatches:
    @every_transform
    def test_a_batch_is_that_of_its_graphs(self, transform):
        graphs = list(GRAPHS.values())
        for data in graphs:
            data.y = torch.randn(1, 2)
        batch = Batch.from_data_list(graphs)
        before = copy.copy(batch)
        out, expected = transform(batch), [transform(data) for data in graphs]
        assert_same(out, Batch.from_data_list(expected))
        for actual, single in zip(out.to_data_list(), expected, strict=True):
            assert_same(actual, single)
        assert_same(batch, before)
        assert_same(batch[6], graphs[6])  # neither the batch nor what takes it apart has changed

    @every_transform
    def test_large_graphs_in_a_batch(self, transform):
        graphs = [random_graph(320, 900, seed) for seed in range(2)] + [GRAPHS["random"]]
        out = transform(Batch.from_data_list(graphs))
        assert_same(out, Batch.from_data_list([transform(data) for data in graphs]))

    @every_transform
    def test_what_a_loader_gives(self, transform):
        graphs = [GRAPHS["random"], GRAPHS["path"], GRAPHS["no edges"]]
        (batch,) = DataLoader([transform(data) for data in graphs], batch_size=3)
        assert_same(batch, transform(Batch.from_data_list(graphs)))

    @every_transform
    def test_a_batch_without_its_history(self, transform):
        """`Data` with the vector `batch`, whose edges lie in any order."""
        batch = Batch.from_data_list([GRAPHS["random"], GRAPHS["path"], GRAPHS["denser"]])
        order = torch.randperm(batch.num_edges, generator=torch.Generator().manual_seed(0))
        data = Data(edge_index=batch.edge_index[:, order], batch=batch.batch, num_nodes=batch.num_nodes)
        out, expected = transform(data), transform(batch)
        for name in set(out.keys()) - {"edge_index", "num_nodes"}:
            torch.testing.assert_close(out[name], expected[name], rtol=0, atol=1e-6)

    def test_as_pre_transform(self, tmp_path):
        class Graphs(InMemoryDataset):
            processed_file_names = "data.pt"

            def process(self):
                self.save([self.pre_transform(data) for data in GRAPHS.values()], self.processed_paths[0])

        transform = Compose(list(TRANSFORMS.values()))
        dataset = Graphs(str(tmp_path), pre_transform=transform, log=False)
        dataset.load(dataset.processed_paths[0])
        assert len(dataset) == len(GRAPHS)
        for data, original in zip(dataset, GRAPHS.values(), strict=True):
            assert_same(data, transform(original))


class TestInputs:
    @every_transform
    def test_data_stay_as_they_are(self, transform):
        data = graph(PATH, 5)
        data.x = torch.randn(5, 2)
        expected = transform(data)
        assert set(data.keys()) == {"edge_index", "num_nodes", "x"}
        data.edge_index = EdgeIndex(data.edge_index, sparse_size=(5, 5))
        out = transform(data)
        for name in set(expected.keys()) - {"edge_index"}:
            assert torch.equal(torch.as_tensor(out[name]), torch.as_tensor(expected[name]))
            assert type(out[name]) is type(expected[name])

    @every_transform
    @pytest.mark.parametrize(
        ("make", "error", "message"),
        [
            (lambda: torch.zeros(2, 3), InputTypeError, r"takes a Data or a batch of them; got Tensor"),
            (HeteroData, InputTypeError, r"got HeteroData. .*to_homogeneous"),
            (
                lambda: HyperGraphData(x=torch.ones(3, 1), edge_index=torch.tensor([[0], [0]])),
                InputError,
                "hypergraph",
            ),
            (lambda: Data(x=torch.ones(3, 1)), InputError, r"needs edge_index; these data have x\. A graph without"),
            (Data, InputError, r"needs edge_index; these data have nothing\."),
            (lambda: ToSparseTensor()(graph(PATH, 5)), InputError, r"needs edge_index; .* ToSparseTensor comes after"),
            (lambda: Data(edge_index=torch.zeros(3, 2).long(), num_nodes=2), ValueError, r"\[2, E\]"),
            (lambda: graph([(0, 3)], 3), IndexError, "target index 3"),
            (lambda: graph([(-1, 0)], 3), IndexError, "negative source index -1"),
            (lambda: with_batch([0, 1, 0]), InputError, "batch must be sorted"),
            (lambda: with_batch([0, 0]), InputError, r"batch must hold the graph of each node, integers \[3\]"),
            (lambda: with_batch([0.0, 0.0, 1.0]), InputError, "batch must hold the graph of each node"),
            (lambda: with_batch([0, 1, 1]), InputError, "an edge joins nodes of two graphs"),
        ],
    )
    def test_wrong_data(self, transform, make, error, message):
        with pytest.raises(error, match=message):
            transform(make())

    @pytest.mark.parametrize(
        ("make", "error", "message"),
        [
            (lambda: ShortestPathBuckets(0), InputError, "cutoff must be at least 1; got 0"),
            (lambda: ShortestPathBuckets(32766), InputError, "cutoff must be at most 32765, .* got 32766"),
            (lambda: ShortestPathBuckets(2.0), InputTypeError, "cutoff must be an integer"),
            (lambda: ShortestPathBuckets(2, directed="no"), InputTypeError, "directed must be True or False"),
            (lambda: ShortestPathBuckets(2, paths="no"), InputTypeError, "paths must be True or False"),
            (lambda: RandomWalkPairs(0), InputError, "num_steps must be at least 1"),
            (lambda: Degrees(-1), InputError, "max_degree must be at least 1"),
            (lambda: LaplacianEigenvectors(0), InputError, "k must be at least 1"),
            (lambda: LaplacianEigenvectors(2, sign="sum"), InputError, "'largest' or 'random'; got 'sum'"),
            (lambda: LaplacianEigenvectors(2, eigenvalues=2), InputTypeError, "eigenvalues must be True or False"),
        ],
    )
    def test_wrong_options(self, make, error, message):
        with pytest.raises(error, match=message):
            make()

    def test_they_are_printed(self):
        assert [repr(transform) for transform in TRANSFORMS.values()] == [
            "ShortestPathBuckets(3, directed=True)",
            "ShortestPathBuckets(2, directed=False)",
            "RandomWalkPairs(4)",
            "Degrees(2)",
            "LaplacianEigenvectors(4, sign='largest', eigenvalues=True)",
        ]


def with_batch(batch):
    data = graph([(0, 1)], 3)
    data.batch = torch.tensor(batch)
    return data
