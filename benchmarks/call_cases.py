"""The calls of `benchmarks.calls`: small inputs, and both sides of each comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.utils import to_dense_batch

import gattn
from benchmarks.framework.measuring import Computation

SEED = 0
NODES, TOKENS, DECODED = 10, 16, 32
HEADS, CHANNELS = 8, 8
WIDTH = HEADS * CHANNELS
SIZES = {"in_channels": WIDTH, "out_channels": CHANNELS, "heads": HEADS}
STEP_SIZES = {"in_channels": WIDTH, "out_channels": 16, "heads": 4}
MOLECULES, MANY_MOLECULES, ATOMS, RINGS, BOND_CHANNELS = 32, 256, (12, 28), 2, 16
SOURCES, TARGETS, FANOUT = 3000, 512, 10
SEEDS, EXPANDED, REACHED = 1024, 7800, 30_000
LAYERS, CLASSES = 3, 10
TGN_EDGES = (200, 400, 600)
_NUMBERS = count()
TGN = {"in_channels": 100, "out_channels": 50, "heads": 2, "edge_dim": 172}


class Built(NamedTuple):
    """One side of a comparison."""

    computation: Computation
    terms: int
    """The number of terms that an element of the output sums."""
    parameter_terms: int
    """The number of terms that an element of a parameter's gradient sums."""
    units: int = 1
    """Times are divided by this number."""


