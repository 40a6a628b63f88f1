"""transformers' architectures with gattn's attention, beside the same ones with eager attention."""

import random
import time

import pytest

pytest.importorskip("transformers")

from tests.huggingface.models import CHECKS, EXPLAINED, TABLE, cell, has, models, without_registry

pytestmark = [pytest.mark.huggingface, pytest.mark.filterwarnings("ignore")]
CELLS = [(name, check) for name in TABLE for check in CHECKS if has(name, check) and (name, check) not in EXPLAINED]
SECONDS = 60


@pytest.mark.slow
@pytest.mark.parametrize(("name", "check"), CELLS)
def test_every_cell(name, check):
    CHECKS[check](name)


def test_some_cells(capsys):
    """As many as fit into some seconds, in an order that a printed seed decides."""
    seed = random.randrange(10**6)
    cells, end = random.Random(seed).sample(CELLS, len(CELLS)), time.monotonic() + SECONDS
    for number, (name, check) in enumerate(cells):
        with capsys.disabled():
            print(f"\nseed {seed}, cell {number}: {name}, {check}" if number == 0 else "", end="")
        CHECKS[check](name)
        if time.monotonic() > end:
            break


def test_the_models_differ(monkeypatch):
    """One of each pair runs on gattn, and a wrong weight in it would be found."""
    theirs, ours = models("llama")
    assert (theirs.config._attn_implementation, ours.config._attn_implementation) == ("eager", "gattn")
    monkeypatch.setattr(ours.model.layers[0].self_attn, "scaling", 0.36)
    with pytest.raises(AssertionError):
        CHECKS["outputs, gradients"]("llama")


def test_the_table_has_what_was_asked_for():
    assert len(TABLE) >= 40
    assert cell("vit", "greedy") == "–"
    assert "bloom" in without_registry()
