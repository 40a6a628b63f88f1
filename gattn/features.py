r"""Feature maps of linear attention, whose weights are products of a feature map of queries and one of keys.

.. math::
    \alpha_{ij} = \frac{\phi(q_i)^\top \phi(k_j)}{\sum_{l \in \mathcal{N}(i)} \phi(q_i)^\top \phi(k_l)}

This is a dot product whose weights are divided by their sum: `gattn.attend` with `DotScore(scale=1.0)` and
`Identity(normalize=True)`. Performer's map, `favor`, takes queries and keys together; the others are functions of one
tensor.

Example:
    >>> import torch, gattn
    >>> from gattn.features import elu1
    >>> query, key, value = torch.randn(3, 5, 2, 8).unbind()  # 5 nodes, 2 heads, 8 channels
    >>> graph = gattn.CompleteGraph.packed([3, 2])  # two graphs, of 3 and 2 nodes
    >>> linear = {"score": gattn.DotScore(scale=1.0), "distribution": gattn.Identity(normalize=True)}
    >>> gattn.attend(elu1(query), elu1(key), value, graph, **linear).shape
    torch.Size([5, 2, 8])
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.utils import scatter

from gattn.autocast import without_autocast
from gattn.errors import InputError, InputTypeError, check_at_least, check_flag, check_number
from gattn.graphs import CompleteGraph, Graph
from gattn.scores import unit

__all__ = ["Favor", "cosine", "elu1", "favor", "orthogonal_features", "relu", "sigmoid", "softplus"]

#: What stabilised exponents lie between, so that sums of their products overflow neither in the type of computation,
#: nor, with the reciprocals of these sums, in gradients.
_SPANS = {torch.float64: (-340.0, 340.0), torch.float32: (-37.0, 33.0), torch.float16: (-5.0, 11.0)}


def elu1(x: Tensor) -> Tensor:
    r"""The feature map of `Transformers are RNNs <https://arxiv.org/abs/2006.16236>`_.

    .. math::
        \phi(x) = \mathrm{elu}(x) + 1 = \begin{cases} x + 1 & x > 0 \\ e^x & x \le 0 \end{cases}

    It is computed by the right-hand side, because adding 1 to the function of PyTorch would round small features to
    zero.

    Args:
        x: Queries or keys, `[..., N, H, C]`.

    Returns:
        Their features, of the same shape and type.

    Raises:
        TypeError: If `x` is not a tensor.
        ValueError: If `x` does not hold floating-point numbers.

    Example:
        >>> import torch
        >>> from gattn.features import elu1
        >>> elu1(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([0.3679, 1.0000, 2.0000])
    """
    _check_tensor("x", x)
    # Without the clamp, the exponential of a large number would make its gradient NaN.
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def relu(x: Tensor, eps: float = 0.0) -> Tensor:
    r"""The feature map of the generalized attention in `Performer <https://arxiv.org/abs/2009.14794>`_.

    .. math::
        \phi(x) = \max(x, 0) + \epsilon

    Without :math:`\epsilon`, all weights of a target may be zero, and so is its output. The `PerformerAttention` of PyG
    adds 0.001.

    Args:
        x: Queries or keys, `[..., N, H, C]`.
        eps: The :math:`\epsilon` that is added. (default: `0.0`)

    Returns:
        Their features, of the same shape and type.

    Raises:
        TypeError: If `x` is not a tensor, or `eps` is not a number.
        ValueError: If `x` does not hold floating-point numbers, or `eps` is negative or not finite.

    Example:
        >>> import torch
        >>> from gattn.features import relu
        >>> relu(torch.tensor([-1.0, 0.0, 1.0]), eps=0.5)
        tensor([0.5000, 0.5000, 1.5000])
    """
    _check_tensor("x", x)
    check_number("eps", eps, "finite and not negative")
    return x.relu() + eps if eps else x.relu()


def softplus(x: Tensor) -> Tensor:
    r"""A smooth and positive form of `relu`.

    `Transformers are RNNs <https://arxiv.org/abs/2006.16236>`_ allows any feature map with positive values. With this
    one, unlike with :func:`relu`, a target always has weights and every key always has a gradient.

    .. math::
        \phi(x) = \log(1 + e^x)

    It is accurate for all numbers, whereas the function of PyTorch returns :math:`x` itself above 20.

    Args:
        x: Queries or keys, `[..., N, H, C]`.

    Returns:
        Their features, of the same shape and type.

    Raises:
        TypeError: If `x` is not a tensor.
        ValueError: If `x` does not hold floating-point numbers.

    Example:
        >>> import torch
        >>> from gattn.features import softplus
        >>> softplus(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([0.3133, 0.6931, 1.3133])
    """
    _check_tensor("x", x)
    return -F.logsigmoid(-x)


def sigmoid(x: Tensor) -> Tensor:
    r"""The feature map of the global attention in `Polynormer <https://arxiv.org/abs/2403.01232>`_.

    .. math::
        \phi(x) = \frac{1}{1 + e^{-x}}

    Args:
        x: Queries or keys, `[..., N, H, C]`.

    Returns:
        Their features, of the same shape and type.

    Raises:
        TypeError: If `x` is not a tensor.
        ValueError: If `x` does not hold floating-point numbers.

    Example:
        >>> import torch
        >>> from gattn.features import sigmoid
        >>> sigmoid(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([0.2689, 0.5000, 0.7311])
    """
    _check_tensor("x", x)
    return x.sigmoid()


def cosine(x: Tensor) -> Tensor:
    r"""Vectors of unit length, whose products are cosines, as in `SGFormer <https://arxiv.org/abs/2306.10759>`_.

    .. math::
        \phi(x) = \frac{x}{\lVert x \rVert}

    A vector of zeros stays zero, and its derivatives are finite. Cosines may be negative and their sum may be close to
    zero, so `Identity(normalize=True)` alone is rarely what is wanted. The attention in SGFormer adds N, the number of
    nodes, to the weight of each node on itself, and then divides by the sum, which the example below does.

    Args:
        x: Queries or keys, `[..., N, H, C]`.

    Returns:
        Their features, of the same shape and type.

    Raises:
        TypeError: If `x` is not a tensor.
        ValueError: If `x` does not hold floating-point numbers, or has no dimension.

    Example:
        >>> import torch, gattn
        >>> from gattn.features import cosine
        >>> cosine(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
        >>> query, key, value = torch.randn(3, 5, 1, 8).unbind()  # 5 nodes, 1 head, 8 channels
        >>> value = torch.cat([value, torch.ones(5, 1, 1)], dim=-1)  # the last channel becomes the sum of the weights
        >>> sums = gattn.attend(cosine(query), cosine(key), value, gattn.CompleteGraph(5),
        ...                     score=gattn.DotScore(scale=1.0), distribution=gattn.Identity()) + 5 * value
        >>> (sums[..., :-1] / sums[..., -1:]).shape
        torch.Size([5, 1, 8])
    """
    _check_tensor("x", x)
    if x.dim() == 0:
        raise InputError("x must be queries or keys [..., N, H, C]; got a tensor without dimensions.")
    return unit(x)


def orthogonal_features(
    num_features: int,
    channels: int,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    r"""Random vectors with the distribution of a standard normal one each, in orthogonal blocks of C vectors.

    They are the :math:`\omega_r` of `Performer <https://arxiv.org/abs/2009.14794>`_. With orthogonal vectors, the
    variance of its estimate is smaller than with independent ones. Each block is

    .. math::
        \omega = D Q, \qquad Q \sim \text{uniform on the orthogonal matrices}, \qquad D_{rr} \sim \chi_C

    The `PerformerAttention` of PyG has vectors of length 1 instead, whose signs are not random.

    Args:
        num_features: The number of vectors, R.
        channels: The number of channels of queries and keys, C.
        generator: The generator of random numbers. (default: `None`, the one of PyTorch)
        dtype: The type of the result. (default: `None`, the default type of PyTorch)
        device: The device of the result. (default: `None`, the one of the generator if there is one, otherwise the
            default device of PyTorch)

    Returns:
        The vectors, `[R, C]`.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If a number is less than 1, or `dtype` is not a floating-point type.

    Example:
        >>> import torch
        >>> from gattn.features import orthogonal_features
        >>> omega = orthogonal_features(4, 8, generator=torch.Generator().manual_seed(0))
        >>> omega.shape, bool((omega @ omega.T).fill_diagonal_(0.0).abs().max() < 1e-5)
        (torch.Size([4, 8]), True)
    """
    check_at_least(1, num_features=num_features, channels=channels)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not dtype.is_floating_point:
        raise InputError(f"dtype must be a floating-point type; got {dtype}.")
    drawn_on = device if generator is None else generator.device
    wide = torch.promote_types(dtype, torch.float32)  # in which matrices can be factorised
    blocks = torch.randn(
        -(-num_features // channels), channels, channels, generator=generator, dtype=wide, device=drawn_on
    )
    lengths = torch.randn(num_features, channels, generator=generator, dtype=wide, device=drawn_on)
    q, r = torch.linalg.qr(blocks)
    # The signs of the factorisation are not random, so that its vectors would fill only one half of the sphere.
    q = q * r.diagonal(dim1=-2, dim2=-1).sgn().unsqueeze(-2)
    vectors: Tensor = q.mT.flatten(0, 1)[:num_features] * lengths.norm(dim=1, keepdim=True)
    return vectors.to(device=drawn_on if device is None else device, dtype=dtype)


def favor(
    query: Tensor,
    key: Tensor,
    projection: Tensor,
    graph: Graph | None = None,
    *,
    scale: float | None = None,
    stabilize: bool = True,
    eps: float = 0.0,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Positive random features, with which linear attention approximates the softmax of dot products.

    They are the FAVOR+ of `Rethinking Attention with Performers <https://arxiv.org/abs/2009.14794>`_:

    .. math::
        \phi_r(x) = \frac{1}{\sqrt{R}} \exp\left(\omega_r^\top \sqrt{c} \, x - \frac{c}{2} \lVert x \rVert^2\right),
        \qquad \mathbb{E}\left[\phi(q)^\top \phi(k)\right] = \exp(c \, q^\top k)

    The error decreases with the square root of R, and grows exponentially with the squared lengths of the vectors.

    With `stabilize`, exponents are shifted so that none overflows. For keys, the maximum :math:`m_r` of feature r over
    all keys of the graph is subtracted. For queries, it is added, which cancels it, and then the maximum over all r is
    subtracted. A constant c is then added to both: 33 in float32 and bfloat16, 340 in float64, 11 in float16. What
    remains is one factor per target, which cancels when weights are divided by their sum. For a target that sees all
    keys of its graph, this sum is at least :math:`e^{2b} / R`, so it is never zero. Published programs add a small
    number to each feature to prevent that, which pulls all weights towards their mean; here, none is added unless `eps`
    says so. Its size means something only beside theirs, so exponents are then shifted as in these programs: by the
    largest :math:`\omega_r^\top \sqrt{c} \, x` of a query, and of all keys of a graph together.

    Each graph of a batch has its own maxima, so that results do not depend on the other graphs. In a causal graph, the
    maxima are also taken over later keys. They cancel, so results depend on later keys through rounding only, unless
    the exponents of later keys are larger by 70 (in float64 by 680, in float16 by 16): the features of earlier keys are
    then zero, and so may be the output of targets that see nothing else. (Smaller numbers would have gradients that
    overflow.) Where that matters, or where weights are not divided by their sum, use `stabilize=False`, which leaves
    exponents as they are. They may overflow if vectors are long.

    Exponents are computed in float32 or float64, also under autocast.

    Args:
        query: `[..., N, H, C]`.
        key: `[..., M, H, C]`, possibly with fewer heads that divide H.
        projection: The vectors :math:`\omega_r`, `[R, C]`, as from :func:`orthogonal_features`.
        graph: The graph of the attention, whose blocks and lengths say which keys belong together; on a sharded graph,
            the maxima are those of all processes. (default: `None`, all keys of each element of the batch)
        scale: The factor :math:`c` of dot products. (default: `None`, :math:`1 / \sqrt{C}`)
        stabilize: Whether the maxima are subtracted. (default: `True`)
        eps: What is added to each exponential; performer-pytorch adds 1e-4. (default: `0.0`)
        mask: Which keys of a padded batch exist, `[..., M]`. (default: `None`, all)

    Returns:
        The features of queries, `[..., N, H, R]`, and of keys, `[..., M, H, R]`, in the types of `query` and `key`.
        Those of padded keys are zero.

    Raises:
        TypeError: If `query`, `key` or `projection` is not a tensor, `graph` is neither a `CompleteGraph` nor sharded,
            `scale` is not a number, or `stabilize` is neither true nor false.
        ValueError: If tensors do not hold floating-point numbers, shapes do not fit each other or the graph, `scale` is
            not positive and finite, `eps` is negative or given without `stabilize`, or `mask` is not of booleans.

    Example:
        >>> import torch, gattn
        >>> from gattn.features import favor, orthogonal_features
        >>> query, key, value = torch.randn(3, 5, 2, 8).unbind()  # 5 nodes, 2 heads, 8 channels
        >>> graph = gattn.CompleteGraph.packed([3, 2])  # two graphs, of 3 and 2 nodes
        >>> query, key = favor(query, key, orthogonal_features(16, 8), graph)
        >>> gattn.attend(query, key, value, graph, score=gattn.DotScore(scale=1.0),
        ...              distribution=gattn.Identity(normalize=True)).shape
        torch.Size([5, 2, 8])
    """
    _check_favor(query, key, projection, graph, scale, stabilize, eps)
    real = None if graph is None else _real_keys(graph, key)
    if mask is not None:
        if mask.dtype != torch.bool or mask.shape != key.shape[:-2]:
            raise InputError(f"mask must be booleans {list(key.shape[:-2])}, one for each key; got {list(mask.shape)}.")
        real = mask[..., None, None] if real is None else real & mask[..., None, None]
    scale = 1.0 / math.sqrt(max(query.size(-1), 1)) if scale is None else scale
    if real is not None:
        key = key.masked_fill(~real, 0.0)  # a NaN in the padding would reach gradients
    if eps:
        return _favor_with_eps(query, key, projection, graph, real, scale, eps)
    to_query, to_key = _exponents(query, projection, scale, not stabilize), _exponents(key, projection, scale)
    if real is not None:
        to_key = to_key.masked_fill(~real, -torch.inf)
    if stabilize:
        per_key, per_target = _maxima(to_key.detach(), graph)
        heads = query.size(-2) // max(key.size(-2), 1)
        to_key = to_key - per_key
        to_query = to_query + (per_target if heads == 1 else per_target.repeat_interleave(heads, dim=-2))
        to_query = to_query - to_query.detach().amax(-1, keepdim=True)
    rows = 1.0 / math.sqrt(projection.size(0))

    def features(exponents: Tensor, dtype: torch.dtype) -> Tensor:
        if not stabilize:
            return (exponents.exp() * rows).to(dtype)
        smallest, largest = _SPANS.get(dtype, _SPANS[torch.float32])
        exponents = exponents + largest
        return (exponents.exp() * rows).to(dtype).masked_fill(exponents < smallest, 0.0)

    return features(to_query, query.dtype), features(to_key, key.dtype)


class Favor(torch.nn.Module):
    r"""The feature map of `Rethinking Attention with Performers <https://arxiv.org/abs/2009.14794>`_.

    It holds the random vectors of :func:`favor` as a buffer, which is saved with a model.

    .. math::
        \phi_r(x) = \frac{1}{\sqrt{R}} \exp\left(\omega_r^\top \sqrt{c} \, x - \frac{c}{2} \lVert x \rVert^2\right)

    Args:
        channels: The number of channels of queries and keys, C.
        num_features: The number of random features, R. (default: `None`, :math:`\lfloor C \ln C \rfloor`, at least 1)
        scale: The factor :math:`c` of dot products. (default: `None`, :math:`1 / \sqrt{C}`)
        stabilize: Whether maxima are subtracted from exponents; see :func:`favor`. (default: `True`)
        eps: What is added to each exponential; see :func:`favor`. (default: `0.0`)
        generator: The generator of the random vectors. (default: `None`, the one of PyTorch)

    Shapes:
        - **input:** queries `[..., N, H, C]`, keys `[..., M, H, C]`.
        - **output:** their features, `[..., N, H, R]` and `[..., M, H, R]`.

    Raises:
        TypeError: If `channels` or `num_features` is not an integer, `scale` is not a number, or `stabilize` is neither
            true nor false.
        ValueError: If `channels` or `num_features` is less than 1, `scale` is not positive and finite, or `eps` is
            negative or given without `stabilize`.

    Example:
        >>> import torch, gattn
        >>> from gattn.features import Favor
        >>> query, key, value = torch.randn(3, 5, 2, 8).unbind()  # 5 nodes, 2 heads, 8 channels
        >>> features, graph = Favor(channels=8, num_features=32), gattn.CompleteGraph(5)
        >>> gattn.attend(*features(query, key, graph), value, graph, score=gattn.DotScore(scale=1.0),
        ...              distribution=gattn.Identity(normalize=True)).shape
        torch.Size([5, 2, 8])
    """

    projection: Tensor

    def __init__(
        self,
        channels: int,
        num_features: int | None = None,
        *,
        scale: float | None = None,
        stabilize: bool = True,
        eps: float = 0.0,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        check_at_least(1, channels=channels)
        num_features = max(int(channels * math.log(channels)), 1) if num_features is None else num_features
        _check_options(scale, stabilize, eps)
        self.scale = scale
        self.stabilize = stabilize
        self.eps = eps
        self.register_buffer("projection", orthogonal_features(num_features, channels, generator=generator))

    def reset_parameters(self) -> None:
        """Draws new random vectors, since there are no parameters."""
        self.redraw()

    @torch.no_grad()
    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draws new random vectors, which the paper recommends to do regularly during training.

        Args:
            generator: The generator of random numbers. (default: `None`, the one of PyTorch)
        """
        old = self.projection
        new = orthogonal_features(*old.shape, generator=generator, dtype=old.dtype, device=old.device)
        old.copy_(new)

    def forward(
        self, query: Tensor, key: Tensor, graph: Graph | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Computes the features of queries and keys.

        Args:
            query: `[..., N, H, C]`.
            key: `[..., M, H, C]`, possibly with fewer heads that divide H.
            graph: The graph of the attention. (default: `None`, all keys of each element of the batch)
            mask: Which keys of a padded batch exist, `[..., M]`. (default: `None`, all)

        Returns:
            The features of queries, `[..., N, H, R]`, and of keys, `[..., M, H, R]`.
        """
        options: dict[str, Any] = {"scale": self.scale, "stabilize": self.stabilize, "eps": self.eps}
        return favor(query, key, self.projection, graph, **options, mask=mask)

    def extra_repr(self) -> str:
        """The sizes, and the options that are not the defaults."""
        num_features, channels = self.projection.shape
        options = f", scale={self.scale}" * (self.scale is not None) + ", stabilize=False" * (not self.stabilize)
        options += f", eps={self.eps}" * (self.eps > 0)
        return f"{channels}, num_features={num_features}{options}"


def _exponents(x: Tensor, projection: Tensor, scale: float, with_length: bool = True) -> Tensor:
    """The exponents of the features, `[..., N, H, R]`, or their part that differs between features."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, projection.dtype), torch.float32)
    x = x.to(dtype) * math.sqrt(scale)
    with without_autocast(x):
        products = x @ projection.to(dtype).mT
    return products - 0.5 * x.square().sum(-1, keepdim=True) if with_length else products


def _favor_with_eps(
    query: Tensor, key: Tensor, projection: Tensor, graph: Graph | None, real: Tensor | None, scale: float, eps: float
) -> tuple[Tensor, Tensor]:
    """The features with what published programs add to them, shifted as there."""
    rows, found = 1.0 / math.sqrt(projection.size(0)), []
    for place, x in enumerate((query, key)):
        exponents = _exponents(x, projection, scale, with_length=False)
        largest = exponents.detach().amax(-1, keepdim=True)
        if place == 1:
            largest = _maxima(largest if real is None else largest.masked_fill(~real, -torch.inf), graph)[0]
        length = 0.5 * scale * x.to(exponents.dtype).square().sum(-1, keepdim=True)
        found.append((((exponents - length - largest).exp() + eps) * rows).to(x.dtype))
    of_query, of_key = found
    return of_query, of_key if real is None else of_key.masked_fill(~real, 0.0)


def _maxima(exponents: Tensor, graph: Graph | None) -> tuple[Tensor, Tensor]:
    """The maximum of each feature over the keys of a graph, for each of its keys and for each of its targets."""
    if graph is None or graph.blocks is None or exponents.size(-3) == 0:
        largest = F.pad(exponents, (0, 0, 0, 0, 0, 1), value=-torch.inf).amax(-3, keepdim=True)  # there may be no keys
        largest = largest if graph is None else graph.of_all_processes(largest).amax(0)
        largest = largest.masked_fill(largest == -torch.inf, 0.0)  # of an element without real keys
        return largest, largest
    assert isinstance(graph, CompleteGraph)
    of_target, _ = graph.block_of_each("target", exponents.device)
    of_key, count = graph.block_of_each("source", exponents.device)
    largest = scatter(exponents, of_key, dim=exponents.dim() - 3, dim_size=count, reduce="max")
    return largest.index_select(-3, of_key), largest.index_select(-3, of_target)


def _real_keys(graph: Graph, key: Tensor) -> Tensor | None:
    """Which keys are not padding, `[..., M, 1, 1]`."""
    if graph.source_lengths is None:
        return None
    lengths = graph.source_lengths.to(key.device).unsqueeze(-1)
    places = graph.positions("source", 0, key.size(-3), key.device)
    return (places < lengths).unsqueeze(-1).unsqueeze(-1)


def _check_favor(
    query: Tensor,
    key: Tensor,
    projection: Tensor,
    graph: Graph | None,
    scale: float | None,
    stabilize: bool,
    eps: float,
) -> None:
    for name, x in (("query", query), ("key", key), ("projection", projection)):
        _check_tensor(name, x)
    _check_options(scale, stabilize, eps)
    if projection.dim() != 2 or projection.size(0) == 0:
        raise InputError(
            f"projection must have one row per random feature, [R, C], and at least one; got {list(projection.shape)}."
        )
    for name, x in (("query", query), ("key", key)):
        if x.dim() < 3 or x.size(-1) != projection.size(1):
            raise InputError(
                f"{name} must be [..., nodes, H, {projection.size(1)}], with as many channels as projection has "
                f"columns; got {list(x.shape)}."
            )
    if query.shape[:-3] != key.shape[:-3]:
        raise InputError(
            "query and key must have the same batch dimensions in front; got "
            f"{list(query.shape)} and {list(key.shape)}."
        )
    heads, shared = query.size(-2), key.size(-2)
    if heads != shared and (shared == 0 or heads % shared):
        raise InputError(f"the heads of key must divide those of query; got {shared} and {heads}.")
    if graph is None:
        return
    if not (isinstance(graph, CompleteGraph) or (isinstance(graph, Graph) and graph.is_sharded)):
        raise InputTypeError(
            f"graph must be a CompleteGraph, whose blocks say which keys belong together; got {type(graph).__name__}. "
            "For attention on another graph, leave it out: the maxima are then taken over all keys."
        )
    graph.resolve(key.size(-3), query.size(-3), query.shape[:-3], query.device)


def _check_options(scale: float | None, stabilize: bool, eps: float) -> None:
    if scale is not None:
        check_number("scale", scale, "positive and finite")
    check_flag("stabilize", stabilize)
    check_number("eps", eps, "finite and not negative")
    if eps and not stabilize:
        raise InputError("eps needs stabilize: its size means nothing beside exponentials of any size.")


def _check_tensor(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise InputTypeError(f"{name} must be a tensor; got {type(x).__name__}.")
    if not x.is_floating_point():
        raise InputError(f"{name} must hold floating-point numbers; got a tensor of {x.dtype}.")
