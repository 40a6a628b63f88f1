"""Biases that depend on positions in sequences, for the edges of a graph.

Dimensions: N targets, M sources, E edges, H heads, B blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gattn.graphs import Graph
from gattn.nn.positional import RelativePosition

__all__ = ["position_bias"]


def position_bias(position: RelativePosition, graph: Graph, heads: int, device: torch.device) -> Tensor:
    """The bias of each edge, `[E, H]`; on a complete graph `[H, N, M]`, and on a packed one `[B, H, N, M]`.

    Raises:
        ValueError: If the positions were made for another number of heads.
    """
    return _for_heads(position(graph.distances(device)), heads).movedim(-1, graph.heads_dim)


def _for_heads(bias: Tensor, heads: int) -> Tensor:
    if bias.size(-1) != heads:
        raise ValueError(f"the positions have biases for {bias.size(-1)} heads, but the attention has {heads}.")
    return bias
