"""The formulas of scores and distributions, as functions of the GPU kernels."""

import triton
import triton.language as tl

__all__ = ["FAMILIES", "LAWS", "ROW_LAWS", "cap", "is_kept", "mix", "scale_of"]


@triton.jit
def mix(x):
    """Mixes the bits of a number."""
    x = (x ^ (x >> 16)) * 0x45D9F3B
    x = (x ^ (x >> 16)) * 0x45D9F3B
    return x ^ (x >> 16)


@triton.jit
def is_kept(seed, number, threshold):
    """The rule of `gattn.ops.dropout.keep_mask`."""
    differing = number ^ seed
    random = mix(mix(differing.to(tl.uint32)) ^ (differing >> 32).to(tl.uint32))
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
def scale_of(total, NORMALIZED: tl.constexpr, EPSILON: tl.constexpr):
    """The factor of the sums of weighted values, given the sums of weights."""
    if NORMALIZED:
        total += EPSILON
        return tl.where(total == 0, 0.0, 1.0 / tl.where(total == 0, 1.0, total))
    else:
        return tl.full(total.shape, 1.0, total.dtype)


@triton.jit
def cap(s, SOFTCAP: tl.constexpr):
    """Logits bounded to ±SOFTCAP, unless it is zero."""
    if SOFTCAP == 0.0:
        return s
    else:
        return tl.where(s == -float("inf"), s, SOFTCAP * _tanh_of(s / SOFTCAP))
