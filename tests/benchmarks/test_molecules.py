import io
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch_geometric.data import Batch
from torch_geometric.datasets import ZINC, LRGBDataset
from torch_geometric.loader import DataLoader
from torch_geometric.transforms import AddRandomWalkPE

import gattn
from benchmarks import molecules, molecules_models, molecules_speed
from benchmarks.framework import parallel
from benchmarks.framework.results import VERSIONS, ResultsFile
from benchmarks.molecules import MoleculeProperties
from benchmarks.molecules_models import GLOBAL, LAYERS, LINEAR, MODELS, TASKS, Molecules, Run, Setting, Trainer
from benchmarks.molecules_speed import Speed, speed_line
from tests.benchmarks.together import float64, together, trained

pytest.importorskip("ogb")
SMALL = Setting(channels=8, bond_channels=4, num_layers=2, heads=2, walks=3, batch=7)
SIZES = {"train": 20, "val": 6, "test": 6}
TIMES = ("seconds_per_epoch", "training_seconds", "evaluation_seconds", "started")


def molecule(number, seed):
    """A ring with a tail: 3 to 9 atoms, features of atoms and bonds as OGB's."""
    random = torch.Generator().manual_seed(100 * seed + number)
    size, ring = 3 + number % 7, 3 + number % 3
    source = torch.arange(size)
    target = torch.where(source + 1 == min(ring, size), 0, source + 1)
    pairs = torch.stack([source, target])[:, (target < size) & (source != target)]
    bonds = torch.randint(0, 2, (pairs.size(1), 3), generator=random)
    x = torch.randint(0, 2, (size, 9), generator=random)
    return x, bonds.repeat(2, 1), torch.cat([pairs, pairs.flip(0)], dim=1)


def write_peptides(root, name, labels):
    """The raw files of LRGB, with fewer and smaller peptides."""
    (root / name / "raw").mkdir(parents=True)
    for seed, (part, count) in enumerate(SIZES.items()):
        graphs = []
        for number in range(count):
            random = torch.Generator().manual_seed(1000 * seed + number)
            y = torch.randn(1, labels, generator=random)
            graphs.append((*molecule(number, seed), (y > 0).float() if labels == 10 else y))
        for y in range(10 if labels == 10 else 0):  # each label has both values
            graphs[0][3][0, y], graphs[1][3][0, y] = 0, 1
        torch.save(graphs, root / name / "raw" / f"{part}.pt")


def write_zinc(root):
    """The raw files of ZINC, with fewer molecules, of which every second is in the subset."""
    raw = root / "ZINC" / "raw"
    raw.mkdir(parents=True)
    for seed, (part, count) in enumerate(SIZES.items()):
        pickled = []
        for number in range(2 * count):
            x, bonds, (source, target) = molecule(number, seed)
            adjacency = torch.zeros(len(x), len(x), dtype=torch.long)
            adjacency[source, target] = 1 + bonds[:, 0]
            value = torch.tensor([float(number)])
            pickled.append({"atom_type": x[:, 0], "bond_type": adjacency, "logP_SA_cycle_normalized": value})
        (raw / f"{part}.pickle").write_bytes(pickle.dumps(pickled))
        (raw / f"{part}.index").write_text(",".join(map(str, range(0, 2 * count, 2))) + "\n")


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder of small data sets, and small settings."""
    root = tmp_path / "data"
    write_peptides(root, "peptides-func", 10)
    write_peptides(root, "peptides-struct", 11)
    write_zinc(root)
    monkeypatch.setenv("GATTN_DATA", str(root))
    for name, task in TASKS.items():
        monkeypatch.setitem(TASKS, name, replace(task, setting=SMALL))
    return root


@pytest.fixture
def benchmark(root, tmp_path, one_process):
    """Runs the benchmark here; returns its table and its rows."""

    def run(*arguments):
        MoleculeProperties.main([*map(str, arguments), "--out", str(tmp_path / "out")])
        return (tmp_path / "out" / "table.md").read_text(), ResultsFile(tmp_path / "out" / "runs.jsonl").rows()

    return run


def run_of(dataset="peptides-struct", model="gps", layers="gattn", epochs=2):
    return Run(dataset, model, layers, 0, epochs, "scores", SMALL)


def without_times(row):
    return {name: value for name, value in row.items() if name not in TIMES}


def zipped(folder, inside):
    """A zip file of the files in a folder, under another folder's name."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for path in folder.iterdir():
            archive.write(path, f"{inside}/{path.name}")
    return content.getvalue()


