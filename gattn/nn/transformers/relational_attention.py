"""Attention among all nodes, in which listed pairs have relations and times.

Dimensions: N nodes, E listed pairs, C channels, R relations, H heads, T channels of times.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from gattn.attention import Attention, merge
from gattn.bias import SparseBias
from gattn.errors import InputError, InputTypeError, check_at_least
from gattn.graphs import CompleteGraph, GraphLike, SparseGraph, as_graph
from gattn.graphs.builders import checked_batch
from gattn.graphs.proximity import checked_times
from gattn.graphs.typed import TypedGraph
from gattn.nn.shared.declared import Declared
from gattn.nn.shared.dtypes import check_dtype
from gattn.nn.shared.linear import Linear, through
from gattn.nn.transformers.all_pairs import check_heads, check_whole
from gattn.recording import is_watched, record

__all__ = ["RelationalAttention"]


class RelationalAttention(Declared, Attention):
    r"""Every node attends to all nodes of its graph; a listed pair also has a logit and a value by its relation.

    The attention of graph Transformers on relational data, such as `Relational Graph Transformer
    <https://arxiv.org/abs/2505.10960>`_: with relation :math:`r_e` of each listed pair :math:`e = (j \to i)`,

    .. math::
        s_{ij} = \frac{q_i^\top k_j}{\sqrt{C / H}} + \sum_{e = (j \to i)} b_{r_e}, \qquad
        x'_i = W_O\, \Big\Vert_h\, \sum_j \alpha_{ij} \Big(v_j + \sum_{e = (j \to i)} u_{r_e}\Big)

    With `time_channels`, a pair's logit and value also depend on how long ago its event was, by `Time2Vec
    <https://arxiv.org/abs/1907.05321>`_: :math:`b_{r_e} + w^\top \Phi(t_e)` and :math:`u_{r_e} + W \Phi(t_e)` with
    :math:`\Phi_0(t) = \omega_0 t + \varphi_0` and :math:`\Phi_k(t) = \sin(\omega_k t + \varphi_k)`.

    With the nodes' own times :math:`\tau` (`earlier_than`), events see what was known before them. A node attends to
    earlier nodes of its graph and to itself, :math:`\alpha_{ij} = 0` unless :math:`\tau_j < \tau_i` or :math:`j = i`,
    and listed pairs count only where they are among these. As in `gattn.graphs.earlier_than`, nodes at the same time
    are not earlier. Rows of a table without times may have the time :math:`-\infty`, which is earlier than all others.

    No tensor of all pairs is made: biases are a `gattn.SparseBias`, and the weights of listed pairs follow from the
    log-sum-exp of each row. `gattn.TypedGraph.from_hetero` numbers the nodes of a `HeteroData` and types its edges.

    Args:
        channels: The number of channels, C.
        heads: The number of heads, a divisor of C.
        num_relations: The number of relations, R.
        time_channels: The number of channels of times, T. (default: `None`, pairs have no times)

    Shapes:
        - **input:** features `[N, C]`, pairs `[2, E]`, their relations `[E]` and times `[E]`.
        - **output:** `[N, C]`.

    Raises:
        ValueError: If a number is not positive, or `channels` is not a multiple of `heads`.

    Example:
        >>> import torch, gattn
        >>> layer = gattn.nn.RelationalAttention(16, heads=4, num_relations=3)
        >>> edge_index, relation = torch.tensor([[0, 1, 1], [1, 0, 2]]), torch.tensor([0, 1, 2])
        >>> layer(torch.randn(5, 16), edge_index, relation, batch=torch.tensor([0, 0, 0, 1, 1])).shape
        torch.Size([5, 16])
    """

    _shown = "channels heads= num_relations="

    def __init__(self, channels: int, heads: int, num_relations: int, time_channels: int | None = None):
        super().__init__()
        check_heads(channels, heads, None)
        check_at_least(1, num_relations=num_relations)
        if time_channels is not None:
            check_at_least(1, time_channels=time_channels)
        self.channels, self.heads, self.num_relations, self.time_channels = (
            channels,
            heads,
            num_relations,
            time_channels,
        )
        self.lin_query, self.lin_key, self.lin_value, self.lin_out = (Linear(channels, channels) for _ in range(4))
        self.relation_logit = Parameter(torch.empty(num_relations, heads))
        self.relation_value = Parameter(torch.empty(num_relations, channels))
        if time_channels is not None:
            self.frequency, self.phase = (Parameter(torch.empty(time_channels)) for _ in range(2))
            self.time_logit = Linear(time_channels, heads, bias=False)
            self.time_value = Linear(time_channels, channels, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Resets all parameters; relations start without a logit."""
        super().reset_parameters()
        with torch.no_grad():
            self.relation_logit.zero_()
            self.relation_value.normal_(std=0.02)
            if self.time_channels is not None:
                self.frequency.copy_(10.0 ** -torch.linspace(0, 6, self.time_channels))
                self.phase.zero_()

    def forward(
        self,
        x: Tensor,
        edge_index: GraphLike,
        edge_type: Tensor | None = None,
        batch: Tensor | None = None,
        time: Tensor | None = None,
        *,
        earlier_than: Tensor | None = None,
    ) -> Tensor:
        """Attends among all nodes of each graph, or to earlier ones.

        Args:
            x: The features, `[N, C]`.
            edge_index: The listed pairs, sources above targets, in any form that `gattn.attend` takes.
            edge_type: The relation of each, `[E]`. (default: `None`, those of a `gattn.TypedGraph`)
            batch: The graph of each node, `[N]`, in ascending order; pairs may not join two graphs. (default: `None`, a
                single graph)
            time: How long ago each pair's event was, `[E]`, in any unit. (default: `None`)
            earlier_than: The time of each node, `[N]`, integers or floating-point numbers: nodes attend to those before
                it, and to themselves. (default: `None`, to all)

        Returns:
            The output, `[N, C]`.

        Raises:
            TypeError: If an argument is not a tensor of a kind that fits.
            ValueError: If shapes do not fit, a pair joins two graphs, or times are missing, unknown or NaN.
            IndexError: If there is no such node or relation.
        """
        check_whole(self, edge_index)
        if not isinstance(x, Tensor):
            raise InputTypeError(f"x must be a tensor; got {type(x).__name__}.")
        if x.dim() != 2 or x.size(1) != self.channels:
            raise InputError(f"x must be [N, {self.channels}]; got {list(x.shape)}.")
        check_dtype(self, x=x)
        if edge_type is None and isinstance(edge_index, TypedGraph):
            edge_type = edge_index.edge_type
        if (time is None) != (self.time_channels is None):
            raise InputError("times are for a layer with time_channels, which needs them.")
        pairs = self._graph(edge_index, x)
        source, target = (end.long() for end in pairs.sources_and_targets())
        logit, value = self._of_pairs(edge_type, time, target.numel())
        batch = None if batch is None else checked_batch(batch, x.size(0))
        rows = through(self.lin_query, x), through(self.lin_key, x), through(self.lin_value, x)
        query, keys, values = (torch.unflatten(part, -1, (self.heads, -1)) for part in rows)
        if earlier_than is None:
            graph = CompleteGraph(x.size(0)) if batch is None else CompleteGraph.packed(batch=batch)
            out, log_sum = self.attend(query, keys, values, graph, bias=SparseBias(pairs, logit), return_lse=True)
        else:
            moments = _moments(earlier_than, x)
            is_itself = (source == target).unsqueeze(1)
            is_seen = (moments[source] < moments[target]).unsqueeze(1) | is_itself
            to_itself = logit.new_zeros(x.size(0), self.heads).index_add(0, target, logit.where(is_itself, 0.0))
            order = _order(moments, batch)
            places = torch.stack([order.column[source], order.row[target]])
            out, log_sum = self._earlier(query, keys, values, SparseBias(places, logit), order, to_itself)
            logit = logit.where(is_seen, -torch.inf)
        wide = log_sum.dtype  # half precision would round logits before their exponentials
        bias = SparseBias(pairs, logit.to(wide))
        logits = self.weigh(query.to(wide), keys.to(wide), pairs, bias=bias, distribution=None)
        weights = (logits - log_sum.index_select(0, target)).exp().to(values.dtype)  # of listed pairs among all
        if earlier_than is not None and is_watched(self):
            self._record(query.to(wide), keys.to(wide), bias, log_sum, moments, batch)
        out = out + self.weighted_sum(weights, torch.zeros_like(values), pairs, edge_value=value)
        return self.lin_out(out.flatten(1))  # type: ignore[no-any-return]

    def _earlier(
        self, query: Tensor, key: Tensor, value: Tensor, bias: SparseBias, order: _Order, to_itself: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attention of each node to earlier ones and to itself, and the log-sum-exp."""
        size = order.is_node.size(0)
        places = (order.row, query), (order.column, key), (order.column, value)
        parts = [part.new_zeros(size, *part.shape[1:]).index_copy(0, place, part) for place, part in places]
        # Without a layer, as weights are recorded by nodes instead of places.
        found: Any = self._result(parts[0], parts[1], parts[2], order.graph, bias=bias, mask=order.mask(), log_sum=True)
        out, log_sum = found.out.index_select(0, order.row), found.log_sum.index_select(0, order.row)
        wide = log_sum.dtype
        own = (query.to(wide) * key.to(wide)).sum(-1) * query.size(-1) ** -0.5 + to_itself.to(wide)
        return merge([out, value.to(out.dtype)], [log_sum, own])

    def _record(
        self, query: Tensor, key: Tensor, bias: SparseBias, log_sum: Tensor, moments: Tensor, batch: Tensor | None
    ) -> None:
        """Records the weights of all pairs of a node and an earlier one, or itself."""
        is_seen = (moments < moments.unsqueeze(1)).fill_diagonal_(True)
        if batch is not None:
            is_seen &= batch == batch.unsqueeze(1)
        target, source = is_seen.nonzero().unbind(1)
        graph = SparseGraph(torch.stack([source, target]), *is_seen.shape)
        logits = self.weigh(query, key, graph, bias=bias, distribution=None)
        record(self, graph, (logits - log_sum.index_select(0, target)).exp())

    def _graph(self, edge_index: GraphLike, x: Tensor) -> Any:
        return as_graph(edge_index).resolve(x.size(0), x.size(0)).listed(x.device)

    def _of_pairs(self, edge_type: Tensor | None, time: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
        """The logit of each pair, `[E, H]`, and its value, `[E, H, C / H]`."""
        for name, tensor in (("edge_type", edge_type), *([("time", time)] if time is not None else [])):
            if not isinstance(tensor, Tensor):
                raise InputTypeError(f"{name} must be a tensor; got {type(tensor).__name__}.")
            if tensor.shape != (count,):
                raise InputError(f"{name} must have one entry per pair, [{count}]; got {list(tensor.shape)}.")
        assert edge_type is not None
        if edge_type.is_floating_point() or edge_type.is_complex() or edge_type.dtype == torch.bool:
            raise InputTypeError(f"edge_type must hold integers; got {edge_type.dtype}.")
        if not torch.compiler.is_compiling() and count and not edge_type.is_meta:
            low, high = int(edge_type.min()), int(edge_type.max())
            if low < 0 or high >= self.num_relations:
                raise IndexError(f"there are {self.num_relations} relations, from 0; got {low} to {high}.")
        if time is not None and time.is_complex():
            raise InputTypeError(f"time must hold numbers; got {time.dtype}.")
        index = edge_type.long()
        logit, value = self.relation_logit[index], self.relation_value[index]
        if time is not None:
            angle = time.double().unsqueeze(-1) * self.frequency.double() + self.phase.double()
            encoding = torch.cat([angle[:, :1], angle[:, 1:].sin()], -1).to(logit.dtype)
            logit, value = logit + self.time_logit(encoding), value + self.time_value(encoding)
        return logit, torch.unflatten(value, -1, (self.heads, -1))


class _Order(NamedTuple):
    """Places of nodes in a causal graph, in which what comes before a node is what is earlier than it."""

    row: Tensor
    """Each node's place among the targets, `[N]`."""
    column: Tensor
    """Likewise among the sources."""
    is_node: Tensor
    """Which sources are nodes."""
    graph: CompleteGraph

    def mask(self) -> Tensor:
        """Which sources are nodes, as the graph takes it."""
        if not isinstance(self.graph.blocks, tuple):
            return self.is_node.unsqueeze(0)
        parts = torch.split(self.is_node, [count for count, _ in self.graph.blocks])
        most = max((part.size(0) for part in parts), default=0)
        rows = [F.pad(part, (0, most - part.size(0))) for part in parts]
        return torch.stack(rows)[:, None, None] if rows else self.is_node.view(0, 1, 1, 0)


def _moments(times: Any, x: Tensor) -> Tensor:
    """The rank of each node's time, `[N]`, the same for equal times."""
    times = checked_times("earlier_than", times)
    if times.size(0) != x.size(0):
        raise InputError(f"earlier_than must have one time per node, [{x.size(0)}]; got {list(times.shape)}.")
    order = times.detach().argsort(stable=True)
    return torch.empty_like(order).index_copy(0, order, _changes(times.detach()[order]).cumsum(0))


def _changes(ascending: Tensor) -> Tensor:
    """Where a number is another one than that before it, `[N]`; programs with open sizes have none of N - 1."""
    number = torch.arange(ascending.size(0), device=ascending.device)
    return (ascending != ascending.roll(1)) & (number > 0)


def _order(moments: Tensor, batch: Tensor | None) -> _Order:
    """Lays nodes out graph by graph and by time, so that earlier ones are those before.

    Of k nodes at one time, the first k - 1 sources are none, so that each of the k targets sees the same ones; another
    one at the start of each graph hides a node from itself.
    """
    count = moments.size(0)
    block = torch.zeros_like(moments) if batch is None else batch
    key = block * max(count, 1) + moments
    order = key.argsort(stable=True)
    key = key[order]
    number = torch.arange(count, device=key.device)
    first = torch.searchsorted(key, key)  # of those at the same time
    same = torch.searchsorted(key, key, right=True) - first
    more = torch.where(first == number, same - 1, 0)
    is_next = _changes(block).long()
    row = number + ((more + is_next).cumsum(0) - more)[first]
    size = 2 * count if torch.compiler.is_compiling() else count + int(more.sum()) + int(is_next.sum()) + min(count, 1)
    block = block[torch.searchsorted(row, torch.arange(size, device=key.device), right=True) - 1]
    graph = CompleteGraph(size, causal=True) if batch is None else CompleteGraph.packed(batch=block, causal=True)
    row, column = (torch.empty_like(row).index_copy(0, order, place) for place in (row, row + same))
    is_node = torch.zeros(size, dtype=torch.bool, device=key.device)
    return _Order(row, column, is_node.index_fill(0, column, True), graph)
