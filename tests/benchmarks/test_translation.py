import itertools
import json
import math
import os
import random
import signal
import subprocess
import time
import zipfile
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

import gattn
from benchmarks import translation, translation_data, translation_models
from benchmarks.framework.results import ResultsFile, machine
from benchmarks.translation import Translation
from benchmarks.translation_data import END, PAD, START, Batches, Corpus, Item
from benchmarks.translation_models import Choice, Grid, Run, Setting, Translator, Trial

WORDS = {
    "Tom sieht": "Tom sees",
    "Wir suchen": "We seek",
    "Ich habe": "I have",
    "Sie kauft": "She buys",
    "den Hund": "the dog",
    "das Haus": "the house",
    "die Blume": "the flower",
    "den Ball": "the ball",
    "heute": "today",
    "morgen": "tomorrow",
    "dort": "there",
    "hier": "here",
}
SETTING = Setting(
    vocabulary=120,
    parameters=20_000,
    transformer_channels=16,
    transformer_layers=1,
    heads=2,
    batch=8,
    iterations=12,
    warm_up=3,
    evaluate_every=5,
    curve_sentences=2,
    test_sentences=4,
    beams=2,
)
CHOICE = Choice(0.01, 0.1, None, False)
GRID = Grid((0.003, 0.01), (0.1,), (5, 10), (False,))


def make_pairs():
    """Sentences of four to seven words, and some of 16 and 28."""
    phrases = list(WORDS.items())
    triples = itertools.product(phrases[:4], phrases[4:8], phrases[8:])
    short = [tuple(" ".join(part[side] for part in triple) for side in range(2)) for triple in triples]
    joined = [(f"{a} und {b}.", f"{x} and {y}.") for (a, x), (b, y) in itertools.permutations(short[::3], 2)]
    long = [(f"{a[:-1]} und {b}", f"{x[:-1]} and {y}") for (a, x), (b, y) in pairwise(joined[::9])]
    return [(f"{a}.", f"{b}.") for a, b in short] + joined + long


PAIRS = make_pairs()


@pytest.fixture(scope="module")
def corpus():
    return Corpus(PAIRS, SETTING.vocabulary)


@pytest.fixture
def run(corpus):
    return Run("general", 0, corpus.name, "cpu", SETTING, CHOICE)


