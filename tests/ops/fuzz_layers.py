"""Layers with random options, on graphs of every form and flow, against the reference on the same edges."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.typing import WITH_TORCH_SPARSE

import gattn
from gattn import CompleteGraph, SparseGraph
from gattn.nn import (
    ALiBi,
    GATConv,
    GATv2Conv,
    GPSConv,
    MultiheadAttention,
    RelativePositionBias,
    RotaryPositionalEncoding,
    TransformerConv,
)
from tests.cases import Alter, Results
from tests.ops.fuzz_sequences import named, random_complete_graph
from tests.ops.fuzz_shared import (
    FLOWS,
    Draw,
    compare_types,
    in_csr_order,
    in_flow,
    random_graph,
    stored,
    with_gradients,
)

SPARSE_FORMS = ("csr", *(("SparseTensor",) if WITH_TORCH_SPARSE else ()))
FORMS = ("int64", "int64", "int32", "strided", "EdgeIndex", *SPARSE_FORMS)

#: Computes with a layer, features by name, and the edges plainly given (True) or not.
Compute = Callable[[Module, Results, bool], Results]


def layer(draw: Draw, alter: Alter) -> None:
    """One layer: output, weights, and gradients of features and parameters."""
    kind = draw.choice((GATConv, GATv2Conv, TransformerConv, MultiheadAttention, GPSConv))
    draw.note(layer=kind.__name__)
    makers = {MultiheadAttention: multihead_attention, GPSConv: gps_conv}
    tested, plain, features, compute, num_edges = makers.get(kind, graph_layer)(draw, kind)
    values = [draw.normal(*parameter.shape) / 2 for parameter in tested.parameters()]
    for module in (tested, plain):
        module.double().train(tested.training)
        with torch.no_grad():
            for parameter, value in zip(module.parameters(), values, strict=True):
                parameter.copy_(value)
    backend = draw.choice(("auto", "auto", "auto", "reference"))
    draw.note(backend=backend, module=tested, shapes={name: list(x.shape) for name, x in features.items()})

    def run(dtype: torch.dtype, reference: bool) -> Results:
        module = copy.deepcopy(plain if reference else tested).to(dtype)
        leaves = {name: x.to(dtype).detach().requires_grad_() for name, x in features.items()}
        torch.manual_seed(draw.case)  # for dropout
        with gattn.backend("reference" if reference else backend):
            outputs = compute(module, leaves, reference)
            return with_gradients(outputs, leaves | dict(module.named_parameters()), draw.case)

    compare_types(run, torch.float64, num_edges, alter)


def graph_layer(draw: Draw, kind: Any) -> tuple[Module, Module, Results, Compute, int]:
    """A layer over edges, its twin for the edges plainly given, features, how to call them, and the number of edges."""
    edge_index, num_sources, num_targets, _ = random_graph(draw)
    form = draw.choice((*FORMS, "complete"))
    flows = [FLOWS[0], FLOWS[0]]  # the graph's and the layer's
    wrapped = draw.maybe(0.4)
    if form not in (*SPARSE_FORMS, "complete"):
        flows = [draw.choice(FLOWS), draw.choice(FLOWS)]
        flows = flows if wrapped else [flows[1]] * 2
    if form in SPARSE_FORMS:
        edge_index = in_csr_order(edge_index)
    loops = kind is not TransformerConv and draw.maybe(0.6)

    heads, channels = draw.choice((1, 1, 2, 3, 4, 8)), draw.choice((1, 2, 3, 4, 8, 9, 17))
    widths = (draw.randint(1, 8), draw.randint(1, 8))
    paired = num_sources != num_targets or draw.maybe(0.4)
    if not paired or draw.maybe(0.3):
        widths = widths[:1] * 2
    in_channels = widths if paired and (widths[0] != widths[1] or draw.maybe(0.5)) else widths[0]
    no_targets = kind is GATConv and paired and draw.maybe(0.15)
    edge_dim = None if draw.maybe(0.5) else draw.randint(1, 4)
    graph: Any = None
    if form == "complete":
        graph = CompleteGraph(
            num_targets, num_sources, causal=draw.maybe(0.3), window=draw.choice((None, None, (2, 1)))
        )
        edge_index = graph.edge_index
        loops = loops and num_targets == num_sources
    interleaved = loops and form in SPARSE_FORMS  # loops lie among the other edges, as PyG has it
    if interleaved:
        edge_dim = None  # gattn refuses features beside a sparse adjacency to which loops are added
    training = draw.maybe(0.3)
    options: dict[str, Any] = {
        "heads": heads,
        "concat": draw.maybe(0.5),
        "edge_dim": edge_dim,
        "bias": draw.maybe(0.5),
        "dropout": 0.0 if form == "complete" or interleaved else draw.choice((0.0, 0.3, 0.6)),
        "value_dropout": draw.choice((0.0, 0.0, 0.4)),
    }
    fill = draw.choice(("mean", "add", "min", "max", "mul", 0.5))
    if kind is TransformerConv:
        options |= {"beta": draw.maybe(0.3), "root_weight": draw.maybe(0.7)}
    else:
        options |= {"negative_slope": draw.choice((0.2, 0.0, 1.5)), "add_self_loops": loops, "fill_value": fill}
        options["residual"] = draw.maybe(0.3) and not no_targets
    if kind is GATv2Conv:
        options["share_weights"] = widths[0] == widths[1] and draw.maybe(0.4)

    # With a bare edge_index, a layer's own flow says which edges' features make those of a loop.
    as_pyg = not wrapped and flows[1] != FLOWS[0] and loops and edge_dim is not None and isinstance(fill, str)
    tested = kind(in_channels, channels, flow=flows[1], **options).train(training)
    plain = kind(in_channels, channels, flow=flows[1] if as_pyg else FLOWS[0], **options)
    batch = draw.choice(((), (), (), (2,), (0,), (1,), (2, 3)))
    weights = draw.maybe(0.5) and not (interleaved or (form in SPARSE_FORMS and batch) or form == "SparseTensor")
    draw.note(graph=graph or form, flows=flows, wrapped=wrapped, nodes=(num_sources, num_targets))
    draw.note(edges=edge_index.size(1), options=options, training=training, weights=weights, no_targets=no_targets)

    features = {"x": stored(draw.normal(*batch, num_sources, widths[0]), draw)}
    if paired and not no_targets:
        features["targets"] = stored(draw.normal(*batch, num_targets, widths[1]), draw)
    if edge_dim is not None:
        flat = edge_dim == 1 and draw.maybe(0.5)
        edge_attr = draw.normal(edge_index.size(1), *(() if flat else (edge_dim,)))
        edge_attr = edge_attr.clamp(-1, 1) if fill == "mul" else edge_attr  # products of many would be huge
        features["edge_attr"] = stored(edge_attr, draw)
    tested_graph = plain_graph = graph
    if graph is None:
        sizes = (num_sources, num_targets) if wrapped or draw.maybe(0.5) else ()
        tested_graph = in_flow(edge_index, num_sources, num_targets, flows[0], form, draw)
        if wrapped:
            tested_graph = SparseGraph(tested_graph, *sizes[::-1], flow=flows[0])
        plain_graph = edge_index.flip(0) if as_pyg else edge_index

    def compute(module: Module, given: Results, plainly: bool) -> Results:
        pair = given["x"], given.get("targets")
        more: dict[str, Any] = {"edge_attr": given.get("edge_attr")}
        flow = flows[0] if not plainly or as_pyg else FLOWS[0]
        if no_targets:
            more["size"] = (num_sources, num_targets)[:: 1 if flow == FLOWS[0] else -1]
        result = module(
            pair if paired else pair[0],
            plain_graph if plainly else tested_graph,
            return_attention_weights=True if weights else None,
            **more,
        )
        if not weights:
            return {"out": result}
        out, (edges, alpha) = result
        if isinstance(edges, Tensor) and edges.layout == torch.strided:
            edges = edges if flow == FLOWS[0] else edges.flip(0)
            draw.notes.setdefault("edges returned", edges.tolist())
            assert edges.tolist() == draw.notes["edges returned"], "the edges returned differ"
        return {"out": out, "weights": alpha}

    return tested, plain, features, compute, edge_index.size(1)


def multihead_attention(draw: Draw, kind: Any) -> tuple[Module, Module, Results, Compute, int]:
    """Multi-head attention, over any graph or none, under any mask."""
    heads = draw.choice((1, 2, 3, 4))
    channels = heads * draw.choice((2, 4, 6))
    batch = draw.choice(((), (2,), (3,), (1,), (0,)))
    form = draw.choice(("none", "none", "complete", "complete", *FORMS))
    graph: Any = None
    plain_graph: Any = None
    if form in FORMS:
        edge_index, m, n, _ = random_graph(draw)
        flow = FLOWS[0] if form in SPARSE_FORMS else draw.choice(FLOWS)
        plain_graph = edge_index = in_csr_order(edge_index) if form in SPARSE_FORMS else edge_index
        graph = in_flow(edge_index, m, n, flow, form, draw)
        if flow != FLOWS[0] or draw.maybe(0.3):
            graph = SparseGraph(graph, num_sources=m, num_targets=n, flow=flow)
    else:
        complete = random_complete_graph(draw, batch)
        n, m = complete.num_targets, complete.num_sources
        graph = plain_graph = complete if form == "complete" else None
    packed = graph is not None and form == "complete" and graph.blocks is not None
    own = n == m and draw.maybe(0.5)

    options: dict[str, Any] = {
        "bias": draw.maybe(0.7),
        "batch_first": draw.maybe(0.5),
        "num_kv_heads": draw.choice([g for g in range(1, heads + 1) if heads % g == 0]),
        "qk_norm": draw.maybe(0.2),
        "dropout": draw.choice((0.0, 0.4)) if form in FORMS else 0.0,
    }
    widths = (channels, channels, channels)
    if not own and draw.maybe(0.3):
        widths = (channels, draw.randint(1, 5), draw.randint(1, 5))
        options |= {"kdim": widths[1], "vdim": widths[2]}
    if form not in FORMS and not packed and draw.maybe(0.3):
        options |= {"add_bias_kv": draw.maybe(0.5), "add_zero_attn": draw.maybe(0.5)}
    elif draw.maybe(0.3):
        positions = (RotaryPositionalEncoding(channels // heads), ALiBi(heads), RelativePositionBias(heads, 3))
        options["position"] = draw.choice(positions)
    masks: dict[str, Any] = {}
    if draw.maybe(0.3):
        per_head = draw.maybe(0.4) and not (packed and batch)
        shape = (batch[0] * heads if batch else heads, n, m) if per_head else (n, m)
        masks["attn_mask"] = random_mask(draw, *shape)
    if draw.maybe(0.3) and not (packed and batch):
        masks["key_padding_mask"] = random_mask(draw, *batch, m)
        if draw.maybe(0.5):
            real = draw.integers(m + 1, *batch).unsqueeze(-1)
            masks["key_padding_mask"] = torch.arange(m) >= real
    flags = {"is_causal": draw.maybe(0.25), "need_weights": draw.maybe(0.6), "average_attn_weights": draw.maybe(0.5)}
    training = draw.maybe(0.3)
    draw.note(graph=graph if form == "complete" else form, nodes=(n, m), options=options, flags=flags, own=own)
    draw.note(masks={name: (list(mask.shape), mask.dtype) for name, mask in masks.items()}, training=training)
    if form == "complete":
        draw.note(blocks=graph.blocks, source_lengths=graph.source_lengths, target_lengths=graph.target_lengths)

    def shape(count: int, width: int) -> tuple[int, ...]:
        return (*batch, count, width) if options["batch_first"] or not batch else (count, *batch, width)

    features = {"query": stored(draw.normal(*shape(n, widths[0])), draw)}
    if not own:
        features["key"] = stored(draw.normal(*shape(m, widths[1])), draw)
        if widths[1] != widths[2] or draw.maybe(0.5):
            features["value"] = stored(draw.normal(*shape(m, widths[2])), draw)
    tested, plain = (kind(channels, heads, **copy.deepcopy(options)).train(training) for _ in range(2))

    def compute(module: Module, given: Results, plainly: bool) -> Results:
        key = given.get("key", given["query"])
        terms = {name: m if m.dtype == torch.bool else m.to(key.dtype) for name, m in masks.items()}
        value = given.get("value", key)
        result = module(given["query"], key, value, graph=plain_graph if plainly else graph, **terms, **flags)
        return named(result)

    return tested, plain, features, compute, n * m


def random_mask(draw: Draw, *shape: int) -> Tensor:
    """Booleans (True = may not attend), or numbers, of which some may be minus infinity."""
    dead = draw.booleans(*shape, share=draw.random())
    kind = draw.choice(("bool", "float", "both"))
    if kind == "bool":
        return dead
    return draw.normal(*shape).masked_fill(dead & (kind == "both"), -torch.inf)


def gps_conv(draw: Draw, kind: Any) -> tuple[Module, Module, Results, Compute, int]:
    """Edges of several graphs, and attention within each."""
    edge_index, m, n, _ = random_graph(draw)
    nodes = max(m, n)
    heads, channels = draw.choice(((1, 4), (2, 6), (4, 8)))
    conv = draw.choice((None, GATConv, GATv2Conv, TransformerConv))
    flow = draw.choice(FLOWS)
    norm = draw.choice((None, "layer_norm")) if nodes else None  # PyG's own fail without a node
    tested, plain = (
        kind(channels, None if conv is None else conv(channels, channels // heads, heads, flow=f), heads, norm=norm)
        for f in (flow, FLOWS[0])
    )
    batch = None if draw.maybe(0.3) else draw.integers(draw.randint(1, 5), nodes).sort()[0]
    draw.note(nodes=nodes, edges=edge_index.size(1), conv=conv, flow=flow, norm=norm, batch=batch)
    given_edges = edge_index if flow == FLOWS[0] else edge_index.flip(0)

    def compute(module: Module, given: Results, plainly: bool) -> Results:
        return {"out": module(given["x"], edge_index if plainly else given_edges, batch)}

    return tested, plain, {"x": draw.normal(nodes, channels)}, compute, nodes**2
