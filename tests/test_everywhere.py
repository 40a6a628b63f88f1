"""What holds for every public layer, model, graph and function, with any sizes, devices and kinds of integers."""

import contextlib
import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch_geometric.data import Batch, Data

import gattn
from gattn import graphs, transforms
from tests import layers
from tests.cases import mostly_slow
from tests.layers import LAYERS, MODELS, NO_LAYERS, SIZES, Draw, made, row, tensors

NAMES = list(LAYERS | MODELS)
MANY = 20  # nodes with which linear attention takes the way for many

#: Layers that refuse what has nothing in it, and how.
NEEDS_SOMETHING = {"Seq2Seq": "at least one token"}
#: Layers whose results have as many rows as values of indices say, or that must look at such values for another reason.
READS_VALUES = {
    *("AGNNConv", "DNAConv", "FAConv", "GAT", "GATConv", "GATv2Conv", "HEATConv", "PointTransformerConv"),  # self-loops
    *("GCNConv", "GCNConv of batches", "Polynormer", "SuperGATConv"),  # likewise
    *("GPSConv", "GPSConv of FAVOR+", "GraphMultisetTransformer", "PatchTransformerAggregation"),  # sizes of sets
    *("SetTransformerAggregation", "SGFormer", "Graphormer", "PathEncoder", "HAN"),  # likewise
    *("AttentionPooling", "AttentionalAggregation", "Set2Set", "SoftmaxAggregation"),  # PyG reads the last set
    "LPFormer",  # PyG's sparse matrices
    *("RelationalTransformerLayer", "RelationalAttention of earlier nodes"),  # sizes of columns, and of equal times
}


def test_every_public_layer_and_model_is_in_the_table():
    public = {*gattn.nn.__all__, *gattn.models.__all__}
    assert {name.split(" ")[0] for name in NAMES} == public - NO_LAYERS.keys()


def results(name, sizes=None, again=False, layer=None, **options):
    """Outputs, their gradients, and the gradients of these if asked for."""
    draw = Draw(requires_grad=True, **options, **(sizes or {}))
    inputs, layer = row(name).inputs(draw), made(name) if layer is None else layer
    torch.manual_seed(0)
    found = tensors(row(name).call(layer, *inputs))
    leaves = [*(leaf for leaf in tensors(inputs) if leaf.requires_grad), *layer.parameters()]
    for _ in range(1 + again):
        asked = [part.sin().sum() for part in found if part.requires_grad]
        if asked and leaves:
            kept = {"create_graph": again, "materialize_grads": True, "allow_unused": True}
            found = [*found, *torch.autograd.grad(sum(asked), leaves, **kept)]
    return [part.detach() for part in found]


def assert_same(found, expected):
    assert all(part.isfinite().all() for part in found)
    size = max((float(part.abs().max()) for part in expected if part.numel()), default=0.0)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9 * max(size, 1.0))


def cases():
    """Layers with all sizes 0, 1 and 2, and with each alone 0 beside larger ones, where that is possible."""
    some = [(name, dict.fromkeys(SIZES, size)) for name in NAMES for size in range(3)]
    more = []
    for name in NAMES:
        draw = Draw()
        row(name).inputs(draw)
        for axis in sorted({axis for _, axes in draw._axes for axis in axes if isinstance(axis, str)}):
            sizes = {"nodes": MANY, axis: 0}
            with contextlib.suppress(AssertionError):  # an edge needs nodes
                row(name).inputs(Draw(**sizes))
                more.append((name, sizes))
    return [*some, *mostly_slow(more)]


def described(value):
    if isinstance(value, str):
        return value
    return ",".join(f"{axis}={value[axis]}" for axis in value) if len(value) < len(SIZES) else str(value["nodes"])


@pytest.mark.filterwarnings("ignore:std..:UserWarning")  # of PyG's norm in LPFormer
@pytest.mark.parametrize(("name", "sizes"), cases(), ids=described)
def test_zero_one_two_of_everything(name, sizes):
    """Outputs and gradients as in the reference, finite, and those of gradients."""
    if name in NEEDS_SOMETHING and (SIZES | sizes)["memory"] == 0:
        with pytest.raises(ValueError, match=NEEDS_SOMETHING[name]):
            results(name, sizes)
        return
    # PyTorch's embeddings of nothing cannot be differentiated twice.
    again = 0 not in sizes.values() or not any(isinstance(part, nn.Embedding) for part in made(name).modules())
    found = results(name, sizes, again)
    with gattn.backend("reference"):
        assert_same(found, results(name, sizes, again))


#: Layers with parts that nothing calls if there is no step, source, edge or word.
STEPS = {"AdditiveAttention", "HAN", "HANConv", "LSTMN"}


