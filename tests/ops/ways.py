"""One call for every way in which attention is computed, over whose table other tests go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

import gattn
from gattn import AdditiveScore, BucketBias, CompleteGraph, DotScore, Identity, SparseBias, attend, weigh
from gattn.edges import Projected, Typed
from gattn.ops import custom_parts
from gattn.ops.backends import dense
from gattn.ops.backends.cpu import pairs
from gattn.ops.backends.dense import linear, listed, rows
from gattn.ops.pair_roots import pair_roots
from tests.cases import Results

__all__ = ["WAYS", "Way", "in_parts"]

N, H, C = 20, 2, 4
NODES = ("query", "key", "value")
#: A bucket of each pair, and how many there are.
K = 5


class Way(NamedTuple):
    """A call, from tensors by name; integers and masks have no gradients."""

    call: Callable[[dict[str, Tensor]], Any]
    more: dict[str, Callable[[], Tensor]] = {}
    """What makes the tensors beside query, key and value"""

    def tensors(self, dtype: torch.dtype = torch.float64) -> Results:
        """The tensors, in turn the same."""
        torch.manual_seed(0)
        made = {name: torch.randn(N, H, C) for name in NODES}
        made |= {name: make() for name, make in self.more.items()}
        return {name: x.to(dtype) if x.is_floating_point() else x for name, x in made.items()}

    def outputs(self, tensors: Results) -> list[Tensor]:
        """The floating-point results."""
        out = self.call(tensors)
        return [x for x in (out if isinstance(out, (tuple, list)) else [out]) if x is not None]

    def gradients(self, outs: Sequence[Tensor], tensors: Results) -> list[Tensor]:
        """Of all leaves, where random numbers come in."""
        generator = torch.Generator().manual_seed(1)
        incoming = [torch.randn(out.shape, generator=generator, dtype=torch.double).to(out) for out in outs]
        leaves = [x for x in tensors.values() if x.requires_grad]
        return list(torch.autograd.grad(outs, leaves, incoming, materialize_grads=True))


#: With these, small calls are computed in the ways of large ones, and in several parts.
PARTS = (
    (dense, "_SMALL", 0),
    (dense, "_CHUNK", 64),
    (dense, "_MOST_KEPT", 0),
    (rows, "_LOGITS", 256),
    (listed, "_MOST_PAIRS", 8),
    (linear, "_ROWS", 8),
    (linear, "_CHUNK", 4),
    (pairs, "_MOST_PAIRS", 64),
    (pairs, "_LEAST_TARGETS", 1),
    (custom_parts, "_FEWEST", 4),
)


@contextmanager
def in_parts() -> Iterator[None]:
    """Small calls are computed as large ones are."""
    with ExitStack() as stack:
        for module, name, number in PARTS:
            stack.enter_context(patch.object(module, name, number))
        stack.enter_context(patch.object(linear, "is_faster", lambda *_: True))
        yield


class Distance(gattn.Score):
    """One that no kernel knows."""

    broadcasts = True

    def logits(self, query: Any, key: Tensor, edge: Tensor | None) -> Tensor:
        """See `Score.logits`."""
        difference = query - (key if edge is None else key + edge)
        return -(difference * difference).sum(-1)


def edges() -> Tensor:
    return torch.randint(N, (2, 4 * N))


def per_edge(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(4 * N, *shape)


def mask() -> Tensor:
    return torch.rand(N, N) < 0.7


def of_graph(graph: Any, **options: Any) -> Callable[[dict[str, Tensor]], Any]:
    """A call on a graph, or one made from the tensors; options may be made from these as well."""

    def call(tensors: dict[str, Tensor]) -> Any:
        on = graph(tensors) if callable(graph) and not isinstance(graph, CompleteGraph) else graph
        made = {name: of(tensors) if callable(of) else of for name, of in options.items()}
        return attend(tensors["query"], tensors["key"], tensors["value"], on, **made)

    return call


def of(name: str) -> Callable[[dict[str, Tensor]], Tensor]:
    return lambda tensors: tensors[name]


def additive(tensors: dict[str, Tensor]) -> AdditiveScore:
    return AdditiveScore(tensors["vector"])


def buckets(tensors: dict[str, Tensor]) -> BucketBias:
    return BucketBias(tensors["buckets"], tensors["table"])


def sparse(tensors: dict[str, Tensor]) -> SparseBias:
    return SparseBias(tensors["pairs"], tensors["values"])


def roots(tensors: dict[str, Tensor]) -> Tensor:
    index = tensors["edge_index"]
    return pair_roots(tensors["query"], tensors["key"], tensors["weight"], tensors["shift"], index[1], index[0])


LIST = {"edge_index": edges}
VECTOR = {"vector": lambda: torch.randn(H, C)}
BUCKETS = {"buckets": lambda: torch.randint(K, (N, N)), "table": lambda: torch.randn(K, H)}
GRAPH = CompleteGraph(N)
CAUSAL = CompleteGraph(N, causal=True)
WINDOW = CompleteGraph(N, window=(2, 1))
PACKED = CompleteGraph.packed([N // 2 + 1, N // 2 - 1])


def pairs_once() -> Tensor:
    return torch.randperm(N * N)[: 3 * N].sort().values.unsqueeze(0) // torch.tensor([[N], [1]]) % N


PAIRS = {"pairs": pairs_once, "values": lambda: torch.randn(3 * N, H)}


def lengths(tensors: dict[str, Tensor]) -> CompleteGraph:
    return CompleteGraph(N // 2, source_lengths=tensors["lengths"])


def batched(**options: Any) -> Callable[[dict[str, Tensor]], Any]:
    """A call on two halves as a batch."""

    def call(tensors: dict[str, Tensor]) -> Any:
        query, key, value = (tensors[name].view(2, N // 2, H, C) for name in NODES)
        return attend(query, key, value, lengths(tensors), **options)

    return call


LENGTHS = {"lengths": lambda: torch.tensor([N // 4, N // 2])}

WAYS = {
    "list, dot": Way(of_graph(of("edge_index")), LIST),
    "list, terms": Way(
        of_graph(of("edge_index"), score=additive, edge=of("edge"), bias=of("bias"), mask=of("mask")),
        LIST | VECTOR | {"edge": per_edge(H, C), "bias": per_edge(H), "mask": lambda: torch.rand(4 * N) < 0.7},
    ),
    "list, weights": Way(of_graph(of("edge_index"), return_weights=True), LIST),
    "list, typed": Way(
        of_graph(of("edge_index"), edge=lambda tensors: Typed(tensors["terms"], tensors["types"])),
        LIST | {"terms": lambda: torch.randn(3, H, C), "types": lambda: torch.randint(3, (4 * N,))},
    ),
    "list, projected": Way(
        of_graph(of("edge_index"), edge=lambda tensors: Projected(tensors["features"], tensors["weight"])),
        LIST | {"features": per_edge(3), "weight": lambda: torch.randn(H, C, 3)},
    ),
    "list, sparsemax": Way(of_graph(of("edge_index"), distribution="sparsemax"), LIST),
    "list, sigmoid": Way(of_graph(of("edge_index"), distribution="sigmoid"), LIST),
    "list, own score": Way(of_graph(of("edge_index"), score=Distance()), LIST),
    "list, buckets": Way(of_graph(of("edge_index"), bias=buckets), LIST | BUCKETS),
    "list, pairs": Way(of_graph(of("edge_index"), bias=sparse), LIST | PAIRS),
    "list, scale": Way(
        of_graph(of("edge_index"), score=lambda tensors: DotScore(tensors["scale"])),
        LIST | {"scale": lambda: torch.randn(H)},
    ),
    "full": Way(of_graph(GRAPH)),
    "causal": Way(of_graph(CAUSAL)),
    "mask": Way(of_graph(GRAPH, mask=of("mask")), {"mask": mask}),
    "matrix": Way(of_graph(GRAPH, bias=of("bias")), {"bias": lambda: torch.randn(H, N, N)}),
    "log-sum-exp": Way(of_graph(CAUSAL, return_lse=True)),
    "buckets": Way(of_graph(GRAPH, bias=buckets), BUCKETS),
    "buckets of bytes": Way(
        of_graph(CAUSAL, bias=buckets), BUCKETS | {"buckets": lambda: torch.randint(K, (N, N)).to(torch.uint8)}
    ),
    "buckets of one head": Way(
        lambda tensors: attend(*(tensors[name][:, :1] for name in NODES), GRAPH, bias=buckets(tensors)),
        BUCKETS | {"table": lambda: torch.randn(K)},
    ),
    "buckets, mask": Way(of_graph(GRAPH, bias=buckets, mask=of("mask")), BUCKETS | {"mask": mask}),
    "pairs": Way(of_graph(GRAPH, bias=sparse), PAIRS),
    "pairs, causal": Way(of_graph(CAUSAL, bias=sparse, return_lse=True), PAIRS),
    "pairs, mask": Way(of_graph(GRAPH, bias=sparse, mask=of("mask")), PAIRS | {"mask": mask}),
    "window": Way(of_graph(WINDOW)),
    "window, buckets": Way(of_graph(WINDOW, bias=buckets), BUCKETS),
    "window, mask": Way(of_graph(WINDOW, mask=of("mask")), {"mask": mask}),
    "packed": Way(of_graph(PACKED)),
    "packed, pairs": Way(
        of_graph(PACKED, bias=sparse),
        PAIRS | {"pairs": lambda: pairs_once() % (N // 2 - 1)},
    ),
    "lengths": Way(batched(), LENGTHS),
    "lengths, own score": Way(batched(score=Distance()), LENGTHS),
    "linear": Way(of_graph(GRAPH, distribution=Identity(normalize=True, eps=9.0))),
    "linear, causal": Way(of_graph(CAUSAL, distribution=Identity())),
    "additive": Way(of_graph(GRAPH, score=additive, mask=of("mask")), VECTOR | {"mask": mask}),
    "own score": Way(of_graph(GRAPH, score=Distance(), mask=of("mask")), {"mask": mask}),
    "own score, buckets": Way(of_graph(GRAPH, score=Distance(), bias=buckets), BUCKETS),
    "sigmoid": Way(of_graph(GRAPH, distribution="sigmoid", bias=buckets), BUCKETS),
    "sparsemax": Way(of_graph(GRAPH, distribution="sparsemax", mask=of("mask")), {"mask": mask}),
    "weights": Way(of_graph(GRAPH, return_weights=True, bias=buckets), BUCKETS),
    "logits": Way(lambda tensors: weigh(tensors["query"], tensors["key"], GRAPH, distribution=None)),
    "roots": Way(roots, LIST | {"weight": per_edge(H, C), "shift": per_edge(H, C)}),
    "dropout": Way(lambda tensors: gattn.nn.linear.dropout(tensors["value"] * 1.0, 0.5, True)),
}
"""Dropout draws its seed from PyTorch's generator."""
