"""Dot products by PyTorch's own fused kernels."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.varlen import varlen_attn

from gattn.graphs import CompleteGraph
from gattn.ops import reference
from gattn.ops.call import Call
from gattn.scores import DotScore
from gattn.torch_private import (
    flash_attention_on_cpu,
    flash_attention_on_cpu_backward,
    is_lazy,
    resolved,
    scaled_dot_product_choice,
)

__all__ = ["by_pytorch", "is_packed_flash", "packed_flash"]

#: The devices on which PyTorch has attention for sequences of various lengths.
_PACKED = ("cuda",)


def is_packed_flash(call: Call) -> bool:
    """Whether PyTorch's attention for various lengths, a flash kernel, can compute this dot product."""
    query, key, value, graph = call.query, call.key, call.value, call.graph
    if not isinstance(graph, CompleteGraph) or graph.blocks is None or query is None:
        return False
    if value.device.type not in _PACKED or not (call.bias is None and call.mask is None) or call.dropout:
        return False
    if value.dtype not in (torch.float16, torch.bfloat16) or value.numel() * query.numel() == 0:
        return False
    if query.shape[2:] != value.shape[2:] or key.shape[2:] != value.shape[2:]:
        return False
    if value.is_cuda and torch.cuda.get_device_capability(value.device) < (8, 0):
        return False
    # Every target must see a source: flash kernels leave the result of others undefined.
    is_seen = all(m > 0 and (n <= m or graph.reach == (None, None)) for n, m in graph.blocks)
    return is_seen and value.size(-1) % 8 == 0 and value.size(-1) <= 256


def packed_flash(call: Call) -> Tensor:
    """The output of a packed graph, all blocks at once."""
    query, graph = call.query, call.graph
    assert isinstance(graph, CompleteGraph)
    assert graph.blocks is not None
    assert query is not None
    assert isinstance(call.score, DotScore)
    targets, sources = zip(*graph.blocks, strict=True)
    left, right = (-1 if side is None else side for side in graph.reach)
    out = varlen_attn(
        query.flatten(0, 1),
        call.key.flatten(0, 1),
        call.value.flatten(0, 1),
        _starts(targets, query.size(0), query.device),
        _starts(sources, query.size(0), query.device),
        max(targets),
        max(sources),
        scale=call.score.factor(call.channels),
        window_size=(left, right),
    )
    assert isinstance(out, Tensor)
    return torch.unflatten(out, 0, query.shape[:2])


@lru_cache(maxsize=64)
def _starts(sizes: tuple[int, ...], batch: int, device: torch.device) -> Tensor:
    """Where each block begins and the last one ends; for a batch, one element after another."""
    with torch.inference_mode(False):  # what is kept must also serve training
        return torch.tensor([0, *accumulate(sizes * batch)], dtype=torch.int32, device=device)


def by_pytorch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    bias: Tensor | None,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
) -> Tensor:
    """Attention `[B, N, H, C]` or `[N, H, C]` with a softmax of scaled dot products, of tensors with elements.

    Targets that see nothing get zeros.
    """
    terms, empty = None, None
    if bias is not None or mask is not None:
        terms, empty = _open_empty_rows(bias, mask)
        terms = terms.expand(*terms.shape[:2], query.size(-3), key.size(-3))
    grouped: dict[str, Any] = {"enable_gqa": True} if key.size(-2) != query.size(-2) else {}
    out = None
    if _may_be_flash_on_cpu(query, key, value):
        with torch.no_grad():
            views: Any = _heads_first(query, key, value)
        first, second, third = views
        choice = scaled_dot_product_choice(first, second, third, terms, dropout, causal, scale=scale, **grouped)
        if choice == SDPBackend.FLASH_ATTENTION.value:
            if terms is not None and terms.dtype == torch.bool:
                terms = torch.zeros_like(terms, dtype=query.dtype).masked_fill(~terms, -torch.inf)
            out = _Flash.apply(query, key, value, terms, causal, scale, views)
    if out is None:
        first, second, third = _heads_first(query, key, value)
        attended = F.scaled_dot_product_attention(first, second, third, terms, dropout, causal, scale=scale, **grouped)
        out = _nodes_first(attended, query.dim())
    return out if empty is None else out.masked_fill(empty.transpose(1, 2), 0.0)


