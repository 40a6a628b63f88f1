"""Attention weights as a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from gattn.visualize.inputs import Weights, matrices, select_head, unpack
from gattn.visualize.style import (
    MAX_HEIGHT,
    MAX_WIDTH,
    WEIGHT_LABEL,
    WEIGHTS,
    add_title_and_colorbar,
    as_list,
    colour_scale,
    label_size,
    printable,
)

__all__ = ["attention_matrix", "draw_matrix"]

_MAX_LABELS = 80
_CHARACTER = 0.07  # the width of a character of a label, in inches


def attention_matrix(
    weights: Weights,
    row_labels: Sequence[Any] | None = None,
    column_labels: Sequence[Any] | None = None,
    *,
    head: int | str | None = None,
    call: int = -1,
    element: int | None = None,
    ax: Axes | None = None,
    title: str | None = None,
    maximum: float | None = None,
    colorbar: bool | None = None,
) -> Axes:
    """Draws weights as a matrix with one row per target and one column per source.

    Long labels end in an ellipsis. Where labels are too many for the axes, only every second, third, ... is shown.

    Args:
        weights: `[N, M]`, or `[H, N, M]` with `head`, or what `gattn.record_attention` gathered of one layer. Recorded
            weights of edges are drawn as a matrix, too, with zeros where the graph has no edge.
        row_labels: The names of the N targets, such as tokens. (default: `None`, numbers)
        column_labels: The names of the M sources. (default: `None`, numbers)
        head: The number of a head, or `"mean"` for the mean over heads. It can be left out if there is only one head.
            (default: `None`)
        call: Which call of a recorded layer to draw. (default: `-1`, the last one)
        element: Which element of a batch to draw, or which block of a packed graph. (default: `None`, the only one)
        ax: The axes to draw into. (default: `None`, a new figure)
        title: The title of the axes. (default: `None`)
        maximum: The weight that gets the darkest colour. (default: `None`, the largest weight)
        colorbar: Whether to show the scale of colours. (default: `None`, in a new figure only)

    Returns:
        The axes.

    Raises:
        ValueError: If shapes and labels do not fit each other, or there are too many labels to read.
        IndexError: If there is no such head, call or element.

    Example:
        >>> import torch, gattn
        >>> from gattn.visualize import attention_matrix
        >>> attention = gattn.nn.MultiheadAttention(8, 2)
        >>> x = torch.randn(4, 8)
        >>> _, weights = attention(x, x, x, average_attn_weights=False)
        >>> tokens = ["attention", "is", "message", "passing"]
        >>> ax = attention_matrix(weights, tokens, tokens, head=0)
    """
    matrix = select_head(matrices(*unpack(weights, call=call, element=element)), head, 0)
    return draw_matrix(matrix, row_labels, column_labels, ax, title, maximum, colorbar, WEIGHT_LABEL)


def draw_matrix(
    matrix: Tensor,
    row_labels: Sequence[Any] | None,
    column_labels: Sequence[Any] | None,
    ax: Axes | None,
    title: str | None,
    maximum: float | None,
    colorbar: bool | None,
    label: str,
) -> Axes:
    """Draws a matrix of weights, or of shares in the output, as `label` says."""
    colorbar = ax is None if colorbar is None else colorbar
    row_names, column_names = (
        None if labels is None else printable(as_list(labels)) for labels in (row_labels, column_labels)
    )
    if ax is None:
        (width, height), margins = _matrix_size(matrix, row_names, column_names)
        _, ax = plt.subplots(figsize=(width + margins[0], height + margins[1]), layout="constrained")
    else:
        height, width = (size / ax.figure.dpi for size in (ax.bbox.height, ax.bbox.width))
    is_narrow = max(matrix.shape) > 4 * min(matrix.shape)
    if not is_narrow:  # cells are squares
        cell = min(height / matrix.size(0), width / matrix.size(1))
        height, width = cell * matrix.size(0), cell * matrix.size(1)
    image = ax.imshow(
        matrix.numpy(),
        cmap=WEIGHTS,
        norm=colour_scale(matrix, maximum),
        aspect="auto" if is_narrow else "equal",
        interpolation="nearest",
    )
    _name_ticks(ax.yaxis, row_names, matrix.size(0), "row_labels", height)
    _name_ticks(ax.xaxis, column_names, matrix.size(1), "column_labels", width)
    ax.set_xlabel("source", fontsize=9)
    ax.set_ylabel("target", fontsize=9)
    add_title_and_colorbar(ax, title, image if colorbar else None, label)
    return ax


def _matrix_size(
    matrix: Tensor, row_names: list[str] | None, column_names: list[str] | None
) -> tuple[tuple[float, float], tuple[float, float]]:
    """The size of a new figure's matrix, and of the room around it for labels and colours, both in inches."""
    num_targets, num_sources = matrix.shape
    cell = 0.24 if row_names is not None or column_names is not None else 4.0 / max(matrix.shape)
    left, below = (
        0.2 if names is None else _CHARACTER * max(map(len, names), default=0) for names in (row_names, column_names)
    )
    margins = 1.5 + left, 0.8 + below
    cell = min(cell, (MAX_WIDTH - margins[0]) / num_sources, (MAX_HEIGHT - margins[1]) / num_targets)
    return (max(cell * num_sources, 1.5), max(cell * num_targets, 1.0)), margins


def _name_ticks(axis: XAxis | YAxis, names: list[str] | None, count: int, name: str, inches: float) -> None:
    """Labels the rows or columns of a matrix with names, or with numbers if there are none."""
    axis.set_tick_params(labelsize=8, length=2)
    if names is None:
        axis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
        return
    if len(names) != count:
        rows = "rows" if axis.axis_name == "y" else "columns"
        raise ValueError(f"{name} must have one entry for each of the {count} {rows}; got {len(names)}.")
    if count > _MAX_LABELS:
        raise ValueError(
            f"{count} labels are too many to read; at most {_MAX_LABELS} can be: draw a part of the matrix, or leave "
            f"out {name}."
        )
    size, step = label_size(count, inches)
    # In a label, a dollar sign is a token and does not start a formula.
    axis.set_ticks(range(0, count, step), names[::step], parse_math=False, fontsize=size)
    if axis.axis_name == "x" and max(map(len, names)) > 1:
        vertical = {"rotation": 90, "ha": "center", "va": "top"}
        slanted = {"rotation": 45, "ha": "right", "va": "top", "rotation_mode": "anchor"}
        for text in axis.get_ticklabels():
            text.set(**(vertical if count > 30 else slanted))
