"""LPFormer: links attend to the nodes around them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch_geometric.nn
from torch import Tensor
from torch.nn import LayerNorm, Module, ModuleList
from torch_geometric.nn.inits import reset
from torch_geometric.nn.models import lpformer
from torch_geometric.typing import Adj

from gattn.errors import InputError, check_at_least, check_flag
from gattn.nn.graph.gcn_conv import GCNConv
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
    layer takes what the layer before made of a link's two nodes in place of their features. So do thresholds of 1, with
    which four of the authors' thirteen commands leave out kinds of nodes: as in their program, such nodes have neither
    an encoding nor a number.

    Differences from the authors' program: GCN's norms are over all nodes together, and its last layer has neither norm
    nor ReLU, as in PyG (`gnn_norm="node"` has the authors'); common and other neighbours are always filtered by their
    thresholds; none are counted by their degrees.

    Args:
        in_channels: The number of features, F.
        hidden_channels: The number of channels of the hidden layers.
        num_gnn_layers: The number of GCN's layers. (default: `2`)
        gnn_dropout: The probability of dropping a feature between them. (default: `0.1`)
        num_transformer_layers: The number of attention layers; PyG's network only works with one. (default: `1`)
        num_heads: The number of heads; PyG's network only works with one. (default: `1`)
        transformer_dropout: The probability of dropping an attention weight. (default: `0.1`)
        ppr_thresholds: The least personalised PageRank of common neighbours, of neighbours of one node, and of others.
            One of 1 for the last leaves these out, and for the last two all but common neighbours.
            (default: `None`, `[0, 1e-4, 1e-2]`)
        gcn_cache: Whether GCN's layers keep the normalised graph of their first call. (default: `False`)
        gnn_norm: `"graph"` for PyG's convolutions, or `"node"` for the authors', with a norm of each node and a ReLU
            after every layer. (default: `"graph"`)
        gnn_residual: Whether the authors' convolutions add their input where it has as many channels.
            (default: `False`)

    Shapes:
        - **input:** pairs of nodes `[2, L]`, features `[N, F]`, edges `[2, E]`, and a sparse matrix of personalised
          PageRank `[N, N]`, which `calc_sparse_ppr` computes.
        - **output:** logits, `[L]`.

    Raises:
        ValueError: If there are not three `ppr_thresholds`, no layers or heads, `gnn_norm` is unknown, or PyG's
            convolutions are to be residual.

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
        gnn_norm: str = "graph",
        gnn_residual: bool = False,
    ):
        check_flag("gnn_residual", gnn_residual)
        if gnn_norm not in ("graph", "node") or (gnn_residual and gnn_norm == "graph"):
            raise InputError(f"gnn_norm must be 'graph' or 'node', which gnn_residual needs; got {gnn_norm!r}.")
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
        if gnn_norm == "node":
            sizes = in_channels, *[hidden_channels] * num_gnn_layers
            self.gnn: Module = _Convolutions(sizes, gnn_dropout, gcn_cache, gnn_residual)
        replace_dropout(self.gnn)
        if self.mask != "all":
            del self.ppr_encoder_non1hop
            if self.mask == "cn":
                del self.ppr_encoder_onehop
            width = hidden_channels * num_heads + (1 if self.mask == "cn" else 3)
            self.pairwise_lin = lpformer.MLP(width, width, hidden_channels)
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

    def reset_parameters(self) -> None:
        """Resets all parameters."""
        for module in self.children():
            reset(module)

    def propagate(self, x: Tensor, adj: Adj) -> Tensor:
        """The nodes `[N, hidden_channels]` that attention reads: those of the convolutions on the graph.

        Args:
            x: The features, `[N, in_channels]`.
            adj: The graph, as the convolutions take it.
        """
        out: Tensor = self.gnn_norm(self.gnn(dropout(x, self.gnn_drop, self.training), adj))
        return out

    def get_ppr_vals(
        self, batch: Tensor, pair_diff_adj: Tensor, ppr_matrix: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The nodes that a sparse matrix lists for each pair, their values there, and their ranks from both ends.

        Args:
            batch: The pairs, `[2, L]`.
            pair_diff_adj: The matrix, `[L, N]`.
            ppr_matrix: The sparse matrix of personalised PageRank.
        """
        listed = pair_diff_adj.coalesce()
        real = listed.values() != 0  # a product of sparse matrices has zeros, which PyG would count
        size = listed.shape
        listed = torch.sparse_coo_tensor(listed.indices()[:, real], listed.values()[real], size, is_coalesced=True)
        found: tuple[Tensor, Tensor, Tensor, Tensor] = super().get_ppr_vals(batch, listed, ppr_matrix)
        return found

    def calc_pairwise(self, batch: Tensor, X_node: Tensor, adj_mask: Tensor, ppr_matrix: Tensor) -> Tensor:  # noqa: N803
        """What pairs of nodes get from the nodes around them, `[L, hidden_channels]`.

        Args:
            batch: The pairs, `[2, L]`.
            X_node: The nodes that attention reads.
            adj_mask: The graph, as a sparse matrix of ones.
            ppr_matrix: The sparse matrix of personalised PageRank.
        """
        kinds = [kind for kind in self.compute_node_mask(batch, adj_mask, ppr_matrix) if kind is not None]
        pairs = torch.cat([X_node[end] for end in batch], -1)
        around, places = torch.cat([kind[0] for kind in kinds], -1), self.get_pos_encodings(*(x[1:] for x in kinds))
        for layer in self.att_layers:
            pairs = layer(around, pairs, X_node, places)
        if self.mask == "cn":
            counts = [self.get_count(kinds[0][0], batch)]
        else:
            counts = self.get_structure_cnts(batch, *kinds, *[None] * (3 - len(kinds)))
            counts = [count for count in counts if isinstance(count, Tensor)]
        return self.pairwise_lin(torch.cat([pairs, *counts], -1))  # type: ignore[no-any-return]


class _Convolutions(Module):
    """The authors' graph convolutions, with a norm of each node and a ReLU after all of them."""

    def __init__(self, sizes: Sequence[int], dropout: float, cached: bool, residual: bool):
        super().__init__()
        self.num_layers, self.residual = len(sizes) - 1, residual
        self.convs = ModuleList(GCNConv(*ends, cached=cached) for ends in pairwise(sizes))
        self.norms = ModuleList(LayerNorm(size) for size in sizes[1:])
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x: Tensor, edge_index: Adj) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            out = self.dropout(norm(conv(x, edge_index))).relu()
            x = x + out if self.residual and x.size(-1) == out.size(-1) else out
        return x
