"""Every score with every distribution on every form of graph, against formulas of their own in plain PyTorch.

Edges are a list of pairs here, and rows of a distribution those of a dense matrix, `[..., R, E, H]`, with logits of
minus infinity for edges of other rows. Nothing is gattn's own but what is tested.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.utils import add_self_loops, remove_self_loops

import gattn
from gattn import (
    AdditiveScore,
    CompleteGraph,
    CosineScore,
    DotScore,
    GATScore,
    SparseBias,
    SparseGraph,
    TypedGraph,
    attend,
)
from tests.cases import HALF, Alter, Results, projection, with_terms
from tests.ops.fuzz_sequences import named, random_complete_graph
from tests.ops.fuzz_shared import FLOWS, Draw, compare_types, in_flow, random_graph, with_gradients

Tensors = dict[str, Tensor]

# ------------------------------------------------------------------------------------------------------------ formulas


def unit(x: Tensor) -> Tensor:
    is_zero = (x == 0).all(-1, keepdim=True)
    return torch.where(is_zero, x * 1e12, x / x.masked_fill(is_zero, 1.0).square().sum(-1, keepdim=True).sqrt())


def dot(q: Tensor, k: Tensor, scale: Any = None) -> Tensor:
    return (q * k).sum(-1) * (max(q.size(-1), 1) ** -0.5 if scale is None else scale)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "tanh": torch.tanh,
    "relu": F.relu,
    "identity": lambda x: x,
    "elu": lambda x: x.where(x >= 0, x.exp() - 1),
    "gelu": lambda x: x * (1 + (x / 2**0.5).erf()) / 2,
    "silu": lambda x: x * x.sigmoid(),
}
#: Scores, made from the tensors of a call, and their formulas, from the two ends, the edge's term (or 0) and tensors.
SCORES: dict[str, tuple[Callable[[Tensors], gattn.Score], Callable[[Tensor, Tensor, Any, Tensors], Tensor]]] = {
    "gat": (lambda t: GATScore(0.1), lambda q, k, e, t: F.leaky_relu(q + k + e, 0.1)),
    "sum": (lambda t: GATScore(1.0), lambda q, k, e, t: q + k + e),
    "dot": (lambda t: DotScore(), lambda q, k, e, t: dot(q, k + e)),
    "scaled": (lambda t: DotScore(t["scale"]), lambda q, k, e, t: dot(q, k + e, t["scale"])),
    "leaky": (lambda t: DotScore(0.5, 0.3), lambda q, k, e, t: F.leaky_relu(dot(q, k + e, 0.5), 0.3)),
    "clamped": (lambda t: DotScore(0.5, clamp=1.0009), lambda q, k, e, t: dot(q, k + e, 0.5).clamp(-1.0009, 1.0009)),
    "multiplied": (lambda t: DotScore(t["scale"], edge="multiply"), lambda q, k, e, t: dot(q, k * e, t["scale"])),
    "all at once": (
        lambda t: DotScore(t["scale"], 0.3, edge="multiply", clamp=0.7001),
        lambda q, k, e, t: F.leaky_relu(dot(q, k * e, t["scale"]), 0.3).clamp(-0.7001, 0.7001),
    ),
    "cosine": (lambda t: CosineScore(3.0), lambda q, k, e, t: dot(unit(q), unit(k) + e, 3.0)),
    "scaled cosine": (lambda t: CosineScore(t["scale"]), lambda q, k, e, t: dot(unit(q), unit(k) + e, t["scale"])),
    **{
        name: (
            lambda t, name=name: AdditiveScore(t["vector"], name),
            lambda q, k, e, t, name=name: (ACTIVATIONS[name](q + k + e) * t["vector"]).sum(-1),
        )
        for name in ACTIVATIONS
    },
}
MULTIPLIED, SCALAR = ("multiplied", "all at once"), ("gat", "sum")
FUSED = ("dot", "scaled", "multiplied", "cosine", "scaled cosine")


def softmax(z: Tensor, sink: Any = -torch.inf) -> Tensor:
    sink = torch.as_tensor(sink, dtype=z.dtype)
    most = z.detach().amax(-2, keepdim=True).maximum(sink.detach())
    most = most.masked_fill(most == -torch.inf, 0.0)
    weights, total = (z - most).exp(), (sink - most).exp()
    total = total + weights.sum(-2, keepdim=True)
    return weights / total.masked_fill(total == 0, 1.0)


def gated(z: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    return function(z.masked_fill(z == -torch.inf, 0.0)).masked_fill(z == -torch.inf, 0.0)


def normalized(y: Tensor, eps: float) -> Tensor:
    total = y.sum(-2, keepdim=True) + eps
    return (y / total.masked_fill(total == 0, 1.0)).masked_fill(total == 0, 0.0)


def above_threshold(z: Tensor, power: int) -> Tensor:
    """How far logits lie above the threshold from which the weights sum to one, of which there is one per support."""
    x = (z - z.detach().amax(-2, keepdim=True).clamp_min(-1e4)) / power
    ordered = x.detach().double().clamp_min(-1e2).sort(-2, descending=True).values
    count = torch.arange(1, z.size(-2) + 1, dtype=torch.double).unsqueeze(-1)

    def threshold(total: Tensor, squares: Tensor, count: Tensor) -> Tensor:
        mean = total / count
        return mean - (1 / count if power == 1 else ((1 - squares + total * mean) / count).clamp_min(0.0).sqrt())

    tried = threshold(ordered.cumsum(-2), ordered.square().cumsum(-2), count)
    has_weight = (ordered >= tried) & (ordered > -1e2)
    last = (has_weight.sum(-2, keepdim=True) - 1).clamp_min(0)
    kept = x.where(x.detach() >= tried.gather(-2, last) - 1e-9, 0.0)
    return x - threshold(kept.sum(-2, keepdim=True), kept.square().sum(-2, keepdim=True), last.to(x.dtype) + 1)


def of_rank(z: Tensor, first: int) -> Tensor:
    """The logit of a rank, counted from 0, in each row."""
    return z.sort(-2, descending=True).values[..., first : first + 1, :]


class Law(NamedTuple):
    """A distribution: how it is made from tensors and types, its formula, and how clear its choices are in each row."""

    make: Callable[[Tensors, Tensor], Any]
    weights: Callable[[Tensor, Tensors], Tensor]
    margin: Callable[[Tensor], Tensor] | None = None


def top(k: int) -> Law:
    def margin(z: Tensor) -> Tensor:
        return (of_rank(z, k - 1) - of_rank(z, k)).nan_to_num(torch.inf) if z.size(-2) > k else z.new_ones(1)

    def weights(z: Tensor, t: Tensors) -> Tensor:
        return softmax(z.where(z >= of_rank(z.detach(), k - 1), -torch.inf)) if z.size(-2) > k else softmax(z)

    return Law(lambda t, types: gattn.TopK(k), weights, margin)


def hard(z: Tensor, t: Tensors) -> Tensor:
    chosen = torch.zeros_like(z).scatter(-2, z.detach().argmax(-2, keepdim=True), 1.0)
    return chosen.masked_fill(z == -torch.inf, 0.0).detach()


def gate(kind: Any, function: Callable[[Tensor], Tensor], eps: float | None) -> Law:
    """With `eps`, it is normalized."""

    def margin(z: Tensor) -> Tensor:
        y = gated(z, function)
        least = 0.2 if kind is gattn.Sigmoid else 10.0  # derivatives of others do not vanish with their value
        return ((y.sum(-2) + (eps or 0.0)).abs() / y.abs().sum(-2).clamp_min(least) / 200).where((y != 0).any(-2), 1.0)

    if eps is None:
        return Law(lambda t, types: kind(), lambda z, t: gated(z, function))
    return Law(lambda t, types: kind(True, eps), lambda z, t: normalized(gated(z, function), eps), margin)


def cap(z: Tensor, bound: float) -> Tensor:
    return gated(z, lambda x: bound * (x / bound).tanh()).where(z > -torch.inf, z)


GATES: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "sigmoid": (gattn.Sigmoid, torch.sigmoid),
    "tanh": (gattn.Tanh, torch.tanh),
    "identity": (gattn.Identity, lambda x: x),
}
DISTRIBUTIONS: dict[str, Law] = {
    "softmax": Law(lambda t, types: "softmax", lambda z, t: softmax(z)),
    "sink": Law(lambda t, types: gattn.Softmax(t["sink"]), lambda z, t: softmax(z, t["sink"])),
    "softcap": Law(lambda t, types: gattn.Softmax(0.5, softcap=1.5), lambda z, t: softmax(cap(z, 1.5), 0.5)),
    **{name: gate(kind, function, None) for name, (kind, function) in GATES.items()},
    **{f"normalized {name}": gate(*parts, 0.0) for name, parts in GATES.items()},
    **{f"{name} and eps": gate(*parts, 0.25) for name, parts in GATES.items()},
    "sparsemax": Law(
        lambda t, types: "sparsemax",
        lambda z, t: above_threshold(z, 1).clamp_min(0.0),
        lambda z: above_threshold(z, 1).abs(),
    ),
    "entmax15": Law(
        lambda t, types: "entmax15",
        lambda z, t: above_threshold(z, 2).clamp_min(0.0).square(),
        lambda z: above_threshold(z, 2).abs(),
    ),
    "top 1": top(1),
    "top 2": top(2),
    "hard": Law(lambda t, types: gattn.Hard(sample=False), hard, top(1).margin),
    "gaussian": Law(
        lambda t, types: gattn.LocalGaussian(t["centres"], 3.0),
        lambda z, t: (
            softmax(z) * (-2 * ((t["source"] - t["centres"].unsqueeze(-1)) / 3.0).square()).exp().unsqueeze(-1)
        ),
    ),
    "within": Law(lambda t, types: gattn.WithinTypes(types), lambda z, t: softmax(z)),
    "gates within": Law(
        lambda t, types: gattn.WithinTypes(types, gattn.Sigmoid(True)),
        lambda z, t: normalized(gated(z, torch.sigmoid), 0.0),
        gate(*GATES["sigmoid"], 0.0).margin,
    ),
}

# --------------------------------------------------------------------------------------------------------------- cases


class Pairs(NamedTuple):
    """A graph as a list of pairs."""

    source: Tensor
    target: Tensor
    seen: Tensor | None
    """Which pairs are edges, `[..., E, 1]`."""
    given: Any
    """The graph as `attend` gets it."""


def random_list(draw: Draw, of_types: bool) -> tuple[Pairs, int, int, Tensor]:
    """A list of edges, M, N and the types of edges."""
    edge_index, sources, targets, kind = random_graph(draw)
    edge_index = edge_index[:, :100]
    self_loops, flow = not of_types and draw.maybe(0.25), draw.choice(FLOWS)
    edges = edge_index
    if self_loops:
        edges = add_self_loops(remove_self_loops(edge_index)[0], num_nodes=min(sources, targets))[0]
    types = draw.integers(3, edges.size(1))
    sizes = {"num_sources": sources, "num_targets": targets}
    given = in_flow(edge_index, sources, targets, flow, draw.choice(("int64", "int32", "strided", "EdgeIndex")), draw)
    if of_types and draw.maybe(0.5):
        graph: Any = TypedGraph(given, types, 3, flow=flow, **sizes)
    else:
        graph = SparseGraph(given, self_loops=self_loops, flow=flow, **sizes)
    draw.note(kind=kind)
    return Pairs(*edges, None, graph), sources, targets, types


def all_pairs(graph: CompleteGraph) -> Pairs:
    """Those of a complete graph, target by target; the last nodes of each block have the same position."""
    blocks = torch.tensor(graph.blocks or [(graph.num_targets, graph.num_sources)], dtype=torch.long).view(-1, 2)
    block, place = [], []
    for sizes in blocks.unbind(1):
        block.append(torch.arange(len(sizes)).repeat_interleave(sizes))
        place.append(torch.arange(int(sizes.sum())) - sizes.cumsum(0)[block[-1]])
    distance = place[1] - place[0].unsqueeze(1)
    left, right = graph.window or (torch.inf, torch.inf)
    seen = (distance >= -left) & (distance <= (0 if graph.causal else right)) & (block[0].unsqueeze(1) == block[1])
    target, source = torch.ones_like(seen).nonzero().unbind(1)
    seen = seen.flatten()
    for ends, lengths in ((source, graph.source_lengths), (target, graph.target_lengths)):
        if lengths is not None:
            seen = seen & (ends < lengths.unsqueeze(-1))
    return Pairs(source, target, seen.unsqueeze(-1), graph)


def random_listed(draw: Draw, pairs: Pairs, packed: bool, heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Pairs of a `SparseBias`, most of them listed several times, and their values."""
    among = pairs.given.edge_index if packed else torch.stack([pairs.source, pairs.target])
    count = draw.choice((0, 1, 5, 40)) if among.size(1) else 0
    chosen = among[:, draw.integers(among.size(1), count)]
    values = draw.grid(count, *draw.choice(((), (1,), (heads,)))) / 4
    if draw.maybe(0.5):  # large ones that cancel, between which half precision would lose the others
        large = torch.full_like(values, 256.0 if dtype in HALF else 4.0)
        chosen, values = chosen.repeat(1, 3), torch.cat([large, values, -large])
    return chosen, values.masked_fill(draw.booleans(*values.shape, share=draw.choice((0.0, 0.0, 0.1))), -torch.inf)


