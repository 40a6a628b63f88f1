"""Dropout of features, dense and sparse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from gattn.blocks import left_to_torch
from gattn.graphs.edge_lists import derived
from gattn.nn.shared.linear import transposed_pattern
from gattn.ops.backends.cpu import dropping
from gattn.ops.dropout import draw_seed
from gattn.tracing import Leaf

__all__ = ["Dropout", "dropout", "replace_dropout"]


def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    r"""Zeroes each number with probability :math:`p`, and multiplies the others by :math:`1 / (1 - p)`.

    From `"Dropout: A Simple Way to Prevent Neural Networks from Overfitting"
    <https://jmlr.org/papers/v15/srivastava14a.html>`_, and like :func:`torch.nn.functional.dropout`. But on CPUs, it
    uses all threads, and keeps no mask in memory, since it draws it again in the backward pass. What is dropped depends
    on PyTorch's generator, from which each call takes one number, and not on the number of threads. It is not what
    PyTorch's own function drops; that one is called for few numbers (fewer than 4096), on other devices, and for
    everything if the environment variable `GATTN_TORCH` is `dropout`, which gives back PyTorch's and PyG's draws.

    Args:
        x: Numbers of a floating-point type, `[...]`. Of a sparse matrix `[N, F]`, stored values are dropped, as zeros
            stay zeros either way; it becomes CSR.
        p: The probability.
        training: Whether to drop anything.
        inplace: Whether to change `x` itself, which must be dense.

    Returns:
        A tensor like `x`; `x` itself if nothing is dropped.

    Raises:
        ValueError: If `p` is not between 0 and 1.

    Example:
        >>> import torch, gattn
        >>> _ = torch.manual_seed(0)
        >>> x = torch.ones(1000)
        >>> dropped = gattn.dropout(x, 0.2)
        >>> dropped.unique()
        tensor([0.0000, 1.2500])
        >>> gattn.dropout(x, 0.2, training=False) is x
        True
    """
    if not training and type(x) is Tensor and type(p) is float and 0.0 <= p <= 1.0:
        return x
    if not training or not isinstance(x, Tensor) or x.is_nested:
        return F.dropout(x, p, training, inplace)
    if x.layout != torch.strided and not inplace:
        return _of_stored_values(x, p)
    if _LEFT_TO_TORCH or type(x) not in _PLAIN or not 0.0 < p < 1.0 or not dropping.can_drop(x):
        return F.dropout(x, p, training, inplace)
    is_compiling = torch.compiler.is_compiling()
    is_small = x.numel() < _SMALL and not is_compiling
    if is_small and x.is_contiguous():
        return F.dropout(x, p, training, inplace)
    # What PyTorch's function drops depends on the strides.
    result = F.dropout(x.contiguous(), p) if is_small else dropping.drop(x, float(p), draw_seed(x.device))
    if inplace:
        return x.copy_(result)
    if is_compiling or x.is_contiguous():
        return result
    return torch.empty_like(x).copy_(result)  # with the strides of x


_PLAIN = (Tensor, Parameter)
_LEFT_TO_TORCH = "dropout" in left_to_torch()
_SMALL = 1 << 12
"""Of fewer numbers, PyTorch's own function is as fast."""


def _of_stored_values(x: Tensor, p: float) -> Tensor:
    if p == 0.0:
        return x
    if x.layout != torch.sparse_csr:
        x = x.to_sparse_csr()
    values = dropout(x.values(), p)
    result = torch.sparse_csr_tensor(x.crow_indices(), x.col_indices(), values, x.shape, check_invariants=False)
    derived(result, "transposed pattern", lambda: transposed_pattern(x))
    return result


class Dropout(Leaf, torch.nn.Dropout):
    r"""Dropout of features, with the arguments of :class:`torch.nn.Dropout`; see :func:`gattn.dropout`.

    Args:
        p: The probability of each number to be zeroed.
        inplace: Whether to change the input itself.

    Raises:
        ValueError: If `p` is not between 0 and 1.

    Shapes:
        - **input:** any, :math:`(*)`; a sparse matrix; or a pair of both kinds for sources and targets
        - **output:** the same

    Example:
        >>> import torch
        >>> from gattn.nn import Dropout
        >>> Dropout(1.0)(torch.eye(3).to_sparse_csr()).values()
        tensor([0., 0., 0.])
    """

    @overload
    def forward(self, x: Tensor) -> Tensor: ...

    @overload
    def forward(self, x: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]: ...

    def forward(self, x: Any) -> Any:
        """Drops features `[..., F]`, dense or sparse, or both parts of a pair (sources, targets).

        Args:
            x: The features.
        """
        if not isinstance(x, Tensor):
            return tuple(None if features is None else self(features) for features in x)
        return dropout(x, self.p, self.training, self.inplace)


def replace_dropout(module: torch.nn.Module) -> None:
    """Replaces each `torch.nn.Dropout` in a module that PyG has made."""
    for each in module.modules():
        if type(each) is torch.nn.Dropout:
            each.__class__ = Dropout
