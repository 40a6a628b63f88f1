"""Attention of a recurrent network to a window of the memory; for dimensions, see `rnn_attention`."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import Linear

from gattn.distributions import LocalGaussian
from gattn.errors import check_at_least
from gattn.nn.recurrent.rnn_attention import Memory, MemoryAttention, WrappedAttention

__all__ = ["LocalAttention"]


class LocalAttention(WrappedAttention):
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
