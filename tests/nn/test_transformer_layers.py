"""The Transformer's layers against PyTorch's, and over graphs."""

import copy
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from allpairspy import AllPairs
from torch import nn
from torch_geometric.utils import coalesce

import gattn.nn
from gattn import CompleteGraph
from gattn.nn import ALiBi, KeyValueCache, RotaryPositionalEncoding
from gattn.testing import assert_as_exact_as, assert_permutation_equivariant, random_edge_index
from tests.cases import mostly_slow

E, H, HIDDEN, B, S, T = 8, 2, 12, 3, 7, 5
LAYERS = ["TransformerEncoderLayer", "TransformerDecoderLayer"]
KINDS = [*LAYERS, "TransformerEncoder", "TransformerDecoder", "Transformer"]
ENCODERS = ("TransformerEncoderLayer", "TransformerEncoder")

OPTIONS = {
    "kind": KINDS,
    "norm_first": [False, True],
    "activation": ["relu", "gelu", F.gelu, F.silu],
    "layout": ["batch first", "batch second", "no batch"],
    "bias": [True, False],
    "eps": [1e-5, 0.1],
    "dtype": [torch.float32, torch.float64],
    "mask": [None, "bool", "float", "per head", "causal", "float causal", "causal, said so"],
    "padding": [None, "end", "anywhere", "float"],
    "memory_mask": [None, "bool", "float", "per head"],
    "memory_padding": [None, "end", "float"],
    "mode": ["train", "eval", "eval without gradients"],
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning"),
]


def possible(options):
    return not (options.get("kind") in ENCODERS and (options.get("memory_mask") or options.get("memory_padding")))


def cases():
    names = list(OPTIONS)
    rows = AllPairs(list(OPTIONS.values()), filter_func=lambda row: possible(dict(zip(names, row, strict=False))))
    for number, row in enumerate(rows):
        options = dict(zip(names, row, strict=True))
        yield pytest.param(options, id=f"{options['kind']}-{number}")


def make(module, kind, num_layers=2, dropout=0.0, **kwargs):
    """A layer or model of `torch.nn` or `gattn.nn`."""
    options = {"dim_feedforward": HIDDEN, "dropout": dropout, **kwargs}
    if kind == "Transformer":
        return module.Transformer(E, H, num_layers, num_layers, **options)
    if kind in LAYERS:
        return getattr(module, kind)(E, H, **options)
    layer = getattr(module, f"{kind}Layer")(E, H, **options)
    norm = nn.LayerNorm(E) if options.get("norm_first") else None
    return getattr(module, kind)(layer, num_layers, norm)


