"""Tables and pictures of the measurements of `benchmarks.kernels`."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks import pyg_peers
from benchmarks.framework import reports
from benchmarks.framework.measuring import MODES
from benchmarks.framework.options import unique
from benchmarks.framework.reports import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    PINK,
    RED,
    Line,
    factor,
    is_same_run,
    machines,
    median,
    quotient,
    ratio,
)
from benchmarks.framework.results import ALLOCATORS, VERSIONS, Row
from benchmarks.kernel_cases import SHAPES, Case

COLOURS = {"gattn": BLUE, "pyg-sorted": ORANGE, "pyg-compile": RED, "pyg-sorted-compile": PINK, "dgl": GREEN}
MARKERS = {"gattn": "o", "pyg-sorted": "s", "pyg-compile": "^", "pyg-sorted-compile": "v", "dgl": "D"}
LAYER_COLOURS = {"gat": BLUE, "gatv2": ORANGE, "transformer": GREEN}

#: The least number of feature rows that a kernel must fetch per edge, forward and backward.
GATHERED_ROWS = {"gat": (1, 1), "gatv2": (1, 1), "transformer": (2, 3)}

#: The least number of rows that it must also read or write per node. Forward, these are the targets' queries and the
#: output; backward, they are all inputs, the output, its gradient and the inputs' gradients.
STREAMED_ROWS = {"gat": (1, 4), "gatv2": (2, 6), "transformer": (2, 8)}

#: Floating-point operations per channel of an edge, forward and backward. Forward, values are multiplied and summed
#: (2); logits take nothing, a sum, a LeakyReLU and a dot product (5), or a dot product (2). Backward, each gradient,
#: including that of the weights, takes a product and a sum, and hidden layers and logits are recomputed.
OPERATIONS = {"gat": (2, 4), "gatv2": (7, 13), "transformer": (4, 10)}


def bytes_moved(case: Case, mode: str) -> int:
    """The least number of bytes that must move: rows and an index per edge, and the rows of each node, once."""
    shape = case.shape
    if case.part == "gather":
        gathered, streamed, passes = 1, 1, 1
    else:
        passes = 1 if mode == "forward" else 2
        gathered, streamed = sum(GATHERED_ROWS[case.layer][:passes]), sum(STREAMED_ROWS[case.layer][:passes])
    row = shape.heads * shape.channels * case.torch_dtype.itemsize
    return least_bytes(shape.edges + shape.nodes, shape.nodes, row, passes, gathered, streamed)


def least_bytes(edges: int, nodes: int, row: int, passes: int, gathered: int, streamed: int) -> int:
    """The bytes of this many rows and an index per edge and pass, and of this many rows per node."""
    return edges * (gathered * row + passes * torch.int64.itemsize) + nodes * streamed * row


def operations(case: Case, mode: str) -> int:
    """The least number of floating-point operations, on the channels of each edge."""
    passes = 1 if mode == "forward" else 2
    per_channel = 1 if case.part == "gather" else sum(OPERATIONS[case.layer][:passes])
    return (case.shape.edges + case.shape.nodes) * case.shape.heads * case.shape.channels * per_channel


class Report:
    """Rows, compared with each other.

    Args:
        rows: The rows by case, in the order of the table.
    """

    def __init__(self, rows: dict[Case, Row]):
        self.rows = rows
        self.sides = pyg_peers.sides(rows)

    def peer(self, case: Case, **changes: Any) -> Row | None:
        """The row of a case that differs only in these fields; `None` if there is none."""
        return self.rows.get(replace(case, **changes))

    def gather(self, case: Case) -> Row | None:
        """The yardstick of a case; `None` if there is none for its dtype."""
        return self.rows.get(case.gather())

    def copy_rate(self, case: Case) -> float | None:
        """Bytes that the case's device copies per second, if this was measured."""
        return (self.gather(replace(case, dtype="float32")) or {}).get("copy_rate")

    def rooflines(self) -> list[Case]:
        """The yardsticks in float32 of one allocator, which show what the machine can do."""
        return [
            case
            for case, row in self.rows.items()
            if case.allocator == self.sides[0] and "operation_rate" in row and case.dtype == "float32"
        ]

    def lines(self, mode: str) -> list[Line]:
        """The table of times, with the allocators side by side."""
        cases = unique(replace(case, allocator=self.sides[0]) for case in self.rows)
        return [{**self.names(case), **pyg_peers.compared(self.rows, case, mode, self.gather)} for case in cases]

    def names(self, case: Case) -> Line:
        """The columns that say what is measured."""
        layer = case.layer + " + edge features" * case.edge_features
        return {
            "shape": case.shape.name,
            "part": case.part,
            "layer": layer or "–",
            "dtype": case.dtype,
            "peer": case.peer,
        }

    def memory(self, case: Case, row: Row) -> Line:
        """A line of the table of memory: its size, the system's work for it, and how fast it is used."""
        eager = self.peer(case, peer="pyg") or {}
        line = {
            **self.names(case),
            "allocator": case.allocator,
            "peak, MB": reports.megabytes(row),
            "memory, PyG's ÷": ratio(eager.get("peak_bytes"), row.get("peak_bytes")),
        }
        for mode, title in MODES.items():
            line[f"{title}, page faults"] = reports.per_call(row, mode, "page_faults", ".1f")
            line[f"{title}, system, ms"] = reports.per_call(row, mode, "system", ".3f", 1000)
        is_counted = case.part == "attention" and case.peer == "gattn"
        for mode, title in MODES.items():
            time = median(row, mode)
            rate = bytes_moved(case, mode) / time if time and (is_counted or case.part == "gather") else None
            line[f"{title}, GB/s"] = f"{rate / 1e9:.1f}" if rate else "–"
            if case.device != "cpu":
                copied = self.copy_rate(case)
                line[f"{title}, of a copy's"] = f"{rate / copied:.0%}" if rate and copied else "–"
        return line

    def remarks(self) -> list[str]:
        """Ratios between lines."""
        remarks = []
        for case, row in self.rows.items():
            plain = self.peer(case, shape=SHAPES["arxiv"][0])
            if case.shape.hub is not None and plain is not None and case.part != "gather":
                share = factor(row, plain, "forward_backward", ".2f")
                remarks.append(f"{case}: forward + backward takes {share} the time of the plain graph.")
            if case.dtype != "float32":
                single = self.peer(case, dtype="float32")
                share = factor(single, row, "forward", ".2f")
                remarks.append(f"{case}: forward is {share} as fast as in float32.")
        return remarks


