"""Results as append-only JSON lines: a finished run is never lost, one that was cut off is never half there."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import gattn


class ResultsFile:
    """Rows of results, one JSON object a line.

    Args:
        path: The file; it and its folder are made when it is opened or on the first append.
    """

    def __init__(self, path: Path):
        self.path = path

    def rows(self, fields: Iterable[str] = ()) -> list[dict[str, Any]]:
        """All finished rows that have these fields.

        What is no such row is passed over: a line that a killed process left incomplete, or another version's.
        """
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_text(errors="replace").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict) and all(field in row for field in fields):
                rows.append(row)
        return rows

    def open(self) -> None:
        """Makes the file, so that what stands against writing it shows before the first run and not after it.

        Raises:
            OSError: If it cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a"):
            pass

    def append(self, row: dict[str, Any]) -> None:
        """Adds a row and waits until it is on disk."""
        self.open()
        line = json.dumps(row) + "\n"
        if self.path.stat().st_size and not self.path.read_bytes().endswith(b"\n"):
            line = "\n" + line  # ends the incomplete line
        with self.path.open("a") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


def machine(device: str = "cpu") -> dict[str, str]:
    """The machine and the versions that results were measured with."""
    packages = {"gattn": gattn.__version__}
    is_gpu = device.startswith("cuda")
    for package in ("torch", "torch-geometric", "torch-scatter", *["triton"] * is_gpu):
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            continue
    name = torch.cuda.get_device_name(device) if is_gpu else _cpu_name()
    gpu = {"cuda": str(torch.version.cuda), "driver": _driver()} if is_gpu else {}
    return {
        "machine": f"{name}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **packages,
        **gpu,
    }


@cache
def _driver() -> str:
    """The version of the GPU's driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        found = []
    return found[0].strip() if found else "unknown"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
