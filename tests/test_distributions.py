import copy
import math
import pickle
import threading

import numpy as np
import pytest
import torch

import gattn
from gattn import (
    CompleteGraph,
    DotScore,
    Gate,
    Hard,
    Identity,
    LocalGaussian,
    Sigmoid,
    Softmax,
    SparseGraph,
    Tanh,
    TopK,
    WithinTypes,
    attend,
)
from gattn.testing import assert_as_exact_as, random_edge_index

HALF = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax_equals_torch_softmax_in_every_group(dim):
    index = torch.tensor([2, 0, 0, 2, 2, 3])
    logits = torch.randn(6, 4, dtype=torch.double)
    expected = torch.empty_like(logits)
    for target in (0, 2, 3):
        expected[index == target] = logits[index == target].softmax(0)
    if dim != 0:
        logits, expected = logits.t(), expected.t()
    torch.testing.assert_close(gattn.softmax(logits, index, 5, dim), expected)


def test_large_logits_do_not_overflow():
    weights = gattn.softmax(torch.tensor([1000.0, 1000.0, -1000.0]), torch.tensor([0, 0, 0]), 1)
    torch.testing.assert_close(weights, torch.tensor([0.5, 0.5, 0.0]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_minus_infinity_means_no_weight(dtype):
    logits = torch.tensor([0.0, -torch.inf, -torch.inf, -torch.inf], dtype=dtype, requires_grad=True)
    weights = gattn.softmax(logits, torch.tensor([0, 0, 1, 1]), 3)
    assert weights.tolist() == [1, 0, 0, 0]
    assert weights.dtype == dtype
    (weights * torch.arange(4)).sum().backward()
    assert logits.grad.isfinite().all()


def test_integer_logits_are_refused():
    with pytest.raises(ValueError, match="logits of a floating-point type; got torch.int64"):
        gattn.softmax(torch.zeros(3, dtype=torch.long), torch.tensor([0, 0, 1]), 2)


def test_gradcheck():
    index = torch.tensor([1, 0, 1, 1])
    logits = torch.randn(4, 2, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda logits: gattn.softmax(logits, index, 3), logits)


def test_a_product_with_a_mask_is_not_a_mask():
    """A logit of zero still gets weight: what is masked must be minus infinity before the softmax."""
    logits, mask = torch.tensor([2.0, 1.0]), torch.tensor([True, False])
    index = torch.zeros(2, dtype=torch.long)
    assert gattn.softmax(logits * mask, index, 1)[1] > 0.1
    assert gattn.softmax(logits.masked_fill(~mask, -torch.inf), index, 1).tolist() == [1.0, 0.0]


def edges_of(index, num_targets):
    """Each target with its edges, in their order."""
    return [(target, (index == target).nonzero().flatten()) for target in range(num_targets)]


def sparse_case(flow, dtype=torch.double):
    """Edges between 6 sources and 5 targets, duplicates and a target without any among them, and features of both."""
    edge_index = random_edge_index(6, 5, 17, seed=2)
    graph = SparseGraph(
        edge_index if flow == "source_to_target" else edge_index.flip(0), num_sources=6, num_targets=5, flow=flow
    )
    query, key, value = (torch.randn(n, 2, 3, dtype=dtype) for n in (5, 6, 6))
    return graph, edge_index, query, key, value


each_flow = pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])


GATES = {
    Sigmoid: lambda z: 1 / (1 + math.exp(-z)),
    Tanh: math.tanh,
    Identity: lambda z: z,
}


