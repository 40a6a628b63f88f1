"""Transformers as whole models: a language model, and encoder and decoder for sequence to sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Dropout, Embedding, LayerNorm, Linear, Module

from gattn.graphs import CompleteGraph
from gattn.models.decoding import beam_search, sample
from gattn.models.tokens import check_tokens, shift
from gattn.nn.multihead_attention import KeyValueCache
from gattn.nn.positional import (
    ALiBi,
    LearnedPositionalEncoding,
    RotaryPositionalEncoding,
    SinusoidalPositionalEncoding,
)
from gattn.nn.transformer_layers import (
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

_POSITIONS = ("learned", "sinusoidal", "rotary", "alibi")


class _Embedding(Module):
    """Tokens, and their places where those are added."""

    def __init__(self, num_tokens: int, channels: int, position: str, max_length: int, scale: float, dropout: float):
        super().__init__()
        self.tokens = Embedding(num_tokens, channels)
        self.scale = scale
        self.position: Module | None = None
        if position == "learned":
            self.position = LearnedPositionalEncoding(max_length, channels)
        elif position == "sinusoidal":
            self.position = SinusoidalPositionalEncoding(channels)
        self.dropout = Dropout(dropout)

    def forward(self, tokens: Tensor, first: int = 0) -> Tensor:
        x = self.tokens(tokens) * self.scale
        return self.dropout(x if self.position is None else self.position(x, first))


def _inner_position(position: str, channels: int, heads: int) -> Module | None:
    if position not in _POSITIONS:
        raise ValueError(f"position is one of {', '.join(map(repr, _POSITIONS))}, not {position!r}.")
    if position == "rotary":
        return RotaryPositionalEncoding(channels // heads)
    return ALiBi(heads) if position == "alibi" else None


class TransformerLM(Module):
    r"""A decoder-only language model: causal attention, pre-norm, as in GPT-2.

    See `Language Models are Unsupervised Multitask Learners
    <https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf>`_.

    .. math::
        p(t_{i+1} \mid t_1, \ldots, t_i) = \mathrm{softmax}(W \, \mathrm{norm}(x_i))

    Args:
        num_tokens: Size of the vocabulary, V.
        channels: Channels of the model, E. (default: `128`)
        num_layers: Number of layers. (default: `4`)
        heads: Number of heads. (default: `4`)
        context: The longest sequence. (default: `64`)
        feedforward: Channels of the hidden layers. (default: `None`, 4 E)
        dropout: Probability that an attention weight or feature is dropped, in training. (default: `0.0`)
        position: `"learned"`, `"sinusoidal"`, `"rotary"` or `"alibi"`. (default: `"learned"`)
        bias: Whether linear layers and norms have a bias. (default: `False`)
        tie_weights: Whether the output layer is the embedding's transpose. (default: `True`)
        layer: Makes a layer: gattn's, or another with the same arguments. (default: `gattn.nn.TransformerEncoderLayer`)

    Shapes:
        - **input:** tokens `[B, T]`; **output:** logits of each next token, `[B, T, V]`.

    Raises:
        ValueError: If an option is out of range.

    Example:
        >>> import torch, gattn
        >>> model = gattn.models.TransformerLM(num_tokens=65, channels=32, num_layers=2).eval()
        >>> model(torch.zeros(1, 5, dtype=torch.int64)).shape
        torch.Size([1, 5, 65])
        >>> model.generate(torch.zeros(1, 1, dtype=torch.int64), num_new_tokens=10).shape
        torch.Size([1, 11])
    """

    def __init__(
        self,
        num_tokens: int,
        channels: int = 128,
        num_layers: int = 4,
        heads: int = 4,
        context: int = 64,
        *,
        feedforward: int | None = None,
        dropout: float = 0.0,
        position: str = "learned",
        bias: bool = False,
        tie_weights: bool = True,
        layer: Callable[..., Module] = TransformerEncoderLayer,
    ):
        super().__init__()
        if min(num_tokens, num_layers, context) < 1:
            raise ValueError("num_tokens, num_layers and context must be at least 1.")
        self.num_tokens = num_tokens
        self.context = context
        inner = _inner_position(position, channels, heads)
        options: dict[str, Any] = {} if inner is None else {"position": inner}
        self.embedding = _Embedding(num_tokens, channels, position, context, 1.0, dropout)
        self.layers = torch.nn.ModuleList(
            layer(
                channels,
                heads,
                4 * channels if feedforward is None else feedforward,
                dropout=dropout,
                activation="gelu",
                batch_first=True,
                norm_first=True,
                bias=bias,
                **options,
            )
            for _ in range(num_layers)
        )
        self.norm = LayerNorm(channels, bias=bias)
        self.output = Linear(channels, num_tokens, bias=False)
        if tie_weights:
            self.output.weight = self.embedding.tokens.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all parameters as GPT-2 does: σ = 0.02, less for what is added to the residual stream."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                ends_branch = name.endswith(("out_proj.weight", "linear2.weight"))
                std = 0.02 / (2 * len(self.layers)) ** 0.5 if ends_branch else 0.02
                torch.nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                torch.nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Logits of each next token.

        Args:
            tokens: `[B, T]`; with a cache, the new ones only.
            cache: Keys and values of earlier tokens. (default: `None`)

        Raises:
            ValueError: If the sequence is longer than `context`, or tokens are no integers `[B, T]`.
            IndexError: If a token is out of range.
        """
        check_tokens("tokens", tokens, self.num_tokens)
        first = 0 if cache is None else len(cache)
        if first + tokens.size(1) > self.context:
            raise ValueError(
                f"the model was made for {self.context} tokens, and these are {first + tokens.size(1)}: make it with a "
                "larger context, or pass the last ones only."
            )
        x = self.embedding(tokens, first)
        mask = None
        if not isinstance(self.layers[0], TransformerEncoderLayer):  # PyTorch's layers want both
            mask = torch.ones(tokens.size(1), tokens.size(1), dtype=torch.bool, device=tokens.device).triu(1)
        for layer in self.layers:
            options = {} if cache is None else {"cache": cache}
            x = layer(x, src_mask=mask, is_causal=True, **options)
        return self.output(self.norm(x))

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        num_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        use_cache: bool = True,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Goes on with a text, token by token.

        Past `context`, each token sees the last `context` ones, which are computed anew.

        Args:
            tokens: `[B, T]`, T at least 1.
            num_new_tokens: How many are added.
            temperature: See `gattn.models.decoding.sample`. (default: `1.0`)
            top_k: Likewise. (default: `None`)
            top_p: Likewise. (default: `None`)
            use_cache: Whether keys and values are kept; the tokens are the same without. (default: `True`)
            generator: Random numbers come from it. (default: `None`, PyTorch's own)

        Returns:
            `[B, T + num_new_tokens]`.

        Raises:
            ValueError: If there is no token to begin with, or an option is out of range.
        """
        if tokens.size(1) < 1:
            raise ValueError("generate() needs at least one token to begin with.")
        if num_new_tokens < 0:
            raise ValueError(f"num_new_tokens is at least 0; got {num_new_tokens}.")
        use_cache = use_cache and isinstance(self.layers[0], TransformerEncoderLayer)
        cache = KeyValueCache() if use_cache else None
        for _ in range(num_new_tokens):
            if cache is not None and tokens.size(1) <= self.context:
                logits = self(tokens[:, len(cache) :], cache)
            else:
                logits = self(tokens[:, -self.context :])
            token = sample(logits[:, -1], temperature, top_k, top_p, generator)
            tokens = torch.cat([tokens, token.unsqueeze(1)], 1)
        return tokens


class TransformerSeq2Seq(Module):
    r"""Encoder and decoder, of `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_, from tokens to tokens.

    .. math::
        p(y_i \mid y_1, \ldots, y_{i-1}, x) = \mathrm{softmax}(W \, \mathrm{decoder}(y_{<i}, \mathrm{encoder}(x)))

    Args:
        num_source_tokens: Size of the source vocabulary.
        num_target_tokens: Size of the target vocabulary, V.
        channels: Channels of the model, E. (default: `256`)
        num_layers: Layers of encoder and decoder each. (default: `3`)
        heads: Number of heads. (default: `8`)
        feedforward: Channels of the hidden layers. (default: `None`, 4 E)
        dropout: Probability that an attention weight or feature is dropped, in training. (default: `0.1`)
        position: `"sinusoidal"`, `"learned"`, `"rotary"` or `"alibi"`. (default: `"sinusoidal"`)
        max_length: The longest sequence, for learnt positions. (default: `512`)
        norm_first: Whether norms come first (pre-norm). (default: `True`)
        start: The token that a target begins with. (default: `1`)
        end: The token that ends it. (default: `2`)
        share_embeddings: Whether source and target have one vocabulary and one embedding. (default: `False`)
        tie_weights: Whether the output layer is the target embedding's transpose. (default: `True`)

    Shapes:
        - **input:** source tokens `[B, S]`, target tokens `[B, T]`; **output:** logits `[B, T, V]`.

    Raises:
        ValueError: If an option is out of range.

    Example:
        >>> import torch, gattn
        >>> model = gattn.models.TransformerSeq2Seq(20, 20, channels=32, num_layers=1, heads=4).eval()
        >>> source, lengths = torch.randint(3, 20, (2, 7)), torch.tensor([7, 4])
        >>> model(source, torch.randint(3, 20, (2, 5)), source_lengths=lengths).shape
        torch.Size([2, 5, 20])
        >>> model.generate(source, lengths, max_length=6, beams=2).size(0)
        2
    """

    def __init__(
        self,
        num_source_tokens: int,
        num_target_tokens: int,
        channels: int = 256,
        num_layers: int = 3,
        heads: int = 8,
        *,
        feedforward: int | None = None,
        dropout: float = 0.1,
        position: str = "sinusoidal",
        max_length: int = 512,
        norm_first: bool = True,
        start: int = 1,
        end: int = 2,
        share_embeddings: bool = False,
        tie_weights: bool = True,
    ):
        super().__init__()
        if share_embeddings and num_source_tokens != num_target_tokens:
            raise ValueError(
                f"one embedding for both needs one vocabulary; got {num_source_tokens} and {num_target_tokens} tokens."
            )
        for name, token in (("start", start), ("end", end)):
            if not 0 <= token < num_target_tokens:
                raise ValueError(f"{name} is a target token, between 0 and {num_target_tokens - 1}; got {token}.")
        self.num_source_tokens = num_source_tokens
        self.num_target_tokens = num_target_tokens
        self.start = start
        self.end = end
        inner = _inner_position(position, channels, heads)
        options: dict[str, Any] = {
            "dim_feedforward": 4 * channels if feedforward is None else feedforward,
            "dropout": dropout,
            "batch_first": True,
            "norm_first": norm_first,
            "position": inner,
        }
        scale = channels**0.5
        self.source_embedding = _Embedding(num_source_tokens, channels, position, max_length, scale, dropout)
        self.target_embedding = _Embedding(num_target_tokens, channels, position, max_length, scale, dropout)
        norms = [LayerNorm(channels) if norm_first else None for _ in range(2)]
        self.encoder = TransformerEncoder(TransformerEncoderLayer(channels, heads, **options), num_layers, norms[0])
        self.decoder = TransformerDecoder(TransformerDecoderLayer(channels, heads, **options), num_layers, norms[1])
        self.output = Linear(channels, num_target_tokens)
        if share_embeddings:
            self.source_embedding.tokens = self.target_embedding.tokens
        if tie_weights:
            self.output.weight = self.target_embedding.tokens.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all parameters anew: matrices after Glorot, embeddings with σ = 1/√E."""
        for name, parameter in self.named_parameters():
            if "embedding" in name and name.endswith("tokens.weight"):
                torch.nn.init.normal_(parameter, std=parameter.size(1) ** -0.5)
            elif parameter.dim() > 1:
                torch.nn.init.xavier_uniform_(parameter)
            elif name.endswith("bias"):
                torch.nn.init.zeros_(parameter)

    def encode(self, source: Tensor, source_lengths: Tensor | None = None) -> Tensor:
        """The encoder's output, `[B, S, E]`; padding's is zero attention and of no use.

        Args:
            source: `[B, S]`.
            source_lengths: How many tokens of each source are real, `[B]`. (default: `None`, all)

        Raises:
            ValueError: If lengths do not fit.
            IndexError: If a token is out of range.
        """
        check_tokens("source tokens", source, self.num_source_tokens)
        graph = CompleteGraph(source.size(1), source_lengths=source_lengths, target_lengths=source_lengths)
        return self.encoder(self.source_embedding(source), graph=graph)

    def decode(
        self,
        tokens: Tensor,
        memory: Tensor,
        source_lengths: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Logits of the token after each of `tokens`.

        Args:
            tokens: `[B, T]`, the first of them `start`; with a cache, the new ones only.
            memory: `[B, S, E]`, from `encode`.
            source_lengths: As in `encode`. (default: `None`)
            cache: Keys and values of earlier tokens, and of the memory. (default: `None`)
        """
        first = 0 if cache is None else cache.length(self.decoder.layers[0].self_attn)
        graph = CompleteGraph(tokens.size(1), memory.size(1), source_lengths=source_lengths)
        x = self.target_embedding(tokens, first)
        x = self.decoder(x, memory, tgt_is_causal=True, memory_graph=graph, cache=cache)
        return self.output(x)

    def forward(self, source: Tensor, target: Tensor, source_lengths: Tensor | None = None) -> Tensor:
        """Logits of each target token, given those before it: what a loss compares with `target` itself.

        Args:
            source: `[B, S]`.
            target: `[B, T]`, without the start token.
            source_lengths: How many tokens of each source are real, `[B]`. (default: `None`, all)

        Raises:
            ValueError: If shapes or lengths do not fit.
            IndexError: If a token is out of range.
        """
        check_tokens("target tokens", target, self.num_target_tokens)
        if source.size(0) != target.size(0):
            raise ValueError(f"each source has one target; got {source.size(0)} and {target.size(0)}.")
        return self.decode(shift(target, self.start), self.encode(source, source_lengths), source_lengths)

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
        memory = self.encode(source, source_lengths).repeat_interleave(beams, 0)
        lengths = None if source_lengths is None else source_lengths.repeat_interleave(beams, 0)
        cache = KeyValueCache()

        def step(tokens: Tensor) -> Tensor:
            return self.decode(tokens[:, -1:], memory, lengths, cache)[:, -1]

        found, _ = beam_search(
            step,
            source.size(0),
            self.start,
            self.end,
            max_length,
            beams,
            length_penalty,
            reorder=cache.reorder,
            device=source.device,
        )
        return found
