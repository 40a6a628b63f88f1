"""Graphs whose nodes have features and one class each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from torch_geometric.data import Data

import gattn
from benchmarks.framework.processes import BenchmarkError

SPARSE_DENSITY = 0.1
"""Features are kept sparse if at most this share of them is nonzero."""


def hush() -> None:
    """Silences PyTorch's warnings about its own sparse matrices, which appear once per process."""
    warnings.filterwarnings("ignore", "Sparse .* is in beta|Sparse invariant checks")


def check_task(dataset: str, data: Any) -> None:
    """Raises `ValueError` unless the data are one graph whose nodes have features and one class each."""
    if not isinstance(data, Data):
        raise ValueError(f"{dataset} has many graphs, but this benchmark classifies the nodes of a single graph.")
    if data.x is None:
        raise ValueError(f"{dataset} has no node features, which this benchmark needs.")
    if data.y.dim() != 1 or data.y.is_floating_point():
        raise ValueError(f"{dataset} does not have one class per node, which this benchmark needs.")


def densities(datasets: Iterable[str], skip: Callable[[str, str], None] | None) -> dict[str, float]:
    """The density of each data set's features.

    Args:
        datasets: The names.
        skip: Called for each data set that cannot be loaded, with the reason; `None` if all must be there.

    Raises:
        BenchmarkError: If a data set that must be there cannot be loaded.
    """
    found = {}
    for dataset in datasets:
        try:
            data = gattn.datasets.load(dataset)
            check_task(dataset, data)
            found[dataset] = data.x.count_nonzero().item() / max(data.x.numel(), 1)
        except (gattn.datasets.DatasetUnavailableError, ValueError, ImportError) as error:
            if skip is None:
                raise BenchmarkError(str(error)) from error
            skip(dataset, str(error))
    return found


def storage(layers: str, density: float) -> str:
    """How features are stored: bags of words stay sparse for gattn's layers; PyG's layers take dense ones."""
    return "sparse" if layers == "gattn" and density <= SPARSE_DENSITY else "dense"