def notes(found: dict[Case, Row], missing: dict[str, str]) -> list[str]:
    """Notes for readers of the table."""
    rows = list(found.values())
    names = (*VERSIONS, "torch-scatter", "dgl", "triton", "cuda", "driver", "python")
    is_gpu = any(row.get("device", "cpu") != "cpu" for row in rows)
    memory = "memory that PyTorch has allocated" if is_gpu else "resident memory"
    limits = [[f"{row[name] / 1e9:.0f}" for row in rows if name in row] for name in ("copy_rate", "operation_rate")]
    copies, products = map(", ".join, limits)
    return [
        *machines(rows, names, ", {threads} thread(s)"),
        *pyg_peers.remarks(found),
        f"The peak is the {memory} above the inputs in the first forward + backward, "
        "including the preparation of the graph (compiled: after compilation).",
        *[
            "Times are taken between GPU events, with warm caches. The columns 'of a copy's' divide the GB/s, which "
            f"count each gathered row once per edge, by those of a large copy on the same card ({copies} GB/s)."
        ]
        * is_gpu,
        "GB/s is the least that must move, divided by the time.",
        *[
            f"The machine copied {copies} GB/s and multiplied large matrices with {products} billion floating-point "
            "operations per second."
        ]
        * bool(copies and products),
        "Page faults and system time (of all threads) are means per call.",
        *(f"{peer}: {reason}" for peer, reason in missing.items()),
    ]


