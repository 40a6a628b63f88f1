"""The softmax of dot products with a bias on some pairs: PyTorch's fused attention, corrected for these pairs.

With the fused output o_i and log-sum-exp L_i without any bias, and the listed pairs' logits s_ij, biases b_ij,

    w_ij = exp(s_ij - L_i) (exp(b_ij) - 1),    Z_i = 1 + Σ_j w_ij,    out_i = (o_i + Σ_j w_ij v_j) / Z_i

and log Z_i is added to L_i. Where listed pairs have most of a target's weight and their bias takes it away, that would
lose digits: such targets are computed by themselves, from all of their logits.

The backward pass calls the fused one with the final output and log-sum-exp, which gives the gradients that weights
P'_ij = exp(s_ij - L_i) would have. For the listed pairs, where the weights are P_ij = P'_ij exp(b_ij), the difference
is added: it is a sum over pairs, as in attention on a list of edges, and computed by the same kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from gattn.bias import Pairs
from gattn.graphs import FLOWS
from gattn.graphs.edge_lists import derived
from gattn.ops.backends.base import needs_plain_pytorch
from gattn.ops.backends.cpu import Cpu
from gattn.ops.backends.dense import rows
from gattn.ops.backends.dense.dot_products import flash_backward
from gattn.ops.backends.dense.rows import Reach, Rule
from gattn.ops.terms import Inputs
from gattn.torch_private import (
    flash_attention_on_cpu,
    is_batched,
    is_traced,
    scaled_dot_product_choice,
)

__all__ = ["attend", "can_attend"]

#: Targets whose weights without bias keep less than this share are computed by themselves: others lose at most a factor
#: of its inverse.
_LEAST_SHARE = 0.25
#: Targets with a bias above this, too, before its exponential is too large.
_MOST_BIAS = 30.0

#: The number of pairs at a time, or as many as nodes, whose sums are as large.
_MOST_PAIRS = 2**16

#: Lists of this many edges are kept with the bias that they belong to, and their layouts with them.
_MOST_KEPT = 2**22

_KERNELS = Cpu()


def can_attend(query: Tensor, key: Tensor, value: Tensor, bias: object, mask: Tensor | None, reach: Reach) -> bool:
    """Whether `attend` can be called now."""
    if not isinstance(bias, Pairs) or mask is not None or reach.left is not None or reach.right not in (None, 0):
        return False
    if reach.right == 0 and (reach.offset != 0 or query.size(1) != key.size(1)):
        return False
    if query.device.type != "cpu" or query.numel() * value.numel() == 0 or is_traced() or needs_plain_pytorch():
        return False
    if _KERNELS.missing() is not None or query.dtype not in (torch.float32, torch.float64):
        return False
    with torch.no_grad():
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        choice = scaled_dot_product_choice(q, k, v, None, 0.0, reach.right == 0)
    return bool(choice == SDPBackend.FLASH_ATTENTION.value)


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Pairs, reach: Reach) -> tuple[Tensor, Tensor]:
    """See `gattn.ops.backends.dense.rows.attend`."""
    out, log_sum = _Listed.apply(query, key, value, bias.values, Rule(scale, bias, None, reach))
    return out, log_sum


class _List:
    """Some of the listed pairs of all elements of a batch as a list of edges, whose nodes are numbered end to end.

    Args:
        bias: The pairs.
        pairs: Which of them.
        edge_index: Their edges; see `_edges`.
        batch: B.
        num_targets: N.
        num_sources: M.
    """

    def __init__(self, bias: Pairs, pairs: Tensor, edge_index: Tensor, batch: int, num_targets: int, num_sources: int):
        self.bias, self.pairs, self.edge_index, self.target = bias, pairs, edge_index, edge_index[1]
        #: Each pair is listed for all elements that share it.
        self.copies = batch if bias.element is None else 1
        self.nodes = {FLOWS[0]: batch * num_targets, FLOWS[1]: batch * num_sources}

    def values(self, heads: int) -> Tensor:
        """The biases of these edges, `[E, H]`."""
        values = self.bias.values_of(self.pairs)
        return (values.repeat(self.copies, 1) if self.copies > 1 else values).expand(-1, heads)

    def of_targets(self, x: Tensor) -> Tensor:
        """The rows of the edges' targets, given `[B, N, ...]`."""
        return x.flatten(0, 1).index_select(0, self.target)

    def add_gradient(self, to: Tensor, grad: Tensor) -> None:
        """Adds the gradients of the edges' biases to those of the pairs."""
        grad = grad.view(self.copies, -1, grad.size(1)).sum(0)
        self.bias.add_to(to, self.pairs, grad.sum_to_size(len(grad), to.size(1)))

    def products(self, query: Tensor, key: Tensor) -> Tensor:
        """The dot products of each edge's ends, `[E, H]`, given `[B, N, H, C]` and `[B, M, H, C]`."""
        query, key = query.flatten(0, 1), key.flatten(0, 1)
        nothing = key.new_empty(*key.shape[:2], 0)
        return self._run(query, key, nothing, "dot", [1.0, 1.0, 0.0, 0.0], "logits", None, FLOWS[0])[1]

    def sums(self, weights: Tensor, value: Tensor, flow: str = FLOWS[0]) -> Tensor:
        """The weighted sums of values `[B, M, H, V]` at targets, or the other way, `[B, N, H, V]`."""
        batch = len(value)
        value = value.flatten(0, 1)
        key = value.new_zeros(value.size(1), 1).expand(*value.shape[:2], 1)
        out = self._run(None, key, value, "gat", [1.0], "identity", weights, flow)[0]
        return torch.unflatten(out, 0, (batch, -1))

    def _run(
        self,
        query: Tensor | None,
        key: Tensor,
        value: Tensor,
        family: str,
        constants: list[float],
        law: str,
        bias: Tensor | None,
        flow: str,
    ) -> Any:
        inputs = Inputs(
            query=query,
            key=key,
            value=value,
            vector=None,
            edge=None,
            edge_projection=None,
            edge_type=None,
            bias=bias,
            mask=None,
            edge_value=None,
            edge_index=self.edge_index,
            num_targets=self.nodes[flow],
            self_loops=False,
            flow=flow,
            family=family,
            constants=constants,
            edge_is_value=False,
            distribution=law,
            distribution_constants=[0.0, 0.0],
            sink=None,
            out_bias=None,
            dropout=0.0,
            seed=None,
            traced=False,
        )
        return _KERNELS.operator.run(inputs, law == "logits")


