"""The arguments of the CPU kernels for tiles of pairs, and what they point to."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from gattn.ops.backends.cpu import native
from gattn.ops.backends.dense.tile_rules import DIMS, FAR, Form, Inputs, Rule, check_fit
from gattn.ops.backends.kernels import DTYPES
from gattn.torch_private import is_lazy, resolved

__all__ = ["CPUCall"]

#: Below this many multiplications, threads cost more than they gain.
_SERIAL = 2**17

#: The backward pass cuts sources into parts, each with a gradient of the queries, from these numbers on: two, and four.
_IN_PARTS = (1024, 4096)

#: The kinds of biases, in the order of the kernels: numbers of all pairs, and those of a `Term`.
_BIASES = ("all", "distances", "buckets", "listed")

#: In how many parts sums of buckets come, and the most numbers of all of them with which each element has its own.
_TABLE_PARTS, _MOST_SUMS = 4, 2**22

#: So many tensors of nodes and pairs are read with their strides.
_STRIDED = 5

#: The kernels' arguments that are tensors.
_NAMES_OF_PAIRS = "query", "key", "value", "bias", "mask", "buckets", "pair_starts", "sink"
_NAMES_OF_LISTED = "query", "key", "value", "bias", "mask", "pair_sources", "pair_starts", "sink"
_NAMES_OF_BLOCKS = "query", "key", "value", "bias", "tiles", "mask", "pair_starts", "sink"


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
        names = _NAMES_OF_PAIRS if starts is None else _NAMES_OF_LISTED
        for name, x in zip(_NAMES_OF_BLOCKS if rule.block else names, tensors, strict=True):
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


def _strides(strides: tuple[int, ...]) -> native.TileStrides:
    """Those of `[B, N, H, C]`."""
    batch, row, head, channel = strides if len(strides) == DIMS else (0, *strides)
    return native.TileStrides(batch, head, row, channel)


def _term_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> native.TileStrides:
    """Those of `[B, H, N, M]`, of which some dimensions are broadcast."""
    return native.TileStrides(*(0 if size == 1 else step for size, step in zip(shape, strides, strict=True)))


@lru_cache(maxsize=256)
def _prepared(rule: Rule, dtype: torch.dtype, in_parts: bool, *forms: Form) -> tuple[bytes, Any, int]:
    """The kernels' arguments but for addresses, seed and threads, the elements that they point to, and the work."""
    check_fit(rule, *forms)
    (query, strides), (key, key_strides), (value, value_strides), bias, mask, _, _ = forms
    (num_targets, heads, channels), num_sources = query[-3:], key[-3]
    parts = [1 << sum(e.num_sources >= least for least in _IN_PARTS) if in_parts else 1 for e in rule.elements]
    elements = [native.TileElement(*element, count) for element, count in zip(rule.elements, parts, strict=True)]
    held = (native.TileElement * len(elements))(*elements)
    arguments = native.Tiles(
        type=DTYPES.index(dtype),
        batch=query[0] if len(query) == DIMS else 1,
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
    if mask is not None and rule.block:
        arguments.tiles_strides, arguments.block = _term_strides(*mask), rule.block
    elif mask is not None:
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


def _listed_strides(strides: tuple[int, ...]) -> native.TileStrides:
    """Those of `[E, H]`."""
    return native.TileStrides(0, strides[1], 0, strides[0])