@pytest.mark.filterwarnings("ignore:std..:UserWarning")
@pytest.mark.parametrize("name", sorted(set(NAMES) - NEEDS_SOMETHING.keys() - STEPS))
def test_a_process_with_nothing_joins_the_others(name):
    """DistributedDataParallel waits for the gradient of each parameter from each process."""
    trained = []
    for sizes in ({}, dict.fromkeys(SIZES, 0)):
        layer, draw = made(name).train(), Draw(requires_grad=True, **sizes)
        found = [part for part in tensors(row(name).call(layer, *row(name).inputs(draw))) if part.requires_grad]
        if found:
            sum(part.sum() for part in found).backward()
        trained.append({name for name, part in layer.named_parameters() if part.grad is not None})
    assert trained[0] == trained[1]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "LPFormer"])  # PyG makes matrices on this device
def test_beside_a_default_device(name):
    """All that is made inside of a layer is where its inputs are."""
    for sizes in ({}, {"nodes": MANY}):
        expected = results(name, sizes)
        with torch.device("meta"):
            torch.testing.assert_close(results(name, sizes), expected)


@pytest.mark.parametrize("name", mostly_slow(NAMES, 3))
def test_on_the_meta_device(name):
    """Made there or moved there, a layer gives the right shapes, or PyTorch says that there are no numbers to read."""
    with torch.device("meta"):
        born = row(name).make().double().eval()
    assert {part.device.type for part in (*born.parameters(), *born.buffers())} <= {"meta"}
    for sizes in ({}, dict.fromkeys(SIZES, 1)):
        for layer in (made(name, device="meta"), born):
            inputs = row(name).inputs(Draw(device="meta", **sizes))
            if name in READS_VALUES:
                with pytest.raises(RuntimeError, match="(?i)meta|nonzero"):
                    row(name).call(layer, *inputs)
                continue
            found, expected = tensors(row(name).call(layer, *inputs)), results(name, sizes)
            assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected[: len(found)]]


#: PyG hands their sizes to PyTorch's LSTM and PyG's aggregations, which take integers of Python alone.
OF_PYTHON = {"JumpingKnowledge", "MultiAggregation", "Set2Set"}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OF_PYTHON])
def test_with_integers_of_numpy(name, monkeypatch):
    expected = results(name)
    for constant in ("F", "D", "H", "TOKENS", "TIME", "WALK"):
        monkeypatch.setattr(layers, constant, np.int64(getattr(layers, constant)))
    monkeypatch.setattr(Draw, "number", lambda self, axis: np.int64(self.sizes[axis]))
    torch.testing.assert_close(results(name), expected, rtol=0, atol=0)


def randn(*size):
    return torch.randn(size, dtype=torch.double, device="cpu")


def edges(n):
    """A ring of n nodes."""
    return torch.stack([torch.arange(n, device="cpu"), torch.arange(1, n + 1, device="cpu") % max(n, 1)])


def batch(n):
    return torch.zeros(n, dtype=torch.int64, device="cpu")


def data(n):
    return Data(randn(n, 3), edges(n), num_nodes=n)


def both(n):
    with torch.device("cpu"):  # PyG's batches are made where numbers are
        return Batch.from_data_list([data(n), data(1)])


def attended(n, graph, **options):
    return gattn.attend(randn(n, 2, 3), randn(n, 2, 3), randn(n, 2, 3), graph, **options)


def weighed(n):
    weights = gattn.weigh(randn(n, 2, 3), randn(n, 2, 3), edges(n))
    return weights, gattn.aggregate(weights, randn(n, 2, 3), edges(n))


def typed(n):
    graph = gattn.TypedGraph(edges(n), batch(n), n, {"a": n})
    return attended(n, graph, edge=gattn.Typed(randn(max(n, 1), 2, 3), graph.edge_type))


def merged(n):
    outs, sums = zip(*(attended(n, gattn.CompleteGraph(n), return_lse=True) for _ in range(2)), strict=True)
    return gattn.merge(outs, sums)


def hetero(n):
    return gattn.TypedGraph.from_hetero({("a", "to", "b"): edges(n)}, {"a": n, "b": n})


def favored(n):
    graph = gattn.CompleteGraph(n)
    return gattn.features.favor(randn(n, 2, 3), randn(n, 2, 3), randn(4, 3), graph)


def tables(n):
    order, *found = graphs.from_tables(batch(n), batch(n), edges(n), batch=batch(n))
    return order, [graph.listed(torch.device("cpu")) for graph in found]


