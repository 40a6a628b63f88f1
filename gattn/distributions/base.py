"""What a distribution is."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from torch import Tensor

from gattn.scores import says


class Law(NamedTuple):
    """What kernels know a distribution by."""

    name: str
    """The name of its formula in the kernels."""
    constants: tuple[float, ...] = ()
    """The numbers in the formula, in the order in which the kernels take them."""
    sink: float | Tensor | None = None
    """The logit of the sink, or one per head, `[H]`; of the softmax alone."""


class Distribution:
    """Base class of everything that turns logits into weights.

    To add one, override :meth:`weights`. On lists of edges, the kernels compute the logits and the sum for any
    distribution; the weights, too, where it names one of their own formulas in :meth:`law`.

    Example:
        >>> import torch, gattn
        >>> class Uniform(gattn.Distribution):
        ...     def weights(self, logits, index, num_targets, dim):
        ...         return gattn.softmax(torch.zeros_like(logits), index, num_targets, dim)
        >>> x = torch.tensor([[[0.0]], [[1.0]]])
        >>> gattn.attend(x, x, x, gattn.CompleteGraph(2), distribution=Uniform()).flatten()
        tensor([0.5000, 0.5000])
    """

    #: Whether logits of minus infinity always get weight zero, so that pairs without an edge may be among them.
    respects_infinity: ClassVar[bool] = False

    #: Whether weights depend on which target it is, and not only on the logits of its edges.
    knows_targets: ClassVar[bool] = False

    def weights(self, logits: Tensor, index: Tensor, num_targets: int, dim: int) -> Tensor:
        """Turns `logits` into weights.

        Args:
            logits: `[..., E, H]`, masked edges at minus infinity.
            index: The target of each edge, `[E]`.
            num_targets: Number of targets, N.
            dim: The dimension along which edges lie.

        Returns:
            Weights of the same shape as `logits`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define weights().")

    def with_sources(self, source: Tensor) -> Distribution:
        """The distribution that is asked for these edges' weights; itself, unless it looks at where they come from.

        Args:
            source: The source of each edge, `[E]`.
        """
        return self

    def law(self) -> Law | None:
        """What kernels know it by; `None` if they do not."""
        return None

    def of_matrix(self, logits: Tensor) -> Tensor | None:
        """The weights of all pairs of nodes, `[..., N, M]`, from such logits; `None` if that takes a list of edges."""
        return None

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that the distribution itself holds: they must be where the features are."""
        return ()

    def check(self, batch: tuple[int, ...], num_targets: int, heads: int) -> None:
        """Raises `ValueError` where the distribution's own tensors do not fit the batch, the targets and the heads."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def law_of(distribution: Distribution) -> Law | None:
    """What kernels know a distribution by; `None` also where the `weights` are not those of the class that says it."""
    return None if says(distribution, "law", "weights") is None else distribution.law()


def check_number(name: str, number: float) -> None:
    """Raises `TypeError` where an option is a tensor, whose gradient would be missed."""
    if isinstance(number, Tensor):
        raise TypeError(f"{name} is a number, which has no gradient.")
