"""Attention weights as edge masks, against weights that are computed edge by edge."""

import copy
import math
from collections import Counter
from functools import partial

import pytest
import torch
import torch_geometric.nn as pyg
from torch.nn import Module
from torch_geometric import EdgeIndex
from torch_geometric import explain as pyg_explain
from torch_geometric.data import HeteroData
from torch_geometric.explain import Explainer
from torch_geometric.utils import to_torch_csr_tensor

import gattn
from gattn import nn
from gattn.explain import AttentionExplainer
from gattn.testing import random_edge_index
from tests.nn.hetero import CHANNELS, EDGE_TYPES, METADATA, SIZES, edges, features

NODES, F, H = 8, 5, 2
WRITES, CITES, READS, PAYS = EDGE_TYPES
REDUCTIONS = {"mean": torch.mean, "max": torch.amax, "min": torch.amin}


def explain(model, x, edge_index, algorithm=None, *, index=None, task="node", arguments=None, **options):
    explainer = Explainer(
        model,
        AttentionExplainer() if algorithm is None else algorithm,
        **{"explanation_type": "model", "edge_mask_type": "object", **options},
        model_config={"mode": "regression", "task_level": task},
    )
    explanation = explainer(x, edge_index, index=index, **(arguments or {}))
    assert explanation.validate_masks()
    return explanation


class Net(Module):
    """Calls one layer after another."""

    def __init__(self, *convs):
        super().__init__()
        self.convs = torch.nn.ModuleList(convs)

    def forward(self, x, edge_index, **arguments):
        for conv in self.convs:
            x = conv(x, edge_index, **arguments)
        return x


class OfPapers(Net):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index)["paper"]


@pytest.fixture
def graph():
    """With duplicate edges and self-loops."""
    edge_index = random_edge_index(NODES, num_edges=30)
    assert (edge_index[0] == edge_index[1]).any()
    assert torch.unique(edge_index, dim=1).size(1) < 30
    return torch.randn(NODES, F), edge_index


@pytest.fixture
def typed_graph():
    data = HeteroData()
    data.set_value_dict("x", dict(zip(SIZES, features(), strict=True)))
    data.set_value_dict("edge_index", edges())
    return data.x_dict, data.edge_index_dict


def without_loops(edge_index):
    return edge_index[:, edge_index[0] != edge_index[1]]


def masks(explanation):
    return {edge_type: explanation[edge_type].edge_mask for edge_type in explanation.edge_types}


def record(model, *inputs):
    with gattn.record_attention(model.eval()) as records:
        model(*inputs)
    return records


def test_weights_of_a_pencil():
    conv = nn.GATConv(1, 1, add_self_loops=False)
    for parameter, value in ((conv.lin.weight, 1.0), (conv.att_src, 1.0), (conv.att_dst, 0.0)):
        parameter.data.fill_(value)
    x = torch.tensor([[0.0], [math.log(2.0)], [1.0]])  # the logits
    explanation = explain(conv, x, torch.tensor([[0, 1, 2, 1], [2, 2, 0, 2]]))
    torch.testing.assert_close(explanation.edge_mask, torch.tensor([1 / 5, 2 / 5, 1.0, 2 / 5]))


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("index", [None, 2, torch.tensor([1, 2])])
def test_two_layers_as_pygs_explainer_finds_them_in_pygs_layers(graph, reduce, flow, index):
    x, edge_index = graph[0], without_loops(graph[1])  # of which PyG's explainer takes no account
    ours = Net(nn.GATConv(F, 4, heads=3, flow=flow), nn.GATConv(12, 2, heads=2, flow=flow))
    theirs = Net(pyg.GATConv(F, 4, heads=3, flow=flow), pyg.GATConv(12, 2, heads=2, flow=flow))
    theirs.load_state_dict(ours.state_dict())
    found = explain(ours, x, edge_index, AttentionExplainer(reduce), index=index).edge_mask
    expected = explain(theirs, x, edge_index, pyg_explain.AttentionExplainer(reduce), index=index).edge_mask
    torch.testing.assert_close(found, expected)
    records = record(ours, x, edge_index)
    layers = [REDUCTIONS[reduce](records[f"convs.{i}"][0].weights, -1)[: edge_index.size(1)] for i in range(2)]
    by_hand = REDUCTIONS[reduce](torch.stack(layers), 0)
    seen = found != 0
    assert seen.all() or index is not None
    torch.testing.assert_close(found[seen], by_hand[seen])


