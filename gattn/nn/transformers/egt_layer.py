"""DGL's layer of the Edge-augmented Graph Transformer, on padded batches."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import LayerNorm, Module, Sequential

from gattn.attention import Attention
from gattn.errors import InputError, InputTypeError, check_at_least, check_flag
from gattn.graphs import CompleteGraph
from gattn.nn.shared.declared import Declared
from gattn.nn.shared.dropout import Dropout
from gattn.nn.shared.dtypes import check_dtype
from gattn.nn.shared.linear import Linear
from gattn.nn.transformers.all_pairs import check_heads
from gattn.ops.dropout import check_probability
from gattn.recording import record
from gattn.scores import DotScore

__all__ = ["EGTLayer"]


class EGTLayer(Declared, Attention):
    r"""A layer of the Edge-augmented Graph Transformer on a padded batch, as DGL computes it.

    The layer of `Global Self-Attention as a Replacement for Graph Convolution <https://arxiv.org/abs/2108.03348>`_,
    with its norms, residual connections and feed-forward networks for nodes and for pairs:

    .. math::
        \hat h_{ij} = \mathrm{clip}(q_i^\top k_j, \pm 5) + W_E e_{ij}, \qquad
        \alpha_{ij} = \mathrm{softmax}_j(\hat h_{ij})\, \sigma(W_G e_{ij})

    .. math::
        x'_i = x_i + W_O\, \Big\Vert_h\, \log\Big(1 + \sum_j \sigma(W_G e_{ij})\Big) \sum_j \alpha_{ij} v_j, \qquad
        e'_{ij} = e_{ij} + W'_O\, \hat h_{ij}

    where q, k, v and the terms of pairs come from normalised features, and both results go through a feed-forward
    network. The parameters have the names and shapes of those of `dgl.nn.EGTLayer`, so checkpoints load, and the
    results are the same. That layer does not divide :math:`q^\top k` by :math:`\sqrt C` as the paper does: `EGTConv` is
    the paper's attention, on lists of pairs without padding.

    Args:
        channels: The number of channels of the nodes, F.
        edge_channels: The number of channels of the pairs, D.
        heads: The number of heads, a divisor of F.
        num_virtual_nodes: The number of virtual nodes, which come first and are not scaled by their degrees.
        dropout: The probability of dropping a feature during training. (default: `0.0`)
        attn_dropout: The probability of dropping an attention weight during training. (default: `0.0`)
        activation: The activation of the feed-forward networks. (default: `None`, ELU)
        edge_update: Whether pairs are updated and returned. (default: `True`)

    Shapes:
        - **input:** features `[B, N, F]`, features of the pairs `[B, N, N, D]`, targets before sources, and a mask
          `[B, N, N]`.
        - **output:** features `[B, N, F]`, and features of the pairs `[B, N, N, D]`.

    Raises:
        ValueError: If an option is out of range, or `channels` is not a multiple of `heads`.

    Example:
        >>> import torch, gattn
        >>> layer = gattn.nn.EGTLayer(16, 4, heads=2, num_virtual_nodes=0)
        >>> x, pair_attr = layer(torch.randn(2, 5, 16), torch.randn(2, 5, 5, 4))
        >>> x.shape, pair_attr.shape
        (torch.Size([2, 5, 16]), torch.Size([2, 5, 5, 4]))
    """

    _records_parts: ClassVar[bool] = False

    _shown = "channels edge_channels heads="

    def __init__(
        self,
        channels: int,
        edge_channels: int,
        heads: int,
        num_virtual_nodes: int,
        dropout: float = 0.0,
        attn_dropout: float = 0.0,
        activation: Module | None = None,
        edge_update: bool = True,
    ):
        super().__init__()
        check_heads(channels, heads, edge_channels)
        check_at_least(0, num_virtual_nodes=num_virtual_nodes)
        check_probability("dropout", dropout)
        check_probability("attn_dropout", attn_dropout)
        check_flag("edge_update", edge_update)
        self.channels = channels
        self.edge_channels = edge_channels
        self.heads = heads
        self.num_virtual_nodes = num_virtual_nodes
        self.updates_pairs = edge_update
        self.score = DotScore(scale=1.0, clamp=5.0)
        activation = torch.nn.ELU() if activation is None else activation

        def network(size: int) -> Sequential:
            return Sequential(LayerNorm(size), Linear(size, size), activation, Linear(size, size), Dropout(dropout))

        self.mha_ln_h, self.mha_ln_e = LayerNorm(channels), LayerNorm(edge_channels)
        self.edge_input, self.gate = Linear(edge_channels, heads), Linear(edge_channels, heads)
        self.qkv_proj, self.node_output = Linear(channels, 3 * channels), Linear(channels, channels)
        self.attn_dropout, self.mha_dropout_h = Dropout(attn_dropout), Dropout(dropout)
        self.node_ffn = network(channels)
        if edge_update:
            self.edge_output, self.mha_dropout_e = Linear(heads, edge_channels), Dropout(dropout)
            self.edge_ffn = network(edge_channels)

    def forward(self, x: Tensor, edge_attr: Tensor, mask: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Runs the layer.

        Args:
            x: The features, `[B, N, F]`.
            edge_attr: The features of all pairs, `[B, N, N, D]`.
            mask: What is added to the logits of weights and gates, `[B, N, N]`, such as minus infinity for pairs that
                do not exist. (default: `None`)

        Returns:
            The features of the nodes, and with `edge_update` those of the pairs.

        Raises:
            TypeError: If an argument is not a tensor of floating-point numbers.
            ValueError: If shapes do not fit each other.
        """
        self._check(x, edge_attr, mask)
        graph, pairs = CompleteGraph(x.size(-2)), self.mha_ln_e(edge_attr)
        qkv = torch.unflatten(self.qkv_proj(self.mha_ln_h(x)), -1, (3, -1, self.heads))  # heads are the last dimension
        query, key, value = (part.transpose(-1, -2) for part in qkv.unbind(-3))
        logits = self.weigh(query, key, graph, score=self.score, distribution=None) + self.edge_input(pairs).movedim(
            -1, -3
        )
        gates = self.gate(pairs).movedim(-1, -3)
        masked = logits
        if mask is not None:
            masked, gates = logits + mask.unsqueeze(-3), gates + mask.unsqueeze(-3)
        gates = gates.sigmoid()
        alpha = self.weigh(None, None, graph, bias=masked) * gates
        record(self, graph, alpha)
        alpha = self.attn_dropout(alpha)
        out = self.weighted_sum(alpha, value, graph)  # [B, N, H, C]
        scale = gates.sum(-1).log1p().movedim(-1, -2)
        scale = torch.cat(
            [torch.ones_like(scale[..., : self.num_virtual_nodes, :]), scale[..., self.num_virtual_nodes :, :]], -2
        )
        out = (out * scale.unsqueeze(-1)).transpose(-1, -2).flatten(-2)
        x = x + self.mha_dropout_h(self.node_output(out))
        x = x + self.node_ffn(x)
        if not self.updates_pairs:
            return x
        edge_attr = edge_attr + self.mha_dropout_e(self.edge_output(logits.movedim(-3, -1)))
        edge_attr = edge_attr + self.edge_ffn(edge_attr)
        return x, edge_attr

    def _check(self, x: Tensor, edge_attr: Tensor, mask: Tensor | None) -> None:
        given = {"x": x, "edge_attr": edge_attr} | ({} if mask is None else {"mask": mask})
        for name, tensor in given.items():
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                kind = getattr(tensor, "dtype", type(tensor).__name__)
                raise InputTypeError(f"{name} must be a tensor of floating-point numbers; got {kind}.")
        check_dtype(self, x=x, edge_attr=edge_attr, mask=mask)
        if x.dim() != 3 or x.size(-1) != self.channels:
            raise InputError(f"x must be [B, N, {self.channels}]; got {list(x.shape)}.")
        pairs = (*x.shape[:2], x.size(1))
        for name, wanted in (("edge_attr", (*pairs, self.edge_channels)), ("mask", pairs)):
            if name in given and given[name].shape != wanted:
                raise InputError(f"{name} must be {list(wanted)}; got {list(given[name].shape)}.")
