"""Every explainer of PyG on every layer: what it finds on PyG's own layers, where those can be explained."""

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.explain import (
    AttentionExplainer,
    CaptumExplainer,
    DummyExplainer,
    Explainer,
    GNNExplainer,
    GraphMaskExplainer,
    ModelConfig,
    PGExplainer,
)
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks
from torch_geometric.inspector import Inspector

from gattn import nn
from gattn.testing import random_edge_index

pytestmark = pytest.mark.filterwarnings(
    "ignore:Setting backward hooks on ReLU", "ignore:Input Tensor . did not already"
)  # Captum's

NODES, F, CLASSES = 8, 5, 3
LAYERS = ["GATConv", "GATv2Conv", "TransformerConv"]
CONFIG = ModelConfig(mode="multiclass_classification", task_level="node", return_type="raw")


class Net(torch.nn.Module):
    def __init__(self, library, layer, **options):
        super().__init__()
        torch.manual_seed(12)
        self.convs = torch.nn.ModuleList(
            [getattr(library, layer)(F, 6, **options), getattr(library, layer)(6, CLASSES, **options)]
        )

    def forward(self, x, edge_index):
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return x


@pytest.fixture(autouse=True)
def double_precision():
    """Where a gradient is zero, explainers' Adam makes steps of rounding errors: here they are smaller than its ε."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(params=LAYERS)
def layer(request):
    return request.param


@pytest.fixture
def graph():
    return torch.randn(NODES, F), random_edge_index(NODES, num_edges=20)


def explain(model, algorithm, graph, **options):
    torch.manual_seed(3)
    explainer = Explainer(model, algorithm, **{"explanation_type": "model", "model_config": CONFIG, **options})
    explanation = explainer(*graph, index=2)
    return {name: explanation[name] for name in ("node_mask", "edge_mask") if name in explanation}


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (lambda: AttentionExplainer(), {"edge_mask_type": "object"}),
        (lambda: DummyExplainer(), {"edge_mask_type": "object", "node_mask_type": "attributes"}),
        (lambda: GNNExplainer(epochs=5), {"edge_mask_type": "object", "node_mask_type": "attributes"}),
        (
            lambda: GraphMaskExplainer(2, epochs=3, log=False),
            {"edge_mask_type": "object", "node_mask_type": "attributes"},
        ),
    ],
    ids=["attention", "dummy", "gnn", "graph mask"],
)
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_agrees_with_pygs_layers(layer, graph, algorithm, options, flow):
    kinds = {"flow": flow}
    if layer == "GATv2Conv":  # explained, PyG's own mixes up its two projections with target_to_source
        kinds["share_weights"] = True
    found = explain(Net(nn, layer, **kinds), algorithm(), graph, **options)
    assert found
    try:
        expected = explain(Net(pyg, layer, **kinds), algorithm(), graph, **options)
    except (TypeError, ValueError):  # PyG's TransformerConv tells GraphMask no x_i and x_j
        assert layer == "TransformerConv"
        assert isinstance(algorithm(), GraphMaskExplainer)
    else:
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mechanism", ["across-relation", "within-relation"])
def test_graph_mask_where_targets_have_no_vectors(graph, mechanism):
    """RGATConv's sources are pairs of a relation and a node."""

    class RelationalNet(Net):
        def forward(self, x, edge_index, edge_type):
            for conv in self.convs:
                x = conv(x, edge_index, edge_type).relu()
            return x

    model = RelationalNet(nn, "RGATConv", num_relations=3, attention_mechanism=mechanism)
    explainer = Explainer(
        model,
        GraphMaskExplainer(2, epochs=3, log=False),
        explanation_type="model",
        model_config=CONFIG,
        edge_mask_type="object",
        node_mask_type="attributes",
    )
    x, edge_index = graph
    explanation = explainer(x, edge_index, edge_type=torch.randint(3, edge_index.shape[1:]), index=2)
    assert explanation.edge_mask.shape == edge_index.shape[1:]
    assert explanation.edge_mask.isfinite().all()
    assert model(x, edge_index, torch.zeros_like(edge_index[0])).isfinite().all()


@pytest.mark.parametrize("method", CaptumExplainer.SUPPORTED_METHODS)
def test_captum_agrees_with_pygs_layers(layer, graph, method):
    options = {"edge_mask_type": "object", "node_mask_type": "attributes"}
    samples = {"n_samples": 2} if method == "ShapleyValueSampling" else {}
    found, expected = (
        explain(Net(library, layer, heads=3, concat=False), CaptumExplainer(method, **samples), graph, **options)
        for library in (nn, pyg)
    )
    assert found["edge_mask"].count_nonzero() > 0
    torch.testing.assert_close(found, expected)


