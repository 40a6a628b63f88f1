"""Functions that build graphs, compared with the plainest code that says what they mean."""

import itertools
import time

import numpy as np
import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.transforms import LineGraph
from torch_geometric.utils import coalesce, is_undirected, to_undirected

import gattn
from gattn import CompleteGraph, SparseGraph, TypedGraph
from gattn.graphs import (
    earlier_than,
    expander,
    grid,
    k_hop,
    knn,
    line_graph,
    proximity,
    radius,
    union,
    with_virtual_nodes,
    within_blocks,
)

NONE = torch.zeros(2, 0, dtype=torch.int64)
PATH = torch.tensor([[0, 1, 2], [1, 2, 3]])
BATCHES = {
    "sorted": [0, 0, 0, 0, 1, 1, 1, 3, 3, 3, 3, 3],  # graph 2 has no nodes
    "unsorted": [1, 0, 3, 3, 0, 1, 0, 3, 1, 0, 3, 3],
    "alone": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
}


def edges(graph):
    return [tuple(edge) for edge in graph.edge_index.t().tolist()]


def by_edge(graph, features):
    """{(source, target): feature}, which also asserts that no edge is listed twice."""
    assert len(set(edges(graph))) == graph.num_edges == len(features)
    return dict(zip(edges(graph), features.tolist(), strict=True))


def is_sorted(graph):
    return edges(graph) == sorted(edges(graph), key=lambda edge: edge[::-1])


