"""Pairs that attend to pairs, and nodes whose attention pairs bias: the layers of AlphaFold.

Dimensions: N nodes, C channels of pairs, D channels of nodes, H heads, E channels per head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import LayerNorm, ModuleDict

from gattn.attention import Attention
from gattn.errors import InputError, InputTypeError, check_at_least, check_flag
from gattn.graphs import CompleteGraph
from gattn.nn.shared.declared import Declared
from gattn.nn.shared.dtypes import check_dtype
from gattn.nn.shared.linear import Linear
from gattn.nn.transformers.all_pairs import check_heads

__all__ = ["AttentionPairBias", "TriangleAttention", "TriangleMultiplication"]


def _check_pairs(module: torch.nn.Module, pairs: Tensor, channels: int, mask: Tensor | None) -> None:
    """Raises `TypeError` or `ValueError` unless pairs are `[..., N, N, channels]` and `mask` fits them."""
    if not isinstance(pairs, Tensor) or not pairs.is_floating_point():
        raise InputTypeError(f"pairs must be a tensor of floating-point numbers; got {type(pairs).__name__}.")
    if pairs.dim() < 3 or pairs.size(-1) != channels or pairs.size(-2) != pairs.size(-3):
        raise InputError(f"pairs must be [..., N, N, {channels}]; got {list(pairs.shape)}.")
    _check_mask(mask, pairs.shape[:-1])
    check_dtype(module, pairs=pairs)


def _check_mask(mask: Tensor | None, shape: torch.Size) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise InputTypeError("mask must be a tensor of booleans, true for what exists.")
    if mask.shape != shape:
        raise InputError(f"mask must be {list(shape)}; got {list(mask.shape)}.")


class TriangleAttention(Declared, Attention):
    r"""Attention among the pairs that start, or end, at the same node, biased by the third edge of the triangle.

    Algorithms 13 and 14 of `Highly accurate protein structure prediction with AlphaFold
    <https://doi.org/10.1038/s41586-021-03819-2>`_, also in `AlphaFold 3 <https://doi.org/10.1038/s41586-024-07487-w>`_.
    With normalised pairs :math:`z_{ij}`, around the starting node:

    .. math::
        \alpha_{ij\cdot} = \mathrm{softmax}_k\Big(\frac{q_{ij}^\top k_{ik}}{\sqrt E} + w_b^\top z_{jk}\Big), \qquad
        z'_{ij} = W_O\, \Big\Vert_h\, \sigma(g_{ij}) \odot \sum_k \alpha_{ijk} v_{ik}

    and around the ending node the same with :math:`k_{kj}`, :math:`v_{kj}` and :math:`z_{ki}`. Each row of pairs is a
    complete graph, and all rows share one bias, whose gradient the kernels sum: no tensor `[N, H, N, N]` is made. The
    input is not added, and dropout of rows or columns is the caller's, as in the papers' algorithms.

    Parameters have the names of OpenFold's layer, so checkpoints load; AlphaFold 3's has `bias=False`.

    Args:
        channels: The number of channels of the pairs, C.
        heads: The number of heads, H. (default: `4`)
        head_channels: The number of channels of each head, E. (default: `32`)
        starting: Whether pairs share their starting node, or their ending one. (default: `True`)
        bias: Whether gates and the output have a bias. (default: `True`)

    Shapes:
        - **input:** pairs `[N, N, C]` or `[B, N, N, C]`, and which of them exist, `[N, N]` or `[B, N, N]`.
        - **output:** like the pairs.

    Raises:
        TypeError: If a flag is neither true nor false.
        ValueError: If a number is not positive.

    Example:
        >>> import torch, gattn
        >>> layer = gattn.nn.TriangleAttention(16, heads=2, head_channels=8)
        >>> pairs = torch.randn(5, 5, 16)  # all pairs of 5 residues
        >>> layer(pairs, mask=torch.ones(5, 5, dtype=torch.bool)).shape
        torch.Size([5, 5, 16])
    """

    _shown = "channels heads= starting="

    def __init__(
        self, channels: int, heads: int = 4, head_channels: int = 32, starting: bool = True, bias: bool = True
    ):
        super().__init__()
        check_at_least(1, channels=channels, heads=heads, head_channels=head_channels)
        check_flag("starting", starting)
        check_flag("bias", bias)
        self.channels, self.heads, self.starting = channels, heads, starting
        width = heads * head_channels
        self.layer_norm = LayerNorm(channels)
        self.linear = Linear(channels, heads, bias=False)
        parts = {f"linear_{name}": Linear(channels, width, bias=False) for name in "qkv"}
        parts |= {"linear_g": Linear(channels, width, bias=bias), "linear_o": Linear(width, channels, bias=bias)}
        self.mha = ModuleDict(parts)

    def forward(self, pairs: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attends among pairs.

        Args:
            pairs: The pairs, `[N, N, C]` or `[B, N, N, C]`.
            mask: Which of them exist, `[N, N]` or `[B, N, N]`; nobody attends to the others. (default: `None`, all)

        Returns:
            The update of the pairs.

        Raises:
            TypeError: If `pairs` is not a tensor of floating-point numbers, or `mask` not one of booleans.
            ValueError: If shapes do not fit.
        """
        _check_pairs(self, pairs, self.channels, mask)
        if pairs.dim() > 4:
            raise InputError(f"pairs must be [N, N, C] or [B, N, N, C]; got {list(pairs.shape)}.")
        if not self.starting:
            pairs = pairs.transpose(-2, -3)
            mask = None if mask is None else mask.transpose(-1, -2)
        x = self.layer_norm(pairs)
        query, key, value = (torch.unflatten(self.mha[f"linear_{name}"](x), -1, (self.heads, -1)) for name in "qkv")
        bias = self.linear(x).movedim(-1, -3).unsqueeze(-4)  # [..., 1, H, N, N], for all rows
        graph = CompleteGraph(pairs.size(-2))
        shown = None if mask is None else mask[..., None, None, :]
        out: Tensor = self.attend(query, key, value, graph, bias=bias, mask=shown)
        out = self.mha["linear_o"](self.mha["linear_g"](x).sigmoid() * out.flatten(-2))
        return out if self.starting else out.transpose(-2, -3)


