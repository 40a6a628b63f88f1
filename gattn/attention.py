r"""The one attention core: a softmax over each target's neighbours, as message passing.

.. math::
    out_i = \sum_{j \in \mathcal{N}(i)} \alpha_{ij} v_j, \qquad
    \alpha_{i\cdot} = p\big(s(q_i, k_j, e_{ij}) \text{ for } j \in \mathcal{N}(i)\big)

Dimensions: N targets, M sources, E edges, H heads, C channels, B batch.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, Optional, TypeVar

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_true
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.typing import OptPairTensor  # noqa: F401 - PyG looks it up here
from torch_geometric.utils import is_sparse

from gattn.distributions import Distribution, Hard, LocalGaussian, Softmax, resolve_distribution
from gattn.errors import InputError, InputTypeError
from gattn.graphs import FLOWS, CompleteGraph, Graph, as_graph
from gattn.ops import cpu, dense, operators, reference, triton
from gattn.ops.dropout import check_probability, draw_seed, drop
from gattn.ops.edge_lists import plain, traced
from gattn.recording import recorded
from gattn.scores import AdditiveScore, DotScore, GATScore, Score
from gattn.settings import require_finite, resolve_backend

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def fused(hook: _Hook) -> _Hook:
    """Marks a hook of message passing that says what the kernels compute, so that they may replace it."""
    hook._fused = hook  # type: ignore[attr-defined] # itself, since functools.wraps copies attributes
    return hook


class Attention(MessagePassing):
    r"""Attention as PyG message passing: `edge_update` makes the weights, `message` applies them.

    The base class of gattn's graph layers, and usable by itself: called with the arguments of :func:`gattn.attend`, it
    attends (and drops weights in training mode only).

    Args:
        aggr: How messages are aggregated. Attention is their sum; PyG's other aggregations are possible.
            (default: `"add"`)
        flow: `"source_to_target"` or `"target_to_source"`. (default: `"source_to_target"`)
        **kwargs: Further arguments of `torch_geometric.nn.conv.MessagePassing`, except `node_dim`.

    Example:
        >>> import torch
        >>> from gattn.attention import Attention
        >>> x = torch.randn(3, 2, 4)  # 3 nodes, 2 heads, 4 channels
        >>> Attention()(x, x, x, torch.tensor([[0, 1], [2, 2]])).shape
        torch.Size([3, 2, 4])
    """

    # PyG generates propagate() and edge_updater() for these arguments; given so, it need not parse sources.
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

    def __init__(self, aggr: Any = "add", *, flow: str = FLOWS[0], **kwargs: Any):
        unknown = kwargs.keys() - {"aggr_kwargs", "decomposed_layers"}
        if unknown:
            known = [name for name in inspect.signature(type(self)).parameters if name not in ("args", "kwargs")]
            raise TypeError(
                f"{type(self).__name__} has no argument {', '.join(sorted(unknown))}; it takes {', '.join(known)}, and "
                "of PyG's MessagePassing aggr, aggr_kwargs, flow and decomposed_layers."
            )
        self._forget_namesakes()
        super().__init__(aggr, flow=flow, node_dim=-3, **kwargs)
        self._alpha: Optional[Tensor] = None  # PyG's layers have it, and code that works with them looks at it
        self._restore_originals()
        self._check_hooks()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._restore_originals()

    @classmethod
    def _forget_namesakes(cls) -> None:
        """PyG keeps generated code by a class's name, as if no cell of a notebook ever defined it anew."""
        for step in ("propagate", "edge_updater"):
            if f"_jinja_{step}" not in vars(cls):
                sys.modules.pop(f"{cls.__module__}_{cls.__name__}_{step}", None)

    def __prepare_scriptable__(self) -> None:
        raise NotImplementedError(
            f"TorchScript cannot compile {type(self).__name__}, and PyTorch has deprecated it: use torch.compile, or "
            "torch.export for a program without Python (torch.jit.trace works, too)."
        )

    def _restore_originals(self) -> None:
        # PyG takes a subclass's "original" from its already generated parent, which cannot explain.
        # MessagePassing itself has generated code, too, once anybody instantiated it.
        originals = vars(MessagePassing)
        type(self)._orig_propagate = originals.get("_orig_propagate", originals["propagate"])
        type(self)._orig_edge_updater = originals.get("_orig_edge_updater", originals["edge_updater"])

    def _check_hooks(self) -> None:
        """A hook that asks for what is not there would find it among its module's globals, or nowhere."""
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
                        f"passed to it: there are {', '.join(known)}, per node with _i or _j at the end, and PyG's "
                        "index, ptr, dim_size and size."
                    )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Attends; takes the arguments of `gattn.attend`."""
        return self.attend(*args, **kwargs)

    @recorded
    def attend(
        self,
        query: Tensor | None,
        key: Tensor,
        value: Tensor,
        graph: Any,
        *,
        score: Score | None = None,
        edge: Tensor | None = None,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        edge_value: Tensor | None = None,
        distribution: str | Distribution = "softmax",
        dropout: float = 0.0,
        training: bool | None = None,
        return_weights: bool | str = False,
        backend: str = "auto",
    ) -> Any:
        """See `gattn.attend`; `training=None` stands for the module's own mode."""
        backend = resolve_backend(backend)
        score = DotScore() if score is None else score
        if not isinstance(score, Score):
            raise TypeError(f"score is an object such as gattn.DotScore() or gattn.GATScore(); got {score!r}.")
        distribution = resolve_distribution(distribution)
        graph = as_graph(graph, self.flow)
        if return_weights not in (False, True, "dropped"):  # 0 and 1 are among them
            raise ValueError(f"return_weights is False, True or 'dropped', not {return_weights!r}.")
        check_probability("dropout", dropout)
        training = self.training if training is None else training
        heads = _check_shapes(query, key, value, score)
        _check_terms(value, score, edge=edge, bias=bias, mask=mask, edge_value=edge_value)
        require_finite(query=query, key=key, value=value, edge=edge, bias=bias, edge_value=edge_value)
        has_edge_terms = edge is not None or edge_value is not None
        backend = self._choose(backend, graph, value, score, distribution, has_edge_terms)
        num_targets = None if query is None else query.size(-2 if score.scalar else -3)
        batch = value.shape[:-3]
        if isinstance(graph, CompleteGraph):
            _check_complete(graph, value.size(-3), num_targets, batch)
            if backend == "dense":
                return _attend_densely(
                    query, key, value, graph, score, heads, bias, mask, distribution, dropout * training, return_weights
                )
        has_terms = has_edge_terms or bias is not None or mask is not None
        kernels = _KERNELS.get(backend)
        fused = kernels is not None
        edges = _edge_list(graph, value.size(-3), num_targets, value.device, kernels, has_terms, bool(return_weights))
        if isinstance(graph, CompleteGraph):
            bias, mask = (
                None if term is None else graph.pick(_expand(term, name, graph, batch, heads), edges.edge_index)
                for name, term in (("bias", bias), ("mask", mask))
            )
            mask = _both(mask, _length_mask(graph, edges.edge_index))
        if has_terms or mask is not None:
            mask = _check_edge_terms(edge, bias, mask, edge_value, score, batch, edges.num_edges, heads, key, value)

        result = _promote(query, key, value, edge, bias, edge_value, *score.tensors())
        # Half precision is computed in float32 throughout and rounded once, at the end.
        compute = operators.compute_dtype(result)
        # A batch's gradients of the edges that it shares are summed before they are rounded.
        shared_by_batch = len(batch) > 0 and any(t is not None and t.dim() == 3 for t in (edge, edge_value))
        vectors = result if fused and not shared_by_batch else compute
        scalars = compute if score.scalar else vectors
        shared_value, shared_edge = value is key, edge is edge_value
        key, value = key.to(scalars), value.to(vectors)
        query, edge = _to(query, scalars), _to(edge, scalars)
        bias, edge_value = _to(bias, compute), _to(edge_value, vectors)
        seed = None
        if dropout > 0.0 and training:
            seed = draw_seed(value.device)

        if kernels is not None:
            out, alpha = kernels.attention(
                query,
                key,
                key if shared_value else value,
                edges.edge_index,
                edges.num_targets,
                score,
                self_loops=edges.self_loops,
                flow=edges.flow,
                edge=edge,
                bias=bias,
                mask=mask,
                edge_value=edge if shared_edge else edge_value,
                dropout=dropout,
                seed=seed,
                with_weights=bool(return_weights),
            )
            out, dropped = out.to(result), None
        else:
            rows = edges.edge_index if edges.flow == self.flow else edges.edge_index.flip(0)  # as PyG goes by
            distribution.check(batch, edges.num_targets)
            distribution = distribution.with_sources(edges.edge_index[FLOWS.index(edges.flow)])
            if score.grouped:
                key, value = reference.repeat_heads(key, heads), reference.repeat_heads(value, heads)
            if score.scalar:
                query, key = None if query is None else query.unsqueeze(-1), key.unsqueeze(-1)
            alpha = self.edge_updater(
                rows,
                query=query,
                key=key,
                edge=edge,
                bias=bias,
                mask=mask,
                score=score,
                distribution=distribution,
                num_targets=edges.num_targets,
            )
            dropped = alpha if seed is None else drop(alpha, dropout, seed)
            size = (value.size(-3), edges.num_targets)
            x: Any = value
            if "x_i" in self._user_args:
                x = (value, _target_vectors(query, value, edges.num_targets))
            if self.flow != FLOWS[0]:
                size = size[::-1]
                x = x[::-1] if self.explain and x is not value else x  # the generated code knows no flow there
            terms = {"edge_value": edge_value} if "edge_value" in self.propagate_type else {}
            out = self.propagate(rows, x=x, alpha=dropped, size=size, **terms).to(result)
        if not return_weights:
            return out
        assert alpha is not None
        if return_weights == "dropped" and seed is not None:
            alpha = drop(alpha, dropout, seed) if dropped is None else dropped
        weights = alpha.to(result)
        return out, graph.to_dense(weights, edges.edge_index) if isinstance(graph, CompleteGraph) else weights

    def _choose(
        self, backend: str, graph: Graph, value: Tensor, score: Score, distribution: Distribution, has_edge_terms: bool
    ) -> str:
        """Which backend computes this call: the one place where that is asked.

        Raises:
            ValueError: If `backend` is not `"auto"` and cannot; the message says why not.
        """
        if backend == "reference":
            return backend
        for name in ("dense", _AUTOMATIC.get(value.device.type, "cpu")) if backend == "auto" else (backend,):
            reason = (
                _not_dense(graph, score, distribution, has_edge_terms)
                if name == "dense"
                else _no_kernel(name, value, score, distribution)
            )
            reason = reason or operators.transformed() or self._watched()
            if reason is None and name in _KERNELS:
                reason = _KERNELS[name].unavailable(backend)
            if reason is None:
                return name
        if backend == "auto":
            return "reference"
        raise ValueError(f"backend={backend!r} cannot serve this call: {reason}. backend='auto' can.")

    def _watched(self) -> str | None:
        """What needs messages to be there, or changes how they are made."""
        if self.explain:
            return "an explainer looks at its messages"
        for name in _HOOKS:
            hook = getattr(type(self), name)
            if hook is not getattr(MessagePassing, name) and getattr(hook, "_fused", None) is not hook:
                return f"{type(self).__name__} overrides {name}()"
        if not isinstance(self.aggr_module, SumAggregation):
            return f"messages are aggregated by {self.aggr_module}, not summed"
        if self.decomposed_layers > 1:
            return "the layer is decomposed (decomposed_layers > 1)"
        if any(getattr(self, name) for name in _HOOK_TABLES):
            return "a hook is registered on its message passing"
        return None

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
        """Attention weights: scores, masks, distribution. `[..., E, H]`."""
        if score.scalar:
            query_i = None if query_i is None else query_i.squeeze(-1)
            key_j = key_j.squeeze(-1)
        return reference.weights(query_i, key_j, edge, bias, mask, score, distribution, index, num_targets)

    @fused
    def message(self, x_j: Tensor, alpha: Tensor, edge_value: Optional[Tensor]) -> Tensor:
        """Weighted values of the sources, `[..., E, H, C]`."""
        return reference.messages(x_j, alpha, edge_value)


