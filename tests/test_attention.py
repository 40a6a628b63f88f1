import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.nn.conv import MessagePassing

import gattn
from gattn import AdditiveScore, CompleteGraph, DotScore, GATScore, Projected, SparseGraph, attend, settings
from gattn.attention import Attention
from gattn.ops import choose
from gattn.testing import random_edge_index
from tests.cases import DTYPES, HALF, SCORES, make_score

N, M, E, H, C, CV = 6, 8, 30, 3, 4, 5
SLOPE = 0.3
VECTOR = torch.linspace(-1, 1, H * C, dtype=torch.double).view(H, C)


def call(score, graph, *, vector=VECTOR, **inputs):
    """`attend` by a score's name; an edge list is one between M sources and N targets."""
    graph = SparseGraph(graph, num_sources=M, num_targets=N) if isinstance(graph, torch.Tensor) else graph
    return attend(graph=graph, score=make_score(score, vector, slope=SLOPE), **{"query": None, **inputs})


def make_nodes(score, batch=()):
    """Float64 inputs that nodes have."""
    shapes = {**SCORES[score].shapes(N, M, H, C), "value": (M, H, CV)}
    return {name: torch.randn(*batch, *shape, dtype=torch.double) for name, shape in shapes.items() if name != "vector"}


def make_inputs(score, batch=(), num_edges=E):
    """The same, and every per-edge term."""
    nodes = make_nodes(score, batch)
    return {
        **nodes,
        "edge": torch.randn(num_edges, *nodes["key"].shape[len(batch) + 1 :], dtype=torch.double),
        "bias": torch.randn(num_edges, H, dtype=torch.double),
        "mask": torch.rand(num_edges, H) < 0.8,
        "edge_value": torch.randn(num_edges, H, CV, dtype=torch.double),
    }


def dense(score, edge_index, key, value, query=None, edge=None, bias=None, mask=None, edge_value=None):
    """Attention written out, target by target, edge by edge, head by head."""
    weights = torch.zeros(edge_index.size(1), H, dtype=torch.double)
    out = torch.zeros(N, H, CV, dtype=torch.double)
    for i in range(N):
        edges = (edge_index[1] == i).nonzero().flatten().tolist()
        for h in range(H):
            logits = []
            for e in edges:
                key_j = key[edge_index[0, e], h] + (0 if edge is None else edge[e, h])
                query_i = torch.zeros_like(key_j) if query is None else query[i, h]
                logit = SCORES[score].logit(query_i, key_j, VECTOR[h], None, SLOPE)
                logit = logit if bias is None else logit + bias[e, h]
                logits.append(logit if mask is None or mask[e, h] else logit * 0 - math.inf)
            if not any(logit > -math.inf for logit in logits):
                continue
            for e, alpha in zip(edges, torch.stack(logits).softmax(0), strict=True):
                weights[e, h] = alpha
                message = value[edge_index[0, e], h] + (0 if edge_value is None else edge_value[e, h])
                out[i, h] += alpha * message
    return out, weights


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(
    "terms", [(), ("edge",), ("bias",), ("mask",), ("edge_value",), ("edge", "bias", "mask", "edge_value")]
)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_scores_against_the_written_out_formula(score, terms, backend):
    edge_index = random_edge_index(M, N, E)
    inputs = {name: x for name, x in make_inputs(score).items() if name in ("query", "key", "value", *terms)}
    out, weights = call(score, edge_index, return_weights=True, backend=backend, **inputs)
    expected, expected_weights = dense(score, edge_index, **inputs)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(weights, expected_weights)
    assert (out[N - 1] == 0).all(), "the last target has no neighbour"


@pytest.mark.parametrize("backend", ["cpu", "triton", "reference"])
@pytest.mark.parametrize("score", [*SCORES, "custom"])
@pytest.mark.parametrize("is_value", [False, True])
def test_projected_edges_are_what_the_product_gives(score, backend, is_value):
    inputs = make_inputs("dot" if score == "custom" else score)
    wide = inputs["key"].shape[2:]
    if is_value and not wide:
        pytest.skip("scalars are no values")
    own = UnknownDot() if score == "custom" else make_score(score, VECTOR, slope=SLOPE)
    value = torch.randn(M, H, C, dtype=torch.double)
    graph = SparseGraph(random_edge_index(M, N, E), num_sources=M, num_targets=N)

    def attended(**terms):
        query = inputs.get("query")
        return attend(query, inputs["key"], value, graph, score=own, backend=backend, return_weights=True, **terms)

    features, projection = torch.randn(E, 5, dtype=torch.double), torch.randn(H, *wide, 5, dtype=torch.double)
    product = torch.einsum("ed,h...d->eh...", features, projection)
    beside = torch.randn(E, H, C, dtype=torch.double)
    edge = Projected(features, projection)
    for projected, plain in [(True, product), (edge, product), (beside, beside)] if is_value else [(None, None)]:
        found = attended(edge=edge, edge_value=projected)
        torch.testing.assert_close(found, attended(edge=product, edge_value=plain))


