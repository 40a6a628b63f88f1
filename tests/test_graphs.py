import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch
import torch_geometric.typing
from torch_geometric import EdgeIndex
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import add_self_loops, coalesce, remove_self_loops

import gattn
from gattn import CompleteGraph, SparseGraph, TypedGraph, attend
from gattn.graphs import edge_lists
from gattn.ops.backends.cpu import layout

EDGES = torch.tensor([[0, 1, 1, 3, 2], [1, 1, 2, 0, 2]])


def make(edge_index, **kwargs):
    return SparseGraph(edge_index, num_sources=4, num_targets=4, **kwargs)


class TestForms:
    def forms(self):
        rows = EDGES.flip(0)
        adjacency = torch.sparse_coo_tensor(rows, torch.ones(5), (4, 4)).coalesce()
        yield EDGES
        yield EDGES.int()
        yield EDGES.to(torch.uint8)
        yield EdgeIndex(EDGES, sparse_size=(4, 4))
        yield adjacency
        yield torch.sparse_coo_tensor(rows, torch.ones(5), (4, 4))  # not coalesced
        yield adjacency.to_sparse_csr()
        yield adjacency.to_sparse_csc()
        if torch_geometric.typing.WITH_TORCH_SPARSE:
            yield SparseTensor(row=rows[0], col=rows[1], sparse_sizes=(4, 4))

    @pytest.mark.parametrize("self_loops", [False, True])
    def test_every_form_has_the_same_edges(self, self_loops):
        expected = EDGES
        if self_loops:
            expected = add_self_loops(remove_self_loops(EDGES)[0], num_nodes=4)[0]
        for form in self.forms():
            edge_index = make(form, self_loops=self_loops).edge_index
            assert edge_index.dtype == torch.int64
            assert type(edge_index) is torch.Tensor
            assert torch.equal(coalesce(edge_index), coalesce(expected)), form

    def test_sizes_come_from_adjacencies(self):
        graph = SparseGraph(torch.zeros(3, 5).to_sparse_csr())
        assert (graph.num_targets, graph.num_sources) == (3, 5)
        graph = SparseGraph(EdgeIndex(EDGES, sparse_size=(5, 6)))
        assert (graph.num_targets, graph.num_sources) == (6, 5)
        backwards = SparseGraph(EdgeIndex(EDGES, sparse_size=(5, 6)), flow="target_to_source")
        assert (backwards.num_targets, backwards.num_sources) == (5, 6)

    def test_bipartite_self_loops_join_the_first_nodes_of_both_sides(self):
        graph = SparseGraph(torch.tensor([[0, 3], [0, 1]]), num_sources=4, num_targets=2, self_loops=True)
        assert graph.edge_index.tolist() == [[3, 0, 1], [1, 0, 1]]

    def test_contradictions(self):
        with pytest.raises(
            ValueError, match="the graph has 6 sources, but 5 according to the adjacency's second dimension"
        ):
            SparseGraph(torch.zeros(3, 5).to_sparse_csr(), num_sources=6)
        with pytest.raises(ValueError, match="cannot be combined with a sparse adjacency"):
            SparseGraph(torch.zeros(3, 5).to_sparse_csr(), flow="target_to_source")
        with pytest.raises(ValueError, match="number of nodes must not be negative; got num_sources=-1"):
            SparseGraph(EDGES, num_sources=-1)
        with pytest.raises(ValueError, match=r"one \[N, M\] matrix in CSR, CSC or COO layout"):
            SparseGraph(torch.zeros(2, 2, 2).to_sparse())
        with pytest.raises(IndexError, match="there are no source nodes"):
            SparseGraph(EDGES, num_sources=0, num_targets=4).edges()
        with pytest.raises(ValueError, match="flow must be"):
            SparseGraph(EDGES, flow="both")
        with pytest.raises(ValueError, match="the number of nodes of this graph is not known"):
            _ = SparseGraph(EDGES, self_loops=True).edge_index


