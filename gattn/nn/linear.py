"""A linear layer that takes sparse features, and dropout for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn.dense import Linear as PyGLinear

from gattn.ops import cpu
from gattn.ops.dropout import draw_seed
from gattn.ops.edge_lists import derived


class Linear(PyGLinear):
    """PyG's `Linear` (lazy sizes, glorot initialisation, the same parameters), whose input may be sparse.

    Example:
        >>> import torch
        >>> from gattn.nn.linear import Linear
        >>> x = torch.eye(3).to_sparse_csr()
        >>> Linear(3, 5)(x).shape
        torch.Size([3, 5])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[..., F_in]` (or a sparse `[N, F_in]` matrix) to `[..., F_out]`."""
        if x.layout == torch.strided:
            return F.linear(x, self.weight, self.bias)
        if x.layout != torch.sparse_csr:
            x = x.to_sparse_csr()
        out = _sparse_product(x, self.weight)
        return out if self.bias is None else out + self.bias


def _sparse_product(x: Tensor, weight: Tensor) -> Tensor:
    """The product x Wᵀ for a sparse x, in float32 at least: CPU libraries know no other products of sparse matrices."""
    dtype = weight.dtype
    if dtype in (torch.float16, torch.bfloat16):
        x, weight = x.float(), weight.float()
    with torch.autocast(x.device.type, enabled=False):
        out = x @ weight.t() if x.requires_grad else _ConstantSparseProduct.apply(x, weight)
    return out.to(dtype)


class _ConstantSparseProduct(torch.autograd.Function):
    """The product for an x that needs no gradient: autograd's own formula is many times slower for the weight's."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.t()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.x = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        with torch.autocast(grad.device.type, enabled=False):
            return None, (_transpose(ctx.x) @ grad).t()


def _transpose(x: Tensor) -> Tensor:
    """The transpose of a sparse matrix, in CSR form again; where its entries go is found out once."""
    start, index, order = _transposed_pattern(x)
    return torch.sparse_csr_tensor(start, index, x.values()[order], (x.size(1), x.size(0)), check_invariants=False)


def _transposed_pattern(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    def derive() -> tuple[Tensor, Tensor, Tensor]:
        columns = x.col_indices()
        order = columns.argsort(stable=True)
        rows = torch.arange(x.size(0), device=x.device).repeat_interleave(x.crow_indices().diff())
        start = F.pad(columns.bincount(minlength=x.size(1)).cumsum(0), (1, 0))
        return start, rows[order], order

    return derived(x, "transposed pattern", derive)


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """`torch.nn.functional.dropout`; on the CPU by gattn's own generator, which is ten times as fast."""
    if not training or p == 0.0:
        return x
    if p < 1.0 and x.device.type == "cpu" and x.dtype in cpu.DTYPES and cpu.usable():
        return cpu.drop(x, p, draw_seed(x.device))
    return F.dropout(x, p, training)


class FeatureDropout(torch.nn.Dropout):
    """`torch.nn.Dropout` that takes sparse features too: it drops their stored values, as zeros stay zeros either way.

    Example:
        >>> import torch
        >>> from gattn.nn.linear import FeatureDropout
        >>> FeatureDropout(1.0)(torch.eye(3).to_sparse_csr()).values()
        tensor([0., 0., 0.])
    """

    def forward(self, x: Any) -> Any:
        """Drops features `[..., F]`, dense or sparse; of a pair (sources, targets) both."""
        if isinstance(x, (tuple, list)):
            return tuple(None if features is None else self(features) for features in x)
        if not self.training or self.p == 0.0:
            return x
        if x.layout == torch.strided:
            return dropout(x, self.p, self.training)
        if x.layout != torch.sparse_csr:
            x = x.to_sparse_csr()
        values = dropout(x.values(), self.p, self.training)
        result = torch.sparse_csr_tensor(x.crow_indices(), x.col_indices(), values, x.shape, check_invariants=False)
        derived(result, "transposed pattern", lambda: _transposed_pattern(x))
        return result
