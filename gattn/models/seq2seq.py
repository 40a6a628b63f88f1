"""A recurrent encoder and decoder, with or without attention between them."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import GRU, LSTM, Embedding, GRUCell, Linear, LSTMCell, Module, ModuleList
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from gattn.errors import check_at_least
from gattn.models.decoding import beam_search
from gattn.models.tokens import check_tokens, shift
from gattn.nn.recurrent.hard_attention import Choice, HardAttention, ReinforceLoss
from gattn.nn.recurrent.local_attention import LocalAttention
from gattn.nn.recurrent.rnn_attention import (
    AdditiveAttention,
    DotProductAttention,
    GeneralAttention,
    Memory,
    MemoryAttention,
)
from gattn.nn.shared.dropout import Dropout
from gattn.ops.dropout import check_probability
from gattn.tracing import Leaf

__all__ = ["ATTENTIONS", "FORMS", "Seq2Seq"]

ATTENTIONS = ("dot", "scaled_dot", "general", "additive", "local-m", "local-p", "hard", "hard-st")
FORMS = ("bahdanau", "luong")
CELLS = {"gru": (GRU, GRUCell), "lstm": (LSTM, LSTMCell)}

#: The weight of REINFORCE, which is small because the loss adds mostly noise to the gradient of encoder and decoder.
_REINFORCE_WEIGHT = 0.1
#: The weight of the entropy, which keeps hard attention from settling on choices before it has learnt.
_ENTROPY_WEIGHT = 0.01


#: The state of each recurrent layer, `[B, C]`, and an LSTM's cell.
Layers: TypeAlias = tuple[tuple[Tensor, ...], ...]
#: How a step of the decoder attended: weights `[B, 1, S]`, choices of hard attention, or unknown.
Alignment: TypeAlias = Tensor | Choice | None


class State(NamedTuple):
    """The state of a decoder between two steps."""

    layers: Layers
    """The state of each recurrent layer, `[B, C]`, and an LSTM's cell."""
    feed: Tensor
    """The last output, `[B, C]`, which is an input of the next step in Luong's form."""
    place: int
    """Number of steps so far."""

    def take(self, order: Tensor) -> State:
        """Selects elements of the batch, `[B']`."""
        layers = tuple(tuple(x.index_select(0, order) for x in layer) for layer in self.layers)
        return State(layers, self.feed.index_select(0, order), self.place)


class Source(NamedTuple):
    """An encoded source."""

    memory: Memory | None
    """The memory to which the decoder attends; `None` without attention."""
    summary: Tensor
    """The last state of the encoder, `[B, C]`, which is the context without attention."""

    def repeat(self, times: int) -> Source:
        """Repeats each element this many times in a row."""
        memory = self.memory
        if memory is not None:
            memory = Memory(*(None if x is None else x.repeat_interleave(times, 0) for x in memory))  # type: ignore[arg-type]
        return Source(memory, self.summary.repeat_interleave(times, 0))


