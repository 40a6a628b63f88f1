"""All heads of all layers in one figure."""

from __future__ import annotations

from textwrap import wrap
from typing import Any, cast

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from numpy.typing import NDArray
from torch import Tensor

from gattn.graphs import GraphLike
from gattn.visualize.graphs import attention_graph, shared_layout
from gattn.visualize.inputs import Layers, complete_weights, edge_list, edge_weights, unpacked_layers
from gattn.visualize.matrices import attention_matrix
from gattn.visualize.style import (
    EDGES,
    MAX_HEIGHT,
    MAX_WIDTH,
    WEIGHT_LABEL,
    WEIGHTS,
    add_colorbar,
    as_list,
    legend_style,
)

__all__ = ["attention_grid"]

_MAX_PANELS = 150


def attention_grid(
    weights_by_layer: Layers,
    edge_index: GraphLike | None = None,
    *,
    call: int = -1,
    element: int | None = None,
    title: str | None = None,
    **kwargs: Any,
) -> NDArray[np.object_]:
    """Draws all heads of all layers on one scale of colours, with one row per layer and one column per head.

    Args:
        weights_by_layer: The weights of each layer, in a list or by name: `[H, N, M]`, or `[E, H]` with `edge_index`.
            Or what `gattn.record_attention` gathered: all of it, or the calls of one layer, which are then the rows.
        edge_index: The graph of all layers, as in `attention_graph`. (default: `None`, a complete graph: matrices are
            drawn; recorded weights know their graph)
        call: Which call of each recorded layer to draw. (default: `-1`, the last one)
        element: Which element of a batch to draw. (default: `None`, the only one)
        title: The title of the figure. (default: `None`)
        **kwargs: Further arguments of `attention_matrix` (such as `row_labels`) or `attention_graph` (such as `node`).

    Returns:
        An array of axes, `[layers, heads]`. Where a layer has fewer heads than others, the other axes are invisible.

    Raises:
        ValueError: If there is no layer, there are too many panels, or a single panel cannot be drawn.
        IndexError: If there is no such call or element.

    Example:
        >>> import torch, gattn
        >>> from gattn.visualize import attention_grid
        >>> model = gattn.models.TransformerLM(num_tokens=10, channels=16, num_layers=2, heads=4).eval()
        >>> with gattn.record_attention(model) as records:
        ...     logits = model(torch.zeros(1, 5, dtype=torch.int64))
        >>> attention_grid(records).shape
        (2, 4)
    """
    layers = unpacked_layers(weights_by_layer, edge_index, call=call, element=element)
    graphs = [graph for _, graph in layers.values() if graph is not None]
    drawn: list[Tensor] = []
    if not graphs:
        heads = {name: list(complete_weights(weights)) for name, (weights, _) in layers.items()}
        given = (kwargs.get(name) for name in ("row_labels", "column_labels"))
        side = max(1.5, 0.16 * max(len(as_list(labels)) if labels is not None else 0 for labels in given))
    else:
        heads = {
            name: list(edge_weights(weights, edge_list(cast(GraphLike, graph))[0]).unbind(1))
            for name, (weights, graph) in layers.items()
        }
        drawn, coordinates = shared_layout(graphs, **kwargs)
        kwargs = {"pos": coordinates} | kwargs
        side = 2.4
    columns = max(map(len, heads.values()))
    if len(heads) * columns > _MAX_PANELS:
        raise ValueError(
            f"{len(heads)} layers of up to {columns} heads would be more than {_MAX_PANELS} panels: choose some layers."
        )
    side = min(side, (MAX_WIDTH - 1.6) / columns, (MAX_HEIGHT - 0.6) / len(heads))
    everywhere = [x[drawn[number]] if drawn else x for number, panels in enumerate(heads.values()) for x in panels]
    largest = max((float(weights.max()) for weights in everywhere if weights.numel()), default=0.0)
    kwargs = {"maximum": largest or 1.0, "colorbar": False} | kwargs
    size = side * columns + 1.6, side * len(heads) + 0.6
    axes: NDArray[np.object_]
    figure, axes = plt.subplots(len(heads), columns, figsize=size, squeeze=False, layout="constrained")
    legend = None
    for row, (name, panels) in enumerate(heads.items()):
        for column, ax in enumerate(axes[row]):
            if column >= len(panels):
                ax.set_visible(False)
                continue
            if not graphs:
                attention_matrix(panels[column], ax=ax, title=f"head {column}", **kwargs)
                is_last = all(len(below) <= column for below in list(heads.values())[row + 1 :])
                ax.tick_params(labelbottom=is_last, labelleft=column == 0)
                ax.set_xlabel("source" if is_last else "")
            else:
                attention_graph(graphs[row], panels[column], ax=ax, title=f"head {column}", **kwargs)
                legend = ax.get_legend()
                if legend is not None:
                    legend.remove()
            ax.set_ylabel("\n".join(wrap(name, 24)) if column == 0 else "", fontsize=9)
    colours = EDGES if graphs else WEIGHTS
    if legend is not None:  # one legend serves all panels
        names = [text.get_text() for text in legend.get_texts()]
        figure.legend(
            legend.legend_handles,
            names,
            loc="outside lower center",
            **legend_style(len(names), columns=max(2, int(size[0] / 1.2))),
        )
    scale = Normalize(0.0, kwargs["maximum"])
    add_colorbar(ScalarMappable(scale, colours), figure, axes, WEIGHT_LABEL)
    if title is not None:
        figure.suptitle(title, fontsize=10)
    return axes
