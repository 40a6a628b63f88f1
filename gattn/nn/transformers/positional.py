"""Positional encodings: of tokens in their sequence, and of nodes in their graph.

Dimensions: T tokens, N nodes, H heads, C channels of a head, E channels of the model.
"""

from __future__ import annotations

import math
import warnings
from functools import partial

import torch
from torch import Tensor
from torch.nn import Embedding, Linear, Module
from torch_geometric.utils import remove_self_loops

from gattn.errors import check_at_least
from gattn.graphs.edge_lists import plain
from gattn.nn.shared.declared import Declared
from gattn.nn.shared.dropout import Dropout
from gattn.structure import LARGEST_DENSE, graph_numbers, laplacian_eigenvectors, num_components, returns

__all__ = [
    "ALiBi",
    "GraphPositionalEncoding",
    "LearnedPositionalEncoding",
    "RelativePosition",
    "RelativePositionBias",
    "RotaryPositionalEncoding",
    "SinusoidalPositionalEncoding",
]

#: Graphs of up to this many nodes are solved as dense matrices, and larger ones as sparse matrices.
_LARGEST_DENSE = LARGEST_DENSE


class SinusoidalPositionalEncoding(Declared, Module):
    r"""Adds sines and cosines of the positions, as in `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_.

    .. math::
        PE_{t, 2i} = \sin(t / 10000^{2i / E}), \qquad PE_{t, 2i+1} = \cos(t / 10000^{2i / E})

    Args:
        channels: The number of channels of the model, E.
        dropout: The probability of dropping an element of the sum during training. (default: `0.0`)
        base: The base of the wavelengths. (default: `10000.0`)

    Shapes:
        - **input:** `[..., T, E]`; **output:** the same.

    Raises:
        ValueError: If the number of channels is not positive.

    Example:
        >>> import torch, gattn
        >>> gattn.nn.SinusoidalPositionalEncoding(4)(torch.zeros(2, 4))
        tensor([[0.0000, 1.0000, 0.0000, 1.0000],
                [0.8415, 0.5403, 0.0100, 0.9999]])
    """

    _shown = "channels"

    def __init__(self, channels: int, dropout: float = 0.0, base: float = 10000.0):
        super().__init__()
        check_at_least(1, channels=channels)
        self.channels = channels
        self.base = base
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, first: int = 0) -> Tensor:
        """Adds the encodings of the positions `first`, `first + 1`, ... to `[..., T, E]`.

        Args:
            x: The features, `[..., T, E]`.
            first: The position of the first token. (default: `0`)
        """
        positions = torch.arange(first, first + x.size(-2), device=x.device)
        out: Tensor = self.dropout(x + self.encoding(positions).to(x.dtype))
        return out

    def encoding(self, places: Tensor) -> Tensor:
        """Returns the encodings `[..., E]` of any positions `[...]`, computed in float64."""
        angles = _angles(places, self.channels, self.base)
        return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[..., : self.channels]


class LearnedPositionalEncoding(Declared, Module):
    r"""Adds a learnt vector for each position.

    This is the encoding of `Convolutional Sequence to Sequence Learning <https://arxiv.org/abs/1705.03122>`_:

    .. math::
        x'_t = x_t + w_t

    Args:
        num_positions: The number of positions, which is the length of the longest sequence.
        channels: The number of channels of the model, E.

    Shapes:
        - **input:** `[..., T, E]`; **output:** the same.

    Raises:
        ValueError: If a sequence is longer than the number of positions (in `forward`).

    Example:
        >>> import torch, gattn
        >>> gattn.nn.LearnedPositionalEncoding(16, 4)(torch.zeros(3, 5, 4)).shape
        torch.Size([3, 5, 4])
    """

    def __init__(self, num_positions: int, channels: int):
        super().__init__()
        self.num_positions = num_positions
        self.embedding = Embedding(num_positions, channels)

    def forward(self, x: Tensor, first: int = 0) -> Tensor:
        """Adds the vectors of the positions `first`, `first + 1`, ... to `[..., T, E]`.

        Args:
            x: The features, `[..., T, E]`.
            first: The position of the first token. (default: `0`)

        Raises:
            ValueError: If there are not enough positions.
        """
        last = first + x.size(-2)
        if last > self.num_positions:
            raise ValueError(
                f"there are {self.num_positions} learnt positions, but the sequence extends to {last}: make "
                "the layer with more positions, or use an encoding that is not learnt."
            )
        out: Tensor = x + self.embedding(torch.arange(first, last, device=x.device))
        return out


