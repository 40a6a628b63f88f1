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

#: Numbers that differ between graphs. Otherwise, Triton would compile a kernel again for multiples of 16, and for 1.
_OF_THE_GRAPH = (
    "num_blocks num_tasks num_slots num_rows num_sources num_targets num_edges num_terms num_split threshold "
    "query_row query_batch key_row key_batch value_row value_batch "
    "edge_batch bias_batch edge_value_batch mask_batch mask_edge mask_head"
)
#: The edges of a task that a step of `forward` and `backward_by_target` reads before it computes. `backward_by_source`
#: keeps more numbers, and would take the registers of other warps: on an H100, its time grew by up to 36 %.
UNROLLED = tl.constexpr(2)

_kernel = triton.jit(do_not_specialize=_OF_THE_GRAPH.split())


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x45D9F3B
    x = (x ^ (x >> 16)) * 0x45D9F3B
    return x ^ (x >> 16)


@triton.jit
def _is_kept(seed, number, threshold):
    """The rule of `gattn.ops.dropout.keep_mask`."""
    differing = number ^ seed
    random = _mix(_mix(differing.to(tl.uint32)) ^ (differing >> 32).to(tl.uint32))
    return random.to(tl.int64) >= threshold


# Families of scores, one function each. q and k are the terms of target and source, [R, H, C] (an edge's own is part of
# k: added, or with MULTIPLIES multiplied), a is the additive score's vector, [1, H, C], and constants have the order in
# which `FAMILIES` names them. Without `grad`, a function returns the logits, [R, H]; with their gradients, [R, H, 1],
# it returns those of q, k and a per edge; for a, anything if the formula has no vector. An edge's gradient follows from
# that of k. The compiler drops what a kernel does not use.


@triton.jit
def _leaky_relu(q, k, a, grad, CONSTANTS: tl.constexpr):
    slope: tl.constexpr = CONSTANTS[0]
    z = q + k
    y = tl.where(z > 0, z, z * slope)
    if grad is None:
        return tl.sum(a * y, axis=2)
    else:
        through = grad * a
        through = tl.where(z > 0, through, through * slope)
        return through, through, grad * y


@triton.jit
def _smooth(q, k, a, grad, CONSTANTS: tl.constexpr):
    name: tl.constexpr = CONSTANTS[0]
    x = q + k
    if name == 0:
        y = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
        slope = 1.0 - y * y
    elif name == 1:  # ELU, by tanh, which loses no digits near zero
        e = _tanh_of(0.5 * tl.minimum(x, 0.0))
        e = 2.0 * e / (1.0 - e)
        y = tl.where(x > 0, x, e)
        slope = e + 1.0
    elif name == 2:  # GELU
        below = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        y = x * below
        slope = below + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    else:  # SiLU
        p = 1.0 / (1.0 + tl.exp(-x))
        y = x * p
        slope = p * (1.0 + x * (1.0 - p))
    if grad is None:
        return tl.sum(a * y, axis=2)
    else:
        through = grad * a * slope
        return through, through, grad * y


@triton.jit
def _dot(q, k, a, grad, CONSTANTS: tl.constexpr):
    scale: tl.constexpr = CONSTANTS[0]
    slope: tl.constexpr = CONSTANTS[1]
    bound: tl.constexpr = CONSTANTS[3]
    s = tl.sum(q * k, axis=2) * scale
    y = tl.where(s > 0, s, s * slope)
    if grad is None:
        if bound != 0.0:
            y = tl.where(y > bound, bound, tl.where(y < -bound, -bound, y))
        return y
    else:
        grad = tl.where((s > 0)[:, :, None], grad, grad * slope) * scale
        if bound != 0.0:
            grad = tl.where(((y > bound) | (y < -bound))[:, :, None], 0.0, grad)
        return grad * k, grad * q, grad


@triton.jit
def _sum(q, k, a, grad, CONSTANTS: tl.constexpr):
    """Not a score: sums the numbers that are passed as gradients of logits."""
    return grad, grad, grad


#: By name: the function, and the names of its constants.
FAMILIES = {
    "gat": (_leaky_relu, ("negative_slope",)),
    "leaky_relu": (_leaky_relu, ("negative_slope",)),
    "smooth": (_smooth, ("activation",)),
    "dot": (_dot, ("scale", "negative_slope", "multiplies", "bound")),
    "sum": (_sum, ()),
}


# Distributions of each logit alone, one function each: weights and their derivatives, except for the scale of a target.
# Minus infinity means no edge, and its weight is zero. The softmax is part of the kernels.


@triton.jit
def _tanh_of(x):
    y = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
    if x.dtype == tl.float64:
        return y
    else:  # near zero, that loses digits; the polynomial is that of the Cephes library
        square = x * x
        near = ((square * -5.70498872745e-3 + 2.06390887954e-2) * square - 5.37397155531e-2) * square
        near = ((near + 1.33314422036e-1) * square - 3.33332819422e-1) * square * x + x
        return tl.where(tl.abs(x) < 0.625, near, y)


