"""PyG's in-memory data sets, with processed files that cannot run code."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Data, InMemoryDataset

from gattn.datasets.checks import check_edges
from gattn.datasets.safe_files import read_torch

__all__ = ["PARTS", "CheckedDataset", "JoinedDataset"]

#: PyG's names of the parts of a split that is published as one file per part.
PARTS = ("train", "val", "test")


class CheckedDataset(InMemoryDataset):
    """Reads processed files safely; this class goes before PyG's own data set among the base classes."""

    def __init__(self, *arguments: Any, trust_files: bool = False, **options: Any) -> None:
        self.trust_files = trust_files
        super().__init__(*arguments, **options)

    def _download(self) -> None:
        """Does nothing, because `read_dataset` has already downloaded what was missing."""

    def _process(self) -> None:
        """Does what PyG's method does, but does not run what `pre_transform.pt` and `pre_filter.pt` contain."""
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
        """Loads a processed file, as PyG's method does, but without running what it contains."""
        data, self.slices, *_ = read_torch(Path(path), self.trust_files)
        self.data = data_cls.from_dict(data) if isinstance(data, dict) else data
        if not isinstance(self._data, Data):
            raise ValueError(f"{path} must hold a graph, but holds an object of type {type(data).__name__}")


class JoinedDataset(InMemoryDataset):
    """The graphs of several data sets, one after the other.

    Args:
        parts: The parts for training, for validation and for the test.

    Raises:
        ValueError: If edges connect nodes that a graph does not have.
    """

    def __init__(self, parts: Sequence[InMemoryDataset]) -> None:
        super().__init__()
        self.data, self.slices = self.collate([check_edges(graph) for part in parts for graph in part])
        self._sizes = [len(part) for part in parts]

    def get_idx_split(self) -> dict[str, torch.Tensor]:
        """Returns the numbers of the graphs in each part of the split, under the names that OGB gives the parts."""
        numbers = torch.split(torch.arange(len(self)), self._sizes)
        return dict(zip(("train", "valid", "test"), numbers, strict=True))
