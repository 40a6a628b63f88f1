"""Layers and verbs give on a GPU what they give on the CPU, with all gradients: run with `--device cuda`."""

import copy
import functools

import pytest
import torch
from torch import Tensor

import gattn
from gattn import CompleteGraph, DotScore, Identity, SparseGraph, nn
from gattn.testing import random_edge_index
from tests.cases import Recorded
from tests.layers import LAYERS, MODELS, made, row, tensors
from tests.layers import Draw as DrawInputs

pytestmark = [
    pytest.mark.skipif(torch.get_default_device().type != "cuda", reason="compares a GPU with the CPU"),
    # The CPU computes what is right; how fast does not matter.
    pytest.mark.filterwarnings("ignore:attention is computed without gattn's CPU kernels"),
    pytest.mark.filterwarnings("ignore:The usage of `scatter"),
]

N, E, C, H, D = 12, 40, 8, 2, 3
LARGE = 1100
LINEAR = {"score": DotScore(scale=1.0), "distribution": Identity(normalize=True)}
LENGTHS = [5, 1, 0, 6]


class Draw:
    """The same numbers on every device."""

    def __init__(self, device: str):
        self.device, self.leaves = device, []
        torch.manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        self.leaves.append(torch.randn(shape, dtype=torch.double).to(self.device).requires_grad_())
        return self.leaves[-1]

    def below(self, most: int, *shape: int) -> Tensor:
        return torch.randint(most, shape).to(self.device)

    def edges(self) -> Tensor:
        return random_edge_index(N, num_edges=E).to(self.device)

    def lengths(self) -> Tensor:
        return torch.tensor(LENGTHS).to(self.device)

    def layer(self, module: torch.nn.Module) -> torch.nn.Module:
        module = module.double().to(self.device)
        self.leaves += module.parameters()
        return module


def layer(name):
    """A layer or model of the table."""

    def case(draw):
        module = draw.layer(made(name))
        inputs = row(name).inputs(DrawInputs(device=draw.device, requires_grad=True))
        draw.leaves += tensors(inputs)
        return row(name).call(module, *inputs)

    return case


def attend(graph=None, size=N, batch=(), positive=False, **options):
    """Attention among nodes, on a list of edges or on a graph; what is callable is drawn."""

    def case(draw):
        given = {name: make(draw) if callable(make) else make for name, make in options.items()}
        on = draw.edges() if graph is None else graph(draw) if callable(graph) else graph
        nodes = [draw(*batch, size, H, C) for _ in range(3)]
        return gattn.attend(*(x.abs() if positive else x for x in nodes), on, **given)

    return case


def sparse_bias(size):
    def sparse(draw):
        return gattn.SparseBias(draw.below(size, 2, E), draw(E, H))

    return sparse


def bucket_bias(size):
    def buckets(draw):
        return gattn.BucketBias(draw.below(5, size, size).to(torch.uint8), draw(5, H))

    return buckets


def within_first(draw):
    return gattn.SparseBias(draw.below(5, 2, E), draw(E, H))


def near(draw):
    return gattn.BucketBias(lambda target, source: (target - source).clamp(0, 4), draw(5, H))


def heads(draw):
    layer = draw.layer(nn.MultiheadAttention(C, H, batch_first=True, position=nn.RelativePositionBias(H, 2)))
    return layer(x := draw(2, 7, C), x, x)


