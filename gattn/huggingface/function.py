"""The attention function that `transformers` knows as `"gattn"`.

Dimensions: B texts, N targets, M sources, H heads, C channels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from gattn.attention import attend
from gattn.distributions import Softmax
from gattn.errors import InputError
from gattn.graphs import CompleteGraph
from gattn.huggingface.masks import GraphMask
from gattn.huggingface.positions import PositionBias
from gattn.huggingface.swapped import swapped
from gattn.recording import is_watched
from gattn.scores import DotScore

try:  # where models say which layers' weights they gather
    from transformers.utils.output_capturing import _active_collector as _collector
except ImportError:
    _collector = None

__all__ = ["IGNORED", "attention"]

#: Arguments that models pass and that change nothing here, with the reason.
IGNORED = {
    "cache_position": "masks and keys say where the targets are",
    "deterministic": "gattn's results are the same on every run",
    "max_length_k": "it follows from cu_seq_lens_k",
    "max_length_q": "it follows from cu_seq_lens_q",
    "num_items_in_batch": "it is for losses",
    "output_hidden_states": "it is for models",
    "output_router_logits": "it is for models",
    "position_embeddings": "layers have applied them",
    "position_ids": "masks were made from them",
    "return_dict": "it is for models",
    "seq_idx": "masks were made from position_ids",
    "use_cache": "layers have applied it",
}

#: Of layers that attend to nothing but their own `hidden_states`, the arguments of `forward`.
_OWN = {"self", "hidden_states", "attention_mask", "position_embeddings", "position_ids", "position_bias", "head_mask"}
_OWN |= {"cache", "past_key_values", "past_key_value", "cache_position", "use_cache", "output_attentions", "kwargs"}
_OWN |= {"layer_past", "layer_idx", "rel_pos_bias", "cu_seqlens", "max_seqlen", "rotary_pos_emb"}


def attention(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | GraphMask | None,
    scaling: float | Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Any = None,
    sliding_window: int | None = None,
    head_mask: Tensor | None = None,
    indices: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    output_attentions: bool | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention as layers of `transformers` call it.

    Args:
        module: The layer.
        query: `[B, H, N, C]`.
        key: `[B, G, M, C]`, where the number of heads G divides H.
        value: `[B, G, M, Cv]`.
        attention_mask: What `graph_mask` made, or a tensor: Boolean, or one that is added to the logits.
        scaling: The factor of the products. (default: `None`, 1/√C)
        dropout: Probability of dropping a weight, in training mode. (default: `0.0`)
        is_causal: Whether targets see only sources up to their own, if there is no mask. (default: `None`, what the
            layer's attribute says)
        softcap: The bound of the logits. (default: `None`)
        s_aux: The logit of each head's sink, `[H]`. (default: `None`)
        sinks: The logit of each target's own sink, `[B, H, N, 1]`. (default: `None`)
        position_bias: Added to the logits. (default: `None`)
        sliding_window: How many sources a target sees if there is no mask. (default: `None`)
        head_mask: The factor of each head's weights. (default: `None`)
        indices: The only sources that each target may see, `[B, N, K]`. (default: `None`)
        cu_seq_lens_q: Where each of several packed texts starts, if there is no mask. (default: `None`)
        cu_seq_lens_k: Likewise for sources. (default: `None`)
        output_attentions: Whether to return the weights. (default: `None`, what the model's configuration says)
        **others: `IGNORED` ones, which change nothing.

    Returns:
        The output `[B, N, H, Cv]`, and the weights `[B, H, N, M]` or `None`.

    Raises:
        ValueError: If there is an argument that is not known, or one that cannot be honoured with another.

    Example:
        >>> import torch
        >>> from gattn.huggingface import attention, graph_mask
        >>> x = torch.randn(1, 2, 5, 4)  # 1 text, 2 heads, 5 tokens, 4 channels
        >>> out, _ = attention(torch.nn.Identity(), x, x, x, graph_mask(1, 5, 5))
        >>> out.shape
        torch.Size([1, 5, 2, 4])
    """
    for name, given in others.items():
        if given is not None and name not in IGNORED:
            raise InputError(
                f"{type(module).__name__} passes {name} to its attention function, which gattn.huggingface does not "
                "know: use another attn_implementation for this model."
            )
    n, m = query.size(2), key.size(2)
    batch = max(query.size(0), key.size(0))
    query, key, value = (x.expand(batch, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
    if isinstance(scaling, Tensor):
        query, scaling = query * scaling, 1.0
    options: dict[str, Any] = {"score": DotScore(scaling), "training": module.training}
    options["dropout"] = float(dropout) if module.training else 0.0
    if s_aux is not None or softcap is not None:
        options["distribution"] = Softmax(None if s_aux is None else s_aux.reshape(-1), softcap)
    if output_attentions is None:
        output_attentions = _asks_for_weights(module)
    swap = swapped()
    if swap is not None and _attends_to_itself(module, attention_mask, n, m):
        keep = attention_mask.keep if isinstance(attention_mask, GraphMask) else None
        graph = swap.of(module, keep, batch, n, m)
        if graph is not None:
            _refuse(module, "under gattn.huggingface.graph", locals(), "sinks", "position_bias", "indices")
            if output_attentions:
                raise InputError("weights on another graph are gathered by gattn.record_attention(model).")
            return _scaled(_on_graph(query, key, value, graph, keep, options), head_mask), None
    bias: Any = position_bias.bias() if isinstance(position_bias, PositionBias) else position_bias
    whole = bool(output_attentions or isinstance(bias, Tensor) or indices is not None or sinks is not None)
    whole = whole or is_watched(module)
    mask = None
    if isinstance(attention_mask, GraphMask):
        plan = attention_mask.plan(m, _attends_to_itself(module, attention_mask, n, m), whole)
        graph, m, mask = plan.graph, plan.num_sources, plan.mask
        if plan.graph.blocks is not None:
            options["bias"] = bias
            return _scaled(_packed(query, key[:, :m], value[:, :m], plan, options), head_mask), None
    elif attention_mask is not None:
        graph = CompleteGraph(n, m)
        if attention_mask.dtype == torch.bool:
            mask = attention_mask[..., :m]
        else:
            bias = position_bias.tensor() if isinstance(position_bias, PositionBias) else bias
            bias = attention_mask[..., :m] if bias is None else bias + attention_mask[..., :m]
    else:
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        is_causal = bool(is_causal) and n > 1
        m = min(m, n) if is_causal else m  # PyTorch's flag aligns them at the top left
        window = None if sliding_window is None else (sliding_window - 1, 0 if is_causal else sliding_window - 1)
        if cu_seq_lens_q is not None and batch == 1:
            blocks = cu_seq_lens_q, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
            _refuse(module, "with cu_seq_lens_q", locals(), "sinks", "position_bias", "indices", "output_attentions")
            starts = {"ptr": blocks[0], "source_ptr": blocks[1]}
            graph = CompleteGraph.packed(**starts, causal=is_causal, window=window)
        else:
            graph = CompleteGraph(n, m, causal=is_causal, window=window)
    if indices is not None:
        chosen = torch.zeros(batch, 1, n, m + 1, dtype=torch.bool, device=key.device)
        places = indices.long().masked_fill((indices < 0) | (indices >= m), m).unsqueeze(1)
        chosen = chosen.scatter(-1, places, True)[..., :m]
        mask = chosen if mask is None else mask & chosen
    bias = bias[..., :m] if isinstance(bias, Tensor) else bias
    options |= {"mask": mask, "bias": bias, "return_lse": sinks is not None}
    options["return_weights"] = "dropped" if output_attentions else False
    found = attend(query, key[:, :m], value[:, :m], graph, **options)
    out, *more = found if isinstance(found, tuple) else (found,)
    weights = more[0] if output_attentions else None
    if sinks is not None:  # which take their part of the whole
        part = (more[-1] - sinks.squeeze(-1).transpose(1, 2)).sigmoid().to(out.dtype)
        out = out * part.unsqueeze(-1)
        weights = None if weights is None else weights * part.transpose(1, 2).unsqueeze(-1)
    if weights is not None:
        weights = F.pad(weights, (0, key.size(1) - m))
        weights = weights if head_mask is None else weights * head_mask
    return _scaled(out, head_mask), weights


def _asks_for_weights(module: Module) -> bool:
    """Whether the model gathers weights, which not all models tell their attention function."""
    gathered = None if _collector is None else _collector.get()
    if gathered:
        return any("attentions" in kind for kind in gathered)
    return bool(getattr(getattr(module, "config", None), "output_attentions", False))


def _attends_to_itself(module: Module, mask: Any, num_targets: int, num_sources: int) -> bool:
    """Whether targets are known to be the last of the sources."""
    if isinstance(mask, GraphMask) and mask.pattern is not None and mask.pattern.right == 0:
        return True
    if num_targets != num_sources:
        return False
    return getattr(module, "is_decoder", True) is False or _takes_one_sequence(type(module).forward)


@cache
def _takes_one_sequence(forward: Callable[..., Any]) -> bool:
    return set(inspect.signature(forward).parameters) <= _OWN


def _refuse(module: Module, where: str, given: dict[str, Any], *names: str) -> None:
    """Raises an error if arguments are given that cannot be honoured here."""
    for name in names:
        if given[name] is not None and given[name] is not False:
            raise InputError(f"{type(module).__name__} passes {name}, which cannot be honoured {where}.")


def _scaled(out: Tensor, head_mask: Tensor | None) -> Tensor:
    return out if head_mask is None else out * head_mask.reshape(-1, 1, head_mask.size(-3), 1)


def _packed(query: Tensor, key: Tensor, value: Tensor, plan: Any, options: dict[str, Any]) -> Tensor:
    """Attention on a packed graph of all texts; the output of padding is zero."""

    def chosen(x: Tensor, places: Tensor | None) -> Tensor:
        x = x.flatten(0, 1)
        return x if places is None else x.index_select(0, places)

    batch, n = query.shape[:2]
    tensors = chosen(query, plan.targets), chosen(key, plan.sources), chosen(value, plan.sources)
    out: Tensor = attend(tensors[0], tensors[1], tensors[2], plan.graph, **options)
    if plan.targets is not None:
        out = out.new_zeros(batch * n, *out.shape[1:]).index_copy(0, plan.targets, out)
    return out.view(batch, n, *out.shape[1:])


def _on_graph(
    query: Tensor, key: Tensor, value: Tensor, graph: Any, keep: Tensor | None, options: dict[str, Any]
) -> Tensor:
    """Attention on a graph of each text, or of all of them laid end to end."""
    batch, n = query.shape[:2]
    if batch > 1 and graph.num_targets == batch * n:
        tensors = [x.flatten(0, 1) for x in (query, key, value)]
        keep = None if keep is None else keep.flatten()
    else:
        tensors = [query, key, value]
    graph = graph.resolve(tensors[1].size(-3), tensors[0].size(-3))
    if keep is not None:
        graph, padding = graph.hide_padding(~keep, tensors[0].shape[:-3])
        if padding is not None:
            pairs = ~padding[..., None, None, :]
            if graph.blocks == ((n, n),) * batch:  # one for each text, which needs no matrix
                pairs = pairs.view(batch, 1, 1, n)
            else:
                pairs = graph.from_pairs(pairs if padding.dim() == 2 else pairs[0], query.size(-2))
            options = {**options, "mask": pairs}
    out: Tensor = attend(tensors[0], tensors[1], tensors[2], graph, **options)
    return out.view(batch, n, *out.shape[-2:])