class Seq2Seq(Leaf, Module):
    r"""A recurrent encoder reads a sequence, and a recurrent decoder generates another one with attention to the first.

    There are two forms. That of `Bahdanau et al. <https://arxiv.org/abs/1409.0473>`_ attends with the last state and
    passes the context to the recurrent step. That of `Luong et al. <https://arxiv.org/abs/1508.04025>`_ attends after
    the step, and passes its output to the next one (*input feeding*):

    .. math::
        c_i = \mathrm{attention}(s_{i-1}, m), \quad
        s_i = \mathrm{RNN}([y_{i-1}; c_i], s_{i-1}), \quad
        o_i = \tanh(W [s_i; c_i; y_{i-1}]) \quad \text{(Bahdanau)}

    .. math::
        s_i = \mathrm{RNN}([y_{i-1}; o_{i-1}], s_{i-1}), \quad
        c_i = \mathrm{attention}(s_i, m), \quad
        o_i = \tanh(W [c_i; s_i]) \quad \text{(Luong)}

    and :math:`p(y_i) = \mathrm{softmax}(V o_i)`. The encoder is bidirectional. A linear layer maps its last states to
    the first states of the decoder. Without attention, each :math:`c_i` is the last state of the encoder, so that one
    vector has to represent the whole sequence.

    Args:
        num_source_tokens: The size of the source vocabulary.
        num_target_tokens: The size of the target vocabulary, V.
        embedding_channels: The number of channels of the embeddings. (default: `256`)
        hidden_channels: The number of channels of the decoder's state and of the memory, C, which must be even.
            (default: `256`)
        attention: `None`, `"dot"`, `"scaled_dot"`, `"general"`, `"additive"`, `"local-m"` (monotonic), `"local-p"`
            (predictive), `"hard"` (trained by REINFORCE), `"hard-st"` (trained by straight-through Gumbel-softmax), or
            a `gattn.nn.MemoryAttention` for queries and memories of C channels. Local and hard attention use the
            general score. (default: `"additive"`)
        form: The form, `"bahdanau"` or `"luong"`. (default: `None`, Bahdanau's for `"additive"`, Luong's otherwise)
        cell: The recurrent cell, `"gru"` or `"lstm"`. (default: `"gru"`)
        num_layers: The number of recurrent layers of the encoder, and of the decoder. (default: `1`)
        dropout: The probability of dropping a feature during training. (default: `0.0`)
        window: The half-width of the window of local attention; other attention does not use it. (default: `10`)
        scale: The factor of the scores of `"dot"`, `"general"`, local and hard attention; `None` means
            :math:`1 / \sqrt{C}`, as in `"scaled_dot"`. With Adam, the general score trains better with `None`; see
            `gattn.nn.GeneralAttention`. (default: `1.0`, as in Luong et al.)
        start: The token with which every target starts. (default: `1`)
        end: The token with which every target ends. (default: `2`)
        share_embeddings: Whether source and target share one vocabulary and one embedding. (default: `False`)
        tie_weights: Whether the output layer shares its weights with the target embedding. (default: `False`)

    Shapes:
        - **input:** source tokens `[B, S]`, target tokens `[B, T]`; **output:** logits `[B, T, V]`.

    Raises:
        ValueError: If an option is out of range, or options contradict each other.
        TypeError: If `attention` is not a name, a `MemoryAttention` or `None`.

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
        scale: float | None = 1.0,
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
            raise ValueError(f"form must be 'bahdanau' or 'luong'; got {form!r}.")
        if cell not in CELLS:
            raise ValueError(f"cell must be 'gru' or 'lstm'; got {cell!r}.")
        check_probability("dropout", dropout)
        for name, token in (("start", start), ("end", end)):
            if not 0 <= token < num_target_tokens:
                raise ValueError(f"{name} must be a target token, between 0 and {num_target_tokens - 1}; got {token}.")
        if share_embeddings and num_source_tokens != num_target_tokens:
            raise ValueError(
                "share_embeddings=True needs one vocabulary for source and target; got "
                f"{num_source_tokens} and {num_target_tokens} tokens."
            )
        if tie_weights and embedding_channels != hidden_channels:
            raise ValueError(
                "tie_weights=True needs as many embedding_channels as hidden_channels; got "
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
        layer = _make_attention(attention, channels, window, scale)
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
        self.attention = layer  # set after the reset, so that a layer that was passed in keeps its parameters

    def reset_parameters(self) -> None:
        """Resets all parameters: embeddings are normal with σ = 0.1, and everything else is as in PyTorch."""
        for module in self.modules():
            if isinstance(module, Embedding):
                torch.nn.init.normal_(module.weight, std=0.1)
            elif module is not self and module is not self.output and hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]
        torch.nn.init.zeros_(self.output.bias)
        if self.output.weight is not self.target_embedding.weight:
            torch.nn.init.xavier_uniform_(self.output.weight)

    def encode(self, source: Tensor, source_lengths: Tensor | None = None) -> tuple[Source, State]:
        """Encodes the source, and returns what the decoder attends to and its first state.

        Args:
            source: The source tokens, `[B, S]`.
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
        # The states of the two directions of each layer are concatenated.
        parts = [
            torch.unflatten(x, 0, (-1, 2)).transpose(1, 2).flatten(2)
            for x in (last if isinstance(last, tuple) else [last])
        ]
        summary = parts[0][-1]
        parts[0] = self.bridge(parts[0]).tanh()
        layers = tuple(tuple(part[layer] for part in parts) for layer in range(len(self.decoder)))
        prepared = None if self.attention is None else self.attention.prepare(self.dropout(memory), source_lengths)
        return Source(prepared, summary), State(layers, torch.zeros_like(summary), 0)

    def step(
        self, token: Tensor, source: Source, state: State, return_weights: bool = False
    ) -> tuple[Tensor, State, Alignment]:
        """Runs one step of the decoder.

        Args:
            token: The embedded token, `[B, embedding_channels]`.
            source: The source that `encode` returned.
            state: The state that `encode` or the last step returned.
            return_weights: Whether to return the attention weights as well. (default: `False`)

        Returns:
            The output :math:`o_i`, `[B, C]`, the new state, and the alignment: for hard attention a
            `gattn.nn.recurrent.hard_attention.Choice`, otherwise weights `[B, 1, S]` with `return_weights`, or `None`.
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

    def _recur(self, x: Tensor, layers: Layers) -> tuple[Tensor, Layers]:
        """Runs all recurrent layers for one step."""
        new = []
        for number, (cell, old) in enumerate(zip(self.decoder, layers, strict=True)):
            x = self.dropout(x) if number else x
            state = cell(x, old if len(old) > 1 else old[0])
            new.append(state if isinstance(state, tuple) else (state,))
            x = new[-1][0]
        return x, tuple(new)

    def _context(self, query: Tensor, source: Source, place: int, return_weights: bool) -> tuple[Tensor, Alignment]:
        """Returns the context of a query, and the alignment."""
        if self.attention is None or source.memory is None:
            return source.summary, None
        query = query.unsqueeze(1)
        alpha: Alignment = None
        if isinstance(self.attention, HardAttention):
            context, alpha = self.attention.choose(query, source.memory)
        elif return_weights:
            context, alpha = self.attention(query, source.memory, first=place, return_weights=True)
        else:
            context = self.attention(query, source.memory, first=place)
        return context.squeeze(1), alpha

    def _unroll(
        self, source: Tensor, target: Tensor, source_lengths: Tensor | None, return_weights: bool = False
    ) -> tuple[Tensor, list[Alignment]]:
        """Returns the outputs `[B, T, C]`, and the alignment of each step."""
        check_tokens("target tokens", target, self.num_target_tokens)
        if source.size(0) != target.size(0):
            raise ValueError(f"each source must have one target; got {source.size(0)} and {target.size(0)}.")
        read, state = self.encode(source, source_lengths)
        outputs: list[Tensor] = []
        alignments: list[Alignment] = []
        for token in self.dropout(self.target_embedding(shift(target, self.start))).unbind(1):
            out, state, alpha = self.step(token, read, state, return_weights)
            outputs.append(out)
            alignments.append(alpha)
        hidden = torch.stack(outputs, 1) if outputs else read.summary.new_zeros(*target.shape, read.summary.size(1))
        return self.dropout(hidden), alignments

    def forward(
        self, source: Tensor, target: Tensor, source_lengths: Tensor | None = None, *, return_weights: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Computes the logits of each target token given those before it, which a loss compares with `target` itself.

        Args:
            source: The source tokens, `[B, S]`.
            target: The target tokens, `[B, T]`, without the start token.
            source_lengths: The number of tokens in each source without padding, `[B]`. (default: `None`, all)
            return_weights: Whether to return the attention weights as well. (default: `False`)

        Returns:
            The logits `[B, T, V]`, and with `return_weights` the attention weights `[B, T, S]`.

        Raises:
            ValueError: If shapes or lengths do not fit each other, a source is empty, or there are no weights to
                return.
            IndexError: If a token is out of range.
        """
        if return_weights and self.attention is None:
            raise ValueError("a model without attention has no weights to return: use return_weights=False.")
        hidden, alignments = self._unroll(source, target, source_lengths, return_weights)
        logits: Tensor = self.output(hidden)
        if not return_weights:
            return logits
        if not alignments:
            return logits, logits.new_zeros(*target.shape, source.size(1))
        return logits, torch.cat([_weights(x) for x in alignments], 1)

    def loss(
        self,
        source: Tensor,
        target: Tensor,
        source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
        *,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Computes the loss for training: the cross entropy in nats per token.

        In training mode with hard attention that is trained by REINFORCE, a `gattn.nn.ReinforceLoss` is added. The
        reward of a choice is the log-probability of the token for which it was made; its effect on later tokens is
        ignored.

        Args:
            source: The source tokens, `[B, S]`.
            target: `[B, T]`, without the start token, and with the end token.
            source_lengths: The number of tokens in each source without padding, `[B]`. (default: `None`, all)
            target_lengths: The number of tokens in each target, including the end token, without padding, `[B]`.
                (default: `None`, all)
            label_smoothing: The share of the target distribution that is spread evenly over all tokens. (default:
                `0.0`)

        Raises:
            ValueError: If shapes or lengths do not fit each other, or a source is empty.
            IndexError: If a token is out of range.
        """
        hidden, alignments = self._unroll(source, target, source_lengths)
        real = torch.ones_like(target, dtype=torch.bool)
        if target_lengths is not None:
            _check_lengths("target", target_lengths, target)
            real = torch.arange(target.size(1), device=target.device) < target_lengths.unsqueeze(1)
        logits, expected = self.output(hidden[real]), target[real].long()
        loss = F.cross_entropy(logits, expected, label_smoothing=label_smoothing)
        if self.reinforce is not None and self.training and alignments:
            reward = -F.cross_entropy(logits.detach(), expected, reduction="none")
            choices = [choice for choice in alignments if isinstance(choice, Choice)]
            log_prob = torch.cat([choice.log_prob for choice in choices], 1)[real]
            entropy = torch.cat([choice.entropy for choice in choices], 1)[real]
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
        """Generates targets by greedy search (`beams=1`) or beam search; see `gattn.models.decoding.beam_search`.

        Args:
            source: The source tokens, `[B, S]`.
            source_lengths: The number of tokens in each source without padding, `[B]`. (default: `None`, all)
            max_length: The largest number of tokens of a target, including its end token. (default: `64`)
            beams: The number of hypotheses that beam search follows; 1 is greedy search. (default: `1`)
            length_penalty: The exponent α of the length by which scores are divided. (default: `1.0`)

        Returns:
            The target tokens, `[B, T]`, without the start token. A target that is shorter than others is padded with
            `end`.
        """
        read, state = self.encode(source, source_lengths)
        if beams > 1:
            read = read.repeat(beams)
            state = state.take(torch.arange(source.size(0), device=source.device).repeat_interleave(beams))

        def step(tokens: Tensor) -> Tensor:
            nonlocal state
            out, state, _ = self.step(self.dropout(self.target_embedding(tokens[:, -1])), read, state)
            logits: Tensor = self.output(self.dropout(out))
            return logits

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


def _weights(alignment: Alignment) -> Tensor:
    """The weights `[B, 1, S]` of an alignment that is known."""
    if isinstance(alignment, Choice):
        return alignment.weights
    assert alignment is not None
    return alignment


def _make_attention(
    attention: str | MemoryAttention | None, channels: int, window: float, scale: float | None
) -> MemoryAttention | None:
    if scale != 1.0 and (not isinstance(attention, str) or attention in ("scaled_dot", "additive")):
        raise ValueError(
            "scale applies to 'dot', 'general', and local and hard attention by name; leave it at 1 for all others."
        )
    if attention is None or isinstance(attention, MemoryAttention):
        return attention
    if not isinstance(attention, str):
        raise TypeError(
            f"attention must be a name, a gattn.nn.MemoryAttention or None; got {type(attention).__name__}."
        )
    general = GeneralAttention(channels, channels, scale=scale)
    made: dict[str, MemoryAttention] = {
        "dot": DotProductAttention(scale),
        "scaled_dot": DotProductAttention(),
        "general": general,
        "additive": AdditiveAttention(channels, channels),
        "local-m": LocalAttention(general, window),
        "local-p": LocalAttention(general, window, alignment="predictive", query_channels=channels),
        # As in the paper, half of the choices are replaced by their expectation.
        "hard": HardAttention(general, expected=0.5),
        "hard-st": HardAttention(general, estimator="straight_through"),
    }
    if attention not in made:
        raise ValueError(
            f"attention must be None, one of {', '.join(map(repr, ATTENTIONS))}, or a layer; got {attention!r}."
        )
    return made[attention]


def _check_options(
    num_source_tokens: int, num_target_tokens: int, embedding_channels: int, hidden_channels: int, num_layers: int
) -> None:
    check_at_least(1, num_source_tokens=num_source_tokens, num_target_tokens=num_target_tokens)
    check_at_least(1, embedding_channels=embedding_channels, hidden_channels=hidden_channels, num_layers=num_layers)
    if hidden_channels % 2:
        raise ValueError(
            f"hidden_channels must be even, as each direction of the encoder has half; got {hidden_channels}."
        )


def _check_source(source: Tensor, lengths: Tensor | None, num_tokens: int) -> Tensor | None:
    """Checks the source, and returns its lengths on the CPU, or `None` if there is no padding."""
    check_tokens("source tokens", source, num_tokens)
    if source.size(1) == 0:
        raise ValueError("every source must have at least one token, such as its end; these have none.")
    if lengths is None:
        return None
    _check_lengths("source", lengths, source)
    return lengths.cpu() if lengths.numel() else None


def _check_lengths(name: str, lengths: Tensor, tokens: Tensor) -> None:
    if lengths.shape != tokens.shape[:1] or lengths.is_floating_point():
        raise ValueError(
            f"{name} lengths must be one integer for each {name}, [{tokens.size(0)}]; got {lengths.dtype} of shape "
            f"{list(lengths.shape)}."
        )
    if lengths.numel() and not 1 <= int(lengths.min()) <= int(lengths.max()) <= tokens.size(1):
        raise ValueError(f"{name} lengths must lie between 1 and {tokens.size(1)}; got {lengths.tolist()}.")
