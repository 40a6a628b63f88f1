r"""How a target *i* and a source *j* are compared: the score functions.

Dimensions, here and everywhere in gattn: N targets, M sources, E edges, H heads, C channels, B batch.

A score holds tensors, not parameters: the layers own the parameters. Its `logits` *is* its definition, against which
every backend is tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from gattn.errors import InputError, check_number, check_real

__all__ = ["AdditiveScore", "CosineScore", "DotScore", "Family", "GATScore", "Score", "family_of", "says", "unit"]


class Family(NamedTuple):
    """How the kernels identify a score."""

    name: str
    """The name of its formula in the kernels."""
    constants: tuple[float, ...] = ()
    """The numbers in the formula, in the order in which the kernels name them."""
    vector: Tensor | None = None
    """The vector of each head, `[H, C]`, where the formula has one."""


class Score:
    r"""Base class of all score functions :math:`s(q_i, k_j, e_{ij})`, which compare the two ends of an edge.

    .. math::
        \alpha_{i\cdot} = p\big(s(q_i, k_j, e_{ij}) \text{ for } j \in \mathcal{N}(i)\big)

    `Luong et al. <https://arxiv.org/abs/1508.04025>`_ compare several. To add one, override :meth:`logits`. If it
    compares one scalar per head instead of a vector, set `scalar = True`. If its `logits` broadcasts, set `broadcasts =
    True`, and complete graphs need no list of edges. On lists of edges, the kernels compute the softmax and the sum of
    any score; they also compute the logits of those whose :meth:`family` they know.

    Shapes:
        query `[N, H, C]`, key `[M, H, C]`, edge `[E, H, C]`, logits `[E, H]`; a scalar score has no C.

    Raises:
        NotImplementedError: In use, if the subclass does not define :meth:`logits`.

    Example:
        >>> import torch, gattn
        >>> class NegativeDistance(gattn.Score):
        ...     def logits(self, query, key, edge):
        ...         return -(query - key).square().sum(-1)
        >>> x = torch.tensor([[[0.0]], [[1.0]]])  # two nodes, one head, one channel
        >>> gattn.attend(x, x, x, gattn.CompleteGraph(2), score=NegativeDistance()).flatten()
        tensor([0.2689, 0.7311])
    """

    #: Whether query and key are one scalar per head (`[N, H]`) rather than one vector (`[N, H, C]`).
    scalar: ClassVar[bool] = False

    #: Whether `logits` also compares targets `[B, N, 1, H, C]` with sources `[B, 1, M, H, C]` by broadcasting; B is 1
    #: without a batch.
    broadcasts: ClassVar[bool] = False

    #: Whether key and value may have fewer heads than the query (grouped queries).
    grouped: ClassVar[bool] = False

    #: Whether :meth:`folded` changes query or key, which half precision would round once more.
    folds: bool = False

    #: The names that this class's :meth:`family` may have.
    families: ClassVar[tuple[str, ...]] = ()

    _class_of_family: ClassVar[dict[str, type[Score]]] = {}

    def __init_subclass__(cls) -> None:
        for name in vars(cls).get("families", ()):
            Score._class_of_family[name] = cls

    @staticmethod
    def known_families() -> tuple[str, ...]:
        """The names by which kernels may know scores."""
        return tuple(Score._class_of_family)

    @staticmethod
    def class_of_family(name: str) -> type[Score]:
        """The class of the scores that kernels know by this name.

        Raises:
            ValueError: If no score has it.
        """
        if name not in Score._class_of_family:
            raise ValueError(f"no score belongs to the family {name!r}.")
        return Score._class_of_family[name]

    @classmethod
    def from_family(cls, family: Family) -> Score:
        """The score that the kernels know as `family`."""
        raise NotImplementedError(f"{cls.__name__} has no family.")

    def family(self, channels: int) -> Family | None:
        """How the kernels know the score, once it is :meth:`folded`; `None` if they do not.

        Args:
            channels: C, 1 for a scalar score.
        """
        return None

    def logits(self, query: Tensor | None, key: Tensor, edge: Tensor | None) -> Tensor:
        """Compares the two ends of each edge, independently of other edges: calls may cover only some of the edges.

        The arguments are not copies: do not change them in place.

        Args:
            query: Target-side term of each edge, `[..., E, H, C]` (`[..., E, H]` for a scalar score, or `None`).
            key: Source-side term of each edge, of the same shape.
            edge: The edge's own term, of the same shape, or `None`.

        Returns:
            One logit per edge and head, `[..., E, H]`, of a floating-point type.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define logits().")

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that the score itself holds (they take part in type promotion and in gradients)."""
        return ()

    def to(self, dtype: torch.dtype) -> Self:
        """The same score with its tensors in another type; the score itself if it holds none."""
        return self

    def folded(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Score]:
        """An equivalent query, key and score, where the score is its :meth:`family` alone, without other tensors."""
        return query, key, self

    def check(self, heads: int, channels: int) -> None:
        """Raises `ValueError` if the score's own tensors do not fit `heads` and `channels`."""


