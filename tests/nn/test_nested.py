"""Nested tensors: each sequence is what it is alone, in both layouts, with gradients; and PyTorch's layers on them."""

import pytest
import torch
from allpairspy import AllPairs
from torch import nn

from gattn import CompleteGraph, record_attention
from gattn.nn import (
    ALiBi,
    KeyValueCache,
    MultiheadAttention,
    RelativePositionBias,
    RotaryPositionalEncoding,
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

E, H = 8, 2
LENGTHS = {"different": (3, 1, 4), "one empty": (3, 0, 2), "all empty": (0, 0), "one": (3,)}
POSITIONS = {
    "none": lambda: None,
    "rotary": lambda: RotaryPositionalEncoding(E // H),
    "alibi": lambda: ALiBi(H),
    "relative": lambda: RelativePositionBias(H, 2),
}

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
each_layout = pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["strided", "jagged"])
each_mode = pytest.mark.parametrize("training", [False, True])


def make(layout, lengths, channels=E, dtype=torch.double):
    return torch.nested.nested_tensor(
        [torch.randn(length, channels, dtype=dtype) for length in lengths], layout=layout, requires_grad=True
    )


def parts_of(x):
    """The sequences as leaves of their own."""
    return [part.detach().clone().requires_grad_() for part in x.unbind()]


def weigh(parts):
    return sum((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape).cos()).sum() for x in parts)


def compare(module, function, *inputs):
    """Output and gradients on nested tensors are those on their sequences, one by one."""
    out = function(*inputs)
    assert out.is_nested
    assert out.layout == inputs[0].layout
    parameters = list(module.parameters())
    grads = torch.autograd.grad(weigh(out.unbind()), [*inputs, *parameters], materialize_grads=True, allow_unused=True)
    alone = [parts_of(x) for x in inputs]
    expected = [function(*sequences) for sequences in zip(*alone, strict=True)]
    leaves = [part for parts in alone for part in parts]
    expected_grads = torch.autograd.grad(
        weigh(expected), [*leaves, *parameters], materialize_grads=True, allow_unused=True
    )
    torch.testing.assert_close(list(out.unbind()), expected)
    flat = [part for grad in grads[: len(inputs)] for part in grad.unbind()] + list(grads[len(inputs) :])
    torch.testing.assert_close(flat, list(expected_grads))
    return out


@pytest.mark.parametrize(
    ("lengths", "position", "is_causal", "training", "layout"),
    list(AllPairs([list(LENGTHS), list(POSITIONS), [False, True], [False, True], [torch.strided, torch.jagged]])),
)
def test_self_attention(lengths, position, is_causal, training, layout):
    attention = MultiheadAttention(E, H, batch_first=True, position=POSITIONS[position]()).double().train(training)
    x = make(layout, LENGTHS[lengths])
    out = compare(attention, lambda x: attention(x, x, x, need_weights=False, is_causal=is_causal)[0], x)
    assert (out + x).is_nested  # PyTorch knows that their lengths are the same


@each_layout
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 1, "qk_norm": True}, {"kdim": 5, "vdim": 7}])
def test_cross_attention(options, is_causal, layout):
    attention = MultiheadAttention(E, H, batch_first=True, **options).double()
    query, key, value = (
        make(layout, (3, 0, 2, 1)),
        *(make(layout, (2, 4, 0, 1), channels) for channels in (attention.kdim, attention.vdim)),
    )
    compare(
        attention, lambda q, k, v: attention(q, k, v, need_weights=False, is_causal=is_causal)[0], query, key, value
    )
    # Rows alone may be of one layout and columns of the other.
    other = torch.strided if layout == torch.jagged else torch.jagged
    key = torch.nested.as_nested_tensor([part.detach() for part in key.unbind()], layout=other)
    assert attention(query, key, value)[0].layout == layout


@each_layout
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("cross", [False, True])
def test_weights_are_padded(cross, average, layout):
    attention = MultiheadAttention(E, H, batch_first=True).double()
    query = make(layout, (3, 0, 2))
    key = make(layout, (2, 4, 1)) if cross else query
    _, weights = attention(query, key, key, average_attn_weights=average)
    assert weights.shape == (3, *(() if average else (H,)), 3, 4 if cross else 3)
    total = 0.0
    for found, q, k in zip(weights, query.unbind(), key.unbind(), strict=True):
        _, expected = attention(q, k, k, average_attn_weights=average)
        torch.testing.assert_close(found[..., : len(q), : len(k)], expected)
        total += expected.sum()
    torch.testing.assert_close(weights.sum(), total)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("lengths", ["different", "one empty"])
