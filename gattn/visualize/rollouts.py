"""Attention through all layers of a model: rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from scipy.sparse import csr_array
from torch import Tensor
from torch_geometric.utils import coalesce, scatter

from gattn.errors import check_integers
from gattn.graphs import GraphLike
from gattn.visualize.graphs import (
    Positions,
    check_size,
    draw_edges,
    draw_nodes,
    drawable,
    edges_towards,
    graph_size,
    positions,
)
from gattn.visualize.inputs import (
    Layers,
    complete_weights,
    edge_weights,
    edges_within,
    unpacked_layers,
)
from gattn.visualize.matrices import draw_matrix
from gattn.visualize.style import SHARE_LABEL, WEIGHTS, add_title_and_colorbar, colour_scale

__all__ = ["attention_rollout", "rollout"]


def rollout(
    weights_by_layer: Layers,
    edge_index: GraphLike | None = None,
    *,
    residual: float = 0.5,
    call: int = -1,
    element: int | None = None,
) -> Tensor:
    r"""Computes how large a share each input has in each output, through the attention of all layers.

    The method of `Quantifying Attention Flow in Transformers <https://arxiv.org/abs/2005.00928>`_ averages the heads of
    each layer, mixes in its skip connection, and multiplies the layers:

    .. math::
        R = A_L \cdots A_1, \qquad A_l = r I + (1 - r) \frac{1}{H} \sum_h \alpha_{lh}

    Rows of weights are first divided by their sums. A node without neighbours keeps its own input.

    Args:
        weights_by_layer: The weights of each layer, first to last, in a list or by name: `[N, N]` or `[H, N, N]`, or
            with `edge_index` `[E]` or `[E, H]`. Or what `gattn.record_attention` gathered.
        edge_index: The graph of all layers, as in `attention_graph`. (default: `None`, a complete graph; recorded
            weights know their graph)
        residual: The share r of the skip connections. (default: `0.5`)
        call: Which call of each recorded layer to take. (default: `-1`, the last one)
        element: Which element of a batch to take. (default: `None`, the only one)

    Returns:
        The matrix R in float64, `[N, N]`, with one row per output. With `edge_index` it is sparse.

    Raises:
        ValueError: If there is no layer, weights and graph do not fit each other, sources and targets are different
            nodes, or `residual` is not between 0 and 1.
        IndexError: If there is no such call or element.

    Example:
        >>> import torch
        >>> from gattn.visualize import rollout
        >>> rollout([torch.tensor([[1.0, 0.0], [1.0, 0.0]])] * 2)
        tensor([[1.0000, 0.0000],
                [0.7500, 0.2500]], dtype=torch.float64)
    """
    if not 0.0 <= residual <= 1.0:
        raise ValueError(f"residual is the share of the skip connections and must be between 0 and 1; got {residual}.")
    layers = unpacked_layers(weights_by_layer, edge_index, call=call, element=element)
    is_complete = any(graph is None for _, graph in layers.values())
    steps: list[Any]
    if is_complete:
        matrices = {name: complete_weights(weights).mean(0) for name, (weights, _) in layers.items()}
        sizes = {tuple(matrix.shape) for matrix in matrices.values()}
        if len(sizes) > 1 or len(set(*sizes)) > 1:
            raise ValueError(
                f"the weights of all layers in a rollout must be [H, N, N], all of one size; got {sorted(sizes)}."
            )
        eye = torch.eye(sizes.pop()[0], dtype=torch.double)
        steps = [residual * eye + (1.0 - residual) * _stochastic(matrix, eye) for matrix in matrices.values()]
    else:
        steps = []
        for weights, graph in layers.values():
            edges, num_nodes = edges_within(cast(GraphLike, graph))
            steps.append(_sparse_step(edges, edge_weights(weights, edges).mean(1), num_nodes, residual))
        if len({step.shape for step in steps}) > 1:
            raise ValueError("the graphs of all layers in a rollout must have the same nodes.")
    result: Any = steps[0]
    for step in steps[1:]:
        result = step @ result
    if is_complete:
        dense: Tensor = result
        return dense
    result = result.tocoo()
    index, values = torch.from_numpy(np.stack([result.row, result.col])), torch.from_numpy(result.data)
    return torch.sparse_coo_tensor(index, values, result.shape, check_invariants=True).coalesce()


def attention_rollout(
    weights_by_layer: Layers,
    edge_index: GraphLike | None = None,
    *,
    node: int | None = None,
    residual: float = 0.5,
    call: int = -1,
    element: int | None = None,
    labels: Sequence[Any] | None = None,
    pos: Positions | None = None,
    ax: Axes | None = None,
    title: str | None = None,
    max_nodes: int = 150,
    maximum: float | None = None,
    colorbar: bool | None = None,
) -> Axes:
    """Draws a `rollout`, that is from which inputs each output stems, through the attention of all layers.

    Args:
        weights_by_layer: The weights of each layer, first to last, as in `rollout`.
        edge_index: The graph of all layers, as in `attention_graph`. (default: `None`, a complete graph, or that of the
            records)
        node: Draws the ego network of this node, in which each node has the colour of its share in the output of this
            one. This needs a graph. (default: `None`, a matrix)
        residual: The share of the skip connections, as in `rollout`. (default: `0.5`)
        call: Which call of each recorded layer to draw. (default: `-1`, the last one)
        element: Which element of a batch to draw. (default: `None`, the only one)
        labels: The names of the N nodes. (default: `None`, numbers)
        pos: The positions of the nodes, as in `attention_graph`. (default: `None`)
        ax: The axes to draw into. (default: `None`, a new figure)
        title: The title of the axes. (default: `None`)
        max_nodes: The largest number of nodes that is drawn. (default: `150`)
        maximum: The share that gets the darkest colour. (default: `None`, the largest share)
        colorbar: Whether to show the scale of colours. (default: `None`, in a new figure only)

    Returns:
        The axes.

    Raises:
        ValueError: If weights and graph do not fit each other, or the graph is too large to draw.
        IndexError: If there is no such node, call or element.

    Example:
        >>> import torch, gattn
        >>> from gattn.visualize import attention_rollout
        >>> tokens = ["attention", "is", "message", "passing"]
        >>> layers = torch.randn(3, 2, 4, 4).softmax(-1)  # 3 layers of 2 heads
        >>> ax = attention_rollout(layers, labels=tokens)
    """
    layers = unpacked_layers(weights_by_layer, edge_index, call=call, element=element)
    graphs = [graph for _, graph in layers.values() if graph is not None]
    if node is not None and not graphs:
        raise ValueError(
            "node= goes with a graph, so it needs edge_index=; in a matrix, look at the row of the node instead."
        )
    shares = rollout(weights_by_layer, edge_index, residual=residual, call=call, element=element)
    if node is None:
        if graphs:
            check_size(shares.size(0), max_nodes)
        return draw_matrix(shares.to_dense(), labels, labels, ax, title, maximum, colorbar, SHARE_LABEL)
    check_integers(node=node)
    node = int(node)
    edges = torch.cat([edges_within(graph, labels=labels, pos=pos)[0] for graph in graphs], 1)
    num_nodes = shares.size(0)
    drawn = edges_towards(edges, num_nodes, node, len(layers))
    graph = drawable(coalesce(edges[:, drawn], num_nodes=num_nodes), num_nodes, node, max_nodes)
    coordinates = positions(graph, pos, node)
    colorbar = ax is None if colorbar is None else colorbar
    if ax is None:
        _, ax = plt.subplots(figsize=graph_size(graph, colorbar), layout="constrained")
    share = shares.select(0, node).to_dense()[list(graph)]
    scale = colour_scale(share, maximum)
    others = torch.tensor([edge for edge in graph.edges if edge[0] != edge[1]]).view(-1, 2)
    draw_edges(graph, coordinates, others.t(), 0.6, "#C8C8C8", {}, node, ax)
    draw_nodes(graph, coordinates, WEIGHTS(scale(share.numpy())), ["o"] * len(graph), {}, node, labels, ax)
    add_title_and_colorbar(ax, title, ScalarMappable(scale, WEIGHTS) if colorbar else None, SHARE_LABEL)
    return ax


def _stochastic(matrix: Tensor, eye: Tensor) -> Tensor:
    """Divides each row by its sum, and replaces rows of zeros by those of the identity."""
    total = matrix.sum(1, keepdim=True)
    return torch.where(total > 0, matrix / total, eye)


def _sparse_step(edges: Tensor, alpha: Tensor, num_nodes: int, residual: float) -> Any:
    """Returns one layer of a rollout as SciPy's matrix, since PyTorch warns that its sparse matrices are in beta."""
    total = scatter(alpha, edges[1], 0, num_nodes, reduce="sum")
    alpha = (1.0 - residual) * torch.where(total[edges[1]] > 0, alpha / total[edges[1]], 0.0)
    loops = torch.where(total > 0, residual, 1.0)
    rows, columns = torch.cat([edges.flip(0), torch.arange(num_nodes).expand(2, -1)], 1).numpy()
    return csr_array((torch.cat([alpha, loops]).numpy(), (rows, columns)), shape=(num_nodes, num_nodes))