@pytest.mark.parametrize("add_self_loops", [False, True])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_self_loops_of_the_graph(graph, add_self_loops, flow):
    """A loop that is replaced gets the weight of its replacement, and the other edges keep theirs."""
    conv = nn.GATConv(F, 4, add_self_loops=add_self_loops, flow=flow)
    graph = torch.randn(NODES + 2, F), graph[1]  # the last ones without edges
    found = explain(conv, *graph).edge_mask
    (call,) = record(conv, *graph)[""]
    source, target = graph[1] if flow == "source_to_target" else graph[1].flip(0)
    for edge, ends in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
        same = (call.edge_index == torch.tensor(ends).view(2, 1)).all(0)
        torch.testing.assert_close(found[edge].expand(int(same.sum())), call.weights[same, 0])  # duplicates are equal


def test_forms_of_edge_index(graph):
    x, edge_index = graph
    conv = nn.GATConv(F, 4)
    expected = explain(conv, x, edge_index).edge_mask
    for form in (edge_index.int(), EdgeIndex(edge_index, sparse_size=(NODES, NODES))):
        torch.testing.assert_close(explain(conv, x, form).edge_mask, expected)
    assert explain(conv, x, edge_index[:, :0]).edge_mask.shape == (0,)


def test_layers_without_loops_where_the_graph_has_some(graph):
    class Cleaned(Net):
        def forward(self, x, edge_index):
            return super().forward(x, without_loops(edge_index))

    conv = nn.TransformerConv(F, 4)
    found = explain(Cleaned(conv), *graph).edge_mask
    is_loop = graph[1][0] == graph[1][1]
    assert (found[is_loop] == 0).all()
    expected = record(conv, graph[0], without_loops(graph[1]))[""][0].weights.squeeze(-1)
    torch.testing.assert_close(found[~is_loop], expected)


def feature_per_edge(graph):
    return torch.randn(graph[1].size(1), 3)


#: Layers, how often they attend in a call, and their further arguments.
LAYERS = {
    "AGNNConv": (nn.AGNNConv, 1, {}),
    "DNAConv": (lambda: nn.DNAConv(F), 1, {}),
    "EGATConv": (lambda: nn.EGATConv(F, 3, 4, 2, H), 1, {"edge_attr": feature_per_edge}),
    "FAConv, several aggregations": (
        lambda: nn.FAConv(F, eps=0.0, aggr=["max"]),
        1,
        {"x_0": lambda graph: graph[0]},
    ),
    "FAConv": (lambda: nn.FAConv(F), 1, {"x_0": lambda graph: graph[0]}),
    "GATConv": (lambda: nn.GATConv(F, 4, heads=H), 1, {}),
    "GATConv, edge features": (lambda: nn.GATConv(F, 4, edge_dim=3), 1, {"edge_attr": feature_per_edge}),
    "GATEConv": (lambda: nn.GATEConv(F, F, 3), 1, {"edge_attr": feature_per_edge}),
    "GATv2Conv": (lambda: nn.GATv2Conv(F, 4, heads=H), 1, {}),
    "GPSConv": (lambda: nn.GPSConv(F, nn.GATConv(F, F), heads=1), 1, {}),
    "GatedGCNConv": (lambda: nn.GatedGCNConv(F, 3, 4), 1, {"edge_attr": feature_per_edge}),
    "GeneralConv": (lambda: nn.GeneralConv(F, 4, attention=True, heads=H), 1, {}),
    "HEATConv": (
        lambda: nn.HEATConv(F, 4, 2, 3, 2, 3, 4, heads=H),
        1,
        {
            "node_type": lambda graph: torch.arange(NODES) % 2,
            "edge_type": lambda graph: torch.arange(graph[1].size(1)) % 3,
            "edge_attr": feature_per_edge,
        },
    ),
    "HypergraphConv": (
        lambda: nn.HypergraphConv(F, 4, use_attention=True, heads=H),
        2,
        {"hyperedge_attr": lambda graph: graph[0]},
    ),
    "PointTransformerConv": (lambda: nn.PointTransformerConv(F, 4), 1, {"pos": lambda graph: torch.randn(NODES, 3)}),
    "RGATConv": (
        lambda: nn.RGATConv(F, 4, 3, heads=H),
        1,
        {"edge_type": lambda graph: torch.arange(graph[1].size(1)) % 3},
    ),
    "ResGatedGraphConv": (lambda: nn.ResGatedGraphConv(F, 4), 1, {}),
    "SuperGATConv": (lambda: nn.SuperGATConv(F, 4, heads=H), 1, {}),
    "TransformerConv": (lambda: nn.TransformerConv(F, 4, heads=H), 1, {}),
}


