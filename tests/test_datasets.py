"""Loaders on the real files where they are, and on small ones in the published formats."""

import builtins
import gzip
import hashlib
import io
import json
import os
import pickle
import shutil
import threading
import zipfile
from collections import OrderedDict, UserDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, InMemoryDataset

from gattn import datasets
from gattn.datasets import DatasetUnavailableError, data_root, download, safe_files, sets
from gattn.datasets.checks import check_edges_of_graphs
from gattn.datasets.download import read_dataset
from gattn.datasets.registry import families, sentence_pairs, texts


def family_of(name):
    return next(family for family in families() if name in family.names)


def sizes(data):
    return [int(data[mask].sum()) for mask in ("train_mask", "val_mask", "test_mask")]


def assert_disjoint(data):
    masks = torch.stack([data.train_mask, data.val_mask, data.test_mask])
    assert masks.shape == (3, data.num_nodes)
    assert masks.dtype == torch.bool
    assert masks.sum(0).max() <= 1


class TestKarate:
    def test_fixed_split(self):
        data = datasets.load("karate")
        assert (data.num_nodes, data.num_edges) == (34, 156)
        assert sizes(data) == [8, 8, 18]
        for label in range(4):
            members = (data.y == label).nonzero().flatten()
            assert data.train_mask[members[:2]].all()
            assert data.val_mask[members[2:4]].all()
        assert_disjoint(data)

    def test_names_are_forgiving(self):
        for name in ("Karate", "KarateClub", "karate_club"):
            assert datasets.load(name).num_nodes == 34

    def test_random_split_depends_on_the_seed_alone(self):
        torch.manual_seed(0)
        before = torch.get_rng_state()
        first, again, other = (datasets.load("karate", split="random", seed=seed) for seed in (1, 1, 2))
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.equal(first.train_mask, again.train_mask)
        assert not torch.equal(first.train_mask, other.train_mask)
        assert sizes(first) == [8, 8, 18]
        assert_disjoint(first)


class TestRealFiles:
    """The figures of the data's own README."""

    @pytest.mark.parametrize(
        ("name", "nodes", "edges", "features", "classes", "split"),
        [
            ("cora", 2708, 10556, 1433, 7, [140, 500, 1000]),
            ("citeseer", 3327, 9104, 3703, 6, [120, 500, 1000]),
            ("photo", 7650, 238162, 745, 8, [160, 240, 7250]),
            ("minesweeper", 10000, 78804, 7, 2, [5000, 2500, 2500]),
        ],
    )
    def test_node_data(self, load, name, nodes, edges, features, classes, split):
        data = load(name)
        assert (data.num_nodes, data.num_edges, data.num_features, int(data.y.max()) + 1) == (
            nodes,
            edges,
            features,
            classes,
        )
        assert sizes(data) == split
        assert_disjoint(data)

    def test_shares(self, load):
        first, again, other = (load("photo", split="60-20-20", seed=seed) for seed in (1, 1, 2))
        assert sizes(first) == [4590, 1530, 1530]
        assert torch.equal(first.train_mask, again.train_mask)
        assert not torch.equal(first.train_mask, other.train_mask)
        assert_disjoint(first)

    def test_the_fixed_split_of_luo(self, load):
        data, again = load("photo", split="luo"), load("photo", split="luo", seed=1)
        assert sizes(data) == [4590, 1530, 1530]
        assert_disjoint(data)
        assert torch.equal(data.test_mask, again.test_mask)
        assert data.test_mask[[2736, 6359]].all()  # the first two in the file
        assert data.train_mask[[7311, 2850]].all()

    def test_planetoid_splits(self, load):
        assert sizes(load("cora", split="full")) == [1208, 500, 1000]
        torch.manual_seed(0)
        before = torch.get_rng_state()
        first, again, other = (load("cora", split="random", seed=seed) for seed in (1, 1, 2))
        assert torch.equal(torch.get_rng_state(), before)
        assert sizes(first) == [140, 500, 1000]
        assert torch.equal(first.train_mask, again.train_mask)
        assert not torch.equal(first.train_mask, other.train_mask)
        assert_disjoint(first)

    def test_ten_splits(self, load):
        masks = [load("minesweeper", seed=seed).train_mask for seed in (0, 1, 10)]
        assert torch.equal(masks[0], masks[2])
        assert not torch.equal(masks[0], masks[1])

    def test_ogb_graphs(self, load):
        dataset = load("ogbg-molbace")
        assert len(dataset) == 1513
        assert sum(len(part) for part in dataset.get_idx_split().values()) == 1513
        assert dataset[0].x.shape[1] == 9


def write_planetoid(raw, name, num_nodes=600, num_features=6, num_classes=3):
    """A citation graph in the format of kimiyoung/planetoid."""
    import scipy.sparse

    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    features = scipy.sparse.csr_matrix(rng.random((num_nodes, num_features)) < 0.3, dtype=np.float32)
    labels = np.eye(num_classes, dtype=np.int32)[np.arange(num_nodes) % num_classes]
    train, known = 9, num_nodes - 10
    parts = {
        "x": features[:train],
        "y": labels[:train],
        "allx": features[:known],
        "ally": labels[:known],
        "tx": features[known:],
        "ty": labels[known:],
        "graph": {i: [(i + 1) % num_nodes, (i + 5) % num_nodes] for i in range(num_nodes)},
    }
    for part, content in parts.items():
        (raw / f"ind.{name}.{part}").write_bytes(pickle.dumps(content))
    (raw / f"ind.{name}.test.index").write_text("".join(f"{i}\n" for i in range(known, num_nodes)))


