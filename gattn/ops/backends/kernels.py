"""What backends with fused kernels for lists of edges share."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from gattn.distributions import Law
from gattn.graphs import EdgeList
from gattn.ops.backends.base import Backend, dress_logits, finish, log_sum_of_edges, new_seed
from gattn.ops.call import NO_SCORE, Call, Result, Way
from gattn.ops.custom_parts import as_logits, finished_logits, with_finished, with_finished_weights
from gattn.ops.dropout import drop
from gattn.ops.operator import AttentionOperator, inputs_of, presence_of
from gattn.ops.plans import Given, Plan
from gattn.ops.terms import GIVEN, PLACES, Inputs
from gattn.scores import DotScore, Family, family_of
from gattn.torch_private import is_traced

__all__ = ["DTYPES", "KernelBackend", "dense_rows", "flat"]

#: The types that kernels can store, in the order of the CPU kernels' StorageType.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class KernelBackend(Backend):
    """A backend that consists of an operator and a layout of the edges, which it caches."""

    has_operators = True
    operator: ClassVar[AttentionOperator]

    #: Whether vectors of edges that PyTorch makes from features or types have the type of the computation.
    widens_edges: ClassVar[bool] = False

    #: The layout that `layout_of(edge_index, num_sources, num_targets, self_loops, flow)` returns has `num_edges`.
    layout_of: ClassVar[Callable[..., Any]]

    def serves(self, device: torch.device) -> bool:
        """Whether its kernels take tensors on this device."""
        return device.type in (self.devices or ())

    def knows(self, family: Family | None) -> bool:
        """Whether its kernels have the formula of a family of scores."""
        return family is not None

    def knows_law(self, law: Law | None) -> bool:
        """Whether its kernels have the formula of a distribution."""
        return law is not None

    def projects_edges(self, call: Call) -> bool:
        """Whether its kernels make the vectors of edges from features or types, for a call whose family they know."""
        return not isinstance(call.edge, tuple) and not isinstance(call.edge_value, tuple)

    def refuses(self, call: Call) -> str | None:
        """See `Backend.refuses`."""
        if not self.serves(call.value.device):
            return f"the tensors are on {call.value.device}"
        if call.value.dtype not in DTYPES:
            return f"it supports float64, float32, bfloat16 and float16, not {call.value.dtype}"
        return None

    def ways(self, call: Call) -> list[Way]:
        """See `Backend.ways`."""
        whole, parts = "kernels for lists of edges", "kernels for sums, of weights or logits that PyTorch computes"
        if self._knows_score(call) and self.knows_law(call.law):
            return [Way(whole, None), Way(parts, "kernels know the score and the distribution")]
        unknown = call.score if not self._knows_score(call) else call.distribution
        return [Way(whole, f"they do not know {unknown!r}"), Way(parts, None)]

    def attend(self, call: Call) -> Result:
        """See `Backend.attend`."""
        knows_score, knows_law = self._knows_score(call), self.knows_law(call.law)
        # Kernels check indices and add self-loops themselves. But compiled code must know the number of weights, and
        # parts that kernels do not know are computed per edge.
        raw = knows_score and knows_law and not (call.weights and torch.compiler.is_compiling())
        edges = call.graph.edge_list(call.value.device, raw=raw)
        call = call.on_edges(edges, self._num_edges(call, edges))
        seed = new_seed(call.dropout, call.value.device)
        if not knows_score or (not knows_law and call.vectors_of_values is not None):
            call = call.with_edges()
        if not knows_law:
            call = with_finished_weights(call, edges, self._logits(call, edges))
        elif not knows_score:
            call = with_finished(call, edges, finished_logits(call, edges))
        out, alpha, log_sum = self.operator(self._ready(call), edges, seed)
        return finish(call, edges, out, alpha, None, seed)._replace(log_sum=log_sum)

    def plan(self, call: Call, given: Given) -> Plan | None:
        """See `Backend.plan`: there is one if all tensors arrive at the operator as they were given, or cast."""
        if given.edge_index is None or not self._knows_score(call) or not self.knows_law(call.law):
            return None
        if call.log_sum and not self.operator.has_log_sum:
            return None
        if (isinstance(call.edge, tuple) or isinstance(call.edge_value, tuple)) and not self.projects_edges(call):
            return None
        edges = call.graph.edge_list(call.value.device, raw=True)
        seed = torch.empty((), dtype=torch.int64) if call.dropout > 0.0 else None
        with torch.no_grad():  # nothing is computed, and hooks on saved tensors must see nothing
            call = call.on_edges(edges, self._num_edges(call, edges))
            ready = self._ready(call)
            inputs = inputs_of(ready, edges, seed)
        if inputs.values.dtype != call.dtype:  # as the output will be
            return None
        moves = _moves(inputs, given, call, ready)
        return None if moves is None else _KernelPlan(self, inputs, moves, call.weights, call.log_sum)

    def prepared(self, inputs: Inputs) -> Any:
        """What can be used again for inputs like these, with any numbers of nodes and edges."""
        return None

    def on_graph(self, prepared: Any, edges: tuple[Tensor, int, int, bool, str]) -> tuple[Any, int | None]:
        """What the operator takes as the `plan` of inputs on a graph, and the number of edges, if it costs nothing.

        Args:
            prepared: What `prepared` returned for such inputs.
            edges: The fields of the graph's `EdgeList`.
        """
        return None, EdgeList(*edges).num_edges

    def logits(self, call: Call) -> Any:
        """See `Backend.logits`."""
        return dress_logits(*self._logits_of_edges(call))

    def log_sum(self, call: Call) -> Tensor:
        """See `Backend.log_sum`."""
        return log_sum_of_edges(*self._logits_of_edges(call))

    def _logits_of_edges(self, call: Call) -> tuple[Call, EdgeList, Tensor]:
        edges = call.graph.edge_list(call.value.device)
        call = call.on_edges(edges, edges.num_edges)
        return call, edges, self._logits(call, edges)

    def _logits(self, call: Call, edges: EdgeList) -> Tensor:
        """The logits of a call, including its bias, `[..., E, H]`, in the type of the computation."""
        if not self._knows_score(call):
            return finished_logits(call, edges)
        _, logits, _ = self.operator(self._ready(as_logits(call)), edges, None)
        assert logits is not None
        return logits

    def _knows_score(self, call: Call) -> bool:
        return self.knows(family_of(call.score, call.channels))

    def _ready(self, call: Call) -> Call:
        """A call that the kernels fully know, with bias and mask per edge, in the types that the operator takes."""
        if call.score is NO_SCORE and isinstance(call.edge_value, tuple):
            call = _as_product(call)
        projects = self.projects_edges(call)
        is_made = not projects and (isinstance(call.edge, tuple) or isinstance(call.edge_value, tuple))
        # Gradients that PyTorch sums over a batch, nodes or edges are summed before they are rounded.
        is_wide = call.shares_vectors_of_edges or (self.widens_edges and is_made) or call.score.folds
        if is_wide:
            call = call.cast(call.compute)
        if not projects:
            call = call.with_edges()
        return call if is_wide else call.cast(call.dtype)

    def _num_edges(self, call: Call, edges: EdgeList) -> int | None:
        if edges.num_edges is None and call.has_edge_terms and not is_traced():
            num_edges: int = type(self).layout_of(*edges).num_edges
            return num_edges
        return edges.num_edges


#: Inputs whose types may differ from those given: what a call has in their place.
_CAST: dict[str, Callable[[Call], Any]] = {
    **{name: attrgetter(name) for name in ("query", "key", "value", "edge", "edge_value", "out_bias")},
    "bias": attrgetter("bias_of_edges"),
    "vector": lambda call: cast(Family, call.score.family(call.channels)).vector,
}


def _moves(inputs: Inputs, given: Given, call: Call, ready: Call) -> list[_Move] | None:
    """How each tensor of an operator's inputs follows from those given; `None` unless views and casts are enough.

    Args:
        inputs: The inputs.
        given: What was given.
        call: The call, before its tensors were cast.
        ready: The same call after that.
    """
    unused = {name for name, tensor in zip(GIVEN, given.tensors, strict=False) if isinstance(tensor, Tensor)}
    if inputs.value is None:
        unused.discard("value")
    moves = []
    for name, tensor, term in inputs.terms():
        if name not in GIVEN:  # which each call has of its own, and a number of the signature
            continue
        source = given.tensors[PLACES[name]]
        if source is None:
            return None
        view, dtype = tensor, None
        if name in _CAST and tensor.dtype != source.dtype:
            view, dtype = _CAST[name](call), tensor.dtype
            if name not in ("vector", "out_bias") and _CAST[name](ready) is not tensor:  # those are cast last
                return None
        new_dim = None
        if source is not view:
            if not isinstance(view, Tensor):
                return None
            found = [dim for dim in _NEW_DIMS if source.dim() >= 1 and _is_same(view, source.unsqueeze(dim))]
            if not found:
                return None
            new_dim = found[0]
        unused.discard(name)
        axis = term.letters[0] if term.letters[0] in "NME" else None
        moves.append(_Move(PLACES[name], new_dim, dtype, axis, -len(term.letters)))
    return None if unused else moves


#: Where scalar scores and masks without heads lack a dimension.
_NEW_DIMS = (-1, 1)


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """Whether tensors are the same numbers in memory."""
    first, second = ((x.dtype, x.data_ptr(), x.shape, x.stride()) for x in (tensor, other))
    return first == second


class _Move(NamedTuple):
    """What a tensor that was given becomes as one of an operator's inputs."""

    place: int
    new_dim: int | None
    """Where it gets a dimension of size 1; `None`: nowhere"""
    dtype: torch.dtype | None
    """The type that it gets; `None`: it has it"""
    axis: str | None
    """What it has rows for: N targets, M sources or E edges"""
    dim: int
    """The dimension of these rows"""


