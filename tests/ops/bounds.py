"""Whether kernels in Triton's interpreter touch only the tensors that they are given."""

import numpy as np
from torch import Tensor

from gattn.ops.backends.triton import forms as kernels


def _span(tensor):
    """The first byte of a tensor's elements, and the one after the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def check_bounds(monkeypatch):
    """Makes an access outside the tensors of its launch an error, until `monkeypatch` is undone."""
    from triton.runtime.interpreter import InterpreterBuilder

    spans = np.empty((0, 2), np.uint64)
    run, load, store = kernels.run, InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def watched_run(kernel, grid, warps, arguments):
        nonlocal spans
        tensors = [x for x in arguments.values() if isinstance(x, Tensor) and x.numel() > 0]
        spans = np.array(sorted(map(_span, tensors)), np.uint64).reshape(-1, 2)
        spans[:, 1] = np.maximum.accumulate(spans[:, 1])
        run(kernel, grid, warps, arguments)

    def check(pointers, mask):
        first = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)]
        place = np.searchsorted(spans[:, 0], first, side="right")
        end = np.concatenate([[np.uint64(0)], spans[:, 1]])[place]
        size = np.uint64(max(pointers.get_element_ty().primitive_bitwidth // 8, 1))
        assert (first + size <= end).all(), "a kernel accesses memory outside its tensors"

    def checked_load(self, pointers, mask, *arguments):
        check(pointers, mask)
        return load(self, pointers, mask, *arguments)

    def checked_store(self, pointers, value, mask, *arguments):
        check(pointers, mask)
        return store(self, pointers, value, mask, *arguments)

    monkeypatch.setattr(kernels, "run", watched_run)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", checked_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", checked_store)
