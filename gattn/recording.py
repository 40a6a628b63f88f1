"""Gathering the attention weights of a model while it runs."""

from __future__ import annotations

import copy
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, MultiheadAttention, TransformerEncoderLayer
from torch_geometric.utils import to_edge_index

from gattn.graphs import FLOWS, CompleteGraph, Graph, SparseGraph
from gattn.torch_private import is_compiled

__all__ = ["AttentionRecord", "is_watched", "record", "record_attention", "record_own_layers"]


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
        if self.graph.is_dense:  # whose weights are matrices
            return None
        edge_index = self.graph.edge_index
        return edge_index if self.graph.flow == FLOWS[0] else edge_index.flip(0)


@contextmanager
def record_attention(model: Module, *, detach: bool = True) -> Iterator[dict[str, list[AttentionRecord]]]:
    """Gathers the weights of every attention layer of a model, whenever it runs inside the block.

    These layers are gattn's own, modules that call `gattn.attend`, `gattn.weigh` or `gattn.aggregate`,
    `torch.nn.MultiheadAttention` (also inside `torch.nn.TransformerEncoderLayer`), and PyG's layers with the argument
    `return_attention_weights`, such as `GATConv`. Outputs, gradients and random numbers are the same as without
    recording: where a call does not return its weights anyway, they are computed a second time. Weights are those
    before dropout, unless the layer itself returns those after it, as PyG's `GATConv` does. Weights that
    `gattn.aggregate` takes as `gattn.weigh` returned them make one record, and others make one each. A compiled model
    records nothing, so it is refused.

    Args:
        model: Any module that contains such layers.
        detach: Whether weights are cut off from the graph of gradients. (default: `True`)

    Returns:
        Records by the name of the layer in the model, as in `model.named_modules()` (the model itself is `""`), in the
        order of their first calls: a list with one `AttentionRecord` per call.

    Raises:
        TypeError: If `model` is not a module.
        ValueError: If it is compiled; at the end of the block, if nothing was recorded and no layer of the model is
            known to attend.

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
    recorder = _Recorder(model, detach, _replacements(model))
    with recorder.switched_on():
        yield recorder.records
    if not recorder.records:
        _check_has_attention(model)


@contextmanager
def record_own_layers(model: Module) -> Iterator[dict[str, list[AttentionRecord]]]:
    """Gathers the weights of gattn's layers alone, if there are any, as `record_attention` does."""
    recorder = _Recorder(model, True, {})
    with recorder.switched_on():
        yield recorder.records


def is_watched(layer: Module) -> bool:
    """Whether `record` would record the weights of a layer now."""
    if not _recorders or torch.compiler.is_compiling():
        return False
    return any(recorder.name_of(layer) is not None for recorder in _recorders)


def record(layer: Module, graph: Graph, weights: Any, part: str | None = None) -> None:
    """Records the weights of a layer, for every `record_attention` that knows it.

    Args:
        layer: The layer; for `gattn.attend`, which is none of the model's, the module that is running counts.
        graph: Who attended to whom, with its sizes known.
        weights: As `gattn.attend` returns them on this graph.
        part: `"weighed"` if `weights` were not applied yet, `"applied"` if they were given: the same weights are
            recorded once. (default: `None`, the weights of a whole call)
    """
    if not torch.compiler.is_compiling():
        for recorder in _recorders:
            if (name := recorder.name_of(layer)) is not None and not recorder.has_just(weights, part):
                recorder.add(name, weights, graph)


class _Recorder:
    """What one block gathers."""

    def __init__(self, model: Module, detach: bool, replacements: _Replacements):
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
        self.replacements = replacements
        self.records: dict[str, list[AttentionRecord]] = {}
        self._weighed: list[weakref.ref[Tensor]] = []

    def name_of(self, layer: Module) -> str | None:
        """The name of a layer; where it is not the model's, as in `gattn.attend`, of the innermost that is running."""
        return next((self.names[module] for module in (layer, *reversed(_running())) if module in self.names), None)

    def has_just(self, weights: Any, part: str | None) -> bool:
        """Whether weights that are applied now were recorded when they were made; keeps those that are made now."""
        first = weights[0] if isinstance(weights, list) and weights else weights
        if part == "weighed":
            self._weighed = [other for other in self._weighed if other() is not None] + [weakref.ref(first)]
        same = [other for other in self._weighed if part == "applied" and other() is first]
        for other in same:
            self._weighed.remove(other)
        return bool(same)

    def add(self, name: str, weights: Any, graph: Graph) -> None:
        if self.detach:
            weights = [x.detach() for x in weights] if isinstance(weights, list) else weights.detach()
        self.records.setdefault(name, []).append(AttentionRecord(weights, graph))

    @contextmanager
    def switched_on(self) -> Iterator[None]:
        """Gathers weights inside the block."""
        _switch(self, True)
        try:
            yield
        finally:
            _switch(self, False)


