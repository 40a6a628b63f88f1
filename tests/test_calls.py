"""`explain_call` against what a call really runs."""

import pytest
import torch

import gattn
from gattn import CompleteGraph, attend, explain_call, weigh
from gattn.ops.backends.cpu import Cpu, native, pairs
from gattn.ops.backends.dense import dot_products, linear, matrices, tiles

pytestmark = pytest.mark.skipif(native.load_error() is not None, reason="without kernels, there are other ways")

H, C = 4, 8
SMALL, LARGE = torch.randn(5, H, C), torch.randn(2, 150, H, C)
LIST, ADDITIVE = torch.randint(5, (2, 9)), gattn.AdditiveScore(torch.randn(H, C))


class OwnScore(gattn.DotScore):
    """The same formula, which kernels cannot know."""

    def logits(self, query, key, edge):
        return super().logits(query, key, edge)


class OwnBias(gattn.Bias):
    """A bias that only its rows describe."""

    def rows(self, start, stop):
        return torch.zeros(1, stop - start, 150)


def seen(n):
    return torch.rand(n, n) < 0.9


#: By the way that computes them: the tensor, the graph and the options.
CALLS = {
    "dense: sums over sources that targets share": [
        (LARGE, CompleteGraph(150), {"distribution": gattn.Identity(normalize=True)}),
        (LARGE, CompleteGraph(150, causal=True), {"distribution": gattn.Identity()}),
    ],
    "dense: tiles of pairs": [
        (LARGE, CompleteGraph(150), {}),
        (LARGE, CompleteGraph(150, source_lengths=torch.tensor([3, 150])), {}),
        (SMALL, CompleteGraph(5), {"distribution": gattn.Softmax(softcap=5.0), "mask": seen(5)}),
        (SMALL, CompleteGraph(5, window=1), {"return_weights": True}),
        (SMALL, CompleteGraph(5), {"dropout": 0.5, "training": True}),
        (SMALL, CompleteGraph(5), {"bias": gattn.SparseBias(LIST, torch.randn(9, H))}),
        (SMALL, CompleteGraph(5), {"return_lse": True}),
        (LARGE[0], CompleteGraph.packed([50, 100]), {}),
    ],
    "dense: PyTorch's fused attention": [
        (SMALL, CompleteGraph(5), {}),
        (SMALL, CompleteGraph(5, causal=True), {"return_weights": True}),
    ],
    "dense: lists of pairs, some targets at a time": [
        (LARGE, CompleteGraph(150), {"score": ADDITIVE, "mask": seen(150)}),
        (SMALL, CompleteGraph(5), {"score": ADDITIVE, "backend": "dense"}),
    ],
    "dense: matrices, some targets at a time": [
        (SMALL, CompleteGraph(5), {"distribution": "sparsemax"}),
        (SMALL, CompleteGraph(5), {"score": ADDITIVE, "mask": seen(5), "return_weights": True}),
        (LARGE[0], CompleteGraph(150), {"bias": OwnBias(), "return_lse": True}),
    ],
    "cpu: kernels for lists of edges": [
        (SMALL, LIST, {}),
        (SMALL, CompleteGraph(5), {"score": ADDITIVE}),
        (SMALL, CompleteGraph.packed([2, 3]), {}),
    ],
    "cpu: kernels for sums, of weights or logits that PyTorch computes": [(SMALL, LIST, {"score": OwnScore()})],
    "reference: message passing": [(SMALL, LIST, {"backend": "reference"})],
}

CASES = [(name, *case) for name, cases in CALLS.items() for case in cases]


@pytest.fixture
def ran(monkeypatch):
    """What was run, from first to last."""
    calls = []

    def record(owner, function, name):
        original = getattr(owner, function)

        def recorded(*args, **kwargs):
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, function, recorded)

    record(linear, "attend", "dense: sums over sources that targets share")
    record(tiles, "attend", "dense: tiles of pairs")
    for owner in (dot_products, matrices):
        record(owner, "by_pytorch", "dense: PyTorch's fused attention")
    record(pairs, "attend", "dense: lists of pairs, some targets at a time")
    record(matrices, "_by_matrix", "dense: matrices, some targets at a time")
    record(Cpu.operator, "run_plain", "cpu")
    record(gattn.attention.Attention, "_by_messages", "reference: message passing")
    return calls


@pytest.mark.parametrize(("name", "x", "graph", "options"), CASES, ids=[case[0] for case in CASES])
def test_it_names_what_runs(name, x, graph, options, ran):
    found = explain_call(x, x, x, graph, **options)
    assert not ran
    assert f"{found.backend}: {found.way}" == name
    for _ in range(2):
        attend(x, x, x, graph, **options)
        assert ran[0] == (name if found.backend != "cpu" else "cpu")
        ran.clear()
    assert all(found.reasons.values())
    assert len(str(found).splitlines()) == 1 + len(found.reasons)
    assert name not in {way.replace(", ", ": ", 1) for way in found.reasons}


def test_what_is_prepared():
    """And that these calls are really not looked at again."""
    x, graph = SMALL, CompleteGraph(5)
    assert explain_call(x, x, x, LIST).is_prepared
    assert explain_call(x, x, None, graph).is_prepared
    assert explain_call(None, None, x, LIST, bias=torch.rand(9, H), distribution="identity").is_prepared
    with gattn.check_finite():
        assert not explain_call(x, x, x, LIST).is_prepared
    assert explain_call(None, x[..., 0], x, LIST, bias=torch.rand(9, H), score=gattn.GATScore()).is_prepared
    assert not explain_call(x, x, x, LIST, score=OwnScore()).is_prepared
    assert not explain_call(x, x, x, graph, distribution="sparsemax").is_prepared
    torch.testing.assert_close(weigh(x, x, graph), attend(x, x, x, graph, return_weights=True)[1])


def test_requests_and_transforms():
    with gattn.backend("reference"):
        assert explain_call(SMALL, SMALL, SMALL, LIST).backend == "reference"
    found = []
    torch.func.vmap(lambda x: found.append(explain_call(x, x, x, CompleteGraph(150))) or x)(LARGE)
    assert found[0].backend == "reference"
    assert "torch.func" in found[0].reasons["dense"]
    with pytest.raises(gattn.errors.BackendError, match="complete graphs"):
        explain_call(SMALL, SMALL, SMALL, LIST, backend="dense")
    with pytest.raises(ValueError, match="unknown backend"):
        explain_call(SMALL, SMALL, SMALL, LIST, backend="best")
    with pytest.raises(ValueError, match="return_weights"):
        explain_call(SMALL, SMALL, SMALL, LIST, return_weights="all")
    with pytest.raises(TypeError, match="score"):
        explain_call(SMALL, SMALL, SMALL, LIST, score="dot")