class TestPublishedFormats:
    """Files as their publishers write them, only smaller."""

    def test_wikics(self, tmp_path):
        raw = tmp_path / "WikiCS" / "raw"
        raw.mkdir(parents=True)
        part = np.stack([np.roll(np.arange(8), i) for i in range(20)])
        masks = {"train_masks": part < 2, "val_masks": part == 2, "stopping_masks": part == 3}
        content = {name: mask.tolist() for name, mask in masks.items()}
        content |= {"features": [[float(i), 1.0] for i in range(8)], "labels": [i % 2 for i in range(8)]}
        content |= {"links": [[(i + 1) % 8] for i in range(8)], "test_mask": [i == 7 for i in range(8)]}
        (raw / "data.json").write_text(json.dumps(content))
        first, second, again = (datasets.load("Wiki-CS", root=tmp_path, seed=seed) for seed in (0, 1, 20))
        assert first.num_edges == 16
        assert "stopping_mask" not in first
        assert sizes(datasets.load("wikics", root=tmp_path, split="random")) == [8, 0, 0]
        assert sizes(first) == [2, 2, 1]
        assert first.val_mask.tolist() == [False] * 2 + [True] * 2 + [False] * 4
        assert torch.equal(first.train_mask, again.train_mask)
        assert not torch.equal(first.train_mask, second.train_mask)

    def test_pubmed(self, tmp_path):
        write_planetoid(tmp_path / "PubMed" / "raw", "pubmed")
        data = datasets.load("pubmed", split="full", root=tmp_path)
        assert (data.num_nodes, data.num_features) == (600, 6)
        assert int(data.test_mask.sum()) == 10

    def test_geom_gcn(self, tmp_path):
        raw = tmp_path / "Cora" / "geom-gcn" / "raw"
        write_planetoid(raw, "cora")
        rng = np.random.default_rng(0)
        parts = [rng.permutation(np.arange(600) % 3) for _ in range(10)]
        for i, part in enumerate(parts):
            masks = {name: part == k for k, name in enumerate(("train_mask", "val_mask", "test_mask"))}
            np.savez(raw / f"cora_split_0.6_0.2_{i}.npz", **masks)
        for seed in (0, 7, 17):
            data = datasets.load("cora", split="geom-gcn", seed=seed, root=tmp_path)
            assert torch.equal(data.val_mask, torch.from_numpy(parts[seed % 10] == 1))
            assert_disjoint(data)

    @pytest.mark.parametrize(
        ("name", "path"),
        [
            ("computers", "Computers/raw/amazon_electronics_computers.npz"),
            ("cs", "CS/raw/ms_academic_cs.npz"),
            ("physics", "Physics/raw/ms_academic_phy.npz"),
        ],
    )
    def test_shchur(self, tmp_path, name, path):
        import scipy.sparse

        (tmp_path / path).parent.mkdir(parents=True)
        rng = np.random.default_rng(0)
        num_nodes = 200
        adjacency = scipy.sparse.csr_matrix(rng.random((num_nodes, num_nodes)) < 0.05, dtype=np.float32)
        features = scipy.sparse.csr_matrix(rng.random((num_nodes, 5)) < 0.5, dtype=np.float32)
        parts = {}
        for prefix, matrix in (("adj", adjacency), ("attr", features)):
            parts[f"{prefix}_data"], parts[f"{prefix}_indices"] = matrix.data, matrix.indices
            parts[f"{prefix}_indptr"], parts[f"{prefix}_shape"] = matrix.indptr, matrix.shape
        np.savez(tmp_path / path, labels=np.arange(num_nodes) % 2, **parts)
        data = datasets.load(name, root=tmp_path, seed=3)
        assert sizes(data) == [40, 60, 100]
        assert torch.equal(data.train_mask, datasets.load(name, split="random", root=tmp_path, seed=3).train_mask)

        fixed = {"computers": "amazon-computer", "cs": "coauthor-cs", "physics": "coauthor-physics"}[name]
        file = (tmp_path / path).with_name(f"{fixed}_split.npz")
        with pytest.raises(datasets.DatasetUnavailableError, match=file.name):
            datasets.load(name, split="luo", root=tmp_path)
        train, valid, test = np.arange(120), np.arange(120, 150), np.arange(199, 149, -1)
        np.savez(file, train=train, valid=valid, test=test)
        data = datasets.load(name, split="luo", root=tmp_path)
        assert sizes(data) == [120, 30, 50]
        assert data.val_mask[120:150].all()
        for wrong, message in ((valid + 100, "numbers from 0 to 199"), (valid - 1, "the same number twice")):
            np.savez(file, train=train, valid=wrong, test=test)
            with pytest.raises(datasets.DatasetUnavailableError, match=message):
                datasets.load(name, split="luo", root=tmp_path)
        assert_disjoint(data)

    @pytest.mark.parametrize("name", ["roman-empire", "amazon_ratings", "tolokers", "questions"])
    def test_heterophilous(self, tmp_path, name):
        file = name.replace("-", "_")
        raw = tmp_path / file / "raw"
        raw.mkdir(parents=True)
        part = np.stack([np.random.default_rng(i).permutation(np.arange(30) % 3) for i in range(10)])
        np.savez(
            raw / f"{file}.npz",
            node_features=np.random.default_rng(0).random((30, 4), dtype=np.float32),
            node_labels=np.arange(30) % 2,
            edges=np.stack([np.arange(29), np.arange(1, 30)], axis=1),
            train_masks=part == 0,
            val_masks=part == 1,
            test_masks=part == 2,
        )
        data = datasets.load(name, root=tmp_path, seed=4)
        assert torch.equal(data.test_mask, torch.from_numpy(part[4] == 2))
        assert_disjoint(data)


def write_ogbn(folder, monkeypatch, name="ogbn-tiny"):
    """A node-property data set, written by OGB's own saver."""
    ogb_io = pytest.importorskip("ogb.io")
    monkeypatch.chdir(folder)
    saver = ogb_io.DatasetSaver(dataset_name=name, is_hetero=False, version=1)
    rng = np.random.default_rng(0)
    graph = {
        "edge_index": rng.integers(0, 20, (2, 50)),
        "num_nodes": 20,
        "node_feat": rng.random((20, 4), dtype=np.float32),
    }
    saver.save_graph_list([graph])
    saver.save_target_labels(np.arange(20).reshape(-1, 1) % 3)
    order = rng.permutation(20)
    split = {"train": order[:10], "valid": order[10:14], "test": order[14:]}
    saver.save_split(split, split_name="random")
    mapping = folder / "mapping"
    mapping.mkdir()
    (mapping / "README.md").write_text("nothing")
    saver.copy_mapping_dir(str(mapping))
    saver.save_task_info(task_type="multiclass classification", eval_metric="acc", num_classes=3)
    saver.get_meta_dict()
    saver.zip()
    return split


def write_ogbn_text(folder):
    """A node-property data set in OGB's text format."""
    rng = np.random.default_rng(0)
    files = {
        "raw/edge": rng.integers(0, 20, (50, 2)),
        "raw/node-feat": rng.random((20, 4)).round(3),
        "raw/node_year": np.full((20, 1), 2015),
        "raw/node-label": np.arange(20).reshape(-1, 1) % 3,
        "raw/num-node-list": np.array([[20]]),
        "raw/num-edge-list": np.array([[50]]),
        "split/time/train": np.arange(10).reshape(-1, 1),
        "split/time/valid": np.arange(10, 14).reshape(-1, 1),
        "split/time/test": np.arange(14, 20).reshape(-1, 1),
    }
    for name, table in files.items():
        path = folder / f"{name}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(path, "wt") as file:
            file.write("\n".join(",".join(str(value) for value in row) for row in table.tolist()) + "\n")
    (folder / "RELEASE_v1.txt").touch()


@pytest.fixture
def never_asks(monkeypatch):
    def ask(*arguments):
        raise AssertionError(f"asked on standard input: {arguments}")

    monkeypatch.setattr(builtins, "input", ask)


@pytest.mark.usefixtures("never_asks")
class TestOGB:
    def check(self, data, split):
        assert (data.num_nodes, data.num_features, data.y.shape) == (20, 4, (20,))
        for mask, part in (("train_mask", "train"), ("val_mask", "valid"), ("test_mask", "test")):
            assert sorted(split[part]) == data[mask].nonzero().flatten().tolist()
        assert_disjoint(data)

    def test_what_the_saver_wrote(self, tmp_path, monkeypatch, capsys):
        split = write_ogbn(tmp_path, monkeypatch)
        self.check(datasets.load("ogbn-tiny", root=tmp_path), split)
        self.check(datasets.load("OGBN-tiny", root=tmp_path), split)  # from the processed file

    def test_a_known_name_in_its_usual_folder(self, tmp_path, monkeypatch):
        split = write_ogbn(tmp_path, monkeypatch, name="ogbn-products")
        shutil.move(tmp_path / "submission_ogbn_products" / "products", tmp_path / "ogbn_products")
        shutil.rmtree(tmp_path / "submission_ogbn_products")
        folder = tmp_path / "ogbn_products" / "split"
        (folder / "random").rename(folder / "sales_ranking")
        self.check(datasets.load("ogbn-products", root=tmp_path), split)

    def test_a_known_name_in_ogbs_text_format(self, tmp_path):
        pytest.importorskip("ogb")
        write_ogbn_text(tmp_path / "ogbn_arxiv")
        split = {"train": range(10), "valid": range(10, 14), "test": range(14, 20)}
        self.check(datasets.load("ogbn-arxiv", root=tmp_path), split)

    def test_a_missing_release_file_is_an_error_and_no_question(self, tmp_path, monkeypatch):
        write_ogbn(tmp_path, monkeypatch)
        (tmp_path / "submission_ogbn_tiny" / "tiny" / "RELEASE_v1.txt").unlink()
        with pytest.raises(DatasetUnavailableError, match="make an empty file of that name there"):
            datasets.load("ogbn-tiny", root=tmp_path)

    def test_unknown_names(self, tmp_path):
        pytest.importorskip("ogb")
        with pytest.raises(ValueError, match="OGB has no data set 'ogbn-nothing'"):
            datasets.load("ogbn-nothing", root=tmp_path)


