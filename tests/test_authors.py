"""Layers and options that give the numbers of the authors' programs, beside formulas written from their equations.

Formulas go node by node and head by head, in float64, and share nothing with the layers but parameters.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

import gattn
from gattn.models import AttentiveFP, LPFormer
from gattn.nn import (
    EGTBlock,
    ExphormerConv,
    ExphormerLayer,
    FAConv,
    GATConv,
    GatedGCNConv,
    GPSConv,
    GRITLayer,
    HGTConv,
    InducedSetAttentionBlock,
    MultiheadAttentionBlock,
    PerformerAttention,
    PoolingByMultiheadAttention,
    RRWPEncoder,
    SetAttentionBlock,
    TGATConv,
)
from gattn.testing import random_edge_index

C, D, H = 8, 6, 2
SIZES = [4, 3, 5]
N = sum(SIZES)
BATCH = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))


pytestmark = pytest.mark.usefixtures("in_double")


def randomized(module):
    """With all parameters and statistics away from zero and one."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.7, 0.7)
        for name, buffer in module.named_buffers():
            if "running" in name:
                buffer.uniform_(0.5, 1.5)
    return module.eval()


def assert_same(found, expected, leaves):
    """Outputs and all gradients."""
    results = []
    for outs in (found, expected):
        outs = outs if isinstance(outs, tuple) else (outs,)
        asked = sum(out.sin().sum() for out in outs)
        results.append([*outs, *torch.autograd.grad(asked, leaves, materialize_grads=True, retain_graph=True)])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def leaves_of(module, *inputs):
    return [*(x for x in inputs if x.requires_grad), *module.parameters()]


def floats(*size):
    return torch.randn(size, requires_grad=True)


def pairs():
    """All pairs of each graph, and the edges of some."""
    return gattn.CompleteGraph.packed(SIZES).edge_index


def edges():
    """A ring in each graph, in both directions."""
    parts, first = [], 0
    for size in SIZES:
        ring = torch.stack([torch.arange(size), (torch.arange(size) + 1) % size])
        parts.append(to_undirected(ring) + first)
        first += size
    return torch.cat(parts, 1)


def heads(rows, count=H):
    return rows.unflatten(-1, (count, -1))


# FAVOR+ --------------------------------------------------------------------------------------------------------------


def favor_attention(layer, x):
    """SelfAttention of performer-pytorch for one graph, `[N, F]`."""
    query, key, value = (heads(lin(x), layer.heads) for lin in (layer.q, layer.k, layer.v))
    projection, channels = layer.fast_attn.projection, query.size(-1)
    out = []
    for h in range(layer.heads):
        q, k = (rows[:, h] / channels**0.25 for rows in (query, key))
        to_q, to_k = q @ projection.t(), k @ projection.t()
        shift_q, shift_k = to_q.amax(1, keepdim=True).detach(), to_k.max().detach()
        q = (to_q - q.square().sum(1, keepdim=True) / 2 - shift_q).exp() + 1e-4
        k = (to_k - k.square().sum(1, keepdim=True) / 2 - shift_k).exp() + 1e-4
        weights = q @ k.t()
        out.append(weights / weights.sum(1, keepdim=True) @ value[:, h])
    return layer.attn_out(torch.cat(out, -1))


@pytest.mark.parametrize("form", ["one", "packed", "padded"])
def test_favor(form):
    layer = randomized(PerformerAttention(C, H, head_channels=6, kernel="favor"))
    x = floats(N, C)
    parts = x.split(SIZES)
    if form == "one":
        assert_same(layer(x), favor_attention(layer, x), leaves_of(layer, x))
        return
    expected = torch.cat([favor_attention(layer, part) for part in parts])
    if form == "packed":
        found = layer(x, graph=gattn.CompleteGraph.packed(SIZES))
    else:
        mask = torch.arange(max(SIZES)) < torch.tensor(SIZES).unsqueeze(1)
        padded = nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=9.0)
        found = layer(padded, mask)[mask]
    assert_same(found, expected, leaves_of(layer, x))


def test_favor_approximates_a_softmax():
    layer = PerformerAttention(C, H, head_channels=4, kernel="favor")
    layer.fast_attn = type(layer.fast_attn)(4, num_features=4096, eps=1e-9)
    x = 0.5 * torch.randn(N, C)
    query, key, value = (heads(lin(x)) for lin in (layer.q, layer.k, layer.v))
    expected = layer.attn_out(gattn.attend(query, key, value, gattn.CompleteGraph(N)).flatten(-2))
    torch.testing.assert_close(layer(x), expected, atol=0.02, rtol=0)


