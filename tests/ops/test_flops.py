"""What PyTorch's counter of operations says of attention."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import gattn
from gattn import CompleteGraph, attend
from gattn.graphs import BlockGraph
from gattn.ops.backends.cpu import native
from gattn.ops.backends.dense import tile_operator
from gattn.ops.backends.dense.tile_rules import Rule
from gattn.testing import random_edge_index

pytestmark = pytest.mark.skipif(native.load_error() is not None, reason="plain PyTorch is counted by its products")

N, M, H, C, V, E = 30, 20, 4, 8, 12, 90
TARGETS, SOURCES = torch.randn(N, H, C), torch.randn(M, H, C)


def counted(function):
    with FlopCounterMode(display=False) as counter:
        found = function()
    return counter.get_total_flops(), found


def pairs_within(before, after):
    return sum(min(N - 1, i + after) - max(0, i - before) + 1 for i in range(N))


LIST = random_edge_index(M, N, E)
SQUARE = random_edge_index(N, N, E)
BLOCKS = torch.zeros(N // 5, M // 5, dtype=torch.bool)
BLOCKS[0, 1] = BLOCKS[2, 0] = BLOCKS[2, 2] = True
CALLS = {  # the pairs, the channels of scores, and the call
    "list": (E, C, lambda q, k, v: attend(q, k, v, LIST)),
    "list, batched": (2 * E, C, lambda q, k, v: attend(*(x.expand(2, -1, -1, -1) for x in (q, k, v)), LIST)),
    "additive": (E, C, lambda q, k, v: attend(q, k, v, LIST, score=gattn.AdditiveScore(torch.ones(H, C)))),
    "GAT's": (E, 0, lambda q, k, v: attend(q[..., 0], k[..., 0], v, LIST, score=gattn.GATScore())),
    "features": (
        E,
        C + 3 * C,
        lambda q, k, v: attend(q, k, v, LIST, edge=gattn.Projected(torch.ones(E, 3), torch.ones(H, C, 3))),
    ),
    "complete": (N * M, C, lambda q, k, v: attend(q, k, v, CompleteGraph(N, M))),
    "masked": (N * M, C, lambda q, k, v: attend(q, k, v, CompleteGraph(N, M), mask=torch.ones(N, M).bool())),
    "causal": (
        pairs_within(N, 0),
        C,
        lambda q, k, v: attend(q, q, q.repeat(1, 1, 2)[..., :V], CompleteGraph(N, causal=True)),
    ),
    "window": (
        pairs_within(3, 2),
        C,
        lambda q, k, v: attend(q, q, q.repeat(1, 1, 2)[..., :V], CompleteGraph(N, window=(3, 2))),
    ),
    "lengths": (
        N * (5 + 20),
        C,
        lambda q, k, v: attend(
            *(x.expand(2, -1, -1, -1) for x in (q, k, v)), CompleteGraph(N, M, source_lengths=torch.tensor([5, 20]))
        ),
    ),
    "blocks": (3 * 25, C, lambda q, k, v: attend(q, k, v, BlockGraph(BLOCKS, 5, N, M))),
    "packed": (10 * 5 + 20 * 15, C, lambda q, k, v: attend(q, k, v, CompleteGraph.packed([10, 20], [5, 15]))),
}


@pytest.mark.parametrize("name", CALLS)
def test_operations_are_those_of_the_formula(name):
    pairs, channels, call = CALLS[name]
    given = TARGETS.clone().requires_grad_(), SOURCES.clone().requires_grad_(), torch.randn(M, H, V).requires_grad_()
    forward, out = counted(lambda: call(*given))
    torch.testing.assert_close(out, call(*given))
    assert forward == 2 * pairs * H * (channels + V)
    both, _ = counted(lambda: call(*given).sum().backward())
    assert both - forward == 2 * pairs * H * (3 * channels + 2 * V)


def test_a_backward_pass_is_counted_alone():
    for name in ("list", "window"):
        pairs, channels, call = CALLS[name]
        out = call(*(x.clone().requires_grad_() for x in (TARGETS, SOURCES, torch.randn(M, H, V))))
        assert counted(out.sum().backward)[0] == 2 * pairs * H * (3 * channels + 2 * V)


def test_a_compiled_programs_operator_is_counted():
    query, key, value = (torch.randn(1, N, H, C, requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        rule = Rule(1.0, 1.0, float("inf"), gattn.Softmax().law(), 2, 0, (), 0.0, log_sum=False)
        tile_operator.attend(query, key, value, None, None, None, rule, 0, None)[0].sum().backward()
    found = counter.get_flop_counts()["Global"]
    pairs = pairs_within(2, 0)
    assert found[torch.ops.gattn.tiles] == 4 * pairs * H * C
    assert found[torch.ops.gattn.tiles_backward] == 10 * pairs * H * C


def test_self_loops_replace_those_that_are_there():
    loops = int((SQUARE[0] == SQUARE[1]).sum())
    with FlopCounterMode(display=False) as counter:
        gattn.nn.GATConv(6, C, heads=H)(torch.randn(N, 6), SQUARE)
    assert loops > 0
    assert counter.get_flop_counts()["Global"][torch.ops.gattn.attention] == 2 * (E - loops + N) * H * C


def test_it_is_what_pytorch_counts_of_its_own():
    """Of fused attention, which it leaves out on CPUs by itself, and of a whole layer, by its own formula."""
    x = torch.randn(2, N, H, C, requires_grad=True)

    def of_torch():
        F.scaled_dot_product_attention(*[x.transpose(1, 2)] * 3).sum().backward()

    assert counted(of_torch)[0] == 2 * 2 * N * N * H * (2 * C + 5 * C)
    assert counted(lambda: attend(x, x, x, CompleteGraph(N)).sum().backward())[0] == counted(of_torch)[0]
    tokens = torch.randn(N, 2, 16)
    layers = [module.nn.MultiheadAttention(16, H) for module in (gattn, torch)]
    first, second = (
        counted(lambda: layer(tokens, tokens, tokens, need_weights=False)[0].sum().backward())[0]  # noqa: B023
        for layer in layers
    )
    assert first == second > 0


def test_counting_by_module_names_the_layer():
    model = torch.nn.ModuleDict({"conv": gattn.nn.TransformerConv(6, C, heads=H)})
    counter = FlopCounterMode(display=False)
    with counter:
        model["conv"](torch.randn(N, 6), SQUARE)
    assert counter.get_flop_counts()["TransformerConv"][torch.ops.gattn.attention] == 4 * E * H * C
