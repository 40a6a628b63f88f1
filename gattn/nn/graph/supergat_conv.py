"""The graph attention layer that also learns to predict the edges."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn.inits import glorot, zeros
from torch_geometric.utils import (
    batched_negative_sampling,
    dropout_edge,
    is_undirected,
    negative_sampling,
    to_undirected,
)

from gattn.attention import weigh
from gattn.errors import InputError, InputTypeError
from gattn.graphs import Graph, GraphLike, SparseGraph
from gattn.nn.shared.attention_conv import AttentionConv
from gattn.nn.shared.linear import Linear
from gattn.scores import DotScore

__all__ = ["SuperGATConv"]

_NOT_COMPILED = "pairs are drawn with Python's random: pass neg_edge_index to compile SuperGATConv as a whole"


class SuperGATConv(AttentionConv):
    r"""The layer of `How to Find Your Friendly Neighborhood <https://openreview.net/forum?id=Wi5KUNlqWty>`_.

    .. math::
        x'_i = \sum_{j \in \mathcal{N}(i) \cup \{i\}} \alpha_{ij} h_j, \qquad
        \alpha_{i\cdot} = \mathrm{softmax}_j \, \mathrm{LeakyReLU}(e_{ij}), \qquad h_i = W x_i

    .. math::
        e^{MX}_{ij} = (a_r^{\top} h_i + a_l^{\top} h_j) \, \sigma(h_i^{\top} h_j), \qquad
        e^{SD}_{ij} = h_i^{\top} h_j / \sqrt{F_{out}}

    In training, the dot product (scaled for SD) also predicts whether an edge exists, for edges of the graph and for
    randomly drawn pairs without one: add `get_attention_loss()` to the loss of the task.

    A drop-in replacement for `torch_geometric.nn.SuperGATConv`, with the same arguments, parameter names and results.
    With the same seeds, it also draws the same pairs (except in training with both `dropout` and an `edge_sample_ratio`
    below 1). It also supports features `[B, N, F]` over one graph, sparse features, training on `torch.sparse`
    adjacencies, `SparseGraph` and `CompleteGraph`, and float32 accumulation in half precision. Differences: a copy of
    the layer does not have the logits of its last call, and PyG's method `get_attention` is missing, because logits are
    not computed from tensors `[E, H, C]`.

    Args:
        in_channels: Channels of the input; `-1` infers them from the first call.
        out_channels: Channels of the output, per head.
        heads: Number of heads. (default: `1`)
        concat: Whether heads are concatenated rather than averaged. (default: `True`)
        negative_slope: Slope of the LeakyReLU. (default: `0.2`)
        dropout: Probability that an attention weight is dropped, in training. (default: `0.0`)
        add_self_loops: Whether every node attends to itself. (default: `True`)
        bias: Whether a bias is learnt. (default: `True`)
        attention_type: `"MX"` (mixed) or `"SD"` (scaled dot product). (default: `"MX"`)
        neg_sample_ratio: The number of pairs without an edge to draw, per drawn edge. (default: `0.5`)
        edge_sample_ratio: Probability that an edge is drawn for the loss. (default: `1.0`)
        is_undirected: Whether every graph is known to be undirected. Otherwise, each graph is checked before pairs are
            drawn. (default: `False`)
        **kwargs: Arguments of `torch_geometric.nn.conv.MessagePassing`, such as `flow` and `aggr`.

    Shapes:
        - **input:** features `[N, F_in]`, edge indices `[2, E]`, pairs without an edge `[2, P]`.
        - **output:** `[N, H * F_out]`, or `[N, F_out]` with `concat=False`.

    Raises:
        ValueError: If an option is out of range, or (in `forward`) features and graph do not fit.

    Example:
        >>> import torch, gattn
        >>> conv = gattn.nn.SuperGATConv(16, 8, heads=4)
        >>> conv(torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]])).shape
        torch.Size([3, 32])
        >>> conv.get_attention_loss().shape
        torch.Size([])
    """

    att_l: Tensor
    att_r: Tensor
    bias: Tensor | None
    att_x: Tensor | None

    _starts = (("att_l", glorot), ("att_r", glorot), ("bias", zeros))
    """A logit for each edge and pair drawn in the last call in training, `[..., E + P, H]`."""
    att_y: Tensor | None
    """Which of them are edges, `[..., E + P]`: 1 for an edge, 0 for a pair without one."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        bias: bool = True,
        attention_type: str = "MX",
        neg_sample_ratio: float = 0.5,
        edge_sample_ratio: float = 1.0,
        is_undirected: bool = False,
        **kwargs: Any,
    ):
        super().__init__(
            in_channels,
            out_channels,
            heads=heads,
            concat=concat,
            dropout=dropout,
            value_dropout=0.0,
            edge_dim=None,
            **kwargs,
        )
        if attention_type not in ("MX", "SD"):
            raise InputError(f"attention_type must be 'MX' or 'SD'; got {attention_type!r}.")
        if not neg_sample_ratio > 0.0:
            raise InputError(f"neg_sample_ratio must be positive; got {neg_sample_ratio}.")
        if not 0.0 < edge_sample_ratio <= 1.0:
            raise InputError(f"edge_sample_ratio must be above 0 and at most 1; got {edge_sample_ratio}.")
        self.negative_slope = negative_slope
        self.add_self_loops = add_self_loops
        self.attention_type = attention_type
        self.neg_sample_ratio = neg_sample_ratio
        self.edge_sample_ratio = edge_sample_ratio
        self.is_undirected = is_undirected
        self.lin = Linear(in_channels, heads * out_channels, bias=False, weight_initializer="glorot")
        for name in ("att_l", "att_r"):
            vector = Parameter(torch.empty(1, heads, out_channels)) if attention_type == "MX" else None
            self.register_parameter(name, vector)
        self.att_x = self.att_y = None
        total = heads * out_channels if concat else out_channels
        self.register_parameter("bias", Parameter(torch.empty(total)) if bias else None)
        self.reset_parameters()

    def __getstate__(self) -> dict[str, Any]:
        # Tensors computed by autograd can be neither copied nor pickled.
        return {**self.__dict__, "att_x": None, "att_y": None}

    def forward(
        self,
        x: Tensor,
        edge_index: GraphLike,
        neg_edge_index: Tensor | None = None,
        batch: Tensor | None = None,
    ) -> Tensor:
        """Attends over each node's neighbours; in training, also computes the terms of `get_attention_loss`.

        Args:
            x: Features `[..., N, F]` (dense, or `[N, F]` sparse).
            edge_index: The graph, in any form that `gattn.attend` takes.
            neg_edge_index: Pairs without an edge, `[2, P]`, to train against. Code that is compiled as a whole
                (`fullgraph=True`) needs them in training. (default: `None`, drawn at random)
            batch: The graph of each node, `[N]`, in ascending order, so that both ends of a drawn pair belong to the
                same one. (default: `None`, a single graph)

        Raises:
            TypeError: If `x` is not a tensor.
            ValueError: If features, graph and options do not fit; the message says which.
            IndexError: If an index of the graph is out of range (in compiled code, when the kernels run).
        """
        if not isinstance(x, Tensor):
            raise InputTypeError(f"x must be a tensor, the features of all nodes; got {type(x).__name__}.")
        self._inputs(x)
        graph = self._graph(edge_index, x, x, self.add_self_loops)
        x = self._heads(self.lin(x))
        is_mixed = self.attention_type == "MX"
        if not graph.is_dense and self.training:  # everything below shares one list of edges, in which all are real
            graph = SparseGraph(graph.edge_index, graph.num_targets, graph.num_sources, flow=graph.flow)
        elif not graph.is_dense and is_mixed:
            graph = graph.listed().with_listed_loops()
        products = None
        if is_mixed:
            bias, products = self._mixed(x, graph)
            result: Any = self.attend(None, None, x, graph, bias=bias, mask=graph.kept, dropout=self.dropout)
        else:
            dot_score = DotScore(negative_slope=self.negative_slope)
            result = self.attend(x, x, x, graph, score=dot_score, dropout=self.dropout)
        if self.training:
            self._supervise(x, graph, products, neg_edge_index, batch)
        out: Tensor = result.flatten(-2) if self.concat else result.mean(-2)
        return out if self.bias is None else out + self.bias

    def _mixed(self, x: Tensor, graph: Graph) -> tuple[Tensor, Tensor | None]:
        """The logits of MX as a bias, and the dot products for a list of edges."""
        left, right = ((x * vector).sum(-1) for vector in (self.att_l, self.att_r))  # [..., N, H]
        if graph.is_dense:  # all pairs by one matrix product
            products = torch.einsum("...ihc,...jhc->...hij", x, x)
            sums = right.transpose(-1, -2).unsqueeze(-1) + left.transpose(-1, -2).unsqueeze(-2)
            logits = F.leaky_relu(sums * products.sigmoid(), self.negative_slope)
            return graph.from_pairs(logits, self.heads), None
        source, target = graph.sources_and_targets()
        products = self._logits(x, graph.edge_index)
        sums = right.index_select(-2, target) + left.index_select(-2, source)
        return F.leaky_relu(sums * products.sigmoid(), self.negative_slope), products

    def _supervise(
        self, x: Tensor, graph: Graph, products: Tensor | None, neg_edge_index: Tensor | None, batch: Tensor | None
    ) -> None:
        """Computes the logits of pairs without an edge, and those of edges unless they are known."""
        edge_index = graph.listed(x.device).edge_index
        positive = self.positive_sampling(edge_index)
        if products is None or positive is not edge_index:
            products = self._logits(x, positive)
        negative = self.negative_sampling(edge_index, x.size(-3), batch) if neg_edge_index is None else neg_edge_index
        self.att_x = torch.cat([products, self._logits(x, negative)], dim=-2)
        self.att_y = self.att_x.new_zeros(self.att_x.shape[:-1])
        self.att_y[..., : positive.size(1)] = 1.0

    def _logits(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """The predictions whether these edges exist, `[..., E, H]`."""
        score = DotScore(1.0 if self.attention_type == "MX" else None)
        logits: Tensor = weigh(x, x, SparseGraph(edge_index, x.size(-3), x.size(-3)), score=score, distribution=None)
        return logits

    def positive_sampling(self, edge_index: Tensor) -> Tensor:
        """Draws edges of the graph, each with probability `edge_sample_ratio`; outside of training, returns all.

        Args:
            edge_index: The edges, `[2, E]`.
        """
        drawn: Tensor = dropout_edge(edge_index, p=1.0 - self.edge_sample_ratio, training=self.training)[0]
        return drawn

    @torch.compiler.disable(reason=_NOT_COMPILED)  # type: ignore[no-untyped-call, untyped-decorator]
    def negative_sampling(self, edge_index: Tensor, num_nodes: int, batch: Tensor | None = None) -> Tensor:
        """Draws pairs of nodes that no edge joins in either direction, `[2, P]`, with Python's `random`.

        Args:
            edge_index: The edges, `[2, E]`.
            num_nodes: Number of nodes.
            batch: The graph of each node, `[N]`, in ascending order. (default: `None`, a single graph)

        Raises:
            ValueError: If `batch` is not ascending.
        """
        if batch is not None and bool((batch.diff() < 0).any()):
            raise InputError("batch must give the graph of each node in ascending order, as PyG's batches do.")
        count = int(self.neg_sample_ratio * self.edge_sample_ratio * edge_index.size(1))
        if not self.is_undirected and not is_undirected(edge_index, num_nodes=num_nodes):
            edge_index = to_undirected(edge_index, num_nodes=num_nodes)
        if batch is None:
            drawn: Tensor = negative_sampling(edge_index, num_nodes, num_neg_samples=count)
        else:
            drawn = batched_negative_sampling(edge_index, batch, num_neg_samples=count)
        return drawn.to(edge_index.dtype)  # without pairs, PyG returns floats

    def get_attention_loss(self) -> Tensor:
        """The self-supervised loss of the last call: how well logits tell edges from other pairs; 0 in evaluation.

        Raises:
            ValueError: If there was no call in training.
        """
        if not self.training:
            return torch.tensor([0], device=next(self.parameters()).device)
        if self.att_x is None or self.att_y is None:
            raise InputError("get_attention_loss() needs a call in training first, and there has been none.")
        return F.binary_cross_entropy_with_logits(self.att_x.mean(dim=-1), self.att_y)

    def __repr__(self) -> str:
        start = f"{type(self).__name__}({self.in_channels}, {self.out_channels}"
        return f"{start}, heads={self.heads}, type={self.attention_type})"
