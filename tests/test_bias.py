"""Biases as values, the log-sum-exp, and unions of graphs."""

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch_geometric.explain import Explainer

import gattn
from gattn import AdditiveScore, BucketBias, CompleteGraph, CosineScore, DotScore, SparseBias, SparseGraph
from gattn.bias import DistanceBias
from gattn.explain import AttentionExplainer
from gattn.ops.backends.dense import matrices, tiles
from gattn.testing import assert_as_exact_as, random_edge_index

N, M, H, C = 20, 25, 4, 8
LENGTHS, SOURCES = [5, 1, 0, 12, 5], [5, 3, 2, 12, 0]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Small calls take the ways of large ones, in several parts each."""
    monkeypatch.setattr(matrices, "_TOGETHER", (2, 4))
    monkeypatch.setattr(matrices, "_CHUNK", 8 * H * M)
    torch.manual_seed(0)


@pytest.fixture(params=["tiles", "parts"])
def way(request):
    """On CPUs, by tiles; elsewhere, for some targets at a time."""
    if request.param == "parts":
        request.getfixturevalue("without_tiles")


def leaves_for(n=N, m=M, batch=(), key_heads=H, dtype=torch.float64):
    sizes = (*batch, n, H, C), (*batch, m, key_heads, C), (*batch, m, key_heads, C)
    return [torch.randn(size, dtype=dtype, requires_grad=True) for size in sizes]


def sparse(n=N, m=M, count=60, heads=H, scale=1.0):
    pairs = torch.stack([torch.randint(m, (count,)), torch.randint(n, (count,))])  # some of them twice
    values = (torch.randn(count, heads, dtype=torch.float64) * scale).requires_grad_()
    return SparseBias(pairs, values), values


def buckets(*shape, heads=H):
    table = torch.randn(5, heads, dtype=torch.float64, requires_grad=True)
    return BucketBias(torch.randint(5, shape, dtype=torch.uint8), table), table


def near():
    table = torch.randn(9, H, dtype=torch.float64, requires_grad=True)
    return BucketBias(lambda target, source: (source - target).clamp(-4, 4) + 4, table), table


def distances(size=500):
    table = torch.randn(size, H, dtype=torch.float64, requires_grad=True)
    return DistanceBias(table, -size // 2), table


def derivatives(outs, leaves, second) -> list[Tensor]:
    torch.manual_seed(1)
    outs = [out.masked_fill(out == -torch.inf, 0.0) for out in (outs if isinstance(outs, tuple) else (outs,))]
    loss = sum((out * torch.randn(out.shape, dtype=out.dtype)).sum() for out in outs)
    grads = torch.autograd.grad(loss, leaves, create_graph=second)
    found = list(grads)
    if second:
        loss = sum((grad * torch.randn(grad.shape, dtype=grad.dtype)).sum() for grad in grads)
        found += torch.autograd.grad(loss, leaves)
    return found


def assert_as_reference(bias, graph, leaves, more=(), second=False, **options):
    """Output, log-sum-exp and all gradients are those of message passing over a list of all pairs."""
    for lse in (False, True):
        results = []
        for backend in ("auto", "reference"):
            outs = gattn.attend(*leaves, graph, bias=bias, return_lse=lse, backend=backend, **options)
            outs = outs if lse else (outs,)
            results.append([*outs, *derivatives(outs, [*leaves, *more], second)])
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected)


COMPLETE = {
    "square": (CompleteGraph(N), N, N),
    "more sources": (CompleteGraph(N, M), N, M),
    "causal": (CompleteGraph(N, causal=True), N, N),
    "causal with more sources": (CompleteGraph(N, M, causal=True), N, M),
    "causal with more targets": (CompleteGraph(M, N, causal=True), M, N),
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("shape", COMPLETE)
class TestCompleteGraphs:
    @pytest.mark.parametrize("scale", [1.0, 20.0])
    def test_sparse(self, shape, scale):
        graph, n, m = COMPLETE[shape]
        bias, values = sparse(n, m, scale=scale)
        assert_as_reference(bias, graph, leaves_for(n, m), [values], second=scale == 1.0)

    @pytest.mark.parametrize("batch", [(3,), (2, 2)])
    def test_sparse_in_batches(self, shape, batch):
        graph, n, m = COMPLETE[shape]
        bias, values = sparse(n, m, heads=1, scale=5.0)
        assert_as_reference(bias, graph, leaves_for(n, m, batch, key_heads=2), [values])

    @pytest.mark.parametrize("make", [buckets, near, distances])
    def test_buckets_and_distances(self, shape, make):
        graph, n, m = COMPLETE[shape]
        bias, table = make(n, m) if make is buckets else make()
        assert_as_reference(bias, graph, leaves_for(n, m), [table], second=True)
        assert_as_reference(bias, graph, leaves_for(n, m, (2,), key_heads=2), [table])

    def test_buckets_of_each_element(self, shape):
        graph, n, m = COMPLETE[shape]
        bias, table = buckets(3, n, m, heads=1)
        assert_as_reference(bias, graph, leaves_for(n, m, (3,)), [table])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
class TestRaggedAndWindowed:
    def test_packed(self, causal):
        graph = CompleteGraph.packed(LENGTHS, SOURCES, causal=causal)
        pairs = CompleteGraph.packed(LENGTHS, SOURCES).edge_index
        pairs = pairs[:, torch.randint(pairs.size(1), (60,))]
        values = (torch.randn(60, H, dtype=torch.float64) * 5).requires_grad_()
        table = torch.randn(9, H, dtype=torch.float64, requires_grad=True)
        blocks = [torch.randint(9, (n, m), dtype=torch.int16) for n, m in zip(LENGTHS, SOURCES, strict=True)]
        for bias, more in (
            (SparseBias(pairs, values), values),
            (BucketBias(blocks, table), table),
            near(),
            distances(),
        ):
            for batch in ((), (2,)):
                assert_as_reference(bias, graph, leaves_for(sum(LENGTHS), sum(SOURCES), batch), [more])

    def test_padded(self, causal):
        lengths = {"source_lengths": torch.tensor([N, 3, 0]), "target_lengths": torch.tensor([N, N, 7])}
        graph = CompleteGraph(N, causal=causal, **lengths)
        for bias, more in (sparse(N, N), buckets(N, N), buckets(3, N, N), near(), distances()):
            assert_as_reference(bias, graph, leaves_for(N, N, (3,)), [more])

    def test_windows(self, causal):
        graph = CompleteGraph(200, window=(8, 4), causal=causal)
        for bias, more in (sparse(200, 200, 2000), buckets(200, 200), near(), distances()):
            for batch in ((), (2,)):
                assert_as_reference(bias, graph, leaves_for(200, 200, batch), [more])
        narrow = CompleteGraph(N, window=3, causal=causal)
        assert_as_reference(*(lambda pair: (pair[0], narrow, leaves_for(N, N), [pair[1]]))(sparse(N, N)))


def test_lists_of_edges():
    graph = SparseGraph(random_edge_index(M, N, 80), N, M)
    for bias, more in (sparse(), buckets(N, M), near()):
        for batch in ((), (2,)):
            assert_as_reference(bias, graph, leaves_for(batch=batch), [more])
    bias, more = buckets(2, N, M)
    assert_as_reference(bias, graph, leaves_for(batch=(2,)), [more])
    looped = SparseGraph(random_edge_index(N, N, 80), N, N, self_loops=True)
    bias, more = sparse(N, N)
    assert_as_reference(bias, looped, leaves_for(N, N), [more])


@pytest.mark.parametrize("shape", COMPLETE)
def test_equals_a_tensor_of_all_pairs(shape):
    graph, n, m = COMPLETE[shape]
    leaves, distance = leaves_for(n, m), graph.distances(torch.device("cpu"))
    for bias, held in (sparse(n, m), buckets(n, m), near(), distances()):
        if isinstance(bias, SparseBias):
            whole = held.new_zeros(n, m, H).index_put((bias.target, bias.source), held, accumulate=True)
        elif isinstance(bias, DistanceBias):
            whole = held[distance + 250]
        else:
            whole = held[(distance.clamp(-4, 4) + 4) if callable(bias.buckets) else bias.buckets.long()]
        found, expected = (gattn.attend(*leaves, graph, bias=each) for each in (bias, whole.permute(2, 0, 1)))
        torch.testing.assert_close(found, expected)


def test_a_list_of_all_pairs_gives_the_same():
    for bias, _ in (sparse(), buckets(N, M), near()):
        complete, leaves = CompleteGraph(N, M), leaves_for()
        found = gattn.attend(*leaves, complete, bias=bias)
        torch.testing.assert_close(found, gattn.attend(*leaves, SparseGraph(complete.edge_index, N, M), bias=bias))


@pytest.mark.parametrize(
    "score", [AdditiveScore(torch.randn(H, C, dtype=torch.float64)), DotScore(clamp=1.0), CosineScore(), DotScore(2.0)]
)
def test_other_scores(score):
    for bias, more in (sparse(), buckets(N, M)):
        assert_as_reference(bias, CompleteGraph(N, M), leaves_for(), [more], score=score)


def test_masks_and_dropout():
    mask = torch.rand(3, 1, N, N) < 0.7
    for bias, more in (sparse(N, N), buckets(N, N)):
        assert_as_reference(bias, CompleteGraph(N, causal=True), leaves_for(N, N, (3,)), [more], mask=mask)
    bias, leaves = sparse(N, N)[0], leaves_for(N, N)
    dropped = gattn.attend(*leaves, CompleteGraph(N), bias=bias, dropout=1.0, training=True)
    assert (dropped == 0).all()
    results = [
        gattn.attend(*leaves, CompleteGraph(N), bias=bias, dropout=0.5, training=True, return_weights="dropped")
        for _ in range(2)
    ]
    torch.testing.assert_close(results[0][0], (results[0][1] @ leaves[2].transpose(0, 1)).transpose(0, 1))


@pytest.mark.usefixtures("way")
def test_minus_infinity_excludes_pairs():
    pairs = torch.stack([torch.arange(N), torch.full((N,), 3)])  # all sources of target 3
    for value in (-torch.inf, -1000.0):
        values = torch.full((N, H), value, dtype=torch.float64, requires_grad=True)
        leaves = leaves_for(N, N)
        assert_as_reference(SparseBias(pairs, values), CompleteGraph(N), leaves, [values])
    out, lse = gattn.attend(
        *leaves, CompleteGraph(N), bias=SparseBias(pairs, torch.full((N,), -torch.inf)), return_lse=True
    )
    assert (out[3] == 0).all()
    assert (lse[3] == -torch.inf).all()
    some = torch.randint(N, (2, 40))
    values = torch.where(torch.rand(40, H) < 0.5, -torch.inf, 0.5).double().requires_grad_()
    assert_as_reference(SparseBias(some, values), CompleteGraph(N), leaves_for(N, N), [values])


@pytest.mark.parametrize("value", [-torch.inf, -50.0, -20.0, -10.0, -3.0, -2.0, 0.0, 2.0, 20.0, 50.0])
def test_no_digits_are_lost(value):
    """The listed pairs have nearly all of a target's weight without their bias."""
    leaves = leaves_for(64, 64, dtype=torch.float32)
    with torch.no_grad():
        leaves[0][:8] = 3 * leaves[1][:8]
    pairs = torch.arange(8).repeat(2, 1)
    values = torch.full((8, H), value, requires_grad=True)

    def results(dtype, backend="auto"):
        inputs = [x.detach().to(dtype).requires_grad_() for x in (*leaves, values)]
        bias = SparseBias(pairs, inputs[3])
        outs = gattn.attend(*inputs[:3], CompleteGraph(64), bias=bias, score=DotScore(1.0), backend=backend)
        torch.manual_seed(1)
        return [outs, *torch.autograd.grad(outs, inputs, torch.randn(outs.shape).to(dtype))]

    exact = results(torch.float64, "reference")
    for found, peer, right in zip(results(torch.float32), results(torch.float32, "reference"), exact, strict=True):
        size = max(right.abs().max().item(), 1.0) * max(value, 1.0)  # the log-sum-exp is as large, and rounded
        assert_as_exact_as(found, peer=peer, exact=right, factor=8.0, scale=size)


