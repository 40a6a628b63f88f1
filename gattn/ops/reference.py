"""Attention in plain PyTorch, which every kernel must equal, including gradients.

The core's hooks use `weights` and `messages`; kernels take their second derivatives from `attention`. Here, a scalar
score's terms are vectors of one channel, `[..., H, 1]`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gattn.distributions import Distribution
from gattn.errors import InputError
from gattn.ops.call import compute_dtype
from gattn.ops.dropout import drop
from gattn.scores import Score

__all__ = [
    "attention",
    "broadcast_logits",
    "log_sum",
    "log_sum_of_rows",
    "logits",
    "messages",
    "products",
    "repeat_heads",
    "softmax_of_rows",
    "weighted",
    "weights",
    "weights_of",
    "whole_logits",
]


def logits(query: Tensor | None, key: Tensor, edge: Tensor | None, score: Score) -> Tensor:
    """A score's logits `[..., E, H]`, given the terms at both ends of the edges, `[..., E, H, C]`."""
    if score.scalar:
        query, edge = (None if x is None else x.squeeze(-1) for x in (query, edge))
        key = key.squeeze(-1)
    found = score.logits(query, key, edge)
    shape = key.shape if score.scalar else key.shape[:-1]
    if not _is_real(found) or found.shape != shape:
        raise InputError(_wrong(score, "logits", "one logit per edge and head", list(shape), found))
    return found


def weights_of(distribution: Distribution, logits: Tensor, index: Tensor, num_targets: int) -> Tensor:
    """A distribution's weights for logits `[..., E, H]`."""
    found = distribution.weights(logits, index, num_targets, logits.dim() - 2)
    if not _is_real(found) or found.shape != logits.shape:
        raise InputError(_wrong(distribution, "weights", "one weight per logit", list(logits.shape), found))
    return found


def _is_real(found: Any) -> bool:
    return isinstance(found, Tensor) and found.is_floating_point()


def _wrong(of: Any, method: str, what: str, shape: Any, found: Any) -> str:
    came = f"{list(found.shape)} of type {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
    return f"{type(of).__name__}.{method}() must return {what}, a floating-point tensor of shape {shape}; got {came}."


def broadcast_logits(query: Tensor | None, key: Tensor, score: Score, shape: tuple[int, ...]) -> Tensor:
    """The logits of some targets and all sources, `[B, N, M, H]`, by broadcasting.

    Args:
        query: `[B, N, 1, H, C]`, for a scalar score `[B, N, 1, H]`.
        key: `[B, 1, M, H, C]`, for a scalar score `[B, 1, M, H]`.
        score: A score whose logits broadcast.
        shape: B, N, M and H.
    """
    found = score.logits(query, key, None)
    fits = _is_real(found) and found.dim() == 4 and found.size(-1) == shape[-1]
    if not fits or any(size not in (1, full) for size, full in zip(found.shape, shape, strict=True)):
        note = f"{list(shape)} or broadcastable to it, because it has broadcasts = True"
        raise InputError(_wrong(score, "logits", "one logit per pair of nodes and head", note, found))
    return found.expand(shape)


def weights(
    query: Tensor | None,
    key: Tensor,
    edge: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    score: Score,
    distribution: Distribution,
    index: Tensor,
    num_targets: int,
) -> Tensor:
    """Attention weights `[..., E, H]` of edges, given the terms at their two ends, `[..., E, H, C]`."""
    return weights_of(distribution, whole_logits(query, key, edge, bias, mask, score), index, num_targets)


def whole_logits(
    query: Tensor | None, key: Tensor, edge: Tensor | None, bias: Tensor | None, mask: Tensor | None, score: Score
) -> Tensor:
    """Logits `[..., E, H]` with their bias; minus infinity where they are masked."""
    found = logits(query, key, edge, score)
    if bias is not None:
        found = found + bias
    return found if mask is None else found.masked_fill(~mask, -torch.inf)


