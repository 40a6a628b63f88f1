"""Time and memory of graph attention on graphs of 10⁴ to 10⁸ edges: `python -m benchmarks.scale`.

It measures one GAT layer (100 → 4 × 32), and the training step of two (→ 4 × 32): forward, and backward from the logits
of 64 labelled nodes to all parameters. The graphs are random, with 20 edges per node and degrees that follow a power
law. *products* has as many nodes and edges as ogbn-products. *communities* and *shuffled* are the same graph of
communities with nodes numbered in order or at random, which shows what the order is worth. `--parts reordered` measures
the step before and after `gattn.graphs.reorder`, and the time that the ordering takes. Nothing is timed before the
logits and all gradients agree with float64, computed on the part of the graph that the labelled nodes can see.

Duration: 40 to 60 minutes; with `--quick`: 1 minute.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, NotRequired

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch_geometric.utils import grid

import gattn
from benchmarks.framework import reports
from benchmarks.framework.benchmark import Benchmark
from benchmarks.framework.measuring import (
    Computation,
    Expected,
    Measured,
    Measurement,
    Times,
    budgets,
    limit_memory,
    measured,
    peak_of_process,
    timed,
    total_memory,
)
from benchmarks.framework.options import add_measuring, unique, whole
from benchmarks.framework.processes import BenchmarkError, Message
from benchmarks.framework.results import ALLOCATORS, MEMORY, VERSIONS, Row
from benchmarks.kernel_cases import Shape, draw_power_law, import_dgl

HEADS, CHANNELS, IN_CHANNELS = 4, 32, 100
LABELLED = 64
EDGES_PER_NODE = 20
COMMUNITY = 500
"""The number of nodes of a community."""
SEED = 0
GIB = 2**30


@dataclass(frozen=True)
class Graph:
    """A random graph."""

    name: str
    nodes: int
    edges: int
    kind: str = "power law"
    """`"power law"`; `"communities"`, whose nodes are numbered one community after the other; `"shuffled"`, the same
    numbered at random; `"mesh"`, a grid with diagonals, numbered at random; or the data set `"photo"`."""


def sized(name: str, power: int, kind: str = "power law") -> Graph:
    """A graph with ten to this power edges."""
    return Graph(name, 10**power // EDGES_PER_NODE, 10**power, kind)


GRAPHS = {
    graph.name: graph
    for graph in (
        *(sized(f"1e{power}", power) for power in range(4, 9)),
        Graph("products", 2_449_029, 123_718_280),
        sized("communities", 7, "communities"),
        sized("shuffled", 7, "shuffled"),
    )
}


def unordered(nodes: int) -> list[Graph]:
    """The graphs that are reordered, of about this many nodes, and the data set."""
    side = math.isqrt(nodes)
    return [
        Graph("power law", nodes, EDGES_PER_NODE * nodes),
        Graph("mesh", side**2, (3 * side - 2) ** 2, "mesh"),
        Graph("communities", nodes, EDGES_PER_NODE * nodes, "shuffled"),
        Graph("photo", 7_650, 238_162, "photo"),
    ]


UNORDERED, QUICK = 150_000, 1_500
"""The number of nodes of graphs that are reordered, and the one with `--quick`."""
METHODS = ("none", "rcm", "metis", "degree")
PEERS = ("gattn", "pyg", "dgl")
PARTS = {"gather": 0, "layer": 1, "step": 2, "recomputed": 2, "reordered": 2}
"""What is measured, and its number of layers: the sum of one row of 128 channels per edge (the unit of time); a layer;
a step; a step whose backward pass recomputes everything between the layers' inputs; and a step before and after
reordering."""
LINES = {"layer": "--", "step": "-", "recomputed": ":"}
STYLES = {"gattn": reports.BLUE, "pyg": reports.ORANGE, "dgl": reports.GREEN, "embedding_bag": reports.BLACK}


class Result(Measured):
    """The columns of a measurement."""

    forward_backward: NotRequired[Times]
    """Only the unit lacks it."""
    process_bytes: int
    """The largest resident memory of the process since the first call, including code and inputs."""


class Network(torch.nn.Module):
    """GAT layers with ELU between them.

    Args:
        make: Creates a layer with this number of input channels.
        num_layers: The number of layers.
        recomputes: Whether only the layers' inputs are stored for the backward pass.
    """

    def __init__(self, make: Callable[[int], torch.nn.Module], num_layers: int, recomputes: bool):
        super().__init__()
        self.recomputes = recomputes
        self.convs = torch.nn.ModuleList(
            [make(IN_CHANNELS if number == 0 else HEADS * CHANNELS) for number in range(num_layers)]
        )

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        """The features after the last layer, `[N, 128]`."""
        layer = functools.partial(checkpoint, self._layer, use_reentrant=False) if self.recomputes else self._layer
        for number in range(len(self.convs)):
            x = layer(number, x, graph)
        return x

    def _layer(self, number: int, x: Tensor, graph: Any) -> Tensor:
        out: Tensor = self.convs[number](x, graph)
        return F.elu(out) if number + 1 < len(self.convs) else out


class DGLConv(torch.nn.Module):
    """DGL's layer with PyG's signature.

    Args:
        in_channels: Channels of the input.
    """

    def __init__(self, in_channels: int):
        super().__init__()
        self.conv = import_dgl().nn.GATConv(in_channels, CHANNELS, HEADS)

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        """The layer's output, `[N, 128]`."""
        out: Tensor = self.conv(graph, x).flatten(1)
        return out


