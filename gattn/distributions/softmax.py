"""The scatter-softmax, as a function and as a distribution."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.utils import scatter

from gattn.distributions.base import Distribution, Law
from gattn.errors import check_number
from gattn.scores import says

__all__ = ["Softmax", "is_plain_softmax", "segment_reduce", "softmax"]


def softmax(logits: Tensor, index: Tensor, num_targets: int, dim: int = 0) -> Tensor:
    r"""A softmax over the edges of each target: the scatter-softmax.

    .. math::
        \alpha_{ij} = \frac{\exp(s_{ij})}{\sum_{k \in \mathcal{N}(i)} \exp(s_{ik})}

    Logits of :math:`-\infty` get weight zero. A target that has no other logits gets only zeros, never NaN, and
    gradients stay finite. Half precision is computed in float32 and rounded once, at the end.

    Args:
        logits: One or more logits per edge; edges lie along `dim`.
        index: The target of each edge, `[E]`.
        num_targets: Number of targets, N.
        dim: The dimension along which edges lie. (default: `0`)

    Returns:
        The weights, shaped and typed like `logits`.

    Raises:
        ValueError: If the logits are not of a floating-point type.
        RuntimeError: If `index` holds a target beyond `num_targets`.

    Example:
        >>> import torch, gattn
        >>> gattn.softmax(torch.zeros(3), torch.tensor([0, 0, 2]), num_targets=3)
        tensor([0.5000, 0.5000, 1.0000])
    """
    dtype = logits.dtype
    if not dtype.is_floating_point:
        raise ValueError(f"softmax needs logits of a floating-point type; got {dtype}.")
    if dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    dim = dim % logits.dim()
    maximum = segment_reduce(logits.detach(), index, num_targets, dim, -torch.inf, "amax")
    # A row that is all -inf would give exp(-inf + inf).
    maximum = maximum.masked_fill(maximum == -torch.inf, 0.0)
    weights = (logits - maximum.index_select(dim, index)).exp()
    total: Tensor = scatter(weights, index, dim, num_targets, reduce="sum")
    # Only exact zeros are replaced, so that a NaN spreads to its whole row.
    total = total.masked_fill(total == 0, 1.0)
    return (weights / total.index_select(dim, index)).to(dtype)


def segment_reduce(x: Tensor, index: Tensor, num_targets: int, dim: int, start: float, reduce: str) -> Tensor:
    """The largest or smallest value among each target's edges; `start` for targets without edges."""
    # PyG's scatter(reduce="max") does the same at twice the cost: it first writes zeros for targets without edges.
    size = (*x.shape[:dim], num_targets, *x.shape[dim + 1 :])
    places = index.view(-1, *[1] * (x.dim() - dim - 1)).expand_as(x)
    return x.new_full(size, start).scatter_reduce_(dim, places, x, reduce)


