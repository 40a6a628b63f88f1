"""Builds the documentation: `python docs/build.py`, then open `.build-docs/html/index.html`.

The pages lie all over the repository, and their links are relative, so that they can be followed in a clone. Sphinx
therefore gets a copy of every page, each in its place, together with the files that pages link to. The reference is
written from `__all__`, so that a new name needs no entry.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BUILD = ROOT / ".build-docs"

#: The modules whose `__all__` is meant for users. A name is documented under the first of them that has it.
PUBLIC = (
    "gattn",
    "gattn.nn",
    "gattn.models",
    "gattn.models.decoding",
    "gattn.graphs",
    "gattn.datasets",
    "gattn.transforms",
    "gattn.visualize",
    "gattn.explain",
    "gattn.distributed",
    "gattn.features",
    "gattn.testing",
    *(["gattn.huggingface"] if importlib.util.find_spec("transformers") else []),
)

#: Types that public functions take or return.
TYPES = (
    "gattn.calls.CallExplanation",
    "gattn.distributions.Law",
    "gattn.models.seq2seq.Source",
    "gattn.models.seq2seq.State",
    "gattn.nn.recurrent.hard_attention.Choice",
    "gattn.nn.recurrent.lstmn_cell.LSTMNState",
    "gattn.nn.recurrent.rnn_attention.Memory",
    "gattn.recording.AttentionRecord",
    "gattn.scores.Family",
)

PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "docs/*.md",
    "docs/tasks/*.md",
    "docs/reference/*.md",
    "notebooks/*.ipynb",
)

_LINK = re.compile(r'(?<=\]\()[^()\s#]+(?=[)#])|(?<=src=\\")[^"\\]+|(?<=src=")[^"]+')
_NAMES = re.compile(r"<!-- names: (.*) -->")


def public_names() -> dict[str, Any]:
    """Every public object, once, by the name that users write."""
    found: dict[int, tuple[str, Any]] = {}
    for module_name in PUBLIC:
        module = importlib.import_module(module_name)
        for name in module.__all__:
            thing = getattr(module, name)
            if not inspect.ismodule(thing):
                found.setdefault(id(thing), (f"{module_name}.{name}", thing))
    for path in TYPES:
        module_name, _, name = path.rpartition(".")
        thing = getattr(importlib.import_module(module_name), name)
        found.setdefault(id(thing), (path, thing))
    return dict(found.values())


def reference(pages: dict[Path, str]) -> dict[Path, str]:
    """The pages of the reference, their lists of names filled in, and a page of its own for each class.

    A list, `<!-- names: gattn.nn gattn.models -->`, has the names that are defined in these modules, or below them,
    unless another list names a module closer to theirs.

    Args:
        pages: The text of each page of the reference.

    Raises:
        ValueError: If a name belongs to no list.
    """
    lists = {module: path for path, text in pages.items() for match in _NAMES.findall(text) for module in match.split()}
    members: dict[str, list[tuple[str, Any]]] = {module: [] for module in lists}
    for name, thing in sorted(public_names().items(), key=lambda item: item[0].rpartition(".")[2].lower()):
        home = str(getattr(thing, "__module__", ""))
        home = home if home.startswith("gattn") else name.rpartition(".")[0]  # a constant or the name of a type
        owners = [module for module in lists if home == module or home.startswith(f"{module}.")]
        if not owners:
            raise ValueError(f"{name} is defined in {home}, which no page of docs/reference lists.")
        members[max(owners, key=len)].append((name, thing))

    classes: dict[Path, str] = {}

    def listed(match: re.Match[str]) -> str:
        found = [member for module in match[1].split() for member in members[module]]
        own_page = {name: thing for name, thing in found if inspect.isclass(thing)}
        rst = []
        if own_page:
            rst += [".. currentmodule:: None", "", ".. autosummary::", "   :nosignatures:", ""]
            rst += [*(f"   ~{name}" for name in own_page), ""]
            rst += [".. toctree::", "   :hidden:", "", *(f"   names/{name}" for name in own_page), ""]
        for name, thing in found:
            short = name.rpartition(".")[2]
            if inspect.isclass(thing):
                directive = "autoexception" if issubclass(thing, Exception) else "autoclass"
                page = f"{short}\n{'=' * len(short)}\n\n.. {directive}:: {name}\n   :members:\n"
                classes[Path("docs/reference/names") / f"{name}.rst"] = page
            else:
                kind = "autofunction" if inspect.isroutine(thing) else "autodata"
                rst += [f".. {kind}:: {name}", *["   :no-value:"] * (kind == "autodata"), ""]
        return "\n".join(["```{eval-rst}", *rst, "```"])

    return {path: _NAMES.sub(listed, text) for path, text in pages.items()} | classes


def embedded(pages: list[Path]) -> dict[Path, str]:
    """A page that shows the interactive ones in frames, if there are any."""
    text = (
        "# Explorers\n\nEach of these is one file that `gattn.visualize.explore` wrote. Click on a node or a token.\n"
    )
    for page in pages:
        url = f"../explorers/{page.name}"
        text += f'\n## {page.stem.capitalize()}\n\n<iframe src="{url}" title="{page.stem}"></iframe>\n'
        text += f'<p><a href="{url}">Open it on a page of its own.</a></p>\n'
    return {Path("docs/explorers.md"): text} if pages else {}


def stage(folder: Path, explorers: Path | None = None) -> None:
    """Writes all pages, and the files in the repository that they link to, to a folder.

    Args:
        folder: Where to write; what is there is deleted first.
        explorers: The folder of the interactive pages. (default: `None`, without them)
    """
    shutil.rmtree(folder, ignore_errors=True)
    todo = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    texts: dict[Path, str] = {}
    while todo:
        path = todo.pop()
        relative = path.relative_to(ROOT)
        if relative in texts or (folder / relative).exists():
            continue
        if path.suffix not in (".md", ".ipynb"):
            (folder / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / relative)
            continue

        def followed(match: re.Match[str], home: Path = path.parent) -> str:
            target = (home / match[0]).resolve()
            if target.is_file() and target.is_relative_to(ROOT):
                todo.append(target)
                if target == ROOT / "README.md":  # which the start page includes
                    return match[0].replace("README.md", "index.md")
            return match[0]

        text = _LINK.sub(followed, path.read_text())
        if relative.is_relative_to("benchmarks/results"):  # a bare table
            text = f"---\norphan: true\n---\n\n# {relative.parent.name}: {relative.stem}\n\n{text}"
        texts[relative] = text

    if importlib.util.find_spec("transformers") is None:  # without which the module cannot be imported
        missing = (
            "# Hugging Face models\n\nThis page was built without `transformers`, which `gattn.huggingface` needs.\n"
        )
        texts[Path("docs/reference/huggingface.md")] = missing
    interactive = embedded(sorted(explorers.glob("*.html")) if explorers else [])
    contents = "```{toctree}\n:hidden:\n\ndocs/explorers\n```" if interactive else ""
    texts[Path("index.md")] = texts.pop(Path("docs/index.md")).replace("<!-- explorers -->", contents)
    pages = {path: text for path, text in texts.items() if path.parent == Path("docs/reference")}
    for path, text in (texts | reference(pages) | interactive).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def main() -> None:
    """Builds the pages and ends with Sphinx's exit status; a warning is an error."""
    parser = argparse.ArgumentParser(description="Build the documentation.")
    parser.add_argument("--builder", default="html", help="html, or linkcheck to try all external links")
    parser.add_argument("--out", type=Path, default=BUILD, help="where to build (default: .build-docs)")
    options = parser.parse_args()
    source, cache, explorers = options.out / "source", options.out / "cache", options.out / "explorers"
    stage(source, explorers)
    command = ["-m", "sphinx", "-b", options.builder, "-W", "--keep-going", "-n", "-q", "-d", str(cache)]
    command += ["-c", str(ROOT / "docs"), str(source), str(options.out / options.builder)]
    status = subprocess.run([sys.executable, *command]).returncode
    if explorers.exists() and options.builder == "html":
        shutil.copytree(explorers, options.out / "html/explorers", dirs_exist_ok=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
