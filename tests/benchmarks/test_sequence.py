import math
import re
from dataclasses import asdict, replace
from importlib.metadata import version
from itertools import pairwise

import pytest
import torch
from rich.console import Console

import gattn
from benchmarks import sequence, sequence_models, sequence_speed
from benchmarks.framework import measuring
from benchmarks.framework.results import ResultsFile, machine
from benchmarks.framework.training import num_parameters
from benchmarks.sequence import Sequences
from benchmarks.sequence_models import LanguageModel

TEXT = "\n".join(f"{number} times {number} is {number * number}" for number in range(60))
SETTING = sequence_models.Setting(
    num_layers=1,
    heads=2,
    channels=8,
    context=8,
    batch=3,
    learning_rate=0.01,
    evaluate_every=10,
    warm_up=5,
    random_batches=2,
)
RUN = sequence_models.Run("text", "gattn", 0, 24, 1, SETTING)
CASE = sequence_speed.Speed("speed", "full", 6, "gattn", 2, 8, 2, 0, 1, 3, 0.01)
KINDS = [
    *((graph, peer) for graph in ("full", "causal", "window") for peer in ("gattn", "torch", "sdpa")),
    *(("ragged", peer) for peer in ("gattn", "gattn-padded", "torch", "sdpa")),
]


@pytest.fixture(autouse=True)
def leave_this_process_as_it_was(monkeypatch):
    monkeypatch.setattr(sequence_speed.Speed, "prepare_process", lambda case: None)
    monkeypatch.setattr(measuring, "peak_above", lambda function, device: (function(), 10**6))  # collects no garbage


@pytest.fixture
def tiny(monkeypatch, one_process):
    """The benchmark on a small text, a small model and short sequences, without other processes."""
    monkeypatch.setattr(gattn.datasets, "load_text", lambda name: TEXT)
    for module, name, value in [
        (sequence, "SETTING", SETTING),
        (sequence, "CHANNELS", 8),
        (sequence, "HEADS", 2),
        (sequence, "BATCH", 2),
        (sequence, "LENGTHS", (4, 6, 9)),
        (sequence, "NODES", (8, 16, 32)),
        (sequence, "RAGGED", (16, 16)),
        (sequence, "DECODED", 5),
        (sequence_models, "CHUNK", 4),
        (sequence_models, "SAMPLE", 20),
        (sequence_speed, "WINDOW", (2, 0)),
        (sequence_speed, "EDGES_PER_NODE", 3),
    ]:
        monkeypatch.setattr(module, name, value)


TRAINING = ("--iterations", "12")
SPEED = ("--repeats", "2", "--seconds", "0.001")


def arguments(out, *more):
    return ["--quick", "--threads", "1", *more, "--out", str(out)]


def measured(case, path):
    torch.save(case.references(), path / "reference.pt")
    return case.measure(path / "reference.pt")


def benchmark(*arguments, console=None):
    return Sequences(Sequences.parse([*map(str, arguments)]), None, console)


def row_of(case, seconds=0.1, **changes):
    times = {"median": seconds, "q1": seconds, "q3": seconds, "times": [seconds]}
    row = {"outcome": "ok", "reason": "", "peak_bytes": 10**7, "forward_peak_bytes": 10**6}
    return {**asdict(case), **row, "forward": times, "forward_backward": times, **machine(), **changes}


def train_all(runs, folder, corpus):
    """The results of runs that are trained in turns."""
    messages = sequence_models.train(runs, corpus, folder)
    return [(case, content) for case, kind, content in messages if kind == "ok"]


@pytest.fixture
def corpus():
    return sequence_models.Corpus(TEXT)


class TestText:
    def test_the_last_tenth_validates(self, corpus):
        tokens = torch.cat([corpus.train, corpus.validation]).tolist()
        assert "".join(corpus.symbols[token] for token in tokens) == TEXT
        assert corpus.train.numel() == int(0.9 * len(TEXT))
        assert corpus.name != sequence_models.Corpus(TEXT + "!").name

    def test_batches_are_pieces_of_the_text(self, corpus):
        pieces = sequence_models.draw_batch(corpus.train, SETTING, 0, 0)
        assert pieces.shape == (3, 9)
        for piece in pieces:
            assert "".join(corpus.symbols[token] for token in piece) in TEXT

    def test_batches_depend_on_seed_and_iteration(self, corpus):
        keys = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 1)]
        first, again = (
            [sequence_models.draw_batch(corpus.train, SETTING, *key).tolist() for key in keys] for _ in range(2)
        )
        assert first == again
        assert all(a != b for place, a in enumerate(first) for b in first[:place])

    @pytest.mark.parametrize("length", [25, 26, 32])
    def test_the_whole_loss_is_the_mean_over_all_tokens_but_the_first(self, corpus, length):
        model, tokens = sequence_models.build_model(RUN, len(corpus.symbols)), corpus.validation[:length]
        total = 0.0
        for place in range(1, length):
            first = (place - 1) // 8 * 8
            logits = model(tokens[first:place].unsqueeze(0))[0, -1]
            total -= logits.log_softmax(-1)[tokens[place]].item()
        assert sequence_models.whole_loss(model, tokens, 8) == pytest.approx(total / (length - 1), rel=1e-5)

    def test_learning_rate(self):
        rates = [sequence_models.learning_rate(sequence_models.Setting(), iteration, 2000) for iteration in range(2001)]
        assert rates[0] == pytest.approx(4e-3 / 101)
        assert rates[100] == max(rates) == 4e-3
        assert rates[1050] == pytest.approx((4e-3 + 1e-4) / 2)
        assert rates[2000] == pytest.approx(1e-4)
        assert all(a > b for a, b in pairwise(rates[100:]))


