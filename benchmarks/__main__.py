"""Lists the benchmarks: `python -m benchmarks`. It only reads their docstrings, so it needs none of their packages."""

from __future__ import annotations

import ast
from pathlib import Path

from benchmarks import summary


def summaries() -> dict[str, str]:
    """What each benchmark measures, by the name that `python -m benchmarks.<name>` takes."""
    paths = sorted(Path(__file__).parent.glob("*.py"))
    docstrings = {path.stem: ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "" for path in paths}
    # Its docstring gives the command; the files beside a benchmark that have some of its parts give none, or its own.
    return {name: summary(text) for name, text in docstrings.items() if f"`python -m benchmarks.{name}" in text}


def main() -> None:
    """Prints the command and the summary of each."""
    found = summaries()
    width = max(map(len, found))
    for name, text in found.items():
        print(f"python -m benchmarks.{name:{width}}  {text}")
    print("\nEach of them lists its options with --help.")


if __name__ == "__main__":
    main()
