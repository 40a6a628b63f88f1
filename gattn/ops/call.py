"""One attention call, checked, in the one form that all backends take."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from gattn.bias import Bias
from gattn.distributions import Distribution, Identity, Law, law_of
from gattn.edges import EdgeTerm, Projected, Typed, rows_of, vectors_of
from gattn.errors import InputError, InputTypeError
from gattn.graphs import EdgeList, Graph
from gattn.graphs.edge_lists import check_types, checked_types, with_loops
from gattn.scores import GATScore, Score
from gattn.torch_private import guard_or_true, has_hooks, is_traced, is_wrapper

__all__ = ["GIVEN", "NO_SCORE", "Call", "Result", "Way", "check_dtype", "checked_call", "compute_dtype"]

#: The score of a call without query and key, whose logits are its bias.
NO_SCORE = GATScore()
#: The distribution of a call whose weights are given, as its bias.
GIVEN = Identity()


class Call(NamedTuple):
    """The arguments of `gattn.attend`.

    Here, a scalar score's terms are vectors of one channel: query `[..., N, H, 1]`, key `[..., M, H, 1]`, edge
    `[..., E, H, 1]`. Whether `value is key` is part of the call.
    """

    query: Tensor | None
    key: Tensor
    value: Tensor
    edge: EdgeTerm | None
    bias: Tensor | Bias | None
    """In the form that users of the graph pass; `[..., E, H]` after `on_edges`."""
    mask: Tensor | None
    """In the form that users of the graph pass; `[..., E, H or 1]` after `on_edges`."""
    edge_value: EdgeTerm | None
    """`None` also where it is `edge`"""
    edge_is_value: bool
    """Whether `edge` is also the `edge_value`."""
    out_bias: Tensor | None
    """`[H, V]`, added to the output by backends that can"""
    graph: Graph
    score: Score
    distribution: Distribution
    dropout: float
    """The probability of dropping a weight in this call: zero outside of training."""
    weights: bool | str
    """`True` for the weights before dropout, `"dropped"` for those that are applied, `"only"` for nothing else."""
    dtype: torch.dtype
    """The type of the output: the one that the inputs promote to."""
    law: Law | None
    """How the kernels know the distribution."""
    log_sum: bool = False
    """Whether the log-sum-exp of each target's logits is requested, too"""

    @property
    def batch(self) -> torch.Size:
        """The batch dimensions."""
        return self.value.shape[:-3]

    @property
    def heads(self) -> int:
        """H."""
        return (self.key if self.query is None else self.query).size(-2)

    @property
    def channels(self) -> int:
        """C, 1 for a scalar score."""
        return self.key.size(-1)

    @property
    def num_targets(self) -> int:
        """N."""
        assert self.graph.num_targets is not None
        return self.graph.num_targets

    @property
    def compute(self) -> torch.dtype:
        """The type of the computation: half precision is computed in float32 throughout and rounded once."""
        return compute_dtype(self.dtype)

    @property
    def bias_of_edges(self) -> Tensor | None:
        """The bias, `[..., E, H]`, of a call that was returned by `on_edges`."""
        assert not isinstance(self.bias, Bias)
        return self.bias

    @property
    def has_edge_terms(self) -> bool:
        """Whether any input has one entry per edge."""
        return any(term is not None for term in (self.edge, self.bias, self.mask, self.edge_value))

    @property
    def shares_vectors_of_edges(self) -> bool:
        """Whether the elements of a batch share a vector per edge."""
        if not self.batch:
            return False
        for term in (self.edge, self.edge_value):
            if isinstance(term, Projected):
                return True
            table = term.table if isinstance(term, Typed) else term
            if table is not None and table.dim() == 3 and not (self.score.scalar and term is self.edge):
                return True
        return False

    @property
    def vectors_of_values(self) -> EdgeTerm | None:
        """What each edge adds to its value."""
        return self.edge if self.edge_is_value else self.edge_value

    def cast(self, dtype: torch.dtype) -> Call:
        """The same call with vectors in `dtype`; scalars are in the type of the computation."""
        if dtype == self.compute or (self.bias is None and self.edge is None and not self.score.scalar):
            tensors = (
                self.query,
                self.key,
                self.value,
                *_numbers(self.bias),
                *_numbers(self.edge),
                *_numbers(self.edge_value),
            )
            if {dtype, None}.issuperset([None if tensor is None else tensor.dtype for tensor in tensors]):
                return self
        scalars = self.compute if self.score.scalar else dtype
        key = self.key.to(scalars)
        return self._replace(
            query=_to(self.query, scalars),
            key=key,
            value=key if self.value is self.key else self.value.to(dtype),
            edge=_term_to(self.edge, dtype if isinstance(self.edge, Projected) else scalars, self.compute),
            bias=_bias_to(self.bias, self.compute),
            edge_value=_term_to(self.edge_value, dtype, self.compute),
        )

    def with_edges(self) -> Call:
        """The same call with vectors of edges, `[E, H, C]`, for backends that cannot make them edge by edge."""
        if not isinstance(self.edge, tuple) and not isinstance(self.edge_value, tuple):
            return self
        return self._replace(edge=vectors_of(self.edge), edge_value=vectors_of(self.edge_value))

    def on_edges(self, edges: EdgeList, num_edges: int | None) -> Call:
        """The same call with bias and mask per edge, after a check of all inputs that have one entry per edge.

        Args:
            edges: The edges of the graph.
            num_edges: E; `None` if only the kernels will use it, which check sizes themselves.

        Raises:
            ValueError: If an input does not fit the edges.
        """
        batch, heads = self.batch, self.heads
        bias, mask = (
            None if not isinstance(term, Tensor) else self.graph.per_edge(term, name, batch, heads, edges)
            for name, term in ((self._name_of_bias, self.bias), ("mask", self.mask))
        )
        if isinstance(self.bias, Bias):
            whole = _bias_to(
                self.bias, self.compute
            )  # so that sums over edges are made in this type, also going backward
            assert isinstance(whole, Bias)
            bias = whole.of_edges(self.graph, with_loops(edges), batch)
            bias = bias.expand(*bias.shape[:-1], heads)
        real = self.graph.real_edges(edges)
        if real is not None:
            mask = real if mask is None else mask & real
        if bias is None and mask is None and not self.has_edge_terms:
            return self
        if mask is not None:
            mask = _with_heads(mask, batch, heads, num_edges)
        for name, term, last in (
            ("edge", self.edge, (heads, self.channels)),
            (self._name_of_bias, bias, (heads,)),
            ("mask", mask, (heads,)),
            ("edge_value", self.edge_value, (heads, self.value.size(-1))),
        ):
            if isinstance(term, tuple):
                rows = rows_of(term)
                if not _may_equal(rows.size(0), num_edges):
                    what = "type" if isinstance(term, Typed) else "row of features"
                    raise InputError(
                        f"{name} must have one {what} per edge, in the order of graph.edge_index, {num_edges} for this "
                        f"graph; got {rows.size(0)}."
                    )
            elif term is not None and not _fits(term, last, batch, num_edges, any_heads=name == "mask"):
                raise InputError(self._unfit(name, term, last, num_edges))
        return self._replace(bias=bias, mask=mask)

    @property
    def _name_of_bias(self) -> str:
        return "weights" if self.distribution is GIVEN else "bias"

    def _unfit(self, name: str, tensor: Tensor, last: tuple[int, ...], num_edges: int | None) -> str:
        given = list(tensor.shape)
        if name == "edge" and self.score.scalar:  # the shape that users know
            last, given = last[:-1], given[:-1]
        shape, where = ([*last], "for each edge of") if num_edges is None else ([num_edges, *last], "for")
        score = "" if self.score is NO_SCORE else f" and {type(self.score).__name__}"
        return (
            f"{name} must have one entry per edge, in the order of graph.edge_index: {shape} {where} this graph"
            f"{score}; got {given}."
        )