@pytest.mark.usefixtures("never_asks")
class TestHalfThere:
    """What an interrupted download, unpacking or processing leaves behind."""

    def test_a_part_of_an_ogb_set_is_named_and_never_overwritten(self, tmp_path):
        pytest.importorskip("ogb")
        raw = tmp_path / "ogbn_products" / "raw"
        raw.mkdir(parents=True)
        for file in (raw / "edge.csv.gz", raw / "my_notes.txt", raw.parent / "RELEASE_v1.txt"):
            file.write_text("mine")
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(DatasetUnavailableError, match=r"part of ogbn-products, but not node-feat.csv.gz"):
            datasets.load("ogbn-products", root=tmp_path)
        assert sorted(tmp_path.rglob("*")) == before

    @pytest.mark.parametrize("folder", ["ogbn_arxiv/raw", "ogbn_arxiv/processed", "ogbn_arxiv_pyg"])
    def test_an_empty_ogb_folder_raises_no_question(self, tmp_path, monkeypatch, folder):
        pytest.importorskip("ogb")
        monkeypatch.setattr(
            "urllib.request.urlopen", lambda *arguments, **kwargs: (_ for _ in ()).throw(OSError("off"))
        )
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / "arxiv.zip").write_text("half an archive")
        with pytest.raises(DatasetUnavailableError, match="could not be downloaded"):
            datasets.load("ogbn-arxiv", root=tmp_path)
        assert not list(tmp_path.iterdir())

    def test_heterogeneous_sets_are_refused_before_they_are_downloaded(self, tmp_path):
        pytest.importorskip("ogb")
        with pytest.raises(ValueError, match="ogbn-mag is a heterogeneous graph"):
            datasets.load("ogbn-mag", root=tmp_path)

    def test_processed_files_that_were_cut_off_are_made_anew(self, tmp_path):
        write_planetoid(tmp_path / "Cora" / "raw", "cora")
        expected = datasets.load("cora", root=tmp_path)
        processed = tmp_path / "Cora" / "processed" / "data.pt"
        processed.write_bytes(processed.read_bytes()[:1000])
        assert torch.equal(datasets.load("cora", root=tmp_path).x, expected.x)

    @pytest.mark.parametrize("content", [b"", b"<html>please log in</html>"])
    def test_raw_files_that_cannot_be_read_are_named(self, tmp_path, content):
        write_planetoid(tmp_path / "Cora" / "raw", "cora")
        (tmp_path / "Cora" / "raw" / "ind.cora.allx").write_bytes(content)
        with pytest.raises(
            DatasetUnavailableError, match=r"the files of cora under .*Cora cannot be read.*delete that"
        ):
            datasets.load("cora", root=tmp_path)
        assert (tmp_path / "Cora" / "raw" / "ind.cora.x").exists()

    def test_a_download_that_is_no_data_is_not_kept(self, tmp_path, monkeypatch):
        def login_page(*arguments, **kwargs):
            return io.BytesIO(b"<html>please log in</html>")

        monkeypatch.setattr("urllib.request.urlopen", login_page)
        with pytest.raises(DatasetUnavailableError, match="could not be downloaded"):
            datasets.load("photo", root=tmp_path)
        assert not list(tmp_path.iterdir())


class Planted:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker, function=os.mkdir):
        self.marker, self.function = marker, function

    def __reduce__(self):
        argument = f"__import__('os').mkdir({str(self.marker)!r})" if self.function is exec else str(self.marker)
        return self.function, (argument,)


def write_npz(path, name, members):
    """One of the formats that NumPy reads, small; `members` replace arrays."""
    import scipy.sparse

    rng = np.random.default_rng(0)
    if "heterophilous" in name:
        part = np.stack([np.random.default_rng(i).permutation(np.arange(30) % 3) for i in range(10)])
        content = {"node_features": rng.random((30, 4), dtype=np.float32), "node_labels": np.arange(30) % 2}
        content["edges"] = np.stack([np.arange(29), np.arange(1, 30)], axis=1)
        content |= {f"{mask}_masks": part == i for i, mask in enumerate(("train", "val", "test"))}
    else:
        content = {"labels": np.arange(200) % 2}
        for prefix, columns in (("adj", 200), ("attr", 5)):
            matrix = scipy.sparse.csr_matrix(rng.random((200, columns)) < 0.1, dtype=np.float32)
            content |= {f"{prefix}_data": matrix.data, f"{prefix}_indices": matrix.indices}
            content |= {f"{prefix}_indptr": matrix.indptr, f"{prefix}_shape": matrix.shape}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **(content | members))


NPZ = [
    ("computers", "Computers/raw/amazon_electronics_computers.npz", "shchur"),
    ("cs", "CS/raw/ms_academic_cs.npz", "shchur"),
    ("tolokers", "tolokers/raw/tolokers.npz", "heterophilous"),
]

PLANETOID_PICKLES = ("x", "tx", "allx", "y", "ty", "ally", "graph")


