"""The graph layer whose nodes attend over the earlier layers of their neighbours."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn.aggr import MeanAggregation, SumAggregation
from torch_geometric.nn.conv.dna_conv import MultiHead
from torch_geometric.typing import SparseTensor

from gattn.attention import weigh
from gattn.errors import InputError, InputTypeError, check_at_least
from gattn.graphs import Graph, GraphLike, SparseGraph
from gattn.graphs.edge_lists import derived_tensors
from gattn.nn.shared.attention_conv import BaseConv
from gattn.nn.shared.degrees import over_root_degrees
from gattn.nn.shared.dropout import dropout
from gattn.ops.dropout import check_probability
from gattn.recording import record
from gattn.torch_private import has_hooks

__all__ = ["DNAConv"]

_FORWARD = MultiHead.forward


class DNAConv(BaseConv):
    r"""The layer of `Just Jump <https://arxiv.org/abs/1904.04849>`_ (dynamic neighborhood aggregation).

    .. math::
        x'_i = \sum_{j \in \mathcal{N}(i) \cup \{i\}} \frac{w_{ij}}{\sqrt{d_i d_j}} \sum_{l=1}^{L} \alpha_{ijl} W_V
        x_j^{(l)}, \qquad
        \alpha_{ijl} = \frac{\exp s_{ijl}}{1 + \sum_k \exp s_{ijk}}, \quad
        s_{ijl} = \frac{(W_Q x_i^{(L)})^{\top} W_K x_j^{(l)}}{\sqrt{C}}

    Along each edge, the target's last layer attends over all layers of the source, or over none of them, as the
    restricted softmax has a sink. Here, each layer of each head is a head of its own. So logits and sums are those of
    ordinary attention, and nothing larger than one number per edge, layer and head is stored.

    A drop-in replacement for `torch_geometric.nn.DNAConv`, with the same arguments, parameter names and results. It
    also supports `SparseGraph` and `CompleteGraph`, adjacencies in CSC form, `normalize=False` without edge weights,
    and float32 accumulation in half precision. Differences: the linear layers are called once for all nodes instead of
    once per edge, and `multi_head` itself is not called, so hooks on it do not run.

    Args:
        channels: Channels of input and output.
        heads: Number of heads. (default: `1`)
        groups: Number of groups of each linear layer, each of which sees some of the channels. (default: `1`)
        dropout: Probability that an attention weight is dropped, in training. (default: `0.0`)
        cached: Whether the normalized graph of the first call is used in all later calls, whatever their graph.
            (default: `False`)
        normalize: Whether edges are weighted by the degrees of both ends. (default: `True`)
        add_self_loops: Whether nodes without a self-loop get one, if `normalize` is set. (default: `True`)
        bias: Whether the linear layers have biases. (default: `True`)
        **kwargs: Arguments of `torch_geometric.nn.conv.MessagePassing`, such as `flow` and `aggr`.

    Shapes:
        - **input:** features `[N, L, F]` of L layers, edge indices `[2, E]`, edge weights `[E]`.
        - **output:** `[N, F]`.

    Raises:
        ValueError: If an option is out of range, `heads` or `groups` does not divide `channels`, or neither of them
            divides the other.

    Example:
        >>> import torch, gattn
        >>> conv = gattn.nn.DNAConv(16, heads=4, groups=2)
        >>> conv(torch.randn(3, 5, 16), torch.tensor([[0, 1], [1, 2]])).shape  # 3 nodes, 5 layers
        torch.Size([3, 16])
    """

    _cached_edge_index: tuple[Tensor, Tensor | None] | None
    _cached_adj_t: Any

    def __init__(
        self,
        channels: int,
        heads: int = 1,
        groups: int = 1,
        dropout: float = 0.0,
        cached: bool = False,
        normalize: bool = True,
        add_self_loops: bool = True,
        bias: bool = True,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        check_at_least(1, channels=channels, heads=heads, groups=groups)
        if channels % heads or channels % groups or max(heads, groups) % min(heads, groups):
            raise InputError(
                "heads and groups must divide channels, and one of them the other; got "
                f"{channels=}, {heads=}, {groups=}."
            )
        check_probability("dropout", dropout)
        self.in_channels = channels
        self.bias = bias
        self.cached = cached
        self.normalize = normalize
        self.add_self_loops = add_self_loops
        self.multi_head = MultiHead(channels, channels, heads, groups, dropout, bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Resets all parameters, as PyG does, and forgets the cached graph."""
        super().reset_parameters()
        self._cached_edge_index = None
        self._cached_adj_t = None

    def forward(self, x: Tensor, edge_index: GraphLike, edge_weight: Tensor | None = None) -> Tensor:
        """Attends over the layers of each node's neighbours.

        Args:
            x: Features `[N, L, F]`, the last layer last.
            edge_index: The graph, in any form that `gattn.attend` takes.
            edge_weight: Edge weights `[E]`; those of a sparse adjacency are its values. (default: `None`)

        Raises:
            TypeError: If an input is not a tensor.
            ValueError: If features and graph do not fit; the message says which.
            IndexError: If an index of the graph is out of range (in compiled code, when the kernels run).
        """
        if not isinstance(x, Tensor):
            raise InputTypeError(f"x must be a tensor, the features of all nodes; got {type(x).__name__}.")
        if x.dim() != 3 or x.size(1) == 0:
            raise InputError(f"features must have shape [N, L, F], with at least one layer; got {list(x.shape)}.")
        self._inputs(x)
        x = x.contiguous()  # as PyG's grouped layers require
        last = x[:, -1]
        graph, edge_weight = self._weighted(self._graph(edge_index, last, last, False), edge_weight, x)

        lins = self.multi_head
        if (
            type(lins) is not MultiHead
            or MultiHead.forward is not _FORWARD
            or "forward" in vars(lins)
            or has_hooks(lins)
        ):
            return self._by_calling(lins, x, graph, edge_weight)
        heads = lins.heads
        shape = (*x.shape[:2], heads, x.size(2) // heads)
        query = lins.lin_q(last).view(shape[0], 1, *shape[2:]).expand(shape).flatten(1, 2)
        key, value = (lin(x).view(shape).flatten(1, 2) for lin in (lins.lin_k, lins.lin_v))
        logits = weigh(query, key, graph, distribution=None).view(-1, *shape[1:3])
        alpha = F.pad(logits, (0, 0, 0, 1)).softmax(-2)[:, :-1]  # the sink is one more layer with a logit of zero
        if edge_weight is not None:
            alpha = alpha * edge_weight.view(-1, 1, 1)

        if isinstance(self.aggr_module, (SumAggregation, MeanAggregation)):
            record(self, graph, alpha.flatten(1))
            out = self.weighted_sum(alpha.flatten(1), value, graph, dropout=lins.dropout)
            return out.view(x.shape).sum(1)
        return self._aggregated(dropout(alpha, lins.dropout, self.training), value, graph)

    def _aggregated(self, alpha: Tensor, value: Tensor, graph: Graph) -> Tensor:
        """For aggregations that are not linear and so need whole messages, summed over layers, `[E, F]`."""
        source, _ = graph.sources_and_targets()
        messages = value.index_select(0, source).view(*alpha.shape, value.size(-1)) * alpha.unsqueeze(-1)
        return self._sum_of(messages.sum(1).flatten(1), graph, value.size(0))

    def _by_calling(self, attention: Any, x: Tensor, graph: Graph, edge_weight: Tensor | None) -> Tensor:
        """The result if the attention, edge by edge, is not PyG's or has hooks."""
        source, target = graph.sources_and_targets()
        layers = x.index_select(0, source)
        messages = attention(x.index_select(0, target)[:, -1:], layers, layers).squeeze(1)
        messages = messages if edge_weight is None else messages * edge_weight.view(-1, 1)
        return self._sum_of(messages, graph, x.size(0))

    def _sum_of(self, messages: Tensor, graph: Graph, num_nodes: int) -> Tensor:
        """The aggregated messages `[E, F]` of each node."""
        messages = messages.unsqueeze(1)
        ones, nothing = messages.new_ones(messages.size(0), 1), messages.new_zeros(num_nodes, *messages.shape[1:])
        return self.weighted_sum(ones, nothing, graph, edge_value=messages).squeeze(1)

    def _weighted(self, graph: Graph, edge_weight: Tensor | None, x: Tensor) -> tuple[Graph, Tensor | None]:
        """The graph, normalized if requested, and its edge weights."""
        listed = graph = graph.listed(x.device)
        adjacency = listed.edges().adjacency  # which may be a sparse tensor, with values of its own
        is_list = isinstance(adjacency, Tensor) and adjacency.layout == torch.strided
        if edge_weight is not None:
            num_edges = graph.num_edges
            if not isinstance(edge_weight, Tensor):
                raise InputTypeError(f"edge_weight must be a tensor; got {type(edge_weight).__name__}.")
            if not edge_weight.is_floating_point() or edge_weight.numel() != num_edges:
                raise InputError(
                    f"edge_weight must hold a floating-point number for each of {num_edges} edges; got "
                    f"{edge_weight.dtype} "
                    f"of shape {list(edge_weight.shape)}."
                )
            edge_weight = edge_weight.view(-1)
        if self.normalize:
            name = "_cached_adj_t" if isinstance(adjacency, SparseTensor) else "_cached_edge_index"
            found = getattr(self, name)
            if found is None:
                found = self._normalized(adjacency, edge_weight, graph, x.dtype, is_list)
                if self.cached:
                    setattr(self, name, found)
            adjacency, edge_weight = (found, None) if isinstance(found, SparseTensor) else found
        graph = SparseGraph(adjacency, graph.num_targets, graph.num_sources, flow=graph.flow)
        return graph, graph.values if edge_weight is None else edge_weight

    def _normalized(
        self, adjacency: Any, edge_weight: Tensor | None, graph: Graph, dtype: torch.dtype, is_list: bool
    ) -> Any:
        """The result of PyG's `gcn_norm` for a graph: `(edge_index, edge_weight)`, or a `SparseTensor`."""
        if isinstance(adjacency, Tensor) and adjacency.layout == torch.sparse_csc:
            adjacency = adjacency.to_sparse_csr()
        # Degrees are counted in float32 at least: bfloat16 cannot count to 300.
        options = False, self.add_self_loops, graph.flow, torch.promote_types(dtype, torch.float32)

        def normalized(edge_weight: Tensor | None) -> Any:
            wide = (
                None if edge_weight is None else edge_weight.to(torch.promote_types(edge_weight.dtype, torch.float32))
            )
            return over_root_degrees(adjacency, wide, graph.num_targets, *options)

        if isinstance(adjacency, SparseTensor) and not adjacency.has_value():
            found = normalized(edge_weight)
            return found.set_value(found.storage.value().to(dtype), layout="coo")
        if not is_list:
            return normalized(edge_weight)
        if self.add_self_loops:  # keeps the new edge_index, and so what kernels derive from it
            key = "gcn_norm", graph.num_targets, *options
            index, weight = derived_tensors(adjacency, key, lambda: normalized(None))
            weight = weight if edge_weight is None else normalized(edge_weight)[1]
        else:
            index, weight = normalized(edge_weight)
        return index, weight.to(dtype if edge_weight is None else edge_weight.dtype)

    def __repr__(self) -> str:
        heads, groups = self.multi_head.heads, self.multi_head.groups
        return f"{type(self).__name__}({self.in_channels}, heads={heads}, groups={groups})"