def attend(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    graph: Any,
    *,
    score: Score | None = None,
    edge: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    edge_value: Tensor | None = None,
    distribution: str | Distribution = "softmax",
    dropout: float = 0.0,
    training: bool = False,
    return_weights: bool | str = False,
    backend: str = "auto",
) -> Any:
    r"""Attention over any graph: the one function that all of gattn's layers are.

    .. math::
        out_i = \sum_{j \in \mathcal{N}(i)} \alpha_{ij} (v_j + e^v_{ij}), \qquad
        \alpha_{i\cdot} = p\big(s(q_i, k_j, e_{ij}) + b_{ij} \text{ for } j \in \mathcal{N}(i)\big)

    Args:
        query: Target side of the score: `[N, H, C]`; for `GATScore` `[N, H]`, or `None` for no target-side term.
        key: Source side of the score: `[M, H, C]`; for `GATScore` `[M, H]`.
        value: What is averaged: `[M, H, Cv]`. For `DotScore`, key and value may have fewer heads, a number that divides
            H. All three may have one or two leading batch dimensions. Tensors `[B, H, N, C]`, as many Transformers
            have them, go in and come out as `x.transpose(1, 2)`, without a copy.
        graph: Who attends to whom: a `SparseGraph`, a `CompleteGraph`, or a bare `edge_index` in any of PyG's forms.
        score: How the two ends of an edge compare: `GATScore`, `AdditiveScore`, `DotScore` or your own.
            (default: `DotScore()`)
        edge: Per-edge term inside the score, in `edge_index` order: `[E, H, C]`; for `GATScore` `[E, H]`.
            (default: `None`)
        bias: Added to the finished logit: `[E, H]`; on a complete graph broadcastable to `[B, H, N, M]`.
            (default: `None`)
        mask: True = may attend: `[E]` or `[E, H]` (or with the batch dimensions in front); on a complete graph
            broadcastable to `[B, H, N, M]`. (default: `None`)
        edge_value: Added to the value: `[E, H, Cv]`. (default: `None`)
        distribution: How logits become weights: `"softmax"`, or a `Distribution`. (default: `"softmax"`)
        dropout: Probability that a weight is dropped, in training. Which ones is drawn from PyTorch's generator, so
            forked processes that inherit one state drop the same weights until they are seeded. (default: `0.0`)
        training: Whether dropout applies. (default: `False`)
        return_weights: `True` also returns the weights before dropout, `"dropped"` the very ones that made the output.
            (default: `False`)
        backend: `"auto"` (the fastest that applies), `"dense"` (complete graphs, without their edges), `"cpu"` or
            `"triton"` (fused kernels, the latter for CUDA) or `"reference"` (plain PyG message passing).
            (default: `"auto"`)

    Returns:
        `[N, H, Cv]`, in the type that the inputs promote to; a target without neighbours gets zeros. With
        `return_weights` a pair: the output, and weights `[E, H]` in `edge_index` order, for a complete graph
        `[H, N, M]` (each with the batch dimensions in front), for a packed one a list of such, one a block.

    Raises:
        ValueError: If shapes do not fit each other or the graph, or a name is unknown; the message says which.
        IndexError: If an index of the graph is out of range.
        TypeError: If `graph` is no graph, or a tensor is no tensor.
        RuntimeError: If `backend="cpu"` is asked for, and the kernels were not built, or `"triton"`, and that is not
            installed.

    Example:
        A Transformer's attention is graph attention on a complete graph; causal attention has fewer edges.

        >>> import torch, gattn
        >>> q, k, v = torch.randn(3, 5, 2, 4).unbind()  # 5 nodes, 2 heads, 4 channels
        >>> full = gattn.attend(q, k, v, gattn.CompleteGraph(5))
        >>> causal = gattn.attend(q, k, v, gattn.CompleteGraph(5, causal=True))
        >>> citations = gattn.attend(q, k, v, torch.tensor([[0, 1, 2], [1, 2, 3]]))
        >>> full.shape
        torch.Size([5, 2, 4])
    """
    return _core.attend(
        query,
        key,
        value,
        graph,
        score=score,
        edge=edge,
        bias=bias,
        mask=mask,
        edge_value=edge_value,
        distribution=distribution,
        dropout=dropout,
        training=training,
        return_weights=return_weights,
        backend=backend,
    )


