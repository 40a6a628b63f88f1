"""Masks of transformers as graphs, what models pass to attention functions, and other graphs under models."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import transformers
from transformers import masking_utils

import gattn
from gattn.huggingface import GraphMask, attention, graph, masks, positions
from gattn.huggingface.function import IGNORED
from gattn.testing import assert_as_exact_as
from tests.huggingface.models import exact, inputs, models, run

pytestmark = pytest.mark.huggingface
N = 12
#: What models pass and gattn refuses by name.
REFUSED = {"block_indices": "a format of block-sparse kernels; eager attention gets a mask in its place"}


class Layer(nn.Module):
    """What masks are made for."""

    is_causal = True
    config = transformers.LlamaConfig(attn_implementation="gattn", sliding_window=4, attention_chunk_size=5)

    def forward(self, hidden_states):
        return hidden_states


def made(kind, texts=2, length=N, padding=None, **options):
    """A mask as models make it."""
    make = getattr(masking_utils, f"create_{kind}_mask")
    real = torch.ones(texts, length, dtype=torch.int64)
    for number, padded in enumerate((length // 3, 0)):
        if padding == "right" and padded:
            real[number, -padded:] = 0
        elif padding == "left":
            real[number, :padded] = 0
        elif padding == "anywhere" and padded:
            real[number, [1, 4]] = 0
    embeds, given = torch.zeros(texts, length, 1), None if padding is None else real
    if kind.startswith("bidirectional"):
        return make(Layer.config, embeds, given, **options), real.bool()
    restarts = torch.cat([torch.arange(length // 3), torch.arange(length - length // 3)])[None]
    packed = {"position_ids": restarts} if options.pop("packed", False) else {}
    return make(Layer.config, embeds, given, None, **packed, **options), real.bool()


CASES = [
    *((kind, {"padding": padding}) for kind in ("causal", "bidirectional", "sliding_window_causal", "chunked_causal")
      for padding in (None, "right", "left", "anywhere")),
    *(("bidirectional_sliding_window", {"padding": padding}) for padding in (None, "right", "left")),
    *((kind, {"packed": True}) for kind in ("causal", "sliding_window_causal")),
]  # fmt: skip


def drawn(texts=2, heads=4, groups=2, length=N, sources=None, dtype=torch.double):
    query = torch.randn(texts, heads, length, 6, dtype=dtype)
    key, value = (torch.randn(texts, groups, sources or length, size, dtype=dtype) for size in (6, 5))
    return [x.requires_grad_() for x in (query, key, value)]


def plainly(query, key, value, mask=None, bias=0.0, sinks=None, softcap=None):
    """The same by matrices."""
    key, value = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (key, value))
    logits = query @ key.transpose(2, 3) / key.size(-1) ** 0.5 + bias
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    logits = logits if mask is None else logits.masked_fill(~mask, -torch.inf)
    logits = logits if sinks is None else torch.cat([logits, sinks], -1)
    return (logits.softmax(-1)[..., : key.size(2)].nan_to_num() @ value).transpose(1, 2)


def same(found, expected, leaves, real=None):
    found, expected = (x if real is None else x[real] for x in (found, expected))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    grads = [torch.autograd.grad(x.sin().sum(), leaves, retain_graph=True) for x in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-10)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_masks_are_graphs(kind, options):
    mask, real = made(kind, **options)
    assert isinstance(mask, GraphMask)
    query, key, value = drawn()
    out, none = attention(Layer(), query, key, value, mask)
    assert none is None
    same(out, plainly(query, key, value, mask.dense()), [query, key, value], real)
    padded = ~real
    has_holes = options.get("padding") == "anywhere" and "sliding" in kind
    assert out[padded].count_nonzero() == 0 or has_holes, "rows of padding are not computed"
    out, weights = attention(Layer(), query, key, value, mask, output_attentions=True)
    assert weights.shape == (2, 4, N, N)
    same(out, plainly(query, key, value, mask.dense()), [query, key, value], real)


@pytest.mark.filterwarnings("ignore:.*layer should not be")
def test_unknown_masks_are_tensors():
    masks._warned.clear()
    mask, _ = made("causal", or_mask_function=lambda text, head, target, source: source < 2)
    tensors = drawn()
    with pytest.warns(UserWarning, match="does not know the mask function"):
        out, _ = attention(Layer(), *tensors, mask)
    same(out, plainly(*tensors, mask.dense()), tensors)
    attention(Layer(), *tensors, made("causal", or_mask_function=lambda *places: places[3] < 2)[0])  # warns once


def peak():
    """The most memory that this program has had, in bytes; `getrusage` would count that of the one which started it."""
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


def memory_of_long_texts():
    """Prints by how many bytes the peak grows, for masks in turn, and then for one as a tensor."""
    long, peaks = 8192, [peak()]
    for kind, options in CASES:
        tensors = drawn(1 if options.get("packed") else 2, 2, 1, long, dtype=torch.float32)
        mask, _ = made(kind, len(tensors[0]), long, **options)
        attention(Layer(), *tensors, mask)[0].sum().backward()
        peaks.append(peak())
    mask.dense()
    peaks.append(peak())
    print(*[most - peaks[0] for most in peaks])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux")
def test_no_tensor_of_all_pairs():
    """Not even a Boolean one, which the last mask is to show."""
    program = "from tests.huggingface.test_masks import *; memory_of_long_texts()"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    *grown, with_tensor = map(int, found.stdout.split())
    assert max(grown) < 8192**2, grown
    assert with_tensor - max(grown) > 8192**2 / 2


def test_caches():
    """A static cache's unwritten slots are seen by nobody; a sliding one starts later."""
    query, key, value = drawn(length=3, sources=10)
    sliding = masking_utils.sliding_window_causal_mask_function(5)
    for offset, first, function in ((4, 0, masking_utils.causal_mask_function), (9, 2, sliding)):
        mask = gattn.huggingface.graph_mask(2, 3, 10, offset, first, function)
        assert mask.pattern is not None
        out, weights = attention(Layer(), query, key, value, mask, output_attentions=True)
        assert weights.shape[-1] == 10
        same(out, plainly(query, key, value, mask.dense()), [query, key, value])
        same(attention(Layer(), query, key, value, mask)[0], out, [query, key, value])
    real = torch.ones(2, 7, dtype=torch.bool)
    real[0, :2] = False
    mask = gattn.huggingface.graph_mask(2, 3, 10, 4, attention_mask=real)
    assert mask.plan(10, True, False).graph.blocks is not None
    same(attention(Layer(), query, key, value, mask)[0], plainly(query, key, value, mask.dense()), [query, key, value])


