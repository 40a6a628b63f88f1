"""Attention on all pairs of targets and sources by the CPU kernels for lists, of which few and short ones are kept."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from gattn.graphs import FLOWS, EdgeList
from gattn.graphs.complete import MOST_LISTED
from gattn.ops.backends.base import needs_plain_pytorch, new_seed
from gattn.ops.backends.cpu import Cpu
from gattn.ops.backends.kernels import DTYPES
from gattn.ops.call import Call
from gattn.ops.chunks import chunk_sizes
from gattn.ops.differentiated import are_plain
from gattn.ops.operator import inputs_of
from gattn.ops.plans import suits_lists
from gattn.scores import family_of
from gattn.torch_private import is_traced

__all__ = ["attend", "can_attend", "counts"]

#: The pairs of a batch that are computed at a time.
_MOST_OF_BATCH = 2**18

#: With fewer targets at a time, it would cost more to add up the gradients of sources.
_LEAST_TARGETS = 32

_KERNELS = Cpu()


def can_attend(call: Call) -> bool:
    """Whether `attend` can be called now, and is faster than plain PyTorch."""
    key, value, score = call.key, call.value, call.score
    if not suits_lists(score, key, value):
        return False
    if value.device.type != "cpu" or value.dtype not in DTYPES or is_traced() or needs_plain_pytorch() is not None:
        return False
    return are_plain((call.query, key, value)) and _KERNELS.knows(family_of(score, call.channels))


def counts(num_targets: int, num_sources: int, batch: int) -> list[int]:
    """The numbers of targets to call `attend` with, so that lists are short, and what is computed from them small."""
    most = min(MOST_LISTED, _MOST_OF_BATCH // max(batch, 1)) // num_sources
    return chunk_sizes(num_targets, max(most, _LEAST_TARGETS))


def attend(call: Call, num_targets: int, reach: tuple[int, int] | None = None) -> Tensor:
    """The output of a softmax, `[B, N, H, V]`.

    Args:
        call: A call with one batch dimension, a score that the kernels know, with tensors in the type of the
            computation, and bias and mask broadcastable to `[B, H, N, M]`.
        num_targets: N.
        reach: The first and the last source that target 0 sees; each target sees one source more to the right than the
            one before. They may be before all sources, or after. (default: `None`, targets see all)
    """
    bias, mask, num_sources = call.bias_of_edges, call.mask, call.key.size(1)
    pairs, size = _pairs(num_targets, num_sources, reach), (num_targets, num_sources)
    per_pair = call._replace(
        bias=None if bias is None else _per_pair(bias.expand(-1, call.heads, *size), pairs, reach),
        mask=None if mask is None else _per_pair(mask.expand(-1, -1, *size), pairs, reach),
    )
    edges = EdgeList(pairs, num_sources, num_targets, False, FLOWS[0])
    out: Tensor = _KERNELS.operator.run(inputs_of(per_pair, edges, new_seed(call.dropout, call.value.device)))[0]
    return out


def _per_pair(term: Tensor, edge_index: Tensor, reach: tuple[int, int] | None) -> Tensor:
    """`[B or 1, H, N, M]` as `[B, E, H]`, or `[E, H]` for all elements of a batch."""
    term = term.permute(0, 2, 3, 1)
    term = term.flatten(1, 2) if reach is None else term[:, edge_index[1], edge_index[0]]
    return term.squeeze(0) if term.size(0) == 1 else term


def _pairs(num_targets: int, num_sources: int, reach: tuple[int, int] | None) -> Tensor:
    """All pairs as an `edge_index`; lists of usual size are kept, and with them their layouts."""
    per_target = num_sources if reach is None else reach[1] - reach[0] + 1
    make = _kept_pairs if num_targets * per_target <= 2 * MOST_LISTED else _kept_pairs.__wrapped__
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