class Draw:
    """Draws the same numbers for both sides and all dtypes."""

    def __init__(self, dtype: torch.dtype):
        self.generator, self.dtype = torch.Generator().manual_seed(SEED), dtype

    def randn(self, *size: int) -> Tensor:
        """Normal numbers, which need a gradient."""
        return torch.randn(size, generator=self.generator).to(self.dtype).requires_grad_()

    def integers(self, low: int, high: int, *size: int) -> Tensor:
        """Integers from the first to the second number, both included."""
        return torch.randint(low, high + 1, size, generator=self.generator)

    def module(self, is_ours: bool, make: Callable[[Any], torch.nn.Module], peer: Any = pyg) -> Any:
        """The module from gattn or from its peer, with the same weights, in evaluation mode."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(SEED)
            ours, theirs = make(gattn.nn), make(peer)
        for name, parameter in theirs.named_parameters():
            if name.endswith("bias"):  # zeros would hide mistakes with biases
                parameter.data.normal_(std=0.1, generator=self.generator)
        ours.load_state_dict(theirs.state_dict())
        module = (ours if is_ours else theirs).to(self.dtype).eval()
        if type(module) is Network:
            module.__class__ = type("Network", (Network,), {"forward": apart(Network.forward)})
        return module

    def computation(self, call: Callable[[], Tensor], module: torch.nn.Module, **inputs: Tensor) -> Computation:
        """The call with the gradients of its inputs and of those parameters that it uses."""
        out, leaves = call(), {**inputs, **dict(module.named_parameters())}
        used = torch.autograd.grad(out.sum(), list(leaves.values()), allow_unused=True)
        leaves = {name: leaf for (name, leaf), grad in zip(leaves.items(), used, strict=True) if grad is not None}
        return Computation(call, leaves, self.randn(*out.shape).detach())


class Graph(NamedTuple):
    """A graph whose targets are its first nodes."""

    nodes: int
    edge_index: Tensor
    targets: int | None = None
    """The number of targets, if they are fewer than the nodes."""
    batch: Tensor | None = None
    """The molecule of each node."""
    graphs: int = 1
    """The number of molecules."""


def ten_nodes(draw: Draw) -> Graph:
    """Ten nodes with three neighbours each, on average."""
    return Graph(NODES, gattn.testing.random_edge_index(NODES, num_edges=3 * NODES, seed=SEED))


def molecules(draw: Draw, count: int = MOLECULES) -> Graph:
    """Molecules side by side: random trees with a few rings of six or more atoms."""
    bonds, sizes = [], draw.integers(*ATOMS, count)
    for first, atoms in zip((sizes.cumsum(0) - sizes).tolist(), sizes.tolist(), strict=True):
        atom, ring = torch.arange(1, atoms), draw.integers(0, atoms - 6, RINGS)
        parent = (torch.rand(atoms - 1, generator=draw.generator) * atom).long()
        bonds.append(first + torch.stack([torch.cat([parent, ring]), torch.cat([atom, ring + 5])]))
    one_way = torch.cat(bonds, 1)
    batch = torch.arange(count).repeat_interleave(sizes)
    return Graph(len(batch), torch.cat([one_way, one_way.flip(0)], 1), batch=batch, graphs=count)


def sampled(draw: Draw) -> Graph:
    """A minibatch as `NeighborLoader` gives it, with the targets first and up to `FANOUT` sources for each."""
    target = torch.arange(TARGETS).repeat_interleave(draw.integers(1, FANOUT, TARGETS))
    return Graph(SOURCES, torch.stack([draw.integers(0, SOURCES - 1, target.numel()), target]), TARGETS)


def neighbourhood(draw: Draw) -> Graph:
    """Two hops from some seeds, which come first; the nodes of the first hop follow, and are expanded as well."""
    target = torch.arange(EXPANDED).repeat_interleave(draw.integers(3, FANOUT, EXPANDED))
    choices = torch.where(target < SEEDS, EXPANDED, REACHED)
    source = (torch.rand(target.numel(), generator=draw.generator) * choices).long()
    return Graph(REACHED, torch.stack([source, target]), SEEDS)


def interactions(draw: Draw, edges: int) -> Graph:
    """The latest interactions of some nodes, as a temporal graph network reads them."""
    return Graph(edges // 2, draw.integers(0, edges // 2 - 1, 2, edges))


def attention(is_ours: bool, draw: Draw, make: Callable[[Tensor], Any]) -> Built:
    """Attention between all pairs of ten nodes, on a graph in any form."""
    *given, grad = (draw.randn(NODES, HEADS, CHANNELS).detach() for _ in range(4))
    if not is_ours:  # the layout that it is fastest with
        *given, grad = (x.transpose(0, 1).unsqueeze(0).contiguous() for x in (*given, grad))
    query, key, value = (x.requires_grad_() for x in given)
    graph = make(torch.cartesian_prod(torch.arange(NODES), torch.arange(NODES)).T.contiguous())
    ours = partial(gattn.attend, query, key, value, graph)
    call = ours if is_ours else partial(F.scaled_dot_product_attention, query, key, value)
    leaves = {"query": query, "key": key, "value": value}
    computation = Computation(call, leaves, grad, lambda x: x if is_ours else x[0].transpose(0, 1))
    return Built(computation, max(NODES, CHANNELS), 1)


def layer(
    is_ours: bool,
    draw: Draw,
    make: Callable[[Any, dict[str, int]], torch.nn.Module],
    find: Callable[[Draw], Graph],
    options: Mapping[str, int] = SIZES,
    is_fresh: bool = True,
) -> Built:
    """A whole layer; a fresh graph is a new tensor in each call, so nothing that was derived from it can help."""
    graph, width = find(draw), options["in_channels"]
    conv = draw.module(is_ours, lambda library: make(library, dict(options)))
    x, more = draw.randn(graph.nodes, width), {}
    if "edge_dim" in options:
        more["edge_attr"] = draw.randn(graph.edge_index.size(1), options["edge_dim"])
    features = x if graph.targets is None else (x, x[: graph.targets])
    place = (graph.batch,) if isinstance(conv, pyg.GPSConv) else ()

    def call() -> Tensor:
        out: Tensor = conv(features, graph.edge_index.clone() if is_fresh else graph.edge_index, *place, **more)
        return out

    degree = int(graph.edge_index[1].bincount().max()) + 1
    # GPSConv's MLP is twice as wide as its input
    terms = max(degree, 2 * width), graph.nodes + graph.edge_index.size(1)
    return Built(draw.computation(call, conv, x=x, **more), *terms)


def apart(function: Any) -> Any:
    """A copy with code of its own: the compiler marks code, and one side's graph breaks would be the other's, too."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_NUMBERS)}")
    return FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)


class Network(torch.nn.Module):
    """Layers of one kind between two linear ones; classifies molecules or targets."""

    def __init__(self, make: Callable[[], torch.nn.Module]):
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.convs = torch.nn.ModuleList(make() for _ in range(LAYERS))
        self.out = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, graph: Graph, **more: Tensor) -> Tensor:
        """A row per molecule or target."""
        x = self.first(x)
        for conv in self.convs:
            x = F.elu(conv(x, edge_index, **more))
        rows = x[: graph.targets] if graph.batch is None else pyg.global_mean_pool(x, graph.batch, graph.graphs)
        out: Tensor = self.out(rows)
        return out


