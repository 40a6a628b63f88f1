"""Whoever catches what PyTorch's layers raise catches ours: the same wrong input to both, and their errors' types."""

import warnings

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

import gattn
from gattn.errors import InputError

E, H, B, N, M = 8, 2, 3, 4, 5


def randn(*shape):
    return torch.randn(shape)


def integers(*shape):
    return torch.zeros(shape, dtype=torch.long)


def attend(*inputs, need_weights=True, layer=None, **options):
    layer = {"embed_dim": E, "num_heads": H, "batch_first": True} | (layer or {})
    return lambda module: module.MultiheadAttention(**layer)(*inputs, need_weights=need_weights, **options)


def self_attend(x, **options):
    return attend(x, x, x, **options)


X, Y = randn(B, N, E), randn(B, M, E)
MASK, PADDING = torch.zeros(N, N, dtype=torch.bool), torch.zeros(B, N, dtype=torch.bool)

#: Everything is called with `torch.nn` and with `gattn.nn`.
CASES = {
    "heads do not divide": lambda module: module.MultiheadAttention(10, 4),
    "no heads": lambda module: module.MultiheadAttention(8, 0),
    "no channels": lambda module: module.MultiheadAttention(0, 1),
    "negative heads": lambda module: module.MultiheadAttention(8, -2),
    "one dimension": self_attend(randn(E)),
    "four dimensions": self_attend(X.unsqueeze(0)),
    "key without batch": attend(X, Y[0], Y[0]),
    "value without batch": attend(X, Y, Y[0]),
    "query without batch": attend(X[0], Y, Y),
    "query has other channels": attend(X[..., :-1], Y, Y),
    "key has other channels": attend(X, Y[..., :-1], Y),
    "value has other channels": attend(X, Y, Y[..., :-1]),
    "key and value have other channels": attend(X, Y[..., :-1], Y[..., :-1]),
    "other channels": self_attend(X[..., :-1]),
    "other channels than kdim": attend(X, Y, randn(B, M, 3), layer={"kdim": 5, "vdim": 3}),
    "other channels than vdim": attend(X, randn(B, M, 5), Y, layer={"kdim": 5, "vdim": 3}),
    "fewer values than keys": attend(X, Y, Y[:, :-1]),
    "fewer values than keys, own channels": attend(X, randn(B, M, 5), randn(B, N, 3), layer={"kdim": 5, "vdim": 3}),
    "other batch": attend(X, Y[:2], Y[:2]),
    "other batch second": attend(X, Y, Y, layer={"batch_first": False}),
    "query of integers": self_attend(integers(B, N, E)),
    "query of another type": self_attend(X.double()),
    "key of another type": attend(X, Y.double(), Y),
    "attn_mask for other targets": self_attend(X, attn_mask=MASK[:-1]),
    "attn_mask for other sources": self_attend(X, attn_mask=MASK[:, :-1]),
    "attn_mask of one dimension": self_attend(X, attn_mask=MASK[0]),
    "attn_mask of four dimensions": self_attend(X, attn_mask=MASK.expand(B, H, N, N)),
    "attn_mask for other heads": self_attend(X, attn_mask=MASK.expand(B, N, N)),
    "attn_mask for other heads, no batch": self_attend(X[0], attn_mask=MASK.expand(B, N, N)),
    "attn_mask of integers": self_attend(X, attn_mask=integers(N, N)),
    "attn_mask no tensor": self_attend(X, attn_mask=MASK.tolist()),
    "attn_mask for others, without weights": self_attend(X, attn_mask=MASK[:-1], need_weights=False),
    "key_padding_mask for other sources": self_attend(X, key_padding_mask=PADDING[:, :-1]),
    "key_padding_mask for another batch": self_attend(X, key_padding_mask=PADDING[:-1]),
    "key_padding_mask the other way round": self_attend(X, key_padding_mask=PADDING.t()),
    "key_padding_mask of one dimension": self_attend(X, key_padding_mask=PADDING[0]),
    "key_padding_mask of two dimensions, no batch": self_attend(X[0], key_padding_mask=PADDING),
    "key_padding_mask of three dimensions": self_attend(X, key_padding_mask=PADDING.unsqueeze(0)),
    "key_padding_mask of integers": self_attend(X, key_padding_mask=integers(B, N)),
    "key_padding_mask no tensor": self_attend(X, key_padding_mask=PADDING.tolist()),
    "dropout above 1": lambda module: module.MultiheadAttention(E, H, dropout=1.5)(X, X, X),
    "layer's dropout above 1": lambda module: module.TransformerEncoderLayer(E, H, dropout=1.5),
    "layer's dropout below 0": lambda module: module.TransformerDecoderLayer(E, H, dropout=-0.5),
    "layer's heads do not divide": lambda module: module.TransformerEncoderLayer(10, 4),
    "activation": lambda module: module.TransformerEncoderLayer(E, H, activation="tanh"),
    "decoder's activation": lambda module: module.TransformerDecoderLayer(E, H, activation="tanh"),
    "activation of the model": lambda module: module.Transformer(E, H, activation="tanh"),
    "layer's other channels": lambda module: module.TransformerEncoderLayer(E, H, 16)(X[..., :-1]),
    "layer's other channels, pre-norm": lambda module: module.TransformerEncoderLayer(E, H, 16, norm_first=True)(
        X[..., :-1]
    ),
    "layer's mask": lambda module: module.TransformerEncoderLayer(E, H, 16, batch_first=True)(X, MASK[:-1]),
    "layer's mask of integers": lambda module: module.TransformerEncoderLayer(E, H, 16, batch_first=True)(
        X, integers(N, N)
    ),
    "layer's padding": lambda module: module.TransformerEncoderLayer(E, H, 16, batch_first=True)(
        X, src_key_padding_mask=PADDING[:-1]
    ),
    "layer's four dimensions": lambda module: module.TransformerEncoderLayer(E, H, 16)(X.unsqueeze(0)),
    "decoder's memory of another batch": lambda module: module.TransformerDecoderLayer(E, H, 16, batch_first=True)(
        X, Y[:2]
    ),
    "decoder's memory of other channels": lambda module: module.TransformerDecoderLayer(E, H, 16)(X, X[..., :-1]),
    "decoder's memory_mask": lambda module: module.TransformerDecoderLayer(E, H, 16, batch_first=True)(
        X, Y, memory_mask=MASK
    ),
    "encoder's mask": lambda module: module.TransformerEncoder(
        module.TransformerEncoderLayer(E, H, 16, batch_first=True), 2
    )(X, MASK[:-1]),
    "encoder's padding of integers": lambda module: module.TransformerEncoder(
        module.TransformerEncoderLayer(E, H, 16, batch_first=True), 2
    )(X, src_key_padding_mask=integers(B, N)),
    "model's other batch": lambda module: module.Transformer(E, H, 1, 1, 16, batch_first=True)(X, Y[:2]),
    "model's other channels": lambda module: module.Transformer(E, H, 1, 1, 16)(X[..., :-1], X[..., :-1]),
    "model's target channels": lambda module: module.Transformer(E, H, 1, 1, 16)(X, X[..., :-1]),
    "model's heads": lambda module: module.Transformer(10, 4, 1, 1, 16),
}