class WithArguments(Module):
    def __init__(self, layer, arguments):
        super().__init__()
        self.layer = layer
        self.arguments = arguments

    def forward(self, x, edge_index):
        if isinstance(self.layer, nn.DNAConv):
            x = torch.stack([x, 2 * x], 1)
        arguments = dict(self.arguments)
        args = [arguments.pop(name) for name in ("x_0", "pos") if name in arguments]
        out = self.layer(x, *args, edge_index, **arguments)
        return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer(graph, layer):
    make, calls, arguments = LAYERS[layer]
    model = WithArguments(make(), {name: value(graph) for name, value in arguments.items()})
    found = explain(model, *graph).edge_mask
    records = record(model, *graph)
    if layer == "GPSConv":  # its attention over all nodes is not along edges
        assert records.pop("layer.attn")
    ((_, recorded),) = records.items()
    assert len(recorded) == calls
    expected = torch.zeros(graph[1].size(1))
    for call in recorded:
        ends, seen = call.graph.edge_index.t().tolist(), Counter()
        for edge, pair in enumerate(graph[1].t().tolist()):
            places = [place for place, end in enumerate(ends) if end == pair]
            place = places[min(seen[tuple(pair)], len(places) - 1)]  # one loop may stand for several
            seen[tuple(pair)] += 1
            expected[edge] += call.weights[place].mean() / calls
    torch.testing.assert_close(found, expected)