class TestGates:
    @each_flow
    @pytest.mark.parametrize("gate", GATES)
    @pytest.mark.parametrize(("normalize", "eps"), [(False, 0.0), (True, 0.0), (True, 0.25)])
    def test_formula(self, gate, normalize, eps, flow):
        graph, edge_index, query, key, value = sparse_case(flow)
        distribution, mask = gate(normalize, eps), torch.rand(17, 2) < 0.8
        options = {"mask": mask, "distribution": distribution, "return_weights": True}
        logits = (query[edge_index[1]] * key[edge_index[0]]).sum(-1) / math.sqrt(3)
        expected = torch.zeros(17, 2, dtype=torch.double)
        for _, edges in edges_of(edge_index[1], 5):
            for head in range(2):
                kept = [int(e) for e in edges if mask[e, head]]
                amounts = [GATES[gate](float(logits[e, head])) for e in kept]
                total = eps + sum(amounts) if normalize else 1.0
                for e, amount in zip(kept, amounts, strict=True):
                    expected[e, head] = amount / total
        sums = torch.zeros(5, 2, 3, dtype=torch.double)
        sums.index_add_(0, edge_index[1], expected.unsqueeze(-1) * value[edge_index[0]])
        for backend in ("cpu", "reference"):
            out, weights = attend(query, key, value, graph, backend=backend, **options)
            torch.testing.assert_close(weights, expected)
            torch.testing.assert_close(out, sums)

    @pytest.mark.parametrize("gate", GATES)
    def test_names(self, gate):
        x = torch.randn(4, 2, 3)
        name = gate.__name__.lower()
        edge_index = torch.tensor([[0, 1, 2], [3, 3, 0]])
        expected = attend(x, x, x, edge_index, distribution=gate())
        assert torch.equal(attend(x, x, x, edge_index, distribution=name), expected)

    @pytest.mark.parametrize("gate", GATES)
    @pytest.mark.parametrize("graph", [CompleteGraph(4), CompleteGraph(4, causal=True), CompleteGraph.packed([1, 3])])
    def test_complete_graphs(self, gate, graph):
        x = torch.randn(4, 2, 3, dtype=torch.double)
        found, weights = attend(x, x, x, graph, distribution=gate(), return_weights=True)
        edges = SparseGraph(graph.edge_index, num_sources=4, num_targets=4)
        torch.testing.assert_close(found, attend(x, x, x, edges, distribution=gate(), backend="reference"))
        for matrix in weights if isinstance(weights, list) else [weights]:
            assert matrix.dim() == 3

    @pytest.mark.parametrize("gate", GATES)
    def test_minus_infinity_is_no_edge(self, gate):
        logits = torch.tensor([1.0, -torch.inf, -torch.inf], requires_grad=True)
        weights = gate(normalize=True).weights(logits, torch.tensor([0, 0, 1]), 2, 0)
        assert weights.tolist() == [1.0, 0.0, 0.0]
        weights.sum().backward()
        assert logits.grad.isfinite().all()

    def test_a_sum_of_zero_gives_zeros(self):
        logits = torch.tensor([[1.0], [-1.0]])
        for backend in ("cpu", "reference"):
            key = logits.clone().requires_grad_()
            graph = SparseGraph(torch.tensor([[0, 1], [0, 0]]), num_sources=2, num_targets=1)
            score = gattn.GATScore(negative_slope=1.0)
            options = {"score": score, "distribution": Identity(normalize=True), "return_weights": True}
            out, weights = attend(None, key, torch.ones(2, 1, 1), graph, backend=backend, **options)
            assert weights.flatten().tolist() == [0.0, 0.0]
            out.sum().backward()
            assert key.grad.flatten().tolist() == [0.0, 0.0]

    @pytest.mark.parametrize(("backend", "form"), [("cpu", "list"), ("reference", "list"), ("dense", "complete")])
    @pytest.mark.parametrize(("shift", "eps"), [(-46.0, 0.0), (-70.0, 0.0), (-85.0, 0.0), (-85.0, 1e-30)])
    def test_small_sums_have_exact_gradients(self, shift, eps, backend, form):
        """The square of a sum's reciprocal would be infinite in float32 from logits of -45 on."""
        graph = torch.tensor([[0, 1, 2], [0, 0, 0]]) if form == "list" else CompleteGraph(1, 3)
        found = {}
        for dtype in (torch.float32, torch.float64):
            key = (torch.tensor([[0.0], [1.0], [-0.5]], dtype=dtype) + shift).requires_grad_()
            value = torch.tensor([-1.0, 0.5, 2.0], dtype=dtype).view(3, 1, 1)
            out = attend(
                key.new_zeros(1, 1), key, value, graph, score=gattn.GATScore(1.0), backend=backend,
                distribution=Sigmoid(normalize=True, eps=eps),
            )  # fmt: skip
            first = torch.autograd.grad(out.sum(), key, create_graph=True)[0]
            second = torch.autograd.grad(first.square().sum(), key)[0]
            found[dtype] = [x.detach() for x in (out, first, second)]
        for result, exact in zip(*found.values(), strict=True):
            torch.testing.assert_close(result, exact.float(), rtol=1e-4, atol=0)

    @pytest.mark.parametrize("gate", GATES)
    @pytest.mark.parametrize("dtype", HALF)
    def test_half_precision_is_rounded_once(self, gate, dtype):
        logits, index = torch.randn(50, dtype=dtype), torch.randint(5, (50,))
        found = gate(normalize=True, eps=1.0).weights(logits.abs(), index, 5, 0)
        expected = gate(normalize=True, eps=1.0).weights(logits.abs().double(), index, 5, 0)
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=0)

    def test_own_gates(self):
        class ReLU(Gate):
            def of(self, logits):
                return logits.relu()

        class Half(Sigmoid):
            def of(self, logits):
                return logits.sigmoid() / 2

        x, edge_index = torch.randn(4, 2, 3), torch.tensor([[0, 1, 2], [3, 3, 0]])
        for mine, formula in ((ReLU(), torch.relu), (Half(), lambda z: z.sigmoid() / 2)):
            _, weights = attend(x, x, x, edge_index, distribution=mine, return_weights=True)
            torch.testing.assert_close(weights, formula((x[edge_index[1]] * x[edge_index[0]]).sum(-1) / math.sqrt(3)))
            found, expected = (
                attend(x, x, x, edge_index, distribution=mine, backend=backend) for backend in ("cpu", "reference")
            )
            torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"eps": 1e-6}, "eps requires normalize=True"),
            ({"normalize": True, "eps": -1.0}, "eps must be finite and not negative; got -1.0"),
            ({"normalize": True, "eps": math.nan}, "eps must be finite and not negative; got nan"),
        ],
    )
    def test_wrong_arguments(self, options, message):
        with pytest.raises(ValueError, match=message):
            Sigmoid(**options)

    def test_repr(self):
        assert [repr(x) for x in (Tanh(), Sigmoid(normalize=True), Identity(True, 0.5))] == [
            "Tanh()",
            "Sigmoid(normalize=True)",
            "Identity(normalize=True, eps=0.5)",
        ]