def family_of(score: Score, channels: int) -> Family | None:
    """How the kernels know a score; `None` if a subclass overrides the formula of the class that names the family."""
    return None if says(score, "family", "logits") is None else score.family(channels)


def says(instance: Any, attribute: str, method: str) -> Any:
    """A class's attribute about one of its methods; `None` if the instance overrides that method."""
    cls = type(instance)
    for owner in cls.__mro__:  # twice as fast as next()
        if attribute in vars(owner):
            break
    is_same = getattr(cls, method) is getattr(owner, method) and method not in vars(instance)
    return getattr(cls, attribute) if is_same else None


class GATScore(Score):
    r"""The score of `Graph Attention Networks <https://arxiv.org/abs/1710.10903>`_: a sum of scalars.

    .. math::
        s_{ij} = \mathrm{LeakyReLU}(t_i + s_j + e_{ij}),
        \quad t_i = \langle a_{dst}, W h_i \rangle, \; s_j = \langle a_{src}, W h_j \rangle

    Args:
        negative_slope: Slope of the LeakyReLU for negative inputs. (default: `0.2`)

    Shapes:
        query `[N, H]` or `None` (no target-side term), key `[M, H]`, edge `[E, H]`.

    Raises:
        TypeError: If `negative_slope` is not a number, such as a tensor, which would get no gradient.
        ValueError: If `negative_slope` is not finite.

    Example:
        >>> import torch, gattn
        >>> logits, value = torch.zeros(3, 2), torch.randn(3, 2, 8)  # 3 nodes, 2 heads, 8 channels
        >>> gattn.attend(logits, logits, value, torch.tensor([[0, 1], [2, 2]]), score=gattn.GATScore()).shape
        torch.Size([3, 2, 8])
    """

    scalar = True
    broadcasts = True
    families = ("gat",)

    def __init__(self, negative_slope: float = 0.2):
        check_number("negative_slope", negative_slope)
        self.negative_slope = negative_slope

    def family(self, channels: int) -> Family:
        """See `Score.family`."""
        return Family("gat", (self.negative_slope,))

    @classmethod
    def from_family(cls, family: Family) -> GATScore:
        """See `Score.from_family`."""
        return cls(*family.constants)

    def logits(self, query: Tensor | None, key: Tensor, edge: Tensor | None) -> Tensor:
        """See `Score.logits`."""
        logits = key if query is None else query + key
        if edge is not None:
            logits = logits + edge
        return F.leaky_relu(logits, self.negative_slope)

    def __repr__(self) -> str:
        return f"GATScore(negative_slope={self.negative_slope})"


#: The activations of additive scores, each from the hidden layer and the negative slope.
_ACTIVATIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "leaky_relu": F.leaky_relu,
    "tanh": lambda hidden, negative_slope: hidden.tanh(),
    "relu": lambda hidden, negative_slope: hidden.relu(),
    "identity": lambda hidden, negative_slope: hidden,
    "elu": lambda hidden, negative_slope: F.elu(hidden),
    "gelu": lambda hidden, negative_slope: F.gelu(hidden),
    "silu": lambda hidden, negative_slope: F.silu(hidden),
}
#: Those that equal a LeakyReLU of this slope.
_SLOPES = {"relu": 0.0, "identity": 1.0}
#: The others, in the order in which kernels number them.
_SMOOTH = ("tanh", "elu", "gelu", "silu")


