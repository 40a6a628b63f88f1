"""The three layers against PyG's: outputs, attention weights and every gradient, over every pair of options."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
import torch_geometric.typing
from allpairspy import AllPairs
from torch_geometric import EdgeIndex
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import coalesce, to_edge_index, to_torch_coo_tensor, to_torch_csr_tensor

import gattn.nn
from gattn.testing import assert_as_exact_as, random_edge_index

IN, OUT, EDGE_DIM = 6, 5, 3
FORMS = ["edge_index", "EdgeIndex", "csr", "coo"] + ["SparseTensor"] * torch_geometric.typing.WITH_TORCH_SPARSE
SPARSE = ("csr", "coo", "SparseTensor")

COMMON = {
    "inputs": ["single", "pair, shared weights", "bipartite"],
    "form": FORMS,
    "dtype": [torch.float32, torch.float64],
    "heads": [1, 3],
    "concat": [True, False],
    "dropout": [0.0, 0.6],
    "edge": [None, "weights", "features", "lazy"],
    "bias": [True, False],
    "lazy": [False, True],
    "aggr": [None, "mean", "max"],
    "flow": ["source_to_target", "target_to_source"],
}
LOOPS = {
    "negative_slope": [0.2, 0.5],
    "add_self_loops": [True, False],
    "fill_value": [0.5, torch.tensor([1.0, 2.0, 3.0]), "add", "mean", "min", "max", "mul"],
    "residual": [False, True],
}
OPTIONS = {
    "GATConv": {**COMMON, **LOOPS, "size": [False, True], "no_targets": [False, True]},
    "GATv2Conv": {**COMMON, **LOOPS, "share_weights": [False, True]},
    "TransformerConv": {**COMMON, "beta": [False, True], "root_weight": [True, False]},
}
FORWARD = ("out", "weights")
NOT_FOR_THE_LAYER = ("inputs", "form", "dtype", "edge", "lazy", "size", "no_targets")


def possible(options):
    """Leaves out what PyG cannot do, or what means nothing."""
    get = options.get
    sparse = get("form") in SPARSE
    if sparse and get("flow") == "target_to_source":
        return False
    if sparse and get("edge") and get("add_self_loops"):
        return False
    # PyG gives a pair's output the wrong number of rows then; test_flow.py has our answer.
    if get("inputs", "single") != "single" and get("flow") == "target_to_source":
        return False
    if get("share_weights") and get("inputs") == "bipartite":
        return False
    if get("no_targets") and (get("inputs") == "single" or get("residual")):
        return False
    # PyG's TransformerConv takes no edge weights, and nowhere gives weights back beside a COO matrix of features.
    if get("edge") == "weights" and "add_self_loops" not in options:
        return False
    if get("form") == "coo" and get("edge") in ("features", "lazy"):
        return False
    # PyG's aggregation of a fill value that is a vector knows feature vectors only.
    if isinstance(get("fill_value"), torch.Tensor) and (get("edge") == "weights" or sparse):
        return False
    return not (get("size") and get("form") in (*SPARSE, "EdgeIndex"))


def cases():
    for layer, options in OPTIONS.items():
        names = list(options)
        # The filter sees rows that are not complete yet.
        filter_row = lambda row, names=names: possible(dict(zip(names, row, strict=False)))  # noqa: E731
        pairs = AllPairs(list(options.values()), filter_func=filter_row)
        for number, row in enumerate(pairs):
            chosen = dict(zip(names, row, strict=True))
            yield pytest.param(layer, chosen, id=f"{layer}-{number}")


def make_inputs(options):
    """Float64 features and edge features, and an edge list without duplicates (sparse matrices would merge them)."""
    num_sources, num_targets = (9, 9) if options["inputs"] == "single" else (9, 7)
    edge_index = coalesce(random_edge_index(num_sources, num_targets, 40, seed=1))
    if options["flow"] == "target_to_source":
        edge_index = edge_index.flip(0)
    x = torch.randn(num_sources, IN, dtype=torch.double)
    if options["inputs"] != "single":
        channels = IN + 2 if options["inputs"] == "bipartite" else IN
        x = (x, None if options.get("no_targets") else torch.randn(num_targets, channels, dtype=torch.double))
    edge_attr = None
    if options["edge"]:
        shape = (edge_index.size(1),) if options["edge"] == "weights" else (edge_index.size(1), EDGE_DIM)
        edge_attr = torch.randn(shape, dtype=torch.double)
    return x, edge_index, edge_attr, (num_sources, num_targets)


def make_layer(module, layer, options):
    kwargs = {name: value for name, value in options.items() if name not in NOT_FOR_THE_LAYER}
    if kwargs["aggr"] is None:
        del kwargs["aggr"]
    if isinstance(kwargs.get("fill_value"), torch.Tensor):
        kwargs["fill_value"] = kwargs["fill_value"].to(options["dtype"])
    in_channels = -1 if options["lazy"] else IN
    if options["inputs"] == "bipartite":
        in_channels = (-1, -1) if options["lazy"] else (IN, IN + 2)
    edge_dim = {None: None, "weights": 1, "features": EDGE_DIM, "lazy": -1}[options["edge"]]
    return getattr(module, layer)(in_channels, OUT, edge_dim=edge_dim, **kwargs)


def make_graph(form, edge_index, edge_attr, size):
    """The graph in one of PyG's forms; a sparse adjacency carries the edge features itself."""
    size = size[::-1]  # rows are targets
    adjacency_index = edge_index.flip(0)
    features = edge_attr if edge_attr is not None and edge_attr.dim() > 1 else None
    if form == "EdgeIndex":
        return EdgeIndex(edge_index)
    if form == "csr":
        return to_torch_csr_tensor(adjacency_index, features, size=size)
    if form == "coo":
        return to_torch_coo_tensor(adjacency_index, features, size=size)
    if form == "SparseTensor":
        return SparseTensor(row=edge_index[1], col=edge_index[0], value=features, sparse_sizes=size)
    return edge_index


