"""Attention on all pairs of targets and sources by the CPU kernels for lists, of which few and short ones are kept."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from gattn.distributions import Softmax
from gattn.graphs import FLOWS
from gattn.ops.backends.base import needs_plain_pytorch, new_seed
from gattn.ops.backends.cpu import Cpu
from gattn.ops.backends.kernels import DTYPES
from gattn.ops.chunks import chunk_sizes
from gattn.ops.operator import are_plain
from gattn.ops.terms import Inputs
from gattn.scores import Score, family_of
from gattn.torch_private import is_traced

__all__ = ["attend", "can_attend", "counts"]

#: The pairs of a list, whose layout takes 32 bytes for each, and those of a batch that are computed at a time.
_MOST_PAIRS = 2**16
_MOST_OF_BATCH = 2**18

#: With fewer targets at a time, it would cost more to add up the gradients of sources.
_LEAST_TARGETS = 32

#: For scalar scores, matrix operations are faster than kernels with fewer heads, or with more channels in each.
_LEAST_HEADS, _MOST_CHANNELS = 4, 64

_KERNELS = Cpu()
_SOFTMAX = Softmax().law()


def can_attend(query: Tensor | None, key: Tensor, value: Tensor, score: Score) -> bool:
    """Whether `attend` can be called now, and is faster than plain PyTorch."""
    if score.scalar and (key.size(2) < _LEAST_HEADS or value.size(-1) > _MOST_CHANNELS):
        return False
    if value.device.type != "cpu" or value.dtype not in DTYPES or is_traced() or needs_plain_pytorch() is not None:
        return False
    return are_plain((query, key, value)) and _KERNELS.knows(family_of(score, key.size(-1)))


def counts(num_targets: int, num_sources: int, batch: int) -> list[int]:
    """The numbers of targets to call `attend` with, so that lists are short, and what is computed from them small."""
    most = min(_MOST_PAIRS, _MOST_OF_BATCH // max(batch, 1)) // num_sources
    return chunk_sizes(num_targets, max(most, _LEAST_TARGETS))


def attend(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    score: Score,
    bias: Tensor | None,
    mask: Tensor | None,
    num_targets: int,
    dropout: float,
    reach: tuple[int, int] | None = None,
) -> Tensor:
    """The output of a softmax, `[B, N, H, V]`.

    Args:
        query: `[B, N, H, C]`; without C for a scalar score.
        key: `[B, M, H, C]`, likewise.
        value: `[B, M, H, V]`.
        score: A score that the kernels know, with tensors in the type of the computation.
        bias: Broadcastable to `[B, H, N, M]`.
        mask: Likewise.
        num_targets: N.
        dropout: The probability of dropping a weight.
        reach: The first and the last source that target 0 sees; each target sees one source more to the right than the
            one before. They may be before all sources, or after. (default: `None`, targets see all)
    """
    if score.scalar:
        query, key = None if query is None else query.unsqueeze(-1), key.unsqueeze(-1)
    family = family_of(score, key.size(-1))
    assert family is not None
    assert _SOFTMAX is not None
    edge_index = _pairs(num_targets, key.size(1), reach)
    size = key.size(-2), num_targets, key.size(1)
    inputs = Inputs(
        query=query,
        key=key,
        value=None if value is key else value,
        vector=family.vector,
        edge=None,
        edge_projection=None,
        edge_type=None,
        bias=None if bias is None else _per_pair(bias.expand(-1, *size), edge_index, reach),
        mask=None if mask is None else _per_pair(mask.expand(-1, -1, *size[1:]), edge_index, reach),
        edge_value=None,
        edge_index=edge_index,
        num_targets=num_targets,
        self_loops=False,
        flow=FLOWS[0],
        family=family.name,
        constants=list(family.constants),
        edge_is_value=False,
        distribution=_SOFTMAX.name,
        distribution_constants=list(_SOFTMAX.constants),
        sink=None,
        out_bias=None,
        dropout=dropout,
        seed=new_seed(dropout, value.device),
        traced=False,
    )
    out: Tensor = _KERNELS.operator.run(inputs)[0]
    return out


def _per_pair(term: Tensor, edge_index: Tensor, reach: tuple[int, int] | None) -> Tensor:
    """`[B or 1, H, N, M]` as `[B, E, H]`, or `[E, H]` for all elements of a batch."""
    term = term.permute(0, 2, 3, 1)
    term = term.flatten(1, 2) if reach is None else term[:, edge_index[1], edge_index[0]]
    return term.squeeze(0) if term.size(0) == 1 else term


def _pairs(num_targets: int, num_sources: int, reach: tuple[int, int] | None) -> Tensor:
    """All pairs as an `edge_index`; lists of usual size are kept, and with them their layouts."""
    per_target = num_sources if reach is None else reach[1] - reach[0] + 1
    make = _kept_pairs if num_targets * per_target <= 2 * _MOST_PAIRS else _kept_pairs.__wrapped__
    return make(num_targets, num_sources, reach)


@lru_cache(maxsize=16)
def _kept_pairs(num_targets: int, num_sources: int, reach: tuple[int, int] | None) -> Tensor:
    with torch.inference_mode(False):
        first, last = reach or (0, num_sources - 1)
        target, source = (torch.arange(n, dtype=torch.int32, device="cpu") for n in (num_targets, last - first + 1))
        target, source = target.repeat_interleave(len(source)), (source + first).repeat(num_targets)
        if reach is None:
            return torch.stack([source, target])
        source += target
        seen = (source >= 0) & (source < num_sources)
        return torch.stack([source[seen], target[seen]])