class TestDataSets:
    """What the benchmark needs beside OGB's."""

    def test_parts(self, root):
        for name, trust in (("peptides-func", False), ("zinc-12k", True)):
            graphs = gattn.datasets.load(name, trust_files=trust)
            split = graphs.get_idx_split()
            assert [(part, len(index)) for part, index in split.items()] == [("train", 20), ("valid", 6), ("test", 6)]
            x, bonds, edge_index = molecule(4 if name == "zinc-12k" else 2, 1)
            graph = graphs[int(split["valid"][2])]
            assert torch.equal(graph.x, x[:, :1] if name == "zinc-12k" else x)
            order = (edge_index[0] * len(x) + edge_index[1]).argsort()  # in which ZINC's matrices are read
            order = order if name == "zinc-12k" else slice(None)
            assert torch.equal(graph.edge_index, edge_index[:, order])
            assert torch.equal(graph.edge_attr, 1 + bonds[order, 0] if name == "zinc-12k" else bonds)

    def test_pickles_are_read_only_if_they_are_trusted(self, root):
        with pytest.raises(gattn.datasets.DatasetUnavailableError, match=r"load\('zinc-12k', trust_files=True\) once"):
            gattn.datasets.load("zinc-12k")
        assert len(gattn.datasets.load("zinc", trust_files=True)) == len(gattn.datasets.load("zinc")) == 32

    @pytest.mark.parametrize("file", ["raw/val.pt", "processed/val.pt"])
    def test_files_run_no_code(self, file, root):
        if file.startswith("processed"):
            gattn.datasets.load("peptides-func")
        torch.save([print], root / "peptides-func" / file)
        with pytest.raises(gattn.datasets.DatasetUnavailableError, match="cannot be read safely: it asks for print"):
            gattn.datasets.load("peptides-func")

    @pytest.mark.parametrize("content", [b"", b"no such file"])
    def test_an_interrupted_conversion_is_no_reason_to_read_pickles(self, content, root, monkeypatch):
        gattn.datasets.load("zinc-12k", trust_files=True)
        (root / "ZINC" / "subset" / "processed" / "test.pt").write_bytes(content)
        with monkeypatch.context() as patch:
            patch.setattr(pickle, "load", lambda file: pytest.fail("a pickle was read"))
            with pytest.raises(
                gattn.datasets.DatasetUnavailableError, match=r"load\('zinc-12k', trust_files=True\) once"
            ):
                gattn.datasets.load("zinc-12k")
        assert len(gattn.datasets.load("zinc-12k", trust_files=True)) == 32

    @pytest.mark.parametrize("node", [-1, 99])
    def test_edges_of_processed_files(self, node, root):
        for name, folder in (("peptides-func", "peptides-func"), ("zinc-12k", "ZINC/subset")):
            expected = gattn.datasets.load(name, trust_files=True).edge_index
            path = root / folder / "processed" / "val.pt"
            data, *others = torch.load(path, weights_only=False)
            data["edge_index"][0, 0] = node
            torch.save((data, *others), path)
            if name == "zinc-12k":
                with pytest.raises(gattn.datasets.DatasetUnavailableError, match="trust_files=True"):
                    gattn.datasets.load(name)
            assert torch.equal(gattn.datasets.load(name, trust_files=True).edge_index, expected)  # made anew

    def test_downloads(self, root, tmp_path, monkeypatch):
        (zinc, peptides), asked = (root / "ZINC" / "raw", root / "peptides-func" / "raw"), []
        files = {LRGBDataset.urls["peptides-func"]: zipped(peptides, "peptidesfunc")}
        files |= {ZINC.split_url.format(part): (zinc / f"{part}.index").read_bytes() for part in SIZES}
        for path in zinc.glob("*.index"):
            path.unlink()
        files[ZINC.url] = zipped(zinc, "molecules")

        def answer(request, **kwargs):
            asked.append(request.full_url)
            return io.BytesIO(files[request.full_url])

        monkeypatch.setattr("urllib.request.urlopen", answer)
        for name, raw in (("peptides-func", peptides), ("zinc-12k", zinc)):
            fresh = tmp_path / "fresh"
            assert len(gattn.datasets.load(name, root=fresh, trust_files=True)) == 32
            assert len(gattn.datasets.load(name, root=fresh)) == 32
            assert {path.name for path in (fresh / raw.relative_to(root)).iterdir()} >= {x.name for x in raw.iterdir()}
        assert sorted(asked) == sorted(files)


