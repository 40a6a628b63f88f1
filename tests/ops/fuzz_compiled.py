"""Compiled calls on graphs that are computed inside: as when they are not compiled, and with wrong terms an error.

Compiling takes seconds, so the functions are few, their sizes dynamic, and all cases of a process share them.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import gattn
from gattn import SparseGraph, attend
from gattn.nn import GATConv, GATv2Conv, TransformerConv
from tests.cases import Alter, Results, make_score
from tests.ops.fuzz_shared import FLOWS, Draw, compare_types, with_gradients

HEADS, CHANNELS = 2, 3
#: Score, self-loops, flow and per-edge term of the functions that are compiled; the last is a mask.
CALLS = (
    ("dot", False, FLOWS[0], None),
    ("dot", True, FLOWS[1], "bias"),
    ("leaky_relu", False, FLOWS[1], "edge"),
    ("leaky_relu", True, FLOWS[0], "edge_value"),
    ("gat", True, FLOWS[0], None),
    ("gat", False, FLOWS[0], "mask"),
)
LAYERS = (GATConv, GATv2Conv, TransformerConv)


def inside(base: Tensor, nodes: int, shift: Any = 0) -> Tensor:
    """A graph that depends on numbers that only running tells."""
    return (base * 7 + 3 + shift) % nodes


def attention(number: int) -> Callable[..., Tensor]:
    """Attends twice, over a second graph that depends on what the first gave."""
    name, loops, flow, term = CALLS[number]

    def function(x: Tensor, base: Tensor, vector: Tensor, per_edge: Tensor | None) -> Tensor:
        nodes = x.size(0)
        graph = SparseGraph(inside(base, nodes), num_sources=nodes, num_targets=nodes, self_loops=loops, flow=flow)
        terms = {} if per_edge is None else {term: per_edge}
        query = x.sum(-1) if name == "gat" else x
        out = attend(query, query, x, graph, score=make_score(name, vector), **terms)
        shift = (out.detach().sum() > 0).long()
        graph = SparseGraph(inside(base, nodes, shift), num_sources=nodes, num_targets=nodes, flow=flow)
        return attend(out, out, x, graph)

    return function


def in_layer(number: int) -> Callable[..., Tensor]:
    torch.manual_seed(number)
    exact = LAYERS[number](CHANNELS, CHANNELS, heads=HEADS, concat=False).double().requires_grad_(False)
    rough = copy.deepcopy(exact).float()

    def function(x: Tensor, base: Tensor, vector: Tensor, per_edge: Tensor | None) -> Tensor:
        conv = exact if x.dtype == torch.float64 else rough
        return conv(x[:, 0], inside(base, x.size(0)))

    return function


@functools.cache
def functions(number: int, backend: str) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """One of the functions, as it is and compiled."""
    function = attention(number) if number < len(CALLS) else in_layer(number - len(CALLS))
    return function, torch.compile(function, dynamic=True, fullgraph=True, backend=backend)


def compiled(draw: Draw, alter: Alter) -> None:
    """One function on sizes of its own; a term of a wrong number of edges must be an error."""
    number = draw.randrange(len(CALLS) + len(LAYERS))
    backend = draw.choices(("aot_eager", "inductor"), (40, 1))[0]
    function, fast = functions(number, backend)
    nodes, edges = draw.randint(3, 20), draw.choice((0, 2, 7, 40, 90))
    x, base = draw.grid(nodes, HEADS, CHANNELS), draw.integers(1000, 2, edges)
    vector, term, loops = draw.normal(HEADS, CHANNELS), None, False
    if number < len(CALLS):
        _, loops, _, term = CALLS[number]
    draw.note(function=CALLS[number] if number < len(CALLS) else LAYERS[number - len(CALLS)], backend=backend)
    draw.note(nodes=nodes, edges=edges)
    per_edge, wrong = None, False
    if term is not None:
        index = inside(base, nodes)
        count = int((index[0] != index[1]).sum()) + nodes if loops else edges
        wrong = draw.maybe(0.4)
        others = [n for n in (0, 1, count - 1, count + 1, 2 * count) if n >= 0 and n != count]
        rows = draw.choice(others) if wrong else count
        shapes = {"bias": (HEADS,), "mask": (HEADS,), "edge": (HEADS, CHANNELS), "edge_value": (HEADS, CHANNELS)}
        per_edge = draw.grid(rows, *shapes[term])
        per_edge = per_edge > 0 if term == "mask" else per_edge
        draw.note(edges_inside=count, rows=rows)

    def run(dtype: torch.dtype, reference: bool) -> Results:
        leaves = {"x": x.to(dtype).detach().requires_grad_()}
        if per_edge is not None and per_edge.is_floating_point():
            leaves["per_edge"] = per_edge.to(dtype).detach().requires_grad_()
        given = leaves.get("per_edge", per_edge)
        called = function if reference else fast
        with gattn.backend("reference" if reference else "auto"):
            out = called(leaves["x"], base, vector.to(dtype), given)
        return with_gradients({"out": out}, leaves, draw.case)

    # All functions of a kind have the same code, which PyTorch compiles a few times only.
    with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=1000):
        if not wrong:
            compare_types(run, torch.float64, edges + nodes, alter)
            return
        try:
            run(torch.float64, False)
        except ValueError as error:
            if f"{term} has " in str(error):
                return
            raise
        except torch._dynamo.exc.Unsupported:  # an error that is raised while compiling is one to PyTorch
            return
        raise AssertionError(f"{term} has {rows} rows for {count} edges, and there was no error")
