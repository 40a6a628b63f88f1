r"""The attention core: weighted sums over each target's neighbours, as message passing.

.. math::
    out_i = \sum_{j \in \mathcal{N}(i)} \alpha_{ij} v_j, \qquad
    \alpha_{i\cdot} = p\big(s(q_i, k_j, e_{ij}) \text{ for } j \in \mathcal{N}(i)\big)

Dimensions: N targets, M sources, E edges, H heads, C channels, B batch.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, ClassVar, Literal, Optional, TypeAlias, TypedDict, TypeVar, Unpack, overload

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.typing import OptPairTensor

from gattn.bias import Bias
from gattn.distributions import Distribution, is_plain_softmax, law_of, resolve_distribution
from gattn.edges import EdgeTerm
from gattn.errors import InputError, InputTypeError, check_flag
from gattn.graphs import FLOWS, GraphLike, SparseGraph, as_graph
from gattn.ops import plans, reference
from gattn.ops.backends.base import finish, needs_plain_pytorch, new_seed
from gattn.ops.backends.base import log_sum as log_sum_of
from gattn.ops.backends.base import logits as logits_of
from gattn.ops.call import GIVEN, NO_SCORE, Call, Result
from gattn.ops.checks import checked_call
from gattn.ops.choose import choose, requested
from gattn.ops.dropout import check_probability, drop
from gattn.ops.plans import Given
from gattn.recording import is_watched, record
from gattn.scores import DotScore, Score
from gattn.settings import checks_finite, require_finite
from gattn.torch_private import has_hooks
from gattn.tracing import Leaf

__all__ = ["Attention", "Weights", "fused"]
# Code that PyG generates for the hooks imports * from here, and needs the names in their annotations.
__all__ += ["Any", "Distribution", "OptPairTensor", "Optional", "Score", "SparseGraph", "Tensor"]

#: Weights as users get them: a tensor, or for a packed graph a list with one tensor per block.
Weights: TypeAlias = Tensor | list[Tensor]

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def fused(hook: _Hook) -> _Hook:
    """Marks a message-passing hook whose result the kernels also compute, so that they may replace it."""
    hook._fused = hook  # type: ignore[attr-defined] # itself, since functools.wraps copies attributes
    return hook


class _Options(TypedDict, total=False):
    """The options of `attend`, for the type checkers that read its overloads."""

    score: Score | None
    edge: EdgeTerm | None
    bias: Tensor | Bias | None
    mask: Tensor | None
    edge_value: EdgeTerm | bool | None
    out_bias: Tensor | None
    distribution: str | Distribution
    dropout: float
    training: bool | None
    backend: str
    return_lse: bool


class Attention(Leaf, MessagePassing):
    r"""Attention as PyG message passing: `edge_update` computes the weights, `message` applies them.

    .. math::
        out_i = \sum_{j \in \mathcal{N}(i)} \alpha_{ij} v_j, \qquad
        \alpha_{i\cdot} = p\big(s(q_i, k_j, e_{ij}) \text{ for } j \in \mathcal{N}(i)\big)

    The base class of gattn's graph layers. It can also be used by itself: called with the arguments of
    :func:`gattn.attend`, it computes attention, with dropout in training mode only. Attention as message passing goes
    back to `Graph Attention Networks <https://arxiv.org/abs/1710.10903>`_.

    Args:
        aggr: How messages are aggregated. Attention sums them; PyG's other aggregations are possible.
            (default: `"add"`)
        flow: `"source_to_target"` or `"target_to_source"`. (default: `"source_to_target"`)
        **kwargs: `aggr_kwargs` and `decomposed_layers` of `torch_geometric.nn.conv.MessagePassing`.

    Shapes:
        query `[N, H, C]`, key `[M, H, C]`, value `[M, H, Cv]`; the output is `[N, H, Cv]`. See :func:`gattn.attend`.

    Raises:
        TypeError: If there is an unknown argument, or a hook that a subclass overrides has one.
        ValueError: If `aggr` or `flow` is unknown.

    Example:
        >>> import torch
        >>> from gattn.attention import Attention
        >>> x = torch.randn(3, 2, 4)  # 3 nodes, 2 heads, 4 channels
        >>> Attention()(x, x, x, torch.tensor([[0, 1], [2, 2]])).shape
        torch.Size([3, 2, 4])
    """

    # The arguments for which PyG generates propagate() and edge_updater(): given here, it need not parse any source.
    edge_updater_type: ClassVar[dict[str, Any]] = {
        "query": Optional[Tensor],
        "key": Tensor,
        "edge": Optional[Tensor],
        "bias": Optional[Tensor],
        "mask": Optional[Tensor],
        "score": Score,
        "distribution": Distribution,
        "num_targets": int,
    }
    propagate_type: ClassVar[dict[str, Any]] = {"x": "OptPairTensor", "alpha": Tensor, "edge_value": Optional[Tensor]}
    #: What PyG's layer of the same name passes to `edge_update`, if subclasses may ask for that instead.
    edge_updater_type_of_pyg: ClassVar[dict[str, Any]] = {}
    _known_machinery: ClassVar[tuple[Any, ...]] = ()
    #: Whether calls of `weigh` and `weighted_sum` are recorded: gattn's layers record what they make of those.
    _records_parts: ClassVar[bool] = True
    #: Whether messages are `[..., E, C]`, as in PyG's layers with a single head, or with one head per channel.
    flat_messages: ClassVar[bool] = False

    def __init__(self, aggr: Any = "add", *, flow: str = FLOWS[0], **kwargs: Any):
        unknown = kwargs.keys() - {"aggr_kwargs", "decomposed_layers"}
        if unknown:
            known = [name for name in inspect.signature(type(self)).parameters if name not in ("args", "kwargs")]
            raise TypeError(
                f"{type(self).__name__} has no argument {', '.join(sorted(unknown))}; it takes {', '.join(known)}, and "
                "aggr, aggr_kwargs, flow and decomposed_layers of PyG's MessagePassing."
            )
        self._keep_overrides()
        asked = {name.removesuffix("_i").removesuffix("_j") for name in inspect.signature(self.edge_update).parameters}
        self._updates_as_pyg = bool(asked & (self.edge_updater_type_of_pyg.keys() - Attention.edge_updater_type.keys()))
        if self._updates_as_pyg:
            type(self).edge_updater_type = self.edge_updater_type_of_pyg
        elif self.edge_updater_type is self.edge_updater_type_of_pyg:  # of a parent, or of a patch that is undone
            type(self).edge_updater_type = Attention.edge_updater_type
        super().__init__(aggr, flow=flow, node_dim=0 if self._updates_as_pyg else -3, **kwargs)
        self._alpha: Optional[Tensor] = None  # PyG's layers have it, and code written for them reads it
        self._restore_originals()
        self._check_hooks()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._restore_originals()

    @classmethod
    def _keep_overrides(cls) -> None:
        """Prevents PyG from generating code where a class has code of its own, or from reusing another class's."""
        for step in _STEPS:
            if f"_jinja_{step}" in vars(cls):
                continue
            # Of another class of this name, such as a notebook cell that ran before.
            sys.modules.pop(f"{cls.__module__}_{cls.__name__}_{step}", None)
            if _is_overridden(getattr(cls, step), step):  # by a parent, where PyG does not look
                setattr(cls, step, getattr(cls, step))

    def _restore_originals(self) -> None:
        # PyG takes a subclass's "original" from its parent, whose code is generated and does not support explainers.
        # MessagePassing itself also has generated code, once it has been instantiated.
        cls, originals = type(self), vars(MessagePassing)
        for step in _STEPS:
            function = getattr(cls, step)
            if function.__module__ == f"{cls.__module__}_{cls.__name__}_{step}":
                fused(function)
            own = _is_overridden(function, step)
            setattr(cls, f"_orig_{step}", function if own else originals.get(f"_orig_{step}", originals[step]))

    def _check_hooks(self) -> None:
        """Refuses hooks that ask for what is not passed: PyG would look for it among their module's globals."""
        for hook, known, asked in (
            ("message", self.propagate_type, self._user_args),
            ("edge_update", self.edge_updater_type, self._edge_user_args),
        ):
            for name in asked:
                plain = name[:-2] if name.endswith(("_i", "_j")) else name
                defaults = [
                    parameter.default
                    for function in ("message", "aggregate", "update", "edge_update")
                    for parameter in self.inspector.get_params(function)
                    if parameter.name == name
                ]
                if plain not in known and all(default is inspect.Parameter.empty for default in defaults):
                    raise TypeError(
                        f"{type(self).__name__}.{hook} (or aggregate, update) asks for {name!r}, which is not "
                        f"passed to it. Available are {', '.join(known)} (per node, with _i or _j appended), and PyG's "
                        "index, ptr, dim_size and size."
                    )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes attention; takes the arguments of `gattn.attend`."""
        return self.attend(*args, **kwargs)

    @overload
    def attend(
        self,
        query: Tensor | None,
        key: Tensor | None,
        value: Tensor,
        graph: GraphLike,
        *,
        return_weights: Literal[False] = False,
        **options: Unpack[_Options],
    ) -> Tensor: ...

    @overload
    def attend(
        self,
        query: Tensor | None,
        key: Tensor | None,
        value: Tensor,
        graph: GraphLike,
        *,
        return_weights: Literal[True, "dropped"],
        **options: Unpack[_Options],
    ) -> tuple[Tensor, Weights]: ...

    @overload
    def attend(
        self,
        query: Tensor | None,
        key: Tensor | None,
        value: Tensor,
        graph: GraphLike,
        *,
        return_weights: bool | str = False,
        **options: Unpack[_Options],
    ) -> Any: ...

    def attend(
        self,
        query: Tensor | None,
        key: Tensor | None,
        value: Tensor,
        graph: GraphLike,
        *,
        score: Score | None = None,
        edge: EdgeTerm | None = None,
        bias: Tensor | Bias | None = None,
        mask: Tensor | None = None,
        edge_value: EdgeTerm | bool | None = None,
        out_bias: Tensor | None = None,
        distribution: str | Distribution = "softmax",
        dropout: float = 0.0,
        training: bool | None = None,
        return_weights: bool | str = False,
        return_lse: bool = False,
        backend: str = "auto",
    ) -> Any:
        r"""Attention over any graph: the one function behind all of gattn's layers.

        .. math::
            out_i = \sum_{j \in \mathcal{N}(i)} \alpha_{ij} (v_j + e^v_{ij}), \qquad
            \alpha_{i\cdot} = p\big(s(q_i, k_j, e_{ij}) + b_{ij} \text{ for } j \in \mathcal{N}(i)\big)

        With :math:`s` a scaled dot product, :math:`p` a softmax and a complete graph it is the attention of `Attention
        Is All You Need <https://arxiv.org/abs/1706.03762>`_; with `GATScore` on a list of edges that of `Graph
        Attention Networks <https://arxiv.org/abs/1710.10903>`_.

        Args:
            query: Target side of the score: `[N, H, C]`; for `GATScore` `[N, H]`, or `None` for no target-side term.
            key: Source side of the score: `[M, H, C]`; for `GATScore` `[M, H]`, or `None` for no source-side term.
                Without `query`, `key` and `edge`, `bias` is the whole logit.
            value: What is averaged: `[M, H, Cv]`. With `DotScore`, key and value may have fewer heads, a number that
                divides H. All three may have one or two leading batch dimensions. Tensors `[B, H, N, C]`, which many
                Transformers use, can be passed and returned as `x.transpose(1, 2)`, without a copy.
            graph: Who attends to whom: a `SparseGraph`, `TypedGraph` or `CompleteGraph`, one that
                `gattn.distributed.shard` returned, or a bare `edge_index` in any of PyG's forms.
            score: How the two ends of an edge compare: `GATScore`, `AdditiveScore`, `DotScore`, `CosineScore` or your
                own. (default: `DotScore()`)
            edge: Per-edge term inside the score, in `edge_index` order: `[E, H, C]`; for `GATScore` `[E, H]`. Or
                `gattn.Projected` features, or one term for each type of edge, `gattn.Typed`, which the CPU kernels make
                edge by edge, without an `[E, H, C]` tensor. (default: `None`)
            bias: Added to the finished logit: `[E, H]`; on a complete graph broadcastable to `[B, H, N, M]`, where B
                counts the blocks of a packed graph, and N and M are the sizes of its largest ones. Or a `gattn.Bias` of
                some pairs or by buckets, without a tensor of all pairs. (default: `None`)
            mask: True where a target may attend: `[E]` or `[E, H]`, or with the batch dimensions in front; on a
                complete graph broadcastable to `[B, H, N, M]`. (default: `None`)
            edge_value: Added to the value: `[E, H, Cv]`, also `Projected` or `Typed`. `True` adds the same term as in
                the score, which need not be made twice. (default: `None`)
            out_bias: Added to the output, `[H, Cv]`. Unlike adding it afterwards, this saves a second tensor as large
                as the output when the CPU kernels compute it. (default: `None`)
            distribution: How logits become weights: `"softmax"`, `"sigmoid"`, `"tanh"`, `"identity"`, `"sparsemax"`,
                `"entmax15"`, or a `Distribution`, such as `gattn.Softmax(sink=0.0)`. (default: `"softmax"`)
            dropout: Probability of dropping a weight; it has no effect unless `training=True`. PyTorch's generator
                draws which ones, so forked processes that inherit its state drop the same weights until they are
                seeded. (default: `0.0`)
            training: Whether dropout applies. (default: `None`, the module's own mode; in `gattn.attend` it does not)
            return_weights: `True` also returns the weights before dropout; `"dropped"` returns those that were applied.
                (default: `False`)
            return_lse: Whether to return the log-sum-exp of each target's logits as well, with its gradient;
                `gattn.merge` needs it. Only the plain softmax has one. (default: `False`)
            backend: `"auto"` (the fastest one that can serve the call), `"dense"` (complete graphs, without a list of
                their edges), `"cpu"` or `"triton"` (fused kernels, the latter for CUDA) or `"reference"` (plain PyG
                message passing). (default: `"auto"`)

        Shapes:
            query `[N, H, C]`, key `[M, H, C]`, value `[M, H, Cv]`; the output is `[N, H, Cv]`.

        Returns:
            `[N, H, Cv]`, in the type that the inputs promote to; a target without neighbours gets zeros. With
            `return_weights`, a pair of the output and the weights: `[E, H]` in `edge_index` order, or `[H, N, M]` for a
            complete graph (each after the batch dimensions), or a list with one per block for a packed graph. With
            `return_lse`, the log-sum-exp `[N, H]` comes last; it is minus infinity for a target without neighbours.

        Raises:
            ValueError: If shapes do not fit each other or the graph, a name is unknown, `return_lse` is set for another
                distribution than the softmax, or the requested backend cannot serve the call; the message says which.
            IndexError: If an index of the graph or a type is out of range.
            TypeError: If `graph` is not a graph, `score` not a `Score`, `training` neither true nor false, or another
                input not a tensor.
            RuntimeError: If the requested backend is not available: the kernels of `"cpu"` were not built, or Triton is
                not installed.

        Example:
            A Transformer's attention is graph attention on a complete graph; causal attention is the same with fewer
            edges.

            >>> import torch, gattn
            >>> q, k, v = torch.randn(3, 5, 2, 4).unbind()  # 5 nodes, 2 heads, 4 channels
            >>> full = gattn.attend(q, k, v, gattn.CompleteGraph(5))
            >>> causal = gattn.attend(q, k, v, gattn.CompleteGraph(5, causal=True))
            >>> citations = gattn.attend(q, k, v, torch.tensor([[0, 1, 2], [1, 2, 3]]))
            >>> full.shape
            torch.Size([5, 2, 4])
        """
        if return_weights not in (False, True, "dropped"):  # which includes 0 and 1
            raise ValueError(f"return_weights must be False, True or 'dropped'; got {return_weights!r}.")
        if not isinstance(value, Tensor):
            raise InputTypeError(f"value must be a tensor; got {type(value).__name__}.")
        result = self._result(
            query,
            key,
            value,
            graph,
            score=score,
            edge=edge,
            bias=bias,
            mask=mask,
            edge_value=edge_value,
            out_bias=out_bias,
            distribution=distribution,
            dropout=dropout,
            training=training,
            weights=return_weights,
            log_sum=return_lse,
            backend=backend,
            layer=self,
        )
        if return_lse:
            return (result.out, result.weights, result.log_sum) if return_weights else (result.out, result.log_sum)
        return (result.out, result.weights) if return_weights else result.out

    def weigh(
        self,
        query: Tensor | None,
        key: Tensor | None,
        graph: GraphLike,
        *,
        score: Score | None = None,
        edge: EdgeTerm | None = None,
        bias: Tensor | Bias | None = None,
        mask: Tensor | None = None,
        distribution: str | Distribution | None = "softmax",
        backend: str = "auto",
    ) -> Any:
        r"""The attention weights alone: what `gattn.attend` returns with `return_weights=True`, without the sum.

        .. math::
            \alpha_{i\cdot} = p\big(s(q_i, k_j, e_{ij}) + b_{ij} \text{ for } j \in \mathcal{N}(i)\big)

        Without `query` and `key`, `bias` holds finished logits, such as those of a network of your own.

        Args:
            query: See `gattn.attend`, like the other arguments of these names.
            key: The source side of the score, or `None`.
            graph: Who attends to whom. Without `key`, it has to know how many nodes there are.
            score: How the two ends of an edge compare. (default: `DotScore()`)
            edge: Per-edge term inside the score. (default: `None`)
            bias: Added to the logit, or, without `query` and `key`, the logit itself. (default: `None`)
            mask: True where a target may attend. (default: `None`)
            distribution: How logits become weights; `None` returns the finished logits :math:`s + b`, minus infinity
                where a target may not attend. (default: `"softmax"`)
            backend: Which one computes. (default: `"auto"`)

        Shapes:
            query `[N, H, C]`, key `[M, H, C]`; the weights are `[E, H]`, of a complete graph `[H, N, M]`.

        Returns:
            Weights as `gattn.attend` returns them, with gradients; `gattn.aggregate` takes them back.

        Raises:
            ValueError: As `gattn.attend`.
            TypeError: As `gattn.attend`.
            IndexError: As `gattn.attend`.

        Example:
            >>> import torch, gattn
            >>> x, edge_index = torch.randn(3, 2, 4), torch.tensor([[0, 1], [2, 2]])
            >>> alpha = gattn.weigh(x, x, edge_index)
            >>> out = gattn.aggregate(alpha, x, edge_index)
            >>> torch.allclose(out, gattn.attend(x, x, x, edge_index))
            True
        """
        return self._result(
            query,
            key,
            None,
            graph,
            score=score,
            edge=edge,
            bias=bias,
            mask=mask,
            distribution=distribution,
            weights="only",
            backend=backend,
            layer=self if self._records_parts else None,
        ).weights

    def weighted_sum(
        self,
        weights: Weights,
        value: Tensor,
        graph: GraphLike,
        *,
        edge_value: EdgeTerm | None = None,
        out_bias: Tensor | None = None,
        dropout: float = 0.0,
        training: bool | None = None,
        backend: str = "auto",
    ) -> Tensor:
        r"""The sum of each target's values, multiplied by given weights: the second half of `gattn.attend`.

        .. math::
            out_i = \sum_{j \in \mathcal{N}(i)} \alpha_{ij} (v_j + e^v_{ij})

        Args:
            weights: In the form in which `gattn.attend` and `gattn.weigh` return them: `[E, H]`; of a complete graph
                `[H, N, M]`; each after the batch dimensions; of a packed graph a list with one per block.
            value: `[M, H, Cv]`, after the batch dimensions.
            graph: Who attends to whom; see `gattn.attend`.
            edge_value: Added to the value: `[E, H, Cv]`, `Projected` or `Typed`. (default: `None`)
            out_bias: Added to the output, `[H, Cv]`. (default: `None`)
            dropout: Probability of dropping a weight; it has no effect unless `training=True`. (default: `0.0`)
            training: Whether dropout applies. (default: `None`, the module's own mode; in `gattn.aggregate` it does
                not)
            backend: Which one computes. (default: `"auto"`)

        Shapes:
            weights `[E, H]`, value `[M, H, Cv]`; the output is `[N, H, Cv]`.

        Raises:
            ValueError: If shapes do not fit each other or the graph.
            TypeError: If an input is not a tensor.
            IndexError: If an index of the graph is out of range.

        Example:
            >>> import torch, gattn
            >>> x, edge_index = torch.ones(3, 1, 2), torch.tensor([[0, 1], [2, 2]])
            >>> gattn.aggregate(torch.tensor([[0.5], [2.0]]), x, edge_index)[2]
            tensor([[2.5000, 2.5000]])
        """
        if not isinstance(weights, (Tensor, list)):
            raise InputTypeError(f"weights must be a tensor, or a list of tensors; got {type(weights).__name__}.")
        if isinstance(weights, Tensor) and not weights.is_floating_point():
            raise InputError(f"weights must be of a floating-point type; got {weights.dtype}: use .float().")
        graph = as_graph(graph, self.flow, sharded=True)
        out = self._result(
            None,
            None,
            value,
            graph,
            bias=graph.as_bias(weights),
            edge_value=edge_value,
            out_bias=out_bias,
            distribution=GIVEN,
            dropout=dropout,
            training=training,
            backend=backend,
        ).out
        if self._records_parts and is_watched(self):
            record(self, graph.resolve(value.size(-3), None), weights, "applied")
        return out

    def _result(
        self,
        query: Tensor | None,
        key: Tensor | None,
        value: Tensor | None,
        graph: GraphLike,
        *,
        score: Score | None = None,
        distribution: str | Distribution | None = "softmax",
        dropout: float = 0.0,
        training: bool | None = False,
        weights: bool | str = False,
        log_sum: bool = False,
        backend: str = "auto",
        layer: Module | None = None,
        **terms: Any,
    ) -> Result:
        """Output, weights and log-sum-exp of a call, checked and computed; without a distribution, the logits.

        `value=None` computes weights alone. `record_attention` records them as those of `layer`, if there is one.
        """
        if layer is not None and is_watched(layer):
            terms |= {"score": score, "distribution": distribution, "dropout": dropout, "training": training}
            return self._recorded(layer, query, key, value, graph, weights, log_sum=log_sum, backend=backend, **terms)
        asked = requested(backend)
        score = _DOT if score is None else score
        if not isinstance(score, Score):
            raise TypeError(f"score must be an object such as gattn.DotScore() or gattn.GATScore(); got {score!r}.")
        if type(dropout) is not float or dropout != 0.0:
            check_probability("dropout", dropout)
        training = self.training if training is None else training
        if training is not True and training is not False:
            check_flag("training", training)
        dropout = dropout if training else 0.0
        given = None
        if log_sum is not False:
            check_flag("return_lse", log_sum)
        if key is None or value is None:
            key, value, score = completed(query, key, value, score, terms)
        is_usual = isinstance(weights, (bool, str)) and not (distribution is None or checks_finite())
        if is_usual and self._needs_messages() is None:
            options = dropout, asked, weights, log_sum
            given = plans.given(query, key, value, graph, self.flow, score, distribution, *options, **terms)
        if given is not None and (planned := plans.planned(given)) is not None:
            return planned
        call = self._checked(query, key, value, graph, score, distribution, dropout, weights, log_sum, terms)
        if self.explain and call.graph.is_dense:  # explainers mask edges of their own edge_index
            with self._unexplained():
                result = self._compute(call, backend, distribution is None)
        else:
            result = self._compute(call, backend, distribution is None, given)
        return result

    def _checked(
        self,
        query: Tensor | None,
        key: Tensor | None,
        value: Tensor | None,
        graph: GraphLike,
        score: Score,
        distribution: str | Distribution | None,
        dropout: float,
        weights: bool | str,
        log_sum: bool,
        terms: dict[str, Any],
    ) -> Call:
        """The call with these arguments, after all checks; `dropout` is that of this call."""
        call = checked_call(
            query,
            key,
            value,
            as_graph(graph, self.flow, sharded=True),
            score=score,
            distribution=resolve_distribution("softmax" if distribution is None else distribution),
            dropout=dropout,
            weights=weights,
            log_sum=log_sum,
            **terms,
        )
        if log_sum and not is_plain_softmax(call.distribution):
            raise InputError(f"return_lse needs the plain softmax, whose sum it is; got {call.distribution!r}.")
        if checks_finite():
            named = {"weights" if name == "bias" and distribution is GIVEN else name: x for name, x in terms.items()}
            require_finite(query=query, key=key, value=value, score=score, distribution=call.distribution, **named)
        return call

    def _recorded(
        self,
        layer: Module,
        query: Tensor | None,
        key: Tensor | None,
        value: Tensor | None,
        graph: GraphLike,
        weights: bool | str,
        **options: Any,
    ) -> Result:
        """`_result`, whose weights are recorded; the output is computed as it is without recording."""
        distribution = options["distribution"]
        if distribution is None:  # logits are no weights
            return self._result(query, key, value, graph, weights=weights, **options)
        # Whoever draws weights, or looks at messages, may do so once only.
        apart = (
            not weights and self._needs_messages() is None and law_of(resolve_distribution(distribution)) is not None
        )
        result = self._result(query, key, value, graph, weights=weights or not apart, **options)
        alpha = result.weights
        if apart:
            assert value is not None
            of_output = {"edge_value", "out_bias", "dropout", "log_sum"}
            options = {name: option for name, option in options.items() if name not in of_output}
            alpha = self._result(query, key, value[..., :0], graph, weights="only", **options).weights
        graph = as_graph(graph, self.flow, sharded=True)
        rows = -2 if options["score"] is not None and options["score"].scalar else -3
        num_sources = graph.num_sources if key is None else key.size(rows)
        num_sources = num_sources if value is None else value.size(-3)
        assert num_sources is not None
        num_targets = None if query is None else query.size(rows)
        record(layer, graph.resolve(num_sources, num_targets), alpha, "weighed" if weights == "only" else None)
        return result

    def _compute(self, call: Call, backend: str, logits: bool, given: Given | None = None) -> Result:
        """The result of a call, including its `out_bias`, or its logits instead of weights."""
        chosen = choose(backend, call, needs_plain_pytorch() or self._needs_messages())
        if logits:
            return Result(call.value, logits_of(call) if chosen is None else chosen.logits(call))
        out_bias = call.out_bias
        if out_bias is not None and not (chosen is not None and chosen.adds_out_bias and out_bias.dtype == call.dtype):
            call = call._replace(out_bias=None)
        else:
            out_bias = None
        if given is not None and not plans.is_known(given):
            plans.keep(given, call, chosen)
            if (planned := plans.planned(given)) is not None:  # as all calls like this one from now on
                return planned
        result = self._by_messages(call) if chosen is None else chosen.attend(call)
        if call.log_sum and result.log_sum is None:
            wide = call._replace(dtype=call.compute)  # half precision is too coarse for it
            result = result._replace(log_sum=log_sum_of(wide) if chosen is None else chosen.log_sum(wide))
        return result if out_bias is None else result._replace(out=result.out + out_bias)

    def _by_messages(self, call: Call) -> Result:
        """The reference: serves every call, on every device, in every type, with explainers and higher derivatives."""
        edges = call.graph.edge_list(call.value.device)
        call = call.on_edges(edges, edges.num_edges).cast(call.compute).with_edges()
        seed = new_seed(call.dropout, call.value.device)
        rows = edges.edge_index if edges.flow == self.flow else edges.edge_index.flip(0)  # the order that PyG uses
        distribution = call.distribution.with_sources(edges.edge_index[FLOWS.index(edges.flow)])
        value = reference.repeat_heads(call.value, call.heads)
        alpha = self.edge_updater(
            rows,
            query=call.query,
            key=reference.repeat_heads(call.key, call.heads),
            edge=call.edge,
            bias=call.bias,
            mask=call.mask,
            score=call.score,
            distribution=distribution,
            num_targets=edges.num_targets,
        )
        dropped = alpha if seed is None else drop(alpha, call.dropout, seed)
        if call.weights == "only":
            return finish(call, edges, value, alpha, dropped, seed)
        size = (edges.num_sources, edges.num_targets)
        x: Any = value
        if "x_i" in self._user_args:
            x = (value, _target_vectors(call, value))
        if self.flow != FLOWS[0]:
            size = size[::-1]
            x = x[::-1] if self.explain and x is not value else x  # the generated code ignores flow there
        terms = {"edge_value": call.vectors_of_values} if "edge_value" in self.propagate_type else {}
        out = self.propagate(rows, x=x, alpha=dropped, size=size, **terms)
        return finish(call, edges, out, alpha, dropped, seed)

    def _needs_messages(self) -> str | None:
        """Why messages have to be computed one by one; `None` if nothing requires that."""
        if self.explain:
            return "an explainer reads its messages"
        cls, own, aggr = type(self), self.__dict__, self._modules["aggr_module"]
        is_compiling = torch.compiler.is_compiling()
        if is_compiling or _machinery(cls) != cls._known_machinery:  # looked at once, unless a class is patched
            for name in _HOOKS:
                if _is_overridden(getattr(cls, name), name):
                    return f"{cls.__name__} overrides {name}()"
            if not is_compiling:
                cls._known_machinery = _machinery(cls)
        for name in _HOOKS:
            if name in own and _is_overridden(getattr(own[name], "__func__", own[name]), name):
                return f"{name}() is replaced on this {cls.__name__}"
        if not isinstance(aggr, SumAggregation):
            return f"messages are aggregated by {aggr}, not summed"
        kind = type(aggr)  # while a program is exported, a subclass that stands in for it
        is_sum = (kind.forward, kind.reduce, MessagePassing.aggregate) == _SUM
        if not is_sum or "forward" in aggr.__dict__ or "reduce" in aggr.__dict__ or has_hooks(aggr):
            return "a hook is registered on its aggregation, or a part of that is replaced"
        if self.decomposed_layers > 1:
            return "the layer is decomposed (decomposed_layers > 1)"
        for name in _HOOK_TABLES:  # twice as fast as any()
            if own[name]:
                return "a hook is registered on its message passing"
        return None

    @contextmanager
    def _unexplained(self) -> Iterator[None]:
        """Disables an explainer inside the block."""
        self.explain = False
        try:
            yield
        finally:
            self.explain = True

    @fused
    def edge_update(
        self,
        query_i: Optional[Tensor],
        key_j: Tensor,
        edge: Optional[Tensor],
        bias: Optional[Tensor],
        mask: Optional[Tensor],
        score: Score,
        distribution: Distribution,
        index: Tensor,
        num_targets: int,
    ) -> Tensor:
        """Attention weights `[..., E, H]`, from score, mask and distribution."""
        return reference.weights(query_i, key_j, edge, bias, mask, score, distribution, index, num_targets)

    @fused
    def message(self, x_j: Tensor, alpha: Tensor, edge_value: Optional[Tensor]) -> Tensor:
        """Weighted values of the sources, `[..., E, H, C]`; with `flat_messages`, `[..., E, H * C]`."""
        messages = reference.messages(x_j, alpha, edge_value)
        # Explainers mask along node_dim.
        return messages.flatten(-2) if self.flat_messages and not self.explain else messages

    @fused
    def aggregate(
        self,
        inputs: Tensor,
        index: Tensor,
        ptr: Optional[Tensor] = None,
        dim_size: Optional[int] = None,
        alpha: Tensor = None,  # type: ignore[assignment] # message() requires it, and PyG keeps one type per name
    ) -> Tensor:
        """Sums the messages of each target, `[..., N, H, C]`; a subclass may return them flat or not."""
        flat_dims = 2 if alpha is None else alpha.dim()
        if inputs.dim() == flat_dims:
            inputs = inputs.unsqueeze(-2 if alpha is None or alpha.size(-1) == 1 else -1)
        aggregated: Tensor = super().aggregate(inputs, index, ptr, dim_size)
        return aggregated


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    r"""Combines attention over several graphs into attention over their union.

    .. math::
        L_i = \log \sum_g \exp L^g_i, \qquad \mathrm{out}_i = \sum_g \exp(L^g_i - L_i) \, \mathrm{out}^g_i

    This is how `ring attention <https://arxiv.org/abs/2310.01889>`_ attends part by part to a sequence that is divided
    among processes. It also joins a sparse graph to a complete one. An edge that is in two of the graphs counts twice.

    Args:
        outs: The outputs of `gattn.attend(..., return_lse=True)`, `[..., N, H, C]` each.
        lses: The log-sum-exp that each call returned, `[..., N, H]` each.

    Shapes:
        outs `[..., N, H, C]`, lses `[..., N, H]`.

    Returns:
        The output and the log-sum-exp of the union, which can be merged again; zeros and minus infinity for targets
        without neighbours in any graph.

    Raises:
        ValueError: If there is not one log-sum-exp for each output, there are none, or shapes differ.

    Example:
        >>> import torch, gattn
        >>> q, k, v = torch.randn(3, 4, 2, 8).unbind()  # 4 nodes, 2 heads, 8 channels
        >>> first, second = torch.tensor([[0, 1], [1, 2]]), torch.tensor([[3, 2], [1, 0]])
        >>> parts = [gattn.attend(q, k, v, edges, return_lse=True) for edges in (first, second)]
        >>> out, lse = gattn.merge(*zip(*parts))
        >>> torch.allclose(out, gattn.attend(q, k, v, torch.cat([first, second], 1)), atol=1e-6)
        True
    """
    outs, lses = list(outs), list(lses)
    shapes = [list(out.shape) for out in outs]  # not a set of them, as open sizes of exported programs have no hash
    if (
        not outs
        or any(shape != shapes[0] for shape in shapes)
        or [x[:-1] for x in shapes] != [list(x.shape) for x in lses]
    ):
        raise InputError(
            "merge takes outputs [..., N, H, C] of one shape and a log-sum-exp [..., N, H] for each; got "
            f"{[list(out.shape) for out in outs]} and {[list(lse.shape) for lse in lses]}."
        )
    lse = torch.stack(lses)
    seen = (lse != -torch.inf).any(0)
    total = lse.masked_fill(~seen, 0.0).logsumexp(0)
    shares = (lse - total).masked_fill(lse == -torch.inf, -torch.inf).exp()
    out = sum(share.unsqueeze(-1).to(out.dtype) * out for share, out in zip(shares, outs, strict=True))
    assert isinstance(out, Tensor)
    return out, total.masked_fill(~seen, -torch.inf)


def completed(
    query: Tensor | None, key: Tensor | None, value: Tensor | None, score: Score, terms: dict[str, Any]
) -> tuple[Tensor | None, Tensor | None, Score]:
    """Key, value and score of a call, with zeros `[..., M, H]` or no channels `[..., M, H, 0]` for what it lacks.

    So calls without a key, whose bias is the whole logit, and those for weights alone can be prepared.
    """
    if value is not None:
        is_bias = key is None and query is None and terms.get("edge") is None and isinstance(terms.get("bias"), Tensor)
        if is_bias and type(value) is Tensor and value.dim() > 2:
            return value.new_zeros(value.size(-2)).expand(value.shape[:-1]), value, NO_SCORE
    elif type(key) is Tensor:
        value = key.new_empty((*(key.shape if score.scalar else key.shape[:-1]), 0))
    return key, value, score


def _target_vectors(call: Call, value: Tensor) -> Tensor:
    """Vectors by which explainers represent targets, shaped like those of the sources; zeros if there are none."""
    if call.query is not None and not call.score.scalar and call.query.shape[-2:] == value.shape[-2:]:
        return call.query
    if value.size(-3) == call.num_targets:
        return value
    return value.new_zeros(*value.shape[:-3], call.num_targets, *value.shape[-2:])


# The parts of PyG's machinery: whoever overrides or replaces one of these, or hooks into them, needs that machinery.
_STEPS = ("propagate", "edge_updater")  # whose code PyG generates
_HOOKS = ("edge_update", "message", "aggregate", "update", *_STEPS)
_machinery = attrgetter(*_HOOKS)
_SUM = (SumAggregation.forward, SumAggregation.reduce, MessagePassing.aggregate)
_ORIGINALS = {name: getattr(MessagePassing, name) for name in _HOOKS}
_HOOK_TABLES = tuple(
    f"_{step}_forward{when}_hooks"
    for step in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    for when in ("_pre", "")
)


def _is_overridden(function: Any, name: str) -> bool:
    """Whether a part of PyG's machinery is neither PyG's own nor known to compute what the kernels compute."""
    if getattr(function, "_fused", None) is function or function is _ORIGINALS[name]:
        return False
    return name not in _STEPS or function is not getattr(MessagePassing, name)  # which may be generated code


_DOT = DotScore()

# One instance serves all functional calls; it is made at import, because PyG generates code for it.
_core: Attention = Attention().eval()

#: Output and weights of `attend` for a layer that is not an `Attention`, by whose name they are recorded.
attend_for = _core._result
#: The call of these arguments, checked.
call_of = _core._checked
attend, weigh, aggregate = _core.attend, _core.weigh, _core.weighted_sum
# Not before: the core's generated code imports all names that are in it then.
__all__ += ["aggregate", "attend", "attend_for", "call_of", "completed", "merge", "weigh"]
