"""DGL's GAT whose messages contain the features of edges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gattn.edges import EdgeTerm, Projected
from gattn.errors import InputTypeError, check_at_least, check_flag, check_number, is_integer
from gattn.graphs import GraphLike
from gattn.nn.graph.dgl_conv import DGLConv
from gattn.nn.shared.attention_conv import projects
from gattn.nn.shared.declared import Declared
from gattn.nn.shared.dropout import dropout
from gattn.nn.shared.edge_features import checked_features
from gattn.nn.shared.linear import Linear
from gattn.ops.dropout import check_probability
from gattn.scores import GATScore

__all__ = ["EdgeGATConv"]


class EdgeGATConv(DGLConv):
    r"""GAT with features of edges in the score and in the messages.

    The layer of `SCENE <https://arxiv.org/abs/2301.03512>`_:

    .. math::
        x'_i = W_s x_i + \sum_{j \in \mathcal{N}(i)} \alpha_{ij} (W x_j + W_e e_{ij}) + b, \qquad
        \alpha_{i\cdot} = \mathrm{softmax}_j\, \mathrm{LeakyReLU}\big(a_l^\top W x_j + a_r^\top W x_i
        + a_e^\top W_e e_{ij}\big)

    for each head. The parameters have the names and shapes of those of `dgl.nn.EdgeGATConv`, so checkpoints load, and
    the results are the same. Differences: nodes without neighbours get no message instead of an error, and features may
    have batch dimensions.

    Args:
        in_channels: The number of channels of the nodes, F, or a pair for sources and targets, which then have
            projections of their own.
        edge_channels: The number of channels of the edges, D.
        out_channels: The number of channels of each head, C.
        heads: The number of heads, H.
        feat_drop: The probability of dropping an input feature of nodes during training. (default: `0.0`)
        attn_drop: The probability of dropping an attention weight during training. (default: `0.0`)
        negative_slope: The slope of the LeakyReLU for negative logits. (default: `0.2`)
        residual: Whether to add :math:`W_s x_i`. (default: `True`)
        activation: A function of the output. (default: `None`)
        bias: Whether to add b. (default: `True`)
        **kwargs: Arguments of `torch_geometric.nn.conv.MessagePassing`, such as `flow`.

    Shapes:
        - **input:** features `[N, F]` or `([M, F], [N, F])`, edge indices `[2, E]`, edge features `[E, D]`.
        - **output:** `[N, H, C]`.

    Raises:
        ValueError: If an option is out of range, or (in `forward`) features and graph do not fit.

    Example:
        >>> import torch, gattn
        >>> conv = gattn.nn.EdgeGATConv(16, 4, 8, heads=2)
        >>> conv(torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]]), torch.randn(2, 4)).shape
        torch.Size([3, 2, 8])
    """

    _shown = "in_channels edge_channels out_channels heads="

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        edge_channels: int,
        out_channels: int,
        heads: int,
        feat_drop: float = 0.0,
        attn_drop: float = 0.0,
        negative_slope: float = 0.2,
        residual: bool = True,
        activation: Callable[[Tensor], Tensor] | None = None,
        bias: bool = True,
        **kwargs: Any,
    ):
        super().__init__(in_channels, out_channels, heads, **kwargs)
        check_at_least(1, edge_channels=edge_channels)
        check_probability("feat_drop", feat_drop)
        check_probability("attn_drop", attn_drop)
        check_number("negative_slope", negative_slope)
        check_flag("residual", residual)
        check_flag("bias", bias)
        if activation is not None and not callable(activation):
            raise InputTypeError(f"activation must be a function, such as torch.relu; got {activation!r}.")
        self.edge_channels = edge_channels
        self.feat_drop = feat_drop
        self.attn_drop = attn_drop
        self.score = GATScore(negative_slope)
        self.activation = activation
        width = heads * out_channels
        self.fc_edge = Linear(edge_channels, width, bias=False)
        targets = in_channels if is_integer(in_channels) else in_channels[1]
        self.res_fc = Linear(targets, width, bias=False) if residual else None
        for name in ("attn_l", "attn_r", "attn_edge"):
            self.register_parameter(name, Parameter(torch.empty(1, heads, out_channels)))
        self.register_parameter("bias", Parameter(torch.empty(width)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Resets all parameters, as DGL does."""
        super(Declared, self).reset_parameters()  # modules draw their numbers below
        gain = torch.nn.init.calculate_gain("relu")
        weights = [module.weight for module in self.children() if isinstance(module, Linear)]
        for weight in (*weights, self.attn_l, self.attn_r, self.attn_edge):
            torch.nn.init.xavier_normal_(weight, gain=gain)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: GraphLike,
        edge_attr: Tensor | None = None,
        get_attention: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attends over each node's neighbours.

        Args:
            x: Features `[..., N, F]`, or a pair (sources, targets).
            edge_index: The graph, in any form that `gattn.attend` takes.
            edge_attr: Edge features `[E, D]`. (default: `None`, the vectors that a sparse adjacency holds)
            get_attention: Whether to return the attention weights, after dropout, as well. (default: `False`)

        Returns:
            `[..., N, H, C]`, and with `get_attention` the weights `[..., E, H, 1]`, in the order of the graph's
            `edge_index`.

        Raises:
            TypeError: If an input is not a tensor.
            ValueError: If features and graph do not fit; the message says which.
            IndexError: If an index of the graph is out of range (in compiled code, when the kernels run).
        """
        sources, targets = self._ends(x)
        graph = self._graph(edge_index, sources, targets, self_loops=False)
        graph = graph.listed(sources.device) if get_attention else graph
        graph, edge_attr = checked_features(self, graph, edge_attr, self.edge_channels, ())
        is_one = targets is sources
        sources = dropout(sources, self.feat_drop, self.training)
        targets = sources if is_one else dropout(targets, self.feat_drop, self.training)
        value, received = self._projected(sources, targets)
        edge: EdgeTerm
        edge_value: EdgeTerm
        if projects(self.fc_edge, edge_attr):
            weight = self.fc_edge.weight.view(self.heads, self.out_channels, -1)
            edge_value = Projected(edge_attr, weight)
            edge = Projected(edge_attr, (weight * self.attn_edge.squeeze(0).unsqueeze(-1)).sum(1))
        else:
            edge_value = self._heads(self.fc_edge(edge_attr))
            edge = (edge_value * self.attn_edge).sum(-1)
        result: Any = self.attend(
            (received * self.attn_r).sum(-1),
            (value * self.attn_l).sum(-1),
            value,
            graph,
            score=self.score,
            edge=edge,
            edge_value=edge_value,
            out_bias=None if self.bias is None else self._heads(self.bias),
            dropout=self.attn_drop,
            return_weights="dropped" if get_attention else False,
        )
        out: Tensor = result[0] if get_attention else result
        if self.res_fc is not None:
            out = out + self._heads(self.res_fc(targets))
        if self.activation is not None:
            out = self.activation(out)
        return (out, result[1].unsqueeze(-1)) if get_attention else out
