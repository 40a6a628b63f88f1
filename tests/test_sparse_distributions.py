"""Sparsemax, 1.5-entmax, top-k and distributions within types: against bisection and loops, on lists and matrices."""

import pytest
import torch

import gattn
from gattn import (
    CompleteGraph,
    Entmax15,
    Hard,
    LocalGaussian,
    Softmax,
    SparseGraph,
    Sparsemax,
    TopK,
    WithinTypes,
    attend,
)
from gattn.testing import random_edge_index

N, E, H = 9, 60, 3
INDEX = random_edge_index(N, N - 1, E, seed=3)[1]  # the last target has no edges


def by_bisection(power):
    """Weights max(z - t, 0)^power that sum to one."""

    def row(logits):
        z = logits / power
        low, high = z.max() - 1, z.max()
        for _ in range(200):
            middle = (low + high) / 2
            if (z - middle).clamp_min(0).pow(power).sum() > 1:
                low = middle
            else:
                high = middle
        return (z - low).clamp_min(0).pow(power)

    return row


def top(k):
    def row(logits):
        order = sorted(range(len(logits)), key=lambda place: (-logits[place].item(), place))[:k]
        weights = torch.zeros_like(logits)
        weights[order] = logits[order].softmax(0)
        return weights

    return row


DISTRIBUTIONS = {
    "sparsemax": (Sparsemax(), by_bisection(1)),
    "entmax15": (Entmax15(), by_bisection(2)),
    "top 1": (TopK(1), top(1)),
    "top 3": (TopK(3), top(3)),
    "top 99": (TopK(99), top(99)),
    "top 10^30": (TopK(10**30), top(99)),
}


def of_rows(row, logits, index=INDEX):
    """A formula of one row, for each target and head."""
    weights = torch.zeros_like(logits)
    for target in index.unique():
        mine = index == target
        for head in range(logits.size(-1)):
            column = logits[mine, head]
            real = column != -torch.inf
            found = torch.zeros_like(column)
            if real.any():
                found[real] = row(column[real])
            weights[mine, head] = found
    return weights


