"""SGFormer's linear attention among all nodes of a graph.

Dimensions: B graphs, N nodes, F channels, H heads, C channels per head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn.attention
from torch import Tensor
from torch_geometric.utils import scatter

from gattn.attention import attend_for
from gattn.distributions import Identity
from gattn.errors import InputError
from gattn.graphs import CompleteGraph
from gattn.nn.shared.linear import through
from gattn.nn.transformers.all_pairs import check_heads, num_nodes, on_graph, without_padding
from gattn.recording import is_watched, record
from gattn.scores import DotScore
from gattn.tracing import Leaf

__all__ = ["SGFormerAttention"]

_LEAST = 1e-6
"""What PyG puts in place of zeros before it divides by norms."""


class SGFormerAttention(Leaf, torch_geometric.nn.attention.SGFormerAttention):
    r"""Linear attention among all nodes of a graph, of which each also attends to itself with the weight of all.

    The layer of `SGFormer: Simplifying and Empowering Transformers for Large-Graph Representations
    <https://arxiv.org/abs/2306.10759>`_, averaged over heads:

    .. math::
        \mathrm{out}_i = \frac{N v_i + \sum_j (q_i^\top k_j)\, v_j}{N + \sum_j q_i^\top k_j}

    It takes time proportional to the number of nodes :math:`N`. With `norm="row"`, each query and each key of a head is
    divided by its norm, as in PyG. With `norm="frobenius"`, all queries of a graph are divided by their Frobenius norm,
    and so are all keys, as in the paper and in its authors' program.

    This is a drop-in replacement for `torch_geometric.nn.attention.SGFormerAttention`: arguments, parameter names and,
    on one graph, results are the same. In a padded batch, PyG's layer counts padded nodes in :math:`N` and in its
    denominator; here, a graph's output does not depend on the padding.

    Args:
        channels: The number of channels of the features, F.
        heads: The number of heads, H. (default: `1`)
        head_channels: The number of channels of each head and of the output, C; `None` for F / H. (default: `64`)
        qkv_bias: Whether queries, keys and values have a bias. (default: `False`)
        norm: What queries and keys are divided by: `"row"` or `"frobenius"`. (default: `"row"`)

    Shapes:
        - **input:** features `[B, N, F]`, or those of one graph or a packed one, `[N, F]`.
        - **output:** `[B, N, C]` or `[N, C]`.

    Raises:
        ValueError: If an option is out of range, or `channels` is not a multiple of `heads`.

    Example:
        >>> import torch, gattn
        >>> layer = gattn.nn.SGFormerAttention(16, heads=2, head_channels=8)
        >>> mask = torch.arange(10) < torch.tensor([[10], [7]])  # two graphs, of 10 and 7 nodes
        >>> layer(torch.randn(2, 10, 16), mask).shape
        torch.Size([2, 10, 8])
        >>> layer(torch.randn(17, 16), graph=gattn.CompleteGraph.packed([10, 7])).shape
        torch.Size([17, 8])
    """

    def __init__(
        self,
        channels: int,
        heads: int = 1,
        head_channels: int | None = 64,
        qkv_bias: bool = False,
        *,
        norm: str = "row",
    ):
        if norm not in ("row", "frobenius"):
            raise InputError(f"norm must be 'row' or 'frobenius'; got {norm!r}.")
        super().__init__(channels, heads, check_heads(channels, heads, head_channels), qkv_bias)
        self.norm = norm

    def forward(self, x: Tensor, mask: Tensor | None = None, *, graph: CompleteGraph | None = None) -> Tensor:
        """Attends among all nodes.

        Args:
            x: The features, `[B, N, F]` or `[N, F]`.
            mask: Which nodes of a padded batch exist, `[B, N]`. (default: `None`, all)
            graph: The complete graph, such as a packed one. (default: `None`, that of all nodes)

        Returns:
            The output, `[B, N, C]` or `[N, C]`. For nodes that do not exist, it means nothing.

        Raises:
            TypeError: If `mask` is not of booleans, or `graph` is not a `CompleteGraph`.
            ValueError: If shapes do not fit each other, both `mask` and `graph` are given, or the graph is causal or
                has a window or lengths.
        """
        x, graph = on_graph(x, mask, graph)
        if graph.causal or graph.window is not None or graph.has_lengths:
            raise InputError(
                "SGFormerAttention counts all nodes of a graph: give a packed graph, or a mask for padding; got "
                "a graph that is causal or has a window or lengths."
            )
        query, key, value = (
            torch.unflatten(through(lin, x), -1, (self.heads, self.head_channels)) for lin in (self.q, self.k, self.v)
        )
        key, value = without_padding(key, mask), without_padding(value, mask)
        query, key = self._normalized(query, graph, mask), self._normalized(key, graph, mask)
        key = without_padding(key, mask)
        ones = torch.ones_like(value[..., :1])  # whose sum is that of the weights
        products: dict[str, Any] = {"score": DotScore(1.0), "distribution": Identity()}
        sums = attend_for(query, key, torch.cat([value, ones], -1), graph, **products).out
        count = num_nodes(x, mask, graph)[..., None, None]
        if is_watched(self):
            self._record(attend_for(query, key, None, graph, weights="only", **products).weights, graph, count)
        out = (sums[..., :-1] + count * value) / (sums[..., -1:] + count)
        return out.mean(-2)

    def _record(self, products: Tensor | list[Tensor], graph: CompleteGraph, count: Tensor) -> None:
        """Records the weights of all nodes, `[..., H, N, N]`, of which the attention core computes the products."""

        def whole(products: Tensor, count: Tensor) -> Tensor:
            to_itself = count * torch.eye(products.size(-1), dtype=count.dtype, device=count.device)
            return (products + to_itself) / (products.sum(-1, keepdim=True) + count)

        if isinstance(products, list):
            record(self, graph, [whole(block, block.new_full((1, 1, 1), block.size(-1))) for block in products])
        else:
            record(self, graph, whole(products, count))

    def _normalized(self, rows: Tensor, graph: CompleteGraph, mask: Tensor | None) -> Tensor:
        """Queries or keys `[..., N, H, C]`, divided by their norms."""
        norms: Tensor
        rows = torch.where(rows == 0, _LEAST, rows)
        if self.norm == "row":
            norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
            return rows / norms
        squares = without_padding(rows, mask).square().sum((-2, -1))
        if graph.blocks is None:
            whole = graph.of_all_processes(squares.sum(-1, keepdim=True)).sum(0)
            return rows / whole.sqrt()[..., None, None]
        block, count = graph.block_of_each("target", rows.device)
        norms = scatter(squares, block, -1, count).sqrt().index_select(-1, block)
        return rows / norms[..., None, None]
