"""Calls of `attend` on sparse graphs: the CPU kernels (or others) against the reference, in every type."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import add_self_loops, remove_self_loops

from gattn import SparseGraph
from tests.cases import DIFFERENTIABLE, DISTRIBUTIONS, DTYPES, SCORES, Alter, Call, compare, grid, projection
from tests.ops.fuzz_shared import FLOWS, Draw, in_csr_order, in_flow, random_graph, stored


def random_call(seed: int) -> tuple[Call, str | None]:
    """A call on the default device, and the index that is wrong in it, if any."""
    with torch.device("cpu"):
        call, bad = draw_call(seed)
    return call.to(torch.get_default_device()), bad


def draw_call(seed: int) -> tuple[Call, str | None]:
    """The same on the CPU."""
    draw = Draw(seed)
    edge_index, sources, targets, kind = random_graph(draw, huge=True)
    num_edges = edge_index.size(1)
    notes: dict[str, Any] = {"graph": kind}
    bad = None
    if num_edges and draw.random() < 0.05:
        row, place = draw.randrange(2), draw.randrange(num_edges)
        bad = draw.choice(("negative", "too large"))
        wrong = draw.choice((1, 2, 100)) if kind != "huge" else 1
        edge_index[row, place] = -wrong if bad == "negative" else (sources, targets)[row] + wrong - 1

    self_loops, flow = draw.random() < 0.25, draw.choice((*FLOWS, FLOWS[0]))
    edges = edge_index
    if self_loops and bad is None:
        edges = add_self_loops(remove_self_loops(edge_index)[0], num_nodes=min(sources, targets))[0]
    form = draw.choice(("int64", "int64", "int32", "int16", "strided", "EdgeIndex", "csr"))
    if form == "csr" and (bad is not None or self_loops or flow != FLOWS[0] or kind == "huge"):
        form = "int64"
    if form == "EdgeIndex" and bad is not None:
        form = "int64"
    if form == "csr":
        edges = edge_index = in_csr_order(edge_index)
    num_edges = edges.size(1)
    given = in_flow(edge_index, sources, targets, flow, form, draw)
    graph = SparseGraph(given, num_sources=sources, num_targets=targets, self_loops=self_loops, flow=flow)
    notes["form"] = form

    score = draw.choice(tuple(SCORES))
    small = kind == "huge"
    heads = draw.choice((0, 1, 1, 2, 3, 4, 5, 8, 16, 17, 32)) if not small else draw.choice((1, 3, 4))
    is_product = SCORES[score].is_product
    heads = max(heads, 1) if is_product else heads  # heads share those of key and value, and none divides none
    shared_heads = draw.choice([g for g in range(1, heads + 1) if heads % g == 0]) if is_product else heads
    widths = (0, 0, 1, 2, 3, 8, 16, 17, 31, 32, 33, 64, 70, 128, 130) if not small else (1, 5, 8)
    channels, value_channels = draw.choice(widths), draw.choice(widths)
    if num_edges * heads * max(channels, value_channels) > 60_000 and not small:
        channels, value_channels = min(channels, 9), min(value_channels, 9)
    batch = draw.choice(((), (), (), (), (2,), (2, 3), (1,), (3, 1), (0,), (2, 0))) if not small else ()
    dtype = draw.choice(DTYPES)
    mixed = draw.random() < 0.1

    def make(*shape: int) -> Tensor:
        return stored(grid(shape, draw.generator, draw.choice(DTYPES) if mixed else dtype), draw)

    def terms(*shape: int) -> Tensor:
        return make(*draw.choice(((), batch)), num_edges, heads, *shape)

    wide = () if score.startswith("gat") else (channels,)
    tensors = {"key": make(*batch, sources, shared_heads, *wide)}
    if SCORES[score].has_query:
        tensors["query"] = make(*batch, targets, heads, *wide)
    if score != "gat" and wide and draw.random() < 0.2:
        tensors["value"], value_channels = tensors["key"], channels
    else:
        tensors["value"] = make(*batch, sources, shared_heads, value_channels)
    if SCORES[score].has_vector:
        tensors["vector"] = stored(
            torch.randn(heads, channels, generator=draw.generator) / max(channels, 1) ** 0.5, draw
        ).to(dtype)
    if draw.random() < 0.3:
        tensors["edge"] = terms(*wide)
    projects = "edge" in tensors and not mixed and draw.random() < 0.3
    if projects:
        features = draw.choice((1, 2, 7, 16, 19))
        tensors["edge"] = make(num_edges, features)
        tensors["edge_projection"] = stored(projection((heads, *wide, features), draw.generator, dtype), draw)
    if draw.random() < 0.3:
        tensors["bias"] = terms()
        if draw.random() < 0.3:
            dead = torch.rand(tensors["bias"].shape, generator=draw.generator) < draw.random()
            tensors["bias"] = tensors["bias"].masked_fill(dead, -torch.inf)
    if "edge" in tensors and wide == (value_channels,) and draw.random() < 0.5:
        tensors["edge_value"] = tensors["edge"]
    elif draw.random() < 0.3:
        tensors["edge_value"] = terms(value_channels)
    mask = None
    if draw.random() < 0.3:
        shape = draw.choice(((num_edges,), (num_edges, heads), (*batch, num_edges), (*batch, num_edges, heads)))
        mask = torch.rand(shape, generator=draw.generator) < draw.random()
        mask = stored(mask, draw) if mask.dim() > 1 else mask
    if draw.random() < 0.1:  # far from zero, where exp() alone would overflow
        tensors["key"] = tensors["value"] if tensors["key"] is tensors["value"] else tensors["key"] * 16
    distribution = draw.choice(tuple(DISTRIBUTIONS)) if draw.random() < 0.4 else "softmax"
    if distribution.startswith("soft") and draw.random() < 0.2:
        tensors["sink"] = make(heads)
    if draw.random() < 0.2:
        tensors["out_bias"] = make(heads, value_channels)
    present = tuple(name for name in DIFFERENTIABLE if name in tensors)
    wanted = present if draw.random() < 0.6 else tuple(name for name in present if draw.random() < 0.5)
    weights: bool | str = draw.choice((False, False, True, "dropped"))
    notes["weights need no gradient"] = draw.random() < 0.4
    notes["sums"] = draw.random() < 0.2
    return Call(
        score,
        graph,
        edges,
        targets,
        tensors,
        mask,
        draw.choice((0.0, 0.0, 0.3, 0.6, 1.0)),
        weights,
        wanted,
        draw.choice((0.2, 0.01, 0.0)),
        draw.choice((None, 1.0, 0.25)),
        seed,
        draw.randint(1, 3) if small else 1,
        distribution,
        notes,
    ), bad


def call(draw: Draw, alter: Alter, backend: str = "cpu") -> None:
    """One call; an index that is out of range must be the same error by both."""
    drawn, bad = random_call(draw.case)
    draw.note(call=drawn)
    if bad is None:
        compare(drawn, backend, alter=alter)
        return
    errors = []
    for tested in (backend, "reference"):
        try:
            drawn.results(tested)
            errors.append("no error")
        except IndexError as error:
            errors.append(str(error))
    assert "holds" in errors[0], f"an index is {bad}, and the kernels say: {errors[0]}"
    assert errors[0] == errors[1]


def triton(draw: Draw, alter: Alter) -> None:
    """One call of the GPU kernels, whose rows are split from a few edges on; in the interpreter, of a small graph."""
    from gattn.ops.backends.triton import layout
    from gattn.ops.backends.triton.forms import INTERPRETED

    if INTERPRETED and random_call(draw.case)[0].edges.size(1) > 400:
        return
    before, layout.LONG_ROW = layout.LONG_ROW, draw.choice((2, 4, 128))
    try:
        call(draw, alter, "triton")
    finally:
        layout.LONG_ROW = before
