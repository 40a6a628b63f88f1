"""The cache with which attention decodes step by step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Module


class KeyValueCache:
    """Keys and values of the tokens so far, for decoding one token (or a few) at a time.

    One cache serves all layers of a model: each layer stores its own keys and values in it.

    Example:
        >>> import torch, gattn
        >>> attention = gattn.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        >>> x, cache = torch.randn(1, 3, 8), gattn.nn.KeyValueCache()
        >>> steps = [attention(t, t, t, is_causal=True, cache=cache)[0] for t in x.split(1, dim=1)]
        >>> whole = attention(x, x, x, is_causal=True)[0]
        >>> torch.allclose(torch.cat(steps, dim=1), whole, atol=1e-6)
        True
    """

    def __init__(self) -> None:
        self._entries: dict[Module, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        """The number of tokens so far."""
        return max((key.size(-3) for key, _ in self._entries.values()), default=0)

    def length(self, module: Module) -> int:
        """Returns the number of tokens that a layer has received so far.

        Args:
            module: The layer.
        """
        return self._entries[module][0].size(-3) if module in self._entries else 0

    def append(self, module: Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the keys and values of new tokens, and returns all keys and values of the layer.

        Args:
            module: The layer.
            key: The keys of the new tokens, `[..., T, H, C]`.
            value: The values of the new tokens, `[..., T, H, C]`.
        """
        if module in self._entries:
            before = self._entries[module]
            key, value = torch.cat([before[0], key], -3), torch.cat([before[1], value], -3)
        self._entries[module] = key, value
        return key, value

    def keep(self, module: Module, project: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Returns keys and values that never change, such as those of an encoder's output.

        Args:
            module: The layer.
            project: Computes them. It is called the first time only.
        """
        if module not in self._entries:
            self._entries[module] = project()
        return self._entries[module]

    def reorder(self, index: Tensor) -> None:
        """Selects elements of the batch, possibly several times, which beam search does after each step.

        Args:
            index: The elements to keep, `[B']`.
        """
        self._entries = {
            module: (key.index_select(0, index), value.index_select(0, index))
            for module, (key, value) in self._entries.items()
        }
