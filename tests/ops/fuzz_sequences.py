"""Attention on complete graphs: the dense backend (and others) against the reference, which walks over all edges."""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

import torch
from torch import Tensor

from gattn import Bias, BucketBias, CompleteGraph, Identity, LocalGaussian, PairBias, SparseBias, attend
from gattn.graphs import BlockGraph
from gattn.ops.backends.dense import linear, matrices
from gattn.ops.radial import radial
from tests.cases import SCORES, Alter, Results, make_score
from tests.ops.fuzz_shared import Draw, compare_types, stored, tampering, with_gradients

LENGTHS = (0, 1, 2, 3, 5, 8, 9)
#: With these, small calls are computed in the ways of large ones, and in several parts.
PARTS = (
    (matrices, "_TOGETHER", (1, 4)),
    (matrices, "_CHUNK", 16),
    (linear, "_ROWS", 4),
    (linear, "_CHUNK", 2),
)


class _Distances(torch.nn.Module):
    """Biases of distances: by radial functions, or minus their squares."""

    def __init__(self, heads: int, basis: str | None):
        super().__init__()
        self.heads, self.basis = heads, basis
        weight = torch.linspace(-1, 1, 3 * heads).view(3, heads)
        self.factor, self.weight = torch.tensor([0.5, 1.0, 2.0]), weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The biases, `[..., n, m, H]`."""
        if self.basis is None:
            squares = (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1, keepdim=True)
            return squares * -self.weight[0].to(x)
        found = radial(x, y, self.factor.to(x), self.weight.to(x), 4.0, self.basis == "bessel")
        return found.movedim(-3, -1)


def random_bias(draw: Draw, graph: CompleteGraph, batch: tuple[int, ...], heads: int) -> tuple[Bias, Tensor]:
    """A bias as a value, and what it holds."""
    n, m, blocks = graph.num_targets, graph.num_sources, graph.blocks
    of_heads = (draw.choice((1, heads)),) if draw.maybe(0.8) else ()
    kind = draw.choice(("sparse", "buckets", "function", "positions"))
    if kind == "positions":
        front = (torch.Size(batch).numel(),) if blocks is None and batch and draw.maybe(0.3) else ()
        x, y = (draw.grid(*front, size, 2) for size in (n, m))
        function = _Distances(of_heads[0] if of_heads else 1, draw.choice(("gaussian", "bessel", None)))
        return PairBias(function, x, None if n == m and draw.maybe(0.5) else y.double()), x
    if kind == "sparse":
        pairs = graph.edge_index if blocks is not None else CompleteGraph(n, m).edge_index
        count = draw.choice((0, 1, 5, 20)) if pairs.size(1) > 0 else 0
        values = draw.grid(count, *of_heads) * draw.choice((1, 1, 10))
        if draw.maybe(0.2):
            values = values.masked_fill(draw.booleans(*values.shape, share=draw.random()), -torch.inf)
        chosen = draw.integers(max(pairs.size(1), 1), count)
        if draw.maybe(0.3):  # most of them several times
            chosen = chosen[draw.integers(draw.randint(1, max(count // 4, 1)), count)]
        return SparseBias(pairs[:, chosen], values), values
    table = draw.grid(5, *of_heads)
    if kind == "function":
        return BucketBias(lambda target, source: (source - target).clamp(-2, 2) + 2, table), table
    if blocks is not None:
        return BucketBias([draw.integers(5, *size).to(torch.uint8) for size in blocks], table), table
    front = (torch.Size(batch).numel(),) if draw.maybe(0.3) else ()
    return BucketBias(draw.integers(5, *front, n, m).to(draw.choice((torch.uint8, torch.int64))), table), table


def random_complete_graph(draw: Draw, batch: tuple[int, ...]) -> CompleteGraph:
    """Full, causal, windowed; ragged or packed; some long enough for a window's targets to be computed in turn."""
    n = draw.choice(LENGTHS)
    m = n if draw.maybe(0.5) else draw.choice(LENGTHS)
    window = None
    if draw.maybe(0.4):
        window = (draw.choice((0, 1, 2, 5, 40)), draw.choice((0, 1, 2, 5, 40)))
    causal = draw.maybe(0.35)
    if draw.maybe(0.3):
        blocks = draw.choice((0, 1, 2, 3, 6))
        targets = [draw.choice(LENGTHS) for _ in range(blocks)]
        sources = targets if draw.maybe(0.5) else [draw.choice(LENGTHS) for _ in range(blocks)]
        return CompleteGraph.packed(targets, sources, causal=causal, window=window)
    if draw.maybe(0.03):
        n, m, window = draw.randint(60, 150), draw.randint(70, 150), draw.choice(((3, 2), (5, 0), (0, 0), (20, 10)))
    lengths = {}
    for name, limit in (("source_lengths", m), ("target_lengths", n)):
        if batch and draw.maybe(0.25):
            lengths[name] = draw.integers(limit + 1, *batch)
    return CompleteGraph(n, m, causal=causal, window=window, **lengths)


