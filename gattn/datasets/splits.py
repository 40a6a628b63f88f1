"""Masks of nodes for training, validation and test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.transforms import RandomNodeSplit

__all__ = ["fixed_split", "pick_split", "random_split", "random_split_by_class", "random_split_by_share"]

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
    with np.load(path, allow_pickle=False) as file:
        parts = {name: torch.from_numpy(file[name]) for name in ("train", "valid", "test")}
    nodes = torch.cat(list(parts.values()))
    if nodes.dtype != torch.int64 or nodes.dim() != 1 or nodes.min() < 0 or nodes.max() >= data.num_nodes:
        raise ValueError(f"{path.name} must hold numbers of nodes, from 0 to {data.num_nodes - 1}")
    if bool((nodes.bincount() > 1).any()):
        raise ValueError(f"{path.name} has the same node twice")
    for name, part in parts.items():
        mask = torch.zeros(data.num_nodes, dtype=torch.bool).index_fill(0, part, True)
        data["val_mask" if name == "valid" else f"{name}_mask"] = mask
    return data


def pick_split(data: Data, seed: int) -> Data:
    """Keeps one of several published splits, which are the columns of the masks: number `seed`, modulo their number."""
    for mask in ("train_mask", "val_mask", "test_mask"):
        columns = data[mask]
        data[mask] = columns[:, seed % columns.size(1)].bool()
    return data
