"""Biases that a learnt function computes from what two nodes have, for some targets at a time.

Dimensions: N targets, M sources, F features of a node, P features of a pair, H heads, B elements of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import Module

from gattn.bias import Bias
from gattn.errors import InputError, InputTypeError
from gattn.graphs import CompleteGraph, Graph
from gattn.graphs.complete import OpenBlocks

__all__ = ["LinearPairBias", "PairBias"]

#: The numbers in memory for each pair and head while a function is computed that does not say.
_COST = 16


class PairBias(Bias):
    r"""A bias that a function computes for each pair of nodes, with gradients, but without a tensor of all pairs.

    .. math::
        b_{ij} = f(x_i, y_j)

    The function is called for some targets at a time, and again in the backward pass, so memory does not grow with
    :math:`N^2`. `gattn.nn.RadialBias` and `gattn.nn.MLPBias` are such functions of positions, as molecules, point
    clouds and windows of images have them. The features of a packed graph are those of all its nodes, in their order.

    Args:
        function: A module, or a function without parameters, of features of targets, `[..., n, F]`, and of sources,
            `[..., m, F]`, that returns biases `[..., n, m, H]`, or `[..., n, m, 1]` for all heads.
        x: The features of the targets, `[N, F]`, or `[B, N, F]` for each element of a batch.
        y: The features of the sources, `[M, F]` or `[B, M, F]`. (default: `None`, `x`)

    Shapes:
        features `[N, F]`, biases `[n, m, H]`.

    Raises:
        TypeError: If `function` cannot be called, or features are not tensors of floating-point numbers.
        ValueError: If features have other dimensions, or (in use) they or what the function returns do not fit.

    Example:
        >>> import torch, gattn
        >>> position, x = torch.randn(5, 3), torch.randn(5, 2, 8)  # 5 atoms; 2 heads of 8 channels
        >>> decay = gattn.PairBias(lambda a, b: -torch.cdist(a, b).unsqueeze(-1), position)
        >>> gattn.attend(x, x, x, gattn.CompleteGraph(5), bias=decay).shape
        torch.Size([5, 2, 8])
    """

    shared = False

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor | None = None):
        if not callable(function):
            raise InputTypeError(f"function must be a module or a function; got {type(function).__name__}.")
        for name, tensor in (("x", x), ("y", x if y is None else y)):
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                raise InputTypeError(f"{name} must be a tensor of floating-point numbers; got {type(tensor).__name__}.")
            if tensor.dim() not in (2, 3):
                raise InputError(f"{name} must be features [N, F] or [B, N, F]; got {list(tensor.shape)}.")
        self.function, self.x, self.y = function, x, y
        self.cost = getattr(function, "cost", _COST)
        self.parameters: dict[str, Tensor] = {}
        if isinstance(function, Module):
            self.parameters.update(function.named_parameters())
        #: Where each block's targets and sources begin; of a group, which elements it has.
        self.firsts: Sequence[tuple[int, int]] | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """See `Bias.tensors`."""
        return self.x, *(() if self.y is None else (self.y,)), *self.parameters.values()

    def with_tensors(self, tensors: Sequence[Tensor]) -> PairBias:
        """See `Bias.with_tensors`."""
        x, *others = tensors
        y = None if self.y is None else others.pop(0)
        return self._with(x, y, dict(zip(self.parameters, others, strict=True)))

    def _with(self, x: Tensor, y: Tensor | None, parameters: dict[str, Tensor]) -> PairBias:
        other = PairBias.__new__(type(self))
        other.function, other.x, other.y, other.parameters = self.function, x, y, parameters
        other.firsts, other.cost = self.firsts, self.cost
        return other

    def check(self, graph: Graph, batch: torch.Size, heads: int) -> None:
        """See `Bias.check`."""
        if isinstance(graph.blocks, OpenBlocks):
            raise InputError("a PairBias is for blocks of known sizes, which a compiled program's batch does not have.")
        y = self.x if self.y is None else self.y
        count = 1 if graph.blocks is not None else math.prod(batch)
        for name, tensor, size in (("x", self.x, graph.num_targets), ("y", y, graph.num_sources)):
            if tensor.dim() == 3 and tensor.size(0) != count:
                raise InputError(f"{name} has {tensor.size(0)} elements, but the batch has {count}.")
            if size is not None and tensor.size(-2) != size:
                raise InputError(f"{name} must have one row for each of {size} nodes; got {list(tensor.shape)}.")
        if 0 not in (self.x.size(-2), y.size(-2)):
            with torch.no_grad():
                found = self.part(slice(0, 1), slice(0, 1)).size(-3)
            if found not in (1, heads):
                raise InputError(f"the function of a PairBias must return biases of {heads} heads, or 1; got {found}.")

    def of_graph(self, graph: CompleteGraph) -> PairBias:
        """See `Bias.of_graph`."""
        if graph.blocks is None:
            return self
        other = self._with(self.x, self.y, self.parameters)
        sizes = list(graph.blocks)
        rows, columns = (accumulate(side, initial=0) for side in zip(*sizes, strict=True)) if sizes else ((), ())
        other.firsts = list(zip(rows, columns, strict=True))[: len(sizes)]
        return other

    def of_group(self, elements: Sequence[int] | None, num_targets: int, num_sources: int, offset: int) -> PairBias:
        """See `Bias.of_group`."""
        y = self.x if self.y is None else self.y
        if self.firsts is not None:
            firsts = [self.firsts[element % len(self.firsts)] for element in elements or ()]
            pieces = [(self.x[..., i : i + num_targets, :], y[..., j : j + num_sources, :]) for i, j in firsts]
            pieces = pieces or [(self.x[..., :0, :], y[..., :0, :])]
            x, y = (torch.stack([piece[side].flatten(0, -2) for piece in pieces]) for side in (0, 1))
        else:
            x = self.x
            if elements is not None and x.dim() == 3:
                x = x[[element % x.size(0) for element in elements]]
            if elements is not None and y.dim() == 3:
                y = y[[element % y.size(0) for element in elements]]
            x, y = x[..., :num_targets, :], y[..., :num_sources, :]
        group = self._with(x, y, self.parameters)
        group.firsts = None
        return group

    def part(self, targets: slice, sources: slice) -> Tensor:
        """See `Bias.part`."""
        y = self.x if self.y is None else self.y
        x, y = self.x[..., targets, :], y[..., sources, :]
        function: Any = self.function
        found = functional_call(function, self.parameters, (x, y)) if self.parameters else function(x, y)
        size = [x.size(-2), y.size(-2)]
        if not isinstance(found, Tensor) or found.dim() < 3 or list(found.shape[-3:-1]) != size:
            got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise InputError(
                f"the function of a PairBias must return biases [..., {size[0]}, {size[1]}, H]; got {got}."
            )
        found = found.movedim(-1, -3)
        return found.unsqueeze(0) if found.dim() == 3 else found

    def rows(self, start: int, stop: int) -> Tensor:
        """See `Bias.rows`; of features with a batch, of all elements."""
        part = self.part(slice(start, stop), slice(0, (self.x if self.y is None else self.y).size(-2)))
        return part.squeeze(0) if self.x.dim() == 2 else part

    def of_pairs(self, targets: Tensor, sources: Tensor) -> Tensor:
        """See `Bias.of_pairs`: pair by pair, so that a list of edges costs what its edges do."""
        y = self.x if self.y is None else self.y
        x, y = self.x[..., targets, :].unsqueeze(-2), y[..., sources, :].unsqueeze(-2)  # pairs are a batch here
        front = torch.broadcast_shapes(x.shape[:-3], y.shape[:-3])
        x, y = x.expand(*front, *x.shape[-3:]), y.expand(*front, *y.shape[-3:])
        group = self._with(x.flatten(0, -3), y.flatten(0, -3), self.parameters)
        found = group.part(slice(0, 1), slice(0, 1))[..., 0, 0]
        return found.view(*(x.shape[:-3] or (1,)), targets.numel(), found.size(-1))

    def __repr__(self) -> str:
        name = type(self.function).__name__ if isinstance(self.function, Module) else "a function"
        return f"{type(self).__name__}({name}, {list(self.x.shape)})"


class LinearPairBias(Bias):
    r"""A bias that is linear in features of pairs, such as those of AlphaFold or Graphormer.

    .. math::
        b_{ij} = W^\top z_{ij}

    The features are one tensor, which a batch shares; their product with the matrix, which may be larger, is made for
    some targets at a time, and again in the backward pass.

    Args:
        pairs: The features of the pairs, `[N, M, P]`, targets before sources.
        weight: The matrix, `[P, H]`.

    Shapes:
        pairs `[N, M, P]`, matrix `[P, H]`.

    Raises:
        TypeError: If an argument is not a tensor of floating-point numbers.
        ValueError: If shapes do not fit each other or (in use) the graph.

    Example:
        >>> import torch, gattn
        >>> x, pairs, weight = torch.randn(5, 2, 8), torch.randn(5, 5, 4), torch.randn(4, 2, requires_grad=True)
        >>> gattn.attend(x, x, x, gattn.CompleteGraph(5), bias=gattn.LinearPairBias(pairs, weight)).shape
        torch.Size([5, 2, 8])
    """

    def __init__(self, pairs: Tensor, weight: Tensor):
        for name, tensor, dims in (("pairs", pairs, 3), ("weight", weight, 2)):
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                raise InputTypeError(f"{name} must be a tensor of floating-point numbers; got {type(tensor).__name__}.")
            if tensor.dim() != dims:
                raise InputError(f"{name} must be {'[N, M, P]' if dims == 3 else '[P, H]'}; got {list(tensor.shape)}.")
        if pairs.size(-1) != weight.size(0):
            raise InputError(f"weight must be [{pairs.size(-1)}, H]; got {list(weight.shape)}.")
        self.pairs, self.weight = pairs, weight

    def tensors(self) -> tuple[Tensor, ...]:
        """See `Bias.tensors`."""
        return self.pairs, self.weight

    def with_tensors(self, tensors: Sequence[Tensor]) -> LinearPairBias:
        """See `Bias.with_tensors`."""
        return LinearPairBias(*tensors)

    def check(self, graph: Graph, batch: torch.Size, heads: int) -> None:
        """See `Bias.check`."""
        sizes = [graph.num_targets, graph.num_sources]
        if graph.blocks is not None:
            raise InputError("a LinearPairBias is for one graph, not for the blocks of a packed one.")
        if list(self.pairs.shape[:2]) != sizes and None not in sizes:
            raise InputError(f"pairs must be [{sizes[0]}, {sizes[1]}, P]; got {list(self.pairs.shape)}.")
        if self.weight.size(1) not in (1, heads):
            raise InputError(f"weight must be [P, {heads}], or [P, 1] for all heads; got {list(self.weight.shape)}.")

    def rows(self, start: int, stop: int) -> Tensor:
        """See `Bias.rows`."""
        return (self.pairs[start:stop] @ self.weight).movedim(-1, 0)

    def of_pairs(self, targets: Tensor, sources: Tensor) -> Tensor:
        """See `Bias.of_pairs`."""
        return (self.pairs[targets, sources] @ self.weight).unsqueeze(0)

    def __repr__(self) -> str:
        return f"LinearPairBias({list(self.pairs.shape)}, {self.weight.size(1)} heads)"
