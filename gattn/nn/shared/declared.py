"""What layers declare instead of writing it out: how their parameters start, and what `repr` shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch.nn import Module, Parameter
from torch_geometric.nn.inits import reset

from gattn.tracing import Leaf

__all__ = ["Declared"]


class Declared(Leaf):
    """A layer that declares how its parameters start, and what `repr` shows."""

    _modules: dict[str, Module | None]

    #: How parameters start, in this order, and modules among them, whose turn is not first.
    _starts: ClassVar[tuple[tuple[str, Callable[[Any], Any]], ...]] = ()
    #: The attributes that `repr` shows, with a "=" after those that it names; `None`: what it shows of any module.
    _shown: ClassVar[str | None] = None

    def reset_parameters(self) -> None:
        """Resets all parameters."""
        starts = dict(self._starts)
        for name, module in self._modules.items():  # a module with two names twice, as PyG does
            if name not in starts:
                reset(module)
        for name, start in starts.items():
            value = getattr(self, name, None)
            if isinstance(value, (Parameter, Module)):
                start(value)

    def __repr__(self) -> str:
        if self._shown is None:
            return super().__repr__()
        shown = (f"{name * name.endswith('=')}{getattr(self, name.rstrip('='))}" for name in self._shown.split())
        return f"{type(self).__name__}({', '.join(shown)})"
