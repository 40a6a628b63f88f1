"""Latency of exported models, compared with eager mode: `python -m benchmarks.deployment`.

The models are a GAT on a graph of Cora's size and a small language model. Each is exported with open sizes, and traced
at other sizes than those at which it is timed. Nothing is timed before its output agrees with that of eager mode in
float64. ONNX needs the extra `onnx`; `--ways` can leave it out.

Duration: 4 minutes; with `--quick`: 3 minutes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import gattn
from benchmarks.framework.benchmark import Benchmark
from benchmarks.framework.measuring import Computation, Expected, Measured, Measurement, budgets, measured
from benchmarks.framework.options import add_measuring, unique
from benchmarks.framework.processes import Message
from benchmarks.framework.reports import factor, machines, megabytes, quartiles
from benchmarks.framework.results import VERSIONS, Row
from benchmarks.kernel_cases import SHAPES, draw_edges

SEED = 0
FEATURES, CLASSES = 1433, 7
TOKENS, CONTEXT = 65, 128

Function = Callable[..., Tensor]
Inputs = tuple[Tensor, ...]


class Model(NamedTuple):
    """A model and its inputs."""

    make: Callable[[], nn.Module]
    inputs: Callable[[bool], Inputs]
    """Creates inputs: small ones for tracing, or those of full size."""
    shapes: tuple[dict[int, Any], ...]
    """The sizes that are left open."""
    terms: int
    """The number of terms in the longest sum of any layer."""


def graph(is_small: bool) -> Inputs:
    """Returns features and edges."""
    shape = SHAPES["tiny" if is_small else "cora"][0]
    return torch.randn(shape.nodes, FEATURES), draw_edges(shape)


def text(is_small: bool) -> Inputs:
    """Tokens."""
    return (torch.randint(TOKENS, (2, 8) if is_small else (1, CONTEXT)),)


MODELS = {
    "GAT": Model(
        lambda: gattn.models.GAT(FEATURES, 64, 2, CLASSES, heads=8),
        graph,
        ({0: Dim("nodes")}, {1: Dim("edges")}),
        FEATURES,
    ),
    "TransformerLM": Model(
        lambda: gattn.models.TransformerLM(TOKENS, 128, 4, 4, CONTEXT),
        text,
        ({0: Dim("batch"), 1: Dim("length", max=CONTEXT)},),
        512,
    ),
}


def exported(model: nn.Module, of: Model, backend: str = "auto") -> ExportedProgram:
    """The model as a program, traced on small inputs."""
    with gattn.backend(backend):
        return torch.export.export(model, of.inputs(True), dynamic_shapes=of.shapes)


def packaged(program: ExportedProgram) -> Function:
    """The program compiled by AOTInductor."""
    with tempfile.TemporaryDirectory() as folder:
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(Path(folder) / "model.pt2"))
        compiled: Function = torch._inductor.aoti_load_package(path)
    return compiled


def in_onnxruntime(model: nn.Module, of: Model) -> Function:
    """The model in onnxruntime, with as many threads as PyTorch."""
    import onnxruntime

    program: Any = torch.onnx.export(model, of.inputs(True), dynamic_shapes=of.shapes, dynamo=True, verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    content = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]

    def run(*inputs: Tensor) -> Tensor:
        given = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
        return torch.from_numpy(session.run(None, given)[0])

    return run


WAYS: dict[str, Callable[[nn.Module, Model], Function]] = {
    "eager": lambda model, of: model,
    "exported": lambda model, of: exported(model, of).module(),
    "exported with kernels": lambda model, of: exported(model, of, "cpu").module(),
    "AOTInductor": lambda model, of: packaged(exported(model, of)),
    "AOTInductor with kernels": lambda model, of: packaged(exported(model, of, "cpu")),
    "onnxruntime": in_onnxruntime,
}


@dataclass(frozen=True)
class Case(Measurement):
    """One measurement."""

    result = Measured

    model: str
    way: str
    threads: int
    repeats: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.model} {self.way}"

    def problem(self) -> tuple[object, ...]:
        """What is the same for all cases that must have the same result."""
        return (self.model,)

    def references(self) -> dict[str, dict[str, Expected]]:
        """The output of eager mode in float64."""
        exact, rounded = (
            computed.compared(computed.forward_backward())
            for computed in (self._build("eager", dtype) for dtype in (torch.float64, torch.float32))
        )
        return {"": budgets(exact, rounded, torch.float32, MODELS[self.model].terms, 1)}

    def computation(self) -> Computation:
        """The computation of its way."""
        return self._build(self.way, torch.float32)

    def _build(self, way: str, dtype: torch.dtype) -> Computation:
        of = MODELS[self.model]
        torch.manual_seed(SEED)
        model = of.make().eval().requires_grad_(False)
        inputs = of.inputs(False)
        run = WAYS[way](model.to(dtype), of)
        inputs = tuple(given.to(dtype) if given.is_floating_point() else given for given in inputs)
        return Computation(lambda: run(*inputs), {}, torch.empty(0))


class Deployment(Benchmark[Case]):
    """Measures each model in each way."""

    name = "deployment"
    quick: ClassVar = {"repeats": 3, "seconds": 0.1, "threads": 1}

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the options."""
        add = parser.add_argument
        add("--models", nargs="+", default=list(MODELS), choices=MODELS, help="models that are measured (default: all)")
        add("--ways", nargs="+", default=list(WAYS), choices=WAYS, help="ways to run them (default: all)")
        add_measuring(parser, cls.name)

    def cases(self) -> list[Case]:
        """Each model in each way."""
        options = self.options
        fixed = (options.threads, options.repeats, options.seconds)
        return [Case(model, way, *fixed) for model in unique(options.models) for way in unique(options.ways)]

    def run(self, cases: Sequence[Case]) -> Generator[Message[Case], None, None]:
        """Measures."""
        return measured(cases, self.options.timeout)

    def report(self, rows: dict[Case, Row]) -> None:
        """One line per model and way."""
        lines = []
        for case, row in rows.items():
            eager = rows.get(replace(case, way="eager"))
            line = {"model": case.model, "way": case.way, "forward, ms": quartiles(row, "forward")}
            line["× eager"] = factor(row, eager, "forward", ".2f", unit="")
            line["peak, MB"] = megabytes(row)
            lines.append(line)
        remarks = machines(rows.values(), (*VERSIONS, "python"), ", {threads} thread(s)")
        remarks.append("Times are medians with quartiles. × eager is the time relative to eager mode.")
        shape = SHAPES["cora"][0]
        size = f"{shape.nodes} nodes, {shape.edges} edges, {FEATURES} dense features"
        remarks.append(f"GAT: {size}, two layers, the hidden one with eight heads of eight channels.")
        remarks.append(f"TransformerLM: one sequence of {CONTEXT} tokens, four layers of 128 channels, four heads.")
        self.publish("Exported models and eager mode", lines, remarks, {})


if __name__ == "__main__":
    Deployment.main()
