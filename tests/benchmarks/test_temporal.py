import functools
from dataclasses import replace

import pytest
import torch
from torch_geometric.data import TemporalData

from benchmarks import temporal
from benchmarks.framework.results import ResultsFile
from benchmarks.temporal import (
    BASELINES,
    LAYERS,
    MODELS,
    PARTS,
    History,
    Network,
    Pairs,
    Predictor,
    Recipe,
    Run,
    Temporal,
    average_precision,
    edgebank,
    is_seen,
)

RECIPE = Recipe(neighbours=3, channels=8, time_channels=4, batch=50, epochs=4)
TIMES = ("seconds_per_epoch", "peak_bytes", "started")


def messages(*rows):
    """Data of rows of a sender, a receiver and a time."""
    src, dst, t = torch.tensor(rows).t()
    return TemporalData(src=src, dst=dst, t=t)


def random_messages(size=60, users=8, seed=0):
    """Three messages at each time, on average."""
    generator = torch.Generator().manual_seed(seed)
    src, dst = torch.randint(users, (2, size), generator=generator)
    return TemporalData(src=src, dst=dst, t=torch.randint(size // 3, (size,), generator=generator).sort()[0])


@pytest.fixture
def college(tmp_path, monkeypatch):
    """200 messages in the published format, of users of whom later ones join later; the folder of data."""
    folder = tmp_path / "data"
    (folder / "CollegeMsg").mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    lines = []
    for i in range(200):
        sender, receiver = (1 + torch.randint(10 + i // 10, (2,), generator=generator)).tolist()
        lines.append(f"{sender} {receiver} {1082040961 + 1000 * (i // 2)}\n")
    (folder / "CollegeMsg" / "CollegeMsg.txt").write_text("".join(lines))
    monkeypatch.setenv("GATTN_DATA", str(folder))
    return folder


@pytest.fixture
def main(college, tmp_path, monkeypatch, in_this_process):
    """Runs the benchmark with some arguments, here; returns the rows and the table."""
    monkeypatch.setattr(temporal, "in_processes", in_this_process)

    def main(*arguments, out="out"):
        Temporal.main([*arguments, "--out", str(tmp_path / out)])
        return ResultsFile(tmp_path / out / "runs.jsonl").rows(), (tmp_path / out / "table.md").read_text()

    return main


def pair_scores(model, data, users, others, times, k=3):
    """The logits of pairs of users at some times."""
    history = History(data, k)
    sides = [model(history, side, history.before(side, times)) for side in (users, others)]
    return model.score(torch.cat(sides, -1)).squeeze(-1)


class TestAveragePrecision:
    def test_by_hand(self):
        """In order: hit, miss, then a hit and a miss of the same rank."""
        logits = torch.tensor([[3.0, 1.0], [2.0, 1.0]])
        assert average_precision(logits) == pytest.approx((1 / 1 + 2 / 4) / 2)

    def test_a_perfect_order_and_its_opposite(self):
        assert average_precision(torch.tensor([[2.0, 3.0], [0.0, 1.0]])) == 1
        assert average_precision(torch.tensor([[0.0, 1.0], [2.0, 3.0]])) == pytest.approx((1 / 3 + 2 / 4) / 2)

    @pytest.mark.parametrize("levels", [2, 9, 1000])
    def test_against_scikit_learn(self, levels):
        metrics = pytest.importorskip("sklearn.metrics")
        logits = torch.randint(levels, (2, 300), generator=torch.Generator().manual_seed(levels)).double()
        labels = torch.tensor([[1], [0]]).expand(2, 300)
        expected = metrics.average_precision_score(labels.flatten(), logits.flatten())
        assert average_precision(logits) == pytest.approx(expected, rel=1e-12)


class TestHistory:
    def test_the_newest_earlier_messages_by_hand(self):
        """Users 0 to 3 and six messages; node e is the sender of message e, and node 6 + e its receiver."""
        history = History(messages((0, 1, 10), (2, 0, 20), (0, 2, 20), (1, 0, 30), (3, 3, 40), (0, 3, 50)), 2)
        found = history.before(torch.tensor([0, 0, 2, 1, 3, 3]), torch.tensor([20, 31, 21, 10, 41, 60]))
        assert found.counts.tolist() == [1, 2, 2, 0, 1, 2]
        # Only 0 → 1 is earlier than 20; then 1 → 0 and 0 → 2, of which the last two are kept; 2 saw both of time 20.
        assert found.source.tolist() == [6, 3, 8, 2, 7, 10, 5, 10]
        others = history.users[found.source].tolist()
        assert others == [1, 1, 2, 0, 0, 3, 0, 3]
        assert found.age.tolist() == [10, 1, 11, 1, 1, 1, 10, 20]
        assert (found.source % 6).tolist() == [0, 3, 2, 2, 1, 4, 5, 4]
        assert found.target().tolist() == [0, 1, 1, 2, 2, 4, 5, 5]

    def test_rows(self):
        history = History(random_messages(), 3)
        index = torch.tensor([100, 3, 3, 57])
        some = history.neighbours.rows(index)
        expected = history.before(history.users[index], history.times.repeat(2)[index])
        for name in ("counts", "source", "age"):
            assert torch.equal(getattr(some, name), getattr(expected, name))
        assert some.counts.sum() > 0

    def test_nothing_is_later_or_at_the_same_time(self):
        history = History(random_messages(), 3)
        assert history.neighbours.age.min() > 0
        target = history.neighbours.target()
        ages = history.times.repeat(2)[target] - history.times.repeat(2)[history.neighbours.source]
        assert torch.equal(ages, history.neighbours.age)


def plain_embedding(model, data, user, time, depth, k):
    """The definition, for one user at a time."""
    if depth == 0:
        return torch.zeros(1, model.channels)
    earlier = []
    for src, dst, t in zip(data.src.tolist(), data.dst.tolist(), data.t.tolist(), strict=True):
        if t < time and user in (src, dst):
            earlier.append((dst if src == user else src, t))
    earlier = earlier[-k:]
    below = functools.partial(plain_embedding, model, data, depth=depth - 1, k=k)
    sources = torch.cat([torch.zeros(0, model.channels), *(below(*end) for end in earlier)])
    edges = torch.stack([torch.arange(len(earlier)), torch.zeros(len(earlier), dtype=torch.long)])
    graph = temporal.gattn.SparseGraph(edges, 1, len(earlier))
    ages = torch.tensor([time - t for _, t in earlier], dtype=torch.long)
    return model.layers[depth - 1]((sources, below(user, time)), graph, ages)


@pytest.mark.parametrize("name", LAYERS)
class TestNetwork:
    def test_it_is_the_definition(self, name):
        data, model = random_messages(), Network(RECIPE, name).eval()
        history = History(data, 3)
        users, times = torch.tensor([0, 3, 3, 7, 1]), torch.tensor([19, 12, 13, 1, 0])
        expected = [
            plain_embedding(model, data, *of, depth=2, k=3) for of in zip(users.tolist(), times.tolist(), strict=True)
        ]
        found = model(history, users, history.before(users, times))
        torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-5)
        assert found.std() > 0.01

    @pytest.mark.parametrize("change", ["removed", "reversed", "other users"])
    def test_what_comes_at_the_same_time_or_later_changes_no_score(self, name, change):
        data, model = random_messages(), Network(RECIPE, name).eval()
        now = int(data.t[40])
        is_later, same = data.t >= now, int((data.t == now).sum())
        assert same > 1
        users, others = data.src[data.t == now], data.dst[data.t == now]
        times = torch.full((same,), now)
        src, dst, t = data.src.clone(), data.dst.clone(), data.t.clone()
        if change == "removed":
            src, dst, t = src[~is_later], dst[~is_later], t[~is_later]
        elif change == "reversed":
            t[is_later] = t[is_later].flip(0).sort()[0] + 5
            src[is_later], dst[is_later] = dst[is_later].flip(0), src[is_later].flip(0)
        else:
            src[is_later], dst[is_later] = users[0], others[0]
        changed = TemporalData(src=src, dst=dst, t=t)
        expected = pair_scores(model, data, users, others, times)
        assert torch.equal(pair_scores(model, changed, users, others, times), expected)

    def test_what_comes_earlier_changes_scores(self, name):
        data, model = random_messages(), Network(RECIPE, name).eval()
        users, others, times = data.src[40:], data.dst[40:], data.t[40:]
        expected = pair_scores(model, data, users, others, times)
        changed = TemporalData(src=data.src, dst=data.dst, t=data.t - 3 * (data.t < int(data.t[40])))
        assert (pair_scores(model, changed, users, others, times) - expected).abs().max() > 1e-3

    def test_every_hyper_parameter_is_used(self, name):
        data = random_messages()

        def outcome(recipe):
            torch.manual_seed(0)
            network = Network(recipe, name)
            history = History(data, recipe.neighbours)
            torch.manual_seed(0)
            return network(history, data.src, history.before(data.src, data.t)).tolist()

        others = {"neighbours": 5, "layers": 1, "channels": 4, "time_channels": 6}
        others |= {"heads": 1, "dropout": 0.9} if name != "mean" else {}
        for field, value in others.items():
            assert outcome(replace(RECIPE, **{field: value})) != outcome(RECIPE), field

    def test_time_encodings_are_not_learnt(self, name):
        data, model = random_messages(), Network(RECIPE, name)
        history = History(data, 3)
        model(history, data.src, history.before(data.src, data.t)).sum().backward()
        without = [key for key, parameter in model.layers.named_parameters() if parameter.grad is None]
        assert [key for key in without if not key.endswith((".frequency", ".phase"))] == []
        assert (len(without) > 0) == (name == "tgat")


class TestProtocol:
    def test_the_split_is_by_time(self):
        data = random_messages(200)
        parts = temporal.split(data)
        assert torch.cat([parts[part] for part in PARTS]).tolist() == list(range(200))
        assert [len(parts[part]) / 200 for part in PARTS] == pytest.approx([0.7, 0.15, 0.15], abs=0.02)
        for earlier, later in (("train", "val"), ("val", "test")):
            assert data.t[parts[earlier]].max() < data.t[parts[later]].min()

    def test_users_who_were_seen_in_training(self):
        history = History(messages((0, 1, 1), (1, 2, 2), (3, 0, 3), (0, 2, 4), (2, 3, 5), (3, 4, 6), (4, 1, 7)), 1)
        parts = {"train": torch.arange(2), "val": torch.tensor([2]), "test": torch.arange(3, 7)}
        assert is_seen(history, parts, "test").tolist() == [True, False, False, False]

    def test_random_users(self):
        history = History(random_messages(900, users=3), 1)
        part = torch.arange(300, 900)
        first, again, other = (Pairs(history, part, 3, seed) for seed in ((1, 0), (1, 0), (1, 1)))
        assert torch.equal(first.random, again.random)
        assert not torch.equal(first.random, other.random)
        assert not (first.random == history.ends[1, part]).any()
        assert first.random.bincount(minlength=3).min() > 150
        assert torch.equal(first.users[600:1200], history.ends[1, part])

    def test_batches_are_parts_of_the_whole(self):
        data = random_messages()
        history, model = History(data, 3), Network(RECIPE, "tgat").eval()
        pairs = Pairs(history, torch.arange(20, 60), 8, (0, 0))
        whole = pairs.logits(model, 0, 40)
        torch.testing.assert_close(torch.cat([pairs.logits(model, 0, 15), pairs.logits(model, 15, 60)], 1), whole)
        sender, receiver = history.ends[:, 20:60]
        for row, others in zip(whole, (receiver, pairs.random), strict=True):
            torch.testing.assert_close(row, pair_scores(model, data, sender, others, data.t[20:60]))

    def test_edgebank_by_hand(self):
        """Pairs 0–1 and 2–3 are earlier than time 3, in one direction only; the message itself does not count."""
        history = History(messages((0, 1, 1), (3, 2, 2), (1, 0, 3), (0, 3, 3), (2, 3, 4), (3, 0, 4)), 1)
        part = torch.arange(2, 6)
        pairs = Pairs(history, part, 4, (0, 0))
        pairs.random = torch.tensor([2, 1, 1, 0])
        assert edgebank(history, pairs, part).tolist() == [[1, 0, 1, 1], [0, 1, 0, 1]]

    def test_recency_by_hand(self):
        """User 1 was last active 2 before time 3, user 2 one before it, and user 4 never."""
        history = History(messages((0, 1, 1), (3, 2, 2), (0, 1, 3), (0, 4, 3), (2, 3, 4)), 3)
        part = torch.tensor([2, 3, 4])
        pairs = Pairs(history, part, 5, (0, 0))
        pairs.random = torch.tensor([2, 2, 0])
        assert temporal.recency(history, pairs, part).tolist() == [[-2, -4, -2], [-1, -1, -1]]

    def test_scores_of_both_kinds_of_test_messages(self):
        logits = torch.tensor([[3.0, 0.0], [2.0, 1.0]])
        found = temporal.scores({"val": logits, "test": logits}, torch.tensor([True, False]))
        assert found["seen_score"] == 1
        assert found["unseen_score"] == 0.5
        assert found["val_score"] == found["test_score"] == pytest.approx((1 + 2 / 4) / 2)


class TestTraining:
    @pytest.mark.parametrize("name", LAYERS)
    def test_a_run_goes_on_to_the_same_numbers(self, name, college, tmp_path):
        run = Run(name, 3, 1, RECIPE)
        folders = [tmp_path / part for part in ("halves", "whole")]
        for folder in folders:
            folder.mkdir()
        first = Predictor(run, folders[0], 0.0)
        first.advance(2 * first.steps)
        second = Predictor(run, folders[0], 0.0)
        assert second.iteration == 2 * second.steps == 2 * 3
        whole = Predictor(run, folders[1], 0.0)
        whole.peak_bytes()  # leaves no trace
        found = [training.run(lambda *progress: None) for training in (second, whole)]
        for row in found:
            del row["seconds_per_epoch"]
        assert found[0] == found[1]
        assert len(found[0]["curve"]["val"]) == 4
        assert found[0]["seen"] + found[0]["unseen"] == len(whole.parts["test"]) == 30
        assert found[0]["unseen"] > 0 < found[0]["seen"]

    def test_the_test_scores_are_those_of_the_best_validation_score(self, college, tmp_path):
        training = Predictor(Run("mean", 0, 1, RECIPE), tmp_path, 1e6)
        training.curve = [
            {"epoch": epoch, "val_score": val, "test_score": test, "seen_score": seen, "unseen_score": unseen}
            for epoch, val, test, seen, unseen in ((1, 0.5, 0.9, 0.8, 0.7), (2, 0.7, 0.6, 0.5, 0.4), (3, 0.7, 1, 1, 1))
        ]
        training.iteration, training.seconds = 9, [1.0, 1.0, 1.0, 2.0, 2.0, 3.0, 0.5, 0.5, 0.5]
        row = training.result()
        expected = (2, 0.7, 0.6, 0.5, 0.4)
        names = ("best_epoch", "val_score", "test_score", "seen_score", "unseen_score")
        assert tuple(row[name] for name in names) == expected
        assert row["seconds_per_epoch"] == 3.0
        assert row["curve"] == {"val": [0.5, 0.7, 0.7], "test": [0.9, 0.6, 1]}

    def test_each_epoch_draws_other_users(self, college, tmp_path):
        training = Predictor(Run("mean", 0, 1, RECIPE), tmp_path, 1e6)
        first = training.pairs(0).random
        assert not torch.equal(training.pairs(1).random, first)
        assert torch.equal(training.pairs(0).random, first)
        other = Predictor(Run("mean", 1, 1, RECIPE), tmp_path, 1e6)
        assert not torch.equal(other.pairs(0).random, first)
        for part in ("val", "test"):
            assert torch.equal(other.held_out[part].random, training.held_out[part].random)

    def test_it_learns(self, college, tmp_path):
        training = Predictor(Run("mean", 0, 1, replace(RECIPE, epochs=30, learning_rate=0.01)), tmp_path, 1e6)
        losses = []
        for _ in range(90):
            training.step()
            losses.append(training.losses[-1])
        assert sum(losses[-9:]) < 0.95 * sum(losses[:9])


class TestCommandLine:
    def test_everything(self, main, tmp_path, capsys):
        rows, table = main("--quick", "--runs", "2", "--epochs", "2")
        assert [(row["seed"], row["model"]) for row in rows] == [*((0, m) for m in MODELS), *((1, m) for m in LAYERS)]
        assert {row["recipe"]["epochs"] for row in rows} == {2}
        header, _, *lines = (line for line in table.splitlines() if line.startswith("|"))
        assert [part.strip() for part in header.strip("|").split("|")] == [
            "model",
            "runs",
            "validation AP, %",
            "test AP, %",
            "both users seen",
            "a user unseen",
            "parameters",
            "best epoch",
            "seconds/epoch",
            "MB per step",
        ]
        cells = {line.split(" | ")[0].strip("| "): line.strip("|").split(" | ") for line in lines}
        assert list(cells) == list(MODELS)
        assert all(len(line) == 10 for line in cells.values())
        assert [cells[model][1] for model in MODELS] == ["2", "2", "2", "1", "1"]
        assert all(cells[model][column].count("±") == 1 for model in LAYERS for column in range(2, 6))
        for model in BASELINES:
            assert [cell.strip() for cell in cells[model][-4:]] == ["–"] * 4
        assert "Of 30 test messages," in table
        assert (tmp_path / "out" / "curves.png").stat().st_size > 5_000
        assert not list((tmp_path / "out").glob("*.pt"))
        assert all(row["peak_bytes"] >= 0 and row["seconds_per_epoch"] > 0 for row in rows if row["model"] in LAYERS)

    def test_equal_runs_have_equal_rows(self, main):
        arguments = ("--quick", "--models", "transformer", "edgebank")
        found = []
        for out in ("first", "second"):
            rows, _ = main(*arguments, out=out)
            found.append([{name: x for name, x in row.items() if name not in TIMES} for row in rows])
        assert found[0] == found[1]

    def test_options(self, college):
        def recipes(*arguments):
            return {run.recipe for run in Temporal(Temporal.parse(list(arguments)), None, None).cases()}

        assert recipes() == {Recipe()}
        assert recipes("--quick") == {Recipe(neighbours=2, epochs=1)}
        assert recipes("--quick", "--epochs", "7", "--neighbours", "9") == {Recipe(neighbours=9, epochs=7)}
        runs = Temporal(Temporal.parse(["--threads", "2", "--models", "tgat", "edgebank"]), None, None).cases()
        assert [(run.model, run.seed) for run in runs] == [
            ("tgat", 0),
            ("edgebank", 0),
            *(("tgat", i) for i in range(1, 5)),
        ]
        assert {run.threads for run in runs} == {2}

    def test_missing_data_are_one_line(self, tmp_path, monkeypatch):
        def refuse(*arguments, **kwargs):
            raise OSError("no network in this test")

        monkeypatch.setenv("GATTN_DATA", str(tmp_path / "nothing"))
        monkeypatch.setattr("urllib.request.urlopen", refuse)
        with pytest.raises(SystemExit, match=r"^error: collegemsg is not under .*Missing: CollegeMsg/CollegeMsg.txt"):
            Temporal.main(["--out", str(tmp_path / "out")])

    @pytest.mark.slow
    def test_a_run_killed_half_way_goes_on_to_the_same_row(self, main, college, tmp_path, kill):
        arguments = ["--models", "tgat", "--runs", "1", "--epochs", "40"]
        assert kill("temporal", arguments, tmp_path / "killed", {"GATTN_DATA": str(college)}) > 0
        found = []
        for out in ("killed", "whole"):
            (row,), _ = main(*arguments, out=out)
            found.append({name: x for name, x in row.items() if name not in TIMES})
        assert found[0] == found[1]
