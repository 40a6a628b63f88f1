"""How large the tensors are that a layer makes."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that an operator returns inside the block."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            self.numel = max(self.numel, tensor.numel() if isinstance(tensor, torch.Tensor) else 0)
        return result