class AdditiveScore(Score):
    r"""Additive attention: a small network with one hidden layer.

    .. math::
        s_{ij} = a^{\top} \sigma(q_i + k_j + e_{ij})

    With :math:`\sigma` = LeakyReLU, it is the score of `GATv2 <https://arxiv.org/abs/2105.14491>`_; with
    :math:`\sigma = \tanh`, that of `Bahdanau et al. <https://arxiv.org/abs/1409.0473>`_ and the *concat* score of
    `Luong et al. <https://arxiv.org/abs/1508.04025>`_.

    Args:
        vector: The vector :math:`a` of each head, `[H, C]`.
        activation: `"leaky_relu"`, `"tanh"`, `"relu"`, `"elu"`, `"gelu"`, `"silu"` or `"identity"`.
            (default: `"leaky_relu"`)
        negative_slope: Slope of the LeakyReLU for negative inputs. (default: `None`, 0.2)

    Shapes:
        query `[N, H, C]`, key `[M, H, C]`, edge `[E, H, C]`.

    Raises:
        TypeError: If `vector` is not a tensor, or `negative_slope` is not a number.
        ValueError: If `vector` is not `[H, C]` or not real, the activation is unknown, `negative_slope` is not finite
            or is given for another activation than `"leaky_relu"`, or (in use) `vector` does not fit the heads and
            channels.

    Example:
        >>> import torch, gattn
        >>> x = torch.randn(3, 2, 8)  # 3 nodes, 2 heads, 8 channels
        >>> bahdanau = gattn.AdditiveScore(torch.randn(2, 8), activation="tanh")
        >>> gattn.attend(x, x, x, torch.tensor([[0, 1], [2, 2]]), score=bahdanau).shape
        torch.Size([3, 2, 8])
    """

    broadcasts = True
    families = ("leaky_relu", "smooth")

    def __init__(self, vector: Tensor, activation: str = "leaky_relu", negative_slope: float | None = None):
        if not isinstance(vector, Tensor):
            raise TypeError(f"AdditiveScore's vector must be a tensor; got {type(vector).__name__}.")
        if vector.dim() != 2:
            raise ValueError(
                f"AdditiveScore's vector must have one row per head, [H, C]; got shape {list(vector.shape)}."
            )
        check_real("AdditiveScore's vector", vector)
        if not isinstance(activation, str) or activation not in _ACTIVATIONS:
            known = ", ".join(repr(name) for name in _ACTIVATIONS)
            raise InputError(f"AdditiveScore's activation must be one of {known}; got {activation!r}.")
        if negative_slope is not None:
            check_number("negative_slope", negative_slope)
            if activation != "leaky_relu":
                raise ValueError(
                    "AdditiveScore's negative_slope is that of activation='leaky_relu'; leave it out for "
                    f"{activation!r}."
                )
        self.vector = vector
        self.activation = activation
        self.negative_slope = 0.2 if negative_slope is None else negative_slope

    def family(self, channels: int) -> Family:
        """See `Score.family`."""
        if self.activation in _SMOOTH:
            return Family("smooth", (float(_SMOOTH.index(self.activation)),), self.vector)
        return Family("leaky_relu", (_SLOPES.get(self.activation, self.negative_slope),), self.vector)

    @classmethod
    def from_family(cls, family: Family) -> AdditiveScore:
        """See `Score.from_family`."""
        assert family.vector is not None
        if family.name == "smooth":
            return cls(family.vector, _SMOOTH[int(family.constants[0])])
        return cls(family.vector, family.name, *family.constants)

    def to(self, dtype: torch.dtype) -> AdditiveScore:
        """See `Score.to`."""
        negative_slope = self.negative_slope if self.activation == "leaky_relu" else None
        return AdditiveScore(self.vector.to(dtype), self.activation, negative_slope)

    def logits(self, query: Tensor | None, key: Tensor, edge: Tensor | None) -> Tensor:
        """See `Score.logits`."""
        hidden = _ACTIVATIONS[self.activation](self.hidden(query, key, edge), self.negative_slope)
        return (hidden * self.vector).sum(-1)

    def hidden(self, query: Tensor | None, key: Tensor, edge: Tensor | None) -> Tensor:
        """The input of the activation for each edge; takes the arguments of `logits` and has their shape."""
        hidden = key if query is None else query + key
        return hidden if edge is None else hidden + edge

    def tensors(self) -> tuple[Tensor, ...]:
        """The vector :math:`a`."""
        return (self.vector,)

    def check(self, heads: int, channels: int) -> None:
        """Raises `ValueError` if the vector does not fit `heads` and `channels`."""
        if tuple(self.vector.shape) != (heads, channels):
            raise ValueError(
                f"AdditiveScore's vector is {list(self.vector.shape)}, but query and key have {heads} heads and "
                f"{channels} channels; it must be [{heads}, {channels}]."
            )

    def __repr__(self) -> str:
        slope = f", negative_slope={self.negative_slope}" if self.activation == "leaky_relu" else ""
        return f"AdditiveScore(vector={list(self.vector.shape)}, activation={self.activation!r}{slope})"


