"""The GPU kernels, in Triton. Scores and distributions differ in one function each: see `FAMILIES` and `LAWS`.

A row (a target's edges, or a source's) is split into tasks of a few edges (see layout.py beside this file). A program
computes `BLOCK_R` tasks of about the same length in lockstep, one edge of each at a time, for `BLOCK_H` heads: its
tiles are `[R, H, C]`. Rows of several tasks give partial sums, which `combine` and `add_partial` add in a fixed order:
without atomics, every run gives the same bits.

GAT's score is the additive one with a single channel and no vector.

Letters: R tasks of a program, E edges of a row, H heads, C channels (also of the value), P partial sums.
"""

import triton
import triton.language as tl

from gattn.ops.backends.triton.access import load, load_nodes, load_scalars, store, store_scalars, store_sums
from gattn.ops.backends.triton.formulas import FAMILIES, LAWS, ROW_LAWS, cap, is_kept, scale_of
from gattn.ops.backends.triton.rows import keep_largest, kernel, subtract_threshold

__all__ = [
    "FAMILIES",
    "LAWS",
    "ROW_LAWS",
    "add_partial",
    "backward_by_source",
    "backward_by_target",
    "combine",
    "dot_rows",
    "forward",
    "keep_largest",
    "subtract_threshold",
]

#: The edges of a task that a step of `forward` and `backward_by_target` reads before it computes. `backward_by_source`
#: keeps more numbers, and would take the registers of other warps: on an H100, its time grew by up to 36 %.
UNROLLED = tl.constexpr(2)