class Result(NamedTuple):
    """The result of a call."""

    out: Tensor
    """`[..., N, H, C]`"""
    weights: Any = None
    """In the form that users of the graph get; `None` if the call does not request weights."""
    log_sum: Tensor | None = None
    """The log-sum-exp of each target's logits, `[..., N, H]`, if the call requests it"""


class Way(NamedTuple):
    """A way of computing a call."""

    name: str
    reason: str | None
    """Why it does not compute this one; `None` if it does"""


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
    dtype = _promoted(query, key, value, *_numbers(edge), *_numbers(bias), *_numbers(edge_value), *score.tensors())
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
        raise InputError(call._unfit("edge_value", edge, (call.heads, value.size(-1)), None))
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


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which tensors of `dtype` are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_dtype(layer: Module, **features: Tensor | None) -> None:
    """Raises `ValueError` if features cannot be multiplied by a layer's weights, because they are of another type.

    Args:
        layer: The layer. Where something in it may cast its input, nothing is raised.
        **features: By name, what the layer multiplies by weights as it is.
    """
    weight = _first_parameter(layer)
    if weight is None:
        return
    dtype = weight.dtype
    for name, x in features.items():
        if x is None or x.dtype == dtype:
            continue
        if torch.compiler.is_compiling() or not _is_as_made(layer, dtype):  # the compiler's own error says where
            continue
        if x.layout != torch.strided and weight.dtype in (torch.float16, torch.bfloat16):  # Linear casts both
            continue
        try:  # PyTorch knows best: autocast and some devices mix types
            F.linear(*(torch.empty(0, 1, dtype=tensor.dtype, device=x.device) for tensor in (x, weight)))
        except RuntimeError as error:
            given, own = (str(dtype).removeprefix("torch.") for dtype in (x.dtype, weight.dtype))
            or_layer = f", or the layer with layer.{_CASTS[x.dtype]}" if x.dtype in _CASTS else ""
            raise InputError(
                f"{name} is {given}, but the parameters of {type(layer).__name__} are {own}: convert the features with "
                f".{_CASTS.get(weight.dtype, f'to({weight.dtype})')}{or_layer}."
            ) from error


