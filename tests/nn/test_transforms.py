"""What people do to layers: copy, save, export, and call with other parameters; and windows beside everything else."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import gattn
from gattn import CompleteGraph
from gattn.nn import (
    AdditiveAttention,
    ALiBi,
    AttentionPooling,
    KeyValueCache,
    LocalAttention,
    MultiheadAttention,
    RelativePositionBias,
    RotaryPositionalEncoding,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

E, H, B, T = 8, 2, 2, 5
LAYERS = {
    "attention": lambda: MultiheadAttention(E, H, batch_first=True, position=RelativePositionBias(H, 2), qk_norm=True),
    "learnt keys": lambda: MultiheadAttention(E, H, batch_first=True, add_bias_kv=True, add_zero_attn=True),
    "encoder": lambda: TransformerEncoder(TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True), 2),
    "decoder": lambda: TransformerDecoderLayer(E, H, 16, dropout=0.0, batch_first=True),
    "pooling": lambda: AttentionPooling(E),
    "memory": lambda: LocalAttention(AdditiveAttention(E, E), 2.0, "predictive", E),
}

each_layer = pytest.mark.parametrize("name", LAYERS)


class Call(nn.Module):
    """A layer on one tensor, whatever it is called with."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        if isinstance(self.layer, MultiheadAttention):
            return self.layer(x, x, x)[0]
        return self.layer(x, x) if isinstance(self.layer, (LocalAttention, TransformerDecoderLayer)) else self.layer(x)


@pytest.fixture
def x():
    return torch.randn(B, T, E, dtype=torch.double)


@each_layer
def test_copies(name, x):
    module = Call(LAYERS[name]()).double()
    expected, buffer = module(x), io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(buffer, weights_only=False)):
        torch.testing.assert_close(other(x), expected)


@each_layer
def test_functional_call(name, x):
    module = Call(LAYERS[name]()).double()
    parameters = {key: parameter.detach() * 1.1 for key, parameter in module.named_parameters()}
    changed = copy.deepcopy(module)
    changed.load_state_dict(parameters, strict=False)
    torch.testing.assert_close(torch.func.functional_call(module, parameters, x), changed(x))
    grads = torch.func.grad(lambda given: torch.func.functional_call(module, given, x).square().sum())(parameters)
    expected = torch.autograd.grad(changed(x).square().sum(), list(changed.parameters()))
    torch.testing.assert_close(list(grads.values()), list(expected))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of PyTorch's tracing
@each_layer
def test_export(name, x):
    module = Call(LAYERS[name]()).double().eval()
    torch.testing.assert_close(torch.export.export(module, (x,)).module()(x), module(x))


POSITIONS = {
    "none": lambda: None,
    "rotary": lambda: RotaryPositionalEncoding(E // H),
    "alibi": lambda: ALiBi(H),
    "relative": lambda: RelativePositionBias(H, 3),
}
WINDOWS = [{"window": (2, 1)}, {"window": (3, 0), "causal": True}, {"causal": True}]


def masks(num_targets, num_sources):
    yield {}
    yield {"key_padding_mask": torch.arange(num_sources) >= torch.tensor([[num_sources], [num_sources - 3]])}
    yield {"key_padding_mask": torch.rand(B, num_sources) < 0.2}
    yield {"attn_mask": torch.rand(num_targets, num_sources) < 0.2}
    yield {"attn_mask": torch.randn(B * H, num_targets, num_sources, dtype=torch.double)}


@pytest.mark.parametrize("sizes", [(6, 6), (6, 9), (9, 6), (100, 100), (80, 110)])
@pytest.mark.parametrize("options", WINDOWS)
@pytest.mark.parametrize("position", POSITIONS)
def test_windows_beside_positions_and_masks(position, options, sizes):
    """As a float mask of the window, by the reference: bands, crops and length masks included."""
    attention = MultiheadAttention(E, H, batch_first=True, position=POSITIONS[position]()).double()
    num_targets, num_sources = sizes
    query, memory = (torch.randn(B, count, E, dtype=torch.double) for count in sizes)
    graph = CompleteGraph(*sizes, **options)
    hidden = ~graph.visible(*sizes, num_sources - num_targets)
    for given in masks(*sizes):
        actual, _ = attention(query, memory, memory, graph=graph, need_weights=False, **given)
        terms = dict(given)
        mask = terms.pop("attn_mask", torch.zeros(sizes, dtype=torch.double))
        if mask.dtype == torch.bool:
            mask = torch.zeros(sizes, dtype=torch.double).masked_fill(mask, -torch.inf)
        with gattn.backend("reference"):
            expected, _ = attention(query, memory, memory, attn_mask=mask.masked_fill(hidden, -torch.inf), **terms)
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("window", [None, (2, 0)])
@pytest.mark.parametrize("padding", [None, "bool", "float"])
@pytest.mark.parametrize("position", POSITIONS)
def test_cached_steps_beside_windows_and_padding(position, padding, window, batch_first):
    attention = MultiheadAttention(E, H, batch_first=batch_first, position=POSITIONS[position]()).double()
    x, length = torch.randn(7, B, E, dtype=torch.double), 7
    mask = None if padding is None else torch.randn(B, length, dtype=torch.double)
    mask = mask > 0.5 if padding == "bool" else mask

    def attend(x, total, cache=None):
        given = x.transpose(0, 1) if batch_first else x
        graph = CompleteGraph(len(x), total, causal=True, window=window)
        out, _ = attention(given, given, given, None if mask is None else mask[:, :total], graph=graph, cache=cache)
        return out.transpose(0, 1) if batch_first else out

    cache, steps, first = KeyValueCache(), [], 0
    for count in (3, 1, 2, 1):
        steps.append(attend(x[first : first + count], first + count, cache))
        first += count
    torch.testing.assert_close(torch.cat(steps), attend(x, length))
