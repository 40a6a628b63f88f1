"""Layers with DGL's parameters: against their formulas, and against DGL's layers where these can be imported."""

import importlib.util
import warnings

import pytest
import torch
import torch.nn.functional as nnf
from torch_geometric.utils import coalesce

import gattn
from gattn import CompleteGraph, nn
from gattn.testing import random_edge_index

N, M, F, D, C, H, B = 6, 8, 8, 3, 4, 2, 2
EDGES = coalesce(torch.cat([random_edge_index(M, M, 20, seed=1), torch.arange(M).repeat(2, 1)], 1))
PAIRS = coalesce(torch.cat([random_edge_index(M, N, 20, seed=2), torch.arange(N).repeat(2, 1)], 1))


def randn(*shape):
    return torch.randn(shape, dtype=torch.double, requires_grad=True)


def made(layer):
    layer = layer.double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-1, 1)
    return layer


def assert_same(found, expected, leaves):
    """Outputs and their gradients."""
    results = []
    for out in (found, expected):
        parts = out if isinstance(out, tuple) else (out,)
        loss = sum((part * torch.linspace(-1, 2, part.numel()).view(part.shape)).sum() for part in parts)
        results.append(
            [*parts, *torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True, materialize_grads=True)]
        )
    torch.testing.assert_close(*results)


def dgl():
    """DGL's layers, or a skipped test."""
    if importlib.util.find_spec("dgl") is None:
        pytest.skip("DGL is not installed")
    from benchmarks.kernel_cases import import_dgl

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_dgl()


def softmax_of(logits, edges, num_targets):
    """The weights of edges, target by target."""
    weights = torch.empty_like(logits)
    for i in range(num_targets):
        mine = edges[1] == i
        weights[mine] = logits[mine].softmax(0)
    return weights


def dot_gat(conv, x, edges):
    sources, targets = x if isinstance(x, tuple) else (x, x)
    lin_src, lin_dst = (conv.fc_src, conv.fc_dst) if isinstance(x, tuple) else (conv.fc, conv.fc)
    key, query = lin_src(sources).view(-1, H, C), lin_dst(targets).view(-1, H, C)
    alpha = softmax_of((key[edges[0]] * query[edges[1]]).sum(-1) / C**0.5, edges, len(targets))
    return torch.zeros_like(query).index_add(0, edges[1], alpha.unsqueeze(-1) * key[edges[0]]), alpha.unsqueeze(-1)


def edge_gat(conv, x, edges, edge_attr):
    sources, targets = x if isinstance(x, tuple) else (x, x)
    lin_src, lin_dst = (conv.fc_src, conv.fc_dst) if isinstance(x, tuple) else (conv.fc, conv.fc)
    value, received, edge = (
        part.view(-1, H, C) for part in (lin_src(sources), lin_dst(targets), conv.fc_edge(edge_attr))
    )
    left, right = (value * conv.attn_l).sum(-1), (received * conv.attn_r).sum(-1)
    logits = nnf.leaky_relu(left[edges[0]] + right[edges[1]] + (edge * conv.attn_edge).sum(-1), 0.2)
    alpha = softmax_of(logits, edges, len(targets)).unsqueeze(-1)
    out = torch.zeros_like(received).index_add(0, edges[1], alpha * (value[edges[0]] + edge))
    return (out + conv.res_fc(targets).view(-1, H, C) + conv.bias.view(H, C)).tanh(), alpha


CONVS = {
    "DotGatConv": (lambda sizes: nn.DotGatConv(sizes, C, H), dot_gat),
    "EdgeGATConv": (lambda sizes: nn.EdgeGATConv(sizes, D, C, H, activation=torch.tanh), edge_gat),
}
each_conv = pytest.mark.parametrize("name", CONVS)


def inputs(name, bipartite):
    edges = PAIRS if bipartite else EDGES
    x = (randn(M, F), randn(N, F + 1)) if bipartite else randn(M, F)
    return (x, edges) if name == "DotGatConv" else (x, edges, randn(edges.size(1), D))


