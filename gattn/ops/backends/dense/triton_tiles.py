"""Attention by tiles of pairs on GPUs, in Triton: what `tiles.py` describes, with the same elements and terms.

A program of `tiles_forward`, `tiles_weights` and `tiles_by_target` has up to T targets of an element, and one head; it
goes through the sources that they see, S at a time. One of `tiles_by_source` has S sources and a key's head, and goes
through the targets that see them, in all heads that share it. Only gradients of a bias that several pairs share are
added by atomics, in float64.

Letters: T targets and S sources of a tile, C channels of keys, V of values.
"""

import triton
import triton.language as tl

from gattn.ops.backends.triton.formulas import LAWS, cap, mix, scale_of

__all__ = ["LAWS", "tiles_by_source", "tiles_by_target", "tiles_forward", "tiles_weights"]

#: Numbers that differ between graphs and calls, for which nothing is compiled again.
_NUMBERS = "num_targets num_sources bias_count first_distance left right threshold"
_kernel = triton.jit(do_not_specialize=_NUMBERS.split())


@triton.jit
def _task(tasks, elements):
    """The element of this program's task, and the task's first node."""
    task = tasks + 2 * tl.program_id(0)
    return elements + 12 * tl.load(task), tl.load(task + 1)


@triton.jit
def _rows(base, batch, row, head, is_row, strides, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
          DTYPE: tl.constexpr):  # fmt: skip
    """Rows of one head, `[T or S, C]`, with zeros where there are none; strides are those of `[B, N, H, C]`."""
    c = tl.arange(0, BLOCK)
    place = batch * strides[0] + head * strides[2] + row[:, None] * strides[1] + c[None] * strides[3]
    return tl.load(base + place, mask=is_row[:, None] & (c < CHANNELS)[None], other=0.0).to(DTYPE)


