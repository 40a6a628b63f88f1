"""The GATv2 layer."""

from __future__ import annotations

from typing import Any, ClassVar, Optional

import torch
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn.inits import glorot, zeros
from torch_geometric.typing import OptPairTensor  # noqa: F401 - PyG looks it up here

from gattn.attention import fused
from gattn.errors import is_integer
from gattn.graphs import GraphLike
from gattn.nn.shared.attention_conv import AttentionConv, AttentionWeights
from gattn.nn.shared.linear import Linear, side_by_side
from gattn.ops import reference
from gattn.scores import AdditiveScore

__all__ = ["GATv2Conv"]


class GATv2Conv(AttentionConv):
    r"""The layer of `How Attentive are Graph Attention Networks? <https://arxiv.org/abs/2105.14491>`_.

    .. math::
        x'_i = \sum_{j \in \mathcal{N}(i) \cup \{i\}} \alpha_{ij} W_l x_j, \qquad
        \alpha_{i\cdot} = \mathrm{softmax}_j \, a^{\top} \mathrm{LeakyReLU}(W_r x_i + W_l x_j + W_e e_{ij})

    Unlike GAT, it can put the sources in a different order for each target.

    A drop-in replacement for `torch_geometric.nn.GATv2Conv`, with the same arguments, parameter names and results. It
    also supports features `[B, N, F]` over one graph, sparse features, `SparseGraph` and `CompleteGraph`,
    `value_dropout`, and float32 accumulation in half precision. Differences: with `flow="target_to_source"` a pair `x`
    gives as many rows as there are targets; `edge_attr` without `edge_dim`, or the reverse, is an error instead of
    being ignored.

    Args:
        in_channels: Channels of the input; `-1` infers them from the first call; a pair for a bipartite graph
            (sources, targets).
        out_channels: Channels of the output, per head.
        heads: Number of heads. (default: `1`)
        concat: Whether heads are concatenated rather than averaged. (default: `True`)
        negative_slope: Slope of the LeakyReLU. (default: `0.2`)
        dropout: Probability that an attention weight is dropped, in training. (default: `0.0`)
        add_self_loops: Whether every node attends to itself. (default: `True`)
        edge_dim: Channels of the edge features; `-1` infers them from the first call. (default: `None`, no edge
            features)
        fill_value: Edge features of the self-loops: a number, a tensor, or how to aggregate those of the edges that
            point to the node: `"add"`, `"mean"`, `"min"`, `"max"`, `"mul"`. (default: `"mean"`)
        bias: Whether biases are learnt. (default: `True`)
        share_weights: Whether sources and targets share one matrix, :math:`W_l = W_r`. (default: `False`)
        residual: Whether a learnt linear skip connection is added. (default: `False`)
        value_dropout: Probability that a projected feature is dropped where it is summed (not where it is compared), in
            training. (default: `0.0`)
        **kwargs: Arguments of `torch_geometric.nn.conv.MessagePassing`, such as `flow` and `aggr`.

    Shapes:
        - **input:** features `[N, F_in]` or `([M, F_src], [N, F_dst])`, edge indices `[2, E]`, edge features `[E, D]`.
        - **output:** `[N, H * F_out]`, or `[N, F_out]` with `concat=False`.

    Raises:
        ValueError: If an option is out of range, or (in `forward`) features and graph do not fit.

    Example:
        >>> import torch, gattn
        >>> conv = gattn.nn.GATv2Conv(16, 8, heads=4)
        >>> conv(torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]])).shape
        torch.Size([3, 32])
    """

    propagate_type: ClassVar[dict[str, Any]] = {"x": "OptPairTensor", "alpha": Tensor}
    edge_updater_type_of_pyg: ClassVar[dict[str, Any]] = {"x": "OptPairTensor", "edge_attr": Optional[Tensor]}  # noqa: UP045

    takes_shards = True
    _small = 1 << 16  # kernels that project record signs, so that their backward pass does not read the edges' vectors

    _starts = (("att", glorot), ("bias", zeros))

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        edge_dim: int | None = None,
        fill_value: float | Tensor | str = "mean",
        bias: bool = True,
        share_weights: bool = False,
        residual: bool = False,
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
        self.negative_slope = negative_slope
        self.add_self_loops = add_self_loops
        self.fill_value = fill_value
        self.residual = residual
        self.share_weights = share_weights

        channels = heads * out_channels
        source_channels, target_channels = (in_channels,) * 2 if is_integer(in_channels) else in_channels
        if share_weights and source_channels != target_channels:
            raise ValueError(
                f"share_weights=True needs sources and targets with the same channels; got in_channels={in_channels}."
            )
        self.lin_l = Linear(source_channels, channels, bias=bias, weight_initializer="glorot")
        if share_weights:
            self.lin_r = self.lin_l
        else:
            self.lin_r = Linear(target_channels, channels, bias=bias, weight_initializer="glorot")
        self.att = Parameter(torch.empty(1, heads, out_channels))
        if edge_dim is not None:
            self.lin_edge = Linear(edge_dim, channels, bias=False, weight_initializer="glorot")
        else:
            self.lin_edge = None
        total = channels if concat else out_channels
        if residual:
            self.res = Linear(target_channels, total, bias=False, weight_initializer="glorot")
        else:
            self.register_parameter("res", None)
        if bias:
            self.bias = Parameter(torch.empty(total))
        else:
            self.register_parameter("bias", None)
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
            return_attention_weights: Whether to return the weights, after dropout, as well. (default: `None`)
            edge_weight: A factor for each edge's weight after the softmax, `[E]`; self-loops that the layer adds
                get 1. It also multiplies returned weights, but not recorded ones. (default: `None`)

        Returns:
            `[..., N, H * F_out]`; with `return_attention_weights`, a pair of that and the result of
            `SparseGraph.with_weights`, which is `(graph, weights)` for a `CompleteGraph`.

        Raises:
            ValueError: If features, graph and options do not fit; the message says which.
            IndexError: If an index of the graph is out of range (in compiled code, when the kernels run).
        """
        sources, targets = self._inputs(x)
        if targets is None:
            raise ValueError("GATv2Conv compares sources with targets: x[1] may not be None (GATConv allows it).")
        graph = self._graph(edge_index, sources, targets, self.add_self_loops)
        if targets is sources and not self.share_weights:
            key, query = map(self._heads, side_by_side(sources, self.lin_l, self.lin_r))
        else:
            key = self._heads(self.lin_l(sources))
            query = key if targets is sources else self._heads(self.lin_r(targets))

        score = AdditiveScore(self.att.squeeze(0), negative_slope=self.negative_slope)
        found = self._attend_with_loops(query, key, key, graph, edge_attr, score, return_attention_weights, edge_weight)
        out, alpha, graph = found
        if self.res is not None:
            out = out + self.res(targets)
        return out if alpha is None else (out, graph.with_weights(alpha))

    @fused
    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:  # type: ignore[override]
        """Weighted values of the sources, `[..., E, H, C]`; edges add nothing to them."""
        return reference.messages(x_j, alpha, None)
