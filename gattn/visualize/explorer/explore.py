"""`explore`: attention as one HTML file to click through."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.nn import Module

from gattn.errors import check_integers
from gattn.visualize.explorer import nodes as node_sets
from gattn.visualize.explorer.build import build
from gattn.visualize.explorer.content import Content
from gattn.visualize.explorer.layers import as_layers, is_edges, is_text, read, run
from gattn.visualize.graphs import Positions
from gattn.visualize.inputs import ArrayLike
from gattn.visualize.style import COLOURS

__all__ = ["Exploration", "explore"]


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
        """The page as a frame that may run its own scripts and save files, but cannot reach the notebook around it."""
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" sandbox="allow-scripts allow-downloads" '
            'title="Attention explorer" width="100%" height="760" style="border: 0"></iframe>'
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
    matrix, and all heads at a glance as small matrices. It saves either picture as SVG or PNG. Clicking a node lists
    its neighbours by weight beside uniform attention, with the entropy of the weights. The page also computes
    `rollout`, and the attribution of `GAtt <https://arxiv.org/abs/2406.04612>`_: every edge :math:`j \to i` gets the
    products of the weights along all paths from it to the node v in the computation tree of v,

    .. math::
        \Phi^v_{ji} = \sum_{m=1}^{L} \big(A_L \cdots A_{m+1}\big)_{vi} \, (A_m)_{ij},
        \qquad A_l = \frac{1}{H} \sum_h \alpha_{lh}

    The file needs no network and no other file, and forbids itself to load any. Graphs of up to 3 000 nodes and 15 000
    edges are drawn as a whole, larger ones around the selected node. Weights are stored in steps of 1 / 65 535 of the
    largest weight of their layer.

    Args:
        model_or_records: A model, which is run on `inputs` in evaluation mode; the records of
            `gattn.record_attention`, or those of one layer; `(edge_index, weights)`, as PyG's layers return them;
            weights of a complete graph, `[N, M]` or `[H, N, M]`; or several of these, in a list or by name. An
            `HGTConv` records no types: given the model itself, the page names its nodes and edges by their types.
        *inputs: The inputs of the model. With an `edge_index` in front, its weights: `explore(edge_index, weights)`.
            For a model of `transformers` that runs on gattn (`gattn.huggingface`), its tokenizer and a text:
            `explore(model, tokenizer, "text")`, which also names the tokens.
        labels: The names of the N nodes. If sources and targets are different nodes, such as the tokens of two
            sequences, a tuple of two lists. (default: `None`, numbers, with the type where nodes have types)
        classes: The class of each node, `[N]`, which determines its colour and shape. (default: `None`, its type if
            nodes have types)
        tokens: Like `labels`, for nodes that are tokens: the graph is drawn as arcs over a line. (default: `None`;
            complete graphs are drawn in this way, too)
        edge_labels: The names of edges, by `(source, target)` or in the order of the layer's edges. (default: `None`,
            their types if they have some)
        pos: The positions of the nodes: `[N, 2]`, or what a layout of networkx returns. (default: `None`, a layout that
            places neighbours close together)
        node: The node that is selected at first. (default: `None`, one with a few neighbours and uneven weights)
        hops: Keeps only what reaches `node` within this many hops, for graphs that are too large for one file.
            (default: `None`, everything)
        element: Which element of a batch to explore, or which block of a packed graph. (default: `0`)
        title: The title of the page. (default: `"Attention explorer"`)
        path: The file to write; a line of output says where it is. (default: `"attention.html"`; `None` writes no file,
            and prints nothing)

    Returns:
        An `Exploration` with the `html` and its `path`. As the last expression of a notebook's cell, it is shown.

    Raises:
        TypeError: If the first argument is none of the above, weights are not numbers, or `node`, `hops` or `element`
            is not an integer.
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
    check_integers(element=element, node=0 if node is None else node)
    if hops is not None and node is None:
        raise ValueError(f"hops={hops} keeps the surroundings of a node: say of which one, with node=.")
    given = model_or_records
    if isinstance(given, Module) and is_text(inputs):
        given, words = read(given, *inputs)
        tokens = words if tokens is None and labels is None else tokens
    elif isinstance(given, Module):
        given = run(given, inputs)
    elif len(inputs) == 1:
        if not is_edges(given):
            raise TypeError(
                "before weights, explore takes their edge_index, integers [2, E], or another graph; got "
                f"{getattr(given, 'dtype', type(given).__name__)}."
            )
        given = (given, *inputs)
    elif inputs:
        raise TypeError(f"explore takes inputs for a model only, and weights after an edge_index; got {len(inputs)}.")
    layers, batch_size = as_layers(given, element)
    given_names, argument = (labels, "labels") if tokens is None else (tokens, "tokens")
    sets = node_sets.node_sets(layers, given_names, tokens is not None)
    spaces = list(dict.fromkeys(sets))
    class_names, class_numbers = node_sets.class_numbers(classes, spaces)
    content = Content(
        layers,
        sets,
        dict(zip(spaces, node_sets.names(given_names, spaces, argument), strict=True)),
        class_numbers,
        node_sets.coordinates(pos, spaces),
        node_sets.edge_names(edge_labels, layers),
        None if node is None else int(node),
    )
    if hops is not None and node is not None:
        content = content.around(int(node), hops)
    data = {
        "title": title,
        "colours": COLOURS,
        "classes": class_names,
        "batch": {"element": element, "size": batch_size},
        "hops": hops,
        **content.stored(),
    }
    exploration = Exploration(build(title, data))
    if path is not None:
        print(f"wrote {exploration.save(path).resolve()}")
    return exploration
