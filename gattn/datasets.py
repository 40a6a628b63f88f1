"""One front for the graphs that attention is benchmarked on.

Data lie under `GATTN_DATA` (default: a folder `gattn` in the user's cache), in the layout of PyG's and OGB's loaders;
what is missing is downloaded there. Files are not trusted: none of them can run code. A table in `SECURITY.md` says how
each is read and verified.
"""

from __future__ import annotations

import os
import unicodedata
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import scipy.sparse
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.datasets import Amazon, Coauthor, HeterophilousGraphDataset, KarateClub, Planetoid
from torch_geometric.io import read_txt_array
from torch_geometric.io.npz import parse_npz
from torch_geometric.transforms import RandomNodeSplit
from torch_geometric.utils import coalesce, index_to_mask, remove_self_loops

from gattn.files import (
    CheckedDataset,
    DatasetUnavailableError,
    check_edges,
    csr_matrix,
    download,
    read_dataset,
    read_pickle,
)

__all__ = ["DatasetUnavailableError", "available", "canonical_name", "data_root", "load", "load_pairs", "load_text"]

# Where no split is published: as many nodes a class as in Shchur et al., https://arxiv.org/abs/1811.05868.
_TRAIN_PER_CLASS = 20
_VALIDATION_PER_CLASS = 30


@dataclass(frozen=True)
class _Family:
    """Data sets with one loader."""

    names: dict[str, str]
    """Our name: the loader's."""
    splits: tuple[str, ...]
    load: Callable[[str, Path, str, int, bool], Data]
    """Loads (the loader's name, root, split, seed, whether files are trusted)."""
    files: Callable[[str, str], list[str]]
    """Raw files of (the loader's name, split), relative to the root."""
    page: str
    """Where a person gets the files."""
    url: Callable[[str], str] = str
    """Where a file of that name is downloaded from."""


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


def load(
    name: str,
    *,
    split: str = "public",
    seed: int = 0,
    root: str | os.PathLike[str] | None = None,
    trust_files: bool = False,
) -> Any:
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
        trust_files: Whether files may run code while they are read. Only for files of your own that are refused without
            it. (default: `False`)

    Returns:
        PyG's `Data`, with boolean `train_mask`, `val_mask` and `test_mask` of shape `[N]`; for `ogbg-...` OGB's data
        set, whose `get_idx_split()` has the split.

    Raises:
        ValueError: If there is no data set or no split of that name.
        DatasetUnavailableError: If the data are neither on disk nor to be downloaded, or cannot be read safely.
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
        from gattn import ogb_datasets  # needs OGB's package

        return ogb_datasets.load(key, folder, trust_files)
    family = next(family for family in _FAMILIES if key in family.names)
    _check_split(name, split, family.splits)
    loader_name = family.names[key]
    files = family.files(loader_name, split)

    def read() -> Data:
        return family.load(loader_name, folder, split, seed, trust_files)

    def fetch(missing: list[Path]) -> None:
        for file in missing:
            download(family.url(file.name), file, _SHA256.get(file.name))

    return read_dataset(name, folder, [folder / file for file in files], family.page, fetch, read) if files else read()


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


class _CheckedPlanetoid(CheckedDataset, Planetoid):
    """Reads the raw files without Python's `pickle`."""

    def process(self) -> None:
        data = _read_planetoid(Path(self.raw_dir), self.name.lower(), self.trust_files)
        if self.split == "geom-gcn":
            masks: dict[str, list[Tensor]] = {"train_mask": [], "val_mask": [], "test_mask": []}
            for i in range(10):
                file = Path(self.raw_dir) / f"{self.name.lower()}_split_0.6_0.2_{i}.npz"
                with np.load(file, allow_pickle=False) as part:
                    for name, columns in masks.items():
                        columns.append(torch.from_numpy(part[name]))
            for name, columns in masks.items():
                data[name] = torch.stack(columns, dim=1)
        self.save([data], self.processed_paths[0])