def randomise(module):
    """Different layers, and no biases or norms that are zeros or ones, which hide errors."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    return module


def later(n):
    return torch.ones(n, n, dtype=torch.bool).triu(1)


def make_mask(kind, n, m, batched):
    if kind is None:
        return None
    if "causal" in kind:
        mask = later(n)
        return torch.zeros(n, n, dtype=torch.double).masked_fill(mask, -torch.inf) if "float" in kind else mask
    shape = ((B if batched else 1) * H, n, m) if kind == "per head" else (n, m)
    if kind == "float":
        return torch.randn(shape, dtype=torch.double)
    mask = torch.rand(shape) < 0.4
    mask[..., 0] = False  # PyTorch's rows without any key are NaN
    return mask


def make_padding(kind, n, batched):
    if kind is None:
        return None
    if kind == "float":
        padding = torch.randn(B, n, dtype=torch.double)
    elif kind == "end":
        padding = torch.arange(n) >= torch.tensor([[n], [3], [1]])
    else:
        padding = torch.rand(B, n) < 0.4
        padding[:, 0] = False
    return padding if batched else padding[1]


def make_inputs(options):
    """Float64 inputs, and masks by the names that the forward method has for them."""
    batched = options["layout"] != "no batch"

    def tensor(places):
        shape = {"batch first": (B, places), "batch second": (places, B), "no batch": (places,)}[options["layout"]]
        return torch.randn(*shape, E, dtype=torch.double)

    kind, mask, padding = options["kind"], options["mask"], options["padding"]
    causal = mask == "causal, said so"
    if kind in ENCODERS:
        first = "src_mask" if kind == "TransformerEncoderLayer" else "mask"
        arguments = {
            first: make_mask(mask, S, S, batched),
            "src_key_padding_mask": make_padding(padding, S, batched),
        }
        inputs = (tensor(S),)
        said = {"is_causal": True}
    else:
        arguments = {
            "tgt_mask": make_mask(mask, T, T, batched),
            "tgt_key_padding_mask": make_padding(padding, T, batched),
            "memory_mask": make_mask(options["memory_mask"], T, S, batched),
            "memory_key_padding_mask": make_padding(options["memory_padding"], S, batched),
        }
        inputs = tensor(T), tensor(S)
        said = {"tgt_is_causal": True}
        if kind == "Transformer":
            inputs = inputs[::-1]
            arguments["src_mask"] = make_mask(mask, S, S, batched)
            arguments["src_key_padding_mask"] = make_padding(padding, S, batched)
            said["src_is_causal"] = True
    return inputs, {name: x for name, x in arguments.items() if x is not None} | (said if causal else {})


def weigh(tensor):
    """A loss to which every element contributes differently."""
    return (tensor * torch.linspace(-1, 1, tensor.numel(), dtype=tensor.dtype).view(tensor.shape).cos()).sum()


def run(model, inputs, arguments, options):
    """Output and every gradient, by name."""
    cast = lambda x: x.to(options["dtype"]) if isinstance(x, torch.Tensor) and x.is_floating_point() else x  # noqa: E731
    inputs = [cast(x).clone().requires_grad_() for x in inputs]
    arguments = {name: cast(x) for name, x in arguments.items()}
    model.zero_grad(set_to_none=True)
    if options["mode"] == "eval without gradients":
        with torch.no_grad():
            return {"out": model(*inputs, **arguments)}
    out = model(*inputs, **arguments)
    weigh(out).backward()
    leaves = dict(model.named_parameters()) | {f"input {i}": x for i, x in enumerate(inputs)}
    return {"out": out.detach()} | {f"gradient of {name}": leaf.grad for name, leaf in leaves.items()}


def compare(actual, expected, exact):
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        if value.dtype == torch.float64:
            torch.testing.assert_close(value, expected[name], rtol=1e-8, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
        else:
            # Gradients that cancel out are as exact as their terms.
            scale = max(x.abs().max().item() for other, x in exact.items() if (other == "out") == (name == "out"))
            assert_as_exact_as(value, expected[name], exact[name], scale=scale, name=name)


@pytest.mark.parametrize("options", list(cases()))
def test_equals_pytorch(options):
    kwargs = {
        "norm_first": options["norm_first"],
        "activation": options["activation"],
        "batch_first": options["layout"] == "batch first",
        "bias": options["bias"],
        "layer_norm_eps": options["eps"],
    }
    ours, theirs = (make(module, options["kind"], **kwargs).double() for module in (gattn.nn, nn))
    randomise(ours)
    sizes = {name: x.shape for name, x in ours.state_dict().items()}
    assert list(sizes) == list(theirs.state_dict())
    assert sizes == {name: x.shape for name, x in theirs.state_dict().items()}
    # Checkpoints go both ways.
    theirs.load_state_dict(ours.state_dict())
    ours = make(gattn.nn, options["kind"], **kwargs).double()
    ours.load_state_dict(theirs.state_dict())
    for model in (ours, theirs):
        model.train(options["mode"] == "train")
    # PyTorch's nested tensors leave zeros where there is padding.
    for encoder in theirs.modules():
        if isinstance(encoder, nn.TransformerEncoder):
            encoder.use_nested_tensor = False

    inputs = make_inputs(options)
    exact = run(theirs, *inputs, options | {"dtype": torch.float64})
    ours, theirs = (model.to(options["dtype"]) for model in (ours, theirs))
    compare(run(ours, *inputs, options), run(theirs, *inputs, options), exact)


@pytest.mark.parametrize(("kind", "bias", "norm_first"), list(AllPairs([list(KINDS), [False, True], [False, True]])))
def test_same_seed_gives_same_parameters(kind, bias, norm_first):
    torch.manual_seed(1)
    theirs = make(nn, kind, bias=bias, norm_first=norm_first)
    torch.manual_seed(1)
    ours = make(gattn.nn, kind, bias=bias, norm_first=norm_first)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    for name, parameter in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter), name


@pytest.mark.parametrize("method", ["__init__", "forward"])
@pytest.mark.parametrize("kind", KINDS)
def test_arguments_begin_as_pytorchs(kind, method):
    theirs, ours = (
        list(inspect.signature(getattr(getattr(module, kind), method)).parameters.values()) for module in (nn, gattn.nn)
    )
    assert [p.name for p in ours[: len(theirs)]] == [p.name for p in theirs]
    assert [p.default for p in ours[: len(theirs)]] == [p.default for p in theirs]
    assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in ours[len(theirs) :])


@pytest.mark.parametrize("kind", KINDS)
def test_each_is_one_of_pytorchs(kind):
    assert isinstance(make(gattn.nn, kind), getattr(nn, kind))


@pytest.mark.parametrize(
    ("kind", "inside", "norm_first", "batch_first"),
    list(
        AllPairs(
            [
                ["TransformerEncoder", "TransformerDecoder", "Transformer"],
                ["ours in theirs", "theirs in ours"],
                [False, True],
                [False, True],
            ]
        )
    ),
)
def test_layers_and_containers_can_be_mixed(kind, inside, norm_first, batch_first):
    container, layers = (nn, gattn.nn) if inside == "ours in theirs" else (gattn.nn, nn)
    kwargs = {"dim_feedforward": HIDDEN, "dropout": 0.0, "norm_first": norm_first, "batch_first": batch_first}

    def stack(kind):
        return getattr(container, kind)(getattr(layers, f"{kind}Layer")(E, H, **kwargs), 2, nn.LayerNorm(E))

    if kind == "Transformer":
        encoder, decoder = stack("TransformerEncoder"), stack("TransformerDecoder")
        mixed = container.Transformer(
            E, H, custom_encoder=encoder, custom_decoder=decoder, batch_first=batch_first
        ).double()
    else:
        mixed = stack(kind).double()
    randomise(mixed)
    theirs = nn.Transformer(E, H, 2, 2, **kwargs).double()
    theirs = {"Transformer": theirs, "TransformerEncoder": theirs.encoder, "TransformerDecoder": theirs.decoder}[kind]
    theirs.load_state_dict(mixed.state_dict())
    options = {"kind": kind, "layout": "batch first" if batch_first else "batch second", "dtype": torch.double}
    options |= {"memory_mask": "bool", "memory_padding": "end"}
    for mask in ("bool", "causal"):
        inputs = make_inputs(options | {"mask": mask, "padding": "anywhere"})
        for mode in ("train", "eval", "eval without gradients"):
            for model in (mixed, theirs):
                model.train(mode == "train")
            actual, expected = (run(model, *inputs, options | {"mode": mode}) for model in (mixed, theirs))
            compare(actual, expected, expected)


def test_our_layers_in_pytorchs_encoder_with_padding():
    """PyTorch's encoder would hand nested tensors to layers of its own."""
    theirs = make(nn, "TransformerEncoder", batch_first=True)
    ours = nn.TransformerEncoder(make(gattn.nn, "TransformerEncoderLayer", batch_first=True), 2)
    randomise(theirs)
    ours.load_state_dict(theirs.state_dict())
    x, padding = torch.randn(B, S, E), make_padding("end", S, True)
    with torch.no_grad():
        for model in (ours, theirs):
            model.eval()
        actual, expected = (model(x, src_key_padding_mask=padding) for model in (ours, theirs))
    torch.testing.assert_close(actual[~padding], expected[~padding])


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_acts_in_training_only(kind):
    model = make(gattn.nn, kind, dropout=0.3, batch_first=True)
    inputs, arguments = make_inputs({"kind": kind, "layout": "batch first", "mask": None, "padding": None} | NO_MEMORY)
    inputs = [x.float() for x in inputs]
    assert not torch.equal(model(*inputs, **arguments), model(*inputs, **arguments))
    model.eval()
    assert torch.equal(model(*inputs, **arguments), model(*inputs, **arguments))


