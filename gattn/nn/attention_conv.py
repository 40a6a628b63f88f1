"""What the three drop-in layers share: inputs in every form, heads, edge features, returned weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gattn.attention import Attention
from gattn.errors import InputError, InputTypeError
from gattn.graphs import FLOWS, CompleteGraph, Graph, SparseGraph, as_graph
from gattn.nn.linear import Linear, dropout
from gattn.ops.dropout import check_probability
from gattn.scores import Score
from gattn.settings import require_finite


class AttentionConv(Attention):
    """Base class of `GATConv`, `GATv2Conv` and `TransformerConv`."""

    lin_edge: Linear | None

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
        for name in ("heads", "out_channels"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1; got {getattr(self, name)}.")
        for name in ("dropout", "value_dropout"):
            check_probability(name, getattr(self, name))

    def _inputs(self, x: Any) -> tuple[Tensor, Tensor | None]:
        """Source and target features; the same tensor twice where `x` is a single one."""
        if isinstance(x, (tuple, list)) and len(x) != 2:
            raise InputTypeError(
                f"x is a tensor, or a pair of tensors (sources, targets); got a {type(x).__name__} of {len(x)}."
            )
        sources, targets = x if isinstance(x, (tuple, list)) else (x, x)
        for name, features in (("source features", sources), ("target features", targets)):
            if not isinstance(features, Tensor) and (features is not None or name == "source features"):
                raise InputTypeError(f"{name} must be a tensor; got {type(features).__name__}.")
            if features is not None and not features.is_floating_point():
                raise InputError(f"{name} must be of a floating-point type; got {features.dtype}: use x.float().")
            if features is not None and features.dim() not in (2, 3, 4):
                raise InputError(
                    f"features have shape [N, F], or [B, N, F] over one graph; got {name} of {list(features.shape)}."
                )
        in_channels = self.in_channels if isinstance(self.in_channels, (tuple, list)) else (self.in_channels,) * 2
        for name, features, channels in (("x", sources, in_channels[0]), ("target x", targets, in_channels[1])):
            if features is not None and channels > 0 and features.size(-1) != channels:
                raise InputError(
                    f"{name} has {features.size(-1)} channels, but this layer was made for in_channels={channels}."
                )
        if targets is not None and targets.shape[:-2] != sources.shape[:-2]:
            raise InputError(
                f"sources and targets have the same batch dimensions; got x[0] of shape {list(sources.shape)} and x[1] "
                f"of shape {list(targets.shape)}."
            )
        if targets is sources:
            require_finite(x=sources)
        else:
            require_finite(**{"x[0]": sources, "x[1]": targets})
        return sources, targets

    def _graph(
        self,
        graph: Any,
        sources: Tensor,
        targets: Tensor | None,
        self_loops: bool,
        size: tuple[int | None, int | None] | None = None,
    ) -> Graph:
        """The graph, with its sizes known and its self-loops asked for."""
        graph = as_graph(graph, self.flow)
        if isinstance(graph, CompleteGraph):
            if self_loops and graph.num_targets != graph.num_sources:
                raise InputError(
                    f"add_self_loops=True makes no sense here: the {graph.num_targets} targets and {graph.num_sources} "
                    "sources of this CompleteGraph are different nodes. Make the layer with add_self_loops=False."
                )
            if size is not None and tuple(size) != (graph.num_sources, graph.num_targets):
                raise InputError(f"size={tuple(size)} contradicts {graph}.")
            return graph
        num_sources = sources.size(-2)
        num_targets = None if targets is None else targets.size(-2)
        if size is not None:
            given_sources, given_targets = size if graph.flow == FLOWS[0] else (size[1], size[0])
            for what, given, rows in (("sources", given_sources, num_sources), ("targets", given_targets, num_targets)):
                if given is not None and rows is not None and given != rows:
                    raise InputError(f"size says {given} {what}, but their features have {rows} rows.")
            num_targets = given_targets if num_targets is None else num_targets
        if num_targets is None:
            num_targets = num_sources if graph.num_targets is None else graph.num_targets
        graph = graph.with_sizes(num_sources, num_targets)
        return graph.with_self_loops() if self_loops else graph

    def _edge_term(
        self, graph: Graph, edge_attr: Tensor | None, fill_value: Any = "mean"
    ) -> tuple[Graph, Tensor | None]:
        """The graph with its self-loops, and projected features of its edges; `None` for a layer without."""
        if self.lin_edge is None:
            if edge_attr is not None:
                raise InputError(
                    f"got edge_attr, but this layer was made without edge features: give {type(self).__name__} "
                    f"edge_dim={1 if edge_attr.dim() == 1 else edge_attr.size(-1)}."
                )
            return graph, None
        if edge_attr is not None and not isinstance(edge_attr, Tensor):
            raise InputTypeError(f"edge_attr must be a tensor; got {type(edge_attr).__name__}.")
        if edge_attr is not None and not edge_attr.is_floating_point():
            raise InputError(f"edge_attr must be of a floating-point type; got {edge_attr.dtype}: use .float().")
        require_finite(edge_attr=edge_attr)
        if isinstance(graph, SparseGraph):
            graph, edge_attr = graph.with_features(edge_attr, fill_value)
        elif edge_attr is not None and edge_attr.size(0) != graph.edge_index().size(1):
            raise InputError(
                f"edge_attr has {edge_attr.size(0)} rows for the {graph.edge_index().size(1)} edges of {graph}."
            )
        if edge_attr is None:
            raise InputError(
                f"this layer was made with edge_dim={self.edge_dim}, so it needs edge_attr, [E, {self.edge_dim}] (the "
                "single values of a sparse adjacency are edge weights, not features)."
            )
        edge_attr = edge_attr.unsqueeze(-1) if edge_attr.dim() == 1 else edge_attr
        channels = getattr(self.lin_edge, "in_channels", -1)
        if edge_attr.dim() != 2:
            raise InputError(
                f"edge_attr has shape [E, D], or [E] for a single feature; got {edge_attr.dim()} dimensions."
            )
        if channels > 0 and edge_attr.size(-1) != channels:
            raise InputError(
                f"edge_attr has {edge_attr.size(-1)} channels, but this layer was made for edge_dim={channels}."
            )
        return graph, self._project_edges(self.lin_edge, edge_attr)

    def _project_edges(self, lin_edge: Linear, edge_attr: Tensor) -> Tensor:
        """Edge features `[E, D]` as the score's edge term, `[E, H, C]`."""
        return self._heads(lin_edge(edge_attr))

    def _heads(self, x: Tensor) -> Tensor:
        """`[..., H * C]` as `[..., H, C]`."""
        return x.unflatten(-1, (self.heads, self.out_channels))

    def _attend_and_merge(
        self,
        query: Tensor | None,
        key: Tensor,
        value: Tensor,
        graph: Graph,
        score: Score,
        edge: Tensor | None,
        edge_value: Tensor | None,
        weights: bool | str,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends and joins the heads: `[..., N, H * C]`, or their mean `[..., N, C]`."""
        value = dropout(value, self.value_dropout, self.training)
        result = self.attend(
            query,
            key,
            value,
            graph,
            score=score,
            edge=edge,
            edge_value=edge_value,
            dropout=self.dropout,
            return_weights=weights,
        )
        out, alpha = result if weights else (result, None)
        return (out.flatten(-2) if self.concat else out.mean(-2)), alpha

    @staticmethod
    def _with_weights(graph: Graph, alpha: Tensor) -> Any:
        """What PyG's layers return beside the output; `(graph, alpha)` for a complete graph."""
        return graph.with_weights(alpha) if isinstance(graph, SparseGraph) else (graph, alpha)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels}, {self.out_channels}, heads={self.heads})"
