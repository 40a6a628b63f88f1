"""The networks of `benchmarks.temporal`, and the hyper-parameters from which they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch_geometric.utils import scatter

import gattn

if TYPE_CHECKING:
    from benchmarks.temporal import History, Neighbours


@dataclass(frozen=True)
class Recipe:
    """Hyper-parameters, which all networks share."""

    neighbours: int = 20
    """The largest number of earlier messages that a user attends to, K."""
    layers: int = 2
    channels: int = 64
    time_channels: int = 32
    heads: int = 2
    dropout: float = 0.1
    learning_rate: float = 1e-3
    batch: int = 600
    """The number of messages per training step."""
    epochs: int = 20


class TimeEncoding(torch.nn.Module):
    """The time encoding with which `TGATConv` begins; it is not learnt.

    Args:
        channels: The number of frequencies.
    """

    frequency: Tensor

    def __init__(self, channels: int):
        super().__init__()
        self.register_buffer("frequency", 10.0 ** -torch.linspace(0, 9, channels, dtype=torch.float64))

    def forward(self, age: Tensor) -> Tensor:
        """The encoding of ages `[E]`, `[E, channels]`."""
        return (age.unsqueeze(-1) * self.frequency).cos().float()


class TGAT(torch.nn.Module):
    """`gattn.nn.TGATConv`, with fixed frequencies.

    Args:
        recipe: The hyper-parameters.
    """

    def __init__(self, recipe: Recipe):
        super().__init__()
        channels = recipe.channels
        self.conv = gattn.nn.TGATConv(
            channels, channels, recipe.time_channels, heads=recipe.heads, dropout=recipe.dropout
        )
        for parameter in (self.conv.frequency, self.conv.phase):
            parameter.requires_grad_(False)

    def forward(self, x: tuple[Tensor, Tensor], graph: gattn.SparseGraph, age: Tensor) -> Tensor:
        """The output, `[N, C]`, from the features of sources and targets."""
        out: Tensor = self.conv(x, graph, age)
        return out


class Transformer(torch.nn.Module):
    """`gattn.nn.TransformerConv` with the time encoding as edge features, as in temporal graph networks.

    Args:
        recipe: The hyper-parameters.
    """

    def __init__(self, recipe: Recipe):
        super().__init__()
        channels, heads = recipe.channels, recipe.heads
        self.encode = TimeEncoding(recipe.time_channels)
        self.conv = gattn.nn.TransformerConv(
            channels, channels // heads, heads=heads, dropout=recipe.dropout, edge_dim=recipe.time_channels
        )

    def forward(self, x: tuple[Tensor, Tensor], graph: gattn.SparseGraph, age: Tensor) -> Tensor:
        """The output, `[N, C]`, from the features of sources and targets."""
        out: Tensor = self.conv(x, graph, self.encode(age)).relu()
        return out


class Mean(torch.nn.Module):
    """The mean of earlier messages, without attention weights.

    Args:
        recipe: The hyper-parameters.
    """

    def __init__(self, recipe: Recipe):
        super().__init__()
        self.encode = TimeEncoding(recipe.time_channels)
        self.message = torch.nn.Linear(recipe.channels + recipe.time_channels, recipe.channels)
        self.own = torch.nn.Linear(recipe.channels, recipe.channels)

    def forward(self, x: tuple[Tensor, Tensor], graph: gattn.SparseGraph, age: Tensor) -> Tensor:
        """The output, `[N, C]`, from the features of sources and targets."""
        source, target = graph.edge_index
        message = torch.cat([x[0][source], self.encode(age)], -1)
        mean = scatter(message, target, dim_size=len(x[1]), reduce="mean")
        return (self.message(mean) + self.own(x[1])).relu()


LAYERS = {"tgat": TGAT, "transformer": Transformer, "mean": Mean}


class Network(torch.nn.Module):
    """Embeds users at a time: each layer reads what the one below says of earlier messages' other ends, at their times.

    Users have no features; before the first layer, all of them are zeros. So nothing is learnt about single users, and
    those who were not there in training are embedded like all others.

    Args:
        recipe: The hyper-parameters.
        model: The kind of layer.
    """

    def __init__(self, recipe: Recipe, model: str):
        super().__init__()
        self.channels = recipe.channels
        self.layers = torch.nn.ModuleList(LAYERS[model](recipe) for _ in range(recipe.layers))
        self.score = torch.nn.Sequential(
            torch.nn.Linear(2 * recipe.channels, recipe.channels),
            torch.nn.ReLU(),
            torch.nn.Linear(recipe.channels, 1),
        )

    def forward(self, history: History, users: Tensor, neighbours: Neighbours) -> Tensor:
        """The embeddings `[N, C]` of users `[N]` with these earlier messages."""
        return self.embed(len(self.layers), history, users, neighbours)

    def embed(self, depth: int, history: History, users: Tensor, neighbours: Neighbours) -> Tensor:
        """The output of the layer of this number, counted from 1."""
        if depth == 0:
            return torch.zeros(len(users), self.channels)
        found, source = neighbours.source.unique(return_inverse=True)
        sources = self.embed(depth - 1, history, history.users[found], history.neighbours.rows(found))
        targets = self.embed(depth - 1, history, users, neighbours)
        graph = gattn.SparseGraph(torch.stack([source, neighbours.target()]), len(users), len(found))
        out: Tensor = self.layers[depth - 1]((sources, targets), graph, neighbours.age)
        return out
