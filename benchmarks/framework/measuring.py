"""Measurements of time and memory: each in its own process, after its result has been checked."""

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
from typing import Any, ClassVar, Literal, NotRequired, TypedDict, TypeVar

import torch
from torch import Tensor

from benchmarks.framework import processes
from benchmarks.framework.benchmark import Case
from benchmarks.framework.processes import BenchmarkError, Message, Show
from benchmarks.framework.results import MEMORY, Row

try:
    import resource
except ImportError:  # on Windows
    resource = None  # type: ignore[assignment]

MODES = {"forward": "forward", "forward_backward": "forward + backward"}
"""What is timed, and its name in tables."""

MIN_REPEATS = 3
"""The smallest number of calls, however slow they are."""

SHORT = 0.5
"""Short calls are repeated for this many seconds, and warmed up for at most this many."""

BATCH = 0.02
"""Shorter calls are timed in batches that take this many seconds (or a twentieth of the whole time)."""

KEPT_TIMES = 100
"""This many single times are stored beside their quartiles."""

LARGEST_LOSS = 0.05
"""A reference loses at most this share of its scale, or 16 units in the last place if that is more, as in bfloat16."""

#: Results with one row per node or token; all others are gradients of parameters.
ROW_RESULTS = (
    "output without autograd",
    "output",
    *(f"gradient of {name}" for name in ("x", "query", "key", "value")),
)

DRIFT = 1.25
"""So much faster may a shared machine become between the measurements of a part and of its whole, minutes later."""

TURN = 0.002
"""What takes turns is timed in batches that take about this many seconds, if a call is shorter."""

WARM_UP = 0.1
"""Before that, each function is called for this many seconds."""

Function = Callable[[], object]

T = TypeVar("T")
M = TypeVar("M", bound="Measurement")


class Quartiles(TypedDict):
    """Median and quartiles."""

    median: float
    q1: float
    q3: float


class Times(Quartiles):
    """Seconds per call, as `spread` returns them, and the system's work for it."""

    times: list[float]
    page_faults: NotRequired[float]
    """Pages of memory per call that the system had to provide (minor page faults): the mean of all calls."""
    usual_page_faults: NotRequired[float]
    """Their median over calls or batches; `reports.is_kept` needs it."""
    system: NotRequired[float]
    """Seconds of system time per call, on all threads."""


class Measured(TypedDict):
    """The columns of a measurement."""

    outcome: Literal["ok"]
    reason: str
    peak_bytes: int
    forward: Times


class Failed(TypedDict):
    """Its columns if there is only a reason to report."""

    outcome: Literal["WRONG", "failed", "out of memory", "timed out"]
    reason: str
    timeout: NotRequired[float]
    """The seconds after which it timed out; with a longer timeout, it is tried again."""


# What is measured ----------------------------------------------------------------------------------------------------


@dataclass
class Computation:
    """A forward pass, and its gradients."""

    call: Callable[[], Tensor]
    leaves: dict[str, Tensor]
    """The tensors whose gradients are computed."""
    grad: Tensor
    """The gradient of the output."""
    unpack: Callable[[Tensor], Tensor] = lambda result: result
    """Selects the compared rows of the results in `ROW_RESULTS`. (default: all)"""

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
        """What is compared with the reference: the results of `forward_backward` and of a separate `forward`."""
        results = {"output without autograd": self.forward(), **results}
        return {name: self.unpack(x) if name in ROW_RESULTS else x for name, x in results.items()}


