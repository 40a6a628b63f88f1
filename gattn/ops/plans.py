"""What was decided for earlier calls, by their signature: calls like them are neither checked nor planned again.

The signature of a call holds everything on which checks and decisions depend, except for what a plan compares itself:
the numbers of nodes and edges, which differ from batch to batch, and the edges.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from gattn.bias import Bias, BucketBias, DistanceBias, SparseBias
from gattn.distributions import Distribution, law_of
from gattn.edges import EdgeTerm, Projected, Typed
from gattn.graphs import CompleteGraph, SparseGraph, TypedGraph
from gattn.graphs.complete import MOST_LISTED
from gattn.ops.call import Call, Result
from gattn.ops.terms import GIVEN, PLACES, TERMS
from gattn.scores import AdditiveScore, CosineScore, DotScore, GATScore, Score
from gattn.torch_private import (
    dispatch_keys,
    is_functorch_tensor,
    is_lazy,
    is_usual,
)

__all__ = ["Given", "Plan", "forget", "given", "is_known", "is_short_list", "keep", "plan_of", "planned", "suits_lists"]

#: Which tensors of a call have rows, whose number is no part of a signature, on lists and on complete graphs: for nodes
#: (N, M) or edges (E). More tensors are those of score and bias.
_OF_LISTS, _OF_COMPLETE = (
    [*(TERMS[name].letters[0] in axes for name in GIVEN), False, False] for axes in ("NME", "NM")
)
_OF_NONE = [False] * len(_OF_LISTS)
_BIAS = PLACES["bias"]

#: The biases that kernels read, whose subclasses may compute something else.
_TERMS = (SparseBias, BucketBias, DistanceBias)


class Given(NamedTuple):
    """A call as it was given, if calls like it can share a plan."""

    signature: Hashable
    tensors: list[Any]
    """Those of `GIVEN`; the bias may also be a `Bias`"""
    edge_index: Tensor | None
    """`None` for a complete graph"""
    num_sources: int | None
    """M, if the graph says so"""
    num_targets: int | None
    """N, if the graph says so"""
    complete: CompleteGraph | None
    """A complete graph of which there is no list"""
    score: Score
    is_scaled: bool
    """Whether the score's scale is a tensor"""


#: Computes a call with the signature for which it was made; `None` if its sizes do not fit.
Plan = Callable[[Given], Result | None]

_MOST_PLANS = 256
_plans: dict[Hashable, Plan | None] = {}

#: The numbers and names in the formulas of the scores that kernels know; their subclasses may have other formulas.
_FORMULAS: dict[type[Score], Callable[[Any], Any]] = {
    GATScore: attrgetter("negative_slope"),
    AdditiveScore: attrgetter("activation", "negative_slope"),
    DotScore: attrgetter("scale", "negative_slope", "edge", "clamp"),
}
_FORMULAS[CosineScore] = _FORMULAS[DotScore]


def given(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor | None,
    graph: Any,
    flow: str,
    score: Score,
    distribution: str | Distribution | None,
    dropout: float,
    backend: str,
    weights: bool | str = False,
    log_sum: bool = False,
    edge: EdgeTerm | None = None,
    bias: Tensor | Bias | None = None,
    mask: Tensor | None = None,
    edge_value: EdgeTerm | bool | None = None,
    out_bias: Tensor | None = None,
) -> Given | None:
    """The call with its signature; `None` if it has to be looked at each time.

    The arguments are those of `gattn.attend` as they were given, with `flow` for a bare `edge_index`, the `dropout` of
    this call, the `backend` that is requested, which `weights` are returned, and whether the `log_sum`.
    """
    if not is_usual():
        return None
    formula = _FORMULAS.get(type(score))
    if formula is None or "logits" in score.__dict__:
        return None
    of_score, more, is_scaled = formula(score), [], False
    if score.folds:
        if not _folds_as_given(query, key, value):
            return None
        if isinstance(of_score[0], Tensor):
            more, of_score, is_scaled = [of_score[0]], of_score[1:], True
    edge_index: Tensor | None = None
    complete: CompleteGraph | None = None
    of_graph: Hashable
    if type(graph) is Tensor:
        edge_index, of_graph = graph, flow
    elif type(graph) is SparseGraph or type(graph) is TypedGraph:
        edge_index, of_graph = graph.adjacency, (graph.flow, graph.self_loops)
    elif isinstance(graph, CompleteGraph) and is_short_list(graph, score, key, value):
        assert value is not None
        if backend == "dense" or bias is not None or mask is not None or weights:
            return None
        edge_index, of_graph = graph.edge_list(value.device).edge_index, "pairs"
    elif type(graph) is CompleteGraph or (isinstance(graph, CompleteGraph) and graph.blocks is not None):
        is_packed, is_ragged = graph.blocks is not None, graph.has_lengths
        of_cpu = isinstance(value, Tensor) and value.device.type == "cpu"
        if is_packed and (is_ragged or not of_cpu or isinstance(bias, Tensor) or mask is not None or weights):
            return None
        complete, of_graph = graph, (graph.causal, graph.window, graph._offset, is_packed, is_ragged)
    else:
        return None
    num_sources, num_targets = (None, None) if edge_index is graph else (graph.num_sources, graph.num_targets)
    of_weights: Any = distribution
    if type(distribution) is not str:
        of_weights = law_of(distribution) if isinstance(distribution, Distribution) else None
        if of_weights is None or isinstance(of_weights.sink, Tensor):
            return None
    is_value = edge is not None and (edge_value is True or edge_value is edge)
    of_terms: list[Any] = [type(edge), type(bias), value is key, is_value]
    parts: tuple[Any, ...] = (edge, None, None)
    if type(edge) is Projected:
        parts = *edge, None
    elif type(edge) is Typed:
        parts = edge.table, None, edge.types
        of_terms.append(getattr(edge.table, "shape", None))  # whose rows are types
    vector = score.tensors()[0] if type(score) is AdditiveScore else None
    if isinstance(bias, Bias):
        if complete is None or type(bias) not in _TERMS:
            return None
        more += bias.tensors()
    of_edges = None if isinstance(bias, Bias) else bias, mask, None if is_value else edge_value
    tensors: list[Any] = [query, key, value, vector, *parts, *of_edges, out_bias, *more]
    plain_keys = _plain_keys[torch.is_inference_mode_enabled()]
    of_call = dropout, backend, weights, log_sum
    signature = [of_graph, type(score), of_score, of_weights, of_call, tuple(of_terms)]
    is_list = edge_index is not None and type(value) is Tensor and value.dim() == 3
    with_rows = _OF_LISTS if is_list else _OF_COMPLETE if edge_index is None else _OF_NONE
    for tensor, has_rows in zip(tensors, with_rows, strict=False):
        if tensor is None or type(tensor) is bool:
            signature.append(tensor)
            continue
        if type(tensor) not in _PLAIN:
            return None
        shape: Any = tensor.shape
        if has_rows:
            shape = shape[1:] if is_list else (shape[:-3], shape[-2:])
        keys = dispatch_keys(tensor).raw_repr()
        if keys not in plain_keys and not _is_plain(tensor, keys, plain_keys):
            return None
        layout = tensor.is_contiguous() or tensor.stride()  # a single row has any stride between rows
        signature.append((tensor.dim(), shape, layout, tensor.dtype, tensor.device))
    if edge_index is not None:
        if type(edge_index) is not Tensor or dispatch_keys(edge_index).raw_repr() not in plain_keys:
            return None
        if edge_index.dim() != 2 or edge_index.size(0) != 2:
            return None
        signature.append((edge_index.dtype, edge_index.device))
    if isinstance(bias, Bias):  # its numbers are part of the signature, and it is given as it is
        tensors[_BIAS] = bias
    return Given(tuple(signature), tensors, edge_index, num_sources, num_targets, complete, score, is_scaled)


