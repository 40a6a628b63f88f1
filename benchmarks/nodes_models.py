"""The networks of `benchmarks.nodes`, and the hyper-parameters from which they are made."""

from __future__ import annotations

import copy
import functools
import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor

import gattn
from gattn.nn import Dropout
from gattn.nn.shared.linear import Linear

CONVS = {
    "gattn": {"gat": gattn.nn.GATConv, "gatv2": gattn.nn.GATv2Conv, "transformer": gattn.nn.TransformerConv},
    "pyg": {"gat": pyg.GATConv, "gatv2": pyg.GATv2Conv, "transformer": pyg.TransformerConv},
}


@dataclass(frozen=True)
class Recipe:
    """Hyper-parameters for one data set."""

    hidden_channels: int
    layers: int
    dropout: float
    learning_rate: float
    weight_decay: float
    epochs: int
    norm: str | None = None
    """`"batch"`, `"layer"` or `None`; of SGFormer's queries and keys, `"frobenius"` or `None`, PyG's."""
    residual: bool = False
    """Whether a linear layer bypasses each attention layer."""
    linear_in: bool = False
    """Whether a linear layer comes before the attention layers."""
    input_dropout: float = 0.0
    heads: int = 1
    normalise: bool = False
    """Whether each node's features are divided by their sum."""


@dataclass(frozen=True)
class GlobalRecipe(Recipe):
    """Hyper-parameters of a graph Transformer, whose norms, residuals and first layers are its own."""

    global_layers: int = 0
    """The layers of attention among all nodes, if these are apart from the other layers."""
    graph_weight: float = 0.0
    """The weight of SGFormer's layers on the edges."""
    local_epochs: int = 0
    """The first epochs, in which Polynormer has no global layers."""


QUESTIONS = Recipe(512, 3, 0.2, 3e-5, 0.0, 1500, "layer", residual=True, linear_in=True)

#: GAT's hyper-parameters in run_gnn.sh of https://github.com/LUOyk1999/tunedGNN.
RECIPES = {
    "cora": Recipe(512, 3, 0.2, 0.001, 5e-4, 500, residual=True),
    "citeseer": Recipe(256, 3, 0.5, 0.001, 0.01, 500, residual=True),
    "pubmed": Recipe(512, 2, 0.5, 0.01, 5e-4, 500),
    "computers": Recipe(64, 2, 0.5, 0.001, 5e-5, 1000, "layer", normalise=True),
    "photo": Recipe(64, 3, 0.5, 0.001, 5e-5, 1000, "layer", residual=True, normalise=True),
    "cs": Recipe(256, 1, 0.3, 0.001, 5e-4, 1500, "layer", residual=True, normalise=True),
    "physics": Recipe(256, 2, 0.7, 0.001, 5e-4, 1500, "batch", residual=True, normalise=True),
    "wikics": Recipe(512, 2, 0.7, 0.001, 0.0, 1000, "layer", residual=True),
    "roman-empire": Recipe(512, 10, 0.3, 0.001, 0.0, 2500, "batch", residual=True, linear_in=True),
    "amazon-ratings": Recipe(512, 4, 0.5, 0.001, 0.0, 2500, "batch", residual=True),
    "minesweeper": Recipe(64, 15, 0.2, 0.01, 0.0, 2000, "batch", residual=True),
    "tolokers": QUESTIONS,
    "questions": QUESTIONS,
    "ogbn-arxiv": Recipe(512, 5, 0.5, 0.0005, 5e-4, 2000, "batch", residual=True, input_dropout=0.15),
    "ogbn-products": Recipe(200, 5, 0.5, 0.003, 0.0, 300, "layer", linear_in=True),
}
BORROWED = {
    "tolokers": "Tolokers is not in that paper, so it uses the recipe of Questions.",
    "ogbn-arxiv": "ogbn-arxiv uses that repository's recipe for GCN, as it has none for GAT.",
    "ogbn-products": "ogbn-products uses that repository's recipe for GCN, as it has none for GAT, on the full batch.",
}

