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
from gattn.ops.backends.cpu import pairs
from gattn.ops.backends.dense import linear, matrices
from gattn.ops.pair_roots import pair_roots
from tests.cases import Results

__all__ = ["WAYS", "Way", "in_parts", "ways"]

H, C = 2, 4
NODES = ("query", "key", "value")
#: A bucket of each pair, and how many there are.
K = 5


class Way(NamedTuple):
    """A call, from tensors by name; integers and masks have no gradients."""

    call: Callable[[dict[str, Tensor]], Any]
    make: dict[str, Callable[[], Tensor]] = {}
    """What makes the tensors"""

    def tensors(self, dtype: torch.dtype = torch.float64) -> Results:
        """The tensors, in turn the same."""
        torch.manual_seed(0)
        made = {name: make() for name, make in self.make.items()}
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
    (matrices, "_CHUNK", 64),
    (matrices, "_MOST_KEPT", 0),
    (linear, "_ROWS", 8),
    (linear, "_CHUNK", 4),
    (pairs, "MOST_LISTED", 64),
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


def ways(n: int = 20) -> dict[str, Way]:
    """All of them, on this many nodes, by name. Dropout draws its seed from PyTorch's generator."""

    def edges() -> Tensor:
        return torch.randint(n, (2, 4 * n))

    def per_edge(*shape: int) -> Callable[[], Tensor]:
        return lambda: torch.randn(4 * n, *shape)

    def mask() -> Tensor:
        return torch.rand(n, n) < 0.7

    on_list = {"edge_index": edges}
    with_vector = {"vector": lambda: torch.randn(H, C)}
    with_buckets = {"buckets": lambda: torch.randint(K, (n, n)), "table": lambda: torch.randn(K, H)}
    full = CompleteGraph(n)
    causal = CompleteGraph(n, causal=True)
    window = CompleteGraph(n, window=(2, 1))
    packed = CompleteGraph.packed([n // 2 + 1, n // 2 - 1])

    def pairs_once() -> Tensor:
        return torch.randperm(n * n)[: 3 * n].sort().values.unsqueeze(0) // torch.tensor([[n], [1]]) % n

    with_pairs = {"pairs": pairs_once, "values": lambda: torch.randn(3 * n, H)}

    def lengths(tensors: dict[str, Tensor]) -> CompleteGraph:
        return CompleteGraph(n // 2, source_lengths=tensors["lengths"])

    def batched(**options: Any) -> Callable[[dict[str, Tensor]], Any]:
        """A call on two halves as a batch."""

        def call(tensors: dict[str, Tensor]) -> Any:
            query, key, value = (tensors[name].view(2, n // 2, H, C) for name in NODES)
            return attend(query, key, value, lengths(tensors), **options)

        return call

    with_lengths = {"lengths": lambda: torch.tensor([n // 4, n // 2])}

    found = {
        "list, dot": Way(of_graph(of("edge_index")), on_list),
        "list, terms": Way(
            of_graph(of("edge_index"), score=additive, edge=of("edge"), bias=of("bias"), mask=of("mask")),
            on_list
            | with_vector
            | {"edge": per_edge(H, C), "bias": per_edge(H), "mask": lambda: torch.rand(4 * n) < 0.7},
        ),
        "list, weights": Way(of_graph(of("edge_index"), return_weights=True), on_list),
        "list, typed": Way(
            of_graph(of("edge_index"), edge=lambda tensors: Typed(tensors["terms"], tensors["types"])),
            on_list | {"terms": lambda: torch.randn(3, H, C), "types": lambda: torch.randint(3, (4 * n,))},
        ),
        "list, projected": Way(
            of_graph(of("edge_index"), edge=lambda tensors: Projected(tensors["features"], tensors["weight"])),
            on_list | {"features": per_edge(3), "weight": lambda: torch.randn(H, C, 3)},
        ),
        "list, sparsemax": Way(of_graph(of("edge_index"), distribution="sparsemax"), on_list),
        "list, sigmoid": Way(of_graph(of("edge_index"), distribution="sigmoid"), on_list),
        "list, own score": Way(of_graph(of("edge_index"), score=Distance()), on_list),
        "list, buckets": Way(of_graph(of("edge_index"), bias=buckets), on_list | with_buckets),
        "list, pairs": Way(of_graph(of("edge_index"), bias=sparse), on_list | with_pairs),
        "list, scale": Way(
            of_graph(of("edge_index"), score=lambda tensors: DotScore(tensors["scale"])),
            on_list | {"scale": lambda: torch.randn(H)},
        ),
        "full": Way(of_graph(full)),
        "causal": Way(of_graph(causal)),
        "mask": Way(of_graph(full, mask=of("mask")), {"mask": mask}),
        "matrix": Way(of_graph(full, bias=of("bias")), {"bias": lambda: torch.randn(H, n, n)}),
        "log-sum-exp": Way(of_graph(causal, return_lse=True)),
        "buckets": Way(of_graph(full, bias=buckets), with_buckets),
        "buckets of bytes": Way(
            of_graph(causal, bias=buckets), with_buckets | {"buckets": lambda: torch.randint(K, (n, n)).to(torch.uint8)}
        ),
        "buckets of one head": Way(
            lambda tensors: attend(*(tensors[name][:, :1] for name in NODES), full, bias=buckets(tensors)),
            with_buckets | {"table": lambda: torch.randn(K)},
        ),
        "buckets, mask": Way(of_graph(full, bias=buckets, mask=of("mask")), with_buckets | {"mask": mask}),
        "pairs": Way(of_graph(full, bias=sparse), with_pairs),
        "pairs, causal": Way(of_graph(causal, bias=sparse, return_lse=True), with_pairs),
        "pairs, mask": Way(of_graph(full, bias=sparse, mask=of("mask")), with_pairs | {"mask": mask}),
        "window": Way(of_graph(window)),
        "window, buckets": Way(of_graph(window, bias=buckets), with_buckets),
        "window, mask": Way(of_graph(window, mask=of("mask")), {"mask": mask}),
        "packed": Way(of_graph(packed)),
        "packed, pairs": Way(
            of_graph(packed, bias=sparse),
            with_pairs | {"pairs": lambda: pairs_once() % (n // 2 - 1)},
        ),
        "lengths": Way(batched(), with_lengths),
        "lengths, own score": Way(batched(score=Distance()), with_lengths),
        "linear": Way(of_graph(full, distribution=Identity(normalize=True, eps=9.0))),
        "linear, causal": Way(of_graph(causal, distribution=Identity())),
        "additive": Way(of_graph(full, score=additive, mask=of("mask")), with_vector | {"mask": mask}),
        "own score": Way(of_graph(full, score=Distance(), mask=of("mask")), {"mask": mask}),
        "own score, buckets": Way(of_graph(full, score=Distance(), bias=buckets), with_buckets),
        "sigmoid": Way(of_graph(full, distribution="sigmoid", bias=buckets), with_buckets),
        "sparsemax": Way(of_graph(full, distribution="sparsemax", mask=of("mask")), {"mask": mask}),
        "weights": Way(of_graph(full, return_weights=True, bias=buckets), with_buckets),
        "logits": Way(lambda tensors: weigh(tensors["query"], tensors["key"], full, distribution=None)),
        "roots": Way(roots, on_list | {"weight": per_edge(H, C), "shift": per_edge(H, C)}),
        "dropout": Way(lambda tensors: gattn.dropout(tensors["value"] * 1.0, 0.5, True)),
    }
    nodes = {name: lambda: torch.randn(n, H, C) for name in NODES}
    return {name: way._replace(make=nodes | way.make) for name, way in found.items()}


WAYS = ways()
