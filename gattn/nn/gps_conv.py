"""Local message passing beside global attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor
from torch_geometric.nn.conv import MessagePassing

from gattn.graphs import CompleteGraph
from gattn.nn.multihead_attention import MultiheadAttention


class GPSConv(torch_geometric.nn.GPSConv):
    r"""A graph layer over the edges and attention over all nodes of the same graph, side by side.

    The block of `Recipe for a General, Powerful, Scalable Graph Transformer <https://arxiv.org/abs/2205.12454>`_:

    .. math::
        h = \mathrm{norm}(x + \mathrm{conv}(x, E)) + \mathrm{norm}(x + \mathrm{attention}(x)), \qquad
        x' = \mathrm{norm}(h + \mathrm{MLP}(h))

    A drop-in for `torch_geometric.nn.GPSConv` with its default `attn_type="multihead"`: the same arguments, parameter
    names and numbers. PyG's other kind, `attn_type="performer"`, is not available yet, and is refused. The graphs of a
    batch are attended to as a packed `CompleteGraph`: nothing is padded.

    Args:
        channels: Channels of the features, F.
        conv: The layer over the edges, gattn's or PyG's; `None` for attention alone.
        heads: Heads of the attention. (default: `1`)
        dropout: Probability that a feature is dropped, in training. (default: `0.0`)
        act: Activation of the MLP. (default: `"relu"`)
        act_kwargs: Its arguments. (default: `None`)
        norm: Normalisation, by name. (default: `"batch_norm"`)
        norm_kwargs: Its arguments. (default: `None`)
        attn_type: `"multihead"`, the only kind so far. (default: `"multihead"`)
        attn_kwargs: Further arguments of `MultiheadAttention`. (default: `None`)

    Shapes:
        - **input:** features `[N, F]`, edge indices `[2, E]`, the graph of each node `[N]`, ascending.
        - **output:** `[N, F]`.

    Raises:
        ValueError: If the attention is of another kind, or `channels` is not a multiple of `heads`.

    Example:
        >>> import torch, gattn
        >>> block = gattn.nn.GPSConv(16, gattn.nn.GATConv(16, 4, heads=4), heads=4)
        >>> batch = torch.tensor([0, 0, 0, 1, 1])  # two graphs, of 3 and 2 nodes
        >>> block(torch.randn(5, 16), torch.tensor([[0, 1, 3], [1, 2, 4]]), batch).shape
        torch.Size([5, 16])
    """

    def __init__(
        self,
        channels: int,
        conv: MessagePassing | None,
        heads: int = 1,
        dropout: float = 0.0,
        act: str = "relu",
        act_kwargs: dict[str, Any] | None = None,
        norm: str | None = "batch_norm",
        norm_kwargs: dict[str, Any] | None = None,
        attn_type: str = "multihead",
        attn_kwargs: dict[str, Any] | None = None,
    ):
        if attn_type != "multihead":
            raise ValueError(f"attn_type is 'multihead', not {attn_type!r}.")
        with torch.random.fork_rng(devices=[]):  # PyG's block draws the same numbers for its own
            attn = MultiheadAttention(channels, heads, batch_first=True, **(attn_kwargs or {}))
        super().__init__(channels, conv, heads, dropout, act, act_kwargs, norm, norm_kwargs)
        self.attn = attn

    def reset_parameters(self) -> None:
        """Draws all parameters anew."""
        super().reset_parameters()
        self.attn.reset_parameters()

    def forward(self, x: Tensor, edge_index: Any, batch: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Runs the block.

        Args:
            x: Features `[N, F]`.
            edge_index: The graph, in any form that the layer over the edges takes.
            batch: The graph of each node, ascending. (default: `None`, all in one)
            **kwargs: Further arguments of the layer over the edges, such as `edge_attr`.

        Raises:
            ValueError: If `batch` is not ascending.
        """
        if batch is not None and bool((batch.diff() < 0).any()):
            raise ValueError("batch gives the graph of each node in ascending order, as PyG's batches do.")
        graph = CompleteGraph(x.size(0)) if batch is None else CompleteGraph.packed(batch.bincount())
        attended, _ = self.attn(x, x, x, need_weights=False, graph=graph)
        out = self._add_and_norm(attended, x, self.norm2, batch)
        if self.conv is not None:
            out = out + self._add_and_norm(self.conv(x, edge_index, **kwargs), x, self.norm1, batch)
        out = out + self.mlp(out)
        return self._norm(out, self.norm3, batch)

    def _add_and_norm(self, h: Tensor, x: Tensor, norm: Any, batch: Tensor | None) -> Tensor:
        h = F.dropout(h, p=self.dropout, training=self.training)
        return self._norm(h + x, norm, batch)

    def _norm(self, h: Tensor, norm: Any, batch: Tensor | None) -> Tensor:
        if norm is None:
            return h
        return norm(h, batch=batch) if self.norm_with_batch else norm(h)