LAYERS: dict[str, Callable[[int], torch.nn.Module]] = {
    "gattn": lambda channels: gattn.nn.GATConv(channels, CHANNELS, HEADS),
    "pyg": lambda channels: pyg.GATConv(channels, CHANNELS, HEADS),
    "dgl": DGLConv,
}
OF_DGL = {"lin.weight": "conv.fc.weight", "att_src": "conv.attn_l", "att_dst": "conv.attn_r", "bias": "conv.bias"}
"""The names of a layer's parameters, and their names in DGL."""


def parameters_of(network: Network) -> dict[str, Tensor]:
    """The parameters of all layers, with the same names for every peer."""
    return {
        f"{number}.{name}": conv.get_parameter(of_dgl if isinstance(conv, DGLConv) else name)
        for number, conv in enumerate(network.convs)
        for name, of_dgl in OF_DGL.items()
    }


def neighbourhood(edge_index: Tensor, labelled: Tensor, hops: int, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """The part of a graph that determines the outputs of some nodes after this many layers.

    Unlike PyG's `k_hop_subgraph`, it leaves out edges among the outermost nodes, which are most edges on a power law.

    Returns:
        The nodes; the edges, numbered by position among these nodes; and the positions of the labelled nodes.
    """
    source, target = edge_index
    is_inner = torch.zeros(num_nodes, dtype=torch.bool)
    is_inner[labelled] = True
    for _ in range(hops - 1):
        is_inner[source[is_inner[target]]] = True
    edges = edge_index[:, is_inner[target]]
    nodes = torch.cat([edges.flatten(), labelled]).unique()
    return nodes, torch.searchsorted(nodes, edges), torch.searchsorted(nodes, labelled)


@dataclass(frozen=True)
class Case(Measurement):
    """One measurement."""

    result = Result

    graph: Graph
    part: str
    peer: str
    threads: int
    repeats: int
    seconds: float
    allocator: str
    memory: int
    """The limit of a process's memory, in GiB."""

    def __str__(self) -> str:
        return f"{self.graph.name} {self.part} {self.peer}" + f", {self.allocator} memory"

    @property
    def has_reference(self) -> bool:
        """Whether this is anything but the unit."""
        return self.part != "gather"

    def problem(self) -> tuple[object, ...]:
        """What is the same for all cases that must have the same result."""
        return self.graph, self.part

    @property
    def whole(self) -> Case | None:
        """A step has the layer as its first, and one that recomputes does all that one does that does not."""
        wholes = {"layer": "step", "step": "recomputed"}
        return replace(self, part=wholes[self.part]) if self.part in wholes else None

    def references(self) -> dict[str, dict[str, Expected]]:
        """The results of gattn's reference on the labelled nodes' neighbourhood."""
        edge_index, labelled = self._draw()
        nodes, edges, places = neighbourhood(edge_index, labelled, PARTS[self.part], self.graph.nodes)
        del edge_index
        x = self._features()[nodes]
        with gattn.backend("reference"):
            exact, rounded = (
                computed.compared(computed.forward_backward())
                for computed in (
                    self._build("gattn", x.to(dtype), edges, places) for dtype in (torch.float64, torch.float32)
                )
            )
        return {"": budgets(exact, rounded, torch.float32, int(edges[1].bincount().max()) + 1, edges.size(1))}

    def computation(self) -> Computation:
        """The computation of the peer."""
        small = replace(self, graph=Graph("", LABELLED, 4 * LABELLED))
        small._drawn().forward_backward()
        return self._drawn()

    def measure(self, reference: Path | None) -> Row:
        """Also measures the memory of the whole process, and enforces the limit."""
        limit_memory(self.memory * GIB)
        row = super().measure(reference)
        return {**row, "process_bytes": peak_of_process()} if row["outcome"] == "ok" else row

    def _drawn(self) -> Computation:
        edge_index, labelled = self._draw()
        if self.part == "gather":
            return self._gather(edge_index)
        return self._build(self.peer, self._features(), edge_index, labelled)

    def _draw(self) -> tuple[Tensor, Tensor]:
        """The edges and the labelled nodes."""
        generator, graph = torch.Generator().manual_seed(SEED), self.graph
        if graph.kind == "power law":
            edge_index = draw_power_law(Shape(graph.name, graph.nodes, graph.edges, HEADS, CHANNELS), generator)
        elif graph.kind == "photo":
            edge_index = gattn.datasets.load("photo").edge_index
        elif graph.kind == "mesh":
            edge_index = grid(math.isqrt(graph.nodes), math.isqrt(graph.nodes))[0]
        else:
            target = torch.randint(graph.nodes, (graph.edges,), generator=generator)
            source = target // COMMUNITY * COMMUNITY + torch.randint(COMMUNITY, (graph.edges,), generator=generator)
            edge_index = torch.stack([source, target])
        if graph.kind in ("shuffled", "mesh"):
            edge_index = torch.randperm(graph.nodes, generator=generator)[edge_index]
        return edge_index, torch.randperm(graph.nodes, generator=generator)[:LABELLED]

    def _features(self) -> Tensor:
        return torch.randn(self.graph.nodes, IN_CHANNELS, generator=torch.Generator().manual_seed(SEED))

    def _build(self, peer: str, x: Tensor, edge_index: Any, labelled: Tensor) -> Computation:
        torch.manual_seed(SEED)
        network, drawn = (
            Network(LAYERS[name], PARTS[self.part], self.part == "recomputed") for name in (peer, "gattn")
        )
        leaves = parameters_of(network)
        for name, parameter in parameters_of(drawn).items():
            torch.nn.init.normal_(parameter, std=1 if name.endswith("bias") else parameter.size(-1) ** -0.5)
            leaves[name].data.copy_(parameter.data)
        graph: Any = edge_index
        if peer == "dgl":
            dgl = import_dgl()
            dgl.utils.set_num_threads(self.threads)
            graph = dgl.add_self_loop(dgl.graph(tuple(edge_index), num_nodes=x.size(0)))
        network.to(x.dtype)
        grad = torch.randn(LABELLED, HEADS * CHANNELS, generator=torch.Generator().manual_seed(SEED)).to(x.dtype)
        return Computation(lambda: network(x, graph)[labelled], leaves, grad)

    def _gather(self, edge_index: Tensor) -> Computation:
        source, target = edge_index
        source = source[target.argsort(stable=True)]
        degree = target.bincount(minlength=self.graph.nodes)
        value = torch.randn(self.graph.nodes, HEADS * CHANNELS)
        offsets = degree.cumsum(0) - degree
        return Computation(lambda: F.embedding_bag(source, value, offsets, mode="sum"), {}, value)


class OrderResult(Result):
    """The columns of a measurement of an order."""

    ordering: NotRequired[Times]
    """Seconds that the ordering takes; lacking where there is none."""
    scipy: str
    pymetis: NotRequired[str]


@dataclass(frozen=True)
class Reordered(Case):
    """The step on a graph whose nodes have been renumbered; its results must not change."""

    result = OrderResult  # type: ignore[assignment] # with further columns

    method: str

    def __str__(self) -> str:
        return f"{self.graph.name} in the order of {self.method}, {self.allocator} memory"

    def measure(self, reference: Path | None) -> Row:
        """Also measures the ordering."""
        row = super().measure(reference)
        packages = [name for name in ("scipy", "pymetis") if importlib.util.find_spec(name)]
        row |= {name: version(name) for name in packages}
        if row["outcome"] == "ok" and self.method != "none":
            row["ordering"] = timed(functools.partial(self._reorder, self._draw()[0]), self.repeats, self.seconds)
        return row

    def _drawn(self) -> Computation:
        edge_index, labelled = self._draw()
        x = self._features()
        if self.method != "none":
            order = self._reorder(edge_index)
            x, edge_index, labelled = x[order.permutation], order.edge_index, order.inverse[labelled]
        return self._build(self.peer, x, edge_index, labelled)

    def _reorder(self, edge_index: Tensor) -> gattn.graphs.Reordered:
        return gattn.graphs.reorder(edge_index, self.graph.nodes, self.method)


class Scale(Benchmark[Case]):
    """Measures each peer on graphs of growing size."""

    name = "scale"
    quick: ClassVar = {
        "graphs": ["1e4"],
        "parts": list(PARTS),
        "allocators": ["default"],
        "repeats": 3,
        "seconds": 0.1,
        "threads": 1,
    }

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the options."""
        add = parser.add_argument
        text = "graphs by number of edges or name (default: all but products and 1e8, which need much memory and time)"
        default = ["1e4", "1e5", "1e6", "1e7", "communities", "shuffled"]
        add("--graphs", nargs="+", default=default, choices=GRAPHS, help=text)
        text = "what is measured (default: all but reordered, which has four graphs of its own)"
        default = [part for part in PARTS if part != "reordered"]
        add("--parts", nargs="+", default=default, choices=PARTS, help=text)
        text = "orders of nodes in reordered (default: all for which there is a package)"
        add("--methods", nargs="+", choices=METHODS, help=text)
        text = "libraries whose layers are measured (default: all that are installed)"
        add("--peers", nargs="+", choices=PEERS, help=text)
        text = "how glibc treats freed memory (default: default kept)"
        add("--allocators", nargs="+", default=list(ALLOCATORS), choices=MEMORY, help=text)
        text = "GiB that a process may allocate (default: nine tenths of the machine's, here %(default)s)"
        add("--memory", type=whole(1, 2**20), default=max(int(0.9 * total_memory() / GIB), 1), help=text)
        add_measuring(parser, cls.name, repeats=5)

    def peers(self) -> list[str]:
        """The installed peers.

        Raises:
            BenchmarkError: If a requested peer is not installed.
        """
        peers = unique(self.options.peers or PEERS)
        if "dgl" in peers:
            try:
                import_dgl()
            except Exception as error:  # its libraries raise many kinds of errors
                if self.options.peers:
                    raise BenchmarkError(f"DGL cannot be imported: {error}") from error
                self.skip("dgl", f"DGL cannot be imported: {error}")
                peers.remove("dgl")
        return peers

    def cases(self) -> list[Case]:
        """All cases, graph by graph, starting with the smallest; then those of reordered graphs."""
        options = self.options
        parts = [part for part in unique(options.parts) if part != "reordered"]
        fixed, peers = (options.threads, options.repeats, options.seconds), self.peers() if parts else []
        cases = [
            Case(GRAPHS[name], part, peer, *fixed, allocator, options.memory)
            for name in sorted(unique(options.graphs), key=list(GRAPHS).index)
            for part in parts
            for peer in (peers if part != "gather" else ["embedding_bag"])
            for allocator in unique(options.allocators)
        ]
        if "reordered" not in options.parts:
            return cases
        methods = self.methods()
        return cases + [
            Reordered(graph, "reordered", "gattn", *fixed, allocator, options.memory, method)
            for graph in self.unordered()
            for allocator in unique(options.allocators)
            for method in methods
        ]

    def methods(self) -> list[str]:
        """The orders that can be computed.

        Raises:
            BenchmarkError: If METIS is requested but `pymetis` is not installed.
        """
        methods = unique(self.options.methods or METHODS)
        if "metis" in methods and importlib.util.find_spec("pymetis") is None:
            reason = "METIS needs its package: pip install pymetis"
            if self.options.methods:
                raise BenchmarkError(reason)
            self.skip("metis", reason)
            methods.remove("metis")
        return methods

    def unordered(self) -> list[Graph]:
        """The graphs that are reordered, without the data set if it is missing."""
        graphs = unordered(QUICK if self.options.quick else UNORDERED)
        try:
            gattn.datasets.load("photo")
        except gattn.datasets.DatasetUnavailableError as error:
            self.skip("photo", str(error))
            graphs = [graph for graph in graphs if graph.kind != "photo"]
        return graphs

    def run(self, cases: Sequence[Case]) -> Generator[Message[Case], None, None]:
        """Measures."""
        return measured(cases, self.options.timeout)

    def report(self, rows: dict[Case, Row]) -> None:
        """One line per measurement, and the curves."""
        if isinstance(next(iter(rows)), Reordered):
            self.report_orders(rows)
            return
        lines = []
        for case, row in rows.items():
            other = rows.get(replace(case, peer="pyg"))
            unit = rows.get(replace(case, part="gather", peer="embedding_bag"))
            mode = "forward" if case.part == "gather" else "forward_backward"
            lines.append(
                {
                    "graph": case.graph.name,
                    "nodes": f"{case.graph.nodes:,}",
                    "edges": f"{case.graph.edges:,}",
                    "part": case.part,
                    "layers": case.peer,
                    "memory": case.allocator,
                    "forward, ms": reports.quartiles(row, "forward"),
                    "forward + backward, ms": reports.quartiles(row, "forward_backward"),
                    "× PyG": reports.factor(other, row, mode),
                    "gathers": reports.factor(row, unit, mode, own_mode="forward", unit=""),
                    "exponent": exponent(case, rows),
                    "peak, MB": reports.megabytes(row),
                    "bytes/edge": f"{row['peak_bytes'] / case.graph.edges:.0f}" if "peak_bytes" in row else "–",
                    "process, MB": reports.megabytes(row, "process_bytes"),
                }
            )
        remarks = reports.machines(rows.values(), (*VERSIONS, "python"), ", {threads} thread(s), {memory} GiB at most")
        remarks += [
            "Times are medians with quartiles. Gathers are times in units of one embedding_bag, which sums one row per "
            "edge.",
            "The exponent is that of the growth of time with the edges, from the graph a tenth as large.",
            "The peak is that above the inputs in the first forward + backward, including the preparation of the "
            "graph. Process is the largest resident memory from then on, including code and inputs.",
            *(f"Not run: {reason}" for reason in self.skipped.values()),
        ]
        self.publish("Attention on large graphs", lines, remarks, {"scale.png": draw(rows)})

    def report_orders(self, rows: dict[Case, Row]) -> None:
        """One line per order of a graph."""
        lines = []
        for case, row in rows.items():
            assert isinstance(case, Reordered)
            given = rows.get(replace(case, method="none"))
            lines.append(
                {
                    "graph": case.graph.name,
                    "nodes": f"{case.graph.nodes:,}",
                    "edges": f"{case.graph.edges:,}",
                    "memory": case.allocator,
                    "order": case.method,
                    "ordering, ms": reports.quartiles(row, "ordering"),
                    "step, ms": reports.quartiles(row, "forward_backward"),
                    "speed": reports.factor(given, row, "forward_backward", ".2f"),
                    "pays off after, steps": reports.mark(
                        pays_off(
                            reports.median(row, "ordering"),
                            reports.median(given, "forward_backward"),
                            reports.median(row, "forward_backward"),
                        ),
                        row,
                        given,
                    ),
                }
            )
        packages = (*VERSIONS, "python", "scipy", "pymetis")
        remarks = reports.machines(rows.values(), packages, ", {threads} thread(s), {memory} GiB at most")
        remarks += [
            "Times are medians with quartiles. A step is forward + backward.",
            "Speed is relative to the graph as it is given, whose nodes are in random order except for photo's.",
            "The last column is the number of steps after which the ordering has saved the time that it took.",
            *(f"Not run: {reason}" for reason in self.skipped.values()),
        ]
        self.publish("Reordered graphs", lines, remarks, {}, name="reordered.md")


def pays_off(ordering: float | None, before: float | None, after: float | None) -> str:
    """The number of steps after which an ordering has saved the time that it took."""
    if ordering is None or before is None or after is None:
        return "–"
    return f"{math.ceil(ordering / (before - after)):,}" if after < before else "never"


def exponent(case: Case, rows: Mapping[Case, Row]) -> str:
    """The power of the number of edges with which time grew from the graph a tenth as large."""
    smaller = [
        graph for graph in GRAPHS.values() if graph.edges * 10 == case.graph.edges and graph.kind == case.graph.kind
    ]
    if not smaller:
        return "–"
    before, after = (rows.get(replace(case, graph=graph)) for graph in (smaller[0], case.graph))
    growth = reports.quotient(after, before, "forward" if case.part == "gather" else "forward_backward")
    return reports.mark(f"{math.log10(growth):.2f}" if growth else "–", after, before)


def draw(rows: Mapping[Case, Row]) -> Figure:
    """Time and memory against the number of edges; a cross marks where memory or time ran out."""
    figure = Figure(figsize=(9, 3.8), dpi=110, layout="constrained")
    panels = (
        ("forward + backward, s", lambda row: reports.median(row, "forward_backward")),
        ("peak above the inputs, GB", lambda row: row["peak_bytes"] / 1e9 if "peak_bytes" in row else None),
    )
    curve_of_sizes = [graph for name, graph in GRAPHS.items() if name.startswith("1e")]
    allocator = min((case.allocator for case in rows), key=list(MEMORY).index)
    for axis, (label, value) in zip(figure.subplots(1, 2), panels, strict=True):
        curves: dict[tuple[str, str], list[tuple[int, float | None]]] = {}
        for case, row in rows.items():
            if case.allocator == allocator and case.part != "gather" and case.graph in curve_of_sizes:
                curves.setdefault((case.peer, case.part), []).append((case.graph.edges, value(row)))
        for (peer, part), points in curves.items():
            found = sorted((edges, height) for edges, height in points if height is not None)
            if not found:
                continue
            style = {"color": STYLES[peer], "linestyle": LINES[part]}
            axis.plot(*zip(*found, strict=True), marker="o", markersize=3, label=f"{peer}, {part}", **style)
            beyond = min((edges for edges, height in points if height is None), default=None)
            if beyond is not None:
                axis.plot(beyond, found[-1][1] * beyond / found[-1][0], "x", color=STYLES[peer])
        axis.set(xlabel="edges", ylabel=label, xscale="log", yscale="log")
        axis.grid(alpha=0.25)
    if figure.axes[0].lines:
        figure.axes[0].legend(fontsize=8)
    figure.suptitle("× where memory or time ran out, at the height where the line would have gone on", fontsize=10)
    return figure


if __name__ == "__main__":
    Scale.main()
