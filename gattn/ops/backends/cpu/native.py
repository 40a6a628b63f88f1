"""The compiled library of CPU kernels: finding it, loading it once, and asking for its features.

For tests, `GATTN_KERNELS` names another build of the library (for example with sanitizers), and `GATTN_INSTRUCTION_SET`
an instruction set other than the best one (`baseline`, `avx2`, `avx512`).
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib.util import find_spec

from torch import Tensor

from gattn.torch_private import resolved

__all__ = [
    "PADDING",
    "Arguments",
    "PairRoots",
    "Radial",
    "Rows",
    "TileElement",
    "TileStrides",
    "Tiles",
    "distribution",
    "family",
    "is_of_rows",
    "keeps_logits",
    "knows_family",
    "library",
    "load_error",
    "raise_for",
    "readable",
]

# Part of the C interface: see csrc/arguments.h.
PADDING = 64

_OMP_PAUSE_HARD = 2

_OPENMP_HINT = "; this is OpenMP's runtime: install libgomp1 (Linux) or libomp (macOS: `brew install libomp`)"

_errors: dict[int, str] = {
    -1: "an index of the graph is out of range",
    -2: "the graph has too many nodes or edges for 32-bit numbers",
    -3: "not enough memory",
}


class NativeLibraryError(RuntimeError):
    """The CPU kernels cannot be used; the message says why."""


def _fields(names: str, kind: type) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Rows(ctypes.Structure):
    """The edges of each row, contiguous; mirrors `Rows` in csrc/arguments.h."""

    _fields_ = [
        ("start", ctypes.c_void_p),
        ("node", ctypes.c_void_p),
        ("tasks", ctypes.c_void_p),
        ("num_tasks", ctypes.c_int64),
        ("split", ctypes.c_void_p),
        ("split_row", ctypes.c_void_p),
        ("num_split", ctypes.c_int64),
        ("num_slots", ctypes.c_int64),
    ]


class PairRoots(ctypes.Structure):
    """Rows of nodes and of pairs; mirrors `PairRoots` in csrc/pair_roots.h."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("target", "source")],
        *[(name, ctypes.c_int64) for name in ("targets", "sources", "pairs", "width", "threads")],
        *[(name, ctypes.c_void_p) for name in ("query", "key", "weight", "shift", "out")],
        *[(name, ctypes.c_void_p) for name in ("grad", "grad_ends", "grad_weight", "grad_shift")],
    ]


class Radial(ctypes.Structure):
    """Biases of distances; mirrors `Radial` in csrc/radial_arguments.h."""

    _fields_ = [
        *_fields("type threads batch targets sources space functions heads parts is_bessel", ctypes.c_int64),
        ("scale", ctypes.c_double),
        *_fields("x y factor weight bias grad grad_x grad_y grad_parameters", ctypes.c_void_p),
    ]


class TileElement(ctypes.Structure):
    """Targets and sources that see each other; mirrors `TileElement` in csrc/tiles_arguments.h."""

    _fields_ = _fields(
        "batch first_target targets first_source sources offset term bias_at bias_step "
        "weights_at weights_head weights_row parts",
        ctypes.c_int64,
    )


class TileStrides(ctypes.Structure):
    """Strides, in numbers; mirrors `TileStrides` in csrc/tiles_arguments.h."""

    _fields_ = _fields("batch head row channel", ctypes.c_int64)


class Tiles(ctypes.Structure):
    """Attention on complete graphs; mirrors `Tiles` in csrc/tiles_arguments.h."""

    _fields_ = [
        *_fields("type threads batch heads key_heads channels value_channels targets sources", ctypes.c_int64),
        ("elements", ctypes.c_void_p),
        ("num_elements", ctypes.c_int64),
        *_fields("scale slope clamp", ctypes.c_double),
        ("distribution", ctypes.c_int64),
        ("distribution_constants", ctypes.c_double * 2),
        ("sink", ctypes.c_void_p),
        *_fields("left right", ctypes.c_int64),
        *_fields("query key value", ctypes.c_void_p),
        *_fields("query_strides key_strides value_strides", TileStrides),
        *_fields("bias mask", ctypes.c_void_p),
        *_fields("bias_strides mask_strides", TileStrides),
        ("tiles", ctypes.c_void_p),
        ("tiles_strides", TileStrides),
        ("block", ctypes.c_int64),
        *_fields("bias_kind bias_count first_distance", ctypes.c_int64),
        ("buckets", ctypes.c_void_p),
        ("bucket_bytes", ctypes.c_int64),
        *_fields("pair_starts pair_sources", ctypes.c_void_p),
        *_fields("dropout seed threshold", ctypes.c_int64),
        ("keep_scale", ctypes.c_double),
        *_fields("out wide stats weights", ctypes.c_void_p),
        ("dropped", ctypes.c_int64),
        *_fields("grad_out grad_weights delta", ctypes.c_void_p),
        *_fields("grad_query grad_key grad_value grad_bias", ctypes.c_void_p),
        ("grad_bias_strides", TileStrides),
        ("grad_table", ctypes.c_void_p),
        *_fields("parts shared_elements shared_heads", ctypes.c_int64),
    ]


