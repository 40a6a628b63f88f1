"""Large computations, one part at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = ["chunk_sizes", "recomputed"]

#: How much smaller each part is than the one before.
_STEP = 4


def chunk_sizes(total: int, largest: int, step: int = _STEP) -> list[int]:
    """Sizes of parts of `total`, each a little smaller than the one before, and larger than half of `largest`.

    The memory of a part can be reused by the next: in glibc before 2.38, aligned memory never fits where exactly as
    much was freed, so parts of equal size would take new memory each time.

    Args:
        total: The size to divide.
        largest: The size of the first part.
        step: How much smaller each part is than the one before; the smaller, the fewer parts need new memory.
    """
    sizes: list[int] = []
    left, falls = total, max(largest // (2 * step), 1)
    while left > 0:
        sizes.append(min(largest - len(sizes) % falls * step, left))
        left -= sizes[-1]
    return sizes


def recomputed(function: Callable[..., Any], *arguments: Any, reads: Sequence[Tensor | None]) -> Any:
    """The result of a function, of which nothing is kept for the backward pass: it calls the function again.

    Args:
        function: The function.
        *arguments: Its arguments.
        reads: The tensors that it reads. As for tensors that autograd saves, the backward pass raises an error if one
            of them was edited in place; `checkpoint` itself would compute with what is there then.
    """
    if torch.compiler.is_compiling():  # where autograd saves them
        return checkpoint(function, *arguments, use_reentrant=False)
    read = [x for x in reads if x is not None and not x.is_inference()]  # those are not edited outside inference mode
    versions = [x._version for x in read]

    def call(*arguments: Any) -> Any:
        if [x._version for x in read] != versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation, "
                "between the forward and the backward pass of attention."
            )
        return function(*arguments)

    return checkpoint(call, *arguments, use_reentrant=False)
