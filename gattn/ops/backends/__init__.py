"""The backends: one object for each, in the order in which `backend="auto"` tries them."""

from gattn.ops.backends.base import Backend, Result
from gattn.ops.backends.cpu import Cpu
from gattn.ops.backends.dense import Dense
from gattn.ops.backends.reference import Reference
from gattn.ops.backends.triton import Triton

__all__ = ["BACKENDS", "REFERENCE", "Backend", "Result", "backend_named"]

REFERENCE = Reference()

#: To add a backend, add it here.
BACKENDS: tuple[Backend, ...] = (Dense(), Cpu(), Triton(), REFERENCE)


def backend_named(name: str) -> Backend | None:
    """The backend of this name; `None` for `"auto"`.

    Raises:
        ValueError: If no backend has this name.
    """
    if name == "auto":
        return None
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    known = ", ".join(repr(known) for known in ("auto", *(backend.name for backend in BACKENDS)))
    raise ValueError(f"unknown backend {name!r}: this version of gattn has {known}.")
