"""Graphs of a user's own kind work everywhere, and as lists of the same edges do."""

import inspect
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gattn
from gattn import CompleteGraph, SparseGraph
from gattn import nn as layers
from gattn.distributed import shard
from gattn.graphs import Graph
from gattn.visualize.inputs import edge_list, matrices, unpack
from tests.cases import DISTRIBUTIONS
from tests.layers import LAYERS, Draw, F, called, made, tensors

N, M = 6, 8  # nodes, sources of cross-attention


class Ring(Graph):
    """Each target attends to its own position, the one before and the second after, around the ring."""

    def __init__(self, num_targets: int, num_sources: int, flow: str = "source_to_target"):
        self.num_targets, self.num_sources, self.flow = num_targets, num_sources, flow
        target = torch.arange(num_targets).repeat(3)
        source = (target + torch.tensor([-1, 0, 2]).repeat_interleave(num_targets)) % max(num_sources, 1)
        self._edge_index = torch.stack([source, target] if flow == "source_to_target" else [target, source])

    @property
    def edge_index(self) -> Tensor:
        return self._edge_index


class Edges(Graph):
    """Any edges, in a class with nothing but the abstract methods."""

    def __init__(self, edge_index: Tensor, num_targets: int | None, num_sources: int | None):
        self._edge_index, self.num_targets, self.num_sources = edge_index, num_targets, num_sources

    @property
    def edge_index(self) -> Tensor:
        return self._edge_index


class Unsized(Edges):
    """A graph with as many nodes as there are features."""

    def __init__(self, edge_index: Tensor, num_targets: int | None, num_sources: int | None):
        super().__init__(edge_index, None, None)


class KeptEdges(Edges):
    """A graph that stays what it is inside of layers."""

    def resolve(self, *args: object, **kwargs: object) -> Graph:
        return self


class KeptRing(Ring):
    """Likewise."""

    resolve = KeptEdges.resolve


KINDS = [Edges, Unsized, KeptEdges]
RINGS = [Ring, KeptRing]

#: Layers whose graph is an option, or that `LAYERS` does not call with a graph.
WITH_GRAPH = {
    "MultiheadAttention": lambda x, g: ((x, x, x), {"graph": g(N, N)}),
    "MultiheadAttentionBlock": lambda x, g: ((x, x.cos()), {"graph": g(N, N)}),
    "SetAttentionBlock": lambda x, g: ((x,), {"graph": g(N, N)}),
    "TransformerEncoderLayer": lambda x, g: ((x,), {"graph": g(N, N)}),
    "TransformerDecoderLayer": lambda x, g: ((x, x[:4].cos()), {"graph": g(N, N), "memory_graph": g(N, 4)}),
    "TransformerEncoder": lambda x, g: ((x,), {"graph": g(N, N)}),
    "TransformerDecoder": lambda x, g: ((x, x[:4].cos()), {"graph": g(N, N), "memory_graph": g(N, 4)}),
    "Transformer": lambda x, g: (
        (x, x[:4].cos()),
        {"src_graph": g(N, N), "tgt_graph": g(4, 4), "memory_graph": g(4, N)},
    ),
}
#: Layers in which all nodes attend to all, and what takes edges as tensors, or passes them to another layer.
COMPLETE = {
    "BiasedMHA",
    "GraphMultisetTransformer",
    "GraphormerLayer",
    "PerformerAttention",
    "PerformerProjection",
    "PolynormerAttention",
    "RRWPEncoder",
    "SGFormerAttention",
}


class Graphs(Draw):
    """Draws graphs of a kind."""

    def __init__(self, kind: type):
        super().__init__(requires_grad=True)
        self.kind, self.count = kind, 0

    def edges(
        self, edges: str = "edges", sources: str = "nodes", targets: str = "nodes", to_source: bool = False
    ) -> Graph:
        self.count += 1
        return self.kind(super().edges(edges, sources, targets), self.sizes[targets], self.sizes[sources])


def with_graphs(name: str, kind: type) -> tuple[tuple, int]:
    """The inputs with graphs in place of edges, and the number of these graphs."""
    draw = Graphs(kind)
    return LAYERS[name].inputs(draw), draw.count