class TestSinkAndSoftcap:
    @each_flow
    @pytest.mark.parametrize("backend", ["cpu", "reference"])
    def test_a_sink_is_a_neighbour_without_a_value(self, flow, backend):
        graph, edge_index, query, key, value = sparse_case(flow)
        sink = torch.tensor([0.3, -1.2], dtype=torch.double)
        out, weights = attend(
            query, key, value, graph, distribution=Softmax(sink), return_weights=True, backend=backend
        )
        more = torch.stack([torch.full((5,), 6), torch.arange(5)])
        edges = torch.cat([edge_index, more], 1)
        bias = torch.cat([torch.zeros(17, 2, dtype=torch.double), sink.expand(5, 2)])
        key, value = (torch.cat([x, torch.zeros(1, 2, 3, dtype=torch.double)]) for x in (key, value))
        larger = SparseGraph(edges, num_sources=7, num_targets=5)
        expected, all_weights = attend(query, key, value, larger, bias=bias, return_weights=True)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(weights, all_weights[:17])

    @each_flow
    @pytest.mark.parametrize("backend", ["cpu", "reference"])
    def test_a_softcap_bounds_logits_and_bias(self, flow, backend):
        graph, edge_index, query, key, value = sparse_case(flow)
        bias, mask = torch.randn(17, 2, dtype=torch.double), torch.rand(17, 2) < 0.8
        bias[3] = -torch.inf  # still no edge
        options = {"bias": bias, "mask": mask, "return_weights": True, "backend": backend}
        found = attend(query, key, value, graph, distribution=Softmax(softcap=0.7), **options)
        logits = (query[edge_index[1]] * key[edge_index[0]]).sum(-1) / math.sqrt(3) + bias
        options["bias"] = 0.7 * (logits / 0.7).tanh()
        options["bias"][3] = -torch.inf
        torch.testing.assert_close(found, attend(0 * query, key, value, graph, **options))

    @pytest.mark.parametrize("options", [{"sink": torch.tensor([0.5, -1.0])}, {"softcap": 0.5}, {"sink": 1.0}])
    @pytest.mark.parametrize("graph", [CompleteGraph(4), CompleteGraph(4, causal=True), CompleteGraph.packed([1, 3])])
    def test_complete_graphs(self, options, graph):
        x = torch.randn(4, 2, 3, dtype=torch.double)
        edges = SparseGraph(graph.edge_index, num_sources=4, num_targets=4)
        found, expected = (attend(x, x, x, g, distribution=Softmax(**options)) for g in (graph, edges))
        torch.testing.assert_close(found, expected)

    def test_a_learnt_sink_gets_gradients(self):
        sink = torch.zeros(2, requires_grad=True)
        x = torch.randn(4, 2, 3)
        for graph in (torch.tensor([[0, 1, 2], [3, 3, 0]]), CompleteGraph(4)):
            (grad,) = torch.autograd.grad(attend(x, x, x, graph, distribution=Softmax(sink)).square().sum(), sink)
            assert (grad < 0).all()  # the more the sink takes, the smaller the output

    @pytest.mark.parametrize("softcap", [0, -1.0, math.inf, math.nan])
    def test_wrong_softcaps(self, softcap):
        with pytest.raises(ValueError, match="softcap must be positive and finite"):
            Softmax(softcap=softcap)

    @pytest.mark.parametrize("graph", [torch.tensor([[0, 1, 2], [3, 3, 0]]), CompleteGraph(4)])
    @pytest.mark.parametrize("backend", ["auto", "reference"])
    def test_wrong_sinks(self, graph, backend):
        x = torch.randn(4, 2, 3)
        with pytest.raises(ValueError, match=r"sink must be a number, or one per head, \[2\]; got a tensor of \[3\]"):
            attend(x, x, x, graph, distribution=Softmax(torch.zeros(3)), backend=backend)

    def test_a_number_as_the_sink_is_as_exact_as_the_features(self):
        x = torch.randn(4, 2, 3, dtype=torch.double)
        edge_index = torch.tensor([[0, 1, 2], [3, 3, 0]])
        outs = [attend(x, x, x, edge_index, distribution=Softmax(sink=0.1), backend=b) for b in ("cpu", "reference")]
        torch.testing.assert_close(*outs, rtol=1e-14, atol=0)

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: Softmax(softcap=torch.tensor(1.0)), "softcap must be a number, as it gets no gradient"),
            (lambda: Softmax(softcap=torch.tensor(0.0)), "softcap must be a number, as it gets no gradient"),
            (lambda: Softmax(softcap=torch.ones(2)), "softcap must be a number, as it gets no gradient"),
            (lambda: Softmax(softcap="3"), "softcap must be a number; got '3'"),
            (lambda: Softmax(softcap=True), "softcap must be a number; got True"),
            (lambda: Softmax(sink="0"), "sink must be a number or a tensor; got '0'"),
            (lambda: Softmax(True), "sink must be a number or a tensor; got True"),
            (lambda: Sigmoid(True, torch.tensor(1.0)), "eps must be a number, as it gets no gradient"),
            (lambda: Sigmoid(True, "1"), "eps must be a number; got '1'"),
            (lambda: Sigmoid(normalize="yes"), "normalize must be True or False; got 'yes'"),
            (lambda: Tanh(None), "normalize must be True or False; got None"),
            (lambda: Hard("yes"), "sample must be True or False; got 'yes'"),
            (lambda: Hard(torch.tensor([True, False])), "sample must be True or False; got tensor"),
            (lambda: Hard(True, "straight_through", "1"), "temperature must be a number; got '1'"),
            (lambda: Hard(expected="0.5"), "expected must be a number; got '0.5'"),
            (lambda: Hard(generator=3), "generator must be a torch.Generator or None; got 3"),
            (lambda: LocalGaussian(torch.zeros(4), "2"), "width must be a number; got '2'"),
            (lambda: LocalGaussian(torch.zeros(4), True), "width must be a number; got True"),
            (lambda: LocalGaussian(torch.zeros(4), torch.ones(4)), r"width must be a number.* of shape \[4\]"),
            (lambda: TopK("3"), "k must be a positive integer, .*; got '3'"),
            (lambda: WithinTypes(torch.tensor([0]), num_types="3"), "num_types must be a positive number.*; got '3'"),
            (lambda: WithinTypes(torch.tensor([0]), num_types=1.0), "num_types must be a positive number.*; got 1.0"),
        ],
    )
    def test_arguments_of_other_types(self, make, message):
        with pytest.raises(TypeError, match=message):
            make()

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: Softmax(math.nan), "sink must be finite or minus infinity; got nan"),
            (lambda: Softmax(math.inf), "sink must be finite or minus infinity; got inf"),
            (lambda: Softmax(torch.zeros(2) * 1j), "sink must hold real numbers; got .* torch.complex64"),
            (lambda: LocalGaussian(torch.zeros(4) * 1j, 2), "centres must hold real numbers; got .* torch.complex64"),
            (lambda: Hard(True, "straight_through", math.inf), "temperature must be positive and finite; got inf"),
        ],
    )
    def test_numbers_without_a_meaning(self, make, message):
        with pytest.raises(ValueError, match=message):
            make()

    @pytest.mark.parametrize("number", [1, np.float32(0.5), np.int64(1)])
    def test_numbers_and_flags_of_every_kind(self, number):
        x, edge_index = torch.randn(4, 2, 3), torch.tensor([[0, 1, 2], [3, 3, 0]])
        for distribution in (
            Softmax(number, number),
            Sigmoid(np.True_, number),
            Identity(0),
            Hard(np.False_, "straight_through", number, number),
            Hard(1, "straight_through", torch.tensor(0.5, requires_grad=True)),
            LocalGaussian(torch.zeros(4), number),
            LocalGaussian(torch.zeros(4), torch.tensor(2.0, requires_grad=True)),
            Softmax(-math.inf),
            TopK(np.int64(2)),
        ):
            for backend in ("auto", "reference"):
                assert attend(x, x, x, edge_index, distribution=distribution, backend=backend).isfinite().all()

    @pytest.mark.parametrize(
        "distribution",
        [Softmax(torch.zeros(2, device="meta")), LocalGaussian(torch.zeros(4, device="meta"), 2)],
        ids=["sink", "centres"],
    )
    def test_tensors_elsewhere(self, distribution):
        x = torch.randn(4, 2, 3)
        with pytest.raises(ValueError, match="has a tensor on meta, the features are on cpu"):
            attend(x, x, x, torch.tensor([[0, 1, 2], [3, 3, 0]]), distribution=distribution)

    def test_repr(self):
        assert [repr(x) for x in (Softmax(), Softmax(0.5), Softmax(torch.zeros(3), 2.0))] == [
            "Softmax()",
            "Softmax(sink=0.5)",
            "Softmax(sink=[3], softcap=2.0)",
        ]