@triton.jit
def _tasks(tasks, num_tasks, block, BLOCK_R: tl.constexpr):
    """A block's batch element, and the rows (-1 if there is none), edges and slots of its tasks."""
    blocks = tl.cdiv(num_tasks, BLOCK_R)
    batch = (block // blocks).to(tl.int64)
    place = block % blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    is_task = place < num_tasks
    tasks += place
    row = tl.load(tasks, mask=is_task, other=-1)
    tasks += num_tasks
    first = tl.load(tasks, mask=is_task, other=0)
    tasks += num_tasks
    last = tl.load(tasks, mask=is_task, other=0)
    tasks += num_tasks
    slot = tl.load(tasks, mask=is_task, other=-1)
    return batch, row, first, last, slot


@triton.jit
def _heads(
    GROUP: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr
):
    """The positions of this program's heads and channels in a row of all heads, and in one of fewer (key heads)."""
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    c = tl.arange(0, BLOCK_C)
    offset = h[:, None] * CHANNELS + c[None]
    key_offset = (h // GROUP)[:, None] * CHANNELS + c[None]
    return h, offset, key_offset, (h < HEADS)[:, None] & (c < CHANNELS)[None]


@triton.jit
def _weight_vector(vector, offset, is_offset, COMPUTE: tl.constexpr):
    """The additive score's vector, `[1, H, C]`; GAT's score has none."""
    if vector is None:
        return tl.where(is_offset, 1.0, 0.0).to(COMPUTE)[None]
    else:
        return tl.load(vector + offset, mask=is_offset, other=0.0).to(COMPUTE)[None]


@triton.jit
def _finish(
    s, bias, mask, batch, number, h, is_edge, bias_batch, mask_batch, mask_edge, mask_head,
    SOFTCAP: tl.constexpr, REWRITTEN: tl.constexpr, HEADS: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Logits with their bias (or the bias, if it holds them REWRITTEN) and cap; -inf for missing and masked edges."""
    is_edge = is_edge[:, None] & (h < HEADS)[None]
    if bias is not None:
        place = (batch * bias_batch + number)[:, None] * HEADS + h[None]
        term = tl.load(bias + place, mask=is_edge, other=0.0).to(COMPUTE)
        s = term if REWRITTEN else s + term
    s = cap(s, SOFTCAP)
    if mask is not None:
        place = batch * mask_batch + number.to(tl.int64)[:, None] * mask_edge + (h * mask_head)[None]
        is_edge = is_edge & (tl.load(mask + place, mask=is_edge, other=0) != 0)
    return tl.where(is_edge, s, -float("inf"))


@kernel
def forward(
    query, key, value, vector, edge, bias, mask, edge_value, sink, seed,
    tasks, node, number, edge_count,
    out, wide, stats, logits, partial, partial_stats,
    num_tasks, num_slots, num_targets, num_edges,
    query_row: tl.int64, query_batch: tl.int64, key_row: tl.int64, key_batch: tl.int64,
    value_row: tl.int64, value_batch: tl.int64,
    edge_batch, bias_batch, edge_value_batch, mask_batch: tl.int64, mask_edge: tl.int64, mask_head: tl.int64,
    threshold: tl.int64, keep_scale: tl.float64,
    SCORE: tl.constexpr, CONSTANTS: tl.constexpr, MULTIPLIES: tl.constexpr,
    LAW: tl.constexpr, NORMALIZED: tl.constexpr, EPSILON: tl.constexpr, SOFTCAP: tl.constexpr,
    REWRITTEN: tl.constexpr, KEY_IS_VALUE: tl.constexpr, EDGE_IS_VALUE: tl.constexpr,
    QUERY_UNIT: tl.constexpr, KEY_UNIT: tl.constexpr, VALUE_UNIT: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr, VALUE_CHANNELS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_V: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Outputs of all targets, with the maximum and the scale of each.

    If `logits` are requested, they are those of the softmax, or the weights of another law before they are scaled.
    """
    batch, row, first, last, slot = _tasks(tasks, num_tasks, tl.program_id(0), BLOCK_R)
    h, offset, key_offset, is_offset = _heads(GROUP, HEADS, CHANNELS, BLOCK_H, BLOCK_C)
    _, out_offset, value_offset, is_value = _heads(GROUP, HEADS, VALUE_CHANNELS, BLOCK_H, BLOCK_V)
    a = _weight_vector(vector, offset, is_offset, COMPUTE)
    q = tl.zeros([BLOCK_R, BLOCK_H, BLOCK_C], COMPUTE)
    if query is not None:
        q = load_nodes(query, batch, row, query_batch, query_row, offset, row >= 0, is_offset, QUERY_UNIT, COMPUTE)
    if seed is not None:
        drawn = tl.load(seed)
        if edge_count is not None:
            num_edges = tl.load(edge_count)
        keep_scale = (tl.zeros([1, 1], COMPUTE) + keep_scale).to(COMPUTE)
    maximum = tl.zeros([BLOCK_R, BLOCK_H], COMPUTE)
    if LAW is None:
        maximum = tl.full([BLOCK_R, BLOCK_H], -float("inf"), COMPUTE)
    total = tl.zeros([BLOCK_R, BLOCK_H], COMPUTE)
    if sink is not None:
        # If a row has several tasks, `combine` adds the sink.
        first_logit = tl.load(sink + h, mask=h < HEADS, other=-float("inf")).to(COMPUTE)[None]
        maximum = tl.where((slot < 0)[:, None], first_logit, maximum)
        total = tl.where(maximum == -float("inf"), total, 1.0)
    acc = tl.zeros([BLOCK_R, BLOCK_H, BLOCK_V], COMPUTE)
    for step in tl.range(0, tl.max(last - first), loop_unroll_factor=UNROLLED):
        place = first + step
        is_edge = place < last
        j = tl.load(node + place, mask=is_edge, other=0)
        e = tl.load(number + place, mask=is_edge, other=0)
        k = load_nodes(key, batch, j, key_batch, key_row, key_offset, is_edge, is_offset, KEY_UNIT, COMPUTE)
        v = k
        if not KEY_IS_VALUE:
            v = load_nodes(
                value, batch, j, value_batch, value_row, value_offset, is_edge, is_value, VALUE_UNIT, COMPUTE
            )
        if edge is not None:
            x = load(edge, batch * edge_batch + e, HEADS * CHANNELS, offset, is_edge, is_offset, COMPUTE)
            k = k * x if MULTIPLIES else k + x
            if EDGE_IS_VALUE:
                v += x
        if edge_value is not None:
            width: tl.constexpr = HEADS * VALUE_CHANNELS
            v += load(
                edge_value, batch * edge_value_batch + e, width, out_offset, is_edge, is_value, COMPUTE
            )  # fmt: skip
        s = SCORE(q, k, a, None, CONSTANTS)
        s = _finish(
            s, bias, mask, batch, e, h, is_edge,
            bias_batch, mask_batch, mask_edge, mask_head, SOFTCAP, REWRITTEN, HEADS, COMPUTE,
        )  # fmt: skip
        if LAW is None:
            higher = tl.maximum(maximum, s)
            safe = tl.where(higher == -float("inf"), 0.0, higher)
            shrink = tl.exp(maximum - safe)
            maximum = higher
            total *= shrink
            acc *= shrink[:, :, None]
            p = tl.exp(s - safe)
        else:
            p, _derivative = LAW(s)
            s = p
        if logits is not None:
            store_scalars(logits + batch * num_edges * HEADS, e, HEADS, h, is_edge, HEADS, s)
        total += p
        if seed is not None:
            n = (batch * num_edges + e.to(tl.int64)[:, None]) * HEADS + h[None]
            p = tl.where(is_kept(drawn, n, threshold), p * keep_scale, 0.0)
        acc += p[:, :, None] * v
    is_whole = (row >= 0) & (slot < 0)
    is_part = (row >= 0) & (slot >= 0)
    at = (batch * num_slots + slot) * 2
    store_scalars(partial_stats, at, HEADS, h, is_part, HEADS, maximum)
    store_scalars(partial_stats, at + 1, HEADS, h, is_part, HEADS, total)
    store(partial, batch * num_slots + slot, HEADS * VALUE_CHANNELS, out_offset, is_part, is_value, acc)
    scale = scale_of(total, NORMALIZED, EPSILON)
    acc = acc * scale[:, :, None]
    at = (batch * num_targets + row) * 2
    store_scalars(stats, at, HEADS, h, is_whole, HEADS, tl.where(maximum == -float("inf"), 0.0, maximum))
    store_scalars(stats, at + 1, HEADS, h, is_whole, HEADS, scale)
    at = batch * num_targets + row
    store(out, at, HEADS * VALUE_CHANNELS, out_offset, is_whole, is_value, acc)
    if wide is not None:
        store(wide, at, HEADS * VALUE_CHANNELS, out_offset, is_whole, is_value, acc)


@kernel
def combine(
    split, sink, partial, partial_stats, out, wide, stats,
    num_split, num_slots, num_targets,
    NORMALIZED: tl.constexpr, EPSILON: tl.constexpr,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Outputs of targets with several tasks, from their parts."""
    batch = (tl.program_id(0) // num_split).to(tl.int64)
    place = tl.program_id(0) % num_split
    row = tl.load(split + place)
    first = tl.load(split + num_split + place)
    last = tl.load(split + 2 * num_split + place)
    h, offset, _, is_offset = _heads(1, HEADS, CHANNELS, BLOCK_H, BLOCK_C)
    parts = tl.arange(0, BLOCK_P)
    maximum = tl.full([BLOCK_P, BLOCK_H], -float("inf"), COMPUTE)
    for start in range(first, last, BLOCK_P):
        is_part = start + parts < last
        m = load_scalars(partial_stats, (batch * num_slots + start + parts) * 2, HEADS, h, is_part, HEADS, COMPUTE)
        maximum = tl.maximum(maximum, tl.where(is_part[:, None], m, -float("inf")))
    maximum = tl.max(maximum, axis=0)
    if sink is not None:
        first_logit = tl.load(sink + h, mask=h < HEADS, other=-float("inf")).to(COMPUTE)
        maximum = tl.maximum(maximum, first_logit)
    maximum = tl.where(maximum == -float("inf"), 0.0, maximum)
    total = tl.zeros([BLOCK_H], COMPUTE)
    if sink is not None:
        total += tl.exp(first_logit - maximum)
    acc = tl.zeros([BLOCK_H, BLOCK_C], COMPUTE)
    for start in range(first, last, BLOCK_P):
        is_part = start + parts < last
        at = batch * num_slots + start + parts
        m = load_scalars(partial_stats, at * 2, HEADS, h, is_part, HEADS, COMPUTE)
        shrink = tl.exp(tl.where(is_part[:, None], m, -float("inf")) - maximum[None])
        total += tl.sum(shrink * load_scalars(partial_stats, at * 2 + 1, HEADS, h, is_part, HEADS, COMPUTE), axis=0)
        part = load(partial, at, HEADS * CHANNELS, offset, is_part, is_offset, COMPUTE)
        acc += tl.sum(shrink[:, :, None] * part, axis=0)
    scale = scale_of(total, NORMALIZED, EPSILON)
    acc = acc * scale[:, None]
    at = batch * num_targets + row
    is_row = row >= 0
    tl.store(stats + at * 2 * HEADS + h, maximum, mask=is_row & (h < HEADS))
    tl.store(stats + (at * 2 + 1) * HEADS + h, scale, mask=is_row & (h < HEADS))
    tl.store(out + at * HEADS * CHANNELS + offset, acc, mask=is_row & is_offset)
    if wide is not None:
        tl.store(wide + at * HEADS * CHANNELS + offset, acc, mask=is_row & is_offset)


@kernel
def add_partial(
    split, partial, out, num_split, num_slots, num_rows,
    WIDTH: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Sums of rows with several tasks, from their parts."""
    batch = (tl.program_id(0) // num_split).to(tl.int64)
    place = tl.program_id(0) % num_split
    row = tl.load(split + place)
    first = tl.load(split + num_split + place)
    last = tl.load(split + 2 * num_split + place)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    parts = tl.arange(0, BLOCK_P)
    acc = tl.zeros([BLOCK_P, BLOCK_C], COMPUTE)
    for start in range(first, last, BLOCK_P):
        at = (batch * num_slots + start + parts)[:, None] * WIDTH + c[None]
        acc += tl.load(partial + at, mask=(start + parts < last)[:, None] & (c < WIDTH)[None], other=0.0)
    at = (batch * num_rows + row) * WIDTH + c
    tl.store(out + at, tl.sum(acc, axis=0), mask=(row >= 0) & (c < WIDTH))


@kernel
def dot_rows(
    grad_out, wide, delta, num_rows: tl.int64,
    CHANNELS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """The products of two rows of `CHANNELS` numbers, summed, for each of `num_rows`."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.arange(0, BLOCK_C)
    there = (row < num_rows)[:, None] & (c < CHANNELS)[None]
    at = row[:, None] * CHANNELS + c[None]
    product = tl.load(grad_out + at, mask=there, other=0.0).to(COMPUTE) * tl.load(wide + at, mask=there, other=0.0)
    tl.store(delta + row, tl.sum(product, axis=1), mask=row < num_rows)


@kernel
def backward_by_source(
    query, key, value, vector, edge, bias, mask, edge_value, sink, seed,
    grad_out, grad_weights, stats, delta,
    tasks, node, number, edge_count,
    grad_key, grad_value, partial_key, partial_value, grad_vector, grad_logits, grad_edge, grad_edge_value,
    num_blocks, num_tasks, num_slots, num_sources, num_targets, num_edges, num_terms,
    query_row: tl.int64, query_batch: tl.int64, key_row: tl.int64, key_batch: tl.int64,
    value_row: tl.int64, value_batch: tl.int64,
    edge_batch, bias_batch, edge_value_batch, mask_batch: tl.int64, mask_edge: tl.int64, mask_head: tl.int64,
    threshold: tl.int64, keep_scale: tl.float64,
    SCORE: tl.constexpr, CONSTANTS: tl.constexpr, MULTIPLIES: tl.constexpr, LAW: tl.constexpr, SOFTCAP: tl.constexpr,
    REWRITTEN: tl.constexpr, KEY_IS_VALUE: tl.constexpr, EDGE_IS_VALUE: tl.constexpr, STORES_BY_QUERY: tl.constexpr,
    QUERY_UNIT: tl.constexpr, KEY_UNIT: tl.constexpr, VALUE_UNIT: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr, VALUE_CHANNELS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_V: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Gradients of the terms of sources and edges, of the logits, and this program's part of the vector's."""
    h, offset, key_offset, is_offset = _heads(GROUP, HEADS, CHANNELS, BLOCK_H, BLOCK_C)
    _, out_offset, value_offset, is_value = _heads(GROUP, HEADS, VALUE_CHANNELS, BLOCK_H, BLOCK_V)
    a = _weight_vector(vector, offset, is_offset, COMPUTE)
    if seed is not None:
        drawn = tl.load(seed)
        if edge_count is not None:
            num_edges = tl.load(edge_count)
        keep_scale = (tl.zeros([1, 1], COMPUTE) + keep_scale).to(COMPUTE)
    vector_sum = tl.zeros([BLOCK_R, BLOCK_H, BLOCK_C], COMPUTE)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        batch, row, first, last, slot = _tasks(tasks, num_tasks, block, BLOCK_R)
        key_j = load_nodes(key, batch, row, key_batch, key_row, key_offset, row >= 0, is_offset, KEY_UNIT, COMPUTE)
        value_j = key_j
        if not KEY_IS_VALUE:
            value_j = load_nodes(
                value, batch, row, value_batch, value_row, value_offset, row >= 0, is_value, VALUE_UNIT, COMPUTE
            )
        key_sum = tl.zeros([BLOCK_R, BLOCK_H, BLOCK_C], COMPUTE)
        value_sum = tl.zeros([BLOCK_R, BLOCK_H, BLOCK_V], COMPUTE)
        for step in range(0, tl.max(last - first)):
            place = first + step
            is_edge = place < last
            i = tl.load(node + place, mask=is_edge, other=0)
            e = tl.load(number + place, mask=is_edge, other=0)
            target = batch * num_targets + i
            g = load(grad_out, target, HEADS * VALUE_CHANNELS, out_offset, is_edge, is_value, COMPUTE)
            q = tl.zeros([BLOCK_R, BLOCK_H, BLOCK_C], COMPUTE)
            if query is not None:
                q = load_nodes(query, batch, i, query_batch, query_row, offset, is_edge, is_offset, QUERY_UNIT, COMPUTE)
            k = key_j
            v = value_j
            if edge is not None:
                x = load(edge, batch * edge_batch + e, HEADS * CHANNELS, offset, is_edge, is_offset, COMPUTE)
                k = k * x if MULTIPLIES else k + x
                if EDGE_IS_VALUE:
                    v += x
            if edge_value is not None:
                width: tl.constexpr = HEADS * VALUE_CHANNELS
                v += load(
                    edge_value, batch * edge_value_batch + e, width, out_offset, is_edge, is_value, COMPUTE
                )  # fmt: skip
            s = SCORE(q, k, a, None, CONSTANTS)
            s = _finish(
                s, bias, mask, batch, e, h, is_edge,
                bias_batch, mask_batch, mask_edge, mask_head, SOFTCAP, REWRITTEN, HEADS, COMPUTE,
            )  # fmt: skip
            maximum = load_scalars(stats, target * 2, HEADS, h, is_edge, HEADS, COMPUTE)
            scale = load_scalars(stats, target * 2 + 1, HEADS, h, is_edge, HEADS, COMPUTE)
            if LAW is None:
                alpha = tl.exp(s - maximum) * scale
                derivative = alpha
            else:
                alpha, derivative = LAW(s)
                alpha *= scale
                derivative *= scale
            dropped = alpha
            grad_alpha = tl.sum(g * v, axis=2)
            if seed is not None:
                n = (batch * num_edges + e.to(tl.int64)[:, None]) * HEADS + h[None]
                kept = is_kept(drawn, n, threshold)
                dropped = tl.where(kept, alpha * keep_scale, 0.0)
                grad_alpha = tl.where(kept, grad_alpha * keep_scale, 0.0)
            term = batch * num_terms + e
            if grad_weights is not None:
                grad_alpha += load_scalars(grad_weights, batch * num_edges + e, HEADS, h, is_edge, HEADS, COMPUTE)
            ds = derivative * (grad_alpha - load_scalars(delta, target, HEADS, h, is_edge, HEADS, COMPUTE))
            if SOFTCAP != 0.0:
                ds *= tl.where(s == -float("inf"), 0.0, 1.0 - (s / SOFTCAP) * (s / SOFTCAP))
            by_query, t, by_vector = SCORE(q, k, a, ds[:, :, None], CONSTANTS)
            if grad_logits is not None:
                per_edge = tl.sum(by_query, axis=2) if STORES_BY_QUERY else ds
                store_scalars(grad_logits, term, HEADS, h, is_edge, HEADS, per_edge)
            if grad_vector is not None:
                vector_sum += by_vector
            u = dropped[:, :, None] * g
            key_sum += t * x if MULTIPLIES else t
            value_sum += u
            if MULTIPLIES:
                t *= key_j
            if EDGE_IS_VALUE:
                t += u
            if grad_edge is not None:
                store(grad_edge, term, HEADS * CHANNELS, offset, is_edge, is_offset, t)
            if grad_edge_value is not None:
                store(grad_edge_value, term, HEADS * VALUE_CHANNELS, out_offset, is_edge, is_value, u)
        if KEY_IS_VALUE:
            key_sum += value_sum
        source = tl.where(row >= 0, batch * num_sources + row, -1)
        at = tl.where(slot >= 0, batch * num_slots + slot, -1)
        if grad_key is not None:
            store_sums(grad_key, partial_key, source, at, offset, is_offset, key_sum, HEADS * CHANNELS)
        if grad_value is not None:
            store_sums(
                grad_value, partial_value, source, at, out_offset, is_value, value_sum, HEADS * VALUE_CHANNELS
            )  # fmt: skip
    if grad_vector is not None:
        place = tl.program_id(0).to(tl.int64) * HEADS * CHANNELS + offset
        tl.store(grad_vector + place, tl.sum(vector_sum, axis=0), mask=is_offset)


@kernel
def backward_by_target(
    query, key, vector, edge, grad_logits,
    tasks, node, number,
    grad_query, partial,
    num_tasks, num_slots, num_targets, num_terms,
    query_row: tl.int64, query_batch: tl.int64, key_row: tl.int64, key_batch: tl.int64, edge_batch,
    SCORE: tl.constexpr, CONSTANTS: tl.constexpr, MULTIPLIES: tl.constexpr,
    QUERY_UNIT: tl.constexpr, KEY_UNIT: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr, VALUE_CHANNELS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_V: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Gradients of queries; without query and key, sums of `grad_logits`."""
    batch, row, first, last, slot = _tasks(tasks, num_tasks, tl.program_id(0), BLOCK_R)
    h, offset, key_offset, is_offset = _heads(GROUP, HEADS, CHANNELS, BLOCK_H, BLOCK_C)
    acc = tl.zeros([BLOCK_R, BLOCK_H, BLOCK_C], COMPUTE)
    a = _weight_vector(vector, offset, is_offset, COMPUTE)
    q = acc
    if query is not None:
        q = load_nodes(query, batch, row, query_batch, query_row, offset, row >= 0, is_offset, QUERY_UNIT, COMPUTE)
    for step in tl.range(0, tl.max(last - first), loop_unroll_factor=UNROLLED):
        place = first + step
        is_edge = place < last
        e = tl.load(number + place, mask=is_edge, other=0)
        ds = load_scalars(grad_logits, batch * num_terms + e, HEADS, h, is_edge, HEADS, COMPUTE)
        k = q
        if key is not None:
            j = tl.load(node + place, mask=is_edge, other=0)
            k = load_nodes(key, batch, j, key_batch, key_row, key_offset, is_edge, is_offset, KEY_UNIT, COMPUTE)
            if edge is not None:
                x = load(edge, batch * edge_batch + e, HEADS * CHANNELS, offset, is_edge, is_offset, COMPUTE)
                k = k * x if MULTIPLIES else k + x
        by_query, _by_key, _by_vector = SCORE(q, k, a, ds[:, :, None], CONSTANTS)
        acc += by_query
    target = tl.where(row >= 0, batch * num_targets + row, -1)
    at = tl.where(slot >= 0, batch * num_slots + slot, -1)
    store_sums(grad_query, partial, target, at, offset, is_offset, acc, HEADS * CHANNELS)
