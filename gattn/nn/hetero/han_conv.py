"""The layer of Heterogeneous graph Attention Networks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import ModuleDict, Parameter, ParameterDict
from torch_geometric.nn.inits import glorot, reset

from gattn.errors import InputError
from gattn.graphs import GraphLike
from gattn.nn.hetero.hetero_conv import EdgeType, HeteroBaseConv, Metadata
from gattn.nn.shared.linear import Linear
from gattn.ops.dropout import check_probability
from gattn.scores import GATScore

__all__ = ["HANConv"]


class HANConv(HeteroBaseConv):
    r"""The layer of `Heterogeneous Graph Attention Network <https://arxiv.org/abs/1903.07293>`_.

    Nodes attend to their neighbours separately for each edge type :math:`e`, which stands for a metapath. The results
    are then combined with weights that all nodes of a type share:

    .. math::
        z^e_i = \mathrm{ReLU}\Big(\sum_{j \in \mathcal{N}_e(i)} \alpha^e_{ij} h_j\Big), \qquad
        \alpha^e_{i\cdot} = \mathrm{softmax}_j \, \mathrm{LeakyReLU}
        (\langle a^e_{dst}, h_i \rangle + \langle a^e_{src}, h_j \rangle), \qquad h_i = W_{type(i)} x_i + b_{type(i)}

        x'_i = \sum_e \beta_e z^e_i, \qquad
        \beta = \mathrm{softmax}_e \, q^{\top} \frac{1}{N} \sum_i \tanh(W_k z^e_i + b_k)

    `gattn.record_attention` makes one record per edge type. (The Hierarchical Attention Network for documents is
    `gattn.models.HAN`.)

    A drop-in replacement for `torch_geometric.nn.HANConv`, with the same arguments, parameter names and results. It
    also supports features `[B, N, F]` over one graph, sparse features, `SparseGraph` and `CompleteGraph`, and float32
    accumulation in half precision. Differences: with `flow="target_to_source"`, edges between two types of nodes give
    as many rows as there are targets (an edge type still begins with the type of its sources).

    Args:
        in_channels: Channels of each node type's features, or one number for all types; `-1` infers them from the first
            call.
        out_channels: Channels of the output.
        metadata: The node types and the edge types, as returned by `HeteroData.metadata()`.
        heads: Number of heads, a divisor of `out_channels`. (default: `1`)
        negative_slope: Slope of the LeakyReLU. (default: `0.2`)
        dropout: Probability that the weight of a neighbour is dropped, in training. (default: `0.0`)
        **kwargs: Arguments of `torch_geometric.nn.conv.MessagePassing`, such as `flow`.

    Shapes:
        - **input:** features `[N, F_in]` of each node type, edge indices `[2, E]` of each edge type.
        - **output:** `[N, F_out]` for each node type; `None` for those that are not the target of any given edge type.

    Raises:
        TypeError: If `metadata` is not a pair.
        ValueError: If an option is out of range.

    Example:
        >>> import torch, gattn
        >>> same_author, same_topic = ("paper", "same author", "paper"), ("paper", "same topic", "paper")
        >>> conv = gattn.nn.HANConv(16, 8, metadata=(["paper"], [same_author, same_topic]), heads=2)
        >>> edges = {same_author: torch.tensor([[0, 1], [1, 0]]), same_topic: torch.tensor([[0, 2], [2, 0]])}
        >>> out, weights = conv({"paper": torch.randn(3, 16)}, edges, return_semantic_attention_weights=True)
        >>> out["paper"].shape, weights["paper"].shape
        (torch.Size([3, 8]), torch.Size([2]))
    """

    _starts = (("lin_src", glorot), ("lin_dst", glorot), ("k_lin", reset), ("q", glorot))
    _shown = "out_channels heads="

    def __init__(
        self,
        in_channels: int | dict[str, int],
        out_channels: int,
        metadata: Metadata,
        heads: int = 1,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        **kwargs: Any,
    ):
        super().__init__(in_channels, out_channels, metadata, heads, **kwargs)
        check_probability("dropout", dropout)
        self.negative_slope = negative_slope
        self.metadata = metadata
        self.dropout = dropout
        self.k_lin = torch.nn.Linear(out_channels, out_channels)
        self.q = Parameter(torch.empty(1, out_channels))
        self.proj = ModuleDict({name: Linear(channels, out_channels) for name, channels in self.in_channels.items()})
        self.lin_src, self.lin_dst = ParameterDict(), ParameterDict()
        for edge_type in metadata[1]:
            for vectors in (self.lin_src, self.lin_dst):
                vectors["__".join(edge_type)] = Parameter(torch.empty(1, heads, out_channels // heads))
        self.reset_parameters()

    def forward(
        self,
        x_dict: Mapping[str, Tensor],
        edge_index_dict: Mapping[EdgeType, GraphLike],
        return_semantic_attention_weights: bool = False,
    ) -> dict[str, Tensor | None] | tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
        r"""Attends over each node's neighbours of each edge type, then over the edge types.

        Args:
            x_dict: Features `[..., N, F]` of each node type (dense, or `[N, F]` sparse). Types may be missing.
            edge_index_dict: The graph of each edge type, in any form that `gattn.attend` takes. Types may be missing.
            return_semantic_attention_weights: Whether to return the weights of the edge types as well.
                (default: `False`)

        Returns:
            `[..., N, F_out]` for each node type in `x_dict`, `None` for those without edge types; with
            `return_semantic_attention_weights`, a pair of that and the weights :math:`\beta` for each node type, in the
            order of `edge_index_dict`, `None` for those without edge types or without nodes.

        Raises:
            TypeError: If the arguments are not dictionaries of tensors and graphs.
            ValueError: If features, graphs and metadata do not fit; the message says which.
            IndexError: If an index of a graph is out of range (in compiled code, when the kernels run).
        """
        x = self._features(x_dict, self.proj)
        if len(x) < len(x_dict):
            raise InputError(f"this layer was made for nodes of the types {list(self.proj)}; got {list(x_dict)}.")
        relations = self._relations(x, edge_index_dict, self.metadata[1])
        hidden = {name: torch.unflatten(self.proj[name](x[name]), -1, (self.heads, -1)) for name in x_dict}
        found: dict[str, list[Tensor]] = {name: [] for name in x_dict}
        for edge_type, (source, target, graph) in relations.items():
            name = "__".join(edge_type)
            out = self.attend(
                (hidden[target] * self.lin_dst[name]).sum(-1),
                (hidden[source] * self.lin_src[name]).sum(-1),
                hidden[source],
                graph,
                score=GATScore(self.negative_slope),
                dropout=self.dropout,
            )
            assert isinstance(out, Tensor)
            found[target].append(out.flatten(-2).relu())
        results = {name: self._semantic_attention(outs) for name, outs in found.items()}
        out_dict = {name: out for name, (out, _) in results.items()}
        if not return_semantic_attention_weights:
            return out_dict
        return out_dict, {name: weights for name, (_, weights) in results.items()}

    def _semantic_attention(self, outs: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """The weighted sum of the edge types' results `[..., N, F]`, and the weights `[P, ...]` of P types."""
        if not outs:
            return None, None
        if outs[0].size(-2) == 0:
            return outs[0], None
        scores = [(self.q * self.k_lin(out).tanh().mean(-2, keepdim=True)).sum(-1) for out in outs]
        weights = torch.stack(scores).softmax(0)  # [P, ..., 1]
        total = sum(weight.unsqueeze(-1) * out for weight, out in zip(weights, outs, strict=True))
        assert isinstance(total, Tensor)
        return total, weights.squeeze(-1)
