"""Measurements of time and memory: each in a process of its own, and none before its result was checked."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NotRequired, TypedDict, TypeVar

import torch
from torch import Tensor

from benchmarks.framework import processes
from benchmarks.framework.benchmark import Case
from benchmarks.framework.processes import Message, Show
from benchmarks.framework.results import Row

try:
    import resource
except ImportError:  # on Windows
    resource = None  # type: ignore[assignment]

MODES = {"forward": "forward", "forward_backward": "forward + backward"}
"""What is timed, and what tables call it."""

MIN_REPEATS = 3
"""Even slow calls are repeated this many times."""

SHORT = 0.5
"""Short calls are repeated for this many seconds, and warmed up for at most as many."""

BATCH = 0.02
"""Calls that take less than this many seconds are timed together, as many as take this long (or a twentieth of all)."""

KEPT_TIMES = 100
"""This many times are kept beside their quartiles."""

LARGEST_LOSS = 0.05
"""A reference loses no more than this of its scale, or 16 units in the last place if these are more, as in bfloat16."""

#: Results with one row per node or token; the others are gradients of parameters.
ROW_RESULTS = (
    "output without autograd",
    "output",
    *(f"gradient of {name}" for name in ("x", "query", "key", "value")),
)

T = TypeVar("T")
M = TypeVar("M", bound="Measurement")


class Times(TypedDict):
    """Seconds of a call: what `spread` returns, and what the system has to do for it."""

    median: float
    q1: float
    q3: float
    times: list[float]
    page_faults: NotRequired[float]
    """Pages of memory per call that the system had to provide, none of them from a disk."""
    system: NotRequired[float]
    """Seconds per call that the system computed, on all threads."""


class Measured(TypedDict):
    """The columns of a measurement."""

    outcome: Literal["ok"]
    reason: str
    peak_bytes: int
    forward: Times


class Failed(TypedDict):
    """Its columns if there is nothing to report but the reason."""

    outcome: Literal["WRONG", "failed", "out of memory", "timed out"]
    reason: str
    timeout: NotRequired[float]
    """The seconds after which it timed out: it is tried again if there are more."""


# What is measured ----------------------------------------------------------------------------------------------------


@dataclass
class Computation:
    """A forward pass, and its gradients."""

    call: Callable[[], Tensor]
    leaves: dict[str, Tensor]
    """What it is differentiated for."""
    grad: Tensor
    """Gradient of the output."""
    unpack: Callable[[Tensor], Tensor] = lambda result: result
    """Takes the rows that are compared out of the results in `ROW_RESULTS`. (default: all)"""

    def forward(self) -> Tensor:
        """The output, computed without autograd."""
        with torch.no_grad():
            return self.call()

    def forward_backward(self) -> dict[str, Tensor]:
        """The output, and the gradients of the leaves."""
        out = self.call()
        grads = torch.autograd.grad(out, list(self.leaves.values()), self.grad) if self.leaves else ()
        named = {f"gradient of {name}": grad for name, grad in zip(self.leaves, grads, strict=True)}
        return {"output": out.detach(), **named}

    def compared(self, results: dict[str, Tensor]) -> dict[str, Tensor]:
        """What is compared with the reference, of the results of `forward_backward` and of another `forward`."""
        results = {"output without autograd": self.forward(), **results}
        return {name: self.unpack(x) if name in ROW_RESULTS else x for name, x in results.items()}


class Measurement(Case):
    """A case that is timed, once its results agree with a reference that is computed in another process."""

    noun = "measurements"
    has_forward_peak: ClassVar[bool] = False
    """Whether the peak of the first forward pass is taken, too, which prepares the graph for the second."""

    threads: int
    repeats: int
    seconds: float

    @property
    def kind(self) -> str:
        """Which of its problem's references the results are compared with."""
        return ""

    @property
    def has_reference(self) -> bool:
        """Whether results are compared; only yardsticks have no reference, and no backward pass."""
        return True

    @property
    def has_gradients(self) -> bool:
        """Whether the gradients are compared, too."""
        return True

    @property
    def environment(self) -> Mapping[str, str]:
        """What the environment of its process has besides, from the very start."""
        return {}

    def problem(self) -> tuple[object, ...]:
        """What cases have in common that share a reference; they follow each other."""
        raise NotImplementedError

    def references(self) -> dict[str, dict[str, Expected]]:
        """What the results should be, by `kind`: what `budgets` returns for each.

        Results are `output`, `output without autograd` and `gradient of <name>` for each of the computation's leaves.
        """
        raise NotImplementedError

    def computation(self) -> Computation:
        """What is measured.

        It first runs something small of its kind, since what loads code and starts threads would be measured, too.
        """
        raise NotImplementedError

    def prepare_process(self) -> None:
        """Settings that hold for a whole process."""
        torch.set_num_threads(self.threads)

    def measure(self, reference: Path | None) -> Row:
        """The columns of the measurement.

        Args:
            reference: The file of references; `None` for a yardstick.
        """
        self.prepare_process()
        computation = self.computation()
        row: Row = {"outcome": "ok", "reason": ""}
        if reference is None:
            _, row["peak_bytes"] = peak_above(computation.forward, self.place)
            return {**row, "forward": timed(computation.forward, self.repeats, self.seconds, self.place)}
        if self.has_forward_peak:
            _, row["forward_peak_bytes"] = peak_above(computation.forward, self.place)
        results, row["peak_bytes"] = peak_above(computation.forward_backward, self.place)
        results = computation.compared(results)
        if not self.has_gradients:
            results = {name: result for name, result in results.items() if not name.startswith("gradient")}
        row["errors"] = check(results, torch.load(reference, weights_only=True)[self.kind])
        for name, entry in row["errors"].items():
            if not entry["error"] <= entry["budget"]:  # written so that NaN fails
                sizes = f"{entry['error']:.1e} of its largest element, where {entry['budget']:.1e} is allowed"
                return {"outcome": "WRONG", "reason": f"{name} is off by {sizes}"}
        del results
        for mode in MODES if computation.leaves else ("forward",):
            row[mode] = timed(getattr(computation, mode), self.repeats, self.seconds, self.place)
        return row

    @classmethod
    def result_of(cls, row: Row) -> type:
        """The columns of a measurement, or of one that failed."""
        return cls.result if row.get("outcome") == "ok" else Failed


