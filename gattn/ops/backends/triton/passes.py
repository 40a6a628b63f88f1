"""The kernels of one forward or backward pass, in their order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gattn.ops.backends.triton.forms import (
    PER_EDGE,
    WIDTH,
    form_on_graph,
    jitted,
    power_of_two,
    stored,
    tensors_of,
    unaligned,
)
from gattn.ops.backends.triton.layout import Rows
from gattn.ops.terms import Inputs

__all__ = ["Pass"]

_MOST_PROGRAMS = 4096
"""The largest number of parts of a sum over all edges: more than a GPU can run at once."""

_ROW_HEADS = 16
"""The largest number of heads of a program that goes through whole rows."""

_COMBINING_WARPS = 4
"""The number of warps of a program that adds partial sums."""

_DELTA_WIDTH, _DELTA_WARPS = 1024, 4
"""The number of elements and of warps of a program that multiplies outputs and their gradients."""


class Pass:
    """What forward and backward pass of a call share: its tensors, memory for results, and launches."""

    def __init__(self, inputs: Inputs):
        self.at, self.layout = at, _ = form_on_graph(inputs)
        self.form, self.batch = at.form, at.batch
        self.given = tensors_of(inputs)
        self.given["num_edges"] = at.num_edges
        #: Those for which other code is compiled.
        self.unaligned = unaligned(self.given)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Uninitialised memory."""
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
        changes: dict[str, Any] = {"BLOCK_E": WIDTH // heads, "BLOCK_H": heads, "num_warps": 1}
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
        if jitted().LAWS[law] is None:
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
        if name in PER_EDGE:
            grad = grad.view(*self.at.front, *of.shape[-PER_EDGE[name] :]).sum_to_size(of.shape)
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
        launch = form.launch(("dot_rows", grad_out.dtype, out.dtype, unaligned(given)), changes)
        given |= launch.taken
        launch((-(-delta.numel() // block_r), 1), [given[name] for name in launch.names])
        return delta
