"""Terms of edges that kernels make edge by edge, without a tensor `[E, H, C]`."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from gattn.graphs.edge_lists import check_later

__all__ = ["EdgeTerm", "Projected", "Typed", "rows_of", "vectors_of"]


class Projected(NamedTuple):
    r"""The term :math:`W_e e_{ij}` of each edge: a projection of its features.

    `gattn.attend(..., edge=Projected(features, weight))` computes what `edge=(features @ weight.T)` would, as
    `TransformerConv` (`Shi et al. <https://arxiv.org/abs/2009.03509>`_) does, but the CPU kernels project edge by edge.

    Args:
        features: `[E, D]`, in `edge_index` order.
        weight: `[H, C, D]`; for a score of scalars, such as `GATScore`, `[H, D]`.

    Shapes:
        The term is `[E, H, C]`, for a score of scalars `[E, H]`.

    Raises:
        ValueError: In use, if the sizes do not fit the graph or the other terms.

    Example:
        >>> import torch, gattn
        >>> x, edge_index = torch.randn(3, 2, 4), torch.tensor([[0, 1], [2, 2]])  # 3 nodes, 2 heads, 4 channels
        >>> edge = gattn.Projected(torch.randn(2, 5), torch.randn(2, 4, 5))  # 5 features of each of the 2 edges
        >>> gattn.attend(x, x, x, edge_index, edge=edge).shape
        torch.Size([3, 2, 4])
    """

    features: Tensor
    weight: Tensor


class Typed(NamedTuple):
    r"""The term :math:`t_{r(i,j)}` of each edge: the row of a table that belongs to its type.

    `gattn.attend(..., edge=Typed(table, types))` computes what `edge=table[types]` would, as relational attention
    (`Busbridge et al. <https://arxiv.org/abs/1904.05811>`_) needs it, but the CPU kernels look rows up edge by edge.

    Args:
        table: `[R, H, C]`, a row for each of R types; for a score of scalars, such as `GATScore`, `[R, H]`.
        types: `[E]`, integers from 0, in `edge_index` order.

    Shapes:
        The term is `[E, H, C]`, for a score of scalars `[E, H]`.

    Raises:
        ValueError: In use, if the sizes do not fit the graph or the other terms.
        IndexError: In use, if a type has no row.

    Example:
        >>> import torch, gattn
        >>> x, edge_index = torch.randn(3, 2, 4), torch.tensor([[0, 1], [2, 2]])  # 3 nodes, 2 heads, 4 channels
        >>> edge = gattn.Typed(torch.randn(7, 2, 4), torch.tensor([6, 0]))  # 7 types
        >>> gattn.attend(x, x, x, edge_index, edge=edge).shape
        torch.Size([3, 2, 4])
    """

    table: Tensor
    types: Tensor


#: What a score or a value adds per edge: a tensor with one entry per edge, or how to make these.
EdgeTerm: TypeAlias = Tensor | Projected | Typed


def vectors_of(term: EdgeTerm | None) -> Tensor | None:
    """A term as a tensor with one entry per edge."""
    if isinstance(term, Typed):
        check_later(term.types, term.table.size(0), "the types of edges hold a type")
        return term.table.index_select(0, term.types)
    if isinstance(term, Projected):
        features, weight = term
        dtype = torch.promote_types(features.dtype, weight.dtype)
        return torch.unflatten(F.linear(features.to(dtype), weight.flatten(0, -2).to(dtype)), -1, weight.shape[:-1])
    return term


def rows_of(term: EdgeTerm) -> Tensor:
    """The tensor of a term that has one entry per edge."""
    return term.types if isinstance(term, Typed) else term.features if isinstance(term, Projected) else term
