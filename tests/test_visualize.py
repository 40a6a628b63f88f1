"""What is drawn, not only that something is."""

import ast
import itertools
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import torch_geometric.nn
from matplotlib.colors import to_rgba
from matplotlib.patches import StepPatch
from torch_geometric.datasets import KarateClub

import gattn
from gattn.recording import AttentionRecord
from gattn.testing import random_edge_index
from gattn.visualize import (
    COLOURS,
    EDGES,
    WEIGHTS,
    attention_arcs,
    attention_entropy,
    attention_graph,
    attention_grid,
    attention_matrix,
    attention_rollout,
    entropy,
    rollout,
)
from gattn.visualize.graphs import Arrows

TOKENS = ["attention", "is", "message", "passing"]

#: Four nodes; node 2 hears from everybody and twice from node 1, node 0 from 2 and 3, node 3 from itself.
EDGE_INDEX = torch.tensor([[0, 1, 1, 2, 3, 2, 3, 3], [2, 2, 2, 2, 2, 0, 0, 3]])
ALPHA = torch.tensor([0.1, 0.1, 0.2, 0.4, 0.2, 0.3, 0.7, 1.0])
#: What is drawn of it: arrows, and rims where a node hears itself.
ARROWS = {(0, 2): 0.1, (1, 2): 0.3, (3, 2): 0.2, (2, 0): 0.3, (3, 0): 0.7}
RIMS = {2: 0.4, 3: 1.0}
PLACES = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])


@pytest.fixture(autouse=True)
def close_figures():
    yield
    for number in plt.get_fignums():
        plt.figure(number).canvas.draw()  # whatever goes wrong in drawing does so here
    plt.close("all")


def weights_of(*shape):
    return torch.randn(shape).softmax(-1)


def texts(labels):
    return [label.get_text() for label in labels]


def overlap(labels):
    """Whether any two texts cover each other."""
    boxes = [label.get_window_extent() for label in labels if label.get_text()]
    return any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


# Colours -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [WEIGHTS, EDGES])
def test_scales_grow_darker_all_the_way(scale):
    lightness = scale(np.linspace(0, 1, 50))[:, :3] @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(lightness) < 0).all()


def test_the_lightest_edge_can_be_seen():
    assert EDGES(0.0)[:3] @ np.array([0.2126, 0.7152, 0.0722]) < 0.85


# Matrices ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_matrix_draws_the_weights(dtype):
    weights = weights_of(3, 2, 5).to(dtype).requires_grad_()
    ax = attention_matrix(weights, head=1)
    (image,) = ax.images
    np.testing.assert_array_equal(image.get_array(), weights[1].detach().double())
    assert image.get_clim() == (0.0, weights[1].max().item())
    assert image.get_cmap() is WEIGHTS
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("source", "target")
    np.testing.assert_allclose(
        attention_matrix(weights, head="mean").images[0].get_array(), weights.detach().double().mean(0)
    )
    np.testing.assert_array_equal(
        attention_matrix(weights[0].tolist()).images[0].get_array(), weights[0].detach().double()
    )


def test_matrix_names_rows_and_columns():
    ax = attention_matrix(weights_of(4, 2), TOKENS, ["some", "words"], title="Heads")
    assert texts(ax.get_yticklabels()) == TOKENS
    assert texts(ax.get_xticklabels()) == ["some", "words"]
    assert ax.get_xticks().tolist() == [0, 1]
    assert ax.get_title() == "Heads"


def test_matrix_without_names_has_whole_numbers():
    for ticks in (attention_matrix(weights_of(40, 3)).get_yticks(), attention_matrix(weights_of(2, 2)).get_xticks()):
        assert (ticks == ticks.round()).all()


def test_matrix_tokens_can_be_seen():
    ax = attention_matrix(weights_of(4, 4), [" ", "\n", "$x", "y$"], torch.arange(4))
    assert texts(ax.get_yticklabels()) == ["␣", "↵", "$x", "y$"]
    assert not any(label.get_parse_math() for label in ax.get_yticklabels())
    assert texts(ax.get_xticklabels()) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("count", [4, 12, 40])
def test_matrix_labels_do_not_overlap(count):
    names = [TOKENS[number % 4] for number in range(count)]
    ax = attention_matrix(weights_of(count, count), names, names)
    ax.figure.canvas.draw()
    assert not overlap(ax.get_yticklabels())
    if count > 30:  # a slanted label's box is larger than itself
        assert not overlap(ax.get_xticklabels())
    bounds = ax.figure.bbox
    for label in (*ax.get_yticklabels(), *ax.get_xticklabels(), ax.xaxis.label, ax.yaxis.label):
        box = label.get_window_extent()
        assert bounds.x0 <= box.x0
        assert box.x1 <= bounds.x1
        assert bounds.y0 <= box.y0


def test_colorbar_comes_with_a_new_figure():
    ax = attention_matrix(weights_of(2, 2))
    assert [other.get_ylabel() for other in ax.figure.axes] == ["target", "attention weight α"]
    _, own = plt.subplots()
    assert attention_matrix(weights_of(2, 2), ax=own) is own
    assert len(own.figure.axes) == 1
    attention_matrix(weights_of(2, 2), ax=own, colorbar=True)
    assert len(own.figure.axes) == 2
    assert len(attention_matrix(weights_of(2, 2), colorbar=False).figure.axes) == 1


