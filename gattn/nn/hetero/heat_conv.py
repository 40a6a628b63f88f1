"""The layer of the Heterogeneous Edge-enhanced graph ATtention network."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Embedding
from torch_geometric.nn.dense import HeteroLinear

from gattn.errors import InputError, InputTypeError, check_at_least
from gattn.graphs import Graph, GraphLike
from gattn.nn.shared.attention_conv import BaseConv
from gattn.nn.shared.edge_features import checked_features, with_features
from gattn.nn.shared.linear import Linear, columns, is_untouched
from gattn.ops.dropout import check_probability
from gattn.products import linear
from gattn.scores import GATScore
from gattn.torch_private import is_traced

__all__ = ["HEATConv"]


class HEATConv(BaseConv):
    r"""The layer of `Heterogeneous Edge-Enhanced Graph Attention Network <https://arxiv.org/abs/2106.07161>`_.

    Nodes and edges have types: each node type has its own matrix, and each edge type has a vector :math:`t`.

    .. math::
        x'_i = h_i + \sum_{j \in \mathcal{N}(i)} \alpha_{ij} W [h_j \| e'_{ij}], \qquad
        \alpha_{i\cdot} = \mathrm{softmax}_j \, \mathrm{LeakyReLU}(a^{\top} [h_i \| h_j \| t'_{ij} \| e'_{ij}])

        h_i = W_{type(i)} x_i, \qquad t'_{ij} = \mathrm{LeakyReLU}(t_{type(ij)}), \qquad
        e'_{ij} = \mathrm{LeakyReLU}(W_e e_{ij})

    All heads average the same vectors, with different weights.

    A drop-in replacement for `torch_geometric.nn.HEATConv`, with the same arguments, parameter names and results. It
    also supports `SparseGraph` and `CompleteGraph`, and float32 accumulation in half precision. Linear maps of
    concatenations are computed term by term, unless the modules `att` and `lin` have hooks or were changed.

    Args:
        in_channels: Channels of the input; `-1` infers them from the first call.
        out_channels: Channels of the output, per head.
        num_node_types: Number of node types.
        num_edge_types: Number of edge types.
        edge_type_emb_dim: Channels of the vector :math:`t` of an edge type.
        edge_dim: Channels of the edge features.
        edge_attr_emb_dim: Channels of the projected edge features :math:`e'`.
        heads: Number of heads. (default: `1`)
        concat: Whether heads are concatenated rather than averaged. (default: `True`)
        negative_slope: Slope of the LeakyReLUs. (default: `0.2`)
        dropout: Probability that an attention weight is dropped, in training. (default: `0.0`)
        root_weight: Whether :math:`h_i` is added to the output. (default: `True`)
        bias: Whether biases are learnt. (default: `True`)
        **kwargs: Arguments of `torch_geometric.nn.conv.MessagePassing`, such as `flow` and `aggr`.

    Shapes:
        - **input:** features `[N, F_in]`, edge indices `[2, E]`, node types `[N]`, edge types `[E]`, edge features
          `[E, D]`.
        - **output:** `[N, H * F_out]`, or `[N, F_out]` with `concat=False`.

    Raises:
        ValueError: If an option is out of range.

    Example:
        >>> import torch, gattn
        >>> conv = gattn.nn.HEATConv(16, 8, num_node_types=2, num_edge_types=3, edge_type_emb_dim=4, edge_dim=5,
        ...                 edge_attr_emb_dim=6, heads=2)
        >>> edge_index, edge_attr = torch.tensor([[0, 1], [1, 2]]), torch.randn(2, 5)
        >>> conv(torch.randn(3, 16), edge_index, torch.tensor([0, 1, 1]), torch.tensor([2, 0]), edge_attr).shape
        torch.Size([3, 16])
    """

    takes_shards = True

    _shown = "in_channels out_channels heads="

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_node_types: int,
        num_edge_types: int,
        edge_type_emb_dim: int,
        edge_dim: int,
        edge_attr_emb_dim: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        root_weight: bool = True,
        bias: bool = True,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.num_node_types = num_node_types
        self.num_edge_types = num_edge_types
        self.heads = heads
        self.concat = concat
        self.negative_slope = negative_slope
        self.dropout = dropout
        self.root_weight = root_weight
        check_at_least(1, heads=heads, out_channels=out_channels)
        check_probability("dropout", dropout)

        self.hetero_lin = HeteroLinear(in_channels, out_channels, num_node_types, bias=bias)
        self.edge_type_emb = Embedding(num_edge_types, edge_type_emb_dim)
        self.edge_attr_emb = Linear(edge_dim, edge_attr_emb_dim, bias=False)
        self.att = Linear(2 * out_channels + edge_type_emb_dim + edge_attr_emb_dim, heads, bias=False)
        self.lin = Linear(out_channels + edge_attr_emb_dim, out_channels, bias=bias)
        self.reset_parameters()

    def forward(
        self,
        x: Tensor,
        edge_index: GraphLike,
        node_type: Tensor,
        edge_type: Tensor,
        edge_attr: Tensor | None = None,
    ) -> Tensor:
        """Attends over each node's neighbours.

        Args:
            x: Features `[N, F]`.
            edge_index: The graph, in any form that `gattn.attend` takes.
            node_type: The type of each node, `[N]`, as a number.
            edge_type: The type of each edge, `[E]`, as a number, in the order of the graph's edges.
            edge_attr: Edge features `[E, D]`. (default: `None`, those of a sparse adjacency)

        Returns:
            `[N, H * F_out]`, or `[N, F_out]` with `concat=False`.

        Raises:
            TypeError: If an argument is not a tensor.
            ValueError: If features, types and graph do not fit; the message says which.
            IndexError: If an index of the graph or a type is out of range.
        """
        if not isinstance(x, Tensor) or x.dim() != 2:
            given = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise InputTypeError(f"x must be a tensor [N, F], the features of all nodes; got {given}.")
        self._inputs(x)
        graph = self._graph(edge_index, x, x, self_loops=False)
        graph = graph.listed(x.device)
        graph, edge_attr = checked_features(self, graph, edge_attr, getattr(self.edge_attr_emb, "in_channels", -1), ())
        _check_types("node_type", node_type, x.size(0), self.num_node_types)
        _check_types("edge_type", edge_type, edge_attr.size(0), self.num_edge_types)

        x = self._projected(x, node_type)
        edge = F.leaky_relu(self.edge_attr_emb(edge_attr), self.negative_slope)
        query, key, logits = self._logit_terms(x, graph, edge, edge_type.long())
        options: dict[str, Any] = {"score": GATScore(self.negative_slope), "edge": logits, "dropout": self.dropout}
        parts = columns(self.lin, self.out_channels, edge.size(-1))
        if parts is None:
            value = x.new_zeros(x.size(0), self.out_channels)
            source, _ = graph.sources_and_targets()
            edge_value = self.lin(with_features(x.index_select(0, source), edge))
        else:
            value = linear(x, parts[0], self.lin.bias)
            edge_value = F.linear(edge, parts[1]) if self._needs_messages() is not None else None
        value = self._for_heads(value)
        if edge_value is not None:
            out = self.attend(query, key, value, graph, edge_value=self._for_heads(edge_value), **options)
        else:
            out, alpha = self.attend(query, key, value, graph, return_weights="dropped", **options)
            assert isinstance(alpha, Tensor)
            assert parts is not None
            out = out + F.linear(self._edge_sums(alpha, edge, graph, x.size(0)), parts[1])
        assert isinstance(out, Tensor)
        if self.root_weight:
            out = out + x.unsqueeze(-2)
        return out.flatten(-2) if self.concat else out.mean(-2)

    def _logit_terms(
        self, x: Tensor, graph: Graph, edge: Tensor, edge_type: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """The terms of each logit, of target, source and edge: `[N, H]`, `[N, H]` and `[E, H]`.

        A linear map of a concatenation is a sum of linear maps, each computed where there are fewest rows.
        """
        emb = self.edge_type_emb
        is_table = is_untouched(emb) and not (emb.max_norm or emb.scale_grad_by_freq or emb.sparse)
        is_table = is_table and emb.padding_idx is None  # such options change gradients
        types = F.leaky_relu(emb.weight if is_table else emb(edge_type), self.negative_slope)
        parts = columns(self.att, self.out_channels, self.out_channels, types.size(-1), edge.size(-1))
        if parts is None:
            types = types.index_select(0, edge_type) if is_table else types
            source, target = graph.sources_and_targets()
            ends = torch.cat([x.index_select(0, target), x.index_select(0, source), types], -1)
            return None, None, self.att(with_features(ends, edge))
        of_target, of_source, of_type, of_edge = parts
        types = F.linear(types, of_type)
        logits = (F.embedding(edge_type, types) if is_table else types) + F.linear(edge, of_edge)
        return F.linear(x, of_target), F.linear(x, of_source), logits

    def _for_heads(self, x: Tensor) -> Tensor:
        """`[N, C]` as `[N, H, C]`, without a copy."""
        return x.unsqueeze(-2).expand(-1, self.heads, -1)

    def _projected(self, x: Tensor, node_type: Tensor) -> Tensor:
        """Each node's features times the matrix of its type."""
        projected: Tensor
        if not is_traced() or not is_untouched(self.hetero_lin):
            projected = self.hetero_lin(x, node_type.long())
            return projected
        # The sizes in a traced program cannot depend on the number of nodes of each type.
        weight, bias = self.hetero_lin.weight, self.hetero_lin.bias
        every = (x @ weight).transpose(0, 1)  # [N, T, C]
        if bias is not None:
            every = every + bias
        index = node_type.long().view(-1, 1, 1).expand(-1, 1, self.out_channels)
        projected = every.gather(1, index).squeeze(1)
        return projected

    def _edge_sums(self, alpha: Tensor, edge: Tensor, graph: Graph, num_nodes: int) -> Tensor:
        """The weighted sum of the features `[E, D]` of each target's edges, for each head, `[N, H, D]`.

        Projecting the result takes a fraction of the memory and time of projecting features to `[E, H, C]`.
        """
        nothing = edge.new_zeros(num_nodes, 1, edge.size(-1))  # to which the edges' values are added
        # The heads are a batch with the same features.
        alpha, nothing = alpha.t().unsqueeze(-1), nothing.expand(self.heads, *nothing.shape)
        out = self.weighted_sum(alpha, nothing, graph, edge_value=edge.unsqueeze(1))
        return out.squeeze(-2).transpose(0, 1)


def _check_types(name: str, types: Any, count: int, num_types: int) -> None:
    if not isinstance(types, Tensor):
        raise InputTypeError(f"{name} must be a tensor; got {type(types).__name__}.")
    if types.shape != (count,) or types.is_floating_point() or types.dtype == torch.bool:
        raise InputError(
            f"{name} must hold {count} types, as integers, for this graph; got {types.dtype} of shape "
            f"{list(types.shape)}."
        )
    if is_traced() or count == 0:
        return
    lowest, highest = (int(bound) for bound in types.aminmax())
    if lowest < 0 or highest >= num_types:
        raise IndexError(
            f"{name} holds {lowest if lowest < 0 else highest}, but the {num_types} types are counted from 0."
        )
