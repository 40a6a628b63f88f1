"""The GPS block against PyG's, and PyG's with our layers inside."""

import copy
import inspect
from functools import partial

import pytest
import torch
import torch_geometric.nn as pyg
from allpairspy import AllPairs

import gattn.nn
from gattn.nn import GATConv, GatedGCNConv, GATv2Conv, GPSConv, TransformerConv
from gattn.recording import record_attention
from gattn.testing import assert_compiles_whole, assert_permutation_equivariant

F, HEADS = 8, 4
CONVS = {
    "none": lambda: None,
    "ours": lambda: GATConv(F, F // 2, heads=2),
    "theirs": lambda: pyg.GCNConv(F, F),
}


@pytest.fixture
def batch():
    return torch.tensor([0] * 4 + [1] + [2] * 6)


@pytest.fixture
def edge_index():
    edges = torch.randint(0, 4, (2, 8)), torch.tensor([[4], [4]]), torch.randint(5, 11, (2, 15))
    return torch.cat(edges, 1)


@pytest.fixture
def x():
    return torch.randn(11, F, dtype=torch.double)


def make(conv, **kwargs):
    """PyG's block and ours, with the same weights, none of them zero or one."""
    theirs = pyg.GPSConv(F, CONVS[conv](), heads=HEADS, **kwargs)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    ours = GPSConv(F, CONVS[conv](), heads=HEADS, **kwargs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    return ours.double(), theirs.double()


def run(block, x, edge_index, batch):
    x = x.clone().requires_grad_()
    out = block(x, edge_index, batch)
    loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape).cos()).sum()
    parameters = list(block.parameters())
    return out, torch.autograd.grad(loss, [x, *parameters], allow_unused=block.conv is None)


@pytest.mark.parametrize(
    ("conv", "norm", "batched", "training"),
    list(AllPairs([list(CONVS), ["batch_norm", "graph_norm", "layer_norm", None], [False, True], [False, True]])),
)
def test_equals_pyg(conv, norm, batched, training, x, edge_index, batch):
    ours, theirs = (block.train(training) for block in make(conv, norm=norm))
    batch = batch if batched else None
    out, gradients = run(ours, x, edge_index, batch)
    expected, expected_gradients = run(theirs, x, edge_index, batch)
    torch.testing.assert_close(out, expected)
    for actual, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(actual, wanted)
    for name, buffer in theirs.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name), buffer)


def test_other_options_equal_pygs(x, edge_index, batch):
    kwargs = {"act": "leaky_relu", "act_kwargs": {"negative_slope": 0.3}, "norm_kwargs": {"eps": 0.1}}
    ours, theirs = (block.eval() for block in make("ours", **kwargs))
    torch.testing.assert_close(ours(x, edge_index, batch), theirs(x, edge_index, batch))
    different = GPSConv(F, CONVS["ours"](), heads=HEADS).double().eval()
    different.load_state_dict(theirs.state_dict())
    assert not torch.allclose(different(x, edge_index, batch), theirs(x, edge_index, batch))


def test_arguments_are_pygs():
    theirs, ours = (list(inspect.signature(block).parameters.values()) for block in (pyg.GPSConv, GPSConv))
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [(p.name, p.default) for p in theirs]


def test_same_seed_gives_same_parameters():
    torch.manual_seed(1)
    theirs = pyg.GPSConv(F, None, heads=HEADS)
    torch.manual_seed(1)
    ours = GPSConv(F, None, heads=HEADS)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter), name


def test_reset_draws_everything_anew():
    block = GPSConv(F, GATConv(F, F), heads=HEADS)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.fill_(7)
    block.reset_parameters()
    assert not any((parameter == 7).any() for parameter in block.parameters())


def test_dropout_acts_in_training_only(x, edge_index, batch):
    block = GPSConv(F, GATConv(F, F), heads=HEADS, dropout=0.5, norm=None).double()
    assert not torch.allclose(block(x, edge_index, batch), block(x, edge_index, batch))
    block.eval()
    assert torch.equal(block(x, edge_index, batch), block(x, edge_index, batch))
    # All branches dropped, only the residuals are left: x + x, and the MLP's branch.
    block = GPSConv(F, GATConv(F, F), heads=HEADS, dropout=1.0, norm=None).double()
    torch.testing.assert_close(block(x, edge_index, batch), 2 * x)


@pytest.mark.parametrize("conv", CONVS)
def test_same_seed_gives_same_dropout(conv, x, edge_index, batch):
    ours, theirs = make(conv, dropout=0.5)
    outs = []
    for block in (ours, theirs):
        torch.manual_seed(1)
        outs.append(block(x, edge_index, batch))
    torch.testing.assert_close(*outs)