#: The least number that float32 does not take for zero.
_LEAST_SCALE = 2.0**-126


class DotScore(Score):
    r"""The (scaled) dot product of `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_.

    .. math::
        s_{ij} = \mathrm{clamp}(\mathrm{LeakyReLU}(c \cdot q_i^{\top} (k_j + e_{ij})), -b, b)
        \quad \text{or, with } \odot \text{ for } +, \quad q_i^{\top} (k_j \odot e_{ij})

    With `edge="multiply"` and `clamp=5`, it is the score of `A Generalization of Transformer Networks to Graphs
    <https://arxiv.org/abs/2012.09699>`_.

    Args:
        scale: The factor :math:`c`; `None` means :math:`1 / \sqrt{C}`, `1.0` gives Luong's plain dot product. Or a
            tensor: a single number, or one per head, `[H]`, which may be learnt. (default: `None`)
        negative_slope: Slope of the LeakyReLU for negative products; 1 means no LeakyReLU. (default: `1.0`)
        edge: How an edge's term is combined with the key: `"add"` or `"multiply"`. (default: `"add"`)
        clamp: The bound :math:`b` of the score. (default: `None`, no bound)

    Shapes:
        query `[N, H, C]`, key `[M, H, C]`, edge `[E, H, C]`. Key and value may have fewer heads, a number that
        divides H (grouped queries): consecutive query heads then share one.

    Raises:
        TypeError: If `scale` is neither a number nor a tensor, or `negative_slope` or `clamp` is not a number, such as
            a tensor, which would get no gradient.
        ValueError: If `edge` is unknown, `clamp` is not positive, another number is not finite, `scale` is not real, or
            (in use) the scale does not fit the heads.

    Example:
        >>> import torch, gattn
        >>> query, key = torch.randn(3, 4, 8), torch.randn(3, 2, 8)  # 4 query heads share 2 of key and value
        >>> gattn.attend(query, key, key, gattn.CompleteGraph(3), score=gattn.DotScore(scale=1.0)).shape
        torch.Size([3, 4, 8])
    """

    grouped = True
    broadcasts = True
    families = ("dot",)

    def __init__(
        self,
        scale: float | Tensor | None = None,
        negative_slope: float = 1.0,
        *,
        edge: str = "add",
        clamp: float | None = None,
    ):
        if scale is not None:
            check_number("scale", scale, or_tensor=True)
        check_number("negative_slope", negative_slope)
        if edge not in ("add", "multiply"):
            raise ValueError(f"DotScore's edge must be 'add' or 'multiply'; got {edge!r}.")
        if clamp is not None:
            check_number("clamp", clamp, "positive")
        self.scale = scale
        self.negative_slope = negative_slope
        self.edge = edge
        self.clamp = clamp

    @property
    def folds(self) -> bool:  # type: ignore[override]
        """See `Score.folds`: fused kernels also multiply their mask of minus infinities by the scale."""
        return isinstance(self.scale, Tensor) or (self.scale is not None and self.scale < _LEAST_SCALE)

    @property
    def is_product(self) -> bool:
        """Whether the score is the scaled product and nothing else, where edges have no terms."""
        return self.negative_slope == 1.0 and self.clamp is None

    def family(self, channels: int) -> Family:
        """See `Score.family`."""
        scale = 1.0 if self.folds else self.factor(channels)
        return Family("dot", (scale, self.negative_slope, float(self.edge == "multiply"), self.clamp or 0.0))

    @classmethod
    def from_family(cls, family: Family) -> DotScore:
        """See `Score.from_family`."""
        scale, negative_slope, multiplies, bound = family.constants
        edge = "multiply" if multiplies else "add"
        return cls(scale, negative_slope, edge=edge, clamp=bound or None)

    def logits(self, query: Tensor | None, key: Tensor, edge: Tensor | None) -> Tensor:
        """See `Score.logits`."""
        if query is None:
            raise ValueError("DotScore multiplies query and key; only GATScore takes query=None.")
        if edge is not None:
            key = key + edge if self.edge == "add" else key * edge
        logits: Tensor = (query * key).sum(-1) * self.factor(key.size(-1))
        if self.negative_slope != 1.0:
            logits = F.leaky_relu(logits, self.negative_slope)
        return logits if self.clamp is None else logits.clamp(-self.clamp, self.clamp)

    def factor(self, channels: int) -> Any:
        """The factor :math:`c` for vectors of this many channels."""
        if self.scale is not None:
            return self.scale
        return 1 / math.sqrt(channels) if channels else 1.0

    def folded(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, DotScore]:
        """See `Score.folded`: a scale that is a tensor, or not positive, is multiplied into the query."""
        if not self.folds:
            return query, key, self
        score = DotScore(1.0, self.negative_slope, edge=self.edge, clamp=self.clamp)
        scale: Any = self.scale.unsqueeze(-1) if isinstance(self.scale, Tensor) else self.scale
        return (query * scale).to(query.dtype), key, score

    def check(self, heads: int, channels: int) -> None:
        """Raises `ValueError` if the scale is a tensor that does not fit `heads`."""
        if isinstance(self.scale, Tensor) and self.scale.shape not in ((), (1,), (heads,)):
            raise ValueError(
                f"{type(self).__name__}'s scale must be a number, or one per head, [{heads}]; got a tensor of "
                f"{list(self.scale.shape)}."
            )

    def __repr__(self) -> str:
        more = {"negative_slope": (self.negative_slope, 1.0), "edge": (self.edge, "add"), "clamp": (self.clamp, None)}
        given = [f", {name}={value!r}" for name, (value, usual) in more.items() if value != usual]
        return f"{type(self).__name__}(scale={self.scale}{''.join(given)})"


