"""The graph layer that attends by the cosine of the features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn.inits import ones

from gattn.errors import InputTypeError
from gattn.graphs import GraphLike
from gattn.nn.shared.attention_conv import BaseConv
from gattn.scores import DotScore, unit

__all__ = ["AGNNConv"]


class AGNNConv(BaseConv):
    r"""The layer of `Attention-based Graph Neural Network <https://arxiv.org/abs/1803.03735>`_.

    .. math::
        x'_i = \sum_{j \in \mathcal{N}(i) \cup \{i\}} \alpha_{ij} x_j, \qquad
        \alpha_{i\cdot} = \mathrm{softmax}_j \; \beta \cos(x_i, x_j)

    It has no projections: a network adds linear layers before and after it.

    A drop-in replacement for `torch_geometric.nn.AGNNConv`, with the same arguments, parameter names and results. It
    also supports features `[B, N, F]` over one graph, `SparseGraph` and `CompleteGraph`, and float32 accumulation in
    half precision.

    Args:
        requires_grad: Whether :math:`\beta` is learnt. (default: `True`)
        add_self_loops: Whether each node also attends to itself. (default: `True`)
        **kwargs: Arguments of `torch_geometric.nn.conv.MessagePassing`, such as `flow` and `aggr`.

    Shapes:
        - **input:** features `[N, F]`, edge indices `[2, E]`.
        - **output:** `[N, F]`.

    Raises:
        TypeError: If there is an unknown argument.
        ValueError: If features and graph do not fit (in `forward`).

    Example:
        >>> import torch, gattn
        >>> conv = gattn.nn.AGNNConv()
        >>> conv(torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]])).shape
        torch.Size([3, 16])
    """

    beta: Tensor

    flat_messages = True

    takes_shards = True

    _starts = (("beta", ones),)
    _shown = ""

    def __init__(self, requires_grad: bool = True, add_self_loops: bool = True, **kwargs: Any):
        super().__init__(**kwargs)
        self.requires_grad = requires_grad
        self.add_self_loops = add_self_loops
        if requires_grad:
            self.beta = Parameter(torch.ones(1))
        else:
            self.register_buffer("beta", torch.ones(1))

    def forward(self, x: Tensor, edge_index: GraphLike) -> Tensor:
        """Attends over each node's neighbours.

        Args:
            x: Features `[..., N, F]`.
            edge_index: The graph, in any form that `gattn.attend` takes.

        Raises:
            TypeError: If `x` is not a tensor.
            ValueError: If features and graph do not fit; the message says which.
            IndexError: If an index of the graph is out of range (in compiled code, when the kernels run).
        """
        if not isinstance(x, Tensor):
            raise InputTypeError(f"x must be a tensor, the features of all nodes; got {type(x).__name__}.")
        self._inputs(x)
        graph = self._graph(edge_index, x, x, self.add_self_loops)
        direction = unit(x).unsqueeze(-2)  # one head
        out = self.attend(direction, direction, x.unsqueeze(-2), graph, score=DotScore(self.beta))
        assert isinstance(out, Tensor)
        return out.squeeze(-2)