class TestCache:
    def count_checks(self, monkeypatch):
        calls = []
        check = edge_lists.check_range
        monkeypatch.setattr(edge_lists, "check_range", lambda *arguments: (calls.append(arguments), check(*arguments)))
        return calls

    def test_work_is_done_once_for_each_tensor(self, monkeypatch):
        calls = self.count_checks(monkeypatch)
        edge_index = EDGES.clone()
        first = make(edge_index, self_loops=True).edge_index
        assert make(edge_index, self_loops=True).edge_index is first
        assert len(calls) == 1
        make(edge_index).edges()
        make(edge_index, flow="target_to_source").edges()
        assert len(calls) == 3
        make(edge_index.clone()).edges()
        assert len(calls) == 4

    def test_layers_share_it(self, monkeypatch):
        calls = []
        build = layout.Layout
        monkeypatch.setattr(layout, "Layout", lambda *arguments: (calls.append(arguments), build(*arguments))[1])
        edge_index, x = EDGES.clone(), torch.randn(4, 8, requires_grad=True)
        for conv in (gattn.nn.GATConv(8, 8), gattn.nn.GATv2Conv(8, 8), gattn.nn.GATConv(8, 8)):
            conv(x, edge_index).sum().backward()
            conv(x, edge_index).sum().backward()
        assert len(calls) == 1

    def test_edits_in_place_are_noticed(self):
        edge_index = EDGES.clone()
        make(edge_index, self_loops=True).edges()
        edge_index[0, 0] = 3
        assert make(edge_index, self_loops=True).edge_index[0, 0] == 3
        edge_index.view(-1)[0] = 9
        with pytest.raises(IndexError, match="source index 9"):
            make(edge_index, self_loops=True).edges()

    def test_edits_of_the_tensor_inside_an_edge_index_are_noticed(self):
        inside = EDGES.clone()
        edge_index = EdgeIndex(inside)
        make(edge_index, self_loops=True).edges()
        inside[0, 0] = 3
        assert make(edge_index, self_loops=True).edge_index[0, 0] == 3

    def test_edits_of_what_was_handed_out_do_no_harm(self):
        edge_index = EDGES.clone()
        looped = make(edge_index, self_loops=True).edge_index
        expected = looped.clone()
        looped.zero_()
        assert torch.equal(make(edge_index, self_loops=True).edge_index, expected)

    def test_nothing_is_kept_alive(self):
        gc.collect()
        edge_index = EDGES.clone()
        graph = make(edge_index, self_loops=True)
        looped = weakref.ref(graph.edge_index)
        key = weakref.ref(edge_index)
        size = len(edge_lists._cache)
        del edge_index, graph
        gc.collect()
        assert key() is None
        assert looped() is None
        assert len(edge_lists._cache) == size - 1

    def test_inference_tensors_have_no_version_and_work_all_the_same(self):
        with torch.inference_mode():
            edge_index = EDGES.clone()
            assert make(edge_index, self_loops=True).edge_index.size(1) == 7
            edge_index[0, 0] = 3
            assert make(edge_index, self_loops=True).edge_index[0, 0] == 3

    def test_loops_of_a_graph_that_is_held_are_made_once(self):
        adjacency = torch.sparse_coo_tensor(EDGES.flip(0), torch.ones(5), (4, 4)).to_sparse_csr()
        graph = SparseGraph(adjacency)
        assert graph.with_self_loops().edge_index is graph.with_self_loops().edge_index
        assert graph.with_self_loops().with_self_loops() is graph.with_self_loops()

    def test_to_another_device(self):
        graph = make(EDGES, self_loops=True, flow="target_to_source").to("meta")
        assert graph.adjacency.device.type == "meta"
        assert (graph.num_sources, graph.num_targets, graph.self_loops, graph.flow) == (4, 4, True, "target_to_source")

    def test_one_without_edges_to_another_device(self):
        """PyG leaves such an `EdgeIndex` where it is."""
        nothing = EdgeIndex(EDGES[:, :0], sparse_size=(4, 4))
        for graph in (make(nothing), TypedGraph(nothing, EDGES[0, :0])):
            assert graph.to("meta").adjacency.device.type == "meta"
            assert type(graph.to("meta")) is type(graph)

    def test_copies(self):
        graph = make(EDGES, self_loops=True)
        for copied in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
            assert torch.equal(copied.edge_index, graph.edge_index)