#: How the layers of others are recorded: what takes the place of a class's `forward`, given the original.
_Replacements = dict[type[Module], Callable[..., Any]]

#: Who records at the moment; replaced, never changed, so that other threads may read it.
_recorders: tuple[_Recorder, ...] = ()
#: The methods that are replaced at the moment. Classes are changed, not layers: a copy of a layer is then a layer of
#: its own, and PyTorch's fast paths, which hooks would switch off, give the same outputs.
_patches: dict[type[Module], _Patch] = {}
_lock = threading.RLock()


def _renew_lock() -> None:
    """In a forked process, whose copy of the lock may belong to a thread that is not there."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


class _Patch:
    """A method that is replaced, until another tool that replaced it later is gone, too.

    Args:
        cls: The class.
        name: The method's name.
        replacement: Takes the original and its arguments.
    """

    def __init__(self, cls: type[Module], name: str, replacement: Callable[..., Any]):
        original = getattr(cls, name)

        @wraps(original)
        def method(module: Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            if not self._is_on:
                with _lock:
                    self.undo()
                return original(module, *args, **kwargs)
            return replacement(original, module, *args, **kwargs)

        self._place, self._original, self._method, self._is_on = (cls, name), original, method, True
        setattr(cls, name, method)

    def undo(self) -> None:
        """Calls the original from now on, and puts it back unless another tool's replacement calls this one."""
        cls, name = self._place
        self._is_on = False
        if vars(cls)[name] is self._method:
            setattr(cls, name, self._original)


def _switch(recorder: _Recorder, on: bool) -> None:
    global _recorders
    with _lock:
        others = tuple(other for other in _recorders if other is not recorder)
        _recorders = (*others, recorder) if on else others
        needed = {cls: _recorded_forward(new) for other in _recorders for cls, new in other.replacements.items()}
        if _recorders:
            needed[Module] = _call_in_turn
        for cls, new in needed.items():
            if cls not in _patches:
                _patches[cls] = _Patch(cls, "__call__" if cls is Module else "forward", new)
        for cls in _patches.keys() - needed.keys():
            _patches.pop(cls).undo()


#: Which modules are running, the innermost last. Hooks would say it, too, but layers of PyTorch and ours take other
#: paths where there are some.
_threads = threading.local()


def _running() -> list[Module]:
    modules: list[Module] = _threads.__dict__.setdefault("modules", [])
    return modules


def _call_in_turn(call: Callable[..., Any], module: Module, *args: Any, **kwargs: Any) -> Any:
    """Calls a module, and keeps it in the list of those that are running."""
    modules = _running()
    modules.append(module)
    try:
        return call(module, *args, **kwargs)
    finally:
        modules.pop()


def _recorded_forward(replacement: Callable[..., Any]) -> Callable[..., Any]:
    """Makes another's layer known to `record_attention`."""

    def method(forward: Callable[..., Any], module: Module, *args: Any, **kwargs: Any) -> Any:
        layers = [(recorder, recorder.names[module]) for recorder in _recorders if module in recorder.names]
        if not layers:
            return forward(module, *args, **kwargs)
        call = inspect.signature(forward).bind(module, *args, **kwargs)
        return replacement(partial(forward, module), module, call, layers)

    return method


def _replacements(model: Module) -> _Replacements:
    """What must be replaced so that the layers of PyTorch and PyG in a model are recorded."""
    found: _Replacements = {}
    for module in model.modules() if isinstance(model, Module) else ():
        for cls in type(module).__mro__:
            forward = cls.__dict__.get("forward")
            if cls in (MultiheadAttention, TransformerEncoderLayer):
                found[cls] = _call_of_multihead if cls is MultiheadAttention else _call_of_encoder_layer
            elif cls.__module__.startswith("torch_geometric.") and inspect.isfunction(forward):
                if "return_attention_weights" not in inspect.signature(forward).parameters:
                    continue
                found[cls] = _call_of_pyg
            else:
                continue
            break  # a class further up is called by this one
    return found


