"""The nodes of an exploration: sets of nodes that layers share, with their names, classes and positions."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.utils import scatter

from gattn.visualize.explorer.layers import Layer, Types
from gattn.visualize.graphs import Positions
from gattn.visualize.inputs import ArrayLike
from gattn.visualize.style import as_list, visible

__all__ = [
    "Nodes",
    "class_numbers",
    "coordinates",
    "edge_names",
    "instructive_target",
    "names",
    "node_sets",
    "vocabulary",
]


class Nodes(NamedTuple):
    """Nodes as the page has them: sources, followed by targets where those are others."""

    num_sources: int
    num_targets: int
    is_shared: bool
    """Whether sources and targets are the same nodes."""
    is_sequence: bool
    types: Types = ()
    """The types of the nodes, if they are known, and how many nodes of each follow one another."""

    @property
    def size(self) -> int:
        """How many nodes there are."""
        return self.num_sources if self.is_shared else self.num_sources + self.num_targets

    @property
    def first_target(self) -> int:
        """The number of the first target."""
        return 0 if self.is_shared else self.num_sources


def node_sets(layers: Sequence[Layer], labels: Any, has_tokens: bool) -> list[Nodes]:
    """Returns the nodes of each layer."""
    pair = as_pair(labels)
    alike = pair is not None and len(pair[0]) == len(pair[1])
    if alike and len(layers) > 1:
        raise ValueError(
            f"sources and targets have {len(pair[0]) if pair else 0} tokens each, so that sizes do not tell "
            "self-attention from attention to the other sequence: explore one layer at a time, such as records[name]."
        )
    return [
        Nodes(
            layer.num_sources,
            layer.num_targets,
            layer.num_sources == layer.num_targets and not alike and _count(layer.types) in (0, layer.num_sources),
            layer.is_sequence or has_tokens,
            layer.types,
        )
        for layer in layers
    ]


def _count(types: Types) -> int:
    return sum(count for _, count in types)


def as_pair(labels: Any) -> tuple[list[Any], list[Any]] | None:
    """Returns the labels of sources and those of targets, if they are given apart."""
    if not isinstance(labels, tuple) or len(labels) != 2:
        return None
    if not all(isinstance(part, (list, tuple)) or hasattr(part, "tolist") for part in labels):
        return None
    return as_list(labels[0]), as_list(labels[1])


def names(labels: Any, sets: Sequence[Nodes], argument: str) -> list[list[str] | None]:
    """Returns the names of each set of nodes, `None` where they have numbers only."""
    typed = [[f"{name} {i}" for name, count in nodes.types for i in range(count)] or None for nodes in sets]
    if labels is None:
        return typed
    pair = as_pair(labels)
    plain = None if pair else as_list(labels)
    found: list[list[str] | None] = []
    for nodes in sets:
        chosen: list[Any] | None = None
        if pair is None:
            chosen = plain if nodes.is_shared and len(plain or ()) == nodes.size else None
        elif nodes.is_shared:
            chosen = next((part for part in pair if len(part) == nodes.size), None)
        elif (len(pair[0]), len(pair[1])) == (nodes.num_sources, nodes.num_targets):
            chosen = pair[0] + pair[1]
        found.append(None if chosen is None else [visible(label) for label in chosen])
    if not any(found):
        given = len(plain or ()) if pair is None else f"{len(pair[0])} and {len(pair[1])}"
        raise ValueError(f"{argument} must have one entry for each of the {_sizes(sets)}; got {given}.")
    return [names or usual for names, usual in zip(found, typed, strict=True)]


def _sizes(sets: Sequence[Nodes]) -> str:
    counts = {
        f"{nodes.size} nodes"
        if nodes.is_shared
        else f"{nodes.num_sources} sources and {nodes.num_targets} targets, given as a pair"
        for nodes in sets
    }
    return " or ".join(sorted(counts))


def class_numbers(classes: ArrayLike | None, sets: Sequence[Nodes]) -> tuple[list[str], dict[Nodes, list[int]]]:
    """Returns the names of the classes, which are the types if none are given, and the number of each node's."""
    if classes is None:
        words, _ = vocabulary([name for nodes in sets for name, _ in nodes.types])
        return words, {
            nodes: [words.index(name) for name, count in nodes.types for _ in range(count)]
            for nodes in sets
            if nodes.types
        }
    values = as_list(classes)
    _check_length("classes", len(values), sets)
    if any(isinstance(value, list) for value in values):
        raise ValueError(f"classes must be one text or number per node; got {values[0]!r} for the first one.")
    present = sorted(set(values))
    numbers = {value: number for number, value in enumerate(present)}
    of_nodes = [numbers[value] for value in values]
    return [value if isinstance(value, str) else f"class {value}" for value in present], {
        nodes: of_nodes for nodes in sets if nodes.is_shared and nodes.size == len(values)
    }


