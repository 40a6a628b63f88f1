"""The operators' computation and gradients by the reference: for second derivatives and batches of gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gattn.distributions import Law, from_law
from gattn.graphs import FLOWS
from gattn.graphs.edge_lists import looped
from gattn.ops import reference
from gattn.ops.terms import Inputs
from gattn.scores import Family, Score

__all__ = ["asked", "by_reference", "differentiate_plainly"]


def asked(results: Sequence[Tensor | None], grads: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
    """The results that have a gradient, and this."""
    pairs = zip(results, grads, strict=False)
    return [(result, grad) for result, grad in pairs if result is not None and grad is not None]


def differentiate_plainly(
    inputs: Inputs, grads: Sequence[Tensor | None], wanted: Sequence[str]
) -> Sequence[Tensor | None]:
    """The gradients of these inputs by plain PyTorch: also for a batch of gradients, or with gradients of their own.

    Args:
        inputs: The inputs.
        grads: The gradients of output, weights and log-sum-exp.
        wanted: The names of the inputs.
    """
    creates = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, so that differentiation stops here.
        leaves = {name: getattr(inputs, name).view_as(getattr(inputs, name)) for name in wanted}
        leaves = {name: leaf if leaf.requires_grad else leaf.requires_grad_() for name, leaf in leaves.items()}
        results = by_reference(inputs._replace(**leaves), grads[2] is not None)
        pairs = asked(results, grads)
        of_results = [result for result, _ in pairs], list(leaves.values()), [grad for _, grad in pairs]
        return torch.autograd.grad(*of_results, create_graph=creates, materialize_grads=True)


def by_reference(inputs: Inputs, with_log_sum: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operator's computation in plain PyTorch: output, weights and, if it is wanted, the log-sum-exp."""
    edge_index = inputs.edge_index
    if inputs.self_loops:
        edge_index = looped(edge_index, inputs.num_sources, inputs.num_targets, inputs.flow)
    edge_index = edge_index.long()
    family = Family(inputs.family, tuple(inputs.constants), inputs.vector)
    edge = inputs.edge
    if edge is not None and inputs.edge_projection is not None:
        edge = torch.einsum("ed,hcd->ehc", edge.to(inputs.edge_projection.dtype), inputs.edge_projection).to(edge.dtype)
    if edge is not None and inputs.edge_type is not None:
        edge = edge.index_select(0, inputs.edge_type)
    source, target = rows = edge_index if inputs.flow == FLOWS[0] else edge_index.flip(0)
    score = Score.class_of_family(inputs.family).from_family(family)
    out, weights = reference.attention(
        inputs.query,
        inputs.key,
        inputs.values,
        rows,
        inputs.num_targets,
        score,
        from_law(Law(inputs.distribution, tuple(inputs.distribution_constants), inputs.sink)),
        edge=edge,
        bias=inputs.bias,
        mask=inputs.mask,
        edge_value=edge if inputs.edge_is_value else inputs.edge_value,
        dropout=inputs.dropout,
        seed=inputs.seed,
    )
    out = out if inputs.out_bias is None else out + inputs.out_bias
    if not with_log_sum:
        return out, weights, None
    query = None if inputs.query is None else inputs.query.index_select(-3, target)
    key = reference.repeat_heads(inputs.key.index_select(-3, source), inputs.heads)
    logits = reference.whole_logits(query, key, edge, inputs.bias, inputs.mask, score)
    return out, weights, reference.log_sum(logits, target, inputs.num_targets)
