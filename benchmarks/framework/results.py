"""Results as append-only JSON lines: a finished run is never lost, and an interrupted one leaves no partial row."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import reprlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, Literal, NotRequired, TypedDict, get_args, get_origin, get_type_hints, is_typeddict

import torch

import gattn
from gattn.processor import processor

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

#: A row of results: columns by name, with values as JSON has them.
Row = dict[str, Any]

#: The columns that `machine` adds to every row; versions of further packages are also texts.
Machine = TypedDict(
    "Machine",
    {
        "machine": str,
        "python": str,
        "gattn": str,
        "torch": str,
        "torch-geometric": str,
        "allocator": NotRequired[str],  # older rows lack this and the next ones
        "kernels": NotRequired[str],
        "started": NotRequired[str],  # when the benchmark was started: the same for all rows of a run
    },
)

VERSIONS = ("gattn", "torch", "torch-geometric", "machine")
"""The columns that distinguish rows of different versions or machines."""

ALLOCATORS = {
    "default": {},
    "kept": {
        "MALLOC_MMAP_THRESHOLD_": str(2**32),
        "MALLOC_TRIM_THRESHOLD_": str(2**34),
        "MALLOC_TOP_PAD_": str(2**28),
    },
}
"""The environment that tells glibc how to treat freed memory when a process starts: its defaults, or keep all of it."""

MEMORY = {**ALLOCATORS, "huge": {**ALLOCATORS["kept"], "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}}
"""Also: keep it in huge pages."""

#: A dataclass or a `TypedDict` with the fields of a row, or a function that chooses one for a row.
Kind = type | Callable[[Row], type]


class ResultsFile:
    """Rows of results, one JSON object per line.

    Args:
        path: The file; it and its folder are created when it is opened, or on the first append.
    """

    def __init__(self, path: Path):
        self.path = path
        self._reported: set[int] = set()

    def rows(self, *kinds: Kind) -> list[Row]:
        """All finished rows that have the fields of these kinds.

        A row that lacks some is skipped: it belongs to another version or to another part of a benchmark. A line that
        is not a row at all (a killed process leaves an incomplete one) or has a field of a wrong type is also skipped,
        with a warning on stderr that gives its number.
        """
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        rows, problems = [], {}
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                problems[number] = "this is not a complete JSON object"
                continue
            chosen = [kind if isinstance(kind, type) else kind(row) for kind in kinds]
            if not any(_missing(row, kind) for kind in chosen):
                wrong = list(filter(None, (problem_of(row, kind) for kind in chosen)))
                if wrong:
                    problems[number] = wrong[0].removeprefix(".")
                else:
                    rows.append(row)
        self._report({number: text for number, text in problems.items() if number not in self._reported})
        return rows

    def _report(self, problems: dict[int, str]) -> None:
        """Warns of lines that are not rows, and names the first one."""
        if problems:
            self._reported.update(problems)
            number, text = next(iter(problems.items()))
            more = f" {len(problems) - 1} more of its lines are ignored." if len(problems) > 1 else ""
            print(f"warning: {self.path}, line {number}: {text}; the line is ignored.{more}", file=sys.stderr)

    def open(self) -> None:
        """Creates the file, so that problems with writing it show before the first run and not after it.

        Raises:
            OSError: If it cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a"):
            pass

    def append(self, row: Row) -> None:
        """Adds a row and waits until it is on disk."""
        self.open()
        line = json.dumps(row) + "\n"
        if self.path.stat().st_size and not self.path.read_bytes().endswith(b"\n"):
            line = "\n" + line  # ends the incomplete line
        with self.path.open("a") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


def unreadable(row: Row, *kinds: Kind) -> str | None:
    """Why `ResultsFile.rows` would skip this row; `None` if it would not."""
    for kind in (kind if isinstance(kind, type) else kind(row) for kind in kinds):
        if missing := _missing(row, kind):
            return f"there is no {' and no '.join(missing)}"
        if problem := problem_of(row, kind):
            return problem.removeprefix(".")
    return None


def _missing(row: Row, kind: Any) -> list[str]:
    """The fields of a kind that the row lacks."""
    return [name for name, (_, is_required) in _fields(kind).items() if is_required and name not in row]


def problem_of(value: Any, kind: Any) -> str | None:
    """What is wrong with a value, read as JSON, that should have a type; `None` if nothing is.

    A float may be an integer; neither may be NaN or infinite. Lists must not be empty. Unknown fields are allowed.
    """
    parts: dict[str, tuple[Any, Any]] = {}
    if get_origin(kind) is UnionType:
        is_right = any(problem_of(value, option) is None for option in get_args(kind))
    elif get_origin(kind) is Literal:
        is_right = value in get_args(kind)
    elif get_origin(kind) is list:
        is_right = isinstance(value, list) and bool(value)
        parts = {f"[{i}]": (part, get_args(kind)[0]) for i, part in enumerate(value)} if is_right else {}
    elif is_typeddict(kind) or dataclasses.is_dataclass(kind):
        fields = _fields(kind)
        is_right = isinstance(value, dict) and all(name in value for name, (_, needed) in fields.items() if needed)
        parts = {f".{name}": (value[name], part) for name, (part, _) in fields.items() if is_right and name in value}
    elif kind in (int, float):
        is_right = type(value) in (int, kind) and abs(value) <= sys.float_info.max  # in this form, NaN fails
    else:
        is_right = type(value) is kind
    if not is_right:
        return f" is {reprlib.repr(value)} where {_name(kind)} is expected"
    for place, (part, part_kind) in parts.items():
        if (problem := problem_of(part, part_kind)) is not None:
            return place + problem
    return None


