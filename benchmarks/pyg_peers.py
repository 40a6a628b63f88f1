"""The ways in which PyG's layers are measured, and the columns that compare others with them.

`pyg` alone is eager. With `scatter`, PyG uses `torch-scatter`; with `compile`, layers go through `torch.compile`, and
with `replayed` as well through CUDA graphs (`mode="reduce-overhead"`); with `sorted`, the edges are in the order of
their targets. In eager mode they come as an `EdgeIndex`, for which PyG has code of its own; compiled layers are no
faster with it, and without gradients it does not compile.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch_geometric.typing
from torch import Tensor
from torch_geometric import EdgeIndex

from benchmarks.framework.measuring import MODES, Computation
from benchmarks.framework.reports import Line, factor, median, quartiles
from benchmarks.framework.results import ALLOCATORS, Row

PYG = ("pyg", "pyg-scatter", "pyg-compile", "pyg-sorted", "pyg-sorted-scatter", "pyg-sorted-compile")
PYG_REPLAYED = "pyg-compile-replayed"
USUAL = {"default": ("pyg", "pyg-compile"), "kept": PYG}
"""Those that are measured unless they are named: all of them where the claim is made."""

SHORT = {
    "forward + backward": "fwd+bwd",
    "memory kept": "kept",
    "default allocator": "default",
    "PyG compiled": "compiled",
    "PyG eager": "eager",
    "PyG's best": "best",
}
"""What headings in a terminal, which would be too wide, have in place of words."""

SIDES = {"kept": "memory kept", "default": "default allocator"}
"""The allocators in the order of the tables, which begin with the claim, and their names there."""


# How they are measured -----------------------------------------------------------------------------------------------


def prepare(peer: str) -> None:
    """Makes PyG use `torch-scatter`, if it is installed, for the peers of that name only."""
    torch_geometric.typing.WITH_TORCH_SCATTER = "scatter" in peer


def is_installed(peer: str) -> bool:
    """Whether the packages that a peer needs are there."""
    return "scatter" not in peer or importlib.util.find_spec("torch_scatter") is not None


def by_target(edge_index: Tensor, *others: Tensor | None) -> list[Any]:
    """Edges in the order of their targets, and what belongs to them in the same order."""
    order = edge_index[1].argsort(stable=True)
    return [edge_index[:, order].contiguous(), *(None if x is None else x[order] for x in others)]


def wrap(peer: str, num_sources: int, num_targets: int) -> Callable[[Tensor], Tensor]:
    """Gives edges the form that a peer gets; those of `sorted` are in order already."""
    if "sorted" not in peer or "compile" in peer:
        return lambda edge_index: edge_index
    return lambda edge_index: EdgeIndex(edge_index, sparse_size=(num_sources, num_targets), sort_order="col")


def compiled(peer: str, function: Any) -> Any:
    """The function, compiled if the peer is a compiled one."""
    mode = "reduce-overhead" if "replayed" in peer else None
    return torch.compile(function, dynamic=False, mode=mode) if "compile" in peer else function


def settle(computation: Computation) -> None:
    """Calls what is compiled until nothing is compiled any more."""
    from torch._dynamo.utils import counters

    before = -1
    while before < (before := counters["stats"]["unique_graphs"]):
        computation.forward()
        computation.forward_backward()


# Columns -------------------------------------------------------------------------------------------------------------


def remarks(rows: Mapping[Any, Row]) -> list[str]:
    """What the columns mean, and why times are missing."""
    kept = ", ".join(f"{name}={value}" for name, value in ALLOCATORS["kept"].items())
    return [
        *(f"{case}: {row['outcome']}: {row['reason']}" for case, row in rows.items() if row["outcome"] != "ok"),
        "Times are medians with quartiles. × says how many times as fast as PyG under the same allocator. The first of "
        "these columns is the claim. PyG's best is the fastest of its rows. Gathers are times in units of one "
        "embedding_bag over the same edges.",
        *[f"With memory kept, glibc keeps freed memory instead of returning it to the system ({kept})."]
        * any(case.allocator == "kept" for case in rows),
    ]


def sides(cases: Mapping[Any, Row]) -> list[str]:
    """The allocators of some cases, in the order of the tables."""
    return [name for name in SIDES if any(case.allocator == name for case in cases)]


def headings(lines: Sequence[Line]) -> dict[str, str]:
    """The columns that a terminal shows, except empty ones, and their headings there."""
    shown = {column: column for column in lines[0] if any(line[column] != "–" for line in lines)}
    for words, short in SHORT.items():
        shown = {column: heading.replace(words, short) for column, heading in shown.items()}
    return shown


def compared(rows: Mapping[Any, Row], case: Any, mode: str, gather: Callable[[Any], Row | None]) -> Line:
    """How many times as fast as PyG a case is, its time, and that in gathers, under each allocator.

    Args:
        rows: All rows, by cases that have a `peer` and an `allocator`.
        case: The case, under any allocator.
        mode: What is timed.
        gather: The yardstick of a case.
    """
    ratios, times = Line(), Line()
    for allocator in sides(rows):
        own = replace(case, allocator=allocator)
        row = rows.get(own, {"outcome": "–"})
        found = {peer: rows.get(replace(own, peer=peer)) for peer in (*PYG, PYG_REPLAYED)}
        known = {time: other for other in found.values() if other and (time := median(other, mode))}
        for name, other in {
            "PyG compiled": found["pyg-compile"],
            "PyG eager": found["pyg"],
            "PyG's best": known[min(known)] if known else None,
        }.items():
            ratios[f"× {name}, {SIDES[allocator]}"] = factor(other, row, mode)
        times[f"{MODES[mode]}, ms, {SIDES[allocator]}"] = quartiles(row, mode)
        times[f"gathers, {SIDES[allocator]}"] = factor(row, gather(own), mode, own_mode="forward", unit="")
    return ratios | times