class TestTraining:
    def test_the_published_setting(self):
        """0.80 M parameters: nanoGPT counts them without positions."""
        model = sequence_models.build_model(replace(RUN, setting=sequence_models.Setting()), 65)
        assert sum(x.numel() for x in model.parameters()) - 64 * 128 == 795_904
        assert isinstance(model.layers[0], gattn.nn.TransformerEncoderLayer)

    def test_both_kinds_of_layers_start_equal_and_learn_alike(self, corpus, tmp_path):
        rows = train_all([RUN, replace(RUN, layers="torch")], tmp_path, corpus)
        ours, theirs = ([point["val_loss"] for point in row["curve"]] for _, row in rows)
        assert [case.layers for case, _ in rows] == ["gattn", "torch"]
        assert [point["iteration"] for point in rows[0][1]["curve"]] == [0, 10, 20, 24]
        assert ours == pytest.approx(theirs, rel=1e-4)
        assert ours[0] == pytest.approx(math.log(len(corpus.symbols)), rel=0.02)
        assert ours[-1] < ours[0] - 0.05
        models = [sequence_models.build_model(replace(RUN, layers=layers), 5) for layers in sequence_models.LAYERS]
        assert type(models[1].layers[0]) is torch.nn.TransformerEncoderLayer
        for name, weight in models[0].state_dict().items():
            assert torch.equal(weight, models[1].state_dict()[name])

    def test_norms_do_not_decay(self, corpus, tmp_path):
        groups = LanguageModel(RUN, corpus, tmp_path).optimizer.param_groups
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
        assert [{x.dim() for x in group["params"]} for group in groups] == [{2}, {1}]
        assert groups[0]["betas"] == (0.9, 0.99)

    @pytest.mark.parametrize("layers", [*sequence_models.LAYERS, *sequence_models.RECURRENT])
    def test_an_interrupted_run_ends_with_the_same_numbers(self, layers, corpus, tmp_path):
        run = replace(RUN, layers=layers)
        (tmp_path / "whole").mkdir()
        whole = LanguageModel(run, corpus, tmp_path / "whole")
        whole.advance(24)
        LanguageModel(run, corpus, tmp_path).advance(17)
        second = LanguageModel(run, corpus, tmp_path)
        assert second.iteration == 10
        second.advance(24)
        assert second.curve == whole.curve
        assert second.sample(30) == whole.sample(30)

    def test_a_run_that_was_cut_off_before_its_row_is_reported(self, corpus, tmp_path):
        LanguageModel(RUN, corpus, tmp_path).advance(24)
        ((_, row),) = train_all([RUN], tmp_path, corpus)
        assert len(row["iteration"]["times"]) == 24

    def test_turns(self, corpus, tmp_path, monkeypatch):
        monkeypatch.setattr(sequence_models, "CHUNK", 10)
        done = []

        def advance(training, count):
            done.append((training.case.layers, count))
            training.iteration = min(training.iteration + count, 24)

        trainings = [LanguageModel(replace(RUN, layers=layers), corpus, tmp_path) for layers in sequence_models.LAYERS]
        trainings[1].iteration = 10
        for training in sequence_models.turns(trainings):
            advance(training, 10)
        order = [layers for layers, _ in done]
        assert order == ["gattn", "torch", "gattn", "gattn", "torch"]

    @pytest.mark.parametrize("layers", [*sequence_models.LAYERS, *sequence_models.RECURRENT])
    def test_the_sample(self, layers, corpus, tmp_path):
        training = LanguageModel(replace(RUN, layers=layers), corpus, tmp_path)
        text = training.sample(30)
        assert len(text) == 30
        assert set(text) <= set(TEXT)
        # Without a cache or a state: recurrent models see all of the text, Transformers what they were made for.
        generator, tokens = torch.Generator().manual_seed(0), torch.tensor([[corpus.symbols.index("\n")]])
        for _ in range(30):
            seen = tokens if layers in sequence_models.RECURRENT else tokens[:, -8:]
            probabilities = (training.model(seen)[:, -1] / 0.8).softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)], 1)
        assert "".join(corpus.symbols[token] for token in tokens[0, 1:]) == text