@pytest.mark.filterwarnings("ignore")  # PyG warns before it runs what a file holds
class TestPlantedFiles:
    """Somebody put a file there that runs code when it is unpickled."""

    @pytest.fixture
    def marker(self, tmp_path):
        marker = tmp_path / "was run"
        yield marker
        assert not marker.exists()

    @pytest.fixture
    def root(self, tmp_path):
        root = tmp_path / "data"
        root.mkdir()
        return root

    def refuse(self, name, root, file, **kwargs):
        with pytest.raises(DatasetUnavailableError, match="cannot be read safely: it asks for") as error:
            datasets.load(name, root=root, **kwargs)
        assert str(file) in str(error.value)
        assert "trust_files=True" in str(error.value)
        assert file.exists()

    def test_the_plant_works(self, tmp_path):
        for i, function in enumerate((os.mkdir, exec)):
            pickle.loads(pickle.dumps(Planted(tmp_path / str(i), function)))
            assert (tmp_path / str(i)).exists()

    @pytest.mark.parametrize("part", PLANETOID_PICKLES)
    @pytest.mark.parametrize("protocol", [0, 2, 4, 5])
    def test_raw_pickles(self, root, marker, part, protocol):
        write_planetoid(root / "Cora" / "raw", "cora")
        file = root / "Cora" / "raw" / f"ind.cora.{part}"
        for content in (Planted(marker), [1, Planted(marker, exec)], {0: [Planted(marker)]}):
            file.write_bytes(pickle.dumps(content, protocol))
            self.refuse("cora", root, file)
            self.refuse("cora", root, file)  # what the first try left behind does not matter

    def test_raw_pickles_of_the_other_split(self, root, marker):
        raw = root / "Cora" / "geom-gcn" / "raw"
        write_planetoid(raw, "cora")
        for i in range(10):
            masks = {f"{mask}_mask": np.arange(600) % 3 == i for i, mask in enumerate(("train", "val", "test"))}
            np.savez(raw / f"cora_split_0.6_0.2_{i}.npz", **masks)
        np.savez(raw / "cora_split_0.6_0.2_3.npz", **(masks | {"val_mask": np.array([Planted(marker)])}))
        with pytest.raises(DatasetUnavailableError, match="cannot be read.*allow_pickle"):
            datasets.load("cora", split="geom-gcn", root=root)
        (raw / "ind.cora.graph").write_bytes(pickle.dumps(Planted(marker)))
        self.refuse("cora", root, raw / "ind.cora.graph", split="geom-gcn")

    @pytest.mark.parametrize("name", ["cora", "computers", "cs", "tolokers", "ogbn-tiny"])
    @pytest.mark.parametrize("file", ["data.pt", "pre_transform.pt", "pre_filter.pt"])
    def test_processed_files(self, root, marker, monkeypatch, name, file):
        if name == "cora":
            write_planetoid(root / "Cora" / "raw", "cora")
        elif name == "ogbn-tiny":
            write_ogbn(root, monkeypatch)
        for known, path, kind in NPZ:
            if known == name:
                write_npz(root / path, kind, {})
        expected = datasets.load(name, root=root)
        (processed,) = root.rglob("processed")
        planted = processed / ("geometric_data_processed.pt" if (name, file) == ("ogbn-tiny", "data.pt") else file)
        assert planted.exists()

        torch.save(Planted(marker), planted)
        self.refuse(name, root, planted)
        torch.save(({"x": Planted(marker, exec)}, None), planted, _use_new_zipfile_serialization=False)
        self.refuse(name, root, planted)
        for protocol in (0, 2, 4):  # not even PyTorch's format
            planted.write_bytes(pickle.dumps(Planted(marker), protocol))
            try:
                data = datasets.load(name, root=root)
            except DatasetUnavailableError:
                continue
            assert torch.equal(data.edge_index, expected.edge_index)  # made anew
        shutil.rmtree(processed)
        assert torch.equal(datasets.load(name, root=root).edge_index, expected.edge_index)

    @pytest.mark.parametrize("variable", [None, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"])
    def test_ogb_descriptions_and_splits(self, root, marker, monkeypatch, variable):
        write_ogbn(root, monkeypatch)
        datasets.load("ogbn-tiny", root=root)
        if variable:
            monkeypatch.setenv(variable, "1")
        for file in (
            root / "submission_ogbn_tiny" / "tiny" / "split" / "random" / "split_dict.pt",
            root / "submission_ogbn_tiny" / "tiny" / "processed" / "geometric_data_processed.pt",
            root / "submission_ogbn_tiny" / "meta_dict.pt",
        ):
            content = file.read_bytes()
            torch.save({"train": Planted(marker)}, file)
            self.refuse("ogbn-tiny", root, file)
            file.write_bytes(content)
        datasets.load("ogbn-tiny", root=root)

    @pytest.mark.parametrize("file", ["data.npz", "node-label.npz"])
    def test_ogb_arrays(self, root, marker, monkeypatch, file):
        write_ogbn(root, monkeypatch)
        path = root / "submission_ogbn_tiny" / "tiny" / "raw" / file
        with np.load(path) as content:
            np.savez(path, **{name: np.array([Planted(marker)]) for name in content.files})
        with pytest.raises(DatasetUnavailableError, match="cannot be read.*allow_pickle"):
            datasets.load("ogbn-tiny", root=root)
        path.write_bytes(pickle.dumps(Planted(marker)))  # which numpy.load would unpickle, if allowed
        with pytest.raises(DatasetUnavailableError, match="cannot be read"):
            datasets.load("ogbn-tiny", root=root)

    @pytest.mark.parametrize(
        "file",
        [f"raw/{name}" for name in ("edge", "node-feat", "node_year", "node-label", "num-node-list", "num-edge-list")]
        + [f"split/time/{name}" for name in ("train", "valid", "test")],
    )
    def test_ogb_tables(self, root, marker, file):
        pytest.importorskip("ogb")
        write_ogbn_text(root / "ogbn_arxiv")
        (root / "ogbn_arxiv" / f"{file}.csv.gz").write_bytes(gzip.compress(pickle.dumps(Planted(marker))))
        with pytest.raises(DatasetUnavailableError, match="cannot be read"):
            datasets.load("ogbn-arxiv", root=root)

    def test_ogb_graphs(self, root, marker, load):
        source = data_root() / "ogbg_molbace"
        load("ogbg-molbace")
        shutil.copytree(source, root / "ogbg_molbace", ignore=shutil.ignore_patterns("mapping"))
        planted = root / "ogbg_molbace" / "processed" / "geometric_data_processed.pt"
        torch.save(Planted(marker), planted)
        self.refuse("ogbg-molbace", root, planted)
        shutil.rmtree(planted.parent)
        dataset = datasets.load("ogbg-molbace", root=root)
        split = root / "ogbg_molbace" / "split" / "scaffold" / "split_dict.pt"
        torch.save(Planted(marker), split)
        with pytest.raises(DatasetUnavailableError, match="cannot be read safely"):
            dataset.get_idx_split()

    @pytest.mark.parametrize(("name", "path", "kind"), NPZ)
    def test_arrays_of_objects(self, root, marker, name, path, kind):
        with np.load(write_npz(root / path, kind, {}) or root / path) as content:
            members = content.files
        for member in members:
            write_npz(root / path, kind, {member: np.array([Planted(marker)] * 30)})
            with pytest.raises(DatasetUnavailableError, match="cannot be read.*allow_pickle"):
                datasets.load(name, root=root)
        (root / path).write_bytes(pickle.dumps(Planted(marker)))
        with pytest.raises(DatasetUnavailableError, match="cannot be read"):
            datasets.load(name, root=root)

    @pytest.mark.parametrize(
        "content",
        [
            # What is allowed is called with, or given, what no file has; protocol 0, by hand.
            b"cbuiltins\nlist\n(N}S'append'\nI1\nstb.",
            b"cnumpy\nndarray\n(N}S'value'\nI1\nstb.",
            b"cscipy.sparse.csr\ncsr_matrix\n(N}S'value'\nI1\nstb.",
            b"c_codecs\nencode\n(N}S'__new__'\ncbuiltins\nlist\nstb.",
            b"c_codecs\nencode\n(S'x'\nS'hex'\ntR.",
            b"cnumpy\nndarray\n)R.",
            b"cnumpy\ndtype\n(S'O'\ntR.",
            b"cnumpy\ndtype\n.",
            b"ccollections\ndefaultdict.__class__\n.",
        ],
    )
    def test_what_is_allowed_cannot_be_misused(self, root, content):
        write_planetoid(root / "Cora" / "raw", "cora")
        file = root / "Cora" / "raw" / "ind.cora.allx"
        good = file.read_bytes()
        file.write_bytes(content)
        with pytest.raises(DatasetUnavailableError, match="cannot be read"):
            datasets.load("cora", root=root)
        file.write_bytes(good)
        assert datasets.load("cora", root=root).num_nodes == 600

    def test_a_file_that_is_trusted_may_run_code(self, root):
        raw = root / "Cora" / "raw"
        write_planetoid(raw, "cora")
        expected = datasets.load("cora", root=root)
        graph = pickle.loads((raw / "ind.cora.graph").read_bytes())
        (raw / "ind.cora.graph").write_bytes(pickle.dumps(OrderedDict(graph)))
        shutil.rmtree(raw.with_name("processed"))
        self.refuse("cora", root, raw / "ind.cora.graph")
        data = datasets.load("cora", root=root, trust_files=True)
        assert torch.equal(data.edge_index, expected.edge_index)
        assert torch.equal(data.x, expected.x)
        assert torch.equal(datasets.load("cora", root=root).x, expected.x)  # the processed file is as any other

    def test_a_description_that_is_trusted_may_run_code(self, root, monkeypatch):
        write_ogbn(root, monkeypatch)
        file = root / "submission_ogbn_tiny" / "meta_dict.pt"
        torch.save(UserDict(torch.load(file)), file)
        self.refuse("ogbn-tiny", root, file)
        assert datasets.load("ogbn-tiny", root=root, trust_files=True).num_nodes == 20

    def test_a_description_that_says_too_little(self, root, monkeypatch):
        write_ogbn(root, monkeypatch)
        torch.save({"version": 1}, root / "submission_ogbn_tiny" / "meta_dict.pt")
        with pytest.raises(DatasetUnavailableError, match="meta_dict.pt lacks add_inverse_edge, .*task type"):
            datasets.load("ogbn-tiny", root=root)

    @pytest.mark.parametrize("content", [b"", b"<html>please log in</html>"])
    def test_a_split_that_cannot_be_read(self, root, monkeypatch, content):
        write_ogbn(root, monkeypatch)
        (root / "submission_ogbn_tiny" / "tiny" / "split" / "random" / "split_dict.pt").write_bytes(content)
        with pytest.raises(DatasetUnavailableError, match="split_dict.pt cannot be read"):
            datasets.load("ogbn-tiny", root=root)


class LyingDType:
    """One of objects, which says that it has no pointers."""

    def __reduce__(self):
        state = (3, "|", None, ("f",), {"f": (np.dtype("O"), 0)}, 8, 1, 0)
        return np.dtype, ("V8", False, True), state


class LyingArray:
    def __reduce__(self):
        reconstruct = np.zeros(1).__reduce__()[0]
        return reconstruct, (np.ndarray, (0,), b"b"), (1, (1,), LyingDType(), False, b"AAAAAAAA")


class TestWrongContent:
    """Files without a program, whose numbers point outside of memory."""

    def unreadable(self, name, root, reason=""):
        with pytest.raises(DatasetUnavailableError, match=f"the files of {name} under .* cannot be read.*{reason}"):
            datasets.load(name, root=root)

    def test_arrays_of_pointers(self, tmp_path):
        write_planetoid(tmp_path / "Cora" / "raw", "cora")
        for protocol in (2, 4):
            (tmp_path / "Cora" / "raw" / "ind.cora.ally").write_bytes(pickle.dumps(LyingArray(), protocol))
            self.unreadable("cora", tmp_path, reason="arrays of type .*V8' are not read")

    def test_arrays_of_pointers_in_splits(self, tmp_path, monkeypatch):
        write_ogbn(tmp_path, monkeypatch)
        split = tmp_path / "submission_ogbn_tiny" / "tiny" / "split" / "random" / "split_dict.pt"
        torch.save({"train": LyingArray(), "valid": LyingArray(), "test": LyingArray()}, split)
        with pytest.raises(DatasetUnavailableError, match="split_dict.pt cannot be read.*arrays of type .*V8'"):
            datasets.load("ogbn-tiny", root=tmp_path)

    @pytest.mark.parametrize(
        ("part", "values"),
        [("indices", 2**30), ("indices", -1), ("indptr", 2**30), ("indptr", -1)],
    )
    def test_sparse_matrices(self, tmp_path, part, values):
        import scipy.sparse

        write_planetoid(tmp_path / "Cora" / "raw", "cora")
        matrix = scipy.sparse.csr_matrix(np.eye(590, 6, dtype=np.float32))
        getattr(matrix, part)[2:4] = values
        (tmp_path / "Cora" / "raw" / "ind.cora.allx").write_bytes(pickle.dumps(matrix))
        self.unreadable("cora", tmp_path)

    @pytest.mark.parametrize(("name", "path", "kind"), NPZ[:2])
    @pytest.mark.parametrize("member", ["adj_indices", "adj_indptr", "attr_indices", "attr_indptr"])
    def test_sparse_matrices_in_archives(self, tmp_path, name, path, kind, member):
        write_npz(tmp_path / path, kind, {})
        with np.load(tmp_path / path) as content:
            array = content[member].copy()
        for value in (2**30, -(2**30)):
            array[2] = value
            write_npz(tmp_path / path, kind, {member: array})
            self.unreadable(name, tmp_path)
        write_npz(tmp_path / path, kind, {"adj_shape": (201, 201), "adj_indptr": np.zeros(202, dtype=np.int32)})
        self.unreadable(name, tmp_path)

    @pytest.mark.parametrize("node", [600, -1, 2**40])
    def test_edges(self, tmp_path, node):
        raw = tmp_path / "Cora" / "raw"
        write_planetoid(raw, "cora")
        (raw / "ind.cora.graph").write_bytes(pickle.dumps({0: [1], 1: [node]}))
        self.unreadable("cora", tmp_path)
        write_npz(tmp_path / NPZ[2][1], "heterophilous", {"edges": np.array([[0, 1], [1, node]])})
        self.unreadable("tolokers", tmp_path)

    @pytest.mark.parametrize("numbers", [[-1], [591], [598] * 2, [10**12]])
    @pytest.mark.parametrize("name", ["PubMed", "CiteSeer"])
    def test_indices_of_test_nodes(self, tmp_path, name, numbers):
        raw = tmp_path / name / "raw"
        write_planetoid(raw, name.lower())
        file = raw / f"ind.{name.lower()}.test.index"
        good = list(map(int, file.read_text().split()))
        wrong = [*numbers, *good[len(numbers) :]]
        file.write_text("".join(f"{number}\n" for number in wrong))
        self.unreadable(name.lower(), tmp_path, reason="test.index must list different nodes, from 590 to 599")
        file.write_text("".join(f"{number}\n" for number in reversed(good)))
        assert datasets.load(name.lower(), root=tmp_path).test_mask.sum() == 10

    @pytest.mark.parametrize("node", [2, -1])
    def test_edges_of_many_graphs(self, node):
        """Node 2 of the first graph would be the first one of the second."""
        edges = [torch.tensor([[0, 1], [1, last]]) for last in (0, node, 0)]
        dataset = InMemoryDataset()
        for parts in (edges[::2], edges[1:]):
            graphs = [Data(edge_index=part, num_nodes=size) for part, size in zip(parts, (2, 3), strict=True)]
            dataset._data, dataset.slices = dataset.collate(graphs)
            if parts[0] is edges[0]:
                check_edges_of_graphs(dataset)
        with pytest.raises(ValueError, match="a graph does not have"):
            check_edges_of_graphs(dataset)

    @pytest.mark.parametrize("part", [[-1], [20], [0, 0]])
    def test_splits_of_ogb(self, tmp_path, monkeypatch, part):
        parts = write_ogbn(tmp_path, monkeypatch)
        split = tmp_path / "submission_ogbn_tiny" / "tiny" / "split" / "random" / "split_dict.pt"
        torch.save({**parts, "test": np.array(part)}, split)
        with pytest.raises(DatasetUnavailableError, match="random cannot be used: the split"):
            datasets.load("ogbn-tiny", root=tmp_path)

    def test_edges_of_processed_files(self, tmp_path):
        write_planetoid(tmp_path / "Cora" / "raw", "cora")
        expected = datasets.load("cora", root=tmp_path)
        processed = tmp_path / "Cora" / "processed" / "data.pt"
        for content in (({"x": torch.zeros(2, 3), "edge_index": torch.tensor([[0], [2]])}, None), [1, 2], ("x", None)):
            torch.save(content, processed)
            assert torch.equal(datasets.load("cora", root=tmp_path).edge_index, expected.edge_index)  # made anew


class TestAsPyG:
    """What is read safely is what PyG reads."""

    def check(self, name, root, expected, split="public"):
        for _ in range(2):  # from the raw files, then from the processed one
            data = datasets.load(name, root=root, split=split)
            assert data.keys() == expected.keys()
            for key in expected.keys():  # noqa: SIM118 (PyG's)
                assert torch.equal(data[key], expected[key])
                assert data[key].dtype == expected[key].dtype
                assert data[key].stride() == expected[key].stride()

    @pytest.mark.parametrize("name", ["Cora", "CiteSeer"])
    def test_planetoid(self, tmp_path, load, name):
        from torch_geometric.datasets import Planetoid

        load(name)
        for copy in ("ours", "theirs"):
            shutil.copytree(data_root() / name / "raw", tmp_path / copy / name / "raw")
        for split in ("public", "full"):
            self.check(name, tmp_path / "ours", Planetoid(str(tmp_path / "theirs"), name, split)[0], split)

    @pytest.mark.parametrize("protocol", [2, 3, 4, 5])
    def test_planetoid_in_every_protocol(self, tmp_path, protocol):
        from torch_geometric.datasets import Planetoid

        for copy in ("ours", "theirs"):
            raw = tmp_path / copy / "PubMed" / "raw"
            write_planetoid(raw, "pubmed")
            for part in PLANETOID_PICKLES:
                content = pickle.loads((raw / f"ind.pubmed.{part}").read_bytes())
                if part == "ally":
                    content = np.asfortranarray(content.astype(">i8" if copy == "ours" else "i8"))
                (raw / f"ind.pubmed.{part}").write_bytes(pickle.dumps(content, protocol))
        self.check("pubmed", tmp_path / "ours", Planetoid(str(tmp_path / "theirs"), "PubMed")[0])

    @pytest.mark.parametrize(("name", "path", "kind"), NPZ)
    def test_archives(self, tmp_path, name, path, kind):
        from torch_geometric.datasets import Amazon, Coauthor, HeterophilousGraphDataset

        theirs = {"computers": Amazon, "cs": Coauthor, "tolokers": HeterophilousGraphDataset}[name]
        for copy in ("ours", "theirs"):
            write_npz(tmp_path / copy / path, kind, {})
        expected = theirs(str(tmp_path / "theirs"), name)[0]
        data = datasets.load(name, root=tmp_path / "ours")
        for key in ("x", "y", "edge_index"):
            assert torch.equal(data[key], expected[key])

    def test_each_reads_the_others_processed_files(self, tmp_path):
        from torch_geometric.datasets import Planetoid

        write_planetoid(tmp_path / "Cora" / "raw", "cora")
        ours = datasets.load("cora", root=tmp_path)
        theirs = Planetoid(str(tmp_path), "Cora")[0]
        assert torch.equal(ours.x, theirs.x)
        Planetoid(str(tmp_path), "Cora", force_reload=True)
        assert torch.equal(datasets.load("cora", root=tmp_path).x, ours.x)

    def test_data_that_were_transformed_are_reported(self, tmp_path):
        from torch_geometric.datasets import Planetoid
        from torch_geometric.transforms import NormalizeFeatures

        write_planetoid(tmp_path / "Cora" / "raw", "cora")
        Planetoid(str(tmp_path), "Cora", pre_transform=NormalizeFeatures())
        with pytest.warns(UserWarning, match=r"pre_transform.pt says that these data were transformed"):
            datasets.load("cora", root=tmp_path)


class TestSafeGlobals:
    """PyTorch's list of what may be unpickled is one for the process."""

    def test_it_is_as_it_was(self, tmp_path, monkeypatch):
        write_ogbn(tmp_path, monkeypatch)
        core = np.zeros(1).__reduce__()[0]
        with torch.serialization.safe_globals(
            [core, np.ndarray, np.dtype, (core, "numpy.core.multiarray._reconstruct")]
        ):
            before = set(torch.serialization.get_safe_globals())
            for _ in range(2):
                datasets.load("ogbn-tiny", root=tmp_path)
            assert set(torch.serialization.get_safe_globals()) == before

    def test_it_stays_as_it_is_meanwhile(self, tmp_path, monkeypatch):
        """Other threads may load files, and change the list."""
        torch.save(np.arange(3), tmp_path / "array.pt")
        core = np.zeros(1).__reduce__()[0]
        allowed = [core, (core, "a.name"), np.ndarray, np.dtype, type(np.dtype("i8"))]
        seen, plain = [], safe_files._array

        def watched(*args):
            seen.append([set(torch.serialization.get_safe_globals()), torch.load(tmp_path / "array.pt")])
            return plain(*args)

        monkeypatch.setattr(safe_files, "_array", watched)
        with torch.serialization.safe_globals(allowed):
            before = set(torch.serialization.get_safe_globals())
            assert safe_files.read_torch(tmp_path / "array.pt").tolist() == [0, 1, 2]
        ((during, theirs),) = seen
        assert during == before
        assert isinstance(theirs, np.ndarray)
        assert theirs.tolist() == [0, 1, 2]

    def test_what_others_allow_stays_allowed(self, tmp_path):
        torch.save([range(3), np.arange(3)], tmp_path / "file.pt")
        with pytest.raises(DatasetUnavailableError, match="asks for .*range"):
            safe_files.read_torch(tmp_path / "file.pt")
        with torch.serialization.safe_globals([range]):
            first, second = safe_files.read_torch(tmp_path / "file.pt")
        assert first == range(3)
        assert second.tolist() == [0, 1, 2]

    def test_threads_do_not_disturb_each_other(self, tmp_path, monkeypatch):
        write_ogbn(tmp_path, monkeypatch)
        expected = datasets.load("ogbn-tiny", root=tmp_path)
        before, failures = set(torch.serialization.get_safe_globals()), []

        def read():
            try:
                for _ in range(10):
                    assert torch.equal(datasets.load("ogbn-tiny", root=tmp_path).test_mask, expected.test_mask)
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert set(torch.serialization.get_safe_globals()) == before

    def test_data_sets_can_be_pickled(self, load):
        dataset = load("ogbg-molbace")
        assert len(pickle.loads(pickle.dumps(dataset))) == len(dataset) == 1513
        assert repr(dataset) == "PygGraphPropPredDataset(1513)"


@pytest.fixture
def server(monkeypatch):
    """What is at each address; notes what was asked for."""
    files, asked = {}, []

    def answer(request, *arguments, **kwargs):
        url = request.full_url
        assert url.startswith("https://")
        assert not request.get_header("User-agent").startswith("Python")  # which some servers refuse
        assert "context" not in kwargs  # Python's default verifies certificates
        asked.append(url)
        if url not in files:
            raise OSError("404")
        return io.BytesIO(files[url])

    monkeypatch.setattr("urllib.request.urlopen", answer)
    return files, asked


class TestDownloads:
    def test_what_is_missing_is_downloaded_and_verified(self, tmp_path, server, monkeypatch):
        files, asked = server
        write_planetoid(tmp_path / "source", "cora")
        for path in (tmp_path / "source").iterdir():
            files[f"https://github.com/kimiyoung/planetoid/raw/master/data/{path.name}"] = path.read_bytes()
            monkeypatch.setitem(family_of("cora").sha256, path.name, hashlib.sha256(path.read_bytes()).hexdigest())
        raw = tmp_path / "data" / "Cora" / "raw"
        raw.mkdir(parents=True)
        shutil.copy(tmp_path / "source" / "ind.cora.x", raw)
        assert datasets.load("cora", root=tmp_path / "data").num_nodes == 600
        assert len(asked) == 7
        assert sorted(path.name for path in raw.iterdir()) == sorted(url.rsplit("/", 1)[1] for url in files)

    def test_another_digest_is_an_error(self, tmp_path, server):
        files, _ = server
        write_planetoid(tmp_path / "source", "cora")
        for path in (tmp_path / "source").iterdir():
            files[f"https://github.com/kimiyoung/planetoid/raw/master/data/{path.name}"] = path.read_bytes()
        with pytest.raises(DatasetUnavailableError, match="could not be downloaded") as error:
            datasets.load("cora", root=tmp_path / "data")
        found = hashlib.sha256((tmp_path / "source" / "ind.cora.x").read_bytes()).hexdigest()
        for part in ("ind.cora.x", found, "23cfa55d91c6f624233f5eb7b6e3f141f1bd2b2ae39608a63cf5d084bb27baab"):
            assert part in str(error.value)
        assert not list((tmp_path / "data").iterdir())

    def test_the_digests_are_those_of_the_real_files(self, load):
        for name, files in (("cora", 8), ("citeseer", 8), ("photo", 1), ("minesweeper", 1)):
            load(name)
            family = family_of(name)
            paths = [data_root() / file for file in family.files(family.names[name], "public")]
            assert len(paths) == files
            for path in paths:
                assert hashlib.sha256(path.read_bytes()).hexdigest() == family.sha256[path.name]

    @pytest.mark.parametrize("lines", [0, 1, 5, 9])
    def test_a_truncated_list_of_test_nodes_is_an_error(self, tmp_path, lines):
        raw = tmp_path / "Cora" / "raw"
        write_planetoid(raw, "cora")
        file = raw / "ind.cora.test.index"
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:lines]))
        with pytest.raises(DatasetUnavailableError, match="get the files again"):
            datasets.load("cora", root=tmp_path)

    def test_files_of_ones_own_need_no_digest(self, tmp_path):
        write_planetoid(tmp_path / "Cora" / "raw", "cora")
        assert datasets.load("cora", root=tmp_path).num_nodes == 600

    def test_a_broken_connection_is_an_error(self, tmp_path, monkeypatch):
        class Response(io.BytesIO):
            length = 7  # as http.client's: what is still to come

        monkeypatch.setattr("urllib.request.urlopen", lambda *arguments, **kwargs: Response(b"half"))
        with pytest.raises(DatasetUnavailableError, match="the connection ended before"):
            datasets.load("computers", root=tmp_path)
        assert not list(tmp_path.iterdir())

    def archive(self, tmp_path, monkeypatch, **others):
        write_ogbn(tmp_path, monkeypatch, name="ogbn-products")
        saved = tmp_path / "submission_ogbn_products" / "products"
        # In OGB's own text format.
        files = {path.relative_to(saved).as_posix(): path.read_bytes() for path in saved.rglob("*") if path.is_file()}
        with np.load(saved / "raw" / "data.npz") as raw, np.load(saved / "raw" / "node-label.npz") as labels:
            tables = {"edge": raw["edge_index"].T, "node-feat": raw["node_feat"], "node-label": labels["node_label"]}
        tables |= {"num-node-list": np.array([[20]]), "num-edge-list": np.array([[50]])}
        for name, table in tables.items():
            rows = "\n".join(",".join(map(str, row)) for row in table.tolist())
            files[f"raw/{name}.csv.gz"] = gzip.compress(rows.encode())
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:
            for name, data in files.items():
                archive.writestr(f"products/{name.replace('split/random', 'split/sales_ranking')}", data)
            for name, data in others.items():
                archive.writestr(name.replace("__", "/"), data)
        shutil.rmtree(tmp_path / "submission_ogbn_products")
        return content.getvalue()

    def test_ogb(self, tmp_path, server, monkeypatch):
        files, asked = server
        url = "https://snap.stanford.edu/ogb/data/nodeproppred/products.zip"
        (tmp_path / "Cora").mkdir()
        (tmp_path / "Cora" / "mine").write_text("mine")
        root = tmp_path / "data"
        (root / "Cora").mkdir(parents=True)
        (root / "Cora" / "mine").write_text("mine")
        files[url] = self.archive(tmp_path, monkeypatch, Cora__mine="theirs")
        assert datasets.load("ogbn-products", root=root).num_nodes == 20
        assert datasets.load("ogbn-products", root=root).num_nodes == 20
        assert asked == [url]
        assert sorted(path.name for path in root.iterdir()) == ["Cora", "ogbn_products"]
        assert (root / "Cora" / "mine").read_text() == "mine"

    def test_an_ogb_archive_that_is_none(self, tmp_path, server):
        files, _ = server
        for content in (b"<html>please log in</html>", b""):
            files["https://snap.stanford.edu/ogb/data/nodeproppred/products.zip"] = content
            with pytest.raises(DatasetUnavailableError, match="could not be downloaded"):
                datasets.load("ogbn-products", root=tmp_path)
            assert not list(tmp_path.iterdir())


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*arguments, **kwargs):
        raise OSError("no network in this test")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)