class UnknownDot(DotScore):
    """A score whose formula the kernels cannot know."""

    def logits(self, query, key, edge):
        return 2 * super().logits(query, key, edge)


def test_an_example_to_check_by_hand():
    # Target 0 sees sources 0 and 1 with logits log 1 and log 3, so weights 1/4 and 3/4 of values 4 and 8.
    query = torch.tensor([[[1.0]]])
    key = torch.tensor([[[math.log(1)]], [[math.log(3)]]])
    value = torch.tensor([[[4.0]], [[8.0]]])
    out, weights = attend(query, key, value, torch.tensor([[0, 1], [0, 0]]), return_weights=True)
    torch.testing.assert_close(weights.flatten(), torch.tensor([0.25, 0.75]))
    torch.testing.assert_close(out.flatten(), torch.tensor([7.0]))


@pytest.mark.parametrize("score", SCORES)
def test_gradcheck(score):
    edge_index = random_edge_index(M, N, 12)
    inputs = make_inputs(score, num_edges=12)
    mask = inputs.pop("mask")
    if SCORES[score].has_vector:
        inputs["vector"] = torch.randn(H, C, dtype=torch.double)
    leaves = [tensor.requires_grad_() for tensor in inputs.values()]

    def function(*leaves):
        return call(score, edge_index, mask=mask, return_weights=True, **dict(zip(inputs, leaves, strict=True)))

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("batch", [(2,), (2, 3)])
def test_batches_over_one_graph(score, batch):
    edge_index = random_edge_index(M, N, E)
    inputs = make_inputs(score, batch)
    out, weights = call(score, edge_index, return_weights=True, **inputs)
    assert out.shape == (*batch, N, H, CV)
    assert weights.shape == (*batch, E, H)
    one = {
        name: value[(1,) * len(batch)] if name in ("query", "key", "value") else value for name, value in inputs.items()
    }
    torch.testing.assert_close(out[(1,) * len(batch)], call(score, edge_index, **one))


def test_masks_of_a_batch():
    x, edge_index = torch.randn(2, 5, H, C), random_edge_index(5, num_edges=12)
    mask = torch.rand(2, 12) < 0.5
    out = attend(x, x, x, edge_index, mask=mask)
    for i in range(2):
        torch.testing.assert_close(out[i], attend(x[i], x[i], x[i], edge_index, mask=mask[i]))
    torch.testing.assert_close(out, attend(x, x, x, edge_index, mask=mask.unsqueeze(-1).expand(2, 12, H)))


def test_return_weights_takes_any_false_value():
    x = torch.randn(3, H, C)
    assert isinstance(attend(x, x, x, CompleteGraph(3), return_weights=0), torch.Tensor)


def test_query_none_is_a_target_side_term_of_zero():
    edge_index = random_edge_index(M, N, E)
    inputs = make_inputs("gat")
    graph = SparseGraph(edge_index, num_targets=N)
    out = attend(None, inputs["key"], inputs["value"], graph, score=GATScore())
    zero = torch.zeros_like(inputs["query"])
    torch.testing.assert_close(out, attend(zero, inputs["key"], inputs["value"], graph, score=GATScore()))


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_grouped_queries(backend):
    edge_index = random_edge_index(M, N, E)
    query, key, value = torch.randn(N, 6, C), torch.randn(M, 2, C), torch.randn(M, 2, CV)
    grouped = attend(query, key, value, edge_index, backend=backend)
    repeated = attend(query, key.repeat_interleave(3, 1), value.repeat_interleave(3, 1), edge_index)
    torch.testing.assert_close(grouped, repeated)