def blocks(draw: Draw, alter: Alter) -> None:
    """One call on a graph of blocks: by tiles, or by a list of its edges."""
    batch, heads = draw.choice(((), (), (2,), (1,), (2, 3))), draw.choice((1, 2, 4))
    n, block = draw.choice((1, 5, 9, 30, 70, 140)), draw.choice((1, 2, 5, 16, 64, 100))
    m = n if draw.maybe(0.5) else draw.choice((1, 5, 9, 70))
    front = draw.choice(((), (heads,), (1,), (*batch, heads), (*batch, 1)))
    listed = draw.booleans(*front, -(-n // block), -(-m // block), share=draw.random())
    graph = BlockGraph(listed, block, n, m, causal=draw.maybe(0.3))
    if draw.maybe(0.3):
        edges = CompleteGraph(n, m).edge_index
        graph = BlockGraph.from_edges(edges[:, draw.booleans(n * m, share=draw.random())], n, m, block=block)
    shared = draw.choice([g for g in (1, 2, 4) if heads % g == 0])
    channels, value_channels = draw.choice((1, 3, 8, 16, 33)), draw.choice((1, 3, 8, 16, 33))
    shapes = {"query": (n, heads, channels), "key": (m, shared, channels), "value": (m, shared, value_channels)}
    terms = {name: stored(draw.grid(*batch, *shape), draw) for name, shape in shapes.items()}
    weights, lse, law = draw.maybe(0.2), draw.maybe(0.2), draw.choice(("softmax", "softmax", "sigmoid"))
    lse, backend = lse and law == "softmax", draw.choice(("auto", "cpu"))
    dtype = draw.choice((torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.float16))
    draw.note(graph=graph, batch=batch, shapes=shapes, weights=weights, lse=lse, law=law, backend=backend, dtype=dtype)
    exact = {name: term.to(dtype).double() for name, term in terms.items()}

    def run(dtype: torch.dtype, reference: bool) -> Results:
        leaves = {name: term.to(dtype).detach().requires_grad_() for name, term in exact.items()}
        options = {"distribution": law, "return_weights": weights, "return_lse": lse}
        out = attend(*leaves.values(), graph, backend="reference" if reference else backend, **options)
        return with_gradients(named(out, lse), leaves, draw.case)

    compare_types(run, dtype, n * m, alter)


def sequence(draw: Draw, alter: Alter) -> None:
    """One call on a complete graph: output, weights and gradients."""
    batch = draw.choice(((), (), (), (2,), (3,), (1,), (0,), (2, 3), (1, 2)))
    graph = random_complete_graph(draw, batch)
    n, m, blocks = graph.num_targets, graph.num_sources, graph.blocks
    if blocks is not None and len(batch) > 1:
        batch = batch[:1]
    name = draw.choice((*SCORES, "dot"))
    is_product = SCORES[name].is_product
    heads = draw.choice((*(() if is_product else (0,)), 1, 1, 2, 3, 4, 6))
    shared = draw.choice([g for g in range(1, heads + 1) if heads % g == 0]) if is_product else heads
    channels, value_channels = draw.choice((0, 1, 2, 3, 8, 9, 16, 33)), draw.choice((0, 1, 2, 3, 8, 9, 16, 33))
    if draw.maybe(0.3):
        value_channels = channels
    wide = (channels,) if SCORES[name].wide else ()
    terms = {"key": draw.grid(*batch, m, shared, *wide), "value": draw.grid(*batch, m, shared, value_channels)}
    if SCORES[name].has_query:
        terms["query"] = draw.grid(*batch, n, heads, *wide)
    if SCORES[name].has_vector:
        terms["vector"] = draw.normal(heads, channels) / max(channels, 1) ** 0.5
    scale = draw.choice((None, 1.0, 0.25, 0.0, -0.5, -1.0)) if is_product else None
    if scale is None and name.startswith("leaky"):
        scale = 0.5  # by which sums stay exact: rounding must not decide on which side of zero they are

    matrix = (n, m)
    front = (*batch, heads)
    if blocks is not None:
        matrix = tuple(max((sizes[side] for sizes in blocks), default=0) for side in (0, 1))
        front = (len(blocks), heads)

    def broadcastable() -> tuple[int, ...]:
        """A shape of `[..., H, N, M]` with some sizes 1, or left out in front."""
        shape = [size if draw.maybe(0.8) else 1 for size in (*front, *matrix)]
        return tuple(shape[draw.choice((0, 0, len(front) - 1, len(front))) :])

    bias = None
    if draw.maybe(0.25):
        bias, terms["table"] = random_bias(draw, graph, batch, heads)
    elif draw.maybe(0.3):
        terms["bias"] = draw.grid(*broadcastable())
        if draw.maybe(0.3):
            dead = draw.booleans(*terms["bias"].shape, share=draw.random())
            terms["bias"] = terms["bias"].masked_fill(dead, -torch.inf)
    mask = draw.booleans(*broadcastable(), share=draw.random()) if draw.maybe(0.3) else None
    centred = blocks is None and draw.maybe(0.1)
    if centred:
        terms["centres"] = draw.grid(*draw.choice(((n,), (*batch, n)))) + 2
    # Weights that are divided by their sum need one that is far from zero.
    is_linear = is_product and not centred and not isinstance(bias, PairBias) and draw.maybe(0.2)
    if is_linear:
        scale = None if scale is None else abs(scale)  # weights are divided by their sum
        terms |= {name: terms[name].abs() + 0.25 for name in ("query", "key")}
    terms = {name: stored(term, draw) for name, term in terms.items()}
    is_whole, lse = draw.maybe(0.5), not centred and not is_linear and draw.maybe(0.2)
    weights = draw.choice((False, True, "dropped"))
    backend = draw.choice(("dense", "dense", "auto", "auto" if centred else "cpu"))
    if is_linear and blocks is not None:  # where dense serves nothing but what is linear
        backend = draw.choice(("auto", "cpu"))
    dtype = draw.choice((torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.float16))
    shapes = {name: list(term.shape) for name, term in terms.items()}
    draw.note(score=name, graph=graph, blocks=blocks, batch=batch, shapes=shapes, scale=scale, weights=weights)
    draw.note(bias=bias, is_linear=is_linear, lse=lse, is_whole=is_whole)
    draw.note(mask=None if mask is None else list(mask.shape), backend=backend, dtype=dtype)
    draw.note(source_lengths=graph.source_lengths, target_lengths=graph.target_lengths)
    exact = {name: term.to(dtype).double() for name, term in terms.items()}
    tampers = tampering(draw)

    def run(dtype: torch.dtype, reference: bool) -> Results:
        leaves = {name: term.to(dtype).detach().requires_grad_() for name, term in exact.items()}
        given = dict(leaves) if reference else tampers.given(leaves)
        score = make_score(name, given.pop("vector", None), scale)
        distribution = LocalGaussian(given.pop("centres"), 3.0) if centred else "softmax"
        distribution = Identity(normalize=True) if is_linear else distribution
        if bias is not None:
            table = given.pop("table")
            if isinstance(bias, PairBias):
                y = None if bias.y is None else bias.y.to(table.dtype)
                given["bias"] = PairBias(bias.function.to(table.dtype), table, y)
            else:
                given["bias"] = bias.with_tensors([table])
        with ExitStack() as stack:
            for module, constant, number in () if is_whole else PARTS:
                stack.enter_context(patch.object(module, constant, number))
            if not is_whole:
                stack.enter_context(patch.object(linear, "is_faster", lambda *_: True))
            if not reference:
                stack.enter_context(tampers.hooks())
            out = attend(
                given.pop("query", None),
                given.pop("key"),
                given.pop("value"),
                graph,
                score=score,
                mask=mask,
                distribution=distribution,
                return_weights=weights,
                return_lse=lse,
                backend="reference" if reference else backend,
                **given,
            )
            return with_gradients(named(out, lse), leaves, draw.case)

    # PyTorch's fused attention rounds weights to half precision before it sums values.
    fused = name == "dot" and backend != "cpu" and dtype.itemsize == 2
    compare_types(run, dtype, n * m, alter, rounds_terms=fused)


def named(result: Tensor | tuple[Tensor, ...], lse: bool = False) -> Results:
    """Output, weights and log-sum-exp by name; a packed graph has some weights for each block."""
    if lse:
        assert isinstance(result, tuple)
        *rest, log_sum = result
        found = log_sum.masked_fill(log_sum == -torch.inf, 0.0)
        return {**named(rest[0] if len(rest) == 1 else tuple(rest)), "log-sum-exp": found}
    if isinstance(result, Tensor):
        return {"out": result}
    out, weights = result
    if weights is None:
        return {"out": out}
    if isinstance(weights, Tensor):
        return {"out": out, "weights": weights}
    return {"out": out, **{f"weights of block {i}": block for i, block in enumerate(weights)}}