class TestConvs:
    @each_conv
    @pytest.mark.parametrize("bipartite", [False, True])
    def test_by_hand(self, name, bipartite):
        conv = made(CONVS[name][0]((F, F + 1) if bipartite else F))
        args = inputs(name, bipartite)
        leaves = [*(args[0] if bipartite else args[:1]), *args[2:], *conv.parameters()]
        expected = CONVS[name][1](conv, *args)
        assert_same(conv(*args, get_attention=True), expected, leaves)
        assert_same(conv(*args), expected[0], leaves)

    @each_conv
    def test_dgl_gives_the_same_numbers(self, name):
        library, conv = dgl(), made(CONVS[name][0](F))
        sizes = (F, C, H) if name == "DotGatConv" else (F, D, C, H)
        options = {} if name == "DotGatConv" else {"activation": torch.tanh}
        peer = getattr(library.nn.pytorch, name)(*sizes, **options).double()
        peer.load_state_dict(conv.state_dict())
        x, edges, *rest = inputs(name, False)
        graph = library.graph(tuple(edges), num_nodes=M)
        leaves = [x, *rest]
        assert_same(conv(x, edges, *rest, get_attention=True), peer(graph, x, *rest, get_attention=True), leaves)

    @each_conv
    def test_compiled_recorded_and_isolated(self, name):
        conv = made(CONVS[name][0](F))
        x, edges, *rest = inputs(name, False)
        with gattn.record_attention(conv) as records:
            expected = conv(x, edges, *rest)
        assert len(records[""]) == 1
        compiled = torch.compile(conv, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, edges, *rest), expected)
        alone = conv(x, edges[:, :0], *(e[:0] for e in rest))
        assert alone.isfinite().all()
        assert name == "EdgeGATConv" or not alone.any()

    def test_dropout(self):
        conv = made(nn.EdgeGATConv(F, D, C, H, feat_drop=0.5, attn_drop=0.5, bias=False, residual=False)).train()
        _, alpha = conv(*inputs("EdgeGATConv", False), get_attention=True)
        assert 0 < (alpha == 0).sum() < alpha.numel()
        assert conv.res_fc is conv.bias is None

    def test_wrong_inputs(self):
        with pytest.raises(ValueError, match=r"x\[1\] may not be None"):
            nn.DotGatConv((F, F), C, H)((torch.randn(M, F), None), EDGES)
        with pytest.raises(ValueError, match="needs edge_attr"):
            nn.EdgeGATConv(F, D, C, H)(torch.randn(M, F), EDGES)
        with pytest.raises(ValueError, match="edge_channels must be at least 1"):
            nn.EdgeGATConv(F, 0, C, H)
        with pytest.raises(ValueError, match="a pair for sources and targets"):
            nn.DotGatConv((F, F, F), C, H)
        with pytest.raises(TypeError, match="activation must be a function"):
            nn.EdgeGATConv(F, D, C, H, activation="relu")


def biased(layer, x, bias, hidden=None):
    """The paper's attention on one graph; `bias` is `[N, N, H]`."""
    q, k, v = (lin(x).view(len(x), H, -1) for lin in (layer.q_proj, layer.k_proj, layer.v_proj))
    logits = torch.einsum("ihc,jhc->ijh", q, k) / q.size(-1) ** 0.5
    logits = logits + bias if layer.attn_bias_type == "add" else logits * bias
    logits = logits if hidden is None else logits.masked_fill(hidden.unsqueeze(-1), -torch.inf)
    return layer.out_proj(torch.einsum("ijh,jhc->ihc", logits.softmax(1), v).flatten(1))