def test_maximum_is_the_darkest():
    assert attention_matrix(weights_of(2, 2), maximum=2.0).images[0].get_clim() == (0.0, 2.0)
    assert attention_matrix(torch.zeros(2, 2)).images[0].get_clim() == (0.0, 1.0)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ValueError, r"2 heads: choose head=0 to head=1", {"weights": weights_of(2, 3, 3)}),
        (IndexError, "no head 2: the weights have 2", {"weights": weights_of(2, 3, 3), "head": 2}),
        (IndexError, "no head -1", {"weights": weights_of(2, 3, 3), "head": -1}),
        (ValueError, "'mean'; got 'first'", {"weights": weights_of(2, 3, 3), "head": "first"}),
        (ValueError, r"batch: take one element of it, weights\[0\]", {"weights": weights_of(5, 2, 3, 3), "head": 0}),
        (ValueError, r"packed graph's blocks: take one", {"weights": [weights_of(1, 2, 2), weights_of(1, 3, 3)]}),
        (ValueError, r"come with its edge_index", {"weights": weights_of(3)}),
        (ValueError, "not empty", {"weights": torch.zeros(0, 3)}),
        (ValueError, "softmax first", {"weights": torch.randn(3, 3) - 5}),
        (ValueError, "finite", {"weights": torch.full((2, 2), torch.nan)}),
        (ValueError, "row_labels must .* each of the 3 rows; got 2", {"weights": weights_of(3, 3), "row_labels": "ab"}),
        (ValueError, "each of the 3 columns; got 4", {"weights": weights_of(3, 3), "column_labels": TOKENS}),
        (ValueError, "90 labels are too many", {"weights": weights_of(2, 90), "column_labels": range(90)}),
        (ValueError, "above zero", {"weights": weights_of(2, 2), "maximum": 0.0}),
    ],
)
def test_matrix_errors(error, message, arguments):
    with pytest.raises(error, match=message):
        attention_matrix(**arguments)


# Graphs --------------------------------------------------------------------------------------------------------------


class Arrow(NamedTuple):
    ends: list
    width: float
    colour: tuple


def arrows_of(ax):
    """All arrows, in the order in which they are drawn."""
    (arrows,) = [item for item in ax.collections if isinstance(item, Arrows)]
    colours = np.resize(arrows.get_facecolors(), (len(arrows.ends), 4))
    return [Arrow(*one) for one in zip(arrows.ends.round(6).tolist(), arrows.widths, map(tuple, colours), strict=True)]


def node_at(place):
    return PLACES.tolist().index(place)


def as_edges(ax):
    return {tuple(node_at(end) for end in arrow.ends): arrow for arrow in arrows_of(ax)}


def nodes_of(ax):
    return next(item for item in ax.collections if len(item.get_offsets()) and not is_arrows_or_rims(item))


def is_arrows_or_rims(item):
    return isinstance(item, Arrows) or item.get_label() == "_rims"


def rims_of(ax):
    """The rings of self-loops, by node: width and colour."""
    for item in ax.collections:
        if item.get_label() == "_rims":
            looks = zip(item.get_linewidths(), map(tuple, item.get_edgecolors()), strict=True)
            return dict(zip(map(node_at, item.get_offsets().tolist()), looks, strict=True))
    return {}


def test_graph_draws_weights_as_width_and_colour():
    ax = attention_graph(EDGE_INDEX, ALPHA, pos=PLACES)
    drawn = as_edges(ax)
    assert set(drawn) == set(ARROWS)
    for edge, alpha in ARROWS.items():
        assert drawn[edge].width == pytest.approx(0.4 + 3.6 * alpha)
        assert drawn[edge].colour == pytest.approx(EDGES(alpha), abs=0.02)
    widths = [arrow.width for arrow in arrows_of(ax)]
    assert widths == sorted(widths)  # the heaviest lies on top
    np.testing.assert_array_equal(nodes_of(ax).get_offsets(), PLACES)
    rims = rims_of(ax)
    assert set(rims) == set(RIMS)
    for node, alpha in RIMS.items():
        assert rims[node] == (pytest.approx(0.4 + 3.6 * alpha), pytest.approx(EDGES(alpha), abs=0.02))
    assert texts(ax.texts) == ["0", "1", "2", "3"]
    assert ax.figure.axes[1].get_ylim() == (0.0, 1.0)


def test_graph_scale():
    half = as_edges(attention_graph(EDGE_INDEX, ALPHA / 2, pos=PLACES))
    fixed = as_edges(attention_graph(EDGE_INDEX, ALPHA / 2, pos=PLACES, maximum=1.0))
    assert half[3, 0].width == pytest.approx(0.4 + 3.6 * 0.7)
    assert fixed[3, 0].width == pytest.approx(0.4 + 3.6 * 0.35)


def test_graph_chooses_a_head():
    weights = torch.stack([ALPHA, ALPHA / 2, torch.zeros(8)], 1)
    for head, expected in ((0, 0.7), (1, 0.35), (2, 0.0), ("mean", 0.35)):
        drawn = as_edges(attention_graph(EDGE_INDEX, weights, head=head, pos=PLACES, maximum=1.0))
        assert drawn[3, 0].width == pytest.approx(0.4 + 3.6 * expected)
    with pytest.raises(ValueError, match="3 heads: choose head=0"):
        attention_graph(EDGE_INDEX, weights)
    with pytest.raises(IndexError, match="no head 3"):
        attention_graph(EDGE_INDEX, weights, head=3)


@pytest.mark.parametrize(
    ("node", "hops", "edges"),
    [
        (0, 1, {(2, 0), (3, 0)}),
        (0, 2, {(2, 0), (3, 0), (0, 2), (1, 2), (3, 2)}),
        (1, 1, set()),
        (3, 5, set()),
    ],
)
def test_graph_ego_network(node, hops, edges):
    ax = attention_graph(EDGE_INDEX, ALPHA, pos=PLACES, node=node, hops=hops)
    assert set(as_edges(ax)) == edges
    shown = sorted({node, *itertools.chain(*edges)})
    assert texts(ax.texts) == [str(other) for other in shown]
    sizes = nodes_of(ax).get_sizes()
    assert [other for other, size in zip(shown, sizes, strict=True) if size == max(sizes)] == (
        [node] if len(shown) > 1 else shown
    )


def test_a_node_may_be_a_tensor():
    node = ALPHA.argmax() - 7
    assert set(as_edges(attention_graph(EDGE_INDEX, ALPHA, pos=PLACES, node=node))) == {(2, 0), (3, 0)}
    assert set(as_edges(attention_rollout([ALPHA], EDGE_INDEX, pos=PLACES, node=node))) == {(2, 0), (3, 0)}
    assert set(as_edges(attention_grid([ALPHA], EDGE_INDEX, pos=PLACES, node=node)[0, 0])) == {(2, 0), (3, 0)}