_CASTS = {torch.float32: "float()", torch.float64: "double()", torch.float16: "half()", torch.bfloat16: "bfloat16()"}
#: The modules of these packages do not cast their input.
_PACKAGES = ("gattn.", "torch.nn.modules.", "torch_geometric.nn.")


def _first_parameter(module: Module) -> Tensor | None:
    """What `next(module.parameters())` gives, several times as fast."""
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter
    for child in module._modules.values():
        if child is not None and (found := _first_parameter(child)) is not None:
            return found
    return None


def _is_as_made(layer: Module, dtype: torch.dtype) -> bool:
    """Whether a layer with weights has only parameters of this type, and nothing is wrapped, replaced or hooked."""
    has_weights = False
    for module in layer.modules():
        if not type(module).__module__.startswith(_PACKAGES) or "forward" in module.__dict__:
            return False
        parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
        if any(p.dtype != dtype or (is_wrapper(p) and not is_lazy(p)) for p in parameters):
            return False
        if module is not layer and has_hooks(module) and not any(map(is_lazy, module.parameters())):  # hooks make those
            return False
        has_weights |= any(is_lazy(parameter) or parameter.dim() > 1 for parameter in parameters)
    return has_weights


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


def _numbers(term: EdgeTerm | Bias | None) -> tuple[Tensor | None, ...]:
    """The tensors of a term that hold real numbers."""
    if isinstance(term, Bias):
        return term.tensors()
    if isinstance(term, Projected):
        return term
    return (term.table if isinstance(term, Typed) else term,)


def _term_to(term: EdgeTerm | None, dtype: torch.dtype, compute: torch.dtype) -> EdgeTerm | None:
    """A term in another type; what projects features has the type of the computation."""
    if isinstance(term, Projected):
        return Projected(term.features.to(dtype), term.weight.to(compute))
    if isinstance(term, Typed):
        return term._replace(table=term.table.to(dtype))
    return _to(term, dtype)


def _bias_to(bias: Tensor | Bias | None, dtype: torch.dtype) -> Tensor | Bias | None:
    if not isinstance(bias, Bias):
        return _to(bias, dtype)
    tensors = bias.tensors()
    return bias if all(x.dtype == dtype for x in tensors) else bias.with_tensors([x.to(dtype) for x in tensors])


def _with_heads(mask: Tensor, batch: torch.Size, heads: int, num_edges: int | None) -> Tensor:
    """A mask `[..., E]` or `[..., E, H]` as `[..., E, H or 1]`."""
    if mask.dim() == 1:
        return mask.unsqueeze(-1)
    if mask.shape[:-1] == batch and _may_equal(mask.size(-1), num_edges):
        is_per_head = mask.dim() == 2 and mask.size(-1) == heads and _may_equal(mask.size(0), num_edges)
        return mask if is_per_head else mask.unsqueeze(-1)
    return mask


def _fits(tensor: Tensor, last: tuple[int, ...], batch: torch.Size, num_edges: int | None, any_heads: bool) -> bool:
    """Whether a tensor is `[E, *last]`, possibly with the batch dimensions in front."""
    inner = len(last)
    return (
        (tensor.shape[-inner:] == last or (any_heads and tensor.size(-1) == 1))
        and tensor.dim() in (inner + 1, inner + 1 + len(batch))
        and tensor.shape[: -1 - inner] in ((), batch)
        and _may_equal(tensor.size(-1 - inner), num_edges)
    )


def _may_equal(size: int, num_edges: int | None) -> bool:
    """Whether a size may be E: compiled code does not know numbers of edges that depend on data."""
    if num_edges is None:
        return True
    return guard_or_true(size == num_edges) if torch.compiler.is_compiling() else size == num_edges


def _promoted(*tensors: Tensor | None) -> torch.dtype:
    dtype: torch.dtype | None = None
    for tensor in tensors:
        if tensor is not None and tensor.dtype != dtype:
            dtype = tensor.dtype if dtype is None else torch.promote_types(dtype, tensor.dtype)
    assert dtype is not None
    return dtype


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
