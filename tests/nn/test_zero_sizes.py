"""Zero is a size: options of layers on batches, sequences and sets with nothing in them, against the reference."""

import pytest
import torch

import gattn
from gattn import CompleteGraph
from gattn.nn import (
    AdditiveAttention,
    ALiBi,
    AttentionPooling,
    DotProductAttention,
    GeneralAttention,
    HardAttention,
    KeyValueCache,
    LocalAttention,
    MultiheadAttention,
    RelativePositionBias,
    RotaryPositionalEncoding,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from tests.cases import pairs

E, H = 4, 2
BATCHES = (2, None, 0)
SIZES = ((3, 4), (0, 4), (3, 0), (0, 0))  # targets, sources


def randn(*shape):
    return torch.randn(shape, dtype=torch.double, requires_grad=True)


def nothing(*shape):
    return torch.zeros(shape, dtype=torch.bool)


def check(function, module, *inputs):
    """Outputs and all gradients equal the reference's."""
    results = []
    for backend in ("auto", "reference"):
        with gattn.backend(backend):
            torch.manual_seed(0)
            out = function()
        outs = [x for x in (out if isinstance(out, tuple) else (out,)) if x is not None]
        outs = [x for part in outs for x in (part if isinstance(part, list) else [part])]
        leaves = [*inputs, *module.parameters()]
        asked = [x.square().sum() for x in outs if x.requires_grad]
        grads = torch.autograd.grad(sum(asked), leaves, materialize_grads=True, allow_unused=True) if asked else []
        results.append([*(x.detach() for x in outs), *grads])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)
    return results[0]


@pytest.mark.parametrize("num_elements", [0, 3])
@pytest.mark.parametrize("front", [(), (0,), (2,), (0, 2), (2, 0)])
def test_pooling(front, num_elements):
    pool, x = AttentionPooling(E).double(), randn(*front, num_elements, E)
    sets = {
        "one": {},
        "two": {"index": torch.zeros(num_elements, dtype=torch.long), "dim_size": 2},
        "ptr": {"ptr": torch.tensor([0, 0, num_elements])},
    }
    if front:
        sets["no lengths"] = {"lengths": torch.zeros(front, dtype=torch.long)}
        sets["full lengths"] = {"lengths": torch.full(front, num_elements)}
    if not num_elements:
        sets["none"] = {"ptr": torch.tensor([0])}
    for name, options in sets.items():
        out, weights, *_ = check(lambda options=options: pool(x, return_weights=True, **options), pool, x)
        assert weights.shape == (*front, num_elements), name
        torch.testing.assert_close(out, pool(x, **options))
        if not num_elements:
            assert (out == 0).all()


SCORED = [DotProductAttention(), GeneralAttention(E, E), AdditiveAttention(E, E)]
MEMORIES = {
    **{type(score).__name__: score for score in SCORED},
    "local": LocalAttention(SCORED[1], 1.5),
    "predictive": LocalAttention(SCORED[1], 1.5, "predictive", E),
    "hard": HardAttention(SCORED[1]),
    "straight-through": HardAttention(SCORED[1], "straight_through"),
}


@pytest.mark.parametrize(("name", "sizes", "batch"), pairs(MEMORIES, SIZES, BATCHES))
def test_memories(name, sizes, batch):
    num_targets, num_sources = sizes
    attention = MEMORIES[name].double()
    front = () if batch is None else (batch,)
    query, memory = randn(*front, num_targets, E), randn(*front, num_sources, E)
    every_length = [None] if batch is None else [None, torch.zeros(front, dtype=torch.long), torch.full(front, 1)]
    for lengths in every_length:
        if lengths is not None and lengths.sum() > 0 and num_sources == 0:
            continue
        out, weights, *_ = check(
            lambda lengths=lengths: attention(query, memory, lengths, return_weights=True), attention, query, memory
        )
        assert (out.shape, weights.shape) == ((*front, num_targets, E), (*front, num_targets, num_sources))
        if num_sources == 0 or (lengths is not None and lengths.sum() == 0):
            assert (out == 0).all()


