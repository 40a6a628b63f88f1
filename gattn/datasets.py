"""One front for the graphs that attention is benchmarked on.

Data lie under `GATTN_DATA` (default: a folder `gattn` in the user's cache), in the layout of PyG's and OGB's loaders,
which download there what is missing.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import unicodedata
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
import fsspec.config
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
    return Path(root or os.environ.get("GATTN_DATA") or platformdirs.user_cache_path("gattn")).expanduser()


def canonical_name(name: str) -> str:
    """The one name of a data set: `"Karate_Club"` gives `"karate"`.

    Raises:
        ValueError: If there is no data set of that name (OGB's are not looked up).
    """
    key = name.lower().replace("_", "-")
    key = _ALIASES.get(key, key)
    if key not in available() and not key.startswith(("ogbn-", "ogbg-")):
        raise ValueError(
            f"unknown data set {name!r}: gattn has {', '.join(available())} and OGB's ogbn-... and ogbg-..."
        )
    return key


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
    key, folder = canonical_name(name), data_root(root)
    if key.startswith(("ogbn-", "ogbg-")):
        _check_split(name, split, ("public",))
        return _load_ogb(key, folder)
    family = next(family for family in _FAMILIES if key in family.names)
    _check_split(name, split, family.splits)
    loader_name = family.names[key]
    files = [folder / file for file in family.files(loader_name, split)]
    if not files:
        return family.load(loader_name, folder, split, seed)
    return _read(name, folder, files, family.url, lambda: family.load(loader_name, folder, split, seed))


def load_text(name: str, root: str | os.PathLike[str] | None = None) -> str:
    """Loads a text by name.

    Names:

    - `tinyshakespeare`: 40 000 lines of Shakespeare's plays, the file `input.txt` of Karpathy's char-rnn.

    Args:
        name: One of the above; case and `-` or `_` do not matter.
        root: Folder of the data. (default: `None`: `GATTN_DATA`, else a folder `gattn` in the user's cache)

    Returns:
        The whole text.

    Raises:
        ValueError: If there is no text of that name.
        DatasetUnavailableError: If the file is not there, or is no text.

    Example:
        >>> import gattn
        >>> text = gattn.datasets.load_text("tinyshakespeare")  # doctest: +SKIP
        >>> len(text), len(set(text))  # doctest: +SKIP
        (1115394, 65)
    """
    key = name.lower().replace("_", "").replace("-", "")
    if key not in _TEXTS:
        raise ValueError(f"unknown text {name!r}: gattn has {', '.join(_TEXTS)}.")
    file, url = _TEXTS[key]
    folder = data_root(root)
    try:
        return (folder / file).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise DatasetUnavailableError(
            f"{key} is not under {folder}. Missing: {file}. Get this file from {url} and put it there, or set "
            "GATTN_DATA (or root=) to a folder that has it."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetUnavailableError(
            f"{folder / file} cannot be read ({type(error).__name__}: {error}): delete it, and get it anew from {url}."
        ) from error


def load_pairs(name: str, root: str | os.PathLike[str] | None = None) -> list[tuple[str, str]]:
    """Loads pairs of sentences by name, each a sentence and its translation.

    Names:

    - `tatoeba`: 169 000 short German sentences in English, the file `deu-eng.zip` of ManyThings' pairs from Tatoeba.

    Text is in Unicode's normal form C; spaces of whatever kind and number are one, invisible characters left out.

    Args:
        name: One of the above; case and `-` or `_` do not matter.
        root: Folder of the data. (default: `None`: `GATTN_DATA`, else a folder `gattn` in the user's cache)

    Returns:
        Pairs (German, English), each once, in the file's order.

    Raises:
        ValueError: If there are no pairs of that name.
        DatasetUnavailableError: If the file is not there, or cannot be read.

    Example:
        >>> import gattn
        >>> pairs = gattn.datasets.load_pairs("tatoeba")  # doctest: +SKIP
        >>> len(pairs), pairs[0]  # doctest: +SKIP
        (169159, ('Hallo!', 'Hi.'))
    """
    key = name.lower().replace("_", "").replace("-", "")
    if key not in _PAIRS:
        raise ValueError(f"unknown pairs {name!r}: gattn has {', '.join(_PAIRS)}.")
    file, member, url = _PAIRS[key]
    folder = data_root(root)
    try:
        with zipfile.ZipFile(folder / file) as archive:
            lines = archive.read(member).decode("utf-8").split("\n")
        pairs = [tuple(_clean(sentence) for sentence in line.split("\t")[:2]) for line in lines if line]
        # Newer files have a third column, which names the authors.
        return list(dict.fromkeys((german, english) for english, german in pairs))
    except FileNotFoundError as error:
        raise DatasetUnavailableError(
            f"{key} is not under {folder}. Missing: {file}. Get this file from {url} and put it there, or set "
            "GATTN_DATA (or root=) to a folder that has it."
        ) from error
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise DatasetUnavailableError(
            f"{folder / file} cannot be read ({type(error).__name__}: {error}): delete it, and get it anew from {url}."
        ) from error


def _clean(sentence: str) -> str:
    """Normal form C, single spaces, nothing invisible."""
    return " ".join(unicodedata.normalize("NFC", sentence).translate(_INVISIBLE).split())


def available() -> list[str]:
    """Names of the data sets that `load` knows, without OGB's."""
    return [name for family in _FAMILIES for name in family.names]


def _check_split(name: str, split: str, splits: tuple[str, ...]) -> None:
    if split not in splits:
        raise ValueError(f"{name} has no split {split!r}: it has {', '.join(repr(known) for known in splits)}.")


def _read(name: str, folder: Path, files: list[Path], url: str, read: Callable[[], Any]) -> Any:
    """Reads a data set that needs the raw `files`, downloading them if need be.

    Whatever goes wrong becomes an error that says what to do, and leaves nothing behind by which the next try would go
    wrong, too: no half downloads, no empty folders.
    """
    missing = [file for file in files if not file.exists()]
    try:
        with _bounded_waiting():
            try:
                return read()
            except Exception as error:
                processed = [file.parent.with_name("processed") for file in files[:1]]
                if missing or isinstance(error, OSError) or not any(place.is_dir() for place in processed):
                    raise
                shutil.rmtree(processed[0])  # cut off while it was written; the raw files are whole, so make it anew
                return read()
    except BaseException as error:
        _remove_traces(folder, missing)
        if not isinstance(error, Exception) or isinstance(error, DatasetUnavailableError):
            raise
        reason = f"{type(error).__name__}: {str(error) or 'no reason given'}".splitlines()[0]
        if missing:
            raise DatasetUnavailableError(
                f"{name} is not under {folder} and could not be downloaded ({reason}). Missing: "
                f"{', '.join(str(file.relative_to(folder)) for file in missing)}. Get these files from {url} and put "
                "them there, or set GATTN_DATA (or root=) to a folder that has them."
            ) from error
        if isinstance(error, PermissionError) or not os.access(folder, os.W_OK):
            raise DatasetUnavailableError(
                f"{folder} cannot be written ({reason}), and loaders write a processed/ folder beside the raw files of "
                f"{name}: copy the data to a folder that can, and set GATTN_DATA (or root=) to it."
            ) from error
        raise DatasetUnavailableError(
            f"the files of {name} under {files[0].parent.parent} cannot be read ({reason}): "
            f"delete that folder, get the files anew from {url}, and load again."
        ) from error


@contextmanager
def _bounded_waiting() -> Iterator[None]:
    """Lets no download wait for ever for a server that does not answer."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_TIMEOUT_SECONDS, sock_read=_TIMEOUT_SECONDS)
    options = {"client_kwargs": {"timeout": timeout}}
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT_SECONDS)
    try:
        with mock.patch.dict(fsspec.config.conf, {"http": options, "https": options}):
            yield
    finally:
        socket.setdefaulttimeout(before)


def _remove_traces(folder: Path, missing: list[Path]) -> None:
    """Removes what a failed download left of the `missing` files, and the folders that it made for them."""
    for file in missing:
        if file.is_file():
            file.unlink()
        for parent in file.parents:
            if folder not in parent.parents or not parent.is_dir():
                break
            siblings = parent.with_name("processed")
            if parent.name == "raw" and siblings.is_dir() and not any(siblings.iterdir()):
                siblings.rmdir()
            if any(parent.iterdir()):
                break
            parent.rmdir()


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

#: Texts by name: the file under the root, and where it comes from.
_TEXTS = {
    "tinyshakespeare": (
        "tinyshakespeare/input.txt",
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    )
}

#: Pairs of sentences by name: the file under the root, the file in it, and where it comes from.
_PAIRS = {"tatoeba": ("tatoeba/deu-eng.zip", "deu.txt", "https://www.manythings.org/anki/deu-eng.zip")}

#: Soft hyphens and spaces without width.
_INVISIBLE = dict.fromkeys((0xAD, 0x200B, 0xFEFF))

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
    classes += [numpy.ndarray, numpy.dtype]
    classes += [kind for kind in vars(numpy.dtypes).values() if isinstance(kind, type)]
    core = numpy._core if hasattr(numpy, "_core") else numpy.core
    for function in (core.multiarray._reconstruct, core.multiarray.scalar):
        # NumPy 1 wrote its own old name into files.
        classes += [function, (function, f"numpy.core.multiarray.{function.__name__}")]
    return classes


def _load_ogb(name: str, folder: Path) -> Any:
    ogb = _import_ogb()
    is_node = name.startswith("ogbn-")
    module = ogb.nodeproppred.dataset_pyg if is_node else ogb.graphproppred.dataset_pyg
    loader = module.PygNodePropPredDataset if is_node else module.PygGraphPropPredDataset
    url = f"https://ogb.stanford.edu/docs/{'node' if is_node else 'graph'}prop/#{name}"
    place, meta = _find_ogb(name, folder, Path(module.__file__).with_name("master.csv"))
    if meta.get("is hetero") == "True":
        raise ValueError(f"{name} is a heterogeneous graph, which gattn.datasets does not load.")
    files = [place / "raw" / file for file in _ogb_raw_files(meta, is_node)]
    if place.is_dir() and any(file.exists() for file in files):
        # ogb would replace the whole folder by a download, whatever else is in it.
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise DatasetUnavailableError(
                f"{place / 'raw'} holds a part of {name}, but not {', '.join(missing)}. Get the missing files from "
                f"{url}, or move the folder away and load again."
            )
        release = place / f"RELEASE_v{meta['version']}.txt"
        if not release.exists():
            raise DatasetUnavailableError(
                f"{place} holds data of {name}, but not {release.name}, by which ogb tells that they are of the newest "
                f"version. If they are, make an empty file of that name there; if not, move the folder away and load "
                "again."
            )
        arguments: dict[str, Any] = {"meta_dict": {**meta, "dir_path": str(place)}}
    else:
        if (place.parent / "meta_dict.pt").exists() or (place / "meta_dict.pt").exists():
            raise DatasetUnavailableError(
                f"{place} has no raw/ folder: unpack there the zip file that the saver wrote."
            )
        for empty in (place, folder / f"{place.name}_pyg"):
            _remove_empty(empty)
        archive = folder / f"{meta['download_name']}.zip"
        if archive.exists() and not zipfile.is_zipfile(archive):
            archive.unlink()  # a download that was cut off
        arguments = {"root": str(folder)}

    def read() -> Any:
        # Asking for a data set by name is the consent that ogb's question on standard input is for.
        with (
            mock.patch.object(module, "decide_download", return_value=True),
            mock.patch.object(module, "input", _never_ask, create=True),
        ):
            return loader(name, **arguments)

    try:
        dataset = _read(name, folder, files, url, read)
    finally:
        _remove_empty(place)
    if not is_node:
        return dataset
    data = dataset[0]
    if data.y.dim() == 2 and data.y.size(1) == 1:
        data.y = data.y.squeeze(1)
    parts = dataset.get_idx_split()
    for mask, part in (("train_mask", "train"), ("val_mask", "valid"), ("test_mask", "test")):
        data[mask] = _mask(torch.as_tensor(parts[part]).long(), data.num_nodes)
    return data


def _never_ask(question: str = "") -> str:
    raise DatasetUnavailableError(f"OGB's loader wants to know, which gattn never asks: {question.strip()}")


def _remove_empty(place: Path) -> None:
    """Removes a folder in which there is no file."""
    if place.is_dir() and not any(path.is_file() for path in place.rglob("*")):
        shutil.rmtree(place)


def _ogb_raw_files(meta: dict[str, Any], is_node: bool) -> list[str]:
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


def _find_ogb(name: str, folder: Path, master: Path) -> tuple[Path, dict[str, Any]]:
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
            try:
                meta = dict(torch.load(place / "meta_dict.pt", weights_only=True))
            except Exception as error:
                raise DatasetUnavailableError(f"{place / 'meta_dict.pt'} cannot be read: {error}") from error
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
