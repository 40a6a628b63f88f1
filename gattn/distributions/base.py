"""The base class of distributions."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from torch import Tensor

from gattn.scores import says

__all__ = ["Distribution", "Law", "law_of"]


class Law(NamedTuple):
    """How the kernels identify a distribution."""

    name: str
    """The name of its formula in the kernels."""
    constants: tuple[float, ...] = ()
    """The numbers in the formula, in the order in which the kernels take them."""
    sink: float | Tensor | None = None
    """The logit of the sink, or one per head, `[H]`; only the softmax has one."""


class Distribution:
    r"""Base class of everything that turns logits into weights.

    .. math::
        \alpha_{i\cdot} = p\big(s_{ij} \text{ for } j \in \mathcal{N}(i)\big)

    To add one, override :meth:`weights`. On lists of edges, the kernels compute the logits and the weighted sum for any
    distribution; they also compute the weights if :meth:`law` names one of their own formulas.

    Shapes:
        logits and weights `[E, H]`, after the batch dimensions.

    Raises:
        NotImplementedError: In use, if the subclass does not define :meth:`weights`.

    Example:
        >>> import torch, gattn
        >>> class Uniform(gattn.Distribution):
        ...     def weights(self, logits, index, num_targets, dim):
        ...         return gattn.softmax(torch.zeros_like(logits), index, num_targets, dim)
        >>> x = torch.tensor([[[0.0]], [[1.0]]])
        >>> gattn.attend(x, x, x, gattn.CompleteGraph(2), distribution=Uniform()).flatten()
        tensor([0.5000, 0.5000])
    """

    #: Whether logits of minus infinity always get weight zero, so that pairs without an edge may be included.
    respects_infinity: ClassVar[bool] = False

    #: Whether weights depend on the target itself, and not only on the logits of its edges.
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
        """The distribution to use for the weights of these edges; itself, unless it depends on their sources.

        Args:
            source: The source of each edge, `[E]`.
        """
        return self

    def law(self) -> Law | None:
        """How the kernels know it; `None` if they do not."""
        return None

    @classmethod
    def from_law(cls, law: Law) -> Distribution:
        """The distribution of this class that the kernels know as `law`."""
        return cls()

    def of_matrix(self, logits: Tensor) -> Tensor | None:
        """The weights of all pairs of nodes, from logits `[..., N, M]`; `None` if it requires a list of edges."""
        return None

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that the distribution itself holds: they must be on the device of the features."""
        return ()

    def check(self, batch: tuple[int, ...], num_targets: int, heads: int) -> None:
        """Raises `ValueError` if the distribution's own tensors do not fit the batch, the targets and the heads."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def law_of(distribution: Distribution) -> Law | None:
    """How the kernels know a distribution; `None` if a subclass overrides the `weights` of the class that names it."""
    return None if says(distribution, "law", "weights") is None else distribution.law()
