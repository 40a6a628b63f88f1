"""The checks of a call, of all that does not depend on the edges."""

from __future__ import annotations

import torch
from torch import Tensor

from gattn.bias import Bias
from gattn.distributions import Distribution, law_of
from gattn.edges import EdgeTerm, Projected, Typed
from gattn.errors import InputError, InputTypeError
from gattn.graphs import Graph
from gattn.graphs.edge_lists import check_types, checked_types
from gattn.ops.call import NO_SCORE, Call, numbers_of
from gattn.scores import Score
from gattn.torch_private import is_traced

__all__ = ["checked_call"]


def checked_call(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor | None,
    graph: Graph,
    *,
    score: Score,
    distribution: Distribution,
    dropout: float,
    weights: bool | str,
    edge: EdgeTerm | None = None,
    bias: Tensor | Bias | None = None,
    mask: Tensor | None = None,
    edge_value: EdgeTerm | bool | None = None,
    out_bias: Tensor | None = None,
    log_sum: bool = False,
) -> Call:
    """The call with these arguments, after all checks that do not depend on the edges.

    Args:
        query: See `gattn.attend`, like all arguments of these names.
        key: `None` if the bias is the whole logit.
        value: `None` if only weights are requested.
        graph: The graph.
        score: The score.
        edge: Its edge term.
        bias: What is added to the logit.
        mask: Which edges count.
        edge_value: The values' edge term.
        out_bias: What is added to the output.
        distribution: The distribution.
        dropout: The probability of dropping a weight in this call.
        weights: Which weights are requested.
        log_sum: Whether the log-sum-exp is requested.

    Raises:
        ValueError: If arguments do not fit each other or the graph.
        TypeError: If an input is not a tensor.
    """
    if key is None:
        if query is None and edge is None:
            score = NO_SCORE
        value = _without_key(query, value, graph, score, edge, bias)
        key = value.new_zeros(value.size(-2)).expand(value.shape[:-1])
    elif value is None and isinstance(key, Tensor):
        value = key.new_empty(*(key.shape if score.scalar else key.shape[:-1]), 0)
    _check_nodes(query, key, value, score)
    edge_is_value = edge is not None and (edge_value is True or edge_value is edge)
    if edge_is_value or edge_value is False:
        edge_value = None
    elif edge_value is True:
        raise InputError("edge_value=True means that the edge term is also added to the value, but there is no edge.")
    if isinstance(bias, Bias):
        _check_devices(value, bias)
        if graph.is_sharded:
            raise InputError(f"on a sharded graph, a bias is a tensor; got {type(bias).__name__}.")
    _check_kinds(
        value,
        edge=edge,
        bias=None if isinstance(bias, Bias) else bias,
        mask=mask,
        edge_value=edge_value,
        out_bias=out_bias,
    )
    _check_devices(value, score)
    _check_devices(value, distribution)
    end = key if query is None else query
    of_edge = end.shape[-1:] if score.scalar else end.shape[-2:]
    edge = _checked_term("edge", edge, of_edge, score)
    if edge_is_value:
        of_value = (*of_edge[:1], value.size(-1))
        if isinstance(edge, tuple) and of_value != of_edge:
            raise InputError(
                f"an edge term that is also the edge_value has one shape for both: {list(of_edge)} per edge for "
                f"{type(score).__name__}, but value has {list(of_value)} per node."
            )
    else:
        heads = of_edge if score.scalar else of_edge[:1]
        edge_value = _checked_term("edge_value", edge_value, (*heads, value.size(-1)), score)
    num_targets = None if query is None else query.size(value.dim() - 3)
    graph = graph.resolve(value.size(-3), num_targets, value.shape[:-3], value.device)
    if graph.is_sharded and distribution.with_sources(torch.empty(0, dtype=torch.int64)) is not distribution:
        raise InputError(
            f"{distribution!r} depends on the numbers of the sources, which differ on a sharded graph: attend on the "
            "whole graph, or with another distribution."
        )
    if not isinstance(bias, Bias):
        graph, key, value, bias, mask = graph.fetch(key, value, bias, mask)
    dtype = _promoted(
        query, key, value, *numbers_of(edge), *numbers_of(bias), *numbers_of(edge_value), *score.tensors()
    )
    if score.scalar:
        query, key = None if query is None else query.unsqueeze(-1), key.unsqueeze(-1)
        if isinstance(edge, Projected):
            edge = edge._replace(weight=edge.weight.unsqueeze(1))
        elif isinstance(edge, Typed):
            edge = edge._replace(table=edge.table.unsqueeze(-1))
        elif edge is not None:
            edge = edge.unsqueeze(-1)
    terms = (edge, bias, mask, edge_value, edge_is_value, out_bias)
    call = Call(query, key, value, *terms, graph, score, distribution, dropout, weights, dtype, law_of(distribution))
    if log_sum:
        call = call._replace(log_sum=True)
    if isinstance(bias, Bias):
        bias.check(graph, call.batch, call.heads)
    if edge_is_value and isinstance(edge, Tensor) and edge.shape[-2:] != (call.heads, value.size(-1)):
        raise InputError(call.unfit("edge_value", edge, (call.heads, value.size(-1)), None))
    distribution.check(call.batch, call.num_targets, call.heads)
    if out_bias is not None and out_bias.shape != (call.heads, value.size(-1)):
        wanted = [call.heads, value.size(-1)]
        raise InputError(
            f"out_bias must have one entry per head and channel of the output, {wanted}; got {list(out_bias.shape)}."
        )
    return call


