"""Graphormer: a Transformer whose attention knows distances, edges along paths, and degrees."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Embedding, LayerNorm, Linear, Module, ModuleList
from torch_geometric.data import Data

from gattn.bias import BucketBias
from gattn.errors import InputError, check_at_least, check_flag
from gattn.graphs import CompleteGraph
from gattn.nn.shared.dropout import dropout
from gattn.nn.shared.linear import through
from gattn.nn.transformers.graph_encoders import DegreeEncoder, PathEncoder
from gattn.nn.transformers.graphormer_layer import GraphormerLayer
from gattn.ops.dropout import check_probability
from gattn.transforms import ShortestPathBuckets

__all__ = ["Graphormer"]


class Graphormer(Module):
    r"""A graph Transformer that attends to all nodes of a graph, with biases by distance and by the edges between them.

    The network of `Do Transformers Really Perform Bad for Graph Representation? <https://arxiv.org/abs/2106.05234>`_,
    by the paper's equations. The logits of its attention have two biases, and nodes have vectors for their degrees:

    .. math::
        s_{ij} = \frac{q_i^\top k_j}{\sqrt C} + b_{d(i, j)} + \frac{1}{n} \sum_{m=1}^n w_m^\top e_m, \qquad
        h^{(0)}_i = W x_i + z^-_{\deg^-(i)} + z^+_{\deg^+(i)}

    where :math:`e_1, \dots, e_n` are the first edges on a shortest path, from the target i on. A virtual token is
    joined to all nodes, with a bias of its own, and its last state is the state of the graph. Each layer normalises
    before its attention and before its feed-forward network, and a last norm follows; or (`norm_first=False`) after
    both, as the published models for PCQM4M do, together with `embedding_norm=True` and `head="gelu"`.

    The graphs of a batch are laid end to end, so nothing is padded, and a graph's output does not depend on the others.

    *Differences from the authors' program.* It takes real-valued features instead of categories, it biases the target's
    logits by paths *to* the target (theirs, which has only undirected graphs, by those from it), and it leaves no graph
    out (theirs silently drops graphs of more than 128 nodes).

    Args:
        in_channels: The number of channels of the nodes.
        hidden_channels: The number of channels inside.
        out_channels: The number of channels of the output.
        num_layers: The number of layers.
        heads: The number of heads, a divisor of `hidden_channels`.
        cutoff: The largest distance with a bias of its own: that of `gattn.transforms.ShortestPathBuckets`.
            (default: `5`)
        max_degree: The largest degree with vectors of its own. (default: `64`)
        edge_dim: The number of features of an edge. (default: `None`, edges have none, and paths are not needed)
        dropout: The probability of dropping a feature during training. (default: `0.1`)
        attn_dropout: The probability of dropping an attention weight during training. (default: `0.1`)
        virtual_node: Whether there is a virtual token. Without, the output is that of each node. (default: `True`)
        norm_first: Whether layers normalise before their parts, or after them. (default: `True`)
        embedding_norm: Whether the first layer's input is normalised. (default: `False`)
        path_cutoff: The number of edges of a path that count, at most `cutoff`. (default: `None`, `cutoff`)
        head: What makes the output of a state: `"linear"`, or `"gelu"`, a linear layer, a GELU and a norm before it.
            (default: `"linear"`)

    Shapes:
        - **input:** a `Data` or a batch of them.
        - **output:** one row for each graph, `[B, out_channels]`, or for each node, `[N, out_channels]`.

    Raises:
        TypeError: If `virtual_node`, `norm_first` or `embedding_norm` is neither true nor false.
        ValueError: If an option is out of range.

    Example:
        >>> import torch, gattn
        >>> from torch_geometric.data import Batch, Data
        >>> transform = gattn.transforms.ShortestPathBuckets(cutoff=5, paths=True)
        >>> edges = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
        >>> path = transform(Data(torch.randn(3, 16), edges, torch.randn(4, 8)))
        >>> model = gattn.models.Graphormer(16, 32, 2, num_layers=2, heads=4, edge_dim=8)
        >>> model(Batch.from_data_list([path, path])).shape
        torch.Size([2, 2])
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int,
        heads: int,
        cutoff: int = 5,
        max_degree: int = 64,
        edge_dim: int | None = None,
        dropout: float = 0.1,
        attn_dropout: float = 0.1,
        virtual_node: bool = True,
        norm_first: bool = True,
        embedding_norm: bool = False,
        path_cutoff: int | None = None,
        head: str = "linear",
    ):
        super().__init__()
        check_at_least(1, in_channels=in_channels, out_channels=out_channels, num_layers=num_layers, cutoff=cutoff)
        check_probability("dropout", dropout)
        check_flag("virtual_node", virtual_node)
        check_flag("embedding_norm", embedding_norm)
        path_cutoff = cutoff if path_cutoff is None else path_cutoff
        check_at_least(1, path_cutoff=path_cutoff)
        if path_cutoff > cutoff:
            raise InputError(f"path_cutoff must be at most cutoff, {cutoff}; got {path_cutoff}.")
        if head not in ("linear", "gelu"):
            raise InputError(f"head must be 'linear' or 'gelu'; got {head!r}.")
        self.num_buckets = ShortestPathBuckets(cutoff).num_buckets
        self.dropout = dropout
        self.lin_in = Linear(in_channels, hidden_channels)
        self.degrees = DegreeEncoder(max_degree, hidden_channels)
        self.distances = Embedding(self.num_buckets, heads)
        self.paths = None if edge_dim is None else PathEncoder(path_cutoff, edge_dim, heads)
        self.token = Embedding(1, hidden_channels) if virtual_node else None
        self.token_bias = Embedding(1, heads) if virtual_node else None
        options: dict[str, Any] = {"norm_first": norm_first, "dropout": dropout, "attn_drop": attn_dropout}
        self.layers = ModuleList(
            GraphormerLayer(hidden_channels, hidden_channels, heads, activation=torch.nn.GELU(), **options)
            for _ in range(num_layers)
        )
        self.embedding_norm = LayerNorm(hidden_channels) if embedding_norm else None
        self.norm = LayerNorm(hidden_channels) if norm_first else None
        self.lin_head = Linear(hidden_channels, hidden_channels) if head == "gelu" else None
        self.head_norm = LayerNorm(hidden_channels) if head == "gelu" else None
        self.lin_out = Linear(hidden_channels, out_channels)

    def reset_parameters(self) -> None:
        """Resets all parameters."""
        for module in (*self.children(), *self.layers):
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def forward(self, data: Data) -> Tensor:
        """Runs the network.

        Args:
            data: Graphs with `x`, `edge_index`, the `pair_buckets` of `gattn.transforms.ShortestPathBuckets`, and with
                `edge_dim` its `pair_paths` and `edge_attr`.

        Returns:
            `[B, out_channels]`, or `[N, out_channels]` without a virtual token.

        Raises:
            TypeError: If `data` is not a `Data`.
            ValueError: If it lacks something, its buckets or paths are those of another cut-off, as far as they tell,
                or edges have been removed since.
        """
        matrices = ShortestPathBuckets.matrices(data)
        sizes = [len(matrix) for matrix in matrices]
        h = self._with_degrees(data)
        bias = self._bias(data, matrices)
        tokens = None  # the row of each graph's virtual token, which is its first
        if self.token is not None:
            counts = torch.tensor(sizes, dtype=torch.int64, device=h.device)
            tokens = (counts + 1).cumsum(0) - counts - 1
            nodes = torch.arange(len(h), device=h.device)
            nodes = nodes + 1 + torch.arange(len(sizes), device=h.device).repeat_interleave(counts)
            token = self.token.weight.to(h.dtype).expand(len(sizes), -1)
            h = torch.cat([token, h]).index_select(0, torch.cat([tokens, nodes]).argsort())
            sizes = [size + 1 for size in sizes]
        graph = CompleteGraph.packed(sizes)
        if self.embedding_norm is not None:
            h = self.embedding_norm(h)
        h = dropout(h, self.dropout, self.training)
        for layer in self.layers:
            h = layer(h, bias, graph=graph)
        if tokens is not None:
            h = h.index_select(0, tokens)
        if self.norm is not None:
            h = self.norm(h)
        if self.lin_head is not None and self.head_norm is not None:
            h = self.head_norm(F.gelu(through(self.lin_head, h)))
        return self.lin_out(h)  # type: ignore[no-any-return]

    def _with_degrees(self, data: Data) -> Tensor:
        if data.x is None or data.edge_index is None:
            raise InputError("Graphormer needs x and edge_index.")
        ends = (data.edge_index[1], data.edge_index[0])
        degrees = torch.stack([end.bincount(minlength=len(data.x)) for end in ends])
        return self.lin_in(data.x) + self.degrees(degrees)  # type: ignore[no-any-return]

    def _bias(self, data: Data, matrices: list[Tensor]) -> BucketBias:
        """The bias of each pair: a row of a table for each distance, or with paths for each pair."""
        table = self.distances.weight
        buckets = torch.cat([matrix.flatten() for matrix in matrices]).int()
        if buckets.numel() and int(buckets.max()) >= self.num_buckets:
            raise InputError(
                f"pair_buckets hold {int(buckets.max())}, but this network has {self.num_buckets} buckets: apply "
                f"ShortestPathBuckets({self.num_buckets - 3})."
            )
        if self.paths is not None:
            paths, edge_attr = data.get("pair_paths"), data.edge_attr
            if paths is None or edge_attr is None:
                raise InputError("Graphormer with edge_dim needs edge_attr and ShortestPathBuckets(..., paths=True).")
            cutoff = self.num_buckets - 3
            if paths.size(1) != cutoff or len(edge_attr) != data.num_edges:
                raise InputError(
                    f"this network was made for paths of {cutoff} edges, the cut-off of the transform, and "
                    f"one row of edge_attr per edge; got {paths.size(1)}, and {len(edge_attr)} rows for "
                    f"{data.num_edges} edges."
                )
            table = table[buckets.long()] + self.paths(
                _of_batch(data, paths[:, : self.paths.max_len], matrices), edge_attr
            )
            buckets = torch.arange(len(buckets), dtype=torch.int32, device=buckets.device)
        parts = torch.split(buckets, [matrix.numel() for matrix in matrices])
        squares = [part.view_as(matrix) for part, matrix in zip(parts, matrices, strict=True)]
        if self.token_bias is not None:
            squares = [F.pad(square, (1, 0, 1, 0), value=len(table)) for square in squares]
            table = torch.cat([table, self.token_bias.weight])
        return BucketBias(squares, table)


def _of_batch(data: Data, paths: Tensor, matrices: list[Tensor]) -> Tensor:
    """Paths by the numbers of edges in the batch instead of those in each graph."""
    assert data.edge_index is not None
    sizes = torch.tensor([len(matrix) for matrix in matrices], device=paths.device)
    graph_of_node = torch.arange(len(sizes), device=paths.device).repeat_interleave(sizes)
    graph = graph_of_node[data.edge_index[0]]
    order, counts = graph.argsort(stable=True), graph.bincount(minlength=len(sizes))
    first, limit = (
        of_graph.repeat_interleave(sizes**2).unsqueeze(1) for of_graph in (counts.cumsum(0) - counts, counts)
    )
    if bool((paths >= limit).any()):
        raise InputError("pair_paths name edges that are not there: apply ShortestPathBuckets after removing edges.")
    if order.numel() == 0:
        return paths.long()
    return torch.where(paths >= 0, order[(paths + first).clamp(min=0)], -1)