class TestGraphormer:
    @pytest.mark.parametrize("kind", ["add", "mul"])
    @pytest.mark.parametrize("masked", [False, True])
    def test_attention_by_hand(self, kind, masked):
        layer, x, bias = made(nn.BiasedMHA(F, H, attn_bias_type=kind)), randn(B, N, F), randn(B, N, N, H)
        hidden = torch.rand(B, N, N) < 0.4
        hidden[..., 0] = False
        mask = hidden if masked else None
        expected = [biased(layer, x[b], bias[b], hidden[b] if masked else None) for b in range(B)]
        assert_same(layer(x, bias, mask), torch.stack(expected), [x, bias, *layer.parameters()])

    @pytest.mark.parametrize("norm_first", [False, True])
    def test_dgl_gives_the_same_numbers(self, norm_first):
        dgl()
        from dgl.nn.pytorch import GraphormerLayer

        for kind in ("add", "mul"):
            layer = made(nn.GraphormerLayer(F, 12, H, kind, norm_first))
            peer = GraphormerLayer(F, 12, H, kind, norm_first).double().eval()
            peer.load_state_dict(layer.state_dict())
            x, bias = randn(B, N, F), randn(B, N, N, H)
            hidden = torch.rand(B, N, N) < 0.4
            hidden[..., 0] = False
            assert_same(layer(x, bias, hidden), peer(x, bias, hidden), [x, bias])

    @pytest.mark.parametrize("norm_first", [False, True])
    def test_the_block_by_hand(self, norm_first):
        layer, x, bias = made(nn.GraphormerLayer(F, 12, H, norm_first=norm_first)), randn(B, N, F), randn(B, N, N, H)
        first, second = layer.attn_layer_norm, layer.ffn_layer_norm
        if norm_first:
            h = x + layer.attn(first(x), bias)
            expected = h + layer.ffn(second(h))
        else:
            h = first(x + layer.attn(x, bias))
            expected = second(h + layer.ffn(h))
        assert_same(layer(x, bias), expected, [x, bias])

    def test_packed_graphs(self):
        layer, sizes = made(nn.GraphormerLayer(F, 12, H)), [3, 1, 5]
        x, table = randn(sum(sizes), F), randn(7, H)
        buckets = [torch.randint(0, 7, (size, size)) for size in sizes]
        packed = layer(x, gattn.BucketBias(buckets, table), graph=CompleteGraph.packed(sizes))
        alone = [layer(part, table[bucket]) for part, bucket in zip(x.split(sizes), buckets, strict=True)]
        assert_same(packed, torch.cat(alone), [x, table])

    def test_masked_rows_and_dropout(self):
        layer, x = made(nn.BiasedMHA(F, H, attn_drop=0.5)), randn(B, N, F)
        nothing = torch.ones(B, N, N, dtype=torch.bool)
        torch.testing.assert_close(layer(x, attn_mask=nothing), layer.out_proj.bias.expand(B, N, F))
        torch.manual_seed(0)
        assert not torch.allclose(layer.train()(x), layer.eval()(x))

    def test_compiled(self):
        layer, x, bias = made(nn.GraphormerLayer(F, 12, H)), randn(B, N, F), randn(B, N, N, H)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, bias), layer(x, bias))

    def test_wrong_inputs(self):
        layer, x = nn.BiasedMHA(F, H), torch.randn(B, N, F)
        with pytest.raises(ValueError, match=r"attn_bias must be \[2, 6, 6, 2\]"):
            layer(x, torch.randn(B, H, N, N))
        with pytest.raises(ValueError, match=r"attn_mask must be \[2, 6, 6\]"):
            layer(x, None, torch.zeros(N, N))
        with pytest.raises(TypeError, match="a tensor or a gattn.Bias"):
            layer(x, 3)
        with pytest.raises(TypeError, match="attn_bias must be of a floating-point type"):
            nn.BiasedMHA(F, H, attn_bias_type="mul")(x, torch.ones(B, N, N, H, dtype=torch.bool))
        with pytest.raises(ValueError, match="x must have 8 channels"):
            layer(torch.randn(B, N, F + 1))
        with pytest.raises(ValueError, match="x is float64, but the parameters"):
            layer(x.double())
        assert layer(x[:, :0]).shape == (B, 0, F)
        with pytest.raises(ValueError, match="no packed graph"):
            nn.BiasedMHA(F, H, attn_bias_type="mul")(x, gattn.BucketBias(torch.zeros(N, N).long(), torch.randn(1, H)))
        with pytest.raises(ValueError, match="'add' or 'mul'"):
            nn.GraphormerLayer(F, 12, H, "times")


