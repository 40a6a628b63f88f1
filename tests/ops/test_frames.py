"""What a call costs beside its kernel: how many of gattn's functions run in a call like earlier ones."""

import sys
from pathlib import Path

import pytest
import torch

import gattn
from gattn import CompleteGraph, attend
from gattn.ops.backends.cpu import native
from gattn.testing import random_edge_index

pytestmark = pytest.mark.skipif(native.load_error() is not None, reason="planned calls are those of kernels")

N, H, C = 10, 4, 16
FOLDER = str(Path(gattn.__file__).parent)

#: The most functions without gradients, and with a backward pass.
MOST = {
    "list": (38, 66),
    "list, with weights": (40, 68),
    "list, with log-sums": (43, 72),
    "complete": (26, 44),
    "complete, with weights": (32, 48),
    "softcap": (45, 76),
    "mask": (45, 76),
    "lengths": (56, 87),
    "linear": (48, 78),
    "pairs": (75, 115),
    "cosine": (60, 90),
    "weights alone": (42, 75),
    "additive, complete": (48, 78),
    "GATConv": (60, 95),
    "GATConv, with edge features": (86, 130),
    "MultiheadAttention": (50, 68),
}


def functions_in(function):
    """How many of gattn's functions a call runs, of which three have run before."""
    for _ in range(3):
        function()
    count = 0

    def profile(frame, event, _):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(FOLDER)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


def calls():
    x, edge_index = torch.randn(N, H, C, requires_grad=True), random_edge_index(N, N, 30)
    graph, batch = CompleteGraph(N), CompleteGraph(N, source_lengths=torch.tensor([7]))
    cap, identity, mask = gattn.Softmax(softcap=5.0), gattn.Identity(normalize=True), torch.rand(N, N) < 0.9
    pairs, values = random_edge_index(N, N, 20), torch.randn(20, H, requires_grad=True)
    additive = gattn.AdditiveScore(torch.randn(H, C))
    nodes, features, tokens = torch.randn(N, 8), torch.randn(30, 5), torch.randn(1, N, 8)
    layer = gattn.nn.MultiheadAttention(8, H, batch_first=True)
    conv, of_edges = gattn.nn.GATConv(8, C, heads=H), gattn.nn.GATConv(8, C, heads=H, edge_dim=5)
    return {
        "list": lambda: attend(x, x, x, edge_index),
        "list, with weights": lambda: attend(x, x, x, edge_index, return_weights=True),
        "list, with log-sums": lambda: attend(x, x, x, edge_index, return_lse=True),
        "complete": lambda: attend(x, x, x, graph),
        "complete, with weights": lambda: attend(x, x, x, graph, return_weights=True),
        "softcap": lambda: attend(x, x, x, graph, distribution=cap),
        "mask": lambda: attend(x, x, x, graph, mask=mask),
        "lengths": lambda: attend(x[None], x[None], x[None], batch),
        "linear": lambda: attend(x, x, x, graph, distribution=identity),
        "pairs": lambda: attend(x, x, x, graph, bias=gattn.SparseBias(pairs, values)),
        "additive, complete": lambda: attend(x, x, x, graph, score=additive),
        "cosine": lambda: attend(x, x, x, edge_index, score=gattn.CosineScore()),
        "weights alone": lambda: gattn.weigh(x, x, edge_index),
        "MultiheadAttention": lambda: layer(tokens, tokens, tokens, need_weights=False)[0],
        "GATConv": lambda: conv(nodes, edge_index),
        "GATConv, with edge features": lambda: of_edges(nodes, edge_index, features),
    }


@pytest.mark.parametrize("name", MOST)
def test_calls_are_cheap(name):
    function = calls()[name]

    def both():
        out = function()
        (out if isinstance(out, torch.Tensor) else out[0]).sum().backward()

    forward, with_backward = MOST[name]
    assert functions_in(function) <= forward
    assert functions_in(both) <= with_backward
