"""Time and memory of attention among all nodes as their number grows: `python -m benchmarks.complete`.

It measures linear attention; softmax attention without a bias and with a bias of some pairs, of each bucket of pairs,
of each distance, or of distances in space, causal, in a window, along blocks that were chosen by scores, with a softcap
or a sink, and of one node alone, as in decoding; sigmoids in its place; windows with positions; and attention of each
row of pairs of nodes with a bias that rows share, as in AlphaFold.
The peers do the same with PyTorch alone: einsum, padded batches, `scaled_dot_product_attention` with a dense bias or
mask, the formula with a matrix of all pairs, and FlexAttention, which computes no gradients on CPUs. Whole layers of
linear attention are measured beside PyG's, on a padded batch.

Outputs are compared with the plain formula in float64. Up to 2 048 nodes, so are gradients. PyG's layers depend on the
padding, so each of them is compared with itself in float64, and gattn's with PyG's on each graph alone.

Duration: 27 minutes; with `--quick`: 1 minute.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, NotRequired

import torch
import torch.nn.functional as F
import torch_geometric.nn.attention as pyg
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch_geometric.utils import to_dense_batch

import gattn
from benchmarks.framework import reports
from benchmarks.framework.benchmark import Benchmark
from benchmarks.framework.measuring import (
    MIN_REPEATS,
    MODES,
    Computation,
    Expected,
    Measured,
    Measurement,
    Times,
    budgets,
    duration,
    measured,
    spread,
    timed,
)
from benchmarks.framework.options import add_allocator, add_device, add_measuring, allocators
from benchmarks.framework.processes import Message
from benchmarks.framework.reports import Line, factor, machines, mark, median, megabytes, quartiles, quotient, ratio
from benchmarks.framework.results import VERSIONS, Row

SEED = 0
HEADS, CHANNELS = 8, 32
LAYER_HEADS = 2
"""The number of heads of the layers on windows. Each has 32 channels, too."""
WINDOW = (32, 0)
PAIRS = 500_000
"""The number of pairs with a sparse bias, but at most an eighth of all pairs."""
BUCKETS = 20
CAP, SINK = 5.0, 1.0
RADIAL = 16
"""The number of radial functions of distances in space."""
BLOCK, TOP = 64, 16
"""The nodes of a block, and to how many blocks each attends."""
ROW_HEADS, CHUNK = 4, 16
"""The number of heads of rows of pairs, and how many rows PyTorch's fused attention gets at a time."""
REACH = 255
"""How many earlier nodes a node of a *causal window* sees, beside itself."""
BAND = 32
"""Larger distances share a bucket with this one."""
GRAPH_SIZES = (10, 500)
"""The smallest and the largest possible number of nodes of a ragged graph."""

CHECKED = 2048
"""Up to this many nodes, gradients are also compared. On larger graphs, only the outputs of some targets are."""
SAMPLED_PAIRS = 2**23
"""The largest number of pairs of these targets and all sources. There are at most 128 targets."""
LONG = 10.0
"""Calls that take longer than `--seconds` are timed `MIN_REPEATS` times, or until this many seconds have passed."""

LINEAR: dict[str, Any] = {"score": gattn.DotScore(scale=1.0), "distribution": gattn.Identity(normalize=True)}
LAYERS: dict[str, Callable[[], Any]] = {
    "window": lambda: None,
    "window, ALiBi": lambda: gattn.nn.ALiBi(LAYER_HEADS),
    "window, learnt": lambda: gattn.nn.RelativePositionBias(LAYER_HEADS, max_distance=64),
}
"""The layers on windows, and their positions."""
RAGGED_LAYERS = {f"ragged layer, {name}": f"{name}Attention" for name in ("Performer", "SGFormer", "Polynormer")}
"""The layers of linear attention on ragged graphs."""


USUAL = {
    "linear": (1024, 4096, 16_384, 65_536, 262_144, 1_000_000),
    "ragged": (64,),
    "softmax": (1024, 4096, 16_384),
    "window": (2000, 8000, 32_000),
    "decoding": (1024, 4096, 16_384, 65_536),
    "rows": (96, 192, 384),
}
"""The numbers of nodes, or of graphs if they are ragged, for each group of parts."""
QUICK = {"linear": (256, 1024), "ragged": (4,), "softmax": (256,), "window": (500,), "decoding": (256,), "rows": (16,)}
LARGEST = {"linear causal": 262_144, "distance": 4096, "dense": 4096, "formula": 4096}
"""The largest numbers of nodes of parts and of peers that need much time or memory."""