def _lists(bias: Pairs, query: Tensor, key: Tensor, causal: bool) -> Iterator[_List]:
    """The listed pairs that targets see, some at a time."""
    sizes = len(query), query.size(1), key.size(1)
    most = max(_MOST_PAIRS, *sizes[1:])
    if len(bias.target) * (sizes[0] if bias.element is None else 1) > _MOST_KEPT:
        lists: Iterable[tuple[Tensor, Tensor]] = _edges(bias, *sizes, most, causal)
    else:
        made = ("lists of pairs", *sizes, most, causal)
        lists = derived(bias.target, made, lambda: list(_edges(bias, *sizes, most, causal)))
    for pairs, edge_index in lists:
        yield _List(bias, pairs, edge_index, *sizes)


def _edges(
    bias: Pairs, batch: int, num_targets: int, num_sources: int, most: int, causal: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """The numbers of some pairs at a time, and their edges, which are those of all elements that share a pair."""
    for start in range(0, len(bias.target), most):
        pairs = torch.arange(start, min(start + most, len(bias.target)), device="cpu")
        if causal:
            pairs = pairs[bias.source[pairs] <= bias.target[pairs]]
        element = torch.arange(batch, device="cpu").unsqueeze(1) if bias.element is None else bias.element[pairs]
        ends = (bias.source[pairs] + element * num_sources, bias.target[pairs] + element * num_targets)
        yield pairs, torch.stack([end.flatten() for end in ends])


class _Listed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, values: Tensor, rule: Rule
    ) -> tuple[Tensor, Tensor]:
        causal, bias = rule.reach.right == 0, rule.bias
        assert isinstance(bias, Pairs)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out, log_sum = flash_attention_on_cpu(q, k, v, 0.0, causal, scale=rule.scale)
        out, log_sum = out.transpose(1, 2), log_sum.transpose(1, 2)
        share = torch.ones_like(log_sum, memory_format=torch.contiguous_format)
        large = torch.zeros(share.shape[:2], dtype=torch.bool, device="cpu")
        for edges in _lists(bias, query, key, causal):
            weights = edges.products(query, key).mul_(rule.scale).sub_(edges.of_targets(log_sum)).exp_()
            added = edges.values(query.size(2))
            large.view(-1)[edges.target[(added > _MOST_BIAS).any(1)]] = True
            weights.mul_(added.clamp(max=_MOST_BIAS).expm1())
            share.flatten(0, 1).index_add_(0, edges.target, weights)
            out = out.add_(edges.sums(weights, value))
        alone = ((share < _LEAST_SHARE) | ~share.isfinite()).any(-1) | large
        out = out.div_(share.unsqueeze(-1))
        log_sum = log_sum + share.log()
        ctx.alone = _alone(alone, rule)
        for element, targets, sub in ctx.alone:
            at = slice(element, element + 1)
            exact = rows.forward(query[at, targets], key[at], value[at], sub)
            out[at, targets], log_sum[at, targets] = exact
        rule.save(ctx, query, key, value, out, log_sum)
        return out, log_sum

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_log_sum: Tensor) -> tuple[Tensor | None, ...]:
        rule, (query, key, value, out, log_sum), (values,) = Rule.saved(ctx)
        if torch.is_grad_enabled() or is_batched(grad):
            return *rows.differentiate_twice(query, key, value, rule, [values], grad, grad_log_sum), None
        causal, scale, bias = rule.reach.right == 0, rule.scale, rule.bias
        assert isinstance(bias, Pairs)
        delta = rows.delta_of(grad, out, grad_log_sum, log_sum)
        base = log_sum.masked_fill(log_sum == -torch.inf, torch.inf)
        for element, targets, _ in ctx.alone:
            base[element, targets] = torch.inf  # with which the fused pass gives them no weights
        of_query, of_key, of_value = _fused_gradients(query, key, value, out, base, grad, delta, causal, scale)
        grad_values = torch.zeros_like(values)
        for edges in _lists(bias, query, key, causal):
            added = edges.values(query.size(2)).clamp(max=_MOST_BIAS)
            weights = edges.products(query, key).mul_(scale).sub_(edges.of_targets(base)).exp_()
            of_logits = edges.products(grad, value).sub_(edges.of_targets(delta))
            more = weights * added.expm1()
            edges.add_gradient(grad_values, weights.mul_(added.exp()).mul_(of_logits))
            of_value += edges.sums(more, grad, FLOWS[1])
            more.mul_(of_logits).mul_(scale)
            of_query += edges.sums(more, key)
            of_key += edges.sums(more, query, FLOWS[1])
        for element, targets, sub in ctx.alone:
            at = slice(element, element + 1)
            given = log_sum[at, targets], grad[at, targets], delta[at, targets], [grad_values]
            sub = sub._replace(bias=sub.bias.with_tensors([values]))
            exact = rows.backward(query[at, targets], key[at], value[at], sub, *given)
            of_query[at, targets] = exact[0]
            of_key[at] += exact[1]
            of_value[at] += exact[2]
        return of_query, of_key, of_value, grad_values, None


