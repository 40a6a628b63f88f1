"""Hierarchical attention: words make sentences, sentences make documents, twice by the same parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import GRU, Dropout, Embedding, Linear, Module
from torch.nn.utils.rnn import pack_padded_sequence

from gattn.models.tokens import check_tokens
from gattn.nn.pooling import AttentionPooling


class HAN(Module):
    r"""A hierarchical attention network, which classifies documents.

    The model of `Hierarchical Attention Networks for Document Classification <https://aclanthology.org/N16-1174>`_: a
    GRU reads the words of each sentence in both directions, attention makes one vector of them, and the same again
    with the sentences of each document:

    .. math::
        s_i = \mathrm{pool}(\mathrm{GRU}(w_{i1}, w_{i2}, \ldots)), \qquad
        d = \mathrm{pool}(\mathrm{GRU}(s_1, s_2, \ldots)), \qquad
        \mathrm{logits} = W d + b

    where pool is an `AttentionPooling`. Padding is left out throughout, whatever it holds.

    Args:
        num_tokens: Size of the vocabulary, V.
        num_classes: Number of classes, K.
        embedding_channels: Channels of the embedded words. (default: `200`)
        hidden_channels: Channels of the GRUs, for each direction. (default: `50`)
        attention_channels: Channels that the queries of the attention have. (default: `100`)
        dropout: Probability that a channel of a word, a sentence or a document is dropped, in training.
            (default: `0.0`)

    Shapes:
        - **input:** tokens `[B, S, W]`, the number of words in each sentence `[B, S]`.
        - **output:** logits `[B, K]`.

    Raises:
        ValueError: If an option is out of range.

    Example:
        >>> import torch, gattn
        >>> model = gattn.models.HAN(num_tokens=30, num_classes=5)
        >>> tokens = torch.randint(30, (2, 3, 7))  # 2 documents of up to 3 sentences of up to 7 words
        >>> model(tokens, torch.tensor([[7, 4, 5], [6, 2, 0]])).shape
        torch.Size([2, 5])
    """

    def __init__(
        self,
        num_tokens: int,
        num_classes: int,
        embedding_channels: int = 200,
        hidden_channels: int = 50,
        attention_channels: int = 100,
        *,
        dropout: float = 0.0,
    ):
        super().__init__()
        if min(num_tokens, num_classes, embedding_channels, hidden_channels) < 1:
            raise ValueError("num_tokens, num_classes and the numbers of channels must be at least 1.")
        self.num_tokens = num_tokens
        self.embedding = Embedding(num_tokens, embedding_channels)
        self.words = _Encoder(embedding_channels, hidden_channels, attention_channels)
        self.sentences = _Encoder(2 * hidden_channels, hidden_channels, attention_channels)
        self.output = Linear(2 * hidden_channels, num_classes)
        self.dropout = Dropout(dropout)

    def reset_parameters(self) -> None:
        """Draws all parameters anew."""
        for part in (self.embedding, self.words, self.sentences, self.output):
            part.reset_parameters()

    def forward(self, tokens: Tensor, word_lengths: Tensor | None = None, return_weights: bool = False) -> Any:
        """Classifies documents.

        Args:
            tokens: `[B, S, W]`.
            word_lengths: How many words of each sentence are real, `[B, S]`: 0 for the sentences that are not there,
                which come after all others. A document without sentences has the zero vector, so its logits are the
                classifier's bias. (default: `None`, all words)
            return_weights: Whether attention weights are returned too. (default: `False`)

        Returns:
            Logits `[B, K]`. With `return_weights` a triple: also the weights of the words in their sentences,
            `[B, S, W]`, and of the sentences, `[B, S]`, zero for padding.

        Raises:
            ValueError: If shapes or lengths do not fit.
            IndexError: If a token is out of range.
            TypeError: If `word_lengths` is no tensor.
        """
        if tokens.dim() != 3:
            raise ValueError(f"tokens are documents of sentences of words, [B, S, W]; got {list(tokens.shape)}.")
        num_words = tokens.size(2)
        if word_lengths is None:
            word_lengths = tokens.new_full(tokens.shape[:2], num_words, dtype=torch.int64)
        _check_lengths(word_lengths, tokens)
        word_lengths = word_lengths.to(tokens.device)
        is_sentence = word_lengths > 0
        is_word = torch.arange(num_words, device=tokens.device) < word_lengths.unsqueeze(-1)
        check_tokens("tokens", tokens.masked_fill(~is_word, 0), self.num_tokens, "[B, S, W]")
        words = self.dropout(self.embedding(tokens[is_word]))
        sentences, word_weights = self.words(words, word_lengths[is_sentence])
        documents, sentence_weights = self.sentences(self.dropout(sentences), is_sentence.sum(1))
        logits = self.output(self.dropout(documents))
        if not return_weights:
            return logits
        return logits, _spread(word_weights, is_word), _spread(sentence_weights, is_sentence)


class _Encoder(Module):
    """One vector for each sequence: a GRU in both directions, then attention over its states."""

    def __init__(self, in_channels: int, hidden_channels: int, attention_channels: int):
        super().__init__()
        self.gru = GRU(in_channels, hidden_channels, bidirectional=True)
        self.pool = AttentionPooling(2 * hidden_channels, attention_channels)

    def reset_parameters(self) -> None:
        self.gru.reset_parameters()
        self.pool.reset_parameters()

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors `[B, C]` of B sequences that lie end to end in `x`, and the weight of each element."""
        ptr = F.pad(lengths.cumsum(0), (1, 0))
        return self.pool(self._states(x, lengths, ptr), ptr=ptr, return_weights=True)

    def _states(self, x: Tensor, lengths: Tensor, ptr: Tensor) -> Tensor:
        full = lengths.nonzero().squeeze(1)  # a GRU takes no empty sequence
        if full.numel() == 0:
            return x.new_zeros(0, self.pool.in_channels)
        # The GRU reads first elements first, then second ones, and so on: the same is done with their places.
        places = ptr[full].unsqueeze(1) + torch.arange(int(lengths.max()), device=x.device)
        order = pack_padded_sequence(places, lengths[full].cpu(), batch_first=True, enforce_sorted=False)
        states, _ = self.gru(order._replace(data=x[order.data]))
        return states.data[order.data.argsort()]


