"""Attention as pictures: on a graph, as a matrix, head by head, and across layers.

Weights come as gattn's layers give them: `[E, H]` beside an `edge_index`, or `[H, N, M]` of a complete graph;
`gattn.record_attention` gathers those of a whole model. Every function draws into `ax`, or a new figure, and returns
the axes. One scale of blue stands for weights everywhere, and Okabe and Ito's colours, which colour-blind readers can
tell apart, for classes and heads.

Example:
    >>> import torch
    >>> from gattn.visualize import attention_matrix
    >>> attention_matrix(torch.eye(3), ["the", "cat", "sat"], title="Everybody sees itself").get_title()
    'Everybody sees itself'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

try:
    import matplotlib.pyplot as plt
    import networkx as nx
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize, to_rgb
    from matplotlib.lines import Line2D
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError('gattn.visualize draws with matplotlib and networkx: pip install "gattn[notebooks]"') from error

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor
from torch_geometric.utils import coalesce, scatter

from gattn.graphs import FLOWS, CompleteGraph, as_graph

#: Okabe and Ito's palette, for classes and heads.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#F0E442", "#999999")

#: From no weight to the largest; lightness falls all the way, so that it reads in grey, too.
WEIGHTS = LinearSegmentedColormap.from_list("gattn_weights", ["#F7FAFC", "#B5D3E7", "#5BA3CF", "#0072B2", "#003A5C"])

#: The same, but it begins with a blue that shows as a line.
EDGES = LinearSegmentedColormap.from_list("gattn_edges", WEIGHTS([0.2, 0.4, 0.6, 0.8, 1.0]))

#: What scales of colours are labelled with.
_WEIGHT, _PART = "attention weight α", "part in the output"

_MAX_LABELS = 80
_MAX_NAMED_NODES = 60
_MAX_EDGES_PER_NODE = 30
_MAX_KAMADA_KAWAI = 200
"""Its layout takes seconds beyond that."""
_MAX_PANELS = 150
_MAX_HEADS = 24


# Pictures ------------------------------------------------------------------------------------------------------------


def attention_matrix(
    weights: Any,
    row_labels: Sequence[Any] | None = None,
    column_labels: Sequence[Any] | None = None,
    *,
    head: int | str | None = None,
    ax: Axes | None = None,
    title: str | None = None,
    maximum: float | None = None,
    colorbar: bool | None = None,
) -> Axes:
    """Draws weights as a matrix: a row for each target, a column for each source.

    Args:
        weights: `[N, M]`, or `[H, N, M]` with `head`.
        row_labels: N names, such as tokens. (default: `None`, numbers)
        column_labels: M names. (default: `None`, numbers)
        head: Which head, or `"mean"` for the mean over heads; not needed for a single one. (default: `None`)
        ax: Where to draw. (default: `None`, a new figure)
        title: Title of the axes. (default: `None`)
        maximum: The weight of the darkest colour. (default: `None`, the largest)
        colorbar: Whether the scale of colours is shown. (default: `None`, in a new figure only)

    Raises:
        ValueError: If shapes and labels don't fit, or there are too many labels to read.
        IndexError: If there is no such head.

    Example:
        >>> import torch, gattn
        >>> from gattn.visualize import attention_matrix
        >>> attention = gattn.nn.MultiheadAttention(8, 2)
        >>> x = torch.randn(4, 8)
        >>> _, weights = attention(x, x, x, average_attn_weights=False)
        >>> tokens = ["attention", "is", "message", "passing"]
        >>> ax = attention_matrix(weights, tokens, tokens, head=0)
    """
    matrix = _of_head(_matrices(weights), head, 0)
    return _draw_matrix(matrix, row_labels, column_labels, ax, title, maximum, colorbar, _WEIGHT)


def attention_graph(
    edge_index: Any,
    weights: Any,
    *,
    head: int | str | None = None,
    node: int | None = None,
    hops: int = 1,
    classes: Any = None,
    labels: Sequence[Any] | None = None,
    pos: Any = None,
    ax: Axes | None = None,
    title: str | None = None,
    max_nodes: int = 150,
    maximum: float | None = None,
    colorbar: bool | None = None,
) -> Axes:
    """Draws weights on their graph: an arrow from source to target, the wider and darker the larger its weight.

    A self-loop is the rim of its node. Parallel edges are one arrow, with the sum of their weights.

    Args:
        edge_index: The graph that the weights belong to, self-loops included, as layers return it: `[2, E]`, a sparse
            adjacency or a `SparseGraph`.
        weights: `[E]`, or `[E, H]` with `head`.
        head: Which head, or `"mean"` for the mean over heads; not needed for a single one. (default: `None`)
        node: Draws this node's ego network, with the node itself larger: the edges through which it hears from
            others. (default: `None`, the whole graph)
        hops: From how far. (default: `1`)
        classes: The class of each node, `[N]`, which gives it its colour. (default: `None`)
        labels: N names. (default: `None`, numbers, as long as they can be read)
        pos: Where nodes are: `[N, 2]`, or what a layout of networkx returns. (default: `None`, neighbours close
            together)
        ax: Where to draw. (default: `None`, a new figure)
        title: Title of the axes. (default: `None`)
        max_nodes: A graph with more nodes is not drawn. (default: `150`)
        maximum: The weight of the widest and darkest arrow. (default: `None`, the largest)
        colorbar: Whether the scale of colours is shown. (default: `None`, in a new figure only)

    Raises:
        ValueError: If weights and graph don't fit each other, or the graph is too large to draw.
        IndexError: If there is no such head or node.

    Example:
        >>> import gattn
        >>> from torch_geometric.datasets import KarateClub
        >>> from gattn.visualize import attention_graph
        >>> data = KarateClub()[0]
        >>> conv = gattn.nn.GATConv(34, 8, heads=4)
        >>> _, (edge_index, weights) = conv(data.x, data.edge_index, return_attention_weights=True)
        >>> ax = attention_graph(edge_index, weights, head=0, classes=data.y, node=0)
    """
    node = None if node is None else int(node)  # it may be what argmax() gave
    edges, num_nodes = _one_kind_of_nodes(edge_index, classes=classes, labels=labels, pos=pos)
    alpha = _of_head(_edge_weights(weights, edges), head, 1)
    drawn = _reached(edges, num_nodes, node, hops)
    edges, alpha = coalesce(edges[:, drawn], alpha[drawn], num_nodes=num_nodes, reduce="sum")
    order = alpha.argsort()  # the largest come last, on top of others
    edges, alpha = edges[:, order], alpha[order]
    graph = _drawable(edges, num_nodes, node, max_nodes)
    places = _places(graph, pos, node)
    colorbar = ax is None if colorbar is None else colorbar
    if ax is None:
        _, ax = plt.subplots(figsize=_graph_size(graph, colorbar), layout="constrained")
    scale = _scale(alpha, maximum)
    widths, colours = 0.4 + 3.6 * scale(alpha.numpy()).clip(0.0, 1.0), EDGES(scale(alpha.numpy()))
    loops = (edges[0] == edges[1]).numpy()
    _draw_edges(graph, places, edges[:, ~loops], widths[~loops], colours[~loops], node, ax)
    rims = dict(zip(edges[0, loops].tolist(), zip(widths[loops], colours[loops], strict=True), strict=True))
    _draw_nodes(graph, places, _class_colours(graph, classes, ax), rims, node, labels, ax)
    _finish(ax, title, ScalarMappable(scale, EDGES) if colorbar else None, _WEIGHT)
    return ax


def attention_grid(
    weights_by_layer: Mapping[str, Any] | Sequence[Any],
    edge_index: Any = None,
    *,
    title: str | None = None,
    **kwargs: Any,
) -> Any:
    """Draws all heads of all layers with one scale of colours: a row for each layer, a column for each head.

    Args:
        weights_by_layer: The weights of each layer, in a list or by name: `[H, N, M]`, or `[E, H]` with `edge_index`.
        edge_index: The graph of all layers, as in `attention_graph`. (default: `None`, matrices)
        title: Title of the figure. (default: `None`)
        **kwargs: Further arguments of `attention_matrix` (such as `row_labels`) or `attention_graph` (such as `node`).

    Returns:
        An array of axes, `[layers, heads]`; where a layer has fewer heads than others, the rest is not visible.

    Raises:
        ValueError: If there is no layer, or there are too many panels; and whatever a single panel raises.

    Example:
        >>> import torch, gattn
        >>> from gattn.visualize import attention_grid
        >>> model = gattn.models.TransformerLM(num_tokens=10, channels=16, num_layers=2, heads=4).eval()
        >>> with gattn.record_attention(model) as records:
        ...     logits = model(torch.zeros(1, 5, dtype=torch.int64))
        >>> attention_grid({name: calls[0].weights[0] for name, calls in records.items()}).shape
        (2, 4)
    """
    layers = _layers(weights_by_layer)
    drawn: Tensor | None = None
    if edge_index is None:
        heads = {name: list(_matrices(weights)) for name, weights in layers.items()}
        named = max(len(kwargs.get(name) or ()) for name in ("row_labels", "column_labels"))
        side = max(1.5, 0.16 * named)
    else:
        edges, _ = _edges(edge_index)
        heads = {name: list(_edge_weights(weights, edges).unbind(1)) for name, weights in layers.items()}
        drawn, places = _common(edge_index, **kwargs)
        kwargs = {"pos": places} | kwargs
        side = 2.4
    columns = max(map(len, heads.values()))
    if len(heads) * columns > _MAX_PANELS:
        raise ValueError(
            f"{len(heads)} layers of up to {columns} heads would be more than {_MAX_PANELS} panels: choose some layers."
        )
    everywhere = [x if drawn is None else x[drawn] for panels in heads.values() for x in panels]
    largest = max((float(weights.max()) for weights in everywhere if weights.numel()), default=0.0)
    kwargs = {"maximum": largest or 1.0, "colorbar": False} | kwargs
    size = (side * columns + 1.6, side * len(heads) + 0.6)
    figure, axes = plt.subplots(len(heads), columns, figsize=size, squeeze=False, layout="constrained")
    legend = None
    for row, (name, panels) in enumerate(heads.items()):
        for column, ax in enumerate(axes[row]):
            if column >= len(panels):
                ax.set_visible(False)
                continue
            if edge_index is None:
                attention_matrix(panels[column], ax=ax, title=f"head {column}", **kwargs)
                is_last = all(len(below) <= column for below in list(heads.values())[row + 1 :])
                ax.tick_params(labelbottom=is_last, labelleft=column == 0)
                ax.set_xlabel("source" if is_last else "")
            else:
                attention_graph(edge_index, panels[column], ax=ax, title=f"head {column}", **kwargs)
                legend = ax.get_legend()
                if legend is not None:
                    legend.remove()
            ax.set_ylabel("\n".join(wrap(name, 24)) if column == 0 else "", fontsize=9)
    colours = WEIGHTS if edge_index is None else EDGES
    if legend is not None:  # one for all panels
        names = [text.get_text() for text in legend.get_texts()]
        figure.legend(legend.legend_handles, names, loc="outside lower center", **_legend_style(names))
    scale = Normalize(0.0, kwargs["maximum"])
    _add_colorbar(ScalarMappable(scale, colours), figure, axes, _WEIGHT)
    if title is not None:
        figure.suptitle(title, fontsize=10)
    return axes


def attention_entropy(
    weights: Any,
    edge_index: Any = None,
    *,
    head: int | str | None = None,
    ax: Axes | None = None,
    title: str | None = None,
) -> Axes:
    """Draws whether heads choose: a histogram of each head's entropies, target by target, before that of uniform ones.

    A head that weighs all neighbours alike covers the grey histogram; one that picks a single neighbour lies at zero.
    Targets with fewer than two neighbours have no choice and are left out.

    Args:
        weights: `[N, M]` or `[H, N, M]`; with `edge_index` `[E]` or `[E, H]`.
        edge_index: The graph that the weights belong to, as in `attention_graph`. (default: `None`, a complete one)
        head: Draws this head only, or the `"mean"` of all. (default: `None`, each of them)
        ax: Where to draw. (default: `None`, a new figure)
        title: Title of the axes. (default: `None`)

    Raises:
        ValueError: If weights and graph don't fit each other, no target has a choice, or there are too many heads.
        IndexError: If there is no such head.

    Example:
        >>> import torch, gattn
        >>> from gattn.testing import random_edge_index
        >>> from gattn.visualize import attention_entropy
        >>> edge_index = random_edge_index(50, num_edges=300)
        >>> conv = gattn.nn.GATv2Conv(4, 8, heads=2)
        >>> _, (edge_index, weights) = conv(torch.randn(50, 4), edge_index, return_attention_weights=True)
        >>> ax = attention_entropy(weights, edge_index)
    """
    if edge_index is None:
        weights, dim = _matrices(weights), 0
    else:
        weights, dim = _edge_weights(weights, _edges(edge_index)[0]), 1
    names = [f"head {number}" for number in range(weights.size(dim))]
    if head is not None:
        names = ["mean of heads" if head == "mean" else f"head {head}"]
        weights = _of_head(weights, head, dim).unsqueeze(dim)
    if len(names) > _MAX_HEADS:
        raise ValueError(f"{len(names)} heads are too many for one picture ({_MAX_HEADS} are not): choose one, head=0.")
    nats, uniform = entropy(weights, edge_index)
    nats = nats if dim == 0 else nats.t()
    has_choice = uniform > 0
    if not bool(has_choice.any()):
        raise ValueError("no target has two neighbours to choose from, so there is no choice to draw.")
    if ax is None:
        _, ax = plt.subplots(figsize=(5.6, 1.0 + 0.5 * len(names)), layout="constrained")
    edges = np.linspace(0.0, 1.02 * float(uniform.max()), 33)
    counts = [np.histogram(values[has_choice].numpy(), edges)[0] for values in (uniform, *nats)]
    for row, count in enumerate(counts[1:]):
        for heights, colour in ((counts[0], "#C8C8C8"), (count, COLOURS[0])):
            ax.stairs(row - 0.85 * heights / heights.max(), edges, baseline=row, fill=True, color=colour, alpha=0.85)
        ax.axhline(row, color="black", linewidth=0.5)
    ax.set_ylim(len(names) - 0.95, -1.0)  # the first head is on top
    ax.set_yticks(range(len(names)), names)
    ax.set_xlim(0.0, edges[-1])
    ax.set_xlabel("entropy of a target's weights, nats", fontsize=9)
    ax.tick_params(labelsize=8)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in (COLOURS[0], "#C8C8C8")]
    ax.legend(handles, ["attention", "uniform"], loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    _finish(ax, title, None)
    return ax


def attention_rollout(
    weights_by_layer: Mapping[str, Any] | Sequence[Any],
    edge_index: Any = None,
    *,
    node: int | None = None,
    residual: float = 0.5,
    labels: Sequence[Any] | None = None,
    pos: Any = None,
    ax: Axes | None = None,
    title: str | None = None,
    max_nodes: int = 150,
    maximum: float | None = None,
    colorbar: bool | None = None,
) -> Axes:
    """Draws a `rollout`: from which inputs each target's output stems, through all layers.

    Args:
        weights_by_layer: As in `rollout`.
        edge_index: Likewise. (default: `None`, a complete graph)
        node: On a graph, draws the ego network of this node, and colours each node by its part in this one's output.
            (default: `None`, a matrix)
        residual: As in `rollout`. (default: `0.5`)
        labels: N names. (default: `None`, numbers)
        pos: As in `attention_graph`. (default: `None`)
        ax: Where to draw. (default: `None`, a new figure)
        title: Title of the axes. (default: `None`)
        max_nodes: A graph with more nodes is not drawn. (default: `150`)
        maximum: The part of the darkest colour. (default: `None`, the largest)
        colorbar: Whether the scale of colours is shown. (default: `None`, in a new figure only)

    Raises:
        ValueError: If weights and graph don't fit each other, or the graph is too large to draw.
        IndexError: If there is no such node.

    Example:
        >>> import torch, gattn
        >>> from gattn.visualize import attention_rollout
        >>> tokens = ["attention", "is", "message", "passing"]
        >>> layers = torch.randn(3, 2, 4, 4).softmax(-1)  # 3 layers of 2 heads
        >>> ax = attention_rollout(layers, labels=tokens)
    """
    if edge_index is None and node is not None:
        raise ValueError("node= goes with a graph, edge_index=; of a matrix, its row is that node's.")
    parts = rollout(weights_by_layer, edge_index, residual=residual)
    if node is None:
        if edge_index is not None:
            _check_size(parts.size(0), max_nodes)
        return _draw_matrix(parts.to_dense(), labels, labels, ax, title, maximum, colorbar, _PART)
    node = int(node)
    edges, num_nodes = _one_kind_of_nodes(edge_index, labels=labels, pos=pos)
    drawn = _reached(edges, num_nodes, node, len(_layers(weights_by_layer)))
    graph = _drawable(coalesce(edges[:, drawn], num_nodes=num_nodes), num_nodes, node, max_nodes)
    places = _places(graph, pos, node)
    colorbar = ax is None if colorbar is None else colorbar
    if ax is None:
        _, ax = plt.subplots(figsize=_graph_size(graph, colorbar), layout="constrained")
    part = parts.select(0, node).to_dense()[list(graph)]
    scale = _scale(part, maximum)
    others = torch.tensor([edge for edge in graph.edges if edge[0] != edge[1]]).view(-1, 2)
    _draw_edges(graph, places, others.t(), 0.6, "#C8C8C8", node, ax)
    _draw_nodes(graph, places, WEIGHTS(scale(part.numpy())), {}, node, labels, ax)
    _finish(ax, title, ScalarMappable(scale, WEIGHTS) if colorbar else None, _PART)
    return ax


# Computations --------------------------------------------------------------------------------------------------------


def entropy(weights: Any, edge_index: Any = None) -> tuple[Tensor, Tensor]:
    r"""The entropy of each target's weights, and that of the uniform distribution over the same neighbours.

    .. math::
        H_i = -\sum_{j \in \mathcal{N}(i)} \alpha_{ij} \ln \alpha_{ij} \le \ln |\mathcal{N}(i)|

    Weights that don't add up to one are first divided by their sum.

    Args:
        weights: `[N, M]` or `[H, N, M]`; with `edge_index` `[E]` or `[E, H]`.
        edge_index: The graph that the weights belong to, as in `attention_graph`. (default: `None`, a complete one, in
            which a source without weight in all heads, as behind a causal mask, is no neighbour)

    Returns:
        Two float64 tensors, in nats: entropies `[N]` or `[H, N]`, with `edge_index` `[N]` or `[N, H]`, and those of
        uniform attention, `[N]`.

    Raises:
        ValueError: If weights and graph don't fit each other.

    Example:
        >>> import torch
        >>> from gattn.visualize import entropy
        >>> entropy(torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]]))
        (tensor([0.6931, 0.0000], dtype=torch.float64), tensor([0.6931, 0.0000], dtype=torch.float64))
    """
    if edge_index is None:
        matrices = _matrices(weights)
        total = matrices.sum(-1, keepdim=True)
        nats = torch.special.entr(matrices / total.masked_fill(total == 0, 1.0)).sum(-1)
        neighbours = (matrices > 0).any(0).sum(-1)
        nats = nats if torch.as_tensor(weights).dim() == 3 else nats[0]
    else:
        edges, (_, num_targets) = _edges(edge_index)
        alpha = _edge_weights(weights, edges)
        total = scatter(alpha, edges[1], 0, num_targets, reduce="sum")
        alpha = alpha / total.masked_fill(total == 0, 1.0)[edges[1]]
        nats = scatter(torch.special.entr(alpha), edges[1], 0, num_targets, reduce="sum")
        neighbours = edges[1].bincount(minlength=num_targets)
        nats = nats if torch.as_tensor(weights).dim() == 2 else nats[:, 0]
    return nats, neighbours.clamp(min=1).double().log()


def rollout(
    weights_by_layer: Mapping[str, Any] | Sequence[Any], edge_index: Any = None, *, residual: float = 0.5
) -> Tensor:
    r"""Attention through all layers: which part each input has in each output.

    From `Quantifying Attention Flow in Transformers <https://arxiv.org/abs/2005.00928>`_: heads are averaged, skip
    connections mixed in, and layers multiplied.

    .. math::
        R = A_L \cdots A_1, \qquad A_l = r I + (1 - r) \frac{1}{H} \sum_h \alpha_{lh}

    Rows of weights are first divided by their sum; a node without neighbours keeps to itself.

    Args:
        weights_by_layer: The weights of each layer, first to last, in a list or by name: `[N, N]` or `[H, N, N]`; with
            `edge_index` `[E]` or `[E, H]`.
        edge_index: The graph of all layers, as in `attention_graph`. (default: `None`, a complete one)
        residual: The part r of the skip connections. (default: `0.5`)

    Returns:
        R, `[N, N]` in float64, a row for each output; with `edge_index` a sparse matrix.

    Raises:
        ValueError: If there is no layer, weights and graph don't fit, sources are other nodes than targets, or
            `residual` is not between 0 and 1.

    Example:
        >>> import torch
        >>> from gattn.visualize import rollout
        >>> rollout([torch.tensor([[1.0, 0.0], [1.0, 0.0]])] * 2)
        tensor([[1.0000, 0.0000],
                [0.7500, 0.2500]], dtype=torch.float64)
    """
    if not 0.0 <= residual <= 1.0:
        raise ValueError(f"residual is the part of the skip connections, between 0 and 1; got {residual}.")
    layers = _layers(weights_by_layer)
    if edge_index is None:
        matrices = {name: _matrices(weights).mean(0) for name, weights in layers.items()}
        sizes = {tuple(matrix.shape) for matrix in matrices.values()}
        if len(sizes) > 1 or len(set(*sizes)) > 1:
            raise ValueError(f"a rollout goes through layers of [H, N, N], all of one size; got {sorted(sizes)}.")
        eye = torch.eye(sizes.pop()[0], dtype=torch.double)
        steps = [residual * eye + (1.0 - residual) * _stochastic(matrix, eye) for matrix in matrices.values()]
    else:
        edges, num_nodes = _one_kind_of_nodes(edge_index)
        steps = [_sparse_step(edges, _edge_weights(x, edges).mean(1), num_nodes, residual) for x in layers.values()]
    result: Any = steps[0]
    for step in steps[1:]:
        result = step @ result
    if edge_index is None:
        return result
    result = result.tocoo()
    index, values = torch.from_numpy(np.stack([result.row, result.col])), torch.from_numpy(result.data)
    return torch.sparse_coo_tensor(index, values, result.shape, check_invariants=True).coalesce()


def _stochastic(matrix: Tensor, eye: Tensor) -> Tensor:
    total = matrix.sum(1, keepdim=True)
    return torch.where(total > 0, matrix / total, eye)


def _sparse_step(edges: Tensor, alpha: Tensor, num_nodes: int, residual: float) -> Any:
    """One layer of a rollout, for scipy: PyTorch's sparse matrices warn that they are in beta."""
    total = scatter(alpha, edges[1], 0, num_nodes, reduce="sum")
    alpha = (1.0 - residual) * torch.where(total[edges[1]] > 0, alpha / total[edges[1]], 0.0)
    loops = torch.where(total > 0, residual, 1.0)
    rows, columns = torch.cat([edges.flip(0), torch.arange(num_nodes).expand(2, -1)], 1).numpy()
    return csr_array((torch.cat([alpha, loops]).numpy(), (rows, columns)), shape=(num_nodes, num_nodes))


