"""`python -m gattn.migrate PATH`: what of a project could come from gattn, its own layers included.

It reads programs and notebooks, names what they take from PyG and `torch.nn`, and recognises classes that the programs
of papers define themselves. `--diff` prints a patch of the imports from PyG, and `--write` applies it.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import json
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch_geometric.nn  # which also imports its modules

from gattn import models, nn

__all__ = ["classes_in", "main", "names_in", "patched", "verdict"]


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
    tree = _parsed(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if _is_known(full := f"{node.module}.{alias.name}"):
                    yield node.lineno, full
    for node, full in _attributes(tree):
        yield node.lineno, full


def _parsed(source: str | bytes) -> ast.Module:
    with warnings.catch_warnings(action="ignore"):  # such as those of escapes in somebody else's strings
        # Notebooks may wait at their top level.
        tree = compile(source, "<program>", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert isinstance(tree, ast.Module)
    return tree


def _attributes(tree: ast.Module) -> Iterator[tuple[ast.Attribute, str]]:
    """Attributes of modules that gattn may have, with their full names."""
    full_names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                full_names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                full_names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if _is_known(full := f"{full_names.get(first, '')}.{rest}"):
                yield node, full


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


#: Classes that papers' programs define: their repository, what to use, and the converter of their checkpoints.
_OWN = {
    "AttnModel": ("TGAT", "gattn.nn.TGATConv(out_proj=True, residual=True, norm=True)", "tgat"),
    "EGT_Layer": ("EGT", "gattn.nn.EGTBlock", "egt"),
    "ExphormerAttention": ("Exphormer", "gattn.nn.ExphormerConv", None),
    "ExphormerFullLayer": ("Exphormer", "gattn.nn.ExphormerLayer", "exphormer"),
    "FALayer": ("FAGCN", "gattn.nn.FAConv(eps=0.3, add_self_loops=False, bias=True)", None),
    "Fingerprint": ("AttentiveFP", "gattn.models.AttentiveFP(keep_states=True), whose first layer differs", None),
    "GATv2Conv": ("GATv2", "gattn.nn.GATv2Conv", "gatv2"),
    "GPSLayer": ("GraphGPS", "gattn.nn.GPSConv around gattn.nn.GatedGCNConv(drop_residual=False)", "gps"),
    "GatedGCNLayer": ("GraphGPS", "gattn.nn.GatedGCNConv(drop_residual=False)", "gated_gcn"),
    "GlobalAttn": ("Polynormer", "gattn.models.Polynormer", "polynormer"),
    "GraphAttentionLayer": ("pyGAT", "gattn.nn.GATConv(bias=False), then an ELU", None),
    "GraphormerGraphEncoder": ("Graphormer", "gattn.models.Graphormer", "graphormer"),
    "GraphormerGraphEncoderLayer": ("Graphormer", "gattn.nn.GraphormerLayer(norm_first=False)", "graphormer"),
    "GritTransformerLayer": ("GRIT", "gattn.nn.GRITLayer", "grit"),
    "HGTConv": ("pyHGT", "gattn.nn.HGTConv(use_norm=True), use_rte=True for its use_RTE", "hgt"),
    "ISAB": ("Set Transformer", "gattn.nn.InducedSetAttentionBlock(projected=True)", "set_transformer"),
    "LinkAttention": ("LPFormer", "gattn.nn.LPAttLayer", "lpformer"),
    "LinkTransformer": ("LPFormer", 'gattn.models.LPFormer(gnn_norm="node")', "lpformer"),
    "LinkTransformerLayer": ("LPFormer", "gattn.nn.LPAttLayer", "lpformer"),
    "MAB": ("Set Transformer", "gattn.nn.MultiheadAttentionBlock(projected=True)", "set_transformer"),
    "MultiHeadAttentionLayerGritSparse": ("GRIT", "gattn.nn.GRITConv", "grit"),
    "PMA": ("Set Transformer", "gattn.nn.PoolingByMultiheadAttention(projected=True, lin=False)", "set_transformer"),
    "Polynormer": ("Polynormer", "gattn.models.Polynormer", "polynormer"),
    "SAB": ("Set Transformer", "gattn.nn.SetAttentionBlock(projected=True)", "set_transformer"),
    "SGFormer": ("SGFormer", 'gattn.models.SGFormer(norm="frobenius", qkv_bias=True)', "sgformer"),
    "SpGraphAttentionLayer": ("pyGAT", "gattn.nn.GATConv(bias=False), then an ELU", None),
    "SuperGAT": ("SuperGAT", "gattn.nn.SuperGATConv", "supergat"),
    "TemporalAttentionLayer": ("TGN", "gattn.nn.TGATConv(bias=True, out_proj=True)", "tgn"),
    "TransConvLayer": ("SGFormer", 'gattn.nn.SGFormerAttention(norm="frobenius", qkv_bias=True)', "sgformer"),
}


def classes_in(source: str | bytes) -> Iterator[tuple[int, str, str]]:
    """The line and the name of each class that a paper's program defines itself, and what to use instead.

    A class is recognised by its name, and by a base that is a `Module` or a `MessagePassing`.

    Args:
        source: The text of the program. It is parsed, and never run.

    Raises:
        SyntaxError: If it is not Python.

    Example:
        >>> from gattn.migrate import classes_in
        >>> list(classes_in("class EGT_Layer(nn.Module): ..."))
        [(1, 'EGT_Layer', 'gattn.nn.EGTBlock (as in EGT; checkpoints: gattn.convert.egt)')]
    """
    for node in ast.walk(_parsed(source)):
        if isinstance(node, ast.ClassDef) and node.name in _OWN:
            bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
            if bases & {"Module", "MessagePassing"}:
                repository, instead, converter = _OWN[node.name]
                more = f"; checkpoints: gattn.convert.{converter}" if converter else ""
                yield node.lineno, node.name, f"{instead} (as in {repository}{more})"


# Patches -------------------------------------------------------------------------------------------------------------


class _Edit(NamedTuple):
    """Some lines and columns of a program, and what they become."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


