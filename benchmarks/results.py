"""Results as append-only JSON lines: a finished run is never lost, one that was cut off is never half there."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import gattn


class ResultsFile:
    """Rows of results, one JSON object a line.

    Args:
        path: The file; it and its folder are made on the first append.
    """

    def __init__(self, path: Path):
        self.path = path

    def rows(self) -> list[dict[str, Any]]:
        """All finished rows. A last line that a killed process left incomplete is passed over."""
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return rows

    def append(self, row: dict[str, Any]) -> None:
        """Adds a row and waits until it is on disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(row) + "\n"
        if self.path.exists() and not self.path.read_bytes().endswith(b"\n") and self.path.stat().st_size:
            line = "\n" + line  # ends the incomplete line
        with self.path.open("a") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


def machine(device: str = "cpu") -> dict[str, str]:
    """The machine and the versions that results were measured with."""
    packages = {"gattn": gattn.__version__}
    for package in ("torch", "torch-geometric", "torch-scatter"):
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            continue
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else _cpu_name()
    return {
        "machine": f"{name}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **packages,
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