def test_attention_stays_within_a_graph(x, edge_index, batch):
    block = GPSConv(F, None, heads=HEADS, norm=None).double().eval()
    out = block(x, edge_index, batch)
    changed = x.clone()
    changed[4:] += 1
    other = block(changed, edge_index, batch)
    torch.testing.assert_close(other[:4], out[:4])
    assert not torch.isclose(other[4:], out[4:]).all(-1).any()
    alone = [block(part, edge_index) for part in x.split([4, 1, 6])]
    torch.testing.assert_close(out, torch.cat(alone))


def test_edge_features_reach_the_layer(x, edge_index, batch):
    block = GPSConv(F, TransformerConv(F, F, edge_dim=3), heads=HEADS).double().eval()
    edge_attr = torch.randn(edge_index.size(1), 3, dtype=torch.double)
    out = block(x, edge_index, batch, edge_attr=edge_attr)
    assert not torch.allclose(out, block(x, edge_index, batch, edge_attr=2 * edge_attr))


def test_attention_options(x, edge_index, batch):
    block = GPSConv(F, None, heads=HEADS, attn_kwargs={"num_kv_heads": 2, "qk_norm": True}).double()
    assert (block.attn.num_kv_heads, block.attn.q_norm is None) == (2, False)
    assert block(x, edge_index, batch).shape == x.shape