@triton.jit
def _store_rows(base, place, is_row, tile, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    tl.store(base + place[:, None] + c[None], tile, mask=is_row[:, None] & (c < CHANNELS)[None])


@triton.jit
def _listed(starts, of_pairs, element, i, n, first):
    """Each target's first listed pair whose source is not before the first one, and the end of its pairs."""
    start = starts + tl.load(element + 7) + i
    low = tl.load(start, mask=i < n, other=0)
    end = tl.load(start + 1, mask=i < n, other=0)
    high = end
    while tl.max(high - low) > 0:
        middle = (low + high) // 2
        is_before = (low < high) & (tl.load(of_pairs + middle, mask=low < high, other=0) < first)
        high = tl.where((low < high) & ~is_before, middle, high)
        low = tl.where(is_before, middle + 1, low)
    return low, end


@triton.jit
def _bias_of(
    bias, of_pairs, starts, element, h, i, j, n, seen, bias_count, first_distance,
    bias_strides, BIAS: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """The bias of a tile's pairs, `[T, S]`."""
    base = bias + h * bias_strides[1]
    if BIAS == "all":
        place = tl.load(element + 6) * bias_strides[0] + i[:, None] * bias_strides[2] + j[None] * bias_strides[3]
        return tl.load(base + place, mask=seen, other=0.0).to(COMPUTE)
    elif BIAS == "listed":
        found = tl.zeros(seen.shape, COMPUTE)
        column = j + tl.load(element + 8)
        first = tl.min(column)
        at, end = _listed(starts, of_pairs, element, i, n, first)
        last = first + seen.shape[1]
        source = tl.load(of_pairs + at, mask=at < end, other=2147483647)
        while tl.min(source) < last:
            is_here = source < last
            number = tl.load(base + at * bias_strides[0], mask=is_here, other=0.0).to(COMPUTE)
            found += tl.where(column[None] == source[:, None], number[:, None], 0.0)
            at = tl.where(is_here, at + 1, at)
            source = tl.load(of_pairs + at, mask=at < end, other=2147483647)
        return found
    else:
        number = _number(of_pairs, element, i, j, seen, bias_count, first_distance, BIAS)
        return tl.load(base + number * bias_strides[0], mask=seen, other=0.0).to(COMPUTE)


@triton.jit
def _number(of_pairs, element, i, j, seen, bias_count, first_distance, BIAS: tl.constexpr):
    """Which distance's or bucket's number each pair has, `[T, S]`."""
    if BIAS == "distances":
        number = j[None] - i[:, None] - tl.load(element + 5) - first_distance
        return tl.minimum(tl.maximum(number, 0), bias_count - 1)
    else:
        place = tl.load(element + 7) + i[:, None] * tl.load(element + 8) + j[None]
        return tl.load(of_pairs + place, mask=seen, other=0).to(tl.int64)


@triton.jit
def _add_to_bias(
    grad, of_pairs, starts, element, h, i, j, n, seen, dz, bias_count, first_distance,
    strides, BIAS: tl.constexpr, IS_SHARED: tl.constexpr, SUMS_ROWS: tl.constexpr, SUMS_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Adds the gradients of a tile's logits to that of the bias, which is float64 if pairs share its numbers."""
    base = grad + h * strides[1]
    if BIAS == "all":
        base += tl.load(element + 6) * strides[0]
        if SUMS_ROWS and SUMS_COLUMNS:
            tl.atomic_add(base, tl.sum(dz.to(tl.float64)))
        elif SUMS_ROWS:
            tl.atomic_add(base + j * strides[3], tl.sum(dz.to(tl.float64), 0), mask=tl.max(seen.to(tl.int32), 0) > 0)
        elif SUMS_COLUMNS:
            tl.atomic_add(base + i * strides[2], tl.sum(dz.to(tl.float64), 1), mask=tl.max(seen.to(tl.int32), 1) > 0)
        elif IS_SHARED:
            tl.atomic_add(base + i[:, None] * strides[2] + j[None] * strides[3], dz.to(tl.float64), mask=seen)
        else:
            tl.store(base + i[:, None] * strides[2] + j[None] * strides[3], dz, mask=seen)
    elif BIAS == "listed":
        column = j + tl.load(element + 8)
        first = tl.min(column)
        at, end = _listed(starts, of_pairs, element, i, n, first)
        last = first + seen.shape[1]
        source = tl.load(of_pairs + at, mask=at < end, other=2147483647)
        while tl.min(source) < last:
            is_here = source < last
            number = tl.sum(tl.where(column[None] == source[:, None], dz, 0.0), 1)
            tl.atomic_add(base + at * strides[0], number.to(tl.float64), mask=is_here)
            at = tl.where(is_here, at + 1, at)
            source = tl.load(of_pairs + at, mask=at < end, other=2147483647)
    else:
        number = _number(of_pairs, element, i, j, seen, bias_count, first_distance, BIAS)
        tl.atomic_add(base + number * strides[0], dz.to(tl.float64), mask=seen)


@triton.jit
def _tile(
    q, k, bias, of_pairs, starts, mask, element, h, i, j, bias_count, first_distance, left, right,
    bias_strides, mask_strides,
    SCALE: tl.constexpr, SLOPE: tl.constexpr, CLAMP: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile's logits, `[T, S]`: minus infinity where a target does not see a source; and their derivatives.

    These are of the cap, and of the score.
    """
    n, m, position = tl.load(element + 2), tl.load(element + 4), i + tl.load(element + 5)
    seen = (i < n)[:, None] & (j < m)[None]
    seen &= (j[None] >= (position - left)[:, None]) & (j[None] <= (position + right)[:, None])
    if mask is not None:
        base = mask + tl.load(element + 6) * mask_strides[0] + h * mask_strides[1]
        place = i[:, None] * mask_strides[2] + j[None] * mask_strides[3]
        seen &= tl.load(base + place, mask=seen, other=0) != 0
    z = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=COMPUTE) * SCALE
    of_score = tl.full(z.shape, SCALE, COMPUTE)
    if SLOPE != 1.0:
        of_score = tl.where(z > 0, of_score, of_score * SLOPE)
        z = tl.where(z > 0, z, z * SLOPE)
    if CLAMP >= 0.0:
        of_score = tl.where((z > CLAMP) | (z < -CLAMP), 0.0, of_score)
        z = tl.where(z > CLAMP, CLAMP, tl.where(z < -CLAMP, -CLAMP, z))
    if bias is not None:
        z += _bias_of(bias, of_pairs, starts, element, h, i, j, n, seen, bias_count, first_distance,
                      bias_strides, BIAS, COMPUTE)  # fmt: skip
    z = tl.where(seen, z, -float("inf"))
    of_cap = tl.full(z.shape, 1.0, COMPUTE)
    if SOFTCAP != 0.0:
        z = cap(z, SOFTCAP)
        of_cap = tl.where(z == -float("inf"), 0.0, 1.0 - (z / SOFTCAP) * (z / SOFTCAP))
    return z, seen, of_cap, of_score


@triton.jit
def _is_kept(seed, row, source, threshold):
    """The rule of `gattn.ops.dropout.keep_mask_of_pairs`, `[T, S]`."""
    differing = row ^ tl.load(seed)
    first = mix(mix(differing.to(tl.uint32)) ^ (differing >> 32).to(tl.uint32))
    x = source.to(tl.uint32)[None] + first[:, None]
    x = ((x ^ (x >> 16)) * 0x45D9F3B) ^ mix(first ^ 0x9E3779B9)[:, None]
    x = (x ^ (x >> 16)) * 0x45D9F3B
    return (x ^ (x >> 16)).to(tl.int64) >= threshold


@triton.jit
def _weights(z, seen, stat, LAW: tl.constexpr):
    """Weights and their derivatives, of logits and the statistics of their targets, `[T]`, which may be NaN."""
    if LAW is None:
        p = tl.where(seen & (stat != -float("inf"))[:, None], tl.exp(z - stat[:, None]), 0.0)
        return p, p
    else:
        p, slope = LAW(z)
        return tl.where(seen, p * stat[:, None], 0.0), tl.where(seen, slope * stat[:, None], 0.0)


@triton.jit
def _sum_seen(weights, x, seen, OPERAND: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr):
    """Sums of rows of x, `[S, C]`, with weights `[T, S]`, in which not even NaN counts if it is hidden."""
    if tl.min((tl.abs(x.to(COMPUTE)) < float("inf")).to(tl.int32)) == 1:
        found = tl.dot(weights.to(OPERAND), x.to(OPERAND), input_precision=PRECISION, out_dtype=COMPUTE)
    else:
        found = tl.zeros((weights.shape[0], x.shape[1]), COMPUTE)
        places = tl.arange(0, x.shape[0])
        for place in range(x.shape[0]):
            is_here = places == place
            by = tl.sum(tl.where(is_here[None], weights, 0.0), 1)
            row = tl.sum(tl.where(is_here[:, None], x.to(COMPUTE), 0.0), 0)
            is_seen = tl.max((seen & is_here[None]).to(tl.int32), 1) == 1
            found += tl.where(is_seen[:, None], by[:, None] * row[None], 0.0)
    return found


@_kernel
def tiles_forward(
    query, key, value, bias, mask, of_pairs, starts, sink, seed, out, stats, tasks, elements,
    num_targets, bias_count, first_distance, left, right, threshold,
    query_strides, key_strides, value_strides, bias_strides, mask_strides,
    KEEP_SCALE: tl.constexpr, SCALE: tl.constexpr, SLOPE: tl.constexpr, CLAMP: tl.constexpr, SOFTCAP: tl.constexpr,
    LAW: tl.constexpr, NORMALIZED: tl.constexpr, EPSILON: tl.constexpr, BIAS: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr, VALUE_CHANNELS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_V: tl.constexpr,
    COMPUTE: tl.constexpr, LOADED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Stores the output, and of each target the log-sum-exp, or what its weights are multiplied by."""
    element, start = _task(tasks, elements)
    h = tl.program_id(1).to(tl.int64)
    i = start + tl.arange(0, BLOCK_T)
    batch, first_target, n = tl.load(element), tl.load(element + 1), tl.load(element + 2)
    first_source, m, offset = tl.load(element + 3), tl.load(element + 4), tl.load(element + 5)
    q = _rows(query, batch, first_target + i, h, i < n, query_strides, CHANNELS, BLOCK_C, LOADED)
    most = tl.full((BLOCK_T,), -float("inf"), COMPUTE)
    total = tl.zeros((BLOCK_T,), COMPUTE)
    sums = tl.zeros((BLOCK_T, BLOCK_V), COMPUTE)
    row = (batch * HEADS + h) * num_targets + first_target + i
    begin = tl.maximum(start + offset - left, 0) // BLOCK_S * BLOCK_S
    end = tl.minimum(start + BLOCK_T + offset + right, m)
    for place in range(begin, end, BLOCK_S):
        j = place + tl.arange(0, BLOCK_S)
        k = _rows(key, batch, first_source + j, h // GROUP, j < m, key_strides, CHANNELS, BLOCK_C, LOADED)
        z, seen, _, _ = _tile(
            q, k, bias, of_pairs, starts, mask, element, h, i, j, bias_count, first_distance, left, right,
            bias_strides, mask_strides,
            SCALE, SLOPE, CLAMP, SOFTCAP, BIAS, COMPUTE, PRECISION,
        )  # fmt: skip
        if LAW is None:
            above = tl.maximum(most, tl.max(z, 1))
            base = tl.where(above == -float("inf"), 0.0, above)
            p = tl.exp(z - base[:, None])
            shrinks = tl.exp(most - base)
            total, sums, most = total * shrinks, sums * shrinks[:, None], above
        else:
            p, _ = LAW(z)
        total += tl.sum(p, 1)
        if seed is not None:
            p = tl.where(_is_kept(seed, row, first_source + j, threshold), p, 0.0)
        v = _rows(value, batch, first_source + j, h // GROUP, j < m, value_strides, VALUE_CHANNELS, BLOCK_V, LOADED)
        sums += _sum_seen(p, v, seen, OPERAND, COMPUTE, PRECISION)
    if LAW is None:
        if sink is not None:
            by = tl.load(sink + h).to(COMPUTE)
            above = tl.maximum(most, by)
            base = tl.where(above == -float("inf"), 0.0, above)
            shrinks = tl.exp(most - base)
            total, sums, most = total * shrinks + tl.exp(by - base), sums * shrinks[:, None], above
        base = tl.where(most == -float("inf"), 0.0, most)
        stat = tl.where(total == 0, -float("inf"), base + tl.log(total))
        factor = tl.where(total == 0, 0.0, 1.0 / total)
    else:
        stat = scale_of(total, NORMALIZED, EPSILON)
        factor = stat
    number = (batch * num_targets + first_target + i) * HEADS + h
    tl.store(stats + number, stat, mask=i < n)
    _store_rows(out, number * VALUE_CHANNELS, i < n, sums * (factor * KEEP_SCALE)[:, None], VALUE_CHANNELS, BLOCK_V)


@_kernel
def tiles_weights(
    query, key, bias, mask, of_pairs, starts, seed, stats, weights, tasks, elements,
    num_targets, bias_count, first_distance, left, right, threshold,
    query_strides, key_strides, bias_strides, mask_strides,
    KEEP_SCALE: tl.constexpr, SCALE: tl.constexpr, SLOPE: tl.constexpr, CLAMP: tl.constexpr, SOFTCAP: tl.constexpr,
    LAW: tl.constexpr, BIAS: tl.constexpr, DROPPED: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
    COMPUTE: tl.constexpr, LOADED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Stores the weights of all pairs, given the statistics."""
    element, start = _task(tasks, elements)
    h = tl.program_id(1).to(tl.int64)
    i = start + tl.arange(0, BLOCK_T)
    batch, first_target, n = tl.load(element), tl.load(element + 1), tl.load(element + 2)
    first_source, m = tl.load(element + 3), tl.load(element + 4)
    q = _rows(query, batch, first_target + i, h, i < n, query_strides, CHANNELS, BLOCK_C, LOADED)
    stat = tl.load(stats + (batch * num_targets + first_target + i) * HEADS + h, mask=i < n, other=0.0)
    row = (batch * HEADS + h) * num_targets + first_target + i
    at = weights + tl.load(element + 9) + h * tl.load(element + 10) + i * tl.load(element + 11)
    for place in range(0, m, BLOCK_S):
        j = place + tl.arange(0, BLOCK_S)
        k = _rows(key, batch, first_source + j, h // GROUP, j < m, key_strides, CHANNELS, BLOCK_C, LOADED)
        z, seen, _, _ = _tile(
            q, k, bias, of_pairs, starts, mask, element, h, i, j, bias_count, first_distance, left, right,
            bias_strides, mask_strides,
            SCALE, SLOPE, CLAMP, SOFTCAP, BIAS, COMPUTE, PRECISION,
        )  # fmt: skip
        p, _ = _weights(z, seen, stat, LAW)
        if DROPPED:
            p = tl.where(_is_kept(seed, row, first_source + j, threshold), p * KEEP_SCALE, 0.0)
        tl.store(at[:, None] + j[None], p, mask=(i < n)[:, None] & (j < m)[None])


@triton.jit
def _backward_tile(
    q, k, v, do, stat, delta, bias, of_pairs, starts, mask, seed, grad_weights, element, h, i, j, row,
    bias_count, first_distance, left, right, threshold,
    bias_strides, mask_strides,
    KEEP_SCALE: tl.constexpr, SCALE: tl.constexpr, SLOPE: tl.constexpr, CLAMP: tl.constexpr, SOFTCAP: tl.constexpr,
    LAW: tl.constexpr, BIAS: tl.constexpr, DROPPED: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of a tile: the weights after dropout, which pairs are seen, and gradients of the biased logits, and products."""
    z, seen, of_cap, of_score = _tile(
        q, k, bias, of_pairs, starts, mask, element, h, i, j, bias_count, first_distance, left, right,
        bias_strides, mask_strides, SCALE, SLOPE, CLAMP, SOFTCAP, BIAS, COMPUTE, PRECISION,
    )  # fmt: skip
    p, slope = _weights(z, seen, stat, LAW)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION, out_dtype=COMPUTE)
    of_weights = tl.zeros(dp.shape, COMPUTE)
    if grad_weights is not None:
        at = tl.load(element + 9) + h * tl.load(element + 10) + i * tl.load(element + 11)
        of_weights = tl.load(grad_weights + at[:, None] + j[None], mask=seen, other=0.0)
        if DROPPED:
            dp += of_weights
    if seed is not None:
        kept = _is_kept(seed, row, tl.load(element + 3) + j, threshold).to(COMPUTE) * KEEP_SCALE
        p, dp = p * kept, dp * kept
    if not DROPPED:
        dp += of_weights
    # NaN in the rest of the row does not reach what is hidden.
    dz = tl.where(z == -float("inf"), 0.0, slope * (dp - delta[:, None]) * of_cap)
    return p, seen, dz, dz * of_score


@_kernel
def tiles_by_target(
    query, key, value, bias, mask, of_pairs, starts, seed, stats, delta, grad_out, grad_weights, grad_query, grad_bias,
    tasks, elements, num_targets, bias_count, first_distance, left, right, threshold,
    query_strides, key_strides, value_strides, grad_strides, bias_strides, mask_strides, grad_bias_strides,
    KEEP_SCALE: tl.constexpr, SCALE: tl.constexpr, SLOPE: tl.constexpr, CLAMP: tl.constexpr, SOFTCAP: tl.constexpr,
    LAW: tl.constexpr, BIAS: tl.constexpr, DROPPED: tl.constexpr,
    IS_SHARED: tl.constexpr, SUMS_ROWS: tl.constexpr, SUMS_COLUMNS: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr, VALUE_CHANNELS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_V: tl.constexpr,
    COMPUTE: tl.constexpr, LOADED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Stores the gradients of queries, and adds up those of the bias."""
    element, start = _task(tasks, elements)
    h = tl.program_id(1).to(tl.int64)
    i = start + tl.arange(0, BLOCK_T)
    batch, first_target, n = tl.load(element), tl.load(element + 1), tl.load(element + 2)
    first_source, m, offset = tl.load(element + 3), tl.load(element + 4), tl.load(element + 5)
    target = first_target + i
    q = _rows(query, batch, target, h, i < n, query_strides, CHANNELS, BLOCK_C, LOADED)
    do = _rows(grad_out, batch, target, h, i < n, grad_strides, VALUE_CHANNELS, BLOCK_V, LOADED)
    number = (batch * num_targets + target) * HEADS + h
    stat = tl.load(stats + number, mask=i < n, other=0.0)
    of_row = tl.load(delta + number, mask=i < n, other=0.0)
    sums = tl.zeros((BLOCK_T, BLOCK_C), COMPUTE)
    row = (batch * HEADS + h) * num_targets + target
    begin = tl.maximum(start + offset - left, 0) // BLOCK_S * BLOCK_S
    end = tl.minimum(start + BLOCK_T + offset + right, m)
    for place in range(begin, end, BLOCK_S):
        j = place + tl.arange(0, BLOCK_S)
        k = _rows(key, batch, first_source + j, h // GROUP, j < m, key_strides, CHANNELS, BLOCK_C, LOADED)
        v = _rows(value, batch, first_source + j, h // GROUP, j < m, value_strides, VALUE_CHANNELS, BLOCK_V, LOADED)
        _, seen, dz, ds = _backward_tile(
            q, k, v, do, stat, of_row, bias, of_pairs, starts, mask, seed, grad_weights, element, h, i, j, row,
            bias_count, first_distance, left, right, threshold,
            bias_strides, mask_strides,
            KEEP_SCALE, SCALE, SLOPE, CLAMP, SOFTCAP, LAW, BIAS, DROPPED, COMPUTE, PRECISION,
        )  # fmt: skip
        if grad_bias is not None:
            _add_to_bias(
                grad_bias, of_pairs, starts, element, h, i, j, n, seen, dz, bias_count, first_distance,
                grad_bias_strides, BIAS, IS_SHARED, SUMS_ROWS, SUMS_COLUMNS,
            )  # fmt: skip
        sums += _sum_seen(ds, k, seen, OPERAND, COMPUTE, PRECISION)
    _store_rows(grad_query, number * CHANNELS, i < n, sums, CHANNELS, BLOCK_C)


@_kernel
def tiles_by_source(
    query, key, value, bias, mask, of_pairs, starts, seed, stats, delta, grad_out, grad_weights, grad_key, grad_value,
    tasks, elements, num_targets, num_sources, bias_count, first_distance, left, right, threshold,
    query_strides, key_strides, value_strides, grad_strides, bias_strides, mask_strides,
    KEEP_SCALE: tl.constexpr, SCALE: tl.constexpr, SLOPE: tl.constexpr, CLAMP: tl.constexpr, SOFTCAP: tl.constexpr,
    LAW: tl.constexpr, BIAS: tl.constexpr, DROPPED: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr, VALUE_CHANNELS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_V: tl.constexpr,
    COMPUTE: tl.constexpr, LOADED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Stores the gradients of keys and values."""
    element, start = _task(tasks, elements)
    key_head = tl.program_id(1).to(tl.int64)
    j = start + tl.arange(0, BLOCK_S)
    batch, first_target, n = tl.load(element), tl.load(element + 1), tl.load(element + 2)
    first_source, m, offset = tl.load(element + 3), tl.load(element + 4), tl.load(element + 5)
    k = _rows(key, batch, first_source + j, key_head, j < m, key_strides, CHANNELS, BLOCK_C, LOADED)
    v = _rows(value, batch, first_source + j, key_head, j < m, value_strides, VALUE_CHANNELS, BLOCK_V, LOADED)
    of_keys = tl.zeros((BLOCK_S, BLOCK_C), COMPUTE)
    of_values = tl.zeros((BLOCK_S, BLOCK_V), COMPUTE)
    begin = tl.maximum(start - offset - right, 0) // BLOCK_T * BLOCK_T
    end = tl.minimum(start + BLOCK_S - offset + left, n)
    for h in range(key_head * GROUP, (key_head + 1) * GROUP):
        for place in range(begin, end, BLOCK_T):
            i = place + tl.arange(0, BLOCK_T)
            target = first_target + i
            q = _rows(query, batch, target, h, i < n, query_strides, CHANNELS, BLOCK_C, LOADED)
            do = _rows(grad_out, batch, target, h, i < n, grad_strides, VALUE_CHANNELS, BLOCK_V, LOADED)
            number = (batch * num_targets + target) * HEADS + h
            stat = tl.load(stats + number, mask=i < n, other=0.0)
            of_row = tl.load(delta + number, mask=i < n, other=0.0)
            row = (batch * HEADS + h) * num_targets + target
            p, seen, _, ds = _backward_tile(
                q, k, v, do, stat, of_row, bias, of_pairs, starts, mask, seed, grad_weights, element, h, i, j, row,
                bias_count, first_distance, left, right, threshold,
                bias_strides, mask_strides,
                KEEP_SCALE, SCALE, SLOPE, CLAMP, SOFTCAP, LAW, BIAS, DROPPED, COMPUTE, PRECISION,
            )  # fmt: skip
            of_values += _sum_seen(tl.trans(p), do, tl.trans(seen), OPERAND, COMPUTE, PRECISION)
            of_keys += _sum_seen(tl.trans(ds), q, tl.trans(seen), OPERAND, COMPUTE, PRECISION)
    number = (batch * num_sources + first_source + j) * (HEADS // GROUP) + key_head
    _store_rows(grad_key, number * CHANNELS, j < m, of_keys, CHANNELS, BLOCK_C)
    _store_rows(grad_value, number * VALUE_CHANNELS, j < m, of_values, VALUE_CHANNELS, BLOCK_V)
