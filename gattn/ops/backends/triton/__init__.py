"""Fused attention on the GPU: Triton's kernels as PyTorch operators. Triton is imported when the first one runs."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from gattn.distributions import Law
from gattn.ops.backends.base import Missing
from gattn.ops.backends.kernels import KernelBackend, dense_rows, flat
from gattn.ops.backends.triton.layout import Rows, layout_of
from gattn.ops.call import compute_dtype
from gattn.ops.operator import AttentionOperator
from gattn.ops.terms import TERMS, Inputs
from gattn.scores import Family

__all__ = ["Triton", "run"]

_WIDTH = 256
"""The number of heads × channels that one program computes; more if a single head has more.

A program is one warp, so there are no barriers to wait at.
"""

_LOADED = 512
"""The number of bytes that a warp loads at a time, 16 per thread: from several tasks if rows are shorter.

More would need the registers of other warps. The degrees of a graph make no difference, as tasks are sorted by length.
"""

_LOOSE_WIDTH = 32
"""The number of elements if rows do not begin at multiples of 16 bytes: threads then load single ones, and the compiler
would move more of them between layouts through shared memory."""

_WARP_WIDTH = 512
"""Heads with more channels than this take several warps."""

_MOST_PROGRAMS = 4096
"""The largest number of parts of a sum over all edges: more than a GPU can run at once."""

_MOST_EDGES = 2**31 - 1
"""Numbers of edges have 32 bits."""

_ROW_HEADS = 16
"""The largest number of heads of a program that goes through whole rows."""

_PARTS = 16
"""The number of partial sums that are added at a time."""

_COMBINING_WARPS = 4
"""The number of warps of a program that adds partial sums."""

_WIDEST_LOAD = 16
"""Rows of multiples of this many numbers can be loaded with the widest loads, 16 bytes, in any type."""

_ROWS = tuple(name for name, term in TERMS.items() if term.read == "rows")

_PER_EDGE = {name: len(term.letters) for name, term in TERMS.items() if term.read == "edges"}
"""Inputs with one entry per edge, and how many dimensions they have without those of the batch."""

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter runs the kernels on the CPU, which is slow but good for tests."""

_loaded: set[Any] = set()
"""Variants of kernels for rows of several tasks that have run although there were no such rows."""

_is_installed = find_spec("triton") is not None  # read once, because compiled code cannot


class Triton(KernelBackend):
    """The Triton kernels."""

    name = "triton"
    devices = ("cuda",)
    layout_of = staticmethod(layout_of)

    def serves(self, device: torch.device) -> bool:
        """See `KernelBackend.serves`; the interpreter computes on the CPU."""
        return super().serves(device) or (_INTERPRETED and device.type == "cpu")

    def knows(self, family: Family | None) -> bool:
        """See `KernelBackend.knows`."""
        return family is not None and _knows(family.name)

    def knows_law(self, law: Law | None) -> bool:
        """See `KernelBackend.knows_law`."""
        return law is not None and _knows_law(law.name)

    def missing(self) -> Missing | None:
        """See `Backend.missing`."""
        return None if _is_installed else Missing("Triton", "it is not installed: pip install triton")


@torch.compiler.assume_constant_result  # compiled code cannot import
def _knows(family: str) -> bool:
    return family in _kernels().FAMILIES


@torch.compiler.assume_constant_result
def _knows_law(law: str) -> bool:
    return law in _kernels().LAWS


