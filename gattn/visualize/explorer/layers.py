"""What `explore` takes: a model, records or weights, as one list of layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.utils import is_sparse

from gattn.graphs import Graph, TypedGraph
from gattn.nn import HGTConv
from gattn.recording import AttentionRecord, record_attention
from gattn.visualize.inputs import complete_weights, edge_list, edge_weights

__all__ = ["Layer", "Types", "as_layers", "is_edges", "is_text", "read", "run"]

#: The types of nodes, and how many nodes of each follow one another.
Types: TypeAlias = tuple[tuple[str, int], ...]


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
    types: Types = ()
    """The types of the nodes: of sources followed by those of targets, where these are others."""
    relations: Sequence[str] | None = None
    """The type of each edge."""


def is_text(inputs: tuple[Any, ...]) -> bool:
    """Whether these are a tokenizer and a text."""
    return len(inputs) == 2 and isinstance(inputs[1], str) and callable(inputs[0])


def read(model: Module, tokenizer: Any, text: str) -> tuple[dict[str, list[AttentionRecord]], list[str]]:
    """Runs a model of `transformers` on a text, and returns the records of its layers and the tokens."""
    encoded = tokenizer(text, return_tensors="pt")
    device = next((parameter.device for parameter in model.parameters()), None)
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    if all(getattr(config, "_attn_implementation", None) != "gattn" for config in configs):
        raise ValueError(
            "explore(model, tokenizer, text) takes a model of transformers that runs on gattn: import "
            'gattn.huggingface, and call model.set_attn_implementation("gattn") first.'
        )
    records = run(model, (), {name: values.to(device) for name, values in encoded.items()})
    return records, [tokenizer.decode([number]) for number in encoded["input_ids"][0].tolist()]


def run(
    model: Module, inputs: tuple[Any, ...], named: Mapping[str, Any] | None = None
) -> dict[str, list[AttentionRecord]]:
    """Runs a model in evaluation mode, and returns the records of its layers."""
    if not inputs and not named:
        raise ValueError(
            "explore(model) needs the model's inputs, too: explore(model, x, edge_index). To pass keyword arguments, "
            "run the model inside gattn.record_attention(model), and explore the records."
        )
    training = {module: module.training for module in model.modules()}
    model.eval()
    handles = []
    try:
        with torch.no_grad(), record_attention(model) as records:
            for name, module in model.named_modules():
                if isinstance(module, HGTConv):
                    handles.append(module.register_forward_hook(_typed_record(records, name), with_kwargs=True))
            model(*inputs, **(named or {}))
    finally:
        for handle in handles:
            handle.remove()
        for module, was_training in training.items():
            module.training = was_training
    return records


def _typed_record(records: dict[str, list[AttentionRecord]], name: str) -> Callable[..., None]:
    """A hook after an `HGTConv`, whose record lists sources per edge type: the nodes themselves take their place."""

    def hook(layer: HGTConv, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        given = dict(zip(("x_dict", "edge_index_dict"), args, strict=False)) | kwargs
        x = layer._features(given["x_dict"], layer.kqv_lin.lins)
        relations = layer._relations(x, given["edge_index_dict"], layer.edge_types)
        if not relations:
            return
        sizes = {node_type: rows.size(-2) for node_type, rows in x.items()}
        first = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
        nodes = {node_type: torch.arange(size) + first[node_type] for node_type, size in sizes.items()}
        sources = [nodes[source] if graph.num_edges else nodes[source][:0] for source, _, graph in relations.values()]
        targets = [nodes[node_type] for node_type in sizes if node_type in layer.dst_node_types]
        record = records[name][-1]
        (source, target), _ = edge_list(record.graph)
        edges = torch.stack([torch.cat(sources)[source], torch.cat(targets)[target]])
        numbers = torch.arange(len(sources)).repeat_interleave(torch.tensor([len(part) for part in sources]))
        records[name][-1] = record._replace(graph=TypedGraph(edges, numbers[source], list(relations), sizes))

    return hook


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
            types, relations = _types(name, graph, num_sources, num_targets)
            alpha = edge_weights(batch.of(weights, 2), edges)
            return Layer(name, edges, alpha, num_sources, num_targets, False, types, relations)
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


def _types(name: str, graph: Graph, num_sources: int, num_targets: int) -> tuple[Types, list[str] | None]:
    """Returns the types of nodes and edges, as far as they are known."""
    if isinstance(graph, TypedGraph):
        words = [str(x[1]) if isinstance(x, tuple) and len(x) == 3 else str(x) for x in graph.edge_types]
        return tuple((graph.num_nodes or {}).items()), [words[number] for number in graph.edge_type.tolist()]
    found = re.search(r"<([^<>]+?)___[^<>]+___([^<>]+?)>", name)  # PyG's HeteroConv names its layers like this
    if not found:
        return (), None
    source, target = (found[1], num_sources), (found[2], num_targets)
    return ((source,) if source == target else (source, target)), None


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