class Measurement(Case):
    """A case that is timed once its results agree with a reference, which another process computes."""

    noun = "measurements"
    has_forward_peak: ClassVar[bool] = False
    """Whether the peak of the first forward pass is measured, too; that pass prepares the graph for the next."""

    threads: int
    repeats: int
    seconds: float

    @property
    def kind(self) -> str:
        """The one of its problem's references with which the results are compared."""
        return ""

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment of its allocator, if it has one of its own."""
        return MEMORY[getattr(self, "allocator", "default")]

    @property
    def whole(self) -> Measurement | None:
        """The measurement of the same peer that this one is a part of."""
        return None

    @classmethod
    def contradictions(cls, rows: Mapping[Any, Row]) -> list[str]:
        """Parts that took longer than their wholes: by `DRIFT`, from the whole's upper quartile to their median."""
        found = []
        for case, row in rows.items():
            pairs = [((case, row, "forward"), (case, row, "forward_backward"))]
            if case.whole in rows:
                pairs += [((case, row, mode), (case.whole, rows[case.whole], mode)) for mode in MODES]
            for part, whole in pairs:
                times, totals = (_times(row.get(mode)) for _, row, mode in (part, whole))
                for side in times.keys() & totals.keys():
                    if times[side]["median"] > DRIFT * totals[side]["q3"]:
                        names = [f"{case}, {MODES[mode]}{side}" for case, _, mode in (part, whole)]
                        low, high = 1000 * times[side]["median"], 1000 * totals[side]["median"]
                        found.append(f"{names[0]} takes {low:.4g} ms, longer than {names[1]} with {high:.4g} ms")
        return found

    @property
    def has_reference(self) -> bool:
        """Whether results are compared; only yardsticks have neither a reference nor a backward pass."""
        return True

    @property
    def has_gradients(self) -> bool:
        """Whether the gradients are compared, too."""
        return True

    def problem(self) -> tuple[object, ...]:
        """What is the same for all cases that share a reference; these must be adjacent."""
        raise NotImplementedError

    def references(self) -> dict[str, dict[str, Expected]]:
        """The expected results by `kind`, as `budgets` returns them.

        Results are `output`, `output without autograd` and `gradient of <name>` for each of the computation's leaves.
        """
        raise NotImplementedError

    def computation(self) -> Computation:
        """What is measured.

        It first runs something small of its kind, so that loading code and starting threads is not measured.
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
        if reason := wrong(row["errors"]):
            return {"outcome": "WRONG", "reason": reason}
        del results
        return {**row, **self.times(computation)}

    def times(self, computation: Computation) -> Row:
        """The times of a computation whose results are right."""
        modes = MODES if computation.leaves else ("forward",)
        return {mode: timed(getattr(computation, mode), self.repeats, self.seconds, self.place) for mode in modes}

    @classmethod
    def result_of(cls, row: Row) -> type:
        """The columns of a measurement, or of one that failed."""
        return cls.result if row.get("outcome") == "ok" else Failed


def _times(column: Any) -> dict[str, Any]:
    """The times in a row's column: one, or one of each side that took turns."""
    if not isinstance(column, dict):
        return {}
    return {"": column} if "median" in column else {f" ({side})": column[side] for side in ("ours", "theirs")}


def measured(cases: Sequence[M], timeout: float) -> Generator[Message[M], None, None]:
    """Makes measurements one after the other; the row of each gives its outcome, which may be out of memory.

    Args:
        cases: The measurements.
        timeout: The seconds after which a process is ended.
    """
    for case in cases:
        named, found = getattr(case, "allocator", None), case.machine()["allocator"]
        if named not in (None, found):  # variables of this process reach those that it starts
            raise BenchmarkError(f"{case} would be measured with {found}: unset the variables of the allocator first")
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
    """What the work returns in its own process, or what happened instead."""
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
    """An expected result."""

    exact: Tensor
    rows: Tensor | None
    """The compared rows of the result; `None` for all."""
    scale: float
    """The largest element."""
    budget: float
    """How far a result may differ from it."""


class Error(TypedDict):
    """How far a result differs from the reference, and how far it may, relative to the largest element."""

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
    """The expected results, and how far results may differ from them.

    The budget is derived, not tuned. It is four times what the reference itself loses in the case's dtype, plus eight
    units in the last place of the scale, plus what a float32 sum loses that adds its terms one by one: one unit times
    the square root of their number. The scale is the largest element. Gradients of parameters share the largest element
    of all of them, because some vanish except for rounding (a bias of the keys shifts all logits of a target).

    Args:
        exact: The reference's results in float64.
        rounded: Its results in the case's dtype.
        dtype: The case's dtype.
        terms: The number of terms that an element of a result in `ROW_RESULTS` sums.
        parameter_terms: The number of terms that an element of a parameter's gradient sums.
        compared: The compared rows of results in `ROW_RESULTS`. (default: all)
        is_sampled: Whether the reference has only these rows. (default: `False`)

    Raises:
        ValueError: If the two references differ by more than rounding explains: no result could then be wrong.
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
    """Compares all results with the expected ones.

    Raises:
        ValueError: If a result is missing or unexpected.
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


def wrong(errors: dict[str, Error]) -> str:
    """What is wrong with the first result that differs by more than its budget; empty if none does."""
    for name, entry in errors.items():
        if not entry["error"] <= entry["budget"]:  # in this form, NaN fails
            sizes = f"{entry['error']:.1e} of its largest element, where {entry['budget']:.1e} is allowed"
            return f"{name} is off by {sizes}"
    return ""


# Memory and time -----------------------------------------------------------------------------------------------------


def peak_above(function: Callable[[], T], device: str = "cpu") -> tuple[T, int]:
    """Calls the function; returns its result, and by how many bytes the memory in use rose during the call.

    On the CPU, this is the process's resident memory. (If Linux cannot reset its peak, it is the rise above the largest
    value so far.) On a GPU, it is what PyTorch has allocated.
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
        )  # otherwise, freed memory that the process still holds would be reused without being counted
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
    """The largest resident memory since `peak_above` last began; if Linux cannot tell, since the process started."""
    with contextlib.suppress(OSError):
        return _memory("VmHWM") * 1024
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def total_memory() -> int:
    """The machine's memory in bytes; if the system does not tell, more than any machine has."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 2**50