def test_sequence_layers_on_edges(graph):
    class Encoder(Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(4, H, 8, batch_first=True)
            self.lin = torch.nn.Linear(F, 4)

        def forward(self, x, edge_index):
            return self.layer(self.lin(x), graph=edge_index)

    model = Encoder()
    expected = record(model, *graph)["layer.self_attn"][0].weights.mean(-1)
    torch.testing.assert_close(explain(model, *graph).edge_mask, expected)


def test_a_model_with_further_arguments(graph):
    model = gattn.models.AttentiveFP(F, 8, 2, edge_dim=3, num_layers=2, num_timesteps=2)
    arguments = {"edge_attr": feature_per_edge(graph), "batch": torch.arange(NODES) // 4}
    records = record(model, *graph, *arguments.values())
    layers = [records[name][0].weights.mean(-1) for name in ("gate_conv", "atom_convs.0")]  # without that of molecules
    found = explain(model, *graph, task="graph", arguments=arguments)
    torch.testing.assert_close(found.edge_mask, sum(layers) / 2)


def weights_of_hgt(conv, x, graphs):
    """By the formula, edge by edge: `[E, H]` of each edge type."""
    heads, channels = conv.heads, conv.out_channels // conv.heads
    kqv = {name: conv.kqv_lin.lins[name](value).view(-1, 3, heads, channels) for name, value in x.items()}
    found = {edge_type: torch.zeros(index.size(1), heads) for edge_type, index in graphs.items()}
    for head in range(heads):
        logits = {}
        for edge_type, index in graphs.items():
            source, _, target = edge_type
            matrix = conv.k_rel.weight[head * len(EDGE_TYPES) + EDGE_TYPES.index(edge_type)]
            prior = conv.p_rel["__".join(edge_type)][0, head] / channels**0.5
            for edge, (j, i) in enumerate(index.t().tolist()):
                logit = kqv[source][j, 0, head] @ matrix @ kqv[target][i, 1, head] * prior
                logits[edge_type, edge] = (target, i), logit.exp()
        for (edge_type, edge), (node, weight) in logits.items():
            found[edge_type][edge, head] = weight / sum(other for end, other in logits.values() if end == node)
    return found


def weights_of_han(conv, x, graphs):
    """Likewise: each edge type has a softmax of its own."""
    hidden = {name: conv.proj[name](value).view(-1, conv.heads, 4) for name, value in x.items()}
    found = {}
    for edge_type, index in graphs.items():
        name = "__".join(edge_type)
        key, query = hidden[edge_type[0]] * conv.lin_src[name], hidden[edge_type[-1]] * conv.lin_dst[name]
        logits = [key[j].sum(-1) + query[i].sum(-1) for j, i in index.t().tolist()]
        weights = torch.nn.functional.leaky_relu(torch.stack(logits), 0.2).exp()
        totals = [weights[index[1] == i].sum(0) for i in index[1]]
        found[edge_type] = weights / torch.stack(totals)
    return found


TYPED = {"HGTConv": (nn.HGTConv, weights_of_hgt), "HANConv": (nn.HANConv, weights_of_han)}


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("layer", TYPED)
@torch.no_grad()
def test_typed_layers_edge_by_edge(typed_graph, layer, reduce):
    conv, weights = TYPED[layer]
    model = OfPapers(conv(CHANNELS, 8, METADATA, heads=H))
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))  # so that priors differ
    found = masks(explain(model, *typed_graph, AttentionExplainer(reduce)))
    expected = {name: REDUCTIONS[reduce](w, -1) for name, w in weights(model.convs[0], *typed_graph).items()}
    assert list(found) == EDGE_TYPES
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("layer", TYPED)
def test_flow_of_typed_layers(typed_graph, layer, flow):
    x, graphs = typed_graph
    conv = TYPED[layer][0](CHANNELS, 8, METADATA, heads=H, flow=flow)
    expected = {name: weights.mean(-1) for name, weights in TYPED[layer][1](conv, x, graphs).items()}
    if flow == "target_to_source":
        graphs = {name: index.flip(0) for name, index in graphs.items()}
    torch.testing.assert_close(masks(explain(OfPapers(conv), x, graphs)), expected)


def test_two_typed_layers_of_which_one_sees_fewer_edge_types(typed_graph):
    x, graphs = typed_graph
    graphs[CITES] = graphs[CITES][:, :0]

    class Two(Module):
        def __init__(self):
            super().__init__()
            self.first = nn.HANConv(CHANNELS, 8, METADATA, heads=H)
            self.second = nn.HGTConv(8, 8, METADATA, heads=4)

        def forward(self, x_dict, edge_index_dict):
            kept = {name: x for name, x in self.first(x_dict, edge_index_dict).items() if x is not None}
            some = {name: edge_index_dict[name] for name in (READS, CITES)}  # in another order
            return self.second(kept, edge_index_dict=some)["paper"]

    model = Two()
    found = masks(explain(model, x, graphs))
    with torch.no_grad():
        first = weights_of_han(model.first, x, {name: graphs[name] for name in (WRITES, READS, PAYS)})
        kept = {name: x for name, x in model.first(x, graphs).items() if x is not None}
        second = weights_of_hgt(model.second, kept, {READS: graphs[READS]})
    for name in (WRITES, PAYS):
        torch.testing.assert_close(found[name], first[name].mean(-1))
    torch.testing.assert_close(found[READS], (first[READS].mean(-1) + second[READS].mean(-1)) / 2)
    assert found[CITES].shape == (0,)


