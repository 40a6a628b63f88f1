"""A linear layer that accepts sparse features."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Embedding, Module, Parameter, Sequential
from torch.nn.parameter import is_lazy
from torch_geometric.nn.dense import HeteroLinear
from torch_geometric.nn.dense import Linear as PyGLinear

from gattn.autocast import without_autocast
from gattn.graphs.edge_lists import derived
from gattn.products import linear, several, uses_onednn
from gattn.torch_private import NonDynamicallyQuantizableLinear, has_hooks, is_wrapper

__all__ = [
    "Linear",
    "columns",
    "is_affine",
    "is_plain",
    "is_untouched",
    "side_by_side",
    "through",
    "transposed_pattern",
]


class Linear(PyGLinear):
    """PyG's `Linear`, with the same parameters, initialisation and lazy sizes, whose input may be sparse.

    Example:
        >>> import torch
        >>> from gattn.nn.shared.linear import Linear
        >>> x = torch.eye(3).to_sparse_csr()
        >>> Linear(3, 5)(x).shape
        torch.Size([3, 5])
    """

    @property
    def in_features(self) -> int:
        """The number of input channels, by the name that tools for `torch.nn.Linear` read."""
        return int(self.in_channels)

    @property
    def out_features(self) -> int:
        """The number of output channels, likewise."""
        return int(self.out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[..., F_in]`, or a sparse matrix `[N, F_in]`, to `[..., F_out]`.

        Args:
            x: The features.
        """
        if x.layout == torch.strided or x.is_nested:
            return linear(x, self.weight, self.bias)
        if x.layout != torch.sparse_csr:
            x = x.to_sparse_csr()
        out = _sparse_product(x, self.weight)
        return out if self.bias is None else out + self.bias

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Saves the parameters that the layer has: pruned or normalised, it has others, and PyG's would not load."""
        is_made = not is_lazy(self._parameters.get("weight"))
        save: Any = Module._save_to_state_dict if is_made else PyGLinear._save_to_state_dict
        save(self, destination, prefix, keep_vars)


_LINEAR = (Linear, PyGLinear, torch.nn.Linear, NonDynamicallyQuantizableLinear, HeteroLinear)
#: Layers that are nothing but their parameters, each with the method that says so and the number of these parameters.
_PARAMETERS: dict[type[Module], tuple[Any, int]] = {
    **{kind: (kind.forward, 2) for kind in _LINEAR},
    Embedding: (Embedding.forward, 1),
}


def is_untouched(module: Module) -> bool:
    """Whether code may read a module's parameters instead of calling it, because nobody could notice the difference.

    Somebody would if it has hooks, is pruned, parametrised, quantised, patched, wrapped or replaced, or is lazy still.
    """
    kind, parameters = type(module), module._parameters
    forward, count = _PARAMETERS.get(kind, (None, None))
    if kind.forward is not forward or len(parameters) != count or "weight" not in parameters:
        return False
    if "forward" in module.__dict__ or module._modules or has_hooks(module):
        return False
    for parameter in parameters.values():
        if type(parameter) is not Parameter and parameter is not None and is_wrapper(parameter):
            return False
    return True


def is_affine(lin: Module) -> bool:
    """Whether a layer is only its weight `[F_out, F_in]` and, possibly, its bias."""
    return isinstance(lin, (PyGLinear, torch.nn.Linear)) and is_untouched(lin)


def through(module: Any, x: Tensor) -> Tensor:
    """What a module makes of features: its linear layers by `gattn.products`, if nobody could notice the difference."""
    if uses_onednn():
        if type(module) is Sequential and "forward" not in vars(module) and not has_hooks(module):
            return reduce(lambda x, part: through(part, x), module, x)
        if is_affine(module):
            return linear(x, module.weight, module.bias)
    out: Tensor = module(x)
    return out


def side_by_side(x: Tensor, *lins: Any) -> list[Tensor]:
    """What several linear layers make of the same features; see `gattn.products.several`."""
    if torch.compiler.is_compiling() and x.layout == torch.strided and all(is_affine(lin) for lin in lins):
        return several(x, [lin.weight for lin in lins], [lin.bias for lin in lins])
    return [lin(x) for lin in lins]


def is_plain(lin: Any) -> bool:
    """Whether a layer is only its weight `[F_out, F_in]`."""
    return is_affine(lin) and lin.bias is None


def columns(lin: Any, *sizes: int) -> tuple[Tensor, ...] | None:
    """The columns of a linear layer's weight that belong to each part of its input; `None` if it has to be called."""
    return lin.weight.split(sizes, 1) if is_affine(lin) else None


def _sparse_product(x: Tensor, weight: Tensor) -> Tensor:
    """The product x Wᵀ for a sparse x, in float32 at least, because CPU libraries support nothing else."""
    dtype = weight.dtype
    if dtype in (torch.float16, torch.bfloat16):
        x, weight = x.float(), weight.float()
    with without_autocast(x):
        out: Tensor = x @ weight.t() if x.requires_grad else _ConstantSparseProduct.apply(x, weight)  # type: ignore[no-untyped-call]
    return out.to(dtype)


class _ConstantSparseProduct(torch.autograd.Function):
    """The product for an x that needs no gradient. Autograd's formula for the gradient of W is far slower."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.t()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        x = inputs[0]
        ctx.x = x if x.is_inference() else None  # nobody can edit it, but autograd does not save it either
        ctx.save_for_backward(*([] if x.is_inference() else [x]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        x = ctx.saved_tensors[0] if ctx.x is None else ctx.x
        with without_autocast(grad):
            return None, (_transpose(x) @ grad).t()


def _transpose(x: Tensor) -> Tensor:
    """The transpose of a sparse matrix in CSR form; the order of its entries is computed once per matrix."""
    start, index, order = transposed_pattern(x)
    return torch.sparse_csr_tensor(start, index, x.values()[order], (x.size(1), x.size(0)), check_invariants=False)


def transposed_pattern(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each column of a CSR matrix, where its entries begin, their rows, and their order, computed once."""

    def derive() -> tuple[Tensor, Tensor, Tensor]:
        columns = x.col_indices()
        order = columns.argsort(stable=True)
        rows = torch.arange(x.size(0), device=x.device).repeat_interleave(x.crow_indices().diff())
        start = F.pad(columns.bincount(minlength=x.size(1)).cumsum(0), (1, 0))
        return start, rows[order], order

    pattern: tuple[Tensor, Tensor, Tensor] = derived(x, "transposed pattern", derive)
    return pattern