@pytest.mark.usefixtures("no_network")
class TestAtOnce:
    def test_the_first_prepares_what_others_read(self, tmp_path):
        """Otherwise, one finds files that another is still writing, and removes them as incomplete."""
        raw, processed = tmp_path / "name" / "raw", tmp_path / "name" / "processed"
        started, fetched = threading.Barrier(4), []

        def fetch(missing):
            fetched.append(missing)
            raw.mkdir(parents=True)
            (raw / "file").write_text("raw")

        def read():
            if processed.exists():
                return (processed / "file").read_text()
            processed.mkdir()
            threading.Event().wait(0.1)
            (processed / "file").write_text("processed")
            return "processed"

        def load(_):
            started.wait()
            return read_dataset("name", tmp_path, [raw / "file"], "page", fetch, read)

        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(load, range(4))) == ["processed"] * 4
        assert fetched == [[raw / "file"]]


class TestMissing:
    @pytest.mark.parametrize(
        ("name", "file"),
        [
            ("cora", "Cora/raw/ind.cora.allx"),
            ("photo", "Photo/raw/amazon_electronics_photo.npz"),
            ("cs", "CS/raw/ms_academic_cs.npz"),
            ("roman-empire", "roman_empire/raw/roman_empire.npz"),
            ("ogbn-arxiv", "ogbn_arxiv/raw/"),
            ("ogbg-molhiv", "ogbg_molhiv/raw/"),
        ],
    )
    def test_the_error_says_what_is_missing_and_how_to_get_it(self, tmp_path, never_asks, name, file):
        if name.startswith("ogb"):
            pytest.importorskip("ogb")
        for _ in range(2):  # the second time, what a failed download left behind must not matter
            with pytest.raises(DatasetUnavailableError) as error:
                datasets.load(name, root=tmp_path)
            assert file in str(error.value)
            assert "https://" in str(error.value)
            assert "GATTN_DATA" in str(error.value)
            assert not [path for path in tmp_path.rglob("*") if path.is_file()]

    def test_where_data_are_looked_for(self, monkeypatch, tmp_path):
        monkeypatch.setenv("GATTN_DATA", str(tmp_path))
        assert data_root() == tmp_path
        assert data_root(tmp_path / "other") == tmp_path / "other"
        assert "~" not in str(data_root("~/data"))
        monkeypatch.delenv("GATTN_DATA")
        assert data_root().name == "gattn"