PEERS = {
    "linear": ("gattn", "einsum"),
    "linear causal": ("gattn",),
    "ragged": ("gattn", "padded"),
    **dict.fromkeys(RAGGED_LAYERS, ("gattn", "pyg")),
    "none": ("gattn", "sdpa"),
    "causal": ("gattn", "sdpa"),
    "causal window": ("gattn", "dense"),
    "softcap": ("gattn", "formula", "flex"),
    "causal softcap": ("gattn", "formula"),
    "sink": ("gattn", "formula"),
    "sigmoid": ("gattn", "formula"),
    "sparse bias": ("gattn", "dense"),
    "bucket bias": ("gattn", "dense", "flex"),
    "distance": ("gattn",),
    "distance in space": ("gattn", "dense"),
    "top blocks": ("gattn", "dense"),
    **dict.fromkeys(LAYERS, ("gattn",)),
    "decoding": ("gattn", "sdpa"),
    "decoding softcap": ("gattn", "formula"),
    "rows of pairs": ("gattn", "formula", "chunks"),
}
"""The kinds of attention in the order of the table, and who computes each of them."""

TERMS = (
    *(
        "causal",
        "causal window",
        "softcap",
        "causal softcap",
        "sink",
        "sigmoid",
        "sparse bias",
        "bucket bias",
        "distance",
        "distance in space",
        "top blocks",
    ),
)
"""The kinds that are compared with a plain softmax."""

BASES = {
    "linear causal": ("linear", "gattn"),
    **dict.fromkeys(("none", *TERMS), ("none", "sdpa")),
    **dict.fromkeys([*LAYERS][1:], ("window", "gattn")),
    **dict.fromkeys(("decoding", "decoding softcap"), ("decoding", "sdpa")),
}
"""The base of each part: the part and the peer with which it is compared at the same size."""

DRAWN = {
    "none": reports.BLACK,
    "sparse bias": reports.BLUE,
    "bucket bias": reports.RED,
    "linear": reports.GREEN,
    "linear causal": reports.SKY,
    "window, learnt": reports.ORANGE,
}
"""The parts that the picture shows, and their colours."""


def group_of(part: str) -> str:
    """The group whose numbers of nodes a part has."""
    first = part.replace(",", "").split()[0]
    return first if first in USUAL else "softmax"


class Result(Measured):
    """The columns of a measurement."""

    forward_backward: NotRequired[Times]
    """FlexAttention and decoding lack it."""


