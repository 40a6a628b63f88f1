"""The counting sort against plain PyTorch."""

import gc
import os
import signal
import threading
import time
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.utils import add_self_loops, remove_self_loops

from gattn import AdditiveScore, SparseGraph, attend, nn
from gattn.graphs import edge_lists
from gattn.ops.backends.cpu import native
from gattn.ops.backends.cpu.layout import Layout, layout_of
from gattn.testing import random_edge_index
from tests.ops.fuzz import LONG_ROW, threads

FLOWS = edge_lists.FLOWS


def check_tasks(table, num_rows):
    """Every row and every edge belongs to one task; long rows are cut into consecutive slots."""
    rows = table.rows
    start = table.part(rows.start, num_rows + 1).tolist()
    row = edge = slot = 0
    split = {}
    for first_row, last_row, first_edge, last_edge, task_slot in (
        table.part(rows.tasks, 5 * rows.num_tasks).view(-1, 5).tolist()
    ):
        assert first_edge == edge < max(last_edge, edge + 1)
        if task_slot < 0:
            assert (first_row, last_edge) == (row, start[last_row])
            assert all(start[r + 1] - start[r] <= LONG_ROW for r in range(first_row, last_row))
        else:
            assert task_slot == slot
            assert last_row == first_row + 1 == row + 1
            assert start[row] <= first_edge < last_edge <= start[row + 1]
            assert last_edge - first_edge <= LONG_ROW
            split.setdefault(first_row, []).append(slot)
            slot += 1
        edge = last_edge
        row = last_row if task_slot < 0 or edge == start[last_row] else row
    assert (row, edge, slot) == (num_rows, start[-1], rows.num_slots)
    assert table.part(rows.split_row, rows.num_split).tolist() == list(split)
    firsts = [*(slots[0] for slots in split.values()), rows.num_slots]
    assert table.part(rows.split, rows.num_split + 1).tolist() == firsts
    assert rows.split_row + 4 * rows.num_split <= table.address + 4 * len(table._memory)
    assert rows.tasks + 20 * rows.num_tasks <= rows.split
    assert all(start[r + 1] - start[r] > LONG_ROW for r in split)


def check(layout, edges, num_sources, num_targets):
    source, target = edges
    count = edges.size(1)
    order = target.argsort(stable=True)
    number = torch.arange(count)
    assert layout.num_edges == count
    start = torch.cat([torch.zeros(1, dtype=torch.long), torch.bincount(target, minlength=num_targets).cumsum(0)])
    table = layout.by_target
    assert torch.equal(table.part(table.rows.start, num_targets + 1), start.int())
    node = table.part(table.rows.node, count + native.PADDING)
    assert torch.equal(node, F.pad(source[order].int(), (0, native.PADDING)))
    assert torch.equal(number if layout.edge is None else table.part(layout.edge, count).long(), order)
    check_tasks(table, num_targets)

    by_source = source[order].argsort(stable=True)
    table = layout.by_source
    start = torch.cat([torch.zeros(1, dtype=torch.long), torch.bincount(source, minlength=num_sources).cumsum(0)])
    assert torch.equal(table.part(table.rows.start, num_sources + 1), start.int())
    for first, expected in (
        (table.rows.node, target[order][by_source]),
        (table.target_position, by_source),
        (table.source_position, by_source.argsort()),
    ):
        assert torch.equal(table.part(first, count + native.PADDING).long(), F.pad(expected, (0, native.PADDING)))
    check_tasks(table, num_sources)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("self_loops", [False, True])
@pytest.mark.parametrize(
    ("sources", "targets", "edges", "hub"),
    [
        (5, 5, 0, 0),
        (1, 1, 3, 0),
        (7, 3, 40, 0),
        (3, 7, 40, 0.5),
        (50, 50, 5000, 0),
        (9, 40, 2 * LONG_ROW + 5, 0.9),
        (40, 9, LONG_ROW + 1, 1.0),
        (2000, 2000, 300_000, 0.2),
    ],
)
def test_it_is_a_stable_sort(flow, self_loops, sources, targets, edges, hub):
    edge_index = random_edge_index(sources, targets, edges, hub=hub)
    expected = edge_index
    if self_loops:
        expected = add_self_loops(remove_self_loops(edge_index)[0], num_nodes=min(sources, targets))[0]
    given = edge_index if flow == FLOWS[0] else edge_index.flip(0)
    check(Layout(given, sources, targets, self_loops, flow), expected, sources, targets)


@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("degree", [31, 32, 33, LONG_ROW, LONG_ROW + 1, 3 * LONG_ROW + 1])
@pytest.mark.parametrize("hub", [0, 3])
def test_long_rows(end, degree, hub):
    edge_index = torch.randint(4, (2, degree + 10))
    edge_index[end] = hub
    edge_index[end, -10:] = (hub + 1) % 4
    check(Layout(edge_index, 4, 4, False, FLOWS[0]), edge_index, 4, 4)


