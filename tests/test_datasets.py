"""Loaders on the real files where they are, and on small ones in the published formats."""

import builtins
import gzip
import io
import os
import pickle
import shutil
import zipfile

import numpy as np
import pytest
import torch

from gattn import datasets
from gattn.datasets import DatasetUnavailableError, data_root


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
        folder = tmp_path / "ogbn_arxiv"
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
        with pytest.raises(DatasetUnavailableError, match=r"a part of ogbn-products, but not node-feat.csv.gz"):
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


class TestMissing:
    @pytest.fixture(autouse=True)
    def no_network(self, monkeypatch):
        def refuse(*arguments, **kwargs):
            raise OSError("no network in this test")

        monkeypatch.setattr("urllib.request.urlopen", refuse)
        monkeypatch.setattr("socket.getaddrinfo", refuse)

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

    def test_a_missing_file_is_named(self, tmp_path):
        with pytest.raises(DatasetUnavailableError, match="Missing: tinyshakespeare/input.txt") as error:
            datasets.load_text("tinyshakespeare", tmp_path)
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
    with pytest.raises(ValueError, match="unknown data set 'coral': gattn has karate, cora"):
        datasets.load("coral")
    with pytest.raises(ValueError, match="karate has no split 'full': it has 'public', 'random'"):
        datasets.load("karate", split="full")


def test_available():
    assert len(datasets.available()) == 13