def test_graph_ego_network_lies_around_its_node():
    edge_index = torch.tensor([[0, 1, 2, 3, 4, 5], [5, 5, 5, 5, 5, 5]])
    places = nodes_of(attention_graph(edge_index, torch.rand(6), node=5)).get_offsets()
    distances = np.linalg.norm(places[:5] - places[5], axis=1)
    np.testing.assert_allclose(distances, distances[0], rtol=1e-6)


def test_graph_classes_and_names():
    classes, names = torch.tensor([0, 2, 2, 0]), ["$a", "beta", "c", "d"]
    ax = attention_graph(EDGE_INDEX, ALPHA, pos=PLACES, classes=classes, labels=names, title="Two classes")
    assert [tuple(colour) for colour in nodes_of(ax).get_facecolors()] == [
        to_rgba(COLOURS[place]) for place in (0, 1, 1, 0)
    ]
    legend = ax.get_legend()
    assert texts(legend.get_texts()) == ["class 0", "class 2"]
    assert [handle.get_color() for handle in legend.legend_handles] == list(COLOURS[:2])
    assert texts(ax.texts) == names
    assert not any(text.get_parse_math() for text in ax.texts)
    assert ax.get_title() == "Two classes"


def test_colours_of_classes_stay_in_ego_networks():
    ax = attention_graph(EDGE_INDEX, ALPHA, node=3, classes=["x", "x", "x", "y"])
    assert tuple(nodes_of(ax).get_facecolors()[0]) == to_rgba(COLOURS[1])
    assert texts(ax.get_legend().get_texts()) == ["y"]


@pytest.mark.parametrize("form", ["csr", "flow", "graph"])
def test_other_forms_of_a_graph(form):
    edges = torch.tensor([[0, 2, 3, 3], [2, 0, 0, 3]])
    alpha = torch.tensor([1.0, 0.3, 0.7, 1.0])
    graph = gattn.SparseGraph(edges)
    if form == "flow":
        graph = gattn.SparseGraph(edges.flip(0), flow="target_to_source")
    if form == "csr":
        graph = torch.sparse_coo_tensor(edges.flip(0), alpha, (4, 4)).to_sparse_csr()
        alpha = alpha[[1, 2, 0, 3]]
    drawn = as_edges(attention_graph(graph, alpha, pos=PLACES))
    assert {edge: round((arrow.width - 0.4) / 3.6, 5) for edge, arrow in drawn.items()} == {
        (0, 2): 1.0,
        (2, 0): 0.3,
        (3, 0): 0.7,
    }


def test_graph_of_a_layer():
    data = KarateClub()[0]
    conv = gattn.nn.GATConv(34, 8, heads=4)
    with torch.no_grad():
        edge_index, weights = conv(data.x, data.edge_index, return_attention_weights=True)[1]
    ax = attention_graph(edge_index, weights, head=2, classes=data.y)
    assert len(arrows_of(ax)) == data.num_edges
    assert len(nodes_of(ax).get_offsets()) == 34
    again = attention_graph(edge_index, weights, head=2, classes=data.y)
    np.testing.assert_array_equal(nodes_of(ax).get_offsets(), nodes_of(again).get_offsets())
    ax.figure.canvas.draw()
    assert not overlap([ax.title, *ax.get_legend().get_texts()])


def test_graph_in_pieces_fits():
    edge_index = torch.tensor([[0, 1, 3], [1, 2, 4]])
    places = nodes_of(attention_graph(edge_index, torch.ones(3), classes=[0] * 7)).get_offsets()
    assert len(places) == 7
    apart = {(a, b): np.linalg.norm(places[a] - places[b]) for a, b in itertools.combinations(range(7), 2)}
    assert min(apart.values()) > 0.1 * max(apart.values())
    joined = [apart.pop((a, b)) for a, b in edge_index.t().tolist()]
    assert max(joined) < min(apart.values())


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ValueError, r"graph's 8 edges, .* got \[7\]", {"weights": ALPHA[1:]}),
        (ValueError, r"got \[2, 8\]", {"weights": torch.rand(2, 8)}),
        (ValueError, "batch: take one element", {"weights": torch.rand(3, 8, 2)}),
        (ValueError, "softmax first", {"weights": -ALPHA}),
        (ValueError, "draw its weights|come without a graph", {"edge_index": gattn.CompleteGraph(4)}),
        (TypeError, "a graph must be an edge_index tensor", {"edge_index": [[0], [1]]}),
        (
            ValueError,
            "same nodes; this graph has 4 and 3 of them. For other graphs, there are attention_matrix",
            {"edge_index": gattn.SparseGraph(EDGE_INDEX[:, 5:7], num_sources=4, num_targets=3)},
        ),
        (ValueError, "classes must .* 4 nodes; got 3", {"classes": [0, 1, 2]}),
        (ValueError, "labels must .* 5 nodes; got 4", {"classes": [0] * 5, "labels": TOKENS}),
        (ValueError, r"pos is \[N, 2\]", {"pos": torch.rand(4, 3)}),
        (ValueError, "does not say where node 1 is", {"pos": {0: (0, 0)}}),
        (IndexError, "no node 4: the graph has 4", {"node": 4}),
        (IndexError, "no node -1", {"node": -1}),
        (ValueError, "hops must be at least 1", {"node": 0, "hops": 0}),
        (ValueError, r"have 4 nodes, but max_nodes=3: .*node=", {"max_nodes": 3}),
        (ValueError, r"have 3 nodes, but max_nodes=2", {"max_nodes": 2, "node": 0}),
    ],
)
def test_graph_errors(error, message, arguments):
    weights = torch.rand(2) if isinstance(arguments.get("edge_index"), gattn.SparseGraph) else ALPHA
    with pytest.raises(error, match=message):
        attention_graph(**({"edge_index": EDGE_INDEX, "weights": weights} | arguments))


def test_too_many_nodes_or_edges():
    edge_index = random_edge_index(200, num_edges=400)
    with pytest.raises(ValueError, match="have 200 nodes, but max_nodes=150"):
        attention_graph(edge_index, torch.rand(400), labels=range(200))
    attention_graph(edge_index, torch.rand(400), node=int(edge_index[1, 0]))
    dense = gattn.CompleteGraph(40).edge_index
    with pytest.raises(ValueError, match="1600 arrows could not be told apart"):
        attention_graph(dense, torch.rand(1600), max_nodes=40)


