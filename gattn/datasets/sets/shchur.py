"""Amazon's products and the authors of scientific articles."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch_geometric.data import Data
from torch_geometric.datasets import Amazon as PyGAmazon
from torch_geometric.datasets import Coauthor as PyGCoauthor
from torch_geometric.io.npz import parse_npz

from gattn.datasets.checks import check_edges, csr_matrix
from gattn.datasets.processed import CheckedDataset
from gattn.datasets.registry import GraphFamily, register
from gattn.datasets.splits import random_split_by_class, random_split_by_share

__all__ = ["Amazon", "Coauthor"]

_PAGE = "https://github.com/shchur/gnn-benchmark/tree/master/data/npz"


class _CheckedNpz(CheckedDataset):
    """Reads the format of Shchur et al., and checks the indices."""

    def process(self) -> None:
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


@register
class Amazon(GraphFamily):
    """Products that are often bought together, from `Shchur et al., 2018 <https://arxiv.org/abs/1811.05868>`_."""

    year = 2018
    names = {"computers": "Computers", "photo": "Photo"}
    aliases = {"amazon-computers": "computers", "amazon-photo": "photo"}
    splits = ("public", "random", "60-20-20")
    page = _PAGE
    sha256 = {"amazon_electronics_photo.npz": "bdb1feb8e6ff42ee44024b04479145029c563fd42fc31bff80af20887ba0439a"}

    def files(self, published_name: str, split: str) -> list[str]:
        """The one archive."""
        return [f"{published_name}/raw/amazon_electronics_{published_name.lower()}.npz"]

    def url(self, file: str) -> str:
        """The address that PyG has."""
        return f"{PyGAmazon.url}{file}"

    def read(self, published_name: str, root: Path, split: str, seed: int, trust_files: bool) -> Data:
        """Reads the graph, and draws a split."""
        data = check_edges(_CheckedAmazon(str(root), published_name, trust_files=trust_files)[0])
        return random_split_by_share(data, seed) if split == "60-20-20" else random_split_by_class(data, seed)


@register
class Coauthor(GraphFamily):
    """Authors who wrote an article together, from `Shchur et al., 2018 <https://arxiv.org/abs/1811.05868>`_."""

    year = 2018
    names = {"cs": "CS", "physics": "Physics"}
    aliases = {"coauthor-cs": "cs", "coauthor-physics": "physics"}
    splits = ("public", "random", "60-20-20")
    page = _PAGE

    def files(self, published_name: str, split: str) -> list[str]:
        """The one archive."""
        return [f"{published_name}/raw/ms_academic_{published_name[:3].lower()}.npz"]

    def url(self, file: str) -> str:
        """The address that PyG has."""
        return f"{PyGCoauthor.url}{file}"

    def read(self, published_name: str, root: Path, split: str, seed: int, trust_files: bool) -> Data:
        """Reads the graph, and draws a split."""
        data = check_edges(_CheckedCoauthor(str(root), published_name, trust_files=trust_files)[0])
        return random_split_by_share(data, seed) if split == "60-20-20" else random_split_by_class(data, seed)
