"""Calls of `attend` by the tensors that they have besides query, key and value."""

from itertools import product

import torch

import gattn
from gattn import BucketBias, CompleteGraph, DotScore, Projected, SparseBias, SparseGraph, Typed

N, E, H, C, D, TYPES = 120, 6000, 2, 4, 3, 2


class Products(gattn.Score):
    """A score that no kernel knows, with a tensor of its own."""

    broadcasts = True

    def __init__(self, factor):
        self.factor = factor

    def logits(self, query, key, edge):
        return (query * key * self.factor).sum(-1) + (0 if edge is None else edge.sum(-1))

    def tensors(self):
        return (self.factor,)

    def to(self, dtype):
        return Products(self.factor.to(dtype))


class OfNodes(gattn.Bias):
    """A bias of one's own: u_i + w_j in all heads."""

    def __init__(self, u, w):
        self.u, self.w = u, w

    def tensors(self):
        return self.u, self.w

    def with_tensors(self, tensors):
        return OfNodes(*tensors)

    def rows(self, start, stop):
        return (self.u[start:stop, None] + self.w).unsqueeze(0)


class Shares(gattn.Distribution):
    """A distribution that no kernel knows: squares, divided by their sum."""

    respects_infinity = True

    def weights(self, logits, index, num_targets, dim):
        squares = logits.masked_fill(logits == -torch.inf, 0.0).square()
        size = list(squares.shape)
        size[dim] = num_targets
        total = squares.new_zeros(size).index_add(dim, index, squares)
        return squares / total.clamp_min(1e-6).index_select(dim, index)


def near(target, source):
    return (target - source).abs().clamp(max=TYPES - 1)


def edges():
    """Every node has edges, and the first one is a hub of half of them, both ways."""
    source, target = torch.randint(0, N, (2, E), generator=torch.Generator().manual_seed(0))
    source[: E // 4], target[E // 4 : E // 2] = 0, 0
    return torch.stack([source, target])


PAIRS, TYPE, BUCKETS = edges(), torch.arange(E) % TYPES, (torch.arange(N).unsqueeze(1) * torch.arange(N)) % TYPES
LISTED = torch.cat([PAIRS[:, :3000]] * 2, 1)  # each pair twice

#: What a call has besides query, key and value, given tensors of the leaves' type.
TERMS = {
    "nothing": ({}, lambda: {}),
    "vector": ({"vector": (H, C)}, lambda vector: {"score": gattn.AdditiveScore(vector)}),
    "scale": ({"scale": (H,)}, lambda scale: {"score": DotScore(scale)}),
    "own score": ({"factor": (C,)}, lambda factor: {"score": Products(factor)}),
    "edge": ({"edge": (E, H, C)}, lambda edge: {"edge": edge}),
    "edge and value": ({"edge": (E, H, C)}, lambda edge: {"edge": edge, "edge_value": True}),
    "multiplied edge": ({"edge": (E, H, C)}, lambda edge: {"edge": edge, "score": DotScore(edge="multiply")}),
    "own score, edge": (
        {"factor": (C,), "edge": (E, H, C)},
        lambda factor, edge: {"score": Products(factor), "edge": edge},
    ),
    "projected": (
        {"features": (E, D), "weight": (H, C, D)},
        lambda features, weight: {"edge": Projected(features, weight), "edge_value": True},
    ),
    "projected value": (
        {"features": (E, D), "weight": (H, C, D)},
        lambda features, weight: {"edge_value": Projected(features, weight)},
    ),
    "typed": ({"table": (TYPES, H, C)}, lambda table: {"edge": Typed(table, TYPE), "edge_value": True}),
    "typed value": ({"table": (TYPES, H, C)}, lambda table: {"edge_value": Typed(table, TYPE)}),
    "out_bias": ({"out_bias": (H, C)}, lambda out_bias: {"out_bias": out_bias}),
    "sink": ({"sink": (H,)}, lambda sink: {"distribution": gattn.Softmax(sink=sink)}),
    "bias of edges": ({"bias": (E, 1)}, lambda bias: {"bias": bias.expand(-1, H)}),
    "bias of pairs": ({"bias": (N, 1)}, lambda bias: {"bias": bias.expand(H, N, N)}),
    "sparse bias": ({"values": (6000, H)}, lambda values: {"bias": SparseBias(LISTED, values)}),
    "sparse bias of all heads": ({"values": (6000,)}, lambda values: {"bias": SparseBias(LISTED, values)}),
    "buckets": ({"table": (TYPES, H)}, lambda table: {"bias": BucketBias(BUCKETS, table)}),
    "buckets by function": ({"table": (TYPES, H)}, lambda table: {"bias": BucketBias(near, table)}),
    "own bias": ({"u": (N,), "w": (N,)}, lambda u, w: {"bias": OfNodes(u, w)}),
}
OF_EDGES = {
    name for name, (leaves, _) in TERMS.items() if any(E in size for size in leaves.values()) and "bias" not in name
}
OF_EDGES |= {"typed", "typed value", "bias of edges"}

LISTS = {"list": SparseGraph(PAIRS, N, N)}
DENSE = {
    "complete": CompleteGraph(N),
    "causal": CompleteGraph(N, causal=True),
    "window": CompleteGraph(N, window=50),
    "packed": CompleteGraph.packed([N]),
    "two blocks": CompleteGraph.packed([N // 2, N // 2]),
    "small blocks": CompleteGraph.packed([8] * (N // 8)),
}
LAWS = ("softmax", "sigmoid", gattn.Identity(), gattn.Identity(normalize=True), Shares())


def cases():
    for name in TERMS:
        graphs = LISTS if name in OF_EDGES else DENSE if name == "bias of pairs" else LISTS | DENSE
        for graph in graphs:
            blocks = graph in ("two blocks", "small blocks")
            if blocks and name in ("bias of pairs", "sparse bias", "sparse bias of all heads", "buckets", "own bias"):
                continue
            laws = ("softmax",) if name == "sink" else LAWS
            yield from product([name], [graph], laws)


def draw(name):
    """Positive numbers for the inputs of a call, by name."""
    sizes = dict.fromkeys(("query", "key", "value"), (N, H, C)) | TERMS[name][0]
    return {leaf: torch.rand(size) / 2 + 0.25 for leaf, size in sizes.items()}


def attend(name, graph, law, leaves, batch=()):
    """The output of a call."""
    sizes, options = TERMS[name]
    terms = options(**{leaf: leaves[leaf] for leaf in sizes})
    q, k, v = (leaves[x].expand(*batch, N, H, C) for x in ("query", "key", "value"))
    return gattn.attend(q, k, v, (LISTS | DENSE)[graph], **({"distribution": law} | terms))
