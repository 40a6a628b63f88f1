import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import gattn
from benchmarks import nodes, nodes_models
from benchmarks.framework import parallel
from benchmarks.framework.results import ResultsFile
from benchmarks.nodes import (
    GLOBAL_RECIPES,
    RECIPES,
    Classifier,
    Nodes,
    Run,
    recipe_of,
    roc_auc,
    with_epochs,
)
from benchmarks.nodes_models import GlobalRecipe, Network, Recipe
from tests.benchmarks.together import float64, together, trained

RECIPE = Recipe(8, 2, 0.3, 0.01, 5e-4, 12, "batch", residual=True)
GLOBAL = GlobalRecipe(
    8, 2, 0.3, 0.01, 5e-4, 20, input_dropout=0.2, heads=2, global_layers=1, graph_weight=0.8, local_epochs=12
)
TIMES = ("seconds_per_epoch", "peak_bytes", "started")


@pytest.fixture
def board(tmp_path, monkeypatch):
    """Minesweeper in its published format, but with sixty nodes; the folder of data."""
    raw = tmp_path / "data" / "minesweeper" / "raw"
    raw.mkdir(parents=True)
    rng, number = np.random.default_rng(0), 60
    labels = rng.integers(0, 2, number)
    features = (rng.normal(size=(number, 7)) + labels[:, None]).astype(np.float32)
    part = np.stack([rng.permutation(number) % 4 for _ in range(10)])
    masks = {"train_masks": part < 2, "val_masks": part == 2, "test_masks": part == 3}
    edges = rng.integers(0, number, (200, 2))
    np.savez(raw / "minesweeper.npz", node_features=features, node_labels=labels, edges=edges, **masks)
    monkeypatch.setenv("GATTN_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def run(board):
    return Run("minesweeper", "public", "gat", "gattn", 0, 4, 200, "cpu", 1, "dense", RECIPE)


def scores(out):
    """The rows without what differs from one time to the next."""
    rows = ResultsFile(out / "runs.jsonl").rows()
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


class TestRocAuc:
    def test_by_hand(self):
        """Of four pairs, two are in order, one is in the wrong one, and one is a tie."""
        assert roc_auc(torch.tensor([0.1, 0.5, 0.5, 0.4]), torch.tensor([0, 0, 1, 1])) == 2.5 / 4

    def test_against_all_pairs(self):
        generator = torch.Generator().manual_seed(0)
        score = torch.randint(0, 9, (200,), generator=generator).float()
        labels = torch.randint(0, 2, (200,), generator=generator)
        above = score[labels == 1].unsqueeze(1) - score[labels == 0]
        assert roc_auc(score, labels) == pytest.approx(((above > 0) + (above == 0) / 2).double().mean().item())


class TestNetwork:
    @pytest.mark.parametrize("model", nodes.MODELS)
    @pytest.mark.parametrize("dataset", RECIPES)
    def test_both_kinds_of_layers_are_the_same_network(self, dataset, model):
        recipe = replace(RECIPES[dataset], hidden_channels=8)
        edge_index = torch.tensor([[0, 1, 2, 0, 1, 2], [1, 2, 0, 0, 1, 2]])
        results, networks = [], []
        for layers in nodes.LAYERS:
            torch.manual_seed(0)
            networks.append(Network(recipe, 5, 3, model, layers).eval())
            results.append(networks[-1](torch.arange(15.0).view(3, 5) / 10, edge_index))
        assert results[0].shape == (3, 3)
        torch.testing.assert_close(*results)
        for network, package in zip(networks, ("gattn", "torch_geometric"), strict=True):
            assert {type(conv).__module__.split(".")[0] for conv in network.convs} == {package}
        assert len(networks[0].residuals) == recipe.layers * recipe.residual

    @pytest.mark.parametrize("model", nodes.MODELS)
    def test_sparse_features(self, model):
        network = Network(RECIPES["cora"], 5, 3, model, "gattn").eval()
        x, edge_index = torch.eye(5), torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]])
        torch.testing.assert_close(network(x.to_sparse_csr(), edge_index), network(x, edge_index))

    def test_every_hyper_parameter_is_used(self):
        """Another value gives other parameters, another result, or other dropped features."""

        def outcome(recipe):
            torch.manual_seed(0)
            network = Network(recipe, 4, 3, "gat", "gattn")
            torch.manual_seed(0)
            return network(torch.rand(3, 4), torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 1, 2]])).tolist()

        base = Recipe(8, 2, 0.5, 0.01, 0.0, 10, "batch")
        others = {"hidden_channels": 4, "layers": 3, "dropout": 0.1, "norm": "layer", "residual": True}
        for name, value in (others | {"linear_in": True, "input_dropout": 0.5, "heads": 2}).items():
            assert outcome(replace(base, **{name: value})) != outcome(base), name


