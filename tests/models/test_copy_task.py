"""What attention bought: a sequence of 20 tokens can be copied with it, and not through a vector of a fixed size."""

import pytest
import torch

import gattn

TOKENS, LENGTH, BATCH = 12, 20, 64


def accuracy(attention, steps):
    """The share of tokens that a model copies correctly by greedy search after this many training steps."""
    torch.manual_seed(0)
    model = gattn.models.Seq2Seq(TOKENS, TOKENS, 32, 64, attention=attention)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    end = torch.full((BATCH, 1), model.end)
    for step in range(steps):
        length = int(torch.randint(1, LENGTH, ())) if step < steps // 2 else LENGTH  # short ones teach it first
        source = torch.randint(3, TOKENS, (BATCH, length))
        optimizer.zero_grad()
        model.loss(source, torch.cat([source, end], 1)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    source = torch.randint(3, TOKENS, (64, LENGTH))
    copy = model.generate(source, max_length=LENGTH + 1)
    copy = torch.nn.functional.pad(copy, (0, LENGTH), value=model.end)[:, :LENGTH]
    return (copy == source).float().mean().item()


# With seeds 0, 1 and 2, the least of all is 0.84 (hard-st) with attention, and the most without it is 0.32.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "steps"),
    [
        ("dot", 300),
        ("general", 300),
        ("additive", 300),
        ("local-m", 300),
        ("local-p", 300),
        ("hard", 400),
        ("hard-st", 400),
    ],
)
def test_attention_copies_twenty_tokens(attention, steps):
    assert accuracy(attention, steps) > 0.75


@pytest.mark.slow
def test_a_fixed_vector_does_not_hold_twenty_tokens():
    assert accuracy(None, 400) < 0.5
