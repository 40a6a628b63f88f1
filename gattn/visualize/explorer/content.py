"""What a page shows, and the form in which the page gets it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gattn.visualize.explorer.encoding import packed, packed_indices, quantised
from gattn.visualize.explorer.layers import Layer
from gattn.visualize.explorer.nodes import Nodes, instructive_target, vocabulary
from gattn.visualize.graphs import edges_towards

__all__ = ["Content"]

_MAX_NUMBERS = 12_000_000  # about 32 MB as a file, which browsers still open quickly


@dataclass
class Content:
    """Layers, the nodes of each, and what is known about nodes and edges."""

    layers: list[Layer]
    sets: list[Nodes]
    """The nodes of each layer."""
    names: dict[Nodes, list[str] | None]
    """The names of the nodes in each set."""
    class_numbers: dict[Nodes, list[int]]
    positions: Tensor | None
    edge_names: Sequence[list[str] | None]
    """The names of each layer's edges."""
    node: int | None
    """The node that is selected at first."""

    def around(self, node: int, hops: int) -> Content:
        """Keeps only what reaches a node within this many hops."""
        if len(self.names) > 1 or not self.sets[0].is_shared:
            raise ValueError("hops= needs layers whose sources and targets are the same nodes: explore only such ones.")
        nodes_before, (names, *_) = self.sets[0].size, self.names.values()
        together = torch.cat([layer.edges for layer in self.layers], 1)
        reached = edges_towards(together, nodes_before, node, hops)
        nodes = torch.unique(torch.cat([torch.tensor([node]), together[:, reached].flatten()]))
        numbers, size = nodes.tolist(), len(nodes)
        new_number = torch.zeros(nodes_before, dtype=torch.int64)
        new_number[nodes] = torch.arange(size)
        masks = torch.split(reached, [layer.edges.size(1) for layer in self.layers])
        classes = self.class_numbers.get(self.sets[0])
        kept = self.sets[0]._replace(num_sources=size, num_targets=size, types=())
        return replace(
            self,
            layers=[
                layer._replace(
                    edges=new_number[layer.edges[:, mask]],
                    weights=layer.weights[mask],
                    num_sources=size,
                    num_targets=size,
                )
                for layer, mask in zip(self.layers, masks, strict=True)
            ],
            sets=[kept] * len(self.layers),
            names={kept: [str(i) if names is None else names[i] for i in numbers]},
            class_numbers={} if classes is None else {kept: [classes[i] for i in numbers]},
            positions=None if self.positions is None else self.positions[nodes],
            edge_names=[
                None if found is None else [found[i] for i in mask.nonzero().flatten().tolist()]
                for found, mask in zip(self.edge_names, masks, strict=True)
            ],
            node=int(new_number[node]),
        )

    def stored(self) -> dict[str, Any]:
        """Returns nodes, graphs and layers as the page takes them.

        Raises:
            ValueError: If they are too large for one file.
            IndexError: If there is no such node.
        """
        count = sum(layer.weights.numel() + 2 * layer.edges.size(1) for layer in self.layers)
        if count > _MAX_NUMBERS:
            raise ValueError(
                f"{count:,} weights and edges are too many for one page of at most {_MAX_NUMBERS:,}: keep what reaches "
                "one node (node=..., hops=2), or fewer layers."
            )
        spaces = list(self.names)
        graphs: list[tuple[Nodes, Tensor, list[str] | None]] = []
        layers = []
        for layer, nodes, names in zip(self.layers, self.sets, self.edge_names, strict=True):
            same = (i for i, (a, b, c) in enumerate(graphs) if (a, c) == (nodes, names) and torch.equal(b, layer.edges))
            number = next(same, len(graphs))
            if number == len(graphs):
                graphs.append((nodes, layer.edges, names))
            heads = layer.weights.size(1)
            layers.append({"name": layer.name, "graph": number, "heads": heads, **quantised(layer.weights)})
        return {
            "spaces": [self._stored_nodes(space) for space in spaces],
            "graphs": [_stored_graph(nodes, edges, names, spaces.index(nodes)) for nodes, edges, names in graphs],
            "layers": layers,
        }

    def _stored_nodes(self, nodes: Nodes) -> dict[str, Any]:
        if self.node is None or nodes != self.sets[0]:
            start = instructive_target(self.layers[self.sets.index(nodes)])
        elif 0 <= self.node < nodes.num_targets:
            start = self.node
        else:
            raise IndexError(f"there is no node {self.node}: the graph has {nodes.num_targets}, from 0.")
        classes = self.class_numbers.get(nodes)
        positions = self.positions if nodes.is_shared else None
        if positions is not None and len(positions) != nodes.size:
            positions = None
        return {
            "sources": nodes.num_sources,
            "targets": nodes.num_targets,
            "shared": nodes.is_shared,
            "sequence": nodes.is_sequence,
            "start": start + nodes.first_target,
            "names": self.names[nodes],
            "typed": bool(nodes.types),
            "classes": None if classes is None else packed(classes, "u2"),
            "pos": None if positions is None else packed(positions.numpy(), "f4"),
        }


def _stored_graph(nodes: Nodes, edges: Tensor, names: list[str] | None, space: int) -> dict[str, Any]:
    source, target = edges
    stored = None
    if names is not None:
        words, index = vocabulary(names)
        stored = {"words": words, "index": packed_indices(index)}
    return {
        "space": space,
        "source": packed_indices(source.numpy()),
        "target": packed_indices((target + nodes.first_target).numpy()),
        "names": stored,
    }