class TriangleMultiplication(Declared, torch.nn.Module):
    r"""Sums over the third node of a triangle of products of its two other edges.

    Algorithms 11 and 12 of `AlphaFold <https://doi.org/10.1038/s41586-021-03819-2>`_, with normalised pairs
    :math:`z_{ij}`:

    .. math::
        a_{ij} = \sigma(W_{ga} z_{ij}) \odot W_a z_{ij}, \qquad b_{ij} = \sigma(W_{gb} z_{ij}) \odot W_b z_{ij}, \qquad
        z'_{ij} = \sigma(W_g z_{ij}) \odot W_O\, \mathrm{LN}\Big(\sum_k a_{ik} \odot b_{jk}\Big)

    for outgoing edges, and :math:`a_{ki} \odot b_{kj}` for incoming ones. It is not attention, but goes with
    `TriangleAttention`. Parameters have the names of OpenFold's layer; AlphaFold 3's has `bias=False`.

    Args:
        channels: The number of channels of the pairs, C.
        hidden_channels: The number of channels of the products. (default: `None`, C)
        outgoing: Whether both edges leave the pair's nodes, or enter them. (default: `True`)
        bias: Whether linear layers have a bias. (default: `True`)

    Shapes:
        - **input:** pairs `[..., N, N, C]`, and which of them exist, `[..., N, N]`.
        - **output:** `[..., N, N, C]`.

    Raises:
        TypeError: If a flag is neither true nor false.
        ValueError: If a number is not positive.

    Example:
        >>> import torch, gattn
        >>> gattn.nn.TriangleMultiplication(16)(torch.randn(5, 5, 16)).shape
        torch.Size([5, 5, 16])
    """

    _shown = "channels outgoing="

    def __init__(self, channels: int, hidden_channels: int | None = None, outgoing: bool = True, bias: bool = True):
        super().__init__()
        hidden = channels if hidden_channels is None else hidden_channels
        check_at_least(1, channels=channels, hidden_channels=hidden)
        check_flag("outgoing", outgoing)
        check_flag("bias", bias)
        self.channels, self.outgoing = channels, outgoing
        self.layer_norm_in, self.layer_norm_out = LayerNorm(channels), LayerNorm(hidden)
        self.linear_a_p, self.linear_a_g, self.linear_b_p, self.linear_b_g = (
            Linear(channels, hidden, bias=bias) for _ in range(4)
        )
        self.linear_g, self.linear_z = Linear(channels, channels, bias=bias), Linear(hidden, channels, bias=bias)

    def forward(self, pairs: Tensor, mask: Tensor | None = None) -> Tensor:
        """Multiplies and sums.

        Args:
            pairs: The pairs, `[..., N, N, C]`.
            mask: Which of them exist, `[..., N, N]`; products with others are zero. (default: `None`, all)

        Returns:
            The update of the pairs, `[..., N, N, C]`.

        Raises:
            TypeError: If `pairs` is not a tensor of floating-point numbers, or `mask` not one of booleans.
            ValueError: If shapes do not fit.
        """
        _check_pairs(self, pairs, self.channels, mask)
        x = self.layer_norm_in(pairs)
        a, b = self.linear_a_g(x).sigmoid() * self.linear_a_p(x), self.linear_b_g(x).sigmoid() * self.linear_b_p(x)
        if mask is not None:
            a, b = (edge.masked_fill(~mask.unsqueeze(-1), 0.0) for edge in (a, b))
        a, b = (edge.movedim(-1, -3) for edge in (a, b))  # a matrix for each channel
        products = a @ b.mT if self.outgoing else a.mT @ b
        out = self.linear_z(self.layer_norm_out(products.movedim(-3, -1)))
        return self.linear_g(x).sigmoid() * out  # type: ignore[no-any-return]