def measured(cases: Sequence[M], timeout: float) -> Generator[Message[M], None, None]:
    """Makes measurements one after the other; the row of each says what became of it, running out of memory included.

    Args:
        cases: The measurements.
        timeout: A process is ended after this many seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, problem, row = Path(folder) / "reference.pt", None, {"outcome": "ok"}
        for case in cases:
            if case.has_reference and case.problem() != problem:
                yield case, "progress", (0, 2, ": reference")
                problem, row = case.problem(), _apart(case, functools.partial(_write_references, path=path), timeout)
            yield case, "progress", (1, 2, "")
            if row["outcome"] == "ok" or not case.has_reference:
                reference = path if case.has_reference else None
                yield case, "ok", _apart(case, functools.partial(_measure, reference=reference), timeout)
            else:
                yield case, "ok", {"outcome": "failed", "reason": f"no reference: {row['outcome']} {row['reason']}"}


def _apart(case: M, work: Callable[[M, Show], Row], timeout: float) -> Row:
    """What the work returns in a process of its own, or what happened instead."""
    ((_, outcome, content),) = processes.in_processes([case], work, timeout=timeout, environment=case.environment)
    if outcome == "ok":
        return content
    return {"outcome": outcome, "reason": content, **({"timeout": timeout} if outcome == "timed out" else {})}


def _write_references(case: Measurement, show: Show, path: Path) -> Row:
    case.prepare_process()
    torch.save(case.references(), path)
    return {"outcome": "ok"}


def _measure(case: Measurement, show: Show, reference: Path | None) -> Row:
    return case.measure(reference)


# The check -----------------------------------------------------------------------------------------------------------


class Expected(TypedDict):
    """What a result should be."""

    exact: Tensor
    rows: Tensor | None
    """The rows of the result that are compared; `None` for all."""
    scale: float
    """The largest element."""
    budget: float
    """How far from it a result may be."""


class Error(TypedDict):
    """How far a result is from the reference, and how far it may be, relative to the largest element."""

    error: float
    budget: float


def budgets(
    exact: dict[str, Tensor],
    rounded: dict[str, Tensor],
    dtype: torch.dtype,
    terms: int,
    parameter_terms: int,
    compared: Tensor | None = None,
    is_sampled: bool = False,
) -> dict[str, Expected]:
    """What results should be, and how far from it they may be.

    The budget is derived, not tuned. It is four times what the reference itself loses in the case's dtype, plus eight
    units in the last place of the scale, plus what a float32 sum that adds its terms one by one loses: one unit times
    the root of their number. The scale is the largest element. For gradients of parameters, it is the largest of all of
    them, because some vanish (a bias of the keys shifts all logits of a target), and what is left of them is rounding.

    Args:
        exact: The reference's results in float64.
        rounded: Its results in the case's dtype.
        dtype: The case's dtype.
        terms: The number of terms that an element of a result in `ROW_RESULTS` sums.
        parameter_terms: The number of terms that an element of a parameter's gradient sums.
        compared: The rows that are compared of results in `ROW_RESULTS`. (default: all)
        is_sampled: Whether the reference has no others. (default: `False`)

    Raises:
        ValueError: If the two references differ by more than rounding explains: nothing would be wrong.
    """
    of_parameters = [value.abs().max().item() for name, value in exact.items() if name not in ROW_RESULTS]
    expected: dict[str, Expected] = {}
    for name, value in exact.items():
        has_rows = name in ROW_RESULTS
        rows = compared if has_rows else None
        scale = value.abs().max().item() if has_rows else max(of_parameters)
        loss = (rounded[name] - value).abs().max().item()
        if loss > max(LARGEST_LOSS, 16 * torch.finfo(dtype).eps) * scale:
            raise ValueError(
                f"the reference's {name} in {dtype} is {loss / (scale or 1):.0%} of the largest element from that in "
                "float64, more than rounding: both must be of the same inputs, drawn once in that type and converted"
            )
        units = 8 * torch.finfo(dtype).eps
        units += math.sqrt(terms if has_rows else parameter_terms) * torch.finfo(torch.float32).eps
        chosen = value if rows is None or is_sampled else value[rows]
        expected[name] = {"exact": chosen, "rows": rows, "scale": scale, "budget": 4 * loss + units * scale}
    return expected


def check(results: dict[str, Tensor], expected: dict[str, Expected]) -> dict[str, Error]:
    """Compares all results with what they should be.

    Raises:
        ValueError: If a result is missing, or there is one that nobody expects.
    """
    if set(results) != set(expected):
        missing, unexpected = (
            ", ".join(sorted(names)) or "none" for names in (expected.keys() - results, results.keys() - expected)
        )
        raise ValueError(f"missing: {missing}; unexpected: {unexpected}")
    errors: dict[str, Error] = {}
    for name, truth in expected.items():
        actual = results[name].detach()
        if truth["rows"] is not None:
            actual = actual[truth["rows"]]
        error = (actual.cpu().double().reshape(truth["exact"].shape) - truth["exact"]).abs().max().item()
        scale = truth["scale"] or 1.0
        errors[name] = {"error": error / scale, "budget": truth["budget"] / scale}
    return errors


# Memory and time -----------------------------------------------------------------------------------------------------


def peak_above(function: Callable[[], T], device: str = "cpu") -> tuple[T, int]:
    """Calls the function; returns its result, and by how many bytes the memory in use rose meanwhile.

    On the CPU, this is the process's resident memory (where Linux cannot reset its peak, the rise above the largest so
    far); on a GPU, what PyTorch has handed out.
    """
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = function()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(
            0
        )  # otherwise, freed memory that the process still holds would be used again, uncounted
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = function()
        return result, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    before = _memory("VmRSS")
    result = function()
    return result, max(_memory("VmHWM") - before, 0) * 1024


def peak_of_process() -> int:
    """The largest resident memory of the process since `peak_above` last began, where Linux tells, else of all time."""
    with contextlib.suppress(OSError):
        return _memory("VmHWM") * 1024
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def total_memory() -> int:
    """The machine's memory in bytes; where the system does not tell, more than any has."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 2**50