# What is asked for ---------------------------------------------------------------------------------------------------


def _tensor(weights: Any) -> Tensor:
    """Weights as finite float64 numbers on the CPU."""
    if isinstance(weights, (list, tuple)) and any(isinstance(part, Tensor) for part in weights):
        raise ValueError(
            f"got {len(weights)} tensors, such as the weights of a packed graph's blocks: take one of them, weights[0]."
        )
    weights = torch.as_tensor(weights).detach().cpu().double()
    if not bool(weights.isfinite().all()) or bool((weights < 0).any()):
        raise ValueError("attention weights are finite and not negative: are these logits? Take their softmax first.")
    return weights


def _matrices(weights: Any) -> Tensor:
    """Weights of a complete graph, `[H, N, M]`."""
    weights = _tensor(weights)
    if weights.dim() == 4:
        raise ValueError(
            f"weights of shape {list(weights.shape)} are those of a batch: take one element of it, weights[0]."
        )
    if weights.dim() not in (2, 3) or weights.numel() == 0:
        raise ValueError(
            f"weights are [N, M] or [H, N, M], and not empty; got {list(weights.shape)}. Those of a graph of edges, "
            "[E] or [E, H], come with its edge_index."
        )
    return weights if weights.dim() == 3 else weights.unsqueeze(0)


