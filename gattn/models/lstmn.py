"""A recurrent language model whose cells attend to their earlier states."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Embedding, Linear, Module, ModuleList

from gattn.errors import check_at_least
from gattn.graphs import CompleteGraph
from gattn.models.decoding import sample
from gattn.models.tokens import check_tokens
from gattn.nn.recurrent.lstmn_cell import LSTMNCell, LSTMNState
from gattn.nn.shared.dropout import Dropout
from gattn.ops.dropout import check_probability

__all__ = ["LSTMN"]


class LSTMN(Module):
    r"""A language model of stacked `gattn.nn.LSTMNCell`: LSTMs with attention to all of their earlier states.

    From `Long Short-Term Memory-Networks for Machine Reading <https://arxiv.org/abs/1601.06733>`_. The input of a layer
    is the hidden state of the layer below, and

    .. math::
        p(t_{i+1} \mid t_1, \ldots, t_i) = \mathrm{softmax}(W h_i + b)

    Args:
        num_tokens: The size of the vocabulary, V.
        channels: The number of channels of embeddings, hidden states and memories, C. (default: `128`)
        num_layers: The number of layers. (default: `2`)
        attention_channels: The number of channels of the score's hidden layer. (default: `None`, C)
        dropout: The probability of dropping a feature between layers during training. (default: `0.0`)
        window: The number of most recent states to which each layer attends. (default: `None`, all)
        bias: Whether the cells and the output layer have biases. (default: `True`)
        tie_weights: Whether the output layer shares its weights with the embedding. (default: `True`)

    Shapes:
        - **input:** tokens `[B, T]`; **output:** logits of the next tokens, `[B, T, V]`.

    Raises:
        ValueError: If an option is out of range.

    Example:
        >>> import torch, gattn
        >>> model = gattn.models.LSTMN(num_tokens=65, channels=32).eval()
        >>> model(torch.zeros(1, 5, dtype=torch.int64)).shape
        torch.Size([1, 5, 65])
        >>> model.generate(torch.zeros(1, 1, dtype=torch.int64), num_new_tokens=10).shape
        torch.Size([1, 11])
    """

    def __init__(
        self,
        num_tokens: int,
        channels: int = 128,
        num_layers: int = 2,
        *,
        attention_channels: int | None = None,
        dropout: float = 0.0,
        window: int | None = None,
        bias: bool = True,
        tie_weights: bool = True,
    ):
        super().__init__()
        check_at_least(1, num_tokens=num_tokens, channels=channels, num_layers=num_layers)
        check_probability("dropout", dropout)
        self.num_tokens = num_tokens
        self.embedding = Embedding(num_tokens, channels)
        self.layers = ModuleList(
            LSTMNCell(channels, channels, attention_channels, bias, window) for _ in range(num_layers)
        )
        self.dropout = Dropout(dropout)
        self.output = Linear(channels, num_tokens, bias)
        if tie_weights:
            self.output.weight = self.embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Resets all parameters: embeddings and the output layer are normal with σ = 0.1, cells reset themselves."""
        for layer in self.layers:
            layer.reset_parameters()  # type: ignore[operator]
        for module in (self.embedding, self.output):
            torch.nn.init.normal_(module.weight, std=0.1)
        if self.output.bias is not None:
            torch.nn.init.zeros_(self.output.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Computes the logits of each next token.

        Args:
            tokens: The tokens, `[B, T]`. Padding at the end changes no logits before it.

        Raises:
            ValueError: If tokens are not integers `[B, T]`.
            IndexError: If a token is out of range.
        """
        return self.advance(tokens)[0]

    def advance(
        self, tokens: Tensor, state: tuple[LSTMNState, ...] | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, tuple[LSTMNState, ...]]:
        """Computes the logits of each next token, and the state from which the sequences can be continued.

        Args:
            tokens: The tokens, `[B, T]`; with a state, only the new ones.
            state: The state after earlier tokens, one for each layer. (default: `None`, there are none)
            lengths: The number of these tokens in each sequence without padding, `[B]`; padding has no effect on the
                state. (default: `None`, all)

        Returns:
            The logits `[B, T, V]`, of which those of padding have no meaning, and the new state.

        Raises:
            ValueError: If tokens are not integers `[B, T]`, or state or lengths do not fit.
            IndexError: If a token is out of range.
        """
        check_tokens("tokens", tokens, self.num_tokens)
        if state is not None and len(state) != len(self.layers):
            raise ValueError(f"the state must have one part for each of {len(self.layers)} layers; got {len(state)}.")
        mask = None
        if lengths is not None:
            CompleteGraph(1, tokens.size(1), source_lengths=lengths)  # checks them
            if lengths.shape != tokens.shape[:1]:
                raise ValueError(
                    f"lengths must be one for each sequence, [{tokens.size(0)}]; got {list(lengths.shape)}."
                )
            mask = torch.arange(tokens.size(1), device=tokens.device) < lengths.to(tokens.device).unsqueeze(1)
        x = self.dropout(self.embedding(tokens))
        states = []
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, LSTMNCell)
            x, last = layer.unroll(x, None if state is None else state[number], mask)
            x = self.dropout(x)
            states.append(last)
        return self.output(x), tuple(states)

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        num_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continues a text token by token; see `gattn.models.decoding.sample`.

        Args:
            tokens: The first tokens, `[B, T]`, with T at least 1.
            num_new_tokens: The number of tokens to add.
            temperature: The logits are divided by it. Zero selects the most probable token. (default: `1.0`)
            top_k: Samples from this many of the most probable tokens only. (default: `None`, all)
            top_p: Samples only from the smallest set of tokens whose probabilities sum to at least this.
                (default: `None`, all)
            generator: The source of random numbers. (default: `None`, the global generator)

        Returns:
            All tokens, `[B, T + num_new_tokens]`.

        Raises:
            TypeError: If tokens are not a tensor, or a number is not an integer.
            ValueError: If there is no first token, or an option is out of range.
            IndexError: If a token is out of range.
        """
        check_tokens("tokens", tokens, self.num_tokens)
        if tokens.size(1) < 1:
            raise ValueError("generate() needs at least one token to begin with.")
        check_at_least(0, num_new_tokens=num_new_tokens)
        new, state = tokens, None
        for _ in range(num_new_tokens):
            logits, state = self.advance(new, state)
            new = sample(logits[:, -1], temperature, top_k, top_p, generator).unsqueeze(1)
            tokens = torch.cat([tokens, new], 1)
        return tokens
