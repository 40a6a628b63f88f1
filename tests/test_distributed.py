"""Sharded attention: what one process computes, outputs and gradients, on two and four."""

import copy
import tempfile
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import DiffGroupNorm, GraphSizeNorm, MeanSubtractionNorm, PairNorm

import gattn
from gattn.distributed import ShardedCompleteGraph, ShardedSparseGraph, shard
from gattn.testing import random_edge_index
from tests import layers
from tests.cases import SCORES, TERMS, changed, make_call
from tests.shards import on_processes

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="PyTorch has no gloo here")

F64 = {"dtype": torch.float64}


def gathered(graph, results, rows="targets", dim=0):
    return [graph.gather(x.detach(), rows, dim) for x in results]


def summed(grads):
    """Gradients of what all processes share."""
    whole = [grad.contiguous() for grad in grads]
    for grad in whole:
        dist.all_reduce(grad)
    return whole


def compare_layer(layer, whole, mesh, features=8, partition=None, dim=0, run=None, batch=(), edge_attr=None):
    """A layer on the whole graph, and on each process's part."""
    torch.manual_seed(0)
    run = run or (lambda layer, x, graph, *more: layer(x, graph, *more))
    layer, parts = layer.double(), [*layer.parameters()]
    x = torch.randn(*batch, whole.num_targets, features, **F64, requires_grad=True)
    edges = [] if edge_attr is None else [edge_attr]
    out = run(layer, x, whole, *edges)
    weight = torch.randn_like(out)
    grads = torch.autograd.grad((out * weight).sum(), [x, *parts], allow_unused=True, materialize_grads=True)
    graph = shard(whole, mesh, partition)
    mine = graph.scatter(x.detach(), dim=dim).requires_grad_()
    edges = [graph.scatter(term, "edges") for term in edges]
    found = run(layer, mine, graph, *edges)
    loss = (found * graph.scatter(weight, dim=dim)).sum()
    of_x, *of_parts = torch.autograd.grad(loss, [mine, *parts], allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(gathered(graph, [found, of_x], dim=dim), [out.detach(), grads[0]])
    torch.testing.assert_close(summed(of_parts), list(grads[1:]))


def halves(layer, x, graph):
    """Attention by `weigh` and `aggregate`."""
    x = layer(x).unflatten(-1, (2, 3))
    alpha = gattn.weigh(x, x, graph)
    return gattn.aggregate(alpha.cos() * (alpha != 0), x, graph).flatten(-2)


def sparse(mesh):
    torch.manual_seed(2)
    size, ranks = 23, mesh.size()
    edge_index = random_edge_index(size, size, 150, hub=0.3)
    whole = gattn.SparseGraph(edge_index, size, size)
    some = torch.randint(ranks, (size,))
    partitions = [None, some, torch.zeros(size, dtype=torch.int32), (some + 1) % ranks]
    attr = torch.randn(edge_index.size(1), 3, **F64)
    for partition in partitions:
        compare_layer(gattn.nn.GATConv(8, 3, heads=2), whole, mesh, partition=partition)
        compare_layer(
            gattn.nn.TransformerConv(8, 3, heads=2, edge_dim=3), whole, mesh, partition=partition, edge_attr=attr
        )
    compare_layer(gattn.nn.GATv2Conv(8, 3, heads=2, edge_dim=3), whole, mesh, partition=some, edge_attr=attr)
    compare_layer(gattn.nn.GATConv(8, 3, heads=2, edge_dim=3), whole, mesh, partition=some, edge_attr=attr)
    compare_layer(gattn.nn.GATConv(8, 3), whole, mesh, dim=1, batch=(2,))
    compare_layer(gattn.nn.AGNNConv(), whole, mesh)
    compare_layer(gattn.nn.ResGatedGraphConv(8, 3, edge_dim=3), whole, mesh, edge_attr=attr)
    compare_layer(
        gattn.nn.EGATConv(8, 3, 3, 3, 2), whole, mesh, partition=some, edge_attr=attr, run=lambda m, *args: m(*args)[0]
    )
    compare_layer(torch.nn.Linear(8, 6), whole, mesh, partition=some, run=halves)
    kinds = torch.randint(2, (size,)), torch.randint(3, (edge_index.size(1),))

    def heat(layer, x, graph, attr):
        is_part = x.size(0) < size
        of_node, of_edge = (graph.scatter(kinds[0]), graph.scatter(kinds[1], "edges")) if is_part else kinds
        return layer(x, graph, of_node, of_edge, attr)

    compare_layer(gattn.nn.HEATConv(8, 3, 2, 3, 4, 3, 5), whole, mesh, edge_attr=attr, run=heat)
    looped = gattn.SparseGraph(edge_index.flip(0), size, size, self_loops=True, flow="target_to_source")
    compare_layer(gattn.nn.GATv2Conv(8, 3, add_self_loops=False), looped, mesh, partition=some)
    compare_layer(gattn.nn.GATv2Conv(8, 3), looped, mesh)
    attention = gattn.nn.MultiheadAttention(8, 2, batch_first=True, position=gattn.nn.RotaryPositionalEncoding(4))
    compare_layer(attention, whole, mesh, run=lambda layer, x, graph: layer(x, x, x, graph=graph)[0])


def complete(mesh):
    for size, options in (
        (13, {}),
        (13, {"causal": True}),
        (13, {"window": (2, 0)}),
        (13, {"window": 3}),
        (13, {"window": (9, 1), "causal": True}),
        (2, {"causal": True}),
        (2, {"source_lengths": torch.tensor([2, 1, 0])}),
        (13, {"source_lengths": torch.tensor([13, 4, 0]), "target_lengths": torch.tensor([2, 13, 7])}),
    ):
        whole = gattn.CompleteGraph(size, **options)
        batch = (3,) if "source_lengths" in options else ()
        dim = len(batch)
        compare_layer(torch.nn.Linear(8, 6), whole, mesh, batch=batch, dim=dim, run=halves)
        for position in (None, gattn.nn.RotaryPositionalEncoding(4)):
            layer = gattn.nn.MultiheadAttention(8, 2, batch_first=True, position=position)
            compare_layer(layer, whole, mesh, dim=dim, batch=batch, run=lambda m, x, graph: m(x, x, x, graph=graph)[0])
        compare_layer(gattn.nn.GATv2Conv(8, 3, heads=2), whole, mesh, dim=dim, batch=batch)
    whole = gattn.CompleteGraph(11, causal=True)
    encoder = gattn.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    compare_layer(encoder, whole, mesh, dim=1, batch=(2,), run=lambda layer, x, graph: layer(x, graph=graph))
    compare_layer(  # checkpointed: processes without nodes repeat the exchange, too
        gattn.nn.MultiheadAttention(8, 2, batch_first=True),
        gattn.CompleteGraph(2),
        mesh,
        run=lambda layer, x, graph: checkpoint(lambda x: layer(x, x, x, graph=graph)[0], x, use_reentrant=False),
    )
    masks(mesh)
    cross(mesh, gattn.CompleteGraph(5, 12, causal=True))
    cross(mesh, gattn.CompleteGraph(12, 5, window=(1, 2)))
    cross(mesh, gattn.SparseGraph(random_edge_index(12, 5, 30), num_targets=5, num_sources=12))


def whole_numbers(mesh):
    """Layers and features that read a number of the whole graph: N, a norm of all queries, maxima of all keys."""
    torch.manual_seed(9)
    for size in (13, 1):
        whole = gattn.CompleteGraph(size)
        for norm in ("row", "frobenius"):
            layer = gattn.nn.SGFormerAttention(8, heads=2, head_channels=3, norm=norm)
            compare_layer(layer, whole, mesh, run=lambda m, x, graph: m(x, graph=graph))
        for kind in (gattn.nn.PerformerAttention, gattn.nn.PolynormerAttention):
            compare_layer(kind(8, 2, 4), whole, mesh, run=lambda m, x, graph: m(x, graph=graph))
    lengths = torch.tensor([13, 4, 0])
    for whole in (
        gattn.CompleteGraph(13),
        gattn.CompleteGraph(1),
        gattn.CompleteGraph(13, causal=True),
        gattn.CompleteGraph(13, window=2),
        gattn.CompleteGraph(13, source_lengths=lengths),
        gattn.SparseGraph(random_edge_index(13, 13, 60), 13, 13),
    ):
        batch = () if whole.source_lengths is None else (3,)
        compare_layer(gattn.features.Favor(3, 7), whole, mesh, features=18, dim=len(batch), batch=batch, run=performer)


def performer(features, x, graph):
    """Linear attention; keys differ in length, so that maxima come from one process."""
    query, key, value = x.unflatten(-1, (3, 2, 3)).unbind(-3)
    known = graph if graph.is_dense or graph.is_sharded else None
    query, key = features(query, key * key.sum(-1, keepdim=True).exp().clamp(max=5), known)
    law = gattn.Identity(normalize=True)
    return gattn.attend(query, key, value, graph, score=gattn.DotScore(1.0), distribution=law).flatten(-2)


def masks(mesh):
    """Masks of MultiheadAttention have a column for each source of all processes; so has a bias by positions."""
    torch.manual_seed(8)
    size, x = 9, torch.randn(2, 9, 8, **F64)
    pairs, padding = torch.rand(size, size) < 0.3, torch.rand(2, size) < 0.3
    pairs.fill_diagonal_(False)
    padding[:, 0] = False
    for options in ({}, {"causal": True}, {"window": (3, 1)}):
        whole = gattn.CompleteGraph(size, **options)
        graph = shard(whole, mesh)
        mine = graph.scatter(x, dim=1)
        for position in (None, gattn.nn.ALiBi(2)):
            attention = gattn.nn.MultiheadAttention(8, 2, batch_first=True, position=position).double()
            out, weights = attention(x, x, x, padding, attn_mask=pairs, graph=whole)
            found, parts = attention(mine, mine, mine, padding, attn_mask=graph.scatter(pairs), graph=graph)
            torch.testing.assert_close(graph.gather(found, dim=1), out)
            columns = graph.scatter(weights, dim=1)[..., graph.seen_ids]
            torch.testing.assert_close(parts, columns)


def cross(mesh, whole):
    """Different targets and sources; weights; a bias on complete graphs."""
    torch.manual_seed(3)
    query, key, value = (torch.randn(size, 2, 3, **F64) for size in (whole.num_targets, *[whole.num_sources] * 2))
    bias = torch.randn(2, whole.num_targets, whole.num_sources, **F64)
    is_complete = isinstance(whole, gattn.CompleteGraph)
    bias = bias if is_complete else bias[0, :, :1].expand(-1, 2)[whole.edge_index[1]]
    leaves = [x.requires_grad_() for x in (query, key, value, bias)]
    out = gattn.attend(*leaves[:3], whole, bias=bias)
    grads = torch.autograd.grad(out.square().sum(), leaves)
    graph = shard(whole, mesh)
    mine = [graph.scatter(query), graph.scatter(key, "sources"), graph.scatter(value, "sources")]
    mine.append(graph.scatter(bias, dim=1) if is_complete else graph.scatter(bias, "edges"))
    mine = [x.detach().requires_grad_() for x in mine]
    found, _ = gattn.attend(*mine[:3], graph, bias=mine[3], return_weights=True)
    grads_found = torch.autograd.grad(found.square().sum(), mine, allow_unused=True, materialize_grads=True)
    of_query, of_key, of_value, of_bias = grads_found
    results = [*gathered(graph, [found, of_query]), *gathered(graph, [of_key, of_value], "sources")]
    torch.testing.assert_close(results, [out.detach(), *grads[:3]])
    (of_bias,) = gathered(graph, [of_bias], *(("targets", 1) if is_complete else ("edges",)))
    torch.testing.assert_close(of_bias, grads[3])


def backends(mesh):
    """Every score, with all terms of edges, by kernels and by the reference."""
    torch.manual_seed(4)
    edge_index = random_edge_index(7, 6, 30, hub=0.4)
    whole = gattn.SparseGraph(edge_index, num_targets=6, num_sources=7)
    for score in SCORES:
        for backend in ("cpu", "reference"):
            call = make_call(score, edge_index, 7, 6, heads=2, channels=3, terms=TERMS, **F64)
            leaves = {name: x.detach().requires_grad_() for name, x in call.tensors.items()}
            out = call.attend(leaves, backend)[0]
            grads = torch.autograd.grad(out.square().sum(), list(leaves.values()))
            graph = shard(whole, mesh)
            rows = {"query": "targets", "key": "sources", "value": "sources", "vector": None}
            rows = {name: rows.get(name, "edges") for name in leaves}
            mine = {
                name: x.detach() if rows[name] is None else graph.scatter(x, rows[name]) for name, x in leaves.items()
            }
            mine = {name: x.detach().requires_grad_() for name, x in mine.items()}
            found = changed(call, graph=graph).attend(mine, backend)[0]
            found_grads = torch.autograd.grad(found.square().sum(), list(mine.values()))
            torch.testing.assert_close(gathered(graph, [found])[0], out.detach())
            for name, grad, wanted in zip(leaves, found_grads, grads, strict=True):
                whole_grad = summed([grad])[0] if rows[name] is None else graph.gather(grad, rows[name])
                torch.testing.assert_close(whole_grad, wanted)


def training(mesh):
    """Five steps with DistributedDataParallel: the loss of one process."""
    torch.manual_seed(5)
    size = 40
    edge_index, x, y = random_edge_index(size, size, 200), torch.randn(size, 8, **F64), torch.randint(3, (size,))
    alone = gattn.models.GAT(8, 4, 2, 3, heads=2, dropout=0.0).double()
    model = DistributedDataParallel(copy.deepcopy(alone))
    whole = gattn.SparseGraph(edge_index, size, size)
    graph = shard(whole, mesh)
    losses = []
    for module, features, labels, where, factor in (
        (alone, x, y, whole, 1),
        (model, graph.scatter(x), graph.scatter(y), graph, mesh.size()),
    ):
        optimizer = torch.optim.Adam(module.parameters(), 0.01)
        for _ in range(5):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(module(features, where), labels, reduction="sum")
            (loss * factor / size).backward()
            optimizer.step()
        losses.append(loss.detach())
    dist.all_reduce(losses[1])
    torch.testing.assert_close(losses[1], losses[0])


def traffic(mesh):
    """What is sent is the halo, and metis has a smaller one than blocks on a graph of communities."""
    torch.manual_seed(6)
    ranks, size = mesh.size(), 60 * mesh.size()
    ring = torch.stack([torch.arange(size), (torch.arange(size) + 1) % size])
    graph = shard(gattn.SparseGraph(ring, size, size), mesh)
    assert graph.traffic == (1, 1)
    assert "1 more fetched" in repr(graph)
    causal = shard(gattn.CompleteGraph(size, causal=True), mesh)
    assert causal.traffic == (60 * (ranks - 1 - mesh.get_local_rank()), 60 * mesh.get_local_rank())
    if find_spec("pymetis") is None:
        return
    shuffled = torch.randperm(size)[ring]
    by_blocks, by_metis = (shard(gattn.SparseGraph(shuffled, size, size), mesh, way) for way in (None, "metis"))
    assert by_metis.traffic.received < 10 < by_blocks.traffic.received
    compare_layer(gattn.nn.GATConv(8, 3), gattn.SparseGraph(shuffled, size, size), mesh, partition="metis")


NORMS = (
    *("batch_norm", "instance_norm", "layer_norm", "graph_norm"),
    *(GraphSizeNorm(), PairNorm(), MeanSubtractionNorm(), DiffGroupNorm(2, 2)),
)


def net(norm, **options):
    return gattn.models.GAT(2, 2, 2, heads=1, norm=norm, **options)


def mistakes(mesh):
    graph = gattn.SparseGraph(torch.tensor([[0, 1], [1, 2]]), 3, 3)
    sharded, n = shard(graph, mesh), 3
    x, adding_attention = sharded.scatter(torch.randn(3, 2)), gattn.nn.MultiheadAttention(2, 1, add_zero_attn=True)
    complete_graph, heads = shard(gattn.CompleteGraph(3), mesh), x.unsqueeze(1)
    centred = gattn.LocalGaussian(torch.zeros(len(x)), 1.0)
    for wrong, message in (
        (lambda: shard(graph, "cpu"), "mesh must be a torch.distributed DeviceMesh"),
        (lambda: shard(sharded, mesh), "sharded already"),
        (lambda: shard(torch.tensor([[0], [1]]), mesh), "make the graph with num_targets and num_sources"),
        (lambda: shard(graph, mesh, "random"), "partition must be a tensor, a pair of them, or 'metis'"),
        (lambda: shard(graph, mesh, torch.zeros(2, dtype=torch.int64)), r"integers \[3\] for the targets"),
        (lambda: shard(graph, mesh, torch.zeros(3)), "integers"),
        (lambda: shard(graph, mesh, torch.tensor([0, -1, 0])), "numbers from 0 to"),
        (lambda: shard(graph, mesh, torch.tensor([0, mesh.size(), 0])), "numbers from 0 to"),
        (lambda: shard(gattn.CompleteGraph(3), mesh, torch.zeros(3)), "contiguous blocks"),
        (lambda: shard(gattn.CompleteGraph.packed([1, 2]), mesh), "packed graph cannot be sharded"),
        (lambda: shard(gattn.CompleteGraph(3, causal=True, source_lengths=torch.tensor([1])), mesh), "with lengths"),
        (lambda: shard(gattn.CompleteGraph(3), mesh).with_causal(), "causal before it is sharded"),
        (lambda: shard(gattn.CompleteGraph(3 + dist.get_rank()), mesh), "graphs of the same size"),
        (lambda: sharded.scatter(torch.randn(3, 2), "rows"), "rows must be"),
        (lambda: shard(graph, mesh, torch.tensor([dist.get_rank(), 0, 0])), "the same partition"),
        (lambda: sharded.scatter(torch.randn(4, 2)), "the whole graph has 3 targets; got 4"),
        (lambda: sharded.scatter(torch.randn(3, 2), "edges"), "the whole graph has 2 edges; got 3"),
        (lambda: sharded.gather(torch.randn(9, 2)), "9 rows"),
        (lambda: gattn.nn.EGATConv(2, 2, 2, 2, 1)(x, complete_graph, x), "no list of edges"),
        (lambda: gattn.attend(heads, heads, heads, sharded, distribution=centred), "numbers of the sources"),
        (lambda: gattn.nn.GATConv(2, 2)(torch.randn(9, 2), sharded), "sources"),
        (lambda: gattn.nn.SuperGATConv(2, 2)(x, sharded), "sharded graphs are for"),
        (lambda: gattn.nn.GatedGCNConv(2, 2, 2)(x, sharded, x), "sharded graphs are for"),
        (lambda: gattn.nn.RGATConv(2, 2, 1)(x, sharded, torch.zeros(2)), "sharded graphs are for"),
        (lambda: gattn.nn.GPSConv(2, None)(x, sharded), "GPSConv also attends over all nodes"),
        (lambda: gattn.models.SGFormer(2, 2, 2)(x, sharded), "SGFormer also attends over all nodes"),
        (lambda: gattn.models.SGFormer(2, 2, 2, gnn_num_layers=0)(x, sharded), "SGFormer also attends over all nodes"),
        (lambda: gattn.models.Polynormer(2, 2, 2)(x, sharded), "Polynormer also attends over all nodes"),
        *((lambda norm=norm: net(norm)(x, sharded), "reads all nodes, of which a process has some") for norm in NORMS),
        (lambda: adding_attention(x, x, x, graph=shard(gattn.CompleteGraph(3), mesh)), "or a packed or sharded graph"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            wrong()
    net("batch_norm").eval()(x, sharded)
    net("layer_norm", norm_kwargs={"mode": "node"})(x, sharded)
    mesh_2d = init_device_mesh("cpu", (mesh.size() // 2, 2), mesh_dim_names=("a", "b"))
    with pytest.raises(ValueError, match=r"mesh\['a'\]"):
        shard(graph, mesh_2d)
    assert isinstance(shard(graph, mesh_2d["b"]), ShardedSparseGraph)
    with torch.inference_mode():
        made = shard(gattn.SparseGraph(torch.tensor([[0, 1], [1, 2]]), 3, 3), mesh)
    gattn.nn.GATConv(2, 2)(x, made).sum().backward()  # is trained with later
    assert isinstance(shard(gattn.CompleteGraph(n), mesh), ShardedCompleteGraph)


def tools(mesh):
    """PyTorch's own ways of training on several processes, on a Transformer: DDP, FSDP2 and its checkpoints, CP."""
    torch.manual_seed(7)
    alone = gattn.models.TransformerLM(11, channels=8, num_layers=2, heads=2, dropout=0.0, context=16).double()
    tokens = torch.randint(11, (2 * mesh.size(), 9))

    def losses(model, tokens, steps=3):
        optimizer, found = torch.optim.Adam(model.parameters(), 0.01), []
        for _ in range(steps):
            loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.detach().clone())
        found = torch.stack(found)
        dist.all_reduce(found)
        return found / mesh.size()

    mine = tokens[2 * mesh.get_local_rank() :][:2]
    by_ddp, by_fsdp = DistributedDataParallel(copy.deepcopy(alone)), fully_shard(copy.deepcopy(alone), mesh=mesh)
    expected = losses(alone, tokens)
    torch.testing.assert_close(losses(by_ddp, mine), expected)
    torch.testing.assert_close(losses(by_fsdp, mine), expected)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    torch.distributed.checkpoint.save({"model": by_fsdp.state_dict()}, checkpoint_id=folder[0])
    other = fully_shard(
        gattn.models.TransformerLM(11, channels=8, num_layers=2, heads=2, context=16).double(), mesh=mesh
    )
    state = {"model": other.state_dict()}
    torch.distributed.checkpoint.load(state, checkpoint_id=folder[0])
    other.load_state_dict(state["model"])
    torch.testing.assert_close(other.eval()(tokens), by_fsdp.eval()(tokens))
    x = torch.randn(2, 8, 8)
    attention = gattn.nn.MultiheadAttention(8, 2, batch_first=True)
    with (
        context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]),
        pytest.raises(ValueError, match=r"gattn\.distributed\.shard"),
    ):
        attention(x, x, x)
    assert attention(x, x, x)[0].shape == (2, 8, 8)


def work(rank, ranks, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        for check in (sparse, complete, whole_numbers, backends, training, tools, traffic, mistakes):
            check(mesh)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_compute_what_one_does(ranks, tmp_path):
    mp.spawn(work, args=(ranks, tmp_path / "store"), nprocs=ranks)


class Drawn(layers.Draw):
    """Inputs of a layer on a graph, which is sharded if there is a mesh."""

    ROWS = {"nodes": 13, "others": 17, "edges": 29, "edges2": 31, "edges3": 37}

    def __init__(self, mesh):
        super().__init__(**self.ROWS)
        self.mesh, self.owners = mesh, {}

    def edges(self, edges="edges", sources="nodes", targets="nodes", to_source=False):
        graph = gattn.SparseGraph(self.rows((sources, targets), edges), self.sizes[targets], self.sizes[sources])
        graph = graph if self.mesh is None else shard(graph, self.mesh)
        self.owners |= {name: (graph, rows) for name, rows in ((sources, "sources"), (targets, "targets"))}
        self.owners[edges] = graph, "edges"
        return graph

    def of_process(self, leaf):
        for drawn, axes in self._axes:
            if drawn is leaf:
                for dim, axis in enumerate(axes):
                    graph, rows = self.owners.get(axis, (None, ""))
                    leaf = leaf if graph is None else graph.scatter(leaf, rows, dim)
        return leaf

    def of_all(self, leaf, expected):
        """The rows of all processes; sizes tell which they are."""
        for dim, size in enumerate(expected.shape):
            for name, (graph, rows) in self.owners.items():
                if size == self.sizes[name]:
                    leaf = graph.gather(leaf, rows, dim)
        return leaf


#: Of those that take a list of edges. Others refuse shards.
TAKE_SHARDS = {
    *("AGNNConv", "DotGatConv", "DotGatConv of pairs", "EGATConv", "EdgeGATConv", "ExphormerConv", "ExphormerLayer"),
    *("GAT", "GATConv"),
    *(
        "GATConv of pairs",
        "GATv2Conv",
        "GCNConv",
        "GCNConv of batches",
        "HEATConv",
        "ResGatedGraphConv",
        "ResGatedGraphConv of batches",
    ),
    "TransformerConv",
}


@pytest.mark.parametrize("name", [*layers.LAYERS, *layers.MODELS])
def test_every_layer_takes_a_shard_or_refuses_it(name):
    """What a layer reads of a whole graph, it must not read of a part."""
    _, inputs, call = layers.row(name)
    draw = Drawn(None)
    given, layer = inputs(draw), layers.made(name)
    if not draw.owners:
        assert name not in TAKE_SHARDS
        return
    expected = layers.tensors(call(layer, *given)) if name in TAKE_SHARDS else []

    def run(mesh):
        own = Drawn(mesh)
        found = layers.tensors(call(copy.deepcopy(layer), *tree_map(own.of_process, inputs(own))))
        return [own.of_all(x.detach(), y) for x, y in zip(found, expected, strict=True)]

    if name in TAKE_SHARDS:
        for found in on_processes(2, run):
            torch.testing.assert_close(found, expected)
        return
    with pytest.raises((TypeError, ValueError)) as error:
        on_processes(2, run)
    takes_only_tensors = name in ("Graphormer", "LPFormer", "RRWPEncoder")
    assert takes_only_tensors or "sharded graphs" in str(error.value)
