"""Attention on complete graphs by the CPU kernels for tiles of pairs: no tensor has a number for each pair.

They compute every score made of dot products and every distribution that looks at one logit at a time, or is a softmax,
with a bias and a mask of any broadcast shape, or a bias by distance, bucket or listed pair, a window, lengths, packed
blocks, a sink and dropout; and, once the output is known, the weights. With both passes:

    P_ij = w(z_ij) r_i,    dz_ij = w'(z_ij) r_i (dP_ij - D_i),    D_i = <dout_i, out_i> - dL_i

where z_ij is a logit, r_i one over the row's sum (of a gate that is not normalised: 1, and D_i = 0), dP_ij = <dout_i,
v_j> and dL_i the gradient of the log-sum-exp.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gattn.bias import Term
from gattn.distributions import Law, Softmax, from_law
from gattn.errors import InputError
from gattn.ops.backends.base import needs_plain_pytorch, new_seed
from gattn.ops.backends.cpu import native
from gattn.ops.backends.dense.gpu_tiles import GPUCall
from gattn.ops.backends.kernels import DTYPES
from gattn.ops.backends.triton import is_installed
from gattn.ops.call import compute_dtype
from gattn.ops.dropout import keep_mask_of_pairs
from gattn.ops.operator import are_plain, has_gradient
from gattn.ops.reference import repeat_heads
from gattn.processor import instructions
from gattn.torch_private import apply_of, is_batched, is_lazy, is_traced, resolved

__all__ = [
    "FAR",
    "LAWS",
    "Element",
    "Inputs",
    "Rule",
    "attend",
    "backward",
    "can_attend",
    "elements_of",
    "forward",
    "is_faster",
    "is_served",
    "outruns_pytorch",
    "read",
    "with_matrices",
]

#: The distributions that the kernels know.
LAWS = ("softmax", "sigmoid", "tanh", "identity")

#: Below this many multiplications, threads cost more than they gain.
_SERIAL = 2**17

#: The backward pass cuts sources into parts, each with a gradient of the queries, from these numbers on: two, and four.
_IN_PARTS = (1024, 4096)

#: How far a target sees that sees all: more than there are nodes, and far from where integers end.
FAR = 2**40

_SOFTMAX = Softmax().law()

#: Read once, because compiled code cannot.
_IS_ON_CPU = native.load_error() is None

#: The kinds of biases, in the order of the kernels: numbers of all pairs, and those of a `Term`.
_BIASES = ("all", "distances", "buckets", "listed")

#: In how many parts sums of buckets come, and the most numbers of all of them with which each element has its own.
_TABLE_PARTS, _MOST_SUMS = 4, 2**22

#: With fewer multiplications, a plain softmax is PyTorch's, whose calls cost less than those of the kernels.
_FEWEST = {torch.float32: 2**16, torch.float64: 2**17, torch.bfloat16: 2**15, torch.float16: 2**15}

#: The same for one target, as in decoding, whose kernel wins by reading keys once: with heads that share keys, and
#: without, where PyTorch is faster with gradients.
_FEWEST_SHARED, _FEWEST_OF_ONE = 2**18, 2**20

#: With any of these, PyTorch may be faster in half precision. With "avx512_bf16" alone (an EPYC), kernels took half its
#: time forward and two thirds with gradients.
_OF_HALF = frozenset(("avx512_fp16", "amx_bf16", "amx_fp16"))


class Element(NamedTuple):
    """Targets and sources that see each other, as positions in an entry of the batch."""

    batch: int
    first_target: int
    num_targets: int
    first_source: int
    num_sources: int
    offset: int
    """The position of target 0 among the sources"""
    term: int
    """The entry of bias and mask"""
    bias_at: int = 0
    """See `Term.places`"""
    bias_step: int = 0
    weights_at: int = 0
    """The first weight's place, and from one head and target to the next"""
    weights_head: int = 0
    weights_row: int = 0


class Rule(NamedTuple):
    """What is computed, beside tensors."""

    scale: float
    slope: float
    """Of a LeakyReLU of the products; 1: none"""
    clamp: float
    """The bound of the products"""
    law: Law
    left: int | None
    """How far before its own position a target sees; `None` means no limit"""
    right: int | None
    elements: tuple[Element, ...]
    dropout: float
    bias: str = "all"
    """What has a bias; see `Term.kind`"""
    first: int = 0
    """The smallest distance that has one"""
    weights: bool | str = False
    """Whether weights are returned, too; `"dropped"`: those after dropout"""
    log_sum: bool = True
    """Whether the log-sum-exp of each target is returned"""


