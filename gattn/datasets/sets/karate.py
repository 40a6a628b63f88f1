"""Zachary's karate club."""

from __future__ import annotations

from pathlib import Path

import torch
from torch_geometric.data import Data
from torch_geometric.datasets import KarateClub

from gattn.datasets.registry import GraphFamily, register

__all__ = ["Karate"]


@register
class Karate(GraphFamily):
    """The friendships in a karate club, from `Zachary, 1977 <https://doi.org/10.1086/jar.33.4.3629752>`_.

    It is part of PyG and needs no files.
    """

    year = 1977
    names = {"karate": "karate"}
    aliases = {"karateclub": "karate", "karate-club": "karate"}
    splits = ("public", "random")

    def read(self, published_name: str, root: Path, split: str, seed: int, trust_files: bool) -> Data:
        """Makes the graph; of each class, two nodes are for training and two for validation."""
        data = KarateClub()[0]
        order = torch.arange(data.num_nodes)
        if split == "random":
            order = torch.randperm(data.num_nodes, generator=torch.Generator().manual_seed(seed))
        rank = torch.empty_like(order)
        for label in data.y.unique():
            members = order[data.y[order] == label]
            rank[members] = torch.arange(members.numel())
        data.train_mask, data.val_mask, data.test_mask = rank < 2, (rank >= 2) & (rank < 4), rank >= 4
        return data