@pytest.mark.parametrize("form", ["int32", "int16", "uint8", "columns", "transposed"])
def test_forms(form):
    edge_index = random_edge_index(9, 7, 60)
    given = {
        "columns": edge_index.repeat_interleave(2, 1)[:, ::2],
        "transposed": edge_index.t().contiguous().t(),
    }.get(form)
    given = edge_index.to(getattr(torch, form)) if given is None else given
    check(Layout(given, 9, 7, False, FLOWS[0]), edge_index, 9, 7)


def test_sorted_edges_need_no_numbers():
    edge_index = random_edge_index(9, 7, 60)
    edge_index = edge_index[:, edge_index[1].argsort(stable=True)]
    layout = Layout(edge_index, 9, 7, False, FLOWS[0])
    assert layout.edge is None
    check(layout, edge_index, 9, 7)
    assert Layout(edge_index.flip(1), 9, 7, False, FLOWS[0]).edge is not None


def test_edges_that_are_sorted_piece_by_piece():
    """Three pieces, each sorted, and the next one begins with smaller targets than the last one ended with."""
    edge_index = random_edge_index(9, 7, 210_000)
    edge_index[1] = edge_index[1].view(3, -1).sort().values.flatten()
    layout = Layout(edge_index, 9, 7, False, FLOWS[0])
    assert layout.edge is not None
    check(layout, edge_index, 9, 7)


@pytest.mark.parametrize(("sources", "targets"), [(0, 0), (0, 4), (4, 0)])
@pytest.mark.parametrize("self_loops", [False, True])
def test_no_nodes(sources, targets, self_loops):
    empty = torch.empty(2, 0, dtype=torch.long)
    check(Layout(empty, sources, targets, self_loops, FLOWS[0]), empty, sources, targets)


@pytest.mark.parametrize("shape", ["random", "sorted", "hub"])
def test_any_number_of_threads(shape):
    """As many edges as need several pieces."""
    nodes, edges = 3000, 500_000
    edge_index = random_edge_index(nodes, num_edges=edges, hub=0.3 if shape == "hub" else 0)
    if shape == "sorted":
        edge_index = edge_index[:, edge_index[1].argsort(stable=True)]
    for number in (1, 2, 3):
        with threads(number):
            check(Layout(edge_index, nodes, nodes, False, FLOWS[0]), edge_index, nodes, nodes)
            if number > 1:
                looped = add_self_loops(remove_self_loops(edge_index)[0], num_nodes=nodes)[0]
                check(Layout(edge_index, nodes, nodes, True, FLOWS[0]), looped, nodes, nodes)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("place", [0, 250_000, 499_999])
@pytest.mark.parametrize(("row", "index"), [(0, -1), (0, 100), (1, -(2**40)), (1, 2**40)])
def test_bad_indices_anywhere(number, place, row, index):
    edge_index = random_edge_index(100, num_edges=500_000)
    edge_index[row, place] = index
    with threads(number), pytest.raises(IndexError, match=f"{('source', 'target')[row]} index {index}"):
        Layout(edge_index, 100, 100, False, FLOWS[0])


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_edges_are_read_where_they_lie(dtype, flow):
    """No copy of them is made, which would be the largest tensor of all while it lasts."""

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.shape == edge_index.shape:
                made.add(result.data_ptr())
            return result

    edge_index, made = random_edge_index(7, 7, 60).to(dtype), set()
    with Copies():
        layout = Layout(edge_index, 7, 7, False, flow)
    assert made <= {edge_index.data_ptr()}
    check(layout, edge_index.long() if flow == FLOWS[0] else edge_index.long().flip(0), 7, 7)


def test_too_many_nodes():
    empty = torch.empty(2, 0, dtype=torch.long)
    with pytest.raises(ValueError, match="too many nodes or edges"):
        native.raise_for(
            native.library().gattn_rows_by_target(
                0, 0, 64, 1, 1, 0, 2**31, 4, 0, 1, *(torch.empty(100, dtype=torch.long).data_ptr() for _ in range(3))
            )
        )
    assert Layout(empty, 2**31 - 1 - native.PADDING, 4, False, FLOWS[0]).num_edges == 0


