"""The hierarchical network against loops over sentences and documents."""

import copy

import pytest
import torch
import torch.nn.functional as F

import gattn
from gattn.models import HAN

V, K, B, S, W = 23, 4, 4, 5, 6
LENGTHS = torch.tensor([[6, 1, 3, 2, 5], [4, 0, 0, 0, 0], [0, 0, 0, 0, 0], [2, 6, 3, 0, 0]])


@pytest.fixture
def model():
    model = HAN(V, K, embedding_channels=8, hidden_channels=3, attention_channels=5).double()
    with torch.no_grad():
        for encoder in (model.words, model.sentences):
            encoder.pool.query.mul_(5)  # so that weights differ
    return model


@pytest.fixture
def tokens():
    return torch.randint(V, (B, S, W))


def encode(encoder, x):
    """One vector of one sequence `[N, C]`, and the weights of its elements."""
    states, _ = encoder.gru(x)
    hidden = torch.tanh(F.linear(states, encoder.pool.lin.weight, encoder.pool.lin.bias))
    weights = (hidden @ encoder.pool.query).softmax(0)
    return weights @ states, weights


def loop(model, tokens, lengths):
    """Logits, and the weights of words and of sentences, one document and one sentence after the other."""
    logits = []
    word_weights, sentence_weights = (torch.zeros(shape).double() for shape in (tokens.shape, lengths.shape))
    for i, document in enumerate(tokens):
        sentences = []
        for j, sentence in enumerate(document):
            if (n := lengths[i, j]) > 0:
                vector, word_weights[i, j, :n] = encode(model.words, model.embedding(sentence[:n]))
                sentences.append(vector)
        vector = torch.zeros(2 * model.sentences.gru.hidden_size).double()
        if sentences:
            vector, sentence_weights[i, : len(sentences)] = encode(model.sentences, torch.stack(sentences))
        logits.append(model.output(vector))
    return torch.stack(logits), word_weights, sentence_weights


def gradients(model, logits):
    loss = (logits * torch.linspace(-1, 2, logits.numel()).view(logits.shape)).sum()
    return torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("ragged", [True, False])
def test_equals_a_loop(model, tokens, ragged):
    lengths = LENGTHS if ragged else torch.full((B, S), W)
    actual = model(tokens, lengths if ragged else None, return_weights=True)
    expected = loop(model, tokens, lengths)
    for tensor, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(tensor, other)
    assert torch.equal(model(tokens, lengths), actual[0])
    for gradient, other in zip(gradients(model, actual[0]), gradients(model, expected[0]), strict=True):
        torch.testing.assert_close(gradient, other)


def test_weights_add_up(model, tokens):
    _, words, sentences = model(tokens, LENGTHS, return_weights=True)
    assert (words.shape, sentences.shape) == ((B, S, W), (B, S))
    torch.testing.assert_close(words.sum(-1), (LENGTHS > 0).double())
    torch.testing.assert_close(sentences.sum(-1), torch.tensor([1.0, 1.0, 0.0, 1.0]).double())
    assert (words[torch.arange(W) >= LENGTHS.unsqueeze(-1)] == 0).all()


@pytest.mark.parametrize("padding", [0, 3, -1, V, -100])
def test_padding_is_never_seen(model, tokens, padding):
    logits = model(tokens, LENGTHS)
    expected = gradients(model, logits)
    is_padding = torch.arange(W) >= LENGTHS.unsqueeze(-1)
    other = model(tokens.masked_fill(is_padding, padding), LENGTHS)
    assert torch.equal(other, logits)
    for gradient, wanted in zip(gradients(model, other), expected, strict=True):
        assert torch.equal(gradient, wanted)
    larger = torch.full((B, S + 2, W + 3), padding)
    larger[:, :S, :W] = tokens
    other = model(larger, F.pad(LENGTHS, (0, 2)))
    torch.testing.assert_close(other, logits)
    for gradient, wanted in zip(gradients(model, other), expected, strict=True):
        torch.testing.assert_close(gradient, wanted)


def test_documents_do_not_see_each_other(model, tokens):
    logits = model(tokens, LENGTHS)
    order = torch.tensor([3, 2, 0, 1])
    torch.testing.assert_close(model(tokens[order], LENGTHS[order]), logits[order])
    for i in range(B):
        torch.testing.assert_close(model(tokens[i : i + 1], LENGTHS[i : i + 1]), logits[i : i + 1])


def test_order_counts(model, tokens):
    logits = model(tokens)
    assert not torch.isclose(model(tokens.flip(1)), logits).all(-1).any()
    assert not torch.isclose(model(tokens.flip(2)), logits).all(-1).any()


def test_nothing_to_read(model, tokens):
    for nothing in (model(tokens, torch.zeros_like(LENGTHS)), model(tokens[:, :0]), model(tokens[:, :, :0])):
        assert torch.equal(nothing, model.output.bias.expand(B, K))
        (gradient,) = torch.autograd.grad(nothing.sum(), model.output.bias)
        assert torch.equal(gradient, torch.full((K,), float(B)).double())
    assert model(tokens[:0], LENGTHS[:0]).shape == (0, K)
    _, words, sentences = model(tokens, torch.zeros_like(LENGTHS), return_weights=True)
    assert (words.shape, sentences.shape) == ((B, S, W), (B, S))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_lengths_of_other_types(model, tokens, dtype):
    assert torch.equal(model(tokens, LENGTHS.to(dtype)), model(tokens, LENGTHS))