class TestCompleteGraph:
    @pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
    @pytest.mark.parametrize("causal", [False, True])
    def test_equals_scaled_dot_product_attention(self, batch, causal):
        query, key, value = torch.randn(3, *batch, 7, H, C, dtype=torch.double)
        out, weights = attend(query, key, value, CompleteGraph(7, causal=causal), return_weights=True)
        q, k, v = (t.transpose(-3, -2) for t in (query, key, value))
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(-3, -2)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close((weights @ v).transpose(-3, -2), out)

    @pytest.mark.parametrize("score", SCORES)
    def test_equals_its_own_edge_list(self, score):
        inputs, graph = make_nodes(score), CompleteGraph(N, M, window=(2, 1))
        torch.testing.assert_close(call(score, graph, **inputs), call(score, graph.edge_index, **inputs))

    def test_bias_and_mask_broadcast(self):
        query, key, value = torch.randn(3, 2, 5, H, C)
        bias, mask = torch.randn(H, 5, 5), torch.rand(2, 1, 5, 5) < 0.8
        mask[..., 0] = True
        out = attend(query, key, value, CompleteGraph(5), bias=bias, mask=mask)
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.masked_fill(~mask, -math.inf))
        torch.testing.assert_close(out, expected.transpose(1, 2))

    def test_lengths_hide_padding(self):
        query, key, value = torch.randn(3, 2, 5, H, C)
        lengths = torch.tensor([3, 5])
        graph = CompleteGraph(5, source_lengths=lengths, target_lengths=lengths)
        out, weights = attend(query, key, value, graph, return_weights=True)
        alone = attend(query[0, :3], key[0, :3], value[0, :3], CompleteGraph(3))
        torch.testing.assert_close(out[0, :3], alone)
        assert (out[0, 3:] == 0).all()
        assert (weights[0, :, :, 3:] == 0).all()

    def test_causal_is_aligned_at_the_bottom_right(self):
        assert CompleteGraph(2, 4, causal=True).edge_index.tolist() == [[0, 1, 2, 0, 1, 2, 3], [0, 0, 0, 1, 1, 1, 1]]

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"window": -1}, "window must be"),
            ({"window": (1, 2, 3)}, "window must be"),
            ({"source_lengths": torch.tensor([6])}, "must lie between 0 and 5"),
            ({"target_lengths": torch.tensor([0.5])}, "one integer per"),
            ({"source_lengths": torch.tensor([[True, False]])}, "one integer per"),
            ({"window": 1.5}, "window must be"),
            ({"window": True}, "window must be"),
            ({"window": (1, None)}, "window must be"),
            ({"num_sources": -1}, "number of nodes must not be negative"),
        ],
    )
    def test_bad_arguments(self, kwargs, message):
        with pytest.raises(ValueError, match=message):
            CompleteGraph(5, **kwargs)

    def test_sizes_and_batch_must_fit(self):
        x = torch.randn(5, H, C)
        with pytest.raises(ValueError, match="6 targets and 6 sources"):
            attend(x, x, x, CompleteGraph(6))
        with pytest.raises(ValueError, match="lengths for a batch of shape"):
            attend(x, x, x, CompleteGraph(5, source_lengths=torch.tensor([1, 2])))
        with pytest.raises(ValueError, match="bias on this complete graph must be broadcastable to"):
            attend(x, x, x, CompleteGraph(5), bias=torch.zeros(2, 5))
        with pytest.raises(TypeError, match="mask must be a tensor; got list"):
            attend(x, x, x, CompleteGraph(5), mask=[[True] * 5] * 5)


