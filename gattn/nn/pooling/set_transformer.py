"""Set Transformer: attention among the elements of a set, and from a few learnt queries to them.

Dimensions: B sets, N elements of all sets together or of a padded one, C channels, K seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import LayerNorm, Linear, Module, ModuleList, Parameter
from torch_geometric.nn.aggr import Aggregation
from torch_geometric.nn.inits import reset

from gattn.attention import Attention
from gattn.errors import InputError, check_at_least, check_flag
from gattn.graphs import CompleteGraph, Graph
from gattn.nn.pooling.sets import counts_of, graphs_of_sets
from gattn.nn.shared.declared import Declared
from gattn.nn.shared.linear import through
from gattn.nn.transformers.all_pairs import check_heads
from gattn.nn.transformers.multihead_attention import MultiheadAttention
from gattn.nn.transformers.torch_masks import mask_terms
from gattn.ops.dropout import check_probability
from gattn.scores import DotScore

__all__ = [
    "GraphMultisetTransformer",
    "InducedSetAttentionBlock",
    "MultiheadAttentionBlock",
    "PoolingByMultiheadAttention",
    "SetAttentionBlock",
    "SetTransformerAggregation",
]


class MultiheadAttentionBlock(Declared, Module):
    r"""Multi-head attention from one set to another, followed by a linear layer.

    MAB of `Set Transformer: A Framework for Attention-based Permutation-Invariant Neural Networks
    <https://arxiv.org/abs/1810.00825>`_:

    .. math::
        \mathrm{MAB}(x, y) = \mathrm{LN}(h + \mathrm{ReLU}(W h + b)), \qquad
        h = \mathrm{LN}(x + \mathrm{attention}(x, y, y))

    This is a drop-in replacement for `torch_geometric.nn.aggr.utils.MultiheadAttentionBlock`: arguments, parameter
    names and results are the same.

    The authors' program computes another h, which `projected` chooses: heads are not projected to the output, and what
    they are added to is not x, but the queries, so that x may have another number of channels:

    .. math::
        h = \mathrm{LN}\Big(W_Q x + \big\Vert_h\, \mathrm{softmax}\big(c\, (W_Q^h x) (W_K^h y)^\top\big)\, W_V^h y\Big),
        \qquad c = \frac{1}{\sqrt{C}}

    with the C of all heads together, where the paper's scale, and that of the other form, has the C / H of each.

    Args:
        channels: The number of channels, C.
        heads: The number of attention heads. (default: `1`)
        layer_norm: Whether there are norms. (default: `True`)
        dropout: The probability of dropping an attention weight during training. (default: `0.0`)
        device: Where the parameters are. (default: PyTorch's default device)
        projected: Whether the block is that of the authors' program. (default: `False`)
        dim_q: The number of channels of x, which only `projected` can change. (default: `None`, C)
        dim_k: The number of channels of y, likewise. (default: `None`, C)
        scale: The factor c of products, likewise. (default: `None`, as above)

    Shapes:
        - **input:** padded sets `[B, N, C]` and `[B, M, C]`; or, with a packed `graph`, all elements of all sets,
          `[N, C]` and `[M, C]`.
        - **output:** like the first input.

    Raises:
        ValueError: If an option is out of range, or `channels` is not a multiple of `heads`.

    Example:
        >>> import torch, gattn
        >>> block = gattn.nn.MultiheadAttentionBlock(16, heads=4)
        >>> block(torch.randn(2, 3, 16), torch.randn(2, 10, 16)).shape  # 2 pairs of sets, of 3 and 10 elements
        torch.Size([2, 3, 16])
    """

    def __init__(
        self,
        channels: int,
        heads: int = 1,
        layer_norm: bool = True,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        *,
        projected: bool = False,
        dim_q: int | None = None,
        dim_k: int | None = None,
        scale: float | None = None,
    ):
        super().__init__()
        check_at_least(1, channels=channels, heads=heads)
        check_flag("projected", projected)
        self.channels, self.heads, self.dropout, self.projected = channels, heads, dropout, projected
        if projected:
            sizes = channels if dim_q is None else dim_q, channels if dim_k is None else dim_k
            self.attn: Module = _ProjectedAttention(channels, heads, *sizes, scale, dropout, device)
        elif (dim_q, dim_k, scale) != (None, None, None):
            raise InputError("dim_q, dim_k and scale need projected=True.")
        else:
            self.attn = MultiheadAttention(channels, heads, batch_first=True, dropout=dropout, device=device)
        self.lin = Linear(channels, channels, device=device)
        self.layer_norm1 = LayerNorm(channels, device=device) if layer_norm else None
        self.layer_norm2 = LayerNorm(channels, device=device) if layer_norm else None

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        x_mask: Tensor | None = None,
        y_mask: Tensor | None = None,
        *,
        graph: CompleteGraph | None = None,
    ) -> Tensor:
        """Attends from one set to another.

        Args:
            x: The elements that attend, `[B, N, C]` or `[N, C]`.
            y: The elements that they attend to, `[B, M, C]` or `[M, C]`.
            x_mask: Which elements of a padded `x` exist, `[B, N]`. The others attend to nothing. (default: `None`, all)
            y_mask: Which elements of a padded `y` exist, `[B, M]`. (default: `None`, all)
            graph: The graph from `y` to `x`, such as a packed one. (default: `None`, everyone sees everyone)

        Returns:
            The output, like `x`.

        Raises:
            ValueError: If shapes do not fit each other.
        """
        padding = None if y_mask is None else ~y_mask
        if self.projected:
            x, out = self.attn(x, y, padding, graph)
        else:
            out = self.attn(x, y, y, key_padding_mask=padding, need_weights=False, graph=graph)[0]
        if x_mask is not None:
            out = out.masked_fill(~x_mask.unsqueeze(-1), 0.0)
        out = out + x
        if self.layer_norm1 is not None:
            out = self.layer_norm1(out)
        out = out + through(self.lin, out).relu()
        return out if self.layer_norm2 is None else self.layer_norm2(out)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.channels}, heads={self.heads}, layer_norm={self.layer_norm1 is not None}, "
            f"dropout={self.dropout}{', projected=True' * self.projected})"
        )


class _ProjectedAttention(Attention):
    """The attention of the authors' program, which returns its queries and what the heads sum."""

    def __init__(
        self,
        channels: int,
        heads: int,
        dim_q: int,
        dim_k: int,
        scale: float | None,
        dropout: float,
        device: torch.device | str | None,
    ):
        super().__init__()
        check_heads(channels, heads, None)
        check_at_least(1, dim_q=dim_q, dim_k=dim_k)
        check_probability("dropout", dropout)
        self.heads, self.dropout = heads, dropout
        self.score = DotScore(channels**-0.5 if scale is None else scale)
        self.lin_query = Linear(dim_q, channels, device=device)
        self.lin_key: Linear | None = Linear(dim_k, channels, device=device)
        self.lin_value: Linear | None = Linear(dim_k, channels, device=device)

    def reset_parameters(self) -> None:
        """Resets all parameters."""
        for module in self.children():
            reset(module)

    def forward(
        self, x: Tensor, y: Tensor, padding: Tensor | None, graph: CompleteGraph | None
    ) -> tuple[Tensor, Tensor]:
        """The queries, and the sums of values; keys and values lie side by side in `y` if nothing projects it."""
        if self.lin_key is None or self.lin_value is None:
            projected = through(self.lin_query, x), *y.chunk(2, -1)
        else:
            projected = through(self.lin_query, x), through(self.lin_key, y), through(self.lin_value, y)
        query, key, value = (torch.unflatten(rows, -1, (self.heads, -1)) for rows in projected)
        size = x.size(-2), y.size(-2)
        given: Graph = CompleteGraph(*size) if graph is None else graph
        given, _, mask = mask_terms(given, None, padding, False, query.shape[:-3], self.heads, size)
        out = self.attend(query, key, value, given, score=self.score, mask=mask, dropout=self.dropout)
        return projected[0], out.flatten(-2)


class SetAttentionBlock(Declared, Module):
    r"""Multi-head attention among the elements of a set.

    SAB of `Set Transformer <https://arxiv.org/abs/1810.00825>`_:

    .. math::
        \mathrm{SAB}(x) = \mathrm{MAB}(x, x)

    This is a drop-in replacement for `torch_geometric.nn.aggr.utils.SetAttentionBlock`.

    Args:
        channels: The number of channels, C.
        heads: The number of attention heads. (default: `1`)
        layer_norm: Whether there are norms. (default: `True`)
        dropout: The probability of dropping an attention weight during training. (default: `0.0`)
        projected: Whether the block is that of the authors' program; see `MultiheadAttentionBlock`.
            (default: `False`)
        in_channels: The number of channels of the input, which only `projected` can change. (default: `None`, C)
        scale: The factor of products, likewise. (default: `None`)

    Shapes:
        Padded sets `[B, N, C]`, or with a packed `graph` all elements of all sets `[N, C]`; the output is like these.

    Raises:
        ValueError: If an option is out of range, or `channels` is not a multiple of `heads`.

    Example:
        >>> import torch, gattn
        >>> block = gattn.nn.SetAttentionBlock(16, heads=4)
        >>> block(torch.randn(5, 16), graph=gattn.CompleteGraph.packed([3, 2])).shape  # sets of 3 and 2 elements
        torch.Size([5, 16])
    """

    def __init__(
        self,
        channels: int,
        heads: int = 1,
        layer_norm: bool = True,
        dropout: float = 0.0,
        *,
        projected: bool = False,
        in_channels: int | None = None,
        scale: float | None = None,
    ):
        super().__init__()
        options: Any = {"projected": projected, "dim_q": in_channels, "dim_k": in_channels, "scale": scale}
        self.mab = MultiheadAttentionBlock(channels, heads, layer_norm, dropout, **options)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, graph: CompleteGraph | None = None) -> Tensor:
        """Attends among the elements.

        Args:
            x: The elements, `[B, N, C]` or `[N, C]`.
            mask: Which elements of a padded batch exist, `[B, N]`. (default: `None`, all)
            graph: The graph, such as a packed one. (default: `None`, everyone sees everyone)

        Returns:
            The output, like `x`.

        Raises:
            ValueError: If shapes do not fit each other.
        """
        out: Tensor = self.mab(x, x, mask, mask, graph=graph)
        return out

    def __repr__(self) -> str:
        return _like(self, self.mab, f"{self.mab.channels}")


