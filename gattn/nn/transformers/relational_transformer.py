"""The block of the Relational Transformer, whose tokens are the cells of a database's tables.

Dimensions: S cells, n chosen cells, C channels, H heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, ModuleDict, RMSNorm

from gattn.attention import Attention
from gattn.errors import InputError, InputTypeError, check_at_least
from gattn.graphs import GraphLike, TableGraphs
from gattn.nn.shared.declared import Declared
from gattn.nn.shared.dtypes import check_dtype
from gattn.nn.shared.linear import Linear, through
from gattn.nn.transformers.all_pairs import check_heads, check_whole

__all__ = ["RelationalTransformerLayer"]


class _Attention(Declared, Attention):
    """Attention on any graph, with the parameters' names of the authors' program."""

    _shown = "channels heads="

    def __init__(self, channels: int, heads: int):
        super().__init__()
        self.channels, self.heads = channels, heads
        self.wq, self.wk, self.wv, self.wo = (Linear(channels, channels, bias=False) for _ in range(4))

    def forward(self, x: Tensor, targets: Tensor, graph: GraphLike) -> Tensor:
        rows = through(self.wq, targets), through(self.wk, x), through(self.wv, x)
        query, key, value = (torch.unflatten(part, -1, (self.heads, -1)) for part in rows)
        return through(self.wo, self.attend(query, key, value, graph).flatten(1))


class _FeedForward(Declared, Module):
    """A gated network, likewise."""

    def __init__(self, channels: int, hidden_channels: int):
        super().__init__()
        self.w1, self.w3 = (Linear(channels, hidden_channels, bias=False) for _ in range(2))
        self.w2 = Linear(hidden_channels, channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return through(self.w2, F.silu(through(self.w1, x)) * through(self.w3, x))


class RelationalTransformerLayer(Declared, Module):
    r"""Cells of tables attend by column, by row and parents, by children and to all, each followed by the next.

    The block of `Relational Transformer: Toward Zero-Shot Foundation Models for Relational Data
    <https://arxiv.org/abs/2510.06377>`_, on the four graphs of `gattn.graphs.from_tables`: for each graph :math:`g` of
    column, feature, neighbor and full, in this order, and then a network,

    .. math::
        x \leftarrow x + W_O^g\, \mathrm{attention}_g\big(W_Q^g \hat x, W_K^g \hat x, W_V^g \hat x\big), \qquad
        x' = x + W_2 \big(\mathrm{SiLU}(W_1 \hat x) \odot W_3 \hat x\big), \qquad
        \hat x = \mathrm{RMSNorm}(x)

    with a norm for each. A cell without a source, such as one whose row has no children, gets nothing. The authors'
    program makes four matrices of all pairs; here, there is none. Parameters have its names: `attns.col.wq.weight`,
    `norms.ffn.weight` and so on, with `feat`, `nbr` and `full` for the other graphs.

    Args:
        channels: The number of channels, C.
        heads: The number of heads, a divisor of C.
        hidden_channels: The number of channels inside the network. (default: `None`, 4 C, as in the paper)

    Shapes:
        - **input:** features `[S, C]` of the cells, context by context.
        - **output:** `[S, C]`, or `[n, C]` for n chosen cells.

    Raises:
        ValueError: If a number is not positive, or `channels` is not a multiple of `heads`.

    Example:
        Two customers (rows 0 and 1: a name) and an order of the second (row 2: a date and a price):

        >>> import torch, gattn
        >>> row, column = torch.tensor([0, 1, 2, 2]), torch.tensor([0, 0, 1, 2])
        >>> graphs = gattn.graphs.from_tables(row, column, links=torch.tensor([[2], [1]]))
        >>> layer, x = gattn.nn.RelationalTransformerLayer(16, heads=4), torch.randn(4, 16)
        >>> layer(x, graphs).shape
        torch.Size([4, 16])
        >>> layer(x, graphs, targets=torch.tensor([3])).shape  # in a last layer, the price alone
        torch.Size([1, 16])
    """

    _shown = "channels heads= hidden_channels="

    def __init__(self, channels: int, heads: int, hidden_channels: int | None = None):
        super().__init__()
        check_heads(channels, heads, None)
        hidden_channels = 4 * channels if hidden_channels is None else hidden_channels
        check_at_least(1, hidden_channels=hidden_channels)
        self.channels, self.heads, self.hidden_channels = channels, heads, hidden_channels
        names = "col", "feat", "nbr", "full"
        self.norms = ModuleDict({name: RMSNorm(channels) for name in (*names, "ffn")})
        self.attns = ModuleDict({name: _Attention(channels, heads) for name in names})
        self.ffn = _FeedForward(channels, hidden_channels)

    def forward(self, x: Tensor, graphs: TableGraphs, *, targets: Tensor | None = None) -> Tensor:
        """Runs the block.

        Args:
            x: The features of the cells, `[S, C]`.
            graphs: Who attends to whom, as `gattn.graphs.from_tables` returns it.
            targets: The cells whose output is wanted, `[n]`, such as those of labels in a last layer: the attention to
                all and the network are computed for them alone. In the order of their contexts.
                (default: `None`, all cells)

        Returns:
            The features, `[S, C]`, or those of the chosen cells, `[n, C]`.

        Raises:
            TypeError: If `x` is not a tensor, `graphs` is not from `from_tables`, or `targets` are no integers.
            ValueError: If shapes do not fit, a graph is sharded, or `targets` are not in the order of their contexts.
            IndexError: If there is no such target.
        """
        if not isinstance(x, Tensor):
            raise InputTypeError(f"x must be a tensor; got {type(x).__name__}.")
        if not isinstance(graphs, TableGraphs):
            raise InputTypeError(f"graphs must be those of gattn.graphs.from_tables; got {type(graphs).__name__}.")
        size = graphs.order.size(0)
        if x.dim() != 2 or x.size(1) != self.channels or x.size(0) != size:
            raise InputError(f"x must be [{size}, {self.channels}] for these graphs; got {list(x.shape)}.")
        check_dtype(self, x=x)
        for graph in graphs[1:]:
            check_whole(self, graph)
        ordered = self.norms["col"](x).index_select(0, graphs.order)
        attended = self.attns["col"](ordered, ordered, graphs.column)
        x = x.index_add(0, graphs.order, attended.to(x.dtype))
        for name, edges in (("feat", graphs.feature), ("nbr", graphs.neighbor)):
            hidden = self.norms[name](x)
            x = x + self.attns[name](hidden, hidden, edges)
        hidden = rows = self.norms["full"](x)
        full: GraphLike = graphs.full
        if targets is not None:
            full = graphs.full.for_targets(targets)
            x, rows = x.index_select(0, targets), hidden.index_select(0, targets)
        x = x + self.attns["full"](hidden, rows, full)
        out: Tensor = x + self.ffn(self.norms["ffn"](x))
        return out
