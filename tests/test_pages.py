"""What single pages of the documentation say: the samplers' examples, the GPU's figures, the list of the reference."""

import re
from pathlib import Path

import pytest
import torch
import torch_geometric.typing

import gattn
from tests.test_quotes import number, rows, two_digits

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


@pytest.mark.parametrize("layer", ["GAT", "GATv2", "Transformer"])
@pytest.mark.parametrize("part", ["attention alone", "whole layer", "whole layer, 16 edge features"])
def test_gpu_figures_are_those_of_the_table(part, layer):
    """Where there is a peer's row."""
    kind = layer.lower() + " + edge features" * ("edge" in part)
    which = {"part": "attention" if part == "attention alone" else "layer", "layer": kind, "dtype": "float32"}

    def figure(name, column):
        found = rows("kernels_gpu", name, peer="gattn", **which)
        return two_digits(number(found[0][column])) if found and found[0][column] != "–" else None

    memory, cells = figure("memory.md", "memory, PyG's ÷"), []
    for column in ("× PyG eager, default allocator", "× PyG compiled, default allocator"):
        both, forward = (figure(name, column) for name in ("table.md", "forward.md"))
        cells.append("–" if both is None else f"{both} ({forward})")
    line = f"| {' | '.join([f'{part}: {layer}', *cells, str(memory)])} |\n"
    text = (DOCS / "gpus.md").read_text()
    if cells[0] == "–":
        assert f"| {part}: {layer} |" not in text, "the table has no such row"
    else:
        assert line in text, f"the table says {line}"


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