def test_favor_in_a_block():
    block = randomized(GPSConv(C, GATConv(C, C), H, attn_type="favor", norm="layer_norm"))
    x = floats(N, C)
    attended = torch.cat([favor_attention(block.attn, part) for part in x.split(SIZES)])
    local = block.norm1(block.conv(x, edges()) + x, batch=BATCH)
    h = local + block.norm2(attended + x, batch=BATCH)
    expected = block.norm3(h + block.mlp(h), batch=BATCH)
    assert_same(block(x, edges(), BATCH), expected, leaves_of(block, x))


def test_favor_is_drawn_anew():
    layer = PerformerAttention(C, H, kernel="favor")
    before = layer.fast_attn.projection.clone()
    for draw in (layer.redraw_projection_matrix, layer.reset_parameters):
        draw()
        assert (layer.fast_attn.projection != before).any()
        before = layer.fast_attn.projection.clone()


def test_wrong_options_of_favor():
    with pytest.raises(ValueError, match="'favor'"):
        PerformerAttention(C, H, kernel="softmax")
    with pytest.raises(ValueError, match="eps needs stabilize"):
        gattn.features.Favor(4, stabilize=False, eps=1e-4)
    with pytest.raises(ValueError, match="eps"):
        gattn.features.Favor(4, eps=-1.0)
    query = torch.randn(5, H, 4)
    with pytest.raises(ValueError, match="mask must be booleans"):
        gattn.features.favor(query, query, torch.randn(3, 4), mask=torch.ones(4, dtype=torch.bool))


# Exphormer -----------------------------------------------------------------------------------------------------------


def exphormer(conv, x, edge_index, edge_attr):
    query, key, value = (heads(lin(x)) for lin in (conv.lin_query, conv.lin_key, conv.lin_value))
    edge = heads(conv.lin_edge(edge_attr))
    rows = []
    for target in range(x.size(0)):
        of = (edge_index[1] == target).nonzero().flatten()
        source = edge_index[0, of]
        logits = (query[target] * key[source] * edge[of]).sum(-1) / math.sqrt(query.size(-1))
        weights = logits.clamp(-5, 5).softmax(0).unsqueeze(-1)
        rows.append((weights * value[source]).sum(0).flatten())
    return torch.stack(rows)


@pytest.mark.parametrize("norm", ["layer_norm", "batch_norm", None])
@pytest.mark.parametrize("residual", [True, False])
def test_exphormers_layer(norm, residual):
    norms = {"layer_norm": norm == "layer_norm", "batch_norm": norm == "batch_norm"}
    layer = randomized(ExphormerLayer(C, D, H, residual=residual, **norms))
    x, edge_attr = floats(N, C), floats(edges().size(1), D)
    attended = exphormer(layer.attention, x, edges(), edge_attr)
    first, second = (getattr(layer, f"{norm}{place}_h", nn.Identity()) for place in (1, 2))
    h = first(x + attended if residual else attended)
    out = layer.FFN_h_layer2(layer.FFN_h_layer1(h).relu())
    expected = second(h + out if residual else out)
    assert_same(layer(x, edges(), edge_attr), expected, leaves_of(layer, x, edge_attr))


@pytest.mark.parametrize("conv", ["GatedGCN", None])
def test_exphormers_attention_beside_a_layer_on_the_edges(conv):
    """The paper's usual configuration: two graphs, each with edge features of its own."""
    conv = GatedGCNConv(C, C, C) if conv else None
    options = {"attn_type": "exphormer", "attn_kwargs": {"edge_channels": D}}
    block = randomized(GPSConv(C, conv, H, **options))
    assert isinstance(block.attn, ExphormerConv)
    more = gattn.graphs.union(edges(), gattn.graphs.expander(N, 2, batch=BATCH)).edge_index
    x, edge_attr, features = floats(N, C), floats(edges().size(1), C), floats(more.size(1), D)
    h = block.norm2(exphormer(block.attn, x, more, features) + x)
    if conv:
        local, of_edges = conv(x, edges(), edge_attr)
        h = block.norm1(local) + h
    expected = block.norm3(h + block.mlp(h))
    given = {"edge_attr": edge_attr} if conv else {}
    found = block(x, edges(), BATCH, attn_graph=(more, features), **given)
    assert_same(found, (expected, of_edges) if conv else expected, leaves_of(block, x, edge_attr, features))


