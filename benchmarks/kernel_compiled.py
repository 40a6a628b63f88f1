"""The compiled GPU kernels, without a GPU: `python -m benchmarks.kernels --device cuda --compile-only`.

Kernels are compiled for GPUs of several generations and disassembled. The report shows registers, spills and shared
memory. For the loop over edges, it also shows instructions, barriers, load widths and bytes, beside the least number of
bytes that must move. A model of time follows from these figures: the larger of bytes over bandwidth and instructions
over issue rate. **It is only a model:** no kernel has run here.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypedDict

import torch
from torch import Tensor

import gattn
from benchmarks.framework.benchmark import Benchmark, Case
from benchmarks.framework.processes import BenchmarkError, Message, Show, in_processes
from benchmarks.framework.reports import machines
from benchmarks.framework.results import VERSIONS, Row, kernels
from gattn.ops.backends.triton import Triton
from gattn.ops.backends.triton import forms as launcher

WIDTHS = ((8, 8), (8, 32), (4, 64), (16, 32), (16, 64), (1, 40), (3, 24), (6, 121), (1, 7))
"""Heads and channels: those of `benchmarks.kernels`, of wide Transformers, and of rows that are awkward to load."""

ARCHITECTURES = (80, 90, 100)
"""The compute capabilities of A100, of H100 and H200, and of B200."""

PASSES = ("forward", "backward_by_source", "backward_by_target")
ROWS = {"subtract_threshold": gattn.Sparsemax(), "keep_largest": gattn.TopK(16)}
"""Kernels that rewrite the logits of whole rows, and the distributions that need them; layers make no difference."""

REGISTERS, WARPS, BLOCKS = 65536, 64, 32
"""The resources of a multiprocessor."""

SHARED = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}
"""Bytes of shared memory per multiprocessor; each block needs `RESERVED` more than it requests."""
RESERVED = 1024


class GPU(NamedTuple):
    """The figures of a GPU in the model of time, from NVIDIA's data sheets."""

    architecture: int
    multiprocessors: int
    clock: float
    """GHz, boosted."""
    bandwidth: float
    """Bytes per second."""


GPUS = {
    "A100": GPU(80, 108, 1.41, 2.039e12),
    "H100": GPU(90, 132, 1.98, 3.35e12),
    "H200": GPU(90, 132, 1.98, 4.8e12),
}
ISSUED = 4
"""Warp instructions that a multiprocessor issues per cycle."""


#: By Little's law, the bytes that each multiprocessor of an H200 must have on their way to reach its memory's speed are
#: 18 KB, of an H100 15, and of an A100 11.
IN_FLIGHT = 16 * 1024


class Mesh(NamedTuple):
    """A graph with published times in ms, forward + backward in float16: of PyG, compiled PyG, and the authors."""

    sources: int
    targets: int
    edges: int
    times: dict[str, tuple[float, float, float]]


#: ECMWF's anemoi-core, pull request 631. It names the grids (N320, and an icosahedron refined six times with the edges
#: of all levels), but not the sizes. Edges follow from the grids (three neighbours per point to the grid; to the mesh,
#: by area at 0.6 of the longest edge), and 16 heads × 32 channels are a guess that fits its times.
MESHES = {
    "grid to mesh": Mesh(542_080, 40_962, 845_000, {"A100": (53.09, 15.86, 6.81), "H200": (23.97, 6.02, 2.77)}),
    "mesh": Mesh(40_962, 40_962, 327_660, {"A100": (20.32, 4.45, 1.82), "H200": (9.64, 1.69, 0.83)}),
    "mesh to grid": Mesh(40_962, 542_080, 1_626_240, {"A100": (100.44, 20.53, 11.19), "H200": (46.99, 8.16, 4.87)}),
}
MESH_LAYER = "transformer", 16, 32, True, "float16"


class Compiled(TypedDict):
    """The columns of a compilation, about a kernel and its loop over edges."""

    outcome: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    blocks: int
    """The number of blocks that fit on a multiprocessor."""
    barriers: int
    loads: str
    """The loop's load instructions, counted by bits per thread."""
    instructions: float
    """Warp instructions per edge."""
    bytes: float
    """Bytes loaded and stored per edge."""
    least_bytes: float
    in_flight: float
    """Bytes of loads that a multiprocessor waits for at once, with all the blocks that fit."""
    triton: str


