"""OGB's node- and graph-property data sets; `gattn.datasets.load` is the way to them."""

from __future__ import annotations

import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import InMemoryDataset

from gattn.files import CheckedDataset, DatasetUnavailableError, check_edges, download, read_dataset, read_torch


def _import_ogb() -> tuple[Any, Any]:
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
    return ogb.nodeproppred.dataset_pyg, ogb.graphproppred.dataset_pyg


_node, _graph = _import_ogb()
_Node: Any = _node.PygNodePropPredDataset
_Graph: Any = _graph.PygGraphPropPredDataset


class _FromDisk(CheckedDataset):
    """OGB's data sets, with what they read read safely, no questions asked and nothing downloaded."""

    def __init__(self, name: str, meta: dict[str, Any], trust_files: bool) -> None:
        # In place of OGB's, which asks on standard input, downloads, and reads with torch.load.
        self.trust_files = trust_files
        self.name, self.meta_info = name, meta
        self.root = self.dir_name = meta["dir_path"]
        self.original_root = ""
        self.download_name, self.task_type, self.eval_metric = (
            meta[key] for key in ("download_name", "task type", "eval metric")
        )
        self.num_tasks, self.__num_classes__ = int(meta["num tasks"]), int(meta["num classes"])
        self.is_hetero, self.binary = False, meta["binary"] == "True"
        InMemoryDataset.__init__(self, self.root)
        self.load(self.processed_paths[0])

    def get_idx_split(self, split_type: str | None = None) -> dict[str, Any]:
        """As OGB's."""
        split = Path(self.root) / "split" / (split_type or self.meta_info["split"]) / "split_dict.pt"
        return _read(split, self.trust_files) if split.is_file() else super().get_idx_split(split_type)


class PygNodePropPredDataset(_FromDisk, _Node):
    """OGB's data set of that name, read safely."""


class PygGraphPropPredDataset(_FromDisk, _Graph):
    """OGB's data set of that name, read safely."""


def load(name: str, folder: Path, trust_files: bool) -> Any:
    """Loads the data set `name`, `"ogbn-..."` or `"ogbg-..."`, for `gattn.datasets.load`."""
    is_node = name.startswith("ogbn-")
    kind = PygNodePropPredDataset if is_node else PygGraphPropPredDataset
    module = _node if is_node else _graph
    page = f"https://ogb.stanford.edu/docs/{'node' if is_node else 'graph'}prop/#{name}"
    place, meta = _find(name, folder, Path(module.__file__).with_name("master.csv"), trust_files)
    if meta.get("is hetero") == "True":
        raise ValueError(f"{name} is a heterogeneous graph, which gattn.datasets does not load.")
    files = [place / "raw" / file for file in _raw_files(meta, is_node)]
    release = place / f"RELEASE_v{meta['version']}.txt"
    if place.is_dir() and any(file.exists() for file in files):
        # A download would replace the whole folder, whatever else is in it.
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise DatasetUnavailableError(
                f"{place / 'raw'} holds a part of {name}, but not {', '.join(missing)}. Get the missing files from "
                f"{page}, or move the folder away and load again."
            )
        if not release.exists():
            raise DatasetUnavailableError(
                f"{place} holds data of {name}, but not {release.name}, by which ogb tells that they are of the newest "
                f"version. If they are, make an empty file of that name there; if not, move the folder away and load "
                "again."
            )
    else:
        if (place.parent / "meta_dict.pt").exists() or (place / "meta_dict.pt").exists():
            raise DatasetUnavailableError(
                f"{place} has no raw/ folder: unpack there the zip file that the saver wrote."
            )
        for empty in (place, folder / f"{place.name}_pyg"):
            _remove_empty(empty)

    def fetch(missing: list[Path]) -> None:
        _fetch(meta, place, folder, release.name)

    def read() -> Any:
        dataset = kind(name, {**meta, "dir_path": str(place)}, trust_files)
        if is_node:
            check_edges(dataset[0])
        return dataset

    try:
        dataset = read_dataset(name, folder, files, page, fetch, read)
    finally:
        _remove_empty(place)
    if not is_node:
        return dataset
    try:
        return _with_masks(dataset)
    except DatasetUnavailableError:
        raise
    except Exception as error:
        raise DatasetUnavailableError(
            f"the labels or the split of {name} under {place} cannot be read ({type(error).__name__}: {error}): get "
            f"these files anew from {page}."
        ) from error


def _with_masks(dataset: Any) -> Any:
    data = dataset[0]
    if data.y.dim() == 2 and data.y.size(1) == 1:
        data.y = data.y.squeeze(1)
    parts = dataset.get_idx_split()
    for mask, part in (("train_mask", "train"), ("val_mask", "valid"), ("test_mask", "test")):
        data[mask] = _mask(torch.as_tensor(parts[part]).long(), data.num_nodes)
    return data


