"""What gattn raises beyond Python's own exceptions."""

from __future__ import annotations


class InputError(ValueError, AssertionError, RuntimeError):
    """An argument that does not fit, in a drop-in for a layer of PyTorch or PyG.

    For the same mistake the originals raise an `AssertionError` here and a `RuntimeError` there, where gattn has always
    raised a `ValueError`. This is all three, so code that catches what the original raises keeps working.
    """


class InputTypeError(InputError, TypeError):
    """An argument of a type that is not taken, where the originals raise one of what `InputError` is."""
