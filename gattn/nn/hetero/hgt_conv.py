"""The Heterogeneous Graph Transformer's layer."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import LayerNorm, ModuleDict, Parameter
from torch_geometric.nn.dense import HeteroDictLinear, HeteroLinear
from torch_geometric.nn.inits import ones
from torch_geometric.nn.parameter_dict import ParameterDict

from gattn.errors import InputError, InputTypeError, check_flag
from gattn.graphs import Graph, GraphLike, SparseGraph
from gattn.graphs.edge_lists import derived, derived_tensors
from gattn.nn.hetero.hetero_conv import EdgeType, HeteroBaseConv, Metadata
from gattn.nn.shared.linear import Linear, is_untouched
from gattn.scores import DotScore
from gattn.torch_private import is_traced

__all__ = ["HGTConv"]


class HGTConv(HeteroBaseConv):
    r"""The layer of `Heterogeneous Graph Transformer <https://arxiv.org/abs/2003.01332>`_.

    A node attends to all its neighbours at once, whatever the types of the edges to them. An edge of type
    :math:`e = (s, r, t)` uses the matrices and the prior of its type, and its two ends use matrices of their types:

    .. math::
        m_i = \sum_e \sum_{j \in \mathcal{N}_e(i)} \alpha^e_{ij} M_e W^V_s x_j, \qquad
        \alpha_{i\cdot} = \mathrm{softmax}_{e,j} \, \frac{p_e}{\sqrt{C}} (W^Q_t x_i)^{\top} A_e W^K_s x_j

        x'_i = \sigma(\beta_t) \, W^O_t \, \mathrm{gelu}(m_i) + (1 - \sigma(\beta_t)) \, x_i

    The skip connection is left out for node types whose features do not have `out_channels` channels.

    With `use_rte`, keys and values also depend on how much time lies between the two ends of an edge, by the paper's
    *relative temporal encoding*, which PyG's layer lacks: in place of :math:`x_j` there is

    .. math::
        x_j + T\, \mathrm{PE}(\Delta_{ij}) + b, \qquad \mathrm{PE}_{2c} = \frac{1}{\sqrt F}
        \sin\frac{\Delta}{10000^{2c / F}}, \qquad \mathrm{PE}_{2c+1} = \frac{1}{\sqrt F}
        \cos\frac{\Delta}{10000^{2c / F}}

    with the numbers of the authors' program; in the paper, cosines have other frequencies and there is no
    :math:`\sqrt F`.

    Attention is a single call on one bipartite graph, which `gattn.record_attention` shows. Its sources are those of
    each edge type in turn, its targets are the nodes of each type that is the target of an edge type, and its edges are
    in the order of `edge_index_dict`. For the same `edge_index` tensors, it is built only once.

    A drop-in replacement for `torch_geometric.nn.HGTConv`, with the same arguments, parameter names and results. It
    also supports features `[B, N, F]` over one graph, `SparseGraph` and `CompleteGraph`, an empty `edge_index_dict`,
    and float32 accumulation in half precision. Differences: it takes `flow="target_to_source"`, with targets in the
    first row of each `edge_index` (an edge type still begins with the type of its sources).

    Args:
        in_channels: Channels of each node type's features, or one number for all types; `-1` infers them from the first
            call.
        out_channels: Channels of the output.
        metadata: The node types and the edge types, as returned by `HeteroData.metadata()`.
        heads: Number of heads, a divisor of `out_channels`. (default: `1`)
        use_rte: Whether edges have times; all node types then need the same number of channels. (default: `False`)
        use_norm: Whether the output of each node type goes through a `LayerNorm` of its own, as in the authors'
            program, for which it is the default. (default: `False`)
        **kwargs: Arguments of `torch_geometric.nn.conv.MessagePassing`, such as `flow`.

    Shapes:
        - **input:** features `[N, F_in]` of each node type, edge indices `[2, E]` of each edge type.
        - **output:** `[N, F_out]` for each node type that is the target of an edge type.

    Raises:
        TypeError: If `metadata` is not a pair.
        ValueError: If `heads` does not divide `out_channels`, or the channels do not fit `use_rte`.

    Example:
        >>> import torch, gattn
        >>> writes, cites = ("author", "writes", "paper"), ("paper", "cites", "paper")
        >>> conv = gattn.nn.HGTConv(16, 8, metadata=(["author", "paper"], [writes, cites]), heads=2)
        >>> x = {"author": torch.randn(2, 16), "paper": torch.randn(3, 16)}
        >>> out = conv(x, {writes: torch.tensor([[0, 1], [0, 2]]), cites: torch.tensor([[0, 1], [1, 2]])})
        >>> out["paper"].shape
        torch.Size([3, 8])
    """

    _starts = (("skip", ones), ("p_rel", ones))

    def __init__(
        self,
        in_channels: int | dict[str, int],
        out_channels: int,
        metadata: Metadata,
        heads: int = 1,
        *,
        use_rte: bool = False,
        use_norm: bool = False,
        **kwargs: Any,
    ):
        super().__init__(in_channels, out_channels, metadata, heads, **kwargs)
        check_flag("use_rte", use_rte)
        check_flag("use_norm", use_norm)
        self.node_types, self.edge_types = metadata
        self.edge_types_map = {edge_type: number for number, edge_type in enumerate(self.edge_types)}
        self.dst_node_types = {edge_type[-1] for edge_type in self.edge_types}

        channels, num_matrices = out_channels // heads, heads * len(self.edge_types)
        self.kqv_lin = HeteroDictLinear(self.in_channels, 3 * out_channels)
        self.out_lin = HeteroDictLinear(out_channels, out_channels, types=self.node_types)
        for lin in (*self.kqv_lin.lins.values(), *self.out_lin.lins.values()):
            lin.__class__ = Linear  # whose state also loads when it is pruned
        self.k_rel = HeteroLinear(channels, channels, num_matrices, bias=False, is_sorted=True)
        self.v_rel = HeteroLinear(channels, channels, num_matrices, bias=False, is_sorted=True)
        self.skip = ParameterDict({node_type: Parameter(torch.empty(1)) for node_type in self.node_types})
        self.p_rel = ParameterDict()
        for edge_type in self.edge_types:  # one by one, as a dictionary would be sorted
            self.p_rel["__".join(edge_type)] = Parameter(torch.empty(1, heads))
        norms = {node_type: LayerNorm(out_channels) for node_type in self.node_types}
        self.norms = ModuleDict(norms) if use_norm else None
        self.lin_time = None
        if use_rte:
            widths = set(self.in_channels.values())
            if len(widths) != 1 or min(widths) < 1:
                raise InputError(f"use_rte needs the same number of channels for all node types; got {in_channels}.")
            self.lin_time = Linear(*widths, *widths)
        self.reset_parameters()

    def forward(
        self,
        x_dict: Mapping[str, Tensor],
        edge_index_dict: Mapping[EdgeType, GraphLike],
        edge_time_dict: Mapping[EdgeType, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Attends over each node's neighbours of all types.

        Args:
            x_dict: Features `[..., N, F]` of each node type. Types may be missing; those that the layer does not know
                are ignored, as in PyG.
            edge_index_dict: The graph of each edge type, in any form that `gattn.attend` takes. Types may be missing.
            edge_time_dict: With `use_rte`, the time from source to target of the edges of each type, `[E]`, in any
                unit. (default: `None`)

        Returns:
            `[..., N, F_out]` for each node type that is the target of an edge type; for a node without neighbours,
            :math:`m_i = 0`.

        Raises:
            TypeError: If the arguments are not dictionaries of tensors and graphs.
            ValueError: If features, graphs and metadata do not fit; the message says which.
            IndexError: If an index of a graph is out of range (in compiled code RuntimeError, when it runs).
        """
        x = self._features(x_dict, self.kqv_lin.lins)
        relations = self._relations(x, edge_index_dict, self.edge_types)
        if not x:
            raise InputError(f"this layer was made for nodes of the types {self.node_types}; x_dict has none of them.")
        # Types that are no edge type's target need no query, but their parameters get gradients of zero, as in PyG.
        targets = {name: rows.size(-2) if name in self.dst_node_types else 0 for name, rows in x.items()}
        channels = self.out_channels // self.heads
        projected = {
            node_type: torch.unflatten(kqv, -1, (3, self.heads, channels)).unbind(-3)
            for node_type, kqv in self.kqv_lin(x).items()
        }
        query = torch.cat([projected[node_type][1][..., :size, :, :] for node_type, size in targets.items()], -3)
        first_target, num_targets = {}, 0
        for node_type, size in targets.items():
            first_target[node_type] = num_targets
            num_targets += size

        keys: dict[int, Tensor] = {}
        values: dict[int, Tensor] = {}
        priors: dict[int, Tensor] = {}
        key_times: dict[int, Tensor] = {}
        value_times: dict[int, Tensor] = {}
        times = self._times(edge_time_dict, relations)
        parts, num_sources = [], 0
        for edge_type, (source, target, graph) in relations.items():
            graph = graph.listed(query.device)
            size = x[source].size(-2) if graph.num_edges else 0  # without edges, no row of keys is needed
            number = self.edge_types_map[edge_type]
            keys[number], _, values[number] = (rows[..., :size, :, :] for rows in projected[source])
            priors[number] = self.p_rel["__".join(edge_type)].view(self.heads, 1, 1) / math.sqrt(channels)
            if times is not None:
                graph, time = graph.with_features(times[edge_type].unsqueeze(-1), 0.0)
                assert time is not None
                key_times[number], value_times[number] = self._of_time(time.squeeze(-1), self.kqv_lin.lins[source])
            parts.append(_Part(graph, num_sources, first_target[target]))
            num_sources += size
        nothing = query[..., :0, :, :]  # in case there are no edges at all
        key = torch.cat([nothing, *self._transformed(self.k_rel, keys, priors)], -3)
        value = torch.cat([nothing, *self._transformed(self.v_rel, values)], -3)
        joined = _joined(parts, num_sources, num_targets, query.device)
        terms: dict[str, Any] = {}
        if key_times:
            terms["edge"] = torch.cat(self._transformed(self.k_rel, key_times, priors))
            terms["edge_value"] = torch.cat(self._transformed(self.v_rel, value_times))
        sent = self.attend(query, key, value, joined, score=DotScore(1.0), **terms)
        assert isinstance(sent, Tensor)
        of_type = sent.flatten(-2).split_with_sizes(list(targets.values()), -2)
        received = zip(targets, of_type, strict=True)
        return self._outputs({name: rows for name, rows in received if name in self.dst_node_types}, x)

    def _times(
        self, edge_time_dict: Any, relations: Mapping[EdgeType, tuple[str, str, Graph]]
    ) -> Mapping[EdgeType, Tensor] | None:
        """The times of edges, checked."""
        if self.lin_time is None:
            if edge_time_dict is not None:
                raise InputError("got edge_time_dict, but this layer was made without use_rte=True.")
            return None
        if not isinstance(edge_time_dict, Mapping):
            raise InputTypeError(
                "a layer with use_rte needs edge_time_dict, a dictionary of times by edge type; got "
                f"{type(edge_time_dict).__name__}."
            )
        for edge_type in relations:
            time = edge_time_dict.get(edge_type)
            if not isinstance(time, Tensor):
                raise InputTypeError(f"edge_time_dict[{edge_type}] must be a tensor; got {type(time).__name__}.")
            num_edges = relations[edge_type][2].num_edges
            if time.shape != (num_edges,):
                raise InputError(
                    f"edge_time_dict[{edge_type}] must have one time per edge, [{num_edges}]; got {list(time.shape)}."
                )
        return edge_time_dict

    def _of_time(self, time: Tensor, lin: Linear) -> tuple[Tensor, Tensor]:
        """What the time `[E]` of an edge adds to keys and values of its source's type, `[E, H, C]`."""
        assert self.lin_time is not None
        weight, channels = lin.weight, self.lin_time.in_channels
        # Of large times in single precision, the product's fraction would be lost.
        places = torch.arange(0, channels, 2, device=time.device, dtype=torch.double)
        angle = time.double().unsqueeze(-1) * 10000.0 ** (-places / channels)
        encoding = torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[:, :channels] / math.sqrt(channels)
        encoded = self.lin_time(encoding.to(weight.dtype))
        of_key, _, of_value = weight.chunk(3)
        return self._heads(F.linear(encoded, of_key)), self._heads(F.linear(encoded, of_value))

    def _transformed(
        self, rel: HeteroLinear, rows: dict[int, Tensor], factors: dict[int, Tensor] | None = None
    ) -> list[Tensor]:
        """The rows `[..., M, H, C]` of each edge type times its matrices, and factors `[H, 1, 1]`, by its number."""
        if not rows:
            return []
        num_types = len(self.edge_types)
        if is_untouched(rel):  # factors scale the matrices, so that nothing has to be done per node
            weight = torch.unflatten(rel.weight, 0, (self.heads, num_types))
            return [
                _per_head(x, weight[:, number] if factors is None else weight[:, number] * factors[number])
                for number, x in rows.items()
            ]
        order = sorted(rows)  # which the module expects
        nodes = {number: rows[number].movedim((-2, -3), (0, 1)) for number in order}  # [H, M, ..., C]
        flat = [x.flatten(1, -2) for x in nodes.values()]
        first = torch.arange(self.heads, device=flat[0].device).unsqueeze(1) * num_types
        types = [(first + number).expand(-1, x.size(1)) for number, x in zip(order, flat, strict=True)]
        found = rel(torch.cat(flat, 1).flatten(0, 1), torch.cat(types, 1).flatten())
        parts = torch.split(torch.unflatten(found, 0, (self.heads, -1)), [x.size(1) for x in flat], 1)
        outs = {
            number: part.reshape(x.shape).movedim((0, 1), (-2, -3))
            for (number, x), part in zip(nodes.items(), parts, strict=True)
        }
        return [outs[n] if factors is None else outs[n] * factors[n].view(-1, 1) for n in rows]

    def _outputs(self, received: dict[str, Tensor], x: dict[str, Tensor]) -> dict[str, Tensor]:
        """The outputs `[..., N, F_out]` from what each node received."""
        outs = self.out_lin({node_type: F.gelu(rows) for node_type, rows in received.items()})
        for node_type in received:
            if x[node_type].size(-1) == self.out_channels:
                gate = self.skip[node_type].sigmoid()
                outs[node_type] = gate * outs[node_type] + (1 - gate) * x[node_type]
            if self.norms is not None:
                outs[node_type] = self.norms[node_type](outs[node_type])
        return {node_type: outs[node_type] for node_type in received}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(-1, {self.out_channels}, heads={self.heads})"


