import math

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.transforms import AddLaplacianEigenvectorPE, AddRandomWalkPE
from torch_geometric.utils import to_undirected

from gattn import structure
from gattn.nn import (
    ALiBi,
    GraphPositionalEncoding,
    LearnedPositionalEncoding,
    RelativePosition,
    RelativePositionBias,
    RotaryPositionalEncoding,
    SinusoidalPositionalEncoding,
)
from gattn.nn.transformers import positional
from gattn.transforms import RandomWalkPairs


def sinusoid(place, channel, channels, base=10000.0):
    """Section 3.5 of the paper, for one element."""
    angle = place / base ** (2 * (channel // 2) / channels)
    return math.sin(angle) if channel % 2 == 0 else math.cos(angle)


class TestSinusoidal:
    @pytest.mark.parametrize("channels", [1, 2, 7, 16])
    @pytest.mark.parametrize("first", [0, 5, 100_000])
    def test_is_the_papers_formula(self, channels, first):
        expected = torch.tensor(
            [[sinusoid(first + t, c, channels) for c in range(channels)] for t in range(6)], dtype=torch.double
        )
        encoding = SinusoidalPositionalEncoding(channels)
        x = torch.randn(2, 6, channels, dtype=torch.double)
        # An angle of 10⁵ has an error of 10⁵ units in the last place.
        torch.testing.assert_close(encoding(x, first) - x, expected.expand(2, -1, -1), rtol=0, atol=1e-10)
        single = encoding(torch.zeros(6, channels), first)
        assert single.dtype == torch.float32
        torch.testing.assert_close(single, expected.float(), rtol=0, atol=1e-7)

    def test_base_and_places(self):
        encoding = SinusoidalPositionalEncoding(4, base=100.0)
        places = torch.tensor([[3, 0], [7, 2]])
        expected = [[[sinusoid(t, c, 4, 100.0) for c in range(4)] for t in row] for row in places.tolist()]
        torch.testing.assert_close(encoding.encoding(places), torch.tensor(expected, dtype=torch.double))

    def test_dropout_drops_elements_of_the_sum(self):
        encoding = SinusoidalPositionalEncoding(50, dropout=0.5)
        x = torch.randn(40, 50)
        out = encoding(x)
        kept = out != 0
        assert 0.4 < kept.double().mean() < 0.6
        torch.testing.assert_close(out[kept], 2 * encoding.eval()(x)[kept])

    def test_errors(self):
        with pytest.raises(ValueError, match="channels must be at least 1"):
            SinusoidalPositionalEncoding(0)


class TestLearned:
    def test_adds_the_vectors_of_its_places(self):
        encoding = LearnedPositionalEncoding(8, 4)
        x = torch.randn(2, 3, 4)
        torch.testing.assert_close(encoding(x), x + encoding.embedding.weight[:3])
        out = encoding(x, first=5)
        torch.testing.assert_close(out, x + encoding.embedding.weight[5:8])
        out.sum().backward()
        assert encoding.embedding.weight.grad.sum(1).tolist() == [0] * 5 + [8] * 3

    def test_too_long(self):
        encoding = LearnedPositionalEncoding(8, 4)
        assert encoding(torch.zeros(8, 4)).shape == (8, 4)
        with pytest.raises(ValueError, match="there are 8 learnt positions, but the sequence extends to 9"):
            encoding(torch.zeros(9, 4))
        with pytest.raises(ValueError, match="extends to 9"):
            encoding(torch.zeros(1, 4), first=8)


class TestRotary:
    @pytest.mark.parametrize("base", [10000.0, 50.0])
    def test_is_a_rotation_in_the_complex_plane(self, base):
        rotary = RotaryPositionalEncoding(6, base=base)
        x = torch.randn(2, 5, 3, 6, dtype=torch.double)
        out = rotary(x)
        for t in range(5):
            for i in range(3):
                pair = torch.complex(x[:, t, :, 2 * i], x[:, t, :, 2 * i + 1])
                turn = complex(math.cos(t * base ** (-2 * i / 6)), math.sin(t * base ** (-2 * i / 6)))
                expected = torch.view_as_real(pair * turn)
                torch.testing.assert_close(out[:, t, :, 2 * i : 2 * i + 2], expected)

    def test_scores_depend_on_the_difference_only_and_norms_are_kept(self):
        rotary = RotaryPositionalEncoding(8)
        q, k = torch.randn(2, 1, 1, 8, dtype=torch.double)

        def score(target, source):
            return (rotary(q, torch.tensor([target])) * rotary(k, torch.tensor([source]))).sum()

        for distance in (-3, 0, 4):
            scores = torch.stack([score(place, place + distance) for place in (3, 10, 1000)])
            torch.testing.assert_close(scores, scores[:1].expand(3))
        assert abs(score(3, 3) - score(3, 7)) > 1e-3
        assert abs(score(3, 7) - score(7, 3)) > 1e-3  # it knows the direction
        x = torch.randn(5, 2, 8, dtype=torch.double)
        torch.testing.assert_close(rotary(x).norm(dim=-1), x.norm(dim=-1))
        torch.testing.assert_close(rotary(x)[0], x[0])

    def test_places(self):
        rotary = RotaryPositionalEncoding(4)
        x = torch.randn(7, 2, 4)
        torch.testing.assert_close(rotary(x[3:], torch.arange(3, 7)), rotary(x)[3:])

    def test_far_places_are_exact_in_float32(self):
        rotary = RotaryPositionalEncoding(4)
        x, place = torch.randn(1, 2, 4, dtype=torch.double), torch.tensor([1_000_003])
        torch.testing.assert_close(rotary(x.float(), place).double(), rotary(x, place), rtol=0, atol=1e-6)

    def test_errors(self):
        for channels in (0, 3, -2):
            with pytest.raises(ValueError, match="rotated in pairs"):
                RotaryPositionalEncoding(channels)
        with pytest.raises(ValueError, match="heads have 6 channels, but these positions were made for 4"):
            RotaryPositionalEncoding(4)(torch.randn(3, 2, 6))


class TestALiBi:
    def test_slopes_are_the_papers(self):
        """For 8 heads the paper names 1/2, 1/4, ..., 1/256; for 12 the authors' code interleaves those of 16."""
        assert ALiBi(8).slopes.tolist() == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
        sixteen = [2 ** (-0.5 * h) for h in range(1, 17)]
        torch.testing.assert_close(ALiBi(16).slopes, torch.tensor(sixteen))
        twelve = [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256, *sixteen[0:8:2]]
        torch.testing.assert_close(ALiBi(12).slopes, torch.tensor(twelve))
        assert ALiBi(1).slopes.tolist() == [1 / 256]

    def test_bias(self):
        bias = ALiBi(2)(torch.tensor([[0, -3], [2, 16]]))
        assert bias.tolist() == [[[0, 0], [-3 / 16, -3 / 256]], [[-2 / 16, -2 / 256], [-1, -1 / 16]]]

    def test_has_nothing_to_learn_or_save(self):
        assert not list(ALiBi(4).parameters())
        assert not ALiBi(4).state_dict()

    def test_errors(self):
        with pytest.raises(ValueError, match="heads must be at least 1"):
            ALiBi(0)


class TestRelativePositionBias:
    def test_clips_at_the_largest_distance(self):
        position = RelativePositionBias(3, max_distance=2)
        bias = position(torch.tensor([[-9, -3, -2, -1], [0, 1, 2, 50]]))
        expected = position.weight[torch.tensor([[0, 0, 0, 1], [2, 3, 4, 4]])]
        assert torch.equal(bias, expected)
        bias.sum().backward()
        assert position.weight.grad[:, 0].tolist() == [3, 1, 1, 1, 2]

    def test_no_distance_at_all(self):
        position = RelativePositionBias(2, max_distance=0)
        assert torch.equal(position(torch.tensor([-4, 0, 4])), position.weight.expand(3, 2))

    def test_reset(self):
        position = RelativePositionBias(2, 3)
        before = position.weight.clone()
        position.reset_parameters()
        assert not torch.equal(position.weight, before)

    def test_errors(self):
        with pytest.raises(ValueError, match="max_distance must be at least 0; got -1"):
            RelativePositionBias(2, -1)
        with pytest.raises(ValueError, match="heads must be at least 1"):
            RelativePositionBias(0, 2)
        with pytest.raises(NotImplementedError, match="forward"):
            RelativePosition()(torch.tensor([0]))


def assert_eigenvectors(structure, edge_index, num_nodes):
    """Whether the columns are orthonormal eigenvectors of the first eigenvalues but one, and zero after the last."""
    adjacency = torch.zeros(num_nodes, num_nodes, dtype=torch.double)
    adjacency.index_put_(tuple(edge_index), torch.ones((), dtype=torch.double), accumulate=True).fill_diagonal_(0)
    degree = adjacency.sum(1)
    scale = torch.where(degree > 0, degree.rsqrt(), 0.0)
    laplacian = torch.eye(num_nodes) - scale.unsqueeze(1) * adjacency * scale
    values = torch.linalg.eigvalsh(laplacian)[1 : structure.size(1) + 1]
    vectors, rest = structure.double().split([len(values), structure.size(1) - len(values)], 1)
    torch.testing.assert_close(laplacian @ vectors, vectors * values, rtol=0, atol=1e-5)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(len(values)).double(), rtol=0, atol=1e-5)
    assert not rest.any()


def projections(vectors):
    """The projection on each column, which does not depend on its sign."""
    return vectors.T.unsqueeze(-1) * vectors.T.unsqueeze(-2)


class TestGraph:
    @pytest.fixture
    def edge_index(self):
        return to_undirected(torch.tensor([[0, 1, 2, 3, 4, 0, 1], [1, 2, 3, 4, 5, 2, 4]]))

    def test_structure_is_that_of_pygs_transforms(self, edge_index):
        data = Data(edge_index=edge_index, num_nodes=6)
        expected = AddRandomWalkPE(4, attr_name="pe")(data).pe
        torch.testing.assert_close(GraphPositionalEncoding("random_walk", 4, 8).compute(edge_index, 6), expected)
        expected = AddLaplacianEigenvectorPE(3, attr_name="pe")(data).pe
        actual = GraphPositionalEncoding("laplacian", 3, 8).compute(edge_index, 6)
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(projections(actual), projections(expected))  # signs are random

    def test_random_walk_by_hand(self, edge_index):
        walk = torch.zeros(6, 6)
        walk[edge_index[0], edge_index[1]] = 1
        walk /= walk.sum(1, keepdim=True)
        expected = torch.stack([torch.linalg.matrix_power(walk, step).diagonal() for step in (1, 2, 3)], 1)
        torch.testing.assert_close(GraphPositionalEncoding("random_walk", 3, 8).compute(edge_index, 6), expected)

    @pytest.mark.parametrize("largest", [2000, 1])  # 1: sparse matrices
    def test_parallel_edges_and_loops_of_a_random_walk(self, largest, monkeypatch):
        monkeypatch.setattr(structure, "_LARGEST_DENSE_WALK", largest)
        encoding = GraphPositionalEncoding("random_walk", 2, 8)
        assert encoding.compute(torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0]]), 2).tolist() == [[0, 1], [0, 1]]
        loops = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1]])
        assert encoding.compute(loops, 3).tolist() == [[0.75, 0.5625], [0, 0], [0, 0]]
        edges = torch.randint(12, (2, 60))
        walks = RandomWalkPairs(5)(Data(edge_index=edges, num_nodes=13)).node_walks[:, 1:]  # step 0 is left out
        torch.testing.assert_close(GraphPositionalEncoding("random_walk", 4, 8).compute(edges, 13), walks)
        simple = to_undirected(torch.unique(edges, dim=1))
        expected = AddRandomWalkPE(4, attr_name="pe")(Data(edge_index=simple, num_nodes=13)).pe
        torch.testing.assert_close(GraphPositionalEncoding("random_walk", 4, 8).compute(simple, 13), expected)
        assert encoding.compute(edges[:, :0], 0).shape == (0, 2)

    def test_eigenvectors_are_of_the_laplacian(self, edge_index):
        structure = GraphPositionalEncoding("laplacian", 3, 8).compute(edge_index, 6)
        assert_eigenvectors(structure, edge_index, 6)

    @pytest.mark.parametrize("largest", [300, 5])  # 5: PyG computes graphs of 7 nodes
    @pytest.mark.parametrize("is_sorted", [True, False])
    @pytest.mark.parametrize("kind", ["laplacian", "random_walk"])
    def test_the_graphs_of_a_batch(self, kind, is_sorted, largest, edge_index, monkeypatch):
        monkeypatch.setattr(positional, "_LARGEST_DENSE", largest)
        one_way = torch.tensor([[0, 1, 2, 0], [1, 2, 3, 2]])
        repeated = torch.cat([edge_index, edge_index[:, :1].flip(0), edge_index[:, :1], torch.tensor([[2], [2]])], 1)
        parts = [(edge_index, 6), (edge_index[:, :0], 1), (to_undirected(one_way), 4), (repeated, 7)]
        parts += [(edge_index[:, :0], 3), (to_undirected(one_way[:, :2]), 4), (to_undirected(one_way[:, :1]), 2)]
        numbers = [3, 0, 5, 1, 2, 9, 4]  # of the graphs, some of which have no nodes
        batch = torch.cat([torch.full((size,), number) for number, (_, size) in zip(numbers, parts, strict=True)])
        starts = torch.tensor([0, *(size for _, size in parts[:-1])]).cumsum(0).tolist()
        edges = torch.cat([edges + start for (edges, _), start in zip(parts, starts, strict=True)], 1)
        order = batch.argsort(stable=True) if is_sorted else torch.randperm(len(batch))
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order))
        encoding = GraphPositionalEncoding(kind, 4, 8)
        structure = encoding.compute(places[edges], len(batch), batch[order])[places]
        assert structure.dtype == torch.float32
        for (part, size), start in zip(parts, starts, strict=True):
            actual = structure[start : start + size]
            if kind == "random_walk":
                torch.testing.assert_close(actual, encoding.compute(part, size))
            else:
                assert_eigenvectors(actual, part, size)

    @pytest.mark.parametrize("largest", [300, 5])
    def test_one_way_edges_are_as_in_pyg(self, largest, edge_index, monkeypatch):
        monkeypatch.setattr(positional, "_LARGEST_DENSE", largest)
        edge_index = edge_index[:, 1:]
        expected = AddLaplacianEigenvectorPE(3, attr_name="pe")(Data(edge_index=edge_index, num_nodes=6)).pe
        actual = GraphPositionalEncoding("laplacian", 3, 8).compute(edge_index, 6)
        torch.testing.assert_close(projections(actual), projections(expected), rtol=0, atol=1e-5)

    def test_a_disconnected_graph_may_be_a_batch(self, edge_index):
        edges = torch.cat([edge_index, edge_index + 6], 1)
        encoding = GraphPositionalEncoding("laplacian", 2, 8)
        with pytest.warns(UserWarning, match="2 components.*pass batch"):
            encoding.compute(edges, 13)
        encoding.compute(edge_index, 8)  # isolated nodes are in the way of nothing
        encoding.compute(edges, 13, torch.zeros(13, dtype=torch.long))  # said to be one graph
        GraphPositionalEncoding("random_walk", 2, 8).compute(edges, 13)

    @pytest.mark.parametrize("kind", ["laplacian", "random_walk"])
    def test_adds_the_projection(self, kind, edge_index):
        encoding = GraphPositionalEncoding(kind, 3, 8).eval()
        structure = encoding.compute(edge_index, 6)
        x = torch.randn(2, 6, 8)
        expected = x + structure @ encoding.lin.weight.T + encoding.lin.bias
        torch.testing.assert_close(encoding(x, structure), expected)
        assert encoding.bfloat16()(x.bfloat16(), structure).dtype == torch.bfloat16

    def test_signs_flip_only_in_training_and_only_of_eigenvectors(self, edge_index):
        encoding = GraphPositionalEncoding("laplacian", 2, 2)
        structure, x = encoding.compute(edge_index, 6), torch.zeros(6, 2)
        with torch.no_grad():
            encoding.lin.weight.copy_(torch.eye(2))
            encoding.lin.bias.zero_()
        seen = set()
        for _ in range(60):
            out = encoding(x, structure)
            signs = (out * structure).sum(0).sign()
            torch.testing.assert_close(out, structure * signs)  # one sign for all nodes
            seen.add(tuple(signs.tolist()))
        assert seen == {(1, 1), (1, -1), (-1, 1), (-1, -1)}
        encoding.eval()
        assert all(torch.equal(encoding(x, structure), structure) for _ in range(20))
        fixed = GraphPositionalEncoding("laplacian", 2, 2, random_signs=False)
        fixed.load_state_dict(encoding.state_dict())
        assert all(torch.equal(fixed(x, structure), structure) for _ in range(20))

        encoding = GraphPositionalEncoding("random_walk", 2, 2)
        structure = encoding.compute(edge_index, 6)
        outs = [encoding(x, structure) for _ in range(20)]
        assert all(torch.equal(out, outs[0]) for out in outs)

    def test_errors(self, edge_index):
        with pytest.raises(ValueError, match="not 'sine'"):
            GraphPositionalEncoding("sine", 2, 8)
        with pytest.raises(ValueError, match="k must be at least 1"):
            GraphPositionalEncoding("laplacian", 0, 8)
        encoding = GraphPositionalEncoding("laplacian", 2, 8)
        for batch in (torch.zeros(5, dtype=torch.long), torch.zeros(6), torch.full((6,), -1), [0] * 6):
            with pytest.raises(ValueError, match=r"batch must hold the graph of each node, integers \[6\] from 0"):
                encoding.compute(edge_index, 6, batch)
        with pytest.raises(ValueError, match="an edge joins nodes of two graphs"):
            encoding.compute(edge_index, 6, torch.tensor([0, 0, 0, 0, 0, 1]))
