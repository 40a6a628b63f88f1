"""Sharded graph attention on one, two and four processes: `python -m benchmarks.sharding`.

It measures time, bytes sent and memory per process for the training step of two GAT layers of `benchmarks.scale`, on
graphs that `gattn.distributed.shard` splits. *power law* is a graph with hubs, of which every process needs almost all
nodes; *mesh* is a grid whose nodes have eight neighbours. Nothing is timed before the logits and all gradients agree
with float64.

Duration: 5 minutes; with `--quick`: 1 minute.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from matplotlib.figure import Figure
from torch import Tensor
from torch_geometric.utils import grid

import gattn
from benchmarks import scale
from benchmarks.framework import reports
from benchmarks.framework.benchmark import Benchmark
from benchmarks.framework.measuring import MIN_REPEATS, Times, check, measured, peak_above, peak_of_process, spread
from benchmarks.framework.options import add_measuring, unique, whole
from benchmarks.framework.processes import BenchmarkError, Message, end_with_parent
from benchmarks.framework.reports import Line
from benchmarks.framework.results import VERSIONS, Row
from gattn.distributed import shard

SIDE = 333
GRAPHS = {"power law": scale.sized("power law", 6), "mesh": scale.Graph("mesh", SIDE**2, 9 * SIDE**2, "mesh")}
PARTITIONS = {"blocks": None, "metis": "metis"}


class Result(scale.Result):
    """The columns of a measurement; lists have one entry per process."""

    step: Times
    """Seconds from the common start of all processes until the last one ends."""
    processor_seconds: list[float]
    edges: list[int]
    fetched_rows: list[int]
    sent_bytes: list[int]
    """Bytes sent in one step."""
    peaks: list[int]
    """Bytes above the inputs in the first step."""


@dataclass(frozen=True)
class Case(scale.Case):
    """One measurement."""

    result = Result  # type: ignore[assignment] # with further columns

    partition: str
    processes: int

    def __str__(self) -> str:
        return f"{self.graph.name} {self.partition} {self.processes}"

    def measure(self, reference: Path | None) -> Row:
        """Starts the processes."""
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_measure, (self, str(reference), folder), self.processes)
            ranks = [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(self.processes)]
        row: Row = {"outcome": "ok", "reason": "", "peak_bytes": max(rank["peaks"] for rank in ranks)}
        row["process_bytes"] = max(rank["process_bytes"] for rank in ranks)
        for name, entry in ranks[0]["errors"].items():
            if not entry["error"] <= entry["budget"]:  # in this form, NaN fails
                return {"outcome": "WRONG", "reason": f"{name} is off by {entry['error']:.1e} of its largest element"}
        names = ("processor_seconds", "edges", "fetched_rows", "sent_bytes", "peaks")
        step = spread(ranks[0]["times"])
        return {**row, "forward": step, "step": step, **{name: [rank[name] for rank in ranks] for name in names}}

    def _draw(self) -> tuple[Tensor, Tensor]:
        if self.graph.kind != "mesh":
            return super()._draw()
        generator = torch.Generator().manual_seed(scale.SEED)
        side = math.isqrt(self.graph.nodes)
        return grid(side, side)[0], torch.randperm(self.graph.nodes, generator=generator)[: scale.LABELLED]


def _measure(rank: int, case: Case, reference: str, folder: str) -> None:
    """The work of one process, which writes its numbers to a file."""
    end_with_parent()
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=case.processes)
    torch.set_num_threads(case.threads)
    sent = _count_sent_bytes()
    mesh = dist.init_device_mesh("cpu", (case.processes,))
    edge_index, labelled = case._draw()
    graph = shard(gattn.SparseGraph(edge_index, *[case.graph.nodes] * 2), mesh, PARTITIONS[case.partition])
    place = torch.full((case.graph.nodes,), -1)
    place[graph.target_ids] = torch.arange(len(graph.target_ids))
    is_own = place[labelled] >= 0
    computation = case._build("gattn", graph.scatter(case._features()), graph, place[labelled][is_own])
    computation = replace(computation, grad=computation.grad[is_own])
    del edge_index, place

    def step() -> dict[str, Tensor]:
        results = {
            name: result.contiguous() for name, result in computation.forward_backward().items()
        }  # gloo requires this
        for name, grad in results.items():
            if name != "output":
                dist.all_reduce(grad)
        return results

    sent.clear()
    results, peak = peak_above(step)
    row: dict[str, Any] = {"peaks": peak, "sent_bytes": sum(sent)}
    row["edges"], row["fetched_rows"] = graph.num_edges, graph.traffic.received
    for name, own in (("output", results["output"]), ("output without autograd", computation.forward())):
        results[name] = own.new_zeros(len(labelled), own.size(1))
        results[name][is_own] = own
        dist.all_reduce(results[name])
    row["errors"] = check(results, torch.load(reference, weights_only=True)[case.kind])
    row["times"], processor = [], []
    ends = time.perf_counter() + case.seconds
    while goes_on(len(row["times"]), case.repeats, ends):
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        step()
        processor.append(time.process_time() - cpu)
        dist.barrier()
        row["times"].append(time.perf_counter() - start)
    row["process_bytes"] = peak_of_process()
    row["processor_seconds"] = statistics.median(processor)
    torch.save(row, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def goes_on(done: int, repeats: int, ends: float) -> bool:
    """Whether to repeat again, which the first process's clock decides for all of them."""
    decision = [done < MIN_REPEATS or (done < repeats and time.perf_counter() < ends)]
    dist.broadcast_object_list(decision)
    return decision[0]


