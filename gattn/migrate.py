"""`python -m gattn.migrate PATH`: which of a project's imports from PyG and `torch.nn` could come from gattn."""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch_geometric.nn  # which also imports its modules

from gattn import models, nn

__all__ = ["main", "names_in", "verdict"]


def names_in(source: str | bytes) -> Iterator[tuple[int, str]]:
    """The line and the full name of what a program takes from `torch_geometric.nn`, or could from gattn, at each use.

    Args:
        source: The text of the program. It is parsed, and never run.

    Raises:
        SyntaxError: If it is not Python.

    Example:
        >>> from gattn.migrate import names_in
        >>> list(names_in("import torch_geometric.nn as gnn; conv = gnn.GATConv(16, 8)"))
        [(1, 'torch_geometric.nn.GATConv')]
    """
    with warnings.catch_warnings(action="ignore"):  # such as those of escapes in somebody else's strings
        tree = ast.parse(source)
    full_names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                full_names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                full_names[alias.asname or alias.name] = full = f"{node.module}.{alias.name}"
                if _is_known(full):
                    yield node.lineno, full
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if _is_known(full := f"{full_names.get(first, '')}.{rest}"):
                yield node.lineno, full


_OF_TORCH = {f"torch.nn.{name}": f"gattn.nn.{name}" for name in nn.__all__ if hasattr(torch.nn, name)}
_OF_TORCH |= dict.fromkeys(("torch.dropout", "torch.nn.functional.dropout"), "gattn.dropout")


def _is_known(full: str) -> bool:
    """Whether it is one of PyTorch's that gattn has, or a name in `torch_geometric.nn` or its modules, not a module."""
    if full in _OF_TORCH:
        return True
    home = full.rpartition(".")[0]
    return f"{home}.".startswith("torch_geometric.nn.") and home in sys.modules and full not in sys.modules


def verdict(full: str) -> tuple[bool, str]:
    """Whether gattn has the same name, and what to do.

    Args:
        full: The full name of something in `torch_geometric.nn`, or of PyTorch's.

    Example:
        >>> from gattn.migrate import verdict
        >>> verdict("torch_geometric.nn.GATConv")
        (True, 'gattn.nn.GATConv')
        >>> verdict("torch_geometric.nn.SAGEConv")
        (False, 'stays: gattn has no SAGEConv')
    """
    if full in _OF_TORCH:
        return True, _OF_TORCH[full]
    name = full.rpartition(".")[2]
    if name == "*":
        return False, "says no names: import them one by one"
    for module in (nn, models):
        if name in module.__all__ and hasattr(torch_geometric.nn, name):
            differ = _differ(getattr(torch_geometric.nn, name), getattr(module, name))
            remark = f", whose arguments differ ({', '.join(differ)}): see its documentation" if differ else ""
            return True, f"{module.__name__}.{name}{remark}"
    return False, f"stays: gattn has no {name}"


def _differ(theirs: Any, ours: Any) -> list[str]:
    """The arguments of PyG's that gattn's lacks, or for which it has another default."""
    known = inspect.signature(ours).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    found = []
    for name, parameter in inspect.signature(theirs).parameters.items():
        is_plain = isinstance(parameter.default, (bool, int, float, str))  # modules have no equality
        is_other = name in known and is_plain and known[name].default != parameter.default
        if is_other or (name not in known and not takes_any):
            found.append(name)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints what can change and what cannot, and changes nothing; ends with an error if a file cannot be read.

    Args:
        arguments: What follows the command. (default: `None`, that of the process)
    """
    parser = argparse.ArgumentParser(prog="python -m gattn.migrate", description=__doc__)
    parser.add_argument("path", type=Path, help="a Python file, or a folder of them")
    path = parser.parse_args(arguments).path
    if not path.exists():
        parser.exit(2, f"{path}: there is no such file or folder.\n")
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    counts, errors = [0, 0], 0
    for file in files:
        if any(part.startswith(".") or part == "site-packages" for part in file.relative_to(path).parts):
            continue  # somebody else's, such as a virtual environment
        try:
            if file != path and not file.is_file():  # a pipe might never end
                raise OSError("it is no file")
            found = sorted(set(names_in(file.read_bytes())))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            reason = str(error) or "it is nested too deeply"  # for which the parser has no memory
            print(f"{file}: cannot be read: {reason.splitlines()[0]}", file=sys.stderr)
            errors += 1
            continue
        for line, full in found:
            can_change, text = verdict(full)
            counts[can_change] += 1
            print(f"{file}:{line}: {full} {'-> ' * can_change}{text}")
    print(
        f"{counts[True]} can change, {counts[False]} cannot. "
        "These, and all else of PyG and PyTorch, work beside gattn as they are."
    )
    sys.exit(errors > 0)


if __name__ == "__main__":
    main()
