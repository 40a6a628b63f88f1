"""OGB's data sets of node and graph properties."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, InMemoryDataset

from gattn.datasets.checks import check_edges_of_graphs
from gattn.datasets.download import check_unpacked, download, read_dataset
from gattn.datasets.errors import DatasetUnavailableError
from gattn.datasets.registry import GraphFamily, register

__all__ = ["OGB"]


@register
class OGB(GraphFamily):
    """The `Open Graph Benchmark <https://arxiv.org/abs/2005.00687>`_, except for heterogeneous graphs."""

    year = 2020
    prefixes = ("ogbn-", "ogbg-")
    splits = ("public",)

    def load(self, name: str, root: Path, split: str, seed: int, trust_files: bool) -> Data | InMemoryDataset:
        """Loads a data set in OGB's own layout, or one that `ogb.io.DatasetSaver` wrote."""
        from gattn.datasets.sets import _ogb_classes  # needs the package ogb

        is_node = name.startswith("ogbn-")
        module = _ogb_classes.node_module if is_node else _ogb_classes.graph_module
        dataset_class = _ogb_classes.PygNodePropPredDataset if is_node else _ogb_classes.PygGraphPropPredDataset
        page = f"https://ogb.stanford.edu/docs/{'node' if is_node else 'graph'}prop/#{name}"
        folder, meta = _find(name, root, Path(module.__file__).with_name("master.csv"), trust_files)
        if meta.get("is hetero") == "True":
            raise ValueError(f"{name} is a heterogeneous graph, which gattn.datasets does not load.")
        files = [folder / "raw" / file for file in _raw_files(meta, is_node)]
        release = folder / f"RELEASE_v{meta['version']}.txt"
        if folder.is_dir() and any(file.exists() for file in files):
            _check_complete(name, folder, files, release, page)
        else:
            if (folder.parent / "meta_dict.pt").exists() or (folder / "meta_dict.pt").exists():
                raise DatasetUnavailableError(
                    f"{folder} has no folder raw/: unpack the zip file that the saver wrote in it."
                )
            for empty in (folder, root / f"{folder.name}_pyg"):
                _remove_empty(empty)

        def fetch(missing: list[Path]) -> None:
            _fetch(meta, folder, root, release.name)

        def read() -> Any:
            dataset = dataset_class(name, {**meta, "dir_path": str(folder)}, trust_files)
            check_edges_of_graphs(dataset)
            return dataset

        try:
            dataset = read_dataset(name, root, files, page, fetch, read)
        finally:
            _remove_empty(folder)
        if not is_node:
            return dataset
        try:
            return _with_masks(dataset)
        except DatasetUnavailableError:
            raise
        except Exception as error:
            raise DatasetUnavailableError(
                f"the labels or the split of {name} under {folder} cannot be read ({type(error).__name__}: {error}): "
                f"get these files again from {page}."
            ) from error


def _check_complete(name: str, folder: Path, files: list[Path], release: Path, page: str) -> None:
    """Refuses incomplete data, because a download would replace the whole folder, whatever else is in it."""
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise DatasetUnavailableError(
            f"{folder / 'raw'} holds part of {name}, but not {', '.join(missing)}. Get the missing files from "
            f"{page}, or move the folder away and load again."
        )
    if not release.exists():
        raise DatasetUnavailableError(
            f"{folder} holds data of {name}, but not {release.name}, which tells ogb that they are of the newest "
            "version. If they are, make an empty file of that name there; if not, move the folder away and load again."
        )


def _with_masks(dataset: Any) -> Data:
    """Returns the only graph of a data set, with the split as masks."""
    data = dataset[0]
    if data.y.dim() == 2 and data.y.size(1) == 1:
        data.y = data.y.squeeze(1)
    parts = dataset.get_idx_split()
    for mask, part in (("train_mask", "train"), ("val_mask", "valid"), ("test_mask", "test")):
        data[mask] = _mask(torch.as_tensor(parts[part]).long(), data.num_nodes)
    return data


