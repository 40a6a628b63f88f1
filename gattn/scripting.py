"""Why TorchScript, which supports only an old subset of Python, cannot compile gattn's modules."""

from __future__ import annotations

__all__ = ["NotScriptable"]


class NotScriptable:
    """A module that refuses `torch.jit.script` with an explanation, alone or inside another module."""

    def __prepare_scriptable__(self) -> None:
        raise NotImplementedError(
            f"TorchScript cannot compile {type(self).__name__}, and PyTorch has deprecated it: use torch.compile, or "
            "torch.export for a program without Python (torch.jit.trace also works)."
        )
