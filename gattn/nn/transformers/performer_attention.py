"""Performer's linear attention among all nodes of a graph.

Dimensions: B graphs, N nodes, F channels, H heads, C channels per head, R random features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn.attention
from torch import Tensor
from torch.nn import Linear
from torch_geometric.nn.attention import performer

from gattn.attention import attend
from gattn.distributions import Identity
from gattn.errors import InputError, check_at_least
from gattn.features import Favor
from gattn.graphs import CompleteGraph
from gattn.nn.shared.dropout import Dropout
from gattn.nn.shared.linear import through
from gattn.nn.transformers.all_pairs import check_heads, on_graph, without_padding
from gattn.ops.dropout import check_probability
from gattn.scores import DotScore
from gattn.tracing import Leaf

__all__ = ["PerformerAttention", "PerformerProjection"]


class PerformerProjection(Leaf, performer.PerformerProjection):
    r"""Linear attention with random features of queries and keys.

    The generalised attention of `Rethinking Attention with Performers <https://arxiv.org/abs/2009.14794>`_, with a
    projection :math:`P` whose rows are orthogonal in blocks:

    .. math::
        \mathrm{out}_i = \frac{\sum_j \big(\phi(q_i)^\top \phi(k_j)\big)\, v_j}{\sum_j \phi(q_i)^\top \phi(k_j)},
        \qquad \phi(x) = \mathrm{kernel}(P x) + 0.001

    It has the parameters of `torch_geometric.nn.attention.performer.PerformerProjection` and gives the numbers that it
    gives on one graph.

    Args:
        num_cols: The number of channels, C. There are :math:`R = \lfloor C \ln C \rfloor` features.
        kernel: The function of the projections. (default: a ReLU)

    Shapes:
        - **input:** queries, keys and values `[..., H, N, C]`, as in PyG.
        - **output:** `[..., H, N, C]`.

    Raises:
        ValueError: If `num_cols` is less than two, which leaves no features.

    Example:
        >>> import torch, gattn
        >>> x = torch.randn(2, 4, 10, 8)  # 2 graphs, 4 heads, 10 nodes, 8 channels
        >>> gattn.nn.PerformerProjection(8)(x, x, x).shape
        torch.Size([2, 4, 10, 8])
    """

    def __init__(self, num_cols: int, kernel: Callable[[Tensor], Tensor] | None = None):
        check_at_least(2, num_cols=num_cols)
        with torch.device("cpu"):  # where PyG factorises what it draws, and leaves it
            super().__init__(num_cols, torch.nn.ReLU() if kernel is None else kernel)
        self.register_buffer("projection_matrix", self.get_buffer("projection_matrix").to(torch.get_default_device()))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, graph: CompleteGraph | None = None
    ) -> Tensor:
        """Attends among all nodes.

        Args:
            q: The queries, `[..., H, N, C]`.
            k: The keys, `[..., H, N, C]`.
            v: The values, `[..., H, N, C]`.
            mask: Which nodes of a padded batch exist, `[B, N]`. (default: `None`, all)
            graph: The complete graph, such as a packed one. (default: `None`, that of all nodes)

        Returns:
            The output, `[..., H, N, C]`.

        Raises:
            ValueError: If shapes do not fit each other.
        """
        query, key, value = (x.transpose(-3, -2) for x in (q, k, v))
        query, key = (self.kernel(x @ self.projection_matrix.t()) + 0.001 for x in (query, key))
        key, value = without_padding(key, mask), without_padding(value, mask)
        graph = CompleteGraph(query.size(-3), key.size(-3)) if graph is None else graph
        return _linear(query, key, value, graph)


class FavorProjection(Favor):
    """The attention of `PerformerProjection`, with positive features that approximate a softmax."""

    def forward(  # type: ignore[override]
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, graph: CompleteGraph | None = None
    ) -> Tensor:
        """Attends among all nodes, with arguments and output as there."""
        query, key, value = (x.transpose(-3, -2) for x in (q, k, v))
        graph = CompleteGraph(query.size(-3), key.size(-3)) if graph is None else graph
        query, key = super().forward(query, key, graph, mask)
        return _linear(query, key, without_padding(value, mask), graph)


def _linear(query: Tensor, key: Tensor, value: Tensor, graph: CompleteGraph) -> Tensor:
    out = attend(query, key, value, graph, score=DotScore(1.0), distribution=Identity(normalize=True))
    return out.transpose(-3, -2)


class PerformerAttention(Leaf, torch_geometric.nn.attention.PerformerAttention):
    r"""Multi-head linear attention among all nodes of a graph, with random features.

    The layer of `Rethinking Attention with Performers <https://arxiv.org/abs/2009.14794>`_:

    .. math::
        \mathrm{out} = W_o\, \big\Vert_h\, \mathrm{attention}(W_q^h x, W_k^h x, W_v^h x) + b

    with the attention of `PerformerProjection`, in time proportional to the number of nodes. This is a drop-in
    replacement for `torch_geometric.nn.attention.PerformerAttention`: arguments, parameter names and, on one graph,
    results are the same. In a padded batch, PyG's layer also sums the features of padded nodes in its denominator;
    here, a graph's output does not depend on the padding.

    PyG's attention is the paper's *generalised* one, of a ReLU, and no approximation of a softmax. The one that is,
    FAVOR+, is `gattn.features.Favor`: `kernel="favor"` takes it with 1e-4 added to each exponential, and so computes
    what `SelfAttention` of performer-pytorch does, which GraphGPS calls Performer.

    Args:
        channels: The number of channels of the features, F.
        heads: The number of heads, H.
        head_channels: The number of channels of each head, C; `None` for F / H. (default: `64`)
        kernel: The function of the projections, or `"favor"`. (default: a ReLU)
        qkv_bias: Whether queries, keys and values have a bias. (default: `False`)
        attn_out_bias: Whether the output has a bias. (default: `True`)
        dropout: The probability of dropping a channel of the output during training. (default: `0.0`)

    Shapes:
        - **input:** features `[B, N, F]`, or those of one graph or a packed one, `[N, F]`.
        - **output:** like the input.

    Raises:
        ValueError: If an option is out of range, or `channels` is not a multiple of `heads`.

    Example:
        >>> import torch, gattn
        >>> layer = gattn.nn.PerformerAttention(16, heads=4)
        >>> mask = torch.arange(10) < torch.tensor([[10], [7]])  # two graphs, of 10 and 7 nodes
        >>> layer(torch.randn(2, 10, 16), mask).shape
        torch.Size([2, 10, 16])
        >>> layer(torch.randn(17, 16), graph=gattn.CompleteGraph.packed([10, 7])).shape
        torch.Size([17, 16])
    """

    def __init__(
        self,
        channels: int,
        heads: int,
        head_channels: int | None = 64,
        kernel: Callable[[Tensor], Tensor] | str | None = None,
        qkv_bias: bool = False,
        attn_out_bias: bool = True,
        dropout: float = 0.0,
    ):
        torch.nn.Module.__init__(self)  # PyG's would draw another projection
        head_channels = check_heads(channels, heads, head_channels)
        check_probability("dropout", dropout)
        self.heads, self.head_channels = heads, head_channels
        if isinstance(kernel, str):
            if kernel != "favor":
                raise InputError(f"kernel must be a function or 'favor'; got {kernel!r}.")
            check_at_least(2, head_channels=head_channels)
            self.fast_attn: Any = FavorProjection(head_channels, eps=1e-4)
            self.kernel = kernel
        else:
            self.fast_attn = PerformerProjection(head_channels, kernel)
            self.kernel = self.fast_attn.kernel
        inner_channels = head_channels * heads
        self.q, self.k, self.v = (Linear(channels, inner_channels, bias=qkv_bias) for _ in range(3))
        self.attn_out = Linear(inner_channels, channels, bias=attn_out_bias)
        self.dropout = Dropout(dropout)

    def reset_parameters(self) -> None:
        """Resets all parameters, and draws another projection."""
        self._reset_parameters()

    @torch.no_grad()
    def redraw_projection_matrix(self) -> None:
        """Draws another projection, which the paper recommends to do regularly during training."""
        if self.kernel == "favor":
            self.fast_attn.redraw()
        else:
            super().redraw_projection_matrix()

    def forward(self, x: Tensor, mask: Tensor | None = None, *, graph: CompleteGraph | None = None) -> Tensor:
        """Attends among all nodes.

        Args:
            x: The features, `[B, N, F]` or `[N, F]`.
            mask: Which nodes of a padded batch exist, `[B, N]`. (default: `None`, all)
            graph: The complete graph, such as a packed one. (default: `None`, that of all nodes)

        Returns:
            The output, like `x`. For nodes that do not exist, it means nothing.

        Raises:
            TypeError: If `mask` is not of booleans, or `graph` is not a `CompleteGraph`.
            ValueError: If shapes do not fit each other, or both `mask` and `graph` are given.
        """
        x, graph = on_graph(x, mask, graph)
        given: Any = (
            torch.unflatten(through(lin, x), -1, (self.heads, self.head_channels)) for lin in (self.q, self.k, self.v)
        )
        out: Tensor = self.fast_attn(*(rows.transpose(-3, -2) for rows in given), mask, graph)
        return self.dropout(through(self.attn_out, out.transpose(-3, -2).flatten(-2)))  # type: ignore[no-any-return]
