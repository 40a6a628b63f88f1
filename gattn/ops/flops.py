"""How many floating-point operations attention takes, for `torch.utils.flop_counter.FlopCounterMode`.

Only products are counted, as PyTorch counts those of its own fused attention: forward, one multiplication and one
addition per pair, head and channel for the scores, and as many for the weighted sum; backward, the scores again and
twice as many for the gradients of both. Pairs that a window, a length or a list of edges leaves out are not counted;
pairs that a mask hides are.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import flop_counter
from torch.utils.flop_counter import register_flop_formula

from gattn.ops.differentiated import library
from gattn.torch_private import (
    flash_attention_on_cpu,
    flash_attention_on_cpu_backward,
    is_counted,
)

__all__ = ["count_tiles", "of_lists", "of_pairs", "register"]


def of_pairs(pairs: int, channels: int, value_channels: int, is_backward: bool = False) -> int:
    """The operations for pairs of a target, a source and a head, given the numbers of channels."""
    return 2 * pairs * (3 * channels + 2 * value_channels if is_backward else channels + value_channels)


def of_lists(inputs: Any, is_scalar: bool, is_backward: bool = False) -> int:
    """The operations of a call on a list of edges.

    Args:
        inputs: The `gattn.ops.terms.Inputs`.
        is_scalar: Whether logits are sums of one number for each end of an edge, without products.
        is_backward: Whether they are those of the backward pass. (default: `False`)
    """
    edges = inputs.most_edges
    if inputs.self_loops and type(inputs.edge_index) is Tensor:  # which replace those that are there
        edges -= int((inputs.edge_index[0] == inputs.edge_index[1]).sum())
    features = 0 if inputs.edge_projection is None else inputs.edge_projection.size(-1)
    channels = (0 if is_scalar else inputs.key.size(-1)) + inputs.key.size(-1) * features
    pairs = prod(inputs.front) * edges * inputs.heads
    return of_pairs(pairs, channels, inputs.values.size(-1), is_backward)


def register(name: str, formula: Callable[..., int]) -> None:
    """Registers the formula of an operator, which takes its arguments."""

    def count(*arguments: Any, out_val: Any = None, **_: Any) -> int:
        return formula(*arguments)

    register_flop_formula(getattr(torch.ops.gattn, name), get_raw=True)(count)


def count_tiles(x: Tensor, flops: Callable[[], int]) -> None:
    """Tells a counter that looks on what kernels compute that are called without an operator."""
    if is_counted():
        torch.ops.gattn.count_tiles(x, flops())


library.define("count_tiles(Tensor x, SymInt flops) -> ()")
library.impl("count_tiles", lambda x, flops: None, "CompositeExplicitAutograd")
register("count_tiles", lambda x, flops: int(flops))

# PyTorch's own counter knows its fused attention on other devices only.
for _operator, _formula in (
    (flash_attention_on_cpu, flop_counter.sdpa_flop),
    (flash_attention_on_cpu_backward, flop_counter.sdpa_backward_flop),
):
    if _operator not in flop_counter.flop_registry:
        flop_counter.flop_registry[_operator] = _formula