def test_sizes_of_the_paper():
    model = HAN(V, K)
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes["embedding.weight"] == [V, 200]
    assert shapes["words.gru.weight_hh_l0_reverse"] == [150, 50]
    assert shapes["sentences.gru.weight_ih_l0"] == [150, 100]
    assert shapes["words.pool.query"] == shapes["sentences.pool.query"] == [100]
    assert shapes["output.weight"] == [K, 100]
    model = HAN(V, K, 8, 3, 5)
    assert model.words.pool.lin.weight.shape == model.sentences.pool.lin.weight.shape == (5, 6)


def test_dropout_acts_in_training_only(tokens):
    model = HAN(V, K, 8, 3, 5, dropout=0.5)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
    model = HAN(V, K, 8, 3, 5, dropout=1.0)
    dropped = []
    model.dropout.register_forward_hook(lambda module, inputs, out: dropped.append(out))
    assert torch.equal(model(tokens), model.output.bias.expand(B, K))
    assert [out.shape for out in dropped] == [(B * S * W, 8), (B * S, 6), (B, 6)]
    assert all((out == 0).all() for out in dropped)


def test_recorded(model, tokens):
    with gattn.record_attention(model) as records:
        _, words, sentences = model(tokens, LENGTHS, return_weights=True)
    assert list(records) == ["words.pool", "sentences.pool"]
    assert torch.equal(records["words.pool"][0].weights.flatten(), words[torch.arange(W) < LENGTHS.unsqueeze(-1)])
    assert torch.equal(records["sentences.pool"][0].weights.flatten(), sentences[LENGTHS > 0])


def test_reset_draws_everything_anew(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    model.reset_parameters()
    assert not any((parameter == 7).any() for parameter in model.parameters())


def test_copies(model, tokens):
    other = HAN(V, K, 8, 3, 5).double()
    other.load_state_dict(model.state_dict())
    for copied in (other, copy.deepcopy(model)):
        assert torch.equal(copied(tokens, LENGTHS), model(tokens, LENGTHS))


def test_finds_the_word_that_decides():
    """One word of a sentence, somewhere, tells the class; all others are noise."""
    model = HAN(30, 3, embedding_channels=16, hidden_channels=8, attention_channels=16)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0)

    def documents(count):
        tokens = torch.randint(3, 30, (count, 4, 5), generator=generator)
        lengths = torch.randint(2, 6, (count, 4), generator=generator)
        classes = torch.randint(3, (count,), generator=generator)
        sentence, word = (
            torch.randint(4, (count,), generator=generator),
            torch.randint(2, (count,), generator=generator),
        )
        tokens[torch.arange(count), sentence, word] = classes
        return tokens, lengths, classes, sentence, word

    for _ in range(200):
        tokens, lengths, classes, _, _ = documents(32)
        optimizer.zero_grad()
        F.cross_entropy(model(tokens, lengths), classes).backward()
        optimizer.step()
    tokens, lengths, classes, sentence, word = documents(200)
    logits, word_weights, sentence_weights = model(tokens, lengths, return_weights=True)
    found = (logits.argmax(1) == classes).float().mean()
    at_sentence = (sentence_weights.argmax(1) == sentence).float().mean()
    at_word = (word_weights[torch.arange(200), sentence].argmax(1) == word).float().mean()
    assert min(found, at_word) > 0.9
    assert at_sentence > 0.6  # by chance a quarter; the GRU tells neighbouring sentences, too


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"num_tokens": 0}, "at least 1"),
        ({"num_classes": 0}, "at least 1"),
        ({"embedding_channels": 0}, "at least 1"),
        ({"hidden_channels": 0}, "at least 1"),
        ({"attention_channels": 0}, "attention_channels must be at least 1; got 0"),
        ({"dropout": 1.5}, "between 0 and 1"),
    ],
)
def test_bad_options(kwargs, match):
    with pytest.raises(ValueError, match=match):
        HAN(**{"num_tokens": V, "num_classes": K, **kwargs})


@pytest.mark.parametrize(
    ("shape", "dtype", "match"),
    [
        ((B, W), torch.int64, r"\[B, S, W\], .*; got \[4, 6\]"),
        ((B, S, W), torch.float32, r"\[B, S, W\]; got torch.float32"),
        ((B, S, W), torch.bool, r"\[B, S, W\]; got torch.bool"),
    ],
)
def test_bad_tokens(model, shape, dtype, match):
    with pytest.raises(ValueError, match=match):
        model(torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("token", [-1, V])
def test_tokens_out_of_range(model, tokens, token):
    tokens[3, 2, 1] = token
    with pytest.raises(IndexError, match=f"between 0 and {V - 1}; got {token}"):
        model(tokens, LENGTHS)


@pytest.mark.parametrize(
    ("lengths", "match"),
    [
        (LENGTHS - 1, "between 0 and 6, the number of words in tokens; got -1"),
        (LENGTHS + 1, "got 7"),
        (LENGTHS.float(), "got torch.float32"),
        (LENGTHS > 0, "got torch.bool"),
        (LENGTHS[:, 1:], r"\[4, 5\] for these tokens; got torch.int64 of shape \[4, 4\]"),
        (LENGTHS.flip(1), r"document 1 has word_lengths \[0, 0, 0, 0, 4\]"),
    ],
)
def test_bad_lengths(model, tokens, lengths, match):
    with pytest.raises(ValueError, match=match):
        model(tokens, lengths)


def test_lengths_are_a_tensor(model, tokens):
    with pytest.raises(TypeError, match="word_lengths must be a tensor; got list"):
        model(tokens, LENGTHS.tolist())
