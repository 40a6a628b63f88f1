"""Large computations, one part at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gattn.torch_private import is_traced

__all__ = ["chunk_sizes", "computed_again"]

#: How much smaller each part is than the one before.
_STEP = 4


def chunk_sizes(total: int, largest: int) -> list[int]:
    """Sizes of parts of `total`, each a little smaller than the one before, and larger than half of `largest`.

    The memory of a part can be reused by the next: in glibc before 2.38, aligned memory never fits where exactly as
    much was freed, so parts of equal size would take new memory each time.

    Args:
        total: The size to divide.
        largest: The size of the first part.
    """
    sizes: list[int] = []
    left, falls = total, max(largest // (2 * _STEP), 1)
    while left > 0:
        sizes.append(min(largest - len(sizes) % falls * _STEP, left))
        left -= sizes[-1]
    return sizes


def computed_again(function: Callable[..., Any], *arguments: Any, reads: Iterable[Tensor | None]) -> Any:
    """What a function returns, none of whose intermediate results are kept: the backward pass calls it again.

    Args:
        function: The function.
        arguments: Its arguments.
        reads: The tensors that it reads. Autograd does not know of them, so an edit in place would go unnoticed.
    """
    if is_traced():
        return checkpoint(function, *arguments, use_reentrant=False)
    versions = [(x, x._version) for x in reads if x is not None and not x.is_inference()]

    def again(*arguments: Any) -> Any:
        for x, version in versions:
            if x._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a tensor of shape {list(x.shape)} that attention read is at version {x._version}, expected "
                    f"{version}. Edit a clone of it, or edit it after the backward pass."
                )
        return function(*arguments)

    return checkpoint(again, *arguments, use_reentrant=False)
