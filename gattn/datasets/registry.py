"""Which data sets there are, and what each file in `gattn/datasets/sets/` defines."""

from __future__ import annotations

import functools
import hashlib
import importlib
import pkgutil
import warnings
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from torch_geometric.data import Data, InMemoryDataset, TemporalData

from gattn.datasets.download import download, read_dataset, remove_traces
from gattn.datasets.errors import DatasetUnavailableError

__all__ = ["GraphFamily", "SentencePairs", "Text", "families", "register", "sentence_pairs", "texts"]

_Content = TypeVar("_Content")
_UNREADABLE = (OSError, KeyError, ValueError, zipfile.BadZipFile)


class GraphFamily:
    """Graphs that were published together and are read by the same code."""

    #: The year of publication: older families are listed first.
    year: ClassVar[int]
    #: gattn's name of each data set, and the name that its publisher uses.
    names: ClassVar[Mapping[str, str]] = {}
    #: Other names, and the names in `names` that they stand for.
    aliases: ClassVar[Mapping[str, str]] = {}
    #: The prefixes of further names, if the family looks them up elsewhere.
    prefixes: ClassVar[tuple[str, ...]] = ()
    #: The splits that `load` takes.
    splits: ClassVar[tuple[str, ...]]
    #: The web page from which a person can get the files.
    page: ClassVar[str] = ""
    #: The SHA-256 digests of published files, where they are known: downloads are verified with them.
    sha256: ClassVar[dict[str, str]] = {}

    def files(self, published_name: str, split: str) -> list[str]:
        """The raw files that a split needs, relative to the root folder."""
        return []

    def url(self, file: str) -> str:
        """The address from which the raw file of that name is downloaded."""
        raise NotImplementedError(f"{type(self).__name__} does not define url().")

    def read(self, published_name: str, root: Path, split: str, seed: int, trust_files: bool) -> Data:
        """Reads a data set whose raw files are present."""
        raise NotImplementedError(f"{type(self).__name__} does not define read().")

    def load(
        self, name: str, root: Path, split: str, seed: int, trust_files: bool
    ) -> Data | InMemoryDataset | TemporalData:
        """Loads a data set, after downloading the raw files that are missing.

        Raises:
            DatasetUnavailableError: If the files cannot be downloaded or read.
        """
        published_name = self.names[name]

        def read() -> Data:
            return self.read(published_name, root, split, seed, trust_files)

        def fetch(missing: list[Path]) -> None:
            for file in missing:
                download(self.url(file.name), file, self.sha256.get(file.name))

        files = [root / file for file in self.files(published_name, split)]
        return read_dataset(name, root, files, self.page, fetch, read) if files else read()


class _OneFile(ABC, Generic[_Content]):
    """A data set that is a single file."""

    name: ClassVar[str]
    #: The file, relative to the root folder.
    file: ClassVar[str]
    #: The address of the file, from which it is downloaded.
    url: ClassVar[str]
    #: The SHA-256 digest of the file, if it is known: the download is verified with it.
    sha256: ClassVar[str | None] = None

    @abstractmethod
    def read(self, path: Path) -> _Content:
        """Reads the file."""

    def check_download(self, path: Path) -> None:
        """Raises `ValueError` if a file that was just downloaded cannot be the data set."""

    def load(self, root: Path) -> _Content:
        """Reads the file under `root`, after downloading it if it is missing.

        Raises:
            DatasetUnavailableError: If the file cannot be downloaded or read.
        """
        path = root / self.file
        if not path.exists():
            try:
                download(self.url, path, self.sha256)
                self.check_download(path)
            except BaseException as error:
                remove_traces(root, [path])
                if not isinstance(error, _UNREADABLE):
                    raise
                raise DatasetUnavailableError(
                    f"{self.name} is not under {root} and could not be downloaded ({type(error).__name__}: {error}). "
                    f"Missing: {self.file}. Get this file from {self.url} and put it there, or set GATTN_DATA (or "
                    "root=) to a folder that has it."
                ) from error
        try:
            return self.read(path)
        except _UNREADABLE as error:
            raise DatasetUnavailableError(
                f"{path} cannot be read ({type(error).__name__}: {error}): delete it, and get it again from {self.url}."
            ) from error


class Text(_OneFile[str]):
    """A single text."""

    def read(self, path: Path) -> str:
        """Reads the file as UTF-8."""
        return path.read_text(encoding="utf-8")


class SentencePairs(_OneFile[list[tuple[str, str]]]):
    """Sentences, each with its translation. What is published under `url` may grow with time."""

    #: The date of the file that gattn's results were measured with, the digest of that file, and its number of pairs.
    measured: ClassVar[tuple[str, str, int]]

    def check_download(self, path: Path) -> None:
        """Warns if this is another version than the one that was measured, and refuses a smaller one."""
        date, digest, expected = self.measured
        if hashlib.sha256(path.read_bytes()).hexdigest() == digest:
            return
        found = len(self.read(path))
        if found < expected:
            raise ValueError(f"{self.url} has {found} pairs, but {expected} were expected, so it was not kept")
        warnings.warn(
            f"{self.name}: downloaded {found} pairs. gattn's published results are for the version of {date}, which "
            f"has {expected} pairs, so yours will differ somewhat.",
            stacklevel=4,
        )


_REGISTERED: list[GraphFamily | Text | SentencePairs] = []
_Registered = TypeVar("_Registered", bound=GraphFamily | Text | SentencePairs)


def register(cls: type[_Registered]) -> type[_Registered]:
    """Makes a class in `gattn/datasets/sets/` known to `gattn.datasets`."""
    _REGISTERED.append(cls())
    return cls


@functools.cache
def _discover() -> None:
    """Imports every file in `gattn/datasets/sets/`, which makes them register."""
    from gattn.datasets import sets

    for module in pkgutil.iter_modules(sets.__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"{sets.__name__}.{module.name}")


def families() -> list[GraphFamily]:
    """All families of graphs, the oldest first."""
    _discover()
    return sorted((entry for entry in _REGISTERED if isinstance(entry, GraphFamily)), key=lambda family: family.year)


def texts() -> dict[str, Text]:
    """All texts by name."""
    _discover()
    return {entry.name: entry for entry in _REGISTERED if isinstance(entry, Text)}


def sentence_pairs() -> dict[str, SentencePairs]:
    """All data sets of sentence pairs by name."""
    _discover()
    return {entry.name: entry for entry in _REGISTERED if isinstance(entry, SentencePairs)}