def _edge_weights(weights: Any, edges: Tensor) -> Tensor:
    """Weights of a graph of edges, `[E, H]`."""
    weights = _tensor(weights)
    if weights.dim() == 3:
        raise ValueError(
            f"weights of shape {list(weights.shape)} are those of a batch: take one element of it, weights[0]."
        )
    if weights.dim() not in (1, 2) or weights.size(0) != edges.size(1) or weights.numel() == 0:
        raise ValueError(
            f"weights have one row for each of the graph's {edges.size(1)} edges, [E] or [E, H], and at least one; got "
            f"{list(weights.shape)}. They belong to the edge_index that the layer returns beside them, self-loops "
            "included."
        )
    return weights if weights.dim() == 2 else weights.unsqueeze(1)


def _edges(edge_index: Any, at_least: int = 0) -> tuple[Tensor, tuple[int, int]]:
    """Sources above targets, on the CPU, and the numbers of sources and targets; `at_least` where nobody tells."""
    graph = as_graph(edge_index)
    if isinstance(graph, CompleteGraph):
        raise ValueError(
            "a CompleteGraph has no list of edges: its weights, [N, M] or [H, N, M], come without a graph."
        )
    sizes = graph.num_sources, graph.num_targets
    if None in sizes:
        most = int(graph.adjacency.max()) + 1 if graph.adjacency.numel() else 0
        graph = graph.with_sizes(*(max(most, at_least) if size is None else size for size in sizes))
    edges = graph.edge_index.cpu()
    return edges if graph.flow == FLOWS[0] else edges.flip(0), (graph.num_sources or 0, graph.num_targets or 0)


