"""Lists the benchmarks: `python -m benchmarks`. It only reads their docstrings, so it needs none of their packages."""

from __future__ import annotations

import ast
from pathlib import Path

from benchmarks import durations, summary


def docstrings() -> dict[str, str]:
    """The docstring of each benchmark, by the name that `python -m benchmarks.<name>` takes."""
    paths = sorted(Path(__file__).parent.glob("*.py"))
    found = {path.stem: ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "" for path in paths}
    # Its docstring gives the command; the files beside a benchmark that have some of its parts give none, or its own.
    return {name: text for name, text in found.items() if f"`python -m benchmarks.{name}" in text}


def main() -> None:
    """Prints the command, the summary and the durations of each."""
    found = docstrings()
    width = max(map(len, found))
    for name, text in found.items():
        usual, quick = durations(text)
        print(f"python -m benchmarks.{name:{width}}  {summary(text)}")
        print(f"    {usual}; with --quick {quick}")
    print("\nDurations are those on two cores with nothing else running. Each benchmark lists its options with --help.")


if __name__ == "__main__":
    main()
