"""Zero is a size: complete graphs with nothing of one kind or another, against the reference on their own edges."""

import itertools

import pytest
import torch

from gattn import CompleteGraph, attend, weigh
from gattn.ops.backends.dense import matrices
from tests.cases import SCORES, make_score, mostly_slow, pairs

BATCHES = [(), (0,), (2,), (2, 0)]
KINDS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (1, 0)},
    "causal window": {"causal": True, "window": (1, 1)},
}
EMPTY = {"none": (2, 3, 2), "heads": (0, 3, 2), "channels": (2, 0, 2), "value channels": (2, 3, 0)}
# Heads of key and value divide those of the query: a dot product has some.
CASES = [
    (score, empty)
    for score in ("dot", "leaky dot", "gat", "leaky_relu")
    for empty in EMPTY
    if "dot" not in score or empty != "heads"
]


def graphs(num_targets, num_sources, batch, options):
    yield CompleteGraph(num_targets, num_sources, **options)
    if batch:
        sources, targets, nothing = torch.full(batch, num_sources), torch.full(batch, num_targets), torch.full(batch, 0)
        for lengths in (
            {"source_lengths": sources},
            {"target_lengths": nothing},
            {"source_lengths": nothing, "target_lengths": targets},
        ):
            yield CompleteGraph(num_targets, num_sources, **lengths, **options)
    blocks = [
        ([num_targets], [num_sources]),
        ([num_targets, 0], [0, num_sources]),
        ([0, num_targets], [0, num_sources]),
    ]
    blocks += [([], [])] if num_targets == num_sources == 0 else []
    for targets, sources in blocks:
        yield CompleteGraph.packed(targets, sources, **options)


def terms(graph, batch, heads):
    """A bias and a mask, in full shape."""
    shape = (*batch, heads, graph.num_targets, graph.num_sources)
    if graph.blocks is not None:
        most = [max(sizes, default=0) for sizes in zip(*graph.blocks, strict=True)] or [0, 0]
        shape = (len(graph.blocks), heads, *most)
    yield {}
    yield {"bias": torch.randn(shape, dtype=torch.double)}
    yield {"mask": torch.rand(shape) < 0.5}


def results(tensors, graph, score, **options):
    leaves = [x.clone().requires_grad_() for x in tensors]
    outs = attend(*leaves, graph, score=score, return_weights=True, **options)
    logits = weigh(*leaves[:2], graph, score=score, distribution=None, **options)
    logits = logits if isinstance(logits, list) else [logits]
    outs += tuple(part.masked_fill(part == -torch.inf, 0.0) for part in logits)
    if "bias" not in options and "mask" not in options:
        options.update(return_weights="dropped", dropout=1.0, training=True)  # drops everything
        outs += attend(*leaves, graph, score=score, **options)
    flat = [x for out in outs for x in (out if isinstance(out, list) else [out])]
    loss = sum((x * torch.arange(x.numel()).view(x.shape).cos()).sum() for x in flat)
    return [*flat, *torch.autograd.grad(loss, leaves, materialize_grads=True)]


@pytest.mark.parametrize(("case", "batch", "kind"), mostly_slow(pairs(CASES, BATCHES, KINDS), every=8))
def test_as_the_reference(case, batch, kind, monkeypatch):
    monkeypatch.setattr(matrices, "_TOGETHER", (1, 1))  # so that targets of windows of these sizes are computed in turn
    name, empty = case
    heads, channels, value_channels = EMPTY[empty]
    score = make_score(name, torch.randn(heads, channels, dtype=torch.double))
    for num_targets, num_sources in itertools.product((0, 3), (0, 4)):
        shapes = SCORES[name].shapes(num_targets, num_sources, heads, channels)
        shapes = (shapes["query"], shapes["key"], (num_sources, heads, value_channels))
        tensors = [torch.randn(*batch, *shape, dtype=torch.double) for shape in shapes]
        for graph in graphs(num_targets, num_sources, batch, KINDS[kind]):
            for options in terms(graph, batch, heads):
                actual, expected = (
                    results(tensors, graph, score, backend=backend, **options) for backend in ("dense", "reference")
                )
                torch.testing.assert_close(
                    actual, expected, rtol=1e-10, atol=1e-10, msg=lambda m, case=(graph, options): f"{case}: {m}"
                )


@pytest.mark.parametrize("batch", [(), (0,), (2, 3)])
@pytest.mark.parametrize("sizes", list(itertools.product((0, 3), (0, 4), (0, 2))))
def test_log_sum_beside_dropped_weights(sizes, batch):
    num_targets, num_sources, heads = sizes
    query, key = torch.randn(*batch, num_targets, heads, 5), torch.randn(*batch, num_sources, heads, 5)
    score = make_score("leaky_relu", torch.randn(heads, 5))
    options = {"score": score, "return_weights": "dropped", "return_lse": True}
    graph = CompleteGraph(num_targets, num_sources)
    found, wanted = (attend(query, key, key, graph, backend=backend, **options) for backend in ("dense", "reference"))
    torch.testing.assert_close(found, wanted)