def test_equals_pytorch(lengths, need_weights):
    theirs = nn.MultiheadAttention(E, H, batch_first=True).double().eval()
    ours = MultiheadAttention(E, H, batch_first=True).double().eval()
    ours.load_state_dict(theirs.state_dict())
    x = make(torch.strided, LENGTHS[lengths]).detach()
    with torch.no_grad():
        expected, actual = (layer(x, x, x, need_weights=need_weights) for layer in (theirs, ours))
    torch.testing.assert_close(list(actual[0].unbind()), list(expected[0].unbind()))
    torch.testing.assert_close(actual[1], expected[1])


@pytest.mark.parametrize(
    ("activation", "bias", "norm_first", "layout"),
    list(AllPairs([["relu", torch.tanh], [False, True], [False, True], [torch.strided, torch.jagged]])),
)
def test_transformer_layers(activation, bias, norm_first, layout):
    """Where PyTorch's norms and activations know no nested tensors, too."""
    options = {"dim_feedforward": 16, "dropout": 0.0, "activation": activation, "batch_first": True, "bias": bias}
    encoder = TransformerEncoderLayer(E, H, norm_first=norm_first, **options).double()
    decoder = TransformerDecoderLayer(E, H, norm_first=norm_first, **options).double()
    compare(encoder, lambda x: encoder(x, is_causal=True), make(layout, (3, 0, 2)))
    stack = TransformerEncoder(encoder, 2, nn.RMSNorm(E)).double()
    compare(stack, lambda x: stack(x), make(layout, (3, 0, 2)))
    compare(
        decoder,
        lambda x, memory: decoder(x, memory, tgt_is_causal=True),
        make(layout, (3, 0, 2)),
        make(layout, (1, 4, 0)),
    )
    decoders = TransformerDecoder(decoder, 2, nn.LayerNorm(E, bias=False)).double()
    compare(decoders, lambda x, memory: decoders(x, memory), make(layout, (3, 0, 2)), make(layout, (1, 4, 0)))
    model = Transformer(E, H, 1, 1, norm_first=norm_first, **options).double()
    compare(
        model,
        lambda target, source: model(source, target, tgt_is_causal=True),
        make(layout, (3, 0, 2)),
        make(layout, (1, 4, 2)),
    )


@pytest.mark.parametrize("is_causal", [None, True])
def test_a_causal_mask_beside_nested_tensors(is_causal):
    encoder = TransformerEncoder(TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True), 1).double()
    x = make(torch.jagged, (3, 3))
    mask = nn.Transformer.generate_square_subsequent_mask(3)
    torch.testing.assert_close(
        encoder(x, mask, is_causal=is_causal).values(), encoder(x, is_causal=True).values(), rtol=0, atol=0
    )


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("container", [False, True])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
def test_our_attention_inside_pytorchs_layer(container, training):
    """PyTorch's layer would run its own kernel instead, and its encoder hands it nested tensors."""
    theirs = nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True).double()
    mixed = nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True).double()
    mixed.load_state_dict(theirs.state_dict())
    mixed.self_attn = MultiheadAttention(E, H, batch_first=True).double()
    mixed.self_attn.load_state_dict(theirs.self_attn.state_dict())
    assert mixed.self_attn._qkv_same_embed_dim
    x, padding = torch.randn(3, 5, E, dtype=torch.double), torch.arange(5) >= torch.tensor([[5], [2], [3]])
    if container:
        theirs, mixed = (nn.TransformerEncoder(layer, 1) for layer in (theirs, mixed))
    theirs.train(training)
    mixed.train(training)
    with torch.no_grad():
        with record_attention(mixed) as records:
            actual = mixed(x, src_key_padding_mask=padding)
        expected = theirs(x, src_key_padding_mask=padding)
    assert len(records) == 1
    torch.testing.assert_close(actual[~padding], expected[~padding])


def test_what_tools_ask_of_pytorchs_layer():
    assert MultiheadAttention(E, H)._qkv_same_embed_dim
    assert not MultiheadAttention(E, H, kdim=3)._qkv_same_embed_dim
    assert not MultiheadAttention(E, H, vdim=3)._qkv_same_embed_dim


def test_jagged_tensors_with_holes():
    dense = torch.randn(3, 6, E, dtype=torch.double, requires_grad=True)
    x = torch.nested.narrow(dense, 1, torch.tensor([0, 1, 2]), torch.tensor([3, 0, 1]), layout=torch.jagged)
    assert x.lengths() is not None
    attention = MultiheadAttention(E, H, batch_first=True).double()
    out, _ = attention(x, x, x)
    assert out.shape == x.shape
    for actual, part in zip(out.unbind(), x.unbind(), strict=True):
        torch.testing.assert_close(actual, attention(part, part, part)[0])


