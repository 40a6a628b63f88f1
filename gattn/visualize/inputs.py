"""What the functions of this folder take: weights, graphs, records, layers and heads, checked and in one form."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gattn.graphs import GraphLike, as_graph
from gattn.recording import AttentionRecord

__all__ = [
    "ArrayLike",
    "Layers",
    "Recorded",
    "Weights",
    "complete_weights",
    "edge_list",
    "edge_weights",
    "edges_within",
    "matrices",
    "named_layers",
    "select_head",
    "unpack",
    "unpacked_layers",
]

#: Numbers: a tensor, an array, or nested lists.
ArrayLike: TypeAlias = Tensor | NDArray[Any] | Sequence[Any]
#: What `gattn.record_attention` gathers of one layer: one call, or the list of all calls.
Recorded: TypeAlias = AttentionRecord | Sequence[AttentionRecord]
#: Weights, or records, which know their graph.
Weights: TypeAlias = ArrayLike | Recorded
#: The weights of each layer, in a list or by name.
Layers: TypeAlias = Mapping[str, Weights] | Sequence[Weights] | Tensor

_MAX_ENTRIES = 1_000_000  # of a matrix that is made of a graph


def is_recorded(weights: Any) -> bool:
    """Whether these are records of one layer."""
    return isinstance(weights, AttentionRecord) or (
        isinstance(weights, (list, tuple)) and len(weights) > 0 and isinstance(weights[0], AttentionRecord)
    )


def unpack(
    weights: Weights, edge_index: GraphLike | None = None, *, call: int = -1, element: int | None = None
) -> tuple[ArrayLike, GraphLike | None]:
    """Returns weights and their graph, `None` if it is complete, for weights or records of one layer.

    Args:
        weights: Weights, one `AttentionRecord`, or a list of them.
        edge_index: The graph of weights that are not recorded.
        call: Which record of a list.
        element: Which element of a batch, or block of a packed graph. A recorded batch of one needs no number.
    """
    if isinstance(weights, Mapping):
        raise ValueError(
            f"these are the weights of {len(weights)} layers: choose one of {', '.join(map(repr, weights))}, such as "
            f"records[{next(iter(weights), '')!r}], or draw all of them with attention_grid."
        )
    if not is_recorded(weights):
        return weights if element is None else _element(weights, element), edge_index
    if edge_index is not None:
        raise ValueError("a record has its own graph: leave out edge_index.")
    if not isinstance(weights, AttentionRecord):
        if not -len(weights) <= call < len(weights):
            raise IndexError(f"there is no call {call}: the layer was called {len(weights)} times.")
        weights = cast(AttentionRecord, weights[call])
    record = weights
    graph = None if record.graph.is_dense else record.graph
    if isinstance(record.weights, list):
        is_batch, count = True, len(record.weights)
    else:
        is_batch, count = record.weights.dim() > (3 if graph is None else 2), record.weights.size(0)
    if is_batch and element is None and count == 1:
        element = 0
    if is_batch and element is None:
        raise ValueError(f"the layer was called with a batch of {count}: choose element=0 to element={count - 1}.")
    if not is_batch and element is not None:
        raise ValueError(f"the layer was not called with a batch, so there is no element {element}: leave it out.")
    return record.weights if element is None else _element(record.weights, element), graph


def _element(weights: Any, element: int) -> Any:
    if not 0 <= element < len(weights):
        raise IndexError(f"there is no element {element}: the batch has {len(weights)}.")
    return weights[element]


def matrices(weights: ArrayLike, edge_index: GraphLike | None) -> Tensor:
    """Checks weights, and returns them as `[H, N, M]`, with zeros between nodes that have no edge."""
    if edge_index is None:
        return complete_weights(weights)
    edges, (num_sources, num_targets) = edge_list(edge_index)
    alpha = edge_weights(weights, edges)
    if num_targets * num_sources > _MAX_ENTRIES:
        raise ValueError(
            f"a matrix of {num_targets} targets and {num_sources} sources could not be read: draw the ego network of "
            "one node with attention_graph (node=...)."
        )
    matrix = alpha.new_zeros(num_targets * num_sources, alpha.size(1))
    matrix.index_add_(0, edges[1] * num_sources + edges[0], alpha)
    return matrix.t().reshape(-1, num_targets, num_sources)


def _as_weights(weights: ArrayLike) -> Tensor:
    """Returns weights as float64 numbers on the CPU, after checking that they are finite and not negative."""
    if isinstance(weights, (list, tuple)) and any(isinstance(part, Tensor) for part in weights):
        raise ValueError(
            f"got {len(weights)} tensors, such as the weights of a packed graph's blocks: take one of them, "
            "weights[0], or choose element=0."
        )
    try:
        weights = torch.as_tensor(weights)
    except (TypeError, RuntimeError, ValueError) as error:
        raise TypeError(f"attention weights must be numbers; got {reprlib.repr(weights)} ({error}).") from None
    if weights.is_complex():
        raise ValueError(f"attention weights must be real numbers; got {weights.dtype}.")
    weights = weights.detach().cpu().double()
    if not bool(weights.isfinite().all()) or bool((weights < 0).any()):
        raise ValueError(
            "attention weights must be finite and not negative: if these are logits, take their softmax first."
        )
    return weights


def complete_weights(weights: ArrayLike) -> Tensor:
    """Checks the weights of a complete graph, and returns them as `[H, N, M]`."""
    weights = _as_weights(weights)
    if weights.dim() == 4:
        raise ValueError(
            f"weights of shape {list(weights.shape)} are those of a batch: take one element of it, weights[0], or "
            "choose element=0."
        )
    if weights.dim() not in (2, 3) or weights.numel() == 0:
        raise ValueError(
            f"weights must be [N, M] or [H, N, M], and not empty; got {list(weights.shape)}. Weights of edges, [E] or "
            "[E, H], come with its edge_index: pass it, too."
        )
    return weights if weights.dim() == 3 else weights.unsqueeze(0)


def edge_weights(weights: ArrayLike, edges: Tensor) -> Tensor:
    """Checks the weights of edges, and returns them as `[E, H]`."""
    weights = _as_weights(weights)
    if weights.dim() == 3:
        raise ValueError(
            f"weights of shape {list(weights.shape)} are those of a batch: take one element of it, weights[0], or "
            "choose element=0."
        )
    if weights.dim() not in (1, 2) or weights.size(0) != edges.size(1) or weights.numel() == 0:
        raise ValueError(
            f"weights must be [E] or [E, H] with one row for each of the graph's {edges.size(1)} edges, and not empty; "
            f"got {list(weights.shape)}. Pass the edge_index that the layer returns with them, which includes "
            "self-loops."
        )
    return weights if weights.dim() == 2 else weights.unsqueeze(1)


def edge_list(edge_index: GraphLike | NDArray[Any], at_least: int = 0) -> tuple[Tensor, tuple[int, int]]:
    """Returns sources and targets on the CPU, `[2, E]`, and their numbers, which are `at_least` this if unknown."""
    graph = as_graph(torch.as_tensor(edge_index) if isinstance(edge_index, np.ndarray) else edge_index)
    if graph.is_dense:  # pictures of graphs draw edges
        raise ValueError(
            "a CompleteGraph has no list of edges: its weights, [N, M] or [H, N, M], come without a graph. Draw them "
            "with attention_matrix or attention_arcs."
        )
    graph = graph.listed()
    sizes = graph.num_sources, graph.num_targets
    if None in sizes:
        most = int(graph.adjacency.max()) + 1 if graph.adjacency.numel() else 0
        graph = graph.with_sizes(*(max(most, at_least) if size is None else size for size in sizes))
    return torch.stack(graph.sources_and_targets()).cpu(), (graph.num_sources or 0, graph.num_targets or 0)


def edges_within(edge_index: GraphLike, **per_node: Any) -> tuple[Tensor, int]:
    """Returns the edges of a graph whose sources and targets are the same nodes, and the number of nodes.

    If the graph does not say how many nodes there are, what is given per node does.
    """
    counts = {name: len(x) for name, x in per_node.items() if x is not None and not isinstance(x, Mapping)}
    edges, (num_sources, num_targets) = edge_list(edge_index, max(counts.values(), default=0))
    if num_sources != num_targets:
        raise ValueError(
            f"sources and targets must be the same nodes; this graph has {num_sources} and {num_targets} of them. "
            "For other graphs, there are attention_matrix and attention_entropy."
        )
    for name, count in counts.items():
        if count != num_targets:
            raise ValueError(f"{name} must have one entry for each of the graph's {num_targets} nodes; got {count}.")
    return edges, num_targets


def named_layers(weights_by_layer: Layers) -> dict[str, Weights]:
    """Returns the weights or records of each layer by its name, or by its number if it has no name."""
    if isinstance(weights_by_layer, Mapping):
        layers = {str(name): weights for name, weights in weights_by_layer.items()}
    elif is_recorded(weights_by_layer):  # one layer
        calls = [weights_by_layer] if isinstance(weights_by_layer, AttentionRecord) else weights_by_layer
        layers = {f"call {number}": weights for number, weights in enumerate(calls)}
    else:
        layers = {f"layer {number}": weights for number, weights in enumerate(weights_by_layer)}
    if not layers:
        raise ValueError(
            "there is no layer: run the model inside gattn.record_attention(model), or pass the weights of at least "
            "one layer, in a list or by name."
        )
    return layers


def unpacked_layers(
    weights_by_layer: Layers, edge_index: GraphLike | None, *, call: int = -1, element: int | None = None
) -> dict[str, tuple[ArrayLike, GraphLike | None]]:
    """Returns weights and graph of each layer, by name; either all graphs are complete, `None`, or none is."""
    layers = {
        name: unpack(weights, edge_index, call=call, element=element)
        for name, weights in named_layers(weights_by_layer).items()
    }
    complete = [name for name, (_, graph) in layers.items() if graph is None]
    if 0 < len(complete) < len(layers):
        others = [name for name in layers if name not in complete]
        raise ValueError(
            f"some layers attend along edges ({', '.join(others)}), others between all nodes ({', '.join(complete)}): "
            "pass the layers of one kind, such as {name: records[name] for name in names}."
        )
    return layers


def select_head(weights: Tensor, head: int | str | None, dim: int) -> Tensor:
    """Selects one head, or the mean of all heads, in dimension `dim`."""
    count = weights.size(dim)
    if head == "mean":
        return weights.mean(dim)
    if head is None and count > 1:
        raise ValueError(
            f"these are the weights of {count} heads: choose head=0 to head={count - 1}, or head='mean' (or, if these "
            "are the weights of a batch, take one element of it, weights[0])."
        )
    head = 0 if head is None else head
    if not isinstance(head, int) or isinstance(head, bool):
        raise ValueError(f"head must be the number of a head, or 'mean'; got {head!r}.")
    if not 0 <= head < count:
        raise IndexError(f"there is no head {head}: the weights have {count}, from 0 to {count - 1}.")
    return weights.select(dim, head)
