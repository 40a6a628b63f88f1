"""Computing something large a part at a time."""

from __future__ import annotations

#: By how much each part is smaller than the one before.
_STEP = 4


def chunk_sizes(total: int, largest: int) -> list[int]:
    """Sizes of parts of `total`, each a little smaller than the one before, and larger than half of `largest`.

    Memory that a part gave back serves the next: in glibc before 2.38, aligned memory never fits where equally much was
    freed, so that equal parts would take new memory each.

    Args:
        total: What is divided.
        largest: The size of the first part.
    """
    sizes: list[int] = []
    left, falls = total, max(largest // (2 * _STEP), 1)
    while left > 0:
        sizes.append(min(largest - len(sizes) % falls * _STEP, left))
        left -= sizes[-1]
    return sizes