def results(
    layer: nn.Module, leaves: list[Tensor], arguments: tuple, options: dict, call: Callable[..., object] = called
) -> list[Tensor]:
    """Outputs and gradients."""
    torch.manual_seed(2)
    outs = [out for out in tensors(call(layer, *arguments, **options)) if out.requires_grad]
    loss = sum((out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out).cos()).sum() for out in outs)
    return [
        *outs,
        *torch.autograd.grad(loss, [*leaves, *layer.parameters()], materialize_grads=True, allow_unused=True),
    ]


def assert_same(found: object, expected: object) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def takes_graph(name: str) -> bool:
    parameters = inspect.signature(getattr(layers, name).forward).parameters
    return name not in COMPLETE and any("edge_index" in parameter or "graph" in parameter for parameter in parameters)


CLASSES = {name for name in layers.__all__ if issubclass(getattr(layers, name), nn.Module) and takes_graph(name)}
ON_EDGES = [name for name in LAYERS if name not in COMPLETE and with_graphs(name, SparseGraph)[1]]


def test_every_layer_with_a_graph_is_tested():
    assert {name.split(" ")[0] for name in ON_EDGES} | WITH_GRAPH.keys() == CLASSES


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ON_EDGES)
def test_every_layer(name, kind):
    found = []
    for graph in (SparseGraph, kind):
        inputs, _ = with_graphs(name, graph)
        leaves = [leaf for leaf in tensors(inputs) if leaf.requires_grad]
        found.append(results(made(name), leaves, inputs, {}, LAYERS[name].call))
    assert_same(*found)


@pytest.mark.parametrize("kind", RINGS)
@pytest.mark.parametrize("name", WITH_GRAPH)
def test_layers_of_transformers(name, kind):
    found = []
    for graph in (as_list, kind):
        x = features()
        found.append(results(made(name), [x], *WITH_GRAPH[name](x, graph)))
    assert_same(*found)


def features() -> Tensor:
    return torch.linspace(-2, 2, N * F, dtype=torch.double).view(N, F).sin().requires_grad_()


def as_list(num_targets: int, num_sources: int, flow: str = "source_to_target") -> SparseGraph:
    return SparseGraph(Ring(num_targets, num_sources, flow).edge_index, num_targets, num_sources, flow=flow)


#: Options of layers: how to make one, and its call with features of nodes and of the ring's edges.
OPTIONS = {
    "self-loops": (lambda: layers.GATConv(F, 4, 2, edge_dim=3), lambda x, e: (x,), lambda x, e: (e,)),
    "loops of ones": (
        lambda: layers.GATv2Conv(F, 4, 2, edge_dim=3, fill_value=1.0),
        lambda x, e: (x,),
        lambda x, e: (e,),
    ),
    "no self-loops": (lambda: layers.GATConv(F, 4, 2, add_self_loops=False), lambda x, e: (x,), lambda x, e: ()),
    "weights": (
        lambda: layers.GATConv(F, 4, 2),
        lambda x, e: (x,),
        lambda x, e: {"return_attention_weights": True},
    ),
    "weights of transformer": (
        lambda: layers.TransformerConv(F, 4, 2, edge_dim=3),
        lambda x, e: (torch.stack([x, x.cos()]),),
        lambda x, e: {"edge_attr": e, "return_attention_weights": True},
    ),
    "batches": (lambda: layers.GATv2Conv(F, 4, 2), lambda x, e: (torch.stack([x, x.cos()]),), lambda x, e: ()),
    "targets without features": (
        lambda: layers.GATConv((F, F), 4, 2, add_self_loops=False),
        lambda x, e: ((x, None),),
        lambda x, e: {"size": (N, N)},
    ),
    "maximum": (lambda: layers.GATConv(F, 4, 2, aggr="max"), lambda x, e: (x,), lambda x, e: ()),
    "weights of FAConv": (
        lambda: layers.FAConv(F),
        lambda x, e: (x, x),
        lambda x, e: {"return_attention_weights": True},
    ),
    "FAConv that is not normalized": (
        lambda: layers.FAConv(F, normalize=False),
        lambda x, e: (x, x),
        lambda x, e: {"edge_weight": e[:, 0].cos()},
    ),
    "FAConv that keeps its graph": (lambda: layers.FAConv(F, cached=True), lambda x, e: (x, x), lambda x, e: ()),
    "maximum of FAConv": (lambda: layers.FAConv(F, aggr="max"), lambda x, e: (x, x), lambda x, e: ()),
    "DNAConv without normalization": (
        lambda: layers.DNAConv(F, heads=2, normalize=False),
        lambda x, e: (torch.stack([x, x.cos()], 1),),
        lambda x, e: (e[:, 0].cos(),),
    ),
    "product": (
        lambda: layers.GeneralConv(F, 4, 3, attention=True, attention_type="dot_product", heads=2),
        lambda x, e: (x,),
        lambda x, e: (e,),
    ),
    "SuperGATConv that samples": (lambda: layers.SuperGATConv(F, 4, 2), lambda x, e: (x,), lambda x, e: ()),
    "SuperGATConv of SD": (
        lambda: layers.SuperGATConv(F, 4, 2, attention_type="SD"),
        lambda x, e: (x,),
        lambda x, e: {"neg_edge_index": torch.tensor([[0, 1], [3, 4]])},
    ),
    "hyperedges": (lambda: layers.HypergraphConv(F, 4), lambda x, e: (x,), lambda x, e: ()),
}