def can_attend(tensors: Sequence[Tensor | None], law: Law | None) -> bool:
    """Whether `attend` can be called now.

    Args:
        tensors: Query, key, value, bias, mask and sink.
        law: The distribution.
    """
    query, key, value = tensors[:3]
    if law is None or law.name not in LAWS or query is None or key is None or value is None:
        return False
    if not is_served(value) or is_traced() or needs_plain_pytorch() is not None:
        return False
    if not query.dtype == key.dtype == value.dtype:
        return False
    is_empty = query.numel() * key.numel() == 0 or (value.numel() == 0 and value.size(-1) > 0)
    return not is_empty and are_plain([x for x in tensors if x is not None])


def is_served(x: Tensor) -> bool:
    """Whether there are kernels for a tensor's device and type."""
    if x.dtype not in DTYPES or x.device.type == "cpu":
        return x.dtype in DTYPES and _IS_ON_CPU
    # Triton's compiler fails on products in float64, and on older GPUs on those in bfloat16.
    return (
        x.is_cuda and x.dtype != torch.float64 and is_installed and torch.cuda.get_device_capability(x.device)[0] >= 8
    )


def is_faster(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None, dropout: float
) -> bool:
    """Whether `attend` can be called now, and is faster than PyTorch's fused attention."""
    if is_traced():  # before sizes are compared, which export leaves open
        return False
    is_plain = bias is None and mask is None
    is_worth_it = outruns_pytorch(query, key, value, is_plain, dropout)
    return is_worth_it and can_attend((query, key, value, bias, mask, None), _SOFTMAX)


def outruns_pytorch(query: Tensor, key: Tensor, value: Tensor, is_plain: bool, dropout: float) -> bool:
    """Whether tensors are on a CPU, and so large that `attend`, if it can be called, is faster than PyTorch's."""
    if query.device.type != "cpu":
        return False
    if dropout > 0.0:  # with which PyTorch makes a matrix
        return True
    if value.dtype not in _FEWEST or not _is_compared(value.dtype):
        return False
    work = query.numel() * key.size(-3)
    if not is_plain or work < _FEWEST[value.dtype]:
        return not is_plain
    if query.size(-3) > 1 or value.dtype.itemsize == 2:  # which PyTorch converts for one target, too
        return True
    if key.size(-2) < query.size(-2):
        return work >= _FEWEST_SHARED
    return work >= _FEWEST_OF_ONE and not has_gradient((query, key, value))


@cache
def _is_compared(dtype: torch.dtype) -> bool:
    """Whether the kernels were found to be faster than PyTorch's with this processor's instructions."""
    if native.load_error() is not None or native.library().gattn_instruction_set() == b"baseline":
        return False
    return dtype.itemsize > 2 or not _OF_HALF & instructions()


@lru_cache(maxsize=64)
def elements_of(
    known: tuple[tuple[int, ...], ...] | None,
    batch: int,
    num_targets: int,
    num_sources: int,
    offset: int,
    places: tuple[tuple[int, int], ...] = ((0, 0),),
) -> tuple[Element, ...]:
    """The elements of a batch or, `known`, of a ragged one, whose nodes are counted over all of the batch.

    Args:
        known: What `gattn.ops.backends.dense.ragged.elements_of` returns.
        batch: B.
        num_targets: N.
        num_sources: M.
        offset: The position of target 0, if none are known.
        places: Those of a `Term`. (default: none)

    Raises:
        ValueError: If an element has more nodes than there are.
    """
    if known is None:
        return tuple(
            Element(place, 0, num_targets, 0, num_sources, offset, place, *places[place % len(places)])
            for place in range(batch)
        )
    found = []
    for place, (first, n, first_source, m, offset) in enumerate(known):
        entry = place * batch // len(known)
        first, first_source = first - entry * num_targets, first_source - entry * num_sources
        # Lengths may have been edited after they were checked.
        if not (0 <= n <= num_targets - first and 0 <= m <= num_sources - first_source):
            raise InputError(f"the graph's lengths must lie between 0 and its sizes; got {n} targets and {m} sources.")
        found.append(Element(entry, first, n, first_source, m, offset, place, *places[place % len(places)]))
    return tuple(found)