def patched(source: str) -> str:
    """A program whose imports from PyG come from gattn, where it has the same name with the same arguments.

    Names that are used as attributes of a module, as in `gnn.GATConv(16, 8)`, are written out where they are called.
    What is taken from PyTorch stays, since gattn's dropout draws other numbers.

    Args:
        source: The text of the program. It is parsed, and never run.

    Raises:
        SyntaxError: If it is not Python.

    Example:
        >>> from gattn.migrate import patched
        >>> print(patched("from torch_geometric.nn import GATConv, SAGEConv"))
        from gattn.nn import GATConv
        from torch_geometric.nn import SAGEConv
    """
    tree, edits = _parsed(source), []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            edits += _of_import(source, node)
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    written = []
    for attribute, full in _attributes(tree):
        place = _same_in_gattn(full)
        if place and id(attribute) in called:
            written.append(place)
            edits.append(_edit(attribute, place))
    if written and not any(_imports_gattn(node) for node in tree.body):
        imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        first_import = next(node for node in imports if getattr(node, "module", None) != "__future__")
        position = first_import.lineno, first_import.col_offset
        edits.append(_Edit(position, position, "import gattn\n"))
    lines, end = source.splitlines(keepends=True), "\r\n" if "\r\n" in source else "\n"
    for edit in sorted(edits, reverse=True):
        first, rest = lines[edit.start[0] - 1].encode(), lines[edit.end[0] - 1].encode()
        joined = first[: edit.start[1]] + edit.text.replace("\n", end).encode() + rest[edit.end[1] :]
        lines[edit.start[0] - 1 : edit.end[0]] = [joined.decode()]
    return "".join(lines)


def _edit(node: Any, text: str) -> _Edit:
    return _Edit((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset), text)


def _imports_gattn(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import) and any(alias.name == "gattn" and not alias.asname for alias in node.names)


def _same_in_gattn(full: str) -> str | None:
    """The full name in gattn of something of PyG's that can be replaced as it is."""
    can_change, text = verdict(full)
    return text if can_change and full not in _OF_TORCH and " " not in text else None


def _of_import(source: str, node: ast.ImportFrom) -> list[_Edit]:
    """The import as one from each of gattn's modules and one of what stays."""
    groups: dict[str, list[str]] = {}
    for alias in node.names:
        full = f"{node.module}.{alias.name}"
        place = _same_in_gattn(full) if _is_known(full) else None
        home, _, name = place.rpartition(".") if place else (node.module or "", "", alias.name)
        groups.setdefault(home, []).append(name + (f" as {alias.asname}" if alias.asname else ""))
    if groups.keys() == {node.module}:
        return []
    line = source.splitlines()[node.lineno - 1]
    before = line.encode()[: node.col_offset].decode()
    between = "\n" + before if not before.strip() else "; "
    statements = []
    for home in sorted(groups):
        statement = f"from {home} import {', '.join(groups[home])}"
        if len(before + statement) > 88 and between != "; ":
            inner = "".join(f"{before}    {name},\n" for name in groups[home])
            statement = f"from {home} import (\n{inner}{before})"
        statements.append(statement)
    return [_edit(node, between.join(statements))]