@dataclass(frozen=True)
class Case(Measurement):
    """One measurement."""

    result = Result

    part: str
    nodes: int
    graphs: int
    peer: str
    threads: int
    repeats: int
    seconds: float
    allocator: str
    device: str = field(default="cpu", kw_only=True)

    def __str__(self) -> str:
        return f"{self.part}, {self.nodes} nodes, {self.peer}" + ", default memory" * (self.allocator == "default")

    @property
    def kind(self) -> str:
        """What is computed; FlexAttention and decoding have no gradients, and PyG's layers depend on the padding."""
        is_forward = self.peer == "flex" or self.group == "decoding"
        return self.part + ", forward" * is_forward + ", padded" * (self.peer == "pyg")

    @property
    def has_gradients(self) -> bool:
        """Whether the reference is small enough to compute gradients."""
        most = CHECKED // 8 if self.group == "rows" else CHECKED
        return self.group != "decoding" and (self.nodes <= most or self.graphs > 1)

    @property
    def num_targets(self) -> int:
        """How many nodes attend to all."""
        return 1 if self.group == "decoding" else self.nodes

    @property
    def group(self) -> str:
        """The group of parts that share a file of references."""
        return group_of(self.part)

    @property
    def is_measured(self) -> bool:
        """Whether this part and this peer are measured with so many nodes."""
        return all(self.nodes <= LARGEST.get(name, self.nodes) for name in (self.part, self.peer))

    def sizes(self) -> list[int]:
        """The number of nodes of each graph."""
        return sizes_of(self.graphs) if self.graphs > 1 else [self.nodes]

    def problem(self) -> tuple[object, ...]:
        """What is the same for all cases that share a file of references."""
        return self.group, self.nodes, self.allocator

    def references(self) -> dict[str, dict[str, Expected]]:
        """The results of the plain formula for each part of the group."""
        expected = {}
        parts = [(part, peer) for part, peers in PEERS.items() for peer in {"gattn", *{"pyg"} & {*peers}}]
        for case in (replace(self, part=part, peer=peer) for part, peer in parts):
            if case.group != self.group or not case.is_measured:
                continue
            inputs, targets = draw(case), None
            if not self.has_gradients:
                count = min(SAMPLED_PAIRS // self.nodes, 128)
                count = count // self.nodes + 1 if self.group == "rows" else count  # whole rows
                targets = torch.randperm(self.num_targets, generator=torch.Generator().manual_seed(SEED))[:count]
            exact, rounded = (reference(case, inputs, targets, dtype) for dtype in (torch.float64, torch.float32))
            terms = self.nodes, self.nodes ** (2 if "table" in inputs.leaves else 1)
            found = budgets(exact, rounded, torch.float32, *terms, targets, targets is not None)
            expected[case.kind] = found
            outputs = {name: entry for name, entry in found.items() if name.startswith("output")}
            expected[f"{case.kind}, forward"] = outputs
        return expected

    def computation(self) -> Computation:
        """The computation of the peer."""
        if self.peer == "flex":
            compiled = build(self)  # at its full size, as it is compiled anew for each size
            compiled.forward()
            return compiled
        small = sum(sizes_of(2)) if self.graphs > 1 else 2 * BAND
        build(replace(self, nodes=small, graphs=min(self.graphs, 2))).forward_backward()
        return build(self)

    def times(self, computation: Computation) -> Row:
        """Its times. Long calls are timed less often, without a warm-up: the check has already made some calls."""
        row: Row = {}
        for mode in MODES if computation.leaves else ("forward",):
            function = getattr(computation, mode)
            found = [duration(function, self.device)]
            if found[0] <= self.seconds:
                row[mode] = timed(function, self.repeats, self.seconds, self.device)
                continue
            while len(found) < MIN_REPEATS and sum(found) < LONG:
                found.append(duration(function, self.device))
            row[mode] = spread(found)
        return row


# The inputs and the reference ----------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """The inputs, with the same numbers for all peers."""

    leaves: dict[str, Tensor]
    grad: Tensor
    """The gradient of the output."""
    pairs: Tensor
    """The pairs with a bias, `[2, E]`, sources first."""
    buckets: Tensor
    """The bucket of each pair of target and source, `[N, N]`; or which blocks attend to which, `[H, n, n]`."""

    def to(self, device: str) -> Inputs:
        """The inputs on another device."""
        leaves = {name: leaf.to(device) for name, leaf in self.leaves.items()}
        return Inputs(leaves, *(x.to(device) for x in self[1:]))


def sizes_of(graphs: int) -> list[int]:
    """The number of nodes of each ragged graph."""
    low, high = GRAPH_SIZES
    return torch.randint(low, high + 1, (graphs,), generator=torch.Generator().manual_seed(SEED)).tolist()


def band(target: Tensor, source: Tensor) -> Tensor:
    """The buckets of distances."""
    return (source - target).clamp(-BAND, BAND) + BAND


def draw(case: Case) -> Inputs:
    """Draws the inputs; linear attention gets features, which are positive."""
    generator, nodes = torch.Generator().manual_seed(SEED), case.nodes

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    pairs, buckets = torch.empty(2, 0, dtype=torch.int64), torch.empty(0, 0, dtype=torch.uint8)
    if case.part in RAGGED_LAYERS:
        layer = ragged_layer(case)
        leaves = {"x": randn(nodes, HEADS * CHANNELS), **{name: x.detach() for name, x in layer.named_parameters()}}
        return Inputs(leaves, randn(*layer(leaves["x"].unsqueeze(0)).shape[1:]), pairs, buckets)
    if case.group == "window":
        leaves = {"x": randn(nodes, LAYER_HEADS * CHANNELS)}
        leaves |= {name: 0.1 * randn(*x.shape) for name, x in layer_of(case).named_parameters()}
        return Inputs(leaves, randn(nodes, LAYER_HEADS * CHANNELS), pairs, buckets)
    if case.group == "rows":
        size = nodes, nodes, ROW_HEADS, CHANNELS
        leaves = {name: randn(*size) for name in ("query", "key", "value")}
        return Inputs({**leaves, "bias": randn(ROW_HEADS, nodes, nodes)}, randn(*size), pairs, buckets)
    leaves = {"query": randn(case.num_targets, HEADS, CHANNELS)}
    leaves |= {name: randn(nodes, HEADS, CHANNELS) for name in ("key", "value")}
    grad = randn(case.num_targets, HEADS, CHANNELS)
    if case.group in ("linear", "ragged"):
        leaves |= {name: gattn.features.elu1(leaves[name]) for name in ("query", "key")}
    if case.part == "sparse bias":
        pairs = torch.randint(nodes, (2, min(PAIRS, nodes**2 // 8)), generator=generator)
        leaves["values"] = randn(pairs.size(1), HEADS)
    elif case.part == "bucket bias":
        buckets = torch.randint(BUCKETS, (nodes, nodes), generator=generator, dtype=torch.uint8)
        leaves["table"] = randn(BUCKETS, HEADS)
    elif case.part == "distance":
        leaves["table"] = randn(2 * BAND + 1, HEADS)
    elif case.part == "distance in space":
        leaves |= {"position": 3 * randn(nodes, 3), "factor": torch.linspace(0, 10, RADIAL)}
        leaves["weight"] = randn(RADIAL, HEADS)
    elif case.part == "top blocks":  # of targets and sources, of each head, in the place of buckets
        graph = gattn.graphs.top_blocks(leaves["query"], leaves["key"], BLOCK, TOP, causal=False)
        buckets = graph.tiles >= 0
    return Inputs(leaves, grad, pairs, buckets)


def ragged_layer(case: Case) -> Any:
    """PyG's layer of linear attention, or with the same parameters gattn's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        library = pyg if case.peer == "pyg" else gattn.nn
        return getattr(library, RAGGED_LAYERS[case.part])(HEADS * CHANNELS, HEADS, head_channels=CHANNELS)


def by_pyg(layer: Any, x: Tensor, sizes: Sequence[int]) -> Tensor:
    """PyG's layer on a batch, padded as PyG's networks do it."""
    batch = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).to(x.device)
    padded, is_real = to_dense_batch(x, batch)
    out: Tensor = layer(padded, is_real)[is_real]
    return out


def layer_of(case: Case) -> torch.nn.Module:
    """The layer of a window."""
    return gattn.nn.MultiheadAttention(LAYER_HEADS * CHANNELS, LAYER_HEADS, position=LAYERS[case.part]())


def bias_of(case: Case, inputs: Inputs, x: dict[str, Tensor], targets: Tensor) -> Tensor | float:
    """What is added to the logits of these targets, `[n, N, H]`."""
    distance = torch.arange(case.nodes) - targets.unsqueeze(1)
    if case.part == "distance in space":
        return radial(x["position"][targets], x["position"], x["factor"], x["weight"])
    if case.part == "top blocks":
        seen = inputs.buckets[:, targets // BLOCK].repeat_interleave(BLOCK, 2)[..., : case.nodes]
        return torch.zeros(()).where(seen, -torch.inf).permute(1, 2, 0)
    if case.part == "sparse bias":
        place = torch.full((case.nodes,), -1)
        place[targets] = torch.arange(targets.numel())
        source, target = inputs.pairs[:, place[inputs.pairs[1]] >= 0]
        values = x["values"][place[inputs.pairs[1]] >= 0]
        zeros = values.new_zeros(targets.numel(), case.nodes, HEADS)
        return zeros.index_put((place[target], source), values, accumulate=True)
    if case.part == "bucket bias":
        return x["table"][inputs.buckets[targets].long()]
    if case.part == "distance":
        return x["table"][distance.clamp(-BAND, BAND) + BAND]
    if case.part.startswith("causal"):
        hidden = (distance > 0) | (distance < -REACH if case.part == "causal window" else torch.tensor(False))
        return torch.zeros(()).masked_fill(hidden, -torch.inf).unsqueeze(-1)
    if case.group != "window":
        return 0.0
    bias: Tensor = torch.zeros(()).where((distance >= -WINDOW[0]) & (distance <= WINDOW[1]), -torch.inf).unsqueeze(-1)
    if case.part == "window, ALiBi":
        return bias - distance.abs().unsqueeze(-1) * torch.tensor([2**-4, 2**-8])
    return bias + (x["position.weight"][distance.clamp(-64, 64) + 64] if case.part == "window, learnt" else 0.0)


def radial(x: Tensor, y: Tensor, factor: Tensor, weight: Tensor) -> Tensor:
    """Gaussian functions of distances, times a matrix, `[n, N, H]`."""
    squares = (x.unsqueeze(1) - y).square().sum(-1)
    distance = squares.where(squares > 0, 1.0).sqrt().where(squares > 0, 0.0)  # whose gradient is zero at zero
    steps = (distance.unsqueeze(-1) - factor) * (RADIAL - 1) / 10
    return (-steps.square() / 2).exp() @ weight


def plain(case: Case, inputs: Inputs, x: dict[str, Tensor], targets: Tensor) -> Tensor:
    """Attention of these targets by its formula, with all pairs."""
    if case.group == "rows":
        rows = x["query"][targets], x["key"][targets], x["value"][targets], x["bias"]
        return by_rows(*rows)
    if case.group == "window":
        projected = F.linear(x["x"], x["in_proj_weight"], x["in_proj_bias"])
        query, key, value = projected.unflatten(1, (3, LAYER_HEADS, -1)).unbind(1)
    else:
        query, key, value = x["query"], x["key"], x["value"]
    products = torch.einsum("nhc,mhc->nmh", query[targets], key)
    if case.group in ("linear", "ragged"):
        if case.part == "linear causal":
            products = products * (torch.arange(case.nodes) <= targets.unsqueeze(1)).unsqueeze(-1)
        weights = products / products.sum(1, keepdim=True)
    else:
        weights = weights_of(case, products / math.sqrt(CHANNELS), bias_of(case, inputs, x, targets))
    out = torch.einsum("nmh,mhc->nhc", weights, value)
    return F.linear(out.flatten(1), x["out_proj.weight"], x["out_proj.bias"]) if case.group == "window" else out


def by_rows(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Attention of rows of pairs, `[n, N, H, C]`, with one bias, `[H, N, N]`."""
    logits = torch.einsum("rihc,rjhc->rhij", query, key) / math.sqrt(CHANNELS) + bias
    return torch.einsum("rhij,rjhc->rihc", logits.softmax(-1), value)


def weights_of(case: Case, products: Tensor, bias: Tensor | float, dim: int = 1) -> Tensor:
    """The weights of scaled products, `[n, N, H]` or with another dimension of the sources."""
    if case.part == "sigmoid":
        return products.sigmoid()
    if "softcap" in case.part:
        products = CAP * (products / CAP).tanh()
    logits = products + bias
    if case.part == "sink":
        sink = torch.full_like(logits.narrow(dim, 0, 1), SINK)
        return torch.cat([logits, sink], dim).softmax(dim).narrow(dim, 0, logits.size(dim))
    return logits.softmax(dim)


def reference(case: Case, inputs: Inputs, targets: Tensor | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """The output of some targets, or that of all and the gradients."""
    with torch.set_grad_enabled(targets is None):
        x = {name: leaf.to(dtype).requires_grad_(targets is None) for name, leaf in inputs.leaves.items()}
        if case.part in RAGGED_LAYERS:
            out = layer_reference(case, x)
        elif case.graphs > 1:
            split = zip(*(leaf.split(case.sizes()) for leaf in x.values()), strict=True)
            graphs = [dict(zip(x, parts, strict=True)) for parts in split]
            out = torch.cat([plain(case, inputs, graph, torch.arange(len(graph["query"]))) for graph in graphs])
        else:
            out = plain(case, inputs, x, torch.arange(case.nodes) if targets is None else targets)
    results = dict.fromkeys(("output", "output without autograd"), out.detach())
    if targets is None:
        grads = torch.autograd.grad(out, list(x.values()), inputs.grad.to(dtype))
        results |= {f"gradient of {name}": grad for name, grad in zip(x, grads, strict=True)}
    return results


def layer_reference(case: Case, x: dict[str, Tensor]) -> Tensor:
    """What PyG's layer gives in the type of `x`, on the padded batch or on each graph alone."""
    before, dtype = torch.get_default_dtype(), x["x"].dtype
    layer = ragged_layer(replace(case, peer="pyg")).to(dtype)
    parameters = {name: parameter for name, parameter in x.items() if name != "x"}

    def call(*args: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(layer, parameters, args)
        return out

    torch.set_default_dtype(dtype)  # in which SGFormerAttention makes tensors
    try:
        if case.peer == "pyg":
            return by_pyg(call, x["x"], case.sizes())
        return torch.cat([call(part.unsqueeze(0)).squeeze(0) for part in x["x"].split(case.sizes())])
    finally:
        torch.set_default_dtype(before)


# The peers -----------------------------------------------------------------------------------------------------------


def build(case: Case) -> Computation:
    """A peer with its inputs."""
    inputs = draw(case).to(case.device)
    if case.group == "rows":
        return build_rows(case, {name: leaf.requires_grad_() for name, leaf in inputs.leaves.items()}, inputs.grad)
    if case.peer in ("sdpa", "dense", "formula", "flex"):
        return build_heads_first(case, inputs)
    leaves = {name: leaf.requires_grad_(case.group != "decoding") for name, leaf in inputs.leaves.items()}
    if case.part in RAGGED_LAYERS:
        layer: Any = ragged_layer(case).to(case.device)
        x, sizes, packed = leaves["x"], case.sizes(), gattn.CompleteGraph.packed(case.sizes())
        leaves = {"x": x, **dict(layer.named_parameters())}
        if case.peer == "pyg":
            return Computation(lambda: by_pyg(layer, x, sizes), leaves, inputs.grad)
        return Computation(lambda: layer(x, graph=packed), leaves, inputs.grad)
    if case.group == "window":
        layer = layer_of(case).to(case.device)
        layer.load_state_dict({name: leaf.detach() for name, leaf in leaves.items() if name != "x"})
        x, window = leaves["x"], gattn.CompleteGraph(case.nodes, window=WINDOW)
        leaves = {"x": x, **dict(layer.named_parameters())}
        return Computation(lambda: layer(x, x, x, need_weights=False, graph=window)[0], leaves, inputs.grad)
    query, key, value = leaves["query"], leaves["key"], leaves["value"]
    if case.peer == "einsum":
        return Computation(lambda: einsum(query, key, value), leaves, inputs.grad)
    if case.peer == "padded":
        batch = torch.arange(case.graphs).repeat_interleave(torch.tensor(case.sizes())).to(case.device)
        return Computation(lambda: padded(query, key, value, batch), leaves, inputs.grad)
    graph: gattn.graphs.Graph = gattn.CompleteGraph(
        case.num_targets,
        case.nodes,
        causal="causal" in case.part,
        window=(REACH, 0) if case.part == "causal window" else None,
    )
    if case.graphs > 1:
        graph = gattn.CompleteGraph.packed(case.sizes())
    if case.part == "top blocks":
        graph = gattn.graphs.BlockGraph(inputs.buckets, BLOCK, case.nodes)
    kernel = gattn.nn.RadialBias(HEADS, RADIAL)
    if case.part == "distance in space":
        kernel.kernel.factor, kernel.kernel.weight = (
            torch.nn.Parameter(leaves[x].detach()) for x in ("factor", "weight")
        )
        leaves |= dict(kernel.kernel.named_parameters())
    biases: dict[str, Callable[[], gattn.Bias]] = {
        "sparse bias": lambda: gattn.SparseBias(inputs.pairs, leaves["values"]),
        "bucket bias": lambda: gattn.BucketBias(inputs.buckets, leaves["table"]),
        "distance": lambda: gattn.BucketBias(band, leaves["table"]),
        "distance in space": lambda: kernel(leaves["position"]),
    }
    bias, options = biases.get(case.part, lambda: None), LINEAR if case.group in ("linear", "ragged") else {}
    laws = {"softcap": gattn.Softmax(softcap=CAP), "sink": gattn.Softmax(sink=SINK), "sigmoid": gattn.Sigmoid()}
    if (law := laws.get(case.part.split()[-1])) is not None:
        options = {"distribution": law}
    leaves = {} if case.group == "decoding" else leaves
    return Computation(lambda: gattn.attend(query, key, value, graph, bias=bias(), **options), leaves, inputs.grad)


def build_rows(case: Case, leaves: dict[str, Tensor], grad: Tensor) -> Computation:
    """Attention of rows of pairs: at once, by the formula, or by PyTorch's fused attention for some rows at a time."""
    query, key, value, bias = (leaves[name] for name in ("query", "key", "value", "bias"))
    if case.peer == "formula":
        return Computation(lambda: by_rows(query, key, value, bias), leaves, grad)
    if case.peer == "gattn":
        graph = gattn.CompleteGraph(case.nodes)
        return Computation(lambda: gattn.attend(query, key, value, graph, bias=bias.unsqueeze(0)), leaves, grad)

    def by_chunks() -> Tensor:
        rows = (x.transpose(1, 2).split(CHUNK) for x in (query, key, value))
        parts = zip(*rows, strict=True)
        outs = [F.scaled_dot_product_attention(q, k, v, attn_mask=bias.unsqueeze(0)) for q, k, v in parts]
        return torch.cat(outs).transpose(1, 2)

    return Computation(by_chunks, leaves, grad)


def einsum(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Linear attention in three lines."""
    products = torch.einsum("...nhc,...nhd->...hcd", key, value)
    sums = torch.einsum("...nhc,...hc->...nh", query, key.sum(-3))
    return torch.einsum("...nhc,...hcd->...nhd", query, products) / sums.unsqueeze(-1)


def padded(query: Tensor, key: Tensor, value: Tensor, batch: Tensor) -> Tensor:
    """The same for each graph of a batch, as PyG's layers compute it: padded."""
    # With queries of zero, padded rows would divide by zero; keys of zero have no weight.
    query, real = to_dense_batch(query, batch, fill_value=1.0)
    key, value = (to_dense_batch(x, batch)[0] for x in (key, value))
    return einsum(query, key, value)[real]


def build_heads_first(case: Case, inputs: Inputs) -> Computation:
    """PyTorch's functions, which take `[1, H, N, C]`."""
    nodes = case.nodes
    leaves = {
        name: x.transpose(0, 1).unsqueeze(0).contiguous() if name in ("query", "key", "value") else x
        for name, x in inputs.leaves.items()
    }
    tokens = leaves["query"], leaves["key"], leaves["value"]
    grad = inputs.grad.transpose(0, 1).unsqueeze(0).contiguous()

    def unpack(result: Tensor) -> Tensor:
        return result.squeeze(0).transpose(0, 1)

    if case.peer == "flex":
        compiled: Any = torch.compile(flex_attention, fullgraph=True)
        if case.part == "softcap":

            def capped(score: Tensor, *_: Tensor) -> Tensor:
                return CAP * torch.tanh(score / CAP)

            return Computation(lambda: compiled(*tokens, score_mod=capped), {}, grad, unpack)
        table, buckets = leaves["table"], inputs.buckets

        def looked_up(score: Tensor, _: Tensor, head: Tensor, target: Tensor, source: Tensor) -> Tensor:
            return score + table[buckets[target, source].int(), head]

        return Computation(lambda: compiled(*tokens, score_mod=looked_up), {}, grad, unpack)

    def bias() -> Tensor | None:
        if case.part == "sparse bias":
            source, target = inputs.pairs
            zeros = leaves["values"].new_zeros(nodes, nodes, HEADS)
            return zeros.index_put((target, source), leaves["values"], accumulate=True).permute(2, 0, 1).unsqueeze(0)
        if case.part == "bucket bias":
            found = leaves["table"].t().contiguous().index_select(1, inputs.buckets.flatten().int())
            return found.view(1, HEADS, nodes, nodes)
        if case.part == "distance in space":
            position = leaves["position"]
            return radial(position, position, leaves["factor"], leaves["weight"]).permute(2, 0, 1).unsqueeze(0)
        return mask

    mask = None
    if case.part == "causal window":
        distance = torch.arange(nodes) - torch.arange(nodes).unsqueeze(1)
        mask = ((distance <= 0) & (distance >= -REACH)).to(case.device)
    if case.part == "top blocks":
        mask = inputs.buckets.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)[:, :nodes, :nodes].unsqueeze(0)
    leaves = {} if case.group == "decoding" else leaves
    for leaf in leaves.values():
        leaf.requires_grad_()
    if case.peer == "formula":
        hidden = (
            torch.ones(nodes, nodes, dtype=torch.bool, device=case.device).triu(1) if "causal" in case.part else None
        )

        def formula() -> Tensor:
            logits = tokens[0] @ tokens[1].mT / math.sqrt(CHANNELS)
            lowest = 0.0 if hidden is None else logits.new_zeros(nodes, nodes).masked_fill(hidden, -torch.inf)
            return weights_of(case, logits, lowest, -1) @ tokens[2]

        return Computation(formula, leaves, grad, unpack)
    options: dict[str, Any] = {"is_causal": case.part == "causal"}
    return Computation(
        lambda: F.scaled_dot_product_attention(*tokens, attn_mask=bias(), **options), leaves, grad, unpack
    )


# The report ----------------------------------------------------------------------------------------------------------


REMARKS = (
    "Times are medians with quartiles. × base is the time as a multiple of the base's at the same N: for none and for "
    "biases, PyTorch's bare sdpa, that of one query for decoding; for linear causal, linear; for windows with "
    "positions, the window without. × gattn is a peer's time or memory as a multiple of gattn's. The exponent is "
    "log(time ratio) / log(N ratio) of forward + "
    "backward, compared with the next smaller N.",
    "The peak is the resident memory above the inputs in the first forward + backward. FlexAttention (flex) has no "
    "gradients on CPUs, so its peak is that of a forward pass, after compilation.",
    f"Bare attention has {HEADS} heads with {CHANNELS} channels each. Windows are whole layers with {LAYER_HEADS} such "
    f"heads, in which each node attends to itself and to the {WINDOW[0]} nodes before it, a causal window is bare "
    f"attention with {REACH}. Softcaps are {CAP:g}, the sink's logit is {SINK:g}. The formula makes a "
    "matrix of all pairs. A sparse bias has "
    f"{PAIRS // 1000} 000 random pairs, but at most an eighth of all pairs. There are {BUCKETS} buckets of pairs, and "
    f"{2 * BAND + 1} of distances, and {RADIAL} Gaussian functions of distances in space. Of blocks of {BLOCK} nodes, "
    f"each attends to {TOP}. Rows of pairs have N rows of N nodes and {ROW_HEADS} heads; chunks are fused attention of "
    f"{CHUNK} rows at a time.",
    f"A call that takes longer than --seconds is timed {MIN_REPEATS} times, or until {LONG:g} s have passed; if it is "
    "timed only once, its quartiles equal its median.",
)


def grown(case: Case, rows: dict[Case, Row]) -> str:
    """The exponent with which the time has grown since the next smaller size, if there is one."""
    smaller = {other.nodes: row for other, row in rows.items() if replace(other, nodes=case.nodes) == case}
    sizes = [nodes for nodes in smaller if nodes < case.nodes]
    before = smaller[max(sizes)] if sizes else None
    growth = quotient(rows[case], before, "forward_backward")
    exponent = f"{math.log(growth) / math.log(case.nodes / max(sizes)):.2f}" if growth else "–"
    return mark(exponent, rows[case], before)


def line_of(case: Case, rows: dict[Case, Row]) -> Line:
    """The table's line."""
    row = rows[case]
    part, peer = BASES.get(case.part, (case.part, case.peer))
    base, ours = (rows.get(other) for other in (replace(case, part=part, peer=peer), replace(case, peer="gattn")))
    line = {"attention": case.part, "N": f"{case.nodes:,}".replace(",", " "), "by": case.peer}
    line["by"] += ", default memory" * (case.allocator == "default")
    for mode, title in MODES.items():
        line[f"{title}, ms"] = quartiles(row, mode)
        for name, other in (("base", base), ("gattn", ours)):
            line[f"{title}, × {name}"] = factor(row, None if other is row else other, mode, ".2f")
    memory = ours["peak_bytes"] if ours and ours is not row and "peak_bytes" in ours else None
    line |= {"exponent": grown(case, rows), "peak, MB": megabytes(row)}
    return {**line, "peak, × gattn": ratio(row.get("peak_bytes"), memory)}


def draw_growth(rows: dict[Case, Row]) -> Figure:
    """Time and memory of gattn against the number of nodes, with one allocator."""
    allocator = next(iter(rows)).allocator
    shown = {case: row for case, row in rows.items() if (case.peer, case.allocator) == ("gattn", allocator)}
    figure = Figure(figsize=(9, 3.8), dpi=110, layout="constrained")
    axes = figure.subplots(1, 2)
    columns: dict[str, Callable[[Row], float]] = {
        "forward + backward, ms": lambda row: 1e3 * (median(row, "forward_backward") or 0),
        "peak memory above the inputs, MB": lambda row: row.get("peak_bytes", 0) / 1e6,
    }
    for axis, (label, column) in zip(axes, columns.items(), strict=True):
        for part, colour in DRAWN.items():
            found = {case.nodes: column(row) for case, row in shown.items() if case.part == part}
            points = sorted((nodes, value) for nodes, value in found.items() if value)
            if points:
                axis.plot(*zip(*points, strict=True), "o-", markersize=3, color=colour, label=part)
        axis.set(xlabel="N", ylabel=label, xscale="log", yscale="log")
        axis.grid(alpha=0.25)
    if axes[0].lines:
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(DRAWN), fontsize=8)
    return figure


# The benchmark -------------------------------------------------------------------------------------------------------


class Complete(Benchmark[Case]):
    """Measures each kind of attention at each size."""

    name = "complete"
    quick: ClassVar = {"allocator": "default", "repeats": 3, "seconds": 0.1, "threads": 1}

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the options."""
        add = parser.add_argument
        add("--parts", nargs="+", default=list(PEERS), choices=PEERS, help="what is measured (default: all)")
        add_device(parser)
        add_allocator(parser, "kept", "kept; with --quick, default")
        add_measuring(parser, cls.name, repeats=7, duration=2.0)

    def cases(self) -> list[Case]:
        """All measurements, grouped by their files of references."""
        options = self.options
        fixed = options.threads, options.repeats, options.seconds
        cases = [
            Case(part, nodes, graphs, peer, *fixed, allocator, device=options.device)
            for allocator in allocators(options)
            for group, sizes in (QUICK if options.quick else USUAL).items()
            for size in sizes
            for nodes, graphs in ((sum(sizes_of(size)), size) if group == "ragged" else (size, 1),)
            for part in PEERS
            if part in options.parts and group_of(part) == group
            for peer in PEERS[part]
            if peer != "flex" or not options.quick
        ]
        return [case for case in cases if case.is_measured]

    def run(self, cases: Sequence[Case]) -> Generator[Message[Case], None, None]:
        """Measures."""
        return measured(cases, self.options.timeout)

    def report(self, rows: dict[Case, Row]) -> None:
        """One line per measurement, and the picture."""
        order = [*PEERS]
        chosen = sorted(rows, key=lambda case: (case.allocator, order.index(case.part), case.nodes))
        lines = [line_of(case, rows) for case in chosen]
        failed = [f"{case}: {row['outcome']}: {row['reason']}" for case, row in rows.items() if row["outcome"] != "ok"]
        remarks = machines(rows.values(), (*VERSIONS, "python"), ", {threads} thread(s)")
        headings = {column: column.replace("forward + backward", "fwd+bwd") for column in lines[0]}
        files = {"complete.png": draw_growth(rows)}
        self.publish("Attention among all nodes", lines, [*remarks, *REMARKS, *failed], files, headings=headings)


if __name__ == "__main__":
    Complete.main()
