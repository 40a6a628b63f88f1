"""Attention as pooling: a learned query attends to the elements of a set, which become one vector.

Dimensions: M elements, N sets, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Parameter
from torch_geometric.nn.aggr import Aggregation

from gattn.attention import attend
from gattn.errors import InputTypeError, check_at_least
from gattn.graphs import CompleteGraph, SparseGraph
from gattn.nn.pooling.sets import sets_of
from gattn.nn.shared.declared import Declared
from gattn.nn.shared.dtypes import check_dtype
from gattn.ops.dropout import check_probability
from gattn.scores import DotScore
from gattn.torch_private import is_fx_symbolic_tracing

__all__ = ["AttentionPooling"]


class AttentionPooling(Declared, Aggregation):
    r"""Averages the elements of a set, with attention weights from a learned query.

    This is the attention to words and to sentences in `Hierarchical Attention Networks for Document Classification
    <https://aclanthology.org/N16-1174>`_, for sets of any sort:

    .. math::
        u_j = \tanh(W x_j + b), \qquad
        \alpha_j = \frac{\exp(u_j^{\top} u)}{\sum_k \exp(u_k^{\top} u)}, \qquad
        \mathrm{out} = \sum_j \alpha_j x_j

    It is message passing from elements to sets, and all sets share the query :math:`u`. The layer is one of PyG's
    aggregations, so it can be the `aggr` of a layer and the readout of a batch of graphs.

    Args:
        in_channels: The number of channels of the elements, C.
        attention_channels: The number of channels of :math:`u`. (default: `None`, C)
        dropout: The probability of dropping an attention weight during training. (default: `0.0`)

    Shapes:
        - **input:** elements `[..., M, C]` and the set of each element, `[M]`; or a padded batch `[..., M, C]` in which
          the elements of each set come first, and the number of elements of each set, `[...]`.
        - **output:** sets `[..., N, C]`, or `[..., C]` for a padded batch. An empty set becomes zero.

    Raises:
        ValueError: If an option is out of range.

    Example:
        >>> import torch, gattn
        >>> pool = gattn.nn.AttentionPooling(16)
        >>> batch = torch.tensor([0, 0, 0, 1, 1])  # two graphs, of 3 and 2 nodes
        >>> pool(torch.randn(5, 16), batch).shape
        torch.Size([2, 16])
        >>> out, weights = pool(torch.randn(2, 7, 16), lengths=torch.tensor([7, 4]), return_weights=True)
        >>> weights.shape
        torch.Size([2, 7])
    """

    _shown = "in_channels attention_channels"

    def __init__(self, in_channels: int, attention_channels: int | None = None, *, dropout: float = 0.0):
        super().__init__()
        attention_channels = in_channels if attention_channels is None else attention_channels
        check_at_least(1, in_channels=in_channels, attention_channels=attention_channels)
        check_probability("dropout", dropout)
        self.in_channels = in_channels
        self.attention_channels = attention_channels
        self.dropout = dropout
        self.lin = Linear(in_channels, attention_channels)
        self.query = Parameter(torch.empty(attention_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Resets all parameters."""
        self.lin.reset_parameters()
        bound = self.attention_channels**-0.5
        torch.nn.init.uniform_(self.query, -bound, bound)

    def __call__(self, x: Tensor, *args: Any, lengths: Tensor | None = None, **kwargs: Any) -> Any:
        """Calls `forward` after PyG's checks."""
        if is_fx_symbolic_tracing():
            return torch.nn.Module.__call__(self, x, *args, lengths=lengths, **kwargs)  # which the tracer replaces
        if not isinstance(x, Tensor):
            raise InputTypeError(f"x must be a tensor; got {type(x).__name__}.")
        # Without an index PyG would create one of zeros and read its elements, which exported models cannot do.
        is_one_set = len(args) == 0 and set(kwargs) <= {"return_weights"} and x.dim() > 1 and x.size(-2) > 0
        if lengths is None and not is_one_set:
            return super().__call__(x, *args, **kwargs)
        return torch.nn.Module.__call__(self, x, *args, lengths=lengths, **kwargs)

    def forward(
        self,
        x: Tensor,
        index: Tensor | None = None,
        ptr: Tensor | None = None,
        dim_size: int | None = None,
        dim: int = -2,
        max_num_elements: int | None = None,
        *,
        lengths: Tensor | None = None,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Averages the elements of each set.

        Args:
            x: The elements, `[..., M, C]`.
            index: The set of each element, `[M]`, in any order. (default: `None`, one set)
            ptr: The first element of each set and the number of elements, `[N + 1]`. It is not read if there is an
                `index`, as PyG passes both. (default: `None`)
            dim_size: The number of sets, N. (default: `None`, the number in `index`)
            dim: The dimension of the elements. (default: `-2`)
            max_num_elements: Not used; it is here because PyG passes it. (default: `None`)
            lengths: The number of elements of each set in a padded batch, `[...]`, instead of `index`. Padding has no
                weight. (default: `None`)
            return_weights: Whether to return the attention weights, before dropout, as well. (default: `False`)

        Returns:
            The sets `[..., N, C]`, or `[..., C]` for a padded batch, and with `return_weights` the weights `[..., M]`.

        Raises:
            ValueError: If shapes do not fit each other, `x` is of another type than the parameters, or `lengths` is
                combined with `index`, `ptr` or `dim_size`.
            IndexError: If an index is negative.
            TypeError: If `x` or `lengths` is not a tensor.
        """
        if x.size(-1) != self.in_channels:
            raise ValueError(
                f"x has {x.size(-1)} channels, but this layer was made for in_channels={self.in_channels}."
            )
        check_dtype(self, x=x)
        dim = dim if dim < 0 else dim - x.dim()
        if dim == -1:
            raise ValueError(
                "dim is the dimension of the elements, and cannot be the last one, which is that of the channels."
            )
        x = x.movedim(dim, -2)
        front, num_elements = x.shape[:-2], x.size(-2)
        if len(front) > 2:
            x = x.flatten(0, -3)
        if lengths is not None:
            if index is not None or ptr is not None or dim_size is not None:
                raise ValueError(
                    "with lengths, each row of a padded batch is a set: leave out index, ptr and dim_size."
                )
            if not isinstance(lengths, Tensor):
                raise TypeError(f"lengths must be a tensor; got {type(lengths).__name__}.")
            if lengths.shape != front:
                raise ValueError(
                    f"lengths must have one integer for each set of the padded batch, {list(front)} for this x; got "
                    f"{list(lengths.shape)}."
                )
            lengths = lengths.reshape(x.shape[:-2])
            is_real = torch.arange(num_elements, device=x.device) < lengths.to(x.device).unsqueeze(-1)
            x = x.masked_fill(~is_real.unsqueeze(-1), 0.0)  # zero times NaN is NaN, in gradients of the projection too
        graph: CompleteGraph | SparseGraph
        if index is None and ptr is None:
            num_sets, graph = 1, CompleteGraph(1, num_elements, source_lengths=lengths)
        else:
            num_sets, graph = sets_of(x, index, ptr, dim_size)
        x = x.unsqueeze(-2)  # one head
        result = attend(
            self.query.expand(*x.shape[:-3], num_sets, 1, -1),
            self.lin(x).tanh(),
            x,
            graph,
            score=DotScore(scale=1.0),
            dropout=self.dropout,
            training=self.training,
            return_weights=return_weights,
        )
        out, weights = (result, None) if isinstance(result, Tensor) else result
        out = out.reshape(*front, num_sets, self.in_channels)
        out = out.squeeze(-2) if lengths is not None else out.movedim(-2, dim)
        if not isinstance(weights, Tensor):
            return out
        return out, weights.reshape(*front, num_elements).movedim(-1, dim + 1)