class TestRecurrentModels:
    def test_as_many_parameters_as_the_transformer(self):
        setting = sequence_models.Setting()
        assert sequence_models.setting_of("torch", setting, 65) == setting
        with torch.device("meta"):
            wanted = num_parameters(sequence_models.make_model("gattn", setting, 65))
            for layers in sequence_models.RECURRENT:
                found = sequence_models.setting_of(layers, setting, 65)
                assert replace(found, num_layers=4, heads=4, channels=128) == setting
                distances = [
                    abs(num_parameters(sequence_models.make_model(layers, replace(found, channels=width), 65)) - wanted)
                    for width in range(found.channels - 4, found.channels + 5, 4)
                ]
                assert distances[1] == min(distances) < 0.02 * wanted

    @pytest.mark.parametrize("layers", sequence_models.RECURRENT)
    def test_weights_depend_on_the_seed(self, layers):
        first, again, other = (
            sequence_models.build_model(replace(RUN, layers=layers, seed=seed), 7).state_dict() for seed in (0, 0, 1)
        )
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert not torch.equal(first["embedding.weight"], other["embedding.weight"])
        assert first["output.weight"].data_ptr() == first["embedding.weight"].data_ptr()

    def test_the_lstm_is_an_lstmn_that_sees_the_last_state_alone(self):
        lstm, lstmn = sequence_models.LSTM(7, 8, 2), gattn.models.LSTMN(7, 8, 2, window=1)
        lstmn.embedding.load_state_dict(lstm.embedding.state_dict())
        lstmn.output.load_state_dict(lstm.output.state_dict())
        with torch.no_grad():
            for number, cell in enumerate(lstmn.layers):
                weights = {name: getattr(lstm.lstm, f"{name}_l{number}") for name in ("weight_ih", "weight_hh")}
                weights["bias"] = getattr(lstm.lstm, f"bias_ih_l{number}") + getattr(lstm.lstm, f"bias_hh_l{number}")
                i, f, candidate, o = ({name: x.chunk(4)[gate] for name, x in weights.items()} for gate in range(4))
                ours = {name: torch.cat([gate[name] for gate in (i, f, o, candidate)]) for name in weights}
                cell.input_gates.weight.copy_(ours["weight_ih"])
                cell.input_gates.bias.copy_(ours["bias"])
                cell.summary_gates.weight.copy_(ours["weight_hh"])
        tokens = torch.randint(7, (3, 6))
        torch.testing.assert_close(lstm(tokens), lstmn(tokens))

    def test_they_learn(self, corpus, tmp_path):
        runs = [replace(RUN, layers=layers) for layers in sequence_models.RECURRENT]
        rows = train_all(runs, tmp_path, corpus)
        assert {case.layers for case, _ in rows} == {"lstm", "lstmn"}
        for _, row in rows:
            losses = [point["val_loss"] for point in row["curve"]]
            assert losses[0] == pytest.approx(math.log(len(corpus.symbols)), rel=0.05)
            assert losses[-1] < losses[0] - 0.05
            assert row["in_turns_with"] == ["lstm", "lstmn"]


class TestFailedTraining:
    def losses(self, monkeypatch, *losses):
        """Makes up the validation losses of the LSTM; the others are what they are."""
        evaluate = LanguageModel.evaluate

        def changed(training):
            made_up = {"val_loss": losses[len(training.curve)]} if training.case.layers == "lstm" else {}
            return evaluate(training) | made_up

        monkeypatch.setattr(LanguageModel, "evaluate", changed)

    @pytest.mark.parametrize(
        ("losses", "reason"),
        [
            ((4.0, math.nan), "the validation loss became nan in iteration 10 of language model, lstm"),
            ((4.0, 3.0, 4.0), "the validation loss did not fall: 4.0000 before training, 4.0000 after it"),
        ],
    )
    def test_the_others_are_trained_and_reported(self, losses, reason, tiny, tmp_path, monkeypatch, capsys):
        command = arguments(tmp_path, "--parts", "lm", "--models", *sequence_models.MODELS, *TRAINING)
        with monkeypatch.context() as patch:
            self.losses(patch, *losses)
            with pytest.raises(SystemExit) as error:
                Sequences.main(command)
        assert error.value.code == f"error: language model, lstm: {reason}"
        assert {row["layers"] for row in ResultsFile(tmp_path / "runs.jsonl").rows()} == {"gattn", "torch", "lstmn"}
        assert "| LSTMN, gattn |" in (tmp_path / "lm.md").read_text()
        assert not (tmp_path / "lm-lstm.txt").exists()


