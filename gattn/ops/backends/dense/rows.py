"""The softmax of dot products with a bias, for a few targets at a time, without a tensor of all pairs.

The forward pass keeps the output and the log-sum-exp of each target, from which the backward pass computes the weights
of a few targets again:

    P_ij = exp(s_ij + b_ij - L_i),    ds_ij = db_ij = P_ij (dP_ij - D_i),    D_i = <dout_i, out_i> - dL_i

where dP_ij = <dout_i, v_j>, and dL_i is the gradient of the log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gattn.bias import Bias, Buckets
from gattn.ops.backends.cpu import buckets
from gattn.ops.backends.dense.ragged import crop
from gattn.ops.chunks import chunk_sizes
from gattn.torch_private import is_batched

__all__ = ["Reach", "Rule", "Whole", "attend", "backward", "delta_of", "differentiate_twice", "forward", "held_by"]

#: The number of logits at a time, which fit into the cache.
_LOGITS = 2**20


class Reach(NamedTuple):
    """How far before and after its own position a target sees; `None` means no limit."""

    left: int | None
    right: int | None
    offset: int
    """The position of target 0"""
    positions: Tensor | None = None
    """The positions of targets that are not consecutive, in ascending order"""

    def sources(self, targets: slice, num_sources: int) -> slice:
        """The sources that some of these targets see."""
        if self.positions is None:
            start, stop = targets.start + self.offset, targets.stop + self.offset
        else:
            start, stop = int(self.positions[targets.start]), int(self.positions[targets.stop - 1]) + 1
        first = 0 if self.left is None else min(max(start - self.left, 0), num_sources)
        last = num_sources if self.right is None else stop + self.right
        return slice(first, min(max(last, first), num_sources))

    def hidden(self, targets: slice, sources: slice, device: torch.device) -> Tensor | None:
        """Which of these sources the targets do not see, `[n, m]`; `None` if they see all."""
        if self.left is None and self.right is None:
            return None
        if self.positions is None:
            target = torch.arange(targets.start, targets.stop, device=device) + self.offset
        else:
            target = self.positions[targets]
        distance = torch.arange(sources.start, sources.stop, device=device) - target.unsqueeze(1)
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if self.left is not None:
            hidden |= distance < -self.left
        if self.right is not None:
            hidden |= distance > self.right
        return hidden


class Whole(Bias):
    """A tensor as a bias, broadcastable to `[B, H, N, M]`."""

    def __init__(self, bias: Tensor):
        self.bias = bias

    def tensors(self) -> tuple[Tensor, ...]:
        """See `Bias.tensors`."""
        return (self.bias,)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Whole:
        """See `Bias.with_tensors`."""
        return Whole(*tensors)

    def part(self, targets: slice, sources: slice) -> Tensor:
        """See `Bias.part`."""
        return crop(crop(self.bias, 2, targets.start, targets.stop), 3, sources.start, sources.stop)

    def add_gradient(self, grads: Sequence[Tensor], targets: slice, sources: slice, grad: Tensor) -> None:
        """See `Bias.add_gradient`."""
        to = Whole(grads[0]).part(targets, sources)
        to += grad.sum_to_size(to.shape)


def held_by(bias: Bias) -> dict[str, Tensor]:
    """The tensors that a bias holds, by the names of its attributes: those with gradients, and buckets or pairs."""
    return {name: x for name, x in vars(bias).items() if isinstance(x, Tensor)}


class Rule(NamedTuple):
    """What the logits are, beside query and key."""

    scale: float
    bias: Bias
    mask: Tensor | None
    """True = may attend, broadcastable to `[B, H, N, M]`"""
    reach: Reach

    def save(self, ctx: Any, *tensors: Tensor) -> None:
        """Saves tensors, and with them those that the rule reads again: autograd notices if they are edited."""
        of_bias = self.bias.tensors()
        held = {name: x for name, x in held_by(self.bias).items() if not x.is_inference()}
        held = {name: x for name, x in held.items() if not any(x is other for other in of_bias)}
        mask = None if self.mask is None or self.mask.is_inference() else self.mask
        ctx.rule, ctx.held = self, tuple(held)
        ctx.save_for_backward(*tensors, *of_bias, mask, *held.values())

    @staticmethod
    def saved(ctx: Any) -> tuple[Rule, list[Tensor], list[Tensor]]:
        """The rule, the tensors that were saved beside it, and those of its bias that have gradients."""
        rule: Rule = ctx.rule
        tensors = list(ctx.saved_tensors)
        held = [tensors.pop() for _ in ctx.held][::-1]
        mask = tensors.pop()
        of_bias = [tensors.pop() for _ in rule.bias.tensors()][::-1]
        bias = copy(rule.bias)
        vars(bias).update(zip(ctx.held, held, strict=True))
        rule = rule._replace(bias=bias.with_tensors(of_bias), mask=rule.mask if mask is None else mask)
        return rule, tensors, of_bias


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Bias, mask: Tensor | None, reach: Reach
) -> tuple[Tensor, Tensor]:
    """The output, `[B, N, H, V]`, and the log-sum-exp of each target, `[B, N, H]`; zeros and -inf if it sees nothing.

    Args:
        query: `[B, N, H, C]`, in the type of the computation, like all tensors.
        key: `[B, M, H, C]`.
        value: `[B, M, H, V]`.
        scale: What products are multiplied by.
        bias: The bias of all elements of the batch.
        mask: True = may attend, broadcastable to `[B, H, N, M]`.
        reach: How far targets see.
    """
    out, log_sum = _Rows.apply(query, key, value, Rule(scale, bias, mask, reach), *bias.tensors())
    return out, log_sum


def _chunks(num_targets: int, pairs_of_one: int) -> Iterator[slice]:
    """All targets, some at a time."""
    sizes = chunk_sizes(num_targets, max(_LOGITS // max(pairs_of_one, 1), 1))
    for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
        yield slice(start, start + size)


def _logits(query: Tensor, key: Tensor, rule: Rule, targets: slice, sources: slice) -> Tensor:
    """The logits of some targets, `[B, H, n, m]`, given queries times the scale `[B, H, n, C]` and keys."""
    logits = query @ key.mT
    bias = rule.bias
    if not torch.is_grad_enabled() and isinstance(bias, Buckets) and buckets.can_add(bias, logits):
        logits = buckets.add(bias, targets, sources, logits)
    else:
        part = bias.whole_part(targets, sources)
        logits = logits + part if torch.is_grad_enabled() else logits.add_(part)
    hidden = rule.reach.hidden(targets, sources, logits.device)
    if rule.mask is not None:
        allowed = Whole(rule.mask).part(targets, sources)
        hidden = ~allowed if hidden is None else hidden | ~allowed
    return logits if hidden is None else logits.masked_fill(hidden, -torch.inf)


def forward(query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """What `attend` returns, without gradients."""
    num_targets, num_sources = query.size(1), key.size(1)
    keys, values = (x.transpose(1, 2).contiguous() for x in (key, value))
    out = value.new_zeros(*query.shape[:3], value.size(-1))
    log_sum = query.new_full(query.shape[:3], -torch.inf)
    for targets in _chunks(num_targets, len(query) * query.size(2) * num_sources):
        sources = rule.reach.sources(targets, num_sources)
        if sources.stop == sources.start:
            continue
        queries = query[:, targets].transpose(1, 2) * rule.scale
        logits = _logits(queries, keys[:, :, sources], rule, targets, sources)
        most = logits.amax(-1, keepdim=True)
        most = most.masked_fill_(most == -torch.inf, 0.0)
        weights = logits.sub_(most).exp_()
        total = weights.sum(-1, keepdim=True)
        sums = weights @ values[:, :, sources] / total.masked_fill(total == 0.0, 1.0)
        out[:, targets] = sums.transpose(1, 2)
        log_sum[:, targets] = (most + total.log()).squeeze(-1).transpose(1, 2)
    return out, log_sum


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: Rule,
    log_sum: Tensor,
    grad: Tensor,
    delta: Tensor,
    grads: Sequence[Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value.

    Args:
        query: See `attend`, like the next arguments.
        key: See there.
        value: See there.
        rule: What the logits are.
        log_sum: What the forward pass returned.
        grad: The gradient of the output.
        delta: The number D of each target, `[B, N, H]`.
        grads: To these, the gradients of the bias's tensors are added; `None` if they are not needed.
    """
    num_targets, num_sources = query.size(1), key.size(1)
    keys, values = (x.transpose(1, 2).contiguous() for x in (key, value))
    grad_query, grad_keys, grad_values = (torch.zeros_like(x) for x in (query, keys, values))
    for targets in _chunks(num_targets, len(query) * query.size(2) * num_sources):
        sources = rule.reach.sources(targets, num_sources)
        if sources.stop == sources.start:
            continue
        queries = query[:, targets].transpose(1, 2) * rule.scale
        of_out = grad[:, targets].transpose(1, 2).contiguous()
        base, of_delta = (x[:, targets].transpose(1, 2).unsqueeze(-1) for x in (log_sum, delta))
        base = base.masked_fill(base == -torch.inf, torch.inf)
        weights = _logits(queries, keys[:, :, sources], rule, targets, sources).sub_(base).exp_()
        of_logits = (of_out @ values[:, :, sources].mT).sub_(of_delta).mul_(weights)
        grad_values[:, :, sources] += weights.mT @ of_out
        grad_query[:, targets] = (of_logits @ keys[:, :, sources] * rule.scale).transpose(1, 2)
        grad_keys[:, :, sources] += of_logits.mT @ queries
        if grads is None:
            continue
        if isinstance(rule.bias, Buckets) and buckets.can_add(rule.bias, of_logits):
            buckets.add_gradient(rule.bias, grads[0], targets, sources, of_logits)
        else:
            rule.bias.add_gradient(grads, targets, sources, of_logits)
    return grad_query, grad_keys.transpose(1, 2), grad_values.transpose(1, 2)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, rule: Rule, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, log_sum = forward(query, key, value, rule)
        rule.save(ctx, query, key, value, out, log_sum)
        return out, log_sum

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_log_sum: Tensor) -> tuple[Tensor | None, ...]:
        rule, (query, key, value, out, log_sum), tensors = Rule.saved(ctx)
        if torch.is_grad_enabled() or is_batched(grad):
            found = differentiate_twice(query, key, value, rule, tensors, grad, grad_log_sum)
            return *found[:3], None, *found[3:]
        grads = [torch.zeros_like(tensor) for tensor in tensors] if any(ctx.needs_input_grad[4:]) else None
        delta = delta_of(grad, out, grad_log_sum, log_sum)
        of_nodes = backward(query, key, value, rule, log_sum, grad, delta, grads)
        of_bias: Sequence[Tensor | None] = [None] * len(tensors) if grads is None else grads
        return *of_nodes, None, *of_bias


