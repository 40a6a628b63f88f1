"""Settings of the whole process, for a block of code or by an environment variable."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

__all__ = ["Setting", "left_to_torch"]

_Value = TypeVar("_Value")


class _Request(Generic[_Value]):
    """What one block asks for; requests of equal values are told apart."""

    def __init__(self, value: _Value):
        self.value = value


class Setting(Generic[_Value]):
    """What the block that was entered last, and has not been left, asks for.

    Blocks may overlap in any order, as those of several threads do. A setting applies to the whole process, as
    PyTorch's own flags do: `torch.compile` guards on it, while a context variable would break its graph.

    Args:
        default: The value outside of all blocks.
    """

    def __init__(self, default: _Value):
        self._requests = [_Request(default)]
        self.value = default  # at the moment: read in every call, so no property

    @contextmanager
    def block(self, value: _Value) -> Iterator[None]:
        """Asks for a value until the block is left."""
        request = _Request(value)
        self._requests.append(request)
        self.value = value
        try:
            yield
        finally:
            self._requests.remove(request)
            self.value = self._requests[-1].value


_MAY_BE_LEFT = ("dropout", "products")


def left_to_torch() -> frozenset[str]:
    """What the environment variable `GATTN_TORCH` leaves to PyTorch's own functions: `dropout`, `products`, or both.

    Raises:
        ValueError: If it names anything else.
    """
    names = frozenset(os.environ.get("GATTN_TORCH", "").replace(",", " ").split())
    if not names.issubset(_MAY_BE_LEFT):
        raise ValueError(f"GATTN_TORCH may name {' and '.join(_MAY_BE_LEFT)}; it is {os.environ['GATTN_TORCH']!r}.")
    return names
