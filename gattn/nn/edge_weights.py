"""Attention weights by themselves, for layers that compute with them."""

from __future__ import annotations

from torch import Tensor

from gattn.attention import _core, unrecorded
from gattn.graphs import Graph
from gattn.scores import Score

__all__ = ["edge_weights"]


def edge_weights(
    query: Tensor, key: Tensor, graph: Graph, score: Score, distribution: str, dropout: float = 0.0
) -> Tensor:
    """The weights that attention would have, `[..., E, H]`, after dropout, without the weighted sum.

    Args:
        query: See `gattn.attend`.
        key: Likewise.
        graph: Likewise; a list of edges.
        score: Likewise.
        distribution: Likewise; `"identity"` gives logits.
        dropout: Likewise; pass zero outside of training. (default: `0.0`)
    """
    nothing = key.new_zeros(*(key.shape if score.scalar else key.shape[:-1]), 0)
    options = {"score": score, "distribution": distribution, "dropout": dropout, "training": True}
    _, weights = unrecorded(_core, query, key, nothing, graph, **options, return_weights="dropped")
    assert isinstance(weights, Tensor)
    return weights