# Grids ---------------------------------------------------------------------------------------------------------------


def test_grid_of_matrices():
    layers = {"first": weights_of(3, 4, 4), "second": weights_of(2, 4, 4) / 2}
    axes = attention_grid(layers, row_labels=TOKENS, column_labels=TOKENS, title="All")
    assert axes.shape == (2, 3)
    assert [[ax.get_visible() for ax in row] for row in axes] == [[True] * 3, [True, True, False]]
    for row, weights in zip(axes, layers.values(), strict=True):
        for head, ax in enumerate(row[: len(weights)]):
            np.testing.assert_array_equal(ax.images[0].get_array(), weights[head].double())
            assert ax.images[0].get_clim() == (0.0, layers["first"].max().item())
            assert ax.get_title() == f"head {head}"
    assert [row[0].get_ylabel() for row in axes] == ["first", "second"]
    figure = axes[0, 0].figure
    assert figure.get_suptitle() == "All"
    assert figure.axes[-1].get_ylabel() == "attention weight α"
    figure.canvas.draw()
    shown = [[any(label.get_visible() for label in ax.get_xticklabels()) for ax in row] for row in axes]
    assert shown == [[False, False, True], [True, True, True]]
    assert texts(axes[1, 0].get_xticklabels()) == TOKENS
    assert not overlap(row[0].yaxis.label for row in axes)


def test_grid_of_a_list():
    axes = attention_grid(weights_of(2, 1, 3, 3))
    assert [row[0].get_ylabel() for row in axes] == ["layer 0", "layer 1"]


def test_grid_of_graphs():
    first, second = torch.stack([ALPHA, ALPHA.flip(0)], 1), ALPHA / 4
    axes = attention_grid([first, second], EDGE_INDEX, classes=[0, 1, 1, 0])
    assert [[ax.get_visible() for ax in row] for row in axes] == [[True, True], [True, False]]
    places = [nodes_of(ax).get_offsets() for ax in axes.flat if ax.get_visible()]
    assert all(np.array_equal(place, places[0]) for place in places)
    widest = [max(arrow.width for arrow in arrows_of(ax)) for ax in axes.flat if ax.get_visible()]
    assert widest[0] == pytest.approx(0.4 + 3.6 * 0.7)
    assert widest[2] == pytest.approx(0.4 + 3.6 * 0.7 / 4)
    assert all(ax.get_legend() is None for ax in axes.flat)
    (legend,) = axes[0, 0].figure.legends
    assert texts(legend.get_texts()) == ["class 0", "class 1"]


def test_grid_of_ego_networks_has_their_scale():
    axes = attention_grid([ALPHA], EDGE_INDEX, node=0, pos=PLACES)
    drawn = as_edges(axes[0, 0])
    assert drawn[3, 0].width == pytest.approx(4.0)
    assert drawn[2, 0].width == pytest.approx(0.4 + 3.6 * 3 / 7)


def test_grid_of_recorded_layers():
    model = gattn.models.GAT(34, 8, 2, 4, heads=2).eval()
    data = KarateClub()[0]
    with gattn.recording.record_attention(model) as records:
        model(data.x, data.edge_index)
    graph = records["convs.0"][0].graph
    axes = attention_grid({name: calls[0].weights for name, calls in records.items()}, graph, node=33)
    assert axes.shape == (2, 2)
    assert [row[0].get_ylabel() for row in axes] == ["convs.0", "convs.1"]


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("there is no layer: run the model inside gattn.record_attention", ([],)),
        ("16 layers of up to 12 heads would be more than", ([torch.ones(12, 2, 2)] * 16,)),
        ("graph's 8 edges", ([ALPHA, ALPHA[1:]], EDGE_INDEX)),
        ("batch: take one element", ([weights_of(1, 2, 3, 3)],)),
    ],
)
def test_grid_errors(message, arguments):
    with pytest.raises(ValueError, match=message):
        attention_grid(*arguments)


# Entropy -------------------------------------------------------------------------------------------------------------


def test_entropy_by_hand():
    nats, uniform = entropy(ALPHA, EDGE_INDEX)
    log = np.log
    expected = [
        -0.3 * log(0.3) - 0.7 * log(0.7),
        0.0,
        -2 * 0.1 * log(0.1) - 2 * 0.2 * log(0.2) - 0.4 * log(0.4),
        0.0,
    ]
    np.testing.assert_allclose(nats, expected, atol=1e-7)
    np.testing.assert_allclose(uniform, [log(2), 0.0, log(5), 0.0])


def test_entropy_of_heads_and_matrices():
    matrices = weights_of(3, 5, 7).double()
    nats, uniform = entropy(matrices)
    torch.testing.assert_close(nats, -(matrices * matrices.log()).sum(-1))
    torch.testing.assert_close(uniform, torch.full((5,), 7.0, dtype=torch.double).log())
    target, source = torch.cartesian_prod(torch.arange(5), torch.arange(7)).t()
    graph = gattn.SparseGraph(torch.stack([source, target]), num_sources=7, num_targets=5)
    sparse_nats, sparse_uniform = entropy(matrices[:, target, source].t(), graph)
    torch.testing.assert_close(sparse_nats, nats.t())
    torch.testing.assert_close(sparse_uniform, uniform)


def test_entropy_of_uniform_attention_and_what_is_masked():
    causal = torch.ones(4, 4).tril()
    nats, uniform = entropy(causal)  # rows are divided by their sums
    torch.testing.assert_close(nats, uniform)
    torch.testing.assert_close(uniform, torch.arange(1.0, 5.0, dtype=torch.double).log())
    nats, uniform = entropy(torch.zeros(2, 3))
    assert nats.tolist() == uniform.tolist() == [0.0, 0.0]


def histograms(ax):
    """The shares of targets in each bin, by head, and the edges of the bins."""
    steps = [patch.get_data() for patch in ax.patches if isinstance(patch, StepPatch)]
    return [(baseline - values) / 0.85 for values, _, baseline in steps], steps[0][1]