def _alone(alone: Tensor, rule: Rule) -> list[tuple[int, Tensor, Rule]]:
    """The element and the numbers of targets that are computed by themselves, and what their logits are."""
    found, bias = [], rule.bias
    assert isinstance(bias, Pairs)
    for element in alone.any(1).nonzero().flatten().tolist():
        targets = alone[element].nonzero().flatten()
        is_there = alone[element][bias.target]
        if bias.element is not None:
            is_there &= bias.element == element
        part = bias.with_tensors([bias.values.detach()]).chosen(is_there.nonzero().squeeze(1))
        target = torch.searchsorted(targets, part.target.long())
        part = Pairs(None, target, part.source, part.values, part.place, part.starts)
        found.append((element, targets, rule._replace(bias=part, reach=rule.reach._replace(positions=targets))))
    return found


def _fused_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum: Tensor,
    grad: Tensor,
    delta: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value from PyTorch's fused pass, for any log-sum-exp and number D."""
    given = (grad, query, key, value, out)
    more = (grad * out).sum(-1) - delta
    has_more = bool((more != 0).any())
    if has_more:  # a channel in which the output's gradient is one gives D any value
        grad, query, key, value, out = (torch.nn.functional.pad(x, (0, 1)) for x in given)
        grad[..., -1], out[..., -1] = 1.0, -more
    grad, query, key, value, out, log_sum = (x.transpose(1, 2) for x in (grad, query, key, value, out, log_sum))
    grads = flash_backward(grad, query, key, value, out, log_sum, causal, scale)
    channels = given[0].size(-1)
    first, second, third = (x.transpose(1, 2)[..., :channels] for x in grads)
    return first, second, third
