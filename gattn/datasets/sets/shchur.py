"""Amazon's products and the authors of scientific articles."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
from torch_geometric.data import Data
from torch_geometric.datasets import Amazon as PyGAmazon
from torch_geometric.datasets import Coauthor as PyGCoauthor
from torch_geometric.io.npz import parse_npz

from gattn.datasets.checks import check_edges, csr_matrix
from gattn.datasets.download import check_unpacked
from gattn.datasets.processed import CheckedDataset
from gattn.datasets.registry import GraphFamily, register
from gattn.datasets.splits import fixed_split, random_split_by_class, random_split_by_share

__all__ = ["Amazon", "Coauthor"]

_PAGE = "https://github.com/shchur/gnn-benchmark/tree/master/data/npz"
_LUO = "https://github.com/LUOyk1999/tunedGNN/raw/main/medium_graph/data/"


class _CheckedNpz(CheckedDataset):
    """Reads the format of Shchur et al., and checks the indices."""

    def process(self) -> None:
        check_unpacked(Path(self.raw_paths[0]))
        with np.load(self.raw_paths[0], allow_pickle=False) as file:
            parts = {name: file[name] for name in file.files if name.startswith(("adj_", "attr_")) or name == "labels"}
        adjacency, features = (
            csr_matrix(*(parts[f"{prefix}_{part}"] for part in ("data", "indices", "indptr", "shape")))
            for prefix in ("adj", "attr")
        )
        if adjacency.shape != (features.shape[0],) * 2:
            raise ValueError(
                f"the adjacency matrix must have one row and one column for each of the {features.shape[0]} nodes, but "
                f"its shape is {adjacency.shape}"
            )
        self.save([parse_npz(parts, to_undirected=True)], self.processed_paths[0])


class _CheckedAmazon(_CheckedNpz, PyGAmazon):
    pass


class _CheckedCoauthor(_CheckedNpz, PyGCoauthor):
    pass


class _Shchur(GraphFamily):
    """What both families share: their splits."""

    year = 2018
    splits = ("public", "random", "60-20-20", "luo")
    page = _PAGE
    #: The names of the data sets in the repository of Luo et al.
    names_of_luo: ClassVar[dict[str, str]]

    def files(self, published_name: str, split: str) -> list[str]:
        """The archive of the graph, and that of a fixed split."""
        archives = [self.archive(published_name)]
        if split == "luo":
            archives.append(f"{self.names_of_luo[published_name]}_split.npz")
        return [f"{published_name}/raw/{archive}" for archive in archives]

    def url(self, file: str) -> str:
        """The address that PyG has, or that of a fixed split."""
        return f"{_LUO if file.endswith('_split.npz') else PyGAmazon.url}{file}"

    def archive(self, published_name: str) -> str:
        """The file of the graph."""
        raise NotImplementedError

    def graph(self, published_name: str, root: Path, trust_files: bool) -> Data:
        """Reads the graph."""
        raise NotImplementedError

    def read(self, published_name: str, root: Path, split: str, seed: int, trust_files: bool) -> Data:
        """Reads the graph, and draws or reads a split."""
        data = check_edges(self.graph(published_name, root, trust_files))
        if split == "luo":
            return fixed_split(data, root / self.files(published_name, split)[1])
        return random_split_by_share(data, seed) if split == "60-20-20" else random_split_by_class(data, seed)


@register
class Amazon(_Shchur):
    """Products that are often bought together, from `Shchur et al., 2018 <https://arxiv.org/abs/1811.05868>`_."""

    names = {"computers": "Computers", "photo": "Photo"}
    aliases = {"amazon-computers": "computers", "amazon-photo": "photo"}
    names_of_luo = {"Computers": "amazon-computer", "Photo": "amazon-photo"}
    sha256 = {
        "amazon_electronics_photo.npz": "bdb1feb8e6ff42ee44024b04479145029c563fd42fc31bff80af20887ba0439a",
        "amazon-computer_split.npz": "dff698aba1dd30b8bd7d1dca65c60b1f8d9027d950e07a23e86dcbf16c539f24",
        "amazon-photo_split.npz": "0609f6ab15ddabfe33a34f10d960d09499e634472f72104abb1f3be858127432",
    }

    def archive(self, published_name: str) -> str:
        """The file of the graph."""
        return f"amazon_electronics_{published_name.lower()}.npz"

    def graph(self, published_name: str, root: Path, trust_files: bool) -> Data:
        """Reads the graph."""
        return _CheckedAmazon(str(root), published_name, trust_files=trust_files)[0]


@register
class Coauthor(_Shchur):
    """Authors who wrote an article together, from `Shchur et al., 2018 <https://arxiv.org/abs/1811.05868>`_."""

    names = {"cs": "CS", "physics": "Physics"}
    aliases = {"coauthor-cs": "cs", "coauthor-physics": "physics"}
    names_of_luo = {"CS": "coauthor-cs", "Physics": "coauthor-physics"}
    sha256 = {
        "coauthor-cs_split.npz": "b8c46a38d93b1f9d6b8b8ab944d870e8d44ccdde0639188681e0d38212480ec5",
        "coauthor-physics_split.npz": "2034eb90f5ff80eee0e371cc05b20690a16786fb085924b9166c83361fbbcb39",
    }

    def archive(self, published_name: str) -> str:
        """The file of the graph."""
        return f"ms_academic_{published_name[:3].lower()}.npz"

    def graph(self, published_name: str, root: Path, trust_files: bool) -> Data:
        """Reads the graph."""
        return _CheckedCoauthor(str(root), published_name, trust_files=trust_files)[0]
