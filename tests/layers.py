"""Every public layer and model, one row each: how to make it, and its inputs for any sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch_geometric.data import Data

import gattn
from gattn import models
from gattn import nn as layers

F, D, H = 8, 5, 2  # channels of nodes, channels of edges, heads
TOKENS, TIME, WALK = 11, 3, 3
NODE_TYPES = ["a", "b"]
RELATIONS = [("a", "to", "b"), ("b", "to", "a"), ("a", "of", "a")]

#: What a size is where nothing else is asked for.
SIZES = {
    "nodes": 6,
    "others": 4,
    "edges": 8,
    "edges2": 7,
    "edges3": 5,
    "graphs": 3,
    "batch": 2,
    "length": 6,
    "memory": 4,
    "words": 5,
}


class Draw:
    """Draws inputs, the same ones on every device. A dimension is a number, or the name of a size: an open one.

    Args:
        dtype: The type of what is no integer.
        device: Where the inputs are.
        requires_grad: Whether what is no integer gets a gradient.
        **sizes: Sizes that differ from `SIZES`.
    """

    def __init__(
        self, dtype: torch.dtype = torch.double, device: str = "cpu", requires_grad: bool = False, **sizes: int
    ):
        self.dtype, self.device, self.requires_grad = dtype, device, requires_grad
        self.sizes = SIZES | sizes
        self.constants: set[str] = set()
        """The sizes that are given as numbers, which exported programs keep."""
        self._axes: list[tuple[Tensor, tuple[int | str, ...]]] = []
        self._generator = torch.Generator().manual_seed(1)

    def number(self, name: str) -> int:
        self.constants.add(name)
        return self.sizes[name]

    def floats(self, *axes: int | str) -> Tensor:
        drawn = torch.randn(self._shape(axes), generator=self._generator, dtype=torch.double, device="cpu")
        return self._kept(drawn.to(self.dtype), axes, self.requires_grad)

    def positive(self, *axes: int | str) -> Tensor:
        """Numbers from 0.5 to 1.5 that get no gradient, such as weights whose sums are divided by."""
        drawn = torch.rand(self._shape(axes), generator=self._generator, dtype=torch.double, device="cpu") + 0.5
        return self._kept(drawn.to(self.dtype), axes)

    def integers(self, below: int | str, *axes: int | str, least: int = 0) -> Tensor:
        return self._kept(self._integers(below, axes, least), axes)

    def booleans(self, *axes: int | str) -> Tensor:
        drawn = torch.rand(self._shape(axes), generator=self._generator, device="cpu") < 0.6
        return self._kept(drawn, axes)

    def lengths(self, most: str, *axes: int | str) -> Tensor:
        """Numbers up to a size, which do not grow along the last dimension."""
        drawn = torch.randint(0, self.sizes[most] + 1, self._shape(axes), generator=self._generator, device="cpu")
        return self._kept(drawn.sort(-1, descending=True)[0], axes)

    def edges(
        self, edges: str = "edges", sources: str = "nodes", targets: str = "nodes", to_source: bool = False
    ) -> Any:
        """A list of edges, targets above sources if asked for. Whoever wants another form of graph overrides this."""
        return self.rows((targets, sources) if to_source else (sources, targets), edges)

    def rows(self, below: tuple[str, str], edges: str) -> Tensor:
        """Two rows of indices."""
        return self._kept(torch.stack([self._integers(end, (edges,)) for end in below]), (2, edges))

    def graph_of_node(self) -> Tensor:
        """The graph of each node, sorted; the last graph has a node if there is one."""
        graph = self._integers("graphs", ("nodes",)).sort()[0]
        if graph.numel():
            graph[-1] = self.sizes["graphs"] - 1
        return self._kept(graph, ("nodes",))

    def open(self, inputs: Any) -> Any:
        """For each input, the names of its open dimensions: what `torch.export` takes once each name is a `Dim`."""

        def named(leaf: Any) -> dict[int, str] | None:
            for drawn, axes in self._axes:
                if drawn is leaf:
                    return {number: axis for number, axis in enumerate(axes) if isinstance(axis, str)}
            return None

        return tree_map(named, inputs)

    def _integers(self, below: int | str, axes: tuple[int | str, ...], least: int = 0) -> Tensor:
        end, shape = self.sizes[below] if isinstance(below, str) else below, self._shape(axes)
        drawn = torch.randint(least, max(end, least + 1), shape, generator=self._generator, device="cpu")
        assert end > least or drawn.numel() == 0, f"{axes} need a number from {least} to less than {end}"
        return drawn

    def _shape(self, axes: tuple[int | str, ...]) -> list[int]:
        return [self.sizes[axis] if isinstance(axis, str) else axis for axis in axes]

    def _kept(self, drawn: Tensor, axes: tuple[int | str, ...], requires_grad: bool = False) -> Tensor:
        moved = drawn.to(self.device).requires_grad_(requires_grad)
        self._axes.append((moved, axes))
        return moved


def called(layer: nn.Module, *inputs: Any, **options: Any) -> Any:
    return layer(*inputs, **options)


class Layer(NamedTuple):
    """A row of the table."""

    make: Callable[[], nn.Module]
    inputs: Callable[[Draw], tuple[Any, ...]]
    """Draws the arguments of a call: trees of tensors, numbers and `None`."""
    call: Callable[..., Any] = called
    """Calls the layer with these, where its arguments are no trees of tensors."""


def on_edges(d: Draw) -> tuple[Any, ...]:
    return d.floats("nodes", F), d.edges()


def with_features(d: Draw) -> tuple[Any, ...]:
    return d.floats("nodes", F), d.edges(), d.floats("edges", D)


def from_others(d: Draw) -> tuple[Any, ...]:
    """A bipartite graph."""
    return (d.floats("others", F), d.floats("nodes", F)), d.edges(sources="others")


def batched_features(d: Draw) -> tuple[Any, ...]:
    return d.floats("batch", "nodes", F), d.edges(), d.floats("edges", D)


def of_types(d: Draw, *batch: str) -> tuple[Any, ...]:
    ends = {"a": "nodes", "b": "others"}
    lists = zip(RELATIONS, ("edges", "edges2", "edges3"), strict=True)
    return (
        {name: d.floats(*batch, size, F) for name, size in ends.items()},
        {kind: d.edges(edges, ends[kind[0]], ends[kind[-1]]) for kind, edges in lists},
    )


def of_graphs(d: Draw) -> tuple[Any, ...]:
    return d.floats("nodes", F), d.edges(), d.graph_of_node()


def sets(d: Draw) -> tuple[Any, ...]:
    """Of an aggregation: the elements, their set, and the number of sets."""
    return d.floats("nodes", F), d.graph_of_node(), None, d.number("graphs")


def of_batch(d: Draw) -> tuple[Any, ...]:
    return (d.floats("batch", "nodes", F),)


def of_pairs(d: Draw) -> tuple[Any, ...]:
    return (d.floats("nodes", "nodes", F),)


def with_biases(d: Draw) -> tuple[Any, ...]:
    return *of_batch(d), d.floats("batch", "nodes", "nodes", H)


def sequence(d: Draw) -> tuple[Any, ...]:
    return (d.floats("length", "batch", F),)


def with_memory(d: Draw) -> tuple[Any, ...]:
    return d.floats("length", "batch", F), d.floats("memory", "batch", F)


def of_memory(d: Draw) -> tuple[Any, ...]:
    """Of attention in recurrent networks, which has the batch first."""
    return d.floats("batch", "length", F), d.floats("batch", "memory", F)


def distances(d: Draw) -> tuple[Any, ...]:
    return (d.integers(7, "length", "memory", least=-6),)


def tokens(d: Draw) -> tuple[Any, ...]:
    return (d.integers(TOKENS, "batch", "length"),)


def pairs_of_tokens(d: Draw) -> tuple[Any, ...]:
    return d.integers(TOKENS, "batch", "memory"), d.integers(TOKENS, "batch", "length")


def global_polynormer() -> nn.Module:
    model = models.Polynormer(F, 6, 3, local_layers=2, global_layers=1)
    model.use_global()
    return model


def relational_call(layer: nn.Module, x: Tensor, column: Tensor, *lists: Any) -> Tensor:
    order = column.argsort(stable=True)
    columns = gattn.CompleteGraph.packed(batch=column[order])
    return layer(x, gattn.graphs.TableGraphs(order, columns, *lists, gattn.CompleteGraph(column.size(0))))


def graphormer_call(layer: nn.Module, x: Tensor, edge_index: Tensor, buckets: Tensor) -> Tensor:
    return layer(Data(x, edge_index, pair_buckets=buckets.flatten()))


def lpformer_call(layer: nn.Module, pairs: Tensor, x: Tensor, edges: Tensor, scores: Tensor) -> Tensor:
    return layer(pairs, x, edges, scores.detach().abs().to_sparse())


#: By name of the class, with a word more where a class has several rows.
LAYERS = {
    "AGNNConv": Layer(lambda: layers.AGNNConv(), on_edges),
    "ALiBi": Layer(lambda: layers.ALiBi(H), distances),
    "AdditiveAttention": Layer(lambda: layers.AdditiveAttention(F, F, 4), of_memory),
    "AttentionPairBias": Layer(
        lambda: layers.AttentionPairBias(F, D, H), lambda d: (*of_batch(d), d.floats("nodes", "nodes", D))
    ),
    "AttentionPooling": Layer(lambda: layers.AttentionPooling(F), sets),
    "AttentionalAggregation": Layer(lambda: layers.AttentionalAggregation(nn.Linear(F, 1), nn.Linear(F, 4)), sets),
    "BiasedMHA": Layer(lambda: layers.BiasedMHA(F, H), with_biases),
    "DNAConv": Layer(lambda: layers.DNAConv(F, heads=H), lambda d: (d.floats("nodes", 2, F), d.edges())),
    "DegreeEncoder": Layer(lambda: layers.DegreeEncoder(4, F), lambda d: (d.integers(7, 2, "nodes"),)),
    "DenseGATConv": Layer(
        lambda: layers.DenseGATConv(F, 4, H), lambda d: (*of_batch(d), d.booleans("batch", "nodes", "nodes"))
    ),
    "DotGatConv": Layer(lambda: layers.DotGatConv(F, 4, H), on_edges),
    "DotGatConv of pairs": Layer(lambda: layers.DotGatConv((F, F), 4, H), from_others),
    "Dropout": Layer(lambda: layers.Dropout(0.5), lambda d: (d.floats("nodes", F),)),
    "DotProductAttention": Layer(
        lambda: layers.DotProductAttention(), lambda d: (*of_memory(d), d.lengths("memory", "batch"))
    ),
    "EGATConv": Layer(lambda: layers.EGATConv(F, D, 4, 3, H), with_features),
    "EGTBlock": Layer(lambda: layers.EGTBlock(F, D, H), with_features),
    "EGTConv": Layer(lambda: layers.EGTConv(F, D, H), with_features),
    "EGTLayer": Layer(
        lambda: layers.EGTLayer(F, D, H, 1), lambda d: (*of_batch(d), d.floats("batch", "nodes", "nodes", D))
    ),
    "EdgeGATConv": Layer(lambda: layers.EdgeGATConv(F, D, 4, H), with_features),
    "ExphormerConv": Layer(lambda: layers.ExphormerConv(F, D, H), with_features),
    "ExphormerLayer": Layer(lambda: layers.ExphormerLayer(F, D, H, layer_norm=True, batch_norm=False), with_features),
    "FAConv": Layer(lambda: layers.FAConv(F), lambda d: (d.floats("nodes", F), *on_edges(d))),
    "GATConv": Layer(lambda: layers.GATConv(F, 4, H, edge_dim=D, residual=True), with_features),
    "GATConv of pairs": Layer(lambda: layers.GATConv((F, F), 4, H, add_self_loops=False), from_others),
    "GATEConv": Layer(lambda: layers.GATEConv(F, F, D), with_features),
    "GATEConv of batches": Layer(lambda: layers.GATEConv(F, F, D), batched_features),
    "GATv2Conv": Layer(lambda: layers.GATv2Conv(F, 4, H, edge_dim=D, residual=True), with_features),
    "GCNConv": Layer(lambda: layers.GCNConv(F, 4), lambda d: (*on_edges(d), d.positive("edges"))),
    "GCNConv of batches": Layer(lambda: layers.GCNConv(F, 4), lambda d: (d.floats("batch", "nodes", F), d.edges())),
    "GPSConv": Layer(lambda: layers.GPSConv(F, layers.GATConv(F, F), H, norm="layer_norm"), of_graphs),
    "GPSConv of Performer": Layer(lambda: layers.GPSConv(F, None, H, attn_type="performer"), on_edges),
    "GPSConv of FAVOR+": Layer(lambda: layers.GPSConv(F, None, H, norm=None, attn_type="favor"), of_graphs),
    "GRITConv": Layer(lambda: layers.GRITConv(F, D, 4, H), with_features),
    "GRITLayer": Layer(
        lambda: layers.GRITLayer(F, H, layer_norm=True, batch_norm=False),
        lambda d: (*on_edges(d), d.floats("edges", F)),
    ),
    "GatedGCNConv": Layer(lambda: layers.GatedGCNConv(F, D, 4), with_features),
    "GeneralAttention": Layer(lambda: layers.GeneralAttention(F, F), of_memory),
    "GeneralConv": Layer(
        lambda: layers.GeneralConv(F, 4, D, attention=True, heads=H, directed_msg=False), with_features
    ),
    "GraphAttentionEmbedding": Layer(
        lambda: layers.GraphAttentionEmbedding(F, 4, D, layers.TemporalEncoding(TIME)),
        lambda d: (*on_edges(d)[:1], d.integers(9, "nodes"), d.edges(), d.integers(9, "edges"), d.floats("edges", D)),
    ),
    "GraphMultisetTransformer": Layer(lambda: layers.GraphMultisetTransformer(F, 3, heads=H), sets),
    "GraphPositionalEncoding": Layer(
        lambda: layers.GraphPositionalEncoding("random_walk", WALK, F),
        lambda d: (d.floats("nodes", F), d.floats("nodes", WALK)),
    ),
    "GraphormerLayer": Layer(lambda: layers.GraphormerLayer(F, 16, H), with_biases),
    "HANConv": Layer(lambda: layers.HANConv(F, 4, (NODE_TYPES, RELATIONS), H), of_types),
    "HEATConv": Layer(
        lambda: layers.HEATConv(F, 4, 2, 3, 6, D, 3, H),
        lambda d: (*on_edges(d), d.integers(2, "nodes"), d.integers(3, "edges"), d.floats("edges", D)),
    ),
    "HGTConv": Layer(lambda: layers.HGTConv(F, 4, (NODE_TYPES, RELATIONS), H), of_types),
    "HGTConv of batches": Layer(
        lambda: layers.HGTConv(F, 4, (NODE_TYPES, RELATIONS[::-1]), H), lambda d: of_types(d, "batch")
    ),
    "HardAttention": Layer(lambda: layers.HardAttention(layers.AdditiveAttention(F, F)), of_memory),
    "HypergraphConv": Layer(
        lambda: layers.HypergraphConv(F, 4, use_attention=True, heads=H),
        lambda d: (d.floats("nodes", F), d.edges(targets="others"), None, d.floats("others", F)),
    ),
    "InducedSetAttentionBlock": Layer(lambda: layers.InducedSetAttentionBlock(F, 3, H), of_batch),
    "JumpingKnowledge": Layer(
        lambda: layers.JumpingKnowledge("lstm", F, 2), lambda d: ([d.floats("nodes", F), d.floats("nodes", F)],)
    ),
    "LPAttLayer": Layer(
        lambda: layers.LPAttLayer(F // 2, 4, F),
        lambda d: (
            d.edges(targets="others", to_source=True),
            d.floats("others", F),
            d.floats("nodes", F),
            d.floats("edges", F),
        ),
    ),
    "LSTMNCell": Layer(lambda: layers.LSTMNCell(F, 4), lambda d: (d.floats("batch", F),)),
    "LearnedPositionalEncoding": Layer(
        lambda: layers.LearnedPositionalEncoding(64, F), lambda d: (d.floats("batch", "length", F), 2)
    ),
    "LocalAttention": Layer(
        lambda: layers.LocalAttention(layers.GeneralAttention(F, F), 2, "predictive", query_channels=F), of_memory
    ),
    "MultiAggregation": Layer(
        lambda: layers.MultiAggregation(
            ["mean", "max"], mode="attn", mode_kwargs={"in_channels": F, "out_channels": 4, "num_heads": H}
        ),
        sets,
    ),
    "MultiheadAttention": Layer(lambda: layers.MultiheadAttention(F, H), lambda d: sequence(d) * 3),
    "MultiheadAttention of memory": Layer(
        lambda: layers.MultiheadAttention(F, H, vdim=D),
        lambda d: (*with_memory(d), d.floats("memory", "batch", D), d.booleans("batch", "memory")),
    ),
    "MultiheadAttentionBlock": Layer(
        lambda: layers.MultiheadAttentionBlock(F, H), lambda d: (*of_batch(d), d.floats("batch", "others", F))
    ),
    "PatchTransformerAggregation": Layer(
        lambda: layers.PatchTransformerAggregation(F, 4, patch_size=2, hidden_channels=F, heads=H), sets
    ),
    "PathEncoder": Layer(
        lambda: layers.PathEncoder(2, D, H),
        lambda d: (d.integers("edges", "nodes", "nodes", 2, least=-1), d.floats("edges", D)),
    ),
    "PerformerAttention": Layer(lambda: layers.PerformerAttention(F, H, 4), of_batch),
    "PerformerProjection": Layer(
        lambda: layers.PerformerProjection(4), lambda d: tuple(d.floats("batch", H, "nodes", 4) for _ in range(3))
    ),
    "PointTransformerConv": Layer(
        lambda: layers.PointTransformerConv(F, 4, attn_nn=nn.Linear(4, 4)),
        lambda d: (d.floats("nodes", F), d.floats("nodes", 3), d.edges()),
    ),
    "PolynormerAttention": Layer(lambda: layers.PolynormerAttention(F, H, 4, qk_shared=False), of_batch),
    "PoolingByMultiheadAttention": Layer(lambda: layers.PoolingByMultiheadAttention(F, 3, H), of_batch),
    "RGATConv": Layer(
        lambda: layers.RGATConv(F, 4, 2, heads=H, edge_dim=D),
        lambda d: (*on_edges(d), d.integers(2, "edges"), d.floats("edges", D)),
    ),
    "ReinforceLoss": Layer(
        lambda: layers.ReinforceLoss(entropy_weight=0.1), lambda d: tuple(d.floats("batch") for _ in range(3))
    ),
    "RelationalAttention": Layer(
        lambda: layers.RelationalAttention(F, H, TIME),
        lambda d: (d.floats("nodes", F), d.edges(), d.integers(TIME, "edges")),
    ),
    "RelationalAttention of earlier nodes": Layer(
        lambda: layers.RelationalAttention(F, H, TIME),
        lambda d: (d.floats("nodes", F), d.edges(), d.integers(TIME, "edges"), d.integers(4, "nodes")),
        lambda layer, x, edges, types, times: layer(x, edges, types, earlier_than=times),
    ),
    "RelationalTransformerLayer": Layer(
        lambda: layers.RelationalTransformerLayer(F, H),
        lambda d: (d.floats("nodes", F), d.integers(3, "nodes"), d.edges(), d.edges("edges2")),
        relational_call,
    ),
    "RelativePositionBias": Layer(lambda: layers.RelativePositionBias(H, 3), distances),
    "RRWPEncoder": Layer(
        lambda: layers.RRWPEncoder(3, F),
        lambda d: (d.floats("nodes", F), d.floats("nodes", 3), d.floats("edges", 3), d.edges()),
    ),
    "ResGatedGraphConv": Layer(lambda: layers.ResGatedGraphConv(F, 4, edge_dim=D), with_features),
    "ResGatedGraphConv of batches": Layer(lambda: layers.ResGatedGraphConv(F, 4, edge_dim=D), batched_features),
    "RotaryPositionalEncoding": Layer(
        lambda: layers.RotaryPositionalEncoding(4), lambda d: (d.floats("batch", "length", H, 4),)
    ),
    "SGFormerAttention": Layer(lambda: layers.SGFormerAttention(F, H, 4), of_batch),
    "Set2Set": Layer(lambda: layers.Set2Set(F, 2), sets),
    "SetAttentionBlock": Layer(lambda: layers.SetAttentionBlock(F, H), of_batch),
    "SetTransformerAggregation": Layer(lambda: layers.SetTransformerAggregation(F, 2, heads=H), sets),
    "SinusoidalPositionalEncoding": Layer(
        lambda: layers.SinusoidalPositionalEncoding(F), lambda d: (d.floats("batch", "length", F), 2)
    ),
    "SoftmaxAggregation": Layer(lambda: layers.SoftmaxAggregation(learn=True), sets),
    "SpatialEncoder": Layer(
        lambda: layers.SpatialEncoder(3, H), lambda d: (d.integers(6, "batch", "nodes", "nodes", least=-1),)
    ),
    "SuperGATConv": Layer(lambda: layers.SuperGATConv(F, 4, H), on_edges),
    "TGATConv": Layer(
        lambda: layers.TGATConv(F, 6, TIME, H, edge_dim=D),
        lambda d: (*on_edges(d), d.floats("edges"), d.floats("edges", D)),
    ),
    "TemporalEncoding": Layer(lambda: layers.TemporalEncoding(TIME), lambda d: (d.floats("edges"),)),
    "TriangleAttention": Layer(lambda: layers.TriangleAttention(F, H, 4), of_pairs),
    "TriangleMultiplication": Layer(lambda: layers.TriangleMultiplication(F, 6), of_pairs),
    "Transformer": Layer(lambda: layers.Transformer(F, H, 1, 1, 16), lambda d: with_memory(d)[::-1]),
    "TransformerConv": Layer(lambda: layers.TransformerConv(F, 4, H, beta=True, edge_dim=D), with_features),
    "TransformerDecoder": Layer(
        lambda: layers.TransformerDecoder(layers.TransformerDecoderLayer(F, H, 16), 2), with_memory
    ),
    "TransformerDecoderLayer": Layer(lambda: layers.TransformerDecoderLayer(F, H, 16), with_memory),
    "TransformerEncoder": Layer(
        lambda: layers.TransformerEncoder(layers.TransformerEncoderLayer(F, H, 16), 2), sequence
    ),
    "TransformerEncoderLayer": Layer(lambda: layers.TransformerEncoderLayer(F, H, 16), sequence),
}

MODELS = {
    "AttentiveFP": Layer(
        lambda: models.AttentiveFP(F, 6, 3, D, 2, 2),
        lambda d: (*with_features(d), d.graph_of_node(), d.number("graphs")),
    ),
    "GAT": Layer(lambda: models.GAT(F, 8, 2, 3, heads=H), on_edges),
    "Graphormer": Layer(
        lambda: models.Graphormer(F, 8, 3, 2, H, cutoff=2, max_degree=2),
        lambda d: (*on_edges(d), d.integers(5, "nodes", "nodes")),
        graphormer_call,
    ),
    "HAN": Layer(
        lambda: models.HAN(TOKENS, 3, 6, 4, 5),
        lambda d: (d.integers(TOKENS, "batch", "length", "words"), d.lengths("words", "batch", "length")),
    ),
    "LPFormer": Layer(
        lambda: models.LPFormer(F, 8),
        lambda d: (d.rows(("nodes", "nodes"), "batch"), *on_edges(d), d.floats("nodes", "nodes")),
        lpformer_call,
    ),
    "LSTMN": Layer(lambda: models.LSTMN(TOKENS, 8, 2), tokens),
    "Polynormer": Layer(global_polynormer, of_graphs),
    "SGFormer": Layer(lambda: models.SGFormer(F, 6, 3), of_graphs),
    "Seq2Seq": Layer(lambda: models.Seq2Seq(TOKENS, TOKENS, 6, 6), pairs_of_tokens),
    "TransformerLM": Layer(lambda: models.TransformerLM(TOKENS, 8, 2, H), tokens),
    "TransformerSeq2Seq": Layer(lambda: models.TransformerSeq2Seq(TOKENS, TOKENS, 8, 1, H), pairs_of_tokens),
}

#: Public names that are no layers, and why.
NO_LAYERS = {
    "KeyValueCache": "holds the keys and values of layers",
    "MLPBias": "makes a bias",
    "MemoryAttention": "is the common base of layers",
    "RadialBias": "makes a bias",
    "RelativePosition": "is the common base of encodings",
}


def row(name: str) -> Layer:
    return LAYERS[name] if name in LAYERS else MODELS[name]


def made(name: str, dtype: torch.dtype = torch.double, device: str = "cpu") -> nn.Module:
    """A layer in evaluation, with numbers of one seed."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        layer = row(name).make().to(dtype).eval()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn_like(parameter) / 2)
    return layer.to(device)


def tensors(found: Any) -> list[Tensor]:
    """The tensors of a result, in their order."""
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]


class Called(nn.Module):
    """A row of the table of layers as a module that takes the row's inputs."""

    def __init__(self, name):
        super().__init__()
        self.layer, self.call = made(name), row(name).call

    def forward(self, *inputs):
        return self.call(self.layer, *inputs)
