"""Launches of the GPU kernels: what calls share, on any graph and on one, is found once."""

from __future__ import annotations

import math
import os
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from gattn.ops.backends.kernels import dense_rows, flat
from gattn.ops.backends.triton.layout import Layout, Rows, layout_of
from gattn.ops.call import compute_dtype
from gattn.ops.terms import TERMS, Inputs
from gattn.torch_private import stream_address

__all__ = [
    "INTERPRETED",
    "PER_EDGE",
    "WIDTH",
    "Form",
    "form_on_graph",
    "is_installed",
    "jitted",
    "power_of_two",
    "run",
    "stored",
    "tensors_of",
    "unaligned",
]

WIDTH = 256
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

_MOST_EDGES = 2**31 - 1
"""Numbers of edges have 32 bits."""

_PARTS = 16
"""The number of partial sums that are added at a time."""

_ALIGNMENT = 16
"""Triton compiles code of its own for tensors that do not begin at multiples of this many bytes."""

_WIDEST_LOAD = 16
"""Rows of multiples of this many numbers can be loaded with the widest loads, 16 bytes, in any type."""

_ROWS = tuple(name for name, term in TERMS.items() if term.read == "rows")

PER_EDGE = {name: len(term.letters) for name, term in TERMS.items() if term.read == "edges"}
"""Inputs with one entry per edge, and how many dimensions they have without those of the batch."""

_DENSE = (*PER_EDGE, "vector", "sink", "seed")
"""Inputs that kernels read without strides."""

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter runs the kernels on the CPU, which is slow but good for tests."""

is_installed = find_spec("triton") is not None  # read once, because compiled code cannot


class Form:
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
        laws, row_laws = jitted().LAWS, jitted().ROW_LAWS
        names = dict(zip(jitted().FAMILIES[inputs.family][1], inputs.constants, strict=True))
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
            self._launches[key] = _Launch(getattr(jitted(), key[0]), {**self.constants, **changes}, self.device)
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
        named = {"SCORE": {name: score for name, (score, _) in jitted().FAMILIES.items()}, "LAW": jitted().LAWS}
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
_forms: dict[Any, Form] = {}


def _form_of(inputs: Inputs) -> Form:
    """The form of a call, made once."""
    tensors = [(name, x.dtype, x.shape[-2:] if name in _ROWS else None) for name, x, _ in inputs.terms()]
    law = inputs.distribution, *inputs.distribution_constants
    key = inputs.key.device, inputs.family, *inputs.constants, *law, inputs.edge_is_value, *tensors
    if key not in _forms:
        if len(_forms) >= _MOST_FORMS:
            _forms.clear()
        _forms[key] = Form(inputs)
    return _forms[key]


class _OnGraph:
    """A form on a graph: sizes and strides, and launches with all of these numbers.

    Args:
        inputs: Those of one of the calls with this form, this graph, and these strides.
        form: The form.
        layout: The graph's layout.
    """

    def __init__(self, inputs: Inputs, form: Form, layout: Layout):
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
        given = tensors_of(inputs)
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
        for name, inner in PER_EDGE.items():
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


def form_on_graph(inputs: Inputs) -> tuple[_OnGraph, Layout]:
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


def tensors_of(inputs: Inputs) -> dict[str, Any]:
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


def unaligned(arguments: dict[str, Any]) -> tuple[str, ...]:
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


def stored(dtype: torch.dtype) -> torch.dtype:
    """The type in which kernels store results of type `dtype`."""
    # The interpreter truncates to bfloat16 instead of rounding; PyTorch rounds.
    return torch.float32 if dtype == torch.bfloat16 and INTERPRETED else dtype


@cache
def jitted() -> Any:
    """The module of kernels, imported when the first one runs."""
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
    block_h = min(power_of_two(heads), max(1, WIDTH // widest))
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