_Layers = list[tuple[_Recorder, str]]


def _call_of_pyg(forward: Any, layer: Any, call: inspect.BoundArguments, layers: _Layers) -> Any:
    """Calls one of PyG's layers, which returns its weights."""
    is_asked = isinstance(call.arguments.get("return_attention_weights"), bool)  # they return weights for False, too
    call.arguments["return_attention_weights"] = True
    result = forward(*call.args[1:], **call.kwargs)
    out, edges = result[0], result[1]
    edges, weights = edges if isinstance(edges, tuple) else (edges, None)
    if not isinstance(edges, Tensor):  # a torch_sparse.SparseTensor
        row, column, weights = edges.coo()
        edges = torch.stack([column, row])
    elif edges.layout != torch.strided:
        edges = to_edge_index(edges)[0].flip(0)  # of an adjacency, rows are targets
    x = call.arguments["x"]
    ends = [None if part is None else part.size(layer.node_dim) for part in ((x, x) if isinstance(x, Tensor) else x)]
    num_sources, num_targets = ends if layer.flow == FLOWS[0] else ends[::-1]
    graph = SparseGraph(edges, num_targets, num_sources, flow=layer.flow)
    for recorder, name in layers:
        recorder.add(name, weights if weights.dim() > 1 else weights.unsqueeze(-1), graph)
    return result if is_asked else out


def _call_of_multihead(forward: Any, layer: Any, call: inspect.BoundArguments, layers: _Layers) -> Any:
    """Calls `torch.nn.MultiheadAttention` as asked, and then a copy without dropout for the weights."""
    out = forward(*call.args[1:], **call.kwargs)
    plain = copy.copy(layer)
    plain.training = False
    call.arguments |= {"need_weights": True, "average_attn_weights": False}
    with torch.set_grad_enabled(torch.is_grad_enabled() and not all(recorder.detach for recorder, _ in layers)):
        weights = forward.func(plain, *call.args[1:], **call.kwargs)[1]
    num_targets, num_sources = weights.shape[-2:]
    is_causal = call.arguments.get("is_causal", False) and num_targets == num_sources
    for recorder, name in layers:
        recorder.add(name, weights, CompleteGraph(num_targets, num_sources, causal=is_causal))
    return out


def _call_of_encoder_layer(forward: Any, layer: Any, call: inspect.BoundArguments, layers: _Layers) -> Any:
    """Calls `torch.nn.TransformerEncoderLayer`, and its self-attention too if its fast path leaves that out."""

    def count() -> int:
        return sum(len(recorder.records.get(recorder.names[layer.self_attn], ())) for recorder, _ in layers)

    before = count()
    out = forward(*call.args[1:], **call.kwargs)
    if isinstance(layer.self_attn, MultiheadAttention) and count() == before:
        x, given = call.arguments["src"], call.arguments.get
        mask, padding, is_causal = given("src_mask"), given("src_key_padding_mask"), given("is_causal")
        if x.is_nested:  # torch.nn.TransformerEncoder leaves out padding
            lengths = torch.tensor([len(sequence) for sequence in x.unbind()], device=x.device)
            x = x.to_padded_tensor(0.0)
            padding = torch.arange(x.size(1), device=x.device) >= lengths.unsqueeze(1)
        x = layer.norm1(x) if layer.norm_first else x
        layer.self_attn(x, x, x, padding, attn_mask=mask, need_weights=False, is_causal=bool(is_causal))
    return out


def _check_has_attention(model: Module) -> None:
    """Raises an error if nothing could be recorded of a model."""
    if _replacements(model) or any(
        cls.__module__.startswith("gattn.") for module in model.modules() for cls in type(module).__mro__
    ):
        return
    raise ValueError(
        f"nothing was recorded: either {type(model).__name__} did not run inside the block, or it has no attention "
        "layer that record_attention can record, which is a layer of gattn, a module that calls gattn.attend, weigh or "
        "aggregate, torch.nn.MultiheadAttention, or a layer of PyG with the argument return_attention_weights. For "
        "PyG's other attention layers, gattn.nn has drop-in replacements."
    )
