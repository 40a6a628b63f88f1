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


def test_recipes_compute_what_their_papers_say():
    """The functions of the page, beside matrices of all pairs."""
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / "literature.md").read_text(), flags=re.DOTALL)
    names = {}
    exec(compile(block, "literature.md", "exec"), names)
    query, key, value = torch.randn(3, 6, 2, 4, dtype=torch.double).unbind()
    graph, decay = gattn.CompleteGraph(6), torch.rand(6, 6, dtype=torch.double)
    products = torch.einsum("nhc,mhc->hnm", query, key)

    def mixed(weights):
        return torch.einsum("hnm,mhc->nhc", weights, value)

    weights = 1 + products / (query.norm() * key.norm())
    expected = mixed(weights / weights.sum(-1, keepdim=True))
    torch.testing.assert_close(names["difformer"](query, key, value, graph), expected)
    expected = mixed((products / 2 * decay).softmax(-1))
    torch.testing.assert_close(names["gradformer"](query, key, value, graph, decay), expected)
    weights = (products / 2).expm1()
    expected = mixed(weights.relu() / (weights.abs().sum(-1, keepdim=True) + 1e-6))
    found = gattn.attend(query, key, value, graph, distribution=names["Softpick"]())
    torch.testing.assert_close(found, expected)

    features, noise = gattn.features.Favor(4, num_features=64).double(), torch.rand(6, 2, dtype=torch.double)
    of_query, of_key = features(query * 2, key * 2, graph)  # of the default temperature
    weights = torch.einsum("nhr,mhr->hnm", of_query, of_key) * (noise / 0.25).exp().t().unsqueeze(1)
    found = names["nodeformer"](query, key, value, graph, features, noise=noise)
    torch.testing.assert_close(found, mixed(weights / weights.sum(-1, keepdim=True)))

    x, edge_index = torch.randn(6, 3, dtype=torch.double), torch.tensor([[0, 1, 2, 2, 5], [1, 1, 1, 3, 4]])
    matrix = torch.zeros(6, 6, dtype=torch.double).index_put((edge_index[1], edge_index[0]), torch.ones(5).double())
    matrix = matrix / matrix.sum(1, keepdim=True).clamp(min=1)
    found = names["hop_tokens"](x, edge_index, 2)
    torch.testing.assert_close(found, torch.stack([x, matrix @ x, matrix @ matrix @ x], 1))
    assert names["tokens"].shape == (7, 20)

    messages, history = torch.randn(9, 2), torch.tensor([0, 0, 0, 0, 0, 2, 3, 3, 3])
    found, of_history = names["patches"](messages, history, 5, size=2)
    assert of_history.tolist() == [0, 0, 0, 2, 3, 3]
    blank = torch.zeros(2)
    rows = [*messages[:5], blank, messages[5], blank, *messages[6:], blank]
    torch.testing.assert_close(found, torch.stack(rows).view(6, 4))
    neighbor = torch.tensor([7, 8, 7, 7, 9, 7, 9, 9, 7])
    counts = [
        [sum(history[k] == 2 * (h // 2) + side and neighbor[k] == n for k in range(9)) for side in (0, 1)]
        for h, n in zip(history.tolist(), neighbor.tolist(), strict=True)
    ]
    assert names["co_occurrence"](neighbor, history).tolist() == counts
    assert names["nodes"].shape == (4, 16)