# Overriding one of these, or hooking into PyG's machinery, needs that machinery.
_HOOKS = ("edge_update", "message", "aggregate", "update")
_HOOK_TABLES = tuple(
    f"_{step}_forward{when}_hooks"
    for step in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    for when in ("_pre", "")
)

#: The scores that backends know.
_SCORES = (GATScore, AdditiveScore, DotScore)

#: The backends that have kernels for lists of edges.
_KERNELS = {"cpu": cpu, "triton": triton}
_AUTOMATIC = {"cpu": "cpu", "cuda": "triton"}

# One instance serves every functional call; made at import, because PyG generates code for it.
_core = Attention()


def _not_dense(graph: Graph, score: Score, distribution: Distribution, has_edge_terms: bool) -> str | None:
    """Why attention cannot be computed without a list of edges."""
    if not isinstance(graph, CompleteGraph):
        return "it serves complete graphs, not lists of edges"
    if has_edge_terms:
        return "edge and edge_value come one an edge"
    if type(score) not in _SCORES:
        return f"it knows gattn's own scores, not {type(score).__name__}"
    if graph.blocks is not None and type(distribution) is not Softmax:
        return f"on packed graphs it knows the softmax, not {distribution}"
    if type(distribution) not in (Softmax, Hard, LocalGaussian):
        return f"it knows gattn's own distributions, not {distribution}"
    return None


