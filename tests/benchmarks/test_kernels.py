import itertools
import platform
import sys
from dataclasses import asdict, replace
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
import torch_geometric.typing
from rich.console import Console

import gattn
from benchmarks import kernel_cases, kernel_reports, kernels, pyg_peers
from benchmarks.framework import measuring
from benchmarks.framework.processes import in_processes
from benchmarks.framework.results import ALLOCATORS, ResultsFile, machine
from benchmarks.kernels import Kernels
from benchmarks.pyg_peers import PYG

TINY = kernel_cases.Shape("tiny", 30, 100, 2, 3)
CASE = kernel_cases.Case(TINY, "attention", "gat", False, "float32", "gattn", 1, 3, 0.01)
TARGETS = replace(TINY, targets=10, fresh=True)
TASKS = [("attention", False), ("layer", False), ("layer", True)]


@pytest.fixture(autouse=True)
def leave_this_process_as_it_was(monkeypatch):
    monkeypatch.setattr(kernel_cases.Case, "prepare_process", lambda case: None)


@pytest.fixture
def tiny(monkeypatch, one_process):
    """`--shapes` with one small random graph in the place of Cora's."""
    monkeypatch.setattr(kernels, "SHAPES", {**kernel_cases.SHAPES, "cora": (TINY,)})
    monkeypatch.setattr(measuring, "peak_above", lambda function, device: (function(), 10**6))  # collects no garbage


def arguments(out, *more):
    quick = ["--quick", "--shapes", "cora", "--peers", "gattn", "pyg", "--seconds", "0.01"]
    return [*quick, "--threads", "1", *more, "--out", str(out)]


def measured(case, path):
    torch.save(case.references(), path / "reference.pt")
    return case.measure(path / "reference.pt")


def benchmark(*arguments):
    return Kernels(Kernels.parse(arguments), None, None)


def row_of(case, seconds=0.1, **changes):
    times = {"median": seconds, "q1": seconds, "q3": seconds, "times": [seconds]}
    row = {"outcome": "ok", "reason": "", "peak_bytes": 10**7, "forward": times, "forward_backward": times}
    return {**machine(), **asdict(case), **row, **changes}