def test_models_may_compute_with_masks():
    masks._warned.clear()
    mask, _ = made("causal", padding="right")
    cut = mask[:, :, :, :5]
    assert isinstance(cut, GraphMask)
    assert cut.shape == (2, 1, N, 5)
    assert cut.dense().equal(mask.dense()[..., :5])
    assert mask.to("cpu") is mask
    assert (mask.shape, mask.dim(), mask.dtype, mask.size(3)) == ((2, 1, N, N), 4, torch.bool, N)
    with pytest.warns(UserWarning, match="computes with its attention mask"):
        assert torch.where(mask, 1, 0).equal(mask.dense().long())
    logits = torch.randn(2, 4, N, N)
    for added in (logits + mask, mask + logits, torch.add(logits, mask), logits.clone().add_(mask)):
        assert added.softmax(-1).equal(logits.masked_fill(~mask.dense(), torch.finfo(torch.float).min).softmax(-1))
    assert (~mask).equal(~mask.dense())
    assert (mask & mask).equal(mask.dense())
    assert mask[0].equal(mask.dense()[0])
    assert mask.float().equal(mask.dense().float())
    assert mask.to(torch.double).equal(
        torch.zeros(2, 1, N, N).double().masked_fill(~mask.dense(), -1.7976931348623157e308)
    )


