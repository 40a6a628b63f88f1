"""Positions in sequences, for the targets and sources of a graph.

Dimensions: N targets, M sources, E edges, H heads, B blocks.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from gattn.graphs import Graph
from gattn.nn.positional import RelativePosition


def row_positions(graph: Graph, side: Literal["target", "source"], first: int, x: Tensor) -> Tensor:
    """The position of each row of `[..., T, H, C]` in its sequence, where row 0 is at `first`.

    In a packed graph each block is a sequence of its own, whose last target stands where its last source does.
    """
    if graph.blocks is not None:
        is_target = side == "target"
        pieces = [
            torch.arange(num_targets, device=x.device) + (num_sources - num_targets)
            if is_target
            else torch.arange(num_sources, device=x.device)
            for num_targets, num_sources in graph.blocks
        ]
        return torch.cat(pieces) if pieces else torch.arange(0, device=x.device)
    return torch.arange(first, first + x.size(-3), device=x.device)


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
