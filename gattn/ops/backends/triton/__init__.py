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
from gattn.torch_private import stream_address

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

_DELTA_WIDTH, _DELTA_WARPS = 1024, 4
"""The number of elements and of warps of a program that multiplies outputs and their gradients."""

_ALIGNMENT = 16
"""Triton compiles code of its own for tensors that do not begin at multiples of this many bytes."""

_WIDEST_LOAD = 16
"""Rows of multiples of this many numbers can be loaded with the widest loads, 16 bytes, in any type."""

_ROWS = {
    name: (f"{name}_batch", f"{name}_row", f"{name.upper()}_UNIT")
    for name, term in TERMS.items()
    if term.read == "rows"
}
"""Inputs with one row per node: the names of the strides of a batch and of rows, and of the unit of both."""

_PER_EDGE = {name: len(term.letters) for name, term in TERMS.items() if term.read == "edges"}
"""Inputs with one entry per edge, and how many dimensions they have without those of the batch."""

_STRIDES_OF_MASK = ("mask_batch", "mask_edge", "mask_head")

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter runs the kernels on the CPU, which is slow but good for tests."""

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

    def prepared(self, inputs: Inputs) -> Any:
        """See `KernelBackend.prepared`."""
        return _form_of(inputs)

    def on_graph(self, prepared: Any, edges: tuple[Tensor, int, int, bool, str]) -> tuple[Any, int | None]:
        """See `KernelBackend.on_graph`."""
        return prepared, super().on_graph(prepared, edges)[1]

    def missing(self) -> Missing | None:
        """See `Backend.missing`."""
        return None if _is_installed else Missing("Triton", "it is not installed: pip install triton")


@torch.compiler.assume_constant_result  # compiled code cannot import
def _knows(family: str) -> bool:
    return family in _kernels().FAMILIES


@torch.compiler.assume_constant_result
def _knows_law(law: str) -> bool:
    return law in _kernels().LAWS


class _Form:
    """What calls share that differ in nothing but numbers, nodes and edges: the kernels' constants, and their launches.

    Args:
        inputs: Those of one of these calls.
    """

    def __init__(self, inputs: Inputs):
        key, values = inputs.key, inputs.values
        self.heads = inputs.heads
        self.group = self.heads // max(key.size(-2), 1)
        self.channels, self.value_channels = key.size(-1), values.size(-1)
        self.dtype, self.compute = values.dtype, compute_dtype(values.dtype)
        laws, row_laws = _kernels().LAWS, _kernels().ROW_LAWS
        names = _kernels().FAMILIES[inputs.family][1]
        self.law = inputs.distribution
        first, second = (*inputs.distribution_constants, 0.0, 0.0)[:2]
        #: Whether logits are rewritten row by row, and, if there is a threshold, the law whose weights are derivatives.
        self.is_of_rows, self.derivatives = self.law in row_laws, row_laws.get(self.law)
        #: Whether sums are divided by those of their weights.
        self.divides = laws[self.law] is None or bool(first)
        #: Those of kernels; score and law by name.
        self.constants: dict[str, Any] = {
            "SCORE": inputs.family,
            "CONSTANTS": tuple(inputs.constants),
            "MULTIPLIES": inputs.edge is not None and "multiplies" in names and bool(inputs.constants[2]),
            "LAW": self.law,
            "EPSILON": second,
            "SOFTCAP": first if self.law == "softmax" else 0.0,
            "REWRITTEN": False,
            "K": int(min(first, _MOST_EDGES)) if self.law == "top_k" else 0,
            "IS_SQUARED": self.law == "entmax15",
            "HEADS": self.heads,
            "GROUP": self.group,
            "KEY_IS_VALUE": inputs.value is None,
            "EDGE_IS_VALUE": inputs.edge_is_value,
            "CHANNELS": self.channels,
            "VALUE_CHANNELS": self.value_channels,
            **dict.fromkeys((units[2] for units in _ROWS.values()), 1),
            **_blocks(self.heads, self.channels, self.value_channels, self.dtype),
            "COMPUTE": _triton_type(self.compute),
        }
        #: The arguments of kernels that belong to inputs, for inputs that are not there.
        self.absent: dict[str, Any] = {
            **dict.fromkeys((*_ROWS, *_PER_EDGE, "mask", "vector", "sink", "seed")),
            **{stride: 0 for strides in _ROWS.values() for stride in strides[:2]},
            **{f"{name}_batch": 0 for name in _PER_EDGE},
            **dict.fromkeys(_STRIDES_OF_MASK, 0),
            "threshold": 0,
            "keep_scale": 1.0,
        }
        #: Memory for sums of which there are none.
        self.nothing = torch.empty(0, dtype=self.compute, device=key.device)
        self._launches: dict[Any, _Launch] = {}

    def launch(
        self, name: str, arguments: dict[str, Any], changes: dict[str, Any], unaligned: Sequence[str] = ()
    ) -> _Launch:
        """The launch of a kernel.

        Args:
            name: Its name.
            arguments: Those that other launches may lack, or pass in another type; of numbers, the type is the same.
            changes: Constants that differ from those of the form.
            unaligned: The arguments that do not begin at multiples of 16 bytes.
        """
        types = [value.dtype if isinstance(value, Tensor) else value is None for value in arguments.values()]
        key = name, unaligned, *arguments, *types, *changes.items()
        launch = self._launches.get(key)
        if launch is None:
            kernel, constants = getattr(_kernels(), name), {**self.constants, **changes}
            launch = self._launches[key] = _Launch(kernel, constants, self.nothing.device)
        return launch


class _Launch:
    """A kernel with its constants.

    Triton looks at all arguments of each launch to find the code for them. With sixty arguments, that takes longer than
    most kernels run, so launches after the first one use what it found.

    Args:
        kernel: The kernel.
        constants: Values by name, score and law by theirs; also `num_warps`. Others are ignored.
        device: The device that it runs on.
    """

    def __init__(self, kernel: Any, constants: dict[str, Any], device: torch.device):
        self._kernel, self.constants, self._device = kernel, constants, device
        named = {"SCORE": {name: score for name, (score, _) in _kernels().FAMILIES.items()}, "LAW": _kernels().LAWS}
        values = {name: named[name][value] if name in named else value for name, value in constants.items()}
        self._values = [values.get(name) for name in kernel.arg_names]
        self._open = [(place, name) for place, name in enumerate(kernel.arg_names) if name not in values]
        self._code: Any = None
        #: Whether the kernel has run, or could.
        self.is_loaded = False

    def __call__(self, grid: tuple[int, int], given: dict[str, Any]) -> None:
        """Runs the kernel.

        Args:
            grid: The number of programs, which may be zero.
            given: The other arguments by name, and others, which are ignored.
        """
        if min(grid) == 0:
            return
        values = self._values.copy()
        for place, name in self._open:
            values[place] = given[name]
        code, self.is_loaded = self._code, True
        if code is None:
            names = self._kernel.arg_names
            self._code = run(self._kernel, grid, self.constants["num_warps"], dict(zip(names, values, strict=True)))
        else:
            stream = stream_address(self._device)
            hooks = None, None, None
            code.run(*grid, 1, stream, code.function, code.packed_metadata, *hooks, *values)


_MOST_FORMS = 256
_forms: dict[Any, _Form] = {}


def _form_of(inputs: Inputs) -> _Form:
    """The form of a call, made once."""
    tensors = [(name, x.dtype, x.shape[-2:] if name in _ROWS else None) for name, x, _ in inputs.terms()]
    law = inputs.distribution, *inputs.distribution_constants
    key = inputs.key.device, inputs.family, *inputs.constants, *law, inputs.edge_is_value, *tensors
    if key not in _forms:
        if len(_forms) >= _MOST_FORMS:
            _forms.clear()
        _forms[key] = _Form(inputs)
    return _forms[key]


class _Launches:
    """What forward and backward pass share: sizes, the inputs in the form that the kernels take, and launches."""

    def __init__(self, inputs: Inputs):
        if inputs.edge_projection is not None or inputs.edge_type is not None:
            raise ValueError(
                "the Triton kernels neither project edge features nor look up types: they take edges [E, H, C]."
            )
        edges = inputs.edge_index, inputs.num_sources, inputs.num_targets, inputs.self_loops, inputs.flow
        self.layout = layout = layout_of(*edges, traced=inputs.traced)
        per_edge = [(getattr(inputs, name), inner) for name, inner in _PER_EDGE.items()]
        counts = [tensor.size(-inner) for tensor, inner in per_edge if tensor is not None and tensor.dim() >= inner]
        self.form: _Form = inputs.plan
        if self.form is None:  # or a plan has checked them
            inputs.check(layout.expect(counts[0]) if counts else 0)
            self.form = _form_of(inputs)
        #: The number of edges for which results per edge have room.
        self.num_terms = counts[0] if counts else layout.most_edges
        self.front = inputs.front
        self.batch = math.prod(self.front)
        self.device = inputs.key.device
        #: E, as far as it is needed to separate the elements of a batch without reading it on the device.
        self.num_edges = 0
        is_counted = self.batch > 1 and inputs.seed is not None
        if is_counted and layout.edge_count is None:
            self.num_edges = layout.num_edges
        self.edge_count = layout.edge_count if is_counted else None
        self.num_sources, self.num_targets = inputs.num_sources, inputs.num_targets

        #: Constants that differ from those of the form.
        self.changes: dict[str, Any] = {}
        self.inputs = given = self.form.absent.copy()
        if inputs.vector is not None:
            given["vector"] = inputs.vector.contiguous()
        if inputs.sink is not None:
            given["sink"] = inputs.sink.contiguous()
        if inputs.seed is not None:
            dropout = inputs.dropout
            given |= {"seed": inputs.seed, "threshold": int(dropout * 2**32)}
            given["keep_scale"] = 1 / (1 - dropout) if dropout < 1 else 0.0
        for name in _ROWS:
            tensor = inputs.values if name == "value" else getattr(inputs, name)
            if tensor is None:
                continue
            row = tensor.size(-2) * tensor.size(-1)
            batch = row * tensor.size(-3)
            if not tensor.is_contiguous():
                tensor = dense_rows(tensor, 2)
                batch, between = tensor.stride()[:2]
                row = row if tensor.size(1) == 1 else between  # a single row may have any stride
            if self.batch == 1:
                batch = 0
            of_batch, of_row, unit_name = _ROWS[name]
            unit = self.changes[unit_name] = math.gcd(_WIDEST_LOAD, batch, row)
            given[name], given[of_batch], given[of_row] = tensor, batch // unit, row // unit
        for name, inner in _PER_EDGE.items():
            tensor = getattr(inputs, name)
            if tensor is None:
                continue
            if tensor.dim() > inner:
                tensor = flat(tensor, inner - 1)
                given[f"{name}_batch"] = 0 if tensor.size(0) == 1 else tensor.size(1)
            given[name] = tensor.contiguous()
        if inputs.mask is not None:
            mask = given["mask"] = flat(inputs.mask, 1).view(torch.uint8)
            for place, name in enumerate(_STRIDES_OF_MASK):
                given[name] = 0 if mask.size(place) == 1 else mask.stride(place)
        #: Those for which other code is compiled.
        self.unaligned = _unaligned(self.inputs)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=self.form.compute if dtype is None else dtype, device=self.device)

    def partial(self, rows: Rows, channels: int) -> Tensor:
        """Memory for the partial sums of rows of several tasks."""
        return self._of_slots(rows, self.form.heads, channels)

    def _of_slots(self, rows: Rows, *shape: int) -> Tensor:
        if rows.num_slots == 0:
            return self.form.nothing
        return self.empty(self.batch, rows.num_slots, *shape)

    def unflat(self, tensor: Tensor) -> Tensor:
        """The tensor with the batch dimensions of the inputs."""
        return tensor.view(*self.front, *tensor.shape[1:])

    def launch(
        self,
        name: str,
        rows: Rows,
        arguments: dict[str, Any],
        changes: dict[str, Any],
        programs: int | None = None,
    ) -> None:
        """Runs a kernel over the tasks of `rows`, with the inputs that it takes.

        Args:
            name: The name of the kernel.
            rows: The rows to go through.
            arguments: Its arguments in addition to the inputs, or instead of them.
            changes: Constants instead of those of the form.
            programs: The number of programs that share the blocks of tasks. (default: `None`, one per block)
        """
        arguments["edge_count"] = self.edge_count
        launch = self.form.launch(name, arguments, {**self.changes, **changes}, self.unaligned)
        constants = launch.constants
        blocks = self.num_blocks(rows, constants["BLOCK_R"])
        given = {
            "num_edges": self.num_edges,
            "num_terms": self.num_terms,
            "num_sources": self.num_sources,
            "num_targets": self.num_targets,
            "start": rows.start,
            "tasks": rows.tasks,
            "node": rows.node,
            "number": rows.number,
            "num_tasks": rows.tasks.size(1),
            "num_slots": rows.num_slots,
            "num_blocks": blocks,
            **self.inputs,
            **arguments,
        }
        launch((blocks if programs is None else programs, -(-self.form.heads // constants["BLOCK_H"])), given)

    def num_blocks(self, rows: Rows, block: int) -> int:
        """The number of blocks of tasks in all rows."""
        return -(-rows.tasks.size(1) // block) * self.batch

    def rewritten_logits(self) -> Tensor:
        """The logits of all edges, `[B, E, H]`, rewritten row by row so that each weight follows from its own alone.

        E is an upper bound here.
        """
        form, rows, most_edges = self.form, self.layout.by_target, self.layout.most_edges
        logits = self.empty(self.batch, most_edges, form.heads)
        # Values without channels: nothing is written to the output, and nobody reads the statistics.
        only_logits: dict[str, Any] = {
            "LAW": "logits",
            "NORMALIZED": False,
            "VALUE_CHANNELS": 0,
            "KEY_IS_VALUE": False,
            "EDGE_IS_VALUE": False,
            **_blocks(form.heads, form.channels, 0, form.dtype),
        }
        unused = {**dict.fromkeys(("edge_value", "seed", "wide")), **dict.fromkeys(("out", "partial"), logits)}
        given: dict[str, Any] = {"logits": logits, "num_edges": most_edges}
        self.launch("forward", rows, {**given, **unused, **self.stats(rows)}, only_logits)
        heads = min(_power_of_two(form.heads), _ROW_HEADS)
        changes: dict[str, Any] = {"BLOCK_E": _WIDTH // heads, "BLOCK_H": heads, "num_warps": 1}
        kernel = "keep_largest"
        if form.derivatives is not None:
            kernel = "subtract_threshold"
            changes["LAW"] = form.law
        self.launch(kernel, rows, given, changes, self.batch * self.num_targets)
        return logits

    def read_rewritten(self, logits: Tensor) -> None:
        """Makes kernels read rewritten logits instead of computing them with their bias and mask."""
        self.inputs |= {"bias": logits, "bias_batch": logits.size(1), "mask": None}
        self.changes["REWRITTEN"] = True

    def stats(self, rows: Rows) -> dict[str, Tensor]:
        """Memory for the maximum and the scale of each target, and of the parts of long rows."""
        heads = self.form.heads
        return {
            "stats": self.empty(self.batch, self.num_targets, 2, heads),
            "partial_stats": self._of_slots(rows, 2, heads),
        }

    def sum_values(
        self, law: str, divides: bool, out: Tensor, wide: Tensor | None, with_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Stores sums of values, weighted by a law, in `out`, and before they are rounded in `wide`.

        Returns:
            The maximum and the scale of each target, and the weights if they are requested.
        """
        rows, stats = self.layout.by_target, self.stats(self.layout.by_target)
        weights = None
        if with_weights:
            self.num_edges = self.layout.num_edges
            weights = self.empty(self.batch, self.num_edges, self.form.heads)
        results: dict[str, Any] = {"out": out, "wide": wide, **stats}
        results["partial"] = self.partial(rows, self.form.value_channels)
        changes = {"LAW": law, "NORMALIZED": divides}
        self.launch("forward", rows, {"logits": weights, **results}, changes)
        self.combine(rows, results, changes)
        if weights is None:
            return stats["stats"], None
        maximum, scale = stats["stats"].index_select(1, self.layout.target()).unbind(2)
        if _kernels().LAWS[law] is None:
            weights.sub_(maximum).exp_()
        return stats["stats"], weights.mul_(scale)

    def backward_by_source(self, tensors: dict[str, Tensor], given: dict[str, Any]) -> dict[str, Tensor]:
        """Gradients of those of the inputs `tensors` that belong to sources and edges, of the vector, and `"logits"`.

        The last are gradients of logits, or, for a scalar score, each edge's part of the query's if that is enough.
        """
        form, rows, grads = self.form, self.layout.by_source, {}
        channels = {"key": form.channels, "value": form.value_channels}
        for name in (name for name in channels if name in tensors):
            # Sums over query heads that share a key head are rounded only once.
            dtype = _stored(tensors[name].dtype) if form.group == 1 else form.compute
            grads[name] = self.empty(self.batch, self.num_sources, form.heads, channels[name], dtype=dtype)
        partial = {name: self.partial(rows, channels[name]) for name in channels if name in grads}
        widths = {"edge": form.channels, "edge_value": form.value_channels}
        for name, width in widths.items():
            if name in tensors:
                dtype = _stored(tensors[name].dtype)
                grads[name] = self.empty(self.batch, self.num_terms, form.heads, width, dtype=dtype)
        if "query" in tensors or "bias" in tensors:
            grads["logits"] = self.empty(self.batch, self.num_terms, form.heads)
        programs = self.num_blocks(rows, form.constants["BLOCK_R"])
        if "vector" in tensors:
            programs = min(programs, _MOST_PROGRAMS)
            grads["vector"] = self.empty(programs, form.heads, form.channels)
        self.launch(
            "backward_by_source",
            rows,
            {
                **given,
                **{f"grad_{name}": grads.get(name) for name in (*channels, *widths, "vector", "logits")},
                **{f"partial_{name}": partial.get(name) for name in channels},
            },
            {"STORES_BY_QUERY": self.stores_by_query(tensors)},
            programs,
        )
        for name, sums in partial.items():
            self.add_partial(rows, sums, grads[name])
        if "vector" in grads:
            grads["vector"] = grads["vector"].sum(0)
        return grads

    def stores_by_query(self, tensors: dict[str, Tensor]) -> bool:
        """Whether gradients of the query are sums of numbers that are known in the pass by source."""
        return self.form.channels == 1 and "query" in tensors and "bias" not in tensors

    def backward_by_target(self, grad_logits: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        """The gradient of the query, from the `"logits"` of `backward_by_source`."""
        dtype = _stored(tensors["query"].dtype)
        if self.stores_by_query(tensors):
            return self.sum_by_target(grad_logits, dtype)
        return self._sum_over_rows(grad_logits, self.num_terms, dtype, {}, self.form.channels)

    def sum_by_target(self, terms: Tensor, dtype: torch.dtype) -> Tensor:
        """Sums of `[B, E, H]` over each target's edges, `[B, N, H, 1]`."""
        without_score = {"SCORE": "sum", "CONSTANTS": (), "CHANNELS": 1}
        without = dict.fromkeys(("query", "key", "vector", "edge"))
        return self._sum_over_rows(terms, terms.size(1), dtype, without_score, 1, **without)

    def _sum_over_rows(
        self, terms: Tensor, num_terms: int, dtype: torch.dtype, changes: dict[str, Any], channels: int, **without: None
    ) -> Tensor:
        form, rows = self.form, self.layout.by_target
        result = self.empty(self.batch, self.num_targets, form.heads, channels, dtype=dtype)
        partial = self.partial(rows, channels)
        changes = {**changes, **_blocks(form.heads, channels, 0, form.dtype)}
        given = {"grad_logits": terms, "grad_query": result, "partial": partial, "num_terms": num_terms}
        self.launch("backward_by_target", rows, {**given, **without}, changes)
        self.add_partial(rows, partial, result)
        return result

    def as_gradient(self, grad: Tensor, name: str, of: Tensor) -> Tensor:
        """A gradient in the shape and type of its tensor."""
        if name in _PER_EDGE:
            grad = grad.view(*self.front, *of.shape[-_PER_EDGE[name] :]).sum_to_size(of.shape)
        elif name in ("key", "value") and self.form.group > 1:
            grad = torch.unflatten(grad, 2, (-1, self.form.group)).sum(3)
        return grad.to(of.dtype).view(of.shape)

    def combine(self, rows: Rows, results: dict[str, Any], changes: dict[str, Any]) -> None:
        """Combines the results of tasks to those of targets with several tasks."""
        constants = self.form.constants
        changes = {**changes, "CHANNELS": self.form.value_channels, "BLOCK_C": constants["BLOCK_V"]}
        programs = -(-self.form.heads // constants["BLOCK_H"])
        self._run_over_split("combine", rows, programs, {"sink": self.inputs["sink"], **results}, changes)

    def add_partial(self, rows: Rows, partial: Tensor, out: Tensor) -> None:
        """Adds the partial sums of tasks of the same row."""
        width = self.form.heads * out.size(-1)
        block = min(_power_of_two(width), 128)
        changes = {"WIDTH": width, "BLOCK_C": block}
        self._run_over_split("add_partial", rows, -(-width // block), {"partial": partial, "out": out}, changes)

    def _run_over_split(
        self, name: str, rows: Rows, programs: int, arguments: dict[str, Any], changes: dict[str, Any]
    ) -> None:
        """Runs a kernel over rows of several tasks, with this many programs for each.

        Without such rows, it runs once over a row that does not exist: a CUDA graph that is captured later must be able
        to handle such rows, and cannot load a kernel.
        """
        changes = {**changes, "BLOCK_P": _PARTS, "num_warps": _COMBINING_WARPS}
        launch, split = self.form.launch(name, arguments, changes), rows.split
        if split.size(1) == 0:
            if launch.is_loaded:
                return
            split = torch.full((3, 1), -1, dtype=torch.int32, device=self.device)
        num_split = split.size(1)
        sizes = {"num_split": num_split, "num_slots": rows.num_slots, "num_targets": self.num_targets}
        rows_of_out = arguments["out"].size(1)
        launch((num_split * self.batch, programs), {**arguments, **sizes, "split": split, "num_rows": rows_of_out})

    def delta(self, grad_out: Tensor, out: Tensor) -> Tensor:
        """The products of outputs and their gradients, summed over channels, `[B, N, H]`."""
        form = self.form
        delta = self.empty(*out.shape[:-1])
        block_c = _power_of_two(form.value_channels)
        block_r = max(1, _DELTA_WIDTH // block_c)
        changes = {"CHANNELS": form.value_channels, "BLOCK_C": block_c, "BLOCK_R": block_r, "num_warps": _DELTA_WARPS}
        given = {"grad_out": grad_out, "wide": out, "delta": delta, "num_rows": delta.numel()}
        self.form.launch("dot_rows", given, changes, _unaligned(given))((-(-delta.numel() // block_r), 1), given)
        return delta


def _unaligned(arguments: dict[str, Any]) -> tuple[str, ...]:
    """The names of tensors that do not begin at multiples of 16 bytes, for which Triton compiles other code."""
    return tuple(name for name, x in arguments.items() if isinstance(x, Tensor) and x.data_ptr() % _ALIGNMENT != 0)


def run(kernel: Any, grid: tuple[int, int], warps: int, arguments: dict[str, Any]) -> Any:
    """Runs a kernel that has not been compiled for such arguments.

    Args:
        kernel: The kernel.
        grid: The number of programs.
        warps: The number of warps per program.
        arguments: The arguments of the kernel, by name.

    Returns:
        The compiled code; `None` if the interpreter ran it.
    """
    return kernel[grid](**arguments, num_warps=warps)


def _kept(inputs: Inputs, keep: bool) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Statistics of the softmax, rewritten logits, and the output before it was rounded."""
    compute, batch, heads = compute_dtype(inputs.values.dtype), math.prod(inputs.front), inputs.heads
    kept: list[tuple[tuple[int, ...], torch.dtype]] = [((batch, inputs.num_targets, 2, heads), compute)]
    if keep and inputs.distribution in _kernels().ROW_LAWS:
        kept.append(((batch, inputs.most_edges, heads), compute))
    if keep and inputs.values.dtype != compute:
        kept.append((inputs.out_shape, compute))
    return kept


def _forward(inputs: Inputs, keep: bool, with_weights: bool) -> list[Any]:
    with torch.cuda.device_of(inputs.key):
        call = _Launches(inputs)
        form = call.form
        shape = call.batch, call.num_targets, form.heads, form.value_channels
        out = call.empty(*shape, dtype=_stored(form.dtype))
        unrounded = call.empty(*shape) if keep and out.dtype != form.compute else None
        kept = []
        if form.is_of_rows:
            kept.append(call.rewritten_logits())
            call.read_rewritten(kept[0])
        stats, weights = call.sum_values(form.law, form.divides, out, unrounded, with_weights)
        if form.dtype != form.compute:
            kept.append(call.unflat(out if unrounded is None else unrounded))
        alpha = None if weights is None else call.unflat(weights)
        return [call.unflat(out).to(form.dtype), alpha, stats, *(kept if keep else ())]


def _backward(
    inputs: Inputs,
    grad_out: Tensor,
    grad_weights: Tensor | None,
    out: Tensor,
    weights: Tensor | None,
    kept: Sequence[Tensor],
    wanted: Sequence[str],
) -> list[Tensor]:
    stats, *others = (x.contiguous() for x in kept)  # as kernels read them
    with torch.cuda.device_of(grad_out):
        call = _Launches(inputs)
        form = call.form
        if form.is_of_rows:
            call.read_rewritten(others.pop(0))
        unrounded = flat(others[0] if others else out, 2)
        if form.derivatives is not None:
            # A threshold takes the mean of its row's gradients, weighted by the derivatives instead of the weights.
            unrounded = call.empty(*unrounded.shape)
            _, weights = call.sum_values(form.derivatives, True, unrounded, None, grad_weights is not None)
        tensors = {name: getattr(inputs, name) for name in wanted}
        grad_out = flat(grad_out, 2).contiguous()
        is_normalized = form.divides or form.derivatives is not None
        if is_normalized:
            delta = call.delta(grad_out, unrounded.contiguous())
        else:
            delta = call.empty(*grad_out.shape[:-1]).zero_()
        if grad_weights is not None:
            call.num_edges = call.layout.num_edges
            grad_weights = flat(grad_weights, 1).contiguous()
            if is_normalized:
                assert weights is not None
                delta += call.sum_by_target(flat(weights, 1) * grad_weights, form.compute).squeeze(-1)
        given = {"stats": stats, "delta": delta, "grad_out": grad_out, "grad_weights": grad_weights}
        call.unaligned += _unaligned(given)
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