class TestText:
    def test_tiny_shakespeare(self):
        try:
            text = datasets.load_text("tinyshakespeare")
        except DatasetUnavailableError as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(str(error))
        assert (len(text), len(set(text))) == (1_115_394, 65)
        assert text.startswith("First Citizen:\nBefore we proceed any further")

    @pytest.mark.parametrize("name", ["tinyshakespeare", "Tiny-Shakespeare", "tiny_shakespeare"])
    def test_the_file_is_read_as_it_is(self, name, tmp_path, monkeypatch):
        (tmp_path / "tinyshakespeare").mkdir()
        (tmp_path / "tinyshakespeare" / "input.txt").write_bytes("To be,\nor nöt".encode())
        assert datasets.load_text(name, tmp_path) == "To be,\nor nöt"
        monkeypatch.setenv("GATTN_DATA", str(tmp_path))
        assert datasets.load_text(name) == "To be,\nor nöt"

    def test_a_missing_file_is_downloaded_and_verified(self, tmp_path, server, monkeypatch):
        files, asked = server
        entry = texts()["tinyshakespeare"]
        files[entry.url] = b"First Citizen:"
        with pytest.raises(DatasetUnavailableError, match=r"could not be downloaded .*SHA-256") as error:
            datasets.load_text("tinyshakespeare", tmp_path)
        assert entry.sha256 in str(error.value)
        assert not list(tmp_path.iterdir())
        monkeypatch.setattr(type(entry), "sha256", hashlib.sha256(files[entry.url]).hexdigest())
        assert datasets.load_text("tinyshakespeare", tmp_path) == "First Citizen:"
        assert datasets.load_text("tinyshakespeare", tmp_path) == "First Citizen:"
        assert asked == [entry.url] * 2

    def test_the_digest_is_that_of_the_real_file(self):
        path = data_root() / texts()["tinyshakespeare"].file
        if not path.exists():
            pytest.skip(f"{path} is not there")
        assert hashlib.sha256(path.read_bytes()).hexdigest() == texts()["tinyshakespeare"].sha256

    @pytest.mark.usefixtures("no_network")
    def test_a_missing_file_is_named(self, tmp_path):
        with pytest.raises(DatasetUnavailableError, match="Missing: tinyshakespeare/input.txt") as error:
            datasets.load_text("tinyshakespeare", tmp_path)
        assert not list(tmp_path.iterdir())
        assert "https://" in str(error.value)
        assert "GATTN_DATA" in str(error.value)
        assert str(tmp_path) in str(error.value)

    def test_a_file_that_is_no_text_is_named(self, tmp_path):
        (tmp_path / "tinyshakespeare").mkdir()
        (tmp_path / "tinyshakespeare" / "input.txt").write_bytes(b"\xff\xfe")
        with pytest.raises(DatasetUnavailableError, match=r"input.txt cannot be read \(UnicodeDecodeError"):
            datasets.load_text("tinyshakespeare", tmp_path)

    def test_unknown_names(self):
        with pytest.raises(ValueError, match="unknown text 'hamlet': gattn has tinyshakespeare"):
            datasets.load_text("hamlet")


