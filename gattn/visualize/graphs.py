"""Attention weights on their graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import matplotlib.pyplot as plt
import networkx as nx
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.transforms import IdentityTransform
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.utils import coalesce

from gattn.errors import check_at_least, check_integers
from gattn.graphs import GraphLike
from gattn.visualize.inputs import ArrayLike, Recorded, Weights, edge_weights, edges_within, select_head, unpack
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
_MAX_LAYOUT = 1000  # and the other one minutes
_MAX_LEGEND = 24
_SHAPES = "os^DvPpX<h>*"
_RIM_GAP = 1.2  # between a node and the ring of its self-loop, in points


def attention_graph(
    edge_index: GraphLike | Recorded,
    weights: Weights | None = None,
    *,
    head: int | str | None = None,
    call: int = -1,
    element: int | None = None,
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

    A self-loop is drawn as a ring around its node. Parallel edges are drawn as one arrow with the sum of their weights.

    Args:
        edge_index: The graph that the weights belong to, including self-loops, as layers return it: `[2, E]`, a sparse
            adjacency or a `SparseGraph`. Or what `gattn.record_attention` gathered of one layer, without `weights`.
        weights: `[E]`, or `[E, H]` with `head`. (default: `None`, those of the record)
        head: The number of a head, or `"mean"` for the mean over heads. It can be left out if there is only one head.
            (default: `None`)
        call: Which call of a recorded layer to draw. (default: `-1`, the last one)
        element: Which element of a batch to draw. (default: `None`, the only one)
        node: Draws only the ego network of this node, that is the edges through which messages reach it. The node
            itself is drawn larger. (default: `None`, the whole graph)
        hops: The radius of the ego network: the largest number of edges on a path to the node. (default: `1`)
        classes: The class of each node, `[N]`, which determines its colour, and its shape where there are more classes
            than colours. (default: `None`)
        labels: The names of the N nodes. Long ones end in an ellipsis. (default: `None`, numbers if they can be read)
        pos: The positions of the nodes: `[N, 2]`, or what a layout of networkx returns. (default: `None`, a layout that
            places neighbours close together)
        ax: The axes to draw into. (default: `None`, a new figure)
        title: The title of the axes. (default: `None`)
        max_nodes: The largest number of nodes that is drawn. (default: `150`)
        maximum: The weight of the widest and darkest arrow. (default: `None`, the largest weight)
        colorbar: Whether to show the scale of colours. (default: `None`, in a new figure only)

    Returns:
        The axes.

    Raises:
        ValueError: If weights and graph do not fit each other, or the graph is too large to draw.
        IndexError: If there is no such head, node, call or element.

    Example:
        >>> import gattn
        >>> from torch_geometric.datasets import KarateClub
        >>> from gattn.visualize import attention_graph
        >>> data = KarateClub()[0]
        >>> conv = gattn.nn.GATConv(34, 8, heads=4)
        >>> _, (edge_index, weights) = conv(data.x, data.edge_index, return_attention_weights=True)
        >>> ax = attention_graph(edge_index, weights, head=0, classes=data.y, node=0)
    """
    if node is not None:
        check_integers(node=node)
        node = int(node)  # it may be a tensor, such as the result of argmax()
    edge_index, weights = _unpacked(edge_index, weights, call, element)
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
    rims = dict(zip(edges[0, loops].tolist(), zip(widths[loops], colours[loops], strict=True), strict=True))
    draw_edges(graph, coordinates, edges[:, ~loops], widths[~loops], colours[~loops], rims, node, ax)
    draw_nodes(graph, coordinates, *class_colours(graph, classes, ax), rims, node, labels, ax)
    add_title_and_colorbar(ax, title, ScalarMappable(scale, EDGES) if colorbar else None, WEIGHT_LABEL)
    return ax