def _name(kind: Any) -> str:
    """The name of a type in an error."""
    if get_origin(kind) in (UnionType, Literal):
        return " or ".join(repr(option) if isinstance(option, str) else _name(option) for option in get_args(kind))
    if is_typeddict(kind) or dataclasses.is_dataclass(kind):
        names = ", ".join(name for name, (_, is_needed) in _fields(kind).items() if is_needed)
        return f"an object with {names}" if names else "an object"
    if get_origin(kind) is list:
        return "a list that is not empty"
    simple = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", type(None): "null"}
    simple |= {list: "a list", dict: "an object"}
    return simple.get(kind) or f"{kind.__name__ if isinstance(kind, type) else kind}, which no row can have,"


@cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """The type of each field of a dataclass or a `TypedDict`, and whether a row must have it."""
    hints = get_type_hints(kind, include_extras=True)
    if dataclasses.is_dataclass(kind):
        hints = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    optional = {name for name, hint in hints.items() if get_origin(hint) is NotRequired}
    if dataclasses.is_dataclass(kind):
        optional = {field.name for field in dataclasses.fields(kind) if field.default is not dataclasses.MISSING}
    return {
        name: (get_args(hint)[0] if get_origin(hint) is NotRequired else hint, name not in optional)
        for name, hint in hints.items()
    }


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file; if this fails or is interrupted, the previous file stays as it was."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


# One process at a time -----------------------------------------------------------------------------------------------


_locks: set[int] = set()
"""The file descriptors of the locks that this process holds."""


def _leave_locks() -> None:
    """Closes the parent's locks in a forked child, which would otherwise hold them as long as it lives."""
    while _locks:
        os.close(_locks.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_locks)


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Locks a folder for this process until the block is left or the process ends, even if it is killed.

    The file `.lock` in the folder names the process; if a killed process left one, it is ignored. On systems without
    locks (Windows, some network file systems), a warning is shown.

    Raises:
        BlockingIOError: If another process holds the folder; the message names it.
        OSError: If the folder cannot be written.
    """
    path = folder / ".lock"
    descriptor = _open_locked(path)
    _locks.add(descriptor)
    try:
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        holder = f"process {os.getpid()} on {platform.node()}, started {started}\n".encode()
        os.write(descriptor, holder)
        os.ftruncate(descriptor, len(holder))
        yield
    finally:
        if descriptor in _locks:  # and this is not a forked child
            _locks.remove(descriptor)
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(descriptor)


def _open_locked(path: Path) -> int:
    """Opens and locks the file of this name; processes that are started later do not inherit its descriptor."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if fcntl is None:
                raise OSError("this system has no file locks")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = os.read(descriptor, 300).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise BlockingIOError(f"{path.parent} is in use by {holder}") from None
        except OSError as error:
            text = (
                f"warning: {path.parent} cannot be locked ({error}); run no other benchmark with it at the same time."
            )
            print(text, file=sys.stderr)
        # The previous holder may just have removed the file that was opened.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)


# The machine ---------------------------------------------------------------------------------------------------------


SOURCES = (".py", ".cpp", ".h", ".txt")
"""The suffixes of the files that kernels are made of."""


def machine(device: str = "cpu", environment: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """The machine, the versions and the allocator with which results are measured.

    Args:
        device: Where they are computed. (default: `"cpu"`)
        environment: The variables that are set in addition to those of this process. (default: none)
    """
    packages = {"gattn": gattn.__version__}
    is_gpu = device.startswith("cuda")
    for package in ("torch", "torch-geometric", "torch-scatter", "dgl", *["triton"] * is_gpu):
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            continue
    # Servers of one name may lack AVX-512, which changes ratios, too.
    cpu = f"{processor()} with {torch.backends.cpu.get_cpu_capability()}"
    name = torch.cuda.get_device_name(device) if is_gpu else cpu
    gpu = {"cuda": str(torch.version.cuda), "driver": _driver()} if is_gpu else {}
    return {
        "machine": f"{name}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **packages,
        **gpu,
        "allocator": allocator({**os.environ, **environment}),
        "kernels": kernels(device),
    }


def allocator(environment: Mapping[str, str]) -> str:
    """A name in `MEMORY`, or the variables that choose another allocator or other settings, without folders."""
    chosen = {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD")
    }
    known = [name for name, settings in MEMORY.items() if settings == chosen]
    return known[0] if known else ", ".join(f"{name}={value.rpartition('/')[2]}" for name, value in chosen.items())


#: Digests of sources, and those of later ones that differ from them in nothing that their rows have measured: the later
#: ones call `torch.unflatten` instead of a tensor's method, ask another function whether a program is being exported,
#: and (than the first) have a kernel for the features of GRIT's pairs. The last has other names.
SAME = {
    "61ffb114367d": "b6fb7570eefa",
    "a295d8df4ae8": "b6fb7570eefa",
    "90cae1a70446": "d44103dbed43",
    "4e6811aac43d": "0cf8ce7d3d49",
}


def is_current(row: Row) -> bool:
    """Whether a row is of the kernels in this repository."""
    digest = str(row.get("kernels"))
    return SAME.get(digest, digest) in map(kernels, ("cpu", "cuda", "triton"))


@cache
def kernels(device: str = "cpu") -> str:
    """A digest of the sources of gattn's backends, without those of the other kind of device; or of Triton's alone."""
    folder = Path(gattn.__file__).parent / "ops" / "backends"
    others = {"cpu": ("triton",), "triton": ("cpu", "dense")}.get(device.partition(":")[0], ("cpu",))
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if name.parts[0] not in others and path.suffix in SOURCES:
            digest.update(f"{name.as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


@cache
def _driver() -> str:
    """The version of the GPU's driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        found = []
    return found[0].strip() if found else "unknown"