@lru_cache(maxsize=64)
def with_matrices(
    elements: tuple[Element, ...], heads: int, size: tuple[int, int] | None, blocks: int
) -> tuple[tuple[Element, ...], int]:
    """The elements with places for their weights, `[H, N, M]` one after another, and how many weights there are.

    Args:
        elements: The elements.
        heads: H.
        size: N and M of all matrices; `None` if each is as large as its element.
        blocks: How many elements each entry of a batch has, if it is a packed graph's: those of a block come together.
    """
    found, end = dict[int, Element](), 0
    for place in sorted(range(len(elements)), key=lambda place: place % max(blocks, 1)):
        element = elements[place]
        n, m = size or (element.num_targets, element.num_sources)
        found[place] = element._replace(weights_at=end, weights_head=n * m, weights_row=m)
        end += heads * n * m
    return tuple(found[place] for place in range(len(elements))), end


def read(bias: Tensor | Term | None, heads: int) -> tuple[str, int, Tensor | None, Tensor | None, Tensor | None]:
    """What has a bias, the smallest distance, and `Inputs.bias`, `of_pairs` and `starts`, for so many heads."""
    if not isinstance(bias, Term):
        return "all", 0, bias, None, None
    values = bias.values.expand(-1, heads) if bias.kind == "listed" else bias.values
    return bias.kind, bias.first, values, bias.of_pairs, bias.starts


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | Term | None,
    mask: Tensor | None,
    sink: Tensor | None,
    rule: Rule,
    num_weights: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The output, `[B, N, H, V]`, the log-sum-exp of each target, `[B, N, H]`, of a softmax, and all weights in a row.

    Args:
        query: `[B, N, H, C]`; like the next two, without B if there is one entry.
        key: `[B, M, G, C]`, whose heads divide those of the query.
        value: `[B, M, G, V]`.
        bias: Broadcastable to `[B, H, N, M]`, or a term of the graph.
        mask: True = may attend, broadcastable likewise.
        sink: `[H]`.
        rule: What is computed.
        num_weights: How many weights are returned; see `with_matrices`. (default: `0`)
    """
    compute = compute_dtype(value.dtype)
    index = starts = None
    if isinstance(bias, Term):
        kind, first, bias, index, starts = read(bias, query.size(-2))
        rule = rule._replace(bias=kind, first=first)
    bias, sink = None if bias is None else bias.to(compute), None if sink is None else sink.to(compute)
    inputs = Inputs(query, key, value, bias, sink, mask, index, starts, new_seed(rule.dropout, value.device))
    if not has_gradient(inputs):
        out, _, log_sum, weights = forward(inputs, rule, num_weights, keeps=False)
        return out, log_sum, weights
    is_read = mask is not None or index is not None
    if is_read and not torch.is_inference_mode_enabled():  # autograd saves no tensor of that mode
        kept = [x.clone() if x is not None and x.is_inference() else x for x in (mask, index, starts)]
        inputs = inputs._replace(mask=kept[0], of_pairs=kept[1], starts=kept[2])
    found: tuple[Tensor, Tensor | None, Tensor | None] = _apply(rule, num_weights, *inputs)
    return found


_Form = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides of a tensor"""


def _strides(strides: tuple[int, ...]) -> native.TileStrides:
    """Those of `[B, N, H, C]`."""
    batch, row, head, channel = strides if len(strides) == _DIMS else (0, *strides)
    return native.TileStrides(batch, head, row, channel)


def _term_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> native.TileStrides:
    """Those of `[B, H, N, M]`, of which some dimensions are broadcast."""
    return native.TileStrides(*(0 if size == 1 else step for size, step in zip(shape, strides, strict=True)))


@lru_cache(maxsize=256)
def check_fit(rule: Rule, *forms: _Form) -> None:
    """Raises `InputError` unless what kernels read is there; `forms` are those of `Inputs` without sink and seed."""
    (query, _), (key, _), (value, _), bias, mask, index, starts = forms
    query, key, value = (shape if len(shape) == _DIMS else (1, *shape) for shape in (query, key, value))
    heads = query[2]
    fits = query[0] == key[0] and query[3] == key[3] and key[:3] == value[:3] and heads % key[2] == 0
    ends = ((e.first_target + e.num_targets, e.first_source + e.num_sources) for e in rule.elements)
    fits = fits and all(end <= query[1] and end_of_sources <= key[1] for end, end_of_sources in ends)
    sizes = ((e.term + 1, heads, e.num_targets, e.num_sources) for e in rule.elements)
    least = [max(x) for x in zip(*sizes, strict=True)]
    for term in (bias if rule.bias == "all" else None, mask):
        fits &= term is None or all(size == 1 or size >= x for size, x in zip(term[0], least, strict=False))
    if rule.bias != "all":
        fits &= bias is not None and bias[0][1] in (1, heads) and _has_terms(rule, index, starts)
    if not fits:
        shapes = [list(form[0]) for form in forms if form is not None]
        raise InputError(f"query, key, value, bias and mask do not fit each other: {shapes}.")


