"""Speed and memory of graph attention, side by side with PyG and, if installed, DGL: `python -m benchmarks.kernels`.

There are two parts. *attention* is attention alone, from projected features to the output, including autograd,
allocation and graph look-up. *layer* is the first layer of a network, with and without edge features: it has 128 input
channels that need no gradient, includes the projections, and has the same weights for all peers. There are two modes:
forward, and forward + backward to all inputs that need a gradient. `--device cuda` measures on a GPU.

On the CPU, everything is measured twice: under glibc's allocator with its default settings (`default`), and with
settings that make it keep freed memory (`kept`).

Duration: 25 to 50 minutes; with `--quick`: 2 minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import platform
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch_geometric.utils import remove_self_loops

import gattn
from benchmarks import kernel_compiled, pyg_peers
from benchmarks.framework import measuring
from benchmarks.framework.benchmark import Benchmark
from benchmarks.framework.measuring import measured
from benchmarks.framework.options import MOST, add_allocator, add_only, allocators, fill, folder, seconds, unique, whole
from benchmarks.framework.processes import BenchmarkError, Message
from benchmarks.framework.results import Row
from benchmarks.kernel_cases import (
    ATTENTION_ONLY,
    BACKENDS,
    CONVS,
    DTYPES,
    EDGE_FEATURES,
    GPU_PEERS,
    PARTS,
    PEERS,
    SHAPES,
    SMALL,
    USUAL_DTYPES,
    USUAL_SHAPES,
    Case,
    Shape,
    import_dgl,
)
from benchmarks.kernel_compiled import ARCHITECTURES, Compilation, compilations, compiled
from benchmarks.kernel_reports import Report, draw_roofline, draw_speedup, notes
from benchmarks.pyg_peers import USUAL


def is_usual(case: Case) -> bool:
    """Whether a case is measured unless peers are named: what takes long is measured where it tells most.

    These are all forms of PyG with memory kept and without edge features; on *arxiv*, only two of them and only GAT.
    """
    if case.device != "cpu" or case.peer == "gattn":
        return case.shape.name != "arxiv" or not case.edge_features
    if case.shape.name == "arxiv":
        return case.layer == "gat" and not case.edge_features and case.peer in USUAL["default"]
    return case.peer in USUAL["default"] or (case.allocator == "kept" and not case.edge_features)


class Kernels(Benchmark[Case | Compilation]):
    """Measures each peer on each shape."""

    name = "kernels"
    quick: ClassVar = {
        "peers": [peer for peer in PEERS if "compile" not in peer],
        "allocator": "default",
        "repeats": 3,
        "seconds": 0.1,
        "threads": 1,
    }

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the options."""
        add = parser.add_argument
        text = f"graphs and widths (default: on a CPU {' and '.join(USUAL_SHAPES)}, on a GPU all)"
        add("--shapes", nargs="+", choices=SHAPES, help=text)
        add("--device", default="cpu", choices=BACKENDS, help="device that computes (default: cpu)")
        add("--layers", nargs="+", default=CONVS, choices=CONVS, help="kinds of attention layer (default: all)")
        text = (
            "implementations to measure (default: those that are installed, except the slowest ones where others tell "
            "as much)"
        )
        add("--peers", nargs="+", choices=(*PEERS, *GPU_PEERS), help=text)
        add("--parts", nargs="+", default=PARTS, choices=PARTS, help="what is measured (default: both)")
        text = "whether whole layers have edge features; hub graphs have no whole layers (default: both)"
        add("--edge-features", choices=EDGE_FEATURES, help=text)
        text = (
            "number types; on a CPU, all but float32 are measured for gattn only (default: float32, and for attention "
            "on mid also bfloat16, and on a GPU float16; with --compile-only float32 and bfloat16)"
        )
        add("--dtypes", nargs="+", choices=DTYPES, help=text)
        add_allocator(parser, None, "both; with --quick or on a GPU, default")
        text = "number of threads (default: PyTorch's, here %(default)s)"
        add("--threads", type=whole(1, MOST), default=torch.get_num_threads(), help=text)
        text = "largest number of timed calls (default: %(default)s)"
        add("--repeats", type=whole(1, 10**9), default=30, help=text)
        least = f"seconds after which no further calls are timed, once there are {measuring.MIN_REPEATS}"
        add("--seconds", type=seconds, default=1.5, help=f"{least} (default: %(default)s)")
        text = "seconds after which a process is ended (default: %(default)s)"
        add("--timeout", type=seconds, default=1200.0, help=text)
        add_only(parser)
        text = "folder of results, tables and pictures (default: %(default)s)"
        add("--out", type=folder, default=Path("runs/kernels"), help=text)
        text = "compile the GPU kernels, --threads at a time, and report on the compiled code; this needs no GPU"
        add("--compile-only", action="store_true", help=text)
        text = "compute capabilities for --compile-only (default: all)"
        add("--architectures", nargs="+", type=int, choices=ARCHITECTURES, default=ARCHITECTURES, help=text)

    @classmethod
    def check_options(cls, options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        """Fills in defaults, including those of `--quick`, and finds the shapes."""
        if options.compile_only:
            if options.device != "cuda":
                parser.error("--compile-only works only with --device cuda: the CPU kernels are compiled already")
            if importlib.util.find_spec("triton") is None:
                parser.error("--compile-only needs Triton, which is not installed")
            for name in ("shapes", "peers", "allocator", "repeats", "seconds"):
                if getattr(options, name) != parser.get_default(name):
                    parser.error(f"--{name} is for measurements, but --compile-only makes none")
        elif options.device == "cuda" and not torch.cuda.is_available():
            parser.exit(2, "error: --device cuda needs a GPU that PyTorch can use, but there is none\n")
        if options.compile_only:
            fill(options, {"dtypes": USUAL_DTYPES["cpu"]})
        if options.device != "cpu" or platform.libc_ver()[0] != "glibc":
            if options.allocator in ("both", "kept"):
                parser.error(f"--allocator {options.allocator} works only on the CPU, if the C library is glibc")
            options.allocator = "default"
        options.is_usual = options.peers == parser.get_default("peers")
        peers = PEERS if options.device == "cpu" else (*PEERS, *GPU_PEERS)
        fill(options, {"peers": peers, "allocator": "both"})
        if options.shapes is None and options.quick:
            options.shapes = [*SHAPES["cora"], SMALL]
        else:
            usual = USUAL_SHAPES if options.device == "cpu" else SHAPES
            options.shapes = [shape for name in unique(options.shapes or usual) for shape in SHAPES[name]]
        if options.edge_features is not None and all(shape.hub is not None for shape in options.shapes):
            parser.error("--edge-features is for whole layers, but hub graphs have none")

    def find_peers(self) -> list[str]:
        """The peers that can be imported."""
        modules = {peer: "torch_scatter" for peer in PEERS if "scatter" in peer} | {"dgl": "dgl"}
        modules["flex-compile"] = "torch.nn.attention.flex_attention"
        for name in self.options.peers:
            try:
                import_dgl() if name == "dgl" else importlib.import_module(modules.get(name, "gattn"))
            except ModuleNotFoundError as error:
                is_there = error.name != modules[name]
                self.skipped[name] = f"cannot be imported: {error}" if is_there else "not installed"
            except Exception as error:  # builds for another PyTorch raise many kinds of errors
                self.skipped[name] = f"cannot be imported: {str(error).splitlines()[0]}"
        return [name for name in unique(self.options.peers) if name not in self.skipped]

    def find_shapes(self) -> list[Shape]:
        """The available shapes; those of data sets get their real size."""
        found = []
        for shape in self.options.shapes:
            if shape.dataset is not None:
                try:
                    data = gattn.datasets.load(shape.dataset)
                except gattn.datasets.DatasetUnavailableError as error:
                    self.skipped[shape.name] = str(error)
                    continue
                num_edges = remove_self_loops(data.edge_index)[0].size(1)
                shape = replace(shape, nodes=data.num_nodes, edges=num_edges)
            found.append(shape)
        return found

    def cases(self) -> Sequence[Case | Compilation]:
        """All measurements, grouped by their reference and, within these groups, by allocator."""
        options = self.options
        if options.compile_only:
            return compilations(options)
        peers = self.find_peers()
        cases: list[Case] = []
        fixed = (options.threads, options.repeats, options.seconds, options.device)
        for shape in self.find_shapes():
            parts = [("attention", False)] if shape.targets is None else []
            if shape.hub is None:
                parts += [("layer", has_features) for has_features in EDGE_FEATURES[options.edge_features or "both"]]
            found = []
            for (part, has_features), layer in itertools.product(parts, unique(options.layers)):
                is_mid = (shape.name, part) == ("mid", "attention")
                usual = USUAL_DTYPES[options.device] if is_mid else DTYPES[:1]
                kinds = itertools.product(unique(options.dtypes or usual), allocators(options), peers)
                for dtype, allocator, peer in kinds:
                    case = Case(shape, part, layer, has_features, dtype, peer, *fixed, allocator)
                    is_only_ours = shape.hub is not None or (dtype != "float32" and options.device == "cpu")
                    if (is_only_ours and peer != "gattn") or (part == "layer" and peer in ATTENTION_ONLY):
                        continue
                    if peer == "flex-compile" and layer != "transformer":
                        continue
                    if part in options.parts and (not options.is_usual or is_usual(case)):
                        found.append(case)
            cases += unique(case.gather() for case in found) + found
        if not any(case.has_reference for case in cases):
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.skipped.items())
            raise BenchmarkError(
                f"nothing can be measured: {reasons or 'these peers are not measured on these shapes'}"
            )
        return cases

    def run(self, cases: Sequence[Any]) -> Generator[Message[Any], None, None]:
        """Measures or compiles."""
        if self.options.compile_only:
            return compiled(cases, self.options.threads, self.options.timeout)
        return measured(cases, self.options.timeout)

    def report(self, rows: dict[Any, Row]) -> None:
        """The tables, of which the terminal shows a part, and the pictures."""
        if isinstance(next(iter(rows)), Compilation):
            kernel_compiled.report(self, rows)
        else:
            self._report(rows)

    def _report(self, rows: dict[Case, Row]) -> None:
        report = Report(rows)
        device = "GPU" if any(case.device != "cpu" for case in rows) else "CPU"
        lines, remarks = report.lines("forward_backward"), notes(rows, self.skipped)
        memory = [report.memory(case, row) for case, row in rows.items()]
        pictures = {"speedup.png": draw_speedup(report)}
        if report.rooflines():
            pictures["roofline.png"] = draw_roofline(report)
        files = {"forward.md": report.lines("forward"), "memory.md": memory}
        self.publish(
            f"Graph attention on this machine's {device}",
            lines,
            [*report.remarks(), *remarks],
            {**files, **pictures},
            headings={column: text for column, text in pyg_peers.headings(lines).items() if column != "dtype"},
            shorten=lambda line: {
                **line,
                "peer": line["peer"] + f", {line['dtype']}" * (line["dtype"] != "float32"),
                "layer": line["layer"].replace("edge features", "edges"),
            },
        )


if __name__ == "__main__":
    Kernels.main()