class _KernelPlan:
    """Calls of an operator that differ in nothing but numbers, nodes and edges."""

    def __init__(self, backend: KernelBackend, inputs: Inputs, moves: list[_Move], weights: bool | str, log_sum: bool):
        self.backend, self.moves, self.prepared = backend, moves, backend.prepared(inputs)
        self.weights, self.log_sum = weights, log_sum
        self.dtype = inputs.values.dtype
        self.presence = presence_of(inputs)
        self.inputs: list[Any] = [None if isinstance(value, Tensor) else value for value in inputs]
        if inputs.sink is not None:
            with torch.inference_mode(False):  # what is kept must also serve training
                self.inputs[_SINK] = inputs.sink.clone()
        #: Where, and in which dimension, there must be as many rows as sources, targets and edges.
        self.with_rows: dict[str, list[tuple[int, int]]] = {"M": [], "N": [], "E": []}
        for move in moves:
            if move.axis is not None and move.place not in (_QUERY, _KEY):  # from which the numbers are taken
                self.with_rows[move.axis].append((move.place, move.dim))

    def __call__(self, given: Given) -> Result | None:
        """See `Plan`."""
        inputs, tensors, edge_index = self.inputs.copy(), given.tensors, given.edge_index
        for place, new_dim, dtype, _, _ in self.moves:
            tensor = tensors[place] if new_dim is None else tensors[place].unsqueeze(new_dim)
            inputs[place] = tensor if dtype is None else tensor.to(dtype)
        query, num_sources = inputs[_QUERY], inputs[_KEY].size(-3)
        num_targets = given.num_targets if query is None else query.size(-3)
        num_targets = num_sources if num_targets is None else num_targets
        if given.num_sources not in (None, num_sources) or given.num_targets not in (None, num_targets):
            return None
        assert edge_index is not None
        edges = edge_index, num_sources, num_targets, inputs[_SELF_LOOPS], inputs[_FLOW]
        inputs[_EDGE_INDEX], inputs[_NUM_TARGETS] = edge_index, num_targets
        inputs[_PLAN], num_edges = self.backend.on_graph(self.prepared, edges)
        for rows, size in zip(self.with_rows.values(), (num_sources, num_targets, num_edges), strict=True):
            for place, dim in rows:
                if inputs[place].size(dim) != size:
                    return None
        if inputs[_DROPOUT]:
            inputs[_SEED] = new_seed(inputs[_DROPOUT], edge_index.device)
        wanted = bool(self.weights), self.presence, self.log_sum
        out, alpha, log_sum = self.backend.operator.run_plain(Inputs._make(inputs), *wanted)
        if alpha is None:
            return Result(out, None, log_sum)
        if self.weights == "dropped" and inputs[_DROPOUT]:
            alpha = drop(alpha, inputs[_DROPOUT], inputs[_SEED])
        return Result(out, alpha.to(self.dtype), log_sum)