def hetero_conv():
    return pyg.HeteroConv({name: nn.GATv2Conv((-1, -1), 8, heads=H, add_self_loops=False) for name in EDGE_TYPES})


class OfTypes(Net):
    """Two layers of `HeteroConv`, after which there are no more venues."""

    def forward(self, x, edge_index):
        x = {**x, **self.convs[0](x, edge_index)}
        return self.convs[1](x, edge_index)["paper"]


@pytest.mark.filterwarnings("ignore:There exist node types")
@pytest.mark.parametrize("same", [False, True])
def test_hetero_conv(typed_graph, same):
    x, graphs = typed_graph
    if same:  # so that nothing but the name says which edge type a layer serves
        graphs[READS] = graphs[WRITES]
    model = OfTypes(hetero_conv(), hetero_conv())
    with torch.no_grad():
        model(x, graphs)  # which gives lazy parameters their sizes
    found = masks(explain(model, x, graphs))
    records = record(model, x, graphs)
    for name in EDGE_TYPES:
        calls = [calls for layer, calls in records.items() if layer.endswith(f"<{'___'.join(name)}>")]
        assert len(calls) == 2
        torch.testing.assert_close(found[name], sum(call.weights.mean(-1) / 2 for (call,) in calls))
        torch.testing.assert_close(calls[0][0].edge_index, graphs[name])


class Plain(Module):
    def __init__(self, library):
        super().__init__()
        self.first = library.GATConv((-1, -1), 4, heads=H, add_self_loops=False)
        self.second = library.GATConv((-1, -1), 4, add_self_loops=False)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


class OfUsers(Module):
    def __init__(self, library, metadata):
        super().__init__()
        self.model = pyg.to_hetero(Plain(library), metadata)

    def forward(self, x, edge_index):
        return self.model(x, edge_index)["user"]


@pytest.mark.filterwarnings("ignore:The type .* contains invalid characters")
@pytest.mark.parametrize("item", ["item", "item of shops"])
def test_to_hetero(item):
    """As PyG's explainer on PyG's layers, where it finds the edge types in the names of layers."""
    sizes, likes, liked = {"user": 6, item: 6}, ("user", "likes", item), (item, "liked_by", "user")
    same = random_edge_index(6, num_edges=12)  # so that nothing but the name says which edge type a layer serves
    graphs = {likes: same, liked: same}
    x = {name: torch.randn(size, F) for name, size in sizes.items()}
    ours, theirs = (OfUsers(library, (list(sizes), list(graphs))) for library in (nn, pyg))
    with torch.no_grad():
        ours(x, graphs), theirs(x, graphs)  # which gives lazy parameters their sizes
    theirs.load_state_dict(ours.state_dict())
    found = masks(explain(ours, x, graphs, AttentionExplainer("max")))
    records = record(ours, x, graphs)
    for name, mask in found.items():
        key = "__".join(name).replace(" ", "_")
        layers = [records[f"model.{layer}.{key}"][0].weights.amax(-1) for layer in ("first", "second")]
        torch.testing.assert_close(mask, torch.maximum(*layers))
    if item == "item":
        torch.testing.assert_close(found, masks(explain(theirs, x, graphs, pyg_explain.AttentionExplainer("max"))))


class OwnNames(Module):
    """One layer for all edge types, which have no names in the model."""

    def __init__(self):
        super().__init__()
        self.lins = torch.nn.ModuleDict({name: torch.nn.Linear(size, 4) for name, size in CHANNELS.items()})
        self.conv = nn.TransformerConv(4, 4)

    def forward(self, x, edge_index):
        x = {name: lin(x[name]) for name, lin in self.lins.items()}
        return sum(self.conv((x[name[0]], x["paper"]), edge_index[name].clone()) for name in (WRITES, CITES, READS))