class TestBatches:
    def test_they_are_those_of_pygs_loader(self, root):
        graphs = gattn.datasets.load("peptides-struct")
        index = torch.tensor([5, 0, 31, 6])
        ours, theirs = Molecules("peptides-struct", 2)[index], next(iter(DataLoader(graphs[index], 4)))
        for name in ("x", "edge_index", "edge_attr", "y", "batch"):
            assert torch.equal(getattr(ours, name), theirs[name]), name

    def test_random_walks(self, root):
        graphs = gattn.datasets.load("peptides-struct")
        expected = Batch.from_data_list([AddRandomWalkPE(5)(graph) for graph in graphs]).random_walk_pe
        torch.testing.assert_close(Molecules("peptides-struct", 5).walks, expected)

    def test_a_walk_by_hand(self):
        """On a path of three atoms: back after two steps for sure from the ends' neighbour, from an end by half."""
        edge_index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
        walks = Molecules.return_probabilities(edge_index, torch.zeros(3, dtype=torch.long), 3)
        assert walks.tolist() == [[0, 0.5, 0], [0, 1, 0], [0, 0.5, 0]]

    def test_an_epoch_has_each_molecule_once(self, root, tmp_path):
        trainer = Trainer(run_of(), Molecules("peptides-struct", 3), tmp_path)
        epochs = [torch.cat(list(trainer.batches(epoch))) for epoch in (0, 1, 0)]
        assert all(epoch.sort()[0].tolist() == list(range(20)) for epoch in epochs)
        assert torch.equal(epochs[0], epochs[2])
        assert not torch.equal(epochs[0], epochs[1])