def training_step(
    is_ours: bool,
    draw: Draw,
    make: Callable[[Any, dict[str, int]], torch.nn.Module],
    find: Callable[[Draw], Graph],
    options: Mapping[str, int],
) -> Built:
    """The losses of a network; with their gradients, all of a training step but the optimizer.

    Nodes' features have no gradients. Of the millions of numbers that GATv2's LeakyReLU gets, rounding moves one or two
    across its kink, which changes single rows of such gradients, but hardly any sum over all nodes.
    """
    graph = find(draw)
    model = draw.module(is_ours, lambda library: Network(lambda: make(library, dict(options))))
    x, more = draw.randn(graph.nodes, WIDTH).detach(), {}
    if "edge_dim" in options:
        more["edge_attr"] = draw.randn(graph.edge_index.size(1), options["edge_dim"])
    label = draw.integers(0, CLASSES - 1, graph.targets or graph.graphs)

    def call() -> Tensor:
        return F.cross_entropy(model(x, graph.edge_index.clone(), graph, **more), label, reduction="none")

    terms = max(int(graph.edge_index[1].bincount().max()) + 1, WIDTH), graph.nodes + graph.edge_index.size(1)
    return Built(draw.computation(call, model, **more), *terms)


def make_multihead(library: Any) -> torch.nn.Module:
    """The layer whose peer is PyTorch's."""
    module: torch.nn.Module = library.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    return module


def global_attention(is_ours: bool, draw: Draw) -> Built:
    """The attention of `GPSConv` alone: packed in gattn, padded in PyG."""
    batch: Any = molecules(draw).batch
    attn, x = draw.module(is_ours, make_multihead, torch.nn), draw.randn(len(batch), WIDTH)

    def ours() -> Tensor:
        out: Tensor = attn(x, x, x, need_weights=False, graph=gattn.CompleteGraph.packed(batch.bincount()))[0]
        return out

    def theirs() -> Tensor:
        padded, is_real = to_dense_batch(x, batch)
        out: Tensor = attn(padded, padded, padded, key_padding_mask=~is_real, need_weights=False)[0]
        return out[is_real]

    return Built(draw.computation(ours if is_ours else theirs, attn, x=x), max(ATOMS[1], WIDTH), len(batch))


def tokens(is_ours: bool, draw: Draw) -> Built:
    """Self-attention of a short sequence."""
    attn, x = draw.module(is_ours, make_multihead, torch.nn), draw.randn(1, TOKENS, WIDTH)
    return Built(draw.computation(lambda: attn(x, x, x, need_weights=False)[0], attn, x=x), WIDTH, TOKENS)


def decoding(is_ours: bool, draw: Draw) -> Built:
    """Tokens decoded one by one, beginning with none."""
    attn = draw.module(is_ours, make_multihead, torch.nn).requires_grad_(False)
    steps = draw.randn(1, DECODED, WIDTH).detach().split(1, 1)
    weight, bias, out = attn.in_proj_weight, attn.in_proj_bias, attn.out_proj

    def ours() -> Tensor:
        cache = gattn.nn.KeyValueCache()
        return torch.cat([attn(t, t, t, need_weights=False, is_causal=True, cache=cache)[0] for t in steps], 1)

    def theirs() -> Tensor:
        keys, values = steps[0].new_empty(2, 1, HEADS, 0, CHANNELS)
        outputs = []
        for token in steps:
            query, key, value = F.linear(token, weight, bias).view(1, 1, 3, HEADS, CHANNELS).permute(2, 0, 3, 1, 4)
            keys, values = torch.cat([keys, key], 2), torch.cat([values, value], 2)
            attended = F.scaled_dot_product_attention(query, keys, values)
            outputs.append(F.linear(attended.transpose(1, 2).flatten(2), out.weight, out.bias))
        return torch.cat(outputs, 1)

    return Built(Computation(ours if is_ours else theirs, {}, torch.empty(0)), max(WIDTH, DECODED), 1, DECODED)