def run(conv, x, graph, edge_attr, size):
    """Output, weights and every gradient, by name; and the edges that the weights belong to, `[2, E]`."""
    leaves = dict(conv.named_parameters())
    for i, features in enumerate(x if isinstance(x, tuple) else (x,)):
        if features is not None:
            leaves[f"x[{i}]"] = features.requires_grad_()
    kwargs = {"size": size} if size else {}
    if edge_attr is not None:
        leaves["edge_attr"] = edge_attr.requires_grad_()
        kwargs["edge_attr"] = edge_attr
    out, weights = conv(x, graph, return_attention_weights=True, **kwargs)
    if isinstance(graph, SparseTensor):
        row, column, alpha = weights.coo()
        edges = torch.stack([row, column])
    else:
        edges, alpha = weights
    (weigh(out) + weigh(alpha)).backward()
    if edges.layout != torch.strided:
        edges = to_edge_index(edges)[0]
    gradients = {f"gradient of {name}": leaf.grad for name, leaf in leaves.items()}
    return {"out": out.detach(), "weights": alpha.detach(), **gradients}, edges


def weigh(tensor):
    """A loss to which every element contributes differently."""
    return (tensor * torch.linspace(-1, 1, tensor.numel(), dtype=tensor.dtype).view(tensor.shape).cos()).sum()