def _fetch(meta: dict[str, Any], place: Path, folder: Path, release: str) -> None:
    """Downloads and unpacks the archive of a data set, unless the archive is there."""
    if place.exists():
        raise DatasetUnavailableError(f"{place} is there, but holds none of the data: move it away and load again.")
    archive = folder / f"{meta['download_name']}.zip"
    if archive.exists() and not zipfile.is_zipfile(archive):
        archive.unlink()  # a download that was cut off
    folder.mkdir(parents=True, exist_ok=True)
    # OGB unpacks into the root, where an archive could replace the files of other data sets.
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        source, unpacked = archive, Path(temporary) / "unpacked"
        if not archive.exists():
            source = Path(temporary) / archive.name
            download(meta["url"].replace("http://", "https://"), source)
        with zipfile.ZipFile(source) as file:
            file.extractall(unpacked)
        if not (unpacked / meta["download_name"] / release).exists():
            raise ValueError(
                f"{archive.name} has no {meta['download_name']}/{release}, so it is not the newest version"
            )
        shutil.move(unpacked / meta["download_name"], place)
    archive.unlink(missing_ok=True)


def _remove_empty(place: Path) -> None:
    """Removes a folder in which there is no file."""
    if place.is_dir() and not any(path.is_file() for path in place.rglob("*")):
        shutil.rmtree(place)


def _raw_files(meta: dict[str, Any], is_node: bool) -> list[str]:
    """The files without which ogb downloads, or fails."""
    label = "node-label" if is_node else "graph-label"
    if meta["binary"] == "True":
        return ["data.npz", f"{label}.npz"]
    features = [part for part in ("node", "edge") if meta[f"has_{part}_attr"] == "True"]
    names = ["edge", *(f"{part}-feat" for part in features), "num-node-list", "num-edge-list", label]
    return [f"{name}.csv.gz" for name in names]


# How a data set that OGB publishes as text is described once DatasetSaver wrote it.
_SAVER_META = {
    "binary": "True",
    "add_inverse_edge": "False",
    "additional node files": "None",
    "additional edge files": "None",
}


#: What a `meta_dict.pt` must say.
_META = {"version", "download_name", "num tasks", "num classes", "task type", "eval metric", "binary", "split"}
_META |= {"add_inverse_edge", "has_node_attr", "has_edge_attr", "additional node files", "additional edge files"}


def _find(name: str, folder: Path, master: Path, trust_files: bool) -> tuple[Path, dict[str, Any]]:
    """Where `name` lies, or is to be put, and its description.

    Understands OGB's own archives, unpacked, and what `ogb.io.DatasetSaver` writes (data in one binary file, and a
    `meta_dict.pt` beside them; in a folder whose name ends in that of the data set).
    """
    import pandas

    underscored = name.replace("-", "_")
    suffix = underscored.split("_", 1)[1]
    table = pandas.read_csv(master, index_col=0, keep_default_na=False)
    usual = [folder / underscored, folder / f"{underscored}_pyg"]
    saved = [path for path in sorted(folder.glob("*")) if path.name.lower().endswith(f"_{underscored}")]
    for place in (*usual, *saved, folder / suffix):
        if (place / "meta_dict.pt").exists():
            meta = _read_meta(place / "meta_dict.pt", trust_files)
            inner = [path for path in place.iterdir() if path.is_dir() and path.name.lower() == suffix]
            return _with_split(inner[0] if inner else place, meta)
        if name in table and (place / "raw").is_dir() and any((place / "raw").iterdir()):
            meta = dict(table[name])
            if meta["binary"] != "True" and (place / "raw" / "data.npz").exists():
                meta.update(_SAVER_META)
            return _with_split(place, meta)
    if name not in table:
        raise ValueError(
            f"OGB has no data set {name!r}, and there is none that ogb.io.DatasetSaver wrote, with its meta_dict.pt, "
            f"in {usual[0]} or {folder / f'submission_{underscored}'}."
        )
    return usual[0], dict(table[name])


def _read_meta(path: Path, trust_files: bool) -> dict[str, Any]:
    meta = _read(path, trust_files)
    if meta.get("is hetero") != "True" and _META - meta.keys():
        raise DatasetUnavailableError(f"{path} lacks {', '.join(sorted(_META - meta.keys()))}.")
    return meta


def _read(path: Path, trust_files: bool) -> dict[str, Any]:
    """Reads a file that holds a dictionary."""
    try:
        return dict(read_torch(path, trust_files))
    except DatasetUnavailableError:
        raise
    except Exception as error:
        raise DatasetUnavailableError(f"{path} cannot be read: {error}") from error


def _with_split(place: Path, meta: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """The description with the split that is there, if it is the only one."""
    splits = [path.name for path in (place / "split").glob("*") if path.is_dir()]
    if meta["split"] not in splits and len(splits) == 1:
        meta["split"] = splits[0]
    return place, meta


def _mask(index: Tensor, size: int) -> Tensor:
    mask = torch.zeros(size, dtype=torch.bool)
    mask[index] = True
    return mask
