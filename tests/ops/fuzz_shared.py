"""What all kinds of cases share: what they draw from, how they compute, and how results are compared."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from gattn.testing import assert_as_exact_as
from tests.cases import LONG_ROW, Alter, Results, grid

FLOWS = ("source_to_target", "target_to_source")


class Draw(random.Random):
    """What decides a case: all that is random comes from here. Notes say what came, for the message of a failure."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.case = seed
        self.generator = torch.Generator().manual_seed(seed)
        self.notes: dict[str, Any] = {}

    def maybe(self, probability: float) -> bool:
        return self.random() < probability

    def note(self, **notes: Any) -> None:
        self.notes |= notes

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def booleans(self, *shape: int, share: float = 0.5) -> Tensor:
        return torch.rand(shape, generator=self.generator) < share

    def integers(self, limit: int, *shape: int) -> Tensor:
        return torch.randint(max(limit, 1), shape, generator=self.generator)

    def grid(self, *shape: int) -> Tensor:
        return grid(shape, self.generator, torch.float64)


# ----------------------------------------------------------------------------------------------------------- comparing


def with_gradients(outputs: Results, leaves: Results, seed: int, *, second: bool = False) -> Results:
    """The outputs, and the gradients of the leaves, where random gradients come in for all outputs.

    With `second`, also the gradients of these gradients' sum, where each has a weight.
    """
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for out in outputs.values():
        grad = torch.randint(-32, 33, out.shape, generator=generator) / 32  # representable in every type
        if out.requires_grad:
            pairs.append((out, grad.to(out.dtype)))
    results = {name: out.detach() for name, out in outputs.items()}
    grads = [torch.zeros_like(leaf) for leaf in leaves.values()]
    if pairs and leaves:
        outs, incoming = zip(*pairs, strict=True)
        grads = torch.autograd.grad(outs, list(leaves.values()), incoming, materialize_grads=True, create_graph=second)
    results |= {f"grad of {name}": grad.detach() for name, grad in zip(leaves, grads, strict=True)}
    if not second:
        return results
    total = sum((grad * torch.arange(grad.numel()).view(grad.shape).to(grad).cos()).sum() for grad in grads)
    grads = torch.autograd.grad(total + 0 * sum(map(torch.sum, leaves.values())), list(leaves.values()))
    return results | {f"second grad of {name}": grad for name, grad in zip(leaves, grads, strict=True)}


def compare_types(
    run: Callable[[torch.dtype, bool], Results],
    dtype: torch.dtype,
    num_terms: int,
    alter: Alter = None,
    *,
    rounds_terms: bool = False,
) -> None:
    """Asserts that what is tested loses no more than the reference in the same type does.

    In float64 nothing is more exact. There, the reference's own loss is the one that it has in float32, in proportion.

    Args:
        run: Computes in a type, by the reference or (`False`) by what is tested, and returns results by name.
        dtype: The type that is tested.
        num_terms: How many terms are summed, about.
        alter: See `Alter`. (default: `None`)
        rounds_terms: Whether what is summed is rounded to the type before. (default: `False`)
    """
    actual = run(dtype, False)
    exact = run(torch.float64, True)
    rough = run(torch.float32 if dtype == torch.float64 else dtype, True)
    assert list(actual) == list(exact) == list(rough), f"{list(actual)} and not {list(exact)}"
    if alter is not None:
        alter(actual)
    # Terms that cancel are products of what else there is. Rounding errors are in proportion to them, and each of n
    # additions loses half a unit in the last place.
    largest = max([1.0, *(float(x.abs().max()) for x in exact.values() if x.numel())])
    magnitude = largest**2 * max(num_terms / 16, 1.0)
    compute = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    for name, result in actual.items():
        peer = rough[name]
        if dtype == torch.float64:
            loss = (peer.double() - exact[name]) * (torch.finfo(dtype).eps / torch.finfo(peer.dtype).eps)
            peer = exact[name] + loss
        own = float(exact[name].abs().max()) if result.numel() else 0.0
        # Terms of second derivatives are products of three.
        size = magnitude * (largest if name.startswith("second") else 1.0)
        scale = max(own, size * compute / torch.finfo(dtype).eps, largest if rounds_terms else 0.0)
        # What is called exact has errors of its own in float64, where terms may also cancel that are not seen here.
        more = 8 if dtype == torch.float64 else 1
        assert_as_exact_as(result, peer, exact[name], factor=4.0 * more, scale=scale * more, name=name)


def assert_same_bits(actual: Results, expected: Results, alter: Alter = None) -> None:
    """Asserts that two ways to the same computation give the same bits."""
    if alter is not None:
        alter(actual)
    assert list(actual) == list(expected), f"{list(actual)} and not {list(expected)}"
    for name, result in actual.items():
        other = expected[name]
        assert result.shape == other.shape, f"{name} has shape {list(result.shape)}, not {list(other.shape)}"
        off = (result - other).abs().max().item() if result.numel() else 0.0
        assert off == 0.0, f"{name} is off by {off:.3g}: it should have the same bits"


# ------------------------------------------------------------------------------------------------------------- drawing


def stored(tensor: Tensor, draw: random.Random) -> Tensor:
    """The same numbers, some of the time in memory that is not contiguous."""
    kind = draw.randrange(8)
    if kind == 0 and tensor.dim() > 1:  # columns of something wider
        wide = torch.cat([tensor, tensor, tensor], -1)
        return wide[..., tensor.size(-1) : 2 * tensor.size(-1)]
    if kind == 1 and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if kind == 2:
        return torch.stack([tensor, tensor], -1)[..., 0]
    if kind == 3:
        return tensor[:1].expand_as(tensor) if tensor.size(0) else tensor
    return tensor