class TestAwkwardGraphs:
    @pytest.mark.parametrize("score", SCORES)
    def test_no_edges_and_no_nodes(self, score):
        inputs, empty = make_nodes(score), torch.empty(2, 0, dtype=torch.long)
        out = call(score, empty, **inputs)
        assert out.shape == (N, H, CV)
        assert (out == 0).all()
        nobody = {name: value[:0] for name, value in inputs.items()}
        assert call(score, SparseGraph(empty, num_sources=0, num_targets=0), **nobody).shape == (0, H, CV)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_fully_masked_target_gets_zeros_and_finite_gradients(self, dtype):
        edge_index = torch.tensor([[0, 1, 2], [0, 0, 1]])
        query, key, value = (torch.randn(3, H, C, dtype=dtype).requires_grad_() for _ in range(3))
        out = attend(query, key, value, edge_index, mask=torch.tensor([False, False, True]))
        assert (out[0] == 0).all()
        assert (out[1] != 0).any()
        out.sum().backward()
        for leaf in (query, key, value):
            assert leaf.grad.isfinite().all()

    def test_duplicate_edges_count_twice(self):
        key = torch.tensor([[[0.0]], [[0.0]]])
        value = torch.tensor([[[0.0]], [[3.0]]])
        out = attend(key[:1], key, value, torch.tensor([[0, 1, 1], [0, 0, 0]]))
        torch.testing.assert_close(out.flatten(), torch.tensor([2.0]))

    def test_non_contiguous_inputs(self):
        query, key, value = (torch.randn(C, H, 9).permute(2, 1, 0) for _ in range(3))
        edge_index = random_edge_index(9, num_edges=30).t().contiguous().t()
        expected = attend(query.contiguous(), key.contiguous(), value.contiguous(), edge_index.contiguous())
        torch.testing.assert_close(attend(query, key, value, edge_index), expected)

    def test_a_nan_shows_in_its_whole_row_and_nowhere_else(self):
        x = torch.randn(4, 1, C)
        key = x.clone()
        key[0] = math.nan
        out = attend(x, key, x, torch.tensor([[0, 1, 2], [1, 1, 3]]))
        assert out[1].isnan().all()
        assert out[3].isfinite().all()

    def test_permuting_edges_permutes_weights(self):
        edge_index = random_edge_index(M, N, E)
        order = torch.randperm(E)
        inputs = make_inputs("dot")
        permuted = {name: value[order] if value.size(0) == E else value for name, value in inputs.items()}
        out, weights = attend(graph=edge_index, return_weights=True, **inputs)
        out_permuted, weights_permuted = attend(graph=edge_index[:, order], return_weights=True, **permuted)
        torch.testing.assert_close(out_permuted, out)
        torch.testing.assert_close(weights_permuted, weights[order])


class TestTypes:
    @pytest.mark.parametrize("dtype", HALF)
    def test_half_precision_is_rounded_once(self, dtype):
        edge_index = random_edge_index(50, num_edges=2000, hub=0.5)
        query, key, value = torch.randn(3, 50, H, 32).to(dtype)
        exact = attend(query.double(), key.double(), value.double(), edge_index)
        out = attend(query, key, value, edge_index)
        assert out.dtype == dtype
        error = (out.double() - exact).abs()
        assert (error <= 0.51 * torch.finfo(dtype).eps * exact.abs() + 1e-6).all()

    def test_mixed_types_promote(self):
        x32, x16 = torch.randn(5, H), torch.randn(5, H, C).bfloat16()
        assert attend(x32, x32, x16, CompleteGraph(5), score=GATScore()).dtype == torch.float32
        vector = torch.randn(H, C)
        assert attend(x16, x16, x16, CompleteGraph(5), score=AdditiveScore(vector)).dtype == torch.float32
        assert attend(x16, x16, x16, CompleteGraph(5)).dtype == torch.bfloat16


class TestOutBias:
    @pytest.mark.parametrize("backend", ["auto", "reference"])
    @pytest.mark.parametrize("graph", [CompleteGraph(5), random_edge_index(5, num_edges=9)])
    def test_it_is_added_by_every_backend(self, graph, backend):
        x, out_bias = torch.randn(5, H, C), torch.randn(H, C)
        given = {"return_weights": True, "backend": backend}
        out, weights = attend(x, x, x, graph, out_bias=out_bias, **given)
        plain = attend(x, x, x, graph, **given)
        torch.testing.assert_close((out, weights), (plain[0] + out_bias, *plain[1:]))

    @pytest.mark.parametrize("distribution", ["softmax", "sparsemax"])
    def test_it_is_added_once_to_what_kernels_do_not_know(self, distribution):
        class Custom(gattn.Score):
            def logits(self, query, key, edge):
                return -(query - key).abs().sum(-1)

        x, out_bias, edge_index = torch.randn(5, H, C), torch.randn(H, C), random_edge_index(5, num_edges=9)
        given = {"score": Custom(), "distribution": distribution}
        out = attend(x, x, x, edge_index, out_bias=out_bias, **given)
        torch.testing.assert_close(out, attend(x, x, x, edge_index, **given) + out_bias)

    def test_types_promote_as_in_a_sum(self):
        x, out_bias, edge_index = torch.randn(5, H, C).bfloat16(), torch.randn(H, C), random_edge_index(5)
        out = attend(x, x, x, edge_index, out_bias=out_bias)
        assert torch.equal(out, attend(x, x, x, edge_index) + out_bias)
        assert attend(x, x, x, edge_index, out_bias=out_bias.bfloat16()).dtype == torch.bfloat16

    def test_no_second_output_is_kept(self):
        """What it is for: the sum is the only tensor of its size that the backward pass needs."""
        x = torch.randn(50, H, C, requires_grad=True)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda x: x):
            out = attend(x, x, x, random_edge_index(50), out_bias=torch.randn(H, C, requires_grad=True))
        addresses = {tensor.data_ptr() for tensor in kept if tensor.numel() == out.numel()}
        assert addresses == {x.data_ptr(), out.data_ptr()}


