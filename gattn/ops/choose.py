"""Which backend computes a call."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gattn.blocks import Setting
from gattn.errors import BackendError
from gattn.ops.backends import BACKENDS, Backend
from gattn.ops.backends.base import Missing
from gattn.ops.call import Call, Way
from gattn.torch_private import is_exporting

__all__ = ["backend", "check_name", "choose", "requested", "ways"]

#: What the block around a call requests.
_requested = Setting("auto")

_BY_NAME: dict[str, Backend | None] = {backend.name: backend for backend in BACKENDS} | {"reference": None}


def choose(name: str, call: Call, plain: str | None) -> Backend | None:
    """The backend that computes a call; `None` for the reference.

    Args:
        name: The call's `backend` argument.
        call: The call.
        plain: Why it needs the reference, as the end of a sentence; `None` if it does not.

    Raises:
        BackendError: If the requested backend cannot serve the call, a `ValueError`; the message says why.
        RuntimeError: If the requested backend is not available on this machine.
    """
    asked = requested(name)
    if asked != "auto":
        wanted = _BY_NAME[asked]
        if wanted is not None and (reason := wanted.refuses(call) or plain) is not None:
            by_block = "The surrounding block requests it; " if name == "auto" else ""
            raise BackendError(f"backend={asked!r} cannot serve this call: {reason}. {by_block}backend='auto' can.")
        if wanted is not None and (missing := wanted.missing()) is not None:
            raise RuntimeError(f"backend={asked!r} needs {missing.what}, but {missing.why}.")
        return wanted
    slower: Backend | None = None
    for backend in BACKENDS if plain is None else ():
        if _unfit(backend, call) is None:
            if (missing := backend.missing()) is not None:
                _warn_once(missing)
            elif slower is None and backend.yields(call):
                slower = backend
            else:
                return backend
    return slower


def _unfit(backend: Backend, call: Call) -> str | None:
    """Why `"auto"` does not choose a backend for a call, as the end of a sentence."""
    if backend.has_operators and is_exporting():
        return "an exported program has to run without gattn"
    if backend.devices is not None and call.value.device.type not in backend.devices:
        return f"the tensors are on {call.value.device}"
    return backend.refuses(call)


def ways(name: str, call: Call, plain: str | None) -> tuple[Backend | None, list[tuple[str, Way]]]:
    """The backend that computes a call, and all ways of all backends, with their names; see `choose`."""
    chosen, found = choose(name, call, plain), list[tuple[str, Way]]()
    for backend in BACKENDS:
        if backend is chosen:
            found += [(backend.name, way) for way in backend.ways(call)]
            continue
        missing, reason = backend.missing(), plain or _unfit(backend, call)
        if reason is None and missing is not None:
            reason = f"it needs {missing.what}, but {missing.why}"
        found.append((backend.name, Way("", reason or "another backend is requested, or faster")))
    return chosen, [*found, ("reference", Way("message passing", None if chosen is None else "a backend computes it"))]


def requested(name: str) -> str:
    """The backend that a call requests by its `backend` argument, or that the block around it requests.

    Raises:
        ValueError: If no backend has that name.
    """
    if name == "auto":
        return _requested.value
    check_name(name)
    return name


def check_name(name: str) -> None:
    """Raises `ValueError` if no backend has this name."""
    if name not in _BY_NAME and name != "auto":
        known = ", ".join(map(repr, ("auto", *_BY_NAME)))
        raise ValueError(f"unknown backend {name!r}: this version of gattn has {known}.")


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Chooses the backend for a block of code.

    An explicit `backend=` argument inside the block takes precedence.

    Around `torch.export.export`, `"cpu"` and `"triton"` keep fused kernels in the program, as operators that `import
    gattn` registers in the process that runs it. With `"auto"`, the program does not need gattn.

    Args:
        name: `"auto"` (the fastest one that can serve a call), `"dense"` (complete graphs, without a list of their
            edges), `"cpu"` or `"triton"` (fused kernels, the latter for CUDA) or `"reference"` (plain PyG message
            passing). A backend that cannot serve a call raises an error.

    Raises:
        ValueError: If no backend has that name.

    Example:
        >>> import gattn
        >>> with gattn.backend("reference"):
        ...     pass
    """
    check_name(name)
    with _requested.block(name):
        yield


_warned: set[str] = set()


def _warn_once(missing: Missing) -> None:
    """Warns once that slower code is used."""
    if missing.what not in _warned and not torch.compiler.is_compiling():
        _warned.add(missing.what)
        warnings.warn(f"attention is computed without {missing.what}, many times slower: {missing.why}.", stacklevel=6)
