import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gattn.models import TransformerLM, TransformerSeq2Seq
from gattn.models.decoding import beam_search
from gattn.nn import KeyValueCache, MultiheadAttention

POSITIONS = ["learned", "sinusoidal", "rotary", "alibi"]
V, CONTEXT = 11, 10


def randomise(model, scale=0.3):
    """Initial weights are small, and all logits alike."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * scale)
    return model


def language_model(**kwargs):
    options = {"channels": 16, "num_layers": 2, "heads": 2, "context": CONTEXT, **kwargs}
    return randomise(TransformerLM(V, **options)).eval()


@pytest.mark.parametrize(
    "make", [lambda: TransformerLM(V, 16, num_layers=1, heads=2), lambda: TransformerSeq2Seq(V, 7, 16, 1, 2)]
)
def test_a_reset_leaves_nothing_of_the_training(make):
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(123.0)
    model.reset_parameters()
    assert not [name for name, parameter in model.named_parameters() if (parameter == 123.0).any()]
    assert {x.item() for name, x in model.named_parameters() if "norm" in name and "weight" in name for x in x} == {1.0}


@pytest.mark.parametrize("position", POSITIONS)
class TestPositionsOfLM:
    def test_causal(self, position):
        model = language_model(position=position).double()
        tokens = torch.randint(V, (3, CONTEXT))
        embedded = []
        model.embedding.register_forward_hook(lambda module, inputs, out: embedded.append(out))
        out = model(tokens)
        (gradient,) = torch.autograd.grad(out[:, 4].square().sum(), embedded[0])
        assert (gradient[:, 5:] == 0).all()
        assert (gradient[:, :5] != 0).any(-1).all()
        tokens[:, 5] = (tokens[:, 5] + 1) % V
        other = model(tokens)
        torch.testing.assert_close(other[:, :5], out[:, :5], rtol=0, atol=1e-12)
        assert not torch.isclose(other[:, 5:], out[:, 5:]).all(-1).any()

    def test_order_counts(self, position):
        model = language_model(position=position)
        tokens = torch.tensor([[1, 2, 3, 4]])
        assert not torch.allclose(model(tokens)[:, -1], model(tokens[:, [1, 0, 2, 3]])[:, -1])

    @pytest.mark.parametrize("prompt", [1, 4, CONTEXT, CONTEXT + 3])
    def test_cached_generation_gives_the_same_tokens(self, position, prompt):
        model = language_model(position=position).double()
        tokens = torch.randint(V, (3, prompt))
        for options in ({"temperature": 0.0}, {"temperature": 0.9}, {"top_k": 4}, {"top_p": 0.8}):
            cached, uncached = (
                model.generate(
                    tokens, 2 * CONTEXT, use_cache=use_cache, generator=torch.Generator().manual_seed(1), **options
                )
                for use_cache in (True, False)
            )
            assert torch.equal(cached, uncached)
            assert torch.equal(cached[:, :prompt], tokens)
            assert cached.shape == (3, prompt + 2 * CONTEXT)

    def test_cached_logits(self, position):
        model = language_model(position=position).double()
        tokens = torch.randint(V, (2, CONTEXT))
        cache = KeyValueCache()
        parts = [model(part, cache) for part in tokens.split([3, 1, 1, 5], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(tokens))

    @pytest.mark.parametrize("window", [0, 3])
    def test_a_window(self, position, window):
        model = language_model(position=position, window=window).double()
        tokens = torch.randint(V, (2, CONTEXT))
        whole, edited = model(tokens), tokens.clone()
        edited[:, 0] = (tokens[:, 0] + 1) % V
        reach = 2 * window + 1  # of two layers
        torch.testing.assert_close(model(edited)[:, reach:], whole[:, reach:], rtol=0, atol=1e-12)
        assert not torch.isclose(model(edited)[:, :reach], whole[:, :reach]).all(-1).any()
        for cache in (KeyValueCache(window), KeyValueCache(window + 1), KeyValueCache()):
            parts = [model(part, cache) for part in tokens.split([3, 1, 1, 5], 1)]
            torch.testing.assert_close(torch.cat(parts, 1), whole)
            assert len(cache) == CONTEXT
        prompt, options = tokens[:, :2], {"temperature": 0.0}
        cached = model.generate(prompt, CONTEXT + 3, **options)
        assert torch.equal(cached, model.generate(prompt, CONTEXT + 3, use_cache=False, **options))


class TestLM:
    def test_generation_keeps_a_window(self, monkeypatch):
        model = language_model(window=2)
        kept = []
        append = KeyValueCache.append

        def counted(*args):
            pair = append(*args)
            kept.append(pair[0].size(-3))
            return pair

        monkeypatch.setattr(KeyValueCache, "append", counted)
        model.generate(torch.zeros(1, 2, dtype=torch.long), 5)
        assert max(kept) == 3

    def test_generation_is_the_argmax_of_the_last_context_tokens(self):
        model = language_model()
        tokens = torch.randint(V, (2, 3))
        out = model.generate(tokens, 15, temperature=0.0)
        for _ in range(15):
            tokens = torch.cat([tokens, model(tokens[:, -CONTEXT:])[:, -1:].argmax(-1)], 1)
        assert torch.equal(out, tokens)
        assert len(set(tokens.flatten().tolist())) > 2

    def test_generation_uses_its_cache(self):
        """With it, each layer sees every token once."""
        model = language_model()
        seen = []
        model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].size(1)))
        model.generate(torch.zeros(1, 2, dtype=torch.long), 5)
        assert seen == [2, 1, 1, 1, 1]
        seen.clear()
        model.generate(torch.zeros(1, 2, dtype=torch.long), 3, use_cache=False)
        assert seen == [2, 3, 4]

    def test_sampling_options_reach_sample(self):
        model = language_model()
        tokens = torch.randint(V, (50, 3))
        greedy = model.generate(tokens, 1, temperature=0.0)
        assert torch.equal(model.generate(tokens, 1, top_k=1), greedy)
        assert torch.equal(model.generate(tokens, 1, top_p=1e-9), greedy)
        assert torch.equal(model.generate(tokens, 1, temperature=1e-4), greedy)
        assert not torch.equal(model.generate(tokens, 1), greedy)
        assert torch.equal(model.generate(tokens, 0), tokens)

    @pytest.mark.parametrize("position", ["learned", "sinusoidal"])
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("training", [False, True])
    def test_pytorchs_layers_give_the_same(self, training, bias, position):
        options = {"bias": bias, "position": position, "window": 2 if bias else None}
        ours = language_model(**options).double().train(training)
        theirs = language_model(layer=nn.TransformerEncoderLayer, **options).double().train(training)
        theirs.load_state_dict(ours.state_dict())
        tokens = torch.randint(V, (3, CONTEXT))
        results = []
        for model in (ours, theirs):
            out = model(tokens)
            loss = F.cross_entropy(out[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            results.append((out, *torch.autograd.grad(loss, list(model.parameters()))))
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected)
        with torch.no_grad():
            torch.testing.assert_close(ours(tokens), theirs(tokens))

    def test_pytorchs_layers_generate(self):
        ours = language_model()
        theirs = language_model(layer=nn.TransformerEncoderLayer)
        theirs.load_state_dict(ours.state_dict())
        tokens = torch.randint(V, (2, 3))
        expected = ours.generate(tokens, 8, temperature=0.0)
        assert torch.equal(theirs.generate(tokens, 8, temperature=0.0, use_cache=False), expected)
        assert torch.equal(theirs.generate(tokens, 8, temperature=0.0), expected)

    def test_same_seed_gives_same_parameters_with_pytorchs_layers(self):
        models = []
        for options in ({}, {"layer": nn.TransformerEncoderLayer}):
            torch.manual_seed(5)
            models.append(TransformerLM(V, 16, 2, 2, CONTEXT, **options))
        for name, parameter in models[0].named_parameters():
            assert torch.equal(models[1].get_parameter(name), parameter), name

    def test_overfits_a_tiny_text(self):
        model = TransformerLM(V, 32, 1, 4, 32)
        text = torch.randint(V, (1, 33))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(80):
            loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(torch.tensor(V).log().item(), abs=0.1)
        assert losses[-1] < 0.05
        assert torch.equal(model.eval().generate(text[:, :1], 31, temperature=0.0), text[:, :32])

    def test_initial_parameters_are_gpt2s(self):
        model = TransformerLM(500, 128, 8, 4, 64, bias=True)
        assert model.embedding.tokens.weight.std().item() == pytest.approx(0.02, rel=0.05)
        for layer in model.layers:
            assert layer.self_attn.in_proj_weight.std().item() == pytest.approx(0.02, rel=0.05)
            assert layer.self_attn.out_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
            assert layer.linear1.weight.std().item() == pytest.approx(0.02, rel=0.05)
            assert layer.linear2.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
            assert not layer.linear1.bias.any()
            assert (layer.norm1.weight == 1).all()

    def test_weights_are_tied_or_not(self):
        tied = TransformerLM(V, 16, 1, 2)
        assert tied.output.weight is tied.embedding.tokens.weight
        free = TransformerLM(V, 16, 1, 2, tie_weights=False)
        assert free.output.weight is not free.embedding.tokens.weight
        count = [sum(parameter.numel() for parameter in model.parameters()) for model in (tied, free)]
        assert count[1] - count[0] == V * 16
        copied = copy.deepcopy(tied)
        assert copied.output.weight is copied.embedding.tokens.weight

    def test_copies_and_pickles(self):
        model = language_model(position="alibi")
        tokens = torch.randint(V, (2, 5))
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            torch.testing.assert_close(other(tokens), model(tokens))

    def test_errors(self):
        with pytest.raises(ValueError, match="got 'absolute'"):
            TransformerLM(V, position="absolute")
        with pytest.raises(ValueError, match="at least 1"):
            TransformerLM(V, context=0)
        with pytest.raises(ValueError, match="at least 1"):
            TransformerLM(0)
        with pytest.raises(ValueError, match="not one of 3"):
            TransformerLM(V, 16, heads=3)
        model = language_model()
        with pytest.raises(ValueError, match="made for 10 tokens, but there are 11"):
            model(torch.zeros(1, CONTEXT + 1, dtype=torch.long))
        cache = KeyValueCache()
        model(torch.zeros(1, 8, dtype=torch.long), cache)
        with pytest.raises(ValueError, match="there are 11"):
            model(torch.zeros(1, 3, dtype=torch.long), cache)
        with pytest.raises(ValueError, match="window must be at least 0"):
            TransformerLM(V, window=-1)
        with pytest.raises(ValueError, match="keeps 2 earlier tokens, but this model attends to all"):
            model(torch.zeros(1, 1, dtype=torch.long), KeyValueCache(2))
        with pytest.raises(ValueError, match="keeps 2 earlier tokens, but this model attends to 3"):
            language_model(window=3)(torch.zeros(1, 1, dtype=torch.long), KeyValueCache(2))
        for bad in (torch.zeros(1, 3), torch.zeros(3, dtype=torch.long), torch.zeros(1, 3, dtype=torch.bool)):
            with pytest.raises(ValueError, match="tokens must be integers"):
                model(bad)
        with pytest.raises(IndexError, match="between 0 and 10; got 11"):
            model(torch.tensor([[0, V]]))
        with pytest.raises(IndexError, match="got -1"):
            model(torch.tensor([[0, -1]]))
        with pytest.raises(ValueError, match="at least one token"):
            model.generate(torch.zeros(1, 0, dtype=torch.long), 3)
        with pytest.raises(ValueError, match="num_new_tokens"):
            model.generate(torch.zeros(1, 1, dtype=torch.long), -1)
        with pytest.raises(TypeError, match="num_new_tokens must be an integer; got '3'"):
            model.generate(torch.zeros(1, 1, dtype=torch.long), "3")
        with pytest.raises(TypeError, match="tokens must be a tensor of integers.*; got 'abc'"):
            model.generate("abc", 3)
        with pytest.raises(ValueError, match="temperature"):
            model.generate(torch.zeros(1, 1, dtype=torch.long), 1, temperature=-1.0)


def seq2seq(**kwargs):
    options = {"channels": 16, "num_layers": 2, "heads": 2, **kwargs}
    return randomise(TransformerSeq2Seq(V, V + 1, **options), scale=0.25).double().eval()


@pytest.mark.parametrize("position", POSITIONS)
class TestPositionsOfSeq2Seq:
    def test_targets_are_shifted_by_one(self, position):
        model = seq2seq(position=position)
        source, target = torch.randint(3, V, (2, 6)), torch.randint(3, V, (2, 5))
        out = model(source, target)
        assert out.shape == (2, 5, V + 1)
        for place in range(5):
            changed = target.clone()
            changed[:, place] = 3 + (changed[:, place] - 2) % (V - 3)
            other = model(source, changed)
            torch.testing.assert_close(other[:, : place + 1], out[:, : place + 1], rtol=0, atol=1e-12)
            assert not torch.isclose(other[:, place + 1 :], out[:, place + 1 :]).all(-1).any()
        shifted = torch.cat([torch.full((2, 1), model.start), target[:, :-1]], 1)
        torch.testing.assert_close(model.decode(shifted, model.encode(source)), out)
        changed = source.clone()
        changed[:, 2] = 3 + (changed[:, 2] - 2) % (V - 3)
        assert not torch.isclose(model(changed, target), out).all(-1).any()  # everybody sees the source

    def test_padding_changes_nothing(self, position):
        model = seq2seq(position=position)
        lengths = torch.tensor([6, 2, 4])
        source, target = torch.randint(3, V, (3, 6)), torch.randint(3, V, (3, 5))
        out = model(source, target, lengths)
        other = source.clone()
        other[torch.arange(6) >= lengths.unsqueeze(1)] = 0
        assert not torch.equal(other, source)
        torch.testing.assert_close(model(other, target, lengths), out)
        for i, length in enumerate(lengths.tolist()):
            alone = model(source[i : i + 1, :length], target[i : i + 1])
            torch.testing.assert_close(alone, out[i : i + 1])
        for beams in (1, 3):
            found = model.generate(source, lengths, max_length=8, beams=beams)
            assert torch.equal(found, model.generate(other, lengths, max_length=8, beams=beams))
            for i, length in enumerate(lengths.tolist()):
                alone = model.generate(source[i : i + 1, :length], max_length=8, beams=beams)[0]
                assert torch.equal(found[i, : alone.numel()], alone)
                assert (found[i, alone.numel() :] == model.end).all()

    @pytest.mark.parametrize("beams", [1, 4])
    @pytest.mark.parametrize("length_penalty", [0.0, 1.0])
    def test_generation_equals_uncached_search(self, position, beams, length_penalty):
        model = seq2seq(position=position)
        source, lengths = torch.randint(3, V, (3, 6)), torch.tensor([6, 2, 4])
        found = model.generate(source, lengths, max_length=9, beams=beams, length_penalty=length_penalty)
        memory = model.encode(source, lengths).repeat_interleave(beams, 0)
        repeated = lengths.repeat_interleave(beams)
        expected, scores = beam_search(
            lambda tokens: model.decode(tokens, memory, repeated)[:, -1],
            3,
            model.start,
            model.end,
            9,
            beams,
            length_penalty,
        )
        assert torch.equal(found, expected)
        # Scores are those that a forward pass over the targets gives.
        log_probabilities = model(source, found, lengths).log_softmax(-1)
        chosen = log_probabilities.gather(-1, found.unsqueeze(-1)).squeeze(-1)
        real = torch.cat([torch.ones(3, 1, dtype=torch.bool), (found == model.end).cumsum(1)[:, :-1] == 0], 1)
        total = (chosen * real).sum(1) / real.sum(1) ** length_penalty
        torch.testing.assert_close(total.detach(), scores.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("position", ["learned", "rotary"])
def test_models_compile_without_graph_breaks(position):
    torch._dynamo.reset()
    model = language_model(position=position, num_layers=1)
    tokens = torch.randint(V, (2, CONTEXT))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens), model(tokens), rtol=1e-4, atol=1e-5)

    model = seq2seq(position=position, num_layers=1)
    source, target, lengths = torch.randint(3, V, (2, 6)), torch.randint(3, V, (2, 5)), torch.tensor([6, 3])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(source, target), model(source, target))
    torch.testing.assert_close(compiled(source, target, lengths), model(source, target, lengths))


class TestSeq2Seq:
    @pytest.mark.parametrize("norm_first", [False, True])
    def test_equals_pytorchs_layers(self, norm_first):
        """The same model, put together by hand from `torch.nn`'s layers."""
        model = seq2seq(norm_first=norm_first)
        options = {"dim_feedforward": 64, "dropout": 0.0, "batch_first": True, "norm_first": norm_first}
        norms = [nn.LayerNorm(16) if norm_first else None for _ in range(2)]
        encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, **options), 2, norms[0], enable_nested_tensor=False
        )
        decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, **options), 2, norms[1])
        for theirs, ours in ((encoder, model.encoder), (decoder, model.decoder)):
            theirs.double().eval().load_state_dict(ours.state_dict())
        source, target, lengths = torch.randint(3, V, (2, 6)), torch.randint(3, V, (2, 5)), torch.tensor([6, 4])
        padding = torch.arange(6) >= lengths.unsqueeze(1)

        def embed(embedding, tokens):
            return embedding.position(embedding.tokens(tokens) * 16**0.5)

        shifted = torch.cat([torch.full((2, 1), 1), target[:, :-1]], 1)
        memory = encoder(embed(model.source_embedding, source), src_key_padding_mask=padding)
        causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
        out = decoder(embed(model.target_embedding, shifted), memory, tgt_mask=causal, memory_key_padding_mask=padding)
        torch.testing.assert_close(model(source, target, lengths), model.output(out))

    def test_generation_uses_its_cache(self):
        model = seq2seq()
        model.output.bias.data[model.end] = -50.0  # never ends
        seen = []
        model.decoder.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].size(1)))
        model.generate(torch.randint(3, V, (2, 6)), max_length=5, beams=2)
        assert seen == [1] * 5

    def test_embeddings_and_output_are_shared_or_not(self):
        model = TransformerSeq2Seq(V, V, 16, 1, 2, share_embeddings=True)
        weight = model.target_embedding.tokens.weight
        assert model.source_embedding.tokens.weight is weight
        assert model.output.weight is weight
        assert weight.std().item() == pytest.approx(0.25, rel=0.3)
        model = TransformerSeq2Seq(V, V, 16, 1, 2, tie_weights=False)
        weights = (model.source_embedding.tokens.weight, model.target_embedding.tokens.weight, model.output.weight)
        assert len({id(weight) for weight in weights}) == 3

    def test_dropout_acts_in_training_only(self):
        model = TransformerSeq2Seq(V, V, 16, 1, 2, dropout=0.5)
        source, target = torch.randint(3, V, (2, 6)), torch.randint(3, V, (2, 5))
        assert not torch.equal(model(source, target), model(source, target))
        model.eval()
        assert torch.equal(model(source, target), model(source, target))
        rates = {module.p for module in model.modules() if isinstance(module, nn.Dropout)}
        rates |= {module.dropout for module in model.modules() if isinstance(module, MultiheadAttention)}
        assert 0.5 in rates

    @pytest.mark.slow
    def test_learns_to_reverse(self):
        """Copying backwards, of two lengths: positions, padding, the shift and the end are all needed."""
        generator = torch.Generator().manual_seed(0)

        def batch(size):
            lengths = torch.randint(2, 5, (size,), generator=generator)
            source = torch.randint(3, 8, (size, 4), generator=generator)
            target = torch.full((size, 5), 2)
            for row, length in enumerate(lengths.tolist()):
                target[row, :length] = source[row, :length].flip(0)
            real = torch.arange(5) <= lengths.unsqueeze(1)
            return source, lengths, target, real

        model = TransformerSeq2Seq(8, 8, 32, 1, 4, dropout=0.0)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        for _ in range(300):
            source, lengths, target, real = batch(64)
            loss = F.cross_entropy(model(source, target, lengths)[real], target[real])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        source, lengths, target, _ = batch(200)
        for beams in (1, 3):
            found = model.generate(source, lengths, max_length=5, beams=beams)
            assert (found == target[:, : found.size(1)]).all(1).double().mean() > 0.95

    def test_errors(self):
        with pytest.raises(ValueError, match="one vocabulary for source and target; got 5 and 6"):
            TransformerSeq2Seq(5, 6, share_embeddings=True)
        with pytest.raises(ValueError, match="end must be a target token, between 0 and 5; got 6"):
            TransformerSeq2Seq(5, 6, end=6)
        with pytest.raises(ValueError, match="start must be a target token"):
            TransformerSeq2Seq(5, 6, start=-1)
        with pytest.raises(ValueError, match="got 'absolute'"):
            TransformerSeq2Seq(5, 6, position="absolute")
        with pytest.raises(ValueError, match="not one of 3"):
            TransformerSeq2Seq(5, 6, 16, heads=3)
        model = seq2seq(position="learned", max_length=6)
        source, target = torch.randint(3, V, (2, 6)), torch.randint(3, V, (2, 5))
        with pytest.raises(ValueError, match="each source must have one target; got 2 and 1"):
            model(source, target[:1])
        with pytest.raises(ValueError, match="source_lengths must lie between 0 and 6"):
            model(source, target, torch.tensor([7, 2]))
        with pytest.raises(ValueError, match="lengths for a batch"):
            model(source, target, torch.tensor([6, 2, 1]))
        with pytest.raises(IndexError, match="source tokens must lie between 0 and 10; got 11"):
            model(source.clamp(max=0) + V, target)
        with pytest.raises(IndexError, match="target tokens must lie between 0 and 11; got 12"):
            model(source, target.clamp(max=0) + V + 1)
        with pytest.raises(ValueError, match="target tokens must be integers"):
            model(source, target.double())
        with pytest.raises(ValueError, match="6 learnt positions"):
            model(torch.randint(3, V, (2, 7)), target)
        with pytest.raises(ValueError, match="beams"):
            model.generate(source, beams=0)
