"""How pictures look: colours, scales, sizes, legends and labels."""

from __future__ import annotations

import unicodedata
import warnings
from collections.abc import Iterable
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ticker import MaxNLocator
from torch import Tensor

__all__ = [
    "COLOURS",
    "EDGES",
    "MAX_HEIGHT",
    "MAX_WIDTH",
    "SHARE_LABEL",
    "WEIGHTS",
    "WEIGHT_LABEL",
    "add_colorbar",
    "add_title_and_colorbar",
    "as_list",
    "colour_scale",
    "label_size",
    "legend_style",
    "printable",
    "visible",
]

#: Okabe and Ito's palette, for classes and heads.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#F0E442", "#999999")

#: From no weight to the largest one. Lightness decreases throughout, so that the scale can be read in grey as well.
WEIGHTS = LinearSegmentedColormap.from_list("gattn_weights", ["#F7FAFC", "#B5D3E7", "#5BA3CF", "#0072B2", "#003A5C"])

#: The same scale, but starting with a blue that is visible as a line.
EDGES = LinearSegmentedColormap.from_list("gattn_edges", WEIGHTS([0.2, 0.4, 0.6, 0.8, 1.0]))

#: The labels of colour bars.
WEIGHT_LABEL, SHARE_LABEL = "attention weight α", "part in the output"

#: The largest figure that is made, in inches: what fits a page.
MAX_WIDTH, MAX_HEIGHT = 11.0, 13.0

_MAX_CHARACTERS = 24
_MISSING = "□"


def colour_scale(weights: Tensor, maximum: float | None) -> Normalize:
    """Maps weights from zero to `maximum`, or to the largest one, to the range of a scale of colours."""
    if maximum is not None and maximum <= 0:
        raise ValueError(f"maximum is the weight of the darkest colour and must be above zero; got {maximum}.")
    largest = float(weights.max()) if weights.numel() else 0.0
    return Normalize(0.0, maximum or largest or 1.0)


def add_title_and_colorbar(ax: Axes, title: str | None, mappable: ScalarMappable | None, label: str = "") -> None:
    """Adds a title and a colour bar, where they are given."""
    if title is not None:
        ax.set_title(title, fontsize=10)
    if mappable is not None:
        add_colorbar(mappable, ax.figure, ax, label)


def add_colorbar(mappable: ScalarMappable, figure: Any, axes: Any, label: str) -> None:
    """Adds a colour bar beside the axes."""
    bar = figure.colorbar(mappable, ax=axes, shrink=0.8, aspect=25, pad=0.02)
    bar.set_label(label, fontsize=9)
    bar.ax.tick_params(labelsize=8)
    bar.ax.yaxis.set_major_locator(MaxNLocator(6))
    bar.outline.set_visible(False)


def legend_style(count: int, columns: int = 4) -> dict[str, Any]:
    """The options of a legend with this many entries."""
    return {
        "ncols": min(count, columns),
        "fontsize": 8,
        "frameon": False,
        "handletextpad": 0.1,
        "columnspacing": 1.0,
    }


def as_list(labels: Any) -> list[Any]:
    """Converts labels or classes, which may be a tensor or an array, to a list."""
    return labels.tolist() if hasattr(labels, "tolist") else list(labels)


def visible(label: Any) -> str:
    """Returns a label that can be seen: spaces and line breaks may be tokens."""
    text = str(label).replace("\n", "↵").replace("\t", "⇥")
    return text.replace(" ", "␣") if text.isspace() else text


def printable(labels: Iterable[Any], limit: int = _MAX_CHARACTERS) -> list[str]:
    """Returns labels that can be seen and that matplotlib's font has, cut to a limit.

    Args:
        labels: What is to be written.
        limit: How many characters a label may have; an ellipsis replaces the rest.
    """
    fonts = [findfont(FontProperties(family=[family])) for family in mpl.rcParams["font.family"]]
    glyphs = {code for font in fonts for code in get_font(font).get_charmap()}
    missing: dict[str, None] = {}
    found = []
    for label in labels:
        known = []
        for character in unicodedata.normalize("NFC", visible(label)):
            if unicodedata.category(character) == "Cf":  # joins others, and has no width
                continue
            if ord(character) not in glyphs:
                missing[character] = None
            known.append(_MISSING if character in missing else character)
        found.append("".join(known) if len(known) <= limit else "".join(known[: limit - 1]).rstrip() + "…")
    if missing:
        warnings.warn(
            f"the font {', '.join(mpl.rcParams['font.family'])} lacks {len(missing)} of the characters to be drawn, "
            f"such as {next(iter(missing))!r}; they are drawn as {_MISSING}. Add a font that has them to "
            "matplotlib.rcParams['font.family'].",
            stacklevel=4,
        )
    return found


def label_size(count: int, inches: float) -> tuple[float, int]:
    """The size of font, in points, for this many labels on an axis, and which of them fit: every k-th."""
    step = max(1, -int(-count * 6.0 // (72.0 * inches)))
    return max(5.0, min(8.0, 0.8 * 72.0 * inches * step / count)), step
