"""Whole blocks of GRIT, Exphormer and EGT: attention with norms, residual connections and feed-forward networks.

Dimensions: N nodes, E pairs or edges, C channels, D channels of edges, H heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import BatchNorm1d, Identity, LayerNorm, Module
from torch_geometric.nn.inits import reset
from torch_geometric.nn.resolver import activation_resolver

from gattn.errors import InputError, InputTypeError, check_at_least, check_flag, check_number
from gattn.graphs import Graph, GraphLike
from gattn.nn.shared.declared import Declared
from gattn.nn.shared.dropout import Dropout, dropout
from gattn.nn.shared.dtypes import check_dtype
from gattn.nn.shared.linear import Linear
from gattn.nn.transformers.egt_conv import EGTConv
from gattn.nn.transformers.exphormer_conv import ExphormerConv
from gattn.nn.transformers.grit_conv import GRITConv
from gattn.ops.dropout import check_probability

__all__ = ["EGTBlock", "ExphormerLayer", "GRITLayer", "RRWPEncoder"]


class _Block(Declared, Module):
    """What GRIT's and Exphormer's blocks do with nodes after attention, with the modules' names of both programs."""

    _shown = "channels heads="

    def __init__(
        self,
        channels: int,
        heads: int,
        dropout: float,
        layer_norm: bool,
        batch_norm: bool,
        residual: bool,
        act: str,
        momentum: float,
    ):
        super().__init__()
        check_probability("dropout", dropout)
        check_at_least(1, channels=channels, heads=heads)
        for name, flag in {"layer_norm": layer_norm, "batch_norm": batch_norm, "residual": residual}.items():
            check_flag(name, flag)
        self.channels, self.heads, self.dropout, self.residual = channels, heads, dropout, residual
        for name in ("1", "2"):
            if layer_norm:
                self.add_module(f"layer_norm{name}_h", LayerNorm(channels))
            if batch_norm:
                self.add_module(f"batch_norm{name}_h", BatchNorm1d(channels, momentum=momentum))
        self.FFN_h_layer1 = Linear(channels, 2 * channels)
        self.FFN_h_layer2 = Linear(2 * channels, channels)
        self.act = activation_resolver(act)

    def reset_parameters(self) -> None:
        """Resets all parameters."""
        for module in self.children():
            reset(module)

    def _check(self, x: Any) -> None:
        if isinstance(x, Tensor) and x.dim() != 2:  # which batch norms need, for nodes and pairs
            raise InputError(f"x must be [N, {self.channels}]; got {list(x.shape)}.")

    def _normed(self, x: Tensor, name: str) -> Tensor:
        """After the norms of this name, such as `"1_h"`."""
        for kind in ("layer", "batch"):
            norm = getattr(self, f"{kind}_norm{name}", None)
            if norm is not None:
                x = norm(x)
        return x

    def _after_attention(self, x: Tensor, attended: Tensor, factor: Tensor | None = None) -> Tensor:
        """The block's nodes, from what it got and what attention made of it."""
        h = self._normed(x + attended if self.residual else attended, "1_h")
        out = self.FFN_h_layer2(dropout(self.act(self.FFN_h_layer1(h)), self.dropout, self.training))
        if factor is not None:
            out = out * factor
        return self._normed(h + out if self.residual else out, "2_h")


