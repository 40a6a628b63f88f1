"""The reference as a backend: PyG's message passing, with the hooks of the module that computes attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from gattn.graphs import FLOWS
from gattn.ops.backends.base import Backend, Result, finish, new_seed
from gattn.ops.call import Call
from gattn.ops.dropout import drop
from gattn.ops.reference import repeat_heads

if TYPE_CHECKING:
    from gattn.attention import Attention

__all__ = ["Reference"]


class Reference(Backend):
    """Serves every call on every device and in every type, with explainers, hooks and higher derivatives."""

    name = "reference"
    devices = None

    def refuses(self, call: Call) -> str | None:
        """See `Backend.refuses`; it never refuses."""
        return None

    def attend(self, call: Call, module: Attention) -> Result:
        """See `Backend.attend`."""
        edges = call.graph.edge_list(call.value.device)
        call = call.on_edges(edges, edges.num_edges).cast(call.compute).with_edges()
        seed = new_seed(call)
        rows = edges.edge_index if edges.flow == module.flow else edges.edge_index.flip(0)  # the order that PyG uses
        distribution = call.distribution.with_sources(edges.edge_index[FLOWS.index(edges.flow)])
        value = repeat_heads(call.value, call.heads)
        alpha = module.edge_updater(
            rows,
            query=call.query,
            key=repeat_heads(call.key, call.heads),
            edge=call.edge,
            bias=call.bias,
            mask=call.mask,
            score=call.score,
            distribution=distribution,
            num_targets=edges.num_targets,
        )
        dropped = alpha if seed is None else drop(alpha, call.dropout, seed)
        if call.weights == "only":
            return finish(call, edges, value, alpha, dropped, seed)
        size = (edges.num_sources, edges.num_targets)
        x: Any = value
        if "x_i" in module._user_args:
            x = (value, _target_vectors(call, value))
        if module.flow != FLOWS[0]:
            size = size[::-1]
            x = x[::-1] if module.explain and x is not value else x  # the generated code ignores flow there
        terms = {"edge_value": call.vectors_of_values} if "edge_value" in module.propagate_type else {}
        out = module.propagate(rows, x=x, alpha=dropped, size=size, **terms)
        return finish(call, edges, out, alpha, dropped, seed)


def _target_vectors(call: Call, value: Tensor) -> Tensor:
    """Vectors by which explainers represent targets, shaped like those of the sources; zeros if there are none."""
    if call.query is not None and not call.score.scalar and call.query.shape[-2:] == value.shape[-2:]:
        return call.query
    if value.size(-3) == call.num_targets:
        return value
    return value.new_zeros(*value.shape[:-3], call.num_targets, *value.shape[-2:])