class TestInputs:
    def test_lengths(self):
        lengths = replace(CASE, graph="ragged", length=512, batch=64).lengths()
        assert len(lengths) == 64
        assert 32 <= min(lengths) < 80
        assert 460 < max(lengths) <= 512
        assert CASE.lengths() == [6, 6]

    def test_neighbours(self, monkeypatch):
        monkeypatch.setattr(sequence_speed, "WINDOW", (1, 0))
        targets = torch.tensor([1, 2])
        assert sequence_speed.neighbours("causal", targets, 3).tolist() == [[1, 1, 0], [1, 1, 1]]
        assert sequence_speed.neighbours("window", targets, 3).tolist() == [[1, 1, 0], [0, 1, 1]]
        edge_index = torch.tensor([[0, 0, 2, 1], [1, 1, 2, 0]])
        assert sequence_speed.neighbours("sparse", targets, 3, edge_index).tolist() == [[2, 0, 0], [0, 0, 1]]

    @pytest.mark.parametrize(
        ("graph", "edges"), [("full", 2 * 200**2), ("causal", 200 * 201), ("window", 2 * (72 * 128 + 128 * 129 // 2))]
    )
    def test_number_of_edges(self, graph, edges):
        assert replace(CASE, graph=graph, length=200).num_edges() == edges
        assert replace(CASE, graph="sparse", length=200, batch=1).num_edges() == 3200

    def test_every_node_of_the_sparse_graph_has_as_many_edges(self):
        edge_index = sequence_speed.draw(replace(CASE, part="graphs", graph="sparse", length=9), "layer").edge_index
        assert edge_index[1].bincount().tolist() == [16] * 9


class TestReference:
    @pytest.mark.parametrize("graph", ["full", "causal", "window"])
    def test_against_pytorch(self, graph, monkeypatch):
        monkeypatch.setattr(sequence_speed, "WINDOW", (2, 0))
        monkeypatch.setattr(sequence_speed, "CHUNK_LOGITS", 30)  # two targets at a time
        case = replace(CASE, graph=graph)
        inputs = sequence_speed.draw(case, "layer")
        results = sequence_speed.reference(case, inputs, torch.float64)
        layer = torch.nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
        layer.load_state_dict(inputs.parameters)
        x = inputs.tokens["x"].double().view(2, 6, 8).requires_grad_()
        distance = torch.arange(6) - torch.arange(6).unsqueeze(1)
        hidden = {"full": distance > 9, "causal": distance > 0, "window": (distance > 0) | (distance < -2)}[graph]
        out = layer(x, x, x, need_weights=False, attn_mask=hidden)[0]
        leaves = {"x": x, **dict(layer.named_parameters())}
        grads = torch.autograd.grad(out, list(leaves.values()), inputs.grad.double().view(2, 6, 8))
        torch.testing.assert_close(results["output"], out.detach().flatten(0, 1))
        for name, grad in zip(leaves, grads, strict=True):
            torch.testing.assert_close(
                results[f"gradient of {name}"], grad.reshape(results[f"gradient of {name}"].shape)
            )

    def test_an_edge_that_is_there_twice_counts_twice(self):
        case = replace(CASE, part="graphs", graph="sparse", length=3, batch=1, heads=1)
        tokens = {name: torch.randn(3, 8) for name in ("query", "key", "value")}
        edge_index = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 1, 2]])
        out = sequence_speed.plain(case, tokens, {}, edge_index)
        logits = tokens["key"][[0, 0, 1]] @ tokens["query"][0] / math.sqrt(8)
        torch.testing.assert_close(out[0], logits.softmax(0) @ tokens["value"][[0, 0, 1]])
        torch.testing.assert_close(out[1], tokens["value"][0])

    @pytest.mark.parametrize(("graph", "peer"), KINDS)
    @pytest.mark.parametrize("length", [9, 80])
    def test_peers_are_right(self, graph, peer, length, tmp_path, monkeypatch):
        monkeypatch.setattr(sequence_speed, "WINDOW", (2, 0))
        row = measured(replace(CASE, graph=graph, peer=peer, length=length, batch=3), tmp_path)
        assert row["outcome"] == "ok", row["reason"]
        names = ("query", "key", "value") if peer == "sdpa" else ("x", "in_proj_weight", "out_proj.bias")
        assert {"output", "output without autograd", *(f"gradient of {name}" for name in names)} <= set(row["errors"])
        assert all(error["error"] < 1e-5 for error in row["errors"].values())
        assert row["peak_bytes"] >= 0
        for mode in measuring.MODES:
            assert 0 < row[mode]["q1"] <= row[mode]["median"] <= row[mode]["q3"]
            assert len(row[mode]["times"]) >= 3

    @pytest.mark.parametrize("peer", ["gattn", "torch"])
    def test_decoding_is_right_and_has_no_gradients(self, peer, tmp_path):
        row = measured(replace(CASE, graph="decode", peer=peer), tmp_path)
        assert row["outcome"] == "ok", row["reason"]
        assert set(row["errors"]) == {"output", "output without autograd"}
        assert "forward" in row
        assert "forward_backward" not in row

    @pytest.mark.parametrize("graph", sequence.GRAPH_COLOURS)
    def test_graphs_are_right(self, graph, tmp_path, monkeypatch):
        monkeypatch.setattr(sequence_speed, "WINDOW", (2, 0))
        row = measured(replace(CASE, part="graphs", graph=graph, batch=1, length=80), tmp_path)
        assert row["outcome"] == "ok", row["reason"]
        assert "gradient of x" in row["errors"]

    def test_of_long_sequences_the_output_alone_is_compared(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sequence_speed, "CHECKED_LENGTH", 5)
        row = measured(CASE, tmp_path)
        assert set(row["errors"]) == {"output", "output without autograd"}
        assert row["outcome"] == "ok"


