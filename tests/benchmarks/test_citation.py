import json
import math
import os
import signal
import subprocess
import time
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch
from torch_geometric.data import Data

from benchmarks import citation
from benchmarks.framework.node_data import check_task
from benchmarks.framework.results import ResultsFile

QUICK = ["--datasets", "karate", "--models", "gat", "gatv2", "--runs", "2", "--epochs", "25"]
EXACT = (
    "dataset",
    "model",
    "layers",
    "seed",
    "test_accuracy",
    "val_loss",
    "val_accuracy",
    "epochs",
    "checkpoint_epoch",
    "curve",
)


def exact(out):
    """What must not depend on where and when it was computed, in a fixed order."""
    rows = ResultsFile(out / "runs.jsonl").rows()
    return sorted(json.dumps({name: row[name] for name in EXACT}) for row in rows)


@pytest.fixture
def quick(one_process, tmp_path):
    """The folder of the quick benchmark."""
    citation.Citation.main([*QUICK, "--out", str(tmp_path / "quick")])
    return tmp_path / "quick"


def wait_for_rows(path, count):
    """Waits until this many runs have finished."""
    deadline = time.monotonic() + 120
    while len(ResultsFile(path).rows()) < count and time.monotonic() < deadline:
        time.sleep(0.02)


class TestProtocol:
    run = citation.Run("karate", "gat", "gattn", 0, "cpu", 1, "dense", citation.Protocol(patience=3, max_epochs=50))

    def train(self, monkeypatch, folder, losses, accuracies, run=None):
        points = (
            {"train_loss": 0.0, "val_loss": loss, "val_accuracy": accuracy, "test_accuracy": accuracy / 10 + loss}
            for loss, accuracy in zip(losses, accuracies, strict=True)
        )
        monkeypatch.setattr(citation.Classifier, "evaluate", lambda self: next(points))
        return citation.train(run or self.run, lambda *progress: None, folder, 10.0)

    def test_a_checkpoint_needs_both_at_their_best(self, monkeypatch, tmp_path):
        result = self.train(monkeypatch, tmp_path, [1.0, 0.9, 0.8, 0.95, 0.95, 0.95], [0.5, 0.6, 0.55, 0.5, 0.5, 0.5])
        assert result["checkpoint_epoch"] == 2
        assert result["test_accuracy"] == pytest.approx(0.06 + 0.9)
        assert result["epochs"] == 6

    def test_patience_counts_epochs_in_which_neither_improved(self, monkeypatch, tmp_path):
        losses = [1.0, 1.1, 1.1, 0.9, 1.1, 1.1, 1.1, 0.1]
        accuracies = [0.5, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.9]
        assert self.train(monkeypatch, tmp_path, losses, accuracies)["epochs"] == 7

    def test_equal_counts_as_best(self, monkeypatch, tmp_path):
        result = self.train(monkeypatch, tmp_path, [1.0, 1.0, 2.0, 2.0, 2.0], [0.5, 0.5, 0.1, 0.1, 0.1])
        assert result["checkpoint_epoch"] == 2

    def test_no_more_than_max_epochs(self, monkeypatch, tmp_path):
        run = replace(self.run, protocol=citation.Protocol(max_epochs=4))
        assert self.train(monkeypatch, tmp_path, [1.0] * 9, [0.5] * 9, run)["epochs"] == 4

    def test_a_loss_that_is_not_a_number_is_an_error(self, monkeypatch, tmp_path):
        with pytest.raises(FloatingPointError, match="the validation loss became nan in iteration 2"):
            self.train(monkeypatch, tmp_path, [1.0, float("nan")], [0.5, 0.5])

    def test_hyper_parameters(self):
        cora, pubmed = citation.protocol_for("cora", "gattn", 10), citation.protocol_for("pubmed", "gattn", 10)
        assert (cora.learning_rate, cora.weight_decay, cora.out_heads) == (0.005, 0.0005, 1)
        assert (pubmed.learning_rate, pubmed.weight_decay, pubmed.out_heads) == (0.01, 0.001, 8)
        assert citation.protocol_for("cora", "pyg", 10).value_dropout == 0

    @pytest.mark.parametrize("model", citation.MODELS)
    def test_both_kinds_of_layers_are_the_same_network(self, model):
        """What `--layers` compares differs in dropout alone."""
        run = replace(self.run, model=model)
        data = citation.prepare(run)
        torch.manual_seed(0)
        ours = citation.build_model(run, data).eval()
        torch.manual_seed(0)
        theirs = citation.build_model(replace(run, layers="pyg"), data).eval()
        assert {type(layer).__module__.split(".")[0] for layer in theirs.convs} == {"torch_geometric"}
        assert {type(layer).__module__.split(".")[0] for layer in ours.convs} == {"gattn"}
        torch.testing.assert_close(ours(data.x, data.edge_index), theirs(data.x, data.edge_index))

    def test_features(self, load):
        load("cora")
        run = replace(self.run, dataset="cora")
        dense, sparse = citation.prepare(run).x, citation.prepare(replace(run, features="sparse")).x
        torch.testing.assert_close(sparse.to_dense(), dense)
        torch.testing.assert_close(dense.sum(1), torch.ones(2708))


