"""Encoder and decoder against both papers' equations, one element and one step at a time."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gattn import DotScore
from gattn.models import Seq2Seq
from gattn.models.decoding import beam_search
from gattn.models.seq2seq import ATTENTIONS, FORMS
from gattn.nn import AdditiveAttention, DotProductAttention, GeneralAttention, HardAttention, LocalAttention
from gattn.nn.recurrent.rnn_attention import MemoryAttention

VS, VT, E, C, B, S, T = 9, 11, 5, 6, 3, 5, 4
START, END = 1, 2

each_attention = pytest.mark.parametrize("attention", [*ATTENTIONS, None])
each_form = pytest.mark.parametrize("form", FORMS)
each_cell = pytest.mark.parametrize("cell", ["gru", "lstm"])
each_network = pytest.mark.parametrize(("cell", "num_layers"), [("gru", 1), ("gru", 2), ("lstm", 1), ("lstm", 2)])


def make(attention="general", seed=0, **options):
    """A model whose logits differ, and a batch for it."""
    options = {"window": 1.5, **options}
    model = Seq2Seq(VS, VT, E, C, attention=attention, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    source = torch.randint(VS, (B, S), generator=generator)
    target = torch.randint(VT, (B, T), generator=generator)
    return model.double().eval(), source, target, torch.tensor([5, 1, 3])


def by_hand(model, tokens, target):
    """Logits `[T, V]` and weights of one source without padding, by the equations."""
    memory, last = model.encoder(model.source_embedding(tokens).unsqueeze(0))
    hidden, cells = last if isinstance(last, tuple) else (last, None)
    summary = torch.cat([hidden[-2], hidden[-1]], -1)
    states = []
    for layer in range(len(model.decoder)):
        first = torch.tanh(model.bridge(torch.cat([hidden[2 * layer], hidden[2 * layer + 1]], -1)))
        states.append(first if cells is None else (first, torch.cat([cells[2 * layer], cells[2 * layer + 1]], -1)))

    def top():
        return states[-1] if cells is None else states[-1][0]

    def attend(query, place):
        if model.attention is None:
            return summary, None
        return (x.squeeze(1) for x in model.attention(query.unsqueeze(1), memory, first=place, return_weights=True))

    def recur(x):
        for layer, step in enumerate(model.decoder):
            states[layer] = step(x, states[layer])
            x = states[layer] if cells is None else states[layer][0]

    logits, weights, out = [], [], torch.zeros_like(summary)
    for place, token in enumerate([START, *target.tolist()[:-1]]):
        y = model.target_embedding.weight[token].unsqueeze(0)
        if model.form == "bahdanau":
            context, alpha = attend(top(), place)
            recur(torch.cat([y, context], -1))
            out = torch.tanh(model.combine(torch.cat([top(), context, y], -1)))
        else:
            recur(torch.cat([y, out], -1))
            context, alpha = attend(top(), place)
            out = torch.tanh(model.combine(torch.cat([context, top()], -1)))
        logits.append(model.output(out))
        weights.append(alpha)
    return torch.cat(logits), None if weights[0] is None else torch.cat(weights)


class TestEquations:
    @each_attention
    @each_form
    @each_network
    def test_logits_and_weights(self, attention, form, cell, num_layers):
        model, source, target, lengths = make(attention, form=form, cell=cell, num_layers=num_layers)
        if attention is None:
            logits, weights = model(source, target, lengths), [None] * B
        else:
            logits, weights = model(source, target, lengths, return_weights=True)
            assert weights.shape == (B, T, S)
            assert torch.equal(model(source, target, lengths), logits)
        assert logits.shape == (B, T, VT)
        for tokens, length, row, actual, alpha in zip(source, lengths, target, logits, weights, strict=True):
            expected, expected_alpha = by_hand(model, tokens[:length], row)
            torch.testing.assert_close(actual, expected)
            if alpha is not None:
                torch.testing.assert_close(alpha[:, :length], expected_alpha)
                assert (alpha[:, length:] == 0).all()

    @each_attention
    @each_form
    def test_gradients_reach_every_parameter(self, attention, form):
        """Also those that only choices and centres depend on."""
        model, source, target, lengths = make(attention, form=form, cell="lstm", num_layers=2, window=2.5)
        model.train()
        model.loss(source, target, lengths, torch.tensor([4, 2, 3])).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            assert (parameter.grad != 0).any(), name

    @each_attention
    def test_gradients_are_those_of_the_equations(self, attention):
        model, source, target, lengths = make(attention)
        parameters = list(model.parameters())
        expected = torch.stack([by_hand(model, x[:n], y)[0] for x, n, y in zip(source, lengths, target, strict=True)])
        grads = [
            torch.autograd.grad(logits.square().sum(), parameters, allow_unused=True, materialize_grads=True)
            for logits in (model(source, target, lengths), expected)
        ]
        torch.testing.assert_close(*grads)

    def test_weights_sum_to_one_over_real_places(self):
        for attention in ATTENTIONS:
            for training in (False, True):
                model, source, target, lengths = make(attention)
                _, weights = model.train(training)(source, target, lengths, return_weights=True)
                sums = weights.sum(-1)
                assert (weights >= 0).all()
                if attention == "local-p":
                    assert (sums <= 1).all()
                    assert (sums < 0.99).any()
                elif attention == "local-m":  # a window may lie beyond the source
                    inside = torch.arange(T) - 1.5 <= lengths.unsqueeze(1) - 1
                    torch.testing.assert_close(sums, inside.double())
                else:
                    torch.testing.assert_close(sums, torch.ones_like(sums))
                if attention == "hard-st" or (attention == "hard" and not training):
                    assert ((weights == 0) | (weights == 1)).all()


class TestWhatIsNotSeen:
    @each_attention
    @each_form
    def test_padding_of_sources(self, attention, form):
        model, source, target, lengths = make(attention, form=form, num_layers=2)
        padded = torch.where(torch.arange(S) < lengths.unsqueeze(1), source, (source + 1) % VS)
        assert not torch.equal(padded, source)
        results = []
        for tokens in (source, padded):
            torch.manual_seed(1)
            loss = copy.deepcopy(model).train().loss(tokens, target, lengths)
            logits, found = model(tokens, target, lengths), model.generate(tokens, lengths, max_length=6)
            grads = torch.autograd.grad(logits.square().sum(), list(model.parameters()), allow_unused=True)
            results.append((loss, logits, found, grads))
        torch.testing.assert_close(*results, rtol=0, atol=0)
        wider = F.pad(source, (0, 2), value=3)
        torch.testing.assert_close(model(wider, target, lengths), results[0][1])
        torch.testing.assert_close(
            model(source, target, torch.full((B,), S)), model(source, target), msg="full lengths are no lengths"
        )

    @each_attention
    @each_form
    def test_later_tokens_of_targets(self, attention, form):
        model, source, target, lengths = make(attention, form=form)
        logits = model(source, target, lengths)
        for place in range(T):
            changed = target.clone()
            changed[:, place] = (changed[:, place] + 1) % VT
            other = model(source, changed, lengths)
            assert torch.equal(other[:, : place + 1], logits[:, : place + 1])
            if place + 1 < T:
                assert not torch.isclose(other[:, place + 1 :], logits[:, place + 1 :]).all(-1).any()

    def test_padding_of_targets(self):
        model, source, target, lengths = make()
        counts = torch.tensor([4, 1, 2])
        changed = torch.where(torch.arange(T) < counts.unsqueeze(1), target, 0)
        assert torch.equal(model.loss(source, target, lengths, counts), model.loss(source, changed, lengths, counts))

    @each_attention
    def test_elements_of_a_batch_do_not_meet(self, attention):
        model, source, target, lengths = make(attention, num_layers=2, cell="lstm")
        logits = model(source, target, lengths)
        order = torch.tensor([2, 0, 1])
        torch.testing.assert_close(model(source[order], target[order], lengths[order]), logits[order])
        torch.testing.assert_close(model(source[:1], target[:1], lengths[:1]), logits[:1])


class TestLoss:
    @each_attention
    @pytest.mark.parametrize("smoothing", [0.0, 0.2])
    def test_cross_entropy_of_real_tokens(self, attention, smoothing):
        model, source, target, lengths = make(attention)
        counts = [4, 1, 2]
        log_p = model(source, target, lengths).log_softmax(-1)
        terms = [
            (1 - smoothing) * log_p[b, t, target[b, t]] + smoothing * log_p[b, t].mean()
            for b, count in enumerate(counts)
            for t in range(count)
        ]
        loss = model.loss(source, target, lengths, torch.tensor(counts), label_smoothing=smoothing)
        torch.testing.assert_close(loss, -torch.stack(terms).mean())
        whole = F.cross_entropy(log_p.flatten(0, 1), target.flatten())
        torch.testing.assert_close(model.loss(source, target, lengths), whole)

    def test_reinforce_adds_what_its_module_says(self):
        """Rewards are the log-probabilities of the tokens, and padded ones do not count."""
        model, source, target, lengths = make("hard")
        model.train()
        counts = torch.tensor([4, 1, 2])
        real = torch.arange(T) < counts.unsqueeze(1)
        model.reinforce.baseline.fill_(-2.0)
        torch.manual_seed(3)
        loss = model.loss(source, target, lengths, counts)
        baseline = model.reinforce.baseline.clone()
        model.reinforce.baseline.fill_(-2.0)
        model.reinforce.is_new.fill_(True)
        torch.manual_seed(3)
        hidden, choices = model._unroll(source, target, lengths)
        reward = model.output(hidden).log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)[real]
        log_prob = torch.cat([choice.log_prob for choice in choices], 1)[real]
        entropy = torch.cat([choice.entropy for choice in choices], 1)[real]
        weights = model.reinforce.weight, model.reinforce.entropy_weight
        assert min(weights) > 0
        expected = -reward.mean() - (weights[0] * (reward.detach() + 2) * log_prob + weights[1] * entropy).mean()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(baseline, reward.mean().detach())
        parameter = model.attention.attention.query_proj.weight
        grads = [torch.autograd.grad(x, parameter)[0] for x in (loss, expected)]
        torch.testing.assert_close(*grads)

    def test_no_reinforcement_in_evaluation_or_for_others(self):
        model, source, target, lengths = make("hard")
        logits = model(source, target, lengths)
        torch.testing.assert_close(
            model.loss(source, target, lengths), F.cross_entropy(logits.flatten(0, 1), target.flatten())
        )
        assert model.reinforce.is_new
        for attention in ("hard-st", "general", None, HardAttention(DotProductAttention(), "straight_through")):
            assert make(attention)[0].reinforce is None
        assert make(HardAttention(GeneralAttention(C, C)))[0].reinforce is not None

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_integers(self, dtype):
        model, source, target, lengths = make()
        loss = model.loss(source.to(dtype), target.to(dtype), lengths.to(dtype), torch.tensor([4, 1, 2], dtype=dtype))
        torch.testing.assert_close(loss, model.loss(source, target, lengths, torch.tensor([4, 1, 2])))

    def test_training_learns(self):
        torch.manual_seed(0)
        model = Seq2Seq(VS, VT, 16, 32, attention="general")
        source, target = torch.randint(3, VS, (4, S)), torch.randint(3, VT, (4, T))
        target[:, -1] = END
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        for _ in range(60):
            optimizer.zero_grad()
            model.loss(source, target).backward()
            optimizer.step()
        assert torch.equal(model.generate(source, max_length=T), target)


def greedy(model, source, lengths, max_length):
    """Written out: each element alone, fed its own tokens, until it ends."""
    rows = []
    for tokens, length in zip(source, lengths, strict=True):
        row = []
        while len(row) < max_length and END not in row:
            target = torch.tensor([*row, 0])
            row.append(int(by_hand(model, tokens[:length], target)[0][-1].argmax()))
        rows.append(row)
    longest = max(map(len, rows))
    return torch.tensor([row + [END] * (longest - len(row)) for row in rows])


def log_probability(model, source, length, tokens):
    """Of one target up to its end."""
    tokens = tokens.tolist()
    tokens = torch.tensor(tokens[: tokens.index(END) + 1] if END in tokens else tokens)
    log_p = by_hand(model, source[:length], tokens)[0].log_softmax(-1)
    return log_p.gather(1, tokens.unsqueeze(1)).sum().item()


class TestGenerate:
    @each_attention
    @pytest.mark.parametrize(("form", "cell", "num_layers"), [("bahdanau", "gru", 2), ("luong", "lstm", 1)])
    def test_one_beam_is_greedy(self, attention, form, cell, num_layers):
        model, source, _, lengths = make(attention, form=form, cell=cell, num_layers=num_layers)
        found = model.generate(source, lengths, max_length=7)
        assert torch.equal(found, greedy(model, source, lengths, 7))
        fed_back = model(source, found, lengths).argmax(-1)
        ended = (found == END).cumsum(1) - (found == END).long() > 0
        assert torch.equal(fed_back[~ended], found[~ended])

    @each_attention
    @pytest.mark.parametrize(("form", "cell", "num_layers"), [("bahdanau", "lstm", 1), ("luong", "gru", 2)])
    def test_states_follow_their_hypotheses(self, attention, form, cell, num_layers):
        """The same search over a model that reads each hypothesis anew."""
        model, source, _, lengths = make(attention, form=form, cell=cell, num_layers=num_layers)
        beams = 3
        sources, counts = source.repeat_interleave(beams, 0), lengths.repeat_interleave(beams)

        def step(tokens):
            return model(sources, F.pad(tokens[:, 1:], (0, 1)), counts)[:, -1]

        for penalty in (0.0, 1.0):
            expected, _ = beam_search(step, B, START, END, 6, beams, penalty)
            found = model.generate(source, lengths, max_length=6, beams=beams, length_penalty=penalty)
            assert torch.equal(found, expected)

    def test_beams_find_more_probable_targets(self):
        better = 0
        for seed in range(6):
            model, source, _, lengths = make(seed=seed, cell="lstm")
            one = model.generate(source, lengths, max_length=6, length_penalty=0.0)
            many = model.generate(source, lengths, max_length=6, beams=8, length_penalty=0.0)
            for element in range(B):
                scores = [log_probability(model, source[element], lengths[element], x[element]) for x in (one, many)]
                assert scores[1] >= scores[0] - 1e-9
                better += scores[1] > scores[0] + 1e-9
        assert better > 0

    def test_options_reach_the_search(self):
        model, source, _, lengths = make()
        assert model.generate(source, lengths, max_length=3).size(1) <= 3
        sizes = []
        for penalty in (0.0, 5.0):
            found = model.generate(source, lengths, max_length=12, beams=4, length_penalty=penalty)
            sizes.append((found != END).sum())
        assert sizes[0] < sizes[1]
        assert not model.generate(source, lengths).requires_grad

    def test_it_stops_at_the_end(self):
        model, source, _, lengths = make()
        with torch.no_grad():
            model.output.bias[END] += 100
        assert model.generate(source, lengths).tolist() == [[END]] * B
        other = Seq2Seq(VS, VT, E, C, attention="general", start=4, end=7).eval()
        with torch.no_grad():
            other.output.bias[7] += 100
        assert other.generate(source, lengths).tolist() == [[7]] * B

    def test_the_start_token(self):
        model, source, target, _ = make()
        other, *_ = make(start=4)
        other.load_state_dict(model.state_dict())
        assert not torch.allclose(model(source, target)[:, 0], other(source, target)[:, 0])
        same = copy.deepcopy(model)
        with torch.no_grad():
            same.target_embedding.weight[START] = model.target_embedding.weight[4]
        torch.testing.assert_close(same(source, target)[:, 0], other(source, target)[:, 0])


class TestOptions:
    def test_form_follows_the_attention(self):
        for attention in (*ATTENTIONS, None):
            expected = "bahdanau" if attention == "additive" else "luong"
            assert make(attention)[0].form == expected

    @pytest.mark.parametrize(
        ("name", "kind", "attributes"),
        [
            ("dot", DotProductAttention, {"scale": 1.0}),
            ("scaled_dot", DotProductAttention, {"scale": None}),
            ("general", GeneralAttention, {"scale": 1.0}),
            ("additive", AdditiveAttention, {}),
            ("local-m", LocalAttention, {"alignment": "monotonic", "window": 1.5, "gaussian": False}),
            ("local-p", LocalAttention, {"alignment": "predictive", "window": 1.5, "gaussian": True}),
            ("hard", HardAttention, {"estimator": "reinforce", "expected": 0.5}),
            ("hard-st", HardAttention, {"estimator": "straight_through", "expected": 0.0}),
        ],
    )
    def test_names(self, name, kind, attributes):
        attention = make(name)[0].attention
        assert type(attention) is kind
        assert {key: getattr(attention, key) for key in attributes} == attributes
        if kind in (LocalAttention, HardAttention):
            assert type(attention.attention) is GeneralAttention

    @pytest.mark.parametrize("name", ["dot", "general", "local-m", "local-p", "hard", "hard-st"])
    def test_the_scale_of_products(self, name):
        for scale in (None, 0.5):
            attention = make(name, scale=scale)[0].attention
            assert getattr(attention, "attention", attention).scale == scale

    @pytest.mark.parametrize("attention", ["scaled_dot", "additive", None, DotProductAttention()])
    def test_a_scale_that_would_be_ignored(self, attention):
        with pytest.raises(ValueError, match=r"scale applies to 'dot', 'general', .*; leave it at 1"):
            make(attention, scale=None)

    def test_one_of_your_own(self):
        class Projected(MemoryAttention):
            def __init__(self):
                super().__init__()
                self.net = nn.Sequential(nn.Linear(C, C), nn.Tanh())

            def score(self, query):
                return self.net(query), DotScore()

        model, source, target, lengths = make(Projected())
        expected = torch.stack([by_hand(model, x[:n], y)[0] for x, n, y in zip(source, lengths, target, strict=True)])
        torch.testing.assert_close(model(source, target, lengths), expected)
        assert model.generate(source, lengths, beams=2, max_length=3).size(0) == B

    def test_shared_and_tied_embeddings(self):
        shared = Seq2Seq(VT, VT, E, C, share_embeddings=True)
        assert shared.source_embedding is shared.target_embedding
        tied = Seq2Seq(VS, VT, C, C, tie_weights=True)
        assert tied.output.weight is tied.target_embedding.weight
        both = Seq2Seq(VT, VT, C, C, tie_weights=True, share_embeddings=True)
        assert 0.05 < both.output.weight.std() < 0.15, "drawn as embeddings are"
        assert len({id(x) for x in (both.output.weight, both.source_embedding.weight)}) == 1
        for model in (shared, tied, both, copy.deepcopy(both), pickle.loads(pickle.dumps(both))):
            before = model.target_embedding.weight.clone()
            loss = model.loss(torch.randint(VS, (B, S)), torch.randint(VT, (B, T)))
            loss.backward()
            torch.optim.SGD(model.parameters(), lr=1.0).step()
            assert not torch.equal(model.target_embedding.weight, before)
            assert (model.output.weight is model.target_embedding.weight) == (model is not shared)
            assert (model.source_embedding is model.target_embedding) == (model is not tied)

    def test_initial_values(self):
        torch.manual_seed(0)
        model = Seq2Seq(200, 300, 32, 32)
        for embedding in (model.source_embedding, model.target_embedding):
            assert embedding.weight.std().item() == pytest.approx(0.1, rel=0.05)
        assert (model.output.bias == 0).all()
        assert model.output.weight.abs().max() <= math.sqrt(6 / (32 + 300))
        logits = model(torch.randint(200, (4, S)), torch.randint(300, (4, T)))
        assert logits.std() < 1, "all tokens are about as probable"

    @each_attention
    def test_seeds_and_reset(self, attention):
        states = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            states.append(Seq2Seq(VS, VT, E, C, attention=attention).state_dict())
        for name, first in states[0].items():
            assert torch.equal(first, states[1][name]), name
        model = make(attention)[0]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7)
        model.reset_parameters()
        assert not any((parameter == 7).any() for parameter in model.parameters())
        assert any(not torch.equal(first, states[2][name]) for name, first in states[0].items())

    @each_attention
    def test_copies_and_states(self, attention):
        model, source, target, lengths = make(attention, num_layers=2)
        expected = model(source, target, lengths)
        assert torch.equal(model(source, target, lengths), expected)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(source, target, lengths), expected)
        other, *_ = make(attention, seed=1, num_layers=2)
        assert not torch.allclose(other(source, target, lengths), expected)
        other.load_state_dict(model.state_dict())
        assert torch.equal(other(source, target, lengths), expected)

    @each_attention
    def test_dropout(self, attention):
        model, source, target, lengths = make(attention, dropout=0.5, num_layers=2)
        assert torch.equal(model(source, target, lengths), model(source, target, lengths))
        model.train()
        outs = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            outs.append(model(source, target, lengths))
        assert torch.equal(outs[0], outs[1])
        assert not torch.equal(outs[0], outs[2])
        everything, *_ = make(attention, dropout=1.0, num_layers=2)
        seen = []
        everything.decoder[1].register_forward_pre_hook(lambda module, args: seen.append((args[0] == 0).all()))
        logits = everything.train()(source, target, lengths)
        torch.testing.assert_close(logits, everything.output.bias.expand_as(logits))
        assert all(seen), "between layers"

    @each_attention
    def test_half_precision(self, attention):
        model, source, target, lengths = make(attention)
        model = model.float().train()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.loss(source, target, lengths)
        loss.backward()
        assert all(x.grad is None or x.grad.isfinite().all() for x in model.parameters())
        half = model.eval().bfloat16()
        logits = half(source, target, lengths)
        assert logits.dtype == torch.bfloat16
        assert logits.isfinite().all()
        assert half.generate(source, lengths, max_length=3).size(0) == B

    @each_attention
    @each_cell
    def test_nothing(self, attention, cell):
        model, source, target, lengths = make(attention, cell=cell)
        assert model(source, target[:, :0], lengths).shape == (B, 0, VT)
        if attention is not None:
            assert model(source, target[:, :0], lengths, return_weights=True)[1].shape == (B, 0, S)
        for given in (None, lengths[:0]):
            assert model(source[:0], target[:0], given).shape == (0, T, VT)
            assert model.generate(source[:0], given, beams=2).size(0) == 0


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"attention": "luong"}, "attention must be None, one of 'dot', .*, or a layer; got 'luong'"),
            ({"form": "vaswani"}, "form must be 'bahdanau' or 'luong'; got 'vaswani'"),
            ({"cell": "rnn"}, "cell must be 'gru' or 'lstm'; got 'rnn'"),
            ({"dropout": -0.1}, "dropout must be a probability"),
            ({"hidden_channels": 7}, "hidden_channels must be even.*; got 7"),
            ({"hidden_channels": 0}, "hidden_channels must be at least 1; got 0"),
            ({"num_layers": 0}, "must be at least 1"),
            ({"embedding_channels": 0}, "must be at least 1"),
            ({"num_source_tokens": 0}, "must be at least 1"),
            ({"num_target_tokens": 0}, "must be at least 1"),
            ({"start": VT}, "start must be a target token, between 0 and 10; got 11"),
            ({"end": -1}, "end must be a target token, between 0 and 10; got -1"),
            ({"share_embeddings": True}, "one vocabulary for source and target; got 9 and 11"),
            ({"tie_weights": True}, "as many embedding_channels as hidden_channels; got 5 and 6"),
            ({"attention": "local-m", "window": 0}, "half-width D of .* must be positive; got 0"),
            ({"attention": "local-p", "window": -1}, "the half-width D"),
        ],
    )
    def test_options(self, options, message):
        sizes = {"num_source_tokens": VS, "num_target_tokens": VT, "embedding_channels": E, "hidden_channels": C}
        with pytest.raises(ValueError, match=message):
            Seq2Seq(**{**sizes, **options})

    def test_an_attention_that_is_none(self):
        for wrong in (nn.Linear(C, C), 3):
            with pytest.raises(TypeError, match=f"MemoryAttention or None; got {type(wrong).__name__}"):
                Seq2Seq(VS, VT, E, C, attention=wrong)

    @each_attention
    def test_tokens(self, attention):
        model, source, target, lengths = make(attention)
        for wrong, message in ((VS, "source tokens must lie between 0 and 8; got 9"), (-1, "between 0 and 8; got -1")):
            unknown = source.index_fill(1, torch.tensor([1]), wrong)
            for function in (model.generate, lambda x: model(x, target), lambda x: model.loss(x, target, lengths)):
                with pytest.raises(IndexError, match=message):
                    function(unknown)
        with pytest.raises(IndexError, match="target tokens must lie between 0 and 10; got 11"):
            model(source, target.index_fill(1, torch.tensor([3]), VT))
        for wrong in (source.float(), source[0], source.unsqueeze(0), source > 3):
            with pytest.raises(ValueError, match=r"source tokens must be integers, \[B, T\]; got"):
                model.generate(wrong)
            with pytest.raises(ValueError, match=r"target tokens must be integers, \[B, T\]; got"):
                model(source, wrong)
        with pytest.raises(ValueError, match="each source must have one target; got 3 and 2"):
            model(source, target[:2])
        for function in (model.generate, lambda x: model(x, target), lambda x: model.loss(x, target)):
            with pytest.raises(ValueError, match="at least one token"):
                function(source[:, :0])

    @pytest.mark.parametrize(
        ("lengths", "message"),
        [
            (torch.tensor([5, 0, 1]), r"source lengths must lie between 1 and 5; got \[5, 0, 1\]"),
            (torch.tensor([5, -1, 1]), "between 1 and 5"),
            (torch.tensor([6, 1, 1]), r"between 1 and 5; got \[6, 1, 1\]"),
            (torch.tensor([1.0, 1, 1]), r"lengths must be one integer for each source, \[3\]; got torch.float32"),
            (
                torch.tensor([1, 1]),
                r"lengths must be one integer for each source, \[3\]; got torch.int64 of shape \[2\]",
            ),
            (torch.tensor([[1, 1, 1]]), r"shape \[1, 3\]"),
        ],
    )
    def test_source_lengths(self, lengths, message):
        model, source, target, _ = make()
        for function in (lambda: model(source, target, lengths), lambda: model.generate(source, lengths)):
            with pytest.raises(ValueError, match=message):
                function()

    @pytest.mark.parametrize(
        ("lengths", "message"),
        [
            (torch.tensor([4, 0, 1]), r"target lengths must lie between 1 and 4; got \[4, 0, 1\]"),
            (torch.tensor([4, -1, 1]), "target lengths must lie between 1 and 4"),
            (torch.tensor([5, 1, 1]), r"target lengths must lie between 1 and 4; got \[5, 1, 1\]"),
            (torch.tensor([1.0, 1, 1]), r"lengths must be one integer for each target, \[3\]; got torch.float32"),
            (
                torch.tensor([1, 1]),
                r"lengths must be one integer for each target, \[3\]; got torch.int64 of shape \[2\]",
            ),
        ],
    )
    def test_target_lengths(self, lengths, message):
        model, source, target, _ = make()
        with pytest.raises(ValueError, match=message):
            model.loss(source, target, target_lengths=lengths)

    def test_generation(self):
        model, source, *_ = make()
        for options, message in (({"beams": 0}, "beams"), ({"beams": -1}, "beams"), ({"max_length": 0}, "max_length")):
            with pytest.raises(ValueError, match=message):
                model.generate(source, **options)

    def test_weights_of_no_attention(self):
        model, source, target, _ = make(None)
        with pytest.raises(ValueError, match="without attention has no weights"):
            model(source, target, return_weights=True)


def test_an_attention_that_is_given_keeps_its_parameters():
    attention = GeneralAttention(8, 8)
    before = attention.query_proj.weight.clone()
    model = Seq2Seq(9, 9, 4, 8, attention=attention)
    assert model.attention is attention
    assert torch.equal(attention.query_proj.weight, before)
    assert "attention.query_proj.weight" in model.state_dict()