def _count_sent_bytes() -> list[int]:
    """A list to which each following exchange adds the bytes that this process sends to others."""
    sent: list[int] = []
    send: Callable[..., Any] = dist.all_to_all_single

    def counted(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(input.nbytes)  # it sends none to itself
        return send(output, input, *args, **kwargs)

    dist.all_to_all_single = counted
    return sent


class Sharding(Benchmark[Case]):
    """Measures each graph, split in each way."""

    name = "sharding"
    quick: ClassVar = {"graphs": ["mesh"], "processes": [1, 2], "repeats": 3, "seconds": 0.1}

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the options."""
        add = parser.add_argument
        add("--graphs", nargs="+", default=list(GRAPHS), choices=GRAPHS, help="graphs that are measured (default: all)")
        text = "how nodes are divided: into contiguous blocks or by METIS (default: all)"
        add("--partitions", nargs="+", default=list(PARTITIONS), choices=PARTITIONS, help=text)
        text = "numbers of processes (default: 1 2 4)"
        add("--processes", nargs="+", type=whole(1, 64), default=[1, 2, 4], help=text)
        add_measuring(parser, cls.name, repeats=7)
        parser.set_defaults(threads=1)

    def cases(self) -> list[Case]:
        """All cases, graph by graph.

        Raises:
            BenchmarkError: If METIS is requested but `pymetis` is not installed.
        """
        options = self.options
        fixed = ("step", "gattn", options.threads, options.repeats, options.seconds, "kept", 64)
        cases = [
            Case(GRAPHS[name], *fixed, partition, processes)
            for name in unique(options.graphs)
            for partition in unique(options.partitions)
            for processes in unique(options.processes)
            if processes > 1 or partition == "blocks"
        ]
        if any(case.partition == "metis" for case in cases) and importlib.util.find_spec("pymetis") is None:
            raise BenchmarkError("METIS needs its package: pip install pymetis (--partitions blocks does not need it)")
        return cases

    def run(self, cases: Sequence[Case]) -> Generator[Message[Case], None, None]:
        """Measures."""
        return measured(cases, self.options.timeout)

    def report(self, rows: dict[Case, Row]) -> None:
        """One line per measurement."""
        lines = [line_of(case, row, rows) for case, row in rows.items()]
        remarks = reports.machines(rows.values(), (*VERSIONS, "python"), ", {threads} thread(s) per process")
        remarks += [
            "A step is forward, backward and the sum of all parameters' gradients. Times are medians with quartiles.",
            "Edges, rows fetched (in addition to those owned), processor time, bytes sent per step, and the memory of "
            "a step above its inputs are the largest over all processes. Numbers in brackets are relative to one "
            "process.",
        ]
        self.publish("Sharded attention", lines, remarks, {"sharding.png": draw(rows)})


def line_of(case: Case, row: Row, rows: Mapping[Case, Row]) -> Line:
    """The line of a measurement."""
    alone = rows.get(replace(case, partition="blocks", processes=1))

    def relative(text: str, name: str) -> str:
        if alone is None or case.processes == 1:
            return text
        share = f"{max(row[name]) / max(alone[name]):.2f}"
        return f"{text} ({reports.mark(share, row, alone) if name == 'processor_seconds' else share})"

    line: Line = {
        "graph": case.graph.name,
        "nodes": f"{case.graph.nodes:,}",
        "partition": case.partition if case.processes > 1 else "–",
        "processes": str(case.processes),
    }
    if row["outcome"] != "ok":
        return {**line, "step, ms": row["outcome"]}
    owned = case.graph.nodes / case.processes
    return {
        **line,
        "step, ms": reports.quartiles(row, "step"),
        "processor, ms": relative(f"{1e3 * max(row['processor_seconds']):.0f}", "processor_seconds"),
        "edges": relative(f"{max(row['edges']):,}", "edges"),
        "fetched": f"{max(row['fetched_rows']):,} ({max(row['fetched_rows']) / owned:.2f} per row owned)",
        "sent, MB": f"{max(row['sent_bytes']) / 1e6:.1f}",
        "sent by all, MB": f"{sum(row['sent_bytes']) / 1e6:.1f}",
        "peak, MB": relative(f"{max(row['peaks']) / 1e6:.0f}", "peaks"),
    }


def draw(rows: Mapping[Case, Row]) -> Figure:
    """Processor time, bytes sent and memory of the busiest process, against the number of processes."""
    figure = Figure(figsize=(10, 3.2), dpi=110, layout="constrained")
    panels = (
        ("processor time per step, s", "processor_seconds", 1.0),
        ("sent per step, MB", "sent_bytes", 1e-6),
        ("peak memory, MB", "peaks", 1e-6),
    )
    for place, (title, name, unit) in enumerate(panels, 1):
        axis = figure.add_subplot(1, len(panels), place)
        for (graph, colour), (partition, style) in (
            (graph, partition)
            for graph in zip(GRAPHS, (reports.BLUE, reports.ORANGE), strict=True)
            for partition in zip(PARTITIONS, ("-", "--"), strict=True)
        ):
            points = {
                case.processes: unit * max(row[name])
                for case, row in rows.items()
                if row["outcome"] == "ok" and case.graph.name == graph
                if case.partition == partition or case.processes == 1
            }
            if len(points) > 1:
                axis.plot(
                    *zip(*sorted(points.items()), strict=True),
                    style,
                    color=colour,
                    marker="o",
                    label=f"{graph}, {partition}",
                )
        axis.set(xlabel="processes", title=title, ylim=(0, None))
        axis.set_xticks(sorted({case.processes for case in rows}))
        axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
    figure.suptitle("The busiest process", fontsize=10)
    return figure


if __name__ == "__main__":
    Sharding.main()
