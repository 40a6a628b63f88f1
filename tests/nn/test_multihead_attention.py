"""`MultiheadAttention` against PyTorch's, and what it can beyond: graphs, grouped queries, positions, a cache."""

import copy
import inspect
import pickle

import pytest
import torch
from allpairspy import AllPairs
from torch import nn
from torch_geometric import EdgeIndex
from torch_geometric.utils import coalesce, to_torch_csr_tensor

from gattn import CompleteGraph, SparseGraph
from gattn.graphs import as_graph
from gattn.nn import (
    ALiBi,
    KeyValueCache,
    MultiheadAttention,
    RelativePositionBias,
    RotaryPositionalEncoding,
    SinusoidalPositionalEncoding,
)
from gattn.testing import assert_as_exact_as, assert_permutation_equivariant, random_edge_index
from tests.cases import mostly_slow

E, H, B, N, M = 16, 4, 3, 6, 8
C = E // H
KDIM, VDIM = 10, 7

OPTIONS = {
    "inputs": ["self", "key is value", "all different", "kdim and vdim"],
    "layout": ["batch first", "batch second", "no batch"],
    "dtype": [torch.float32, torch.float64],
    "bias": [True, False],
    "add_bias_kv": [False, True],
    "add_zero_attn": [False, True],
    "key_padding_mask": [None, "end", "anywhere", "float"],
    "attn_mask": [None, "bool", "float", "bool per head", "float per head", "causal", "causal, with is_causal"],
    "weights": [None, "averaged", "per head"],
    "mode": ["train", "eval", "eval without gradients"],
}
FORWARD = ("out", "weights")

# PyTorch's masks of two types at once still work, and ours must too.
pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning")


def possible(options):
    causal = str(options.get("attn_mask")).startswith("causal")
    if causal and options.get("inputs") != "self":
        return False
    # PyTorch's flag hides the appended keys then.
    appended = options.get("add_bias_kv") or options.get("add_zero_attn")
    return not (options.get("attn_mask") == "causal, with is_causal" and appended)


def cases():
    names = list(OPTIONS)
    rows = AllPairs(list(OPTIONS.values()), filter_func=lambda row: possible(dict(zip(names, row, strict=False))))
    for number, row in enumerate(rows):
        yield pytest.param(dict(zip(names, row, strict=True)), id=str(number))


def randomise(module):
    """Biases and norms begin as zeros and ones, which hide errors."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    return module


def later(n):
    return torch.ones(n, n, dtype=torch.bool).triu(1)


def make_layer(layer, options, **kwargs):
    sizes = {"kdim": KDIM, "vdim": VDIM} if options["inputs"] == "kdim and vdim" else {}
    return layer(
        E,
        H,
        bias=options["bias"],
        add_bias_kv=options["add_bias_kv"],
        add_zero_attn=options["add_zero_attn"],
        batch_first=options["layout"] == "batch first",
        **sizes,
        **kwargs,
    )


def make_inputs(options):
    """Float64 tensors and masks; the first key is always seen, since PyTorch's rows without any are NaN."""
    num_sources = N if options["inputs"] == "self" else M

    def tensor(places, channels):
        shape = {"batch first": (B, places), "batch second": (places, B), "no batch": (places,)}[options["layout"]]
        return torch.randn(*shape, channels, dtype=torch.double)

    tensors = {"query": tensor(N, E)}
    if options["inputs"] != "self":
        tensors["key"] = tensor(M, KDIM if options["inputs"] == "kdim and vdim" else E)
    if options["inputs"] in ("all different", "kdim and vdim"):
        tensors["value"] = tensor(M, VDIM if options["inputs"] == "kdim and vdim" else E)

    masks = {}
    padding = {
        None: None,
        "end": torch.arange(num_sources) >= torch.tensor([[num_sources], [3], [1]]),
        "anywhere": torch.rand(B, num_sources) < 0.4,
        "float": torch.randn(B, num_sources, dtype=torch.double),
    }[options["key_padding_mask"]]
    if padding is not None:
        if padding.dtype == torch.bool:
            padding[:, 0] = False
        masks["key_padding_mask"] = padding[1] if options["layout"] == "no batch" else padding
    kind = options["attn_mask"]
    if kind is not None:
        count = H if options["layout"] == "no batch" else B * H
        shape = (count, N, num_sources) if kind.endswith("per head") else (N, num_sources)
        if kind.startswith("float"):
            mask = torch.randn(shape, dtype=torch.double)
            mask[..., 2] = -torch.inf
        else:
            mask = later(N) if kind.startswith("causal") else torch.rand(shape) < 0.4
            mask[..., 0] = False
        masks["attn_mask"] = mask
        if kind == "causal, with is_causal":
            masks["is_causal"] = True
    return tensors, masks


def weigh(tensor):
    """A loss to which every element contributes differently."""
    return (tensor * torch.linspace(-1, 1, tensor.numel(), dtype=tensor.dtype).view(tensor.shape).cos()).sum()


def run(attention, tensors, masks, options):
    """Output, weights and every gradient, by name."""
    attention.zero_grad(set_to_none=True)
    cast = lambda x: x.to(options["dtype"]) if isinstance(x, torch.Tensor) and x.is_floating_point() else x  # noqa: E731
    tensors = {name: cast(x).clone().requires_grad_() for name, x in tensors.items()}
    masks = {name: cast(x) for name, x in masks.items()}
    query = tensors["query"]
    key = tensors.get("key", query)
    with torch.set_grad_enabled(options["mode"] != "eval without gradients"):
        out, weights = attention(
            query,
            key,
            tensors.get("value", key),
            need_weights=options["weights"] is not None,
            average_attn_weights=options["weights"] != "per head",
            **masks,
        )
    assert (weights is None) == (options["weights"] is None)
    results = {"out": out} if weights is None else {"out": out, "weights": weights}
    if options["mode"] == "eval without gradients":
        return results
    sum(weigh(result) for result in results.values()).backward()
    leaves = dict(attention.named_parameters()) | tensors
    gradients = {f"gradient of {name}": leaf.grad for name, leaf in leaves.items()}
    return {name: result.detach() for name, result in results.items()} | gradients


def compare(actual, expected, exact):
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        if value.dtype == torch.float64:
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
        else:
            # Gradients that cancel out (a softmax ignores what all its logits share) are as exact as their terms.
            alike = [exact[other] for other in exact if (other in FORWARD) == (name in FORWARD)]
            scale = max(x.abs().max().item() for x in alike)
            assert_as_exact_as(value, expected[name], exact[name], scale=scale, name=name)


@pytest.mark.parametrize("options", list(cases()))
def test_equals_pytorch(options):
    ours, theirs = (make_layer(layer, options).double() for layer in (MultiheadAttention, nn.MultiheadAttention))
    randomise(ours)
    sizes = {name: x.shape for name, x in ours.state_dict().items()}
    assert sizes == {name: x.shape for name, x in theirs.state_dict().items()}
    # Checkpoints go both ways.
    theirs.load_state_dict(ours.state_dict())
    ours = make_layer(MultiheadAttention, options).double()
    ours.load_state_dict(theirs.state_dict())
    for attention in (ours, theirs):
        attention.train(options["mode"] == "train")

    inputs = make_inputs(options)
    exact = run(theirs, *inputs, options | {"dtype": torch.float64})
    ours, theirs = (attention.to(options["dtype"]) for attention in (ours, theirs))
    compare(run(ours, *inputs, options), run(theirs, *inputs, options), exact)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("per_head", [True, False])