class GRITLayer(_Block):
    r"""The block of GRIT: attention among pairs, norms and a feed-forward network.

    As `Graph Inductive Biases in Transformers without Message Passing <https://arxiv.org/abs/2305.17589>`_ and its
    program have it, with :math:`\hat x, \hat e` of `GRITConv`:

    .. math::
        h_i = \mathrm{norm}(x_i + O_h\, \hat x_i), \qquad
        x'_i = \mathrm{norm}\big(h_i + W_2\, \mathrm{ReLU}(W_1 h_i)\big), \qquad
        e'_{ij} = \mathrm{norm}(e_{ij} + O_e\, \hat e_{ij})

    Options and modules have the program's names. Differences from it: `channels` holds for nodes and pairs alike, as
    residual connections need, and dropout follows the factors of degrees instead of coming before them.

    Args:
        channels: The number of channels of nodes and pairs, C.
        heads: The number of heads, a divisor of C.
        dropout: The probability of dropping a feature during training. (default: `0.0`)
        attn_dropout: The probability of dropping an attention weight during training. (default: `0.0`)
        layer_norm: Whether there are layer norms. (default: `False`)
        batch_norm: Whether there are batch norms; with both, they come second. (default: `True`)
        residual: Whether inputs are added. (default: `True`)
        act: The activation of the feed-forward network, by name. (default: `"relu"`)
        norm_e: Whether pairs are normalised. (default: `True`)
        O_e: Whether pairs are projected. (default: `True`)
        update_e: Whether pairs are updated; otherwise they are returned as they came. (default: `True`)
        deg_scaler: Whether the output depends on degrees. (default: `True`)
        rezero: Whether what is added to inputs is multiplied by numbers that start at zero. (default: `False`)
        clamp: The largest absolute value of a logit. (default: `5.0`)
        bn_momentum: The momentum of batch norms. (default: `0.1`)

    Shapes:
        - **input:** features `[N, C]`, pairs `[2, E]`, features of the pairs `[E, C]`, degrees `[N]`.
        - **output:** features `[N, C]`, and features of the pairs `[E, C]`.

    Raises:
        TypeError: If a flag is neither true nor false.
        ValueError: If an option is out of range, `channels` is not a multiple of `heads`, or (in `forward`) features
            and graph do not fit.

    Example:
        >>> import torch, gattn
        >>> pairs = gattn.CompleteGraph.packed([3, 2]).edge_index  # all pairs of two graphs
        >>> layer = gattn.nn.GRITLayer(16, heads=2)
        >>> x, pair_attr = layer(torch.randn(5, 16), pairs, torch.randn(13, 16), degree=torch.tensor([1, 2, 1, 1, 1]))
        >>> x.shape, pair_attr.shape
        (torch.Size([5, 16]), torch.Size([13, 16]))
    """

    def __init__(
        self,
        channels: int,
        heads: int,
        dropout: float = 0.0,
        attn_dropout: float = 0.0,
        layer_norm: bool = False,
        batch_norm: bool = True,
        residual: bool = True,
        act: str = "relu",
        norm_e: bool = True,
        O_e: bool = True,  # noqa: N803
        update_e: bool = True,
        deg_scaler: bool = True,
        rezero: bool = False,
        clamp: float = 5.0,
        bn_momentum: float = 0.1,
    ):
        super().__init__(channels, heads, dropout, layer_norm, batch_norm, residual, act, bn_momentum)
        for name, flag in {"norm_e": norm_e, "O_e": O_e, "update_e": update_e, "rezero": rezero}.items():
            check_flag(name, flag)
        if channels % heads != 0:
            raise InputError(f"channels must be a multiple of heads; got {channels} and {heads}.")
        size = channels // heads
        self.attention = GRITConv(channels, channels, size, heads, clamp, deg_scaler, attn_dropout)
        self.update_e = update_e
        self.O_h = Linear(channels, channels)
        self.O_e = Linear(channels, channels) if O_e else Identity()
        if norm_e and layer_norm:
            self.layer_norm1_e = LayerNorm(channels)
        if norm_e and batch_norm:
            self.batch_norm1_e = BatchNorm1d(channels, momentum=bn_momentum)
        self.alpha1_h, self.alpha2_h, self.alpha1_e = (
            torch.nn.Parameter(torch.empty(1, 1)) if rezero else None for _ in range(3)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Resets all parameters, as the authors' program does."""
        super().reset_parameters()
        scale = self.attention.degree_scale
        with torch.no_grad():
            if scale is not None:  # as for a matrix of C * 2 inputs and two outputs
                scale.normal_(std=(self.channels + 1) ** -0.5)
            for factor in (self.alpha1_h, self.alpha2_h, self.alpha1_e):
                if factor is not None:
                    factor.zero_()

    def forward(
        self, x: Tensor, edge_index: GraphLike, edge_attr: Tensor, degree: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Updates nodes and pairs.

        Args:
            x: The features, `[N, C]`.
            edge_index: The pairs, as a graph in any form that `gattn.attend` takes.
            edge_attr: The features of the pairs, `[E, C]`.
            degree: The degree of each node, `[N]`, in the graph whose pairs these are. (default: `None`, the number of
                pairs of which it is the target)

        Returns:
            The features of the nodes and of the pairs.

        Raises:
            TypeError: If an input is not a tensor.
            ValueError: If features and graph do not fit; the message says which.
            IndexError: If an index of the graph is out of range.
        """
        self._check(x)
        attended, pairs = self.attention(x, edge_index, edge_attr, degree)
        attended, pairs = (dropout(part, self.dropout, self.training) for part in (attended, pairs))
        attended = self.O_h(attended)
        if self.residual and self.alpha1_h is not None:
            attended = attended * self.alpha1_h
        out = self._after_attention(x, attended, self.alpha2_h if self.residual else None)
        if not self.update_e:
            return out, edge_attr
        pairs = self.O_e(pairs)
        if self.residual:
            pairs = edge_attr + (pairs if self.alpha1_e is None else pairs * self.alpha1_e)
        return out, self._normed(pairs, "1_e")


class ExphormerLayer(_Block):
    r"""The block of Exphormer: attention along edges, norms and a feed-forward network.

    As the program of `Exphormer: Sparse Transformers for Graphs <https://arxiv.org/abs/2303.06147>`_ has it, with the
    attention of `ExphormerConv`:

    .. math::
        h_i = \mathrm{norm}(x_i + \mathrm{attention}(x)_i), \qquad
        x'_i = \mathrm{norm}\big(h_i + W_2\, \mathrm{ReLU}(W_1 h_i)\big)

    Options and modules have the program's names; its output projection, which it makes and does not use, is left out.
    For attention beside a layer on the edges, as in most of the paper's configurations, see
    `GPSConv(attn_type="exphormer")`.

    Args:
        channels: The number of channels of the nodes, C.
        edge_channels: The number of channels of the edges, D.
        heads: The number of heads, a divisor of C. (default: `1`)
        dropout: The probability of dropping a feature during training. (default: `0.0`)
        layer_norm: Whether there are layer norms. (default: `False`)
        batch_norm: Whether there are batch norms; with both, they come second. (default: `True`)
        residual: Whether inputs are added. (default: `True`)
        act: The activation of the feed-forward network, by name. (default: `"relu"`)
        use_bias: Whether projections of nodes have a bias. (default: `False`)

    Shapes:
        - **input:** features `[N, C]`, edge indices `[2, E]`, edge features `[E, D]`.
        - **output:** `[N, C]`.

    Raises:
        TypeError: If a flag is neither true nor false.
        ValueError: If an option is out of range, `channels` is not a multiple of `heads`, or (in `forward`) features
            and graph do not fit.

    Example:
        >>> import torch, gattn
        >>> layer = gattn.nn.ExphormerLayer(16, 4, heads=2)
        >>> layer(torch.randn(5, 16), torch.tensor([[0, 1, 3], [1, 2, 4]]), torch.randn(3, 4)).shape
        torch.Size([5, 16])
    """

    def __init__(
        self,
        channels: int,
        edge_channels: int,
        heads: int = 1,
        dropout: float = 0.0,
        layer_norm: bool = False,
        batch_norm: bool = True,
        residual: bool = True,
        act: str = "relu",
        use_bias: bool = False,
    ):
        super().__init__(channels, heads, dropout, layer_norm, batch_norm, residual, act, 0.1)
        check_at_least(1, edge_channels=edge_channels)
        self.attention = ExphormerConv(channels, edge_channels, heads, bias=use_bias)

    def forward(self, x: Tensor, edge_index: GraphLike, edge_attr: Tensor | None = None) -> Tensor:
        """Runs the block.

        Args:
            x: The features, `[N, C]`.
            edge_index: The graph, in any form that `gattn.attend` takes.
            edge_attr: The features of the edges, `[E, D]`. (default: `None`, the vectors that a sparse adjacency holds)

        Returns:
            The output, `[N, C]`.

        Raises:
            TypeError: If an input is not a tensor.
            ValueError: If features and graph do not fit; the message says which.
            IndexError: If an index of the graph is out of range.
        """
        if hasattr(self, "batch_norm1_h") and isinstance(edge_index, Graph) and edge_index.is_sharded:
            raise InputError(
                "ExphormerLayer normalises over all nodes, so it takes no sharded graphs: batch_norm=False."
            )
        self._check(x)
        attended = dropout(self.attention(x, edge_index, edge_attr), self.dropout, self.training)
        return self._after_attention(x, attended)


class EGTBlock(Declared, Module):
    r"""The block of the Edge-augmented Graph Transformer: attention among pairs, with networks for nodes and pairs.

    As `Global Self-Attention as a Replacement for Graph Convolution <https://arxiv.org/abs/2108.03348>`_ has it, and
    its program, with :math:`\hat x, \hat e` of `EGTConv` for normalised nodes and pairs:

    .. math::
        h_i = x_i + \hat x_i, \qquad x'_i = h_i + W_2\, \mathrm{ELU}(W_1 \mathrm{LN}(h_i)), \qquad
        h_{ij} = e_{ij} + \hat e_{ij}, \qquad e'_{ij} = h_{ij} + W'_2\, \mathrm{ELU}(W'_1 \mathrm{LN}(h_{ij}))

    on lists of pairs, without padding. Options have the program's names where it has them. (DGL's form of this block,
    on padded batches, is `EGTLayer`; it does not divide :math:`q^\top k` by :math:`\sqrt C`.)

    Args:
        channels: The number of channels of the nodes, C.
        edge_channels: The number of channels of the pairs, D.
        heads: The number of heads, a divisor of C. (default: `1`)
        mha_dropout: The probability of dropping an element of what attention adds, during training. (default: `0.0`)
        ffn_dropout: The same for what the networks add. (default: `0.0`)
        attn_dropout: The probability of dropping an attention weight during training. (default: `0.0`)
        attn_maskout: The probability of hiding a pair from a softmax during training. (default: `0.0`)
        activation: The activation of the networks, by name. (default: `"elu"`)
        clip: The largest absolute value of the scaled dot product. (default: `5.0`)
        node_ffn_multiplier: How many times as wide as its input the nodes' network is. (default: `2.0`)
        edge_ffn_multiplier: The same for the pairs' network. (default: `2.0`)
        scale_degree: Whether sums are multiplied by the logarithms of the gates' sums. (default: `False`)
        num_virtual_nodes: The number of each graph's first nodes whose sums are not multiplied. (default: `0`)
        edge_update: Whether pairs are updated; otherwise they are returned as they came. (default: `True`)

    Shapes:
        - **input:** features `[N, C]`, pairs `[2, E]`, features of the pairs `[E, D]`.
        - **output:** features `[N, C]`, and features of the pairs `[E, D]`.

    Raises:
        TypeError: If a flag is neither true nor false.
        ValueError: If an option is out of range, `channels` is not a multiple of `heads`, or (in `forward`) features
            and graph do not fit.

    Example:
        >>> import torch, gattn
        >>> pairs = gattn.CompleteGraph.packed([3, 2]).edge_index  # all pairs of two graphs
        >>> block = gattn.nn.EGTBlock(16, 4, heads=2)
        >>> x, pair_attr = block(torch.randn(5, 16), pairs, torch.randn(13, 4))
        >>> x.shape, pair_attr.shape
        (torch.Size([5, 16]), torch.Size([13, 4]))
    """

    _shown = "channels edge_channels heads="

    def __init__(
        self,
        channels: int,
        edge_channels: int,
        heads: int = 1,
        mha_dropout: float = 0.0,
        ffn_dropout: float = 0.0,
        attn_dropout: float = 0.0,
        attn_maskout: float = 0.0,
        activation: str = "elu",
        clip: float = 5.0,
        node_ffn_multiplier: float = 2.0,
        edge_ffn_multiplier: float = 2.0,
        scale_degree: bool = False,
        num_virtual_nodes: int = 0,
        edge_update: bool = True,
    ):
        super().__init__()
        check_probability("mha_dropout", mha_dropout)
        check_flag("edge_update", edge_update)
        self.channels, self.edge_channels, self.heads, self.edge_update = channels, edge_channels, heads, edge_update
        more = scale_degree, num_virtual_nodes, attn_maskout
        self.attention = EGTConv(channels, edge_channels, heads, clip, True, attn_dropout, *more)
        self.mha_ln_h, self.mha_ln_e = LayerNorm(channels), LayerNorm(edge_channels)
        self.mha_drop = Dropout(mha_dropout)
        self.node_ffn = _network(channels, node_ffn_multiplier, activation, ffn_dropout)
        if edge_update:
            self.edge_ffn = _network(edge_channels, edge_ffn_multiplier, activation, ffn_dropout)

    def forward(
        self, x: Tensor, edge_index: GraphLike, edge_attr: Tensor, batch: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Updates nodes and pairs.

        Args:
            x: The features, `[N, C]`.
            edge_index: The pairs, as a graph in any form that `gattn.attend` takes.
            edge_attr: The features of the pairs, `[E, D]`.
            batch: The graph of each node, `[N]`, in ascending order, by which virtual nodes are found.
                (default: `None`, a single graph)

        Returns:
            The features of the nodes and of the pairs.

        Raises:
            TypeError: If an input is not a tensor.
            ValueError: If features and graph do not fit; the message says which.
            IndexError: If an index of the graph is out of range.
        """
        for name, rows, channels in (("x", x, self.channels), ("edge_attr", edge_attr, self.edge_channels)):
            if not isinstance(rows, Tensor):
                raise InputTypeError(f"{name} must be a tensor; got {type(rows).__name__}.")
            if rows.dim() < 2 or rows.size(-1) != channels:
                raise InputError(f"{name} must be [..., {channels}]; got {list(rows.shape)}.")
        check_dtype(self, x=x, edge_attr=edge_attr)
        nodes, pairs = self.attention(self.mha_ln_h(x), edge_index, self.mha_ln_e(edge_attr), batch)
        x = x + self.mha_drop(nodes)
        x = x + self.node_ffn(x)
        if not self.edge_update:
            return x, edge_attr
        edge_attr = edge_attr + self.mha_drop(pairs)
        return x, edge_attr + self.edge_ffn(edge_attr)


def _network(channels: int, multiplier: float, activation: str, dropout: float) -> torch.nn.Sequential:
    check_number("ffn_multiplier", multiplier, "positive and finite")
    inner = round(channels * multiplier)
    if inner < 1:
        raise InputError(f"ffn_multiplier must leave a channel of {channels}; got {multiplier}.")
    layers = Linear(channels, inner), activation_resolver(activation), Linear(inner, channels)
    return torch.nn.Sequential(LayerNorm(channels), *layers, Dropout(dropout))


class RRWPEncoder(Declared, Module):
    r"""GRIT's first features of nodes and pairs: projected probabilities of random walks, and what edges have.

    The linear encoders of `Graph Inductive Biases in Transformers without Message Passing
    <https://arxiv.org/abs/2305.17589>`_, for the probabilities :math:`P_{ij}` of `gattn.transforms.RandomWalkPairs`:

    .. math::
        x'_i = x_i + W_x P_{ii}, \qquad e'_{ij} = W_e P_{ij} + \sum_{\text{edges } j \to i} e_{ji}

    Args:
        num_steps: The number of probabilities, K.
        channels: The number of channels of nodes and pairs, C.
        use_bias: Whether projections have a bias. (default: `False`)

    Shapes:
        - **input:** features `[N, C]`, probabilities `[N, K]` of nodes and `[P, K]` of pairs, pairs `[2, P]`, edges
          `[2, E]`, and edge features `[E, C]`.
        - **output:** features `[N, C]`, and features of the pairs `[P, C]`.

    Raises:
        ValueError: If an option is out of range, or (in `forward`) edges have no features.

    Example:
        >>> import torch, gattn
        >>> from torch_geometric.data import Data
        >>> star = Data(torch.randn(3, 16), torch.tensor([[0, 0, 1, 2], [1, 2, 0, 0]]), torch.randn(4, 16))
        >>> data = gattn.transforms.RandomWalkPairs(num_steps=3)(star)
        >>> encoder, walks = gattn.nn.RRWPEncoder(3, 16), (data.node_walks, data.pair_walks, data.pair_index)
        >>> x, pair_attr = encoder(data.x, *walks, data.edge_index, data.edge_attr)
        >>> pair_attr.shape
        torch.Size([9, 16])
    """

    _shown = "num_steps channels"

    def __init__(self, num_steps: int, channels: int, use_bias: bool = False):
        super().__init__()
        check_at_least(1, num_steps=num_steps, channels=channels)
        check_flag("use_bias", use_bias)
        self.num_steps, self.channels = num_steps, channels
        self.node_fc, self.edge_fc = (Linear(num_steps, channels, bias=use_bias) for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Resets all parameters, as the authors' program does."""
        for module in (self.node_fc, self.edge_fc):
            module.reset_parameters()
            torch.nn.init.xavier_uniform_(module.weight)

    def forward(
        self,
        x: Tensor,
        node_walks: Tensor,
        pair_walks: Tensor,
        pair_index: Tensor,
        edge_index: Tensor | None = None,
        edge_attr: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Encodes nodes and pairs.

        Args:
            x: The features, `[N, C]`.
            node_walks: The probabilities of each node's pair with itself, `[N, K]`.
            pair_walks: Those of all pairs, `[P, K]`.
            pair_index: All pairs, `[2, P]`, sources above targets, target by target, as the transform lists them.
            edge_index: The edges, `[2, E]`. (default: `None`, their features are not wanted)
            edge_attr: Their features, `[E, C]`. (default: `None`)

        Returns:
            The features of the nodes and of the pairs.

        Raises:
            TypeError: If an input is not a tensor.
            ValueError: If only one of `edge_index` and `edge_attr` is given, shapes do not fit, or an edge is not among
                the pairs.
        """
        if (edge_index is None) != (edge_attr is None):
            raise InputError("edge_index and edge_attr belong together: pass both or none.")
        self._check("x", x, self.channels)
        self._check("node_walks", node_walks, self.num_steps, x)
        self._check_pairs("pair_index", pair_index, "pair_walks", pair_walks, self.num_steps)
        if edge_index is not None:
            self._check_pairs("edge_index", edge_index, "edge_attr", edge_attr, self.channels)
        pairs = self.edge_fc(pair_walks)
        if edge_index is not None:
            source, target = edge_index.long()
            first = torch.searchsorted(pair_index[1].contiguous(), target)
            place = first + source - pair_index[0].long().index_select(0, first.clamp_max(pair_index.size(1) - 1))
            if not torch.compiler.is_compiling() and not place.is_meta:
                inside = place.clamp(0, pair_index.size(1) - 1)
                if not (place == inside).all() or not (pair_index.index_select(1, inside) == edge_index).all():
                    raise InputError("edges must be among the pairs, listed target by target, and within by source.")
            pairs = pairs.index_add(0, place, edge_attr)
        return x + self.node_fc(node_walks), pairs

    def _check(self, name: str, rows: Any, channels: int, like: Tensor | None = None) -> None:
        if not isinstance(rows, Tensor):
            raise InputTypeError(f"{name} must be a tensor; got {type(rows).__name__}.")
        if rows.dim() != 2 or rows.size(1) != channels or (like is not None and rows.size(0) != like.size(0)):
            count = "..." if like is None else like.size(0)
            raise InputError(f"{name} must be [{count}, {channels}]; got {list(rows.shape)}.")
        check_dtype(self, **{name: rows})

    def _check_pairs(self, name: str, index: Any, name_of_rows: str, rows: Any, channels: int) -> None:
        if not isinstance(index, Tensor):
            raise InputTypeError(f"{name} must be a tensor; got {type(index).__name__}.")
        if index.dim() != 2 or index.size(0) != 2 or index.is_floating_point():
            raise InputError(f"{name} must be integers [2, E]; got {index.dtype} of shape {list(index.shape)}.")
        self._check(name_of_rows, rows, channels, index[0].unsqueeze(1))