def test_exphormers_attention_beside_a_layer_is_compiled_whole():
    conv, options = GatedGCNConv(C, C, C), {"attn_type": "exphormer", "attn_kwargs": {"edge_channels": D}}
    block = randomized(GPSConv(C, conv, H, norm="layer_norm", **options))
    given = {"edge_attr": torch.randn(edges().size(1), C), "attn_graph": (pairs(), torch.randn(pairs().size(1), D))}
    gattn.testing.assert_compiles_whole(block, torch.randn(N, C), edges(), BATCH, **given)


def test_wrong_uses_of_exphormers_block():
    block = GPSConv(C, None, H, attn_type="exphormer", attn_kwargs={"edge_channels": D})
    block.reset_parameters()
    with pytest.raises(ValueError, match="attn_graph"):
        block(torch.randn(N, C), edges())
    with pytest.raises(ValueError, match="attn_graph"):
        GPSConv(C, None, H)(torch.randn(N, C), edges(), attn_graph=(edges(), torch.randn(edges().size(1), D)))
    given = torch.randn(N, C), edges()
    with pytest.raises(ValueError, match="attn_bias"):
        block(*given, attn_graph=(edges(), torch.randn(edges().size(1), D)), attn_bias=gattn.nn.RadialBias(H)(given[0]))
    with pytest.raises(TypeError, match="must be a graph and"):
        block(*given, attn_graph=edges())
    with pytest.raises(TypeError, match="edge_channels"):
        GPSConv(C, None, H, attn_type="exphormer")


# GRIT ----------------------------------------------------------------------------------------------------------------


def signed_root(x):
    return x.relu().sqrt() - (-x).relu().sqrt()


def grit(layer, x, edge_index, edge_attr, degree, options):
    """The authors' block."""
    conv, size = layer.attention, C // H
    query, key, value = (heads(lin(x)) for lin in (conv.lin_query, conv.lin_key, conv.lin_value))
    weight, shift = (heads(lin(edge_attr)) for lin in (conv.lin_edge_weight, conv.lin_edge_bias))
    source, target = edge_index
    pair = (signed_root((query[target] + key[source]) * weight) + shift).relu()
    logits = torch.stack([pair[:, h] @ conv.att[h] for h in range(H)], 1).clamp(-5, 5)
    rows = []
    for node in range(x.size(0)):
        of = (target == node).nonzero().flatten()
        alpha = logits[of].softmax(0)
        parts = []
        for h in range(H):
            messages = value[source[of], h] + pair[of, h] @ conv.edge_value[h]
            parts.append(alpha[:, h] @ messages)
        rows.append(torch.cat(parts))
    h = torch.stack(rows)
    assert h.size(1) == H * size
    if conv.degree_scale is not None:
        h = h * conv.degree_scale[0] + h * degree.log1p().unsqueeze(1) * conv.degree_scale[1]
    h, e = layer.O_h(h), layer.O_e(pair.flatten(1))
    factors = [1.0 if factor is None else factor for factor in (layer.alpha1_h, layer.alpha1_e, layer.alpha2_h)]
    norm = "layer_norm" if options.get("layer_norm") else "batch_norm"
    h, e = getattr(layer, f"{norm}1_h")(x + factors[0] * h), edge_attr + factors[1] * e
    e = getattr(layer, f"{norm}1_e", nn.Identity())(e)
    out = layer.FFN_h_layer2(layer.FFN_h_layer1(h).relu())
    return getattr(layer, f"{norm}2_h")(h + factors[2] * out), e if layer.update_e else edge_attr


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layer_norm": True, "batch_norm": False},
        {"rezero": True, "norm_e": False},
        {"O_e": False, "deg_scaler": False},
        {"update_e": False},
    ],
    ids=str,
)
def test_grits_layer(options):
    layer = randomized(GRITLayer(C, H, **options))
    x, edge_attr, degree = floats(N, C), floats(pairs().size(1), C), torch.randint(1, 5, (N,)).double()
    expected = grit(layer, x, pairs(), edge_attr, degree, options)
    assert_same(layer(x, pairs(), edge_attr, degree), expected, leaves_of(layer, x, edge_attr))


def test_grits_layer_starts_as_in_its_program():
    layer = GRITLayer(512, 2, rezero=True)
    deviation = math.sqrt(2 / (2 * 512 + 2))  # Xavier's for [1, 512, 2]
    assert layer.attention.degree_scale.std().item() == pytest.approx(deviation, rel=0.1)
    assert layer.alpha1_h.item() == layer.alpha2_h.item() == layer.alpha1_e.item() == 0.0