def test_float_masks_have_gradients(per_head, need_weights):
    """Learnt biases are such masks."""
    ours, theirs = (layer(E, H, batch_first=True).double() for layer in (MultiheadAttention, nn.MultiheadAttention))
    theirs.load_state_dict(randomise(ours).state_dict())
    x = torch.randn(B, N, E, dtype=torch.double)
    mask = torch.randn(*((B * H,) * per_head), N, N, dtype=torch.double, requires_grad=True)
    padding = torch.randn(B, N, dtype=torch.double, requires_grad=True)
    options = {"attn_mask": mask, "key_padding_mask": padding, "need_weights": need_weights}
    actual, expected = (
        torch.autograd.grad(weigh(layer(x, x, x, **options)[0]), (mask, padding)) for layer in (ours, theirs)
    )
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("appended", ["add_bias_kv", "add_zero_attn"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (2, 1)}])
def test_appended_keys_on_a_complete_graph(options, appended):
    ours, theirs = (
        layer(E, H, batch_first=True, **{appended: True}).double()
        for layer in (MultiheadAttention, nn.MultiheadAttention)
    )
    theirs.load_state_dict(randomise(ours).state_dict())
    x, lengths = torch.randn(B, N, E, dtype=torch.double), torch.tensor([N, 2, 4])
    real = torch.arange(N) < lengths.unsqueeze(1)
    graph = CompleteGraph(N, **options)
    mask = ~seen(graph.edge_index, N, N)
    torch.testing.assert_close(ours(x, x, x, graph=graph), theirs(x, x, x, attn_mask=mask))
    expected = theirs(x, x, x, attn_mask=mask, key_padding_mask=~real)[0]
    graph = CompleteGraph(N, source_lengths=lengths, **options)
    torch.testing.assert_close(ours(x, x, x, graph=graph)[0], expected)
    graph = CompleteGraph(N, source_lengths=lengths, target_lengths=lengths, **options)
    out = ours(x, x, x, graph=graph)[0]
    torch.testing.assert_close(out[real], expected[real])
    # Targets that are not real see nothing, appended keys included.
    torch.testing.assert_close(out[~real], ours.out_proj.bias.expand_as(out[~real]))


@pytest.mark.parametrize("inputs", ["self", "kdim and vdim"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("add_bias_kv", [True, False])
def test_same_seed_gives_same_parameters(inputs, bias, add_bias_kv):
    options = {"inputs": inputs, "bias": bias, "add_bias_kv": add_bias_kv, "add_zero_attn": False, "layout": None}
    torch.manual_seed(1)
    theirs = make_layer(nn.MultiheadAttention, options)
    torch.manual_seed(1)
    ours = make_layer(MultiheadAttention, options)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    for name, parameter in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter), name
    before = copy.deepcopy(ours)
    randomise(ours)
    torch.manual_seed(1)
    ours.reset_parameters()
    for name, parameter in before.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter), name


@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_arguments_begin_as_pytorchs(method):
    theirs, ours = (
        list(inspect.signature(getattr(layer, method)).parameters.values())
        for layer in (nn.MultiheadAttention, MultiheadAttention)
    )
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [(p.name, p.default) for p in theirs]
    assert len(ours) > len(theirs)
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])


def test_weights_are_given_after_dropout_and_make_the_output():
    attention = MultiheadAttention(E, H, dropout=0.5, batch_first=True).double()
    attention.out_proj = nn.Identity()
    x = torch.randn(B, N, E, dtype=torch.double)
    out, weights = attention(x, x, x, average_attn_weights=False)
    assert (weights == 0).any()
    value = x @ attention.in_proj_weight[2 * E :].T + attention.in_proj_bias[2 * E :]
    by_weights = weights @ value.unflatten(-1, (H, C)).transpose(1, 2)
    torch.testing.assert_close(out, by_weights.transpose(1, 2).flatten(-2))
    expected, full = attention.eval()(x, x, x, average_attn_weights=False)
    kept = weights != 0
    torch.testing.assert_close(weights[kept], 2 * full[kept])
    assert not torch.allclose(out, expected)


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_keeps_the_mean(need_weights):
    attention = MultiheadAttention(E, H, dropout=0.3, batch_first=True).double()
    x = torch.randn(1, N, E, dtype=torch.double)
    many = x.expand(20_000, N, E)
    out = attention(many, many, many, need_weights=need_weights)[0]
    assert out.std(0).max() > 0.01
    error = (out.mean(0) - attention.eval()(x, x, x)[0][0]).abs()
    assert (error < 6 * out.std(0) / 20_000**0.5).all()


# --- Graphs -----------------------------------------------------------------------------------------------------------