def draw_speedup(report: Report) -> Figure:
    """Points: how many times faster than PyG eager under the same allocator; a panel per part, a line per layer."""
    parts = [("attention", False), ("layer", False), ("layer", True)]
    panels: dict[tuple[str, bool], dict[tuple[str, str], list[tuple[Case, float]]]] = {}
    failed: dict[Any, str] = {}
    for part in parts:
        lines = panels.setdefault(part, {})
        for case, row in report.rows.items():
            if (case.part, case.edge_features, case.dtype) != (*part, "float32"):
                continue
            eager = report.peer(case, peer="pyg")
            times = quotient(eager, row, "forward_backward")
            line = case.shape.name, case.layer
            if case.peer == "pyg" and row["outcome"] != "ok":
                lines.setdefault(line, [])
                failed[part, line] = row["outcome"]
            elif case.peer in COLOURS and times and eager and is_same_run(row, eager):
                lines.setdefault(line, []).append((case, times))
    sizes = {case.shape.name: case.shape.edges for case in report.rows}
    panels = {
        part: dict(sorted(lines.items(), key=lambda item: sizes[item[0][0]])) for part, lines in panels.items() if lines
    } or {parts[0]: {}}
    heights = [max(1, len(lines)) for lines in panels.values()]
    figure = Figure(figsize=(7.5, 0.24 * sum(heights) + 0.7 * len(panels) + 1.1), dpi=110, layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True, height_ratios=[1 + x for x in heights])[:, 0]
    shown: dict[str, Line2D] = {}
    for (panel, lines), axis in zip(panels.items(), axes, strict=True):
        for place, (line, points) in enumerate(lines.items()):
            points.sort(key=lambda point: list(ALLOCATORS).index(point[0].allocator))
            for case, times in points:
                is_kept = case.allocator == "kept"
                style = {"markerfacecolor": "white" if is_kept else COLOURS[case.peer], "color": COLOURS[case.peer]}
                label = case.peer + ", kept memory" * is_kept
                (shown[label],) = axis.plot(times, place, MARKERS[case.peer], markersize=6, **style)
            said = [f"{times:.3g}×" for case, times in points if case.peer == "gattn"]
            if (panel, line) in failed:
                said.append(f"PyG: {failed[panel, line]}")
            where = {"xycoords": axis.get_yaxis_transform(), "textcoords": "offset points", "va": "center"}
            axis.annotate(" / ".join(said), (1.0, place), (6, 0), fontsize=8, color=COLOURS["gattn"], **where)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_yticks(range(len(lines)), [f"{shape}, {layer}" for shape, layer in lines], fontsize=8)
        axis.set_ylim(len(lines) - 0.4, -0.6)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
        axis.tick_params(axis="x", labelsize=8, labelbottom=True)
        axis.margins(x=0.04)
        title = {"attention": "attention alone", "layer": "whole layer"}[panel[0]]
        axis.set_title(title + ", with edge features" * panel[1], fontsize=10, loc="left")
        axis.grid(alpha=0.25)
    numbers = "gattn" + ", without and with kept memory" * ("gattn, kept memory" in shown)
    axes[-1].set_xlabel(f"how many times faster than PyG eager (numbers: {numbers})", fontsize=9)
    peers = sorted(shown, key=lambda label: (list(COLOURS).index(label.split(",")[0]), label))
    handles = [shown[label] for label in peers]
    figure.legend(handles, peers, loc="outside lower center", ncols=min(max(len(shown), 1), 3), fontsize=8)
    figure.suptitle("Forward + backward, compared with PyG eager", fontsize=10)
    return figure


def draw_roofline(report: Report) -> Figure:
    """Operations per second against operations per byte, and the machine's limits, with one panel per shape."""
    yardsticks = report.rooflines()
    columns = min(max(len(yardsticks), 1), 4)
    lines = max(1, -(-len(yardsticks) // columns))
    size = max(2.6 * columns + 0.6, 6.0), 2.5 * lines + 0.8
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False, sharey=True)
    axes = list(grid.flat)
    names = Counter(case.shape.name for case in yardsticks)
    markers = {"forward": "o", "forward_backward": "s"}
    for yardstick, axis in zip(yardsticks, axes, strict=False):
        limits = report.rows[yardstick]
        points = [("gather", BLACK, "x", yardstick, "forward")]
        for (layer, colour), (mode, marker) in itertools.product(LAYER_COLOURS.items(), markers.items()):
            case = replace(yardstick, part="attention", layer=layer, peer="gattn")
            points.append((layer, colour, marker, case, mode))
        for name, colour, marker, case, mode in points:
            time = median(report.rows.get(case), mode)
            if time:
                amount = operations(case, mode)
                place = amount / bytes_moved(case, mode), amount / time / 1e9
                label = name if mode == "forward" else None
                axis.plot(*place, marker, color=colour, label=label, markersize=5)
        low, high = axis.get_xlim()
        places = [low / 2, limits["operation_rate"] / limits["copy_rate"], high * 2]
        roof = [min(x * limits["copy_rate"], limits["operation_rate"]) / 1e9 for x in sorted(places)]
        axis.plot(sorted(places), roof, color=BLACK, linewidth=0.8)
        name = yardstick.shape.name
        repeats = f", {yardstick.repeats} repeats" * (names[name] > 1)
        axis.set_title(name + repeats, fontsize=10)
        axis.set(xscale="log", yscale="log", xlabel="operations per byte")
        axis.grid(alpha=0.25)
    for axis in axes[len(yardsticks) :]:
        axis.set_visible(len(yardsticks) == 0)
    for line in grid:
        line[0].set_ylabel("10⁹ operations / s")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle("○ forward, □ forward + backward; line: what copies and matrix products reach", fontsize=9)
    return figure
