"""Graphormer's encodings of degrees, of distances and of the edges along shortest paths."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Embedding, Module

from gattn.errors import InputError, InputTypeError, check_at_least
from gattn.graphs.edge_lists import INTEGER_DTYPES
from gattn.nn.shared.declared import Declared
from gattn.nn.shared.dtypes import check_dtype

__all__ = ["DegreeEncoder", "PathEncoder", "SpatialEncoder"]


class DegreeEncoder(Declared, Module):
    r"""A learnt vector for each degree, Graphormer's centrality encoding.

    The encoding of `Do Transformers Really Perform Bad for Graph Representation? <https://arxiv.org/abs/2106.05234>`_:

    .. math::
        z_i = z^-_{\min(\deg^-(i),\, D)} + z^+_{\min(\deg^+(i),\, D)}

    The parameters and results are those of `dgl.nn.DegreeEncoder`, where nodes of degree zero have a vector of zeros.

    Args:
        max_degree: The largest degree that is told apart, D.
        embedding_dim: The number of channels.
        direction: `"both"`, or `"in"` or `"out"` for a single table. (default: `"both"`)

    Shapes:
        - **input:** degrees `[2, ...]`, in-degrees first, or `[...]` for one direction.
        - **output:** `[..., embedding_dim]`.

    Raises:
        ValueError: If an option is out of range.

    Example:
        >>> import torch, gattn
        >>> from torch_geometric.data import Data
        >>> path = gattn.transforms.Degrees(max_degree=3)(Data(edge_index=torch.tensor([[0, 1], [1, 2]]), num_nodes=3))
        >>> encoder = gattn.nn.DegreeEncoder(3, 16)
        >>> encoder(torch.stack([path.in_degree, path.out_degree])).shape
        torch.Size([3, 16])
    """

    def __init__(self, max_degree: int, embedding_dim: int, direction: str = "both"):
        super().__init__()
        check_at_least(1, max_degree=max_degree, embedding_dim=embedding_dim)
        if direction not in ("both", "in", "out"):
            raise InputError(f"direction must be 'both', 'in' or 'out'; got {direction!r}.")
        self.max_degree = max_degree
        self.direction = direction
        for name in ("encoder1", "encoder2") if direction == "both" else ("encoder",):
            self.add_module(name, Embedding(max_degree + 1, embedding_dim, padding_idx=0))

    def forward(self, degrees: Tensor) -> Tensor:
        """Looks degrees up.

        Args:
            degrees: The degrees, `[2, ...]` in both directions or `[...]` in one; larger ones than D become D.

        Raises:
            TypeError: If they are not integers.
            ValueError: If both directions are needed, but there are not two.
        """
        _check_integers("degrees", degrees)
        degrees = degrees.long().clamp(0, self.max_degree)
        if self.direction != "both":
            return self.encoder(degrees)  # type: ignore[operator, no-any-return]
        if degrees.dim() == 0 or len(degrees) != 2:
            raise InputError(f"degrees must be [2, ...], in-degrees and out-degrees; got {list(degrees.shape)}.")
        return self.encoder1(degrees[0]) + self.encoder2(degrees[1])  # type: ignore[operator, no-any-return]


class SpatialEncoder(Declared, Module):
    r"""A learnt bias for each distance between nodes, Graphormer's spatial encoding, for all pairs at once.

    The encoding of `Do Transformers Really Perform Bad for Graph Representation? <https://arxiv.org/abs/2106.05234>`_:

    .. math::
        b_{ij} = t_{\min(d_{ij},\, D)}

    The parameters and results are those of `dgl.nn.SpatialEncoder`: its tensor of biases is what `BiasedMHA` adds, and
    unreachable nodes have a bias of zero (in the paper, they have a learnt one of their own; as a softmax does not
    change when a number is added to all logits, this says the same). `gattn.BucketBias` needs no such tensor.

    Args:
        max_dist: The largest distance that is told apart, D.
        num_heads: The number of heads, H. (default: `1`)

    Shapes:
        - **input:** distances `[...]`.
        - **output:** `[..., H]`.

    Raises:
        ValueError: If an option is out of range.

    Example:
        >>> import torch, gattn
        >>> encoder = gattn.nn.SpatialEncoder(max_dist=3, num_heads=4)
        >>> encoder(torch.tensor([[0, 1, 2], [1, 0, 1], [-1, -1, 0]])).shape  # -1: there is no path
        torch.Size([3, 3, 4])
    """

    def __init__(self, max_dist: int, num_heads: int = 1):
        super().__init__()
        check_at_least(1, max_dist=max_dist, num_heads=num_heads)
        self.max_dist = max_dist
        self.num_heads = num_heads
        self.embedding_table = Embedding(max_dist + 2, num_heads, padding_idx=0)

    def forward(self, dist: Tensor) -> Tensor:
        """Looks distances up.

        Args:
            dist: The distances, `[...]`; -1 where there is no path.

        Raises:
            TypeError: If they are not integers.
        """
        _check_integers("dist", dist)
        return self.embedding_table(dist.long().clamp(-1, self.max_dist) + 1)  # type: ignore[no-any-return]


class PathEncoder(Declared, Module):
    r"""A learnt bias of the edges along the shortest path between two nodes, Graphormer's edge encoding.

    The encoding of `Do Transformers Really Perform Bad for Graph Representation? <https://arxiv.org/abs/2106.05234>`_:
    with the edges :math:`e_1, e_2, \dots` on a shortest path, counted from the target i, of which the first L count,

    .. math::
        c_{ij} = \frac{1}{\min(d_{ij},\, L)} \sum_{n=1}^{\min(d_{ij},\, L)} w_n^\top e_n

    The parameters and results are those of `dgl.nn.PathEncoder`, which takes the features along all paths,
    `[B, N, N, L, D]`. Here, paths are the numbers of their edges, and the products :math:`w_n^\top e` are made once for
    each edge.

    Args:
        max_len: The number of edges that count, L.
        feat_dim: The number of features of an edge, D.
        num_heads: The number of heads, H. (default: `1`)

    Shapes:
        - **input:** paths `[..., L]`, edge features `[E, D]`.
        - **output:** `[..., H]`.

    Raises:
        ValueError: If an option is out of range.

    Example:
        >>> import torch, gattn
        >>> encoder = gattn.nn.PathEncoder(max_len=2, feat_dim=8, num_heads=4)
        >>> paths = torch.tensor([[-1, -1], [0, -1], [1, 0]])  # to itself, along edge 0, and along edges 1 and 0
        >>> encoder(paths, torch.randn(2, 8)).shape
        torch.Size([3, 4])
    """

    def __init__(self, max_len: int, feat_dim: int, num_heads: int = 1):
        super().__init__()
        check_at_least(1, max_len=max_len, feat_dim=feat_dim, num_heads=num_heads)
        self.max_len = max_len
        self.feat_dim = feat_dim
        self.num_heads = num_heads
        self.embedding_table = Embedding(max_len * num_heads, feat_dim)

    def forward(self, paths: Tensor, edge_attr: Tensor) -> Tensor:
        """Averages the products along each path.

        Args:
            paths: The numbers of the edges along each path, `[..., L]` or fewer, and -1 beyond its end, such as the
                `pair_paths` of `gattn.transforms.ShortestPathBuckets`.
            edge_attr: The features of the edges, `[E, D]`.

        Returns:
            The biases, `[..., H]`; zeros for paths without edges.

        Raises:
            TypeError: If paths are not integers, or `edge_attr` is not a tensor.
            ValueError: If shapes do not fit.
            IndexError: If there is no such edge.
        """
        _check_integers("paths", paths)
        if not isinstance(edge_attr, Tensor):
            raise InputTypeError(f"edge_attr must be a tensor; got {type(edge_attr).__name__}.")
        if edge_attr.dim() != 2 or edge_attr.size(1) != self.feat_dim:
            raise InputError(f"edge_attr must be [E, {self.feat_dim}]; got {list(edge_attr.shape)}.")
        if paths.dim() == 0 or paths.size(-1) > self.max_len:
            raise InputError(f"paths must be [..., L] with up to {self.max_len} edges; got {list(paths.shape)}.")
        check_dtype(self, edge_attr=edge_attr)
        products = (edge_attr @ self.embedding_table.weight.t()).view(-1, self.max_len, self.num_heads)
        flat = paths.flatten(0, -2) if paths.dim() > 1 else paths.unsqueeze(0)
        is_edge = flat >= 0
        if torch.compiler.is_compiling():  # which does not know how many edges all paths have
            places = flat.long().clamp(min=0) * self.max_len + torch.arange(flat.size(1), device=flat.device)
            on_paths = products.flatten(0, 1)[places]
            sums = on_paths.masked_fill(~is_edge.unsqueeze(-1), 0.0).sum(1)
        else:
            path, place = is_edge.nonzero().unbind(1)
            on_paths = products.flatten(0, 1).index_select(0, flat[path, place].long() * self.max_len + place)
            sums = on_paths.new_zeros(flat.size(0), self.num_heads).index_add(0, path, on_paths)
        lengths = is_edge.sum(1, keepdim=True).clamp(min=1)
        return (sums / lengths).view(*paths.shape[:-1], self.num_heads)


def _check_integers(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype not in INTEGER_DTYPES:
        raise InputTypeError(f"{name} must be a tensor of integers; got {getattr(tensor, 'dtype', tensor)}.")
