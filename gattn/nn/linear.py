"""A linear layer that takes sparse features, and dropout for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn.dense import Linear as PyGLinear


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
    """The product for an x that needs no gradient: autograd's own formula is five times slower for the weight's."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.t()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.x = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        with torch.autocast(grad.device.type, enabled=False):
            return None, (ctx.x.t() @ grad).t()


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
            return super().forward(x)
        if x.layout != torch.sparse_csr:
            x = x.to_sparse_csr()
        values = super().forward(x.values())
        return torch.sparse_csr_tensor(x.crow_indices(), x.col_indices(), values, x.shape, check_invariants=False)
