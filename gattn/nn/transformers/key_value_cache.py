"""The cache with which attention decodes step by step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from gattn.errors import check_at_least
from gattn.torch_private import is_traced, is_transformed

__all__ = ["KeyValueCache"]


class _Entry(NamedTuple):
    """What is kept for a layer."""

    key: Tensor
    value: Tensor
    forgotten: int = 0
    """The number of earlier tokens that are no longer kept."""


class KeyValueCache:
    r"""Keys and values of the tokens so far, for decoding one token (or a few) at a time.

    .. math::
        K_t = [K_{t-1}; k_t], \qquad V_t = [V_{t-1}; v_t]

    A new token attends to all of them, so earlier tokens need not be computed again (`Fast Transformer Decoding
    <https://arxiv.org/abs/1911.02150>`_). One cache serves all layers of a model: each layer stores its own keys and
    values in it, `[..., T, H, C]`.

    With a `window`, a layer keeps only the tokens that a new one sees, so the memory and time of a step do not grow
    with the length of the text. `MultiheadAttention` then hides what is further back, as `CompleteGraph(N, causal=True,
    window=(window, 0))` does. If it is given a `graph` or masks, they are those of the tokens that are kept.

    Args:
        window: The number of earlier tokens to which each token attends besides itself. (default: `None`, all)

    Raises:
        TypeError: If the window is not an integer.
        ValueError: If the window is negative.
        RuntimeError: If the keys or values of new tokens do not fit the earlier ones (in `append`).

    Example:
        >>> import torch, gattn
        >>> attention = gattn.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        >>> x, cache = torch.randn(1, 3, 8), gattn.nn.KeyValueCache()
        >>> steps = [attention(t, t, t, is_causal=True, cache=cache)[0] for t in x.split(1, dim=1)]
        >>> whole = attention(x, x, x, is_causal=True)[0]
        >>> torch.allclose(torch.cat(steps, dim=1), whole, atol=1e-6)
        True
    """

    def __init__(self, window: int | None = None) -> None:
        if window is not None:
            check_at_least(0, window=window)
        self.window = window
        self._entries: dict[Module, _Entry] = {}
        #: The memory of entries made by `append`, which has room for more tokens.
        self._memory: dict[Module, tuple[Tensor, Tensor]] = {}

    def __copy__(self) -> KeyValueCache:
        """A cache of the same tokens, to which others can be appended."""
        copied = type(self)(self.window)
        copied._entries = dict(self._entries)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> KeyValueCache:
        """A cache with copies of the keys and values, of the same layers, or of copies that were made with it."""
        copied = type(self)(self.window)
        for module, entry in self._entries.items():
            copied._entries[memo.get(id(module), module)] = copy.deepcopy(entry, memo)
        return copied

    def __len__(self) -> int:
        """The number of tokens so far."""
        return max(map(self.length, self._entries), default=0)

    def length(self, module: Module) -> int:
        """Returns the number of tokens that a layer has received so far.

        Args:
            module: The layer.
        """
        if module not in self._entries:
            return 0
        entry = self._entries[module]
        return entry.key.size(-3) + entry.forgotten

    def num_visible(self, module: Module) -> int:
        """Returns the number of earlier tokens of a layer to which new ones may attend, at most the window.

        Args:
            module: The layer.
        """
        length = self.length(module)
        return length if self.window is None else min(length, self.window)

    def append(self, module: Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the keys and values of new tokens, and returns those of the earlier tokens that they may see and theirs.

        Under `torch.no_grad`, they are written into memory with room for half as many tokens again, so that most steps
        copy only the new tokens.

        Args:
            module: The layer.
            key: The keys of the new tokens, `[..., T, H, C]`.
            value: The values of the new tokens, `[..., T, H, C]`.

        Raises:
            RuntimeError: If they differ from the earlier ones in another dimension than T.
        """
        forgotten = 0
        if module in self._entries:
            visible = self.num_visible(module)
            forgotten = self.length(module) - visible
            before = [x.narrow(-3, x.size(-3) - visible, visible) for x in self._entries[module][:2]]
            if not _can_write(*before, key, value):
                self._memory.pop(module, None)
                key, value = (torch.cat(pair, -3) for pair in zip(before, (key, value), strict=True))
            else:
                memory = self._memory.get(module, (None, None))
                pairs = zip(before, (key, value), memory, strict=True)
                (key, keys), (value, values) = (_written(*pair) for pair in pairs)
                self._memory[module] = keys, values
        self._entries[module] = _Entry(key, value, forgotten)
        return key, value

    def keep(self, module: Module, project: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Returns keys and values that never change, such as those of an encoder's output.

        Args:
            module: The layer.
            project: Computes them. It is called only the first time.
        """
        if module not in self._entries:
            self._entries[module] = _Entry(*project())
        return self._entries[module][:2]

    def reorder(self, index: Tensor) -> None:
        """Selects elements of the batch, possibly several times, which beam search does after each step.

        Args:
            index: The elements to keep, `[B']`.
        """
        self._memory.clear()
        self._entries = {
            module: _Entry(key.index_select(0, index), value.index_select(0, index), forgotten)
            for module, (key, value, forgotten) in self._entries.items()
        }


def _can_write(*tensors: Tensor) -> bool:
    """Whether tensors may be written into memory in place, which gradients, transforms and traced code forbid."""
    return (
        not torch.is_grad_enabled()  # the backward pass of an earlier step may need that memory
        and not is_traced()
        and not is_transformed()
        and len({(x.dtype, x.device, x.is_inference()) for x in tensors}) == 1
        and torch.is_inference_mode_enabled() == tensors[0].is_inference()
    )


def _written(before: Tensor, new: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor]:
    """`torch.cat([before, new], -3)` and its memory, which is `memory`, where `before` lies, if it has room.

    Raises:
        RuntimeError: If they differ in another dimension.
    """
    start, length = 0, before.size(-3)
    if memory is not None and memory.numel():
        start = (before.storage_offset() - memory.storage_offset()) // memory.stride(-3)
    total = length + new.size(-3)
    if memory is None or memory.size(-3) < start + total:
        start = 0
        memory = before.new_empty(*before.shape[:-3], total + total // 2 + 1, *before.shape[-2:])
        memory.narrow(-3, 0, length).copy_(before)
    if new.shape[:-3] != memory.shape[:-3] or new.shape[-2:] != memory.shape[-2:]:  # copy_ would broadcast
        raise RuntimeError(f"keys and values {list(new.shape)} cannot follow {list(before.shape)}.")
    memory.narrow(-3, start + length, new.size(-3)).copy_(new)
    return memory.narrow(-3, start, total), memory
