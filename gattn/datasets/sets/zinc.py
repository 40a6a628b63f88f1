"""Twelve thousand molecules of ZINC."""

from __future__ import annotations

from pathlib import Path

from torch_geometric import datasets
from torch_geometric.data import InMemoryDataset

from gattn.datasets.download import download, download_archive, read_dataset
from gattn.datasets.errors import DatasetUnavailableError
from gattn.datasets.processed import PARTS, CheckedDataset, JoinedDataset
from gattn.datasets.registry import GraphFamily, register

__all__ = ["ZINC"]


class _CheckedZINC(CheckedDataset, datasets.ZINC):
    """Reads the processed files safely; PyG makes them from pickles, which it can only read with `trust_files`."""

    def _process(self) -> None:
        if not (self.trust_files or all(Path(path).exists() for path in self.processed_paths)):
            root = Path(self.root)
            raise DatasetUnavailableError(
                f"zinc-12k is not under {root.parent}. Missing: {root.name}/subset/processed/*.pt, which PyG makes "
                "from "
                f"pickles, and these could run any code. If you trust {ZINC.page}, call "
                "gattn.datasets.load('zinc-12k', trust_files=True) once, which downloads and converts them; or set "
                "GATTN_DATA (or root=) to a folder that has them."
            )
        super()._process()


@register
class ZINC(GraphFamily):
    """The subset of `Dwivedi et al., 2020 <https://arxiv.org/abs/2003.00982>`_."""

    year = 2020
    names = {"zinc-12k": "ZINC"}
    aliases = {"zinc": "zinc-12k"}
    splits = ("public",)
    page = "https://github.com/graphdeeplearning/benchmarking-gnns"

    def load(self, name: str, root: Path, split: str, seed: int, trust_files: bool) -> InMemoryDataset:
        """Loads all molecules, whose method `get_idx_split()` returns the split."""
        folder = root / self.names[name]
        files = [folder / "subset" / "processed" / f"{part}.pt" for part in PARTS]
        if trust_files and not all(file.exists() for file in files):
            files = [folder / "raw" / f"{part}.{ending}" for ending in ("pickle", "index") for part in PARTS]

        def fetch(missing: list[Path]) -> None:
            if any(file.suffix == ".pickle" for file in missing):
                download_archive(datasets.ZINC.url, "molecules", folder / "raw")
            for file in missing:
                if file.suffix == ".index":
                    download(datasets.ZINC.split_url.format(file.stem), file)

        def read() -> JoinedDataset:
            return JoinedDataset([_CheckedZINC(str(folder), True, part, trust_files=trust_files) for part in PARTS])

        return read_dataset(name, root, files, self.page, fetch, read)