@pytest.mark.parametrize("conv", [GATConv, GATv2Conv, TransformerConv])
def test_pygs_block_takes_our_layers(conv, x, edge_index, batch):
    block = pyg.GPSConv(F, conv(F, F // 2, heads=2), heads=HEADS).double().eval()
    ours = GPSConv(F, conv(F, F // 2, heads=2), heads=HEADS).double().eval()
    ours.load_state_dict(block.state_dict())
    out = block(x, edge_index, batch)
    torch.testing.assert_close(ours(x, edge_index, batch), out)
    replaced = copy.deepcopy(block)
    replaced.conv = getattr(pyg, conv.__name__)(F, F // 2, heads=2).double()
    replaced.conv.load_state_dict(block.conv.state_dict())
    torch.testing.assert_close(replaced(x, edge_index, batch), out)


def test_permutation(x, edge_index):
    block = GPSConv(F, GATConv(F, F), heads=HEADS).double().eval()
    assert_permutation_equivariant(block, x, edge_index)


def test_a_graph_without_nodes_between_others(x, edge_index):
    block = GPSConv(F, None, heads=HEADS, norm=None).double().eval()
    batch = torch.tensor([0] * 4 + [2] * 7)
    expected = torch.cat([block(x[:4], edge_index), block(x[4:], edge_index)])
    torch.testing.assert_close(block(x, edge_index, batch), expected)


def test_errors(x, edge_index, batch):
    block = GPSConv(F, None, heads=HEADS).double()
    with pytest.raises(ValueError, match="ascending"):
        block(x, edge_index, batch.flip(0))
    with pytest.raises(ValueError, match="8 is not one of 3"):
        GPSConv(F, None, heads=3)


def by_the_papers(block, x, edge_index, batch, edge_attr):
    """GraphGPS's block around GatedGCN: equations 5 and 6 of the one paper, 1 to 4 of the other, written anew."""
    conv, (source, target) = block.conv, edge_index
    linear = torch.nn.functional.linear
    logits = conv.D(x)[source] + conv.E(x)[target] + conv.C(edge_attr)
    sums, total = (
        torch.zeros_like(x).index_add(0, target, logits.sigmoid() * part) for part in (conv.B(x)[source], 1.0)
    )
    nodes, edges = conv.bn_node(conv.A(x) + sums / (total + 1e-6)).relu(), conv.bn_edge(logits).relu()
    if conv.residual and conv.C.in_channels == F:
        nodes, edges = nodes + x, edges + edge_attr
    else:
        nodes = nodes + x  # the block's own
    query, key, value = (
        part.view(-1, HEADS, F // HEADS)
        for part in linear(x, block.attn.in_proj_weight, block.attn.in_proj_bias).chunk(3, -1)
    )
    products = torch.einsum("ihc,jhc->ijh", query, key) / (F // HEADS) ** 0.5
    products = products.masked_fill((batch[:, None] != batch)[..., None], -torch.inf)
    attended = block.attn.out_proj(torch.einsum("ijh,jhc->ihc", products.softmax(1), value).flatten(1))

    def norm(module, h):
        return module(h, batch=batch) if block.norm_with_batch else module(h)

    out = norm(block.norm1, nodes) + norm(block.norm2, x + attended)
    return norm(block.norm3, out + block.mlp(out)), edges


@pytest.mark.parametrize("norm", ["batch_norm", "layer_norm"])
@pytest.mark.parametrize(("residual", "edge_channels"), [(True, F), (False, F), (True, 3)])
def test_a_layer_that_also_returns_edges(norm, residual, edge_channels, x, edge_index, batch):
    """Its own residual counts once, as in the authors' program; where it has none, the block's does."""
    block = GPSConv(F, GatedGCNConv(F, edge_channels, F, residual=residual), heads=HEADS, norm=norm).double()
    leaves = [x.requires_grad_(), torch.randn(edge_index.size(1), edge_channels).double().requires_grad_()]
    leaves += block.parameters()
    found = []
    for call in (block, partial(by_the_papers, block)):
        outs = call(x, edge_index, batch, edge_attr=leaves[1])
        loss = sum((out * torch.linspace(-1, 1, out.numel()).view_as(out).cos()).sum() for out in outs)
        found.append((outs, torch.autograd.grad(loss, leaves)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)
    assert_compiles_whole(block.eval(), x, edge_index, batch, edge_attr=leaves[1])


def test_blocks_in_a_row_pass_edges_on(x, edge_index, batch):
    blocks = [GPSConv(F, GatedGCNConv(F, F, F), heads=HEADS).double() for _ in range(2)]
    edges = torch.randn(edge_index.size(1), F).double()
    for block in blocks:
        x, edges = block(x, edge_index, batch, edge_attr=edges)
    assert x.shape == (11, F)
    assert edges.shape == (edge_index.size(1), F)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("kind", ["multihead", "performer"])
def test_another_module_in_the_place_of_attention(kind, batched, x, edge_index, batch):
    ours, theirs = make("ours", norm="layer_norm")
    theirs.attn = pyg.GPSConv(F, None, HEADS, attn_type=kind).attn.double().eval()
    ours.attn = copy.deepcopy(theirs.attn)
    given = batch if batched else None
    torch.testing.assert_close(ours(x, edge_index, given), theirs(x, edge_index, given))
    ours.reset_parameters()


def test_arguments_of_attention_are_refused(x, edge_index):
    block = GPSConv(F, None, norm="layer_norm").double()
    with pytest.raises(TypeError, match="not to its attention; got attn_mask"):
        block(x, edge_index, attn_mask=torch.zeros(11, 11).bool())
    assert torch.equal(block(x, edge_index, edge_attr=x), block(x, edge_index))  # which models without edges still pass


class OfPyTorch(gattn.nn.MultiheadAttention):
    """A subclass with PyTorch's arguments alone."""

    def forward(self, query, key, value, key_padding_mask=None, need_weights=True):
        return super().forward(query, key, value, key_padding_mask, need_weights)


def test_modules_of_other_kinds_in_the_place_of_attention(x, edge_index, batch):
    ours, theirs = make("ours", norm="layer_norm")
    expected = ours(x, edge_index, batch)
    of_pytorch = OfPyTorch(F, HEADS, batch_first=True).double()
    of_pytorch.load_state_dict(ours.attn.state_dict())
    ours.attn = of_pytorch
    torch.testing.assert_close(ours(x, edge_index, batch), expected)
    for nothing in (torch.nn.Identity(), None):
        ours.attn = theirs.attn = nothing
        torch.testing.assert_close(ours(x, edge_index, batch), theirs(x, edge_index, batch))


@pytest.mark.parametrize("is_batched", [False, True])
def test_performer(is_batched):
    """PyG's numbers on one graph; on several, those of each alone."""
    pair = []
    for library in (gattn.nn, pyg):
        torch.manual_seed(0)
        pair.append(
            library.GPSConv(8, None, heads=2, norm=None, attn_type="performer", attn_kwargs={"head_channels": 4})
        )
    ours, theirs = (conv.double().eval() for conv in pair)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    x, edges = torch.randn(6, 8, dtype=torch.double), torch.tensor([[0, 1], [1, 2]])
    if not is_batched:
        batch = torch.zeros(6, dtype=torch.long)
        torch.testing.assert_close(ours(x, edges), theirs(x, edges, batch))
        torch.testing.assert_close(ours(x, edges, batch), theirs(x, edges, batch))
        with pytest.raises(ValueError, match="takes no attn_bias"):
            ours(x, edges, attn_bias=gattn.SparseBias(edges, torch.zeros(2)))
        return
    alone = torch.cat([ours(part, edges) for part in x.split([2, 4])])
    torch.testing.assert_close(ours(x, edges, torch.tensor([0, 0, 1, 1, 1, 1])), alone)


@pytest.mark.parametrize("batch", [None, torch.tensor([0, 0, 0, 1, 1, 1])])
def test_bias_of_bonds(batch):
    """As a mask of numbers of the attention, and with gradients."""
    conv = gattn.nn.GPSConv(8, None, heads=2, norm=None).double().eval()
    x, bonds = torch.randn(6, 8, dtype=torch.double), torch.tensor([[0, 1, 4], [1, 2, 3]])
    values = torch.randn(3, 2, dtype=torch.double, requires_grad=True)
    out = conv(x, bonds, batch, attn_bias=gattn.SparseBias(bonds, values))
    mask = torch.zeros(2, 6, 6, dtype=torch.double)
    mask[:, bonds[1], bonds[0]] = values.detach().t()
    if batch is not None:
        mask = mask.masked_fill(batch != batch.unsqueeze(1), -torch.inf)
    attended = conv.attn(x, x, x, attn_mask=mask, need_weights=False)[0] + x
    torch.testing.assert_close(out, attended + conv.mlp(attended))
    assert (torch.autograd.grad(out.square().sum(), values)[0] != 0).all()
    with pytest.raises(TypeError, match="must be a gattn.Bias"):
        conv(x, bonds, batch, attn_bias=mask)


NODE = {"norm": "layer_norm", "norm_kwargs": {"mode": "node"}}
BLOCKS = {
    "GAT, layer norm": (lambda: GPSConv(F, GATConv(F, 4, 2), HEADS, **NODE), True),
    "PyG's convolution, no norm": (lambda: GPSConv(F, pyg.GCNConv(F, F), HEADS, norm=None), True),
    "attention only, batch norm in evaluation": (lambda: GPSConv(F, None, HEADS), False),
    "Performer": (lambda: GPSConv(F, GATConv(F, F), HEADS, attn_type="performer", **NODE), True),
    "edges": (lambda: GPSConv(F, GatedGCNConv(F, F, F), HEADS, norm=None), True),
    "exphormer": (
        lambda: GPSConv(F, None, HEADS, attn_type="exphormer", attn_kwargs={"edge_channels": 3}, **NODE),
        True,
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("chosen", [[], [10], [0, 2, 2, 4, 7]], ids=str)
def test_targets_are_rows_of_all(x, edge_index, batch, name, batched, chosen):
    make, training = BLOCKS[name]
    block, x = make().double().train(training), x.requires_grad_()
    options = {"edge_attr": torch.randn(24, F, dtype=torch.double)} if name == "edges" else {}
    if name == "exphormer":
        options = {"attn_graph": (edge_index, torch.randn(24, 3, dtype=torch.double))}
    arguments, targets = (x, edge_index, batch if batched else None), torch.tensor(chosen, dtype=torch.long)
    found, expected = block(*arguments, targets=targets, **options), block(*arguments, **options)
    if name == "edges":
        torch.testing.assert_close(found[1], expected[1])
        found, expected = found[0], expected[0]
    expected = expected[targets]
    torch.testing.assert_close(found, expected)
    leaves = [x, *block.parameters()]
    grads = [
        torch.autograd.grad(out.sin().sum(), leaves, materialize_grads=True, allow_unused=True)
        for out in (found, expected)
    ]
    torch.testing.assert_close(*grads)


def test_attention_computes_the_targets_alone(x, edge_index, batch):
    block = GPSConv(F, GATConv(F, F), HEADS, **NODE).double()
    with record_attention(block.attn) as records:
        block(x, edge_index, targets=torch.tensor([3, 1]))
    assert records[""][0].weights.shape == (HEADS, 2, 11)


def test_targets_that_are_refused(x, edge_index, batch):
    targets = torch.tensor([1])
    for block, options, error, text in (
        (GPSConv(F, None), {}, ValueError, "BatchNorm1d reads all nodes, of which targets are some: use norm="),
        (GPSConv(F, None, norm="graph_norm").eval(), {}, ValueError, "GraphNorm reads all nodes"),
        (GPSConv(F, None, norm="layer_norm").eval(), {}, ValueError, "LayerNorm reads all nodes"),
        (
            GPSConv(F, None, norm=None),
            {"attn_bias": gattn.SparseBias(edge_index, torch.zeros(24).double())},
            ValueError,
            "attn_bias",
        ),
        (GPSConv(F, None, norm=None), {"targets": torch.tensor([11])}, IndexError, "11 targets"),
        (GPSConv(F, None, norm=None), {"targets": torch.tensor([10, 0])}, ValueError, "order of its blocks"),
        (GPSConv(F, None, norm=None), {"targets": [0]}, TypeError, "tensor of integers"),
    ):
        with pytest.raises(error, match=text):
            block.double()(x, edge_index, batch, **{"targets": targets, **options})