class Call(NamedTuple):
    """What is compared with what."""

    peer: str
    build: Callable[[bool, Draw], Built]
    """Creates gattn's side, or the peer's."""
    compiled: tuple[bool, bool] = (False, False)
    """Whether gattn's side and the peer are compiled before they are timed."""
    is_own_peer: bool = False
    """Whether the peer is gattn, too."""


GRAPHS: dict[str, Callable[[Tensor], Any]] = {
    "CompleteGraph": lambda edge_index: gattn.CompleteGraph(NODES),
    "SparseGraph": lambda edge_index: gattn.SparseGraph(edge_index, num_sources=NODES, num_targets=NODES),
    "edge_index": lambda edge_index: edge_index,
}
CONVS: dict[str, Callable[[Any, dict[str, int]], torch.nn.Module]] = {
    "GATConv": lambda library, options: library.GATConv(**options),
    "GATv2Conv": lambda library, options: library.GATv2Conv(**options),
    "TransformerConv": lambda library, options: library.TransformerConv(**options),
}
BLOCKS: dict[str, Callable[[Any, dict[str, int]], torch.nn.Module]] = {
    "GPSConv": lambda library, options: library.GPSConv(WIDTH, library.TransformerConv(**options), HEADS),
    "GPSConv around PyG's layer": lambda library, options: library.GPSConv(
        WIDTH, pyg.TransformerConv(**options), HEADS
    ),
}
CALLS = {f"10 nodes, attend, {name}": Call("SDPA", partial(attention, make=make)) for name, make in GRAPHS.items()}
for _name, _make in CONVS.items():
    CALLS[f"10 nodes, {_name}"] = Call("PyG", partial(layer, make=_make, find=ten_nodes, is_fresh=False))
CALLS["16 tokens, MultiheadAttention"] = Call("torch.nn", tokens)
CALLS["one decoded token, KeyValueCache"] = Call("a bare loop", decoding)
for _name, _make in {**CONVS, **BLOCKS}.items():
    _options = SIZES if _name in ("GATConv", "GATv2Conv") else {**SIZES, "edge_dim": BOND_CHANNELS}
    CALLS[f"molecules, {_name}"] = Call("PyG", partial(layer, make=_make, find=molecules, options=_options))
CALLS["molecules, GPSConv's attention"] = Call("PyG", global_attention)
for _name, _make in CONVS.items():
    CALLS[f"sampled, {_name}"] = Call("PyG", partial(layer, make=_make, find=sampled))
for _edges in TGN_EDGES:
    _find, _make = partial(interactions, edges=_edges), CONVS["TransformerConv"]
    CALLS[f"TGN, {_edges} edges, TransformerConv"] = Call("PyG", partial(layer, make=_make, find=_find, options=TGN))
STEPS: dict[str, tuple[Callable[[Draw], Graph], dict[str, int]]] = {
    "molecules": (molecules, {"edge_dim": BOND_CHANNELS}),
    "molecules without edge features": (molecules, {}),
    f"{MANY_MOLECULES} molecules": (partial(molecules, count=MANY_MOLECULES), {"edge_dim": BOND_CHANNELS}),
    "two hops": (neighbourhood, {}),
    "two hops with edge features": (neighbourhood, {"edge_dim": BOND_CHANNELS}),
}
for _name in ("GATv2Conv", "TransformerConv"):
    for _data, (_draw, _more) in STEPS.items():
        _build = partial(training_step, make=CONVS[_name], find=_draw, options={**STEP_SIZES, **_more})
        CALLS[f"training step, {_data}, {_name}"] = Call("PyG", _build)
        if (_data, _name) != ("molecules without edge features", "TransformerConv"):  # PyG's, compiled, is wrong there
            CALLS[f"training step, {_data}, {_name}, compiled"] = Call("PyG, compiled", _build, (True, True))
        CALLS[f"training step, {_data}, {_name}, compiled or not"] = Call("gattn, eager", _build, (True, False), True)
_gps = CALLS["molecules, GPSConv"]
CALLS["molecules, GPSConv, compiled"] = Call("PyG, compiled", _gps.build, (True, True))
CALLS["molecules, GPSConv, compiled or not"] = Call("gattn, eager", _gps.build, (True, False), True)
