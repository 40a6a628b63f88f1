"""The data sets for benchmarks of attention, by name.

Data are stored in `GATTN_DATA` (default: a folder `gattn` in the user's cache), in the layout that PyG's and OGB's
loaders use; missing files are downloaded to it. Files are not trusted: none of them can run code. A table in
`SECURITY.md` says how each data set is read and verified.

To add a data set, add one file to `gattn/datasets/sets/`; its docstring says what goes into it.
"""

from gattn.datasets.errors import DatasetUnavailableError
from gattn.datasets.loading import available, canonical_name, data_root, load, load_pairs, load_text

__all__ = ["DatasetUnavailableError", "available", "canonical_name", "data_root", "load", "load_pairs", "load_text"]
