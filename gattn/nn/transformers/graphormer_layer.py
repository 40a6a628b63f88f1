"""DGL's layers of Graphormer: attention with a bias for each pair, and the block around it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from gattn.attention import Attention
from gattn.bias import Bias
from gattn.errors import InputError, InputTypeError, check_at_least, check_flag
from gattn.graphs import CompleteGraph
from gattn.nn.shared.declared import Declared
from gattn.nn.shared.dropout import Dropout
from gattn.nn.shared.dtypes import check_dtype
from gattn.nn.shared.linear import Linear, through
from gattn.nn.transformers.all_pairs import check_heads, on_graph
from gattn.ops.dropout import check_probability

__all__ = ["BiasedMHA", "GraphormerLayer"]


class BiasedMHA(Declared, Attention):
    r"""Multi-head attention among all nodes with a bias for each pair.

    The attention of `Do Transformers Really Perform Bad for Graph Representation?
    <https://arxiv.org/abs/2106.05234>`_:

    .. math::
        \mathrm{head}_h = \mathrm{softmax}\Big(\frac{Q_h K_h^\top}{\sqrt C} + B_h\Big) V_h, \qquad
        \mathrm{out} = [\mathrm{head}_1, \dots, \mathrm{head}_H]\, W_O

    The parameters have the names and shapes of those of `dgl.nn.BiasedMHA`, so checkpoints load, and the results are
    the same. Differences: a node that may attend to nobody gets zeros instead of NaN; the bias may also be a
    `gattn.Bias`, which needs no tensor of all pairs; and the graphs of a batch may be packed instead of padded.

    Args:
        channels: The number of channels, F.
        heads: The number of heads, H. Each has F / H channels, C.
        bias: Whether projections have a bias. (default: `True`)
        attn_bias_type: `"add"`, or `"mul"` to multiply logits by the bias instead. (default: `"add"`)
        attn_drop: The probability of dropping an attention weight during training. (default: `0.1`)

    Shapes:
        - **input:** features `[B, N, F]`, biases `[B, N, N, H]`, masks `[B, N, N]`; or features `[N, F]` of a packed
          graph.
        - **output:** the shape of the features.

    Raises:
        ValueError: If an option is out of range, or `channels` is not a multiple of `heads`.

    Example:
        >>> import torch, gattn
        >>> attention = gattn.nn.BiasedMHA(16, heads=4)
        >>> attention(torch.randn(2, 5, 16), torch.randn(2, 5, 5, 4)).shape
        torch.Size([2, 5, 16])
        >>> hops = [torch.tensor([[0, 1, 2], [1, 0, 1], [2, 1, 0]]), torch.tensor([[0, 1], [1, 0]])]
        >>> bias = gattn.BucketBias(hops, torch.randn(3, 4))
        >>> attention(torch.randn(5, 16), bias, graph=gattn.CompleteGraph.packed([3, 2])).shape
        torch.Size([5, 16])
    """

    _shown = "channels heads="

    def __init__(
        self, channels: int, heads: int, bias: bool = True, attn_bias_type: str = "add", attn_drop: float = 0.1
    ):
        super().__init__()
        check_heads(channels, heads, None)
        check_flag("bias", bias)
        check_probability("attn_drop", attn_drop)
        if attn_bias_type not in ("add", "mul"):
            raise InputError(f"attn_bias_type must be 'add' or 'mul'; got {attn_bias_type!r}.")
        self.channels = channels
        self.heads = heads
        self.attn_bias_type = attn_bias_type
        self.attn_drop = attn_drop
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (Linear(channels, channels, bias=bias) for _ in range(4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Resets all parameters, as DGL does."""
        super(Declared, self).reset_parameters()  # modules draw their numbers below
        for lin in (self.q_proj, self.k_proj, self.v_proj):
            lin.reset_parameters()
            torch.nn.init.xavier_uniform_(lin.weight, gain=2**-0.5)
        torch.nn.init.xavier_uniform_(self.out_proj.weight)
        if self.out_proj.bias is not None:
            torch.nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        x: Tensor,
        attn_bias: Tensor | Bias | None = None,
        attn_mask: Tensor | None = None,
        *,
        graph: CompleteGraph | None = None,
    ) -> Tensor:
        """Attends among the nodes of each graph.

        Args:
            x: The features, `[B, N, F]`, or `[N, F]` of one graph or a packed one.
            attn_bias: The bias of each pair, `[B, N, N, H]`, targets before sources; or a `gattn.Bias`.
                (default: `None`)
            attn_mask: Which pairs are left out, `[B, N, N]`; anything but zero means that they are. (default: `None`)
            graph: The graph, such as `CompleteGraph.packed(sizes)`. (default: `None`, all N nodes attend to each other)

        Returns:
            The output, in the shape of `x`.

        Raises:
            TypeError: If an argument is of another type.
            ValueError: If shapes do not fit each other, or a `gattn.Bias` is to be multiplied.
        """
        x, graph = on_graph(x, None, graph)
        if x.size(-1) != self.channels:
            raise InputError(f"x must have {self.channels} channels; got {list(x.shape)}.")
        check_dtype(self, x=x)
        query, key, value = (self._heads(lin(x)) for lin in (self.q_proj, self.k_proj, self.v_proj))
        mask = None if attn_mask is None else _of_pairs("attn_mask", attn_mask, x, ()).unsqueeze(-3) == 0
        if attn_bias is not None and not isinstance(attn_bias, Bias):
            attn_bias = _of_pairs("attn_bias", attn_bias, x, (self.heads,)).movedim(-1, -3)
            if not attn_bias.is_floating_point():
                raise InputTypeError(f"attn_bias must be of a floating-point type; got {attn_bias.dtype}.")
        ends: tuple[Tensor | None, Tensor | None] = query, key
        if attn_bias is not None and self.attn_bias_type == "mul":
            if isinstance(attn_bias, Bias) or graph.blocks is not None:
                raise InputError("attn_bias_type='mul' takes a tensor of biases, [B, N, N, H], and no packed graph.")
            attn_bias, ends = self.weigh(query, key, graph, distribution=None) * attn_bias, (None, None)
        out: Tensor = self.attend(*ends, value, graph, bias=attn_bias, mask=mask, dropout=self.attn_drop)
        return self.out_proj(out.flatten(-2))  # type: ignore[no-any-return]

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.heads, self.channels // self.heads)