class TestCache:
    def test_one_layout_a_version(self):
        edge_index = random_edge_index(9, 7, 60)
        layout = layout_of(edge_index, 9, 7, False, FLOWS[0])
        assert layout_of(edge_index, 9, 7, False, FLOWS[0]) is layout
        assert layout_of(edge_index, 9, 8, False, FLOWS[0]) is not layout
        assert layout_of(edge_index, 9, 7, True, FLOWS[0]) is not layout
        edge_index[0, 0] = 8
        renewed = layout_of(edge_index, 9, 7, False, FLOWS[0])
        assert renewed is not layout
        check(renewed, edge_index, 9, 7)

    def test_it_dies_with_its_edges(self):
        gc.collect()
        before = len(edge_lists._cache)
        edge_index = random_edge_index(9, 7, 60)
        _ = layout_of(edge_index, 9, 7, False, FLOWS[0]).by_source
        assert len(edge_lists._cache) == before + 1
        del edge_index
        gc.collect()
        assert len(edge_lists._cache) == before


class TestKeeping:
    """What is derived from a tensor is kept as long as the tensor is what it was."""

    edits = {
        "other data": lambda index: setattr(index, "data", random_edge_index(9, 7, 30, seed=1)),
        "less data": lambda index: setattr(index, "data", random_edge_index(9, 7, 3)),
        "other strides": lambda index: setattr(index, "data", random_edge_index(9, 7, 30).t().contiguous().t()),
        "in place": lambda index: index.fill_(1),
        "a part, in place": lambda index: index[0, :2].fill_(1),
        "resized": lambda index: index.resize_(2, 5).fill_(2),
    }

    @pytest.mark.parametrize("edit", edits)
    def test_not_beyond_an_edit(self, edit):
        index = random_edge_index(9, 7, 30)
        first = layout_of(index, 9, 7, False, FLOWS[0])
        assert layout_of(index, 9, 7, False, FLOWS[0]) is first
        self.edits[edit](index)
        layout = layout_of(index, 9, 7, False, FLOWS[0])
        assert layout is not first
        check(layout, index, 9, 7)

    def test_not_where_the_memory_of_other_edges_was(self):
        """Memory that is given back is soon given out again: then even the address is the same."""
        index = random_edge_index(9, num_edges=500)
        address, first = index.data_ptr(), layout_of(index, 9, 9, False, FLOWS[0])
        for seed in range(300):
            index.data = torch.empty(2, 0, dtype=torch.long)  # gives back what it had
            index.data = random_edge_index(9, num_edges=500, seed=seed)
            assert index.data_ptr() != address
        assert layout_of(index, 9, 9, False, FLOWS[0]) is not first

    @pytest.mark.parametrize("rows", [3, 30, 300])
    @pytest.mark.parametrize("self_loops", [False, True])
    def test_less_and_more_data_in_a_call(self, rows, self_loops):
        """The sizes of what is kept and of what the kernel writes come from one place."""
        x, score = torch.randn(9, 2, 8, requires_grad=True), AdditiveScore(torch.randn(2, 8))
        index = random_edge_index(9, num_edges=40)

        def call(index):
            graph = SparseGraph(index, num_sources=9, num_targets=9, self_loops=self_loops)
            return attend(x, x, x, graph, score=score, return_weights=True)

        call(index)
        index.data = random_edge_index(9, num_edges=rows, seed=2)
        out, weights = call(index)
        torch.testing.assert_close((out, weights), call(index.clone()))
        torch.testing.assert_close(
            torch.autograd.grad(out.square().sum(), x), torch.autograd.grad(call(index.clone())[0].square().sum(), x)
        )

    def test_data_that_changes_before_the_backward_pass(self):
        x, index = torch.randn(9, 2, 8, requires_grad=True), random_edge_index(9, num_edges=40)
        out = attend(x, x, x, index)
        index.data = random_edge_index(9, num_edges=400)
        with pytest.raises(RuntimeError, match="the data of edge_index was replaced"):
            out.sum().backward()

    def test_only_the_last_few_sizes(self):
        index = random_edge_index(9, num_edges=1000)
        layouts = [layout_of(index, 9 + extra, 9, False, FLOWS[0]) for extra in range(20)]
        kept = edge_lists._cache[index].entries
        assert len(kept) <= edge_lists._MOST_KEPT < 20
        assert layout_of(index, 28, 9, False, FLOWS[0]) is layouts[-1]
        assert layout_of(index, 9, 9, False, FLOWS[0]) is not layouts[0]

    def test_what_is_used_stays(self):
        index = random_edge_index(9, num_edges=1000)
        first = layout_of(index, 9, 9, False, FLOWS[0])
        for extra in range(1, 20):
            layout_of(index, 9 + extra, 9, False, FLOWS[0])
            assert layout_of(index, 9, 9, False, FLOWS[0]) is first

    def test_a_network_of_many_kinds_of_layers_derives_once(self, monkeypatch):
        shared, made, get = random_edge_index(6, num_edges=8), [], edge_lists._Kept.get

        def counted(self, tensor, key, state, derive):
            noted = made if tensor is shared else []
            return get(self, tensor, key, state, lambda: (noted.append(key), derive())[1])

        monkeypatch.setattr(edge_lists._Kept, "get", counted)
        x, features = torch.randn(6, 8), torch.randn(8, 8)
        network = [
            (nn.GATConv(8, 8), x, shared),
            (nn.GATConv(8, 8, flow=FLOWS[1]), x, shared),
            (nn.GATConv((8, 8), 8, edge_dim=8), (x, x), shared, features),
            (nn.TransformerConv(8, 8), x, shared),
            (nn.TransformerConv(8, 8, flow=FLOWS[1]), x, shared),
            (nn.FAConv(8), x, x, shared),
            (nn.DNAConv(8), x.unsqueeze(1), shared),
            (nn.RGATConv(8, 8, 2), x, shared, torch.randint(2, (8,))),
            (nn.HypergraphConv(8, 8), x, shared),
            (nn.SuperGATConv(8, 8).eval(), x, shared),
        ]
        for _ in range(2):
            for layer, *inputs in network:
                layer(*inputs)
        assert len(made) > 8
        assert len(made) == len(set(made))

    def test_a_forked_child_starts_anew(self):
        """Locks that another thread held at the fork would never be released."""
        index = random_edge_index(9, num_edges=40)
        layout, barrier = layout_of(index, 9, 9, False, FLOWS[0]), threading.Barrier(2)

        def hold():
            with edge_lists._lock, edge_lists._cache[index].lock, edge_lists.making():
                barrier.wait()  # until they are held
                barrier.wait()  # until the process is forked

        holder = threading.Thread(target=hold)
        holder.start()
        barrier.wait()
        child = os.fork()
        if child == 0:
            try:
                layout_of(index, 9, 9, False, FLOWS[0])
                assert layout.by_source.rows.node  # for the backward pass of what was computed before
                os._exit(0)
            finally:
                os._exit(1)
        barrier.wait()
        holder.join()
        deadline = time.monotonic() + 10
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.01)
        if ended == (0, 0):
            os.kill(child, signal.SIGKILL)
        assert ended == (child, 0)

    def test_a_forked_child_frees_nothing(self):
        """CUDA ends a forked process that frees a GPU's memory, which workers of data loaders would do."""
        index = random_edge_index(9, num_edges=40)
        value = weakref.ref(edge_lists.derived(index, "test", Held))
        child = os.fork()
        if child == 0:
            try:
                del index
                gc.collect()
                os._exit(0 if value() is not None else 2)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0) == (child, 0)