def random_edges(num_nodes, num_edges, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(num_nodes, (2, num_edges), generator=generator)


def assert_same(result, expected):
    for one, other in zip(result, expected, strict=True):
        one, other = (x.edge_index if isinstance(x, SparseGraph) else x for x in (one, other))
        assert torch.equal(one, other)


def assert_graph_by_graph(build, batch):
    """`build(nodes, batch)` gives the edges that it gives for the nodes of each graph by themselves."""
    batch = torch.tensor(batch)
    everything = set(edges(build(torch.arange(len(batch)), batch)))
    expected = set()
    for graph in batch.unique():
        nodes = (batch == graph).nonzero().flatten()
        expected |= {tuple(nodes[list(edge)].tolist()) for edge in edges(build(nodes, None))}
    assert everything == expected


class TestNeighbours:
    def brute(self, x, k=None, r=None, y=None, batch=None, batch_y=None, loop=False):
        """The sources of each target, nearest first, then by number; the target itself in front of all."""
        targets = x if y is None else y
        batch = torch.zeros(len(x)) if batch is None else batch
        batch_y = torch.zeros(len(targets)) if batch_y is None else batch_y
        found = []
        for i, position in enumerate(targets):
            candidates = []
            for j, other in enumerate(x):
                graphs_differ = batch[j] != (batch[i] if y is None else batch_y[i])
                if graphs_differ or (y is None and i == j and not loop):
                    continue
                squares = int(((other - position) ** 2).sum())
                if r is None or squares <= r**2:
                    candidates.append((y is not None or i != j, squares, j))
            found += [(j, i) for *_, j in sorted(candidates)[:k]]
        return found

    @pytest.mark.parametrize("loop", [False, True])
    @pytest.mark.parametrize("k", [1, 2, 5, 40])
    @pytest.mark.parametrize("seed", range(4))
    def test_knn_with_many_ties(self, seed, k, loop):
        """On a small lattice, many nodes are at the same place, or as far away as others."""
        x = torch.randint(0, 3 + seed, (30, 2), generator=torch.Generator().manual_seed(seed))
        graph, distances = knn(x, k, loop=loop)
        assert edges(graph) == self.brute(x, k, loop=loop)
        source, target = graph.edge_index
        torch.testing.assert_close(distances, (x[source] - x[target]).float().norm(dim=1))

    def test_knn_of_nodes_at_one_place(self):
        for count in (1, 2, 7):
            graph, distances = knn(torch.ones(count, 3), 4)
            assert edges(graph) == self.brute(torch.ones(count, 3), 4)
            assert not distances.any()

    def test_knn_of_many_nodes_at_one_place_takes_little_time(self):
        x = torch.zeros(20_000, 2)
        start = time.perf_counter()
        graph, _ = knn(x, 3)
        assert time.perf_counter() - start < 5
        assert set(graph.edge_index[0].tolist()) == {0, 1, 2, 3}

    @pytest.mark.parametrize("most", [None, 1, 3])
    @pytest.mark.parametrize("loop", [False, True])
    @pytest.mark.parametrize("r", [0, 1, 2.5, 3**0.5])
    def test_radius(self, r, loop, most):
        x = torch.randint(0, 4, (30, 3), generator=torch.Generator().manual_seed(0))
        exact = 3 if r == 3**0.5 else r**2  # the square of the root is less than 3
        graph, distances = radius(x, r, loop=loop, max_num_neighbors=most)
        assert edges(graph) == self.brute(x, most, exact**0.5 + 1e-9, loop=loop)
        assert (distances <= r + 1e-6).all()

    @pytest.mark.parametrize("first", [1, 16])
    @pytest.mark.parametrize("r", [0, 0.3, 0.1 + 0.2, 2**0.5, 1e-200, 1e160])
    def test_the_nearest_within_a_radius_are_the_first_of_all_within_it(self, r, first, monkeypatch):
        """Sums of decimals round to different distances; many nodes are at one place, or as far away as others."""
        monkeypatch.setattr(proximity, "_AT_FIRST", first)
        steps = torch.randint(0, 3, (2, 60, 2), dtype=torch.float64)
        x = steps[0] * 0.1 + steps[1] * 0.3
        for y in (None, x + 0.0, x[:7]):
            source, target = radius(x, r, y=y)[0].edge_index
            place = torch.arange(len(target)) - torch.searchsorted(target, target)
            for most in (1, 3, 16, 17, 40, 100):
                found, lengths = radius(x, r, y=y, max_num_neighbors=most)
                assert torch.equal(found.edge_index, torch.stack([source, target])[:, place < most])
                assert (lengths <= r * (1 + 1e-9)).all()

    def test_a_limit_of_neighbours_limits_what_is_made(self, monkeypatch):
        """All of 2 000 nodes are within the radius, or hardly any; the limit may be above what there is."""
        asked = []

        class Tree(proximity.cKDTree):
            def query(self, x, k, **options):
                asked.append(len(x) * len(k))
                return super().query(x, k, **options)

            def sparse_distance_matrix(self, *args, **options):
                raise AssertionError("makes all pairs")

        monkeypatch.setattr(proximity, "cKDTree", Tree)
        x = torch.rand(2000, 3)
        for r, most, limit in ((2.0, 8, 10), (0.01, 8, 10), (0.01, 2000, 50)):
            asked.clear()
            radius(x, r, max_num_neighbors=most)
            assert sum(asked) <= limit * len(x)

    @pytest.mark.parametrize("seed", range(3))
    def test_bipartite(self, seed):
        generator = torch.Generator().manual_seed(seed)
        x, y = (torch.randint(0, 4, (n, 2), generator=generator) for n in (25, 9))
        batch, batch_y = (torch.randint(0, 4, (n,), generator=generator) for n in (25, 9))
        graph, _ = knn(x, 3, batch, y=y, batch_y=batch_y)
        assert edges(graph) == self.brute(x, 3, y=y, batch=batch, batch_y=batch_y)
        assert (graph.num_sources, graph.num_targets) == (25, 9)
        graph, _ = radius(x, 1, batch, y=y, batch_y=batch_y, max_num_neighbors=2)
        assert edges(graph) == self.brute(x, 2, 1, y=y, batch=batch, batch_y=batch_y)
        assert edges(knn(x, 3, y=x)[0]) == self.brute(x, 3, y=x)

    @pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
    def test_batches(self, batch):
        x = torch.randn(12, 3)
        assert_graph_by_graph(lambda nodes, batch: knn(x[nodes], 2, batch)[0], batch)
        assert_graph_by_graph(lambda nodes, batch: radius(x[nodes], 1.5, batch, loop=True)[0], batch)
        graph, _ = knn(x, 2, torch.tensor(batch))
        assert edges(graph) == sorted(edges(graph), key=lambda edge: edge[1])

    def test_one_dimension(self):
        x = torch.tensor([4.0, 0.0, 1.0])
        assert_same(knn(x, 1), knn(x.view(-1, 1), 1))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
    def test_types(self, dtype):
        assert knn(torch.tensor([[0.0], [1.0], [3.0]], dtype=dtype), 1)[1].dtype == dtype

    def test_gradients_reach_positions(self):
        x = torch.tensor([[0.0], [1.0], [3.0]], requires_grad=True)
        knn(x, 1)[1].sum().backward()
        assert x.grad.flatten().tolist() == [-2, 1, 1]

    def test_nodes_at_the_same_place_get_no_gradient(self):
        x = torch.zeros(3, 2, requires_grad=True)
        knn(x, 1, loop=True)[1].sum().backward()
        assert not x.grad.any()

    @pytest.mark.parametrize("num_nodes", [0, 1])
    def test_few_nodes(self, num_nodes):
        x = torch.zeros(num_nodes, 2)
        for build in (knn, radius):
            graph, distances = build(x, 1)
            assert (graph.edge_index.shape, distances.shape) == ((2, 0), (0,))
            assert build(x, 1, loop=True)[0].num_edges == num_nodes
            assert build(x, 1, y=torch.zeros(2, 2))[0].num_edges == 2 * num_nodes

    @pytest.mark.parametrize(
        ("build", "error", "message"),
        [
            (lambda x: knn(x, 0), ValueError, "k must be at least 1; got 0"),
            (lambda x: knn(x, 1.5), TypeError, "k must be an integer"),
            (lambda x: knn([[0.0]], 1), TypeError, "x must be a tensor of positions"),
            (lambda x: knn(x[0, 0], 1), ValueError, r"one position per row, \[N, D\]; got \[\]"),
            (lambda x: knn(x[:, :0], 1), ValueError, r"one position per row, \[N, D\]; got \[4, 0\]"),
            (lambda x: knn(x + float("nan"), 1), ValueError, "x must hold finite positions"),
            (lambda x: knn(x > 0, 1), ValueError, "x must hold real numbers"),
            (lambda x: knn(x, 1, torch.zeros(3, dtype=torch.int64)), ValueError, r"each row of x, integers \[4\]"),
            (lambda x: knn(x, 1, torch.zeros(4)), ValueError, "got .* of torch.float32"),
            (lambda x: knn(x, 1, torch.tensor([0, 0, 0, -1])), ValueError, "from 0; got -1"),
            (lambda x: knn(x, 1, [0, 0, 1, 1]), TypeError, "got list"),
            (lambda x: knn(x, 1, batch_y=torch.zeros(4)), ValueError, "batch_y is for the positions of other targets"),
            (lambda x: knn(x, 1, torch.zeros(4).long(), y=x), ValueError, "batch and batch_y go together"),
            (lambda x: knn(x, 1, y=x[:, :1]), ValueError, "the same number of coordinates"),
            (lambda x: knn(x, 1, y=x, loop=True), ValueError, "loop=True is for nodes that are both"),
            (lambda x: knn(x, 1, loop="yes"), TypeError, "loop must be True or False"),
            (lambda x: radius(x, -1), ValueError, "r must be finite and not negative"),
            (lambda x: radius(x, float("inf")), ValueError, "r must be finite"),
            (lambda x: radius(x, 1, max_num_neighbors=0), ValueError, "max_num_neighbors must be at least 1"),
        ],
    )
    def test_mistakes(self, build, error, message):
        with pytest.raises(error, match=message):
            build(torch.zeros(4, 2))


class TestKHop:
    @pytest.mark.parametrize("loop", [False, True])
    @pytest.mark.parametrize("num_hops", [1, 2, 3, 100])
    def test_lengths_of_shortest_paths(self, num_hops, loop):
        edge_index = random_edges(30, 45)  # with self-loops, repeated edges and isolated nodes
        distance = torch.full((32, 32), 10**6)
        distance[edge_index[0], edge_index[1]] = 1
        distance.fill_diagonal_(0)
        for middle in range(32):  # Floyd and Warshall
            distance = torch.minimum(distance, distance[:, middle, None] + distance[None, middle])
        expected = {
            (j, i): int(distance[j, i])
            for j, i in itertools.product(range(32), repeat=2)
            if distance[j, i] <= num_hops and (loop or i != j)
        }
        graph, hops = k_hop(edge_index, num_hops, 32, loop=loop)
        assert by_edge(graph, hops) == expected
        assert is_sorted(graph)
        assert (graph.num_sources, graph.num_targets, hops.dtype) == (32, 32, torch.int64)

    def test_many_walks_between_two_nodes_are_no_overflow(self):
        """256 walks of two steps from node 0 to node 1, which would be zero in eight bits."""
        middle = torch.arange(2, 258)
        there, back = torch.stack([torch.zeros_like(middle), middle]), torch.stack([middle, torch.ones_like(middle)])
        graph, hops = k_hop(torch.cat([there, back], 1), 2)
        assert by_edge(graph, hops)[0, 1] == 2

    def test_forms(self):
        expected = k_hop(PATH, 2, 4)
        adjacency = torch.sparse_coo_tensor(PATH.flip(0), torch.ones(3), (4, 4)).coalesce()
        for form in (
            PATH.int(),
            EdgeIndex(PATH, sparse_size=(4, 4)),
            adjacency,
            adjacency.to_sparse_csr(),
            SparseGraph(PATH, 4, 4),
            SparseGraph(PATH.flip(0), flow="target_to_source"),
        ):
            assert_same(k_hop(form, 2), expected)
        assert k_hop(CompleteGraph(4, causal=True), 9)[0].num_edges == 6
        assert_same(k_hop(EdgeIndex(PATH), 2, 6), k_hop(PATH, 2, 6))

    def test_sizes(self):
        assert k_hop(PATH, 1)[0].num_targets == 4
        assert k_hop(PATH, 1, 9)[0].num_targets == 9
        for size in (None, 0, 3):
            graph, hops = k_hop(NONE, 2, size, loop=True)
            assert graph.num_edges == graph.num_targets == len(hops) == (size or 0)

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ((PATH, 0), ValueError, "num_hops must be at least 1"),
            ((PATH, 2.0), TypeError, "num_hops must be an integer"),
            ((PATH, 2, 3), IndexError, "index 3, but there are 3"),
            ((PATH - 1, 2), IndexError, "negative"),
            ((PATH.float(), 2), ValueError, "must be an integer type"),
            ((PATH.t(), 2), ValueError, "transposed"),
            ((PATH, 2, -1), ValueError, "num_nodes=-1"),
            ((SparseGraph(PATH, 4, 4), 2, 5), ValueError, "4 sources, but 5 according to num_nodes"),
            ((SparseGraph(PATH, 4, 5), 2), ValueError, "same nodes; this graph has 5 sources and 4 targets"),
            (("edges", 2), TypeError, "a graph must be"),
        ],
    )
    def test_mistakes(self, arguments, error, message):
        with pytest.raises(error, match=message):
            k_hop(*arguments)


