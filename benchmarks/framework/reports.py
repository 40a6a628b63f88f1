"""Tables and pictures."""

from __future__ import annotations

import io
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.framework.results import Row, is_current, replace_file

#: A line of a table: column names and texts.
Line = dict[str, str]

#: The colours of Okabe and Ito, which colour-blind readers can tell apart.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, RED, PINK = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"

OTHER_RUN = "†"
"""Follows ratios of times that were measured in different runs of the benchmark."""

NOT_KEPT = "not kept"
"""Follows times under an allocator that was to keep memory but did not."""

NEW_PAGES = 0.1
"""Calls that get more than this share of their peak from the system do not keep memory: if all is kept, they get
nothing. Under glibc's default, which returns large blocks, half of all measurements get more than half of it."""

FEWEST_PAGES = 32
"""The smallest block that glibc returns to the system by default has this many pages."""

PAGE = 4096
"""The bytes of a page (huge ones have more)."""


# Tables --------------------------------------------------------------------------------------------------------------


def print_table(title: str, lines: Sequence[Line], headings: Line, console: Console) -> None:
    """Prints some columns, without text in brackets; a narrow terminal breaks lines, but nothing is cut off."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1))
    for column, heading in headings.items():
        starts = [line[column][:1] for line in lines]
        is_text = any(map(str.isalpha, starts)) and not any(map(str.isdigit, starts))
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
    for line in lines:
        table.add_row(*(line[column].split(" (")[0] for column in headings))
    width = max(console.width, Console(width=300).measure(table).maximum)
    Console(width=width, file=console.file, markup=False).print(table)


def markdown(lines: Sequence[Line], remarks: Sequence[str]) -> str:
    """A table as Markdown, with remarks below."""
    header = [f"| {' | '.join(lines[0])} |", f"|{' --- |' * len(lines[0])}"]
    body = [f"| {' | '.join(line.values())} |" for line in lines]
    return "\n".join([*header, *body, "", *(f"- {remark}" for remark in remarks)]) + "\n"


def machines(rows: Iterable[Row], columns: Sequence[str], rest: str) -> list[str]:
    """The machines, versions and settings with which rows were made.

    Args:
        rows: The rows.
        columns: The columns that are shown with their names, if a row has them.
        rest: A format string for further columns of the row.
    """
    described, others, count = set(), 0, 0
    for row in rows:
        row = {"allocator": "not recorded", **row}  # older rows lack it
        named = ", ".join(f"{name} {row[name]}" for name in (*columns, "allocator", "kernels") if name in row)
        described.add(named + rest.format(**row))
        others, count = others + (not is_current(row)), count + 1
    older = f"**Older than the code**: {others} of {count} rows are of other kernels than those in this repository."
    return [*[older] * (others > 0), *sorted(described)]


def mean_and_deviation(values: Sequence[float], alone: str = "", digits: int = 1) -> str:
    """Mean ± standard deviation; for a single value, a placeholder for its deviation."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else alone
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def median_and_quartiles(values: Sequence[float]) -> str:
    """Median and quartiles of some numbers; for a single one, the number."""
    if len(values) == 1:
        return f"{values[0]:.4f}"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.4f} ({low:.4f}–{high:.4f})"


def median(row: Row | None, mode: str) -> float | None:
    """The median time of a row, if it has one."""
    return row[mode]["median"] if row is not None and mode in row else None


def is_kept(row: Row, mode: str) -> bool:
    """Whether the calls of a measurement kept their memory, if its allocator is one that should.

    What counts is the usual call, because times are medians. Older rows only have the mean, which a single call can
    raise; in these, all calls together must have got no more than the peak, as when memory grows once.
    """
    times = row.get(mode, {})
    pages, share = times.get("usual_page_faults"), NEW_PAGES
    if pages is None:
        pages, share = times.get("page_faults", 0), 1 / max(len(times.get("times", ())), 1)
    should = row.get("allocator") in ("kept", "huge")
    return not should or pages < FEWEST_PAGES or pages * PAGE <= share * row["peak_bytes"]


def is_same_run(row: Row, other: Row) -> bool:
    """Whether both were measured in the same run of the benchmark, and so under the same load; older rows lack this."""
    return bool(row.get("started") == other.get("started"))


def quotient(other: Row | None, own: Row | None, mode: str, own_mode: str | None = None) -> float | None:
    """The other's median time divided by one's own; `None` if one of them has none or did not keep its memory."""
    own_mode = own_mode or mode
    above, below = median(other, mode), median(own, own_mode)
    if other is None or own is None or not (above and below and is_kept(other, mode) and is_kept(own, own_mode)):
        return None
    return above / below