def write_pairs(folder, text, member="deu.txt"):
    (folder / "tatoeba").mkdir()
    with zipfile.ZipFile(folder / "tatoeba" / "deu-eng.zip", "w") as archive:
        archive.writestr(member, text)


def bomb(member, size=1 << 26):
    """A zip file whose content is a thousand times as large."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive, archive.open(member, "w") as file:
        for _ in range(size >> 20):
            file.write(bytes(1 << 20))
    return content.getvalue()


class TestBombs:
    """Archives that would fill the memory or the disk are not unpacked."""

    @pytest.mark.parametrize(
        ("file", "member", "load"),
        [
            ("tatoeba/deu-eng.zip", "deu.txt", lambda root: datasets.load_pairs("tatoeba", root)),
            ("questions/raw/questions.npz", "edges.npy", lambda root: datasets.load("questions", root=root)),
        ],
    )
    def test_a_file_of_ones_own(self, file, member, load, tmp_path, monkeypatch):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_bytes(bomb(member))
        monkeypatch.setattr(zipfile.ZipFile, "open", lambda *args, **options: pytest.fail("was unpacked"))
        with pytest.raises(DatasetUnavailableError, match="but its content 67108864, far more"):
            load(tmp_path)

    def test_a_download(self, tmp_path, server, monkeypatch):
        files, _ = server
        files[sets.lrgb.LRGBDataset.urls["peptides-func"]] = bomb("peptides-func/train.pt")
        monkeypatch.setattr(zipfile.ZipFile, "open", lambda *args, **options: pytest.fail("was unpacked"))
        with pytest.raises(DatasetUnavailableError, match="but its content 67108864, far more"):
            datasets.load("peptides-func", root=tmp_path)
        assert not list(tmp_path.iterdir())


class TestLocks:
    @pytest.fixture
    def cache(self, tmp_path, monkeypatch):
        monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / "cache" / name)
        return tmp_path / "cache"

    def test_nobody_else_can_put_a_file_in_their_place(self, cache, tmp_path, monkeypatch):
        """They are in the user's cache, not in the folder that all users share."""
        monkeypatch.setattr("tempfile.gettempdir", lambda: pytest.fail("it is shared"))
        with download._lock(tmp_path / "root" / "name") as lock:
            assert Path(lock.lock_file).parent == cache / "gattn" / "locks"

    def test_without_a_cache(self, cache, tmp_path):
        cache.write_text("is no folder")
        (tmp_path / "root").mkdir()
        with download._lock(tmp_path / "root" / "name") as lock:
            assert Path(lock.lock_file).parent == tmp_path / "root" / "locks"
        with download._lock(cache / "root" / "name") as lock:
            assert lock is None