class TestNetworks:
    @pytest.mark.parametrize("model", MODELS)
    @pytest.mark.parametrize("dataset", ["peptides-func", "zinc-12k"])
    def test_both_libraries_compute_the_same(self, model, dataset, root):
        if dataset == "zinc-12k":
            gattn.datasets.load(dataset, trust_files=True)
        same_size, mixed = torch.tensor([0, 7, 14]), torch.arange(8)
        batch = Molecules(dataset, 3)[same_size if model == LINEAR else mixed]
        run = run_of(dataset, model)
        ours, theirs = (molecules_models.build_network(replace(run, layers=layers)) for layers in LAYERS)
        kinds = [type(block.conv).__module__.split(".")[0] for block in (*ours.blocks, *theirs.blocks)]
        assert kinds == ["gattn"] * 2 + ["benchmarks" if model == "gatedgcn" else "torch_geometric"] * 2
        outs = [network.eval()(batch) for network in (ours, theirs)]
        assert outs[0].shape == (len(batch.y), TASKS[dataset].outputs)
        torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-5)

    def test_linear_attention_is_compared_on_molecules_of_one_size(self, root, tmp_path, monkeypatch):
        """On others, PyG's depends on the padding."""
        data, sizes = Molecules("peptides-func", 3), []
        data.split["valid"] = torch.arange(20)
        batch = data[data.split["valid"]]
        run = run_of("peptides-func", LINEAR)
        outs = [molecules_models.build_network(replace(run, layers=layers)).eval()(batch) for layers in LAYERS]
        assert not torch.allclose(*outs, rtol=1e-4, atol=1e-5)
        forward = molecules_models.Network.forward

        def watched(network, batch):
            sizes.append(batch.batch.bincount().tolist())
            return forward(network, batch)

        monkeypatch.setattr(molecules_models.Network, "forward", watched)
        firsts = [Trainer(replace(run, layers=layers), data, tmp_path).first for layers in LAYERS]
        assert sizes == [[3, 3, 3]] * 2  # 0, 7 and 14, of 20
        assert firsts[0] == pytest.approx(firsts[1], rel=1e-4)

    def test_linear_attention_is_that_of_gps(self, root):
        """It has the same layer on the bonds, and as many channels."""
        full, linear = (molecules_models.build_network(run_of(model=model)).blocks[0].conv for model in ("gps", LINEAR))
        assert (full.attn_type, linear.attn_type) == ("multihead", "performer")
        assert type(full.conv) is type(linear.conv) is gattn.nn.TransformerConv
        assert linear.attn.q.weight.shape == (SMALL.channels, SMALL.channels)

    @pytest.mark.parametrize("model", MODELS)
    def test_what_each_attends_to(self, model, root):
        """Bonds, all atoms of the molecule, or both; never another molecule."""
        network = molecules_models.build_network(
            replace(run_of(model=model), setting=replace(SMALL, num_layers=1))
        ).eval()
        batch = Molecules("peptides-struct", 3)[torch.tensor([4, 6])]
        block, size = network.blocks[0], int((batch.batch == 0).sum())
        x, bonds = torch.randn(len(batch.x), 8), network.bonds(batch.edge_attr)
        x.requires_grad_()
        torch.nn.init.ones_(block.norm.bias) if model in ("gatv2", "transformer") else None  # so that ReLU passes all
        out, _ = block(x, bonds, batch.edge_index, batch.batch)
        neighbours = set(batch.edge_index[0, batch.edge_index[1] == 0].tolist()) | {0}
        (gradient,) = torch.autograd.grad(out[0].sum() + out[0].square().sum(), x)
        seen = set(gradient.abs().sum(1).nonzero().flatten().tolist())
        assert seen == (set(range(size)) if model in GLOBAL else neighbours)
        changed, _ = block(x, bonds + 1, batch.edge_index, batch.batch)
        assert torch.equal(changed, out) == (model == "complete")


