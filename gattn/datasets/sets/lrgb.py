"""Peptides of the Long Range Graph Benchmark."""

from __future__ import annotations

from pathlib import Path

from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.datasets import LRGBDataset

from gattn.datasets.download import download_archive, read_dataset
from gattn.datasets.processed import PARTS, CheckedDataset, JoinedDataset
from gattn.datasets.registry import GraphFamily, register
from gattn.datasets.safe_files import read_torch

__all__ = ["LRGB"]


class _CheckedPeptides(CheckedDataset, LRGBDataset):
    """Reads the raw files safely."""

    def process(self) -> None:
        for raw, processed in zip(self.raw_paths, self.processed_paths, strict=True):
            graphs = [
                Data(x=x, edge_index=edge_index, edge_attr=edge_attr, y=y)
                for x, edge_attr, edge_index, y in read_torch(Path(raw), self.trust_files)
            ]
            self.save(graphs, processed)


@register
class LRGB(GraphFamily):
    """The peptides of `Dwivedi et al., 2022 <https://arxiv.org/abs/2206.08164>`_, with ten or eleven labels each."""

    year = 2022
    names = {name: name for name in ("peptides-func", "peptides-struct")}
    splits = ("public",)
    page = "https://github.com/vijaydwivedi75/lrgb"

    def load(self, name: str, root: Path, split: str, seed: int, trust_files: bool) -> InMemoryDataset:
        """Loads all peptides, whose method `get_idx_split()` returns the split."""
        files = [root / name / "raw" / f"{part}.pt" for part in PARTS]

        def fetch(missing: list[Path]) -> None:
            download_archive(LRGBDataset.urls[name], LRGBDataset.dwnld_file_name[name], files[0].parent)

        def read() -> JoinedDataset:
            return JoinedDataset([_CheckedPeptides(str(root), name, part, trust_files=trust_files) for part in PARTS])

        return read_dataset(name, root, files, self.page, fetch, read)
