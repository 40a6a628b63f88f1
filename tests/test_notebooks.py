import base64
import re
from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext")

FOLDER = Path(__file__).parents[1] / "notebooks"
SCRIPTS = sorted(FOLDER.glob("*.py"))
LARGEST = 600_000
"""Bytes of a notebook with its pictures."""

KNOWN = {
    "01": {},
    "02": {
        "140": "training papers",
        "150": "epochs",
        "1000": "test papers",
        "1640": "papers in all splits",
        "1.3 %": "of the next cell",
        "83.2": "of README.md, as is its deviation",
        "0.6 %": "",
        "0.5": "guessing",
    },
    "03": {"140": "training papers", "2485": "papers of the largest component", "0.5": "guessing"},
    "04": {"2014": "a year", "1964": "a year", "1992": "a year", "1.8": "million parameters, of the benchmark's table"},
    "05": {"2017": "a year"},
    "06": {"512": "pages of 4096 bytes", "20000": "a third of the edges", "30.7": "of section 1"},
    "07": {},
    "08": {"480": "sentences from 400 to 880", "88": "megabytes of a package"},
}
"""Numbers in the text of each notebook that are in no cell, or not in the cells right above, and what they are."""

each_script = pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])


def cells(path, kind=None):
    return [cell for cell in jupytext.read(path).cells if kind in (None, cell.cell_type)]


def outputs(script):
    return [output for cell in cells(script.with_suffix(".ipynb"), "code") for output in cell.outputs]


def printed(output):
    return output.get("text", "") + output.get("data", {}).get("text/plain", "")


def test_each_notebook_has_a_script_and_a_paragraph():
    described = re.findall(r"\]\((\w+)\.ipynb\)", (FOLDER / "README.md").read_text())
    assert sorted(described) == [script.stem for script in SCRIPTS]
    assert [path.stem for path in sorted(FOLDER.glob("*.ipynb"))] == [script.stem for script in SCRIPTS]


@each_script
def test_pair_is_in_sync(script):
    expected, notebook = (
        [(cell.cell_type, cell.source) for cell in cells(path)] for path in (script, script.with_suffix(".ipynb"))
    )
    assert notebook == expected


@each_script
def test_notebook_was_executed_from_top_to_bottom(script):
    counts = [cell.execution_count for cell in cells(script.with_suffix(".ipynb"), "code")]
    assert counts == list(range(1, len(counts) + 1))
    assert any("image/png" in output.get("data", {}) for output in outputs(script))


@each_script
def test_outputs_are_clean(script):
    for output in outputs(script):
        assert output.output_type != "error", output
        assert output.get("name") != "stderr", output.text
        text = printed(output)
        assert not re.search(r"/(home|root|tmp|Users|work)/|\r|0x[0-9a-f]{6}", text), text
    assert script.with_suffix(".ipynb").stat().st_size < LARGEST


def numbers(text):
    """The numbers in code or in an output; 12,000 and 12_000 are read in one piece and in two."""
    number = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"
    return [float(found) for found in re.findall(number, text + " " + re.sub(r"(?<=\d)[,_](?=\d{3}\b)", "", text))]


def claims(text):
    """The numbers in prose, with their per cent signs, except for single digits and what is in formulas or code."""
    text = re.sub(r"^#.*$|^\|.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\$\$[^$]*\$\$|\$[^$]*\$|`[^`]*`|\]\([^)]*\)+|([Ss]ection|[Nn]otebook) \d+", "", text)
    text = re.sub(r"(?<=\d)[,\s](?=\d{3}\b)", "", text)
    found = [number.group() for number in re.finditer(r"(?<![\w.-])\d+(\.\d+)?(?!\w)(\s%)?", text)]
    return [number.replace("\n", " ") for number in found if len(number) > 1]


def is_rounded(claim, exact):
    """Whether a claim is one of these numbers, rounded to the digits that it has."""
    value, digits = float(claim.removesuffix(" %")), len(claim.removesuffix(" %").partition(".")[2])
    scales = (1, 100) if "%" in claim else (1,)
    return any(abs(round(scale * number, digits) - value) < 1e-9 for number in exact for scale in scales)


@each_script
def test_figures_in_the_text_are_those_of_the_cells(script):
    """Percentages and decimals come from the outputs since the last text, whole numbers from any code or output."""
    notebook, known, above, wrong = cells(script.with_suffix(".ipynb")), KNOWN[script.stem[:2]], [], []
    code = [cell.source for cell in notebook if cell.cell_type == "code"]
    anywhere = numbers(" ".join(code + [printed(output) for output in outputs(script)]))
    for cell in notebook:
        if cell.cell_type == "code":
            above += numbers(" ".join(map(printed, cell.outputs)))
            continue
        for claim in claims(cell.source):
            if claim not in known and not is_rounded(claim, anywhere if claim.isdigit() else above):
                wrong.append((claim, cell.source[:60]))
        above = []
    assert not wrong


def test_pictures_of_the_readme_are_the_notebooks_own():
    pictures = sorted((FOLDER / "pictures").glob("*.png"))
    own = {
        base64.b64decode(output["data"]["image/png"])
        for script in SCRIPTS
        for output in outputs(script)
        if "image/png" in output.get("data", {})
    }
    assert pictures
    assert all(picture.read_bytes() in own for picture in pictures)
