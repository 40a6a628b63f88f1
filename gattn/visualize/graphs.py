"""Attention weights on their graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import matplotlib.pyplot as plt
import networkx as nx
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from torch import Tensor
from torch_geometric.utils import coalesce

from gattn.graphs import GraphLike
from gattn.visualize.inputs import ArrayLike, edge_weights, edges_within, select_head
from gattn.visualize.style import (
    COLOURS,
    EDGES,
    WEIGHT_LABEL,
    add_title_and_colorbar,
    as_list,
    colour_scale,
    legend_style,
    printable,
)

__all__ = [
    "Positions",
    "attention_graph",
    "check_size",
    "draw_edges",
    "draw_nodes",
    "drawable",
    "edges_towards",
    "graph_size",
    "positions",
    "shared_layout",
]

#: Where nodes are: `[N, 2]`, or what a layout of networkx returns.
Positions: TypeAlias = ArrayLike | Mapping[int, Any]

_MAX_NAMED_NODES = 60
_MAX_EDGES_PER_NODE = 30
_MAX_KAMADA_KAWAI = 200  # this layout takes seconds for more nodes


def attention_graph(
    edge_index: GraphLike,
    weights: ArrayLike,
    *,
    head: int | str | None = None,
    node: int | None = None,
    hops: int = 1,
    classes: ArrayLike | None = None,
    labels: Sequence[Any] | None = None,
    pos: Positions | None = None,
    ax: Axes | None = None,
    title: str | None = None,
    max_nodes: int = 150,
    maximum: float | None = None,
    colorbar: bool | None = None,
) -> Axes:
    """Draws weights on their graph: each edge is an arrow from source to target, wider and darker for larger weights.

    A self-loop is drawn as the rim of its node. Parallel edges are drawn as one arrow with the sum of their weights.

    Args:
        edge_index: The graph that the weights belong to, including self-loops, as layers return it: `[2, E]`, a sparse
            adjacency or a `SparseGraph`.
        weights: `[E]`, or `[E, H]` with `head`.
        head: The number of a head, or `"mean"` for the mean over heads. It can be left out if there is only one head.
            (default: `None`)
        node: Draws only the ego network of this node, that is the edges through which messages reach it. The node
            itself is drawn larger. (default: `None`, the whole graph)
        hops: The radius of the ego network: the largest number of edges on a path to the node. (default: `1`)
        classes: The class of each node, `[N]`, which determines its colour. (default: `None`)
        labels: The names of the N nodes. (default: `None`, numbers if they can be read)
        pos: The positions of the nodes: `[N, 2]`, or what a layout of networkx returns. (default: `None`, a layout that
            places neighbours close together)
        ax: The axes to draw into. (default: `None`, a new figure)
        title: The title of the axes. (default: `None`)
        max_nodes: The largest number of nodes that is drawn. (default: `150`)
        maximum: The weight of the widest and darkest arrow. (default: `None`, the largest weight)
        colorbar: Whether to show the scale of colours. (default: `None`, in a new figure only)

    Raises:
        ValueError: If weights and graph do not fit each other, or the graph is too large to draw.
        IndexError: If there is no such head or node.

    Returns:
        The axes.

    Example:
        >>> import gattn
        >>> from torch_geometric.datasets import KarateClub
        >>> from gattn.visualize import attention_graph
        >>> data = KarateClub()[0]
        >>> conv = gattn.nn.GATConv(34, 8, heads=4)
        >>> _, (edge_index, weights) = conv(data.x, data.edge_index, return_attention_weights=True)
        >>> ax = attention_graph(edge_index, weights, head=0, classes=data.y, node=0)
    """
    node = None if node is None else int(node)  # it may be a tensor, such as the result of argmax()
    edges, num_nodes = edges_within(edge_index, classes=classes, labels=labels, pos=pos)
    alpha = select_head(edge_weights(weights, edges), head, 1)
    drawn = edges_towards(edges, num_nodes, node, hops)
    edges, alpha = coalesce(edges[:, drawn], alpha[drawn], num_nodes=num_nodes, reduce="sum")
    order = alpha.argsort()  # the largest are drawn last, on top of the others
    edges, alpha = edges[:, order], alpha[order]
    graph = drawable(edges, num_nodes, node, max_nodes)
    coordinates = positions(graph, pos, node)
    colorbar = ax is None if colorbar is None else colorbar
    if ax is None:
        _, ax = plt.subplots(figsize=graph_size(graph, colorbar), layout="constrained")
    scale = colour_scale(alpha, maximum)
    widths, colours = 0.4 + 3.6 * scale(alpha.numpy()).clip(0.0, 1.0), EDGES(scale(alpha.numpy()))
    loops = (edges[0] == edges[1]).numpy()
    draw_edges(graph, coordinates, edges[:, ~loops], widths[~loops], colours[~loops], node, ax)
    rims = dict(zip(edges[0, loops].tolist(), zip(widths[loops], colours[loops], strict=True), strict=True))
    draw_nodes(graph, coordinates, class_colours(graph, classes, ax), rims, node, labels, ax)
    add_title_and_colorbar(ax, title, ScalarMappable(scale, EDGES) if colorbar else None, WEIGHT_LABEL)
    return ax


def edges_towards(edges: Tensor, num_nodes: int, node: int | None, hops: int) -> Tensor:
    """Marks the edges through which messages reach a node within this many hops, `[E]`; without a node, all edges."""
    if node is None:
        return torch.ones(edges.size(1), dtype=torch.bool)
    if not 0 <= node < num_nodes:
        raise IndexError(f"there is no node {node}: the graph has {num_nodes}, from 0 to {num_nodes - 1}.")
    if hops < 1:
        raise ValueError(f"hops must be at least 1; got {hops}.")
    source, target = edges
    reached = torch.zeros(num_nodes, dtype=torch.bool)
    reached[node] = True
    for _ in range(hops):
        drawn = reached[target]
        reached[source[drawn]] = True
    return drawn


def drawable(edges: Tensor, num_nodes: int, node: int | None, max_nodes: int) -> nx.DiGraph:
    """Returns the graph for networkx, if it is small enough to be drawn."""
    nodes = range(num_nodes) if node is None else sorted({node, *edges.flatten().tolist()})
    check_size(len(nodes), max_nodes)
    if edges.size(1) > _MAX_EDGES_PER_NODE * max_nodes:
        raise ValueError(
            f"{edges.size(1)} arrows could not be told apart: draw the ego network of one node (node=), or draw the "
            "weights as a matrix (attention_matrix)."
        )
    graph = nx.DiGraph()
    graph.add_nodes_from(nodes)
    graph.add_edges_from(edges.t().tolist())
    return graph


def check_size(count: int, max_nodes: int) -> None:
    """Raises an error if a picture would have too many nodes."""
    if count > max_nodes:
        raise ValueError(
            f"the picture would have {count} nodes, but max_nodes={max_nodes}: draw the ego network of one node "
            "(node=..., hops=1), or raise max_nodes."
        )


def graph_size(graph: nx.DiGraph, colorbar: bool) -> tuple[float, float]:
    """The size of a new figure in inches."""
    side = 4.2 if len(graph) <= 30 else 6.0
    return side + 0.8 * colorbar, side


def _layout(graph: nx.Graph, node: int | None) -> Mapping[int, Any]:
    """Places neighbours close together, or in a circle around one node if there are no other nodes."""
    layout: Mapping[int, Any]
    if node is not None and len(graph) == len({node, *graph[node]}) > 1:
        layout = nx.shell_layout(graph, [[node], [other for other in graph if other != node]])
    elif len(graph) > _MAX_KAMADA_KAWAI:
        layout = nx.spring_layout(graph, seed=0)
    else:
        steps = dict(nx.all_pairs_shortest_path_length(graph))
        far = 1 + max(max(others.values()) for others in steps.values())
        layout = nx.kamada_kawai_layout(graph, {a: {b: steps[a].get(b, far) for b in graph} for a in graph})
    return layout


def positions(graph: nx.DiGraph, pos: Positions | None, node: int | None) -> Mapping[int, Any]:
    """The position of each node."""
    if pos is None:
        return _layout(nx.Graph(graph), node)
    if isinstance(pos, Mapping):
        missing = [node for node in graph if node not in pos]
        if missing:
            raise ValueError(f"pos must have an entry for every node, but says not where node {missing[0]} is.")
        return {node: pos[node] for node in graph}
    coordinates = torch.as_tensor(pos).double()
    if coordinates.dim() != 2 or coordinates.size(1) != 2:
        raise ValueError(f"pos is [N, 2], or a mapping from nodes to positions; got {list(coordinates.shape)}.")
    return {node: coordinates[node].tolist() for node in graph}


def shared_layout(
    edge_index: GraphLike, *, node: int | None = None, hops: int = 1, max_nodes: int = 150, **others: Any
) -> tuple[Tensor, Mapping[int, Any]]:
    """Marks the edges that all panels of a grid show, and returns the position of each node in them."""
    node = None if node is None else int(node)
    edges, num_nodes = edges_within(edge_index, classes=others.get("classes"), labels=others.get("labels"))
    drawn = edges_towards(edges, num_nodes, node, hops)
    graph = drawable(edges[:, drawn], num_nodes, node, max_nodes)
    return drawn, positions(graph, others.get("pos"), node)


def _node_sizes(graph: nx.DiGraph, node: int | None) -> list[float]:
    usual = 260.0 if len(graph) <= 40 else 150.0 if len(graph) <= _MAX_NAMED_NODES else 50.0
    return [2.5 * usual if other == node else usual for other in graph]


def draw_edges(
    graph: nx.DiGraph, coordinates: Any, edges: Tensor, widths: Any, colours: Any, node: int | None, ax: Axes
) -> None:
    """Draws edges as arrows of these widths and colours."""
    nx.draw_networkx_edges(
        graph,
        coordinates,
        edgelist=[tuple(edge) for edge in edges.t().tolist()],
        width=widths,
        edge_color=colours,
        nodelist=list(graph),
        node_size=_node_sizes(graph, node),
        arrows=True,
        arrowsize=8,
        connectionstyle="arc3,rad=0.1",  # keeps the two directions apart
        ax=ax,
    )


def draw_nodes(
    graph: nx.DiGraph,
    coordinates: Any,
    colours: Any,
    rims: Mapping[int, tuple[Any, Any]],
    node: int | None,
    labels: Sequence[Any] | None,
    ax: Axes,
) -> None:
    """Draws nodes with their names; `rims` holds the width and colour of each self-loop."""
    nx.draw_networkx_nodes(
        graph,
        coordinates,
        node_color=colours,
        node_size=_node_sizes(graph, node),
        linewidths=[rims.get(other, (0.4, ""))[0] for other in graph],
        edgecolors=[rims.get(other, (0.4, "#808080"))[1] for other in graph],
        ax=ax,
    )
    for side in ax.spines.values():
        side.set_visible(False)
    ax.set_aspect("equal", adjustable="datalim")
    ax.margins(0.08)
    if labels is None and len(graph) > _MAX_NAMED_NODES:
        return
    given = None if labels is None else as_list(labels)
    names = {other: str(other) if given is None else printable(given[other]) for other in graph}
    for (other, name), colour, size in zip(names.items(), colours, _node_sizes(graph, node), strict=True):
        is_inside = 5 * len(name) <= size**0.5  # the size is in square points
        red, green, blue = to_rgb(colour)
        is_dark = is_inside and 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
        ax.annotate(
            name,
            coordinates[other],
            xytext=(0, 0 if is_inside else -1 - size**0.5 / 2),
            textcoords="offset points",
            ha="center",
            va="center" if is_inside else "top",
            fontsize=7,
            color="white" if is_dark else "black",
            parse_math=False,
            path_effects=[] if is_inside else [withStroke(linewidth=2.0, foreground="white")],
        )


def class_colours(graph: nx.DiGraph, classes: ArrayLike | None, ax: Axes) -> list[str]:
    """Returns the colour of each node, and adds a legend of the classes."""
    if classes is None:
        return ["#D8D8D8"] * len(graph)
    values = as_list(classes)
    present = sorted(set(values))
    if len(present) > len(COLOURS):
        raise ValueError(
            f"{len(present)} classes cannot be told apart by colour, only {len(COLOURS)} can: merge some of them."
        )
    palette = dict(zip(present, COLOURS, strict=False))
    shown = [value for value in present if value in {values[node] for node in graph}]
    handles = [Line2D([], [], marker="o", linestyle="", color=palette[value]) for value in shown]
    names = [value if isinstance(value, str) else f"class {value}" for value in shown]
    ax.legend(handles, names, loc="upper center", bbox_to_anchor=(0.5, 0.0), **legend_style(names))
    return [palette[values[node]] for node in graph]
