"""Comparisons, random graphs and invariance checks, for the tests of gattn and for your own.

Example:
    >>> import torch, gattn
    >>> from gattn.testing import assert_permutation_equivariant, random_edge_index
    >>> edge_index = random_edge_index(num_sources=10, num_edges=30, seed=0)
    >>> assert_permutation_equivariant(gattn.nn.GATConv(4, 8), torch.randn(10, 4), edge_index)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["assert_as_exact_as", "assert_permutation_equivariant", "random_edge_index"]


def random_edge_index(
    num_sources: int, num_targets: int | None = None, num_edges: int = 0, *, hub: float = 0.0, seed: int = 0
) -> Tensor:
    """A random graph with the features of real ones: duplicate edges, self-loops and isolated nodes.

    Args:
        num_sources: M.
        num_targets: N. (default: M)
        num_edges: E. (default: `0`)
        hub: Share of all edges that point to target 0. (default: `0.0`)
        seed: Seed of the generator, which is separate from PyTorch's. (default: `0`)

    Returns:
        `[2, E]`, sources above targets. The last target has no neighbour, if there is more than one target.

    Example:
        >>> from gattn.testing import random_edge_index
        >>> edge_index = random_edge_index(num_sources=10, num_edges=30, hub=0.5)
        >>> edge_index.shape, int(edge_index[1].max()) < 9
        (torch.Size([2, 30]), True)
    """
    num_targets = num_sources if num_targets is None else num_targets
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    sources = torch.randint(num_sources, (num_edges,), generator=generator)
    targets = torch.randint(max(num_targets - 1, 1), (num_edges,), generator=generator)
    targets[torch.rand(num_edges, generator=generator) < hub] = 0
    return torch.stack([sources, targets])


def assert_as_exact_as(
    actual: Tensor,
    peer: Tensor,
    exact: Tensor,
    *,
    factor: float = 4.0,
    scale: float | None = None,
    name: str = "result",
) -> None:
    r"""Asserts that `actual` is no further from the exact result than a peer is, up to a small factor.

    .. math::
        \max |\mathrm{actual} - \mathrm{exact}| \le f \max |\mathrm{peer} - \mathrm{exact}| + 8 \, \epsilon \, s

    The tolerance is derived, not tuned: it is the largest error of the peer in this type, times the factor :math:`f`,
    and a few units in the last place of a number of size :math:`s`.

    Args:
        actual: The result under test, `[...]`.
        peer: The same result from the reference in the same type, `[...]`.
        exact: The same result from the reference in float64, `[...]`.
        factor: The factor :math:`f`. (default: `4.0`)
        scale: The magnitude :math:`s` of the terms that were summed, if that is more than the result's own.
            (default: `None`, the largest element of `exact`)
        name: The name of the result in the message. (default: `"result"`)

    Raises:
        AssertionError: If shapes or types differ, or the error exceeds the tolerance.

    Example:
        >>> import torch
        >>> from gattn.testing import assert_as_exact_as
        >>> x = torch.randn(1000, dtype=torch.float64)
        >>> assert_as_exact_as(x.float().flip(0).sum(), peer=x.float().sum(), exact=x.sum(), scale=x.abs().sum().item())
    """
    if actual.shape != peer.shape or actual.dtype != peer.dtype:
        raise AssertionError(
            f"{name} is {actual.dtype} of shape {list(actual.shape)}, expected {peer.dtype} of {list(peer.shape)}"
        )
    if actual.numel() == 0:
        return
    exact = exact.double()
    scale = exact.abs().max().item() if scale is None else scale
    floor = 8 * torch.finfo(actual.dtype).eps * scale
    budget = factor * (peer.double() - exact).abs().max().item() + floor
    error = (actual.double() - exact).abs().max().item()
    if not error <= budget:  # so that NaN fails
        raise AssertionError(f"{name} is off by {error:.3g}; the reference's own error allows {budget:.3g}")


def assert_permutation_equivariant(
    module: Callable[..., Tensor], x: Tensor, edge_index: Tensor, *, seed: int = 0, **kwargs: Any
) -> None:
    """Asserts that permuting nodes permutes the output, and that permuting edges changes nothing.

    Args:
        module: Called as `module(x, edge_index, **kwargs)`; it must be deterministic (for example in eval mode).
        x: Node features, `[N, F]`.
        edge_index: The edges, `[2, E]`.
        seed: Seed of the permutations. (default: `0`)
        **kwargs: Further arguments of the module.

    Raises:
        AssertionError: If an output differs.

    Example:
        >>> import torch, gattn
        >>> from gattn.testing import assert_permutation_equivariant
        >>> edge_index = torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> assert_permutation_equivariant(gattn.nn.GATConv(4, 8), torch.randn(3, 4), edge_index)
    """
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    nodes = torch.randperm(x.size(0), generator=generator)
    edges = torch.randperm(edge_index.size(1), generator=generator)
    place = torch.empty_like(nodes)
    place[nodes] = torch.arange(nodes.numel())
    out = module(x, edge_index, **kwargs)
    torch.testing.assert_close(module(x, edge_index[:, edges], **kwargs), out)
    torch.testing.assert_close(module(x[nodes], place[edge_index], **kwargs), out[nodes])