@dataclass(frozen=True)
class Compilation(Case):
    """A kernel of a layer's attention, for one architecture."""

    result: ClassVar[type] = Compiled
    noun: ClassVar[str] = "compilations"

    layer: str
    heads: int
    channels: int
    edge_features: bool
    dtype: str
    architecture: int
    kernel: str

    def __str__(self) -> str:
        edges = " edge features" * self.edge_features
        return f"{self.layer} {self.heads}×{self.channels}{edges} {self.dtype} sm_{self.architecture} {self.kernel}"

    def machine(self) -> dict[str, str]:
        """Of this machine, which needs no GPU, but with the sources of the GPU kernels."""
        return {**super().machine(), "kernels": kernels("triton")}


def compilations(options: Any) -> list[Compilation]:
    """The cases of `--compile-only`."""
    features = {"both": (False, True), "with": (True,), "without": (False,)}[options.edge_features or "both"]
    widths = [width for width in WIDTHS if not options.quick or width in WIDTHS[:2]]
    variants: list[tuple[str, int, int, bool, str]] = [
        (layer, *width, has_features, dtype)
        for layer, width, has_features, dtype in itertools.product(options.layers, widths, features, options.dtypes)
    ]
    if "transformer" in options.layers and True in features and not options.quick:
        variants.append(MESH_LAYER)
    return [
        Compilation(*variant, architecture, kernel)
        for variant, architecture in itertools.product(variants, options.architectures)
        for kernel in (*PASSES, *(ROWS if variant[0] == "gat" and not variant[3] else ()))
    ]


def compiled(cases: Sequence[Compilation], workers: int, timeout: float) -> Generator[Message[Compilation], None, None]:
    """Compiles each case in its own process, without Triton's interpreter; see `in_processes`."""
    environment = {"TRITON_INTERPRET": "0"} if os.environ.get("TRITON_INTERPRET") == "1" else {}
    return in_processes(cases, _compile, workers=workers, timeout=timeout, environment=environment)


def _compile(case: Compilation, show: Show) -> Compiled:
    torch.set_num_threads(1)
    (launch,) = (launch for launch in launches(case) if launch.kernel.__name__ == case.kernel)
    return analyse(case, launch)


# Launches and machine code -------------------------------------------------------------------------------------------


class Launch(NamedTuple):
    """A kernel, and the arguments of its launch."""

    kernel: Any
    grid: tuple[int, int]
    warps: int
    arguments: dict[str, Any]


@contextmanager
def collected() -> Generator[list[Launch], None, None]:
    """Collects launches instead of making them; tensors on the CPU are treated as if they were on a GPU."""
    found: list[Launch] = []
    before = launcher.run, Triton.serves

    def collect(kernel: Any, grid: tuple[int, int], warps: int, arguments: dict[str, Any]) -> None:
        if min(grid) > 0:
            found.append(Launch(kernel, grid, warps, arguments))

    launcher.run, Triton.serves = collect, lambda self, device: True  # type: ignore[method-assign]
    try:
        yield found
    finally:
        launcher.run, Triton.serves = before  # type: ignore[method-assign]


def launches(case: Compilation) -> list[Launch]:
    """The launches of the layer's attention, forward and backward, on a small graph; its size does not affect code.

    Its distribution is the softmax, unless the case's kernel is of another.
    """
    dtype, nodes, edges = getattr(torch, case.dtype), 40, 200
    edge_index = torch.randint(nodes, (2, edges), generator=torch.Generator().manual_seed(0))

    def leaf(*size: int) -> Tensor:
        return torch.zeros(size, dtype=dtype, requires_grad=True)

    wide = (case.heads,) if case.layer == "gat" else (case.heads, case.channels)
    value = leaf(nodes, case.heads, case.channels)
    arguments: dict[str, Any] = {"query": leaf(nodes, *wide), "value": value, "graph": edge_index}
    arguments["key"] = leaf(nodes, *wide) if case.layer != "gatv2" else value
    if case.edge_features:
        arguments["edge"] = leaf(edges, *wide)
        if case.layer == "transformer":
            arguments["edge_value"] = arguments["edge"]
    vector = leaf(case.heads, case.channels)
    arguments["score"] = {
        "gat": lambda: gattn.GATScore(),
        "gatv2": lambda: gattn.AdditiveScore(vector),
        "transformer": lambda: gattn.DotScore(),
    }[case.layer]()
    with collected() as found:
        attend: Any = gattn.attend
        attend(**arguments, distribution=ROWS.get(case.kernel, "softmax"), backend="triton").sum().backward()
    return found


