"""Inputs that are edited in place between the passes: autograd's error, or the gradients without the edit."""

import re

import pytest
import torch

import gattn
from gattn import AdditiveScore, Bias, BucketBias, CompleteGraph, DotScore, SparseBias, SparseGraph, Typed
from gattn.ops import custom_parts
from gattn.ops.backends import dense
from tests.cases import mostly_slow

N, H, C, E, K = 40, 2, 4, 300, 3


class Own(gattn.Score):
    broadcasts = True

    def logits(self, query, key, edge):
        return torch.tanh(query * key).sum(-1) + (0 if edge is None else edge.sum(-1))


class OfRows(Bias):
    """A bias of one's own, which reads integers."""

    def __init__(self, table, order):
        self.table, self.order = table, order

    def tensors(self):
        return (self.table,)

    def with_tensors(self, tensors):
        return OfRows(*tensors, self.order)

    def rows(self, start, stop):
        return self.table[self.order[start:stop]].unsqueeze(0)


GRAPHS = {
    "complete": CompleteGraph(N),
    "causal": CompleteGraph(N, causal=True),
    "window": CompleteGraph(N, window=3),
    "packed": CompleteGraph.packed([20, 12, 8]),
    "list": None,
}
SCORES = {"dot": DotScore(), "own": Own(), "additive": AdditiveScore(torch.linspace(-1, 1, H * C).view(H, C))}
#: A term of a call: what is edited, what else gets a gradient, and the arguments of these.
TERMS = {
    "buckets": (lambda: (torch.randint(0, K, (N, N)), torch.randn(K, H)), lambda x, y: {"bias": BucketBias(x, y)}),
    "rows": (lambda: (torch.randint(0, N, (N,)), torch.randn(N, N)), lambda x, y: {"bias": OfRows(y, x)}),
    "pairs": (lambda: (torch.randint(0, 8, (2, 20)), torch.randn(20, H)), lambda x, y: {"bias": SparseBias(x, y)}),
    "mask": (lambda: (torch.rand(N, N) > 0.3, None), lambda x, y: {"mask": x}),
    "mask of edges": (lambda: (torch.rand(E) > 0.3, None), lambda x, y: {"mask": x}),
    "types": (lambda: (torch.randint(0, K, (E,)), torch.randn(K, H, C)), lambda x, y: {"edge": Typed(y, x)}),
    "edges": (lambda: (torch.randint(0, N, (2, E)), None), lambda x, y: {"graph": SparseGraph(x, N, N)}),
    **dict.fromkeys(("query", "key", "value"), (lambda: (None, None), lambda x, y: {})),
}


def cases():
    for graph in GRAPHS:
        for term in TERMS:
            is_of_edges = term in ("mask of edges", "types", "edges")
            if (graph != "list" and is_of_edges) or (graph == "list" and term == "mask"):
                continue
            if graph == "packed" and term in ("buckets", "rows", "mask"):
                continue
            yield from ((graph, term, score, law) for score in SCORES for law in ("softmax", "sigmoid", "sparsemax"))


def gradients(graph, term, score, law, edited):
    torch.manual_seed(0)
    make, arguments = TERMS[term]
    inputs = dict(zip(("query", "key", "value"), torch.randn(3, N, H, C).requires_grad_().unbind(), strict=True))
    given = {name: x * 1 for name, x in inputs.items()}
    listed = torch.randint(0, N, (2, E))
    held, values = make()
    leaves = [*inputs.values()] + ([] if values is None else [values.requires_grad_()])
    call = {"graph": GRAPHS[graph] or SparseGraph(listed, N, N)} | arguments(held, values)
    out = gattn.attend(**given, score=SCORES[score], distribution=law, **call)
    if edited:
        with torch.no_grad():
            changed = given[term] if held is None else held
            changed.copy_(~changed if changed.dtype == torch.bool else changed.flip(0))
    return torch.autograd.grad(out.square().sum(), leaves)


@pytest.mark.parametrize(("graph", "term", "score", "law"), mostly_slow(cases(), 7))
def test_edits_between_the_passes(graph, term, score, law, monkeypatch):
    monkeypatch.setattr(custom_parts, "_FEWEST", 16)
    monkeypatch.setattr(dense, "_CHUNK", 256)
    monkeypatch.setattr(dense, "_SMALL", 16)
    monkeypatch.setattr(dense.rows, "_LOGITS", 2000)
    expected = gradients(graph, term, score, law, edited=False)
    try:
        found = gradients(graph, term, score, law, edited=True)
    except RuntimeError as error:
        if not re.search("modified .*inplace", str(error)):
            raise
    else:
        for ours, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, wanted)
