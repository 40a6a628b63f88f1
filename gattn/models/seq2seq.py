"""Recurrent encoder and decoder, with attention between them or without."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import GRU, LSTM, Dropout, Embedding, GRUCell, Linear, LSTMCell, Module, ModuleList
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from gattn.models.decoding import beam_search
from gattn.models.tokens import check_tokens, shift
from gattn.nn.rnn_attention import (
    AdditiveAttention,
    DotProductAttention,
    GeneralAttention,
    HardAttention,
    LocalAttention,
    Memory,
    MemoryAttention,
    ReinforceLoss,
)
from gattn.ops.dropout import check_probability

ATTENTIONS = ("dot", "scaled_dot", "general", "additive", "local-m", "local-p", "hard", "hard-st")
FORMS = ("bahdanau", "luong")
CELLS = {"gru": (GRU, GRUCell), "lstm": (LSTM, LSTMCell)}

#: Of hard attention: small, for what REINFORCE adds to the gradient of encoder and decoder is mostly noise.
_REINFORCE_WEIGHT = 0.1
#: Keeps choices undecided until they learnt something.
_ENTROPY_WEIGHT = 0.01


Layers = tuple[tuple[Tensor, ...], ...]


class State(NamedTuple):
    """What a decoder knows between two steps."""

    layers: Layers
    """Of each recurrent layer: its state, `[B, C]`, and an LSTM's cell."""
    feed: Tensor
    """What the next step is fed beside its token: Luong's last output, `[B, C]`."""
    place: int
    """Number of steps so far."""

    def take(self, order: Tensor) -> State:
        """The states of these elements of the batch, `[B']`."""
        layers = tuple(tuple(x.index_select(0, order) for x in layer) for layer in self.layers)
        return State(layers, self.feed.index_select(0, order), self.place)


class Source(NamedTuple):
    """A source that was read."""

    memory: Memory | None
    """What is attended to; `None` without attention."""
    summary: Tensor
    """The encoder's last state, `[B, C]`: the context where there is no attention."""

    def repeat(self, times: int) -> Source:
        """Each element so many times in a row."""
        memory = self.memory
        if memory is not None:
            memory = Memory(*(None if x is None else x.repeat_interleave(times, 0) for x in memory))  # type: ignore[arg-type]
        return Source(memory, self.summary.repeat_interleave(times, 0))