def by_hand(attention, query, key, value, allowed=None, bias=None):
    """The definition: output `[..., N, E]` and weights `[..., H, N, M]`, zeros for those that see nothing."""
    channels = attention.num_kv_heads * C
    weights = attention.in_proj_weight.split([E, channels, channels])
    biases = attention.in_proj_bias.split([E, channels, channels])
    q, k, v = (
        (x @ w.T + b).unflatten(-1, (-1, C)) for x, w, b in zip((query, key, value), weights, biases, strict=True)
    )
    if attention.q_norm is not None:
        q, k = (
            x / (x.pow(2).mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt() * norm.weight
            for x, norm in ((q, attention.q_norm), (k, attention.k_norm))
        )
    group = torch.arange(H) // (H // attention.num_kv_heads)
    q, k, v = q.transpose(-2, -3), k[..., group, :].transpose(-2, -3), v[..., group, :].transpose(-2, -3)
    logits = q @ k.mT / C**0.5
    if bias is not None:
        logits = logits + bias
    allowed = torch.ones(1, dtype=torch.bool) if allowed is None else allowed
    exponentials = torch.where(allowed, logits, 0).exp() * allowed
    weights = exponentials / exponentials.sum(-1, keepdim=True).clamp(min=1e-300)
    out = (weights @ v).transpose(-2, -3).flatten(-2)
    return attention.out_proj(out), weights


def seen(edge_index, num_targets, num_sources):
    """Who sees whom, `[N, M]`."""
    matrix = torch.zeros(num_targets, num_sources, dtype=torch.bool)
    matrix[edge_index[1], edge_index[0]] = True
    return matrix


def gradients(loss, *leaves):
    return torch.autograd.grad(loss, leaves, retain_graph=True)


@pytest.fixture
def attention():
    return randomise(MultiheadAttention(E, H, batch_first=True).double())


@pytest.fixture
def x():
    return torch.randn(B, N, E, dtype=torch.double, requires_grad=True)


@pytest.fixture
def edge_index():
    """No duplicates, which a mask cannot say; the last target has no neighbour."""
    return coalesce(random_edge_index(N, num_edges=20, seed=1))


FORMS = {
    "edge_index": lambda edges: edges,
    "SparseGraph": SparseGraph,
    "EdgeIndex": lambda edges: EdgeIndex(edges, sparse_size=(N, N)),
    "csr": lambda edges: to_torch_csr_tensor(edges.flip(0), size=(N, N)),
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_graph_equals_the_same_attention_by_a_mask(form, batch_first, x, edge_index):
    attention = randomise(MultiheadAttention(E, H, batch_first=batch_first).double())
    graph = FORMS[form](edge_index)
    edges = as_graph(graph).with_sizes(N, N).edge_index  # in the order of the graph's form
    parameters = list(attention.parameters())
    turn = (lambda t: t) if batch_first else (lambda t: t.transpose(0, 1))

    results = []
    given = turn(x)
    out, weights = attention(given, given, given, graph=graph, average_attn_weights=False)
    assert weights.shape == (B, edges.size(1), H)
    results.append((turn(out), weights))
    out, weights = attention(given, given, given, attn_mask=~seen(edge_index, N, N), average_attn_weights=False)
    results.append((turn(out), weights[..., edges[1], edges[0]].transpose(1, 2)))
    out, weights = by_hand(attention, x, x, x, seen(edge_index, N, N))
    results.append((out, weights[..., edges[1], edges[0]].transpose(1, 2)))
    first, *others = [
        (out, weights, *gradients(weigh(out) + weigh(weights), x, *parameters)) for out, weights in results
    ]
    for other in others:
        for actual, expected in zip(first, other, strict=True):
            torch.testing.assert_close(actual, expected)

    averaged = attention(given, given, given, graph=graph)[1]
    torch.testing.assert_close(averaged, results[0][1].mean(-1))
    out, none = attention(given, given, given, graph=graph, need_weights=False)
    torch.testing.assert_close(turn(out), first[0])
    assert none is None
    # Without a batch, nodes are rows, as in every graph layer.
    torch.testing.assert_close(attention(x[1], x[1], x[1], graph=graph)[0], first[0][1])


def test_bipartite_graph(attention, x):
    source = torch.randn(B, M, E, dtype=torch.double)
    edges = coalesce(random_edge_index(M, N, num_edges=20))
    out, weights = attention(x, source, source, graph=edges, average_attn_weights=False)
    expected, dense = by_hand(attention, x, source, source, seen(edges, N, M))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(weights, dense[..., edges[1], edges[0]].transpose(1, 2))


GRAPHS = {
    "edges": lambda: coalesce(random_edge_index(N, num_edges=20, seed=1)),
    "complete": lambda: CompleteGraph(N),
    "causal": lambda: CompleteGraph(N, causal=True),
    "window": lambda: CompleteGraph(N, window=(2, 1)),
    "causal window": lambda: CompleteGraph(N, causal=True, window=1),
}


@pytest.mark.parametrize(
    ("graph", "padding", "mask", "need_weights"),
    list(
        AllPairs(
            [
                list(GRAPHS),
                [None, "end", "anywhere", "float"],
                [None, "is_causal", "bool", "float", "bool per head", "float per head"],
                [True, False],
            ],
            n=3,
        )
    ),
)
def test_graph_and_masks_both_hold(graph, padding, mask, need_weights, attention, x):
    is_causal, mask = mask == "is_causal", None if mask == "is_causal" else mask
    graph = GRAPHS[graph]()
    edges = graph if isinstance(graph, torch.Tensor) else graph.edge_index
    options = {"inputs": "self", "layout": "batch first", "key_padding_mask": padding, "attn_mask": mask}
    _, masks = make_inputs(options)
    allowed, bias = seen(edges, N, N), 0.0
    if is_causal:
        allowed = allowed & ~later(N)
    for name, term in masks.items():
        term = term.view(B, 1, 1, N) if name == "key_padding_mask" else term
        term = term.view(B, H, N, N) if term.dim() == 3 else term
        allowed, bias = (allowed & ~term, bias) if term.dtype == torch.bool else (allowed, bias + term)
    expected, dense = by_hand(attention, x, x, x, allowed, torch.as_tensor(bias).clamp(min=-1e4))
    out, weights = attention(
        x, x, x, graph=graph, is_causal=is_causal, need_weights=need_weights, average_attn_weights=False, **masks
    )
    torch.testing.assert_close(out, expected)
    if need_weights:
        expected_weights = dense[..., edges[1], edges[0]].transpose(1, 2) if graph is edges else dense
        torch.testing.assert_close(weights, expected_weights)
    parameters = list(attention.parameters())
    for actual, wanted in zip(
        gradients(weigh(out), x, *parameters), gradients(weigh(expected), x, *parameters), strict=True
    ):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("sizes", [(N, N), (N, M), (M, N)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (1, 0)}, {"window": 2}, {"window": (3, 1)}])
def test_complete_graph_equals_its_own_edges(sizes, options, attention):
    target, source = (torch.randn(B, size, E, dtype=torch.double, requires_grad=True) for size in sizes)
    graph = CompleteGraph(*sizes, **options)
    edges = graph.edge_index
    parameters = list(attention.parameters())
    results = []
    for one in (graph, edges):
        out, _ = attention(target, source, source, graph=one)
        results.append((out, *gradients(weigh(out), target, source, *parameters)))
    results.append(by_hand(attention, target, source, source, seen(edges, *sizes))[:1])
    for other in results[1:]:
        for actual, expected in zip(results[0], other, strict=False):
            torch.testing.assert_close(actual, expected)


def test_is_causal_needs_no_mask(attention, x):
    out, weights = attention(x, x, x, is_causal=True)
    expected, dense = by_hand(attention, x, x, x, ~later(N))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(weights, dense.mean(1))
    torch.testing.assert_close(attention(x, x, x, graph=CompleteGraph(N, causal=True))[0], expected)
    edges = CompleteGraph(N).edge_index
    torch.testing.assert_close(attention(x, x, x, graph=edges, is_causal=True)[0], expected)
    # With more keys than queries, the last query sees them all, as a cached step needs.
    tail = attention(x[:, -2:], x, x, is_causal=True)[0]
    torch.testing.assert_close(tail, expected[:, -2:])
    torch.testing.assert_close(
        attention(x[:, -2:], x, x, graph=CompleteGraph(2, N).edge_index, is_causal=True)[0], tail
    )


@pytest.mark.parametrize("position", [None, "rotary", "alibi", "relative"])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_equals_padded_equals_one_by_one(causal, position):
    attention = randomise(MultiheadAttention(E, H, batch_first=True, position=make_position(position)).double())
    parameters = list(attention.parameters())
    lengths = torch.tensor([3, 0, 1, 5])
    x = torch.randn(9, E, dtype=torch.double, requires_grad=True)
    parts = x.split(lengths.tolist())
    padded = nn.utils.rnn.pad_sequence(parts, batch_first=True)
    real = torch.arange(5) < lengths.unsqueeze(1)

    packed, weights = attention(x, x, x, graph=CompleteGraph.packed(lengths, causal=causal))
    outs = {
        "packed": packed,
        "packed, then causal": attention(x, x, x, graph=CompleteGraph.packed(lengths), is_causal=causal)[0],
        "padded": attention(padded, padded, padded, key_padding_mask=~real, is_causal=causal)[0][real],
        "lengths": attention(
            padded,
            padded,
            padded,
            graph=CompleteGraph(5, causal=causal, source_lengths=lengths, target_lengths=lengths),
        )[0][real],
        "one by one": torch.cat([attention(part, part, part, is_causal=causal)[0] for part in parts]),
    }
    assert [x.shape for x in weights] == [(n, n) for n in lengths.tolist()]
    torch.testing.assert_close(weights[3], attention(parts[3], parts[3], parts[3], is_causal=causal)[1])
    expected = [packed, *gradients(weigh(packed), x, *parameters)]
    for name, out in outs.items():
        for actual, wanted in zip([out, *gradients(weigh(out), x, *parameters)], expected, strict=True):
            torch.testing.assert_close(actual, wanted, msg=lambda m, n=name: f"{n}: {m}")


def test_packed_graph_and_masks_both_hold(attention):
    x = torch.randn(6, E, dtype=torch.double)
    graph = CompleteGraph.packed([4, 2])
    mask = torch.rand(6, 6) < 0.3
    padding = torch.tensor([False, True, False, False, False, True])
    allowed = seen(graph.edge_index, 6, 6) & ~mask & ~padding
    out = attention(x, x, x, graph=graph, attn_mask=mask, key_padding_mask=padding)[0]
    torch.testing.assert_close(out, by_hand(attention, x, x, x, allowed)[0])


def hide(*pairs):
    """A mask that hides from a target a source."""
    mask = torch.zeros(N, N, dtype=torch.bool)
    for pair in pairs:
        mask[pair] = True
    return mask


def test_training_after_inference(attention):
    """What is kept between calls must serve both."""
    x = torch.randn(7, E, dtype=torch.double, requires_grad=True)
    edges = random_edge_index(7, num_edges=20)
    for graph in (CompleteGraph.packed([3, 4, 0]), CompleteGraph.packed([3, 3, 1], causal=True), edges):
        with torch.inference_mode():
            expected = attention(x, x, x, graph=graph)[0]
        out = attention(x, x, x, graph=graph)[0]
        torch.testing.assert_close(out, expected.clone())
        assert gradients(weigh(out), x)[0].any()


NO_KEY_ALLOWED = {
    "mask": lambda: {"attn_mask": torch.eye(N, dtype=torch.bool)[2:3].T.expand(N, N)},
    "float mask": lambda: {"attn_mask": torch.zeros(N, N).index_fill(0, torch.tensor([2]), -torch.inf)},
    "padding": lambda: {"key_padding_mask": (torch.arange(B) == 1).unsqueeze(1).expand(B, N)},
    "float padding": lambda: {"key_padding_mask": torch.zeros(B, N).index_fill(0, torch.tensor([1]), -torch.inf)},
    "both together": lambda: {
        "attn_mask": later(N).T.contiguous(),
        "key_padding_mask": (torch.arange(N) >= 4).expand(B, N),
    },
    "mask on a graph": lambda: {
        "attn_mask": hide((2, 1), (2, 2)),
        "graph": CompleteGraph(N, causal=True, window=(1, 0)),
    },
    "lengths": lambda: {"graph": CompleteGraph(N, source_lengths=torch.tensor([0, 2, N]))},
    "no edge": lambda: {"graph": torch.tensor([[0, 1, 2], [1, 2, 2]])},
    "no edge left": lambda: {"graph": torch.tensor([[0, 1, 2], [1, 2, 2]]), "attn_mask": hide((1, 0))},
}


@pytest.mark.parametrize(
    ("case", "dtype", "need_weights"),
    list(AllPairs([list(NO_KEY_ALLOWED), [torch.float32, torch.float64, torch.bfloat16], [True, False]])),
)
def test_who_sees_nothing_gets_zeros_and_finite_gradients(case, dtype, need_weights, x):
    attention = MultiheadAttention(E, H, bias=False, batch_first=True).to(dtype)
    options = NO_KEY_ALLOWED[case]()
    x = x.detach().to(dtype).requires_grad_()
    out, weights = attention(x, x, x, need_weights=need_weights, **options)
    edges = options.get("graph", CompleteGraph(N))
    lengths = getattr(edges, "source_lengths", None)
    edges = edges if isinstance(edges, torch.Tensor) else edges.edge_index
    allowed = seen(edges, N, N).expand(B, N, N)
    for name, hidden in options.items():
        if name != "graph":
            hidden = hidden.unsqueeze(1) if name == "key_padding_mask" else hidden
            allowed = allowed & ~(hidden if hidden.dtype == torch.bool else hidden == -torch.inf)
    if lengths is not None:
        allowed = allowed & (torch.arange(N) < lengths.view(B, 1, 1))
    isolated = ~allowed.any(-1)
    assert isolated.any()
    assert not isolated.all()
    assert out.dtype == dtype  # whatever the mask's
    assert (out[isolated] == 0).all()
    assert (out[~isolated] != 0).any(-1).all()
    if weights is not None:
        assert weights.dtype == dtype
        assert weights.isfinite().all()
    out.float().pow(2).sum().backward()
    for leaf in (x, *attention.parameters()):
        assert leaf.grad.isfinite().all()
        assert leaf.grad.any()


# --- Beyond PyTorch's -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("cross", [False, True])
def test_grouped_queries(num_kv_heads, cross, x):
    attention = randomise(MultiheadAttention(E, H, batch_first=True, num_kv_heads=num_kv_heads).double())
    assert attention.in_proj_weight.shape == (E + 2 * num_kv_heads * C, E)
    source = torch.randn(B, M, E, dtype=torch.double, requires_grad=True) if cross else x
    out, weights = attention(x, source, source, average_attn_weights=False)
    expected, expected_weights = by_hand(attention, x, source, source)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(weights, expected_weights)
    leaves = [x, source, *attention.parameters()]
    for actual, wanted in zip(
        gradients(weigh(out) + weigh(weights), *leaves),
        gradients(weigh(expected) + weigh(expected_weights), *leaves),
        strict=True,
    ):
        torch.testing.assert_close(actual, wanted)
    edges = coalesce(random_edge_index(source.size(1), N, num_edges=20))
    on_edges = attention(x, source, source, graph=edges)[0]
    torch.testing.assert_close(on_edges, by_hand(attention, x, source, source, seen(edges, N, source.size(1)))[0])


def test_grouped_queries_with_other_channels(x):
    attention = MultiheadAttention(E, H, batch_first=True, num_kv_heads=2, kdim=KDIM, vdim=VDIM).double()
    key, value = torch.randn(B, M, KDIM, dtype=torch.double), torch.randn(B, M, VDIM, dtype=torch.double)
    full = MultiheadAttention(E, H, batch_first=True, kdim=KDIM, vdim=VDIM).double()
    with torch.no_grad():
        full.q_proj_weight.copy_(attention.q_proj_weight)
        for name in ("k_proj_weight", "v_proj_weight"):
            shared = attention.get_parameter(name).unflatten(0, (2, C)).repeat_interleave(2, 0)
            full.get_parameter(name).copy_(shared.flatten(0, 1))
        full.out_proj.load_state_dict(attention.out_proj.state_dict())
    torch.testing.assert_close(attention(x, key, value), full(x, key, value))


def test_query_key_norm(x):
    attention = randomise(MultiheadAttention(E, H, batch_first=True, qk_norm=True, num_kv_heads=2).double())
    assert attention.q_norm.weight.shape == (C,)
    out, weights = attention(x, x, x, average_attn_weights=False)
    expected, expected_weights = by_hand(attention, x, x, x)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(weights, expected_weights)
    # Scaling the input changes values, but neither queries nor keys.
    attention.in_proj_bias.data.zero_()
    scaled = 100 * x
    torch.testing.assert_close(attention(scaled, scaled, scaled)[1], attention(x, x, x)[1])
    attention.reset_parameters()
    assert (attention.q_norm.weight == 1).all()


def make_position(name):
    return {
        None: lambda: None,
        "rotary": lambda: RotaryPositionalEncoding(C),
        "alibi": lambda: ALiBi(H),
        "relative": lambda: RelativePositionBias(H, max_distance=2),
    }[name]()


@pytest.mark.parametrize("name", [None, "rotary", "alibi", "relative"])
def test_a_reset_includes_learnt_positions(name):
    attention = MultiheadAttention(E, H, position=make_position(name))
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.fill_(123.0)
    attention.reset_parameters()
    assert not [name for name, parameter in attention.named_parameters() if (parameter == 123.0).any()]


@pytest.mark.parametrize("name", ["alibi", "relative"])
@pytest.mark.parametrize("sizes", [(N, N), (N, M)])
def test_relative_positions_are_a_bias(name, sizes):
    attention = randomise(MultiheadAttention(E, H, batch_first=True, position=make_position(name)).double())
    query, key = (torch.randn(B, size, E, dtype=torch.double) for size in sizes)
    target = torch.arange(sizes[0]) + sizes[1] - sizes[0]  # the last query is at the last key's place
    distance = torch.arange(sizes[1]) - target.unsqueeze(1)
    if name == "alibi":
        slopes = torch.tensor([2.0 ** (-8 * (h + 1) / H) for h in range(H)], dtype=torch.double)
        bias = -distance.abs() * slopes.view(H, 1, 1)
    else:
        bias = attention.position.weight.T[:, distance.clamp(-2, 2) + 2]
    torch.testing.assert_close(attention(query, key, key)[0], by_hand(attention, query, key, key, None, bias)[0])
    if name == "relative":
        attention(query, key, key)[0].pow(2).sum().backward()
        assert attention.position.weight.grad.any()


@pytest.mark.parametrize("position", ["rotary", "alibi", "relative"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (2, 1)}])
def test_positions_on_a_complete_graph_equal_those_on_its_edges(position, options, x):
    attention = randomise(MultiheadAttention(E, H, batch_first=True, position=make_position(position)).double())
    graph = CompleteGraph(N, **options)
    out = attention(x, x, x, graph=graph)[0]
    torch.testing.assert_close(out, attention(x, x, x, graph=graph.edge_index)[0])
    masks = {"attn_mask": ~seen(graph.edge_index, N, N)}
    torch.testing.assert_close(out, attention(x, x, x, **masks)[0])
    padding = torch.rand(B, N, dtype=torch.double)
    torch.testing.assert_close(
        attention(x, x, x, graph=graph, key_padding_mask=padding)[0],
        attention(x, x, x, key_padding_mask=padding, **masks)[0],
    )


