"""Masks of nodes for training, validation and test."""

from __future__ import annotations

import torch
from torch_geometric.data import Data
from torch_geometric.transforms import RandomNodeSplit

__all__ = ["pick_split", "random_split", "random_split_by_class", "random_split_by_share"]

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


def pick_split(data: Data, seed: int) -> Data:
    """Keeps one of several published splits, which are the columns of the masks: number `seed`, modulo their number."""
    for mask in ("train_mask", "val_mask", "test_mask"):
        columns = data[mask]
        data[mask] = columns[:, seed % columns.size(1)].bool()
    return data
