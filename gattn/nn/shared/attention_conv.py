"""What the drop-in layers share: inputs in every form, heads, edge features, returned weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from gattn.attention import Attention, Weights
from gattn.autocast import is_autocast
from gattn.edges import EdgeTerm, Projected
from gattn.errors import InputError, InputTypeError, check_at_least
from gattn.graphs import FLOWS, Graph, as_graph
from gattn.nn.shared.declared import Declared
from gattn.nn.shared.dropout import dropout
from gattn.nn.shared.dtypes import check_dtype
from gattn.nn.shared.edge_features import checked_factors, checked_features
from gattn.nn.shared.linear import Linear, is_plain
from gattn.ops.dropout import check_probability
from gattn.recording import is_watched, record
from gattn.scores import Score
from gattn.settings import require_finite
from gattn.torch_private import is_traced

__all__ = ["AttentionConv", "AttentionWeights", "BaseConv", "projects"]

#: What PyG's layers return together with the output: `(edge_index, weights)`, whose graph may also be a sparse
#: adjacency or a `CompleteGraph`; for a `SparseTensor`, the one that holds the weights.
AttentionWeights: TypeAlias = Any


class BaseConv(Declared, Attention):
    """Base class of graph layers: takes features and graphs in every form and checks them."""

    #: Channels of the input, or a pair for sources and targets; -1 allows any.
    in_channels: int | tuple[int, int] = -1
    heads: int
    #: Whether the layer takes the graphs of `gattn.distributed`; such a layer reads no features at the ends of edges.
    takes_shards: ClassVar[bool] = False
    _records_parts: ClassVar[bool] = False

    @property
    def adds_input(self) -> bool:
        """Whether the layer adds its input to its output, and drops out before, so that a block around it must not."""
        return False

    def _inputs(self, x: Any) -> tuple[Tensor, Tensor | None]:
        """Source and target features; the same tensor twice if `x` is a single one."""
        if isinstance(x, (tuple, list)) and len(x) != 2:
            raise InputTypeError(
                f"x must be a tensor, or a pair of tensors (sources, targets); got a {type(x).__name__} of {len(x)}."
            )
        sources, targets = x if isinstance(x, (tuple, list)) else (x, x)
        ends = ("source features", sources), ("target features", targets)
        for name, features in ends[:1] if targets is sources else ends:
            if not isinstance(features, Tensor) and (features is not None or name == "source features"):
                raise InputTypeError(f"{name} must be a tensor; got {type(features).__name__}.")
            if features is not None and not features.is_floating_point():
                raise InputError(f"{name} must be of a floating-point type; got {features.dtype}: use x.float().")
            if features is not None and features.dim() not in (2, 3, 4):
                raise InputError(
                    f"features must have shape [N, F], or [B, N, F] over one graph; got {name} of "
                    f"{list(features.shape)}."
                )
        in_channels = self.in_channels if isinstance(self.in_channels, (tuple, list)) else (self.in_channels,) * 2
        channels_of_ends = ("x", sources, in_channels[0]), ("target x", targets, in_channels[1])
        is_one = targets is sources and in_channels[0] == in_channels[1]
        for name, features, channels in channels_of_ends[:1] if is_one else channels_of_ends:
            if features is not None and channels > 0 and features.size(-1) != channels:
                raise InputError(
                    f"{name} has {features.size(-1)} channels, but this layer was made for in_channels={channels}."
                )
        if targets is not None and targets is not sources and targets.shape[:-2] != sources.shape[:-2]:
            raise InputError(
                f"sources and targets must have the same batch dimensions; got x[0] of shape {list(sources.shape)} "
                "and x[1] "
                f"of shape {list(targets.shape)}."
            )
        if targets is sources:
            check_dtype(self, x=sources)
            require_finite(x=sources)
        else:
            check_dtype(self, **{"x[0]": sources, "x[1]": targets})
            require_finite(**{"x[0]": sources, "x[1]": targets})
        return sources, targets

    def _nodes(self, x: Any) -> Tensor:
        """The features of nodes that are sources and targets at once."""
        if isinstance(x, (tuple, list)):
            raise InputError(f"{type(self).__name__} attends among one set of nodes: x must be a tensor, not a pair.")
        return self._inputs(x)[0]

    def _graph(
        self,
        graph: Any,
        sources: Tensor,
        targets: Tensor | None,
        self_loops: bool,
        size: tuple[int | None, int | None] | None = None,
    ) -> Graph:
        """The graph, on the device of features and parameters, with known sizes, and with self-loops if requested."""
        given_graph = as_graph(graph, self.flow, sharded=self.takes_shards)
        num_sources, device = sources.size(-2), sources.device
        num_targets = None if targets is None else targets.size(-2)
        if size is not None:
            given_sources, given_targets = size if given_graph.flow == FLOWS[0] else (size[1], size[0])
            for what, given, rows in (("sources", given_sources, num_sources), ("targets", given_targets, num_targets)):
                if given is not None and rows is not None and given != rows:
                    raise InputError(f"size gives {given} {what}, but their features have {rows} rows.")
            num_targets = given_targets if num_targets is None else num_targets
        for what, tensor in (("x[1]", targets), *self._parameters.items()):
            if tensor is not None and tensor.device != device:
                raise InputError(f"{what} is on {tensor.device}, the features are on {device}: move one of them.")
        if type(graph) is Tensor and graph.layout == torch.strided and graph.device == device:
            given_graph.num_sources, given_graph.self_loops = num_sources, self_loops  # it is new, so nobody else's
            given_graph.num_targets = num_sources if num_targets is None else num_targets
            return given_graph
        resolved = given_graph.resolve(num_sources, num_targets, device=device)
        return resolved.with_self_loops() if self_loops else resolved

    def _heads(self, x: Tensor) -> Tensor:
        """`[..., H * C]` as `[..., H, C]`."""
        return x.view(*x.shape[:-1], self.heads, x.size(-1) // self.heads)  # which costs half of unflatten()

    def _shows_messages(self, layer: type[Attention]) -> bool:
        """Whether messages are read, in which case they have to be those of `layer`, of all channels at once."""
        is_seen = self.explain or self._message_forward_pre_hooks or self._message_forward_hooks
        return bool(is_seen) and type(self).message is layer.message and self.decomposed_layers == 1


def projects(lin: Linear, features: Tensor) -> bool:
    """Whether kernels may project features by a layer's weight instead of calling the layer."""
    return is_plain(lin) and features.dtype == lin.weight.dtype and not is_autocast(features)


