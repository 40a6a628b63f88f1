"""Attention as pooling: a learned query looks over a set, which becomes one vector."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Parameter
from torch_geometric.nn.aggr import Aggregation

from gattn.attention import attend
from gattn.graphs import CompleteGraph, SparseGraph
from gattn.ops.dropout import check_probability
from gattn.scores import DotScore


class AttentionPooling(Aggregation):
    r"""Averages the elements of a set, weighted by how well they answer a learned query.

    The attention over words, and over sentences, of `Hierarchical Attention Networks for Document Classification
    <https://aclanthology.org/N16-1174>`_, for any set:

    .. math::
        u_j = \tanh(W x_j + b), \qquad
        \alpha_j = \frac{\exp(u_j^{\top} u)}{\sum_k \exp(u_k^{\top} u)}, \qquad
        \mathrm{out} = \sum_j \alpha_j x_j

    It is message passing from elements to sets, whose query :math:`u` all sets share. As one of PyG's aggregations it
    takes their arguments, and serves as a layer's `aggr` and as the readout of a batch of graphs.

    Args:
        in_channels: Channels of the elements, C.
        attention_channels: Channels of :math:`u`. (default: `None`, C)
        dropout: Probability that an attention weight is dropped, in training. (default: `0.0`)

    Shapes:
        - **input:** elements `[..., M, C]` and the set of each, `[M]`; or a padded batch `[..., M, C]` with the
          elements of each set first, and their number `[...]`.
        - **output:** sets `[..., N, C]`; of a padded batch `[..., C]`. An empty set is zero.

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

    def __init__(self, in_channels: int, attention_channels: int | None = None, *, dropout: float = 0.0):
        super().__init__()
        attention_channels = in_channels if attention_channels is None else attention_channels
        for name, channels in (("in_channels", in_channels), ("attention_channels", attention_channels)):
            if channels < 1:
                raise ValueError(f"{name} must be at least 1; got {channels}.")
        check_probability("dropout", dropout)
        self.in_channels = in_channels
        self.attention_channels = attention_channels
        self.dropout = dropout
        self.lin = Linear(in_channels, attention_channels)
        self.query = Parameter(torch.empty(attention_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all parameters anew."""
        self.lin.reset_parameters()
        bound = self.attention_channels**-0.5
        torch.nn.init.uniform_(self.query, -bound, bound)

    def __call__(self, x: Tensor, *args: Any, lengths: Tensor | None = None, **kwargs: Any) -> Any:
        """Calls `forward`, by way of PyG's checks."""
        # PyG would make an index of zeros where it finds none, and look at it, which no exported model can.
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
    ) -> Any:
        """Pools.

        Args:
            x: Elements `[..., M, C]`.
            index: The set of each element, `[M]`, in any order. (default: `None`, all in one)
            ptr: Instead of `index`: where each set begins, and the end, `[N + 1]`. (default: `None`)
            dim_size: Number of sets, N. (default: `None`, those that there are)
            dim: The dimension of the elements. (default: `-2`)
            max_num_elements: Of no use here, but PyG passes it. (default: `None`)
            lengths: Instead of `index`: how many elements of each set of a padded batch are real, `[...]`; the others
                count for nothing. (default: `None`)
            return_weights: Whether attention weights, before dropout, are returned too. (default: `False`)

        Returns:
            `[..., N, C]`, and `[..., C]` for a padded batch. With `return_weights` a pair: also `[..., M]`.

        Raises:
            ValueError: If shapes do not fit, or the sets are given twice.
            IndexError: If an index is negative.
            TypeError: If `lengths` is no tensor.
        """
        if x.size(-1) != self.in_channels:
            raise ValueError(
                f"x has {x.size(-1)} channels, but this layer was made for in_channels={self.in_channels}."
            )
        dim = dim if dim < 0 else dim - x.dim()
        if dim == -1:
            raise ValueError("dim is where the elements of x lie; its last dimension is that of their channels.")
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
                    f"lengths are one integer for each set of the padded batch, {list(front)} for this x; got "
                    f"{list(lengths.shape)}."
                )
            lengths = lengths.reshape(x.shape[:-2])
            is_real = torch.arange(num_elements, device=x.device) < lengths.to(x.device).unsqueeze(-1)
            x = x.masked_fill(~is_real.unsqueeze(-1), 0.0)  # zero times NaN is NaN, in gradients of the projection too
        if index is None and ptr is not None:
            index = _index_of(ptr, num_elements)
        graph: CompleteGraph | SparseGraph
        if index is None:
            num_sets, graph = 1, CompleteGraph(1, num_elements, source_lengths=lengths)
        else:
            assert dim_size is not None  # PyG's __call__ finds it out
            num_sets, graph = dim_size, _membership(index, num_elements, dim_size)
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
        out, weights = result if return_weights else (result, None)
        out = out.reshape(*front, num_sets, self.in_channels)
        out = out.squeeze(-2) if lengths is not None else out.movedim(-2, dim)
        if weights is None:
            return out
        return out, weights.reshape(*front, num_elements).movedim(-1, dim + 1)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels}, {self.attention_channels})"


def _index_of(ptr: Tensor, num_elements: int) -> Tensor:
    """The set of each element, where `ptr` says at which of them sets begin."""
    fits = ptr.dim() == 1 and ptr.numel() > 0
    if fits and not torch.compiler.is_compiling():
        fits = int(ptr[0]) == 0 and int(ptr[-1]) == num_elements and bool((ptr.diff() >= 0).all())
    if not fits:
        raise ValueError(
            f"ptr holds where each set begins, and the end: it starts at 0, never falls, and ends at {num_elements}, "
            f"the number of elements; got {ptr.tolist()}."
        )
    sets = torch.arange(ptr.numel() - 1, device=ptr.device)
    return sets.repeat_interleave(ptr.diff(), output_size=num_elements)


def _membership(index: Tensor, num_elements: int, num_sets: int) -> SparseGraph:
    """Edges from elements to the sets that they belong to."""
    if index.dim() != 1 or index.numel() != num_elements or index.is_floating_point() or index.dtype == torch.bool:
        raise ValueError(
            f"index holds the set of each element, {num_elements} integers; got {index.dtype} of shape "
            f"{list(index.shape)}."
        )
    if not torch.compiler.is_compiling() and num_elements and int(index.min()) < 0:
        raise IndexError(f"index counts sets from 0; got {int(index.min())}.")
    edge_index = torch.stack([torch.arange(num_elements, device=index.device), index])
    return SparseGraph(edge_index, num_elements, num_sets)
