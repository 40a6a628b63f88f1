"""The layers of a Transformer, over any graph.

Dimensions: T targets, S tokens of the memory, E channels of the model, B batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import LayerNorm, Linear, Module
from torch_geometric.typing import Adj

from gattn.bias import Bias
from gattn.errors import InputError
from gattn.graphs import Graph
from gattn.nn.shared.dropout import Dropout
from gattn.nn.shared.dtypes import check_dtype
from gattn.nn.shared.linear import through
from gattn.nn.transformers import nested
from gattn.nn.transformers.key_value_cache import KeyValueCache
from gattn.nn.transformers.multihead_attention import MultiheadAttention
from gattn.nn.transformers.torch_masks import as_numbers, check_mask, is_causal_mask
from gattn.torch_private import has_hooks
from gattn.tracing import Leaf

__all__ = [
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


class _TransformerLayer(Leaf, torch.nn.Module):
    """The parts that encoder and decoder layers share: self-attention, the feed-forward network and the norms."""

    norm_first: bool
    self_attn: Any
    activation: Callable[[Tensor], Tensor]
    dropout: torch.nn.Dropout
    dropout1: torch.nn.Dropout
    dropout2: torch.nn.Dropout

    def _make(
        self,
        d_model: int,
        dim_feedforward: int,
        dropout: float,
        activation: str | Callable[[Tensor], Tensor],
        layer_norm_eps: float,
        norm_first: bool,
        bias: bool,
        factory: dict[str, Any],
        sublayers: int,
    ) -> None:
        if isinstance(activation, str) and activation not in _ACTIVATIONS:
            raise InputError(f"activation must be 'relu', 'gelu' or a function; got {activation!r}.")
        self.linear1 = Linear(d_model, dim_feedforward, bias=bias, **factory)
        self.dropout = Dropout(dropout)
        self.linear2 = Linear(dim_feedforward, d_model, bias=bias, **factory)
        self.norm_first = norm_first
        for number in range(1, sublayers + 1):
            setattr(self, f"norm{number}", LayerNorm(d_model, eps=layer_norm_eps, bias=bias, **factory))
            setattr(self, f"dropout{number}", Dropout(dropout))
        self.activation = _ACTIVATIONS[activation] if isinstance(activation, str) else activation

    def _sa_block(
        self,
        x: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        """Self-attention and dropout, which a subclass may override; `options` are a graph and a cache, if given."""
        masks = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask, "is_causal": is_causal}
        if "cache" in options:
            options["static_kv"] = False
        dropped: Tensor = self.dropout1(self.self_attn(x, x, x, need_weights=False, **masks, **options)[0])
        return dropped

    def _fed(self, x: Tensor) -> Tensor:
        """The feed-forward network, without its last dropout."""
        return through(self.linear2, self.dropout(self.activation(through(self.linear1, x))))

    def _reads_booleans(self) -> bool:
        """Whether only gattn's own code sees the masks."""
        if self._sa_block.__module__ != __name__ or has_hooks(self.self_attn):
            return False
        return type(self.self_attn) is MultiheadAttention and "forward" not in vars(self.self_attn)

    def _added(self, x: Tensor, norm: Module, block: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """The features after one of PyTorch's blocks, which a subclass may have overridden."""
        if len(kwargs) > 1 and block.__module__ != __name__:
            _check_takes(block, kwargs, type(self).__name__)
        out: Tensor = x + block(norm(x), *args, **kwargs) if self.norm_first else norm(x + block(x, *args, **kwargs))
        return out


class TransformerEncoderLayer(_TransformerLayer, torch.nn.TransformerEncoderLayer):
    r"""Self-attention and a feed-forward network, from `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_.

    .. math::
        y = \mathrm{norm}(x + \mathrm{attention}(x)), \qquad x' = \mathrm{norm}(y + W_2 \, \sigma(W_1 y))

    With `norm_first`, the norms are applied to the inputs of the two functions instead. This is a drop-in replacement
    for `torch.nn.TransformerEncoderLayer` with the same arguments, parameter names and results. In addition it has
    `graph=` (given the edges of a graph, it is a layer of a graph Transformer), a cache, and the options of
    `MultiheadAttention`.

    Args:
        d_model: The number of channels of the model, E.
        nhead: The number of heads.
        dim_feedforward: The number of channels of the hidden layer. (default: `2048`)
        dropout: The probability of dropping an attention weight or a feature during training. (default: `0.1`)
        activation: The activation of the hidden layer: `"relu"`, `"gelu"` or a function. (default: ReLU)
        layer_norm_eps: A small number that is added to the variance in norms. (default: `1e-5`)
        batch_first: Whether tensors are `[B, T, E]` rather than `[T, B, E]`. (default: `False`)
        norm_first: Whether to apply the norms before attention and feed-forward network (pre-norm) instead of after.
            (default: `False`)
        bias: Whether linear layers and norms have a bias. (default: `True`)
        device: The device of the parameters. (default: `None`)
        dtype: The type of the parameters. (default: `None`)
        **kwargs: The additional options of `MultiheadAttention`: `num_kv_heads`, `qk_norm` and `position`.

    Shapes:
        - **input:** `[T, B, E]`, or with `batch_first` `[B, T, E]`, which may be a nested tensor of either layout with
          ragged T, or `[T, E]` without a batch; **output:** the same.

    Raises:
        ValueError: If an option is out of range.

    Example:
        >>> import torch, gattn
        >>> layer = gattn.nn.TransformerEncoderLayer(16, nhead=4, dim_feedforward=32)
        >>> x = torch.randn(5, 16)
        >>> layer(x).shape, layer(x, graph=torch.tensor([[0, 1, 2], [1, 2, 3]])).shape
        (torch.Size([5, 16]), torch.Size([5, 16]))
    """

    activation_relu_or_gelu = 0  # tells PyTorch's encoder that there is no fused kernel

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ):
        torch.nn.Module.__init__(self)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.self_attn = MultiheadAttention(
            d_model, nhead, dropout=dropout, bias=bias, batch_first=batch_first, **factory, **kwargs
        )
        self._make(
            d_model, dim_feedforward, dropout, activation, layer_norm_eps, norm_first, bias, factory, sublayers=2
        )

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        graph: Adj | Graph | None = None,
        cache: KeyValueCache | None = None,
        attn_bias: Bias | None = None,
    ) -> Tensor:
        """Runs the layer.

        Args:
            src: The features, `[T, B, E]`, `[B, T, E]` with `batch_first`, or `[T, E]` without a batch.
            src_mask: The `attn_mask` of `MultiheadAttention.forward`. (default: `None`)
            src_key_padding_mask: The `key_padding_mask` of `MultiheadAttention.forward`. (default: `None`)
            is_causal: Whether tokens attend only to themselves and earlier ones. With a `src_mask`, the mask alone
                counts; to combine it with causality, pass `graph=gattn.CompleteGraph(T, causal=True)` instead.
                (default: `False`)
            graph: Which target attends to which source, in any form that `gattn.attend` takes. (default: `None`, every
                target to every source)
            cache: The keys and values of earlier tokens. (default: `None`)
            attn_bias: What is added to the logits, such as a `gattn.BucketBias`; see `MultiheadAttention.forward`.
                (default: `None`)

        Raises:
            ValueError: If shapes, masks and graph do not fit each other.
        """
        if nested.is_nested(src):
            graph = nested.packed_graph(
                self.self_attn, src, src, src, graph, src_mask, src_key_padding_mask, is_causal, cache
            )
            options = _given(graph=graph, attn_bias=attn_bias)
            return nested.restore(self.forward(nested.flatten(src), is_causal=is_causal, **options), src)

        check_dtype(self, src=src)
        masks, options = (src_mask, src_key_padding_mask), _given(graph=graph, cache=cache, attn_bias=attn_bias)
        if (src_mask is not None or src_key_padding_mask is not None) and not self._reads_booleans():
            masks = _as_in_torch(masks, src.dtype)
        src = self._added(src, self.norm1, self._sa_block, *masks, is_causal=is_causal, **options)
        return self._added(src, self.norm2, self._ff_block)

    def _ff_block(self, x: Tensor) -> Tensor:
        dropped: Tensor = self.dropout2(self._fed(x))
        return dropped