@lru_cache(maxsize=256)
def _prepared(rule: Rule, dtype: torch.dtype, in_parts: bool, *forms: _Form) -> tuple[bytes, Any, int]:
    """The kernels' arguments but for addresses, seed and threads, the elements that they point to, and the work."""
    check_fit(rule, *forms)
    (query, strides), (key, key_strides), (value, value_strides), bias, mask, _, _ = forms
    (num_targets, heads, channels), num_sources = query[-3:], key[-3]
    parts = [1 << sum(e.num_sources >= least for least in _IN_PARTS) if in_parts else 1 for e in rule.elements]
    elements = [native.TileElement(*element, count) for element, count in zip(rule.elements, parts, strict=True)]
    held = (native.TileElement * len(elements))(*elements)
    arguments = native.Tiles(
        type=DTYPES.index(dtype),
        batch=query[0] if len(query) == _DIMS else 1,
        heads=heads,
        key_heads=key[-2],
        channels=channels,
        value_channels=value[-1],
        targets=num_targets,
        sources=num_sources,
        elements=ctypes.addressof(held),
        num_elements=len(elements),
        scale=rule.scale,
        slope=rule.slope,
        clamp=rule.clamp,
        distribution=native.distribution(rule.law.name),
        bias_kind=_BIASES.index(rule.bias),
        bias_count=0 if bias is None else bias[0][0],
        first_distance=rule.first,
        left=FAR if rule.left is None else max(-FAR, min(rule.left, FAR)),
        right=FAR if rule.right is None else max(-FAR, min(rule.right, FAR)),
        query_strides=_strides(strides),
        key_strides=_strides(key_strides),
        value_strides=_strides(value_strides),
        dropout=rule.dropout > 0.0,
        threshold=min(int(rule.dropout * 2**32), 2**32 - 1),
        keep_scale=0.0 if rule.dropout == 1.0 else 1 / (1 - rule.dropout),
        parts=max(parts, default=1),
    )
    arguments.distribution_constants[: len(rule.law.constants)] = rule.law.constants
    if mask is not None:
        arguments.mask_strides = _term_strides(*mask)
    if bias is not None and rule.bias == "all":
        arguments.bias_strides = _term_strides(*bias)
        terms = [element.term for element in rule.elements]
        arguments.shared_elements = bias[0][0] == 1 or len(set(terms)) < len(terms)
        arguments.shared_heads = bias[0][1] == 1
    elif bias is not None and rule.bias == "listed":
        arguments.bias_strides = _listed_strides(bias[1])
        places = [element.bias_at for element in rule.elements]
        arguments.shared_elements = len(set(places)) < len(places)
    elif bias is not None:  # of one head after another
        arguments.bias_strides = native.TileStrides(0, 0 if bias[0][1] == 1 else bias[0][0], 0, 1)
        sums = len(elements) * heads * arguments.parts * _TABLE_PARTS * bias[0][0]
        arguments.shared_elements = sums > _MOST_SUMS
    work = heads * (channels + value[-1]) * sum(e.num_targets * e.num_sources for e in rule.elements)
    return bytes(arguments), held, work


def _has_terms(rule: Rule, index: _Form | None, starts: _Form | None) -> bool:
    """Whether there is a bucket of each pair, or a start of each target's listed pairs."""
    if rule.bias == "distances":
        return True
    if index is None or (rule.bias == "listed" and starts is None):
        return False
    if starts is not None:
        return all(e.bias_at + e.num_targets < starts[0][0] for e in rule.elements)
    ends = (e.bias_at + (e.num_targets - 1) * e.bias_step + e.num_sources for e in rule.elements if e.num_targets)
    return all(end <= math.prod(index[0]) for end in ends)


def _listed_strides(strides: tuple[int, ...]) -> native.TileStrides:
    """Those of `[E, H]`."""
    return native.TileStrides(0, strides[1], 0, strides[0])


