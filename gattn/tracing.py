"""How gattn's modules appear to tools that turn a model into a program: as one step, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import Proxy

from gattn.torch_private import is_fx_symbolic_tracing

__all__ = ["Leaf"]


class Leaf:
    """A module that is one step of a program that `torch.fx` records, as the layers of `torch.nn` are.

    `torch.jit.script`, which supports only an old subset of Python, is refused with an explanation, whether it is given
    this module or one that contains it.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, or records its call."""
        if is_fx_symbolic_tracing():
            for proxy in _proxies(args, kwargs):
                tracer: Any = proxy.tracer
                return tracer.create_proxy("call_module", tracer.path_of_module(self), args, kwargs)
        return super().__call__(*args, **kwargs)  # type: ignore[misc] # of torch.nn.Module

    def __prepare_scriptable__(self) -> None:
        raise NotImplementedError(
            f"TorchScript cannot compile {type(self).__name__}, and PyTorch has deprecated it: use torch.compile, or "
            "torch.export for a program without Python (torch.jit.trace also works)."
        )


def _proxies(*values: Any) -> Iterator[Proxy]:
    """The placeholders of `torch.fx` among arguments, nested in any way."""
    for value in values:
        if isinstance(value, Proxy):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _proxies(*value)
        elif isinstance(value, dict):
            yield from _proxies(*value.values())
