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
from gattn.ops.backends.triton.layout import Layout, Rows, layout_of
from gattn.ops.call import compute_dtype
from gattn.ops.operator import AttentionOperator
from gattn.ops.terms import TERMS, Inputs
from gattn.scores import Family
from gattn.torch_private import stream_address

__all__ = ["INTERPRETED", "Triton", "is_installed", "power_of_two", "run", "stored"]

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

_ROWS = tuple(name for name, term in TERMS.items() if term.read == "rows")

_PER_EDGE = {name: len(term.letters) for name, term in TERMS.items() if term.read == "edges"}
"""Inputs with one entry per edge, and how many dimensions they have without those of the batch."""

_DENSE = (*_PER_EDGE, "vector", "sink", "seed")
"""Inputs that kernels read without strides."""

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter runs the kernels on the CPU, which is slow but good for tests."""

is_installed = find_spec("triton") is not None  # read once, because compiled code cannot


class Triton(KernelBackend):
    """The Triton kernels."""

    name = "triton"
    devices = ("cuda",)
    layout_of = staticmethod(layout_of)

    def serves(self, device: torch.device) -> bool:
        """See `KernelBackend.serves`; the interpreter computes on the CPU."""
        return super().serves(device) or (INTERPRETED and device.type == "cpu")

    def knows(self, family: Family | None) -> bool:
        """See `KernelBackend.knows`."""
        return family is not None and _knows(family.name)

    def knows_law(self, law: Law | None) -> bool:
        """See `KernelBackend.knows_law`."""
        return law is not None and _knows_law(law.name)

    def prepared(self, inputs: Inputs) -> Any:
        """See `KernelBackend.prepared`."""
        return _Form(inputs)

    def on_graph(self, prepared: Any, edges: tuple[Tensor, int, int, bool, str]) -> tuple[Any, int | None]:
        """See `KernelBackend.on_graph`."""
        layout = layout_of(*edges)
        return (prepared, layout), layout.known_edges

    def missing(self) -> Missing | None:
        """See `Backend.missing`."""
        return None if is_installed else Missing("Triton", "it is not installed: pip install triton")


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
        self.device = key.device
        self.heads = inputs.heads
        self.group = self.heads // max(key.size(-2), 1)
        self.channels, self.value_channels = key.size(-1), values.size(-1)
        self.dtype, self.compute = values.dtype, compute_dtype(values.dtype)
        laws, row_laws = _kernels().LAWS, _kernels().ROW_LAWS
        names = dict(zip(_kernels().FAMILIES[inputs.family][1], inputs.constants, strict=True))
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
            "MULTIPLIES": inputs.edge is not None and bool(names.get("multiplies")),
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
            "BLOCK_P": _PARTS,
            **self.blocks(self.channels, self.value_channels),
            "COMPUTE": _triton_type(self.compute),
        }
        #: Memory for sums of which there are none.
        self.nothing = torch.empty(0, dtype=self.compute, device=self.device)
        self._launches: dict[Any, _Launch] = {}
        #: Kernels for rows of several tasks that have run, by what decides about their code.
        self.loaded: set[Any] = set()

    def blocks(self, channels: int, value_channels: int) -> dict[str, int]:
        """See `_blocks`."""
        return _blocks(self.heads, channels, value_channels, self.dtype)

    def launch(self, key: tuple[Any, ...], changes: dict[str, Any]) -> _Launch:
        """The launch of a kernel, made once.

        Args:
            key: Its name, and all that decides about its constants and the types of its arguments.
            changes: Constants that differ from those of the form.
        """
        key = *key, *changes.items()
        if key not in self._launches:
            self._launches[key] = _Launch(getattr(_kernels(), key[0]), {**self.constants, **changes}, self.device)
        return self._launches[key]


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
        self._kernel, self.names, self.constants, self._device = kernel, kernel.arg_names, constants, device
        named = {"SCORE": {name: score for name, (score, _) in _kernels().FAMILIES.items()}, "LAW": _kernels().LAWS}
        #: The constants that it takes, by name.
        self.taken = {
            name: named[name][constants[name]] if name in named else constants[name]
            for name in self.names
            if name in constants
        }
        self._code: Any = None

    def __call__(self, grid: tuple[int, int], values: list[Any]) -> None:
        """Runs the kernel.

        Args:
            grid: The number of programs, which may be zero.
            values: All of its arguments, in order.
        """
        if min(grid) == 0:
            return
        code = self._code
        if code is None:
            warps = self.constants["num_warps"]
            self._code = run(self._kernel, grid, warps, dict(zip(self.names, values, strict=True)))
        else:
            hooks = None, None, None
            stream = stream_address(self._device)
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


class _OnGraph:
    """A form on a graph: sizes and strides, and launches with all of these numbers.

    Args:
        inputs: Those of one of the calls with this form, this graph, and these strides.
        form: The form.
        layout: The graph's layout.
    """

    def __init__(self, inputs: Inputs, form: _Form, layout: Layout):
        self.form = form
        self.front = inputs.front
        self.batch = math.prod(self.front)
        self.num_sources, self.num_targets = inputs.num_sources, inputs.num_targets
        counts = _rows_of_edges(inputs)
        #: The number of edges for which results per edge have room.
        self.num_terms = counts[0] if counts else layout.most_edges
        #: E, as far as it is needed to separate the elements of a batch without reading it on the device.
        self.num_edges, edge_count = 0, None
        if self.batch > 1 and inputs.seed is not None:
            edge_count = layout.edge_count
            if edge_count is None:
                self.num_edges = layout.num_edges
        dropout = inputs.dropout
        self.is_counted = edge_count is not None
        #: Arguments of kernels that are the same in all of these calls.
        self.numbers: dict[str, Any] = {
            "num_terms": self.num_terms,
            "num_sources": self.num_sources,
            "num_targets": self.num_targets,
            "edge_count": edge_count,
            "threshold": int(dropout * 2**32),
            "keep_scale": 1 / (1 - dropout) if dropout < 1 else 0.0,
        }
        #: Constants that differ from those of the form.
        self.units: dict[str, int] = {}
        given = _given(inputs)
        for name in _ROWS:
            batch = row = 0
            if (tensor := given.get(name)) is not None:
                row = tensor.size(-2) * tensor.size(-1)
                batch = row * tensor.size(-3)
                if not tensor.is_contiguous():
                    batch, between = tensor.stride()[:2]
                    row = row if tensor.size(1) == 1 else between  # a single row may have any stride
            if self.batch == 1:
                batch = 0
            unit = self.units[f"{name.upper()}_UNIT"] = math.gcd(_WIDEST_LOAD, batch, row)
            self.numbers |= {f"{name}_batch": batch // unit, f"{name}_row": row // unit}
        for name, inner in _PER_EDGE.items():
            tensor = given.get(name)
            batch = 0 if tensor is None or math.prod(tensor.shape[:-inner]) == 1 else tensor.size(-inner)
            self.numbers[f"{name}_batch"] = batch
        mask = given.get("mask")
        for place, name in enumerate(("mask_batch", "mask_edge", "mask_head")):
            self.numbers[name] = 0 if mask is None or mask.size(place) == 1 else mask.stride(place)
        #: Launches with their grids, their arguments, and the places of those that differ between calls.
        self.ready: dict[Any, tuple[_Launch, tuple[int, int], list[Any], list[tuple[int, str]]]] = {}

    def num_blocks(self, rows: Rows, block: int) -> int:
        """The number of blocks of tasks in all rows."""
        return -(-rows.tasks.size(1) // block) * self.batch


def _rows_of_edges(inputs: Inputs) -> list[int]:
    """The numbers of rows of inputs with one row per edge."""
    found = [(tensor, len(term.letters)) for _, tensor, term in inputs.terms() if term.letters.startswith("E")]
    return [tensor.size(-inner) for tensor, inner in found if tensor.dim() >= inner]


def _on_graph(inputs: Inputs) -> tuple[_OnGraph, Layout]:
    """The form of these inputs on their graph, made once if there is a plan, which has checked them."""
    if inputs.plan is not None:
        form, layout = inputs.plan
        if form not in layout.prepared:
            if len(layout.prepared) >= _MOST_FORMS:
                layout.prepared.clear()
            layout.prepared[form] = _OnGraph(inputs, form, layout)
        return layout.prepared[form], layout
    if inputs.edge_projection is not None or inputs.edge_type is not None:
        raise ValueError(
            "the Triton kernels neither project edge features nor look up types: they take edges [E, H, C]."
        )
    edges = inputs.edge_index, inputs.num_sources, inputs.num_targets, inputs.self_loops, inputs.flow
    layout = layout_of(*edges, traced=inputs.traced)
    counts = _rows_of_edges(inputs)
    inputs.check(layout.expect(counts[0]) if counts else 0)
    return _OnGraph(inputs, _form_of(inputs), layout), layout


def _given(inputs: Inputs) -> dict[str, Any]:
    """The tensors of the inputs as kernels read them."""
    given: dict[str, Any] = {}
    for name in _ROWS:
        tensor = inputs.values if name == "value" else getattr(inputs, name)
        if tensor is not None:
            given[name] = tensor if tensor.is_contiguous() else dense_rows(tensor, 2)
    for name in _DENSE:
        tensor = getattr(inputs, name)
        if tensor is not None:
            given[name] = tensor.contiguous()
    if inputs.mask is not None:
        given["mask"] = flat(inputs.mask, 1).view(torch.uint8)
    return given


class _Pass:
    """What forward and backward pass of a call share: its tensors, memory for results, and launches."""

    def __init__(self, inputs: Inputs):
        self.at, self.layout = at, _ = _on_graph(inputs)
        self.form, self.batch = at.form, at.batch
        self.given = _given(inputs)
        self.given["num_edges"] = at.num_edges
        #: Those for which other code is compiled.
        self.unaligned = _unaligned(self.given)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=self.form.compute if dtype is None else dtype, device=self.form.device)

    def of_slots(self, rows: Rows, *shape: int) -> Tensor:
        """Memory for something of each part of a row of several tasks."""
        return self.empty(self.batch, rows.num_slots, *shape) if rows.num_slots > 0 else self.form.nothing

    def launch(
        self,
        name: str,
        kind: Any,
        rows: Rows,
        arguments: dict[str, Any],
        changes: dict[str, Any],
        programs: int | None = None,
    ) -> None:
        """Runs a kernel over the tasks of `rows`, with the inputs that it takes.

        Args:
            name: The name of the kernel.
            kind: What decides about constants and the types of arguments, besides inputs.
            rows: The rows to go through.
            arguments: Its arguments in addition to the inputs and the numbers of the graph, or instead of them.
            changes: Constants instead of those of the form.
            programs: The number of programs that share the blocks of tasks. (default: `None`, one per block)
        """
        at, given = self.at, {**self.given, **arguments}
        key = name, kind, self.unaligned, "mask" in self.given
        ready = at.ready.get(key)
        if ready is None:
            launch = self.form.launch((*key, at.is_counted), {**at.units, **changes})
            blocks = at.num_blocks(rows, launch.constants["BLOCK_R"])
            numbers = {
                **at.numbers,
                "start": rows.start,
                "tasks": rows.tasks,
                "node": rows.node,
                "number": rows.number,
                "num_tasks": rows.tasks.size(1),
                "num_slots": rows.num_slots,
                "num_blocks": blocks,
                **launch.taken,
            }
            grid = blocks if programs is None else programs, -(-self.form.heads // launch.constants["BLOCK_H"])
            values = [None if name in given else numbers.get(name) for name in launch.names]
            changing = [(place, name) for place, name in enumerate(launch.names) if name in given]
            ready = at.ready[key] = launch, grid, values, changing
        launch, grid, values, changing = ready
        values = values.copy()
        for place, name in changing:
            values[place] = given[name]
        launch(grid, values)

    def rewrite_logits(self) -> Tensor:
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
            **form.blocks(form.channels, 0),
        }
        unused = {**dict.fromkeys(("edge_value", "seed", "wide")), **dict.fromkeys(("out", "partial"), logits)}
        given: dict[str, Any] = {"logits": logits, "num_edges": most_edges}
        self.launch("forward", "logits", rows, {**given, **unused, **self.stats(rows)}, only_logits)
        heads = min(power_of_two(form.heads), _ROW_HEADS)
        changes: dict[str, Any] = {"BLOCK_E": _WIDTH // heads, "BLOCK_H": heads, "num_warps": 1}
        kernel = "keep_largest" if form.derivatives is None else "subtract_threshold"
        self.launch(kernel, None, rows, given, changes, self.batch * self.at.num_targets)
        return logits

    def read_rewritten(self, logits: Tensor) -> None:
        """Makes kernels read rewritten logits instead of computing them with their bias and mask."""
        self.given |= {"bias": logits, "bias_batch": logits.size(1)}
        self.given.pop("mask", None)

    def stats(self, rows: Rows) -> dict[str, Tensor]:
        """Memory for the maximum and the scale of each target, and of the parts of long rows."""
        heads = self.form.heads
        stats = self.empty(self.batch, self.at.num_targets, 2, heads)
        return {"stats": stats, "partial_stats": self.of_slots(rows, 2, heads)}

    def sum_values(
        self, law: str, divides: bool, out: Tensor, wide: Tensor | None, with_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Stores sums of values, weighted by a law, in `out`, and before they are rounded in `wide`.

        Returns:
            The maximum and the scale of each target, and the weights if they are requested.
        """
        rows, form = self.layout.by_target, self.form
        weights = None
        results: dict[str, Any] = {"out": out, "partial": self.of_slots(rows, form.heads, form.value_channels)}
        results |= self.stats(rows)
        if wide is not None:
            results["wide"] = wide
        arguments = results
        if with_weights:
            num_edges = self.layout.num_edges
            weights = self.empty(self.batch, num_edges, form.heads)
            arguments = {**results, "logits": weights, "num_edges": num_edges}
        kind = law, divides, out.dtype, wide is not None, with_weights
        changes = {"LAW": law, "NORMALIZED": divides, "REWRITTEN": form.is_of_rows}
        self.launch("forward", kind, rows, arguments, changes)
        self.combine(kind, rows, results, divides)
        if weights is None:
            return results["stats"], None
        maximum, scale = results["stats"].index_select(1, self.layout.target()).unbind(2)
        if _kernels().LAWS[law] is None:
            weights.sub_(maximum).exp_()
        return results["stats"], weights.mul_(scale)

    def backward_by_source(self, tensors: dict[str, Tensor], given: dict[str, Any]) -> dict[str, Tensor]:
        """Gradients of those of the inputs `tensors` that belong to sources and edges, of the vector, and `"logits"`.

        The last are gradients of logits, or, for a scalar score, each edge's part of the query's if that is enough.
        """
        form, at, rows = self.form, self.at, self.layout.by_source
        grads, partial = dict[str, Tensor](), dict[str, Tensor]()
        for name, width in (("key", form.channels), ("value", form.value_channels)):
            if name in tensors:
                # Sums over query heads that share a key head are rounded only once.
                shape, dtype = tensors[name].shape, stored(tensors[name].dtype)
                if form.group > 1:
                    shape, dtype = torch.Size((self.batch, at.num_sources, form.heads, width)), form.compute
                grads[name] = self.empty(*shape, dtype=dtype)
                partial[f"partial_{name}"] = self.of_slots(rows, form.heads, width)
        for name, width in (("edge", form.channels), ("edge_value", form.value_channels)):
            if name in tensors:
                dtype = stored(tensors[name].dtype)
                grads[name] = self.empty(self.batch, at.num_terms, form.heads, width, dtype=dtype)
        if "query" in tensors or "bias" in tensors:
            grads["logits"] = self.empty(self.batch, at.num_terms, form.heads)
        programs = None
        if "vector" in tensors:
            programs = min(at.num_blocks(rows, form.constants["BLOCK_R"]), _MOST_PROGRAMS)
            grads["vector"] = self.empty(programs, form.heads, form.channels)
        arguments = {**given, **{f"grad_{name}": grad for name, grad in grads.items()}, **partial}
        stores = self.stores_by_query(tensors)
        changes = {"STORES_BY_QUERY": stores, "REWRITTEN": form.is_of_rows}
        self.launch("backward_by_source", (stores, *arguments), rows, arguments, changes, programs)
        for name in ("key", "value"):
            if name in grads:
                self.add_partial(rows, partial[f"partial_{name}"], grads[name])
        if "vector" in grads:
            grads["vector"] = grads["vector"].sum(0)
        return grads

    def stores_by_query(self, tensors: dict[str, Tensor]) -> bool:
        """Whether gradients of the query are sums of numbers that are known in the pass by source."""
        return self.form.channels == 1 and "query" in tensors and "bias" not in tensors

    def backward_by_target(self, grad_logits: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        """The gradient of the query, from the `"logits"` of `backward_by_source`."""
        grad = self.empty(*tensors["query"].shape, dtype=stored(tensors["query"].dtype))
        if self.stores_by_query(tensors):
            self.sum_by_target(grad_logits, grad)
        else:
            rows, channels = self.layout.by_target, self.form.channels
            arguments = {"grad_logits": grad_logits, "grad_query": grad}
            self._sum_over_rows(None, rows, channels, arguments, {})
        return grad

    def sum_by_target(self, terms: Tensor, out: Tensor) -> None:
        """Sums of `[B, E, H]` over each target's edges, `[B, N, H]`."""
        without_score = {"SCORE": "sum", "CONSTANTS": (), "CHANNELS": 1}
        arguments = {"grad_logits": terms, "grad_query": out, "num_terms": terms.size(1)}
        arguments |= dict.fromkeys(("query", "key", "vector", "edge"))
        self._sum_over_rows("sum", self.layout.by_target, 1, arguments, without_score)

    def _sum_over_rows(
        self, kind: str | None, rows: Rows, channels: int, arguments: dict[str, Any], changes: dict[str, Any]
    ) -> None:
        out = arguments["grad_query"]
        arguments["partial"] = self.of_slots(rows, self.form.heads, channels)
        changes |= self.form.blocks(channels, 0)
        self.launch("backward_by_target", (kind, out.dtype), rows, arguments, changes)
        self.add_partial(rows, arguments["partial"], out)

    def as_gradient(self, grad: Tensor, name: str, of: Tensor) -> Tensor:
        """A gradient in the shape and type of its tensor."""
        if grad.shape == of.shape and grad.dtype == of.dtype:
            return grad
        if name in _PER_EDGE:
            grad = grad.view(*self.at.front, *of.shape[-_PER_EDGE[name] :]).sum_to_size(of.shape)
        elif name in ("key", "value") and self.form.group > 1:
            grad = torch.unflatten(grad, 2, (-1, self.form.group)).sum(3)
        return grad.to(of.dtype).view(of.shape)

    def combine(self, kind: Any, rows: Rows, results: dict[str, Any], divides: bool) -> None:
        """Combines the results of tasks to those of targets with several tasks."""
        key = "combine", kind
        if self.is_done(key, rows):
            return
        constants, sink = self.form.constants, self.given.get("sink")
        arguments = {**results, "sink": sink, "num_targets": self.at.num_targets}
        changes = {"NORMALIZED": divides, "CHANNELS": self.form.value_channels, "BLOCK_C": constants["BLOCK_V"]}
        self._run_over_split(key, rows, -(-self.form.heads // constants["BLOCK_H"]), arguments, changes)

    def add_partial(self, rows: Rows, partial: Tensor, out: Tensor) -> None:
        """Adds the partial sums of tasks of the same row."""
        width = self.form.heads * out.size(-1)
        key = "add_partial", out.dtype, width
        if self.is_done(key, rows):
            return
        block = min(power_of_two(width), 128)
        arguments = {"partial": partial, "out": out, "num_rows": out.numel() // max(self.batch * width, 1)}
        self._run_over_split(key, rows, -(-width // block), arguments, {"WIDTH": width, "BLOCK_C": block})

    def is_done(self, key: tuple[Any, ...], rows: Rows) -> bool:
        """Whether a kernel for rows of several tasks has nothing to do.

        Without such rows, it runs once over a row that does not exist: a CUDA graph that is captured later must be able
        to handle such rows, and cannot load a kernel.
        """
        return rows.split.size(1) == 0 and key in self.form.loaded

    def _run_over_split(
        self, key: tuple[Any, ...], rows: Rows, programs: int, arguments: dict[str, Any], changes: dict[str, Any]
    ) -> None:
        self.form.loaded.add(key)
        launch, split = self.form.launch(key, {**changes, "num_warps": _COMBINING_WARPS}), rows.split
        if split.size(1) == 0:
            split = torch.full((3, 1), -1, dtype=torch.int32, device=self.form.device)
        num_split = split.size(1)
        arguments |= {"split": split, "num_split": num_split, "num_slots": rows.num_slots, **launch.taken}
        launch((num_split * self.batch, programs), [arguments.get(name) for name in launch.names])

    def delta(self, grad_out: Tensor, out: Tensor) -> Tensor:
        """The products of outputs and their gradients, summed over channels, `[B, N, H]`."""
        form = self.form
        delta = self.empty(self.batch, self.at.num_targets, form.heads)
        block_c = power_of_two(form.value_channels)
        block_r = max(1, _DELTA_WIDTH // block_c)
        given = {"grad_out": grad_out, "wide": out, "delta": delta, "num_rows": delta.numel()}
        changes = {"CHANNELS": form.value_channels, "BLOCK_C": block_c, "BLOCK_R": block_r, "num_warps": _DELTA_WARPS}
        launch = form.launch(("dot_rows", grad_out.dtype, out.dtype, _unaligned(given)), changes)
        given |= launch.taken
        launch((-(-delta.numel() // block_r), 1), [given[name] for name in launch.names])
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
        call = _Pass(inputs)
        form, shape = call.form, inputs.out_shape
        out = call.empty(*shape, dtype=stored(form.dtype))
        unrounded = call.empty(*shape) if keep and out.dtype != form.compute else None
        kept = []
        if form.is_of_rows:
            kept.append(call.rewrite_logits())
            call.read_rewritten(kept[0])
        stats, weights = call.sum_values(form.law, form.divides, out, unrounded, with_weights)
        if form.dtype != form.compute:
            kept.append(out if unrounded is None else unrounded)
        if weights is not None:
            weights = weights.view(*inputs.front, *weights.shape[1:])
        return [out.to(form.dtype), weights, stats, *(kept if keep else ())]


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
        call = _Pass(inputs)
        form = call.form
        if form.is_of_rows:
            call.read_rewritten(others.pop(0))
        unrounded = others[0] if others else out.contiguous()
        if form.derivatives is not None:
            # A threshold takes the mean of its row's gradients, weighted by the derivatives instead of the weights.
            unrounded = call.empty(*unrounded.shape)
            _, weights = call.sum_values(form.derivatives, True, unrounded, None, grad_weights is not None)
        tensors = {name: getattr(inputs, name) for name in wanted}
        given: dict[str, Any] = {"stats": stats, "grad_out": grad_out.contiguous()}
        is_normalized = form.divides or form.derivatives is not None
        if is_normalized:
            delta = call.delta(given["grad_out"], unrounded)
        else:
            delta = call.empty(call.batch, call.at.num_targets, form.heads).zero_()
        if grad_weights is not None:
            given |= {"grad_weights": grad_weights.contiguous(), "num_edges": call.layout.num_edges}
            if is_normalized:
                assert weights is not None
                of_weights = torch.empty_like(delta)
                call.sum_by_target(flat(weights, 1) * flat(grad_weights, 1), of_weights.unsqueeze(-1))
                delta += of_weights
        given["delta"] = delta
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


def stored(dtype: torch.dtype) -> torch.dtype:
    """The type in which kernels store results of type `dtype`."""
    # The interpreter truncates to bfloat16 instead of rounding; PyTorch rounds.
    return torch.float32 if dtype == torch.bfloat16 and INTERPRETED else dtype


@cache
def _kernels() -> Any:
    from gattn.ops.backends.triton import kernels

    return kernels


@cache
def _triton_type(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return tl.float64 if dtype == torch.float64 else tl.float32


def power_of_two(number: int) -> int:
    """The smallest power of two that is not less than the number, and at least 1."""
    return 1 << max(number - 1, 0).bit_length()


def _blocks(heads: int, channels: int, value_channels: int, dtype: torch.dtype) -> dict[str, int]:
    """The numbers of tasks, heads and channels of a program, and of its warps, by a rule instead of trials.

    Trials would compile each kernel up to eight times, and keep the best choice for one graph for all others.
    """
    block_c, block_v = power_of_two(channels), power_of_two(value_channels)
    widest = max(block_c, block_v)
    block_h = min(power_of_two(heads), max(1, _WIDTH // widest))
    if widest == 1 or heads * max(channels, value_channels) * dtype.itemsize % 16 != 0:
        width = _LOOSE_WIDTH
    else:
        is_padded = widest > max(channels, value_channels)  # padding takes registers as well
        width = _LOADED // (max(dtype.itemsize, 4) if is_padded else dtype.itemsize)
    block_r = max(1, width // (block_h * widest))
    if INTERPRETED:
        block_r = 16  # which takes as long as one
    warps = max(1, widest // _WARP_WIDTH)
    return {"BLOCK_R": block_r, "BLOCK_H": block_h, "BLOCK_C": block_c, "BLOCK_V": block_v, "num_warps": warps}


Triton.operator = AttentionOperator("triton_attention", ("CUDA", "CPU"), _forward, _backward, _kept)