class Inputs(NamedTuple):
    """The tensors of a call; the first five may need gradients."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    """Of the type that is computed in: of all pairs, `[B, H, N, M]`, or the values of a `Term`"""
    sink: Tensor | None
    mask: Tensor | None
    of_pairs: Tensor | None
    """See `Term`"""
    starts: Tensor | None
    seed: Tensor | None


#: So many tensors of nodes and pairs are read with their strides.
_STRIDED = 5

#: The dimensions of tensors of nodes, and of those with a number for each pair.
_DIMS = 4


#: The kernels' arguments that are tensors.
_NAMES_OF_PAIRS = "query", "key", "value", "bias", "mask", "buckets", "pair_starts", "sink"
_NAMES_OF_LISTED = "query", "key", "value", "bias", "mask", "pair_sources", "pair_starts", "sink"


class CPUCall:
    """The CPU kernels' arguments, and what they point to.

    Args:
        inputs: The tensors.
        rule: What is computed.
        grad_bias: Zeros for the gradient of the bias, if it is wanted.
    """

    def __init__(self, inputs: Inputs, rule: Rule, grad_bias: Tensor | None = None):
        query, key, value, bias, sink, mask, index, starts, seed = inputs
        tensors = [query, key, value, bias, mask, index, starts]
        for place, x in enumerate(tensors):
            if x is not None and (place >= _STRIDED or is_lazy(x)):
                tensors[place] = resolved(x) if place < _STRIDED else native.readable(x)
        if rule.bias == "listed" and bias is not None:  # of one head after another, as kernels read them
            tensors[3] = resolved(bias).t().contiguous().t()
        self.inputs, self.rule, self.grad_bias = inputs, rule, grad_bias
        # Parts would add to the same numbers.
        in_parts = grad_bias is None or rule.bias != "all" or grad_bias.size(3) != 1
        forms = [None if x is None else (x.shape, x.stride()) for x in tensors]
        template, elements, work = _prepared(rule, value.dtype, in_parts, *forms)
        self.held: list[Any] = [elements]
        self.arguments = native.Tiles.from_buffer_copy(template)
        self.arguments.threads = torch.get_num_threads() if work > _SERIAL else 1
        self.arguments.dropped = rule.weights == "dropped"
        if rule.bias in ("distances", "buckets") and tensors[3] is not None:
            tensors[3] = tensors[3].t().contiguous()
        if index is not None:
            self.arguments.bucket_bytes = index.element_size()
        tensors.append(None if sink is None else native.readable(sink))
        for name, x in zip(_NAMES_OF_PAIRS if starts is None else _NAMES_OF_LISTED, tensors, strict=True):
            if x is not None:  # as `point` does
                setattr(self.arguments, name, x.data_ptr())
        self.held += tensors
        if seed is not None:
            self.arguments.seed = int(seed)

    def point(self, name: str, x: Tensor) -> Tensor:
        """Passes a tensor's address."""
        self.held.append(x)
        setattr(self.arguments, name, x.data_ptr())
        return x

    def run(self, name: str) -> None:
        """Calls a kernel."""
        native.raise_for(getattr(native.library(), name)(ctypes.byref(self.arguments)))

    def forward(self, out: Tensor, wide: Tensor | None, stats: Tensor) -> None:
        """Computes the output, the same before it is rounded, and the statistics of each row."""
        self.point("out", out)
        self.point("stats", stats)
        if wide is not None:
            self.point("wide", wide)
        self.run("gattn_tiles_forward")

    def weights(self, weights: Tensor, stats: Tensor) -> None:
        """Computes the weights."""
        self.point("weights", weights)
        self.point("stats", stats)
        self.run("gattn_tiles_weights")

    def backward(
        self, grad: Tensor, delta: Tensor, stats: Tensor, grad_weights: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None]:
        """The gradients of query, key and value, and that of the bias."""
        (query, key, value), grad_bias, arguments, table = self.inputs[:3], self.grad_bias, self.arguments, None
        for name, x in (("grad_out", grad), ("delta", delta), ("stats", stats), ("grad_weights", grad_weights)):
            if x is not None:
                self.point(name, native.readable(x))
        parts, lanes = arguments.parts, _lanes(arguments.type)
        width, value_width = -(-query.size(-1) // lanes) * lanes, -(-value.size(-1) // lanes) * lanes
        of_queries = query.shape[:-1] if parts == 1 else (parts, *query.shape[:-1])
        grads = [
            stats.new_zeros((*of_queries, width)),
            stats.new_zeros((*key.shape[:-1], width)),
            stats.new_zeros((*value.shape[:-1], value_width)),
        ]
        for name, x in zip(("grad_query", "grad_key", "grad_value"), grads, strict=True):
            self.point(name, x)
        if grad_bias is None:
            arguments.shared_elements = arguments.shared_heads = 0
        elif self.rule.bias in ("all", "listed"):
            strides = grad_bias.stride()
            is_all = self.rule.bias == "all"
            of_bias = _term_strides(tuple(grad_bias.shape), strides) if is_all else _listed_strides(strides)
            arguments.grad_bias_strides = of_bias
            self.point("grad_bias", grad_bias)
        else:
            count = 1 if arguments.shared_elements else arguments.num_elements
            sums_of_one = _TABLE_PARTS if self.rule.bias == "buckets" else 1
            sizes = count, query.size(-2), parts, sums_of_one, len(grad_bias)
            table = self.point("grad_table", stats.new_zeros(sizes, dtype=torch.float64))
        self.run("gattn_tiles_backward")
        if table is not None and grad_bias is not None:
            sums = table.sum((0, 2, 3)).t()
            grad_bias = (sums if grad_bias.size(1) > 1 else sums.sum(1, keepdim=True)).to(grad_bias.dtype)
        if parts > 1:
            of_query, *others = grads[0]
            for part in others:
                of_query += part
            grads[0] = of_query
        for place, x in enumerate((query, key, value)):
            if grads[place].size(-1) > x.size(-1):
                grads[place] = grads[place][..., : x.size(-1)]
        return grads, grad_bias


@cache
def _lanes(kind: int) -> int:
    """The numbers of a vector, in which tensors of this type are computed."""
    lanes: int = native.library().gattn_tile_lanes(kind)
    return lanes


def _form(x: Tensor | None) -> Any:
    return None if x is None else (tuple(x.shape), x.stride())


#: By the type of device.
CALLS: dict[str, type[CPUCall | GPUCall]] = {"cpu": CPUCall, "cuda": GPUCall}


def _call_of(inputs: Inputs, rule: Rule, grad_bias: Tensor | None = None) -> CPUCall | GPUCall:
    """A call of the kernels for the device of these tensors."""
    kind, (query, key, value, bias, _, mask, index, starts, _) = CALLS[inputs.value.device.type], inputs
    if kind is not CPUCall:  # which does so where it prepares its arguments
        check_fit(rule, *map(_form, (query, key, value, bias, mask, index, starts)))
    return kind(inputs, rule, grad_bias)


def forward(inputs: Inputs, rule: Rule, num_weights: int, keeps: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The output, the same before it is rounded if it `keeps` that, the statistics of each row, and the weights."""
    call, (query, _, value), heads = _call_of(inputs, rule), inputs[:3], inputs.query.size(-2)
    compute, shape = compute_dtype(value.dtype), query.shape[:-1]
    out, stats = value.new_empty((*shape, value.size(-1))), value.new_empty(shape, dtype=compute)
    if sum([e.num_targets for e in rule.elements]) * heads < stats.numel():  # targets of no element see nothing
        out.zero_()
        stats.fill_(-torch.inf if rule.law.name == "softmax" else 0.0)
    wide = torch.zeros_like(out, dtype=compute) if value.dtype != compute and keeps else None
    call.forward(out, wide, stats)
    weights = None
    if rule.weights:
        whole = sum(e.num_targets * e.num_sources for e in rule.elements) * heads == num_weights
        weights = (stats.new_empty if whole else stats.new_zeros)(num_weights)
        call.weights(weights, stats)
    return out, out if wide is None else wide, stats, weights


def backward(
    inputs: Inputs,
    rule: Rule,
    results: tuple[Tensor, Tensor, Tensor | None],
    grads_of: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of the first five inputs; those of bias and sink if they are wanted.

    Args:
        inputs: The inputs.
        rule: What was computed.
        results: The output before rounding, the statistics and the weights.
        grads_of: The gradients of the output, the log-sum-exp and the weights.
        wanted: Whether the gradient of each input is wanted.
    """
    bias, sink = inputs.bias, inputs.sink
    (out, stats, weights), (grad, grad_log_sum, grad_weights) = results, grads_of
    grad = torch.zeros_like(out, dtype=inputs.value.dtype) if grad is None else resolved(grad)
    grad_weights = None if grad_weights is None else native.readable(grad_weights)
    if rule.law.name != "softmax" and not rule.law.constants[0]:
        delta = torch.zeros_like(stats)
    else:
        delta = (grad.to(out.dtype) * out).sum(-1)
        if grad_weights is not None and weights is not None:
            _add_inner(delta, native.readable(weights), grad_weights, rule.elements)
    if grad_log_sum is not None:
        delta -= grad_log_sum.masked_fill(stats == -torch.inf, 0.0)
    grad_bias = None
    if bias is not None and wanted[3]:
        is_listed = rule.bias == "listed"  # whose numbers come one head after another
        grad_bias = bias.new_zeros(bias.shape[::-1]).t() if is_listed else bias.new_zeros(bias.shape)
    of_nodes, grad_bias = _call_of(inputs, rule, grad_bias).backward(grad, delta, stats, grad_weights)
    of_sink = None
    if sink is not None and wanted[4]:
        shares_of_sink = (sink - stats).exp().masked_fill(stats == -torch.inf, 0.0)
        of_sink = -(shares_of_sink * delta).flatten(0, -2).sum(0)
    return [*[g.to(inputs.value.dtype) for g in of_nodes], grad_bias, of_sink]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: Rule, num_weights: int, *tensors: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        out, wide, stats, weights = forward(Inputs(*tensors), rule, num_weights, any(ctx.needs_input_grad))
        ctx.save_for_backward(*tensors, wide, stats, weights)
        ctx.rule = rule
        ctx.set_materialize_grads(False)
        if rule.log_sum and rule.law.name != "softmax":
            ctx.mark_non_differentiable(stats)
        return out, stats if rule.log_sum else None, weights  # each tensor that is returned takes time

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, wide, stats, weights = ctx.saved_tensors
        inputs, wanted = Inputs(*tensors), ctx.needs_input_grad[2:]
        if torch.is_grad_enabled() or any(x is not None and is_batched(x) for x in grads):
            found = _differentiate_twice(inputs, ctx.rule, grads, wanted)
        else:
            found = backward(inputs, ctx.rule, (wide, stats, weights), grads, wanted)
        return None, None, *found, None, None, None, None


_apply = apply_of(_Attention)  # of plain tensors


def _add_inner(delta: Tensor, weights: Tensor, grads: Tensor, elements: Sequence[Element]) -> None:
    """Adds each row's inner product of weights and their gradients to `delta`, `[B, N, H]`."""
    heads = delta.size(-1)
    delta = delta if delta.dim() == _DIMS - 1 else delta.unsqueeze(0)
    for e in elements:
        form = (heads, e.num_targets, e.num_sources), (e.weights_head, e.weights_row, 1)
        first, second = (x.as_strided(*form, x.storage_offset() + e.weights_at) for x in (weights, grads))
        found = first.unsqueeze(-2) @ second.unsqueeze(-1)  # einsum would copy both
        delta[e.batch, e.first_target : e.first_target + e.num_targets] += found.view(heads, -1).t()


def _plain(inputs: Inputs, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernels compute, by operations of PyTorch on a matrix of all pairs."""
    query, key, value, bias, sink, mask, index, starts, seed = inputs
    is_one = query.dim() < _DIMS
    query, key, value = (x.unsqueeze(0) if is_one else x for x in (query, key, value))
    compute, heads = compute_dtype(value.dtype), query.size(2)
    queries = query.to(compute).transpose(1, 2) * rule.scale
    keys, values = (repeat_heads(x, heads).to(compute).transpose(1, 2) for x in (key, value))
    logits = queries @ keys.mT
    if rule.slope != 1.0:
        logits = F.leaky_relu(logits, rule.slope)
    if math.isfinite(rule.clamp):
        logits = logits.clamp(-rule.clamp, rule.clamp)
    seen = logits.new_zeros(logits.size(0), 1, *logits.shape[2:], dtype=torch.bool)
    terms = logits.new_zeros(logits.shape) if bias is not None else None
    for element in rule.elements:
        batch, first, n, first_source, m, offset, term = element[:7]
        place = batch, slice(None), slice(first, first + n), slice(first_source, first_source + m)
        distance = _range(m) - _range(n).unsqueeze(1) - offset
        is_seen = torch.ones_like(distance, dtype=torch.bool)
        if rule.left is not None:
            is_seen &= distance >= -rule.left
        if rule.right is not None:
            is_seen &= distance <= rule.right
        seen[place] = is_seen
        if terms is not None and bias is not None:
            of_pairs = _bias_of(bias, index, starts, rule, element, distance)
            terms = terms.index_put(tuple(_grid(place, logits.shape)), of_pairs.expand(heads, n, m))
        if mask is not None:
            seen = seen if seen.size(1) == heads else seen.expand(-1, heads, -1, -1).clone()
            seen[place] = is_seen & _term_of(mask, term, n, m)
    if terms is not None:
        logits = logits + terms
    logits = logits.masked_fill(~seen, -torch.inf)
    weights = from_law(rule.law._replace(sink=sink)).of_matrix(logits)
    assert weights is not None
    applied = weights
    if seed is not None:
        kept = keep_mask_of_pairs(seed, weights.shape, rule.dropout).to(compute)
        applied = weights * (kept / (1 - rule.dropout) if rule.dropout < 1.0 else kept * 0.0)
    out = (applied @ values).transpose(1, 2).to(value.dtype)
    empty = (logits == -torch.inf).all(-1)
    log_sum = logits.masked_fill(empty.unsqueeze(-1), 0.0).logsumexp(-1).masked_fill(empty, 0.0).transpose(1, 2)
    out, log_sum = (x.squeeze(0) if is_one else x for x in (out, log_sum))
    return out, log_sum, _in_a_row(applied if rule.weights == "dropped" else weights, rule)


def _in_a_row(weights: Tensor, rule: Rule) -> Tensor:
    """Weights, `[B, H, N, M]`, as the kernels return them; nothing if they do not."""
    if not rule.weights:
        return weights.new_empty(0)
    parts = []
    for e in sorted(rule.elements, key=lambda e: e.weights_at):
        part = weights[e.batch, :, e.first_target :, e.first_source :]
        n, m = e.weights_head // max(e.weights_row, 1), e.weights_row
        parts.append(part[:, :n, :m].flatten())
    return torch.cat(parts)


def _bias_of(
    bias: Tensor, index: Tensor | None, starts: Tensor | None, rule: Rule, element: Element, distance: Tensor
) -> Tensor:
    """The bias of an element's pairs, `[H or 1, n, m]`."""
    n, m = distance.shape
    if rule.bias == "all":
        return _term_of(bias, element.term, n, m)
    if rule.bias == "distances":
        return bias[(distance - rule.first).clamp(0, len(bias) - 1)].movedim(-1, 0)
    assert index is not None
    if starts is None:
        index = index.contiguous()
        buckets = index.as_strided((n, m), (element.bias_step, 1), index.storage_offset() + element.bias_at)
        return bias[buckets.long()].movedim(-1, 0)
    counts = starts[element.bias_at : element.bias_at + n + 1].diff()
    pairs = _range(int(counts.sum())) + starts[element.bias_at]
    target, source = _range(n).repeat_interleave(counts), index[pairs] - element.bias_step
    is_there = (source >= 0) & (source < m)
    places = target[is_there], source[is_there].long()
    return bias.new_zeros(n, m, bias.size(1)).index_put(places, bias[pairs[is_there]], accumulate=True).movedim(-1, 0)


def _term_of(x: Tensor, term: int, n: int, m: int) -> Tensor:
    x = x[term if x.size(0) > 1 else 0]
    return x[:, : n if x.size(1) > 1 else 1, : m if x.size(2) > 1 else 1]


def _grid(place: tuple[Any, ...], shape: torch.Size) -> list[Tensor]:
    ranges = [_range(size)[at] for at, size in zip(place[1:], shape[1:], strict=True)]
    return [ranges[0].new_tensor(place[0]), *torch.meshgrid(*ranges, indexing="ij")]


def _range(size: int) -> Tensor:
    return torch.arange(size, device="cpu")  # whatever the default device is


def _differentiate_twice(
    inputs: Inputs, rule: Rule, grads: Sequence[Tensor | None], wanted: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of the first five inputs, by operations that have gradients themselves."""
    with torch.enable_grad():
        # Views, so that differentiation stops here.
        leaves: list[Any] = [None if x is None else x.view_as(x) for x in inputs[:5]]
        leaves = [x if x is None or x.requires_grad else x.requires_grad_() for x in leaves]
        of_leaves = inputs._replace(**dict(zip(Inputs._fields, leaves, strict=False)))
        pairs = [x for x in zip(_plain(of_leaves, rule), grads, strict=True) if x[1] is not None]
        asked = [x for x, is_wanted in zip(leaves, wanted, strict=False) if x is not None and is_wanted]
        outs, given = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outs, asked, given, create_graph=True, allow_unused=True))
    return [next(found) if x is not None and w else None for x, w in zip(leaves, wanted, strict=False)]
