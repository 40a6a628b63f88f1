"""`explore`: attention as one HTML file to click through."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from gattn.visualize.explorer import nodes as node_sets
from gattn.visualize.explorer.build import build
from gattn.visualize.explorer.encoding import packed, packed_indices, quantised
from gattn.visualize.explorer.layers import Layer, as_layers, run
from gattn.visualize.graphs import Positions, edges_towards
from gattn.visualize.inputs import ArrayLike
from gattn.visualize.style import COLOURS

__all__ = ["Exploration", "explore"]

_MAX_NUMBERS = 12_000_000  # about 32 MB as a file, which browsers still open quickly


class Exploration:
    """An explorer page, which shows itself in a notebook.

    Args:
        html: The page.
        path: Where it was written, if anywhere. (default: `None`)

    Example:
        >>> import torch
        >>> from gattn.visualize import Exploration, explore
        >>> explorer = explore(torch.eye(3), path=None)
        >>> isinstance(explorer, Exploration), explorer.path
        (True, None)
    """

    def __init__(self, html: str, path: Path | None = None):
        self.html = html
        self.path = path

    def save(self, path: str | Path) -> Path:
        """Writes the page to a file, and returns its path.

        Args:
            path: The file.
        """
        self.path = Path(path)
        self.path.write_text(self.html, encoding="utf-8")
        return self.path

    def __repr__(self) -> str:
        return f"Exploration({len(self.html) / 1e6:.1f} MB, path={None if self.path is None else str(self.path)!r})"

    def _repr_html_(self) -> str:
        """The page as a frame that may run its own scripts, but cannot reach the notebook around it."""
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" sandbox="allow-scripts" title="Attention explorer" '
            'width="100%" height="760" style="border: 0"></iframe>'
        )


def explore(
    model_or_records: Any,
    *inputs: Any,
    labels: Any = None,
    classes: ArrayLike | None = None,
    tokens: Any = None,
    edge_labels: Mapping[tuple[int, int], Any] | Sequence[Any] | None = None,
    pos: Positions | None = None,
    node: int | None = None,
    hops: int | None = None,
    element: int = 0,
    title: str = "Attention explorer",
    path: str | Path | None = "attention.html",
) -> Exploration:
    r"""Writes attention weights into one HTML file in which they can be looked at and clicked through.

    The page shows the weights of any layer and head on the graph (on sequences, as arcs over the tokens) and as a
    matrix. Clicking a node lists its neighbours by weight beside uniform attention, with the entropy of the weights.
    The page also computes `rollout`, and the attribution of
    `GAtt <https://arxiv.org/abs/2406.04612>`_: every edge :math:`j \to i` gets the products of the weights along all
    paths from it to the node v in the computation tree of v,

    .. math::
        \Phi^v_{ji} = \sum_{m=1}^{L} \big(A_L \cdots A_{m+1}\big)_{vi} \, (A_m)_{ij},
        \qquad A_l = \frac{1}{H} \sum_h \alpha_{lh}

    The file needs no network and no other file, and forbids itself to load any. Graphs of up to 3 000 nodes and 15 000
    edges are drawn as a whole, larger ones around the selected node. Weights are stored in steps of 1 / 65 535 of the
    largest weight of their layer.

    Args:
        model_or_records: A model, which is run on `inputs` in evaluation mode; the records of
            `gattn.record_attention`, or those of one layer; `(edge_index, weights)`, as PyG's layers return them;
            weights of a complete graph, `[N, M]` or `[H, N, M]`; or several of these, in a list or by name.
        *inputs: The inputs of the model. With an `edge_index` in front, its weights: `explore(edge_index, weights)`.
        labels: The names of the N nodes. If sources and targets are different nodes, such as the tokens of two
            sequences, a tuple of two lists. (default: `None`, numbers)
        classes: The class of each node, `[N]`, which determines its colour and shape. (default: `None`)
        tokens: Like `labels`, for nodes that are tokens: the graph is drawn as arcs over a line. (default: `None`;
            complete graphs are drawn in this way, too)
        edge_labels: The names of edges, by `(source, target)` or in the order of the layer's edges. (default: `None`)
        pos: The positions of the nodes: `[N, 2]`, or what a layout of networkx returns. (default: `None`, a layout that
            places neighbours close together)
        node: The node that is selected at first. (default: `None`, one with a few neighbours and uneven weights)
        hops: Keeps only what reaches `node` within this many hops, for graphs that are too large for one file.
            (default: `None`, everything)
        element: Which element of a batch to explore, or which block of a packed graph. (default: `0`)
        title: The title of the page. (default: `"Attention explorer"`)
        path: The file to write. (default: `"attention.html"`; `None` writes no file)

    Returns:
        An `Exploration` with the `html` and its `path`. As the last expression of a notebook's cell, it is shown.

    Raises:
        TypeError: If the first argument is none of the above.
        ValueError: If no weights were recorded, weights, labels, classes, positions or edge labels do not fit the
            graph, or the graph is too large for one file.
        IndexError: If there is no such node or element of the batch.

    Example:
        >>> import gattn
        >>> from torch_geometric.datasets import KarateClub
        >>> from gattn.visualize import explore
        >>> data = KarateClub()[0]
        >>> model = gattn.models.GAT(34, 16, num_layers=2, out_channels=4, heads=4)
        >>> explorer = explore(model, data.x, data.edge_index, classes=data.y, title="Karate club", path=None)
        >>> "<title>Karate club</title>" in explorer.html
        True
    """
    if labels is not None and tokens is not None:
        raise ValueError("labels and tokens both name the nodes: pass tokens for a sequence, labels otherwise.")
    if hops is not None and node is None:
        raise ValueError(f"hops={hops} keeps the surroundings of a node: say of which one, with node=.")
    given = model_or_records
    if isinstance(given, Module):
        given = run(given, inputs)
    elif len(inputs) == 1:
        given = (given, *inputs)
    elif inputs:
        raise TypeError(f"explore takes inputs for a model only, and weights after an edge_index; got {len(inputs)}.")
    layers, batch_size = as_layers(given, element)
    given_names, argument = (labels, "labels") if tokens is None else (tokens, "tokens")
    sets = node_sets.node_sets(layers, given_names, tokens is not None)
    spaces = list(dict.fromkeys(sets))
    names = node_sets.names(given_names, spaces, argument)
    class_names, class_numbers = node_sets.class_numbers(classes, spaces)
    coordinates = node_sets.coordinates(pos, spaces)
    kept = None if hops is None or node is None else _surroundings(layers, sets, int(node), hops)
    named = [None if edge_labels is None else node_sets.edge_names(edge_labels, layer) for layer in layers]
    if edge_labels is not None and not any(x is not None for x in named):
        raise ValueError(
            f"edge_labels must have one entry for each of the {layers[0].edges.size(1)} edges of a layer, self-loops "
            f"that it added included; got {len(edge_labels)}. Or map pairs of nodes to labels: {{(source, target): "
            "label}."
        )
    if kept is not None:
        nodes, masks, node = kept
        spaces = [space._replace(num_sources=len(nodes), num_targets=len(nodes)) for space in spaces]
        sets = spaces * len(layers)
        numbers = nodes.tolist()
        given = names[0]
        names = [[str(i) for i in numbers] if given is None else [given[i] for i in numbers]]
        class_numbers = None if class_numbers is None else [class_numbers[i] for i in numbers]
        coordinates = None if coordinates is None else coordinates[nodes]
        position = torch.zeros(int(nodes.max()) + 1, dtype=torch.int64)
        position[nodes] = torch.arange(len(nodes))
        named = [
            None if x is None else [x[i] for i in mask.nonzero().flatten().tolist()]
            for x, mask in zip(named, masks, strict=True)
        ]
        layers = [
            layer._replace(
                edges=position[layer.edges[:, mask]],
                weights=layer.weights[mask],
                num_sources=len(nodes),
                num_targets=len(nodes),
            )
            for layer, mask in zip(layers, masks, strict=True)
        ]
    numbers_stored = sum(layer.weights.numel() + 2 * layer.edges.size(1) for layer in layers)
    if numbers_stored > _MAX_NUMBERS:
        raise ValueError(
            f"{numbers_stored:,} weights and edges are too many for one page of at most {_MAX_NUMBERS:,}: keep what "
            "reaches one node (node=..., hops=2), or fewer layers."
        )
    graphs: list[dict[str, Any]] = []
    by_graph: list[tuple[node_sets.Nodes, Layer, list[str] | None]] = []
    stored_layers = []
    for layer, nodes_of, edge_names in zip(layers, sets, named, strict=True):
        number = next((i for i, x in enumerate(by_graph) if _same_graph(x, (nodes_of, layer, edge_names))), None)
        if number is None:
            number = len(by_graph)
            by_graph.append((nodes_of, layer, edge_names))
            graphs.append(_stored_graph(layer, nodes_of, spaces.index(nodes_of), edge_names))
        weights = quantised(layer.weights)
        stored_layers.append({"name": layer.name, "graph": number, "heads": layer.weights.size(1), **weights})
    stored_spaces = []
    for space, name in zip(spaces, names, strict=True):
        layer = layers[sets.index(space)]
        start = node_sets.instructive_target(layer)
        if node is not None and space == sets[0]:
            start = int(node)
            if not 0 <= start < space.num_targets:
                raise IndexError(f"there is no node {node}: the graph has {space.num_targets}, from 0.")
        fits = space.is_shared and class_numbers is not None and len(class_numbers) == space.size
        placed = space.is_shared and coordinates is not None and coordinates.size(0) == space.size
        stored_spaces.append(
            {
                "sources": space.num_sources,
                "targets": space.num_targets,
                "shared": space.is_shared,
                "sequence": space.is_sequence,
                "start": start + space.first_target,
                "names": name,
                "classes": packed(class_numbers, "u2") if fits else None,
                "pos": packed(coordinates.numpy(), "f4") if placed and coordinates is not None else None,
            }
        )
    data = {
        "title": title,
        "colours": COLOURS,
        "classes": class_names,
        "batch": {"element": element, "size": batch_size},
        "hops": hops,
        "spaces": stored_spaces,
        "graphs": graphs,
        "layers": stored_layers,
    }
    exploration = Exploration(build(title, data))
    if path is not None:
        exploration.save(path)
    return exploration


def _surroundings(
    layers: Sequence[Layer], sets: Sequence[node_sets.Nodes], node: int, hops: int
) -> tuple[Tensor, list[Tensor], int]:
    """Returns the nodes that reach a node, which edges of each layer are kept, and the new number of the node."""
    if len(set(sets)) > 1 or not sets[0].is_shared:
        raise ValueError("hops= needs layers whose sources and targets are the same nodes: explore such layers only.")
    num_nodes = sets[0].size
    together = torch.cat([layer.edges for layer in layers], 1)
    reached = edges_towards(together, num_nodes, node, hops)
    nodes = torch.unique(torch.cat([torch.tensor([node]), together[:, reached].flatten()]))
    masks = list(torch.split(reached, [layer.edges.size(1) for layer in layers]))
    return nodes, masks, int((nodes == node).nonzero())


def _same_graph(one: tuple[Any, Layer, Any], other: tuple[Any, Layer, Any]) -> bool:
    return one[0] == other[0] and one[2] == other[2] and torch.equal(one[1].edges, other[1].edges)


def _stored_graph(layer: Layer, nodes: node_sets.Nodes, space: int, edge_names: list[str] | None) -> dict[str, Any]:
    source, target = layer.edges
    stored: dict[str, Any] = {
        "space": space,
        "source": packed_indices(source.numpy()),
        "target": packed_indices((target + nodes.first_target).numpy()),
        "names": None,
    }
    if edge_names is not None:
        words, index = node_sets.vocabulary(edge_names)
        stored["names"] = {"words": words, "index": packed_indices(index)}
    return stored