class TestScores:
    def test_by_hand(self):
        logits, labels = torch.tensor([[0.9], [0.1], [0.4], [0.2]]), torch.tensor([[1.0], [0.0], [0.0], [1.0]])
        assert molecules_models.score("ogbg-molhiv", logits, labels) == pytest.approx(75)
        assert molecules_models.score("peptides-func", logits, labels) == pytest.approx(100 * (1 + 2 / 3) / 2)
        assert molecules_models.score("zinc-12k", logits, labels) == pytest.approx((0.1 + 0.1 + 0.4 + 0.8) / 4)

    @pytest.mark.slow
    def test_no_search_for_a_newer_ogb(self):
        """Importing ogb would otherwise start a thread that asks the network."""
        lines = (
            "import sys, torch",
            "from benchmarks.molecules_models import TASKS, Network, score",
            "assert score('ogbg-molhiv', torch.tensor([[1.0], [0.0]]), torch.tensor([[1.0], [0.0]])) == 100",
            "Network('ogbg-molhiv', 'gatv2', 'gattn', TASKS['ogbg-molhiv'].setting)",
            "assert 'outdated' not in sys.modules",
        )
        subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, cwd=Path(__file__).parents[2])

    @pytest.mark.parametrize(("dataset", "best"), [("zinc-12k", 1), ("peptides-func", 2)])
    def test_the_epoch_is_chosen_on_validation(self, dataset, best, root, tmp_path):
        trainer = Trainer(run_of("peptides-struct"), Molecules("peptides-struct", 3), tmp_path)
        trainer.task, trainer.seconds = TASKS[dataset], [1.0] * trainer.iterations
        trainer.curve = [{"epoch": i, "validation": v, "test": t} for i, v, t in ((1, 0.2, 0.6), (2, 0.3, 0.5))]
        row = trainer.result()
        assert (row["epoch"], row["validation"], row["test"]) == ((1, 0.2, 0.6), (2, 0.3, 0.5))[best - 1]

    def test_averaged_weights_are_scored(self, root, tmp_path):
        trainer = Trainer(run_of(), Molecules("peptides-struct", 3), tmp_path)
        trainer.advance(2)
        trainer.model.eval()
        with torch.no_grad():
            before = trainer.evaluate()
            for parameter in trainer.model["trained"].parameters():
                parameter.zero_()
            assert trainer.evaluate() == before
            for parameter in trainer.model["averaged"].parameters():
                parameter.zero_()
            assert trainer.evaluate()["val_loss"] != before["val_loss"]

    def test_the_schedule(self, root, tmp_path):
        trainer, rates = Trainer(run_of(epochs=14), Molecules("peptides-struct", 3), tmp_path), []
        for iteration in range(trainer.iterations):
            trainer.iteration = iteration
            rates.append(trainer.learning_rate())
        assert rates[1] == pytest.approx(2 * rates[0])
        assert max(rates) == pytest.approx(SMALL.learning_rate, rel=0.05)
        assert rates[2:] == sorted(rates[2:], reverse=True)
        assert rates[-1] == pytest.approx(0, abs=1e-9)


class TestBenchmark:
    def test_the_table(self, benchmark, capsys):
        arguments = ("--datasets", "peptides-func", "--models", "complete", "gatedgcn", "--runs", 2)
        table, rows = benchmark(*arguments, "--epochs", 2, "--timed-epochs", 1)
        assert [(row["model"], row["layers"], row["purpose"], row["seed"]) for row in rows] == [
            *((model, "gattn", "scores", seed) for model in ("complete", "gatedgcn") for seed in (0, 1)),
            *((model, layers, "times", 0) for model in ("complete", "gatedgcn") for layers in LAYERS),
        ]
        first = next(line for line in table.splitlines() if "complete" in line).split(" | ")
        tests = [row["test"] for row in rows[:2]]
        assert first[3] == f"{sum(tests) / 2:.2f} ± {abs(tests[0] - tests[1]) / 2**0.5:.2f}"
        own, other = (next(r for r in rows if (r["layers"], r["purpose"]) == (x, "times")) for x in LAYERS)
        assert first[-1] == f"{other['seconds_per_epoch'] / own['seconds_per_epoch']:.1f}× |"
        capsys.readouterr()
        assert benchmark(*arguments, "--epochs", 2, "--timed-epochs", 1) == (table, rows)
        assert "8 of 8 runs are in" in capsys.readouterr().out

    def test_published_rows(self, benchmark):
        gattn.datasets.load("zinc-12k", trust_files=True)
        table, _ = benchmark(
            "--datasets", "zinc-12k", "--models", "gatv2", "--runs", 1, "--epochs", 1, "--layers", "pyg"
        )
        assert "| zinc-12k | GAT, published | MAE | 0.384 ± 0.007 | – |" in table
        assert "Published results: https://arxiv.org/abs/2003.00982" in table

    def test_another_computation_is_an_error(self, benchmark, monkeypatch):
        class Wrong(molecules_models.PyGGatedGCNConv):
            def forward(self, *args):
                x, edge_attr = super().forward(*args)
                return 2 * x, edge_attr

        monkeypatch.setattr(molecules_models.LIBRARIES["pyg"], "GatedGCNConv", Wrong)
        with pytest.raises(SystemExit, match="^error: gatedgcn on peptides-struct has loss and gradient "):
            benchmark("--datasets", "peptides-struct", "--models", "gatedgcn", "--runs", 1, "--epochs", 1)

    def test_published_functions_and_the_budget(self, benchmark):
        arguments = ("--datasets", "peptides-func", "--models", "gatv2", "--runs", 1, "--parts", "scores")
        table, rows = benchmark(*arguments, "--epochs", 2)
        assert [(row["purpose"], row["epochs"]) for row in rows] == [("scores", 2)]
        assert "| rebuilt Peptides-func | GRIT, published | AP | 69.88 ± 0.82 | – |" in table
        assert "GRIT is from https://arxiv.org/abs/2305.17589" in table
        assert "The budget on rebuilt Peptides-func was 2 epoch(s) per run instead of 200;" in table

    def test_times_alone(self, benchmark):
        arguments = ("--datasets", "peptides-struct", "--models", "gatv2", "--epochs", 1, "--parts", "times")
        table, rows = benchmark(*arguments)
        assert [(row["purpose"], row["layers"]) for row in rows] == [("times", "gattn"), ("times", "pyg")]
        assert table.startswith("| data set | model | layers | parameters | seconds/epoch | × PyG |\n")
        assert table.count("| gatv2 | ") == 2

    def test_no_budget_if_training_was_whole(self, benchmark, monkeypatch):
        monkeypatch.setitem(TASKS, "peptides-func", replace(TASKS["peptides-func"], epochs=2))
        arguments = ("--datasets", "peptides-func", "--models", "gatv2", "--runs", 1, "--parts", "scores")
        assert "budget" not in benchmark(*arguments)[0]

    @pytest.mark.parametrize("dataset", ["zinc-12k", "peptides-func", "peptides-struct"])
    def test_missing_data(self, dataset, tmp_path, monkeypatch):
        def refuse(*arguments, **kwargs):
            raise OSError("no network in this test")

        monkeypatch.setattr("urllib.request.urlopen", refuse)
        monkeypatch.setenv("GATTN_DATA", str(tmp_path / "nothing"))
        with pytest.raises(SystemExit) as exit_info:
            MoleculeProperties.main(["--datasets", dataset, "--out", str(tmp_path / "out")])
        assert exit_info.value.code.startswith(f"error: {dataset} is not under ")
        assert "\n" not in exit_info.value.code
        assert "(use --datasets to leave it out)" in exit_info.value.code


