import base64
import re
from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext")

FOLDER = Path(__file__).parents[1] / "notebooks"
SCRIPTS = sorted(FOLDER.glob("*.py"))
LARGEST = 600_000
"""Bytes of a notebook with its pictures."""

each_script = pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])


def cells(path, kind=None):
    return [cell for cell in jupytext.read(path).cells if kind in (None, cell.cell_type)]


def outputs(script):
    return [output for cell in cells(script.with_suffix(".ipynb"), "code") for output in cell.outputs]


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
        text = output.get("text", "") + output.get("data", {}).get("text/plain", "")
        assert not re.search(r"/(home|root|tmp|Users|work)/|\r|0x[0-9a-f]{6}", text), text
    assert script.with_suffix(".ipynb").stat().st_size < LARGEST


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