def log_sum(logits: Tensor, index: Tensor, num_targets: int) -> Tensor:
    """The log-sum-exp of each target's logits `[..., E, H]`, `[..., N, H]`; minus infinity if it sees nothing."""
    size = (*logits.shape[:-2], num_targets, logits.size(-1))
    place = index.unsqueeze(-1).expand_as(logits)
    most = logits.new_full(size, -torch.inf).scatter_reduce(-2, place, logits.detach(), "amax")
    most = most.masked_fill(most == -torch.inf, 0.0)
    total = logits.new_zeros(size).index_add(logits.dim() - 2, index, (logits - most.index_select(-2, index)).exp())
    # No gradient comes from where nothing is seen: that of log(0) would be NaN.
    return (most + total.masked_fill(total == 0.0, 1.0).log()).masked_fill(total == 0.0, -torch.inf)


def messages(value: Tensor, alpha: Tensor, edge_value: Tensor | None) -> Tensor:
    """Weighted values of edges, `[..., E, H, C]`."""
    if edge_value is not None:
        value = value + edge_value
    return alpha.unsqueeze(-1) * value


def repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    """Repeats heads for grouped queries: each head of `tensor` serves several consecutive query heads."""
    return tensor if tensor.size(-2) == heads else tensor.repeat_interleave(heads // tensor.size(-2), dim=-2)


def attention(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    edge_index: Tensor,
    num_targets: int,
    score: Score,
    distribution: Distribution,
    *,
    edge: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    edge_value: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output `[..., N, H, C]` and weights `[..., E, H]` before dropout.

    The arguments are those of `gattn.ops.call.Call`; `edge_index` has sources above targets, and `seed` is for dropout.
    """
    source, target = edge_index
    heads = (key if query is None else query).size(-2)
    key, value = repeat_heads(key, heads), repeat_heads(value, heads)
    alpha = weights(
        None if query is None else query.index_select(-3, target),
        key.index_select(-3, source),
        edge,
        bias,
        mask,
        score,
        distribution,
        target,
        num_targets,
    )
    dropped = alpha if seed is None else drop(alpha, dropout, seed)
    sent = messages(value.index_select(-3, source), dropped, edge_value)
    out = sent.new_zeros((*sent.shape[:-3], num_targets, *sent.shape[-2:])).index_add(sent.dim() - 3, target, sent)
    return out, alpha


def products(query: Tensor, key: Tensor, scale: Any, slope: float = 1.0, clamp: float | None = None) -> Tensor:
    """The logits of all pairs, `[..., H, N, M]`, by scaled dot products, a LeakyReLU's if it has a slope, clamped."""
    keys = repeat_heads(key, query.size(-2)).to(compute_dtype(key.dtype))
    found = query.to(keys.dtype).transpose(-3, -2) @ keys.transpose(-3, -2).mT * scale
    found = found if slope == 1.0 else F.leaky_relu(found, slope)
    return found if clamp is None else found.clamp(-clamp, clamp)


def softmax_of_rows(logits: Tensor) -> Tensor:
    """The softmax of logits `[..., N, M]`; zeros for targets that see nothing."""
    empty = (logits == -torch.inf).all(-1, keepdim=True)
    return logits.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)


def log_sum_of_rows(logits: Tensor) -> Tensor:
    """The log-sum-exp of each target's logits `[..., H, N, M]`, `[..., N, H]`; see `log_sum`."""
    empty = (logits == -torch.inf).all(-1, keepdim=True)
    found = logits.masked_fill(empty, 0.0).logsumexp(-1, keepdim=True).masked_fill(empty, -torch.inf)
    return found.squeeze(-1).mT


def weighted(weights: Tensor, value: Tensor) -> Tensor:
    """The sums of values `[..., M, H, C]` with weights `[..., H, N, M]`: `[..., N, H, C]`."""
    value = repeat_heads(value, weights.size(-3)).to(weights.dtype)
    return (weights @ value.transpose(-3, -2)).transpose(-3, -2)