class AttentionConv(BaseConv):
    """Base class of layers with the options of `GATConv`: heads, `concat`, dropout and edge features."""

    lin_edge: Linear | None
    flow: str
    node_dim: int

    #: Vectors of edges with fewer elements than this are made before attention: one matrix product is faster than
    #: kernels that project edge by edge, as long as its result fits into the cache.
    _small: ClassVar[int] = 1 << 18
    _shown = "in_channels out_channels heads="

    if TYPE_CHECKING:  # layers are called, not their forward(), about which PyTorch's Module says nothing

        @overload
        def __call__(self, *x: Any, return_attention_weights: Literal[True], **more: Any) -> tuple[Tensor, Any]: ...

        @overload
        def __call__(self, *x: Any, return_attention_weights: bool | None = None, **more: Any) -> Tensor: ...

        def __call__(self, *x: Any, return_attention_weights: bool | None = None, **more: Any) -> Any: ...  # noqa: D102

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        *,
        heads: int,
        concat: bool,
        dropout: float,
        value_dropout: float,
        edge_dim: int | None,
        aggr: Any = "add",
        **kwargs: Any,
    ):
        super().__init__(aggr, **kwargs)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.heads = heads
        self.concat = concat
        self.dropout = dropout
        self.value_dropout = value_dropout
        self.edge_dim = edge_dim
        check_at_least(1, heads=heads, out_channels=out_channels)
        for name in ("dropout", "value_dropout"):
            check_probability(name, getattr(self, name))

    def _edge_term(
        self, graph: Graph, edge_attr: Tensor | None, fill_value: Any = "mean", hides: bool = False
    ) -> tuple[Graph, EdgeTerm | None]:
        """The graph with its self-loops, and the score's edge term; for `hides` see `SparseGraph.with_features`."""
        if self.lin_edge is None:
            if edge_attr is not None:
                raise InputError(
                    f"got edge_attr, but this layer was made without edge features: make {type(self).__name__} with "
                    f"edge_dim={1 if edge_attr.dim() == 1 else edge_attr.size(-1)}."
                )
            return graph, None
        channels = getattr(self.lin_edge, "in_channels", -1)
        graph, edge_attr = checked_features(self, graph, edge_attr, channels, (), fill_value, hides)
        return graph, self._project_edges(self.lin_edge, edge_attr)

    def _project_edges(self, lin_edge: Linear, edge_attr: Tensor) -> EdgeTerm:
        """The score's edge term for features `[E, D]`."""
        is_small = not is_traced() and edge_attr.size(0) * self.heads * self.out_channels < self._small
        if not is_small and projects(lin_edge, edge_attr):
            return Projected(edge_attr, lin_edge.weight.view(self.heads, self.out_channels, -1))
        return self._heads(lin_edge(edge_attr))

    def _attend_and_merge(
        self,
        query: Tensor | None,
        key: Tensor,
        value: Tensor,
        graph: Graph,
        score: Score,
        edge: EdgeTerm | None,
        edge_value: bool,
        weights: bool | str,
        bias: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> tuple[Tensor, Weights | None]:
        """Attends, joins the heads and adds the layer's bias: `[..., N, H * C]`, or the heads' mean `[..., N, C]`.

        Weights are multiplied by `factors` `[E, 1]`, if there are any, of a graph that is a list of edges.
        """
        value = dropout(value, self.value_dropout, self.training)
        out_bias = self._heads(bias) if self.concat and bias is not None else None
        if factors is None:
            result = self.attend(
                query,
                key,
                value,
                graph,
                score=score,
                edge=edge,
                edge_value=edge_value and edge is not None,
                mask=graph.kept,
                out_bias=out_bias,
                dropout=self.dropout,
                return_weights=weights,
            )
            out, alpha = (result, None) if isinstance(result, Tensor) else result
        else:
            alpha = self.weigh(query, key, graph, score=score, edge=edge)
            record(self, graph, alpha)
            alpha = alpha * factors.to(alpha.dtype)
            dropped = F.dropout(alpha, self.dropout, self.training)
            out = self.weighted_sum(dropped, value, graph, edge_value=edge if edge_value else None, out_bias=out_bias)
            alpha = None if not weights else dropped if weights == "dropped" else alpha
        if self.concat:
            return out.flatten(-2), alpha
        out = out.mean(-2)
        return (out if bias is None else out + bias), alpha

    def _factors(self, graph: Graph, value: Tensor, edge_weight: Tensor) -> tuple[Graph, Tensor]:
        """The graph as a list of edges, and their factors, `[E, 1]`."""
        if graph.is_sharded:
            raise InputError(f"{type(self).__name__} takes no edge_weight on sharded graphs.")
        graph = graph.listed(value.device)
        return graph, checked_factors(edge_weight, graph)

    def _attend_with_loops(
        self,
        query: Tensor | None,
        key: Tensor,
        value: Tensor,
        graph: Graph,
        edge_attr: Tensor | None,
        score: Score,
        return_weights: bool | None,
        edge_weight: Tensor | None = None,
    ) -> tuple[Tensor, Any, Graph]:
        """What `_attend_and_merge` returns for layers with `fill_value`, and the graph with its self-loops.

        Args:
            query: The score's term of the targets, which PyG's layer passes to `edge_update`, `[..., N, H]` or
                `[..., N, H, C]`.
            key: The same of the sources, `[..., M, H]` or `[..., M, H, C]`.
            value: `[..., M, H, C]`.
            graph: The graph.
            edge_attr: The edges' features `[E, D]`, as the user passed them.
            score: The score.
            return_weights: Whether the weights after dropout are returned as well.
            edge_weight: A factor for each edge's weight, `[E]`. (default: `None`)
        """
        fill_value: Any = self.fill_value
        if not self._updates_as_pyg:
            factors = None
            if edge_weight is not None:
                graph, factors = self._factors(graph, value, edge_weight)
            hides = edge_attr is not None and factors is None and not return_weights
            if hides:  # who sees weights or edges gets those that PyG has
                hides = not (is_watched(self) or self._needs_messages())
            graph, edge = self._edge_term(graph, edge_attr, fill_value, hides)
            weights = "dropped" if return_weights else False
            found = self._attend_and_merge(query, key, value, graph, score, edge, False, weights, self.bias, factors)
            return *found, graph
        if edge_weight is not None:
            raise InputError(f"{type(self).__name__} takes no edge_weight while a subclass defines edge_update().")
        if value.dim() != 3:
            raise InputError(f"edge_update() of {type(self).__name__} takes features [N, F], without a batch.")
        graph, edge_attr = graph.with_features(edge_attr, fill_value)
        value = dropout(value, self.value_dropout, self.training)
        out, alpha = self._updated(query, key, value, graph, edge_attr)
        record(self, graph, alpha)
        out = out.flatten(-2) if self.concat else out.mean(-2)
        return (out if self.bias is None else out + self.bias), alpha if return_weights else None, graph

    def _updated(
        self, query: Tensor | None, key: Tensor, value: Tensor, graph: Graph, edge_attr: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The output `[N, H, C]` and the weights, after the calls that PyG's layer makes."""
        edges = graph.edge_list(value.device)
        rows, size = torch.stack(edges.sources_and_targets()), (edges.num_sources, edges.num_targets)
        terms = dict.fromkeys(self.edge_updater_type_of_pyg, (key, query)) | {"edge_attr": edge_attr}
        layer = self
        if self.flow != FLOWS[0]:  # the code that PyG generates takes sources first, whatever the flow
            layer = object.__new__(type(self))  # as other threads may call this one
            layer.__dict__.update(self.__dict__, flow=FLOWS[0])
        alpha = layer.edge_updater(rows, **terms, size=size)
        out = layer.propagate(rows, x=value, alpha=alpha, size=size)
        if layer is not self:  # what hooks have set
            more = {name: kept for name, kept in layer.__dict__.items() if self.__dict__.get(name) is not kept}
            self.__dict__.update(more, flow=self.flow)
        return out, alpha