NO_MEMORY = {"memory_mask": None, "memory_padding": None}


@pytest.mark.parametrize("kind", LAYERS)
def test_every_branch_has_its_dropout(kind):
    inputs, _ = make_inputs({"kind": kind, "layout": "batch first", "mask": None, "padding": None} | NO_MEMORY)
    layer = randomise(make(gattn.nn, kind, norm_first=True, batch_first=True).double())
    names = [name for name, module in layer.named_modules() if isinstance(module, nn.Dropout)]
    assert names == [name for name, module in make(nn, kind).named_modules() if isinstance(module, nn.Dropout)]
    for name in names:
        if name != "dropout":
            layer.get_submodule(name).p = 1.0
    torch.testing.assert_close(layer(*inputs), inputs[0])
    for name in names:
        if name != "dropout":
            layer.get_submodule(name).p = 0.0
            assert not torch.allclose(layer(*inputs), inputs[0])
            layer.get_submodule(name).p = 1.0


# --- Graphs -----------------------------------------------------------------------------------------------------------


def hidden(edge_index, num_targets, num_sources):
    """Who does not see whom: a mask as PyTorch has it."""
    mask = torch.ones(num_targets, num_sources, dtype=torch.bool)
    mask[edge_index[1], edge_index[0]] = False
    return mask


