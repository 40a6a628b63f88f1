"""What backends with fused kernels for lists of edges share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from gattn.distributions import Law
from gattn.graphs import EdgeList
from gattn.ops.backends.base import Backend, Result, dress_logits, finish, new_seed
from gattn.ops.call import NO_SCORE, Call
from gattn.ops.custom_parts import as_logits, finished_logits, with_finished, with_finished_weights
from gattn.ops.operator import AttentionOperator
from gattn.scores import DotScore, Family, family_of
from gattn.torch_private import is_traced

__all__ = ["DTYPES", "KernelBackend", "dense_rows", "flat"]

#: The types that kernels can store, in the order of the CPU kernels' StorageType.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class KernelBackend(Backend):
    """A backend that consists of an operator and a layout of the edges, which it caches."""

    has_operators = True
    operator: ClassVar[AttentionOperator]

    #: Whether vectors of edges that PyTorch makes from features or types have the type of the computation.
    widens_edges: ClassVar[bool] = False

    #: The layout that `layout_of(edge_index, num_sources, num_targets, self_loops, flow)` returns has `num_edges`.
    layout_of: ClassVar[Callable[..., Any]]

    def serves(self, device: torch.device) -> bool:
        """Whether its kernels take tensors on this device."""
        return device.type in (self.devices or ())

    def knows(self, family: Family | None) -> bool:
        """Whether its kernels have the formula of a family of scores."""
        return family is not None

    def knows_law(self, law: Law | None) -> bool:
        """Whether its kernels have the formula of a distribution."""
        return law is not None

    def projects_edges(self, call: Call) -> bool:
        """Whether its kernels make the vectors of edges from features or types, for a call whose family they know."""
        return not isinstance(call.edge, tuple) and not isinstance(call.edge_value, tuple)

    def refuses(self, call: Call) -> str | None:
        """See `Backend.refuses`."""
        if not self.serves(call.value.device):
            return f"the tensors are on {call.value.device}"
        if call.value.dtype not in DTYPES:
            return f"it supports float64, float32, bfloat16 and float16, not {call.value.dtype}"
        return None

    def attend(self, call: Call) -> Result:
        """See `Backend.attend`."""
        knows_score, knows_law = self._knows_score(call), self.knows_law(call.law)
        # Kernels check indices and add self-loops themselves. But compiled code must know the number of weights, and
        # parts that kernels do not know are computed per edge.
        raw = knows_score and knows_law and not (call.weights and torch.compiler.is_compiling())
        edges = call.graph.edge_list(call.value.device, raw=raw)
        call = call.on_edges(edges, self._num_edges(call, edges))
        seed = new_seed(call)
        if not knows_score or (not knows_law and call.vectors_of_values is not None):
            call = call.with_edges()
        if not knows_law:
            call = with_finished_weights(call, edges, self._logits(call, edges))
        elif not knows_score:
            call = with_finished(call, edges, finished_logits(call, edges))
        out, alpha = self._run(call, edges, seed)
        return finish(call, edges, out, alpha, None, seed)

    def logits(self, call: Call) -> Any:
        """See `Backend.logits`."""
        edges = call.graph.edge_list(call.value.device)
        call = call.on_edges(edges, edges.num_edges)
        return dress_logits(call, edges, self._logits(call, edges))

    def _logits(self, call: Call, edges: EdgeList) -> Tensor:
        """The logits of a call, including its bias, `[..., E, H]`, in the type of the computation."""
        if not self._knows_score(call):
            return finished_logits(call, edges)
        _, logits = self._run(as_logits(call), edges, None)
        assert logits is not None
        return logits

    def _knows_score(self, call: Call) -> bool:
        return self.knows(family_of(call.score, call.channels))

    def _run(self, call: Call, edges: EdgeList, seed: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Output and weights of a call that the kernels fully know, with bias and mask per edge."""
        if call.score is NO_SCORE and isinstance(call.edge_value, tuple):
            call = _as_product(call)
        projects = self.projects_edges(call)
        is_made = not projects and (isinstance(call.edge, tuple) or isinstance(call.edge_value, tuple))
        # Gradients that PyTorch sums over a batch, nodes or edges are summed before they are rounded.
        is_wide = call.shares_vectors_of_edges or (self.widens_edges and is_made) or call.score.folds
        if is_wide:
            call = call.cast(call.compute)
        if not projects:
            call = call.with_edges()
        return self.operator(call if is_wide else call.cast(call.dtype), edges, seed)

    def _num_edges(self, call: Call, edges: EdgeList) -> int | None:
        if edges.num_edges is None and call.has_edge_terms and not is_traced():
            layout = type(self).layout_of(
                edges.edge_index, edges.num_sources, edges.num_targets, edges.self_loops, edges.flow
            )
            num_edges: int = layout.num_edges
            return num_edges
        return edges.num_edges


def _as_product(call: Call) -> Call:
    """The same call with a score of vectors that adds nothing: kernels make vectors of edges for such a score only."""
    query = call.value.new_zeros(call.value.shape[-2:]).expand(*call.batch, call.num_targets, *call.value.shape[-2:])
    return call._replace(
        query=query, key=call.value, score=DotScore(1.0), edge=call.edge_value, edge_value=None, edge_is_value=True
    )


def flat(tensor: Tensor, inner: int) -> Tensor:
    """`[..., R, inner dimensions]` with one batch dimension in front."""
    batch = tensor.dim() - inner - 1
    return tensor.unsqueeze(0) if batch == 0 else tensor if batch == 1 else tensor.flatten(0, batch - 1)


def dense_rows(tensor: Tensor, inner: int) -> Tensor:
    """`flat`, copied if its rows are not dense."""
    if tensor.is_contiguous():
        return flat(tensor, inner)
    tensor = flat(tensor, inner)
    width = 1
    for size, stride in zip(reversed(tensor.shape[2:]), reversed(tensor.stride()[2:]), strict=True):
        if size != 1 and stride != width:
            return tensor.contiguous()
        width *= size
    return tensor