def limit_memory(size: int) -> None:
    """Makes allocations fail where the process's data would take more bytes, before the machine's memory is short.

    Without Unix's limits, it does nothing, and the system ends the process.
    """
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (size, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _memory(name: str) -> int:
    """An entry of the process's status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def duration(function: Callable[[], object], device: str = "cpu", calls: int = 1) -> float:
    """Seconds that a call takes: the mean of some by the clock, or between two events of the GPU, around one's work."""
    if device == "cpu":
        before = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - before) / calls
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000  # from milliseconds


def copy_rate(device: str, size: int = 2**28) -> float:
    """Bytes that the device reads and writes per second when it copies `size` bytes: a median."""
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / timed(lambda: target.copy_(source), 20, 1.0, device)["median"]


def operation_rate(device: str, size: int = 2048) -> float:
    """Floating-point operations per second in a product of two matrices of `size` rows and columns: a median."""
    first, second = (torch.ones(size, size, device=device) for _ in range(2))
    return 2 * size**3 / timed(lambda: first @ second, 20, 1.0, device)["median"]


def timed(function: Callable[[], object], repeats: int, seconds: float, device: str = "cpu") -> Times:
    """Seconds that calls take, after a warm-up of a tenth of the time; on the CPU, also page faults and system time.

    Short calls are repeated more often: for half a second, or a quarter of the time. On the CPU, very short ones are
    timed in batches, so that the clock's resolution does not matter.

    Args:
        function: What is timed.
        repeats: The largest number of calls or batches, if they are not short.
        seconds: The longest time, once there were `MIN_REPEATS` of them.
        device: Where the function computes. (default: `"cpu"`)
    """
    times: list[float] = []
    start = time.perf_counter()
    while time.perf_counter() - start < min(seconds / 10, SHORT if len(times) >= MIN_REPEATS else math.inf):
        times.append(duration(function, device))
    calls = 1
    if device == "cpu" and times:
        calls = math.ceil(min(BATCH, seconds / 20) / max(min(times), 1e-9))
    times, before, start = [], usage(device), time.perf_counter()
    while True:
        elapsed = time.perf_counter() - start
        enough = len(times) >= repeats and elapsed >= min(seconds / 4, SHORT)
        if enough or (len(times) >= MIN_REPEATS and elapsed >= seconds):
            break
        times.append(duration(function, device, calls))
    after, total = usage(device), calls * len(times)
    per_call = {name: (after[name] - before[name]) / total for name in after}
    return {**spread(times), **per_call}  # type: ignore[typeddict-item] # the two that are not required


def usage(device: str) -> dict[str, float]:
    """What the system has done for this process so far; nothing that would matter if a GPU computes."""
    if device != "cpu" or resource is None:
        return {}
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {"page_faults": used.ru_minflt, "system": used.ru_stime}


def spread(times: Sequence[float]) -> Times:
    """Median and quartiles, and the first of the times themselves."""
    low, middle, high = statistics.quantiles(times if len(times) > 1 else [*times, *times], n=4, method="inclusive")
    return {
        "median": middle,
        "q1": low,
        "q3": high,
        "times": [float(f"{seconds:.4g}") for seconds in times[:KEPT_TIMES]],
    }
