"""Numbers and text, compact and harmless inside an HTML page."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["json_in_html", "packed", "packed_indices", "quantised"]

_STEPS = 65535  # of 16 bits: errors below 0.000008 for weights up to 1


def packed(numbers: Any, dtype: str) -> str:
    """Encodes numbers as base64 of little-endian `dtype`, such as `"u2"`."""
    return base64.b64encode(np.ascontiguousarray(numbers, f"<{dtype}").tobytes()).decode()


def packed_indices(indices: Any) -> dict[str, str]:
    """Encodes indices, in 16 bits if they fit."""
    array: NDArray[Any] = np.asarray(indices)
    dtype = "u2" if array.size == 0 or int(array.max()) <= _STEPS else "u4"
    return {"type": dtype, "base64": packed(array, dtype)}


def quantised(weights: Tensor) -> dict[str, Any]:
    """Encodes weights `[E, H]` as whole steps between zero and the largest one, head by head."""
    largest = float(weights.max()) if weights.numel() else 0.0
    step = largest / _STEPS or 1.0
    return {"step": step, "base64": packed((weights / step).round().t().numpy(), "u2")}


def json_in_html(value: Any) -> str:
    """Returns JSON that a `<script>` element can hold: no text in it can end the element, or begin a comment."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
