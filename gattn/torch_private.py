"""The private parts of PyTorch that gattn uses, each with the reason; no other file uses private parts.

A new version of PyTorch may change any of them; the tests of the code that uses them would show it.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.fx.experimental.symbolic_shapes import guard_or_true, statically_known_true
from torch.nn.modules import module as modules
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import has_torch_function
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, is_traceable_wrapper_subclass
from torch.utils.flop_counter import _FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

__all__ = [
    "NonDynamicallyQuantizableLinear",
    "apply_of",
    "assert_later",
    "autograd_below",
    "backward_pass",
    "dispatch_keys",
    "flash_attention_on_cpu",
    "flash_attention_on_cpu_backward",
    "graph_breaks",
    "guard_or_true",
    "has_hooks",
    "is_batched",
    "is_compiled",
    "is_context_parallel",
    "is_counted",
    "is_exporting",
    "is_functorch_tensor",
    "is_fx_symbolic_tracing",
    "is_intercepted",
    "is_lazy",
    "is_readable",
    "is_traced",
    "is_transformed",
    "is_usual",
    "is_wrapper",
    "load_allowing",
    "needs_dispatcher",
    "no_hook",
    "num_modes",
    "resolved",
    "scaled_dot_product_choice",
    "statically_known_true",
    "stream_address",
    "uses_forward_mode",
    "uses_jit_trace",
]

#: PyTorch's fused attention on the CPU, called directly because its public function has no second derivative.
flash_attention_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_attention_on_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

#: Which kernel `scaled_dot_product_attention` would choose: there is no public way to ask for the CPU.
scaled_dot_product_choice = torch._fused_sdp_choice

#: Checks a condition when the device gets to it, without waiting for it.
assert_later = torch._assert_async


#: What PyTorch's dispatcher looks at in a tensor, in one call: its kind of device and layout, and whether it is lazy, a
#: wrapper, made in inference mode, or of a subclass that wants to see every operator.
dispatch_keys = torch._C._dispatch_keys


#: How many modes see every operator; there is no public way to ask.
num_modes = torch._C._len_torch_dispatch_stack


def no_hook(module: torch.nn.Module, inputs: Any) -> None:
    """Does nothing, but exists: PyTorch's encoder layer replaces layers without hooks by a kernel of its own."""