def _unpacked(edge_index: Any, weights: Any, call: int, element: int | None) -> tuple[GraphLike, ArrayLike]:
    """The graph and its weights, which a record holds both."""
    if weights is None:
        recorded, graph = unpack(edge_index, call=call, element=element)
        if recorded is edge_index:
            raise ValueError("weights are missing: pass those of the graph's edges, or what record_attention gathered.")
        if graph is None:
            raise ValueError(
                "the layer attended between all nodes, on a CompleteGraph: draw its weights with attention_matrix or "
                "attention_arcs."
            )
        return graph, recorded
    weights, graph = unpack(weights, edge_index, call=call, element=element)
    return cast(GraphLike, graph), weights


def edges_towards(edges: Tensor, num_nodes: int, node: int | None, hops: int) -> Tensor:
    """Marks the edges through which messages reach a node within this many hops, `[E]`; without a node, all edges."""
    if node is None:
        return torch.ones(edges.size(1), dtype=torch.bool)
    if not 0 <= node < num_nodes:
        raise IndexError(f"there is no node {node}: the graph has {num_nodes}, from 0 to {num_nodes - 1}.")
    check_at_least(1, hops=hops)
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
    if edges.size(1) > _MAX_EDGES_PER_NODE * min(max_nodes, _MAX_LAYOUT):
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
        if len(graph) > _MAX_LAYOUT:
            raise ValueError(
                f"to place {len(graph)} nodes would take minutes; at most {_MAX_LAYOUT} are placed: draw the ego "
                "network of one node (node=..., hops=1), or say where nodes are (pos=...)."
            )
        return _layout(nx.Graph(graph), node)
    if isinstance(pos, Mapping):
        missing = [node for node in graph if node not in pos]
        if missing:
            raise ValueError(f"pos must have an entry for every node, but does not say where node {missing[0]} is.")
        return {node: pos[node] for node in graph}
    coordinates = torch.as_tensor(pos).double()
    if coordinates.dim() != 2 or coordinates.size(1) != 2:
        raise ValueError(f"pos is [N, 2], or a mapping from nodes to positions; got {list(coordinates.shape)}.")
    return {node: coordinates[node].tolist() for node in graph}


def shared_layout(
    graphs: Sequence[GraphLike], *, node: int | None = None, hops: int = 1, max_nodes: int = 150, **others: Any
) -> tuple[list[Tensor], Mapping[int, Any]]:
    """Marks the edges of each layer that panels of a grid show, and returns the position of each node in all panels."""
    if node is not None:
        check_integers(node=node)
        node = int(node)
    per_node = {name: others.get(name) for name in ("classes", "labels")}
    layers = [edges_within(graph, **per_node) for graph in graphs]
    num_nodes = max(count for _, count in layers)
    drawn = [edges_towards(edges, num_nodes, node, hops) for edges, _ in layers]
    every = coalesce(torch.cat([edges[:, mask] for (edges, _), mask in zip(layers, drawn, strict=True)], 1))
    return drawn, positions(drawable(every, num_nodes, node, max_nodes), others.get("pos"), node)


def _shrinkage(ax: Axes) -> float:
    """How much smaller nodes and names are in axes that have only a part of a figure."""
    spec = ax.get_subplotspec()
    rows, columns = (1, 1) if spec is None else spec.get_gridspec().get_geometry()
    width, height = cast(Figure, ax.get_figure(root=True)).get_size_inches()
    return float(min(1.0, max(0.4, min(width / columns, height / rows) / 4.2)))


def _node_sizes(graph: nx.DiGraph, node: int | None, ax: Axes) -> list[float]:
    usual = 260.0 if len(graph) <= 40 else 150.0 if len(graph) <= _MAX_NAMED_NODES else 50.0
    usual *= _shrinkage(ax) ** 2
    return [2.5 * usual if other == node else usual for other in graph]