@pytest.fixture
def published(tmp_path, monkeypatch):
    """The tiny corpus as a file in the published format; and tiny settings."""
    (tmp_path / "data" / "tatoeba").mkdir(parents=True)
    with zipfile.ZipFile(tmp_path / "data" / "tatoeba" / "deu-eng.zip", "w") as archive:
        archive.writestr("deu.txt", "".join(f"{english}\t{german}\n" for german, english in PAIRS))
    monkeypatch.setenv("GATTN_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(translation, "SETTINGS", dict.fromkeys(translation.SETTINGS, SETTING))
    monkeypatch.setattr(translation, "GRIDS", dict.fromkeys(translation.GRIDS, GRID))


def arguments(path, *more):
    return ["--out", str(path / "out"), *more]


def sentences(split):
    """All sentences on each side of each part of a split."""
    parts = {"train": split.train}
    for name in ("validation", "test", "long"):
        parts[name] = [(item.source, text) for item in getattr(split, name) for text in item.references]
    return parts


class TestSplit:
    def test_no_sentence_is_in_two_parts(self):
        # Some translations more, so that there are components of more than one pair.
        pairs = PAIRS + [(german, english.replace("sees", "looks at")) for german, english in PAIRS[::2]]
        pairs += [(german.replace("den Hund", "den Köter"), english) for german, english in PAIRS[::3]]
        split = translation_data.split_pairs(pairs)
        parts = sentences(split)
        assert sorted(itertools.chain(*parts.values())) == sorted(set(pairs))
        assert all(parts.values())
        for (_, some), (_, others) in itertools.combinations(parts.items(), 2):
            if some is parts["test"] and others is parts["long"]:
                continue
            for side in range(2):
                ours, theirs = ({translation_data.form(x[side]) for x in part} for part in (some, others))
                assert not ours & theirs

    def test_case_and_punctuation_connect(self):
        chain = [("Geh!", "Go."), ("geh", "Leave!"), ("Lauf weg!", "leave"), ("Lauf weg.", "Run away.")]
        for number in range(200):
            pairs = [(f"{a} {number}", f"{b} {number}") for a, b in chain]
            filled = [part for part in sentences(translation_data.split_pairs(pairs)).values() if part]
            assert [sorted(part) for part in filled] == [sorted(pairs)]
        assert translation_data.form("Das ist's, ja?") == translation_data.form("das ist s ja!")
        assert translation_data.form("?!") == "?!"

    def test_languages_do_not_connect(self):
        split = translation_data.split_pairs([(f"{i}", f"{i + 1}") for i in range(400)])
        assert split.validation
        assert split.test

    def test_the_order_of_pairs_does_not_matter(self):
        shuffled = [*PAIRS, *PAIRS[:7]]
        random.Random(0).shuffle(shuffled)
        assert translation_data.split_pairs(shuffled) == translation_data.split_pairs(PAIRS)

    def test_a_new_pair_changes_its_own_component_only(self):
        more = [*PAIRS, ("Neu.", "New.")]
        before, after = (sentences(translation_data.split_pairs(pairs)) for pairs in (PAIRS, more))
        for name, part in before.items():
            assert set(part) == set(after[name]) - {("Neu.", "New.")}

    def test_long_sentences(self):
        fifteen = " ".join("abcdefghijklmno")
        assert Item(fifteen, ("x",)).is_long
        assert Item("x", ("y", fifteen)).is_long
        assert not Item("x", (fifteen[:-2],)).is_long
        split = translation_data.split_pairs(PAIRS)
        assert all(item.is_long for item in split.long)
        assert not any(item.is_long for item in split.test)
        long = sum(Item(german, (english,)).is_long for german, english in PAIRS)
        assert 0.2 * long < len(split.long) < 0.47 * long

    def test_references(self):
        pairs = [(f"Satz {i}", f"{word} {i}") for i in range(300) for word in ("b", "a", "c")]
        split = translation_data.split_pairs(pairs)
        number = split.test[0].source.split()[1]
        assert split.test[0].references == (f"a {number}", f"b {number}", f"c {number}")
        assert len({item.source for item in split.test}) == len(split.test)

    def test_shares(self):
        split = translation_data.split_pairs([(f"Satz {i}", f"Sentence {i}") for i in range(20_000)])
        deviation = math.sqrt(20_000 * 0.0125)
        assert abs(len(split.test) - 250) < 4 * deviation
        assert abs(len(split.validation) - 250) < 4 * deviation

    @pytest.mark.slow
    def test_tatoeba(self):
        try:
            split = translation_data.split_pairs(gattn.datasets.load_pairs("tatoeba"))
        except gattn.datasets.DatasetUnavailableError as error:
            pytest.skip(str(error))
        assert [len(part) for part in (split.train, split.validation, split.test, split.long)] == [
            163_984,
            1917,
            1976,
            1006,
        ]
        assert set(translation_data.EXAMPLES) <= {item.source for item in (*split.test, *split.long)}
        words = [len(text.split()) for text in translation_data.EXAMPLES]
        assert words == sorted(words)
        assert words[-1] == 15


class TestTokens:
    def test_there_and_back(self, corpus):
        texts = [german for german, _ in corpus.split.train[:20]]
        sequences = corpus.encode(texts)
        assert all(sequence[-1] == END and (sequence[:-1] > END).all() for sequence in sequences)
        tokens, lengths = translation_data.padded(sequences, "cpu")
        assert lengths.tolist() == [len(sequence) for sequence in sequences]
        tokens[tokens == PAD] = END
        assert corpus.decode(tokens) == texts
        assert corpus.size == SETTING.vocabulary

    def test_what_comes_after_the_end_is_no_text(self, corpus):
        (sequence,) = corpus.encode(["Tom sieht den Hund"])
        assert corpus.decode(torch.cat([sequence, sequence]).unsqueeze(0)) == ["Tom sieht den Hund"]

    def test_pieces(self, corpus):
        (sequence,) = corpus.encode(["Tom, xyz"])
        assert "".join(corpus.pieces(sequence.tolist())).endswith("end")
        assert [translation_data.visible(piece) for piece in ("▁Tom", "m", ".", "▁")] == ["Tom", "-m", ".", "▁"]

    def test_the_vocabulary_is_learnt_from_the_training_pairs_only(self, corpus, monkeypatch):
        seen, learn = [], translation_data.train_vocabulary

        def listen(texts, size):
            seen.extend(texts)
            return learn(seen, size)

        monkeypatch.setattr(translation_data, "train_vocabulary", listen)
        Corpus(PAIRS, 120)
        assert sorted(seen) == sorted(text for pair in corpus.split.train for text in pair)

    def test_it_is_kept_and_learnt_alike(self, corpus, tmp_path, monkeypatch):
        first = Corpus(PAIRS, 120, tmp_path)
        assert len(list(tmp_path.iterdir())) == 1
        shuffled = random.Random(0).sample(PAIRS, len(PAIRS))
        assert Corpus(shuffled, 120).processor.serialized_model_proto() == first.processor.serialized_model_proto()
        monkeypatch.setattr(translation_data, "train_vocabulary", None)
        assert Corpus(PAIRS, 120, tmp_path).encode(["Hund"])[0].equal(corpus.encode(["Hund"])[0])


class TestBatches:
    lengths = np.random.default_rng(0).integers(1, 40, (1003, 2))

    def test_an_epoch_has_every_pair_once(self):
        batches = Batches(self.lengths, 10, 0)
        assert batches.per_epoch == 101
        for epoch in range(2):
            numbers = np.concatenate([batches[101 * epoch + i] for i in range(101)])
            assert sorted(numbers) == list(range(1003))

    def test_they_depend_on_seed_and_iteration_only(self):
        orders = {(seed, i): Batches(self.lengths, 10, seed)[i].tolist() for seed in (0, 1) for i in (0, 1, 101)}
        assert len({tuple(order) for order in orders.values()}) == 6
        batches = Batches(self.lengths, 10, 1)
        for iteration in (101, 1, 0):
            assert batches[iteration].tolist() == orders[1, iteration]

    def test_there_is_little_padding(self):
        batches = Batches(self.lengths, 10, 0)
        targets = [self.lengths[batches[i], 1] for i in range(101)]
        assert sum(x.max() * len(x) for x in targets) < 1.1 * self.lengths[:, 1].sum()
        # Short and long ones take turns.
        assert abs(np.corrcoef([x.mean() for x in targets], range(101))[0, 1]) < 0.3

    def test_a_batch(self):
        pairs = [(torch.tensor([5, 2]), torch.tensor([7, 8, 2])), (torch.tensor([6, 6, 2]), torch.tensor([2]))]
        batch = translation_data.make_batch(pairs, "cpu")
        assert batch.source.tolist() == [[5, 2, PAD], [6, 6, 2]]
        assert batch.target.tolist() == [[7, 8, 2], [2, PAD, PAD]]
        assert (batch.source_lengths.tolist(), batch.target_lengths.tolist()) == ([2, 3], [3, 1])


class TestModels:
    def test_a_like_number_of_parameters(self, run):
        setting = translation.SETTINGS["default"]
        counts = {}
        for row in translation_models.ROWS:
            some = replace(run, row=row, setting=setting)
            width = translation_models.find_width(some, setting.vocabulary)
            with torch.device("meta"):
                counts[row], *others = (
                    translation_models.num_parameters(translation_models.make_model(some, width + change, 4000))
                    for change in (0, -4, 4)
                )
            assert all(abs(counts[row] - setting.parameters) <= abs(x - setting.parameters) for x in others)
        assert max(counts.values()) < 1.05 * min(counts.values())

    @pytest.mark.parametrize("row", translation_models.ROWS)
    def test_rows(self, row, corpus, run):
        model = translation_models.build_model(replace(run, row=row), corpus.size)
        kind = gattn.models.TransformerSeq2Seq if row == "transformer" else gattn.models.Seq2Seq
        assert type(model) is kind
        assert (model.start, model.end) == (START, END)
        same, other = (translation_models.build_model(replace(run, row=row, seed=seed), corpus.size) for seed in (0, 1))
        name, weight = next(iter(model.state_dict().items()))
        assert torch.equal(weight, same.state_dict()[name])
        assert not torch.equal(weight, other.state_dict()[name])

    @pytest.mark.parametrize("row", ["none", "local-p", "hard", "transformer"])
    def test_padding_does_not_count(self, row, corpus, run):
        model = translation_models.build_model(replace(run, row=row), corpus.size).double().eval()
        pairs = corpus.train[::60][:5]
        total = 0.0
        for source, target in pairs:
            logits = model(source.unsqueeze(0), target.unsqueeze(0))[0]
            total -= logits.log_softmax(-1)[torch.arange(len(target)), target].sum().item()
        batch = translation_data.make_batch(pairs, "cpu")
        assert translation_models.cross_entropy(model, batch, "sum").item() == pytest.approx(total, rel=1e-9)
        mean = total / sum(len(target) for _, target in pairs)
        assert translation_models.cross_entropy(model, batch).item() == pytest.approx(mean, rel=1e-9)
        assert translation_models.loss_of(model, batch).item() == pytest.approx(mean, rel=1e-9)

    def test_translations_come_in_their_order(self, corpus, run):
        model = translation_models.build_model(run, corpus.size).eval()
        texts = [german for german, _ in PAIRS[::100]][::-1]
        one_by_one = [translation_models.translate(model, corpus, [text], 2, "cpu")[0] for text in texts]
        # Texts of one length in a batch, so that each may be as long as it may alone.
        lengths = [len(sequence) for sequence in corpus.encode(texts)]
        for length in set(lengths):
            inside = [i for i, other in enumerate(lengths) if other == length]
            found = translation_models.translate(model, corpus, [texts[i] for i in inside], 2, "cpu", size=3)
            assert found == [one_by_one[i] for i in inside]
        assert len(translation_models.translate(model, corpus, texts, 1, "cpu")) == len(texts)


class TestScores:
    def test_perfect_and_useless(self):
        items = [Item("a", ("this is a small house", "it is a little house")), Item("b", ("we go home now",))]
        for translations in (["this is a small house", "we go home now"], ["it is a little house", "we go home now"]):
            assert translation_models.scores(translations, items) == {"bleu": 100.0, "chrf": 100.0}
        result = translation_models.scores(["x y z w", "q q q q"], items)
        assert result["bleu"] == 0.0
        assert result["chrf"] < 5

    def test_bleu_by_hand(self):
        """Of five words four are right, of four pairs three, of three triples two, of two quadruples one."""
        items = [Item("s", ("the cat sat on mats",))]
        expected = 100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** (1 / 4)
        assert translation_models.scores(["the cat sat on rugs"], items)["bleu"] == pytest.approx(expected, abs=1e-3)

    def test_bins(self):
        items = [Item(" ".join(["x"] * n), (f"one two three four {n}",)) for n in (4, 5, 8, 30, 26)]
        right = [item.references[0] for item in items]
        bins = translation_models.bins_of([*right[:3], "no", "no"], items)
        assert [(part["low"], part["high"], part["count"]) for part in bins] == [(1, 4, 1), (5, 8, 2), (26, None, 2)]
        assert [part["bleu"] for part in bins] == [100.0, 100.0, 0.0]
        assert [part["words"] for part in bins] == [4, 6.5, 28]

    def test_every_length_has_one_bin(self):
        highs = [high for _, high in translation_models.BINS]
        assert translation_models.BINS[0][0] == 1
        assert highs[-1] is None
        assert all(low == high + 1 for (low, _), high in zip(translation_models.BINS[1:], highs[:-1], strict=True))


class TestTraining:
    def test_learning_rate(self):
        setting = Setting(iterations=100, warm_up=20)
        rates = [translation_models.learning_rate(3.0, setting, iteration) for iteration in range(101)]
        assert rates[0] == pytest.approx(3 / 21)
        assert rates[20] == max(rates) == 3.0
        assert rates[60] == pytest.approx(1.5)
        assert rates[100] == 0.0
        assert all(a > b for a, b in pairwise(rates[20:]))

    @pytest.mark.parametrize("row", ["none", "additive", "local-p", "hard", "hard-st", "transformer"])
    def test_it_learns(self, row, corpus, run, tmp_path):
        setting = replace(SETTING, iterations=24, evaluate_every=12)
        training = Translator(replace(run, row=row, setting=setting), corpus, tmp_path)
        training.advance(100)
        assert training.is_finished
        assert [point["iteration"] for point in training.curve] == [12, 24]
        first, last = (point["val_loss"] for point in training.curve)
        assert last < first < math.log(corpus.size)
        assert training.curve[-1]["seconds"] == pytest.approx(sum(training.seconds), abs=0.01)

    @pytest.mark.parametrize("row", ["hard", pytest.param("transformer", marks=pytest.mark.slow)])
    def test_an_interrupted_run_ends_with_the_same_numbers(self, row, corpus, run, tmp_path, monkeypatch):
        run = replace(run, row=row)
        (tmp_path / "whole").mkdir()
        whole = Translator(run, corpus, tmp_path / "whole")
        whole.advance(12)
        first = Translator(run, corpus, tmp_path)
        first.advance(8)
        torch.manual_seed(99)
        second = Translator(run, corpus, tmp_path)
        assert second.iteration == 5
        assert sum(second.seconds) == pytest.approx(first.curve[0]["seconds"], abs=0.01)
        second.advance(12)

        def without_times(curve):
            return [{name: value for name, value in point.items() if name != "seconds"} for point in curve]

        assert without_times(second.curve) == without_times(whole.curve)
        for name, weight in whole.model.state_dict().items():
            assert torch.equal(weight, second.model.state_dict()[name])
        ours, theirs = second.result(), whole.result()
        for name in ("test", "long", "bins", "examples", "parameters"):
            assert ours[name] == theirs[name]

    def test_too_long_pairs_are_left_out(self, corpus, run, tmp_path):
        training = Translator(replace(run, setting=replace(SETTING, longest=12)), corpus, tmp_path)
        assert 0 < len(training.pairs) < len(corpus.train)
        assert max(max(map(len, pair)) for pair in training.pairs) == 12

    def test_validation_is_over_all_references(self, corpus, run, tmp_path):
        training = Translator(run, corpus, tmp_path)
        assert len(training.validation) == sum(len(item.references) for item in corpus.split.validation)
        training.losses = [1.0]
        training.add_point()
        total, count = 0.0, 0
        model = training.model.eval()
        for source, target in training.validation:
            logits = model(source.unsqueeze(0), target.unsqueeze(0))[0]
            total += F.cross_entropy(logits, target, reduction="sum").item()
            count += len(target)
        assert training.curve[-1]["val_loss"] == pytest.approx(total / count, rel=1e-5)

    @pytest.mark.parametrize("row", translation_models.ROWS)
    def test_results(self, row, corpus, run, tmp_path):
        training = Translator(replace(run, row=row, setting=replace(SETTING, test_sentences=3)), corpus, tmp_path)
        row = training.result()
        json.dumps(row)
        assert [row[part]["sentences"] for part in ("test", "long")] == [3, 3]
        assert sum(part["count"] for part in row["bins"]) == 6
        assert len(row["examples"]) == 3
        for example in row["examples"]:
            assert example["source"][-1] == "end"
            assert ("weights" in example) == (training.case.row not in ("none", "transformer"))
            if "weights" in example:
                assert len(example["weights"]) == len(example["translation"])
                assert {len(line) for line in example["weights"]} == {len(example["source"])}


class TestCommandLine:
    @pytest.mark.slow
    def test_everything(self, published, one_process, tmp_path, monkeypatch, capsys):
        chosen = ["--rows", "general", "none"]
        Translation.main(arguments(tmp_path, *chosen, "--runs", "2"))
        rows = ResultsFile(tmp_path / "out" / "runs.jsonl").rows()
        assert [(row["row"], row.get("seed")) for row in rows] == [
            *(("none", None), ("none", None), ("general", None), ("general", None)),
            *((row, seed) for seed in (0, 1) for row in ("none", "general")),
        ]
        names = {
            "runs.jsonl",
            "table.md",
            "grid.md",
            "lengths.png",
            "times.png",
            *(f"alignment-{i}.png" for i in (1, 2, 3)),
        }
        written = {path.name for path in (tmp_path / "out").iterdir()}
        assert {name for name in written if not name.endswith(".model")} == names
        table = (tmp_path / "out" / "table.md").read_text().splitlines()
        assert [line.split(" | ")[0] for line in table[2:5]] == ["| none", "| general", ""]
        assert "German to English" in capsys.readouterr().out
        for name in ("none", "general"):
            trials, runs = ([x for x in rows if x["row"] == name and ("seed" in x) == is_run] for is_run in (0, 1))
            best = min(trials, key=lambda row: row["val_loss"])
            assert [run["choice"] for run in runs] == [best["choice"]] * 2

        monkeypatch.setattr(translation, "train", lambda *args, **options: pytest.fail("trained again"))
        Translation.main(arguments(tmp_path, *chosen, "--runs", "2"))
        out = capsys.readouterr().out
        assert "4 of 4 trials" in out
        assert "4 of 4 runs" in out
        assert (tmp_path / "out" / "table.md").read_text().splitlines() == table
        (tmp_path / "out" / "table.md").unlink()
        monkeypatch.delenv("GATTN_DATA")
        Translation.main(arguments(tmp_path, "--report"))
        assert (tmp_path / "out" / "table.md").read_text().splitlines() == table
        assert len(ResultsFile(tmp_path / "out" / "runs.jsonl").rows()) == 8

    def test_missing_data(self, tmp_path, monkeypatch):
        monkeypatch.setenv("GATTN_DATA", str(tmp_path))
        with pytest.raises(SystemExit, match=r"error: tatoeba is not under .*deu-eng.zip"):
            Translation.main(arguments(tmp_path))

    def test_a_report_of_nothing(self, tmp_path):
        with pytest.raises(SystemExit, match="has no runs of the setting quick on cpu"):
            Translation.main(arguments(tmp_path, "--report", "--quick"))

    def test_defaults(self):
        options = Translation.parse([])
        assert (options.rows, options.runs, options.setting) == (list(translation_models.ROWS), 3, "default")
        assert str(options.out) == "runs/translation"
        quick = Translation.parse(["--quick"])
        assert (quick.setting, quick.runs, str(quick.out)) == ("quick", 1, "runs/translation-quick")
        assert Translation.parse(["--setting", "quick"]).quick
        assert Translation.parse(["--rows", "hard", "dot"]).rows == ["dot", "hard"]

    @pytest.mark.parametrize(
        "wrong",
        [
            ["--rows", "all"],
            ["--setting", "small"],
            ["--quick", "--setting", "large"],
            ["--workers", "0"],
            ["--runs", "0"],
            ["--runs"],
            ["--device", "nothing"],
            ["--device", "meta"],
            ["--runs", "one"],
            ["--workers", "9999999999"],
            ["--report", "--workers", "2"],
            ["--report", "--rows", "dot"],
            ["--report", "--runs", "1"],
        ],
    )
    def test_wrong_arguments(self, wrong, capsys):
        with pytest.raises(SystemExit):
            Translation.main(wrong)
        assert "error:" in capsys.readouterr().err


def trials(name, losses=(2.5, 2.0), grid=GRID):
    """Rows of a row's trials; the last of the two is the better one."""
    rows = []
    for choice, loss in zip(grid.choices(name), losses, strict=True):
        case = asdict(Trial(name, "corpus", "cpu", SETTING, choice))
        rows.append({**case, "val_loss": loss, "seconds": 3.0, "workers": 2, **machine()})
    return rows


class TestTrials:
    def benchmark(self, rows, path, monkeypatch, grid=GRID):
        monkeypatch.setattr(translation, "SETTINGS", {"default": SETTING})
        monkeypatch.setattr(translation, "GRIDS", {"default": grid})
        results = ResultsFile(path / "runs.jsonl")
        for row in rows:
            results.append(row)
        return Translation(Translation.parse(["--out", str(path)]), results, Console(quiet=True))

    def test_only_local_p_has_windows_and_only_products_are_scaled(self):
        assert GRID.choices("none") == [Choice(0.003, 0.1, None, None), Choice(0.01, 0.1, None, None)]
        assert GRID.choices("dot") == [Choice(0.003, 0.1, None, False), CHOICE]
        scaled = replace(GRID, rates=(0.01,), scaled=(False, True))
        assert scaled.choices("dot") == [CHOICE, replace(CHOICE, scaled=True)]
        assert scaled.choices("additive") == [replace(CHOICE, scaled=None)]
        assert len(scaled.choices("local-p")) == 4
        of_local = [Choice(rate, 0.1, window, False) for rate in (0.003, 0.01) for window in (5, 10)]
        assert GRID.choices("local-p") == of_local
        assert set(translation_models.GRIDS) == set(translation_models.SETTINGS)

    def test_the_window_and_the_dropout_reach_the_model(self, corpus, run):
        local = replace(run, row="local-p", choice=Choice(0.01, 0.3, 7, False))
        model = translation_models.build_model(local, corpus.size)
        assert model.attention.window == 7
        rates = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
        assert rates == {0.3}

    @pytest.mark.parametrize("row", translation_models.ROWS)
    def test_the_scale_reaches_the_model(self, corpus, run, row):
        scales = []
        for scaled in (False, True) if row in translation_models.PRODUCTS else (None,):
            model = translation_models.build_model(
                replace(run, row=row, choice=Choice(0.01, 0.1, 7, scaled)), corpus.size
            )
            attention = getattr(model, "attention", None)
            scales.append(getattr(getattr(attention, "attention", attention), "scale", 0))
        assert scales == ([1.0, None] if row in translation_models.PRODUCTS else [0])

    def test_a_trial_is_the_first_third_of_a_run(self, corpus, run, tmp_path, monkeypatch):
        monkeypatch.setattr(Trial, "seed", run.seed)
        trial = Translator(Trial(run.row, corpus.name, "cpu", SETTING, CHOICE), corpus, tmp_path)
        whole = Translator(run, corpus, tmp_path)
        trial.advance(100)
        assert trial.is_finished
        assert [point["iteration"] for point in trial.curve] == [4]
        whole.advance(4)
        for name, weight in whole.model.state_dict().items():
            assert torch.equal(weight, trial.model.state_dict()[name])
        whole.add_point()
        assert trial.result()["val_loss"] == whole.curve[-1]["val_loss"]

    def test_a_rate_that_diverges_is_never_chosen(self, corpus, published, tmp_path, monkeypatch):
        case = Trial("dot", corpus.name, "cpu", SETTING, Choice(math.inf, 0.1, None, False))
        assert translation_models.train(case, lambda *args: None, tmp_path)["val_loss"] is None
        run = Run("dot", 0, corpus.name, "cpu", SETTING, case.choice)
        with pytest.raises(FloatingPointError):
            translation_models.train(run, lambda *args: None, tmp_path)
        some = self.benchmark([*trials("dot", (2.5, None)), *trials("hard", (None, None))], tmp_path, monkeypatch)
        assert some.chosen() == {"dot": GRID.choices("dot")[0]}

    def test_nothing_is_chosen_before_all_trials_are_done(self, tmp_path, monkeypatch):
        some = self.benchmark([*trials("dot"), *trials("none")[:1]], tmp_path, monkeypatch)
        assert some.chosen() == {"dot": GRID.choices("dot")[1]}

    def test_the_table_of_trials(self, tmp_path, monkeypatch):
        rows = [*trials("dot", (2.5, None)), *trials("local-p", (4.0, 3.0, 2.0, 5.0))]
        lines = translation.summarise_grid(self.benchmark(rows, tmp_path, monkeypatch).trials())
        assert lines == [
            {"attention": "dot", "rate 0.003, dropout 0.1": "**2.500**", "rate 0.01, dropout 0.1": "inf"},
            {
                "attention": "local-p, window 5",
                "rate 0.003, dropout 0.1": "4.000",
                "rate 0.01, dropout 0.1": "**2.000**",
            },
            {"attention": "local-p, window 10", "rate 0.003, dropout 0.1": "3.000", "rate 0.01, dropout 0.1": "5.000"},
        ]

    def test_scaled_products_have_lines_of_their_own(self, tmp_path, monkeypatch):
        grid = replace(GRID, rates=(0.01,), scaled=(False, True))
        rows = [*trials("dot", grid=grid), *trials("local-p", (4, 3, 2, 5), grid)]
        some = self.benchmark(rows, tmp_path, monkeypatch, grid)
        assert some.chosen() == {"dot": grid.choices("dot")[1], "local-p": grid.choices("local-p")[2]}
        lines = translation.summarise_grid(some.trials())
        assert {line["attention"]: line["rate 0.01, dropout 0.1"] for line in lines} == {
            "dot": "2.500",
            "dot, scaled": "**2.000**",
            "local-p, window 5": "4.000",
            "local-p, window 5, scaled": "3.000",
            "local-p, window 10": "**2.000**",
            "local-p, window 10, scaled": "5.000",
        }


class TestReport:
    def rows(self):
        rows = []
        for name, seed in itertools.product(("dot", "none"), (0, 1)):
            bins = [
                {"low": 1, "high": 4, "count": 3, "words": 2.5, "bleu": 20.0 + seed},
                {"low": 26, "high": None, "count": 2, "words": 30.0, "bleu": 10.0 - seed},
            ]
            curve = [{"iteration": i, "seconds": 6.0 * i, "bleu": float(i + seed)} for i in (1, 2)]
            result = {
                "sentences": 5,
                "beam": {"bleu": 10.0 + 2 * seed, "chrf": 30.0},
                "greedy": {"bleu": 9.0, "chrf": 29.0},
            }
            example = {"source": ["a$", "end"], "translation": ["x", "y", "end"]}
            if name == "dot":
                example["weights"] = [[0.5, 0.5], [0.25, 0.75], [0.0, 1.0]]
            row = asdict(Run(name, seed, "corpus", "cpu", SETTING, GRID.choices(name)[1]))
            row |= {"parameters": 1000, "curve": curve, "seconds": 60.0 + 120 * seed, "test": result, "long": result}
            row |= {"bins": bins, "examples": [example] * 3, "workers": 2, "sacrebleu": "2"}
            rows.append({**row, **machine()})
        return rows

    def test_the_table(self):
        lines = translation.summarise(self.rows())
        assert [line["attention"] for line in lines] == ["none", "dot"]
        assert lines[0]["test BLEU"] == "11.0 ± 1.4"
        assert lines[0]["test BLEU, greedy"] == "9.0 ± 0.0"
        assert lines[0]["training, min"] == "2.0 ± 1.4"
        assert (lines[0]["seeds"], lines[0]["parameters"]) == ("2", "1000")
        assert (lines[0]["rate"], lines[0]["dropout"]) == ("0.01", "0.1")
        assert translation.summarise(self.rows()[:1])[0]["test BLEU"] == "10.0"

    def test_the_newest_row_of_each_run_in_the_setting(self, tmp_path, monkeypatch):
        monkeypatch.setitem(translation.SETTINGS, "quick", SETTING)
        monkeypatch.setitem(translation.GRIDS, "quick", GRID)
        results = ResultsFile(tmp_path / "runs.jsonl")
        rows = self.rows()
        large = {**rows[1], "setting": asdict(translation.SETTINGS["large"])}
        not_chosen = {**rows[1], "parameters": 8, "choice": asdict(GRID.choices("dot")[0])}
        for row in (*rows, {**rows[0], "parameters": 7}, large, not_chosen, *trials("none"), *trials("dot")):
            results.append(row)
        some = Translation(Translation.parse(["--quick"]), results, None)
        chosen = list(some.rows([]).values())
        assert [(row["row"], row["seed"]) for row in chosen] == [("none", 0), ("none", 1), ("dot", 0), ("dot", 1)]
        assert [row["parameters"] for row in chosen] == [1000, 1000, 7, 1000]
        some.options.device = "cuda"
        assert some.rows([]) == {}

    def test_lines_are_means(self):
        lengths, times = (draw(self.rows()).axes[0] for draw in (translation.draw_lengths, translation.draw_times))
        assert [line.get_label() for line in lengths.lines] == ["none", "dot"]
        assert lengths.lines[0].get_xydata().tolist() == [[2.5, 20.5], [30.0, 9.5]]
        assert [tick.get_text() for tick in lengths.get_xticklabels()] == ["1–4\n(3)", "26+\n(2)"]
        assert times.lines[0].get_xydata().tolist() == [[0.1, 1.5], [0.2, 2.5]]

    def report(self, rows, out):
        results = ResultsFile(out / "runs.jsonl")
        for row in trials("dot"):
            results.append({**row, "setting": asdict(translation.SETTINGS["default"])})
        some = Translation(Translation.parse(["--out", str(out)]), results, Console(markup=False, width=60))
        some.report(dict(enumerate(rows)))

    def test_what_is_written(self, tmp_path, capsys):
        self.report(self.rows(), tmp_path)
        text = (tmp_path / "table.md").read_text()
        assert "5 test sentences, 5 long ones" in text
        assert "iterations 12" in text
        assert machine()["machine"] in text
        assert "2 run(s) at once" in text
        names = {"runs.jsonl", "grid.md", "table.md", "lengths.png", "times.png"}
        assert {path.name for path in tmp_path.iterdir()} == names | {f"alignment-{i}.png" for i in (1, 2, 3)}
        out = capsys.readouterr().out
        assert "11.0 ± 1.4" in out  # nothing is cut off

    def test_without_weights_no_alignments(self, tmp_path):
        self.report(self.rows()[2:], tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {
            "runs.jsonl",
            "grid.md",
            "table.md",
            "lengths.png",
            "times.png",
        }

    def test_styles(self):
        assert set(translation.STYLES) == set(translation_models.ROWS)
        assert len({style["marker"] for style in translation.STYLES.values()}) == len(translation_models.ROWS)


@pytest.mark.slow
def test_in_processes(published, tmp_path, monkeypatch, in_this_process):
    """Two at once, to the same numbers as here, but for times; and a process that fails."""
    wrong = replace(SETTING, heads=3)
    monkeypatch.setitem(translation.SETTINGS, "quick", wrong)
    chosen = ["--rows", "none", "transformer", "--runs", "1"]
    Translation.main(arguments(tmp_path, *chosen, "--workers", "2"))
    with pytest.raises(SystemExit, match="error: transformer: rate 0.003, dropout 0.1: InputError: "):
        Translation.main(arguments(tmp_path, "--rows", "transformer", "--runs", "1", "--quick"))
    rows = {row["row"]: row for row in ResultsFile(tmp_path / "out" / "runs.jsonl").rows(Run)}
    assert set(rows) == {"none", "transformer"}
    monkeypatch.setattr(translation, "in_processes", in_this_process)
    Translation.main(arguments(tmp_path / "here", *chosen))
    for row in ResultsFile(tmp_path / "here" / "out" / "runs.jsonl").rows(Run):
        assert {name: row[name] for name in ("test", "long", "bins", "examples")} == {
            name: rows[row["row"]][name] for name in ("test", "long", "bins", "examples")
        }


TINY = """
import sys
sys.path.insert(0, "tests/benchmarks")
import test_translation
from benchmarks import translation
translation.SETTINGS = {"default": test_translation.LONGER}
translation.GRIDS = {"default": test_translation.ONE}
translation.Translation.main(sys.argv[1:])
"""
LONGER = replace(SETTING, iterations=120, evaluate_every=10)
ONE = Grid((0.01,), (0.1,), (10,), (False,))


@pytest.mark.slow
def test_a_run_killed_half_way_goes_on_to_the_same_row(published, corpus, tmp_path, monkeypatch, one_process, start):
    chosen = ["--rows", "dot", "--runs", "1"]
    out = tmp_path / "killed" / "out"
    process = start("-c", TINY, *arguments(tmp_path / "killed", *chosen, "--workers", "1"), stdout=subprocess.DEVNULL)
    checkpoint = Run("dot", 0, corpus.name, "cpu", LONGER, CHOICE).checkpoint(out)
    deadline = time.monotonic() + 120
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not ResultsFile(out / "runs.jsonl").rows(Run)
    assert 0 < torch.load(checkpoint, weights_only=True)["iteration"] < 120

    monkeypatch.setattr(translation, "SETTINGS", {"default": LONGER})
    monkeypatch.setattr(translation, "GRIDS", {"default": ONE})
    for name in ("killed", "whole"):
        Translation.main(arguments(tmp_path / name, *chosen))
    killed, whole = (ResultsFile(tmp_path / name / "out" / "runs.jsonl").rows(Run)[0] for name in ("killed", "whole"))
    for name in ("test", "long", "bins", "examples"):
        assert killed[name] == whole[name]
    assert [x["val_loss"] for x in killed["curve"]] == [x["val_loss"] for x in whole["curve"]]
    assert len(whole["curve"]) == 12
