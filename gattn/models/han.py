"""Hierarchical attention: words form sentences and sentences form documents, with the same layers at both levels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import GRU, Embedding, Linear, Module
from torch.nn.utils.rnn import pack_padded_sequence

from gattn.errors import check_at_least
from gattn.models.tokens import check_tokens
from gattn.nn.pooling.attention_pooling import AttentionPooling
from gattn.nn.shared.dropout import Dropout

__all__ = ["HAN"]


class HAN(Module):
    r"""A hierarchical attention network for the classification of documents.

    In the model of `Hierarchical Attention Networks for Document Classification <https://aclanthology.org/N16-1174>`_,
    a bidirectional GRU reads the words of each sentence, and attention combines them in one vector. The same happens to
    the sentences of each document:

    .. math::
        s_i = \mathrm{pool}(\mathrm{GRU}(w_{i1}, w_{i2}, \ldots)), \qquad
        d = \mathrm{pool}(\mathrm{GRU}(s_1, s_2, \ldots)), \qquad
        \mathrm{logits} = W d + b

    where pool is an `AttentionPooling`. Padding is never used, whatever it contains.

    Args:
        num_tokens: The size of the vocabulary, V.
        num_classes: The number of classes, K.
        embedding_channels: The number of channels of the embedded words. (default: `200`)
        hidden_channels: The number of channels of the GRUs, for each direction. (default: `50`)
        attention_channels: The number of channels of the queries of the attention. (default: `100`)
        dropout: The probability of dropping a channel of a word, a sentence or a document during training.
            (default: `0.0`)

    Shapes:
        - **input:** tokens `[B, S, W]`, the number of words in each sentence `[B, S]`.
        - **output:** logits `[B, K]`.

    Raises:
        ValueError: If an option is out of range.

    Example:
        >>> import torch, gattn
        >>> model = gattn.models.HAN(num_tokens=30, num_classes=5)
        >>> tokens = torch.randint(30, (2, 3, 7))  # 2 documents with up to 3 sentences of up to 7 words
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
        check_at_least(1, num_tokens=num_tokens, num_classes=num_classes)
        check_at_least(1, embedding_channels=embedding_channels, hidden_channels=hidden_channels)
        self.num_tokens = num_tokens
        self.embedding = Embedding(num_tokens, embedding_channels)
        self.words = _Encoder(embedding_channels, hidden_channels, attention_channels)
        self.sentences = _Encoder(2 * hidden_channels, hidden_channels, attention_channels)
        self.output = Linear(2 * hidden_channels, num_classes)
        self.dropout = Dropout(dropout)

    def reset_parameters(self) -> None:
        """Resets all parameters."""
        for part in (self.embedding, self.words, self.sentences, self.output):
            part.reset_parameters()

    def forward(
        self, tokens: Tensor, word_lengths: Tensor | None = None, return_weights: bool = False
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Classifies documents.

        Args:
            tokens: The tokens, `[B, S, W]`: B documents of up to S sentences of up to W words.
            word_lengths: The number of words in each sentence, `[B, S]`. It is 0 for padding, which comes after all
                sentences of a document. The logits of a document without sentences are the bias of the classifier.
                (default: `None`, W words in every sentence)
            return_weights: Whether to return the attention weights as well. (default: `False`)

        Returns:
            The logits `[B, K]`. With `return_weights`, also the weights of the words, `[B, S, W]`, and those of the
            sentences, `[B, S]`, which are zero for padding.

        Raises:
            ValueError: If shapes or lengths do not fit each other.
            IndexError: If a token is not in the vocabulary.
            TypeError: If `word_lengths` is not a tensor.
        """
        if tokens.dim() != 3:
            raise ValueError(
                f"tokens must be [B, S, W], that is documents of sentences of words; got {list(tokens.shape)}."
            )
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
        logits: Tensor = self.output(self.dropout(documents))
        if not return_weights:
            return logits
        return logits, _spread(word_weights, is_word), _spread(sentence_weights, is_sentence)


class _Encoder(Module):
    """Returns one vector for each sequence: a bidirectional GRU, then attention to its states."""

    def __init__(self, in_channels: int, hidden_channels: int, attention_channels: int):
        super().__init__()
        self.gru = GRU(in_channels, hidden_channels, bidirectional=True)
        self.pool = AttentionPooling(2 * hidden_channels, attention_channels)

    def reset_parameters(self) -> None:
        self.gru.reset_parameters()
        self.pool.reset_parameters()

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the vectors `[B, C]` of B sequences that lie end to end in `x`, and the weight of each element."""
        ptr = F.pad(lengths.cumsum(0), (1, 0))
        result: tuple[Tensor, Tensor] = self.pool(self._states(x, lengths, ptr), ptr=ptr, return_weights=True)
        return result

    def _states(self, x: Tensor, lengths: Tensor, ptr: Tensor) -> Tensor:
        full = lengths.nonzero().squeeze(1)  # a GRU does not accept empty sequences
        if full.numel() == 0:
            return x.new_zeros(0, self.pool.in_channels)
        # A GRU reads the first elements of all sequences, then the second ones, and so on.
        rows = ptr[full].unsqueeze(1) + torch.arange(int(lengths.max()), device=x.device)
        order = pack_padded_sequence(rows, lengths[full].cpu(), batch_first=True, enforce_sorted=False)
        states, _ = self.gru(order._replace(data=x[order.data]))
        ordered: Tensor = states.data[order.data.argsort()]
        return ordered


def _check_lengths(word_lengths: Tensor, tokens: Tensor) -> None:
    if not isinstance(word_lengths, Tensor):
        raise TypeError(f"word_lengths must be a tensor; got {type(word_lengths).__name__}.")
    shape, num_words = tokens.shape[:2], tokens.size(2)
    if word_lengths.shape != shape or word_lengths.is_floating_point() or word_lengths.dtype == torch.bool:
        raise ValueError(
            f"word_lengths must have one integer for each sentence, {list(shape)} for these tokens; got "
            f"{word_lengths.dtype} of shape {list(word_lengths.shape)}."
        )
    if word_lengths.numel() == 0:
        return
    lowest, highest = (int(bound) for bound in word_lengths.aminmax())
    if lowest < 0 or highest > num_words:
        raise ValueError(
            f"word_lengths must lie between 0 and {num_words}, the number of words in tokens; got "
            f"{lowest if lowest < 0 else highest}."
        )
    gaps = (word_lengths[:, 1:] > 0) & (word_lengths[:, :-1] == 0)
    if bool(gaps.any()):
        document = int(gaps.any(1).nonzero()[0])
        raise ValueError(
            f"the sentences of a document must come before its padding; document {document} has "
            f"word_lengths {word_lengths[document].tolist()}."
        )


def _spread(weights: Tensor, mask: Tensor) -> Tensor:
    """Returns the weights at the True elements of a mask, and zeros elsewhere."""
    return weights.new_zeros(mask.shape).masked_scatter(mask, weights)
