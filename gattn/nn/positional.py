"""Positions: where a token stands in its sequence, and where a node stands in its graph."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding, Linear, Module
from torch_geometric.data import Data
from torch_geometric.transforms import AddLaplacianEigenvectorPE, AddRandomWalkPE


class SinusoidalPositionalEncoding(Module):
    r"""Adds the sines and cosines of `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_.

    .. math::
        PE_{t, 2i} = \sin(t / 10000^{2i / E}), \qquad PE_{t, 2i+1} = \cos(t / 10000^{2i / E})

    Args:
        channels: Channels of the model, E.
        dropout: Probability that an element of the sum is dropped, in training. (default: `0.0`)
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

    def __init__(self, channels: int, dropout: float = 0.0, base: float = 10000.0):
        super().__init__()
        if channels < 1:
            raise ValueError(f"channels must be at least 1; got {channels}.")
        self.channels = channels
        self.base = base
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x: Tensor, first: int = 0) -> Tensor:
        """Adds the encoding of places `first`, `first + 1`, ... to `[..., T, E]`."""
        return self.dropout(x + self.encoding(torch.arange(first, first + x.size(-2), device=x.device)).to(x.dtype))

    def encoding(self, places: Tensor) -> Tensor:
        """The encoding of any places, `[..., E]` for places `[...]`; computed in float64."""
        angles = _angles(places, self.channels, self.base)
        return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[..., : self.channels]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.channels})"


class LearnedPositionalEncoding(Module):
    """Adds a learnt vector for each place.

    Args:
        num_positions: Number of places there are.
        channels: Channels of the model, E.

    Shapes:
        - **input:** `[..., T, E]`; **output:** the same.

    Raises:
        ValueError: If a sequence is longer than there are places.

    Example:
        >>> import torch, gattn
        >>> gattn.nn.LearnedPositionalEncoding(16, 4)(torch.zeros(3, 5, 4)).shape
        torch.Size([3, 5, 4])
    """

    def __init__(self, num_positions: int, channels: int):
        super().__init__()
        self.embedding = Embedding(num_positions, channels)

    def forward(self, x: Tensor, first: int = 0) -> Tensor:
        """Adds the vectors of places `first`, `first + 1`, ... to `[..., T, E]`."""
        last = first + x.size(-2)
        if last > self.embedding.num_embeddings:
            raise ValueError(
                f"there are {self.embedding.num_embeddings} learnt positions, but the sequence goes on to {last}: make "
                "the layer with more, or use positions that need no learning."
            )
        return x + self.embedding.weight[first:last]


class RotaryPositionalEncoding(Module):
    r"""Rotates queries and keys by their places: `RoFormer <https://arxiv.org/abs/2104.09864>`_.

    .. math::
        (x_{2i}, x_{2i+1}) \mapsto R(t \, \theta_i) \, (x_{2i}, x_{2i+1}), \qquad \theta_i = 10000^{-2i / C}

    so that a query's product with a key depends on how far apart they are, not on where.

    Args:
        channels: Channels of a head, C; an even number.
        base: The base of the wavelengths. (default: `10000.0`)

    Shapes:
        - **input:** `[..., T, H, C]`; **output:** the same.

    Raises:
        ValueError: If the number of channels is odd.

    Example:
        >>> import torch, gattn
        >>> rotary = gattn.nn.RotaryPositionalEncoding(2)
        >>> rotary(torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]])).squeeze(1)  # places 0 and 1
        tensor([[1.0000, 0.0000],
                [0.5403, 0.8415]])
    """

    def __init__(self, channels: int, base: float = 10000.0):
        super().__init__()
        if channels < 2 or channels % 2 != 0:
            raise ValueError(f"pairs of channels are rotated, so their number is even; got {channels}.")
        self.channels = channels
        self.base = base

    def forward(self, x: Tensor, places: Tensor | None = None) -> Tensor:
        """Rotates `[..., T, H, C]` by places `[T]` (0, 1, 2, ... if `None`)."""
        if x.size(-1) != self.channels:
            raise ValueError(f"heads have {x.size(-1)} channels, but these positions were made for {self.channels}.")
        if places is None:
            places = torch.arange(x.size(-3), device=x.device)
        angles = _angles(places, self.channels, self.base).unsqueeze(-2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.channels})"


def _angles(places: Tensor, channels: int, base: float) -> Tensor:
    """Each place times each frequency, `[..., C / 2]`, in float64: large places lose their sines in float32."""
    exponents = torch.arange(0, channels, 2, device=places.device, dtype=torch.float64) / channels
    return places.unsqueeze(-1) * base**-exponents


class RelativePosition(Module):
    """Base class of positions that add a bias to each logit, given how far the source is from the target."""

    def forward(self, distance: Tensor) -> Tensor:
        """The bias of each head, `[..., H]`, for distances source − target `[...]`."""
        raise NotImplementedError(f"{type(self).__name__} does not define forward().")


class ALiBi(RelativePosition):
    r"""A penalty that grows with distance: `Train Short, Test Long <https://arxiv.org/abs/2108.12409>`_.

    .. math::
        b_{ij} = -m_h \, |i - j|, \qquad m_h = 2^{-8h / H} \text{ for } h = 1, \ldots, H

    Where H is no power of two, slopes of the next larger one are interleaved, as the authors' code does.

    Args:
        heads: Number of heads, H.

    Example:
        >>> import torch, gattn
        >>> gattn.nn.ALiBi(2)(torch.tensor([0, -1]))
        tensor([[ 0.0000,  0.0000],
                [-0.0625, -0.0039]])
    """

    slopes: Tensor

    def __init__(self, heads: int):
        super().__init__()
        if heads < 1:
            raise ValueError(f"heads must be at least 1; got {heads}.")
        power = 2 ** math.floor(math.log2(heads))
        slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
        slopes += [2 ** (-4 * h / power) for h in range(1, 2 * power, 2)][: heads - power]
        self.register_buffer("slopes", torch.tensor(slopes), persistent=False)

    def forward(self, distance: Tensor) -> Tensor:
        """See `RelativePosition.forward`."""
        return -distance.abs().unsqueeze(-1) * self.slopes


class RelativePositionBias(RelativePosition):
    r"""A learnt bias for each distance.

    After `Shaw et al. <https://arxiv.org/abs/1803.02155>`_ and `T5 <https://arxiv.org/abs/1910.10683>`_:

    .. math::
        b_{ij} = w_{h, \, \mathrm{clip}(j - i, -D, D)}

    Args:
        heads: Number of heads, H.
        max_distance: The largest distance that has a bias of its own, D.

    Example:
        >>> import torch, gattn
        >>> gattn.nn.RelativePositionBias(4, max_distance=8)(torch.tensor([[0, 1], [-1, 0]])).shape
        torch.Size([2, 2, 4])
    """

    def __init__(self, heads: int, max_distance: int):
        super().__init__()
        if heads < 1 or max_distance < 0:
            raise ValueError(f"heads is at least 1 and max_distance at least 0; got {heads} and {max_distance}.")
        self.max_distance = max_distance
        self.weight = torch.nn.Parameter(torch.empty(2 * max_distance + 1, heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the biases anew."""
        torch.nn.init.normal_(self.weight, std=0.02)

    def forward(self, distance: Tensor) -> Tensor:
        """See `RelativePosition.forward`."""
        return self.weight[distance.clamp(-self.max_distance, self.max_distance) + self.max_distance]