def graph_arguments(kind):
    """Graphs of edges by their arguments' names, and masks that say the same."""
    src, tgt, memory = (
        coalesce(random_edge_index(m, n, num_edges=2 * n, seed=seed))
        for seed, (m, n) in enumerate([(S, S), (T, T), (S, T)])
    )
    masks = {"src_mask": hidden(src, S, S), "tgt_mask": hidden(tgt, T, T), "memory_mask": hidden(memory, T, S)}
    if kind == "Transformer":
        return {"src_graph": src, "tgt_graph": tgt, "memory_graph": memory}, masks
    if kind in ENCODERS:
        return {"graph": src}, {"src_mask" if kind in LAYERS else "mask": masks["src_mask"]}
    return {"graph": tgt, "memory_graph": memory}, {name: masks[name] for name in ("tgt_mask", "memory_mask")}


@pytest.mark.parametrize(
    ("kind", "layout", "norm_first"),
    list(AllPairs([list(KINDS), ["batch first", "batch second", "no batch"], [False, True]])),
)
def test_a_graph_equals_a_mask(kind, layout, norm_first):
    model = randomise(make(gattn.nn, kind, norm_first=norm_first, batch_first=layout == "batch first").double())
    options = {"kind": kind, "layout": layout, "mask": None, "dtype": torch.double, "mode": "train"} | NO_MEMORY
    inputs, padding = make_inputs(options | {"padding": "end"})
    graphs, masks = graph_arguments(kind)
    actual, expected = (run(model, inputs, arguments | padding, options) for arguments in (graphs, masks))
    compare(actual, expected, expected)
    assert not torch.allclose(actual["out"], run(model, inputs, padding, options)["out"])
    for name in graphs:  # each of them is looked at
        rest = {other: graph for other, graph in graphs.items() if other != name}
        assert not torch.allclose(actual["out"], run(model, inputs, rest | padding, options)["out"]), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_causal_graph_is_a_causal_mask(kind):
    model = randomise(make(gattn.nn, kind, batch_first=True).double())
    options = {"kind": kind, "layout": "batch first", "padding": None, "dtype": torch.double, "mode": "train"}
    options |= NO_MEMORY
    inputs, masks = make_inputs(options | {"mask": "causal"})
    graph = {"graph": CompleteGraph(S if kind in ENCODERS else T, causal=True)}
    if kind == "Transformer":
        graph = {"src_graph": CompleteGraph(S, causal=True), "tgt_graph": CompleteGraph(T, causal=True)}
    said = {name.replace("mask", "is_causal").removeprefix("src_" * (kind in ENCODERS)): True for name in masks}
    expected = run(model, inputs, masks, options)
    for arguments in (graph, said):
        compare(run(model, inputs, arguments, options), expected, expected)