def _attend_densely(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    graph: CompleteGraph,
    score: Score,
    heads: int,
    bias: Tensor | None,
    mask: Tensor | None,
    distribution: Distribution,
    dropout: float,
    return_weights: bool | str,
) -> Any:
    batch = value.shape[:-3]
    distribution.check(batch, graph.num_targets)
    for name, term in (("bias", bias), ("mask", mask)):
        if term is not None:
            _expand(term, name, graph, batch, heads)
    result = _promote(query, key, value, bias, *score.tensors())
    compute = operators.compute_dtype(result)
    # Fused kernels compute dot products of half precision in float32 themselves.
    dtype = result if isinstance(score, DotScore) else compute
    query, key, value = _to(query, dtype), key.to(dtype), value.to(dtype)
    if isinstance(score, AdditiveScore):
        score = AdditiveScore(score.vector.to(compute), score.activation, score.negative_slope)
    out, weights = dense.attention(
        query,
        key,
        value,
        graph,
        score,
        bias=_to(bias, compute),
        mask=mask,
        distribution=distribution,
        dropout=dropout,
        with_weights=return_weights,
    )
    out = out.to(result)
    if not return_weights:
        return out
    return out, [x.to(result) for x in weights] if isinstance(weights, list) else weights.to(result)


def _no_kernel(backend: str, value: Tensor, score: Score, distribution: Distribution) -> str | None:
    """Why no kernel knows such tensors, this score or this distribution."""
    if value.device.type not in _KERNELS[backend].DEVICES:
        return f"the tensors are on {value.device}"
    if value.dtype not in operators.DTYPES:
        return f"it knows float64, float32, bfloat16 and float16, not {value.dtype}"
    if type(score) not in _SCORES:
        return f"it knows gattn's own scores, not {type(score).__name__}"
    if type(distribution) is not Softmax:
        return f"it knows the softmax, not {distribution}"
    return None


