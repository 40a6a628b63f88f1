"""Exceptions of gattn in addition to Python's own, and the checks of numbers that its layers share."""

from __future__ import annotations

from typing import Any

__all__ = ["InputError", "InputTypeError", "check_at_least", "check_integers"]


class InputError(ValueError, AssertionError, RuntimeError):
    """An invalid argument of a drop-in replacement for a layer of PyTorch or PyG.

    For the same mistake, the original layers raise an `AssertionError` in some places and a `RuntimeError` in others,
    where gattn has always raised a `ValueError`. This exception is all three, so existing `except` clauses still work.
    """


class InputTypeError(InputError, TypeError):
    """An argument of the wrong type, where the originals raise one of the base classes of `InputError`."""


def check_integers(**numbers: Any) -> None:
    """Raises `TypeError` if a number is not an integer."""
    for name, number in numbers.items():
        if not hasattr(number, "__index__"):
            raise InputTypeError(f"{name} must be an integer; got {number!r}.")


def check_at_least(least: int, **numbers: Any) -> None:
    """Raises `TypeError` or `ValueError` if a number is not an integer, or too small."""
    check_integers(**numbers)
    for name, number in numbers.items():
        if number < least:
            raise InputError(f"{name} must be at least {least}; got {number}.")