class TestLineGraph:
    @pytest.mark.parametrize("backtracking", [True, False])
    def test_directed(self, backtracking):
        edge_index = random_edges(9, 30)
        expected = {
            (a, b): v
            for (a, (u, v)), (b, (s, t)) in itertools.product(enumerate(edge_index.t().tolist()), repeat=2)
            if v == s and (backtracking or u != t)
        }
        graph, shared = line_graph(edge_index, backtracking=backtracking)
        assert by_edge(graph, shared) == expected
        assert is_sorted(graph)
        assert graph.num_targets == graph.num_sources == 30

    def test_undirected(self):
        pairs = [(u, v) for u, v in random_edges(9, 20).t().tolist() if u < v]
        pairs.append(pairs[0])  # parallel to another one
        edge_index = torch.tensor(pairs).t()
        edge_index = torch.cat([edge_index, edge_index.flip(0), torch.tensor([[3], [3]])], 1)
        expected = {
            (a, b): min({*pairs[a]} & {*pairs[b]})
            for a, b in itertools.permutations(range(len(pairs)), 2)
            if {*pairs[a]} & {*pairs[b]}
        }
        graph, shared = line_graph(edge_index, directed=False)
        assert by_edge(graph, shared) == expected
        assert is_sorted(graph)

    @pytest.mark.parametrize("directed", [True, False])
    def test_as_pyg(self, directed):
        edge_index = coalesce(random_edges(12, 30))
        edge_index = edge_index if directed else to_undirected(edge_index[:, edge_index[0] != edge_index[1]])
        data = LineGraph(force_directed=directed)(Data(edge_index=edge_index, num_nodes=12))
        graph, _ = line_graph(edge_index, directed=directed)
        assert set(edges(graph)) == {tuple(edge) for edge in data.edge_index.t().tolist()}
        assert graph.num_targets == data.num_nodes

    def test_a_batch_is_its_graphs(self):
        first, second = random_edges(5, 12), random_edges(5, 9, seed=1)
        together, _ = line_graph(torch.cat([first, second + 5], 1))
        expected = torch.cat([line_graph(first)[0].edge_index, line_graph(second)[0].edge_index + 12], 1)
        assert torch.equal(together.edge_index, expected)

    @pytest.mark.parametrize("directed", [True, False])
    def test_no_edges(self, directed):
        graph, shared = line_graph(NONE, 3, directed=directed)
        assert (graph.num_edges, graph.num_targets, len(shared)) == (0, 0, 0)

    def test_mistakes(self):
        with pytest.raises(ValueError, match="an edge lacks its opposite: use torch_geometric.utils.to_undirected"):
            line_graph(PATH, directed=False)
        with pytest.raises(ValueError, match="backtracking=False is for directed edges"):
            line_graph(PATH, directed=False, backtracking=False)
        with pytest.raises(TypeError, match="directed must be True or False"):
            line_graph(PATH, directed="no")