def _one_kind_of_nodes(edge_index: Any, **per_node: Any) -> tuple[Tensor, int]:
    """Edges and the number of nodes, which what comes one a node may tell."""
    counts = {name: len(x) for name, x in per_node.items() if x is not None and not isinstance(x, Mapping)}
    edges, (num_sources, num_targets) = _edges(edge_index, max(counts.values(), default=0))
    if num_sources != num_targets:
        raise ValueError(
            f"sources and targets must be the same nodes; this graph has {num_sources} and {num_targets} of them."
        )
    for name, count in counts.items():
        if count != num_targets:
            raise ValueError(f"{name} must have one entry for each of the graph's {num_targets} nodes; got {count}.")
    return edges, num_targets


def _layers(weights_by_layer: Any) -> dict[str, Any]:
    """The weights of each layer by name."""
    if isinstance(weights_by_layer, Mapping):
        layers = {str(name): weights for name, weights in weights_by_layer.items()}
    else:
        layers = {f"layer {number}": weights for number, weights in enumerate(weights_by_layer)}
    if not layers:
        raise ValueError("there is no layer: pass the weights of at least one, in a list or by name.")
    return layers


def _of_head(weights: Tensor, head: int | str | None, dim: int) -> Tensor:
    count = weights.size(dim)
    if head == "mean":
        return weights.mean(dim)
    if head is None and count > 1:
        raise ValueError(
            f"these are the weights of {count} heads: choose head=0 to head={count - 1}, or head='mean' (if they are "
            "of a batch, take one element of it, weights[0])."
        )
    head = 0 if head is None else head
    if not isinstance(head, int) or isinstance(head, bool):
        raise ValueError(f"head is the number of a head, or 'mean'; got {head!r}.")
    if not 0 <= head < count:
        raise IndexError(f"there is no head {head}: the weights have {count}, from 0 to {count - 1}.")
    return weights.select(dim, head)


