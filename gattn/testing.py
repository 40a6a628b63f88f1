"""Comparisons, graph makers and invariance checks: for gattn's tests, and for yours.

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


def random_edge_index(
    num_sources: int, num_targets: int | None = None, num_edges: int = 0, *, hub: float = 0.0, seed: int = 0
) -> Tensor:
    """A random graph with everything that real ones have: duplicate edges, self-loops, isolated nodes.

    Args:
        num_sources: M.
        num_targets: N. (default: M)
        num_edges: E. (default: `0`)
        hub: Share of all edges that point to target 0. (default: `0.0`)
        seed: Seed of a generator of its own. (default: `0`)

    Returns:
        `[2, E]`, sources above targets. The last target has no neighbour (if there is more than one).
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
    """Asserts that `actual` is no further from the exact result than a peer is, up to a small factor.

    The budget is derived, not tuned: what the peer itself loses in this type against float64, at the worst element,
    times `factor`, and never less than a few units in the last place at `scale`.

    Args:
        actual: What is tested.
        peer: The same computed by the reference in the same type.
        exact: The same computed by the reference in float64.
        factor: How many times the peer's error is allowed. (default: `4.0`)
        scale: Magnitude of the terms that were summed, where that is more than the result's own. (default: `None`, the
            result's largest element)
        name: What to call it in the message.

    Raises:
        AssertionError: If shapes or types differ, or the error exceeds the budget.
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
        module: Called as `module(x, edge_index, **kwargs)`; must be deterministic (in eval mode, say).
        x: Node features, `[N, F]`.
        edge_index: `[2, E]`.
        seed: Seed of the permutations. (default: `0`)
        **kwargs: Passed on.

    Raises:
        AssertionError: If an output differs.
    """
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    nodes = torch.randperm(x.size(0), generator=generator)
    edges = torch.randperm(edge_index.size(1), generator=generator)
    place = torch.empty_like(nodes)
    place[nodes] = torch.arange(nodes.numel())
    out = module(x, edge_index, **kwargs)
    torch.testing.assert_close(module(x, edge_index[:, edges], **kwargs), out)
    torch.testing.assert_close(module(x[nodes], place[edge_index], **kwargs), out[nodes])