class TestDropout:
    def test_the_dropped_weights_made_the_output(self):
        edge_index = random_edge_index(M, N, E)
        inputs = make_nodes("dot")
        arguments = {"graph": edge_index, "dropout": 0.5, "training": True, **inputs}
        out, dropped = attend(return_weights="dropped", **arguments)
        expected = torch.zeros(N, H, CV, dtype=torch.double)
        expected.index_add_(0, edge_index[1], dropped.unsqueeze(-1) * inputs["value"][edge_index[0]])
        torch.testing.assert_close(out, expected)
        _, weights = attend(return_weights=True, **arguments)
        torch.testing.assert_close(weights, attend(graph=edge_index, return_weights=True, **inputs)[1])
        kept = dropped != 0
        torch.testing.assert_close(dropped[kept], 2 * weights[kept])
        assert 0.3 < kept[weights != 0].double().mean() < 0.7

    def test_only_in_training(self):
        x = torch.randn(5, H, C)
        torch.testing.assert_close(attend(x, x, x, CompleteGraph(5), dropout=0.9), attend(x, x, x, CompleteGraph(5)))
        core = Attention()
        assert not torch.equal(core(x, x, x, CompleteGraph(5), dropout=0.9), attend(x, x, x, CompleteGraph(5)))
        torch.testing.assert_close(
            core.eval()(x, x, x, CompleteGraph(5), dropout=0.9), attend(x, x, x, CompleteGraph(5))
        )

    def test_everything_dropped(self):
        x = torch.randn(5, H, C)
        assert (attend(x, x, x, CompleteGraph(5), dropout=1.0, training=True) == 0).all()

    def test_the_seed_decides(self):
        x = torch.randn(20, H, C)
        outs = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            outs.append(attend(x, x, x, CompleteGraph(20), dropout=0.5, training=True))
        assert torch.equal(outs[0], outs[1])
        assert not torch.equal(outs[0], outs[2])


class TestCore:
    def test_pyg_generates_code_for_it(self):
        """A hook that PyG's generator cannot read would fall back to a slower copy, in silence."""
        for module in (Attention(), gattn.nn.GATConv(2, 3), gattn.nn.GATv2Conv(2, 3), gattn.nn.TransformerConv(2, 3)):
            prefix = f"{type(module).__module__}_{type(module).__name__}"
            assert type(module).propagate.__module__ == f"{prefix}_propagate"
            assert type(module).edge_updater.__module__ == f"{prefix}_edge_updater"
            assert type(module)._orig_propagate is MessagePassing.propagate

    def test_flow(self):
        edge_index = random_edge_index(M, N, E)
        inputs = make_inputs("dot")
        expected = attend(graph=edge_index, **inputs)
        backwards = SparseGraph(edge_index.flip(0), flow="target_to_source")
        torch.testing.assert_close(attend(graph=backwards, **inputs), expected)
        core = Attention(flow="target_to_source")
        torch.testing.assert_close(core(graph=edge_index.flip(0), **inputs), expected)
        torch.testing.assert_close(core(graph=SparseGraph(edge_index), **inputs), expected)
        x = torch.randn(4, H, C)
        for actual, wanted in zip(
            core(x, x, x, CompleteGraph(4, causal=True), return_weights=True),
            attend(x, x, x, CompleteGraph(4, causal=True), return_weights=True),
            strict=True,
        ):
            torch.testing.assert_close(actual, wanted)

    def test_aggregations_of_pyg(self):
        edge_index = random_edge_index(M, N, E)
        inputs = make_nodes("dot")
        _, weights = attend(graph=edge_index, return_weights=True, **inputs)
        messages = weights.unsqueeze(-1) * inputs["value"][edge_index[0]]
        rows = [messages[edge_index[1] == i] for i in range(N)]
        expected = torch.stack([row.amax(0) if len(row) else torch.zeros(H, CV, dtype=torch.double) for row in rows])
        torch.testing.assert_close(Attention("max")(graph=edge_index, **inputs), expected)

    def test_hooks_see_and_change_messages(self):
        core = Attention()
        x = torch.randn(4, H, C)
        handle = core.register_message_forward_hook(lambda module, inputs, out: out * 2)
        torch.testing.assert_close(core(x, x, x, CompleteGraph(4)), 2 * attend(x, x, x, CompleteGraph(4)))
        handle.remove()
        core.register_edge_update_forward_hook(lambda module, inputs, out: torch.zeros_like(out))
        assert (core(x, x, x, CompleteGraph(4)) == 0).all()

    def test_copies(self):
        core = Attention()
        x = torch.randn(4, H, C)
        for copied in (copy.deepcopy(core), pickle.loads(pickle.dumps(core))):
            torch.testing.assert_close(copied(x, x, x, CompleteGraph(4)), core(x, x, x, CompleteGraph(4)))

    def test_compiles_without_graph_breaks(self):
        """All scores in one program: most of the time goes into starting the compiler."""
        torch._dynamo.reset()
        edge_index = random_edge_index(M, N, E)
        inputs = {score: make_inputs(score) for score in SCORES}

        def function(inputs):
            return [call(score, edge_index, **given) for score, given in inputs.items()]

        torch.testing.assert_close(
            torch.compile(function, fullgraph=True, backend="aot_eager")(inputs), function(inputs)
        )