class TestExpander:
    def test_every_size_and_degree(self):
        for num_nodes, degree in itertools.product(range(21), range(1, 21)):
            if num_nodes > degree and num_nodes * degree % 2:
                continue
            graph = expander(num_nodes, degree)
            source, target = graph.edge_index
            assert is_sorted(graph)
            assert len(set(edges(graph))) == graph.num_edges
            assert not (source == target).any()
            assert is_undirected(graph.edge_index, num_nodes=num_nodes)
            expected = min(degree, max(num_nodes - 1, 0))
            assert target.bincount(minlength=num_nodes).tolist() == [expected] * num_nodes

    @pytest.mark.parametrize(("num_nodes", "degree"), [(300, 3), (200, 6), (101, 30), (60, 29), (60, 31)])
    def test_eigenvalues_are_those_of_an_expander(self, num_nodes, degree):
        """A regular graph has d as its largest eigenvalue; a second one of this size would mean that it falls apart."""
        adjacency = np.zeros((num_nodes, num_nodes))
        adjacency[tuple(expander(num_nodes, degree).edge_index.numpy())] = 1
        values = np.linalg.eigvalsh(adjacency)
        assert values[-1] == pytest.approx(degree)
        assert max(-values[0], values[-2]) < 2.2 * (degree - 1) ** 0.5

    def test_small_graphs_of_degree_three_are_connected(self):
        """The first graph of this seed falls apart, as one in 553 does, so another one is drawn."""
        assert k_hop(expander(8, 3, seed=3127), 8)[0].num_edges == 56

    def test_a_large_graph_takes_little_time(self):
        start = time.perf_counter()
        assert expander(100_000, 6).num_edges == 600_000
        assert time.perf_counter() - start < 5

    def test_seeds(self):
        state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
        first, again, other = (expander(30, 4, seed=seed).edge_index for seed in (7, 7, 8))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        assert torch.equal(torch.get_rng_state(), state)
        assert (np.random.get_state()[1] == numpy_state).all()

    @pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
    def test_batches(self, batch):
        assert_graph_by_graph(lambda nodes, batch: expander(len(nodes), 2, batch, seed=3), batch)
        assert is_sorted(expander(12, 2, torch.tensor(batch)))

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ((5, 3), ValueError, "no graph of 5 nodes has 3 neighbours.*choose an even degree, such as 4"),
            ((5, 3, torch.zeros(5).long()), ValueError, "no graph of 5 nodes"),
            ((5, 0), ValueError, "degree must be at least 1"),
            ((-1, 2), ValueError, "num_nodes=-1"),
            ((5, 2, torch.zeros(4).long()), ValueError, r"integers \[5\] from 0; got \[4\]"),
        ],
    )
    def test_mistakes(self, arguments, error, message):
        with pytest.raises(error, match=message):
            expander(*arguments)
        with pytest.raises(ValueError, match="seed must be at least 0"):
            expander(4, 2, seed=-1)