def is_short_list(graph: CompleteGraph, score: Score, key: Any, value: Any) -> bool:
    """Whether a complete graph's list of edges takes less time than anything else, if neither has a bias or a mask.

    These are the blocks of packed graphs, if they are small, and few pairs that are no products.
    """
    if not isinstance(value, Tensor) or value.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    if graph.blocks is not None:
        return graph.has_small_blocks
    if type(graph) is not CompleteGraph or type(key) is not Tensor or type(score) not in (GATScore, AdditiveScore):
        return False
    return not graph.has_lengths and graph.num_pairs <= MOST_LISTED and suits_lists(score, key, value)


def suits_lists(score: Score, key: Tensor, value: Tensor) -> bool:
    """Whether kernels for lists are faster than matrix operations for pairs that are no products."""
    heads = key.size(-1 if score.scalar and key.dim() < value.dim() else -2)
    return not score.scalar or (heads >= _LEAST_HEADS and value.size(-1) <= _MOST_CHANNELS)


#: For scalar scores, matrix operations are faster with fewer heads, or with more channels in each.
_LEAST_HEADS, _MOST_CHANNELS = 4, 64


def _folds_as_given(*tensors: Any) -> bool:
    """Whether a score is folded into query and key as they are given, in the type of the computation."""
    dtypes = {x.dtype if isinstance(x, Tensor) else None for x in tensors}
    return dtypes in ({torch.float32}, {torch.float64})


def _folded(given: Given) -> Given:
    """The same call with a score that kernels know."""
    query, key, score = given.score.folded(*given.tensors[:2])
    return given._replace(tensors=[query, key, *given.tensors[2:]], score=score)


_PLAIN = (Tensor, Parameter)
#: The dispatch keys of tensors that are nothing but numbers in memory, outside and in inference mode, where nothing is
#: saved for a backward pass.
_plain_keys: tuple[set[int], set[int]] = (set(), set())


def _is_plain(tensor: Tensor, keys: int, plain_keys: set[int]) -> bool:
    """Whether these are the keys of plain tensors, such as this one."""
    is_plain = tensor.layout is torch.strided and not is_functorch_tensor(tensor) and not is_lazy(tensor)
    if is_plain and (torch.is_inference_mode_enabled() or not tensor.is_inference()):
        plain_keys.add(keys)
        return True
    return False


def is_known(call: Given) -> bool:
    """Whether it was decided earlier how to compute calls like this one, or that each has to be looked at."""
    return call.signature in _plans


def plan_of(given: Given, call: Call, backend: Any) -> Plan | None:
    """The plan for calls like this one, if there can be one.

    Args:
        given: The call.
        call: The same call, checked.
        backend: The `Backend` that computes it; `None` if plain PyTorch does.
    """
    if backend is None or not given.score.folds:
        return None if backend is None else cast("Plan | None", backend.plan(call, given))
    known = _folded(given)
    query, key = known.tensors[:2]
    of_known = backend.plan(call._replace(query=query, key=key, score=known.score), known)
    return None if of_known is None else lambda given: cast("Result | None", of_known(_folded(given)))


def keep(given: Given, call: Call, backend: Any) -> None:
    """Keeps what `plan_of` returns."""
    if len(_plans) >= _MOST_PLANS:
        forget()
    _plans[given.signature] = plan_of(given, call, backend)


def forget() -> None:
    """Forgets all plans, as tests have to that replace something on which they rest."""
    _plans.clear()


def planned(call: Given) -> Result | None:
    """The result of a call for which there is a plan; `None` if there is none, or its sizes do not fit."""
    plan = _plans.get(call.signature)
    return None if plan is None else plan(call)
