"""Reads pickles and PyTorch's files without running the code that they may contain.

A pickle is a program: reading one with Python's `pickle` calls whatever functions the file names. Here, the names that
data files need are mapped to inert stand-ins, which only store what they are given until it has been checked. Every
other name is refused. `SECURITY.md` says how each data set is read.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from torch_geometric.data import Data
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import EdgeStorage, GlobalStorage, NodeStorage

from gattn.datasets.checks import csr_matrix
from gattn.datasets.errors import DatasetUnavailableError
from gattn.torch_private import load_allowing

__all__ = ["read_pickle", "read_torch"]

# Pickles -------------------------------------------------------------------------------------------------------------


class _Inert:
    """Stands in for something that a file names."""

    # Without this, a file could set attributes of the classes here.
    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError(f"{type(self).__name__} cannot have a state")


class _DType(_Inert):
    """Stands in for `numpy.dtype`, whose own state could hide that its elements are pointers."""

    def __init__(self, code: str, *_: Any) -> None:
        self.code, self.order = code, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1]

    def checked(self) -> np.dtype[Any]:
        name = f"{self.order}{self.code}"
        if not re.fullmatch(r"[<>=|](b1|[iu][1248]|f[248])", name):
            raise pickle.UnpicklingError(f"arrays of type {name!r} are not read, only numbers and booleans")
        return np.dtype(name)


class _Array(_Inert):
    """Stands in for `numpy.ndarray`, and for the function that creates an empty one."""

    value: NDArray[Any] | None = None

    def __new__(cls, *_: Any) -> _Array:
        return super().__new__(cls)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, raw = state
        self.value = _array(raw, dtype, shape, "F" if fortran else "C")


class _Buffer(_Inert):
    """Stands in for the function with which protocol 5 creates an array."""

    def __new__(cls, raw: bytes, dtype: _DType, shape: tuple[int, ...], order: str) -> Any:
        return _array(raw, dtype, shape, order)


class _Scalar(_Inert):
    """Stands in for the function that creates a NumPy scalar."""

    def __new__(cls, dtype: _DType, raw: bytes) -> Any:
        return _array(raw, dtype, (), "C")[()]


class _Bytes(_Inert):
    """Stands in for `_codecs.encode`, with which protocol 2 stores bytes."""

    def __new__(cls, text: str, encoding: str) -> Any:
        if encoding not in ("latin1", "latin-1"):
            raise pickle.UnpicklingError(f"bytes must be encoded as latin1, not as {encoding!r}")
        return text.encode("latin1")


class _Matrix(_Inert):
    """Stands in for `scipy.sparse.csr_matrix`."""

    value: scipy.sparse.csr_matrix | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        data, indices, indptr = (_unwrapped(state[name]) for name in ("data", "indices", "indptr"))
        self.value = csr_matrix(data, indices, indptr, state["_shape"])


_NUMPY = {
    "numpy.ndarray": _Array,
    "numpy.dtype": _DType,
    # NumPy 1 and NumPy 2 write different names.
    **{
        f"numpy.{core}.{name}": stand_in
        for core in ("core", "_core")
        for name, stand_in in (
            ("multiarray._reconstruct", _Array),
            ("multiarray.scalar", _Scalar),
            ("numeric._frombuffer", _Buffer),
        )
    },
}

#: Every name that occurs in pickles of NumPy arrays, SciPy matrices and built-in containers.
_ALLOWED: dict[str, Any] = {
    **_NUMPY,
    "scipy.sparse.csr.csr_matrix": _Matrix,
    "scipy.sparse._csr.csr_matrix": _Matrix,
    "collections.defaultdict": defaultdict,
    "__builtin__.list": list,
    "builtins.list": list,
    "_codecs.encode": _Bytes,
}


class _RefusedError(pickle.UnpicklingError):
    """A file names something that is not allowed."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        if path not in _ALLOWED:
            raise _RefusedError(path)
        return _ALLOWED[path]


def read_pickle(path: Path, trust_files: bool = False) -> Any:
    """Reads a pickle of arrays, sparse matrices and built-in containers, such as those of Planetoid.

    Args:
        path: The file to read.
        trust_files: Whether to read the file with Python's `pickle`, which runs any code in it. (default: `False`)

    Raises:
        DatasetUnavailableError: If the file asks for anything else.
    """
    with path.open("rb") as file:
        if trust_files:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*is deprecated", DeprecationWarning)  # names from an older SciPy
                return pickle.load(file, encoding="latin1")
        try:
            return _unwrapped(_Unpickler(file, encoding="latin1").load())
        except _RefusedError as error:
            raise _refusal(path, str(error)) from None


def _refusal(path: Path, wanted: str) -> DatasetUnavailableError:
    remedy = (
        "gattn makes it again from the raw files" if path.parent.name == "processed" else "get it again from its source"
    )
    return DatasetUnavailableError(
        f"{path} cannot be read safely: it asks for {wanted}, which data do not need and which could run any code. "
        f"No code was run. Delete the file and load again ({remedy}). Only if you trust whoever made the file, pass "
        "trust_files=True to gattn.datasets.load, which then runs whatever the file asks for."
    )


def _array(raw: bytes | str, dtype: _DType, shape: tuple[int, ...], order: str) -> NDArray[Any]:
    checked = dtype.checked()
    content = raw.encode("latin1") if isinstance(raw, str) else raw
    array = np.frombuffer(content, checked).reshape(shape, order="F" if order == "F" else "C")
    return array.astype(checked.newbyteorder("="))


def _unwrapped(content: Any) -> Any:
    """Replaces the inert stand-ins anywhere in `content` with the arrays and matrices that they describe."""
    if isinstance(content, _Array | _Matrix):
        if content.value is None:
            raise pickle.UnpicklingError("the file holds an array without content")
        return content.value
    if isinstance(content, _Inert) or (isinstance(content, type) and issubclass(content, _Inert)):
        raise pickle.UnpicklingError("the file holds a name in place of data")
    if isinstance(content, dict):
        return {_unwrapped(key): _unwrapped(value) for key, value in content.items()}
    if type(content) in (list, tuple):
        return type(content)(_unwrapped(value) for value in content)
    return content


# PyTorch's files -----------------------------------------------------------------------------------------------------

#: What the processed files of PyG, of OGB and of OGB's DatasetSaver name in addition to tensors.
_TORCH_ALLOWED: list[Any] = [Data, DataEdgeAttr, DataTensorAttr, GlobalStorage, NodeStorage, EdgeStorage]
_TORCH_ALLOWED += [(stand_in, path) for path, stand_in in _NUMPY.items()]


def read_torch(path: Path, trust_files: bool = False) -> Any:
    """Reads a file that `torch.save` wrote and that holds tensors, PyG's `Data`, arrays and built-in containers.

    Args:
        path: The file to read.
        trust_files: Whether to read the file with `weights_only=False`, which runs any code in it. (default: `False`)

    Raises:
        DatasetUnavailableError: If the file asks for anything else.
    """
    if trust_files:
        return torch.load(path, weights_only=False)
    try:
        return _unwrapped(load_allowing(path, _TORCH_ALLOWED))
    except pickle.UnpicklingError as error:
        # The rest of PyTorch's message advises the user to load the file unsafely.
        if name := re.search(r"GLOBAL (\S+)", str(error)):
            raise _refusal(path, name[1]) from None
        reason = str(error).rpartition("WeightsUnpickler error:")[2].strip()
        raise pickle.UnpicklingError(reason.split("\n")[0]) from None