class _Part(NamedTuple):
    """One of the graphs to join."""

    graph: Graph
    first_source: int
    """The number of its first source in the joined graph."""
    first_target: int


def _per_head(x: Tensor, weight: Tensor) -> Tensor:
    """`[..., N, H, C]` times `[H, C, C]`."""
    return (x.transpose(-3, -2) @ weight).transpose(-3, -2)


def _joined(parts: list[_Part], num_sources: int, num_targets: int, device: torch.device) -> SparseGraph:
    """One graph of all edges; the same tensors give the same edges, so what kernels derive from them is kept."""
    # Done before join(), which runs under a lock.
    listed = [(*part.graph.sources_and_targets(), part.first_source, part.first_target) for part in parts]

    def join() -> tuple[Tensor]:
        ends = [torch.zeros(2, 0, dtype=torch.int64, device=device)]
        for source, target, first_source, first_target in listed:
            ends.append(torch.stack([source + first_source, target + first_target]))
        return (torch.cat(ends, 1),)

    holder: Tensor | None = None
    contents: list[Hashable] = [num_sources, num_targets]
    for graph, *starts in parts:
        # What is kept belongs to a tensor that the user holds.
        if is_traced() or not isinstance(graph.adjacency, Tensor):
            return SparseGraph(join()[0], num_targets, num_sources)
        holder = graph.adjacency if holder is None else holder
        # An edit changes a tensor's token, and unlike an address, a token is never reused.
        token = derived(graph.adjacency, "token", object)
        contents.append((token, graph.num_sources, graph.num_targets, graph.self_loops, graph.flow, *starts))
    (joined,) = join() if holder is None else derived_tensors(holder, "joined", join, tuple(contents))
    return SparseGraph(joined, num_targets, num_sources)
