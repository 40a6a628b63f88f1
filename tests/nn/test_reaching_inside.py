"""What people do to the inside of layers: hooks, pruning, wrappers, patches, overrides. None of it is ignored.

Whatever changes a linear layer inside of a layer must act as if that layer had other weights from the beginning.
"""

import copy
import itertools
import types

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune, weight_norm
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.conv.dna_conv import Linear as GroupedLinear

import gattn
from gattn import nn as layers
from tests.cases import mostly_slow
from tests.layers import LAYERS, Draw, F, made, tensors

N = 6
EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 1, 2], [0, 0, 1, 1, 2, 2, 3, 4]])

#: The modules that are nothing but a linear map of their input, and perhaps a bias.
LINEAR = (pyg.Linear, nn.Linear, pyg.HeteroLinear, GroupedLinear, nn.Embedding)


def linear_parts(layer: nn.Module) -> list[str]:
    """All but PyG's own, whose states forget changes, and the table of `PathEncoder`, a matrix as in DGL."""
    return [
        name
        for name, part in layer.named_modules()
        if isinstance(part, LINEAR) and not isinstance(layer, (layers.MultiAggregation, layers.PathEncoder))
    ]


def outputs(name: str, layer: nn.Module, dtype: torch.dtype = torch.double) -> list[Tensor]:
    torch.manual_seed(2)
    return tensors(LAYERS[name].call(layer, *LAYERS[name].inputs(Draw(dtype))))


