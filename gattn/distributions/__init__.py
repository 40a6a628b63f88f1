r"""How the logits of one target's neighbours become weights: the distributions :math:`p`."""

from __future__ import annotations

from gattn.distributions.base import Distribution, Law, law_of
from gattn.distributions.gates import Gate, Identity, Logits, Sigmoid, Tanh
from gattn.distributions.hard import Hard
from gattn.distributions.local_gaussian import LocalGaussian
from gattn.distributions.softmax import Softmax, is_plain_softmax, softmax
from gattn.distributions.sparse import Entmax15, Sparsemax, TopK
from gattn.distributions.within_types import WithinTypes

__all__ = [
    "DISTRIBUTIONS",
    "LAWS",
    "Distribution",
    "Entmax15",
    "Gate",
    "Hard",
    "Identity",
    "Law",
    "LocalGaussian",
    "Logits",
    "Sigmoid",
    "Softmax",
    "Sparsemax",
    "Tanh",
    "TopK",
    "WithinTypes",
    "from_law",
    "is_plain_softmax",
    "law_of",
    "resolve_distribution",
    "softmax",
]

#: The names of distributions, where a name is enough.
DISTRIBUTIONS: dict[str, Distribution] = {
    "softmax": Softmax(),
    "sigmoid": Sigmoid(),
    "tanh": Tanh(),
    "identity": Identity(),
    "sparsemax": Sparsemax(),
    "entmax15": Entmax15(),
}

#: The names by which kernels may know distributions.
LAWS: dict[str, Distribution] = {**DISTRIBUTIONS, "top_k": TopK(1), "logits": Logits()}


def from_law(law: Law) -> Distribution:
    """The distribution that the kernels know as `law`."""
    return type(LAWS[law.name]).from_law(law)


def resolve_distribution(distribution: str | Distribution) -> Distribution:
    """Turns a name into the distribution it stands for; an object is returned as it is."""
    if isinstance(distribution, Distribution):
        return distribution
    if isinstance(distribution, str) and distribution in DISTRIBUTIONS:
        return DISTRIBUTIONS[distribution]
    known = ", ".join(repr(name) for name in DISTRIBUTIONS)
    raise ValueError(f"unknown distribution {distribution!r}: use {known} or an object of a gattn.Distribution class.")