class TestWrongResults:
    @pytest.mark.parametrize("peer", ["gattn", "sdpa"])
    def test_one_percent_is_caught_in_each_result(self, peer):
        case = replace(CASE, peer=peer, graph="ragged", batch=3)
        expected, computation = case.references()[case.kind], sequence_speed.build(case)
        results = computation.compared(computation.forward_backward())
        for name in (None, *expected):
            changed = {other: x * 1.01 if other == name else x for other, x in results.items()}
            errors = measuring.check(changed, expected)
            assert [x for x, entry in errors.items() if entry["error"] > entry["budget"]] == [name] * (name is not None)

    @pytest.mark.parametrize("factor", [1.01, float("nan")])
    def test_no_time_is_given(self, factor, tmp_path, monkeypatch):
        class Wrong(gattn.nn.MultiheadAttention):
            def forward(self, *args, **kwargs):
                return super().forward(*args, **kwargs)[0] * factor, None

        monkeypatch.setattr(gattn.nn, "MultiheadAttention", Wrong)
        row = measured(CASE, tmp_path)
        assert set(row) == {"outcome", "reason"}
        assert row["outcome"] == "WRONG"
        assert "is off by" in row["reason"]

    @pytest.mark.parametrize("graph", ["causal", "window", "ragged"])
    @pytest.mark.parametrize(("peer", "function"), [("gattn-padded", "gattn_options"), ("torch", "torch_options")])
    def test_a_peer_that_sees_too_much_is_wrong(self, graph, peer, function, tmp_path, monkeypatch):
        monkeypatch.setattr(sequence_speed, "WINDOW", (2, 0))
        monkeypatch.setattr(sequence_speed, function, lambda *args: {})
        assert measured(replace(CASE, graph=graph, peer=peer, batch=3), tmp_path)["outcome"] == "WRONG"


class TestResuming:
    def test_nothing_is_done_twice(self, tiny, tmp_path, monkeypatch, capsys):
        every = arguments(tmp_path, *TRAINING, *SPEED)
        Sequences.main(every)
        names = ("runs.jsonl", "lm.md", "lm-gattn.txt", "speed.md", "graphs.md")
        before = [(tmp_path / name).read_text() for name in names]
        monkeypatch.setattr(sequence_speed.Speed, "measure", lambda *args: pytest.fail("measured again"))
        monkeypatch.setattr(sequence_models, "LanguageModel", lambda *args: pytest.fail("trained again"))
        capsys.readouterr()
        Sequences.main(every)
        printed = capsys.readouterr().out
        assert "2 of 2 training runs are in" in printed
        assert "26 of 26 measurements are in" in printed
        assert [(tmp_path / name).read_text() for name in names] == before

    def test_an_interrupted_training_goes_on(self, tiny, tmp_path, monkeypatch, capsys):
        step = LanguageModel.step

        def cut_off(training):
            if training.iteration == 22:
                raise KeyboardInterrupt
            step(training)

        def lm(folder):
            Sequences.main(arguments(folder, "--parts", "lm", "--iterations", "24"))

        lm(tmp_path / "whole")
        with monkeypatch.context() as patch:
            patch.setattr(LanguageModel, "step", cut_off)
            with pytest.raises(SystemExit):
                lm(tmp_path / "parts")
        assert not ResultsFile(tmp_path / "parts" / "runs.jsonl").rows()
        lm(tmp_path / "parts")
        rows = [
            {row["layers"]: (row["curve"], row["sample"]) for row in ResultsFile(tmp_path / name / "runs.jsonl").rows()}
            for name in ("whole", "parts")
        ]
        assert rows[0] == rows[1]
        assert set(rows[0]) == {"gattn", "torch"}