def random_graph(draw: Draw, huge: bool = False) -> tuple[Tensor, int, int, str]:
    """Sources above targets, M, N, and what it is."""
    kinds = {"sparse": 30, "empty": 8, "single": 4, "hub": 12, "source hub": 12, "dense rows": 12, "huge": 0.4 * huge}
    kind = draw.choices(list(kinds), list(kinds.values()))[0]
    sources, targets = draw.randint(1, 24), draw.randint(1, 24)
    if draw.random() < 0.5:
        targets = sources
    edges = draw.randint(0, 120)
    if kind == "empty":
        edges, sources, targets = 0, draw.choice((0, sources)), draw.choice((0, targets))
    elif kind == "single":
        sources = targets = 1
    elif kind == "dense rows":
        sources, targets, edges = draw.randint(1, 40), draw.randint(1, 4), draw.randint(60, 300)
    elif kind == "huge":
        edges = draw.randint(LONG_ROW + 1, 3 * LONG_ROW)

    source, target = draw.integers(sources, edges), draw.integers(targets, edges)
    if kind in ("hub", "source hub", "huge"):
        hub, count = draw.choice(((target, targets), (source, sources)))
        if kind != "huge":
            hub, count = (target, targets) if kind == "hub" else (source, sources)
        share = 1.0 if kind == "huge" else draw.random()
        hub[draw.booleans(edges, share=share)] = draw.choice((0, count - 1))
    edge_index = torch.stack([source, target])
    if edges and draw.random() < 0.2:
        edge_index = edge_index[:, draw.integers(edges, edges)]  # more duplicates
    if draw.random() < 0.3:
        edge_index = edge_index[:, edge_index[1].argsort(stable=True)]
    return edge_index, sources, targets, kind


def in_csr_order(edge_index: Tensor) -> Tensor:
    """The edges without duplicates, by target and then by source."""
    return torch.unique(edge_index.flip(0), dim=1).flip(0)


def in_form(edge_index: Tensor, num_sources: int, num_targets: int, form: str, draw: Draw) -> Any:
    """The edges in one of PyG's forms; where that is sparse, they are `in_csr_order`, and no flow goes with it."""
    if form in ("int32", "int16"):
        return edge_index.to(getattr(torch, form))
    if form == "strided":
        return edge_index.t().contiguous().t() if draw.maybe(0.5) else edge_index.repeat_interleave(2, 1)[:, ::2]
    if form == "EdgeIndex":
        return EdgeIndex(edge_index, sparse_size=(num_sources, num_targets))
    if form == "csr":
        start = torch.bincount(edge_index[1], minlength=num_targets).cumsum(0)
        start = torch.cat([torch.zeros(1, dtype=torch.long), start])
        values = torch.ones(edge_index.size(1))
        return torch.sparse_csr_tensor(start, edge_index[0], values, (num_targets, num_sources))
    if form == "SparseTensor":
        from torch_sparse import SparseTensor

        sizes = (num_targets, num_sources)
        return SparseTensor(row=edge_index[1], col=edge_index[0], sparse_sizes=sizes, is_sorted=True)
    return edge_index


def in_flow(edge_index: Tensor, num_sources: int, num_targets: int, flow: str, form: str, draw: Draw) -> Any:
    """The graph of these edges, sources above targets, in a form and the other way round, if the flow says so."""
    if flow != FLOWS[0]:
        edge_index, num_sources, num_targets = edge_index.flip(0), num_targets, num_sources
    return in_form(edge_index, num_sources, num_targets, form, draw)


class Tampering(NamedTuple):
    """What is done to tensors on their way: in saved-tensor hooks, and before a call."""

    saved: Callable[[Tensor], Tensor] | None
    lazy: frozenset[str]
    """The names of the tensors whose memory holds their negatives"""

    def given(self, leaves: Results) -> Results:
        """The tensors of a call, from its leaves."""
        return {name: torch._neg_view(-leaf) if name in self.lazy else leaf for name, leaf in leaves.items()}

    def hooks(self) -> Any:
        """While this is entered, saved tensors are given back in another form; copies, as in memory elsewhere."""
        if self.saved is None:
            return nullcontext()
        saved = self.saved
        return torch.autograd.graph.saved_tensors_hooks(lambda x: saved(x.detach().clone()), lambda x: x)


def transposed(x: Tensor) -> Tensor:
    """The same numbers, with strides in the reverse order."""
    order = tuple(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


def negated(x: Tensor) -> Tensor:
    """The same numbers, which memory holds negated."""
    return torch._neg_view(-x) if x.is_floating_point() else x


def apart(x: Tensor) -> Tensor:
    """The same numbers, none beside another."""
    return torch.stack([x, x], -1).select(-1, 1)


def tampering(draw: Draw) -> Tampering:
    """Mostly nothing."""
    saved = draw.choice((transposed, negated, apart)) if draw.maybe(0.2) else None
    names = ("query", "key", "value", "table", "bias", "vector") if draw.maybe(0.1) else ()
    lazy = frozenset(name for name in names if draw.maybe(0.5))
    draw.note(saved=saved and saved.__name__, lazy=sorted(lazy))
    return Tampering(saved, lazy)
