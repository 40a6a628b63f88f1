"""Attention by tiles as a PyTorch operator, for compiled code, in which sizes may be open.

A `Rule` is given as numbers, integers and names; its elements follow from the tensors' sizes when the operator runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gattn.bias import Term
from gattn.distributions import Law
from gattn.graphs.complete import OpenBlocks, packed_by
from gattn.ops.backends.base import new_seed
from gattn.ops.backends.dense import tiles
from gattn.ops.backends.dense.tile_rules import FAR, elements_for_tiles
from gattn.ops.call import compute_dtype
from gattn.ops.differentiated import Differentiated, library, save_tensors, saved_tensors
from gattn.ops.flops import register

__all__ = ["attend"]

#: What compiled code cannot hold as a constant: that nothing bounds the products.
_UNBOUNDED = -1.0

_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? sink, Tensor? mask, Tensor? index, Tensor? starts, "
    "Tensor? seed, Tensor? batch, Tensor? source_batch"
)
_NUM_TENSORS = len(tiles.Inputs._fields) + 2
_RULE = "float[] numbers, SymInt[] integers, str[] names"
library.define(f"tiles({_INPUTS}, {_RULE}) -> Tensor[]")
library.define(
    f"tiles_backward({_INPUTS}, Tensor wide, Tensor stats, Tensor weights, Tensor? grad, Tensor? grad_log_sum, "
    f"Tensor? grad_weights, {_RULE}, bool[] wanted) -> Tensor[]"
)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | Term | None,
    mask: Tensor | None,
    sink: Tensor | None,
    rule: tiles.Rule,
    offset: int,
    blocks: Sequence[tuple[int, int]] | OpenBlocks | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What `tiles.attend` returns.

    Args:
        query: See there, like the next arguments.
        key: See there.
        value: See there.
        bias: See there.
        mask: See there.
        sink: See there.
        rule: See there; without elements.
        offset: The position of target 0, if nothing is packed.
        blocks: The sizes of a packed graph's blocks, which the operator may have to find from the block of each node.
    """
    compute = compute_dtype(value.dtype)
    places = bias.places if isinstance(bias, Term) else ((0, 0),)
    kind, first, bias, index, starts = tiles.read(bias, query.size(2))
    bias, sink = (None if x is None else x.to(compute) for x in (bias, sink))
    clamp = _UNBOUNDED if rule.clamp == math.inf else rule.clamp
    numbers = [rule.scale, rule.slope, clamp, rule.dropout, *rule.law.constants]
    left, right = (FAR if side is None else side for side in (rule.left, rule.right))
    of_target, of_source = None, None
    if isinstance(blocks, OpenBlocks):
        of_target, of_source, blocks = blocks.of_target, blocks.of_source, None
    sizes = [] if blocks is None else [size for block in blocks for size in block]
    integers = [left, right, offset, first, -1 if blocks is None else len(blocks), *sizes]
    integers += [number for place in places for number in place]
    names = [rule.law.name, kind, str(rule.weights)]
    seed = new_seed(rule.dropout, value.device)
    tensors = query, key, value, bias, sink, mask, index, starts, seed, of_target, of_source
    found: list[Tensor] = _operator(*tensors, numbers, integers, names)
    return found[0], found[2], found[3] if rule.weights else None


def _blocks_of(integers: Sequence[int]) -> tuple[tuple[int, int], ...] | None:
    """The blocks that are among the integers."""
    count = integers[4]
    if count < 0:
        return None
    numbers = integers[5 : 5 + 2 * count]
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


@lru_cache(maxsize=64)
def _rule_of(
    numbers: tuple[float, ...],
    integers: tuple[int, ...],
    names: tuple[str, ...],
    blocks: tuple[tuple[int, int], ...] | None,
    sizes: tuple[int, int, int, int],
) -> tuple[tiles.Rule, int]:
    """The rule, and the number of weights, for these blocks, and B, N, M and H."""
    scale, slope, clamp, dropout, *constants = numbers
    left, right, offset, first = integers[:4]
    flat = integers[5 + 2 * max(integers[4], 0) :]
    places = tuple(zip(flat[::2], flat[1::2], strict=True))
    law, kind, weights = names
    elements, num_weights = elements_for_tiles(None, blocks, sizes, offset, places, weights != "False")
    return tiles.Rule(
        scale=scale,
        slope=slope,
        clamp=math.inf if clamp == _UNBOUNDED else clamp,
        law=Law(law, tuple(constants)),
        left=left,
        right=right,
        elements=elements,
        dropout=dropout,
        bias=kind,
        first=first,
        weights="dropped" if weights == "dropped" else weights != "False",
    ), num_weights