#: Those of graph Transformers, by model and data set.
GLOBAL_RECIPES = {
    # One point of the grid in medium_graph/GTs_baselines/sgformer.sh of Luo et al., untuned.
    "sgformer": {
        "photo": GlobalRecipe(64, 3, 0.5, 0.001, 5e-5, 1000, normalise=True, global_layers=3, graph_weight=0.8),
        "minesweeper": GlobalRecipe(64, 3, 0.5, 0.001, 0.0, 2000, global_layers=3, graph_weight=0.8),
    },
    # The same with the paper's norms, one for all queries and one for all keys.
    "sgformer-frobenius": {
        "photo": GlobalRecipe(
            64, 3, 0.5, 0.001, 5e-5, 1000, "frobenius", normalise=True, global_layers=3, graph_weight=0.8
        ),
        "minesweeper": GlobalRecipe(64, 3, 0.5, 0.001, 0.0, 2000, "frobenius", global_layers=3, graph_weight=0.8),
    },
    # One point of the grid in gps.sh beside it, untuned.
    "gps": {
        "photo": GlobalRecipe(64, 2, 0.7, 0.001, 5e-5, 1000, heads=2, normalise=True),
        "minesweeper": GlobalRecipe(64, 2, 0.5, 0.001, 0.0, 2000, heads=2),
    },
    # The authors' run.sh, https://github.com/cornell-zhang/Polynormer.
    "polynormer": {
        "photo": GlobalRecipe(
            512,
            7,
            0.7,
            0.001,
            5e-5,
            1200,
            input_dropout=0.2,
            heads=8,
            normalise=True,
            global_layers=2,
            local_epochs=200,
        ),
        "minesweeper": GlobalRecipe(
            512, 10, 0.3, 0.001, 0.0, 2100, input_dropout=0.2, heads=8, global_layers=3, local_epochs=100
        ),
    },
}