def mark(text: str, row: Row | None, other: Row | None) -> str:
    """A text that was derived from the times of two rows, marked if these are of different runs."""
    return text + OTHER_RUN * (text != "–" and row is not None and other is not None and not is_same_run(row, other))


def factor(
    other: Row | None, own: Row | None, mode: str, digits: str = ".1f", own_mode: str | None = None, unit: str = "×"
) -> str:
    """The other's median time as a multiple of one's own, if there is one, marked if it is from another run."""
    value = quotient(other, own, mode, own_mode)
    return mark(f"{value:{digits}}{unit}" if value else "–", own, other)


def remarks_on(tables: Iterable[Sequence[Line]], remarks: Sequence[str]) -> list[str]:
    """What the marks in these tables and remarks mean."""
    texts = [*remarks, *(text for lines in tables for line in lines for text in line.values())]
    meanings = {
        OTHER_RUN: f"{OTHER_RUN} Both times are of different runs of the benchmark, maybe under different loads, so "
        "their ratio may be off by any factor. To measure both again in one run, use --only with a text that is in "
        "both names.",
        NOT_KEPT: f"Memory was to be kept, but in times that are called '{NOT_KEPT}', the system had to provide more "
        f"than {NEW_PAGES:.0%} of the peak again in the usual call (older rows, which lack this: more than the whole "
        "peak in all calls together). No ratio is derived from them.",
    }
    return [meaning for mark, meaning in meanings.items() if any(mark in text for text in texts)]


def ratio(other: float | None, own: float | None, digits: str = ".1f") -> str:
    """The other as a multiple of one's own."""
    return f"{other / own:{digits}}×" if other and own else "–"


def quartiles(row: Row, mode: str) -> str:
    """Median and quartiles in milliseconds, or the outcome if there are none."""
    if row["outcome"] != "ok":
        return row["outcome"]
    if mode not in row:
        return "–"
    low, middle, high = (f"{1000 * row[mode][name]:.4g}" for name in ("q1", "median", "q3"))
    return f"{middle} ({low}–{high})" + f", {NOT_KEPT}" * (not is_kept(row, mode))


def per_call(row: Row, mode: str, column: str, digits: str, factor: int = 1) -> str:
    """A mean over all timed calls, if the row has it."""
    return f"{factor * row[mode][column]:{digits}}" if column in row.get(mode, {}) else "–"


def megabytes(row: Row, column: str = "peak_bytes") -> str:
    """Memory, if the row has it."""
    return f"{row[column] / 1e6:.1f}" if column in row else "–"


# Pictures ------------------------------------------------------------------------------------------------------------


def draw_quartiles(
    axis: Axes, x: Sequence[float], curves: Sequence[Sequence[float]], color: str, style: str, label: str
) -> None:
    """Draws the median of several curves and the range between their quartiles, up to the end of the shortest."""
    length = min(map(len, curves))
    low, middle, high = np.quantile([curve[:length] for curve in curves], (0.25, 0.5, 0.75), axis=0)
    axis.plot(x[:length], middle, style, color=color, label=label, linewidth=1.4)
    axis.fill_between(x[:length], low, high, color=color, alpha=0.15, linewidth=0)


# Files ---------------------------------------------------------------------------------------------------------------


def write_file(path: Path, content: Figure | str) -> None:
    """Writes a picture or a text; if this fails, the previous one is kept."""
    if isinstance(content, str):
        replace_file(path, content.encode(errors="backslashreplace"))
        return
    picture = io.BytesIO()
    content.savefig(picture, format="png")
    pixels = np.asarray(Image.open(picture).convert("RGB")).astype(int)
    # A palette takes a third of the bytes. Its colours are the commonest ones, so that curves keep theirs.
    codes, place, counts = np.unique(pixels @ [65536, 256, 1], return_inverse=True, return_counts=True)
    colours = np.stack([codes >> 16, codes >> 8 & 255, codes & 255], 1)
    kept = colours[counts.argsort()[-64:]]
    nearest = ((colours[:, None] - kept) ** 2).sum(-1).argmin(1).astype(np.uint8)
    small, image = io.BytesIO(), Image.fromarray(nearest[place].reshape(pixels.shape[:2])).convert("P")
    image.putpalette(kept.flatten().tolist())
    image.save(small, format="png", optimize=True)
    replace_file(path, small.getvalue())
