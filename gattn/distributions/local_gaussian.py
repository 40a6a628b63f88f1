"""Weights that fall with the distance from a centre."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from gattn.distributions.base import Distribution
from gattn.distributions.softmax import softmax
from gattn.errors import check_number, check_real

__all__ = ["LocalGaussian"]


class LocalGaussian(Distribution):
    r"""A softmax whose weights fall with their distance from a centre and are not normalised again.

    This is the alignment of *local-p* in `Effective Approaches to Attention-based Neural Machine Translation
    <https://arxiv.org/abs/1508.04025>`_:

    .. math::
        \alpha_{is} = \mathrm{softmax}_s(\mathrm{logits}_{is}) \exp\left(-\frac{(s - p_i)^2}{2 \sigma^2}\right),
        \quad \sigma = D / 2

    The position *s* of a source is its number, counted from 0.

    Args:
        centres: The centre :math:`p_i` of each target, `[N]`, or with the batch dimensions in front, `[B, N]`. It gets
            gradients.
        width: The half-width :math:`D` of the window to which the Gaussian belongs. (The window itself is a mask.)

    Shapes:
        logits and weights `[E, H]`, after the batch dimensions.

    Raises:
        TypeError: If `centres` is not a tensor, or `width` is not a number.
        ValueError: If `width` is not positive, or `centres` is not real or (in use) does not fit the targets.

    Example:
        >>> import torch, gattn
        >>> x = torch.ones(3, 1, 1)  # 3 nodes, 1 head, 1 channel
        >>> near = gattn.LocalGaussian(torch.tensor([0.0, 1.0, 2.0]), width=2)
        >>> _, weights = gattn.attend(x, x, x, gattn.CompleteGraph(3), distribution=near, return_weights=True)
        >>> weights[0]
        tensor([[0.3333, 0.2022, 0.0451],
                [0.2022, 0.3333, 0.2022],
                [0.0451, 0.2022, 0.3333]])
    """

    respects_infinity = True
    knows_targets = True

    def __init__(self, centres: Tensor, width: float):
        if not isinstance(centres, Tensor):
            raise TypeError(f"LocalGaussian's centres must be a tensor, one per target; got {type(centres).__name__}.")
        check_real("LocalGaussian's centres", centres)
        is_single = isinstance(width, Tensor) and width.numel() == 1
        check_number("LocalGaussian's width", width, "positive", or_tensor=is_single)
        self.centres = centres
        self.width = width
        self._source: Tensor | None = None

    def with_sources(self, source: Tensor) -> LocalGaussian:
        """See `Distribution.with_sources`."""
        # What PyTorch 2.11 compiles as well.
        bound = LocalGaussian(self.centres, self.width) if type(self) is LocalGaussian else copy.copy(self)
        bound._source = source
        return bound

    def tensors(self) -> tuple[Tensor, ...]:
        """The centres."""
        return (self.centres,)

    def check(self, batch: tuple[int, ...], num_targets: int, heads: int) -> None:
        """Raises `ValueError` if the centres do not fit the batch and the targets."""
        if tuple(self.centres.shape) not in ((num_targets,), (*batch, num_targets)):
            raise ValueError(
                f"LocalGaussian needs one centre per target, {[*batch, num_targets]}; got {list(self.centres.shape)}."
            )

    def weights(self, logits: Tensor, index: Tensor, num_targets: int, dim: int) -> Tensor:
        """See `Distribution.weights`; requires :meth:`with_sources`."""
        if self._source is None:
            raise ValueError("LocalGaussian needs to know the sources: call weights() of with_sources(source).")
        # Half precision cannot tell positions beyond a few hundred apart.
        centres = self.centres.to(torch.promote_types(logits.dtype, torch.float32))
        distance = self._source - centres.index_select(-1, index)
        gaussian = (-2 * (distance / self.width).square()).exp()
        return softmax(logits, index, num_targets, dim) * gaussian.to(logits.dtype).unsqueeze(-1)

    def __repr__(self) -> str:
        return f"LocalGaussian(centres={list(self.centres.shape)}, width={self.width})"