def test_arguments():
    """Each against its formula."""
    query, key, value = tensors = drawn()
    causal, layer = torch.ones(N, N, dtype=torch.bool).tril(), Layer()
    same(attention(layer, *tensors, None)[0], plainly(*tensors, causal), tensors)
    same(attention(layer, *tensors, None, is_causal=False)[0], plainly(*tensors), tensors)
    short = [query, key[:, :, :3], value[:, :, :3]]
    same(attention(layer, *short, None, is_causal=False)[0], plainly(*short), tensors)
    windowed = causal & ~causal.tril(-4)
    same(attention(layer, *tensors, None, sliding_window=4)[0], plainly(*tensors, windowed), tensors)
    same(attention(layer, *tensors, causal[None, None])[0], plainly(*tensors, causal), tensors)
    bias = torch.randn(1, 4, N, N, dtype=torch.double, requires_grad=True)
    for mask in (None, made("causal", padding="left")[0]):
        real = None if mask is None else mask.keep
        out = attention(layer, *tensors, mask, position_bias=bias)[0]
        same(out, plainly(*tensors, causal if mask is None else mask.dense(), bias), [*tensors, bias], real)
    added = torch.zeros(N, N, dtype=torch.double).masked_fill(~causal, -torch.inf)[None, None]
    same(attention(layer, *tensors, added, position_bias=bias)[0], plainly(*tensors, causal, bias), [*tensors, bias])
    same(attention(layer, *tensors, bias)[0], plainly(*tensors, None, bias), [*tensors, bias])
    sinks = torch.randn(2, 4, N, 1, dtype=torch.double, requires_grad=True)
    out, weights = attention(layer, *tensors, None, sinks=sinks, output_attentions=True)
    assert (weights.sum(-1) < 1).all()
    same(out, plainly(*tensors, causal, sinks=sinks), [*tensors, sinks])
    per_head = torch.randn(4, dtype=torch.double, requires_grad=True)
    whole = per_head[:, None, None].expand(2, 4, N, 1)
    same(
        attention(layer, *tensors, None, s_aux=per_head)[0],
        plainly(*tensors, causal, sinks=whole),
        [*tensors, per_head],
    )
    factor = torch.tensor([0.0, 1.0, 0.5, 2.0])
    out = attention(layer, *tensors, None, head_mask=factor[None, :, None, None])[0]
    same(out, plainly(*tensors, causal) * factor[:, None], tensors)
    indices = torch.stack([torch.randperm(N)[:5] for _ in range(2 * N)]).view(2, N, 5)
    chosen = torch.zeros(2, 1, N, N, dtype=torch.bool).scatter(-1, indices[:, None], True)
    same(attention(layer, *tensors, made("causal")[0], indices=indices)[0], plainly(*tensors, chosen & causal), tensors)
    one = [x[:1].detach().requires_grad_() for x in tensors]
    of_text = torch.tensor([0] * 5 + [1] * 7)
    out = attention(layer, *one, None, cu_seq_lens_q=torch.tensor([0, 5, 12]), max_length_q=7)[0]
    same(out, plainly(*one, causal & (of_text[:, None] == of_text)), one)
    same(attention(layer, *tensors, None, softcap=0.7)[0], plainly(*tensors, causal, softcap=0.7), tensors)
    learnt = torch.tensor(0.3, dtype=torch.double, requires_grad=True)
    for scale, leaves in ((0.3, tensors), (learnt, [*tensors, learnt])):
        same(attention(layer, *tensors, None, scale)[0], plainly(query * (scale * 6**0.5), key, value, causal), leaves)
    with pytest.raises(ValueError, match="passes block_indices"):
        attention(layer, *tensors, None, block_indices=indices)


def test_dropout_is_that_of_training():
    tensors, layer = drawn(), Layer()
    kept = attention(layer.eval(), *tensors, None, dropout=0.5)[0]
    assert kept.equal(attention(layer, *tensors, None)[0])
    out, weights = attention(layer.train(), *tensors, None, dropout=0.5, output_attentions=True)
    assert 0.3 < (weights[..., -1, :] == 0).double().mean() < 0.7
    torch.testing.assert_close(out, (weights @ tensors[2].repeat_interleave(2, 1)).transpose(1, 2))


