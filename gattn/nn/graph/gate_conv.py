"""The layer with which Attentive FP reads the bonds of a molecule."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Linear, Parameter
from torch_geometric.nn.inits import glorot, zeros

from gattn.attention import weigh
from gattn.edges import Projected
from gattn.errors import InputError, check_at_least
from gattn.graphs import Graph, GraphLike, SparseGraph
from gattn.nn.shared.attention_conv import BaseConv
from gattn.nn.shared.edge_features import checked_features, with_features
from gattn.nn.shared.linear import columns
from gattn.ops.dropout import check_probability
from gattn.scores import AdditiveScore, GATScore

__all__ = ["GATEConv"]

_SLOPE = 0.01


class GATEConv(BaseConv):
    r"""The first layer of `Attentive FP <https://pubs.acs.org/doi/10.1021/acs.jmedchem.9b00959>`_.

    .. math::
        x'_i = b + \sum_{j \in \mathcal{N}(i)} \alpha_{ij} W_2 x_j, \qquad
        \alpha_{i\cdot} = \mathrm{softmax}_j \, \mathrm{LeakyReLU}
        \big(a_r^{\top} x_i + a_l^{\top} \, \mathrm{LeakyReLU}(W_1 [x_j, e_{ij}])\big)

    Edge features influence the weights, but not the values that are summed. Both slopes are 0.01.

    A drop-in replacement for `torch_geometric.nn.models.attentive_fp.GATEConv`, with the same arguments, parameter
    names and results. It also supports features `[B, N, F]` over one graph, `SparseGraph` and `CompleteGraph`, and
    float32 accumulation in half precision. The product with :math:`W_1` is split into one per node and one per edge, so
    no tensor `[E, F]` is made on the CPU. Differences: channels that cannot work are refused when the layer is made.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output, which must equal those of the input.
        edge_dim: Channels of the edge features.
        dropout: Probability that an attention weight is dropped, in training. (default: `0.0`)
        **kwargs: Arguments of `torch_geometric.nn.conv.MessagePassing`, such as `flow` and `aggr`.

    Shapes:
        - **input:** features `[N, F]` or `([M, F], [N, F])`, edge indices `[2, E]`, edge features `[E, D]`.
        - **output:** `[N, F]`.

    Raises:
        TypeError: If a number of channels is not an integer.
        ValueError: If an option is out of range, or `in_channels` and `out_channels` differ; or (in `forward`) features
            and graph do not fit.

    Example:
        >>> import torch, gattn
        >>> conv = gattn.nn.GATEConv(16, 16, edge_dim=4)
        >>> conv(torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]]), torch.randn(2, 4)).shape
        torch.Size([3, 16])
    """

    in_channels: int

    flat_messages = True

    _starts = (("att_l", glorot), ("att_r", glorot), ("lin1", glorot), ("lin2", glorot), ("bias", zeros))
    _shown = ""

    def __init__(self, in_channels: int, out_channels: int, edge_dim: int, dropout: float = 0.0, **kwargs: Any):
        super().__init__(**kwargs)
        check_at_least(1, in_channels=in_channels, out_channels=out_channels)
        check_at_least(0, edge_dim=edge_dim)
        if in_channels != out_channels:
            raise InputError(
                "GATEConv does not change the number of channels, so in_channels and out_channels must be the same; "
                f"got {in_channels} and {out_channels}."
            )
        check_probability("dropout", dropout)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.edge_dim = edge_dim
        self.dropout = dropout

        self.att_l = Parameter(torch.empty(1, out_channels))
        self.att_r = Parameter(torch.empty(1, in_channels))
        self.lin1 = Linear(in_channels + edge_dim, out_channels, bias=False)
        self.lin2 = Linear(out_channels, out_channels, bias=False)
        self.bias = Parameter(torch.empty(out_channels))
        self.reset_parameters()

    def forward(
        self, x: Tensor | tuple[Tensor, Tensor], edge_index: GraphLike, edge_attr: Tensor | None = None
    ) -> Tensor:
        """Attends over each node's neighbours.

        Args:
            x: Features `[..., N, F]`, or a pair (sources, targets).
            edge_index: The graph, in any form that `gattn.attend` takes.
            edge_attr: Edge features `[E, D]`, or `[E]` for a single one. (default: `None`, those of a sparse adjacency)

        Raises:
            TypeError: If an input is not a tensor.
            ValueError: If features and graph do not fit; the message says which.
            IndexError: If an index of the graph is out of range (in compiled code, when the kernels run).
        """
        sources, targets = self._inputs(x)
        if targets is None:
            raise InputError("GATEConv compares sources with targets: x[1] may not be None.")
        graph = self._graph(edge_index, sources, targets, self_loops=False)
        graph, edge_attr = checked_features(self, graph, edge_attr, self.edge_dim, ())
        query = F.linear(targets, self.att_r)
        value = self.lin2(sources).unsqueeze(-2)  # one head
        terms = self._source_terms(sources, query, graph, edge_attr)
        out = self.attend(query, None, value, graph, score=GATScore(_SLOPE), edge=terms, dropout=self.dropout)
        assert isinstance(out, Tensor)
        return out.squeeze(-2) + self.bias

    def _source_terms(self, sources: Tensor, query: Tensor, graph: Graph, edge_attr: Tensor) -> Tensor:
        """The contribution of source and edge to each logit, `[..., E, 1]`: an additive score."""
        edges = graph.edge_list(sources.device)
        parts = columns(self.lin1, self.in_channels, self.edge_dim)
        if parts is None:
            source, _ = edges.sources_and_targets()
            hidden = self.lin1(with_features(sources.index_select(-2, source), edge_attr))
            return F.linear(F.leaky_relu(hidden, _SLOPE), self.att_l)
        of_node, of_edge = parts
        key = F.linear(sources, of_node).unsqueeze(-2)
        terms: Tensor = weigh(
            key.new_zeros(key.size(-1)).expand(*query.shape, -1),
            key,
            SparseGraph(edges.edge_index, edges.num_targets, edges.num_sources, flow=edges.flow),
            score=AdditiveScore(self.att_l, negative_slope=_SLOPE),
            edge=Projected(edge_attr, of_edge.unsqueeze(0)),
            distribution=None,
        )
        return terms
