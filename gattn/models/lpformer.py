"""LPFormer: links attend to the nodes around them."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn

from gattn.nn.lp_att_layer import LPAttLayer

__all__ = ["LPFormer"]


class LPFormer(torch_geometric.nn.LPFormer):
    r"""Link prediction with attention from each pair of nodes to the nodes around them.

    `LPFormer: An Adaptive Graph Transformer for Link Prediction <https://arxiv.org/abs/2310.11009>`_, with attention by
    `gattn.nn.LPAttLayer`:

    .. math::
        \mathrm{logit}_{ab} = \mathrm{MLP}\big[\mathrm{MLP}(x_a \odot x_b) \,\Vert\,
        \mathrm{MLP}[\mathrm{LPAtt}_{ab} \,\Vert\, \text{numbers of nodes around}]\big]

    This is a drop-in replacement for `torch_geometric.nn.LPFormer`: arguments, parameter names and results are the
    same.

    Args:
        *args: The arguments of PyG's model: `in_channels`, `hidden_channels`, `num_gnn_layers`, `gnn_dropout`,
            `num_transformer_layers` (PyG's works with one), `num_heads` (likewise), `transformer_dropout`,
            `ppr_thresholds` and `gcn_cache`.
        **kwargs: The same by name.

    Shapes:
        - **input:** pairs of nodes `[2, L]`, features `[N, F]`, edges `[2, E]`, and a sparse matrix of personalised
          PageRank `[N, N]`, which `calc_sparse_ppr` computes.
        - **output:** logits, `[L]`.

    Raises:
        ValueError: If there are not three `ppr_thresholds`.

    Example:
        >>> import torch, gattn
        >>> model = gattn.models.LPFormer(16, 32)
        >>> model
        LPFormer(16, 32, num_gnn_layers=2, num_transformer_layers=1)
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for place, theirs in enumerate(self.att_layers):
            with torch.random.fork_rng(devices=[]):  # the numbers are those that PyG has drawn
                ours = LPAttLayer(
                    theirs.in_channels, theirs.out_channels, num_heads=theirs.heads, dropout=theirs.dropout
                )
            ours.load_state_dict(theirs.state_dict())
            self.att_layers[place] = ours