class CosineScore(DotScore):
    r"""The cosine of the angle between query and key, as in `AGNN <https://arxiv.org/abs/1803.03735>`_.

    .. math::
        s_{ij} = \beta \, \frac{q_i^{\top}}{\|q_i\|} \left(\frac{k_j}{\|k_j\|} + e_{ij}\right)

    Vectors shorter than :math:`10^{-12}` are divided by that number instead of their length, so that all derivatives at
    a zero vector are finite (the first are as large as :math:`10^{12}`).

    Args:
        scale: The factor :math:`\beta`, or a tensor: a single number, or one per head, `[H]`, which may be learnt.
            (default: `1.0`)

    Shapes:
        query `[N, H, C]`, key `[M, H, C]`, edge `[E, H, C]`. Heads may be grouped, as in `DotScore`.

    Raises:
        TypeError: If `scale` is neither a number nor a tensor.
        ValueError: If `scale` is not finite or not real, or (in use) does not fit the heads.

    Example:
        >>> import torch, gattn
        >>> x = torch.randn(3, 2, 8)  # 3 nodes, 2 heads, 8 channels
        >>> gattn.attend(x, x, x, torch.tensor([[0, 1], [2, 2]]), score=gattn.CosineScore()).shape
        torch.Size([3, 2, 8])
    """

    broadcasts = True
    folds = True

    def __init__(self, scale: float | Tensor = 1.0):
        super().__init__(scale)

    def family(self, channels: int) -> Family:
        """See `Score.family`."""
        return super().family(channels)

    def logits(self, query: Tensor | None, key: Tensor, edge: Tensor | None) -> Tensor:
        """See `Score.logits`."""
        return super().logits(None if query is None else unit(query), unit(key), edge)

    def folded(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, DotScore]:
        """See `Score.folded`: query and key get unit length, once per node instead of once per edge."""
        return DotScore(self.scale).folded(unit(query), unit(key))


def unit(x: Tensor) -> Tensor:
    """Vectors scaled to unit length, computed in float32 at least; those shorter than 1e-12, multiplied by 1e12."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if not wide.requires_grad:
        return F.normalize(wide, dim=-1).to(x.dtype)
    # The same, but the second derivatives of F.normalize are NaN at zero.
    is_short = torch.linalg.vector_norm(wide.detach(), dim=-1, keepdim=True) < 1e-12
    length: Tensor = torch.linalg.vector_norm(wide.masked_fill(is_short, 1.0), dim=-1, keepdim=True)
    return (wide / length.masked_fill(is_short, 1e-12)).to(x.dtype)
