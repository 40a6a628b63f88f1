"""Which code computes a call of attention, and why no other does."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from gattn.attention import call_of, completed
from gattn.bias import Bias
from gattn.distributions import Distribution
from gattn.edges import EdgeTerm
from gattn.errors import check_flag
from gattn.graphs import FLOWS, GraphLike
from gattn.ops import plans
from gattn.ops.backends.base import needs_plain_pytorch
from gattn.ops.choose import requested, ways
from gattn.ops.dropout import check_probability
from gattn.scores import DotScore, Score
from gattn.settings import checks_finite

__all__ = ["CallExplanation", "explain_call"]


class CallExplanation(NamedTuple):
    """Which way computes a call; what `explain_call` returns, to be printed."""

    backend: str
    """`"dense"`, `"cpu"`, `"triton"` or `"reference"`"""
    way: str
    """The way in which the backend computes the call"""
    is_prepared: bool
    """Whether checks and decisions are made once, for all calls that differ in nothing but numbers, nodes and edges"""
    reasons: dict[str, str]
    """Why each other way does not compute it"""

    def __str__(self) -> str:
        prepared = "prepared once for all calls like this one" if self.is_prepared else "looked at in each call"
        lines = [f"{self.backend}: {self.way}; {prepared}", *(f"not {x}: {y}" for x, y in self.reasons.items())]
        return "\n".join(lines)


def explain_call(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor | None,
    graph: GraphLike,
    *,
    score: Score | None = None,
    edge: EdgeTerm | None = None,
    bias: Tensor | Bias | None = None,
    mask: Tensor | None = None,
    edge_value: EdgeTerm | bool | None = None,
    out_bias: Tensor | None = None,
    distribution: str | Distribution = "softmax",
    dropout: float = 0.0,
    training: bool = False,
    return_weights: bool | str = False,
    return_lse: bool = False,
    backend: str = "auto",
) -> CallExplanation:
    """Says which way computes a call, whether it is prepared, and why each other way does not fit.

    Nothing is computed. As for :func:`gattn.attend`, it counts what :func:`gattn.backend` requests, and whether a
    transform of `torch.func` is running.

    Args:
        query: See :func:`gattn.attend`, like all arguments.
        key: See there.
        value: See there; `None` for a call of :func:`gattn.weigh`.
        graph: See there.
        score: See there. (default: `DotScore()`)
        edge: See there. (default: `None`)
        bias: See there. (default: `None`)
        mask: See there. (default: `None`)
        edge_value: See there. (default: `None`)
        out_bias: See there. (default: `None`)
        distribution: See there. (default: `"softmax"`)
        dropout: See there. (default: `0.0`)
        training: Whether dropout applies. (default: `False`)
        return_weights: See there. (default: `False`)
        return_lse: See there. (default: `False`)
        backend: See there. (default: `"auto"`)

    Shapes:
        query `[N, H, C]`, key `[M, H, C]`, value `[M, H, Cv]`; see :func:`gattn.attend`.

    Returns:
        The backend, its way, whether it is prepared, and the reasons; `print` shows each on a line.

    Raises:
        ValueError: As `gattn.attend`; also if the backend that is requested cannot serve the call.
        TypeError: As `gattn.attend`.

    Example:
        >>> import torch, gattn
        >>> x = torch.randn(5, 2, 4)  # 5 nodes, 2 heads, 4 channels
        >>> found = gattn.explain_call(x, x, x, gattn.CompleteGraph(5), distribution=gattn.Softmax(softcap=5.0))
        >>> found.backend, found.way
        ('dense', 'tiles of pairs')
        >>> found.reasons["dense, PyTorch's fused attention"]
        'it computes the plain softmax of scaled dot products'
    """
    terms: dict[str, Any] = {"edge": edge, "bias": bias, "mask": mask, "edge_value": edge_value, "out_bias": out_bias}
    score = DotScore() if score is None else score
    if not isinstance(score, Score):
        raise TypeError(f"score must be an object such as gattn.DotScore() or gattn.GATScore(); got {score!r}.")
    if return_weights not in (False, True, "dropped"):
        raise ValueError(f"return_weights must be False, True or 'dropped'; got {return_weights!r}.")
    check_probability("dropout", dropout)
    check_flag("training", training)
    check_flag("return_lse", return_lse)
    dropout, weights = dropout if training else 0.0, "only" if value is None else return_weights
    key, value, score = completed(query, key, value, score, terms)
    call = call_of(query, key, value, graph, score, distribution, dropout, weights, return_lse, terms)
    chosen, found = ways(backend, call, needs_plain_pytorch())
    options = dropout, requested(backend), weights, return_lse
    given = plans.given(query, key, value, graph, FLOWS[0], score, distribution, *options, **terms)
    is_prepared = given is not None and not checks_finite() and plans.plan_of(given, call, chosen) is not None
    way = next(way.name for _, way in found if way.reason is None)
    reasons = {f"{name}, {way.name}" if way.name else name: way.reason for name, way in found if way.reason is not None}
    return CallExplanation("reference" if chosen is None else chosen.name, way, is_prepared, reasons)
