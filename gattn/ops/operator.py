"""Attention as PyTorch operators of any backend: their inputs, shape-only versions and gradients.

An operator's backward pass is also an operator, whose own derivative is computed by `gattn.ops.reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress, repeat
from operator import is_not
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from gattn.edges import Projected, Typed
from gattn.graphs import EdgeList
from gattn.ops.call import Call, compute_dtype
from gattn.ops.differentiated import (
    Differentiated,
    are_plain,
    has_gradient,
    library,
    saved_tensors,
)
from gattn.ops.flops import of_lists, register
from gattn.ops.plain_operator import asked, by_reference, differentiate_plainly
from gattn.ops.sharded import by_heads, is_distributed
from gattn.ops.terms import DIFFERENTIABLE, PLACES, SCHEMA, Inputs
from gattn.scores import Score
from gattn.torch_private import apply_of, is_batched, is_traced, needs_dispatcher, resolved

__all__ = ["DIFFERENTIABLE", "AttentionOperator", "Inputs", "Presence", "inputs_of", "presence_of", "sink_of"]


def sink_of(sink: float | Tensor | None, call: Call) -> Tensor | None:
    """The logit of the softmax's sink, per head, `[H]`."""
    if sink is None:
        return None
    if not isinstance(sink, Tensor):
        return torch.full((call.heads,), sink, dtype=call.compute, device=call.value.device)
    return sink.to(call.compute).expand(call.heads)


#: Compiled programs read the edges to find their layout, which CUDA graphs cannot do, and keep it between calls.
_TAGS = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()

_PLACES = tuple(PLACES[name] for name in DIFFERENTIABLE)
_PLAN = Inputs._fields.index("plan")


