"""Masks of nodes for training, validation and test."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import RandomNodeSplit

from gattn.datasets.download import check_unpacked

__all__ = ["check_parts", "fixed_split", "pick_split", "random_split", "random_split_by_class", "random_split_by_share"]

# Where no split is published: the numbers of nodes per class of Shchur et al., https://arxiv.org/abs/1811.05868.
_TRAIN_PER_CLASS = 20
_VALIDATION_PER_CLASS = 30


def random_split(data: Data, seed: int, split: str = "test_rest", **sizes: float) -> Data:
    """Draws masks with PyG's `RandomNodeSplit`, without touching the global random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return RandomNodeSplit(split, num_train_per_class=_TRAIN_PER_CLASS, **sizes)(data)


def random_split_by_class(data: Data, seed: int) -> Data:
    """Draws 20 training nodes per class, validation nodes 30 times the number of classes, and tests on the rest."""
    return random_split(data, seed, num_val=_VALIDATION_PER_CLASS * int(data.y.max() + 1))


def random_split_by_share(data: Data, seed: int) -> Data:
    """Draws 60 % of the nodes for training, 20 % for validation and 20 % for the test."""
    return random_split(data, seed, "train_rest", num_val=0.2, num_test=0.2)


def fixed_split(data: Data, path: Path) -> Data:
    """Reads masks from an archive of the numbers of nodes, `train`, `valid` and `test`.

    Raises:
        ValueError: If a number is not that of a node, or a node is in two parts.
    """
    check_unpacked(path)
    with np.load(path, allow_pickle=False) as file:
        parts = {name: torch.from_numpy(file[name]) for name in ("train", "valid", "test")}
    check_parts(parts.values(), data.num_nodes, path.name)
    for name, part in parts.items():
        mask = torch.zeros(data.num_nodes, dtype=torch.bool).index_fill(0, part, True)
        data["val_mask" if name == "valid" else f"{name}_mask"] = mask
    return data


def check_parts(parts: Iterable[Tensor], count: int, name: str) -> None:
    """Checks the numbers of nodes, or of graphs, in the parts of a split.

    Args:
        parts: The numbers.
        count: The number of nodes or graphs.
        name: What held them.

    Raises:
        ValueError: If a number is out of range, or in a split twice.
    """
    numbers = torch.cat([part for part in parts if part.numel()] or [torch.zeros(0, dtype=torch.int64)])
    is_list = numbers.dtype == torch.int64 and numbers.dim() == 1
    if not is_list or (numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < count):
        raise ValueError(f"{name} must hold numbers from 0 to {count - 1}")
    if bool((numbers.bincount() > 1).any()):
        raise ValueError(f"{name} has the same number twice")


def pick_split(data: Data, seed: int) -> Data:
    """Keeps one of several published splits, which are the columns of the masks: number `seed`, modulo their number."""
    for mask in ("train_mask", "val_mask", "test_mask"):
        columns = data[mask]
        data[mask] = columns[:, seed % columns.size(1)].bool()
    return data
