"""How gattn's modules appear to tools that turn a model into a program: as one step, or not at all."""

from __future__ import annotations

from typing import Any

from torch.fx import Tracer
from torch.nn import Module

__all__ = ["Leaf"]


class Leaf:
    """A module that is one step of a program that `torch.fx` records, as the layers of `torch.nn` are.

    `torch.jit.script`, which supports only an old subset of Python, is refused with an explanation, whether it is given
    this module or one that contains it.
    """

    def __prepare_scriptable__(self) -> None:
        raise NotImplementedError(
            f"TorchScript cannot compile {type(self).__name__}, and PyTorch has deprecated it: use torch.compile, or "
            "torch.export for a program without Python (torch.jit.trace also works)."
        )


_is_leaf_module = Tracer.is_leaf_module


def _is_leaf(self: Any, m: Module, module_qualified_name: str) -> bool:
    return isinstance(m, Leaf) or _is_leaf_module(self, m, module_qualified_name)


# The tracer knows leaves by the package that they come from, which must be torch.nn, and cannot be told of others.
Tracer.is_leaf_module = _is_leaf  # type: ignore[method-assign]