@pytest.mark.parametrize("position", ["rotary", "alibi", "relative"])
@pytest.mark.parametrize("sizes", [(N, M), (M, N)])
def test_positions_in_two_sequences(position, sizes):
    """The last target stands where the last source does, on every graph."""
    attention = randomise(MultiheadAttention(E, H, batch_first=True, position=make_position(position)).double())
    query, key = (torch.randn(B, size, E, dtype=torch.double) for size in sizes)
    out = attention(query, key, key)[0]
    edges = CompleteGraph(*sizes).edge_index
    torch.testing.assert_close(out, attention(query, key, key, graph=edges)[0])

    counts = torch.tensor([2, 0, 4]), torch.tensor([3, 2, 1])
    query, key = (torch.randn(int(count.sum()), E, dtype=torch.double) for count in counts)
    for causal in (False, True):
        out = attention(query, key, key, graph=CompleteGraph.packed(*counts, causal=causal))[0]
        parts = [
            attention(q, k, k, is_causal=causal)[0]
            for q, k in zip(query.split(counts[0].tolist()), key.split(counts[1].tolist()), strict=True)
        ]
        torch.testing.assert_close(out, torch.cat(parts))


def test_rotary_attention_knows_differences_only():
    """Moving a sequence along changes nothing: padded in front, it gives the same."""
    attention = randomise(MultiheadAttention(E, H, batch_first=True, position=RotaryPositionalEncoding(C)).double())
    x = torch.randn(1, N, E, dtype=torch.double)
    moved = torch.cat([torch.randn(1, 3, E, dtype=torch.double), x], 1)
    padding = (torch.arange(N + 3) < 3).unsqueeze(0)
    out = attention(moved, moved, moved, key_padding_mask=padding)[0][:, 3:]
    torch.testing.assert_close(out, attention(x, x, x)[0])


