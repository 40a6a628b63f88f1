"""Whether inputs are checked for NaN, in a block of code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gattn.bias import Bias
from gattn.blocks import Setting
from gattn.distributions import Distribution
from gattn.edges import Projected, Typed
from gattn.scores import Score

__all__ = ["check_finite", "checks_finite", "require_finite"]

_checks_finite = Setting(False)


@contextmanager
def check_finite(enabled: bool = True) -> Iterator[None]:
    """Makes every attention call in the block check its inputs first, and name the one that holds NaN or infinity.

    This costs one pass over each input, so it is off by default.

    Args:
        enabled: Set to `False` to switch an outer check off again. (default: `True`)

    Example:
        >>> import torch, gattn
        >>> conv = gattn.nn.GATConv(2, 4)
        >>> x = torch.tensor([[0.0, 1.0], [float("nan"), 0.0]])
        >>> with gattn.check_finite():
        ...     conv(x, torch.tensor([[0], [1]]))
        Traceback (most recent call last):
        ...
        ValueError: x holds 1 value that is NaN or infinite (the first one at index (1, 0)).
    """
    with _checks_finite.block(enabled):
        yield


def checks_finite() -> bool:
    """Whether inputs are checked at the moment."""
    return _checks_finite.value


def require_finite(**tensors: Any) -> None:
    """Raises `ValueError` in a `check_finite` block if one of these, or a tensor in one of them, is not finite."""
    if not _checks_finite.value:
        return
    for name, tensor in _named(tensors):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            continue
        if tensor.layout != torch.strided:
            tensor = tensor.to_dense()
        bad = ~tensor.isfinite()
        if name == "bias" or name.endswith("'s sink"):
            bad &= tensor != -torch.inf  # which masks an edge, or takes no weight
        if bad.any():
            count, first = int(bad.sum()), tuple(bad.nonzero()[0].tolist())
            what = "1 value that is" if count == 1 else f"{count} values that are"
            raise ValueError(f"{name} holds {what} NaN or infinite (the first one at index {first}).")


def _named(terms: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What is given by name, and the parts of edge terms, scores and distributions by theirs."""
    for name, term in terms.items():
        if isinstance(term, (Projected, Typed)):
            yield from ((f"the {part} of {name}", tensor) for part, tensor in term._asdict().items())
        elif isinstance(term, Bias):
            yield from ((name, tensor) for tensor in term.tensors())
        elif isinstance(term, (Score, Distribution)):
            yield from _named({f"{type(term).__name__}'s {part}": value for part, value in vars(term).items()})
        else:
            yield name, term