def _check_shapes(query: Tensor | None, key: Tensor, value: Tensor, score: Score) -> int:
    """Checks query, key and value against each other and returns the number of heads."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor) and not (name == "query" and tensor is None):
            raise InputTypeError(f"{name} must be a tensor; got {type(tensor).__name__}.")
        if tensor is not None and not tensor.is_floating_point():
            raise InputError(f"{name} must be of a floating-point type; got {tensor.dtype}.")
        if tensor is not None and tensor.device != key.device:
            raise InputError(f"{name} is on {tensor.device}, but key is on {key.device}: move one of them.")
    if query is None and not score.scalar:
        raise InputError(f"{type(score).__name__} needs a query; query=None is possible with GATScore only.")
    kind, letters = type(score).__name__, "H" if score.scalar else "H, C"
    batch = value.dim() - 3
    if batch not in (0, 1, 2):
        raise InputError(
            f"value has shape [M, H, C], with at most two batch dimensions in front; got {list(value.shape)}."
        )
    for name, tensor, nodes in (("query", query, "N"), ("key", key, "M")):
        if tensor is not None and tensor.dim() != value.dim() - score.scalar:
            raise InputError(
                f"{kind} takes a {name} of shape [{nodes}, {letters}] beside a value of shape [M, H, C] (and the same "
                f"batch dimensions in front of each); got {list(tensor.shape)} and {list(value.shape)}."
            )
    if key.shape[: batch + 2] != value.shape[: batch + 2]:
        raise InputError(
            f"key and value have the same batch, sources and heads; got {list(key.shape)} and {list(value.shape)}."
        )
    heads = key.size(batch + 1)
    if query is not None:
        heads = query.size(batch + 1)
        shared = key.size(batch + 1)
        fits = heads == shared or (score.grouped and shared > 0 and heads % shared == 0)
        if query.shape[:batch] != key.shape[:batch] or query.shape[batch + 2 :] != key.shape[batch + 2 :] or not fits:
            grouped = ", or key and value a number of heads that divides the query's" if score.grouped else ""
            raise InputError(
                f"query and key have the same batch, heads and channels{grouped}; got {list(query.shape)} and "
                f"{list(key.shape)}."
            )
    score.check(heads, 1 if score.scalar else key.size(-1))
    return heads


def _check_terms(value: Tensor, score: Score, **terms: Tensor | None) -> None:
    """Checks the kind of everything that comes once per edge; whether it fits the edges is seen when they are known."""
    for name, term in terms.items():
        if term is None:
            continue
        if not isinstance(term, Tensor):
            raise InputTypeError(f"{name} must be a tensor; got {type(term).__name__}.")
        if name == "mask" and term.dtype != torch.bool:
            raise InputError(f"mask is a tensor of booleans, True = may attend; got {term.dtype}.")
        if term.is_complex():
            raise InputError(f"{name} is added to real numbers; got {term.dtype}.")
        if term.device != value.device:
            raise InputError(f"{name} is on {term.device}, the features are on {value.device}: move one of them.")
    for term in score.tensors():
        if term.device != value.device:
            raise InputError(
                f"{type(score).__name__} has a tensor on {term.device}, the features are on {value.device}: move one "
                "of them."
            )


class _EdgeList(NamedTuple):
    """A graph's edges as the kernels or the reference take them."""

    edge_index: Tensor
    num_targets: int
    self_loops: bool
    """Whether self-loops are still to be added."""
    flow: str
    num_edges: int | None
    """Number of edges, self-loops included; `None` if nobody asked, or compiled code cannot know."""