class TestGraphs:
    def test_random(self):
        edges = kernel_cases.draw_edges(kernel_cases.SHAPES["cora"][0])
        assert edges.shape == (2, 10_556)
        assert (edges[0] != edges[1]).all()
        assert edges.min() >= 0
        assert edges.max() < 2_708

    @pytest.mark.parametrize("hub", [0, 299])
    def test_a_third_of_the_edges_point_to_the_hub(self, hub):
        source, target = kernel_cases.draw_edges(replace(TINY, nodes=300, edges=9_000, hub=hub))
        assert 0.3 < (target == hub).double().mean() < 0.37
        assert (source != target).all()

    def test_the_two_hubs_are_the_first_node_and_the_last(self):
        assert [(shape.hub, shape.nodes) for shape in kernel_cases.SHAPES["hub"]] == [(0, 169_343), (169_342, 169_343)]

    def test_molecules_are_graphs_apart(self):
        shape = kernel_cases.SHAPES["molecules"][0]
        source, target = kernel_cases.draw_edges(shape)
        assert (source // 25 == target // 25).all()
        assert (source != target).all()
        assert target.unique().numel() > 0.85 * shape.nodes
        assert (
            (target // 25).unique().numel() == source.unique().div(25, rounding_mode="floor").unique().numel() == 10_000
        )

    def test_a_batch_of_molecules(self):
        shape = kernel_cases.SHAPES["batch"][0]
        source, target = kernel_cases.draw_edges(shape)
        assert (source // 25 == target // 25).all()
        assert (target // 25).unique().numel() == 256
        assert target.numel() == 256 * 54

    def test_sampled_neighbours(self):
        source, target = kernel_cases.draw_edges(kernel_cases.SHAPES["sampled"][0])
        assert (source != target).all()
        assert 8_900 < target.max() < 9_000
        assert 50_900 < source.max() < 51_000

    @pytest.mark.parametrize("fresh", [False, True])
    @pytest.mark.parametrize("peer", ["gattn", "pyg"])
    @pytest.mark.parametrize("part", ["attention", "layer"])
    def test_each_call_gets_a_tensor_of_its_own(self, part, peer, fresh, monkeypatch):
        got, graphs = [], kernel_cases.Inputs.graphs

        def spy(inputs, make=lambda edges: edges):
            return graphs(inputs, lambda edges: got.append(edges) or make(edges))

        monkeypatch.setattr(kernel_cases.Inputs, "graphs", spy)
        case = replace(CASE, shape=replace(TINY, fresh=fresh), part=part, peer=peer)
        computation = kernel_cases.build(case)
        for _ in range(3):
            computation.forward()
        assert len(got) == len({id(edges) for edges in got}) == (3 if fresh else 1)
        assert all(torch.equal(edges, kernel_cases.draw(case).edge_index) for edges in got)

    def test_power_law(self):
        """The busiest node of N has E / sqrt(N) edges, the busiest quarter half of all."""
        shape = replace(kernel_cases.SHAPES["products"][0], nodes=10_000, edges=300_000)
        edges = kernel_cases.draw_edges(shape)
        assert (edges[0] != edges[1]).all()
        assert torch.equal(edges, kernel_cases.draw_edges(shape))
        for ends in edges:
            degree = ends.bincount(minlength=shape.nodes)
            assert degree.numel() == shape.nodes
            assert 2_800 < degree.max() < 3_200
            assert 0.5 <= degree.sort(descending=True).values[:2_500].sum() / shape.edges < 0.52
        busiest = [ends.bincount().argmax().item() for ends in edges]
        assert busiest[0] == busiest[1] > 0

    def test_photo(self, load):
        load("photo")
        (shape,) = benchmark("--shapes", "photo").find_shapes()
        assert (shape.nodes, shape.edges) == (7_650, 238_162)
        assert kernel_cases.draw_edges(shape).shape == (2, 238_162)

    def test_missing_data_are_named(self, monkeypatch, tmp_path):
        monkeypatch.setenv("GATTN_DATA", str(tmp_path))
        monkeypatch.setattr("socket.getaddrinfo", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("offline")))
        some = benchmark("--shapes", "cora", "photo")
        assert some.find_shapes() == [*kernel_cases.SHAPES["cora"]]
        assert "photo is not under" in some.skipped["photo"]


class TestReference:
    def test_chunks_hold_all_edges_and_part_no_target(self):
        target = torch.tensor([3, 0, 3, 1, 3, 2, 0])
        parts = list(kernel_cases.chunks(target, 2))
        assert sorted(torch.cat(parts).tolist()) == list(range(7))
        assert [sorted(set(target[part].tolist())) for part in parts] == [[0], [1, 2], [3]]

    @pytest.mark.parametrize("layer", kernel_cases.CONVS)
    def test_in_parts_or_whole_it_is_the_same(self, layer, monkeypatch):
        case = replace(CASE, layer=layer)
        inputs = kernel_cases.draw(case)
        monkeypatch.setattr(kernel_cases.chunks, "__defaults__", (20,))
        parts = kernel_cases.reference(case, inputs, torch.float64)
        inputs.tensors = {name: tensor.double().requires_grad_() for name, tensor in inputs.tensors.items()}
        tensors = inputs.tensors
        value = tensors.get("value", tensors["key"])
        score = kernel_cases.score_of(case, tensors.get("vector"))
        graph = gattn.SparseGraph(inputs.edge_index, num_sources=TINY.nodes, num_targets=TINY.nodes)
        out = gattn.attend(tensors["query"], tensors["key"], value, graph, score=score, backend="reference")
        torch.testing.assert_close(parts["output"], out)
        grads = torch.autograd.grad(out, list(tensors.values()), inputs.grad.double())
        for name, grad in zip(tensors, grads, strict=True):
            torch.testing.assert_close(parts[f"gradient of {name}"], grad)

    @pytest.mark.parametrize("layer", kernel_cases.CONVS)
    @pytest.mark.parametrize(
        ("part", "edge_features", "peer"),
        [
            *((*task, peer) for task in TASKS for peer in ("gattn", "pyg", "pyg-sorted")),
            ("attention", False, "gattn-custom"),
        ],
    )
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

    @pytest.mark.parametrize("layer", kernel_cases.CONVS)
    @pytest.mark.parametrize("edge_features", [False, True])
    @pytest.mark.parametrize("peer", ["gattn", "pyg", "pyg-sorted"])
    def test_some_nodes_are_targets(self, layer, edge_features, peer, tmp_path):
        shape = replace(TARGETS, in_channels=5)
        case = replace(CASE, shape=shape, layer=layer, part="layer", edge_features=edge_features, peer=peer)
        row = measured(case, tmp_path)
        assert row["outcome"] == "ok", row["reason"]
        assert kernel_cases.build(case).forward().shape == (10, 6)

    @pytest.mark.parametrize("layer", kernel_cases.CONVS)
    @pytest.mark.parametrize("part", ["attention", "layer"])
    def test_half_precision(self, layer, part, tmp_path):
        row = measured(replace(CASE, layer=layer, part=part, dtype="bfloat16"), tmp_path)
        assert row["outcome"] == "ok", row["reason"]
        assert 1e-5 < row["errors"]["output"]["error"] < 0.05

    def test_large_graphs_are_compared_at_random_rows_and_the_hub(self, monkeypatch):
        monkeypatch.setattr(kernel_cases, "CHECKED_ROWS", 5)
        expected = replace(CASE, shape=replace(TINY, hub=29)).references()[""]
        assert expected["output"]["exact"].shape == (6, 2, 3)
        assert expected["gradient of key"]["rows"].tolist() == expected["output"]["rows"].tolist()
        assert expected["output"]["rows"][-1] == 29

    @pytest.mark.parametrize("layer", kernel_cases.CONVS)
    @pytest.mark.parametrize("part", ["attention", "layer"])
    def test_of_large_graphs_only_compared_rows_are_kept(self, part, layer, monkeypatch, tmp_path):
        monkeypatch.setattr(kernel_cases, "CHECKED_ROWS", 2)
        monkeypatch.setattr(kernel_cases.chunks, "__defaults__", (20,))
        case = replace(CASE, part=part, layer=layer)
        whole = kernel_cases.reference(case, kernel_cases.draw(case), torch.float64)
        monkeypatch.setattr(kernel_cases, "SAMPLED_NODES", 29)
        row = measured(case, tmp_path)
        assert row["outcome"] == "ok", row["reason"]
        expected = torch.load(tmp_path / "reference.pt")[""]
        assert whole.keys() == expected.keys()
        for name, truth in expected.items():
            rows = truth["rows"]
            assert (rows is None) == (name not in measuring.ROW_RESULTS)
            torch.testing.assert_close(truth["exact"], whole[name] if rows is None else whole[name][rows])
        rows = expected["output"]["rows"]
        assert rows.numel() == 4  # two at random, and the ends with the most edges
        assert {int(ends.bincount().argmax()) for ends in kernel_cases.draw(case).all_edges} <= set(rows.tolist())

    @pytest.mark.parametrize("fresh", [False, True])
    @pytest.mark.parametrize("layer", kernel_cases.CONVS)
    def test_dgl(self, layer, fresh, monkeypatch, tmp_path):
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
        threads = []
        utils = SimpleNamespace(set_num_threads=threads.append)
        monkeypatch.setitem(sys.modules, "dgl", SimpleNamespace(graph=make, ops=ops, utils=utils))
        row = measured(replace(CASE, shape=replace(TINY, fresh=fresh), layer=layer, peer="dgl"), tmp_path)
        assert row["outcome"] == "ok", row["reason"]
        assert set(threads) == {1}

    def test_dgl_without_the_part_that_does_not_load(self, monkeypatch, tmp_path):
        """A package with DGL's imports."""
        for name, text in {
            "": "from . import dataloading, distributed\n",
            "dataloading": "from ..distributed import DistDataLoader, DistGraph\n",
            "distributed": "raise ImportError('for another PyTorch')\n",
        }.items():
            folder = tmp_path / "dgl" / name
            folder.mkdir()
            (folder / "__init__.py").write_text(text)
        for name in ("dgl", "dgl.dataloading", "dgl.distributed"):
            monkeypatch.setitem(sys.modules, name, None)  # so that they are as they were in the end
            del sys.modules[name]
        monkeypatch.syspath_prepend(tmp_path)
        some = benchmark("--peers", "dgl")
        assert some.find_peers() == ["dgl"]
        assert some.skipped == {}


class TestPyG:
    def test_sorted_edges_stay_sorted(self, monkeypatch):
        """PyG's layers would lose the order if they added self-loops; its own code for sorted edges is called."""
        called, sums = [], torch._segment_reduce
        monkeypatch.setattr(torch, "_segment_reduce", lambda *args, **kw: called.append(1) or sums(*args, **kw))
        for part in ("attention", "layer"):
            kernel_cases.build(replace(CASE, part=part, peer="pyg")).forward()
            assert not called
            kernel_cases.build(replace(CASE, part=part, peer="pyg-sorted")).forward()
            assert called
            called.clear()

    def test_scatter_only_where_it_is_named(self, monkeypatch):
        monkeypatch.setattr("torch_geometric.typing.WITH_TORCH_SCATTER", True)
        for peer in PYG:
            pyg_peers.prepare(peer)
            assert (peer in ("pyg-scatter", "pyg-sorted-scatter")) == torch_geometric.typing.WITH_TORCH_SCATTER

    def test_until_nothing_compiles(self, monkeypatch):
        """The third round compiles nothing any more."""
        from torch._dynamo.utils import counters

        calls = []

        def call():
            calls.append(1)
            counters["stats"]["unique_graphs"] += len(calls) in (1, 3)
            return torch.ones(())

        pyg_peers.settle(measuring.Computation(call, {}, torch.ones(())))
        assert len(calls) == 6

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("peer", "part"),
        [
            *itertools.product(("pyg-compile", "pyg-sorted-compile", *kernel_cases.GPU_PEERS[:2]), ["attention"]),
            ("gattn-compile-replayed", "layer"),
        ],
    )
    def test_compiled(self, peer, part, tmp_path):
        row = measured(replace(CASE, peer=peer, part=part), tmp_path)
        assert row["outcome"] == "ok", row["reason"]


class TestPeersOnGPUs:
    def test_results_are_kept_when_the_next_call_overwrites_them(self):
        memory, calls = torch.zeros(1), iter(range(1, 9))
        computation = kernel_cases.Replayed(lambda: memory.fill_(next(calls)), {}, torch.ones(1))
        results = computation.compared(computation.forward_backward())
        assert {name: x.item() for name, x in results.items()} == {"output": 1, "output without autograd": 2}

    @pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
    @pytest.mark.parametrize("fresh", [False, True])
    def test_flex_attention_sees_the_edges(self, fresh):
        """Graphs side by side leave blocks empty; some pairs have several edges."""
        shape = kernel_cases.Shape("", 400, 8_000, 2, 4, graphs=4, fresh=fresh)
        case = replace(CASE, shape=shape, layer="transformer", peer="flex")
        inputs = kernel_cases.draw(case)
        results = {"output": kernel_cases.build_flex(case, inputs).forward()}
        (error,) = measuring.check(results, {"output": case.references()[""]["output"]}).values()
        assert error["error"] <= error["budget"]
        pairs, _ = kernel_cases.flex_graph(inputs.all_edges, shape.nodes)
        is_used = torch.zeros(4, 4, dtype=torch.int32)
        is_used[tuple(inputs.all_edges.flip(0) // 128)] = 1
        assert torch.equal(pairs.to_dense()[0, 0], is_used)
        assert 0 < is_used.sum() < 16

    def test_flex_attention_of_too_many_pairs(self, monkeypatch):
        monkeypatch.setattr(kernel_cases, "FLEX_PAIRS", 2**15)
        with pytest.raises(ValueError, match="edges are in 4 blocks of 128 × 128 pairs"):
            kernel_cases.flex_graph(torch.tensor([[0, 0, 130, 130], [0, 130, 0, 130]]), 200)


class TestContradictions:
    def test_a_part_that_takes_longer_than_the_whole(self, tiny, tmp_path, monkeypatch, contradictions):
        """The rows are written, but no table; another case of the same peer is no whole of it."""

        def slow(case, reference):
            times = measuring.spread([{"attention": 2.0, "layer": 1.0, "gather": 0.1}[case.part]])
            row = {"outcome": "ok", "reason": "", "peak_bytes": 1, "forward": times}
            return row if case.part == "gather" else {**row, "forward_backward": times}

        monkeypatch.setattr(kernel_cases.Case, "measure", slow)
        monkeypatch.setattr(measuring.Measurement, "contradictions", contradictions)
        with pytest.raises(SystemExit) as exit_info:
            Kernels.main(arguments(tmp_path, "--layers", "gat", "--peers", "gattn"))
        first, second, last = exit_info.value.code.splitlines()
        whole = "longer than tiny layer gat float32 gattn, forward with 1000 ms"
        assert first == f"error: tiny attention gat float32 gattn, forward takes 2000 ms, {whole}"
        assert "forward + backward takes 2000 ms" in second
        assert "--only" in last
        assert len(ResultsFile(tmp_path / "runs.jsonl").rows()) == 4
        assert not (tmp_path / "table.md").exists()

    def test_noise_is_none(self, contradictions):
        """A median that is hardly above the whole's quartiles."""
        whole = replace(CASE, part="layer")
        rows = {CASE: row_of(CASE, 0.14), whole: row_of(whole, 0.1)}
        for mode in measuring.MODES:
            rows[whole][mode] = {**rows[whole][mode], "q3": 0.12}
        assert contradictions(rows) == []
        rows[CASE]["forward"] = {**rows[CASE]["forward"], "median": 0.2}
        assert [text.split(" takes")[0] for text in contradictions(rows)] == [
            "tiny attention gat float32 gattn, forward",
            "tiny attention gat float32 gattn, forward",
        ]


class TestWrongResults:
    @pytest.mark.parametrize("factor", [1.01, float("nan")])
    def test_no_time_is_given(self, monkeypatch, tmp_path, factor):
        torch.save(CASE.references(), tmp_path / "reference.pt")
        attend = gattn.attend
        monkeypatch.setattr(gattn, "attend", lambda *args, **kwargs: attend(*args, **kwargs) * factor)
        row = CASE.measure(tmp_path / "reference.pt")
        assert set(row) == {"outcome", "reason"}
        assert row["outcome"] == "WRONG"
        assert "is off by" in row["reason"]

    def test_one_percent_is_caught_in_each_result(self):
        expected, computation = CASE.references()[""], kernel_cases.build(CASE)
        results = computation.compared(computation.forward_backward())
        for name in (None, *expected):
            changed = {other: x * 1.01 if other == name else x for other, x in results.items()}
            errors = measuring.check(changed, expected)
            assert [x for x, entry in errors.items() if entry["error"] > entry["budget"]] == [name] * (name is not None)


class TestOnAGpu:
    case = replace(CASE, device="cuda")

    @pytest.mark.parametrize("part", ["attention", "layer", "gather"])
    def test_measured(self, part, monkeypatch, tmp_path):
        """After a first call on the same graph, which tunes the kernels."""
        moved, places = [], []
        monkeypatch.setattr(
            kernel_cases.Inputs, "to", lambda self, device: moved.append((device, len(self.grad))) or self
        )
        monkeypatch.setattr(kernel_cases, "BACKENDS", {"cuda": "reference"})
        monkeypatch.setattr(measuring, "copy_rate", lambda device: 7.0)
        monkeypatch.setattr(measuring, "operation_rate", lambda device: 9.0)
        monkeypatch.setattr(measuring, "peak_above", lambda function, device: places.append(device) or (function(), 5))
        monkeypatch.setattr(measuring, "timed", lambda *args: places.append(args[-1]) or measuring.spread([0.5]))
        case, path = replace(self.case, part=part), None
        if part != "gather":
            path = tmp_path / "reference.pt"
            torch.save(case.references(), path)
        row = case.measure(path)
        assert row["outcome"] == "ok", row["reason"]
        assert moved == [("cuda", 30)] * 2
        assert set(places) == {"cuda"}
        assert row["peak_bytes"] == 5
        rates = row.get("copy_rate"), row.get("operation_rate")
        assert rates == ((7.0, 9.0) if part == "gather" else (None, None))

    @pytest.mark.parametrize("part", ["attention", "layer"])
    def test_by_its_own_backend(self, part, monkeypatch):
        monkeypatch.setattr(kernel_cases.Inputs, "to", lambda self, device: self)
        monkeypatch.setattr(kernel_cases, "BACKENDS", {"cpu": "cpu", "cuda": "other"})
        with pytest.raises(ValueError, match="unknown backend 'other'"):
            kernel_cases.build(replace(self.case, part=part)).forward()

    def test_inputs_are_moved(self):
        """To another type of device that every machine has."""
        for part, has_features in TASKS:
            inputs = kernel_cases.draw(replace(self.case, part=part, edge_features=has_features)).to("meta")
            tensors = [inputs.edge_index, inputs.grad, *inputs.tensors.values()]
            tensors += [inputs.edge_attr] if has_features else []
            tensors += inputs.layer.parameters() if part == "layer" else []
            assert {tensor.device.type for tensor in tensors} == {"meta"}
            assert inputs.all_edges.device.type == "cpu"

    def test_without_one_a_line_says_so(self, monkeypatch, capsys, tmp_path):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(SystemExit) as exit_info:
            Kernels.main(["--device", "cuda", "--out", str(tmp_path / "out")])
        assert exit_info.value.code == 2
        assert capsys.readouterr().err == "error: --device cuda needs a GPU that PyTorch can use, but there is none\n"
        assert not (tmp_path / "out").exists()

    def test_the_plan(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(Kernels, "find_shapes", lambda self: self.options.shapes)
        gpu = benchmark("--device", "cuda", "--peers", "gattn")
        assert [shape.name for shape in gpu.options.shapes][-2:] == ["sampled", "products"]
        assert {(case.device, case.allocator) for case in gpu.cases()} == {("cuda", "default")}
        assert [shape.name for shape in Kernels.parse(["--shapes", "products"]).shapes] == ["products"]
        usual = benchmark("--device", "cuda", "--shapes", "mid")
        assert set(kernel_cases.GPU_PEERS) < set(usual.options.peers)
        cases = [case for case in usual.cases() if case.part == "attention"]
        assert {case.dtype for case in cases} == {"float32", "bfloat16", "float16"}
        assert {case.layer for case in cases if case.peer == "flex-compile"} == {"transformer"}

    def test_shares_of_a_copy(self, monkeypatch, tmp_path, capsys):
        gather = replace(self.case, part="gather", layer="", peer="embedding_bag")
        half = replace(self.case, dtype="bfloat16")
        cases = [gather, self.case, half, replace(self.case, peer="pyg")]
        rows = [row_of(case, device="cuda", driver="5.5") for case in cases]
        rows[0]["copy_rate"] = 1e5
        reported = dict(zip(cases, rows, strict=True))
        lines = [kernel_reports.Report(reported).memory(case, row) for case, row in reported.items()]
        assert [line["forward, of a copy's"] for line in lines] == ["49%", "49%", "30%", "–"]
        assert lines[1]["forward + backward, of a copy's"] == "119%"
        write(reported, tmp_path)
        assert "this machine's GPU" in capsys.readouterr().out
        table = (tmp_path / "memory.md").read_text()
        assert "driver 5.5" in table
        assert "memory that PyTorch has allocated" in table
        assert "(0 GB/s)" in table


class TestResuming:
    def test_nothing_is_measured_twice(self, tiny, tmp_path, capsys, monkeypatch):
        Kernels.main(arguments(tmp_path, "--layers", "gat"))
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        assert len(before["runs.jsonl"].splitlines()) == 1 + 3 * 2
        monkeypatch.setattr(kernel_cases.Case, "measure", lambda *args: pytest.fail("measured again"))
        Kernels.main(arguments(tmp_path, "--layers", "gat"))
        assert "7 of 7 measurements are in" in capsys.readouterr().out
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

    def test_rows_from_before_there_were_devices_count(self):
        row = row_of(CASE)
        del row["device"], row["allocator"]
        for name in ("graphs", "power_law", "in_channels", "targets", "fresh"):
            del row["shape"][name]
        assert CASE.key_of(row) == CASE.key()
        assert CASE.key_of(row_of(replace(CASE, device="cuda"))) != CASE.key()
        assert CASE.key_of(row_of(replace(CASE, allocator="kept"))) != CASE.key()


def allocate(allocator, show):
    """Page faults per call that allocates 64 MB, once the process has enough memory to keep."""
    for _ in range(30):
        torch.ones(2**24)
    return measuring.timed(lambda: torch.ones(2**24), 10, 1.0)["page_faults"]


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="is about glibc")
def test_a_process_keeps_memory():
    faults = {}
    for name in ALLOCATORS:
        environment = replace(CASE, allocator=name).environment
        ((_, outcome, faults[name]),) = in_processes([name], allocate, environment=environment)
        assert outcome == "ok", faults[name]
    assert faults["default"] > 20  # huge pages need one for 2 MB
    assert faults["kept"] < 0.05 * faults["default"]


@pytest.mark.slow
def test_in_processes(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(kernels, "SHAPES", {**kernel_cases.SHAPES, "cora": (TINY,)})
    Kernels.main(arguments(tmp_path, "--layers", "gatv2", "--edge-features", "without"))
    assert [row["outcome"] for row in ResultsFile(tmp_path / "runs.jsonl").rows()] == ["ok"] * 5
    assert "tiny" in capsys.readouterr().out


def write(rows, out, **skipped):
    """Reports rows."""
    some = Kernels(Kernels.parse(["--out", str(out)]), None, Console(markup=False, width=200))
    some.skipped = skipped
    some.report(rows)


class TestReport:
    def report(self):
        """PyG takes ten times as long and five times the memory; compiled it runs out of memory."""
        gather = replace(CASE, part="gather", layer="", peer="embedding_bag")
        cases = [gather, *(replace(CASE, peer=peer) for peer in ("gattn", "pyg", "pyg-compile"))]
        rows = [row_of(gather, 0.05), row_of(cases[1]), row_of(cases[2], 1.0, peak_bytes=5 * 10**7)]
        rows.append({**asdict(cases[3]), "outcome": "out of memory", "reason": "killed", **machine()})
        return dict(zip(cases, rows, strict=True))

    def test_ratios(self):
        for mode, title in measuring.MODES.items():
            _, ours, eager, compiled = kernel_reports.Report(self.report()).lines(mode)
            assert ours["× PyG eager, default allocator"] == ours["× PyG's best, default allocator"] == "10.0×"
            assert ours["× PyG compiled, default allocator"] == "–"
            assert ours["gathers, default allocator"] == "2.0"
            assert eager["× PyG eager, default allocator"] == "1.0×"
            assert compiled[f"{title}, ms, default allocator"] == "out of memory"

    def test_the_best_of_pyg(self):
        """Whichever form that is."""
        rows = self.report()
        best = replace(CASE, peer="pyg-sorted")
        _, ours, *_ = kernel_reports.Report({**rows, best: row_of(best, 0.25)}).lines("forward")
        assert ours["× PyG's best, default allocator"] == "2.5×"
        assert ours["× PyG eager, default allocator"] == "10.0×"

    def test_memory(self):
        report = kernel_reports.Report(self.report())
        _, ours, eager, compiled = (report.memory(case, row) for case, row in report.rows.items())
        assert ours["memory, PyG's ÷"] == "5.0×"
        assert ours["forward, page faults"] == ours["forward, system, ms"] == "–"  # as in older rows
        assert eager["forward, GB/s"] == compiled["peak, MB"] == "–"
        ours = report.rows[CASE]
        ours["forward"] = {**ours["forward"], "page_faults": 1234.56, "system": 0.00125}
        line = report.memory(CASE, ours)
        assert (line["forward, page faults"], line["forward, system, ms"]) == ("1234.6", "1.250")

    def test_allocators_side_by_side(self, tmp_path, capsys):
        """With memory kept, PyG takes half the time, gattn as much as before, and compiled PyG was not measured."""
        rows = self.report()
        kept = {case: replace(case, allocator="kept") for case in rows if case.peer != "pyg-compile"}
        rows |= {case: row_of(case, 0.5 if case.peer == "pyg" else 0.1) for case in kept.values()}
        rows |= {kept[CASE]: row_of(kept[CASE], peak_bytes=2 * 10**7)}
        report = kernel_reports.Report(rows)
        gather, ours, eager, compiled = report.lines("forward")
        assert [name for name in ours if "×" in name] == [  # the claim comes first
            f"× {name}, {side}"
            for side in ("memory kept", "default allocator")
            for name in ("PyG compiled", "PyG eager", "PyG's best")
        ]
        assert (ours["× PyG eager, default allocator"], ours["× PyG eager, memory kept"]) == ("10.0×", "5.0×")
        assert ours["gathers, memory kept"] == "1.0"
        assert eager["× PyG eager, memory kept"] == "1.0×"
        assert eager["forward, ms, memory kept"] == "500 (500–500)"
        assert gather["forward, ms, memory kept"] == "100 (100–100)"
        assert compiled["forward, ms, memory kept"] == compiled["× PyG eager, memory kept"] == "–"
        line = report.memory(kept[CASE], rows[kept[CASE]])
        assert (line["allocator"], line["memory, PyG's ÷"]) == ("kept", "0.5×")
        figure = kernel_reports.draw_speedup(report)
        assert [text.get_text() for text in figure.axes[0].texts] == ["10× / 5×"]
        points = {line.get_xdata()[0]: line.get_markerfacecolor() for line in figure.axes[0].lines[:-1]}
        assert (points[10.0], points[5.0]) == (kernel_reports.COLOURS["gattn"], "white")
        for axis in figure.axes:  # a line that holds no point is left out
            assert len(axis.get_yticks()) == len(axis.texts)
        write(rows, tmp_path)
        assert "fwd+bwd, ms, kept" in capsys.readouterr().out
        assert "MALLOC_TOP_PAD_=268435456" in (tmp_path / "table.md").read_text()
        assert "| gattn | kept |" in (tmp_path / "memory.md").read_text()

    def test_the_legend_of_all_peers_is_inside_the_picture(self):
        peers = sorted({"pyg", *kernel_reports.COLOURS})
        cases = [replace(CASE, peer=peer, allocator=x) for peer in peers for x in ("default", "kept")]
        figure = kernel_reports.draw_speedup(kernel_reports.Report({case: row_of(case) for case in cases}))
        figure.canvas.draw()
        legend = figure.legends[0]
        assert len(legend.texts) == 2 * len(kernel_reports.COLOURS)
        box = legend.get_window_extent()
        assert min(box.x0, box.y0) >= 0
        assert box.x1 <= figure.bbox.x1

    def test_bytes(self):
        """130 edges with loops, 30 nodes, rows of 24 bytes, indices of 8."""
        assert kernel_reports.bytes_moved(CASE, "forward") == 130 * (24 + 8) + 30 * 24
        assert kernel_reports.bytes_moved(CASE, "forward_backward") == 130 * (2 * 24 + 2 * 8) + 30 * 5 * 24
        transformer = replace(CASE, layer="transformer", dtype="bfloat16")
        assert kernel_reports.bytes_moved(transformer, "forward") == 130 * (2 * 12 + 8) + 30 * 2 * 12

    def test_operations(self):
        """On 130 edges of 6 channels: sums of rows alone, or with products and, backward, two gradients of each."""
        assert kernel_reports.operations(replace(CASE, part="gather"), "forward") == 130 * 6
        assert kernel_reports.operations(CASE, "forward") == 130 * 6 * 2
        assert kernel_reports.operations(CASE, "forward_backward") == 130 * 6 * 6

    def test_roofline(self):
        gather = replace(CASE, part="gather", layer="", peer="embedding_bag")
        rows = {gather: {**row_of(gather), "copy_rate": 2e9, "operation_rate": 8e9}, CASE: row_of(CASE)}
        figure = kernel_reports.draw_roofline(kernel_reports.Report(rows))
        *points, roof = figure.axes[0].lines
        assert len(points) == 3
        for point, mode in zip(points[1:], ("forward", "forward_backward"), strict=True):
            work, seconds = kernel_reports.operations(CASE, mode), rows[CASE][mode]["median"]
            expected = work / kernel_reports.bytes_moved(CASE, mode), work / seconds / 1e9
            assert [point.get_xdata()[0], point.get_ydata()[0]] == pytest.approx(expected)
        x, y = roof.get_data()
        assert list(y) == pytest.approx([min(2 * place, 8.0) for place in x])
        assert max(y) < 8.0 or 4.0 in x

    def test_written(self, tmp_path, capsys):
        write(self.report(), tmp_path, dgl="not installed")
        for text in (capsys.readouterr().out, (tmp_path / "table.md").read_text()):
            assert "dgl: not installed" in text
            assert "tiny attention gat float32 pyg-compile: out of memory: killed" in text
            assert f"torch {version('torch')}" in text
        assert 5_000 < (tmp_path / "speedup.png").stat().st_size < 100_000

    def test_where_pyg_has_no_time_the_picture_says_why(self):
        case = replace(CASE, peer="pyg")
        row = {**asdict(case), "outcome": "out of memory", "reason": "killed", **machine()}
        figure = kernel_reports.draw_speedup(kernel_reports.Report({CASE: row_of(CASE), case: row}))
        assert [text.get_text() for text in figure.axes[0].texts] == ["PyG: out of memory"]

    def test_hubs_and_half_precision_have_their_ratios(self):
        plain = replace(CASE, shape=kernel_cases.SHAPES["arxiv"][0])
        hub, half = replace(plain, shape=kernel_cases.SHAPES["hub"][0]), replace(plain, dtype="bfloat16")
        rows = [row_of(plain, 0.3), row_of(hub, 0.33), row_of(half, 0.2)]
        remarks = kernel_reports.Report(dict(zip([plain, hub, half], rows, strict=True))).remarks()
        assert remarks == [
            "hub first attention gat float32 gattn: forward + backward takes 1.10× the time of the plain graph.",
            "arxiv attention gat bfloat16 gattn: forward is 1.50× as fast as in float32.",
        ]


class TestCommandLine:
    def test_results(self, tiny, tmp_path, capsys):
        Kernels.main(arguments(tmp_path, "--layers", "gatv2", "--dtypes", "float32", "bfloat16"))
        rows = ResultsFile(tmp_path / "runs.jsonl").rows()
        assert len(rows) == 2 + 3 * 3
        assert {row["dtype"] for row in rows if row["part"] == "gather"} == {"float32", "bfloat16"}
        assert {row["outcome"] for row in rows} == {"ok"}
        assert {row["peer"] for row in rows if row["dtype"] == "bfloat16"} == {"gattn", "embedding_bag"}
        table = (tmp_path / "table.md").read_text()
        assert "| tiny | layer | gatv2 + edge features | float32 | pyg |" in table
        assert "as fast as in float32" in table
        assert "gatv2 + edges" in capsys.readouterr().out

    def test_the_plan(self, monkeypatch):
        monkeypatch.setattr(Kernels, "find_peers", lambda self: ["gattn", "pyg", "dgl"])
        named = ["--peers", "gattn", "pyg", "dgl"]
        some = benchmark("--shapes", "hub", "cora", "--layers", "gat", "--allocator", "default", *named)
        tasks = [(case.shape.name, case.part, case.edge_features, case.peer) for case in some.cases()]
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

    def test_what_is_usual(self, monkeypatch):
        """What takes long is left out where it tells little, unless it is named."""
        monkeypatch.setattr(Kernels, "find_peers", lambda self: ["gattn", "pyg", "pyg-sorted"])
        found = benchmark().cases()
        sides = {case.allocator for case in found if case.peer == "pyg-sorted"}
        assert sides == {"kept"}
        assert {case.layer for case in found if (case.shape.name, case.peer) == ("arxiv", "pyg")} == {"gat"}
        halves = {(case.shape.name, case.part, case.peer) for case in found if case.dtype == "bfloat16"}
        assert halves == {("mid", "attention", "gattn"), ("mid", "gather", "embedding_bag")}
        assert any(case.edge_features and case.peer == "pyg-sorted" for case in benchmark("--peers", "pyg").cases())
        assert {case.part for case in benchmark("--parts", "layer").cases()} == {"gather", "layer"}

    def test_peers_follow_each_other_under_each_allocator(self, monkeypatch):
        monkeypatch.setattr(Kernels, "find_peers", lambda self: ["gattn", "pyg"])
        some = benchmark("--shapes", "sampled", "tiny", "--layers", "gat", "--edge-features", "without")
        assert [(case.shape.name, case.part, case.allocator, case.peer) for case in some.cases()] == [
            ("sampled", "gather", "default", "embedding_bag"),
            ("sampled", "gather", "kept", "embedding_bag"),
            ("sampled", "layer", "default", "gattn"),
            ("sampled", "layer", "default", "pyg"),
            ("sampled", "layer", "kept", "gattn"),
            ("sampled", "layer", "kept", "pyg"),
            ("tiny", "gather", "default", "embedding_bag"),
            ("tiny", "gather", "kept", "embedding_bag"),
            ("tiny", "attention", "default", "gattn"),
            ("tiny", "attention", "default", "pyg"),
            ("tiny", "attention", "kept", "gattn"),
            ("tiny", "attention", "kept", "pyg"),
            ("tiny", "layer", "default", "gattn"),
            ("tiny", "layer", "default", "pyg"),
            ("tiny", "layer", "kept", "gattn"),
            ("tiny", "layer", "kept", "pyg"),
        ]

    def test_allocators(self, monkeypatch, capsys):
        assert Kernels.parse([]).allocator == "both"
        assert Kernels.parse(["--quick"]).allocator == "default"
        assert Kernels.parse(["--quick", "--allocator", "kept"]).allocator == "kept"
        (case, *_) = benchmark("--shapes", "cora", "--peers", "gattn", "--allocator", "kept").cases()
        assert case.environment["MALLOC_TOP_PAD_"] == "268435456"
        assert str(case).endswith(", kept memory")
        monkeypatch.setattr(kernels.platform, "libc_ver", lambda: ("", ""))
        assert Kernels.parse([]).allocator == "default"
        with pytest.raises(SystemExit):
            Kernels.parse(["--allocator", "both"])
        assert "--allocator both works only on the CPU, if the C library is glibc" in capsys.readouterr().err

    def test_quick_gives_defaults_only(self):
        quick = Kernels.parse(["--quick"])
        assert [shape.name for shape in quick.shapes] == ["cora", "small"]
        assert "pyg-compile" not in quick.peers
        chosen = Kernels.parse(["--quick", "--shapes", "mid", "--peers", "pyg-compile", "--repeats", "7"])
        assert [shape.name for shape in chosen.shapes] == ["mid"]
        assert chosen.peers == ["pyg-compile"]
        assert chosen.repeats == 7
        assert [shape.name for shape in Kernels.parse([]).shapes] == ["mid", "arxiv"]

    def test_peers_that_are_not_there(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "torch_scatter", SimpleNamespace())
        monkeypatch.setattr(sys, "path", [])
        monkeypatch.delitem(sys.modules, "dgl", raising=False)
        some = benchmark()
        assert some.find_peers() == ["gattn", *PYG, "gattn-custom"]
        assert some.skipped == {"dgl": "not installed"}

    def test_no_peer_at_all(self, monkeypatch, tmp_path):
        monkeypatch.setitem(sys.modules, "dgl", None)
        with pytest.raises(SystemExit, match="error: nothing can be measured: dgl: "):
            Kernels.main(["--peers", "dgl", "--out", str(tmp_path)])

    @pytest.mark.parametrize(
        "wrong",
        [
            ["--repeats", "0"],
            ["--shapes", "big"],
            ["--layers", "gcn"],
            ["--peers", "jraph"],
            ["--dtypes", "int8"],
            ["--threads", "-1"],
            ["--seconds", "0"],
            ["--timeout", "nan"],
            ["--device", "tpu"],
            ["--allocator", "jemalloc"],
            ["--threads", "9999999999"],
            ["--seconds", "inf"],
            ["--timeout", "1e10"],
            ["--shapes", "hub", "--edge-features", "with"],
        ],
    )
    def test_wrong_arguments(self, wrong, capsys):
        with pytest.raises(SystemExit):
            Kernels.main(wrong)
        assert "error:" in capsys.readouterr().err
