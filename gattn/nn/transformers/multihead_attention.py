"""Multi-head attention over any graph.

Dimensions: N targets, M sources, H heads, C channels of a head, E channels of the model, B batch.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, Parameter
from torch_geometric.typing import Adj

from gattn.attention import Attention
from gattn.bias import Bias
from gattn.errors import InputError, InputTypeError, check_at_least
from gattn.graphs import CompleteGraph, Graph, as_graph
from gattn.nn.shared.declared import Declared
from gattn.nn.shared.dtypes import check_dtype
from gattn.nn.shared.linear import through
from gattn.nn.transformers import nested
from gattn.nn.transformers.graph_positions import with_positions
from gattn.nn.transformers.key_value_cache import KeyValueCache
from gattn.nn.transformers.positional import RelativePosition, RotaryPositionalEncoding
from gattn.nn.transformers.torch_masks import check_mask, is_causal_mask, mask_terms
from gattn.ops.dropout import check_probability
from gattn.products import linear
from gattn.torch_private import NonDynamicallyQuantizableLinear, is_readable, no_hook

__all__ = ["KeyValueCache", "MultiheadAttention"]

#: Attention weights: one tensor, or for a packed graph one tensor per block.
Weights: TypeAlias = Tensor | list[Tensor]


class _OfTorch(torch.nn.MultiheadAttention):
    """PyTorch's class, for tools that look for it (LoRA, pruning, users' `isinstance`), without its parameters."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)