class TransformerDecoderLayer(_TransformerLayer, torch.nn.TransformerDecoderLayer):
    r"""Self-attention, attention over an encoder's output, and a feed-forward network.

    This is the decoder layer of `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_:

    .. math::
        y = \mathrm{norm}(x + \mathrm{attention}(x)), \quad z = \mathrm{norm}(y + \mathrm{attention}(y, m)), \quad
        x' = \mathrm{norm}(z + W_2 \, \sigma(W_1 z))

    This is a drop-in replacement for `torch.nn.TransformerDecoderLayer` with the same arguments, parameter names and
    results. In addition it has `graph=` and `memory_graph=`, a cache, and the options of `MultiheadAttention`, of which
    `position` applies to self-attention only.

    Args:
        d_model: The number of channels of the model, E.
        nhead: The number of heads.
        dim_feedforward: The number of channels of the hidden layer. (default: `2048`)
        dropout: The probability of dropping an attention weight or a feature during training. (default: `0.1`)
        activation: The activation of the hidden layer: `"relu"`, `"gelu"` or a function. (default: ReLU)
        layer_norm_eps: A small number that is added to the variance in norms. (default: `1e-5`)
        batch_first: Whether tensors are `[B, T, E]` rather than `[T, B, E]`. (default: `False`)
        norm_first: Whether to apply the norms before attention and feed-forward network (pre-norm) instead of after.
            (default: `False`)
        bias: Whether linear layers and norms have a bias. (default: `True`)
        device: The device of the parameters. (default: `None`)
        dtype: The type of the parameters. (default: `None`)
        **kwargs: The additional options of `MultiheadAttention`: `num_kv_heads`, `qk_norm` and `position`.

    Shapes:
        - **input:** targets `[T, B, E]` and memory `[S, B, E]`, or with `batch_first` `[B, T, E]` and `[B, S, E]`,
          which may be nested tensors of either layout with ragged T and S; **output:** in the shape of the targets.

    Raises:
        ValueError: If an option is out of range.

    Example:
        >>> import torch, gattn
        >>> layer = gattn.nn.TransformerDecoderLayer(16, nhead=4, dim_feedforward=32, batch_first=True)
        >>> layer(torch.randn(2, 5, 16), torch.randn(2, 7, 16), tgt_is_causal=True).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ):
        torch.nn.Module.__init__(self)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        common: dict[str, Any] = {"dropout": dropout, "bias": bias, "batch_first": batch_first, **factory}
        self.self_attn = MultiheadAttention(d_model, nhead, **common, **kwargs)
        kwargs.pop("position", None)
        self.multihead_attn = MultiheadAttention(d_model, nhead, **common, **kwargs)
        self._make(
            d_model, dim_feedforward, dropout, activation, layer_norm_eps, norm_first, bias, factory, sublayers=3
        )

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
        *,
        graph: Adj | Graph | None = None,
        memory_graph: Adj | Graph | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Runs the layer.

        Args:
            tgt: The targets, `[T, B, E]`, `[B, T, E]` with `batch_first`, or `[T, E]` without a batch.
            memory: The memory, `[S, B, E]`, `[B, S, E]` with `batch_first`, or `[S, E]` without a batch.
            tgt_mask: The `attn_mask` of self-attention, as in `MultiheadAttention.forward`. (default: `None`)
            memory_mask: The `attn_mask` of attention to the memory. (default: `None`)
            tgt_key_padding_mask: The `key_padding_mask` of self-attention. (default: `None`)
            memory_key_padding_mask: The `key_padding_mask` of attention to the memory. (default: `None`)
            tgt_is_causal: Whether self-attention is causal. With a `tgt_mask`, the mask alone counts.
                (default: `False`)
            memory_is_causal: Whether attention to the memory is causal, where the last target sees the whole memory.
                With a `memory_mask`, the mask alone counts. (default: `False`)
            graph: The graph of self-attention, in any form that `gattn.attend` takes. (default: `None`, every target
                to every other)
            memory_graph: The graph of attention to the memory. (default: `None`, every target to the whole memory)
            cache: The keys and values of earlier tokens and of the memory. (default: `None`)

        Raises:
            ValueError: If shapes, masks and graphs do not fit each other.
        """
        if nested.is_nested(tgt, memory):
            graph = nested.packed_graph(
                self.self_attn, tgt, tgt, tgt, graph, tgt_mask, tgt_key_padding_mask, tgt_is_causal, cache
            )
            terms = memory_mask, memory_key_padding_mask, memory_is_causal, cache
            memory_graph = nested.packed_graph(self.multihead_attn, tgt, memory, memory, memory_graph, *terms)
            out = self.forward(
                nested.flatten(tgt),
                nested.flatten(memory),
                tgt_is_causal=tgt_is_causal,
                memory_is_causal=memory_is_causal,
                graph=graph,
                memory_graph=memory_graph,
            )
            return nested.restore(out, tgt)

        check_dtype(self, tgt=tgt, memory=None if cache is not None else memory)
        own, of_memory = _given(graph=graph, cache=cache), _given(graph=memory_graph, cache=cache)
        masks = tgt_mask, tgt_key_padding_mask
        x = self._added(tgt, self.norm1, self._sa_block, *masks, is_causal=tgt_is_causal, **own)
        masks = memory_mask, memory_key_padding_mask
        x = self._added(x, self.norm2, self._mha_block, memory, *masks, is_causal=memory_is_causal, **of_memory)
        return self._added(x, self.norm3, self._ff_block)

    def _mha_block(
        self,
        x: Tensor,
        mem: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        """Attention to the memory and dropout; see `_sa_block`."""
        masks = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask, "is_causal": is_causal}
        if "cache" in options:
            options["static_kv"] = True
        dropped: Tensor = self.dropout2(self.multihead_attn(x, mem, mem, need_weights=False, **masks, **options)[0])
        return dropped

    def _ff_block(self, x: Tensor) -> Tensor:
        dropped: Tensor = self.dropout3(self._fed(x))
        return dropped