def run(name: str, layer: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and the gradients of features."""
    inputs = LAYERS[name].inputs(Draw(requires_grad=True))
    leaves = [leaf for leaf in tensors(inputs) if leaf.requires_grad]
    torch.manual_seed(2)
    outs = [out for out in tensors(LAYERS[name].call(layer, *inputs)) if out.requires_grad]
    grads = torch.autograd.grad(
        sum((out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out).cos()).sum() for out in outs),
        [*leaves, *layer.parameters()],
        allow_unused=True,
    )
    for parameter, grad in zip(layer.parameters(), grads[len(leaves) :], strict=True):
        parameter.grad = grad
    return outs, [grad for grad in grads[: len(leaves)] if grad is not None]


class Scaled(nn.Module):
    """A wrapper with a parameter of its own, as adapters are; it has nothing that the module inside has."""

    def __init__(self, inside: nn.Module):
        super().__init__()
        self.inside, self.factor = inside, nn.Parameter(torch.tensor(2.0, dtype=torch.double))

    def forward(self, *args: object) -> Tensor:
        return self.inside(*args) * self.factor


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def replace(layer: nn.Module, path: str, part: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(layer.get_submodule(parent), name, part)


def with_hook(layer: nn.Module, path: str) -> None:
    layer.get_submodule(path).register_forward_hook(lambda module, inputs, out: 2 * out)


def with_global_hook(layer: nn.Module, path: str) -> object:
    part = layer.get_submodule(path)
    return nn.modules.module.register_module_forward_hook(
        lambda module, inputs, out: 2 * out if module is part else None
    )


def with_pre_hook(layer: nn.Module, path: str) -> None:
    def twice(module: nn.Module, inputs: tuple) -> tuple:
        return (2 * inputs[0].clone(), *inputs[1:]) if inputs[0].is_floating_point() else (inputs[0].clone(),)

    layer.get_submodule(path).register_forward_pre_hook(twice)


def with_patch(layer: nn.Module, path: str) -> None:
    part = layer.get_submodule(path)
    part.forward = types.MethodType(lambda self, *args: 2 * type(self).forward(self, *args), part)


def with_other(layer: nn.Module, path: str) -> None:
    """Another module of the same class."""
    other = copy.deepcopy(layer.get_submodule(path))
    scale(other, 2, 2)
    replace(layer, path, other)


def pruned(layer: nn.Module, path: str) -> None:
    part = layer.get_submodule(path)
    mask = torch.arange(part.weight.numel()).view(part.weight.shape) % 3 != 0
    prune.custom_from_mask(part, "weight", mask)


def normalised(layer: nn.Module, path: str) -> None:
    weight_norm(layer.get_submodule(path))


def scale(part: nn.Module, weight: float, bias: float) -> None:
    with torch.no_grad():
        part.weight.mul_(weight)
        if getattr(part, "bias", None) is not None:
            part.bias.mul_(bias)


def prune_by_hand(part: nn.Module) -> None:
    with torch.no_grad():
        part.weight[torch.arange(part.weight.numel()).view(part.weight.shape) % 3 == 0] = 0.0


#: What is done to a linear part of a layer, and what acts the same from the beginning.
INTRUSIONS = {
    "forward hook": (with_hook, lambda part: scale(part, 2, 2)),
    "global forward hook": (with_global_hook, lambda part: scale(part, 2, 2)),
    "forward pre-hook": (with_pre_hook, lambda part: scale(part, 1 if isinstance(part, nn.Embedding) else 2, 1)),
    "instance patch": (with_patch, lambda part: scale(part, 2, 2)),
    "wrapper": (
        lambda layer, path: replace(layer, path, Scaled(layer.get_submodule(path))),
        lambda part: scale(part, 2, 2),
    ),
    "swap": (with_other, lambda part: scale(part, 2, 2)),
    "pruning": (pruned, prune_by_hand),
    "weight_norm": (normalised, lambda part: None),
    "parametrization": (
        lambda layer, path: parametrize.register_parametrization(layer.get_submodule(path), "weight", Twice()),
        lambda part: scale(part, 2, 1),
    ),
}


def assert_same(found: tuple[list[Tensor], list[Tensor]], expected: tuple[list[Tensor], list[Tensor]]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    ("kind", "name"),
    mostly_slow(itertools.product(INTRUSIONS, [name for name in LAYERS if linear_parts(made(name))]), every=7),
)
def test_changed_linear_parts_act_as_if_they_had_other_weights(name, kind):
    intrude, by_hand = INTRUSIONS[kind]
    for path in linear_parts(made(name)):
        layer, expected = made(name), made(name)
        by_hand(expected.get_submodule(path))
        handle = intrude(layer, path)
        try:
            for _ in range(2):  # a graph of gradients must not be kept from one pass to the next
                assert_same(run(name, layer), run(name, expected))
            part = layer.get_submodule(path)
            own = {"wrapper": "factor", "pruning": "weight_orig", "weight_norm": "weight_g"}.get(kind)
            weight = expected.get_submodule(path).weight
            grad = weight.grad
            if own is not None and grad is not None and grad.abs().sum() > 0:
                is_normalised = (weight * grad).sum().abs() < 1e-9  # then, a factor changes nothing
                assert is_normalised or getattr(part, own).grad.abs().sum() > 0, path
                with torch.no_grad():  # and neither must what was computed from parameters
                    getattr(part, own).mul_(1.5)
                    scale(expected.get_submodule(path), 1.5, 1.5 if kind == "wrapper" else 1)
                other = made(name)
                intrude(other, path)
                other.load_state_dict(layer.state_dict())
                assert_same(run(name, other), run(name, expected))
        finally:
            if kind == "global forward hook":
                handle.remove()


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # an embedding's input has no gradient
@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@pytest.mark.parametrize("name", [name for name in LAYERS if linear_parts(made(name))])
def test_backward_hooks_are_called(name, register):
    for path in linear_parts(made(name)):
        layer, expected, seen = made(name), made(name), []
        getattr(layer.get_submodule(path), register)(lambda module, *grads, seen=seen: seen.append(grads))
        assert_same(run(name, layer), run(name, expected))
        grad = expected.get_submodule(path).weight.grad
        assert seen or grad is None or grad.abs().sum() == 0, path


@pytest.mark.parametrize("name", [name for name in LAYERS if list(made(name).parameters())])
def test_copies_after_a_backward_pass(name):
    layer = made(name)
    expected = run(name, layer)
    assert_same(run(name, copy.deepcopy(layer)), expected)


class Net(nn.Module):
    """A network in which a layer is one step."""

    def __init__(self, name: str, layer: nn.Module):
        super().__init__()
        self.name, self.inputs, self.layer = name, LAYERS[name].inputs(Draw()), layer

    def forward(self, first: Tensor) -> object:
        """With another first input."""
        given, tree = tree_flatten(self.inputs)
        return LAYERS[self.name].call(self.layer, *tree_unflatten([first, *given[1:]], tree))


#: PyG's aggregations look at the shapes of their input before they are called, and torch.fx takes no graphs in a tuple.
ONE_STEP = [
    name
    for name in LAYERS
    if (not isinstance(made(name), pyg.aggr.Aggregation) or name == "AttentionPooling")
    and name != "RelationalTransformerLayer"
]


@pytest.mark.parametrize("name", ONE_STEP)
def test_layers_are_one_step_of_what_fx_traces(name):
    net = Net(name, made(name))
    traced = torch.fx.symbolic_trace(net)
    calls = [node for node in traced.graph.nodes if node.op == "call_module"]
    assert [node.target for node in calls] == ["layer"]
    assert list(calls[0].meta["nn_module_stack"]) == ["layer"]
    first = tensors(net.inputs)[0]
    torch.testing.assert_close(tensors(traced(first)), tensors(net(first)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", [name for name in LAYERS if linear_parts(made(name)) and name != "LocalAttention"])
def test_dynamically_quantised(name):  # not LocalAttention, whose windows move by whole positions
    layer = made(name, torch.float)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(0.2)
    expected = outputs(name, layer, torch.float)
    quantised = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear})
    for out, exact in zip(outputs(name, quantised, torch.float), expected, strict=True):
        assert (out - exact).abs().max() <= 0.05 * exact.abs().max() + 0.01


def doubled(function: object) -> object:
    return lambda *args, **kwargs: 2 * function(*args, **kwargs)


def on_instance(name: str) -> object:
    def patch(conv: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        setattr(conv, name, doubled(getattr(conv, name)))

    return patch


def on_class(name: str) -> object:
    """As a subclass overrides it, or as somebody patches a whole class."""

    def patch(conv: nn.Module | type, monkeypatch: pytest.MonkeyPatch) -> None:
        cls = conv if isinstance(conv, type) else type(conv)
        monkeypatch.setattr(cls, name, doubled(getattr(cls, name)))

    return patch


#: Ways to double what a layer sums.
MACHINERY = {
    "message hook": lambda conv, _: conv.register_message_forward_hook(lambda module, inputs, out: 2 * out),
    "aggregate hook": lambda conv, _: conv.register_aggregate_forward_hook(lambda module, inputs, out: 2 * out),
    "propagate hook": lambda conv, _: conv.register_propagate_forward_hook(lambda module, inputs, out: 2 * out),
    "aggregation's hook": lambda conv, _: conv.aggr_module.register_forward_hook(lambda module, inputs, out: 2 * out),
    "aggregation's pre-hook": lambda conv, _: conv.aggr_module.register_forward_pre_hook(
        lambda module, inputs: (2 * inputs[0], *inputs[1:])
    ),
    "aggregation's patch": lambda conv, _: setattr(conv.aggr_module, "forward", doubled(conv.aggr_module.forward)),
    "patch of reduce": lambda conv, _: setattr(conv.aggr_module, "reduce", doubled(conv.aggr_module.reduce)),
    "override of PyG's update": lambda conv, patches: on_class("update")(MessagePassing, patches),
    **{f"patch of {name}": on_instance(name) for name in ("message", "aggregate", "update", "propagate")},
    **{f"override of {name}": on_class(name) for name in ("message", "aggregate", "update", "propagate")},
}
MESSAGE_PASSING = [
    name for name in LAYERS if any(isinstance(m, gattn.attention.Attention) for m in made(name).modules())
]


@pytest.mark.parametrize("name", MESSAGE_PASSING)
def test_every_way_into_message_passing_is_noticed(name, monkeypatch):
    expected, plain = None, outputs(name, made(name))
    for way, change in MACHINERY.items():
        layer = made(name)
        with monkeypatch.context() as patches:
            convs = [module for module in layer.modules() if isinstance(module, gattn.attention.Attention)]
            convs = convs[:1] if way == "override of PyG's update" else convs
            for conv in {type(conv): conv for conv in convs}.values() if way.startswith("override") else convs:
                change(conv, patches)
            out = outputs(name, layer)
        expected = out if expected is None else expected
        torch.testing.assert_close(out, expected, msg=lambda text, way=way: f"{way}: {text}")
    assert not all(torch.allclose(one, other) for one, other in zip(plain, expected, strict=True))


@torch.no_grad()
def test_a_hook_that_is_added_after_compiling_is_called():
    conv, x = layers.GATConv(F, 4), torch.randn(N, F)
    compiled = torch.compile(conv, backend="eager")
    assert compiled(x, EDGES).abs().sum() > 0
    conv.register_forward_hook(lambda module, inputs, out: 0 * out)
    assert compiled(x, EDGES).abs().sum() == 0


class Tripled(torch.Tensor):
    """A weight that is applied in a way of its own."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        out = super().__torch_function__(function, types, args, kwargs or {})
        return (3 * out).as_subclass(Tensor) if function is torch.nn.functional.linear else out


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", "TransformerConv", "ResGatedGraphConv", "GATEConv"])
def test_weights_with_functions_of_their_own_are_used_by_calling(name):
    for path in linear_parts(made(name)):
        layer, expected = made(name), made(name)
        part = layer.get_submodule(path)
        scale(expected.get_submodule(path), 3, 3)
        del part.weight
        part.register_parameter(
            "weight", nn.Parameter(expected.get_submodule(path).weight.detach().div(3).as_subclass(Tripled))
        )
        outs = [outputs(name, conv) for conv in (layer, expected)]
        torch.testing.assert_close(*outs)


def test_a_patch_of_a_class_that_is_undone_leaves_nothing_behind(monkeypatch):
    def edge_update(self, alpha_j, alpha_i, edge_attr, index, ptr, dim_size):
        return alpha_j

    with monkeypatch.context() as patches:
        patches.setattr(layers.GATConv, "edge_update", edge_update)
        layers.GATConv(F, 4)
    torch.testing.assert_close(*[outputs("GATConv", made("GATConv")) for _ in range(2)])


def test_what_replaces_the_attention_of_dna_conv(monkeypatch):
    x = torch.randn(N, 3, F, dtype=torch.double)
    for change in (
        lambda conv: conv.multi_head.register_forward_hook(lambda module, inputs, out: out.cos()),
        lambda conv: setattr(conv.multi_head, "forward", doubled(conv.multi_head.forward)),
        lambda conv: setattr(conv, "multi_head", Scaled(conv.multi_head)),
    ):
        ours, theirs = layers.DNAConv(F, heads=2).double(), pyg.DNAConv(F, heads=2).double()
        theirs.load_state_dict(ours.state_dict())
        plain = ours(x, EDGES)
        for conv in (ours, theirs):
            change(conv)
        torch.testing.assert_close(ours(x, EDGES), theirs(x, EDGES))
        assert not torch.allclose(ours(x, EDGES), plain)
