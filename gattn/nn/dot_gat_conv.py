"""DGL's graph attention with dot products."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gattn.errors import InputError, check_at_least
from gattn.graphs import GraphLike
from gattn.nn.attention_conv import BaseConv
from gattn.nn.linear import Linear
from gattn.scores import DotScore

__all__ = ["DotGatConv"]


class DotGatConv(BaseConv):
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

    takes_shards = True

    def __init__(self, in_channels: int | tuple[int, int], out_channels: int, heads: int, **kwargs: Any):
        super().__init__(**kwargs)
        is_pair = isinstance(in_channels, (tuple, list))
        if isinstance(in_channels, (tuple, list)) and len(in_channels) != 2:
            raise InputError(f"in_channels must be a number, or a pair for sources and targets; got {in_channels}.")
        sources, targets = in_channels if isinstance(in_channels, (tuple, list)) else (in_channels,) * 2
        check_at_least(1, in_channels=min(sources, targets), out_channels=out_channels, heads=heads)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.heads = heads
        width = heads * out_channels
        if is_pair:
            self.fc_src, self.fc_dst = Linear(sources, width, bias=False), Linear(targets, width, bias=False)
        else:
            self.fc = Linear(sources, width, bias=False)

    def reset_parameters(self) -> None:
        """Resets all parameters."""
        super().reset_parameters()
        for module in self.children():
            if isinstance(module, Linear):
                module.reset_parameters()

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
        sources, targets = self._inputs(x)
        if targets is None:
            raise InputError("DotGatConv compares sources with targets: x[1] may not be None.")
        graph = self._graph(edge_index, sources, targets, self_loops=False)
        graph = graph.listed(sources.device) if get_attention else graph
        lin_src, lin_dst = (self.fc_src, self.fc_dst) if hasattr(self, "fc_src") else (self.fc, self.fc)
        key = self._heads(lin_src(sources))
        query = key if targets is sources and lin_dst is lin_src else self._heads(lin_dst(targets))
        result: Any = self.attend(query, key, key, graph, score=DotScore(), return_weights=get_attention)
        return (result[0], result[1].unsqueeze(-1)) if get_attention else result

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels}, {self.out_channels}, heads={self.heads})"
