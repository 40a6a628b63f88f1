r"""Attention of a recurrent network over a memory, as in translation with an encoder and a decoder.

Every layer here is attention with one head on a bipartite complete graph, whose N targets are the queries and whose M
sources are the positions of the memory. The layers differ in their scores (dot, general, additive), in their graphs
(global, local) and in their distributions (soft, hard).

Dimensions: N queries, M positions of the memory, C channels, Cq of the queries, Cm of the memory, B batch.
"""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter

from gattn.attention import attend
from gattn.distributions import Distribution, Hard, LocalGaussian
from gattn.errors import check_at_least
from gattn.graphs import CompleteGraph
from gattn.ops.dropout import check_probability
from gattn.scores import AdditiveScore, DotScore, Score
from gattn.scripting import NotScriptable

__all__ = [
    "AdditiveAttention",
    "Choice",
    "DotProductAttention",
    "GeneralAttention",
    "HardAttention",
    "LocalAttention",
    "Memory",
    "MemoryAttention",
    "ReinforceLoss",
]


class Memory(NamedTuple):
    """A memory that has been prepared once for any number of queries."""

    keys: Tensor
    """What the score compares with the queries, `[B, M, C]`."""
    values: Tensor
    """What the weights average, `[B, M, Cm]`, with zeros beyond the lengths."""
    mask: Tensor | None
    """Which positions are not padding, `[B, M]`; `None` means all."""


