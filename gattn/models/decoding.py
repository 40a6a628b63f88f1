"""From next-token probabilities to tokens: sampling, greedy and beam search."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Draws one token from each row of logits.

    Args:
        logits: `[..., V]`.
        temperature: Logits are divided by it; zero takes the most probable token. (default: `1.0`)
        top_k: Only so many of the most probable tokens are possible. (default: `None`, all)
        top_p: Only the fewest tokens that together have at least this probability are possible (nucleus sampling,
            `Holtzman et al. <https://arxiv.org/abs/1904.09751>`_). (default: `None`, all)
        generator: Random numbers come from it. (default: `None`, PyTorch's own)

    Returns:
        Tokens, `[...]`.

    Raises:
        ValueError: If the temperature is negative, `top_k` is not positive, or `top_p` is not in (0, 1].

    Example:
        >>> import torch
        >>> from gattn.models.decoding import sample
        >>> sample(torch.tensor([[0.0, 2.0, 1.0]]), temperature=0.0)
        tensor([1])
    """
    if temperature < 0:
        raise ValueError(f"temperature is at least 0; got {temperature}.")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1; got {top_k}.")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p is a probability above 0; got {top_p}.")
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is not None and top_k < logits.size(-1):
        threshold = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if top_p is not None:
        ordered, order = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        logits = logits.scatter(-1, order, ordered.masked_fill(before >= top_p, -torch.inf))
    rows = logits.softmax(-1).reshape(-1, logits.size(-1))
    return torch.multinomial(rows, 1, generator=generator).view(logits.shape[:-1])


def beam_search(
    step: Callable[[Tensor], Tensor],
    batch: int,
    start: int,
    end: int,
    max_length: int,
    beams: int = 1,
    length_penalty: float = 1.0,
    reorder: Callable[[Tensor], None] | None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    r"""The most probable sequences that a beam of so many hypotheses finds; one beam is greedy search.

    Hypotheses of different lengths are compared by :math:`\log p(y) / |y|^{\alpha}`, with α the `length_penalty` and
    :math:`|y|` counting the end token.

    Args:
        step: Given all tokens so far, `[B * beams, t]` (the first is `start`), returns logits of the next,
            `[B * beams, V]`.
        batch: Number of sequences to find, B.
        start: Every hypothesis begins with it; it is not returned.
        end: Ends a hypothesis.
        max_length: Tokens of a hypothesis at most, its end included.
        beams: Number of hypotheses that are followed. (default: `1`)
        length_penalty: The exponent α; zero compares bare log-probabilities. (default: `1.0`)
        reorder: Called with the hypotheses that go on, `[B * beams]`, so that a cache can follow. (default: `None`)
        device: Where tokens are. (default: `None`)

    Returns:
        Tokens `[B, T]`, with `end` after a sequence's end, and scores `[B]`.

    Raises:
        ValueError: If `beams` or `max_length` is not positive, or the penalty is negative.
    """
    if beams < 1 or max_length < 1:
        raise ValueError(f"beams and max_length must be at least 1; got {beams} and {max_length}.")
    if length_penalty < 0:
        raise ValueError(f"length_penalty is at least 0; got {length_penalty}.")
    tokens = torch.full((batch * beams, 1), start, device=device)
    scores = torch.full((batch, beams), -torch.inf, device=device)
    scores[:, 0] = 0.0  # the others would be copies
    done_scores = torch.full((batch, beams), -torch.inf, device=device)
    done_tokens = torch.full((batch, beams, max_length), end, device=device)
    first = torch.arange(batch, device=device).unsqueeze(1) * beams
    for length in range(1, max_length + 1):
        log_probabilities = step(tokens).float().log_softmax(-1)
        vocabulary = log_probabilities.size(-1)
        candidates = scores.unsqueeze(-1) + log_probabilities.view(batch, beams, vocabulary)
        # At most `beams` of so many candidates are ends, so enough are left to go on.
        best, place = candidates.flatten(1).topk(min(2 * beams, beams * vocabulary) if beams > 1 else 1, dim=1)
        parent, token = place // vocabulary, place % vocabulary
        grown = torch.cat([tokens[first + parent], token.unsqueeze(-1)], -1)[..., 1:]

        ends = (token == end) | (length == max_length)
        ended = (best / length**length_penalty).masked_fill(~ends, -torch.inf)
        full = torch.full((*token.shape, max_length), end, device=device)
        full[..., :length] = grown
        done_scores, kept = torch.cat([done_scores, ended], 1).topk(beams, dim=1)
        done_tokens = torch.cat([done_tokens, full], 1).gather(1, kept.unsqueeze(-1).expand(-1, -1, max_length))

        scores, kept = best.masked_fill(ends, -torch.inf).topk(beams, dim=1)
        parent, token = parent.gather(1, kept), token.gather(1, kept)
        order = (first + parent).flatten()
        tokens = torch.cat([tokens[order], token.view(-1, 1)], 1)
        # A hypothesis can only lose probability; its length helps it most at the end.
        if bool((done_scores[:, -1] >= scores[:, 0] / max_length**length_penalty).all()):
            break
        if reorder is not None:
            reorder(order)
    best_tokens = done_tokens[:, 0]
    longest = int(((best_tokens != end).sum(1) + 1).clamp(max=max_length).max()) if batch else 0
    return best_tokens[:, :longest], done_scores[:, 0]