class Arguments(ctypes.Structure):
    """All arguments of a kernel; mirrors `Arguments` in csrc/arguments.h."""

    _fields_ = [
        *_fields("targets sources edges heads key_heads channels value_channels batch", ctypes.c_int64),
        *_fields("family type threads", ctypes.c_int64),
        ("constants", ctypes.c_double * 4),
        ("distribution", ctypes.c_int64),
        ("distribution_constants", ctypes.c_double * 2),
        ("sink", ctypes.c_void_p),
        ("by_target", Rows),
        ("by_source", Rows),
        *_fields("edge_of_target_position target_position source_position", ctypes.c_void_p),
        *_fields("query key value", ctypes.c_void_p),
        *_fields("value_is_key query_row query_batch key_row key_batch value_row value_batch", ctypes.c_int64),
        *_fields("vector out_bias edge bias mask edge_value", ctypes.c_void_p),
        *_fields("edge_projection edge_projection_rows", ctypes.c_void_p),
        ("edge_channels", ctypes.c_int64),
        ("edge_type", ctypes.c_void_p),
        *_fields("edge_batch bias_batch mask_batch mask_edge mask_head edge_value_batch", ctypes.c_int64),
        *_fields("dropout seed threshold", ctypes.c_int64),
        ("keep_scale", ctypes.c_double),
        *_fields("out out_wide stats record", ctypes.c_void_p),
        ("record_bytes", ctypes.c_int64),
        *_fields("logits weights partial", ctypes.c_void_p),
        *_fields("grad_out grad_weights grad_log_sum node_terms edge_terms", ctypes.c_void_p),
        ("target_pass", ctypes.c_int64),
        *_fields("grad_query grad_key grad_value", ctypes.c_void_p),
        *_fields("grad_vector grad_edge grad_edge_projection grad_bias grad_edge_value", ctypes.c_void_p),
    ]


