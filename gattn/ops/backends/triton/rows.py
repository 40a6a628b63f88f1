"""The GPU kernels that go through a target's whole row of logits."""

import triton
import triton.language as tl

__all__ = ["keep_largest", "kernel", "subtract_threshold"]

#: Numbers that differ between graphs. Otherwise, Triton would compile a kernel again for multiples of 16, and for 1.
_OF_THE_GRAPH = (
    "num_blocks num_tasks num_slots num_rows num_sources num_targets num_edges num_terms num_split threshold "
    "query_row query_batch key_row key_batch value_row value_batch "
    "edge_batch bias_batch edge_value_batch mask_batch mask_edge mask_head"
)
kernel = triton.jit(do_not_specialize=_OF_THE_GRAPH.split())


@triton.jit
def _row(start, logits, num_targets, num_edges, HEADS: tl.constexpr, BLOCK_H: tl.constexpr):
    """A program's row: its first and last edge, its heads, and the logits of its batch element."""
    batch = (tl.program_id(0) // num_targets).to(tl.int64)
    start += tl.program_id(0) % num_targets
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    return tl.load(start), tl.load(start + 1), h, logits + batch * num_edges * HEADS


@triton.jit
def _logits_of_row(logits, number, first, last, h, HEADS: tl.constexpr, BLOCK_E: tl.constexpr):
    """Where the next logits of a row are, whether they exist, and their values, `[E, H]`; the others are -inf."""
    place = first + tl.arange(0, BLOCK_E)
    e = tl.load(number + place, mask=place < last, other=0)
    there = (place < last)[:, None] & (h < HEADS)[None]
    at = logits + e.to(tl.int64)[:, None] * HEADS + h[None]
    return at, there, tl.load(at, mask=there, other=-float("inf"))


@kernel
def subtract_threshold(
    logits, start, number, num_targets, num_edges,
    LAW: tl.constexpr, IS_SQUARED: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Subtracts the threshold of each row for which its weights sum to one; where these are squares, it halves logits.

    Newton's iteration starts below the threshold and never steps beyond it: the sum, or the root of a sum of squares,
    is a convex function of the threshold.
    """
    first, last, h, logits = _row(start, logits, num_targets, num_edges, HEADS, BLOCK_H)
    factor: tl.constexpr = 0.5 if IS_SQUARED else 1.0
    maximum = tl.full([BLOCK_H], -float("inf"), COMPUTE)
    for place in range(first, last, BLOCK_E):
        _, _, s = _logits_of_row(logits, number, place, last, h, HEADS, BLOCK_E)
        maximum = tl.maximum(maximum, tl.max(s, axis=0))
    maximum = tl.where(maximum == -float("inf"), 0.0, maximum)  # -inf + inf would be NaN
    threshold = tl.full([BLOCK_H], -1.0, COMPUTE)
    higher = threshold
    num_growing = 1
    while num_growing > 0:
        total = tl.zeros([BLOCK_E, BLOCK_H], COMPUTE)
        slope = tl.zeros([BLOCK_E, BLOCK_H], COMPUTE)
        for place in range(first, last, BLOCK_E):
            _, _, s = _logits_of_row(logits, number, place, last, h, HEADS, BLOCK_E)
            p, derivative = LAW((s - maximum[None]) * factor - threshold[None])
            total += p
            slope += derivative
        sums = tl.sum(total, axis=0)
        slopes = tl.sum(slope, axis=0)
        if IS_SQUARED:
            sums = tl.sqrt(sums)
            slopes = slopes / tl.where(sums == 0, 1.0, sums)
        higher = threshold + (sums - 1.0) / tl.where(slopes == 0, 1.0, slopes)
        grows = higher > threshold
        threshold = tl.where(grows, higher, threshold)
        num_growing = tl.sum(grows.to(tl.int32))
    threshold = tl.where(higher == higher, threshold, higher)  # a NaN shows in the whole row
    for place in range(first, last, BLOCK_E):
        at, there, s = _logits_of_row(logits, number, place, last, h, HEADS, BLOCK_E)
        tl.store(at, (s - maximum[None]) * factor - threshold[None], mask=there)


@triton.jit
def _order(x):
    """Numbers as integers in the same order; NaN, which is kept in any case, as infinity."""
    x = tl.where(x == x, tl.where(x == 0, 0.0, x), float("inf"))  # -0 becomes 0
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True)
        return tl.where(bits < 0, bits ^ 0x7FFFFFFFFFFFFFFF, bits)
    else:
        bits = x.to(tl.int32, bitcast=True)
        return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@kernel
def keep_largest(
    logits, start, number, num_targets, num_edges,
    K: tl.constexpr, HEADS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Replaces logits by -inf, except for the K largest of each row; of equal ones, the first are kept."""
    first, last, h, logits = _row(start, logits, num_targets, num_edges, HEADS, BLOCK_H)
    if last - first > K:
        # The K-th lies in [low, high), which is halved. How many are at least low, or high?
        low = _order(tl.full([BLOCK_H], -float("inf"), COMPUTE))
        high = _order(tl.full([BLOCK_H], float("inf"), COMPUTE)) + 1
        num_low = tl.zeros([BLOCK_H], tl.int32) + (last - first)
        num_high = tl.zeros([BLOCK_H], tl.int32)
        num_open = 1
        while num_open > 0:
            middle = (low & high) + ((low ^ high) >> 1)
            counts = tl.zeros([BLOCK_E, BLOCK_H], tl.int32)
            for place in range(first, last, BLOCK_E):
                _, there, s = _logits_of_row(logits, number, place, last, h, HEADS, BLOCK_E)
                counts += (there & (_order(s) >= middle[None])).to(tl.int32)
            count = tl.sum(counts, axis=0)
            is_low = count >= K
            low = tl.where(is_low, middle, low)
            high = tl.where(is_low, high, middle)
            num_low = tl.where(is_low, count, num_low)
            num_high = tl.where(is_low, num_high, count)
            num_open = tl.sum(((num_low != K) & (high - low != 1) & (h < HEADS)).to(tl.int32))
        num_left = K - num_high
        for place in range(first, last, BLOCK_E):
            at, there, s = _logits_of_row(logits, number, place, last, h, HEADS, BLOCK_E)
            order = _order(s)
            is_next = (there & (order >= low[None]) & (order < high[None])).to(tl.int32)
            is_kept = (
                (order >= high[None]) | ((is_next > 0) & (tl.cumsum(is_next, axis=0) <= num_left[None])) | (s != s)
            )
            tl.store(at, tl.where(is_kept, s, -float("inf")), mask=there)
            num_left -= tl.sum(is_next, axis=0)