def _edge_list(
    graph: Graph,
    num_sources: int,
    num_targets: int | None,
    device: torch.device,
    kernels: ModuleType | None,
    count: bool,
    weights: bool,
) -> _EdgeList:
    if isinstance(graph, CompleteGraph):
        index = graph.edge_index(device)
        return _EdgeList(index, graph.num_targets, False, FLOWS[0], index.size(1))
    if num_targets is None:
        num_targets = num_sources if graph.num_targets is None else graph.num_targets
    graph = graph.with_sizes(num_sources, num_targets)
    # Kernels check indices and add self-loops themselves (but compiled code must know how many weights there are).
    if kernels is not None and not is_sparse(graph.adjacency) and not (weights and torch.compiler.is_compiling()):
        index, self_loops = plain(graph.adjacency), graph.self_loops
        num_edges = None if self_loops else index.size(1)
        if count and self_loops and not traced():
            num_edges = kernels.layout_of(index, num_sources, num_targets, self_loops, graph.flow).num_edges
    else:
        index, self_loops = graph.edges().edge_index, False
        num_edges = index.size(1)
    if index.device != device:
        raise InputError(f"the graph is on {index.device}, the features are on {device}: move one of them.")
    return _EdgeList(index, num_targets, self_loops, graph.flow, num_edges)


