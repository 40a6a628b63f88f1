"""Large computations, one part at a time."""

from __future__ import annotations

__all__ = ["chunk_sizes"]

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