@pytest.mark.parametrize(("layer", "options"), list(cases()))
def test_layer_equals_pyg(layer, options):
    x, edge_index, edge_attr, size = make_inputs(options)
    dtype = options["dtype"]

    def inputs(dtype):
        cast = lambda t: None if t is None else t.detach().to(dtype).clone()  # noqa: E731
        features = cast(edge_attr)
        graph = make_graph(options["form"], edge_index, features, size)
        if options["form"] in SPARSE and features is not None and features.dim() > 1:
            features = None
        return (tuple(map(cast, x)) if isinstance(x, tuple) else cast(x)), graph, features, options.get("size") and size

    def prepare(conv, dtype):
        conv = copy.deepcopy(conv).to(dtype).eval()
        if isinstance(options.get("fill_value"), torch.Tensor):
            conv.fill_value = conv.fill_value.to(dtype)
        return conv

    theirs, ours = (prepare(make_layer(module, layer, options), dtype) for module in (pyg, gattn.nn))
    for conv in (theirs, ours):
        run(conv, *inputs(dtype))  # the first call finds lazy sizes
        conv.zero_grad(set_to_none=True)
    # Checkpoints go both ways.
    assert list(theirs.state_dict()) == list(ours.state_dict())
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())

    exact, _ = run(prepare(theirs, torch.double), *inputs(torch.double))
    expected, expected_edges = run(theirs, *inputs(dtype))
    actual, edges = run(ours, *inputs(dtype))
    assert torch.equal(edges, expected_edges)
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        if expected[name] is None:
            assert value is None or value.abs().max() == 0, name
        else:
            # Gradients that cancel out (a softmax ignores what all its logits share) are as exact as their terms.
            scale = max(
                exact[other].abs().max().item()
                for other in exact
                if exact[other] is not None and (other in FORWARD) == (name in FORWARD)
            )
            assert_as_exact_as(value, expected[name], exact[name], scale=scale, name=name)


@pytest.mark.parametrize("is_pair", [False, True])
@pytest.mark.parametrize("in_channels", [8, 40])
def test_terms_of_gat_on_many_nodes(in_channels, is_pair):
    """Their products are ordered by cost, which depends on the channels and on whether W x is needed as well."""
    edge_index = random_edge_index(2000, 2000, 6000)
    x = torch.randn(2000, in_channels, dtype=torch.double, requires_grad=True)
    conv = pyg.GATConv((in_channels, in_channels) if is_pair else in_channels, 6, heads=3).double()
    ours = gattn.nn.GATConv((in_channels, in_channels) if is_pair else in_channels, 6, heads=3).double()
    ours.load_state_dict(conv.state_dict())
    results = []
    for layer in (conv, ours):
        out = layer((x, x) if is_pair else x, edge_index)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])])
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("layer", OPTIONS)
def test_same_seed_gives_same_parameters(layer):
    kwargs = {"heads": 3, "edge_dim": 4}
    torch.manual_seed(1)
    theirs = getattr(pyg, layer)((6, 7), 5, **kwargs)
    torch.manual_seed(1)
    ours = getattr(gattn.nn, layer)((6, 7), 5, **kwargs)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, ours.get_parameter(name)), name
    torch.manual_seed(2)
    theirs.reset_parameters()
    torch.manual_seed(2)
    ours.reset_parameters()
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, ours.get_parameter(name)), name
    assert str(ours) == str(theirs)


@pytest.mark.parametrize("layer", OPTIONS)
def test_csc_adjacency(layer):
    """PyG refuses CSC; ours equals the edge list."""
    edge_index = coalesce(random_edge_index(8, 8, 30))
    x = torch.randn(8, IN, dtype=torch.double)
    conv = getattr(gattn.nn, layer)(IN, OUT, heads=2).double()
    csc = torch.sparse_coo_tensor(edge_index.flip(0), torch.ones(edge_index.size(1)), (8, 8)).to_sparse_csc()
    out, (adjacency, alpha) = conv(x, csc, return_attention_weights=True)
    torch.testing.assert_close(out, conv(x, edge_index))
    assert alpha.shape[0] == adjacency._nnz()


@pytest.mark.parametrize("layer", OPTIONS)
def test_return_attention_weights_false_returns_the_output_alone(layer):
    conv = getattr(gattn.nn, layer)(IN, OUT)
    out = conv(torch.randn(4, IN), torch.tensor([[0, 1], [1, 2]]), return_attention_weights=False)
    assert isinstance(out, torch.Tensor)
    assert out.shape == (4, OUT)
