"""The functions that load a data set by its name."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs
from torch_geometric.data import Data, InMemoryDataset, TemporalData

from gattn.datasets.registry import families, sentence_pairs, texts

__all__ = ["available", "canonical_name", "data_root", "load", "load_pairs", "load_text"]


def data_root(root: str | os.PathLike[str] | None = None) -> Path:
    """Returns the folder that data sets are read from.

    Args:
        root: The folder. (default: `None`, that is `GATTN_DATA` if it is set, and otherwise a folder `gattn` in the
            user's cache)

    Example:
        >>> from gattn.datasets import data_root
        >>> data_root("~/data").name
        'data'
    """
    return Path(root or os.environ.get("GATTN_DATA") or platformdirs.user_cache_path("gattn")).expanduser()


def available() -> list[str]:
    """Lists the names of the graphs that `load` knows, without those of OGB.

    Example:
        >>> from gattn.datasets import available
        >>> available()[:4]
        ['karate', 'collegemsg', 'cora', 'citeseer']
    """
    return [name for family in families() for name in family.names]


def canonical_name(name: str) -> str:
    """Returns the one name of a data set that has several spellings.

    Args:
        name: Any spelling. Names that begin like those of OGB are not looked up.

    Raises:
        ValueError: If there is no data set of that name.

    Example:
        >>> from gattn.datasets import canonical_name
        >>> canonical_name("Karate_Club")
        'karate'
    """
    key = name.lower().replace("_", "-")
    for family in families():
        if key in family.aliases:
            return family.aliases[key]
        if key in family.names or key.startswith(family.prefixes):
            return key
    prefixes = [f"{prefix}..." for family in families() for prefix in family.prefixes]
    raise ValueError(
        f"unknown data set {name!r}: gattn has {', '.join(available())}, and those of OGB ({', '.join(prefixes)}). "
        f"Texts ({', '.join(texts())}) have load_text, and sentence pairs ({', '.join(sentence_pairs())}) load_pairs."
    )


def load(
    name: str,
    *,
    split: str = "public",
    seed: int = 0,
    root: str | os.PathLike[str] | None = None,
    trust_files: bool = False,
) -> Data | InMemoryDataset | TemporalData:
    """Loads a graph, or a set of graphs, by name, with the masks of a split.

    The names, and the splits that they have:

    - `karate`: `"public"` is gattn's own: of each class, in the order of the nodes, the first two are for training, the
      next two for validation and the rest for the test. `"random"` does the same in a random order.
    - `cora`, `citeseer`, `pubmed`: `"public"` (20 nodes per class for training, 500 nodes for validation, 1000 for the
      test), `"full"` (as before, but all other nodes are for training), `"geom-gcn"` (ten fixed splits) and `"random"`
      (of the same sizes as the public one).
    - `computers`, `photo` (Amazon), `cs`, `physics` (Coauthor): no split was published, so `"public"` and `"random"`
      are the same: 20 nodes per class for training, 30 times the number of classes for validation, and the rest for the
      test. `"60-20-20"` draws these percentages of all nodes, and `"luo"` is the one fixed split of these sizes with
      which `Luo et al., 2024 <https://arxiv.org/abs/2406.08993>`_ and others before them report results.
    - `roman-empire`, `amazon-ratings`, `minesweeper`, `tolokers`, `questions`: `"public"` (ten fixed splits) and
      `"random"` (as for Amazon).
    - `wikics`: `"public"` (twenty fixed splits; the two published validation sets are merged) and `"random"` (as for
      Amazon).
    - `zinc-12k` and the peptides of LRGB, `peptides-func` and `peptides-struct`: `"public"`. ZINC is published as
      pickles, so the first call needs `trust_files=True`, which downloads and converts them.
    - `collegemsg`: 59 835 messages between 1 899 users, each with its time in seconds since 1970. No split was
      published, so `"public"` has all messages in the order of time; PyG's `train_val_test_split()` divides them by
      time.
    - OGB's data sets of node and graph properties under the names that OGB gives them, `ogbn-...` and `ogbg-...`:
      `"public"`.

    Args:
        name: One of these names. Upper and lower case are the same, and so are `-` and `_`.
        split: One of the splits above. (default: `"public"`)
        seed: The number of a fixed split, modulo how many there are, or the seed of a random split. (default: `0`)
        root: The folder of the data. (default: `None`, the folder that `data_root` returns)
        trust_files: Whether files may run code while they are read. Use it only for files that are refused without it
            and whose source you trust. (default: `False`)

    Returns:
        PyG's `Data` with the boolean masks `train_mask`, `val_mask` and `test_mask` of shape `[N]`. For `ogbg-...`,
        `zinc-12k` and peptides, a data set of many graphs, whose method `get_idx_split()` returns the split. For
        `collegemsg`, PyG's `TemporalData` with `src`, `dst` and `t`, and without masks.

    Raises:
        ValueError: If there is no data set or no split of that name.
        DatasetUnavailableError: If the data are missing and cannot be downloaded, or cannot be read safely.
        ImportError: If the data set is one of OGB's and the package `ogb` is not installed.

    Example:
        >>> import gattn
        >>> data = gattn.datasets.load("karate")
        >>> data.num_nodes, data.num_edges, int(data.train_mask.sum())
        (34, 156, 8)
    """
    key = canonical_name(name)
    family = next(family for family in families() if key in family.names or key.startswith(family.prefixes))
    if split not in family.splits:
        raise ValueError(f"{name} has no split {split!r}: it has {', '.join(repr(known) for known in family.splits)}.")
    return family.load(key, data_root(root), split, seed, trust_files)


def load_text(name: str, root: str | os.PathLike[str] | None = None) -> str:
    """Loads a text by name.

    The names:

    - `tinyshakespeare`: 40 000 lines of Shakespeare's plays, the file `input.txt` of Karpathy's char-rnn.

    Args:
        name: One of these names. Upper and lower case are the same, and `-` and `_` are ignored.
        root: The folder of the data. (default: `None`, the folder that `data_root` returns)

    Returns:
        The whole text.

    Raises:
        ValueError: If there is no text of that name.
        DatasetUnavailableError: If the file is missing and cannot be downloaded, or is not a text.

    Example:
        >>> import gattn
        >>> text = gattn.datasets.load_text("tinyshakespeare")  # doctest: +SKIP
        >>> len(text), len(set(text))  # doctest: +SKIP
        (1115394, 65)
    """
    key = _without_separators(name)
    if key not in texts():
        raise ValueError(f"unknown text {name!r}: gattn has {', '.join(texts())}.")
    return texts()[key].load(data_root(root))


def load_pairs(name: str, root: str | os.PathLike[str] | None = None) -> list[tuple[str, str]]:
    """Loads pairs of sentences by name, each a sentence and its translation.

    The names:

    - `tatoeba`: short German sentences with English translations, the file `deu-eng.zip` that ManyThings selected from
      Tatoeba. The file grows with time: gattn's results are for the version of 2018-04-07, which has 169 159 pairs.

    The text is in Unicode's normal form C. Any sequence of spaces of any sort becomes a single one, and invisible
    characters are removed.

    Args:
        name: One of these names. Upper and lower case are the same, and `-` and `_` are ignored.
        root: The folder of the data. (default: `None`, the folder that `data_root` returns)

    Returns:
        Pairs (German, English) in the order of the file, without duplicates.

    Raises:
        ValueError: If there are no pairs of that name.
        DatasetUnavailableError: If the file is missing and cannot be downloaded, or cannot be read.

    Warns:
        UserWarning: If a newer version was downloaded than the one that gattn's results were measured with.

    Example:
        >>> import gattn
        >>> pairs = gattn.datasets.load_pairs("tatoeba")  # doctest: +SKIP
        >>> len(pairs), pairs[0]  # doctest: +SKIP
        (169159, ('Hallo!', 'Hi.'))
    """
    key = _without_separators(name)
    if key not in sentence_pairs():
        raise ValueError(f"unknown pairs {name!r}: gattn has {', '.join(sentence_pairs())}.")
    return sentence_pairs()[key].load(data_root(root))


def _without_separators(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
