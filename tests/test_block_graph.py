"""Graphs of blocks: by tiles of pairs, by lists of edges, and blocks that are chosen by scores."""

import pytest
import torch

import gattn
from gattn.graphs import BlockGraph, SparseGraph, top_blocks
from tests.nn.largest_tensor import LargestTensor

H, C = 2, 5

#: Sizes of blocks: of one node, no whole vector, parts of a panel, a panel, and more.
BLOCKS = [1, 3, 16, 64, 100]
#: The batch, and what is in front of the blocks: what heads and elements share.
FRONTS = [((), ()), ((), (H,)), ((3,), (1,)), ((3,), (1, H)), ((3,), (3, H)), ((2, 2), (2, 1, 1))]
OPTIONS = {
    "softmax": {},
    "gate": {"distribution": "sigmoid"},
    "sink and cap": {"distribution": gattn.Softmax(sink=torch.tensor([0.3, -1.0]).double(), softcap=2.0)},
    "leaky": {"score": gattn.DotScore(0.5, negative_slope=0.2)},
}


def nodes(front, n, m, dtype=torch.double, heads=H, of_keys=H):
    torch.manual_seed(n + m)
    shapes = (n, heads), (m, of_keys), (m, of_keys)
    return [torch.randn(*front, *shape, C, dtype=dtype, requires_grad=True) for shape in shapes]


def blocks(front, block, n, m, share, causal=False):
    torch.manual_seed(block)
    listed = torch.rand(*front, -(-n // block), -(-m // block)) < share
    return BlockGraph(listed, block, n, m, causal=causal)


def check(graph, tensors, **options):
    """The tiles compute what messages along the edges do, and so do gradients."""
    results = []
    for backend in ("dense", "reference"):
        out = gattn.attend(*tensors, graph, backend=backend, **options)
        of_out = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape).sin()
        results.append([out.detach(), *torch.autograd.grad(out, tensors, of_out)])
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "front"), FRONTS)
def test_tiles_are_messages_along_the_edges(block, causal, batch, front):
    for n, m in ((1, 1), (5, 7), (130, 200)):
        for share in (0.0, 0.4):
            check(blocks(front, block, n, m, share, causal), nodes(batch, n, m))


@pytest.mark.parametrize("option", OPTIONS)
def test_distributions_and_scores(option):
    check(blocks((H,), 16, 90, 90, 0.3), nodes((), 90, 90), **OPTIONS[option])


def test_fewer_heads_of_keys():
    check(blocks((4,), 16, 90, 90, 0.3), nodes((2,), 90, 90, heads=4, of_keys=2))


@pytest.mark.parametrize("block", BLOCKS)
def test_from_edges(block):
    torch.manual_seed(0)
    edges = (torch.rand(90, 70) < 0.2).nonzero().t().flip(0)  # sources above targets
    graph = BlockGraph.from_edges(edges[:, torch.randperm(edges.size(1))], 90, 70, block=block)
    assert torch.equal(graph.edge_index, edges)
    tiles = graph.tiles >= 0
    pairs = torch.ones(90, 70).sum() if bool(tiles.all()) else None
    if pairs is not None:
        assert graph.filled == pytest.approx(edges.size(1) / float(pairs))
    check(graph, nodes((2,), 90, 70))
    check(BlockGraph.from_edges(edges[:, :0], 90, 70, block=block), nodes((), 90, 70))
    whole = SparseGraph(edges, 90, 70)
    x = nodes((), 90, 70)
    torch.testing.assert_close(gattn.attend(*x, graph), gattn.attend(*x, whole))


