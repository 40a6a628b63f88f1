r"""How the logits of one target's neighbours become weights: the distributions :math:`p`."""

from __future__ import annotations

import copy
from typing import ClassVar

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
        logits: One or more logits per edge; edges lie along `dim`.
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
    maximum = _segment_reduce(logits.detach(), index, num_targets, dim, -torch.inf, "amax")
    # A row of -inf alone would give exp(-inf + inf).
    maximum = maximum.masked_fill(maximum == -torch.inf, 0.0)
    weights = (logits - maximum.index_select(dim, index)).exp()
    total: Tensor = scatter(weights, index, dim, num_targets, reduce="sum")
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

    #: What kernels know it by; `None` if they do not.
    family: ClassVar[str | None] = None

    #: Whether logits of minus infinity always get weight zero, so that pairs without an edge may be among them.
    respects_infinity: ClassVar[bool] = False

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

    def with_sources(self, source: Tensor) -> Distribution:
        """The distribution that is asked for these edges' weights; itself, unless it looks at where they come from.

        Args:
            source: The source of each edge, `[E]`.
        """
        return self

    def check(self, batch: tuple[int, ...], num_targets: int) -> None:
        """Raises `ValueError` where the distribution's own tensors do not fit the batch and the targets."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Softmax(Distribution):
    """The scatter-softmax as an object: what `distribution="softmax"` names.

    Example:
        >>> import torch, gattn
        >>> gattn.Softmax().weights(torch.zeros(2, 1), torch.tensor([0, 0]), num_targets=1, dim=0).flatten()
        tensor([0.5000, 0.5000])
    """

    family = "softmax"
    respects_infinity = True

    def weights(self, logits: Tensor, index: Tensor, num_targets: int, dim: int) -> Tensor:
        """See `gattn.softmax`."""
        return softmax(logits, index, num_targets, dim)


class LocalGaussian(Distribution):
    r"""A softmax whose weights are lowered with their distance from a centre, and not normalised again.

    The alignment of *local-p* in `Effective Approaches to Attention-based Neural Machine Translation
    <https://arxiv.org/abs/1508.04025>`_:

    .. math::
        \alpha_{is} = \mathrm{softmax}_s(\mathrm{logits}_{is}) \exp\left(-\frac{(s - p_i)^2}{2 \sigma^2}\right),
        \quad \sigma = D / 2

    A source's place *s* is its number, beginning with 0.

    Args:
        centres: The centre :math:`p_i` of each target, `[N]`, or with the batch dimensions in front, `[B, N]`. It gets
            gradients.
        width: The half-width :math:`D` of the window that the Gaussian belongs to. (The window itself is a mask.)

    Raises:
        TypeError: If `centres` is no tensor.
        ValueError: If `width` is not positive, or (in use) `centres` does not fit the targets.

    Example:
        >>> import torch, gattn
        >>> x = torch.ones(3, 1, 1)  # 3 nodes, 1 head, 1 channel
        >>> near = gattn.LocalGaussian(torch.tensor([0.0, 1.0, 2.0]), width=2)
        >>> _, weights = gattn.attend(x, x, x, gattn.CompleteGraph(3), distribution=near, return_weights=True)
        >>> weights[0]
        tensor([[0.3333, 0.2022, 0.0451],
                [0.2022, 0.3333, 0.2022],
                [0.0451, 0.2022, 0.3333]])
    """

    respects_infinity = True

    def __init__(self, centres: Tensor, width: float):
        if not isinstance(centres, Tensor):
            raise TypeError(f"LocalGaussian's centres are a tensor, one per target; got {type(centres).__name__}.")
        if not width > 0:
            raise ValueError(f"LocalGaussian's width is positive; got {width}.")
        self.centres = centres
        self.width = width
        self._source: Tensor | None = None

    def with_sources(self, source: Tensor) -> LocalGaussian:
        """See `Distribution.with_sources`."""
        bound = copy.copy(self)
        bound._source = source
        return bound

    def check(self, batch: tuple[int, ...], num_targets: int) -> None:
        """Raises `ValueError` where the centres do not fit the batch and the targets."""
        if tuple(self.centres.shape) not in ((num_targets,), (*batch, num_targets)):
            raise ValueError(
                f"LocalGaussian has one centre per target, {[*batch, num_targets]}; got {list(self.centres.shape)}."
            )

    def weights(self, logits: Tensor, index: Tensor, num_targets: int, dim: int) -> Tensor:
        """See `Distribution.weights`; with :meth:`with_sources` only."""
        if self._source is None:
            raise ValueError("LocalGaussian needs to know the sources: ask with_sources(source) for weights.")
        # Half precision cannot tell places beyond a few hundred from each other.
        centres = self.centres.to(torch.promote_types(logits.dtype, torch.float32))
        distance = self._source - centres.index_select(-1, index)
        gaussian = (-2 * (distance / self.width).square()).exp()
        return softmax(logits, index, num_targets, dim) * gaussian.to(logits.dtype).unsqueeze(-1)

    def __repr__(self) -> str:
        return f"LocalGaussian(centres={list(self.centres.shape)}, width={self.width})"


class Hard(Distribution):
    r"""One neighbour for each target and head, drawn with the softmax's probabilities: *hard* attention.

    .. math::
        \alpha_{i\cdot} = \mathrm{one\_hot}(j), \qquad j \sim \mathrm{softmax}_j(\mathrm{logits}_{ij})

    That has no gradient with respect to the logits. Two estimators make up for it. `"reinforce"`
    (`Show, Attend and Tell <https://arxiv.org/abs/1502.03044>`_) leaves `log_prob` and `entropy` of the choices, out of
    which `gattn.nn.ReinforceLoss` makes a loss whose gradient is right on average. `"straight_through"`
    (`Gumbel-softmax <https://arxiv.org/abs/1611.01144>`_) pretends in the backward pass that the weights were
    :math:`\mathrm{softmax}((\mathrm{logits} + g) / \tau)`, g being the Gumbel noise that drew them: its gradient varies
    less, but is biased.

    Args:
        sample: Whether to draw, as in training, or to take the most probable neighbour (the first of equals).
            (default: `True`)
        estimator: `"reinforce"` or `"straight_through"`. (default: `"reinforce"`)
        temperature: The temperature :math:`\tau` of the straight-through estimator. (default: `1.0`)
        expected: Probability that a drawing target gets the softmax itself instead, which lowers the variance
            (the same paper has one half). (default: `0.0`)
        generator: Random numbers come from it. (default: `None`, PyTorch's own)

    Raises:
        ValueError: If the estimator is unknown, the temperature not positive, or `expected` no probability.

    Example:
        >>> import torch, gattn
        >>> x = torch.tensor([[[0.0]], [[1.0]]])  # 2 nodes, 1 head, 1 channel
        >>> best = gattn.Hard(sample=False)
        >>> gattn.attend(x + 1, x, x, gattn.CompleteGraph(2), distribution=best).flatten()
        tensor([1., 1.])
        >>> best.log_prob.exp().flatten()
        tensor([0.7311, 0.8808])
    """

    respects_infinity = True

    log_prob: Tensor
    """Of the last choices: the logarithms of their probabilities, `[..., N, H]`; 0 where nothing was chosen."""
    entropy: Tensor
    """The entropy that the choices were drawn with, in nats, `[..., N, H]`."""

    def __init__(
        self,
        sample: bool = True,
        estimator: str = "reinforce",
        temperature: float = 1.0,
        expected: float = 0.0,
        generator: torch.Generator | None = None,
    ):
        if estimator not in ("reinforce", "straight_through"):
            raise ValueError(f"Hard's estimator is 'reinforce' or 'straight_through', not {estimator!r}.")
        if not temperature > 0:
            raise ValueError(f"Hard's temperature is positive; got {temperature}.")
        if not 0.0 <= expected <= 1.0:
            raise ValueError(f"Hard's expected is a probability; got {expected}.")
        self.sample = sample
        self.estimator = estimator
        self.temperature = temperature
        self.expected = expected
        self.generator = generator

    def weights(self, logits: Tensor, index: Tensor, num_targets: int, dim: int) -> Tensor:
        """See `Distribution.weights`; leaves `log_prob` and `entropy`."""
        dtype, dim = logits.dtype, dim % logits.dim()
        logits = logits.to(torch.promote_types(dtype, torch.float32))
        soft = softmax(logits, index, num_targets, dim)
        # One pass more than log(soft), which would be -inf where a probability is too small for its type.
        log_soft = _log_softmax(logits, index, num_targets, dim).masked_fill(logits == -torch.inf, 0.0)
        noisy = logits.detach()
        if self.sample:
            noise = torch.empty_like(noisy).exponential_(generator=self.generator)
            noisy = noisy - noise.clamp_min(torch.finfo(noise.dtype).tiny).log()
        chosen = _first_maximum(noisy, index, num_targets, dim)
        # A NaN shows in its whole row, as it does in the softmax.
        weights = torch.where(soft.isnan(), torch.nan, chosen.to(logits.dtype))
        if self.sample and self.estimator == "straight_through":
            slope = softmax(
                (logits + (noisy - logits.detach()).nan_to_num()) / self.temperature, index, num_targets, dim
            )
            weights = weights + (slope - slope.detach())  # exactly zero, so that a one stays a one
        if self.sample and self.expected > 0.0:
            size = (*logits.shape[:dim], num_targets, *logits.shape[dim + 1 :])
            coin = torch.rand(size, generator=self.generator, device=logits.device) < self.expected
            is_soft = coin.index_select(dim, index)
            weights = torch.where(is_soft, soft, weights)
            chosen = chosen & ~is_soft
        self.log_prob = scatter(torch.where(chosen, log_soft, 0.0), index, dim, num_targets, reduce="sum")
        self.entropy = scatter(-soft * log_soft, index, dim, num_targets, reduce="sum")
        return weights.to(dtype)

    def __repr__(self) -> str:
        return f"Hard(sample={self.sample}, estimator={self.estimator!r})"


def _segment_reduce(x: Tensor, index: Tensor, num_targets: int, dim: int, start: float, reduce: str) -> Tensor:
    """The largest or smallest of each target's edges, `start` where it has none."""
    # PyG's scatter(reduce="max") does the same at twice the cost: it first writes zeros, for targets without edges.
    size = (*x.shape[:dim], num_targets, *x.shape[dim + 1 :])
    places = index.view(-1, *[1] * (x.dim() - dim - 1)).expand_as(x)
    return x.new_full(size, start).scatter_reduce_(dim, places, x, reduce)


def _log_softmax(logits: Tensor, index: Tensor, num_targets: int, dim: int) -> Tensor:
    maximum = _segment_reduce(logits.detach(), index, num_targets, dim, -torch.inf, "amax")
    shifted = logits - maximum.masked_fill(maximum == -torch.inf, 0.0).index_select(dim, index)
    total: Tensor = scatter(shifted.exp(), index, dim, num_targets, reduce="sum")
    return shifted - total.masked_fill(total == 0, 1.0).log().index_select(dim, index)


def _first_maximum(x: Tensor, index: Tensor, num_targets: int, dim: int) -> Tensor:
    """Whether an edge is the first among its target's largest; none is where all are minus infinity."""
    maximum = _segment_reduce(x, index, num_targets, dim, -torch.inf, "amax").index_select(dim, index)
    place = torch.arange(x.size(dim), device=x.device).view(-1, *[1] * (x.dim() - dim - 1)).expand_as(x)
    place = place.masked_fill((x != maximum) | (x == -torch.inf), x.size(dim))
    first = _segment_reduce(place, index, num_targets, dim, x.size(dim), "amin").index_select(dim, index)
    return (place == first) & (place < x.size(dim))


DISTRIBUTIONS: dict[str, Distribution] = {"softmax": Softmax()}


def resolve_distribution(distribution: str | Distribution) -> Distribution:
    """Turns a name into the distribution it stands for; an object is returned as it is."""
    if isinstance(distribution, Distribution):
        return distribution
    if isinstance(distribution, str) and distribution in DISTRIBUTIONS:
        return DISTRIBUTIONS[distribution]
    known = ", ".join(repr(name) for name in DISTRIBUTIONS)
    raise ValueError(f"unknown distribution {distribution!r}: use {known} or an object of a gattn.Distribution class.")