@pytest.mark.parametrize("average", [False, True])
def test_no_sequences(average):
    x = torch.nested.nested_tensor_from_jagged(torch.empty(0, E, dtype=torch.double), torch.tensor([0]))
    out, weights = MultiheadAttention(E, H, batch_first=True).double()(x, x, x, average_attn_weights=average)
    assert out.shape == x.shape
    assert weights.shape == ((0, 0, 0) if average else (0, H, 0, 0))
    assert TransformerEncoderLayer(E, H, 16, batch_first=True).double()(x).shape == x.shape


@each_layout
def test_a_packed_graph_with_the_same_lengths(layout):
    attention = MultiheadAttention(E, H, batch_first=True).double()
    x = make(layout, (5, 2))
    out, _ = attention(x, x, x, graph=CompleteGraph.packed([5, 2], window=(1, 0)))
    for actual, part in zip(out.unbind(), x.unbind(), strict=True):
        graph = CompleteGraph(len(part), window=(1, 0))
        torch.testing.assert_close(actual, attention(part, part, part, graph=graph)[0])


@each_layout
def test_half_precision_and_autocast(layout):
    attention = MultiheadAttention(E, H, batch_first=True)
    x = make(layout, (3, 2), dtype=torch.float)
    exact = attention(x, x, x)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(x, x, x)[0]
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close([part.float() for part in out.unbind()], list(exact.unbind()), rtol=0.1, atol=0.05)


def nested(*lengths, channels=E):
    return make(torch.strided, lengths, channels)


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (lambda x: (x, x, x), {"key_padding_mask": torch.zeros(2, 3, dtype=torch.bool)}, "leave out key_padding_mask"),
        (
            lambda x: (x, x, x),
            {"attn_mask": torch.zeros(3, 3, dtype=torch.bool)},
            "leave out key_padding_mask and attn",
        ),
        (
            lambda x: (x, nested(2, 2), nested(2, 2)),
            {"attn_mask": torch.zeros(3, 3, dtype=torch.bool), "is_causal": True},
            "leave out key_padding_mask and attn",
        ),
        (
            lambda x: (x, x, x),
            {"cache": KeyValueCache()},
            "a cache cannot hold nested tensors, only batches of one length",
        ),
        (lambda x: (x, x, x), {"graph": CompleteGraph(3)}, r"leave out graph.*got CompleteGraph\(3, 3\)"),
        (lambda x: (x, x, x), {"graph": CompleteGraph.packed([2, 3])}, "leave out graph"),
        (lambda x: (x, x, x), {"graph": torch.tensor([[0], [1]])}, "leave out graph"),
        (
            lambda x: (x, torch.randn(2, 3, E), torch.randn(2, 3, E)),
            {},
            "all be nested or none of them; got Tensor as key",
        ),
        (lambda x: (torch.randn(2, 3, E), x, x), {}, "got Tensor as query"),
        (lambda x: (x, x, None), {}, "got NoneType as value"),
        (lambda x: (x, nested(3, 2, 1), nested(3, 2, 1)), {}, "same batch size; got 2 and 3 sequences"),
        (lambda x: (x, x, nested(2, 3)), {}, r"each key must have one value.*\[3, 2\] and \[2, 3\]"),
        (lambda x: (x, x, nested(3, 2, channels=5)), {}, "value has 5 channels"),
        (lambda x: [torch.nested.nested_tensor([torch.randn(3), torch.randn(2)])] * 3, {}, "one of 2 dimensions"),
        (lambda x: [torch.nested.nested_tensor([torch.randn(3, E), torch.randn(2, 5)])] * 3, {}, "must be .B, T, E."),
        (lambda x: [make(torch.jagged, (3, 2)).transpose(1, 2)] * 3, {}, "must be .B, T, E."),
    ],
)
def test_what_contradicts(inputs, options, message):
    attention = MultiheadAttention(E, H, batch_first=True).double()
    with pytest.raises(ValueError, match=message):
        attention(*inputs(nested(3, 2)), **options)


def test_layers_refuse_the_same():
    x = nested(3, 2)
    encoder = TransformerEncoderLayer(E, H, 16, batch_first=True).double()
    decoder = TransformerDecoderLayer(E, H, 16, batch_first=True).double()
    padding = torch.zeros(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="leave out key_padding_mask"):
        encoder(x, src_key_padding_mask=padding)
    with pytest.raises(ValueError, match="leave out key_padding_mask"):
        decoder(x, x, memory_key_padding_mask=padding)
    with pytest.raises(ValueError, match="all be nested or none of them"):
        decoder(x, torch.randn(2, 3, E, dtype=torch.double))
    with pytest.raises(ValueError, match="batch_first=True"):
        TransformerEncoderLayer(E, H, 16).double()(x)
    with pytest.raises(ValueError, match="batch_first=True"):
        Transformer(E, H, 1, 1, 16).double()(x, x)
