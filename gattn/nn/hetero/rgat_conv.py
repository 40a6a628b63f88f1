"""The RGAT layer, for graphs with several types of edges."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.nn.inits import constant, glorot, ones, reset, zeros
from torch_geometric.utils import scatter

from gattn.attention import fused
from gattn.errors import InputError, InputTypeError, check_at_least
from gattn.graphs import FLOWS, Graph, GraphLike, SparseGraph
from gattn.graphs.edge_lists import check_later
from gattn.nn.shared.attention_conv import AttentionConv, AttentionWeights
from gattn.nn.shared.linear import Linear, is_plain
from gattn.recording import record
from gattn.scores import GATScore
from gattn.torch_private import is_readable

__all__ = ["RGATConv"]

_MECHANISMS = ("within-relation", "across-relation")
_MODES = ("additive-self-attention", "multiplicative-self-attention")
_MODS = (None, "additive", "scaled", "f-additive", "f-scaled")


def _reset_l2(l2: Tensor) -> None:
    constant(l2, 1 / l2.size(0))


class RGATConv(AttentionConv):
    r"""The layer of `Relational Graph Attention Networks <https://arxiv.org/abs/1904.05811>`_.

    Each relation r has its own matrix. With :math:`h_i^{(r)} = W^{(r)} x_i`, the logits are

    .. math::
        s_{ij}^{(r)} = \mathrm{LeakyReLU}(Q^{\top} h_i^{(r)} + K^{\top} h_j^{(r)} + E^{\top} W_e e_{ij})
        \quad \text{or} \quad
        s_{ij}^{(r)} = Q^{\top} h_i^{(r)} \odot K^{\top} h_j^{(r)} \odot E^{\top} W_e e_{ij},

    additive or multiplicative, and the output is

    .. math::
        x'_i = \sum_r \sum_{j \in \mathcal{N}_r(i)} \alpha_{ij}^{(r)} h_j^{(r)}.

    The weights of a target compete either within each relation or across all of them. `mod` changes the sum so that it
    depends on the number of neighbours, as in `Improving Attention Mechanism in Graph Neural Networks via Cardinality
    Preservation <https://arxiv.org/abs/1907.02204>`_:

    =============== ============================================================================
    `mod`           what is summed
    =============== ============================================================================
    `None`          :math:`\alpha_{ij} h_j`
    `"additive"`    :math:`(\alpha_{ij} + w) \odot h_j`
    `"scaled"`      :math:`\psi(d_i) \odot \alpha_{ij} h_j`, with a small network :math:`\psi`
    `"f-additive"`  :math:`(\alpha_{ij} + 1) \, h_j`
    `"f-scaled"`    :math:`d_i \, \alpha_{ij} h_j`
    =============== ============================================================================

    Here :math:`d_i` is the number of all edges of target i, whatever their relation.

    Each pair of a relation and a node that occurs is transformed once, in one batched matrix product for all relations.
    No matrix is copied per edge.

    A drop-in replacement for `torch_geometric.nn.RGATConv`, with the same arguments, parameter names and results. It
    also supports features `[B, N, F]` over one graph, pairs of sources and targets with either flow, `SparseGraph`,
    relations as the integer values of a sparse adjacency, and float32 accumulation in half precision. Differences: the
    parameter `l2`, which PyG leaves uninitialised, starts at `1 / out_channels`, and `reset_parameters` also resets
    `w`; an unknown `mod`, or `edge_dim` without edge features, is an error instead of being ignored.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output, for each head and dimension.
        num_relations: Number of relations.
        num_bases: If given, the matrices of the relations are combinations of this many bases. (default: `None`)
        num_blocks: If given, the matrices of the relations are block-diagonal, with this many blocks.
            (default: `None`)
        mod: How the number of neighbours is used: `"additive"`, `"scaled"`, `"f-additive"`, `"f-scaled"` or `None`.
            (default: `None`)
        attention_mechanism: Whether weights compete `"within-relation"` or `"across-relation"`.
            (default: `"across-relation"`)
        attention_mode: `"additive-self-attention"` or `"multiplicative-self-attention"`.
            (default: `"additive-self-attention"`)
        heads: Number of heads. (default: `1`)
        dim: Number of logits, and therefore of outputs, per head; more than 1 only with multiplicative attention.
            (default: `1`)
        concat: Whether heads are concatenated rather than averaged. (default: `True`)
        negative_slope: Slope of the LeakyReLU. (default: `0.2`)
        dropout: Probability that an attention weight is dropped, in training; requires `mod=None`. (default: `0.0`)
        edge_dim: Channels of the edge features. (default: `None`, no edge features)
        bias: Whether a bias is learnt. (default: `True`)
        **kwargs: Arguments of `torch_geometric.nn.conv.MessagePassing`, such as `flow` and `aggr`. Aggregations other
            than the sum are computed in plain PyTorch, edge by edge.

    Shapes:
        - **input:** features `[N, F_in]` or `([M, F_in], [N, F_in])`, edge indices `[2, E]`, relations `[E]`, edge
          features `[E, D]`.
        - **output:** `[N, H * dim * F_out]`, or `[N, dim * F_out]` with `concat=False`.

    Raises:
        ValueError: If an option is out of range or options exclude each other, or (in `forward`) an input does not fit.

    Example:
        >>> import torch, gattn
        >>> conv = gattn.nn.RGATConv(16, 8, num_relations=2, heads=4)
        >>> conv(torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]]), torch.tensor([0, 1])).shape
        torch.Size([3, 32])
    """

    in_channels: int
    e: Parameter

    _starts = (
        *((name, glorot) for name in ("weight", "basis", "att", "q", "k")),
        *((name, zeros) for name in ("bias", "b1", "b2")),
        *((name, ones) for name in ("w", "l1")),
        ("l2", _reset_l2),
        ("lin_edge", reset),
        ("e", glorot),
    )

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_relations: int,
        num_bases: int | None = None,
        num_blocks: int | None = None,
        mod: str | None = None,
        attention_mechanism: str = "across-relation",
        attention_mode: str = "additive-self-attention",
        heads: int = 1,
        dim: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        edge_dim: int | None = None,
        bias: bool = True,
        **kwargs: Any,
    ):
        super().__init__(
            in_channels,
            out_channels,
            heads=heads,
            concat=concat,
            dropout=dropout,
            value_dropout=0.0,
            edge_dim=edge_dim,
            **kwargs,
        )
        self.num_relations = num_relations
        self.num_bases = num_bases
        self.num_blocks = num_blocks
        self.mod = mod
        self.attention_mechanism = attention_mechanism
        self.attention_mode = attention_mode
        self.dim = dim
        self.negative_slope = negative_slope
        self._check_options()

        channels, logits = heads * out_channels, heads * dim
        self.q = Parameter(torch.empty(channels, logits))
        self.k = Parameter(torch.empty(channels, logits))
        if bias:
            self.bias = Parameter(torch.empty((logits if concat else dim) * out_channels))
        else:
            self.register_parameter("bias", None)
        if edge_dim is not None:
            self.lin_edge = Linear(edge_dim, channels, bias=False, weight_initializer="glorot")
            self.e = Parameter(torch.empty(channels, logits))
        else:
            self.lin_edge = None
            self.register_parameter("e", None)
        if num_bases is not None:
            self.att = Parameter(torch.empty(num_relations, num_bases))
            self.basis = Parameter(torch.empty(num_bases, in_channels, channels))
        elif num_blocks is not None:
            block = in_channels // num_blocks, channels // num_blocks
            self.weight = Parameter(torch.empty(num_relations, num_blocks, *block))
        else:
            self.weight = Parameter(torch.empty(num_relations, in_channels, channels))
        self.w = Parameter(torch.empty(out_channels))
        self.l1 = Parameter(torch.empty(1, out_channels))
        self.b1 = Parameter(torch.empty(1, out_channels))
        self.l2 = Parameter(torch.empty(out_channels, out_channels))
        self.b2 = Parameter(torch.empty(1, out_channels))
        self.reset_parameters()

    def _check_options(self) -> None:
        for name in ("in_channels", "num_relations", "num_bases", "num_blocks", "dim"):
            if getattr(self, name) is not None:
                check_at_least(1, **{name: getattr(self, name)})
        for name, known in (("attention_mechanism", _MECHANISMS), ("attention_mode", _MODES), ("mod", _MODS)):
            if getattr(self, name) not in known:
                choices = ", ".join(repr(choice) for choice in known)
                raise InputError(f"{name} must be one of {choices}; got {getattr(self, name)!r}.")
        if self.dim > 1 and self.attention_mode == _MODES[0]:
            raise InputError(f"dim={self.dim} requires attention_mode={_MODES[1]!r}: additive logits need dim=1.")
        if self.dropout > 0 and self.mod is not None:
            raise InputError(
                f"dropout changes the number of neighbours, which mod={self.mod!r} preserves: use mod=None or "
                "dropout=0."
            )
        if self.num_bases is not None and self.num_blocks is not None:
            raise InputError(
                "a relation's matrix is a combination of bases or block-diagonal: give num_bases or num_blocks, not "
                "both."
            )
        channels = self.heads * self.out_channels
        if self.num_blocks is not None and (self.in_channels % self.num_blocks or channels % self.num_blocks):
            raise InputError(
                f"num_blocks={self.num_blocks} must divide in_channels={self.in_channels} and heads * out_channels="
                f"{channels}."
            )

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: GraphLike,
        edge_type: Tensor | None = None,
        edge_attr: Tensor | None = None,
        size: tuple[int | None, int | None] | None = None,
        return_attention_weights: bool | None = None,
    ) -> Tensor | tuple[Tensor, AttentionWeights]:
        """Attends over each node's neighbours.

        Args:
            x: Features `[..., N, F]`, or a pair (sources, targets).
            edge_index: The graph, in any form that has a list of edges.
            edge_type: The relation of each edge, `[E]`, integers from 0. (default: `None`, the integer values of a
                sparse adjacency)
            edge_attr: Edge features `[E, D]`, with `edge_dim`. (default: `None`, the vectors that a sparse adjacency
                holds)
            size: The number of rows and columns of the graph, compared with the features. (default: `None`)
            return_attention_weights: If it is `True` or, as in PyG's layer, `False`, the weights are returned as well.
                (default: `None`)

        Returns:
            `[..., N, H * dim * F_out]`; with weights, a pair of that and the result of `SparseGraph.with_weights` for
            weights `[E, H * dim]` before `mod` and dropout.

        Raises:
            TypeError: If an input is not a tensor.
            ValueError: If features, graph and options do not fit; the message says which.
            IndexError: If an index of the graph or a relation is out of range (in compiled code RuntimeError, when it
                runs).
        """
        sources, targets = self._inputs(x)
        if targets is None:
            raise InputError("RGATConv compares sources with targets: x[1] may not be None.")
        graph = self._graph(edge_index, sources, targets, False, size)
        graph, edge = self._edge_term(graph, edge_attr)
        assert edge is None or isinstance(edge, Tensor)
        relation = self._relations(graph, edge_type)
        out, alpha = self._attend_relations(targets, sources, graph, relation, edge)
        record(self, graph, alpha)
        if not self.concat:
            out = out.view(*out.shape[:-2], self.heads, self.dim, self.out_channels).mean(-3)
        out = out.flatten(-2)
        if self.bias is not None:
            out = out + self.bias
        return (out, graph.with_weights(alpha)) if isinstance(return_attention_weights, bool) else out

    def _relations(self, graph: Graph, edge_type: Any) -> Tensor:
        """The relation of each edge, checked."""
        if graph.is_dense or graph.self_loops:
            raise InputError(
                f"each edge has a relation, so RGATConv needs a graph that lists its edges, including self-loops; got "
                f"{graph}: pass its edge_index, and a relation for each of these edges."
            )
        if edge_type is None:
            edge_type = graph.values
        if not isinstance(edge_type, Tensor):
            raise InputTypeError(f"edge_type must be a tensor, the relation of each edge; got {edge_type}.")
        if edge_type.is_floating_point() or edge_type.is_complex() or edge_type.dtype == torch.bool:
            raise InputError(f"edge_type must hold relations, integers from 0; got {edge_type.dtype}.")
        if edge_type.shape != (graph.num_edges,):
            raise InputError(
                f"edge_type must have one relation per edge, [{graph.num_edges}]; got shape {list(edge_type.shape)}."
            )
        if edge_type.device != self.k.device:
            raise InputError(
                f"edge_type is on {edge_type.device}, the features are on {self.k.device}: move one of them."
            )
        if edge_type.numel() and is_readable(edge_type):
            lowest, highest = (int(bound) for bound in edge_type.aminmax())
            if lowest < 0 or highest >= self.num_relations:
                raise IndexError(
                    f"edge_type holds relation {lowest if lowest < 0 else highest}, but this layer was made for "
                    f"num_relations={self.num_relations} (0 to {self.num_relations - 1})."
                )
        check_later(edge_type, self.num_relations, "edge_type holds a relation")
        return edge_type.long()

    def _project_edges(self, lin_edge: Linear, edge_attr: Tensor) -> Tensor:
        """The edges' part of the logits, `[E, H * dim]`; without features `[E, H * C]` if the layer is linear."""
        if is_plain(lin_edge):
            return F.linear(edge_attr, self.e.t() @ lin_edge.weight)
        projected: Tensor = lin_edge(edge_attr) @ self.e
        return projected

    def _weights(self) -> Tensor:
        """The matrices of all relations, `[R, F, H * C]`."""
        if self.num_bases is not None:
            return (self.att @ self.basis.flatten(1)).view(self.num_relations, *self.basis.shape[1:])
        if self.num_blocks is not None:
            place = torch.eye(self.num_blocks, dtype=self.weight.dtype, device=self.weight.device)
            blocks = self.weight.unsqueeze(3) * place.view(self.num_blocks, 1, self.num_blocks, 1)
            return blocks.flatten(3).flatten(1, 2)
        return self.weight

    def _attend_relations(
        self, targets: Tensor, sources: Tensor, graph: Graph, relation: Tensor, edge: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attends over the edges of all relations.

        Args:
            targets: Features of the targets, `[..., N, F]`.
            sources: Features of the sources, `[..., M, F]`.
            graph: The graph.
            relation: The relation of each edge, `[E]`.
            edge: The edges' part of the logits, `[E, H * dim]`.

        Returns:
            The output, `[..., N, H * dim, C]`, and the weights, `[..., E, H * dim]`.
        """
        num_targets = targets.size(-2)
        edges = graph.edge_list(sources.device)
        source, target = edges.edge_index if edges.flow == FLOWS[0] else edges.edge_index.flip(0)
        of_source = _Pairs.of(relation, source, sources.size(-2), self.num_relations)
        of_target = _Pairs.of(relation, target, num_targets, self.num_relations)
        weight = self._weights()
        projected = of_source.product(sources, weight)
        value = self._heads(projected).repeat_interleave(self.dim, -2) if self.dim > 1 else self._heads(projected)
        keys, queries = projected @ self.k, of_target.product(targets, weight @ self.q)

        # A softmax runs over a pair of a relation and a node, or over a node.
        within = self.attention_mechanism == _MECHANISMS[0]
        ends, num_ends = (of_target.place, of_target.node.numel()) if within else (target, num_targets)
        pairs = SparseGraph(torch.stack([of_source.place, ends]), num_ends, keys.size(-2))
        terms: dict[str, Any] = {"query": None, "key": keys}
        if self.attention_mode == _MODES[1]:
            logits = queries.index_select(-2, of_target.place) * keys.index_select(-2, of_source.place)
            terms |= {"key": None, "bias": logits if edge is None else logits * edge}
        elif within:
            terms |= {"query": queries, "edge": edge}
        else:
            term = queries.index_select(-2, of_target.place)
            terms["edge"] = term if edge is None else term + edge
        # Code that reads messages gets one per edge, with the weights before `mod`, as from PyG's layer.
        is_one = self.mod in ("additive", "f-additive") and self._shows_messages(RGATConv)
        if is_one:
            added = self.w if self.mod == "additive" else value.new_ones(1)
            terms["edge_value"] = added.expand(*source.shape, *value.shape[-2:])
        score = GATScore(self.negative_slope)
        options: dict[str, Any] = {"score": score, "dropout": self.dropout, "training": None, "weights": True}
        out, alpha, _ = self._result(**terms, value=value, graph=pairs, **options)
        factor = self._factor(target, num_targets, out.dtype)
        more = None  # weights that `mod` adds
        if self.mod in ("additive", "f-additive"):
            # A weight that is exactly zero stays zero, as in PyG's layer.
            more = torch.ones_like(alpha) if self.mod == "additive" else (alpha > 0).to(alpha.dtype)
        if not isinstance(self.aggr_module, SumAggregation):
            weights = F.dropout(alpha, self.dropout, self.training).unsqueeze(-1)
            if more is not None:
                weights = weights + (self.w * more.unsqueeze(-1) if self.mod == "additive" else more.unsqueeze(-1))
            messages = weights * value.index_select(-3, of_source.place)
            if factor is not None:
                messages = messages * factor.index_select(0, target)
            return self.aggr_module(messages, target, dim_size=num_targets, dim=-3), alpha
        if more is not None and not is_one:
            total = self.weighted_sum(more, value, pairs)
            out = out + (self.w * total if self.mod == "additive" else total)
        if within:
            shape, wide = (*out.shape[:-3], num_targets, *out.shape[-2:]), torch.promote_types(out.dtype, torch.float32)
            out = out.new_zeros(shape, dtype=wide).index_add(-3, of_target.node.flatten(), out.to(wide)).to(out.dtype)
        return (out if factor is None else out * factor), alpha

    @fused
    def message(self, x_j: Tensor, alpha: Tensor, edge_value: Optional[Tensor]) -> Tensor:  # noqa: UP045 - as PyG parses
        """Weighted values of the sources; `edge_value` holds what `mod` adds to the weights, if it adds something."""
        if edge_value is None:
            return super().message(x_j, alpha, edge_value)
        more = edge_value if self.mod == "additive" else edge_value * (alpha > 0).unsqueeze(-1)
        return (alpha.unsqueeze(-1) + more) * x_j

    def _factor(self, target: Tensor, num_targets: int, dtype: torch.dtype) -> Tensor | None:
        """The factor by which `mod` multiplies the messages of each target, `[N, 1, C or 1]`."""
        if self.mod not in ("scaled", "f-scaled"):
            return None
        degree: Tensor = scatter(torch.ones_like(target), target, 0, num_targets, "sum").to(dtype).unsqueeze(-1)
        if self.mod == "scaled":
            degree = (degree * self.l1 + self.b1).relu() @ self.l2 + self.b2
        return degree.unsqueeze(-2)


class _Pairs(NamedTuple):
    """The pairs of a relation and a node at one end of the edges, relation by relation, in tiles of the same size.

    A tile holds pairs of one relation. Its last places may be empty: they hold node 0, and no edge refers to them.
    """

    node: Tensor
    """The node of each pair, `[T, S]`."""
    relation: Tensor
    """The relation of each tile, `[T]`."""
    place: Tensor
    """The place of each edge's pair among all T * S, `[E]`."""

    @classmethod
    def of(cls, relation: Tensor, node: Tensor, num_nodes: int, num_relations: int) -> _Pairs:
        """The pairs of edges, given the relation and the node of each, `[E]`."""
        # Half of the mean, so there are at most three tiles per relation, and half as many empty places as edges.
        # Plus two, because sizes of 0 and 1 are constants to torch.export, whose program must also serve few edges.
        size = node.size(0) // (2 * num_relations) + 2
        key, order = (relation * num_nodes + node).sort()
        relation, node = key // num_nodes, key % num_nodes
        is_new = (key.diff(prepend=key.new_full((1,), -1)) != 0).long()
        count = key.new_zeros(num_relations).index_add(0, relation, is_new)
        tiles = (count + size - 1) // size
        end = tiles.cumsum(0)
        # A program that must also serve other edges knows only a bound.
        num_tiles = int(end[-1]) if is_readable(end) else node.size(0) // size + max(num_relations, 2)
        empty = (end - tiles) * size - (count.cumsum(0) - count)  # places before a relation's first
        place = is_new.cumsum(0) - 1 + empty.index_select(0, relation)
        tile = torch.arange(num_tiles, device=key.device)
        return cls(
            key.new_zeros(num_tiles * size).scatter(0, place, node).view(num_tiles, size),
            torch.searchsorted(end, tile, right=True).clamp(max=num_relations - 1),
            torch.empty_like(place).scatter(0, order, place),
        )

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """The features of each pair's node times its relation's matrix, from `[..., N, F]` and `[R, F, C]`."""
        rows = x.index_select(-2, self.node.flatten()).view(*x.shape[:-2], *self.node.shape, x.size(-1))
        return torch.matmul(rows, weight.index_select(0, self.relation)).flatten(-3, -2)
