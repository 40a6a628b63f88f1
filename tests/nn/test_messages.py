"""Messages that hooks see have the shapes of those of PyG's layers, and what builds on such hooks computes the same."""

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.nn import to_hetero_with_bases
from torch_geometric.nn.models.attentive_fp import GATEConv

import gattn
from tests.nn.against_pyg import results

EDGES = torch.tensor([[0, 1, 2, 3, 1, 2], [0, 0, 1, 1, 3, 0]])

#: Each layer from its library, and the arguments of its call besides features `[N, 8]`.
LAYERS = {
    "agnn": (lambda nn: nn.AGNNConv(add_self_loops=False), ()),
    "fa": (lambda nn: nn.FAConv(8, add_self_loops=False), ("x",)),
    "gate": (lambda nn: (GATEConv if nn is pyg else nn.GATEConv)(8, 8, 5), ("edge_attr",)),
    "gat": (lambda nn: nn.GATConv(8, 6, add_self_loops=False), ()),
    "gatv2": (lambda nn: nn.GATv2Conv(8, 6, heads=2, add_self_loops=False), ()),
    "transformer": (lambda nn: nn.TransformerConv(8, 6, heads=2), ()),
    "general": (lambda nn: nn.GeneralConv(8, 6, attention=True, heads=2), ()),
    "point_transformer": (
        lambda nn: nn.PointTransformerConv(8, 8, torch.nn.Linear(8, 8), add_self_loops=False),
        ("x",),
    ),
    "res_gated": (lambda nn: nn.ResGatedGraphConv(8, 8), ()),
    "supergat": (lambda nn: nn.SuperGATConv(8, 6, heads=2, add_self_loops=False), ()),
}


def pair(name: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Our layer and PyG's, with the same parameters."""
    make, _ = LAYERS[name]
    ours, theirs = make(gattn.nn), make(pyg)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def arguments(name: str, x: Tensor, edges: Tensor) -> list[Tensor]:
    extra = LAYERS[name][1]
    first = [x] * (1 + ("x" in extra))
    edge_attr = torch.linspace(-1, 1, edges.size(1) * 5).view(-1, 5).cos()
    return [*first, edges, *([edge_attr] if "edge_attr" in extra else [])]


@pytest.mark.parametrize("name", LAYERS)
def test_hooks_see_messages_of_the_same_shape_and_can_change_them(name):
    found = []
    for conv in pair(name):
        shapes: list[torch.Size] = []

        def halve(module, inputs, out, shapes=shapes):
            shapes.append(out.shape)
            return out * torch.linspace(0, 1, out.size(0)).view(-1, *[1] * (out.dim() - 1))

        conv.register_message_forward_hook(halve)
        torch.manual_seed(0)
        found.append((shapes, conv(*arguments(name, torch.randn(4, 8), EDGES))))
    (our_shapes, ours), (their_shapes, theirs) = found
    assert our_shapes == their_shapes
    torch.testing.assert_close(ours, theirs)


class OnNodes(torch.nn.Module):
    """A layer called with the features once or twice."""

    def __init__(self, conv: torch.nn.Module, twice: bool):
        super().__init__()
        self.conv, self.twice = conv, twice

    def forward(self, x, edge_index):
        return self.conv(x, x, edge_index) if self.twice else self.conv(x, edge_index)


@pytest.mark.parametrize("num_edges", [8, 14])  # 8: as many as channels, which no check tells apart
@pytest.mark.parametrize("name", ["agnn", "fa", "point_transformer", "res_gated"])
def test_bases_of_edge_types(name, num_edges):
    types = [("paper", "written_by", "author"), ("author", "writes", "paper")]
    torch.manual_seed(0)
    x_dict = {"paper": torch.randn(5, 8).double(), "author": torch.randn(5, 8).double()}
    edges_dict = {kind: torch.randint(5, (2, num_edges // 2)) for kind in types}
    ours, theirs = (
        to_hetero_with_bases(OnNodes(conv, "x" in LAYERS[name][1]), (list(x_dict), types), num_bases=3).double()
        for conv in pair(name)
    )
    theirs.load_state_dict(ours.state_dict())

    def run(model: torch.nn.Module) -> list[Tensor]:
        out = list(model(x_dict, edges_dict).values())
        return out + list(torch.autograd.grad(sum(o.cos().sum() for o in out), list(model.parameters())))

    torch.testing.assert_close(run(ours), run(theirs))


class OneHead(gattn.nn.AGNNConv):
    """Messages with an axis for the head."""

    def message(self, x_j, alpha):
        return x_j * alpha.unsqueeze(-1)


class ManyHeads(gattn.nn.ResGatedGraphConv):
    """Messages with a head for each channel."""

    def message(self, x_j, alpha):
        return x_j * alpha.unsqueeze(-1)


@pytest.mark.parametrize(("name", "subclass"), [("agnn", OneHead), ("res_gated", ManyHeads)])
def test_a_subclass_may_make_messages_of_either_shape(name, subclass):
    conv, _ = pair(name)
    other = subclass(add_self_loops=False) if name == "agnn" else subclass(8, 8)
    other.load_state_dict(conv.state_dict())
    inputs = arguments(name, torch.randn(4, 8), EDGES)
    torch.testing.assert_close(results(other, *inputs), results(conv, *inputs))
