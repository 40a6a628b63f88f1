import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

import gattn
from benchmarks import kernels, measuring, results
from benchmarks.results import ResultsFile, machine

TINY = kernels.Shape("tiny", 30, 100, 2, 3)
CASE = kernels.Case(TINY, "attention", "gat", False, "float32", "gattn", 1, 3, 0.01)
TASKS = [("attention", False), ("layer", False), ("layer", True)]


def here(function, *arguments, timeout):
    """In place of `kernels.run_apart`: the same in this process."""
    return "ok", function(*arguments)


@pytest.fixture(autouse=True)
def leave_this_process_as_it_was(monkeypatch):
    monkeypatch.setattr(kernels, "prepare_process", lambda case: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tiny(monkeypatch):
    """`--shape` with one small random graph in the place of Cora's."""
    monkeypatch.setattr(kernels, "SHAPES", {**kernels.SHAPES, "cora": (TINY,)})
    monkeypatch.setattr(kernels, "run_apart", here)
    monkeypatch.setattr(kernels, "peak_above", lambda function, device: (function(), 10**6))  # collects no garbage


def arguments(out, *more):
    quick = ["--quick", "--shape", "cora", "--peers", "gattn", "pyg", "--seconds", "0.01"]
    return [*quick, "--threads", "1", *more, "--out", str(out)]


def measured(case, path):
    kernels.write_reference(case, path / "reference.pt")
    return kernels.measure(case, path / "reference.pt")


def row_of(case, seconds=0.1, **changes):
    times = {"median": seconds, "q1": seconds, "q3": seconds, "times": [seconds]}
    row = {"outcome": "ok", "reason": "", "peak_bytes": 10**7, "forward": times, "forward_backward": times}
    return {**asdict(case), **row, **machine(), **changes}


class TestGraphs:
    def test_random(self):
        edges = kernels.draw_edges(kernels.SHAPES["cora"][0])
        assert edges.shape == (2, 10_556)
        assert (edges[0] != edges[1]).all()
        assert edges.min() >= 0
        assert edges.max() < 2_708

    @pytest.mark.parametrize("hub", [0, 299])
    def test_a_third_of_the_edges_point_to_the_hub(self, hub):
        source, target = kernels.draw_edges(replace(TINY, nodes=300, edges=9_000, hub=hub))
        assert 0.3 < (target == hub).double().mean() < 0.37
        assert (source != target).all()

    def test_the_two_hubs_are_the_first_node_and_the_last(self):
        assert [(shape.hub, shape.nodes) for shape in kernels.SHAPES["hub"]] == [(0, 169_343), (169_342, 169_343)]

    def test_molecules_are_graphs_apart(self):
        shape = kernels.SHAPES["molecules"][0]
        source, target = kernels.draw_edges(shape)
        assert (source // 25 == target // 25).all()
        assert (source != target).all()
        assert target.unique().numel() > 0.85 * shape.nodes
        assert (
            (target // 25).unique().numel() == source.unique().div(25, rounding_mode="floor").unique().numel() == 10_000
        )

    def test_power_law(self):
        """The busiest node of N has E / sqrt(N) edges, the busiest quarter half of all."""
        shape = replace(kernels.SHAPES["products"][0], nodes=10_000, edges=300_000)
        edges = kernels.draw_edges(shape)
        assert (edges[0] != edges[1]).all()
        assert torch.equal(edges, kernels.draw_edges(shape))
        for ends in edges:
            degree = ends.bincount(minlength=shape.nodes)
            assert degree.numel() == shape.nodes
            assert 2_800 < degree.max() < 3_200
            assert 0.5 <= degree.sort(descending=True).values[:2_500].sum() / shape.edges < 0.52
        busiest = [ends.bincount().argmax().item() for ends in edges]
        assert busiest[0] == busiest[1] > 0

    def test_photo(self, load):
        load("photo")
        (shape,), missing = kernels.find_shapes(kernels.SHAPES["photo"])
        assert (shape.nodes, shape.edges, missing) == (7_650, 238_162, {})
        assert kernels.draw_edges(shape).shape == (2, 238_162)

    def test_missing_data_are_named(self, monkeypatch, tmp_path):
        monkeypatch.setenv("GATTN_DATA", str(tmp_path))
        monkeypatch.setattr("socket.getaddrinfo", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("offline")))
        shapes, missing = kernels.find_shapes([TINY, *kernels.SHAPES["photo"]])
        assert shapes == [TINY]
        assert "photo is not under" in missing["photo"]


class TestReference:
    def test_chunks_hold_all_edges_and_part_no_target(self):
        target = torch.tensor([3, 0, 3, 1, 3, 2, 0])
        parts = list(kernels.chunks(target, 2))
        assert sorted(torch.cat(parts).tolist()) == list(range(7))
        assert [sorted(set(target[part].tolist())) for part in parts] == [[0], [1, 2], [3]]

    @pytest.mark.parametrize("layer", kernels.LAYERS)
    def test_in_parts_or_whole_it_is_the_same(self, layer, monkeypatch):
        case = replace(CASE, layer=layer)
        inputs = kernels.draw(case)
        monkeypatch.setattr(kernels.chunks, "__defaults__", (20,))
        parts = kernels.reference(case, inputs, torch.float64)
        inputs.tensors = {name: tensor.double().requires_grad_() for name, tensor in inputs.tensors.items()}
        tensors = inputs.tensors
        value = tensors.get("value", tensors["key"])
        score = kernels.score_of(case, tensors.get("vector"))
        graph = gattn.SparseGraph(inputs.edge_index, TINY.nodes, TINY.nodes)
        out = gattn.attend(tensors["query"], tensors["key"], value, graph, score=score, backend="reference")
        torch.testing.assert_close(parts["output"], out)
        grads = torch.autograd.grad(out, list(tensors.values()), inputs.grad.double())
        for name, grad in zip(tensors, grads, strict=True):
            torch.testing.assert_close(parts[f"gradient of {name}"], grad)

    @pytest.mark.parametrize("layer", kernels.LAYERS)
    @pytest.mark.parametrize(("part", "edge_features"), TASKS)
    @pytest.mark.parametrize("peer", ["gattn", "pyg"])
    def test_peers_are_right(self, layer, part, edge_features, peer, tmp_path):
        case = replace(CASE, layer=layer, part=part, edge_features=edge_features, peer=peer)
        row = measured(case, tmp_path)
        assert row["outcome"] == "ok", row["reason"]
        assert {"output without autograd", "output"} < set(row["errors"])
        assert len(row["errors"]) > 3
        assert all(error["error"] < 1e-5 for error in row["errors"].values())
        assert row["peak_bytes"] >= 0
        for mode in ("forward", "forward_backward"):
            assert 0 < row[mode]["q1"] <= row[mode]["median"] <= row[mode]["q3"]
            assert len(row[mode]["times"]) >= 3

    @pytest.mark.parametrize("layer", kernels.LAYERS)
    @pytest.mark.parametrize("part", ["attention", "layer"])
    def test_half_precision(self, layer, part, tmp_path):
        row = measured(replace(CASE, layer=layer, part=part, dtype="bfloat16"), tmp_path)
        assert row["outcome"] == "ok", row["reason"]
        assert 1e-5 < row["errors"]["output"]["error"] < 0.05

    def test_large_graphs_are_compared_at_random_rows_and_the_hub(self, monkeypatch, tmp_path):
        monkeypatch.setattr(kernels, "CHECKED_ROWS", 5)
        kernels.write_reference(replace(CASE, shape=replace(TINY, hub=29)), tmp_path / "reference.pt")
        expected = torch.load(tmp_path / "reference.pt")
        assert expected["output"]["exact"].shape == (6, 2, 3)
        assert expected["gradient of key"]["rows"].tolist() == expected["output"]["rows"].tolist()
        assert expected["output"]["rows"][-1] == 29

    @pytest.mark.parametrize("layer", kernels.LAYERS)
    @pytest.mark.parametrize("part", ["attention", "layer"])
    def test_of_large_graphs_only_compared_rows_are_kept(self, part, layer, monkeypatch, tmp_path):
        monkeypatch.setattr(kernels, "CHECKED_ROWS", 2)
        monkeypatch.setattr(kernels.chunks, "__defaults__", (20,))
        case = replace(CASE, part=part, layer=layer)
        whole = kernels.reference(case, kernels.draw(case), torch.float64)
        monkeypatch.setattr(kernels, "SAMPLED_NODES", 29)
        row = measured(case, tmp_path)
        assert row["outcome"] == "ok", row["reason"]
        expected = torch.load(tmp_path / "reference.pt")
        assert whole.keys() == expected.keys()
        for name, truth in expected.items():
            rows = truth["rows"]
            assert (rows is None) == (name not in kernels.NODE_RESULTS)
            torch.testing.assert_close(truth["exact"], whole[name] if rows is None else whole[name][rows])
        rows = expected["output"]["rows"]
        assert rows.numel() == 4  # two at random, and the ends with the most edges
        assert {int(ends.bincount().argmax()) for ends in kernels.draw(case).all_edges} <= set(rows.tolist())

    @pytest.mark.parametrize("layer", kernels.LAYERS)
    def test_dgl(self, layer, monkeypatch, tmp_path):
        """Against a stand-in with DGL's names and conventions: u are sources, v targets."""

        def total(graph, messages):
            _, targets, num_nodes = graph
            return messages.new_zeros(num_nodes, *messages.shape[1:]).index_add(0, targets, messages)

        def make(edges, num_nodes):
            return *edges, num_nodes

        ops = SimpleNamespace(
            u_add_v=lambda graph, u, v: u[graph[0]] + v[graph[1]],
            u_dot_v=lambda graph, u, v: (u[graph[0]] * v[graph[1]]).sum(-1, keepdim=True),
            edge_softmax=lambda graph, logits: logits.exp() / total(graph, logits.exp())[graph[1]],
            u_mul_e_sum=lambda graph, x, e: total(graph, x[graph[0]] * e),
        )
        monkeypatch.setitem(sys.modules, "dgl", SimpleNamespace(graph=make, ops=ops))
        row = measured(replace(CASE, layer=layer, peer="dgl"), tmp_path)
        assert row["outcome"] == "ok", row["reason"]


class TestWrongResults:
    @pytest.fixture
    def expected(self, tmp_path):
        kernels.write_reference(CASE, tmp_path / "reference.pt")
        return torch.load(tmp_path / "reference.pt")

    @pytest.fixture
    def results(self):
        computation = kernels.Computation(CASE)
        return {"output without autograd": computation.forward(), **computation.forward_backward()}

    def test_one_percent_is_caught_in_each_result(self, expected, results):
        assert all(error <= budget for error, budget in kernels.check(results, expected).values())
        for name in expected:
            errors = kernels.check({**results, name: results[name] * 1.01}, expected)
            assert [other for other, (error, budget) in errors.items() if error > budget] == [name]
            assert errors[name][0] == pytest.approx(0.01, rel=0.01)

    def test_a_missing_result_is_an_error(self, expected, results):
        del results["gradient of key"]
        with pytest.raises(ValueError, match="expected were"):
            kernels.check(results, expected)

    @pytest.mark.parametrize("factor", [1.01, float("nan")])
    def test_no_time_is_given(self, monkeypatch, tmp_path, factor):
        kernels.write_reference(CASE, tmp_path / "reference.pt")
        attend = gattn.attend
        monkeypatch.setattr(gattn, "attend", lambda *args, **kwargs: attend(*args, **kwargs) * factor)
        row = kernels.measure(CASE, tmp_path / "reference.pt")
        assert set(row) == {"outcome", "reason"}
        assert row["outcome"] == "WRONG"
        assert "is off by" in row["reason"]

    def test_they_are_shown_and_tried_again(self, monkeypatch, tmp_path, tiny, capsys):
        attend = gattn.attend
        with monkeypatch.context() as patch:
            patch.setattr(
                gattn, "attend", lambda *args, **kwargs: attend(*args, **kwargs) * (1.01 if "backend" in kwargs else 1)
            )
            kernels.main(arguments(tmp_path, "--layers", "gat"))
        printed = capsys.readouterr().out
        assert "WRONG" in printed
        assert "output without autograd is off by 1.0e-02 of its largest element" in printed
        kernels.main(arguments(tmp_path, "--layers", "gat"))
        assert "WRONG" not in (tmp_path / "table.md").read_text()
        assert "6 of 7 measurements are in" in capsys.readouterr().out


class TestMemory:
    def test_what_is_freed_again_counts(self):
        _, some = kernels.peak_above(lambda: torch.ones(20_000_000).sum())
        assert 70e6 < some < 120e6
        _, none = kernels.peak_above(lambda: None)
        assert none < 5e6


class FakeGpu:
    """What is measured on a GPU, by a clock of its own; it computes on the CPU."""

    def __init__(self, monkeypatch):
        self.now, self.calls = 0.0, []
        for name, answer in (("memory_allocated", 100), ("max_memory_allocated", 350)):
            monkeypatch.setattr(torch.cuda, name, lambda device, name=name, answer=answer: self.note(name, answer))
        for name in ("synchronize", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda device, name=name: self.note(name))
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: SimpleNamespace(**self.event()))

    def note(self, name, answer=None):
        self.calls.append(name)
        return answer

    def event(self):
        """An event's methods; `end` is another such."""
        at = []
        return {
            "record": lambda: at.append(self.now),
            "synchronize": lambda: self.note("event"),
            "at": at,
            "elapsed_time": lambda end: 1000 * (end.at[0] - at[0]),
        }

    def work(self):
        self.calls.append("work")
        self.now += 0.25


class TestOnAGpu:
    case = replace(CASE, device="cuda")

    @pytest.fixture
    def gpu(self, monkeypatch):
        return FakeGpu(monkeypatch)

    def test_times_are_the_events(self, gpu):
        assert measuring.duration(gpu.work, "cuda") == 0.25
        assert gpu.calls == ["synchronize", "work", "event"]
        times = measuring.timed(gpu.work, 3, 0.001, "cuda")
        assert times["q1"] == times["median"] == times["q3"] == 0.25
        assert gpu.calls.count("work") == gpu.calls.count("event")  # the warm-up's calls are waited for, too

    def test_memory_is_above_what_was_there(self, gpu):
        gpu.calls.clear()
        assert measuring.peak_above(lambda: gpu.work() or "done", "cuda") == ("done", 250)
        order = ["reset_peak_memory_stats", "memory_allocated", "work", "synchronize", "max_memory_allocated"]
        assert gpu.calls == ["synchronize", *order]

    def test_a_copy_reads_and_writes(self, gpu, monkeypatch):
        monkeypatch.setattr(measuring, "timed", lambda *args: measuring.spread([0.5]))
        assert measuring.copy_rate("cpu", 1000) == 4000

    @pytest.mark.parametrize("part", ["attention", "layer", "gather"])
    def test_measured(self, part, gpu, monkeypatch, tmp_path):
        """After a first call on the same graph, which tunes the kernels."""
        moved = []
        monkeypatch.setattr(kernels.Inputs, "to", lambda self, device: moved.append((device, len(self.grad))) or self)
        monkeypatch.setattr(kernels, "BACKENDS", {"cuda": "reference"})
        monkeypatch.setattr(kernels, "copy_rate", lambda device: 7.0)
        case = replace(self.case, part=part)
        expected = None
        if part != "gather":
            expected = tmp_path / "reference.pt"
            kernels.write_reference(case, expected)
        row = kernels.measure(case, expected)
        assert row["outcome"] == "ok", row["reason"]
        assert moved == [("cuda", 30)] * 2
        assert row["peak_bytes"] == 250
        assert row["forward"]["median"] == 0
        assert row.get("copy_rate") == (7.0 if part == "gather" else None)

    @pytest.mark.parametrize("part", ["attention", "layer"])
    def test_by_its_own_backend(self, part, monkeypatch):
        monkeypatch.setattr(kernels.Inputs, "to", lambda self, device: self)
        monkeypatch.setattr(kernels, "BACKENDS", {"cpu": "cpu", "cuda": "other"})
        with pytest.raises(ValueError, match="unknown backend 'other'"):
            kernels.Computation(replace(self.case, part=part)).forward()

    def test_inputs_are_moved(self):
        """To another type of device that every machine has."""
        for part, has_features in TASKS:
            inputs = kernels.draw(replace(self.case, part=part, edge_features=has_features)).to("meta")
            tensors = [inputs.edge_index, inputs.grad, *inputs.tensors.values()]
            tensors += [inputs.edge_attr] if has_features else []
            tensors += inputs.layer.parameters() if part == "layer" else []
            assert {tensor.device.type for tensor in tensors} == {"meta"}
            assert inputs.all_edges.device.type == "cpu"

    def test_without_one_a_line_says_so(self, monkeypatch, capsys, tmp_path):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(SystemExit) as exit_info:
            kernels.main(["--device", "cuda", "--out", str(tmp_path / "out")])
        assert exit_info.value.code == 2
        assert capsys.readouterr().err == "error: --device cuda needs a GPU that PyTorch can use, and finds none\n"
        assert not (tmp_path / "out").exists()

    def test_the_plan(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        options = kernels.parse(["--device", "cuda"])
        assert [shape.name for shape in options.shapes][-2:] == ["molecules", "products"]
        assert {case.device for case in kernels.plan(options, options.shapes, ["gattn"])} == {"cuda"}
        assert [shape.name for shape in kernels.parse(["--shape", "products"]).shapes] == ["products"]

    def test_shares_of_a_copy(self, monkeypatch, tmp_path, capsys):
        gather = replace(self.case, part="gather", layer="", peer="embedding_bag")
        half = replace(self.case, dtype="bfloat16")
        cases = [gather, self.case, half, replace(self.case, peer="pyg")]
        rows = [row_of(case, device="cuda", driver="5.5") for case in cases]
        rows[0]["copy_rate"] = 1e5
        report = kernels.Report(cases, rows)
        lines = report.lines()
        assert [line["forward, of a copy's"] for line in lines] == ["49%", "49%", "30%", "–"]
        assert lines[1]["forward + backward, of a copy's"] == "119%"
        kernels.write(report, {}, tmp_path, kernels.Console(markup=False, width=200))
        assert "this machine's GPU" in capsys.readouterr().out
        table = (tmp_path / "table.md").read_text()
        assert "driver 5.5" in table
        assert "memory that PyTorch has handed out" in table
        assert "(0 GB/s)" in table

    def test_machine(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Abacus")
        monkeypatch.setattr(results.subprocess, "run", lambda *args, **kwargs: SimpleNamespace(stdout="12.3\n12.3\n"))
        results._driver.cache_clear()
        found = machine("cuda")
        assert found["machine"].startswith("NVIDIA Abacus, ")
        assert found["driver"] == "12.3"
        assert "cuda" in found
        monkeypatch.setattr(results.subprocess, "run", lambda *args, **kwargs: (_ for _ in ()).throw(OSError))
        results._driver.cache_clear()
        assert machine("cuda")["driver"] == "unknown"
        results._driver.cache_clear()
        assert not {"cuda", "driver"} & set(machine())


def out_of_gpu_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")


@pytest.mark.slow
class TestProcesses:
    def test_a_full_gpu(self):
        outcome, reason = kernels.run_apart(out_of_gpu_memory, timeout=100)
        assert outcome == "out of memory"
        assert "Tried to allocate" in reason

    def test_what_is_imported_once_leaves_the_gpu_alone(self, start):
        code = (
            "import importlib, sys, torch\n"
            "for name in ('is_available', 'device_count', 'init', '_lazy_init'):\n"
            "    setattr(torch.cuda, name, lambda *args: sys.exit('CUDA is asked'))\n"
            "from benchmarks.measuring import PRELOADED\n"
            "for name in PRELOADED:\n"
            "    importlib.import_module(name)\n"
        )
        process = start("-c", code, stderr=subprocess.PIPE, text=True)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors

    def test_a_result_comes_back(self):
        assert kernels.run_apart(sum, [1, 2], timeout=100) == ("ok", 3)

    def test_a_killed_one_ran_out_of_memory(self):
        assert kernels.run_apart(signal.raise_signal, signal.SIGKILL, timeout=100) == ("out of memory", "killed")

    def test_an_allocation_that_fails(self):
        outcome, reason = kernels.run_apart(torch.ones, 2**50, timeout=100)
        assert outcome == "out of memory"
        assert "can't allocate memory" in reason

    def test_other_ends(self):
        assert kernels.run_apart(sys.exit, 3, timeout=100) == ("failed", "the process ended with exit code 3")
        assert kernels.run_apart(int, "x", timeout=100)[1].startswith("ValueError: invalid literal")
        assert kernels.run_apart(time.sleep, 1000, timeout=0.5) == ("timed out", "after 0.5 s")

    def test_the_whole_benchmark(self, monkeypatch, tmp_path, capsys):
        monkeypatch.setattr(kernels, "SHAPES", {**kernels.SHAPES, "cora": (TINY,)})
        kernels.main(arguments(tmp_path, "--layers", "gatv2", "--edge-features", "without"))
        rows = ResultsFile(tmp_path / "runs.jsonl").rows()
        assert [row["outcome"] for row in rows] == ["ok"] * 5
        assert "tiny" in capsys.readouterr().out


class TestResuming:
    def test_nothing_is_measured_twice(self, tiny, tmp_path, capsys, monkeypatch):
        kernels.main(arguments(tmp_path, "--layers", "gat"))
        before = (tmp_path / "runs.jsonl").read_text()
        table = (tmp_path / "table.md").read_text()
        assert len(before.splitlines()) == 1 + 3 * 2
        monkeypatch.setattr(kernels, "measure", lambda *args: pytest.fail("measured again"))
        kernels.main(arguments(tmp_path, "--layers", "gat"))
        assert "7 of 7 measurements are in" in capsys.readouterr().out
        assert (tmp_path / "runs.jsonl").read_text() == before
        assert (tmp_path / "table.md").read_text() == table

    @pytest.mark.parametrize(
        ("field", "value"), [("shape", "cora"), ("forward", {"median": "fast"}), ("outcome", "great"), ("reason", 1)]
    )
    def test_a_row_of_wrong_types_is_measured_again(self, field, value, tiny, tmp_path, capsys):
        few = arguments(tmp_path, "--layers", "gat", "--edge-features", "without")
        kernels.main(few)
        path = tmp_path / "runs.jsonl"
        rows = ResultsFile(path).rows()
        rows[2][field] = value
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        capsys.readouterr()
        kernels.main(few)
        printed = capsys.readouterr()
        assert "4 of 5 measurements are in" in printed.out
        assert printed.err.startswith(f"warning: {path}, line 3: {field}")
        assert len(printed.err.splitlines()) == 1

    def test_rows_from_before_there_were_devices_count(self):
        row = row_of(CASE)
        del row["device"], row["shape"]["graphs"], row["shape"]["power_law"]
        assert kernels.key(row) == kernels.planned(CASE)
        assert kernels.key(row_of(replace(CASE, device="cuda"))) != kernels.planned(CASE)

    def test_another_version_is_measured_anew(self, tiny, tmp_path, monkeypatch):
        few = arguments(tmp_path, "--layers", "gat", "--edge-features", "without")
        kernels.main(few)
        monkeypatch.setattr("gattn.__version__", "9.9")
        kernels.main(few)
        assert len(ResultsFile(tmp_path / "runs.jsonl").rows()) == 10

    def test_an_interruption_keeps_what_has_finished(self, tiny, tmp_path, monkeypatch, capsys):
        measure = kernels.measure

        def interrupted(case, expected):
            if case.peer == "pyg":
                raise KeyboardInterrupt
            return measure(case, expected)

        monkeypatch.setattr(kernels, "measure", interrupted)
        with pytest.raises(SystemExit) as exit_info:
            kernels.main(arguments(tmp_path))
        assert exit_info.value.code == 130
        assert "the same command goes on from there" in capsys.readouterr().out.replace("\n", " ")
        assert len(ResultsFile(tmp_path / "runs.jsonl").rows()) == 2

    def test_without_a_reference_nothing_is_measured(self, tiny, tmp_path, monkeypatch):
        def apart(function, *arguments, timeout):
            killed = function is kernels.write_reference
            return ("out of memory", "killed") if killed else here(function, *arguments, timeout=timeout)

        monkeypatch.setattr(kernels, "run_apart", apart)
        kernels.main(arguments(tmp_path, "--layers", "gat", "--edge-features", "without"))
        rows = ResultsFile(tmp_path / "runs.jsonl").rows()
        assert {row["reason"] for row in rows[1:]} == {"no reference: out of memory killed"}


class TestReport:
    def report(self):
        """PyG takes ten times as long and five times the memory; compiled it runs out of memory."""
        gather = replace(CASE, part="gather", layer="", peer="embedding_bag")
        cases = [gather, *(replace(CASE, peer=peer) for peer in ("gattn", "pyg", "pyg-compile"))]
        rows = [row_of(gather, 0.05), row_of(cases[1]), row_of(cases[2], 1.0, peak_bytes=5 * 10**7)]
        rows.append({**asdict(cases[3]), "outcome": "out of memory", "reason": "killed", **machine()})
        return kernels.Report(cases, rows)

    def test_ratios(self):
        _, ours, eager, compiled = self.report().lines()
        assert ours["× PyG"] == ours["forward, × PyG"] == "10.0×"
        assert ours["memory, PyG's ÷"] == "5.0×"
        assert ours["forward, gathers"] == ours["forward + backward, gathers"] == "2.0"
        assert ours["× compiled"] == "–"
        assert eager["× PyG"] == "1.0×"
        assert eager["forward, gathers"] == "–"
        assert compiled["forward + backward, ms"] == "out of memory"

    def test_bytes(self):
        """130 edges with loops, 30 nodes, rows of 24 bytes, indices of 8."""
        assert kernels.bytes_moved(CASE, "forward") == 130 * (24 + 8) + 30 * 24
        assert kernels.bytes_moved(CASE, "forward_backward") == 130 * (2 * 24 + 2 * 8) + 30 * 5 * 24
        transformer = replace(CASE, layer="transformer", dtype="bfloat16")
        assert kernels.bytes_moved(transformer, "forward") == 130 * (2 * 12 + 8) + 30 * 2 * 12

    def test_written(self, tmp_path, capsys):
        kernels.write(self.report(), {"dgl": "not installed"}, tmp_path, kernels.Console(markup=False))
        for text in (capsys.readouterr().out, (tmp_path / "table.md").read_text()):
            assert "dgl: not installed" in text
            assert "tiny attention gat float32 pyg-compile: out of memory: killed" in text
            assert f"torch {torch.__version__}" in text
        assert 5_000 < (tmp_path / "speedup.png").stat().st_size < 100_000

    @pytest.mark.parametrize("columns", ["40", "80"])
    def test_a_narrow_terminal_cuts_nothing(self, columns, tmp_path, capsys, monkeypatch):
        monkeypatch.setenv("COLUMNS", columns)
        kernels.write(self.report(), {}, tmp_path, kernels.Console(markup=False))
        assert "…" not in capsys.readouterr().out

    def test_where_pyg_has_no_time_the_picture_says_why(self, tmp_path):
        case = replace(CASE, peer="pyg")
        row = {**asdict(case), "outcome": "out of memory", "reason": "killed", **machine()}
        kernels.draw_speedup(kernels.Report([CASE, case], [row_of(CASE), row]), tmp_path / "speedup.png")
        assert (tmp_path / "speedup.png").stat().st_size > 5_000

    def test_hubs_and_half_precision_have_their_ratios(self):
        plain = replace(CASE, shape=kernels.SHAPES["arxiv"][0])
        hub, half = replace(plain, shape=kernels.SHAPES["hub"][0]), replace(plain, dtype="bfloat16")
        rows = [row_of(plain, 0.3), row_of(hub, 0.33), row_of(half, 0.2)]
        remarks = kernels.Report([plain, hub, half], rows).remarks()
        assert remarks == [
            "hub first attention gat float32 gattn: 1.10× the time of the plain graph, forward + backward.",
            "arxiv attention gat bfloat16 gattn: forward 1.50× as fast as float32.",
        ]


class TestCommandLine:
    def test_results(self, tiny, tmp_path, capsys):
        kernels.main(arguments(tmp_path, "--layers", "gatv2", "--dtypes", "float32", "bfloat16"))
        rows = ResultsFile(tmp_path / "runs.jsonl").rows()
        assert len(rows) == 1 + 3 * 3
        assert {row["outcome"] for row in rows} == {"ok"}
        assert {row["peer"] for row in rows if row["dtype"] == "bfloat16"} == {"gattn"}
        table = (tmp_path / "table.md").read_text()
        assert "| tiny | layer | gatv2 + edge features | float32 | pyg |" in table
        assert "as fast as float32" in table
        assert "gatv2 + edges" in capsys.readouterr().out
        assert all(json.loads(line)["machine"] for line in (tmp_path / "runs.jsonl").read_text().splitlines())

    def test_the_plan(self):
        options = kernels.parse(["--shape", "hub", "cora", "--layers", "gat"])
        peers = ["gattn", "pyg", "dgl"]
        tasks = [
            (case.shape.name, case.part, case.edge_features, case.peer)
            for case in kernels.plan(options, options.shapes, peers)
        ]
        assert tasks == [
            ("hub first", "gather", False, "embedding_bag"),
            ("hub first", "attention", False, "gattn"),
            ("hub last", "gather", False, "embedding_bag"),
            ("hub last", "attention", False, "gattn"),
            ("cora", "gather", False, "embedding_bag"),
            ("cora", "attention", False, "gattn"),
            ("cora", "attention", False, "pyg"),
            ("cora", "attention", False, "dgl"),
            ("cora", "layer", False, "gattn"),
            ("cora", "layer", False, "pyg"),
            ("cora", "layer", True, "gattn"),
            ("cora", "layer", True, "pyg"),
        ]

    def test_quick_gives_defaults_only(self):
        quick = kernels.parse(["--quick"])
        assert [shape.name for shape in quick.shapes] == ["cora", "small"]
        assert "pyg-compile" not in quick.peers
        chosen = kernels.parse(["--quick", "--shape", "mid", "--peers", "pyg-compile", "--repeats", "7"])
        assert [shape.name for shape in chosen.shapes] == ["mid"]
        assert chosen.peers == ["pyg-compile"]
        assert chosen.repeats == 7
        assert [shape.name for shape in kernels.parse([]).shapes] == [
            "cora",
            "mid",
            "arxiv",
            "hub first",
            "hub last",
            "photo",
            "molecules",
        ]

    def test_peers_that_are_not_there(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "torch_scatter", SimpleNamespace())
        monkeypatch.setattr(sys, "path", [])
        monkeypatch.delitem(sys.modules, "dgl", raising=False)
        assert kernels.find_peers(kernels.PEERS) == (
            ["gattn", "pyg", "pyg-scatter", "pyg-compile"],
            {"dgl": "not installed"},
        )

    def test_no_peer_at_all(self, monkeypatch, tmp_path):
        monkeypatch.setattr(kernels, "find_peers", lambda names: ([], {"dgl": "not installed"}))
        with pytest.raises(SystemExit, match="nothing can be measured: dgl: not installed"):
            kernels.main(arguments(tmp_path))

    def test_results_that_cannot_be_written_are_an_error_before_anything_runs(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(SystemExit, match="error: results cannot be written to"):
            kernels.main(arguments(tmp_path / "file"))

    @pytest.mark.parametrize(
        "wrong",
        [
            ["--repeats", "0"],
            ["--shape", "big"],
            ["--layers", "gcn"],
            ["--peers", "jraph"],
            ["--dtypes", "int8"],
            ["--threads", "-1"],
            ["--seconds", "0"],
            ["--timeout", "nan"],
            ["--device", "tpu"],
            ["--threads", "9999999999"],
            ["--seconds", "inf"],
            ["--timeout", "1e10"],
            ["--repeats", "many"],
            ["--shape", "hub", "--edge-features", "with"],
            ["--out", ""],
            ["--nonsense"],
        ],
    )
    def test_wrong_arguments(self, wrong, capsys):
        with pytest.raises(SystemExit):
            kernels.main(wrong)
        assert "error:" in capsys.readouterr().err
