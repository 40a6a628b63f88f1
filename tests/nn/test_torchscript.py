"""Tracing records what PyG's layers would; scripting is refused with a way out."""

import pytest
import torch
import torch_geometric

import gattn
from gattn import nn
from gattn.testing import random_edge_index

pytestmark = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of checks, which become constants

LAYERS = {
    "GATConv": lambda: nn.GATConv(4, 3, heads=2),
    "GATConv with edges": lambda: nn.GATConv(4, 3, edge_dim=2),
    "GATv2Conv": lambda: nn.GATv2Conv(4, 3, residual=True),
    "GATv2Conv with edges": lambda: nn.GATv2Conv(4, 3, edge_dim=2, add_self_loops=False),
    "TransformerConv": lambda: nn.TransformerConv(4, 3, heads=2, beta=True),
    "TransformerConv with edges": lambda: nn.TransformerConv(4, 3, edge_dim=2),
}


class Sequence(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.options = options

    def forward(self, x):
        return self.attention(x, x, x, **self.options)[0]


def traced(module, *inputs):
    with torch.no_grad():
        return torch.jit.trace(module.eval().requires_grad_(False), inputs)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("given", ["edge_index", "seen before"])
def test_traced_layers_serve_other_graphs(layer, given):
    conv, sizes = LAYERS[layer](), ((5, 12), (3, 7), (7, 30), (7, 0))
    inputs = [(torch.randn(nodes, 4), random_edge_index(nodes, num_edges=edges)) for nodes, edges in sizes]
    if conv.lin_edge is not None:
        inputs = [(x, index, torch.randn(index.size(1), 2)) for x, index in inputs]
    if given == "seen before":  # what is kept for its edges is no constant of the program
        conv(*inputs[0])
    program = traced(conv, *inputs[0])
    for case in inputs:
        torch.testing.assert_close(program(*case), conv(*case))


def test_traced_pairs():
    conv = nn.TransformerConv((4, 5), 3)
    cases = [
        (torch.randn(sources, 4), torch.randn(targets, 5), random_edge_index(sources, targets, 20))
        for sources, targets in ((6, 3), (3, 8))
    ]

    class Pair(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = conv

        def forward(self, sources, targets, edge_index):
            return self.conv((sources, targets), edge_index)

    program = traced(Pair(), *cases[0])
    for case in cases:
        torch.testing.assert_close(program(*case), conv(case[:2], case[2]))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"need_weights": False}])
def test_traced_sequences_of_other_lengths(options):
    module = Sequence(**options)
    program = traced(module, torch.randn(2, 5, 8))
    for shape in ((2, 5, 8), (3, 7, 8), (1, 1, 8)):
        x = torch.randn(shape)
        torch.testing.assert_close(program(x), module(x))


def test_an_explicit_backend_says_no():
    conv = nn.GATConv(4, 3)
    with gattn.backend("cpu"), pytest.raises(ValueError, match=r"torch\.jit\.trace records plain PyTorch"):
        traced(conv, torch.randn(5, 4), random_edge_index(5, num_edges=9))


OTHERS = [
    lambda: nn.LSTMNCell(4, 3),
    lambda: nn.AttentionPooling(4),
    lambda: nn.AdditiveAttention(4, 4),
    lambda: nn.HardAttention(nn.DotProductAttention()),
    lambda: nn.ReinforceLoss(),
    lambda: nn.ALiBi(2),
    lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2), 1),
    lambda: gattn.models.GAT(4, 8, 2, heads=2),
    lambda: gattn.models.HAN(10, 3),
    lambda: gattn.models.LSTMN(10, 4),
    lambda: gattn.models.Seq2Seq(10, 10),
    lambda: gattn.models.Seq2Seq(10, 10, attention=None),
    lambda: gattn.models.TransformerLM(10, 4),
]


@pytest.mark.parametrize(
    "layer", [*LAYERS.values(), *OTHERS, Sequence, lambda: torch_geometric.nn.Sequential("x", [(Sequence(), "x -> x")])]
)
def test_scripting_is_refused(layer, monkeypatch):
    # Each of PyG's Sequentials changes the class.
    monkeypatch.setattr(torch_geometric.nn.Sequential, "forward", torch_geometric.nn.Sequential.forward)
    with pytest.raises(
        NotImplementedError, match=r"TorchScript cannot compile .*: use torch\.compile, or torch\.export"
    ):
        torch.jit.script(layer())


def test_unknown_arguments_are_named():
    for layer, arguments in ((nn.GATConv, (4, 3)), (nn.GATv2Conv, (4, 3)), (nn.TransformerConv, (4, 3))):
        with pytest.raises(TypeError, match=rf"{layer.__name__} has no argument hedas; it takes in_channels, .*heads"):
            layer(*arguments, hedas=2)