LAYERS = {
    "plain": {},
    "grouped": {"num_kv_heads": 1},
    "normalised": {"qk_norm": True},
    "alibi": {"position": ALiBi(H)},
    "relative": {"position": RelativePositionBias(H, 2)},
    "rotary": {"position": RotaryPositionalEncoding(E // H)},
    "learnt key": {"add_bias_kv": True},
    "zero key": {"add_zero_attn": True},
    "own channels": {"kdim": 3, "vdim": 5},
}


def masks(batch, num_targets, num_sources):
    front = () if batch is None else (batch,)
    pairs = (num_targets, num_sources)
    yield {}
    yield {"is_causal": True}
    yield {"attn_mask": torch.rand(pairs) < 0.5}
    yield {"attn_mask": torch.randn((1 if batch is None else batch) * H, *pairs, dtype=torch.double)}
    yield {"key_padding_mask": nothing(*front, num_sources)}
    yield {"key_padding_mask": ~nothing(*front, num_sources)}
    yield {"key_padding_mask": torch.randn(*front, num_sources, dtype=torch.double)}


def graphs(batch, num_targets, num_sources):
    yield torch.empty(2, 0, dtype=torch.long)
    yield CompleteGraph(num_targets, num_sources, window=1)
    yield CompleteGraph.packed([num_targets, 0], [0, num_sources])
    if num_targets == num_sources == 0:
        yield CompleteGraph.packed([])
    if batch is not None:
        none = torch.zeros(batch, dtype=torch.long)
        yield CompleteGraph(num_targets, num_sources, source_lengths=none, target_lengths=none)


@pytest.mark.parametrize(("name", "sizes", "batch", "batch_first"), pairs(LAYERS, SIZES, BATCHES, (False, True)))
def test_multihead_attention(name, sizes, batch, batch_first):
    num_targets, num_sources = sizes
    attention = MultiheadAttention(E, H, batch_first=batch_first, **LAYERS[name]).double()

    def inputs(count, channels):
        if batch is None:
            return randn(count, channels)
        return randn(batch, count, channels) if batch_first else randn(count, batch, channels)

    tensors = [
        inputs(count, channels)
        for count, channels in zip(
            (num_targets, num_sources, num_sources), (E, attention.kdim, attention.vdim), strict=True
        )
    ]
    calls = list(masks(batch, num_targets, num_sources))
    if not name.endswith(" key"):
        calls += [{"graph": graph} for graph in graphs(batch, num_targets, num_sources)]
        packed = CompleteGraph.packed([num_targets, 0], [0, num_sources])
        calls.append({"graph": packed, "attn_mask": torch.rand(num_targets, num_sources) < 0.5})
    for options in calls:
        out, *_ = check(lambda options=options: attention(*tensors, **options), attention, *tensors)
        torch.testing.assert_close(attention(*tensors, need_weights=False, **options)[0], out)


@pytest.mark.parametrize(("sizes", "batch", "norm_first"), pairs(SIZES, BATCHES, (False, True)))
def test_transformer_layers(sizes, batch, norm_first):
    num_targets, num_sources = sizes
    front = () if batch is None else (batch,)
    options = {"dim_feedforward": 8, "dropout": 0.0, "batch_first": True, "norm_first": norm_first}
    encoder = TransformerEncoderLayer(E, H, **options).double()
    decoder = TransformerDecoderLayer(E, H, **options).double()
    x, memory = randn(*front, num_targets, E), randn(*front, num_sources, E)
    padding, memory_padding = ~nothing(*front, num_targets), ~nothing(*front, num_sources)
    for given in ({}, {"is_causal": True}, {"src_key_padding_mask": padding}):
        out, *_ = check(lambda given=given: encoder(x, **given), encoder, x)
        assert out.shape == x.shape
        stack = TransformerEncoder(encoder, 2)
        check(lambda given=given, stack=stack: stack(x, **given), stack, x)
    for given in (
        {},
        {"tgt_is_causal": True, "memory_is_causal": True},
        {"tgt_key_padding_mask": padding, "memory_key_padding_mask": memory_padding},
        {"memory_mask": torch.rand(num_targets, num_sources) < 0.5},
    ):
        out, *_ = check(lambda given=given: decoder(x, memory, **given), decoder, x, memory)
        assert out.shape == x.shape
        stack = TransformerDecoder(decoder, 2)
        check(lambda given=given, stack=stack: stack(x, memory, **given), stack, x, memory)


@pytest.mark.parametrize("batch", [None, 0, 2])
@pytest.mark.parametrize("batch_first", [False, True])
def test_cache(batch_first, batch):
    attention, cache = MultiheadAttention(E, H, batch_first=batch_first).double(), KeyValueCache()
    for count in (2, 0, 1):
        x = randn(count, E) if batch is None else randn(*((batch, count) if batch_first else (count, batch)), E)
        assert attention(x, x, x, is_causal=True, cache=cache)[0].shape == x.shape
    assert len(cache) == 3
    if batch is not None:
        cache.reorder(torch.empty(0, dtype=torch.long))
        assert len(cache) == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: gattn.nn.ResGatedGraphConv(3, 0),
        lambda: gattn.nn.PointTransformerConv(3, 0),
        lambda: gattn.nn.GatedGCNConv(3, 2, -1),
        lambda: gattn.nn.GATConv(3, 0),
        lambda: gattn.nn.EGATConv(3, 2, 0, 4, 2),
    ],
)
def test_layers_without_channels_are_refused(make):
    with pytest.raises(ValueError, match="out_channels must be at least 1; got"):
        make()


@pytest.mark.parametrize("sizes", [(3, 0, 4), (0, 2, 4), (3, 2, 0)])  # nodes, heads, channels
@pytest.mark.parametrize("batch", [(), (2,), (0,)])
@pytest.mark.parametrize("options", [{}, {"dropout": 0.5}, {"return_weights": True}])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attend(sizes, batch, options, is_causal):
    x = randn(*batch, *sizes)
    graph = CompleteGraph(sizes[0], causal=is_causal)
    for bias in (None, randn(sizes[0], sizes[0])):
        out, *_ = check(lambda bias=bias: gattn.attend(x, x, x, graph, bias=bias, **options), torch.nn.Module(), x)
        assert out.shape == x.shape