class GraphPositionalEncoding(Module):
    r"""Adds where a node stands in its graph, by a learnt linear map.

    `"laplacian"`: the first k non-trivial eigenvectors of the graph's Laplacian (`Dwivedi and Bresson
    <https://arxiv.org/abs/2012.09699>`_), whose signs mean nothing and are drawn anew in training. `"random_walk"`: the
    probabilities to be back after 1, ..., k steps (`Dwivedi et al. <https://arxiv.org/abs/2110.07875>`_). Both by PyG's
    transforms.

    Args:
        kind: `"laplacian"` or `"random_walk"`.
        k: Number of eigenvectors or steps.
        channels: Channels of the features, F.
        random_signs: Whether the signs of eigenvectors are drawn anew in training: right for many graphs, while on a
            single one it hides where a node is. (default: `True`)

    Shapes:
        - **input:** features `[N, F]`, and `structure` `[N, k]` as `compute` gives it; **output:** `[N, F]`.

    Raises:
        ValueError: If the kind is unknown, or k is not positive.

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
            raise ValueError(f"kind is 'laplacian' or 'random_walk', not {kind!r}.")
        if k < 1:
            raise ValueError(f"k must be at least 1; got {k}.")
        self.kind = kind
        self.k = k
        self.random_signs = random_signs
        self.lin = Linear(k, channels)

    def compute(self, edge_index: Tensor, num_nodes: int) -> Tensor:
        """What a graph's structure says of each node, `[N, k]`: to be computed once and kept.

        Args:
            edge_index: `[2, E]`.
            num_nodes: N.

        Raises:
            ValueError: If the graph has too few nodes for so many eigenvectors.
        """
        if self.kind == "laplacian" and num_nodes <= self.k:
            raise ValueError(f"a graph of {num_nodes} nodes has fewer than {self.k} non-trivial eigenvectors.")
        kinds: dict[str, Any] = {"laplacian": AddLaplacianEigenvectorPE, "random_walk": AddRandomWalkPE}
        transform = kinds[self.kind](self.k, attr_name="structure")
        return transform(Data(edge_index=edge_index, num_nodes=num_nodes)).structure

    def forward(self, x: Tensor, structure: Tensor) -> Tensor:
        """Adds the projected structure `[N, k]` to features `[..., N, F]`."""
        if self.kind == "laplacian" and self.random_signs and self.training:
            signs = torch.randint(0, 2, (structure.size(-1),), device=structure.device) * 2 - 1
            structure = structure * signs
        return x + self.lin(structure.to(x.dtype))
