"""One front for the graphs that attention is benchmarked on.

Data lie under `GATTN_DATA` (default: a folder `gattn` in the user's cache), in the layout of PyG's and OGB's loaders,
which download there what is missing.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import platformdirs
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.datasets import Amazon, Coauthor, HeterophilousGraphDataset, KarateClub, Planetoid
from torch_geometric.transforms import RandomNodeSplit

_TIMEOUT_SECONDS = 30.0

# Where no split is published: as many nodes a class as in Shchur et al., https://arxiv.org/abs/1811.05868.
_TRAIN_PER_CLASS = 20
_VALIDATION_PER_CLASS = 30


class DatasetUnavailableError(FileNotFoundError):
    """A data set is neither on disk nor to be downloaded; the message says which files are missing."""


@dataclass(frozen=True)
class _Family:
    """Data sets with one loader."""

    names: dict[str, str]
    """Our name: the loader's."""
    splits: tuple[str, ...]
    load: Callable[[str, Path, str, int], Data]
    files: Callable[[str, str], list[str]]
    """Raw files of (the loader's name, split), relative to the root."""
    url: str


def data_root(root: str | os.PathLike[str] | None = None) -> Path:
    """The folder that data sets are read from: `root`, else `GATTN_DATA`, else a per-user cache folder."""
    return Path(root or os.environ.get("GATTN_DATA") or platformdirs.user_cache_path("gattn"))


def load(name: str, *, split: str = "public", seed: int = 0, root: str | os.PathLike[str] | None = None) -> Any:
    """Loads a data set by name, with the masks of a split.

    Names, and the splits they have:

    - `karate`: `"public"`, ours: of each class, in the order of nodes, the first two train and the next two validate,
      the rest tests. `"random"`: the same in a random order.
    - `cora`, `citeseer`, `pubmed`: `"public"` (20 a class train, 500 validate, 1000 test), `"full"` (all others train),
      `"geom-gcn"` (ten fixed splits), `"random"` (sizes as in the public one).
    - `computers`, `photo` (Amazon), `cs`, `physics` (Coauthor): `"public"` and `"random"` are the same, as nobody
      published one: 20 a class train, 30 times the number of classes validate, the rest tests.
    - `roman-empire`, `amazon-ratings`, `minesweeper`, `tolokers`, `questions`: `"public"` (ten fixed splits),
      `"random"` (as above).
    - OGB's node- and graph-property sets by OGB's names, `ogbn-...` and `ogbg-...`: `"public"`.

    Args:
        name: One of the above; case and `-` or `_` do not matter.
        split: One of the above. (default: `"public"`)
        seed: Which of ten fixed splits (modulo ten), or the seed of a random one. (default: `0`)
        root: Folder of the data. (default: `None`: `GATTN_DATA`, else a folder `gattn` in the user's cache)

    Returns:
        PyG's `Data`, with boolean `train_mask`, `val_mask` and `test_mask` of shape `[N]`; for `ogbg-...` OGB's data
        set, whose `get_idx_split()` has the split.

    Raises:
        ValueError: If there is no data set or no split of that name.
        DatasetUnavailableError: If the data are neither on disk nor to be downloaded.
        ImportError: If an OGB set is asked for and `ogb` is not installed.

    Example:
        >>> import gattn
        >>> data = gattn.datasets.load("karate")
        >>> data.num_nodes, data.num_edges, int(data.train_mask.sum())
        (34, 156, 8)
    """
    key = name.lower().replace("_", "-")
    key = _ALIASES.get(key, key)
    folder = data_root(root)
    if key.startswith(("ogbn-", "ogbg-")):
        _check_split(name, split, ("public",))
        return _load_ogb(key, folder)
    family = next((family for family in _FAMILIES if key in family.names), None)
    if family is None:
        raise ValueError(
            f"unknown data set {name!r}: gattn has {', '.join(available())} and OGB's ogbn-... and ogbg-..."
        )
    _check_split(name, split, family.splits)
    loader_name = family.names[key]
    missing = [file for file in family.files(loader_name, split) if not (folder / file).exists()]
    with _explain_failure(name, folder, missing, family.url):
        return family.load(loader_name, folder, split, seed)


def available() -> list[str]:
    """Names of the data sets that `load` knows, without OGB's."""
    return [name for family in _FAMILIES for name in family.names]


def _check_split(name: str, split: str, splits: tuple[str, ...]) -> None:
    if split not in splits:
        raise ValueError(f"{name} has no split {split!r}: it has {', '.join(repr(known) for known in splits)}.")