def test_edges_of_heads_and_layers():
    """Weights come for each edge of any head; layers and other scores take the graph."""
    graph, x = blocks((H,), 3, 10, 10, 0.4), nodes((), 10, 10)
    out, alpha = gattn.attend(*x, graph, return_weights=True)
    source, target = graph.edge_index
    seen = (graph.tiles >= 0)[:, target // 3, source // 3].t()
    assert not seen.all()
    assert torch.equal(alpha > 0, seen)
    torch.testing.assert_close(out, gattn.attend(*x, graph))
    additive = gattn.AdditiveScore(torch.randn(H, C, dtype=torch.double))
    expected = gattn.attend(*x, SparseGraph(graph.edge_index, 10, 10), score=additive, mask=seen)
    torch.testing.assert_close(gattn.attend(*x, graph, score=additive), expected)
    shared = blocks((), 3, 10, 10, 0.4)
    for layer in (gattn.nn.TransformerConv(4, 3, heads=2), gattn.nn.GATConv(4, 3, add_self_loops=False)):
        y = torch.randn(10, 4)
        torch.testing.assert_close(layer(y, shared), layer(y, shared.edge_index))
    some = torch.tensor([7, 2])
    query, key, value = x
    found = gattn.attend(query[some], key, value, shared.for_targets(some))
    torch.testing.assert_close(found, gattn.attend(*x, shared)[some])
    with pytest.raises(ValueError, match="edges that all heads"):
        graph.for_targets(some)


def test_what_is_not_seen_may_be_anything():
    for block in (4, 64):
        graph = BlockGraph(
            torch.tensor([[True, False, True], [True, False, True], [False, True, False]]), block, 3 * block
        )
        x = nodes((), 3 * block, 3 * block, torch.float)
        with torch.no_grad():
            x[1][block], x[2][block + 1] = torch.nan, torch.inf
        out = gattn.attend(*x, graph)
        assert out[: 2 * block].isfinite().all()
        assert not out[2 * block :].isfinite().all()
        (grad,) = torch.autograd.grad(out[: 2 * block].sum(), x[0])
        assert grad[: 2 * block].isfinite().all()
    graph = BlockGraph.from_edges(torch.tensor([[0, 2], [0, 0]]), 3, block=3)
    x = [torch.tensor([1.0, torch.nan, 2.0]).view(3, 1, 1)] * 3
    assert gattn.attend(*x, graph).flatten().tolist()[1:] == [0.0, 0.0]
    assert gattn.attend(*x, graph)[0].isfinite()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float])
def test_thousands_of_terms(dtype):
    graph = blocks((H,), 64, 150, 5000, 0.6)
    x = [t.detach().to(dtype).requires_grad_() for t in nodes((), 150, 5000)]
    exact = [t.detach().double().requires_grad_() for t in x]
    found, expected = (gattn.attend(*tensors, graph, backend="dense") for tensors in (x, exact))
    grads, of_exact = (torch.autograd.grad(out.square().sum(), t) for out, t in ((found, x), (expected, exact)))
    allowed = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float: 1e-5}[dtype]
    for a, b in zip((found, *grads), (expected, *of_exact), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=allowed, atol=allowed * float(b.detach().abs().max()))


def test_bits_second_derivatives_and_dropout(monkeypatch):
    graph, x = blocks((), 16, 300, 300, 0.3), nodes((), 300, 300, torch.float)
    bits = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        bits.append([*torch.autograd.grad(gattn.attend(*x, graph).square().sum(), x)])
    assert all(torch.equal(*pair) for pair in zip(*bits, strict=True))
    small = blocks((H,), 3, 7, 5, 0.6), nodes((2,), 7, 5)
    holes = BlockGraph.from_edges((torch.rand(7, 5) < 0.5).nonzero().t().flip(0), 7, 5, block=4)
    for other in (small[0], holes):
        assert torch.autograd.gradgradcheck(lambda *t, g=other: gattn.attend(*t, g), small[1])
    ones = [torch.ones(300, 1, 1)] * 3
    torch.manual_seed(0)
    dropped = gattn.attend(*ones, graph, dropout=0.5, training=True).mean() / gattn.attend(*ones, graph).mean()
    assert dropped == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_top_blocks(shared, causal):
    query, key, _ = (t.detach() for t in nodes((2,), 22, 22, torch.float, heads=4, of_keys=2))
    graph = top_blocks(query, key, block=4, k=3, causal=causal, shared=shared)
    repeated = key.repeat_interleave(2, 2)
    for b in range(2):
        for h in range(4):
            scores = torch.zeros(6, 6)
            for a in range(6):
                for c in range(6):
                    heads = range(4) if shared else [h]
                    scores[a, c] = sum(
                        (query[b, 4 * a : 4 * a + 4, i].mean(0) * repeated[b, 4 * c : 4 * c + 4, i].mean(0)).sum()
                        for i in heads
                    )
            for a in range(6):
                others = [c for c in range(a if causal else 6) if c != a]
                best = {a, *sorted(others, key=lambda c: -scores[a, c])[:2]}
                found = (graph.tiles[b, 0 if shared else h, a] >= 0).nonzero().flatten().tolist()
                assert set(found) == best
    assert graph.causal == causal