def _reached(edges: Tensor, num_nodes: int, node: int | None, hops: int) -> Tensor:
    """Which edges a node hears through in so many steps, `[E]`; all of them if there is no node."""
    if node is None:
        return torch.ones(edges.size(1), dtype=torch.bool)
    if not 0 <= node < num_nodes:
        raise IndexError(f"there is no node {node}: the graph has {num_nodes}, from 0 to {num_nodes - 1}.")
    if hops < 1:
        raise ValueError(f"hops is at least 1; got {hops}.")
    source, target = edges
    heard = torch.zeros(num_nodes, dtype=torch.bool)
    heard[node] = True
    for _ in range(hops):
        drawn = heard[target]
        heard[source[drawn]] = True
    return drawn


def _drawable(edges: Tensor, num_nodes: int, node: int | None, max_nodes: int) -> nx.DiGraph:
    """The graph for networkx, unless nobody could see anything in its picture."""
    nodes = range(num_nodes) if node is None else sorted({node, *edges.flatten().tolist()})
    _check_size(len(nodes), max_nodes)
    if edges.size(1) > _MAX_EDGES_PER_NODE * max_nodes:
        raise ValueError(
            f"{edges.size(1)} arrows could not be told apart: draw the ego network of one node (node=), or weights as "
            "a matrix (attention_matrix)."
        )
    graph = nx.DiGraph()
    graph.add_nodes_from(nodes)
    graph.add_edges_from(edges.t().tolist())
    return graph


