"""What the system tells about the processor."""

from __future__ import annotations

import platform
from pathlib import Path

__all__ = ["instructions", "processor"]


def _of_processor(field: str) -> str:
    """What the system tells about the processor; nothing where that is not Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def processor() -> str:
    """The processor's name, as far as the system tells."""
    return _of_processor("model name") or platform.processor() or platform.machine()


def instructions() -> frozenset[str]:
    """The processor's sets of instructions, by Linux's names, as far as the system tells."""
    return frozenset(_of_processor("flags").split())