class TestLocalGaussian:
    centres = torch.tensor([0.0, 1.3, 7.0, -2.0, 2.5], dtype=torch.double)

    def by_hand(self, logits, edge_index, centres, width):
        """The formula, edge by edge."""
        weights = torch.zeros_like(logits)
        for target, edges in edges_of(edge_index[1], 5):
            for head in range(logits.size(1)):
                total = sum(math.exp(logits[e, head]) for e in edges)
                for e in edges:
                    distance = float(edge_index[0, e]) - float(centres[target])
                    near = math.exp(-(distance**2) / (2 * (width / 2) ** 2))
                    weights[e, head] = math.exp(logits[e, head]) / total * near
        return weights

    @each_flow
    @pytest.mark.parametrize("width", [0.5, 2, 3.7])
    def test_formula_on_sparse_graphs(self, width, flow):
        graph, edge_index, query, key, value = sparse_case(flow)
        near = LocalGaussian(self.centres, width)
        out, weights = attend(query, key, value, graph, distribution=near, return_weights=True)
        logits = (query[edge_index[1]] * key[edge_index[0]]).sum(-1) / math.sqrt(3)
        expected = self.by_hand(logits, edge_index, self.centres, width)
        torch.testing.assert_close(weights, expected)
        sums = torch.zeros(5, 2, 3, dtype=torch.double)
        sums.index_add_(0, edge_index[1], expected.unsqueeze(-1) * value[edge_index[0]])
        torch.testing.assert_close(out, sums)

    def test_with_self_loops(self):
        """Loops come after the other edges, and have sources, too."""
        edge_index = torch.tensor([[0, 2, 1, 1], [1, 1, 0, 1]])
        x = torch.randn(3, 1, 2, dtype=torch.double)
        near = LocalGaussian(torch.tensor([0.5, 2.0, 9.0]), 3)
        graph = SparseGraph(edge_index, num_sources=3, num_targets=3, self_loops=True)
        _, weights = attend(x, x, x, graph, distribution=near, return_weights=True)
        _, soft = attend(x, x, x, graph, return_weights=True)
        source, target = graph.edge_index
        assert source.tolist() == [0, 2, 1, 0, 1, 2]
        distance = source - torch.tensor([0.5, 2.0, 9.0], dtype=torch.double)[target]
        torch.testing.assert_close(weights, soft * torch.exp(-distance.square() / (2 * 1.5**2)).unsqueeze(-1))

    @pytest.mark.parametrize("backend", ["dense", "reference"])
    def test_centres_of_each_element_of_a_batch(self, backend):
        query, key, centres = torch.randn(2, 3, 4, 1, 3), torch.randn(2, 3, 6, 1, 3), torch.rand(2, 3, 4) * 6
        graph = CompleteGraph(4, 6)
        out = attend(query, key, key, graph, distribution=LocalGaussian(centres, 2), backend=backend)
        for i in range(2):
            for j in range(3):
                alone = LocalGaussian(centres[i, j], 2)
                expected = attend(query[i, j], key[i, j], key[i, j], graph, distribution=alone, backend=backend)
                torch.testing.assert_close(out[i, j], expected)
        shared = attend(query, key, key, graph, distribution=LocalGaussian(centres[0, 0], 2), backend=backend)
        torch.testing.assert_close(shared[0, 0], out[0, 0])
        assert not torch.allclose(shared[1, 2], out[1, 2])

    @each_flow
    def test_gradients(self, flow):
        graph, _, query, key, value = sparse_case(flow)

        def function(centres, query, key):
            near = LocalGaussian(centres, 2.5)
            return attend(query, key, value, graph, distribution=near, return_weights=True)

        leaves = [x.clone().requires_grad_() for x in (self.centres, query, key)]
        assert torch.autograd.gradcheck(function, leaves)

    @pytest.mark.parametrize("dtype", HALF)
    def test_half_precision_tells_far_places_apart(self, dtype):
        """Of 16 bits, places near 1000 would be rounded to the next 4, or 1."""
        query, key = torch.randn(1, 1, 4, dtype=dtype), torch.randn(1100, 1, 4, dtype=dtype)
        found = []
        for kind in (dtype, torch.float64):
            near = LocalGaussian(torch.tensor([1000.0], dtype=kind), 3)
            graph = CompleteGraph(1, 1100)
            x = (query.to(kind), key.to(kind), key.to(kind))
            found.append(attend(*x, graph, distribution=near, return_weights=True, backend="reference")[1].flatten())
        actual, exact = found
        assert actual.dtype == dtype
        assert_as_exact_as(actual, exact.to(dtype), exact)

    def test_packed_graphs(self):
        """The reference serves; a source's number counts through all blocks."""
        x, graph = torch.randn(5, 1, 3), CompleteGraph.packed([2, 3])
        centres = torch.tensor([0.0, 1.0, 2.0, 3.5, 4.0])
        _, weights = attend(x, x, x, graph, distribution=LocalGaussian(centres, 2), return_weights=True)
        for block, first, last in ((0, 0, 2), (1, 2, 5)):
            part, near = x[first:last], LocalGaussian(centres[first:last] - first, 2)
            _, expected = attend(part, part, part, CompleteGraph(last - first), distribution=near, return_weights=True)
            torch.testing.assert_close(weights[block], expected)

    def test_wrong_ones(self):
        x, graph = torch.randn(2, 4, 1, 3), CompleteGraph(4)
        with pytest.raises(TypeError, match="centres must be a tensor, one per target; got float"):
            LocalGaussian(2.0, 3)
        for width in (0, -1.0, math.nan):
            with pytest.raises(ValueError, match=f"width must be positive; got {width}"):
                LocalGaussian(torch.zeros(4), width)
        for shape in ((), (3,), (2, 3), (3, 4), (4, 1), (1, 4)):
            for backend in ("dense", "reference"):
                with pytest.raises(ValueError, match=r"one centre per target, \[2, 4\]; got"):
                    attend(x, x, x, graph, distribution=LocalGaussian(torch.zeros(shape), 2), backend=backend)
        sparse = torch.tensor([[0, 1], [1, 2]])
        with pytest.raises(ValueError, match=r"one centre per target, \[4\]; got \[2\]"):
            attend(x[0], x[0], x[0], sparse, distribution=LocalGaussian(torch.zeros(2), 2))
        with pytest.raises(ValueError, match="LocalGaussian needs to know the sources"):
            LocalGaussian(torch.zeros(4), 2).weights(torch.zeros(2, 1), torch.tensor([0, 1]), 4, 0)

    def test_sources_are_bound_to_a_copy(self):
        near = LocalGaussian(torch.zeros(2), 2)
        bound = near.with_sources(torch.tensor([0, 1]))
        assert bound is not near
        weights = bound.weights(torch.zeros(2, 1), torch.tensor([0, 0]), 2, 0)
        torch.testing.assert_close(weights, torch.tensor([[0.5], [0.5 * math.exp(-0.5)]]))
        with pytest.raises(ValueError, match="with_sources"):
            near.weights(torch.zeros(2, 1), torch.tensor([0, 0]), 2, 0)
        assert str(near) == "LocalGaussian(centres=[2], width=2)"