class TestResuming:
    def test_nothing_runs_twice(self, quick, capsys):
        before = {path.name: path.read_bytes() for path in quick.iterdir()}
        citation.Citation.main([*QUICK, "--out", str(quick)])
        assert "4 of 4 runs are in" in capsys.readouterr().out
        assert {path.name: path.read_bytes() for path in quick.iterdir()} == before

    @pytest.mark.slow
    def test_a_killed_process_loses_nothing(self, tmp_path, start):
        arguments = ["--datasets", "karate", "--runs", "6", "--epochs", "150", "--out"]
        whole, killed = tmp_path / "whole", tmp_path / "killed"
        citation.Citation.main([*arguments, str(whole)])
        process = start("-m", "benchmarks.citation", *arguments, killed, stdout=subprocess.DEVNULL)
        wait_for_rows(killed / "runs.jsonl", 2)
        os.kill(process.pid, signal.SIGKILL)  # inside a run, as rows appear when one has ended
        process.wait()
        assert 2 <= len(exact(killed)) < len(exact(whole)) == 6
        citation.Citation.main([*arguments, str(killed)])
        assert exact(killed) == exact(whole)

    @pytest.mark.slow
    def test_a_run_killed_half_way_goes_on_to_the_same_row(self, tmp_path, kill, one_process):
        """Whose dropout is not seeded epoch by epoch."""
        arguments = ["--datasets", "karate", "--runs", "1", "--epochs", "400"]
        assert 0 < kill("citation", arguments, tmp_path / "killed") < 400
        for out in ("killed", "whole"):
            citation.Citation.main([*arguments, "--out", str(tmp_path / out)])
        assert exact(tmp_path / "killed") == exact(tmp_path / "whole")
        assert not list(tmp_path.glob("*/*.pt"))

    @pytest.mark.slow
    @pytest.mark.parametrize("workers", [1, 2])
    def test_processes_give_the_same_numbers(self, workers, quick, tmp_path, monkeypatch):
        monkeypatch.undo()
        citation.Citation.main([*QUICK, "--workers", str(workers), "--out", str(tmp_path / "others")])
        assert exact(tmp_path / "others") == exact(quick)

    @pytest.mark.slow
    @pytest.mark.parametrize("workers", [1, 2])
    def test_an_interruption_from_the_keyboard(self, tmp_path, workers, start):
        arguments = ["--datasets", "karate", "--runs", "99", "--epochs", "100", "--workers", workers]
        process = start("-m", "benchmarks.citation", *arguments, "--out", tmp_path, stdout=subprocess.PIPE)
        wait_for_rows(tmp_path / "runs.jsonl", 1)
        os.killpg(process.pid, signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
        assert process.returncode == 130
        assert b"the same command resumes from there" in printed.replace(b"\n", b" ")
        assert 1 <= len(ResultsFile(tmp_path / "runs.jsonl").rows()) < 99

    def test_other_settings_are_other_runs(self, quick):
        citation.Citation.main([*QUICK, "--epochs", "5", "--out", str(quick)])
        assert len(ResultsFile(quick / "runs.jsonl").rows()) == 8

    def test_a_loss_that_is_not_finite_is_an_error(self, one_process, tmp_path, monkeypatch):
        metrics = dict.fromkeys(("train_loss", "val_loss", "val_accuracy", "test_accuracy"), math.nan)
        monkeypatch.setattr(citation.Classifier, "evaluate", lambda self: metrics)
        with pytest.raises(SystemExit, match="error: karate gat gattn seed 0: .*the validation loss became nan"):
            citation.Citation.main(["--datasets", "karate", "--runs", "1", "--out", str(tmp_path)])


class TestCommandLine:
    def test_report(self, quick, capsys):
        citation.Citation.main([*QUICK, "--layers", "gattn", "pyg", "--out", str(quick)])
        printed = capsys.readouterr().out
        table = (quick / "table.md").read_text()
        for text in (printed, table):
            text = text.replace("\n", " ")
            assert "GATv2 and Transformer use GAT's hyper-parameters" in text
            assert "limited to 25 epochs" in text
            assert f"torch {version('torch')}" in text
        assert "gattn, sparse features" in table
        assert "pyg, dense features" in table
        assert (quick / "curves.png").stat().st_size > 10_000

    def test_published_figures_stand_beside_ours(self):
        row = {"dataset": "cora", "model": "gat", "layers": "gattn", "features": "sparse", "epochs": 3}
        row["protocol"] = {"max_epochs": 10_000}
        rows = [{**row, "test_accuracy": accuracy, "seconds_per_epoch": 0.01} for accuracy in (0.82, 0.84)]
        (line,) = citation.summarise(rows)
        assert line["published, %"] == "83.0 ± 0.7"
        assert line["test, %"] == "83.0 ± 1.4"
        assert line["seconds/epoch (quartiles)"] == "0.0100 (0.0100–0.0100)"
        (line,) = citation.summarise([{**row, "protocol": {"max_epochs": 5}} for row in rows])
        assert line["published, %"] == "–"

    def test_without_arguments_a_missing_data_set_is_named_and_the_rest_runs(
        self, one_process, monkeypatch, tmp_path, capsys
    ):
        monkeypatch.setenv("GATTN_DATA", str(tmp_path / "nothing"))
        monkeypatch.setattr(
            "socket.getaddrinfo", lambda *arguments, **kwargs: (_ for _ in ()).throw(OSError("offline"))
        )
        citation.Citation.main(["--runs", "1", "--epochs", "3", "--out", str(tmp_path / "out")])
        printed = capsys.readouterr().out
        assert "Skipped: cora is not under" in printed
        assert "karate" in (tmp_path / "out" / "table.md").read_text()

    def test_a_data_set_asked_for_by_name_and_missing_is_an_error(self, monkeypatch, tmp_path):
        monkeypatch.setenv("GATTN_DATA", str(tmp_path / "nothing"))
        monkeypatch.setattr(
            "socket.getaddrinfo", lambda *arguments, **kwargs: (_ for _ in ()).throw(OSError("offline"))
        )
        with pytest.raises(SystemExit, match="error: cora is not under"):
            citation.Citation.main(["--datasets", "karate", "cora", "--out", str(tmp_path)])

    def test_data_sets_that_are_no_node_classification(self, load, tmp_path):
        load("ogbg-molbace")
        with pytest.raises(SystemExit, match="error: ogbg-molbace has many graphs"):
            citation.Citation.main(["--datasets", "ogbg-molbace", "--out", str(tmp_path)])
        with pytest.raises(ValueError, match="no node features"):
            check_task("x", Data(y=torch.zeros(3, dtype=torch.long)))
        with pytest.raises(ValueError, match="does not have one class per node"):
            check_task("x", Data(x=torch.zeros(3, 1), y=torch.zeros(3, 2)))

    def test_names_are_made_one(self):
        options = citation.Citation.parse(["--datasets", "Karate_Club", "karate", "PubMed", "--models", "gat", "gat"])
        assert options.datasets == ["karate", "pubmed"]
        assert options.models == ["gat"]

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--runs", "0"],
            ["--models", "gcn"],
            ["--features", "sparse", "--layers", "pyg"],
            ["--workers", "-1"],
            ["--datasets", "corra"],
            ["--device", "nonsense"],
            ["--device", "meta"],
            ["--device", "cuda:99"],
            ["--runs", "1000000000000"],
            ["--threads", "9999999999"],
            ["--epochs", "1e3"],
        ],
    )
    def test_wrong_arguments(self, arguments, capsys):
        with pytest.raises(SystemExit):
            citation.Citation.main(arguments)
        assert "error:" in capsys.readouterr().err

    def test_the_density_decides_how_features_are_stored(self, monkeypatch):
        options = citation.Citation.parse(["--layers", "gattn", "pyg", "--runs", "1"])
        monkeypatch.setattr(citation.Citation, "densities", lambda self: {"cora": 0.013, "dense": 0.5})
        runs = citation.Citation(options, None, None).cases()
        assert [(run.dataset, run.layers, run.features) for run in runs] == [
            ("cora", "gattn", "sparse"),
            ("cora", "pyg", "dense"),
            ("dense", "gattn", "dense"),
            ("dense", "pyg", "dense"),
        ]