class TestFeatures:
    def test_self_loops_get_their_fill_value(self):
        graph = make(EDGES, self_loops=True)
        features = torch.arange(5.0).view(5, 1)
        assert graph.with_features(features, fill_value="add")[1].flatten().tolist() == [0, 2, 3, 3, 0, 2, 0]
        with pytest.raises(ValueError, match="edge_attr needs one row per edge; got 4 rows for 5 edges"):
            graph.with_features(features[:4])

    def test_features_beside_a_sparse_adjacency(self):
        adjacency = torch.sparse_coo_tensor(EDGES.flip(0), torch.ones(5), (4, 4)).to_sparse_csr()
        with pytest.raises(NotImplementedError, match="given separately: pass edge_index"):
            SparseGraph(adjacency, self_loops=True).with_features(torch.ones(5, 1))

    @pytest.mark.skipif(not torch_geometric.typing.WITH_TORCH_SPARSE, reason="needs torch-sparse")
    @pytest.mark.parametrize("size", [(5,), (5, 2)])
    def test_self_loops_in_a_sparse_tensor_with_values(self, size):
        adjacency = SparseTensor(row=EDGES[1], col=EDGES[0], value=torch.ones(size), sparse_sizes=(4, 4))
        assert SparseGraph(adjacency, self_loops=True).edges().edge_index.size(1) > 0
        with pytest.raises(NotImplementedError, match="SparseTensor with edge features"):
            SparseGraph(adjacency, self_loops=True).with_features(None)


def test_reprs():
    assert (
        repr(SparseGraph(EDGES, num_sources=4, num_targets=4, self_loops=True))
        == "SparseGraph(num_sources=4, num_targets=4, self_loops=True)"
    )
    assert repr(CompleteGraph(3, causal=True, window=2)) == "CompleteGraph(3, 3, causal=True, window=(2, 2))"


def test_a_graph_on_another_device_is_named():
    x = torch.randn(4, 1, 2)
    with pytest.raises(ValueError, match="the graph is on cpu, the features are on meta"):
        attend(x.to("meta"), x.to("meta"), x.to("meta"), EDGES)


