"""Hard attention: one neighbour per target."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import scatter

from gattn.distributions.base import Distribution
from gattn.distributions.softmax import segment_reduce, softmax
from gattn.errors import InputTypeError, check_flag, check_number

__all__ = ["Hard"]


class Hard(Distribution):
    r"""One neighbour per target and head, drawn with the softmax's probabilities: *hard* attention.

    .. math::
        \alpha_{i\cdot} = \mathrm{one\_hot}(j), \qquad j \sim \mathrm{softmax}_j(\mathrm{logits}_{ij})

    Such weights have no gradient with respect to the logits, so an estimator is needed. `"reinforce"`
    (`Show, Attend and Tell <https://arxiv.org/abs/1502.03044>`_) keeps `log_prob` and `entropy` of the choices, from
    which `gattn.nn.ReinforceLoss` makes a loss with an unbiased gradient. They are those of the last call in the same
    thread, whose gradients they keep in memory until the next one; copies of the object start without them.
    `"straight_through"`
    (`Gumbel-softmax <https://arxiv.org/abs/1611.01144>`_) computes the backward pass as if the weights were
    :math:`\mathrm{softmax}((\mathrm{logits} + g) / \tau)`, where g is the Gumbel noise with which they were drawn. Its
    gradient varies less, but is biased.

    Args:
        sample: Whether to draw, as in training, or to take the most probable neighbour (the first if several are). In
            the latter case, the other options have no effect. (default: `True`)
        estimator: `"reinforce"` or `"straight_through"`. (default: `"reinforce"`)
        temperature: The temperature :math:`\tau` of the straight-through estimator. (default: `1.0`)
        expected: Probability with which a target gets the softmax itself instead of a draw, which lowers the variance
            (one half in Show, Attend and Tell). (default: `0.0`)
        generator: The generator of the random numbers. (default: `None`, PyTorch's own)

    Shapes:
        logits and weights `[E, H]`, `log_prob` and `entropy` `[N, H]`, each after the batch dimensions.

    Raises:
        TypeError: If an option is not of the type above.
        ValueError: If the estimator is unknown, the temperature is not positive and finite, or not 1 with another
            estimator than `"straight_through"`, or `expected` is not a probability.

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

    def __init__(
        self,
        sample: bool = True,
        estimator: str = "reinforce",
        temperature: float = 1.0,
        expected: float = 0.0,
        generator: torch.Generator | None = None,
    ):
        if estimator not in ("reinforce", "straight_through"):
            raise ValueError(f"Hard's estimator must be 'reinforce' or 'straight_through'; got {estimator!r}.")
        check_flag("Hard's sample", sample)
        for name, number, wanted in (
            ("temperature", temperature, "positive and finite"),
            ("expected", expected, "a probability between 0 and 1"),
        ):
            is_single = isinstance(number, Tensor) and number.numel() == 1
            check_number(f"Hard's {name}", number, wanted, or_tensor=is_single)
        if temperature != 1 and estimator == "reinforce":
            raise ValueError(
                f"Hard's temperature is that of estimator='straight_through'; leave it at 1, or choose this estimator; "
                f"got {temperature}."
            )
        if not (generator is None or isinstance(generator, torch.Generator)):
            raise InputTypeError(f"Hard's generator must be a torch.Generator or None; got {generator!r}.")
        self.sample = sample
        self.estimator = estimator
        self.temperature = temperature
        self.expected = expected
        self.generator = generator
        self._last = _last()

    @property
    def log_prob(self) -> Tensor:
        """The log-probability of each of the last choices, `[..., N, H]`; 0 where nothing was chosen."""
        found: Tensor = self._last.log_prob
        return found

    @property
    def entropy(self) -> Tensor:
        """The entropy of the distribution from which they were drawn, in nats, `[..., N, H]`."""
        found: Tensor = self._last.entropy
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {name: option for name, option in self.__dict__.items() if name != "_last"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _last=_last())

    def weights(self, logits: Tensor, index: Tensor, num_targets: int, dim: int) -> Tensor:
        """See `Distribution.weights`; sets `log_prob` and `entropy`."""
        dtype, dim = logits.dtype, dim % logits.dim()
        logits = logits.to(torch.promote_types(dtype, torch.float32))
        soft = softmax(logits, index, num_targets, dim)
        # Costs one more pass than log(soft), which would be -inf where a probability is too small for its type.
        log_soft = _log_softmax(logits, index, num_targets, dim).masked_fill(logits == -torch.inf, 0.0)
        noisy = logits.detach()
        if self.sample:
            noise = torch.empty_like(noisy).exponential_(generator=self.generator)
            noisy = noisy - noise.clamp_min(torch.finfo(noise.dtype).tiny).log()
        chosen = _first_maximum(noisy, index, num_targets, dim)
        # A NaN spreads to its whole row, as it does in the softmax.
        weights = torch.where(soft.isnan(), torch.nan, chosen.to(logits.dtype))
        if self.sample and self.estimator == "straight_through":
            slope = softmax(
                (logits + (noisy - logits.detach()).nan_to_num()) / self.temperature, index, num_targets, dim
            )
            weights = weights + (slope - slope.detach())  # adds exactly zero, so that a one stays a one
        if self.sample and self.expected > 0.0:
            size = (*logits.shape[:dim], num_targets, *logits.shape[dim + 1 :])
            coin = torch.rand(size, generator=self.generator, device=logits.device) < self.expected
            is_soft = coin.index_select(dim, index)
            weights = torch.where(is_soft, soft, weights)
            chosen = chosen & ~is_soft
        self._last.log_prob = scatter(torch.where(chosen, log_soft, 0.0), index, dim, num_targets, reduce="sum")
        self._last.entropy = scatter(-soft * log_soft, index, dim, num_targets, reduce="sum")
        return weights.to(dtype)

    def __repr__(self) -> str:
        return f"Hard(sample={self.sample}, estimator={self.estimator!r})"


def _log_softmax(logits: Tensor, index: Tensor, num_targets: int, dim: int) -> Tensor:
    maximum = segment_reduce(logits.detach(), index, num_targets, dim, -torch.inf, "amax")
    shifted = logits - maximum.masked_fill(maximum == -torch.inf, 0.0).index_select(dim, index)
    total: Tensor = scatter(shifted.exp(), index, dim, num_targets, reduce="sum")
    return shifted - total.masked_fill(total == 0, 1.0).log().index_select(dim, index)


def _first_maximum(x: Tensor, index: Tensor, num_targets: int, dim: int) -> Tensor:
    """Whether an edge is the first of its target's largest; none is if all are minus infinity."""
    maximum = segment_reduce(x, index, num_targets, dim, -torch.inf, "amax").index_select(dim, index)
    place = torch.arange(x.size(dim), device=x.device).view(-1, *[1] * (x.dim() - dim - 1)).expand_as(x)
    place = place.masked_fill((x != maximum) | (x == -torch.inf), x.size(dim))
    first = segment_reduce(place, index, num_targets, dim, x.size(dim), "amin").index_select(dim, index)
    return (place == first) & (place < x.size(dim))


class _Last:
    """What `Hard` keeps of a choice in compiled code, where it lives as long as a call."""


def _last() -> Any:
    return _Last() if torch.compiler.is_compiling() else threading.local()