@triton.jit
def _sigmoid_law(s):
    p = 1.0 / (1.0 + tl.exp(-s))
    return p, tl.where(s == -float("inf"), 0.0, p * (1.0 - p))


@triton.jit
def _tanh_law(s):
    is_edge = s != -float("inf")
    p = _tanh_of(s)
    return tl.where(is_edge, p, 0.0), tl.where(is_edge, 1.0 - p * p, 0.0)


@triton.jit
def _identity_law(s):
    is_edge = s != -float("inf")
    return tl.where(is_edge, s, 0.0), tl.where(is_edge, 1.0, 0.0).to(s.dtype)


@triton.jit
def _logits_law(s):
    return s, tl.full(s.shape, 1.0, s.dtype)


# Sparse distributions depend on whole rows. Kernels of their own rewrite the logits, so that the rest is a law of each
# logit alone. Its derivative is that for a fixed threshold.


@triton.jit
def _step_law(s):
    return tl.where(s > 0, 1.0, 0.0).to(s.dtype), tl.zeros(s.shape, s.dtype)


@triton.jit
def _sparsemax_law(s):
    step, _ = _step_law(s)
    return tl.where(s < 0, 0.0, s), step


@triton.jit
def _entmax15_law(s):
    root, _ = _sparsemax_law(s)
    return root * root, root


#: By name; the softmax has no function, nor has top-k, which is the softmax of what it keeps.
LAWS = {
    "softmax": None,
    "sigmoid": _sigmoid_law,
    "tanh": _tanh_law,
    "identity": _identity_law,
    "logits": _logits_law,
    "step": _step_law,
    "sparsemax": _sparsemax_law,
    "entmax15": _entmax15_law,
    "top_k": None,
}

#: Of those that depend on whole rows, the law whose weights are the derivatives; `None` if they have no threshold.
ROW_LAWS = {"sparsemax": "step", "entmax15": "sparsemax", "top_k": None}


@triton.jit
def _scale(total, NORMALIZED: tl.constexpr, EPSILON: tl.constexpr):
    """The factor of the sums of weighted values, given the sums of weights."""
    if NORMALIZED:
        total += EPSILON
        return tl.where(total == 0, 0.0, 1.0 / tl.where(total == 0, 1.0, total))
    else:
        return tl.full(total.shape, 1.0, total.dtype)


@triton.jit
def _cap(s, SOFTCAP: tl.constexpr):
    """Logits bounded to ±SOFTCAP, unless it is zero."""
    if SOFTCAP == 0.0:
        return s
    else:
        return tl.where(s == -float("inf"), s, SOFTCAP * _tanh_of(s / SOFTCAP))


@triton.jit
def _load(base, row, stride, offset, is_row, is_offset, COMPUTE: tl.constexpr):
    """Rows of several heads, `[R, H, C]`; zeros where there are none."""
    place = row.to(tl.int64)[:, None, None] * stride + offset[None]
    return tl.load(base + place, mask=is_row[:, None, None] & is_offset[None], other=0.0).to(COMPUTE)


@triton.jit
def _load_nodes(
    base, batch, row, batch_stride, row_stride, offset, is_row, is_offset, UNIT: tl.constexpr, COMPUTE: tl.constexpr
):
    """`_load` with strides in units of UNIT elements: the compiler may assume addresses to be multiples of that."""
    return _load(base + batch * (batch_stride * UNIT), row, row_stride * UNIT, offset, is_row, is_offset, COMPUTE)


@triton.jit
def _load_scalars(base, row, stride, h, is_row, HEADS: tl.constexpr, COMPUTE: tl.constexpr):
    """One number per head, `[R, H]`; zeros where there are none."""
    place = row.to(tl.int64)[:, None] * stride + h[None]
    return tl.load(base + place, mask=is_row[:, None] & (h < HEADS)[None], other=0.0).to(COMPUTE)


@triton.jit
def _store(base, row, stride, offset, is_row, is_offset, tile):
    place = row.to(tl.int64)[:, None, None] * stride + offset[None]
    tl.store(base + place, tile, mask=is_row[:, None, None] & is_offset[None])


@triton.jit
def _store_scalars(base, row, stride, h, is_row, HEADS: tl.constexpr, tile):
    place = row.to(tl.int64)[:, None] * stride + h[None]
    tl.store(base + place, tile, mask=is_row[:, None] & (h < HEADS)[None])


