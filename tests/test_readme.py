import os
import re
import shlex
from pathlib import Path

import pytest

import gattn

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def blocks(language, page=README):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("code", blocks("python"))
def test_python_runs(code, tmp_path, monkeypatch):
    if "gattn.huggingface" in code:
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})


def examples():
    """The code of each page; each block goes on where the page's first one ended."""
    for page in sorted((*ROOT.glob("docs/*.md"), *ROOT.glob("docs/tasks/*.md"))):
        first, *others = blocks("python", page) or [""]
        for number, code in enumerate(others or [""] * bool(first), 1):
            marks = [pytest.mark.slow] if "aoti_" in code else []
            yield pytest.param(first + code, id=f"{page.stem}-{number}", marks=marks)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of PyTorch's exporters
@pytest.mark.filterwarnings("ignore:Using '.*' without a 'pyg-lib' installation:UserWarning")  # of PyG's samplers
@pytest.mark.parametrize("code", list(examples()))
def test_pages_run(code, tmp_path, monkeypatch):
    if "import onnxruntime" in code:
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    if "import gattn.huggingface" in code:
        pytest.importorskip("transformers")
    if "import peft" in code or "from peft" in code:
        pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    try:
        exec(compile(code, "docs", "exec"), {})
    except gattn.datasets.DatasetUnavailableError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def test_commands_are_one_line_each_and_install_what_is_pinned():
    commands = blocks("sh")
    assert len(commands) == 2
    for command in commands:
        words = shlex.split(command)
        assert command.count("\n") == 1
        assert words[words.index("-c") + 1] == "constraints.txt"
        assert (README.parent / "constraints.txt").exists()
    assert commands[0].strip().endswith("python -m benchmarks.citation")
    assert commands[1].strip().endswith("python -m pytest -n auto")


def anchors(page):
    """The addresses of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "docs/tasks/*.md", "benchmarks/*.md", "notebooks/*.md")
    for path in ROOT.glob(pattern)
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
