"""Launches the Triton kernels for tiles of pairs: what `tiles.py` calls for tensors on a GPU."""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from gattn.ops.backends.dense.tile_rules import DIMS, FAR, Element, Inputs, Rule
from gattn.ops.backends.triton import forms as launcher
from gattn.ops.call import compute_dtype
from gattn.torch_private import resolved

__all__ = ["GPUCall"]

_WARPS, _WIDE = 4, 128
"""The number of warps of a program, twice as many for rows of so many channels."""

_HELD = 8192
"""The bytes of the rows of a tile."""


class GPUCall:
    """A call of the kernels; see `gattn.ops.backends.dense.cpu_tiles.CPUCall`."""

    def __init__(self, inputs: Inputs, rule: Rule, grad_bias: Tensor | None = None):
        #: Whether tensors come without a batch.
        self.is_one = inputs.query.dim() < DIMS
        query, key, value = (resolved(x.unsqueeze(0) if self.is_one else x) for x in inputs[:3])
        inputs = inputs._replace(query=query, key=key, value=value)
        bias, sink, mask, of_pairs, starts, seed = (None if x is None else resolved(x) for x in inputs[3:])
        self.inputs, self.rule, self.device, self.grad_bias = inputs, rule, value.device, grad_bias
        self.heads, self.channels, self.value_channels = query.size(2), query.size(3), value.size(3)
        self.compute = compute_dtype(value.dtype)
        #: The targets and sources of a tile forward: as many as registers hold, of which backward needs twice.
        widest = _block(max(self.channels, self.value_channels))
        self.nodes = max(16, min(64, _HELD // (widest * value.itemsize)))
        rows = {"of_pairs": of_pairs, "starts": starts, "sink": sink}
        law, constants = rule.law.name, (*rule.law.constants, 0.0, 0.0)
        is_softmax = law == "softmax"
        self.arguments: dict[str, Any] = {
            "query": query,
            "key": key,
            "value": value,
            "bias": bias,
            "mask": None if mask is None else mask.view(torch.uint8),
            **{name: None if x is None else x.contiguous() for name, x in rows.items()},
            "seed": seed,
            "elements": _elements(rule.elements, self.device),
            "num_targets": query.size(1),
            "num_sources": key.size(1),
            "bias_count": 0 if bias is None else bias.size(0),
            "first_distance": rule.first,
            "left": _reach(rule.left),
            "right": _reach(rule.right),
            "threshold": int(rule.dropout * 2**32),
            "query_strides": query.stride(),
            "key_strides": key.stride(),
            "value_strides": value.stride(),
            "bias_strides": (0, 0, 0, 0) if bias is None else self.strides_of_bias(bias),
            "mask_strides": (0, 0, 0, 0) if mask is None else _steps(mask),
            "KEEP_SCALE": (0.0 if rule.dropout == 1.0 else 1 / (1 - rule.dropout)) if seed is not None else 1.0,
            "SCALE": float(rule.scale),
            "SLOPE": float(rule.slope),
            "CLAMP": float(rule.clamp) if math.isfinite(rule.clamp) else -1.0,
            "SOFTCAP": float(constants[0]) if is_softmax else 0.0,
            "LAW": _kernels().LAWS[law],
            "NORMALIZED": bool(constants[0]) and not is_softmax,
            "EPSILON": float(constants[1]),
            "BIAS": rule.bias,
            "DROPPED": rule.weights == "dropped" and seed is not None,
            "HEADS": self.heads,
            "GROUP": self.heads // key.size(2),
            "CHANNELS": self.channels,
            "VALUE_CHANNELS": self.value_channels,
            "BLOCK_C": _block(self.channels),
            "BLOCK_V": _block(self.value_channels),
            **_types(value.dtype, torch.backends.cuda.matmul.allow_tf32),
        }

    def strides_of_bias(self, bias: Tensor) -> tuple[int, ...]:
        """Those of all pairs' numbers, or of a term's and of heads."""
        if self.rule.bias == "all":
            return _steps(bias)
        return bias.stride(0), 0 if bias.size(1) == 1 else bias.stride(1), 0, 0

    def run(self, name: str, by_source: bool = False, **more: Any) -> None:
        """Runs a kernel for all tasks and heads, with more arguments."""
        nodes = max(16, self.nodes // 2) if "grad_out" in more else self.nodes
        tasks = _tasks(self.rule.elements, nodes, by_source, self.device)
        heads = self.inputs.key.size(2) if by_source else self.heads
        kernel = getattr(_kernels(), name)
        given = {**self.arguments, **more, "tasks": tasks, "BLOCK_T": nodes, "BLOCK_S": nodes}
        with torch.cuda.device_of(self.inputs.value):
            if len(tasks):
                warps = _WARPS << (max(given["BLOCK_C"], given["BLOCK_V"]) >= _WIDE)
                launcher.run(kernel, (len(tasks), heads), warps, {name: given[name] for name in kernel.arg_names})

    def forward(self, out: Tensor, wide: Tensor | None, stats: Tensor) -> None:
        """Computes the output, the same before it is rounded, and the statistics of each row."""
        stored = out if wide is None else wide
        if launcher.stored(stored.dtype) != stored.dtype:
            stored = torch.zeros_like(out, dtype=self.compute)
        self.run("tiles_forward", out=stored, stats=stats)
        if stored is not out:
            out.copy_(stored)

    def weights(self, weights: Tensor, stats: Tensor) -> None:
        """Computes the weights."""
        self.run("tiles_weights", weights=weights, stats=stats)

    def backward(
        self, grad: Tensor, delta: Tensor, stats: Tensor, grad_weights: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None]:
        """The gradients of query, key and value, and that of the bias."""
        of_query, of_key, of_value = (
            torch.zeros(x.shape, dtype=self.compute, device=x.device) for x in self.inputs[:3]
        )
        grad_bias = sums = self.grad_bias
        of_all = self.rule.bias == "all"
        terms = [element.term for element in self.rule.elements]
        is_shared, sizes = not of_all, torch.Size((1,) * 4)
        if grad_bias is not None and of_all:
            sizes = grad_bias.shape
            # Where a size is 1, the only pair there shares with none.
            is_shared = sizes[1] == 1 or sizes[0] == 1 or len(set(terms)) < len(terms) or 1 in sizes[2:]
        if grad_bias is not None and is_shared:
            sums = grad_bias.to(torch.float64)
        given: dict[str, Any] = {"stats": stats, "delta": delta, "grad_out": grad, "grad_weights": grad_weights}
        given["grad_strides"] = (grad.unsqueeze(0) if self.is_one else grad).stride()
        self.run(
            "tiles_by_target",
            grad_query=of_query,
            grad_bias=sums,
            grad_bias_strides=(0, 0, 0, 0) if sums is None else self.strides_of_bias(sums),
            IS_SHARED=is_shared,
            SUMS_ROWS=sizes[2] == 1 and is_shared,
            SUMS_COLUMNS=sizes[3] == 1 and is_shared,
            **given,
        )
        self.run("tiles_by_source", by_source=True, grad_key=of_key, grad_value=of_value, **given)
        if grad_bias is not None and sums is not None:
            grad_bias = sums.to(grad_bias.dtype)
        grads = [x.squeeze(0) if self.is_one else x for x in (of_query, of_key, of_value)]
        return grads, grad_bias


def _reach(side: int | None) -> int:
    """How far a target sees: far enough if nothing bounds it."""
    return FAR if side is None else max(-FAR, min(side, FAR))


def _steps(x: Tensor) -> tuple[int, ...]:
    """Strides of `[B, H, N, M]`, of which some dimensions are broadcast."""
    return tuple(0 if size == 1 else step for size, step in zip(x.shape, x.stride(), strict=True))


def _block(channels: int) -> int:
    """The channels of a tile: a power of two, as large as tensor cores need."""
    return max(16, launcher.power_of_two(channels))


@lru_cache(maxsize=64)
def _elements(elements: tuple[Element, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(elements, dtype=torch.int64, device=device).view(-1, 12)


@lru_cache(maxsize=64)
def _tasks(elements: tuple[Element, ...], nodes: int, by_source: bool, device: torch.device) -> Tensor:
    """The element and the first node of each program."""
    counts = (element.num_sources if by_source else element.num_targets for element in elements)
    tasks = [(place, start) for place, count in enumerate(counts) for start in range(0, count, nodes)]
    with torch.inference_mode(False):
        return torch.tensor(tasks, dtype=torch.int64, device=device).view(-1, 2)


@cache
def _types(dtype: torch.dtype, allows_tf32: bool) -> dict[str, Any]:
    """The types that kernels compute in, load, and multiply weights in, and how exact products are."""
    import triton.language as tl

    compute = tl.float64 if dtype == torch.float64 else tl.float32
    loaded = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(dtype, compute)
    if launcher.INTERPRETED:  # which cannot multiply bfloat16
        loaded = compute
    # Weights that nothing bounds would leave float16.
    operand = loaded if dtype == torch.bfloat16 else compute
    precision = "tf32" if allows_tf32 or dtype.itemsize == 2 else "ieee"
    return {"COMPUTE": compute, "LOADED": loaded, "OPERAND": operand, "PRECISION": precision}


@cache
def _kernels() -> Any:
    from gattn.ops.backends.dense import triton_tiles

    return triton_tiles
