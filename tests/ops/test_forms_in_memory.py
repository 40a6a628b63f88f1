"""Tensors that are not laid out as they were, or whose sign is only a flag: for every tensor and way of computing."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from gattn.nn import GRITConv
from tests.cases import mostly_slow
from tests.ops.calls_by_term import attend, cases, draw


def laid_out_anew(x):
    """The same numbers with other strides, as a hook that offloads or compresses saved tensors may return them."""
    if x.dim() == 1:
        return torch.stack([x, x], 1)[:, 0]
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def as_flag(x):
    """The same numbers as a view that negates others, such as `z.conj().imag`."""
    return torch._neg_view(-x) if x.is_floating_point() else x


def gradients(case, of_saved, of_input, dtype):
    leaves = {leaf: x.to(dtype).requires_grad_() for leaf, x in draw(case[0]).items()}
    with saved_tensors_hooks(lambda x: x, of_saved):
        out = attend(*case, {leaf: of_input(x) for leaf, x in leaves.items()})
        return torch.autograd.grad(out.square().sum(), list(leaves.values()))


@pytest.mark.parametrize(("name", "graph", "law"), mostly_slow(cases(), 5), ids=str)
def test_forms_in_memory(name, graph, law):
    forms = {"plain": (lambda x: x,) * 2, "strides": (laid_out_anew, lambda x: x), "flags": (as_flag, as_flag)}
    found = {}
    for form, functions in forms.items():
        torch.manual_seed(0)
        found[form] = gradients((name, graph, law), *functions, torch.double)
    for form in ("strides", "flags"):
        for ours, wanted in zip(found[form], found["plain"], strict=True):
            torch.testing.assert_close(ours, wanted)


@pytest.mark.parametrize("hook", [laid_out_anew, as_flag])
def test_features_of_pairs(hook):
    conv = GRITConv(8, 8, 2)
    edge_index, parameters = torch.randint(0, 9, (2, 30)), list(conv.parameters())
    inputs = torch.randn(9, 8), edge_index, torch.randn(30, 8)

    def gradients():
        out = torch.cat([x.flatten() for x in conv(*inputs) if x.is_floating_point()])
        return torch.autograd.grad(out.square().sum(), parameters, allow_unused=True)

    expected = gradients()
    with saved_tensors_hooks(lambda x: x, hook):
        for ours, wanted in zip(gradients(), expected, strict=True):
            torch.testing.assert_close(ours, wanted)
