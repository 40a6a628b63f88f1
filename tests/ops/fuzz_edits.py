"""One edge_index tensor in several calls, edited in between: every call must see it as it is then, not as it was."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from gattn import SparseGraph, attend
from gattn.nn import GATConv, GATv2Conv, TransformerConv
from tests.cases import SCORES, Alter, Results, make_score
from tests.ops.fuzz_shared import FLOWS, Draw, assert_same_bits, with_gradients

LIMIT = 12
"""Node indices are below this."""


def indices(draw: Draw, *shape: int) -> Tensor:
    return draw.integers(draw.choice((1, 4, LIMIT, LIMIT)), *shape)


def in_place(index: Tensor, draw: Draw) -> None:
    index.copy_(indices(draw, *index.shape))


def of_some(index: Tensor, draw: Draw) -> None:
    index[draw.randrange(2), draw.booleans(index.size(1))] = draw.randrange(LIMIT)


def arithmetic(index: Tensor, draw: Draw) -> None:
    index.add_(draw.randrange(LIMIT)).remainder_(LIMIT)


def through_a_view(index: Tensor, draw: Draw) -> None:
    draw.choice((index[0], index[1:], index.view(-1)[::2], index.t(), index.detach())).fill_(draw.randrange(LIMIT))


def swapped_rows(index: Tensor, draw: Draw) -> None:
    index.copy_(index.flip(0))


def data_of_the_same_size(index: Tensor, draw: Draw) -> None:
    index.data = indices(draw, *index.shape)


def data_where_it_was(index: Tensor, draw: Draw) -> None:
    """Other edges in the memory of those before, if that is given out again."""
    address, shape = index.data_ptr(), index.shape
    for _ in range(20):
        index.data = index.new_empty(2, 0)  # gives back what it had
        index.data = indices(draw, *shape)
        if index.data_ptr() == address:
            break


def data_of_another_size(index: Tensor, draw: Draw) -> None:
    index.data = indices(draw, 2, draw.choice((0, 1, index.size(1) + 3, max(index.size(1) - 2, 0), 40)))


def data_transposed(index: Tensor, draw: Draw) -> None:
    index.data = index.t().contiguous().view(2, -1)


def resized(index: Tensor, draw: Draw) -> None:
    index.resize_(2, draw.choice((0, 1, index.size(1) + 5, index.size(1) // 2)))
    index.copy_(indices(draw, *index.shape))  # what is new has no values yet


def set_to_another(index: Tensor, draw: Draw) -> None:
    index.set_(indices(draw, 2, draw.choice((index.size(1), 7))).to(index.dtype))


def compiled_mutation(index: Tensor, draw: Draw) -> None:
    rotate()(index, indices(draw, *index.shape))


@functools.cache
def rotate() -> Callable[[Tensor, Tensor], None]:
    """Compiled once for all cases."""

    def function(index: Tensor, other: Tensor) -> None:
        index.copy_((index + other) % LIMIT)

    return torch.compile(function, dynamic=True, backend="aot_eager")


def nothing(index: Tensor, draw: Draw) -> None:
    """What is kept is used again."""


EDITS: dict[Callable[[Tensor, Draw], None], float] = {
    nothing: 2,
    in_place: 2,
    of_some: 2,
    arithmetic: 1,
    through_a_view: 2,
    swapped_rows: 1,
    data_of_the_same_size: 2,
    data_where_it_was: 2,
    data_of_another_size: 2,
    data_transposed: 1,
    resized: 2,
    set_to_another: 1,
    compiled_mutation: 0.3,
}


def edits(draw: Draw, alter: Alter) -> None:
    """Some calls, each on the tensor as it is and on a fresh copy of it: the same results, or the same error."""
    index = indices(draw, 2, draw.choice((0, 1, 6, 30))).to(draw.choice((torch.int64, torch.int64, torch.int32)))
    convs = [kind(3, 2, add_self_loops=True) for kind in (GATConv, GATv2Conv)] if draw.maybe(0.2) else []
    convs += [TransformerConv(3, 2)] if convs else []
    ways = [way(draw, convs) for _ in range(draw.randint(1, 3))]  # few, so that they come again
    for step in range(draw.randint(3, 8)):
        edit = draw.choices(list(EDITS), list(EDITS.values()))[0]
        chosen = draw.randrange(len(ways))
        draw.note(**{f"step {step}": f"{edit.__name__}, then way {chosen}: {ways[chosen].__doc__}"})
        if step:
            kept = index.dtype
            edit(index, draw)
            assert index.dtype == kept or edit.__name__.startswith(("data", "set"))
        outcomes = []
        for tensor in (index, index.clone()):
            try:
                outcomes.append((ways[chosen](tensor), None))
            except IndexError as error:
                outcomes.append(({}, str(error)))
        (actual, error), (expected, expected_error) = outcomes
        assert error == expected_error, f"step {step} says {error!r}, a copy {expected_error!r}"
        try:
            assert_same_bits(actual, expected, alter)
        except AssertionError as difference:
            raise AssertionError(f"step {step}: {difference}") from None


def way(draw: Draw, convs: list) -> Callable[[Tensor], Results]:
    """A call that is made again and again, with the same features."""
    n, m = draw.choice(((LIMIT, LIMIT), (LIMIT, LIMIT), (LIMIT, 14), (14, LIMIT), (6, LIMIT), (LIMIT, 6), (0, 0)))
    loops, flow, weights = draw.maybe(0.4), draw.choice(FLOWS), draw.choice((False, True))
    if convs:
        conv, x = draw.choice(convs), torch.randn(n, 3, generator=draw.generator, requires_grad=True)

        def function(index: Tensor) -> Results:
            out, (edges, alpha) = conv(x, index, return_attention_weights=True)
            outputs = {"out": out, "edges": edges.double(), "weights": alpha}
            return with_gradients(outputs, {"x": x} | dict(conv.named_parameters()), draw.case)

        function.__doc__ = f"{conv} on {n} nodes"
        return function

    name, backend = draw.choice(tuple(SCORES)), draw.choice(("auto", "auto", "reference"))
    wide = () if name.startswith("gat") else (3,)
    terms = {"query": draw.grid(n, 2, *wide), "key": draw.grid(m, 2, *wide), "value": draw.grid(m, 2, 3)}
    if name == "gat without query":
        del terms["query"]
    vector = draw.normal(2, 3)

    def function(index: Tensor) -> Results:
        leaves = {name: term.detach().requires_grad_() for name, term in terms.items()}
        graph = SparseGraph(index, num_sources=m, num_targets=n, self_loops=loops, flow=flow)
        score = make_score(name, vector)
        out = attend(leaves.get("query"), leaves["key"], leaves["value"], graph, score=score, backend=backend,
                     return_weights=weights)  # fmt: skip
        outputs = {"out": out[0], "weights": out[1]} if weights else {"out": out}
        return with_gradients(outputs, leaves, draw.case)

    function.__doc__ = f"{name}, N={n}, M={m}, self_loops={loops}, flow={flow}, weights={weights}, {backend}"
    return function