def test_grits_dropout():
    """All of attention and of the network between is dropped."""
    layer = randomized(GRITLayer(C, H, dropout=1.0, batch_norm=False)).train()
    x, edge_attr = torch.randn(N, C), torch.randn(pairs().size(1), C)
    found, of_pairs = layer(x, pairs(), edge_attr)
    torch.testing.assert_close(found, x + layer.O_h.bias + layer.FFN_h_layer2.bias)
    torch.testing.assert_close(of_pairs, edge_attr + layer.O_e.bias)


@pytest.mark.parametrize("with_edges", [True, False])
def test_encoders_of_random_walks(with_edges):
    steps, index = 4, edges()
    index = torch.cat([index, index[:, :2]], 1)  # two edges twice, whose features are added
    data = gattn.transforms.RandomWalkPairs(steps)(Data(edge_index=index, num_nodes=N, batch=BATCH))
    walks = data.node_walks.double(), data.pair_walks.double()
    encoder = randomized(RRWPEncoder(steps, C, use_bias=True))
    x, edge_attr = floats(N, C), floats(index.size(1), C)
    given = (index, edge_attr) if with_edges else ()
    found = encoder(x, *walks, data.pair_index, *given)
    of_pairs = []
    for place, (source, target) in enumerate(data.pair_index.t()):
        row = encoder.edge_fc.weight @ walks[1][place] + encoder.edge_fc.bias
        if with_edges:
            row = row + edge_attr[(index[0] == source) & (index[1] == target)].sum(0)
        of_pairs.append(row)
    expected = x + walks[0] @ encoder.node_fc.weight.t() + encoder.node_fc.bias, torch.stack(of_pairs)
    assert_same(found, expected, leaves_of(encoder, x, edge_attr))
    with pytest.raises(ValueError, match="belong together"):
        encoder(x, *walks, data.pair_index, index)


def test_wrong_inputs_of_blocks():
    x, index = torch.randn(N, C), pairs()
    pair_attr = torch.randn(index.size(1), C)
    grit, encoder, egt_block = GRITLayer(C, H), RRWPEncoder(3, C), EGTBlock(C, C, H)
    walks = torch.rand(N, 3), torch.rand(index.size(1), 3), index
    listed = index[:, (index[1] * N + index[0]).argsort()]
    across = torch.tensor([[0], [N - 1]])
    for call, error, text in (
        (lambda: grit(x, index, pair_attr, [1] * N), TypeError, "degree must be a tensor"),
        (lambda: grit(x, index, pair_attr, torch.ones(1)), ValueError, "degree must have"),
        (lambda: grit(x.expand(2, N, C), index, pair_attr), ValueError, "x must be"),
        (lambda: ExphormerLayer(C, C)(x.expand(2, N, C), index, pair_attr), ValueError, "x must be"),
        (lambda: ExphormerLayer(C, 0), ValueError, "edge_channels"),
        (lambda: egt_block([1.0], index, pair_attr), TypeError, "x must be a tensor"),
        (lambda: egt_block(x, index, None), TypeError, "edge_attr must be a tensor"),
        (lambda: egt_block(x[:, 1:], index, pair_attr), ValueError, "x must be"),
        (lambda: egt_block(x.float(), index, pair_attr), ValueError, "x is float32"),
        (lambda: EGTBlock(C, C, node_ffn_multiplier=0.01), ValueError, "ffn_multiplier"),
        (lambda: encoder(x, walks[0][:1], *walks[1:]), ValueError, "node_walks must be"),
        (lambda: encoder(x, walks[0], walks[1][1:], index), ValueError, "pair_walks must be"),
        (lambda: encoder(x, *walks[:2], index.float()), ValueError, "pair_index must be integers"),
        (lambda: encoder(x, *walks[:2], listed, edges(), pair_attr), ValueError, "edge_attr must be"),
        (lambda: encoder(x, *walks[:2], listed, across, pair_attr[:1]), ValueError, "among the pairs"),
        (lambda: encoder(x, *walks[:2], listed.flip(1), across, pair_attr[:1]), ValueError, "among the pairs"),
    ):
        with pytest.raises(error, match=text):
            call()


# EGT -----------------------------------------------------------------------------------------------------------------


