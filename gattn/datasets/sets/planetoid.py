"""Citation graphs: Cora, CiteSeer and PubMed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import scipy.sparse
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.datasets import Planetoid as PyGPlanetoid
from torch_geometric.io import read_txt_array
from torch_geometric.utils import coalesce, index_to_mask, remove_self_loops

from gattn.datasets.checks import check_edges
from gattn.datasets.download import check_unpacked
from gattn.datasets.processed import CheckedDataset
from gattn.datasets.registry import GraphFamily, register
from gattn.datasets.safe_files import read_pickle
from gattn.datasets.splits import pick_split, random_split

__all__ = ["Planetoid"]

_PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")


class _CheckedPlanetoid(CheckedDataset, PyGPlanetoid):
    """Reads the raw files without Python's `pickle`."""

    def process(self) -> None:
        data = _read_planetoid(Path(self.raw_dir), self.name.lower(), self.trust_files)
        if self.split == "geom-gcn":
            masks: dict[str, list[Tensor]] = {"train_mask": [], "val_mask": [], "test_mask": []}
            for i in range(10):
                file = Path(self.raw_dir) / f"{self.name.lower()}_split_0.6_0.2_{i}.npz"
                check_unpacked(file)
                with np.load(file, allow_pickle=False) as part:
                    for name, columns in masks.items():
                        columns.append(torch.from_numpy(part[name]))
            for name, columns in masks.items():
                data[name] = torch.stack(columns, dim=1)
        self.save([data], self.processed_paths[0])


def _read_planetoid(folder: Path, name: str, trust_files: bool) -> Data:
    """Returns what PyG's `read_planetoid_data` returns, bit for bit."""

    def read(part: str) -> Tensor:
        content = read_pickle(folder / f"ind.{name}.{part}", trust_files)
        content = content.toarray() if scipy.sparse.issparse(content) else content
        return torch.from_numpy(content).to(torch.float)

    _, tx, allx, y, ty, ally = map(read, ("x", "tx", "allx", "y", "ty", "ally"))
    graph = read_pickle(folder / f"ind.{name}.graph", trust_files)
    test = read_txt_array(str(folder / f"ind.{name}.test.index"), dtype=torch.long)
    if test.numel() != tx.size(0):  # a truncated file would give another data set
        raise ValueError(f"ind.{name}.test.index lists {test.numel()} nodes, but ind.{name}.tx has {tx.size(0)}")
    in_order, first = test.sort()[0], allx.size(0)
    limit = len(graph) if name == "citeseer" else first + len(test)
    is_in_range = len(test) > 0 and int(in_order[0]) == first and int(in_order[-1]) < limit
    if not is_in_range or bool((in_order.diff() == 0).any()):
        raise ValueError(f"ind.{name}.test.index must list different nodes, from {first} to {limit - 1}")

    if name == "citeseer":  # its files leave out isolated test nodes, whose features and labels become zeros
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


@register
class Planetoid(GraphFamily):
    """The citation graphs of `Yang et al., 2016 <https://arxiv.org/abs/1603.08861>`_."""

    year = 2016
    names = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}
    splits = ("public", "full", "geom-gcn", "random")
    page = (
        "https://github.com/kimiyoung/planetoid/tree/master/data (the splits of geom-gcn from "
        "https://github.com/graphdml-uiuc-jlu/geom-gcn/tree/master/splits)"
    )
    sha256 = {
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
    }

    def files(self, published_name: str, split: str) -> list[str]:
        """Eight files, and ten more with the splits of geom-gcn."""
        raw = f"{published_name}/geom-gcn/raw" if split == "geom-gcn" else f"{published_name}/raw"
        files = [f"{raw}/ind.{published_name.lower()}.{part}" for part in _PARTS]
        if split == "geom-gcn":
            files += [f"{raw}/{published_name.lower()}_split_0.6_0.2_{i}.npz" for i in range(10)]
        return files

    def url(self, file: str) -> str:
        """The address that PyG has."""
        return f"{f'{PyGPlanetoid.geom_gcn_url}/splits' if file.endswith('.npz') else PyGPlanetoid.url}/{file}"

    def read(self, published_name: str, root: Path, split: str, seed: int, trust_files: bool) -> Data:
        """Reads the graph, with one of its fixed splits or a random one."""
        part = "public" if split == "random" else split
        data = check_edges(_CheckedPlanetoid(str(root), published_name, part, trust_files=trust_files)[0])
        if split == "random":
            return random_split(data, seed, "random", num_val=500, num_test=1000)
        return pick_split(data, seed) if split == "geom-gcn" else data