def _without_key(
    query: Tensor | None,
    value: Tensor | None,
    graph: Graph,
    score: Score,
    edge: EdgeTerm | None,
    bias: Tensor | Bias | None,
) -> Tensor:
    """The value of a call without a key; without any channels if only weights are requested."""
    if not score.scalar:
        raise InputTypeError(f"key must be a tensor; got NoneType, which only GATScore takes, not {score!r}.")
    if value is not None:
        if value.dim() < 3:
            raise InputError(f"value must have shape [M, H, C]; got {list(value.shape)}.")
        if score is NO_SCORE and not isinstance(bias, Tensor):
            raise InputTypeError(f"without a query and a key, the logits are bias; got {type(bias).__name__}.")
        return value
    if graph.num_sources is None:
        raise InputError(
            "without features, the graph has to say how many nodes there are: pass "
            "gattn.SparseGraph(edge_index, num_targets, num_sources)."
        )
    heads_dim = graph.heads_dim if score is NO_SCORE else -1
    term = bias if score is NO_SCORE else edge if query is None else query
    term = term.weight.mT if isinstance(term, Projected) else term.table if isinstance(term, Typed) else term
    if not isinstance(term, Tensor) or term.dim() < -min(heads_dim, -2):
        shape = list(term.shape) if isinstance(term, Tensor) else type(term).__name__
        raise InputTypeError(f"without a key, the logits are a tensor with one entry per edge and head; got {shape}.")
    front = term.shape[: min(heads_dim, -2)] if graph.blocks is None else ()
    return term.new_empty(*front, graph.num_sources, term.size(heads_dim), 0)


def _check_nodes(query: Tensor | None, key: Tensor, value: Tensor, score: Score) -> None:
    """Checks query, key and value against each other."""
    for name, tensor in (("key", key), ("value", value), ("query", query)):
        if not isinstance(tensor, Tensor) and not (name == "query" and tensor is None):
            raise InputTypeError(f"{name} must be a tensor; got {type(tensor).__name__}.")
        if tensor is not None and not tensor.is_floating_point():
            raise InputError(f"{name} must be of a floating-point type; got {tensor.dtype}.")
        if tensor is not None and tensor.device != key.device:
            raise InputError(f"{name} is on {tensor.device}, but key is on {key.device}: move one of them.")
    if query is None and not score.scalar:
        raise InputError(f"{type(score).__name__} needs a query; only GATScore takes query=None.")
    batch = value.dim() - 3
    if batch not in (0, 1, 2):
        raise InputError(
            f"value must have shape [M, H, C], with at most two batch dimensions in front; got {list(value.shape)}."
        )
    letters = "H" if score.scalar else "H, C"
    for name, tensor, nodes in (("query", query, "N"), ("key", key, "M")):
        if tensor is not None and tensor.dim() != value.dim() - score.scalar:
            raise InputError(
                f"{type(score).__name__} takes a {name} of shape [{nodes}, {letters}] and a value of shape "
                f"[M, H, C] (and the same batch dimensions in front of each); got {list(tensor.shape)} and "
                f"{list(value.shape)}."
            )
    if key.shape[: batch + 2] != value.shape[: batch + 2]:
        raise InputError(
            f"key and value must have the same batch, sources and heads; got {list(key.shape)} and {list(value.shape)}."
        )
    heads = shared = key.size(batch + 1)
    if query is not None:
        heads = query.size(batch + 1)
        fits = heads == shared or (score.grouped and shared > 0 and heads % shared == 0)
        if query.shape[:batch] != key.shape[:batch] or query.shape[batch + 2 :] != key.shape[batch + 2 :] or not fits:
            grouped = ", or key and value a number of heads that divides the query's" if score.grouped else ""
            raise InputError(
                f"query and key must have the same batch, heads and channels{grouped}; got {list(query.shape)} and "
                f"{list(key.shape)}."
            )
    score.check(heads, 1 if score.scalar else key.size(-1))