def test_entropy_picture():
    weights = torch.ones(3, 20, 20)
    weights[1] = torch.eye(20)
    weights[2] = torch.eye(20) + torch.eye(20).roll(1, 0)
    ax = attention_entropy(weights, title="Do they choose?")
    assert texts(ax.get_yticklabels()) == ["head 0", "head 1", "head 2"]
    assert ax.get_ylim()[0] > ax.get_ylim()[1]  # the first is on top
    assert ax.get_xlim() == (0.0, 1.0)
    heights, edges = histograms(ax)
    for share, expected in zip(heights, (1.0, 0.0, np.log(2) / np.log(20)), strict=True):
        (place,) = share.nonzero()[0]
        assert edges[place] - 1e-9 <= expected <= edges[place + 1] + 1e-9
        assert share[place] == pytest.approx(1.0)
    assert texts(ax.texts) == ["uniform", "mean 0.00", f"mean {np.log(2) / np.log(20):.2f}"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_entropy_picture_says_uniform_whatever_the_degrees(dtype):
    edge_index = random_edge_index(60, num_edges=500)
    degree = edge_index[1].bincount(minlength=60)
    uniform = (1.0 / degree[edge_index[1]]).to(dtype).unsqueeze(1).expand(-1, 2)
    ax = attention_entropy(uniform, edge_index)
    assert texts(ax.texts) == ["uniform", "uniform"]
    for share in histograms(ax)[0]:
        assert share[-1] == pytest.approx(1.0)
        assert (share[:-1] == 0).all()


def test_entropy_picture_of_untrained_heads_is_alike():
    data = KarateClub()[0]
    conv = gattn.nn.GATConv(34, 8, heads=4)
    with gattn.record_attention(conv) as records:
        conv(data.x, data.edge_index)
    heights, _ = histograms(attention_entropy(records[""]))
    assert len(heights) == 4
    for share in heights:  # nearly every target is in one of the last two bins, and none far from them
        assert share[-2:].sum() > 0.9
        assert share[-5:].sum() == pytest.approx(1.0)


def test_entropy_picture_has_one_scale_for_all_heads():
    weights = torch.eye(4).repeat(2, 1, 1) + 1e-9
    weights[1, :2] = 1.0
    heights, _ = histograms(attention_entropy(weights))
    assert [share.max() for share in heights] == pytest.approx([1.0, 0.5])


def test_entropy_picture_leaves_out_who_has_no_choice():
    with pytest.raises(ValueError, match="two neighbours"):
        attention_entropy(torch.ones(3), torch.tensor([[0, 1, 2], [0, 1, 2]]))
    ax = attention_entropy(torch.stack([ALPHA] * 2, 1), EDGE_INDEX, head=1)
    assert texts(ax.get_yticklabels()) == ["head 1"]
    assert "(2 of 4 targets have no choice and are left out)" in ax.get_xlabel()
    _, own = plt.subplots()
    assert attention_entropy(torch.stack([ALPHA] * 2, 1), EDGE_INDEX, head="mean", ax=own) is own
    (share,) = histograms(ax)[0]
    assert share[0] == 0  # nodes 1 and 3 would be there
    assert share[22] == pytest.approx(1.0)  # 0.61 / ln 2 and 1.47 / ln 5 are between 0.88 and 0.92


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ValueError, "30 heads are too many", (weights_of(30, 3, 3),)),
        (ValueError, "graph's 8 edges", (ALPHA[1:], EDGE_INDEX)),
        (ValueError, "come with its edge_index", (ALPHA,)),
    ],
)
def test_entropy_errors(error, message, arguments):
    with pytest.raises(error, match=message):
        attention_entropy(*arguments)


def test_entropy_of_a_head_that_is_not_there():
    with pytest.raises(IndexError, match="no head 2"):
        attention_entropy(weights_of(2, 3, 3), head=2)


# Rollout -------------------------------------------------------------------------------------------------------------


def test_rollout_by_hand():
    first = torch.tensor([[0.5, 0.5], [0.0, 1.0]])
    second = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]])
    # A1 = [[.75, .25], [0, 1]]; the mean of the second layer's heads is [[1, 0], [.5, .5]], A2 = [[1, 0], [.25, .75]].
    expected = torch.tensor([[0.75, 0.25], [0.1875, 0.8125]], dtype=torch.double)
    torch.testing.assert_close(rollout([first, second]), expected)
    torch.testing.assert_close(rollout({"a": first, "b": second}), expected)
    torch.testing.assert_close(rollout([first, second[0]], residual=0.0), second[0].double() @ first.double())
    torch.testing.assert_close(rollout([first, second], residual=1.0), torch.eye(2, dtype=torch.double))


def test_rollout_on_a_graph_equals_that_of_matrices():
    edge_index = random_edge_index(9, num_edges=30)  # the last node hears nobody, some edges are there twice
    layers = [gattn.softmax(torch.randn(30, heads).double(), edge_index[1], 9) for heads in (3, 1)]
    matrices = []
    for weights in layers:
        matrix = torch.zeros(weights.size(1), 9, 9, dtype=torch.double)
        for edge, (source, target) in enumerate(edge_index.t().tolist()):
            matrix[:, target, source] += weights[edge]
        matrices.append(matrix)
    result = rollout(layers, gattn.SparseGraph(edge_index, num_sources=9, num_targets=9), residual=0.3)
    assert result.is_sparse
    torch.testing.assert_close(result.to_dense(), rollout(matrices, residual=0.3))
    torch.testing.assert_close(result.to_dense().sum(1), torch.ones(9, dtype=torch.double))
    assert result.to_dense()[8].tolist() == [0.0] * 8 + [1.0]


@pytest.mark.parametrize(
    ("message", "arguments", "options"),
    [
        ("there is no layer", ([],), {}),
        (r"all of one size; got \[\(3, 4\)\]", ([weights_of(2, 3, 4)],), {}),
        (r"all of one size; got \[\(3, 3\), \(4, 4\)\]", ([weights_of(3, 3), weights_of(4, 4)],), {}),
        ("between 0 and 1; got 1.5", ([weights_of(3, 3)],), {"residual": 1.5}),
        ("graph's 8 edges", ([ALPHA[1:]], EDGE_INDEX), {}),
        ("same nodes", ([ALPHA], gattn.SparseGraph(EDGE_INDEX, num_sources=5, num_targets=4)), {}),
    ],
)
def test_rollout_errors(message, arguments, options):
    with pytest.raises(ValueError, match=message):
        rollout(*arguments, **options)


