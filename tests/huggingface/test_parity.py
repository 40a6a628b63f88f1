"""transformers' architectures with gattn's attention, beside the same ones with eager attention."""

import random
import time

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from tests.huggingface.models import CHECKS, EXPLAINED, TABLE, cell, has, models, without_registry

pytestmark = [pytest.mark.huggingface, pytest.mark.filterwarnings("ignore")]
CELLS = [(name, check) for name in TABLE for check in CHECKS if has(name, check) and (name, check) not in EXPLAINED]
SECONDS = 30


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


def test_models_that_do_not_ask_the_registry():
    """One of each reason, and some that do ask or only combine others."""
    found = without_registry()
    assert {"falcon", "gpt_neo", "bark"} <= set(found["table"])
    assert {"bloom", "mpt", "deberta_v2", "imagegpt", "yoso", "mra", "sew_d", "wavlm"} <= set(found["own"])
    assert {"longt5", "bigbird_pegasus"} <= set(found["some"])
    named = [name for names in found.values() for name in names]
    assert len(set(named)) == len(named)
    assert not {"bert", "llama", "t5", "llava", "mamba", "resnet", "rag"} & set(named)
    config = transformers.FalconConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(KeyError, match="gattn"):
        transformers.AutoModel.from_config(config, attn_implementation="gattn")


def losses(implementation, dropout, steps, dtype=torch.double):
    """Those of a small BERT that learns to copy each token's left neighbour."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
    config = transformers.BertConfig(vocab_size=20, max_position_embeddings=16, **sizes, **rates)
    torch.manual_seed(0)
    model = transformers.AutoModelForMaskedLM.from_config(config, attn_implementation=implementation).to(dtype).train()
    optimizer, generator, found = torch.optim.AdamW(model.parameters(), 3e-3), torch.Generator().manual_seed(0), []
    for _ in range(steps):
        tokens = torch.randint(1, 20, (8, 16), generator=generator)
        there = torch.arange(16) < torch.randint(8, 17, (8, 1), generator=generator)
        labels = tokens.roll(1, 1).masked_fill(~there, -100)
        loss = model(tokens, attention_mask=there.long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return torch.tensor(found, dtype=torch.double)


@pytest.mark.parametrize("steps", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_training_follows_sdpa(steps):
    theirs, ours = (losses(name, 0.0, steps) for name in ("sdpa", "gattn"))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-8)
    assert ours[-9:].mean() < ours[:9].mean(), "it learns"


@pytest.mark.slow
def test_training_with_dropout_reaches_the_loss_of_sdpa():
    """Both draw other weights; within five standard errors of the mean of the last steps, which differ by batches."""
    theirs, ours = (losses(name, 0.1, 500, torch.float)[-100:] for name in ("sdpa", "gattn"))
    without = losses("gattn", 0.0, 500, torch.float)[-100:]
    noise = (ours.var() + theirs.var()).div(len(ours)).sqrt()
    assert (ours.mean() - theirs.mean()).abs() < 5 * noise
    assert ours.mean() - without.mean() > 5 * noise, "dropout is on"
