"""The one table of the tensors of an operator call, from which schemas, checks, gradients and readers follow.

A new tensor needs a row here, the kernels, and `by_reference` in `gattn.ops.plain_operator`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import torch
from torch import Tensor

from gattn.distributions import LAWS
from gattn.ops.call import compute_dtype
from gattn.scores import Score

__all__ = ["DIFFERENTIABLE", "GIVEN", "PLACES", "SCHEMA", "TERMS", "Inputs", "Term"]


class Term(NamedTuple):
    """A row of the table."""

    axes: str
    """A letter per dimension: N targets, M sources, E edges, H heads, G heads of key and value, h heads or 1,
    C channels of query and key, V channels of value, D features, R types. `*` stands for the batch dimensions, `?` for
    those or none."""
    dtype: Literal["storage", "compute", "score", "bool", "int64"] | None
    """The type of the value, that of the computation, or the score's, which is that of the computation if the score is
    scalar. `None`: size and type are checked elsewhere."""
    read: Literal["rows", "edges", "strides", "whole", "both ways"] | None
    """How kernels read it: dense rows with any stride between them; contiguous, but with or without a batch; with any
    strides; contiguous; contiguous and also with the last dimension in front. `None`: they don't."""
    differentiable: bool = True
    beside: Mapping[str, Term] = {}
    """Its forms beside other tensors."""

    @property
    def letters(self) -> str:
        """The axes without those of the batch."""
        return self.axes.lstrip("*?")

    @property
    def heads(self) -> int:
        """Which axis is heads, counted from the last, which is 1; 0 if none is."""
        return next((len(self.axes) - place for place, axis in enumerate(self.axes) if axis in "HGh"), 0)


#: What vectors of edges are made from: features or the terms of types.
_MADE = {"edge_projection": Term("ED", "storage", "whole"), "edge_type": Term("RHC", "score", "whole")}


