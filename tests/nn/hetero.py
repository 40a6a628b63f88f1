"""What tests of layers over dictionaries share: a graph of three types of nodes, and calls without dictionaries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import coalesce

from gattn.testing import random_edge_index

SIZES = {"author": 7, "paper": 9, "venue": 4}
CHANNELS = {"author": 8, "paper": 6, "venue": 8}
#: Between one type and another, within one, and two relations between the same types; nobody points to venues.
EDGE_TYPES = [
    ("author", "writes", "paper"),
    ("paper", "cites", "paper"),
    ("author", "reads", "paper"),
    ("venue", "pays", "author"),
]
METADATA = (list(SIZES), EDGE_TYPES)


def features(*batch: int) -> list[Tensor]:
    """Of each type of nodes, in the order of `SIZES`."""
    return [torch.randn(*batch, size, CHANNELS[name]) for name, size in SIZES.items()]


def edges(edge_types: list[tuple[str, str, str]] = EDGE_TYPES) -> dict[tuple[str, str, str], Tensor]:
    """Of each edge type, sorted and without duplicates; some nodes have none."""
    return {
        name: coalesce(random_edge_index(SIZES[name[0]], SIZES[name[-1]], 15, seed=seed))
        for seed, name in enumerate(edge_types)
    }


class Called(torch.nn.Module):
    """A layer that is called with the features of each type one by one, and returns what it is told to."""

    def __init__(self, conv: torch.nn.Module, call: Callable[..., Any]):
        super().__init__()
        self.conv = conv
        self.call = call

    def forward(self, *x: Tensor) -> Any:
        return self.call(self.conv, dict(zip(SIZES, x, strict=False)))