#: Calls of public functions with n of everything, by the names that they call. The last sizes may be integers of NumPy.
CALLS = {
    "attend SparseGraph": lambda n: attended(n, gattn.SparseGraph(edges(n), n, n)),
    "attend Projected": lambda n: attended(n, edges(n), edge=gattn.Projected(randn(n, 2), randn(2, 3, 2))),
    "attend CompleteGraph SparseBias": lambda n: attended(
        n, gattn.CompleteGraph(n, n), bias=gattn.SparseBias(edges(n), randn(n, 2))
    ),
    "attend PairBias": lambda n: attended(
        n, gattn.CompleteGraph(n, n), bias=gattn.PairBias(lambda a, b: (a @ b.mT).unsqueeze(-1), randn(n, 3))
    ),
    "attend LinearPairBias": lambda n: attended(
        n, gattn.CompleteGraph(n, n), bias=gattn.LinearPairBias(randn(n, n, 3), randn(3, 2))
    ),
    "attend BucketBias": lambda n: attended(
        n,
        gattn.CompleteGraph(n),
        bias=gattn.BucketBias(torch.zeros(n, n, dtype=torch.int64, device="cpu"), randn(1, 2)),
    ),
    "dropout": lambda n: gattn.dropout(randn(n, 3)),
    "attend window": lambda n: attended(n, gattn.CompleteGraph(n, window=(n, n))),
    "attend packed": lambda n: attended(n, gattn.CompleteGraph.packed([n], causal=True)),
    "attend packed nothing": lambda n: attended(0, gattn.CompleteGraph.packed([0] * int(n))),
    **{
        f"attend {law}": lambda n, law=law: attended(n, edges(n), distribution=getattr(gattn, law)())
        for law in ("Entmax15", "Hard", "Identity", "Sigmoid", "Softmax", "Sparsemax", "Tanh")
    },
    "attend TopK": lambda n: attended(n, edges(n), distribution=gattn.TopK(n + 1)),
    "attend WithinTypes": lambda n: attended(n, edges(n), distribution=gattn.WithinTypes(batch(n), num_types=n + 1)),
    "attend LocalGaussian": lambda n: attended(
        n, gattn.CompleteGraph(n), distribution=gattn.LocalGaussian(randn(n), 1.0)
    ),
    **{
        f"attend {score}": lambda n, make=make: attended(n, edges(n), score=make())
        for score, make in {
            "AdditiveScore": lambda: gattn.AdditiveScore(randn(2, 3)),
            "CosineScore": lambda: gattn.CosineScore(),
            "DotScore": lambda: gattn.DotScore(),
        }.items()
    },
    "attend GATScore": lambda n: gattn.attend(
        randn(n, 2), randn(n, 2), randn(n, 2, 3), edges(n), score=gattn.GATScore()
    ),
    "weigh aggregate": weighed,
    "softmax": lambda n: gattn.softmax(randn(n, 2), batch(n), n),
    "merge": merged,
    "explain_call": lambda n: torch.tensor(
        [len(gattn.explain_call(*[randn(n, 2, 3)] * 3, x).way) for x in (edges(n), gattn.CompleteGraph(n))],
        device="cpu",
    ),
    "TypedGraph Typed": typed,
    "TypedGraph from_hetero": hetero,
    "as_graph": lambda n: graphs.as_graph(edges(n)).resolve(n, n),
    "earlier_than": lambda n: graphs.earlier_than(randn(n), n + 1),
    "from_tables": tables,
    "top_blocks BlockGraph": lambda n: attended(n, graphs.top_blocks(randn(n, 2, 3), randn(n, 2, 3), block=1, k=n + 1)),
    "expander": lambda n: graphs.expander(n, n + 1),
    "grid": lambda n: graphs.grid(n, n, radius=n + 1, batch_size=n),
    "k_hop": lambda n: graphs.k_hop(edges(n), n + 1, n, loop=True),
    "knn": lambda n: graphs.knn(randn(n, 2), n + 1, batch(n)),
    "line_graph": lambda n: graphs.line_graph(edges(n), n),
    "radius": lambda n: graphs.radius(randn(n, 2), 1.0, batch(n), max_num_neighbors=n + 1),
    "reorder": lambda n: graphs.reorder(edges(n), n),
    "union": lambda n: graphs.union(edges(n), edges(n), num_nodes=n, typed=True),
    "with_virtual_nodes": lambda n: graphs.with_virtual_nodes(edges(n), n, batch(n), count=n + 1, batch_size=n + 1),
    "within_blocks": lambda n: graphs.within_blocks(edges(n), batch(n), randn(n, 2)),
    "Degrees": lambda n: transforms.Degrees(n + 1)(data(n)),
    "LaplacianEigenvectors": lambda n: transforms.LaplacianEigenvectors(n + 1, eigenvalues=True)(data(n)),
    "RandomWalkPairs": lambda n: transforms.RandomWalkPairs(n + 1)(data(n)),
    "Reorder": lambda n: transforms.Reorder()(data(n)),
    "ShortestPathBuckets": lambda n: transforms.ShortestPathBuckets(n + 1, paths=True)(data(n)),
    "ShortestPathBuckets of a batch": lambda n: transforms.ShortestPathBuckets(2)(both(n)),
    "laplacian": lambda n: gattn.nn.GraphPositionalEncoding("laplacian", 2, 3).compute(edges(n), n).abs(),
    "random_walk": lambda n: gattn.nn.GraphPositionalEncoding("random_walk", 2, 3).compute(edges(n), n),
    "favor": favored,
    **{
        name: lambda n, name=name: getattr(gattn.features, name)(randn(n, 2, 3))
        for name in ("cosine", "elu1", "relu", "sigmoid", "softplus")
    },
    "orthogonal_features Favor": lambda n: gattn.features.orthogonal_features(n + 1, n + 1, device="cpu"),
}
#: Calls that take no tensors, so that their graphs are on the default device.
MADE_THERE = {"expander", "grid"}
#: Names that are no functions of sizes: bases, what others return, and settings.
NO_CALLS = {
    *("Attention", "Bias", "Distribution", "Gate", "Score", "Graph", "GraphLike"),
    *("FLOWS", "EdgeList", "Edges", "Reordered", "TableGraphs"),
    *("backend", "check_finite", "datasets", "models", "nn", "record_attention"),
}


