"""The attention of GRIT, whose score is a network of a pair's features and ends."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gattn.errors import InputError, InputTypeError, check_at_least, check_flag, check_number
from gattn.graphs import GraphLike
from gattn.nn.shared.attention_conv import BaseConv
from gattn.nn.shared.declared import Declared
from gattn.nn.shared.dropout import dropout as drop
from gattn.nn.shared.edge_features import checked_features
from gattn.nn.shared.linear import Linear
from gattn.ops.dropout import check_probability
from gattn.ops.pair_roots import pair_roots
from gattn.recording import record

__all__ = ["GRITConv"]


class GRITConv(BaseConv):
    r"""Attention among pairs whose features change with their ends, and decide the weights.

    The attention of `Graph Inductive Biases in Transformers without Message Passing
    <https://arxiv.org/abs/2305.17589>`_, by the equations of its authors' program, with the signed root
    :math:`\rho(z) = \mathrm{sign}(z) \sqrt{|z|}`:

    .. math::
        \hat e_{ij} = \mathrm{ReLU}\big(\rho((W_Q x_i + W_K x_j) \odot W_{E_w} e_{ij}) + W_{E_b} e_{ij}\big), \qquad
        \alpha_{i\cdot} = \mathrm{softmax}_j\, \mathrm{clamp}(a^\top \hat e_{ij}, \pm 5)

    .. math::
        \hat x_i = \sum_j \alpha_{ij} (W_V x_j + W_{E_v} \hat e_{ij}), \qquad
        x'_i = \theta_1 \odot \hat x_i + \theta_2 \odot \hat x_i \log(1 + d_i), \qquad
        e'_{ij} = \hat e_{ij}

    for each head. The derivative of :math:`\rho` is infinite at zero; there, it is taken to be zero. The pairs are
    meant to be all of a graph, with random-walk probabilities as their first features
    (`gattn.transforms.RandomWalkPairs`). Output projections, residual connections, norms and feed-forward networks come
    around it.

    Args:
        channels: The number of channels of the nodes, F.
        edge_channels: The number of channels of the pairs, D.
        out_channels: The number of channels of each head, C.
        heads: The number of heads, H. (default: `1`)
        clamp: The largest absolute value of a logit. (default: `5.0`)
        use_degrees: Whether the output depends on degrees; otherwise, it is :math:`\hat x_i`. (default: `True`)
        dropout: Probability that an attention weight is dropped, in training. (default: `0.0`)
        **kwargs: Arguments of `torch_geometric.nn.conv.MessagePassing`, such as `flow`.

    Shapes:
        - **input:** features `[N, F]`, pairs `[2, E]`, features of the pairs `[E, D]`, degrees `[N]`.
        - **output:** features `[N, H * C]`, and features of the pairs `[E, H * C]`, in the order of the graph's
          `edge_index`.

    Raises:
        TypeError: If `use_degrees` is neither true nor false.
        ValueError: If a number is not positive, or (in `forward`) features and graph do not fit.

    Example:
        >>> import torch, gattn
        >>> pairs = gattn.CompleteGraph.packed([3, 2]).edge_index  # all pairs of two graphs
        >>> conv = gattn.nn.GRITConv(16, 4, 8, heads=2)
        >>> x, pair_attr = conv(torch.randn(5, 16), pairs, torch.randn(13, 4), degree=torch.tensor([1, 2, 1, 1, 1]))
        >>> x.shape, pair_attr.shape
        (torch.Size([5, 16]), torch.Size([13, 16]))
    """

    _shown = "in_channels edge_channels out_channels heads="

    def __init__(
        self,
        channels: int,
        edge_channels: int,
        out_channels: int,
        heads: int = 1,
        clamp: float = 5.0,
        use_degrees: bool = True,
        dropout: float = 0.0,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        check_probability("dropout", dropout)
        check_at_least(1, channels=channels, edge_channels=edge_channels, out_channels=out_channels, heads=heads)
        check_number("clamp", clamp, "positive")
        check_flag("use_degrees", use_degrees)
        self.in_channels = channels
        self.edge_channels = edge_channels
        self.out_channels = out_channels
        self.heads = heads
        self.clamp = clamp
        self.dropout = dropout
        width = heads * out_channels
        self.lin_query = Linear(channels, width)
        self.lin_key, self.lin_value = (Linear(channels, width, bias=False) for _ in range(2))
        self.lin_edge_weight, self.lin_edge_bias = (Linear(edge_channels, width) for _ in range(2))
        self.att = Parameter(torch.empty(heads, out_channels))
        self.edge_value = Parameter(torch.empty(heads, out_channels, out_channels))
        self.register_parameter("degree_scale", Parameter(torch.empty(2, width)) if use_degrees else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Resets all parameters, as the authors' program does."""
        super(Declared, self).reset_parameters()  # modules draw their numbers below
        for module in self.children():
            if isinstance(module, Linear):
                torch.nn.init.xavier_normal_(module.weight)
                if module.bias is not None:
                    torch.nn.init.zeros_(module.bias)
        torch.nn.init.xavier_normal_(self.att)
        torch.nn.init.xavier_normal_(self.edge_value)
        if self.degree_scale is not None:
            with torch.no_grad():
                self.degree_scale[0], self.degree_scale[1] = 1.0, 0.0

    def forward(
        self, x: Tensor, edge_index: GraphLike, edge_attr: Tensor | None = None, degree: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Updates nodes and pairs.

        Args:
            x: The features, `[..., N, F]`.
            edge_index: The pairs, as a graph in any form that `gattn.attend` takes.
            edge_attr: The features of the pairs, `[..., E, D]`. (default: `None`, the vectors that a sparse adjacency
                holds)
            degree: The degree of each node, `[N]`, in the graph whose pairs these are. (default: `None`, the number of
                pairs of which it is the target)

        Returns:
            The features of the nodes and of the pairs.

        Raises:
            TypeError: If an input is not a tensor.
            ValueError: If features and graph do not fit; the message says which.
            IndexError: If an index of the graph is out of range.
        """
        x = self._nodes(x)
        if degree is not None and not isinstance(degree, Tensor):
            raise InputTypeError(f"degree must be a tensor; got {type(degree).__name__}.")
        if degree is not None and degree.shape != (x.size(-2),):
            raise InputError(f"degree must have one entry per node, [{x.size(-2)}]; got {list(degree.shape)}.")
        graph = self._graph(edge_index, x, x, self_loops=False).listed(x.device)
        graph, edge_attr = checked_features(self, graph, edge_attr, self.edge_channels, x.shape[:-2])
        query, key, value = (self._heads(lin(x)) for lin in (self.lin_query, self.lin_key, self.lin_value))
        source, target = (end.long() for end in graph.sources_and_targets())
        weight, shift = (self._heads(lin(edge_attr)) for lin in (self.lin_edge_weight, self.lin_edge_bias))
        pair = pair_roots(query, key, weight, shift, target, source)
        logits = (pair * self.att).sum(-1).clamp(-self.clamp, self.clamp)
        if self.training and self.dropout > 0.0:  # both sums drop the same
            alpha = self.weigh(None, None, graph, bias=logits)
            record(self, graph, alpha)
            alpha = drop(alpha, self.dropout, True)
            out = self.weighted_sum(alpha, value, graph)
        else:
            out, alpha, _ = self._result(None, None, value, graph, bias=logits, weights=True)
            record(self, graph, alpha)
        # The matrices of pairs are the same for all, and multiply the sums instead of each pair.
        of_pairs = self.weighted_sum(alpha, torch.zeros_like(value), graph, edge_value=pair)
        out = (out + torch.einsum("...hc,hcd->...hd", of_pairs, self.edge_value)).flatten(-2)
        if self.degree_scale is not None:
            if degree is None:
                degree = out.new_zeros(x.size(-2)).index_add(0, target, out.new_ones(target.numel()))
            out = out * self.degree_scale[0] + out * self.degree_scale[1] * degree.to(out).log1p().unsqueeze(-1)
        return out, pair.flatten(-2)
