"""Whether normalisations give the same numbers where only some of the nodes are there."""

from __future__ import annotations

from torch.nn import Module, SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.nn import norm as norms

from gattn.errors import InputError

__all__ = ["check_norms"]

#: Normalisations by statistics of all nodes of a graph.
_OF_ALL_NODES = (
    *(norms.InstanceNorm, norms.GraphNorm, norms.GraphSizeNorm),
    *(norms.PairNorm, norms.MeanSubtractionNorm, norms.DiffGroupNorm),
)


def check_norms(modules: Module, some: str, or_else: str, joins_processes: bool = False) -> None:
    """Raises `ValueError` for normalisations that are others with some of the nodes.

    Args:
        modules: What contains the normalisations.
        some: Which nodes are there.
        or_else: What else could be done about it.
        joins_processes: Whether the others are in other processes, which `SyncBatchNorm` asks. (default: `False`)
    """
    for norm in modules.modules():
        in_batches = isinstance(norm, _BatchNorm) and (norm.training or norm.running_mean is None)
        is_local = in_batches and not (joins_processes and isinstance(norm, SyncBatchNorm))
        if is_local or isinstance(norm, _OF_ALL_NODES) or getattr(norm, "mode", None) == "graph":
            raise InputError(
                f"{type(norm).__name__} reads all nodes, {some}: use norm='layer_norm' with "
                f"norm_kwargs={{'mode': 'node'}}, or {or_else}."
            )