def delta_of(grad: Tensor, out: Tensor, grad_log_sum: Tensor, log_sum: Tensor) -> Tensor:
    """The number D of each target; targets that see nothing have no gradients."""
    return (grad * out).sum(-1) - grad_log_sum.masked_fill(log_sum == -torch.inf, 0.0)


def differentiate_twice(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: Rule,
    tensors: Sequence[Tensor],
    grad: Tensor,
    grad_log_sum: Tensor,
) -> tuple[Tensor | None, ...]:
    """The gradients of query, key, value and the bias's tensors, by operations that have gradients themselves."""
    with torch.enable_grad():
        leaves = [x.view_as(x) for x in (query, key, value, *tensors)]  # views, so that differentiation stops here
        leaves = [x if x.requires_grad else x.requires_grad_() for x in leaves]
        queries, keys, values = (x.transpose(1, 2) for x in leaves[:3])
        rule = rule._replace(bias=rule.bias.with_tensors(leaves[3:]))
        everything = slice(0, query.size(1)), slice(0, key.size(1))
        logits = _logits(queries * rule.scale, keys, rule, *everything)
        empty = (logits == -torch.inf).all(-1, keepdim=True)
        logits = logits.masked_fill(empty, 0.0)
        out = (logits.softmax(-1).masked_fill(empty, 0.0) @ values).transpose(1, 2)
        log_sum = logits.logsumexp(-1).masked_fill(empty.squeeze(-1), 0.0).transpose(1, 2)
        given = [grad, grad_log_sum]
        return torch.autograd.grad([out, log_sum], leaves, given, create_graph=True, allow_unused=True)
