"""Transformers on gattn's layers and on PyTorch's: `python -m benchmarks.sequence`.

There are three parts. *lm* trains a language model on the characters of tiny Shakespeare, in nanoGPT's setting for a
CPU, with gattn's layers and with PyTorch's, in turns, from the same weights and on the same batches. On request, it
also trains recurrent models with about as many parameters: an LSTM, and an LSTMN, which attends to its earlier states.
*speed* measures `MultiheadAttention` of both libraries and the bare `scaled_dot_product_attention` on full, causal and
windowed sequences, on a ragged batch, and token by token: gattn's layer with a `KeyValueCache`, and PyTorch in a loop
written for this. *graphs* measures one layer on complete, causal, windowed and sparse graphs, which shows how the cost
grows with size.

The results of *speed* and *graphs* are compared with a float64 reference.

Duration: 45 minutes; with `--quick`: 1 minute.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import gattn
from benchmarks.framework import measuring, reports
from benchmarks.framework.benchmark import Benchmark
from benchmarks.framework.measuring import MODES, measured
from benchmarks.framework.options import MOST, fill, folder, seconds, whole
from benchmarks.framework.processes import BenchmarkError, Message
from benchmarks.framework.reports import Line, factor, machines, mark, median, megabytes, quartiles, ratio
from benchmarks.framework.results import VERSIONS, Row
from benchmarks.sequence_models import (
    CHUNK,
    LAYERS,
    MODELS,
    RECURRENT,
    RECURRENT_LAYERS,
    SETTING,
    Corpus,
    Run,
    setting_of,
    train,
)
from benchmarks.sequence_speed import Speed

PARTS = ("lm", "speed", "graphs")

TEXT = "tinyshakespeare"
QUICK_TEXT = 30_000
"""With `--quick`, only this many of its characters are used, as the loss on its last tenth takes long."""
PUBLISHED_LOSS = 1.88
"""NanoGPT's validation loss in this setting, a mean over random batches: its README, "i only have a macbook"."""

CHANNELS = 256
HEADS = 8
BATCH = 4
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
SHORT = 16
"""The length of a single short sequence, for which the call costs more than the computation."""
DECODED = 256
"""The number of tokens decoded one by one."""
RAGGED = (64, 512)
"""The number of sequences in the ragged batch and the longest length; the shortest is a sixteenth of it."""
NODES = (256, 512, 1024, 2048, 4096, 8192)

COLOURS = {"gattn": reports.BLUE, "torch": reports.RED, "sdpa": reports.GREEN, "gattn-padded": reports.SKY}
MODEL_NAMES = {
    "gattn": "Transformer, gattn",
    "torch": "Transformer, torch",
    "lstm": "LSTM, torch",
    "lstmn": "LSTMN, gattn",
}
"""The name of each row in tables with recurrent models."""
MARKERS = {"gattn": "o-", "torch": "s-", "sdpa": "^-", "gattn-padded": "D-"}
MODEL_COLOURS = {"gattn": reports.BLUE, "torch": reports.RED, "lstm": reports.ORANGE, "lstmn": reports.GREEN}
GRAPH_COLOURS = {"full": reports.RED, "causal": reports.ORANGE, "window": reports.BLUE, "sparse": reports.GREEN}


# The reports ---------------------------------------------------------------------------------------------------------


def merge(rows: Sequence[Row]) -> Row:
    """One row for all rounds of a measurement, with all times and the largest memory."""
    for row in rows:
        if row["outcome"] != "ok":
            return row
    modes = [mode for mode in MODES if mode in rows[0]]
    times = {mode: measuring.spread([seconds for row in rows for seconds in row[mode]["times"]]) for mode in modes}
    peaks = {name: max(row[name] for row in rows) for name in ("forward_peak_bytes", "peak_bytes")}
    return {**rows[0], **times, **peaks, "started": sorted({str(row.get("started")) for row in rows})}