def graph_breaks(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
    """Why `torch.compile` would make several graphs of a call, a line for each break."""
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tensors that it looks at after a break
        found = torch._dynamo.explain(function)(*args, **kwargs)
    torch.compiler.reset()
    reasons = [" ".join(str(reason.reason).split())[:200] for reason in found.break_reasons]
    return reasons or ["unknown"] * found.graph_break_count


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether a hook of any kind sees or changes a module's inputs, outputs or gradients; there is no public way."""
    for hook in module._forward_pre_hooks.values():
        if hook is not no_hook:
            return True
    own = module._forward_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(own) or (_has_any_global_hook() and not _only_tracks())


def _only_tracks() -> bool:
    """Whether the hooks on all modules are those of PyTorch's trackers, which look at no numbers, as counters need."""
    tables = (
        modules._global_forward_hooks,
        modules._global_forward_pre_hooks,
        modules._global_backward_hooks,
        modules._global_backward_pre_hooks,
    )
    hooks = [hook for table in tables for hook in table.values()]
    return all(isinstance(getattr(hook, "__self__", None), ModuleTracker) for hook in hooks)


def is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor is of a class that holds other tensors or does something else with them than tensors do.

    The exporter's stand-ins for parameters, which have shapes only, do not.
    """
    if isinstance(tensor, FakeTensor):
        return False
    return is_traceable_wrapper_subclass(tensor) or has_torch_function((tensor,))


def uses_jit_trace() -> bool:
    """Whether `torch.jit.trace` is recording: it warns about every Python branch, and there is no public flag."""
    return torch._C._get_tracing_state() is not None


def is_traced() -> bool:
    """Whether tensors are placeholders from which a program is made (compiled, traced) that runs without this code."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    return torch._C._get_tracing_state() is not None


def is_intercepted() -> bool:
    """Whether tensors are those of `is_traced` or `is_transformed`, by one call."""
    is_traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    if is_traced or torch._C._get_tracing_state() is not None:
        return True
    depth: int = torch._C._functorch.get_dynamic_layer_stack_depth()
    return depth > 0


def is_usual() -> bool:
    """Whether PyTorch calls operators for numbers, one by one, and nothing but autograd looks on: asked once per call.

    If not, there is a compiler, tracer, mode, transform, profiler, forward mode, or a split of sequences.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    is_looked_at = torch._C._get_tracing_state() is not None or torch.autograd._profiler_enabled()
    if is_looked_at or torch._C._functorch.get_dynamic_layer_stack_depth() > 0:
        return False
    return torch.autograd.forward_ad._current_level < 0 and not (_CONTEXT in sys.modules and is_context_parallel())


def is_exporting() -> bool:
    """Whether a program is being exported: in PyTorch 2.11, compiled code takes the public function for true."""
    return torch.compiler._is_exporting_flag


@torch.compiler.assume_constant_result  # PyTorch 2.11 cannot compile the call; elsewhere inputs have other types
def is_transformed() -> bool:
    """Whether this code runs inside a transform of `torch.func`, whose tensors must not outlive it."""
    depth: int = torch._C._functorch.get_dynamic_layer_stack_depth()
    return depth > 0


def is_functorch_tensor(tensor: Tensor) -> bool:
    """Whether a tensor represents a batch or a gradient level of `torch.func`, so its numbers cannot be read."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_counted() -> bool:
    """Whether operators are counted by PyTorch's `FlopCounterMode`, and no other mode or compiler looks on."""
    if torch.compiler.is_compiling():
        return False
    modes = _get_current_dispatch_mode_stack()
    return len(modes) > 0 and all(isinstance(mode, _FlopCounterMode) for mode in modes)


def is_readable(tensor: Tensor) -> bool:
    """Whether a tensor has numbers on which decisions may depend."""
    if torch.compiler.is_compiling() or (torch._C._len_torch_dispatch_stack() > 0 and not is_counted()):
        return False
    if torch._C._get_tracing_state() is not None:
        return False
    return not (torch._C._functorch.is_functorch_wrapped_tensor(tensor) or tensor.device.type == "meta")


def is_batched(tensor: Tensor) -> bool:
    """Whether a tensor represents a batch of tensors, as gradients do under `is_grads_batched=True`."""
    return torch._C._functorch.is_batchedtensor(tensor) or torch._C._functorch.is_legacy_batchedtensor(tensor)


def is_lazy(tensor: Tensor) -> bool:
    """Whether a tensor's memory holds the negatives of its numbers, or nothing for zeros, instead of the numbers."""
    return tensor.is_neg() or tensor._is_zerotensor()


def resolved(tensor: Tensor) -> Tensor:
    """The same numbers in a tensor that is not lazy."""
    return tensor.clone() if tensor.is_neg() or tensor._is_zerotensor() else tensor  # is_lazy(), without a call


def stream_address(device: torch.device) -> int:
    """The address of a GPU's current stream, at a twentieth of the cost of an object for it."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def uses_forward_mode() -> bool:
    """Whether forward-mode differentiation is on: operators with only a backward formula would drop the tangents."""
    return torch.autograd.forward_ad._current_level >= 0


def needs_dispatcher() -> bool:
    """Whether something intercepts the operators that are called: a compiler, a tracer, a mode or a profiler."""
    return is_traced() or torch.autograd._profiler_enabled()


def backward_pass() -> int:
    """A number that identifies the current backward pass."""
    return torch._C._current_graph_task_id()


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module was compiled by `torch.compile(module)` or `module.compile()`."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply`, without searching its arguments for tensors of `torch.func` transforms that have ended."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


_CONTEXT = "torch.distributed.tensor.experimental._context_parallel._attention"


def is_context_parallel() -> bool:
    """Whether PyTorch's `context_parallel` has replaced `scaled_dot_product_attention`; there is no public flag."""
    module = sys.modules.get(_CONTEXT)
    return module is not None and F.scaled_dot_product_attention in module._replaced_functions


def autograd_below(op: Any, keys: Any, *inputs: Any) -> Any:
    """Calls an operator as if tensors had no gradients, like `torch.library` internally, but with less overhead."""
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keys & torch._C._after_autograd_keyset, *inputs)


def load_allowing(path: Any, allowed: list[Any]) -> Any:
    """What `torch.load(path, weights_only=True)` returns if these classes are allowed as well.

    They take the place of others of their names. PyTorch's own list is one for the process, so changing that would
    reach files that other threads are loading.
    """
    spec: Any = torch._weights_only_unpickler.__spec__
    own: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)

    def name(entry: Any) -> str:
        return entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"

    ours = set(map(name, allowed))
    others = [entry for entry in torch.serialization.get_safe_globals() if name(entry) not in ours]
    own._add_safe_globals(others + allowed)
    names = {**vars(torch.serialization), own.__name__.rpartition(".")[2]: own}
    for function in (torch.serialization._legacy_load, torch.serialization.load):  # the second calls the first
        copied = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
        copied.__kwdefaults__ = function.__kwdefaults__
        names[function.__name__] = copied
    return names["load"](path, weights_only=True)
