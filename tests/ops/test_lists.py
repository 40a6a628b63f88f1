"""Every cell of the kernels for lists: family by law by term by type, and logits so large that weights vanish."""

from itertools import product

import pytest
import torch

from gattn import DotScore, SparseGraph, attend
from gattn.ops.backends.cpu import Cpu
from tests.cases import (
    DISTRIBUTIONS,
    DTYPES,
    KERNEL_SCORES,
    SPARSE,
    compare,
    make_call,
    mostly_slow,
    off_the_grid,
)

pytestmark = pytest.mark.skipif(Cpu().missing() is not None, reason="needs the CPU kernels")

#: Rows without an edge, of one, of a few, of a whole block and more, and a hub of several blocks.
LENGTHS = (0, 1, 3, 0, 33, 150, 2, 1, 0, 32, 5)
TARGETS, SOURCES, EDGES = len(LENGTHS), 9, sum(LENGTHS)
#: What a call has besides query, key and value.
CELLS = {
    "nothing": {},
    "edge": {"terms": ("edge",)},
    "edge_value": {"terms": ("edge_value",)},
    "edge and edge_value": {"terms": ("edge", "edge_value")},
    "projected edge": {"terms": ("edge",), "projected": 5},
    "bias": {"terms": ("bias",)},
    "mask": {"mask": True},
    "sink": {"sink": True},
    "out_bias": {"out_bias": True},
    "dropout": {"dropout": 0.3},
    "weights": {"weights": True},
    "batch": {"batch": (2,), "weights": True},
    "grouped": {"heads": 4, "key_heads": 2},
    "wide": {"channels": 40, "value_channels": 24},
}
LAWS = (*DISTRIBUTIONS, *SPARSE)


def cells():
    """Some mean nothing: grouped keys have products, and a sink is that of a softmax."""
    for score, law, term, dtype, factor in product(KERNEL_SCORES, LAWS, CELLS, DTYPES, (1, 30, 1000)):
        if term == "sink" and not law.startswith("soft"):
            continue
        if (term == "grouped" or factor > 1) and score not in ("dot", "leaky dot"):
            continue
        if factor > 30 and dtype == torch.float16:  # whose gradients would be infinite
            continue
        yield score, law, term, dtype, factor


@pytest.mark.parametrize(("score", "law", "term", "dtype", "factor"), mostly_slow(cells(), 7), ids=str)
def test_every_cell(score, law, term, dtype, factor):
    generator = torch.Generator().manual_seed(1)
    target = torch.repeat_interleave(torch.tensor(LENGTHS))
    edge_index = torch.stack([torch.randint(SOURCES, (EDGES,), generator=generator), target])
    edge_index = edge_index[:, torch.randperm(EDGES, generator=generator)]
    options = {"heads": 2, "channels": 8, "value_channels": 8, "terms": (), "weights": False} | CELLS[term]
    if options.get("mask"):  # which leaves nothing of the third row
        options["mask"] = (torch.rand(EDGES, generator=generator) < 0.7) & (edge_index[1] != 2)
    if law in SPARSE:
        options["terms"] = (*options["terms"], *{"bias"}.difference(options["terms"]))
    if factor > 1:
        options["scale"] = factor / options["channels"] ** 0.5
    call = make_call(score, edge_index, SOURCES, TARGETS, dtype=dtype, distribution=law, **options)
    compare(off_the_grid(call) if law in SPARSE else call)


@pytest.mark.parametrize("side", [-1.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_clamped_logits_have_no_gradient(dtype, side):
    query, key = (torch.full((4, 2, 8), x, dtype=dtype, requires_grad=True) for x in (side, 1.0))
    value = torch.randn(4, 2, 8).to(dtype)
    graph = SparseGraph(torch.randint(4, (2, 60)), 4, 4)
    out = attend(query, key, value, graph, score=DotScore(clamp=0.5), backend="cpu")
    for grad in torch.autograd.grad(out, (query, key), torch.randn(out.shape).to(dtype)):
        assert (grad == 0).all()
