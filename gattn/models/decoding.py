"""Generation of tokens from their probabilities: sampling, greedy search and beam search.

Dimensions: V tokens in the vocabulary, B sequences, T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gattn.errors import check_at_least

__all__ = ["beam_search", "sample"]


def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Draws one token from each row of logits.

    .. math::
        p(y) = \mathrm{softmax}(\mathrm{logits} / T)_y

    Args:
        logits: The logits of the next token, `[..., V]`.
        temperature: The divisor :math:`T` of the logits. Zero selects the most probable token. (default: `1.0`)
        top_k: Samples only from this many of the most probable tokens. (default: `None`, all)
        top_p: Samples only from the smallest set of tokens whose probabilities sum to at least this (nucleus sampling,
            `Holtzman et al. <https://arxiv.org/abs/1904.09751>`_). (default: `None`, all)
        generator: The source of random numbers. (default: `None`, the global generator)

    Returns:
        The tokens, `[...]`.

    Raises:
        ValueError: If the temperature is negative, `top_k` is not positive, or `top_p` is not in (0, 1].

    Example:
        >>> import torch
        >>> from gattn.models.decoding import sample
        >>> sample(torch.tensor([[0.0, 2.0, 1.0]]), temperature=0.0)
        tensor([1])
    """
    if temperature < 0:
        raise ValueError(f"temperature must be at least 0; got {temperature}.")
    if top_k is not None:
        check_at_least(1, top_k=top_k)
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p must be a probability above 0; got {top_p}.")
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
    r"""Searches for the most probable sequences, keeping several hypotheses for each; with one, it is greedy search.

    This is the decoding of `Sequence to Sequence Learning <https://arxiv.org/abs/1409.3215>`_. Hypotheses of different
    lengths are compared by

    .. math::
        \mathrm{score}(y) = \frac{\log p(y)}{|y|^{\alpha}}

    with the `length_penalty` α, where :math:`|y|` counts the end token.

    Args:
        step: Takes all tokens so far, `[B * beams, t]`, of which the first is `start`, and returns the logits of the
            next ones, `[B * beams, V]`.
        batch: The number of sequences to find, B.
        start: The token with which every hypothesis starts. It is not returned.
        end: The token that ends a hypothesis.
        max_length: The largest number of tokens of a hypothesis, including its end token.
        beams: The number of hypotheses that are followed for each sequence. (default: `1`)
        length_penalty: The exponent α. Zero compares log-probabilities without regard to length. (default: `1.0`)
        reorder: Called after each step with the hypotheses that are continued, `[B * beams]`, so that a cache can be
            reordered accordingly. (default: `None`)
        device: The device of the tokens. (default: `None`)

    Returns:
        The tokens `[B, T]`, where a sequence that is shorter than others is padded with `end`, and the scores `[B]`.

    Raises:
        ValueError: If `beams` or `max_length` is not positive, or the penalty is negative.

    Example:
        >>> import torch
        >>> from gattn.models.decoding import beam_search
        >>> logits = torch.tensor([[0.0, 1.0, 3.0, 2.0]])  # four tokens, with the same logits in each step
        >>> tokens, scores = beam_search(lambda tokens: logits.expand(len(tokens), -1), 1, start=0, end=1, max_length=3)
        >>> tokens
        tensor([[2, 2, 2]])
    """
    check_at_least(1, beams=beams, max_length=max_length)
    if length_penalty < 0:
        raise ValueError(f"length_penalty must be at least 0; got {length_penalty}.")
    tokens = torch.full((batch * beams, 1), start, device=device)
    scores = torch.full((batch, beams), -torch.inf, device=device)
    scores[:, 0] = 0.0  # the other hypotheses would be copies of the first
    done_scores = torch.full((batch, beams), -torch.inf, device=device)
    done_tokens = torch.full((batch, beams, max_length), end, device=device)
    first = torch.arange(batch, device=device).unsqueeze(1) * beams
    for length in range(1, max_length + 1):
        log_probabilities = step(tokens).float().log_softmax(-1)
        vocabulary = log_probabilities.size(-1)
        candidates = scores.unsqueeze(-1) + log_probabilities.view(batch, beams, vocabulary)
        # At most `beams` of these candidates end here, so enough are left to continue.
        best, position = candidates.flatten(1).topk(min(2 * beams, beams * vocabulary) if beams > 1 else 1, dim=1)
        parent, token = position // vocabulary, position % vocabulary
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
        # A hypothesis only loses probability as it grows, and dividing by its length helps most at the largest length.
        if bool((done_scores[:, -1] >= scores[:, 0] / max_length**length_penalty).all()):
            break
        if reorder is not None:
            reorder(order)
    best_tokens = done_tokens[:, 0]
    longest = int(((best_tokens != end).sum(1) + 1).clamp(max=max_length).max()) if batch else 0
    return best_tokens[:, :longest], done_scores[:, 0]