def test_rollout_picture_of_matrices():
    layers = weights_of(3, 2, 4, 4)
    ax = attention_rollout(layers, labels=TOKENS, title="Rollout", residual=0.25)
    np.testing.assert_array_equal(ax.images[0].get_array(), rollout(layers, residual=0.25))
    assert texts(ax.get_xticklabels()) == texts(ax.get_yticklabels()) == TOKENS
    assert [other.get_ylabel() for other in ax.figure.axes] == ["target", "part in the output"]
    assert ax.get_title() == "Rollout"
    with pytest.raises(ValueError, match="goes with a graph"):
        attention_rollout(layers, node=0)


def test_rollout_picture_of_a_graph():
    ax = attention_rollout([ALPHA, ALPHA], EDGE_INDEX, node=0, pos=PLACES)
    parts = rollout([ALPHA, ALPHA], EDGE_INDEX).to_dense()[0]
    assert set(as_edges(ax)) == set(ARROWS)  # two layers: two hops
    np.testing.assert_allclose(nodes_of(ax).get_facecolors(), WEIGHTS((parts / parts.max()).numpy()))
    assert ax.figure.axes[1].get_ylim() == (0.0, pytest.approx(parts.max().item()))
    one = attention_rollout([ALPHA], EDGE_INDEX, node=0, pos=PLACES)
    assert set(as_edges(one)) == {(2, 0), (3, 0)}
    matrix = attention_rollout([ALPHA], EDGE_INDEX)
    np.testing.assert_array_equal(matrix.images[0].get_array(), rollout([ALPHA], EDGE_INDEX).to_dense())
    with pytest.raises(ValueError, match="max_nodes=3"):
        attention_rollout([ALPHA], EDGE_INDEX, max_nodes=3)
    with pytest.raises(IndexError, match="no node 7"):
        attention_rollout([ALPHA], EDGE_INDEX, node=7)


# Records -------------------------------------------------------------------------------------------------------------


def recorded_gat():
    data, model = KarateClub()[0], gattn.models.GAT(34, 8, 2, 4, heads=2).eval()
    with gattn.record_attention(model) as records:
        model(data.x, data.edge_index)
    return records


def recorded_transformer(batch=1, calls=1):
    model = gattn.models.TransformerLM(10, 16, 2, 4).eval()
    with gattn.record_attention(model) as records:
        for call in range(calls):
            model(torch.randint(0, 10, (batch, 5 + call)))
    return records


def test_records_of_sequences():
    records = recorded_transformer(calls=2)
    name, (first, last) = next(iter(records.items()))
    (image,) = attention_matrix(records[name], head=1).images
    np.testing.assert_array_equal(image.get_array(), last.weights[0, 1].double())
    for given in (attention_matrix(first, head=1), attention_matrix(records[name], head=1, call=0)):
        np.testing.assert_array_equal(given.images[0].get_array(), first.weights[0, 1].double())
    axes = attention_grid(records)
    assert [row[0].get_ylabel() for row in axes] == list(records)
    np.testing.assert_array_equal(axes[0, 1].images[0].get_array(), last.weights[0, 1].double())
    by_call = attention_grid(records[name])
    assert [row[0].get_ylabel() for row in by_call] == ["call 0", "call 1"]
    np.testing.assert_array_equal(by_call[0, 1].images[0].get_array(), first.weights[0, 1].double())
    torch.testing.assert_close(entropy(records[name])[0], entropy(last.weights[0])[0])
    torch.testing.assert_close(rollout(records), rollout([calls[-1].weights[0] for calls in records.values()]))
    assert attention_rollout(records).images
    assert attention_entropy(last).patches
    assert attention_arcs(last, "abcdef", head=0).collections


def test_records_of_graphs():
    records = recorded_gat()
    (call,) = records["convs.0"]
    ax = attention_graph(records["convs.0"], head=1)
    expected = attention_graph(call.edge_index, call.weights, head=1)
    assert arrows_of(ax) == arrows_of(expected)
    assert arrows_of(attention_graph(call, head=1)) == arrows_of(expected)
    matrix = attention_matrix(call, head=1).images[0].get_array()
    source, target = call.edge_index
    np.testing.assert_array_equal(matrix[target, source], call.weights[:, 1].double())
    assert matrix.astype(bool).sum() == len(source)
    assert attention_grid(records, node=33).shape == (2, 2)
    torch.testing.assert_close(entropy(call)[0], entropy(call.weights, call.edge_index)[0])
    layers = [calls[0].weights for calls in records.values()]
    torch.testing.assert_close(rollout(records), rollout(layers, call.graph))
    assert len(arrows_of(attention_rollout(records, node=0))) > 0


def test_records_of_layers_with_different_graphs():
    first = AttentionRecord(ALPHA, gattn.SparseGraph(EDGE_INDEX, 4, 4))
    second = AttentionRecord(ALPHA[:2], gattn.SparseGraph(EDGE_INDEX[:, 3:5], 4, 4))
    axes = attention_grid({"a": [first], "b": [second]}, pos=PLACES)
    assert [set(as_edges(ax)) for ax in axes[:, 0]] == [set(ARROWS), {(3, 2)}]
    step = [rollout([record]).to_dense() for record in (first, second)]
    torch.testing.assert_close(rollout([[first], [second]]).to_dense(), step[1] @ step[0])