class TestGraphTransformers:
    @pytest.mark.parametrize("model", ["sgformer", "gps"])
    def test_both_kinds_of_layers_are_the_same_network(self, model):
        ours, theirs = (nodes_models.network(GLOBAL, 5, 3, model, layers).eval() for layers in nodes.LAYERS)
        theirs.load_state_dict(ours.state_dict())
        x, edge_index = torch.rand(4, 5), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3], [1, 2, 3, 0, 0, 1, 2, 3]])
        torch.testing.assert_close(ours(x, edge_index), theirs(x, edge_index))
        for net, package in ((ours, "gattn"), (theirs, "torch_geometric")):
            attentions = [part for part in net.modules() if type(part).__name__.endswith("Attention")]
            assert {type(part).__module__.split(".")[0] for part in attentions} == {package}
            assert len(attentions) == (GLOBAL.global_layers if model == "sgformer" else GLOBAL.layers)

    @pytest.mark.parametrize("model", GLOBAL_RECIPES)
    def test_every_hyper_parameter_is_used(self, model):
        """Another value gives another result or other dropped features."""

        def outcome(recipe):
            torch.manual_seed(0)
            net = nodes_models.network(recipe, 4, 3, model, "gattn")
            if model == "polynormer":
                net.net.use_global()
            torch.manual_seed(0)
            return net(torch.rand(3, 4), torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 1, 2]])).tolist()

        others = {"hidden_channels": 4, "layers": 3, "dropout": 0.1, "heads": 1}
        others |= {"global_layers": 2} if model != "gps" else {}
        others |= {"input_dropout": 0.5} if model == "polynormer" else {}
        others |= {"graph_weight": 0.5} if model.startswith("sgformer") else {}
        others |= {"norm": "frobenius"} if model.startswith("sgformer") else {}
        for name, value in others.items():
            assert outcome(replace(GLOBAL, **{name: value})) != outcome(GLOBAL), name

    @pytest.mark.parametrize("model", GLOBAL_RECIPES)
    def test_it_learns(self, model, run, tmp_path):
        run = replace(run, model=model, recipe=replace(GLOBAL, dropout=0.1, epochs=60))
        training = Classifier(run, tmp_path, 1e6)
        assert training.peak_bytes() >= 0
        training.advance(60)
        assert training.best()["val_score"] > 0.8
        assert getattr(training.model, "kept", None) is None

    def test_polynormer_is_that_of_its_authors(self):
        """Their formulas, with the constant β that takes the place of learnt ones near it."""
        model = nodes_models.network(GLOBAL, 5, 3, "polynormer", "gattn").eval()
        net = model.net.use_global()
        features, edge_index = torch.rand(4, 5), torch.tensor([[0, 1, 2, 3, 0], [0, 1, 2, 3, 2]])
        x, total = model.linear_in(features), 0
        for h_lin, conv, lin, ln in zip(net.h_lins, net.local_convs, net.lins, net.lns, strict=True):
            h, a = h_lin(x).relu(), (conv(x, edge_index) + lin(x)).relu()
            x = (ln(h * a) + a) / 2
            total = total + x
        x = net.ln(total)
        for attn in net.global_attn:
            key, value = (rows.view(4, 4, 2) for rows in (attn.k(x).sigmoid(), attn.v(x)))  # nodes, channels, heads
            weights = torch.einsum("ich,jch->ijh", key, key)
            mean = torch.einsum("ijh,jch->ich", weights / weights.sum(1, keepdim=True), value)
            x = attn.lin_out(attn.lns(mean.flatten(1)) * (attn.h_lins(x) + 0.5)).relu()
        torch.testing.assert_close(model(features, edge_index), net.pred_global(x).log_softmax(-1))
        dropouts = {net.in_drop, net.dropout, *(attn.dropout.p for attn in net.global_attn)}
        assert (dropouts, model.input_dropout.p) == ({GLOBAL.dropout}, GLOBAL.input_dropout)


