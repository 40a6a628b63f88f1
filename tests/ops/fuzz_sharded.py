"""Sharded graphs: what some processes compute together, outputs and gradients, against one with the whole graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

import gattn
from gattn.distributed import shard
from gattn.features import Favor, cosine, elu1, relu, softplus
from gattn.nn import (
    ALiBi,
    GATConv,
    GATv2Conv,
    MultiheadAttention,
    PerformerAttention,
    PolynormerAttention,
    RotaryPositionalEncoding,
    SGFormerAttention,
    TransformerConv,
)
from tests.cases import SCORES, Alter, Results, make_score
from tests.ops.fuzz_shared import Draw, compare_types, random_graph, stored
from tests.shards import Mesh, on_processes

#: Computes an output `[..., N, ...]` from a module, features by name and a graph, which may be sharded.
Compute = Callable[[Any, Results, Any], Tensor]
ROWS = {"query": "targets", "x": "targets", "bias": "targets", "key": "sources", "value": "sources", "edge": "edges"}


def sharded(draw: Draw, alter: Alter) -> None:
    """One call or layer on one to four processes, some of which may have no nodes."""
    ranks, batch = draw.randint(1, 4), draw.choice(((), (), (2,)))
    way = draw.choice((verbs, features, all_pairs, layers))
    draw.note(ranks=ranks, way=way.__name__, batch=batch)
    whole, batch, module, given, compute = way(draw, batch)
    partition = None
    if not whole.is_dense and draw.maybe(0.6):
        partition = [draw.integers(ranks, whole.num_targets), draw.integers(ranks, whole.num_sources)]
        partition = partition[0] if whole.num_targets == whole.num_sources else partition
    dtype = draw.choice((torch.float64, torch.float64, torch.float32))
    draw.note(
        graph=whole, module=module, partition=partition, shapes={name: list(x.shape) for name, x in given.items()}
    )
    draw.note(lengths=(whole.source_lengths, whole.target_lengths), dtype=dtype)
    given = {name: stored(x, draw) for name, x in given.items()}
    dims = {name: x.dim() - 2 if name == "bias" else 0 if name == "edge" else len(batch) for name, x in given.items()}
    module = module.double() if isinstance(module, Module) else module

    def results(dtype: torch.dtype, mesh: Mesh | None) -> Results:
        graph = whole if mesh is None else shard(whole, mesh, partition)

        def mine(x: Tensor, rows: Any = "targets", dim: int = len(batch)) -> Tensor:
            return x if mesh is None else graph.scatter(x, rows, dim)

        def everybodys(x: Tensor, rows: Any = "targets", dim: int = len(batch)) -> Tensor:
            return x.detach() if mesh is None else graph.gather(x.detach(), rows, dim)

        net = copy.deepcopy(module).to(dtype) if isinstance(module, Module) else module
        leaves = {
            name: mine(x.to(dtype), ROWS[name], dims[name]).detach().requires_grad_() for name, x in given.items()
        }
        parameters = dict(net.named_parameters()) if isinstance(net, Module) else {}
        out = compute(net, leaves, graph)
        shape = (*batch, whole.num_targets, *out.shape[len(batch) + 1 :])
        incoming = torch.randint(-32, 33, shape, generator=torch.Generator().manual_seed(draw.case)) / 32
        grads = torch.autograd.grad(
            out, [*leaves.values(), *parameters.values()], mine(incoming.to(dtype)), materialize_grads=True
        )
        found = {"out": everybodys(out)}
        for name, grad in zip(leaves, grads, strict=False):
            found[f"grad of {name}"] = everybodys(grad, ROWS[name], dims[name])
        of_parameters = zip(parameters, grads[len(leaves) :], strict=True)
        return found | {f"grad of {name}": grad for name, grad in of_parameters}

    def run(dtype: torch.dtype, reference: bool) -> Results:
        if reference:
            return results(dtype, None)
        first, *others = on_processes(ranks, lambda mesh: results(dtype, mesh))
        shared = [f"grad of {name}" for name in dict(module.named_parameters())] if isinstance(module, Module) else []
        return first | {name: sum((other[name] for other in others), first[name]) for name in shared}

    compare_types(run, dtype, whole.num_targets * whole.num_sources, alter)


def complete(draw: Draw, batch: tuple[int, ...], *, square: bool = False, plain: bool = False) -> gattn.CompleteGraph:
    """A complete graph that can be sharded."""
    n = draw.choice((0, 1, 2, 3, 7, 12))
    m = n if square or draw.maybe(0.6) else draw.choice((0, 1, 2, 5, 11))
    options: dict[str, Any] = {}
    if plain:
        return gattn.CompleteGraph(n, m)
    if batch and draw.maybe(0.5):
        for name, limit in (("source_lengths", m), ("target_lengths", n)):
            if draw.maybe(0.7):
                options[name] = draw.integers(limit + 1, *batch)
    else:
        options = {"causal": draw.maybe(0.4), "window": draw.choice((None, None, (2, 1), (0, 3)))}
    return gattn.CompleteGraph(n, m, **options)


def any_graph(draw: Draw, batch: tuple[int, ...]) -> Any:
    """A graph that can be sharded."""
    if draw.maybe(0.5):
        return complete(draw, batch)
    edge_index, m, n, _ = random_graph(draw)
    return gattn.SparseGraph(edge_index, num_sources=m, num_targets=n)


def verbs(draw: Draw, batch: tuple[int, ...]) -> tuple[Any, tuple[int, ...], Any, Results, Compute]:
    """`attend` with a score and a distribution, and perhaps terms of edges or pairs."""
    graph = any_graph(draw, batch)
    heads, channels = draw.choice((1, 2, 3)), draw.choice((1, 3, 8))
    name = draw.choice([name for name, score in SCORES.items() if score.has_query])
    wide = (channels,) if SCORES[name].wide else ()
    given = {
        "query": draw.normal(*batch, graph.num_targets, heads, *wide),
        "key": draw.normal(*batch, graph.num_sources, heads, *wide),
        "value": draw.normal(*batch, graph.num_sources, heads, draw.choice((1, 4))),
    }
    if graph.is_dense and draw.maybe(0.4):
        given["bias"] = draw.normal(heads, graph.num_targets, graph.num_sources)
    elif not graph.is_dense and draw.maybe(0.4):
        given["edge"] = draw.normal(graph.num_edges, heads, *wide)
    law = draw.choice(("softmax", "softmax", "sigmoid", "tanh", "sparsemax", "entmax15", "identity", gattn.TopK(2)))
    score = make_score(name, draw.normal(heads, channels) if SCORES[name].has_vector else None, None)
    backend = draw.choice(("auto", "reference"))
    draw.note(score=name, distribution=law, backend=backend)

    def compute(module: Any, given: Results, graph: Any) -> Tensor:
        rest = {name: given[name] for name in ("bias", "edge") if name in given}
        query, key, value = (given[name] for name in ("query", "key", "value"))
        return gattn.attend(
            query, key, value, graph, score=score.to(key.dtype), distribution=law, backend=backend, **rest
        )

    return graph, batch, None, given, compute


def features(draw: Draw, batch: tuple[int, ...]) -> tuple[Any, tuple[int, ...], Any, Results, Compute]:
    """Linear attention with every feature map; the keys of some nodes are longer, so that maxima differ much."""
    graph = any_graph(draw, batch)
    heads, channels = draw.choice((1, 2)), draw.choice((1, 3, 8))
    kind = draw.choice((Favor, Favor, elu1, relu, softplus, cosine))
    module = kind(channels, draw.randint(1, 9), stabilize=draw.maybe(0.8)) if kind is Favor else kind
    if kind is Favor:
        module.projection.copy_(draw.normal(*module.projection.shape))
    rows = {"query": graph.num_targets, "key": graph.num_sources, "value": graph.num_sources}
    given = {name: draw.normal(*batch, count, heads, channels) for name, count in rows.items()}
    given["key"] *= 1 + 2 * draw.booleans(*given["key"].shape[:-1], 1, share=0.2)
    law = gattn.Identity(normalize=kind is not cosine, eps=0.0 if kind in (Favor, cosine) else 1e-3)

    def compute(module: Any, given: Results, graph: Any) -> Tensor:
        query, key = given["query"], given["key"]
        if kind is Favor:
            query, key = module(query, key, graph if graph.is_dense or graph.is_sharded else None)
        else:
            query, key = module(query), module(key)
        return gattn.attend(query, key, given["value"], graph, score=gattn.DotScore(1.0), distribution=law)

    return graph, batch, module, given, compute


def all_pairs(draw: Draw, batch: tuple[int, ...]) -> tuple[Any, tuple[int, ...], Any, Results, Compute]:
    """Layers of linear attention among all nodes."""
    kind = draw.choice((SGFormerAttention, SGFormerAttention, PerformerAttention, PolynormerAttention))
    options = {"norm": draw.choice(("row", "frobenius"))} if kind is SGFormerAttention else {}
    graph = complete(draw, batch, square=True, plain=True)
    module = filled(kind(6, 2, 3, **options), draw)
    given = {"x": draw.normal(*batch, graph.num_targets, 6)}
    return graph, batch, module, given, lambda module, given, graph: module(given["x"], graph=graph)


def layers(draw: Draw, batch: tuple[int, ...]) -> tuple[Any, tuple[int, ...], Any, Results, Compute]:
    """Layers of softmax attention."""
    kind = draw.choice((GATConv, GATv2Conv, TransformerConv, MultiheadAttention))
    if kind is MultiheadAttention:
        graph = complete(draw, batch, square=True)
        position = draw.choice((None, RotaryPositionalEncoding(4), ALiBi(2)))
        module = filled(kind(8, 2, batch_first=True, position=position), draw)
        given = {"x": draw.normal(*batch, graph.num_targets, 8)}
        return graph, batch, module, given, lambda module, given, graph: module(*[given["x"]] * 3, graph=graph)[0]
    edge_index, m, n, _ = random_graph(draw)
    graph = gattn.SparseGraph(edge_index, max(m, n), max(m, n))
    given = {"x": draw.normal(*batch, max(m, n), 5)}
    edge_dim = draw.choice((None, 3))
    if edge_dim is not None:
        given["edge"] = draw.normal(edge_index.size(1), edge_dim)
    module = filled(kind(5, 3, heads=2, edge_dim=edge_dim), draw)
    return graph, batch, module, given, lambda module, given, graph: module(given["x"], graph, given.get("edge"))


def filled(module: Module, draw: Draw) -> Module:
    """The module with parameters and buffers that the case decides."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name != "position.slopes":
            tensor.data = draw.normal(*tensor.shape) / 2
    return module.train(False)