def test_which_way_is_taken(monkeypatch):
    made = Counter()
    attend = tiles.attend

    def counted(query, key, value, bias, *more):
        made.update([getattr(bias, "kind", "all")])
        return attend(query, key, value, bias, *more)

    monkeypatch.setattr(tiles, "attend", counted)
    leaves = leaves_for(N, N)
    for bias in (sparse(N, N)[0], buckets(N, N)[0], near()[0], distances()[0]):
        gattn.attend(*leaves, CompleteGraph(N), bias=bias)
    gattn.attend(*leaves, CompleteGraph(N), bias=Outer(torch.randn(N), torch.randn(N)))
    assert made == {"listed": 1, "buckets": 2, "distances": 1, "all": 1}  # the last is evaluated for some targets


def test_there_is_no_tensor_of_all_pairs(monkeypatch):
    monkeypatch.undo()
    n = 1200
    leaves = leaves_for(n, n, dtype=torch.float32)
    for bias, more in (sparse(n, n, 5000), buckets(n, n), near(), distances(2 * n)):
        bias, more = bias.with_tensors([more.detach().float().requires_grad_()]), None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            gattn.attend(*leaves, CompleteGraph(n), bias=bias).sum().backward()
        largest = max(event.self_cpu_memory_usage for event in profile.events())
        assert largest < H * n * n  # bytes: a quarter of all logits