def test_records_of_pyg_and_torch():
    data = KarateClub()[0]
    model = torch_geometric.nn.GATConv(34, 8, heads=2)
    with gattn.record_attention(model) as records:
        model(data.x, data.edge_index)
    assert len(arrows_of(attention_graph(records[""], head=0))) == data.num_edges
    model, x = torch.nn.MultiheadAttention(8, 2), torch.randn(5, 8)
    with gattn.record_attention(model) as records:
        model(x, x, x)
    assert attention_matrix(records[""], head=0).images


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "batch of 3: choose element=0 to element=2", lambda: attention_matrix(BATCH, head=0)),
        (ValueError, "batch of 3: choose element=0 to element=2", lambda: attention_grid({"a": [BATCH]})),
        (IndexError, "no element 3: the batch has 3", lambda: attention_matrix(BATCH, head=0, element=3)),
        (IndexError, "no call 1: the layer was called 1 times", lambda: attention_matrix([BATCH], head=0, call=1)),
        (ValueError, "not called with a batch", lambda: attention_graph(SPARSE, element=0)),
        (ValueError, r"2 layers: choose one of 'a', 'b', such as records\['a'\]", lambda: attention_matrix(BOTH)),
        (ValueError, "a record has its own graph", lambda: attention_entropy(SPARSE, EDGE_INDEX)),
        (ValueError, "on a CompleteGraph: draw its weights with attention_matrix", lambda: attention_graph(ONE)),
        (ValueError, "weights are missing", lambda: attention_graph(EDGE_INDEX)),
        (ValueError, r"along edges \(b\), others between all nodes \(a\)", lambda: attention_grid(BOTH)),
    ],
)
def test_record_errors(error, message, call):
    with pytest.raises(error, match=message):
        call()


SPARSE = AttentionRecord(ALPHA, gattn.SparseGraph(EDGE_INDEX, 4, 4))
BATCH = AttentionRecord(weights_of(3, 2, 4, 4), gattn.CompleteGraph(4))
ONE = AttentionRecord(weights_of(2, 4, 4), gattn.CompleteGraph(4))
BOTH = {"a": [ONE], "b": [SPARSE]}


def test_element_of_a_batch_and_of_a_packed_graph():
    image = attention_matrix(BATCH, head=1, element=2).images[0].get_array()
    np.testing.assert_array_equal(image, BATCH.weights[2, 1].double())
    np.testing.assert_array_equal(attention_matrix(BATCH.weights, head=1, element=2).images[0].get_array(), image)
    layer, x = gattn.nn.MultiheadAttention(8, 2), torch.randn(5, 8)
    with gattn.record_attention(layer) as records:
        layer(x, x, x, graph=gattn.CompleteGraph.packed([2, 3]))
    assert attention_matrix(records[""], head=0, element=1).images[0].get_array().shape == (3, 3)


# What is large, long or foreign --------------------------------------------------------------------------------------


def test_any_number_of_classes():
    ax = attention_graph(torch.arange(40).expand(2, -1), torch.ones(40), classes=range(40))
    looks = set()
    for item in ax.collections:
        if not is_arrows_or_rims(item):
            outline = item.get_paths()[0].vertices.round(6).tobytes()
            looks |= {(outline, tuple(colour)) for colour in item.get_facecolors()}
    assert len(looks) == 40
    handles = ax.get_legend().legend_handles
    assert len({(handle.get_color(), handle.get_marker()) for handle in handles[:-1]}) == 24
    assert texts(ax.get_legend().get_texts())[-1] == "and 16 more classes"


def test_rings_of_self_loops_are_seen_on_every_colour():
    ax = attention_graph(EDGE_INDEX, ALPHA, pos=PLACES, classes=range(4))
    (rings,) = [item for item in ax.collections if item.get_label() == "_rims"]
    nodes = nodes_of(ax)
    assert rings.get_zorder() < nodes.get_zorder()
    assert (rings.get_facecolors() == 1).all()  # white lies between the node and its ring
    inner = np.sqrt(rings.get_sizes()) - rings.get_linewidths()
    assert (inner >= np.sqrt(nodes.get_sizes()[[2, 3]]) + 2).all()


def test_thousands_of_arrows_are_one_artist():
    edge_index = random_edge_index(150, num_edges=4500)
    start = time.perf_counter()
    ax = attention_graph(edge_index, torch.rand(4500), pos=torch.rand(150, 2))
    ax.figure.canvas.draw()
    assert time.perf_counter() - start < 10  # patches of their own took more than 20
    assert len(ax.collections) <= 3
    assert not ax.patches


def test_arrows_end_at_their_nodes_on_the_canvas():
    ax = attention_graph(torch.tensor([[0], [1]]), torch.ones(1), pos=PLACES[:2])
    ax.figure.canvas.draw()
    (arrows,) = [item for item in ax.collections if isinstance(item, Arrows)]
    (outline,) = arrows.outlines()
    source, target = ax.transData.transform(PLACES[:2].numpy())
    point = ax.figure.dpi / 72
    radius = 0.5 * nodes_of(ax).get_sizes()[0] ** 0.5 * point
    away = np.linalg.norm(outline - target, axis=1)
    assert radius <= away.min() <= radius + 3 * point
    assert np.linalg.norm(outline - source, axis=1).min() == pytest.approx(radius, abs=2 * point)


def test_a_layout_that_takes_minutes_is_refused():
    edge_index = torch.arange(2000).view(2, 1000)
    with pytest.raises(ValueError, match="place 2000 nodes would take minutes"):
        attention_graph(edge_index, torch.ones(1000), max_nodes=2000)
    assert attention_graph(edge_index, torch.ones(1000), max_nodes=2000, pos=torch.rand(2000, 2))


def test_long_labels_leave_room_for_the_matrix():
    ax = attention_matrix(weights_of(4, 4), ["x" * 56] * 4, ["y" * 56] * 4)
    assert texts(ax.get_yticklabels()) == ["x" * 23 + "…"] * 4
    ax.figure.canvas.draw()
    assert ax.get_window_extent().width > 80


@pytest.mark.parametrize("layers", [1, 3])
def test_grids_fit_a_page(layers):
    names = [f"token{number}" for number in range(40)]
    axes = attention_grid([weights_of(8, 40, 40)] * layers, row_labels=names, column_labels=names)
    width, height = axes[0, 0].figure.get_size_inches()
    assert width <= 11
    assert height <= 13
    axes[0, 0].figure.canvas.draw()
    named = axes[0, 0].get_yticklabels()
    assert 5 <= len(named) < 40
    assert texts(named) == [names[int(place)] for place in axes[0, 0].get_yticks()]
    assert not overlap(named)