def build(launch: Launch, architecture: int) -> Any:
    """Compiles a kernel as a launch would, including the alignment of its arguments."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    kernel, target = launch.kernel, GPUTarget("cuda", architecture, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(**launch.arguments)
    options, signature, constants, attributes = kernel._pack_args(
        backend, {"num_warps": launch.warps}, bound, specialization, {}
    )
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=options.__dict__)


def analyse(case: Compilation, launch: Launch) -> Compiled:
    """Compiles a kernel and reads the compiled code."""
    import triton

    binary = build(launch, case.architecture)
    usage, code = disassembled(binary.asm["cubin"])
    registers, stack, shared, local = (
        int(re.findall(rf"{name}:(\d+)", usage)[0]) for name in ("REG", "STACK", "SHARED", "LOCAL")
    )
    loop = edge_loop(code)
    loads: dict[str, int] = {}
    for line in loop:
        if found := re.search(r"\bLDG\.E(?:\.\w+)*", line):
            width = re.search(r"\.(U8|U16|S8|S16|64|128)\b", found[0])
            bits = "32" if width is None else re.sub(r"\D", "", width[1])
            loads[bits] = loads.get(bits, 0) + 1
    arguments = launch.arguments
    steps = _edges_per_step(case.kernel)
    shares = launch.grid[1] / (_edges_at_once(arguments) * steps)  # programs per edge
    moved = moved_bytes(binary.asm["ttir"], arguments, launch.grid[1])
    blocks = _blocks_with_room(case.architecture, registers, shared, launch.warps)
    return {
        "outcome": "ok",
        "registers": registers,
        "spilled_bytes": stack + local,
        "shared_bytes": shared,
        "blocks": blocks,
        "barriers": sum("BAR." in line for line in loop),
        "loads": ", ".join(f"{-(-loads[bits] // steps)} × {bits}" for bits in sorted(loads, key=int)),
        "instructions": len(loop) * launch.warps * shares,
        "bytes": moved / (steps + 1) if steps > 1 else moved,  # an unrolled loop has another for the rest
        "least_bytes": least_bytes(case),
        "in_flight": bytes_in_flight(loop) * launch.warps * blocks,
        "triton": triton.__version__,
    }


def disassembled(cubin: bytes) -> tuple[str, str]:
    """What a kernel uses, and its machine code, as Triton's tools report them."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        outputs = [
            subprocess.run([tools / tool, option, path], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        ]
    return outputs[0], outputs[1]


def edge_loop(code: str) -> list[str]:
    """The instructions of the innermost loop that loads from memory, or of the longest one if there are several."""
    lines, labels, loops = list[str](), dict[str, int](), list[tuple[int, int]]()
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif re.match(r"\s*/\*[0-9a-f]+\*/", line):
            lines.append(line)
            target = re.search(r"\bBRA\S*\s.*`\((\.L_x_\d+)\)", line)
            if target is not None and labels.get(target[1], len(lines)) < len(lines) - 1:
                loops.append((labels[target[1]], len(lines)))
    # A jump back over an exit returns from the code of diverged threads.
    loops = [(a, b) for a, b in loops if not any("EXIT" in line for line in lines[a:b])]
    loading = [(a, b) for a, b in loops if any("LDG" in line for line in lines[a:b])]
    innermost = [x for x in loading if not any(y != x and x[0] <= y[0] and y[1] <= x[1] for y in loading)]
    first, last = max(innermost, key=lambda x: x[1] - x[0])
    return lines[first:last]


