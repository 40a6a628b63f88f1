"""Multi-head attention over any graph, and the cache for decoding step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Linear, Module, Parameter

from gattn.attention import Attention
from gattn.errors import InputError
from gattn.graphs import CompleteGraph, Graph, SparseGraph, as_graph
from gattn.nn import nested
from gattn.nn.positional import RelativePosition, RotaryPositionalEncoding
from gattn.ops.dropout import check_probability
from gattn.scores import DotScore


class KeyValueCache:
    """Keys and values of the tokens so far, for decoding one token (or a few) at a time.

    One cache serves all layers of a model: each finds its own part by itself.

    Example:
        >>> import torch, gattn
        >>> attention = gattn.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        >>> x, cache = torch.randn(1, 3, 8), gattn.nn.KeyValueCache()
        >>> steps = [attention(t, t, t, is_causal=True, cache=cache)[0] for t in x.split(1, dim=1)]
        >>> whole = attention(x, x, x, is_causal=True)[0]
        >>> torch.allclose(torch.cat(steps, dim=1), whole, atol=1e-6)
        True
    """

    def __init__(self) -> None:
        self._entries: dict[Module, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        """Number of tokens seen so far."""
        return max((key.size(-3) for key, _ in self._entries.values()), default=0)

    def length(self, module: Module) -> int:
        """Number of tokens that a layer has seen so far."""
        return self._entries[module][0].size(-3) if module in self._entries else 0

    def append(self, module: Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the keys and values `[..., T, H, C]` of new tokens, and returns all of that layer's."""
        if module in self._entries:
            before = self._entries[module]
            key, value = torch.cat([before[0], key], -3), torch.cat([before[1], value], -3)
        self._entries[module] = key, value
        return key, value

    def keep(self, module: Module, project: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Keys and values that never change, such as an encoder's: projected the first time only."""
        if module not in self._entries:
            self._entries[module] = project()
        return self._entries[module]

    def reorder(self, index: Tensor) -> None:
        """Picks elements of the batch, with repetitions: what beam search does after each step."""
        self._entries = {
            module: (key.index_select(0, index), value.index_select(0, index))
            for module, (key, value) in self._entries.items()
        }


class MultiheadAttention(Attention):
    r"""Multi-head attention of `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_, over any graph.

    .. math::
        \mathrm{head}_h = \mathrm{softmax}\left(\frac{Q W^Q_h (K W^K_h)^{\top}}{\sqrt{C}}\right) V W^V_h, \qquad
        \mathrm{out} = [\mathrm{head}_1, \ldots, \mathrm{head}_H] W^O

    A drop-in for `torch.nn.MultiheadAttention`: the same arguments, parameter names and numbers. Beyond it: `graph=`
    (who attends to whom; every query to every key unless a mask says otherwise), grouped-query heads, query-key
    normalisation, positions inside attention, and a cache. Where it differs: a query that may attend to nothing gets
    zeros, not NaN, and `is_causal=True` needs no `attn_mask`.

    Args:
        embed_dim: Channels of the model, E.
        num_heads: Number of heads, H; each has E / H channels.
        dropout: Probability that an attention weight is dropped, in training. (default: `0.0`)
        bias: Whether projections have a bias. (default: `True`)
        add_bias_kv: Whether a learnt key and value are appended. (default: `False`)
        add_zero_attn: Whether a key and value of zeros are appended. (default: `False`)
        kdim: Channels of the key. (default: `None`, E)
        vdim: Channels of the value. (default: `None`, E)
        batch_first: Whether tensors are `[B, T, E]` rather than `[T, B, E]`. (default: `False`)
        device: Of the parameters. (default: `None`)
        dtype: Of the parameters. (default: `None`)
        num_kv_heads: Number of heads of key and value, a divisor of H (grouped queries). (default: `None`, H)
        qk_norm: Whether queries and keys are normalised (RMS, learnt scale), head by head. (default: `False`)
        position: Positions inside attention: `RotaryPositionalEncoding`, `ALiBi` or `RelativePositionBias`.
            (default: `None`)

    Shapes:
        - **input:** query `[N, B, E]`, key `[M, B, kdim]`, value `[M, B, vdim]`; with `batch_first` `[B, N, E]` and so
          on, of which N and M may be ragged (nested tensors of either layout); without a batch `[N, E]`.
        - **output:** as the query, and weights `[B, N, M]` (`[B, H, N, M]` with `average_attn_weights=False`).

    Raises:
        ValueError: If `embed_dim` is not a multiple of `num_heads`, or an option is out of range. It can be caught as
            what PyTorch's layer raises, too (`gattn.errors.InputError`).

    Example:
        >>> import torch, gattn
        >>> attention = gattn.nn.MultiheadAttention(16, num_heads=4)
        >>> x = torch.randn(5, 16)  # 5 tokens, or 5 nodes
        >>> out, weights = attention(x, x, x)
        >>> out.shape, weights.shape
        (torch.Size([5, 16]), torch.Size([5, 5]))
        >>> out, _ = attention(x, x, x, graph=torch.tensor([[0, 1, 2], [1, 2, 3]]))
        >>> out.shape
        torch.Size([5, 16])
    """

    bias_k: Parameter | None
    bias_v: Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        qk_norm: bool = False,
        position: RotaryPositionalEncoding | RelativePosition | None = None,
    ):
        super().__init__()
        if embed_dim < 1 or num_heads < 1:
            raise ValueError(f"embed_dim and num_heads must be at least 1; got {embed_dim} and {num_heads}.")
        if embed_dim % num_heads != 0:
            raise InputError(
                f"embed_dim counts all heads together, so it must be a multiple of num_heads: {embed_dim} is not one "
                f"of {num_heads}."
            )
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_kv_heads < 1 or num_heads % num_kv_heads != 0:
            raise ValueError(f"num_kv_heads must divide num_heads={num_heads}; got {num_kv_heads}.")
        check_probability("dropout", dropout)
        factory = {"device": device, "dtype": dtype}
        self.embed_dim = embed_dim
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = embed_dim // num_heads
        self.dropout = dropout
        self.batch_first = batch_first
        self.add_zero_attn = add_zero_attn
        self.position = position
        kv_channels = num_kv_heads * self.head_dim
        self._splits = [embed_dim, kv_channels, kv_channels]
        if self.kdim == self.vdim == embed_dim:
            self.in_proj_weight = Parameter(torch.empty(sum(self._splits), embed_dim, **factory))
            for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
                self.register_parameter(name, None)
        else:
            self.q_proj_weight = Parameter(torch.empty(embed_dim, embed_dim, **factory))
            self.k_proj_weight = Parameter(torch.empty(kv_channels, self.kdim, **factory))
            self.v_proj_weight = Parameter(torch.empty(kv_channels, self.vdim, **factory))
            self.register_parameter("in_proj_weight", None)
        if bias:
            self.in_proj_bias = Parameter(torch.empty(sum(self._splits), **factory))
        else:
            self.register_parameter("in_proj_bias", None)
        self.out_proj = Linear(embed_dim, embed_dim, bias=bias, **factory)
        for name in ("bias_k", "bias_v"):
            self.register_parameter(name, Parameter(torch.empty(1, 1, kv_channels, **factory)) if add_bias_kv else None)
        self.q_norm = torch.nn.RMSNorm(self.head_dim, **factory) if qk_norm else None
        self.k_norm = torch.nn.RMSNorm(self.head_dim, **factory) if qk_norm else None
        # PyTorch's encoder layer runs its own kernel instead of this layer, unless something inside has a hook.
        self.aggr_module.register_forward_pre_hook(_no_hook)
        self._reset_parameters()

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """Whether the projections are one parameter, `in_proj_weight`: what tools ask of PyTorch's layer."""
        return self.in_proj_weight is not None

    def _reset_parameters(self) -> None:
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                torch.nn.init.xavier_uniform_(weight)
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                torch.nn.init.zeros_(bias)
        for extra in (self.bias_k, self.bias_v):
            if extra is not None:
                torch.nn.init.xavier_normal_(extra)

    def reset_parameters(self) -> None:
        """Draws all parameters anew, as PyTorch does."""
        super().reset_parameters()
        self.out_proj.reset_parameters()
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.reset_parameters()
        self._reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        graph: Any = None,
        cache: KeyValueCache | None = None,
    ) -> tuple[Tensor, Any]:
        """Attends.

        Args:
            query: `[N, B, E]`, `[B, N, E]` with `batch_first`, or `[N, E]`.
            key: `[M, B, kdim]`, and so on.
            value: `[M, B, vdim]`, and so on.
            key_padding_mask: `[B, M]` or `[M]`: booleans, True = ignore this key, or numbers that are added to the
                logits. (default: `None`)
            need_weights: Whether weights are returned, too (after dropout, as PyTorch does). (default: `True`)
            attn_mask: `[N, M]` or `[B * H, N, M]`, likewise: True = may *not* attend. (default: `None`)
            average_attn_weights: Whether the weights returned are the mean over heads. (default: `True`)
            is_causal: Whether a query sees the keys up to its own place only. With as many keys as queries an
                `attn_mask` beside it is taken to say just that, and not looked at. (default: `False`)
            graph: Who attends to whom, in any form that `gattn.attend` takes; masks hold besides. (default: `None`,
                everybody to everybody)
            cache: Keys and values of earlier tokens; those of `key` and `value` are appended. If `query` and `key` are
                different tensors, they are an encoder's, and kept as they are. (default: `None`)

        Returns:
            A pair: the output, shaped as the query, and the weights, or `None`. Weights are `[B, N, M]` (without
            averaging `[B, H, N, M]`); on a graph of edges `[B, E]` (`[B, E, H]`), in the order of its `edge_index`; on
            a packed graph a list, one for each block; of nested tensors `[B, N, M]` as for the padded batch, zeros
            beyond the lengths. Nested tensors give a nested output; masks other than `is_causal` and a cache do not go
            with them.

        Raises:
            ValueError: If shapes, masks, graph and options do not fit; the message says which.
        """
        if nested.is_nested(query, key, value):
            graph = nested.packed_graph(self, query, key, value, graph, attn_mask, key_padding_mask, is_causal, cache)
            flat = {id(x): nested.flatten(x) for x in (query, key, value)}
            q, k, v = (flat[id(x)] for x in (query, key, value))
            out, weights = self.forward(q, k, v, None, need_weights, None, average_attn_weights, is_causal, graph=graph)
            if need_weights:
                heads = () if average_attn_weights else (self.num_heads,)
                weights = nested.pad_weights(weights, out.new_zeros(0, *heads, 0, 0))
            return nested.restore(out, query), weights
        self._check_inputs(query, key, value)
        _check_mask("attn_mask", attn_mask)
        _check_mask("key_padding_mask", key_padding_mask)
        transposed = query.dim() == 3 and not self.batch_first
        own = query is key and key is value
        if own or cache is None:
            q, k, v = self._project(query, key, value, transposed)
        else:
            q = self._project_query(query, transposed)
            k, v = cache.keep(self, lambda: self._project_memory(key, value, transposed))
        first = cache.length(self) if own and cache is not None else 0
        num_targets, num_sources = q.size(-3), first + k.size(-3)
        graph = self._resolve_graph(graph, num_targets, num_sources, is_causal)
        if isinstance(self.position, RotaryPositionalEncoding):
            q = self.position(q, _places(graph, 0, num_sources - num_targets, q))
            k = self.position(k, _places(graph, 1, first, k))
        if own and cache is not None:
            k, v = cache.append(self, k, v)
        attn_mask = self._checked(attn_mask, q.shape[:-3], num_targets, num_sources)
        if is_causal and num_targets == num_sources:
            attn_mask = None
        graph, key_padding_mask = _with_lengths(graph, key_padding_mask, q.shape[:-3])
        bias, mask = self._dense_terms(attn_mask, key_padding_mask, q.shape[:-3], num_sources)
        if isinstance(graph, CompleteGraph) and graph.blocks is not None:
            bias, mask = (_by_block(x, graph) for x in (bias, mask))
        if self.bias_k is not None or self.add_zero_attn:
            k, v, graph, bias, mask = self._append_learnt(k, v, graph, bias, mask)
        if isinstance(graph, SparseGraph):
            bias, mask = (self._per_edge(x, graph) for x in (bias, mask))
            if is_causal:
                source, target = graph.sources_and_targets()
                past = (source - target <= num_sources - num_targets).unsqueeze(-1)
                mask = past if mask is None else mask & past
        if isinstance(self.position, RelativePosition):
            bias = _sum(bias, _position_bias(self.position, graph, self.num_heads, q.device))
        result = self.attend(
            q,
            k,
            v,
            graph,
            score=DotScore(),
            bias=bias,
            mask=mask,
            dropout=self.dropout,
            return_weights="dropped" if need_weights else False,
        )
        out, weights = result if need_weights else (result, None)
        out = out.flatten(-2).to(q.dtype)  # masks in single precision make it that
        out = self.out_proj(out.transpose(0, 1) if transposed else out)
        if weights is None:
            return out, None
        matrices = [x.to(q.dtype) for x in (weights if isinstance(weights, list) else [weights])]
        if average_attn_weights:
            matrices = [x.mean(-1 if isinstance(graph, SparseGraph) else -3) for x in matrices]
        return out, matrices if isinstance(weights, list) else matrices[0]

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        named = (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim))
        for name, x, channels in named:
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a tensor; got {type(x).__name__}.")
            if x.dim() != query.dim() or x.dim() not in (2, 3):
                raise InputError(
                    f"query, key and value are all [T, E], or all {'[B, T, E]' if self.batch_first else '[T, B, E]'}; "
                    f"got {name} of shape {list(x.shape)}."
                )
            if x.size(-1) != channels:
                raise InputError(f"{name} has {x.size(-1)} channels, but this layer was made for {channels}.")
        if key.shape[:-1] != value.shape[:-1]:
            raise InputError(f"each key has one value, but their shapes are {list(key.shape)} and {list(value.shape)}.")
        batch = 0 if self.batch_first else 1
        if query.dim() == 3 and query.size(batch) != key.size(batch):
            hint = "" if self.batch_first else " (this layer expects [T, B, E]: was batch_first=True meant?)"
            raise InputError(
                f"query and key have the same batch, but their shapes are {list(query.shape)} and {list(key.shape)}"
                f"{hint}."
            )

    def _project(self, query: Tensor, key: Tensor, value: Tensor, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[..., N, H, C]`, keys and values `[..., M, H, C]`."""
        if query is key and key is value and self.in_proj_weight is not None:
            q, k, v = F.linear(query, self.in_proj_weight, self._in_bias()).split(self._splits, -1)
            k = self._heads(k, transposed)
            q, k = self._normalise(self._heads(q, transposed), self.q_norm), self._normalise(k, self.k_norm)
            return q, k, self._heads(v, transposed)
        return self._project_query(query, transposed), *self._project_memory(key, value, transposed)

    def _project_query(self, query: Tensor, transposed: bool) -> Tensor:
        weight = self.q_proj_weight if self.in_proj_weight is None else self.in_proj_weight[: self.embed_dim]
        bias = self._in_bias(slice(self.embed_dim))
        return self._normalise(self._heads(F.linear(query, weight, bias), transposed), self.q_norm)

    def _project_memory(self, key: Tensor, value: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
        bias = self._in_bias(slice(self.embed_dim, None))
        if self.in_proj_weight is not None and key is value:
            k, v = F.linear(key, self.in_proj_weight[self.embed_dim :], bias).split(self._splits[1:], -1)
        else:
            weights = self.k_proj_weight, self.v_proj_weight
            if self.in_proj_weight is not None:
                weights = self.in_proj_weight[self.embed_dim :].split(self._splits[1:])
            biases = (None, None) if bias is None else bias.split(self._splits[1:])
            k, v = F.linear(key, weights[0], biases[0]), F.linear(value, weights[1], biases[1])
        return self._normalise(self._heads(k, transposed), self.k_norm), self._heads(v, transposed)

    def _in_bias(self, part: slice = slice(None)) -> Tensor | None:
        """A part of the bias of the projections, in the type of their weights: PyTorch takes another one, too."""
        weight = self.q_proj_weight if self.in_proj_weight is None else self.in_proj_weight
        return None if self.in_proj_bias is None else self.in_proj_bias[part].to(weight.dtype)

    def _heads(self, x: Tensor, transposed: bool) -> Tensor:
        x = x.unflatten(-1, (-1, self.head_dim))
        return x.transpose(0, 1) if transposed else x

    @staticmethod
    def _normalise(x: Tensor, norm: Module | None) -> Tensor:
        return x if norm is None else norm(x)

    @staticmethod
    def _resolve_graph(graph: Any, num_targets: int, num_sources: int, is_causal: bool) -> Graph:
        if graph is None:
            return CompleteGraph(num_targets, num_sources, causal=is_causal)
        graph = as_graph(graph)
        if isinstance(graph, SparseGraph):
            return graph.with_sizes(num_sources, num_targets)
        return graph.with_causal() if is_causal else graph

    def _checked(
        self, attn_mask: Tensor | None, batch: torch.Size, num_targets: int, num_sources: int
    ) -> Tensor | None:
        """A mask of pairs as `[N, M]` or `[..., H, N, M]`."""
        if attn_mask is None:
            return None
        size = (num_targets, num_sources)
        per_head = (*(count * self.num_heads for count in batch or (1,)), *size)
        if attn_mask.shape not in (size, per_head):
            raise InputError(
                f"attn_mask has shape {list(size)} or {list(per_head)} (batch times heads, targets, sources); got "
                f"{list(attn_mask.shape)}."
            )
        return attn_mask.view(*batch, self.num_heads, *size) if attn_mask.dim() == 3 else attn_mask

    @staticmethod
    def _dense_terms(
        attn_mask: Tensor | None, key_padding_mask: Tensor | None, batch: torch.Size, num_sources: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Bias and mask (True = may attend), broadcastable to `[..., H, N, M]`."""
        bias: Tensor | None = None
        mask: Tensor | None = None
        if key_padding_mask is not None:
            shape = (*batch, num_sources)
            if key_padding_mask.shape != shape:
                raise InputError(f"key_padding_mask has shape {list(shape)}; got {list(key_padding_mask.shape)}.")
            key_padding_mask = key_padding_mask.unsqueeze(-2).unsqueeze(-2)
        for term in (key_padding_mask, attn_mask):
            if term is None:
                continue
            if term.dtype == torch.bool:
                mask = ~term if mask is None else mask & ~term
            else:
                bias = _sum(bias, term)
        return bias, mask

    def _append_learnt(
        self, k: Tensor, v: Tensor, graph: Graph, bias: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Graph, Tensor | None, Tensor | None]:
        """Appends the learnt key and value, and the zeros, which everybody sees."""
        if not isinstance(graph, CompleteGraph) or graph.blocks is not None or self.position is not None:
            raise ValueError(
                "add_bias_kv and add_zero_attn append keys that are no nodes: they go with masks, not with a graph of "
                "edges, a packed graph or positions."
            )
        extra = []
        if self.bias_k is not None and self.bias_v is not None:
            extra.append([self._heads(x.expand(*k.shape[:-3], 1, -1), False) for x in (self.bias_k[0], self.bias_v[0])])
        if self.add_zero_attn:
            shape = (*k.shape[:-3], 1, *k.shape[-2:])
            extra.append([k.new_zeros(shape), v.new_zeros(shape)])
        offset = graph.num_sources - graph.num_targets
        seen = graph.visible(graph.num_targets, graph.num_sources, offset, k.device)
        if graph.source_lengths is not None:
            real = torch.arange(graph.num_sources, device=k.device) < graph.source_lengths.to(k.device).unsqueeze(-1)
            seen = seen & real.unsqueeze(-2).unsqueeze(-2)
        mask = seen if mask is None else mask & seen
        mask = F.pad(mask, (0, len(extra)), value=True)
        bias = None if bias is None else F.pad(bias.expand(*bias.shape[:-1], graph.num_sources), (0, len(extra)))
        k, v = (torch.cat([x, *(pair[place] for pair in extra)], -3) for place, x in enumerate((k, v)))
        return k, v, CompleteGraph(graph.num_targets, k.size(-3), target_lengths=graph.target_lengths), bias, mask

    def _per_edge(self, dense: Tensor | None, graph: SparseGraph) -> Tensor | None:
        """The entries of `[..., H, N, M]` that belong to edges: `[..., E, H]`."""
        if dense is None:
            return None
        source, target = graph.sources_and_targets()
        shape = (*dense.shape[:-3], self.num_heads, graph.num_targets, graph.num_sources)
        return dense.expand(shape)[..., target, source].transpose(-1, -2)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.embed_dim}, num_heads={self.num_heads})"


def _no_hook(module: Module, inputs: Any) -> None:
    """Does nothing, but is there."""


def _sum(first: Tensor | None, second: Tensor) -> Tensor:
    return second if first is None else first + second


def _check_mask(name: str, mask: Any) -> None:
    if mask is not None and not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(mask).__name__}.")
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        raise InputError(
            f"{name} holds booleans (True = may not attend), or floating-point numbers that are added to the logits; "
            f"got {mask.dtype}."
        )


def _by_block(dense: Tensor | None, graph: CompleteGraph) -> Tensor | None:
    """The part of `[..., N, M]` that belongs to each block of a packed graph, `[B, ..., N, M]`, padded to one size."""
    if dense is None or not graph.blocks:
        return dense
    if dense.dim() > 3:
        raise ValueError("a packed graph's masks are [N, M] or [H, N, M], for its nodes laid end to end.")
    dense = dense.expand(*dense.shape[:-2], graph.num_targets, graph.num_sources)
    most_targets, most_sources = (max(sizes) for sizes in zip(*graph.blocks, strict=True))
    parts, first_target, first_source = [], 0, 0
    for num_targets, num_sources in graph.blocks:
        part = dense.narrow(-2, first_target, num_targets).narrow(-1, first_source, num_sources)
        parts.append(F.pad(part, (0, most_sources - num_sources, 0, most_targets - num_targets)))
        first_target, first_source = first_target + num_targets, first_source + num_sources
    blocks = torch.stack(parts)
    return blocks.unsqueeze(1) if blocks.dim() == 3 else blocks


def _with_lengths(graph: Graph, padding: Tensor | None, batch: torch.Size) -> tuple[Graph, Tensor | None]:
    """Turns a mask that only pads at the end into lengths, so that padding is not computed."""
    if (
        padding is None
        or padding.dtype != torch.bool
        or padding.dim() != 2
        or padding.shape[:1] != batch
        or padding.device.type != "cpu"
        or torch.compiler.is_compiling()
        or not isinstance(graph, CompleteGraph)
        or graph.blocks is not None
        or graph.source_lengths is not None
        or graph.num_sources != padding.size(1)
    ):
        return graph, padding
    lengths = padding.size(1) - padding.sum(1)
    if bool((padding != (torch.arange(padding.size(1)) >= lengths.unsqueeze(1))).any()):
        return graph, padding
    return graph.with_source_lengths(lengths), None


def _places(graph: Graph, side: int, first: int, x: Tensor) -> Tensor:
    """The place of each row of `[..., T, H, C]` in its sequence, where row 0 is at `first`."""
    if isinstance(graph, CompleteGraph) and graph.blocks is not None:
        pieces = [
            torch.arange(sizes[side], device=x.device) + (sizes[1] - sizes[0]) * (1 - side) for sizes in graph.blocks
        ]
        return torch.cat(pieces) if pieces else torch.arange(0, device=x.device)
    return torch.arange(first, first + x.size(-3), device=x.device)


def _position_bias(position: RelativePosition, graph: Graph, heads: int, device: torch.device) -> Tensor:
    """The bias of each edge, `[E, H]`; of a complete graph `[..., H, N, M]`."""
    if isinstance(graph, SparseGraph):
        source, target = graph.sources_and_targets()
        offset = (graph.num_sources or 0) - (graph.num_targets or 0)
        return _of_heads(position(source - target - offset), heads)
    if graph.blocks is None:
        sizes = torch.tensor([[graph.num_targets, graph.num_sources]], device=device)
    else:
        sizes = torch.tensor(graph.blocks, dtype=torch.int64, device=device).view(-1, 2)
    num_targets, num_sources = (graph.num_targets, graph.num_sources)
    if graph.blocks is not None:
        num_targets, num_sources = (int(size) for size in sizes.amax(0)) if len(graph.blocks) else (0, 0)
    offsets = sizes[:, 1] - sizes[:, 0]
    if graph.blocks is not None and len({m - n for n, m in graph.blocks}) == 1:
        offsets = offsets[:1]
    target = torch.arange(num_targets, device=device).view(-1, 1) + offsets.view(-1, 1, 1)
    bias = _of_heads(position(torch.arange(num_sources, device=device) - target), heads).movedim(-1, -3)
    return bias if graph.blocks is not None else bias[0]


def _of_heads(bias: Tensor, heads: int) -> Tensor:
    if bias.size(-1) != heads:
        raise ValueError(f"the positions have biases for {bias.size(-1)} heads, but the attention has {heads}.")
    return bias