class SequenceNet(torch.nn.Module):
    """Blocks in which a graph layer and attention over all nodes, or over the same edges, stand side by side."""

    def __init__(self, library, on_edges=False):
        super().__init__()
        torch.manual_seed(12)
        self.on_edges = on_edges
        self.conv = library.GATConv(F, 4)
        self.block = library.GPSConv(4, library.GATConv(4, 2, heads=2), heads=2, norm=None, dropout=0.0)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True) if on_edges else None
        self.lin = torch.nn.Linear(4, CLASSES)

    def forward(self, x, edge_index):
        x = self.block(self.conv(x, edge_index).relu(), edge_index)
        if self.layer is not None:
            x = self.layer(x, graph=edge_index)
        return self.lin(x)


@pytest.mark.parametrize(
    ("algorithm", "node_mask"),
    [
        (AttentionExplainer, None),
        (DummyExplainer, "attributes"),
        (lambda: GNNExplainer(epochs=5), "attributes"),
        (lambda: CaptumExplainer("Saliency"), "attributes"),
    ],
    ids=["attention", "dummy", "gnn", "captum"],
)
def test_blocks_agree_with_pygs(graph, algorithm, node_mask):
    options = {"edge_mask_type": "object", "node_mask_type": node_mask}
    found, expected = (explain(SequenceNet(library).eval(), algorithm(), graph, **options) for library in (nn, pyg))
    for name, mask in expected.items():
        # PyG takes the attention over all nodes for one more hop, so that edges farther away count, too.
        near = mask != 0
        assert near.any()
        torch.testing.assert_close(found[name][near], mask[near], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("algorithm", [lambda: GNNExplainer(epochs=5), lambda: CaptumExplainer("Saliency")])
def test_sequence_layers_on_edges_can_be_explained(graph, algorithm):
    options = {"edge_mask_type": "object", "node_mask_type": "attributes"}
    model = SequenceNet(nn, on_edges=True).eval()
    before = model(*graph)
    found = explain(model, algorithm(), graph, **options)
    assert found["edge_mask"].shape == (graph[1].size(1),)
    assert found["edge_mask"].count_nonzero() > 0
    torch.testing.assert_close(model(*graph), before)  # nothing of the explainer stays


def test_a_complete_graphs_pairs_are_not_the_edges_that_are_explained():
    torch.manual_seed(12)
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(NODES, 4)
    expected = attention(x, x, x)[0]
    attention.explain, attention._edge_mask, attention._apply_sigmoid = True, torch.zeros(20), True
    torch.testing.assert_close(attention(x, x, x)[0], expected)
    assert attention.explain


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")  # in PyG itself
def test_pg_explainer(layer, graph):
    masks = []
    for library in (nn, pyg):
        model, algorithm = Net(library, layer), PGExplainer(epochs=2)
        torch.manual_seed(4)
        algorithm.lr, target = 0.003, torch.zeros(NODES, dtype=torch.long)
        explainer = Explainer(
            model, algorithm, explanation_type="phenomenon", edge_mask_type="object", model_config=CONFIG
        )
        for epoch in range(2):
            for index in (0, 2):
                algorithm.train(epoch, model, *graph, target=target, index=index)
        masks.append(explainer(*graph, target=target, index=2).edge_mask)
    torch.testing.assert_close(*masks, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bipartite", ["GATv2Conv", "TransformerConv"])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_an_explainers_message_gets_both_ends(bipartite, flow):
    conv = getattr(nn, bipartite)((F, F), 4, heads=2, flow=flow)
    edge_index, sources, targets = random_edge_index(9, 7, 30), torch.randn(9, F), torch.randn(7, F)
    found = []

    def explain_message(self, out, x_i, x_j):
        found.extend((x_i, x_j))
        return out

    expected = conv((sources, targets), edge_index if flow == "source_to_target" else edge_index.flip(0))
    conv.explain_message = explain_message.__get__(conv)
    conv.explain = True
    out = conv((sources, targets), edge_index if flow == "source_to_target" else edge_index.flip(0))
    torch.testing.assert_close(out, expected)
    query, value = (conv.lin_r, conv.lin_l) if bipartite == "GATv2Conv" else (conv.lin_query, conv.lin_value)
    count = edge_index.size(1)  # GATv2Conv adds loops, and takes out those that are there
    for end, projected in zip(found, (query(targets), value(sources)), strict=True):
        assert end.size(0) >= count - 9
        assert all((row == projected.view(-1, 2, 4)).flatten(1).all(1).any() for row in end)


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv"])
def test_the_message_is_as_pygs(name):
    """What code that looks into layers finds: `x_j` and `alpha`."""
    layer, original = getattr(nn, name), getattr(pyg, name)
    signatures = [Inspector(cls).inspect_signature(cls.message) for cls in (layer, original)]
    assert signatures[0] == signatures[1]
    assert Inspector(layer).implements("message")
    assert list(Inspector(layer).get_params_from_method_call("propagate")) == ["x", "alpha"]


LISTED = {
    "RGATConv": lambda library, mod, mechanism: library.RGATConv(
        F, 4, 3, heads=2, mod=mod, attention_mechanism=mechanism
    ),
    "FAConv": lambda library: library.FAConv(F, normalize=False),
}


class Typed(torch.nn.Module):
    def __init__(self, library, name, *options):
        super().__init__()
        torch.manual_seed(12)
        self.conv, self.lin = LISTED[name](library, *options), torch.nn.LazyLinear(CLASSES)
        for parameter in self.conv.parameters():
            torch.nn.init.normal_(parameter, std=0.5)

    def forward(self, x, edge_index):
        generator = torch.Generator().manual_seed(1)
        types = torch.randint(3, (edge_index.size(1),), generator=generator)
        given = (x, edge_index, types) if hasattr(self.conv, "num_relations") else (x, x, edge_index, types / 2)
        return self.lin(self.conv(*given))


@pytest.mark.parametrize(
    "model",
    [
        ("FAConv",),
        *(
            ("RGATConv", mod, mechanism)
            for mod in (None, "additive", "f-additive", "scaled", "f-scaled")
            for mechanism in ("within-relation", "across-relation")
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("algorithm", [AttentionExplainer, lambda: GNNExplainer(epochs=5)], ids=["attention", "gnn"])
def test_agrees_with_pygs_layers_whose_edges_differ(model, graph, algorithm):
    models = [Typed(library, *model) for library in (nn, pyg)]
    models[0](*graph), models[1](*graph)  # which makes the lazy layers
    models[1].load_state_dict(models[0].state_dict())
    found, expected = (explain(model, algorithm(), graph, edge_mask_type="object") for model in models)
    assert found
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(models[0](*graph), models[1](*graph))


#: Layers that PyG lacks, or cannot explain: how to make one, and its call.
OTHERS = {
    "DotGatConv": (lambda: nn.DotGatConv(F, 4, 2), lambda x, g, e: (x, g)),
    "EdgeGATConv": (lambda: nn.EdgeGATConv(F, 3, 4, 2), lambda x, g, e: (x, g, e)),
    "ExphormerConv": (lambda: nn.ExphormerConv(F, 3), lambda x, g, e: (x, g, e)),
    "EGTConv": (lambda: nn.EGTConv(F, 3), lambda x, g, e: (x, g, e)),
    "GRITConv": (lambda: nn.GRITConv(F, 3, 4, 2), lambda x, g, e: (x, g, e)),
    "TGATConv": (lambda: nn.TGATConv(F, 4, 3, edge_dim=3), lambda x, g, e: (x, g, e[:, 0].abs(), e)),
    "GraphAttentionEmbedding": (
        lambda: nn.GraphAttentionEmbedding(F, 4, 3, nn.TemporalEncoding(4)).eval(),
        lambda x, g, e: (x, x[:, 0], g, e[:, 0], e),
    ),
    "LPAttLayer": (lambda: nn.LPAttLayer(F, 4), lambda x, g, e: (g.flip(0), x.repeat(1, 2), x, e[:, :1].expand(-1, F))),
}


@pytest.mark.parametrize("name", OTHERS)
def test_masks_of_edges(name, graph):
    """A mask of ones changes nothing, and a hidden edge changes its target alone."""
    (x, edges), (make, arguments) = graph, OTHERS[name]
    layer, edge_attr = make(), torch.randn(edges.size(1), 3)

    def run(mask=None):
        if mask is not None:
            set_masks(layer, mask, edges, apply_sigmoid=False)
        out = layer(*arguments(x, edges, edge_attr))
        clear_masks(layer)
        return out[0] if isinstance(out, tuple) else out

    expected, hidden = run(), torch.ones(edges.size(1))
    torch.testing.assert_close(run(hidden), expected)
    hidden[4] = 0.0
    is_changed = (run(hidden) - expected).flatten(1).abs().amax(1) > 1e-9
    assert is_changed.nonzero().flatten().tolist() == [int(edges[1, 4])]
