"""The attention of LPFormer, from links to the nodes around them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import LayerNorm, Parameter
from torch_geometric.nn.inits import glorot, zeros

from gattn.errors import InputError, InputTypeError, check_at_least, check_flag
from gattn.graphs import GraphLike
from gattn.nn.shared.attention_conv import BaseConv
from gattn.nn.shared.dropout import dropout
from gattn.nn.shared.dtypes import check_dtype
from gattn.nn.shared.linear import Linear, columns
from gattn.ops.dropout import check_probability
from gattn.products import linear
from gattn.scores import Score

__all__ = ["LPAttLayer"]

_SLOPE = 0.2


class _LinkScore(Score):
    """The vector's product with the LeakyReLU of an elementwise product."""

    def __init__(self, vector: Tensor):
        self.vector = vector

    def logits(self, query: Tensor | None, key: Tensor | None, edge: Tensor | None) -> Tensor:
        """See `Score.logits`."""
        assert query is not None
        assert key is not None
        key = key if edge is None else key + edge
        return (F.leaky_relu(query * key, _SLOPE) * self.vector).sum(-1)

    def tensors(self) -> tuple[Tensor, ...]:
        """See `Score.tensors`."""
        return (self.vector,)


class LPAttLayer(BaseConv):
    r"""Attention from each link to the nodes around it, with an encoding of where each node lies.

    The layer of `LPFormer: An Adaptive Graph Transformer for Link Prediction <https://arxiv.org/abs/2310.11009>`_: for
    the link of nodes a and b, and nodes u with encodings :math:`p_u` relative to it,

    .. math::
        h_u = W_r [x_u \,\Vert\, p_u], \qquad
        \alpha_u = \mathrm{softmax}_u\, a^\top \mathrm{LeakyReLU}\big(h_u \odot (W_l x_a + W_l x_b)\big), \qquad
        \mathrm{out} = \mathrm{LN}\Big(\Big\Vert_h \sum_u \alpha_u h_u + b\Big)

    This is a drop-in replacement for the layer of this name in `torch_geometric.nn.models.lpformer`, with the same
    arguments, parameter names and results. With several heads side by side, which PyG's layer cannot norm, the norm
    has the channels of all heads.

    Args:
        in_channels: The number of channels of a node in a link, F.
        out_channels: The number of channels of each head, C.
        node_dim: The number of channels of the nodes around, and of their encodings. (default: `None`, F)
        num_heads: The number of heads, H. (default: `1`)
        dropout: The probability of dropping a channel of the output during training. (default: `0.0`)
        concat: Whether heads are concatenated rather than averaged. (default: `True`)
        **kwargs: Arguments of `torch_geometric.nn.conv.MessagePassing`.

    Shapes:
        - **input:** edges `[2, E]`, links above nodes; links `[L, 2 * F]`; nodes `[N, F]`; encodings `[E, F]`.
        - **output:** `[L, H * C]`, or `[L, C]` without `concat`.

    Raises:
        ValueError: If an option is out of range, or (in `forward`) shapes do not fit.

    Example:
        >>> import torch, gattn
        >>> layer = gattn.nn.LPAttLayer(16, 8)
        >>> around = torch.tensor([[0, 0, 1], [2, 3, 3]])  # two links; of the first, nodes 2 and 3
        >>> layer(around, torch.randn(2, 32), torch.randn(4, 16), torch.randn(3, 16)).shape
        torch.Size([2, 8])
    """

    _starts = (("att", glorot), ("bias", zeros))
    _shown = "link_channels out_channels heads="

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        node_dim: int | None = None,
        num_heads: int = 1,
        dropout: float = 0.0,
        concat: bool = True,
        **kwargs: Any,
    ):
        super().__init__(**{"flow": "target_to_source"} | kwargs)
        around = in_channels if node_dim is None else node_dim
        check_at_least(1, in_channels=in_channels, out_channels=out_channels, node_dim=around, num_heads=num_heads)
        check_probability("dropout", dropout)
        check_flag("concat", concat)
        self.in_channels = (around, 2 * in_channels)
        self.link_channels = in_channels
        self.out_channels = out_channels
        self.heads = num_heads
        self.concat = concat
        self.dropout = dropout
        self.lin_l = Linear(in_channels, num_heads * out_channels, weight_initializer="glorot")
        self.lin_r = Linear(2 * around, num_heads * out_channels, weight_initializer="glorot")
        self.att = Parameter(torch.empty(1, num_heads, out_channels))
        self.bias = Parameter(torch.empty(num_heads * out_channels if concat else out_channels))
        self.post_att_norm = LayerNorm(self.bias.numel())
        self.reset_parameters()

    def forward(self, edge_index: GraphLike, edge_feats: Tensor, node_feats: Tensor, ppr_rpes: Tensor) -> Tensor:
        """Attends to the nodes around links.

        Args:
            edge_index: The nodes around each link, `[2, E]`, links above nodes; or a graph in another form that
                `gattn.attend` takes, with links as targets.
            edge_feats: The features of the two nodes of each link, side by side, `[L, 2 * F]`.
            node_feats: The features of the nodes, `[N, F]`.
            ppr_rpes: The encoding of each node relative to its link, `[E, F]`.

        Returns:
            The output, `[L, H * C]` or `[L, C]`.

        Raises:
            TypeError: If an input is not a tensor.
            ValueError: If shapes or types do not fit each other.
            IndexError: If an index is out of range.
        """
        nodes, links = self._inputs((node_feats, edge_feats))
        if links is None:
            raise InputError("LPAttLayer needs the features of links: edge_feats may not be None.")
        graph = self._graph(edge_index, nodes, links, self_loops=False).listed(nodes.device)
        if not isinstance(ppr_rpes, Tensor):
            raise InputTypeError(f"ppr_rpes must be a tensor; got {type(ppr_rpes).__name__}.")
        if ppr_rpes.shape != (graph.num_edges, nodes.size(-1)):
            raise InputError(
                f"ppr_rpes must be [{graph.num_edges}, {nodes.size(-1)}], one row per edge; got {list(ppr_rpes.shape)}."
            )
        check_dtype(self, ppr_rpes=ppr_rpes)
        first, second = links.chunk(2, -1)
        query = self._heads(self.lin_l(first) + self.lin_l(second))
        halves = columns(self.lin_r, nodes.size(-1), nodes.size(-1))
        if halves is not None:
            key = self._heads(linear(nodes, halves[0], self.lin_r.bias))
            edge = self._heads(F.linear(ppr_rpes, halves[1]))
        else:
            around = nodes.index_select(-2, graph.sources_and_targets()[0].long())
            edge = self._heads(self.lin_r(torch.cat([around, ppr_rpes.expand(*around.shape[:-1], -1)], -1)))
            key = edge.new_zeros(*nodes.shape[:-1], *edge.shape[-2:])
        score = _LinkScore(self.att.squeeze(0))
        out: Tensor = self.attend(query, key, key, graph, score=score, edge=edge, edge_value=True)
        out = (out.flatten(-2) if self.concat else out.mean(-2)) + self.bias
        return dropout(self.post_att_norm(out), self.dropout, self.training)