class Softmax(Distribution):
    r"""The scatter-softmax as an object: what `distribution="softmax"` stands for, with two options.

    .. math::
        \alpha_{ij} = \frac{\exp(z_{ij})}{\exp(z_0) + \sum_{k \in \mathcal{N}(i)} \exp(z_{ik})},
        \quad z_{ij} = c \tanh(s_{ij} / c)

    A *sink* is one more neighbour, of logit :math:`z_0`, that takes weight and has no value, so that a target may
    attend to (almost) nothing. With :math:`z_0 = 0`, it is the restricted softmax of `Just Jump
    <https://arxiv.org/abs/1904.04849>`_ (PyG's DNAConv); learnt per head, it is that of `gpt-oss
    <https://arxiv.org/abs/2508.10925>`_. A *softcap* :math:`c` keeps logits between :math:`-c` and :math:`c`, as in
    `Gemma 2 <https://arxiv.org/abs/2408.00118>`_. Without either, :math:`\exp(z_0)` is 0 and :math:`z_{ij} = s_{ij}`.

    Args:
        sink: The logit :math:`z_0`, a number, or a tensor: a single number or one per head, `[H]`, which may be learnt.
            (default: `None`, no sink)
        softcap: The bound :math:`c` of the logits, including the bias. (default: `None`, no bound)

    Shapes:
        logits and weights `[E, H]`, after the batch dimensions.

    Raises:
        TypeError: If the sink is neither a number nor a tensor, or the softcap is not a number, such as a tensor, which
            would get no gradient.
        ValueError: If the softcap is not positive and finite, the sink is NaN, infinite or not real, or (in use) the
            sink does not fit the heads. A sink of minus infinity takes no weight.

    Example:
        >>> import torch, gattn
        >>> gattn.Softmax().weights(torch.zeros(2, 1), torch.tensor([0, 0]), num_targets=1, dim=0).flatten()
        tensor([0.5000, 0.5000])
        >>> gattn.Softmax(sink=0.0).weights(torch.zeros(2, 1), torch.tensor([0, 0]), num_targets=1, dim=0).flatten()
        tensor([0.3333, 0.3333])
    """

    respects_infinity = True

    def __init__(self, sink: float | Tensor | None = None, softcap: float | None = None):
        if sink is not None:
            check_number("Softmax's sink", sink, "finite or minus infinity", or_tensor=True)
        if softcap is not None:
            check_number("Softmax's softcap", softcap, "positive and finite")
        self.sink = sink
        self.softcap = softcap

    def law(self) -> Law:
        """See `Distribution.law`."""
        return Law("softmax", (self.softcap or 0.0,), self.sink)

    @classmethod
    def from_law(cls, law: Law) -> Softmax:
        """The softmax that the kernels know as `law`."""
        return cls(law.sink, law.constants[0] or None)

    def tensors(self) -> tuple[Tensor, ...]:
        """The sink, if it is a tensor."""
        return (self.sink,) if isinstance(self.sink, Tensor) else ()

    def check(self, batch: tuple[int, ...], num_targets: int, heads: int) -> None:
        """Raises `ValueError` if the sink is a tensor that does not fit `heads`."""
        if isinstance(self.sink, Tensor) and self.sink.shape not in ((), (1,), (heads,)):
            raise ValueError(
                f"Softmax's sink must be a number, or one per head, [{heads}]; got a tensor of {list(self.sink.shape)}."
            )

    def weights(self, logits: Tensor, index: Tensor, num_targets: int, dim: int) -> Tensor:
        """See `gattn.softmax`."""
        if self.sink is None and self.softcap is None:
            return softmax(logits, index, num_targets, dim)
        dtype, dim = logits.dtype, dim % logits.dim()
        logits = self._capped(logits.to(torch.promote_types(dtype, torch.float32)))
        if self.sink is None:
            return softmax(logits, index, num_targets, dim).to(dtype)
        # One more edge per target, whose logit is the sink's.
        sink = torch.as_tensor(self.sink, dtype=logits.dtype, device=logits.device)
        shape = (*logits.shape[:dim], num_targets, *logits.shape[dim + 1 :])
        ends = torch.cat([index, torch.arange(num_targets, device=index.device)])
        weights = softmax(torch.cat([logits, sink.expand(shape)], dim), ends, num_targets, dim)
        return weights.narrow(dim, 0, logits.size(dim)).to(dtype)

    def of_matrix(self, logits: Tensor) -> Tensor:
        """See `Distribution.of_matrix`."""
        logits = self._capped(logits)
        if self.sink is not None:
            sink = torch.as_tensor(self.sink, dtype=logits.dtype, device=logits.device)
            sink = sink.reshape(-1, 1, 1).expand(*logits.shape[:-1], 1)
            logits = torch.cat([logits, sink], -1)
        empty = (logits == -torch.inf).all(-1, keepdim=True)
        weights = logits.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
        return weights if self.sink is None else weights[..., :-1]

    def _capped(self, logits: Tensor) -> Tensor:
        if self.softcap is None:
            return logits
        is_edge = logits != -torch.inf
        return (self.softcap * (logits.masked_fill(~is_edge, 0.0) / self.softcap).tanh()).where(is_edge, logits)

    def __repr__(self) -> str:
        sink = list(self.sink.shape) if isinstance(self.sink, Tensor) else self.sink
        given = {"sink": sink, "softcap": self.softcap}
        return f"Softmax({', '.join(f'{name}={value}' for name, value in given.items() if value is not None)})"


def is_plain_softmax(distribution: Distribution) -> bool:
    """Whether a distribution is the softmax without sink and softcap."""
    if not isinstance(distribution, Softmax) or says(distribution, "law", "weights") is None:
        return False
    return distribution.sink is None and distribution.softcap is None
