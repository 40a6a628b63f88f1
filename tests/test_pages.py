"""What single pages of the documentation say: the samplers' examples, the GPU's figures, the list of the reference."""

import re
from pathlib import Path

import pytest
import torch
import torch_geometric.typing

import gattn

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@pytest.mark.skipif(
    not (torch_geometric.typing.WITH_TORCH_SPARSE or torch_geometric.typing.WITH_PYG_LIB),
    reason="PyG's samplers need pyg-lib or torch-sparse",
)
@pytest.mark.filterwarnings("ignore:Using '.*' without a 'pyg-lib' installation:UserWarning")
def test_minibatches_run():
    """These blocks are marked `py`, since `python` runs everywhere, also where there are no samplers."""
    blocks = re.findall(r"```py(?:thon)?\n(.*?)```", (DOCS / "minibatches.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 4
    names = {}
    for block in blocks:
        exec(compile(block, "minibatches.md", "exec"), names)
    assert names["loss"].isfinite()
    data = names["data"]
    assert (names["classes"] == data.y).float().mean() > 0.5  # of four classes
    with torch.no_grad():
        whole = names["convs"][1](names["convs"][0](data.x, data.edge_index).relu(), data.edge_index)
    assert names["classes"].equal(whole.argmax(-1))  # layer by layer, as at once


def test_gpu_figures_are_those_of_the_table():
    """The ratios that the page quotes, which are of the only layer that has a peer's row."""
    text = " ".join((DOCS / "gpus.md").read_text().split())
    results = ROOT / "benchmarks/results/kernels_gpu"
    tables = [(results / name).read_text() for name in ("forward.md", "table.md", "memory.md")]
    forward, both, memory = (re.search(r"\| layer \| gat .* gattn \|.*? ([\d.]+)× \|", table)[1] for table in tables)
    assert f"{forward} times as fast as eager PyG forward and {both} times forward and backward" in text
    assert f"with a {round(float(memory))}th of the memory" in text
    assert all(table.count("| pyg |") == 1 for table in tables)


def test_the_reference_lists_its_pages():
    """Each in the table that people see, and in the contents that Sphinx reads."""
    text = (DOCS / "reference/index.md").read_text()
    pages = sorted(path.stem for path in (DOCS / "reference").glob("*.md") if path.stem != "index")
    assert sorted(re.findall(r"^\| \[[^]]+\]\((\w+)\.md\) \|", text, flags=re.MULTILINE)) == pages
    assert sorted(re.findall(r"^(\w+)$", text, flags=re.MULTILINE)) == pages


def test_a_release_has_one_date():
    """The citation's is that of the changelog's newest section, which begins without one."""
    version, date = re.search(r"^## (\S+) \((.*)\)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE).groups()
    assert version == gattn.__version__
    released = re.findall(r"^date-released: (.*)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)
    assert released == [date] * (date != "unreleased")