@pytest.mark.parametrize("kind", RINGS)
@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_layers(option, kind):
    make, before, after = OPTIONS[option]
    found = []
    for flow in ("source_to_target", "target_to_source") if option != "hyperedges" else ("source_to_target",):
        for graph in (as_list, kind):
            torch.manual_seed(0)
            layer, x = make().double(), features()
            edge_attr = torch.linspace(-1, 1, 3 * 3 * N, dtype=x.dtype).view(-1, 3).requires_grad_()
            options = after(x, edge_attr)
            arguments, options = (options, {}) if isinstance(options, tuple) else ((), options)
            given = (*before(x, edge_attr), graph(N, N, flow), *arguments)
            found.append(results(layer, [x, edge_attr], given, options))
        assert_same(*found[-2:])


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("kind", RINGS)
class TestAttend:
    @pytest.mark.parametrize("batch", [(), (2,)])
    @pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
    def test_terms_of_edges(self, kind, backend, batch, flow):
        torch.manual_seed(0)
        query, key, value = (torch.randn(*batch, rows, 2, 4, dtype=torch.double) for rows in (N, M, M))
        edge, edge_value = (torch.randn(*batch, 3 * N, 2, 4, dtype=torch.double) for _ in range(2))
        bias, mask = torch.randn(*batch, 3 * N, 2, dtype=torch.double), torch.rand(3 * N, 1) < 0.7
        leaves = [part.requires_grad_() for part in (query, key, value, edge, bias, edge_value)]
        options = {"edge": edge, "bias": bias, "mask": mask, "backend": backend}
        found = []
        for graph in (as_list, kind):
            outs = gattn.attend(
                query, key, value, graph(N, M, flow), return_weights=True, edge_value=edge_value, **options
            )
            logits = gattn.weigh(query, key, graph(N, M, flow), distribution=None, **options)
            summed = gattn.aggregate(outs[1], value, graph(N, M, flow), edge_value=edge_value, backend=backend)
            outs = *outs, logits.masked_fill(logits == -torch.inf, 0.0), summed
            found.append([*outs, *torch.autograd.grad(sum(out.cos().sum() for out in outs), leaves)])
        assert_same(*found)

    def test_distributions(self, kind, backend):
        x = torch.randn(N, 2, 4, dtype=torch.double)
        for distribution in (make(None) for make in DISTRIBUTIONS.values()):
            outs = [
                gattn.attend(x, x, x, graph(N, N), distribution=distribution, backend=backend)
                for graph in (as_list, kind)
            ]
            assert_same(*outs)

    def test_types_of_edges(self, kind, backend):
        x, table = torch.randn(N, 2, 4), torch.randn(3, 2, 4)
        edge_type = torch.arange(3 * N) % 3
        options = {"edge": gattn.Typed(table, edge_type), "backend": backend}
        assert_same(*[gattn.attend(x, x, x, graph(N, N), **options) for graph in (as_list, kind)])

    def test_masks_of_multihead_attention(self, kind, backend):
        pairs, numbers = torch.rand(N, M) < 0.3, torch.randn(2 * 2, N, M, dtype=torch.double)
        ends = torch.arange(M) >= torch.tensor([[M], [5]])
        for position in (None, layers.RotaryPositionalEncoding(4), layers.ALiBi(2), layers.RelativePositionBias(2, 4)):
            for options in (
                {"is_causal": True},
                {"attn_mask": pairs},
                {"attn_mask": numbers, "key_padding_mask": ends, "average_attn_weights": False},
                {"key_padding_mask": ends, "is_causal": True, "need_weights": False},
                {"key_padding_mask": ends.double(), "is_causal": True},
            ):
                found = []
                for graph in (as_list, kind):
                    torch.manual_seed(0)
                    layer = layers.MultiheadAttention(F, 2, batch_first=True, position=position).double()
                    query, key = (torch.randn(2, n, F, dtype=torch.double, requires_grad=True) for n in (N, M))
                    with gattn.backend(backend):
                        given = (layer, [query, key], (query, key, key), {"graph": graph(N, M), **options})
                        found.append(results(*given))
                assert_same(*found)


