"""The backends beside the reference: one object for each, in the order in which `backend="auto"` tries them."""

from gattn.ops.backends.base import Backend
from gattn.ops.backends.cpu import Cpu
from gattn.ops.backends.dense import Dense
from gattn.ops.backends.triton import Triton

__all__ = ["BACKENDS", "Backend"]

#: To add a backend, add it here.
BACKENDS: tuple[Backend, ...] = (Dense(), Cpu(), Triton())
