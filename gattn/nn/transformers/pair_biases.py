"""Modules that make a bias of positions: radial functions of distances, and networks of differences.

Dimensions: N nodes, S dimensions of space, K radial functions, H heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from gattn.errors import InputError, check_at_least, check_flag, check_number
from gattn.nn.shared.declared import Declared
from gattn.nn.shared.dtypes import check_dtype
from gattn.nn.shared.linear import Linear
from gattn.ops.radial import radial
from gattn.pair_bias import PairBias

__all__ = ["MLPBias", "RadialBias"]


class RadialBias(Declared, Module):
    r"""A bias by distance: radial functions of the distance of two nodes, times a matrix.

    As in `SchNet <https://arxiv.org/abs/1706.08566>`_ (Gaussian functions) and `DimeNet
    <https://arxiv.org/abs/2003.03123>`_ (Bessel functions), for distances d up to a cut-off c:

    .. math::
        b_{ij} = \sum_k w_k\, \phi_k(\lVert r_i - r_j \rVert), \qquad
        \phi_k(d) = e^{-(d - \mu_k)^2 / 2 \sigma^2} \quad \text{or} \quad
        \sqrt{\frac{2}{c}}\, \frac{\sin(k \pi d / c)}{d}

    with centres :math:`\mu_k` from 0 to c, :math:`\sigma` their distance, and learnt factors in Bessel functions'
    sines, which start at :math:`k \pi / c`. A distance of zero has the limit of the function, and no gradient.

    Args:
        heads: The number of heads, H.
        num_radial: The number of radial functions, K. (default: `16`)
        cutoff: The cut-off, in the positions' unit. (default: `10.0`)
        basis: `"gaussian"` or `"bessel"`. (default: `"gaussian"`)

    Shapes:
        - **input:** positions `[N, S]`, or `[B, N, S]` for each element of a batch.
        - **output:** a `gattn.PairBias`.

    Raises:
        ValueError: If an option is out of range.

    Example:
        >>> import torch, gattn
        >>> bias, position = gattn.nn.RadialBias(heads=2), torch.randn(5, 3)  # 5 atoms
        >>> x = torch.randn(5, 2, 8)
        >>> gattn.attend(x, x, x, gattn.CompleteGraph(5), bias=bias(position)).shape
        torch.Size([5, 2, 8])
    """

    _shown = "heads num_radial= cutoff= basis="

    def __init__(self, heads: int, num_radial: int = 16, cutoff: float = 10.0, basis: str = "gaussian"):
        super().__init__()
        check_at_least(1, heads=heads, num_radial=num_radial)
        check_number("cutoff", cutoff, "positive and finite")
        if basis not in ("gaussian", "bessel"):
            raise InputError(f"basis must be 'gaussian' or 'bessel'; got {basis!r}.")
        self.heads, self.num_radial, self.cutoff, self.basis = heads, num_radial, cutoff, basis
        self.kernel = _Radial(heads, num_radial, cutoff, basis)

    def forward(self, position: Tensor, sources: Tensor | None = None) -> PairBias:
        """Makes the bias.

        Args:
            position: The positions of the targets.
            sources: Those of the sources. (default: `None`, the same)

        Returns:
            The bias, for `gattn.attend(..., bias=...)` and `attn_bias` of layers.

        Raises:
            TypeError: If positions are not tensors of floating-point numbers.
            ValueError: If they have other dimensions.
        """
        bias = PairBias(self.kernel, position, sources)
        _check(self, bias, position.size(-1))
        return bias


class _Radial(Module):
    """Radial functions of distances, times a matrix."""

    #: How many numbers are in memory for each pair and head: the bias, and its gradient.
    cost = 4

    def __init__(self, heads: int, num_radial: int, cutoff: float, basis: str):
        super().__init__()
        self.cutoff, self.basis = cutoff, basis
        self.factor = Parameter(torch.empty(num_radial))
        self.weight = Parameter(torch.empty(num_radial, heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Resets all parameters."""
        count = self.factor.numel()
        with torch.no_grad():
            if self.basis == "gaussian":
                self.factor.copy_(torch.linspace(0, self.cutoff, count))
            else:
                self.factor.copy_(torch.arange(1, count + 1) * (math.pi / self.cutoff))
            self.weight.uniform_(-(count**-0.5), count**-0.5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        tensors = x, y, self.factor, self.weight
        return radial(*tensors, self.cutoff, self.basis == "bessel").movedim(-3, -1)


class MLPBias(Declared, Module):
    r"""A bias by a network of the difference of two positions.

    As `Swin Transformer V2 <https://arxiv.org/abs/2111.09883>`_ has it for windows of images, and `Point Transformer
    <https://arxiv.org/abs/2012.09164>`_ for points, with log-spaced coordinates or plain ones:

    .. math::
        b_{ij} = W_2\, \mathrm{ReLU}\big(W_1\, g(r_i - r_j) + b_1\big), \qquad
        g(d) = \mathrm{sign}(d) \log(1 + |d|) \quad \text{or} \quad g(d) = d

    Args:
        heads: The number of heads, H.
        dim: The number of dimensions, S. (default: `2`)
        hidden_channels: The width of the network. (default: `512`)
        log_spaced: Whether coordinates are log-spaced. (default: `True`)

    Shapes:
        - **input:** positions `[N, S]`, or `[B, N, S]` for each element of a batch.
        - **output:** a `gattn.PairBias`.

    Raises:
        TypeError: If `log_spaced` is neither true nor false.
        ValueError: If a number is not positive.

    Example:
        >>> import torch, gattn
        >>> bias, x = gattn.nn.MLPBias(heads=2, hidden_channels=32), torch.randn(16, 2, 8)
        >>> position = torch.cartesian_prod(torch.arange(4.0), torch.arange(4.0))  # 4 by 4 patches
        >>> gattn.attend(x, x, x, gattn.CompleteGraph(16), bias=bias(position)).shape
        torch.Size([16, 2, 8])
    """

    _shown = "heads dim= hidden_channels="

    def __init__(self, heads: int, dim: int = 2, hidden_channels: int = 512, log_spaced: bool = True):
        super().__init__()
        check_at_least(1, heads=heads, dim=dim, hidden_channels=hidden_channels)
        check_flag("log_spaced", log_spaced)
        self.heads, self.dim, self.hidden_channels = heads, dim, hidden_channels
        self.kernel = _Differences(heads, dim, hidden_channels, log_spaced)

    def forward(self, position: Tensor, sources: Tensor | None = None) -> PairBias:
        """Makes the bias.

        Args:
            position: The positions of the targets.
            sources: Those of the sources. (default: `None`, the same)

        Returns:
            The bias, for `gattn.attend(..., bias=...)` and `attn_bias` of layers.

        Raises:
            TypeError: If positions are not tensors of floating-point numbers.
            ValueError: If they have other dimensions.
        """
        bias = PairBias(self.kernel, position, sources)
        _check(self, bias, self.dim)
        return bias


class _Differences(Module):
    """A network of differences. Its first layer is linear, so it is applied to positions where these are not warped."""

    def __init__(self, heads: int, dim: int, hidden_channels: int, log_spaced: bool):
        super().__init__()
        self.log_spaced = log_spaced
        self.lin1 = Linear(dim, hidden_channels)
        self.lin2 = Linear(hidden_channels, heads, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.log_spaced:
            difference = x.unsqueeze(-2) - y.unsqueeze(-3)
            hidden = self.lin1(difference.sign() * difference.abs().log1p())
        else:
            hidden = self.lin1(x).unsqueeze(-2) - torch.nn.functional.linear(y, self.lin1.weight).unsqueeze(-3)
        found: Tensor = self.lin2(hidden.relu())
        return found


def _check(module: Module, bias: PairBias, dim: int) -> None:
    for name, positions in (("position", bias.x), ("sources", bias.y)):
        if positions is not None and positions.size(-1) != dim:
            raise InputError(f"{name} must have {dim} coordinates; got {list(positions.shape)}.")
        check_dtype(module, **{name: positions})
