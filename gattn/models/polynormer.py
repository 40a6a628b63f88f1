"""Polynormer: products of local and global attention with the nodes' own features."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor
from torch.nn import Linear, ModuleList, Parameter

from gattn.errors import InputError, check_at_least, check_flag
from gattn.nn.graph.gat_conv import GATConv
from gattn.nn.graph.gcn_conv import GCNConv
from gattn.nn.shared.dropout import dropout
from gattn.nn.shared.linear import through
from gattn.nn.transformers.all_pairs import check_whole
from gattn.nn.transformers.packed import packed_batch
from gattn.nn.transformers.polynormer_attention import PolynormerAttention
from gattn.ops.dropout import check_probability

__all__ = ["Polynormer"]


class Polynormer(torch_geometric.nn.Polynormer):
    r"""A network of local attention, whose layers are multiplied by features of the node, then of global attention.

    `Polynormer: Polynomial-Expressive Graph Transformer in Linear Time <https://arxiv.org/abs/2403.01232>`_. A local
    layer, with a graph convolution or the attention of GAT as :math:`A`, is

    .. math::
        a = \mathrm{ReLU}(\mathrm{BN}(A(x, E) + W x + b)), \qquad
        x' = (1 - \beta)\, \mathrm{LN}(\mathrm{ReLU}(W_h x + b_h) \odot a) + \beta\, a

    and the sum of all local layers is the input of the global ones, which are `gattn.nn.PolynormerAttention`. A network
    is first trained without these (*local phase*), then with them (*global phase*): see `use_global`.

    This is a drop-in replacement for `torch_geometric.nn.Polynormer`: arguments, parameter names and, on one graph,
    results are the same, and the global phase also works with several heads. The graphs of a batch are laid end to end
    instead of being padded, and a graph's output does not depend on the others.

    The defaults are PyG's. The authors' program has `local_attn=True`, `post_bn=False`, `learn_beta=True`, `beta=0.5`,
    `lin_in=True`, `qkv_bias=True` and `qk_shared=True`. *Differences from it:* the output is a logarithm of
    probabilities, as PyG's, and the global layers' divisor has :math:`10^{-6}` added.

    Args:
        in_channels: The number of channels of the input.
        hidden_channels: The number of channels of each head.
        out_channels: The number of classes.
        local_layers: The number of local layers. (default: `7`)
        global_layers: The number of global layers. (default: `2`)
        in_dropout: The probability of dropping an input feature during training. (default: `0.15`)
        dropout: The probability of dropping a feature after a local layer. (default: `0.5`)
        global_dropout: The probability of dropping a feature after a global layer. (default: `0.5`)
        heads: The number of heads. (default: `1`)
        beta: The constant :math:`\beta`. (default: `0.9`)
        qk_shared: Whether queries of global layers are the keys. (default: `False`)
        pre_ln: Whether there is a norm before each local layer. (default: `False`)
        post_bn: Whether there is a batch norm in each local layer. (default: `True`)
        local_attn: Whether local layers are attention instead of graph convolutions. (default: `False`)
        learn_beta: Whether :math:`\beta` is learnt for each channel of each layer, as a sigmoid from `beta` on.
            (default: `False`)
        lin_in: Whether the linear layer is used that comes first. (default: `False`)
        qkv_bias: Whether queries, keys and values of global layers have a bias. (default: `False`)

    Shapes:
        - **input:** features `[N, F]`, edge indices `[2, E]`, and the graph of each node `[N]`, in any order.
        - **output:** the logarithms of the classes' probabilities, `[N, out_channels]`.

    Raises:
        ValueError: If an option is out of range.

    Example:
        >>> import torch, gattn
        >>> model = gattn.models.Polynormer(16, 8, 4, heads=2, local_attn=True).eval()
        >>> edge_index, batch = torch.tensor([[0, 1, 3], [1, 2, 4]]), torch.tensor([0, 0, 0, 1, 1])
        >>> model(torch.randn(5, 16), edge_index, batch).shape
        torch.Size([5, 4])
        >>> model.use_global()(torch.randn(5, 16), edge_index, batch).shape
        torch.Size([5, 4])
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        local_layers: int = 7,
        global_layers: int = 2,
        in_dropout: float = 0.15,
        dropout: float = 0.5,
        global_dropout: float = 0.5,
        heads: int = 1,
        beta: float = 0.9,
        qk_shared: bool = False,
        pre_ln: bool = False,
        post_bn: bool = True,
        local_attn: bool = False,
        *,
        learn_beta: bool = False,
        lin_in: bool = False,
        qkv_bias: bool = False,
    ):
        check_flag("learn_beta", learn_beta)
        check_flag("lin_in", lin_in)
        check_flag("qkv_bias", qkv_bias)
        if learn_beta and not 0 < beta < 1:
            raise InputError(f"a beta that is learnt is a sigmoid, and must be between 0 and 1 at first; got {beta}.")
        check_at_least(1, local_layers=local_layers, heads=heads)
        check_at_least(0, global_layers=global_layers)
        for name, p in (("in_dropout", in_dropout), ("dropout", dropout), ("global_dropout", global_dropout)):
            check_probability(name, p)
        self.global_attn: ModuleList
        self.local_convs: ModuleList
        width = heads * hidden_channels if lin_in else in_channels
        super().__init__(
            width,
            hidden_channels,
            out_channels,
            local_layers,
            global_layers,
            in_dropout,
            dropout,
            global_dropout,
            heads,
            beta,
            qk_shared,
            pre_ln,
            post_bn,
            local_attn,
        )
        theirs, inner_channels = self.global_attn, heads * hidden_channels
        options: Any = {"heads": heads, "add_self_loops": False, "bias": False}
        with torch.random.fork_rng(devices=[]):  # the numbers are those that PyG has drawn
            self.global_attn = ModuleList(
                PolynormerAttention(
                    inner_channels,
                    heads,
                    hidden_channels,
                    beta,
                    qkv_bias,
                    qk_shared,
                    global_dropout,
                    learn_beta=learn_beta,
                )
                for _ in range(global_layers)
            )
            self.has_lin_in = lin_in
            if lin_in:  # PyG's network has it, but does not use it
                self.lin_in = Linear(in_channels, inner_channels)
            self.betas = Parameter(torch.empty(local_layers, inner_channels)) if learn_beta else None
            self._reset_betas()
            if local_attn:
                sizes = (width, *[inner_channels] * (local_layers - 1))
                convs = ModuleList(GATConv(size, hidden_channels, **options) for size in sizes)
                convs.load_state_dict(self.local_convs.state_dict())
                self.local_convs = convs
        if not local_attn:
            for conv in self.local_convs:
                conv.__class__ = GCNConv
        if heads == 1:  # with more, PyG's layers are of another width than their input
            self.global_attn.load_state_dict(theirs.state_dict(), strict=not (learn_beta or qkv_bias))

    def _reset_betas(self) -> None:
        if self.betas is not None:
            torch.nn.init.constant_(self.betas, math.log(self.beta / (1 - self.beta)))

    def reset_parameters(self) -> None:
        """Resets all parameters."""
        super().reset_parameters()
        if "has_lin_in" in vars(self):  # which PyG's __init__ comes before
            self.lin_in.reset_parameters()
            self._reset_betas()

    def use_global(self, on: bool = True) -> Polynormer:
        """Chooses the phase.

        Args:
            on: Whether the output is that of the global layers, instead of the local ones. (default: `True`)

        Returns:
            This network.

        Raises:
            TypeError: If `on` is neither true nor false.
        """
        check_flag("on", on)
        self._global = on
        return self

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor | None = None) -> Tensor:
        """Runs the network in its phase.

        Args:
            x: The features, `[N, F]`.
            edge_index: The edges, `[2, E]`.
            batch: The graph of each node, `[N]`, in any order. (default: `None`, a single graph)

        Returns:
            The logarithms of the classes' probabilities, `[N, out_channels]`.

        Raises:
            ValueError: If shapes do not fit each other, or the graph is sharded.
        """
        check_whole(self, edge_index)
        x, total = dropout(x, self.in_drop, self.training), None
        if self.has_lin_in:
            x = dropout(through(self.lin_in, x), self.dropout, self.training)
        for i, conv in enumerate(self.local_convs):
            if self.pre_ln:
                x = self.pre_lns[i](x)
            h = through(self.h_lins[i], x).relu()
            x = conv(x, edge_index) + through(self.lins[i], x)
            if self.post_bn:
                x = self.post_bns[i](x)
            x = dropout(x.relu(), self.dropout, self.training)
            beta: Any = self.beta if self.betas is None else self.betas[i].sigmoid()
            x = (1 - beta) * self.lns[i](h * x) + beta * x
            total = x if total is None else total + x
        assert total is not None
        if not self._global:
            return torch.log_softmax(through(self.pred_local, total), -1)
        order, graph = packed_batch(x, batch)
        x = self.ln(total if order is None else total.index_select(0, order))
        for attn in self.global_attn:
            x = attn(x, graph=graph)
        if order is not None:
            x = torch.empty_like(x).index_copy(0, order, x)
        return torch.log_softmax(through(self.pred_global, x), -1)