class InducedSetAttentionBlock(Declared, Module):
    r"""Multi-head attention among the elements of a set through a few learnt points, in linear time.

    ISAB of `Set Transformer <https://arxiv.org/abs/1810.00825>`_, with learnt points :math:`I`:

    .. math::
        \mathrm{ISAB}(x) = \mathrm{MAB}(x, h), \qquad h = \mathrm{MAB}(I, x)

    This is a drop-in replacement for `torch_geometric.nn.aggr.utils.InducedSetAttentionBlock`.

    Args:
        channels: The number of channels, C.
        num_induced_points: The number of learnt points.
        heads: The number of attention heads. (default: `1`)
        layer_norm: Whether there are norms. (default: `True`)
        dropout: The probability of dropping an attention weight during training. (default: `0.0`)
        projected: Whether the block is that of the authors' program; see `MultiheadAttentionBlock`.
            (default: `False`)
        in_channels: The number of channels of the input, which only `projected` can change. (default: `None`, C)
        scale: The factor of products, likewise. (default: `None`)

    Shapes:
        Padded sets `[B, N, C]`; the output is like the input.

    Raises:
        ValueError: If an option is out of range, or `channels` is not a multiple of `heads`.

    Example:
        >>> import torch, gattn
        >>> block = gattn.nn.InducedSetAttentionBlock(16, num_induced_points=4)
        >>> block(torch.randn(2, 100, 16)).shape
        torch.Size([2, 100, 16])
    """

    _starts = (("ind", torch.nn.init.xavier_uniform_), ("mab1", reset), ("mab2", reset))

    def __init__(
        self,
        channels: int,
        num_induced_points: int,
        heads: int = 1,
        layer_norm: bool = True,
        dropout: float = 0.0,
        *,
        projected: bool = False,
        in_channels: int | None = None,
        scale: float | None = None,
    ):
        super().__init__()
        check_at_least(1, channels=channels, num_induced_points=num_induced_points)
        options: Any = {"projected": projected, "scale": scale}
        self.ind = Parameter(torch.empty(1, num_induced_points, channels))
        self.mab1 = MultiheadAttentionBlock(channels, heads, layer_norm, dropout, dim_k=in_channels, **options)
        self.mab2 = MultiheadAttentionBlock(channels, heads, layer_norm, dropout, dim_q=in_channels, **options)
        self.reset_parameters()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attends among the elements.

        Args:
            x: The elements, `[B, N, C]`.
            mask: Which elements exist, `[B, N]`. (default: `None`, all)

        Returns:
            The output, `[B, N, C]`.

        Raises:
            ValueError: If shapes do not fit each other.
        """
        h = self.mab1(self.ind.expand(x.size(0), -1, -1), x, y_mask=mask)
        out: Tensor = self.mab2(x, h, x_mask=mask)
        return out

    def __repr__(self) -> str:
        return _like(self, self.mab1, f"{self.ind.size(2)}, num_induced_points={self.ind.size(1)}")


class PoolingByMultiheadAttention(Declared, Module):
    r"""Multi-head attention from a few learnt seeds to the elements of a set, which become as many vectors.

    PMA of `Set Transformer <https://arxiv.org/abs/1810.00825>`_, with learnt seeds :math:`S`:

    .. math::
        \mathrm{PMA}(x) = \mathrm{MAB}(S, \mathrm{ReLU}(W x + b))

    This is a drop-in replacement for `torch_geometric.nn.aggr.utils.PoolingByMultiheadAttention`.

    Args:
        channels: The number of channels, C.
        num_seed_points: The number of seeds, K. (default: `1`)
        heads: The number of attention heads. (default: `1`)
        layer_norm: Whether there are norms. (default: `True`)
        dropout: The probability of dropping an attention weight during training. (default: `0.0`)
        projected: Whether the block is that of the authors' program; see `MultiheadAttentionBlock`.
            (default: `False`)
        scale: The factor of products, which only `projected` can change. (default: `None`)
        lin: Whether elements go through the linear layer and its ReLU, which the authors' program leaves out.
            (default: `True`)

    Shapes:
        - **input:** padded sets `[B, N, C]`; or all elements of all sets `[N, C]` and the sets' `sizes`.
        - **output:** `[B, K, C]`.

    Raises:
        ValueError: If an option is out of range, or `channels` is not a multiple of `heads`.

    Example:
        >>> import torch, gattn
        >>> pool = gattn.nn.PoolingByMultiheadAttention(16, num_seed_points=2)
        >>> pool(torch.randn(5, 16), sizes=[3, 2]).shape  # two sets, of 3 and 2 elements
        torch.Size([2, 2, 16])
    """

    _starts = (("seed", torch.nn.init.xavier_uniform_), ("mab", reset))

    def __init__(
        self,
        channels: int,
        num_seed_points: int = 1,
        heads: int = 1,
        layer_norm: bool = True,
        dropout: float = 0.0,
        *,
        projected: bool = False,
        scale: float | None = None,
        lin: bool = True,
    ):
        super().__init__()
        check_at_least(1, channels=channels, num_seed_points=num_seed_points)
        check_flag("lin", lin)
        self.lin = Linear(channels, channels) if lin else None
        self.seed = Parameter(torch.empty(1, num_seed_points, channels))
        self.mab = MultiheadAttentionBlock(channels, heads, layer_norm, dropout, projected=projected, scale=scale)
        self.reset_parameters()

    def forward(self, x: Tensor, mask: Tensor | None = None, *, sizes: list[int] | None = None) -> Tensor:
        """Attends from the seeds to the elements of each set.

        Args:
            x: The elements, `[B, N, C]` or `[N, C]`.
            mask: Which elements of a padded batch exist, `[B, N]`. (default: `None`, all)
            sizes: The numbers of elements of the sets, if they are laid end to end. (default: `None`, `x` is padded)

        Returns:
            The sets, `[B, K, C]`.

        Raises:
            ValueError: If shapes do not fit each other.
        """
        if sizes is not None:
            return self.of_packed(x, CompleteGraph.packed([self.seed.size(1)] * len(sizes), sizes), len(sizes))
        x = x if self.lin is None else through(self.lin, x).relu()
        out: Tensor = self.mab(self.seed.expand(x.size(0), -1, -1), x, y_mask=mask)
        return out

    def of_packed(self, x: Tensor, graph: CompleteGraph, num_sets: int) -> Tensor:
        """The same for sets that lie end to end.

        Args:
            x: The elements, `[N, C]`.
            graph: The packed graph from the elements of each set to its K seeds.
            num_sets: The number of sets, B.
        """
        x = x if self.lin is None else through(self.lin, x).relu()
        seeds = self.seed.expand(num_sets, -1, -1)
        return self.mab(seeds.flatten(0, 1), x, graph=graph).view_as(seeds)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return _like(self, self.mab, f"{self.seed.size(2)}, num_seed_points={self.seed.size(1)}")


def _like(module: Module, block: MultiheadAttentionBlock, sizes: str) -> str:
    options = f"heads={block.heads}, layer_norm={block.layer_norm1 is not None}, dropout={block.dropout}"
    options += ", projected=True" * block.projected
    return f"{type(module).__name__}({sizes}, {options})"


class _OfSets(Declared, Aggregation):
    """What the two aggregations share: sets of elements laid end to end, so that nothing is padded."""

    channels: int
    _parts: int = 1
    """How many rows of features lie side by side."""

    def forward(
        self,
        x: Tensor,
        index: Tensor | None = None,
        ptr: Tensor | None = None,
        dim_size: int | None = None,
        dim: int = -2,
        max_num_elements: int | None = None,
    ) -> Tensor:
        """Aggregates the elements of each set.

        Args:
            x: The elements, `[N, C]`.
            index: The set of each element, `[N]`, in any order. (default: `None`, one set)
            ptr: The first element of each set and the number of elements, `[B + 1]`. It is not read if there is an
                `index`, as PyG passes both. (default: `None`)
            dim_size: The number of sets, B. (default: `None`, the number in `index`)
            dim: The dimension of the elements. (default: `-2`)
            max_num_elements: Not used; it is here because PyG passes it. (default: `None`)

        Returns:
            The sets; an empty one becomes zero.

        Raises:
            ValueError: If shapes do not fit each other, or `dim_size` is too small.
            IndexError: If an index is negative.
        """
        self.assert_two_dimensional_input(x, dim)
        if x.size(-1) != self.channels * self._parts:
            raise InputError(f"x has {x.size(-1)} channels, but this layer was made for channels={self.channels}.")
        x = x.movedim(dim, -2)
        index, counts = counts_of(x, index, ptr, dim_size)
        if torch.compiler.is_compiling() or bool((index.diff() < 0).any()):
            order = index.argsort(stable=True)
            x, index = x.index_select(-2, order), index.index_select(0, order)
        out = self._of_sets(x, index, counts)
        return out.masked_fill((counts == 0).unsqueeze(-1), 0.0)

    def _of_sets(self, x: Tensor, index: Tensor, counts: Tensor) -> Tensor:
        """The output for elements set by set, the set of each of them, and the number of each set's."""
        raise NotImplementedError