def test_memory_is_causal():
    ours, theirs = (make(module, "TransformerDecoder", batch_first=True).double() for module in (gattn.nn, nn))
    theirs.load_state_dict(randomise(ours).state_dict())
    x, memory = torch.randn(2, B, T, E, dtype=torch.double)
    expected = theirs(x, memory, memory_mask=later(T), memory_is_causal=True)
    torch.testing.assert_close(ours(x, memory, memory_mask=later(T), memory_is_causal=True), expected)
    torch.testing.assert_close(ours(x, memory, memory_is_causal=True), expected)
    torch.testing.assert_close(ours(x, memory, memory_graph=CompleteGraph(T, causal=True)), expected)


def test_graph_transformer_is_permutation_equivariant():
    edge_index = random_edge_index(S, num_edges=20)
    x = torch.randn(S, E, dtype=torch.double)
    model = randomise(make(gattn.nn, "TransformerEncoder").double())
    assert_permutation_equivariant(lambda x, edges: model(x, graph=edges), x, edge_index)
    # What is two edges away takes two layers.
    path = torch.tensor([[0, 1], [1, 2]])
    changed = x.clone()
    changed[0, 0] += 1
    difference = (model(changed, graph=path) - model(x, graph=path)).abs().amax(1)
    assert (difference > 1e-9).tolist() == [True, True, True] + [False] * (S - 3)
    layer = model.layers[0]
    difference = (layer(changed, graph=path) - layer(x, graph=path)).abs().amax(1)
    assert (difference > 1e-9).tolist() == [True, True] + [False] * (S - 2)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_causal_means_causal(kind, norm_first):
    model = randomise(make(gattn.nn, kind, batch_first=True, norm_first=norm_first).double())
    inputs, arguments = make_inputs(
        {"kind": kind, "layout": "batch first", "mask": "causal, said so", "padding": None} | NO_MEMORY
    )
    place = 1 if kind == "Transformer" else 0
    inputs = list(inputs)
    x = inputs[place].requires_grad_()
    out = model(*inputs, **arguments)
    (gradient,) = torch.autograd.grad(weigh(out[:, 2]), x)
    assert (gradient[:, 3:] == 0).all()
    assert (gradient[:, :3] != 0).any(-1).all()
    inputs[place] = x.detach().clone()
    inputs[place][:, 3, 0] += 1
    other = model(*inputs, **arguments)
    torch.testing.assert_close(other[:, :3], out[:, :3], rtol=0, atol=1e-13)
    assert not torch.isclose(other[:, 3:], out[:, 3:]).all(-1).any()


@pytest.mark.parametrize("kind", KINDS)
def test_who_sees_nothing_stays_finite(kind):
    model = make(gattn.nn, kind, batch_first=True)
    inputs, _ = make_inputs({"kind": kind, "layout": "batch first", "mask": None, "padding": None} | NO_MEMORY)
    inputs = [x.float().requires_grad_() for x in inputs]
    name = {"TransformerEncoder": "src", "TransformerEncoderLayer": "src"}.get(kind, "tgt")
    padding = {f"{name}_key_padding_mask": torch.ones(B, S if name == "src" else T, dtype=torch.bool)}
    if name == "tgt":
        padding["memory_key_padding_mask"] = torch.ones(B, S, dtype=torch.bool)
    out = model(*inputs, **padding)
    assert out.isfinite().all()
    weigh(out).backward()
    assert all(x.grad is None or x.grad.isfinite().all() for x in (*inputs, *model.parameters()))
    assert inputs[-1 if kind == "Transformer" else 0].grad.any()


