"""The graph attention layer whose edges have vectors, which it updates."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from gattn.errors import InputError, check_at_least
from gattn.graphs import GraphLike
from gattn.nn.shared.attention_conv import BaseConv
from gattn.nn.shared.declared import Declared
from gattn.nn.shared.edge_features import checked_factors, checked_features
from gattn.nn.shared.linear import Linear
from gattn.ops.call import compute_dtype
from gattn.recording import record
from gattn.scores import AdditiveScore

__all__ = ["EGATConv"]

_SLOPE = 0.01


class EGATConv(BaseConv):
    r"""The layer of `Rossmann-Toolbox <https://pubmed.ncbi.nlm.nih.gov/34571541/>`_: GAT with vectors of edges.

    .. math::
        f'_{ij} = \mathrm{LeakyReLU}(W_i x_j + W_j x_i + W_e f_{ij} + b), \qquad
        \alpha_{i\cdot} = \mathrm{softmax}_j(a^{\top} f'_{ij}), \qquad
        x'_i = \sum_{j \in \mathcal{N}(i)} \alpha_{ij} W x_j

    with a LeakyReLU of slope 0.01. Each head has its own matrices and its own vector a. The parameters have the names
    and shapes of those of `dgl.nn.EGATConv`, so checkpoints load, and the results are the same. Differences: nodes
    without neighbours get zeros instead of an error, and features may have batch dimensions.

    Args:
        in_channels: Channels of the nodes' features, or a pair for sources and targets.
        edge_channels: Channels of the edges' features.
        out_channels: Channels of the nodes' output, for each head.
        out_edge_channels: Channels of the edges' output, for each head.
        heads: Number of heads.
        bias: Whether the edges' output has a bias. (default: `True`)
        **kwargs: Arguments of `torch_geometric.nn.conv.MessagePassing`, such as `flow` and `aggr`.

    Shapes:
        - **input:** features `[N, F]` or `([M, F], [N, F])`, edge indices `[2, E]`, edge features `[E, D]`.
        - **output:** features `[N, H, C]`, and edge features `[E, H, C_e]`.

    Raises:
        ValueError: If a number is not positive, or (in `forward`) features and graph do not fit.

    Example:
        >>> import torch, gattn
        >>> conv = gattn.nn.EGATConv(16, 4, 8, 6, heads=2)
        >>> x, edge_attr = conv(torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]]), torch.randn(2, 4))
        >>> x.shape, edge_attr.shape
        (torch.Size([3, 2, 8]), torch.Size([2, 2, 6]))
    """

    takes_shards = True

    _shown = "in_channels edge_channels out_channels out_edge_channels heads="

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        edge_channels: int,
        out_channels: int,
        out_edge_channels: int,
        heads: int,
        bias: bool = True,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        sources, targets = in_channels if isinstance(in_channels, (tuple, list)) else (in_channels,) * 2
        check_at_least(1, in_channels=min(sources, targets), edge_channels=edge_channels, out_channels=out_channels)
        check_at_least(1, out_edge_channels=out_edge_channels, heads=heads)
        self.in_channels = in_channels
        self.edge_channels = edge_channels
        self.out_channels = out_channels
        self.out_edge_channels = out_edge_channels
        self.heads = heads
        self.fc_node_src = Linear(sources, heads * out_channels, bias=False)
        self.fc_ni = Linear(sources, heads * out_edge_channels, bias=False)
        self.fc_nj = Linear(targets, heads * out_edge_channels, bias=False)
        self.fc_fij = Linear(edge_channels, heads * out_edge_channels, bias=False)
        self.attn = Parameter(torch.empty(1, heads, out_edge_channels))
        self.register_parameter("bias", Parameter(torch.empty(heads * out_edge_channels)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Resets all parameters, as DGL does."""
        super(Declared, self).reset_parameters()  # modules draw their numbers below
        gain = torch.nn.init.calculate_gain("relu")
        for weight in (*(lin.weight for lin in (self.fc_node_src, self.fc_ni, self.fc_nj, self.fc_fij)), self.attn):
            torch.nn.init.xavier_normal_(weight, gain=gain)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: GraphLike,
        edge_attr: Tensor | None = None,
        edge_weight: Tensor | None = None,
        get_attention: bool = False,
    ) -> tuple[Tensor, ...]:
        """Updates nodes from their neighbours, and edges from their ends.

        Args:
            x: Features `[..., N, F]`, or a pair (sources, targets).
            edge_index: The graph, in any form that `gattn.attend` takes.
            edge_attr: Edge features `[..., E, D]`; `None` uses the vectors that a sparse adjacency holds.
                (default: `None`)
            edge_weight: A factor for each edge's attention weight, `[E]`, which `record_attention` leaves out.
                (default: `None`)
            get_attention: Whether to return the attention weights, times these factors, as well. (default: `False`)

        Returns:
            The output of the nodes (for a pair, of the targets), that of the edges, in the order of the graph's
            `edge_index`, and with `get_attention` weights `[..., E, H, 1]`.

        Raises:
            TypeError: If an input is not a tensor.
            ValueError: If features and graph do not fit; the message says which.
            IndexError: If an index of the graph is out of range (in compiled code, when the kernels run).
        """
        sources, targets = self._inputs(x)
        if targets is None:
            raise InputError("EGATConv compares sources with targets: x[1] may not be None.")
        graph = self._graph(edge_index, sources, targets, self_loops=False).listed(sources.device)
        graph, edge_attr = checked_features(self, graph, edge_attr, self.edge_channels, sources.shape[:-2])
        edge = self.fc_fij(edge_attr)
        edge = self._heads(edge if self.bias is None else edge + self.bias)
        value = self._heads(self.fc_node_src(sources))
        query, key = self._heads(self.fc_nj(targets)), self._heads(self.fc_ni(sources))
        score = AdditiveScore(self.attn.squeeze(0), negative_slope=_SLOPE)
        local, key, value, *_ = graph.fetch(key, value, None, None)  # once for all that follows
        out, alpha, _ = self._result(query, key, value, local, score=score, edge=edge, weights=True)
        record(self, graph, alpha)
        source, target = (end.long() for end in local.sources_and_targets())
        compute = compute_dtype(out.dtype)
        ends = query.index_select(-3, target).to(compute), key.index_select(-3, source).to(compute)
        hidden = score.hidden(*ends, edge.to(compute)).to(out.dtype)
        if edge_weight is not None:
            alpha = alpha * checked_factors(edge_weight, graph).to(alpha.dtype)
            out = self.weighted_sum(alpha, value, local)
        results = out, F.leaky_relu(hidden, _SLOPE)
        return (*results, alpha.unsqueeze(-1)) if get_attention else results
