"""What the documentation must say about every public name."""

import ast
import importlib
import importlib.util
import inspect
import re
import textwrap
from pathlib import Path

import pytest
import torch

import gattn

pytest.importorskip("matplotlib")
pytest.importorskip("networkx")

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("build", ROOT / "docs" / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
PACKAGE = Path(gattn.__file__).parent
NAMES = ["gattn"] + [
    ".".join(("gattn", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for path in sorted(PACKAGE.rglob("*.py"))
    if path != PACKAGE / "__init__.py" and ("huggingface" not in path.parts or importlib.util.find_spec("transformers"))
]

OBJECTS = build.public_names()


def is_documentable(thing):
    return inspect.isclass(thing) or inspect.isroutine(thing)


def sections(docstring):
    """The text of each of a docstring's sections, by title; the part before them is the section ""."""
    parts = re.split(r"^(Args|Example|Raises|Returns|Shapes|Yields):$", docstring, flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def documented_parameters(docstring):
    text = textwrap.dedent(sections(docstring).get("Args", ""))
    lines = re.findall(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \([^)]*\))?:", text, flags=re.MULTILINE)
    return {name.lstrip("*") for line in lines for name in line.split(", ")}


def parameters(thing):
    """The named parameters, and `*args` and `**kwargs` where gattn takes them itself."""
    inherited = inspect.isclass(thing) and not getattr(thing.__init__, "__module__", "").startswith("gattn")
    return {
        name: parameter
        for name, parameter in inspect.signature(thing).parameters.items()
        if name != "self" and not name.startswith("_") and not (inherited and "VAR_" in parameter.kind.name)
    }


def functions_of(thing):
    """The functions of gattn that run when `thing` is called, or made and called."""
    if not inspect.isclass(thing):
        yield inspect.unwrap(thing)
        return
    for base in thing.__mro__:
        for name in ("__init__", "__post_init__", "forward", "__call__"):
            function = vars(base).get(name)
            if inspect.isfunction(function) and function.__module__.startswith("gattn"):
                yield function


def can_raise(thing):
    """Whether it raises or checks something in its own code. (What it calls is not followed.)"""
    for function in functions_of(thing):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except OSError:  # generated, as a dataclass's methods are
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and "NotImplementedError" not in ast.unparse(node):
                return True
            if isinstance(node, ast.Call) and re.search(r"(^|[._])check(ed)?(_|$)", ast.unparse(node.func)):
                return True
    return False


def is_part_of_attention(thing):
    """Whether it is a layer, a model, a score or a distribution: something that has an equation or a paper."""
    return inspect.isclass(thing) and issubclass(thing, torch.nn.Module | gattn.Score | gattn.Distribution)


def lacks(thing):
    """What a name's docstring does not say."""
    docstring = inspect.cleandoc(thing.__doc__ or "")
    parts = sections(docstring)
    if not docstring.split("\n\n")[0].endswith((".", ":")):
        yield "a summary that ends with a full stop"
    if inspect.isclass(thing) and issubclass(thing, Exception | tuple):
        return
    if ">>>" not in parts.get("Example", ""):
        yield "an Example that runs"
    takes, says = parameters(thing), documented_parameters(docstring)
    if missing := sorted(takes.keys() - says):
        yield f"Args: {', '.join(missing)}"
    if unknown := sorted(says - takes.keys()):
        yield f"no Args that do not exist: {', '.join(unknown)}"
    if "Raises" not in parts and can_raise(thing):
        yield "Raises"
    if is_part_of_attention(thing) and not re.search(r"\.\. math::|:math:`|https://", docstring):
        yield "an equation, or the link of its paper"
    takes_tensors = any("Tensor" in str(parameter.annotation) for parameter in takes.values())
    if inspect.isclass(thing) and issubclass(thing, torch.nn.Module):
        if "Shapes" not in parts:
            yield "Shapes"
    elif takes_tensors and not re.search(r"`\(?\[[^`]*\]", docstring):
        yield "the shapes of its tensors, such as `[E, H]`"


@pytest.mark.parametrize("name", [name for name, thing in OBJECTS.items() if is_documentable(thing)])
def test_docstring_is_complete(name):
    missing = list(lacks(OBJECTS[name]))
    assert not missing, f"{name} lacks {'; '.join(missing)}."


@pytest.mark.parametrize("name", [name for name, thing in OBJECTS.items() if not is_documentable(thing)])
def test_constants_have_a_comment(name):
    module = importlib.import_module(name.rpartition(".")[0])
    sources = [module, *(value for value in vars(module).values() if inspect.ismodule(value))]
    constant = name.rpartition(".")[2]
    assert any(
        re.search(rf"^#: .*\n(#: .*\n)*{constant}\b", inspect.getsource(each), flags=re.MULTILINE)
        for each in sources
        if each.__name__.startswith("gattn.")
    )


@pytest.mark.parametrize("name", [name for name, thing in OBJECTS.items() if inspect.isclass(thing)])
def test_methods_say_what_they_do_and_document_no_argument_that_they_lack(name):
    """Of the methods that a class defines itself."""
    for method, function in vars(OBJECTS[name]).items():
        function = inspect.unwrap(getattr(function, "__func__", getattr(function, "fget", function)))
        if method.startswith("_") or not inspect.isfunction(function):
            continue
        if not Path(function.__code__.co_filename).is_relative_to(PACKAGE):  # generated by PyG
            continue
        docstring = inspect.cleandoc(function.__doc__ or "")
        assert docstring, f"{name}.{method} has no docstring."
        unknown = documented_parameters(docstring) - parameters(function).keys()
        assert not unknown, f"{name}.{method} takes no {unknown}."


@pytest.mark.parametrize("name", NAMES)
def test_every_module_has_a_docstring_and_lists_its_names(name):
    path = PACKAGE.joinpath(*name.split(".")[1:])
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    assert ast.get_docstring(tree)
    assigned = [ast.unparse(target) for node in tree.body for target in getattr(node, "targets", [])]
    assigned += [ast.unparse(node.target) for node in tree.body if isinstance(node, ast.AnnAssign)]
    assert assigned.count("__all__") == 1


@pytest.mark.parametrize("name", NAMES)
def test_what_other_modules_import_is_listed(name):
    path = PACKAGE.joinpath(*name.split(".")[1:])
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("gattn"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                is_listed = alias.name in module.__all__ or f"{node.module}.{alias.name}" in NAMES
                assert is_listed or alias.name.startswith("_"), f"{node.module}: {alias.name}"


@pytest.mark.parametrize("docstring", ["Does.\n\nArgs:\n    a: One.\n    b, c: Two.\n    **kwargs: More."])
def test_parameters_are_read_from_a_docstring(docstring):
    assert documented_parameters(docstring) == {"a", "b", "c", "kwargs"}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The pages that Sphinx is given."""
    folder = tmp_path_factory.mktemp("source")
    build.stage(folder)
    return folder


def test_every_public_name_is_in_the_reference_once(source):
    pages = [path.read_text() for path in (source / "docs" / "reference").rglob("*.*")]
    documented = re.findall(
        r"^\.\. auto(?:class|exception|function|data):: (\S+)$", "\n".join(pages), flags=re.MULTILINE
    )
    assert sorted(documented) == sorted(OBJECTS)


def test_a_name_without_a_page_is_an_error():
    with pytest.raises(ValueError, match=r"gattn.AdditiveScore is defined in gattn.scores, which no page"):
        build.reference({Path("docs/reference/layers.md"): "<!-- names: gattn.nn -->"})


def test_pages_are_found_and_so_is_what_they_link_to(source):
    links = {
        f"{path.relative_to(source)}: {link}"
        for path in source.rglob("*.md")
        for link in re.findall(
            r"\]\(([^)\s#:]+)\)", re.sub(r"```.*?```|`[^`]*`", "", path.read_text(), flags=re.DOTALL)
        )
        if not (path.parent / link).exists()
    }
    assert not links
    assert (source / "notebooks" / "01_attention_is_message_passing.ipynb").exists()
    assert (source / "benchmarks" / "results" / "citation" / "table.md").exists()
    assert "docs/explorers" not in (source / "index.md").read_text()


def test_interactive_pages_are_embedded(tmp_path):
    pages = tmp_path / "explorers"
    pages.mkdir()
    (pages / "cora.html").write_text("<p>attention")
    build.stage(tmp_path / "source", pages)
    assert "docs/explorers" in (tmp_path / "source" / "index.md").read_text()
    assert 'src="../explorers/cora.html"' in (tmp_path / "source" / "docs" / "explorers.md").read_text()
