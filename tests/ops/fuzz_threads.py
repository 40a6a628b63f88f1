"""Several threads that attend at once, on graphs that they share and on others: the same bits as one after another."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from torch import Tensor

from gattn import CompleteGraph, SparseGraph, attend
from tests.cases import SCORES, Alter, Results, make_score
from tests.cases import threads as torch_threads
from tests.ops.fuzz_shared import FLOWS, Draw, assert_same_bits, with_gradients


def concurrent(draw: Draw, alter: Alter) -> None:
    """Jobs, each done by every thread in an order of its own, forward and backward."""
    edges = [random_edges(draw) for _ in range(draw.randint(1, 3))]
    jobs = [job(draw, len(edges)) for _ in range(draw.randint(2, 5))]
    number, workers = draw.randint(1, 3), draw.randint(2, 4)
    orders = [draw.sample(range(len(jobs)), len(jobs)) for _ in range(workers)]
    draw.note(jobs=[job.__doc__ for job in jobs], orders=orders, threads=number)
    with torch_threads(number):
        copies = [index.clone() for index in edges]
        expected = [job(copies, 0) for job in jobs]
        found: dict[tuple[int, int], Results] = {}
        errors: list[BaseException] = []
        ready = threading.Barrier(workers)

        def work(worker: int) -> None:
            try:
                ready.wait(60)
                for place in orders[worker]:
                    found[worker, place] = jobs[place](edges, worker)
            except BaseException as error:
                errors.append(error)

        started = [threading.Thread(target=work, args=(worker,)) for worker in range(workers)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            for thread in started:
                thread.start()
            for thread in started:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
    if errors:
        raise errors[0]
    for (worker, place), actual in sorted(found.items()):
        try:
            assert_same_bits(actual, expected[place], alter)
        except AssertionError as difference:
            raise AssertionError(f"job {place} in thread {worker}: {difference}") from None


def random_edges(draw: Draw) -> Tensor:
    """Some long enough for several threads inside one call."""
    return draw.integers(NODES, 2, draw.choice((0, 30, 500, 5000)))


NODES = 40


def job(draw: Draw, count: int) -> Callable[[list[Tensor], int], Results]:
    """A call on one of some lists of edges; the threads share it, or each has a copy of its own."""
    name, heads, channels = draw.choice(tuple(SCORES)), draw.choice((1, 2, 3)), draw.choice((1, 4, 9, 16))
    wide = () if name.startswith("gat") else (channels,)
    nodes, shape = NODES, (heads, channels)
    complete = CompleteGraph(nodes, causal=draw.maybe(0.5)) if draw.maybe(0.15) else None
    terms = {"key": draw.grid(nodes, heads, *wide).float(), "value": draw.grid(nodes, *shape).float()}
    if name != "gat without query":
        terms["query"] = draw.grid(nodes, heads, *wide).float()
    vector = draw.normal(*shape).float()
    which, shared, loops, flow = draw.randrange(count), draw.maybe(0.6), draw.maybe(0.3), draw.choice(FLOWS)
    weights = draw.maybe(0.3)
    backend = draw.choice(("cpu", "cpu", "cpu", "reference" if complete is None else "dense"))

    def function(edges: list[Tensor], worker: int) -> Results:
        leaves = {name: term.detach().requires_grad_() for name, term in terms.items()}
        index = edges[which] if shared else edges[which].clone()
        graph = (
            SparseGraph(index, num_sources=nodes, num_targets=nodes, self_loops=loops, flow=flow)
            if complete is None
            else complete
        )
        score = make_score(name, vector)
        out = attend(
            leaves.get("query"),
            leaves["key"],
            leaves["value"],
            graph,
            score=score,
            return_weights=weights,
            backend=backend,
        )
        outputs = {"out": out[0], "weights": out[1]} if weights else {"out": out}
        return with_gradients(outputs, leaves, draw.case)

    on = complete or f"edges {which}, shared={shared}, self_loops={loops}, flow={flow}"
    function.__doc__ = f"{name} of {shape} on {on}, weights={weights}, {backend}"
    return function