class TestEncoders:
    def test_degrees(self):
        encoder = nn.DegreeEncoder(3, 5)
        degrees = torch.tensor([[0, 2, 9], [1, 0, 3]])
        first, second = encoder.encoder1.weight, encoder.encoder2.weight
        torch.testing.assert_close(encoder(degrees), first[[0, 2, 3]] + second[[1, 0, 3]])
        assert not first[0].any()
        one = nn.DegreeEncoder(3, 5, "in")
        torch.testing.assert_close(one(degrees[0].byte()), one.encoder.weight[[0, 2, 3]])
        torch.testing.assert_close(nn.DegreeEncoder(300, 5, "in")(degrees[0].byte()).shape, torch.Size([3, 5]))
        with pytest.raises(ValueError, match=r"degrees must be \[2, ...\]"):
            encoder(degrees[0])
        with pytest.raises(TypeError, match="must be a tensor of integers"):
            encoder(degrees.float())

    def test_distances(self):
        encoder = nn.SpatialEncoder(3, H)
        table = encoder.embedding_table.weight
        torch.testing.assert_close(encoder(torch.tensor([[-1, 0], [3, 8]])), table[[0, 1, 4, 4]].view(2, 2, H))
        assert not table[0].any()
        buckets = torch.tensor([0, 2, 9], dtype=torch.uint8)  # as transforms give them
        torch.testing.assert_close(encoder(buckets), table[[1, 3, 4]])

    def test_paths(self):
        encoder, edge_attr = made(nn.PathEncoder(2, D, H)), randn(4, D)
        paths = torch.tensor([[[-1, -1], [0, -1]], [[3, 1], [2, 2]]])
        weight = encoder.embedding_table.weight.view(2, H, D)
        by_place = torch.einsum("ed,lhd->elh", edge_attr, weight)
        expected = torch.stack(
            [
                torch.zeros(H).double(),
                by_place[0, 0],
                (by_place[3, 0] + by_place[1, 1]) / 2,
                (by_place[2, 0] + by_place[2, 1]) / 2,
            ]
        ).view(2, 2, H)
        assert_same(encoder(paths, edge_attr), expected, [edge_attr, *encoder.parameters()])
        assert torch.autograd.gradgradcheck(lambda e: encoder(paths, e), edge_attr)
        assert encoder(paths[:0], edge_attr).shape == (0, 2, H)
        assert not encoder(paths[..., :0], edge_attr).any()

    def test_dgl_gives_the_same_numbers(self):
        dgl()
        from dgl.nn.pytorch import DegreeEncoder, PathEncoder, SpatialEncoder

        def peer_of(theirs, ours):
            theirs.load_state_dict(ours.state_dict())
            return ours, theirs

        dist = torch.randint(-1, 7, (B, N, N))
        ours, theirs = peer_of(SpatialEncoder(4, H), nn.SpatialEncoder(4, H))
        torch.testing.assert_close(ours(dist), theirs(dist))
        ours, theirs = peer_of(DegreeEncoder(4, 5), nn.DegreeEncoder(4, 5))
        degrees = torch.randint(0, 7, (2, B, N))
        torch.testing.assert_close(ours(degrees), theirs(degrees))
        ours, theirs = peer_of(PathEncoder(3, D, H), nn.PathEncoder(3, D, H))
        lengths = torch.randint(0, 4, (B, N, N, 1))
        paths = torch.where(torch.arange(3) < lengths, torch.randint(0, 9, (B, N, N, 3)), -1)
        edge_attr = torch.randn(9, D)
        data = torch.cat([edge_attr, torch.zeros(1, D)])[paths]
        torch.testing.assert_close(ours(paths, edge_attr), theirs(lengths.squeeze(-1), data))

    def test_wrong_paths(self):
        encoder = nn.PathEncoder(2, D)
        with pytest.raises(ValueError, match="with up to 2 edges"):
            encoder(torch.zeros(1, 3).long(), torch.zeros(1, D))
        with pytest.raises(ValueError, match=r"edge_attr must be \[E, 3\]"):
            encoder(torch.zeros(1, 2).long(), torch.zeros(1, D + 1))
        with pytest.raises(IndexError):
            encoder(torch.full((1, 2), 5), torch.zeros(1, D))