class TestVirtualNodes:
    @pytest.mark.parametrize("count", [1, 3])
    @pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
    def test_every_graph_has_its_own(self, batch, count):
        num_graphs = max(batch) + 1
        edge_index = within_blocks(random_edges(12, 40), torch.tensor(batch))[0].edge_index
        graph = with_virtual_nodes(edge_index, batch=torch.tensor(batch), count=count)
        ends = [(node, 12 + graph * count + c) for node, graph in enumerate(batch) for c in range(count)]
        assert graph.num_targets == graph.num_sources == 12 + num_graphs * count
        given, there, back = (graph.edge_index[:, graph.edge_type == kind] for kind in range(3))
        assert torch.equal(given, edge_index)
        assert sorted(map(tuple, there.t().tolist())) == ends
        assert sorted(map(tuple, back.flip(0).t().tolist())) == ends
        assert (graph.edge_type.diff() >= 0).all()

    def test_empty_graphs_at_the_end(self):
        graph = with_virtual_nodes(NONE, batch=torch.tensor([0, 0]), batch_size=3)
        assert (graph.num_targets, graph.num_edges) == (5, 4)
        assert with_virtual_nodes(NONE, batch=torch.zeros(0).long()).num_targets == 0
        assert with_virtual_nodes(NONE, 0).num_targets == 1  # one graph without nodes

    def test_types_are_kept(self):
        given = TypedGraph(PATH, torch.tensor([1, 0, 1]), ["single", "double"], {"atom": 4})
        graph = with_virtual_nodes(given)
        assert graph.edge_types == ("single", "double", "node_to_virtual", "virtual_to_node")
        assert graph.edge_type.tolist() == [1, 0, 1, *[2] * 4, *[3] * 4]
        assert graph.num_nodes == {"atom": 4, "virtual": 1}

    def test_messages_reach_every_node_in_two_steps(self):
        graph = with_virtual_nodes(NONE, 5)
        x = torch.zeros(6, 1, 1)
        x[2] = 1
        for _ in range(2):
            x = gattn.aggregate(torch.ones(graph.num_edges, 1), x, graph)
        assert x[:5].flatten().tolist() == [1] * 5

    def test_mistakes(self):
        batch = torch.tensor([0, 0, 1, 1])
        with pytest.raises(ValueError, match="an edge joins nodes of two graphs of the batch.*within_blocks"):
            with_virtual_nodes(PATH, batch=batch)
        with pytest.raises(ValueError, match="batch holds 2 graphs or more, but batch_size is 1"):
            with_virtual_nodes(NONE, batch=batch, batch_size=1)
        with pytest.raises(ValueError, match="count must be at least 1"):
            with_virtual_nodes(NONE, 4, count=0)
        with pytest.raises(ValueError, match=r"batch must hold the graph of each node, integers \[5\]"):
            with_virtual_nodes(NONE, 5, batch)
        with pytest.raises(ValueError, match="the graph has 5 sources, but 4 according to batch"):
            with_virtual_nodes(SparseGraph(NONE, 5, 5), batch=batch)