class TestPhases:
    """Polynormer's twelve local epochs, of which the fourth is the best, and its eight global ones."""

    @pytest.fixture
    def start(self, run, tmp_path, monkeypatch):
        def start(folder="."):
            (tmp_path / folder).mkdir(exist_ok=True)
            return Classifier(replace(run, model="polynormer", recipe=GLOBAL), tmp_path / folder, 0.0)

        monkeypatch.setattr(Classifier, "score", lambda self, logits, part: 1 - self.iteration / 100)
        return start

    def test_global_layers_are_trained_in_the_global_phase_only(self, start):
        training = start()
        names = [name for name, _ in training.model.named_parameters() if "global" in name]
        counts = []
        for _ in range(GLOBAL.epochs):
            before = {name: value.clone() for name, value in training.model.state_dict().items() if name in names}
            training.advance(1)
            after = training.model.state_dict()
            counts.append(sum(not torch.equal(before[name], after[name]) for name in names))
        assert counts[:12] == [0] * 12
        assert counts[12:] == [len(names)] * 8

    def test_the_global_phase_starts_from_the_best_evaluation(self, start):
        training = start()
        training.advance(4)
        best = {name: value.clone() for name, value in training.model.named_parameters()}
        training.advance(8)
        assert not torch.equal(training.model.linear_in.weight, best["linear_in.weight"])
        training.optimizer.defaults["lr"] = 0.0
        training.advance(1)
        for name, value in training.model.named_parameters():
            assert torch.equal(value, best[name]), name
        assert training.optimizer.state[training.model.linear_in.weight]["step"] == 5

    @pytest.mark.parametrize("epoch", [4, 8, 12, 16])
    def test_it_resumes_in_either_phase(self, epoch, start):
        start("resumed").advance(epoch)
        resumed, whole = start("resumed"), start("whole")
        assert (resumed.iteration, whole.iteration) == (epoch, 0)
        for training in (resumed, whole):
            training.advance(GLOBAL.epochs)
        for name, value in whole.model.named_parameters():
            assert torch.equal(value, resumed.model.get_parameter(name)), name
        assert resumed.curve == whole.curve

    def test_fewer_epochs_are_divided_among_the_phases(self):
        assert with_epochs(GLOBAL, 5) == replace(GLOBAL, epochs=5, local_epochs=3)
        assert with_epochs(GLOBAL, None) == GLOBAL
        assert with_epochs(RECIPE, 5) == replace(RECIPE, epochs=5)