class AttentionOperator:
    """Attention by one backend's kernels: `gattn::<name>` and `gattn::<name>_backward`.

    Args:
        name: The operator's name.
        devices: The devices whose tensors it takes, by the names in PyTorch's dispatcher.
        forward: Takes `(inputs, keep, with_weights)`: the inputs, whether gradients will be needed, and whether weights
            are requested. Returns the output, the weights `[..., E, H]` (possibly `None` if they are not requested) and
            everything that the backward pass needs.
        backward: Takes `(inputs, grad_out, grad_weights, out, weights, kept, wanted)`: the inputs, the incoming
            gradients, the results of `forward`, and the names of the inputs whose gradients are needed. Returns these.
        kept: Returns the shapes and types of everything that `forward` keeps, given the inputs and `keep`.
        log_sum: Computes the log-sum-exp of each target's logits, `[B, N, H]`, from the first tensor that is kept; then
            `backward` also takes its gradient. (default: `None`, neither)
    """

    def __init__(
        self,
        name: str,
        devices: Sequence[str],
        forward: Callable[[Inputs, bool, bool], list[Any]],
        backward: Callable[..., list[Tensor]],
        kept: Callable[[Inputs, bool], list[tuple[tuple[int, ...], torch.dtype]]],
        log_sum: Callable[[Tensor], Tensor] | None = None,
    ):
        self._kept, self._log_sum = kept, log_sum
        self._compute, self._compute_backward = forward, backward

        def run_forward(*arguments: Any) -> list[Tensor]:
            inputs = Inputs(*arguments[:-2])
            out, weights, *kept = forward(inputs, *arguments[-2:])
            if weights is None:  # which an operator cannot return
                weights = inputs.values.new_empty((*inputs.front, 0, inputs.heads), dtype=compute_dtype(out.dtype))
            return [out, weights, *kept]

        def run_backward(*arguments: Any) -> list[Tensor]:
            grad_out, grad_weights, out, weights, kept, *inputs, wanted = arguments
            names = list(compress(DIFFERENTIABLE, wanted))
            return backward(Inputs(*inputs), grad_out, grad_weights, out, weights, kept, names)

        library.define(f"{name}({SCHEMA}, bool keep, bool with_weights) -> Tensor[]", tags=_TAGS)
        library.define(
            f"{name}_backward(Tensor grad_out, Tensor? grad_weights, Tensor out, Tensor? weights, Tensor[] kept, "
            f"{SCHEMA}, bool[] wanted) -> Tensor[]",
            tags=_TAGS,
        )
        for device in devices:
            library.impl(name, run_forward, device)
            library.impl(f"{name}_backward", run_backward, device)
        torch.library.register_fake(f"gattn::{name}", self._fake_forward, lib=library)
        torch.library.register_fake(f"gattn::{name}_backward", _fake_backward, lib=library)
        register(name, lambda *given: of_lists(*_with_scalar(given[:-2])))
        register(f"{name}_backward", lambda *given: of_lists(*_with_scalar(given[_NUM_GRADS_AND_RESULTS:-1]), True))
        self._op = Differentiated(name, run_forward, _save_forward, self._differentiate).op
        self._apply = apply_of(_Direct)
        self._backward = Differentiated(f"{name}_backward", run_backward, _save_backward, _differentiate_twice)

    @property
    def has_log_sum(self) -> bool:
        """Whether `run_plain` returns the log-sum-exp."""
        return self._log_sum is not None

    def __call__(self, call: Call, edges: EdgeList, seed: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Output `[..., N, H, C]`, weights `[..., E, H]` before dropout if the call requests them, and the log-sum-exp.

        That of each target, `[..., N, H]`, is `None` unless the call requests it and this costs no second pass.

        Args:
            call: A call whose tensors have the right form and type, and whose score the kernels know.
            edges: The edges of its graph.
            seed: The seed of the dropout, if there is any.
        """
        inputs, with_weights = inputs_of(call, edges, seed), bool(call.weights)
        if call.log_sum and self.has_log_sum and not needs_dispatcher() and are_plain(inputs.arguments):
            return self.run_plain(inputs, with_weights, with_log_sum=True)
        results = self.run(inputs, with_weights)
        return results[0], results[1] if with_weights else None, None

    def run(self, inputs: Inputs, with_weights: bool = False) -> Sequence[Any]:
        """The results of the backend's `forward`, with gradients; the second are the weights, if they are requested."""
        if type(inputs.values) is not Tensor and is_distributed(inputs.values):
            return by_heads(self.run, inputs, with_weights)
        if not needs_dispatcher() and are_plain(inputs.arguments):
            return self.run_plain(inputs, with_weights)[:2]
        tensors: list[Any] = [inputs[place] for place in _PLACES]  # the compiler does not know itemgetter
        keep = has_gradient(tensors)
        results: list[Tensor] = self._op(*inputs.arguments, keep, with_weights)
        return results

    def run_plain(
        self,
        inputs: Inputs,
        with_weights: bool = False,
        presence: Presence | None = None,
        with_log_sum: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The same without PyTorch's dispatcher, at a fraction of its cost, where nothing intercepts operators.

        Args:
            inputs: The inputs.
            with_weights: Whether weights are requested. (default: `False`)
            presence: Which tensors the inputs have, if that is known already. (default: `None`)
            with_log_sum: Whether the log-sum-exp is requested. (default: `False`)
        """
        presence = presence_of(inputs) if presence is None else presence
        tensors: list[Any] = [inputs[place] for place in presence.differentiable]
        if not has_gradient(tensors):
            found = self._compute(inputs, False, with_weights)
            log_sum = self._log_sum_of(inputs, found[2]) if with_log_sum else None
            return found[0], found[1] if with_weights else None, log_sum
        results: tuple[Tensor, Tensor | None, Tensor | None]
        results = self._apply(self, inputs, with_weights, with_log_sum, presence, *tensors)
        return results

    def _log_sum_of(self, inputs: Inputs, stats: Tensor) -> Tensor:
        assert self._log_sum is not None
        return self._log_sum(stats).view(*inputs.front, inputs.num_targets, inputs.heads)

    def _fake_forward(self, *arguments: Any) -> list[Tensor]:
        inputs, (keep, with_weights) = Inputs(*arguments[:-2]), arguments[-2:]
        inputs.check_devices()
        values = inputs.values
        edges: Any = inputs.edge_index.size(1)
        if inputs.self_loops and with_weights:
            edges = torch.library.get_ctx().new_dynamic_size()
        weights = (*inputs.front, edges if with_weights else 0, inputs.heads)
        return [
            values.new_empty(inputs.out_shape),
            values.new_empty(weights, dtype=compute_dtype(values.dtype)),
            *(values.new_empty(shape, dtype=dtype) for shape, dtype in self._kept(inputs, keep)),
        ]

    def _differentiate(
        self, ctx: Any, grad_out: Tensor | None, grad_weights: Tensor | None, *others: None
    ) -> tuple[Tensor | None, ...]:
        return *_in_place(self.gradients(ctx, grad_out, grad_weights, ctx.wanted), ctx.wanted), None, None

    def gradients(
        self,
        ctx: Any,
        grad_out: Tensor | None,
        grad_weights: Tensor | None,
        wanted: list[str],
        is_direct: bool = False,
        grad_log_sum: Tensor | None = None,
    ) -> Sequence[Tensor | None]:
        """The gradients of these inputs."""
        inputs, (out, weights, *kept) = _saved(ctx)
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        grad_weights = grad_weights if ctx.with_weights else None
        results = grad_out, grad_weights, out, weights, kept
        if grad_log_sum is not None:
            return self._with_log_sum(inputs, results, grad_log_sum, wanted)
        if is_batched(grad_out) or (grad_weights is not None and is_batched(grad_weights)):
            return differentiate_plainly(inputs, (grad_out, grad_weights, None), wanted)
        if is_direct and not torch.is_grad_enabled() and not needs_dispatcher() and are_plain(results[:2]):
            return self._compute_backward(inputs, *results, wanted)
        grads: Sequence[Tensor | None] = self._backward(*results, *inputs.arguments, _flags(wanted))
        return grads

    def _with_log_sum(
        self, inputs: Inputs, results: tuple[Any, ...], grad_log_sum: Tensor, wanted: list[str]
    ) -> Sequence[Tensor | None]:
        """The gradients where the log-sum-exp has one, too; plain PyTorch computes what kernels do not."""
        given = *results[:2], grad_log_sum
        is_batch = any(grad is not None and is_batched(grad) for grad in given)
        if is_batch or torch.is_grad_enabled() or needs_dispatcher() or not are_plain(given):
            return differentiate_plainly(inputs, given, wanted)
        is_empty = self._log_sum_of(inputs, results[-1][0]) == -torch.inf  # where whatever arrives goes nowhere
        return self._compute_backward(inputs, *results, wanted, grad_log_sum.masked_fill(is_empty, 0.0))


class Presence(NamedTuple):
    """Which tensors inputs have."""

    places: tuple[int, ...]
    differentiable: tuple[int, ...]
    """The places of those that have gradients"""
    names: tuple[str, ...]
    """Their names"""


def presence_of(inputs: Inputs) -> Presence:
    """Which tensors these inputs have."""
    places = {name: place for name, place in PLACES.items() if inputs[place] is not None}
    names = tuple(name for name in DIFFERENTIABLE if name in places)
    return Presence(tuple(places.values()), tuple(PLACES[name] for name in names), names)


class _Direct(torch.autograd.Function):
    """An operator without PyTorch's dispatcher. Only tensors are passed one by one, since each argument takes time."""

    @staticmethod
    def forward(
        ctx: Any,
        operator: AttentionOperator,
        inputs: Inputs,
        with_weights: bool,
        with_log_sum: bool,
        presence: Presence,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        output = operator._compute(inputs, True, with_weights)
        ctx.operator, ctx.names = operator, presence.names
        ctx.set_materialize_grads(False)
        _save_results(ctx, inputs, with_weights, output, presence.places)
        log_sum = operator._log_sum_of(inputs, output[2]) if with_log_sum else None
        return output[0], output[1] if with_weights else None, log_sum

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_weights: Tensor | None, grad_log_sum: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[_NOT_TENSORS:]
        wanted = list(compress(ctx.names, needed))
        grads = iter(ctx.operator.gradients(ctx, grad_out, grad_weights, wanted, True, grad_log_sum))
        return None, None, None, None, None, *[next(grads) if is_needed else None for is_needed in needed]


_NOT_TENSORS = 5


def inputs_of(call: Call, edges: EdgeList, seed: Tensor | None) -> Inputs:
    """A call as the inputs of an operator; see `AttentionOperator.__call__`."""
    query, key, score = call.query, call.key, call.score
    if query is not None:
        query, key, score = score.folded(query, key)
    family, law = score.family(call.channels), call.law
    assert family is not None
    assert law is not None
    vector = family.vector
    if vector is not None and vector.dtype != call.compute:
        vector = vector.to(torch.promote_types(vector.dtype, call.compute))
    edge: Any = call.edge
    projection = types = None
    if isinstance(edge, Projected):
        edge, projection = edge
    elif isinstance(edge, Typed):
        edge, types = edge
    return Inputs(
        query=query,
        key=key,
        value=None if call.value is key else call.value,
        vector=vector,
        edge=edge,
        edge_projection=projection,
        edge_type=types,
        bias=call.bias_of_edges,
        mask=call.mask,
        edge_value=cast(Tensor | None, call.edge_value),
        edge_index=edges.edge_index,
        num_targets=edges.num_targets,
        self_loops=edges.self_loops,
        flow=edges.flow,
        family=family.name,
        constants=list(family.constants),
        edge_is_value=call.edge_is_value,
        distribution=law.name,
        distribution_constants=list(law.constants),
        sink=sink_of(law.sink, call),
        out_bias=None if call.out_bias is None else call.out_bias.to(call.compute),
        dropout=call.dropout,
        seed=seed,
        traced=is_traced(),
    )


def _save_forward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.wanted = [name for name, place in zip(DIFFERENTIABLE, _PLACES, strict=True) if ctx.needs_input_grad[1 + place]]
    ctx.mark_non_differentiable(*output[2:])
    given = Inputs(*inputs[:-2])
    _save_results(ctx, given, inputs[-1], output, presence_of(given).places)


def _save_results(
    ctx: Any, inputs: Inputs, with_weights: bool, output: Sequence[Tensor], places: Sequence[int]
) -> None:
    ctx.with_weights = with_weights
    _save(ctx, inputs, output, places)


def _save(ctx: Any, inputs: Inputs, tensors: Sequence[Tensor | None], places: Sequence[int]) -> None:
    """Saves tensors through autograd, and other inputs as attributes."""
    others: list[Any] = list(inputs)
    for place in places:
        others[place] = None
    saved: list[Any] = [inputs[place] for place in places]
    saved += tensors
    ctx.are_there = tuple(map(is_not, saved, repeat(None)))  # save_tensors(), without its frame
    ctx.save_for_backward(*compress(saved, ctx.are_there))
    ctx.saved = places, others, _forms(saved, len(places))


def _forms(tensors: Sequence[Any], num_inputs: int) -> list[Any]:
    """What a plan relies on. Between the passes, hooks on saved tensors and edits of `.data` may change it."""
    forms: list[Any] = [  # without the calls of is_lazy()
        (x.shape, x.dtype, x.is_contiguous() or x.stride(), x.is_neg(), x._is_zerotensor())
        for x in tensors[:num_inputs]
    ]
    forms += [None if x is None else (x.shape, x.dtype) for x in tensors[num_inputs:]]  # results are copied as needed
    return forms


def _saved(ctx: Any) -> tuple[Inputs, list[Any]]:
    """The inputs, and the other tensors that were saved."""
    tensors = saved_tensors(ctx)
    places, others, forms = ctx.saved
    values, count = others.copy(), len(places)
    if _forms(tensors, count) != forms:
        place = places.index(PLACES["edge_index"])
        if tensors[place].shape != forms[place][0]:  # autograd notices other edits, but not `edge_index.data = ...`
            raise RuntimeError("the data of edge_index was replaced between the forward and the backward pass.")
        values[_PLAN] = None
        tensors = [None if x is None else resolved(x) for x in tensors]
    for place, tensor in zip(places, tensors, strict=False):
        values[place] = tensor
    return Inputs(*values), tensors[count:]


def _in_place(grads: Sequence[Tensor | None], names: Sequence[str]) -> list[Tensor | None]:
    """Gradients of all inputs, given those of some."""
    result: list[Tensor | None] = [None] * (len(Inputs._fields) - 1)
    for name, grad in zip(names, grads, strict=True):
        result[PLACES[name]] = grad
    return result


def _flags(names: Sequence[str]) -> list[bool]:
    """For each input that has a gradient, whether it is among these."""
    return [name in names for name in DIFFERENTIABLE]


_NUM_GRADS_AND_RESULTS = 5


def _with_scalar(arguments: Sequence[Any]) -> tuple[Inputs, bool]:
    """The inputs of an operator, and whether its score is scalar."""
    inputs = Inputs(*arguments)
    return inputs, Score.class_of_family(inputs.family).scalar


def _fake_backward(*arguments: Any) -> list[Tensor]:
    inputs, wanted = arguments[_NUM_GRADS_AND_RESULTS:-1], arguments[-1]
    tensors = (inputs[place] for place in compress(_PLACES, wanted))
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]


def _save_backward(ctx: Any, arguments: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.wanted = list(compress(DIFFERENTIABLE, arguments[-1]))
    inputs = Inputs(*arguments[_NUM_GRADS_AND_RESULTS:-1])
    _save(ctx, inputs, arguments[:2], presence_of(inputs).places)


def _differentiate_twice(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """The derivative of the backward pass, which is that of the reference's backward pass."""
    inputs, (grad_out, grad_weights) = _saved(ctx)
    with torch.enable_grad():
        # Views, so that differentiation stops here.
        leaves: dict[str, Any] = {
            name: tensor.view_as(tensor) for name, tensor, term in inputs.terms() if term.differentiable
        }
        leaves = {name: leaf if leaf.requires_grad else leaf.requires_grad_() for name, leaf in leaves.items()}
        outer = [None if grad is None else grad.view_as(grad) for grad in (grad_out, grad_weights)]
        for grad in outer:
            if grad is not None and not grad.requires_grad:
                grad.requires_grad_()
        results = by_reference(inputs._replace(**leaves))
        pairs = asked(results, outer)
        first = torch.autograd.grad(
            [result for result, _ in pairs],
            [leaves[name] for name in ctx.wanted],
            [grad for _, grad in pairs],
            create_graph=True,
            materialize_grads=True,
        )
        given = [(gradient, grad) for gradient, grad in zip(first, grads, strict=True) if grad is not None]
        variables = [*leaves.values(), *(grad for grad in outer if grad is not None)]
    second = iter(
        torch.autograd.grad(
            [gradient for gradient, _ in given],
            variables,
            [grad for _, grad in given],
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
    )
    of_inputs = _in_place([next(second) for _ in leaves], list(leaves))
    of_grads = [None if grad is None else next(second) for grad in outer]
    return *of_grads, *[None] * (_NUM_GRADS_AND_RESULTS - len(of_grads)), *of_inputs, None
