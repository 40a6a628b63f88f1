"""The graph layer with a gate per channel of each message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn.inits import zeros

from gattn.distributions import Gate, Identity, Sigmoid, Tanh
from gattn.errors import InputError, InputTypeError, check_at_least, is_integer
from gattn.graphs import GraphLike
from gattn.nn.shared.attention_conv import BaseConv
from gattn.nn.shared.edge_features import checked_features, with_features
from gattn.nn.shared.linear import Linear, columns
from gattn.products import linear
from gattn.scores import GATScore
from gattn.torch_private import has_hooks

__all__ = ["ResGatedGraphConv"]


class ResGatedGraphConv(BaseConv):
    r"""The layer of `Residual Gated Graph ConvNets <https://arxiv.org/abs/1711.07553>`_.

    .. math::
        x'_i = W_1 x_i + \sum_{j \in \mathcal{N}(i)} \eta_{ij} \odot W_2 [x_j, e_{ij}], \qquad
        \eta_{ij} = \sigma(W_3 [x_i, e_{ij}] + W_4 [x_j, e_{ij}])

    It is attention with as many heads as channels, whose weights do not compete. Each :math:`W` is split into a part
    for nodes, which is applied once per node, and a part for edges.

    A drop-in replacement for `torch_geometric.nn.ResGatedGraphConv`, with the same arguments, parameter names and
    results. It also supports lazy channels together with edge features, `SparseGraph` and `CompleteGraph`, and float32
    accumulation in half precision. Differences: with edge features, the weights of the linear layers are read and the
    layers are not called, so their hooks do not run.

    Args:
        in_channels: Channels of the input; `-1` infers them from the first call; a pair for a bipartite graph
            (sources, targets).
        out_channels: Channels of the output.
        act: The gate :math:`\sigma`, from logits `[..., E, F_out]` to weights. The kernels support the logistic
            function, the hyperbolic tangent and the identity, as modules and as functions of PyTorch; any other
            callable is slower. (default: `torch.nn.Sigmoid()`)
        edge_dim: Channels of the edge features; `-1` infers them from the first call. (default: `None`, no edge
            features)
        root_weight: Whether the skip connection :math:`W_1 x_i` is added. (default: `True`)
        bias: Whether a bias is added to the output. (default: `True`)
        **kwargs: Arguments of `torch_geometric.nn.conv.MessagePassing`, such as `flow` and `aggr`.

    Shapes:
        - **input:** features `[N, F_in]` or `([M, F_src], [N, F_dst])`, edge indices `[2, E]`, edge features `[E, D]`.
        - **output:** `[N, F_out]`.

    Raises:
        TypeError: If `act` is not callable.
        ValueError: If `out_channels` is not positive, or (in `forward`) features and graph do not fit.

    Example:
        >>> import torch, gattn
        >>> conv = gattn.nn.ResGatedGraphConv(16, 32, edge_dim=4)
        >>> conv(torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]]), torch.randn(2, 4)).shape
        torch.Size([3, 32])
    """

    flat_messages = True

    takes_shards = True

    _starts = (("bias", zeros),)

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        act: Callable[[Tensor], Tensor] = torch.nn.Sigmoid(),  # noqa: B008 - it has no state
        edge_dim: int | None = None,
        root_weight: bool = True,
        bias: bool = True,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        if not callable(act):
            raise InputTypeError(f"act must be a callable such as torch.nn.Sigmoid(); got {act!r}.")
        self.in_channels = in_channels
        self.out_channels = out_channels
        check_at_least(1, out_channels=out_channels)
        self.act = act
        self.edge_dim = edge_dim
        self.root_weight = root_weight

        source_channels, target_channels = (in_channels,) * 2 if is_integer(in_channels) else in_channels
        self.lin_key = Linear(_joined(target_channels, edge_dim), out_channels)
        self.lin_query = Linear(_joined(source_channels, edge_dim), out_channels)
        self.lin_value = Linear(_joined(source_channels, edge_dim), out_channels)
        if root_weight:
            self.lin_skip = Linear(target_channels, out_channels, bias=False)
        else:
            self.register_parameter("lin_skip", None)
        if bias:
            self.bias = Parameter(torch.empty(out_channels))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def forward(
        self, x: Tensor | tuple[Tensor, Tensor], edge_index: GraphLike, edge_attr: Tensor | None = None
    ) -> Tensor:
        """Sums each node's neighbours, with a gate per channel.

        Args:
            x: Features `[..., N, F]`, or a pair (sources, targets).
            edge_index: The graph, in any form that `gattn.attend` takes.
            edge_attr: Edge features `[..., E, D]`, with `edge_dim`. (default: `None`)

        Raises:
            TypeError: If an input is not a tensor.
            ValueError: If features, graph and options do not fit; the message says which.
            IndexError: If an index of the graph is out of range (in compiled code, when the kernels run).
        """
        sources, targets = self._inputs(x)
        if targets is None:
            raise InputError("ResGatedGraphConv compares sources with targets: x[1] may not be None.")
        graph = self._graph(edge_index, sources, targets, self_loops=False)
        edge = edge_value = None
        if self.edge_dim is not None:
            graph, edge_attr = checked_features(self, graph, edge_attr, self.edge_dim, sources.shape[:-2])
            ends = targets, sources, sources
            lins = self.lin_key, self.lin_query, self.lin_value  # PyG's keys are the targets'
            weights = [columns(lin, x.size(-1), edge_attr.size(-1)) for lin, x in zip(lins, ends, strict=True)]
            parts = [part for part in weights if part is not None]
            if len(parts) < len(lins):
                source, target = graph.listed(sources.device).sources_and_targets()
                at_ends = [x.index_select(-2, i) for x, i in zip(ends, (target, source, source), strict=True)]
                to, by, sent = (lin(with_features(x, edge_attr)) for lin, x in zip(lins, at_ends, strict=True))
                query = key = None
                value = sent.new_zeros(*sources.shape[:-1], self.out_channels)  # to which the edges' values are added
                edge, edge_value = to + by, sent.unsqueeze(-1)
            else:
                query, key, value = (
                    linear(x, part[0], lin.bias) for lin, x, part in zip(lins, ends, parts, strict=True)
                )
                edge = F.linear(edge_attr, parts[0][1] + parts[1][1])
                edge_value = F.linear(edge_attr, parts[2][1]).unsqueeze(-1)
        elif edge_attr is None:
            query, key, value = self.lin_key(targets), self.lin_query(sources), self.lin_value(sources)
        else:
            raise InputError(
                "got edge_attr, but this layer was made without edge features: make ResGatedGraphConv with edge_dim."
            )
        found = self.attend(
            query,
            key,
            value.unsqueeze(-1),
            graph,
            score=GATScore(1.0),
            edge=edge,
            edge_value=edge_value,
            distribution=_gate(self.act, value.dtype),
        )
        assert isinstance(found, Tensor)
        out: Tensor = found.transpose(-1, -2).flatten(-2)  # the results of several aggregations are side by side
        if self.lin_skip is not None:
            out = out + self.lin_skip(targets)
        return out if self.bias is None else out + self.bias


class _Activation(Gate):
    """A gate that the kernels do not support.

    Args:
        act: The function.
        dtype: The type of its input.
    """

    def __init__(self, act: Callable[[Tensor], Tensor], dtype: torch.dtype):
        super().__init__()
        self.act = act
        self.dtype = dtype

    def of(self, logits: Tensor) -> Tensor:
        return self.act(logits.to(self.dtype))


_GATES: tuple[tuple[Gate, tuple[Any, ...]], ...] = (
    (Sigmoid(), (torch.nn.Sigmoid, torch.sigmoid, F.sigmoid)),
    (Tanh(), (torch.nn.Tanh, torch.tanh, F.tanh)),
    (Identity(), (torch.nn.Identity,)),
)


def _gate(act: Any, dtype: torch.dtype) -> Gate:
    """The distribution for an activation, which is called in the type of the features."""
    is_hooked = isinstance(act, torch.nn.Module) and (has_hooks(act) or "forward" in vars(act))
    for gate, known in _GATES:
        if not is_hooked and any(act is name or type(act) is name for name in known):
            return gate
    return _Activation(act, dtype)


def _joined(channels: int, edge_dim: int | None) -> int:
    """The channels of the nodes' and the edges' features together, -1 if either is not known yet."""
    if edge_dim is None:
        return channels
    return channels + edge_dim if channels > 0 and edge_dim >= 0 else -1
