"""Attention in plain PyTorch: what every kernel must equal, gradients included.

The core's hooks are made of `weights` and `messages`; kernels take their second derivatives from `attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gattn.distributions import Distribution
from gattn.ops.dropout import drop
from gattn.scores import Score


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
    """Attention weights `[..., E, H]` of edges, given what their two ends have, `[..., E, H, C]`."""
    logits = score.logits(query, key, edge)
    if bias is not None:
        logits = logits + bias
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    return distribution.weights(logits, index, num_targets, logits.dim() - 2)


def messages(value: Tensor, alpha: Tensor, edge_value: Tensor | None) -> Tensor:
    """Weighted values of edges, `[..., E, H, C]`."""
    if edge_value is not None:
        value = value + edge_value
    return alpha.unsqueeze(-1) * value


def repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    """Grouped queries: each head of `tensor` serves several consecutive query heads."""
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

    Args:
        query: As in `gattn.attend`, like `key`, `value`, `edge`, `bias`, `mask` (which has a dimension of heads here)
            and `edge_value`.
        key: See `query`.
        value: See `query`.
        edge_index: `[2, E]`, sources above targets.
        num_targets: N.
        score: How the two ends of an edge compare.
        distribution: How logits become weights.
        edge: See `query`.
        bias: See `query`.
        mask: See `query`.
        edge_value: See `query`.
        dropout: Probability that a weight is dropped.
        seed: Of the dropout.
    """
    source, target = edge_index
    nodes = -2 if score.scalar else -3
    if score.grouped and query is not None:
        key, value = repeat_heads(key, query.size(-2)), repeat_heads(value, query.size(-2))
    alpha = weights(
        None if query is None else query.index_select(nodes, target),
        key.index_select(nodes, source),
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
