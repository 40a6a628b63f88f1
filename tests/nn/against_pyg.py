"""What tests of drop-in layers share: graphs in every form, and the comparison with PyG's layer."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch_geometric.typing
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import to_torch_coo_tensor, to_torch_csr_tensor

from gattn.testing import assert_as_exact_as

#: A graph `[2, E]`, sorted and without duplicates, in each form that PyG takes, given its numbers of nodes.
FORMS = {
    "edge_index": lambda edges, size: edges,
    "EdgeIndex": lambda edges, size: EdgeIndex(edges, sparse_size=size),
    "csr": lambda edges, size: to_torch_csr_tensor(edges.flip(0), size=size[::-1]),
    "coo": lambda edges, size: to_torch_coo_tensor(edges.flip(0), size=size[::-1]),
}
if torch_geometric.typing.WITH_TORCH_SPARSE:
    FORMS["SparseTensor"] = lambda edges, size: SparseTensor.from_edge_index(edges, sparse_sizes=size).t()


def name_of(row: Any) -> str:
    """A name for a row of options, the same in every process: functions are described by their addresses."""
    return " ".join(getattr(value, "__name__", str(value)) for value in row)


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and value.is_floating_point()


def mapped(value: Any, function: Any) -> Any:
    """The same nested pairs and lists with other tensors of floats."""
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(part, function) for part in value)
    return function(value) if is_float(value) else value


def results(conv: torch.nn.Module, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    """Outputs, and gradients of parameters and of all tensors of floats among the arguments, by name."""
    leaves = dict(conv.named_parameters())

    def leaf(tensor: Tensor) -> Tensor:
        leaves[f"input {len(leaves)}"] = made = tensor.detach().requires_grad_()
        return made

    args = mapped(args, leaf)
    kwargs = {name: mapped(value, leaf) for name, value in kwargs.items()}
    outputs: list[Tensor] = []
    mapped([conv(*args, **kwargs)], outputs.append)
    grads = [torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape).cos() for out in outputs]
    differentiable, weights = zip(
        *[(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad], strict=True
    )
    found = torch.autograd.grad(differentiable, list(leaves.values()), weights, allow_unused=True)
    grads = {name: grad for name, grad in zip(leaves, found, strict=True) if grad is not None}
    return {f"output {number}": out.detach() for number, out in enumerate(outputs)} | grads


def assert_as_pyg(
    ours: torch.nn.Module,
    theirs: torch.nn.Module,
    *args: Any,
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> None:
    """Asserts that a layer is a drop-in: the same words and state, and no less exact outputs and gradients.

    Args:
        ours: Our layer.
        theirs: PyG's, of the same options; it gets our layer's parameters.
        *args: What both are called with; tensors of floats are cast, and get gradients.
        dtype: What is computed in. (default: `torch.float32`)
        **kwargs: Further arguments of the calls.
    """
    assert str(ours) == str(theirs)
    shapes = [{name: value.shape for name, value in conv.state_dict().items()} for conv in (ours, theirs)]
    assert list(shapes[0]) == list(shapes[1])
    assert shapes[0] == shapes[1]
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())

    def cast(value: Any, to: torch.dtype) -> Any:
        return mapped(value, lambda tensor: tensor.to(to))

    def in_type(conv: torch.nn.Module, to: torch.dtype) -> dict[str, Tensor]:
        given = {name: cast(value, to) for name, value in kwargs.items()}
        return results(copy.deepcopy(conv).to(to), *cast(args, to), **given)

    exact, expected, found = in_type(theirs, torch.double), in_type(theirs, dtype), in_type(ours, dtype)
    assert list(found) == list(expected)
    # Some gradients cancel out (a softmax does not see what all of a target's logits share): what is left is rounding.
    largest = max((x.abs().max().item() for name, x in exact.items() if "output" not in name and x.numel()), default=0)
    for name in expected:
        scale = None if "output" in name else largest
        assert_as_exact_as(found[name], expected[name], exact[name], scale=scale, name=name)
