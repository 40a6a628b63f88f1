"""DGL's graph attention with dot products."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gattn.graphs import GraphLike
from gattn.nn.graph.dgl_conv import DGLConv
from gattn.scores import DotScore

__all__ = ["DotGatConv"]


class DotGatConv(DGLConv):
    r"""Graph attention by scaled dot products of projected features, which are also the values.

    The attention of `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_ along edges, with one projection
    for queries, keys and values:

    .. math::
        x'_i = \sum_{j \in \mathcal{N}(i)} \alpha_{ij} W x_j, \qquad
        \alpha_{i\cdot} = \mathrm{softmax}_j \frac{(W x_i)^\top W x_j}{\sqrt C}

    for each head. The parameters have the names and shapes of those of `dgl.nn.DotGatConv`, so checkpoints load, and
    the results are the same. Differences: nodes without neighbours get zeros instead of an error, and features may have
    batch dimensions.

    Args:
        in_channels: The number of channels of the features, or a pair for sources and targets, which then have
            projections of their own.
        out_channels: The number of channels of each head, C.
        heads: The number of heads, H.
        **kwargs: Arguments of `torch_geometric.nn.conv.MessagePassing`, such as `flow`.

    Shapes:
        - **input:** features `[N, F]` or `([M, F], [N, F])`, edge indices `[2, E]`.
        - **output:** `[N, H, C]`.

    Raises:
        ValueError: If a number is not positive, or (in `forward`) features and graph do not fit.

    Example:
        >>> import torch, gattn
        >>> conv = gattn.nn.DotGatConv(16, 8, heads=2)
        >>> conv(torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]])).shape
        torch.Size([3, 2, 8])
    """

    _shown = "in_channels out_channels heads="

    def forward(
        self, x: Tensor | tuple[Tensor, Tensor], edge_index: GraphLike, get_attention: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attends over each node's neighbours.

        Args:
            x: Features `[..., N, F]`, or a pair (sources, targets).
            edge_index: The graph, in any form that `gattn.attend` takes.
            get_attention: Whether to return the attention weights as well. (default: `False`)

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
        key, query = self._projected(sources, targets)
        result: Any = self.attend(query, key, key, graph, score=DotScore(), return_weights=get_attention)
        return (result[0], result[1].unsqueeze(-1)) if get_attention else result
