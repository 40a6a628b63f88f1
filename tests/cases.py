"""Scores, and calls of `attend`, that tests draw from: every test runs on a score with an entry in `SCORES`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from allpairspy import AllPairs
from torch import Tensor

from gattn import (
    AdditiveScore,
    DotScore,
    Entmax15,
    GATScore,
    Identity,
    Projected,
    Sigmoid,
    Softmax,
    SparseGraph,
    Sparsemax,
    Tanh,
    TopK,
    Typed,
    attend,
)
from gattn.ops.call import compute_dtype
from gattn.ops.dropout import draw_seed, keep_mask
from gattn.ops.operator import DIFFERENTIABLE, Inputs
from gattn.testing import assert_as_exact_as

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HALF = (torch.bfloat16, torch.float16)
TERMS = ("edge", "bias", "edge_value")
#: Older interpreters do not know NumPy 2.4.
OLDEST_INTERPRETER = "3.7" if np.lib.NumpyVersion(np.__version__) >= "2.4.0" else None
#: The oldest version that gattn supports has faults of its own, which later ones have not.
IS_OLDEST = torch.__version__ < "2.12"
NO_AUTOGRAD_AFTER_FORK = IS_OLDEST and torch.backends.cuda.is_built()
LONG_ROW = 8192  # longer rows are split among threads

Results = dict[str, Tensor]
#: Changes results before they are compared, to see that this is noticed.
Alter = Callable[[Results], None] | None


class ScoreCase(NamedTuple):
    """What tests know of a score."""

    make: Callable[[Tensor | None, Any, float], Any]
    """The score, from its vector, scale and slope."""
    logit: Callable[..., Tensor]
    """Its formula for one edge and one head: query and key (with the edge's term), vector, scale and slope."""
    sizes: Callable[..., tuple[Any, Any, Any]]
    """At most how large the terms of a logit are, summed, and its derivatives by query and by key.

    It takes what `logit` does, but for all edges and heads at once, `[..., E, H, C]`, and without signs.
    """
    wide: bool = True
    """Whether query and key have channels."""
    has_query: bool = True
    has_vector: bool = False
    is_product: bool = False
    """Whether it takes fewer heads of keys than of queries, and `scale`."""

    def shapes(
        self, targets: int, sources: int, heads: int, channels: int, key_heads: int | None = None
    ) -> dict[str, tuple[int, ...]]:
        """Of what the score takes, by name; of tensors, without the dimensions of a batch."""
        wide = (channels,) if self.wide else ()
        shapes = {"query": (targets, heads, *wide), "key": (sources, key_heads or heads, *wide)}
        if not self.has_query:
            del shapes["query"]
        return shapes | ({"vector": (heads, channels)} if self.has_vector else {})


def most(amount: Tensor | float) -> float:
    return float(amount.max()) if isinstance(amount, Tensor) and amount.numel() else 0.0


def gat_logit(query: Tensor, key: Tensor, vector: None, scale: None, slope: float) -> Tensor:
    return F.leaky_relu(query + key, slope)


def additive_sizes(query: Tensor | float, key: Tensor, vector: Tensor, scale: Any, slope: float) -> tuple[Any, ...]:
    derivative = max(slope, 1.0) * most(vector)
    return ((query + key) * vector).sum(-1), derivative, derivative


def product_sizes(query: Tensor, key: Tensor, vector: None, scale: Any, slope: float) -> tuple[Any, ...]:
    factor = DotScore(scale).factor(key.size(-1))
    return (query * key).sum(-1) * factor, key * factor, query * factor


GAT = ScoreCase(
    lambda vector, scale, slope: GATScore(slope),
    gat_logit,
    lambda query, key, vector, scale, slope: (query + key, max(slope, 1.0), max(slope, 1.0)),
    wide=False,
)
DOT = ScoreCase(
    lambda vector, scale, slope: DotScore(scale),
    lambda query, key, vector, scale, slope: query @ key * (len(key) ** -0.5 if scale is None else scale),
    product_sizes,
    is_product=True,
)
SCORES = {
    "gat": GAT,
    "gat without query": GAT._replace(has_query=False),
    "leaky_relu": ScoreCase(
        lambda vector, scale, slope: AdditiveScore(vector, "leaky_relu", slope),
        lambda query, key, vector, scale, slope: vector @ F.leaky_relu(query + key, slope),
        additive_sizes,
        has_vector=True,
    ),
    "tanh": ScoreCase(
        lambda vector, scale, slope: AdditiveScore(vector, "tanh"),
        lambda query, key, vector, scale, slope: vector @ (query + key).tanh(),
        additive_sizes,
        has_vector=True,
    ),
    "dot": DOT,
    "leaky dot": DOT._replace(
        make=lambda vector, scale, slope: DotScore(scale, slope),
        logit=lambda query, key, vector, scale, slope: F.leaky_relu(DOT.logit(query, key, vector, scale, slope), slope),
    ),
}


#: Made from a sink, which only the two softmaxes use.
DISTRIBUTIONS: dict[str, Callable[[Tensor | None], Any]] = {
    "softmax": lambda sink: Softmax(sink),
    "softcap": lambda sink: Softmax(sink, softcap=1.5),
    "sigmoid": lambda sink: Sigmoid(),
    "normalized sigmoid": lambda sink: Sigmoid(normalize=True, eps=1e-3),
    "tanh": lambda sink: Tanh(),
    "identity": lambda sink: Identity(),
}

#: Those that depend on whole rows. Where a weight becomes zero they have a kink, which rounding decides on a grid: see
#: `off_the_grid`.
SPARSE: dict[str, Callable[[Tensor | None], Any]] = {
    "sparsemax": lambda sink: Sparsemax(),
    "entmax15": lambda sink: Entmax15(),
    "top_k": lambda sink: TopK(2),
}


def make_score(name: str, vector: Tensor | None = None, scale: Any = None, slope: float = 0.2) -> Any:
    """The score of a name in `SCORES`."""
    return SCORES[name].make(vector, scale, slope)


#: Those whose formula kernels know.
KERNEL_SCORES = [name for name in SCORES if make_score(name, torch.zeros(1, 1)).family(1) is not None]


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Sets PyTorch's number of threads for a block of code."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def grid(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Random multiples of 1/32: all their sums are exact, so that no two backends disagree about a LeakyReLU's sign."""
    return (torch.randint(-64, 65, shape, generator=generator) / 32).to(dtype)


def projection(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """A random projection of features from `grid`, whose results are exact in every type, too."""
    if dtype not in HALF:
        return grid(shape, generator, dtype)
    chosen = torch.randint(shape[-1], shape[:-1], generator=generator)
    signs = torch.randint(2, shape[:-1], generator=generator) * 2 - 1
    return (F.one_hot(chosen, shape[-1]) * signs.unsqueeze(-1)).to(dtype)


def pairs(*values: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Combinations among which every two values meet."""
    return [tuple(case) for case in AllPairs([list(value) for value in values])]


def in_turn(values: Iterable[Any], others: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Each of the values with one of the others, which take turns."""
    return list(zip(values, itertools.cycle(others), strict=False))


def mostly_slow(cases: Iterable[Any], every: int = 4) -> list[Any]:
    """All cases, of which only every fourth (or so) is not marked as slow."""
    chosen = []
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        chosen.append(pytest.param(*values, marks=[pytest.mark.slow] * (number % every != 0)))
    return chosen


def equal(first: Results, second: Results) -> None:
    """Asserts that results have the same bits."""
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


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
    distribution: str = "softmax"
    notes: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        shapes = {name: (list(t.shape), t.stride(), str(t.dtype)[6:]) for name, t in self.tensors.items()}
        mask = None if self.mask is None else (list(self.mask.shape), self.mask.stride())
        return (
            f"{self.score}, {self.distribution}, {self.graph}, {self.edges.size(1)} edges, {shapes}, mask={mask}, "
            f"dropout={self.dropout}, return_weights={self.weights!r}, wanted={self.wanted}, threads={self.threads}, "
            f"{self.notes}"
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
        terms = with_terms({name: tensor for name, tensor in tensors.items() if name not in ("vector", "sink")})
        result = attend(
            terms.pop("query", None),
            terms.pop("key"),
            terms.pop("value"),
            self.graph,
            score=self.make_score(tensors.get("vector")),
            distribution=(DISTRIBUTIONS | SPARSE)[self.distribution](tensors.get("sink")),
            mask=self.mask,
            dropout=self.dropout,
            training=True,
            return_weights=self.weights,
            backend=backend,
            **terms,
        )
        return result if self.weights else (result, None)

    def operator_inputs(self, dtype: torch.dtype, requires_grad: bool) -> Inputs:
        """What an operator gets for this call on its plain list of edges, in the types that it takes."""
        family = self.make_score(self.tensors.get("vector")).family(self.tensors["key"].size(-1))
        law = (DISTRIBUTIONS | SPARSE)[self.distribution](self.tensors.get("sink")).law()
        compute = compute_dtype(dtype)
        projects = "edge_projection" in self.tensors
        scalars = () if SCORES[self.score].wide else ("query", "key", *(() if projects else ("edge",)))
        tensors = {}
        for name, tensor in self.tensors.items():
            is_wide = name in ("vector", "bias", "edge_projection", "sink", "out_bias", *scalars)
            tensor = tensor.to(compute if is_wide else dtype)
            tensor = tensor.unsqueeze(1) if name == "edge_projection" and tensor.dim() == 2 else tensor
            tensors[name] = (tensor.unsqueeze(-1) if name in scalars else tensor).detach().requires_grad_(requires_grad)
        return Inputs(
            **(dict.fromkeys(DIFFERENTIABLE) | tensors),
            edge_type=None,
            mask=self.mask,
            edge_index=self.edges,
            num_targets=self.num_targets,
            self_loops=False,
            flow="source_to_target",
            family=family.name,
            constants=list(family.constants),
            edge_is_value=False,
            distribution=law.name,
            distribution_constants=list(law.constants),
            dropout=0.3,
            seed=torch.tensor(7),
            traced=False,
        )

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
        nodes = -3 if SCORES[self.score].wide else -2

        def at(name: str, ends: Tensor) -> Tensor:
            tensor = size[name]
            if tensor.size(-2) != heads and SCORES[self.score].is_product:
                tensor = tensor.repeat_interleave(heads // tensor.size(-2), -2)
            return tensor.index_select(nodes if name != "value" else -3, ends)

        def total(amount: Tensor, ends: Tensor, count: int, dim: int) -> Tensor:
            shape = list(amount.shape)
            shape[dim] = count
            return amount.new_zeros(shape).index_add(amount.dim() + dim, ends, amount)

        projection, features = size.get("edge_projection"), size.get("edge")
        if projection is not None:
            size["edge"] = torch.einsum("ed,h...d->eh...", features, projection)
        edge = size.get("edge", 0.0)
        is_value = "edge" in size and self.tensors["edge"] is self.tensors.get("edge_value")
        if is_value:
            size["edge_value"] = edge
        key, query = at("key", source) + edge, at("query", target) if "query" in size else 0.0
        vector = size.get("vector")
        logits, by_query, by_key = SCORES[self.score].sizes(query, key, vector, self.scale, self.slope)
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
        alpha = alpha.abs()
        value = at("value", source) + size.get("edge_value", 0.0)
        all_grads = self.grad(exact["out"], 1).abs()
        grad = all_grads.index_select(-3, target)
        products = kept * (grad * (value + size.get("out_bias", 0.0))).sum(-1)
        if "weights" in exact and not self.notes.get("weights need no gradient"):
            products = products + self.grad(exact["weights"], 2).abs() * (kept if self.weights == "dropped" else 1.0)
        delta = total(alpha * products, target, self.num_targets, -2).index_select(-2, target)
        # No derivative is larger than its weight, except for these.
        is_larger = self.distribution in ("tanh", "identity", "sparsemax", "entmax15")
        terms = (torch.ones_like(alpha) if is_larger else alpha) * (products + delta)

        count_sources = size["value"].size(-3)
        wide = terms if nodes == -2 else terms.unsqueeze(-1)
        query_terms, key_terms = wide * by_query, wide * by_key
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
            "grad of edge": shared("edge") * most(key_terms),
            "grad of bias": shared("bias") * most(terms),
            "grad of edge_value": shared("edge_value") * most((alpha * kept).unsqueeze(-1) * grad),
        }
        if "out_bias" in size:
            found["out"] += most(size["out_bias"])
            found["grad of out_bias"] = most(all_grads.sum((*range(all_grads.dim() - 2),)))
        if "sink" in size:
            found["grad of sink"] = most((alpha * products).sum((*range(alpha.dim() - 1),)))
        if vector is not None:
            found["grad of vector"] = most((terms.unsqueeze(-1) * (key + query)).sum((*range(terms.dim() - 1),)))
        if self.tensors["key"] is self.tensors["value"]:
            found["grad of key"] += found["grad of value"]
        if is_value:
            found["grad of edge"] += found["grad of edge_value"]
        if projection is not None:
            edge_terms = key_terms
            if is_value:
                edge_terms = edge_terms + (alpha * kept).unsqueeze(-1) * grad
            front = tuple(range(edge_terms.dim() - projection.dim()))  # a batch shares both
            summed = edge_terms.sum(front) if front else edge_terms
            found["grad of edge"] = most(torch.einsum("eh...,h...d->ed", summed, projection))
            found["grad of edge_projection"] = most(torch.einsum("eh...,ed->h...d", summed, features))
        if source.numel():  # each of n additions loses half a unit in the last place, and equal terms the same way
            precision *= max(1.0, group * max(int(ends.bincount().max()) for ends in (source, target)) / 16)
        return {name: amount * precision for name, amount in found.items()}

    @property
    def heads(self) -> int:
        name = "query" if "query" in self.tensors else "key"
        return self.tensors[name].size(-2 if SCORES[self.score].wide else -1)

    @property
    def dtype(self) -> torch.dtype:
        """The call's type; a distribution's tensors and `out_bias` do not change it."""
        own = (tensor.dtype for name, tensor in self.tensors.items() if name not in ("sink", "out_bias"))
        return functools.reduce(torch.promote_types, own)

    @property
    def undropped(self) -> Tensor:
        """The exact weights before dropout."""
        exact = {id(tensor): tensor.double() for tensor in self.tensors.values()}
        tensors = {name: exact[id(tensor)] for name, tensor in self.tensors.items()}
        plain = Call(self.score, self.graph, self.edges, self.num_targets, tensors, self.mask)
        plain.slope, plain.scale, plain.distribution = self.slope, self.scale, self.distribution
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
    compute, rounded = torch.finfo(compute_dtype(call.dtype)).eps, torch.finfo(call.dtype).eps
    for name, result in actual.items():
        if result.numel() == 0:
            assert result.shape == peer[name].shape
            continue
        # Terms are added up in the type that is computed in, and rounded to the result's own at the end; the output is
        # rounded to the call's before an `out_bias` of a wider type is added.
        own = torch.finfo(result.dtype).eps
        last = max(own, rounded) if name == "out" else own
        scale = max(exact[name].abs().max().item() * last, magnitudes[name] * compute) / own
        if result.dtype == torch.float16:
            scale = max(scale, torch.finfo(torch.float16).tiny)
        assert_as_exact_as(result, peer[name], exact[name], scale=scale, name=name)


def make_call(
    score: str,
    edge_index: Tensor,
    sources: int,
    targets: int,
    *,
    heads: int = 3,
    channels: int = 8,
    value_channels: int = 5,
    batch: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
    terms: tuple[str, ...] = TERMS,
    batched: bool = False,
    projected: int = 0,
    sink: bool = False,
    out_bias: bool = False,
    key_heads: int | None = None,
    graph: Any = None,
    seed: int = 0,
    **options: Any,
) -> Call:
    """A call with contiguous tensors; `batched` terms have the dimensions of the batch, too.

    An edge term is `projected` from features of so many channels, unless that is 0.
    """
    generator = torch.Generator().manual_seed(seed)
    make = functools.partial(grid, generator=generator, dtype=dtype)
    shapes = SCORES[score].shapes(targets, sources, heads, channels, key_heads)
    front, edges = batch if batched else (), (edge_index.size(1), heads)
    tensors = {name: make((*batch, *shape)) for name, shape in shapes.items() if name != "vector"}
    tensors["value"] = make((*batch, sources, key_heads or heads, value_channels))
    if "vector" in shapes:
        tensors["vector"] = (torch.randn(shapes["vector"], generator=generator) / channels**0.5).to(dtype)
    wide = {"edge": shapes["key"][2:], "bias": (), "edge_value": (value_channels,)}
    tensors |= {name: make((*front, *edges, *wide[name])) for name in TERMS if name in terms}
    if sink:
        tensors["sink"] = make((heads,))
    if out_bias:
        tensors["out_bias"] = make((heads, value_channels))
    if projected and "edge" in tensors:
        tensors["edge"] = make((edge_index.size(1), projected))
        tensors["edge_projection"] = projection((heads, *wide["edge"], projected), generator, dtype)
    graph = SparseGraph(edge_index, num_sources=sources, num_targets=targets) if graph is None else graph
    return Call(score, graph, edge_index, targets, tensors, seed=seed, **options)


def off_the_grid(call: Call) -> Call:
    """The same call with a bias whose sums are not exact."""
    bias = torch.randn(call.tensors["bias"].shape, generator=torch.Generator().manual_seed(call.seed), device="cpu")
    return changed(call, tensors=call.tensors | {"bias": bias.to(call.tensors["bias"])})


def with_terms(tensors: dict[str, Any], types: Tensor | None = None) -> dict[str, Any]:
    """Tensors by name as arguments of `attend`: with `edge_projection` or types, `edge` is a term to be made."""
    given, edge = dict(tensors), tensors.get("edge")
    weight = given.pop("edge_projection", None)
    if edge is not None and (weight is not None or types is not None):
        given["edge"] = Typed(edge, types) if weight is None else Projected(edge, weight)
        if given.get("edge_value") is edge:
            given["edge_value"] = True
    return given


def changed(call: Call, **changes: Any) -> Call:
    """The same call with other options."""
    return Call(**{**{field.name: getattr(call, field.name) for field in fields(call)}, **changes})


def on_device(make: Callable[..., Any]) -> Callable[..., Any]:
    """Draws on the CPU, the same numbers for every device, and moves what was drawn to the default device."""

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        with torch.device("cpu"):
            drawn = make(*args, **kwargs)
        return drawn.to(torch.get_default_device())

    return made


class Recorded:
    """A backend of `torch.compile` that notes the operators of its programs, and compiles them as usual."""

    def __init__(self, backend: str = "inductor"):
        self.compile, self.operators = torch._dynamo.lookup_backend(backend), set()

    def __call__(self, program: torch.fx.GraphModule, inputs: list) -> Callable:
        self.operators.update(str(node.target) for node in program.graph.nodes)
        return self.compile(program, inputs)