class TransformerEncoder(Leaf, torch.nn.TransformerEncoder):
    r"""A stack of encoder layers, from `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_.

    .. math::
        x^{(l)} = \mathrm{layer}_l(x^{(l-1)}), \qquad l = 1, \ldots, L

    This is a drop-in replacement for `torch.nn.TransformerEncoder`, and a subclass of it, that has `graph=` and a cache
    in addition.

    Args:
        encoder_layer: The layer to copy.
        num_layers: The number of layers.
        norm: A norm that is applied to the output. (default: `None`)
        enable_nested_tensor: Has no effect, since nothing is ever computed for padding; it exists for compatibility.
            (default: `True`)
        mask_check: Has no effect; it exists for compatibility. (default: `True`)

    Shapes:
        - **input:** as in `TransformerEncoderLayer`: `[T, B, E]`, or with `batch_first` `[B, T, E]`, or `[T, E]`
          without a batch; **output:** the same.

    Raises:
        ValueError: In `forward`, if shapes, masks and graph do not fit each other.

    Example:
        >>> import torch, gattn
        >>> layer = gattn.nn.TransformerEncoderLayer(16, nhead=4, dim_feedforward=32)
        >>> gattn.nn.TransformerEncoder(layer, num_layers=2)(torch.randn(5, 16)).shape
        torch.Size([5, 16])
    """

    def __init__(
        self,
        encoder_layer: torch.nn.TransformerEncoderLayer,
        num_layers: int,
        norm: torch.nn.Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
    ):
        super().__init__(encoder_layer, num_layers, norm, enable_nested_tensor=False, mask_check=mask_check)
        self.enable_nested_tensor = enable_nested_tensor

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
        *,
        graph: Adj | Graph | None = None,
        cache: KeyValueCache | None = None,
        attn_bias: Bias | None = None,
    ) -> Tensor:
        """Runs all layers.

        Args:
            src: The features, as in `TransformerEncoderLayer.forward`.
            mask: The `src_mask` of the layers. (default: `None`)
            src_key_padding_mask: The `src_key_padding_mask` of the layers. (default: `None`)
            is_causal: Whether tokens attend only to themselves and earlier ones. With a `mask`, the mask alone counts.
                (default: `None`, determined by comparing `mask` with the causal mask)
            graph: The graph of all layers. (default: `None`, every target to every source)
            cache: The keys and values of earlier tokens. (default: `None`)
            attn_bias: What is added to the logits in all layers. (default: `None`)

        Raises:
            ValueError: If shapes, masks and graph do not fit each other.
        """
        is_causal = is_causal_mask(mask) if is_causal is None else is_causal
        given = mask, src_key_padding_mask
        for layer in self.layers:
            masks = given if type(layer) is TransformerEncoderLayer else _as_in_torch(given, src.dtype)
            src = layer(
                src,
                src_mask=masks[0],
                src_key_padding_mask=masks[1],
                is_causal=is_causal,
                **_given(graph=graph, cache=cache, attn_bias=attn_bias),
            )
        return src if self.norm is None else nested.apply(self.norm, src)


