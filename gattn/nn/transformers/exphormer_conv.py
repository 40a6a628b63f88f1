"""The attention of Exphormer, on a sparse graph that connects all nodes within few steps."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gattn.edges import EdgeTerm, Projected
from gattn.errors import check_flag, check_number
from gattn.graphs import GraphLike
from gattn.nn.shared.attention_conv import BaseConv, projects
from gattn.nn.shared.edge_features import checked_features
from gattn.nn.shared.linear import Linear
from gattn.nn.transformers.all_pairs import check_heads
from gattn.ops.dropout import check_probability
from gattn.scores import DotScore

__all__ = ["ExphormerConv"]


class ExphormerConv(BaseConv):
    r"""Attention along edges whose features multiply the dot product.

    The attention of `Exphormer: Sparse Transformers for Graphs <https://arxiv.org/abs/2303.06147>`_, by the equations
    of its authors' program:

    .. math::
        x'_i = \Big\Vert_h \sum_{j \in \mathcal{N}(i)} \alpha_{ij} W_V x_j, \qquad
        \alpha_{i\cdot} = \mathrm{softmax}_j\, \mathrm{clamp}\Big(\frac{1}{\sqrt C}
        \sum_c (W_Q x_i)_c (W_K x_j)_c (W_E e_{ij})_c,\ \pm 5\Big)

    for each head. The graph is meant to be the union of three: the graph itself, an expander on its nodes
    (`gattn.graphs.expander`), and a few virtual nodes that are joined to all others
    (`gattn.graphs.with_virtual_nodes`), so that attention among N nodes needs O(N + E) edges. Edges of each kind have
    features of their own, such as rows of an embedding. Output projections, residual connections, norms and
    feed-forward networks come around it.

    Differences from the authors' program: it divides by the sum of exponentials and 1e-6, here by the sum alone; it
    drops no weights; and for a degree d, its expanders have 2d neighbours at each node and keep their self-loops, where
    `gattn.graphs.expander` has d, and none.

    Args:
        channels: The number of channels of the nodes, F.
        edge_channels: The number of channels of the edges, D.
        heads: The number of heads, H. Each has F / H channels, C. (default: `1`)
        clamp: The largest absolute value of a logit. (default: `5.0`)
        dropout: The probability of dropping an attention weight during training. (default: `0.0`)
        bias: Whether projections of nodes have a bias. (default: `False`)
        **kwargs: Arguments of `torch_geometric.nn.conv.MessagePassing`, such as `flow`.

    Shapes:
        - **input:** features `[N, F]`, edge indices `[2, E]`, edge features `[E, D]`.
        - **output:** `[N, F]`.

    Raises:
        ValueError: If an option is out of range, `channels` is not a multiple of `heads`, or (in `forward`) features
            and graph do not fit.

    Example:
        >>> import torch, gattn
        >>> from gattn.graphs import expander, union, with_virtual_nodes
        >>> batch = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])  # two graphs of 4 nodes
        >>> edges, more = torch.tensor([[0, 1, 4], [1, 2, 5]]), expander(8, degree=2, batch=batch)
        >>> graph = with_virtual_nodes(union(edges, more, typed=True), batch=batch)  # two virtual nodes
        >>> kinds = torch.nn.Embedding(len(graph.edge_types), 4)
        >>> x = torch.randn(10, 16)  # the last two are the virtual nodes'
        >>> conv = gattn.nn.ExphormerConv(16, 4, heads=2)
        >>> conv(x, graph, kinds(graph.edge_type)).shape
        torch.Size([10, 16])
    """

    takes_shards = True

    _shown = "in_channels edge_channels heads="

    def __init__(
        self,
        channels: int,
        edge_channels: int,
        heads: int = 1,
        clamp: float = 5.0,
        dropout: float = 0.0,
        bias: bool = False,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        check_heads(channels, heads, edge_channels)
        check_number("clamp", clamp, "positive")
        check_probability("dropout", dropout)
        check_flag("bias", bias)
        self.in_channels = channels
        self.edge_channels = edge_channels
        self.heads = heads
        self.dropout = dropout
        self.score = DotScore(edge="multiply", clamp=clamp)
        self.lin_query, self.lin_key, self.lin_value = (Linear(channels, channels, bias=bias) for _ in range(3))
        self.lin_edge = Linear(edge_channels, channels, bias=False)

    def _reset_parameters(self) -> None:
        """What PyG's blocks call of their attention."""
        self.reset_parameters()

    def forward(self, x: Tensor, edge_index: GraphLike, edge_attr: Tensor | None = None) -> Tensor:
        """Attends along the edges.

        Args:
            x: The features, `[..., N, F]`.
            edge_index: The graph, in any form that `gattn.attend` takes.
            edge_attr: The features of the edges, `[E, D]`. (default: `None`, the vectors that a sparse adjacency holds)

        Returns:
            The output, `[..., N, F]`.

        Raises:
            TypeError: If an input is not a tensor.
            ValueError: If features and graph do not fit; the message says which.
            IndexError: If an index of the graph is out of range.
        """
        x = self._nodes(x)
        graph = self._graph(edge_index, x, x, self_loops=False)
        graph, edge_attr = checked_features(self, graph, edge_attr, self.edge_channels, ())
        edge: EdgeTerm
        if projects(self.lin_edge, edge_attr):
            edge = Projected(edge_attr, self.lin_edge.weight.view(self.heads, -1, self.edge_channels))
        else:
            edge = self._heads(self.lin_edge(edge_attr))
        query, key, value = (self._heads(lin(x)) for lin in (self.lin_query, self.lin_key, self.lin_value))
        out: Tensor = self.attend(query, key, value, graph, score=self.score, edge=edge, dropout=self.dropout)
        return out.flatten(-2)