class TestBadInput:
    """One test a message; what came, what was expected."""

    x = torch.randn(4, H, C)
    edge_index = torch.tensor([[0, 1], [1, 2]])

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            (
                {"graph": torch.tensor([[0.0], [1.0]])},
                ValueError,
                "its dtype must be an integer type; got torch.float32",
            ),
            (
                {"graph": torch.tensor([[0, 1], [1, 2]]).bool()},
                ValueError,
                "its dtype must be an integer type; got torch.bool",
            ),
            ({"graph": torch.zeros(3, 2, dtype=torch.long)}, ValueError, "it looks transposed"),
            ({"graph": torch.zeros(2, dtype=torch.long)}, ValueError, r"edge_index must have shape \[2, E\]"),
            ({"graph": [[0, 1], [1, 2]]}, TypeError, "a graph must be an edge_index tensor"),
            ({"graph": torch.tensor([[0, 4], [1, 2]])}, IndexError, "source index 4, but there are 4 source nodes"),
            ({"graph": torch.tensor([[0, 1], [1, 9]])}, IndexError, "target index 9, but there are 4 target nodes"),
            ({"graph": torch.tensor([[0, -1], [1, 2]])}, IndexError, "negative source index -1"),
            (
                {"graph": SparseGraph(edge_index, num_targets=5)},
                ValueError,
                "the graph has 5 targets, but 4 according to the features",
            ),
            ({"key": x[:, :, :2]}, ValueError, "query and key must have the same batch, heads and channels"),
            ({"key": x[:3]}, ValueError, "key and value must have the same batch, sources and heads"),
            ({"query": x[:, :2]}, ValueError, "a number of heads that divides the query's"),
            ({"query": None}, ValueError, "DotScore needs a query"),
            ({"query": x[..., 0]}, ValueError, r"DotScore takes a query of shape \[N, H, C\]"),
            ({"score": GATScore()}, ValueError, r"GATScore takes a query of shape \[N, H\]"),
            ({"score": AdditiveScore(torch.zeros(H, C + 1))}, ValueError, r"it must be \[3, 4\]"),
            ({"value": x.long()}, ValueError, "value must be of a floating-point type"),
            ({"value": x.tolist()}, TypeError, "value must be a tensor; got list"),
            ({"value": x[0, 0]}, ValueError, "at most two batch dimensions"),
            ({"edge": torch.zeros(2, H)}, ValueError, r"edge must have one entry per edge.*\[2, 3, 4\].*got \[2, 3\]"),
            ({"edge": torch.zeros(2, H, 1)}, ValueError, "edge must have one entry per edge"),
            ({"out_bias": torch.zeros(H * C)}, ValueError, r"out_bias must have one entry.* \[3, 4\]; got \[12\]"),
            ({"out_bias": 0.0}, TypeError, "out_bias must be a tensor; got float"),
            (
                {"edge": Projected(torch.zeros(2, H, C), torch.zeros(H, C, 5))},
                ValueError,
                r"the features of edge must have shape \[E, D\]; got \[2, 3, 4\]",
            ),
            (
                {"edge": Projected(torch.zeros(2, 5), torch.zeros(H * C, 5))},
                ValueError,
                r"\[H, C, D\] for DotScore, here \[3, 4, 5\]; got \[12, 5\]",
            ),
            (
                {"edge": Projected(torch.zeros(3, 5), torch.zeros(H, C, 5))},
                ValueError,
                "edge must have one row of features per edge.*2 for this graph; got 3",
            ),
            ({"edge": Projected(torch.zeros(2, 5), [1.0])}, TypeError, "the weight of edge must be a tensor; got list"),
            ({"edge_value": True}, ValueError, "edge_value=True means .*, but there is no edge"),
            ({"query": None, "key": None}, TypeError, "without a query and a key, the logits are bias; got NoneType"),
            ({"bias": torch.zeros(2, 1)}, ValueError, "bias must have one entry per edge"),
            ({"edge_value": torch.zeros(3, H, C)}, ValueError, "edge_value must have one entry per edge"),
            ({"mask": torch.zeros(2, H)}, ValueError, "mask must be a tensor of booleans"),
            ({"mask": torch.ones(3, dtype=torch.bool)}, ValueError, "mask must have one entry per edge"),
            ({"score": "dot"}, TypeError, r"score must be an object such as gattn.DotScore\(\).*got 'dot'"),
            ({"score": DotScore}, TypeError, "score must be an object"),
            ({"edge": [1.0]}, TypeError, "edge must be a tensor; got list"),
            (
                {"backend": "cuda"},
                ValueError,
                "unknown backend 'cuda': this version of gattn has 'auto', 'dense', 'cpu'",
            ),
            (
                {"distribution": "argmax"},
                ValueError,
                "unknown distribution 'argmax': use 'softmax', 'sigmoid'",
            ),
            ({"dropout": 1.5}, ValueError, "dropout must be a probability"),
            ({"dropout": True}, TypeError, "dropout must be a probability, .*; got True"),
            ({"dropout": torch.zeros(2)}, TypeError, "dropout must be a probability, .*; got tensor"),
            ({"training": "yes"}, TypeError, "training must be True or False; got 'yes'"),
            ({"return_weights": "all"}, ValueError, "return_weights must be False, True or 'dropped'"),
            ({"key": None}, TypeError, "key must be a tensor; got NoneType"),
            ({"key": x.tolist()}, TypeError, "key must be a tensor; got list"),
            ({"value": None}, TypeError, "value must be a tensor; got NoneType"),
            (
                {"bias": torch.ones(2, H, dtype=torch.bool)},
                ValueError,
                "bias holds booleans.* mask=.* True = may attend",
            ),
        ],
    )
    def test_message(self, change, error, message):
        arguments = {"query": self.x, "key": self.x, "value": self.x, "graph": self.edge_index}
        with pytest.raises(error, match=message):
            attend(**{**arguments, **change})

    def test_scores_check_themselves(self):
        with pytest.raises(ValueError, match="one row per head"):
            AdditiveScore(torch.zeros(C))
        with pytest.raises(ValueError, match="one of 'leaky_relu', .*; got 'swish'"):
            AdditiveScore(torch.zeros(H, C), activation="swish")

    def test_minus_infinity_in_a_bias_masks_and_is_no_mistake(self):
        with gattn.check_finite():
            attend(self.x, self.x, self.x, self.edge_index, bias=torch.full((2, H), -math.inf))
            with pytest.raises(ValueError, match="bias holds 6 values"):
                attend(self.x, self.x, self.x, self.edge_index, bias=torch.full((2, H), math.inf))

    def test_backend_block(self):
        with gattn.backend("reference"):
            attend(self.x, self.x, self.x, self.edge_index)
        with pytest.raises(ValueError, match="unknown backend 'tpu'"), gattn.backend("tpu"):
            pass

    @pytest.mark.parametrize(
        ("block", "outside", "first", "second", "now"),
        [
            (gattn.backend, "auto", "reference", "cpu", lambda: choose.requested("auto")),
            (gattn.check_finite, False, True, False, settings.checks_finite),
        ],
        ids=["backend", "check_finite"],
    )
    def test_blocks_that_overlap(self, block, outside, first, second, now):
        """As those of several threads: each exit withdraws its own request, and the last one entered decides."""
        one, two, three = block(first), block(second), block(first)
        for entered in (one, two, three):
            entered.__enter__()
        seen = [now()]
        for left in (one, three, two):
            left.__exit__(None, None, None)
            seen.append(now())
        assert seen == [first, first, second, outside]

    @pytest.mark.parametrize(
        ("options", "name"),
        [
            (lambda bad: {"score": AdditiveScore(bad(H, C))}, "AdditiveScore's vector"),
            (lambda bad: {"score": DotScore(bad(H))}, "DotScore's scale"),
            (lambda bad: {"distribution": gattn.Softmax(bad(H))}, "Softmax's sink"),
            (lambda bad: {"distribution": gattn.LocalGaussian(bad(4), 1.0)}, "LocalGaussian's centres"),
            (
                lambda bad: {"distribution": gattn.WithinTypes(torch.tensor([0, 1]), gattn.Softmax(bad(H)), 2)},
                "Softmax's sink",
            ),
            (lambda bad: {"bias": bad(2, H)}, "bias"),
            (lambda bad: {"edge": bad(2, H, C)}, "edge"),
            (lambda bad: {"edge_value": bad(2, H, C)}, "edge_value"),
            (lambda bad: {"edge": Projected(bad(2, 1), torch.ones(H, C, 1))}, "the features of edge"),
            (lambda bad: {"edge": Projected(torch.ones(2, 1), bad(H, C, 1))}, "the weight of edge"),
            (lambda bad: {"edge_value": Projected(torch.ones(2, 1), bad(H, C, 1))}, "the weight of edge_value"),
            (lambda bad: {"edge": gattn.Typed(bad(3, H, C), torch.tensor([0, 2]))}, "the table of edge"),
            (lambda bad: {"edge_value": gattn.Typed(bad(3, H, C), torch.tensor([0, 2]))}, "the table of edge_value"),
            (lambda bad: {"out_bias": bad(H, C)}, "out_bias"),
            (
                lambda bad: {"graph": CompleteGraph(4), "bias": gattn.BucketBias(torch.eye(4).byte(), bad(2))},
                "bias",
            ),
        ],
        ids=lambda name: name if isinstance(name, str) else "",
    )
    def test_every_tensor_of_a_call_is_looked_at(self, options, name):
        def bad(*shape):
            tensor = torch.ones(shape)
            tensor.view(-1)[-1] = math.nan
            return tensor

        arguments = {"query": self.x, "key": self.x, "value": self.x, "graph": self.edge_index, **options(bad)}
        attend(**{**arguments, **options(torch.ones)})
        with gattn.check_finite():
            attend(**{**arguments, **options(torch.ones)})
            with pytest.raises(ValueError, match=f"^{name} holds 1 value that is NaN"):
                attend(**arguments)

    @pytest.mark.parametrize("mistake", [math.nan, -math.inf])
    def test_weights_that_are_given_are_looked_at(self, mistake):
        with gattn.check_finite(), pytest.raises(ValueError, match="weights holds 3 values"):
            gattn.aggregate(torch.tensor([[mistake], [1.0]]).expand(2, H), self.x, self.edge_index)

    def test_a_sink_of_minus_infinity_is_no_mistake(self):
        with gattn.check_finite():
            no_sink = gattn.Softmax(torch.full((H,), -math.inf))
            attend(self.x, self.x, self.x, self.edge_index, distribution=no_sink)
            with pytest.raises(ValueError, match="Softmax's sink holds"):
                attend(self.x, self.x, self.x, self.edge_index, distribution=gattn.Softmax(-no_sink.sink))

    def test_nan_is_named_on_request(self):
        bad = self.x.clone()
        bad[2, 1, 0] = math.nan
        attend(self.x, bad, self.x, self.edge_index)
        with gattn.check_finite():
            attend(self.x, self.x, self.x, self.edge_index)
            with pytest.raises(
                ValueError, match=r"key holds 1 value that is NaN or infinite \(the first one at index \(2, 1, 0\)\)"
            ):
                attend(self.x, bad, self.x, self.edge_index)
            with pytest.raises(ValueError, match="out_bias holds 1 value"):
                attend(self.x, self.x, self.x, self.edge_index, out_bias=bad[2])
        attend(self.x, bad, self.x, self.edge_index)