class TransformerDecoder(Leaf, torch.nn.TransformerDecoder):
    r"""A stack of decoder layers, from `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_.

    .. math::
        x^{(l)} = \mathrm{layer}_l(x^{(l-1)}, m), \qquad l = 1, \ldots, L

    where :math:`m` is the memory, the output of an encoder. This is a drop-in replacement for
    `torch.nn.TransformerDecoder`, and a subclass of it, that has `graph=`, `memory_graph=` and a cache in addition.

    Args:
        decoder_layer: The layer to copy.
        num_layers: The number of layers.
        norm: A norm that is applied to the output. (default: `None`)

    Shapes:
        - **input:** targets `[T, B, E]` and memory `[S, B, E]`, or with `batch_first` `[B, T, E]` and `[B, S, E]`, or
          `[T, E]` and `[S, E]` without a batch; **output:** in the shape of the targets.

    Raises:
        ValueError: In `forward`, if shapes, masks and graphs do not fit each other.

    Example:
        >>> import torch, gattn
        >>> layer = gattn.nn.TransformerDecoderLayer(16, nhead=4, dim_feedforward=32)
        >>> gattn.nn.TransformerDecoder(layer, num_layers=2)(torch.randn(5, 16), torch.randn(7, 16)).shape
        torch.Size([5, 16])
    """

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
        *,
        graph: Adj | Graph | None = None,
        memory_graph: Adj | Graph | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Runs all layers.

        The arguments are those of `TransformerDecoderLayer.forward`, except that `tgt_is_causal=None` means
        comparing `tgt_mask` with the causal mask.

        Raises:
            ValueError: If shapes, masks and graphs do not fit each other.
        """
        tgt_is_causal = is_causal_mask(tgt_mask) if tgt_is_causal is None else tgt_is_causal
        for layer in self.layers:
            tgt = layer(
                tgt,
                memory,
                tgt_mask=tgt_mask,
                memory_mask=memory_mask,
                tgt_key_padding_mask=tgt_key_padding_mask,
                memory_key_padding_mask=memory_key_padding_mask,
                tgt_is_causal=tgt_is_causal,
                memory_is_causal=memory_is_causal,
                **_given(graph=graph, memory_graph=memory_graph, cache=cache),
            )
        return tgt if self.norm is None else nested.apply(self.norm, tgt)


class Transformer(Leaf, torch.nn.Transformer):
    r"""An encoder and a decoder, from `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_.

    .. math::
        y = \mathrm{decoder}(\mathrm{tgt}, \mathrm{encoder}(\mathrm{src}))

    This is a drop-in replacement for `torch.nn.Transformer`, and a subclass of it, that has `src_graph=`, `tgt_graph=`
    and `memory_graph=` in addition. A whole model, with embeddings, positions and decoding, is
    `gattn.models.TransformerSeq2Seq`.

    Args:
        d_model: The number of channels of the model, E. (default: `512`)
        nhead: The number of heads. (default: `8`)
        num_encoder_layers: The number of layers of the encoder. (default: `6`)
        num_decoder_layers: The number of layers of the decoder. (default: `6`)
        dim_feedforward: The number of channels of the hidden layers. (default: `2048`)
        dropout: The probability of dropping an attention weight or a feature during training. (default: `0.1`)
        activation: The activation of the hidden layer: `"relu"`, `"gelu"` or a function. (default: ReLU)
        custom_encoder: A module to use as the encoder. (default: `None`)
        custom_decoder: A module to use as the decoder. (default: `None`)
        layer_norm_eps: A small number that is added to the variance in norms. (default: `1e-5`)
        batch_first: Whether tensors are `[B, T, E]` rather than `[T, B, E]`. (default: `False`)
        norm_first: Whether to apply the norms before attention and feed-forward network (pre-norm) instead of after.
            (default: `False`)
        bias: Whether linear layers and norms have a bias. (default: `True`)
        device: The device of the parameters. (default: `None`)
        dtype: The type of the parameters. (default: `None`)
        **kwargs: The additional options of `MultiheadAttention`: `num_kv_heads`, `qk_norm` and `position`.

    Shapes:
        - **input:** src `[S, B, E]` and tgt `[T, B, E]`, or with `batch_first` `[B, S, E]` and `[B, T, E]`, or `[S, E]`
          and `[T, E]` without a batch; **output:** in the shape of tgt.

    Raises:
        ValueError: If `d_model` is not a multiple of `nhead`, an option is out of range, or (in `forward`) shapes,
            masks and graphs do not fit each other.

    Example:
        >>> import torch, gattn
        >>> model = gattn.nn.Transformer(16, 4, 1, 1, dim_feedforward=32, batch_first=True)
        >>> model(torch.randn(2, 7, 16), torch.randn(2, 5, 16), tgt_is_causal=True).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        custom_encoder: Module | None = None,
        custom_decoder: Module | None = None,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ):
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        options: dict[str, Any] = {
            "dim_feedforward": dim_feedforward,
            "dropout": dropout,
            "activation": activation,
            "layer_norm_eps": layer_norm_eps,
            "batch_first": batch_first,
            "norm_first": norm_first,
            "bias": bias,
            **factory,
            **kwargs,
        }

        def norm() -> LayerNorm:
            return LayerNorm(d_model, eps=layer_norm_eps, bias=bias, **factory)

        if custom_encoder is None:
            layer = TransformerEncoderLayer(d_model, nhead, **options)
            custom_encoder = TransformerEncoder(layer, num_encoder_layers, norm())
        if custom_decoder is None:
            decoder_layer = TransformerDecoderLayer(d_model, nhead, **options)
            custom_decoder = TransformerDecoder(decoder_layer, num_decoder_layers, norm())
        super().__init__(
            d_model,
            nhead,
            custom_encoder=custom_encoder,
            custom_decoder=custom_decoder,
            batch_first=batch_first,
        )

    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        src_is_causal: bool | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
        *,
        src_graph: Adj | Graph | None = None,
        tgt_graph: Adj | Graph | None = None,
        memory_graph: Adj | Graph | None = None,
    ) -> Tensor:
        """Encodes `src` and decodes `tgt`.

        The masks and graphs are those of `TransformerEncoder.forward` and `TransformerDecoder.forward`.

        Raises:
            ValueError: If the batch sizes or numbers of channels differ.
        """
        batch = 0 if self.batch_first else 1
        regular = not nested.is_nested(src, tgt)  # layers check nested tensors
        if regular and src.dim() == 3 and src.size(batch) != tgt.size(batch):
            raise InputError(
                f"src and tgt must have the same batch size; got shapes {list(src.shape)} and {list(tgt.shape)}."
            )
        if regular and (src.size(-1) != self.d_model or tgt.size(-1) != self.d_model):
            raise InputError(
                f"src and tgt have {src.size(-1)} and {tgt.size(-1)} channels, but this model was made for "
                f"{self.d_model}."
            )
        memory = self.encoder(
            src,
            mask=src_mask,
            src_key_padding_mask=src_key_padding_mask,
            is_causal=src_is_causal,
            **_given(graph=src_graph),
        )
        out: Tensor = self.decoder(
            tgt,
            memory,
            tgt_mask=tgt_mask,
            memory_mask=memory_mask,
            tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=memory_key_padding_mask,
            tgt_is_causal=tgt_is_causal,
            memory_is_causal=memory_is_causal,
            **_given(graph=tgt_graph, memory_graph=memory_graph),
        )
        return out


def _given(**arguments: Any) -> dict[str, Any]:
    """Returns the arguments that are not `None`, since PyTorch's own layers do not accept graphs and caches."""
    return {name: argument for name, argument in arguments.items() if argument is not None}


def _as_in_torch(masks: tuple[Tensor | None, Tensor | None], dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """The masks that PyTorch's encoder passes on, where other code than gattn's reads them: numbers, not booleans."""
    for name, mask in zip(("src_mask", "src_key_padding_mask"), masks, strict=True):
        check_mask(name, mask)
    first, second = (None if mask is None else as_numbers(mask, dtype) for mask in masks)
    return first, second


def _check_takes(block: Callable[..., Any], given: dict[str, Any], layer: str) -> None:
    """Raises `TypeError` if an overridden block has PyTorch's arguments only, but was given a graph or a cache."""
    parameters = inspect.signature(block).parameters
    missing = sorted(given.keys() - parameters.keys())
    if missing and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        raise TypeError(
            f"{layer} overrides a block without the argument {', '.join(missing)}: let it take **options and pass them "
            "to the attention, or leave them out (generate() has use_cache=False)."
        )
