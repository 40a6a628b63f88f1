"""Gathering the attention weights of a model while it runs."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from gattn.graphs import FLOWS, CompleteGraph, Graph, as_graph
from gattn.torch_private import is_compiled

__all__ = ["AttentionRecord", "record_attention", "recorded"]

_Attend = TypeVar("_Attend", bound=Callable[..., Any])


class AttentionRecord(NamedTuple):
    """The weights of one call of one layer."""

    weights: Any
    """As `gattn.attend` returns them: `[E, H]`, of a complete graph `[H, N, M]`, each with the batch in front; of a
    packed graph a list, one for each block."""
    graph: Graph
    """Who attended to whom, self-loops included."""

    @property
    def edge_index(self) -> Tensor | None:
        """The edges that the weights belong to, `[2, E]`, sources above targets; `None` for a complete graph."""
        if isinstance(self.graph, CompleteGraph):  # whose weights are matrices
            return None
        edge_index = self.graph.edge_index
        return edge_index if self.graph.flow == FLOWS[0] else edge_index.flip(0)


@contextmanager
def record_attention(model: Module, *, detach: bool = True) -> Iterator[dict[str, list[AttentionRecord]]]:
    """Inside the block, gathers the weights of every attention layer of a model, whenever it runs.

    Outputs, gradients and random numbers are those without it. Weights are those before dropout (after it, where the
    layer itself returns those). A compiled model records nothing, so it is refused.

    Args:
        model: Any module with gattn's layers inside, or whose own modules call `gattn.attend`.
        detach: Whether weights are cut off from the graph of gradients. (default: `True`)

    Returns:
        Records by the name of the layer in the model, as in `model.named_modules()` (the model itself is `""`), in the
        order of their first calls: a list with one `AttentionRecord` a call.

    Raises:
        TypeError: If `model` is no module.
        ValueError: If it is compiled.

    Example:
        >>> import torch, gattn
        >>> model = gattn.models.TransformerLM(num_tokens=10, channels=16, num_layers=2, heads=4).eval()
        >>> with gattn.record_attention(model) as records:
        ...     logits = model(torch.zeros(1, 5, dtype=torch.int64))
        >>> list(records)
        ['layers.0.self_attn', 'layers.1.self_attn']
        >>> records["layers.0.self_attn"][0].weights.shape
        torch.Size([1, 4, 5, 5])
    """
    recorder = _Recorder(model, detach)
    _switch(recorder, True)
    try:
        yield recorder.records
    finally:
        _switch(recorder, False)


def recorded(attend: _Attend) -> _Attend:
    """Makes a method that attends known to `record_attention`."""

    @wraps(attend)
    def method(self: Module, *args: Any, **kwargs: Any) -> Any:
        if not _recorders or torch.compiler.is_compiling():
            return attend(self, *args, **kwargs)
        layers = [(recorder, name) for recorder in _recorders if (name := recorder.name_of(self)) is not None]
        if not layers:
            return attend(self, *args, **kwargs)
        return_weights = kwargs.pop("return_weights", False)
        out, weights, *more = attend(self, *args, **kwargs, return_weights=return_weights or True)
        graph = _sized(self, *args, **kwargs)
        for recorder, name in layers:
            recorder.add(name, weights, graph)
        results = (out, weights, *more) if return_weights else (out, *more)
        return results if len(results) > 1 else out

    return method  # type: ignore[return-value]


class _Recorder:
    """What one block gathers."""

    def __init__(self, model: Module, detach: bool):
        if not isinstance(model, Module):
            raise TypeError(f"record_attention takes a torch.nn.Module; got {type(model).__name__}.")
        self.names: dict[Module, str] = {module: name for name, module in model.named_modules()}
        for module in self.names:
            if is_compiled(module):
                raise ValueError(
                    "compiled code keeps no weights: record the model that was given to torch.compile (its weights are "
                    "the same ones; torch.compile(model)._orig_mod is the model)."
                )
        self.detach = detach
        self.records: dict[str, list[AttentionRecord]] = {}

    def name_of(self, layer: Module) -> str | None:
        """The name of a layer; where it is not the model's, as in `gattn.attend`, of the module that called."""
        if layer in self.names:
            return self.names[layer]
        # Hooks would say it, too, but PyTorch's layers and ours take other paths where there are some.
        frame = inspect.currentframe()
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, Module) and caller in self.names:
                return self.names[caller]
            frame = frame.f_back
        return None

    def add(self, name: str, weights: Any, graph: Graph) -> None:
        if self.detach:
            weights = [x.detach() for x in weights] if isinstance(weights, list) else weights.detach()
        self.records.setdefault(name, []).append(AttentionRecord(weights, graph))


#: Who records at the moment; replaced, never changed, so that other threads may read it.
_recorders: tuple[_Recorder, ...] = ()
_lock = threading.Lock()


def _switch(recorder: _Recorder, on: bool) -> None:
    global _recorders
    with _lock:
        others = tuple(other for other in _recorders if other is not recorder)
        _recorders = (*others, recorder) if on else others


def _sized(layer: Any, query: Tensor | None, key: Tensor, value: Tensor, graph: Any, **kwargs: Any) -> Graph:
    """The graph with its sizes known, as `attend` finds them."""
    num_targets = None if query is None else query.size(value.dim() - 3)
    return as_graph(graph, layer.flow, sharded=True).resolve(value.size(-3), num_targets)
