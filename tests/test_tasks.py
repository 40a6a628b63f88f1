"""The pages by task: one short program each, which `test_readme.py` runs, and figures of the committed tables."""

import re

import pytest

from tests import test_quotes as quotes
from tests.test_quotes import cell, number, one_decimal, rows
from tests.test_readme import ROOT, blocks

FOLDER = ROOT / "docs" / "tasks"
PAGES = sorted(page for page in FOLDER.glob("*.md") if page.stem != "index")
CONVS = ("gat", "gatv2", "transformer")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_one_short_program_that_checks_itself_and_links(page):
    (program,) = blocks("python", page)
    assert program.count("\n") < 60
    assert "assert" in program
    assert "print(" in program
    text = page.read_text()
    assert "**What to expect.**" in text
    assert "**For your own" in text
    for place in ("../reference/", "../../notebooks/"):
        assert f"]({place}" in text


def test_the_list_has_every_page():
    text = (FOLDER / "index.md").read_text()
    table, _, toctree = text.partition("```{toctree}")
    assert re.findall(r"^\| [^|]* \| \[[^]]*\]\((\w+)\.md\)", table, flags=re.MULTILINE) == re.findall(
        r"^\w+$", toctree, flags=re.MULTILINE
    )
    assert {f"{name}.md" for name in re.findall(r"^\w+$", toctree, flags=re.MULTILINE)} == {x.name for x in PAGES}


def listed(values):
    """Three values as a sentence has them."""
    *others, last = values
    return f"{', '.join(others)} and {last}"


def choices():
    """The figures of the page that helps to choose, in its order."""
    cora = [cell("citation", "test, %", data_set="cora", model=conv) for conv in CONVS]
    yield "Cora, GAT's recipe, {} % of the test nodes", [listed(cora)]
    photo = [one_decimal(cell("nodes", "test, %", data_set="photo", split="60-20-20", model=conv)) for conv in CONVS]
    yield "Photo, ten random splits, {} %", [listed(photo)]
    mines = [one_decimal(cell("nodes", "test, %", data_set="minesweeper", model=conv)) for conv in CONVS]
    others = cell("nodes", "other GATs", data_set="minesweeper", model="gat").partition(",")[0]
    yield "Minesweeper, ROC-AUC {} with", [listed(mines)]
    yield "GAT in an earlier comparison {} |", [one_decimal(others)]

    def molhiv(model, column="test"):
        return cell("molecules", column, data_set="rebuilt molhiv", model=model)

    bonds = [one_decimal(molhiv(model)) for model in ("gatv2", "transformer", "gatedgcn")]
    yield "ogbg-molhiv (rebuilt), ROC-AUC {} with", [listed(bonds)]
    times = [
        float(cell("molecules_times", "seconds/epoch", data_set="rebuilt molhiv", model=model, layers="gattn"))
        for model in ("gps", "transformer")
    ]
    text = (
        "attention among all atoms beside the bonds: {}; without the bonds' layer {}. An epoch takes {} times as long"
    )
    yield text, [one_decimal(molhiv("gps")), one_decimal(molhiv("complete")), f"{times[0] / times[1]:.1f}"]
    seconds = [
        number(cell("nodes", "seconds/epoch (quartiles)", data_set="photo", split="60-20-20", model=conv))
        for conv in CONVS
    ]
    yield "an epoch on Photo takes {} s with", [listed([f"{x:.2f}" for x in seconds])]
    most = cell("complete", "forward + backward, ms", attention="linear", N="1 000 000", by="gattn")
    on_photo = [cell("nodes", "test, %", data_set="photo", split="luo", model=model) for model in ("gps", "gat")]
    text = "1 000 000 nodes take {} s. Check that it helps: on Photo, `GPSConv` with it has {} %, `GATConv` alone {} %"
    yield text, [f"{number(most) / 1000:.1f}", *map(one_decimal, on_photo)]
    layers = {row["layer"].partition(",")[0]: row["× PyG's best, memory kept"] for row in rows("layers", peer="gattn")}
    text = "{} and {} times as fast as the fastest form of PyG's layer"
    yield text, [layers[name].rstrip("×") for name in ("HGTConv", "RGATConv")]
    temporal = [cell("temporal", "test AP, %", model=model) for model in ("transformer", "tgat")]
    yield "average precision {} with these two", [" and ".join(temporal)]
    yield "untrained, has {} |", [cell("temporal", "test AP, %", model="recency")]
    times = [
        f"{number(cell('sequence', 'forward + backward, ms', 'graphs.md', graph=graph, N='8192')):,.0f}"
        for graph in ("full", "window")
    ]
    yield "on 8 192 tokens: {} ms with full attention, {} ms with a window", [x.replace(",", " ") for x in times]
    kinds = ("none", "general, scaled", "transformer")
    yield "BLEU {} without attention", [listed([cell("translation", "test BLEU", attention=kind) for kind in kinds])]


OTHERS = ("GATv2", "Seq2Seq", "notebooks/02_", "notebooks/07_")


def test_figures_that_help_to_choose_are_those_of_tables(monkeypatch):
    place = ("docs/tasks/choose.md", "## The table")
    monkeypatch.setitem(quotes.SECTIONS, place, ((choices,), OTHERS, ()))
    quotes.test_every_figure_is_that_of_a_table(place)
