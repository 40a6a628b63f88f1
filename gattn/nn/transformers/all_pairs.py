"""What layers that attend among all nodes share: the forms in which they take their nodes.

Dimensions: B graphs, N nodes, F channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gattn.errors import InputError, InputTypeError, check_at_least
from gattn.graphs import CompleteGraph, Graph

__all__ = ["check_heads", "check_whole", "num_nodes", "on_graph", "without_padding"]


def on_graph(x: Tensor, mask: Tensor | None, graph: CompleteGraph | None) -> tuple[Tensor, CompleteGraph]:
    """The features, with zeros in place of padding, and the graph on which a layer attends.

    Args:
        x: The features, `[..., N, F]`.
        mask: Which nodes of a padded batch exist, `[B, N]`.
        graph: The graph that was given, such as a packed one.

    Raises:
        TypeError: If an argument is of another type.
        ValueError: If shapes do not fit each other, or both `mask` and `graph` are given.
    """
    if not isinstance(x, Tensor):
        raise InputTypeError(f"x must be a tensor; got {type(x).__name__}.")
    if x.dim() < 2:
        raise InputError(f"x must be features [B, N, F], or [N, F] for one graph; got {list(x.shape)}.")
    if mask is not None:
        if graph is not None:
            raise InputError("mask is for padded batches, and graph for others: give one of them.")
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            raise InputTypeError("mask must be a tensor of booleans, true for the nodes that exist.")
        if mask.shape != x.shape[:-1]:
            raise InputError(f"mask must be {list(x.shape[:-1])}, one entry per node of x; got {list(mask.shape)}.")
        x = x.masked_fill(~mask.unsqueeze(-1), 0.0)  # zero times NaN is NaN, in gradients of projections too
    if graph is None:
        return x, CompleteGraph(x.size(-2))
    if not isinstance(graph, CompleteGraph):
        raise InputTypeError(f"graph must be a CompleteGraph, such as a packed one; got {type(graph).__name__}.")
    return x, graph


def without_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """Keys or values `[B, N, H, C]` with zeros in place of padding, which sums of their products then leave out."""
    return x if mask is None else x.masked_fill(~mask[..., None, None], 0.0)


def num_nodes(x: Tensor, mask: Tensor | None, graph: CompleteGraph) -> Tensor:
    """The number of nodes of each node's graph, `[..., N or 1]`, in the type of `x`."""
    if mask is not None:
        return mask.sum(-1, keepdim=True).to(x)
    if graph.blocks is not None:
        block, num_blocks = graph.block_of_each("source", x.device)
        return block.new_zeros(num_blocks).index_add(0, block, torch.ones_like(block)).index_select(0, block).to(x)
    count = graph.num_all_sources
    assert count is not None  # complete graphs have sizes
    return x.new_full((1,), count)


def check_heads(channels: int, heads: int, head_channels: int | None) -> int:
    """Checks the sizes of a layer; returns the number of channels of each head."""
    check_at_least(1, channels=channels, heads=heads)
    if channels % heads != 0:
        raise InputError(f"channels must be a multiple of heads; got {channels} channels and {heads} heads.")
    if head_channels is None:
        return channels // heads
    check_at_least(1, head_channels=head_channels)
    return head_channels


def check_whole(module: torch.nn.Module, edge_index: Any) -> None:
    """Raises `ValueError` if the edges beside attention among all nodes are those of a part of the graph."""
    if isinstance(edge_index, Graph) and edge_index.is_sharded:
        raise InputError(f"{type(module).__name__} also attends over all nodes, so it does not take sharded graphs.")