class RotaryPositionalEncoding(Declared, Module):
    r"""Rotates queries and keys by their positions, as in `RoFormer <https://arxiv.org/abs/2104.09864>`_.

    .. math::
        (x_{2i}, x_{2i+1}) \mapsto R(t \, \theta_i) \, (x_{2i}, x_{2i+1}), \qquad \theta_i = 10000^{-2i / C}

    so that the product of a query and a key depends only on the difference of their positions.

    Args:
        channels: The number of channels of a head, C, which must be even.
        base: The base of the wavelengths. (default: `10000.0`)

    Shapes:
        - **input:** `[..., T, H, C]`; **output:** the same.

    Raises:
        ValueError: If the number of channels is odd.

    Example:
        >>> import torch, gattn
        >>> rotary = gattn.nn.RotaryPositionalEncoding(2)
        >>> rotary(torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]])).squeeze(1)  # positions 0 and 1
        tensor([[1.0000, 0.0000],
                [0.5403, 0.8415]])
    """

    _shown = "channels"

    def __init__(self, channels: int, base: float = 10000.0):
        super().__init__()
        if channels < 2 or channels % 2 != 0:
            raise ValueError(f"channels are rotated in pairs, so their number must be even; got {channels}.")
        self.channels = channels
        self.base = base

    def forward(self, x: Tensor, places: Tensor | None = None) -> Tensor:
        """Rotates queries or keys.

        Args:
            x: The queries or keys, `[..., T, H, C]`.
            places: The position of each of them, `[T]`. (default: `None`, 0, 1, 2, ...)

        Raises:
            ValueError: If heads have a different number of channels.
        """
        if x.size(-1) != self.channels:
            raise ValueError(f"heads have {x.size(-1)} channels, but these positions were made for {self.channels}.")
        if places is None:
            places = torch.arange(x.size(-3), device=x.device)
        angles = _angles(places, self.channels, self.base).unsqueeze(-2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


def _angles(places: Tensor, channels: int, base: float) -> Tensor:
    """Each position times each frequency, `[..., C / 2]`, in float64 for the sake of large angles."""
    exponents = torch.arange(0, channels, 2, device=places.device, dtype=torch.float64) / channels
    return places.unsqueeze(-1) * base**-exponents


class RelativePosition(Module):
    r"""The base class of encodings that add a bias to each logit, given the distance from the target to the source.

    .. math::
        \alpha_{ij} = \mathrm{softmax}_j(s_{ij} + b_h(j - i))

    To add one, override :meth:`forward`. Such biases are used by `T5 <https://arxiv.org/abs/1910.10683>`_, among
    others.

    Shapes:
        - **input:** distances `[...]`, integers; **output:** biases `[..., H]`.

    Raises:
        NotImplementedError: If the subclass does not define :meth:`forward`.

    Example:
        >>> import torch, gattn
        >>> class Near(gattn.nn.RelativePosition):  # prefers the nearest tokens, equally in both heads
        ...     def forward(self, distance):
        ...         return -distance.abs().unsqueeze(-1).expand(*distance.shape, 2).float()
        >>> attention, x = gattn.nn.MultiheadAttention(8, 2, position=Near()), torch.randn(5, 8)
        >>> attention(x, x, x)[0].shape
        torch.Size([5, 8])
    """

    def forward(self, distance: Tensor) -> Tensor:
        """Returns the bias of each head, `[..., H]`, for distances source − target `[...]`."""
        raise NotImplementedError(f"{type(self).__name__} does not define forward().")


class ALiBi(Declared, RelativePosition):
    r"""A penalty that grows with distance: `Train Short, Test Long <https://arxiv.org/abs/2108.12409>`_.

    .. math::
        b_{ij} = -m_h \, |i - j|, \qquad m_h = 2^{-8h / H} \text{ for } h = 1, \ldots, H

    If H is not a power of two, the remaining slopes are those of the next power of two, as in the authors' code.

    Args:
        heads: The number of heads, H.

    Shapes:
        - **input:** distances `[...]`, integers; **output:** biases `[..., H]`.

    Raises:
        ValueError: If `heads` is not positive.

    Example:
        >>> import torch, gattn
        >>> gattn.nn.ALiBi(2)(torch.tensor([0, -1]))
        tensor([[ 0.0000,  0.0000],
                [-0.0625, -0.0039]])
    """

    slopes: Tensor

    def __init__(self, heads: int):
        super().__init__()
        check_at_least(1, heads=heads)
        power = 2 ** math.floor(math.log2(heads))
        slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
        slopes += [2 ** (-4 * h / power) for h in range(1, 2 * power, 2)][: heads - power]
        self.register_buffer("slopes", torch.tensor(slopes), persistent=False)

    def forward(self, distance: Tensor) -> Tensor:
        """Returns the bias of each head, `[..., H]`, for distances source − target `[...]`."""
        return -distance.abs().unsqueeze(-1) * self.slopes


class RelativePositionBias(Declared, RelativePosition):
    r"""A learnt bias for each distance.

    .. math::
        b_{ij} = w_{h, \, \mathrm{clip}(j - i, -D, D)}

    `T5 <https://arxiv.org/abs/1910.10683>`_ adds such numbers to the logits, for buckets of distances. Clipping follows
    `Shaw et al. <https://arxiv.org/abs/1803.02155>`_, who add vectors to the keys and values instead.

    Args:
        heads: The number of heads, H.
        max_distance: The largest distance with a bias of its own, D. Larger distances share the bias of D.

    Shapes:
        - **input:** distances `[...]`, integers; **output:** biases `[..., H]`.

    Raises:
        ValueError: If `heads` is not positive, or `max_distance` is negative.

    Example:
        >>> import torch, gattn
        >>> gattn.nn.RelativePositionBias(4, max_distance=8)(torch.tensor([[0, 1], [-1, 0]])).shape
        torch.Size([2, 2, 4])
    """

    _starts = (("weight", partial(torch.nn.init.normal_, std=0.02)),)

    def __init__(self, heads: int, max_distance: int):
        super().__init__()
        check_at_least(1, heads=heads)
        check_at_least(0, max_distance=max_distance)
        self.max_distance = max_distance
        self.weight = torch.nn.Parameter(torch.empty(2 * max_distance + 1, heads))
        self.reset_parameters()

    def forward(self, distance: Tensor) -> Tensor:
        """Returns the bias of each head, `[..., H]`, for distances source − target `[...]`."""
        return self.weight[distance.clamp(-self.max_distance, self.max_distance) + self.max_distance]


class GraphPositionalEncoding(Declared, Module):
    r"""Adds an encoding of the position of each node in its graph, through a learnt linear map.

    `"laplacian"`: the first k non-trivial eigenvectors of the graph's Laplacian (`Dwivedi and Bresson
    <https://arxiv.org/abs/2012.09699>`_), whose signs have no meaning and are flipped at random during training.
    `"random_walk"`: the probabilities that a random walk is back at the node after 1, ..., k steps (`Dwivedi et al.
    <https://arxiv.org/abs/2110.07875>`_). Both are those of PyG's transforms, except that PyG's random walk counts
    parallel edges once; for the graphs of a PyG batch, `compute` takes the vector `batch`.

    Args:
        kind: The encoding, `"laplacian"` or `"random_walk"`.
        k: The number of eigenvectors or steps.
        channels: The number of channels of the features, F.
        random_signs: Whether to flip the signs of eigenvectors at random during training. This helps with many graphs,
            but on a single graph it hides the position of a node. (default: `True`)

    Shapes:
        - **input:** features `[N, F]` and the structure `[N, k]` that `compute` returns; **output:** `[N, F]`.

    Raises:
        ValueError: If `kind` is unknown, or `k` is not positive.

    Example:
        >>> import torch, gattn
        >>> ring = torch.tensor([[0, 1, 2, 3, 1, 2, 3, 0], [1, 2, 3, 0, 0, 1, 2, 3]])
        >>> encoding = gattn.nn.GraphPositionalEncoding("random_walk", k=2, channels=8)
        >>> structure = encoding.compute(ring, num_nodes=4)
        >>> structure[0]
        tensor([0.0000, 0.5000])
        >>> encoding(torch.randn(4, 8), structure).shape
        torch.Size([4, 8])
    """

    def __init__(self, kind: str, k: int, channels: int, random_signs: bool = True):
        super().__init__()
        if kind not in ("laplacian", "random_walk"):
            raise ValueError(f"kind must be 'laplacian' or 'random_walk', not {kind!r}.")
        check_at_least(1, k=k)
        self.kind = kind
        self.k = k
        self.random_signs = random_signs
        self.lin = Linear(k, channels)

    def compute(self, edge_index: Tensor, num_nodes: int, batch: Tensor | None = None) -> Tensor:
        """Computes the encoding of each node, `[N, k]`, which does not change and can be stored.

        A graph of n nodes has n - 1 non-trivial eigenvectors; if these are fewer than k, the remaining columns are
        zeros. The sign of each eigenvector is random, as in PyG. Without `batch`, a graph that is not connected causes
        a warning, because it may be several graphs: their common eigenvectors would only tell them apart. A random walk
        takes each of a node's edges with the same probability, also if several of them lead to the same node.

        Args:
            edge_index: The edges, `[2, E]`; for `"laplacian"`, each in both directions.
            num_nodes: The number of nodes, N.
            batch: The graph of each node, `[N]`, in any order. Each graph has eigenvectors of its own; random walks
                are the same without it. (default: `None`, a single graph)

        Raises:
            ValueError: If `batch` does not hold the graph of each node, or an edge joins nodes of two graphs.
        """
        edge_index = plain(edge_index).long()
        graphs = graph_numbers(edge_index, num_nodes, batch)
        if self.kind == "random_walk":
            return returns(edge_index, num_nodes, self.k)
        edge_index = remove_self_loops(edge_index)[0]
        if batch is None and (count := num_components(edge_index, num_nodes)) > 1:
            warnings.warn(
                f"this graph has {count} components with edges, so its first {count - 1} eigenvectors only tell these "
                "apart. If they are the graphs of a batch, pass batch, the graph of each node; if they are one graph, "
                "pass zeros as batch to silence this warning.",
                stacklevel=2,
            )
        structure = laplacian_eigenvectors(
            edge_index.cpu(), graphs.cpu(), self.k, random_signs=True, largest_dense=_LARGEST_DENSE
        )
        return structure.to(edge_index.device)

    def forward(self, x: Tensor, structure: Tensor) -> Tensor:
        """Adds the projected encoding to features.

        Args:
            x: The features, `[..., N, F]`.
            structure: The encoding, `[N, k]`.
        """
        if self.kind == "laplacian" and self.random_signs and self.training:
            signs = torch.randint(0, 2, (structure.size(-1),), device=structure.device) * 2 - 1
            structure = structure * signs
        out: Tensor = x + self.lin(structure.to(x.dtype))
        return out
