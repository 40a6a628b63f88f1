"""The layers of a Transformer, over any graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Dropout, LayerNorm, Linear

from gattn.errors import InputError
from gattn.nn import nested
from gattn.nn.multihead_attention import KeyValueCache, MultiheadAttention

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


class _TransformerLayer(torch.nn.Module):
    """What encoder and decoder layers share: the feed-forward network, and where norms go."""

    norm_first: bool

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
            raise InputError(f"activation is 'relu', 'gelu' or a function, not {activation!r}.")
        self.linear1 = Linear(d_model, dim_feedforward, bias=bias, **factory)
        self.dropout = Dropout(dropout)
        self.linear2 = Linear(dim_feedforward, d_model, bias=bias, **factory)
        self.norm_first = norm_first
        for number in range(1, sublayers + 1):
            setattr(self, f"norm{number}", LayerNorm(d_model, eps=layer_norm_eps, bias=bias, **factory))
            setattr(self, f"dropout{number}", Dropout(dropout))
        self.activation = _ACTIVATIONS[activation] if isinstance(activation, str) else activation

    def _sublayer(self, x: Tensor, number: int, function: Callable[[Tensor], Tensor]) -> Tensor:
        norm, dropout = getattr(self, f"norm{number}"), getattr(self, f"dropout{number}")
        if self.norm_first:
            return x + dropout(function(norm(x)))
        return norm(x + dropout(function(x)))

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.dropout(self.activation(self.linear1(x))))


class TransformerEncoderLayer(_TransformerLayer, torch.nn.TransformerEncoderLayer):
    r"""Self-attention and a feed-forward network, of `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_.

    .. math::
        y = \mathrm{norm}(x + \mathrm{attention}(x)), \qquad x' = \mathrm{norm}(y + W_2 \, \sigma(W_1 y))

    With `norm_first` norms are applied to what enters the two functions instead. A drop-in for
    `torch.nn.TransformerEncoderLayer`: the same arguments, parameter names and numbers. Beyond it: `graph=` (with the
    edges of a graph it is a graph Transformer's layer), a cache, and what `MultiheadAttention` adds.

    Args:
        d_model: Channels of the model, E.
        nhead: Number of heads.
        dim_feedforward: Channels of the hidden layer. (default: `2048`)
        dropout: Probability that an attention weight or feature is dropped, in training. (default: `0.1`)
        activation: `"relu"`, `"gelu"` or a function. (default: ReLU)
        layer_norm_eps: Added to the variance in norms. (default: `1e-5`)
        batch_first: Whether tensors are `[B, T, E]` rather than `[T, B, E]`. (default: `False`)
        norm_first: Whether norms come first (pre-norm). (default: `False`)
        bias: Whether linear layers and norms have a bias. (default: `True`)
        device: Of the parameters. (default: `None`)
        dtype: Of the parameters. (default: `None`)
        **kwargs: What `MultiheadAttention` adds: `num_kv_heads`, `qk_norm`, `position`.

    Shapes:
        - **input:** `[T, B, E]`, with `batch_first` `[B, T, E]`, of which T may be ragged (a nested tensor of either
          layout), without a batch `[T, E]`; **output:** the same.

    Raises:
        ValueError: If an option is out of range.

    Example:
        >>> import torch, gattn
        >>> layer = gattn.nn.TransformerEncoderLayer(16, nhead=4, dim_feedforward=32)
        >>> x = torch.randn(5, 16)
        >>> layer(x).shape, layer(x, graph=torch.tensor([[0, 1, 2], [1, 2, 3]])).shape
        (torch.Size([5, 16]), torch.Size([5, 16]))
    """

    activation_relu_or_gelu = 0  # to PyTorch's encoder it means that there is no fused kernel to prepare batches for

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
        device: Any = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ):
        torch.nn.Module.__init__(self)
        factory = {"device": device, "dtype": dtype}
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
        graph: Any = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Runs the layer; for masks, `graph` and `cache` see `MultiheadAttention.forward`."""
        if nested.is_nested(src):
            graph = nested.packed_graph(
                self.self_attn, src, src, src, graph, src_mask, src_key_padding_mask, is_causal, cache
            )
            return nested.restore(self.forward(nested.flatten(src), is_causal=is_causal, graph=graph), src)

        def attend(x: Tensor) -> Tensor:
            return self.self_attn(
                x,
                x,
                x,
                key_padding_mask=src_key_padding_mask,
                need_weights=False,
                attn_mask=src_mask,
                is_causal=is_causal,
                graph=graph,
                cache=cache,
            )[0]

        return self._sublayer(self._sublayer(src, 1, attend), 2, self._feed_forward)


class TransformerDecoderLayer(_TransformerLayer, torch.nn.TransformerDecoderLayer):
    r"""Self-attention, attention over an encoder's output, and a feed-forward network.

    The decoder's layer of `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_:

    .. math::
        y = \mathrm{norm}(x + \mathrm{attention}(x)), \quad z = \mathrm{norm}(y + \mathrm{attention}(y, m)), \quad
        x' = \mathrm{norm}(z + W_2 \, \sigma(W_1 z))

    A drop-in for `torch.nn.TransformerDecoderLayer`: the same arguments, parameter names and numbers. Beyond it:
    `graph=` and `memory_graph=`, a cache, and what `MultiheadAttention` adds (positions, however, inside
    self-attention alone).

    Args:
        d_model: Channels of the model, E.
        nhead: Number of heads.
        dim_feedforward: Channels of the hidden layer. (default: `2048`)
        dropout: Probability that an attention weight or feature is dropped, in training. (default: `0.1`)
        activation: `"relu"`, `"gelu"` or a function. (default: ReLU)
        layer_norm_eps: Added to the variance in norms. (default: `1e-5`)
        batch_first: Whether tensors are `[B, T, E]` rather than `[T, B, E]`. (default: `False`)
        norm_first: Whether norms come first (pre-norm). (default: `False`)
        bias: Whether linear layers and norms have a bias. (default: `True`)
        device: Of the parameters. (default: `None`)
        dtype: Of the parameters. (default: `None`)
        **kwargs: What `MultiheadAttention` adds: `num_kv_heads`, `qk_norm`, `position`.

    Shapes:
        - **input:** targets `[T, B, E]` and memory `[S, B, E]`, with `batch_first` `[B, T, E]` and so on, of which T
          and S may be ragged (nested tensors of either layout); **output:** as the targets.

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
        device: Any = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ):
        torch.nn.Module.__init__(self)
        factory = {"device": device, "dtype": dtype}
        common = {"dropout": dropout, "bias": bias, "batch_first": batch_first, **factory}
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
        graph: Any = None,
        memory_graph: Any = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Runs the layer; for masks, graphs and `cache` see `MultiheadAttention.forward`."""
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

        def attend(x: Tensor) -> Tensor:
            return self.self_attn(
                x,
                x,
                x,
                key_padding_mask=tgt_key_padding_mask,
                need_weights=False,
                attn_mask=tgt_mask,
                is_causal=tgt_is_causal,
                graph=graph,
                cache=cache,
            )[0]

        def attend_to_memory(x: Tensor) -> Tensor:
            return self.multihead_attn(
                x,
                memory,
                memory,
                key_padding_mask=memory_key_padding_mask,
                need_weights=False,
                attn_mask=memory_mask,
                is_causal=memory_is_causal,
                graph=memory_graph,
                cache=cache,
            )[0]

        x = self._sublayer(tgt, 1, attend)
        x = self._sublayer(x, 2, attend_to_memory)
        return self._sublayer(x, 3, self._feed_forward)


class TransformerEncoder(torch.nn.TransformerEncoder):
    """A stack of encoder layers.

    A drop-in for `torch.nn.TransformerEncoder`, which it is one of; beyond it: `graph=` and a cache.

    Args:
        encoder_layer: A layer, which is copied.
        num_layers: Number of layers.
        norm: A norm at the end. (default: `None`)
        enable_nested_tensor: Taken for compatibility: padding is never computed. (default: `True`)
        mask_check: Likewise. (default: `True`)

    Example:
        >>> import torch, gattn
        >>> layer = gattn.nn.TransformerEncoderLayer(16, nhead=4, dim_feedforward=32)
        >>> gattn.nn.TransformerEncoder(layer, num_layers=2)(torch.randn(5, 16)).shape
        torch.Size([5, 16])
    """

    def __init__(
        self,
        encoder_layer: Any,
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
        graph: Any = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Runs all layers; for masks, `graph` and `cache` see `MultiheadAttention.forward`.

        `is_causal=None` finds out whether `mask` is the causal one.
        """
        is_causal = is_causal_mask(mask) if is_causal is None else is_causal
        for layer in self.layers:
            src = layer(
                src,
                src_mask=mask,
                src_key_padding_mask=src_key_padding_mask,
                is_causal=is_causal,
                **_given(graph=graph, cache=cache),
            )
        return src if self.norm is None else nested.apply(self.norm, src)


