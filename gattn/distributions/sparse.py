"""Weights that are exactly zero for all but a few neighbours."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.utils import scatter

from gattn.distributions.base import Distribution, Law
from gattn.distributions.softmax import segment_reduce, softmax
from gattn.errors import InputError, InputTypeError, is_integer

__all__ = ["Entmax15", "Sparsemax", "TopK"]


#: No row has more edges than this.
_MOST = 2**53


class _Rows:
    """The rows of a list of edges: each holds the edges of one target.

    Args:
        index: The target of each edge, `[E]`.
        num_targets: Number of targets, N.
        dim: The dimension along which edges lie, counted from the front.
    """

    def __init__(self, index: Tensor, num_targets: int, dim: int):
        self.index = index
        self.num_targets = num_targets
        self.dim = dim

    def spread(self, x: Tensor) -> Tensor:
        """Copies one number per row to each of its members."""
        return x.index_select(self.dim, self.index)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of each row, for each of its members."""
        return self.spread(scatter(x, self.index, self.dim, self.num_targets, reduce="sum"))

    def max(self, x: Tensor) -> Tensor:
        """The largest of each row, for each of its members."""
        return self.spread(segment_reduce(x, self.index, self.num_targets, self.dim, -torch.inf, "amax"))

    def sort(self, x: Tensor) -> _Sorted:
        """The order of each row's members."""
        shape = [1] * x.dim()
        shape[self.dim] = -1
        row = self.index.view(shape).expand_as(x)
        order = x.argsort(dim=self.dim, descending=True, stable=True)
        order = order.gather(self.dim, row.gather(self.dim, order).argsort(dim=self.dim, stable=True))
        ones = torch.ones_like(self.index, dtype=torch.int64)
        size = ones.new_zeros(self.num_targets).index_add(0, self.index, ones)
        first = (size.cumsum(0) - size).index_select(0, self.index.sort()[0])  # of the row at each position
        rank = torch.arange(x.size(self.dim), device=x.device) - first
        return _Sorted(order, rank.view(shape).expand_as(x), first, self.dim)


class _Columns:
    """The rows of a matrix `[..., N, M]`, whose columns are sources; has the methods of `_Rows`."""

    dim = -1

    def sum(self, x: Tensor) -> Tensor:
        """See `_Rows.sum`."""
        return x.sum(-1, keepdim=True)

    def max(self, x: Tensor) -> Tensor:
        """See `_Rows.max`."""
        return x.amax(-1, keepdim=True)

    def sort(self, x: Tensor) -> _Sorted:
        """See `_Rows.sort`."""
        rank = torch.arange(x.size(-1), device=x.device).expand_as(x)
        return _Sorted(x.argsort(dim=-1, descending=True, stable=True), rank, None, -1)


class _Sorted(NamedTuple):
    """Members of rows, row by row and from the largest to the smallest; equal ones keep their order."""

    order: Tensor
    """The position of each."""
    rank: Tensor
    """How many members of its row come before each."""
    first: Tensor | None
    """The position of the first member of its row; `None` where rows have a dimension of their own."""
    dim: int

    def of(self, x: Tensor) -> Tensor:
        """Sorts other numbers into the same order."""
        return x.gather(self.dim, self.order)

    def back(self, x: Tensor) -> Tensor:
        """Puts sorted numbers back in the order of their members."""
        return torch.empty_like(x).scatter(self.dim, self.order, x)

    def cumsum(self, x: Tensor) -> Tensor:
        """The running sums of sorted numbers, which restart in each row."""
        sums = x.cumsum(self.dim)
        return sums if self.first is None else sums - (sums - x).index_select(self.dim, self.first)


