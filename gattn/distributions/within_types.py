"""A distribution within each type of a target's edges."""

from __future__ import annotations

import torch
from torch import Tensor

from gattn.distributions.base import Distribution
from gattn.distributions.softmax import Softmax
from gattn.errors import InputError, InputTypeError, is_integer
from gattn.graphs.edge_lists import check_types, checked_types
from gattn.torch_private import guard_or_true

__all__ = ["WithinTypes"]


class WithinTypes(Distribution):
    r"""Weights that compete only with those of the same type, that is, within each relation of a typed graph.

    .. math::
        \alpha_{ij} = p\big(s_{ik} \text{ for } k \in \mathcal{N}_{r(ij)}(i)\big)_j

    The *within-relation* attention of `Relational Graph Attention Networks <https://arxiv.org/abs/1904.05811>`_.

    Args:
        edge_type: The type r of each edge, `[E]`, integers from 0, in the order of the graph's `edge_index`.
        distribution: The distribution among edges of one type. (default: `None`, `Softmax()`)
        num_types: The number of types R. If it is given, each target has R rows, and compiled code need not look at the
            types. (default: `None`, only rows that have edges)

    Shapes:
        logits and weights `[E, H]`, after the batch dimensions.

    Raises:
        TypeError: If `edge_type` is not a tensor, `num_types` is not an integer, or `distribution` depends on the
            target, as `LocalGaussian` does.
        ValueError: If `edge_type` does not hold integers, `num_types` is not positive, or (in use) `edge_type` does not
            fit the graph.
        IndexError: If a type is out of range (in compiled code RuntimeError, when it runs).

    Example:
        >>> import torch, gattn
        >>> within = gattn.WithinTypes(torch.tensor([0, 0, 1]))
        >>> within.weights(torch.zeros(3, 1), torch.tensor([0, 0, 0]), num_targets=1, dim=0).flatten()
        tensor([0.5000, 0.5000, 1.0000])
    """

    def __init__(self, edge_type: Tensor, distribution: Distribution | None = None, num_types: int | None = None):
        if num_types is not None and (not is_integer(num_types) or num_types < 1):
            error = InputError if is_integer(num_types) else InputTypeError
            raise error(f"num_types must be a positive number of types, an integer; got {num_types!r}.")
        self.distribution = Softmax() if distribution is None else distribution
        if not isinstance(self.distribution, Distribution) or self.distribution.knows_targets:
            raise InputTypeError(
                "WithinTypes takes a Distribution object whose weights do not depend on the target itself; got "
                f"{distribution!r}."
            )
        self.edge_type = checked_types(edge_type)
        self.num_types = num_types
        if num_types is not None:
            check_types(self.edge_type, num_types)

    def with_sources(self, source: Tensor) -> WithinTypes:
        """See `Distribution.with_sources`."""
        bound = self.distribution.with_sources(source)
        return self if bound is self.distribution else WithinTypes(self.edge_type, bound, self.num_types)

    def tensors(self) -> tuple[Tensor, ...]:
        """The types, and the tensors of the inner distribution."""
        return (self.edge_type, *self.distribution.tensors())

    def check(self, batch: tuple[int, ...], num_targets: int, heads: int) -> None:
        """See `Distribution.check`."""
        self.distribution.check(batch, num_targets, heads)

    def weights(self, logits: Tensor, index: Tensor, num_targets: int, dim: int) -> Tensor:
        """See `Distribution.weights`."""
        fits: bool = self.edge_type.size(0) == index.size(0)
        if not (guard_or_true(fits) if torch.compiler.is_compiling() else fits):
            raise InputError(
                f"WithinTypes has the types of {self.edge_type.size(0)} edges, but the graph has {index.size(0)}."
            )
        types, index = self.edge_type.view(index.shape), index.long()  # numbers that depend on data are compared here
        if self.num_types is not None:
            row = index * self.num_types + types
            return self.distribution.weights(logits, row, num_targets * self.num_types, dim)
        most = max(int(types.max()) + 1, 1) if types.numel() else 1
        check_types(types, most)  # fails if one is negative
        pairs, row = torch.unique(index * most + types, return_inverse=True)
        return self.distribution.weights(logits, row, pairs.numel(), dim)

    def __repr__(self) -> str:
        return f"WithinTypes({list(self.edge_type.shape)}, {self.distribution})"
