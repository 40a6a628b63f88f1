"""Checkpoints with the names of authors' programs: formulas read them by these names, our layers after conversion.

Formulas are written from the papers' equations, node by node where that is shorter, in float64.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.data import Batch, Data

import gattn
from gattn import convert, models
from gattn import nn as layers
from tests.test_authors import BATCH, SIZES, C, D, H, N, edges, pairs

T = 4
pytestmark = pytest.mark.usefixtures("in_double")


class State(dict):
    """Random weights, by name: those of linear layers, norms and tables."""

    def linear(self, name, out, inner, bias=True):
        self[f"{name}.weight"] = torch.randn(out, inner) / 2
        if bias:
            self[f"{name}.bias"] = torch.randn(out) / 2
        return self

    def norm(self, name, size, batch=False):
        self[f"{name}.weight"], self[f"{name}.bias"] = torch.rand(size) + 0.5, torch.randn(size)
        if batch:
            self[f"{name}.running_mean"], self[f"{name}.running_var"] = torch.randn(size), torch.rand(size) + 0.5
            self[f"{name}.num_batches_tracked"] = torch.tensor(3)
        return self

    def apply(self, name, x):
        """The linear layer or the norm of this name."""
        weight, bias = self[f"{name}.weight"], self.get(f"{name}.bias")
        if f"{name}.running_mean" in self:
            return F.batch_norm(x, self[f"{name}.running_mean"], self[f"{name}.running_var"], weight, bias)
        return F.linear(x, weight, bias) if weight.dim() == 2 else F.layer_norm(x, weight.shape, weight, bias)


def assert_fits(layer, converted, expected, *inputs, **options):
    layer.load_state_dict(converted)
    found = layer.eval()(*inputs, **options)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def incoming(edge_index):
    """For each node, its edges and their sources."""
    for node in range(N):
        of = (edge_index[1] == node).nonzero().flatten()
        yield node, of, edge_index[0, of]


def with_loops(edge_index):
    return torch.cat([edge_index, torch.arange(N).expand(2, -1)], 1)


def test_gatv2():
    state = (
        State(attn=torch.randn(1, H, 3), bias=torch.randn(H * 3)).linear("fc_src", H * 3, C).linear("fc_dst", H * 3, C)
    )
    x, rows = torch.randn(N, C), []
    left, right = (state.apply(name, x).view(N, H, 3) for name in ("fc_src", "fc_dst"))
    for node, _, sources in incoming(with_loops(edges())):
        scores = (F.leaky_relu(left[sources] + right[node], 0.2) * state["attn"]).sum(-1)
        rows.append((scores.softmax(0).unsqueeze(-1) * left[sources]).sum(0).flatten() + state["bias"])
    assert_fits(layers.GATv2Conv(C, 3, H), convert.gatv2(state), torch.stack(rows), x, edges())


@pytest.mark.parametrize("attention_type", ["MX", "SD"])
def test_supergat(attention_type):
    state = State(weight=torch.randn(C, H * 3), bias=torch.randn(H * 3))
    if attention_type == "MX":
        state["att_mh_1"] = torch.randn(1, H, 6)
    x, rows = torch.randn(N, C), []
    h = (x @ state["weight"]).view(N, H, 3)
    for node, _, sources in incoming(with_loops(edges())):
        products = (h[node] * h[sources]).sum(-1)
        if attention_type == "MX":
            ends = torch.cat([h[node].expand_as(h[sources]), h[sources]], -1)
            scores = (ends * state["att_mh_1"]).sum(-1) * products.sigmoid()
        else:
            scores = products / math.sqrt(3)
        weights = F.leaky_relu(scores, 0.2).softmax(0)
        rows.append((weights.unsqueeze(-1) * h[sources]).sum(0).flatten() + state["bias"])
    conv = layers.SuperGATConv(C, 3, H, attention_type=attention_type)
    assert_fits(conv, convert.supergat(state), torch.stack(rows), x, edges())


def gated_gcn_state(prefix=""):
    state = State()
    for name in "ABCDE":
        state.linear(f"{prefix}{name}", C, C)
    for name in ("bn_node_x", "bn_edge_e"):
        state.norm(prefix + name, C, batch=True)
    return state


def gated_gcn(state, x, edge_attr, prefix=""):
    a, b, c, d, e = (
        state.apply(prefix + name, given) for name, given in zip("ABCDE", (x, x, edge_attr, x, x), strict=True)
    )
    source, target = edges()
    gates, rows = d[target] + e[source] + c, []
    for node, of, sources in incoming(edges()):
        sigma = gates[of].sigmoid()
        rows.append(a[node] + (sigma * b[sources]).sum(0) / (sigma.sum(0) + 1e-6))
    x = x + state.apply(f"{prefix}bn_node_x", torch.stack(rows)).relu()
    return x, edge_attr + state.apply(f"{prefix}bn_edge_e", gates).relu()


def test_gated_gcn():
    state, x, edge_attr = gated_gcn_state(), torch.randn(N, C), torch.randn(edges().size(1), C)
    conv = layers.GatedGCNConv(C, C, C, drop_residual=False)
    assert_fits(conv, convert.gated_gcn(state), gated_gcn(state, x, edge_attr), x, edges(), edge_attr)


def graph_norm(state, name, x):
    out = []
    for part in x.split(SIZES):
        centred = part - state[f"{name}.mean_scale"] * part.mean(0)
        scaled = centred / (centred.square().mean(0) + 1e-5).sqrt()
        out.append(state[f"{name}.weight"] * scaled + state[f"{name}.bias"])
    return torch.cat(out)


@pytest.mark.parametrize(("norm", "attention"), [("batch", "multihead"), ("graph", "multihead"), ("batch", "favor")])
def test_gps(norm, attention):
    state = gated_gcn_state("local_model.").linear("ff_linear1", 2 * C, C).linear("ff_linear2", C, 2 * C)
    for name in ("norm1_local", "norm1_attn", "norm2"):
        state.norm(name, C, batch=norm == "batch")
        if norm == "graph":
            state[f"{name}.mean_scale"] = torch.rand(C)
    x, edge_attr = torch.randn(N, C), torch.randn(edges().size(1), C)
    out = []
    if attention == "multihead":
        state["self_attn.in_proj_weight"], state["self_attn.in_proj_bias"] = torch.randn(3 * C, C), torch.randn(3 * C)
        state.linear("self_attn.out_proj", C, C)
        for part in x.split(SIZES):
            rows = F.linear(part, state["self_attn.in_proj_weight"], state["self_attn.in_proj_bias"])
            q, k, v = rows.unflatten(-1, (3, H, -1)).unbind(1)
            weights = (torch.einsum("nhc,mhc->hnm", q, k) / math.sqrt(C // H)).softmax(-1)
            out.append(state.apply("self_attn.out_proj", torch.einsum("hnm,mhc->nhc", weights, v).flatten(1)))
    else:
        for name in "qkv":
            state.linear(f"self_attn.to_{name}", H * 4, C, bias=False)
        projection = state["self_attn.fast_attention.projection_matrix"] = torch.randn(5, 4)
        state.linear("self_attn.to_out", C, H * 4)
        for part in x.split(SIZES):
            q, k, v = (state.apply(f"self_attn.to_{name}", part).view(-1, H, 4) for name in "qkv")
            features = []
            for rows, over in ((q, (-1,)), (k, (0, -1))):
                rows = rows / 4**0.25
                dash = rows @ projection.t()
                length = rows.square().sum(-1, keepdim=True) / 2
                features.append((dash - length - dash.amax(over, keepdim=True)).exp() + 1e-4)
            weights = torch.einsum("nhr,mhr->hnm", *features)
            attended = torch.einsum("hnm,mhc->nhc", weights / weights.sum(-1, keepdim=True), v)
            out.append(state.apply("self_attn.to_out", attended.flatten(1)))

    def normed(name, h):
        return state.apply(name, h) if norm == "batch" else graph_norm(state, name, h)

    local, of_edges = gated_gcn(state, x, edge_attr, "local_model.")
    h = normed("norm1_local", local) + normed("norm1_attn", x + torch.cat(out))
    expected = normed("norm2", h + state.apply("ff_linear2", state.apply("ff_linear1", h).relu()))
    kwargs = {"num_features": 5} if attention == "favor" else {}
    attn = {"attn_kwargs": {"head_channels": 4}} if attention == "favor" else {}
    conv = layers.GatedGCNConv(C, C, C, drop_residual=False)
    block = layers.GPSConv(C, conv, H, attn_type=attention, norm=f"{norm}_norm", **attn)
    if kwargs:  # there are int(C ln C) features by default
        assert block.attn.fast_attn.projection.shape == (5, 4)
    assert_fits(block, convert.gps(state), (expected, of_edges), x, edges(), BATCH, edge_attr=edge_attr)


@pytest.mark.parametrize("norm", ["layer_norm", "batch_norm"])
def test_exphormer(norm):
    state = State().linear("attention.E", C, D, bias=False).linear("O_h", C, C)
    for name in "QKV":
        state.linear(f"attention.{name}", C, C, bias=False)
    for place in (1, 2):
        state.norm(f"{norm}{place}_h", C, batch=norm == "batch_norm")
    state.linear("FFN_h_layer1", 2 * C, C).linear("FFN_h_layer2", C, 2 * C)
    x, edge_attr = torch.randn(N, C), torch.randn(edges().size(1), D)
    q, k, v = (state.apply(f"attention.{name}", x).view(N, H, -1) for name in "QKV")
    e, rows = state.apply("attention.E", edge_attr).view(-1, H, C // H), []
    for node, of, sources in incoming(edges()):
        scores = (q[node] * k[sources] * e[of] / math.sqrt(C // H)).sum(-1, keepdim=True).clamp(-5, 5).exp()
        rows.append(((scores * v[sources]).sum(0) / scores.sum(0)).flatten())
    h = state.apply(f"{norm}1_h", x + torch.stack(rows))
    expected = state.apply(f"{norm}2_h", h + state.apply("FFN_h_layer2", state.apply("FFN_h_layer1", h).relu()))
    layer = layers.ExphormerLayer(C, D, H, layer_norm=norm == "layer_norm", batch_norm=norm == "batch_norm")
    assert_fits(layer, convert.exphormer(state), expected, x, edges(), edge_attr)


def test_grit():
    state, size = State().linear("O_h", C, C).linear("O_e", C, C), C // H
    for name in "QKV":
        state.linear(f"attention.{name}", C, C, bias=name == "Q")
    state.linear("attention.E", 2 * C, C)
    state["attention.Aw"], state["attention.VeRow"] = torch.randn(size, H, 1), torch.randn(size, H, size)
    state["deg_coef"] = torch.randn(1, C, 2)
    for name in ("batch_norm1_h", "batch_norm1_e", "batch_norm2_h"):
        state.norm(name, C, batch=True)
    state.linear("FFN_h_layer1", 2 * C, C).linear("FFN_h_layer2", C, 2 * C)
    x, edge_attr, degree = torch.randn(N, C), torch.randn(pairs().size(1), C), torch.randint(1, 5, (N,)).double()
    q, k, v = (state.apply(f"attention.{name}", x).view(N, H, size) for name in "QKV")
    source, target = pairs()
    weight, shift = state.apply("attention.E", edge_attr).view(-1, H, 2 * size).chunk(2, -1)
    product = (q[target] + k[source]) * weight
    pair = (product.sign() * product.abs().sqrt() + shift).relu()
    scores = torch.einsum("ehc,ch->eh", pair, state["attention.Aw"].squeeze(-1)).clamp(-5, 5)
    rows = []
    for _, of, sources in incoming(pairs()):
        alpha = scores[of].softmax(0).unsqueeze(-1)
        more = torch.einsum("hc,chd->hd", (alpha * pair[of]).sum(0), state["attention.VeRow"])
        rows.append(((alpha * v[sources]).sum(0) + more).flatten())
    h = torch.stack(rows)
    h = (torch.stack([h, h * degree.log1p().unsqueeze(1)], -1) * state["deg_coef"]).sum(-1)
    h = state.apply("batch_norm1_h", x + state.apply("O_h", h))
    of_pairs = state.apply("batch_norm1_e", edge_attr + state.apply("O_e", pair.flatten(1)))
    out = state.apply("batch_norm2_h", h + state.apply("FFN_h_layer2", state.apply("FFN_h_layer1", h).relu()))
    assert_fits(layers.GRITLayer(C, H), convert.grit(state), (out, of_pairs), x, pairs(), edge_attr, degree)


def test_egt():
    state, size = State().norm("mha_ln_h", C).norm("mha_ln_e", D), C // H
    state.linear("lin_QKV", 3 * C, C).linear("lin_E", H, D).linear("lin_G", H, D).linear("lin_O_h", C, C)
    state.linear("lin_O_e", D, H).norm("ffn_ln_h", C).norm("ffn_ln_e", D)
    state.linear("lin_W_h_1", 2 * C, C).linear("lin_W_h_2", C, 2 * C).linear("lin_W_e_1", 2 * D, D)
    state.linear("lin_W_e_2", D, 2 * D)
    x, edge_attr = torch.randn(N, C), torch.randn(pairs().size(1), D)
    q, k, v = state.apply("lin_QKV", state.apply("mha_ln_h", x)).view(N, 3 * size, H).split(size, 1)
    of_pairs = state.apply("mha_ln_e", edge_attr)
    source, target = pairs()
    logits = ((q[target] * k[source]).sum(1) / math.sqrt(size)).clamp(-5, 5) + state.apply("lin_E", of_pairs)
    gates, rows = state.apply("lin_G", of_pairs).sigmoid(), []
    for _, of, sources in incoming(pairs()):
        weights = logits[of].softmax(0) * gates[of]
        row = torch.einsum("eh,ech->ch", weights, v[sources]) * gates[of].sum(0).log1p()
        rows.append(row.flatten())
    h = x + state.apply("lin_O_h", torch.stack(rows))
    h = h + state.apply("lin_W_h_2", F.elu(state.apply("lin_W_h_1", state.apply("ffn_ln_h", h))))
    e = edge_attr + state.apply("lin_O_e", logits)
    e = e + state.apply("lin_W_e_2", F.elu(state.apply("lin_W_e_1", state.apply("ffn_ln_e", e))))
    assert_fits(layers.EGTBlock(C, D, H, scale_degree=True), convert.egt(state), (h, e), x, pairs(), edge_attr)


def test_lpformer():
    """With one link that has no nodes around it but common neighbours; formulas of the network are in test_authors."""
    theirs, state = models.LPFormer(C, 6, ppr_thresholds=[0, 1, 1], gnn_norm="node").eval(), State()
    score = State()
    for name, tensor in theirs.state_dict().items():
        tensor = torch.randn_like(tensor)
        if name.startswith("score_func."):
            score[name.replace("score_func.linears", "lins")] = tensor
            continue
        name = name.replace("gnn.convs", "node_encoder.gnn_encoder.convs")
        name = name.replace("gnn.norms", "node_encoder.gnn_encoder.lns")
        for part in ("att", "bias", "lin_l.weight", "lin_l.bias", "lin_r.weight", "lin_r.bias"):
            name = f"att_layers.0.att.{part}" if name == f"att_layers.0.{part}" else name
        state[name] = tensor
    state.linear("node_encoder.feat_transform", 6, C)
    found = convert.lpformer(state, score)
    assert found.keys() == theirs.state_dict().keys()
    theirs.load_state_dict(found)
    assert (theirs.att_layers[0].lin_r.weight == state["att_layers.0.att.lin_r.weight"]).all()
    assert (theirs.gnn.norms[1].weight == state["node_encoder.gnn_encoder.lns.1.weight"]).all()
    assert (theirs.score_func.linears[1].weight == score["lins.1.weight"]).all()


def neighbours():
    index = torch.tensor([[0, 1, 2, 3, 4, 5], [2, 2, 2, 3, 4, 4]])  # the last nodes have none
    return torch.randn(N, C), index, torch.rand(6) * 50, torch.randn(6, D)


@pytest.mark.parametrize("program", ["tgn", "tgat"])
def test_temporal_attention(program):
    width = C + T if program == "tgn" else C + D + T
    state, of_key = State(), C + D + T
    if program == "tgn":
        clock = State({"w.weight": torch.randn(T, 1), "w.bias": torch.randn(T)})
        state["multi_head_target.q_proj_weight"] = torch.randn(width, width) / 2
        for name in "kv":
            state[f"multi_head_target.{name}_proj_weight"] = torch.randn(width, of_key) / 2
        state["multi_head_target.in_proj_bias"] = torch.randn(3 * width)
        state.linear("multi_head_target.out_proj", width, width)
        frequency, phase = clock["w.weight"].flatten(), clock["w.bias"]
    else:
        clock = State(basis_freq=torch.randn(T), phase=torch.randn(T))
        for name in ("w_qs", "w_ks", "w_vs"):
            state.linear(f"multi_head_target.{name}", width, of_key, bias=False)
        state.linear("multi_head_target.fc", width, width).norm("multi_head_target.layer_norm", width)
        frequency, phase = clock.values()
    state.linear("merger.fc1", C, width + C).linear("merger.fc2", 5, C)
    x, index, time, edge_attr = neighbours()
    rows = []
    for node, of, sources in incoming(index):
        now = phase.cos()
        earlier = torch.cat([x[sources], edge_attr[of], (time[of].unsqueeze(1) * frequency + phase).cos()], 1)
        if program == "tgn":
            query, attended = torch.cat([x[node], now]), torch.zeros(width)
            biases = state["multi_head_target.in_proj_bias"].chunk(3)
            q, k, v = (
                (given @ state[f"multi_head_target.{name}_proj_weight"].t() + bias).unflatten(-1, (H, -1))
                for given, name, bias in zip((query, earlier, earlier), "qkv", biases, strict=True)
            )
        else:
            query, attended = torch.cat([x[node], torch.zeros(D), now]), torch.zeros(width)
            q, k, v = (
                state.apply(f"multi_head_target.{name}", given).unflatten(-1, (H, -1))
                for given, name in zip((query, earlier, earlier), ("w_qs", "w_ks", "w_vs"), strict=True)
            )
        if len(of):
            weights = ((q * k).sum(-1) / math.sqrt(width // H)).softmax(0).unsqueeze(-1)
            out = "out_proj" if program == "tgn" else "fc"
            attended = state.apply(f"multi_head_target.{out}", (weights * v).sum(0).flatten())
        if program == "tgat":
            attended = state.apply("multi_head_target.layer_norm", attended + query)
        hidden = state.apply("merger.fc1", torch.cat([attended, x[node]])).relu()
        rows.append(state.apply("merger.fc2", hidden))
    options = {"bias": True} if program == "tgn" else {"residual": True, "norm": True}
    conv = layers.TGATConv(C, 5, T, H, D, width // H, out_proj=True, **options)
    conv.lin_hidden, conv.lin_out = (
        layers.TGATConv(C, C, T, H, D, width // H, out_proj=True, **options).lin_hidden,
        torch.nn.Linear(C, 5),
    )
    converted = getattr(convert, program)(state, clock)
    assert_fits(conv, converted, torch.stack(rows), x, index, time, edge_attr)


@pytest.mark.parametrize("use_time", [False, True])
def test_hgt(use_time):
    """Two edge types share a relation, as they may there."""
    kinds = [("a", "to", "b"), ("b", "to", "a"), ("a", "of", "a")]
    numbers, size = [0, 0, 1], C // H
    state = State(relation_pri=torch.randn(2, H), skip=torch.randn(2))
    state["relation_att"], state["relation_msg"] = (torch.randn(2, H, size, size) for _ in range(2))
    for number in range(2):
        for name in "kqva":
            state.linear(f"{name}_linears.{number}", C, C)
        state.norm(f"norms.{number}", C)
    if use_time:
        places = torch.arange(0, C, 2) / C
        angle = torch.arange(240.0).unsqueeze(1) / 10000.0**places
        state["emb.emb.weight"] = torch.stack([angle.sin(), angle.cos()], -1).flatten(1) / math.sqrt(C)
        state.linear("emb.lin", C, C)
    x = {"a": torch.randn(5, C), "b": torch.randn(4, C)}
    graphs = {kind: gattn.testing.random_edge_index(len(x[kind[0]]), len(x[kind[-1]]), 9) for kind in kinds}
    times = {kind: torch.randint(0, 240, (9,)) for kind in kinds}
    expected = {}
    for number, target_type in enumerate("ab"):
        rows = []
        for node in range(len(x[target_type])):
            scores, messages = [], []
            q = state.apply(f"q_linears.{number}", x[target_type][node]).view(H, size)
            for kind, relation in zip(kinds, numbers, strict=True):
                if kind[-1] != target_type:
                    continue
                of = (graphs[kind][1] == node).nonzero().flatten()
                given = x[kind[0]][graphs[kind][0, of]]
                if use_time:
                    given = given + state.apply("emb.lin", state["emb.emb.weight"][times[kind][of]])
                source = "ab".index(kind[0])
                k, v = (state.apply(f"{name}_linears.{source}", given).view(-1, H, size) for name in "kv")
                k = torch.einsum("ehc,hcd->ehd", k, state["relation_att"][relation])
                scores.append((q * k).sum(-1) * state["relation_pri"][relation] / math.sqrt(size))
                messages.append(torch.einsum("ehc,hcd->ehd", v, state["relation_msg"][relation]))
            weights = torch.cat(scores).softmax(0).unsqueeze(-1)
            rows.append((weights * torch.cat(messages)).sum(0).flatten())
        out = state.apply(f"a_linears.{number}", F.gelu(torch.stack(rows)))
        gate = state["skip"][number].sigmoid()
        expected[target_type] = state.apply(f"norms.{number}", gate * out + (1 - gate) * x[target_type])
    conv = layers.HGTConv(C, C, (["a", "b"], kinds), H, use_norm=True, use_rte=use_time)
    converted = convert.hgt(state, ["a", "b"], kinds, numbers)
    assert_fits(conv, converted, expected, x, graphs, *([times] if use_time else []))


def test_sgformer():
    state, width = State().linear("fc", 3, 6), 6
    for part, norms in (("trans_conv", 2), ("graph_conv", 3)):
        state.linear(f"{part}.fcs.0", width, C)
        for number in range(norms):
            state.norm(f"{part}.bns.{number}", width, batch=part == "graph_conv")
    for name in "qkv":
        state.linear(f"trans_conv.convs.0.W{name}", width, width)
    for number in range(2):
        state.linear(f"graph_conv.convs.{number}.W", width, width)
    x, index = torch.randn(N, C), edges()
    h = state.apply("trans_conv.bns.0", state.apply("trans_conv.fcs.0", x)).relu()
    q, k, v = (state.apply(f"trans_conv.convs.0.W{name}", h) for name in "qkv")
    weights = q @ k.t() / (q.norm() * k.norm())
    attended = (weights @ v + N * v) / (weights.sum(1, keepdim=True) + N)
    of_all = state.apply("trans_conv.bns.1", (attended + h) / 2).relu()
    h = first = state.apply("graph_conv.bns.0", state.apply("graph_conv.fcs.0", x)).relu()
    adjacency = torch.zeros(N, N).index_put((index[1], index[0]), torch.ones(index.size(1))) + torch.eye(N)
    root = adjacency.sum(1).rsqrt()
    for number in range(2):
        out = state.apply(f"graph_conv.convs.{number}.W", root.unsqueeze(1) * adjacency * root @ h)
        h = state.apply(f"graph_conv.bns.{number + 1}", out).relu() + first
    expected = state.apply("fc", 0.8 * h + 0.2 * of_all).log_softmax(-1)
    options = {"norm": "frobenius", "qkv_bias": True, "graph_weight": 0.8}
    model = models.SGFormer(C, width, 3, trans_num_layers=1, gnn_num_layers=2, **options)
    assert_fits(model, convert.sgformer(state), expected, x, edges())


@pytest.mark.parametrize("is_global", [False, True])
def test_polynormer(is_global):
    size, width = 3, 3 * H
    state = State(betas=torch.randn(2, width)).linear("lin_in", width, C).norm("ln", width)
    for number in range(2):
        state.linear(f"h_lins.{number}", width, width).linear(f"lins.{number}", width, width).norm(
            f"lns.{number}", width
        )
        state.linear(f"local_convs.{number}.lin_src", width, width, bias=False)
        for end in ("src", "dst"):
            state[f"local_convs.{number}.att_{end}"] = torch.randn(1, H, size)
        for name in ("h_lins", "k_lins", "v_lins"):
            state.linear(f"global_attn.{name}.{number}", width, width)
        state.norm(f"global_attn.lns.{number}", width)
    state["global_attn.betas"] = torch.randn(2, width)
    state.linear("global_attn.lin_out", width, width).linear("pred_local", 4, width).linear("pred_global", 4, width)
    x, index = torch.randn(N, C), edges()
    h, total = state.apply("lin_in", x), 0.0
    for number in range(2):
        values, rows = state.apply(f"local_convs.{number}.lin_src", h).view(N, H, size), []
        to, of = ((values * state[f"local_convs.{number}.att_{end}"]).sum(-1) for end in ("dst", "src"))
        for node, _, sources in incoming(index):
            weights = F.leaky_relu(to[node] + of[sources], 0.2).softmax(0).unsqueeze(-1)
            rows.append((weights * values[sources]).sum(0).flatten())
        out = (torch.stack(rows) + state.apply(f"lins.{number}", h)).relu()
        gate, beta = state.apply(f"h_lins.{number}", h).relu(), state["betas"][number].sigmoid()
        h = (1 - beta) * state.apply(f"lns.{number}", gate * out) + beta * out
        total = total + h
    expected = state.apply("pred_local", total)
    if is_global:
        h = state.apply("ln", total)
        for number in range(2):
            k = state.apply(f"global_attn.k_lins.{number}", h).sigmoid().view(N, size, H)
            v = state.apply(f"global_attn.v_lins.{number}", h).view(N, size, H)
            weights = torch.einsum("ich,jch->ijh", k, k)
            out = torch.einsum("ijh,jch->ich", weights, v) / weights.sum(1).unsqueeze(1)
            gate = state.apply(f"global_attn.h_lins.{number}", h) + state["global_attn.betas"][number].sigmoid()
            out = state.apply(f"global_attn.lns.{number}", out.reshape(N, width)) * gate
            h = state.apply("global_attn.lin_out", out).relu()
        expected = state.apply("pred_global", h)
    options = {"qk_shared": True, "post_bn": False, "local_attn": True, "learn_beta": True}
    options |= {"lin_in": True, "qkv_bias": True}
    model = models.Polynormer(C, size, 4, local_layers=2, global_layers=2, heads=H, **options)
    model.use_global(is_global)
    model.load_state_dict(convert.polynormer(state))
    # PyG's denominator has 1e-6 more.
    torch.testing.assert_close(model.eval()(x, index), expected.log_softmax(-1), rtol=1e-5, atol=1e-5)


def graphormer_state(kinds, edge_kinds, hops, depth, prefix):
    state, node, bias = State(), "graph_encoder.graph_node_feature", "graph_encoder.graph_attn_bias"
    tables = {
        **{f"{node}.atom_encoder": (kinds + 1, C), f"{node}.in_degree_encoder": (12, C)},
        **{f"{node}.out_degree_encoder": (12, C), f"{node}.graph_token": (1, C)},
        **{f"{bias}.edge_encoder": (edge_kinds + 1, H), f"{bias}.edge_dis_encoder": (hops * H * H, 1)},
        **{f"{bias}.spatial_pos_encoder": (20, H), f"{bias}.graph_token_virtual_distance": (1, H)},
    }
    for name, size in tables.items():
        state[f"{name}.weight"] = torch.randn(size)
    state.norm("graph_encoder.emb_layer_norm", C).norm("layer_norm", C)
    for number in range(depth):
        layer = f"graph_encoder.layers.{number}"
        for name in ("q", "k", "v", "out"):
            state.linear(f"{layer}.self_attn.{name}_proj", C, C)
        state.linear(f"{layer}.fc1", C, C).linear(f"{layer}.fc2", C, C)
        state.norm(f"{layer}.self_attn_layer_norm", C).norm(f"{layer}.final_layer_norm", C)
    state.linear("lm_head_transform_weight", C, C).linear("embed_out", 3, C, bias=False)
    state.linear("masked_lm_pooler", C, C)
    state["lm_output_learned_bias"] = torch.randn(3)
    return State({prefix + name: tensor for name, tensor in state.items()}), state


@pytest.mark.parametrize("prefix", ["", "encoder."])
def test_graphormer(prefix):
    """A chain and a pair that is not joined: distances up to four, and none."""
    kinds, edge_kinds, hops, depth, cutoff = 7, 5, 3, 2, 4
    given, state = graphormer_state(kinds, edge_kinds, 5, depth, prefix)
    atoms = torch.tensor([[1, 5], [2, 6], [3, 7], [1, 6], [4, 5], [2, 7]])  # two categories each
    forth = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
    index = torch.cat([forth, forth.flip(0)], 1)
    bonds = torch.tensor([[1, 3], [2, 4], [1, 5], [2, 3]]).repeat(2, 1)
    n, node, bias = 6, "graph_encoder.graph_node_feature", "graph_encoder.graph_attn_bias"
    degree = torch.tensor([1, 2, 2, 2, 1, 0])
    x = state[f"{node}.atom_encoder.weight"][atoms].sum(1)
    x = (
        x
        + state[f"{node}.in_degree_encoder.weight"][degree + 1]
        + state[f"{node}.out_degree_encoder.weight"][degree + 1]
    )
    h = torch.cat([state[f"{node}.graph_token.weight"], x])
    steps = state[f"{bias}.edge_dis_encoder.weight"].view(-1, H, H)
    logits = torch.zeros(H, n + 1, n + 1)
    for i in range(n):
        for j in range(n):
            path = [] if n - 1 in (i, j) else list(range(min(i, j), max(i, j)))
            path = path if i < j else path[::-1]
            is_joined = n - 1 not in (i, j) or i == j
            distance = abs(i - j) if is_joined else 18
            added = state[f"{bias}.spatial_pos_encoder.weight"][distance + 1].clone()
            sums = torch.zeros(H)
            for step in range(hops):
                kind = bonds[path[step]] if step < len(path) else torch.zeros(2, dtype=torch.long)
                sums = sums + state[f"{bias}.edge_encoder.weight"][kind].mean(0) @ steps[step]
            logits[:, i + 1, j + 1] = added + sums / min(max(distance, 1), hops)
    token = state[f"{bias}.graph_token_virtual_distance.weight"][0]
    logits[:, 1:, 0] += token.unsqueeze(1)
    logits[:, 0, :] += token.unsqueeze(1)
    h = state.apply("graph_encoder.emb_layer_norm", h)
    for number in range(depth):
        layer = f"graph_encoder.layers.{number}"
        q, k, v = (state.apply(f"{layer}.self_attn.{name}_proj", h).view(n + 1, H, -1) for name in "qkv")
        weights = (torch.einsum("nhc,mhc->hnm", q, k) / math.sqrt(C // H) + logits).softmax(-1)
        out = state.apply(f"{layer}.self_attn.out_proj", torch.einsum("hnm,mhc->nhc", weights, v).flatten(1))
        h = state.apply(f"{layer}.self_attn_layer_norm", h + out)
        h = state.apply(
            f"{layer}.final_layer_norm", h + state.apply(f"{layer}.fc2", F.gelu(state.apply(f"{layer}.fc1", h)))
        )
    out = state.apply("layer_norm", F.gelu(state.apply("lm_head_transform_weight", h[0])))
    expected = state.apply("embed_out", out) + state["lm_output_learned_bias"]
    data = Data(
        F.one_hot(atoms, kinds + 1).sum(1).double(),
        index,
        F.one_hot(bonds, edge_kinds + 1).double().mean(1),
        num_nodes=n,
    )
    data = gattn.transforms.ShortestPathBuckets(cutoff, paths=True)(data)
    options = {"norm_first": False, "embedding_norm": True, "head": "gelu", "path_cutoff": hops}
    model = models.Graphormer(kinds + 1, C, 3, depth, H, cutoff, 10, edge_kinds + 1, **options)
    converted = convert.graphormer(given, cutoff, hops)
    assert_fits(model, converted, expected.unsqueeze(0), Batch.from_data_list([data]))


@pytest.mark.parametrize("norm", [False, True])
def test_set_transformer(norm):
    def mab_state(state, name, of_query, of_key):
        for end, size in (("q", of_query), ("k", of_key), ("v", of_key), ("o", C)):
            state.linear(f"{name}fc_{end}", C, size)
        for place in (0, 1) if norm else ():
            state.norm(f"{name}ln{place}", C)

    def mab(state, name, x, y):
        q, k, v = (state.apply(f"{name}fc_{end}", given) for end, given in zip("qkv", (x, y, y), strict=True))
        parts = [
            (a @ b.t() / math.sqrt(C)).softmax(-1) @ c
            for a, b, c in zip(*(rows.split(C // H, -1) for rows in (q, k, v)), strict=True)
        ]
        out = q + torch.cat(parts, -1)
        out = state.apply(f"{name}ln0", out) if norm else out
        out = out + state.apply(f"{name}fc_o", out).relu()
        return state.apply(f"{name}ln1", out) if norm else out

    state, x = State({"0.I": torch.randn(1, 3, C), "1.S": torch.randn(1, 2, C)}), torch.randn(7, D)
    mab_state(state, "0.mab0.", C, D)
    mab_state(state, "0.mab1.", D, C)
    mab_state(state, "1.mab.", C, C)
    mab_state(state, "2.mab.", C, C)
    h = mab(state, "0.mab1.", x, mab(state, "0.mab0.", state["0.I"][0], x))
    h = mab(state, "1.mab.", state["1.S"][0], h)
    expected = mab(state, "2.mab.", h, h).unsqueeze(0)
    network = torch.nn.Sequential(
        layers.InducedSetAttentionBlock(C, 3, H, norm, projected=True, in_channels=D),
        layers.PoolingByMultiheadAttention(C, 2, H, norm, projected=True, lin=False),
        layers.SetAttentionBlock(C, H, norm, projected=True),
    )
    assert_fits(network, convert.set_transformer(state), expected, x.unsqueeze(0))


def test_unknown_names_and_parts():
    state = gated_gcn_state("module.")
    layers.GatedGCNConv(C, C, C).load_state_dict(convert.gated_gcn(state))  # of DataParallel
    with pytest.raises(ValueError, match=r"no names of that repository's module: Z\.weight"):
        convert.gated_gcn({**state, "Z.weight": torch.ones(1)})
    nested = {f"layers.1.{name}": tensor for name, tensor in gated_gcn_state().items()}
    assert convert.part(nested, "layers.1").keys() == gated_gcn_state().keys()
    with pytest.raises(ValueError, match="nothing below 'blocks'"):
        convert.part(nested, "blocks")
    given, _ = graphormer_state(3, 3, 3, 1, "")
    with pytest.raises(ValueError, match="too few for cutoff=17"):
        convert.graphormer(given, 17)
