"""Messages between the students of a university."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import numpy as np
import torch
from torch_geometric.data import TemporalData

from gattn.datasets.download import download, most_unpacked, read_dataset
from gattn.datasets.errors import DatasetUnavailableError
from gattn.datasets.registry import GraphFamily, register

__all__ = ["CollegeMsg"]

_USERS = 1899


@register
class CollegeMsg(GraphFamily):
    """Private messages on a social network, from `Panzarasa et al., 2009 <https://doi.org/10.1002/asi.21015>`_."""

    year = 2009
    names = {"collegemsg": "CollegeMsg"}
    aliases = {"college-msg": "collegemsg"}
    splits = ("public",)
    page = "https://snap.stanford.edu/data/CollegeMsg.html"
    #: The digest of the unpacked file.
    sha256 = {"CollegeMsg.txt": "e00ba2415373dee52c00616065bcceaa4750e78de60d1855c76470600f10740f"}

    def files(self, published_name: str, split: str) -> list[str]:
        """The one file."""
        return [f"{published_name}/{published_name}.txt"]

    def url(self, file: str) -> str:
        """The address of the packed file."""
        return f"https://snap.stanford.edu/data/{file}.gz"

    def load(self, name: str, root: Path, split: str, seed: int, trust_files: bool) -> TemporalData:
        """Loads all messages in the order of time, with users numbered from 0."""
        path = root / self.files(self.names[name], split)[0]

        def read() -> TemporalData:
            try:
                return _read(path)
            except (OSError, ValueError) as error:
                raise DatasetUnavailableError(
                    f"{path} cannot be read ({type(error).__name__}: {error}): delete it, and get it again from "
                    f"{self.page}."
                ) from error

        return read_dataset(name, root, [path], self.page, lambda missing: self._fetch(path), read)

    def _fetch(self, path: Path) -> None:
        """Downloads the packed file, and unpacks it."""
        archive, part = (path.with_name(f"{path.name}.{suffix}") for suffix in ("gz", "part"))
        try:
            download(self.url(path.name), archive)
            with gzip.open(archive) as packed:
                content = packed.read(most_unpacked(archive))
            digest = hashlib.sha256(content).hexdigest()
            if digest != self.sha256[path.name]:
                raise ValueError(
                    f"{path.name} from {self.url(path.name)} has the SHA-256 digest {digest}, but "
                    f"{self.sha256[path.name]} was expected, so it was not kept"
                )
            part.write_bytes(content)
            part.replace(path)
        finally:
            for file in (archive, part):
                file.unlink(missing_ok=True)


def _read(path: Path) -> TemporalData:
    """Reads lines of a sender, a receiver and the time in seconds since 1970."""
    lines = path.read_text("ascii").splitlines()
    if not lines:
        raise ValueError("it is empty")
    table = torch.from_numpy(np.loadtxt(lines, dtype=np.int64, comments=None, ndmin=2))
    if table.size(1) != 3:
        raise ValueError(f"each line must hold three numbers, but it holds {table.size(1)}")
    users = table[:, :2]
    if int(users.min()) < 1 or int(users.max()) > _USERS:
        raise ValueError(f"users must have numbers from 1 to {_USERS}; got {int(users.min())} to {int(users.max())}")
    src, dst, t = table[table[:, 2].argsort(stable=True)].t().contiguous()
    return TemporalData(src=src - 1, dst=dst - 1, t=t)
