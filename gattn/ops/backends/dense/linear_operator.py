"""Linear attention on packed graphs as a PyTorch operator, for compiled code, which does not know the blocks' sizes.

The operator reads them, and chooses between sums over sources and tiles of pairs. Its backward pass computes the output
again, whose states are not kept in either.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gattn.distributions import Law
from gattn.graphs import CompleteGraph
from gattn.graphs.complete import packed_by
from gattn.ops.backends.dense import linear, tiles
from gattn.ops.backends.dense.tile_rules import elements_for_tiles
from gattn.ops.differentiated import Differentiated, library
from gattn.ops.flops import register

__all__ = ["attend"]

_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor batch, Tensor source_batch, float scale, bool normalize, "
    "float eps, bool causal"
)
library.define(f"linear_packed({_ARGUMENTS}) -> Tensor")
library.define(f"linear_packed_backward(Tensor grad, {_ARGUMENTS}, bool[] wanted) -> Tensor[]")


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, normalize: bool, eps: float, graph: CompleteGraph
) -> Tensor:
    """What `linear.attend` returns, on a packed graph whose blocks are open."""
    blocks: Any = graph.blocks
    tensors = query, key, value, blocks.of_target, blocks.of_source
    out: Tensor = _operator(*tensors, scale, normalize, eps, graph.causal)
    return out


def _compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    of_target: Tensor,
    of_source: Tensor,
    scale: float,
    normalize: bool,
    eps: float,
    causal: bool,
) -> Tensor:
    graph = packed_by(of_target, of_source, causal)
    law = Law("identity", (float(normalize), eps))
    if linear.is_faster(graph, max(query.size(-1), value.size(-1))) or tiles.refuses((query, key, value), law):
        return linear.attend(query, key, value, scale, normalize, eps, graph).to(value.dtype)
    left, right = graph.reach
    sizes = query.size(0), query.size(1), key.size(1), query.size(2)
    elements, _ = elements_for_tiles(None, graph.blocks, sizes, 0)
    rule = tiles.Rule(
        scale=scale,
        slope=1.0,
        clamp=math.inf,
        law=law,
        left=left,
        right=right,
        elements=elements,
        dropout=0.0,
        log_sum=False,
    )
    return tiles.attend(query, key, value, None, None, None, rule, 0)[0]


def _compute_backward(grad: Tensor, *arguments: Any) -> list[Tensor]:
    *inputs, wanted = arguments
    with torch.enable_grad():
        given = [x.detach().requires_grad_(is_wanted) for x, is_wanted in zip(inputs[:3], wanted, strict=True)]
        found = torch.autograd.grad(_compute(*given, *inputs[3:]), [x for x in given if x.requires_grad], grad)
    return [x.contiguous() for x in found]


def _fake(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
    return value.new_empty(*query.shape[:3], value.size(-1))


def _fake_backward(grad: Tensor, *arguments: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x, is_wanted in zip(arguments[:3], arguments[-1], strict=True) if is_wanted]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.numbers = inputs[5:]
    ctx.wanted = [x.requires_grad for x in inputs[:3]]
    ctx.save_for_backward(*inputs[:5])


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    found = iter(torch.ops.gattn.linear_packed_backward(grad, *ctx.saved_tensors, *ctx.numbers, ctx.wanted))
    return *(next(found) if is_wanted else None for is_wanted in ctx.wanted), *[None] * 6


for _name, _function, _of_shapes in (
    ("linear_packed", _compute, _fake),
    ("linear_packed_backward", _compute_backward, _fake_backward),
):
    for _device in ("CPU", "CUDA"):
        library.impl(_name, _function, _device)
    torch.library.register_fake(f"gattn::{_name}", _of_shapes, lib=library)


def _flops(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> int:
    """Each source is added to a state, and each target multiplied with one."""
    return 2 * (query.numel() + key.numel() * query.size(-2) // key.size(-2)) * (value.size(-1) + 1)


register("linear_packed", _flops)
register("linear_packed_backward", lambda grad, *given: 2 * _flops(*given))
_operator = Differentiated("linear_packed", _compute, _save, _differentiate)
