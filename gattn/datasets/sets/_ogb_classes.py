"""OGB's classes of data sets, reading files safely; importing this file needs the package `ogb`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import InMemoryDataset

from gattn.datasets.errors import DatasetUnavailableError
from gattn.datasets.ogb_package import import_ogb
from gattn.datasets.processed import CheckedDataset
from gattn.datasets.safe_files import read_torch
from gattn.datasets.splits import check_parts

__all__ = ["PygGraphPropPredDataset", "PygNodePropPredDataset", "read_dictionary"]


node_module = import_ogb("ogb.nodeproppred").dataset_pyg
graph_module = import_ogb("ogb.graphproppred").dataset_pyg
_Node: Any = node_module.PygNodePropPredDataset
_Graph: Any = graph_module.PygGraphPropPredDataset


class _FromDisk(CheckedDataset):
    """OGB's data sets, but they read files safely, never ask on standard input, and download nothing."""

    def __init__(self, name: str, meta: dict[str, Any], trust_files: bool) -> None:
        # This replaces OGB's own __init__, which asks on standard input, downloads, and reads with torch.load.
        self.trust_files = trust_files
        self.name, self.meta_info = name, meta
        self.root = self.dir_name = meta["dir_path"]
        self.original_root = ""
        self.download_name, self.task_type, self.eval_metric = (
            meta[key] for key in ("download_name", "task type", "eval metric")
        )
        self.num_tasks, self.__num_classes__ = int(meta["num tasks"]), int(meta["num classes"])
        self.is_hetero, self.binary = False, meta["binary"] == "True"
        InMemoryDataset.__init__(self, self.root)
        self.load(self.processed_paths[0])

    def get_idx_split(self, split_type: str | None = None) -> dict[str, Any]:
        """Does what OGB's method does, but reads the file safely."""
        folder = Path(self.root) / "split" / (split_type or self.meta_info["split"])
        split = folder / "split_dict.pt"
        parts = read_dictionary(split, self.trust_files) if split.is_file() else super().get_idx_split(split_type)
        count = len(self) if isinstance(self, _Graph) else self[0].num_nodes
        try:
            check_parts((torch.as_tensor(part).long() for part in parts.values()), count, "the split")
        except ValueError as error:
            raise DatasetUnavailableError(f"{folder} cannot be used: {error}") from error
        return parts


class PygNodePropPredDataset(_FromDisk, _Node):
    """OGB's class of the same name, which reads files safely."""


class PygGraphPropPredDataset(_FromDisk, _Graph):
    """OGB's class of the same name, which reads files safely."""


def read_dictionary(path: Path, trust_files: bool) -> dict[str, Any]:
    """Reads a file that holds a dictionary."""
    try:
        return dict(read_torch(path, trust_files))
    except DatasetUnavailableError:
        raise
    except Exception as error:
        raise DatasetUnavailableError(f"{path} cannot be read: {error}") from error
