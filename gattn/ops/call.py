"""One attention call, checked, in the one form that all backends take."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from gattn.distributions import Distribution, Law, law_of
from gattn.errors import InputError, InputTypeError
from gattn.graphs import EdgeList, Graph
from gattn.graphs.edge_lists import check_later, check_types, checked_types
from gattn.scores import Score
from gattn.torch_private import guard_or_true, has_hooks, is_traced, is_wrapper

__all__ = ["Call", "check_dtype", "checked_call", "compute_dtype"]


class Call(NamedTuple):
    """The arguments of `gattn.attend`.

    Here, a scalar score's terms are vectors of one channel: query `[..., N, H, 1]`, key `[..., M, H, 1]`, edge
    `[..., E, H, 1]`. Whether `value is key`, or `edge_value is edge`, is part of the call.
    """

    query: Tensor | None
    key: Tensor
    value: Tensor
    edge: Tensor | None
    bias: Tensor | None
    """In the form that users of the graph pass; `[..., E, H]` after `on_edges`."""
    mask: Tensor | None
    """In the form that users of the graph pass; `[..., E, H or 1]` after `on_edges`."""
    edge_value: Tensor | None
    edge_projection: Tensor | None
    """`[H, C, D]`, or `[H, 1, D]`; with it, `edge`, and an `edge_value` that is `edge`, are features `[E, D]`."""
    edge_type: Tensor | None
    """`[E]`; with it, `edge` and `edge_value` have one entry per type instead of one per edge."""
    out_bias: Tensor | None
    """`[H, V]`, added to the output by backends that can"""
    graph: Graph
    score: Score
    distribution: Distribution
    dropout: float
    """The probability of dropping a weight in this call: zero outside of training."""
    weights: bool | str
    """`True` for the weights before dropout, `"dropped"` for those that are applied."""
    dtype: torch.dtype
    """The type of the output: the one that the inputs promote to."""
    law: Law | None
    """How the kernels know the distribution."""

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
    def has_edge_terms(self) -> bool:
        """Whether any input has one entry per edge."""
        return any(term is not None for term in (self.edge, self.bias, self.mask, self.edge_value))

    @property
    def shares_vectors_of_edges(self) -> bool:
        """Whether the elements of a batch share a vector per edge."""
        if not self.batch:
            return False
        terms = (None if self.score.scalar else self.edge, self.edge_value)
        is_shared = any(term is not None and term.dim() == 3 for term in terms)
        return is_shared or self.edge_projection is not None

    def cast(self, dtype: torch.dtype) -> Call:
        """The same call with vectors in `dtype`; scalars are in the type of the computation."""
        if dtype == self.compute or (self.bias is None and self.edge is None and not self.score.scalar):
            tensors = (self.query, self.key, self.value, self.edge, self.bias, self.edge_value, self.edge_projection)
            if {dtype, None}.issuperset([None if tensor is None else tensor.dtype for tensor in tensors]):
                return self
        scalars = self.compute if self.score.scalar else dtype
        key, edge = self.key.to(scalars), _to(self.edge, dtype if self.edge_projection is not None else scalars)
        return self._replace(
            query=_to(self.query, scalars),
            key=key,
            value=key if self.value is self.key else self.value.to(dtype),
            edge=edge,
            bias=_to(self.bias, self.compute),
            edge_value=edge if self.edge_value is self.edge else _to(self.edge_value, dtype),
            edge_projection=_to(self.edge_projection, self.compute),
        )

    def with_edges(self) -> Call:
        """The same call with vectors of edges, `[E, H, C]`, for backends that cannot make them edge by edge."""
        if self.edge_type is not None:
            for table in (self.edge, self.edge_value):
                if table is not None:
                    check_later(self.edge_type, table.size(0), "edge_type holds a type")
            edge, edge_value = (
                None if table is None else table.index_select(0, self.edge_type)
                for table in (self.edge, self.edge_value)
            )
            edge_value = edge if self.edge_value is self.edge else edge_value
            return self._replace(edge=edge, edge_value=edge_value, edge_type=None)
        weight = self.edge_projection
        if weight is None or self.edge is None:
            return self
        dtype = torch.promote_types(self.edge.dtype, weight.dtype)
        edge = F.linear(self.edge.to(dtype), weight.flatten(0, 1).to(dtype)).unflatten(-1, weight.shape[:2])
        edge_value = edge if self.edge_value is self.edge else self.edge_value
        return self._replace(edge=edge, edge_value=edge_value, edge_projection=None)

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
            None if term is None else self.graph.per_edge(term, name, batch, heads, edges)
            for name, term in (("bias", self.bias), ("mask", self.mask))
        )
        real = self.graph.real_edges(edges)
        if real is not None:
            mask = real if mask is None else mask & real
        if bias is None and mask is None and not self.has_edge_terms:
            return self
        if mask is not None:
            mask = _with_heads(mask, batch, heads, num_edges)
        projection = self.edge_projection
        of_edge = (heads, self.channels) if projection is None else projection.shape[2:]
        of_value = of_edge if self.edge_value is self.edge else (heads, self.value.size(-1))
        for name, tensor, last in (
            ("edge", self.edge, of_edge),
            ("bias", bias, (heads,)),
            ("mask", mask, (heads,)),
            ("edge_value", self.edge_value, of_value),
        ):
            if self.edge_type is not None and name in ("edge", "edge_value"):
                continue
            if tensor is not None and not _fits(tensor, last, batch, num_edges, any_heads=name == "mask"):
                raise InputError(self._unfit(name, tensor, last, num_edges))
        if self.edge_type is not None and not _may_equal(self.edge_type.size(0), num_edges):
            raise InputError(
                f"edge_type must have one type per edge, in the order of graph.edge_index: [{num_edges}] for this "
                "graph; got "
                f"{list(self.edge_type.shape)}."
            )
        return self._replace(bias=bias, mask=mask)

    def _unfit(self, name: str, tensor: Tensor, last: tuple[int, ...], num_edges: int | None) -> str:
        given = list(tensor.shape)
        if name == "edge" and self.score.scalar:  # the shape that users know
            last, given = last[:-1], given[:-1]
        shape, where = ([*last], "for each edge of") if num_edges is None else ([num_edges, *last], "for")
        return (
            f"{name} must have one entry per edge, in the order of graph.edge_index: {shape} {where} this graph and "
            f"{type(self.score).__name__}; got {given}."
        )


def checked_call(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    graph: Graph,
    *,
    score: Score,
    edge: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    edge_value: Tensor | None,
    edge_projection: Tensor | None,
    edge_type: Tensor | None,
    out_bias: Tensor | None,
    distribution: Distribution,
    dropout: float,
    weights: bool | str,
) -> Call:
    """The call with these arguments, after all checks that do not depend on the edges.

    Raises:
        ValueError: If arguments do not fit each other or the graph.
        TypeError: If an input is not a tensor.
    """
    _check_nodes(query, key, value, score)
    _check_kinds(value, edge=edge, bias=bias, mask=mask, edge_value=edge_value, out_bias=out_bias)
    _check_kinds(value, edge_projection=edge_projection)
    _check_devices(value, score)
    _check_devices(value, distribution)
    if edge_projection is not None:
        _check_projection(edge_projection, edge, edge_value, key if query is None else query, value, score)
    if edge_type is not None:
        if edge_projection is not None:
            raise InputError(
                "an edge's term is either a projection of its features or the term of its type: pass edge_projection "
                "or "
                "edge_type, not both."
            )
        edge_type = _checked_types(edge_type, edge, edge_value, key if query is None else query, value, score)
    num_targets = None if query is None else query.size(value.dim() - 3)
    graph = graph.resolve(value.size(-3), num_targets, value.shape[:-3], value.device)
    if graph.is_sharded and distribution.with_sources(torch.empty(0, dtype=torch.int64)) is not distribution:
        raise InputError(
            f"{distribution!r} depends on the numbers of the sources, which differ on a sharded graph: attend on the "
            "whole graph, or with another distribution."
        )
    graph, key, value, bias, mask = graph.fetch(key, value, bias, mask)
    dtype = _promoted(query, key, value, edge, bias, edge_value, edge_projection, *score.tensors())
    if score.scalar:
        query, key = None if query is None else query.unsqueeze(-1), key.unsqueeze(-1)
        if edge_projection is None:
            edge = None if edge is None else edge.unsqueeze(-1)
        else:
            edge_projection = edge_projection.unsqueeze(1)
    terms = (edge, bias, mask, edge_value, edge_projection, edge_type, out_bias)
    call = Call(query, key, value, *terms, graph, score, distribution, dropout, weights, dtype, law_of(distribution))
    distribution.check(call.batch, call.num_targets, call.heads)
    if out_bias is not None and out_bias.shape != (call.heads, value.size(-1)):
        wanted = [call.heads, value.size(-1)]
        raise InputError(
            f"out_bias must have one entry per head and channel of the output, {wanted}; got {list(out_bias.shape)}."
        )
    return call


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


def _check_kinds(value: Tensor, **terms: Tensor | None) -> None:
    """Checks types and devices of optional inputs; sizes per edge are checked when the edges are known."""
    for name, term in terms.items():
        if term is None:
            continue
        if not isinstance(term, Tensor):
            raise InputTypeError(f"{name} must be a tensor; got {type(term).__name__}.")
        if name == "mask" and term.dtype != torch.bool:
            raise InputError(f"mask must be a tensor of booleans, True = may attend; got {term.dtype}.")
        if name == "bias" and term.dtype == torch.bool:
            raise InputError(
                "bias holds booleans, but is added to the logits: pass it as mask=, where True = may attend."
            )
        if term.is_complex():
            raise InputError(f"{name} must be of a floating-point type; got {term.dtype}.")
        if term.device != value.device:
            raise InputError(f"{name} is on {term.device}, the features are on {value.device}: move one of them.")


def _check_devices(value: Tensor, part: Score | Distribution) -> None:
    """Checks on which device the tensors of a score or a distribution are."""
    for term in part.tensors():
        if term.device != value.device:
            raise InputError(
                f"{type(part).__name__} has a tensor on {term.device}, the features are on {value.device}: move one of "
                "them."
            )


def _check_projection(
    projection: Tensor, edge: Tensor | None, edge_value: Tensor | None, end: Tensor, value: Tensor, score: Score
) -> None:
    """Checks a projection of edge features against the features, and against one end of the edges."""
    if edge is None or edge.dim() != 2:
        given = "none" if edge is None else list(edge.shape)
        raise InputError(f"edge_projection requires edge features [E, D] as edge; got {given}.")
    letters, ends = ("[H, D]", end.shape[-1:]) if score.scalar else ("[H, C, D]", end.shape[-2:])
    wanted = [*ends, edge.size(-1)]
    if list(projection.shape) != wanted:
        raise InputError(
            f"edge_projection must have shape {letters} for {type(score).__name__}, here {wanted}; got "
            f"{list(projection.shape)}."
        )
    if edge_value is edge and (score.scalar or value.size(-1) != end.size(-1)):
        raise InputError(
            f"an edge_value that is edge is projected like it, to {wanted[:-1]} per edge, but value has "
            f"{list(value.shape[-2:])} per node."
        )


def _checked_types(
    edge_type: Tensor, edge: Tensor | None, edge_value: Tensor | None, end: Tensor, value: Tensor, score: Score
) -> Tensor:
    """Checks the types of edges and the inputs with one entry per type; returns the types in 64 bits."""
    edge_type = checked_types(edge_type)
    if edge_type.device != value.device:
        raise InputError(f"edge_type is on {edge_type.device}, the features are on {value.device}: move one of them.")
    if edge is None and edge_value is None:
        raise InputError("edge_type selects rows of edge and edge_value, but neither is given.")
    heads = end.shape[-1:] if score.scalar else end.shape[-2:-1]
    of_edge = heads if score.scalar else end.shape[-2:]
    of_value = (*heads, value.size(-1))
    for name, table, last in (("edge", edge, of_edge), ("edge_value", edge_value, of_value)):
        if table is not None and (table.shape[1:] != last or table.dim() != 1 + len(last)):
            letters = "[R, H]" if len(last) == 1 else "[R, H, C]"
            raise InputError(
                f"with edge_type, {name} must have one row for each of R types, {letters}, here [R, "
                f"{', '.join(map(str, last))}]; got {list(table.shape)}."
            )
        if table is not None and not is_traced():  # where kernels or with_edges() check the types
            check_types(edge_type, table.size(0))
    return edge_type


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