class GraphormerLayer(Declared, Module):
    r"""A layer of Graphormer: attention with biases, and a feed-forward network, each with a residual connection.

    The layer of `Do Transformers Really Perform Bad for Graph Representation? <https://arxiv.org/abs/2106.05234>`_,
    which normalises first:

    .. math::
        h = x + \mathrm{BiasedMHA}(\mathrm{LN}(x)), \qquad x' = h + \mathrm{FFN}(\mathrm{LN}(h))

    The parameters have the names and shapes of those of `dgl.nn.GraphormerLayer`, so checkpoints load, and the results
    are the same; as there, `norm_first=False` is the default, which normalises each sum instead.

    Args:
        channels: The number of channels, F.
        hidden_channels: The number of channels inside the feed-forward network.
        heads: The number of heads, a divisor of F.
        attn_bias_type: See `BiasedMHA`. (default: `"add"`)
        norm_first: Whether to normalise before attention and the network, as the paper does. (default: `False`)
        dropout: The probability of dropping a feature during training. (default: `0.1`)
        attn_drop: The probability of dropping an attention weight during training. (default: `0.1`)
        activation: The activation of the network. (default: `None`, ReLU)

    Shapes:
        As those of `BiasedMHA`.

    Raises:
        ValueError: If an option is out of range, or `channels` is not a multiple of `heads`.

    Example:
        >>> import torch, gattn
        >>> layer = gattn.nn.GraphormerLayer(16, 32, heads=4)
        >>> layer(torch.randn(2, 5, 16), torch.randn(2, 5, 5, 4)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        channels: int,
        hidden_channels: int,
        heads: int,
        attn_bias_type: str = "add",
        norm_first: bool = False,
        dropout: float = 0.1,
        attn_drop: float = 0.1,
        activation: Module | None = None,
    ):
        super().__init__()
        check_at_least(1, hidden_channels=hidden_channels)
        check_flag("norm_first", norm_first)
        check_probability("dropout", dropout)
        self.norm_first = norm_first
        self.attn = BiasedMHA(channels, heads, attn_bias_type=attn_bias_type, attn_drop=attn_drop)
        self.ffn = torch.nn.Sequential(
            torch.nn.Linear(channels, hidden_channels),
            torch.nn.ReLU() if activation is None else activation,
            Dropout(dropout),
            torch.nn.Linear(hidden_channels, channels),
            Dropout(dropout),
        )
        self.dropout = Dropout(dropout)
        self.attn_layer_norm = torch.nn.LayerNorm(channels)
        self.ffn_layer_norm = torch.nn.LayerNorm(channels)

    def forward(
        self,
        x: Tensor,
        attn_bias: Tensor | Bias | None = None,
        attn_mask: Tensor | None = None,
        *,
        graph: CompleteGraph | None = None,
    ) -> Tensor:
        """Runs the layer; see `BiasedMHA.forward` for the arguments, the result and the errors."""
        h = self.attn_layer_norm(x) if self.norm_first else x
        x = x + self.dropout(self.attn(h, attn_bias, attn_mask, graph=graph))
        x = x if self.norm_first else self.attn_layer_norm(x)
        h = self.ffn_layer_norm(x) if self.norm_first else x
        x = x + through(self.ffn, h)
        return x if self.norm_first else self.ffn_layer_norm(x)


def _of_pairs(name: str, tensor: Any, x: Tensor, more: tuple[int, ...]) -> Tensor:
    """A tensor of all pairs of a dense batch, checked."""
    if not isinstance(tensor, Tensor):
        raise InputTypeError(f"{name} must be a tensor{' or a gattn.Bias' if more else ''}; got {tensor!r}.")
    wanted = (*x.shape[:-2], x.size(-2), x.size(-2), *more)
    if tensor.shape != wanted:
        raise InputError(f"{name} must be {list(wanted)} for x of {list(x.shape)}; got {list(tensor.shape)}.")
    return tensor