class MultiheadAttention(Declared, Attention, _OfTorch):
    r"""Multi-head attention of `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_, over any graph.

    .. math::
        \mathrm{head}_h = \mathrm{softmax}\left(\frac{Q W^Q_h (K W^K_h)^{\top}}{\sqrt{C}}\right) V W^V_h, \qquad
        \mathrm{out} = [\mathrm{head}_1, \ldots, \mathrm{head}_H] W^O

    This is a drop-in replacement for `torch.nn.MultiheadAttention` with the same arguments, parameter names and
    results. In addition it has `graph=` (which query attends to which key), grouped queries, query-key normalisation,
    positions inside attention, and a cache. It differs in two ways: the output of a query that may not attend to any
    key is zero instead of NaN, and `is_causal=True` needs no `attn_mask`.

    Args:
        embed_dim: The number of channels of the model, E.
        num_heads: The number of heads, H. Each has C = E / H channels.
        dropout: The probability of dropping an attention weight during training. (default: `0.0`)
        bias: Whether the projections have a bias. (default: `True`)
        add_bias_kv: Whether to append a learnt key and value. (default: `False`)
        add_zero_attn: Whether to append a key and value of zeros. (default: `False`)
        kdim: The number of channels of the key. (default: `None`, E)
        vdim: The number of channels of the value. (default: `None`, E)
        batch_first: Whether tensors are `[B, T, E]` rather than `[T, B, E]`. (default: `False`)
        device: The device of the parameters. (default: `None`)
        dtype: The type of the parameters. (default: `None`)
        num_kv_heads: The number of heads of key and value, a divisor of H (`grouped queries
            <https://arxiv.org/abs/2305.13245>`_). (default: `None`, H)
        qk_norm: Whether to normalise the queries and keys of each head by their root mean square, with a learnt scale.
            (default: `False`)
        position: Positions inside attention: `RotaryPositionalEncoding`, `ALiBi` or `RelativePositionBias`.
            (default: `None`)

    Shapes:
        - **input:** query `[N, B, E]`, key `[M, B, kdim]` and value `[M, B, vdim]`. With `batch_first`, they are
          `[B, N, E]`, `[B, M, kdim]` and `[B, M, vdim]`, and may be nested tensors of either layout, whose N and M are
          ragged. Without a batch, they are `[N, E]`, `[M, kdim]` and `[M, vdim]`.
        - **output:** the output in the shape of the query, and weights `[B, N, M]`, or `[B, H, N, M]` with
          `average_attn_weights=False`.

    Raises:
        ValueError: If `embed_dim` is not a multiple of `num_heads`, or an option is out of range. Code that catches the
            error of PyTorch's layer catches this one as well (see `gattn.errors.InputError`).
        TypeError: If `position` is something else, such as a name.

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

    aggr_module: Any
    _explain: bool | None
    bias_k: Parameter | None
    bias_v: Parameter | None

    _shown = "embed_dim num_heads="

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
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_at_least(1, embed_dim=embed_dim, num_heads=num_heads, num_kv_heads=num_kv_heads)
        if embed_dim % num_heads != 0:
            raise InputError(
                f"embed_dim counts all heads together, so it must be a multiple of num_heads: {embed_dim} is not one "
                f"of {num_heads}."
            )
        if num_heads % num_kv_heads != 0:
            raise ValueError(f"num_kv_heads must divide num_heads={num_heads}; got {num_kv_heads}.")
        check_probability("dropout", dropout)
        if not (position is None or isinstance(position, RotaryPositionalEncoding | RelativePosition)):
            raise TypeError(
                "position must be None, a RotaryPositionalEncoding or a RelativePosition, such as gattn.nn.ALiBi(8); "
                f"got {position!r}. Encodings of other kinds are added to the features before the layer."
            )
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
        self.out_proj = NonDynamicallyQuantizableLinear(embed_dim, embed_dim, bias=bias, **factory)
        for name in ("bias_k", "bias_v"):
            self.register_parameter(name, Parameter(torch.empty(1, 1, kv_channels, **factory)) if add_bias_kv else None)
        self.q_norm = torch.nn.RMSNorm(self.head_dim, **factory) if qk_norm else None
        self.k_norm = torch.nn.RMSNorm(self.head_dim, **factory) if qk_norm else None
        # PyTorch's encoder layer replaces this layer with a kernel of its own, unless a submodule has a hook.
        self.aggr_module.register_forward_pre_hook(no_hook)
        self._reset_parameters()

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """Whether the projections are one parameter, `in_proj_weight`. Tools read this attribute of PyTorch's layer."""
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
        """Resets all parameters as PyTorch does."""
        super().reset_parameters()
        self._reset_parameters()

    def forward(  # type: ignore[override]  # packed graphs have several matrices of weights
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
        graph: Adj | Graph | None = None,
        cache: KeyValueCache | None = None,
        static_kv: bool | None = None,
        attn_bias: Bias | None = None,
    ) -> tuple[Tensor, Weights | None]:
        """Attends from each query to the keys that the graph and the masks allow.

        Args:
            query: The queries, `[N, B, E]`, `[B, N, E]` with `batch_first`, or `[N, E]` without a batch.
            key: The keys, `[M, B, kdim]`, `[B, M, kdim]` or `[M, kdim]`.
            value: The values, `[M, B, vdim]`, `[B, M, vdim]` or `[M, vdim]`.
            key_padding_mask: Which keys to ignore, `[B, M]` or `[M]`: booleans (True means that no query may attend to
                this key), or numbers that are added to the logits. (default: `None`)
            need_weights: Whether to return the attention weights as well, after dropout as in PyTorch.
                (default: `True`)
            attn_mask: Which pairs to ignore, `[N, M]` or `[B * H, N, M]`: booleans (True means that this query may
                *not* attend to this key), or numbers that are added to the logits. (default: `None`)
            average_attn_weights: Whether to return the mean of the weights over heads. (default: `True`)
            is_causal: Whether a query attends only to keys up to its own position, the last query to all keys (as
                decoding with a cache requires). With an `attn_mask`, the mask alone counts. (default: `False`)
            graph: Which query attends to which key, in any form that `gattn.attend` takes. Masks apply in addition.
                (default: `None`, every query to every key)
            cache: The keys and values of earlier tokens, to which those of `key` and `value` are appended, or those of
                an encoder's output. (default: `None`)
            static_kv: With a cache, whether `key` and `value` are an encoder's output, whose projections are stored in
                the first call and used in all later ones. (default: `None`, no if `query` and `key` are equal, yes if
                there are more or fewer keys than queries)
            attn_bias: What is added to the logits, as a value that needs no `[N, M]` tensor: a number for each edge
                and head is `gattn.SparseBias(edge_index, values)`, on any graph that has these edges, and one for each
                distance is a `gattn.BucketBias`. It cannot be combined with masks of numbers or a position that is a
                bias. (default: `None`)

        Returns:
            The output, in the shape of the query, and the weights, or `None` without `need_weights`. The weights are
            `[B, N, M]`, and without averaging `[B, H, N, M]`. On a graph of edges they are `[B, E]` or `[B, E, H]` (E
            edges, in the order of the `edge_index`), and on a packed graph a list with one tensor per block. For nested
            tensors, the output is nested, and the weights are those of the padded batch, with zeros beyond the lengths.
            Nested tensors cannot be combined with masks other than `is_causal`, or with a cache.

        Raises:
            ValueError: If shapes, masks, graph and options do not fit each other, or `static_kv` has to be given. The
                message says which.
        """
        if static_kv is not None and cache is None:
            raise InputError("static_kv says what a cache keeps, so it needs one: pass cache, or leave out static_kv.")
        if nested.is_nested(query, key, value):
            if attn_bias is not None:
                raise InputError("nested tensors take no attn_bias: pass a packed graph.")
            graph = nested.packed_graph(self, query, key, value, graph, attn_mask, key_padding_mask, is_causal, cache)
            return self._forward_nested(query, key, value, graph, need_weights, average_attn_weights, is_causal)
        self._check_inputs(query, key, value)
        check_mask("attn_mask", attn_mask)
        check_mask("key_padding_mask", key_padding_mask)
        # The mask counts, but there are faster kernels for a causal one.
        is_causal = is_causal and (attn_mask is None or is_causal_mask(attn_mask))
        transposed = query.dim() == 3 and not self.batch_first
        grows_cache = cache is not None and not _is_static(query, key, static_kv, int(self.batch_first))
        q, k, v = self._project(query, key, value, transposed, None if grows_cache else cache)
        num_targets, num_new = q.size(-3), k.size(-3)
        first, num_sources, window = 0, num_new, None
        if cache is not None and grows_cache:
            first, num_sources = cache.length(self), cache.num_visible(self) + num_new
            if cache.window is not None and cache.window < num_sources - 1:
                window = cache.window, 0 if is_causal else num_targets
        resolved: Graph = CompleteGraph(num_targets, num_sources, window=window)
        if graph is not None:
            resolved = as_graph(graph, sharded=True).resolve(num_sources, num_targets)
        if isinstance(self.position, RotaryPositionalEncoding):
            q = self.position(q, resolved.positions("target", first + num_new - num_targets, num_targets, q.device))
            k = self.position(k, resolved.positions("source", first, num_new, k.device))
        if cache is not None and grows_cache:
            k, v = cache.append(self, k, v)
        size = (num_targets, num_sources if resolved.num_all_sources is None else resolved.num_all_sources)
        resolved, bias, mask = mask_terms(
            resolved, attn_mask, key_padding_mask, is_causal, q.shape[:-3], self.num_heads, size
        )
        if self.bias_k is not None or self.add_zero_attn:
            k, v, resolved, bias, mask = self._append_learnt(k, v, resolved, bias, mask)
        given: Tensor | Bias | None = bias
        if attn_bias is not None:
            if not isinstance(attn_bias, Bias):
                raise InputTypeError(
                    f"attn_bias must be a gattn.Bias; got {type(attn_bias).__name__}. A tensor is an attn_mask."
                )
            if bias is not None or isinstance(self.position, RelativePosition):
                raise InputError(
                    "attn_bias cannot be added to masks of numbers or to a position that is a bias: pass one of them."
                )
            given = attn_bias
        elif isinstance(self.position, RelativePosition):
            given = with_positions(bias, self.position, resolved, self.num_heads, q.device)
        result = self.attend(
            q,
            k,
            v,
            resolved,
            bias=given,
            mask=mask,
            dropout=self.dropout,
            return_weights="dropped" if need_weights else False,
        )
        out, weights = (result, None) if isinstance(result, Tensor) else result
        out = out.flatten(-2)
        if out.dtype != q.dtype:  # masks in single precision turn the output into it
            out = out.to(q.dtype)
        out = through(self.out_proj, out.transpose(0, 1) if transposed else out)
        if weights is None:
            return out, None
        heads_dim = resolved.heads_dim if average_attn_weights else None
        return out, _finish_weights(weights, q.dtype, heads_dim)

    def _forward_nested(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        graph: Graph,
        need_weights: bool,
        average_attn_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Weights | None]:
        """Attends on a packed graph of the sequences in nested tensors."""
        flat = {id(x): nested.flatten(x) for x in (query, key, value)}
        q, k, v = (flat[id(x)] for x in (query, key, value))
        out, weights = self.forward(q, k, v, None, need_weights, None, average_attn_weights, is_causal, graph=graph)
        if isinstance(weights, list):
            heads = () if average_attn_weights else (self.num_heads,)
            weights = nested.pad_weights(weights, out.new_zeros(0, *heads, 0, 0))
        return nested.restore(out, query), weights

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        named = (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim))
        is_one = query is key and key is value and self.in_proj_weight is not None
        for name, x, channels in named[:1] if is_one else named:
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a tensor; got {type(x).__name__}.")
            if x.dim() != query.dim() or x.dim() not in (2, 3):
                raise InputError(
                    f"query, key and value must be [T, E], or all {'[B, T, E]' if self.batch_first else '[T, B, E]'}; "
                    f"got {name} of shape {list(x.shape)}."
                )
            if x.size(-1) != channels:
                raise InputError(f"{name} has {x.size(-1)} channels, but this layer was made for {channels}.")
        check_dtype(self, query=query)  # a cache may have the projections of key and value
        if is_one:
            return
        if key.shape[:-1] != value.shape[:-1]:
            raise InputError(f"each key must have one value; got keys {list(key.shape)}, values {list(value.shape)}.")
        batch = 0 if self.batch_first else 1
        if query.dim() == 3 and query.size(batch) != key.size(batch):
            hint = "" if self.batch_first else " (this layer expects [T, B, E]: was batch_first=True meant?)"
            raise InputError(
                f"query and key must have the same batch size, but their shapes are {list(query.shape)} and "
                f"{list(key.shape)}{hint}."
            )

    def _project(
        self, query: Tensor, key: Tensor, value: Tensor, transposed: bool, memory_cache: KeyValueCache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[..., N, H, C]`, and keys and values `[..., M, H, C]`, which the cache keeps if there is one."""
        if memory_cache is not None:
            q = self._project_query(query, transposed)
            return q, *memory_cache.keep(self, lambda: self._project_memory(key, value, transposed))
        if query is key and key is value and self.in_proj_weight is not None:
            projected = self._heads(linear(query, self.in_proj_weight, self._in_bias()), transposed)
            q, k, v = projected.split_with_sizes([self.num_heads, self.num_kv_heads, self.num_kv_heads], -2)
            return self._normalise(q, self.q_norm), self._normalise(k, self.k_norm), v
        return self._project_query(query, transposed), *self._project_memory(key, value, transposed)

    def _project_query(self, query: Tensor, transposed: bool) -> Tensor:
        weight = self.q_proj_weight if self.in_proj_weight is None else self.in_proj_weight[: self.embed_dim]
        bias = self._in_bias(slice(self.embed_dim))
        return self._normalise(self._heads(linear(query, weight, bias), transposed), self.q_norm)

    def _project_memory(self, key: Tensor, value: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
        check_dtype(self, key=key, value=value)
        bias = self._in_bias(slice(self.embed_dim, None))
        if self.in_proj_weight is not None and key is value:
            k, v = torch.split(linear(key, self.in_proj_weight[self.embed_dim :], bias), self._splits[1:], -1)
        else:
            weights: tuple[Tensor, ...] = (self.k_proj_weight, self.v_proj_weight)
            if self.in_proj_weight is not None:
                weights = torch.split(self.in_proj_weight[self.embed_dim :], self._splits[1:])
            biases = (None, None) if bias is None else torch.split(bias, self._splits[1:])
            k, v = linear(key, weights[0], biases[0]), linear(value, weights[1], biases[1])
        return self._normalise(self._heads(k, transposed), self.k_norm), self._heads(v, transposed)

    def _in_bias(self, part: slice | None = None) -> Tensor | None:
        """The bias of the projections, or a part, in the type of their weights, which may differ from its own."""
        bias, weight = self.in_proj_bias, self.q_proj_weight if self.in_proj_weight is None else self.in_proj_weight
        if bias is None:
            return None
        chosen = bias if part is None else bias[part]
        return chosen if chosen.dtype == weight.dtype else chosen.to(weight.dtype)

    def _heads(self, x: Tensor, transposed: bool) -> Tensor:
        x = x.view(*x.shape[:-1], x.size(-1) // self.head_dim, self.head_dim)  # which costs half of unflatten()
        return x.transpose(0, 1) if transposed else x

    @staticmethod
    def _normalise(x: Tensor, norm: Module | None) -> Tensor:
        if norm is None:
            return x
        normalised: Tensor = norm(x)
        return normalised

    def _append_learnt(
        self, k: Tensor, v: Tensor, graph: Graph, bias: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Graph, Tensor | None, Tensor | None]:
        """Appends the learnt key and value, and the zeros, to which every target attends."""
        if self.position is not None:
            raise ValueError("add_bias_kv and add_zero_attn append keys that are no nodes, and have no positions.")
        extra = []
        if self.bias_k is not None and self.bias_v is not None:
            extra.append([self._heads(x.expand(*k.shape[:-3], 1, -1), False) for x in (self.bias_k[0], self.bias_v[0])])
        if self.add_zero_attn:
            shape = (*k.shape[:-3], 1, *k.shape[-2:])
            extra.append([k.new_zeros(shape), v.new_zeros(shape)])
        more, seen = graph.with_more_sources(len(extra), k.device)
        mask = seen if mask is None else F.pad(mask, (0, len(extra)), value=True) & seen
        bias = None if bias is None else F.pad(bias.expand(*bias.shape[:-1], k.size(-3)), (0, len(extra)))
        k, v = (torch.cat([x, *(pair[side] for pair in extra)], -3) for side, x in enumerate((k, v)))
        return k, v, more, bias, mask


def _is_static(query: Tensor, key: Tensor, static_kv: bool | None, time: int) -> bool:
    """Whether keys are those of an encoder's output, and not those of the queries' own tokens.

    Whether tensors are the same object says nothing: hooks of the module may have copied them.
    """
    if static_kv is not None or query is key:
        return bool(static_kv)
    if query.dim() == 2:
        time = 0
    if query.size(time) != key.size(time):
        return True
    if query.shape == key.shape and is_readable(query) and is_readable(key) and torch.equal(query, key):
        return False
    raise InputError(
        "with a cache and as many keys as queries, it cannot be known whether they are the same tokens, whose keys are "
        "appended to the cache (static_kv=False), or an encoder's output, whose keys never change (static_kv=True): "
        "pass static_kv."
    )


def _finish_weights(weights: Weights, dtype: torch.dtype, heads_dim: int | None) -> Weights:
    """The weights in this type, averaged over the dimension of heads unless it is `None`."""
    matrices = [x.to(dtype) for x in (weights if isinstance(weights, list) else [weights])]
    if heads_dim is not None:
        matrices = [x.mean(heads_dim) for x in matrices]
    return matrices if isinstance(weights, list) else matrices[0]