class TestPairs:
    def test_tatoeba(self):
        try:
            pairs = datasets.load_pairs("tatoeba")
        except DatasetUnavailableError as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(str(error))
        assert len(pairs) == len(set(pairs)) == 169_159
        assert pairs[0] == ("Hallo!", "Hi.")
        assert all(sentence == " ".join(sentence.split()) != "" for pair in pairs for sentence in pair)

    @pytest.mark.parametrize("name", ["tatoeba", "Tatoeba", "TATO_EBA"])
    def test_pairs_in_the_files_order_each_once(self, name, tmp_path, monkeypatch):
        write_pairs(tmp_path, "Run!\tLauf!\nHi.\tHallo!\nRun!\tLauf!\nHi.\tGrüß Gott!")
        expected = [("Lauf!", "Run!"), ("Hallo!", "Hi."), ("Grüß Gott!", "Hi.")]
        assert datasets.load_pairs(name, tmp_path) == expected
        monkeypatch.setenv("GATTN_DATA", str(tmp_path))
        assert datasets.load_pairs(name) == expected

    def test_text_is_cleaned(self, tmp_path):
        write_pairs(tmp_path, "At 6\u202f p.m. \tUm 18\xa0Uhr, u\u0308ber\xadmorgen\u200b.\r\n")
        assert datasets.load_pairs("tatoeba", tmp_path) == [("Um 18 Uhr, übermorgen.", "At 6 p.m.")]

    def test_authors_are_left_out(self, tmp_path):
        write_pairs(tmp_path, "Hi.\tHallo!\tCC-BY 2.0 (France) Attribution: tatoeba.org #538123 (CM)\n")
        assert datasets.load_pairs("tatoeba", tmp_path) == [("Hallo!", "Hi.")]

    def published(self, lines):
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:
            archive.writestr("deu.txt", "".join(f"Number {i}.\tNummer {i}.\tCC-BY\n" for i in range(lines)))
        return content.getvalue()

    def test_a_missing_file_is_downloaded(self, tmp_path, server, monkeypatch):
        files, asked = server
        entry = sentence_pairs()["tatoeba"]
        files[entry.url] = self.published(5)
        monkeypatch.setattr(type(entry), "measured", ("2018", hashlib.sha256(files[entry.url]).hexdigest(), 5))
        for _ in range(2):
            assert len(datasets.load_pairs("tatoeba", tmp_path)) == 5
        assert asked == [entry.url]

    def test_a_newer_version_says_so_once(self, tmp_path, server, monkeypatch):
        files, _ = server
        entry = sentence_pairs()["tatoeba"]
        files[entry.url] = self.published(6)
        monkeypatch.setattr(type(entry), "measured", ("2018", "0" * 64, 5))
        with pytest.warns(UserWarning, match="downloaded 6 pairs.*version of 2018, which has 5 pairs") as caught:
            datasets.load_pairs("tatoeba", tmp_path)
        assert caught[0].filename == __file__
        assert len(datasets.load_pairs("tatoeba", tmp_path)) == 6  # without a warning, which would be an error

    @pytest.mark.parametrize(
        ("content", "reason"), [(None, "4 pairs, but 5 were expected"), (b"<html>please log in</html>", "BadZipFile")]
    )
    def test_a_download_that_is_too_small_is_not_kept(self, content, reason, tmp_path, server, monkeypatch):
        files, _ = server
        entry = sentence_pairs()["tatoeba"]
        files[entry.url] = content or self.published(4)
        monkeypatch.setattr(type(entry), "measured", ("2018", "0" * 64, 5))
        with pytest.raises(DatasetUnavailableError, match=f"could not be downloaded.*{reason}"):
            datasets.load_pairs("tatoeba", tmp_path)
        assert not list(tmp_path.iterdir())

    def test_the_version_that_was_measured_is_the_real_file(self):
        path = data_root() / sentence_pairs()["tatoeba"].file
        if not path.exists():
            pytest.skip(f"{path} is not there")
        _, digest, pairs = sentence_pairs()["tatoeba"].measured
        assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
        assert len(datasets.load_pairs("tatoeba")) == pairs

    @pytest.mark.usefixtures("no_network")
    def test_a_missing_file_is_named(self, tmp_path):
        with pytest.raises(DatasetUnavailableError, match="Missing: tatoeba/deu-eng.zip") as error:
            datasets.load_pairs("tatoeba", tmp_path)
        assert "https://" in str(error.value)
        assert "GATTN_DATA" in str(error.value)
        assert str(tmp_path) in str(error.value)

    @pytest.mark.parametrize(
        ("text", "member", "reason"),
        [
            (b"\xff\xfe", "deu.txt", "UnicodeDecodeError"),
            (b"Hi.\tHallo!", "fra.txt", "KeyError"),
            (b"Hi. Hallo!", "deu.txt", "ValueError"),
        ],
    )
    def test_a_file_that_holds_no_pairs_is_named(self, text, member, reason, tmp_path):
        write_pairs(tmp_path, text, member)
        with pytest.raises(DatasetUnavailableError, match=rf"deu-eng.zip cannot be read \({reason}.*delete it"):
            datasets.load_pairs("tatoeba", tmp_path)

    def test_a_file_that_is_no_archive_is_named(self, tmp_path):
        (tmp_path / "tatoeba").mkdir()
        (tmp_path / "tatoeba" / "deu-eng.zip").write_text("<html>please log in</html>")
        with pytest.raises(DatasetUnavailableError, match=r"deu-eng.zip cannot be read \(BadZipFile"):
            datasets.load_pairs("tatoeba", tmp_path)

    def test_unknown_names(self):
        with pytest.raises(ValueError, match="unknown pairs 'europarl': gattn has tatoeba"):
            datasets.load_pairs("europarl")


def test_unknown_names_and_splits():
    with pytest.raises(ValueError, match="unknown data set 'coral': gattn has karate, collegemsg, cora"):
        datasets.load("coral")
    with pytest.raises(ValueError, match="karate has no split 'full': it has 'public', 'random'"):
        datasets.load("karate", split="full")


def test_available():
    assert datasets.available() == [
        "karate",
        "collegemsg",
        "cora",
        "citeseer",
        "pubmed",
        "computers",
        "photo",
        "cs",
        "physics",
        "wikics",
        "zinc-12k",
        "peptides-func",
        "peptides-struct",
        "roman-empire",
        "amazon-ratings",
        "minesweeper",
        "tolokers",
        "questions",
    ]


def test_every_file_of_data_sets_registers_what_it_holds():
    registered = {type(entry).__module__ for entry in (*families(), *texts().values(), *sentence_pairs().values())}
    files = {path.stem for path in Path(sets.__file__).parent.glob("[!_]*.py")}
    assert registered == {f"gattn.datasets.sets.{file}" for file in files}
