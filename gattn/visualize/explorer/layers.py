"""What `explore` takes: a model, records or weights, as one list of layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.utils import is_sparse

from gattn.graphs import Graph
from gattn.recording import AttentionRecord, record_attention
from gattn.visualize.inputs import complete_weights, edge_list, edge_weights

__all__ = ["Layer", "as_layers", "is_edges", "run"]


class Layer(NamedTuple):
    """The weights of one layer on a list of edges."""

    name: str
    edges: Tensor
    """`[2, E]`, sources above targets."""
    weights: Tensor
    """`[E, H]`."""
    num_sources: int
    num_targets: int
    is_sequence: bool
    """Whether the graph was complete, as that of tokens is."""


def run(model: Module, inputs: tuple[Any, ...]) -> dict[str, list[AttentionRecord]]:
    """Runs a model in evaluation mode, and returns the records of its layers."""
    if not inputs:
        raise ValueError(
            "explore(model) needs the model's inputs, too: explore(model, x, edge_index). To pass keyword arguments, "
            "run the model inside gattn.record_attention(model), and explore the records."
        )
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), record_attention(model) as records:
            model(*inputs)
    finally:
        for module, was_training in training.items():
            module.training = was_training
    return records


def as_layers(given: Any, element: int) -> tuple[list[Layer], int]:
    """Returns layers in the order of their first calls, and the size of the batch (1 without one)."""
    if isinstance(given, AttentionRecord) or _is_pair(given) or hasattr(given, "shape"):
        given = [given]
    if not isinstance(given, (Mapping, Sequence)) or isinstance(given, str):
        raise TypeError(
            "explore takes a model and its inputs, the records of gattn.record_attention, (edge_index, weights), or "
            f"weights [H, N, M]; got {type(given).__name__}."
        )
    if not isinstance(given, Mapping):
        records_only = all(isinstance(call, AttentionRecord) for call in given)
        given = {"layer": given} if records_only and given else {f"layer {i}": x for i, x in enumerate(given)}
    if not given:
        raise ValueError("there is no layer that attended: run the model inside gattn.record_attention(model).")
    chosen = _Batch(element)
    layers = [layer for name, calls in given.items() for layer in _calls(str(name) or "model", calls, chosen)]
    chosen.check()
    return layers, chosen.size


class _Batch:
    """The element of a batch that is explored."""

    def __init__(self, element: int):
        self.element, self.size, self.seen = element, 1, False

    def of(self, weights: Any, dims: int) -> Tensor:
        """Selects the element in weights that have `dims` dimensions without a batch."""
        if not isinstance(weights, (list, tuple)):
            tensor: Tensor = torch.as_tensor(weights).detach().cpu()
            if tensor.dim() == dims + 1:
                weights = tensor.unbind()
            elif tensor.dim() > dims + 1:
                raise ValueError(
                    f"weights of shape {list(tensor.shape)} have several batch dimensions: explore takes one, which "
                    "element= selects from. Index the others first."
                )
            else:
                return tensor
        return self._select(weights)

    def _select(self, elements: Sequence[Any]) -> Tensor:
        self.size, self.seen = len(elements), True
        if not 0 <= self.element < self.size:
            raise IndexError(f"there is no element {self.element}: the batch has {self.size}.")
        element: Tensor = torch.as_tensor(elements[self.element]).detach().cpu()
        return element

    def check(self) -> None:
        if self.element and not self.seen:
            raise ValueError(f"there is no element {self.element}: these weights have no batch dimension.")


def _is_pair(given: Any) -> bool:
    """Whether this is `(edge_index, weights)`, as PyG's layers return them."""
    if not isinstance(given, (tuple, list)) or isinstance(given, AttentionRecord) or len(given) != 2:
        return False
    return is_edges(given[0])


def is_edges(graph: Any) -> bool:
    """Whether this is a graph, or indices `[2, E]`."""
    if isinstance(graph, Graph) or is_sparse(graph):
        return True
    is_indices = isinstance(graph, (Tensor, np.ndarray)) and not torch.as_tensor(graph).is_floating_point()
    return is_indices and graph.ndim == 2 and len(graph) == 2


def _calls(name: str, calls: Any, batch: _Batch) -> Iterator[Layer]:
    if isinstance(calls, AttentionRecord) or _is_pair(calls) or hasattr(calls, "shape"):
        calls = [calls]
    stacked = _stacked([_layer(name, call, batch) for call in calls])
    for number, layer in enumerate(stacked):
        yield layer if len(stacked) == 1 else layer._replace(name=f"{name}, call {number}")


def _layer(name: str, call: Any, batch: _Batch) -> Layer:
    if isinstance(call, AttentionRecord):
        weights, graph = call
        if not graph.is_dense:
            edges, (num_sources, num_targets) = edge_list(graph)
            return Layer(name, edges, edge_weights(batch.of(weights, 2), edges), num_sources, num_targets, False)
        matrices = complete_weights(batch.of(weights, 3))
        lengths = [None if x is None else int(x[batch.element]) for x in (graph.target_lengths, graph.source_lengths)]
        return _from_matrices(name, matrices[:, : lengths[0], : lengths[1]])
    if _is_pair(call):
        edges, (num_sources, num_targets) = edge_list(call[0])
        num_sources = num_targets = max(num_sources, num_targets)  # PyG's pairs do not tell a bipartite graph
        weights = torch.as_tensor(call[1]).detach().cpu()
        weights = weights if weights.dim() == 1 else batch.of(weights, 2)
        return Layer(name, edges, edge_weights(weights, edges), num_sources, num_targets, False)
    weights = torch.as_tensor(call)
    return _from_matrices(name, complete_weights(weights if weights.dim() == 2 else batch.of(weights, 3)))


def _from_matrices(name: str, matrices: Tensor) -> Layer:
    """Lists the edges of a complete graph; a source without weight in any head is behind a mask, and is left out."""
    target, source = (matrices > 0).any(0).nonzero().unbind(1)
    _, num_targets, num_sources = matrices.shape
    return Layer(
        name, torch.stack([source, target]), matrices[:, target, source].t(), num_sources, num_targets, is_sequence=True
    )


def _stacked(layers: list[Layer]) -> list[Layer]:
    """Joins the calls of a decoder that goes token by token to one matrix."""
    first, *others = layers
    if not others or not first.is_sequence or any(x.num_targets != 1 or not x.is_sequence for x in others):
        return layers
    num_targets = first.num_targets
    edges, weights = [first.edges], [first.weights]
    for layer in others:
        edges.append(torch.stack([layer.edges[0], layer.edges[1] + num_targets]))
        weights.append(layer.weights)
        num_targets += 1
    num_sources = max(layer.num_sources for layer in layers)
    return [Layer(first.name, torch.cat(edges, 1), torch.cat(weights), num_sources, num_targets, True)]