class TestReport:
    def report(self):
        """PyTorch takes twice as long and three times the memory; its second round at length 6 is slower."""
        window = replace(CASE, graph="window")
        ragged = [replace(CASE, graph="ragged", peer=peer) for peer in ("gattn", "gattn-padded", "torch", "sdpa")]
        torch_cases = [replace(CASE, peer="torch"), replace(CASE, peer="torch", round=1)]
        cases = [CASE, *torch_cases, window, *ragged]
        rows = [
            row_of(CASE),
            *(
                row_of(case, seconds, peak_bytes=3 * 10**7)
                for case, seconds in zip(torch_cases, (0.1, 0.3), strict=True)
            ),
        ]
        rows += [
            row_of(window, 0.02),
            *(row_of(case, time) for case, time in zip(ragged, (0.1, 0.15, 0.18, 0.2), strict=True)),
        ]
        rows[-1] = {**asdict(ragged[-1]), "outcome": "out of memory", "reason": "killed", **machine()}
        return dict(zip(cases, rows, strict=True))

    def test_rounds_are_taken_together(self):
        rows = [row_of(CASE, 0.1), row_of(replace(CASE, round=1), 0.3, peak_bytes=2 * 10**7)]
        merged = sequence.merge(rows)
        assert merged["forward"]["median"] == pytest.approx(0.2)
        assert merged["forward"]["times"] == [0.1, 0.3]
        assert merged["peak_bytes"] == 2 * 10**7
        rows[1]["outcome"] = "WRONG"
        assert sequence.merge(rows)["outcome"] == "WRONG"

    def test_picture_of_speed_names_what_it_compares(self):
        figure = sequence.draw_speed(sequence.Report(self.report()))
        panels = {axis.get_title(): axis for axis in figure.axes}
        bars = [text.get_text() for text in panels["ragged"].get_xticklabels()]
        assert bars == ["gattn", "torch", "gattn\npadded"]  # sdpa has no time
        assert len(panels["ragged"].patches) == len(panels["ragged"].texts) == len(bars)
        assert all(axis.get_xlabel() and axis.get_xticklabels() for axis in figure.axes)

    def test_speed(self):
        report = sequence.Report(self.report())
        lines = {(line["graph"], line["peer"]): line for line in sequence.speed_lines(report)}
        assert len(lines) == 7
        assert lines["full", "gattn"]["forward + backward, torch's ÷"] == "2.00×"
        assert lines["full", "gattn"]["peak, torch's ÷"] == "3.0×"
        assert lines["full", "torch"]["forward, ms"].startswith("200 (")
        assert lines["window", "gattn"]["forward, torch's ÷"] == "–"
        assert lines["ragged", "sdpa"]["forward, ms"] == "out of memory"
        assert sequence.speed_remarks(report) == [
            "window 6: 5.0× as fast as full attention, forward + backward.",
            "ragged 6: 1.5× as fast as padding it with gattn, forward + backward.",
            "ragged 6: 1.8× as fast as padding it with torch, forward + backward.",
        ]

    def test_graphs(self):
        cases = [replace(CASE, part="graphs", graph="full", batch=1, length=length) for length in (10, 20)]
        rows = [row_of(cases[0], 0.001), row_of(cases[1], 0.004, peak_bytes=3 * 10**7)]
        first, second = sequence.graph_lines(sequence.Report(dict(zip(cases, rows, strict=True))))
        assert (first["edges"], second["edges"]) == ("100", "400")
        assert second["forward + backward, ns per edge"] == "10000.0"
        assert second["time, half as many nodes' ×"] == "4.0×"
        assert second["peak, half as many nodes' ×"] == "3.0×"
        assert first["time, half as many nodes' ×"] == "–"

    def test_lm(self):
        point = {"iteration": 0, "val_loss": 2.0, "val_loss_random": 2.1}
        common = {"curve": [point], "val_loss": 2.0, "val_loss_random": 2.1, "parameters": 7, "sample": "to be"}
        rows = [
            {
                **asdict(replace(RUN, layers=layers)),
                **common,
                "total_seconds": 100 * time,
                "iteration": {"median": time, "q1": time, "q3": 2 * time},
            }
            for layers, time in (("gattn", 0.011), ("torch", 0.01))
        ]
        ours, theirs = sequence.lm_lines(rows)
        assert ours["iteration, × torch's"] == ours["all, × torch's"] == "1.100×"
        assert ours["iteration, ms"] == "11.00 (11.00–22.00)"
        assert (ours["validation loss"], ours["over random batches"]) == ("2.0000", "2.1000")
        assert theirs["all, × torch's"] == "1.000×"
        assert sequence.lm_lines(rows[:1])[0]["all, × torch's"] == "–"

    def test_lm_with_recurrent_models(self):
        common = {"val_loss": 2.0, "val_loss_random": 2.1, "parameters": 7}
        rows = [
            {
                **asdict(replace(RUN, layers=layers, setting=replace(SETTING, channels=8 + number))),
                **common,
                "total_seconds": 1.0 + number,
                "iteration": {"median": 0.1 * (1 + number), "q1": 0.1, "q3": 0.2},
            }
            for number, layers in enumerate(("gattn", "torch", "lstm", "lstmn"))
        ]
        lines = {line["model"]: line for line in sequence.lm_lines(rows)}
        assert list(lines) == ["Transformer, gattn", "Transformer, torch", "LSTM, torch", "LSTMN, gattn"]
        assert [line["layers × channels"] for line in lines.values()] == ["1 × 8", "1 × 9", "1 × 10", "1 × 11"]
        assert lines["LSTMN, gattn"]["iteration, × Transformer's (gattn)"] == "4.000×"
        assert sequence.lm_lines(rows[1:])[-1]["all, × Transformer's (torch)"] == "2.000×"
        assert sequence.lm_lines(rows[2:])[-1]["all, × Transformer's (gattn)"] == "–"

    def test_written(self, tmp_path, capsys):
        benchmark("--out", tmp_path, console=Console(markup=False)).report(self.report())
        for text in (capsys.readouterr().out, (tmp_path / "speed.md").read_text()):
            assert "speed ragged 6 sdpa: out of memory: killed" in text
            assert f"torch {version('torch')}" in text
        assert 5_000 < (tmp_path / "speed.png").stat().st_size < 100_000