def egt(block, x, edge_index, edge_attr, virtual):
    conv = block.attention
    nodes, of_pairs = F.layer_norm(x, (C,), *norm_of(block.mha_ln_h)), block.mha_ln_e(edge_attr)
    query, key, value = (heads(lin(nodes)) for lin in (conv.lin_query, conv.lin_key, conv.lin_value))
    source, target = edge_index
    products = (query[target] * key[source]).sum(-1) / math.sqrt(C // H)
    logits = products.clamp(-conv.score.clamp, conv.score.clamp) + conv.lin_edge(of_pairs)
    gates = conv.lin_gate(of_pairs).sigmoid()
    rows, first = [], {int(node) for node in virtual}
    for node in range(x.size(0)):
        of = (target == node).nonzero().flatten()
        weights = logits[of].softmax(0) * gates[of]
        row = (weights.unsqueeze(-1) * value[source[of]]).sum(0)
        if conv.scale_degree and node not in first:
            row = row * gates[of].sum(0).log1p().unsqueeze(-1)
        rows.append(row.flatten())
    x = x + conv.lin_out(torch.stack(rows))
    x = x + network(block.node_ffn, x)
    if not block.edge_update:
        return x, edge_attr
    edge_attr = edge_attr + conv.lin_edge_out(logits)
    return x, edge_attr + network(block.edge_ffn, edge_attr)


def norm_of(norm):
    return norm.weight, norm.bias


def network(parts, x):
    norm, first, _, second, _ = parts
    return second(F.elu(first(F.layer_norm(x, x.shape[-1:], *norm_of(norm)))))


@pytest.mark.parametrize(
    "options",
    [{}, {"scale_degree": True, "num_virtual_nodes": 1}, {"edge_update": False}, {"node_ffn_multiplier": 1.0}],
    ids=str,
)
def test_egts_block(options):
    block = randomized(EGTBlock(C, D, H, **options))
    x, edge_attr = floats(N, C), floats(pairs().size(1), D)
    starts = torch.tensor([0, *SIZES]).cumsum(0)[:-1] if options.get("num_virtual_nodes") else ()
    expected = egt(block, x, pairs(), edge_attr, starts)
    assert_same(block(x, pairs(), edge_attr, BATCH), expected, leaves_of(block, x, edge_attr))


def test_egts_hidden_pairs():
    """They get no weight, but their gates count, and so do they in what becomes of pairs."""
    block = randomized(EGTBlock(C, D, H, attn_maskout=0.4))
    assert block.attention.maskout == 0.4
    x, edge_attr = torch.randn(N, C), torch.randn(pairs().size(1), D)
    block.train()
    with gattn.record_attention(block) as records:
        found = block(x, pairs(), edge_attr)
    weights = records["attention"][0].weights
    torch.testing.assert_close(found[1], block.eval()(x, pairs(), edge_attr)[1])
    hidden = weights == 0
    assert 0.2 < hidden.double().mean() < 0.6
    gates = block.attention.lin_gate(block.mha_ln_e(edge_attr)).sigmoid()
    sums = torch.zeros(N, H).index_add(0, pairs()[1], weights / gates)
    torch.testing.assert_close(sums, torch.ones(N, H))


# LPFormer ------------------------------------------------------------------------------------------------------------


def mlp(module, x):
    first, second = module.linears
    return second(module.norm(first(x)).relu())


def lpformer(model, pair, nodes, neighbours, ranks):
    """The logit of one link, from the nodes around it."""
    a, b = pair
    thresholds = model.thresh_cn, model.thresh_1hop, model.thresh_non1hop
    both = neighbours[a] & neighbours[b]
    kinds = [both, (neighbours[a] | neighbours[b]) - both, set(range(len(nodes))) - neighbours[a] - neighbours[b]]
    kinds = kinds[: 3 if thresholds[2] < 1 else 2 if thresholds[1] < 1 else 1]
    encoders = [getattr(model, f"ppr_encoder_{name}", None) for name in ("cn", "onehop", "non1hop")]
    chosen, encodings, counts = [], [], []
    for kind, threshold, encoder in zip(kinds, thresholds, encoders, strict=False):
        kept = [v for v in sorted(kind) if min(ranks[a, v], ranks[b, v]) >= threshold]
        chosen += kept
        for v in kept:
            rank = torch.stack([ranks[a, v], ranks[b, v]])
            encodings.append(mlp(encoder, rank) + mlp(encoder, rank.flip(0)))
        counts.append(float(len(kept)))
    if len(counts) > 1:
        counts.append(counts[0] + counts[1])
    ends, layer = torch.cat([nodes[a], nodes[b]]), model.att_layers[0]
    index = torch.stack([torch.zeros(len(chosen), dtype=torch.long), torch.tensor(chosen, dtype=torch.long)])
    places = torch.stack(encodings) if encodings else torch.zeros(0, nodes.size(1))
    attended = layer(index, ends.unsqueeze(0), nodes, places)[0]
    around = mlp(model.pairwise_lin, torch.cat([attended, torch.tensor(counts)]))
    score = model.score_func
    first, second = score.linears
    return second(first(torch.cat([mlp(model.elementwise_lin, nodes[a] * nodes[b]), around])).relu())


@pytest.mark.parametrize("thresholds", [[0, 1, 1], [1e-2, 1, 1], [0, 1e-4, 1], [0, 0.05, 1], None], ids=str)
def test_lpformers_kinds_of_nodes(thresholds):
    model = randomized(LPFormer(C, 6, ppr_thresholds=thresholds))
    links = torch.tensor([[0, 1, 4], [2, 3, 7]])
    index = to_undirected(random_edge_index(9, num_edges=16), num_nodes=9)
    index = index[:, index[0] != index[1]]
    for a, b in links.t():  # as in training and testing, the links themselves are no edges
        index = index[:, ~(((index[0] == a) & (index[1] == b)) | ((index[0] == b) & (index[1] == a)))]
    x, ranks = floats(9, C), torch.rand(9, 9) * 0.3
    found = model(links, x, index, ranks.to_sparse())
    nodes = model.propagate(x, index)
    neighbours = [set(index[1, index[0] == node].tolist()) for node in range(9)]
    expected = torch.stack([lpformer(model, pair, nodes, neighbours, ranks) for pair in links.t().tolist()])
    assert_same(found.squeeze(), expected.squeeze(), leaves_of(model, x))


@pytest.mark.parametrize("residual", [False, True])
def test_lpformers_convolutions(residual):
    model = randomized(LPFormer(C, C, num_gnn_layers=3, gnn_norm="node", gnn_residual=residual))
    x, index = floats(N, C), edges()
    expected = x
    for conv, norm in zip(model.gnn.convs, model.gnn.norms, strict=True):
        weight = torch.zeros(N, N).index_put((index[1], index[0]), torch.ones(index.size(1))) + torch.eye(N)
        root = weight.sum(1).rsqrt()
        out = root.unsqueeze(1) * weight * root @ (expected @ conv.lin.weight.t()) + conv.bias
        out = F.layer_norm(out, (C,), *norm_of(norm)).relu()
        expected = expected + out if residual else out
    expected = F.layer_norm(expected, (C,), *norm_of(model.gnn_norm))
    assert_same(model.propagate(x, index), expected, [x, *model.gnn.parameters()])
    model.reset_parameters()
    with pytest.raises(ValueError, match="gnn_norm"):
        LPFormer(C, C, gnn_residual=True)
    with pytest.raises(ValueError, match="gnn_norm"):
        LPFormer(C, C, gnn_norm="edge")


# Set Transformer -----------------------------------------------------------------------------------------------------


def mab(block, x, y, scale):
    attn = block.attn
    query, key, value = attn.lin_query(x), attn.lin_key(y), attn.lin_value(y)
    parts = []
    for h in range(block.heads):
        of = slice(h * C // block.heads, (h + 1) * C // block.heads)
        parts.append((query[:, of] @ key[:, of].t() * scale).softmax(-1) @ value[:, of])
    out = query + torch.cat(parts, -1)
    out = out if block.layer_norm1 is None else block.layer_norm1(out)
    out = out + block.lin(out).relu()
    return out if block.layer_norm2 is None else block.layer_norm2(out)


@pytest.mark.parametrize("layer_norm", [True, False])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_set_transformers_blocks(layer_norm, scale):
    factor = 1 / math.sqrt(C) if scale is None else scale
    options = {"projected": True, "scale": scale}
    block = randomized(MultiheadAttentionBlock(C, H, layer_norm, dim_q=5, dim_k=D, **options))
    x, y = floats(4, 5), floats(7, D)
    assert_same(block(x[None], y[None])[0], mab(block, x, y, factor), leaves_of(block, x, y))
    block = randomized(SetAttentionBlock(C, H, layer_norm, in_channels=D, **options))
    assert_same(block(y[None])[0], mab(block.mab, y, y, factor), leaves_of(block, y))
    block = randomized(InducedSetAttentionBlock(C, 3, H, layer_norm, in_channels=D, **options))
    expected = mab(block.mab2, y, mab(block.mab1, block.ind[0], y, factor), factor)
    assert_same(block(y[None])[0], expected, leaves_of(block, y))
    block, x = randomized(PoolingByMultiheadAttention(C, 3, H, layer_norm, lin=False, **options)), floats(7, C)
    assert_same(block(x[None])[0], mab(block.mab, block.seed[0], x, factor), leaves_of(block, x))


def test_set_transformers_blocks_of_padded_and_packed_sets():
    block, x = randomized(SetAttentionBlock(C, H, projected=True)), floats(N, C)
    expected = torch.cat([mab(block.mab, part, part, C**-0.5) for part in x.split(SIZES)])
    assert_same(block(x, graph=gattn.CompleteGraph.packed(SIZES)), expected, leaves_of(block, x))
    mask = torch.arange(max(SIZES)) < torch.tensor(SIZES).unsqueeze(1)
    mask = mask.flip(1)  # padding in front, which is no length
    padded = torch.full((*mask.shape, C), 3.0).masked_scatter(mask.unsqueeze(-1), x)
    assert_same(block(padded, mask)[mask], expected, leaves_of(block, x))
    assert "projected=True" in repr(block)


def test_keys_that_are_graph_convolutions():
    """Of nodes in any order, as in Graph Multiset Transformer."""
    pool = randomized(gattn.nn.GraphMultisetTransformer(C, 3, heads=H, conv=lambda: gattn.nn.GCNConv(C, C)))
    x, first = floats(N, C), pool.pma1.mab
    keys, values = (conv(x, edges()) for conv in pool.convs)
    query = first.attn.lin_query(pool.pma1.seed[0])
    parts = []
    for of in BATCH.unique():
        k, v = (rows[of == BATCH] for rows in (keys, values))
        attended = [
            (q @ a.t() / math.sqrt(C)).softmax(-1) @ b
            for q, a, b in zip(*(rows.split(C // H, -1) for rows in (query, k, v)), strict=True)
        ]
        out = query + torch.cat(attended, -1)
        parts.append(out + first.lin(out).relu())
    h = torch.stack(parts)
    for encoder in pool.encoders:
        h = encoder(h)
    expected = pool.pma2(h).squeeze(1)
    order = torch.randperm(N)
    place = order.argsort()
    found = pool(x[order], BATCH[order], edge_index=place[edges()])
    assert_same(found, expected, leaves_of(pool, x))
    with pytest.raises(ValueError, match="edge_index is for a layer with conv"):
        pool(x, BATCH)


def test_sizes_of_pygs_blocks_are_given():
    with pytest.raises(ValueError, match="projected=True"):
        MultiheadAttentionBlock(C, H, dim_q=3)


# Others --------------------------------------------------------------------------------------------------------------


def test_gated_gcn_drops_before_its_input_is_added():
    x, edge_attr = torch.randn(N, C), torch.randn(edges().size(1), C)
    for drop_residual, factor in ((True, 0.0), (False, 1.0)):
        conv = GatedGCNConv(C, C, C, dropout=1.0, drop_residual=drop_residual)
        found = conv(x, edges(), edge_attr)
        torch.testing.assert_close(found, (factor * x, factor * edge_attr))


def test_fagcns_bias():
    conv = randomized(FAConv(C, eps=0.3, add_self_loops=False, bias=True))
    x, x_0, index = floats(N, C), floats(N, C), edges()
    degree = torch.zeros(N).index_add(0, index[1], torch.ones(index.size(1)))
    rows = [0.3 * row for row in x_0]
    for source, target in index.t().tolist():
        alpha = (conv.att_r.weight[0] @ x[target] + conv.att_l.weight[0] @ x[source] + conv.att_r.bias[0]).tanh()
        rows[target] = rows[target] + alpha / (degree[source] * degree[target]).sqrt() * x[source]
    assert_same(conv(x, x_0, index), torch.stack(rows), leaves_of(conv, x, x_0))


def test_norms_of_node_types():
    names = ["a", "b"]
    metadata = names, [("a", "to", "b"), ("b", "to", "a")]
    plain, normed = (randomized(HGTConv(C, C, metadata, heads=H, use_norm=flag)) for flag in (False, True))
    normed.load_state_dict(plain.state_dict(), strict=False)
    x = {name: floats(5, C) for name in names}
    graphs = {kind: random_edge_index(5, num_edges=9) for kind in metadata[1]}
    expected = plain(x, graphs)
    found = normed(x, graphs)
    for name in names:
        norm = normed.norms[name]
        torch.testing.assert_close(found[name], F.layer_norm(expected[name], (C,), *norm_of(norm)))
    normed.reset_parameters()
    assert all((norm.weight == 1).all() for norm in normed.norms.values())


@pytest.mark.parametrize("keep_states", [False, True])
def test_states_of_attentive_fp(keep_states):
    model = randomized(AttentiveFP(C, 6, 3, D, num_layers=3, num_timesteps=2, keep_states=keep_states))
    x, index, edge_attr = floats(N, C), edges(), floats(edges().size(1), D)
    atoms = F.leaky_relu(model.lin1(x))
    state = model.gru(F.elu(model.gate_conv(atoms, index, edge_attr)), atoms)
    for conv, gru in zip(model.atom_convs, model.atom_grus, strict=True):
        state = gru(F.elu(conv(state.relu(), index)), state if keep_states else state.relu())
    atoms = state.relu()
    molecule = torch.zeros(len(SIZES), 6).index_add(0, BATCH, atoms)
    members = torch.stack([torch.arange(N), BATCH])
    for _ in range(2):
        context = F.elu(model.mol_conv((atoms, molecule.relu()), members))
        molecule = model.mol_gru(context, molecule if keep_states else molecule.relu())
    expected = model.lin2(molecule if keep_states else molecule.relu())
    assert_same(model(x, index, edge_attr, BATCH), expected, leaves_of(model, x, edge_attr))


def earlier():
    """A graph in which the last two nodes have no earlier neighbour, times and edge features."""
    index = torch.tensor([[0, 1, 2, 3, 4, 5], [2, 2, 2, 3, 4, 4]])
    return floats(7, C), index, torch.rand(6) * 50, floats(6, D)


def of_time(conv, time):
    return (time.unsqueeze(-1) * conv.frequency + conv.phase).cos()


def test_tgns_attention():
    """PyTorch's multi-head attention, among the neighbours of one node after another."""
    time_channels = 4
    width = C + time_channels
    conv = randomized(TGATConv(C, 5, time_channels, H, D, width // H, bias=True, out_proj=True))
    attention = nn.MultiheadAttention(width, H, kdim=C + D + time_channels, vdim=C + D + time_channels)
    x, index, time, edge_attr = earlier()
    with torch.no_grad():
        attention.q_proj_weight.copy_(conv.lin_query.weight)
        for name, lin, of_edge in (
            ("k", conv.lin_key, conv.lin_edge_key),
            ("v", conv.lin_value, conv.lin_edge_value),
        ):
            getattr(attention, f"{name}_proj_weight").copy_(torch.cat([lin.weight, of_edge.weight], 1))
        attention.in_proj_bias.copy_(torch.cat([lin.bias for lin in (conv.lin_query, conv.lin_key, conv.lin_value)]))
        attention.out_proj.load_state_dict(conv.out_proj.state_dict())
    now, rows = of_time(conv, torch.zeros(())), []
    for node in range(7):
        of = (index[1] == node).nonzero().flatten()
        attended = torch.zeros(width)
        if len(of):
            query = torch.cat([x[node], now]).unsqueeze(0)
            keys = torch.cat([x[index[0, of]], edge_attr[of], of_time(conv, time[of])], 1)
            attended = attention(query, keys, keys)[0][0]
        rows.append(conv.lin_out(conv.lin_hidden(torch.cat([attended, x[node]])).relu()))
    torch.testing.assert_close(conv(x, index, time, edge_attr), torch.stack(rows), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True])
def test_tgats_attention(bias):
    time_channels, size = 4, 3
    conv = randomized(TGATConv(C, 5, time_channels, H, D, size, bias=bias, out_proj=True, residual=True, norm=True))
    x, index, time, edge_attr = earlier()
    now, rows = of_time(conv, torch.zeros(())), []
    for node in range(7):
        of = (index[1] == node).nonzero().flatten()
        query = torch.cat([x[node], torch.zeros(D), now])
        attended = torch.zeros(C + D + time_channels)
        if len(of):
            q = conv.lin_query(torch.cat([x[node], now])).view(H, size)
            edge = torch.cat([edge_attr[of], of_time(conv, time[of])], 1)
            k = heads(conv.lin_key(x[index[0, of]]) + conv.lin_edge_key(edge))
            v = heads(conv.lin_value(x[index[0, of]]) + conv.lin_edge_value(edge))
            weights = ((q * k).sum(-1) / math.sqrt(size)).softmax(0).unsqueeze(-1)
            attended = conv.out_proj((weights * v).sum(0).flatten())
        out = F.layer_norm(attended + query, query.shape, *norm_of(conv.norm))
        rows.append(conv.lin_out(conv.lin_hidden(torch.cat([out, x[node]])).relu()))
    assert_same(conv(x, index, time, edge_attr), torch.stack(rows), leaves_of(conv, x, edge_attr))


def test_wrong_options_of_tgat():
    with pytest.raises(ValueError, match="out_proj"):
        TGATConv(C, 4, 4, residual=True)
    with pytest.raises(TypeError, match="norm"):
        TGATConv(C, 4, 4, norm="layer")
