"""Sharded graphs in one process: threads take the place of processes, and exchange tensors in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import gattn.distributed

__all__ = ["Mesh", "on_processes"]


class Group:
    """What gattn uses of a process group."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier):
        self._rank, self._slots, self._barrier = rank, slots, barrier

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self._slots)

    def exchange(self, x: Any) -> list[Any]:
        """What all processes pass."""
        self._slots[self._rank] = x
        self._barrier.wait()
        everybodys = [*self._slots]
        self._barrier.wait()
        return everybodys


class Mesh(DeviceMesh):
    """What `shard` uses of a mesh of one dimension."""

    ndim = 1
    mesh_dim_names = None

    def __init__(self, group: Group):
        self.group, self._device_type = group, "cpu"

    def get_group(self, mesh_dim: Any = None) -> Any:
        return self.group

    def size(self, mesh_dim: Any = None) -> int:
        return self.group.size()


def _all_gather(gathered: list[Tensor], x: Tensor, group: Group) -> None:
    for mine, theirs in zip(gathered, group.exchange(x), strict=True):
        mine.copy_(theirs)


def _all_to_all_single(
    out: Tensor, x: Tensor, received: list[int] | None = None, sent: list[int] | None = None, *, group: Group
) -> None:
    sent = [len(x) // group.size()] * group.size() if sent is None else sent
    parts = [part[group.rank()] for part in group.exchange(x.split(sent))]
    assert received is None or [len(part) for part in parts] == received
    out.copy_(torch.cat(parts))


_COLLECTIVES = SimpleNamespace(all_gather=_all_gather, all_to_all_single=_all_to_all_single)


def on_processes(ranks: int, run: Callable[[Mesh], Any]) -> list[Any]:
    """What `run` returns in each process; it draws no random numbers, which threads share."""
    slots: list[Any] = [None] * ranks
    barrier, errors = threading.Barrier(ranks), []

    def work(rank: int) -> Any:
        try:
            return run(Mesh(Group(rank, slots, barrier)))
        except threading.BrokenBarrierError:  # another one has failed
            return None
        except BaseException as error:
            errors.append(error)
            barrier.abort()
            return None

    with patch.object(gattn.distributed, "dist", _COLLECTIVES), ThreadPoolExecutor(ranks) as pool:
        results = [*pool.map(work, range(ranks))]
    if errors:
        raise errors[0]
    return results
