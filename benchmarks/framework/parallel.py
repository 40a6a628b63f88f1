"""Data-parallel training with torchrun: what `DistributedDataParallel` leaves open. Inactive without torchrun."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.framework.results import Row

T = TypeVar("T")


def start() -> None:
    """Joins the processes that torchrun has started, if it has."""
    if dist.is_available() and dist.is_torchelastic_launched() and int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


def choose_gpu() -> None:
    """Gives this thread the process's own GPU, if there are several processes and any GPUs."""
    if size() > 1 and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


def size() -> int:
    """The number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's number; only the first process, 0, prints and writes."""
    return dist.get_rank() if size() > 1 else 0


def seed(number: int) -> None:
    """Seeds PyTorch: the first process as if it were the only one, and each of the others differently."""
    mixed = np.random.SeedSequence((number, rank())).generate_state(1)[0]
    torch.manual_seed(int(mixed) if rank() else number)


def of_first(value: T) -> T:
    """The first process's value, on all of them."""
    values = [value]
    if size() > 1:
        dist.broadcast_object_list(values)
    return values[0]


def part(index: Tensor) -> Tensor:
    """This process's part of the rows, which may be uneven and empty."""
    return index.tensor_split(size())[rank()]


def gathered(x: Tensor) -> Tensor:
    """The rows of all processes, one after the other, on each of them."""
    if size() == 1:
        return x
    parts: list[Any] = [None] * size()
    dist.all_gather_object(parts, x)
    return torch.cat(parts)


def mean(values: list[float]) -> list[float]:
    """The means over processes."""
    if size() == 1:
        return values
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / size()).tolist()


def weighted(loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, labels: Tensor, whole: int) -> Tensor:
    """This process's part of the mean loss of a batch, weighted so that the mean of all parts is that loss.

    Args:
        loss: The mean loss of some rows.
        logits: This process's rows, of which there may be none.
        labels: The labels of these rows.
        whole: The number of rows of all processes.
    """
    if not len(labels):
        return logits.sum()  # an empty sum, but with a gradient, which the other processes wait for
    return loss(logits, labels) * (size() * len(labels) / whole)


def notes(rows: Iterable[Row]) -> list[str]:
    """The remark of a report on rows that several processes made."""
    counts = sorted({row["processes"] for row in rows if row.get("processes", 1) > 1})
    return [f"Each run was trained by {count} processes; times and memory are those of the first." for count in counts]


class _Sum(torch.autograd.Function):
    """The sum over processes, whose gradient is the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Sum.apply(*grads)


class SyncBatchNorm(torch.nn.BatchNorm1d):
    """Batch norm over the rows `[N, C]` of all processes; PyTorch's is for GPUs only."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalises this process's rows, of which there may be none."""
        if not self.training:
            return super().forward(x)
        sums = _Sum.apply(torch.cat([x.sum(0), x.new_tensor([len(x)])]))
        count = sums[-1].detach()
        average = sums[:-1] / count
        centred = x - average
        variance = _Sum.apply(centred.square().sum(0)) / count
        state: Any = self
        with torch.no_grad():
            state.running_mean.lerp_(average, state.momentum)
            state.running_var.lerp_(variance * count / (count - 1), state.momentum)
            state.num_batches_tracked += 1
        out: Tensor = centred * (variance + self.eps).rsqrt() * self.weight + self.bias
        return out


def data_parallel(model: torch.nn.Module, has_unused: bool) -> torch.nn.Module:
    """What to call instead of the model in training, so that gradients and batch norms are those of all processes.

    Args:
        model: The model; its batch norms are changed in place.
        has_unused: Whether some parameters never get a gradient.
    """
    if size() == 1:
        return model
    if next(model.parameters()).is_cuda:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for module in model.modules():
        if type(module) is torch.nn.BatchNorm1d:
            module.__class__ = SyncBatchNorm  # parameters and buffers stay the same
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")  # only costs a copy
    return DistributedDataParallel(model, find_unused_parameters=has_unused)