class TestSpeed:
    def test_the_table(self, root, tmp_path, monkeypatch, one_process):
        models, out = ("gatedgcn", LINEAR), tmp_path / "out"
        monkeypatch.setattr(molecules, "train", lambda *arguments, **options: pytest.fail("a run was trained"))
        arguments = ["--datasets", "peptides-func", "--models", *models, "--parts", "speed", "--batches", "3"]
        MoleculeProperties.main([*arguments, "--out", str(out)])
        rows, table = ResultsFile(out / "runs.jsonl").rows(Speed, Speed.result_of), (out / "speed.md").read_text()
        assert [(row["model"], row["outcome"], row["per_epoch"]) for row in rows] == [(x, "ok", 3) for x in models]
        for row in rows:
            assert len(row["ours"]["times"]) == len(row["theirs"]["times"]) == 3
            assert row["ours"]["first"] == pytest.approx(row["theirs"]["first"], rel=1e-4)
            assert row["ratio"]["q1"] <= row["ratio"]["median"] <= row["ratio"]["q3"]
            start = f"| rebuilt Peptides-func | {row['model']} | 1 | {1000 * row['ours']['median']:.0f} ("
            (line,) = (line for line in table.splitlines() if line.startswith(start))
            cells = line.strip("| ").split(" | ")
            assert cells[4].startswith(f"{1000 * row['theirs']['median']:.0f} (")
            assert cells[5].startswith(f"{row['ratio']['median']:.2f} (")
            assert cells[6] == f"{3 * row['ours']['median']:.0f}"
        assert ", allocator kept, " in table
        assert "For gps-linear, loss and gradient are compared on molecules of one size" in table

    def test_seconds_of_an_epoch_are_extrapolated(self):
        side = {"median": 20.0, "q1": 15.0, "q3": 30.0, "peak_bytes": 5_000_000}
        quartiles = {"median": 2.5, "q1": 2.25, "q3": 3.0}
        row = {"outcome": "ok", "per_epoch": 85, "ours": side, "theirs": {**side, "median": 25.0}, "ratio": quartiles}
        line = speed_line(Speed("peptides-func", "gps", 10, 2, SMALL, "kept"), row)
        assert list(line.values()) == [
            *("rebuilt Peptides-func", "gps", "2", "20000 (15000–30000)", "25000 (15000–30000)"),
            *("2.50 (2.25–3.00)", "1700", "2125", "5", "5"),
        ]
        failed = speed_line(Speed("peptides-func", "gps", 10, 2, SMALL, "kept"), {"outcome": "WRONG"})
        assert list(failed.values())[3:] == ["WRONG", "WRONG", "WRONG", *"––––"]

    def test_both_sides_take_turns_on_the_same_batches(self, root, monkeypatch):
        """The first batch is for warming up; the second one shows the memory."""
        steps, step = [], Trainer.step

        def watched(trainer):
            steps.append((trainer.case.layers, trainer.iteration))
            step(trainer)

        monkeypatch.setattr(Trainer, "step", watched)
        monkeypatch.setattr(molecules_speed, "peak_above", lambda function: (function(), len(steps)))
        row = Speed("peptides-func", "gatv2", 3, 1, SMALL, "kept").measure(None)
        order = ("gattn", "pyg"), ("gattn", "pyg"), ("gattn", "pyg"), ("pyg", "gattn"), ("gattn", "pyg")
        assert steps == [(layers, number) for number, both in enumerate(order) for layers in both]
        assert (row["ours"]["peak_bytes"], row["theirs"]["peak_bytes"]) == (3, 4)

    def test_nothing_is_timed_if_the_libraries_disagree(self, benchmark, monkeypatch):
        first_of = Trainer.first_of

        def wrong(trainer, network, model):
            loss, norm = first_of(trainer, network, model)
            return [loss, norm * (1.01 if type(network.blocks[0].conv).__module__.startswith("torch") else 1)]

        monkeypatch.setattr(Trainer, "first_of", wrong)
        monkeypatch.setattr(molecules_speed, "duration", lambda step: pytest.fail("timed"))
        with pytest.raises(
            SystemExit, match=r"peptides-func gatv2, 1 thread\(s\) \(speed\): WRONG: loss and gradient are"
        ):
            benchmark("--datasets", "peptides-func", "--models", "gatv2", "--parts", "speed")

    def test_memory_is_kept(self):
        """And the number of threads and of batches belong to a case."""
        case = Speed("peptides-func", "gps", 10, 1, SMALL, "kept")
        assert case.machine()["allocator"] == "kept"
        assert len({case.key(), replace(case, threads=2).key(), replace(case, batches=9).key()}) == 3

    def test_it_does_not_go_with_torchrun(self, monkeypatch, capsys):
        monkeypatch.setattr(parallel, "size", lambda: 2)
        with pytest.raises(SystemExit):
            MoleculeProperties.parse(["--parts", "speed"])
        assert "start it without torchrun" in capsys.readouterr().err