def _check_size(count: int, max_nodes: int) -> None:
    if count > max_nodes:
        raise ValueError(
            f"the picture would have {count} nodes, but max_nodes={max_nodes}: draw the ego network of one node "
            "(node=..., hops=1), or raise max_nodes."
        )


# How it looks --------------------------------------------------------------------------------------------------------


def _draw_matrix(
    matrix: Tensor,
    row_labels: Sequence[Any] | None,
    column_labels: Sequence[Any] | None,
    ax: Axes | None,
    title: str | None,
    maximum: float | None,
    colorbar: bool | None,
    what: str,
) -> Axes:
    num_targets, num_sources = matrix.shape
    colorbar = ax is None if colorbar is None else colorbar
    if ax is None:
        _, ax = plt.subplots(figsize=_matrix_size(matrix, row_labels, column_labels), layout="constrained")
    is_narrow = max(matrix.shape) > 4 * min(matrix.shape)
    image = ax.imshow(
        matrix.numpy(),
        cmap=WEIGHTS,
        norm=_scale(matrix, maximum),
        aspect="auto" if is_narrow else "equal",
        interpolation="nearest",
    )
    _name_ticks(ax.yaxis, row_labels, num_targets, "row_labels")
    _name_ticks(ax.xaxis, column_labels, num_sources, "column_labels")
    ax.set_xlabel("source", fontsize=9)
    ax.set_ylabel("target", fontsize=9)
    _finish(ax, title, image if colorbar else None, what)
    return ax


