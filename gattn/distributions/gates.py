"""Weights without competition: a function of each logit alone."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor
from torch_geometric.utils import scatter

from gattn.distributions.base import Distribution, Law
from gattn.errors import check_flag, check_number
from gattn.scores import says

__all__ = ["Gate", "Identity", "Logits", "Sigmoid", "Tanh"]


class Gate(Distribution):
    r"""Base class of weights without competition: a function of each logit alone.

    .. math::
        \alpha_{ij} = f(s_{ij}), \qquad \text{normalized:} \quad
        \alpha_{ij} = \frac{f(s_{ij})}{\epsilon + \sum_{k \in \mathcal{N}(i)} f(s_{ik})}

    To add one, override :meth:`of`. Masked edges, and logits of :math:`-\infty`, get weight zero. With `normalize`, so
    do all edges of a target for which the denominator is exactly zero, and their gradients are zero. Where weights of
    both signs almost cancel, the denominator is mostly rounding error: weights are then large, and differ by backend.

    Args:
        normalize: Whether each target's weights are divided by their sum. (default: `False`)
        eps: The :math:`\epsilon` in that sum. (default: `0.0`)

    Shapes:
        logits and weights `[E, H]`, after the batch dimensions.

    Raises:
        TypeError: If `normalize` is neither true nor false, or `eps` is not a number, such as a tensor, which would get
            no gradient.
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

    #: The name by which the kernels know the function; `None` if they do not.
    name: ClassVar[str | None] = None

    def __init__(self, normalize: bool = False, eps: float = 0.0):
        check_flag("normalize", normalize)
        check_number("eps", eps, "finite and not negative")
        if eps > 0 and not normalize:
            raise ValueError(f"{type(self).__name__}'s eps requires normalize=True, which divides by the sum plus eps.")
        self.normalize = normalize
        self.eps = eps

    def of(self, logits: Tensor) -> Tensor:
        """The function :math:`f`; its logits are finite."""
        raise NotImplementedError(f"{type(self).__name__} does not define of().")

    def law(self) -> Law | None:
        """See `Distribution.law`."""
        name = says(self, "name", "of")
        return None if name is None else Law(name, (float(self.normalize), self.eps))

    @classmethod
    def from_law(cls, law: Law) -> Gate:
        """The gate that the kernels know as `law`."""
        return cls(bool(law.constants[0]), law.constants[1])

    def weights(self, logits: Tensor, index: Tensor, num_targets: int, dim: int) -> Tensor:
        """See `Distribution.weights`."""
        dtype, dim = logits.dtype, dim % logits.dim()
        weights = self._of_edges(logits.to(torch.promote_types(dtype, torch.float32)))
        if self.normalize:
            total = scatter(weights, index, dim, num_targets, reduce="sum")
            power, scale = self._scales(total)
            weights = weights * power.index_select(dim, index) * scale.index_select(dim, index)
        return weights.to(dtype)

    def of_matrix(self, logits: Tensor) -> Tensor:
        """See `Distribution.of_matrix`."""
        weights = self._of_edges(logits)
        if not self.normalize:
            return weights
        power, scale = self._scales(weights.sum(-1, keepdim=True))
        return weights * power * scale

    def _of_edges(self, logits: Tensor) -> Tensor:
        is_edge = logits != -torch.inf
        return self.of(logits.masked_fill(~is_edge, 0.0)).masked_fill(~is_edge, 0.0)

    def _scales(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """Two factors that multiply to the reciprocal of a sum, or to zero: a power of two, and the rest."""
        total = total + self.eps
        # Derivatives have powers of the reciprocal, which may overflow; a power of two changes no digit.
        most = -math.log2(torch.finfo(total.dtype).tiny)
        power = total.detach().abs().log2().floor().clamp(-most, most).neg().exp2()
        total = total * power
        # Only exact zeros are replaced, so that a NaN spreads to its whole row.
        return power, total.masked_fill(total == 0, 1.0).reciprocal().masked_fill(total == 0, 0.0)

    def __repr__(self) -> str:
        given = "normalize=True" * self.normalize + f", eps={self.eps}" * (self.eps > 0)
        return f"{type(self).__name__}({given})"


class Sigmoid(Gate):
    r"""The logistic function of each logit: the gates of `ResGatedGraphConv <https://arxiv.org/abs/1711.07553>`_.

    .. math::
        \alpha_{ij} = \sigma(s_{ij})

    `Sigmoid(normalize=True, eps=1e-6)` gives the gates of `GatedGCN <https://arxiv.org/abs/2003.00982>`_.

    Args:
        normalize: Whether each target's weights are divided by their sum. (default: `False`)
        eps: Added to that sum; see `gattn.Gate`. (default: `0.0`)

    Shapes:
        logits and weights `[E, H]`, after the batch dimensions.

    Raises:
        TypeError: If `normalize` is neither true nor false, or `eps` is not a number, such as a tensor, which would get
            no gradient.
        ValueError: If `eps` is negative or not finite, or given without `normalize`.

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
    r"""The hyperbolic tangent of each logit: signed weights, as in `FAConv <https://arxiv.org/abs/2101.00797>`_.

    .. math::
        \alpha_{ij} = \tanh(s_{ij})

    Args:
        normalize: Whether each target's weights are divided by their sum. (default: `False`)
        eps: Added to that sum; see `gattn.Gate`. (default: `0.0`)

    Shapes:
        logits and weights `[E, H]`, after the batch dimensions.

    Raises:
        TypeError: If `normalize` is neither true nor false, or `eps` is not a number, such as a tensor, which would get
            no gradient.
        ValueError: If `eps` is negative or not finite, or given without `normalize`.

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
    """Each logit as it is, including minus infinity: kernels that are given this return the logits."""

    name = "logits"

    def of(self, logits: Tensor) -> Tensor:
        """See `Gate.of`."""
        return logits

    def _of_edges(self, logits: Tensor) -> Tensor:
        return logits


class Identity(Gate):
    r"""Each logit as it is: linear attention, or a sum with given coefficients.

    .. math::
        \alpha_{ij} = s_{ij}

    With a dot product as the score it is the linear attention of `Transformers are RNNs
    <https://arxiv.org/abs/2006.16236>`_ without its feature map.

    Args:
        normalize: Whether each target's weights are divided by their sum. (default: `False`)
        eps: Added to that sum; see `gattn.Gate`. (default: `0.0`)

    Shapes:
        logits and weights `[E, H]`, after the batch dimensions.

    Raises:
        TypeError: If `normalize` is neither true nor false, or `eps` is not a number, such as a tensor, which would get
            no gradient.
        ValueError: If `eps` is negative or not finite, or given without `normalize`.

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