def curves(runs, folder):
    """Trains all runs, by however many processes, in folders of their own, as each epoch leaves a checkpoint."""
    processes, data = parallel.size(), Molecules("peptides-struct", 3)
    folder = folder / str(processes)
    folder.mkdir(exist_ok=True)
    data.walks, data.y = data.walks.double(), data.y.double()
    with float64():
        return [trained(Trainer(replace(run, processes=processes), data, folder)) for run in runs]


class TestProcesses:
    @pytest.mark.slow
    def test_two_give_the_curve_of_one(self, root, tmp_path):
        """Batches of one molecule leave nothing to the second process; of five, parts are uneven."""
        runs = [
            replace(run_of(model=model), setting=replace(SMALL, dropout=0.0, batch=batch))
            for model, batch in (*((model, 5) for model in MODELS), ("gps", 1), ("gatedgcn", 1))
        ]
        for (losses, curve), (other_losses, other_curve) in zip(
            together(curves, runs, tmp_path), curves(runs, tmp_path), strict=True
        ):
            assert losses == pytest.approx(other_losses, rel=1e-7)
            assert curve == [pytest.approx(point, rel=1e-7) for point in other_curve]

    def test_the_number_of_processes_belongs_to_a_case(self):
        """Rows and checkpoints that do not know of it are those of one process."""
        row = json.loads((Path(molecules.__file__).parent / "results/molecules/runs.jsonl").read_text().splitlines()[0])
        assert "processes" not in row
        columns = ("dataset", "model", "layers", "seed", "epochs", "purpose", "setting", *VERSIONS)
        assert Run.key_of(row) == Run.key_of({**row, "processes": 1}) == repr([row[name] for name in columns])
        assert Run.key_of({**row, "processes": 2}) not in (Run.key_of(row), Run.key_of({**row, "processes": 3}))
        run = run_of()
        assert run.key() == run.key_of({**asdict(run), **run.machine()}) != replace(run, processes=2).key()
        assert ResultsFile(Path(molecules.__file__).parent / "results/molecules/runs.jsonl").rows(Run, Run.result_of)

    def test_workers_do_not_go_with_torchrun(self, monkeypatch, capsys):
        monkeypatch.setattr(parallel, "size", lambda: 2)
        with pytest.raises(SystemExit):
            MoleculeProperties.parse(["--workers", "2"])
        assert "leave --workers at 1" in capsys.readouterr().err