class _CheckedNpz(CheckedDataset):
    """Reads the format of Shchur et al., and checks the indices."""

    def process(self) -> None:
        with np.load(self.raw_paths[0], allow_pickle=False) as file:
            parts = {name: file[name] for name in file.files if name.startswith(("adj_", "attr_")) or name == "labels"}
        adjacency, features = (
            csr_matrix(*(parts[f"{prefix}_{part}"] for part in ("data", "indices", "indptr", "shape")))
            for prefix in ("adj", "attr")
        )
        if adjacency.shape != (features.shape[0],) * 2:
            raise ValueError(f"{features.shape[0]} nodes have an adjacency matrix of shape {adjacency.shape}")
        self.save([parse_npz(parts, to_undirected=True)], self.processed_paths[0])


class _CheckedAmazon(_CheckedNpz, Amazon):
    pass


class _CheckedCoauthor(_CheckedNpz, Coauthor):
    pass


class _CheckedHeterophilous(CheckedDataset, HeterophilousGraphDataset):
    """Checks the indices before PyG reads them, with NumPy and without pickles."""

    def process(self) -> None:
        with np.load(self.raw_paths[0], allow_pickle=False) as file:
            edges = torch.from_numpy(file["edges"]).t()
            check_edges(Data(edge_index=edges, num_nodes=file["node_features"].shape[0]))
        super().process()


def _read_planetoid(folder: Path, name: str, trust_files: bool) -> Data:
    """As PyG's `read_planetoid_data`, bit for bit."""

    def read(part: str) -> Tensor:
        content = read_pickle(folder / f"ind.{name}.{part}", trust_files)
        content = content.toarray() if scipy.sparse.issparse(content) else content
        return torch.from_numpy(content).to(torch.float)

    _, tx, allx, y, ty, ally = map(read, ("x", "tx", "allx", "y", "ty", "ally"))
    graph = read_pickle(folder / f"ind.{name}.graph", trust_files)
    test = read_txt_array(str(folder / f"ind.{name}.test.index"), dtype=torch.long)
    in_order = test.sort()[0]

    if name == "citeseer":  # without its isolated test nodes, which get zeros
        rows = in_order - in_order[0]
        tx = torch.zeros(int(rows[-1]) + 1, tx.size(1)).index_copy(0, rows, tx)
        ty = torch.zeros(int(rows[-1]) + 1, ty.size(1)).index_copy(0, rows, ty)

    features = torch.cat([allx, tx])
    features[test] = features[in_order]
    labels = torch.cat([ally, ty]).max(dim=1)[1]
    labels[test] = labels[in_order]

    size = labels.size(0)
    sources = [node for node, neighbours in graph.items() for _ in neighbours]
    targets = [neighbour for neighbours in graph.values() for neighbour in neighbours]
    data = Data(x=features, edge_index=torch.tensor([sources, targets]), y=labels)
    edges, _ = remove_self_loops(check_edges(data).edge_index)
    data.edge_index = coalesce(edges, num_nodes=size, sort_by_row=False)
    known = torch.arange(size)
    data.train_mask = known < y.size(0)
    data.val_mask = (known >= y.size(0)) & (known < y.size(0) + 500)
    data.test_mask = index_to_mask(test, size=size)
    return data


def _load_karate(name: str, folder: Path, split: str, seed: int, trust_files: bool) -> Data:
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


def _load_planetoid(name: str, folder: Path, split: str, seed: int, trust_files: bool) -> Data:
    part = "public" if split == "random" else split
    data = check_edges(_CheckedPlanetoid(str(folder), name, part, trust_files=trust_files)[0])
    if split == "random":
        return _random_split(data, seed, "random", num_val=500, num_test=1000)
    return _pick_column(data, seed) if split == "geom-gcn" else data


def _load_amazon(name: str, folder: Path, split: str, seed: int, trust_files: bool) -> Data:
    return _random_split_by_class(check_edges(_CheckedAmazon(str(folder), name, trust_files=trust_files)[0]), seed)


def _load_coauthor(name: str, folder: Path, split: str, seed: int, trust_files: bool) -> Data:
    return _random_split_by_class(check_edges(_CheckedCoauthor(str(folder), name, trust_files=trust_files)[0]), seed)


