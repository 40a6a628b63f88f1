"""Whether features have the type of a layer's parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from gattn.errors import InputError
from gattn.torch_private import has_hooks, is_wrapper

__all__ = ["check_dtype"]


def check_dtype(layer: Module, **features: Tensor | None) -> None:
    """Raises `ValueError` if features cannot be multiplied by a layer's weights, because they are of another type.

    Args:
        layer: The layer. Where something in it may cast its input, nothing is raised.
        **features: By name, what the layer multiplies by weights as it is.
    """
    weight = _first_parameter(layer)
    if weight is None:
        return
    dtype = weight.dtype
    for name, x in features.items():
        if x is None or x.dtype == dtype:
            continue
        if torch.compiler.is_compiling() or not _is_as_made(layer, dtype):  # the compiler's own error says where
            continue
        if x.layout != torch.strided and weight.dtype in (torch.float16, torch.bfloat16):  # Linear casts both
            continue
        try:  # PyTorch knows best: autocast and some devices mix types
            F.linear(*(torch.empty(0, 1, dtype=tensor.dtype, device=x.device) for tensor in (x, weight)))
        except RuntimeError as error:
            given, own = (str(dtype).removeprefix("torch.") for dtype in (x.dtype, weight.dtype))
            or_layer = f", or the layer with layer.{_CASTS[x.dtype]}" if x.dtype in _CASTS else ""
            raise InputError(
                f"{name} is {given}, but the parameters of {type(layer).__name__} are {own}: convert the features with "
                f".{_CASTS.get(weight.dtype, f'to({weight.dtype})')}{or_layer}."
            ) from error


_CASTS = {torch.float32: "float()", torch.float64: "double()", torch.float16: "half()", torch.bfloat16: "bfloat16()"}
#: The modules of these packages do not cast their input.
_PACKAGES = ("gattn.", "torch.nn.modules.", "torch_geometric.nn.")


def _first_parameter(module: Module) -> Tensor | None:
    """What `next(module.parameters())` gives, several times as fast."""
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter
    for child in module._modules.values():
        if child is not None and (found := _first_parameter(child)) is not None:
            return found
    return None


def _is_as_made(layer: Module, dtype: torch.dtype) -> bool:
    """Whether a layer with weights has only parameters of this type, and nothing is wrapped, replaced or hooked."""
    has_weights = False
    for module in layer.modules():
        if not type(module).__module__.startswith(_PACKAGES) or "forward" in module.__dict__:
            return False
        parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
        if any(p.dtype != dtype or (is_wrapper(p) and not is_lazy(p)) for p in parameters):
            return False
        if module is not layer and has_hooks(module) and not any(map(is_lazy, module.parameters())):  # hooks make those
            return False
        has_weights |= any(is_lazy(parameter) or parameter.dim() > 1 for parameter in parameters)
    return has_weights
