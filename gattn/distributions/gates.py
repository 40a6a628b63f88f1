"""Weights without competition: a function of each logit alone."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch_geometric.utils import scatter

from gattn.distributions.base import Distribution, Law, check_number
from gattn.scores import says


class Gate(Distribution):
    r"""Base class of weights without competition: a function of each logit alone.

    .. math::
        \alpha_{ij} = f(s_{ij}), \qquad \text{normalized:} \quad
        \alpha_{ij} = \frac{f(s_{ij})}{\epsilon + \sum_{k \in \mathcal{N}(i)} f(s_{ik})}

    To add one, override :meth:`of`. Masked edges, and logits of :math:`-\infty`, get weight zero; so do all edges of a
    target whose sum is exactly zero.

    Args:
        normalize: Whether weights are divided by the sum of each target's. (default: `False`)
        eps: The :math:`\epsilon` in that sum. (default: `0.0`)

    Raises:
        ValueError: If `eps` is negative or not finite, or given without `normalize`.

    Example:
        >>> import torch, gattn
        >>> class ReLU(gattn.Gate):
        ...     def of(self, logits):
        ...         return logits.relu()
        >>> x = torch.tensor([[[-1.0]], [[1.0]]])  # 2 nodes, 1 head, 1 channel
        >>> gattn.attend(x, x, x, gattn.CompleteGraph(2), distribution=ReLU()).flatten()
        tensor([-1.,  1.])
    """

    respects_infinity = True

    #: What kernels know the function by; `None` if they do not.
    name: ClassVar[str | None] = None

    def __init__(self, normalize: bool = False, eps: float = 0.0):
        check_number("eps", eps)
        if not 0 <= eps < float("inf"):
            raise ValueError(f"{type(self).__name__}'s eps is a finite number that is not negative; got {eps}.")
        if eps > 0 and not normalize:
            raise ValueError(f"{type(self).__name__}'s eps is part of the sum that normalize=True divides by.")
        self.normalize = normalize
        self.eps = eps

    def of(self, logits: Tensor) -> Tensor:
        """The function :math:`f`, of finite logits."""
        raise NotImplementedError(f"{type(self).__name__} does not define of().")

    def law(self) -> Law | None:
        """See `Distribution.law`."""
        name = says(self, "name", "of")
        return None if name is None else Law(name, (float(self.normalize), self.eps))

    @classmethod
    def from_law(cls, law: Law) -> Gate:
        """The gate that kernels know by `law`."""
        return cls(bool(law.constants[0]), law.constants[1])

    def weights(self, logits: Tensor, index: Tensor, num_targets: int, dim: int) -> Tensor:
        """See `Distribution.weights`."""
        dtype, dim = logits.dtype, dim % logits.dim()
        weights = self._of_edges(logits.to(torch.promote_types(dtype, torch.float32)))
        if self.normalize:
            total = scatter(weights, index, dim, num_targets, reduce="sum")
            weights = weights * self._scale(total).index_select(dim, index)
        return weights.to(dtype)

    def of_matrix(self, logits: Tensor) -> Tensor:
        """See `Distribution.of_matrix`."""
        weights = self._of_edges(logits)
        return weights * self._scale(weights.sum(-1, keepdim=True)) if self.normalize else weights

    def _of_edges(self, logits: Tensor) -> Tensor:
        is_edge = logits != -torch.inf
        return self.of(logits.masked_fill(~is_edge, 0.0)).masked_fill(~is_edge, 0.0)

    def _scale(self, total: Tensor) -> Tensor:
        total = total + self.eps
        # Only exact zeros are replaced, so that a NaN in a row shows in the whole row.
        return total.masked_fill(total == 0, 1.0).reciprocal().masked_fill(total == 0, 0.0)

    def __repr__(self) -> str:
        given = "normalize=True" * self.normalize + f", eps={self.eps}" * (self.eps > 0)
        return f"{type(self).__name__}({given})"


class Sigmoid(Gate):
    """The logistic function of each logit: the gates of `ResGatedGraphConv <https://arxiv.org/abs/1711.07553>`_.

    `Sigmoid(normalize=True, eps=1e-6)` is that of `GatedGCN <https://arxiv.org/abs/2003.00982>`_.

    Args: see `gattn.Gate`.

    Example:
        >>> import torch, gattn
        >>> x = torch.tensor([[[0.0]], [[2.0]]])  # 2 nodes, 1 head, 1 channel
        >>> gattn.attend(x, x, x, gattn.CompleteGraph(2), distribution=gattn.Sigmoid()).flatten()
        tensor([1.0000, 1.9640])
    """

    name = "sigmoid"

    def of(self, logits: Tensor) -> Tensor:
        """See `Gate.of`."""
        return logits.sigmoid()


class Tanh(Gate):
    """The hyperbolic tangent of each logit: signed weights, as in `FAConv <https://arxiv.org/abs/2101.00797>`_.

    Args: see `gattn.Gate`.

    Example:
        >>> import torch, gattn
        >>> x = torch.tensor([[[-1.0]], [[1.0]]])  # 2 nodes, 1 head, 1 channel
        >>> gattn.attend(x, x, x, gattn.CompleteGraph(2), distribution=gattn.Tanh()).flatten()
        tensor([-1.5232,  1.5232])
    """

    name = "tanh"

    def of(self, logits: Tensor) -> Tensor:
        """See `Gate.of`."""
        return logits.tanh()


class Logits(Gate):
    """Each logit as it is, minus infinity included: what kernels are asked for logits by."""

    name = "logits"

    def of(self, logits: Tensor) -> Tensor:
        """See `Gate.of`."""
        return logits

    def _of_edges(self, logits: Tensor) -> Tensor:
        return logits


class Identity(Gate):
    """Each logit as it is: linear attention, or a sum with given coefficients.

    Args: see `gattn.Gate`.

    Example:
        >>> import torch, gattn
        >>> x = torch.tensor([[[1.0]], [[2.0]]])  # 2 nodes, 1 head, 1 channel
        >>> gattn.attend(x, x, x, gattn.CompleteGraph(2), distribution=gattn.Identity()).flatten()
        tensor([ 5., 10.])
    """

    name = "identity"

    def of(self, logits: Tensor) -> Tensor:
        """See `Gate.of`."""
        return logits