@pytest.mark.parametrize(
    ("position", "steps", "layout", "num_kv_heads"),
    list(
        AllPairs(
            [
                [None, "rotary", "alibi", "relative"],
                [[1] * 6, [3, 1, 2]],
                ["batch first", "batch second", "no batch"],
                [None, 2],
            ]
        )
    ),
)
def test_cached_steps_equal_the_whole(position, steps, layout, num_kv_heads):
    attention = MultiheadAttention(
        E,
        H,
        batch_first=layout == "batch first",
        position=make_position(position),
        num_kv_heads=num_kv_heads,
        qk_norm=num_kv_heads is not None,
    )
    attention = randomise(attention.double())
    shape = {"batch first": (B, N, E), "batch second": (N, B, E), "no batch": (N, E)}[layout]
    dim = 1 if layout == "batch first" else 0
    x = torch.randn(shape, dtype=torch.double)
    whole, weights = attention(x, x, x, is_causal=True)
    cache, outs, done = KeyValueCache(), [], 0
    assert len(cache) == 0
    for part in x.split(steps, dim):
        assert cache.length(attention) == done
        out, last = attention(part, part, part, is_causal=True, cache=cache)
        outs.append(out)
        done += part.size(dim)
        assert len(cache) == cache.length(attention) == done
        torch.testing.assert_close(last, weights[..., done - part.size(dim) : done, :done])
    torch.testing.assert_close(torch.cat(outs, dim), whole)


def test_cached_steps_with_padding_and_a_window(attention, x):
    padding = torch.arange(N) < torch.tensor([[0], [2], [1]])  # in front, as for prompts of different lengths
    whole = attention(x, x, x, key_padding_mask=padding, graph=CompleteGraph(N, causal=True, window=2))[0]
    cache = KeyValueCache()
    for i in range(N):
        part = x[:, i : i + 1]
        graph = CompleteGraph(1, i + 1, causal=True, window=2)
        out = attention(part, part, part, key_padding_mask=padding[:, : i + 1], graph=graph, cache=cache)[0]
        torch.testing.assert_close(out, whole[:, i : i + 1])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("position", [None, "rotary", "alibi", "relative"])
@pytest.mark.parametrize("window", [0, 2, 9])
def test_a_cache_with_a_window_equals_the_whole(window, position, mode, x):
    attention = randomise(MultiheadAttention(E, H, batch_first=True, position=make_position(position)).double())
    x = torch.cat([x, -x, x + 1], 1)
    whole, weights = attention(x, x, x, graph=CompleteGraph(x.size(1), causal=True, window=(window, 0)))
    cache, outs = KeyValueCache(window), []
    with mode():
        for part in x.split([1, 4, 1, 1, 5, 1, 1, 1, 3], 1):
            done = cache.length(attention)
            seen = cache.num_visible(attention)
            assert seen == min(done, window)
            out, last = attention(part, part, part, is_causal=True, cache=cache)
            outs.append(out)
            stop = done + part.size(1)
            torch.testing.assert_close(last, weights[:, done:stop, done - seen : stop])
    torch.testing.assert_close(torch.cat(outs, 1), whole)
    assert len(cache) == x.size(1)


def test_a_cache_with_a_window_hides_what_is_further_back_if_later_tokens_are_seen(attention, x):
    cache = KeyValueCache(2)
    parts = x.split([3, 3], 1)
    for part in parts:
        out, _ = attention(part, part, part, cache=cache, static_kv=False)
    graph = CompleteGraph(N, window=(2, N))
    torch.testing.assert_close(out, attention(x, x, x, graph=graph)[0][:, 3:])