def _check_lengths(word_lengths: Tensor, tokens: Tensor) -> None:
    if not isinstance(word_lengths, Tensor):
        raise TypeError(f"word_lengths must be a tensor; got {type(word_lengths).__name__}.")
    shape, num_words = tokens.shape[:2], tokens.size(2)
    if word_lengths.shape != shape or word_lengths.is_floating_point() or word_lengths.dtype == torch.bool:
        raise ValueError(
            f"word_lengths are one integer for each sentence, {list(shape)} for these tokens; got "
            f"{word_lengths.dtype} of shape {list(word_lengths.shape)}."
        )
    if word_lengths.numel() == 0:
        return
    lowest, highest = (int(bound) for bound in word_lengths.aminmax())
    if lowest < 0 or highest > num_words:
        raise ValueError(
            f"word_lengths lie between 0 and {num_words}, the words that there is room for; got "
            f"{lowest if lowest < 0 else highest}."
        )
    gaps = (word_lengths[:, 1:] > 0) & (word_lengths[:, :-1] == 0)
    if bool(gaps.any()):
        document = int(gaps.any(1).nonzero()[0])
        raise ValueError(
            f"a document's sentences come first, those without words after them; document {document} has "
            f"word_lengths {word_lengths[document].tolist()}."
        )


def _spread(weights: Tensor, mask: Tensor) -> Tensor:
    """Weights in their places, and zeros elsewhere."""
    return weights.new_zeros(mask.shape).masked_scatter(mask, weights)