def _fetch(meta: dict[str, Any], folder: Path, root: Path, release: str) -> None:
    """Unpacks the archive of a data set, after downloading it if it is missing."""
    if folder.exists():
        raise DatasetUnavailableError(f"{folder} exists, but holds none of the data: move it away and load again.")
    archive = root / f"{meta['download_name']}.zip"
    if archive.exists() and not zipfile.is_zipfile(archive):
        archive.unlink()  # an interrupted download
    root.mkdir(parents=True, exist_ok=True)
    # If it were unpacked into the root, as OGB does, an archive could replace the files of other data sets.
    with tempfile.TemporaryDirectory(dir=root) as temporary:
        source, unpacked = archive, Path(temporary) / "unpacked"
        if not archive.exists():
            source = Path(temporary) / archive.name
            download(meta["url"].replace("http://", "https://"), source)
        check_unpacked(source)
        with zipfile.ZipFile(source) as file:
            file.extractall(unpacked)
        if not (unpacked / meta["download_name"] / release).exists():
            raise ValueError(
                f"{archive.name} has no {meta['download_name']}/{release}, so it is not the newest version"
            )
        shutil.move(unpacked / meta["download_name"], folder)
    archive.unlink(missing_ok=True)


def _remove_empty(folder: Path) -> None:
    """Removes a folder that contains no files."""
    if folder.is_dir() and not any(path.is_file() for path in folder.rglob("*")):
        shutil.rmtree(folder)


def _raw_files(meta: dict[str, Any], is_node: bool) -> list[str]:
    """The files without which ogb would start a download, or fail."""
    label = "node-label" if is_node else "graph-label"
    if meta["binary"] == "True":
        return ["data.npz", f"{label}.npz"]
    features = [part for part in ("node", "edge") if meta[f"has_{part}_attr"] == "True"]
    names = ["edge", *(f"{part}-feat" for part in features), "num-node-list", "num-edge-list", label]
    return [f"{name}.csv.gz" for name in names]


#: The description of a data set that OGB publishes as text, once DatasetSaver has written it.
_SAVER_META = {
    "binary": "True",
    "add_inverse_edge": "False",
    "additional node files": "None",
    "additional edge files": "None",
}


#: The entries that a `meta_dict.pt` must have.
_META = {"version", "download_name", "num tasks", "num classes", "task type", "eval metric", "binary", "split"}
_META |= {"add_inverse_edge", "has_node_attr", "has_edge_attr", "additional node files", "additional edge files"}


def _find(name: str, root: Path, master: Path, trust_files: bool) -> tuple[Path, dict[str, Any]]:
    """Returns the folder in which `name` lies, or belongs, and its description.

    Understands OGB's own archives after unpacking, and what `ogb.io.DatasetSaver` writes: the data in one binary file
    with a `meta_dict.pt` beside them, in a folder whose name ends in the name of the data set.
    """
    import pandas

    underscored = name.replace("-", "_")
    suffix = underscored.split("_", 1)[1]
    table = pandas.read_csv(master, index_col=0, keep_default_na=False)
    usual = [root / underscored, root / f"{underscored}_pyg"]
    saved = [path for path in sorted(root.glob("*")) if path.name.lower().endswith(f"_{underscored}")]
    for folder in (*usual, *saved, root / suffix):
        if (folder / "meta_dict.pt").exists():
            meta = _read_meta(folder / "meta_dict.pt", trust_files)
            inner = [path for path in folder.iterdir() if path.is_dir() and path.name.lower() == suffix]
            return _with_split(inner[0] if inner else folder, meta)
        if name in table and (folder / "raw").is_dir() and any((folder / "raw").iterdir()):
            meta = dict(table[name])
            if meta["binary"] != "True" and (folder / "raw" / "data.npz").exists():
                meta.update(_SAVER_META)
            return _with_split(folder, meta)
    if name not in table:
        raise ValueError(
            f"OGB has no data set {name!r}, and there is none that ogb.io.DatasetSaver wrote, with its meta_dict.pt, "
            f"in {usual[0]} or {root / f'submission_{underscored}'}."
        )
    return usual[0], dict(table[name])


def _read_meta(path: Path, trust_files: bool) -> dict[str, Any]:
    from gattn.datasets.sets._ogb_classes import read_dictionary

    meta = read_dictionary(path, trust_files)
    if meta.get("is hetero") != "True" and _META - meta.keys():
        raise DatasetUnavailableError(f"{path} lacks {', '.join(sorted(_META - meta.keys()))}.")
    return meta


def _with_split(folder: Path, meta: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Returns the description with the split on disk, if there is only one."""
    splits = [path.name for path in (folder / "split").glob("*") if path.is_dir()]
    if meta["split"] not in splits and len(splits) == 1:
        meta["split"] = splits[0]
    return folder, meta


def _mask(index: Tensor, size: int) -> Tensor:
    mask = torch.zeros(size, dtype=torch.bool)
    mask[index] = True
    return mask