def bytes_in_flight(loop: Sequence[str]) -> int:
    """The bytes that a warp has asked for at once: of the loads issued until one of them, or a later one, is used."""
    pending, most = list[tuple[set[int], int]](), 0
    for line in loop:
        operands = line.split("*/", 1)[-1].split(";")[0]
        load = re.search(r"\bLDG\.E\S*\s+R(\d+),\s*(.*)", operands)
        used = {int(name) for name in re.findall(r"\bR(\d+)", load[2] if load else operands)}
        waited = [place for place, (registers, _) in enumerate(pending) if registers & used]
        if waited:  # loads return in the order in which they were issued
            del pending[: waited[-1] + 1]
        if load:
            bits = re.search(r"LDG\S*\.(?:[US]?)(8|16|64|128)\b", operands)
            width = 32 if bits is None else int(bits[1])
            pending.append((set(range(int(load[1]), int(load[1]) + max(1, width // 32))), 32 * width // 8))
            most = max(most, sum(size for _, size in pending))
    return most


def moved_bytes(ir: str, arguments: dict[str, Any], head_programs: int) -> float:
    """Bytes that the innermost loop loads and stores per edge, read from Triton's own code, without padding."""
    depth, ends, moved = 0, list[int](), dict[int, float]()
    for line in ir.splitlines():
        if re.search(r"\bscf\.(for|while)\b", line):
            ends.append(depth)
        found = re.search(r"tt\.(?:load|store)\b.*tensor<([\dx]+)x!tt\.ptr<\D+(\d+)", line)
        if ends and found:
            sizes = [int(size) for size in found[1].split("x")]
            numbers = _used(sizes, arguments, head_programs)
            moved[len(ends)] = moved.get(len(ends), 0.0) + numbers * int(found[2]) / 8
        depth += line.count("{") - line.count("}")
        if ends and depth <= ends[-1]:
            ends.pop()
    return moved[max(moved)]


def _edges_per_step(kernel: str) -> int:
    """The number of edges of each task that a step of a kernel's loop goes through."""
    from gattn.ops.backends.triton.kernels import UNROLLED

    return int(UNROLLED.value) if kernel in ("forward", "backward_by_target") else 1


def _edges_at_once(arguments: dict[str, Any]) -> int:
    """The number of edges of a program: of one row, or one of each task."""
    edges: int = arguments["BLOCK_E" if "BLOCK_E" in arguments else "BLOCK_R"]
    return edges


def _used(sizes: Sequence[int], arguments: dict[str, Any], head_programs: int) -> float:
    """The number of elements in a tile, over all programs, whose edge, head and channel exist."""
    numbers = head_programs / _edges_at_once(arguments)
    for size in sizes:
        numbers *= size
    if len(sizes) > 1:
        numbers *= arguments["HEADS"] / (arguments["BLOCK_H"] * head_programs)
    if len(sizes) > 2:
        name = "CHANNELS" if sizes[2] == arguments["BLOCK_C"] else "VALUE_CHANNELS"
        numbers *= arguments[name] / sizes[2]
    return numbers


def least_bytes(case: Compilation) -> float:
    """The least bytes per edge if nothing stays in a cache: the rows of the other end and the edge's own data."""
    row = case.heads * case.channels * getattr(torch, case.dtype).itemsize
    scalars = case.heads * 4
    is_scalar = case.layer == "gat" or case.channels == 1
    term = scalars if case.layer == "gat" else row
    edge = term if case.edge_features else 0
    if case.kernel in ROWS:
        return 4 + scalars
    if case.kernel == "forward":  # the edge's number is needed only if it has data of its own
        return 4 + (4 + edge if edge else 0) + term + (0 if case.layer == "gatv2" else row)
    if case.kernel == "backward_by_source":
        # The query, the gradient of the output, and three statistics of both (a log-sum-exp instead of maximum and sum
        # would lose digits of large logits); the logit's gradient, and the edge's.
        return 8 + term + row + 3 * scalars + scalars + 2 * edge
    return 4 + scalars + (0 if is_scalar else 4 + term + edge)


def _blocks_with_room(architecture: int, registers: int, shared: int, warps: int) -> int:
    per_warp = -(-registers * 32 // 256) * 256  # registers are allocated in units of 256
    return min(BLOCKS, min(WARPS, REGISTERS // per_warp) // warps, SHARED[architecture] // (shared + RESERVED))


# The report ----------------------------------------------------------------------------------------------------------


def report(benchmark: Benchmark[Any], rows: dict[Compilation, Row]) -> None:
    """One line per kernel, and the model beside published times."""
    lines = [
        {
            "layer": case.layer + ", edge features" * case.edge_features,
            "heads × channels": f"{case.heads} × {case.channels}",
            "dtype": case.dtype,
            "sm": str(case.architecture),
            "kernel": case.kernel.replace("_", " "),
            "registers": str(row["registers"]),
            "spilled, B": str(row["spilled_bytes"]),
            "shared, B": str(row["shared_bytes"]),
            "blocks": str(row["blocks"]),
            "barriers": str(row["barriers"]),
            "loads × bits": row["loads"],
            "instructions": f"{row['instructions']:.0f}",
            "bytes": f"{row['bytes']:.0f}",
            "× least": f"{row['bytes'] / row['least_bytes']:.2f}",
            "in flight, KB": f"{row['in_flight'] / 1024:.1f}",
        }
        for case, row in rows.items()
    ]
    remarks = machines(rows.values(), (*VERSIONS, "python", "triton"), "")
    fewer = [case for case, row in rows.items() if row["in_flight"] < IN_FLIGHT]
    remarks.append(
        f"In flight are the loads that a multiprocessor waits for at once, with all the blocks that fit on it. Of "
        f"{len(rows)} kernels, {len(fewer)} have less than {IN_FLIGHT // 1024} KB: {sum(map(_is_short, fewer))} that "
        "rewrite logits, or whose rows cannot be loaded 128 bits at a time; and, with an eighth less at most, "
        f"{sum(not _is_short(case) for case in fewer)} whose registers leave room for fewer blocks."
    )
    remarks.append(
        "blocks is the number of blocks that fit on a multiprocessor. The other columns describe the loop over "
        "edges: its barriers and loads, and per edge the warp instructions and the bytes loaded and stored (× least "
        "compares them with the least that must move if nothing stays in a cache). No kernel was run."
    )
    benchmark.publish("Compiled GPU kernels", lines, remarks, {}, name="compiled.md")
    modelled = list(_modelled(rows))
    if modelled:
        benchmark.publish(
            "A model of time beside published times",
            modelled,
            [
                "Times are in milliseconds, forward + backward, in float16 and with edge features. The model takes the "
                "larger of bytes over bandwidth and instructions over issue rate, summed over the kernels; it ignores "
                "launches, waiting and caches, and nothing was run. The other times were published with anemoi-core's "
                "pull request 631. Sizes are estimated from the grids that it names, and 16 × 32 is a guess."
            ],
            {},
            name="model.md",
        )
    failures = [str(case) for case, row in rows.items() if row["spilled_bytes"] or row["in_flight"] < _least(case)]
    if failures:
        raise BenchmarkError(f"registers are spilled, or too few bytes are in flight, in {', '.join(failures)}")


def _is_short(case: Compilation) -> bool:
    """Whether a kernel reads logits alone, or rows that cannot be loaded 128 bits at a time."""
    return case.kernel in ROWS or case.channels % 16 > 0 or case.channels == 8


def _least(case: Compilation) -> float:
    """The bytes in flight below which something has gone wrong; see the report for what has fewer than it should."""
    return IN_FLIGHT / 4 if _is_short(case) else IN_FLIGHT * 7 / 8


def modelled_seconds(loops: dict[str, Row], gpu: GPU, mesh: Mesh, row_bytes: int) -> float:
    """The modelled time of forward + backward, from the row of each kernel."""
    issued = gpu.multiprocessors * ISSUED * gpu.clock * 1e9
    ends = {  # rows of nodes that are read or written once; those in float32 count twice
        "forward": 4 * mesh.targets,  # the query, the output, and the output before rounding
        "backward_by_source": 4 * mesh.sources + 7 * mesh.targets,  # including PyTorch's product of output and gradient
        "backward_by_target": 2 * mesh.targets,
    }
    return sum(
        max(
            (mesh.edges * loop["bytes"] + ends[name] * row_bytes) / gpu.bandwidth,
            mesh.edges * loop["instructions"] / issued,
        )
        for name, loop in loops.items()
    )


def _modelled(rows: dict[Compilation, Row]) -> Generator[dict[str, str], None, None]:
    _, heads, channels, _, dtype = MESH_LAYER
    for mesh_name, mesh in MESHES.items():
        for gpu_name, gpu in GPUS.items():
            loops = {
                case.kernel: row
                for case, row in rows.items()
                if case == Compilation(*MESH_LAYER, gpu.architecture, case.kernel)
            }
            if len(loops) < len(PASSES):
                continue
            seconds = modelled_seconds(loops, gpu, mesh, heads * channels * getattr(torch, dtype).itemsize)
            eager, fused, theirs = (f"{time:.2f}" for time in mesh.times[gpu_name]) if gpu_name in mesh.times else "–––"
            yield {
                "graph": f"{mesh_name}, {mesh.edges:,} edges",
                "GPU": gpu_name,
                "model": f"{1e3 * seconds:.2f}",
                "anemoi": theirs,
                "PyG, compiled": fused,
                "PyG": eager,
            }
