"""Imports go one way: what stands lower in CONTRIBUTING.md is imported by what stands above it, never the reverse."""

import ast
import re
from pathlib import Path

import gattn

PACKAGE = Path(gattn.__file__).parent
#: The parts of gattn, in the order in which CONTRIBUTING.md lists them.
ORDER = re.findall(r"^gattn/(\w+)", (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)


def imported(tree):
    """The parts of gattn that a module imports, except for types alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gattn":
            parts = node.module.split(".")[1:2] or [alias.name for alias in node.names]
            yield from ((node.lineno, part) for part in parts)
        elif isinstance(node, ast.Import):
            names = (alias.name.split(".") for alias in node.names)
            yield from ((node.lineno, name[1]) for name in names if name[0] == "gattn" and len(name) > 1)


def test_no_module_imports_itself_through_others():
    """Not even where only types need it, or inside of a function."""
    names = {path: ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    names = {name.removesuffix(".__init__"): path for path, name in names.items()}
    imports = {}
    for name, path in names.items():
        found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        pairs = [(node.module, f"{node.module}.{alias.name}") for node in found for alias in node.names]
        imports[name] = {inner if inner in names else module for module, inner in pairs} & names.keys() - {name}
    while leaves := [name for name, others in imports.items() if not others & imports.keys()]:
        for name in leaves:
            del imports[name]
    # What remains imports itself through others, or is above such a circle.
    assert not imports, {name: sorted(others & imports.keys()) for name, others in imports.items()}


def test_imports_go_one_way():
    parts = {path.relative_to(PACKAGE).parts[0].removesuffix(".py"): [] for path in PACKAGE.rglob("*.py")}
    assert sorted(ORDER) == sorted(parts.keys() - {"__init__", "__main__"})
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part not in ORDER:
            continue
        for line, other in imported(ast.parse(path.read_text())):
            if other in ORDER and ORDER.index(other) < ORDER.index(part):
                wrong.append(f"{path.relative_to(PACKAGE)}:{line} imports gattn.{other}")
    assert not wrong