class Arrows(PolyCollection):
    """Curved arrows between round nodes: one artist for all of them, since thousands of patches take a minute.

    Args:
        ends: The positions of sources and targets, `[E, 2, 2]`, in the units of the axes.
        radii: How far from these positions arrows start and end, `[E, 2]`, in points.
        widths: In points, `[E]`.
        colours: The colour of each arrow, or one for all.
    """

    def __init__(self, ends: NDArray[Any], radii: NDArray[Any], widths: NDArray[Any], colours: Any):
        super().__init__([], facecolors=colours, edgecolors="none", transform=IdentityTransform(), zorder=1)
        self.ends, self.radii, self.widths = ends, radii, widths
        self.set_in_layout(False)  # nodes and their names are what needs room

    def draw(self, renderer: Any) -> None:
        """Draws the arrows, whose shapes depend on the size of the axes."""
        self.set_verts(list(self.outlines()))
        super().draw(renderer)

    def outlines(self) -> NDArray[Any]:
        """The corners of each arrow on the canvas, `[E, P, 2]`."""
        point = self.figure.dpi / 72.0
        ends = cast(Axes, self.axes).transData.transform(self.ends.reshape(-1, 2)).reshape(-1, 2, 2)
        span = ends[:, 1] - ends[:, 0]
        length = np.hypot(*span.T).clip(1e-9)
        # Curves leave to one side of the straight line, which keeps the two directions apart.
        middle = ends.mean(1) + 0.1 * np.stack([span[:, 1], -span[:, 0]], 1)
        head = np.minimum((4.0 + 1.5 * self.widths) * point, 0.5 * length)
        start, stop = self.radii[:, 0] * point / length, 1.0 - (self.radii[:, 1] * point) / length
        stop = np.maximum(stop, start + 1e-3)
        neck = np.maximum(stop - head / length, start)
        along = start[:, None] + (neck - start)[:, None] * np.linspace(0.0, 1.0, 12)
        line, tip = (_bezier(ends, middle, t) for t in (along, stop[:, None]))
        tangent = np.gradient(np.concatenate([line, tip], 1), axis=1)[:, :-1]
        normal = np.stack([-tangent[..., 1], tangent[..., 0]], -1)
        normal /= np.linalg.norm(normal, axis=-1, keepdims=True).clip(1e-9)
        half = 0.5 * self.widths[:, None, None] * point * normal
        wing = 0.35 * head[:, None, None] * normal[:, -1:] + half[:, -1:]
        left, right = line + half, line - half
        return np.concatenate([left, line[:, -1:] + wing, tip, line[:, -1:] - wing, right[:, ::-1]], 1)


def _bezier(ends: NDArray[Any], middle: NDArray[Any], t: NDArray[Any]) -> NDArray[Any]:
    """Points on quadratic curves, `[E, P, 2]`."""
    t = t[..., None]
    curve: NDArray[Any] = (1 - t) ** 2 * ends[:, :1] + 2 * t * (1 - t) * middle[:, None] + t**2 * ends[:, 1:]
    return curve


def draw_edges(
    graph: nx.DiGraph,
    coordinates: Any,
    edges: Tensor,
    widths: Any,
    colours: Any,
    rims: Mapping[int, tuple[Any, Any]],
    node: int | None,
    ax: Axes,
) -> None:
    """Draws edges as arrows of these widths and colours."""
    radius = {
        other: 0.5 * size**0.5 + (_RIM_GAP + rims[other][0] if other in rims else 0.0)
        for other, size in zip(graph, _node_sizes(graph, node, ax), strict=True)
    }
    pairs = edges.t().tolist()
    ends = np.array([[coordinates[source], coordinates[target]] for source, target in pairs]).reshape(-1, 2, 2)
    radii = np.array([[radius[source], radius[target] + 1.0] for source, target in pairs]).reshape(-1, 2)
    ax.add_collection(Arrows(ends, radii, np.broadcast_to(widths, len(pairs)), colours), autolim=False)


