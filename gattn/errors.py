"""Exceptions of gattn in addition to Python's own, and the checks of numbers and flags that its parts share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import TypeIs

__all__ = [
    "BackendError",
    "InputError",
    "InputTypeError",
    "check_at_least",
    "check_flag",
    "check_integers",
    "check_number",
    "check_real",
    "is_integer",
]

_INFINITY = float("inf")
#: What a number may have to be, in the words of messages.
_RANGES = {
    "finite": lambda number: -_INFINITY < number < _INFINITY,
    "finite or minus infinity": lambda number: number < _INFINITY,
    "finite and not negative": lambda number: 0 <= number < _INFINITY,
    "positive": lambda number: number > 0,
    "positive and finite": lambda number: 0 < number < _INFINITY,
    "a probability between 0 and 1": lambda number: 0 <= number <= 1,
}
_NUMBERS = (float, int, np.floating, np.integer, torch.SymFloat, torch.SymInt)
_NOT_REAL = {torch.bool, torch.complex32, torch.complex64, torch.complex128}


class InputError(ValueError, AssertionError, RuntimeError):
    """An invalid argument of a drop-in replacement for a layer of PyTorch or PyG.

    For the same mistake, the original layers raise an `AssertionError` in some places and a `RuntimeError` in others,
    where gattn has always raised a `ValueError`. This exception is all three, so existing `except` clauses still work.
    """


class InputTypeError(InputError, TypeError):
    """An argument of the wrong type, where the originals raise one of the base classes of `InputError`."""


class BackendError(ValueError):
    """The backend that was requested cannot serve a call."""


def is_integer(number: Any) -> TypeIs[int]:
    """Whether an option is one integer of any library; a boolean is none."""
    if isinstance(number, (int, torch.SymInt)):  # the compiler cannot ask a symbol for its attributes
        return not isinstance(number, bool)
    return hasattr(number, "__index__") and not getattr(number, "ndim", 0)


def check_integers(**numbers: Any) -> None:
    """Raises `TypeError` if a number is not an integer."""
    for name, number in numbers.items():
        if not is_integer(number):
            raise InputTypeError(f"{name} must be an integer; got {number!r}.")


def check_at_least(least: int, **numbers: Any) -> None:
    """Raises `TypeError` or `ValueError` if a number is not an integer, or too small."""
    check_integers(**numbers)
    for name, number in numbers.items():
        if number < least:
            raise InputError(f"{name} must be at least {least}; got {number}.")


def check_number(name: str, number: Any, wanted: str = "finite", *, or_tensor: bool = False) -> None:
    """Raises `TypeError` or `ValueError` if an option is not a number, or not one that makes sense.

    Args:
        name: Its name.
        number: The option.
        wanted: One of the names of `_RANGES`, which holds for numbers only. (default: `"finite"`)
        or_tensor: Whether it may be a tensor, which gets gradients. (default: `False`)
    """
    kind = type(number)
    if kind is not float and kind is not int:  # the fast way, as layers make their scores in each call
        if or_tensor and isinstance(number, Tensor):
            check_real(name, number)
            return
        if isinstance(number, Tensor):
            raise InputTypeError(
                f"{name} must be a number, as it gets no gradient; got a tensor of shape {list(number.shape)}. If it is"
                " to be learnt, write a score or a distribution of your own."
            )
        if torch.compiler.is_compiling() and isinstance(number, np.ndarray):  # NumPy's numbers are arrays there
            return
        if isinstance(number, bool) or not isinstance(number, _NUMBERS):
            raise InputTypeError(f"{name} must be a number{' or a tensor' * or_tensor}; got {number!r}.")
    if not _RANGES[wanted](number):
        raise InputError(f"{name} must be {wanted}; got {number}.")


def check_real(name: str, tensor: Tensor) -> None:
    """Raises `ValueError` if a tensor holds booleans or complex numbers."""
    if tensor.dtype in _NOT_REAL:
        raise InputError(f"{name} must hold real numbers; got a tensor of {tensor.dtype}.")


def check_flag(name: str, flag: Any) -> None:
    """Raises `TypeError` if an option is neither true nor false: 0, 1 and NumPy's booleans are, a string is not."""
    if flag is True or flag is False:
        return
    has_elements = not isinstance(flag, int) and getattr(flag, "ndim", 0) > 0
    if has_elements or not (flag == 0 or flag == 1):  # the compiler's symbols cannot be looked up in a tuple
        raise InputTypeError(f"{name} must be True or False; got {flag!r}.")