def formula(draw: Draw, alter: Alter) -> None:
    """One call: output, weights, gradients, and some second derivatives."""
    score, distribution = draw.choice(tuple(SCORES)), draw.choice(tuple(DISTRIBUTIONS))
    if "identity" in distribution and draw.maybe(0.5):
        score = "sum"
    form = draw.choice(("none", "none", "vectors", "features", "types"))
    is_list = form != "none" or "within" in distribution or draw.maybe(0.6)
    batch: tuple[int, ...] = draw.choice(((), (), (), (2,), (1, 2), (0,)))
    if is_list:
        pairs, sources, targets, types = random_list(draw, form == "types")
    else:
        graph = random_complete_graph(draw, batch)
        batch = batch[:1] if graph.blocks is not None else batch
        pairs, sources, targets = all_pairs(graph), graph.num_sources, graph.num_targets
        types = torch.empty(0, dtype=torch.long)
        if graph.blocks is not None and distribution == "gaussian":  # centres are those of whole sequences
            distribution = "softmax"
    source, target, seen, graph = pairs
    num_pairs, num_types = len(source), 3
    dtype = draw.choice((torch.float64, torch.float64, torch.float32, *HALF))
    is_scalar, is_exact = score in SCALAR, score == "sum" and "identity" in distribution
    grouped = SCORES[score][0]({"scale": torch.ones(()), "vector": torch.ones(1, 1)}).grouped
    heads = draw.choice((*(() if grouped else (0,)), 1, 1, 2, 3, 4, 6, 17))
    shared = draw.choice([g for g in range(1, heads + 1) if heads % g == 0]) if grouped else heads
    channels, value_channels = draw.choice((0, 1, 3, 4, 8, 16, 17)), draw.choice((0, 1, 3, 4, 8, 17))
    is_value = form != "none" and not is_scalar and draw.maybe(0.3)
    value_channels = channels if is_value else value_channels
    wide = () if is_scalar else (channels,)

    def coarse(*shape: int) -> Tensor:
        """Multiples of 1/4 if sums of logits are exact, so that they may cancel."""
        return draw.integers(9, *shape).double() / 4 - 1 if is_exact else draw.grid(*shape) / 4

    t = {
        "query": coarse(*batch, targets, heads, *wide),
        "key": coarse(*batch, sources, shared, *wide),
        "value": draw.grid(*batch, sources, shared, value_channels),
    }
    if is_scalar and draw.maybe(0.2):
        del t["query"]
    if form != "none":
        rows = {"vectors": (num_pairs, heads, *wide), "features": (num_pairs, 3), "types": (num_types, heads, *wide)}
        t["edge"] = coarse(*rows[form])
    if form == "features":
        t["edge_projection"] = projection((heads, *wide, 3), draw.generator, torch.bfloat16).double()
    if form == "vectors" and not is_value and draw.maybe(0.3):
        t["edge_value"] = draw.grid(num_pairs, heads, value_channels)
    law = DISTRIBUTIONS[distribution]
    packed = not is_list and graph.blocks is not None
    shape = (num_pairs, heads) if is_list else (*batch, heads, targets, sources)
    listed = None
    if draw.maybe(0.15):
        listed, t["listed"] = random_listed(draw, pairs, packed, heads, dtype)
    elif not packed and (draw.maybe(0.3) or (law.margin is not None and not is_exact)):
        bias = coarse(*shape) if is_exact else draw.normal(*shape)
        t["bias"] = bias.masked_fill(draw.booleans(*shape, share=draw.choice((0.0, 0.3))), -torch.inf)
    mask = draw.booleans(*shape, share=draw.random()) if not packed and draw.maybe(0.3) else None
    own = {"scale": (heads,), "vector": (heads, channels), "sink": (heads,), "centres": (targets,)}
    parts = {name: draw.normal(*draw.choice(((), size)) if name in ("scale", "sink") else size)
             for name, size in own.items()}  # fmt: skip
    parts["scale"], parts["centres"] = parts["scale"].abs() + 0.3, parts["centres"] * 3 + 3
    if score == "all at once":  # a product of zero, where a LeakyReLU has its bend, stays one
        parts["scale"] = parts["scale"].log2().round().exp2()
    t |= parts
    # Zero vectors, as multiples of others: the slope of a cosine there, 1e12, is left out of what is compared.
    zeros, share = {}, draw.choice((0.0, 0.3))
    for name in ("query", "key") if "cosine" in score else ():
        # Short vectors, too: their second derivatives cancel terms that are as large as one over their squared length.
        is_short = torch.linalg.vector_norm(t[name], dim=-1, keepdim=True) < 0.1
        is_zero = draw.booleans(*t[name].shape[:-1], 1, share=share) | is_short
        t[name] = t[name].masked_fill(is_zero, 0.25 if dtype == torch.float16 else 0.0)  # whose range ends before 1e12
        if dtype != torch.float16:
            zeros[name] = torch.where(is_zero, 1e-12, 1.0).double()
    t = {name: x.to(dtype).double() for name, x in t.items()}
    second = dtype == torch.float64 and num_pairs * heads * max(channels, value_channels) < 2000 and draw.maybe(0.5)
    backends = ["auto", "auto", "cpu", "reference"]
    if not is_list and (not packed or distribution == "softmax"):
        backends += ["dense", "dense"]
    backend = draw.choice(backends)
    draw.note(
        graph=graph, score=score, distribution=distribution, form=form, is_value=is_value, batch=batch, dtype=dtype,
        shapes={name: list(x.shape) for name, x in t.items()}, mask=mask is not None, zeros=list(zeros),
        second=second, backend=backend, listed=listed,
    )  # fmt: skip
    if "within" in distribution:
        row, num_rows = target * num_types + types, targets * num_types
    else:
        row, num_rows = target, targets
    member = (row == torch.arange(num_rows).unsqueeze(1)).unsqueeze(-1) if is_list else None
    constants = {"source": source if is_list else torch.arange(sources)}

    def spread(z: Tensor) -> Tensor:
        if member is None:
            return z.unflatten(-2, (targets, sources))
        return z.unsqueeze(-3).masked_fill(~member, -torch.inf)

    def logits(t: Tensors) -> Tensor:
        key = t["key"].repeat_interleave(heads // max(shared, 1), -1 if is_scalar else -2)
        nodes = -2 if is_scalar else -3
        edge: Any = 1.0 if score in MULTIPLIED else 0.0
        edge = edge_term(t) if form != "none" else edge
        query: Any = t["query"].index_select(nodes, target) if "query" in t else 0.0
        z = SCORES[score][1](query, key.index_select(nodes, source), edge, t)
        if "bias" in t:
            z = z + (t["bias"] if is_list else t["bias"].flatten(-2).transpose(-1, -2))
        if listed is not None:
            values = t["listed"] if t["listed"].dim() == 2 else t["listed"].unsqueeze(1)
            sums = values.new_zeros(targets, sources, values.size(1)).index_put((listed[1], listed[0]), values, True)
            z = z + sums[target, source]
        for allowed in (seen, mask if mask is None or is_list else mask.flatten(-2).transpose(-1, -2)):
            z = z if allowed is None else z.masked_fill(~allowed, -torch.inf)
        return spread(z)

    def edge_term(t: Tensors) -> Tensor:
        if form == "features":
            return torch.einsum("ed,h...d->eh...", t["edge"], t["edge_projection"])
        return t["edge"][types] if form == "types" else t["edge"]

    needs_margin = law.margin is not None and not is_exact and batch != (0,) and num_pairs * heads > 0
    if needs_margin and float(law.margin(logits(t)).nan_to_num(torch.inf).amin()) < 1e-4:
        law = DISTRIBUTIONS["within" if "within" in distribution else "softmax"]
        draw.note(distribution="softmax, as what was drawn has no clear answer")

    def by_formula(t: Tensors) -> Results:
        weights = logits(t)
        weights = law.weights(weights, t | constants) if weights.numel() else weights
        alpha = weights.flatten(-3, -2) if member is None else weights.sum(-3)
        value = t["value"].repeat_interleave(heads // max(shared, 1), -2).index_select(-3, source)
        if is_value or "edge_value" in t:
            value = value + (edge_term(t) if is_value else t["edge_value"])
        sent = alpha.unsqueeze(-1) * value
        out = sent.new_zeros(*batch, targets, heads, value_channels).index_add(-3, target, sent)
        if is_list:
            return {"out": out, "weights": alpha}
        matrix = weights.movedim(-1, -3)
        if graph.blocks is None:
            return {"out": out, "weights": matrix}
        found, i, j = {"out": out}, 0, 0
        for number, (n, m) in enumerate(graph.blocks):
            found[f"weights of block {number}"] = matrix[..., i : i + n, j : j + m]
            i, j = i + n, j + m
        return found

    def run(dtype: torch.dtype, exact: bool) -> Results:
        leaves = {name: x.to(dtype).requires_grad_() for name, x in t.items()}
        given = {name: x * zeros[name].to(dtype) if name in zeros else x for name, x in leaves.items()}
        if exact:
            compute = torch.float64 if dtype == torch.float64 else torch.float32
            outputs = by_formula({name: x.to(compute) for name, x in given.items()})
            outputs = {name: x.to(dtype) for name, x in outputs.items()}
        else:
            if is_value:
                given["edge_value"] = given["edge"]
            if listed is not None:
                given["bias"] = SparseBias(listed, given.pop("listed"))
            plain = {name: x for name, x in given.items() if name not in own}
            found = attend(
                **{"query": None} | with_terms(plain, types if form == "types" else None),
                graph=graph,
                score=SCORES[score][0](given),
                distribution=law.make(given, types),
                mask=mask,
                return_weights=True,
                backend=backend,
            )
            outputs = named(found)
        return with_gradients(outputs, leaves, draw.case, second=second)

    # PyTorch's fused attention rounds weights to half precision before it sums values.
    fused = not is_list and backend in ("auto", "dense") and dtype in HALF and score in FUSED
    compare_types(run, dtype, num_pairs * max(channels, 1), alter, rounds_terms=fused)
