"""Exceptions of gattn in addition to Python's own."""

from __future__ import annotations

__all__ = ["InputError", "InputTypeError"]


class InputError(ValueError, AssertionError, RuntimeError):
    """An invalid argument of a drop-in replacement for a layer of PyTorch or PyG.

    For the same mistake, the original layers raise an `AssertionError` in some places and a `RuntimeError` in others,
    where gattn has always raised a `ValueError`. This exception is all three, so existing `except` clauses still work.
    """


class InputTypeError(InputError, TypeError):
    """An argument of the wrong type, where the originals raise one of the base classes of `InputError`."""