def drawn(scale=1.0, dtype=torch.float64):
    return (torch.randn(E, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * scale).to(dtype)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
class TestOfRows:
    @pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
    def test_weights_are_those_of_the_formula(self, name, scale):
        distribution, row = DISTRIBUTIONS[name]
        logits = drawn(scale) + 1000.0
        logits[::7, 0] = -torch.inf
        logits[INDEX == 2] = -torch.inf
        found = distribution.weights(logits, INDEX, N, 0)
        torch.testing.assert_close(found, of_rows(row, logits), rtol=0, atol=1e-12)
        assert (distribution.weights(logits, INDEX, N, 0) == 0).any() or scale < 1 or name in ("top 99", "top 10^30")

    def test_equal_logits(self, name):
        distribution, row = DISTRIBUTIONS[name]
        logits = torch.zeros(E, H, dtype=torch.float64)
        torch.testing.assert_close(distribution.weights(logits, INDEX, N, 0), of_rows(row, logits))

    def test_gradients(self, name):
        distribution, _ = DISTRIBUTIONS[name]
        logits = drawn().requires_grad_()
        assert torch.autograd.gradcheck(lambda logits: distribution.weights(logits, INDEX, N, 0), logits)
        assert torch.autograd.gradgradcheck(lambda logits: distribution.weights(logits, INDEX, N, 0), logits)

    def test_gradients_stay_finite_beside_masked_edges(self, name):
        distribution, _ = DISTRIBUTIONS[name]
        logits = drawn()
        logits[INDEX < 3] = -torch.inf
        logits.requires_grad_()
        (grad,) = torch.autograd.grad(distribution.weights(logits, INDEX, N, 0).square().sum(), logits)
        assert grad.isfinite().all()
        assert (grad[INDEX < 3] == 0).all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_half_precision_is_rounded_once(self, name, dtype):
        distribution, row = DISTRIBUTIONS[name]
        logits = drawn(dtype=dtype)
        found = distribution.weights(logits, INDEX, N, 0)
        assert found.dtype == dtype
        torch.testing.assert_close(found, of_rows(row, logits.double()).to(dtype))

    def test_batches_and_dims(self, name):
        distribution, _ = DISTRIBUTIONS[name]
        logits = torch.stack([drawn(), drawn(2.0)])
        expected = torch.stack([distribution.weights(part, INDEX, N, 0) for part in logits])
        torch.testing.assert_close(distribution.weights(logits, INDEX, N, 1), expected)
        torch.testing.assert_close(distribution.weights(logits, INDEX, N, -2), expected)

    def test_nan_shows_in_its_row_alone(self, name):
        distribution, _ = DISTRIBUTIONS[name]
        logits = drawn()
        place = 5
        clean = distribution.weights(logits, INDEX, N, 0)
        logits[place, 1] = torch.nan
        found = distribution.weights(logits, INDEX, N, 0)
        assert found[place, 1].isnan()
        others = (INDEX[place] != INDEX)[:, None] | (torch.arange(H) != 1)
        assert torch.equal(found[others], clean[others])

    def test_no_edges(self, name):
        empty = torch.zeros(0, H)
        assert DISTRIBUTIONS[name][0].weights(empty, torch.zeros(0, dtype=torch.int64), N, 0).shape == (0, H)

    @pytest.mark.parametrize("graph", [CompleteGraph(N), CompleteGraph(N, causal=True), CompleteGraph(0)])
    def test_a_complete_graph_is_a_list_of_edges(self, name, graph):
        x = torch.randn(graph.num_targets, H, 4, dtype=torch.float64)
        edges = graph.edge_list(x.device)
        listed = SparseGraph(edges.edge_index, edges.num_targets, edges.num_sources)
        distribution = DISTRIBUTIONS[name][0]
        torch.testing.assert_close(
            attend(x, x, x, graph, distribution=distribution), attend(x, x, x, listed, distribution=distribution)
        )

    def test_compiled_code(self, name):
        distribution = DISTRIBUTIONS[name][0]
        compiled = torch.compile(lambda x: distribution.weights(x, INDEX, N, 0), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(drawn()), distribution.weights(drawn(), INDEX, N, 0))


@pytest.mark.parametrize("k", [0, -1, 1.5, True, None])
def test_top_k_needs_a_positive_number(k):
    with pytest.raises(ValueError, match="k must be a positive integer"):
        TopK(k)


def test_names():
    x = torch.randn(N, H, 4)
    edges = random_edge_index(N, N, E)
    for name, distribution in (("sparsemax", Sparsemax()), ("entmax15", Entmax15())):
        assert torch.equal(attend(x, x, x, edges, distribution=name), attend(x, x, x, edges, distribution=distribution))
    assert repr(TopK(3)) == "TopK(3)"


class TestWithinTypes:
    types = torch.randint(3, (E,), generator=torch.Generator().manual_seed(4))

    @pytest.mark.parametrize("num_types", [None, 3, 5])
    @pytest.mark.parametrize("inner", [None, Softmax(), Sparsemax(), TopK(2), gattn.Sigmoid(normalize=True)])
    def test_each_type_is_a_graph_of_its_own(self, inner, num_types):
        logits = drawn()
        found = WithinTypes(self.types, inner, num_types).weights(logits, INDEX, N, 0)
        for number in range(3):
            mine = self.types == number
            alone = (inner or Softmax()).weights(logits[mine], INDEX[mine], N, 0)
            torch.testing.assert_close(found[mine], alone)

    def test_the_inner_distribution_is_checked(self):
        x, edges = torch.randn(N, H, 4), random_edge_index(N, N, E)
        with pytest.raises(ValueError, match="sink must be a number, or one per head"):
            attend(x, x, x, edges, distribution=WithinTypes(self.types, Softmax(sink=torch.zeros(5))))

    @pytest.mark.parametrize("inner", [LocalGaussian(torch.arange(N).float(), 2.0), "softmax"])
    def test_other_distributions_are_refused(self, inner):
        with pytest.raises(TypeError, match="whose weights do not depend on the target itself"):
            WithinTypes(self.types, inner)

    def test_types_are_checked(self):
        for types in (self.types, self.types - 2):
            with pytest.raises(IndexError, match="holds type"):
                WithinTypes(types, num_types=2)
        with pytest.raises(IndexError, match="holds type -1"):
            WithinTypes(self.types - 1).weights(drawn(), INDEX, N, 0)
        with pytest.raises(ValueError, match="num_types must be a positive number"):
            WithinTypes(self.types, num_types=0)

    def test_other_types_are_refused(self):
        x, edges = torch.randn(N, H, 4), random_edge_index(N, N, E)
        with pytest.raises(TypeError, match="edge_type must be a tensor.*got list"):
            WithinTypes([0, 1])
        with pytest.raises(ValueError, match="integers from 0"):
            WithinTypes(torch.zeros(3))
        with pytest.raises(ValueError, match="types of 3 edges, but the graph has 60"):
            attend(x, x, x, edges, distribution=WithinTypes(torch.zeros(3, dtype=torch.int64)))

    def test_hard_attention_chooses_in_each_type(self):
        weights = WithinTypes(self.types, Hard(sample=False)).weights(drawn(), INDEX, N, 0)
        pairs = (INDEX * 3 + self.types).unique().numel()
        assert weights.sum() == pairs * H
