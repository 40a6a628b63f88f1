"""The gated graph layer that also updates edge features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gattn.distributions import Sigmoid
from gattn.errors import InputError, check_at_least, check_flag
from gattn.graphs import GraphLike
from gattn.nn.shared.attention_conv import BaseConv
from gattn.nn.shared.dropout import Dropout
from gattn.nn.shared.edge_features import checked_features
from gattn.nn.shared.linear import Linear

__all__ = ["GatedGCNConv"]

_GATE = Sigmoid(normalize=True, eps=1e-6)


class GatedGCNConv(BaseConv):
    r"""The layer of `Residual Gated Graph ConvNets <https://arxiv.org/abs/1711.07553>`_ with edge features.

    In the form of `Benchmarking Graph Neural Networks <https://arxiv.org/abs/2003.00982>`_:

    .. math::
        \hat{e}_{ij} &= D x_j + E x_i + C e_{ij} \\
        x'_i &= x_i + \mathrm{ReLU}\Big(\mathrm{BN}\Big(A x_i + \sum_{j \in \mathcal{N}(i)}
        \frac{\sigma(\hat{e}_{ij})}{\sum_{k \in \mathcal{N}(i)} \sigma(\hat{e}_{ik}) + 10^{-6}} \odot B x_j\Big)\Big) \\
        e'_{ij} &= e_{ij} + \mathrm{ReLU}(\mathrm{BN}(\hat{e}_{ij}))

    It is attention with as many heads as channels. The parameters have the names and shapes of those of
    `dgl.nn.GatedGCNConv`, so checkpoints load, and the results are the same.

    Args:
        in_channels: Channels of the nodes' features; `-1` infers them from the first call.
        edge_channels: Channels of the edges' features; `-1` infers them from the first call.
        out_channels: Channels of both outputs.
        dropout: Probability that an element of an output is dropped, in training. (default: `0.0`)
        batch_norm: Whether outputs are normalised over the batch. (default: `True`)
        residual: Whether the inputs are added to the outputs, if all three numbers of channels are the same.
            (default: `True`)
        activation: Applied to both outputs before they are added to the inputs; `None` for no activation.
            (default: `torch.nn.functional.relu`)
        drop_residual: Whether the inputs are dropped with the rest of an output. `False` adds them after dropout, as
            GraphGPS's layer does. (default: `True`)
        **kwargs: Arguments of `torch_geometric.nn.conv.MessagePassing`, such as `flow` and `aggr`.

    Shapes:
        - **input:** features `[N, F_in]`, edge indices `[2, E]`, edge features `[E, D]`.
        - **output:** features `[N, F_out]`, edge features `[E, F_out]`.

    Raises:
        ValueError: If `dropout` is not a probability, or `out_channels` is not positive; or (in `forward`) features and
            graph do not fit.

    Example:
        >>> import torch, gattn
        >>> conv = gattn.nn.GatedGCNConv(16, 4, 32)
        >>> x, edge_attr = conv(torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]]), torch.randn(2, 4))
        >>> x.shape, edge_attr.shape
        (torch.Size([3, 32]), torch.Size([2, 32]))
    """

    flat_messages = True

    _shown = "in_channels edge_channels out_channels"

    def __init__(
        self,
        in_channels: int,
        edge_channels: int,
        out_channels: int,
        dropout: float = 0.0,
        batch_norm: bool = True,
        residual: bool = True,
        activation: Callable[[Tensor], Tensor] | None = F.relu,
        drop_residual: bool = True,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.in_channels = in_channels
        self.edge_channels = edge_channels
        self.out_channels = out_channels
        check_at_least(1, out_channels=out_channels)
        check_flag("drop_residual", drop_residual)
        self.dropout = Dropout(dropout)
        self.drop_residual = drop_residual
        self.batch_norm = batch_norm
        self.residual = residual
        self.A = Linear(in_channels, out_channels)
        self.B = Linear(in_channels, out_channels)
        self.D = Linear(in_channels, out_channels)
        self.E = Linear(in_channels, out_channels)
        self.C = Linear(edge_channels, out_channels)
        self.bn_node = torch.nn.BatchNorm1d(out_channels)
        self.bn_edge = torch.nn.BatchNorm1d(out_channels)
        self.activation = activation

    def forward(
        self, x: Tensor | tuple[Tensor, Tensor], edge_index: GraphLike, edge_attr: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Updates nodes from their neighbours, and edges from their ends.

        Args:
            x: Features `[..., N, F]`, or a pair (sources, targets).
            edge_index: The graph, in any form that `gattn.attend` takes.
            edge_attr: Edge features `[..., E, D]`; `None` uses the vectors that a sparse adjacency holds.
                (default: `None`)

        Returns:
            Features of the nodes (for a pair, the targets) and of the edges, in the order of the graph's `edge_index`.

        Raises:
            TypeError: If an input is not a tensor.
            ValueError: If features and graph do not fit; the message says which. In training, `BatchNorm1d` also raises
                it if there is only one node or one edge.
            IndexError: If an index of the graph is out of range (in compiled code, when the kernels run).
        """
        sources, targets = self._inputs(x)
        if targets is None:
            raise InputError("GatedGCNConv compares sources with targets: x[1] may not be None.")
        graph = self._graph(edge_index, sources, targets, self_loops=False).listed(sources.device)
        graph, edge_attr = checked_features(self, graph, edge_attr, self.edge_channels, sources.shape[:-2])
        source, target = graph.sources_and_targets()
        ends = self.D(sources).index_select(-2, source) + self.E(targets).index_select(-2, target)
        logits = ends + self.C(edge_attr)
        value = self.B(sources)
        out = self.attend(None, None, value.unsqueeze(-1), graph, bias=logits, distribution=_GATE)
        assert isinstance(out, Tensor)
        nodes = self.A(targets) + out.squeeze(-1)
        skips = (targets, edge_attr) if self.adds_input else (None, None)
        return self._updated(nodes, self.bn_node, skips[0]), self._updated(logits, self.bn_edge, skips[1])

    @property
    def adds_input(self) -> bool:
        """See `BaseConv.adds_input`."""
        given: Any = (self.in_channels, self.A), (self.edge_channels, self.C)
        # Another module may have replaced a linear layer, which knows what was inferred.
        return self.residual and all(
            (channels if channels >= 0 else lin.in_channels) == self.out_channels for channels, lin in given
        )

    def _updated(self, x: Tensor, norm: torch.nn.BatchNorm1d, skip: Tensor | None) -> Tensor:
        """The steps after the convolution, for nodes and for edges."""
        if self.batch_norm:
            x = norm(x.flatten(0, -2)).view_as(x)
        if self.activation is not None:
            x = self.activation(x)
        if skip is not None and not self.drop_residual:
            return skip + self.dropout(x)  # type: ignore[no-any-return]
        return self.dropout(x if skip is None else skip + x)  # type: ignore[no-any-return]
