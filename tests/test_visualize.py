"""What is drawn, not only that something is."""

import itertools
import subprocess
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgba
from matplotlib.patches import FancyArrowPatch, StepPatch
from torch_geometric.datasets import KarateClub

import gattn
from gattn import visualize
from gattn.testing import random_edge_index
from gattn.visualize import (
    COLOURS,
    EDGES,
    WEIGHTS,
    attention_entropy,
    attention_graph,
    attention_grid,
    attention_matrix,
    attention_rollout,
    entropy,
    rollout,
)

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


def arrows_of(ax):
    """Drawn arrows by the places that they join, rounded."""
    return [patch for patch in ax.patches if isinstance(patch, FancyArrowPatch)]


def ends(arrow):
    return [tuple(round(float(x), 6) for x in place) for place in arrow._posA_posB]


def node_at(place):
    return [tuple(x) for x in PLACES.tolist()].index(place)


def as_edges(ax):
    return {tuple(node_at(end) for end in ends(arrow)): arrow for arrow in arrows_of(ax)}


def nodes_of(ax):
    return next(item for item in ax.collections if len(item.get_offsets()))


def test_graph_draws_weights_as_width_and_colour():
    ax = attention_graph(EDGE_INDEX, ALPHA, pos=PLACES)
    drawn = as_edges(ax)
    assert set(drawn) == set(ARROWS)
    for edge, alpha in ARROWS.items():
        assert drawn[edge].get_linewidth() == pytest.approx(0.4 + 3.6 * alpha)
        assert drawn[edge].get_edgecolor() == pytest.approx(EDGES(alpha), abs=0.02)
    widths = [arrow.get_linewidth() for arrow in arrows_of(ax)]
    assert widths == sorted(widths)  # the heaviest lies on top
    nodes = nodes_of(ax)
    np.testing.assert_array_equal(nodes.get_offsets(), PLACES)
    for node in range(4):
        alpha = RIMS.get(node, 0.0)
        assert nodes.get_linewidths()[node] == pytest.approx(0.4 + 3.6 * alpha)
        if node in RIMS:
            assert tuple(nodes.get_edgecolors()[node]) == pytest.approx(EDGES(alpha), abs=0.02)
    assert texts(ax.texts) == ["0", "1", "2", "3"]
    assert ax.figure.axes[1].get_ylim() == (0.0, 1.0)


def test_graph_scale():
    half = as_edges(attention_graph(EDGE_INDEX, ALPHA / 2, pos=PLACES))
    fixed = as_edges(attention_graph(EDGE_INDEX, ALPHA / 2, pos=PLACES, maximum=1.0))
    assert half[3, 0].get_linewidth() == pytest.approx(0.4 + 3.6 * 0.7)
    assert fixed[3, 0].get_linewidth() == pytest.approx(0.4 + 3.6 * 0.35)


def test_graph_chooses_a_head():
    weights = torch.stack([ALPHA, ALPHA / 2, torch.zeros(8)], 1)
    for head, expected in ((0, 0.7), (1, 0.35), (2, 0.0), ("mean", 0.35)):
        drawn = as_edges(attention_graph(EDGE_INDEX, weights, head=head, pos=PLACES, maximum=1.0))
        assert drawn[3, 0].get_linewidth() == pytest.approx(0.4 + 3.6 * expected)
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
    assert {edge: round((arrow.get_linewidth() - 0.4) / 3.6, 5) for edge, arrow in drawn.items()} == {
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
            "same nodes; this graph has 4 and 3",
            {"edge_index": gattn.SparseGraph(EDGE_INDEX[:, 5:7], num_sources=4, num_targets=3)},
        ),
        (ValueError, "classes must .* 4 nodes; got 3", {"classes": [0, 1, 2]}),
        (ValueError, "labels must .* 5 nodes; got 4", {"classes": [0] * 5, "labels": TOKENS}),
        (ValueError, r"pos is \[N, 2\]", {"pos": torch.rand(4, 3)}),
        (ValueError, "not where node 1 is", {"pos": {0: (0, 0)}}),
        (ValueError, "9 classes cannot be told apart", {"classes": range(9)}),
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
    widest = [max(arrow.get_linewidth() for arrow in arrows_of(ax)) for ax in axes.flat if ax.get_visible()]
    assert widest[0] == pytest.approx(0.4 + 3.6 * 0.7)
    assert widest[2] == pytest.approx(0.4 + 3.6 * 0.7 / 4)
    assert all(ax.get_legend() is None for ax in axes.flat)
    (legend,) = axes[0, 0].figure.legends
    assert texts(legend.get_texts()) == ["class 0", "class 1"]


def test_grid_of_ego_networks_has_their_scale():
    axes = attention_grid([ALPHA], EDGE_INDEX, node=0, pos=PLACES)
    drawn = as_edges(axes[0, 0])
    assert drawn[3, 0].get_linewidth() == pytest.approx(4.0)
    assert drawn[2, 0].get_linewidth() == pytest.approx(0.4 + 3.6 * 3 / 7)


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
        ("there is no layer", ([],)),
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


def test_entropy_picture():
    weights = torch.ones(3, 20, 20)
    weights[1] = torch.eye(20)
    weights[2] = torch.eye(20) + torch.eye(20).roll(1, 0)
    ax = attention_entropy(weights, title="Do they choose?")
    assert texts(ax.get_yticklabels()) == ["head 0", "head 1", "head 2"]
    assert ax.get_ylim()[0] > ax.get_ylim()[1]  # the first is on top
    assert texts(ax.get_legend().get_texts()) == ["attention", "uniform"]
    steps = [patch for patch in ax.patches if isinstance(patch, StepPatch)]
    assert len(steps) == 6
    for head, expected in enumerate((np.log(20), 0.0, np.log(2))):
        uniform, own = steps[2 * head : 2 * head + 2]
        assert own.get_facecolor()[:3] == to_rgba(COLOURS[0])[:3]
        for patch, nats in ((uniform, np.log(20)), (own, expected)):
            values, edges, baseline = patch.get_data()
            heights = baseline - values
            (place,) = heights.nonzero()[0]
            assert edges[place] - 1e-9 <= nats <= edges[place + 1] + 1e-9
            assert baseline == head


def test_entropy_picture_leaves_out_who_has_no_choice():
    with pytest.raises(ValueError, match="two neighbours"):
        attention_entropy(torch.ones(3), torch.tensor([[0, 1, 2], [0, 1, 2]]))
    ax = attention_entropy(torch.stack([ALPHA] * 2, 1), EDGE_INDEX, head=1)
    assert texts(ax.get_yticklabels()) == ["head 1"]
    _, own = plt.subplots()
    assert attention_entropy(torch.stack([ALPHA] * 2, 1), EDGE_INDEX, head="mean", ax=own) is own
    steps = [patch for patch in ax.patches if isinstance(patch, StepPatch)]
    values, _, baseline = steps[1].get_data()
    assert (baseline - values)[0] == 0  # nodes 1 and 3 would be there
    assert ((baseline - values) > 0).sum() == 2


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


# The module ----------------------------------------------------------------------------------------------------------


def test_plotting_is_imported_by_visualize_alone_and_may_be_missing():
    code = (
        "import sys, gattn\n"
        "assert not {'matplotlib', 'gattn.visualize'} & set(sys.modules)\n"
        "sys.modules['matplotlib'] = None\n"
        "import gattn.visualize\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert 'pip install "gattn[notebooks]"' in result.stderr


def test_everything_public_explains_itself():
    for name in ("matrix", "graph", "grid", "entropy", "rollout"):
        assert "Example:" in getattr(visualize, f"attention_{name}").__doc__