class TransformerDecoder(torch.nn.TransformerDecoder):
    """A stack of decoder layers.

    A drop-in for `torch.nn.TransformerDecoder`, which it is one of; beyond it: `graph=`, `memory_graph=` and a cache.

    Args:
        decoder_layer: A layer, which is copied.
        num_layers: Number of layers.
        norm: A norm at the end. (default: `None`)

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
        graph: Any = None,
        memory_graph: Any = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Runs all layers; for masks, graphs and `cache` see `MultiheadAttention.forward`.

        `tgt_is_causal=None` finds out whether `tgt_mask` is the causal one.
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


class Transformer(torch.nn.Transformer):
    """Encoder and decoder, of `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_.

    A drop-in for `torch.nn.Transformer`, which it is one of; beyond it: `src_graph=`, `tgt_graph=` and `memory_graph=`.
    A whole model, with embeddings, positions and decoding, is `gattn.models.TransformerSeq2Seq`.

    Args:
        d_model: Channels of the model, E. (default: `512`)
        nhead: Number of heads. (default: `8`)
        num_encoder_layers: Layers of the encoder. (default: `6`)
        num_decoder_layers: Layers of the decoder. (default: `6`)
        dim_feedforward: Channels of the hidden layers. (default: `2048`)
        dropout: Probability that an attention weight or feature is dropped, in training. (default: `0.1`)
        activation: `"relu"`, `"gelu"` or a function. (default: ReLU)
        custom_encoder: Instead of the encoder. (default: `None`)
        custom_decoder: Instead of the decoder. (default: `None`)
        layer_norm_eps: Added to the variance in norms. (default: `1e-5`)
        batch_first: Whether tensors are `[B, T, E]` rather than `[T, B, E]`. (default: `False`)
        norm_first: Whether norms come first (pre-norm). (default: `False`)
        bias: Whether linear layers and norms have a bias. (default: `True`)
        device: Of the parameters. (default: `None`)
        dtype: Of the parameters. (default: `None`)
        **kwargs: What `MultiheadAttention` adds: `num_kv_heads`, `qk_norm`, `position`.

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
        custom_encoder: Any = None,
        custom_decoder: Any = None,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ):
        factory = {"device": device, "dtype": dtype}
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
        src_graph: Any = None,
        tgt_graph: Any = None,
        memory_graph: Any = None,
    ) -> Tensor:
        """Encodes `src` and decodes `tgt`; for masks and graphs see `MultiheadAttention.forward`.

        Raises:
            ValueError: If batches or channels differ.
        """
        batch = 0 if self.batch_first else 1
        regular = not nested.is_nested(src, tgt)  # what isn't is checked by the layers
        if regular and src.dim() == 3 and src.size(batch) != tgt.size(batch):
            raise InputError(
                f"src and tgt have the same batch, but their shapes are {list(src.shape)} and {list(tgt.shape)}."
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
        return self.decoder(
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


def is_causal_mask(mask: Tensor | None) -> bool:
    """Whether a mask says just that nobody sees what comes later; `False` where that cannot be looked at."""
    if mask is None or mask.dim() != 2 or mask.size(0) != mask.size(1) or torch.compiler.is_compiling():
        return False
    later = torch.ones_like(mask, dtype=torch.bool).triu(1)
    if mask.dtype == torch.bool:
        return bool((mask == later).all())
    return bool((mask == torch.zeros_like(mask).masked_fill(later, -torch.inf)).all())


def _given(**arguments: Any) -> dict[str, Any]:
    """The arguments that are not `None`: layers of PyTorch's own don't know them."""
    return {name: argument for name, argument in arguments.items() if argument is not None}