@torch.no_grad()
def test_memory_of_a_cache_with_a_window_does_not_grow(attention):
    cache, window, sizes, places = KeyValueCache(20), 20, set(), set()
    whole = torch.randn(B, 500, H, C)
    for place, part in enumerate(whole.unbind(1)):
        keys, values = cache.append(attention, part.unsqueeze(1).clone(), part.unsqueeze(1) + 1)
        expected = whole[:, max(0, place - window) : place + 1]
        torch.testing.assert_close(keys, expected, rtol=0, atol=0)
        torch.testing.assert_close(values, expected + 1, rtol=0, atol=0)
        sizes.add(keys.untyped_storage().nbytes() // (keys.element_size() * B * H * C))
        places.add(keys.untyped_storage().data_ptr())
    assert max(sizes) == 32
    assert len(places) < 60  # one in eleven steps copies what is kept
    again = copy.copy(cache)
    again.reorder(torch.tensor([1, 0]))
    assert cache.length(attention) == again.length(attention) == len(copy.deepcopy(cache)) == 500
    more = whole[:, :1]
    torch.testing.assert_close(cache.append(attention, more, more)[0][:, :20], whole[:, 480:])
    torch.testing.assert_close(again.append(attention, more[:2], more[:2])[0][:, :20], whole[[1, 0], 480:])


def test_windows_of_caches_are_checked():
    for window, error in ((-1, ValueError), (1.5, TypeError), ("2", TypeError)):
        with pytest.raises(error, match="window"):
            KeyValueCache(window)


def test_cache_keeps_an_encoders_keys_and_follows_beams(attention, x):
    memory = torch.randn(B, M, E, dtype=torch.double)
    cache = KeyValueCache()
    first = attention(x, memory, memory, cache=cache)[0]
    torch.testing.assert_close(first, attention(x, memory, memory)[0])
    again = attention(x, torch.zeros_like(memory), torch.zeros_like(memory), cache=cache)[0]
    torch.testing.assert_close(again, first)
    assert cache.length(attention) == M

    other, cache = copy.deepcopy(attention), KeyValueCache()
    prompt = x[:, :4]
    for layer in (attention, other):
        layer(prompt, prompt, prompt, is_causal=True, cache=cache)
    cache.reorder(torch.tensor([2, 0, 2]))
    assert len(cache) == 4
    for layer in (attention, other):
        part = x[:, 4:5]
        out = layer(part, part, part, is_causal=True, cache=cache)[0]
        chosen = torch.cat([prompt[[2, 0, 2]], part], 1)
        torch.testing.assert_close(out, layer(chosen, chosen, chosen, is_causal=True)[0][:, -1:])


@pytest.mark.parametrize("position", [None, "rotary", "alibi", "relative"])
def test_permutation(position, edge_index):
    attention = randomise(MultiheadAttention(E, H, position=make_position(position)).double())
    x = torch.randn(N, E, dtype=torch.double)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    out, moved = attention(x, x, x)[0], attention(x[order], x[order], x[order])[0]
    assert torch.allclose(moved, out[order]) == (position is None)
    if position is None:
        assert_permutation_equivariant(lambda x, edges: attention(x, x, x, graph=edges)[0], x, edge_index)
    else:
        with pytest.raises(AssertionError):
            assert_permutation_equivariant(lambda x, edges: attention(x, x, x, graph=edges)[0], x, edge_index)


@pytest.mark.parametrize("position", [None, "rotary", "alibi"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_causal_means_causal(position, need_weights, x):
    attention = randomise(MultiheadAttention(E, H, batch_first=True, position=make_position(position)).double())
    out, _ = attention(x, x, x, is_causal=True, need_weights=need_weights)
    changed = x.detach().clone()
    changed[:, 3] += 1
    other, _ = attention(changed, changed, changed, is_causal=True, need_weights=need_weights)
    torch.testing.assert_close(other[:, :3], out[:, :3], rtol=0, atol=1e-14)
    assert ((other - out)[:, 3:].abs() > 1e-6).any(-1).all()
    (gradient,) = gradients(weigh(out[:, 2]), x)
    assert (gradient[:, 3:] == 0).all()
    assert (gradient[:, :3] != 0).any(-1).all()


COMPILED = {
    "self": lambda x: {},
    "weights": lambda x: {"need_weights": True},
    "weights per head": lambda x: {"need_weights": True, "average_attn_weights": False},
    "causal": lambda x: {"is_causal": True},
    "padding": lambda x: {"key_padding_mask": torch.arange(N) >= torch.tensor([[N], [3], [1]])},
    "mask": lambda x: {"attn_mask": later(N)},
    "float mask": lambda x: {"attn_mask": torch.randn(B * H, N, N)},
    "window": lambda x: {"graph": CompleteGraph(N, window=(2, 0))},
    "packed": lambda x: {"graph": CompleteGraph.packed([2, 4])},
    "edges": lambda x: {"graph": random_edge_index(N, num_edges=20)},
    "edges and mask": lambda x: {"graph": random_edge_index(N, num_edges=20), "attn_mask": later(N)},
    "edges and weights": lambda x: {"graph": random_edge_index(N, num_edges=20), "need_weights": True},
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of PyTorch's tracing
@pytest.mark.parametrize(
    ("case", "position"),
    mostly_slow(
        [(case, None) for case in COMPILED]
        + [(case, position) for case in ("self", "causal", "packed", "edges") for position in ("rotary", "alibi")],
        every=8,
    ),
)
def test_compiles_without_graph_breaks(case, position):
    torch._dynamo.reset()
    attention = MultiheadAttention(E, H, batch_first=True, position=make_position(position))
    x = torch.randn(B, N, E, requires_grad=True)
    options = {"need_weights": False} | COMPILED[case](x)

    def call(x, **options):
        return attention(x, x, x, **options)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    (out, weights), (expected, expected_weights) = compiled(x, **options), call(x, **options)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(weights, expected_weights)
    leaves = [x, *attention.parameters()]
    for actual, wanted in zip(gradients(weigh(out), *leaves), gradients(weigh(expected), *leaves), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


def test_a_step_without_gradients_copies_new_tokens_alone(attention, x):
    cache, seen, places = KeyValueCache(), [], set()
    with torch.no_grad():
        for part in torch.randn(B, 200, 1, H, C).unbind(1):
            keys, values = cache.append(attention, part, part + 1)
            seen.append((keys, values, keys.clone()))
            places.add((keys.data_ptr(), values.data_ptr()))
        for keys, values, before in seen:  # what earlier steps got stays as it was
            torch.testing.assert_close(keys, before, rtol=0, atol=0)
            torch.testing.assert_close(values, before + 1)
    assert len(places) < 15
    assert len(cache) == 200


def test_memory_of_a_cache_is_not_written_where_a_backward_pass_needs_it(attention, x):
    whole = attention(x, x, x, is_causal=True)[0]
    cache, outs = KeyValueCache(), []
    for place, part in enumerate(x.detach().split(1, 1)):
        with torch.set_grad_enabled(place >= N // 2):
            outs.append(attention(part, part, part, is_causal=True, cache=cache)[0])
    with torch.no_grad():
        attention(part, part, part, is_causal=True, cache=cache)
    torch.testing.assert_close(torch.cat(outs, 1), whole)
    torch.cat(outs, 1).sum().backward()
    assert attention.in_proj_weight.grad.isfinite().all()


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("second", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_cached_steps_in_other_modes(first, second, attention, x):
    cache, outs = KeyValueCache(), []
    for place, part in enumerate(x.detach().split(1, 1)):
        with first() if place < N // 2 else second():
            outs.append(attention(part, part, part, is_causal=True, cache=cache)[0].clone())
    torch.testing.assert_close(torch.cat(outs, 1), attention(x, x, x, is_causal=True)[0])


def test_cached_keys_of_another_shape_are_refused(attention, x):
    cache, keys = KeyValueCache(), torch.randn(B, 3, H, C)
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            cache.append(attention, keys, keys)
            with pytest.raises(RuntimeError):
                cache.append(attention, keys[:1], keys[:1])


@torch.no_grad()
def test_compiled_cached_steps(x):
    torch._dynamo.reset()
    attention = MultiheadAttention(E, H, batch_first=True)
    x = x.detach().float()
    whole = attention(x, x, x, is_causal=True)[0]
    cache = KeyValueCache()
    outs = [attention(x[:, :3], x[:, :3], x[:, :3], is_causal=True, cache=cache)[0]]
    compiled = torch.compile(attention, backend="aot_eager")
    for part in x[:, 3:].split(1, 1):
        outs.append(compiled(part, part, part, is_causal=True, cache=cache)[0])
    torch.testing.assert_close(torch.cat(outs, 1), whole)


@pytest.mark.parametrize("options", [{}, {"attn_mask": True}, {"key_padding_mask": True}, {"need_weights": True}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_exact_as_pytorchs(dtype, options, x):
    ours, theirs = (layer(E, H, batch_first=True) for layer in (MultiheadAttention, nn.MultiheadAttention))
    randomise(ours).to(dtype)
    theirs.to(dtype).load_state_dict(ours.state_dict())
    x = x.detach().to(dtype)
    kwargs = {"need_weights": False} | options
    if "attn_mask" in options:
        kwargs["attn_mask"] = later(N)
    if "key_padding_mask" in options:
        kwargs["key_padding_mask"] = torch.arange(N) >= torch.tensor([[N], [3], [1]])
    results = [layer(x, x, x, **kwargs) for layer in (ours, theirs)]
    exact = ours.double()(*[x.double()] * 3, **kwargs)
    for actual, peer, wanted in zip(*results, exact, strict=True):
        if wanted is not None:
            assert_as_exact_as(actual.detach(), peer.detach(), wanted.detach())


@pytest.mark.parametrize("types", [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)])
@pytest.mark.parametrize("inputs", ["self", "key is value", "all different"])
def test_a_bias_of_another_type_than_the_weights(inputs, types, x):
    """PyTorch's layer takes it with the batch first."""
    weight, bias = types
    theirs, ours = (layer(E, H, batch_first=True) for layer in (nn.MultiheadAttention, MultiheadAttention))
    randomise(theirs)
    ours.load_state_dict(theirs.state_dict())
    exact = copy.deepcopy(theirs).double()
    for layer in (theirs, ours):
        layer.to(weight).in_proj_bias.data = layer.in_proj_bias.data.to(bias)
    query, key, value = x.detach(), x.detach().roll(1, 0), x.detach().roll(2, 0)
    key, value = {"self": (query, query), "key is value": (key, key), "all different": (key, value)}[inputs]
    expected = exact(query, key, value)[0]
    given = {id(t): t.to(weight) for t in (query, key, value)}
    actual, peer = (layer(*(given[id(t)] for t in (query, key, value)))[0] for layer in (ours, theirs))
    assert_as_exact_as(actual, peer, expected)
    weigh(actual).backward()
    assert ours.in_proj_bias.grad.dtype == bias


@pytest.mark.parametrize("position", [None, "rotary", "alibi", "relative"])
@pytest.mark.parametrize("graph", [None, *GRAPHS])
def test_bfloat16_on_graphs(graph, position, x):
    attention = MultiheadAttention(E, H, batch_first=True, position=make_position(position)).bfloat16()
    x = x.detach().bfloat16().requires_grad_()
    graph = None if graph is None else GRAPHS[graph]()
    out, weights = attention(x, x, x, graph=graph)
    assert out.dtype == weights.dtype == torch.bfloat16
    out.float().pow(2).sum().backward()
    assert x.grad.isfinite().all()
    exact = copy.deepcopy(attention).double()(*[x.detach().double()] * 3, graph=graph)[0]
    torch.testing.assert_close(out.double(), exact, rtol=0.05, atol=0.02)


def test_autocast(attention, x):
    attention, x = attention.float(), x.detach().float()
    with torch.autocast("cpu", torch.bfloat16):
        for graph in (None, random_edge_index(N, num_edges=20)):
            out = attention(x, x, x, graph=graph)[0]
            assert out.dtype == torch.bfloat16
            torch.testing.assert_close(
                out.float(), attention.double()(*[x.double()] * 3, graph=graph)[0].float(), rtol=0.1, atol=0.1
            )
            attention.float()


def test_copies_and_pickles(x, edge_index):
    attention = MultiheadAttention(E, H, batch_first=True, position=ALiBi(H), qk_norm=True).double()
    expected = [attention(x, x, x, graph=graph) for graph in (None, edge_index)]
    for other in (copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))):
        actual = [other(x, x, x, graph=graph) for graph in (None, edge_index)]
        torch.testing.assert_close(actual, expected)
        with torch.no_grad():
            other.in_proj_weight.zero_()
        torch.testing.assert_close(attention(x, x, x), expected[0])


def test_one_batch_of_nothing(attention):
    x = torch.empty(B, 0, E, dtype=torch.double)
    assert attention(x, x, x)[0].shape == (B, 0, E)
    assert attention(x, x, x, is_causal=True)[0].shape == (B, 0, E)
    y = torch.randn(B, 2, E, dtype=torch.double)
    torch.testing.assert_close(attention(y, x, x)[0], attention.out_proj.bias.expand(B, 2, E))
    assert attention(y[:0], y[:0], y[:0])[0].shape == (0, 2, E)


# --- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"embed_dim": 10, "num_heads": 4}, "10 is not one of 4"),
        ({"embed_dim": 0, "num_heads": 1}, "at least 1"),
        ({"embed_dim": 8, "num_heads": 0}, "at least 1"),
        ({"embed_dim": 8, "num_heads": 4, "num_kv_heads": 3}, "num_kv_heads must divide num_heads=4; got 3"),
        ({"embed_dim": 8, "num_heads": 4, "num_kv_heads": 0}, "num_kv_heads"),
        ({"embed_dim": 8, "num_heads": 4, "num_kv_heads": 8}, "num_kv_heads"),
        ({"embed_dim": 8, "num_heads": 4, "dropout": 1.5}, "probability"),
        ({"embed_dim": 8, "num_heads": 4, "dropout": -0.1}, "probability"),
    ],
)
def test_bad_options(arguments, message):
    with pytest.raises(ValueError, match=message):
        MultiheadAttention(**arguments)


@pytest.mark.parametrize(
    ("name", "mask", "message"),
    [
        ("attn_mask", torch.zeros(N + 1, N, dtype=torch.bool), r"\[6, 6\] or \[12, 6, 6\].*got \[7, 6\]"),
        ("attn_mask", torch.zeros(N, dtype=torch.bool), "attn_mask must have shape"),
        ("attn_mask", torch.zeros(B, N, N, dtype=torch.bool), "attn_mask must have shape"),
        ("attn_mask", torch.zeros(1, N, dtype=torch.bool), "attn_mask must have shape"),
        ("attn_mask", torch.zeros(B, H, N, N), "attn_mask must have shape"),
        ("attn_mask", torch.zeros(N, N, dtype=torch.long), "attn_mask must hold booleans"),
        ("attn_mask", torch.zeros(N, N, dtype=torch.uint8), "uint8"),
        ("key_padding_mask", torch.zeros(B, N + 1, dtype=torch.bool), r"key_padding_mask must have shape \[3, 6\]"),
        ("key_padding_mask", torch.zeros(N, dtype=torch.bool), "key_padding_mask must have shape"),
        ("key_padding_mask", torch.zeros(B + 1, N, dtype=torch.bool), "key_padding_mask"),
        ("key_padding_mask", torch.zeros(1, N, dtype=torch.bool), "key_padding_mask"),
        ("key_padding_mask", torch.zeros(N, B, dtype=torch.bool), "key_padding_mask"),
        ("key_padding_mask", torch.zeros(B, N, dtype=torch.long), "key_padding_mask must hold booleans"),
    ],
)
def test_bad_masks(name, mask, message, attention):
    x = torch.randn(B, N, E, dtype=torch.double)
    with pytest.raises(ValueError, match=message):
        attention(x, x, x, **{name: mask})


def test_bad_masks_beside_is_causal(attention):
    x = torch.randn(B, N, E, dtype=torch.double)
    for mask in (later(N + 1), torch.zeros(N, N, dtype=torch.long)):
        with pytest.raises(ValueError, match="attn_mask"):
            attention(x, x, x, attn_mask=mask, is_causal=True)


def test_bad_inputs(attention):
    x = torch.randn(B, N, E, dtype=torch.double)
    for bad in ((x[..., :-1], x, x), (x, x[..., :-1], x), (x, x, x[..., :-1])):
        with pytest.raises(ValueError, match="15 channels, but this layer was made for 16"):
            attention(*bad)
    with pytest.raises(ValueError, match="all"):
        attention(x, x[0], x[0])
    with pytest.raises(ValueError, match=r"\[B, T, E\]"):
        attention(x.unsqueeze(0), x.unsqueeze(0), x.unsqueeze(0))
    with pytest.raises(ValueError, match="each key must have one value"):
        attention(x, x, x[:, :-1])
    with pytest.raises(TypeError, match="query must be a tensor"):
        attention(None, x, x)
    with pytest.raises(ValueError, match="same batch") as error:
        attention(x, x[:2], x[:2])
    assert "batch_first" not in str(error.value)
    with pytest.raises(ValueError, match="was batch_first=True meant"):
        MultiheadAttention(E, H)(torch.randn(B, N, E), torch.randn(B, M, E), torch.randn(B, M, E))


def test_bad_graphs(attention):
    x = torch.randn(B, N, E, dtype=torch.double)
    with pytest.raises(ValueError, match="4 targets"):
        attention(x, x, x, graph=CompleteGraph(4))
    with pytest.raises(ValueError, match="7 sources"):
        attention(x, x, x, graph=CompleteGraph(N, 7))
    with pytest.raises(ValueError, match="batch"):
        attention(x, x, x, graph=CompleteGraph(N, source_lengths=torch.tensor([3, 4])))
    with pytest.raises(IndexError):
        attention(x, x, x, graph=torch.tensor([[0], [N]]))
    with pytest.raises(TypeError, match="a graph must be"):
        attention(x, x, x, graph="complete")
    with pytest.raises(ValueError, match="transposed"):
        attention(x, x, x, graph=torch.tensor([[0, 1], [1, 2], [2, 3]]))
    for option in ("add_bias_kv", "add_zero_attn"):
        with pytest.raises(ValueError, match="no nodes"):
            MultiheadAttention(E, H, **{option: True})(*[torch.randn(N, E)] * 3, graph=torch.tensor([[0], [1]]))


@pytest.mark.parametrize("window", [0, -1, (-1, 0), (0, -1), (1,), (1, 2, 3), 1.5, True])
def test_bad_windows(window):
    with pytest.raises(ValueError, match="window"):
        CompleteGraph(N, window=window)


@pytest.mark.parametrize("name", ["source_lengths", "target_lengths"])
def test_bad_lengths(name):
    with pytest.raises(ValueError, match=f"{name} must lie between 0 and {N}"):
        CompleteGraph(N, **{name: torch.tensor([2, N + 1])})
    with pytest.raises(ValueError, match="negative"):
        CompleteGraph(N, **{name: torch.tensor([2, -1])})
    with pytest.raises(ValueError, match="integer"):
        CompleteGraph(N, **{name: torch.tensor([2.0, 1.0])})


@pytest.mark.parametrize("position", [ALiBi(1), ALiBi(2), RelativePositionBias(2, 3), RotaryPositionalEncoding(2)])
@pytest.mark.parametrize("graph", [None, torch.tensor([[0, 1], [1, 2]]), CompleteGraph.packed([2, 4])])
def test_positions_for_other_heads(position, graph):
    attention = MultiheadAttention(E, H, position=position)
    with pytest.raises(ValueError, match="heads|bias"):
        attention(*[torch.randn(N, E)] * 3, graph=graph)


@pytest.mark.parametrize("position", ["rotary", SinusoidalPositionalEncoding(8)])
def test_positions_of_another_kind_are_not_ignored(position):
    with pytest.raises(TypeError, match="position must be None, a RotaryPositionalEncoding or a RelativePosition"):
        MultiheadAttention(8, 2, position=position)


def copied(module, inputs):
    """A hook that copies what a module gets, as offloading and casting do; a backward hook does so, too."""
    return tuple(x.clone() for x in inputs)


@pytest.mark.parametrize("register", ["register_forward_pre_hook", "register_full_backward_hook"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_hooks_that_copy_inputs_leave_self_attention_with_a_cache_alone(batch_first, register):
    attention, x = MultiheadAttention(E, H, batch_first=batch_first).double(), torch.randn(B, N, E, dtype=torch.double)
    x = (x if batch_first else x.transpose(0, 1)).requires_grad_()
    whole, cache, dim = attention(x, x, x, is_causal=True)[0], KeyValueCache(), int(batch_first)
    getattr(attention, register)(copied if "forward" in register else lambda module, grads, outs: None)
    steps = [attention(part, part, part, is_causal=True, cache=cache)[0] for part in x.split([2, 1, 1, 2], dim)]
    torch.testing.assert_close(torch.cat(steps, dim), whole)
    assert cache.length(attention) == N


def test_what_a_cache_keeps_is_said_or_known(attention, x):
    memory, cache = torch.randn(B, N, E, dtype=torch.double), KeyValueCache()
    with pytest.raises(ValueError, match="pass cache, or leave out static_kv"):
        attention(x, memory, memory, static_kv=True)
    with pytest.raises(ValueError, match="pass static_kv"):  # as many keys as queries, but other ones
        attention(x, memory, memory, cache=cache)
    expected = attention(x, memory, memory)[0]
    for _ in range(2):  # the second time, it is not read
        torch.testing.assert_close(attention(x, memory, memory, cache=cache, static_kv=True)[0], expected)
        memory = torch.zeros_like(memory)
    assert cache.length(attention) == N
    # Positions that are added to queries and keys make them others than the values, and still the same tokens.
    cache, moved = KeyValueCache(), x + 1
    parts = zip(moved.split(2, 1), x.split(2, 1), strict=True)
    steps = [attention(q, q.clone(), v, is_causal=True, cache=cache)[0] for q, v in parts]
    torch.testing.assert_close(torch.cat(steps, 1), attention(moved, moved, x, is_causal=True)[0])


@pytest.mark.parametrize(("n", "m"), [(6, 3), (3, 6), (4, 4)])
def test_a_mask_counts_beside_is_causal(n, m):
    theirs, ours = (module(E, H).double() for module in (nn.MultiheadAttention, MultiheadAttention))
    ours.load_state_dict(theirs.state_dict())
    q, k = torch.randn(n, E, dtype=torch.double), torch.randn(m, E, dtype=torch.double)
    top_left, near = torch.ones(n, m).bool().triu(1), torch.ones(n, m).bool().triu(2)
    for mask in (top_left, near, torch.zeros(n, m).double().masked_fill(near, -torch.inf), torch.randn(n, m).double()):
        expected = theirs(q, k, k, attn_mask=mask, is_causal=True)
        torch.testing.assert_close(ours(q, k, k, attn_mask=mask, is_causal=True), expected)
    edited = torch.ones(4, 4).bool().triu(1)
    x = torch.randn(4, E, dtype=torch.double)
    for _ in range(2):
        torch.testing.assert_close(ours(x, x, x, attn_mask=edited, is_causal=True), theirs(x, x, x, attn_mask=edited))
        edited[1, 0] = True  # what was seen of a mask is forgotten


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda cache: copy.deepcopy((None, cache))[1]])
@torch.no_grad()
def test_a_copied_cache_goes_on_by_itself(copied, attention, x):
    cache, (first, last) = KeyValueCache(), x.split([4, 2], 1)
    attention(first, first, first, is_causal=True, cache=cache)
    other, expected = copied(cache), attention(x, x, x, is_causal=True)[0][:, 4:]
    for each in (other, cache):  # neither of which lengthens the other
        torch.testing.assert_close(attention(last, last, last, is_causal=True, cache=each)[0], expected)
    both, cached = copy.deepcopy((attention, cache))
    assert cached.length(both) == N