class Report:
    """Rows, compared with each other.

    Args:
        rows: The rows by case, in the order of the tables.
    """

    def __init__(self, rows: dict[Speed, Row]):
        rounds: dict[Speed, list[Row]] = {}
        for case, row in rows.items():
            rounds.setdefault(replace(case, round=0), []).append(row)
        self.rows = {case: merge(group) for case, group in rounds.items()}

    def peer(self, case: Speed, **changes: Any) -> Row | None:
        """The row of a case that differs only in these fields; `None` if there is none."""
        return self.rows.get(replace(case, **changes))

    def of(self, part: str) -> dict[Speed, Row]:
        """The rows of a part."""
        return {case: row for case, row in self.rows.items() if case.part == part}

    def failures(self, part: str) -> list[str]:
        """The reasons for missing times."""
        return [
            f"{case}: {row['outcome']}{': ' * bool(row['reason'])}{row['reason']}"
            for case, row in self.of(part).items()
            if row["outcome"] != "ok"
        ]


def times_of(row: Row) -> Line:
    """The columns of times and memory."""
    line = {f"{title}, ms": quartiles(row, mode) for mode, title in MODES.items()}
    peaks = {"forward_peak_bytes": "forward peak, MB", "peak_bytes": "peak, MB"}
    return line | {title: megabytes(row, column) for column, title in peaks.items()}


def speed_lines(report: Report) -> list[Line]:
    """The table of the part *speed*."""
    lines = []
    for case, row in report.of("speed").items():
        other = report.peer(case, peer="torch")
        line = {"graph": case.graph, "T": str(case.length), "peer": case.peer, **times_of(row)}
        for mode, title in MODES.items():
            line[f"{title}, torch's ÷"] = factor(other, row, mode, ".2f")
        line["peak, torch's ÷"] = ratio((other or {}).get("peak_bytes"), row.get("peak_bytes"))
        lines.append(line)
    return lines


def speed_remarks(report: Report) -> list[str]:
    """Ratios between lines of the part *speed*."""
    remarks = []
    for case, row in report.of("speed").items():
        if case.peer != "gattn":
            continue
        for graph, peer, text in (
            ("ragged", "gattn-padded", "padding it with gattn"),
            ("ragged", "torch", "padding it with torch"),
            ("window", "gattn", "full attention"),
        ):
            other = report.peer(case, peer=peer, graph="full" if graph == "window" else graph)
            times = factor(other, row, "forward_backward")
            if case.graph == graph and times != "–":
                remarks.append(f"{case.graph} {case.length}: {times} as fast as {text}, forward + backward.")
    return remarks


