"""How the GPU kernels read and write rows of several heads."""

import triton
import triton.language as tl

__all__ = ["load", "load_nodes", "load_scalars", "store", "store_scalars", "store_sums"]


@triton.jit
def load(base, row, stride, offset, is_row, is_offset, COMPUTE: tl.constexpr):
    """Rows of several heads, `[R, H, C]`; zeros where there are none."""
    place = row.to(tl.int64)[:, None, None] * stride + offset[None]
    return tl.load(base + place, mask=is_row[:, None, None] & is_offset[None], other=0.0).to(COMPUTE)


@triton.jit
def load_nodes(
    base, batch, row, batch_stride, row_stride, offset, is_row, is_offset, UNIT: tl.constexpr, COMPUTE: tl.constexpr
):
    """`_load` with strides in units of UNIT elements: the compiler may assume addresses to be multiples of that."""
    return load(base + batch * (batch_stride * UNIT), row, row_stride * UNIT, offset, is_row, is_offset, COMPUTE)


@triton.jit
def load_scalars(base, row, stride, h, is_row, HEADS: tl.constexpr, COMPUTE: tl.constexpr):
    """One number per head, `[R, H]`; zeros where there are none."""
    place = row.to(tl.int64)[:, None] * stride + h[None]
    return tl.load(base + place, mask=is_row[:, None] & (h < HEADS)[None], other=0.0).to(COMPUTE)


@triton.jit
def store(base, row, stride, offset, is_row, is_offset, tile):
    """Writes rows of several heads, `[R, H, C]`."""
    place = row.to(tl.int64)[:, None, None] * stride + offset[None]
    tl.store(base + place, tile, mask=is_row[:, None, None] & is_offset[None])


@triton.jit
def store_scalars(base, row, stride, h, is_row, HEADS: tl.constexpr, tile):
    """Writes one number per head, `[R, H]`."""
    place = row.to(tl.int64)[:, None] * stride + h[None]
    tl.store(base + place, tile, mask=is_row[:, None] & (h < HEADS)[None])


@triton.jit
def store_sums(base, partial, row, slot, offset, is_offset, tile, WIDTH: tl.constexpr):
    """Stores the result of rows with one task, and the partial sums of the others."""
    store(base, row, WIDTH, offset, (row >= 0) & (slot < 0), is_offset, tile)
    store(partial, slot, WIDTH, offset, (row >= 0) & (slot >= 0), is_offset, tile)
