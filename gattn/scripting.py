"""Why TorchScript's compiler, which reads Python of long ago, cannot have gattn's modules."""

from __future__ import annotations


class NotScriptable:
    """A module that says so when `torch.jit.script` comes to it, alone or inside another one."""

    def __prepare_scriptable__(self) -> None:
        raise NotImplementedError(
            f"TorchScript cannot compile {type(self).__name__}, and PyTorch has deprecated it: use torch.compile, or "
            "torch.export for a program without Python (torch.jit.trace works, too)."
        )