# --- What is new ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "position", "batch_first"), list(AllPairs([list(KINDS[:-1]), [None, "rotary", "alibi"], [False, True]]))
)
def test_cached_steps_equal_the_whole(kind, position, batch_first):
    position = {None: None, "rotary": RotaryPositionalEncoding(E // H), "alibi": ALiBi(H)}[position]
    model = randomise(make(gattn.nn, kind, batch_first=batch_first, position=position).double())
    layout = "batch first" if batch_first else "batch second"
    inputs, arguments = make_inputs(
        {"kind": kind, "layout": layout, "mask": "causal, said so", "padding": None} | NO_MEMORY
    )
    whole = model(*inputs, **arguments)
    said = {name: value for name, value in arguments.items() if value is True}
    cache, dim = KeyValueCache(), int(batch_first)
    x, *memory = inputs
    steps = [model(part, *memory, **said, cache=cache) for part in x.split([2] + [1] * (x.size(dim) - 2), dim)]
    torch.testing.assert_close(torch.cat(steps, dim), whole)


def test_options_of_attention_reach_it():
    rotary = RotaryPositionalEncoding(E // H)
    encoder = make(gattn.nn, "TransformerEncoderLayer", num_kv_heads=1, qk_norm=True, position=rotary)
    assert (encoder.self_attn.num_kv_heads, encoder.self_attn.position) == (1, rotary)
    assert encoder.self_attn.q_norm is not None
    decoder = make(gattn.nn, "TransformerDecoderLayer", num_kv_heads=1, qk_norm=True, position=rotary)
    assert decoder.self_attn.position is rotary
    assert decoder.multihead_attn.position is None  # places in two sequences do not compare
    assert decoder.multihead_attn.num_kv_heads == decoder.self_attn.num_kv_heads == 1
    model = make(gattn.nn, "Transformer", num_kv_heads=1)
    attentions = [module for module in model.modules() if isinstance(module, gattn.nn.MultiheadAttention)]
    assert [attention.num_kv_heads for attention in attentions] == [1] * 6
    assert model(torch.randn(S, E), torch.randn(T, E)).shape == (T, E)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of PyTorch's tracing
@pytest.mark.parametrize(
    ("kind", "graph"),
    mostly_slow(
        [("TransformerEncoderLayer", graph) for graph in (None, "edges", "causal", "packed")]
        + [("TransformerDecoderLayer", "causal"), ("TransformerEncoder", "edges"), ("TransformerDecoder", None)]
        + [("Transformer", None), ("Transformer", "edges")],
        every=5,
    ),
)
def test_compiles_without_graph_breaks(kind, graph):
    torch._dynamo.reset()
    model = make(gattn.nn, kind, num_layers=1, batch_first=True)
    inputs, arguments = make_inputs({"kind": kind, "layout": "batch first", "padding": "end", "mask": None} | NO_MEMORY)
    inputs = [x.float().requires_grad_() for x in inputs]
    first = "src_graph" if kind == "Transformer" else "graph"
    size = S if kind in (*ENCODERS, "Transformer") else T
    if graph == "edges":
        arguments |= graph_arguments(kind)[0]
    elif graph == "causal":
        arguments[first] = CompleteGraph(size, causal=True)
    elif graph == "packed":
        arguments = {first: CompleteGraph.packed([2, size - 2])}
    out, expected = (
        torch.compile(model, fullgraph=True, backend="aot_eager")(*inputs, **arguments),
        model(*inputs, **arguments),
    )
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    leaves = [*inputs, *model.parameters()]
    results = (torch.autograd.grad(weigh(x), leaves, allow_unused=True) for x in (out, expected))
    for actual, wanted in zip(*results, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_as_exact_as_pytorchs(kind, norm_first):
    ours, theirs = (make(module, kind, norm_first=norm_first, batch_first=True) for module in (gattn.nn, nn))
    randomise(ours).bfloat16()
    theirs.bfloat16().load_state_dict(ours.state_dict())
    inputs, arguments = make_inputs(
        {"kind": kind, "layout": "batch first", "mask": "causal", "padding": "anywhere"} | NO_MEMORY
    )
    inputs = [x.bfloat16() for x in inputs]
    out, peer = (model(*inputs, **arguments).detach() for model in (ours, theirs))
    exact = theirs.double()(*[x.double() for x in inputs], **arguments).detach()
    assert_as_exact_as(out, peer, exact)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_pickles(kind):
    model = randomise(make(gattn.nn, kind, activation=F.silu).double())
    inputs, arguments = make_inputs(
        {"kind": kind, "layout": "batch second", "mask": "bool", "padding": "end"} | NO_MEMORY
    )
    graphs, _ = graph_arguments(kind)
    expected = model(*inputs, **arguments, **graphs)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(*inputs, **arguments, **graphs), expected)
        randomise(other)
        torch.testing.assert_close(model(*inputs, **arguments, **graphs), expected)


def test_layers_of_a_stack_are_different():
    model = make(gattn.nn, "TransformerEncoder")
    assert torch.equal(model.layers[0].linear1.weight, model.layers[1].linear1.weight)
    model.layers[0].linear1.weight.data.zero_()
    assert model.layers[1].linear1.weight.any()


# --- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LAYERS)
def test_bad_options(kind):
    layer = getattr(gattn.nn, kind)
    with pytest.raises(ValueError, match="got 'tanh'"):
        layer(E, H, activation="tanh")
    with pytest.raises(ValueError, match="8 is not one of 3"):
        layer(E, 3)
    with pytest.raises(ValueError, match="num_kv_heads"):
        layer(E, 4, num_kv_heads=3)
    with pytest.raises(ValueError, match="probability"):
        layer(E, H, dropout=2.0)


def test_bad_inputs():
    model = make(gattn.nn, "Transformer", batch_first=True)
    with pytest.raises(ValueError, match="same batch"):
        model(torch.randn(3, S, E), torch.randn(2, T, E))
    with pytest.raises(ValueError, match="9 channels"):
        model(torch.randn(3, S, E), torch.randn(3, T, E + 1))
    with pytest.raises(ValueError, match="9 and 8 channels"):
        model(torch.randn(3, S, E + 1), torch.randn(3, T, E))
    with pytest.raises(ValueError, match="attn_mask must have shape"):
        model(torch.randn(3, S, E), torch.randn(3, T, E), tgt_mask=later(S))
    with pytest.raises(ValueError, match="key_padding_mask must have shape"):
        model(torch.randn(3, S, E), torch.randn(3, T, E), memory_key_padding_mask=torch.zeros(3, T, dtype=torch.bool))
    with pytest.raises(ValueError, match="7 targets"):
        model(torch.randn(3, S, E), torch.randn(3, T, E), tgt_graph=CompleteGraph(S))


def with_blocks(base, seen):
    """A subclass of an encoder or decoder layer that overrides PyTorch's blocks and notes their arguments."""

    class Subclass(base):
        def _sa_block(self, x, attn_mask, key_padding_mask, is_causal=False):
            seen.append((attn_mask, key_padding_mask, is_causal))
            weights = self.self_attn(x, x, x, attn_mask=attn_mask, key_padding_mask=key_padding_mask)[1]
            return 2 * super()._sa_block(x, attn_mask, key_padding_mask, is_causal=is_causal) + weights.sum()

        def _mha_block(self, x, mem, attn_mask, key_padding_mask, is_causal=False):
            seen.append((attn_mask, key_padding_mask, is_causal))
            return 3 * super()._mha_block(x, mem, attn_mask, key_padding_mask, is_causal)

        def _ff_block(self, x):
            return 5 * super()._ff_block(x)

    return Subclass


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_overridden_blocks_are_called_with_the_arguments_of_pytorch(kind, norm_first):
    x, memory, padding = torch.randn(B, T, E), torch.randn(B, S, E), torch.arange(T) >= torch.tensor([[T], [3], [4]])
    found, state = [], None
    for module in (nn, gattn.nn):
        seen = []
        layer = with_blocks(getattr(module, kind), seen)(E, H, HIDDEN, 0.0, batch_first=True, norm_first=norm_first)
        state = randomise(layer).state_dict() if state is None else state
        layer.load_state_dict(state)
        masks = {"mask": later(T), "key_padding_mask": padding, "is_causal": True}
        side = "src" if kind in ENCODERS else "tgt"
        names = {"mask": f"{side}_mask", "key_padding_mask": f"{side}_key_padding_mask"}
        names["is_causal"] = "is_causal" if side == "src" else "tgt_is_causal"
        out = layer(x, *(() if side == "src" else (memory,)), **{names[name]: mask for name, mask in masks.items()})
        found.append((out, seen))
    torch.testing.assert_close(*found)
    with pytest.raises(TypeError, match="overrides a block without the argument graph: let it take"):
        layer(x, *(() if side == "src" else (memory,)), graph=CompleteGraph(T))


def test_a_block_replaced_on_an_instance_is_called():
    for module in (nn, gattn.nn):
        layer = make(module, "TransformerEncoderLayer")
        layer._sa_block = lambda x, attn_mask, key_padding_mask, is_causal: 0 * x + float(attn_mask.min())
        x = torch.randn(T, E)
        expected = layer.norm1(x - torch.inf)
        expected = layer.norm2(expected + layer._ff_block(expected))
        torch.testing.assert_close(layer(x, src_mask=later(T)), expected, equal_nan=True)


class Reader(nn.TransformerEncoderLayer):
    """A layer of somebody else, which reads masks as PyTorch's encoder passes them."""

    def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):
        return src + src_mask[:, :1].exp().unsqueeze(-1) + src_key_padding_mask.exp().T.unsqueeze(-1)


def test_layers_of_others_get_the_masks_of_pytorch():
    x, padding = torch.randn(T, B, E), torch.arange(T) >= torch.tensor([[T], [3], [4]])
    outs = [module.TransformerEncoder(Reader(E, H), 2)(x, later(T), padding) for module in (nn, gattn.nn)]
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_another_module_in_the_place_of_attention(kind, masked):
    theirs, ours = (make(module, kind, batch_first=True) for module in (nn, gattn.nn))
    ours.load_state_dict(randomise(theirs).state_dict())
    for name in ("self_attn", "multihead_attn"):
        if hasattr(theirs, name):
            setattr(ours, name, copy.deepcopy(getattr(theirs, name)))
    inputs = [torch.randn(B, T, E), torch.randn(B, S, E)][: 1 + (kind not in ENCODERS)]
    masks = [later(T), *[None] * (kind not in ENCODERS), torch.zeros(B, T, dtype=torch.bool)] if masked else []
    torch.testing.assert_close(ours(*inputs, *masks), theirs(*inputs, *masks))


class Weighing(nn.Module):
    """Attention that adds masks to logits, as PyTorch's encoder passes them."""

    batch_first = True

    def forward(self, q, k, v, attn_mask=None, key_padding_mask=None, need_weights=True, is_causal=False):
        return (((q @ k.mT + attn_mask + key_padding_mask.unsqueeze(1)).softmax(-1) @ v), None)


def test_attention_of_others_gets_masks_as_numbers():
    theirs, ours = (make(module, "TransformerEncoder", batch_first=True) for module in (nn, gattn.nn))
    ours.load_state_dict(randomise(theirs).state_dict())
    for model in (theirs, ours):
        for layer in model.layers:
            layer.self_attn = Weighing()
    masks = later(T), torch.arange(T) >= torch.tensor([[T], [3], [4]])
    x = torch.randn(B, T, E)
    torch.testing.assert_close(ours(x, *masks), theirs(x, *masks))


def test_a_hook_that_changes_queries_leaves_a_cache_alone():
    layer = make(gattn.nn, "TransformerEncoderLayer", batch_first=True).eval()
    layer.self_attn.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0], *inputs[1:]))
    x, cache = torch.randn(B, T, E), KeyValueCache()
    steps = [layer(part, is_causal=True, cache=cache) for part in x.split(1, 1)]
    torch.testing.assert_close(torch.cat(steps, 1), layer(x, is_causal=True))


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_bias_as_a_value(norm_first):
    """In every layer of a stack, as a mask of numbers, and with gradients for its table."""
    layer = gattn.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first)
    stack, x = gattn.nn.TransformerEncoder(layer, 2).double(), torch.randn(2, 5, 8, dtype=torch.double)
    buckets = torch.randint(3, (5, 5), dtype=torch.uint8)
    table = torch.randn(3, 2, dtype=torch.double, requires_grad=True)
    mask = table[buckets.long()].permute(2, 0, 1).repeat(2, 1, 1)
    found, expected = stack(x, attn_bias=gattn.BucketBias(buckets, table)), stack(x, mask=mask)
    torch.testing.assert_close(found, expected)
    grads = (torch.autograd.grad(out.square().sum(), table, retain_graph=True) for out in (found, expected))
    torch.testing.assert_close(*grads)
    with pytest.raises(ValueError, match="attn_bias cannot be added to masks of numbers"):
        stack(x, mask=mask.detach(), attn_bias=gattn.BucketBias(buckets, table))
    ragged = torch.nested.nested_tensor([x[0], x[1, :3]], layout=torch.jagged)
    with pytest.raises(ValueError, match="nested tensors take no attn_bias"):
        gattn.nn.MultiheadAttention(8, 2, batch_first=True).double()(
            ragged, ragged, ragged, attn_bias=gattn.BucketBias(buckets, table)
        )
