"""Sampling and beam search, against probabilities written out and all sequences there are."""

import math
from itertools import pairwise

import pytest
import torch

from gattn.models.decoding import beam_search, sample

V, LENGTH, START, END = 4, 4, 0, 1


class TestSample:
    def test_zero_temperature_is_the_most_probable_token(self):
        logits = torch.randn(5, 3, 7)
        assert torch.equal(sample(logits, temperature=0.0), logits.argmax(-1))
        assert torch.equal(sample(logits, temperature=0.0, top_k=2, top_p=0.5), logits.argmax(-1))

    @staticmethod
    def possible(probabilities, top_k, top_p):
        """The tokens that are left, by their definition."""
        left, total = [], 0.0
        for token in sorted(range(len(probabilities)), key=lambda t: -probabilities[t])[:top_k]:
            left.append(token)
            total += probabilities[token]
            if top_p is not None and total >= top_p:
                break
        return left

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
    @pytest.mark.parametrize(
        ("top_k", "top_p"),
        [(None, None), (1, None), (3, None), (99, None), (None, 0.01), (None, 0.6), (None, 0.9), (None, 1.0)],
    )
    def test_frequencies(self, top_k, top_p, temperature):
        count = 20_000
        logits = torch.randn(6, generator=torch.Generator().manual_seed(3))
        draws = sample(logits.expand(count, -1), temperature, top_k, top_p, generator=torch.Generator().manual_seed(4))
        probabilities = (logits / temperature).softmax(-1).tolist()
        left = self.possible(probabilities, top_k, top_p)
        total = sum(probabilities[token] for token in left)
        for token, frequency in enumerate((draws.bincount(minlength=6) / count).tolist()):
            expected = probabilities[token] / total if token in left else 0.0
            assert abs(frequency - expected) <= 5 * math.sqrt(expected * (1 - expected) / count), token

    def test_top_k_and_top_p_together(self):
        """Of the three most probable tokens (0.5, 0.25, 0.25 among themselves) two are 0.75."""
        logits = torch.tensor([0.1, 0.2, 0.4, 0.2, 0.1]).log()
        draws = sample(logits.expand(2_000, -1), top_k=3, top_p=0.6, generator=torch.Generator().manual_seed(0))
        assert 2 in draws
        assert len(set(draws.tolist()) - {2}) == 1
        assert set(draws.tolist()) <= {1, 2, 3}

    def test_shapes_and_generator(self):
        logits = torch.randn(2, 3, 50)
        draws = [sample(logits, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
        assert draws[0].shape == (2, 3)
        assert torch.equal(draws[0], draws[1])
        assert not torch.equal(draws[0], draws[2])

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_one_row(self, temperature):
        token = sample(torch.tensor([0.0, 50.0, 0.0]), temperature)
        assert token.shape == ()
        assert token == 1

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"temperature": -1.0}, "temperature"),
            ({"top_k": 0}, "top_k"),
            ({"top_p": 0.0}, "top_p"),
            ({"top_p": 1.5}, "top_p"),
        ],
    )
    def test_errors(self, options, message):
        with pytest.raises(ValueError, match=message):
            sample(torch.zeros(1, 3), **options)


class Model:
    """Random logits that depend on all tokens so far, and a cache that has to follow the hypotheses."""

    def __init__(self, seed=0, vocabulary=V, sharpness=1.5):
        self.seed, self.vocabulary, self.sharpness = seed, vocabulary, sharpness
        self.cache = None

    def logits(self, tokens):
        number = self.seed
        for token in tokens:
            number = number * 31 + token + 1
        generator = torch.Generator().manual_seed(number)
        return torch.randn(self.vocabulary, generator=generator) * self.sharpness

    def step(self, tokens):
        return torch.stack([self.logits(row) for row in tokens.tolist()])

    def cached_step(self, tokens):
        new = tokens[:, -1:]
        self.cache = new if self.cache is None else torch.cat([self.cache, new], 1)
        assert torch.equal(self.cache, tokens)
        return self.step(self.cache)

    def reorder(self, index):
        self.cache = self.cache[index]

    def score(self, tokens, penalty):
        """Log-probability of a finished sequence over its length."""
        total = sum(self.logits([START, *tokens[:i]]).log_softmax(-1)[token].item() for i, token in enumerate(tokens))
        return total / len(tokens) ** penalty

    def sequences(self, length, tokens=()):
        """All there are: those that end, and those that are as long as can be."""
        for token in range(self.vocabulary):
            longer = (*tokens, token)
            if token == END or len(longer) == length:
                yield longer
            else:
                yield from self.sequences(length, longer)


def finished(tokens):
    """A row of tokens up to its end."""
    tokens = tokens.tolist()
    return tuple(tokens[: tokens.index(END) + 1] if END in tokens else tokens)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.0])
def test_enough_beams_find_the_best_sequence_of_all(penalty, seed):
    model = Model(seed)
    best = max(model.sequences(LENGTH), key=lambda tokens: model.score(tokens, penalty))
    tokens, scores = beam_search(model.step, 1, START, END, LENGTH, 64, penalty)
    assert finished(tokens[0]) == best
    assert scores.item() == pytest.approx(model.score(best, penalty), abs=1e-5)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(6))
def test_one_beam_is_the_chain_of_most_probable_tokens(seed, penalty):
    model = Model(seed)
    chain = [START]
    while len(chain) <= 8 and (len(chain) == 1 or chain[-1] != END):
        chain.append(int(model.logits(chain).argmax()))
    tokens, scores = beam_search(model.step, 1, START, END, 8, 1, penalty)
    assert finished(tokens[0]) == tuple(chain[1:])
    assert scores.item() == pytest.approx(model.score(chain[1:], penalty), abs=1e-5)