class TestResuming:
    @pytest.mark.parametrize("model", MODELS)
    def test_an_interrupted_run_ends_with_the_same_numbers(self, model, root, tmp_path):
        run, data = run_of(model=model, epochs=3), Molecules("peptides-struct", 3)
        (tmp_path / "whole").mkdir()
        whole = Trainer(run, data, tmp_path / "whole").run(lambda *progress: None)
        Trainer(run, data, tmp_path).advance(5)
        second = Trainer(run, data, tmp_path)
        assert second.iteration == 3
        row = second.run(lambda *progress: None)
        assert without_times(row) == without_times(whole)

    @pytest.mark.slow
    def test_a_killed_process_loses_nothing(self, root, tmp_path, start):
        """The settings are the real ones, as these are other processes."""
        arguments = ["--datasets", "peptides-struct", "--models", "gps", "--runs", "1", "--epochs", "25"]
        arguments = ["-m", "benchmarks.molecules", *arguments, "--timed-epochs", "0", "--out"]
        rows = {}
        for name in ("whole", "killed"):
            process = start(*arguments, tmp_path / name, stdout=subprocess.DEVNULL)
            if name == "killed":
                deadline = time.monotonic() + 300
                while not list((tmp_path / name).glob("*.pt")) and time.monotonic() < deadline:
                    time.sleep(0.01)
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                (checkpoint,) = (tmp_path / name).glob("*.pt")
                done = torch.load(checkpoint)["iteration"]
                assert 0 < done < 25
                assert not ResultsFile(tmp_path / name / "runs.jsonl").rows()
                process = start(*arguments, tmp_path / name, stdout=subprocess.DEVNULL)
            assert process.wait(timeout=300) == 0
            (rows[name],) = ResultsFile(tmp_path / name / "runs.jsonl").rows()
        assert without_times(rows["killed"]) == without_times(rows["whole"])


@pytest.mark.slow
def test_real_molecules(load, tmp_path):
    """Training on molbace, for a little while, finds something."""
    load("ogbg-molbace")
    setting = replace(TASKS["ogbg-molbace"].setting, channels=16, num_layers=2)
    run = Run("ogbg-molbace", "gatv2", "gattn", 0, 8, "scores", setting)
    row = Trainer(run, Molecules(run.dataset, setting.walks), tmp_path).run(lambda *progress: None)
    assert row["test"] > 60
    assert row["curve"][-1]["train_loss"] < 0.6