def _scale(weights: Tensor, maximum: float | None) -> Normalize:
    if maximum is not None and maximum <= 0:
        raise ValueError(f"maximum is the weight of the darkest colour, above zero; got {maximum}.")
    largest = float(weights.max()) if weights.numel() else 0.0
    return Normalize(0.0, maximum or largest or 1.0)


def _finish(ax: Axes, title: str | None, mappable: ScalarMappable | None, what: str = "") -> None:
    if title is not None:
        ax.set_title(title, fontsize=10)
    if mappable is not None:
        _add_colorbar(mappable, ax.figure, ax, what)


def _add_colorbar(mappable: ScalarMappable, figure: Any, axes: Any, what: str) -> None:
    bar = figure.colorbar(mappable, ax=axes, shrink=0.8, aspect=25, pad=0.02)
    bar.set_label(what, fontsize=9)
    bar.ax.tick_params(labelsize=8)
    bar.ax.yaxis.set_major_locator(MaxNLocator(6))
    bar.outline.set_visible(False)


def _matrix_size(
    matrix: Tensor, labels: Sequence[Any] | None, other_labels: Sequence[Any] | None
) -> tuple[float, float]:
    """Inches of a new figure: as much as labels need, where there are some."""
    num_targets, num_sources = matrix.shape
    cell = 0.24 if labels is not None or other_labels is not None else 4.0 / max(matrix.shape)
    return max(cell * num_sources, 1.5) + 1.9, max(cell * num_targets, 1.0) + 1.1


def _name_ticks(axis: Any, labels: Sequence[Any] | None, count: int, name: str) -> None:
    """Names the rows or columns of a matrix; numbers where there are no names."""
    axis.set_tick_params(labelsize=8, length=2)
    if labels is None:
        axis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
        return
    names = [_shown(label) for label in _values(labels)]
    if len(names) != count:
        rows = "rows" if axis.axis_name == "y" else "columns"
        raise ValueError(f"{name} must have one entry for each of the {count} {rows}; got {len(names)}.")
    if count > _MAX_LABELS:
        raise ValueError(
            f"{count} labels are too many to read ({_MAX_LABELS} are not): draw a part of the matrix, or leave "
            f"{name} out."
        )
    # A dollar sign is a token, not the beginning of a formula.
    axis.set_ticks(range(count), names, parse_math=False)
    if axis.axis_name == "x" and max(map(len, names)) > 1:
        vertical = {"rotation": 90, "ha": "center", "va": "top"}
        slanted = {"rotation": 45, "ha": "right", "va": "top", "rotation_mode": "anchor"}
        for text in axis.get_ticklabels():
            text.set(**(vertical if count > 30 else slanted))


def _values(labels: Any) -> list[Any]:
    return labels.tolist() if hasattr(labels, "tolist") else list(labels)


def _shown(label: Any) -> str:
    """A label that can be seen: spaces and line breaks are tokens, too."""
    text = str(label)
    for invisible, symbol in (("\n", "↵"), ("\t", "⇥")):
        text = text.replace(invisible, symbol)
    return text.replace(" ", "␣") if text.isspace() else text


def _graph_size(graph: nx.DiGraph, colorbar: bool) -> tuple[float, float]:
    side = 4.2 if len(graph) <= 30 else 6.0
    return side + 0.8 * colorbar, side