class Network(torch.nn.Module):
    """Attention layers, each followed by normalisation, ReLU and dropout, and a linear classifier.

    Args:
        recipe: The hyper-parameters.
        in_channels: The number of features.
        classes: The number of classes.
        model: The kind of attention layer.
        layers: The library whose layers are used.
    """

    def __init__(self, recipe: Recipe, in_channels: int, classes: int, model: str, layers: str):
        super().__init__()
        hidden, heads = recipe.hidden_channels, recipe.heads
        dropout = Dropout if layers == "gattn" else torch.nn.Dropout
        self.input_dropout, self.dropout = dropout(recipe.input_dropout), dropout(recipe.dropout)
        self.linear_in = Linear(in_channels, hidden) if recipe.linear_in else None
        widths = [hidden if recipe.linear_in else in_channels, *[hidden] * recipe.layers]
        norm = {"batch": torch.nn.BatchNorm1d, "layer": torch.nn.LayerNorm, None: torch.nn.Identity}[recipe.norm]
        # The graph already has self-loops, and the recipe adds residuals.
        options = {"root_weight": False} if model == "transformer" else {"add_self_loops": False}
        conv = functools.partial(CONVS[layers][model], heads=heads, bias=False, **options)
        self.convs = torch.nn.ModuleList(conv(width, hidden // heads) for width in widths[:-1])
        self.residuals = torch.nn.ModuleList(Linear(width, hidden) for width in widths[:-1] if recipe.residual)
        self.norms = torch.nn.ModuleList(norm(hidden) for _ in self.convs)
        self.linear_out = Linear(hidden, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """The logits of each class, `[N, classes]`, from features `[N, F]`, which may be sparse."""
        x = self.input_dropout(x)
        if self.linear_in is not None:
            x = self.dropout(self.linear_in(x))
        for conv, residual, norm in itertools.zip_longest(self.convs, self.residuals, self.norms):
            out = conv(x, edge_index)
            x = self.dropout(norm(out if residual is None else out + residual(x)).relu())
        logits: Tensor = self.linear_out(x)
        return logits


class GPS(torch.nn.Module):
    """A linear layer, blocks of GAT beside Performer's attention among all nodes, and a linear classifier.

    Args:
        recipe: The hyper-parameters.
        in_channels: The number of features.
        classes: The number of classes.
        layers: The library whose layers are used.
    """

    def __init__(self, recipe: GlobalRecipe, in_channels: int, classes: int, layers: str):
        super().__init__()
        hidden, heads = recipe.hidden_channels, recipe.heads
        block = {"gattn": gattn.nn.GPSConv, "pyg": pyg.GPSConv}[layers]
        conv = functools.partial(CONVS[layers]["gat"], hidden, hidden // heads, heads=heads, add_self_loops=False)
        options = {"attn_type": "performer", "attn_kwargs": {"head_channels": hidden // heads}}
        self.linear_in = Linear(in_channels, hidden)
        self.blocks = torch.nn.ModuleList(
            block(hidden, conv(), heads, recipe.dropout, **options) for _ in range(recipe.layers)
        )
        self.linear_out = Linear(hidden, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """The logits of each class, `[N, classes]`, from features `[N, F]`."""
        x = self.linear_in(x)
        for block in self.blocks:
            x = block(x, edge_index)
        logits: Tensor = self.linear_out(x)
        return logits


class SGFormer(torch.nn.Module):
    """SGFormer on a single graph.

    Args:
        recipe: The hyper-parameters.
        in_channels: The number of features.
        classes: The number of classes.
        layers: The library whose layers are used.
    """

    def __init__(self, recipe: GlobalRecipe, in_channels: int, classes: int, layers: str):
        super().__init__()
        self.net = {"gattn": gattn.models.SGFormer, "pyg": pyg.models.SGFormer}[layers](
            in_channels,
            recipe.hidden_channels,
            classes,
            trans_num_layers=recipe.global_layers,
            trans_num_heads=recipe.heads,
            trans_dropout=recipe.dropout,
            gnn_num_layers=recipe.layers,
            gnn_dropout=recipe.dropout,
            graph_weight=recipe.graph_weight,
            **({"norm": recipe.norm, "qkv_bias": True} if recipe.norm else {}),
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """The logarithms of the classes' probabilities, `[N, classes]`, from features `[N, F]`."""
        out: Tensor = self.net(x, edge_index, edge_index.new_zeros(x.size(0)))
        return out


class Polynormer(torch.nn.Module):
    """Polynormer behind a linear layer, as in its authors' program; it starts in its local phase.

    Args:
        recipe: The hyper-parameters.
        in_channels: The number of features.
        classes: The number of classes.
    """

    def __init__(self, recipe: GlobalRecipe, in_channels: int, classes: int):
        super().__init__()
        hidden = recipe.hidden_channels
        self.local_epochs = recipe.local_epochs
        self.input_dropout = Dropout(recipe.input_dropout)
        self.linear_in = Linear(in_channels, hidden)
        self.net = gattn.models.Polynormer(
            hidden,
            hidden // recipe.heads,
            classes,
            local_layers=recipe.layers,
            global_layers=recipe.global_layers,
            in_dropout=recipe.dropout,  # that of the linear layer
            dropout=recipe.dropout,
            global_dropout=recipe.dropout,
            heads=recipe.heads,
            beta=0.5,  # around which the program starts to learn it
            qk_shared=True,
            post_bn=False,
            local_attn=True,
        )
        self.kept: dict[str, Any] | None = None
        """The states of this network and its optimizer at the best evaluation of the local phase."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """The logarithms of the classes' probabilities, `[N, classes]`, from features `[N, F]`."""
        out: Tensor = self.net(self.linear_in(self.input_dropout(x)), edge_index)
        return out

    def keep(self, optimizer: torch.optim.Optimizer) -> None:
        """Keeps the states of the network and its optimizer."""
        self.kept = None  # so that the new one does not contain it
        self.kept = copy.deepcopy({"model": self.state_dict(), "optimizer": optimizer.state_dict()})

    def start_global(self, optimizer: torch.optim.Optimizer) -> None:
        """Restores what was kept, and starts the global phase."""
        if kept := self.kept:
            self.load_state_dict(kept["model"])  # after which nothing is kept
            optimizer.load_state_dict(kept["optimizer"])
        self.net.use_global()

    def get_extra_state(self) -> dict[str, Any] | None:
        """What checkpoints hold besides parameters."""
        return self.kept

    def set_extra_state(self, state: dict[str, Any] | None) -> None:
        """Restores it."""
        self.kept = state


def network(recipe: Recipe, in_channels: int, classes: int, model: str, layers: str) -> torch.nn.Module:
    """The network of a recipe; the arguments are those of `Network`."""
    if not isinstance(recipe, GlobalRecipe):
        return Network(recipe, in_channels, classes, model, layers)
    if model == "polynormer":
        return Polynormer(recipe, in_channels, classes)
    kinds = {"sgformer": SGFormer, "sgformer-frobenius": SGFormer, "gps": GPS}
    return kinds[model](recipe, in_channels, classes, layers)