def test_edges_tell_the_edge_type(typed_graph):
    model = OwnNames()
    found = masks(explain(model, *typed_graph))
    calls = record(model, *typed_graph)["conv"]
    for name, call in zip((WRITES, CITES, READS), calls, strict=True):
        torch.testing.assert_close(found[name], call.weights.squeeze(-1))
    assert (found[PAYS] == 0).all()  # along which nothing attends
    x, graphs = typed_graph
    graphs[READS] = graphs[WRITES]
    with pytest.raises(ValueError, match=r"layer 'conv' attends along edges that .*'writes'.*'reads'.* share: name it"):
        explain(model, x, graphs)
    graphs[READS] = graphs[WRITES] = graphs[WRITES][:, :0]
    assert masks(explain(model, x, graphs))[READS].shape == (0,)


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("layer", TYPED)
def test_edges_out_of_reach_get_zeros(typed_graph, layer, flow):
    x, graphs = typed_graph
    conv = partial(TYPED[layer][0], flow=flow)
    ends = {name: [((name[0], j), (name[-1], i)) for j, i in graphs[name].t().tolist()] for name in EDGE_TYPES}
    if flow == "target_to_source":
        graphs = {name: index.flip(0) for name, index in graphs.items()}

    class Two(Module):
        def __init__(self, second):
            super().__init__()
            self.first = conv(CHANNELS, 8, METADATA)
            self.second = conv(8, 8, METADATA) if second else None

        def forward(self, x_dict, edge_index_dict):
            out = {name: x for name, x in self.first(x_dict, edge_index_dict).items() if x is not None}
            if self.second is not None:
                some = {name: edge_index_dict[name] for name in (WRITES, CITES, READS)}
                out = self.second(out, some)
            return out["paper"]

    algorithm, index = AttentionExplainer(node_type="paper"), torch.tensor([2, 5])
    for hops in (1, 2):
        model = Two(hops == 2)
        everything = masks(explain(model, x, graphs, algorithm))
        found = masks(explain(model, x, graphs, algorithm, index=index))
        from_the_end = masks(explain(model, x, graphs, algorithm, index=index - SIZES["paper"]))
        torch.testing.assert_close(from_the_end, found)
        reached = {("paper", node) for node in index.tolist()}
        for _ in range(hops):
            reached |= {source for pairs in ends.values() for source, target in pairs if target in reached}
        for name, mask in everything.items():  # as PyG has it, the edges between all nodes that were reached
            near = torch.tensor([source in reached and target in reached for source, target in ends[name]])
            torch.testing.assert_close(found[name], mask.where(near, 0.0))
            assert not near.all()
            assert near.any() == (name != PAYS or hops == 2)
        whole_graph = masks(explain(model, x, graphs, index=0, task="graph"))  # whose rows are not nodes
        torch.testing.assert_close(whole_graph, everything)


def test_one_type_of_nodes_needs_no_node_type():
    edge_types = [("paper", "cites", "paper"), ("paper", "resembles", "paper")]
    model = OfPapers(nn.HANConv(F, 4, (["paper"], edge_types)))
    graphs = {name: random_edge_index(NODES, num_edges=20, seed=i) for i, name in enumerate(edge_types)}
    x = {"paper": torch.randn(NODES, F)}
    found = masks(explain(model, x, graphs, index=1))
    torch.testing.assert_close(found, masks(explain(model, x, graphs, AttentionExplainer(node_type="paper"), index=1)))
    for name, mask in found.items():
        assert (mask[graphs[name][1] == 1] > 0).all()
        assert (mask == 0).any()


def test_the_model_is_left_as_it_was(graph):
    model = Net(nn.GATConv(F, F, dropout=0.5)).train()
    before = copy.deepcopy(model.state_dict())
    explanation = explain(model, *graph)
    assert not explanation.edge_mask.requires_grad
    assert model.training
    torch.testing.assert_close(model.state_dict(), before)
    typed = OfPapers(nn.HGTConv(CHANNELS, 8, METADATA))
    explain(typed, dict(zip(SIZES, features(), strict=True)), edges())
    assert not typed.convs[0]._forward_pre_hooks
    with pytest.raises(ValueError, match="x_dict"):
        AttentionExplainer()(typed, {}, edges())
    assert not typed.convs[0]._forward_pre_hooks


