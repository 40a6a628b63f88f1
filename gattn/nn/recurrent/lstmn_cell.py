r"""A recurrent cell that attends to all of its earlier states (intra-attention).

Each token is one target of attention on a complete graph whose sources are the tokens before it.

Dimensions: T tokens, t of them so far, I input channels, C hidden channels, A channels of the score, B batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter

from gattn.attention import attend_for
from gattn.errors import InputError, InputTypeError, check_at_least
from gattn.graphs import CompleteGraph
from gattn.nn.shared.dtypes import check_dtype
from gattn.scores import AdditiveScore
from gattn.tracing import Leaf

__all__ = ["LSTMNCell", "LSTMNState"]


class LSTMNState(NamedTuple):
    """The state of an `LSTMNCell` after t tokens."""

    keys: Tensor
    r"""The projected hidden states :math:`W_h h_i`, which the score compares with later tokens, `[B, t, A]`."""
    values: Tensor
    """The two tapes side by side: the hidden state and the memory of each token, `[B, t, 2 C]`."""
    summary: Tensor
    r"""The summary :math:`\tilde h_t` of the hidden tape that the last token made, `[B, C]`."""
    mask: Tensor | None = None
    """Which tokens are not padding, `[B, t]`; `None` means all."""

    @property
    def hidden(self) -> Tensor:
        """The hidden tape, `[B, t, C]`."""
        return self.values.chunk(2, -1)[0]

    @property
    def memory(self) -> Tensor:
        """The memory tape, `[B, t, C]`."""
        return self.values.chunk(2, -1)[1]


class LSTMNCell(Leaf, Module):
    r"""An LSTM cell that keeps the states of all tokens on tapes and attends to them instead of using the last one.

    From `Long Short-Term Memory-Networks for Machine Reading <https://arxiv.org/abs/1601.06733>`_:

    .. math::
        a_i &= v^{\top} \tanh(W_h h_i + W_x x_t + W_{\tilde h} \tilde h_{t-1}), \qquad s = \mathrm{softmax}(a), \\
        \tilde h_t &= \sum_{i=1}^{t-1} s_i h_i, \qquad \tilde c_t = \sum_{i=1}^{t-1} s_i c_i, \\
        (i_t, f_t, o_t, \hat c_t) &= (\sigma, \sigma, \sigma, \tanh)(W [\tilde h_t; x_t]), \\
        c_t &= f_t \odot \tilde c_t + i_t \odot \hat c_t, \qquad h_t = o_t \odot \tanh(c_t)

    Both sums are zero for the first token. With `bias`, a bias is added to :math:`W_x x_t` and to :math:`W [\tilde h_t;
    x_t]`.

    Args:
        input_size: The number of channels of a token, I.
        hidden_size: The number of channels of the hidden state and of the memory, C.
        attention_size: The number of channels of the score's hidden layer, A. (default: `None`, C)
        bias: Whether there are biases. (default: `True`)
        window: The number of most recent states that the tapes keep, padding included. (default: `None`, all)

    Shapes:
        - **input:** tokens `[B, I]`, and for `unroll` `[B, T, I]`, without B, or with one more batch dimension in
          front;
        - **output:** hidden states `[B, C]`, and of `unroll` `[B, T, C]`.

    Raises:
        ValueError: If a size is not positive.

    Example:
        >>> import torch, gattn
        >>> cell, x, state = gattn.nn.LSTMNCell(8, 16), torch.randn(2, 5, 8), None
        >>> for token in x.unbind(1):
        ...     h, state, weights = cell(token, state, return_weights=True)
        >>> h.shape, state.hidden.shape, weights.shape
        (torch.Size([2, 16]), torch.Size([2, 5, 16]), torch.Size([2, 4]))
        >>> torch.allclose(cell.unroll(x)[0][:, -1], h, atol=1e-6)
        True
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        attention_size: int | None = None,
        bias: bool = True,
        window: int | None = None,
    ):
        super().__init__()
        attention_size = hidden_size if attention_size is None else attention_size
        check_at_least(1, input_size=input_size, hidden_size=hidden_size, attention_size=attention_size)
        if window is not None:
            check_at_least(1, window=window)
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.attention_size = attention_size
        self.window = window
        self.query_proj = Linear(input_size, attention_size, bias)
        self.summary_proj = Linear(hidden_size, attention_size, bias=False)
        self.key_proj = Linear(hidden_size, attention_size, bias=False)
        self.vector = Parameter(torch.empty(attention_size))
        self.input_gates = Linear(input_size, 4 * hidden_size, bias)
        self.summary_gates = Linear(hidden_size, 4 * hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        r"""Resets all parameters to uniform numbers up to :math:`1 / \sqrt{C}`, as in PyTorch's LSTM."""
        bound = self.hidden_size**-0.5
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, -bound, bound)

    def forward(
        self,
        x: Tensor,
        state: LSTMNState | None = None,
        mask: Tensor | None = None,
        *,
        return_weights: bool = False,
    ) -> tuple[Tensor, LSTMNState] | tuple[Tensor, LSTMNState, Tensor]:
        """Reads one token.

        Args:
            x: The token, `[B, I]`.
            state: The state after the tokens before it. (default: `None`, there are none)
            mask: Which elements of the batch have a token here, `[B]`. The others have padding, whose hidden state is
                zero, and to which no token attends. (default: `None`, all)
            return_weights: Whether to return the attention weights as well. (default: `False`)

        Returns:
            The hidden state `[B, C]`, the new state, and with `return_weights` the weights of the earlier tokens,
            `[B, t]`.

        Raises:
            ValueError: If shapes do not fit each other.
            TypeError: If `state` is not an `LSTMNState`.
        """
        x, state, mask = self._checked(x, state, mask, x.shape[:-1], "[B, I]")
        hidden, state, weights = self._step(self.query_proj(x), self.input_gates(x), state, mask, return_weights)
        return (hidden, state) if weights is None else (hidden, state, weights)

    def unroll(
        self, x: Tensor, state: LSTMNState | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, LSTMNState]:
        """Reads a sequence; all of its tokens are projected at once.

        Args:
            x: The tokens, `[B, T, I]`.
            state: The state after the tokens before them. (default: `None`, there are none)
            mask: Which tokens are not padding, `[B, T]`. (default: `None`, all)

        Returns:
            The hidden states `[B, T, C]`, which are zero for padding, and the new state.

        Raises:
            ValueError: If shapes do not fit each other.
            TypeError: If `state` is not an `LSTMNState`.
        """
        x, state, mask = self._checked(x, state, mask, x.shape[:-2], "[B, T, I]")
        masks = [None] * x.size(-2) if mask is None else mask.unbind(-1)
        outputs = [x.new_zeros(*x.shape[:-2], 0, self.hidden_size)]
        for query, gates, real in zip(
            self.query_proj(x).unbind(-2), self.input_gates(x).unbind(-2), masks, strict=True
        ):
            hidden, state, _ = self._step(query, gates, state, real, False)
            outputs.append(hidden.unsqueeze(-2))
        return torch.cat(outputs, -2), state

    def _step(
        self, query: Tensor, gates: Tensor, state: LSTMNState, real: Tensor | None, return_weights: bool
    ) -> tuple[Tensor, LSTMNState, Tensor | None]:
        """Reads one token, given its projections."""
        out, weights, _ = attend_for(
            (query + self.summary_proj(state.summary))[..., None, None, :],
            state.keys.unsqueeze(-2),
            state.values.unsqueeze(-2),
            CompleteGraph(1, state.keys.size(-2)),
            score=AdditiveScore(self.vector.unsqueeze(0), activation="tanh"),
            mask=None if state.mask is None else state.mask[..., None, None, :],
            weights=return_weights,
            layer=self,
        )
        summary, memory = out[..., 0, 0, :].chunk(2, -1)
        i, f, o, candidate = (gates + self.summary_gates(summary)).chunk(4, -1)
        memory = f.sigmoid() * memory + i.sigmoid() * candidate.tanh()
        hidden = o.sigmoid() * memory.tanh()
        mask = None
        if real is not None and state.mask is not None:
            there = real.unsqueeze(-1)
            hidden, memory = (x.masked_fill(~there, 0.0) for x in (hidden, memory))
            summary = torch.where(there, summary, state.summary)
            mask = torch.cat([state.mask, there], -1)
        value = torch.cat([hidden, memory], -1)
        keys = torch.cat([state.keys, self.key_proj(hidden).unsqueeze(-2)], -2)
        values = torch.cat([state.values, value.unsqueeze(-2)], -2)
        if self.window is not None:
            keys, values = keys[..., -self.window :, :], values[..., -self.window :, :]
            mask = None if mask is None else mask[..., -self.window :]
        weights = weights[..., 0, 0, :] if return_weights else None
        return hidden, LSTMNState(keys, values, summary, mask), weights

    def _checked(
        self, x: Tensor, state: LSTMNState | None, mask: Tensor | None, batch: torch.Size, shape: str
    ) -> tuple[Tensor, LSTMNState, Tensor | None]:
        """Checks the arguments, and returns the tokens with padding zero, the state, and masks for both or neither."""
        if x.dim() < shape.count(",") or x.dim() > shape.count(",") + 2 or x.size(-1) != self.input_size:
            raise InputError(f"x must be {shape} with I = {self.input_size}; got {list(x.shape)}.")
        check_dtype(self, x=x)
        if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape[:-1]):
            raise InputError(
                f"mask must be booleans, {list(x.shape[:-1])}; got {mask.dtype} of shape {list(mask.shape)}."
            )
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(-1), 0.0)  # zero times NaN is NaN, in gradients of the projections too
        if state is None:
            keys, values = (x.new_zeros(*batch, 0, size) for size in (self.attention_size, 2 * self.hidden_size))
            state = LSTMNState(keys, values, x.new_zeros(*batch, self.hidden_size))
        if not isinstance(state, LSTMNState):
            raise InputTypeError(f"state must be an LSTMNState that the cell returned; got {type(state).__name__}.")
        before = (*batch, state.keys.size(-2))
        expected = [(*before, self.attention_size), (*before, 2 * self.hidden_size), (*batch, self.hidden_size), before]
        for name, tensor, wanted in zip(state._fields, state, expected, strict=True):
            if tensor is not None and tuple(tensor.shape) != wanted:
                raise InputError(f"{name} of the state must be {list(wanted)}; got {list(tensor.shape)}.")
        if mask is None and state.mask is not None:
            mask = state.mask.new_ones(x.shape[:-1])
        elif mask is not None and state.mask is None:
            state = state._replace(mask=mask.new_ones(before))
        return x, state, mask

    def extra_repr(self) -> str:
        """Returns the options that `repr` shows."""
        window = "" if self.window is None else f", window={self.window}"
        return f"{self.input_size}, {self.hidden_size}, attention_size={self.attention_size}{window}"