class _ExactZeros(Distribution):
    """Base class of distributions that compute with rows, either of edges or of a matrix."""

    respects_infinity = True

    def _of(self, logits: Tensor, rows: _Rows | _Columns) -> Tensor:
        """The weights of float32 or float64 logits."""
        raise NotImplementedError

    def weights(self, logits: Tensor, index: Tensor, num_targets: int, dim: int) -> Tensor:
        """See `Distribution.weights`."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return self._of(wide, _Rows(index, num_targets, dim % logits.dim())).to(logits.dtype)

    def of_matrix(self, logits: Tensor) -> Tensor:
        """See `Distribution.of_matrix`."""
        return self._of(logits, _Columns()) if logits.size(-1) else logits


def _from_maximum(logits: Tensor, rows: _Rows | _Columns) -> Tensor:
    """Logits minus the maximum of their row, so at most zero."""
    maximum = rows.max(logits.detach())
    # A row that is all -inf would give -inf + inf.
    return logits - maximum.masked_fill(maximum == -torch.inf, 0.0)


def _sorted(z: Tensor, rows: _Rows | _Columns) -> tuple[_Sorted, Tensor]:
    """The order of logits relative to their maximum, and these in float64."""
    # None below -1 has a weight, so this bound keeps running sums exact.
    bounded = z.nan_to_num(0.0).clamp_min(-2.0)
    by_size = rows.sort(bounded)
    return by_size, by_size.of(bounded).double()


class Sparsemax(_ExactZeros):
    r"""`Sparsemax <https://arxiv.org/abs/1602.02068>`_: weights that sum to one, with exact zeros for small logits.

    The weights are the projection of the logits onto the probability simplex:

    .. math::
        \alpha_{ij} = \max(s_{ij} - \tau_i, 0), \qquad \sum_j \alpha_{ij} = 1

    Shapes:
        logits and weights `[E, H]`, after the batch dimensions.

    Example:
        >>> import torch, gattn
        >>> logits, index = torch.tensor([[2.0], [1.5], [0.0]]), torch.tensor([0, 0, 0])
        >>> gattn.Sparsemax().weights(logits, index, num_targets=1, dim=0).flatten()
        tensor([0.7500, 0.2500, 0.0000])
    """

    def law(self) -> Law:
        """See `Distribution.law`."""
        return Law("sparsemax")

    def _of(self, logits: Tensor, rows: _Rows | _Columns) -> Tensor:
        z = _from_maximum(logits, rows)
        with torch.no_grad():
            by_size, top = _sorted(z, rows)
            has_weight = 1 + (by_size.rank + 1) * top > by_size.cumsum(top)
            has_weight = by_size.back(has_weight) & (z != -torch.inf)
            count = rows.sum(has_weight.to(z.dtype)).clamp_min(1.0)
        threshold = (rows.sum(torch.where(has_weight, z, 0.0)) - 1) / count
        return (z - threshold).relu()


class Entmax15(_ExactZeros):
    r"""`1.5-entmax <https://arxiv.org/abs/1905.05702>`_: between softmax and sparsemax.

    Weights sum to one. Those of small logits are exactly zero, but fewer are than with sparsemax:

    .. math::
        \alpha_{ij} = \max(s_{ij} / 2 - \tau_i, 0)^2, \qquad \sum_j \alpha_{ij} = 1

    Shapes:
        logits and weights `[E, H]`, after the batch dimensions.

    Example:
        >>> import torch, gattn
        >>> logits, index = torch.tensor([[2.0], [1.5], [-2.0]]), torch.tensor([0, 0, 0])
        >>> gattn.Entmax15().weights(logits, index, num_targets=1, dim=0).flatten()
        tensor([0.6740, 0.3260, 0.0000])
    """

    def law(self) -> Law:
        """See `Distribution.law`."""
        return Law("entmax15")

    def _of(self, logits: Tensor, rows: _Rows | _Columns) -> Tensor:
        z = _from_maximum(logits, rows) / 2
        with torch.no_grad():
            by_size, top = _sorted(z, rows)
            threshold = _entmax_threshold(by_size.cumsum(top), by_size.cumsum(top.square()), by_size.rank + 1)
            has_weight = by_size.back(top >= threshold) & (z != -torch.inf)
            count = rows.sum(has_weight.to(z.dtype)).clamp_min(1.0)
        kept = torch.where(has_weight, z, 0.0)
        return (z - _entmax_threshold(rows.sum(kept), rows.sum(kept.square()), count)).relu().square()


def _entmax_threshold(total: Tensor, total_of_squares: Tensor, count: Tensor) -> Tensor:
    """The threshold from which `count` numbers have squared distances that sum to one."""
    mean = total / count
    return mean - ((1 - total_of_squares + total * mean) / count).clamp_min(0.0).sqrt()


class TopK(_ExactZeros):
    r"""A softmax over the k largest logits of each target; the other weights are exactly zero.

    .. math::
        \alpha_{i\cdot} = \mathrm{softmax}\big(s_{ij} \text{ for } j \in \mathrm{top}_k(i)\big)

    As in `Explicit Sparse Transformer <https://arxiv.org/abs/1912.11637>`_. Of equal logits, the first edges are kept.

    Args:
        k: How many neighbours of each target get weight.

    Shapes:
        logits and weights `[E, H]`, after the batch dimensions.

    Raises:
        TypeError: If `k` is not an integer.
        ValueError: If `k` is not positive.

    Example:
        >>> import torch, gattn
        >>> logits, index = torch.tensor([[1.0], [1.0], [0.0]]), torch.tensor([0, 0, 0])
        >>> gattn.TopK(2).weights(logits, index, num_targets=1, dim=0).flatten()
        tensor([0.5000, 0.5000, 0.0000])
    """

    def __init__(self, k: int):
        if not is_integer(k) or k < 1:
            error = InputError if is_integer(k) else InputTypeError
            raise error(f"TopK's k must be a positive integer, the number of neighbours to keep; got {k!r}.")
        self.k = k

    def law(self) -> Law:
        """See `Distribution.law`."""
        return Law("top_k", (float(min(self.k, _MOST)),))

    @classmethod
    def from_law(cls, law: Law) -> TopK:
        """See `Distribution.from_law`."""
        return cls(int(law.constants[0]))

    def _of(self, logits: Tensor, rows: _Rows | _Columns) -> Tensor:
        by_size = rows.sort(logits.detach())
        kept = by_size.back(by_size.rank < min(self.k, _MOST))
        # A NaN spreads to its whole row, as it does in the softmax.
        logits = logits.masked_fill(~kept & ~logits.isnan(), -torch.inf)
        if isinstance(rows, _Rows):
            return softmax(logits, rows.index, rows.num_targets, rows.dim)
        is_empty = (logits == -torch.inf).all(-1, keepdim=True)
        return logits.masked_fill(is_empty, 0.0).softmax(-1).masked_fill(is_empty, 0.0)

    def __repr__(self) -> str:
        return f"TopK({self.k})"
