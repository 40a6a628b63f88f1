"""The Point Transformer layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gattn.errors import InputError, InputTypeError, check_at_least, is_integer
from gattn.graphs import FLOWS, GraphLike
from gattn.nn.shared.attention_conv import BaseConv
from gattn.nn.shared.dtypes import check_dtype
from gattn.nn.shared.linear import Linear
from gattn.scores import GATScore
from gattn.settings import require_finite

__all__ = ["PointTransformerConv"]


class PointTransformerConv(BaseConv):
    r"""The layer of `Point Transformer <https://arxiv.org/abs/2012.09164>`_: vector attention on a cloud of points.

    .. math::
        x'_i = \sum_{j \in \mathcal{N}(i) \cup \{i\}} \alpha_{ij} \odot (W_3 x_j + \delta_{ij}), \qquad
        \alpha_{i\cdot} = \mathrm{softmax}_j \, \gamma(W_1 x_i - W_2 x_j + \delta_{ij}), \qquad
        \delta_{ij} = h(p_i - p_j)

    Each channel has weights of its own, like a head with one channel.

    A drop-in replacement for `torch_geometric.nn.PointTransformerConv`, with the same arguments, parameter names and
    results. It also supports features `[B, N, F]` over one graph, sparse features, `SparseGraph` and `CompleteGraph`,
    and float32 accumulation in half precision. Differences: with `flow="target_to_source"`, :math:`W_1` still belongs
    to the targets and :math:`W_2` and :math:`W_3` to the sources, and a pair `x` gives as many rows as there are
    targets.

    Args:
        in_channels: Channels of the input; `-1` infers them from the first call; a pair for a bipartite graph
            (sources, targets).
        out_channels: Channels of the output.
        pos_nn: The network :math:`h`, which maps differences of positions, `[E, D]`, to `[E, F_out]`.
            (default: `None`, a linear layer for points in three dimensions)
        attn_nn: The network :math:`\gamma`, which maps `[E, F_out]` to `[E, F_out]`, or to `[E, 1]` for a weight that
            all channels share. (default: `None`, the identity)
        add_self_loops: Whether every point attends to itself. (default: `True`)
        **kwargs: Arguments of `torch_geometric.nn.conv.MessagePassing`, such as `flow` and `aggr`.

    Shapes:
        - **input:** features `[N, F_in]` or `([M, F_src], [N, F_dst])`, positions `[N, D]` or `([M, D], [N, D])`, edge
          indices `[2, E]`.
        - **output:** `[N, F_out]`.

    Raises:
        ValueError: If `out_channels` is not positive, or (in `forward`) an input does not fit.

    Example:
        >>> import torch, gattn
        >>> conv = gattn.nn.PointTransformerConv(16, 8)
        >>> x, pos = torch.randn(3, 16), torch.randn(3, 3)
        >>> conv(x, pos, torch.tensor([[0, 1], [1, 2]])).shape
        torch.Size([3, 8])
    """

    flat_messages = True

    _shown = "in_channels out_channels"

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        pos_nn: Callable[[Tensor], Tensor] | None = None,
        attn_nn: Callable[[Tensor], Tensor] | None = None,
        add_self_loops: bool = True,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.in_channels = in_channels
        self.out_channels = out_channels
        check_at_least(1, out_channels=out_channels)
        self.add_self_loops = add_self_loops

        source_channels, target_channels = (in_channels,) * 2 if is_integer(in_channels) else in_channels
        self.pos_nn = Linear(3, out_channels) if pos_nn is None else pos_nn
        self.attn_nn = attn_nn
        self.lin = Linear(source_channels, out_channels, bias=False)
        self.lin_src = Linear(source_channels, out_channels, bias=False)
        self.lin_dst = Linear(target_channels, out_channels, bias=False)
        self.reset_parameters()

    def forward(
        self, x: Tensor | tuple[Tensor, Tensor], pos: Tensor | tuple[Tensor, Tensor], edge_index: GraphLike
    ) -> Tensor:
        """Attends over each point's neighbours.

        Args:
            x: Features `[..., N, F]`, or a pair (sources, targets).
            pos: Positions `[..., N, D]`, or a pair (sources, targets).
            edge_index: The graph, in any form that `gattn.attend` takes.

        Raises:
            TypeError: If an input is not a tensor.
            ValueError: If features, positions and graph do not fit, or a network returns a wrong shape; the message
                says which.
            IndexError: If an index of the graph is out of range (in compiled code, when the kernels run).
        """
        sources, targets = self._inputs(x)
        if targets is None:
            raise InputError("PointTransformerConv compares sources with targets: x[1] may not be None.")
        source_pos, target_pos = self._positions(pos, sources, targets)
        graph = self._graph(edge_index, sources, targets, self.add_self_loops)
        if not graph.is_dense:
            graph = graph.listed().with_listed_loops()
        edges = graph.edge_list(sources.device)
        source, target = edges.edge_index if edges.flow == FLOWS[0] else edges.edge_index.flip(0)

        key, query, value = self.lin_src(sources), self.lin_dst(targets), self.lin(sources)
        difference = target_pos.index_select(-2, target) - source_pos.index_select(-2, source)
        delta = self._per_edge("pos_nn", self.pos_nn(difference), source)
        terms: tuple[Tensor | None, Tensor | None, Tensor] = query, -key, delta
        if self.attn_nn is not None:
            hidden = query.index_select(-2, target) - key.index_select(-2, source) + delta
            logits = self._per_edge("attn_nn", self.attn_nn(hidden), source)
            terms = None, None, logits
        query, key, edge = terms
        out = self.attend(
            query,
            key,
            value.unsqueeze(-1),
            graph,
            score=GATScore(1.0),
            edge=edge,
            edge_value=delta.unsqueeze(-1),
            mask=graph.kept,
        )
        assert isinstance(out, Tensor)
        return out.squeeze(-1)

    def _positions(self, pos: Any, sources: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The positions of sources and targets, checked."""
        pair = pos if isinstance(pos, (tuple, list)) else (pos, pos)
        if len(pair) != 2:
            raise InputTypeError(
                f"pos must be a tensor, or a pair of tensors (sources, targets); got {len(pair)} of them."
            )
        for name, positions, features in (("sources", pair[0], sources), ("targets", pair[1], targets)):
            if not isinstance(positions, Tensor):
                raise InputTypeError(f"the positions of the {name} must be a tensor; got {type(positions).__name__}.")
            if not positions.is_floating_point():
                raise InputError(
                    f"the positions of the {name} must be of a floating-point type; got {positions.dtype}: use "
                    ".float()."
                )
            if positions.dim() < 2 or positions.size(-2) != features.size(-2):
                raise InputError(
                    f"the positions of the {name} must have one row per point, [{features.size(-2)}, D]; got "
                    f"{list(positions.shape)}."
                )
            if isinstance(self.pos_nn, Linear) and positions.size(-1) != self.pos_nn.in_channels:
                raise InputError(
                    f"without a pos_nn of your own, points must have {self.pos_nn.in_channels} coordinates; got "
                    f"{positions.size(-1)}."
                )
        check_dtype(self, pos=pair[0])
        require_finite(pos=pair[0]) if pair[0] is pair[1] else require_finite(**{"pos[0]": pair[0], "pos[1]": pair[1]})
        return pair[0], pair[1]

    def _per_edge(self, name: str, out: Tensor, source: Tensor) -> Tensor:
        """The output of a network for each edge, as `[..., E, F_out]`."""
        if out.dim() < 2 or out.size(-2) != source.size(0) or out.size(-1) not in (1, self.out_channels):
            raise InputError(
                f"{name} must give [E, {self.out_channels}], here [{source.size(0)}, {self.out_channels}]; got "
                f"{list(out.shape)}."
            )
        return out.expand(*out.shape[:-1], self.out_channels)
