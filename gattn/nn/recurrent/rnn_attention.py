r"""Attention of a recurrent network over a memory, as in translation with an encoder and a decoder.

Every such layer is attention with one head on a bipartite complete graph, whose N targets are the queries and whose M
sources are the positions of the memory. The layers differ in their scores (dot, general, additive), in their graphs
(global, local) and in their distributions (soft, hard).

Dimensions: N queries, M positions of the memory, C channels, Cq of the queries, Cm of the memory, B batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter

from gattn.attention import attend
from gattn.distributions import Distribution
from gattn.errors import InputTypeError, check_at_least
from gattn.graphs import CompleteGraph
from gattn.nn.shared.declared import Declared
from gattn.nn.shared.dtypes import check_dtype
from gattn.ops.dropout import check_probability
from gattn.scores import AdditiveScore, DotScore, Score

__all__ = [
    "AdditiveAttention",
    "DotProductAttention",
    "GeneralAttention",
    "Memory",
    "MemoryAttention",
    "WrappedAttention",
]


class Memory(NamedTuple):
    """A memory that has been prepared once for any number of queries."""

    keys: Tensor
    """What the score compares with the queries, `[B, M, C]`."""
    values: Tensor
    """What the weights average, `[B, M, Cm]`, with zeros beyond the lengths."""
    mask: Tensor | None
    """Which positions are not padding, `[B, M]`; `None` means all."""


class MemoryAttention(Declared, Module):
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
            TypeError: If the memory is not a tensor.
            ValueError: If shapes or lengths do not fit each other.
        """
        if not isinstance(memory, Tensor):
            raise InputTypeError(f"memory must be a tensor; got {type(memory).__name__}.")
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
            return_weights: Whether to return the attention weights, before dropout, as well. (default: `False`)

        Returns:
            The contexts `[B, N, Cm]`, and with `return_weights` the weights `[B, N, M]`.

        Raises:
            TypeError: If the queries or the memory are not tensors.
            ValueError: If shapes or lengths do not fit each other, or an input is of another type than the parameters.
        """
        context, weights = self._attend(query, self._prepared(query, memory, source_lengths), first, return_weights)
        return context if weights is None else (context, weights)

    def _prepared(self, query: Tensor, memory: Tensor | Memory, source_lengths: Tensor | None) -> Memory:
        """Returns the prepared memory, after checking that it fits the queries."""
        if not isinstance(memory, Memory):
            memory = self.prepare(memory, source_lengths)
        elif source_lengths is not None:
            raise ValueError("a prepared memory already has its lengths: pass source_lengths to prepare() only.")
        if not isinstance(query, Tensor):
            raise InputTypeError(f"query must be a tensor; got {type(query).__name__}.")
        if query.dim() != memory.values.dim():
            raise ValueError(
                f"queries and memory must be [B, N, C] and [B, M, C], or both without B; got {list(query.shape)} and "
                f"{list(memory.values.shape)}."
            )
        check_dtype(self, query=query)
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
        s(q, m) = c \cdot q^{\top} W m

    The paper has no factor :math:`c`. With an optimizer such as Adam, which changes every entry of :math:`W` by about
    the learning rate in each step, the scores of many channels then change so much that the softmax soon saturates.
    `scale=None` prevents that.

    Args:
        query_channels: The number of channels of the queries, Cq.
        memory_channels: The number of channels of the memory, Cm.
        dropout: The probability of dropping an attention weight during training. (default: `0.0`)
        scale: The factor :math:`c`; `None` means :math:`1 / \sqrt{C_m}`. (default: `1.0`)

    Shapes:
        - **input:** queries `[B, N, Cq]`, memory `[B, M, Cm]`; **output:** contexts `[B, N, Cm]`.

    Raises:
        ValueError: If a number of channels is not positive.

    Example:
        >>> import torch, gattn
        >>> gattn.nn.GeneralAttention(6, 8)(torch.randn(2, 3, 6), torch.randn(2, 7, 8)).shape
        torch.Size([2, 3, 8])
    """

    def __init__(self, query_channels: int, memory_channels: int, dropout: float = 0.0, *, scale: float | None = 1.0):
        super().__init__(dropout)
        check_at_least(1, query_channels=query_channels, memory_channels=memory_channels)
        self.scale = scale
        self.query_proj = Linear(query_channels, memory_channels, bias=False)

    def score(self, query: Tensor) -> tuple[Tensor, Score]:
        """Returns the queries as the score compares them with the keys, and the score."""
        return self.query_proj(query), DotScore(self.scale)

    def extra_repr(self) -> str:
        """Returns the options that `repr` shows."""
        return f"scale={self.scale}"


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
        check_dtype(self, memory=memory)
        keys: Tensor = self.key_proj(memory)
        return keys

    def score(self, query: Tensor) -> tuple[Tensor, Score]:
        """Returns the queries as the score compares them with the keys, and the score."""
        return self.query_proj(query), AdditiveScore(self.vector.unsqueeze(0), activation="tanh")


class WrappedAttention(MemoryAttention):
    """Uses the score of another attention layer in another way."""

    def __init__(self, attention: MemoryAttention):
        super().__init__()
        if not isinstance(attention, MemoryAttention) or isinstance(attention, WrappedAttention):
            raise TypeError(
                f"{type(self).__name__} takes a DotProductAttention, GeneralAttention or AdditiveAttention, whose "
                f"score it uses; got {type(attention).__name__}."
            )
        self.attention = attention

    def prepare(self, memory: Tensor, source_lengths: Tensor | None = None) -> Memory:
        """Prepares a memory as the layer whose score is used does; see `MemoryAttention.prepare`."""
        return self.attention.prepare(memory, source_lengths)