def _load_heterophilous(name: str, folder: Path, split: str, seed: int, trust_files: bool) -> Data:
    data = check_edges(_CheckedHeterophilous(str(folder), name, trust_files=trust_files)[0])
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

#: Digests of published files, where they are known; downloads are verified by them.
_SHA256 = {
    "ind.citeseer.allx": "2ac30345d95c9ec933a817ee0bdd6a5f077f8c184a20e696910192d534414668",
    "ind.citeseer.ally": "f704b2d986dde6c2669934de1f3ae5696a6cf9455c0f6b2646a2d135ea0a1c95",
    "ind.citeseer.graph": "d79a4ef9d3e7169aee8946145f6b7306e35bc79bffad26346cfb94e10e9912a7",
    "ind.citeseer.test.index": "2af990671580b6b2df5d158d1038f8292e30c9cd821b5453f399659b25b723d4",
    "ind.citeseer.tx": "539a8906a2da97628d212f2fdd668c109a8b3f0d36574b59e5d3fd5b5303da21",
    "ind.citeseer.ty": "55e5bd1ba1e733a04598753ad1a8d57957f4b8f89e74519f41f4f4938767e4ce",
    "ind.citeseer.x": "d20de19150741e555de0ed037195630fc194114ebc7fd72ced62810148aa22f6",
    "ind.citeseer.y": "8ba87e515d8e3ee3cf52f6d2c5b86aa73f11ecad825a808455209ec26cd54924",
    "ind.cora.allx": "9419ba2f26f5c35243db64aba110e0f35a04851609e0dc5433450676ca6b8543",
    "ind.cora.ally": "2b998f5cc7fedc86e7f97ca2498f47a1ffc1462c29e2d578b23bf3f62b6e7d71",
    "ind.cora.graph": "58f13302f39dde8852dad6fe6d15b89b077b6d7f837626bce671ef80344b383d",
    "ind.cora.test.index": "297ce89af2b51a6a194181c7dbe1796c6a1cf9cd9349a88383b1b1e227867875",
    "ind.cora.tx": "b9afbaa4a400df991f6f02ef677e1e44da55ffc04801fd02f9e673987829226a",
    "ind.cora.ty": "41f5ac76596a1699cc33f53084a2419e92961c42bb75f36fc38e616d348532ad",
    "ind.cora.x": "23cfa55d91c6f624233f5eb7b6e3f141f1bd2b2ae39608a63cf5d084bb27baab",
    "ind.cora.y": "94465c14eb53e04ca262198dcbb2521ee8af60fb3f3d546cd6ca24a511b0e7d1",
    "amazon_electronics_photo.npz": "bdb1feb8e6ff42ee44024b04479145029c563fd42fc31bff80af20887ba0439a",
    "minesweeper.npz": "e664c8dacf1e8ac466c2c09ed4b237bd2c5541f47a6eae9c6092cb87f16412b3",
}

_FAMILIES = (
    _Family({"karate": "karate"}, ("public", "random"), _load_karate, lambda name, split: [], ""),
    _Family(
        {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"},
        ("public", "full", "geom-gcn", "random"),
        _load_planetoid,
        _planetoid_files,
        "https://github.com/kimiyoung/planetoid/tree/master/data (the splits of geom-gcn from "
        "https://github.com/graphdml-uiuc-jlu/geom-gcn/tree/master/splits)",
        lambda file: f"{f'{Planetoid.geom_gcn_url}/splits' if file.endswith('.npz') else Planetoid.url}/{file}",
    ),
    _Family(
        {"computers": "Computers", "photo": "Photo"},
        ("public", "random"),
        _load_amazon,
        lambda name, split: [f"{name}/raw/amazon_electronics_{name.lower()}.npz"],
        _SHCHUR,
        lambda file: f"{Amazon.url}{file}",
    ),
    _Family(
        {"cs": "CS", "physics": "Physics"},
        ("public", "random"),
        _load_coauthor,
        lambda name, split: [f"{name}/raw/ms_academic_{name[:3].lower()}.npz"],
        _SHCHUR,
        lambda file: f"{Coauthor.url}{file}",
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
        lambda file: f"{HeterophilousGraphDataset.url}/{file}",
    ),
)