def _check_kinds(value: Tensor, **terms: EdgeTerm | None) -> None:
    """Checks types and devices of optional inputs; sizes per edge are checked when the edges are known."""
    for name, term in terms.items():
        if term is None:
            continue
        parts = zip(term._fields, term, strict=True) if isinstance(term, (Projected, Typed)) else ((None, term),)
        for part, tensor in parts:
            what = name if part is None else f"the {part} of {name}"
            if not isinstance(tensor, Tensor):
                raise InputTypeError(f"{what} must be a tensor; got {type(tensor).__name__}.")
            if name == "mask" and tensor.dtype != torch.bool:
                raise InputError(f"mask must be a tensor of booleans, True = may attend; got {tensor.dtype}.")
            if name == "bias" and tensor.dtype == torch.bool:
                raise InputError(
                    "bias holds booleans, but is added to the logits: pass it as mask=, where True = may attend."
                )
            if tensor.is_complex():
                raise InputError(f"{what} must be of a floating-point type; got {tensor.dtype}.")
            if tensor.device != value.device:
                raise InputError(f"{what} is on {tensor.device}, the features are on {value.device}: move one of them.")


def _check_devices(value: Tensor, part: Score | Distribution | Bias) -> None:
    """Checks on which device the tensors of a score, a distribution or a bias are."""
    for term in part.tensors():
        if term.device != value.device:
            raise InputError(
                f"{type(part).__name__} has a tensor on {term.device}, the features are on {value.device}: move one of "
                "them."
            )


def _checked_term(name: str, term: EdgeTerm | None, of_edge: tuple[int, ...], score: Score) -> EdgeTerm | None:
    """A term of edges after a check of what does not depend on the edges, with types in 64 bits.

    Args:
        name: Its name.
        term: The term.
        of_edge: What it has per edge: `[H]` or `[H, C]`.
        score: The score of the call.
    """
    letters = "H" if len(of_edge) == 1 else "H, C"
    if isinstance(term, Typed):
        types = checked_types(term.types)
        if term.table.shape[1:] != of_edge or term.table.dim() != 1 + len(of_edge):
            raise InputError(
                f"the table of {name} must have one row for each of R types, [R, {letters}] for "
                f"{type(score).__name__}, here [R, {', '.join(map(str, of_edge))}]; got {list(term.table.shape)}."
            )
        if not is_traced():  # where kernels or with_edges() check the types
            check_types(types, term.table.size(0))
        return term._replace(types=types)
    if isinstance(term, Projected):
        features, weight = term
        if features.dim() != 2:
            raise InputError(f"the features of {name} must have shape [E, D]; got {list(features.shape)}.")
        wanted = [*of_edge, features.size(-1)]
        if list(weight.shape) != wanted:
            raise InputError(
                f"the weight of {name} must have shape [{letters}, D] for {type(score).__name__}, here {wanted}; "
                f"got {list(weight.shape)}."
            )
    return term


def _promoted(*tensors: Tensor | None) -> torch.dtype:
    dtype: torch.dtype | None = None
    for tensor in tensors:
        if tensor is not None and tensor.dtype != dtype:
            dtype = tensor.dtype if dtype is None else torch.promote_types(dtype, tensor.dtype)
    assert dtype is not None
    return dtype
