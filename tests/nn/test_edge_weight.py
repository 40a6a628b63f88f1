"""`edge_weight`: factors of attention weights after the softmax, as in DGL's layers."""

import pytest
import torch
from torch_geometric.utils import add_remaining_self_loops, remove_self_loops, to_torch_coo_tensor

import gattn
from gattn import CompleteGraph, nn
from gattn.testing import random_edge_index
from tests.nn.against_pyg import results

N, F, D, E = 6, 5, 3, 15
EDGES = remove_self_loops(random_edge_index(N, N, 20, seed=3))[0][:, :E]

LAYERS = {
    "gat": lambda **options: nn.GATConv(F, 4, heads=2, **options),
    "gatv2": lambda **options: nn.GATv2Conv(F, 4, heads=2, **options),
    "transformer": lambda **options: nn.TransformerConv(F, 4, heads=2, **options),
}
each = pytest.mark.parametrize("name", LAYERS)


def randn(*shape):
    return torch.randn(shape, dtype=torch.double, requires_grad=True)


def looped(name, factors):
    """The edges of the layer, and their factors."""
    if name == "transformer":
        return EDGES, factors
    return add_remaining_self_loops(EDGES, factors, 1.0, N)


@each
@pytest.mark.parametrize("options", [{}, {"edge_dim": D, "concat": False}], ids=["plain", "edge features"])
def test_by_hand(name, options):
    conv, x = LAYERS[name](**options).double(), randn(N, F)
    edge_attr = randn(EDGES.size(1), D) if options else None
    factors = randn(EDGES.size(1))
    edges, expected_factors = looped(name, factors)
    (_, alpha), plain = (conv(x, EDGES, edge_attr, return_attention_weights=True)[k] for k in (1, 0))
    out, (_, weights) = conv(x, EDGES, edge_attr, return_attention_weights=True, edge_weight=factors)
    torch.testing.assert_close(weights, alpha * expected_factors.unsqueeze(-1))
    value = conv.lin_value(x) if name == "transformer" else conv.lin_l(x) if name == "gatv2" else conv.lin(x)
    messages = value.view(N, 2, 4)[edges[0]]
    if options and name == "transformer":
        messages = messages + conv.lin_edge(edge_attr).view(-1, 2, 4)
    sums = torch.zeros(N, 2, 4, dtype=torch.double).index_add(0, edges[1], weights.unsqueeze(-1) * messages)
    before = torch.zeros(N, 2, 4, dtype=torch.double).index_add(0, edges[1], alpha.unsqueeze(-1) * messages)
    heads = (lambda y: y.mean(1)) if options else (lambda y: y.flatten(1))
    torch.testing.assert_close(out, plain + heads(sums) - heads(before))
    assert torch.autograd.gradcheck(lambda w: conv(x.detach(), EDGES, edge_attr, edge_weight=w), factors)


@each
def test_ones_change_nothing(name):
    conv, x = LAYERS[name]().double(), randn(N, F)
    ones = torch.ones(EDGES.size(1))

    class Weighted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = conv

        def forward(self, x, edges):
            return self.conv(x, edges, edge_weight=ones)

    found = {key.removeprefix("conv."): value for key, value in results(Weighted(), x, EDGES).items()}
    torch.testing.assert_close(found, results(conv, x, EDGES))


@each
def test_dropout_and_records(name):
    conv, x = LAYERS[name](dropout=0.5).double(), torch.randn(N, F, dtype=torch.double)
    factors = torch.rand(EDGES.size(1)).double() + 1
    with gattn.record_attention(conv) as records:
        conv(x, EDGES, edge_weight=factors)
    (call,) = records[""]
    sums = torch.zeros(N, 2, dtype=torch.double).index_add(0, looped(name, factors)[0][1], call.weights)
    torch.testing.assert_close(sums, (sums > 0).double())
    torch.manual_seed(0)
    _, (_, weights) = conv(x, EDGES, return_attention_weights=True, edge_weight=factors)
    is_dropped = weights == 0
    assert 0 < is_dropped.sum() < weights.numel() if name != "transformer" else not is_dropped.any()


@each
def test_complete_graphs(name):
    conv, x = LAYERS[name]().double(), randn(N, F)
    complete = CompleteGraph(N)
    factors = torch.rand(N * N, dtype=torch.double)
    factors[:: N + 1] = 1.0  # where there are self-loops, which GAT replaces
    torch.testing.assert_close(
        conv(x, complete, edge_weight=factors), conv(x, complete.edge_index, edge_weight=factors), rtol=1e-9, atol=1e-9
    )


@each
def test_compiled(name):
    conv, x = LAYERS[name]().double(), randn(N, F)
    factors = torch.rand(EDGES.size(1), dtype=torch.double)
    expected = conv(x, EDGES, edge_weight=factors)
    compiled = torch.compile(conv, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, EDGES, edge_weight=factors), expected)


@each
def test_wrong_inputs(name):
    conv, x = LAYERS[name](), torch.randn(N, F)
    with pytest.raises(ValueError, match=r"edge_weight (needs one row|must have one factor) per edge.*got \[?2"):
        conv(x, EDGES, edge_weight=torch.ones(2))
    with pytest.raises(ValueError, match=r"one factor per edge, \[E\]"):
        conv(x, EDGES, edge_weight=torch.ones(EDGES.size(1), 2))
    with pytest.raises(TypeError, match="edge_weight must be a tensor"):
        conv(x, EDGES, edge_weight=1.0)
    with pytest.raises(TypeError, match="edge_weight must hold real numbers"):
        conv(x, EDGES, edge_weight=torch.ones(EDGES.size(1), dtype=torch.complex64))
    if name != "transformer":
        adjacency = to_torch_coo_tensor(EDGES, size=N).t()
        with pytest.raises(NotImplementedError, match="pass edge_index and edge_weight"):
            conv(x, adjacency, edge_weight=torch.ones(adjacency._nnz()))