class TestTraining:
    def test_the_graph(self, run):
        data = nodes.prepare(run)
        pairs = set(map(tuple, data.edge_index.t().tolist()))
        assert len(pairs) == data.num_edges
        assert {(j, i) for i, j in pairs} == pairs
        assert sum(i == j for i, j in pairs) == 60

    def test_seeds_are_splits(self, run):
        first, second = (nodes.prepare(replace(run, seed=seed)) for seed in (0, 1))
        assert not torch.equal(first.test_mask, second.test_mask)

    def test_features_are_normalised_where_the_recipe_says_so(self, run):
        data = nodes.prepare(replace(run, recipe=replace(RECIPE, normalise=True)))
        assert not torch.equal(data.x, nodes.prepare(run).x)

    def test_the_test_score_is_that_of_the_best_validation_score(self, run, tmp_path):
        training = Classifier(run, tmp_path, 10.0)
        training.curve = [
            {"epoch": epoch, "val_score": val, "test_score": test}
            for epoch, val, test in ((4, 0.5, 0.9), (8, 0.7, 0.6), (12, 0.7, 0.8))
        ]
        training.seconds = [0.3, 0.1, 0.2]
        row = training.result()
        assert (row["best_epoch"], row["val_score"], row["test_score"]) == (8, 0.7, 0.6)
        assert row["seconds_per_epoch"] == 0.2
        assert row["curve"] == {"val": [0.5, 0.7, 0.7], "test": [0.9, 0.6, 0.8]}

    @pytest.mark.parametrize(("patience", "epochs"), [(1, 12), (4, 12), (5, 16), (13, 24), (99, 40), (None, 40)])
    def test_patience_ends_it_at_an_evaluation(self, patience, epochs, run, tmp_path, monkeypatch):
        values = {4: 0.5, 8: 0.7, 12: 0.7, 16: 0.6, 20: 0.6, 24: 0.6, 28: 0.9, 32: 0.1, 36: 0.1, 40: 0.1}
        monkeypatch.setattr(Classifier, "score", lambda self, logits, part: values[self.iteration])
        run = replace(run, patience=patience, recipe=replace(RECIPE, epochs=40))
        row = Classifier(run, tmp_path, 10.0).run(lambda *progress: None)
        assert (row["epochs"], row["best_epoch"]) == (epochs, 28 if epochs == 40 else 8)
        assert len(row["curve"]["val"]) == epochs // 4

    def test_it_learns_and_its_memory_is_measured_without_a_trace(self, run, tmp_path):
        run = replace(run, recipe=replace(RECIPE, epochs=40))
        folders = [tmp_path / name for name in ("measured", "plain")]
        for path in folders:
            path.mkdir()
        measured, plain = (Classifier(run, path, 10.0) for path in folders)
        assert measured.peak_bytes() >= 0
        for training in (measured, plain):
            training.advance(40)
        assert [point["epoch"] for point in plain.curve] == list(range(4, 41, 4))
        assert measured.curve == plain.curve
        assert max(point["val_score"] for point in plain.curve) > 0.8

    def test_weights_that_are_not_finite_end_it(self, run, tmp_path):
        training = Classifier(run, tmp_path, 10.0)
        with torch.no_grad():
            training.model.linear_out.weight.fill_(torch.nan)
        with pytest.raises(FloatingPointError, match="the validation score became nan in iteration 4"):
            training.advance(4)

    @pytest.mark.slow
    def test_a_run_killed_half_way_goes_on_to_the_same_row(self, board, tmp_path, kill, one_process):
        arguments = ["--datasets", "minesweeper", "--models", "gat", "--runs", "1", "--epochs", "200"]
        assert 0 < kill("nodes", arguments, tmp_path / "killed", {"GATTN_DATA": str(board)}) < 200
        for out in ("killed", "whole"):
            Nodes.main([*arguments, "--out", str(tmp_path / out)])
        assert scores(tmp_path / "killed") == scores(tmp_path / "whole")
        assert not list(tmp_path.glob("*/*.pt"))


def curves(runs, folder):
    """Trains all runs, by however many processes; no checkpoints."""
    with float64():
        trainings = [Classifier(replace(run, processes=parallel.size()), folder, 1e6) for run in runs]
        for training in trainings:
            training.x = training.x.double()
        return [trained(training) for training in trainings]