def test_all_arguments_of_models_are_known():
    """Those in the sources of the installed models; a new one needs a meaning, or a reason."""
    folder, known = Path(transformers.__file__).parent / "models", inspect.signature(attention).parameters
    unknown, calls = {}, 0
    for path in folder.glob("*/modeling_*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "attention_interface(" in text else ():
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "attention_interface":
                calls += 1
                assert len(node.args) <= 5, path
                for keyword in node.keywords:
                    if keyword.arg not in {None, *known, *IGNORED, *REFUSED}:
                        unknown.setdefault(keyword.arg, []).append(path.parent.name)
    assert calls > 100
    assert not unknown


def test_other_graphs_under_a_model():
    given, _ = inputs("mistral")
    with exact(), torch.no_grad():
        model, n = models("llama")[1], given["input_ids"].size(1)
        causal, full = gattn.CompleteGraph(n, causal=True), gattn.CompleteGraph(n)
        expected, asked = run(model, given, None)[1], []

        def ask(layer, real):
            asked.append((layer, real))
            return causal.edge_index

        for other in (causal, causal.edge_index, ask, gattn.CompleteGraph.packed([n] * 3, causal=True)):
            with graph(other):
                found = run(model, given, None, use_cache=False)[1]
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        assert asked == [(0, None), (1, None)]
        with graph(full):
            assert not torch.allclose(run(model, given, None, use_cache=False)[1], expected)
        with graph(full, layers=[]):
            assert run(model, given, None, use_cache=False)[1].equal(expected)
        with graph(full, layers=[1]):
            second = run(model, given, None, use_cache=False)[1]
        with graph(lambda layer, real: full if layer == 1 else causal):
            torch.testing.assert_close(run(model, given, None, use_cache=False)[1], second)
        with graph(causal), pytest.raises(ValueError, match="decoding with a cache"):
            model.generate(**given, max_new_tokens=3)


@pytest.mark.parametrize("form", ["list", "complete", "list of the batch", "packed", "packed otherwise"])
def test_swapped_graphs_are_calls_of_attend(form):
    """Text by text, without padding."""
    mask, real = made("bidirectional", padding="left")
    tensors = drawn()
    edges = torch.randint(N, (2, 40))
    other = {
        "list": edges,
        "complete": gattn.CompleteGraph(N, window=2),
        "list of the batch": gattn.SparseGraph(torch.cat([edges, edges + N], 1), 2 * N, 2 * N),
        "packed": gattn.CompleteGraph.packed([N, N], window=2),
        "packed otherwise": gattn.CompleteGraph.packed([4, N - 4, N], window=2),
    }[form]
    alone = edges if "list" in form else gattn.CompleteGraph(N, window=2).edge_index
    first = alone if form != "packed otherwise" else gattn.CompleteGraph.packed([4, N - 4], window=2).edge_index
    with graph(other):
        found = attention(Layer(), *tensors, mask)[0]
    for text, its in enumerate((first, alone)):
        kept = its[:, real[text][its[0]]]
        single = [x[text].transpose(0, 1) for x in tensors]
        single = [single[0], *(x.repeat_interleave(2, 1) for x in single[1:])]
        torch.testing.assert_close(found[text], gattn.attend(*single, gattn.SparseGraph(kept, N, N)))
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(found.sum(), tensors))


def test_graphs_that_cannot_be_meant():
    tensors, mask = drawn(), made("causal")[0]
    with pytest.raises(TypeError, match="must be a graph"), graph("window"):
        pass
    with graph(gattn.CompleteGraph(5)), pytest.raises(ValueError, match="12 tokens"):
        attention(Layer(), *tensors, mask)
    with graph(gattn.CompleteGraph(N)), pytest.raises(ValueError, match="record_attention"):
        attention(Layer(), *tensors, mask, output_attentions=True)
    with graph(gattn.CompleteGraph(N)), pytest.raises(ValueError, match="passes position_bias"):
        attention(Layer(), *tensors, mask, position_bias=torch.zeros(1, 4, N, N))


def test_models_with_attention_of_their_own():
    """They get the mask that they know, and a warning says that gattn does not run."""
    masks._warned.clear()
    config = transformers.BloomConfig(vocab_size=20, hidden_size=16, n_layer=1, n_head=2, attn_implementation="gattn")
    model, text = transformers.BloomModel(config).eval(), torch.randint(20, (2, 7))
    with torch.no_grad(), pytest.warns(UserWarning, match="bloom has attention of its own"):
        found = model(text).last_hidden_state
    model.set_attn_implementation("eager")
    with torch.no_grad():
        assert model(text).last_hidden_state.equal(found)


def test_record_attention():
    given, real = inputs("bert", "left")
    model = models("bert")[1]
    with torch.no_grad():
        with gattn.record_attention(model) as records:
            run(model, given, real)
        expected = run(model, given, real, output_attentions=True)[0].attentions
    assert len(records) == 2
    for (record,), weights in zip(records.values(), expected, strict=True):
        torch.testing.assert_close(record.weights, weights)


def test_cross_attention_keeps_its_graph():
    """A decoder's second attention has as many sources as targets here, and no text of its own."""
    given, _ = inputs("bart")
    with exact(), torch.no_grad():
        model = models("bart")[1]
        expected = run(model, given, None, use_cache=False)[1]
        asked = []
        with graph(lambda layer, real: asked.append(layer) or gattn.CompleteGraph(11, causal=len(asked) > 2)):
            found = run(model, given, None, use_cache=False)[1]
    assert len(asked) == 4, "two layers of the encoder and two of the decoder"
    torch.testing.assert_close(found, expected)


def test_without_transformers():
    program = "import sys; sys.modules['transformers'] = None; import gattn; import gattn.huggingface"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "gattn.huggingface needs transformers" in found.stderr
    program = "import sys, gattn; assert 'gattn.huggingface' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_types_of_half_precision():
    query, key, value = drawn(dtype=torch.float32)
    mask = made("causal", padding="right")[0]
    exactly = attention(Layer(), *[x.double() for x in (query, key, value)], mask)[0]
    half = [x.bfloat16() for x in (query, key, value)]
    found = attention(Layer(), *half, mask)[0]
    assert found.dtype == torch.bfloat16
    assert_as_exact_as(found, plainly(*half, mask.dense()) * (exactly != 0), exactly)


def test_t5_counts_the_tokens_before():
    """The bias of distances is the tensor of all pairs, with a cache, too."""
    layer = models("t5")[1].decoder.block[0].layer[0].SelfAttention
    positions.keep_distances("t5")
    compute = type(layer).compute_bias.__wrapped__
    query, key, value = (torch.randn(1, length, 4, 8).double() for length in (3, 8, 8))
    for past in (5, torch.tensor(5)):
        bias = positions.PositionBias(layer, compute, (3, 8), past)
        found, expected = (
            gattn.attend(query, key, value, gattn.CompleteGraph(3, 8, causal=True), bias=each)
            for each in (bias.bias(), bias.tensor())
        )
        torch.testing.assert_close(found, expected)


def test_t5_has_no_tensor_of_all_pairs(monkeypatch):
    """Its table is asked for one row of distances, in each layer; padding is not computed."""
    model, asked = models("t5")[1], []
    given, real = inputs("t5", "left")
    with torch.no_grad():
        expected = run(model, given, real)[1]
    buckets = type(model.encoder.block[0].layer[0].SelfAttention)._relative_position_bucket

    @staticmethod
    def counted(distances, **options):
        asked.append(distances.numel())
        return buckets(distances, **options)

    monkeypatch.setattr(type(model.encoder.block[0].layer[0].SelfAttention), "_relative_position_bucket", counted)
    with torch.no_grad():
        assert run(model, given, real)[1].equal(expected)
    assert asked == [2 * 11 - 1] * 4, "two layers of the encoder and two of the decoder"
    square = torch.ones(3, 1, 11, 11, dtype=torch.bool)
    with torch.no_grad(), exact():
        theirs, ours = (run(each, given | {"attention_mask": square}, real)[1] for each in models("t5"))
    torch.testing.assert_close(ours, theirs)
