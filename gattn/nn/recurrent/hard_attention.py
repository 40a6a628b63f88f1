"""Attention of a recurrent network to one position of the memory, and the loss that trains it.

The dimensions are those of `gattn.nn.recurrent.rnn_attention`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from gattn.distributions import Hard
from gattn.nn.recurrent.rnn_attention import Memory, MemoryAttention, WrappedAttention
from gattn.tracing import Leaf

__all__ = ["Choice", "HardAttention", "ReinforceLoss"]


class Choice(NamedTuple):
    """What was chosen, and how probable the choice was."""

    weights: Tensor
    """The weights of the choices, `[B, N, M]`."""
    log_prob: Tensor
    """The log-probabilities of the choices, `[B, N]`."""
    entropy: Tensor
    """The entropies, in nats, of the distributions from which they were drawn, `[B, N]`."""


class HardAttention(WrappedAttention):
    r"""Selects one position of the memory for each query: sampled in training, the most probable one in evaluation.

    From `Show, Attend and Tell <https://arxiv.org/abs/1502.03044>`_:

    .. math::
        c_i = m_j, \qquad j \sim \mathrm{softmax}_j(s(q_i, m_j))

    `"reinforce"` trains it through `choose` and :class:`ReinforceLoss`, whose gradient is unbiased but has a high
    variance. `"straight_through"` (`Gumbel-softmax <https://arxiv.org/abs/1611.01144>`_) trains it through the context
    like any soft attention. Its gradient has a lower variance but is biased: it is the gradient of a softmax that was
    not used.

    Args:
        attention: The layer whose score is used.
        estimator: `"reinforce"` or `"straight_through"`. (default: `"reinforce"`)
        temperature: The temperature of the straight-through estimator. (default: `1.0`)
        expected: The probability that a query gets its expected context (soft attention) instead during training, which
            lowers the variance. The paper uses 0.5. (default: `0.0`)

    Shapes:
        - **input:** queries `[B, N, Cq]`, memory `[B, M, Cm]`; **output:** contexts `[B, N, Cm]`.

    Raises:
        ValueError: If the estimator is unknown, the temperature is not positive, or not 1 with another estimator than
            `"straight_through"`, or `expected` is not a probability.
        TypeError: If `attention` is not a layer with a score of its own.

    Example:
        >>> import torch, gattn
        >>> hard = gattn.nn.HardAttention(gattn.nn.GeneralAttention(8, 8))
        >>> context, choice = hard.choose(torch.randn(2, 3, 8), torch.randn(2, 7, 8))
        >>> choice.weights.sum(-1).unique(), choice.log_prob.shape
        (tensor([1.]), torch.Size([2, 3]))
    """

    def __init__(
        self,
        attention: MemoryAttention,
        estimator: str = "reinforce",
        temperature: float = 1.0,
        expected: float = 0.0,
    ):
        super().__init__(attention)
        Hard(True, estimator, temperature, expected)  # checks them
        self.estimator = estimator
        self.temperature = temperature
        self.expected = expected

    def choose(
        self, query: Tensor, memory: Tensor | Memory, source_lengths: Tensor | None = None, *, first: int = 0
    ) -> tuple[Tensor, Choice]:
        """Attends, and returns the contexts with what `ReinforceLoss` needs.

        Args:
            query: The queries, `[B, N, Cq]`, or `[N, Cq]` without a batch.
            memory: The memory, `[B, M, Cm]`, or `[M, Cm]` without a batch; or the result of `prepare`.
            source_lengths: The number of positions in each memory without padding, `[B]`. (default: `None`, all)
            first: The number of queries before the first one, which has no effect here. (default: `0`)

        Returns:
            The contexts `[B, N, Cm]`, and the choices.

        Raises:
            ValueError: If shapes or lengths do not fit each other.
        """
        hard = Hard(self.training, self.estimator, self.temperature, self.expected)
        memory = self._prepared(query, memory, source_lengths)
        context, weights = self.attention._over(query, memory, True, None, hard)
        assert weights is not None
        return context, Choice(weights, hard.log_prob.squeeze(-1), hard.entropy.squeeze(-1))

    def _attend(self, query: Tensor, memory: Memory, first: int, return_weights: bool) -> tuple[Tensor, Tensor | None]:
        context, choice = self.choose(query, memory)
        return context, choice.weights if return_weights else None

    def extra_repr(self) -> str:
        """Returns the options that `repr` shows."""
        return f"estimator={self.estimator!r}, temperature={self.temperature}, expected={self.expected}"


class ReinforceLoss(Leaf, Module):
    r"""A loss whose expected gradient is that of the negative expected reward with respect to hard choices.

    `REINFORCE <https://doi.org/10.1007/BF00992696>`_ with a moving baseline and an entropy term, as in
    `Show, Attend and Tell <https://arxiv.org/abs/1502.03044>`_:

    .. math::
        L = -\frac{1}{n} \sum_i \left[ \lambda_r (r_i - b) \log p(j_i) + \lambda_e H_i \right],
        \qquad b \leftarrow \beta b + (1 - \beta) \frac{1}{n} \sum_i r_i

    During training, the baseline is updated after its use, so that it does not depend on the choices that it is
    compared with.

    Args:
        weight: The factor :math:`\lambda_r`. (default: `1.0`)
        entropy_weight: The factor :math:`\lambda_e`: larger values keep the distributions of choices broad for longer.
            (default: `0.0`)
        decay: The share :math:`\beta` of the old baseline in the new one. (default: `0.9`)

    Shapes:
        - **input:** rewards, log-probabilities and entropies of the choices, and a mask, all of one shape;
          **output:** a scalar.

    Raises:
        ValueError: If a weight is negative, `decay` is not in [0, 1), or shapes differ.

    Example:
        >>> import torch, gattn
        >>> hard, loss = gattn.nn.HardAttention(gattn.nn.GeneralAttention(8, 8)), gattn.nn.ReinforceLoss()
        >>> context, choice = hard.choose(torch.randn(2, 3, 8), torch.randn(2, 7, 8))
        >>> reward = -context.square().mean(-1)  # what training is to maximise
        >>> loss(reward, choice.log_prob, choice.entropy).backward()
    """

    baseline: Tensor
    is_new: Tensor

    def __init__(self, weight: float = 1.0, entropy_weight: float = 0.0, decay: float = 0.9):
        super().__init__()
        if weight < 0 or entropy_weight < 0:
            raise ValueError(f"weight and entropy_weight must be at least 0; got {weight} and {entropy_weight}.")
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"decay must be at least 0 and less than 1; got {decay}.")
        self.weight = weight
        self.entropy_weight = entropy_weight
        self.decay = decay
        self.register_buffer("baseline", torch.zeros(()))
        self.register_buffer("is_new", torch.ones((), dtype=torch.bool))

    def forward(
        self, reward: Tensor, log_prob: Tensor, entropy: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Computes the loss. Only its gradient has a meaning, not its value.

        Args:
            reward: The reward of each choice. No gradient flows through it.
            log_prob: The log-probability of each choice.
            entropy: The entropy of the distribution from which each choice was drawn. It is needed only with a positive
                `entropy_weight`. (default: `None`)
            mask: Which choices to use, booleans. (default: `None`, all)

        Raises:
            ValueError: If shapes differ, or the entropy is missing.
        """
        for name, term in (("log_prob", log_prob), ("entropy", entropy), ("mask", mask)):
            if term is not None and term.shape != reward.shape:
                raise ValueError(
                    f"{name} must have one entry per reward, {list(reward.shape)}; got {list(term.shape)}."
                )
        if self.entropy_weight > 0 and entropy is None:
            raise ValueError("entropy_weight is positive, so the entropy of the choices must be passed.")
        reward = reward.detach()
        if mask is not None:
            reward, log_prob = reward[mask], log_prob[mask]
            entropy = None if entropy is None else entropy[mask]
        loss = -self.weight * (reward - self.baseline) * log_prob
        if entropy is not None and self.entropy_weight > 0:
            loss = loss - self.entropy_weight * entropy
        if self.training and reward.numel():
            decay = torch.where(self.is_new, 0.0, self.decay)  # the first mean replaces the initial zero
            self.baseline.mul_(decay).add_((1 - decay) * reward.mean().to(self.baseline.dtype))
            self.is_new.fill_(False)
        return loss.sum() / max(reward.numel(), 1)
