r"""How the logits of one target's neighbours become weights: the distributions :math:`p`."""

from __future__ import annotations

import copy
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch_geometric.utils import scatter

from gattn.scores import says


def softmax(logits: Tensor, index: Tensor, num_targets: int, dim: int = 0) -> Tensor:
    r"""A softmax over the edges of each target: the scatter-softmax.

    .. math::
        \alpha_{ij} = \frac{\exp(s_{ij})}{\sum_{k \in \mathcal{N}(i)} \exp(s_{ik})}

    Logits of :math:`-\infty` get weight zero, and a target that has no other logits gets zeros throughout, never NaN;
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
    maximum = _segment_reduce(logits.detach(), index, num_targets, dim, -torch.inf, "amax")
    # A row of -inf alone would give exp(-inf + inf).
    maximum = maximum.masked_fill(maximum == -torch.inf, 0.0)
    weights = (logits - maximum.index_select(dim, index)).exp()
    total: Tensor = scatter(weights, index, dim, num_targets, reduce="sum")
    # Only exact zeros are replaced, so that a NaN in a row shows in the whole row.
    total = total.masked_fill(total == 0, 1.0)
    return (weights / total.index_select(dim, index)).to(dtype)


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

    To add one, override :meth:`weights`. The kernels compute those of their own formulas, which a distribution names in
    :meth:`law`; any other is left to the reference.

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


def _check_number(name: str, number: float) -> None:
    if isinstance(number, Tensor):
        raise TypeError(f"{name} is a number, which has no gradient.")


def is_plain_softmax(distribution: Distribution) -> bool:
    """Whether a distribution is the softmax, and nothing more."""
    if not isinstance(distribution, Softmax) or says(distribution, "law", "weights") is None:
        return False
    return distribution.sink is None and distribution.softcap is None


class Softmax(Distribution):
    r"""The scatter-softmax as an object: what `distribution="softmax"` names, and two variants of it.

    .. math::
        \alpha_{ij} = \frac{\exp(z_{ij})}{\exp(z_0) + \sum_{k \in \mathcal{N}(i)} \exp(z_{ik})},
        \quad z_{ij} = c \tanh(s_{ij} / c)

    A *sink* adds a neighbour of logit :math:`z_0` that takes weight and gives no value, so that a target may attend to
    (almost) nothing: with :math:`z_0 = 0` it is the restricted softmax of `Just Jump
    <https://arxiv.org/abs/1904.04849>`_ (PyG's DNAConv), learnt per head that of `gpt-oss
    <https://arxiv.org/abs/2508.10925>`_. A *softcap* :math:`c` keeps logits between :math:`-c` and :math:`c`, as in
    `Gemma 2 <https://arxiv.org/abs/2408.00118>`_.

    Args:
        sink: The logit :math:`z_0`, a number, or a tensor: a single number or one per head, `[H]`, which may be learnt.
            (default: `None`, without sink)
        softcap: The bound :math:`c` of the logits, bias included. (default: `None`, without bound)

    Raises:
        ValueError: If the softcap is not positive, or (in use) the sink does not fit the heads.

    Example:
        >>> import torch, gattn
        >>> gattn.Softmax().weights(torch.zeros(2, 1), torch.tensor([0, 0]), num_targets=1, dim=0).flatten()
        tensor([0.5000, 0.5000])
        >>> gattn.Softmax(sink=0.0).weights(torch.zeros(2, 1), torch.tensor([0, 0]), num_targets=1, dim=0).flatten()
        tensor([0.3333, 0.3333])
    """

    respects_infinity = True

    def __init__(self, sink: float | Tensor | None = None, softcap: float | None = None):
        _check_number("softcap", softcap or 0.0)
        if softcap is not None and not 0 < softcap < float("inf"):
            raise ValueError(f"Softmax's softcap is positive and finite; got {softcap}.")
        self.sink = sink
        self.softcap = softcap

    def law(self) -> Law:
        """See `Distribution.law`."""
        return Law("softmax", (self.softcap or 0.0,), self.sink)

    @classmethod
    def from_law(cls, law: Law) -> Softmax:
        """The softmax that kernels know by `law`."""
        return cls(law.sink, law.constants[0] or None)

    def tensors(self) -> tuple[Tensor, ...]:
        """The sink, if it is a tensor."""
        return (self.sink,) if isinstance(self.sink, Tensor) else ()

    def check(self, batch: tuple[int, ...], num_targets: int, heads: int) -> None:
        """Raises `ValueError` where a tensor as the sink does not fit `heads`."""
        if isinstance(self.sink, Tensor) and self.sink.shape not in ((), (1,), (heads,)):
            raise ValueError(
                f"Softmax's sink is a number, or one per head, [{heads}]; got a tensor of {list(self.sink.shape)}."
            )

    def weights(self, logits: Tensor, index: Tensor, num_targets: int, dim: int) -> Tensor:
        """See `gattn.softmax`."""
        if self.sink is None and self.softcap is None:
            return softmax(logits, index, num_targets, dim)
        dtype, dim = logits.dtype, dim % logits.dim()
        logits = self._capped(logits.to(torch.promote_types(dtype, torch.float32)))
        if self.sink is None:
            return softmax(logits, index, num_targets, dim).to(dtype)
        # One more edge for each target, whose logit is the sink's.
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


class Gate(Distribution):
    r"""Base class of weights without competition: a function of each logit alone.

    .. math::
        \alpha_{ij} = f(s_{ij}), \qquad \text{normalized:} \quad
        \alpha_{ij} = \frac{f(s_{ij})}{\epsilon + \sum_{k \in \mathcal{N}(i)} f(s_{ik})}

    To add one, override :meth:`of`. Masked edges, and logits of :math:`-\infty`, get weight zero; so do all edges of a
    target whose sum is exactly zero.

    Args:
        normalize: Whether weights are divided by the sum of each target's. (default: `False`)
        eps: The :math:`\epsilon` in that sum. (default: `0.0`)

    Raises:
        ValueError: If `eps` is negative or not finite, or given without `normalize`.

    Example:
        >>> import torch, gattn
        >>> class ReLU(gattn.Gate):
        ...     def of(self, logits):
        ...         return logits.relu()
        >>> x = torch.tensor([[[-1.0]], [[1.0]]])  # 2 nodes, 1 head, 1 channel
        >>> gattn.attend(x, x, x, gattn.CompleteGraph(2), distribution=ReLU()).flatten()
        tensor([-1.,  1.])
    """

    respects_infinity = True

    #: What kernels know the function by; `None` if they do not.
    name: ClassVar[str | None] = None

    def __init__(self, normalize: bool = False, eps: float = 0.0):
        _check_number("eps", eps)
        if not 0 <= eps < float("inf"):
            raise ValueError(f"{type(self).__name__}'s eps is a finite number that is not negative; got {eps}.")
        if eps > 0 and not normalize:
            raise ValueError(f"{type(self).__name__}'s eps is part of the sum that normalize=True divides by.")
        self.normalize = normalize
        self.eps = eps

    def of(self, logits: Tensor) -> Tensor:
        """The function :math:`f`, of finite logits."""
        raise NotImplementedError(f"{type(self).__name__} does not define of().")

    def law(self) -> Law | None:
        """See `Distribution.law`."""
        name = says(self, "name", "of")
        return None if name is None else Law(name, (float(self.normalize), self.eps))

    @classmethod
    def from_law(cls, law: Law) -> Gate:
        """The gate that kernels know by `law`."""
        return cls(bool(law.constants[0]), law.constants[1])

    def weights(self, logits: Tensor, index: Tensor, num_targets: int, dim: int) -> Tensor:
        """See `Distribution.weights`."""
        dtype, dim = logits.dtype, dim % logits.dim()
        weights = self._of_edges(logits.to(torch.promote_types(dtype, torch.float32)))
        if self.normalize:
            total = scatter(weights, index, dim, num_targets, reduce="sum")
            weights = weights * self._scale(total).index_select(dim, index)
        return weights.to(dtype)

    def of_matrix(self, logits: Tensor) -> Tensor:
        """See `Distribution.of_matrix`."""
        weights = self._of_edges(logits)
        return weights * self._scale(weights.sum(-1, keepdim=True)) if self.normalize else weights

    def _of_edges(self, logits: Tensor) -> Tensor:
        is_edge = logits != -torch.inf
        return self.of(logits.masked_fill(~is_edge, 0.0)).masked_fill(~is_edge, 0.0)

    def _scale(self, total: Tensor) -> Tensor:
        total = total + self.eps
        # Only exact zeros are replaced, so that a NaN in a row shows in the whole row.
        return total.masked_fill(total == 0, 1.0).reciprocal().masked_fill(total == 0, 0.0)

    def __repr__(self) -> str:
        given = "normalize=True" * self.normalize + f", eps={self.eps}" * (self.eps > 0)
        return f"{type(self).__name__}({given})"


class Sigmoid(Gate):
    """The logistic function of each logit: the gates of `ResGatedGraphConv <https://arxiv.org/abs/1711.07553>`_.

    `Sigmoid(normalize=True, eps=1e-6)` is that of `GatedGCN <https://arxiv.org/abs/2003.00982>`_.

    Args: see `gattn.Gate`.

    Example:
        >>> import torch, gattn
        >>> x = torch.tensor([[[0.0]], [[2.0]]])  # 2 nodes, 1 head, 1 channel
        >>> gattn.attend(x, x, x, gattn.CompleteGraph(2), distribution=gattn.Sigmoid()).flatten()
        tensor([1.0000, 1.9640])
    """

    name = "sigmoid"

    def of(self, logits: Tensor) -> Tensor:
        """See `Gate.of`."""
        return logits.sigmoid()


class Tanh(Gate):
    """The hyperbolic tangent of each logit: signed weights, as in `FAConv <https://arxiv.org/abs/2101.00797>`_.

    Args: see `gattn.Gate`.

    Example:
        >>> import torch, gattn
        >>> x = torch.tensor([[[-1.0]], [[1.0]]])  # 2 nodes, 1 head, 1 channel
        >>> gattn.attend(x, x, x, gattn.CompleteGraph(2), distribution=gattn.Tanh()).flatten()
        tensor([-1.5232,  1.5232])
    """

    name = "tanh"

    def of(self, logits: Tensor) -> Tensor:
        """See `Gate.of`."""
        return logits.tanh()


class Identity(Gate):
    """Each logit as it is: linear attention, or a sum with given coefficients.

    Args: see `gattn.Gate`.

    Example:
        >>> import torch, gattn
        >>> x = torch.tensor([[[1.0]], [[2.0]]])  # 2 nodes, 1 head, 1 channel
        >>> gattn.attend(x, x, x, gattn.CompleteGraph(2), distribution=gattn.Identity()).flatten()
        tensor([ 5., 10.])
    """

    name = "identity"

    def of(self, logits: Tensor) -> Tensor:
        """See `Gate.of`."""
        return logits


class LocalGaussian(Distribution):
    r"""A softmax whose weights are lowered with their distance from a centre, and not normalised again.

    The alignment of *local-p* in `Effective Approaches to Attention-based Neural Machine Translation
    <https://arxiv.org/abs/1508.04025>`_:

    .. math::
        \alpha_{is} = \mathrm{softmax}_s(\mathrm{logits}_{is}) \exp\left(-\frac{(s - p_i)^2}{2 \sigma^2}\right),
        \quad \sigma = D / 2

    A source's place *s* is its number, beginning with 0.

    Args:
        centres: The centre :math:`p_i` of each target, `[N]`, or with the batch dimensions in front, `[B, N]`. It gets
            gradients.
        width: The half-width :math:`D` of the window that the Gaussian belongs to. (The window itself is a mask.)

    Raises:
        TypeError: If `centres` is no tensor.
        ValueError: If `width` is not positive, or (in use) `centres` does not fit the targets.

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

    def __init__(self, centres: Tensor, width: float):
        if not isinstance(centres, Tensor):
            raise TypeError(f"LocalGaussian's centres are a tensor, one per target; got {type(centres).__name__}.")
        if not width > 0:
            raise ValueError(f"LocalGaussian's width is positive; got {width}.")
        self.centres = centres
        self.width = width
        self._source: Tensor | None = None

    def with_sources(self, source: Tensor) -> LocalGaussian:
        """See `Distribution.with_sources`."""
        bound = copy.copy(self)
        bound._source = source
        return bound

    def tensors(self) -> tuple[Tensor, ...]:
        """The centres."""
        return (self.centres,)

    def check(self, batch: tuple[int, ...], num_targets: int, heads: int) -> None:
        """Raises `ValueError` where the centres do not fit the batch and the targets."""
        if tuple(self.centres.shape) not in ((num_targets,), (*batch, num_targets)):
            raise ValueError(
                f"LocalGaussian has one centre per target, {[*batch, num_targets]}; got {list(self.centres.shape)}."
            )

    def weights(self, logits: Tensor, index: Tensor, num_targets: int, dim: int) -> Tensor:
        """See `Distribution.weights`; with :meth:`with_sources` only."""
        if self._source is None:
            raise ValueError("LocalGaussian needs to know the sources: ask with_sources(source) for weights.")
        # Half precision cannot tell places beyond a few hundred from each other.
        centres = self.centres.to(torch.promote_types(logits.dtype, torch.float32))
        distance = self._source - centres.index_select(-1, index)
        gaussian = (-2 * (distance / self.width).square()).exp()
        return softmax(logits, index, num_targets, dim) * gaussian.to(logits.dtype).unsqueeze(-1)

    def __repr__(self) -> str:
        return f"LocalGaussian(centres={list(self.centres.shape)}, width={self.width})"


class Hard(Distribution):
    r"""One neighbour for each target and head, drawn with the softmax's probabilities: *hard* attention.

    .. math::
        \alpha_{i\cdot} = \mathrm{one\_hot}(j), \qquad j \sim \mathrm{softmax}_j(\mathrm{logits}_{ij})

    That has no gradient with respect to the logits. Two estimators make up for it. `"reinforce"`
    (`Show, Attend and Tell <https://arxiv.org/abs/1502.03044>`_) leaves `log_prob` and `entropy` of the choices, out of
    which `gattn.nn.ReinforceLoss` makes a loss whose gradient is right on average. `"straight_through"`
    (`Gumbel-softmax <https://arxiv.org/abs/1611.01144>`_) pretends in the backward pass that the weights were
    :math:`\mathrm{softmax}((\mathrm{logits} + g) / \tau)`, g being the Gumbel noise that drew them: its gradient varies
    less, but is biased.

    Args:
        sample: Whether to draw, as in training, or to take the most probable neighbour (the first of equals).
            (default: `True`)
        estimator: `"reinforce"` or `"straight_through"`. (default: `"reinforce"`)
        temperature: The temperature :math:`\tau` of the straight-through estimator. (default: `1.0`)
        expected: Probability that a drawing target gets the softmax itself instead, which lowers the variance
            (the same paper has one half). (default: `0.0`)
        generator: Random numbers come from it. (default: `None`, PyTorch's own)

    Raises:
        ValueError: If the estimator is unknown, the temperature not positive, or `expected` no probability.

    Example:
        >>> import torch, gattn
        >>> x = torch.tensor([[[0.0]], [[1.0]]])  # 2 nodes, 1 head, 1 channel
        >>> best = gattn.Hard(sample=False)
        >>> gattn.attend(x + 1, x, x, gattn.CompleteGraph(2), distribution=best).flatten()
        tensor([1., 1.])
        >>> best.log_prob.exp().flatten()
        tensor([0.7311, 0.8808])
    """

    respects_infinity = True

    log_prob: Tensor
    """Of the last choices: the logarithms of their probabilities, `[..., N, H]`; 0 where nothing was chosen."""
    entropy: Tensor
    """The entropy that the choices were drawn with, in nats, `[..., N, H]`."""

    def __init__(
        self,
        sample: bool = True,
        estimator: str = "reinforce",
        temperature: float = 1.0,
        expected: float = 0.0,
        generator: torch.Generator | None = None,
    ):
        if estimator not in ("reinforce", "straight_through"):
            raise ValueError(f"Hard's estimator is 'reinforce' or 'straight_through', not {estimator!r}.")
        if not temperature > 0:
            raise ValueError(f"Hard's temperature is positive; got {temperature}.")
        if not 0.0 <= expected <= 1.0:
            raise ValueError(f"Hard's expected is a probability; got {expected}.")
        self.sample = sample
        self.estimator = estimator
        self.temperature = temperature
        self.expected = expected
        self.generator = generator

    def weights(self, logits: Tensor, index: Tensor, num_targets: int, dim: int) -> Tensor:
        """See `Distribution.weights`; leaves `log_prob` and `entropy`."""
        dtype, dim = logits.dtype, dim % logits.dim()
        logits = logits.to(torch.promote_types(dtype, torch.float32))
        soft = softmax(logits, index, num_targets, dim)
        # One pass more than log(soft), which would be -inf where a probability is too small for its type.
        log_soft = _log_softmax(logits, index, num_targets, dim).masked_fill(logits == -torch.inf, 0.0)
        noisy = logits.detach()
        if self.sample:
            noise = torch.empty_like(noisy).exponential_(generator=self.generator)
            noisy = noisy - noise.clamp_min(torch.finfo(noise.dtype).tiny).log()
        chosen = _first_maximum(noisy, index, num_targets, dim)
        # A NaN shows in its whole row, as it does in the softmax.
        weights = torch.where(soft.isnan(), torch.nan, chosen.to(logits.dtype))
        if self.sample and self.estimator == "straight_through":
            slope = softmax(
                (logits + (noisy - logits.detach()).nan_to_num()) / self.temperature, index, num_targets, dim
            )
            weights = weights + (slope - slope.detach())  # exactly zero, so that a one stays a one
        if self.sample and self.expected > 0.0:
            size = (*logits.shape[:dim], num_targets, *logits.shape[dim + 1 :])
            coin = torch.rand(size, generator=self.generator, device=logits.device) < self.expected
            is_soft = coin.index_select(dim, index)
            weights = torch.where(is_soft, soft, weights)
            chosen = chosen & ~is_soft
        self.log_prob = scatter(torch.where(chosen, log_soft, 0.0), index, dim, num_targets, reduce="sum")
        self.entropy = scatter(-soft * log_soft, index, dim, num_targets, reduce="sum")
        return weights.to(dtype)

    def __repr__(self) -> str:
        return f"Hard(sample={self.sample}, estimator={self.estimator!r})"


def _segment_reduce(x: Tensor, index: Tensor, num_targets: int, dim: int, start: float, reduce: str) -> Tensor:
    """The largest or smallest of each target's edges, `start` where it has none."""
    # PyG's scatter(reduce="max") does the same at twice the cost: it first writes zeros, for targets without edges.
    size = (*x.shape[:dim], num_targets, *x.shape[dim + 1 :])
    places = index.view(-1, *[1] * (x.dim() - dim - 1)).expand_as(x)
    return x.new_full(size, start).scatter_reduce_(dim, places, x, reduce)


def _log_softmax(logits: Tensor, index: Tensor, num_targets: int, dim: int) -> Tensor:
    maximum = _segment_reduce(logits.detach(), index, num_targets, dim, -torch.inf, "amax")
    shifted = logits - maximum.masked_fill(maximum == -torch.inf, 0.0).index_select(dim, index)
    total: Tensor = scatter(shifted.exp(), index, dim, num_targets, reduce="sum")
    return shifted - total.masked_fill(total == 0, 1.0).log().index_select(dim, index)


def _first_maximum(x: Tensor, index: Tensor, num_targets: int, dim: int) -> Tensor:
    """Whether an edge is the first among its target's largest; none is where all are minus infinity."""
    maximum = _segment_reduce(x, index, num_targets, dim, -torch.inf, "amax").index_select(dim, index)
    place = torch.arange(x.size(dim), device=x.device).view(-1, *[1] * (x.dim() - dim - 1)).expand_as(x)
    place = place.masked_fill((x != maximum) | (x == -torch.inf), x.size(dim))
    first = _segment_reduce(place, index, num_targets, dim, x.size(dim), "amin").index_select(dim, index)
    return (place == first) & (place < x.size(dim))


DISTRIBUTIONS: dict[str, Distribution] = {
    "softmax": Softmax(),
    "sigmoid": Sigmoid(),
    "tanh": Tanh(),
    "identity": Identity(),
}


def from_law(law: Law) -> Distribution:
    """The distribution that kernels know by `law`."""
    kind = type(DISTRIBUTIONS[law.name])
    assert issubclass(kind, Softmax | Gate)
    return kind.from_law(law)


def resolve_distribution(distribution: str | Distribution) -> Distribution:
    """Turns a name into the distribution it stands for; an object is returned as it is."""
    if isinstance(distribution, Distribution):
        return distribution
    if isinstance(distribution, str) and distribution in DISTRIBUTIONS:
        return DISTRIBUTIONS[distribution]
    known = ", ".join(repr(name) for name in DISTRIBUTIONS)
    raise ValueError(f"unknown distribution {distribution!r}: use {known} or an object of a gattn.Distribution class.")