def coordinates(pos: Positions | None, sets: Sequence[Nodes]) -> Tensor | None:
    """Returns positions as `[N, 2]`, y upwards."""
    if pos is None:
        return None
    if isinstance(pos, Mapping):
        missing = [node for node in range(len(pos)) if node not in pos]
        if missing:
            raise ValueError(f"pos must have an entry for every node, but does not contain node {missing[0]}.")
        pos = [list(pos[node]) for node in range(len(pos))]
    result = torch.as_tensor(pos).detach().cpu().double()
    if result.dim() != 2 or result.size(1) != 2 or not bool(result.isfinite().all()):
        raise ValueError(f"pos is [N, 2] and finite, or maps nodes to such positions; got {list(result.shape)}.")
    _check_length("pos", result.size(0), sets)
    return result


def _check_length(argument: str, length: int, sets: Sequence[Nodes]) -> None:
    if not any(nodes.is_shared and nodes.size == length for nodes in sets):
        raise ValueError(f"{argument} must have one entry for each of the {_sizes(sets)}; got {length}.")


def edge_names(edge_labels: Any, layers: Sequence[Layer]) -> list[list[str] | None]:
    """Returns the name of each edge, `""` where it has none, by layer; `None` if the labels are for other layers."""
    if edge_labels is None:
        return [None if layer.relations is None else list(layer.relations) for layer in layers]
    if isinstance(edge_labels, Mapping):
        return [[str(edge_labels.get(edge, "")) for edge in map(tuple, layer.edges.t().tolist())] for layer in layers]
    labels = [str(label) for label in as_list(edge_labels)]
    if all(layer.edges.size(1) != len(labels) for layer in layers):
        raise ValueError(
            f"edge_labels must have one entry for each of the {layers[0].edges.size(1)} edges of a layer, self-loops "
            f"that it added included; got {len(labels)}. Or map pairs of nodes to labels: {{(source, target): label}}."
        )
    return [labels if layer.edges.size(1) == len(labels) else None for layer in layers]


def vocabulary(words: Sequence[Hashable]) -> tuple[list[Any], list[int]]:
    """Returns the different words, and the number of each."""
    numbers: dict[Hashable, int] = {}
    index = [numbers.setdefault(word, len(numbers)) for word in words]
    return list(numbers), index


def instructive_target(layer: Layer) -> int:
    """Returns a target whose weights are uneven, among those with a few neighbours, which can be read at a glance."""
    target = layer.edges[1]
    alpha = layer.weights.mean(1)
    degree = target.bincount(minlength=layer.num_targets)
    total = scatter(alpha, target, 0, layer.num_targets, reduce="sum")
    alpha = alpha / total.masked_fill(total == 0, 1.0)[target]
    nats = scatter(torch.special.entr(alpha), target, 0, layer.num_targets, reduce="sum")
    chosen = 1.0 - nats / degree.clamp(min=2).double().log()
    few = (degree >= 4) & (degree <= 12)
    return int((chosen + few.double()).masked_fill(degree < 2, -1.0).argmax())