CASES = {
    # PyG makes LPFormer's adjacency on the default device.
    **{name: layer(name) for name in LAYERS | MODELS if name != "LPFormer"},
    "heads": heads,
    "encoder": lambda draw: draw.layer(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(C, H, 16, dropout=0.0, batch_first=True), 2)
    )(draw(2, 7, C), src_key_padding_mask=torch.arange(7, device=draw.device) >= draw.below(7, 2, 1) + 1),
    "list": attend(),
    "list, lse": attend(return_lse=True),
    "list, weights": attend(return_weights=True),
    **{
        f"list, {type(law).__name__}": attend(distribution=law)
        for law in (
            gattn.Sparsemax(),
            gattn.Entmax15(),
            gattn.TopK(3),
            gattn.Hard(sample=False),
            gattn.Sigmoid(),
            Identity(),
        )
    },
    "causal": attend(CompleteGraph(N, causal=True)),
    "window": attend(CompleteGraph(LARGE, window=(4, 0)), LARGE),
    "ragged": attend(lambda draw: CompleteGraph(6, source_lengths=draw.lengths()), 6, batch=(4,)),
    "packed": attend(CompleteGraph.packed(LENGTHS)),
    "packed, large": attend(CompleteGraph.packed([LARGE // 2] * 2), LARGE),
    "additive score": attend(CompleteGraph(N), score=lambda draw: gattn.AdditiveScore(draw(H, C))),
    "packed, sparse": attend(CompleteGraph.packed(LENGTHS), bias=within_first),
    "buckets, function": attend(CompleteGraph(LARGE, causal=True), LARGE, bias=near),
}
for law in (gattn.Softmax(), gattn.Sparsemax(), gattn.TopK(3), Identity()):
    CASES[f"complete, {type(law).__name__}"] = attend(CompleteGraph(N), distribution=law)
for size in (N, LARGE):
    for bias in (sparse_bias(size), bucket_bias(size)):
        CASES[f"{bias.__name__} of {size}"] = attend(CompleteGraph(size), size, bias=bias, return_lse=size == LARGE)
for name, graph in {
    "full": CompleteGraph(LARGE),
    "causal": CompleteGraph(LARGE, causal=True),
    "packed": CompleteGraph.packed([LARGE // 2] * 2),
    "ragged": lambda draw: CompleteGraph(LARGE, source_lengths=draw.below(LARGE, 2)),
}.items():
    CASES[f"linear, {name}"] = attend(graph, LARGE, batch=(2,), positive=True, **LINEAR)  # or a sum may be near zero


def results(name, device):
    draw = Draw(device)
    found = CASES[name](draw)
    found = tensors(found)
    torch.manual_seed(1)
    losses = [
        (out.nan_to_num(neginf=0.0) * torch.randn(out.shape, dtype=out.dtype).to(device)).sum()
        for out in found
        if out.requires_grad
    ]
    if not losses:
        return found
    leaves = [leaf for leaf in draw.leaves if leaf.requires_grad]
    return [*found, *torch.autograd.grad(sum(losses), leaves, materialize_grads=True, allow_unused=True)]


@pytest.mark.parametrize("name", CASES)
def test_the_same_as_on_the_cpu(name):
    # The CPU is the default device, as in a program that moves a model and its data to the GPU.
    # In evaluation, cuDNN's recurrent layers have no gradients.
    with torch.device("cpu"), torch.backends.cudnn.flags(enabled=False):
        found, expected = results(name, "cuda"), results(name, "cpu")
    assert all(result.is_cuda for result in found)
    for result, right in zip(found, expected, strict=True):
        torch.testing.assert_close(result.cpu(), right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["list", "complete", "linear", "GATConv", "GATv2Conv", "TransformerConv"])
def test_compiled(kind):
    with torch.device("cpu"):
        draw = Draw("cuda")
        edges = draw.edges()
        if kind.endswith("Conv"):
            layer, inputs = draw.layer(getattr(nn, kind)(C, 4, heads=H)), (draw(N, C), edges)
        else:
            graph = {"list": edges, "complete": CompleteGraph(N), "linear": CompleteGraph(LARGE)}[kind]
            size, options = (LARGE, LINEAR) if kind == "linear" else (N, {})
            inputs = [draw(size, H, C) for _ in range(3)]

            def layer(*inputs):
                return gattn.attend(*(part.abs() for part in inputs), graph=graph, **options)

        found, backend = [], Recorded()
        for function in (layer, torch.compile(layer, fullgraph=True, backend=backend)):
            out = function(*inputs)
            found.append([out, *torch.autograd.grad(out.sin().sum(), draw.leaves, retain_graph=True)])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
    is_on_edges = kind not in ("complete", "linear")
    assert ("gattn.triton_attention.default" in backend.operators) == is_on_edges


@pytest.mark.parametrize("kind", ["GATConv", "GATv2Conv", "TransformerConv"])
def test_the_same_bits_each_time(kind):
    layer, x, edges = getattr(nn, kind)(C, 4, heads=H), torch.randn(500, C, requires_grad=True), many_edges()
    leaves = [x, *layer.parameters()]
    first, *others = (torch.autograd.grad(layer(x, edges).square().sum(), leaves) for _ in range(3))
    for other in others:
        assert all(map(torch.equal, first, other))


def test_training_in_a_cuda_graph():
    x, edges = torch.randn(500, C), many_edges()
    layer = nn.GATConv(C, 4, heads=H)
    layers = layer, copy.deepcopy(layer)
    captured, eager = (functools.partial(step, layer, x, edges) for layer in layers)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as PyTorch's documentation asks, before memory is that of the graph
        for _ in range(3):
            captured()
    torch.cuda.current_stream().wait_stream(side)
    for _ in range(3):
        eager()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = captured()
    for _ in range(3):
        graph.replay()
        torch.testing.assert_close(loss, eager())


def many_edges():
    return torch.randint(500, (2, 5000))


def step(layer, x, edges):
    """A step of gradient descent, in place; the loss before it."""
    loss = layer(x, edges).square().mean()
    for parameter, grad in zip(layer.parameters(), torch.autograd.grad(loss, list(layer.parameters())), strict=True):
        parameter.data.sub_(grad, alpha=0.1)
    return loss.detach()


@pytest.mark.slow
def test_features_beyond_32_bits():
    """Nodes at both ends of more than 2³¹ numbers give what these nodes alone give."""
    size = 2**31 // (8 * 32) + 1000
    nodes = torch.cat([torch.arange(1000), torch.arange(size - 1000, size)])
    few = torch.randn(len(nodes), 8, 32, dtype=torch.bfloat16, requires_grad=True)
    many = torch.zeros(size, 8, 32, dtype=torch.bfloat16).index_put((nodes,), few.detach()).requires_grad_()
    edges = torch.randint(len(nodes), (2, 30_000))
    expected = gattn.attend(few, few, few, SparseGraph(edges, len(nodes), len(nodes)))
    out = gattn.attend(many, many, many, SparseGraph(nodes[edges], size, size))
    torch.testing.assert_close(out[nodes], expected)
    (right,), (found,) = (torch.autograd.grad(y.square().sum(), x) for y, x in ((expected, few), (out, many)))
    torch.testing.assert_close(found[nodes], right)
