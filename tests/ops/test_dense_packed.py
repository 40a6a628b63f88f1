"""Packed complete graphs by PyTorch's attention of variable length: what that is called with, without a GPU."""

import pytest
import torch

from gattn import AdditiveScore, CompleteGraph, attend
from gattn.ops.backends.dense import flash

pytestmark = pytest.mark.usefixtures("without_tiles")


def attention(query, key, value, starts, source_starts, most, most_sources, *, scale, window_size):
    """What PyTorch documents: windows are aligned at the bottom right of each block."""
    assert query.dim() == key.dim() == value.dim() == 3
    assert starts.dtype == source_starts.dtype == torch.int32
    left, right = window_size
    out = torch.full_like(query, torch.nan)
    for (first, last), (a, b) in zip(starts.unfold(0, 2, 1), source_starts.unfold(0, 2, 1), strict=True):
        assert last - first <= most
        assert b - a <= most_sources
        q, k, v = (x.transpose(0, 1).float() for x in (query[first:last], key[a:b], value[a:b]))
        place = torch.arange(b - a) - torch.arange(last - first).unsqueeze(1) - ((b - a) - (last - first))
        seen = (place <= right if right >= 0 else True) & (place >= -left if left >= 0 else place == place)
        logits = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)
        out[first:last] = (logits.softmax(-1) @ v).transpose(0, 1).to(out.dtype)
    assert starts[-1] == len(query)
    return out


@pytest.fixture
def calls(monkeypatch):
    counted = []

    def counting(*args, **kwargs):
        counted.append(kwargs["window_size"])
        return attention(*args, **kwargs)

    monkeypatch.setattr(flash, "varlen_attn", counting)
    monkeypatch.setattr(flash, "_PACKED", ("cuda", "cpu"))
    return counted


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize(
    ("graph", "window"),
    [
        (CompleteGraph.packed([3, 5, 2]), (-1, -1)),
        (CompleteGraph.packed([3, 0, 2], [4, 1, 1]), (-1, -1)),
        (CompleteGraph.packed([3, 5, 2], causal=True), (-1, 0)),
        (CompleteGraph.packed([3, 2], [5, 2], causal=True), (-1, 0)),
        (CompleteGraph.packed([9, 5], window=(2, 1)), (2, 1)),
    ],
)
def test_as_the_reference(graph, window, batch, calls):
    query, key, value = (
        torch.randn(*batch, n, 2, 8).bfloat16() for n in (graph.num_targets, graph.num_sources, graph.num_sources)
    )
    out = attend(query, key, value, graph, backend="dense")
    assert calls == [window]
    expected = attend(query.double(), key.double(), value.double(), graph, backend="reference")
    torch.testing.assert_close(out.double(), expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    ("graph", "change", "options"),
    [
        (CompleteGraph.packed([3, 2]), lambda x: x.float(), {}),
        (CompleteGraph.packed([3, 2]), lambda x: x[..., :5], {}),
        (CompleteGraph.packed([3, 2]), lambda x: x, {"bias": torch.zeros(3, 3)}),
        (CompleteGraph.packed([3, 2]), lambda x: x, {"mask": torch.ones(3, 3, dtype=torch.bool)}),
        (CompleteGraph.packed([3, 2]), lambda x: x, {"dropout": 0.5, "training": True}),
        (CompleteGraph.packed([3, 2]), lambda x: x, {"score": AdditiveScore(torch.ones(2, 8))}),
        (CompleteGraph.packed([3, 2], [5, 0]), lambda x: x, {}),
        (CompleteGraph.packed([3, 2], [1, 4], causal=True), lambda x: x, {}),
        (CompleteGraph(5), lambda x: x, {}),
    ],
)
def test_what_it_does_not_know(graph, change, options, calls):
    x = change(torch.randn(5, 2, 8).bfloat16())
    attend(x, x, x, graph, **options)
    assert not calls


def test_the_cpu_does_not_have_it():
    assert flash._PACKED == ("cuda",)
    assert attend(*torch.randn(3, 5, 2, 8).bfloat16(), CompleteGraph.packed([3, 2])).isfinite().all()