class TestEarlierThan:
    def brute(self, times, k, groups, query_times=None, query_groups=None):
        """The events before each target, the newest first, then the last in the list."""
        is_query = query_times is not None
        targets = times if not is_query else query_times
        found = []
        for i, moment in enumerate(targets):
            wanted = None if groups is None else (query_groups if is_query else groups)[i]
            before = [
                (t, j)
                for j, t in enumerate(times)
                if t < moment and (groups is None or wanted in np.atleast_1d(groups.T[j]))
            ]
            found += [(j, i, moment - t) for t, j in sorted(before, reverse=True)[:k]]
        return found

    @pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float32, torch.uint8, torch.bfloat16])
    @pytest.mark.parametrize("k", [None, 1, 3])
    @pytest.mark.parametrize("form", ["events", "groups", "queries", "queries and groups", "two groups"])
    def test_all_forms(self, form, k, dtype):
        generator = torch.Generator().manual_seed(0)

        def draw(*size, largest=8):
            return torch.randint(largest, size, generator=generator)

        times, query_times = draw(40).to(dtype), (draw(25).to(dtype) if "events" not in form else None)
        groups, query_groups = draw(40, largest=4) + 10**15, draw(25, largest=5) + 10**15
        if form == "two groups":
            groups = draw(2, 40, largest=4) + 10**15  # some events are in one group twice
        if "groups" not in form:
            groups = query_groups = None
        if form in ("events", "groups"):
            query_times = query_groups = None
        arrays = [
            None if x is None else x.double().numpy() if x.is_floating_point() else x.long().numpy()
            for x in (times, groups, query_times, query_groups)
        ]
        graph, ages = earlier_than(times, k, groups=groups, query_times=query_times, query_groups=query_groups)
        expected = self.brute(arrays[0], k, *arrays[1:])
        assert edges(graph) == [edge[:2] for edge in expected]
        assert ages.tolist() == [age for *_, age in expected]
        assert graph.num_sources == 40
        assert graph.num_targets == (25 if "queries" in form or form == "two groups" else 40)
        assert ages.dtype == (dtype if dtype.is_floating_point else torch.int64)

    def test_integers_that_no_float_can_tell_apart(self):
        times = torch.tensor([2**62, 2**62 + 1, 2**62 + 2])
        graph, ages = earlier_than(times)
        assert edges(graph) == [(0, 1), (1, 2), (0, 2)]
        assert ages.tolist() == [1, 1, 2]

    def test_times_that_single_precision_cannot_tell_apart(self):
        times = torch.tensor([1e9, 1e9 + 1e-3], dtype=torch.float64)
        assert edges(earlier_than(times)[0]) == [(0, 1)]

    def test_nothing_is_earlier_at_the_same_time(self):
        assert earlier_than(torch.tensor([0.0, -0.0, 0.0]))[0].num_edges == 0

    @pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
    def test_batches(self, batch):
        times = torch.randint(4, (12,))
        assert_graph_by_graph(lambda nodes, batch: earlier_than(times[nodes], 2, groups=batch)[0], batch)

    def test_many_events_of_one_node_take_little_time(self):
        """All pairs would be 4 · 10¹⁰."""
        times, queries = torch.rand(2, 200_000, dtype=torch.float64)
        groups = torch.zeros(200_000, dtype=torch.int64)
        start = time.perf_counter()
        graph, _ = earlier_than(times, 5, groups=groups, query_times=queries, query_groups=groups)
        assert time.perf_counter() - start < 5
        assert graph.num_edges <= 10**6

    def test_nothing(self):
        for events, queries in ((0, 0), (0, 3), (3, 0)):
            times, query_times = (torch.zeros(n, dtype=torch.int64) for n in (events, queries))
            groups = {"groups": times, "query_groups": query_times}
            graph, ages = earlier_than(times, 2, query_times=query_times, **groups)
            assert (graph.num_sources, graph.num_targets, len(ages)) == (events, queries, 0)
        assert earlier_than(torch.zeros(1))[0].num_edges == 0

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"k": 0}, ValueError, "k must be at least 1"),
            ({"times": [1, 2]}, TypeError, "times must be a tensor"),
            ({"times": torch.zeros(2, 2)}, ValueError, "one time per row"),
            ({"times": torch.tensor([0.0, float("nan")])}, ValueError, "times must not be NaN"),
            ({"times": torch.tensor([True, False])}, ValueError, "real numbers"),
            ({"query_times": torch.zeros(2)}, ValueError, "one dtype, so that comparisons are exact"),
            ({"groups": torch.zeros(4).long()}, ValueError, r"groups must be integers \[3\]; got \[4\]"),
            ({"groups": torch.zeros(3)}, ValueError, "of torch.float32"),
            ({"groups": [0, 0, 0]}, TypeError, "got list"),
            ({"groups": torch.zeros(2, 3).long()}, ValueError, "Events in two groups need queries"),
            ({"query_groups": torch.zeros(3).long()}, ValueError, "go together"),
            ({"groups": torch.zeros(3).long(), "query_times": torch.tensor([1])}, ValueError, "go together"),
        ],
    )
    def test_mistakes(self, options, error, message):
        with pytest.raises(error, match=message):
            earlier_than(**{"times": torch.tensor([1, 2, 3]), **options})


