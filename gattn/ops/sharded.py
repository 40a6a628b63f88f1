"""Attention on PyTorch's distributed tensors: heads are independent, so each rank computes its own."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gattn.bias import Bias
from gattn.errors import InputError
from gattn.ops.call import Call
from gattn.ops.terms import Inputs

__all__ = ["by_heads", "complete_by_heads", "is_distributed"]


def is_distributed(tensor: Tensor) -> bool:
    """Whether a tensor is a `DTensor`, which cannot exist before its module is imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


class _Split(NamedTuple):
    """How distributed tensors are split along their heads."""

    mesh: Any
    along: list[bool]
    """For each dimension of the mesh, whether heads are split along it."""

    def local(self, tensor: Tensor, from_last: int) -> Tensor:
        """This rank's part; `from_last` says where the heads are, 0 that there are none, and all of it is needed."""
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        replicated: list[Any] = [Replicate()] * self.mesh.ndim
        placed: Any = tensor
        if not isinstance(tensor, DTensor):
            placed = DTensor.from_local(tensor, self.mesh, replicated, run_check=False)
        if not from_last:  # each rank has the gradient from its own heads
            of_grad = [Partial() if split else Replicate() for split in self.along]
            return placed.redistribute(self.mesh, replicated).to_local(grad_placements=of_grad)
        at_heads = Shard(tensor.dim() - from_last)
        placements = [at_heads if split else Replicate() for split in self.along]
        return placed.redistribute(self.mesh, placements).to_local()

    def whole(self, tensor: Tensor, heads: int, from_last: int) -> Any:
        """The distributed tensor of which this rank has this part."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        shape = [*tensor.shape]
        shape[-from_last] = heads
        stride = [1]
        for size in reversed(shape[1:]):
            stride.insert(0, stride[0] * size)
        placements = [Shard(tensor.dim() - from_last) if split else Replicate() for split in self.along]
        return DTensor.from_local(
            tensor, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
        )


def _split_of(values: Any, heads: int) -> _Split:
    """How the value `[..., M, H, V]` is split, of which there are `heads` with queries."""
    from torch.distributed.tensor import Replicate, Shard

    heads_at = values.dim() - 2
    along = [placement == Shard(heads_at) for placement in values.placements]
    if not all(split or placement == Replicate() for split, placement in zip(along, values.placements, strict=True)):
        raise InputError(
            f"attention on distributed tensors is computed by heads: value is placed as {values.placements}, but must "
            f"be replicated or Shard({heads_at}) of [..., M, H, C]."
        )
    ranks, of_value = (
        math.prod(values.device_mesh.size(dim) for dim, split in enumerate(along) if split),
        values.size(-2),
    )
    if of_value < ranks:
        raise InputError(f"each rank needs a head: got {of_value} heads of value for {ranks} ranks.")
    if of_value != heads and of_value % ranks:
        raise InputError(
            f"{heads} heads share {of_value} heads of keys and values, which {ranks} ranks cannot split evenly."
        )
    return _Split(values.device_mesh, along)


def by_heads(run: Callable[[Inputs, bool], Sequence[Any]], inputs: Inputs, with_weights: bool) -> list[Any]:
    """The output and weights of `run` for this rank's heads, as distributed tensors.

    Other inputs follow the value; inputs that are not distributed tensors are assumed to be the same on all ranks. With
    dropout, ranks drop independently if their seeds differ, so the result is not that of a single process.

    Args:
        run: Computes output `[..., N, H, V]` and weights `[..., E, H]` from plain tensors.
        inputs: Inputs of which at least the value is distributed: replicated, or split along its heads.
        with_weights: Whether weights are requested.

    Raises:
        ValueError: If the value is split along another dimension, or into more ranks than the key has heads.
    """
    split = _split_of(inputs.values, inputs.heads)
    local: dict[str, Any] = {}
    for name, tensor, term in inputs.terms():
        is_shared = term.heads == 0 or (name == "mask" and tensor.size(-1) == 1)
        if is_shared and not term.differentiable and not is_distributed(tensor):
            continue
        local[name] = split.local(tensor, 0 if is_shared else term.heads)
    out, weights, *_ = run(inputs._replace(**local), with_weights)
    return [split.whole(out, inputs.heads, 2), None if weights is None else split.whole(weights, inputs.heads, 1)]


def complete_by_heads(run: Callable[[Call], Any], call: Call) -> Any:
    """The same for a call on a complete graph, without a list of its edges.

    Raises:
        ValueError: As `by_heads`, or if anything but query, key, value and a mask of all heads is given.
    """
    parts = [*vars(call.score).values(), *vars(call.distribution).values(), call.bias, call.out_bias]
    has_more = any(isinstance(part, (Tensor, Bias)) for part in parts)
    has_heads = call.mask is not None and (
        is_distributed(call.mask) or (call.mask.dim() > 2 and call.mask.size(-3) > 1)
    )
    if has_more or has_heads or call.query is None:
        raise InputError(
            "on complete graphs, distributed tensors are split by heads without a bias, a mask for each head, or "
            "tensors in the score or distribution: give plain tensors (full_tensor()), or a list of edges "
            "(graph.edge_index)."
        )
    split = _split_of(call.value, call.heads)
    key = split.local(call.key, 2)
    value = key if call.value is call.key else split.local(call.value, 2)
    result = run(call._replace(query=split.local(call.query, 2), key=key, value=value))
    weights, log_sum = result.weights, result.log_sum
    if isinstance(weights, list):
        weights = [split.whole(matrix, call.heads, 3) for matrix in weights]
    elif weights is not None:
        weights = split.whole(weights, call.heads, 3)
    log_sum = None if log_sum is None else split.whole(log_sum, call.heads, 1)
    return result._replace(out=split.whole(result.out, call.heads, 2), weights=weights, log_sum=log_sum)
