"""Tables and pictures, as all benchmarks print and write them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

from benchmarks.results import replace_file


def print_table(table: Table, console: Console) -> None:
    """Prints a table, however narrow the terminal: a line that it breaks can be read, one that was cut cannot."""
    width = max(console.width, Console(width=300).measure(table).maximum)
    Console(width=width, file=console.file, markup=False).print(table)


def write_table(path: Path, lines: Sequence[dict[str, str]], remarks: Sequence[str]) -> None:
    """Writes a table as Markdown, with remarks below."""
    header = [f"| {' | '.join(lines[0])} |", f"|{' --- |' * len(lines[0])}"]
    body = [f"| {' | '.join(line.values())} |" for line in lines]
    text = "\n".join([*header, *body, "", *(f"- {remark}" for remark in remarks)]) + "\n"
    replace_file(path, text.encode(errors="backslashreplace"))


def save_figure(figure: Any, path: Path, **options: Any) -> None:
    """Writes a picture, and frees its memory."""
    content = io.BytesIO()
    try:
        figure.savefig(content, **options)
    finally:
        plt.close(figure)
    replace_file(path, content.getvalue())
