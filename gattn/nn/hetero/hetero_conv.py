"""What layers for typed nodes and edges share: dictionaries of features and of graphs, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from gattn.errors import InputError, InputTypeError, check_at_least
from gattn.graphs import Graph, as_graph
from gattn.nn.shared.attention_conv import BaseConv
from gattn.nn.shared.dtypes import check_dtype
from gattn.settings import require_finite

__all__ = ["EdgeType", "HeteroBaseConv", "Metadata"]

#: The type of the sources, the relation and the type of the targets.
EdgeType: TypeAlias = tuple[str, str, str]
#: All node types, and all edge types.
Metadata: TypeAlias = tuple[list[str], list[EdgeType]]


class Relation(NamedTuple):
    """The edges of one type."""

    source: str
    """The type of the sources."""
    target: str
    """The type of the targets."""
    graph: Graph
    """The edges, with known sizes."""


class HeteroBaseConv(BaseConv):
    """Base class of `HANConv` and `HGTConv`.

    Args:
        in_channels: The channels of each node type's features, or one number for all; `-1` infers them from the first
            call.
        out_channels: The channels of the output, H * C.
        metadata: The node types, and the edge types.
        heads: The number of heads, H.
        **kwargs: Arguments of `torch_geometric.nn.conv.MessagePassing`, such as `flow`.

    Raises:
        TypeError: If `metadata` is not a pair.
        ValueError: If a number is out of range.
    """

    in_channels: dict[str, int]  # type: ignore[assignment] # of each node type

    def __init__(
        self, in_channels: int | dict[str, int], out_channels: int, metadata: Metadata, heads: int, **kwargs: Any
    ):
        super().__init__("add", **kwargs)
        if not isinstance(metadata, (tuple, list)) or len(metadata) != 2:
            raise InputTypeError(
                "metadata must be a pair (node types, edge types), as HeteroData.metadata() gives it; got "
                f"{metadata!r}."
            )
        check_at_least(1, heads=heads, out_channels=out_channels)
        if out_channels % heads:
            raise InputError(
                f"out_channels are divided among the heads, so heads must be a divisor; got {out_channels=} and "
                f"{heads=}."
            )
        self.in_channels = in_channels if isinstance(in_channels, dict) else dict.fromkeys(metadata[0], in_channels)
        self.out_channels = out_channels
        self.heads = heads

    def _features(self, x_dict: Any, lins: Any) -> dict[str, Tensor]:
        """The features of the node types that the layer knows, in its order.

        Args:
            x_dict: The argument of the user.
            lins: The projections of the features, by type.
        """
        if not isinstance(x_dict, Mapping):
            raise InputTypeError(f"x_dict must be a dictionary of features by node type; got {type(x_dict).__name__}.")
        features = {node_type: x_dict[node_type] for node_type in lins if node_type in x_dict}
        for node_type, x in features.items():
            name = f"x_dict[{node_type!r}]"
            if not isinstance(x, Tensor):
                raise InputTypeError(f"{name} must be a tensor; got {type(x).__name__}.")
            if not x.is_floating_point():
                raise InputError(f"{name} must be of a floating-point type; got {x.dtype}: use x.float().")
            channels = getattr(lins[node_type], "in_channels", -1)
            if x.dim() < 2 or (channels > 0 and x.size(-1) != channels):
                wanted = "F" if channels < 0 else channels
                raise InputError(f"{name} must have shape [N, {wanted}]; got {list(x.shape)}.")
            check_dtype(self, **{name: x})
            require_finite(**{name: x})
        return features

    def _relations(self, x: dict[str, Tensor], edge_index_dict: Any, known: list[EdgeType]) -> dict[EdgeType, Relation]:
        """The graph of each edge type that is given and joins nodes whose features are given.

        Args:
            x: The features of each node type.
            edge_index_dict: The argument of the user.
            known: The edge types that the layer was made for.
        """
        if not isinstance(edge_index_dict, Mapping):
            raise InputTypeError(
                f"edge_index_dict must be a dictionary of graphs by edge type; got {type(edge_index_dict).__name__}."
            )
        relations = {}
        for edge_type, edge_index in edge_index_dict.items():
            if edge_type not in known:
                raise InputError(f"this layer was made for edges of the types {known}; got some of type {edge_type}.")
            graph = as_graph(edge_index, self.flow)
            source, target = edge_type[0], edge_type[-1]
            for node_type in (source, target):
                if node_type not in x:
                    raise InputError(
                        f"edges of type {edge_type} join nodes of type {node_type!r}, but x_dict has features of "
                        f"{list(x)}."
                    )
            sources, targets = x[source], x[target]
            resolved = graph.resolve(sources.size(-2), targets.size(-2), device=sources.device)
            relations[edge_type] = Relation(source, target, resolved)
        return relations