class Seq2Seq(Module):
    r"""A recurrent network reads a sequence, another one writes one, and attends to what was read.

    Two forms. That of `Bahdanau et al. <https://arxiv.org/abs/1409.0473>`_ attends with the last state, and feeds the
    context to the recurrent step; that of `Luong et al. <https://arxiv.org/abs/1508.04025>`_ attends after the step,
    and feeds its output to the next one (*input feeding*):

    .. math::
        c_i = \mathrm{attention}(s_{i-1}, m), \quad
        s_i = \mathrm{RNN}([y_{i-1}; c_i], s_{i-1}), \quad
        o_i = \tanh(W [s_i; c_i; y_{i-1}]) \quad \text{(Bahdanau)}

    .. math::
        s_i = \mathrm{RNN}([y_{i-1}; o_{i-1}], s_{i-1}), \quad
        c_i = \mathrm{attention}(s_i, m), \quad
        o_i = \tanh(W [c_i; s_i]) \quad \text{(Luong)}

    and :math:`p(y_i) = \mathrm{softmax}(V o_i)`. The encoder is bidirectional, and its last states, through a layer of
    their own, are the decoder's first. Without attention each :math:`c_i` is the encoder's last state: a vector of a
    fixed size has to hold the whole sequence.

    Args:
        num_source_tokens: Size of the source vocabulary.
        num_target_tokens: Size of the target vocabulary, V.
        embedding_channels: Channels of the embeddings. (default: `256`)
        hidden_channels: Channels of the decoder's state and of the memory, C, even. (default: `256`)
        attention: `None`, `"dot"`, `"scaled_dot"`, `"general"`, `"additive"`, `"local-m"` (monotonic), `"local-p"`
            (predictive), `"hard"` (trained by REINFORCE), `"hard-st"` (by straight-through Gumbel), or a
            `gattn.nn.MemoryAttention` for queries and memories of C channels. Local and hard attention use the general
            score. (default: `"additive"`)
        form: `"bahdanau"` or `"luong"`. (default: `None`, Bahdanau's for `"additive"`, Luong's otherwise)
        cell: `"gru"` or `"lstm"`. (default: `"gru"`)
        num_layers: Recurrent layers of encoder and decoder each. (default: `1`)
        dropout: Probability that a feature is dropped, in training. (default: `0.0`)
        window: Half-width of local attention. (default: `10`)
        start: The token that a target begins with. (default: `1`)
        end: The token that ends it. (default: `2`)
        share_embeddings: Whether source and target have one vocabulary and one embedding. (default: `False`)
        tie_weights: Whether the output layer is the target embedding's transpose. (default: `False`)

    Shapes:
        - **input:** source tokens `[B, S]`, target tokens `[B, T]`; **output:** logits `[B, T, V]`.

    Raises:
        ValueError: If an option is out of range, or options contradict each other.
        TypeError: If `attention` is no `MemoryAttention`.

    Example:
        >>> import torch, gattn
        >>> model = gattn.models.Seq2Seq(20, 20, 16, 32, attention="general").eval()
        >>> source, lengths = torch.randint(3, 20, (2, 7)), torch.tensor([7, 4])
        >>> logits, weights = model(source, torch.randint(3, 20, (2, 5)), lengths, return_weights=True)
        >>> logits.shape, weights.shape
        (torch.Size([2, 5, 20]), torch.Size([2, 5, 7]))
        >>> model.generate(source, lengths, max_length=6, beams=2).size(0)
        2
    """

    def __init__(
        self,
        num_source_tokens: int,
        num_target_tokens: int,
        embedding_channels: int = 256,
        hidden_channels: int = 256,
        *,
        attention: str | MemoryAttention | None = "additive",
        form: str | None = None,
        cell: str = "gru",
        num_layers: int = 1,
        dropout: float = 0.0,
        window: float = 10,
        start: int = 1,
        end: int = 2,
        share_embeddings: bool = False,
        tie_weights: bool = False,
    ):
        super().__init__()
        _check_options(num_source_tokens, num_target_tokens, embedding_channels, hidden_channels, num_layers)
        if form is None:
            form = "bahdanau" if attention == "additive" else "luong"
        if form not in FORMS:
            raise ValueError(f"form is 'bahdanau' or 'luong', not {form!r}.")
        if cell not in CELLS:
            raise ValueError(f"cell is 'gru' or 'lstm', not {cell!r}.")
        check_probability("dropout", dropout)
        for name, token in (("start", start), ("end", end)):
            if not 0 <= token < num_target_tokens:
                raise ValueError(f"{name} is a target token, between 0 and {num_target_tokens - 1}; got {token}.")
        if share_embeddings and num_source_tokens != num_target_tokens:
            raise ValueError(
                f"one embedding for both needs one vocabulary; got {num_source_tokens} and {num_target_tokens} tokens."
            )
        if tie_weights and embedding_channels != hidden_channels:
            raise ValueError(
                "an output layer that is the embedding's transpose needs embedding_channels = hidden_channels; got "
                f"{embedding_channels} and {hidden_channels}."
            )
        self.num_source_tokens = num_source_tokens
        self.num_target_tokens = num_target_tokens
        self.form = form
        self.start = start
        self.end = end
        channels = hidden_channels
        sequence, step = CELLS[cell]
        self.source_embedding = Embedding(num_source_tokens, embedding_channels)
        self.target_embedding = Embedding(num_target_tokens, embedding_channels)
        self.encoder = sequence(
            embedding_channels,
            channels // 2,
            num_layers,
            batch_first=True,
            dropout=dropout if num_layers > 1 else 0.0,
            bidirectional=True,
        )
        self.bridge = Linear(channels, channels)
        sizes = [embedding_channels + channels, *[channels] * (num_layers - 1)]
        self.decoder = ModuleList(step(size, channels) for size in sizes)
        layer = _make_attention(attention, channels, window)
        self.attention = layer if isinstance(attention, str) else None
        self.combine = Linear(2 * channels + (embedding_channels if form == "bahdanau" else 0), channels)
        self.output = Linear(channels, num_target_tokens)
        self.dropout = Dropout(dropout)
        self.reinforce = None
        if isinstance(layer, HardAttention) and layer.estimator == "reinforce":
            self.reinforce = ReinforceLoss(_REINFORCE_WEIGHT, _ENTROPY_WEIGHT, decay=0.99)
        if share_embeddings:
            self.source_embedding = self.target_embedding
        if tie_weights:
            self.output.weight = self.target_embedding.weight
        self.reset_parameters()
        self.attention = layer  # one that is given keeps its parameters

    def reset_parameters(self) -> None:
        """Draws all parameters anew: embeddings with σ = 0.1, everything else as PyTorch does."""
        for module in self.modules():
            if isinstance(module, Embedding):
                torch.nn.init.normal_(module.weight, std=0.1)
            elif module is not self and module is not self.output and hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]
        torch.nn.init.zeros_(self.output.bias)
        if self.output.weight is not self.target_embedding.weight:
            torch.nn.init.xavier_uniform_(self.output.weight)

    def encode(self, source: Tensor, source_lengths: Tensor | None = None) -> tuple[Source, State]:
        """Reads the source: what the decoder attends to, and the state that it begins with.

        Args:
            source: `[B, S]`.
            source_lengths: How many tokens of each source are real, `[B]`; padding is never read. (default: `None`,
                all)

        Raises:
            ValueError: If a source is empty, or lengths do not fit.
            IndexError: If a token is out of range.
        """
        lengths = _check_source(source, source_lengths, self.num_source_tokens)
        x = self.dropout(self.source_embedding(source))
        if lengths is None:
            memory, last = self.encoder(x)
        else:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            memory, last = self.encoder(packed)
            memory, _ = pad_packed_sequence(memory, batch_first=True, total_length=source.size(1))
        # Two directions of each layer, side by side.
        parts = [
            x.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2) for x in (last if isinstance(last, tuple) else [last])
        ]
        summary = parts[0][-1]
        parts[0] = self.bridge(parts[0]).tanh()
        layers = tuple(tuple(part[layer] for part in parts) for layer in range(len(self.decoder)))
        prepared = None if self.attention is None else self.attention.prepare(self.dropout(memory), source_lengths)
        return Source(prepared, summary), State(layers, torch.zeros_like(summary), 0)

    def step(
        self, token: Tensor, source: Source, state: State, return_weights: bool = False
    ) -> tuple[Tensor, State, Any]:
        """One step of the decoder.

        Args:
            token: Embedded, `[B, embedding_channels]`.
            source: From `encode`.
            state: From `encode`, or the last step.
            return_weights: Whether the attention weights are asked for. (default: `False`)

        Returns:
            The output :math:`o_i`, `[B, C]`, the new state, and how it attended: a `gattn.nn.rnn_attention.Choice` for
            hard attention, else weights `[B, 1, S]` if they were asked for, or `None`.
        """
        if self.form == "bahdanau":
            context, alpha = self._context(state.layers[-1][0], source, state.place, return_weights)
            top, layers = self._recur(torch.cat([token, context], 1), state.layers)
            out = self.combine(torch.cat([top, context, token], 1)).tanh()
            return out, State(layers, state.feed, state.place + 1), alpha
        top, layers = self._recur(torch.cat([token, state.feed], 1), state.layers)
        context, alpha = self._context(top, source, state.place, return_weights)
        out = self.combine(torch.cat([context, top], 1)).tanh()
        return out, State(layers, out, state.place + 1), alpha

    def _recur(
        self, x: Tensor, layers: tuple[tuple[Tensor, ...], ...]
    ) -> tuple[Tensor, tuple[tuple[Tensor, ...], ...]]:
        new = []
        for number, (cell, old) in enumerate(zip(self.decoder, layers, strict=True)):
            x = self.dropout(x) if number else x
            state = cell(x, old if len(old) > 1 else old[0])
            new.append(state if isinstance(state, tuple) else (state,))
            x = new[-1][0]
        return x, tuple(new)

    def _context(self, query: Tensor, source: Source, place: int, return_weights: bool) -> tuple[Tensor, Any]:
        if self.attention is None or source.memory is None:
            return source.summary, None
        query = query.unsqueeze(1)
        alpha = None
        if isinstance(self.attention, HardAttention):
            context, alpha = self.attention.choose(query, source.memory)
        elif return_weights:
            context, alpha = self.attention(query, source.memory, first=place, return_weights=True)
        else:
            context = self.attention(query, source.memory, first=place)
        return context.squeeze(1), alpha

    def _unroll(
        self, source: Tensor, target: Tensor, source_lengths: Tensor | None, return_weights: bool = False
    ) -> tuple[Tensor, list[Any]]:
        """The outputs `[B, T, C]`, and how each step attended."""
        check_tokens("target tokens", target, self.num_target_tokens)
        if source.size(0) != target.size(0):
            raise ValueError(f"each source has one target; got {source.size(0)} and {target.size(0)}.")
        read, state = self.encode(source, source_lengths)
        outputs, attentions = [], []
        for token in self.dropout(self.target_embedding(shift(target, self.start))).unbind(1):
            out, state, alpha = self.step(token, read, state, return_weights)
            outputs.append(out)
            attentions.append(alpha)
        hidden = torch.stack(outputs, 1) if outputs else read.summary.new_zeros(*target.shape, read.summary.size(1))
        return self.dropout(hidden), attentions

    def forward(
        self, source: Tensor, target: Tensor, source_lengths: Tensor | None = None, *, return_weights: bool = False
    ) -> Any:
        """Logits of each target token, given those before it: what a loss compares with `target` itself.

        Args:
            source: `[B, S]`.
            target: `[B, T]`, without the start token.
            source_lengths: How many tokens of each source are real, `[B]`. (default: `None`, all)
            return_weights: Whether to return the attention weights, too, `[B, T, S]`. (default: `False`)

        Raises:
            ValueError: If shapes or lengths do not fit, a source is empty, or there are no weights to return.
            IndexError: If a token is out of range.
        """
        if return_weights and self.attention is None:
            raise ValueError("a model without attention has no weights to return: leave return_weights=False.")
        hidden, attentions = self._unroll(source, target, source_lengths, return_weights)
        logits = self.output(hidden)
        if not return_weights:
            return logits
        if not attentions:
            return logits, logits.new_zeros(*target.shape, source.size(1))
        return logits, torch.cat([x.weights if hasattr(x, "weights") else x for x in attentions], 1)

    def loss(
        self,
        source: Tensor,
        target: Tensor,
        source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
        *,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """What training minimises: the cross entropy, in nats a token.

        With hard attention trained by REINFORCE, in training mode, plus a `gattn.nn.ReinforceLoss`. The reward of a
        choice is the log-probability of the token that it was made for; its effect on later ones is left out.

        Args:
            source: `[B, S]`.
            target: `[B, T]`, without the start token, and with the end token.
            source_lengths: How many tokens of each source are real, `[B]`. (default: `None`, all)
            target_lengths: How many of each target, the end included, `[B]`. (default: `None`, all)
            label_smoothing: The share of the target distribution that all tokens have. (default: `0.0`)

        Raises:
            ValueError: If shapes or lengths do not fit, or a source is empty.
            IndexError: If a token is out of range.
        """
        hidden, attentions = self._unroll(source, target, source_lengths)
        real = torch.ones_like(target, dtype=torch.bool)
        if target_lengths is not None:
            _check_lengths("target", target_lengths, target)
            real = torch.arange(target.size(1), device=target.device) < target_lengths.unsqueeze(1)
        logits, expected = self.output(hidden[real]), target[real].long()
        loss = F.cross_entropy(logits, expected, label_smoothing=label_smoothing)
        if self.reinforce is not None and self.training and attentions:
            reward = -F.cross_entropy(logits.detach(), expected, reduction="none")
            log_prob = torch.cat([choice.log_prob for choice in attentions], 1)[real]
            entropy = torch.cat([choice.entropy for choice in attentions], 1)[real]
            loss = loss + self.reinforce(reward, log_prob, entropy)
        return loss

    @torch.no_grad()
    def generate(
        self,
        source: Tensor,
        source_lengths: Tensor | None = None,
        *,
        max_length: int = 64,
        beams: int = 1,
        length_penalty: float = 1.0,
    ) -> Tensor:
        """The targets that greedy (`beams=1`) or beam search finds.

        Args:
            source: `[B, S]`.
            source_lengths: As in `forward`. (default: `None`)
            max_length: Tokens of a target at most, its end included. (default: `64`)
            beams: See `gattn.models.decoding.beam_search`. (default: `1`)
            length_penalty: Likewise. (default: `1.0`)

        Returns:
            `[B, T]`, without the start token, and with `end` after a target's end.
        """
        read, state = self.encode(source, source_lengths)
        if beams > 1:
            read = read.repeat(beams)
            state = state.take(torch.arange(source.size(0), device=source.device).repeat_interleave(beams))

        def step(tokens: Tensor) -> Tensor:
            nonlocal state
            out, state, _ = self.step(self.dropout(self.target_embedding(tokens[:, -1])), read, state)
            return self.output(self.dropout(out))

        def reorder(order: Tensor) -> None:
            nonlocal state
            state = state.take(order)

        found, _ = beam_search(
            step,
            source.size(0),
            self.start,
            self.end,
            max_length,
            beams,
            length_penalty,
            reorder=reorder,
            device=source.device,
        )
        return found


def _make_attention(attention: str | MemoryAttention | None, channels: int, window: float) -> MemoryAttention | None:
    if attention is None or isinstance(attention, MemoryAttention):
        return attention
    if not isinstance(attention, str):
        raise TypeError(f"attention is a name, a gattn.nn.MemoryAttention or None; got {type(attention).__name__}.")
    general = GeneralAttention(channels, channels)
    made: dict[str, MemoryAttention] = {
        "dot": DotProductAttention(scale=1.0),
        "scaled_dot": DotProductAttention(),
        "general": general,
        "additive": AdditiveAttention(channels, channels),
        "local-m": LocalAttention(general, window),
        "local-p": LocalAttention(general, window, alignment="predictive", query_channels=channels),
        # Half of the choices replaced by their expectation, as the paper has it.
        "hard": HardAttention(general, expected=0.5),
        "hard-st": HardAttention(general, estimator="straight_through"),
    }
    if attention not in made:
        raise ValueError(
            f"attention is None, one of {', '.join(map(repr, ATTENTIONS))}, or a layer; got {attention!r}."
        )
    return made[attention]


def _check_options(
    num_source_tokens: int, num_target_tokens: int, embedding_channels: int, hidden_channels: int, num_layers: int
) -> None:
    if min(num_source_tokens, num_target_tokens, embedding_channels, num_layers) < 1:
        raise ValueError("numbers of tokens, channels and layers must be at least 1.")
    if hidden_channels < 2 or hidden_channels % 2:
        raise ValueError(f"hidden_channels is even: each direction of the encoder has half; got {hidden_channels}.")


def _check_source(source: Tensor, lengths: Tensor | None, num_tokens: int) -> Tensor | None:
    """Checks the source; its lengths on the CPU, or `None` where all of it is real."""
    check_tokens("source tokens", source, num_tokens)
    if source.size(1) == 0:
        raise ValueError("a source has at least one token (its end, for example); these have none.")
    if lengths is None:
        return None
    _check_lengths("source", lengths, source)
    return lengths.cpu() if lengths.numel() else None


def _check_lengths(name: str, lengths: Tensor, tokens: Tensor) -> None:
    if lengths.shape != tokens.shape[:1] or lengths.is_floating_point():
        raise ValueError(
            f"there is one integer length for each {name}, [{tokens.size(0)}]; got {lengths.dtype} of shape "
            f"{list(lengths.shape)}."
        )
    if lengths.numel() and not 1 <= int(lengths.min()) <= int(lengths.max()) <= tokens.size(1):
        raise ValueError(f"{name} lengths lie between 1 and {tokens.size(1)}; got {lengths.tolist()}.")