def _check_complete(graph: CompleteGraph, num_sources: int, num_targets: int | None, batch: torch.Size) -> None:
    """Checks a complete graph's sizes and lengths against the features."""
    given = graph.num_targets if num_targets is None else num_targets
    if (graph.num_targets, graph.num_sources) != (given, num_sources):
        raise InputError(
            f"the CompleteGraph has {graph.num_targets} targets and {graph.num_sources} sources, but query has "
            f"{given} rows and key and value have {num_sources}."
        )
    for lengths in (graph.source_lengths, graph.target_lengths):
        if lengths is not None and lengths.shape != batch:
            raise InputError(
                f"the graph has lengths for a batch of shape {list(lengths.shape)}, but the features have "
                f"{list(batch)} in front."
            )


def _expand(dense: Tensor, name: str, graph: CompleteGraph, batch: torch.Size, heads: int) -> Tensor:
    """A complete graph's bias or mask in its full shape, `[..., H, N, M]`."""
    shape, letters = (*batch, heads, graph.num_targets, graph.num_sources), "batch, heads, targets, sources"
    if graph.blocks is not None:
        targets, sources = (
            (max(sizes, default=0) for sizes in zip(*graph.blocks, strict=True)) if graph.blocks else (0, 0)
        )
        shape, letters = (len(graph.blocks), heads, targets, sources), "blocks, heads, most targets, most sources"
    try:
        return dense.expand(shape)
    except RuntimeError as error:
        raise InputError(
            f"{name} on this complete graph must be broadcastable to {list(shape)} ({letters}); got "
            f"{list(dense.shape)}."
        ) from error


def _length_mask(graph: CompleteGraph, index: Tensor) -> Tensor | None:
    mask = graph.length_mask(index)
    return None if mask is None else mask.unsqueeze(-1)


def _both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first & second


def _check_edge_terms(
    edge: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    edge_value: Tensor | None,
    score: Score,
    batch: torch.Size,
    num_edges: int | None,
    heads: int,
    key: Tensor,
    value: Tensor,
) -> Tensor | None:
    """Checks everything that comes once per edge, and returns the mask as `[..., E, H or 1]`.

    Where the number of edges is not known yet, the kernels check it.
    """
    if mask is not None and mask.dim() == 1:
        mask = mask.unsqueeze(-1)
    elif mask is not None and mask.shape[:-1] == batch and _may_equal(mask.size(-1), num_edges):
        is_per_head = mask.dim() == 2 and mask.size(-1) == heads and _may_equal(mask.size(0), num_edges)
        mask = mask if is_per_head else mask.unsqueeze(-1)
    channels = () if score.scalar else (key.size(-1),)
    for name, tensor, last in (
        ("edge", edge, (heads, *channels)),
        ("bias", bias, (heads,)),
        ("mask", mask, (heads,)),
        ("edge_value", edge_value, (heads, value.size(-1))),
    ):
        if tensor is None:
            continue
        inner = len(last)
        fits = tensor.shape[-inner:] == last or (name == "mask" and tensor.size(-1) == 1)
        if not (
            fits
            and tensor.dim() in (inner + 1, inner + 1 + len(batch))
            and tensor.shape[: -1 - inner] in ((), batch)
            and _may_equal(tensor.size(-1 - inner), num_edges)
        ):
            shape, where = ([*last], "for each edge of") if num_edges is None else ([num_edges, *last], "for")
            raise InputError(
                f"{name} has one entry per edge, in the order of graph.edge_index: {shape} {where} this graph and "
                f"{type(score).__name__}; got {list(tensor.shape)}."
            )
    return mask


def _may_equal(size: int, num_edges: int | None) -> bool:
    """Whether a size is E, as far as that is known: numbers of edges that depend on data are not, in compiled code."""
    if num_edges is None:
        return True
    return guard_or_true(size == num_edges) if torch.compiler.is_compiling() else size == num_edges


def _target_vectors(query: Tensor | None, value: Tensor, num_targets: int) -> Tensor | None:
    """What explainers know targets by: vectors like those of the sources, where there are some."""
    if query is not None and query.shape[-2:] == value.shape[-2:]:
        return query
    return value if value.size(-3) == num_targets else None


def _promote(*tensors: Tensor | None) -> torch.dtype:
    present = [tensor.dtype for tensor in tensors if tensor is not None]
    dtype = present[0]
    for other in present[1:]:
        dtype = torch.promote_types(dtype, other)
    return dtype


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
