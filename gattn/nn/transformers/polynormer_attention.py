"""Polynormer's linear attention among all nodes of a graph.

Dimensions: B graphs, N nodes, F channels, H heads, C channels per head.
"""

from __future__ import annotations

import torch
import torch_geometric.nn.attention
from torch import Tensor

from gattn.attention import attend
from gattn.distributions import Identity
from gattn.errors import InputError, check_at_least, check_flag, check_number
from gattn.graphs import CompleteGraph
from gattn.nn.shared.dropout import replace_dropout
from gattn.nn.shared.linear import through
from gattn.nn.transformers.all_pairs import on_graph, without_padding
from gattn.ops.dropout import check_probability
from gattn.scores import DotScore
from gattn.tracing import Leaf

__all__ = ["PolynormerAttention"]


class PolynormerAttention(Leaf, torch_geometric.nn.attention.PolynormerAttention):
    r"""Linear attention among all nodes of a graph, multiplied by features of the node.

    The global layer of `Polynormer: Polynomial-Expressive Graph Transformer in Linear Time
    <https://arxiv.org/abs/2403.01232>`_:

    .. math::
        \mathrm{out} = \mathrm{ReLU}\big(W_o\, (\mathrm{LN}(a) \odot (W_h x + b_h + \beta)) + b_o\big), \qquad
        a_i = \frac{\sum_j (q_i^\top k_j)\, v_j}{\sum_j q_i^\top k_j + 10^{-6}}, \qquad
        q = \sigma(W_q x), \; k = \sigma(W_k x), \; v = W_v x

    with the attention of each head next to each other's channels, as in PyG. It takes time proportional to the number
    of nodes. In PyG, :math:`\beta` is a constant; in the paper and in its authors' program it is learnt for each
    channel as :math:`\sigma(b)`, which `learn_beta` does.

    This is a drop-in replacement for `torch_geometric.nn.attention.PolynormerAttention`: arguments, parameter names
    and, on one graph, results are the same. In a padded batch, PyG's layer also sums padded nodes in its denominator;
    here, a graph's output does not depend on the padding.

    Args:
        channels: The number of channels of the features, F.
        heads: The number of heads, H.
        head_channels: The number of channels of each head, C. (default: `64`)
        beta: The constant :math:`\beta`, or what it is at first if it is learnt. (default: `0.9`)
        qkv_bias: Whether queries, keys and values have a bias. (default: `False`)
        qk_shared: Whether queries are the keys. (default: `True`)
        dropout: The probability of dropping a channel of the output during training. (default: `0.0`)
        learn_beta: Whether :math:`\beta` is learnt for each channel. (default: `False`)

    Shapes:
        - **input:** features `[B, N, F]`, or those of one graph or a packed one, `[N, F]`.
        - **output:** `[B, N, H * C]` or `[N, H * C]`.

    Raises:
        TypeError: If a flag is neither true nor false.
        ValueError: If an option is out of range; a `beta` that is learnt must be between 0 and 1.

    Example:
        >>> import torch, gattn
        >>> layer = gattn.nn.PolynormerAttention(16, heads=4, head_channels=8)
        >>> mask = torch.arange(10) < torch.tensor([[10], [7]])  # two graphs, of 10 and 7 nodes
        >>> layer(torch.randn(2, 10, 16), mask).shape
        torch.Size([2, 10, 32])
        >>> layer(torch.randn(17, 16), graph=gattn.CompleteGraph.packed([10, 7])).shape
        torch.Size([17, 32])
    """

    def __init__(
        self,
        channels: int,
        heads: int,
        head_channels: int = 64,
        beta: float = 0.9,
        qkv_bias: bool = False,
        qk_shared: bool = True,
        dropout: float = 0.0,
        *,
        learn_beta: bool = False,
    ):
        check_at_least(1, channels=channels, heads=heads, head_channels=head_channels)
        check_probability("dropout", dropout)
        check_flag("learn_beta", learn_beta)
        check_number("beta", beta, "finite")
        if learn_beta and not 0 < beta < 1:
            raise InputError(f"a beta that is learnt is a sigmoid, and must be between 0 and 1 at first; got {beta}.")
        super().__init__(channels, heads, head_channels, beta, qkv_bias, qk_shared, dropout)
        replace_dropout(self)
        self.betas: torch.nn.Parameter | None = None
        if learn_beta:
            self.betas = torch.nn.Parameter(torch.empty(heads * head_channels))
            self._reset_beta()

    def _reset_beta(self) -> None:
        if self.betas is not None:
            torch.nn.init.constant_(self.betas, float(torch.logit(torch.tensor(self.beta, dtype=torch.double))))

    def reset_parameters(self) -> None:
        """Resets all parameters."""
        super().reset_parameters()
        self._reset_beta()

    def forward(self, x: Tensor, mask: Tensor | None = None, *, graph: CompleteGraph | None = None) -> Tensor:
        """Attends among all nodes.

        Args:
            x: The features, `[B, N, F]` or `[N, F]`.
            mask: Which nodes of a padded batch exist, `[B, N]`. (default: `None`, all)
            graph: The complete graph, such as a packed one. (default: `None`, that of all nodes)

        Returns:
            The output, `[B, N, H * C]` or `[N, H * C]`. For nodes that do not exist, it means nothing.

        Raises:
            TypeError: If `mask` is not of booleans, or `graph` is not a `CompleteGraph`.
            ValueError: If shapes do not fit each other, or both `mask` and `graph` are given.
        """
        x, graph = on_graph(x, mask, graph)
        h = through(self.h_lins, x)
        key = self._by_head(through(self.k, x).sigmoid())
        query = key if self.qk_shared else self._by_head(through(self.q, x).sigmoid())
        key, value = without_padding(key, mask), without_padding(self._by_head(through(self.v, x)), mask)
        law = Identity(normalize=True, eps=1e-6)
        out = attend(query, key, value, graph, score=DotScore(1.0), distribution=law)
        beta = self.beta if self.betas is None else self.betas.sigmoid()
        out = self.lns(out.transpose(-2, -1).flatten(-2)) * (h + beta)
        return self.dropout(through(self.lin_out, out).relu())  # type: ignore[no-any-return]

    def _by_head(self, rows: Tensor) -> Tensor:
        """Features `[..., N, C * H]` by head, `[..., N, H, C]`."""
        return rows.view(*rows.shape[:-1], self.head_channels, self.heads).transpose(-2, -1)