def _given(arguments: Sequence[Any]) -> tuple[tiles.Inputs, tiles.Rule, int]:
    """Inputs, rule and the number of weights, given the inputs and what describes the rule."""
    *tensors, of_target, of_source, numbers, integers, names = arguments
    inputs = tiles.Inputs(*tensors)
    sizes = inputs.query.size(0), inputs.query.size(1), inputs.key.size(1), inputs.query.size(2)
    blocks = _blocks_of(integers) if of_target is None else packed_by(of_target, of_source).blocks
    return inputs, *_rule_of(tuple(numbers), tuple(integers), tuple(names), blocks, sizes)


def _compute(*arguments: Any) -> list[Tensor]:
    inputs, rule, num_weights = _given(arguments)
    compute = compute_dtype(inputs.value.dtype)
    if inputs.query.numel() * inputs.key.numel() * inputs.value.numel() == 0:
        shape = inputs.query.shape[:3]
        out = inputs.value.new_zeros(*shape, inputs.value.size(-1))
        stats = out.new_full(shape, -torch.inf if rule.law.name == "softmax" else 0.0, dtype=compute)
        wide, weights = out.to(compute), stats.new_zeros(num_weights)
    else:
        out, wide, stats, found = tiles.forward(inputs, rule, num_weights, keeps=True)
        weights = stats.new_empty(0) if found is None else found
    return [out, stats.new_empty(0) if wide is out else wide, stats, weights]


def _compute_backward(*arguments: Any) -> list[Tensor]:
    *tensors, numbers, integers, names, wanted = arguments
    inputs, rule, _ = _given([*tensors[:_NUM_TENSORS], numbers, integers, names])
    wide, stats, weights, *grads = tensors[_NUM_TENSORS:]
    leaves = [x for x, is_wanted in zip(inputs[:5], wanted, strict=True) if x is not None and is_wanted]
    if inputs.query.numel() * inputs.key.numel() * inputs.value.numel() == 0:
        return [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in leaves]
    found = tiles.backward(inputs, rule, (wide, stats, weights), grads, wanted)
    return [x.contiguous() for x, is_wanted in zip(found, wanted, strict=True) if x is not None and is_wanted]


def _fake(*arguments: Any) -> list[Tensor]:
    inputs, (integers, names) = tiles.Inputs(*arguments[: _NUM_TENSORS - 2]), arguments[-2:]
    shape, heads = inputs.query.shape[:3], inputs.query.size(2)
    compute = compute_dtype(inputs.value.dtype)
    out = inputs.value.new_empty(*shape, inputs.value.size(-1))
    blocks = _blocks_of(integers)
    blocks = ((shape[1], inputs.key.size(1)),) if blocks is None else blocks
    count = 0 if names[2] == "False" else shape[0] * heads * sum(n * m for n, m in blocks)
    of_wide = (0,) if out.dtype == compute else out.shape
    return [out, *(out.new_empty(size, dtype=compute) for size in (of_wide, shape, (count,)))]


def _fake_backward(*arguments: Any) -> list[Tensor]:
    leaves = zip(arguments[:5], arguments[-1], strict=True)
    return [x.new_empty(x.shape) for x, is_wanted in leaves if x is not None and is_wanted]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    ctx.rule = inputs[_NUM_TENSORS:]
    ctx.wanted = [x is not None and x.requires_grad for x in inputs[:5]]
    out, wide, stats, weights = output
    save_tensors(ctx, (*inputs[:_NUM_TENSORS], out if out.dtype == stats.dtype else wide, stats, weights))


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, wide, stats, weights = saved_tensors(ctx)
    of_out, _, of_log_sum, of_weights = grads
    asked = of_out, of_log_sum, of_weights if ctx.rule[2][2] != "False" else None
    found = iter(
        torch.ops.gattn.tiles_backward(*inputs, wide, stats, weights, *asked, *ctx.rule, ctx.wanted)
        if any(x is not None for x in asked)
        else []
    )
    given = [next(found, None) if is_wanted else None for is_wanted in ctx.wanted]
    return *given, *[None] * 9


for _name, _function, _of_shapes in (
    ("tiles", _compute, _fake),
    ("tiles_backward", _compute_backward, _fake_backward),
):
    for _device in ("CPU", "CUDA"):
        library.impl(_name, _function, _device)
    torch.library.register_fake(f"gattn::{_name}", _of_shapes, lib=library)
register("tiles", lambda *given: tiles.flops(*_given(given)[:2]))
register(
    "tiles_backward",
    lambda *given: tiles.flops(*_given([*given[:_NUM_TENSORS], *given[-4:-1]])[:2], is_backward=True),
)
_operator = Differentiated("tiles", _compute, _save, _differentiate)