def test_thresholds_and_subgraphs(typed_graph):
    threshold = pyg_explain.ThresholdConfig("topk", 2)
    explanation = explain(OfPapers(nn.HGTConv(CHANNELS, 8, METADATA)), *typed_graph, threshold_config=threshold)
    subgraph = explanation.get_explanation_subgraph()
    assert all(subgraph[name].edge_index.size(1) == 2 for name in EDGE_TYPES)


class Complete(Module):
    """Attends over all nodes, by a call of its own."""

    def forward(self, x, edge_index):
        x = x.unsqueeze(1)
        return gattn.attend(x, x, x, gattn.CompleteGraph(NODES)).flatten(1)


def test_what_cannot_be_explained(graph, caplog):
    conv = nn.GATConv(F, 4)
    with pytest.raises(ValueError, match="does not support"):
        explain(conv, *graph, node_mask_type="attributes")
    assert caplog.text.count("explanation_type='model' and node_mask_type=None") == 1
    with pytest.raises(ValueError, match="does not support"):
        explain(conv, *graph, explanation_type="phenomenon")
    assert caplog.text.count("explanation_type='model' and node_mask_type=None") == 2
    with pytest.raises(ValueError, match=r"'mean', 'max', 'min'; got 'sum'"):
        AttentionExplainer("sum")
    with pytest.raises(ValueError, match="no layer of gattn attended"):
        explain(Net(pyg.GATConv(F, 4)), *graph)
    alone = nn.GPSConv(F, None, heads=1)  # which attends over all nodes only
    with pytest.raises(ValueError, match="no layer of gattn attended"):
        explain(alone, *graph)
    with pytest.raises(ValueError, match="no layer of gattn attended"):
        explain(Complete(), *graph)


def test_layers_that_attend_along_other_edges(graph):
    class Shuffled(Net):
        def forward(self, x, edge_index):
            return self.convs[1](self.convs[0](x, edge_index), edge_index.flip(1))

    model = Shuffled(nn.GATConv(F, F), nn.GATConv(F, 4))
    with pytest.raises(ValueError, match=r"layer 'convs\.1' attends along edges other than those to explain"):
        explain(model, *graph)
    model.convs[1].explain = False
    expected = explain(model.convs[0], *graph).edge_mask
    torch.testing.assert_close(explain(model, *graph).edge_mask, expected)
    with pytest.raises(ValueError, match="batch of features over one graph"):
        explain(model.convs[0], torch.randn(2, NODES, F), graph[1], task="graph")
    for edge_index in (gattn.SparseGraph(graph[1]), to_torch_csr_tensor(graph[1], size=(NODES, NODES))):
        with pytest.raises(TypeError, match="not sparse matrices or graphs"):
            explain(model.convs[0], graph[0], edge_index)


@pytest.mark.parametrize("layer", TYPED)
def test_errors_of_typed_layers(typed_graph, layer):
    x, graphs = typed_graph
    conv = TYPED[layer][0](CHANNELS, 8, METADATA)

    class Other(OfPapers):
        def forward(self, x, edge_index):
            return super().forward(x, {**graphs, CITES: graphs[CITES].flip(1)})

    with pytest.raises(ValueError, match=r"layer 'convs\.0' attends along edges other than those to explain"):
        explain(Other(conv), x, graphs)
    some = {name: graphs[name] for name in (WRITES, READS)}
    with pytest.raises(ValueError, match=r"layer 'convs\.0' attends along edges other than those to explain"):
        explain(Other(conv), x, some)
    for node_type in (None, "reader"):
        with pytest.raises(ValueError, match=r"node_type .*of \['author', 'paper', 'venue'\]; got (None|'reader')"):
            explain(OfPapers(conv), x, graphs, AttentionExplainer(node_type=node_type), index=1)