@triton.jit
def _store_sums(base, partial, row, slot, offset, is_offset, tile, WIDTH: tl.constexpr):
    """Stores the result of rows with one task, and the partial sums of the others."""
    _store(base, row, WIDTH, offset, (row >= 0) & (slot < 0), is_offset, tile)
    _store(partial, slot, WIDTH, offset, (row >= 0) & (slot >= 0), is_offset, tile)


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
    s = _cap(s, SOFTCAP)
    if mask is not None:
        place = batch * mask_batch + number.to(tl.int64)[:, None] * mask_edge + (h * mask_head)[None]
        is_edge = is_edge & (tl.load(mask + place, mask=is_edge, other=0) != 0)
    return tl.where(is_edge, s, -float("inf"))


@_kernel
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
        q = _load_nodes(query, batch, row, query_batch, query_row, offset, row >= 0, is_offset, QUERY_UNIT, COMPUTE)
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
        k = _load_nodes(key, batch, j, key_batch, key_row, key_offset, is_edge, is_offset, KEY_UNIT, COMPUTE)
        v = k
        if not KEY_IS_VALUE:
            v = _load_nodes(
                value, batch, j, value_batch, value_row, value_offset, is_edge, is_value, VALUE_UNIT, COMPUTE
            )
        if edge is not None:
            x = _load(edge, batch * edge_batch + e, HEADS * CHANNELS, offset, is_edge, is_offset, COMPUTE)
            k = k * x if MULTIPLIES else k + x
            if EDGE_IS_VALUE:
                v += x
        if edge_value is not None:
            width: tl.constexpr = HEADS * VALUE_CHANNELS
            v += _load(
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
            _store_scalars(logits + batch * num_edges * HEADS, e, HEADS, h, is_edge, HEADS, s)
        total += p
        if seed is not None:
            n = (batch * num_edges + e.to(tl.int64)[:, None]) * HEADS + h[None]
            p = tl.where(_is_kept(drawn, n, threshold), p * keep_scale, 0.0)
        acc += p[:, :, None] * v
    is_whole = (row >= 0) & (slot < 0)
    is_part = (row >= 0) & (slot >= 0)
    at = (batch * num_slots + slot) * 2
    _store_scalars(partial_stats, at, HEADS, h, is_part, HEADS, maximum)
    _store_scalars(partial_stats, at + 1, HEADS, h, is_part, HEADS, total)
    _store(partial, batch * num_slots + slot, HEADS * VALUE_CHANNELS, out_offset, is_part, is_value, acc)
    scale = _scale(total, NORMALIZED, EPSILON)
    acc = acc * scale[:, :, None]
    at = (batch * num_targets + row) * 2
    _store_scalars(stats, at, HEADS, h, is_whole, HEADS, tl.where(maximum == -float("inf"), 0.0, maximum))
    _store_scalars(stats, at + 1, HEADS, h, is_whole, HEADS, scale)
    at = batch * num_targets + row
    _store(out, at, HEADS * VALUE_CHANNELS, out_offset, is_whole, is_value, acc)
    if wide is not None:
        _store(wide, at, HEADS * VALUE_CHANNELS, out_offset, is_whole, is_value, acc)


@_kernel
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
        m = _load_scalars(partial_stats, (batch * num_slots + start + parts) * 2, HEADS, h, is_part, HEADS, COMPUTE)
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
        m = _load_scalars(partial_stats, at * 2, HEADS, h, is_part, HEADS, COMPUTE)
        shrink = tl.exp(tl.where(is_part[:, None], m, -float("inf")) - maximum[None])
        total += tl.sum(shrink * _load_scalars(partial_stats, at * 2 + 1, HEADS, h, is_part, HEADS, COMPUTE), axis=0)
        part = _load(partial, at, HEADS * CHANNELS, offset, is_part, is_offset, COMPUTE)
        acc += tl.sum(shrink[:, :, None] * part, axis=0)
    scale = _scale(total, NORMALIZED, EPSILON)
    acc = acc * scale[:, None]
    at = batch * num_targets + row
    is_row = row >= 0
    tl.store(stats + at * 2 * HEADS + h, maximum, mask=is_row & (h < HEADS))
    tl.store(stats + (at * 2 + 1) * HEADS + h, scale, mask=is_row & (h < HEADS))
    tl.store(out + at * HEADS * CHANNELS + offset, acc, mask=is_row & is_offset)
    if wide is not None:
        tl.store(wide + at * HEADS * CHANNELS + offset, acc, mask=is_row & is_offset)


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


@_kernel
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


@_kernel
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


@_kernel
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


@_kernel
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


@_kernel
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
        key_j = _load_nodes(key, batch, row, key_batch, key_row, key_offset, row >= 0, is_offset, KEY_UNIT, COMPUTE)
        value_j = key_j
        if not KEY_IS_VALUE:
            value_j = _load_nodes(
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
            g = _load(grad_out, target, HEADS * VALUE_CHANNELS, out_offset, is_edge, is_value, COMPUTE)
            q = tl.zeros([BLOCK_R, BLOCK_H, BLOCK_C], COMPUTE)
            if query is not None:
                q = _load_nodes(
                    query, batch, i, query_batch, query_row, offset, is_edge, is_offset, QUERY_UNIT, COMPUTE
                )
            k = key_j
            v = value_j
            if edge is not None:
                x = _load(edge, batch * edge_batch + e, HEADS * CHANNELS, offset, is_edge, is_offset, COMPUTE)
                k = k * x if MULTIPLIES else k + x
                if EDGE_IS_VALUE:
                    v += x
            if edge_value is not None:
                width: tl.constexpr = HEADS * VALUE_CHANNELS
                v += _load(
                    edge_value, batch * edge_value_batch + e, width, out_offset, is_edge, is_value, COMPUTE
                )  # fmt: skip
            s = SCORE(q, k, a, None, CONSTANTS)
            s = _finish(
                s, bias, mask, batch, e, h, is_edge,
                bias_batch, mask_batch, mask_edge, mask_head, SOFTCAP, REWRITTEN, HEADS, COMPUTE,
            )  # fmt: skip
            maximum = _load_scalars(stats, target * 2, HEADS, h, is_edge, HEADS, COMPUTE)
            scale = _load_scalars(stats, target * 2 + 1, HEADS, h, is_edge, HEADS, COMPUTE)
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
                is_kept = _is_kept(drawn, n, threshold)
                dropped = tl.where(is_kept, alpha * keep_scale, 0.0)
                grad_alpha = tl.where(is_kept, grad_alpha * keep_scale, 0.0)
            term = batch * num_terms + e
            if grad_weights is not None:
                grad_alpha += _load_scalars(grad_weights, batch * num_edges + e, HEADS, h, is_edge, HEADS, COMPUTE)
            ds = derivative * (grad_alpha - _load_scalars(delta, target, HEADS, h, is_edge, HEADS, COMPUTE))
            if SOFTCAP != 0.0:
                ds *= tl.where(s == -float("inf"), 0.0, 1.0 - (s / SOFTCAP) * (s / SOFTCAP))
            by_query, t, by_vector = SCORE(q, k, a, ds[:, :, None], CONSTANTS)
            if grad_logits is not None:
                per_edge = tl.sum(by_query, axis=2) if STORES_BY_QUERY else ds
                _store_scalars(grad_logits, term, HEADS, h, is_edge, HEADS, per_edge)
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
                _store(grad_edge, term, HEADS * CHANNELS, offset, is_edge, is_offset, t)
            if grad_edge_value is not None:
                _store(grad_edge_value, term, HEADS * VALUE_CHANNELS, out_offset, is_edge, is_value, u)
        if KEY_IS_VALUE:
            key_sum += value_sum
        source = tl.where(row >= 0, batch * num_sources + row, -1)
        at = tl.where(slot >= 0, batch * num_slots + slot, -1)
        if grad_key is not None:
            _store_sums(grad_key, partial_key, source, at, offset, is_offset, key_sum, HEADS * CHANNELS)
        if grad_value is not None:
            _store_sums(
                grad_value, partial_value, source, at, out_offset, is_value, value_sum, HEADS * VALUE_CHANNELS
            )  # fmt: skip
    if grad_vector is not None:
        place = tl.program_id(0).to(tl.int64) * HEADS * CHANNELS + offset
        tl.store(grad_vector + place, tl.sum(vector_sum, axis=0), mask=is_offset)


@_kernel
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
        q = _load_nodes(query, batch, row, query_batch, query_row, offset, row >= 0, is_offset, QUERY_UNIT, COMPUTE)
    for step in tl.range(0, tl.max(last - first), loop_unroll_factor=UNROLLED):
        place = first + step
        is_edge = place < last
        e = tl.load(number + place, mask=is_edge, other=0)
        ds = _load_scalars(grad_logits, batch * num_terms + e, HEADS, h, is_edge, HEADS, COMPUTE)
        k = q
        if key is not None:
            j = tl.load(node + place, mask=is_edge, other=0)
            k = _load_nodes(key, batch, j, key_batch, key_row, key_offset, is_edge, is_offset, KEY_UNIT, COMPUTE)
            if edge is not None:
                x = _load(edge, batch * edge_batch + e, HEADS * CHANNELS, offset, is_edge, is_offset, COMPUTE)
                k = k * x if MULTIPLIES else k + x
        by_query, _by_key, _by_vector = SCORE(q, k, a, ds[:, :, None], CONSTANTS)
        acc += by_query
    target = tl.where(row >= 0, batch * num_targets + row, -1)
    at = tl.where(slot >= 0, batch * num_slots + slot, -1)
    _store_sums(grad_query, partial, target, at, offset, is_offset, acc, HEADS * CHANNELS)