def egt(layer, x, e, mask, num_vns):
    """DGL's formulas, graph by graph."""
    outs = []
    for b in range(len(x)):
        pairs = layer.mha_ln_e(e[b])
        q, k, v = layer.qkv_proj(layer.mha_ln_h(x[b])).view(N, -1, H).split(F // H, 1)  # [N, C, H]
        logits = torch.einsum("ich,jch->ijh", q, k).clamp(-5, 5) + layer.edge_input(pairs)
        gates = (layer.gate(pairs) + mask[b].unsqueeze(-1)).sigmoid()
        alpha = (logits + mask[b].unsqueeze(-1)).softmax(1) * gates
        scale = (1 + gates.sum(1)).log()
        scale = torch.cat([torch.ones_like(scale[:num_vns]), scale[num_vns:]])
        out = torch.einsum("ijh,jch->ich", alpha, v) * scale.unsqueeze(1)
        h = x[b] + layer.node_output(out.flatten(1))
        f = e[b] + layer.edge_output(logits)
        outs.append((h + layer.node_ffn(h), f + layer.edge_ffn(f)))
    return tuple(torch.stack(parts) for parts in zip(*outs, strict=True))


class TestEGT:
    @pytest.mark.parametrize("num_vns", [0, 2])
    def test_by_hand(self, num_vns):
        layer, x, e = made(nn.EGTLayer(F, D, H, num_vns)), randn(B, N, F), randn(B, N, N, D)
        mask = torch.randn(B, N, N, dtype=torch.double).masked_fill(torch.rand(B, N, N) < 0.3, -torch.inf)
        mask[..., 0] = 0
        leaves = [x, e, *layer.parameters()]
        assert_same(layer(x, e, mask), egt(layer, x, e, mask, num_vns), leaves)
        assert_same(layer(x, e), egt(layer, x, e, torch.zeros_like(mask), num_vns), leaves)

    def test_dgl_gives_the_same_numbers(self):
        dgl()
        from dgl.nn.pytorch import EGTLayer

        for update in (True, False):
            layer = made(nn.EGTLayer(F, D, H, 1, edge_update=update))
            peer = EGTLayer(F, D, H, 1, edge_update=update).double().eval()
            peer.load_state_dict(layer.state_dict())
            x, e = randn(B, N, F), randn(B, N, N, D)
            mask = torch.zeros(B, N, N, dtype=torch.double).masked_fill(torch.rand(B, N, N) < 0.3, -torch.inf)
            mask[..., 0] = 0
            for args in ((x, e), (x, e, mask)):
                torch.testing.assert_close(layer(*args), peer(*args))

    def test_compiled_and_dropout(self):
        layer, x, e = made(nn.EGTLayer(F, D, H, 0, attn_dropout=0.5)), randn(B, N, F), randn(B, N, N, D)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, e), layer(x, e))
        with gattn.record_attention(layer) as records:
            layer(x, e)
        assert records[""][0].weights.shape == (B, H, N, N)
        assert not torch.allclose(layer.train()(x, e)[0], layer.eval()(x, e)[0])

    def test_wrong_inputs(self):
        layer = nn.EGTLayer(F, D, H, 0)
        with pytest.raises(ValueError, match=r"edge_attr must be \[2, 6, 6, 3\]"):
            layer(torch.randn(B, N, F), torch.randn(B, N, D))
        with pytest.raises(ValueError, match=r"x must be \[B, N, 8\]"):
            layer(torch.randn(N, F), torch.randn(N, N, D))
        for mask in (0, torch.zeros(B, N, N, dtype=torch.bool)):
            with pytest.raises(TypeError, match="mask must be a tensor of floating-point numbers"):
                layer(torch.randn(B, N, F), torch.randn(B, N, N, D), mask)
