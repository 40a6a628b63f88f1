"""The measurements of `benchmarks.sequence`: attention on sequences and on graphs, its reference and the peers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NotRequired

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import gattn
from benchmarks.framework.measuring import Computation, Expected, Measured, Measurement, Times, budgets

SEED = 0
WINDOW = (127, 0)
EDGES_PER_NODE = 16

CHECKED_LENGTH = 1024
"""Up to this length, gradients are also compared."""
CHUNK_LOGITS = 2**23
"""The reference processes about this many logits at a time, but never splits those of a target."""


# The cases -----------------------------------------------------------------------------------------------------------


class Result(Measured):
    """The columns of a measurement."""

    forward_peak_bytes: int
    forward_backward: NotRequired[Times]
    """Only decoding lacks it."""


@dataclass(frozen=True)
class Speed(Measurement):
    """One measurement."""

    result = Result
    has_forward_peak = True

    part: str
    """`"speed"` or `"graphs"`."""
    graph: str
    """`"full"`, `"causal"`, `"window"`, `"ragged"`, `"decode"` or `"sparse"`."""
    length: int
    """The length of the longest sequence."""
    peer: str
    """`"gattn"`, `"gattn-padded"`, `"torch"` or `"sdpa"`."""
    batch: int
    channels: int
    heads: int
    round: int
    threads: int
    repeats: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.part} {self.graph} {self.length} {self.peer}"

    @property
    def kind(self) -> str:
        """What is computed: a whole `"layer"`, or `"bare"` attention."""
        return "bare" if self.peer == "sdpa" else "layer"

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients, and sequences are not too long for those of the reference."""
        return self.length <= CHECKED_LENGTH and self.graph != "decode"

    @property
    def whole(self) -> Speed | None:
        """PyTorch's layer, for its attention alone."""
        return replace(self, peer="torch") if self.peer == "sdpa" else None

    def problem(self) -> tuple[object, ...]:
        """What is the same for all cases that share a reference."""
        return self.part, self.graph, self.length, self.batch, self.channels, self.heads

    def lengths(self) -> list[int]:
        """The length of each sequence."""
        if self.graph != "ragged":
            return [self.length] * self.batch
        generator = torch.Generator().manual_seed(SEED)
        shortest = max(self.length // 16, 1)
        return torch.randint(shortest, self.length + 1, (self.batch,), generator=generator).tolist()

    def num_edges(self) -> int:
        """The number of attending pairs (target, source) in the whole batch."""
        if self.graph == "sparse":
            return EDGES_PER_NODE * self.length
        return sum(
            int(neighbours(self.graph, torch.arange(first, min(first + 1024, length)), length).sum())
            for length in self.lengths()
            for first in range(0, length, 1024)
        )

    def references(self) -> dict[str, dict[str, Expected]]:
        """The results of the plain formula, which sums over sources or channels, or for parameters over tokens."""
        expected = {}
        for kind in ("layer", "bare") if self.part == "speed" else ("layer",):
            inputs = draw(self, kind)
            exact, rounded = (reference(self, inputs, dtype) for dtype in (torch.float64, torch.float32))
            terms = max(self.length, self.channels), sum(inputs.lengths)
            expected[kind] = budgets(exact, rounded, torch.float32, *terms)
        return expected

    def computation(self) -> Computation:
        """The computation of the peer."""
        build(replace(self, length=16, batch=min(self.batch, 2))).forward_backward()
        return build(self)


@dataclass
class Inputs:
    """The inputs, with the same numbers for all peers. Sequences lie end to end, without padding."""

    lengths: list[int]
    tokens: dict[str, Tensor]
    """A layer's `x`, or the query, key and value of bare attention, `[sum of lengths, channels]`."""
    parameters: dict[str, Tensor]
    """The parameters of the layer."""
    grad: Tensor
    """The gradient of the output, `[sum of lengths, channels]`."""
    edge_index: Tensor | None
    """The edges of the sparse graph, `[2, E]`."""


def draw(case: Speed, kind: str) -> Inputs:
    """Draws the inputs."""
    generator = torch.Generator().manual_seed(SEED)
    lengths = case.lengths()
    size = (sum(lengths), case.channels)

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    edge_index = None
    if case.graph == "sparse":
        sources = torch.randint(case.length, (EDGES_PER_NODE * case.length,), generator=generator)
        edge_index = torch.stack([sources, torch.arange(case.length).repeat(EDGES_PER_NODE)])
    if kind == "bare":
        return Inputs(lengths, {name: randn(*size) for name in ("query", "key", "value")}, {}, randn(*size), edge_index)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(SEED)
        parameters = gattn.nn.MultiheadAttention(case.channels, case.heads).state_dict()
    for name, parameter in parameters.items():
        if name.endswith("bias"):  # zeros would hide mistakes with biases
            parameters[name] = 0.1 * randn(*parameter.shape)
    return Inputs(lengths, {"x": randn(*size)}, parameters, randn(*size), edge_index)


# The reference -------------------------------------------------------------------------------------------------------


def neighbours(graph: str, targets: Tensor, length: int, edge_index: Tensor | None = None) -> Tensor:
    """The number of edges that join each of these targets with each source of its sequence, `[n, length]`."""
    if edge_index is not None:
        source, target = edge_index
        place = torch.full((length,), -1)
        place[targets] = torch.arange(targets.numel())
        mine = place[target] >= 0
        counts = torch.zeros(targets.numel(), length, dtype=torch.int64)
        one = torch.ones((), dtype=torch.int64)
        return counts.index_put_((place[target[mine]], source[mine]), one, accumulate=True)
    distance = torch.arange(length) - targets.unsqueeze(1)
    if graph in ("causal", "decode"):
        return (distance <= 0).long()
    if graph == "window":
        return ((distance >= -WINDOW[0]) & (distance <= WINDOW[1])).long()
    return torch.ones_like(distance)


def plain(case: Speed, tokens: dict[str, Tensor], parameters: dict[str, Tensor], edge_index: Tensor | None) -> Tensor:
    """Attention of one sequence by its formula, softmax(Q Kᵀ / √d) V, in chunks, `[T, channels]`."""
    if parameters:
        projected = F.linear(tokens["x"], parameters["in_proj_weight"], parameters["in_proj_bias"]).chunk(3, -1)
    else:
        projected = tokens["query"], tokens["key"], tokens["value"]
    query, key, value = (x.unflatten(-1, (case.heads, -1)).transpose(0, 1) for x in projected)
    length = query.size(1)
    outputs = []
    for targets in torch.arange(length).split(max(CHUNK_LOGITS // (case.heads * length), 1)):
        logits = query[:, targets] @ key.transpose(1, 2) / math.sqrt(query.size(-1))
        counts = neighbours(case.graph, targets, length, edge_index)
        # A duplicate edge counts twice; a missing one has the weight exp(log 0) = 0.
        outputs.append((logits + counts.to(logits.dtype).log()).softmax(-1) @ value)
    out = torch.cat(outputs, 1).transpose(0, 1).flatten(1)
    return F.linear(out, parameters["out_proj.weight"], parameters["out_proj.bias"]) if parameters else out


def reference(case: Speed, inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and, unless sequences are too long, gradients of the plain formula, summed in float64."""
    has_gradients = case.has_gradients
    parameters = {name: x.to(dtype).requires_grad_(has_gradients) for name, x in inputs.parameters.items()}
    totals = {name: torch.zeros(x.shape, dtype=torch.float64) for name, x in parameters.items()}
    outputs: list[Tensor] = []
    gradients: dict[str, list[Tensor]] = {name: [] for name in inputs.tokens}
    split = {name: x.split(inputs.lengths) for name, x in inputs.tokens.items()}
    for number, grad in enumerate(inputs.grad.split(inputs.lengths)):
        tokens = {name: x[number].to(dtype).requires_grad_(has_gradients) for name, x in split.items()}
        out = plain(case, tokens, parameters, inputs.edge_index)
        outputs.append(out.detach().double())
        if not has_gradients:
            continue
        leaves = tokens | parameters
        for name, result in zip(leaves, torch.autograd.grad(out, list(leaves.values()), grad.to(dtype)), strict=True):
            if name in tokens:
                gradients[name].append(result.double())
            else:
                totals[name] += result
    output = torch.cat(outputs)
    results = {"output without autograd": output, "output": output}
    if has_gradients:
        results |= {f"gradient of {name}": torch.cat(parts) for name, parts in gradients.items()}
        results |= {f"gradient of {name}": total for name, total in totals.items()}
    return results


# The peers -----------------------------------------------------------------------------------------------------------


def build(case: Speed) -> Computation:
    """A peer with its inputs, which are padded unless it takes sequences end to end."""
    inputs = draw(case, case.kind)
    lengths = torch.tensor(inputs.lengths)
    real = torch.arange(max(inputs.lengths)) < lengths.unsqueeze(1)

    def pad(x: Tensor) -> Tensor:
        return pad_sequence(x.split(inputs.lengths), batch_first=True)

    if case.peer == "sdpa":
        return build_bare(case, inputs, real, pad)
    if case.graph == "decode":
        decode = decode_with_gattn if case.peer == "gattn" else decode_with_torch
        return Computation(decode(case, inputs.parameters, pad(inputs.tokens["x"])), {}, inputs.grad)
    module = torch.nn if case.peer == "torch" else gattn.nn
    layer = module.MultiheadAttention(case.channels, case.heads, batch_first=True)
    layer.load_state_dict(inputs.parameters)
    is_packed = case.part == "graphs" or (case.graph == "ragged" and case.peer == "gattn")
    x = (inputs.tokens["x"] if is_packed else pad(inputs.tokens["x"])).requires_grad_()
    options = torch_options(case, real) if case.peer == "torch" else gattn_options(case, inputs, real)
    return Computation(
        lambda: layer(x, x, x, need_weights=False, **options)[0],
        {"x": x, **dict(layer.named_parameters())},
        inputs.grad if is_packed else pad(inputs.grad),
        (lambda result: result) if is_packed else (lambda result: result[real]),
    )


def decode_with_gattn(case: Speed, parameters: dict[str, Tensor], x: Tensor) -> Callable[[], Tensor]:
    """Decodes token by token with gattn's layer and its cache, `[B, T, channels]`."""
    layer = gattn.nn.MultiheadAttention(case.channels, case.heads, batch_first=True).eval().requires_grad_(False)
    layer.load_state_dict(parameters)

    def call() -> Tensor:
        cache = gattn.nn.KeyValueCache()
        steps = [layer(t, t, t, need_weights=False, is_causal=True, cache=cache)[0] for t in x.split(1, 1)]
        return torch.cat(steps, 1)

    return call


def decode_with_torch(case: Speed, parameters: dict[str, Tensor], x: Tensor) -> Callable[[], Tensor]:
    """The same in the shortest loop that PyTorch allows, which knows the number of tokens in advance."""
    in_weight, in_bias = parameters["in_proj_weight"], parameters["in_proj_bias"]
    out_weight, out_bias = parameters["out_proj.weight"], parameters["out_proj.bias"]

    def call() -> Tensor:
        keys, values = x.new_empty(2, x.size(0), case.heads, x.size(1), case.channels // case.heads)
        steps = []
        for place, token in enumerate(x.split(1, 1)):
            projected = F.linear(token, in_weight, in_bias).unflatten(-1, (3, case.heads, -1))
            query, key, value = projected.permute(2, 0, 3, 1, 4)
            keys[:, :, place : place + 1], values[:, :, place : place + 1] = key, value
            out = F.scaled_dot_product_attention(query, keys[:, :, : place + 1], values[:, :, : place + 1])
            steps.append(F.linear(out.transpose(1, 2).flatten(2), out_weight, out_bias))
        return torch.cat(steps, 1)

    return call


def gattn_options(case: Speed, inputs: Inputs, real: Tensor) -> dict[str, Any]:
    """The arguments that tell gattn's layer who attends to whom."""
    if case.graph == "causal":
        return {"is_causal": True}
    if case.graph == "window":
        return {"graph": gattn.CompleteGraph(case.length, window=WINDOW)}
    if case.graph == "sparse":
        return {"graph": gattn.SparseGraph(inputs.edge_index, num_sources=case.length, num_targets=case.length)}
    if case.graph == "ragged":
        padded = {"key_padding_mask": ~real}
        return padded if case.peer == "gattn-padded" else {"graph": gattn.CompleteGraph.packed(inputs.lengths)}
    return {}


def torch_options(case: Speed, real: Tensor) -> dict[str, Any]:
    """The arguments that tell PyTorch's layer who attends to whom."""
    if case.graph == "ragged":
        return {"key_padding_mask": ~real}
    if case.graph == "full":
        return {}
    seen = neighbours(case.graph, torch.arange(case.length), case.length).bool()
    return {"attn_mask": ~seen, "is_causal": case.graph == "causal"}


def build_bare(case: Speed, inputs: Inputs, real: Tensor, pad: Callable[[Tensor], Tensor]) -> Computation:
    """PyTorch's function, without projections."""

    def heads_first(x: Tensor) -> Tensor:
        return pad(x).unflatten(-1, (case.heads, -1)).transpose(1, 2).contiguous()

    options: dict[str, Any] = {}
    if case.graph == "causal":
        options = {"is_causal": True}
    elif case.graph == "window":
        options = {"attn_mask": neighbours("window", torch.arange(case.length), case.length).bool()}
    elif case.graph == "ragged":
        options = {"attn_mask": real.view(case.batch, 1, 1, -1)}
    leaves = {name: heads_first(x).requires_grad_() for name, x in inputs.tokens.items()}
    return Computation(
        lambda: F.scaled_dot_product_attention(leaves["query"], leaves["key"], leaves["value"], **options),
        leaves,
        heads_first(inputs.grad),
        lambda result: result.transpose(1, 2).flatten(2)[real],
    )