class TestCompleteGraph:
    def test_packed_blocks_lie_end_to_end(self):
        graph = CompleteGraph.packed([1, 2])
        assert (graph.num_targets, graph.num_sources) == (3, 3)
        assert graph.blocks == ((1, 1), (2, 2))
        assert graph.edge_index.tolist() == [[0, 1, 2, 1, 2], [0, 1, 1, 2, 2]]
        assert CompleteGraph.packed([2, 1], causal=True).edge_index.tolist() == [[0, 0, 1, 2], [0, 1, 1, 2]]
        assert CompleteGraph.packed([1, 3], window=(1, 0)).edge_index.tolist() == [
            [0, 1, 1, 2, 2, 3],
            [0, 1, 2, 2, 3, 3],
        ]

    def test_packed_blocks_of_other_sources(self):
        graph = CompleteGraph.packed([1, 0, 2], [2, 3, 1])
        assert (graph.num_targets, graph.num_sources) == (3, 6)
        assert graph.edge_index.tolist() == [[0, 1, 5, 5], [0, 0, 1, 2]]
        # In each block the last target sees every source.
        causal = CompleteGraph.packed([1, 2], [2, 3], causal=True)
        assert causal.edge_index.tolist() == [[0, 1, 2, 3, 2, 3, 4], [0, 0, 1, 1, 2, 2, 2]]

    @pytest.mark.parametrize(
        "arguments",
        [
            {"lengths": [3, 0, 2]},
            {"lengths": (3, 0, 2)},
            {"lengths": torch.tensor([3, 0, 2])},
            {"lengths": torch.tensor([3, 0, 2], dtype=torch.int32)},
            {"ptr": torch.tensor([0, 3, 3, 5])},
            {"ptr": [0, 3, 3, 5]},
            {"batch": torch.tensor([0, 0, 0, 2, 2])},
            {"batch": torch.tensor([0, 0, 0, 2, 2], dtype=torch.int32)},
        ],
    )
    def test_packed_by_lengths_or_starts(self, arguments):
        assert CompleteGraph.packed(**arguments).blocks == ((3, 3), (0, 0), (2, 2))
        sources = {f"source_{name}": x for name, x in arguments.items()}
        targets = {"batch": torch.arange(3)} if "batch" in arguments else {"lengths": [1, 1, 1]}
        assert CompleteGraph.packed(**targets, **sources).blocks == ((1, 3), (1, 0), (1, 2))

    def test_packed_from_a_batch_of_pyg(self):
        data = [torch_geometric.data.Data(x=torch.zeros(n, 1)) for n in (2, 3)]
        assert CompleteGraph.packed(ptr=torch_geometric.data.Batch.from_data_list(data).ptr).blocks == ((2, 2), (3, 3))

    def test_the_graph_of_a_batch_is_kept_until_it_is_edited(self):
        batch = torch.tensor([0, 0, 1])
        graph = CompleteGraph.packed(batch=batch)
        assert CompleteGraph.packed(batch=batch) is graph
        assert CompleteGraph.packed(batch=batch, causal=True).causal
        batch[1] = 1
        assert CompleteGraph.packed(batch=batch).blocks == ((1, 1), (2, 2))

    def test_of_a_batch_targets_or_sources_may_be_missing_at_the_end(self):
        graph = CompleteGraph.packed(batch=torch.tensor([0, 2]), source_batch=torch.tensor([0, 0, 1, 3]))
        assert graph.blocks == ((1, 2), (0, 1), (1, 0), (0, 1))

    def test_nothing_packed(self):
        for graph in (
            CompleteGraph.packed(batch=torch.zeros(0, dtype=torch.int64)),
            CompleteGraph.packed([]),
            CompleteGraph.packed(ptr=torch.tensor([0])),
            CompleteGraph.packed([0, 0]),
        ):
            assert (graph.num_targets, graph.num_sources) == (0, 0)
            assert graph.edge_index.shape == (2, 0)
            assert graph.edge_index.dtype == torch.int64

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({}, "needs the lengths of its blocks, or ptr"),
            ({"source_lengths": [1, 2]}, "needs the lengths of its blocks, or ptr"),
            ({"lengths": [1, 2], "ptr": torch.tensor([0, 1, 3])}, "lengths and ptr say the same thing"),
            (
                {"lengths": [1, 2], "source_lengths": [1, 2], "source_ptr": torch.tensor([0, 1, 3])},
                "source_lengths and source_ptr say the same thing",
            ),
            (
                {"ptr": torch.tensor([0, 3, 2])},
                r"ptr must hold where each block begins.*never decreasing; got \[0, 3, 2\]",
            ),
            ({"ptr": torch.tensor([1, 3])}, r"from 0 on and never decreasing; got \[1, 3\]"),
            ({"ptr": torch.tensor([], dtype=torch.int64)}, "ptr must hold where each block begins"),
            ({"ptr": torch.tensor([[0, 1], [1, 2]])}, "ptr must hold where each block begins"),
            (
                {"lengths": [1, 2], "source_ptr": torch.tensor([1, 3, 4])},
                "source_ptr must hold where each block begins",
            ),
            ({"lengths": [2, -1]}, r"lengths must not be negative; got \[2, -1\]"),
            ({"lengths": [2, 1], "source_lengths": [2, -1]}, "source_lengths must not be negative"),
            ({"lengths": torch.tensor([2.0, 1.0])}, "lengths must hold one integer per"),
            ({"lengths": [2.0, 1.0]}, "lengths must hold one integer per"),
            ({"lengths": torch.tensor([True, False])}, "lengths must hold one integer per"),
            ({"lengths": torch.tensor([[2, 1]])}, r"lengths must hold one integer per block, \[B\]; got \[1, 2\]"),
            ({"ptr": torch.tensor([0.0, 2.0])}, "ptr must hold one integer per"),
            ({"lengths": [2, 1], "source_lengths": [2, 1, 1]}, "the same number of blocks; got 2 and 3"),
            ({"lengths": [2, 1], "window": (1, -1)}, "window must be"),
            ({"batch": torch.tensor([1, 0])}, "batch must give the graph of each node in ascending order"),
            ({"batch": torch.tensor([-1, 0])}, "batch must give the graph of each node in ascending order"),
            ({"batch": torch.tensor([0.0])}, r"batch must hold the block of each node, integers \[N\]; got \[1\] of"),
            ({"batch": torch.tensor([[0]])}, r"batch must hold the block of each node, integers \[N\]; got \[1, 1\]"),
            ({"batch": torch.tensor([0]), "lengths": [1]}, "give no lengths and no ptr"),
            ({"batch": torch.tensor([0]), "source_lengths": [1]}, "give no lengths and no ptr"),
            ({"lengths": [1], "source_batch": torch.tensor([0])}, "source_batch needs batch"),
        ],
    )
    def test_wrongly_packed(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            CompleteGraph.packed(**arguments)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"source_lengths": torch.tensor([5, 6])}, r"source_lengths must lie between 0 and 5; got \[5, 6\]"),
            ({"target_lengths": torch.tensor([5, 4])}, r"target_lengths must lie between 0 and 4; got \[5, 4\]"),
            ({"source_lengths": torch.tensor([5, -1])}, r"source_lengths must not be negative; got \[5, -1\]"),
            ({"source_lengths": torch.tensor(3)}, "source_lengths must hold one integer per"),
            (
                {"source_lengths": torch.tensor([5, 4]), "target_lengths": torch.tensor([4])},
                r"for the same batch; got \[2\] and \[1\]",
            ),
        ],
    )
    def test_wrong_lengths(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            CompleteGraph(4, 5, **arguments)

    @pytest.mark.parametrize(
        ("build", "error", "message"),
        [
            (lambda: CompleteGraph(4, source_lengths=[1, 2]), TypeError, "source_lengths must be a tensor; got list"),
            (lambda: CompleteGraph(4, causal="yes"), TypeError, "causal must be True or False; got 'yes'"),
            (lambda: CompleteGraph(4, causal=None), TypeError, "causal must be True or False; got None"),
            (lambda: CompleteGraph(4, causal=torch.ones(4, 4)), TypeError, "causal must be True or False; got tensor"),
            (lambda: CompleteGraph(4, window="3"), TypeError, "window must be .*; got '3'"),
            (lambda: CompleteGraph(4, window=("1", 2)), TypeError, r"window must be .*; got \('1', 2\)"),
            (lambda: CompleteGraph("4"), TypeError, "num_targets must be a number of nodes, an integer; got '4'"),
            (lambda: CompleteGraph.packed([1, 2], causal="yes"), TypeError, "causal must be True or False; got 'yes'"),
            (lambda: CompleteGraph.packed(3), TypeError, "lengths must be a tensor or a sequence of integers; got 3"),
            (lambda: CompleteGraph.packed("ab"), TypeError, "lengths must be a tensor or a sequence .*; got 'ab'"),
            (lambda: CompleteGraph.packed(["a"]), TypeError, r"lengths must be a tensor or a sequence .*; got \['a'\]"),
            (lambda: CompleteGraph.packed(ptr="a"), TypeError, "ptr must be a tensor or a sequence .*; got 'a'"),
            (lambda: SparseGraph(EDGES, self_loops="yes"), TypeError, "self_loops must be True or False; got 'yes'"),
            (lambda: TypedGraph(EDGES, EDGES[0], 3.0), TypeError, "edge_types must be names of types, .*; got 3.0"),
            (lambda: TypedGraph(EDGES, EDGES[0], "abc"), TypeError, "edge_types must be names of types, .*; got 'abc'"),
            (lambda: TypedGraph(EDGES, EDGES[0], num_nodes=[4]), TypeError, r"num_nodes must be a dict.*; got \[4\]"),
            (
                lambda: TypedGraph(EDGES, EDGES[0], num_nodes={"a": "4"}),
                TypeError,
                "'a'.* must be .* an integer; got '4'",
            ),
        ],
    )
    def test_arguments_of_other_types(self, build, error, message):
        with pytest.raises(error, match=message):
            build()

    def test_flags_and_numbers_of_numpy(self):
        assert CompleteGraph(3, causal=np.True_).edge_index.equal(CompleteGraph(3, causal=1).edge_index)
        assert make(EDGES, self_loops=np.True_).edge_index.equal(make(EDGES, self_loops=True).edge_index)

    def test_with_causal(self):
        lengths = torch.tensor([1, 2])
        graph = CompleteGraph(2, 3, window=(4, 1), source_lengths=lengths, target_lengths=lengths)
        causal = graph.with_causal()
        assert causal.causal
        assert not graph.causal
        assert (causal.num_targets, causal.num_sources, causal.window) == (2, 3, (4, 1))
        assert causal.source_lengths is causal.target_lengths is lengths
        assert causal.edge_index.tolist() == [[0, 1, 0, 1, 2], [0, 0, 1, 1, 1]]
        assert causal.with_causal() is causal
        packed = CompleteGraph.packed([2, 1]).with_causal()
        assert packed.blocks == ((2, 2), (1, 1))
        assert packed.edge_index.tolist() == [[0, 0, 1, 2], [0, 1, 1, 2]]

    def test_with_source_lengths(self):
        graph = CompleteGraph(2, 3, causal=True, window=2)
        padded = graph.with_source_lengths(torch.tensor([1, 3]))
        assert graph.source_lengths is None
        assert padded.source_lengths.tolist() == [1, 3]
        assert (padded.num_targets, padded.num_sources, padded.causal, padded.window) == (2, 3, True, (2, 2))
        with pytest.raises(ValueError, match="source_lengths must lie between 0 and 3"):
            graph.with_source_lengths(torch.tensor([4]))

    def test_what_a_window_leaves(self):
        graph = CompleteGraph(3, 4, window=(1, 0))
        assert graph.reach == (1, 0)
        assert graph.edge_index.tolist() == [[0, 1, 1, 2, 2, 3], [0, 0, 1, 1, 2, 2]]
        assert graph.visible(2, 4, 1).int().tolist() == [[1, 1, 0, 0], [0, 1, 1, 0]]
        assert CompleteGraph(3, window=(1, 2), causal=True).reach == (1, 0)
        assert CompleteGraph(3, causal=True).reach == (None, 0)
        assert CompleteGraph(3).reach == (None, None)

    def test_lengths_leave_edges_between_real_nodes(self):
        graph = CompleteGraph(2, source_lengths=torch.tensor([1, 2]), target_lengths=torch.tensor([2, 1]))
        index = graph.edge_index
        assert index.tolist() == [[0, 1, 0, 1], [0, 0, 1, 1]]
        assert graph.length_mask(index).int().tolist() == [[1, 0, 1, 0], [1, 1, 0, 0]]
        assert CompleteGraph(2).length_mask(index) is None

    @pytest.mark.parametrize("batch", [(), (5,)])
    def test_entries_of_matrices_and_back(self, batch):
        for graph in (CompleteGraph(3, 4, causal=True), CompleteGraph.packed([1, 0, 2], [2, 3, 1])):
            index = graph.edge_index
            weights = torch.rand(*batch, index.size(1), 2)
            matrices = graph.to_dense(weights, index)
            if graph.blocks is None:
                assert matrices.shape == (*batch, 2, 3, 4)
                assert torch.equal(graph.pick(matrices, index), weights)
                continue
            assert [tuple(matrix.shape) for matrix in matrices] == [
                (*batch, 2, 1, 2),
                (*batch, 2, 0, 3),
                (*batch, 2, 2, 1),
            ]
            if not batch:
                largest = torch.zeros(3, 2, 2, 3)
                for place, matrix in enumerate(matrices):
                    largest[place, :, : matrix.size(1), : matrix.size(2)] = matrix
                assert torch.equal(graph.pick(largest, index), weights)

    def test_copies(self):
        graph = CompleteGraph.packed([1, 2], causal=True)
        for copied in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
            assert torch.equal(copied.edge_index, graph.edge_index)

    def test_repr(self):
        assert repr(CompleteGraph(3, 5)) == "CompleteGraph(3, 5)"
        assert repr(CompleteGraph.packed([1, 2], [4, 1], causal=True)) == "CompleteGraph(3, 5, causal=True, 2 blocks)"
        lengths = torch.tensor([1])
        assert (
            repr(CompleteGraph(3, source_lengths=lengths, target_lengths=lengths))
            == "CompleteGraph(3, 3, source_lengths=..., target_lengths=...)"
        )
