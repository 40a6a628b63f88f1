"""Twelve thousand molecules of ZINC."""

from __future__ import annotations

from pathlib import Path

from torch_geometric import datasets
from torch_geometric.data import InMemoryDataset

from gattn.datasets.download import download, download_archive, read_dataset
from gattn.datasets.errors import DatasetUnavailableError
from gattn.datasets.processed import PARTS, CheckedDataset, JoinedDataset
from gattn.datasets.registry import GraphFamily, register


class _CheckedZINC(CheckedDataset, datasets.ZINC):
    """Reads the processed files safely; the raw ones are pickles of tensors, which only `trust_files` lets PyG read."""


@register
class ZINC(GraphFamily):
    """The subset of `Dwivedi et al., 2020 <https://arxiv.org/abs/2003.00982>`_."""

    year = 2020
    names = {"zinc-12k": "ZINC"}
    aliases = {"zinc": "zinc-12k"}
    splits = ("public",)
    page = "https://github.com/graphdeeplearning/benchmarking-gnns"

    def load(self, name: str, root: Path, split: str, seed: int, trust_files: bool) -> InMemoryDataset:
        """Loads all molecules, whose method `get_idx_split()` returns the split.

        Raises:
            DatasetUnavailableError: If the data would have to be made from pickles, and these are not trusted.
        """
        folder = root / self.names[name]
        processed = [folder / "subset" / "processed" / f"{part}.pt" for part in PARTS]
        if trust_files and not all(file.exists() for file in processed):
            files = [folder / "raw" / f"{part}.{ending}" for ending in ("pickle", "index") for part in PARTS]
        elif all(file.exists() for file in processed):
            files = processed
        else:
            raise DatasetUnavailableError(
                f"{name} is not under {root}. Missing: {folder.name}/subset/processed/*.pt, which PyG makes of "
                f"pickles, and these could run any code. If you trust {self.page}, call "
                f"gattn.datasets.load({name!r}, trust_files=True) once, which downloads and converts them; or set "
                "GATTN_DATA (or root=) to a folder that has them."
            )

        def fetch(missing: list[Path]) -> None:
            if any(file.suffix == ".pickle" for file in missing):
                download_archive(datasets.ZINC.url, "molecules", folder / "raw")
            for file in missing:
                if file.suffix == ".index":
                    download(datasets.ZINC.split_url.format(file.stem), file)

        def read() -> JoinedDataset:
            return JoinedDataset([_CheckedZINC(str(folder), True, part, trust_files=trust_files) for part in PARTS])

        return read_dataset(name, root, files, self.page, fetch, read)