class _Launches:
    """What forward and backward pass share: sizes, the inputs in the form that the kernels take, and launches."""

    def __init__(self, inputs: Inputs):
        if inputs.edge_projection is not None or inputs.edge_type is not None:
            raise ValueError(
                "the Triton kernels neither project edge features nor look up types: they take edges [E, H, C]."
            )
        edges = inputs.edge_index, inputs.num_sources, inputs.num_targets, inputs.self_loops, inputs.flow
        self.layout = layout = layout_of(*edges, traced=inputs.traced)
        per_edge = [(tensor, len(term.letters)) for _, tensor, term in inputs.terms() if term.letters.startswith("E")]
        counts = [tensor.size(-inner) for tensor, inner in per_edge if tensor.dim() >= inner]
        inputs.check(layout.expect(counts[0]) if counts else 0)
        #: The number of edges for which results per edge have room.
        self.num_terms = counts[0] if counts else layout.most_edges
        key, values = inputs.key, inputs.values
        self.front = inputs.front
        self.batch = math.prod(self.front)
        self.heads = inputs.heads
        self.group = self.heads // max(key.size(-2), 1)
        self.channels, self.value_channels = key.size(-1), values.size(-1)
        self.dtype, self.compute, self.device = values.dtype, compute_dtype(values.dtype), values.device
        #: E, as far as it is needed to separate the elements of a batch without reading it on the device.
        self.num_edges = 0
        is_counted = self.batch > 1 and inputs.seed is not None
        if is_counted and layout.edge_count is None:
            self.num_edges = layout.num_edges
        self.key_is_value, self.edge_is_value = inputs.value is None, inputs.edge_is_value
        self.num_sources, self.num_targets = inputs.num_sources, inputs.num_targets

        dropout = inputs.dropout
        self.inputs: dict[str, Any] = {
            "vector": None if inputs.vector is None else inputs.vector.contiguous(),
            "sink": None if inputs.sink is None else inputs.sink.contiguous(),
            "seed": inputs.seed,
            "edge_count": layout.edge_count if is_counted else None,
            "threshold": int(dropout * 2**32),
            "keep_scale": 1 / (1 - dropout) if dropout < 1 else 0.0,
        }
        for name in _ROWS:
            tensor = values if name == "value" else getattr(inputs, name)
            tensor = None if tensor is None else dense_rows(tensor, 2)
            self.inputs[name] = tensor
            batch, row = (0, 0) if tensor is None else tensor.stride()[:2]
            if tensor is not None and tensor.size(1) == 1:
                row = tensor.size(2) * tensor.size(3)  # as for other graphs: a single row may have any stride
            if self.batch == 1:
                batch = 0
            unit = math.gcd(_WIDEST_LOAD, batch, row)
            self.inputs[f"{name}_batch"], self.inputs[f"{name}_row"] = batch // unit, row // unit
            self.inputs[f"{name.upper()}_UNIT"] = unit
        for name, inner in _PER_EDGE.items():
            tensor = getattr(inputs, name)
            tensor = None if tensor is None else flat(tensor, inner - 1).contiguous()
            self.inputs[name] = tensor
            #: The distance between the elements of a batch, in edges.
            self.inputs[f"{name}_batch"] = 0 if tensor is None or tensor.size(0) == 1 else tensor.size(1)
        mask = None if inputs.mask is None else flat(inputs.mask, 1).view(torch.uint8)
        self.inputs["mask"] = mask
        for place, name in enumerate(("mask_batch", "mask_edge", "mask_head")):
            self.inputs[name] = 0 if mask is None or mask.size(place) == 1 else mask.stride(place)

        score, names = _kernels().FAMILIES[inputs.family]
        constants = dict(zip(names, inputs.constants, strict=True))
        self.law, laws, row_laws = inputs.distribution, _kernels().LAWS, _kernels().ROW_LAWS
        first, second = (*inputs.distribution_constants, 0.0, 0.0)[:2]
        #: Whether logits are rewritten row by row, and, if there is a threshold, the law whose weights are derivatives.
        self.is_of_rows, self.derivatives = self.law in row_laws, row_laws.get(self.law)
        #: Whether sums are divided by those of their weights.
        self.divides = laws[self.law] is None or bool(first)
        self.constants = {
            "SCORE": score,
            "CONSTANTS": tuple(inputs.constants),
            "MULTIPLIES": inputs.edge is not None and bool(constants.get("multiplies")),
            "LAW": laws[self.law],
            "EPSILON": second,
            "SOFTCAP": first if self.law == "softmax" else 0.0,
            "REWRITTEN": False,
            "K": int(min(first, _MOST_EDGES)) if self.law == "top_k" else 0,
            "IS_SQUARED": self.law == "entmax15",
            "HEADS": self.heads,
            "GROUP": self.group,
            "KEY_IS_VALUE": self.key_is_value,
            "EDGE_IS_VALUE": self.edge_is_value,
            "CHANNELS": self.channels,
            "VALUE_CHANNELS": self.value_channels,
            **_blocks(self.heads, self.channels, self.value_channels, self.dtype),
            "COMPUTE": _triton_type(self.compute),
        }

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=self.compute if dtype is None else dtype, device=self.device)

    def partial(self, rows: Rows, channels: int) -> Tensor:
        """Memory for the partial sums of rows of several tasks."""
        return self.empty(self.batch, rows.num_slots, self.heads, channels)

    def unflat(self, tensor: Tensor) -> Tensor:
        """The tensor with the batch dimensions of the inputs."""
        return tensor.view(*self.front, *tensor.shape[1:])

    def num_blocks(self, rows: Rows, block: int) -> int:
        """The number of blocks of tasks in all rows."""
        return -(-rows.tasks.size(1) // block) * self.batch

    def launch(self, name: str, rows: Rows, *, programs: int | None = None, **arguments: Any) -> None:
        """Runs a kernel over the tasks of `rows`, with the inputs that it takes.

        Args:
            name: The name of the kernel.
            rows: The rows to go through.
            programs: The number of programs that share the blocks of tasks. (default: `None`, one per block)
            **arguments: Its arguments in addition to the inputs, or instead of them.
        """
        num_tasks = rows.tasks.size(1)
        arguments = {
            **self.inputs,
            **self.constants,
            "num_edges": self.num_edges,
            "num_terms": self.num_terms,
            "num_sources": self.num_sources,
            "num_targets": self.num_targets,
            "start": rows.start,
            "tasks": rows.tasks,
            "node": rows.node,
            "number": rows.number,
            "num_tasks": num_tasks,
            "num_slots": rows.num_slots,
            **arguments,
        }
        blocks = arguments["num_blocks"] = self.num_blocks(rows, arguments["BLOCK_R"])
        heads = -(-self.heads // arguments["BLOCK_H"])
        kernel = getattr(_kernels(), name)
        given = {name: arguments[name] for name in kernel.arg_names}
        run(kernel, (blocks if programs is None else programs, heads), arguments["num_warps"], given)

    def rewritten_logits(self) -> Tensor:
        """The logits of all edges, `[B, E, H]`, rewritten row by row so that each weight follows from its own alone.

        E is an upper bound here.
        """
        rows, most_edges = self.layout.by_target, self.layout.most_edges
        logits = self.empty(self.batch, most_edges, self.heads)
        given: dict[str, Any] = {"logits": logits, "num_edges": most_edges}
        # Values without channels: nothing is written to the output, and nobody reads the statistics.
        only_logits: dict[str, Any] = {
            "LAW": _kernels().LAWS["logits"],
            "NORMALIZED": False,
            "VALUE_CHANNELS": 0,
            "KEY_IS_VALUE": False,
            "EDGE_IS_VALUE": False,
            **dict.fromkeys(("edge_value", "seed", "wide")),
            **dict.fromkeys(("out", "partial"), logits),
            **self.stats(rows),
            **_blocks(self.heads, self.channels, 0, self.dtype),
        }
        self.launch("forward", rows, **given, **only_logits)
        heads = min(_power_of_two(self.heads), _ROW_HEADS)
        given |= {"BLOCK_E": _WIDTH // heads, "BLOCK_H": heads, "num_warps": 1}
        kernel = "keep_largest" if self.derivatives is None else "subtract_threshold"
        self.launch(kernel, rows, programs=self.batch * self.num_targets, **given)
        return logits

    def read_rewritten(self, logits: Tensor) -> None:
        """Makes kernels read rewritten logits instead of computing them with their bias and mask."""
        self.inputs |= {"bias": logits, "bias_batch": logits.size(1), "mask": None}
        self.constants["REWRITTEN"] = True

    def stats(self, rows: Rows) -> dict[str, Tensor]:
        """Memory for the maximum and the scale of each target, and of the parts of long rows."""
        shapes = {"stats": self.num_targets, "partial_stats": rows.num_slots}
        return {name: self.empty(self.batch, size, 2, self.heads) for name, size in shapes.items()}

    def sum_values(
        self, law: str, divides: bool, out: Tensor, wide: Tensor | None, with_weights: bool
    ) -> tuple[Tensor, Tensor]:
        """Stores sums of values, weighted by a law, in `out`, and before they are rounded in `wide`.

        Returns:
            The maximum and the scale of each target, and the weights; these are empty if they are not requested.
        """
        rows, function, stats = self.layout.by_target, _kernels().LAWS[law], self.stats(self.layout.by_target)
        weights = None
        if with_weights:
            self.num_edges = self.layout.num_edges
            weights = self.empty(self.batch, self.num_edges, self.heads)
        results: dict[str, Any] = {"out": out, "wide": wide, "NORMALIZED": divides, **stats}
        results["partial"] = self.partial(rows, self.value_channels)
        self.launch("forward", rows, logits=weights, LAW=function, **results)
        self.combine(rows, **results)
        if weights is None:
            return stats["stats"], self.empty(self.batch, 0, self.heads)
        maximum, scale = stats["stats"].index_select(1, self.layout.target()).unbind(2)
        if function is None:
            weights.sub_(maximum).exp_()
        return stats["stats"], weights.mul_(scale)

    def backward_by_source(self, tensors: dict[str, Tensor], given: dict[str, Any]) -> dict[str, Tensor]:
        """Gradients of those of the inputs `tensors` that belong to sources and edges, of the vector, and `"logits"`.

        The last are gradients of logits, or, for a scalar score, each edge's part of the query's if that is enough.
        """
        rows, grads = self.layout.by_source, {}
        channels = {"key": self.channels, "value": self.value_channels}
        for name in (name for name in channels if name in tensors):
            # Sums over query heads that share a key head are rounded only once.
            dtype = _stored(tensors[name].dtype) if self.group == 1 else self.compute
            grads[name] = self.empty(self.batch, self.num_sources, self.heads, channels[name], dtype=dtype)
        partial = {name: self.partial(rows, channels[name]) for name in channels if name in grads}
        for name, width in (("edge", self.channels), ("edge_value", self.value_channels)):
            if name in tensors:
                dtype = _stored(tensors[name].dtype)
                grads[name] = self.empty(self.batch, self.num_terms, self.heads, width, dtype=dtype)
        if "query" in tensors or "bias" in tensors:
            grads["logits"] = self.empty(self.batch, self.num_terms, self.heads)
        programs = self.num_blocks(rows, self.constants["BLOCK_R"])
        if "vector" in tensors:
            programs = min(programs, _MOST_PROGRAMS)
            grads["vector"] = self.empty(programs, self.heads, self.channels)
        self.launch(
            "backward_by_source",
            rows,
            **given,
            **{f"grad_{name}": grads.get(name) for name in ("key", "value", "vector", "logits", "edge", "edge_value")},
            **{f"partial_{name}": partial.get(name) for name in channels},
            STORES_BY_QUERY=self.stores_by_query(tensors),
            programs=programs,
        )
        for name, sums in partial.items():
            self.add_partial(rows, sums, grads[name])
        if "vector" in grads:
            grads["vector"] = grads["vector"].sum(0)
        return grads

    def stores_by_query(self, tensors: dict[str, Tensor]) -> bool:
        """Whether gradients of the query are sums of numbers that are known in the pass by source."""
        return self.channels == 1 and "query" in tensors and "bias" not in tensors

    def backward_by_target(self, grad_logits: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        """The gradient of the query, from the `"logits"` of `backward_by_source`."""
        dtype = _stored(tensors["query"].dtype)
        if self.stores_by_query(tensors):
            return self.sum_by_target(grad_logits, dtype)
        return self._sum_over_rows(grad_logits, self.num_terms, dtype, {}, self.channels)

    def sum_by_target(self, terms: Tensor, dtype: torch.dtype) -> Tensor:
        """Sums of `[B, E, H]` over each target's edges, `[B, N, H, 1]`."""
        without_score = {"SCORE": _kernels().FAMILIES["sum"][0], "CONSTANTS": (), "CHANNELS": 1}
        without_score.update(query=None, key=None, vector=None, edge=None)
        return self._sum_over_rows(terms, terms.size(1), dtype, without_score, 1)

    def _sum_over_rows(
        self, terms: Tensor, num_terms: int, dtype: torch.dtype, changes: dict[str, Any], channels: int
    ) -> Tensor:
        rows = self.layout.by_target
        result = self.empty(self.batch, self.num_targets, self.heads, channels, dtype=dtype)
        partial = self.partial(rows, channels)
        changes = {**changes, **_blocks(self.heads, channels, 0, self.dtype), "num_terms": num_terms}
        self.launch("backward_by_target", rows, grad_logits=terms, grad_query=result, partial=partial, **changes)
        self.add_partial(rows, partial, result)
        return result

    def as_gradient(self, grad: Tensor, name: str, of: Tensor) -> Tensor:
        """A gradient in the shape and type of its tensor."""
        if name in _PER_EDGE:
            grad = grad.view(*self.front, *of.shape[-_PER_EDGE[name] :]).sum_to_size(of.shape)
        elif name in ("key", "value") and self.group > 1:
            grad = torch.unflatten(grad, 2, (-1, self.group)).sum(3)
        return grad.to(of.dtype).view(of.shape)

    def combine(self, rows: Rows, **results: Any) -> None:
        """Combines the results of tasks to those of targets with several tasks."""
        constants = self.constants
        arguments = {
            "sink": self.inputs["sink"],
            **results,
            "num_targets": self.num_targets,
            **{name: constants[name] for name in ("EPSILON", "HEADS", "BLOCK_H", "COMPUTE")},
            "CHANNELS": self.value_channels,
            "BLOCK_P": _PARTS,
            "BLOCK_C": constants["BLOCK_V"],
        }
        self._run_over_split(_kernels().combine, rows, -(-self.heads // constants["BLOCK_H"]), arguments)

    def add_partial(self, rows: Rows, partial: Tensor, out: Tensor) -> None:
        """Adds the partial sums of tasks of the same row."""
        width = self.heads * out.size(-1)
        block = min(_power_of_two(width), 128)
        arguments = {
            "partial": partial,
            "out": out,
            "num_rows": out.size(1),
            "WIDTH": width,
            "BLOCK_P": _PARTS,
            "BLOCK_C": block,
            "COMPUTE": self.constants["COMPUTE"],
        }
        self._run_over_split(_kernels().add_partial, rows, -(-width // block), arguments)

    def _run_over_split(self, kernel: Any, rows: Rows, programs: int, arguments: dict[str, Any]) -> None:
        """Runs a kernel over rows of several tasks, with this many programs for each.

        Without such rows, it runs once over a row that does not exist: a CUDA graph that is captured later must be able
        to handle such rows, and cannot load a kernel.
        """
        split = rows.split
        if split.size(1) == 0:
            variant = (
                kernel.__name__,
                *(
                    x.dtype if isinstance(x, Tensor) else x
                    for name, x in arguments.items()
                    if not isinstance(x, int) or name.isupper()  # as Triton distinguishes them
                ),
            )
            if variant in _loaded:
                return
            _loaded.add(variant)
            split = torch.full((3, 1), -1, dtype=torch.int32, device=self.device)
        num_split = split.size(1)
        arguments |= {"split": split, "num_split": num_split, "num_slots": rows.num_slots}
        run(kernel, (num_split * self.batch, programs), _COMBINING_WARPS, arguments)


def run(kernel: Any, grid: tuple[int, int], warps: int, arguments: dict[str, Any]) -> None:
    """Runs a kernel; all launches use this function.

    Args:
        kernel: The kernel.
        grid: The number of programs, which may be zero.
        warps: The number of warps per program.
        arguments: The arguments of the kernel, by name.
    """
    if min(grid) > 0:
        kernel[grid](**arguments, num_warps=warps)


def _kept(inputs: Inputs, keep: bool) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Statistics of the softmax, rewritten logits, and the output before it was rounded."""
    compute, batch, heads = compute_dtype(inputs.values.dtype), math.prod(inputs.front), inputs.heads
    kept: list[tuple[tuple[int, ...], torch.dtype]] = [((batch, inputs.num_targets, 2, heads), compute)]
    if keep and inputs.distribution in _kernels().ROW_LAWS:
        kept.append(((batch, inputs.most_edges, heads), compute))
    if keep and inputs.values.dtype != compute:
        kept.append((inputs.out_shape, compute))
    return kept


def _forward(inputs: Inputs, keep: bool, with_weights: bool) -> list[Tensor]:
    with torch.cuda.device_of(inputs.key):
        call = _Launches(inputs)
        out = call.empty(call.batch, call.num_targets, call.heads, call.value_channels, dtype=_stored(call.dtype))
        unrounded = call.empty(*out.shape) if keep and out.dtype != call.compute else None
        kept = []
        if call.is_of_rows:
            kept.append(call.rewritten_logits())
            call.read_rewritten(kept[0])
        stats, weights = call.sum_values(call.law, call.divides, out, unrounded, with_weights)
        if call.dtype != call.compute:
            kept.append(call.unflat(out if unrounded is None else unrounded))
        return [call.unflat(out).to(call.dtype), call.unflat(weights), stats, *(kept if keep else ())]


def _backward(
    inputs: Inputs,
    grad_out: Tensor,
    grad_weights: Tensor | None,
    out: Tensor,
    weights: Tensor,
    kept: Sequence[Tensor],
    wanted: Sequence[str],
) -> list[Tensor]:
    stats, *others = (x.contiguous() for x in kept)  # as kernels read them
    with torch.cuda.device_of(grad_out):
        call = _Launches(inputs)
        if call.is_of_rows:
            call.read_rewritten(others.pop(0))
        unrounded = flat(others[0] if others else out, 2)
        if call.derivatives is not None:
            # A threshold takes the mean of its row's gradients, weighted by the derivatives instead of the weights.
            unrounded = call.empty(*unrounded.shape)
            _, weights = call.sum_values(call.derivatives, True, unrounded, None, grad_weights is not None)
        tensors = {name: getattr(inputs, name) for name in wanted}
        grad_out = flat(grad_out, 2).contiguous()
        is_normalized = call.divides or call.derivatives is not None
        if is_normalized:
            delta = (grad_out * unrounded).sum(-1, dtype=call.compute)
        else:
            delta = call.empty(*grad_out.shape[:-1]).zero_()
        if grad_weights is not None:
            call.num_edges = call.layout.num_edges
            grad_weights = flat(grad_weights, 1).contiguous()
            if is_normalized:
                delta += call.sum_by_target(flat(weights, 1) * grad_weights, call.compute).squeeze(-1)
        given = {"stats": stats, "delta": delta, "grad_out": grad_out, "grad_weights": grad_weights}
        grads = call.backward_by_source(tensors, given)
        if "query" in tensors:
            grads["query"] = call.backward_by_target(grads["logits"], tensors)
        if "bias" in tensors:
            grads["bias"] = grads["logits"]
        if inputs.sink is not None and "sink" in tensors:
            maximum, scale = stats.unbind(2)
            grads["sink"] = -((inputs.sink - maximum).exp() * scale * delta).sum((0, 1))
        return [call.as_gradient(grads[name], name, tensor) for name, tensor in tensors.items()]


def _stored(dtype: torch.dtype) -> torch.dtype:
    """The type in which kernels store results of type `dtype`."""
    # The interpreter truncates to bfloat16 instead of rounding; PyTorch rounds.
    return torch.float32 if dtype == torch.bfloat16 and _INTERPRETED else dtype


@cache
def _kernels() -> Any:
    from gattn.ops.backends.triton import kernels

    return kernels


@cache
def _triton_type(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return tl.float64 if dtype == torch.float64 else tl.float32


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not less than the number, and at least 1."""
    return 1 << max(number - 1, 0).bit_length()


def _blocks(heads: int, channels: int, value_channels: int, dtype: torch.dtype) -> dict[str, int]:
    """The numbers of tasks, heads and channels of a program, and of its warps, by a rule instead of trials.

    Trials would compile each kernel up to eight times, and keep the best choice for one graph for all others.
    """
    block_c, block_v = _power_of_two(channels), _power_of_two(value_channels)
    widest = max(block_c, block_v)
    block_h = min(_power_of_two(heads), max(1, _WIDTH // widest))
    if widest == 1 or heads * max(channels, value_channels) * dtype.itemsize % 16 != 0:
        width = _LOOSE_WIDTH
    else:
        is_padded = widest > max(channels, value_channels)  # padding takes registers as well
        width = _LOADED // (max(dtype.itemsize, 4) if is_padded else dtype.itemsize)
    block_r = max(1, width // (block_h * widest))
    if _INTERPRETED:
        block_r = 16  # which takes as long as one
    warps = max(1, widest // _WARP_WIDTH)
    return {"BLOCK_R": block_r, "BLOCK_H": block_h, "BLOCK_C": block_c, "BLOCK_V": block_v, "num_warps": warps}


Triton.operator = AttentionOperator("triton_attention", ("CUDA", "CPU"), _forward, _backward, _kept)