class SetTransformerAggregation(_OfSets):
    r"""Set Transformer as an aggregation: attention among the elements of each set, then from seeds to them.

    The readout of `Graph Neural Networks with Adaptive Readouts <https://arxiv.org/abs/2211.04952>`_, with the blocks
    of `Set Transformer <https://arxiv.org/abs/1810.00825>`_:

    .. math::
        \mathrm{out} = \big\Vert_k\, \mathrm{SAB}(\mathrm{PMA}(\mathrm{SAB}(x)))_k

    This is a drop-in replacement for `torch_geometric.nn.SetTransformerAggregation`: arguments, parameter names and
    results are the same. The sets are laid end to end instead of being padded, and `index` may have any order.

    Args:
        channels: The number of channels, C.
        num_seed_points: The number of seeds, K. (default: `1`)
        num_encoder_blocks: The number of SABs among the elements. (default: `1`)
        num_decoder_blocks: The number of SABs among the seeds. (default: `1`)
        heads: The number of attention heads. (default: `1`)
        concat: Whether the seeds' vectors are laid side by side, instead of being averaged. (default: `True`)
        layer_norm: Whether there are norms. (default: `False`)
        dropout: The probability of dropping an attention weight during training. (default: `0.0`)

    Shapes:
        - **input:** elements `[N, C]` and the set of each, `[N]`.
        - **output:** `[B, K * C]`, or `[B, C]` without `concat`. An empty set becomes zero.

    Raises:
        ValueError: If an option is out of range, or `channels` is not a multiple of `heads`.

    Example:
        >>> import torch, gattn
        >>> pool = gattn.nn.SetTransformerAggregation(16, num_seed_points=2, heads=4)
        >>> pool(torch.randn(5, 16), torch.tensor([0, 0, 0, 1, 1])).shape
        torch.Size([2, 32])
    """

    _shown = "channels num_seed_points= heads= layer_norm= dropout="

    def __init__(
        self,
        channels: int,
        num_seed_points: int = 1,
        num_encoder_blocks: int = 1,
        num_decoder_blocks: int = 1,
        heads: int = 1,
        concat: bool = True,
        layer_norm: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__()
        check_at_least(0, num_encoder_blocks=num_encoder_blocks, num_decoder_blocks=num_decoder_blocks)
        check_flag("concat", concat)
        self.channels, self.num_seed_points, self.heads = channels, num_seed_points, heads
        self.concat, self.layer_norm, self.dropout = concat, layer_norm, dropout
        options = heads, layer_norm, dropout
        self.encoders = ModuleList(SetAttentionBlock(channels, *options) for _ in range(num_encoder_blocks))
        self.pma = PoolingByMultiheadAttention(channels, num_seed_points, *options)
        self.decoders = ModuleList(SetAttentionBlock(channels, *options) for _ in range(num_decoder_blocks))

    def _of_sets(self, x: Tensor, index: Tensor, counts: Tensor) -> Tensor:
        graph, to_seeds = graphs_of_sets(index, counts, self.num_seed_points)
        for encoder in self.encoders:
            x = encoder(x, graph=graph)
        x = self.pma.of_packed(x, to_seeds, counts.size(0))
        for decoder in self.decoders:
            x = decoder(x)
        return x.flatten(1, 2) if self.concat else x.mean(1)


class GraphMultisetTransformer(_OfSets):
    r"""Pooling of a set to a few elements by attention, attention among these, and pooling of these to one.

    The readout of `Accurate Learning of Graph Representations with Graph Multiset Pooling
    <https://arxiv.org/abs/2102.11533>`_:

    .. math::
        \mathrm{out} = \mathrm{PMA}_1(\mathrm{SAB}(\mathrm{PMA}_k(x)))

    This is a drop-in replacement for `torch_geometric.nn.GraphMultisetTransformer`: arguments, parameter names and
    results are the same. The sets are laid end to end instead of being padded, and `index` may have any order.

    In the paper, keys and values of the first pooling are graph convolutions of the elements, which PyG leaves out.
    With `conv`, they are, in the form of the authors' program (`projected` of `MultiheadAttentionBlock`):

    .. math::
        K = \mathrm{conv}_K(x, E), \qquad V = \mathrm{conv}_V(x, E)

    Args:
        channels: The number of channels, C.
        k: The number of elements after the first pooling.
        num_encoder_blocks: The number of SABs among these. (default: `1`)
        heads: The number of attention heads. (default: `1`)
        layer_norm: Whether there are norms. (default: `False`)
        dropout: The probability of dropping an attention weight during training. (default: `0.0`)
        conv: Makes a layer on the edges that keeps the number of channels, such as
            `lambda: gattn.nn.GCNConv(channels, channels)`. (default: `None`, keys and values are linear)

    Shapes:
        - **input:** elements `[N, C]` and the set of each, `[N]`; with `conv`, also edges `[2, E]`.
        - **output:** `[B, C]`. An empty set becomes zero.

    Raises:
        ValueError: If an option is out of range, or `channels` is not a multiple of `heads`.

    Example:
        >>> import torch, gattn
        >>> pool = gattn.nn.GraphMultisetTransformer(16, k=4, heads=2)
        >>> pool(torch.randn(5, 16), torch.tensor([0, 0, 0, 1, 1])).shape
        torch.Size([2, 16])
    """

    _shown = "channels k= heads= layer_norm= dropout="

    def __init__(
        self,
        channels: int,
        k: int,
        num_encoder_blocks: int = 1,
        heads: int = 1,
        layer_norm: bool = False,
        dropout: float = 0.0,
        conv: Callable[[], Module] | None = None,
    ):
        super().__init__()
        check_at_least(0, num_encoder_blocks=num_encoder_blocks)
        self.channels, self.k, self.heads, self.layer_norm, self.dropout = channels, k, heads, layer_norm, dropout
        options = heads, layer_norm, dropout
        self.pma1 = PoolingByMultiheadAttention(channels, k, *options, projected=conv is not None, lin=conv is None)
        self.convs = None if conv is None else ModuleList([conv(), conv()])
        self._parts = 1 if conv is None else 2
        if conv is not None:
            attn: Any = self.pma1.mab.attn
            attn.lin_key = attn.lin_value = None
        self.encoders = ModuleList(SetAttentionBlock(channels, *options) for _ in range(num_encoder_blocks))
        self.pma2 = PoolingByMultiheadAttention(channels, 1, *options)

    def forward(
        self,
        x: Tensor,
        index: Tensor | None = None,
        ptr: Tensor | None = None,
        dim_size: int | None = None,
        dim: int = -2,
        max_num_elements: int | None = None,
        edge_index: Any = None,
    ) -> Tensor:
        """Aggregates the elements of each set, as `SetTransformerAggregation` does; `edge_index` is for `conv`."""
        if (self.convs is None) != (edge_index is None):
            raise InputError("edge_index is for a layer with conv, which needs it.")
        if self.convs is not None:
            x = torch.cat([conv(x, edge_index) for conv in self.convs], -1)
        return super().forward(x, index, ptr, dim_size, dim, max_num_elements)

    def _of_sets(self, x: Tensor, index: Tensor, counts: Tensor) -> Tensor:
        _, to_seeds = graphs_of_sets(index, counts, self.pma1.seed.size(1))
        x = self.pma1.of_packed(x, to_seeds, counts.size(0))
        for encoder in self.encoders:
            x = encoder(x)
        return self.pma2(x).squeeze(1)  # type: ignore[no-any-return]
