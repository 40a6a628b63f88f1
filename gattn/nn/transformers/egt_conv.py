"""The attention of the Edge-augmented Graph Transformer, in which pairs have channels of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gattn.errors import check_at_least, check_flag, check_number
from gattn.graphs import GraphLike
from gattn.graphs.builders import checked_batch
from gattn.nn.shared.attention_conv import BaseConv
from gattn.nn.shared.edge_features import checked_features
from gattn.nn.shared.linear import Linear
from gattn.nn.transformers.all_pairs import check_heads
from gattn.ops.dropout import check_probability
from gattn.recording import record
from gattn.scores import DotScore

__all__ = ["EGTConv"]


class EGTConv(BaseConv):
    r"""Attention among pairs that have features, which bias it, gate it and are updated by it.

    The attention of `Global Self-Attention as a Replacement for Graph Convolution <https://arxiv.org/abs/2108.03348>`_,
    by the paper's equations:

    .. math::
        \hat h_{ij} = \mathrm{clip}\Big(\frac{q_i^\top k_j}{\sqrt C}\Big) + W_E e_{ij}, \qquad
        \alpha_{ij} = \mathrm{softmax}_j(\hat h_{ij})\, \sigma(W_G e_{ij})

    .. math::
        x'_i = W_O\, \Big\Vert_h\, \log\Big(1 + \sum_j \sigma(W_G e_{ij})\Big) \sum_j \alpha_{ij} v_j, \qquad
        e'_{ij} = W'_O\, \hat h_{ij}

    for each head. The paper attends among all nodes of a graph; pass `CompleteGraph.packed(sizes).edge_index` and the
    features of these pairs, or fewer pairs. Residual connections, norms and feed-forward networks, for nodes and for
    pairs, come around it. (DGL's `EGTLayer` has them inside, and does not divide by :math:`\sqrt C`.)

    Args:
        channels: The number of channels of the nodes, F.
        edge_channels: The number of channels of the pairs, D.
        heads: The number of heads, H. Each has F / H channels, C.
        clip: The largest absolute value of the scaled dot product. (default: `5.0`)
        bias: Whether projections have a bias. (default: `True`)
        dropout: Probability that an attention weight is dropped, in training. (default: `0.0`)
        scale_degree: Whether the sums are multiplied by the logarithms. (default: `True`)
        num_virtual_nodes: The number of each graph's first nodes whose sums are not multiplied. (default: `0`)
        maskout: Probability that a pair is hidden from a head's softmax, in training. (default: `0.0`)
        **kwargs: Arguments of `torch_geometric.nn.conv.MessagePassing`, such as `flow`.

    Shapes:
        - **input:** features `[N, F]`, pairs `[2, E]`, features of the pairs `[E, D]`.
        - **output:** features `[N, F]`, and features of the pairs `[E, D]`, in the order of the graph's `edge_index`.

    Raises:
        ValueError: If a number is not positive, `channels` is not a multiple of `heads`, or (in `forward`) features and
            graph do not fit.

    Example:
        >>> import torch, gattn
        >>> pairs = gattn.CompleteGraph.packed([3, 2]).edge_index  # all pairs of two graphs
        >>> conv = gattn.nn.EGTConv(16, 4, heads=2)
        >>> x, pair_attr = conv(torch.randn(5, 16), pairs, torch.randn(pairs.size(1), 4))
        >>> x.shape, pair_attr.shape
        (torch.Size([5, 16]), torch.Size([13, 4]))
    """

    _shown = "in_channels edge_channels heads="

    def __init__(
        self,
        channels: int,
        edge_channels: int,
        heads: int = 1,
        clip: float = 5.0,
        bias: bool = True,
        dropout: float = 0.0,
        scale_degree: bool = True,
        num_virtual_nodes: int = 0,
        maskout: float = 0.0,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        check_probability("dropout", dropout)
        check_probability("maskout", maskout)
        check_flag("scale_degree", scale_degree)
        check_at_least(0, num_virtual_nodes=num_virtual_nodes)
        check_at_least(1, edge_channels=edge_channels)
        check_number("clip", clip, "positive")
        check_heads(channels, heads, None)
        self.in_channels = channels
        self.edge_channels = edge_channels
        self.heads = heads
        self.dropout = dropout
        self.maskout = maskout
        self.scale_degree = scale_degree
        self.num_virtual_nodes = num_virtual_nodes
        self.score = DotScore(clamp=clip)
        self.lin_query, self.lin_key, self.lin_value, self.lin_out = (
            Linear(channels, channels, bias=bias) for _ in range(4)
        )
        self.lin_edge, self.lin_gate = (Linear(edge_channels, heads, bias=bias) for _ in range(2))
        self.lin_edge_out = Linear(heads, edge_channels, bias=bias)

    def forward(
        self, x: Tensor, edge_index: GraphLike, edge_attr: Tensor | None = None, batch: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Updates nodes and pairs.

        Args:
            x: The features, `[..., N, F]`.
            edge_index: The pairs, as a graph in any form that `gattn.attend` takes.
            edge_attr: The features of the pairs, `[..., E, D]`. (default: `None`, the vectors that a sparse adjacency
                holds)
            batch: The graph of each node, `[N]`, in ascending order, by which virtual nodes are found.
                (default: `None`, a single graph)

        Returns:
            The features of the nodes and of the pairs.

        Raises:
            TypeError: If an input is not a tensor.
            ValueError: If features and graph do not fit; the message says which.
            IndexError: If an index of the graph is out of range.
        """
        x = self._nodes(x)
        graph = self._graph(edge_index, x, x, self_loops=False).listed(x.device)
        graph, edge_attr = checked_features(self, graph, edge_attr, self.edge_channels, x.shape[:-2])
        query, key, value = (self._heads(lin(x)) for lin in (self.lin_query, self.lin_key, self.lin_value))
        logits = self.weigh(query, key, graph, score=self.score, distribution=None) + self.lin_edge(edge_attr)
        gates = self.lin_gate(edge_attr).sigmoid()
        shown = logits
        if self.training and self.maskout > 0.0:  # by a number and not infinity: a target may lose all pairs
            shown = logits - 1e9 * torch.empty_like(logits).bernoulli_(self.maskout)
        alpha = self.weigh(None, None, graph, bias=shown) * gates
        record(self, graph, alpha)
        out = self.weighted_sum(alpha, value, graph, dropout=self.dropout)
        if self.scale_degree:
            scale = self.weighted_sum(gates, torch.ones_like(value[..., :1]), graph).log1p()
            if self.num_virtual_nodes:
                scale = scale.masked_fill(self._is_virtual(x, batch).view(-1, 1, 1), 1.0)
            out = out * scale
        return self.lin_out(out.flatten(-2)), self.lin_edge_out(logits)

    def _is_virtual(self, x: Tensor, batch: Tensor | None) -> Tensor:
        """Which nodes are among the first of their graphs, `[N]`."""
        place = torch.arange(x.size(-2), device=x.device)
        if batch is not None:
            batch = checked_batch(batch, x.size(-2), x.device)
            place = place - torch.searchsorted(batch, batch)
        return place < self.num_virtual_nodes
