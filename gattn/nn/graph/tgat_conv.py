"""Attention to a node's earlier neighbours, which knows how long ago each of them was."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import LayerNorm, Parameter

from gattn.errors import InputError, InputTypeError, check_at_least, check_flag
from gattn.graphs import GraphLike
from gattn.nn.shared.attention_conv import BaseConv
from gattn.nn.shared.edge_features import checked_features
from gattn.nn.shared.linear import Linear
from gattn.ops.dropout import check_probability

__all__ = ["TGATConv"]


class TGATConv(BaseConv):
    r"""Attention to earlier interactions, with an encoding of the time that has passed since.

    The layer of `Inductive Representation Learning on Temporal Graphs <https://arxiv.org/abs/2002.07962>`_, by the
    paper's equations, with :math:`\Phi(\Delta) = \cos(\omega \Delta + \varphi)`:

    .. math::
        q_i = W_Q [x_i \,\Vert\, \Phi(0)], \qquad
        k_{ij} = W_K [x_j \,\Vert\, e_{ij} \,\Vert\, \Phi(\Delta_{ij})], \qquad
        v_{ij} = W_V [x_j \,\Vert\, e_{ij} \,\Vert\, \Phi(\Delta_{ij})]

    .. math::
        x'_i = W_2\, \mathrm{ReLU}\Big(W_1 \Big[\big\Vert_h \sum_j
        \mathrm{softmax}_j\Big(\frac{q_i^\top k_{ij}}{\sqrt C}\Big) v_{ij} \,\Big\Vert\, x_i\Big] + b_1\Big) + b_2

    The graph is that of a node's earlier neighbours, such as `gattn.graphs.earlier_than` gives. A node without any has
    zeros in place of the sum.

    Published programs put more between the sum :math:`s_i` of all heads and the network. With `bias`, projections have
    one, and with `out_proj`, `residual` and `norm`, all of them or some, :math:`s_i` is replaced by

    .. math::
        \mathrm{LN}\big(W_O s_i + b_O + [x_i \,\Vert\, 0 \,\Vert\, \Phi(0)]\big)

    where the zeros stand for the features of an edge. A node without earlier neighbours still has zeros in place of
    :math:`W_O s_i + b_O`. TGAT's own program has `out_proj`, `residual` and `norm`, TGN's `bias` and `out_proj`, both
    with :math:`C = (F + T) / H` but D more channels in TGAT's.

    Differences from TGAT's program: that leaves out the newest neighbour, gives a node without neighbours the mean of
    padding, and also drops elements of the projected output.

    Args:
        in_channels: The number of channels of the nodes, F.
        out_channels: The number of channels of the output.
        time_channels: The number of frequencies, which start as :math:`\omega = 10^{0}, \dots, 10^{-9}`.
        heads: The number of heads, H. (default: `1`)
        edge_dim: The number of channels of the edges, D. (default: `None`, edges have no features)
        head_channels: The number of channels of each head, C. (default: `None`, `out_channels / heads`)
        dropout: The probability of dropping an attention weight during training. (default: `0.0`)
        bias: Whether projections have a bias. (default: `False`)
        out_proj: Whether the heads' sums are projected. (default: `False`)
        residual: Whether the query's input is added to that; needs `out_proj`. (default: `False`)
        norm: Whether the result is normalised. (default: `False`)
        **kwargs: Arguments of `torch_geometric.nn.conv.MessagePassing`, such as `flow`.

    Shapes:
        - **input:** features `[N, F]` or `([M, F], [N, F])`, edge indices `[2, E]`, times `[E]`, edge features
          `[E, D]`.
        - **output:** `[N, out_channels]`.

    Raises:
        ValueError: If an option is out of range, `out_channels` is not a multiple of `heads` though `head_channels` is
            not given, `residual` is without `out_proj`, or (in `forward`) features and graph do not fit.

    Example:
        >>> import torch, gattn
        >>> conv = gattn.nn.TGATConv(16, 8, time_channels=6, heads=2)
        >>> edge_index, passed = torch.tensor([[0, 1], [2, 2]]), torch.tensor([3.0, 60.0])  # seconds
        >>> conv(torch.randn(3, 16), edge_index, passed).shape
        torch.Size([3, 8])
    """

    _shown = "in_channels out_channels heads="

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        time_channels: int,
        heads: int = 1,
        edge_dim: int | None = None,
        head_channels: int | None = None,
        dropout: float = 0.0,
        bias: bool = False,
        out_proj: bool = False,
        residual: bool = False,
        norm: bool = False,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        for name, flag in {"bias": bias, "out_proj": out_proj, "residual": residual, "norm": norm}.items():
            check_flag(name, flag)
        if residual and not out_proj:
            raise InputError("residual needs out_proj=True, after which the output has the input's channels.")
        check_at_least(1, in_channels=in_channels, out_channels=out_channels, time_channels=time_channels, heads=heads)
        check_probability("dropout", dropout)
        if head_channels is None and out_channels % heads != 0:
            raise InputError(f"out_channels must be a multiple of heads; got {out_channels} and {heads} heads.")
        head_channels = out_channels // heads if head_channels is None else head_channels
        check_at_least(1, head_channels=head_channels)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.heads = heads
        self.edge_dim = edge_dim
        self.dropout = dropout
        width, of_edges = heads * head_channels, (edge_dim or 0) + time_channels
        self.frequency = Parameter(torch.empty(time_channels))
        self.phase = Parameter(torch.empty(time_channels))
        self.residual = residual
        self.lin_query = Linear(in_channels + time_channels, width, bias=bias)
        self.lin_key, self.lin_value = (Linear(in_channels, width, bias=bias) for _ in range(2))
        self.lin_edge_key, self.lin_edge_value = (Linear(of_edges, width, bias=False) for _ in range(2))
        if out_proj:
            before, width = width, in_channels + time_channels + (edge_dim or 0) * residual
        self.out_proj = Linear(before, width) if out_proj else None
        self.norm = LayerNorm(width) if norm else None
        self.lin_hidden = Linear(width + in_channels, out_channels)
        self.lin_out = Linear(out_channels, out_channels)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Resets all parameters."""
        super().reset_parameters()
        with torch.no_grad():
            self.frequency.copy_(10.0 ** -torch.linspace(0, 9, self.frequency.numel()))
            self.phase.zero_()

    def encode(self, time: Tensor) -> Tensor:
        """The encoding of times `[...]`, `[..., time_channels]`."""
        # Of large times in single precision, the product's fraction would be lost.
        angle = time.unsqueeze(-1).double() * self.frequency.double() + self.phase.double()
        return angle.cos().to(self.frequency.dtype)

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: GraphLike,
        time: Tensor,
        edge_attr: Tensor | None = None,
    ) -> Tensor:
        """Attends to earlier neighbours.

        Args:
            x: The features, `[N, F]`, or a pair (sources, targets).
            edge_index: From earlier neighbours to nodes, in any form that `gattn.attend` takes.
            time: How long ago each edge was, `[E]`, in any unit.
            edge_attr: The features of the edges, `[E, D]`. (default: `None`)

        Returns:
            The output, `[N, out_channels]`.

        Raises:
            TypeError: If an input is not a tensor.
            ValueError: If features and graph do not fit; the message says which.
            IndexError: If an index of the graph is out of range.
        """
        sources, targets = self._inputs(x)
        if targets is None:
            raise InputError("TGATConv needs the features of its targets: x[1] may not be None.")
        graph = self._graph(edge_index, sources, targets, self_loops=False).listed(sources.device)
        if not isinstance(time, Tensor):
            raise InputTypeError(f"time must be a tensor; got {type(time).__name__}.")
        if time.shape != (graph.num_edges,):
            raise InputError(f"time must have one entry per edge, [{graph.num_edges}]; got {list(time.shape)}.")
        edge = self.encode(time)
        if self.edge_dim is not None:
            graph, edge_attr = checked_features(self, graph, edge_attr, self.edge_dim, ())
            edge = torch.cat([edge_attr, edge], -1)
        elif edge_attr is not None:
            raise InputError("got edge_attr, but this layer was made without edge features: pass edge_dim.")
        now = self.encode(time.new_zeros(())).expand(*targets.shape[:-1], -1)
        query = self._heads(self.lin_query(torch.cat([targets, now], -1)))
        key, value = (self._heads(lin(sources)) for lin in (self.lin_key, self.lin_value))
        terms: Any = {
            "edge": self._heads(self.lin_edge_key(edge)),
            "edge_value": self._heads(self.lin_edge_value(edge)),
        }
        out = self.attend(query, key, value, graph, dropout=self.dropout, **terms).flatten(-2)
        if self.out_proj is not None:
            _, target = graph.sources_and_targets()
            has_any = torch.zeros(out.size(-2), dtype=torch.bool, device=out.device).index_fill(0, target, True)
            out = self.out_proj(out).where(has_any.unsqueeze(-1), 0.0)
        if self.residual:
            gap = targets.new_zeros((*targets.shape[:-1], self.edge_dim or 0))
            out = out + torch.cat([targets, gap, now], -1)
        if self.norm is not None:
            out = self.norm(out)
        hidden = self.lin_hidden(torch.cat([out, targets], -1)).relu()
        return self.lin_out(hidden)  # type: ignore[no-any-return]
