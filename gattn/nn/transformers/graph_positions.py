"""Biases that depend on positions in sequences, for the edges of a graph.

Dimensions: N targets, M sources, E edges, H heads, B blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gattn.bias import Bias, DistanceBias
from gattn.graphs import Graph
from gattn.nn.transformers.positional import RelativePosition
from gattn.torch_private import is_exporting

__all__ = ["with_positions"]


def with_positions(
    bias: Tensor | None, position: RelativePosition, graph: Graph, heads: int, device: torch.device
) -> Tensor | Bias:
    """A bias and that of positions: `[E, H]`; on a complete graph one for each distance, or a tensor of all pairs.

    Args:
        bias: What is added, in the form that users of the graph give it.
        position: The positions.
        graph: The graph, whose sizes are known.
        heads: H.
        device: Where to make them.

    Raises:
        ValueError: If the positions were made for another number of heads.
    """
    if bias is None and graph.is_dense and not graph.is_sharded and not is_exporting():
        assert graph.num_sources is not None
        assert graph.num_targets is not None
        blocks = graph.blocks or ((graph.num_targets, graph.num_sources),)
        first, last = -max([m for _, m in blocks]), max([n for n, _ in blocks])
        return DistanceBias(_for_heads(position(torch.arange(first, last, device=device)), heads), first)
    more = _for_heads(position(graph.distances(device)), heads).movedim(-1, graph.heads_dim)
    return more if bias is None else bias + more


def _for_heads(bias: Tensor, heads: int) -> Tensor:
    if bias.size(-1) != heads:
        raise ValueError(f"the positions have biases for {bias.size(-1)} heads, but the attention has {heads}.")
    return bias