@pytest.mark.parametrize("beams", [1, 2, 3, 5])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_cache_follows_the_hypotheses(beams, batch):
    for seed in range(5):
        expected = beam_search(Model(seed).step, batch, START, END, 6, beams, 1.0)
        model = Model(seed)
        actual = beam_search(model.cached_step, batch, START, END, 6, beams, 1.0, reorder=model.reorder)
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("beams", [2, 4])
def test_scores_are_those_of_the_sequences(beams):
    for seed in range(5):
        for penalty in (0.0, 0.7, 1.0):
            model = Model(seed)
            tokens, scores = beam_search(model.step, 1, START, END, 7, beams, penalty)
            assert scores.item() == pytest.approx(model.score(finished(tokens[0]), penalty), abs=1e-5)


def test_a_textbook_beam():
    """Greedy takes 2 (0.6) and ends at 0.6 · 0.4; two beams find 3 (0.4), whose end is certain."""
    tables = {(START,): [0, 0, 0.6, 0.4], (START, 2): [0.3, 0.4, 0.3, 0], (START, 3): [0, 1, 0, 0]}

    def step(tokens):
        rows = [tables.get(tuple(row), [0, 1, 0, 0]) for row in tokens.tolist()]
        return torch.tensor(rows).log()

    greedy, score = beam_search(step, 1, START, END, 5, 1, 0.0)
    assert (greedy.tolist(), score.exp().item()) == ([[2, END]], pytest.approx(0.24))
    tokens, score = beam_search(step, 1, START, END, 5, 2, 0.0)
    assert (tokens.tolist(), score.exp().item()) == ([[3, END]], pytest.approx(0.4))


def test_a_beam_is_what_its_definition_says():
    """Beams of 2, written out: of all continuations of two hypotheses, the two best that do not end go on."""
    for seed in range(8):
        model = Model(seed, vocabulary=6)
        alive, done = [(0.0, ())], []
        for length in range(1, 6):
            grown = [
                (score + log_p, (*tokens, token))
                for score, tokens in alive
                for token, log_p in enumerate(model.logits([START, *tokens]).log_softmax(-1).tolist())
            ]
            grown = sorted(grown, reverse=True)[:4]
            done += [(score / length, tokens) for score, tokens in grown if tokens[-1] == END or length == 5]
            alive = [entry for entry in grown if entry[1][-1] != END][:2]
        best = max(done)
        tokens, score = beam_search(model.step, 1, START, END, 5, 2, 1.0)
        assert finished(tokens[0]) == best[1]
        assert score.item() == pytest.approx(best[0], abs=1e-5)


def test_elements_of_a_batch_do_not_meet():
    models = [Model(seed) for seed in range(4)]
    beams = 3

    def step(tokens):
        rows = tokens.tolist()
        return torch.stack([models[i // beams].logits(row) for i, row in enumerate(rows)])

    tokens, scores = beam_search(step, 4, START, END, 7, beams, 1.0)
    lengths = []
    for i, model in enumerate(models):
        alone, score = beam_search(model.step, 1, START, END, 7, beams, 1.0)
        assert finished(tokens[i]) == finished(alone[0])
        assert scores[i].item() == pytest.approx(score.item())
        lengths.append(len(finished(alone[0])))
    assert tokens.shape == (4, max(lengths))
    for row, length in zip(tokens, lengths, strict=True):
        assert (row[length:] == END).all()


def test_the_end():
    def always(token):
        return lambda tokens: torch.full((tokens.size(0), V), -5.0).index_fill(1, torch.tensor([token]), 5.0)

    tokens, _ = beam_search(always(END), 2, START, END, 6, 2)
    assert tokens.tolist() == [[END], [END]]
    tokens, _ = beam_search(always(3), 2, START, END, 6, 2)
    assert tokens.tolist() == [[3] * 6] * 2
    tokens, _ = beam_search(always(3), 1, START, END, 1, 1)
    assert tokens.tolist() == [[3]]

    def impossible(tokens):  # only tokens 2 and then the end can be
        logits = torch.full((tokens.size(0), V), -torch.inf)
        logits[torch.arange(tokens.size(0)), torch.where(tokens[:, -1] == START, 2, END)] = 0.0
        return logits

    tokens, scores = beam_search(impossible, 1, START, END, 5, 3)
    assert tokens.tolist() == [[2, END]]
    assert scores.item() == 0.0


def test_steps_are_no_more_than_needed():
    calls = []

    def step(tokens):
        calls.append(tokens.size(1))
        return torch.full((tokens.size(0), V), -9.0).index_fill(1, torch.tensor([END]), 9.0)

    beam_search(step, 1, START, END, 50, 1, 0.0)
    assert calls == [1]
    calls.clear()
    beam_search(lambda tokens: calls.append(tokens.size(1)) or torch.zeros(tokens.size(0), V), 1, START, END, 5, 2)
    assert all(later == before + 1 for before, later in pairwise(calls))
    assert len(calls) <= 5


def test_longer_sequences_profit_from_the_penalty():
    model = Model(2)
    lengths = [
        beam_search(model.step, 1, START, END, 6, 64, penalty)[0].size(1) for penalty in (0.0, 0.5, 1.0, 2.0, 5.0)
    ]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


def test_no_batch():
    tokens, scores = beam_search(lambda tokens: torch.zeros(tokens.size(0), V), 0, START, END, 5, 2)
    assert (tokens.size(0), scores.shape) == (0, (0,))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"beams": 0}, "beams"), ({"max_length": 0}, "max_length"), ({"length_penalty": -1.0}, "length_penalty")],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        beam_search(Model().step, **({"batch": 1, "start": START, "end": END, "max_length": 5} | options))