def _heads_first(*tensors: Tensor) -> Any:
    """Tensors `[B, N, H, C]` or `[N, H, C]` as `[B, H, N, C]`."""
    if tensors[0].dim() == 4:
        return [x.transpose(1, 2) for x in tensors]
    return [x.transpose(0, 1).unsqueeze(0) for x in tensors]


def _nodes_first(x: Tensor, dim: int) -> Tensor:
    """The inverse of `_heads_first`."""
    x = x.transpose(1, 2)
    return x if dim == 4 else x.squeeze(0)


def _may_be_flash_on_cpu(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether gradients are needed, and PyTorch might call the kernel that `_Flash` wraps."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or query.device.type != "cpu":
        return False
    if not (query.requires_grad or key.requires_grad or value.requires_grad):
        return False
    return query.numel() * value.numel() > 0  # because the kernel divides by the sizes


def _flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum: Tensor,
    causal: bool,
    scale: float,
    terms: Tensor | None = None,
) -> Any:
    """PyTorch's fused backward pass, with heads first, for any strides: it reads channels one after another.

    Of the gradient alone, it makes a copy itself.
    """
    given = [query, key, value, out]
    for place, x in enumerate(given):
        if x.stride(-1) != 1 or is_lazy(x):
            given[place] = resolved(x).contiguous()
    grad, log_sum = resolved(grad), resolved(log_sum)
    terms = None if terms is None else resolved(terms)
    return flash_attention_on_cpu_backward(grad, *given, log_sum, 0.0, causal, attn_mask=terms, scale=scale)


class _Flash(torch.autograd.Function):
    """PyTorch's fused attention on the CPU. Its gradient has no gradient, so plain PyTorch computes that.

    Transposed views are made in here, where autograd has nothing to do with them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        terms: Tensor | None,
        causal: bool,
        scale: float,
        views: tuple[Tensor, Tensor, Tensor],
    ) -> Tensor:
        attended, log_sum = flash_attention_on_cpu(*views, 0.0, causal, attn_mask=terms, scale=scale)
        out = _nodes_first(attended, query.dim()).data  # no view, which nobody could change in place
        ctx.save_for_backward(query, key, value, out, log_sum, *([] if terms is None else [terms]))
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sum, *others = ctx.saved_tensors
        inputs, terms = (query, key, value), others[0] if others else None
        if not torch.is_grad_enabled():
            query, key, value, out, grad = _heads_first(*inputs, out, grad)
            grads = _flash_backward(grad, query, key, value, out, log_sum, ctx.causal, ctx.scale, terms)
            dim = inputs[0].dim()
            return *[_nodes_first(x, dim) for x in grads], None, None, None, None
        leaves = [x.view_as(x) for x in inputs]  # views, so that differentiation stops here
        leaves = [x if x.requires_grad else x.requires_grad_() for x in leaves]
        query, key, value = leaves
        logits = reference.products(query, key, ctx.scale)
        if ctx.causal:
            later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
            logits = logits.masked_fill(later, -torch.inf)
        if terms is not None:
            logits = logits + terms
        out = reference.weighted(logits.softmax(-1), value).to(grad.dtype)
        return *torch.autograd.grad(out, leaves, grad, create_graph=True), None, None, None, None


def _open_empty_rows(bias: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Bias and mask as one tensor, and which targets see nothing; these see everything here, as kernels require."""
    if bias is None:
        assert mask is not None
        empty = ~mask.any(-1, keepdim=True)
        return mask | empty, empty
    if mask is not None:
        bias = bias.masked_fill(~mask, -torch.inf)
    empty = (bias == -torch.inf).all(-1, keepdim=True)
    return bias.masked_fill(empty, 0.0), empty
