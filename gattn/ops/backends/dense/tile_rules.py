"""What tiles of pairs compute: a rule, the elements of a batch, and tensors."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from gattn.distributions import Law
from gattn.errors import InputError
from gattn.ops.backends.dense.elements import elements_of_blocks

__all__ = ["DIMS", "FAR", "Element", "Form", "Inputs", "Rule", "check_fit", "elements_for_tiles"]

#: How far a target sees that sees all: more than there are nodes, and far from where integers end.
FAR = 2**40

#: The dimensions of tensors of nodes, batch included, and of those with a number for each pair.
DIMS = 4

Form = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides of a tensor"""


class Element(NamedTuple):
    """Targets and sources that see each other, as positions in an entry of the batch."""

    batch: int
    first_target: int
    num_targets: int
    first_source: int
    num_sources: int
    offset: int
    """The position of target 0 among the sources"""
    term: int
    """The entry of bias and mask"""
    bias_at: int = 0
    """See `Term.places`"""
    bias_step: int = 0
    weights_at: int = 0
    """The first weight's place, and from one head and target to the next"""
    weights_head: int = 0
    weights_row: int = 0


class Rule(NamedTuple):
    """What is computed, beside tensors."""

    scale: float
    slope: float
    """Of a LeakyReLU of the products; 1: none"""
    clamp: float
    """The bound of the products"""
    law: Law
    left: int | None
    """How far before its own position a target sees; `None` means no limit"""
    right: int | None
    elements: tuple[Element, ...]
    dropout: float
    bias: str = "all"
    """What has a bias; see `Term.kind`"""
    first: int = 0
    """The smallest distance that has one"""
    weights: bool | str = False
    """Whether weights are returned, too; `"dropped"`: those after dropout"""
    log_sum: bool = True
    """Whether the log-sum-exp of each target is returned"""
    block: int = 0
    """The nodes of a block, of a graph of blocks"""


@lru_cache(maxsize=64)
def elements_for_tiles(
    known: tuple[tuple[int, ...], ...] | None,
    blocks: tuple[tuple[int, int], ...] | None,
    sizes: tuple[int, int, int, int],
    offset: int,
    places: tuple[tuple[int, int], ...] = ((0, 0),),
    with_weights: bool = False,
) -> tuple[tuple[Element, ...], int]:
    """The elements of a batch, and how many weights they have, each `[H, N, M]`, one after another.

    Args:
        known: What `elements_of` returns for a batch with lengths, which may have been edited after they were checked.
        blocks: The blocks of a packed graph.
        sizes: B, N, M and H.
        offset: The position of target 0 among the sources, if all elements are alike.
        places: Those of a `Term`. (default: none)
        with_weights: Whether weights are returned: those of a packed graph's block come together, for all of the batch;
            others are as large as if nothing was padded. (default: `False`)

    Raises:
        ValueError: If an element has more nodes than there are.
    """
    batch, num_targets, num_sources, heads = sizes
    if blocks is not None:
        known = elements_of_blocks(blocks, batch, num_targets, num_sources)
    elif known is None:
        size = num_targets, num_sources
        known = tuple((b * size[0], size[0], b * size[1], size[1], offset) for b in range(batch))
    per_entry = 1 if blocks is None else max(len(blocks), 1)
    elements, end = [], 0
    for place, (first, n, first_source, m, offset) in enumerate(known):
        entry = place // per_entry
        first, first_source = first - entry * num_targets, first_source - entry * num_sources
        if not (0 <= n <= num_targets - first and 0 <= m <= num_sources - first_source):
            raise InputError(f"the graph's lengths must lie between 0 and its sizes; got {n} targets and {m} sources.")
        elements.append(Element(entry, first, n, first_source, m, offset, place, *places[place % len(places)]))
    if with_weights:
        for place in sorted(range(len(elements)), key=lambda place: place % per_entry):
            _, _, n, _, m, *_ = element = elements[place]
            n, m = (n, m) if blocks is not None else (num_targets, num_sources)
            elements[place] = element._replace(weights_at=end, weights_head=n * m, weights_row=m)
            end += heads * n * m
    return tuple(elements), end


class Inputs(NamedTuple):
    """The tensors of a call; the first five may need gradients."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    """Of the type that is computed in: of all pairs, `[B, H, N, M]`, or the values of a `Term`"""
    sink: Tensor | None
    mask: Tensor | None
    """Of a graph of blocks: the tile of each pair of blocks, or -1, `[B, H, n, m]`, in int32"""
    of_pairs: Tensor | None
    """See `Term`; of a graph of blocks, which pairs of each tile attend, `[T, S, S]`"""
    starts: Tensor | None
    seed: Tensor | None


@lru_cache(maxsize=256)
def check_fit(rule: Rule, *forms: Form) -> None:
    """Raises `InputError` unless what kernels read is there; `forms` are those of `Inputs` without sink and seed."""
    (query, _), (key, _), (value, _), bias, mask, index, starts = forms
    query, key, value = (shape if len(shape) == DIMS else (1, *shape) for shape in (query, key, value))
    heads = query[2]
    fits = query[0] == key[0] and query[3] == key[3] and key[:3] == value[:3] and heads % key[2] == 0
    ends = ((e.first_target + e.num_targets, e.first_source + e.num_sources) for e in rule.elements)
    fits = fits and all(end <= query[1] and end_of_sources <= key[1] for end, end_of_sources in ends)
    sizes = ((e.term + 1, heads, e.num_targets, e.num_sources) for e in rule.elements)
    least = [max(x) for x in zip(*sizes, strict=True)]
    for term in (bias if rule.bias == "all" else None, None if rule.block else mask):
        fits &= term is None or all(size == 1 or size >= x for size, x in zip(term[0], least, strict=False))
    if rule.block and mask is not None:  # of blocks, none is broadcast
        blocks = [*least[:2], *(-(-size // rule.block) for size in least[2:])]
        fits &= all(
            size == x or (size == 1 and at < 2) for at, (size, x) in enumerate(zip(mask[0], blocks, strict=True))
        )
        fits &= index is None or tuple(index[0][1:]) == (rule.block, rule.block)
    if rule.bias != "all":
        fits &= bias is not None and bias[0][1] in (1, heads) and _has_terms(rule, index, starts)
    if not fits:
        shapes = [list(form[0]) for form in forms if form is not None]
        raise InputError(f"query, key, value, bias and mask do not fit each other: {shapes}.")


def _has_terms(rule: Rule, index: Form | None, starts: Form | None) -> bool:
    """Whether there is a bucket of each pair, or a start of each target's listed pairs."""
    if rule.bias == "distances":
        return True
    if index is None or (rule.bias == "listed" and starts is None):
        return False
    if starts is not None:
        return all(e.bias_at + e.num_targets < starts[0][0] for e in rule.elements)
    ends = (e.bias_at + (e.num_targets - 1) * e.bias_step + e.num_sources for e in rule.elements if e.num_targets)
    return all(end <= math.prod(index[0]) for end in ends)
