"""Attention weights as arcs over a line of words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from numpy.typing import NDArray

from gattn.visualize.inputs import Weights, matrices, select_head, unpack
from gattn.visualize.style import (
    EDGES,
    MAX_WIDTH,
    WEIGHT_LABEL,
    add_title_and_colorbar,
    as_list,
    colour_scale,
    printable,
)

__all__ = ["attention_arcs"]

_MAX_TOKENS = 60
_MAX_CHARACTERS = 16
_LEAST_SHARE = 0.1  # of the largest weight


def attention_arcs(
    weights: Weights,
    tokens: Sequence[Any],
    source_tokens: Sequence[Any] | None = None,
    *,
    head: int | str | None = None,
    target: int | None = None,
    minimum: float | None = None,
    call: int = -1,
    element: int | None = None,
    ax: Axes | None = None,
    title: str | None = None,
    maximum: float | None = None,
    colorbar: bool | None = None,
) -> Axes:
    """Draws the words of a sequence on a line, and weights as arcs between them, wider and darker for larger weights.

    An arc above the words leads from a word back to an earlier one that it attends to, an arc below ahead to a later
    one; a circle above a word is the attention to itself. With `source_tokens`, sources are a line of words above the
    targets, and weights are straight lines between the two.

    Args:
        weights: `[N, M]`, or `[H, N, M]` with `head`, or what `gattn.record_attention` gathered of one layer.
        tokens: The N words of the targets.
        source_tokens: The M words of the sources, if they are others, as in translation. (default: `None`, the same)
        head: The number of a head, or `"mean"` for the mean over heads. It can be left out if there is only one head.
            (default: `None`)
        target: Draws only what this target attends to, a number from 0 to N - 1. (default: `None`, all targets)
        minimum: The smallest weight that is drawn. (default: `None`, a tenth of the largest)
        call: Which call of a recorded layer to draw. (default: `-1`, the last one)
        element: Which element of a batch to draw, or which block of a packed graph. (default: `None`, the only one)
        ax: The axes to draw into. (default: `None`, a new figure)
        title: The title of the axes. (default: `None`)
        maximum: The weight of the widest and darkest arc. (default: `None`, the largest weight that is drawn)
        colorbar: Whether to show the scale of colours. (default: `None`, in a new figure only)

    Returns:
        The axes.

    Raises:
        ValueError: If weights and words do not fit each other, or there are more than 60 words on a line.
        IndexError: If there is no such head, target, call or element.

    Example:
        >>> import torch, gattn
        >>> from gattn.visualize import attention_arcs
        >>> layer = gattn.nn.MultiheadAttention(8, 2)
        >>> x = torch.randn(4, 8)
        >>> with gattn.record_attention(layer) as records:
        ...     out = layer(x, x, x, is_causal=True)
        >>> ax = attention_arcs(records[""], ["attention", "is", "message", "passing"], head=0)
    """
    matrix = select_head(matrices(*unpack(weights, call=call, element=element)), head, 0).numpy()
    lines = [_words(tokens, matrix.shape[0], "tokens")]
    if source_tokens is not None:
        lines.append(_words(source_tokens, matrix.shape[1], "source_tokens"))
    elif matrix.shape[0] != matrix.shape[1]:
        raise ValueError(
            f"{matrix.shape[0]} targets attend to {matrix.shape[1]} other sources: pass their words as source_tokens."
        )
    if target is not None and not 0 <= target < len(matrix):
        raise IndexError(f"there is no target {target}: the weights have {len(matrix)}, from 0 to {len(matrix) - 1}.")
    drawn = np.ones_like(matrix, dtype=bool)
    if target is not None:
        drawn[np.arange(len(matrix)) != target] = False
    scale = colour_scale(torch.from_numpy(matrix[drawn]), maximum)
    drawn &= matrix > (_LEAST_SHARE * float(scale.vmax or 0.0) if minimum is None else minimum)
    order = np.argsort(matrix[drawn])  # the largest are drawn last, on top of the others
    ends, alpha = np.argwhere(drawn)[order], matrix[drawn][order]

    places = [_places(words) for words in lines]
    width = max(line[-1] + line[0] for line in places)
    inches = min(MAX_WIDTH - 1.0, max(3.0, width))
    size = min(9.0, 9.0 * inches / width)
    colorbar = ax is None if colorbar is None else colorbar
    # In units of x, which are inches before the line is made to fit.
    far = np.abs(np.subtract(*places[0][ends.T])) if source_tokens is None else np.zeros(len(ends))
    ahead = ends[:, 1] > ends[:, 0]
    above, below = (0.25 + 0.5 * max(far[side], default=0.0) ** 0.75 for side in (~ahead, ahead))
    if source_tokens is not None:
        above, below = 1.6, 0.2
    if ax is None:
        height = (above + below) * inches / width + 0.3
        _, ax = plt.subplots(figsize=(inches + 1.0 * colorbar, max(1.2, height)), layout="constrained")
    if source_tokens is None:
        paths = [_arc(places[0][i], places[0][j]) for i, j in ends]
    else:
        offsets = [(width - line[-1] - line[0]) / 2 for line in places]
        places = [line + offset for line, offset in zip(places, offsets, strict=True)]
        paths = [np.array([[places[0][i], 0.14], [places[1][j], 1.26]]) for i, j in ends]
    alpha = scale(alpha).clip(0.0, 1.0)
    curves = LineCollection(paths, linewidths=0.4 + 3.6 * alpha, colors=EDGES(alpha), capstyle="round", zorder=1)
    ax.add_collection(curves, autolim=False)
    for line, words, height in zip(places, lines, (0.0, 1.4), strict=False):
        for number, (place, word) in enumerate(zip(line, words, strict=True)):
            is_target = target == number and height == 0.0
            weight = "bold" if is_target else "normal"
            style = {"ha": "center", "va": "center", "fontsize": size, "fontweight": weight, "parse_math": False}
            ax.text(place, height, word, **style, zorder=2)
    ax.set_xlim(0.0, width)
    ax.set_ylim(-below, above)
    ax.set_axis_off()
    add_title_and_colorbar(ax, title, ScalarMappable(scale, EDGES) if colorbar else None, WEIGHT_LABEL)
    return ax


def _words(tokens: Sequence[Any], count: int, name: str) -> list[str]:
    """Words as they are drawn, one for each row or column of the weights."""
    words = as_list(tokens)
    if len(words) != count:
        raise ValueError(f"{name} must have one word for each of the {count} rows or columns; got {len(words)}.")
    if count > _MAX_TOKENS:
        raise ValueError(
            f"{count} words do not fit on a line; at most {_MAX_TOKENS} do: draw a part of them, or a matrix with "
            "attention_matrix."
        )
    return printable(words, _MAX_CHARACTERS)


def _places(words: Sequence[str]) -> NDArray[np.float64]:
    """The middle of each word on a line, in inches at full size."""
    widths = np.array([0.08 * max(len(word), 2) + 0.12 for word in words])
    return np.cumsum(widths) - widths / 2


def _arc(target: float, source: float) -> NDArray[np.float64]:
    """Points on half an ellipse above the words, or below them if the source stands further on."""
    side = -1.0 if source > target else 1.0
    if target == source:
        angle = np.linspace(0.0, 2 * np.pi, 25)
        return np.stack([target + 0.07 * np.cos(angle), 0.21 + 0.07 * np.sin(angle)], 1)
    angle = np.linspace(0.0, np.pi, 41)
    far = abs(target - source)
    x = (target + source) / 2 + (target - source) / 2 * np.cos(angle)
    return np.stack([x, side * (0.12 + 0.5 * far**0.75 * np.sin(angle))], 1)