def error(case, module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            case(module)
        except Exception as caught:
            return caught
    return None


@pytest.mark.parametrize("name", CASES)
def test_what_catches_theirs_catches_ours(name):
    theirs, ours = (error(CASES[name], module) for module in (nn, gattn.nn))
    assert theirs is not None
    assert isinstance(ours, type(theirs))
    assert type(ours) is InputError or type(ours) is type(theirs)


def test_it_is_still_a_value_error():
    with pytest.raises(ValueError, match="must be a multiple of num_heads") as caught:
        gattn.nn.MultiheadAttention(10, 4)
    assert type(caught.value) is InputError


def convolve(edge_index, edge_attr=None, **options):
    x = randn(N, E)
    return lambda layer: layer(E, E, **options)(x, edge_index, edge_attr)


EDGES = torch.tensor([[0, 1, 2], [1, 2, 3]])
GRAPHS = {
    "three rows": convolve(integers(3, 4)),
    "transposed": convolve(EDGES.t().contiguous()),
    "one row": convolve(EDGES[0]),
    "list": convolve(EDGES.tolist()),
    "array": convolve(EDGES.numpy()),
    "nothing": convolve(None),
    "floats": convolve(EDGES.float()),
}


@pytest.mark.parametrize("layer", ["GATConv", "GATv2Conv", "TransformerConv"])
@pytest.mark.parametrize("name", GRAPHS)
def test_what_catches_pygs_catches_ours(name, layer):
    theirs, ours = (error(GRAPHS[name], getattr(module, layer)) for module in (pyg, gattn.nn))
    assert theirs is not None or layer == "TransformerConv"  # which takes what broadcasts
    assert isinstance(ours, type(theirs) if theirs is not None else ValueError)


X, INDEX = torch.randn(4, 6), torch.tensor([[0, 1, 2], [1, 2, 3]])
INPUTS = {
    "no heads": lambda layer: layer(6, 3, heads=0),
    "no channels": lambda layer: layer(6, 0)(X, INDEX),
    "narrow features": lambda layer: layer(6, 3)(X[:, :5], INDEX),
    "narrow targets": lambda layer: layer((6, 5), 3)((X, X[:, :4]), INDEX),
    "integers": lambda layer: layer(6, 3)(X.long(), INDEX),
    "narrow edge features": lambda layer: layer(6, 3, edge_dim=2)(X, INDEX, torch.randn(3, 4)),
    "edge features that were not asked for": lambda layer: layer(6, 3)(X, INDEX, torch.randn(3, 2)),
    "no edge features": lambda layer: layer(6, 3, edge_dim=2)(X, INDEX),
    "three inputs": lambda layer: layer(6, 3)((X, X, X), INDEX),
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("layer", ["GATConv", "GATv2Conv", "TransformerConv"])
def test_what_catches_pygs_errors_of_features_catches_ours(name, layer):
    theirs, ours = (error(INPUTS[name], getattr(module, layer)) for module in (pyg, gattn.nn))
    assert isinstance(ours, ValueError)
    assert theirs is None or isinstance(ours, type(theirs))


TYPES = (["a"], [("a", "to", "a")])
SEQUENCE, PREFIX = torch.randn(2, 4, 6), torch.randn(2, 5, 6)

#: Layers, each with a call that multiplies the features by a weight, and the name that the features have there.
MIXED = {
    "GATConv": (lambda: gattn.nn.GATConv(6, 3), lambda layer, x: layer(x, INDEX), "x"),
    "GATConv, lazy": (lambda: gattn.nn.GATConv(-1, 3), lambda layer, x: layer(x, INDEX), "x"),
    "GATConv, pair": (lambda: gattn.nn.GATConv((6, 6), 3), lambda layer, x: layer((X, x), INDEX), r"x\[1\]"),
    "GATConv, sparse": (lambda: gattn.nn.GATConv(6, 3), lambda layer, x: layer(x.to_sparse_csr(), INDEX), "x"),
    "TransformerConv": (lambda: gattn.nn.TransformerConv(6, 3), lambda layer, x: layer(x, INDEX), "x"),
    "FAConv": (lambda: gattn.nn.FAConv(6), lambda layer, x: layer(x, x, INDEX), "x"),
    "DNAConv": (lambda: gattn.nn.DNAConv(6), lambda layer, x: layer(x.expand(3, 4, 6).transpose(0, 1), INDEX), "x"),
    "HANConv": (
        lambda: gattn.nn.HANConv(6, 3, TYPES),
        lambda layer, x: layer({"a": x}, {TYPES[1][0]: INDEX}),
        r"x_dict\['a'\]",
    ),
    "HGTConv": (
        lambda: gattn.nn.HGTConv(-1, 4, TYPES, heads=2),
        lambda layer, x: layer({"a": x}, {TYPES[1][0]: INDEX}),
        r"x_dict\['a'\]",
    ),
    "MultiheadAttention": (lambda: gattn.nn.MultiheadAttention(6, 2), lambda layer, x: layer(x, x, x), "query"),
    "MultiheadAttention, keys": (
        lambda: gattn.nn.MultiheadAttention(6, 2, kdim=6, vdim=5),
        lambda layer, x: layer(x, X, X[:, :5]),
        "query",
    ),
    "MultiheadAttention, values": (
        lambda: gattn.nn.MultiheadAttention(6, 2),
        lambda layer, x: layer(X, X, x),
        "value",
    ),
    "TransformerConv, edges": (
        lambda: gattn.nn.TransformerConv(6, 3, edge_dim=6),
        lambda layer, x: layer(X, INDEX, x[:3]),
        "edge_attr",
    ),
    "EGATConv": (lambda: gattn.nn.EGATConv(6, 6, 3, 2, 1), lambda layer, x: layer(X, INDEX, x[:3]), "edge_attr"),
    "PathEncoder": (
        lambda: gattn.nn.PathEncoder(1, 6),
        lambda layer, x: layer(torch.zeros(2, 1, dtype=torch.int64), x),
        "edge_attr",
    ),
    "GATEConv": (lambda: gattn.nn.GATEConv(6, 6, 6), lambda layer, x: layer(X, INDEX, x[:3]), "edge_attr"),
    "PointTransformerConv": (
        lambda: gattn.nn.PointTransformerConv(6, 3),
        lambda layer, x: layer(X, x[:, :3], INDEX),
        "pos",
    ),
    "LSTMNCell": (lambda: gattn.nn.LSTMNCell(6, 3), lambda layer, x: layer(x), "x"),
    "TransformerEncoderLayer": (
        lambda: gattn.nn.TransformerEncoderLayer(6, 2, norm_first=True),
        lambda layer, x: layer(x),
        "src",
    ),
    "TransformerDecoderLayer": (
        lambda: gattn.nn.TransformerDecoderLayer(6, 2, norm_first=True),
        lambda layer, x: layer(X, x),
        "memory",
    ),
    "AttentionPooling": (lambda: gattn.nn.AttentionPooling(6), lambda layer, x: layer(x), "x"),
    "GeneralAttention": (lambda: gattn.nn.GeneralAttention(6, 6), lambda layer, x: layer(x, X), "query"),
    "AdditiveAttention": (lambda: gattn.nn.AdditiveAttention(6, 6), lambda layer, x: layer(X, x), "memory"),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("name", MIXED)
def test_features_of_another_type_than_the_parameters(name, dtype):
    make, call, features = MIXED[name]
    given, layer = str(dtype).removeprefix("torch."), name.split(",")[0]
    hint = {"float64": r"\.double\(\)", "float16": r"\.half\(\)"}[given]
    message = rf"{features} is {given}, but the parameters of {layer} are float32: .*\.float\(\).* layer{hint}"
    with pytest.raises(RuntimeError, match=message) as caught:  # which the original raises
        call(make(), X.to(dtype))
    assert type(caught.value) is InputError


class Casting(nn.Module):
    def __init__(self, lin):
        super().__init__()
        self.lin = lin

    def forward(self, x):
        return self.lin(x.float())


def with_casts(kind):
    """A `GATConv` with edge features, whose projection casts its input."""
    layer = gattn.nn.GATConv(6, 3, edge_dim=2)
    if kind == "wrapped":
        layer.lin = Casting(layer.lin)
    elif kind == "in a sequence":
        layer.lin = nn.Sequential(Casting(nn.Identity()), layer.lin)
    elif kind == "patched":
        forward = layer.lin.forward
        layer.lin.forward = lambda x: forward(x.float())
    elif kind == "hook":
        layer.lin.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(),))
    elif kind == "mixed":
        layer.lin.double()
    elif kind == "subclass":

        class Own(gattn.nn.GATConv):
            def forward(self, x, *args):
                return super().forward(self._inputs(x)[0].float(), *args)

        layer = Own(6, 3, edge_dim=2)
    return layer


@pytest.mark.parametrize("kind", ["wrapped", "in a sequence", "patched", "hook", "mixed", "subclass"])
def test_what_can_mix_types_still_does(kind):
    layer = with_casts(kind)
    assert layer(X.double(), INDEX, torch.randn(3, 2)).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sparse_features_and_parameters_in_half_precision_mix(dtype):
    layer = gattn.nn.GATConv(6, 3).to(dtype)
    assert layer(X.double().to_sparse_csr(), INDEX).dtype == dtype


@pytest.mark.parametrize("name", [name for name in MIXED if name != "LSTMNCell"])  # which concatenates two half types
def test_autocast_mixes_types(name):
    make, call, _ = MIXED[name]
    with torch.autocast("cpu", enabled="sparse" not in name):
        call(make(), X if "sparse" in name else X.half())


def test_layers_without_weights_mix_types():
    x = X.double()
    assert gattn.nn.AGNNConv()(x, INDEX).dtype == torch.float64
    assert gattn.nn.DotProductAttention()(x, X).dtype == torch.float64
    assert gattn.nn.GeneralAttention(6, 6)(X, x).dtype == torch.float64


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gattn.nn.AttentionPooling(6)(X.tolist()), "x must be a tensor; got list"),
        (lambda: gattn.nn.DotProductAttention()(X, None), "memory must be a tensor; got NoneType"),
        (lambda: gattn.nn.DotProductAttention()(X.numpy(), X), "query must be a tensor; got ndarray"),
    ],
)
def test_features_that_are_no_tensors(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_integers_have_to_be_converted_themselves():
    with pytest.raises(RuntimeError, match=r"query is int64, but .* are float32: .* with \.float\(\)\.$"):
        gattn.nn.GeneralAttention(6, 6)(X.long(), X)
