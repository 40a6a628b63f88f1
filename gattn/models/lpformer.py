"""LPFormer: links attend to the nodes around them."""

from __future__ import annotations

import torch
import torch_geometric.nn
from torch import Tensor
from torch_geometric.typing import Adj

from gattn.errors import check_at_least
from gattn.nn.graph.lp_att_layer import LPAttLayer
from gattn.nn.shared.dropout import dropout, replace_dropout

__all__ = ["LPFormer"]


class LPFormer(torch_geometric.nn.LPFormer):
    r"""Link prediction with attention from each pair of nodes to the nodes around them.

    `LPFormer: An Adaptive Graph Transformer for Link Prediction <https://arxiv.org/abs/2310.11009>`_, with attention by
    `gattn.nn.LPAttLayer`:

    .. math::
        \mathrm{logit}_{ab} = \mathrm{MLP}\big[\mathrm{MLP}(x_a \odot x_b) \,\Vert\,
        \mathrm{MLP}[\mathrm{LPAtt}_{ab} \,\Vert\, \text{numbers of nodes around}]\big]

    This is a drop-in replacement for `torch_geometric.nn.LPFormer`: arguments, parameter names and results are the
    same. Several layers or heads, with which PyG's network fails, work here: heads lie side by side, and each further
    layer takes what the layer before made of a link's two nodes in place of their features.

    Args:
        in_channels: The number of features, F.
        hidden_channels: The number of channels of the hidden layers.
        num_gnn_layers: The number of GCN's layers. (default: `2`)
        gnn_dropout: The probability of dropping a feature between them. (default: `0.1`)
        num_transformer_layers: The number of attention layers; PyG's network only works with one. (default: `1`)
        num_heads: The number of heads; PyG's network only works with one. (default: `1`)
        transformer_dropout: The probability of dropping an attention weight. (default: `0.1`)
        ppr_thresholds: The least personalised PageRank of common neighbours, of neighbours of one node, and of others.
            (default: `None`, `[0, 1e-4, 1e-2]`)
        gcn_cache: Whether GCN's layers keep the normalised graph of their first call. (default: `False`)

    Shapes:
        - **input:** pairs of nodes `[2, L]`, features `[N, F]`, edges `[2, E]`, and a sparse matrix of personalised
          PageRank `[N, N]`, which `calc_sparse_ppr` computes.
        - **output:** logits, `[L]`.

    Raises:
        ValueError: If there are not three `ppr_thresholds`, or no layers or heads.

    Example:
        >>> import torch, gattn
        >>> model = gattn.models.LPFormer(16, 32)
        >>> model
        LPFormer(16, 32, num_gnn_layers=2, num_transformer_layers=1)
    """

    att_layers: torch.nn.ModuleList

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        num_gnn_layers: int = 2,
        gnn_dropout: float = 0.1,
        num_transformer_layers: int = 1,
        num_heads: int = 1,
        transformer_dropout: float = 0.1,
        ppr_thresholds: list[float] | None = None,
        gcn_cache: bool = False,
    ):
        check_at_least(1, num_transformer_layers=num_transformer_layers, num_heads=num_heads)
        super().__init__(
            in_channels,
            hidden_channels,
            num_gnn_layers,
            gnn_dropout,
            num_heads=num_heads,
            transformer_dropout=transformer_dropout,
            ppr_thresholds=ppr_thresholds,
            gcn_cache=gcn_cache,
        )
        replace_dropout(self.gnn)
        works_there = num_transformer_layers == num_heads == 1
        with torch.random.fork_rng(devices=[], enabled=works_there):  # then the numbers are those that PyG has drawn
            # Two nodes enter the first layer; their halves of what the layer before made of them enter the others.
            layers = torch.nn.ModuleList(
                LPAttLayer(
                    hidden_channels * (num_heads if place else 1),
                    hidden_channels * (1 if place == num_transformer_layers - 1 else 2),
                    hidden_channels,
                    num_heads,
                    transformer_dropout,
                )
                for place in range(num_transformer_layers)
            )
        if works_there and not layers[0].att.is_meta:
            layers.load_state_dict(self.att_layers.state_dict())
        self.att_layers = layers

    def propagate(self, x: Tensor, adj: Adj) -> Tensor:
        """The nodes `[N, hidden_channels]` that attention reads: those of the convolutions on the graph.

        Args:
            x: The features, `[N, in_channels]`.
            adj: The graph, as the convolutions take it.
        """
        out: Tensor = self.gnn_norm(self.gnn(dropout(x, self.gnn_drop, self.training), adj))
        return out