def test_matrices_fit_a_page():
    width, height = attention_matrix(weights_of(80, 80), range(80), range(80)).figure.get_size_inches()
    assert width <= 11
    assert height <= 13


def test_characters_that_the_font_lacks_are_replaced_with_one_warning():
    words = ["日本", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "cafe\u0301", "the"]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        ax = attention_matrix(weights_of(4, 4), words)
        ax.figure.canvas.draw()
    assert texts(ax.get_yticklabels()) == ["□□", "□□□", "café", "the"]
    (warning,) = said
    assert "lacks 5 of the characters" in str(warning.message)


# Arcs ----------------------------------------------------------------------------------------------------------------


def arcs_of(ax):
    (curves,) = ax.collections
    return list(zip(curves.get_segments(), curves.get_linewidths(), curves.get_colors(), strict=True))


def test_arcs_join_words():
    weights = torch.tensor([[0.0, 0.0, 0.0], [0.8, 0.2, 0.0], [0.0, 0.5, 0.5]])
    weights[0, 2] = 1.0
    ax = attention_arcs(weights, ["a", "long$ word", "c"], title="Arcs")
    words = {text.get_text(): text.get_position()[0] for text in ax.texts}
    assert list(words) == ["a", "long$ word", "c"]
    assert not any(text.get_parse_math() for text in ax.texts)
    assert sorted(words.values()) == list(words.values())
    places = list(words.values())
    drawn = {}
    for curve, width, colour in arcs_of(ax):
        ends = curve[[0, -1], 0]
        target, source = (int(np.abs(np.array(places) - end).argmin()) for end in ends)
        drawn[target, source] = (width, tuple(colour), curve[:, 1].mean())
        if target != source:
            np.testing.assert_allclose(ends, [places[target], places[source]])
    looks = {(1, 0): 0.8, (1, 1): 0.2, (2, 1): 0.5, (2, 2): 0.5, (0, 2): 1.0}
    assert set(drawn) == set(looks)
    for (target, source), alpha in looks.items():
        width, colour, height = drawn[target, source]
        assert width == pytest.approx(0.4 + 3.6 * alpha)
        assert colour == pytest.approx(EDGES(alpha), abs=0.02)
        assert (height < 0) == (source > target)  # ahead is below
    assert [other.get_ylabel() for other in ax.figure.axes[1:]] == ["attention weight α"]
    assert ax.get_title() == "Arcs"


def test_arcs_of_one_target_and_large_weights_alone():
    weights = torch.tensor([[0.7, 0.3, 0.0], [0.05, 0.9, 0.05], [0.2, 0.2, 0.6]])
    assert len(arcs_of(attention_arcs(weights, "abc"))) == 6
    assert len(arcs_of(attention_arcs(weights, "abc", minimum=0.25))) == 4
    ax = attention_arcs(weights, "abc", target=2)
    assert len(arcs_of(ax)) == 3
    assert [text.get_fontweight() for text in ax.texts] == ["normal", "normal", "bold"]
    assert len(arcs_of(attention_arcs(torch.full((5, 5), 0.2), "abcde"))) == 25  # all of uniform attention


def test_arcs_between_two_lines():
    ax = attention_arcs(torch.eye(2, 3), ["der", "Hund"], ["the", "dog", "barks"])
    assert texts(ax.texts) == ["der", "Hund", "the", "dog", "barks"]
    lines = {text.get_text(): text.get_position() for text in ax.texts}
    assert lines["the"][1] > lines["der"][1]
    ends = [(round(curve[0, 0], 6), round(curve[-1, 0], 6)) for curve, _, _ in arcs_of(ax)]
    expected = [(lines["der"], lines["the"]), (lines["Hund"], lines["dog"])]
    assert ends == [(round(below[0], 6), round(above[0], 6)) for below, above in expected]


def test_words_on_a_line_do_not_overlap():
    ax = attention_arcs(weights_of(60, 60), ["Donaudampfschifffahrt"[: 3 + i % 18] for i in range(60)])
    assert ax.figure.get_size_inches()[0] <= 11
    ax.figure.canvas.draw()
    assert not overlap(ax.texts)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ValueError, "one word for each of the 3", {"weights": weights_of(3, 3), "tokens": "ab"}),
        (ValueError, "pass their words as source_tokens", {"weights": weights_of(3, 2), "tokens": "abc"}),
        (ValueError, "61 words do not fit on a line", {"weights": weights_of(61, 61), "tokens": range(61)}),
        (IndexError, "no target 3", {"weights": weights_of(3, 3), "tokens": "abc", "target": 3}),
        (ValueError, "2 heads: choose", {"weights": weights_of(2, 3, 3), "tokens": "abc"}),
    ],
)
def test_arcs_errors(error, message, arguments):
    with pytest.raises(error, match=message):
        attention_arcs(**arguments)


# The module ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_plotting_is_imported_by_visualize_alone_and_may_be_missing():
    code = (
        "import sys, gattn\n"
        "assert not {'matplotlib', 'gattn.visualize'} & set(sys.modules)\n"
        "sys.modules['matplotlib'] = None\n"
        "import gattn.visualize\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "pip install matplotlib networkx" in result.stderr


def test_no_message_asks_for_an_extra():
    """Which can be installed by name only where an index has gattn; its packages can be anywhere."""
    for path in Path(gattn.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert "gattn[" not in node.value, f"{path}:{node.lineno}"


def test_arrays_of_numpy_and_what_is_no_weights():
    edge_index, weights = torch.tensor([[0, 1, 2, 0], [1, 2, 0, 0]]), torch.tensor([1.0, 1.0, 0.75, 0.25])
    expected = attention_entropy(weights, edge_index).patches[0].get_data().values.tolist()
    assert attention_entropy(weights.numpy(), edge_index.numpy()).patches[0].get_data().values.tolist() == expected
    for given in (None, "abc"):
        with pytest.raises(TypeError, match="attention weights must be numbers; got"):
            attention_matrix(given)
    for options, name in (({"node": 0.5}, "node"), ({"node": 0, "hops": 1.5}, "hops")):
        with pytest.raises(TypeError, match=f"{name} must be an integer"):
            attention_graph(edge_index, weights, **options)
