"""T5's biases of distances, without a tensor of all pairs of tokens.

Dimensions: N targets, M sources, H heads.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

from torch import Tensor
from torch.nn import Module

from gattn.bias import DistanceBias

__all__ = ["WITH_DISTANCES", "PositionBias", "keep_distances"]


#: Models whose layers compute a bias of distances by `compute_bias(query_length, key_length)`.
WITH_DISTANCES = ("t5", "mt5", "umt5", "longt5", "switch_transformers", "pop2piano")


class PositionBias:
    """What T5's first layer hands to the others in place of its tensor `[1, H, N, M]`.

    Args:
        module: The layer with the table, of which each layer takes what it needs: gradients then find it directly.
        compute: Its method that returns the tensor.
        sizes: N and M.
        past: How many tokens are before target 0.
    """

    def __init__(self, module: Module, compute: Any, sizes: tuple[int, int], past: Any):
        self.module, self.compute, self.sizes, self.past = module, compute, sizes, past

    def bias(self) -> DistanceBias:
        """The bias of each distance, of which there are N + M - 1."""
        n, m = self.sizes
        past = self.past if isinstance(self.past, int) else int(self.past)
        first = -(past + n - 1)
        row = self.compute(self.module, 1, n + m - 1, past_seen_tokens=-first)
        return DistanceBias(row[0, :, 0].t(), first)

    def tensor(self) -> Tensor:
        """The tensor itself, for masks that are tensors of all pairs, too."""
        found: Tensor = self.compute(self.module, *self.sizes, past_seen_tokens=self.past)
        return found


def keep_distances(model_type: str) -> None:
    """Lets the layers of a T5 make a `PositionBias` while they run on gattn."""
    module = sys.modules.get(f"transformers.models.{model_type}.modeling_{model_type}")
    for cls in vars(module).values() if module else ():
        compute = vars(cls).get("compute_bias") if isinstance(cls, type) else None
        code = getattr(compute, "__code__", None)
        names = code.co_varnames[: code.co_argcount] if code else ()
        takes = names[:3] == ("self", "query_length", "key_length") and "past_seen_tokens" in names
        if takes and not hasattr(compute, "__wrapped__"):
            cls.compute_bias = _by_distance(compute)


def _by_distance(compute: Any) -> Any:
    @wraps(compute)
    def made(self: Any, *args: int, past_seen_tokens: Any = 0, **kwargs: Any) -> Any:
        if getattr(getattr(self, "config", None), "_attn_implementation", None) != "gattn" or kwargs.keys() - {
            "device"
        }:
            return compute(self, *args, past_seen_tokens=past_seen_tokens, **kwargs)
        return PositionBias(self, compute, (args[0], args[1]), past_seen_tokens)

    return made
