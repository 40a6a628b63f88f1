"""Attention on PyTorch's distributed tensors: heads are independent, so each rank computes its own."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gattn.errors import InputError
from gattn.ops.terms import Inputs

__all__ = ["by_heads", "is_distributed"]


def is_distributed(tensor: Tensor) -> bool:
    """Whether a tensor is a `DTensor`, which cannot exist before its module is imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


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
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    values: Any = inputs.values
    mesh, heads_at = values.device_mesh, values.dim() - 2
    is_split = [placement == Shard(heads_at) for placement in values.placements]
    if not all(split or placement == Replicate() for split, placement in zip(is_split, values.placements, strict=True)):
        raise InputError(
            f"attention on distributed tensors is computed by heads: value is placed as {values.placements}, but must "
            f"be replicated or Shard({heads_at}) of [..., M, H, C]."
        )
    ranks = math.prod(mesh.size(dim) for dim, split in enumerate(is_split) if split)
    if values.size(heads_at) < ranks:
        raise InputError(f"each rank needs a head: got {values.size(heads_at)} heads of value for {ranks} ranks.")

    replicated: list[Any] = [Replicate()] * mesh.ndim
    local: dict[str, Any] = {}
    for name, tensor, term in inputs.terms():
        is_shared = term.heads == 0 or (name == "mask" and tensor.size(-1) == 1)
        if is_shared and not term.differentiable and not is_distributed(tensor):
            continue
        placed: Any = tensor
        if not isinstance(tensor, DTensor):
            placed = DTensor.from_local(tensor, mesh, replicated, run_check=False)
        if is_shared:  # each rank has the gradient from its own heads
            of_grad = [Partial() if split else Replicate() for split in is_split]
            local[name] = placed.redistribute(mesh, replicated).to_local(grad_placements=of_grad)
        else:
            at_heads = Shard(tensor.dim() - term.heads)
            placements = [at_heads if split else Replicate() for split in is_split]
            local[name] = placed.redistribute(mesh, placements).to_local()
    out, weights, *_ = run(inputs._replace(**local), with_weights)

    def gather(tensor: Tensor, heads: int, from_last: int) -> Any:
        shape = [*tensor.shape]
        shape[-from_last] = heads
        stride = [1]
        for size in reversed(shape[1:]):
            stride.insert(0, stride[0] * size)
        placements = [Shard(tensor.dim() - from_last) if split else Replicate() for split in is_split]
        return DTensor.from_local(
            tensor, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
        )

    return [gather(out, inputs.heads, 2), None if weights is None else gather(weights, inputs.heads, 1)]