@pytest.mark.parametrize("kind", RINGS)
def test_causal_means_no_later_source(kind):
    layer, x = layers.MultiheadAttention(F, 2), torch.randn(N, F)
    later = torch.ones(N, N).bool().triu(1)
    out, weights = layer(x, x, x, graph=kind(N, N), is_causal=True)
    assert_same((out, weights), layer(x, x, x, graph=kind(N, N), attn_mask=later))
    source, target = Ring(N, N).edge_index
    assert (weights[source > target] == 0).all()
    assert (weights[source <= target] > 0).any()


@pytest.mark.parametrize("kind", RINGS)
def test_what_is_not_possible_says_why(kind):
    x = torch.randn(N, F)
    with pytest.raises(ValueError, match="no nodes"):
        layers.MultiheadAttention(F, 2, add_zero_attn=True)(x, x, x, graph=kind(N, N))
    ragged = torch.nested.nested_tensor([x, x[:3]], layout=torch.jagged)
    with pytest.raises(ValueError, match="each sequence attends to itself"):
        layers.MultiheadAttention(F, 2, batch_first=True)(ragged, ragged, ragged, graph=kind(N, N))


def test_sizes_and_indices_are_checked():
    x = torch.randn(N, 2, 4)
    with pytest.raises(ValueError, match="the numbers must agree"):
        gattn.attend(x, x, x, Ring(N, M))
    with pytest.raises(IndexError):
        gattn.attend(x, x, x, Edges(torch.tensor([[0], [N]]), N, N))


def test_a_list_of_edges_has_no_lengths():
    with pytest.raises(ValueError, match="needs a list of edges"):
        CompleteGraph(3, source_lengths=torch.tensor([2, 3])).listed()
    ring, x = Ring(3, 3), torch.randn(2, 3, 2, 4)
    ring.source_lengths = torch.tensor([2, 3])
    with pytest.raises(ValueError, match="needs a list of edges"):
        gattn.attend(x, x, x, ring)
    for graph in (CompleteGraph(3, causal=True), CompleteGraph.packed([1, 2])):
        assert torch.equal(graph.listed().edge_index, graph.edge_index)


@pytest.mark.parametrize("kind", RINGS)
def test_records_and_pictures(kind):
    layer, x = layers.GATConv(F, 4, 2, add_self_loops=False), torch.randn(N, F)
    with gattn.record_attention(layer) as records:
        layer(x, kind(N, N))
    (record,) = records[""]
    assert torch.equal(record.edge_index, Ring(N, N).edge_index)
    whole = matrices(*unpack(record))
    torch.testing.assert_close(whole.sum(-1), torch.ones(2, N).double())
    edges, sizes = edge_list(kind(N, M))
    assert torch.equal(edges, Ring(N, M).edge_index)
    assert sizes == (M, N)


def test_sharding():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh, x = dist.init_device_mesh("cpu", (1,)), torch.randn(N, 2, 4)
        graph = shard(Ring(N, N), mesh)
        assert_same(gattn.attend(x, x, x, graph), gattn.attend(x, x, x, Ring(N, N)))
    finally:
        dist.destroy_process_group()


def test_compiled():
    torch._dynamo.reset()
    layer, x, graph = layers.GATConv(F, 4, 2), torch.randn(N, F), Ring(N, N)
    compiled = torch.compile(lambda x: layer(x, graph), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), layer(x, graph))