def graph_lines(report: Report) -> list[Line]:
    """The table of the part *graphs*."""
    lines = []
    for case, row in report.of("graphs").items():
        edges, seconds = case.num_edges(), median(row, "forward_backward")
        before = report.peer(case, length=case.length // 2)
        lines.append(
            {
                "graph": case.graph,
                "N": str(case.length),
                "edges": f"{edges:,}".replace(",", " "),
                **times_of(row),
                "forward + backward, ns per edge": f"{seconds / edges * 1e9:.1f}" if seconds else "–",
                "time, half as many nodes' ×": factor(row, before, "forward_backward"),
                "peak, half as many nodes' ×": ratio(row.get("peak_bytes"), (before or {}).get("peak_bytes")),
            }
        )
    return lines


def is_mixed(rows: Sequence[Row]) -> bool:
    """Whether some models are not Transformers."""
    return any(row["layers"] in RECURRENT for row in rows)


def lm_lines(rows: Sequence[Row]) -> list[Line]:
    """The table of the part *lm*."""
    base, whose = "torch", "torch's"
    if is_mixed(rows):
        base = next((row["layers"] for row in rows if row["layers"] in LAYERS), LAYERS[0])
        whose = f"Transformer's ({base})"
    other = next((row for row in rows if row["layers"] == base), None)
    lines = []
    for row in rows:
        times = row["iteration"]
        low, middle, high = (f"{1000 * times[name]:.2f}" for name in ("q1", "median", "q3"))
        kind = {"layers": row["layers"]}
        if is_mixed(rows):
            size = f"{row['setting']['num_layers']} × {row['setting']['channels']}"
            kind = {"model": MODEL_NAMES[row["layers"]], "layers × channels": size}
        lines.append(
            {
                **kind,
                "parameters": str(row["parameters"]),
                "iterations": str(row["iterations"]),
                "validation loss": f"{row['val_loss']:.4f}",
                "over random batches": f"{row['val_loss_random']:.4f}",
                "iteration, ms": f"{middle} ({low}–{high})",
                "all iterations, s": f"{row['total_seconds']:.1f}",
                f"iteration, × {whose}": factor(row, other, "iteration", ".3f"),
                f"all, × {whose}": mark(
                    ratio(row["total_seconds"], (other or {}).get("total_seconds"), ".3f"), row, other
                ),
            }
        )
    return lines


LOSS_NOTE = (
    "The validation loss is the mean over the whole last tenth of the text, in blocks that do not overlap. The loss "
    "over random batches is computed as in nanoGPT (https://github.com/karpathy/nanoGPT), which reports "
    f"{PUBLISHED_LOSS} after 2000 iterations. The setting is that of nanoGPT, except for the largest learning rate, "
    "which is 0.004 instead of 0.001."
)
ITERATION_NOTE = "An iteration is batch, forward, backward, clipping and optimizer, without validation."
LM_NOTES = (
    LOSS_NOTE,
    f"{ITERATION_NOTE} Both kinds of layers start from the same weights, take the same batches and train in turns of "
    f"{CHUNK} iterations in one process.",
)
MIXED_NOTES = (
    LOSS_NOTE,
    f"{ITERATION_NOTE} All models take the same batches and train in turns of {CHUNK} iterations in one process; "
    "Transformers start from the same weights.",
    f"The LSTM (torch.nn.LSTM) and the LSTMN (gattn.models.LSTMN, https://arxiv.org/abs/1601.06733) have "
    f"{RECURRENT_LAYERS} layers and tied embeddings. Their width is the multiple of four that brings the number of "
    "parameters closest to the Transformer's. They use the Transformer's optimizer and learning rates; nothing was "
    "tuned for them.",
    "In training and validation, each block of the text starts from an empty state. Samples are longer than a block: "
    "the LSTM carries its state along and the LSTMN attends to all of the text so far, whereas the Transformer attends "
    "to as many characters as a block has.",
)
SPEED_NOTES = (
    "Times are medians with quartiles over all rounds. Forward runs without autograd; forward + backward computes "
    "the gradients of the inputs and of all parameters. The peak is resident memory above the inputs. Torch's ÷ "
    "says how many times as much torch takes.",
    "gattn and torch are MultiheadAttention with need_weights=False, in training mode (in eval mode, PyTorch's takes "
    "another path, which is slower on a CPU). sdpa is scaled_dot_product_attention alone, without projections. In the "
    "ragged batch, gattn takes the sequences end to end, and the others take them padded.",
)
GRAPH_NOTES = (
    "One MultiheadAttention layer on one sequence, including projections, which cost the same on every graph.",
    "Times are medians with quartiles over all rounds. The peak is resident memory above the inputs, including the "
    "preparation of the graph.",
)


def draw_curves(rows: Sequence[Row]) -> Figure:
    """Validation loss against iterations."""
    figure = Figure(figsize=(6.5, 3.6), dpi=110, layout="constrained")
    axis = figure.subplots()
    for row in rows:
        name = MODEL_NAMES[row["layers"]] if is_mixed(rows) else row["layers"]
        style, colour = "-" if row["layers"] in ("gattn", "lstmn") else "--", MODEL_COLOURS[row["layers"]]
        steps = [point["iteration"] for point in row["curve"]]
        losses = [point["val_loss"] for point in row["curve"]]
        axis.plot(steps, losses, style, color=colour, label=f"{name}, validation")
        trained = [point for point in row["curve"] if "train_loss" in point]
        steps, losses = [point["iteration"] for point in trained], [point["train_loss"] for point in trained]
        axis.plot(steps, losses, ":", color=colour, linewidth=1, label=f"{name}, training")
    axis.axhline(PUBLISHED_LOSS, color="black", linewidth=0.8)
    axis.annotate(
        f"nanoGPT's {PUBLISHED_LOSS}",
        (0, PUBLISHED_LOSS),
        xytext=(2, -3),
        textcoords="offset points",
        va="top",
        fontsize=8,
    )
    axis.set(xlabel="iteration", ylabel="cross entropy per character, nats", title="Tiny Shakespeare")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
    return figure


def draw_speed(report: Report) -> Figure:
    """Forward + backward against length, with one panel per graph; the ragged batch is shown as bars."""
    cases = {case: row for case, row in report.of("speed").items() if case.graph != "decode"}
    graphs = list(dict.fromkeys(case.graph for case in cases))
    figure = Figure(figsize=(2.9 * len(graphs) + 0.4, 3.3), dpi=110, layout="constrained")
    axes = figure.subplots(1, len(graphs), squeeze=False)
    for graph, axis in zip(graphs, axes[0], strict=True):
        found = {
            (case.peer, case.batch, case.length): 1000 * seconds
            for case, row in cases.items()
            if case.graph == graph and (seconds := median(row, "forward_backward"))
        }
        axis.set(title=graph)
        if graph == "ragged":
            bars = [(peer, time) for peer in COLOURS for (other, *_), time in found.items() if other == peer]
            for place, (peer, time) in enumerate(bars):
                axis.bar(place, time, color=COLOURS[peer])
                axis.text(place, time, f"{time:.0f}", ha="center", va="bottom", fontsize=8)
            axis.set_xticks(range(len(bars)), [peer.replace("-", "\n") for peer, _ in bars], fontsize=8)
            axis.set_xlabel("how the batch is computed")
            axis.margins(y=0.1)
            axis.grid(axis="y", alpha=0.25)
            continue
        for peer, batch in dict.fromkeys((peer, batch) for peer, batch, _ in found):
            points = sorted((key[2], time) for key, time in found.items() if key[:2] == (peer, batch))
            axis.plot(*zip(*points, strict=True), MARKERS[peer], markersize=4, color=COLOURS[peer])
        batches = {length: batch for _, batch, length in found}
        usual = statistics.mode(batches.values()) if batches else 0
        names = [f"{x}" + f"\n(batch {batch})" * (batch != usual) for x, batch in batches.items()]
        axis.set(xlabel=f"T, batch of {usual}", xscale="log", yscale="log")
        axis.set_xticks(list(batches), names, fontsize=7)
        axis.grid(alpha=0.25)
        axis.minorticks_off()
    axes[0, 0].set_ylabel("forward + backward, ms")
    shown = [peer for peer in COLOURS if any(case.peer == peer for case in cases)]
    handles = [Line2D([], [], color=COLOURS[peer], marker=MARKERS[peer][0]) for peer in shown]
    figure.legend(handles, shown, loc="outside lower center", ncols=len(shown), fontsize=8)
    return figure


def draw_graphs(report: Report) -> Figure:
    """Forward + backward and memory against the number of nodes, with the slope of the last piece of each line."""
    cases = report.of("graphs")
    figure = Figure(figsize=(8, 3.4), dpi=110, layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, label in zip(axes, ("forward + backward, ms", "peak memory, MB"), strict=True):
        for graph, colour in GRAPH_COLOURS.items():
            rows = [(case.length, row) for case, row in cases.items() if case.graph == graph and row["outcome"] == "ok"]
            if label.startswith("peak"):
                points = [(length, row["peak_bytes"] / 1e6) for length, row in rows if row["peak_bytes"]]
            else:
                points = [(length, 1000 * row["forward_backward"]["median"]) for length, row in rows]
            if not points:
                continue
            text = graph
            if len(points) > 1:
                (size, value), (last_size, last_value) = points[-2:]
                text += f", slope {math.log(last_value / value) / math.log(last_size / size):.1f}"
            axis.plot(*zip(*points, strict=True), "o-", markersize=3, color=colour, label=text)
        axis.set(xlabel="N", ylabel=label, xscale="log", yscale="log")
        sizes = sorted({case.length for case in cases})
        axis.set_xticks(sizes, [str(size) for size in sizes], fontsize=8)
        axis.minorticks_off()
        axis.grid(alpha=0.25)
        if axis.lines:
            axis.legend(fontsize=8)
    figure.suptitle("The same layer on four graphs; slope 1 is linear in N, 2 is quadratic", fontsize=10)
    return figure


# The benchmark -------------------------------------------------------------------------------------------------------


class Sequences(Benchmark[Run | Speed]):
    """Trains the language models, then measures each peer on each graph."""

    name = "sequence"
    quick: ClassVar = {"iterations": 10, "rounds": 1, "repeats": 3, "seconds": 0.1, "threads": 1}

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the options."""
        add = parser.add_argument
        add("--parts", nargs="+", choices=PARTS, help="parts that are run (default: all)")
        add("--layers", nargs="+", choices=LAYERS, help="libraries whose layers are used (default: both)")
        add("--models", nargs="+", choices=MODELS, help="language models that are trained (default: transformer)")
        add("--iterations", type=whole(1, 10**9), help="number of training iterations (default: 2000)")
        add("--seed", type=whole(0, 2**32 - 1), help="seed of training (default: 0)")
        text = "number of threads (default: PyTorch's, here %(default)s)"
        add("--threads", type=whole(1, MOST), default=torch.get_num_threads(), help=text)
        add("--rounds", type=whole(1, 1000), help="number of rounds in which each peer is measured once (default: 2)")
        add("--repeats", type=whole(1, 10**9), help="largest number of timed calls per round (default: 20)")
        text = f"seconds after which no further calls are timed, once there are {measuring.MIN_REPEATS} (default: 5)"
        add("--seconds", type=seconds, help=text)
        add("--timeout", type=seconds, help="seconds after which a process is ended (default: 1200)")
        text = "folder of results, checkpoints, tables and pictures (default: %(default)s)"
        add("--out", type=folder, default=Path("runs/sequence"), help=text)

    @classmethod
    def check_options(cls, options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        """Fills in defaults, and refuses options of parts that are left out."""
        options.is_asked = options.parts is not None or options.models is not None
        if options.layers and set(options.parts or PARTS) == {"lm"} and "transformer" not in (options.models or MODELS):
            parser.error("--layers is for Transformers, but --models leaves them out")
        options.layers = [name for name in LAYERS if name in (options.layers or LAYERS)]
        if "graphs" in (options.parts or ()) and "gattn" not in options.layers:
            parser.error("--parts graphs measures only gattn's layers, but --layers leaves them out")
        options.parts = [part for part in PARTS if part in (options.parts or PARTS)]
        of_training: dict[str, object] = {"models": MODELS[:1], "iterations": 2000, "seed": 0}
        of_speed: dict[str, object] = {"rounds": 2, "repeats": 20, "seconds": 5.0, "timeout": 1200.0}
        for defaults, parts in ((of_training, ("lm",)), (of_speed, ("speed", "graphs"))):
            given = [name for name in defaults if getattr(options, name) != parser.get_default(name)]
            if given and not set(parts) & set(options.parts):
                parser.error(f"--{given[0]} is for {' and '.join(parts)}, which --parts leaves out")
        fill(options, of_training | of_speed)
        options.models = [name for name in MODELS if name in options.models]

    def cases(self) -> list[Run | Speed]:
        """All training runs, then all measurements."""
        return [*self.runs(), *self.measurements()]

    def runs(self) -> list[Run]:
        """All training runs, or none if the text is missing.

        Raises:
            BenchmarkError: If it is missing and the language model was requested by name.
        """
        options = self.options
        if "lm" not in options.parts:
            return []
        try:
            self.corpus = Corpus(gattn.datasets.load_text(TEXT)[: QUICK_TEXT if options.quick else None])
        except gattn.datasets.DatasetUnavailableError as error:
            if options.is_asked:
                raise BenchmarkError(str(error)) from error
            self.skip("lm", str(error))
            return []
        names = [name for model in options.models for name in (options.layers if model == "transformer" else [model])]
        fixed = (options.seed, options.iterations, options.threads)
        num_tokens = len(self.corpus.symbols)
        return [Run(self.corpus.name, name, *fixed, setting_of(name, SETTING, num_tokens)) for name in names]

    def measurements(self) -> list[Speed]:
        """All measurements, grouped by their reference; within these groups, peers take turns."""
        options = self.options
        problems: list[tuple[str, str, int, int, list[str]]] = []
        if "speed" in options.parts:
            peers = [*options.layers, "sdpa"]
            lengths = LENGTHS[:1] if options.quick else LENGTHS
            problems += [("speed", graph, n, BATCH, peers) for graph in ("full", "causal", "window") for n in lengths]
            batch, longest = RAGGED
            batch = max(batch // 16, 1) if options.quick else batch
            padded = [name for peer in peers for name in ((peer, "gattn-padded") if peer == "gattn" else (peer,))]
            problems.append(("speed", "ragged", longest, batch, padded))
            problems.append(("speed", "full", SHORT, 1, peers))
            problems.append(("speed", "decode", DECODED, 1, options.layers))
        if "graphs" in options.parts and "gattn" in options.layers:
            sizes = NODES[:2] if options.quick else NODES
            problems += [("graphs", graph, n, 1, ["gattn"]) for graph in GRAPH_COLOURS for n in sizes]
        fixed = (options.threads, options.repeats, options.seconds)
        return [
            Speed(part, graph, length, peer, batch, CHANNELS, HEADS, number, *fixed)
            for part, graph, length, batch, peers in problems
            for number in range(options.rounds)
            for peer in peers
        ]

    def run(self, cases: Sequence[Run | Speed]) -> Generator[Message[Run | Speed], None, None]:
        """Trains or measures."""
        runs = [case for case in cases if isinstance(case, Run)]
        if runs:
            yield from train(runs, self.corpus, self.options.out)
        yield from measured([case for case in cases if isinstance(case, Speed)], self.options.timeout)

    def report(self, rows: dict[Run | Speed, Row]) -> None:
        """A table and a picture per part, and the texts that the language models wrote."""
        everything = list(rows.values())
        if everything[0].get("part") == "lm":
            texts = {f"lm-{row['layers']}.txt": row["sample"].strip("\n") + "\n" for row in everything}
            files = {"lm.png": draw_curves(everything), **texts}
            title = "Language model on tiny Shakespeare"
            notes = MIXED_NOTES if is_mixed(everything) else LM_NOTES
            self.table("lm", title, everything, lm_lines(everything), notes, files)
            return
        report = Report({case: row for case, row in rows.items() if isinstance(case, Speed)})
        if some := report.of("speed").values():
            remarks = [*speed_remarks(report), *report.failures("speed"), *SPEED_NOTES]
            title = "Multi-head attention on this machine's CPU"
            self.table("speed", title, some, speed_lines(report), remarks, {"speed.png": draw_speed(report)})
        if some := report.of("graphs").values():
            remarks = [*report.failures("graphs"), *GRAPH_NOTES]
            title = "One layer on four graphs"
            self.table("graphs", title, some, graph_lines(report), remarks, {"graphs.png": draw_graphs(report)})

    def table(
        self,
        name: str,
        title: str,
        rows: Collection[Row],
        lines: Sequence[Line],
        remarks: Sequence[str],
        files: Mapping[str, Figure | str],
    ) -> None:
        """Publishes a part."""
        remarks = [*remarks, *machines(rows, (*VERSIONS, "python"), ", {threads} thread(s)")]
        headings = {column: column.replace("forward + backward", "fwd+bwd") for column in lines[0]}
        self.publish(title, lines, remarks, files, f"{name}.md", headings)


if __name__ == "__main__":
    Sequences.main()
