"""Attention weights as explanations, for PyG's explanation framework."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.explain import ExplainerAlgorithm, Explanation, HeteroExplanation
from torch_geometric.explain.config import ExplanationType, ModelTaskLevel
from torch_geometric.nn.module_dict import ModuleDict
from torch_geometric.nn.to_hetero_transformer import key2str

from gattn.graphs import FLOWS
from gattn.graphs.edge_lists import plain
from gattn.nn import HANConv, HGTConv
from gattn.nn.hetero.hetero_conv import EdgeType
from gattn.recording import record_own_layers

__all__ = ["AttentionExplainer"]

#: Edges `[2, E]` by edge type; those of a homogeneous graph are of the type `None`.
_Edges: TypeAlias = dict[EdgeType | None, Tensor]
_REDUCTIONS: dict[str, Any] = {"mean": torch.mean, "max": torch.amax, "min": torch.amin}


class AttentionExplainer(ExplainerAlgorithm):
    r"""Explains models by attention weights, as an algorithm of `torch_geometric.explain.Explainer`.

    The mask of an edge is its attention weight, averaged over heads and over the L layers that attend along it:

    .. math::
        m_{ij} = \frac{1}{L} \sum_{l=1}^L \frac{1}{H_l} \sum_{h=1}^{H_l} \alpha_{ij}^{(l, h)}

    On heterogeneous graphs, each edge type has its own mask. The model may use `HGTConv`, `HANConv` (whose weights of
    edge types are left out) and other layers of gattn that serve one edge type each, as in `HeteroConv` or `to_hetero`.

    Self-loops that a layer adds are not part of the mask; a self-loop of the graph that a layer replaces gets the
    weight of its replacement. An edge type that no layer attends along gets zeros. Attention on a `CompleteGraph` is
    ignored, as are layers whose attribute `explain` is `False`. Gates, such as those of `FAConv`, can be negative.
    Whether attention explains predictions at all is disputed: see https://arxiv.org/abs/1902.10186.

    Args:
        reduce: `"mean"`, `"max"` (PyG's default) or `"min"`, applied over heads and then over layers.
            (default: `"mean"`)
        node_type: The type of the nodes that the rows of the model's output stand for. Only `index` needs it, on graphs
            with several types of nodes. (default: `None`)

    Shapes:
        - **input:** features `[N, F]` and edge indices `[2, E]`, or dictionaries of them by type; **output:** an
          explanation whose edge masks are `[E]`.

    Raises:
        ValueError: If `reduce` is unknown.

    Example:
        >>> import torch, gattn
        >>> from torch_geometric.explain import Explainer
        >>> writes, cites = ("author", "writes", "paper"), ("paper", "cites", "paper")
        >>> class Net(gattn.nn.HGTConv):
        ...     def forward(self, x_dict, edge_index_dict):
        ...         return super().forward(x_dict, edge_index_dict)["paper"]
        >>> explainer = Explainer(
        ...     Net(16, 4, (["author", "paper"], [writes, cites])),
        ...     gattn.explain.AttentionExplainer(node_type="paper"),
        ...     explanation_type="model",
        ...     edge_mask_type="object",
        ...     model_config={"mode": "regression", "task_level": "node"},
        ... )
        >>> x = {"author": torch.randn(2, 16), "paper": torch.randn(3, 16)}
        >>> edges = {writes: torch.tensor([[0, 1], [0, 2]]), cites: torch.tensor([[0], [1]])}
        >>> explainer(x, edges, index=2)[writes].edge_mask  # author 1 is the only neighbour of paper 2
        tensor([0., 1.])
    """

    def __init__(self, reduce: str = "mean", node_type: str | None = None):
        super().__init__()
        if reduce not in _REDUCTIONS:
            raise ValueError(f"reduce must be one of {', '.join(map(repr, _REDUCTIONS))}; got {reduce!r}.")
        self.reduce = reduce
        self.node_type = node_type

    def supports(self) -> bool:
        """Whether the `Explainer` is configured for edge masks that explain the model; if not, this is logged."""
        config = self.explainer_config
        if config.explanation_type == ExplanationType.model and config.node_mask_type is None:
            return True
        logging.getLogger(__name__).error("AttentionExplainer needs explanation_type='model' and node_mask_type=None.")
        return False

    def forward(
        self,
        model: Module,
        x: Tensor | dict[str, Tensor],
        edge_index: Tensor | dict[EdgeType, Tensor],
        *,
        target: Tensor | None = None,
        index: int | Tensor | None = None,
        **kwargs: Any,
    ) -> Explanation | HeteroExplanation:
        """Runs the model once and reduces its attention weights.

        Args:
            model: A model with layers of gattn.
            x: Features of the nodes, or a dictionary of them by node type.
            edge_index: The edges, `[2, E]`, or a dictionary of them by edge type.
            target: Not used. (default: `None`)
            index: The rows of the output to explain. If they are nodes, edges outside of their k-hop subgraph get
                zeros, where k is the number of layers, as in PyG. (default: `None`, all rows)
            **kwargs: Further arguments of the model.

        Raises:
            TypeError: If `edge_index` is neither a tensor nor a dictionary of tensors.
            ValueError: If there are no weights, or some cannot be assigned to edges, or `index` needs a `node_type`.
        """
        given: Mapping[Any, Any] = edge_index if isinstance(edge_index, Mapping) else {None: edge_index}
        if not all(isinstance(ends, Tensor) and ends.layout == torch.strided for ends in given.values()):
            raise TypeError("edges must be tensors [2, E] to be explained, not sparse matrices or graphs.")
        edges: _Edges = {edge_type: plain(ends).long() for edge_type, ends in given.items()}
        near = self._near(model, x, edges, index)
        found: dict[EdgeType | None, list[Tensor]] = {edge_type: [] for edge_type in edges}
        for name, types, ends, weights in _recorded(model, x, edge_index, kwargs, edges):
            fits = {t: w for t in types if t in edges and (w := _along(edges[t], ends, weights)) is not None}
            if not fits or (len(fits) > 1 and ends.numel()):
                which = f"edges that {list(fits)} share" if fits else "edges other than those to explain"
                remedy = "name it after its type in a ModuleDict" if fits else "exclude it by explain = False"
                raise ValueError(f"the layer {name!r} attends along {which}: {remedy}.")
            edge_type, weights = next(iter(fits.items()))
            found[edge_type].append(_REDUCTIONS[self.reduce](weights, -1))
        if not any(found.values()):
            raise ValueError("no layer of gattn attended along these edges, so there are no weights to explain with.")
        masks = {}
        for edge_type, ends in edges.items():
            layers = found[edge_type] or [torch.zeros(ends.size(1), device=ends.device)]
            mask = _REDUCTIONS[self.reduce](torch.stack(layers, -1), -1)
            masks[edge_type] = self._post_process_mask(mask, near.get(edge_type), apply_sigmoid=False)
        if None in masks:
            return Explanation(edge_mask=masks[None])
        return HeteroExplanation().set_value_dict("edge_mask", masks)

    def _near(self, model: Module, x: Any, edges: _Edges, index: Any) -> _Edges:
        """Which edges are near enough to the explained nodes, `[E]`; nothing if all edges count."""
        if index is None or not edges or self.model_config.task_level != ModelTaskLevel.node:
            return {}
        sizes = {name: rows.size(0) for name, rows in (x if isinstance(x, Mapping) else {None: x}).items()}
        node_type = next(iter(sizes)) if len(sizes) == 1 else self.node_type
        if node_type not in sizes:
            raise ValueError(f"index needs the node_type of the output's rows, of {list(sizes)}; got {node_type!r}.")
        first = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
        order = 1 if self._flow(model) == FLOWS[0] else -1
        starts = [[first[t[0]], first[t[-1]]][::order] if t else [0, 0] for t in edges]  # in one graph of all nodes
        joined = [ends + ends.new_tensor(start).view(2, 1) for ends, start in zip(edges.values(), starts, strict=True)]
        rows = torch.arange(sizes[node_type], device=joined[0].device)[index].view(-1) + first[node_type]
        _, near = self._get_hard_masks(model, rows, torch.cat(joined, 1), sum(sizes.values()))
        return dict(zip(edges, near.split([ends.size(1) for ends in joined]), strict=True))


def _recorded(
    model: Module, x: Any, edge_index: Any, kwargs: dict[str, Any], edges: _Edges
) -> Iterator[tuple[str, list[Any], Tensor, Tensor]]:
    """Runs a model: for each call, the layer's name, possible edge types, edges `[2, E]` and weights `[E, H]`."""
    calls: defaultdict[Module, list[list[Any]]] = defaultdict(list)

    def note(layer: Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        types = list(options["edge_index_dict"] if "edge_index_dict" in options else args[1])
        calls[layer] += [types] if isinstance(layer, HGTConv) else [[edge_type] for edge_type in types]

    with ExitStack() as hooks, torch.no_grad(), record_own_layers(model) as records:
        for typed in (module for module in model.modules() if isinstance(module, (HANConv, HGTConv))):
            hooks.enter_context(typed.register_forward_pre_hook(note, with_kwargs=True))
        model(x, edge_index, **kwargs)
    for name, of_layer in records.items():
        layer, path = model.get_submodule(name), set(name.split("."))
        named = [t for t in edges if t and path & {"__".join(t), key2str(t), ModuleDict.to_internal_key(t)}]
        for record, types in zip(of_layer, calls.get(layer) or [named or list(edges)] * len(of_layer), strict=True):
            if record.graph.is_dense or getattr(layer, "explain", None) is False:
                continue
            if record.weights.dim() != 2:
                raise ValueError(f"a batch of features over one graph cannot be explained; the layer {name!r} got one.")
            ends, weights = record.graph.edge_index, record.weights
            if not isinstance(layer, HGTConv):
                yield name, types, ends, weights
                continue
            ends, last = ends if layer.flow == FLOWS[0] else ends.flip(0), 0
            for edge_type in types:  # their edges are joined in this order, with shifted node numbers
                own = edges.get(edge_type, ends[:, :0])
                part = slice(last, last := last + own.size(1))
                yield name, [edge_type], ends[:, part] - ends[:, part][:, :1] + own[:, :1], weights[part]


def _along(edge_index: Tensor, ends: Tensor, weights: Tensor) -> Tensor | None:
    """The weights of the edges in `edge_index`; `None` if a layer has other edges, apart from self-loops."""
    if torch.equal(edge_index, ends):
        return weights
    is_loop, was_loop = edge_index[0] == edge_index[1], ends[0] == ends[1]
    if not torch.equal(edge_index[:, ~is_loop], ends[:, ~was_loop]):
        return None
    of_loop = weights.new_zeros(int(torch.cat([edge_index, ends], 1).max()) + 1, weights.size(1))
    of_loop[ends[0, was_loop]] = weights[was_loop]
    return of_loop[edge_index[0]].index_put((~is_loop,), weights[~was_loop])