def test_every_public_function_is_called():
    public = {*gattn.__all__, *graphs.__all__, *transforms.__all__, *gattn.features.__all__} - NO_CALLS
    assert public <= {word for name in CALLS for word in name.split(" ")}


def contents(found):
    """The tensors of a result, of graphs and data too."""
    if isinstance(found, Data):
        found = {name: value for name, value in sorted(found.to_dict().items()) if isinstance(value, torch.Tensor)}
    if isinstance(found, (tuple, list, dict)):
        parts = found.values() if isinstance(found, dict) else found
        return list(itertools.chain.from_iterable(map(contents, parts)))
    if isinstance(found, graphs.Graph):
        return [found.edge_index, torch.tensor([found.num_targets, found.num_sources], device="cpu")]
    return [found] if isinstance(found, torch.Tensor) else []


@pytest.mark.parametrize("n", [0, 1, 2, 5])
@pytest.mark.parametrize("name", CALLS)
def test_functions_of_zero_one_two(name, n):
    """The same with integers of NumPy, and beside a default device."""

    def called(n):
        torch.manual_seed(0)
        return contents(CALLS[name](n))

    expected = called(n)
    assert expected
    assert all(part.isfinite().all() for part in expected)
    if name not in MADE_THERE:
        with torch.device("meta"):
            torch.testing.assert_close(called(n), expected, rtol=0, atol=0)
    torch.testing.assert_close(called(np.int64(n)), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["SparseBias", "BucketBias"])
def test_biases_of_many_nodes_beside_a_default_device(kind):
    """Those pairs too that are computed by themselves, because their bias takes a target's weight away."""
    n, found = 300, []
    pairs, buckets = edges(n), torch.arange(n * n, device="cpu").view(n, n) % 3
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        leaves = [randn(n, 2, 3).requires_grad_() for _ in range(3)]
        values = (20 * randn(n if kind == "SparseBias" else 3, 2)).requires_grad_()
        with torch.device(device):
            bias = gattn.SparseBias(pairs, values) if kind == "SparseBias" else gattn.BucketBias(buckets, values)
            out = gattn.attend(*leaves, gattn.CompleteGraph(n), bias=bias)
            found.append([out, *torch.autograd.grad(out.sin().sum(), [*leaves, values])])
    torch.testing.assert_close(*found, rtol=0, atol=0)


WRONG = {
    "floats": lambda batch: batch.double(),
    "booleans": lambda batch: batch > 0,
    "negative": lambda batch: batch - 1,
    "too many": lambda batch: torch.cat([batch, batch[-1:]]),
    "too few": lambda batch: batch[:-1],
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(
    "name",
    [name for name in NAMES if row(name).inputs in (layers.sets, layers.of_graphs) and name != "MultiAggregation"],
)
def test_the_graph_of_each_node_is_checked(name, wrong):
    """In words of gattn, before anything is computed; MultiAggregation is PyG's."""
    inputs = list(row(name).inputs(Draw()))
    place = 2 if row(name).inputs is layers.of_graphs else 1
    inputs[place] = WRONG[wrong](inputs[place])
    with pytest.raises((ValueError, IndexError, TypeError), match=r"(batch|index) must"):
        made(name)(*inputs)