class TestProcesses:
    @pytest.mark.slow
    def test_two_give_the_curve_of_one(self, run, tmp_path):
        """With batch norm, too, in training (the losses) and in evaluation."""
        runs = [
            replace(
                run, model=model, features=features, evaluate_every=9, recipe=replace(RECIPE, dropout=0.0, norm=norm)
            )
            for model, features, norm in (
                ("gat", "dense", "batch"),
                ("gatv2", "sparse", "batch"),
                ("transformer", "dense", "layer"),
            )
        ]
        for (losses, curve), (other_losses, other_curve) in zip(
            together(curves, runs, tmp_path), curves(runs, tmp_path), strict=True
        ):
            assert losses == pytest.approx(other_losses, rel=1e-7)
            assert curve == other_curve

    @pytest.mark.slow
    @pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
    def test_a_killed_worker_ends_the_job_which_goes_on_to_the_same_row(self, board, tmp_path, start):
        module = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "benchmarks.nodes"]
        arguments = [*module, "--datasets", "minesweeper", "--models", "gat", "--runs", "1", "--epochs", "60"]
        arguments += ["--evaluate-every", "3", "--save-every", "0.001", "--out"]
        job = start(*arguments, tmp_path / "killed", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("killed/*.pt")) and job.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        workers = {}
        for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split():
            workers[Path(f"/proc/{pid}/environ").read_text().split("\0RANK=")[1][0]] = int(pid)
        os.kill(workers["1"], signal.SIGKILL)
        errors = job.communicate(timeout=60)[1]
        assert job.returncode != 0
        assert re.search(r"Root Cause.*rank +: 1 .*Signal 9 \(SIGKILL\)", errors, re.DOTALL)
        for pid in workers.values():
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        (checkpoint,) = tmp_path.glob("killed/*.pt")
        assert 0 < torch.load(checkpoint, weights_only=True)["iteration"] < 60
        assert not scores(tmp_path / "killed")
        jobs = [start(*arguments, tmp_path / out, stdout=subprocess.DEVNULL) for out in ("killed", "whole")]
        assert [job.wait(timeout=120) for job in jobs] == [0, 0]
        assert scores(tmp_path / "killed") == scores(tmp_path / "whole")
        assert [row["processes"] for row in scores(tmp_path / "whole")] == [2]
        assert not list(tmp_path.glob("*/*.pt"))

    @pytest.mark.parametrize(
        ("option", "reason"),
        [
            (["--layers", "pyg"], "start --layers pyg without torchrun"),
            (["--workers", "2"], "leave --workers at 1"),
            (["--models", "gat", "gps"], "gps attends to all nodes, so it needs the whole graph"),
        ],
    )
    def test_what_does_not_go_with_torchrun(self, option, reason, monkeypatch, capsys):
        monkeypatch.setattr(parallel, "size", lambda: 2)
        with pytest.raises(SystemExit):
            Nodes.parse(option)
        assert reason in capsys.readouterr().err