class TestGrid:
    @pytest.mark.parametrize("loop", [False, True])
    @pytest.mark.parametrize("radius", [1, 2])
    @pytest.mark.parametrize("neighbors", [4, 8])
    @pytest.mark.parametrize("size", [(1, 1), (1, 4), (3, 5)])
    def test_pixels_around_each_pixel(self, size, neighbors, radius, loop):
        pixels = list(itertools.product(range(size[0]), range(size[1])))
        expected = {}
        for (a, (row, column)), (b, (other, where)) in itertools.product(enumerate(pixels), repeat=2):
            offset = (row - other, column - where)
            length = sum(map(abs, offset)) if neighbors == 4 else max(map(abs, offset))
            if length <= radius and (loop or a != b):
                expected[a, b] = list(offset)
        graph, offsets = grid(*size, neighbors=neighbors, radius=radius, loop=loop)
        assert by_edge(graph, offsets) == expected
        assert is_sorted(graph)
        assert graph.num_targets == len(pixels)

    def test_images_of_a_batch(self):
        one, offsets = grid(2, 3)
        both, all_offsets = grid(2, 3, batch_size=2)
        assert torch.equal(both.edge_index, torch.cat([one.edge_index, one.edge_index + 6], 1))
        assert torch.equal(all_offsets, offsets.repeat(2, 1))
        for sizes in ((0, 3, 1), (2, 0, 1), (2, 3, 0)):
            empty, offsets = grid(*sizes[:2], batch_size=sizes[2])
            assert (empty.num_targets, empty.num_edges, offsets.shape) == (0, 0, (0, 2))

    @pytest.mark.parametrize(
        ("arguments", "options", "error", "message"),
        [
            ((-1, 2), {}, ValueError, "height=-1"),
            ((2, 2.0), {}, TypeError, "width must be"),
            ((2, 2), {"neighbors": 6}, ValueError, "neighbors must be 4 or 8; got 6"),
            ((2, 2), {"radius": 0}, ValueError, "radius must be at least 1"),
            ((2, 2), {"batch_size": -1}, ValueError, "batch_size=-1"),
        ],
    )
    def test_mistakes(self, arguments, options, error, message):
        with pytest.raises(error, match=message):
            grid(*arguments, **options)


class TestUnion:
    def test_edges_are_listed_once(self):
        parts = [random_edges(8, 20), SparseGraph(random_edges(8, 20, seed=1), 8, 8), CompleteGraph(8, window=1)]
        graph = union(*parts)
        indices = [parts[0], parts[1].edge_index, parts[2].edge_index]
        assert set(edges(graph)) == {tuple(edge) for part in indices for edge in part.t().tolist()}
        assert len(set(edges(graph))) == graph.num_edges
        assert is_sorted(graph)
        typed = union(*parts, typed=True)
        assert torch.equal(typed.edge_index, torch.cat(indices, 1))
        assert typed.edge_type.tolist() == [*[0] * 20, *[1] * 20, *[2] * indices[2].size(1)]
        assert typed.edge_types == (0, 1, 2)

    def test_features_of_a_typed_union_are_those_of_its_parts(self):
        first, hops = k_hop(PATH, 2, 4)
        second, distances = knn(torch.rand(4, 2), 1)
        graph = union(first, second, typed=True)
        features = torch.cat([hops.float(), distances])
        for number, part in enumerate((hops.float(), distances)):
            assert torch.equal(features[graph.edge_type == number], part)

    def test_sizes(self):
        assert union(PATH, NONE).num_targets == 4
        assert union(PATH, SparseGraph(NONE, 6, 6)).num_targets == 6
        assert union(PATH, num_nodes=7).num_targets == 7
        wide = union(SparseGraph(PATH, 4, 9), PATH)
        assert (wide.num_targets, wide.num_sources) == (4, 9)
        assert union(SparseGraph(NONE, 0, 2), NONE).num_targets == 0
        assert (
            union(SparseGraph(PATH.flip(0), flow="target_to_source"), typed=True).edge_index.tolist() == PATH.tolist()
        )
        empty = union(NONE, NONE, typed=True)
        assert (empty.num_edges, empty.edge_types) == (0, (0, 1))

    def test_mistakes(self):
        with pytest.raises(ValueError, match="at least one graph"):
            union()
        with pytest.raises(ValueError, match="the same nodes; they have 4 and 5 targets"):
            union(SparseGraph(PATH, 4, 4), SparseGraph(PATH, 5, 5))
        with pytest.raises(IndexError, match="there are 3"):
            union(PATH, CompleteGraph(3))
        with pytest.raises(TypeError, match="typed must be True or False"):
            union(PATH, typed="names")
        with pytest.raises(TypeError, match="a graph must be"):
            union(PATH, "edges")
        with pytest.raises(ValueError, match="the graphs are on cpu and meta"):
            union(PATH, SparseGraph(NONE.to("meta"), 4, 4))


