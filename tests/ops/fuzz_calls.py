"""Calls of `attend` on sparse graphs: the CPU kernels (or others) against the reference, in every type."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import add_self_loops, remove_self_loops

from gattn import SparseGraph, attend
from gattn.ops.dropout import draw_seed, keep_mask
from gattn.testing import assert_as_exact_as
from tests.ops.fuzz_shared import (
    FLOWS,
    SCORES,
    Alter,
    Draw,
    grid,
    in_csr_order,
    in_flow,
    make_score,
    random_graph,
    stored,
    threads,
)

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DIFFERENTIABLE = ("query", "key", "value", "vector", "edge", "bias", "edge_value")


@dataclass
class Call:
    """One call of `attend`; `key is value` and `edge is edge_value` are part of it."""

    score: str
    graph: Any
    edges: Tensor
    """Sources above targets, self-loops included, in the order that per-edge terms have."""
    num_targets: int
    tensors: dict[str, Tensor]
    mask: Tensor | None = None
    dropout: float = 0.0
    weights: bool | str = True
    """The call's `return_weights`."""
    wanted: tuple[str, ...] = DIFFERENTIABLE
    slope: float = 0.2
    scale: float | None = None
    seed: int = 0
    threads: int = 1
    notes: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        shapes = {name: (list(t.shape), t.stride(), str(t.dtype)[6:]) for name, t in self.tensors.items()}
        mask = None if self.mask is None else (list(self.mask.shape), self.mask.stride())
        return (
            f"{self.score}, {self.graph}, {self.edges.size(1)} edges, {shapes}, mask={mask}, dropout={self.dropout}, "
            f"return_weights={self.weights!r}, wanted={self.wanted}, threads={self.threads}, {self.notes}"
        )

    def to(self, device: torch.device) -> Call:
        """Moves all tensors; what was one tensor in two places still is."""
        if device.type != "cpu":
            moved = {id(tensor): tensor.to(device) for tensor in self.tensors.values()}
            self.tensors = {name: moved[id(tensor)] for name, tensor in self.tensors.items()}
            self.mask = None if self.mask is None else self.mask.to(device)
            self.graph, self.edges = self.graph.to(device), self.edges.to(device)
        return self

    def make_score(self, vector: Tensor | None) -> Any:
        return make_score(self.score, vector, self.scale, self.slope)

    def attend(self, tensors: dict[str, Tensor], backend: str) -> tuple[Tensor, Tensor | None]:
        """Output and weights, by a mask of dropout that depends on the call's seed alone."""
        torch.manual_seed(self.seed)
        terms = {name: tensor for name, tensor in tensors.items() if name != "vector"}
        result = attend(
            terms.pop("query", None),
            terms.pop("key"),
            terms.pop("value"),
            self.graph,
            score=self.make_score(tensors.get("vector")),
            mask=self.mask,
            dropout=self.dropout,
            training=True,
            return_weights=self.weights,
            backend=backend,
            **terms,
        )
        return result if self.weights else (result, None)

    def results(self, backend: str, exact: bool = False) -> dict[str, Tensor]:
        """Output, weights and all gradients, by name; `exact` computes in float64."""
        leaves: dict[int, Tensor] = {}
        tensors = {}
        for name, tensor in self.tensors.items():
            if id(tensor) not in leaves:
                leaves[id(tensor)] = tensor.double() if exact else tensor.detach()
            tensors[name] = leaves[id(tensor)]
        asked = {name: tensors[name].detach().requires_grad_() for name in self.wanted if name in tensors}
        for pair in (("key", "value"), ("edge", "edge_value")):
            if all(name in tensors for name in pair) and self.tensors[pair[0]] is self.tensors[pair[1]]:
                for name in pair:
                    asked.pop(name, None)
                if set(pair) & set(self.wanted):
                    asked[pair[0]] = tensors[pair[0]].detach().requires_grad_()
                    tensors[pair[1]] = asked[pair[0]]
        tensors.update(asked)
        out, weights = self.attend(tensors, backend)
        results = {"out": out.detach()}
        outputs, grads = [out], [self.grad(out, 1)]
        if weights is not None:
            results["weights"] = weights.detach()
            if not self.notes.get("weights need no gradient"):
                outputs, grads = [*outputs, weights], [*grads, self.grad(weights, 2)]
        # With the value's gradient alone, the reference's weights need none.
        pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if output.requires_grad]
        if asked:
            outputs, grads = zip(*pairs, strict=True)
            results.update(
                zip(
                    (f"grad of {name}" for name in asked),
                    torch.autograd.grad(outputs, list(asked.values()), grads, materialize_grads=True),
                    strict=True,
                )
            )
        return results

    def grad(self, of: Tensor, number: int) -> Tensor:
        """The gradient that comes in: representable in every type."""
        if number == 1 and self.notes.get("sums"):
            return of.new_ones(()).expand_as(of)
        generator = torch.Generator().manual_seed(self.seed * 2 + number)
        return (torch.randint(-32, 33, of.shape, generator=generator, device="cpu") / 32).to(of)

    def magnitudes(self, exact: dict[str, Tensor]) -> dict[str, float]:
        """How large the terms are that add up to each result, at most: rounding errors are in proportion to them."""
        size = {name: tensor.double().abs() for name, tensor in self.tensors.items()}
        source, target = self.edges
        heads = self.heads
        nodes = -2 if self.score.startswith("gat") else -3

        def at(name: str, ends: Tensor) -> Tensor:
            tensor = size[name]
            if tensor.size(-2) != heads and self.score == "dot":
                tensor = tensor.repeat_interleave(heads // tensor.size(-2), -2)
            return tensor.index_select(nodes if name != "value" else -3, ends)

        def total(amount: Tensor, ends: Tensor, count: int, dim: int) -> Tensor:
            shape = list(amount.shape)
            shape[dim] = count
            return amount.new_zeros(shape).index_add(amount.dim() + dim, ends, amount)

        def most(amount: Tensor | float) -> float:
            return float(amount.max()) if isinstance(amount, Tensor) and amount.numel() else 0.0

        edge = size.get("edge", 0.0)
        key, query = at("key", source) + edge, at("query", target) if "query" in size else 0.0
        if self.score == "dot":
            factor = self.make_score(None).factor(size["key"].size(-1))
            logits = (key * query).sum(-1) * factor
        elif nodes == -2:
            factor, logits = max(self.slope, 1.0), key + query
        else:
            factor, logits = max(self.slope, 1.0) * most(size["vector"]), ((key + query) * size["vector"]).sum(-1)
        if "bias" in size:
            logits = logits + size["bias"].masked_fill(size["bias"].isinf(), 0.0)
        precision = 1 + most(logits)

        full = (*exact["out"].shape[:-3], source.numel(), heads)
        alpha = exact["weights"] if self.weights is True else self.undropped
        kept = alpha.new_ones(full)
        if self.dropout > 0:
            torch.manual_seed(self.seed)
            kept = keep_mask(draw_seed(alpha.device), torch.Size(full), self.dropout).double()
            kept = kept / (1 - self.dropout) if self.dropout < 1 else kept * 0
        value = at("value", source) + size.get("edge_value", 0.0)
        grad = self.grad(exact["out"], 1).abs().index_select(-3, target)
        products = kept * (grad * value).sum(-1)
        if "weights" in exact and not self.notes.get("weights need no gradient"):
            products = products + self.grad(exact["weights"], 2).abs() * (kept if self.weights == "dropped" else 1.0)
        delta = total(alpha * products, target, self.num_targets, -2).index_select(-2, target)
        terms = alpha * (products + delta)

        count_sources = size["value"].size(-3)
        if self.score == "dot":
            wide = terms.unsqueeze(-1) * factor
            query_terms, key_terms, edge_terms = wide * key, wide * query, wide * query
        else:
            query_terms = key_terms = edge_terms = terms * factor if nodes == -2 else terms.unsqueeze(-1) * factor
        by_source = total(key_terms, source, count_sources, nodes)
        value_terms = total((alpha * kept).unsqueeze(-1) * grad, source, count_sources, -3)
        group = heads // size["value"].size(-2) if size["value"].size(-2) else 1
        batch = exact["out"].shape[:-3].numel()

        def shared(name: str) -> int:
            return batch if name in size and size[name].dim() < exact["out"].dim() - (name == "bias") else 1

        found = {
            "out": most(total((alpha * kept).unsqueeze(-1) * value, target, self.num_targets, -3)),
            "weights": most(alpha * kept) if self.weights == "dropped" else most(alpha),
            "grad of query": most(total(query_terms, target, self.num_targets, nodes)),
            "grad of key": group * most(by_source),
            "grad of value": group * most(value_terms),
            "grad of edge": shared("edge") * most(edge_terms),
            "grad of bias": shared("bias") * most(terms),
            "grad of edge_value": shared("edge_value") * most((alpha * kept).unsqueeze(-1) * grad),
        }
        if "vector" in size:
            found["grad of vector"] = most((terms.unsqueeze(-1) * (key + query)).sum((*range(terms.dim() - 1),)))
        if self.tensors["key"] is self.tensors["value"]:
            found["grad of key"] += found["grad of value"]
        if "edge" in size and self.tensors["edge"] is self.tensors.get("edge_value"):
            found["grad of edge"] += found["grad of edge_value"]
        if source.numel():  # each of n additions loses half a unit in the last place, and equal terms the same way
            precision *= max(1.0, max(int(ends.bincount().max()) for ends in (source, target)) / 16)
        return {name: amount * precision for name, amount in found.items()}

    @property
    def heads(self) -> int:
        name = "query" if "query" in self.tensors else "key"
        return self.tensors[name].size(-1 if self.score.startswith("gat") else -2)

    @property
    def results_dtype(self) -> torch.dtype:
        return functools.reduce(torch.promote_types, (tensor.dtype for tensor in self.tensors.values()))

    @property
    def undropped(self) -> Tensor:
        """The exact weights before dropout."""
        tensors = {name: tensor.double() for name, tensor in self.tensors.items()}
        plain = Call(self.score, self.graph, self.edges, self.num_targets, tensors, self.mask)
        plain.slope, plain.scale = self.slope, self.scale
        return plain.attend(tensors, "reference")[1]


def compare(call: Call, backend: str = "cpu", alter: Alter = None) -> None:
    """Asserts that the kernels lose no more than the reference in the same types does, against it in float64.

    Args:
        call: What to compute.
        backend: What is tested. (default: `"cpu"`)
        alter: See `Alter`. (default: `None`)
    """
    with threads(call.threads):
        actual = call.results(backend)
    with threads(1):  # on tiny graphs more would only wait for each other
        peer, exact = call.results("reference"), call.results("reference", exact=True)
        magnitudes = call.magnitudes(exact)
    assert list(actual) == list(peer)
    if alter is not None:
        alter(actual)
    compute = torch.finfo(torch.float64 if actual["out"].dtype == torch.float64 else torch.float32).eps
    for name, result in actual.items():
        if result.numel() == 0:
            assert result.shape == peer[name].shape
            continue
        # Terms are added up in the type that is computed in, and rounded to the result's own at the end.
        largest = exact[name].abs().max().item()
        scale = max(largest, magnitudes[name] * compute / torch.finfo(result.dtype).eps)
        if result.dtype == torch.float16:
            scale = max(scale, torch.finfo(torch.float16).tiny)
        assert_as_exact_as(result, peer[name], exact[name], scale=scale, name=name)


# --------------------------------------------------------------------------------------------------------- random calls


def on_device(make: Callable[..., Any]) -> Callable[..., Any]:
    """Draws on the CPU, the same numbers for every device, and moves what was drawn to the default device."""

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        with torch.device("cpu"):
            drawn = make(*args, **kwargs)
        return drawn.to(torch.get_default_device())

    return made


def random_call(seed: int) -> tuple[Call, str | None]:
    """A call on the default device, and the index that is wrong in it, if any."""
    with torch.device("cpu"):
        call, bad = draw_call(seed)
    return call.to(torch.get_default_device()), bad


def draw_call(seed: int) -> tuple[Call, str | None]:
    """The same on the CPU."""
    draw = Draw(seed)
    edge_index, sources, targets, kind = random_graph(draw, huge=True)
    num_edges = edge_index.size(1)
    notes: dict[str, Any] = {"graph": kind}
    bad = None
    if num_edges and draw.random() < 0.05:
        row, place = draw.randrange(2), draw.randrange(num_edges)
        bad = draw.choice(("negative", "too large"))
        wrong = draw.choice((1, 2, 100)) if kind != "huge" else 1
        edge_index[row, place] = -wrong if bad == "negative" else (sources, targets)[row] + wrong - 1

    self_loops, flow = draw.random() < 0.25, draw.choice((*FLOWS, FLOWS[0]))
    edges = edge_index
    if self_loops and bad is None:
        edges = add_self_loops(remove_self_loops(edge_index)[0], num_nodes=min(sources, targets))[0]
    form = draw.choice(("int64", "int64", "int32", "int16", "strided", "EdgeIndex", "csr"))
    if form == "csr" and (bad is not None or self_loops or flow != FLOWS[0] or kind == "huge"):
        form = "int64"
    if form == "EdgeIndex" and bad is not None:
        form = "int64"
    if form == "csr":
        edges = edge_index = in_csr_order(edge_index)
    num_edges = edges.size(1)
    given = in_flow(edge_index, sources, targets, flow, form, draw)
    graph = SparseGraph(given, sources, targets, self_loops=self_loops, flow=flow)
    notes["form"] = form

    score = draw.choice(SCORES)
    small = kind == "huge"
    heads = draw.choice((0, 1, 1, 2, 3, 4, 5, 8, 16, 17, 32)) if not small else draw.choice((1, 3, 4))
    heads = max(heads, 1) if score == "dot" else heads  # heads share those of key and value, and none divides none
    shared_heads = draw.choice([g for g in range(1, heads + 1) if heads % g == 0]) if score == "dot" else heads
    widths = (0, 0, 1, 2, 3, 8, 16, 17, 31, 32, 33, 64, 70, 128, 130) if not small else (1, 5, 8)
    channels, value_channels = draw.choice(widths), draw.choice(widths)
    if num_edges * heads * max(channels, value_channels) > 60_000 and not small:
        channels, value_channels = min(channels, 9), min(value_channels, 9)
    batch = draw.choice(((), (), (), (), (2,), (2, 3), (1,), (3, 1), (0,), (2, 0))) if not small else ()
    dtype = draw.choice(DTYPES)
    mixed = draw.random() < 0.1

    def make(*shape: int) -> Tensor:
        return stored(grid(shape, draw.generator, draw.choice(DTYPES) if mixed else dtype), draw)

    def terms(*shape: int) -> Tensor:
        return make(*draw.choice(((), batch)), num_edges, heads, *shape)

    wide = () if score.startswith("gat") else (channels,)
    tensors = {"key": make(*batch, sources, shared_heads, *wide)}
    if score != "gat without query":
        tensors["query"] = make(*batch, targets, heads, *wide)
    if score != "gat" and wide and draw.random() < 0.2:
        tensors["value"], value_channels = tensors["key"], channels
    else:
        tensors["value"] = make(*batch, sources, shared_heads, value_channels)
    if score in ("leaky_relu", "tanh"):
        tensors["vector"] = stored(
            torch.randn(heads, channels, generator=draw.generator) / max(channels, 1) ** 0.5, draw
        ).to(dtype)
    if draw.random() < 0.3:
        tensors["edge"] = terms(*wide)
    if draw.random() < 0.3:
        tensors["bias"] = terms()
        if draw.random() < 0.3:
            dead = torch.rand(tensors["bias"].shape, generator=draw.generator) < draw.random()
            tensors["bias"] = tensors["bias"].masked_fill(dead, -torch.inf)
    if "edge" in tensors and tensors["edge"].shape[-1:] == (value_channels,) and wide and draw.random() < 0.5:
        tensors["edge_value"] = tensors["edge"]
    elif draw.random() < 0.3:
        tensors["edge_value"] = terms(value_channels)
    mask = None
    if draw.random() < 0.3:
        shape = draw.choice(((num_edges,), (num_edges, heads), (*batch, num_edges), (*batch, num_edges, heads)))
        mask = torch.rand(shape, generator=draw.generator) < draw.random()
        mask = stored(mask, draw) if mask.dim() > 1 else mask
    if draw.random() < 0.1:  # far from zero, where exp() alone would overflow
        tensors["key"] = tensors["value"] if tensors["key"] is tensors["value"] else tensors["key"] * 16
    present = tuple(name for name in DIFFERENTIABLE if name in tensors)
    wanted = present if draw.random() < 0.6 else tuple(name for name in present if draw.random() < 0.5)
    weights: bool | str = draw.choice((False, False, True, "dropped"))
    notes["weights need no gradient"] = draw.random() < 0.4
    notes["sums"] = draw.random() < 0.2
    return Call(
        score,
        graph,
        edges,
        targets,
        tensors,
        mask,
        draw.choice((0.0, 0.0, 0.3, 0.6, 1.0)),
        weights,
        wanted,
        draw.choice((0.2, 0.01, 0.0)),
        draw.choice((None, 1.0, 0.25)),
        seed,
        draw.randint(1, 3) if small else 1,
        notes,
    ), bad


def call(draw: Draw, alter: Alter) -> None:
    """One call; an index that is out of range must be the same error by both."""
    drawn, bad = random_call(draw.case)
    draw.note(call=drawn)
    if bad is None:
        compare(drawn, alter=alter)
        return
    errors = []
    for backend in ("cpu", "reference"):
        try:
            drawn.results(backend)
            errors.append("no error")
        except IndexError as error:
            errors.append(str(error))
    assert "holds" in errors[0], f"an index is {bad}, and the kernels say: {errors[0]}"
    assert errors[0] == errors[1]
