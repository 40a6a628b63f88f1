"""Reads data files without running what they hold.

A pickle is a program: reading one with Python's `pickle` calls whatever functions the file names. Here, the names that
data files need stand for inert objects, which keep what they are given until it has been checked; every other name is
refused. `SECURITY.md` says which data set is read how.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import shutil
import threading
import urllib.request
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import EdgeStorage, GlobalStorage, NodeStorage

_TIMEOUT_SECONDS = 30.0


class DatasetUnavailableError(FileNotFoundError):
    """A data set is not there, cannot be downloaded or cannot be read; the message says which files and what to do."""


# Pickles #############################################################################################################


class _Inert:
    """Stands for something that a file names."""

    # Without this, a file could set attributes of the classes here.
    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError(f"{type(self).__name__} has no state")


class _DType(_Inert):
    """Stands for `numpy.dtype`, whose own state may lie about what holds pointers."""

    def __init__(self, code: str, *_: Any) -> None:
        self.code, self.order = code, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1]

    def checked(self) -> np.dtype:
        name = f"{self.order}{self.code}"
        if not re.fullmatch(r"[<>=|](b1|[iu][1248]|f[248])", name):
            raise pickle.UnpicklingError(f"arrays of type {name!r} are not read, only numbers and truth values")
        return np.dtype(name)


class _Array(_Inert):
    """Stands for `numpy.ndarray`, and for the function that makes an empty one."""

    value: np.ndarray | None = None

    def __new__(cls, *_: Any) -> _Array:
        return super().__new__(cls)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, raw = state
        self.value = _array(raw, dtype, shape, "F" if fortran else "C")


class _Buffer(_Inert):
    """Stands for the function by which protocol 5 makes an array."""

    def __new__(cls, raw: bytes, dtype: _DType, shape: tuple[int, ...], order: str) -> Any:
        return _array(raw, dtype, shape, order)


class _Scalar(_Inert):
    """Stands for the function that makes one of NumPy's numbers."""

    def __new__(cls, dtype: _DType, raw: bytes) -> Any:
        return _array(raw, dtype, (), "C")[()]


class _Bytes(_Inert):
    """Stands for `_codecs.encode`, by which protocol 2 holds bytes."""

    def __new__(cls, text: str, encoding: str) -> Any:
        if encoding not in ("latin1", "latin-1"):
            raise pickle.UnpicklingError(f"bytes encoded as {encoding!r}")
        return text.encode("latin1")


class _Matrix(_Inert):
    """Stands for `scipy.sparse.csr_matrix`."""

    value: scipy.sparse.csr_matrix | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        data, indices, indptr = (_plain(state[name]) for name in ("data", "indices", "indptr"))
        self.value = csr_matrix(data, indices, indptr, state["_shape"])


