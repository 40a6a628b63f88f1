import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F

import gattn
from gattn.models.lstmn import LSTMN

V, C, T = 11, 16, 8


def language_model(**options):
    """Initial weights are small, and all logits alike."""
    model = LSTMN(V, C, **options).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    return model


@pytest.mark.parametrize("options", [{}, {"num_layers": 1, "bias": False}, {"window": 3, "attention_channels": 5}])
class TestSequences:
    def test_layer_by_layer(self, options):
        """The model is its parts, one token at a time."""
        model, tokens = language_model(**options), torch.randint(V, (3, T))
        states, rows = [None] * len(model.layers), []
        for token in tokens.unbind(1):
            x = model.embedding.weight[token]
            for number, layer in enumerate(model.layers):
                x, states[number] = layer(x, states[number])
            logits = x @ model.embedding.weight.t()
            rows.append(logits if model.output.bias is None else logits + model.output.bias)
        torch.testing.assert_close(model(tokens), torch.stack(rows, 1))

    def test_causal(self, options):
        model, tokens = language_model(**options), torch.randint(V, (3, T))
        out = model(tokens)
        assert out.shape == (3, T, V)
        tokens[:, 5] = (tokens[:, 5] + 1) % V
        other = model(tokens)
        torch.testing.assert_close(other[:, :5], out[:, :5], rtol=0, atol=1e-12)
        assert not torch.isclose(other[:, 5:], out[:, 5:]).all(-1).any()

    def test_in_parts(self, options):
        model, tokens = language_model(**options), torch.randint(V, (3, T))
        state, parts = None, []
        for part in tokens.split([3, 1, 1, 0, 3], 1):
            logits, state = model.advance(part, state)
            parts.append(logits)
        torch.testing.assert_close(torch.cat(parts, 1), model(tokens))

    def test_generation(self, options):
        model, tokens = language_model(**options), torch.randint(V, (3, 2))
        out = model.generate(tokens, 12, temperature=0.0)
        for _ in range(12):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
        assert torch.equal(out, tokens)
        assert len(set(tokens.flatten().tolist())) > 2

    def test_padding_changes_nothing(self, options):
        model, tokens = language_model(**options), torch.randint(V, (3, T))
        lengths = torch.tensor([T, 3, 0])
        mask = torch.arange(T) < lengths.unsqueeze(1)
        out, state = model.advance(tokens, lengths=lengths)
        other, _ = model.advance(tokens.masked_fill(~mask, 0), lengths=lengths)
        torch.testing.assert_close(other[mask], out[mask], rtol=0, atol=0)
        torch.testing.assert_close(model(tokens)[mask], out[mask])
        after, _ = model.advance(tokens[:, :1], state)
        for element, length in enumerate(lengths.tolist()):
            alone, its_own = model.advance(tokens[element : element + 1, :length])
            torch.testing.assert_close(out[element : element + 1, :length], alone)
            if "window" not in options:  # which counts the padding before it
                following, _ = model.advance(tokens[element : element + 1, :1], its_own)
                torch.testing.assert_close(after[element : element + 1], following)


def test_generation_reads_every_token_once():
    model, seen = language_model(), []
    model.embedding.register_forward_pre_hook(lambda module, args: seen.append(args[0].size(1)))
    model.generate(torch.zeros(1, 2, dtype=torch.long), 5)
    assert seen == [2, 1, 1, 1, 1]


def test_sampling_options_reach_sample():
    model, tokens = language_model(), torch.randint(V, (50, 3))
    greedy = model.generate(tokens, 1, temperature=0.0)
    assert torch.equal(model.generate(tokens, 1, top_k=1), greedy)
    assert torch.equal(model.generate(tokens, 1, top_p=1e-9), greedy)
    assert not torch.equal(model.generate(tokens, 1), greedy)
    first, second = (model.generate(tokens, 3, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(model.generate(tokens, 0), tokens)


def test_every_parameter_learns():
    model, tokens = language_model(tie_weights=False), torch.randint(V, (3, T))
    model(tokens).square().sum().backward()
    assert all((parameter.grad != 0).any() for parameter in model.parameters())


def test_overfits_a_tiny_text():
    model, text = LSTMN(V, 32, 1), torch.randint(V, (1, 13))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    losses = []
    for _ in range(60):
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(V), abs=0.3)
    assert losses[-1] < 0.05
    assert torch.equal(model.eval().generate(text[:, :1], 11, temperature=0.0), text[:, :12])


def test_dropout_is_for_training():
    model, tokens = language_model(dropout=0.5), torch.randint(V, (3, T))
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.allclose(model(tokens), model(tokens))
    model.dropout.p = 0.0
    torch.testing.assert_close(model(tokens), model.eval()(tokens))


def test_record_attention():
    model, tokens = language_model(), torch.randint(V, (3, T))
    with gattn.record_attention(model) as records:
        out = model(tokens)
    torch.testing.assert_close(out, model(tokens))
    assert list(records) == ["layers.0", "layers.1"]
    for layer in records.values():
        assert [tuple(record.weights.shape) for record in layer] == [(3, 1, 1, t) for t in range(T)]
        assert all(torch.allclose(record.weights.sum(-1), torch.ones(3, 1, 1).double()) for record in layer[1:])


def test_copies_and_tied_weights():
    model, tokens = language_model(), torch.randint(V, (3, T))
    other = LSTMN(V, C).double()
    other.load_state_dict(model.state_dict())
    for copied in (other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied.output.weight is copied.embedding.weight
        torch.testing.assert_close(copied(tokens), model(tokens), rtol=0, atol=0)
    free = LSTMN(V, C, tie_weights=False)
    assert free.output.weight is not free.embedding.weight


def test_errors():
    for options, message in (
        ({"num_tokens": 0}, "at least 1"),
        ({"num_layers": 0}, "at least 1"),
        ({"channels": 0}, "at least 1"),
        ({"window": 0}, "window must be at least 1"),
        ({"attention_channels": 0}, "attention_size must be at least 1"),
        ({"dropout": 1.5}, "dropout"),
    ):
        with pytest.raises(ValueError, match=message):
            LSTMN(**{"num_tokens": V, **options})
    model, tokens = language_model(), torch.randint(V, (3, T))
    _, state = model.advance(tokens)
    with pytest.raises(ValueError, match="one part for each of 2 layers; got 1"):
        model.advance(tokens, state[:1])
    with pytest.raises(ValueError, match="keys of the state"):
        model.advance(tokens[:2], state)
    for lengths, message in (
        (torch.tensor([9, 1, 1]), r"must lie between 0 and 8; got \[9, 1, 1\]"),
        (torch.tensor([1, 1]), r"one for each sequence, \[3\]; got \[2\]"),
        (torch.tensor([1.0, 1.0, 1.0]), "must hold one integer"),
    ):
        with pytest.raises(ValueError, match=message):
            model.advance(tokens, lengths=lengths)
    for bad in (torch.zeros(1, 3), torch.zeros(3, dtype=torch.long), torch.zeros(1, 3, dtype=torch.bool)):
        with pytest.raises(ValueError, match="tokens must be integers"):
            model(bad)
    with pytest.raises(IndexError, match="between 0 and 10; got 11"):
        model(torch.tensor([[0, V]]))
    with pytest.raises(ValueError, match="at least one token"):
        model.generate(torch.zeros(1, 0, dtype=torch.long), 3)
    with pytest.raises(ValueError, match="num_new_tokens"):
        model.generate(tokens, -1)