def limit_memory(size: int) -> None:
    """Makes allocations fail if the process's data would exceed this many bytes, before the machine runs short.

    Without Unix's limits, this does nothing, and the system ends the process instead.
    """
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (size, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _memory(name: str) -> int:
    """An entry of the process's status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def duration(function: Callable[[], object], device: str = "cpu", calls: int = 1) -> float:
    """Seconds per call: the mean of several by the clock, or on a GPU the time between two events around one call."""
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
    return start.elapsed_time(end) / 1000  # milliseconds to seconds


def copy_rate(device: str, size: int = 2**28) -> float:
    """Bytes that the device reads and writes per second when it copies `size` bytes: a median."""
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / timed(lambda: target.copy_(source), 20, 1.0, device)["median"]


def operation_rate(device: str, size: int = 2048) -> float:
    """Floating-point operations per second in a product of two matrices of `size` rows and columns: a median."""
    first, second = (torch.ones(size, size, device=device) for _ in range(2))
    return 2 * size**3 / timed(lambda: first @ second, 20, 1.0, device)["median"]


def timed(function: Callable[[], object], repeats: int, seconds: float, device: str = "cpu") -> Times:
    """Seconds per call, after a warm-up of a tenth of the time; on the CPU, also page faults and system time.

    Short calls are repeated more often: for half a second, or a quarter of the time. On the CPU, very short ones are
    timed in batches, so that the clock's resolution does not matter.

    Args:
        function: What is timed.
        repeats: The largest number of calls or batches, unless they are short.
        seconds: The longest time, once `MIN_REPEATS` of them are done.
        device: Where the function computes. (default: `"cpu"`)
    """
    times: list[float] = []
    start = time.perf_counter()
    while time.perf_counter() - start < min(seconds / 10, SHORT if len(times) >= MIN_REPEATS else math.inf):
        times.append(duration(function, device))
    calls = 1
    if device == "cpu" and times:
        calls = math.ceil(min(BATCH, seconds / 20) / max(min(times), 1e-9))
    times, work, start = [], list[dict[str, float]](), time.perf_counter()
    while True:
        elapsed = time.perf_counter() - start
        enough = len(times) >= repeats and elapsed >= min(seconds / 4, SHORT)
        if enough or (len(times) >= MIN_REPEATS and elapsed >= seconds):
            break
        before = usage(device)
        times.append(duration(function, device, calls))
        work.append(used_since(before, device, calls))
    return {**spread(times), **per_call(work)}  # type: ignore[typeddict-item] # the optional ones


def turns(functions: Sequence[Function], rounds: int, seconds: float) -> list[list[float]]:
    """Seconds per call of each function in each round, without garbage collection; each second round is backwards.

    No further round begins after this many seconds, once `MIN_REPEATS` are done.
    """
    sides = [(function, calls_per_batch(function), list[float]()) for function in functions]
    was_collecting, start = gc.isenabled(), time.perf_counter()
    gc.collect()
    gc.disable()
    try:
        for number in range(max(rounds, MIN_REPEATS)):
            if number >= MIN_REPEATS and time.perf_counter() - start >= seconds:
                break
            for function, calls, times in sides if number % 2 == 0 else reversed(sides):
                before = time.perf_counter_ns()
                for _ in range(calls):
                    function()
                times.append((time.perf_counter_ns() - before) / (1e9 * calls))
    finally:
        if was_collecting:
            gc.enable()
    return [times for _, _, times in sides]


def calls_per_batch(function: Function) -> int:
    """The number of calls that take about `TURN` seconds, after a warm-up."""
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < MIN_REPEATS or time.perf_counter() - start < WARM_UP:
        times.append(duration(function))
    return math.ceil(TURN / max(statistics.median(times), 1e-9))


def with_gradients(computation: Computation) -> Function:
    """The forward and the backward pass, without the names of the results, which take time."""
    leaves = list(computation.leaves.values())
    return lambda: torch.autograd.grad(computation.call(), leaves, computation.grad)


def quartiles(values: Sequence[float]) -> Quartiles:
    """Median and quartiles of two or more numbers."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "q1": low, "q3": high}


def usage(device: str) -> dict[str, float]:
    """What the system has done for this process so far; irrelevant if a GPU computes."""
    if device != "cpu" or resource is None:
        return {}
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {"page_faults": used.ru_minflt, "system": used.ru_stime}


def used_since(before: dict[str, float], device: str, calls: int = 1) -> dict[str, float]:
    """What the system has done per call since an earlier `usage`."""
    return {name: (after - before[name]) / calls for name, after in usage(device).items()}


def per_call(work: Sequence[dict[str, float]]) -> dict[str, float]:
    """The columns of what the system has done, from that of each batch of calls."""
    columns = {name: statistics.mean(batch[name] for batch in work) for name in work[0]}
    if "page_faults" in columns:
        columns["usual_page_faults"] = statistics.median(batch["page_faults"] for batch in work)
    return columns


def spread(times: Sequence[float]) -> Times:
    """Median and quartiles, and the first few times themselves."""
    return {
        **quartiles(times if len(times) > 1 else [*times, *times]),
        "times": [float(f"{seconds:.4g}") for seconds in times[:KEPT_TIMES]],
    }
