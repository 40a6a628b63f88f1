r"""How the logits of one target's neighbours become weights: the distributions :math:`p`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.utils import scatter


def softmax(logits: Tensor, index: Tensor, num_targets: int, dim: int = 0) -> Tensor:
    r"""A softmax over the edges of each target: the scatter-softmax.

    .. math::
        \alpha_{ij} = \frac{\exp(s_{ij})}{\sum_{k \in \mathcal{N}(i)} \exp(s_{ik})}

    Logits of :math:`-\infty` get weight zero, and a target that has no other logits gets zeros throughout, never NaN;
    gradients stay finite. Half precision is computed in float32 and rounded once, at the end.

    Args:
        logits: One or more logits an edge; edges lie along `dim`.
        index: The target of each edge, `[E]`.
        num_targets: Number of targets, N.
        dim: The dimension along which edges lie. (default: `0`)

    Returns:
        The weights, shaped and typed like `logits`.

    Raises:
        ValueError: If the logits are not of a floating-point type.

    Example:
        >>> import torch, gattn
        >>> gattn.softmax(torch.zeros(3), torch.tensor([0, 0, 2]), num_targets=3)
        tensor([0.5000, 0.5000, 1.0000])
    """
    dtype = logits.dtype
    if not dtype.is_floating_point:
        raise ValueError(f"softmax needs logits of a floating-point type; got {dtype}.")
    if dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    dim = dim % logits.dim()
    # PyG's scatter(reduce="max") does the same at twice the cost: it first writes zeros, for targets without edges.
    size = (*logits.shape[:dim], num_targets, *logits.shape[dim + 1 :])
    places = index.view(-1, *[1] * (logits.dim() - dim - 1)).expand_as(logits)
    maximum = logits.new_full(size, -torch.inf).scatter_reduce_(dim, places, logits.detach(), "amax")
    # A row of -inf alone would give exp(-inf + inf).
    maximum = maximum.masked_fill(maximum == -torch.inf, 0.0)
    weights = (logits - maximum.index_select(dim, index)).exp()
    total = scatter(weights, index, dim, num_targets, reduce="sum")
    # Only exact zeros are replaced, so that a NaN in a row shows in the whole row.
    total = total.masked_fill(total == 0, 1.0)
    return (weights / total.index_select(dim, index)).to(dtype)


class Distribution:
    """Base class of everything that turns logits into weights.

    To add one, override :meth:`weights`.

    Example:
        >>> import torch, gattn
        >>> class Uniform(gattn.Distribution):
        ...     def weights(self, logits, index, num_targets, dim):
        ...         return gattn.softmax(torch.zeros_like(logits), index, num_targets, dim)
        >>> x = torch.tensor([[[0.0]], [[1.0]]])
        >>> gattn.attend(x, x, x, gattn.CompleteGraph(2), distribution=Uniform()).flatten()
        tensor([0.5000, 0.5000])
    """

    def weights(self, logits: Tensor, index: Tensor, num_targets: int, dim: int) -> Tensor:
        """Turns `logits` into weights.

        Args:
            logits: `[..., E, H]`, masked edges at minus infinity.
            index: The target of each edge, `[E]`.
            num_targets: Number of targets, N.
            dim: The dimension along which edges lie.

        Returns:
            Weights of the same shape as `logits`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define weights().")

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Softmax(Distribution):
    """The scatter-softmax as an object: what `distribution="softmax"` names.

    Example:
        >>> import torch, gattn
        >>> gattn.Softmax().weights(torch.zeros(2, 1), torch.tensor([0, 0]), num_targets=1, dim=0).flatten()
        tensor([0.5000, 0.5000])
    """

    def weights(self, logits: Tensor, index: Tensor, num_targets: int, dim: int) -> Tensor:
        """See `gattn.softmax`."""
        return softmax(logits, index, num_targets, dim)


DISTRIBUTIONS: dict[str, Distribution] = {"softmax": Softmax()}


def resolve_distribution(distribution: str | Distribution) -> Distribution:
    """Turns a name into the distribution it stands for; an object is returned as it is."""
    if isinstance(distribution, Distribution):
        return distribution
    if isinstance(distribution, str) and distribution in DISTRIBUTIONS:
        return DISTRIBUTIONS[distribution]
    known = ", ".join(repr(name) for name in DISTRIBUTIONS)
    raise ValueError(f"unknown distribution {distribution!r}: use {known} or an object of a gattn.Distribution class.")
