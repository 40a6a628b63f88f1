"""Graphs whose edges connect mostly nodes of different classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.datasets import HeterophilousGraphDataset

from gattn.datasets.checks import check_edges
from gattn.datasets.download import check_unpacked
from gattn.datasets.processed import CheckedDataset
from gattn.datasets.registry import GraphFamily, register
from gattn.datasets.splits import pick_split, random_split_by_class

__all__ = ["Heterophilous"]

_NAMES = ("roman_empire", "amazon_ratings", "minesweeper", "tolokers", "questions")


class _CheckedHeterophilous(CheckedDataset, HeterophilousGraphDataset):
    """Checks the indices before PyG reads them, with NumPy and without pickles."""

    def process(self) -> None:
        check_unpacked(Path(self.raw_paths[0]))
        with np.load(self.raw_paths[0], allow_pickle=False) as file:
            edges = torch.from_numpy(file["edges"]).t()
            check_edges(Data(edge_index=edges, num_nodes=file["node_features"].shape[0]))
        super().process()


@register
class Heterophilous(GraphFamily):
    """The graphs of `Platonov et al., 2023 <https://arxiv.org/abs/2302.11640>`_."""

    year = 2023
    names = {name.replace("_", "-"): name for name in _NAMES}
    splits = ("public", "random")
    page = "https://github.com/yandex-research/heterophilous-graphs/tree/main/data"
    sha256 = {"minesweeper.npz": "e664c8dacf1e8ac466c2c09ed4b237bd2c5541f47a6eae9c6092cb87f16412b3"}

    def files(self, published_name: str, split: str) -> list[str]:
        """The one archive."""
        return [f"{published_name}/raw/{published_name}.npz"]

    def url(self, file: str) -> str:
        """The address that PyG has."""
        return f"{HeterophilousGraphDataset.url}/{file}"

    def read(self, published_name: str, root: Path, split: str, seed: int, trust_files: bool) -> Data:
        """Reads the graph, with one of its ten fixed splits or a random one."""
        data = check_edges(_CheckedHeterophilous(str(root), published_name, trust_files=trust_files)[0])
        return random_split_by_class(data, seed) if split == "random" else pick_split(data, seed)
