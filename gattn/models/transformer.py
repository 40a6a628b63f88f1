"""Transformers as whole models: a language model, and an encoder and decoder for sequence to sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding, LayerNorm, Linear, Module

from gattn.errors import check_at_least
from gattn.graphs import CompleteGraph
from gattn.models.decoding import beam_search, sample
from gattn.models.tokens import check_tokens, shift
from gattn.nn.shared.dropout import Dropout
from gattn.nn.transformers.key_value_cache import KeyValueCache
from gattn.nn.transformers.positional import (
    ALiBi,
    LearnedPositionalEncoding,
    RotaryPositionalEncoding,
    SinusoidalPositionalEncoding,
)
from gattn.nn.transformers.transformer_layers import (
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

__all__ = ["TransformerLM", "TransformerSeq2Seq"]

_POSITIONS = ("learned", "sinusoidal", "rotary", "alibi")


class _Embedding(Module):
    """Embeds tokens, and adds their positions if these are not part of attention."""

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
        out: Tensor = self.dropout(x if self.position is None else self.position(x, first))
        return out


def _inner_position(position: str, channels: int, heads: int) -> Module | None:
    if position not in _POSITIONS:
        raise ValueError(f"position must be one of {', '.join(map(repr, _POSITIONS))}; got {position!r}.")
    if position == "rotary":
        return RotaryPositionalEncoding(channels // heads)
    return ALiBi(heads) if position == "alibi" else None


class TransformerLM(Module):
    r"""A language model that consists of a decoder with causal attention and pre-norm, as in GPT-2.

    See `Language Models are Unsupervised Multitask Learners
    <https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf>`_.

    .. math::
        p(t_{i+1} \mid t_1, \ldots, t_i) = \mathrm{softmax}(W \, \mathrm{norm}(x_i))

    Args:
        num_tokens: The size of the vocabulary, V.
        channels: The number of channels of the model, E. (default: `128`)
        num_layers: The number of layers. (default: `4`)
        heads: The number of heads. (default: `4`)
        context: The length of the longest sequence. (default: `64`)
        feedforward: The number of channels of the hidden layers. (default: `None`, 4 E)
        dropout: The probability of dropping an attention weight or a feature during training. (default: `0.0`)
        position: The positional encoding, `"learned"`, `"sinusoidal"`, `"rotary"` or `"alibi"`. (default: `"learned"`)
        bias: Whether linear layers and norms have a bias. (default: `False`)
        tie_weights: Whether the output layer shares its weights with the embedding. (default: `True`)
        window: The number of earlier tokens to which each token attends besides itself in each layer, as in `Longformer
            <https://arxiv.org/abs/2004.05150>`_. Attention then takes time in proportion to T · window, and
            `generate` keeps that many keys and values. (default: `None`, all)
        layer: The class of the layers, or a function with the same arguments that makes one. (default:
            `gattn.nn.TransformerEncoderLayer`)

    Shapes:
        - **input:** tokens `[B, T]`; **output:** logits of the next tokens, `[B, T, V]`.

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
        window: int | None = None,
        layer: Callable[..., Module] = TransformerEncoderLayer,
    ):
        super().__init__()
        check_at_least(1, num_tokens=num_tokens, channels=channels, num_layers=num_layers, heads=heads, context=context)
        if window is not None:
            check_at_least(0, window=window)
        self.num_tokens = num_tokens
        self.context = context
        self.window = window
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
        """Resets all parameters as in GPT-2: σ = 0.02, or less for what is added to the residual stream."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                ends_branch = name.endswith(("out_proj.weight", "linear2.weight"))
                std = 0.02 / (2 * len(self.layers)) ** 0.5 if ends_branch else 0.02
                torch.nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                torch.nn.init.zeros_(parameter)
            else:  # of a norm
                torch.nn.init.ones_(parameter)

    def forward(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Computes the logits of each next token.

        Args:
            tokens: The tokens, `[B, T]`; with a cache, only the new ones.
            cache: The keys and values of earlier tokens, whose window, if it has one, must be that of the model or
                larger. (default: `None`)

        Raises:
            ValueError: If the sequence is longer than `context`, the cache keeps too few tokens, or tokens are not
                integers `[B, T]`.
            IndexError: If a token is out of range.
        """
        check_tokens("tokens", tokens, self.num_tokens)
        first = 0 if cache is None else len(cache)
        if first + tokens.size(1) > self.context:
            raise ValueError(
                f"the model was made for {self.context} tokens, but there are {first + tokens.size(1)}: make it with a "
                "larger context, or pass only the last tokens."
            )
        if cache is not None and cache.window is not None and (self.window is None or cache.window < self.window):
            raise ValueError(
                f"the cache keeps {cache.window} earlier tokens, but this model attends to "
                f"{'all' if self.window is None else self.window} of them."
            )
        x = self.embedding(tokens, first)
        options: dict[str, Any] = {"src_mask": None, "is_causal": True}
        if not isinstance(self.layers[0], TransformerEncoderLayer):  # PyTorch's layers need both
            pairs = torch.ones(tokens.size(1), tokens.size(1), dtype=torch.bool, device=tokens.device)
            hidden = pairs.triu(1) if self.window is None else pairs.triu(1) | pairs.tril(-self.window - 1)
            options = {"src_mask": hidden, "is_causal": self.window is None}
        elif self.window is not None:
            earlier = 0 if cache is None else cache.num_visible(self.layers[0].self_attn)
            sizes = tokens.size(1), earlier + tokens.size(1)
            options["graph"] = CompleteGraph(*sizes, causal=True, window=(self.window, 0))
        if cache is not None:
            options["cache"] = cache
        for layer in self.layers:
            x = layer(x, **options)
        logits: Tensor = self.output(self.norm(x))
        return logits

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
        """Continues a text token by token; see `gattn.models.decoding.sample`.

        Beyond `context` tokens, each token attends to the last `context` tokens, which are then computed again.

        Args:
            tokens: The first tokens, `[B, T]`, with T at least 1.
            num_new_tokens: The number of tokens to add.
            temperature: The logits are divided by it. Zero selects the most probable token. (default: `1.0`)
            top_k: Samples from this many of the most probable tokens only. (default: `None`, all)
            top_p: Samples only from the smallest set of tokens whose probabilities sum to at least this.
                (default: `None`, all)
            use_cache: Whether to keep keys and values, which does not change the tokens. (default: `True`)
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
        use_cache = use_cache and isinstance(self.layers[0], TransformerEncoderLayer)
        cache = KeyValueCache(self.window) if use_cache else None
        for _ in range(num_new_tokens):
            if cache is not None and tokens.size(1) <= self.context:
                logits = self(tokens[:, len(cache) :], cache)
            else:
                logits = self(tokens[:, -self.context :])
            token = sample(logits[:, -1], temperature, top_k, top_p, generator)
            tokens = torch.cat([tokens, token.unsqueeze(1)], 1)
        return tokens


class TransformerSeq2Seq(Module):
    r"""A Transformer from tokens to tokens, as in `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_.

    .. math::
        p(y_i \mid y_1, \ldots, y_{i-1}, x) = \mathrm{softmax}(W \, \mathrm{decoder}(y_{<i}, \mathrm{encoder}(x)))

    Args:
        num_source_tokens: The size of the source vocabulary.
        num_target_tokens: The size of the target vocabulary, V.
        channels: The number of channels of the model, E. (default: `256`)
        num_layers: The number of layers of the encoder, and of the decoder. (default: `3`)
        heads: The number of heads. (default: `8`)
        feedforward: The number of channels of the hidden layers. (default: `None`, 4 E)
        dropout: The probability of dropping an attention weight or a feature during training. (default: `0.1`)
        position: The positional encoding, `"sinusoidal"`, `"learned"`, `"rotary"` or `"alibi"`. (default:
            `"sinusoidal"`)
        max_length: The length of the longest sequence, for learnt positions. (default: `512`)
        norm_first: Whether to apply the norms before attention and feed-forward network (pre-norm) instead of after.
            (default: `True`)
        start: The token with which every target starts. (default: `1`)
        end: The token with which every target ends. (default: `2`)
        share_embeddings: Whether source and target share one vocabulary and one embedding. (default: `False`)
        tie_weights: Whether the output layer shares its weights with the target embedding. (default: `True`)

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
                "share_embeddings=True needs one vocabulary for source and target; got "
                f"{num_source_tokens} and {num_target_tokens} tokens."
            )
        for name, token in (("start", start), ("end", end)):
            if not 0 <= token < num_target_tokens:
                raise ValueError(f"{name} must be a target token, between 0 and {num_target_tokens - 1}; got {token}.")
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
        """Resets all parameters: matrices as in Glorot and Bengio, embeddings with σ = 1/√E."""
        for name, parameter in self.named_parameters():
            if "embedding" in name and name.endswith("tokens.weight"):
                torch.nn.init.normal_(parameter, std=parameter.size(1) ** -0.5)
            elif parameter.dim() > 1:
                torch.nn.init.xavier_uniform_(parameter)
            elif name.endswith("bias"):
                torch.nn.init.zeros_(parameter)
            else:  # of a norm
                torch.nn.init.ones_(parameter)

    def encode(self, source: Tensor, source_lengths: Tensor | None = None) -> Tensor:
        """Returns the output of the encoder, `[B, S, E]`. That of padding has no meaning.

        Args:
            source: The source tokens, `[B, S]`.
            source_lengths: The number of tokens in each source without padding, `[B]`. (default: `None`, all)

        Raises:
            ValueError: If lengths do not fit.
            IndexError: If a token is out of range.
        """
        check_tokens("source tokens", source, self.num_source_tokens)
        graph = CompleteGraph(source.size(1), source_lengths=source_lengths, target_lengths=source_lengths)
        memory: Tensor = self.encoder(self.source_embedding(source), graph=graph)
        return memory

    def decode(
        self,
        tokens: Tensor,
        memory: Tensor,
        source_lengths: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Computes the logits of the token after each of `tokens`, `[B, T, V]`.

        Args:
            tokens: The tokens, `[B, T]`, of which the first is `start`; with a cache, only the new ones.
            memory: The output of `encode`, `[B, S, E]`.
            source_lengths: The number of tokens in each source without padding, `[B]`. (default: `None`, all)
            cache: The keys and values of earlier tokens and of the memory. (default: `None`)
        """
        first = 0 if cache is None else cache.length(self.decoder.layers[0].self_attn)
        graph = CompleteGraph(tokens.size(1), memory.size(1), source_lengths=source_lengths)
        x = self.target_embedding(tokens, first)
        x = self.decoder(x, memory, tgt_is_causal=True, memory_graph=graph, cache=cache)
        logits: Tensor = self.output(x)
        return logits

    def forward(self, source: Tensor, target: Tensor, source_lengths: Tensor | None = None) -> Tensor:
        """Computes the logits of each target token given those before it, which a loss compares with `target` itself.

        Args:
            source: The source tokens, `[B, S]`.
            target: The target tokens, `[B, T]`, without the start token.
            source_lengths: The number of tokens in each source without padding, `[B]`. (default: `None`, all)

        Raises:
            ValueError: If shapes or lengths do not fit each other.
            IndexError: If a token is out of range.
        """
        check_tokens("target tokens", target, self.num_target_tokens)
        if source.size(0) != target.size(0):
            raise ValueError(f"each source must have one target; got {source.size(0)} and {target.size(0)}.")
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