def draw_nodes(
    graph: nx.DiGraph,
    coordinates: Any,
    colours: Any,
    shapes: Sequence[str],
    rims: Mapping[int, tuple[Any, Any]],
    node: int | None,
    labels: Sequence[Any] | None,
    ax: Axes,
) -> None:
    """Draws nodes with their names; `rims` holds the width and colour of each self-loop."""
    sizes = np.array(_node_sizes(graph, node, ax))
    places = np.array([coordinates[other] for other in graph], dtype=float).reshape(-1, 2)
    looped = [place for place, other in enumerate(graph) if other in rims]
    if looped:  # behind the nodes, so that white keeps the ring apart from any colour
        rings, ring_colours = zip(*(rims[other] for other in graph if other in rims), strict=True)
        diameter = np.sqrt(sizes[looped]) + 2 * _RIM_GAP + np.array(rings)
        ax.scatter(
            places[looped, 0],
            places[looped, 1],
            s=diameter**2,
            c="white",
            edgecolors=ring_colours,
            linewidths=rings,
            zorder=2,
            label="_rims",
        )
    for shape in dict.fromkeys(shapes):
        those = [place for place, other in enumerate(shapes) if other == shape]
        ax.scatter(
            places[those, 0],
            places[those, 1],
            s=sizes[those],
            c=[colours[place] for place in those],
            marker=shape,
            linewidths=0.4,
            edgecolors="#606060",
            zorder=3,
        )
    for side in ax.spines.values():
        side.set_visible(False)
    ax.set_xticks([])
    ax.set_yticks([])
    ax.set_aspect("equal", adjustable="datalim")
    ax.margins(0.08)
    if labels is None and len(graph) > _MAX_NAMED_NODES:
        return
    names = printable(graph if labels is None else map(as_list(labels).__getitem__, graph))
    font = max(6.5, 7.0 * _shrinkage(ax))
    # All names or none are inside of the nodes, whose sizes are in square points.
    is_inside = all(0.7 * font * len(name) <= min(sizes) ** 0.5 for name in names)
    for place, name, colour, size in zip(places, names, colours, sizes, strict=True):
        red, green, blue = to_rgb(colour)
        is_dark = is_inside and 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
        ax.annotate(
            name,
            tuple(place),
            xytext=(0, 0 if is_inside else -3 - size**0.5 / 2),
            textcoords="offset points",
            ha="center",
            va="center" if is_inside else "top",
            fontsize=font,
            color="white" if is_dark else "black",
            parse_math=False,
            path_effects=[] if is_inside else [withStroke(linewidth=2.0, foreground="white")],
            zorder=4,
        )


def class_colours(graph: nx.DiGraph, classes: ArrayLike | None, ax: Axes) -> tuple[list[str], list[str]]:
    """Returns the colour and the shape of each node, and adds a legend of the classes."""
    if classes is None:
        return ["#D8D8D8"] * len(graph), [_SHAPES[0]] * len(graph)
    values = as_list(classes)
    looks = {
        value: (COLOURS[number % len(COLOURS)], _SHAPES[number // len(COLOURS) % len(_SHAPES)])
        for number, value in enumerate(sorted(set(values)))
    }
    there = {values[node] for node in graph}
    shown = [value for value in looks if value in there]
    handles = [
        Line2D([], [], marker=looks[value][1], linestyle="", color=looks[value][0]) for value in shown[:_MAX_LEGEND]
    ]
    names = printable(value if isinstance(value, str) else f"class {value}" for value in shown[:_MAX_LEGEND])
    if len(shown) > _MAX_LEGEND:
        handles.append(Line2D([], [], linestyle=""))
        names.append(f"and {len(shown) - _MAX_LEGEND} more classes")
    ax.legend(handles, names, loc="upper center", bbox_to_anchor=(0.5, 0.0), **legend_style(len(names)))
    colours, shapes = zip(*(looks[values[node]] for node in graph), strict=True)
    return list(colours), list(shapes)