def test_windows_with_positions_cost_what_windows_do():
    n = 4000
    x, graph = torch.randn(n, 16), CompleteGraph(n, window=(32, 0))
    for position in (gattn.nn.ALiBi(2), gattn.nn.RelativePositionBias(2, 16)):
        attention = gattn.nn.MultiheadAttention(16, 2, position=position)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            attention(x, x, x, need_weights=False, graph=graph)[0].sum().backward()
        assert max(event.self_cpu_memory_usage for event in profile.events()) < n * n


class Outer(gattn.Bias):
    def __init__(self, u, v):
        self.u, self.v = u, v

    def tensors(self):
        return self.u, self.v

    def with_tensors(self, tensors):
        return Outer(*tensors)

    def rows(self, start, stop):
        return (self.u[start:stop, None] * self.v).unsqueeze(0)


def test_a_bias_of_your_own():
    u, v = (torch.randn(200, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for graph in (CompleteGraph(200), CompleteGraph(200, causal=True), CompleteGraph(200, window=(8, 4))):
        leaves = leaves_for(200, 200)
        assert_as_reference(Outer(u, v), graph, leaves, [u, v])
    dense_bias = (u[:, None] * v).detach()
    expected = gattn.attend(*leaves, CompleteGraph(200), bias=dense_bias)
    torch.testing.assert_close(gattn.attend(*leaves, CompleteGraph(200), bias=Outer(u, v)), expected)
    packed = CompleteGraph.packed([5, 0, 12], [4, 2, 12])
    assert_as_reference(Outer(u, v), packed, leaves_for(17, 18), [u, v])


@pytest.mark.usefixtures("way")
def test_tensors_with_gradients():
    for shape in ((H, N, M), (1, N, M), (N, 1), (2, H, N, M)):
        bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        assert_as_reference(bias, CompleteGraph(N, M), leaves_for(batch=(2,)), [bias])


def test_weights_and_logits():
    leaves = leaves_for()
    for bias in (sparse()[0], buckets(N, M)[0], near()[0]):
        for function, options in ((gattn.weigh, {}), (gattn.weigh, {"distribution": None})):
            found, expected = (
                function(*leaves[:2], CompleteGraph(N, M), bias=bias, backend=name, **options)
                for name in ("auto", "reference")
            )
            torch.testing.assert_close(found, expected)
        for weights in (True, "dropped"):
            results = [
                gattn.attend(
                    *leaves, CompleteGraph(N, M), bias=bias, return_weights=weights, return_lse=True, backend=name
                )
                for name in ("auto", "reference")
            ]
            for found, expected in zip(*results, strict=True):
                torch.testing.assert_close(found, expected)
        sparsemax = [
            gattn.attend(*leaves, CompleteGraph(N, M), bias=bias, distribution="sparsemax", backend=name)
            for name in ("auto", "reference")
        ]
        torch.testing.assert_close(*sparsemax)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_types(dtype):
    leaves = leaves_for(dtype=dtype)
    for bias, more in (sparse(), buckets(N, M)):
        results = {}
        for name, kind in (("auto", dtype), ("reference", dtype), ("exact", torch.float64)):
            inputs = [x.detach().to(kind) for x in leaves]
            given = bias.with_tensors([more.detach().to(dtype).to(kind)])
            backend = "reference" if name == "exact" else name
            results[name] = gattn.attend(*inputs, CompleteGraph(N, M), bias=given, backend=backend)
        assert_as_exact_as(results["auto"], peer=results["reference"], exact=results["exact"])


def test_autocast_and_recording():
    attention, x = gattn.nn.MultiheadAttention(16, 2, position=gattn.nn.ALiBi(2)), torch.randn(N, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(x, x, x, need_weights=False)[0].dtype == torch.bfloat16
    with gattn.record_attention(attention) as records:
        plain = attention(x, x, x, need_weights=False)[0]
    weights = records[""][0].weights
    assert weights.shape == (2, N, N)
    torch.testing.assert_close(plain, attention(x, x, x, need_weights=True)[0])


def test_compiles_as_a_whole():
    pairs = torch.stack([torch.randint(N, (40,)), torch.randint(N, (40,))])
    values, table = torch.randn(40, H, requires_grad=True), torch.randn(9, H, requires_grad=True)
    hops = torch.randint(9, (N, N), dtype=torch.uint8)

    packed = CompleteGraph.packed([8, 12])

    def three(query, key, value, values, table):
        graph = CompleteGraph(N, causal=True)
        outs = [gattn.attend(query, key, value, graph, bias=SparseBias(pairs, values))]
        outs.append(gattn.attend(query, key, value, CompleteGraph(N), bias=BucketBias(hops, table)))
        near = BucketBias(lambda target, source: (source - target).clamp(-4, 4) + 4, table)
        outs.append(gattn.attend(query, key, value, packed, bias=near))
        return torch.cat(outs)

    inputs = [*leaves_for(N, N, dtype=torch.float32), values, table]
    compiled = torch.compile(three, fullgraph=True)
    results = [[out, *torch.autograd.grad(out.square().sum(), inputs)] for out in (compiled(*inputs), three(*inputs))]
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_traced_pairs_are_the_pairs():
    """Compiled programs, in which the number of pairs in a part is unknown."""
    graph = CompleteGraph.packed(LENGTHS, SOURCES)
    pairs = graph.edge_index[:, torch.randint(graph.num_edges, (60,))]
    bias = SparseBias(pairs, torch.randn(60, H))
    traced = gattn.bias._TracedPairs(bias.target, bias.source, bias.values, graph.blocks)
    for elements, n, m in (((0,), 5, 5), ((3,), 12, 12), ((0, 0), 5, 5)):
        found, expected = (x.of_group(elements, n, m, m - n) for x in (traced, bias.of_graph(graph)))
        part = slice(1, n - 1), slice(2, m)
        torch.testing.assert_close(found.part(*part), expected.part(*part))
    target, source = graph.edge_index[1], graph.edge_index[0]
    torch.testing.assert_close(traced.of_pairs(target, source), bias.of_pairs(target, source))


def test_gradients_in_batches():
    for bias, more in (sparse(N, N, scale=20.0), buckets(N, N)):
        leaves = [*leaves_for(N, N), more]
        out = gattn.attend(*leaves[:3], CompleteGraph(N), bias=bias)
        grads = torch.randn(3, *out.shape, dtype=out.dtype)
        found = torch.autograd.grad(out, leaves, grads, is_grads_batched=True, retain_graph=True)
        for place, grad in enumerate(grads):
            for x, y in zip(found, torch.autograd.grad(out, leaves, grad, retain_graph=True), strict=True):
                torch.testing.assert_close(x[place], y)


def test_wrong_biases_say_what_is_wrong():
    leaves, graph = leaves_for(), CompleteGraph(N, M)
    pairs, values, table = torch.tensor([[0, 1], [1, 2]]), torch.zeros(2, H), torch.zeros(5, H)

    def attend(bias, graph=graph, leaves=leaves):
        return gattn.attend(*leaves, graph, bias=bias)

    with pytest.raises(ValueError, match=r"one bias per listed pair"):
        SparseBias(pairs, torch.zeros(3, H))
    with pytest.raises(TypeError, match="values must be a tensor"):
        SparseBias(pairs, [0.0, 0.0])
    with pytest.raises(ValueError, match="floating-point"):
        SparseBias(pairs, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="each of the 4 heads"):
        attend(SparseBias(pairs, torch.zeros(2, 3)))
    with pytest.raises(IndexError, match="target index 20"):
        attend(SparseBias(torch.tensor([[0], [N]]), values[:1]))
    with pytest.raises(IndexError, match="negative source"):
        attend(SparseBias(torch.tensor([[-1], [0]]), values[:1]))
    packed, nodes = CompleteGraph.packed([2, 3]), leaves_for(5, 5)
    with pytest.raises(ValueError, match="different blocks"):
        attend(SparseBias(torch.tensor([[0], [3]]), values[:1]), packed, nodes)
    with pytest.raises(TypeError, match="buckets must be integers"):
        BucketBias(torch.zeros(N, M), table)
    with pytest.raises(ValueError, match="one row per bucket"):
        BucketBias(torch.zeros(N, M, dtype=torch.uint8), torch.zeros(5, H, 1))
    with pytest.raises(ValueError, match=r"buckets must be \[20, 25\]"):
        attend(BucketBias(torch.zeros(M, N, dtype=torch.uint8), table))
    with pytest.raises(IndexError, match="buckets hold 5, but the table has 5 rows"):
        attend(BucketBias(torch.full((N, M), 5), table))
    with pytest.raises(IndexError, match="buckets hold -1"):
        attend(BucketBias(lambda target, source: target * 0 + source * 0 - 1, table))
    with pytest.raises(ValueError, match="one bucket per pair"):
        attend(BucketBias(lambda target, source: torch.zeros(3, 3, dtype=torch.int64), table))
    with pytest.raises(ValueError, match="a list of buckets"):
        attend(BucketBias([torch.zeros(2, 2, dtype=torch.uint8)], table))
    with pytest.raises(ValueError, match="return_lse needs the plain softmax"):
        gattn.attend(*leaves, graph, distribution="sigmoid", return_lse=True)
    with pytest.raises(ValueError, match="merge takes"):
        gattn.merge([leaves[0]], [])
    with gattn.check_finite(), pytest.raises(ValueError, match="bias holds"):
        attend(SparseBias(pairs, torch.full((2, H), torch.nan)))


def test_empty_graphs_and_lists():
    nothing = torch.empty(2, 0, dtype=torch.int64)
    values = torch.empty(0, H, dtype=torch.float64, requires_grad=True)
    for n, m in ((N, M), (0, M), (N, 0), (1, 1)):
        assert_as_reference(SparseBias(nothing, values), CompleteGraph(n, m), leaves_for(n, m), [])
        bias, table = buckets(n, m)
        assert_as_reference(bias, CompleteGraph(n, m), leaves_for(n, m), [table])
    assert gattn.attend(*leaves_for(0, 0), CompleteGraph.packed([]), bias=SparseBias(nothing, values)).shape == (
        0,
        H,
        C,
    )


class TestLogSumExp:
    GRAPHS = (
        (CompleteGraph(N, M), N, M),
        (CompleteGraph(M, N, causal=True), M, N),
        (CompleteGraph(200, window=3), 200, 200),
        (CompleteGraph.packed([5, 1, 0, 12], [5, 2, 2, 0]), 18, 9),
        (CompleteGraph.packed([2] * 9), 18, 18),
        (SparseGraph(random_edge_index(M, N, 40), N, M), N, M),
    )

    @pytest.mark.parametrize("case", range(len(GRAPHS)))
    def test_equals_the_formula(self, case):
        graph, n, m = self.GRAPHS[case]
        for score in (None, AdditiveScore(torch.randn(H, C, dtype=torch.float64))):
            for batch in ((), (2,)):
                assert_as_reference(None, graph, leaves_for(n, m, batch), score=score)

    def test_by_hand(self):
        query, key = torch.tensor([[[1.0]], [[2.0]]]), torch.tensor([[[0.0]], [[3.0]]])
        _, lse = gattn.attend(query, key, key, CompleteGraph(2), score=DotScore(1.0), return_lse=True)
        torch.testing.assert_close(lse.flatten(), torch.tensor([[0.0, 3.0], [0.0, 6.0]]).logsumexp(1))
        _, lse = gattn.attend(query, key, key, torch.tensor([[0, 1], [0, 0]]), score=DotScore(1.0), return_lse=True)
        torch.testing.assert_close(lse.flatten(), torch.tensor([torch.tensor([0.0, 3.0]).logsumexp(0), -torch.inf]))

    def test_unions(self):
        leaves = leaves_for(N, N)
        dense_graph = CompleteGraph(N).edge_index
        chosen = torch.rand(dense_graph.size(1)) < 0.3
        parts = [SparseGraph(dense_graph[:, which], N, N) for which in (chosen, ~chosen)]
        empty = SparseGraph(dense_graph[:, :0], N, N)
        found = [gattn.attend(*leaves, graph, return_lse=True) for graph in (*parts, empty)]
        out, lse = gattn.merge(*zip(*found, strict=True))
        expected = gattn.attend(*leaves, CompleteGraph(N), return_lse=True)
        for x, y in zip((out, lse), expected, strict=True):
            torch.testing.assert_close(x, y)
        grads = (derivatives(pair, leaves, True) for pair in ((out, lse), expected))
        for x, y in zip(*grads, strict=True):
            torch.testing.assert_close(x, y)
        nobody = gattn.merge(*zip(*[gattn.attend(*leaves, empty, return_lse=True)] * 2, strict=True))
        assert (nobody[0] == 0).all()
        assert (nobody[1] == -torch.inf).all()

    def test_gradcheck(self):
        leaves = [x[:4].detach().requires_grad_() for x in leaves_for(4, 4)]
        bias, values = sparse(4, 4, 5)

        def both(query, key, value, values):
            return gattn.attend(query, key, value, CompleteGraph(4), bias=bias.with_tensors([values]), return_lse=True)

        assert torch.autograd.gradcheck(both, (*leaves, values))


@pytest.mark.parametrize("make", [lambda: sparse(N, N), near], ids=["sparse", "buckets"])
def test_explained(make):
    """Explainers see the weights that a bias has changed."""

    class Biased(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, (self.bias, _) = gattn.Attention(), make()

        def forward(self, x, edge_index):
            return self.attention(x, x, x, edge_index, bias=self.bias).flatten(1)

    model, x, edges = Biased(), torch.randn(N, H, C, dtype=torch.float64), random_edge_index(N, num_edges=60)
    config = {"mode": "regression", "task_level": "node"}
    options = {"explanation_type": "model", "edge_mask_type": "object", "model_config": config}
    found = Explainer(model, AttentionExplainer(), **options)(x, edges).edge_mask
    _, weights = gattn.attend(x, x, x, edges, bias=model.bias, return_weights=True)
    torch.testing.assert_close(found, weights.mean(1).detach(), check_dtype=False)
    _, plain = gattn.attend(x, x, x, edges, return_weights=True)
    assert not torch.allclose(plain, weights)


@pytest.mark.parametrize("law", ["softmax", "sigmoid", "sparsemax", gattn.Identity(normalize=True), None], ids=str)
@pytest.mark.parametrize("backend", ["auto", "dense", "cpu", "reference"])
def test_a_pair_that_joins_two_blocks(backend, law):
    graph, (query, key, value) = CompleteGraph.packed([2, 3]), leaves_for(5, 5)
    bias = SparseBias(torch.tensor([[0, 0], [1, 3]]), torch.zeros(2, H))
    options = {"bias": bias, "distribution": law, "backend": backend}
    with pytest.raises(ValueError, match="different blocks of the packed graph"):
        gattn.weigh(query, key, graph, **options) if law is None else gattn.attend(query, key, value, graph, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(
    "graph", [CompleteGraph(3), CompleteGraph.packed([2, 1]), SparseGraph(torch.tensor([[0], [1]]), 3, 3)]
)
def test_pairs_that_are_listed_twice_are_summed_before_they_are_rounded(graph, backend, dtype):
    nothing = torch.zeros(3, 1, 2, dtype=dtype)
    bias = SparseBias(
        torch.zeros(2, 2, dtype=torch.int64) + torch.tensor([[0], [1]]), torch.tensor([[1], [0]]).to(dtype)
    )
    bias.values[1] = torch.finfo(dtype).eps / 4
    _, log_sum = gattn.attend(nothing, nothing, nothing, graph, bias=bias, return_lse=True, backend=backend)
    others = 0 if isinstance(graph, SparseGraph) else 2 if graph.blocks is None else 1
    exact = (bias.values.double().sum().exp() + others).log()
    torch.testing.assert_close(log_sum[1, 0].double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(1, 1, 6), (1, 6, 1), (1, 6, 5)])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_rows_of_the_wrong_shape(shape, backend):
    class Wrong(gattn.Bias):
        def rows(self, start, stop):
            return torch.zeros(shape)

    with pytest.raises(ValueError, match=r"Wrong\.rows\(0, 6\) must have one row per target"):
        gattn.attend(*leaves_for(6, 6), CompleteGraph(6), bias=Wrong(), backend=backend)


@pytest.mark.parametrize(
    "graph", [CompleteGraph(30), CompleteGraph.packed([10, 12, 8]), SparseGraph(random_edge_index(30, 30, 90))]
)
@pytest.mark.parametrize("made", ["once", "per step"])
def test_what_follows_from_pairs_is_found_once(made, graph, monkeypatch):
    """Several layers and steps sort and lay out the pairs of a bias once, also if only its values are new."""
    counts: Counter[str] = Counter()

    def counted(owner, name):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: (counts.update([name]), function(*args, **kwargs))[1])

    counted(gattn.bias.Pairs, "ordered")
    counted(gattn.bias.SparseBias, "_check_pairs")
    counted(gattn.ops.backends.cpu.layout, "Layout")
    pairs, values = torch.randint(8, (2, 20)), torch.randn(20, H, requires_grad=True)
    bias, found = SparseBias(pairs, values), []
    for _ in range(3):
        x = torch.randn(30, H, C, requires_grad=True)
        for _ in range(4):
            x = gattn.attend(x, x, x, graph, bias=SparseBias(pairs, values * 1) if made == "per step" else bias)
        x.sum().backward()
        found.append(dict(counts))
    assert found[0] == found[2]
    pairs.copy_(pairs.flip(1) + 1)  # and again when they were edited
    bias = SparseBias(pairs, values) if made == "per step" else bias
    out, expected = (gattn.attend(x, x, x, graph, bias=bias, backend=name) for name in ("auto", "reference"))
    torch.testing.assert_close(out, expected)
    assert counts["ordered"] > found[2]["ordered"]


def test_the_last_block_of_a_window_may_have_one_target():
    """Rows beyond the last target are not there: a single row is no mistake."""

    class Outer(gattn.Bias):
        def rows(self, start, stop):
            return (u[start:stop, None] * u).unsqueeze(0)

    u, nodes = torch.randn(193, dtype=torch.float64), leaves_for(193, 193)
    found, exact = (
        gattn.attend(*nodes, CompleteGraph(193, window=3), bias=Outer(), backend=name) for name in ("auto", "reference")
    )
    torch.testing.assert_close(found, exact)
