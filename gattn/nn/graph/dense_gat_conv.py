"""The graph attention layer on dense adjacency matrices."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn.inits import glorot, zeros

from gattn.errors import InputError, InputTypeError, check_at_least
from gattn.graphs import CompleteGraph
from gattn.nn.shared.attention_conv import BaseConv
from gattn.nn.shared.linear import Linear
from gattn.ops.dropout import check_probability
from gattn.scores import GATScore

__all__ = ["DenseGATConv"]


class DenseGATConv(BaseConv):
    r"""The layer of `Graph Attention Networks <https://arxiv.org/abs/1710.10903>`_ on adjacency matrices.

    .. math::
        x'_i = \sum_{j : A_{ij} \ne 0} \alpha_{ij} W x_j, \qquad
        \alpha_{i\cdot} = \mathrm{softmax}_j \,
        \mathrm{LeakyReLU}(\langle a_{dst}, W x_i \rangle + \langle a_{src}, W x_j \rangle)

    The adjacency is a complete graph with a mask, and its rows are the targets.

    A drop-in replacement for `torch_geometric.nn.DenseGATConv`, with the same arguments, parameter names and results.
    Differences: a node without neighbours gets zeros (and the bias), not NaN.

    Args:
        in_channels: Channels of the input; `-1` infers them from the first call.
        out_channels: Channels of the output, per head.
        heads: Number of heads. (default: `1`)
        concat: Whether heads are concatenated rather than averaged. (default: `True`)
        negative_slope: Slope of the LeakyReLU for negative inputs. (default: `0.2`)
        dropout: Probability that an attention weight is dropped, in training. (default: `0.0`)
        bias: Whether a bias is learnt. (default: `True`)

    Shapes:
        - **input:** features `[B, N, F_in]`, adjacency `[B, N, N]`, mask `[B, N]`.
        - **output:** `[B, N, H * F_out]`, or `[B, N, F_out]` with `concat=False`.

    Raises:
        ValueError: If an option is out of range, or (in `forward`) shapes do not fit.

    Example:
        >>> import torch, gattn
        >>> conv = gattn.nn.DenseGATConv(16, 8, heads=4)
        >>> conv(torch.randn(2, 5, 16), torch.ones(2, 5, 5)).shape
        torch.Size([2, 5, 32])
    """

    _starts = (("att_src", glorot), ("att_dst", glorot), ("bias", zeros))
    _shown = "in_channels out_channels heads="

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        bias: bool = True,
    ):
        super().__init__()
        check_at_least(1, heads=heads, out_channels=out_channels)
        check_probability("dropout", dropout)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.heads = heads
        self.concat = concat
        self.negative_slope = negative_slope
        self.dropout = dropout
        self.lin = Linear(in_channels, heads * out_channels, bias=False, weight_initializer="glorot")
        self.att_src = Parameter(torch.empty(1, 1, heads, out_channels))
        self.att_dst = Parameter(torch.empty(1, 1, heads, out_channels))
        self.bias = Parameter(torch.empty(heads * out_channels if concat else out_channels)) if bias else None
        self.reset_parameters()

    def forward(self, x: Tensor, adj: Tensor, mask: Tensor | None = None, add_loop: bool = True) -> Tensor:
        """Attends over each node's neighbours.

        Args:
            x: Features `[B, N, F_in]`, or `[N, F_in]` of a single graph.
            adj: Adjacency `[B, N, N]`, or `[N, N]` for all graphs of the batch; entries that are not zero are edges.
            mask: Which nodes are real, `[B, N]`; the output of the others is zero. (default: `None`, all)
            add_loop: Whether each node also attends to itself. (default: `True`)

        Returns:
            `[B, N, H * F_out]`, or `[B, N, F_out]` with `concat=False`; B is 1 for a single graph.

        Raises:
            TypeError: If `x` or `adj` is not a tensor.
            ValueError: If types or shapes do not fit; the message says which.
        """
        if not isinstance(x, Tensor) or not isinstance(adj, Tensor):
            raise InputTypeError(f"x and adj must be tensors; got {type(x).__name__} and {type(adj).__name__}.")
        self._inputs(x)
        if x.dim() not in (2, 3):
            raise InputError(f"x must have shape [B, N, F], or [N, F] for a single graph; got {list(x.shape)}.")
        x = x.unsqueeze(0) if x.dim() == 2 else x
        adj = adj.unsqueeze(0) if adj.dim() == 2 else adj
        batch, nodes, _ = x.shape
        if adj.dim() != 3 or adj.size(0) not in (1, batch) or adj.shape[1:] != (nodes, nodes):
            raise InputError(
                f"adj must have shape [{batch}, {nodes}, {nodes}] for these features; got {list(adj.shape)}."
            )
        if mask is not None and mask.shape not in ((batch, nodes), (nodes,)):
            raise InputError(f"mask must have shape [{batch}, {nodes}], one entry per node; got {list(mask.shape)}.")
        seen = adj != 0
        if add_loop:
            seen = seen | torch.eye(nodes, dtype=torch.bool, device=adj.device)
        value = self.lin(x).view(batch, nodes, self.heads, self.out_channels)
        key, query = (value * self.att_src).sum(-1), (value * self.att_dst).sum(-1)
        graph, score = CompleteGraph(nodes), GATScore(self.negative_slope)
        out = self.attend(query, key, value, graph, score=score, mask=seen.unsqueeze(1), dropout=self.dropout)
        assert isinstance(out, Tensor)
        out = out.flatten(-2) if self.concat else out.mean(-2)
        out = out if self.bias is None else out + self.bias
        return out if mask is None else out * mask.view(-1, nodes, 1).to(out.dtype)