@cache
def library() -> ctypes.CDLL:
    """The library, loaded.

    Raises:
        NativeLibraryError: If it was not built, or cannot be loaded.
    """
    # The import system knows where a compiled module is, also in an editable install.
    spec = find_spec("gattn.ops.backends.cpu._kernels")
    path = os.environ.get("GATTN_KERNELS") or (None if spec is None else spec.origin)
    if path is None:
        raise NativeLibraryError(
            "they were not built when gattn was installed (that needs a C++17 compiler, GCC or Clang, with OpenMP): "
            "install gattn again where one is available"
        )
    try:
        loaded = ctypes.CDLL(path)  # after PyTorch, whose OpenMP it shares
    except OSError as error:
        hint = _OPENMP_HINT if any(name in str(error) for name in ("libgomp", "libomp")) else ""
        raise NativeLibraryError(f"they could not be loaded: {error}{hint}") from error
    integer, pointer = ctypes.c_int64, ctypes.c_void_p
    functions = {
        "gattn_arguments_bytes": [],
        "gattn_table_room": [integer] * 3,
        "gattn_rows_by_target": [pointer] * 2 + [integer] * 8 + [pointer] * 3,
        "gattn_rows_by_source": [pointer] + [integer] * 3 + [pointer] * 2,
        "gattn_hash_edges": [pointer] * 2 + [integer] * 3,
        "gattn_family": [ctypes.c_char_p],
        "gattn_distribution": [ctypes.c_char_p],
        "gattn_keeps_logits_of": [integer] * 2,
        "gattn_constants": [integer],
        "gattn_tiles_bytes": [],
        "gattn_tile_lanes": [integer],
        "gattn_tiles_forward": [pointer],
        "gattn_tiles_weights": [pointer],
        "gattn_tiles_backward": [pointer],
        "gattn_column_products": [pointer] * 3 + [integer] * 6,
        "gattn_matrix_rows": [pointer] * 3 + [integer] * 2,
        "gattn_pair_roots": [pointer, integer],
        "gattn_pair_roots_backward": [pointer, integer],
        "gattn_radial": [pointer],
        "gattn_radial_backward": [pointer],
        "gattn_drop": [pointer] * 2 + [integer] * 4 + [ctypes.c_double, integer],
        "gattn_use_huge_pages": [pointer, integer],
        "gattn_record_bytes": [integer] * 5,
        "gattn_forward": [pointer],
        "gattn_backward": [pointer],
        "gattn_sum_parts": [pointer] + [integer] * 3 + [pointer, integer],
        "gattn_use_instruction_set": [ctypes.c_char_p],
        "gattn_instruction_set": [],
    }
    missing = [name for name in functions if not hasattr(loaded, name)]
    if missing == list(functions):
        raise NativeLibraryError(f"they could not be loaded: {path} is another library, not gattn's")
    for name in functions.keys() - missing:
        function = getattr(loaded, name)
        function.argtypes, function.restype = functions[name], integer
    sizes = {"gattn_arguments_bytes": Arguments, "gattn_tiles_bytes": Tiles}
    if missing or any(getattr(loaded, name)() != ctypes.sizeof(of) for name, of in sizes.items()):
        raise NativeLibraryError("they were built from another version of the sources: install gattn again")
    for name in ("gattn_drop", "gattn_matrix_rows", "gattn_sum_parts"):
        getattr(loaded, name).restype = None
    loaded.gattn_instruction_set.restype = loaded.gattn_constants.restype = ctypes.c_char_p
    wanted = os.environ.get("GATTN_INSTRUCTION_SET")
    if wanted and not loaded.gattn_use_instruction_set(wanted.encode()):
        raise NativeLibraryError(f"GATTN_INSTRUCTION_SET={wanted} is not available on this machine or in this build")
    if hasattr(os, "register_at_fork"):
        # OpenMP's threads don't survive a fork, and a child would wait for them for ever, in PyTorch's loops too: they
        # are ended before a fork, and started again where they are needed.
        os.register_at_fork(before=lambda: loaded.omp_pause_resource_all(_OMP_PAUSE_HARD))
    return loaded


def readable(tensor: Tensor, strided: bool = False) -> Tensor:
    """The tensor, or a copy if its memory does not hold its numbers, one after another: C reads only what comes out.

    Args:
        tensor: A tensor whose address will be passed. What Python has just allocated to be written needs no check.
        strided: Whether its strides are passed as well. (default: `False`)
    """
    tensor = resolved(tensor)
    return tensor if strided else tensor.contiguous()


def knows_family(name: str) -> bool:
    """Whether the kernels have a score of this family."""
    number: int = library().gattn_family(name.encode())
    return number >= 0


@cache
def distribution(name: str) -> int:
    """The number of a distribution; -1 if the kernels do not know it."""
    number: int = library().gattn_distribution(name.encode())
    return number


@cache
def keeps_logits(family: int, law: str) -> bool:
    """Whether the forward pass keeps logits, or weights, for a distribution and a family (-1: any)."""
    return bool(library().gattn_keeps_logits_of(family, distribution(law)))


@cache
def is_of_rows(name: str) -> bool:
    """Whether a distribution looks at all logits of a row."""
    return distribution(name) >= 0 and keeps_logits(-1, name)


@cache
def family(name: str) -> tuple[int, tuple[str, ...]]:
    """The number of a family of scores, and the names of its constants in the order of `Arguments.constants`.

    Raises:
        ValueError: If the kernels do not know it.
    """
    number = library().gattn_family(name.encode())
    if number < 0:
        raise ValueError(f"the CPU kernels have no score of the family {name!r}.")
    return number, tuple(library().gattn_constants(number).decode().split())


def load_error() -> str | None:
    """Why the library cannot be used; `None` if it can be."""
    try:
        library()
    except NativeLibraryError as error:
        return str(error)
    return None


def raise_for(status: int) -> None:
    """Turns the negative result of a function of the library into an error."""
    if status < 0:
        error = MemoryError if status == -3 else ValueError
        raise error(_errors[status])
