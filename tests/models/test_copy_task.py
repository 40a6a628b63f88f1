"""What attention bought: a sequence of 40 tokens can be copied with it, and not through a vector of a fixed size."""

import pytest
import torch

import gattn

TOKENS, LENGTH = 12, 40


def accuracy(attention, steps):
    """The share of tokens that a model, trained so long, copies right by greedy search."""
    torch.manual_seed(0)
    model = gattn.models.Seq2Seq(TOKENS, TOKENS, 32, 64, attention=attention)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    end = torch.full((32, 1), model.end)
    for step in range(steps):
        length = int(torch.randint(1, LENGTH, ())) if step < steps // 2 else LENGTH  # short ones teach it first
        source = torch.randint(3, TOKENS, (32, length))
        optimizer.zero_grad()
        model.loss(source, torch.cat([source, end], 1)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    source = torch.randint(3, TOKENS, (64, LENGTH))
    copy = model.generate(source, max_length=LENGTH + 1)
    copy = torch.nn.functional.pad(copy, (0, LENGTH), value=model.end)[:, :LENGTH]
    return (copy == source).float().mean().item()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "steps"),
    [
        ("dot", 1000),
        ("general", 1000),
        ("additive", 1000),
        ("local-m", 1000),
        ("local-p", 1000),
        ("hard", 1500),
        ("hard-st", 1500),
    ],
)
def test_attention_copies_forty_tokens(attention, steps):
    assert accuracy(attention, steps) > 0.9


@pytest.mark.slow
def test_a_fixed_vector_does_not_hold_forty_tokens():
    assert accuracy(None, 1500) < 0.5