_NUMPY = {
    "numpy.ndarray": _Array,
    "numpy.dtype": _DType,
    # NumPy 1 wrote other names than NumPy 2.
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

#: All that a pickle of NumPy arrays, SciPy matrices and built-in containers names.
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
    """A file names what is not allowed."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        if path not in _ALLOWED:
            raise _RefusedError(path)
        return _ALLOWED[path]


def read_pickle(path: Path, trust_files: bool = False) -> Any:
    """Reads a pickle of arrays, sparse matrices and built-in containers, as Planetoid's are.

    Args:
        path: The file.
        trust_files: Read it by Python's `pickle`, which runs what it holds. (default: `False`)

    Raises:
        DatasetUnavailableError: If the file names anything else.
    """
    with path.open("rb") as file:
        if trust_files:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*is deprecated", DeprecationWarning)  # names of an older SciPy
                return pickle.load(file, encoding="latin1")
        try:
            return _plain(_Unpickler(file, encoding="latin1").load())
        except _RefusedError as error:
            raise _refusal(path, str(error)) from None


def _refusal(path: Path, wanted: str) -> DatasetUnavailableError:
    remedy = "gattn makes it again from the raw files" if path.parent.name == "processed" else "get it from its source"
    return DatasetUnavailableError(
        f"{path} cannot be read safely: it asks for {wanted}, which data do not need and which could run any code. "
        f"None was run. Delete the file and load again ({remedy}). Only if you trust whoever made the file, pass "
        "trust_files=True to gattn.datasets.load, which then runs whatever the file asks for."
    )


def _array(raw: bytes | str, dtype: _DType, shape: tuple[int, ...], order: str) -> np.ndarray:
    checked = dtype.checked()
    content = raw.encode("latin1") if isinstance(raw, str) else raw
    array = np.frombuffer(content, checked).reshape(shape, order="F" if order == "F" else "C")
    return array.astype(checked.newbyteorder("="))


def _plain(content: Any) -> Any:
    """What the inert objects stand for, wherever they are in `content`."""
    if isinstance(content, _Array | _Matrix):
        if content.value is None:
            raise pickle.UnpicklingError("an array without content")
        return content.value
    if isinstance(content, _Inert) or (isinstance(content, type) and issubclass(content, _Inert)):
        raise pickle.UnpicklingError("no data")
    if isinstance(content, dict):
        return {_plain(key): _plain(value) for key, value in content.items()}
    if type(content) in (list, tuple):
        return type(content)(_plain(value) for value in content)
    return content


def csr_matrix(data: np.ndarray, indices: np.ndarray, indptr: np.ndarray, shape: Any) -> scipy.sparse.csr_matrix:
    """A sparse matrix whose indices are checked: SciPy would write to memory wherever they point.

    Raises:
        ValueError: If the indices do not fit the shape.
    """
    if any(part.dtype.kind not in "iu" for part in (indices, indptr)):
        raise ValueError(
            f"a sparse matrix has indices of type {indices.dtype} and {indptr.dtype}, which are no integers"
        )
    matrix = scipy.sparse.csr_matrix((data, indices, indptr), shape=tuple(int(size) for size in shape))
    matrix.check_format(full_check=True)
    return matrix


# PyTorch's files #####################################################################################################

_LOCK = threading.RLock()

#: Besides tensors: what PyG's and OGB's processed files, and those of OGB's DatasetSaver, name.
_TORCH_ALLOWED: list[Any] = [Data, DataEdgeAttr, DataTensorAttr, GlobalStorage, NodeStorage, EdgeStorage]
_TORCH_ALLOWED += [(stand_in, path) for path, stand_in in _NUMPY.items()]


@contextmanager
def _allowed_in_torch() -> Iterator[None]:
    """PyTorch's list of safe classes is one for the whole process, so what is put there is taken away again."""
    with _LOCK:
        before = torch.serialization.get_safe_globals()
        ours = [entry for entry in _TORCH_ALLOWED if entry not in before]
        # NumPy's own functions, if somebody allowed them, would stand under the same names.
        theirs = [entry for entry in before if entry not in _TORCH_ALLOWED and _path(entry) in _NUMPY]
        _exchange(theirs, ours)
        try:
            yield
        finally:
            _exchange(ours, theirs)


def _exchange(old: list[Any], new: list[Any]) -> None:
    kept = [entry for entry in torch.serialization.get_safe_globals() if entry not in old]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(kept + new)


def _path(entry: Any) -> str:
    return entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"


def read_torch(path: Path, trust_files: bool = False) -> Any:
    """Reads a file that `torch.save` wrote: tensors, PyG's `Data`, arrays and built-in containers.

    Args:
        path: The file.
        trust_files: Read it with `weights_only=False`, which runs what it holds. (default: `False`)

    Raises:
        DatasetUnavailableError: If the file names anything else.
    """
    if trust_files:
        return torch.load(path, weights_only=False)
    try:
        with _allowed_in_torch():
            return _plain(torch.load(path, weights_only=True))
    except pickle.UnpicklingError as error:
        # Around its reason, PyTorch's message advises to load unsafely.
        if name := re.search(r"GLOBAL (\S+)", str(error)):
            raise _refusal(path, name[1]) from None
        reason = str(error).rpartition("WeightsUnpickler error:")[2].strip()
        raise pickle.UnpicklingError(reason.split("\n")[0]) from None


class CheckedDataset(InMemoryDataset):
    """Reads its processed files safely; comes before the data set's own class among the bases."""

    def __init__(self, *arguments: Any, trust_files: bool = False, **options: Any) -> None:
        self.trust_files = trust_files
        super().__init__(*arguments, **options)

    def _download(self) -> None:
        """Does nothing: `read_dataset` downloaded what was missing."""

    def _process(self) -> None:
        """As PyG's, which runs what is in `pre_transform.pt` and `pre_filter.pt`."""
        folder = Path(self.processed_dir)
        notes = [folder / "pre_transform.pt", folder / "pre_filter.pt"]
        for note in notes:
            if note.exists() and read_torch(note) != "None":
                warnings.warn(
                    f"{note} says that these data were transformed before they were saved. If that is not wanted, "
                    f"delete {folder} and load again.",
                    stacklevel=2,
                )
        if all(Path(path).exists() for path in self.processed_paths):
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.process()
        for note in notes:
            torch.save("None", note)

    def load(self, path: str, data_cls: type[Data] = Data) -> None:
        """Loads the processed file, as PyG's, but never runs what is in it."""
        data, self.slices, *_ = read_torch(Path(path), self.trust_files)
        self.data = data_cls.from_dict(data) if isinstance(data, dict) else data
        if not isinstance(self._data, Data):
            raise ValueError(f"{path} holds no graph, but {type(data).__name__}")


def check_edges(data: Data) -> Data:
    """Returns `data`, whose edges are between its nodes.

    Raises:
        ValueError: If they are not.
    """
    edges, size = data.edge_index, data.num_nodes
    if edges.dtype != torch.long or edges.dim() != 2 or edges.size(0) != 2:
        raise ValueError(f"the edges are {edges.dtype} of shape {list(edges.shape)}, not integers of shape [2, E]")
    if edges.numel() and not 0 <= int(edges.min()) <= int(edges.max()) < size:
        raise ValueError(f"an edge joins nodes {int(edges.min())} to {int(edges.max())}, but there are {size}")
    return data


# Downloads and errors ################################################################################################


def download(url: str, path: Path, sha256: str | None = None) -> None:
    """Downloads a file, over TLS with the server's certificate checked.

    Args:
        url: Where it is.
        path: Where to put it: whole and verified, or not at all.
        sha256: What its digest must be, where that is known. (default: `None`)

    Raises:
        OSError: If it cannot be downloaded.
        ValueError: If it has another digest.
    """
    part = path.with_name(f"{path.name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response, part.open("wb") as file:
            while chunk := response.read(1 << 20):
                digest.update(chunk)
                file.write(chunk)
            if getattr(response, "length", 0):
                raise OSError(f"the connection ended before {url} was complete")
        if sha256 not in (None, digest.hexdigest()):
            raise ValueError(
                f"{path.name} from {url} has the SHA-256 digest {digest.hexdigest()}, but {sha256} was expected, so it "
                "was not kept"
            )
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_dataset(
    name: str, folder: Path, files: list[Path], page: str, fetch: Callable[[list[Path]], None], read: Callable[[], Any]
) -> Any:
    """Reads a data set that needs the raw `files`, downloading them if need be.

    Whatever goes wrong becomes an error that says what to do, and leaves nothing behind by which the next try would go
    wrong, too: no half downloads, no empty folders.

    Args:
        name: What the data set is called in errors.
        folder: The root of the data.
        files: What must be there.
        page: Where a person gets the files.
        fetch: Downloads those of the `files` that are missing.
        read: Reads them.

    Raises:
        DatasetUnavailableError: If anything goes wrong.
    """
    missing = [file for file in files if not file.exists()]
    try:
        if missing:
            fetch(missing)
        try:
            return read()
        except Exception as error:
            processed = files[0].parent.with_name("processed")
            if missing or isinstance(error, OSError) or not processed.is_dir():
                raise
            shutil.rmtree(processed)  # cut off while it was written; the raw files are whole, so make it anew
            return read()
    except BaseException as error:
        _remove_traces(folder, missing)
        if not isinstance(error, Exception) or isinstance(error, DatasetUnavailableError):
            raise
        reason = f"{type(error).__name__}: {str(error) or 'no reason given'}".splitlines()[0]
        if missing:
            raise DatasetUnavailableError(
                f"{name} is not under {folder} and could not be downloaded ({reason}). Missing: "
                f"{', '.join(str(file.relative_to(folder)) for file in missing)}. Get these files from {page} and put "
                "them there, or set GATTN_DATA (or root=) to a folder that has them."
            ) from error
        if isinstance(error, PermissionError) or not os.access(folder, os.W_OK):
            raise DatasetUnavailableError(
                f"{folder} cannot be written ({reason}), and loaders write a processed/ folder beside the raw files of "
                f"{name}: copy the data to a folder that can, and set GATTN_DATA (or root=) to it."
            ) from error
        raise DatasetUnavailableError(
            f"the files of {name} under {files[0].parent.parent} cannot be read ({reason}): "
            f"delete that folder, get the files anew from {page}, and load again."
        ) from error


def _remove_traces(folder: Path, missing: list[Path]) -> None:
    """Removes what a failed download left of the `missing` files, and the folders that it made for them."""
    for file in missing:
        if file.is_file():
            file.unlink()
        for parent in file.parents:
            if folder not in parent.parents or not parent.is_dir():
                break
            siblings = parent.with_name("processed")
            if parent.name == "raw" and siblings.is_dir() and not any(siblings.iterdir()):
                siblings.rmdir()
            if any(parent.iterdir()):
                break
            parent.rmdir()
