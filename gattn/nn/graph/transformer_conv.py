"""The graph Transformer layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gattn.errors import is_integer
from gattn.graphs import GraphLike
from gattn.nn.shared.attention_conv import AttentionConv, AttentionWeights
from gattn.nn.shared.linear import Linear, side_by_side
from gattn.scores import DotScore

__all__ = ["TransformerConv"]


class TransformerConv(AttentionConv):
    r"""The graph Transformer layer of `Masked Label Prediction <https://arxiv.org/abs/2009.03509>`_.

    .. math::
        x'_i = W_1 x_i + \sum_{j \in \mathcal{N}(i)} \alpha_{ij} (W_2 x_j + W_6 e_{ij}), \qquad
        \alpha_{i\cdot} = \mathrm{softmax}_j
        \frac{(W_3 x_i)^{\top} (W_4 x_j + W_6 e_{ij})}{\sqrt{F_{out}}}

    On a `CompleteGraph`, it is the self-attention of a Transformer.

    A drop-in replacement for `torch_geometric.nn.TransformerConv`, with the same arguments, parameter names and
    results. It also supports features `[B, N, F]` over one graph, sparse features, `SparseGraph` and `CompleteGraph`,
    `value_dropout`, and float32 accumulation in half precision. Differences: `return_attention_weights=False` returns
    only the output; `edge_attr` without `edge_dim` is an error.

    Args:
        in_channels: Channels of the input; `-1` infers them from the first call; a pair for a bipartite graph
            (sources, targets).
        out_channels: Channels of the output, per head.
        heads: Number of heads. (default: `1`)
        concat: Whether heads are concatenated rather than averaged. (default: `True`)
        beta: Whether a learnt gate weighs the skip connection against the output of attention,
            :math:`\beta_i W_1 x_i + (1 - \beta_i) m_i` with
            :math:`\beta_i = \sigma(w^{\top} [m_i, W_1 x_i, m_i - W_1 x_i])`. It has no effect without `root_weight`, as
            in PyG. (default: `False`)
        dropout: Probability that an attention weight is dropped, in training. (default: `0.0`)
        edge_dim: Channels of the edge features; `-1` infers them from the first call. (default: `None`, no edge
            features)
        bias: Whether biases are learnt. (default: `True`)
        root_weight: Whether the skip connection :math:`W_1 x_i` is added. (default: `True`)
        value_dropout: Probability that a projected value is dropped, in training. (default: `0.0`)
        **kwargs: Arguments of `torch_geometric.nn.conv.MessagePassing`, such as `flow` and `aggr`.

    Shapes:
        - **input:** features `[N, F_in]` or `([M, F_src], [N, F_dst])`, edge indices `[2, E]`, edge features `[E, D]`.
        - **output:** `[N, H * F_out]`, or `[N, F_out]` with `concat=False`.

    Raises:
        ValueError: If an option is out of range, or (in `forward`) features and graph do not fit.

    Example:
        >>> import torch, gattn
        >>> conv = gattn.nn.TransformerConv(16, 8, heads=4)
        >>> x = torch.randn(3, 16)
        >>> conv(x, torch.tensor([[0, 1], [1, 2]])).shape
        torch.Size([3, 32])
        >>> conv(x, gattn.CompleteGraph(3, causal=True)).shape
        torch.Size([3, 32])
    """

    takes_shards = True

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        beta: bool = False,
        dropout: float = 0.0,
        edge_dim: int | None = None,
        bias: bool = True,
        root_weight: bool = True,
        *,
        value_dropout: float = 0.0,
        **kwargs: Any,
    ):
        super().__init__(
            in_channels,
            out_channels,
            heads=heads,
            concat=concat,
            dropout=dropout,
            value_dropout=value_dropout,
            edge_dim=edge_dim,
            **kwargs,
        )
        self.beta = beta and root_weight
        self.root_weight = root_weight

        channels = heads * out_channels
        source_channels, target_channels = (in_channels,) * 2 if is_integer(in_channels) else in_channels
        self.lin_key = Linear(source_channels, channels, bias=bias)
        self.lin_query = Linear(target_channels, channels, bias=bias)
        self.lin_value = Linear(source_channels, channels, bias=bias)
        self.lin_edge = None if edge_dim is None else Linear(edge_dim, channels, bias=False)
        total = channels if concat else out_channels
        self.lin_skip = Linear(target_channels, total, bias=bias)
        self.lin_beta = Linear(3 * total, 1, bias=False) if self.beta else None
        self.reset_parameters()

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: GraphLike,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
        *,
        edge_weight: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, AttentionWeights]:
        """Attends over each node's neighbours.

        Args:
            x: Features `[..., N, F]` (dense, or `[N, F]` sparse), or a pair (sources, targets).
            edge_index: The graph, in any form that `gattn.attend` takes.
            edge_attr: Edge features `[E, D]`, with `edge_dim`. (default: `None`)
            return_attention_weights: Whether to return the weights, before dropout, as well. (default: `None`)
            edge_weight: A factor for each edge's weight after the softmax, `[E]`. It also multiplies returned
                weights, but not recorded ones. (default: `None`)

        Returns:
            `[..., N, H * F_out]`; with `return_attention_weights`, a pair of that and `(edge_index, weights)`, or for a
            `SparseTensor` the one that holds the weights.

        Raises:
            ValueError: If features, graph and options do not fit; the message says which.
            IndexError: If an index of the graph is out of range (in compiled code, when the kernels run).
        """
        sources, targets = self._inputs(x)
        if targets is None:
            raise ValueError("TransformerConv's queries come from the targets: x[1] may not be None.")
        graph = self._graph(edge_index, sources, targets, self_loops=False)
        of_targets = (self.lin_query, self.lin_skip) if self.root_weight else (self.lin_query,)
        of_sources = self.lin_key, self.lin_value
        if targets is sources:
            key, value, *made = side_by_side(sources, *of_sources, *of_targets)
        else:
            (key, value), made = side_by_side(sources, *of_sources), side_by_side(targets, *of_targets)
        query, key, value = self._heads(made[0]), self._heads(key), self._heads(value)

        factors = None
        if edge_weight is not None:
            graph, factors = self._factors(graph, value, edge_weight)
        graph, edge = self._edge_term(graph, edge_attr)
        weights = bool(return_attention_weights)
        out, alpha = self._attend_and_merge(query, key, value, graph, DotScore(), edge, True, weights, factors=factors)
        if self.root_weight:
            skip = made[1]
            if self.lin_beta is not None:
                beta = self.lin_beta(torch.cat([out, skip, out - skip], dim=-1)).sigmoid()
                out = beta * skip + (1 - beta) * out
            else:
                out = out + skip
        if alpha is None:
            return out
        return out, graph.with_weights(alpha, as_values=False)  # as PyG returns a torch.sparse adjacency unchanged here