class Inputs(NamedTuple):
    """The inputs of an operator: the table, first the tensors that a call is given, and what is not a tensor."""

    query: Annotated[Tensor | None, Term("*NHC", "score", "rows")]
    key: Annotated[Tensor, Term("*MGC", "score", "rows")]
    value: Annotated[Tensor | None, Term("*MGV", "storage", "rows")]
    """`None` if it is the key"""
    vector: Annotated[Tensor | None, Term("HC", "compute", "whole")]
    edge: Annotated[Tensor | None, Term("?EHC", "score", "edges", beside=_MADE)]
    edge_projection: Annotated[Tensor | None, Term("HCD", "compute", "both ways")]
    edge_type: Annotated[Tensor | None, Term("E", "int64", "whole", differentiable=False)]
    """The row of `edge` that belongs to each edge"""
    bias: Annotated[Tensor | None, Term("?EH", "compute", "edges")]
    mask: Annotated[Tensor | None, Term("?Eh", "bool", "strides", differentiable=False)]
    edge_value: Annotated[Tensor | None, Term("?EHV", "storage", "edges")]
    out_bias: Annotated[Tensor | None, Term("HV", "compute", "whole")]
    """Added to the output, for backends that can"""
    sink: Annotated[Tensor | None, Term("H", "compute", "whole")]
    """The logits of the softmax's sink"""
    edge_index: Annotated[Tensor, Term("2E", None, None, differentiable=False)]
    """Without the self-loops that `self_loops` adds"""
    seed: Annotated[Tensor | None, Term("", None, None, differentiable=False)]
    """The seed of the dropout; `None` if nothing is dropped"""
    num_targets: int
    self_loops: bool
    """Whether existing self-loops are replaced by one for each of the first min(N, M) nodes"""
    flow: str
    """Which row of `edge_index` holds the targets"""
    family: str
    """The name of the score's formula"""
    constants: list[float]
    """The numbers in that formula"""
    edge_is_value: bool
    """Whether `edge` is also the `edge_value`"""
    distribution: str
    """The name of the distribution's formula"""
    distribution_constants: list[float]
    """The numbers in that formula"""
    dropout: float
    traced: bool
    """Whether a compiled program is calling, which edits memory without increasing versions"""
    plan: Any = None
    """What a backend prepared for calls like this one; not an argument of the operator"""

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the operator."""
        return self[:-1]

    @property
    def values(self) -> Tensor:
        """The value, which may be the key."""
        return self.key if self.value is None else self.value

    @property
    def num_sources(self) -> int:
        """M."""
        return self.key.size(-3)

    @property
    def front(self) -> torch.Size:
        """The batch dimensions."""
        return self.values.shape[:-3]

    @property
    def heads(self) -> int:
        """H."""
        return (self.key if self.query is None else self.query).size(-2)

    @property
    def most_edges(self) -> int:
        """An upper bound of the number of edges, known without looking at them."""
        return self.edge_index.size(1) + (min(self.num_sources, self.num_targets) if self.self_loops else 0)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of the output, `[..., N, H, V]`."""
        return (*self.front, self.num_targets, self.heads, self.values.size(-1))

    def terms(self) -> Iterator[tuple[str, Tensor, Term]]:
        """The tensors of this call, with their names and their rows of the table, in the form that they have here."""
        for name, place in PLACES.items():
            tensor: Any = self[place]
            if tensor is not None:
                term = TERMS[name]
                forms = (form for other, form in term.beside.items() if getattr(self, other) is not None)
                yield name, tensor, next(forms, term)

    def check(self, num_edges: int) -> None:
        """Checks what the kernels assume: compiled code calls operators without any other check.

        Raises:
            ValueError: If a size, a type or a device does not fit the graph and the other inputs.
        """
        edge, dtype = self.edge, self.values.dtype
        front, (key_heads, value_channels) = self.front, self.values.shape[-2:]
        heads, channels = self.heads, self.key.size(-1)
        self.check_devices()
        if self.distribution not in LAWS:
            raise ValueError(f"no distribution is called {self.distribution!r}.")
        law = LAWS[self.distribution].law()
        if law is None or len(self.distribution_constants) != len(law.constants):
            raise ValueError(f"the distribution {self.distribution!r} has the wrong number of constants.")
        if self.sink is not None and self.distribution != "softmax":
            raise ValueError("only the softmax can have a sink.")
        if heads != key_heads and (key_heads == 0 or heads % key_heads != 0):
            raise ValueError(f"the {key_heads} heads of key and value must divide the {heads} heads of query.")
        makers = [name for name in _MADE if getattr(self, name) is not None]
        is_value = self.edge_is_value and (self.vector is not None or value_channels != channels)
        if makers and (edge is None or self.edge_value is not None or is_value or len(makers) > 1):
            raise ValueError(
                "edge_projection projects edge features [E, D], and edge_type selects rows [R, H, C] of edge: pass "
                "edge and one of them. The result can be values only without a vector and with as many channels."
            )
        nodes = self.num_targets, self.num_sources
        sizes = dict(zip("NMEGHCV", (*nodes, num_edges, key_heads, heads, channels, value_channels), strict=True))
        sizes["h"] = 1 if self.mask is not None and self.mask.shape[-1:] == (1,) else heads
        sizes["R"], sizes["D"] = (0, 0) if edge is None or edge.dim() == 0 else (edge.size(0), edge.size(-1))
        dtypes = {"storage": dtype, "compute": compute_dtype(dtype), "bool": torch.bool, "int64": torch.int64}
        dtypes["score"] = dtypes["compute" if Score.class_of_family(self.family).scalar else "storage"]
        terms = list(self.terms())
        if self.edge_is_value and edge is not None and not makers:
            terms.append(("edge", edge, TERMS["edge_value"]))
        for name, tensor, term in terms:
            if term.dtype is None:
                continue
            size, wanted = tuple(sizes[letter] for letter in term.letters), dtypes[term.dtype]
            fitting = {"*": [(*front, *size)], "?": [size, (*front, *size)]}.get(term.axes[0], [size])
            if tensor.shape not in fitting or tensor.dtype != wanted:
                raise ValueError(
                    f"{name} has shape {list(tensor.shape)} and type {tensor.dtype}, but must have {list(fitting[0])} "
                    f"and {wanted} to fit the graph and the other inputs."
                )

    def check_devices(self) -> None:
        """Raises `ValueError` if tensors are on several devices."""
        device = self.key.device
        for place in PLACES.values():
            tensor: Any = self[place]
            if tensor is not None and tensor.device != device:
                raise ValueError(f"all tensors must be on the same device; got {device} and {tensor.device}.")


#: The table, by name.
TERMS: dict[str, Term] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Inputs, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}

#: Where the tensors are among the inputs.
PLACES = {name: Inputs._fields.index(name) for name in TERMS}

#: The tensors that a call is given as they are; the graph, the distribution and a generator make the others.
GIVEN = tuple(TERMS)[: PLACES["sink"]]

#: Inputs that have gradients.
DIFFERENTIABLE = tuple(name for name, term in TERMS.items() if term.differentiable)

_SCHEMA_TYPES: dict[Any, str] = {Tensor: "Tensor", Tensor | None: "Tensor?", int: "SymInt", list[float]: "float[]"}

#: The inputs in an operator's schema.
SCHEMA = ", ".join(
    f"{_SCHEMA_TYPES.get(hint) or hint.__name__} {name}"
    for name, hint in get_type_hints(Inputs).items()
    if name != "plan"
)
