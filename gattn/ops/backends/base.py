"""The base class of backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from gattn.graphs import EdgeList
from gattn.ops import reference
from gattn.ops.call import Call, Result, Way
from gattn.ops.dropout import draw_seed, drop
from gattn.ops.plans import Given, Plan
from gattn.torch_private import is_transformed, uses_forward_mode, uses_jit_trace

__all__ = [
    "Backend",
    "Missing",
    "dress_logits",
    "finish",
    "log_sum",
    "log_sum_of_edges",
    "logits",
    "needs_plain_pytorch",
    "new_seed",
]


class Missing(NamedTuple):
    """Something that a backend needs and this machine lacks."""

    what: str
    why: str
    """The reason, as a sentence without its full stop."""


class Backend(ABC):
    """Something that can compute attention.

    To add one, write a class in a module of its own, and add an object of it to `gattn.ops.backends.BACKENDS`.
    """

    #: The name by which users request it.
    name: ClassVar[str]

    #: The types of devices on which `backend="auto"` chooses it; `None` for all.
    devices: ClassVar[tuple[str, ...] | None]

    #: Whether it can add a call's `out_bias` itself.
    adds_out_bias: ClassVar[bool] = False

    #: Whether it uses operators of gattn's own, which an exported program contains only on request.
    has_operators: ClassVar[bool] = False

    def missing(self) -> Missing | None:
        """What it needs and this machine lacks; `None` if nothing is missing."""
        return None

    @abstractmethod
    def refuses(self, call: Call) -> str | None:
        """Why it cannot serve a call, as the end of a sentence; `None` if it can."""

    def yields(self, call: Call) -> bool:
        """Whether the backends after it are faster for a call that it does not refuse."""
        return False

    @abstractmethod
    def attend(self, call: Call) -> Result:
        """Computes a call that it does not refuse."""

    def ways(self, call: Call) -> list[Way]:
        """The ways in which it computes calls, of which one computes this call, which it does not refuse."""
        return [Way("its kernels", None)]

    def logits(self, call: Call) -> Any:
        """See `logits`, for a call that it does not refuse."""
        return logits(call)

    def log_sum(self, call: Call) -> Tensor:
        """See `log_sum`, for a call that it does not refuse."""
        return log_sum(call)

    def plan(self, call: Call, given: Given) -> Plan | None:
        """How to compute the output of calls with the same signature, checked already; `None` to look at each anew.

        Args:
            call: A call that it does not refuse and that requests no weights.
            given: The same call as it was given.
        """
        return None


def logits(call: Call) -> Any:
    """The logits of a call, including its bias, in the form in which users get weights; masked: minus infinity."""
    return dress_logits(*_logits_of_edges(call))


def log_sum(call: Call) -> Tensor:
    """The log-sum-exp of each target's logits, `[..., N, H]`."""
    return log_sum_of_edges(*_logits_of_edges(call))


def _logits_of_edges(call: Call) -> tuple[Call, EdgeList, Tensor]:
    """The call on its edges, these, and their logits before the mask."""
    edges = call.graph.edge_list(call.value.device)
    call = call.on_edges(edges, edges.num_edges).cast(call.compute).with_edges()
    source, target = edges.sources_and_targets()
    query = None if call.query is None else call.query.index_select(-3, target)
    key = reference.repeat_heads(call.key.index_select(-3, source), call.heads)
    found = reference.logits(query, key, cast(Tensor | None, call.edge), call.score)
    return call, edges, found if call.bias_of_edges is None else found + call.bias_of_edges


def dress_logits(call: Call, edges: EdgeList, logits: Tensor) -> Any:
    """Logits `[..., E, H]` in the form in which users of the graph get weights; minus infinity without an edge.

    Args:
        call: A call with its mask per edge.
        edges: Its edges.
        logits: The logits, before the mask.
    """
    logits = _masked(call, logits)
    there = torch.ones_like(logits, dtype=torch.bool)
    found, seen = (call.graph.dress(x, edges) for x in (logits.to(call.dtype), there))
    if isinstance(found, list):
        return [x.masked_fill(~there, -torch.inf) for x, there in zip(found, seen, strict=True)]
    return found if found.shape == logits.shape else found.masked_fill(~seen, -torch.inf)


def log_sum_of_edges(call: Call, edges: EdgeList, logits: Tensor) -> Tensor:
    """The log-sum-exp of each target's logits, `[..., N, H]`, given those of edges; see `dress_logits`."""
    return reference.log_sum(_masked(call, logits), edges.sources_and_targets()[1], edges.num_targets)


def _masked(call: Call, logits: Tensor) -> Tensor:
    return logits if call.mask is None else logits.masked_fill(~call.mask, -torch.inf)


def needs_plain_pytorch() -> str | None:
    """Why operators and kernels are not enough, as the end of a sentence; `None` if they are."""
    if is_transformed():
        return "torch.func transforms need plain PyTorch"
    if uses_forward_mode():
        return "forward-mode differentiation needs plain PyTorch"
    if uses_jit_trace():
        return "torch.jit.trace records plain PyTorch"
    return None


def new_seed(dropout: float, device: torch.device) -> Tensor | None:
    """A seed for the dropout of a call, if it has any."""
    return draw_seed(device) if dropout > 0.0 else None


def finish(
    call: Call, edges: EdgeList, out: Tensor, alpha: Tensor | None, dropped: Tensor | None, seed: Tensor | None
) -> Result:
    """The result of a call that was computed per edge.

    Args:
        call: The call.
        edges: Its edges.
        out: The output, in any type.
        alpha: Weights before dropout, `[..., E, H]`.
        dropped: Weights after dropout; `None` if they have not been computed.
        seed: The seed of the dropout.
    """
    out = out.to(call.dtype)
    if not call.weights:
        return Result(out)
    assert alpha is not None
    if call.weights == "dropped" and seed is not None:
        alpha = drop(alpha, call.dropout, seed) if dropped is None else dropped
    return Result(out, call.graph.dress(alpha.to(call.dtype), edges))
