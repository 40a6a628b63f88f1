import pytest
import torch

import gattn


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax_equals_torch_softmax_in_every_group(dim):
    index = torch.tensor([2, 0, 0, 2, 2, 3])
    logits = torch.randn(6, 4, dtype=torch.double)
    expected = torch.empty_like(logits)
    for target in (0, 2, 3):
        expected[index == target] = logits[index == target].softmax(0)
    if dim != 0:
        logits, expected = logits.t(), expected.t()
    torch.testing.assert_close(gattn.softmax(logits, index, 5, dim), expected)


def test_large_logits_do_not_overflow():
    weights = gattn.softmax(torch.tensor([1000.0, 1000.0, -1000.0]), torch.tensor([0, 0, 0]), 1)
    torch.testing.assert_close(weights, torch.tensor([0.5, 0.5, 0.0]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_minus_infinity_means_no_weight(dtype):
    logits = torch.tensor([0.0, -torch.inf, -torch.inf, -torch.inf], dtype=dtype, requires_grad=True)
    weights = gattn.softmax(logits, torch.tensor([0, 0, 1, 1]), 3)
    assert weights.tolist() == [1, 0, 0, 0]
    assert weights.dtype == dtype
    (weights * torch.arange(4)).sum().backward()
    assert logits.grad.isfinite().all()


def test_integer_logits_are_refused():
    with pytest.raises(ValueError, match="logits of a floating-point type; got torch.int64"):
        gattn.softmax(torch.zeros(3, dtype=torch.long), torch.tensor([0, 0, 1]), 2)


def test_gradcheck():
    index = torch.tensor([1, 0, 1, 1])
    logits = torch.randn(4, 2, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda logits: gattn.softmax(logits, index, 3), logits)


def test_a_product_with_a_mask_is_not_a_mask():
    """A logit of zero still gets weight: what is masked must be minus infinity before the softmax."""
    logits, mask = torch.tensor([2.0, 1.0]), torch.tensor([True, False])
    index = torch.zeros(2, dtype=torch.long)
    assert gattn.softmax(logits * mask, index, 1)[1] > 0.1
    assert gattn.softmax(logits.masked_fill(~mask, -torch.inf), index, 1).tolist() == [1.0, 0.0]