class Held:
    """A value with references to it."""


class TestThreads:
    def race(self, work, number=4):
        """Starts threads at once; what they return."""
        barrier, results, failures = threading.Barrier(number), [], []

        def run():
            try:
                barrier.wait()
                results.append(work())
            except BaseException as error:
                failures.append(error)

        workers = [threading.Thread(target=run) for _ in range(number)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not failures
        return results

    def test_one_layout_for_all(self):
        for seed in range(10):
            index = random_edge_index(999, num_edges=20_000, seed=seed)
            layouts = self.race(lambda index=index: layout_of(index, 999, 999, False, FLOWS[0]))
            assert all(layout is layouts[0] for layout in layouts)
            tables = self.race(lambda layout=layouts[0]: layout.by_source)
            assert all(table is tables[0] for table in tables)

    def test_first_backward_passes_at_once(self):
        """Each holds what its kernel reads."""
        for seed in range(10):
            index = random_edge_index(500, num_edges=20_000, seed=seed)
            x = torch.randn(500, 2, 8)
            expected = None

            def work(index=index, x=x):
                leaf = x.clone().requires_grad_()
                out = attend(leaf, leaf, leaf, index)
                return torch.autograd.grad(out.square().sum(), leaf)[0]

            for grad in self.race(work):
                expected = grad if expected is None else expected
                assert torch.equal(grad, expected)

    def test_first_backward_passes_on_one_layout(self):
        """As if no lock helped: tables come and go, and none is freed while a kernel reads it."""
        index = random_edge_index(500, num_edges=20_000)
        x = torch.randn(500, 2, 8)
        layout = layout_of(index, 500, 500, False, FLOWS[0])
        leaf = x.clone().requires_grad_()
        expected = torch.autograd.grad(attend(leaf, leaf, leaf, index).square().sum(), leaf)[0]
        stop = threading.Event()

        def forget():
            while not stop.is_set():
                layout._by_source = None

        thread = threading.Thread(target=forget)
        thread.start()
        try:
            for _ in range(50):
                out = attend(leaf, leaf, leaf, index)
                assert torch.equal(torch.autograd.grad(out.square().sum(), leaf)[0], expected)
        finally:
            stop.set()
            thread.join()
