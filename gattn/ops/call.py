"""One attention call, checked, in the one form that all backends take."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gattn.bias import Bias
from gattn.distributions import Distribution, Identity, Law
from gattn.edges import EdgeTerm, Projected, Typed, rows_of, vectors_of
from gattn.errors import InputError
from gattn.graphs import EdgeList, Graph
from gattn.graphs.edge_lists import with_loops
from gattn.scores import GATScore, Score
from gattn.torch_private import guard_or_true

__all__ = ["GIVEN", "NO_SCORE", "Call", "Result", "Way", "compute_dtype", "numbers_of"]

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
                *numbers_of(self.bias),
                *numbers_of(self.edge),
                *numbers_of(self.edge_value),
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
            real = real.expand(*batch, *real.shape[-2:]) if real.dim() > 2 else real
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
                raise InputError(self.unfit(name, term, last, num_edges))
        return self._replace(bias=bias, mask=mask)

    @property
    def _name_of_bias(self) -> str:
        return "weights" if self.distribution is GIVEN else "bias"

    def unfit(self, name: str, tensor: Tensor, last: tuple[int, ...], num_edges: int | None) -> str:
        """What is wrong with a tensor that does not have one entry, `[..., *last]`, for each edge."""
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


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which tensors of `dtype` are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def numbers_of(term: EdgeTerm | Bias | None) -> tuple[Tensor | None, ...]:
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


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
