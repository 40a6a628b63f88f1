"""Wikipedia's articles about computer science."""

from __future__ import annotations

from pathlib import Path

from torch_geometric.data import Data
from torch_geometric.datasets import WikiCS as PyGWikiCS

from gattn.datasets.checks import check_edges
from gattn.datasets.processed import CheckedDataset
from gattn.datasets.registry import GraphFamily, register
from gattn.datasets.splits import pick_split, random_split_by_class

__all__ = ["WikiCS"]


class _CheckedWikiCS(CheckedDataset, PyGWikiCS):
    pass


@register
class WikiCS(GraphFamily):
    """Articles that link to each other, from `Mernyei and Cangea, 2020 <https://arxiv.org/abs/2007.02901>`_."""

    year = 2020
    names = {"wikics": "WikiCS"}
    aliases = {"wiki-cs": "wikics"}
    splits = ("public", "random")
    page = "https://github.com/pmernyei/wiki-cs-dataset/tree/master/dataset"

    def files(self, published_name: str, split: str) -> list[str]:
        """The one file."""
        return [f"{published_name}/raw/data.json"]

    def url(self, file: str) -> str:
        """The address that PyG has."""
        return f"{PyGWikiCS.url}/{file}"

    def read(self, published_name: str, root: Path, split: str, seed: int, trust_files: bool) -> Data:
        """Reads the graph, undirected, with one of its twenty fixed splits or a random one."""
        folder = str(root / published_name)
        data = check_edges(_CheckedWikiCS(folder, is_undirected=True, trust_files=trust_files)[0])
        # The publication uses one set for early stopping and the other for tuning; nothing here needs both.
        data.val_mask = data.val_mask | data.pop("stopping_mask")
        data.test_mask = data.test_mask.unsqueeze(1)
        return random_split_by_class(data, seed) if split == "random" else pick_split(data, seed)