class TestWithinBlocks:
    def test_edges_and_features(self):
        edge_index, batch = random_edges(12, 60), torch.tensor(BATCHES["unsorted"])
        graph, features = within_blocks(edge_index, batch, torch.arange(60.0).view(60, 1))
        kept = [e for e, (a, b) in enumerate(edge_index.t().tolist()) if batch[a] == batch[b]]
        assert edges(graph) == [tuple(edge_index[:, e].tolist()) for e in kept]
        assert features.flatten().tolist() == kept
        assert graph.num_targets == 12
        assert within_blocks(edge_index, batch)[1] is None

    def test_types_are_kept(self):
        given = TypedGraph(PATH, torch.tensor([2, 0, 1]), ["a", "b", "c"], {"x": 1, "y": 3})
        graph, _ = within_blocks(given, torch.tensor([0, 0, 1, 1]))
        assert (edges(graph), graph.edge_type.tolist()) == ([(0, 1), (2, 3)], [2, 1])
        assert (graph.edge_types, graph.num_nodes) == (given.edge_types, given.num_nodes)

    def test_bipartite(self):
        graph, _ = within_blocks(CompleteGraph(2, 3), torch.tensor([0, 1, 1]), batch_y=torch.tensor([1, 0]))
        assert edges(graph) == [(1, 0), (2, 0), (0, 1)]
        assert (graph.num_sources, graph.num_targets) == (3, 2)

    def test_complete_graphs_become_packed(self):
        graph, _ = within_blocks(CompleteGraph(5), torch.tensor([0, 0, 1, 1, 1]))
        assert torch.equal(graph.edge_index, CompleteGraph.packed([2, 3]).edge_index)

    def test_nothing(self):
        graph, features = within_blocks(NONE, torch.zeros(0).long(), torch.zeros(0, 2))
        assert (graph.num_targets, graph.num_edges, features.shape) == (0, 0, (0, 2))

    def test_mistakes(self):
        batch = torch.tensor([0, 0, 1, 1])
        with pytest.raises(ValueError, match="features need one row for each of the 3 edges"):
            within_blocks(PATH, batch, torch.zeros(4))
        with pytest.raises(TypeError, match="features must be a tensor"):
            within_blocks(PATH, batch, [1, 2, 3])
        with pytest.raises(TypeError, match="needs batch"):
            within_blocks(PATH, None)
        with pytest.raises(IndexError, match="index 3, but there are 3"):
            within_blocks(PATH, batch[:3])
        with pytest.raises(ValueError, match="the graph has 5 sources, but 4 according to batch"):
            within_blocks(CompleteGraph(5), batch)


BUILDS = {
    "knn": lambda: knn(torch.arange(12.0).view(6, 2), 2)[0],
    "radius": lambda: radius(torch.arange(6.0), 1.5)[0],
    "k_hop": lambda: k_hop(PATH, 2, 6)[0],
    "line_graph": lambda: line_graph(torch.tensor([[0, 1, 2, 0, 1, 3], [1, 2, 3, 2, 3, 0]]))[0],
    "expander": lambda: expander(6, 3),
    "with_virtual_nodes": lambda: with_virtual_nodes(PATH, 5),
    "earlier_than": lambda: earlier_than(torch.arange(6), 2)[0],
    "grid": lambda: grid(2, 3)[0],
    "union": lambda: union(PATH, expander(6, 3), typed=True),
    "within_blocks": lambda: within_blocks(expander(6, 3), torch.tensor([0, 0, 0, 1, 1, 1]))[0],
}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_layers_take_these_graphs(build):
    """As they take their edges."""
    graph, x = build(), torch.randn(6, 8)
    conv = gattn.nn.GATv2Conv(8, 4, heads=2, add_self_loops=False)
    torch.testing.assert_close(conv(x, graph), conv(x, graph.edge_index))
    assert torch.equal(build().edge_index, graph.edge_index)


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_these_graphs_can_be_drawn(build):
    pytest.importorskip("matplotlib")
    pytest.importorskip("networkx")
    import matplotlib.pyplot as plt

    from gattn.visualize import attention_graph

    graph = build()
    ax = attention_graph(graph, torch.rand(graph.num_edges), node=graph.num_targets - 1)
    assert len(ax.collections) + len(ax.patches) > 0
    plt.close(ax.figure)