#: Three neighbours, one, none, and two that cannot be chosen.
INDEX = torch.tensor([0, 1, 0, 0, 3, 3])
LOGITS = torch.tensor([[0.3, -1.0], [5.0, 0.0], [1.1, 2.0], [-0.4, 0.5], [-torch.inf] * 2, [-torch.inf] * 2]).double()


class TestHard:
    @pytest.mark.parametrize("estimator", ["reinforce", "straight_through"])
    @pytest.mark.parametrize("dim", [0, 1])
    def test_it_draws_with_the_probabilities_of_the_softmax(self, dim, estimator):
        count = 20_000
        logits = LOGITS.expand(count, -1, -1) if dim else LOGITS.repeat(1, count)
        drawn = Hard(estimator=estimator, generator=torch.Generator().manual_seed(1)).weights(logits, INDEX, 4, dim)
        drawn = drawn if dim else drawn.view(6, count, 2).transpose(0, 1)
        assert ((drawn == 0) | (drawn == 1)).all()
        expected = gattn.softmax(LOGITS, INDEX, 4)
        error = (expected * (1 - expected) / count).sqrt()
        assert ((drawn.mean(0) - expected).abs() <= 4 * error).all()
        # One neighbour for each target, and heads draw by themselves.
        assert (drawn[:, INDEX == 0].sum(1) == 1).all()
        assert (drawn[:, 1] == 1).all()
        assert (drawn[:, 4:] == 0).all()
        both = (drawn[:, 0, 0] * drawn[:, 2, 1]).mean()
        together = expected[0, 0] * expected[2, 1]
        assert (both - together).abs() <= 4 * (together * (1 - together) / count).sqrt()

    @pytest.mark.parametrize("estimator", ["reinforce", "straight_through"])
    def test_the_most_probable_one_and_the_first_of_equals(self, estimator):
        logits = torch.tensor([1.0, 3.0, 3.0, 0.0, -2.0, -2.0, -torch.inf])
        index = torch.tensor([0, 0, 0, 2, 2, 1, 1])
        hard = Hard(sample=False, estimator=estimator)
        assert hard.weights(logits, index, 4, 0).tolist() == [0, 1, 0, 1, 0, 1, 0]
        assert hard.weights(logits.flip(0), index.flip(0), 4, 0).tolist() == [0, 1, 0, 1, 1, 0, 0]

    @each_flow
    def test_on_sparse_graphs(self, flow):
        """Of the edges that reach a target, the first with its largest logit."""
        graph, edge_index, query, key, value = sparse_case(flow)
        hard = Hard(sample=False)
        out, weights = attend(query, key, value, graph, distribution=hard, return_weights=True)
        logits = (query[edge_index[1]] * key[edge_index[0]]).sum(-1) / math.sqrt(3)
        assert hard.log_prob.shape == hard.entropy.shape == (5, 2)
        for target, edges in edges_of(edge_index[1], 5):
            for head in range(2):
                row = logits[edges, head].tolist()
                if not row:
                    assert (out[target] == 0).all()
                    assert hard.log_prob[target, head] == hard.entropy[target, head] == 0
                    continue
                best = row.index(max(row))
                assert weights[edges, head].tolist() == [float(place == best) for place in range(len(row))]
                torch.testing.assert_close(out[target, head], value[edge_index[0, edges[best]], head])
                probability = math.exp(row[best]) / sum(map(math.exp, row))
                assert hard.log_prob[target, head].item() == pytest.approx(math.log(probability))

    @pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
    def test_log_prob_and_entropy(self, batch):
        logits = torch.randn(*batch, 6, 2, dtype=torch.double)
        logits[..., 4:, :] = -torch.inf
        hard = Hard()
        weights = hard.weights(logits, INDEX, 4, -2)
        assert hard.log_prob.shape == hard.entropy.shape == (*batch, 4, 2)
        probabilities = gattn.softmax(logits, INDEX, 4, -2)
        for target, edges in edges_of(INDEX, 4):
            p, chosen = probabilities[..., edges, :], weights[..., edges, :]
            log_prob, entropy = hard.log_prob[..., target, :], hard.entropy[..., target, :]
            if target >= 2:
                assert (log_prob == 0).all()
                assert (entropy == 0).all()
            else:
                torch.testing.assert_close(log_prob.exp(), (p * chosen).sum(-2))
                torch.testing.assert_close(entropy, -(p * p.log()).sum(-2))

    @pytest.mark.parametrize("sample", [False, True])
    def test_their_gradients(self, sample):
        logits = torch.randn(6, 2, dtype=torch.double, requires_grad=True)
        dead = torch.zeros(6, 2, dtype=torch.bool)
        dead[4:], dead[2, 0] = True, True

        def function(logits):
            hard = Hard(sample, generator=torch.Generator().manual_seed(3))
            hard.weights(logits.masked_fill(dead, -torch.inf), INDEX, 4, 0)
            return hard.log_prob, hard.entropy

        assert torch.autograd.gradcheck(function, logits)
        log_prob, entropy = function(logits)
        (grad,) = torch.autograd.grad(log_prob.sum() + entropy.sum(), logits)
        assert (grad[dead] == 0).all()
        assert (grad[[0, 3], 1] != 0).all()

    @pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda hard: pickle.loads(pickle.dumps(hard))])
    def test_copies_start_without_choices(self, copied):
        hard, logits = Hard(sample=False), torch.randn(6, 2, requires_grad=True)
        hard.weights(logits, INDEX, 4, 0)
        other = copied(hard)
        assert not hasattr(other, "log_prob")
        other.weights(logits.detach(), INDEX, 4, 0)
        assert hard.log_prob.requires_grad
        assert torch.equal(other.log_prob, hard.log_prob)

    def test_threads_have_choices_of_their_own(self):
        hard, ones = Hard(sample=False), torch.ones(6, 2)
        hard.weights(ones, INDEX, 4, 0)
        expected = hard.log_prob, hard.entropy
        worker = threading.Thread(target=hard.weights, args=(ones[:2], INDEX[:2], 2, 0))
        worker.start()
        worker.join()
        assert hard.log_prob is expected[0]
        assert hard.entropy is expected[1]

    def test_probabilities_too_small_for_their_type(self):
        """Gradients are finite where a probability is zero, or has lost its digits."""
        logits = torch.tensor([0.0, -200.0, 0.0, -100.0], requires_grad=True)
        hard = Hard(sample=False)
        hard.weights(logits, torch.tensor([0, 0, 1, 1]), 2, 0)
        assert hard.log_prob.tolist() == [0, 0]
        assert (hard.entropy < 1e-30).all()
        (hard.log_prob.sum() + hard.entropy.sum()).backward()
        assert logits.grad.isfinite().all()

    def test_reinforce_has_no_gradient_of_its_own(self):
        logits = torch.randn(6, 2, requires_grad=True)
        assert not Hard().weights(logits, INDEX, 4, 0).requires_grad
        assert not Hard(False, "straight_through").weights(logits, INDEX, 4, 0).requires_grad
        assert Hard(True, "straight_through").weights(logits, INDEX, 4, 0).requires_grad

    @pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
    def test_straight_through_is_the_slope_of_a_softmax_with_the_same_noise(self, temperature):
        logits = LOGITS.clone().requires_grad_()
        hard = Hard(estimator="straight_through", temperature=temperature, generator=torch.Generator().manual_seed(5))
        weights = hard.weights(logits, INDEX, 4, 0)
        noise = -torch.empty_like(LOGITS).exponential_(generator=torch.Generator().manual_seed(5)).log()
        for target, edges in edges_of(INDEX, 2):
            assert torch.equal(weights[edges].argmax(0), (LOGITS + noise)[edges].argmax(0)), target
        assert (weights.detach().sum(0) == 2).all()
        incoming = torch.randn(6, 2, dtype=torch.double)
        (grad,) = torch.autograd.grad((weights * incoming).sum(), logits)
        leaf = LOGITS.clone().requires_grad_()
        relaxed = gattn.softmax((leaf + noise) / temperature, INDEX, 4)
        (expected,) = torch.autograd.grad((relaxed * incoming).sum(), leaf)
        torch.testing.assert_close(grad, expected)
        assert grad[:4].abs().sum() > 0

    def test_a_one_stays_a_one(self):
        """In straight-through's sum, too, of which the slope is to vanish."""
        weights = Hard(estimator="straight_through").weights(
            torch.randn(3000, 1), torch.arange(1000).repeat(3), 1000, 0
        )
        assert weights.unique().tolist() == [0, 1]

    @pytest.mark.parametrize("backend", ["dense", "reference"])
    @pytest.mark.parametrize("estimator", ["reinforce", "straight_through"])
    def test_always_expected_is_soft(self, estimator, backend):
        query, key = torch.randn(2, 4, 2, 3, dtype=torch.double), torch.randn(2, 5, 2, 3, dtype=torch.double)
        graph, found = CompleteGraph(4, 5), []
        hard = Hard(estimator=estimator, expected=1.0)
        for distribution in (hard, "softmax"):
            leaf = query.clone().requires_grad_()
            out, weights = attend(
                leaf, key, key, graph, distribution=distribution, return_weights=True, backend=backend
            )
            found.append((out, weights, torch.autograd.grad(out.square().sum(), leaf)[0]))
        torch.testing.assert_close(*found)
        assert (hard.log_prob == 0).all(), "nothing was chosen"
        _, weights = found[1][:2]
        torch.testing.assert_close(hard.entropy, -(weights * weights.log()).sum(-1).transpose(-1, -2))

    def test_expected_is_a_probability_for_each_target_and_head(self):
        count = 4000
        logits = LOGITS[:4].expand(count, -1, -1)
        hard = Hard(expected=0.3, generator=torch.Generator().manual_seed(2))
        weights = hard.weights(logits, INDEX[:4], 2, -2)[:, INDEX[:4] == 0]
        soft = torch.isclose(weights, gattn.softmax(LOGITS, INDEX, 4)[:4][INDEX[:4] == 0]).all(1)
        assert ((weights == 0) | (weights == 1)).all(1)[~soft].all()
        assert torch.equal(hard.log_prob[:, 0] == 0, soft)
        error = math.sqrt(0.3 * 0.7 / count)
        assert ((soft.double().mean(0) - 0.3).abs() < 4 * error).all()
        assert ((soft.all(1).double().mean() - 0.09).abs() < 4 * error).all()
        assert (Hard(sample=False, expected=1.0).weights(logits, INDEX[:4], 2, -2) % 1 == 0).all(), "no drawing"

    def test_masked_and_empty_rows_get_zeros_and_finite_gradients(self):
        x = torch.randn(4, 2, 3, dtype=torch.double)
        mask = torch.ones(2, 4, 4, dtype=torch.bool)
        mask[:, 1], mask[0, 2] = False, False
        for estimator in ("reinforce", "straight_through"):
            for backend in ("dense", "reference"):
                leaf, hard = x.clone().requires_grad_(), Hard(estimator=estimator, expected=0.5)
                out = attend(leaf, leaf, leaf, CompleteGraph(4), mask=mask, distribution=hard, backend=backend)
                (grad,) = torch.autograd.grad(out.sum() + hard.log_prob.sum() + hard.entropy.sum(), leaf)
                assert (out[1] == 0).all()
                assert (out[2, 0] == 0).all()
                assert (hard.log_prob[1] == 0).all()
                assert (hard.entropy[1] == 0).all()
                assert grad.isfinite().all()

    def test_nan_is_not_hidden(self):
        logits = LOGITS.clone()
        logits[2, 0] = torch.nan
        for sample in (False, True):
            weights = Hard(sample=sample).weights(logits, INDEX, 4, 0)
            assert weights.isnan().tolist() == [[entry, False] for entry in (True, False, True, True, False, False)]

    def test_random_numbers(self):
        logits = torch.randn(300, 2)
        index = torch.arange(100).repeat(3)

        def draw(generator=None, **options):
            hard = Hard(generator=generator, **options)
            return hard.weights(logits, index, 100, 0)

        for options in ({}, {"estimator": "straight_through"}, {"expected": 0.5}):
            for seeded in (lambda seed: torch.Generator().manual_seed(seed), torch.manual_seed):
                draws = []
                for seed in (1, 1, 2):
                    generator = seeded(seed)
                    draws.append(draw(None if seeded is torch.manual_seed else generator, **options))
                assert torch.equal(draws[0], draws[1])
                assert not torch.equal(draws[0], draws[2])
        state = torch.get_rng_state()
        draw(torch.Generator().manual_seed(1), expected=0.5)
        draw(sample=False)
        assert torch.equal(torch.get_rng_state(), state)

    @pytest.mark.parametrize("dtype", HALF)
    @pytest.mark.parametrize("backend", ["dense", "reference"])
    def test_half_precision(self, backend, dtype):
        """Choices are one or zero, and their probabilities are not rounded on the way."""
        x = torch.randn(9, 2, 8).to(dtype)
        hard, exact = Hard(sample=False), Hard(sample=False)
        out, weights = attend(x, x, x, CompleteGraph(9), distribution=hard, return_weights=True, backend=backend)
        wide = x.double()
        expected = attend(wide, wide, wide, CompleteGraph(9), distribution=exact)
        assert out.dtype == weights.dtype == dtype
        assert hard.log_prob.dtype == torch.float32
        assert torch.equal(out.double(), expected)
        torch.testing.assert_close(hard.log_prob.double(), exact.log_prob, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(hard.entropy.double(), exact.entropy, rtol=1e-4, atol=1e-4)
        assert hard.weights(LOGITS.to(dtype), INDEX, 4, 0).dtype == dtype
        assert hard.log_prob.dtype == hard.entropy.dtype == torch.float32

    def test_dropout(self):
        x = torch.randn(300, 1, 2)
        for backend in ("dense", "reference"):
            out, weights = attend(
                *(x, x, x, CompleteGraph(300)),
                distribution=Hard(sample=False),
                dropout=0.4,
                training=True,
                return_weights="dropped",
                backend=backend,
            )
            assert weights.unique().tolist() == pytest.approx([0, 1 / 0.6])
            assert 0.45 < weights.count_nonzero() / 300 < 0.75
            torch.testing.assert_close(out[:, 0], weights[0] @ x[:, 0])

    def test_packed_graphs(self):
        x, hard = torch.randn(5, 1, 3), Hard(sample=False)
        _, weights = attend(x, x, x, CompleteGraph.packed([2, 3]), distribution=hard, return_weights=True)
        for block, part in zip(weights, x.split([2, 3]), strict=True):
            logits = part[:, 0] @ part[:, 0].t()
            assert torch.equal(block[0].argmax(-1), logits.argmax(-1))
            assert (block.sum(-1) == 1).all()

    def test_wrong_ones(self):
        for options, message in (
            ({"estimator": "gumbel"}, "estimator must be 'reinforce' or 'straight_through'; got 'gumbel'"),
            ({"temperature": 0.0}, "temperature must be positive and finite; got 0.0"),
            ({"temperature": math.nan}, "temperature must be positive and finite; got nan"),
            ({"temperature": 0.5}, "temperature is that of estimator='straight_through'; leave it at 1"),
            ({"expected": 1.5}, "expected must be a probability between 0 and 1; got 1.5"),
            ({"expected": -0.1}, "expected must be a probability between 0 and 1; got -0.1"),
        ):
            with pytest.raises(ValueError, match=message):
                Hard(**options)
        assert str(Hard()) == "Hard(sample=True, estimator='reinforce')"


@pytest.mark.parametrize("distribution", [Hard(sample=False), LocalGaussian(torch.zeros(4), 2)], ids=["hard", "local"])
class TestBackends:
    x = torch.randn(4, 2, 3)

    def test_every_backend_serves_them(self, distribution):
        for graph in (CompleteGraph(4), torch.tensor([[0, 1], [1, 2]])):
            expected = attend(self.x, self.x, self.x, graph, distribution=distribution, backend="reference")
            for backend in ("cpu", "auto"):
                out = attend(self.x, self.x, self.x, graph, distribution=distribution, backend=backend)
                torch.testing.assert_close(out, expected)

    def test_packed_graphs_are_left_to_the_reference(self, distribution):
        graph = CompleteGraph.packed([1, 3])
        with pytest.raises(ValueError, match="on packed graphs it supports the plain softmax, linear attention, and "):
            attend(self.x, self.x, self.x, graph, distribution=distribution, backend="dense")
        out = attend(self.x, self.x, self.x, graph, distribution=distribution)
        expected = attend(self.x, self.x, self.x, graph, distribution=distribution, backend="reference")
        torch.testing.assert_close(out, expected)

    def test_subclasses_are_not_taken_for_their_parents(self, distribution):
        class Mine(type(distribution)):
            def weights(self, logits, index, num_targets, dim):
                return super().weights(logits, index, num_targets, dim) * 2

        mine = Mine(sample=False) if isinstance(distribution, Hard) else Mine(torch.zeros(4), 2)
        out = attend(self.x, self.x, self.x, CompleteGraph(4), distribution=mine)
        expected = attend(self.x, self.x, self.x, CompleteGraph(4), distribution=distribution)
        torch.testing.assert_close(out, 2 * expected)
        with pytest.raises(ValueError, match="it supports gattn's own distributions, not "):
            attend(self.x, self.x, self.x, CompleteGraph(4), distribution=mine, backend="dense")

    def test_of_other_scores(self, distribution):
        """Whatever the score, a distribution gets its logits."""
        vector = torch.randn(2, 3)
        for score in (DotScore(0.3), gattn.AdditiveScore(vector, "tanh"), gattn.AdditiveScore(vector)):
            results = [
                attend(self.x, self.x, self.x, CompleteGraph(4), score=score, distribution=distribution, backend=name)
                for name in ("dense", "reference")
            ]
            torch.testing.assert_close(*results)


@pytest.mark.slow
def test_numbers_that_the_compiler_does_not_know_pass_the_checks():
    x, types = torch.randn(4, 2, 3), torch.tensor([0, 1, 0])

    def function(x, number, flag):
        score = DotScore(number, number, clamp=x.size(0))
        for distribution in (Softmax(number, number), Sigmoid(flag, number), WithinTypes(types, num_types=x.size(0))):
            x = attend(x, x, x, torch.tensor([[0, 1, 2], [3, 3, 0]]), score=score, distribution=distribution)
        return attend(x, x, x, CompleteGraph(x.size(0), causal=flag), distribution=TopK(x.size(0)))

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="eager", dynamic=True)
    for number in (0.5, 0.25):
        torch.testing.assert_close(compiled(x, number, 1), function(x, number, 1))


@pytest.mark.parametrize(("dynamic", "num_types"), [(None, 2), (True, None)])
def test_types_of_edges_and_self_loops_in_compiled_code(dynamic, num_types):
    """The number of edges depends on data there: on how many self-loops are replaced."""

    def function(x, edge_index, types):
        graph = SparseGraph(edge_index, 4, 4, self_loops=True)
        return attend(x, x, x, graph, distribution=WithinTypes(types, num_types=num_types))

    x, edge_index = torch.randn(4, 2, 3), torch.tensor([[0, 1, 2, 2, 3], [1, 1, 1, 3, 0]])
    types = torch.tensor([0, 1, 0, 1, 1, 0, 1, 0])
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    torch.testing.assert_close(compiled(x, edge_index, types), function(x, edge_index, types))
    with pytest.raises(RuntimeError):
        compiled(x, torch.tensor([[0, 1, 2, 2, 3], [1, 0, 1, 3, 0]]), types)  # a self-loop less
    with pytest.raises(ValueError, match="the types of 7 edges, but the graph has 8"):
        function(x, edge_index, types[:7])
