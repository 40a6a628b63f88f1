"""Layers that `torch.compile` makes one graph of, and how that is found out."""

import copy
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch_geometric.data import Batch, Data
from torch_geometric.nn import global_mean_pool

import gattn
from gattn import AdditiveScore, CompleteGraph, DotScore
from gattn.distributions import Entmax15, Identity, Sigmoid, Softmax
from gattn.nn import DNAConv, GATConv, GATv2Conv, GPSConv, PointTransformerConv, SuperGATConv, TransformerConv
from gattn.testing import assert_compiles_whole, random_edge_index
from tests.cases import mostly_slow
from tests.layers import LAYERS, MODELS, Called, Draw, row, tensors

N, E, D = 9, 40, 3

#: What PyTorch cannot compile as a whole, and why; docs/backends.md says the same.
_RNN = "Dynamo traces no RNN, GRU or LSTM unless allow_rnn is set: pytorch/pytorch#158007"
_SIZES = "reads the sizes of graphs, which decide those of tensors"
NOT_WHOLE = {
    **dict.fromkeys(("HAN", "JumpingKnowledge", "Seq2Seq", "Set2Set"), _RNN),
    **dict.fromkeys(("Graphormer", "PatchTransformerAggregation"), _SIZES),
    "LPFormer": "takes a sparse matrix, which Dynamo does not",
}
#: Sizes of inputs, one after another: all change with the second, after which a program leaves them open.
SIZES = tuple(
    {
        **{"nodes": n, "others": n + 3, "edges": 4 * n, "edges2": 3 * n, "edges3": 2 * n},
        **{"batch": b, "length": n - b, "memory": n, "graphs": 3},
    }
    for b, n in enumerate((6, 9, 17, 33), 2)
)


