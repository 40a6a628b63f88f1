"""Other graphs under a model, in place of those that its masks stand for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.nn import Module

from gattn.blocks import Setting
from gattn.errors import InputError, InputTypeError
from gattn.graphs import Graph, GraphLike, as_graph

__all__ = ["Swap", "graph", "swapped"]


class Swap:
    """What one block of `graph` puts under a model.

    Args:
        graph: A graph, or a function of a layer's number and the padding that returns one.
        layers: The numbers of the layers, or `None` for all.
    """

    def __init__(self, graph: Any, layers: Collection[int] | None):
        self.graph, self.layers = graph, layers
        self.numbers: WeakKeyDictionary[Module, int] = WeakKeyDictionary()

    def number(self, module: Module) -> int:
        """The number of a layer: its `layer_idx`, or its place in the order in which layers first run."""
        given = getattr(module, "layer_idx", None)
        return self.numbers.setdefault(module, len(self.numbers) if given is None else given)

    def of(self, module: Module, keep: Tensor | None, batch: int, num_targets: int, num_sources: int) -> Graph | None:
        """The graph for a layer, or `None` if the block leaves it alone."""
        number = self.number(module)
        if self.layers is not None and number not in self.layers:
            return None
        if num_targets != num_sources:
            raise InputError(
                f"gattn.huggingface.graph: layer {number} has {num_targets} targets and {num_sources} sources, as when "
                "decoding with a cache. A graph of a whole text says nothing about a part of it: use use_cache=False."
            )
        made = as_graph(self.graph(number, keep) if callable(self.graph) else self.graph)
        if made.num_targets not in (None, num_targets, batch * num_targets):
            raise InputError(
                f"the graph for layer {number} must have the {num_targets} tokens of each text, or the "
                f"{batch * num_targets} of the whole batch laid end to end, padding included; got {made}."
            )
        return made


#: That of the innermost block that is open.
_swap: Setting[Swap | None] = Setting(None)


@contextmanager
def graph(
    graph: GraphLike | Callable[[int, Tensor | None], GraphLike], layers: Collection[int] | None = None
) -> Iterator[None]:
    """Puts a graph under a model of `transformers` inside the block, in place of the model's own masks.

    Self-attention then runs on that graph, and tokens of padding are still not seen. Cross attention keeps its own
    masks.

    Args:
        graph: The graph of each text, with N nodes; or of the whole batch, with B·N nodes, text after text. Or a
            function that returns one, which gets the number of the layer and which tokens are there (`[B, N]`, `None`
            if all are).
        layers: The numbers of the layers that it is for, counted from 0. (default: `None`, all)

    Raises:
        TypeError: If `graph` is neither a graph nor a function.
        ValueError: In use, if the graph has another number of nodes, the model decodes with a cache, or weights are
            asked for, which `gattn.record_attention` gathers.

    Example:
        >>> import torch, gattn.huggingface
        >>> from transformers import LlamaConfig, LlamaModel
        >>> config = LlamaConfig(vocab_size=10, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        ...                      intermediate_size=8, attn_implementation="gattn")
        >>> model, tokens = LlamaModel(config).eval(), torch.arange(10).view(1, 10)
        >>> window = gattn.CompleteGraph(10, causal=True, window=3)
        >>> with gattn.huggingface.graph(lambda layer, tokens: window if layer else gattn.CompleteGraph(10)):
        ...     model(tokens, use_cache=False).last_hidden_state.shape
        torch.Size([1, 10, 8])
    """
    if not callable(graph):
        try:
            as_graph(graph)
        except TypeError as error:
            raise InputTypeError(f"graph must be a graph, or a function that returns one; got {graph!r}.") from error
    with _swap.block(Swap(graph, layers)):
        yield


def swapped() -> Swap | None:
    """The innermost block that is open."""
    return _swap.value