class AttentionPairBias(Declared, Attention):
    r"""Attention among nodes with a bias from each pair, gated, and adapted to a condition.

    Algorithm 24 of `Accurate structure prediction of biomolecular interactions with AlphaFold 3
    <https://doi.org/10.1038/s41586-024-07487-w>`_, for nodes :math:`a_i`, pairs :math:`z_{ij}` and, optionally,
    conditions :math:`s_i`:

    .. math::
        \alpha_{i\cdot} = \mathrm{softmax}_j\Big(\frac{q_i^\top k_j}{\sqrt E} + w_b^\top \mathrm{LN}(z_{ij})\Big),
        \qquad a'_i = W_O\, \Big\Vert_h\, \sigma(g_i) \odot \sum_j \alpha_{ij} v_j

    of normalised nodes; with conditions, nodes are normalised by :math:`\sigma(W_s \hat s) \odot \hat a + W'_s \hat s`
    for norms :math:`\hat a, \hat s`, and the result is multiplied by :math:`\sigma(W''_s s + b)`, where b starts at -2.
    The bias is one tensor `[H, N, N]`, whatever the number of samples `a` of the same pairs.

    Args:
        channels: The number of channels of the nodes, D.
        pair_channels: The number of channels of the pairs, C.
        heads: The number of heads, a divisor of D.
        condition_channels: The number of channels of conditions. (default: `None`, there are none)

    Shapes:
        - **input:** nodes `[..., N, D]`, pairs `[..., N, N, C]`, which may lack leading dimensions or have ones there,
          conditions like the nodes, and which nodes exist, `[..., N]`.
        - **output:** `[..., N, D]`.

    Raises:
        ValueError: If a number is not positive, or `channels` is not a multiple of `heads`.

    Example:
        >>> import torch, gattn
        >>> layer = gattn.nn.AttentionPairBias(16, 8, heads=4)
        >>> layer(torch.randn(3, 5, 16), torch.randn(5, 5, 8)).shape  # 3 samples of the same 5 tokens
        torch.Size([3, 5, 16])
    """

    _shown = "channels pair_channels heads="

    def __init__(self, channels: int, pair_channels: int, heads: int, condition_channels: int | None = None):
        super().__init__()
        check_heads(channels, heads, None)
        check_at_least(1, pair_channels=pair_channels)
        self.channels, self.pair_channels, self.heads = channels, pair_channels, heads
        self.condition_channels = condition_channels
        has_condition = condition_channels is not None
        self.layer_norm_a = LayerNorm(channels, elementwise_affine=not has_condition)
        self.layer_norm_z = LayerNorm(pair_channels)
        self.linear_q = Linear(channels, channels)
        self.linear_k, self.linear_v, self.linear_g, self.linear_o = (
            Linear(channels, channels, bias=False) for _ in range(4)
        )
        self.linear_z = Linear(pair_channels, heads, bias=False)
        if condition_channels is not None:
            check_at_least(1, condition_channels=condition_channels)
            self.layer_norm_s = LayerNorm(condition_channels, bias=False)
            self.linear_scale = Linear(condition_channels, channels)
            self.linear_shift = Linear(condition_channels, channels, bias=False)
            self.linear_gate = Linear(condition_channels, channels)
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Resets all parameters."""
        super().reset_parameters()
        if self.condition_channels is not None:
            torch.nn.init.zeros_(self.linear_gate.weight)
            torch.nn.init.constant_(self.linear_gate.bias, -2.0)

    def forward(self, a: Tensor, pairs: Tensor, condition: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Attends among the nodes.

        Args:
            a: The nodes, `[..., N, D]`.
            pairs: The pairs, `[..., N, N, C]`, targets before sources.
            condition: What nodes are adapted to, `[..., N, condition_channels]`. (default: `None`)
            mask: Which nodes exist, `[..., N]`; nobody attends to the others. (default: `None`, all)

        Returns:
            The update of the nodes, `[..., N, D]`.

        Raises:
            TypeError: If an input is not a tensor of floating-point numbers, or `mask` not one of booleans.
            ValueError: If shapes do not fit, or a condition is missing or unknown.
        """
        _check_pairs(self, pairs, self.pair_channels, None)
        if not isinstance(a, Tensor) or not a.is_floating_point():
            raise InputTypeError(f"a must be a tensor of floating-point numbers; got {type(a).__name__}.")
        if a.dim() < 2 or a.size(-1) != self.channels or a.size(-2) != pairs.size(-2):
            raise InputError(f"a must be [..., {pairs.size(-2)}, {self.channels}]; got {list(a.shape)}.")
        _check_mask(mask, a.shape[:-1])
        if (condition is None) != (self.condition_channels is None):
            raise InputError("condition is for a layer with condition_channels, which needs it.")
        check_dtype(self, a=a)
        if condition is not None:
            if not isinstance(condition, Tensor):
                raise InputTypeError(f"condition must be a tensor; got {type(condition).__name__}.")
            if condition.shape != (*a.shape[:-1], self.condition_channels):
                expected = [*a.shape[:-1], self.condition_channels]
                raise InputError(f"condition must be {expected}; got {list(condition.shape)}.")
            check_dtype(self, condition=condition)
        x = self.layer_norm_a(a)
        if condition is not None:
            s = self.layer_norm_s(condition)
            x = self.linear_scale(s).sigmoid() * x + self.linear_shift(s)
        query, key, value = (
            torch.unflatten(lin(x), -1, (self.heads, -1)) for lin in (self.linear_q, self.linear_k, self.linear_v)
        )
        bias = self.linear_z(self.layer_norm_z(pairs)).movedim(-1, -3)
        shown = None if mask is None else mask[..., None, None, :]
        out: Tensor = self.attend(query, key, value, CompleteGraph(a.size(-2)), bias=bias, mask=shown)
        out = self.linear_o(self.linear_g(x).sigmoid() * out.flatten(-2))
        return out if condition is None else self.linear_gate(condition).sigmoid() * out