@contextmanager
def _explain_failure(name: str, folder: Path, missing: list[str], url: str) -> Iterator[None]:
    """Turns a failed download into an error that says what is missing, and leaves no empty folders behind."""
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT_SECONDS)
    try:
        yield
    except Exception as error:
        if not missing or not isinstance(error, OSError):
            raise
        for file in missing:
            for parent in list((folder / file).parents)[:3]:
                if parent != folder and folder in parent.parents and parent.is_dir() and not any(parent.iterdir()):
                    parent.rmdir()
        raise DatasetUnavailableError(
            f"{name} is not under {folder} and could not be downloaded ({type(error).__name__}: {error}). Missing: "
            f"{', '.join(missing)}. Get these files from {url} and put them there, or set GATTN_DATA (or root=) to a "
            "folder that has them."
        ) from error
    finally:
        socket.setdefaulttimeout(timeout)


def _random_split(data: Data, seed: int, split: str = "test_rest", **counts: int) -> Data:
    """Draws masks without touching the global random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return RandomNodeSplit(split, num_train_per_class=_TRAIN_PER_CLASS, **counts)(data)


def _random_split_by_class(data: Data, seed: int) -> Data:
    return _random_split(data, seed, num_val=_VALIDATION_PER_CLASS * int(data.y.max() + 1))


def _pick_column(data: Data, seed: int) -> Data:
    """Of ten fixed splits, one a column, keeps one."""
    for mask in ("train_mask", "val_mask", "test_mask"):
        columns = data[mask]
        data[mask] = columns[:, seed % columns.size(1)].bool()
    return data


def _load_karate(name: str, folder: Path, split: str, seed: int) -> Data:
    data = KarateClub()[0]
    order = torch.arange(data.num_nodes)
    if split == "random":
        order = torch.randperm(data.num_nodes, generator=torch.Generator().manual_seed(seed))
    rank = torch.empty_like(order)
    for label in data.y.unique():
        members = order[data.y[order] == label]
        rank[members] = torch.arange(members.numel())
    data.train_mask, data.val_mask, data.test_mask = rank < 2, (rank >= 2) & (rank < 4), rank >= 4
    return data


def _load_planetoid(name: str, folder: Path, split: str, seed: int) -> Data:
    data = Planetoid(str(folder), name, split="public" if split == "random" else split)[0]
    if split == "random":
        return _random_split(data, seed, "random", num_val=500, num_test=1000)
    return _pick_column(data, seed) if split == "geom-gcn" else data


def _load_amazon(name: str, folder: Path, split: str, seed: int) -> Data:
    return _random_split_by_class(Amazon(str(folder), name)[0], seed)


def _load_coauthor(name: str, folder: Path, split: str, seed: int) -> Data:
    return _random_split_by_class(Coauthor(str(folder), name)[0], seed)


def _load_heterophilous(name: str, folder: Path, split: str, seed: int) -> Data:
    data = HeterophilousGraphDataset(str(folder), name)[0]
    return _random_split_by_class(data, seed) if split == "random" else _pick_column(data, seed)


def _planetoid_files(name: str, split: str) -> list[str]:
    raw = f"{name}/geom-gcn/raw" if split == "geom-gcn" else f"{name}/raw"
    parts = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
    files = [f"{raw}/ind.{name.lower()}.{part}" for part in parts]
    if split == "geom-gcn":
        files += [f"{raw}/{name.lower()}_split_0.6_0.2_{i}.npz" for i in range(10)]
    return files


_ALIASES = {
    "karateclub": "karate",
    "karate-club": "karate",
    "amazon-computers": "computers",
    "amazon-photo": "photo",
    "coauthor-cs": "cs",
    "coauthor-physics": "physics",
}

_SHCHUR = "https://github.com/shchur/gnn-benchmark/tree/master/data/npz"

_FAMILIES = (
    _Family({"karate": "karate"}, ("public", "random"), _load_karate, lambda name, split: [], ""),
    _Family(
        {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"},
        ("public", "full", "geom-gcn", "random"),
        _load_planetoid,
        _planetoid_files,
        "https://github.com/kimiyoung/planetoid/tree/master/data (the splits of geom-gcn from "
        "https://github.com/graphdml-uiuc-jlu/geom-gcn/tree/master/splits)",
    ),
    _Family(
        {"computers": "Computers", "photo": "Photo"},
        ("public", "random"),
        _load_amazon,
        lambda name, split: [f"{name}/raw/amazon_electronics_{name.lower()}.npz"],
        _SHCHUR,
    ),
    _Family(
        {"cs": "CS", "physics": "Physics"},
        ("public", "random"),
        _load_coauthor,
        lambda name, split: [f"{name}/raw/ms_academic_{name[:3].lower()}.npz"],
        _SHCHUR,
    ),
    _Family(
        {
            name.replace("_", "-"): name
            for name in ("roman_empire", "amazon_ratings", "minesweeper", "tolokers", "questions")
        },
        ("public", "random"),
        _load_heterophilous,
        lambda name, split: [f"{name}/raw/{name}.npz"],
        "https://github.com/yandex-research/heterophilous-graphs/tree/main/data",
    ),
)


# OGB #################################################################################################################


def _import_ogb() -> Any:
    # Without this module, importing ogb starts no thread that asks the network for a newer version.
    hide_outdated = "ogb" not in sys.modules and "outdated" not in sys.modules
    if hide_outdated:
        sys.modules["outdated"] = None  # type: ignore[assignment]
    try:
        import ogb.graphproppred
        import ogb.nodeproppred
    except ImportError as error:
        raise ImportError('OGB\'s data sets need its package: pip install "gattn[ogb]".') from error
    finally:
        if hide_outdated:
            del sys.modules["outdated"]
    # ogb calls torch.load without weights_only=False, so its files' classes are allowed here, and nowhere else.
    torch.serialization.add_safe_globals(_ogb_classes())
    return ogb


def _ogb_classes() -> list[Any]:
    import numpy
    from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
    from torch_geometric.data.storage import EdgeStorage, GlobalStorage, NodeStorage

    classes: list[Any] = [Data, DataEdgeAttr, DataTensorAttr, GlobalStorage, NodeStorage, EdgeStorage]
    core = numpy._core if hasattr(numpy, "_core") else numpy.core
    classes += [core.multiarray._reconstruct, core.multiarray.scalar, numpy.ndarray, numpy.dtype]
    classes += [type(numpy.dtype(kind)) for kind in ("int64", "int32", "float64", "float32", "bool")]
    return classes


def _load_ogb(name: str, folder: Path) -> Any:
    ogb = _import_ogb()
    is_node = name.startswith("ogbn-")
    module = ogb.nodeproppred.dataset_pyg if is_node else ogb.graphproppred.dataset_pyg
    loader = module.PygNodePropPredDataset if is_node else module.PygGraphPropPredDataset
    meta = _ogb_meta(name, folder, Path(module.__file__).with_name("master.csv"))
    url = f"https://ogb.stanford.edu/docs/{'node' if is_node else 'graph'}prop/#{name}"
    if meta is not None:
        with _explain_failure(name, folder, [], url):
            dataset = loader(name, meta_dict=meta)
    else:
        missing = [f"{name.replace('-', '_')}/raw/..."]
        # Asking for a data set by name is the consent that ogb's question on standard input is for.
        consent = mock.patch.object(module, "decide_download", return_value=True)
        with consent, _explain_failure(name, folder, missing, url):
            dataset = loader(name, root=str(folder))
    if not is_node:
        return dataset
    if dataset.is_hetero:
        raise ValueError(f"{name} is a heterogeneous graph, which gattn.datasets does not load.")
    data = dataset[0]
    if data.y.dim() == 2 and data.y.size(1) == 1:
        data.y = data.y.squeeze(1)
    parts = dataset.get_idx_split()
    for mask, part in (("train_mask", "train"), ("val_mask", "valid"), ("test_mask", "test")):
        data[mask] = _mask(torch.as_tensor(parts[part]), data.num_nodes)
    return data


# How a data set that OGB publishes as text is described once DatasetSaver wrote it.
_SAVER_META = {
    "binary": "True",
    "add_inverse_edge": "False",
    "additional node files": "None",
    "additional edge files": "None",
}


def _ogb_meta(name: str, folder: Path, master: Path) -> dict[str, Any] | None:
    """What ogb must know to read `name` from disk without asking or downloading; `None` if it is not there.

    Understands OGB's own archives, unpacked, and what `ogb.io.DatasetSaver` writes (data in one binary file, and a
    `meta_dict.pt` beside them).
    """
    import pandas

    underscored = name.replace("-", "_")
    table = pandas.read_csv(master, index_col=0, keep_default_na=False)
    for place in (folder / underscored, folder / f"{underscored}_pyg", folder / f"submission_{underscored}"):
        if not place.is_dir():
            continue
        if (place / "meta_dict.pt").exists():
            meta = torch.load(place / "meta_dict.pt", weights_only=True)
            inner = place / underscored.split("_", 1)[1]
            place = inner if inner.is_dir() else place
        elif name in table:
            meta = dict(table[name])
            if meta["binary"] != "True" and (place / "raw" / "data.npz").exists():
                meta.update(_SAVER_META)
        else:
            continue
        if not (place / "raw").is_dir() or not any((place / "raw").iterdir()):
            continue
        release = place / f"RELEASE_v{meta['version']}.txt"
        if not release.exists():
            raise DatasetUnavailableError(
                f"{place} holds data of {name}, but not {release.name}, by which ogb tells that they are of the newest "
                f"version. If they are, make an empty file of that name there; if not, move the folder away and load "
                "again."
            )
        return {**meta, "dir_path": str(place)}
    if name not in table:
        raise ValueError(f"OGB has no data set {name!r}, and there is no {folder / underscored} with a meta_dict.pt.")
    return None


def _mask(index: Tensor, size: int) -> Tensor:
    mask = torch.zeros(size, dtype=torch.bool)
    mask[index] = True
    return mask