class MemoryAttention(NotScriptable, Module):
    r"""The base class of attention from queries to a memory, with a softmax over all positions that are not padding.

    .. math::
        c_i = \sum_{j=1}^{M} \alpha_{ij} m_j, \qquad \alpha_{ij} = \mathrm{softmax}_j(s(q_i, m_j))

    To add one, override :meth:`score`, and :meth:`keys` if the memory is projected first. Such attention was introduced
    by `Bahdanau et al. <https://arxiv.org/abs/1409.0473>`_.

    Args:
        dropout: The probability of dropping an attention weight during training. (default: `0.0`)

    Shapes:
        - **input:** queries `[B, N, Cq]`, memory `[B, M, Cm]`; **output:** contexts `[B, N, Cm]`.

    Raises:
        ValueError: If `dropout` is not a probability, or (in `forward`) shapes or lengths do not fit each other.
        NotImplementedError: In `forward`, if the subclass does not define :meth:`score`.

    Example:
        >>> import torch, gattn
        >>> class CosineAttention(gattn.nn.MemoryAttention):
        ...     def score(self, query):
        ...         return query, gattn.CosineScore(10.0)
        >>> CosineAttention()(torch.randn(2, 3, 8), torch.randn(2, 7, 8)).shape
        torch.Size([2, 3, 8])
    """

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        check_probability("dropout", dropout)
        self.dropout = dropout

    def reset_parameters(self) -> None:
        """Resets all parameters."""
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]

    def keys(self, memory: Tensor) -> Tensor:
        """Returns what the score compares with queries, `[..., M, C]`, once for all queries."""
        return memory

    def score(self, query: Tensor) -> tuple[Tensor, Score]:
        """Returns the queries as the score compares them with the keys, `[..., N, C]`, and the score."""
        raise NotImplementedError(f"{type(self).__name__} does not define score().")

    def prepare(self, memory: Tensor, source_lengths: Tensor | None = None) -> Memory:
        """Prepares a memory for `forward`. A decoder that attends step by step calls this once.

        Args:
            memory: The memory, `[B, M, Cm]`, or `[M, Cm]` without a batch.
            source_lengths: The number of positions in each memory without padding, `[B]`. (default: `None`, all)

        Raises:
            ValueError: If shapes or lengths do not fit each other.
        """
        if memory.dim() not in (2, 3):
            raise ValueError(f"a memory must be [B, M, C] or [M, C]; got {list(memory.shape)}.")
        mask = None
        if source_lengths is not None:
            CompleteGraph(1, memory.size(-2), source_lengths=source_lengths)  # checks them
            if source_lengths.shape != memory.shape[:-2]:
                raise ValueError(
                    f"source_lengths must have one length for each memory, {list(memory.shape[:-2])}; got "
                    f"{list(source_lengths.shape)}."
                )
            positions = torch.arange(memory.size(-2), device=memory.device)
            mask = positions < source_lengths.to(memory.device).unsqueeze(-1)
            memory = memory.masked_fill(~mask.unsqueeze(-1), 0.0)  # zero times NaN is NaN
        return Memory(self.keys(memory), memory, mask)

    @overload
    def forward(
        self,
        query: Tensor,
        memory: Tensor | Memory,
        source_lengths: Tensor | None = None,
        *,
        first: int = 0,
        return_weights: Literal[False] = False,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        query: Tensor,
        memory: Tensor | Memory,
        source_lengths: Tensor | None = None,
        *,
        first: int = 0,
        return_weights: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...

    @overload
    def forward(
        self,
        query: Tensor,
        memory: Tensor | Memory,
        source_lengths: Tensor | None = None,
        *,
        first: int = 0,
        return_weights: bool,
    ) -> Tensor | tuple[Tensor, Tensor]: ...

    def forward(
        self,
        query: Tensor,
        memory: Tensor | Memory,
        source_lengths: Tensor | None = None,
        *,
        first: int = 0,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Averages the memory for each query.

        Args:
            query: The queries, `[B, N, Cq]`, or `[N, Cq]` without a batch.
            memory: The memory, `[B, M, Cm]`, or `[M, Cm]` without a batch; or the result of `prepare`.
            source_lengths: The number of positions in each memory without padding, `[B]`. Padding is never used, and
                the context of a memory of length 0 is zero. (default: `None`, all)
            first: The number of queries before the first one, which monotonic alignment needs. (default: `0`)
            return_weights: Whether to return the attention weights as well. (default: `False`)

        Returns:
            The contexts `[B, N, Cm]`, and with `return_weights` the weights `[B, N, M]`.

        Raises:
            ValueError: If shapes or lengths do not fit each other.
        """
        context, weights = self._attend(query, self._prepared(query, memory, source_lengths), first, return_weights)
        return context if weights is None else (context, weights)

    def _prepared(self, query: Tensor, memory: Tensor | Memory, source_lengths: Tensor | None) -> Memory:
        """Returns the prepared memory, after checking that it fits the queries."""
        if not isinstance(memory, Memory):
            memory = self.prepare(memory, source_lengths)
        elif source_lengths is not None:
            raise ValueError("a prepared memory already has its lengths: pass source_lengths to prepare() only.")
        if query.dim() != memory.values.dim():
            raise ValueError(
                f"queries and memory must be [B, N, C] and [B, M, C], or both without B; got {list(query.shape)} and "
                f"{list(memory.values.shape)}."
            )
        return memory

    def _attend(self, query: Tensor, memory: Memory, first: int, return_weights: bool) -> tuple[Tensor, Tensor | None]:
        return self._over(query, memory, return_weights)

    def _over(
        self,
        query: Tensor,
        memory: Memory,
        return_weights: bool,
        mask: Tensor | None = None,
        distribution: str | Distribution = "softmax",
    ) -> tuple[Tensor, Tensor | None]:
        """Attends to the positions of the memory for which `mask`, `[..., N, M]`, is True."""
        if memory.mask is not None:
            real = memory.mask.unsqueeze(-2)
            mask = real if mask is None else real & mask
        query, score = self.score(query)
        result = attend(
            query.unsqueeze(-2),
            memory.keys.unsqueeze(-2),
            memory.values.unsqueeze(-2),
            CompleteGraph(query.size(-2), memory.values.size(-2)),
            score=score,
            mask=None if mask is None else mask.unsqueeze(-3),
            distribution=distribution,
            dropout=self.dropout,
            training=self.training,
            return_weights=return_weights,
        )
        if isinstance(result, Tensor):
            return result.squeeze(-2), None
        out, weights = result
        assert isinstance(weights, Tensor)  # nothing is packed
        return out.squeeze(-2), weights.squeeze(-3)


class DotProductAttention(MemoryAttention):
    r"""Attention by dot products, with or without a scale.

    The scores of `Luong et al. <https://arxiv.org/abs/1508.04025>`_ and `Vaswani et al.
    <https://arxiv.org/abs/1706.03762>`_:

    .. math::
        s(q, m) = c \cdot q^{\top} m

    Args:
        scale: The factor :math:`c`. `None` means :math:`1 / \sqrt{C}`, and `1.0` is Luong's score. (default:
            `None`)
        dropout: The probability of dropping an attention weight during training. (default: `0.0`)

    Shapes:
        - **input:** queries `[B, N, C]`, memory `[B, M, C]`; **output:** contexts `[B, N, C]`.

    Raises:
        ValueError: If queries and memory have different numbers of channels (in `forward`).

    Example:
        >>> import torch, gattn
        >>> attention = gattn.nn.DotProductAttention(scale=1.0)
        >>> memory, lengths = torch.randn(2, 7, 8), torch.tensor([7, 4])
        >>> context, weights = attention(torch.randn(2, 3, 8), memory, lengths, return_weights=True)
        >>> context.shape, weights.shape
        (torch.Size([2, 3, 8]), torch.Size([2, 3, 7]))
    """

    def __init__(self, scale: float | None = None, dropout: float = 0.0):
        super().__init__(dropout)
        self.scale = scale

    def score(self, query: Tensor) -> tuple[Tensor, Score]:
        """Returns the queries as the score compares them with the keys, and the score."""
        return query, DotScore(self.scale)

    def extra_repr(self) -> str:
        """Returns the options that `repr` shows."""
        return f"scale={self.scale}"


class GeneralAttention(MemoryAttention):
    r"""The *general* score of `Luong et al. <https://arxiv.org/abs/1508.04025>`_: a learnt bilinear form.

    .. math::
        s(q, m) = q^{\top} W m

    Args:
        query_channels: The number of channels of the queries, Cq.
        memory_channels: The number of channels of the memory, Cm.
        dropout: The probability of dropping an attention weight during training. (default: `0.0`)

    Shapes:
        - **input:** queries `[B, N, Cq]`, memory `[B, M, Cm]`; **output:** contexts `[B, N, Cm]`.

    Raises:
        ValueError: If a number of channels is not positive.

    Example:
        >>> import torch, gattn
        >>> gattn.nn.GeneralAttention(6, 8)(torch.randn(2, 3, 6), torch.randn(2, 7, 8)).shape
        torch.Size([2, 3, 8])
    """

    def __init__(self, query_channels: int, memory_channels: int, dropout: float = 0.0):
        super().__init__(dropout)
        check_at_least(1, query_channels=query_channels, memory_channels=memory_channels)
        self.query_proj = Linear(query_channels, memory_channels, bias=False)

    def score(self, query: Tensor) -> tuple[Tensor, Score]:
        """Returns the queries as the score compares them with the keys, and the score."""
        return self.query_proj(query), DotScore(1.0)


class AdditiveAttention(MemoryAttention):
    r"""The score of `Bahdanau et al. <https://arxiv.org/abs/1409.0473>`_, a small network (also *MLP* or *concat*).

    .. math::
        s(q, m) = v^{\top} \tanh(W q + U m + b)

    Args:
        query_channels: The number of channels of the queries, Cq.
        memory_channels: The number of channels of the memory, Cm.
        hidden_channels: The number of channels of the hidden layer. (default: `None`, Cm)
        bias: Whether there is a bias :math:`b`. (default: `True`)
        dropout: The probability of dropping an attention weight during training. (default: `0.0`)

    Shapes:
        - **input:** queries `[B, N, Cq]`, memory `[B, M, Cm]`; **output:** contexts `[B, N, Cm]`.

    Raises:
        ValueError: If a number of channels is not positive.

    Example:
        >>> import torch, gattn
        >>> attention = gattn.nn.AdditiveAttention(6, 8, hidden_channels=16)
        >>> memory = attention.prepare(torch.randn(2, 7, 8))  # U m, once for all steps
        >>> for step in range(3):
        ...     context = attention(torch.randn(2, 1, 6), memory)
        >>> context.shape
        torch.Size([2, 1, 8])
    """

    def __init__(
        self,
        query_channels: int,
        memory_channels: int,
        hidden_channels: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
    ):
        super().__init__(dropout)
        hidden_channels = memory_channels if hidden_channels is None else hidden_channels
        check_at_least(
            1, query_channels=query_channels, memory_channels=memory_channels, hidden_channels=hidden_channels
        )
        self.query_proj = Linear(query_channels, hidden_channels, bias=False)
        self.key_proj = Linear(memory_channels, hidden_channels, bias=bias)
        self.vector = Parameter(torch.empty(hidden_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Resets all parameters."""
        super().reset_parameters()
        bound = self.vector.numel() ** -0.5
        torch.nn.init.uniform_(self.vector, -bound, bound)

    def keys(self, memory: Tensor) -> Tensor:
        """Projects the memory to keys, once for all queries."""
        keys: Tensor = self.key_proj(memory)
        return keys

    def score(self, query: Tensor) -> tuple[Tensor, Score]:
        """Returns the queries as the score compares them with the keys, and the score."""
        return self.query_proj(query), AdditiveScore(self.vector.unsqueeze(0), activation="tanh")


class _Wrapper(MemoryAttention):
    """Uses the score of another attention layer in another way."""

    def __init__(self, attention: MemoryAttention):
        super().__init__()
        if not isinstance(attention, MemoryAttention) or isinstance(attention, _Wrapper):
            raise TypeError(
                f"{type(self).__name__} takes a DotProductAttention, GeneralAttention or AdditiveAttention, whose "
                f"score it uses; got {type(attention).__name__}."
            )
        self.attention = attention

    def prepare(self, memory: Tensor, source_lengths: Tensor | None = None) -> Memory:
        """Prepares a memory as the layer whose score is used does; see `MemoryAttention.prepare`."""
        return self.attention.prepare(memory, source_lengths)


class LocalAttention(_Wrapper):
    r"""Attention within a window of the memory (*local-m*, *local-p*).

    From `Effective Approaches to Attention-based Neural Machine Translation <https://arxiv.org/abs/1508.04025>`_. Query
    *t* attends to the positions :math:`[p_t - D, p_t + D]`, with

    .. math::
        p_t = t \;\text{(monotonic)}, \qquad
        p_t = S \, \sigma(v_p^{\top} \tanh(W_p q_t)) \;\text{(predictive)}

    where :math:`S` is the length of the memory, and positions and queries count from 0. With predictive alignment, the
    weights are multiplied by :math:`\exp(-(s - p_t)^2 / 2 \sigma^2)` with :math:`\sigma = D / 2`, through which
    :math:`p_t` gets a gradient. The context of an empty window is zero.

    Args:
        attention: The layer whose score is used.
        window: The half-width :math:`D`.
        alignment: `"monotonic"` or `"predictive"`. (default: `"monotonic"`)
        query_channels: The number of channels of the queries, Cq; needed for predictive alignment only. (default:
            `None`)
        hidden_channels: The number of channels of :math:`W_p q_t`. (default: `None`, Cq)
        gaussian: Whether to multiply the weights by the Gaussian. (default: `None`, with predictive alignment only)

    Shapes:
        - **input:** queries `[B, N, Cq]`, memory `[B, M, Cm]`; **output:** contexts `[B, N, Cm]`.

    Raises:
        ValueError: If `window` is not positive, the alignment is unknown, or `query_channels` is given for monotonic
            alignment or missing for predictive.
        TypeError: If `attention` is not a layer with a score of its own.

    Example:
        >>> import torch, gattn
        >>> general = gattn.nn.GeneralAttention(8, 8)
        >>> local = gattn.nn.LocalAttention(general, window=2, alignment="predictive", query_channels=8)
        >>> local(torch.randn(2, 3, 8), torch.randn(2, 7, 8), torch.tensor([7, 4])).shape
        torch.Size([2, 3, 8])
    """

    alignments: ClassVar[tuple[str, ...]] = ("monotonic", "predictive")

    def __init__(
        self,
        attention: MemoryAttention,
        window: float,
        alignment: str = "monotonic",
        query_channels: int | None = None,
        hidden_channels: int | None = None,
        gaussian: bool | None = None,
    ):
        super().__init__(attention)
        if not window > 0:
            raise ValueError(f"window is the half-width D of [p - D, p + D] and must be positive; got {window}.")
        if alignment not in self.alignments:
            raise ValueError(f"alignment must be 'monotonic' or 'predictive', not {alignment!r}.")
        is_predictive = alignment == "predictive"
        if is_predictive != (query_channels is not None) or (hidden_channels is not None and not is_predictive):
            raise ValueError(
                "predictive alignment needs query_channels, and monotonic alignment takes neither query_channels "
                "nor hidden_channels."
            )
        self.window = window
        self.alignment = alignment
        self.gaussian = is_predictive if gaussian is None else gaussian
        if query_channels is not None:
            hidden_channels = query_channels if hidden_channels is None else hidden_channels
            check_at_least(1, query_channels=query_channels, hidden_channels=hidden_channels)
            self.place_hidden = Linear(query_channels, hidden_channels, bias=False)
            self.place = Linear(hidden_channels, 1, bias=False)

    def centres(self, query: Tensor, memory: Memory, first: int = 0) -> Tensor:
        """Returns the centres :math:`p_t`, `[..., N]`, never in half precision, which rounds large positions."""
        dtype = torch.promote_types(query.dtype, torch.float32)
        if self.alignment == "monotonic":
            return torch.arange(first, first + query.size(-2), dtype=dtype, device=query.device)
        share: Tensor = self.place(self.place_hidden(query).tanh()).squeeze(-1).to(dtype).sigmoid()
        if memory.mask is None:
            return memory.values.size(-2) * share
        return memory.mask.sum(-1, keepdim=True) * share

    def _attend(self, query: Tensor, memory: Memory, first: int, return_weights: bool) -> tuple[Tensor, Tensor | None]:
        centres = self.centres(query, memory, first)
        positions = torch.arange(memory.values.size(-2), device=query.device)
        inside = (positions - centres.detach().unsqueeze(-1)).abs() <= self.window
        distribution = LocalGaussian(centres, self.window) if self.gaussian else "softmax"
        return self.attention._over(query, memory, return_weights, inside, distribution)

    def extra_repr(self) -> str:
        """Returns the options that `repr` shows."""
        return f"window={self.window}, alignment={self.alignment!r}, gaussian={self.gaussian}"


class Choice(NamedTuple):
    """What was chosen, and how probable the choice was."""

    weights: Tensor
    """The weights of the choices, `[B, N, M]`."""
    log_prob: Tensor
    """The log-probabilities of the choices, `[B, N]`."""
    entropy: Tensor
    """The entropies, in nats, of the distributions from which they were drawn, `[B, N]`."""


class HardAttention(_Wrapper):
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
        ValueError: If the estimator is unknown, the temperature is not positive, or `expected` is not a probability.
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


class ReinforceLoss(NotScriptable, Module):
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