class TestCommandLine:
    @pytest.mark.slow
    def test_everything(self, board, one_process, tmp_path, monkeypatch, capsys):
        monkeypatch.setitem(RECIPES, "minesweeper", RECIPE)
        arguments = ["--datasets", "Minesweeper", "--layers", "gattn", "pyg", "--runs", "2", "--evaluate-every", "5"]
        Nodes.main([*arguments, "--out", str(tmp_path / "out")])
        rows = ResultsFile(tmp_path / "out" / "runs.jsonl").rows()
        assert [(row["seed"], row["model"], row["layers"]) for row in rows] == [
            (seed, model, layers) for seed in (0, 1) for model in nodes.MODELS for layers in nodes.LAYERS
        ]
        assert all(len(row["curve"]["val"]) == 3 for row in rows)  # epochs 5, 10 and 12
        assert not list((tmp_path / "out").glob("*.pt"))
        assert (tmp_path / "out" / "curves.png").stat().st_size > 10_000
        table = (tmp_path / "out" / "table.md").read_text()
        assert table.count("| 97.73 ± 0.73 | 92.01 ± 0.68, sep 93.91 ± 0.35 |") == 2
        assert table.count("| – | – |") == 4
        assert table.count("| ROC AUC |") == 6
        assert "GATv2 and Transformer use the same ones, untuned" in table
        capsys.readouterr()
        Nodes.main([*arguments, "--epochs", "3", "--runs", "1", "--out", str(tmp_path / "out")])
        table = (tmp_path / "out" / "table.md").read_text()
        assert "| 3 of 12 |" in table
        assert "Some runs had 3 epochs" in table
        assert "97.73" not in table

    def test_cases(self, monkeypatch):
        monkeypatch.setattr(nodes, "densities", lambda names, skip: dict.fromkeys(names, 0.01))
        arguments = ["--datasets", "photo", "wikics", "cora", "--models", "gat"]
        options = Nodes.parse([*arguments, "--evaluate-every", "7", "--patience", "30"])
        runs = Nodes(options, None, None).cases()
        counts = {}
        for run in runs:
            counts[run.dataset, run.split] = counts.get((run.dataset, run.split), 0) + 1
        assert counts == {
            ("photo", "60-20-20"): 10,
            ("photo", "random"): 10,
            ("photo", "luo"): 5,
            ("wikics", "public"): 20,
            ("cora", "public"): 5,
            ("cora", "random"): 5,
        }
        assert {(run.evaluate_every, run.patience) for run in runs} == {(7, 30)}
        assert {run.seed for run in runs[:4]} == {0}
        assert {run.features for run in runs} == {"sparse"}

    def test_cases_of_graph_transformers(self, monkeypatch):
        """They are those with a recipe, on the published split unless another one is requested."""
        monkeypatch.setattr(nodes, "densities", lambda names, skip: dict.fromkeys(names, 0.01))

        def counts(*arguments):
            runs = Nodes(Nodes.parse(["--models", "gat", "polynormer", *arguments]), None, None).cases()
            of_model = [run for run in runs if run.model == "polynormer"]
            assert len(runs) > len(of_model)
            assert {run.features for run in of_model} == {"dense"}
            assert all(run.recipe == GLOBAL_RECIPES["polynormer"][run.dataset] for run in of_model)
            kinds = [(run.dataset, run.split) for run in of_model]
            return {kind: kinds.count(kind) for kind in kinds}

        assert counts() == {("photo", "luo"): 5, ("minesweeper", "public"): 10}
        assert counts("--datasets", "photo", "--splits", "random", "luo") == {
            ("photo", "random"): 10,
            ("photo", "luo"): 5,
        }

    def test_published_scores_stand_beside_their_model_and_split(self):
        row = {"seed": 0, "layers": "gattn", "test_score": 0.5, "seconds_per_epoch": 1.0, "peak_bytes": 1}
        row |= {"best_epoch": 1, "epochs": 1}
        kinds = [("60-20-20", "gat"), *(("luo", model) for model in ("gat", "gatv2", *GLOBAL_RECIPES))]
        rows = [
            {**row, "dataset": "photo", "split": split, "model": model, "recipe": asdict(recipe_of("photo", model))}
            for split, model in kinds
        ]
        assert [line["published"] for line in nodes.summarise(rows)] == [
            "–",
            "96.60 ± 0.33",
            *["–"] * 4,
            "96.46 ± 0.26",
        ]
        rows[-1]["recipe"]["epochs"] = 1000
        assert nodes.summarise(rows)[-1]["published"] == "–"
        assert nodes.summarise(rows)[-1]["epochs"] == "1 of 1200"

    def test_committed_rows_have_the_recipes_of_today(self):
        rows = ResultsFile(Path(nodes.__file__).parent / "results" / "nodes" / "runs.jsonl").rows(Run, Run.result)
        assert len(rows) >= 120
        for row in rows:
            assert row["recipe"] == asdict(recipe_of(row["dataset"], row["model"]))

    def test_every_recipe_has_its_data_set_and_its_splits(self):
        for dataset in RECIPES:
            assert gattn.datasets.canonical_name(dataset) == dataset
            assert set(nodes.SPLITS.get(dataset, ("public",))) <= set(nodes.splits_of(dataset))
        for dataset, split in [*nodes.LUO, *nodes.POLYNORMER, *nodes.OTHERS]:
            assert split in nodes.splits_of(dataset)
        json.dumps([asdict(recipe) for recipe in RECIPES.values()])
        for recipes in GLOBAL_RECIPES.values():
            assert list(recipes) == ["photo", "minesweeper"]

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            (["--datasets", "corra"], "unknown data set 'corra'"),
            (["--datasets", "karate"], "there is no recipe for karate"),
            (["--datasets", "minesweeper", "--splits", "60-20-20"], "minesweeper has no split 60-20-20"),
            (["--models", "gcn"], "invalid choice"),
            (
                ["--models", "gps", "--datasets", "photo", "cora"],
                "there is no recipe of gps for cora: choose from photo",
            ),
            (["--models", "polynormer", "--layers", "gattn", "pyg"], "PyG's Polynormer fails in its global phase"),
            (["--epochs", "0"], "is not a whole number"),
        ],
    )
    def test_wrong_arguments(self, arguments, reason, capsys):
        with pytest.raises(SystemExit):
            Nodes.main(arguments)
        assert reason in capsys.readouterr().err

    def test_missing_data(self, monkeypatch, tmp_path):
        monkeypatch.setenv("GATTN_DATA", str(tmp_path / "nothing"))

        def offline(*arguments, **options):
            raise OSError("offline")

        monkeypatch.setattr("socket.getaddrinfo", offline)
        with pytest.raises(SystemExit, match="error: photo is not under") as error:
            Nodes.main(["--datasets", "photo", "--out", str(tmp_path / "out")])
        assert os.linesep not in str(error.value)