def _layout(graph: nx.Graph, node: int | None) -> dict[int, Any]:
    """Neighbours close together; those of one node, and nobody else, around it."""
    if node is not None and len(graph) == len({node, *graph[node]}) > 1:
        return nx.shell_layout(graph, [[node], [other for other in graph if other != node]])
    if len(graph) > _MAX_KAMADA_KAWAI:
        return nx.spring_layout(graph, seed=0)
    steps = dict(nx.all_pairs_shortest_path_length(graph))
    far = 1 + max(max(others.values()) for others in steps.values())
    return nx.kamada_kawai_layout(graph, {a: {b: steps[a].get(b, far) for b in graph} for a in graph})


def _places(graph: nx.DiGraph, pos: Any, node: int | None) -> dict[int, Any]:
    """Where each node is."""
    if pos is None:
        return _layout(nx.Graph(graph), node)
    if isinstance(pos, Mapping):
        missing = [node for node in graph if node not in pos]
        if missing:
            raise ValueError(f"pos says where each node is, but not where node {missing[0]} is.")
        return {node: pos[node] for node in graph}
    places = torch.as_tensor(pos).double()
    if places.dim() != 2 or places.size(1) != 2:
        raise ValueError(f"pos is [N, 2], or a mapping from nodes to places; got {list(places.shape)}.")
    return {node: places[node].tolist() for node in graph}


def _common(
    edge_index: Any, *, node: int | None = None, hops: int = 1, max_nodes: int = 150, **others: Any
) -> tuple[Tensor, dict[int, Any]]:
    """Which edges all panels of a grid show, and where each node is in them."""
    node = None if node is None else int(node)
    edges, num_nodes = _one_kind_of_nodes(edge_index, classes=others.get("classes"), labels=others.get("labels"))
    drawn = _reached(edges, num_nodes, node, hops)
    graph = _drawable(edges[:, drawn], num_nodes, node, max_nodes)
    return drawn, _places(graph, others.get("pos"), node)


def _node_sizes(graph: nx.DiGraph, node: int | None) -> list[float]:
    usual = 260.0 if len(graph) <= 40 else 150.0 if len(graph) <= _MAX_NAMED_NODES else 50.0
    return [2.5 * usual if other == node else usual for other in graph]


def _draw_edges(
    graph: nx.DiGraph, places: Any, edges: Tensor, widths: Any, colours: Any, node: int | None, ax: Axes
) -> None:
    nx.draw_networkx_edges(
        graph,
        places,
        edgelist=[tuple(edge) for edge in edges.t().tolist()],
        width=widths,
        edge_color=colours,
        nodelist=list(graph),
        node_size=_node_sizes(graph, node),
        arrows=True,
        arrowsize=8,
        connectionstyle="arc3,rad=0.1",  # so that both directions can be seen
        ax=ax,
    )


def _draw_nodes(
    graph: nx.DiGraph,
    places: Any,
    colours: Any,
    rims: Mapping[int, tuple[Any, Any]],
    node: int | None,
    labels: Sequence[Any] | None,
    ax: Axes,
) -> None:
    """Nodes with their names; `rims` are widths and colours."""
    nx.draw_networkx_nodes(
        graph,
        places,
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
    given = None if labels is None else _values(labels)
    names = {other: str(other) if given is None else _shown(given[other]) for other in graph}
    for (other, name), colour, size in zip(names.items(), colours, _node_sizes(graph, node), strict=True):
        is_inside = 5 * len(name) <= size**0.5  # in points
        red, green, blue = to_rgb(colour)
        is_dark = is_inside and 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
        ax.annotate(
            name,
            places[other],
            xytext=(0, 0 if is_inside else -1 - size**0.5 / 2),
            textcoords="offset points",
            ha="center",
            va="center" if is_inside else "top",
            fontsize=7,
            color="white" if is_dark else "black",
            parse_math=False,
            path_effects=[] if is_inside else [withStroke(linewidth=2.0, foreground="white")],
        )


def _class_colours(graph: nx.DiGraph, classes: Any, ax: Axes) -> list[str]:
    """The colour of each node, and a legend that says of which class it is."""
    if classes is None:
        return ["#D8D8D8"] * len(graph)
    values = _values(classes)
    kinds = sorted(set(values))
    if len(kinds) > len(COLOURS):
        raise ValueError(f"{len(kinds)} classes cannot be told apart by colour, {len(COLOURS)} can: join some of them.")
    palette = dict(zip(kinds, COLOURS, strict=False))
    shown = [kind for kind in kinds if kind in {values[node] for node in graph}]
    handles = [Line2D([], [], marker="o", linestyle="", color=palette[kind]) for kind in shown]
    names = [kind if isinstance(kind, str) else f"class {kind}" for kind in shown]
    ax.legend(handles, names, loc="upper center", bbox_to_anchor=(0.5, 0.0), **_legend_style(names))
    return [palette[values[node]] for node in graph]


def _legend_style(names: Sequence[str]) -> dict[str, Any]:
    return {
        "ncols": min(len(names), 4),
        "fontsize": 8,
        "frameon": False,
        "handletextpad": 0.1,
        "columnspacing": 1.0,
    }
