"""Several processes that train together, as torchrun starts them."""

import contextlib
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.framework import parallel


def together(function, *arguments, processes=2):
    """What a function, called in each of some processes, returns in the first."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_join, (processes, folder, function, arguments), nprocs=processes)
        return torch.load(Path(folder) / "result", weights_only=True)


def _join(rank, processes, folder, function, arguments):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    torch.set_num_threads(1)
    result = function(*arguments)
    if rank == 0:
        torch.save(result, Path(folder) / "result")
    dist.destroy_process_group()


@contextlib.contextmanager
def float64():
    """New parameters are in float64. In float32, Adam makes steps of gradients that are zero but for rounding."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def trained(training):
    """The losses between the last two evaluations, but for the last one, and the learning curve."""
    training.advance(training.iterations - 1)
    losses = list(parallel.mean(training.losses))
    training.advance(1)
    return losses, training.curve
