import pytest
import torch

from gattn.models.tokens import check_tokens, shift


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tokens_of_the_vocabulary(dtype):
    check_tokens("words", torch.tensor([[0, 4], [3, 1]], dtype=dtype), 5)
    check_tokens("words", torch.zeros(0, 3, dtype=dtype), 5)
    check_tokens("words", torch.tensor([4, 0], dtype=dtype), 5, "[B]")


@pytest.mark.parametrize(
    ("tokens", "got"),
    [
        (torch.zeros(3, dtype=torch.long), r"torch.int64 of shape \[3\]"),
        (torch.zeros(1, 2, 3, dtype=torch.long), r"torch.int64 of shape \[1, 2, 3\]"),
        (torch.zeros(2, 3), r"torch.float32 of shape \[2, 3\]"),
        (torch.zeros(2, 3, dtype=torch.bool), r"torch.bool of shape \[2, 3\]"),
        (torch.zeros(2, 3, dtype=torch.cfloat), r"torch.complex64 of shape \[2, 3\]"),
    ],
)
def test_what_is_no_tokens(tokens, got):
    with pytest.raises(ValueError, match=rf"words must be integers, \[B, T\]; got {got}"):
        check_tokens("words", tokens, 5)


@pytest.mark.parametrize(("tokens", "got"), [([[0, 5]], 5), ([[-1, 2]], -1), ([[9, -2]], -2)])
def test_tokens_out_of_range(tokens, got):
    with pytest.raises(IndexError, match=f"words must lie between 0 and 4; got {got}"):
        check_tokens("words", torch.tensor(tokens), 5)


def test_shift():
    assert shift(torch.tensor([[3, 4, 5], [6, 7, 8]]), start=1).tolist() == [[1, 3, 4], [1, 6, 7]]
    assert shift(torch.zeros(2, 0, dtype=torch.long), start=1).shape == (2, 0)
    assert shift(torch.tensor([[3]], dtype=torch.int32), start=1).dtype == torch.int32