# Notebooks -----------------------------------------------------------------------------------------------------------

_CELL, _MAGIC = "# gattn.migrate: the next cell", "#gattn.migrate:"


def _program_of(notebook: dict[str, Any]) -> str:
    """The code of a notebook, cell by cell, in which lines for IPython are comments."""
    return "\n".join(_CELL + "\n" + _hidden("".join(cell["source"])) for cell in _code(notebook))


def _code(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def _hidden(code: str) -> str:
    if code.lstrip().startswith("%%"):
        return re.sub("(?m)^", _MAGIC, code)
    return re.sub(r"(?m)^([ \t]*)([%!?])", rf"\1{_MAGIC}\2", code)


def _written_back(notebook: dict[str, Any], program: str) -> str:
    """The notebook with the code that its program has become."""
    codes = (program + "\n").split(_CELL + "\n")[1:]
    for cell, code in zip(_code(notebook), codes, strict=True):
        text = code.removesuffix("\n").replace(_MAGIC, "")
        cell["source"] = text.splitlines(keepends=True) if isinstance(cell["source"], list) else text
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


# The command ---------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints what can change and what cannot, or a patch; ends with an error if a file cannot be read.

    Args:
        arguments: What follows the command. (default: `None`, that of the process)
    """
    parser = argparse.ArgumentParser(prog="python -m gattn.migrate", description=__doc__)
    parser.add_argument("path", type=Path, help="a Python file, a notebook, or a folder of them")
    parser.add_argument("--diff", action="store_true", help="print a patch of the imports from PyG")
    parser.add_argument("--write", action="store_true", help="apply this patch")
    options = parser.parse_args(arguments)
    path = options.path
    if not path.exists():
        parser.exit(2, f"{path}: there is no such file or folder.\n")
    files = sorted([*path.rglob("*.py"), *path.rglob("*.ipynb")]) if path.is_dir() else [path]
    useful: list[str] = []
    others: list[str] = []
    errors = 0
    for file in files:
        if any(part.startswith(".") or part == "site-packages" for part in file.relative_to(path).parts):
            continue  # somebody else's, such as a virtual environment
        try:
            if file != path and not file.is_file():  # a pipe might never end
                raise OSError("it is no file")
            content = file.read_bytes()
            notebook = json.loads(content) if file.suffix == ".ipynb" else None
            program: str | bytes = content if notebook is None else _program_of(notebook)
            if options.diff or options.write:
                _patch(file, program, notebook, options.write)
                continue
            found = sorted(set(names_in(program)))
            own = sorted(set(classes_in(program)))
        except BrokenPipeError:  # of whoever reads the first lines alone
            sys.stderr.close()
            sys.exit(1)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError, KeyError, TypeError) as error:
            reason = str(error) or "it is nested too deeply"  # for which the parser has no memory
            print(f"{file}: cannot be read: {reason.splitlines()[0]}", file=sys.stderr)
            errors += 1
            continue
        for line, full in found:
            can_change, text = verdict(full)
            (useful if can_change else others).append(f"{file}:{line}: {full} {'-> ' * can_change}{text}")
        useful += [f"{file}:{line}: class {name} -> {text}" for line, name, text in own]
    if not (options.diff or options.write):
        print(*useful, *others, sep="\n", end="\n" * bool(useful or others))
        print(
            f"{len(useful)} can change, {len(others)} cannot. "
            "These, and all else of PyG and PyTorch, work beside gattn as they are."
        )
    sys.exit(errors > 0)


def _patch(file: Path, program: str | bytes, notebook: dict[str, Any] | None, write: bool) -> None:
    """Prints how a file's program changes, or changes it."""
    before = program if isinstance(program, str) else program.decode()
    after = patched(before)
    if before == after:
        return
    if write:
        text = after if notebook is None else _written_back(notebook, after)
        file.write_bytes(text.encode())  # which keeps the ends of lines
        print(f"{file}: written")
        return
    names = f"a/{file}", f"b/{file}"
    lines = difflib.unified_diff(before.splitlines(keepends=True), after.splitlines(keepends=True), *names)
    print("".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines), end="")


if __name__ == "__main__":
    main()