class TestCommandLine:
    def test_results(self, tiny, tmp_path, capsys):
        Sequences.main(arguments(tmp_path, *TRAINING, *SPEED))
        rows = ResultsFile(tmp_path / "runs.jsonl").rows()
        assert [row["part"] for row in rows] == ["lm"] * 2 + ["speed"] * 18 + ["graphs"] * 8
        assert {row.get("outcome", "ok") for row in rows} == {"ok"}
        assert all(row["machine"] and row["torch"] and row["gattn"] for row in rows)
        assert rows[0]["in_turns_with"] == ["gattn", "torch"]
        for name in sequence.PARTS:
            assert 5_000 < (tmp_path / f"{name}.png").stat().st_size < 150_000
        for layers in sequence_models.LAYERS:
            assert 10 < len((tmp_path / f"lm-{layers}.txt").read_text()) <= 21
        assert "which reports 1.88 after 2000 iterations" in (tmp_path / "lm.md").read_text()
        assert re.search(r"^\| gattn \| \d+ \| 12 \| \d\.\d{4} \|", (tmp_path / "lm.md").read_text(), re.MULTILINE)
        assert "| ragged | 16 | gattn-padded |" in (tmp_path / "speed.md").read_text()
        assert "| sparse | 16 | 48 |" in (tmp_path / "graphs.md").read_text()
        assert "One layer on four graphs" in capsys.readouterr().out

    def test_recurrent_models(self, tiny, tmp_path):
        Sequences.main(arguments(tmp_path, "--parts", "lm", "--models", "lstmn", "lstm", *TRAINING))
        first = ResultsFile(tmp_path / "runs.jsonl").rows()
        assert [row["layers"] for row in first] == ["lstm", "lstmn"]
        every = ("--models", *sequence_models.MODELS)
        Sequences.main(arguments(tmp_path, "--parts", "lm", "--layers", "gattn", *every, *TRAINING))
        rows = ResultsFile(tmp_path / "runs.jsonl").rows()
        assert rows[:2] == first
        assert [row["layers"] for row in rows[2:]] == ["gattn"]
        table = (tmp_path / "lm.md").read_text()
        for name in ("Transformer, gattn", "LSTM, torch", "LSTMN, gattn"):
            assert re.search(rf"^\| {name} \| \d × \d+ \| \d+ \| 12 \| \d\.\d{{4}} \|", table, re.MULTILINE)
        assert "Transformers start from the same weights" in table
        assert 5_000 < (tmp_path / "lm.png").stat().st_size < 150_000
        for name in sequence_models.RECURRENT:
            assert 10 < len((tmp_path / f"lm-{name}.txt").read_text()) <= 21

    def test_the_plan(self):
        cases = benchmark().measurements()
        assert len(cases) == 2 * (3 * 6 * 3 + 4 + 3 + 2 + 4 * 6)
        assert {(case.channels, case.heads) for case in cases} == {(256, 8)}
        assert {case.batch for case in cases if case.part == "speed"} == {1, 4, 64}
        single = {(case.graph, case.length, case.peer) for case in cases if (case.part, case.batch) == ("speed", 1)}
        assert single == {*(("full", 16, peer) for peer in ("gattn", "torch", "sdpa"))} | {
            *(("decode", 256, peer) for peer in ("gattn", "torch"))
        }
        first = [(case.graph, case.length, case.round, case.peer) for case in cases[:7]]
        assert first == [
            *(("full", 128, number, peer) for number in (0, 1) for peer in ("gattn", "torch", "sdpa")),
            ("full", 256, 0, "gattn"),
        ]
        ragged = [(case.length, case.batch, case.peer) for case in cases if case.graph == "ragged" and not case.round]
        assert ragged == [(512, 64, peer) for peer in ("gattn", "gattn-padded", "torch", "sdpa")]
        sizes = [case.length for case in cases if (case.part, case.graph, case.round) == ("graphs", "sparse", 0)]
        assert sizes == [256, 512, 1024, 2048, 4096, 8192]
        # Those that share a reference lie together.
        problems = [case.problem() for case in cases]
        changes = sum(a != b for a, b in pairwise(problems))
        assert changes + 1 == len(set(problems))

    def test_parts_and_layers(self):
        cases = benchmark("--parts", "speed", "--layers", "torch").measurements()
        assert {case.peer for case in cases} == {"torch", "sdpa"}
        cases = benchmark("--parts", "graphs", "lm").measurements()
        assert {case.part for case in cases} == {"graphs"}
        assert benchmark("--parts", "lm").measurements() == []

    def test_quick_gives_defaults_only(self):
        quick = Sequences.parse(["--quick"])
        assert (quick.iterations, quick.rounds, quick.repeats) == (10, 1, 3)
        assert {case.length for case in benchmark("--quick").measurements()} == {16, 128, 256, 512}
        assert benchmark("--quick", "--parts", "graphs").options.parts == ["graphs"]
        chosen = Sequences.parse(["--quick", "--iterations", "7", "--rounds", "3"])
        assert (chosen.iterations, chosen.rounds) == (7, 3)
        assert Sequences.parse([]).iterations == 2000

    def test_a_missing_text(self, tiny, tmp_path, monkeypatch, capsys):
        def missing(name):
            raise gattn.datasets.DatasetUnavailableError("the text is not there")

        monkeypatch.setattr(gattn.datasets, "load_text", missing)
        with pytest.raises(SystemExit, match="error: the text is not there"):
            Sequences.main(arguments(tmp_path, "--parts", "lm"))
        with pytest.raises(SystemExit, match="error: the text is not there"):
            Sequences.main(arguments(tmp_path, "--models", "lstmn"))
        Sequences.main(arguments(tmp_path, "--layers", "gattn", *SPEED))
        assert "Skipped: the text is not there" in capsys.readouterr().out
        assert {row["part"] for row in ResultsFile(tmp_path / "runs.jsonl").rows()} == {"speed", "graphs"}

    @pytest.mark.parametrize(
        "wrong",
        [
            ["--parts", "all"],
            ["--layers", "keras"],
            ["--models", "gru"],
            ["--parts", "speed", "--models", "lstm"],
            ["--parts", "lm", "--layers", "gattn", "--models", "lstm"],
            ["--iterations", "0"],
            ["--threads", "-1"],
            ["--rounds", "0"],
            ["--repeats", "0"],
            ["--seconds", "0"],
            ["--timeout", "nan"],
            ["--seed", "-1"],
            ["--parts", "graphs", "--layers", "torch"],
            ["--parts", "lm", "graphs", "--layers", "torch"],
            ["--parts", "speed", "--seed", "1"],
            ["--parts", "graphs", "--iterations", "10"],
            ["--parts", "lm", "--rounds", "3"],
            ["--threads", "9999999999"],
            ["--rounds", "1000000000000"],
            ["--seconds", "inf"],
            ["--timeout", "1e10"],
            ["--iterations", "1e3"],
        ],
    )
    def test_wrong_arguments(self, wrong, capsys):
        with pytest.raises(SystemExit):
            Sequences.main(wrong)
        assert "error:" in capsys.readouterr().err


@pytest.mark.slow
def test_in_processes(monkeypatch, tmp_path):
    monkeypatch.setattr(sequence, "NODES", (8,))
    Sequences.main(arguments(tmp_path, "--parts", "graphs", *SPEED))
    rows = ResultsFile(tmp_path / "runs.jsonl").rows()
    assert [row["outcome"] for row in rows] == ["ok"] * 4


def test_pytorchs_layer_contains_its_attention():
    assert replace(CASE, peer="sdpa").whole == replace(CASE, peer="torch")
    assert CASE.whole is None
