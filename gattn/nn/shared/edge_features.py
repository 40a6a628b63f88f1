"""The edge features that layers are given, checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from gattn.errors import InputError, InputTypeError
from gattn.graphs import Graph
from gattn.nn.shared.dtypes import check_dtype
from gattn.settings import require_finite

__all__ = ["checked_factors", "checked_features", "with_features"]


def checked_features(
    layer: Module,
    graph: Graph,
    edge_attr: Any,
    channels: int,
    batch: tuple[int, ...],
    fill_value: Any = "mean",
    hides: bool = False,
) -> tuple[Graph, Tensor]:
    """The graph and its edge features `[..., E, D]`, either those given or the vectors that a sparse adjacency holds.

    Args:
        layer: The layer that projects them.
        graph: The graph, with known sizes.
        edge_attr: `[E, D]`, `[E]` for a single feature, or with the batch dimensions in front; or `None`.
        channels: D; -1 allows any.
        batch: The batch dimensions of the nodes' features.
        fill_value: See `Graph.with_features`. (default: `"mean"`)
        hides: See `SparseGraph.with_features`. (default: `False`)

    Raises:
        TypeError: If `edge_attr` is not a tensor.
        ValueError: If it does not fit.
    """
    if edge_attr is not None:
        if not isinstance(edge_attr, Tensor):
            raise InputTypeError(f"edge_attr must be a tensor; got {type(edge_attr).__name__}.")
        if not edge_attr.is_floating_point():
            raise InputError(f"edge_attr must be of a floating-point type; got {edge_attr.dtype}: use .float().")
        edge_attr = edge_attr.view(-1, 1) if edge_attr.dim() < 2 else edge_attr
        if edge_attr.shape[:-2] not in ((), batch):
            raise InputError(
                "edge_attr must have shape [E, D], or [E] for a single feature"
                f"{f', possibly with the batch dimensions of x, {list(batch)}, in front' if batch else ''}; got "
                f"{list(edge_attr.shape)}."
            )
        require_finite(edge_attr=edge_attr)
        edge_attr = edge_attr.movedim(-2, 0) if batch else edge_attr
    graph, edge_attr = graph.with_features(edge_attr, fill_value, hides)
    if edge_attr is None:
        raise InputError(
            f"this layer was made for edge features of {channels} channels, so it needs edge_attr, [E, {channels}] "
            "(the single values of a sparse adjacency are edge weights, not features)."
        )
    if channels > 0 and edge_attr.size(-1) != channels:
        raise InputError(
            f"edge_attr has {edge_attr.size(-1)} channels, but this layer was made for edge features of {channels}."
        )
    check_dtype(layer, edge_attr=edge_attr)
    return graph, edge_attr.movedim(0, -2) if batch else edge_attr


def checked_factors(edge_weight: Any, graph: Graph) -> Tensor:
    """Factors of attention weights `[E, 1]`, one per edge of the graph, whose self-loops get ones.

    Raises:
        TypeError: If `edge_weight` is not a tensor.
        ValueError: If it does not hold one factor per edge, or one is not finite while `gattn.check_finite` looks.
    """
    if not isinstance(edge_weight, Tensor):
        raise InputTypeError(f"edge_weight must be a tensor; got {type(edge_weight).__name__}.")
    if edge_weight.is_complex():
        raise InputTypeError(f"edge_weight must hold real numbers; got {edge_weight.dtype}.")
    if edge_weight.dim() != 1:
        raise InputError(f"edge_weight must have one factor per edge, [E]; got {list(edge_weight.shape)}.")
    require_finite(edge_weight=edge_weight)
    if not graph.self_loops and len(edge_weight) != graph.num_edges:
        raise InputError(
            f"edge_weight must have one factor per edge, [{graph.num_edges}]; got {list(edge_weight.shape)}."
        )
    try:
        factors = graph.with_features(edge_weight.unsqueeze(-1), 1.0)[1]
    except (InputError, NotImplementedError) as error:  # it speaks of edge_attr
        text = str(error).replace("edge_attr", "edge_weight").replace("edge features", "edge weights")
        raise type(error)(text) from error
    assert factors is not None
    return factors


def with_features(x: Tensor, edge_attr: Tensor) -> Tensor:
    """The vectors of edges `[..., E, F]` followed by the edges' features `[E, D]` or `[..., E, D]`."""
    return torch.cat([x, edge_attr.expand(*x.shape[:-1], -1)], -1)