def test_wrong_inputs():
    listed = torch.ones(2, 2, dtype=torch.bool)
    x = nodes((), 4, 4)
    for make, error, text in (
        (lambda: BlockGraph([[True]], 2, 4), TypeError, "tensor of booleans"),
        (lambda: BlockGraph(listed.long(), 2, 4), TypeError, "tensor of booleans; got torch.int64"),
        (lambda: BlockGraph(listed, 2, 5), ValueError, r"listed must be \[..., 3, 3\]"),
        (lambda: BlockGraph(listed, 0, 4), ValueError, "block must be at least 1"),
        (lambda: BlockGraph(listed, 2, 4, causal="no"), TypeError, "causal"),
        (lambda: gattn.attend(*nodes((), 5, 5), BlockGraph(listed, 2, 4)), ValueError, "4 targets and 4 sources"),
        (lambda: gattn.attend(*x, BlockGraph(listed.expand(3, 2, 2), 2, 4)), ValueError, "blocks of 3 heads"),
        (lambda: gattn.attend(*x, BlockGraph(listed.expand(3, 2, 2, 2), 2, 4)), ValueError, "for a batch"),
        (
            lambda: gattn.attend(*x, BlockGraph(listed, 2, 4), bias=torch.zeros(16, H), backend="dense"),
            ValueError,
            "edge",
        ),
        (lambda: BlockGraph.from_edges(torch.tensor([[0, 0], [1, 1]]), 2), ValueError, "listed twice"),
        (lambda: BlockGraph.from_edges(torch.tensor([[0, 5], [1, 1]]), 2), IndexError, "5"),
        (lambda: BlockGraph.from_edges(torch.tensor([[0], [1]])), ValueError, "pass num_targets"),
        (lambda: top_blocks(x[0], x[1][:3]), ValueError, "same nodes"),
        (lambda: top_blocks(x[0], x[1], k=0), ValueError, "k must be at least 1"),
        (lambda: top_blocks(x[0], x[1], shared="no"), TypeError, "shared"),
        (lambda: top_blocks(x[0][0], x[1]), ValueError, "query must be"),
    ):
        with pytest.raises(error, match=text):
            make()


def test_no_list_of_edges(monkeypatch):
    """16 of 64 blocks take neither a matrix of all pairs nor a list of them."""
    monkeypatch.setattr(BlockGraph, "edge_index", property(lambda graph: pytest.fail("edges were listed")))
    x = [torch.randn(4096, 1, 8, requires_grad=True) for _ in range(3)]
    graph = top_blocks(x[0], x[1], k=16)
    gattn.attend(*x, graph).sum().backward()
    assert all(t.grad.isfinite().all() for t in x)


@pytest.mark.parametrize("front", [(), (H,)])
def test_compiled_whole(front):
    graph, x = blocks(front, 16, 60, 60, 0.5, causal=True), nodes((), 60, 60)
    assert graph.edge_index.size(0) == 2  # listed outside, as masks of heads need a number of edges that is known
    compiled = torch.compile(lambda *t: gattn.attend(*t, graph), fullgraph=True)
    results = [(out, *torch.autograd.grad(out.sin().sum(), x)) for out in (compiled(*x), gattn.attend(*x, graph))]
    torch.testing.assert_close(*results)


def test_its_list_of_edges_needs_no_matrix():
    listed = torch.eye(1000, dtype=torch.bool)
    graph = BlockGraph(listed, 8, 8000)
    with LargestTensor() as largest:
        assert graph.edge_index.shape == (2, 8 * 8000)
        assert graph.filled == 1.0
    assert largest.numel < 8000**2 / 4
