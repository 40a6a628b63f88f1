"""All heads of all layers in one figure."""

from __future__ import annotations

from textwrap import wrap
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from numpy.typing import NDArray
from torch import Tensor

from gattn.graphs import GraphLike
from gattn.visualize.graphs import attention_graph, shared_layout
from gattn.visualize.inputs import Layers, complete_weights, edge_list, edge_weights, named_layers
from gattn.visualize.matrices import attention_matrix
from gattn.visualize.style import EDGES, WEIGHT_LABEL, WEIGHTS, add_colorbar, legend_style

__all__ = ["attention_grid"]

_MAX_PANELS = 150


def attention_grid(
    weights_by_layer: Layers,
    edge_index: GraphLike | None = None,
    *,
    title: str | None = None,
    **kwargs: Any,
) -> NDArray[np.object_]:
    """Draws all heads of all layers on one scale of colours, with one row per layer and one column per head.

    Args:
        weights_by_layer: The weights of each layer, in a list or by name: `[H, N, M]`, or `[E, H]` with `edge_index`.
        edge_index: The graph of all layers, as in `attention_graph`. (default: `None`, a complete graph: matrices are
            drawn)
        title: The title of the figure. (default: `None`)
        **kwargs: Further arguments of `attention_matrix` (such as `row_labels`) or `attention_graph` (such as `node`).

    Returns:
        An array of axes, `[layers, heads]`. Where a layer has fewer heads than others, the other axes are invisible.

    Raises:
        ValueError: If there is no layer, there are too many panels, or a single panel cannot be drawn.

    Example:
        >>> import torch, gattn
        >>> from gattn.visualize import attention_grid
        >>> model = gattn.models.TransformerLM(num_tokens=10, channels=16, num_layers=2, heads=4).eval()
        >>> with gattn.record_attention(model) as records:
        ...     logits = model(torch.zeros(1, 5, dtype=torch.int64))
        >>> attention_grid({name: calls[0].weights[0] for name, calls in records.items()}).shape
        (2, 4)
    """
    layers = named_layers(weights_by_layer)
    drawn: Tensor | None = None
    if edge_index is None:
        heads = {name: list(complete_weights(weights)) for name, weights in layers.items()}
        named = max(len(kwargs.get(name) or ()) for name in ("row_labels", "column_labels"))
        side = max(1.5, 0.16 * named)
    else:
        edges, _ = edge_list(edge_index)
        heads = {name: list(edge_weights(weights, edges).unbind(1)) for name, weights in layers.items()}
        drawn, coordinates = shared_layout(edge_index, **kwargs)
        kwargs = {"pos": coordinates} | kwargs
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
    axes: NDArray[np.object_]
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
    if legend is not None:  # one legend serves all panels
        names = [text.get_text() for text in legend.get_texts()]
        figure.legend(legend.legend_handles, names, loc="outside lower center", **legend_style(names))
    scale = Normalize(0.0, kwargs["maximum"])
    add_colorbar(ScalarMappable(scale, colours), figure, axes, WEIGHT_LABEL)
    if title is not None:
        figure.suptitle(title, fontsize=10)
    return axes
