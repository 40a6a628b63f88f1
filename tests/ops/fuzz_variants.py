"""Variants of scores, other distributions and terms of edges by type; and the layers that are made of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

import gattn
from gattn import (
    AdditiveScore,
    CosineScore,
    Distribution,
    DotScore,
    GATScore,
    Score,
    SparseGraph,
    aggregate,
    attend,
    weigh,
)
from gattn import nn as layers
from tests.cases import Alter, Results, with_terms
from tests.ops.fuzz_shared import FLOWS, Draw, compare_types, in_csr_order, random_graph, with_gradients

#: Made from a vector of each head.
SCORES: dict[str, Callable[[Tensor], Score]] = {
    **{name: lambda vector, name=name: AdditiveScore(vector, name) for name in ("elu", "gelu", "silu", "tanh", "relu")},
    "multiplied": lambda vector: DotScore(edge="multiply"),
    "clamped": lambda vector: DotScore(0.5, clamp=1.0009),
    "all at once": lambda vector: DotScore(0.5, 0.3, edge="multiply", clamp=0.7001),  # exact beside the bend
    "cosine": lambda vector: CosineScore(vector[:, 0]),
    "gat": lambda vector: GATScore(0.1),
}
#: Made from the types of edges.
DISTRIBUTIONS: dict[str, Callable[[Tensor], str | Distribution]] = {
    "softmax": lambda types: "softmax",
    "sigmoid": lambda types: "sigmoid",
    "sparsemax": lambda types: "sparsemax",
    "entmax15": lambda types: "entmax15",
    "top": lambda types: gattn.TopK(2),
    "within": lambda types: gattn.WithinTypes(types),
}


def variant(draw: Draw, alter: Alter) -> None:
    """One call: output, weights, logits and gradients."""
    edge_index, sources, targets, kind = random_graph(draw)
    num_edges, num_types = edge_index.size(1), draw.randint(1, 5)
    score, distribution = draw.choice(tuple(SCORES)), draw.choice(tuple(DISTRIBUTIONS))
    form = draw.choice(("none", "vectors", "features", "types"))
    heads, channels = draw.choice((1, 2, 3, 8, 17)), draw.choice((1, 3, 8, 16, 33))
    batch = draw.choice(((), (), (2,)))
    wide = () if score == "gat" else (channels,)
    tensors = {
        "query": draw.grid(*batch, targets, heads, *wide) / 4,
        "key": draw.grid(*batch, sources, heads, *wide) / 4,
        "value": draw.grid(*batch, sources, heads, channels),
        "vector": draw.normal(heads, channels) / channels**0.5,
    }
    if form != "none":
        rows = {"vectors": (num_edges, heads, *wide), "features": (num_edges, 3), "types": (num_types, heads, *wide)}
        tensors["edge"] = draw.grid(*rows[form]) / 4
    if form == "features":
        tensors["edge_projection"] = draw.grid(heads, *wide, 3) / 4
    if score == "cosine":  # whose slope at zero is without bounds
        tensors |= {name: tensors[name] + 1 / 256 for name in ("query", "key")}
    # Off the grid: ties of edges, or differences of 1, are where sparse distributions jump or have no derivative.
    if draw.maybe(0.4) or distribution in ("sparsemax", "entmax15", "top"):
        dead = draw.booleans(num_edges, heads, share=draw.choice((0.0, 0.3)))
        tensors["bias"] = draw.normal(num_edges, heads).masked_fill(dead, -torch.inf)
    types, flow = draw.integers(num_types, num_edges), draw.choice(FLOWS)
    is_value = form != "none" and score != "gat" and draw.maybe(0.4)
    mask = draw.booleans(num_edges, share=0.8) if draw.maybe(0.3) else None
    dropout = draw.choice((0.0, 0.0, 0.4))
    returns_logits = draw.maybe(0.3)
    draw.note(
        graph=kind, score=score, distribution=distribution, form=form, is_value=is_value, dropout=dropout, flow=flow,
        shapes={name: list(x.shape) for name, x in tensors.items()}, mask=mask is not None, logits=returns_logits,
    )  # fmt: skip
    graph = SparseGraph(edge_index if flow == FLOWS[0] else edge_index.flip(0), targets, sources, flow=flow)

    def run(dtype: torch.dtype, reference: bool) -> Results:
        leaves = {name: tensor.to(dtype).requires_grad_() for name, tensor in tensors.items()}
        given = {name: leaves[name] for name in leaves if name != "vector"}
        if is_value:
            given["edge_value"] = given["edge"]
        given = with_terms(given, types if form == "types" else None)
        torch.manual_seed(draw.case)
        backend = "reference" if reference else draw_backend
        options = {"graph": graph, "score": SCORES[score](leaves["vector"]), "mask": mask, "backend": backend}
        law = DISTRIBUTIONS[distribution](types)
        made = {"dropout": dropout, "training": True}
        out, weights = attend(**given, **options, **made, distribution=law, return_weights=True)
        outputs = {"out": out, "weights": weights}
        if returns_logits:  # those of minus infinity show in the weights
            ends = {name: term for name, term in given.items() if name not in ("value", "edge_value")}
            logits = weigh(**ends, **options, distribution=None)
            outputs["logits"] = logits.masked_fill(logits == -torch.inf, 0.0)
            if draw.case % 2:  # the two halves of what `attend` does at once
                weights = weigh(**ends, **options, distribution=law)
                torch.manual_seed(draw.case)
                edge_value = given["edge"] if given.get("edge_value") is True else given.get("edge_value")
                halves = {"edge_value": edge_value, "backend": backend}
                outputs["halves"] = aggregate(weights, given["value"], graph, **halves, **made)
        return with_gradients(outputs, leaves, draw.case)

    draw_backend = draw.choice(("auto", "cpu"))
    compare_types(run, torch.float64, num_edges * max(channels, 1), alter)


#: Layers: made of channels and heads; what they take beside features and edges, given sizes and types.
CONVS: dict[str, tuple[Callable[[int, int], Module], Callable[..., dict[str, Any]]]] = {
    "AGNN": (lambda c, h: layers.AGNNConv(), lambda **given: {}),
    "FA": (lambda c, h: layers.FAConv(c, eps=0.2), lambda x, **given: {"x_0": x.flip(0)}),
    "ResGated": (lambda c, h: layers.ResGatedGraphConv(c, c + 1), lambda **given: {}),
    "SuperGAT MX": (lambda c, h: layers.SuperGATConv(c, 3, h), lambda **given: {}),
    "SuperGAT SD": (lambda c, h: layers.SuperGATConv(c, 3, h, attention_type="SD"), lambda **given: {}),
    "GATE": (lambda c, h: layers.GATEConv(c, c, 3), lambda features, **given: {"edge_attr": features}),
    "GatedGCN": (
        lambda c, h: layers.GatedGCNConv(c, 3, c, batch_norm=False),
        lambda features, **given: {"edge_attr": features},
    ),
    "EGAT": (lambda c, h: layers.EGATConv(c, 3, 4, 2, h), lambda features, **given: {"edge_attr": features}),
    "General": (
        lambda c, h: layers.GeneralConv(c, 4 * h, 3, attention=True, heads=h),
        lambda features, **given: {"edge_attr": features},
    ),
    "HEAT": (
        lambda c, h: layers.HEATConv(c, 4, 3, 3, 2, 3, 2, heads=h),
        lambda features, nodes, edges, **given: {"node_type": nodes, "edge_type": edges, "edge_attr": features},
    ),
    "RGAT": (
        lambda c, h: layers.RGATConv(c, 4, 3, heads=h, edge_dim=3),
        lambda features, edges, **given: {"edge_type": edges, "edge_attr": features},
    ),
    "RGAT within": (
        lambda c, h: layers.RGATConv(
            c, 4, 3, heads=h, attention_mechanism="within-relation", attention_mode="multiplicative-self-attention"
        ),
        lambda edges, **given: {"edge_type": edges},
    ),
}  # fmt: skip


def conv(draw: Draw, alter: Alter) -> None:
    """One layer: output, and gradients of features and parameters."""
    edge_index, sources, targets, kind = random_graph(draw)
    nodes = max(sources, targets, 1)
    edge_index = in_csr_order(edge_index)
    name, channels, heads = draw.choice(tuple(CONVS)), draw.randint(1, 9), draw.choice((1, 2, 4))
    make, more = CONVS[name]
    torch.manual_seed(draw.case)
    module = make(channels, heads).double()
    x, features = draw.normal(nodes, channels), draw.normal(edge_index.size(1), 3)
    types = {"nodes": draw.integers(3, nodes), "edges": draw.integers(3, edge_index.size(1))}
    draw.note(conv=name, graph=kind, nodes=nodes, edges=edge_index.size(1), channels=channels, heads=heads)

    def run(dtype: torch.dtype, reference: bool) -> Results:
        layer = copy.deepcopy(module).to(dtype)
        leaves = {"x": x.to(dtype).requires_grad_(), "features": features.to(dtype).requires_grad_()}
        given = more(x=leaves["x"], features=leaves["features"], **types)
        torch.manual_seed(draw.case)
        with gattn.backend("reference" if reference else "auto"):
            found = layer(leaves["x"], edge_index=edge_index, **given)
        outputs = dict(zip(("out", "edges"), found if isinstance(found, tuple) else (found,), strict=False))
        return with_gradients(outputs, leaves | dict(layer.named_parameters()), draw.case)

    compare_types(run, torch.float64, edge_index.size(1) * channels, alter)