class Broken(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * float(x.sum().item() > 0)


class Untrue(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * (2 if torch.compiler.is_compiling() else 1)


def edges():
    """With self-loops, two of one node among them, and a node that only has its own."""
    return torch.cat([random_edge_index(N, N, E - 3), torch.tensor([[2, 2, 8], [2, 2, 8]])], 1)


class TestEveryLayer:
    @pytest.mark.parametrize(
        "name", mostly_slow([name for name in (*LAYERS, *MODELS) if name not in NOT_WHOLE], every=8)
    )
    def test_is_one_graph_for_all_sizes(self, name):
        """Forward and backward; the second program is that with open sizes."""
        torch.compiler.reset()
        module = Called(name).eval()
        of_compiled = copy.deepcopy(module)  # as some keep a state
        compiled = torch.compile(of_compiled, fullgraph=True, backend="aot_eager")
        for sizes in SIZES:
            sizes = (
                {**sizes, "length": 6} if name == "LSTMN" else sizes
            )  # a loop over tokens, a program for each length
            inputs, found = row(name).inputs(Draw(**sizes)), []
            for call, owner in ((module, module), (compiled, of_compiled)):
                torch.manual_seed(0)
                outs = tensors(call(*inputs))
                total = sum(x.sum() for x in outs if x.requires_grad)
                leaves = [x for x in owner.parameters() if x.requires_grad and isinstance(total, torch.Tensor)]
                grads = torch.autograd.grad(total, leaves, materialize_grads=True) if leaves else ()
                found.append((outs, grads))
            torch.testing.assert_close(found[1], found[0])
        assert len(_debug_get_cache_entry_list(Called.forward)) <= 2

    @pytest.mark.slow
    @pytest.mark.parametrize("name", NOT_WHOLE)
    def test_others_are_not_and_are_listed(self, name):
        """Else, they no longer belong there."""
        torch.compiler.reset()
        compiled = torch.compile(Called(name).eval(), fullgraph=True, dynamic=True, backend="eager")
        with pytest.raises((RuntimeError, torch._dynamo.exc.UserError)):
            compiled(*row(name).inputs(Draw()))
        page = (Path(__file__).parents[1] / "docs/backends.md").read_text()
        assert f"`{name}`" in page


@pytest.mark.parametrize("layer", [GATConv, GATv2Conv, TransformerConv])
@pytest.mark.parametrize("edge_dim", [None, D])
def test_layers_with_self_loops_and_edge_features(layer, edge_dim):
    conv = layer(4, 8, heads=2, edge_dim=edge_dim)
    features = () if edge_dim is None else (torch.randn(E, D),)
    assert_compiles_whole(conv, torch.randn(N, 4), edges(), *features)


@pytest.mark.parametrize("layer", [GATConv, GATv2Conv])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("fill_value", ["mean", "max", "add", 0.5, torch.tensor([0.5, 1.0, 2.0])], ids=str)
def test_self_loops_among_the_edges_do_not_count(layer, flow, fill_value):
    """Compiled, they stay among the edges, hidden; sizes are open, and gradients are those of the program as it is."""
    conv = layer(4, 8, heads=2, edge_dim=D, fill_value=fill_value, flow=flow)
    torch.compiler.reset()
    compiled = torch.compile(conv, dynamic=True, fullgraph=True, backend="aot_eager")
    for more in (0, 5):
        x, edge_index = torch.randn(N + more, 4), torch.cat([edges(), random_edge_index(N, N, more)], 1)
        features = torch.randn(E + more, D, requires_grad=True)
        found = []
        for call in (conv, compiled):
            out = call(x, edge_index, features)
            found.append((out, *torch.autograd.grad(out.square().sum(), [features, *conv.parameters()])))
        torch.testing.assert_close(found[1], found[0])
        assert (found[1][1][edge_index[0] == edge_index[1]] == 0).all()


@pytest.mark.parametrize("sizes", [(9, 6), (6, 9)])
def test_two_kinds_of_nodes(sizes):
    conv = GATv2Conv((4, 5), 8, edge_dim=D)
    edge_index = torch.cat([random_edge_index(*sizes, 20), torch.tensor([[1, 3], [1, 3]])], 1)
    assert_compiles_whole(conv, (torch.randn(sizes[0], 4), torch.randn(sizes[1], 5)), edge_index, torch.randn(22, D))


@pytest.mark.parametrize("layer", [GATConv, GATv2Conv])
def test_returned_weights_are_those_of_pygs_edges(layer):
    conv, x, edge_index, features = layer(4, 8, edge_dim=D), torch.randn(N, 4), edges(), torch.randn(E, D)
    expected = conv(x, edge_index, features, return_attention_weights=True)
    torch.compiler.reset()
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    found = compiled(x, edge_index, features, return_attention_weights=True)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_existing_self_loops_keep_their_weight_in_degrees(flow):
    conv, edge_index = DNAConv(8, heads=2, flow=flow), edges()
    weight = torch.rand(E).where(edge_index[0] != edge_index[1], 2.5)  # of two of one node, the last counts anywhere
    assert_compiles_whole(conv, torch.randn(N, 3, 8), edge_index, weight)
    assert_compiles_whole(conv, torch.randn(N, 3, 8), edge_index)


@pytest.mark.parametrize("attention_type", ["MX", "SD"])
def test_supervised_attention(attention_type):
    conv = SuperGATConv(4, 8, heads=2, attention_type=attention_type).eval()
    assert_compiles_whole(conv, torch.randn(N, 4), edges())


def test_points_with_self_loops():
    assert_compiles_whole(PointTransformerConv(4, 8), torch.randn(N, 4), torch.randn(N, 3), edges())


class Within(torch.nn.Module):
    """Attention within the graphs of a batch."""

    def __init__(self, options, of_graph):
        super().__init__()
        self.options, self.of_graph = options, of_graph
        self.table = torch.nn.Parameter(torch.randn(20, 2))

    def forward(self, query, key, batch, source_batch, pairs):
        options = dict(self.options)
        if options.pop("listed", False):
            options["bias"] = gattn.SparseBias(pairs, self.table)
        graph = CompleteGraph.packed(batch=batch, source_batch=source_batch, **self.of_graph)
        key = query if key is None else key
        return gattn.attend(query, key, key, graph, **options)


class TestGraphsOfABatch:
    """Their sizes are open in one program; whole graphs lie among the others, as does a number without nodes."""

    CASES: ClassVar = {
        "softmax": ({}, {}),
        "causal": ({}, {"causal": True}),
        "window": ({}, {"window": 1}),
        "sink": ({"distribution": Softmax(sink=0.5)}, {}),
        "sigmoid": ({"distribution": Sigmoid()}, {}),
        "entmax": ({"distribution": Entmax15()}, {}),
        "linear": ({"distribution": Identity()}, {}),
        "linear, divided": ({"distribution": Identity(normalize=True, eps=1.0), "score": DotScore(0.1)}, {}),
        "linear, causal": ({"distribution": Identity()}, {"causal": True}),
        "additive": ({"score": AdditiveScore(torch.ones(2, 4))}, {}),
        "listed": ({"listed": True}, {}),
        "listed, causal": ({"listed": True}, {"causal": True}),
    }

    @pytest.mark.parametrize(
        ("name", "is_to_others"), mostly_slow([*product(CASES, (False,)), *product(CASES, (True,))], every=3)
    )
    def test_attention(self, name, is_to_others):
        options, of_graph = self.CASES[name]
        if is_to_others and (of_graph or "listed" in options):
            pytest.skip("a position and a pair of nodes are within one set of nodes")
        torch.compiler.reset()
        module = Within(options, of_graph).double()
        compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
        for sizes in ([3, 0, 1, 5], [40, 2, 0, 0, 7, 1]):
            batch = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
            query = torch.rand(len(batch), 2, 4, dtype=torch.double, requires_grad=True)
            source_batch, key = None, None
            if is_to_others:
                source_batch = torch.cat([batch[:1].expand(2), batch])
                key = torch.rand(len(source_batch), 2, 4, dtype=torch.double, requires_grad=True)
            pairs = torch.stack([torch.arange(20) % 3, torch.arange(20) // 7])
            found = []
            for call in (module, compiled):
                out = call(query, key, batch, source_batch, pairs)
                leaves = [x for x in (query, key, module.table if "listed" in options else None) if x is not None]
                found.append((out, torch.autograd.grad(out.square().sum(), leaves)))
            torch.testing.assert_close(found[1], found[0])
        assert len(_debug_get_cache_entry_list(Within.forward)) == 1

    def test_an_order_that_is_no_order_is_refused_when_the_program_runs(self):
        torch.compiler.reset()
        x, batch = torch.randn(4, 2, 4), torch.tensor([0, 1, 0, 1])
        compiled = torch.compile(Within({}, {}), fullgraph=True, dynamic=True, backend="aot_eager")
        with pytest.raises(ValueError, match="ascending"):
            compiled(x, None, batch, None, None)

    def test_weights_of_blocks_are_refused(self):
        torch.compiler.reset()
        x, batch = torch.randn(4, 2, 4), torch.tensor([0, 0, 1, 1])
        compiled = torch.compile(Within({"return_weights": True}, {}), fullgraph=True, backend="aot_eager")
        with pytest.raises(torch._dynamo.exc.Unsupported, match="which a compiled program cannot return"):
            compiled(x, None, batch, None, None)

    @pytest.mark.parametrize(
        ("norm", "attn_type"),
        mostly_slow(
            product(["layer_norm", "GraphNorm", "PairNorm", "batch_norm", None], ["multihead", "performer"]), every=5
        ),
    )
    def test_gps(self, attn_type, norm):
        conv = GPSConv(8, TransformerConv(8, 4, 2, edge_dim=D), 2, norm=norm, attn_type=attn_type).eval()
        batch = torch.tensor([0, 0, 0, 1, 3, 3, 3, 3, 3])
        assert_compiles_whole(conv, torch.randn(N, 8), edges(), batch, edge_attr=torch.randn(E, D))

    def test_dropout_drops_the_same_as_in_eager_mode(self):
        module = Within({"dropout": 0.5, "training": True}, {})
        x, batch = torch.randn(30, 2, 4), torch.arange(30) // 20
        torch.compiler.reset()
        compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
        found = []
        for call in (module, compiled):
            torch.manual_seed(3)
            found.append(call(x, None, batch, None, None))
        assert (found[0] != call(x, None, batch, None, None)).any()
        torch.testing.assert_close(found[1], found[0])


def molecules(count, seed):
    """A batch of chains with a ring each, whose property is how many nodes of a kind they have."""
    generator, graphs = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        n = int(torch.randint(5, 12, (), generator=generator))
        chain = torch.stack([torch.arange(n), (torch.arange(n) + 1) % n])
        x, edge_index = torch.randn(n, 8, generator=generator), torch.cat([chain, chain.flip(0)], 1)
        edge_attr = torch.randn(2 * n, D, generator=generator)
        graphs.append(Data(x, edge_index, edge_attr, y=(x[:, :1] > 0).float().mean(0)))
    return Batch.from_data_list(graphs)


class Regressor(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = GPSConv(8, GATv2Conv(8, 4, 2, edge_dim=D), heads=2)
        self.out = torch.nn.Linear(8, 1)

    def forward(self, x, edge_index, edge_attr, batch, num_graphs):
        x = self.conv(x, edge_index, batch, edge_attr=edge_attr)
        return self.out(global_mean_pool(x, batch, num_graphs)).squeeze(-1)


def curve(backend):
    """The losses of three epochs, and the number of programs."""
    torch.manual_seed(0)
    model = Regressor()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    called, losses = model, []
    if backend is not None:
        torch.compiler.reset()
        called = torch.compile(model, dynamic=True, fullgraph=True, backend=backend)
    for _ in range(3):
        for seed in range(4):
            data = molecules(6, seed)
            out = called(data.x, data.edge_index, data.edge_attr, data.batch, 6)
            loss = torch.nn.functional.mse_loss(out, data.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def test_training_is_the_same():
    """With machine code, for batches of other sizes in each step, by one program."""
    expected, found = curve(None), curve("inductor")
    assert found == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0]
    assert len(_debug_get_cache_entry_list(Regressor.forward)) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # of PyTorch 2.11 itself
@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
def test_modes(mode):
    torch.compiler.reset()
    conv, inputs = GATv2Conv(4, 8, heads=2, edge_dim=D), (torch.randn(N, 4), edges(), torch.randn(E, D))
    torch.testing.assert_close(torch.compile(conv, mode=mode, fullgraph=True)(*inputs), conv(*inputs))


CACHED = """
import json, sys, torch, gattn
from pathlib import Path
from torch._dynamo.utils import counters
artifacts = Path("artifacts.bin")
if sys.argv[1] == "second":
    torch.compiler.load_cache_artifacts(artifacts.read_bytes())
torch.manual_seed(0)
conv = gattn.nn.GATv2Conv(4, 8, heads=2, edge_dim=3)
x, edge_index = torch.randn(9, 4), gattn.testing.random_edge_index(9, num_edges=20)
torch.compile(conv, dynamic=True)(x, edge_index, torch.randn(20, 3)).sum().backward()
if sys.argv[1] == "first":
    artifacts.write_bytes(torch.compiler.save_cache_artifacts()[0])
print(json.dumps({name: counters["aot_autograd"][f"autograd_cache_{name}"] for name in ("hit", "miss")}))
"""


@pytest.mark.slow
def test_a_second_process_starts_from_the_cache(tmp_path):
    """Operators included."""
    found = []
    for process in ("first", "second"):
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / process)}
        command = [sys.executable, "-c", CACHED, process]
        ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        found.append(json.loads(ended.stdout))
    first, second = found
    assert first["hit"] == 0 < first["miss"]
    assert second["hit"] > 0
    # PyTorch may look up, but never compile, a graph with numbers as inputs, before it starts anew with constants.
    assert second["hit"] + second["miss"] == first["miss"]


def test_breaks_and_differences_are_found():
    x = torch.randn(3, 4)
    assert_compiles_whole(torch.nn.Linear(4, 4), x)
    with pytest.raises(AssertionError, match=r"Broken is compiled with 1 breaks: .*item"):
        assert_compiles_whole(Broken(4, 4), x)
    with pytest.raises(AssertionError, match="not close"):
        assert_compiles_whole(Untrue(4, 4), x)


def test_a_graph_with_hidden_edges_is_only_made_by_a_compiler():
    graph = gattn.SparseGraph(edges(), N, N, self_loops=True)
    looped, features = graph.with_features(torch.randn(E, D), hides=True)
    assert looped.kept is None
    assert len(features) == looped.edge_index.size(1) < E + N