_QUERY, _KEY, _SINK, _EDGE_INDEX, _NUM_TARGETS, _SELF_LOOPS, _FLOW, _DROPOUT, _SEED, _PLAN = map(
    Inputs._fields.index,
    ("query", "key", "sink", "edge_index", "num_targets", "self_loops", "flow", "dropout", "seed", "plan"),
)


def _as_product(call: Call) -> Call:
    """The same call with a score of vectors that adds nothing: kernels make vectors of edges for such a score only."""
    query = call.value.new_zeros(call.value.shape[-2:]).expand(*call.batch, call.num_targets, *call.value.shape[-2:])
    return call._replace(
        query=query, key=call.value, score=DotScore(1.0), edge=call.edge_value, edge_value=None, edge_is_value=True
    )


def flat(tensor: Tensor, inner: int) -> Tensor:
    """`[..., R, inner dimensions]` with one batch dimension in front."""
    batch = tensor.dim() - inner - 1
    return tensor.unsqueeze(0) if batch == 0 else tensor if batch == 1 else tensor.flatten(0, batch - 1)


def dense_rows(tensor: Tensor, inner: int) -> Tensor:
    """`flat`, copied if its rows are not dense."""
    if tensor.is_contiguous():
        return flat(tensor, inner)
    tensor = flat(tensor, inner)
    width = 1
    for size, stride in zip(reversed(tensor.shape[2:]), reversed(tensor.stride()[2:]), strict=True):
        if size != 1 and stride != width:
            return tensor.contiguous()
        width *= size
    return tensor
